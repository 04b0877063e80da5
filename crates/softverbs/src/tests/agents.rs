//! Requests over lines to agents: from a process that is not the one of its slot, and to agents
//! that answer late.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use crate::agent::{Kind, Outcome, PLACE, PLACES, REPLY, REQUEST, Reply, Request, name};
use crate::fuzz::stranger::{self, INDEX};
use crate::peer::Peer;
use crate::process::Process;
use crate::qp::Qp;
use crate::registry::{ENTRY, Entry};
use crate::segment::layout::{StateWord, qp, qp_num, split_qp_num};
use crate::sync::Arc;
use crate::sys::{self, BounceFile, Line, Listener};
use crate::testing::{Buffer, End, attributes, device, send_wr};

/// The next answer; `None`: the agent has closed the line.
fn answer(line: &Line) -> Option<Reply> {
    let mut bytes = [0; REPLY];
    assert!(
        sys::epoll_readable(line.as_raw_fd(), 20_000).unwrap(),
        "no answer, and no end"
    );
    line.receive(&mut bytes).ok()?;
    Some(Reply::of_bytes(&bytes))
}

/// A process of the user, here this one, overwrites the registry's entry of another one and
/// restores it. Between the two it greets an agent with the slot of that process.
#[test]
fn an_entry_of_the_registry_gives_no_access() {
    let stranger = stranger::child();
    let process = Process::current().unwrap();
    process.start_agent();
    let (file, at) = (process.registry().file(), stranger.slot as usize * ENTRY);
    let mut theirs = [0; ENTRY];
    file.read_exact_at(&mut theirs, at as u64).unwrap();
    let own = Entry {
        identity: process.identity,
        segment_fd: process.segment.fd(),
        segment_inode: process.segment.inode().unwrap(),
        node: process.node,
    };
    let greet = || {
        file.write_all_at(&own.to_bytes(), at as u64).unwrap();
        let line = Line::connect(&name(process.slot, &process.identity)).unwrap();
        let bounce = BounceFile::create(PLACES * PLACE).unwrap();
        let mut hello = Request::new(Kind::Hello);
        hello.a = stranger.slot.into();
        line.send(&hello.to_bytes(), Some(bounce.as_fd())).unwrap();
        // its answer shows that the agent has read the first message; an agent that refuses the
        // greeting has perhaps closed the line before this message (EPIPE)
        let mut second = Request::new(Kind::File);
        second.a = u64::MAX;
        let sent = line.send(&second.to_bytes(), None);
        let is_greeted = sent.is_ok() && answer(&line).is_some();
        file.write_all_at(&theirs, at as u64).unwrap();
        is_greeted.then_some((line, bounce))
    };
    // while this process has not opened the other one, the registry alone names it
    let (line, bounce) = greet().unwrap();
    let end = End::new(IBV_QPT_RC, false);
    stranger.be_honest(end.number(), false);
    end.connect(qp_num(stranger.slot, INDEX));
    let buffer = Buffer::new(64);
    let (addr, key) = buffer.place();
    let (_, index) = split_qp_num(end.number());
    let state = qp::AT + qp::STRIDE * index as usize + qp::STATE;
    let word = StateWord(process.segment.map.u64(state).load(Ordering::Relaxed));
    let bytes = [7_u8; 8];
    let from = sys::as_local(bytes.as_ptr().expose_provenance() as u64, bytes.len());
    bounce.fill(0, &[from]).unwrap();
    let request = Request {
        qp: end.number(),
        from: qp_num(stranger.slot, INDEX),
        incarnation: word.incarnation(),
        key,
        addr,
        len: 8,
        ..Request::new(Kind::Write)
    };
    line.send(&request.to_bytes(), None).unwrap();
    let outcome = answer(&line).map(|reply| reply.outcome);
    assert_eq!((buffer.word(0), outcome), (0, Some(Outcome::Refused)));
    assert!(greet().is_none());
}

const LIMIT: Duration = Duration::from_secs(20);

/// This process as a peer whose memory the kernel refuses to it, so that it needs its own agent.
fn refusing() -> (&'static Process, Arc<Peer>) {
    device();
    let process = Process::current().unwrap();
    let peer = process.peer(process.slot).unwrap();
    peer.refuse();
    (process, peer)
}

/// Two queue pairs of this process, connected to each other.
fn pair() -> (End, End) {
    let pair = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
    pair.0.connect(pair.1.number());
    pair.1.connect(pair.0.number());
    pair
}

/// Posts a READ of a whole buffer into itself.
fn post_read(end: &End, buffer: &Buffer, len: usize) {
    let mut sge = buffer.sge(len);
    let mut wr = send_wr(IBV_WR_RDMA_READ);
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = buffer.place();
    assert_eq!(end.post_send(&mut wr), 0);
}

/// When the first request of an end fails or is tried again.
fn deadline(end: &End) -> Option<u64> {
    // SAFETY: a live queue pair.
    unsafe { Qp::from_ptr(end.qp) }.deadline()
}

/// The next request on a line, at the agent's side.
fn next(line: &Line) -> Option<Request> {
    let mut bytes = [0; REQUEST];
    match line.receive(&mut bytes) {
        Ok(_) => Request::of_bytes(&bytes),
        Err(error) => {
            assert_eq!(error, sys::Errno(libc::EAGAIN));
            None
        }
    }
}

fn execute(line: &Line, request: &Request) {
    let reply = Reply {
        outcome: Outcome::Done(0),
        place: request.place,
        id: request.id,
    };
    line.send(&reply.to_bytes(), None).unwrap();
}

/// Repeats a call until it has a result.
fn until<T>(call: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    let in_time = || (begin.elapsed() < LIMIT).then_some(());
    let mut tries = std::iter::repeat_with(call).zip(std::iter::from_fn(in_time));
    tries
        .find_map(|(result, ())| result)
        .expect("nothing comes")
}

/// All places are in use for long, by requests that the agent executes.
#[test]
fn the_limit_of_an_answer_does_not_count_the_wait_for_a_place() {
    let (process, _) = refusing();
    let listener = Listener::bind(&name(process.slot, &process.identity)).unwrap();
    let buffer = Buffer::new(2 * PLACE);
    let ends: Vec<_> = (0..=PLACES).map(|_| pair()).collect();
    for (end, _) in &ends {
        post_read(end, &buffer, 2 * PLACE);
    }
    let agent = listener.accept().unwrap();
    let requests: Vec<_> = std::iter::from_fn(|| next(&agent)).collect();
    assert_eq!(requests.len(), 1 + PLACES);
    let (first, last) = (&ends[0].0, &ends[PLACES].0);
    let at_the_post = deadline(last).unwrap();
    execute(&agent, &requests[1]);
    let second_part = until(|| {
        assert!(first.poll().is_none());
        next(&agent)
    });
    let later_than = |time| {
        assert!(first.poll().is_none());
        deadline(last).filter(|&deadline| deadline > time)
    };
    let behind_an_answer = until(|| later_than(at_the_post));
    execute(&agent, &second_part);
    let done = until(|| first.poll());
    assert_eq!(done.status, IBV_WC_SUCCESS);
    // the place is free now
    let own = until(|| {
        assert!(last.poll().is_none());
        next(&agent)
    });
    assert_eq!(own.kind, Kind::Read);
    until(|| later_than(behind_an_answer));
}

/// Nothing wakes this process when the agent has accepted the connections that wait.
#[test]
fn a_full_queue_of_connections_is_tried_again_soon() {
    let (process, _) = refusing();
    let name = name(process.slot, &process.identity);
    let listener = Listener::bind_for(&name, 0).unwrap();
    let others: Vec<_> = std::iter::from_fn(|| Line::connect(&name).ok()).collect();
    assert!(!others.is_empty());
    let (end, _other) = pair();
    let buffer = Buffer::new(64);
    post_read(&end, &buffer, 64);
    let soon = sys::now_ns() + 1_000_000_000;
    assert!(deadline(&end).unwrap() < soon);
    while listener.accept().is_ok() {}
    let agent = until(|| {
        assert!(end.poll().is_none());
        listener.accept().ok()
    });
    assert_eq!(next(&agent).unwrap().kind, Kind::Hello);
    execute(&agent, &next(&agent).unwrap());
    let done = until(|| end.poll());
    assert_eq!(done.status, IBV_WC_SUCCESS);
}

/// Two queue pairs of this process, connected to each other, whose requests wait for the next
/// connection without a limit, or are lost.
fn patient_pair(kind: ibv_qp_type) -> (End, End) {
    let pair = (End::new(kind, false), End::new(kind, false));
    for (end, other) in [(&pair.0, &pair.1), (&pair.1, &pair.0)] {
        let mut attr = attributes(other.number());
        attr.timeout = 0;
        end.connect_as(attr);
    }
    pair
}

fn post_write(end: &End, buffer: &Buffer) {
    let mut sge = buffer.sge(8);
    let mut wr = send_wr(IBV_WR_RDMA_WRITE);
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = buffer.place();
    assert_eq!(end.post_send(&mut wr), 0);
}

/// As many queue pairs as there are places wait for one when their other ends are reset.
#[test]
fn a_queue_pair_without_a_connection_waits_for_no_place() {
    let (process, _) = refusing();
    let listener = Listener::bind(&name(process.slot, &process.identity)).unwrap();
    let buffer = Buffer::new(64);
    let users: Vec<_> = (0..PLACES).map(|_| pair()).collect();
    for (end, _) in &users {
        post_write(end, &buffer);
    }
    let agent = listener.accept().unwrap();
    let mut requests: Vec<_> = std::iter::from_fn(|| next(&agent)).collect();
    assert_eq!(requests.remove(0).kind, Kind::Hello);
    assert_eq!(requests.len(), PLACES);
    let mut later = Vec::new();
    for kind in [IBV_QPT_RC, IBV_QPT_UC] {
        let waiting: Vec<_> = (0..PLACES).map(|_| patient_pair(kind)).collect();
        for (end, _) in &waiting {
            post_write(end, &buffer);
        }
        for (_, other) in &waiting {
            let mut attr = attributes(0);
            attr.qp_state = IBV_QPS_RESET;
            assert_eq!(other.modify(&mut attr, IBV_QP_STATE), 0);
        }
        for (end, _) in &waiting {
            // the other end of a reliable one may be connected again
            let done = end.poll().map(|done| done.status);
            assert_eq!(done, (kind == IBV_QPT_UC).then_some(IBV_WC_SUCCESS));
        }
        later.push(pair());
        let (end, _) = &later[later.len() - 1];
        post_write(end, &buffer);
        assert!(next(&agent).is_none(), "no place is free");
        execute(&agent, &requests.remove(0));
        requests.push(until(|| {
            assert!(end.poll().is_none());
            next(&agent)
        }));
    }
}
