//! The guarantees of operation flags, fi_endpoint(3), fi_msg(3), fi_cq(3): completion levels,
//! fences, selective completion, remote data, inject, and FI_MORE.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::close;
use abi_tests::pair::{LIMIT, completion, is_empty};
use libfabric_sys::*;

use super::ends::{Ends, OURS, SIZE, THEIRS};
use super::setup;

/// Inline, within one slot of a ring, and larger than a slot.
const LENGTHS: [usize; 3] = [8, 300, 100_000];

pub(super) fn run(lib: &Lib) {
    let plain = [FI_TRANSMIT | FI_RECV];
    let setup = setup(lib, |hints| hints.caps = FI_MSG | FI_RMA | FI_ATOMIC);
    // SAFETY: fids as they are opened.
    unsafe {
        let mut ends = Ends::new(lib, &setup, &plain);
        levels(&mut ends);
        fences(&mut ends);
        injected(&mut ends);
        more(&mut ends);
        data(&mut ends);
        outlived(ends);
        let selective = [
            FI_TRANSMIT | FI_SELECTIVE_COMPLETION,
            FI_RECV | FI_SELECTIVE_COMPLETION,
        ];
        let mut ends = Ends::new(lib, &setup, &selective);
        selected(&mut ends);
        ends.close();
    }
    setup.close();
    without_data(lib);
}

unsafe fn levels(ends: &mut Ends) {
    // SAFETY: see `run`.
    unsafe {
        let all = [
            0,
            FI_INJECT_COMPLETE,
            FI_TRANSMIT_COMPLETE,
            FI_DELIVERY_COMPLETE,
        ];
        for (seed, (level, len)) in (1_u8..).zip(
            all.into_iter()
                .flat_map(|level| LENGTHS.map(|len| (level, len))),
        ) {
            // No receive is posted, so no level is reached: every level requires that the peer's
            // device has the message.
            ends.fill(OURS, 0, len, seed);
            assert_eq!(ends.send(len, 1, level), 0);
            std::thread::sleep(Duration::from_millis(3));
            assert!(
                is_empty(ends.ours),
                "level {level:#x}: nobody has received it"
            );
            ends.receive(len, 2, 0);
            // a software device may need calls at the receiver to acknowledge the message
            let got = completion(ends.theirs).expect("a receive");
            assert_eq!((got.op_context.addr(), got.len), (2, len));
            let sent = completion(ends.ours).expect("a send");
            assert_eq!(sent.op_context.addr(), 1);
            assert!(ends.holds(THEIRS, 0, len, seed), "{len} bytes");

            // a completed send's buffer can be reused before the peer has read the message
            ends.receive(len, 4, 0);
            ends.fill(OURS, 0, len, !seed);
            assert_eq!(ends.send(len, 3, level), 0);
            let sent = completion(ends.ours).expect("a send");
            assert_eq!(sent.op_context.addr(), 3);
            ends.fill(OURS, 0, len, 0);
            completion(ends.theirs).expect("a receive");
            assert!(
                ends.holds(THEIRS, 0, len, !seed),
                "changed after completion"
            );

            // written data is at the target when the write completes, without a call at the target
            ends.fill(OURS, 0, len, seed);
            assert_eq!(ends.rma(true, (0, 64, len), 5, level), 0);
            let wrote = completion(ends.ours).expect("a write");
            assert_eq!(wrote.op_context.addr(), 5);
            assert!(ends.holds(THEIRS, 64, len, seed), "not delivered");
        }
    }
}

/// A fenced operation transfers the data that the preceding read or fetching atomic returned.
unsafe fn fences(ends: &mut Ends) {
    const LEN: usize = 50_000;
    // SAFETY: see `run`.
    unsafe {
        for seed in 1..20_u8 {
            ends.fill(OURS, 0, LEN, 0);
            ends.fill(THEIRS, 0, LEN, seed);
            assert_eq!(ends.rma(false, (0, 0, LEN), 1, 0), 0);
            assert_eq!(ends.rma(true, (0, LEN, LEN), 2, FI_FENCE), 0);
            for context in 1..=2 {
                let done = completion(ends.ours).expect("an operation");
                assert_eq!(done.op_context.addr(), context);
            }
            assert!(ends.holds(THEIRS, LEN, LEN, seed), "the write went first");

            ends.fill(THEIRS, LEN, LEN, !seed);
            ends.receive(LEN, 9, 0);
            assert_eq!(ends.rma(false, (0, LEN, LEN), 3, 0), 0);
            assert_eq!(ends.send(LEN, 4, FI_FENCE), 0);
            completion(ends.theirs).expect("a receive");
            for context in 3..=4 {
                let done = completion(ends.ours).expect("an operation");
                assert_eq!(done.op_context.addr(), context);
            }
            assert!(ends.holds(THEIRS, 0, LEN, !seed), "the message went first");
        }
    }
}

unsafe fn injected(ends: &mut Ends) {
    // SAFETY: see `run`.
    unsafe {
        for len in [1, 8, 64] {
            ends.receive(64, 2, 0);
            ends.fill(OURS, 0, len, 77);
            assert_eq!(ends.send(len, 1, FI_INJECT), 0);
            ends.fill(OURS, 0, len, 0); // it is ours again
            let got = completion(ends.theirs).expect("a receive");
            assert_eq!(got.len, len);
            assert!(ends.holds(THEIRS, 0, len, 77));
            let sent = completion(ends.ours).expect("FI_INJECT completes, other than fi_inject");
            assert_eq!(sent.op_context.addr(), 1);
            ends.fill(OURS, 0, len, 78);
            assert_eq!(ends.rma(true, (0, 0, len), 3, FI_INJECT), 0);
            ends.fill(OURS, 0, len, 0);
            let wrote = completion(ends.ours).expect("a write");
            assert_eq!(wrote.op_context.addr(), 3);
            assert!(ends.holds(THEIRS, 0, len, 78));
        }
        assert!(is_empty(ends.ours) && is_empty(ends.theirs));
    }
}

/// An operation with FI_MORE does not wait for the next operation.
unsafe fn more(ends: &mut Ends) {
    // SAFETY: see `run`.
    unsafe {
        for len in LENGTHS {
            ends.receive(SIZE, 2, FI_MORE);
            ends.fill(OURS, 0, len, 5);
            assert_eq!(ends.send(len, 1, FI_MORE), 0);
            // no function is called at the sender before the message has arrived
            let got = completion(ends.theirs).expect("a receive");
            assert_eq!(got.len, len);
            assert!(ends.holds(THEIRS, 0, len, 5));
            assert_eq!(ends.rma(true, (0, 8, len), 3, FI_MORE), 0);
            for context in [1, 3] {
                let done = completion(ends.ours).expect("an operation");
                assert_eq!(done.op_context.addr(), context);
            }
            assert!(ends.holds(THEIRS, 8, len, 5));
        }
    }
}

unsafe fn data(ends: &mut Ends) {
    // SAFETY: see `run`.
    unsafe {
        // the message carries 4 bytes of remote data, as cq_data_size states
        ends.receive(64, 2, 0);
        assert_eq!(ends.send(8, 1, FI_REMOTE_CQ_DATA), 0);
        let got = completion(ends.theirs).expect("a receive");
        assert_eq!(got.flags, FI_RECV | FI_MSG | FI_REMOTE_CQ_DATA);
        assert_eq!((got.data, got.len), (7, 8));
        completion(ends.ours).expect("a send");

        // FI_RX_CQ_DATA: a write with remote data consumes a receive and does not write its buffer
        ends.fill(THEIRS, 0, 64, 1);
        ends.receive(64, 3, 0);
        ends.fill(OURS, 0, 16, 2);
        assert_eq!(ends.rma(true, (0, 128, 16), 4, FI_REMOTE_CQ_DATA), 0);
        let got = completion(ends.theirs).expect("the data");
        assert_eq!(got.flags, FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA);
        assert_eq!((got.op_context.addr(), got.data), (3, 9));
        assert!(ends.holds(THEIRS, 0, 64, 1), "the receive's buffer");
        assert!(ends.holds(THEIRS, 128, 16, 2), "the write");
        let wrote = completion(ends.ours).expect("a write");
        assert_eq!(
            (wrote.op_context.addr(), wrote.flags),
            (4, FI_RMA | FI_WRITE)
        );
        // a plain write consumes no receive
        ends.receive(64, 5, 0);
        assert_eq!(ends.rma(true, (0, 128, 16), 6, 0), 0);
        completion(ends.ours).expect("a write");
        assert!(is_empty(ends.theirs));
        assert_eq!(ends.send(8, 7, 0), 0);
        let got = completion(ends.theirs).expect("a receive");
        assert_eq!(got.op_context.addr(), 5);
        completion(ends.ours).expect("a send");
    }
}

/// A completed message arrives even if the sender is closed before the receiver reads it.
unsafe fn outlived(mut ends: Ends) {
    // SAFETY: see `run`.
    unsafe {
        const COUNT: usize = 6;
        const PLACE: usize = 20_000;
        let len = |context: usize| [8, 300, PLACE][context % 3];
        let seed = |context: usize| 100 + context as u8;
        for context in 0..COUNT {
            ends.receive_at(context * PLACE, PLACE, context, 0);
        }
        for context in 0..COUNT {
            ends.fill(OURS, 0, len(context), seed(context));
            assert_eq!(ends.send(len(context), context, FI_DELIVERY_COMPLETE), 0);
            completion(ends.ours).expect("a send");
        }
        ends.fill(OURS, 0, SIZE, 0);
        assert_eq!(close(ends.pair.client), 0);
        for context in 0..COUNT {
            let got = completion(ends.theirs).expect("a receive");
            assert_eq!((got.op_context.addr(), got.len), (context, len(context)));
            let at = context * PLACE;
            assert!(ends.holds(THEIRS, at, len(context), seed(context)));
        }
        assert_eq!(close(ends.pair.server), 0);
        for mr in ends.mr {
            assert_eq!(close(mr), 0);
        }
        assert_eq!(close(ends.theirs), 0);
    }
}

unsafe fn selected(ends: &mut Ends) {
    // SAFETY: see `run`.
    unsafe {
        for round in 0..300 {
            let (tx, rx) = (round % 3 == 0, round % 4 == 0);
            let flag = |on| if on { FI_COMPLETION } else { 0 };
            let marker = ends.at(THEIRS, 0).cast::<u8>();
            marker.write_volatile(0);
            ends.fill(OURS, 0, 8, 1);
            ends.receive(64, 1000 + round, flag(rx));
            assert_eq!(ends.send(8, round, flag(tx)), 0);
            if rx {
                let got = completion(ends.theirs).expect("a receive");
                assert_eq!(got.op_context.addr(), 1000 + round);
            } else {
                // no completion reports the write, so the test polls the memory
                let start = Instant::now();
                while marker.read_volatile() == 0 {
                    assert!(is_empty(ends.theirs), "was not selected");
                    assert!(start.elapsed() < LIMIT);
                }
            }
            if tx {
                let done = completion(ends.ours).expect("a send");
                assert_eq!(done.op_context.addr(), round);
            }
            assert!(
                is_empty(ends.ours) && is_empty(ends.theirs),
                "round {round}"
            );
        }
        // errors are reported without FI_COMPLETION too: a message longer than its receive
        ends.receive(8, 1, 0);
        assert_eq!(ends.send(64, 2, 0), 0);
        assert_eq!(
            completion(ends.theirs)
                .map(|_| ())
                .map_err(|e| (e.0, e.1.addr())),
            Err((FI_ETRUNC, 1))
        );
        assert_eq!(
            completion(ends.ours).map(|_| ()).map_err(|e| e.1.addr()),
            Err(2)
        );
    }
}

/// Without mode FI_RX_CQ_DATA a write carries no remote data, and fi_getinfo returns cq_data_size
/// 0.
fn without_data(lib: &Lib) {
    let setup = setup(lib, |hints| {
        hints.caps = FI_MSG | FI_RMA;
        hints.mode = 0;
    });
    // SAFETY: fids as they are opened.
    unsafe {
        let info = setup.info.first();
        assert_eq!((*(*info).domain_attr).cq_data_size, 0);
        assert_eq!((*(*info).rx_attr).mode & FI_RX_CQ_DATA, 0);
        let mut ends = Ends::new(lib, &setup, &[FI_TRANSMIT | FI_RECV]);
        let refused = -(FI_EOPNOTSUPP as isize);
        assert_eq!(ends.rma(true, (0, 0, 8), 1, FI_REMOTE_CQ_DATA), refused);
        assert_eq!(ends.rma(true, (0, 0, 8), 1, 0), 0);
        completion(ends.ours).expect("a write");
        let none = null_mut::<c_void>();
        let ep = ends.pair.client;
        let (addr, key) = (ends.at(THEIRS, 0).addr() as u64, (*ends.mr[THEIRS]).key);
        let ret = call!(
            (*ep).rma,
            writedata,
            ep,
            none,
            0,
            none,
            1,
            0,
            addr,
            key,
            none
        );
        assert_eq!(ret, refused);
        ends.close();
    }
    setup.close();
}
