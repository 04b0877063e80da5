//! Receives that are withdrawn during the transfer of messages: no message is written to their
//! memory afterwards, and no send that was not delivered succeeds.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("a_deregistered_receive", wait_for_child, deregistered),
        ("a_shared_receive", wait_for_child, shared),
        ("a_null_receive", wait_for_child, null),
        ("a_long_copy_and_error", wait_for_child, |link| {
            raced(link, Way::Error)
        }),
        ("a_long_copy_and_reset", wait_for_child, |link| {
            raced(link, Way::Reset)
        }),
        ("a_long_copy_and_dereg", wait_for_child, |link| {
            raced(link, Way::Deregister)
        }),
        ("sends_to_one_that_fails", wait_for_child, counted),
        ("a_failed_queue_pair_stays_so", wait_for_child, failed),
        ("sends_to_one_that_goes", wait_for_child, |link| {
            let ways = [8, 8192, 65536].map(|len| (IBV_WR_SEND, len));
            abandoned(link, &ways);
        }),
        ("accesses_to_one_that_goes", wait_for_child, |link| {
            let both = [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ];
            abandoned(link, &both.map(|opcode| (opcode, 65536)));
        }),
    ];
    run(cases);
}

/// Both ends are in one process.
fn wait_for_child(link: &mut Link) {
    link.expect("done");
}

fn connect(a: &mut End, b: &mut End) {
    let (x, y) = (a.address(), b.address());
    a.enter_rtr(y);
    b.enter_rtr(x);
    // a sender without a receiver gives up after 34 ms
    a.enter_rts_within(10, 7);
    b.enter_rts_within(10, 7);
}

fn pair() -> (End, End) {
    let (mut a, mut b) = (End::with(16, 64, 4), End::with(16, 64, 4));
    connect(&mut a, &mut b);
    (a, b)
}

const LENGTHS: [usize; 3] = [4096, 65536, 5 << 20];

fn deregistered(link: &mut Link) {
    for len in LENGTHS {
        let (mut a, mut b) = pair();
        let mut source = a.buffer(&vec![7; len]);
        let target = b.buffer(&vec![0; len]);
        b.recv(&target, 1);
        let bytes = b.deregister(target);
        a.send(&mut source, len, None, IBV_SEND_SIGNALED, 6);
        assert_eq!(b.wait(LIMIT).status, IBV_WC_LOC_PROT_ERR, "{len}");
        assert!(bytes.iter().all(|&byte| byte == 0), "{len}");
        if len > 8192 {
            assert_eq!(a.wait(LIMIT).status, IBV_WC_REM_OP_ERR, "{len}");
        }
    }
    // one of three sges is no longer registered
    let (mut a, mut b) = pair();
    let mut source = a.buffer(&[7; 60000]);
    let first = b.buffer(&[0; 20000]);
    let gone = b.buffer(&[0; 20000]);
    let mut sges = [&first, &gone, &first].map(|buffer| ibv_sge {
        addr: buffer.addr(),
        length: 20000,
        lkey: buffer.lkey(),
    });
    let mut wr = ibv_recv_wr {
        wr_id: 1,
        next: std::ptr::null_mut(),
        sg_list: sges.as_mut_ptr(),
        num_sge: 3,
    };
    let mut bad = std::ptr::null_mut();
    // SAFETY: a live queue pair, a chain of one.
    assert_eq!(unsafe { ibv_post_recv(b.qp, &raw mut wr, &raw mut bad) }, 0);
    let bytes = b.deregister(gone);
    a.send(&mut source, 60000, None, IBV_SEND_SIGNALED, 6);
    assert_eq!(b.wait(LIMIT).status, IBV_WC_LOC_PROT_ERR);
    assert!(bytes.iter().all(|&byte| byte == 0));
    link.say("done");
}

fn shared(link: &mut Link) {
    for len in LENGTHS {
        let (mut a, first) = (End::with(16, 16, 1), End::with(16, 16, 1));
        let srq = first.create_srq(4);
        let mut b = first.on_srq(srq);
        connect(&mut a, &mut b);
        let mut source = a.buffer(&vec![7; len]);
        let target = b.buffer(&vec![0; len]);
        assert_eq!(post_srq(srq, &target, 1), 0);
        let bytes = b.deregister(target);
        a.send(&mut source, len, None, IBV_SEND_SIGNALED, 6);
        assert_eq!(b.wait(LIMIT).status, IBV_WC_LOC_PROT_ERR, "{len}");
        assert!(bytes.iter().all(|&byte| byte == 0), "{len}");
    }
    link.say("done");
}

/// A null region accepts long messages too.
fn null(link: &mut Link) {
    let (mut a, mut b) = pair();
    // SAFETY: a live domain; the call is in the context's extension.
    let mr = unsafe {
        let ops = verbs_get_ctx(b.context).unwrap();
        (*ops).alloc_null_mr.unwrap()(b.pd)
    };
    assert!(!mr.is_null());
    for len in [100usize, 100_000] {
        let mut source = a.buffer(&vec![7; len]);
        let mut sge = ibv_sge {
            addr: 12345,
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*mr).lkey },
        };
        let mut wr = ibv_recv_wr {
            wr_id: 1,
            next: std::ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair, a chain of one.
        assert_eq!(unsafe { ibv_post_recv(b.qp, &raw mut wr, &raw mut bad) }, 0);
        a.send(&mut source, len, None, IBV_SEND_SIGNALED, 6);
        assert_eq!(b.wait(LIMIT).status, IBV_WC_SUCCESS, "{len}");
        assert_eq!(a.wait(LIMIT).status, IBV_WC_SUCCESS, "{len}");
    }
    link.say("done");
}

/// Lets another thread use an end.
struct Lent<T>(T);
// SAFETY: verbs' calls are safe from any thread, and only one thread has it.
unsafe impl<T> Send for Lent<T> {}

impl<T> Lent<T> {
    fn get(&mut self) -> &mut T {
        &mut self.0
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Error,
    Reset,
    Deregister,
}

/// A long message is being transferred when its receive is withdrawn.
fn raced(link: &mut Link, way: Way) {
    const LEN: usize = 6 << 20;
    let mut reached = 0;
    for round in 0..60u32 {
        let (a, mut b) = pair();
        let mut source = a.buffer(&vec![7; LEN]);
        let mut target = b.buffer(&vec![0; LEN]);
        b.recv(&target, 1);
        let begun = AtomicBool::new(false);
        let mut lent = Lent(a);
        std::thread::scope(|scope| {
            let begun = &begun;
            let from = Lent(&mut source);
            let sender = scope.spawn(move || {
                let mut from = from;
                begun.store(true, Ordering::Release);
                lent.get().send(from.get(), LEN, None, IBV_SEND_SIGNALED, 6);
                lent.get().wait(LIMIT).status
            });
            while !begun.load(Ordering::Acquire) {}
            // at any point of the copy
            let until = Instant::now() + Duration::from_micros(u64::from(round) * 30);
            while Instant::now() < until {}
            let memory = match way {
                Way::Error => {
                    let mut attr = attributes(IBV_QPS_ERR);
                    b.modify(&mut attr, IBV_QP_STATE);
                    let _ = b.wait(LIMIT);
                    target.fill(9);
                    target.again().leak()
                }
                Way::Reset => {
                    let mut attr = attributes(IBV_QPS_RESET);
                    b.modify(&mut attr, IBV_QP_STATE);
                    target.fill(9);
                    target.again().leak()
                }
                Way::Deregister => {
                    let same = target.again();
                    let memory = b.deregister(same);
                    target.fill(9);
                    // the sender detects it by its own completion, the receiver by polling
                    let _ = b.wait(LIMIT);
                    memory
                }
            };
            if way == Way::Reset {
                // the request waits for the next incarnation, which does not come
                b.enter_init();
                let mut attr = attributes(IBV_QPS_ERR);
                b.modify(&mut attr, IBV_QP_STATE);
            }
            std::thread::sleep(Duration::from_millis(3));
            assert!(memory.iter().all(|&byte| byte == 9), "round {round}");
            if way == Way::Reset {
                // SAFETY: live; nothing else uses it. Its sender finds nobody.
                assert_eq!(unsafe { (verbs().ibv_destroy_qp)(b.qp) }, 0);
            }
            reached += u32::from(sender.join().unwrap() != IBV_WC_SUCCESS);
        });
    }
    eprintln!("{reached} of 60 were not delivered");
    link.say("done");
}

fn attributes(state: u32) -> ibv_qp_attr {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

/// The receiver fails while messages arrive: it receives as many as were sent successfully.
fn counted(link: &mut Link) {
    const LEN: usize = 8192;
    let sent = AtomicU32::new(0);
    let (mut a, mut b) = pair();
    let mut source = a.buffer(&[7; LEN]);
    let target = b.buffer(&[0; LEN]);
    for round in 0..400u32 {
        for end in [&mut a, &mut b] {
            end.modify(&mut attributes(IBV_QPS_RESET), IBV_QP_STATE);
            end.enter_init();
        }
        connect(&mut a, &mut b);
        for id in 0..64 {
            b.recv(&target, id);
        }
        sent.store(0, Ordering::Relaxed);
        let mut lent = Lent(&mut a);
        let mut received = 0;
        std::thread::scope(|scope| {
            let from = Lent(&mut source);
            let count = &sent;
            let sender = scope.spawn(move || {
                let mut from = from;
                for id in 0..64 {
                    lent.get()
                        .send(from.get(), LEN, None, IBV_SEND_SIGNALED, id);
                    if lent.get().wait(LIMIT).status != IBV_WC_SUCCESS {
                        return;
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
            while count.load(Ordering::Relaxed) < round % 32 {
                if let Some(wc) = b.poll() {
                    received += u32::from(wc.status == IBV_WC_SUCCESS);
                }
            }
            let mut attr = attributes(IBV_QPS_ERR);
            b.modify(&mut attr, IBV_QP_STATE);
            let mut flushed = 0;
            while received + flushed < 64 {
                let wc = b.wait(LIMIT);
                if wc.status == IBV_WC_SUCCESS {
                    received += 1;
                } else {
                    flushed += 1;
                }
            }
            sender.join().unwrap();
        });
        let sent = sent.load(Ordering::Relaxed);
        assert!(
            sent <= received,
            "round {round}: {sent} sent, {received} received"
        );
    }
    link.say("done");
}

/// The other end is reset, and its memory deregistered, while requests are executed. As on a
/// network there is no more answer: the error is reported after the retries, never earlier, so that
/// the successful requests can be polled first.
fn abandoned(link: &mut Link, ways: &[(u32, usize)]) {
    const TIMEOUT: u8 = 8;
    const RETRIES: u8 = 7;
    let longest = Duration::from_nanos((4096 << TIMEOUT) * (u64::from(RETRIES) + 1));
    let (mut a, mut b) = (End::with(16, 64, 4), End::with(16, 64, 4));
    for &(opcode, len) in ways {
        let source = a.buffer(&vec![7; len]);
        for round in 0..120u32 {
            for end in [&mut a, &mut b] {
                end.modify(&mut attributes(IBV_QPS_RESET), IBV_QP_STATE);
                end.enter_init();
            }
            let (x, y) = (a.address(), b.address());
            a.enter_rtr(y);
            b.enter_rtr(x);
            a.enter_rts_within(TIMEOUT, RETRIES);
            b.enter_rts();
            let target = b.buffer(&vec![0; len]);
            for id in 0..64 {
                b.recv(&target, id);
            }
            let (addr, rkey) = (target.addr(), target.rkey());
            let done = AtomicU32::new(0);
            std::thread::scope(|scope| {
                let mut lent = Lent((&mut a, &source));
                let done = &done;
                let sender = scope.spawn(move || {
                    let (a, source) = lent.get();
                    loop {
                        a.rdma(opcode, source, len, addr, rkey, None);
                        let status = a.wait(LIMIT).status;
                        if status != IBV_WC_SUCCESS {
                            return (status, Instant::now());
                        }
                        done.fetch_add(1, Ordering::Release);
                    }
                });
                let mut serve = || {
                    if let Some(wc) = b.poll() {
                        b.recv(&target, wc.wr_id);
                    }
                };
                while done.load(Ordering::Acquire) < 1 {
                    serve();
                }
                // at any point of a request
                let until = Instant::now() + Duration::from_nanos(u64::from(round) * 100);
                while Instant::now() < until {
                    serve();
                }
                let before = Instant::now();
                b.modify(&mut attributes(IBV_QPS_RESET), IBV_QP_STATE);
                b.deregister(target);
                // completions that were polled before do not belong to the next incarnation
                while b.poll().is_some() {}
                let (status, at) = sender.join().unwrap();
                assert_eq!(status, IBV_WC_RETRY_EXC_ERR, "{opcode} {len} {round}");
                let waited = at - before;
                assert!(waited >= longest, "{opcode} {len} {round}: {waited:?}");
            });
        }
    }
    link.say("done");
}

/// One thread moves the queue pair to ERR while another one connects it.
fn failed(link: &mut Link) {
    let (mut a, mut b) = pair();
    for round in 0..4000u32 {
        for end in [&mut a, &mut b] {
            end.modify(&mut attributes(IBV_QPS_RESET), IBV_QP_STATE);
            end.enter_init();
        }
        let (x, y) = (a.address(), b.address());
        a.enter_rtr(y);
        b.enter_rtr(x);
        let go = AtomicU32::new(0);
        let meet = |go: &AtomicU32| {
            go.fetch_add(1, Ordering::AcqRel);
            while go.load(Ordering::Acquire) < 2 {}
        };
        let qp = Lent(b.qp);
        std::thread::scope(|scope| {
            let go = &go;
            scope.spawn(move || {
                let mut qp = qp;
                let mut attr = attributes(IBV_QPS_RTS);
                attr.timeout = 14;
                let mask = IBV_QP_STATE
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_SQ_PSN
                    | IBV_QP_MAX_QP_RD_ATOMIC;
                meet(go);
                // SAFETY: live queue pair, valid attributes. It may be too late for it.
                unsafe { (verbs().ibv_modify_qp)(*qp.get(), &raw mut attr, mask.cast_signed()) };
            });
            meet(go);
            for _ in 0..round % 64 {
                std::hint::spin_loop();
            }
            let mut attr = attributes(IBV_QPS_ERR);
            let mask = IBV_QP_STATE.cast_signed();
            // SAFETY: as above.
            let ret = unsafe { (verbs().ibv_modify_qp)(b.qp, &raw mut attr, mask) };
            assert_eq!(ret, 0);
        });
        assert_eq!(b.state(), IBV_QPS_ERR, "round {round}");
    }
    link.say("done");
}
