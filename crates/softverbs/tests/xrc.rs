//! XRC between processes: delivered messages, refused calls, and the remaining state after any
//! process is killed.
#![allow(unsafe_code, reason = "verbs is a C interface")]

#[path = "xrc/absent.rs"]
mod absent;
#[path = "xrc/actor.rs"]
mod actor;
mod common;
#[path = "xrc/fleet.rs"]
mod fleet;
#[path = "xrc/holders.rs"]
mod holders;
#[path = "xrc/waiters.rs"]
mod waiters;

use self::actor::ROOM;
use self::fleet::{Actor, Place, connect};
use rdma_core_sys::*;
use std::time::Duration;

const CREATE: i32 = libc::O_CREAT;
const EXCLUSIVE: i32 = libc::O_CREAT | libc::O_EXCL;

const CASES: &[(&str, fn())] = &[
    ("messages_of_all_kinds", messages),
    ("one_connection_for_several_processes", several_processes),
    ("rdma_goes_to_the_queues_owner", rdma),
    ("rdma_without_a_request", at_once),
    ("requests_that_were_not_executed", not_executed),
    ("domains_by_file", domains),
    ("what_is_in_use_stays", busy),
    ("targets_are_held", held),
    ("numbers_that_lead_nowhere", nowhere),
    ("receives_that_do_not_fit", too_short),
    ("receives_whose_region_has_ended", deregistered),
    ("a_message_waits_for_its_receive", waits),
    (
        "a_message_waits_where_one_end_has_no_barriers",
        waits_unfenced,
    ),
    ("requests_of_an_absent_initiator", absent::initiator),
    ("a_receiver_that_is_absent_too", absent::both),
    ("an_absent_initiator_that_is_killed", absent::killed),
    (
        "an_absent_initiator_whose_receiver_is_killed",
        absent::bereaved,
    ),
    ("retries_of_an_absent_initiator", absent::retries),
    ("a_receive_wakes_who_waits_for_it_alone", waiters::alone),
    ("each_of_those_that_wait_is_woken", waiters::many),
    ("a_receive_wakes_few_of_many", waiters::a_crowd),
    (
        "the_only_one_that_is_not_stopped_is_served",
        waiters::the_only_one_that_runs,
    ),
    (
        "an_initiator_that_was_woken_in_vain_is_woken_again",
        waiters::initiators_in_vain,
    ),
    (
        "a_connection_that_was_woken_in_vain_is_woken_again",
        waiters::connections_in_vain,
    ),
    (
        "the_end_of_a_queue_wakes_who_waits_for_it",
        waiters::destroyed,
    ),
    ("deaths_in_every_order", deaths),
    ("an_initiators_end_is_told_to_all", initiator_ends),
    ("a_holder_out_of_reach_is_told_later", unreachable_holder),
    ("numbers_of_two_processes_differ", random_numbers),
    ("a_number_of_an_ended_owner_is_refused", successors),
    ("a_sleeping_owner_learns_of_its_limit", limits),
    ("a_late_holder_leaves_the_next_connection", holders::late),
    ("a_late_holder_takes_no_successor", holders::successor),
    (
        "the_last_holder_ends_behind_the_close_of_another",
        holders::closed_first,
    ),
    ("a_shortage_ends_no_initiator", holders::shortage),
    ("a_shortage_repeats_no_atomic", holders::once),
    ("a_shortage_refuses_no_queue", holders::unopened_owner),
    ("a_shortage_hides_no_domain", holders::unopened_domain),
    (
        "a_domain_whose_members_are_stopped_is_awaited",
        holders::stopped_domain,
    ),
    (
        "an_owner_that_is_stopped_is_awaited",
        holders::stopped_owner,
    ),
    ("the_next_initiator_is_rung", holders::next_is_rung),
    ("rights_that_are_removed_stay_removed", holders::rights),
    ("a_target_can_be_reset_while_it_fails", holders::ends),
    (
        "a_short_process_makes_no_second_domain",
        holders::no_second_domain,
    ),
    (
        "stopped_members_delay_their_own_domain_alone",
        holders::stopped_members,
    ),
];

pub(crate) fn main() {
    fleet::main(CASES);
}

/// A process with a domain, a shared receive queue of eight receives, and the queue's number.
fn receiver(place: &Place) -> (Actor, u32) {
    let mut actor = Actor::start();
    actor.does(&place.open(CREATE));
    let number = actor.number("srq 8");
    for i in 0..8 {
        actor.does(&format!("receive {i} {ROOM}"));
    }
    (actor, number)
}

fn messages() {
    let place = Place::new();
    let (mut receiver, srq) = receiver(&place);
    let mut sender = Actor::start();
    let target = receiver.number("target");
    let qp = connect(&mut sender, &mut receiver, target);
    for (i, len) in [1, 0, 64, 4000, 8192, 8193, ROOM - 1]
        .into_iter()
        .enumerate()
    {
        sender.does(&format!("send {qp} {srq} {i} {len}"));
        sender.sent(i as u64, IBV_WC_SUCCESS);
        receiver.got(i as u64, i as u64, len, target);
    }
    sender.does(&format!("batch {qp} {srq} 7 40"));
    sender.sent(7, IBV_WC_SUCCESS);
    receiver.got(7, 7, 40, target);
    receiver.does(&format!("receive 3 {ROOM}"));
    sender.does(&format!("send_imm {qp} {srq} 9 100 0 0 77"));
    sender.sent(9, IBV_WC_SUCCESS);
    assert_eq!(receiver.ask("awaken"), format!("3 0 100 77 {target}"));
    assert_eq!(receiver.ask("holds 3 9 100"), "true");
}

fn several_processes() {
    let place = Place::new();
    let mut all: Vec<_> = (0..4).map(|_| receiver(&place)).collect();
    let mut sender = Actor::start();
    let target = all[0].0.number("target");
    let qp = connect(&mut sender, &mut all[0].0, target);
    for round in 0..8u64 {
        for (i, (_, srq)) in all.iter().enumerate() {
            let number = 10 * i as u64 + round;
            sender.does(&format!("send {qp} {srq} {number} 300"));
            sender.sent(number, IBV_WC_SUCCESS);
        }
    }
    for (i, (receiver, _)) in all.iter_mut().enumerate() {
        for round in 0..8 {
            receiver.got(round, 10 * i as u64 + round, 300, target);
        }
    }
}

fn rdma() {
    let place = Place::new();
    let (mut first, first_srq) = receiver(&place);
    let (mut second, second_srq) = receiver(&place);
    let mut sender = Actor::start();
    let target = first.number("target");
    let qp = connect(&mut sender, &mut first, target);
    for (receiver, srq) in [(&mut first, first_srq), (&mut second, second_srq)] {
        let memory = receiver.ask("memory");
        receiver.does("clear 0");
        sender.does(&format!("write {qp} {srq} 5 50000 {memory}"));
        sender.sent(5, IBV_WC_SUCCESS);
        assert_eq!(receiver.ask("holds 0 5 50000"), "true");
        sender.does(&format!("read {qp} {srq} 6 50000 {memory}"));
        sender.sent(6, IBV_WC_SUCCESS);
        assert_eq!(sender.ask("holds 8 5 50000"), "true");
        receiver.does("clear 0");
        sender.does(&format!("write_imm {qp} {srq} 7 1000 {memory} 99"));
        sender.sent(7, IBV_WC_SUCCESS);
        assert_eq!(receiver.ask("received"), format!("0 0 1000 99 {target}"));
        assert_eq!(receiver.ask("holds 0 7 1000"), "true");
        receiver.does("clear 0");
        sender.does(&format!("add {qp} {srq} 8 8 {memory} 40"));
        sender.sent(8, IBV_WC_SUCCESS);
        sender.does(&format!("swap {qp} {srq} 9 8 {memory} 40 42"));
        sender.sent(9, IBV_WC_SUCCESS);
        assert_eq!(
            (receiver.ask("word 0"), sender.ask("word 8")),
            ("42".into(), "40".into())
        );
    }
    // a key is valid in the process of the queue that the request names, and in no other
    let memory = first.ask("memory");
    let (addr, rkey) = memory.split_once(' ').unwrap();
    let wrong = rkey.parse::<u32>().unwrap() ^ 1;
    sender.does(&format!("write {qp} {second_srq} 10 8 {addr} {wrong}"));
    sender.sent(10, IBV_WC_REM_ACCESS_ERR);
    first.event(IBV_EVENT_QP_ACCESS_ERR, target);
}

/// WRITEs, READs and atomics that are executed in their call, to the queues of two processes in
/// turn, also between messages. What the call does not execute leaves the connection as it was.
fn at_once() {
    let place = Place::new();
    let (mut first, first_srq) = receiver(&place);
    let (mut second, second_srq) = receiver(&place);
    let mut sender = Actor::start();
    let target = first.number("target");
    let qp = connect(&mut sender, &mut first, target);
    let again = libc::EAGAIN;
    let memories = [first.ask("memory"), second.ask("memory")];
    for round in 0..3 {
        let owners = [(&mut first, first_srq), (&mut second, second_srq)];
        for ((owner, srq), memory) in owners.into_iter().zip(&memories) {
            owner.does("clear 0");
            sender.does(&format!("write_now {qp} {srq} {round} 50000 {memory}"));
            assert_eq!(owner.ask(&format!("holds 0 {round} 50000")), "true");
            sender.does("clear 8");
            sender.does(&format!("read_now {qp} {srq} 0 50000 {memory}"));
            assert_eq!(sender.ask(&format!("holds 8 {round} 50000")), "true");
            // the message goes to the place of its round
            owner.does(&format!("clear {round}"));
            sender.does(&format!("send {qp} {srq} {round} 100"));
            sender.sent(round, IBV_WC_SUCCESS);
            owner.got(round, round, 100, target);
        }
    }
    // its memory is not a buffer of the device
    sender.refuses(
        &format!("change_now {qp} {first_srq} 5 {}", memories[0]),
        again,
    );
    // the key of the other process; no queue; the number of a queue that does not exist
    let (addr, _) = memories[0].split_once(' ').unwrap();
    let wrong = format!("{addr} 77");
    for (srq, memory) in [
        (first_srq, &wrong),
        (0, &memories[0]),
        (first_srq ^ 0x155, &memories[0]),
    ] {
        sender.refuses(&format!("write_now {qp} {srq} 9 8 {memory}"), again);
    }
    assert_eq!(first.ask("holds 0 2 50000"), "true");
    // behind a message that waits for its receive
    for _ in 0..8 - 3 {
        sender.does(&format!("send {qp} {second_srq} 7 8"));
        sender.sent(7, IBV_WC_SUCCESS);
    }
    sender.does(&format!("send {qp} {second_srq} 8 8"));
    let behind = format!("write_now {qp} {first_srq} 9 8 {}", memories[0]);
    sender.refuses(&behind, again);
    second.does(&format!("receive 3 {ROOM}"));
    sender.sent(8, IBV_WC_SUCCESS);
    sender.does(&behind);
    sender.does(&format!("fail {qp}"));
    sender.refuses(&behind, again);
}

/// The vendor error of requests that were not executed, of an initiator whose requests name the
/// queues of two processes.
fn not_executed() {
    const NOT_EXECUTED: u32 = 1;
    let flushed = IBV_WC_WR_FLUSH_ERR;
    for refused in [true, false] {
        let place = Place::new();
        let (mut first, first_srq) = receiver(&place);
        let mut second = Actor::start();
        second.does(&place.open(CREATE));
        let second_srq = second.number("srq 8");
        let mut sender = Actor::start();
        let target = first.number("target");
        let qp = connect(&mut sender, &mut first, target);
        let memories = [first.ask("memory"), second.ask("memory")];
        second.does("clear 0");
        sender.does(&format!("write {qp} {first_srq} 1 100 {}", memories[0]));
        assert_eq!(sender.ask("unsent"), format!("1 {IBV_WC_SUCCESS} 0"));
        if refused {
            let (addr, _) = memories[0].split_once(' ').unwrap();
            sender.does(&format!("write {qp} {first_srq} 2 100 {addr} 77"));
            // a part of the refused request itself may have been executed
            let wanted = format!("2 {IBV_WC_REM_ACCESS_ERR} 0");
            assert_eq!(sender.ask("unsent"), wanted);
        } else {
            // waits for a receive, and with it what is posted behind it
            sender.does(&format!("send {qp} {second_srq} 2 8"));
        }
        sender.does(&format!("write {qp} {second_srq} 3 100 {}", memories[1]));
        sender.does(&format!("add {qp} {first_srq} 4 8 {} 1", memories[0]));
        sender.does(&format!("fail {qp}"));
        if !refused {
            assert_eq!(sender.ask("unsent"), format!("2 {flushed} 0"));
        }
        for number in [3, 4] {
            let wanted = format!("{number} {flushed} {NOT_EXECUTED}");
            assert_eq!(sender.ask("unsent"), wanted);
        }
        assert_eq!(first.ask("holds 0 1 100"), "true");
        assert_eq!(second.ask("word 0"), "0");
    }
}

fn domains() {
    let place = Place::new();
    let (mut a, mut b) = (Actor::start(), Actor::start());
    let mut elsewhere = Actor::on_node(1);
    a.refuses(&place.open(0), libc::EAGAIN);
    a.does(&place.open(EXCLUSIVE));
    b.refuses(&place.open(EXCLUSIVE), libc::EINVAL);
    elsewhere.refuses(&place.open(0), libc::EAGAIN);
    b.does(&place.open(0));
    b.does(&place.open(CREATE));
    let (target, other) = (a.number("target"), b.number("target"));
    assert_ne!(target, other);
    assert_eq!(b.number(&format!("hold {target}")), target);
    b.refuses(&format!("hold {}", target + 1000), libc::EINVAL);
    // a private domain is a different one
    let mut c = Actor::start();
    c.does("domain - 64");
    c.refuses(&format!("hold {target}"), libc::EINVAL);
    // the end of the last member ends the domain
    a.kill();
    b.does(&place.open(0));
    b.kill();
    c.refuses(&place.open(0), libc::EAGAIN);
    c.does(&place.open(EXCLUSIVE));
}

fn busy() {
    let place = Place::new();
    let (mut a, _) = receiver(&place);
    a.refuses("leave", libc::EBUSY);
    let target = a.number("target");
    a.does("end_srq");
    a.refuses("leave", libc::EBUSY);
    a.does(&format!("destroy {target}"));
    a.does("leave");
    let mut b = Actor::start();
    b.refuses(&place.open(0), libc::EAGAIN);
}

fn held() {
    let place = Place::new();
    let (mut a, srq) = receiver(&place);
    let (mut b, _) = receiver(&place);
    let mut sender = Actor::start();
    let target = a.number("target");
    assert_eq!(b.number(&format!("hold {target}")), target);
    let qp = connect(&mut sender, &mut b, target);
    assert_eq!(
        a.ask(&format!("state {target}")),
        format!("{IBV_QPS_RTS} {qp}")
    );
    // the creator closes it, and the target still exists
    a.does(&format!("destroy {target}"));
    sender.does(&format!("send {qp} {srq} 1 100"));
    sender.sent(1, IBV_WC_SUCCESS);
    a.got(0, 1, 100, target);
    // all holders get the event
    assert_eq!(a.number(&format!("hold {target}")), target);
    let memory = a.ask("memory");
    let (addr, _) = memory.split_once(' ').unwrap();
    sender.does(&format!("write {qp} {srq} 2 8 {addr} 0"));
    sender.sent(2, IBV_WC_REM_ACCESS_ERR);
    a.event(IBV_EVENT_QP_ACCESS_ERR, target);
    b.event(IBV_EVENT_QP_ACCESS_ERR, target);
    assert_eq!(
        (a.ask("events"), b.ask("events")),
        ("none".into(), "none".into())
    );
    // any holder can set it up again
    a.does(&format!("reset {target}"));
    sender.does(&format!("reset {qp}"));
    for command in ["init", "rtr", "rts"] {
        let to = if command == "rtr" {
            format!(" {qp}")
        } else {
            String::new()
        };
        a.does(&format!("{command} {target}{to}"));
        let to = if command == "rtr" {
            format!(" {target}")
        } else {
            String::new()
        };
        sender.does(&format!("{command} {qp}{to}"));
    }
    sender.does(&format!("send {qp} {srq} 3 100"));
    sender.sent(3, IBV_WC_SUCCESS);
    a.got(1, 3, 100, target);
    // one holder moves it to ERR, which is no event; its initiator detects it
    b.does(&format!("fail {target}"));
    sender.does(&format!("send {qp} {srq} 4 100"));
    sender.sent(4, IBV_WC_RETRY_EXC_ERR);
    assert_eq!(a.ask("events"), "none");
    // the target ends with its last holder
    a.does(&format!("destroy {target}"));
    b.does(&format!("destroy {target}"));
    a.refuses(&format!("hold {target}"), libc::EINVAL);
}

fn nowhere() {
    let place = Place::new();
    let other_place = Place::new();
    let (mut a, srq) = receiver(&place);
    let (mut stranger, other_srq) = receiver(&other_place);
    let mut sender = Actor::start();
    for (i, wrong) in [0, srq + 1, other_srq, 0xff_ffff].into_iter().enumerate() {
        let target = a.number("target");
        let qp = connect(&mut sender, &mut a, target);
        sender.does(&format!("send {qp} {srq} 1 10"));
        sender.sent(1, IBV_WC_SUCCESS);
        a.got(i as u64, 1, 10, target);
        let memory = a.ask("memory");
        let verb = if i % 2 == 0 { "send" } else { "write" };
        sender.does(&format!("{verb} {qp} {wrong} 2 10 {memory}"));
        sender.sent(2, IBV_WC_REM_INV_REQ_ERR);
        a.event(IBV_EVENT_QP_REQ_ERR, target);
        a.does(&format!("destroy {target}"));
    }
    // a target that existed and was destroyed
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    sender.does(&format!("send {qp} {srq} 3 10"));
    sender.sent(3, IBV_WC_SUCCESS);
    a.got(4, 3, 10, target);
    a.does("end_srq");
    sender.does(&format!("send {qp} {srq} 4 10"));
    sender.sent(4, IBV_WC_REM_INV_REQ_ERR);
    a.event(IBV_EVENT_QP_REQ_ERR, target);
    assert_eq!(stranger.ask("events"), "none");
}

fn too_short() {
    let place = Place::new();
    let mut a = Actor::start();
    a.does(&place.open(CREATE));
    let srq = a.number("srq 8");
    let mut sender = Actor::start();
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    a.does("receive 0 10");
    sender.does(&format!("send {qp} {srq} 1 11"));
    sender.sent(1, IBV_WC_REM_INV_REQ_ERR);
    let wanted = format!("0 {IBV_WC_LOC_LEN_ERR} ");
    assert!(a.ask("received").starts_with(&wanted));
    a.event(IBV_EVENT_QP_REQ_ERR, target);
}

fn deregistered() {
    for len in [8, 5000, 20_000] {
        let place = Place::new();
        let mut a = Actor::start();
        a.does(&place.open(CREATE));
        let srq = a.number("srq 8");
        let mut sender = Actor::start();
        let target = a.number("target");
        let qp = connect(&mut sender, &mut a, target);
        for i in 0..2 {
            a.does(&format!("receive {i} {ROOM}"));
        }
        sender.does(&format!("send {qp} {srq} 1 {len}"));
        sender.sent(1, IBV_WC_SUCCESS);
        a.got(0, 1, len, target);
        a.does("deregister");
        sender.does(&format!("send {qp} {srq} 2 {len}"));
        sender.sent(2, IBV_WC_REM_OP_ERR);
        let wanted = format!("1 {IBV_WC_LOC_PROT_ERR} ");
        assert!(a.ask("received").starts_with(&wanted));
    }
}

fn waits() {
    let place = Place::new();
    let mut a = Actor::start();
    a.does(&place.open(CREATE));
    let srq = a.number("srq 8");
    let mut sender = Actor::start();
    let target = a.number("target");
    let qp = connect(&mut sender, &mut a, target);
    for (i, len) in [50, 100_000].into_iter().enumerate() {
        sender.does(&format!("send {qp} {srq} {i} {len}"));
        sender.say("sent");
        std::thread::sleep(Duration::from_millis(50));
        a.does(&format!("receive {i} {ROOM}"));
        assert_eq!(a.ask("awaken"), format!("{i} 0 {len} 0 {target}"));
        assert_eq!(a.ask(&format!("holds {i} {i} {len}")), "true");
        assert_eq!(sender.hear(), format!("{i} {IBV_WC_SUCCESS}"));
    }
    // the holder closes the target meanwhile
    sender.does(&format!("send {qp} {srq} 9 10"));
    sender.say("sent");
    std::thread::sleep(Duration::from_millis(50));
    a.does(&format!("destroy {target}"));
    assert_eq!(sender.hear(), format!("9 {IBV_WC_RETRY_EXC_ERR}"));
}

/// The owner of the receives detects that a sender has no barriers when it makes the ring for it. A
/// sender that has not sent there before waits for this first. (The effect of a missing fence is
/// too rare for a test; the models test the order of both.)
fn waits_unfenced() {
    // its fences are full, as if the kernel ran no barriers for it
    let without_barriers = || Actor::with("SOFTVERBS_NO_MEMBARRIER", "1");
    let starts: [fn() -> Actor; 2] = [Actor::start, without_barriers];
    for (ours, theirs) in [(0, 1), (1, 0), (1, 1)] {
        let place = Place::new();
        let (mut holder, mut owner) = (starts[ours](), starts[ours]());
        holder.does(&place.open(CREATE));
        owner.does(&place.open(CREATE));
        let srq = owner.number("srq 8");
        let mut sender = starts[theirs]();
        let target = holder.number("target");
        let qp = connect(&mut sender, &mut holder, target);
        for i in 0..20u64 {
            sender.does(&format!("send {qp} {srq} {i} 50"));
            sender.say("sent");
            // some find the sender asleep, some arrive before it arms
            std::thread::sleep(Duration::from_millis(i % 4));
            owner.does(&format!("receive {} {ROOM}", i % 8));
            assert_eq!(owner.ask("awaken"), format!("{} 0 50 0 {target}", i % 8));
            assert_eq!(sender.hear(), format!("{i} {IBV_WC_SUCCESS}"));
        }
    }
}

/// The processes that make the domain, make the target, hold the target, and own a queue are killed
/// in every order, while an initiator sends to the queue of a fifth process.
fn deaths() {
    let mut orders = vec![vec![]];
    for next in 0..4usize {
        let longer = orders.iter().flat_map(|order: &Vec<usize>| {
            (0..=order.len()).map(move |at| {
                let mut order = order.clone();
                order.insert(at, next);
                order
            })
        });
        orders = longer.collect();
    }
    assert_eq!(orders.len(), 24);
    for order in orders {
        kill_in(&order);
    }
}

fn kill_in(order: &[usize]) {
    let place = Place::new();
    let mut maker = Actor::start();
    maker.does(&place.open(EXCLUSIVE));
    let mut creator = Actor::start();
    creator.does(&place.open(0));
    let target = creator.number("target");
    let mut holder = Actor::start();
    holder.does(&place.open(0));
    assert_eq!(holder.number(&format!("hold {target}")), target);
    let (owner, owners_srq) = receiver(&place);
    let (mut survivor, srq) = receiver(&place);
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut creator, target);
    let mut owner = Some(owner);
    for verb in ["send", "send"] {
        sender.does(&format!("{verb} {qp} {owners_srq} 1 10"));
        sender.sent(1, IBV_WC_SUCCESS);
    }
    let mut roles = [Some(creator), Some(holder), owner.take(), Some(maker)];
    let (mut posted, mut alive) = (0, true);
    for &victim in order {
        roles[victim].take().unwrap().kill();
        let there = roles[0].is_some() || roles[1].is_some();
        if there {
            // a receive is used again in each round
            let number = 100 + posted;
            sender.does(&format!("send {qp} {srq} {number} 3000"));
            sender.sent(number, IBV_WC_SUCCESS);
            survivor.got(posted % 8, number, 3000, target);
            survivor.does(&format!("receive {} {ROOM}", posted % 8));
            posted += 1;
        } else if alive {
            alive = false;
            sender.event(IBV_EVENT_QP_FATAL, qp);
            sender.does(&format!("send {qp} {srq} 7 10"));
            sender.sent(7, IBV_WC_WR_FLUSH_ERR);
        }
        // processes that open the domain late find it while the survivor is a member
        let mut late = Actor::start();
        late.does(&place.open(0));
        if there {
            assert_eq!(late.number(&format!("hold {target}")), target);
            late.does(&format!("destroy {target}"));
        } else {
            late.refuses(&format!("hold {target}"), libc::EINVAL);
        }
    }
    // afterwards another target works in the same domain, and a request to the dead queue fails
    let next = survivor.number("target");
    let qp = connect(&mut sender, &mut survivor, next);
    sender.does(&format!("send {qp} {srq} 50 20"));
    sender.sent(50, IBV_WC_SUCCESS);
    survivor.got(posted % 8, 50, 20, next);
    sender.does(&format!("send {qp} {owners_srq} 51 20"));
    sender.sent(51, IBV_WC_REM_INV_REQ_ERR);
    survivor.event(IBV_EVENT_QP_REQ_ERR, next);
    survivor.does(&format!("destroy {next}"));
    survivor.does("end_srq");
    survivor.does("leave");
}

fn initiator_ends() {
    let place = Place::new();
    let (mut a, srq) = receiver(&place);
    let mut b = Actor::start();
    b.does(&place.open(0));
    let target = a.number("target");
    assert_eq!(b.number(&format!("hold {target}")), target);
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut a, target);
    for i in 0..8 {
        sender.does(&format!("send {qp} {srq} {i} 10"));
        sender.sent(i, IBV_WC_SUCCESS);
    }
    // the request waits for a receive, and no later request may wait for it
    sender.does(&format!("send {qp} {srq} 8 10"));
    sender.kill();
    a.event(IBV_EVENT_QP_FATAL, target);
    b.event(IBV_EVENT_QP_FATAL, target);
    for i in 0..8 {
        a.got(i, i, 10, target);
    }
    a.does(&format!("receive 0 {ROOM}"));
    let mut next = Actor::start();
    a.does(&format!("reset {target}"));
    let qp = connect(&mut next, &mut a, target);
    next.does(&format!("send {qp} {srq} 20 10"));
    next.sent(20, IBV_WC_SUCCESS);
    a.got(0, 20, 10, target);
    // an initiator that is destroyed before its process ends causes no event
    next.does(&format!("destroy {qp}"));
    next.kill();
    let connected = format!("{IBV_QPS_RTS} {qp}");
    for actor in [&mut a, &mut b] {
        assert_eq!(actor.ask("events"), "none");
        assert_eq!(actor.ask(&format!("state {target}")), connected);
        assert_eq!(actor.ask("events"), "none");
    }
    // nor does the close of the holder that connected the target
    a.does(&format!("destroy {target}"));
    assert_eq!(b.ask(&format!("state {target}")), connected);
    assert_eq!(b.ask("events"), "none");
}

/// A process without a free descriptor fails a target, one of whose holders it has not opened yet.
fn unreachable_holder() {
    let place = Place::new();
    let (mut a, srq) = receiver(&place);
    let mut b = Actor::start();
    b.does(&place.open(0));
    let target = a.number("target");
    assert_eq!(b.number(&format!("hold {target}")), target);
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut a, target);
    sender.does(&format!("send {qp} {srq} 1 100"));
    sender.sent(1, IBV_WC_SUCCESS);
    a.got(0, 1, 100, target);
    let memory = a.ask("memory");
    let (addr, _) = memory.split_once(' ').unwrap();
    sender.does("descriptors 3");
    sender.does(&format!("write {qp} {srq} 2 8 {addr} 0"));
    sender.sent(2, IBV_WC_REM_ACCESS_ERR);
    a.event(IBV_EVENT_QP_ACCESS_ERR, target);
    // it may have looked at the target itself meanwhile
    let found = b.ask("events");
    sender.does("descriptors 1024");
    if found == "none" {
        b.event(IBV_EVENT_QP_ACCESS_ERR, target);
    } else {
        assert_eq!(found, format!("{IBV_EVENT_QP_ACCESS_ERR} {target}"));
    }
}

/// The low bits of a number, which name the queue in its process.
const INDEX: u32 = (1 << 14) - 1;

fn random_numbers() {
    let place = Place::new();
    let indices: Vec<u32> = (0..4).map(|_| receiver(&place).1 & INDEX).collect();
    // four of 16,383 indices: all equal once in 4 * 10^12 runs
    assert!(
        indices.iter().any(|index| *index != indices[0]),
        "{indices:?}"
    );
}

/// Executes an owner again until its first queue has this number, which other processes may delay
/// by ending.
fn succeed(owner: &mut Actor, place: &Place, number: u32) {
    for _ in 0..20 {
        assert_eq!(owner.ask("again"), "ok");
        owner.does("open");
        owner.does(&place.open(CREATE));
        if owner.number("srq 8") == number {
            for i in 0..8 {
                owner.does(&format!("receive {i} {ROOM}"));
            }
            return;
        }
    }
    panic!("no successor has got the number {number}");
}

fn successors() {
    let place = Place::new();
    let (mut holder, other) = receiver(&place);
    let mut owner = Actor::with("SOFTVERBS_REUSE_SRQ", "1");
    owner.does(&place.open(0));
    let srq = owner.number("srq 8");
    for i in 0..8 {
        owner.does(&format!("receive {i} {ROOM}"));
    }
    let target = holder.number("target");
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut holder, target);
    sender.does(&format!("send {qp} {srq} 1 100"));
    sender.sent(1, IBV_WC_SUCCESS);
    owner.got(0, 1, 100, target);
    succeed(&mut owner, &place, srq);
    // the sender notices the end, and forgets the connection to the queue
    assert_eq!(sender.ask("events"), "none");
    sender.does(&format!("send {qp} {srq} 2 100"));
    sender.sent(2, IBV_WC_REM_INV_REQ_ERR);
    holder.event(IBV_EVENT_QP_REQ_ERR, target);
    // nor a later one: only a connection that is made anew leads to it
    let next = holder.number("target");
    sender.does(&format!("reset {qp}"));
    for command in [
        format!("init {next}"),
        format!("rtr {next} {qp}"),
        format!("rts {next}"),
    ] {
        holder.does(&command);
    }
    for command in [
        format!("init {qp}"),
        format!("rtr {qp} {next}"),
        format!("rts {qp}"),
    ] {
        sender.does(&command);
    }
    sender.does(&format!("send {qp} {srq} 3 100"));
    sender.sent(3, IBV_WC_SUCCESS);
    owner.got(0, 3, 100, next);
    sender.does(&format!("send {qp} {other} 4 100"));
    sender.sent(4, IBV_WC_SUCCESS);
    holder.got(0, 4, 100, next);
}

fn limits() {
    let place = Place::new();
    let (mut owner, srq) = receiver(&place);
    let target = owner.number("target");
    let mut sender = Actor::start();
    let qp = connect(&mut sender, &mut owner, target);
    // the rings exist
    sender.does(&format!("send {qp} {srq} 0 100"));
    sender.sent(0, IBV_WC_SUCCESS);
    owner.got(0, 0, 100, target);
    // seven are left; short messages take the fast path, long ones the general path
    for (len, places) in [(100, [1, 2, 3, 4]), (20_000, [5, 6, 7, 1])] {
        owner.does("limit 5");
        owner.say("sleep");
        for i in 1..=2 {
            sender.does(&format!("send {qp} {srq} {i} {len}"));
            sender.sent(i, IBV_WC_SUCCESS);
        }
        // five are left, which is no reason yet
        std::thread::sleep(Duration::from_millis(100));
        sender.does(&format!("send {qp} {srq} 3 {len}"));
        sender.sent(3, IBV_WC_SUCCESS);
        assert_eq!(owner.hear(), format!("{IBV_EVENT_SRQ_LIMIT_REACHED} 0"));
        // once
        sender.does(&format!("send {qp} {srq} 4 {len}"));
        sender.sent(4, IBV_WC_SUCCESS);
        assert_eq!(owner.ask("events"), "none");
        for (message, place) in (1..).zip(places) {
            owner.got(place, message, len, target);
            owner.does(&format!("receive {place} {ROOM}"));
        }
    }
    // fewer than the limit already
    owner.does("limit 8");
    assert_eq!(
        owner.ask("event"),
        format!("{IBV_EVENT_SRQ_LIMIT_REACHED} 0")
    );
}
