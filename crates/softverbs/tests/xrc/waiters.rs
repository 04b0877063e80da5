//! The processes that a posted receive, and the end of a shared receive queue, wake.

use std::time::{Duration, Instant};

use super::absent::{SOON, unready};
use super::actor::ROOM;
use super::fleet::{Actor, Place, connect};
use rdma_core_sys::*;

/// Time that a process sleeps if nothing wakes it, in milliseconds.
const SLEEP: u32 = 5_000;
/// In one of the rounds at least, a waiting process must react within this time. The retry thread
/// takes part after 250 ms.
const AT_ONCE: Duration = Duration::from_millis(100);
/// Time from the request until the receive is posted: before and after the retry thread takes part.
const DELAYS: [u64; 4] = [50, 700, 50, 50];

/// An initiator that has sent a message to the queue: the owner has opened its process.
fn known(owner: &mut Actor, srq: u32) -> (Actor, u32, u32) {
    let mut sender = Actor::start();
    let target = owner.number("target");
    let qp = connect(&mut sender, owner, target);
    owner.does(&format!("receive 0 {ROOM}"));
    sender.does(&format!("send {qp} {srq} 0 50"));
    sender.sent(0, IBV_WC_SUCCESS);
    owner.got(0, 0, 50, target);
    (sender, qp, target)
}

/// A posted receive wakes the initiator that waits for it, and no other process.
pub(super) fn alone() {
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let (mut waiter, qp, target) = known(&mut a, srq);
    let (mut bystander, ..) = known(&mut a, srq);
    let mut best = SOON;
    for (number, delay) in (1..).zip(DELAYS) {
        waiter.does(&format!("send {qp} {srq} {number} 50"));
        waiter.say(&format!("doze {SLEEP}"));
        bystander.say(&format!("doze {}", delay + 1_000));
        std::thread::sleep(Duration::from_millis(delay));
        let posted = Instant::now();
        a.does(&format!("receive {number} {ROOM}"));
        a.got(number, number, 50, target);
        let took = posted.elapsed();
        assert!(took < SOON, "{took:?}");
        best = best.min(took);
        waiter.hear();
        waiter.sent(number, IBV_WC_SUCCESS);
        // one that waits no more is not rung either
        a.does(&format!("receive {number} {ROOM}"));
        assert_eq!(bystander.hear(), "0", "the bystander was woken");
        waiter.does(&format!("send {qp} {srq} 0 50"));
        waiter.sent(0, IBV_WC_SUCCESS);
        a.got(number, 0, 50, target);
    }
    assert!(best < AT_ONCE, "{best:?}");
}

/// Of several initiators that wait, each is woken, also after others have taken the receives.
pub(super) fn many() {
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let mut all: Vec<_> = (0..4).map(|_| known(&mut a, srq)).collect();
    for (waiter, qp, _) in &mut all {
        waiter.does(&format!("send {qp} {srq} 1 50"));
        waiter.say(&format!("doze {SLEEP}"));
    }
    std::thread::sleep(Duration::from_millis(700));
    for number in 0..4 {
        let posted = Instant::now();
        a.does(&format!("receive {number} {ROOM}"));
        let received = a.ask("received");
        let wanted = format!("{number} {IBV_WC_SUCCESS} 50 0 ");
        assert!(received.starts_with(&wanted), "{received}");
        let took = posted.elapsed();
        assert!(took < SOON, "{took:?}");
    }
    for (mut waiter, ..) in all {
        waiter.hear();
        waiter.sent(1, IBV_WC_SUCCESS);
    }
}

/// Of many initiators that wait, a posted receive wakes a few, and each of them is served.
pub(super) fn a_crowd() {
    const COUNT: u64 = 24;
    /// Processes that one post rings, and one that the message of another wakes.
    const FEW: u64 = 5;
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let mut all: Vec<_> = (0..COUNT).map(|_| known(&mut a, srq)).collect();
    for (waiter, qp, _) in &mut all {
        waiter.does(&format!("send {qp} {srq} 1 50"));
        waiter.say(&format!("doze {}", 4 * SLEEP));
    }
    std::thread::sleep(Duration::from_millis(100));
    for number in 0..COUNT {
        let posted = Instant::now();
        a.does(&format!("receive {} {ROOM}", number % 8));
        let received = a.ask("received");
        let wanted = format!("{} {IBV_WC_SUCCESS} 50 0 ", number % 8);
        assert!(received.starts_with(&wanted), "{received}");
        let took = posted.elapsed();
        assert!(took < SOON, "{took:?}");
    }
    let mut woken = 0;
    for (mut waiter, ..) in all {
        woken += waiter.hear().parse::<u64>().unwrap();
        waiter.sent(1, IBV_WC_SUCCESS);
    }
    // a wake-up of each for each message would be 300
    assert!(woken <= FEW * COUNT, "{woken}");
}

/// Of several initiators that wait, all but one are stopped. That one is served, whichever it is, by
/// an owner that makes progress or makes no call.
pub(super) fn the_only_one_that_runs() {
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let mut all: Vec<_> = (0..8).map(|_| known(&mut a, srq)).collect();
    for (waiter, qp, _) in &mut all {
        waiter.does(&format!("send {qp} {srq} 1 50"));
        waiter.say(&format!("doze {}", 4 * SLEEP));
    }
    std::thread::sleep(Duration::from_millis(50));
    for away in [true, false] {
        for running in 0..all.len() {
            let others = |(waiter, _): &(usize, &(Actor, u32, u32))| *waiter != running;
            for (_, (waiter, ..)) in all.iter().enumerate().filter(others) {
                waiter.stop();
            }
            let posted = Instant::now();
            match away {
                true => a.say(&format!("receive_away 0 {ROOM} 1500")),
                false => a.does(&format!("receive 0 {ROOM}")),
            }
            if !away {
                let received = a.ask("received");
                let wanted = format!("0 {IBV_WC_SUCCESS} 50 ");
                assert!(received.starts_with(&wanted), "{received}");
            }
            let (waiter, qp, _) = &mut all[running];
            waiter.hear();
            let took = posted.elapsed();
            assert!(took < SOON, "{running}: {took:?}");
            waiter.sent(1, IBV_WC_SUCCESS);
            if away {
                assert_eq!(a.hear(), "ok");
                a.ask("received");
            }
            waiter.does(&format!("send {qp} {srq} 1 50"));
            waiter.say(&format!("doze {}", 4 * SLEEP));
            for (_, (waiter, ..)) in all.iter().enumerate().filter(others) {
                waiter.go_on();
            }
        }
    }
}

/// A sender that waits for receives: the process, its queue pair, and the number of the shared
/// receive queue in its requests.
type Waiter = (Actor, u32, u32);

/// Two senders wait for receives of the same queue of `a`. One of them is woken in vain, and waits
/// for the next receive, whose owner makes no progress.
fn in_vain(a: &mut Actor, waiters: &mut [Waiter; 2]) {
    for (number, delay) in (1..).zip(DELAYS.into_iter().chain(DELAYS)) {
        for ((sender, qp, srq), len) in waiters.iter_mut().zip([50, 60]) {
            sender.does(&format!("send {qp} {srq} {number} {len}"));
        }
        for (sender, ..) in waiters.iter_mut() {
            sender.say(&format!("doze {SLEEP}"));
        }
        std::thread::sleep(Duration::from_millis(delay));
        // one of the two takes it, and the other one finds none
        a.does(&format!("receive 0 {ROOM}"));
        let taken = a.ask("received");
        let is_first = taken.starts_with(&format!("0 {IBV_WC_SUCCESS} 50 "));
        std::thread::sleep(Duration::from_millis(20));
        let posted = Instant::now();
        a.say(&format!("receive_away 1 {ROOM} 1500"));
        let (one, other) = if is_first { (0, 1) } else { (1, 0) };
        waiters[other].0.hear();
        let took = posted.elapsed();
        assert!(took < SOON, "{taken}: {took:?}");
        assert_eq!(a.hear(), "ok");
        let wanted = format!("1 {IBV_WC_SUCCESS} {} ", [50, 60][other]);
        assert!(a.ask("received").starts_with(&wanted));
        waiters[one].0.hear();
        for (sender, ..) in waiters.iter_mut() {
            sender.sent(number, IBV_WC_SUCCESS);
        }
    }
}

/// [`in_vain`] with initiators of XRC.
pub(super) fn initiators_in_vain() {
    let place = Place::new();
    let (mut a, srq) = unready(&place);
    let mut waiters = [(); 2].map(|()| {
        let (sender, qp, _) = known(&mut a, srq);
        (sender, qp, srq)
    });
    // a queue of XRC is of no connection, as in the kernel
    a.refuses("rc", libc::EINVAL);
    in_vain(&mut a, &mut waiters);
}

/// [`in_vain`] with reliable connections.
pub(super) fn connections_in_vain() {
    let mut a = Actor::start();
    a.does("basic_srq 8");
    let mut waiters = [(); 2].map(|()| {
        let mut sender = Actor::start();
        let (ours, theirs) = (a.number("rc"), sender.number("rc"));
        for (actor, own, other) in [(&mut a, ours, theirs), (&mut sender, theirs, ours)] {
            actor.does(&format!("init {own}"));
            actor.does(&format!("rtr {own} {other}"));
            actor.does(&format!("rts {own}"));
        }
        (sender, theirs, 0)
    });
    in_vain(&mut a, &mut waiters);
}

/// An initiator that waits without a limit for a receive of a queue is woken when the queue is
/// destroyed, and its request fails.
pub(super) fn destroyed() {
    for delay in DELAYS {
        let place = Place::new();
        let (mut a, srq) = unready(&place);
        let (mut waiter, qp, target) = known(&mut a, srq);
        waiter.does(&format!("send {qp} {srq} 1 50"));
        waiter.say(&format!("doze {SLEEP}"));
        std::thread::sleep(Duration::from_millis(delay));
        let begin = Instant::now();
        a.does("end_srq");
        waiter.hear();
        let took = begin.elapsed();
        assert!(took < SOON, "{took:?}");
        waiter.sent(1, IBV_WC_REM_INV_REQ_ERR);
        a.event(IBV_EVENT_QP_REQ_ERR, target);
    }
}
