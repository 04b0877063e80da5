//! Several holders of one target: those that run late, close it before the others, or change it at
//! the same time.

use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::fleet::{Actor, Place, connect, connect_between, connect_with_timeout};
use super::{CREATE, receiver};

/// Maximum number of tries: another process of the machine may get the slot in between.
const TRIES: u32 = 20;

fn member(place: &Place) -> Actor {
    let mut actor = Actor::start();
    actor.does(&place.open(CREATE));
    actor
}

fn hold(holder: &mut Actor, target: u32) {
    assert_eq!(holder.number(&format!("hold {target}")), target);
}

/// A holder is stopped while the initiator's process ends and another one with the same queue pair
/// number takes its place. It gets the event of each of them.
pub(crate) fn late() {
    for _ in 0..TRIES {
        let place = Place::new();
        let (mut connector, srq) = receiver(&place);
        let mut late = member(&place);
        let target = connector.number("target");
        hold(&mut late, target);
        let mut sender = Actor::start();
        let first = connect(&mut sender, &mut connector, target);
        sender.does(&format!("send {first} {srq} 1 10"));
        sender.sent(1, IBV_WC_SUCCESS);
        connector.got(0, 1, 10, target);
        // it watches the initiator's process by now
        let connected = format!("{IBV_QPS_RTS} {first}");
        assert_eq!(late.ask(&format!("state {target}")), connected);
        late.stop();
        sender.does("again");
        connector.event(IBV_EVENT_QP_FATAL, target);
        connector.does(&format!("reset {target}"));
        sender.does("open");
        let second = connect(&mut sender, &mut connector, target);
        late.go_on();
        if second != first {
            continue;
        }
        late.event(IBV_EVENT_QP_FATAL, target);
        assert_eq!(late.ask("events"), "none");
        assert_eq!(connector.ask("events"), "none");
        sender.does(&format!("send {second} {srq} 2 10"));
        sender.sent(2, IBV_WC_SUCCESS);
        connector.got(1, 2, 10, target);
        sender.kill();
        connector.event(IBV_EVENT_QP_FATAL, target);
        late.event(IBV_EVENT_QP_FATAL, target);
        return;
    }
    panic!("another process has the place each time");
}

/// The initiator ends before a holder has opened it, and another process has its slot by then. The
/// process that connected the target has ended too.
pub(crate) fn successor() {
    for _ in 0..TRIES {
        let place = Place::new();
        let (mut connector, mut late) = (member(&place), member(&place));
        let target = connector.number("target");
        hold(&mut late, target);
        // an earlier connection, for which the connector opens the other holder
        let mut other = Actor::start();
        connect(&mut other, &mut connector, target);
        connector.does(&format!("reset {target}"));
        late.stop();
        let mut sender = Actor::start();
        let first = connect(&mut sender, &mut connector, target);
        connector.kill();
        sender.does("again");
        sender.does("open");
        let second = sender.number("initiator 7");
        late.go_on();
        if second == first {
            late.event(IBV_EVENT_QP_FATAL, target);
            return;
        }
    }
    panic!("another process has the place each time");
}

/// The holder that the initiator watches closes the target and lives on, and the other one is
/// killed.
pub(crate) fn closed_first() {
    let place = Place::new();
    let (mut first, srq) = receiver(&place);
    let mut second = member(&place);
    let target = first.number("target");
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut first, target);
    sender.does(&format!("send {qp} {srq} 1 10"));
    sender.sent(1, IBV_WC_SUCCESS);
    first.got(0, 1, 10, target);
    hold(&mut second, target);
    first.does(&format!("destroy {target}"));
    sender.does(&format!("send {qp} {srq} 2 10"));
    sender.sent(2, IBV_WC_SUCCESS);
    first.got(1, 2, 10, target);
    second.kill();
    sender.event(IBV_EVENT_QP_FATAL, qp);
    sender.does(&format!("send {qp} {srq} 3 10"));
    sender.sent(3, IBV_WC_WR_FLUSH_ERR);
}

/// The holder that the initiator watches ends while the initiator can't open another process.
pub(crate) fn shortage() {
    for idle in [false, true] {
        let place = Place::new();
        let (mut owner, srq) = receiver(&place);
        let (mut first, mut second) = (member(&place), member(&place));
        let target = first.number("target");
        let mut sender = Actor::start();
        let qp = connect(&mut sender, &mut first, target);
        sender.does(&format!("send {qp} {srq} 1 10"));
        sender.sent(1, IBV_WC_SUCCESS);
        owner.got(0, 1, 10, target);
        hold(&mut second, target);
        sender.does("descriptors 3");
        first.kill();
        assert_eq!(sender.ask("events"), "none");
        if !idle {
            sender.does(&format!("send {qp} {srq} 2 10"));
        }
        sender.does("descriptors 1024");
        if idle {
            // the longest pause between two tries
            std::thread::sleep(Duration::from_millis(1200));
        } else {
            sender.sent(2, IBV_WC_SUCCESS);
            owner.got(1, 2, 10, target);
        }
        second.kill();
        sender.event(IBV_EVENT_QP_FATAL, qp);
    }
}

/// The first request to the shared receive queue of a further process, while `hinder` keeps the
/// initiator from opening this process: nothing fails. It is executed after `end`.
fn owner_is_awaited(
    hinder: impl FnOnce(&mut Actor, &mut Actor),
    end: impl FnOnce(&mut Actor, &mut Actor),
) {
    let place = Place::new();
    let (mut holder, srq) = receiver(&place);
    let (mut owner, other) = receiver(&place);
    let target = holder.number("target");
    let mut sender = Actor::start();
    let qp = connect_with_timeout(&mut sender, &mut holder, target, 0);
    sender.does(&format!("send {qp} {srq} 1 10"));
    sender.sent(1, IBV_WC_SUCCESS);
    holder.got(0, 1, 10, target);
    hinder(&mut sender, &mut owner);
    sender.does(&format!("send {qp} {other} 2 10"));
    assert_eq!(
        (sender.ask("events"), holder.ask("events")),
        ("none".into(), "none".into())
    );
    end(&mut sender, &mut owner);
    sender.sent(2, IBV_WC_SUCCESS);
    owner.got(0, 2, 10, target);
}

/// The initiator can't open the owner of a shared receive queue.
pub(crate) fn unopened_owner() {
    owner_is_awaited(
        |sender, _| sender.does("descriptors 3"),
        |sender, _| sender.does("descriptors 1024"),
    );
}

/// The owner of a shared receive queue is stopped when the first request names the queue. If only
/// its agent can open its files, it can't be opened until it continues.
pub(crate) fn stopped_owner() {
    owner_is_awaited(
        |_, owner| owner.stop(),
        |_, owner| {
            std::thread::sleep(Duration::from_millis(1000));
            owner.go_on();
        },
    );
}

/// No member of the target's domain can be opened when the initiator is connected. A request is
/// executed although the initiator's process sleeps until then, and the end of the holder is
/// reported although no request was posted.
pub(crate) fn unopened_domain() {
    for idle in [false, true] {
        let place = Place::new();
        let (mut holder, srq) = receiver(&place);
        let target = holder.number("target");
        let mut sender = Actor::start();
        let qp = connect_between(&mut sender, &mut holder, target, 0, |sender, _| {
            sender.does("descriptors 3");
        });
        if idle {
            sender.does("descriptors 1024");
            sender.does("mapped");
        } else {
            sender.does(&format!("send {qp} {srq} 1 10"));
            sender.say("doze 20000");
            // its retry thread sleeps too by then
            std::thread::sleep(Duration::from_millis(600));
            let begin = Instant::now();
            sender.allow_descriptors(1024);
            sender.hear();
            let waited = begin.elapsed();
            assert!(waited < Duration::from_millis(10_000), "{waited:?}");
            sender.sent(1, IBV_WC_SUCCESS);
            holder.got(0, 1, 10, target);
        }
        holder.kill();
        sender.event(IBV_EVENT_QP_FATAL, qp);
    }
}

/// All members of a target's domain are stopped when the initiator is connected. If only their
/// agents can open their files, each try takes 2 s: it is not made by each poll.
pub(crate) fn stopped_domain() {
    let (place, other) = (Place::new(), Place::new());
    let (mut running, srq) = receiver(&other);
    let target = running.number("target");
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut running, target);
    let (mut stopped, late) = receiver(&place);
    let last = stopped.number("target");
    let waiting = connect_between(&mut sender, &mut stopped, last, 0, |_, stopped| {
        stopped.stop();
    });
    // inline, as the later ones use the same buffer
    sender.does(&format!("batch {waiting} {late} 9 10"));
    // elsewhere the message is in the ring of the stopped process
    let (delivered, mut is_early) = (format!("9 {IBV_WC_SUCCESS}"), false);
    let begin = Instant::now();
    for number in 0..8 {
        sender.does(&format!("send {qp} {srq} {number} 10"));
        let mut sent = sender.ask("sent");
        if sent == delivered {
            is_early = true;
            sent = sender.ask("sent");
        }
        assert_eq!(sent, format!("{number} {IBV_WC_SUCCESS}"));
        running.got(number, number, 10, target);
    }
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(8_000), "{took:?}");
    stopped.go_on();
    if !is_early {
        assert_eq!(sender.ask("sent"), delivered);
    }
    stopped.got(0, 9, 10, last);
}

/// As [`shortage`], while an atomic may be under way: with refused copies, the agent of a process
/// that is stopped has its request.
pub(crate) fn once() {
    let place = Place::new();
    let (mut owner, srq) = receiver(&place);
    let (mut first, mut second) = (member(&place), member(&place));
    let target = first.number("target");
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut first, target);
    let memory = owner.ask("memory");
    owner.does("clear 0");
    sender.does(&format!("add {qp} {srq} 1 8 {memory} 40"));
    sender.sent(1, IBV_WC_SUCCESS);
    hold(&mut second, target);
    owner.stop();
    sender.does(&format!("add {qp} {srq} 2 8 {memory} 2"));
    sender.does("descriptors 3");
    first.kill();
    assert_eq!(sender.ask("events"), "none");
    sender.does("descriptors 1024");
    // the longest pause between two tries
    std::thread::sleep(Duration::from_millis(1200));
    owner.go_on();
    sender.sent(2, IBV_WC_SUCCESS);
    assert_eq!(sender.ask("word 8"), "40");
    // behind all that the owner may have been asked for
    sender.does(&format!("add {qp} {srq} 3 8 {memory} 0"));
    sender.sent(3, IBV_WC_SUCCESS);
    assert_eq!(
        (sender.ask("word 8"), owner.ask("word 0")),
        ("42".into(), "42".into())
    );
    second.kill();
    sender.event(IBV_EVENT_QP_FATAL, qp);
}

/// Two initiators wait for one target. The former one asks to be rung behind the next one.
pub(crate) fn next_is_rung() {
    let place = Place::new();
    let (mut holder, srq) = receiver(&place);
    let (mut former, mut next) = (Actor::start(), Actor::start());
    let (target, other) = (holder.number("target"), holder.number("target"));
    // the rings between all of them exist
    for (i, sender) in (0..).zip([&mut former, &mut next]) {
        let qp = connect(sender, &mut holder, other);
        sender.does(&format!("send {qp} {srq} {i} 10"));
        sender.sent(i, IBV_WC_SUCCESS);
        holder.got(i, i, 10, other);
        holder.does(&format!("reset {other}"));
    }
    let qp = connect_with_timeout(&mut former, &mut holder, target, 0);
    holder.does(&format!("reset {target}"));
    let source = next.number("initiator 7");
    for command in [
        format!("init {source}"),
        format!("rtr {source} {target}"),
        format!("rts_timeout {source} 0"),
        format!("send {source} {srq} 8 10"),
    ] {
        next.does(&command);
    }
    next.say("doze 4000");
    // its retry thread sleeps too by then
    std::thread::sleep(Duration::from_millis(600));
    // it polls from now on, and is the last one that has asked
    former.does(&format!("send {qp} {srq} 9 10"));
    std::thread::sleep(Duration::from_millis(200));
    let begin = Instant::now();
    for command in [
        format!("init {target}"),
        format!("rtr {target} {source}"),
        format!("rts {target}"),
    ] {
        holder.does(&command);
    }
    next.hear();
    let waited = begin.elapsed();
    assert!(waited < Duration::from_millis(2000), "{waited:?}");
    next.sent(8, IBV_WC_SUCCESS);
    holder.got(2, 8, 10, target);
}

/// One handle removes the rights of the initiator while another one changes an attribute.
pub(crate) fn rights() {
    let place = Place::new();
    let (mut holder, _) = receiver(&place);
    let target = holder.number("target");
    let mut sender = Actor::start();
    connect(&mut sender, &mut holder, target);
    holder.does(&format!("restrict {target} 1000"));
}

/// RESET is legal in every state, so also while another handle changes the state.
pub(crate) fn ends() {
    let place = Place::new();
    let mut holder = member(&place);
    let target = holder.number("target");
    holder.does(&format!("contend {target} 1000"));
}

/// A process that can't open the members of a domain makes no second one for the same file.
pub(crate) fn no_second_domain() {
    let place = Place::new();
    let mut member = member(&place);
    let target = member.number("target");
    let mut late = Actor::start();
    for limit in 3..100 {
        late.does(&format!("descriptors {limit}"));
        let reply = late.ask(&place.open(CREATE));
        if reply == "ok" {
            late.does("descriptors 1024");
            hold(&mut late, target);
            assert!(limit > 3);
            return;
        }
        // EACCES: it can't reach the agent of a process that has no other way
        let errors = [libc::EMFILE, libc::EACCES].map(|errno| format!("errno {errno}"));
        assert!(errors.contains(&reply), "{reply}");
    }
    panic!("the domain can't be opened");
}

/// While one process tries to open a domain whose members are stopped, another one opens another
/// domain. If only the members' agents can open their files, the first one waits for them.
pub(crate) fn stopped_members() {
    let (place, other) = (Place::new(), Place::new());
    let members: Vec<_> = (0..3).map(|_| member(&place)).collect();
    let (mut late, mut quick) = (Actor::start(), Actor::start());
    for member in &members {
        member.stop();
    }
    late.say(&place.open(CREATE));
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    quick.does(&other.open(CREATE));
    let took = begin.elapsed();
    for member in &members {
        member.go_on();
    }
    assert_eq!(late.hear(), "ok");
    assert!(took < Duration::from_millis(1000), "{took:?}");
}
