//! Special cases of queues, and of nodes: between two processes, as in `two_processes.rs`.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(20);

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("moderated_events", moderated_parent, moderated_child),
        ("a_claim_and_a_full_ring", claim_parent, claim_child),
        (
            "datagrams_of_a_destroyed_queue_pair",
            destroyed_parent,
            destroyed_child,
        ),
        (
            "a_datagram_too_long_for_the_next_receive",
            next_parent,
            next_child,
        ),
        ("a_queue_that_drains", drain_parent, drain_child),
        ("another_node", node_parent, node_child),
        (
            "a_silent_process_and_datagrams",
            silent_parent,
            silent_child,
        ),
    ];
    run(cases);
}

/// Whether the channel has an event within this time; takes the event.
fn event(end: &End, milliseconds: i32) -> bool {
    event_after(end, milliseconds).is_some()
}

/// As [`event`]. Returns how often the channel was readable without one before.
fn event_after(end: &End, milliseconds: i32) -> Option<u32> {
    let mut wakes = 0;
    // SAFETY: live objects.
    unsafe {
        let fd = (*end.channel).fd;
        libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
        let begin = std::time::Instant::now();
        loop {
            let left = milliseconds - begin.elapsed().as_millis() as i32;
            let mut poll = libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            if libc::poll(&raw mut poll, 1, left.max(0)) == 0 {
                return None;
            }
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            if (verbs().ibv_get_cq_event)(end.channel, &raw mut cq, &raw mut context) == 0 {
                (verbs().ibv_ack_cq_events)(cq, 1);
                return Some(wakes);
            }
            wakes += 1;
        }
    }
}

fn moderate(end: &End, count: u16, period: u16) {
    let mut attr = ibv_modify_cq_attr {
        attr_mask: IBV_CQ_ATTR_MODERATE,
        moderate: ibv_moderate_cq {
            cq_count: count,
            cq_period: period,
        },
    };
    // SAFETY: a live queue.
    assert_eq!(unsafe { ibv_modify_cq(end.cq, &raw mut attr) }, 0);
}

fn moderated_parent(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let buffer = end.buffer(&[0; 8]);
    for id in 0..16 {
        end.recv(&buffer, id);
    }
    end.join(link);
    let arm = |end: &End| {
        // SAFETY: a live queue.
        assert_eq!(unsafe { ibv_req_notify_cq(end.cq, 0) }, 0);
    };
    // by count: the longest period is 65 ms, so three completions must arrive within it
    moderate(&end, 3, u16::MAX);
    arm(&end);
    let begin = std::time::Instant::now();
    link.say("send 3");
    link.expect("sent");
    assert!(event(&end, 10_000));
    for _ in 0..3 {
        end.wait(LIMIT);
    }
    let by_count = begin.elapsed();
    // by time
    moderate(&end, 1000, 50_000);
    arm(&end);
    let begin = std::time::Instant::now();
    link.say("send 1");
    link.expect("sent");
    let wakes = event_after(&end, 10_000).unwrap();
    let by_time = begin.elapsed();
    assert!(
        by_time >= std::time::Duration::from_millis(40),
        "{by_time:?}"
    );
    // the thread sleeps while the event is held back
    assert!(wakes < 10, "{wakes} wake-ups");
    end.wait(LIMIT);
    // a completion of this process itself, for which no peer rings the doorbell
    arm(&end);
    let mut message = end.buffer(&[1; 8]);
    end.send(&mut message, 8, None, IBV_SEND_SIGNALED, 77);
    let begin = std::time::Instant::now();
    assert!(event(&end, 10_000));
    assert!(begin.elapsed() >= std::time::Duration::from_millis(30));
    assert_eq!(end.wait(LIMIT).wr_id, 77);
    // without moderation events arrive at once again
    moderate(&end, 0, 0);
    arm(&end);
    link.say("send 1");
    link.expect("sent");
    assert!(event(&end, 10_000));
    println!("by count after {by_count:?}, by time after {by_time:?}");
    // SAFETY: all zeros is a value of it; live objects.
    unsafe {
        let mut attr: ibv_device_attr_ex = std::mem::zeroed();
        assert_eq!(ibv_query_device_ex(verbs(), end.context, &raw mut attr), 0);
        assert_eq!(attr.cq_mod_caps.max_cq_count, u16::MAX);
        assert_eq!(attr.cq_mod_caps.max_cq_period, u16::MAX);
    }
    link.say("done");
}

fn moderated_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    end.join(link);
    let mut buffer = end.buffer(&[1; 8]);
    loop {
        match link.hear().as_str() {
            "done" => break,
            line => {
                for _ in 0..line.strip_prefix("send ").unwrap().parse().unwrap() {
                    end.send(&mut buffer, 8, None, 0, 0);
                }
                link.say("sent");
            }
        }
    }
}

/// A request that claimed the only shared receive found the ring full, and will not be sent.
fn claim_parent(link: &mut Link) {
    let mut filler = End::connect(link, 4096, 4, 1);
    let mut claimant = End::connect(link, 16, 4, 1);
    let mut next = End::connect(link, 16, 4, 1);
    let mut buffer = filler.buffer(&[1; 8]);
    link.expect("not looking");
    // more messages than a ring has slots
    for _ in 0..3000 {
        filler.send(&mut buffer, 8, None, 0, 0);
    }
    claimant.send_unregistered(&mut [1; 8], None, IBV_SEND_INLINE, 1);
    // SAFETY: live, and not used any more.
    unsafe { assert_eq!((verbs().ibv_destroy_qp)(claimant.qp), 0) };
    link.say("look");
    let flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    next.send_unregistered(&mut [1; 8], None, flags, 5);
    let wc = next.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 5));
    link.expect("there");
}

fn claim_child(link: &mut Link) {
    let mut first = End::with(4, 4096, 1);
    let srq = first.create_srq(1);
    let receive = first.buffer(&[0; 8]);
    for id in 0..3000 {
        first.recv(&receive, id);
    }
    first.join(link);
    let mut others = [first.on_srq(srq), first.on_srq(srq)];
    for other in &mut others {
        other.join(link);
    }
    assert_eq!(post_srq(srq, &receive, 10_000), 0);
    link.say("not looking");
    link.expect("look");
    loop {
        let wc = first.wait(LIMIT);
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        if wc.wr_id == 10_000 {
            break;
        }
    }
    link.say("there");
}

/// A process that does not poll loses datagrams after the bound, and delays no other process.
fn silent_parent(link: &mut Link) {
    let mut end = datagram_end();
    let other = end.exchange(link);
    let (ah, own) = (address_handle(&end, other), end.address());
    let own_ah = address_handle(&end, own);
    let here = end.buffer(&[0; 4136]);
    let buffer = end.buffer(&[9; 4096]);
    link.expect("ready");
    let to_itself = |end: &mut End| {
        end.recv(&here, 7);
        send_datagram(end, &buffer, 32, (own_ah, own.qpn, QKEY));
        let mut seen = [end.wait(LIMIT), end.wait(LIMIT)].map(|wc| (wc.status, wc.opcode));
        seen.sort_unstable();
        assert_eq!(
            seen,
            [(IBV_WC_SUCCESS, IBV_WC_SEND), (IBV_WC_SUCCESS, IBV_WC_RECV)]
        );
    };
    let to_other = |end: &mut End, count: u32| {
        for _ in 0..count {
            send_datagram(end, &buffer, 4096, (ah, other.qpn, QKEY));
            assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        }
    };
    // without a ring the first datagrams are queued, and the others are dropped
    to_other(&mut end, 200);
    to_itself(&mut end);
    link.say("look");
    // queued datagrams are sent when this process polls again
    let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < until {
        assert!(end.poll().is_none());
    }
    link.expect("got");
    // finally the ring is full
    to_other(&mut end, 200);
    to_itself(&mut end);
    link.say("over");
}

fn silent_child(link: &mut Link) {
    let mut end = datagram_end();
    let buffers: Vec<_> = (0..3).map(|_| end.buffer(&[0; 4136])).collect();
    for (id, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, id as u64);
    }
    end.exchange(link);
    link.say("ready");
    link.expect("look");
    for buffer in &buffers {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 4136));
        assert_eq!(buffer.bytes()[40..], [9; 4096]);
    }
    link.say("got");
    link.expect("over");
}

/// The first datagrams to a process wait for its ring.
fn destroyed_parent(link: &mut Link) {
    let mut end = datagram_end();
    let other = end.exchange(link);
    let ah = address_handle(&end, other);
    let buffer = end.buffer(&[9; 32]);
    link.expect("ready");
    for _ in 0..3 {
        post_datagram(&mut end, &buffer, 32, (ah, other.qpn, QKEY), 0);
    }
    // SAFETY: live objects, not used any more.
    unsafe { assert_eq!((verbs().ibv_destroy_qp)(end.qp), 0) };
    link.expect("there");
}

fn destroyed_child(link: &mut Link) {
    let mut end = datagram_end();
    let buffers: Vec<_> = (0..3).map(|_| end.buffer(&[0; 72])).collect();
    for (id, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, id as u64);
    }
    end.exchange(link);
    link.say("ready");
    for buffer in &buffers {
        let wc = end.sleep(LIMIT);
        assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 72));
        assert_eq!(buffer.bytes()[40..], [9; 32]);
    }
    link.say("there");
}

fn next_parent(link: &mut Link) {
    let mut end = datagram_end();
    let other = end.exchange(link);
    let ah = address_handle(&end, other);
    let buffer = end.buffer(&[9; 32]);
    link.expect("ready");
    for len in [32, 8, 8] {
        send_datagram(&mut end, &buffer, len, (ah, other.qpn, QKEY));
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    }
    link.expect("done");
}

fn next_child(link: &mut Link) {
    let first = End::of_type(IBV_QPT_UD, 4, 4, 1);
    let srq = first.create_srq(4);
    let mut end = datagram_end_on(&first, srq);
    let short = first.buffer(&[0; 48]);
    assert_eq!(post_srq(srq, &short, 1), 0);
    let long = first.buffer(&[0; 100]);
    assert_eq!(post_srq(srq, &long, 2), 0);
    end.exchange(link);
    link.say("ready");
    for (id, len) in [(1, 8), (2, 8)] {
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, id));
        assert_eq!(wc.imm, Some(len));
    }
    link.say("done");
}

/// The child is on another node than its parent.
fn node_parent(link: &mut Link) {
    link.say("7");
    let mut end = End::create(link, 4, 4, 1);
    assert_eq!((lid(&end), node(&end)), (1, 0));
    let receive = end.buffer(&[0; 8]);
    end.recv(&receive, 1);
    let other = end.exchange(link);
    end.enter_rtr(other);
    end.enter_rts();
    link.say("ready");
    link.expect("ready");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.imm), (IBV_WC_SUCCESS, Some(7)));
    // the same queue pair number on another node does not exist
    let mut astray = End::with(4, 4, 1);
    let mut wrong = astray.exchange(link);
    wrong.gid = end.address().gid;
    astray.enter_rtr(wrong);
    astray.rnr_retry = 0;
    astray.enter_rts_within(8, 1);
    let mut message = astray.buffer(&[1; 8]);
    astray.send(&mut message, 8, None, 0, 3);
    let wc = astray.sleep(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_RETRY_EXC_ERR, 3));
    link.say("done");
    // the end of this process would flush the child's receive
    link.expect("checked");
}

fn node_child(link: &mut Link) {
    let node_number = link.hear();
    // SAFETY: there is no other thread, and the device is not open yet.
    unsafe { std::env::set_var("SOFTVERBS_NODE", &node_number) };
    let mut end = End::create(link, 4, 4, 1);
    assert_eq!((lid(&end), node(&end)), (8, 7));
    end.join(link);
    end.send_unregistered(&mut [1; 8], Some(7), IBV_SEND_INLINE, 1);
    let mut second = End::with(4, 4, 1);
    let receive = second.buffer(&[0; 8]);
    second.recv(&receive, 1);
    let other = second.exchange(link);
    second.enter_rtr(other);
    link.expect("done");
    for _ in 0..50 {
        assert!(second.poll().is_none());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    link.say("checked");
}

fn lid(end: &End) -> u16 {
    // SAFETY: all zeros is a value of it; a live context.
    unsafe {
        let mut attr: ibv_port_attr = std::mem::zeroed();
        assert_eq!(ibv_query_port(verbs(), end.context, 1, &raw mut attr), 0);
        attr.lid
    }
}

/// The node in a GID: its last bytes.
fn node(end: &End) -> u16 {
    let gid = end.address().gid.to_ne_bytes();
    u16::from_be_bytes([gid[14], gid[15]]) & 0xfff
}

/// Moves from RTS to SQD, with or without an event at the end.
fn drain(end: &mut End, tells: bool) {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_SQD;
    attr.en_sqd_async_notify = tells.into();
    end.modify(&mut attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
}

fn is_draining(end: &End) -> bool {
    // SAFETY: all zeros is a value of both; live queue pair.
    unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        let mask = IBV_QP_STATE.cast_signed();
        let query = verbs().ibv_query_qp;
        assert_eq!(query(end.qp, &raw mut attr, mask, &raw mut init), 0);
        assert_eq!(attr.qp_state, IBV_QPS_SQD);
        attr.sq_draining != 0
    }
}

/// The next asynchronous event; `None`: there is none now. The descriptor may be readable without
/// an event.
fn event_now(end: &mut End) -> Option<u32> {
    // SAFETY: a live context; all zeros is a value of the event, which is acknowledged once.
    unsafe {
        let fd = (*end.context).async_fd;
        libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
        let mut event: ibv_async_event = std::mem::zeroed();
        if (verbs().ibv_get_async_event)(end.context, &raw mut event) != 0 {
            return None;
        }
        (verbs().ibv_ack_async_event)(&raw mut event);
        Some(event.event_type)
    }
}

fn drain_parent(link: &mut Link) {
    let mut end = End::connect(link, 16, 16, 1);
    let mut first = end.buffer(&[1; 20]);
    let mut second = end.buffer(&[2; 20_000]);
    // no request has begun
    drain(&mut end, true);
    assert_eq!(event_now(&mut end), Some(IBV_EVENT_SQ_DRAINED));
    assert!(!is_draining(&end));
    end.enter_rts_again();
    // the first message waits for its receive, so it has begun; the second one has not
    end.send(&mut first, 20, None, IBV_SEND_SIGNALED, 1);
    drain(&mut end, true);
    assert!(is_draining(&end));
    assert_eq!(event_now(&mut end), None);
    end.send(&mut second, 20_000, None, IBV_SEND_SIGNALED, 2);
    assert!(end.poll().is_none());
    link.say("go on");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 1));
    assert_eq!(event_now(&mut end), Some(IBV_EVENT_SQ_DRAINED));
    assert!(!is_draining(&end));
    link.expect("one");
    assert!(end.poll().is_none());
    assert_eq!(event_now(&mut end), None);
    end.enter_rts_again();
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 2));
    link.expect("both");
    // without the request for it there is no event
    drain(&mut end, false);
    assert_eq!(event_now(&mut end), None);
    // requests that waited when the queue pair failed are flushed, without that event
    end.enter_rts_again();
    end.send(&mut first, 20, None, IBV_SEND_SIGNALED, 3);
    drain(&mut end, true);
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_ERR;
    end.modify(&mut attr, IBV_QP_STATE);
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.wr_id), (IBV_WC_WR_FLUSH_ERR, 3));
    assert_eq!(event_now(&mut end), None);
}

fn drain_child(link: &mut Link) {
    let mut end = End::create(link, 16, 16, 1);
    end.join(link);
    link.expect("go on");
    let buffers = [end.buffer(&[0; 20_000]), end.buffer(&[0; 20_000])];
    for (i, buffer) in buffers.iter().enumerate() {
        end.recv(buffer, i as u64);
    }
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 20));
    // long enough for the message to be pulled from the sender's memory
    for _ in 0..20 {
        assert!(end.poll().is_none(), "what has not begun was sent");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    link.say("one");
    let wc = end.wait(LIMIT);
    assert_eq!((wc.status, wc.byte_len), (IBV_WC_SUCCESS, 20_000));
    link.say("both");
    link.wait_end();
}
