//! XRC: the end of an initiator's process is told to all that hold its target, whenever either of them came.
#![allow(unsafe_code, reason = "verbs is a C interface")]

#[path = "xrc/actor.rs"]
mod actor;
mod common;
#[path = "xrc/fleet.rs"]
mod fleet;

use self::fleet::{Actor, Place, connect};
use rdma_core_sys::*;

/// Another process of the machine may be given the place in between.
const TRIES: u32 = 100;

fn main() {
    fleet::main(&[
        ("who_held_before_is_told", held_before),
        ("one_that_comes_later_is_missed", comes_later),
    ]);
}

fn open(place: &Place) -> Actor {
    let mut actor = Actor::start();
    actor.does(&place.open(libc::O_CREAT));
    actor
}

/// Who connected the target has ended, and the other holder had opened it before.
fn held_before() {
    let place = Place::new();
    let (mut creator, mut holder) = (open(&place), open(&place));
    let target = creator.number("target");
    assert_eq!(holder.number(&format!("hold {target}")), target);
    let mut sender = Actor::start();
    // It sends nothing, and so knows no holder.
    connect(&mut sender, &mut creator, target);
    creator.kill();
    sender.kill();
    holder.event(IBV_EVENT_QP_FATAL, target);
    holder.does(&format!("destroy {target}"));
    holder.refuses(&format!("hold {target}"), libc::EINVAL);
}

/// The target is connected to a number that nobody has; the one that has it later sends through the target to another
/// process, and ends.
fn comes_later() {
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
        holder.event(IBV_EVENT_QP_FATAL, target);
        return;
    }
    panic!("another process has the place each time");
}
