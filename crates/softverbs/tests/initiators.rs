//! Initiators of XRC that start late, end early, or have the slot of an ended one: the events that
//! the holders of the target receive, and the state of the receives that these initiators have
//! claimed.
#![allow(unsafe_code, reason = "verbs is a C interface")]

#[path = "xrc/actor.rs"]
mod actor;
mod common;
#[path = "xrc/fleet.rs"]
mod fleet;

use self::fleet::{Actor, Place, connect};
use rdma_core_sys::*;

/// Maximum number of tries: another process of the machine may get the slot in between.
const TRIES: u32 = 100;

fn main() {
    fleet::main(&[
        ("who_held_before_is_told", held_before),
        (
            "one_that_ends_before_it_is_connected_is_missed",
            unconnected,
        ),
        ("one_that_comes_later_is_missed", || comes_later(false)),
        ("one_that_comes_later_and_ends_unseen_is_missed", || {
            comes_later(true)
        }),
        ("one_that_nobody_knows_claims_nothing", unknown),
        (
            "one_in_the_place_of_another_keeps_its_claims",
            in_anothers_place,
        ),
    ]);
}

fn open(place: &Place) -> Actor {
    let mut actor = Actor::start();
    actor.does(&place.open(libc::O_CREAT));
    actor
}

/// The process that connected the target has ended; another process had opened the target before.
fn held_before() {
    let place = Place::new();
    let (mut creator, mut holder) = (open(&place), open(&place));
    let target = creator.number("target");
    assert_eq!(holder.number(&format!("hold {target}")), target);
    let mut sender = Actor::start();
    // it has sent nothing, so it has not opened any other process
    connect(&mut sender, &mut creator, target);
    creator.kill();
    sender.kill();
    holder.event(IBV_EVENT_QP_FATAL, target);
    holder.does(&format!("destroy {target}"));
    holder.refuses(&format!("hold {target}"), libc::EINVAL);
}

/// The target is connected first: its initiator ends in INIT.
fn unconnected() {
    for destroyed in [false, true] {
        let place = Place::new();
        let (mut connector, mut holder) = (open(&place), open(&place));
        let target = connector.number("target");
        assert_eq!(holder.number(&format!("hold {target}")), target);
        let mut sender = Actor::start();
        let source = sender.number("initiator 7");
        sender.does(&format!("init {source}"));
        for command in [
            format!("init {target}"),
            format!("rtr {target} {source}"),
            format!("rts {target}"),
        ] {
            connector.does(&command);
        }
        let connected = format!("{IBV_QPS_RTS} {source}");
        assert_eq!(holder.ask(&format!("state {target}")), connected);
        if destroyed {
            sender.does(&format!("destroy {source}"));
        }
        sender.kill();
        for actor in [&mut connector, &mut holder] {
            if destroyed {
                assert_eq!(actor.ask("events"), "none");
            } else {
                actor.event(IBV_EVENT_QP_FATAL, target);
            }
        }
    }
}

/// The target is connected to a number that no queue pair has. A queue pair that gets the number
/// later sends through the target to another process, and ends. `unseen`: before the holder of the
/// target runs again.
fn comes_later(unseen: bool) {
    let place = Place::new();
    let (mut holder, mut receiver) = (open(&place), open(&place));
    let srq = receiver.number("srq 8");
    for i in 0..8 {
        receiver.does(&format!("receive {i} 100"));
    }
    let target = holder.number("target");
    let mut sender = Actor::start();
    let mut first = sender.number("initiator 7");
    for _ in 0..TRIES {
        sender.does("again");
        holder.does(&format!("init {target}"));
        holder.does(&format!("rtr {target} {first}"));
        holder.does(&format!("rts {target}"));
        sender.does("open");
        let second = sender.number("initiator 7");
        if second != first {
            holder.does(&format!("reset {target}"));
            first = second;
            continue;
        }
        if unseen {
            holder.stop();
        }
        for command in [
            format!("init {first}"),
            format!("rtr {first} {target}"),
            format!("rts {first}"),
            format!("send {first} {srq} 3 10"),
        ] {
            sender.does(&command);
        }
        sender.sent(3, IBV_WC_SUCCESS);
        receiver.got(0, 3, 10, target);
        sender.kill();
        if unseen {
            holder.go_on();
        }
        holder.event(IBV_EVENT_QP_FATAL, target);
        return;
    }
    panic!("another process has the place each time");
}

/// The initiator ends before the owner of the only receive has checked it.
fn unknown() {
    let place = Place::new();
    let (mut holder, mut owner) = (open(&place), open(&place));
    let srq = owner.number("srq 8");
    owner.does("receive 0 100");
    let (mut first, mut second) = (Actor::start(), Actor::start());
    let target = holder.number("target");
    let qp = connect(&mut first, &mut holder, target);
    owner.stop();
    first.does(&format!("send {qp} {srq} 1 10"));
    first.kill();
    owner.go_on();
    holder.event(IBV_EVENT_QP_FATAL, target);
    let target = holder.number("target");
    let qp = connect(&mut second, &mut holder, target);
    second.does(&format!("send {qp} {srq} 2 10"));
    second.sent(2, IBV_WC_SUCCESS);
    owner.got(0, 2, 10, target);
}

/// The slot of the claiming initiator belongs to another process, which the owner of the receives
/// has not detected yet.
fn in_anothers_place() {
    let place = Place::new();
    let (mut holder, mut owner) = (open(&place), open(&place));
    let srq = owner.number("srq 8");
    let mut sender = Actor::start();
    for _ in 0..TRIES {
        owner.does("receive 0 100");
        let target = holder.number("target");
        let first = connect(&mut sender, &mut holder, target);
        sender.does(&format!("send {first} {srq} 1 10"));
        sender.sent(1, IBV_WC_SUCCESS);
        owner.got(0, 1, 10, target);
        // another receive, which is the next one when the first is returned
        owner.does("receive 1 100");
        owner.does("receive 2 100");
        owner.stop();
        sender.does("again");
        sender.does("open");
        let target = holder.number("target");
        let second = connect(&mut sender, &mut holder, target);
        sender.does(&format!("send {second} {srq} 2 10"));
        owner.go_on();
        sender.sent(2, IBV_WC_SUCCESS);
        owner.got(1, 2, 10, target);
        sender.does(&format!("send {second} {srq} 3 10"));
        sender.sent(3, IBV_WC_SUCCESS);
        owner.got(2, 3, 10, target);
        // the number contains the slot
        if second >> 14 == first >> 14 {
            return;
        }
    }
    panic!("another process has the place each time");
}
