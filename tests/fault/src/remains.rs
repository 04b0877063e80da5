//! What every survivor looks at when its victim is dead.

use std::time::Instant;

use rdma_core_sys::IBV_QPS_ERR;

use crate::device::{Pair, Queue, Region};
use crate::notice::LIMIT;

/// What a region is filled with before anybody writes to it.
pub(crate) const UNTOUCHED: u8 = 0x11;
/// Bytes on both sides of what is written.
const AROUND: usize = 16;

/// Whether all of these bytes lie at an offset of a region; else none of them does, and in either case nothing was
/// written around them.
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

/// Polls until a queue pair has failed, whose other end is dead; there are no completions by now.
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
