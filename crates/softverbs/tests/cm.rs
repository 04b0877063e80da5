//! The connection manager between two processes, and parts of it in one process.
#![allow(unsafe_code, reason = "drives a C interface")]

#[path = "cm/buffer.rs"]
mod buffer;
#[path = "cm/calls.rs"]
mod calls;
#[path = "cm/channels.rs"]
mod channels;
#[path = "cm/connections.rs"]
mod connections;
#[path = "cm/ends.rs"]
mod ends;
#[path = "cm/harness.rs"]
mod harness;
#[path = "cm/hostile.rs"]
mod hostile;
#[path = "cm/process.rs"]
mod process;
#[path = "common/refuse.rs"]
mod refuse;
#[path = "cm/repeats.rs"]
mod repeats;
#[path = "cm/second.rs"]
mod second;
#[path = "cm/services.rs"]
mod services;
#[path = "cm/synchronous.rs"]
mod synchronous;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use buffer::*;
use harness::*;
use process::*;
use rdma_core_sys::*;

/// InfiniBand's reject reasons.
const NOBODY_LISTENS: i32 = 8;
const CONSUMER: i32 = 28;
const GAVE_UP: i32 = 4;

fn server(on: &str, answer: &str) -> (Second, SocketAddr) {
    let second = Second::start("serve", &[("CM_BIND", on), ("CM_ANSWER", answer)]);
    let line = second.line();
    let address = line.strip_prefix("listening on ").unwrap().parse().unwrap();
    (second, address)
}

/// An established connection to `to`, and its event.
fn connected(channel: Channel, to: SocketAddr) -> (Id, Said) {
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"hello")), 0);
    let said = channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    (id, said)
}

#[test]
#[ignore = "the other process of the tests here, started by them"]
fn second_process() {
    second::run();
}

/// The side that is notified of a disconnection, which must answer, and the side that disconnected,
/// in any order.
fn both_ends(channel: Channel) {
    let mut ends = 0;
    let each = if softverbs() { 2 } else { 1 };
    while ends < 2 * each {
        let end = channel.next();
        assert!(
            matches!(
                end.kind,
                RDMA_CM_EVENT_DISCONNECTED | RDMA_CM_EVENT_TIMEWAIT_EXIT
            ),
            "{}",
            end.name()
        );
        ends += 1;
        assert_eq!(end.id.disconnect(), 0);
    }
}
