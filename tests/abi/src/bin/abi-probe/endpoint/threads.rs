//! Threading levels, fi_domain(3): every level is accepted, and `FI_THREAD_SAFE` holds.

use std::ptr::{null_mut, with_exposed_provenance_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, cq_attr, open_cq, open_ep, register};
use abi_tests::pair::{LIMIT, Pair, Role};
use libfabric_sys::*;

use super::setup;

const SENDERS: usize = 3;
const POLLERS: usize = 2;
const RECEIVERS: usize = 2;
/// Messages per sender.
const EACH: usize = 20_000;
const COUNT: usize = SENDERS * EACH;
/// Outstanding receives.
const WINDOW: usize = 64;

pub(super) fn run(lib: &Lib) {
    for level in [
        FI_THREAD_UNSPEC,
        FI_THREAD_SAFE,
        FI_THREAD_FID,
        FI_THREAD_DOMAIN,
        FI_THREAD_COMPLETION,
        FI_THREAD_ENDPOINT,
    ] {
        // SAFETY: hints have all their parts.
        let setup = setup(lib, |hints| unsafe {
            (*hints.domain_attr).threading = level;
        });
        // SAFETY: an fi_info with all its parts; fids as they are opened.
        unsafe {
            let info = setup.info.first();
            let got = (*(*info).domain_attr).threading;
            if level == FI_THREAD_UNSPEC {
                assert_eq!(got, FI_THREAD_SAFE, "nothing is promised, so all is kept");
            } else {
                assert_eq!(got, level);
            }
            let ep = open_ep(&setup, info);
            assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
            assert_eq!(close(ep), 0);
            if level == FI_THREAD_SAFE {
                stress(lib, &setup);
            }
        }
        setup.close();
    }
}

/// An address that several threads use.
#[derive(Clone, Copy)]
struct Shared(usize);

impl Shared {
    fn of<T>(pointer: *mut T) -> Self {
        Self(pointer.expose_provenance())
    }

    fn get<T>(self) -> *mut T {
        with_exposed_provenance_mut(self.0)
    }
}

/// Counts of the threads of one run.
struct Tally {
    sent: Vec<AtomicU32>,
    completed: Vec<AtomicU32>,
    received: Vec<AtomicU32>,
    sends: AtomicUsize,
    receives: AtomicUsize,
    failed: AtomicBool,
}

impl Tally {
    fn new() -> Self {
        let zeros = || (0..COUNT).map(|_| AtomicU32::new(0)).collect();
        Self {
            sent: zeros(),
            completed: zeros(),
            received: zeros(),
            sends: AtomicUsize::new(0),
            receives: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        }
    }

    fn check(&self) {
        for (what, list) in [
            ("sent", &self.sent),
            ("completed", &self.completed),
            ("received", &self.received),
        ] {
            let wrong = list.iter().position(|n| n.load(Ordering::Relaxed) != 1);
            assert_eq!(wrong, None, "not {what} once");
        }
    }
}

/// Calls `step` until `done`, or until another thread has failed.
fn until(tally: &Tally, done: impl Fn() -> bool, mut step: impl FnMut()) {
    struct Alarm<'a>(&'a AtomicBool);
    impl Drop for Alarm<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                self.0.store(true, Ordering::Relaxed);
            }
        }
    }
    let _alarm = Alarm(&tally.failed);
    let start = Instant::now();
    while !done() && !tally.failed.load(Ordering::Relaxed) {
        assert!(start.elapsed() < 3 * LIMIT, "it takes too long");
        step();
    }
}

/// Reads up to 4 completions; returns their contexts.
unsafe fn read(cq: *mut fid_cq) -> Vec<usize> {
    // SAFETY: an open queue of the data format.
    unsafe {
        let mut entries = std::mem::zeroed::<[fi_cq_data_entry; 4]>();
        let to = entries.as_mut_ptr().cast();
        let ret = call!((*cq).ops, read, cq, to, 4);
        if ret == -(FI_EAGAIN as isize) {
            std::thread::yield_now();
            return Vec::new();
        }
        assert!((1..=4).contains(&ret), "fi_cq_read: {ret}");
        let read = &entries[..ret.cast_unsigned()];
        read.iter().map(|entry| entry.op_context.addr()).collect()
    }
}

/// Several threads post to one endpoint while others read its queue, on both sides. The contents of
/// a message are its number; inline and longer messages alternate.
unsafe fn stress(lib: &Lib, setup: &Setup) {
    // SAFETY: fids as they are opened; the memory outlives its region and the threads.
    unsafe {
        let theirs = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_NONE));
        let pair = Pair::connect(lib, setup, setup.info.first(), |ep, role| {
            let cq = match role {
                Role::Client => setup.cq,
                Role::Server => theirs,
            };
            assert_eq!(bind(ep, cq, FI_TRANSMIT | FI_RECV), 0);
        });
        const LONG: usize = 128; // more than goes inline
        let mut source = vec![0_u8; COUNT * LONG].into_boxed_slice();
        for number in 0..COUNT {
            let at = number * LONG;
            source[at..at + 8].copy_from_slice(&(number as u64).to_ne_bytes());
            source[at + LONG - 8..at + LONG].copy_from_slice(&(number as u64).to_ne_bytes());
        }
        let mut target = vec![0_u8; WINDOW * LONG].into_boxed_slice();
        let from = register(setup.domain, source.as_mut_ptr(), source.len(), FI_SEND);
        let into = register(setup.domain, target.as_mut_ptr(), target.len(), FI_RECV);
        let (client, server) = (Shared::of(pair.client), Shared::of(pair.server));
        let (ours, theirs_) = (Shared::of(setup.cq), Shared::of(theirs));
        let (from_desc, into_desc) = (Shared::of((*from).mem_desc), Shared::of((*into).mem_desc));
        let (source_at, target_at) = (
            Shared::of(source.as_mut_ptr()),
            Shared::of(target.as_mut_ptr()),
        );
        let post_receive = move |slot: usize| {
            let ep = server.get::<fid_ep>();
            let buf = target_at.get::<u8>().add(slot * LONG);
            let context = without_provenance_mut(slot);
            let desc = into_desc.get();
            call!((*ep).msg, recv, ep, buf.cast(), LONG, desc, 0, context)
        };
        for slot in 0..WINDOW {
            assert_eq!(post_receive(slot), 0);
        }
        let tally = &Tally::new();
        // all threads start together, so that their first posts are concurrent
        let start = &std::sync::Barrier::new(SENDERS);
        std::thread::scope(|scope| {
            for sender in 0..SENDERS {
                scope.spawn(move || {
                    let ep = client.get::<fid_ep>();
                    let mut next = sender * EACH;
                    let end = next + EACH;
                    let mine = std::cell::Cell::new(next);
                    start.wait();
                    until(
                        tally,
                        || mine.get() == end,
                        || {
                            let buf = source_at.get::<u8>().add(next * LONG).cast();
                            let len = if next.is_multiple_of(2) { LONG } else { 8 };
                            let context = without_provenance_mut(next);
                            let desc = from_desc.get();
                            let ret = call!((*ep).msg, send, ep, buf, len, desc, 0, context);
                            if ret == -(FI_EAGAIN as isize) {
                                std::thread::yield_now();
                                return;
                            }
                            assert_eq!(ret, 0, "fi_send");
                            tally.sent[next].fetch_add(1, Ordering::Relaxed);
                            next += 1;
                            mine.set(next);
                        },
                    );
                });
            }
            for _ in 0..POLLERS {
                scope.spawn(move || {
                    let done = || tally.sends.load(Ordering::Relaxed) == COUNT;
                    until(tally, done, || {
                        for number in read(ours.get()) {
                            tally.completed[number].fetch_add(1, Ordering::Relaxed);
                            tally.sends.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                });
            }
            for _ in 0..RECEIVERS {
                scope.spawn(move || {
                    let done = || tally.receives.load(Ordering::Relaxed) == COUNT;
                    until(tally, done, || {
                        for slot in read(theirs_.get()) {
                            let at = target_at.get::<u8>().add(slot * LONG);
                            let number = at.cast::<u64>().read_unaligned() as usize;
                            if number.is_multiple_of(2) {
                                let tail = at.add(LONG - 8).cast::<u64>().read_unaligned();
                                assert_eq!(tail as usize, number, "torn");
                            }
                            tally.received[number].fetch_add(1, Ordering::Relaxed);
                            // a receive is posted before its completion is counted, so receives
                            // remain at the end
                            while post_receive(slot) != 0 {
                                std::thread::yield_now();
                            }
                            tally.receives.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                });
            }
        });
        tally.check();
        pair.close();
        let mut error = std::mem::zeroed::<fi_cq_err_entry>();
        while call!((*theirs).ops, readerr, theirs, &raw mut error, 0) == 1 {
            assert_eq!(error.err, FI_ECANCELED);
        }
        assert_eq!(close(from), 0);
        assert_eq!(close(into), 0);
        assert_eq!(close(theirs), 0);
    }
}
