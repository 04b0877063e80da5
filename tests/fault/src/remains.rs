//! The checks of a survivor after its victim is dead.

use std::time::Instant;

use rdma_core_sys::IBV_QPS_ERR;

use crate::device::{Pair, Queue, Region};
use crate::notice::LIMIT;

/// The initial value of a region's bytes.
pub(crate) const UNTOUCHED: u8 = 0x11;
/// Number of bytes that are checked on both sides of written bytes.
const AROUND: usize = 16;

/// Whether a region contains all of these bytes at the offset. Otherwise it must contain none of
/// them; in either case the bytes around them must be unchanged.
pub(crate) fn is_written(region: &Region, at: usize, bytes: &[u8]) -> bool {
    let found = region.read(at - AROUND, bytes.len() + 2 * AROUND);
    let (before, rest) = found.split_at(AROUND);
    let (inside, after) = rest.split_at(bytes.len());
    let untouched = |bytes: &[u8]| bytes.iter().all(|&byte| byte == UNTOUCHED);
    assert!(
        untouched(before) && untouched(after),
        "bytes around the target"
    );
    let written = inside == bytes;
    assert!(written || untouched(inside), "half of a write");
    written
}

/// Polls until a queue pair fails because its other end is dead. There must be no completions: the
/// caller has polled all of them.
pub(crate) fn await_error(pair: &Pair, queue: &Queue) {
    let begin = Instant::now();
    let mut wcs = Vec::new();
    while pair.state() != IBV_QPS_ERR {
        queue.poll(&mut wcs);
        assert!(
            begin.elapsed() < LIMIT,
            "a queue pair that stays connected to the dead"
        );
    }
    assert!(wcs.is_empty(), "{wcs:?}");
}
