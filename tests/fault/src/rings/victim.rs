//! The process that is single-stepped and killed.

use rdma_core_sys::{IBV_QPT_RC, SOFTDV_RING_SOLICITED};

use super::path::Path;
use super::{LARGER, SHORT, SLOTS, message};
use crate::device::{Device, Retries};
use crate::link::{Link, numbers};
use crate::random::pattern;
use crate::steps::trace;

/// `ring-victim PATH TAG RC`: the number of the survivor's queue pair.
pub(crate) fn run(arguments: &[String]) {
    let path = Path::of_name(&arguments[0]).expect("a path");
    let given = numbers(&arguments[1..].join(" "));
    let (tag, number) = (given[0], given[1] as u32);
    let mut link = Link::of_child();
    let device = Device::open();
    let queue = device.queue(64);
    let pair = device.pair(IBV_QPT_RC, &queue, None);
    if path == Path::Create {
        link.say(&pair.number().to_string());
        link.hear();
        trace::begin();
        pair.ring(SLOTS, 7);
        trace::end();
        return;
    }
    let ring = pair.ring(SLOTS, 7);
    link.say(&pair.number().to_string());
    link.hear();
    let retries = Retries {
        timeout: 14,
        count: 7,
    };
    device.connect(&pair, number, retries);
    link.say("connected");
    link.hear();
    if path != Path::Attach {
        ring.attach();
    }
    for number in 0..path.posted() {
        let (words, payload) = message(tag, number, SHORT);
        assert_eq!(ring.post(words, &payload, 0), 0, "message {number}");
    }
    link.say("posted");
    link.hear();
    for number in 0..path.received() {
        let received = loop {
            if let Some(received) = ring.poll().expect("a ring") {
                break received;
            }
        };
        assert_eq!(received.words[0], number);
        assert!(received.payload == pattern((tag ^ 1) + 4 * number, SHORT));
    }
    if path == Path::PollMoved {
        assert_eq!(ring.grow(LARGER), 0);
    }
    link.say("taken");
    link.hear();
    for _ in 0..path.drained() {
        assert!(matches!(ring.poll(), Ok(Some(_))), "no message");
    }
    let (words, payload) = message(tag, path.posted(), path.len());
    match path {
        Path::Post | Path::PostHot | Path::PostPadded | Path::PostWakes | Path::PostEnded => {
            trace::begin();
            ring.post(words, &payload, 0);
            trace::end();
        }
        Path::PostLong => {
            trace::begin();
            ring.post_pieces(words, &payload);
            trace::end();
        }
        Path::PostSolicited => {
            trace::begin();
            ring.post(words, &payload, SOFTDV_RING_SOLICITED);
            trace::end();
        }
        Path::PostFull | Path::PostRoom | Path::PostMoves | Path::PostMovesLong => {
            trace::begin();
            ring.post(words, &payload, 0);
            trace::end();
        }
        Path::Await | Path::AwaitEnded => {
            trace::begin();
            queue.arm();
            ring.await_consume();
            ring.post(words, &payload, 0);
            trace::end();
        }
        Path::Positions => {
            trace::begin();
            ring.positions();
            trace::end();
        }
        Path::PollEmpty | Path::Poll | Path::PollMoved => {
            trace::begin();
            let _ = ring.peek();
            trace::end();
        }
        Path::Consume | Path::ConsumeWakes | Path::ConsumeDelivers => {
            assert!(matches!(ring.peek(), Ok(Some(_))), "no message");
            trace::begin();
            ring.consume();
            trace::end();
        }
        Path::TakePadded => {
            trace::begin();
            let _ = ring.poll();
            trace::end();
        }
        Path::Arrivals => {
            trace::begin();
            queue.arrivals();
            trace::end();
        }
        Path::Heat => {
            trace::begin();
            ring.set_hot(true);
            trace::end();
        }
        Path::Cool => {
            ring.set_hot(true);
            trace::begin();
            ring.set_hot(false);
            trace::end();
        }
        Path::Arm => {
            ring.set_hot(true);
            trace::begin();
            queue.arm();
            let _ = ring.peek();
            trace::end();
        }
        Path::Grow => {
            trace::begin();
            ring.grow(LARGER);
            trace::end();
        }
        Path::PollEnd => {
            pair.fail();
            trace::begin();
            let _ = ring.peek();
            trace::end();
        }
        Path::Create => {}
        Path::Attach => {
            trace::begin();
            ring.attach();
            trace::end();
        }
        Path::Fail => {
            trace::begin();
            pair.fail();
            trace::end();
        }
        Path::Reset => {
            trace::begin();
            pair.reset();
            trace::end();
        }
        Path::Destroy => {
            trace::begin();
            pair.destroy();
            trace::end();
        }
    }
}
