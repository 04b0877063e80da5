//! Receive queues that run empty (XRC): a request without a receive delays those behind it on its
//! circuit, also those to other processes of the node. `docs/protocol-xrc.md`, "Flow control".

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::breaks::pattern;
use super::endpoints::{End, wait, wait_for};
use super::nodes::Node;
use super::rma::{Side, memory};
use super::xrc::{exchange, objects, open_at};
use crate::flags::Flags;
use crate::mr::Desc;
use crate::rdm::LocalIov;
use crate::rdm::core::link::LinkKey;
use crate::rdm::executor::Executor;
use crate::rdm::link::send_queue::Sent;
use crate::verbs::Srq;

const LIMIT: Duration = Duration::from_secs(20);
/// Without a completion for this time, the circuit is ended (`circuit_queue.rs`).
const STALL: Duration = Duration::from_secs(2);
/// Limit of a delay by one stall: the counter of stalls excludes a second one. The new circuit
/// takes the longer the busier the processors are.
const ONE_STALL: Duration = Duration::from_secs(10);

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

/// Calls a function while the driver of an endpoint's process, and calls for it, wait as in a
/// process that is stopped.
fn while_stopped(process: &End, call: impl FnOnce()) {
    std::thread::scope(|scope| {
        let (stop, stops) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        scope.spawn(move || {
            process.state(|_| {
                begun.send(()).unwrap();
                // until the sender is dropped
                let _ = stops.recv();
            });
        });
        begins.recv().unwrap();
        call();
        drop(stop);
    });
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
    while_stopped(&stopped, || {
        let begin = Instant::now();
        a.send(to_stopped, Some(3), &[5; 8], 1);
        a.send(to_other, Some(3), &[6; 8], 1);
        wait([&a, &other], [1, 1]);
        let delay = begin.elapsed();
        assert!(delay >= STALL && delay < ONE_STALL, "{delay:?}");
        assert_eq!(
            a.state(|state| state.io.xrc.as_ref().unwrap().counts.stalls),
            1
        );
        // the stopped process delays no more: behind it, the message would wait for another stall
        let begin = Instant::now();
        a.send(to_other, Some(4), &[7; 8], 1);
        wait([&a, &other], [1, 1]);
        assert!(begin.elapsed() < STALL, "{:?}", begin.elapsed());
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

/// As above: RMA to another process of the node waits behind a message to the stopped one. Nothing
/// else is sent to the other process.
#[test]
fn a_stopped_process_delays_rma_to_others_once() {
    let node = Node::new();
    let stopped = open_at(&node.process(), None);
    let [a, other] = [&Node::new().process(), &node.process()]
        .map(|domain| Side::on_circuits(domain, Duration::from_secs(20)));
    exchange(&a.end, &stopped);
    exchange(&a.end, &other.end);
    assert_eq!(objects(&a.end).0, 1, "one circuit to the node");
    let (to_stopped, to_other) = (a.end.knows(&stopped), a.end.knows(&other.end));
    let (srq, empty) = stopped.state(|state| {
        let xrcd = state.io.xrc.as_ref().unwrap().domain.xrcd();
        let empty = Srq::create_xrc(stopped.ep.shared().pd(), xrcd, &state.device_queue(), 4, 1);
        (state.io.objects.srq.clone(), empty.unwrap())
    });
    let source = memory(1, 100);
    let write = |at: usize, context: usize| {
        let iov = source.iov();
        let local = LocalIov::single(&iov, &Desc::NULL);
        let range = [other.range(at, 100)];
        let flags = Some(Flags::COMPLETION | Flags::FENCE);
        // SAFETY: the source lives until the entry.
        unsafe {
            a.end
                .ep
                .write(to_other, local, &range, Some(5), context, flags)
        }
        .unwrap();
    };
    // the keys of the other process are known
    write(0, 3);
    assert_eq!(a.entry().0, 3);
    let link = link_to(&a.end, &srq);
    a.end.state(|state| {
        let inbox = &mut state.io.port_mut(link).unwrap().inbox;
        inbox.as_mut().unwrap().srq = empty.number().unwrap();
    });
    while_stopped(&stopped, || {
        let begin = Instant::now();
        a.end.send(to_stopped, Some(3), &[5; 8], 1);
        write(200, 4);
        let (context, error) = a.entry();
        assert!(context == 4 && error.is_none(), "{context} {error:?}");
        let delay = begin.elapsed();
        assert!(delay >= STALL && delay < ONE_STALL, "{delay:?}");
        let stalls = a
            .end
            .state(|state| state.io.xrc.as_ref().unwrap().counts.stalls);
        assert_eq!(stalls, 1);
        assert!(other.memory.is(200, &pattern(1, 100)));
    });
    let mut bytes = [0; 8];
    stopped.recv(Some((3, 0)), &mut bytes, 2);
    wait([&a.end, &stopped], [1, 1]);
    assert_eq!(bytes, [5; 8]);
}

/// The last completion of a circuit gives its places to the links that wait, of which only the last
/// one has something to send: nothing else would give it one.
#[test]
fn a_link_behind_others_that_need_no_place_gets_one() {
    let (node, a) = (Node::new(), open_at(&Node::new().process(), None));
    let others = [0; 3].map(|_| open_at(&node.process(), None));
    for other in &others {
        exchange(&a, other);
    }
    assert_eq!(objects(&a).0, 1, "one circuit to the node");
    let links = others.each_ref().map(|other| {
        let srq = other.state(|state| state.io.objects.srq.clone());
        link_to(&a, &srq)
    });
    let circuit = a.state(|state| state.io.port_mut(links[0]).unwrap().circuit.unwrap());
    let requests = a.state(|state| {
        let xrc = state.io.xrc.as_mut().unwrap();
        let queue = xrc.queue_mut(circuit).unwrap();
        let mut requests = 0;
        while queue.queue.has_room(true) {
            queue.queue.record(links[0], Sent::Control(None));
            requests += 1;
        }
        queue.wait(links[0]);
        queue.wait(links[1]);
        requests
    });
    let mut bytes = [0; 8];
    others[2].recv(Some((4, 0)), &mut bytes, 2);
    a.send(a.knows(&others[2]), Some(4), &[7; 8], 1);
    a.ep.shared().apply_event(|core, io| {
        let queue = |io: &mut Executor| {
            let xrc = io.xrc.as_mut().unwrap();
            let queue = xrc.queue_mut(circuit).unwrap();
            let first = queue.queue.position();
            (queue.waiting(), queue.queue.take_completed(first).is_some())
        };
        assert_eq!(queue(io), (3, true));
        for _ in 1..requests {
            assert!(queue(io).1);
        }
        io.give_turns(core, circuit);
        let xrc = io.xrc.as_mut().unwrap();
        assert_eq!(xrc.queue_mut(circuit).unwrap().waiting(), 0);
    });
    wait([&a, &others[2]], [1, 1]);
    assert_eq!(bytes, [7; 8]);
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
