//! Queue pairs that are reset or fail, at a particular moment of another call.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use crate::hazard::{Hazard, Hazards, Use, become_visitor};
use crate::key::Key;
use crate::peer::Push;
use crate::process::Process;
use crate::qp::meanwhile::{self, At};
use crate::qp::{Qp, Went};
use crate::ring::{Header, MAX_PAYLOAD, op};
use crate::sync::heavy_fences;
use crate::testing::{Buffer, End, RECVS, attributes, device, is_alone, send_wr, verbs};

const LIMIT: Duration = Duration::from_secs(20);

/// The attributes of a change from RESET to INIT.
const TO_INIT: u32 = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

/// Moves a queue pair to a state, with these further attributes.
fn move_to(end: &End, state: u32, mask: u32) {
    let mut attr = attributes(0);
    attr.qp_state = state;
    assert_eq!(end.modify(&mut attr, IBV_QP_STATE | mask), 0);
}

fn post_recv(end: &End, buffer: &Buffer, len: usize) {
    assert_eq!(end.post_recv(&mut [buffer.sge(len)], 1), 0);
}

fn post_send(end: &End, buffer: &Buffer, len: usize) {
    let mut sge = buffer.sge(len);
    let mut wr = send_wr(IBV_WR_SEND);
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    assert_eq!(end.post_send(&mut wr), 0);
}

/// The next completion.
fn next(end: &End) -> ibv_wc {
    let begin = Instant::now();
    loop {
        if let Some(done) = end.poll() {
            return done;
        }
        assert!(begin.elapsed() < LIMIT, "nothing completes");
    }
}

/// A thread that polls takes a completion of the queue pair before the reset removes the others.
#[test]
fn a_poll_during_a_reset_uses_no_receive_of_the_next_connection() {
    let (end, buffer) = (Rc::new(End::new(IBV_QPT_RC, false)), Buffer::new(64));
    end.connect(end.number());
    (0..RECVS).for_each(|_| post_recv(&end, &buffer, 64));
    move_to(&end, IBV_QPS_ERR, 0);
    // flushes the receives
    Process::current().unwrap().progress();
    let polls = Rc::clone(&end);
    meanwhile::once(At::Purge, move || assert!(polls.poll().is_some()));
    move_to(&end, IBV_QPS_RESET, 0);
    assert!(!meanwhile::is_left());
    move_to(&end, IBV_QPS_INIT, TO_INIT);
    (0..RECVS).for_each(|_| post_recv(&end, &buffer, 64));
}

/// A queue pair for datagrams that sends them to itself.
struct Datagrams {
    end: End,
    ah: *mut ibv_ah,
    buffer: Buffer,
}

impl Datagrams {
    fn new() -> Self {
        let end = End::new(IBV_QPT_UD, false);
        for (state, mask) in [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
            (IBV_QPS_RTR, 0),
            (IBV_QPS_RTS, IBV_QP_SQ_PSN),
        ] {
            move_to(&end, state, mask);
        }
        let mut address = attributes(0).ah_attr;
        // SAFETY: a live domain, and a valid address.
        let ah = unsafe { (verbs().ibv_create_ah)(device().pd, &raw mut address) };
        assert!(!ah.is_null(), "{}", std::io::Error::last_os_error());
        let buffer = Buffer::new(64);
        Self { end, ah, buffer }
    }

    fn post(&self) {
        let mut sge = self.buffer.sge(8);
        let mut wr = send_wr(IBV_WR_SEND);
        (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
        (wr.wr.ud.ah, wr.wr.ud.remote_qpn) = (self.ah, self.end.number());
        assert_eq!(self.end.post_send(&mut wr), 0);
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        // SAFETY: live, and not used afterwards.
        assert_eq!(unsafe { (verbs().ibv_destroy_ah)(self.ah) }, 0);
    }
}

/// A datagram that has the turn at a full ring waits for late messages when its queue pair fails.
#[test]
fn a_failed_queue_pair_has_no_turn_at_a_full_ring() {
    let (first, second) = (Datagrams::new(), Datagrams::new());
    // makes the ring
    first.post();
    assert_eq!(next(&first.end).status, IBV_WC_SUCCESS);
    let process = Process::current().unwrap();
    let peer = process.peer(process.slot).unwrap();
    let nobody = Header {
        op: op::SEND,
        dst_qpn: u32::MAX,
        ..Header::default()
    };
    let push = || peer.push(process.signature(), &nobody, |_| {});
    while push() == Push::Sent {}
    first.post();
    process.push_later(&peer, nobody);
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(first.end.qp) };
    assert_eq!(qp.have_turn(), Went::Waits);
    move_to(&first.end, IBV_QPS_ERR, 0);
    second.post();
    assert_eq!(next(&second.end).status, IBV_WC_SUCCESS);
}

/// The receiver of an unreliable connection is killed while it copies a pending message.
#[test]
fn a_message_that_an_ended_receiver_held_completes() {
    let (end, other) = (End::new(IBV_QPT_UC, false), End::new(IBV_QPT_UC, false));
    end.connect(other.number());
    other.connect(end.number());
    // longer than a message in the ring
    let buffer = Buffer::new(2 * MAX_PAYLOAD);
    post_send(&end, &buffer, 2 * MAX_PAYLOAD);
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(end.qp) };
    assert!(qp.hold_pending() && qp.has_pending());
    let process = Process::current().unwrap();
    qp.peer_died(&process.peer(process.slot).unwrap());
    assert!(!qp.has_pending());
    // here the process of the receiver lives: the request is sent again, and lost later
    assert_eq!(next(&end).status, IBV_WC_SUCCESS);
}

/// The application handles a failure, and prepares the queue pair for the next connection.
fn prepare(end: &End) {
    move_to(end, IBV_QPS_RESET, 0);
    move_to(end, IBV_QPS_INIT, TO_INIT);
}

/// Two queue pairs that are connected to each other.
fn pair() -> (End, Rc<End>) {
    let (end, other) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
    end.connect(other.number());
    other.connect(end.number());
    (end, Rc::new(other))
}

/// A thread has found the reason of a failure, and another one has handled it meanwhile.
fn a_late_failure_spares_the_next_connection(causes: impl FnOnce(&End, &End)) {
    let (end, other) = pair();
    causes(&end, &other);
    let prepared = Rc::clone(&other);
    meanwhile::once(At::Fail, move || prepare(&prepared));
    let begin = Instant::now();
    while meanwhile::is_left() {
        // the reset removes the completion that reports the failure
        assert!(other.poll().is_none());
        assert!(begin.elapsed() < LIMIT, "no failure");
    }
    assert_eq!(other.state(), IBV_QPS_INIT);
}

#[test]
fn a_message_that_is_too_long_spares_the_next_connection() {
    let buffer = Buffer::new(64);
    a_late_failure_spares_the_next_connection(|end, other| {
        post_recv(other, &buffer, 8);
        post_send(end, &buffer, 64);
    });
}

#[test]
fn a_request_that_is_refused_spares_the_next_connection() {
    let buffer = Buffer::new(64);
    a_late_failure_spares_the_next_connection(|end, _| {
        let mut sge = buffer.sge(64);
        let mut wr = send_wr(IBV_WR_RDMA_READ);
        (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
        // of no region
        wr.wr.rdma.rkey = 0;
        assert_eq!(end.post_send(&mut wr), 0);
    });
}

/// The next connection fails too, and its messages are not taken yet.
#[test]
fn a_flush_spares_the_next_connection() {
    let (end, buffer) = (Rc::new(End::new(IBV_QPT_RC, false)), Buffer::new(64));
    let connect_and_fail = move |end: &End| {
        end.connect(end.number());
        post_recv(end, &buffer, 64);
        move_to(end, IBV_QPS_ERR, 0);
    };
    connect_and_fail(&end);
    let again = Rc::clone(&end);
    meanwhile::once(At::Drain, move || {
        move_to(&again, IBV_QPS_RESET, 0);
        connect_and_fail(&again);
    });
    Process::current().unwrap().flush_closing();
    assert!(!meanwhile::is_left());
    assert!(awaits_flush(&end));
    assert_eq!(next(&end).status, IBV_WC_WR_FLUSH_ERR);
}

fn awaits_flush(end: &End) -> bool {
    // SAFETY: a live queue pair.
    unsafe { Qp::from_ptr(end.qp) }.awaits_flush()
}

/// While messages arrive, and each poll finds a completion: that of a SEND in the queue, or that of
/// its receive in the ring.
#[test]
fn polls_that_always_find_a_completion_flush_a_failed_queue_pair() {
    const NAME: &str = "polls_that_always_find_a_completion_flush_a_failed_queue_pair";
    if !is_alone(&format!("tests::failures::{NAME}")) {
        return;
    }
    let (end, buffer) = (End::new(IBV_QPT_RC, false), Buffer::new(64));
    end.connect(end.number());
    let exchange = || {
        post_recv(&end, &buffer, 64);
        post_send(&end, &buffer, 64);
    };
    // makes the ring
    exchange();
    for _ in 0..2 {
        assert_eq!(next(&end).status, IBV_WC_SUCCESS);
    }
    let failed = End::new(IBV_QPT_RC, false);
    failed.connect(failed.number());
    move_to(&failed, IBV_QPS_ERR, 0);
    assert!(awaits_flush(&failed));
    for _ in 0..32 {
        exchange();
        assert!((0..2).all(|_| end.poll().is_some()));
    }
    assert!(!awaits_flush(&failed));
}

/// Two queue pairs, in the order in which they are flushed, each connected to itself.
fn in_order() -> [Rc<End>; 2] {
    let mut ends = [(); 2].map(|()| Rc::new(End::new(IBV_QPT_RC, false)));
    let qps = &Process::current().unwrap().qps;
    ends.sort_by_key(|end| {
        // SAFETY: a live queue pair.
        let qp = unsafe { Qp::from_ptr(end.qp) };
        qps.iter().position(|other| std::ptr::eq(other, qp))
    });
    ends.iter().for_each(|end| end.connect(end.number()));
    ends
}

#[test]
fn the_last_messages_of_all_failed_queue_pairs_are_taken_behind_one_fence() {
    let ends = in_order();
    ends.iter().for_each(|end| move_to(end, IBV_QPS_ERR, 0));
    let before = heavy_fences::count();
    let behind = Rc::new(Cell::new(before));
    let drains = Rc::clone(&behind);
    meanwhile::once(At::Drain, move || drains.set(heavy_fences::count()));
    Process::current().unwrap().flush_closing();
    assert!(!meanwhile::is_left());
    assert_eq!(behind.get(), before + 1);
    assert_eq!(heavy_fences::count(), before + 1);
    assert!(!ends.iter().any(|end| awaits_flush(end)));
}

/// A queue pair fails while the messages of another one are taken for the last time, behind the
/// fence of that round.
#[test]
fn a_queue_pair_that_fails_behind_the_fence_is_left_to_the_next_round() {
    let [first, second] = in_order();
    move_to(&first, IBV_QPS_ERR, 0);
    let fails = Rc::clone(&second);
    meanwhile::once(At::Drain, move || move_to(&fails, IBV_QPS_ERR, 0));
    let process = Process::current().unwrap();
    process.flush_closing();
    assert!(!meanwhile::is_left());
    assert!(!awaits_flush(&first) && awaits_flush(&second));
    process.flush_closing();
    assert!(!awaits_flush(&second));
}

/// Two threads flush: one takes no messages for the other, whose fence may be still to come. The
/// queue pair is reset between the rounds and fails again.
#[test]
fn a_queue_pair_is_in_one_round_of_flushes_at_a_time() {
    let end = End::new(IBV_QPT_RC, false);
    end.connect(end.number());
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(end.qp) };
    let (one, two) = (u64::MAX - 1, u64::MAX);
    move_to(&end, IBV_QPS_ERR, 0);
    assert!(qp.enter_flush(one) && !qp.enter_flush(two));
    qp.flush_closing(two);
    assert!(qp.awaits_flush());
    move_to(&end, IBV_QPS_RESET, 0);
    end.connect(end.number());
    move_to(&end, IBV_QPS_ERR, 0);
    assert!(qp.enter_flush(two));
    qp.flush_closing(one);
    assert!(qp.awaits_flush());
    qp.flush_closing(two);
    assert!(!qp.awaits_flush());
}

/// The slot of the sender, which lives, was that of a process that was killed while it copied a
/// message into a receive of this queue pair.
#[test]
fn the_hazard_of_an_ended_process_does_not_delay_a_flush() {
    let (end, buffer) = (End::new(IBV_QPT_RC, false), Buffer::new(64));
    end.connect(end.number());
    post_recv(&end, &buffer, 64);
    let process = Process::current().unwrap();
    let (map, slot) = (&process.segment.map, process.slot);
    become_visitor(map, slot, process.identity.cookie ^ 1);
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(end.qp) };
    let used = Use::of_receive(qp.index(), Key(5));
    std::mem::forget(Hazard::publish(&Hazards::new(), map, slot, used));
    move_to(&end, IBV_QPS_ERR, 0);
    process.flush_closing();
    assert!(!qp.awaits_flush());
    assert_eq!(next(&end).status, IBV_WC_WR_FLUSH_ERR);
    become_visitor(map, slot, process.identity.cookie);
}

/// The process of the sender was opened after the queue pair was connected.
#[test]
fn the_last_messages_of_a_process_that_was_opened_late_are_delivered() {
    let (end, other) = pair();
    let buffer = Buffer::new(64);
    for _ in 0..4 {
        post_recv(&other, &buffer, 64);
    }
    // SAFETY: a live queue pair.
    unsafe { Qp::from_ptr(other.qp) }.forget_sender();
    for _ in 0..3 {
        post_send(&end, &buffer, 64);
    }
    move_to(&other, IBV_QPS_ERR, 0);
    let statuses = [(); 4].map(|()| next(&other).status);
    let success = IBV_WC_SUCCESS;
    assert_eq!(statuses, [success, success, success, IBV_WC_WR_FLUSH_ERR]);
    for _ in 0..3 {
        assert_eq!(next(&end).status, IBV_WC_SUCCESS);
    }
}
