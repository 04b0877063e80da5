//! Receive queues that run empty (XRC): a request without a receive delays those behind it on its
//! circuit, also those to other processes of the node. `docs/protocol-xrc.md`, "Flow control".

use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::endpoints::{End, wait, wait_for};
use super::nodes::Node;
use super::xrc::{exchange, objects, open_at};
use crate::rdm::link::LinkKey;
use crate::verbs::Srq;

const LIMIT: Duration = Duration::from_secs(20);
/// Without a completion for this time, the circuit is ended (`ports.rs`).
const STALL: Duration = Duration::from_secs(2);

/// The link of an endpoint whose peer receives through this queue.
fn link_to(end: &End, srq: &Srq) -> LinkKey {
    end.state(|state| {
        let keys: Vec<_> = state.io.links.keys().collect();
        let mut to = keys.into_iter().filter(|key| {
            let port = state.io.port_mut(*key);
            port.and_then(|port| port.inbox).map(|inbox| inbox.srq) == srq.number()
        });
        let found = to.next();
        assert!(to.next().is_none(), "one link");
        found.expect("a link")
    })
}

/// A process is stopped, and its queue has no receive: the circuit to its node ends after 2 s, and
/// the other processes of the node are reached by another one. When the process continues, it gets
/// what was sent to it, once.
#[test]
fn a_stopped_process_delays_the_others_of_its_node_once() {
    let node = Node::new();
    let (a, stopped, other) = (
        open_at(&Node::new().process(), None),
        open_at(&node.process(), None),
        open_at(&node.process(), None),
    );
    exchange(&a, &stopped);
    exchange(&a, &other);
    assert_eq!(objects(&a).0, 1, "one circuit to the node");
    let (to_stopped, to_other) = (a.knows(&stopped), a.knows(&other));
    let (srq, empty) = stopped.state(|state| {
        let xrcd = state.io.xrc.as_ref().unwrap().domain.xrcd();
        let empty = Srq::create_xrc(stopped.ep.shared().pd(), xrcd, &state.device_queue(), 4, 1);
        (state.io.objects.srq.clone(), empty.unwrap())
    });
    // from now on the requests to the process find no receive
    let link = link_to(&a, &srq);
    a.state(|state| {
        let inbox = &mut state.io.port_mut(link).unwrap().inbox;
        inbox.as_mut().unwrap().srq = empty.number().unwrap();
    });
    let (mut first, mut second, mut third) = ([0; 8], [0; 8], [0; 8]);
    stopped.recv(Some((3, 0)), &mut first, 2);
    other.recv(Some((3, 0)), &mut second, 2);
    other.recv(Some((4, 0)), &mut third, 2);
    std::thread::scope(|scope| {
        let (stop, stops) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let process = &stopped;
        scope.spawn(move || {
            process.state(|_| {
                begun.send(()).unwrap();
                // until the sender is dropped
                let _ = stops.recv();
            });
        });
        begins.recv().unwrap();
        let begin = Instant::now();
        a.send(to_stopped, Some(3), &[5; 8], 1);
        a.send(to_other, Some(3), &[6; 8], 1);
        wait([&a, &other], [1, 1]);
        let delay = begin.elapsed();
        assert!(delay >= STALL && delay < 2 * STALL, "{delay:?}");
        assert_eq!(
            a.state(|state| state.io.xrc.as_ref().unwrap().counts.stalls),
            1
        );
        // the stopped process delays no more
        let begin = Instant::now();
        a.send(to_other, Some(4), &[7; 8], 1);
        wait([&a, &other], [1, 1]);
        assert!(begin.elapsed() < STALL / 2, "{:?}", begin.elapsed());
        drop(stop);
    });
    wait([&a, &stopped], [1, 1]);
    assert_eq!((first, second, third), ([5; 8], [6; 8], [7; 8]));
    // nothing arrives twice
    for end in [&a, &stopped, &other] {
        assert_eq!(end.poll(), None);
    }
    exchange(&a, &stopped);
    exchange(&other, &stopped);
    assert_eq!(
        a.state(|state| state.io.xrc.as_ref().unwrap().counts.stalls),
        1
    );
}

/// A circuit whose requests are all to one process waits for it without a limit, as RC does. That
/// another process of the node, which is silent, is probed, is no reason to end it.
#[test]
fn a_stopped_process_that_delays_no_other_is_awaited() {
    let node = Node::new();
    let (a, stopped, silent) = (
        open_at(&Node::new().process(), None),
        open_at(&node.process(), None),
        open_at(&node.process(), None),
    );
    exchange(&a, &stopped);
    exchange(&a, &silent);
    let to_stopped = a.knows(&stopped);
    a.state(|state| state.core.config.beat = Some(20_000_000));
    let long = vec![5; 20_000];
    a.send(a.knows(&silent), Some(4), &long, 2);
    while silent.state(|state| state.io.rx.own().unwrap().stored_len()) == 0 {
        assert_eq!((a.poll(), silent.poll()), (None, None));
    }
    let (srq, empty) = stopped.state(|state| {
        let xrcd = state.io.xrc.as_ref().unwrap().domain.xrcd();
        let empty = Srq::create_xrc(stopped.ep.shared().pd(), xrcd, &state.device_queue(), 4, 1);
        (state.io.objects.srq.clone(), empty.unwrap())
    });
    let link = link_to(&a, &srq);
    let inbox = |number| {
        a.state(|state| {
            let inbox = &mut state.io.port_mut(link).unwrap().inbox;
            inbox.as_mut().unwrap().srq = number;
        });
    };
    inbox(empty.number().unwrap());
    a.send(to_stopped, Some(3), &[5; 8], 1);
    let begin = Instant::now();
    while begin.elapsed() < STALL + Duration::from_secs(1) {
        assert_eq!(a.poll(), None);
        assert_eq!(stopped.poll(), None);
        assert_eq!(silent.poll(), None);
    }
    let probing = a.state(|state| {
        let keys: Vec<_> = state.io.links.keys().collect();
        let probing = |key: &&LinkKey| state.io.port_mut(**key).unwrap().probing;
        keys.iter().filter(probing).count()
    });
    // behind the message to the stopped process, which awaits an answer too
    assert!(probing >= 1, "no probe");
    let counts = a.state(|state| {
        let counts = &state.io.xrc.as_ref().unwrap().counts;
        (counts.stalls, counts.circuits_failed)
    });
    assert_eq!(counts, (0, 0));
}

/// The application calls nothing, and its progress is manual: when the receives run low, the event
/// of the queue wakes the driver, which takes what has arrived, posts receives and arms the event
/// again.
#[test]
fn receives_that_run_low_are_posted_by_the_driver() {
    let (a, b) = (
        open_at(&Node::new().process(), None),
        open_at(&Node::new().process(), None),
    );
    exchange(&a, &b);
    let to_b = a.knows(&b);
    let begin = Instant::now();
    let low = |end: &End| {
        end.state(|state| {
            let xrc = state.io.xrc.as_ref().unwrap();
            (
                xrc.counts.receives_low,
                xrc.limit,
                state.io.receives_posted(),
            )
        })
    };
    // the driver has armed the event at a quarter
    while low(&b).1 == 0 {
        assert!(begin.elapsed() < LIMIT, "not armed");
        std::thread::yield_now();
    }
    let (none, limit, posted) = low(&b);
    assert_eq!((none, limit as usize), (0, posted / 4));
    let (sizes, srq) = b.state(|state| (state.io.receives_limits(), state.io.objects.srq.clone()));
    // below this number when the second message has taken its receive
    srq.arm_limit(u32::try_from(posted).unwrap() - 1).unwrap();
    for _ in 0..2 {
        a.send(to_b, Some(3), &[5; 8], 1);
        wait_for(&a, 1);
    }
    // no call of the application at b
    while low(&b).0 == 0 || low(&b).1 == 0 {
        assert!(begin.elapsed() < LIMIT, "{:?}", low(&b));
        std::thread::yield_now();
    }
    let (events, limit, posted) = low(&b);
    assert_eq!((events, limit as usize), (1, posted / 4));
    let (doubled, most) = b.state(|state| state.io.receives_limits());
    assert_eq!((doubled, most), ((2 * sizes.0).min(sizes.1), sizes.1));
    // what the driver has taken is there
    let taken = b.state(|state| state.io.rx.own().unwrap().stored_len());
    assert_eq!(taken, 2);
    let (mut first, mut second) = ([0; 8], [0; 8]);
    b.recv(Some((3, 0)), &mut first, 2);
    b.recv(Some((3, 0)), &mut second, 2);
    wait_for(&b, 2);
    assert_eq!((first, second), ([5; 8], [5; 8]));
}
