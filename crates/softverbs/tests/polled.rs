//! The results of a poll, for completions that were in the queue before and for completions
//! directly from a ring: order, contents, room, and the requested events. Both ends are in this
//! process.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::collections::VecDeque;

use common::*;
use rdma_core_sys::*;

const RECEIVES: u64 = 64;
const PIECE: usize = 16;
const LIMIT: std::time::Duration = std::time::Duration::from_secs(20);

/// A connection of this process with itself: the sender, and the receiver, which uses the queue of
/// `beside` if there is one.
struct Pair {
    sender: End,
    receiver: End,
    outbox: Buffer,
    inbox: Vec<Buffer>,
    posted: u64,
    /// Messages that were sent and not received yet.
    open: VecDeque<u64>,
    sent: u64,
}

impl Pair {
    fn new(beside: Option<&End>) -> Self {
        let mut sender = End::with(64, 4, 2);
        let mut receiver = match beside {
            None => End::with(64, RECEIVES as u32 * 2, 2),
            Some(end) => {
                // SAFETY: all objects are live and of one context.
                let qp = unsafe {
                    let mut init: ibv_qp_init_attr = std::mem::zeroed();
                    init.send_cq = end.cq;
                    init.recv_cq = end.cq;
                    init.qp_type = IBV_QPT_RC;
                    init.cap.max_recv_wr = RECEIVES as u32;
                    init.cap.max_recv_sge = 2;
                    (verbs().ibv_create_qp)(end.pd, &raw mut init)
                };
                assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
                end.with_qp(qp)
            }
        };
        let (a, b) = (sender.address(), receiver.address());
        for (end, other) in [(&mut sender, b), (&mut receiver, a)] {
            end.enter_rtr(other);
            end.enter_rts();
        }
        let inbox = (0..RECEIVES)
            .map(|_| receiver.buffer(&[0; 2 * PIECE]))
            .collect();
        Self {
            outbox: sender.buffer(&[0; 2 * PIECE]),
            sender,
            receiver,
            inbox,
            posted: 0,
            open: VecDeque::new(),
            sent: 0,
        }
    }

    /// Posts one more receive, sometimes with two sges, which are processed by other code.
    fn post(&mut self, pieces: u64) {
        let buffer = &self.inbox[(self.posted % RECEIVES) as usize];
        let pieces: &[usize] = if pieces == 1 {
            &[2 * PIECE]
        } else {
            &[PIECE, PIECE]
        };
        self.receiver.recv_pieces(buffer, pieces, self.posted);
        self.posted += 1;
    }

    fn send(&mut self) {
        self.outbox.fill(self.sent as u8);
        let mut outbox = self.outbox.again();
        let signaled = self.sent.is_multiple_of(16);
        let flags = if signaled { IBV_SEND_SIGNALED } else { 0 };
        self.sender
            .send(&mut outbox, 2 * PIECE, Some(self.sent as u32), flags, 0);
        self.open.push_back(self.sent);
        // Rarely, because a poll takes all messages of the rings, and then the receiver's
        // completions are added to its queue.
        if signaled {
            assert_eq!(self.sender.wait(LIMIT).status, IBV_WC_SUCCESS);
        }
        self.sent += 1;
    }

    /// A completion of this pair's receiver: it must be of the first unreceived message, with its
    /// receive.
    fn take(&mut self, wc: &ibv_wc) {
        let number = self.open.pop_front().expect("a message that was sent");
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        assert_eq!(wc.wr_id, number, "out of order");
        assert_eq!((wc.opcode, wc.byte_len), (IBV_WC_RECV, 2 * PIECE as u32));
        assert_eq!(wc.wc_flags, IBV_WC_WITH_IMM);
        // SAFETY: the immediate is in both views of the union.
        assert_eq!(wc.__bindgen_anon_1.bindgen_union_field, number as u32);
        let bytes = self.inbox[(number % RECEIVES) as usize].bytes();
        assert!(bytes.iter().all(|&byte| byte == number as u8));
    }
}

/// A deterministic sequence of numbers, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn event(end: &End) -> bool {
    // SAFETY: live objects; the event is acknowledged once.
    unsafe {
        libc::fcntl((*end.channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        let got = (verbs().ibv_get_cq_event)(end.channel, &raw mut cq, &raw mut context) == 0;
        if got {
            (verbs().ibv_ack_cq_events)(cq, 1);
        }
        got
    }
}

#[test]
fn completions_are_polled_in_order_whatever_way_they_took() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let first = Pair::new(None);
    let second = Pair::new(Some(&first.receiver));
    let cq = first.receiver.cq;
    let mut pairs = [first, second];
    let mut armed = false;
    let (mut full, mut events) = (0, 0);
    for round in 0..6000 {
        for pair in &mut pairs {
            while pair.posted - pair.sent < RECEIVES - pair.open.len() as u64 {
                pair.post(1 + random.below(2));
            }
        }
        for _ in 0..random.below(5) {
            let pair = &mut pairs[random.below(2) as usize];
            if pair.open.len() < 20 {
                pair.send();
            }
        }
        let most = random.below(7) as usize;
        // SAFETY: all zeros is a value of it.
        let mut wcs: [ibv_wc; 8] = unsafe { std::mem::zeroed() };
        wcs[most].wr_id = u64::MAX;
        // SAFETY: live queue, room for as many.
        let got = unsafe { ibv_poll_cq(cq, most as i32, wcs.as_mut_ptr()) };
        let got = usize::try_from(got).expect("no overrun");
        assert!(got <= most);
        assert_eq!(wcs[most].wr_id, u64::MAX, "written beyond the array");
        full += usize::from(got == most && most > 1);
        for wc in &wcs[..got] {
            let pair = pairs.iter_mut().find(|pair| {
                // SAFETY: live queue pair.
                unsafe { (*pair.receiver.qp).qp_num == wc.qp_num }
            });
            pair.expect("one of the two").take(wc);
        }
        // a poller that armed the queue, and then took a later completion, has an event
        if armed && got > 0 {
            assert!(event(&pairs[0].receiver), "round {round}: no event");
            armed = false;
            events += 1;
        }
        let idle = pairs.iter().all(|pair| pair.open.is_empty());
        if idle && !armed && random.below(3) == 0 {
            assert!(!event(&pairs[0].receiver), "an event that nobody asked for");
            // SAFETY: live queue.
            assert_eq!(unsafe { ibv_req_notify_cq(cq, 0) }, 0);
            armed = true;
        }
    }
    let sent: u64 = pairs.iter().map(|pair| pair.sent).sum();
    assert!(
        sent > 5000 && full > 500 && events > 200,
        "{sent} messages, {full} full arrays, {events} events"
    );
}
