//! Copies of an endpoint to itself. Several calls divide long ones.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::time::{Duration, Instant};

use super::breaks::{domain, pattern};
use super::endpoints::{Transport, wait_for};
use super::outcomes::send;
use super::rma::{Side, memory};
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::Completion;
use crate::rdm::executor::CALL;
use crate::rdm::{EndpointConfig, LocalIov};

/// The capabilities of the endpoint permit remote CQ data of its own writes as that of peers.
#[test]
fn remote_cq_data_to_itself_needs_the_capability_too() {
    let domain = domain(true);
    for accepts_data in [true, false] {
        let config = EndpointConfig {
            accepts_data,
            ..Side::config(Transport::Rc)
        };
        let a = Side::with(&domain, config);
        let (to_a, source) = (a.end.knows(&a.end), memory(1, 8));
        let iov = source.iov();
        let local = LocalIov::single(&iov, &Desc::NULL);
        let (range, flags) = ([a.range(0, 8)], Some(Flags::COMPLETION));
        let ep = &a.end.ep;
        // SAFETY: the memory lives until the entry.
        unsafe { ep.write(to_a, local, &range, Some(77), 3, flags) }.unwrap();
        let mut found: Vec<_> = wait_for(&a.end, 1 + usize::from(accepts_data));
        found.extend(a.end.poll());
        let data = |it: &&Completion| it.flags.contains(Flags::REMOTE_CQ_DATA);
        let data: Vec<_> = found.iter().filter(data).map(|it| it.data).collect();
        assert_eq!(data, [77][..usize::from(accepts_data)]);
        assert!(a.memory.is(0, &pattern(1, 8)));
    }
}

/// A write waits for a link to a peer that does not answer, and the driver sleeps until the connect
/// timeout. A long message of the endpoint to itself, and a long write, call it again.
#[test]
fn the_driver_copies_while_other_operations_wait_for_a_link() {
    const LEN: usize = 2 * CALL + 5000;
    let domain = domain(true);
    let config = EndpointConfig {
        connect_timeout: Some(Duration::from_secs(200)),
        ..Side::config(Transport::Rc)
    };
    // dropped behind the endpoint
    let (word, source) = (memory(1, 8), memory(2, LEN));
    let mut target = vec![0; LEN];
    let a = Side::with_region(&domain, config, LEN);
    let to_a = a.end.knows(&a.end);
    let silent = a.end.knows_at("127.0.0.9:9".parse().unwrap());
    a.end
        .ep
        .shared()
        .apply_event(|core, _| core.config.dials = 0);
    let drives = || a.end.state(|state| state.drives);
    let before = drives();
    a.write(silent, a.range(0, 8), &word, 1, false);
    let limit = Instant::now() + Duration::from_secs(60);
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        while !holds() {
            assert!(Instant::now() < limit, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until("the driver is called for the write", &|| drives() > before);
    let copied = || !a.end.state(|state| state.io.copies());
    a.end.recv(None, &mut target, 2);
    send(&a, to_a, &source, 3, Flags::empty());
    until("the message is copied", &copied);
    assert!(target == pattern(2, LEN));
    a.write(to_a, a.range(0, LEN), &source, 4, false);
    until("the write is executed", &copied);
    assert!(a.memory.is(0, &pattern(2, LEN)));
    let ended = wait_for(&a.end, 3);
    let mut contexts: Vec<_> = ended.iter().map(|it| it.context).collect();
    contexts.sort_unstable();
    assert_eq!(contexts, [2, 3, 4]);
}
