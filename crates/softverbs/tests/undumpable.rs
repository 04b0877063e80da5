//! The tests of other files, with processes that others may not access (`PR_SET_DUMPABLE`), of a
//! user without privileges. Neither their memory nor their descriptors can be opened, and all tests
//! pass as elsewhere.

#![allow(unsafe_code, reason = "verbs is a C interface")]
#![allow(dead_code, reason = "each suite has what all share")]
#![allow(
    clippy::duplicate_mod,
    reason = "each suite is a program of its own elsewhere"
)]

mod everywhere;
#[path = "xrc.rs"]
mod xrc;

use std::time::{Duration, Instant};

use everywhere::SUITES;
use everywhere::common::suites::{Suite, run_suites};
use everywhere::common::{ALL, Address, End, Link, refuse, run};
use rdma_core_sys::{IBV_SEND_SIGNALED, IBV_WC_SUCCESS};

/// Cases that cannot pass here:
/// - `a_stopped_target`, `a_stopped_sender`: their agents are stopped with them;
/// - `a_write_between`: the receiver does not take a write behind a pending message, but an agent
///   continues with it;
/// - `flushes`: `nobody` cannot make its file in the directory of the test;
/// - `imported_objects`: the test passes a descriptor through `/proc`;
/// - `rdma_without_a_request`: what a call executes is copied by this process;
/// - `a_stopped_initiator`, `a_stopped_initiator_of_xrc`: the target's agent makes the accesses.
const NOT_HERE: &str = "a_stopped_target a_stopped_sender a_write_between flushes \
                        imported_objects rdma_without_a_request \
                        a_stopped_initiator a_stopped_initiator_of_xrc";

fn main() {
    let more: [Suite; 3] = [
        ("refusals", refusals),
        ("strangers", strangers),
        ("xrc", xrc::main),
    ];
    let suites = [&more, &SUITES[..]].concat();
    if !readable_by_all() {
        eprintln!("skipped: other users can't run this program where it is");
        return run_suites(&suites, || {}, ALL);
    }
    let prepare = || {
        refuse::become_nobody();
        refuse::set_dumpable(false);
    };
    run_suites(&suites, prepare, NOT_HERE);
}

/// Whether an unprivileged user can execute this program.
fn readable_by_all() -> bool {
    use std::os::unix::fs::PermissionsExt;
    let exe = std::env::current_exe().unwrap();
    let all = |path: &std::path::Path, bits| {
        std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & bits == bits)
    };
    all(&exe, 0o5) && exe.ancestors().skip(1).all(|above| all(above, 0o1))
}

/// The kernel refuses the accesses that these processes need, and would permit them if the
/// processes did.
fn refusals() {
    fn parent(link: &mut Link) {
        link.expect("undumpable");
        let pid = link.pid();
        assert_eq!(refuse::reading(pid), libc::EPERM);
        assert_eq!(refuse::opening(pid, 0), libc::EACCES);
        link.say("seen");
        link.expect("dumpable");
        assert_eq!(refuse::reading(pid), libc::EFAULT);
        assert_eq!(refuse::opening(pid, 0), 0);
        link.say("seen");
    }
    fn child(link: &mut Link) {
        for (dumpable, said) in [(false, "undumpable"), (true, "dumpable")] {
            refuse::set_dumpable(dumpable);
            link.say(said);
            link.expect("seen");
        }
    }
    run(&[("the_kernel_refuses", parent, child)]);
}

/// Only the agent of the other end's process could open its files, and the process was stopped
/// before this one has opened it: each try takes 2 s. Calls that find no answer leave further tries
/// to the repetition, at its pace.
fn strangers() {
    const LIMIT: Duration = Duration::from_secs(60);
    fn parent(link: &mut Link) {
        let mut end = End::create(link, 16, 16, 1);
        let other = Address::parse(&link.hear());
        link.stop();
        end.enter_rtr(other);
        end.enter_rts_within(0, 7);
        let mut buffer = end.buffer(&[7; 8]);
        let mut tries = 0;
        let mut count = |begin: Instant| tries += u32::from(begin.elapsed().as_secs() >= 1);
        let begin = Instant::now();
        end.send(&mut buffer, 8, None, IBV_SEND_SIGNALED, 1);
        count(begin);
        for _ in 0..6 {
            let begin = Instant::now();
            assert!(end.poll().is_none());
            count(begin);
        }
        link.go_on();
        // the first try of the post, and a round of the repetition
        assert!(tries <= 4, "{tries} calls have waited for the agent");
        end.say_address(link);
        let wc = end.wait(LIMIT);
        assert_eq!((wc.status, wc.wr_id), (IBV_WC_SUCCESS, 1));
        link.say("sent");
    }
    fn child(link: &mut Link) {
        let mut end = End::create(link, 16, 16, 1);
        end.say_address(link);
        let other = Address::parse(&link.hear());
        let receive = end.buffer(&[0; 8]);
        end.recv(&receive, 2);
        end.enter_rtr(other);
        end.enter_rts();
        assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
        link.expect("sent");
    }
    run(&[("a_stopped_stranger_is_tried_at_a_pace", parent, child)]);
}
