//! The failure of an endpoint, and devices whose completion queues cannot be resized.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::breaks::counting_domain;
use super::endpoints::{End, Transport, domain, queue, wait};
use super::pull::error;
use crate::domain::{Domain, DomainConfig};
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::source::Source;
use crate::queue::{BindFlags, Completion, CompletionQueue, Counter, CqConfig, WaitKind};
use crate::rdm::{AddressVector, Endpoint, EndpointConfig, LocalIov};
use crate::verbs::AsyncEvent;
use crate::verbs::replaced::without_resize;

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

/// One message from `a` to `b`.
fn exchange(a: &End, b: &End) {
    let mut bytes = [0; 8];
    b.recv(None, &mut bytes, 2);
    a.send(a.knows(b), None, &[7; 8], 1);
    wait([a, b], [1, 1]);
    assert_eq!(bytes, [7; 8]);
}

/// What a post to this endpoint itself returns.
fn post(end: &End) -> Result<()> {
    let byte = 0_u8;
    let iov = libc::iovec {
        iov_base: (&raw const byte).cast_mut().cast(),
        iov_len: 1,
    };
    let local = LocalIov::single(&iov, &Desc::NULL);
    // SAFETY: injected, so the buffer is read during the call alone.
    unsafe {
        end.ep
            .send(end.knows(end), None, local, None, 1, Some(Flags::INJECT))
    }
}

/// Threads wait on an endpoint's queue and on a counter while `fail` fails the endpoint: each gets
/// the error, as do later posts and reads. Closing the endpoint does not wait.
fn waits_end(domain: &Arc<Domain>, transport: Transport, error: FiErrno, fail: impl FnOnce(&End)) {
    let (a, b) = (
        End::with(domain, transport.config(), 0),
        End::with(domain, transport.config(), 0),
    );
    exchange(&a, &b);
    let counter = Counter::open(domain.queues(), WaitKind::Unspec).unwrap();
    counter.watch(&a.cq);
    let mut ignore = |_: &Completion| {};
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| a.cq.sread(1, 1, LIMIT, &mut |_: &Completion| {}));
        let waiter = scope.spawn(|| counter.wait(1, LIMIT));
        std::thread::sleep(Duration::from_millis(100));
        fail(&a);
        assert_eq!(reader.join().unwrap(), Err(error));
        assert_eq!(waiter.join().unwrap(), Err(error));
    });
    for _ in 0..2 {
        assert_eq!(post(&a), Err(error));
        assert_eq!(a.cq.read(1, &mut ignore), Err(error));
    }
    let begin = Instant::now();
    a.ep.close();
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    // the others are served
    let c = End::with(domain, transport.config(), 0);
    exchange(&b, &c);
    exchange(&c, &b);
}

#[test]
fn a_panic_of_the_driver_ends_the_waits() {
    let domain = domain();
    Transport::each(|transport| {
        waits_end(&domain, transport, FiErrno::EOTHER, |end| {
            let shared = end.ep.shared();
            shared.panics.store(true, Ordering::Relaxed);
            shared.driver().wake(&shared.driver_turn);
        });
    });
}

/// The device reports an overrun by the event alone.
#[test]
fn the_failure_of_the_device_queue_ends_the_waits() {
    let domain = domain();
    Transport::each(|transport| {
        waits_end(&domain, transport, FiErrno::EOVERRUN, |end| {
            let queue = end.state(|state| state.device_queue().object());
            domain.device().raise(AsyncEvent::CqError, queue);
        });
    });
}

/// Threads were told to wait, and poll the descriptors of two counters of an endpoint that fails:
/// one that finds the failure leaves the other descriptor readable.
#[test]
fn a_failure_is_found_by_the_waits_of_all_counters() {
    let domain = domain();
    Transport::each(|transport| {
        let end = End::with(&domain, transport.config(), 0);
        let counters = [(); 2].map(|()| {
            let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
            counter.watch(&end.cq);
            counter
        });
        for counter in &counters {
            assert_eq!(counter.trywait(), Ok(()));
        }
        let queue = end.state(|state| state.device_queue().object());
        domain.device().raise(AsyncEvent::CqError, queue);
        for counter in &counters {
            assert!(readable(counter.fd().unwrap()));
            assert_eq!(counter.trywait(), Err(FiErrno::EOVERRUN));
        }
    });
}

/// The device makes no event, and a thread that polls finds the failure: it wakes those that sleep
/// on a counter of the same queue, and on the endpoint's other queue.
#[test]
fn a_poll_that_finds_a_failure_wakes_all_threads() {
    let domain = domain();
    let mut ignore = |_: &Completion| {};
    Transport::each(|transport| {
        let end = End::with(&domain, transport.config(), 0);
        let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
        counter.watch(&end.cq);
        assert_eq!(counter.trywait(), Ok(()));
        end.state(|state| state.device_queue().fail_polls());
        let read = end.cq.read(1, &mut ignore);
        assert_eq!(read, Err(FiErrno::EOVERRUN));
        assert!(readable(counter.fd().unwrap()));

        let ep = Endpoint::new(&domain, transport.config()).unwrap();
        let [sends, receives] = [(); 2].map(|()| queue(&domain, 0));
        let av = AddressVector::open(4).unwrap();
        ep.bind_vector(&av).unwrap();
        ep.bind_cq(&sends, BindFlags::TRANSMIT).unwrap();
        ep.bind_cq(&receives, BindFlags::RECV).unwrap();
        ep.enable().unwrap();
        assert_eq!(receives.trywait(), Ok(()));
        let shared = ep.shared();
        let device_queue = shared.lock().as_ref().unwrap().device_queue();
        device_queue.fail_polls();
        let begin = Instant::now();
        while sends.read(1, &mut ignore) != Err(FiErrno::EOVERRUN) {
            assert!(begin.elapsed() < Duration::from_secs(20));
        }
        assert!(readable(receives.fd().unwrap()));
    });
}

fn readable(fd: RawFd) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry is passed.
    unsafe { libc::poll(&raw mut entry, 1, 0) > 0 }
}

/// After one wait on its queue, a thread that only polls reads messages as if none had waited.
#[test]
fn an_endpoint_whose_queue_is_polled_has_no_sleepers() {
    let domain = domain();
    Transport::each(|transport| {
        let end = End::with(&domain, transport.config(), 0);
        assert_eq!(end.cq.trywait(), Ok(()));
        assert!(end.state(|state| state.sleepers));
        let mut ignore = |_: &Completion| {};
        for _ in 0..10_000 {
            assert_eq!(end.cq.read(1, &mut ignore), Err(FiErrno::EAGAIN));
        }
        assert!(!end.state(|state| state.sleepers));
    });
}

/// A child of the process keeps copies of the descriptors, as this test of one.
#[test]
fn a_copy_of_the_descriptor_of_a_closed_endpoint_wakes_nobody() {
    let domain = domain();
    let end = End::open(&domain);
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    counter.watch(&end.cq);
    let copy = {
        let sources = end.ep.shared().cq_sources.lock();
        sources[0].wake();
        // SAFETY: no pointers; the copy has no other owner.
        unsafe { OwnedFd::from_raw_fd(libc::dup(sources[0].fd().unwrap())) }
    };
    assert!(readable(counter.fd().unwrap()));
    drop(end);
    assert_eq!(counter.trywait(), Ok(()));
    assert!(!readable(counter.fd().unwrap()));
    drop(copy);
}

/// A counter looks at a queue every 1 ms while the queue has an endpoint without a descriptor,
/// which has no counter, and one that the counter counts. It stops with the latter.
#[test]
fn a_counter_leaves_the_queue_of_an_endpoint_that_ends() {
    let domain = domain();
    Transport::each(|transport| {
        let silent = CqConfig {
            wait: WaitKind::None,
            sources_only: true,
            ..CqConfig::default()
        };
        let cq = CompletionQueue::open(domain.queues(), silent).unwrap();
        let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
        let enabled = |counters: &[&Arc<Counter>]| {
            let ep = Endpoint::new(&domain, transport.config()).unwrap();
            ep.bind_vector(&AddressVector::open(4).unwrap()).unwrap();
            ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
                .unwrap();
            for counter in counters {
                ep.bind_counter(counter, Flags::SEND).unwrap();
            }
            ep.enable().unwrap();
            ep
        };
        let readable_soon = || {
            assert_eq!(counter.trywait(), Ok(()));
            std::thread::sleep(Duration::from_millis(20));
            readable(counter.fd().unwrap())
        };
        let (_silent, counted) = (enabled(&[]), enabled(&[&counter]));
        assert!(readable_soon());
        counted.close();
        assert!(!readable_soon());
    });
}

/// Counters that are bound to an enabled endpoint wake their waiters, although its queue has no
/// wait object: the endpoint gets a descriptor, so the counter need not look at the queue
/// periodically. Counters of the peers' operations are accepted until a peer is connected.
#[test]
fn an_enabled_endpoint_accepts_counters() {
    let domain = counting_domain();
    Transport::each(|transport| {
        let config = EndpointConfig {
            rma: true,
            target: true,
            ..transport.config()
        };
        let silent = CqConfig {
            wait: WaitKind::None,
            sources_only: true,
            ..CqConfig::default()
        };
        let counter = || Counter::open(domain.queues(), WaitKind::Fd).unwrap();
        let (received, accessed) = (counter(), counter());
        let a = End::with(&domain, config.clone(), 0);
        let ep = Endpoint::new(&domain, config).unwrap();
        let cq = CompletionQueue::open(domain.queues(), silent).unwrap();
        let av = AddressVector::open(4).unwrap();
        ep.bind_vector(&av).unwrap();
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .unwrap();
        ep.enable().unwrap();
        let has_fd = || ep.shared().cq_sources.lock()[0].fd().is_some();
        ep.bind_counter(&received, Flags::empty()).unwrap();
        for (counter, kind, wakes) in [
            (&accessed, Flags::REMOTE_WRITE, false),
            (&received, Flags::RECV, true),
        ] {
            ep.bind_counter(counter, kind).unwrap();
            assert_eq!(ep.bind_counter(counter, kind), Err(FiErrno::EINVAL));
            assert_eq!(has_fd(), wakes, "{kind:?}");
        }
        // no timer
        assert_eq!(received.trywait(), Ok(()));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!readable(received.fd().unwrap()));
        let b = End { ep, cq, av };
        let mut bytes = [0; 8];
        b.recv(None, &mut bytes, 2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| received.wait(1, LIMIT));
            // it sleeps, or will find the message at once
            std::thread::sleep(Duration::from_millis(20));
            a.send(a.knows(&b), None, &[7; 8], 1);
            while !waiter.is_finished() {
                a.cq.progress().unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
        wait([&a, &b], [1, 1]);
        assert_eq!((received.read(), accessed.watched()), (1, 1));
        let late = Flags::REMOTE_READ;
        let bound = b.ep.bind_counter(&accessed, late);
        assert_eq!(bound, Ok(()), "the cell has a word for them");
        assert_eq!(accessed.watched(), 2);
        let kind = Flags::REMOTE_WRITE;
        assert_eq!(
            a.ep.bind_counter(&accessed, kind),
            Err(FiErrno::EOPBADSTATE),
            "the peer has been told that nothing counts"
        );
        assert_eq!(accessed.watched(), 2);
        // without that peer
        b.ep.close();
        assert_eq!(accessed.watched(), 0);
        let bind = || a.ep.bind_counter(&accessed, kind);
        assert_eq!(bound_soon(&a, bind), Ok(()));
        let c = End::with(&domain, a.ep.shared().config.clone(), 0);
        exchange(&a, &c);
        assert_eq!(accessed.watched(), 1);
    });
}

/// What a bind returns when links that have begun to end have ended.
fn bound_soon(end: &End, bind: impl Fn() -> Result<()>) -> Result<()> {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        let bound = bind();
        if bound != Err(FiErrno::EOPBADSTATE) || Instant::now() > limit {
            return bound;
        }
        end.cq.progress().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A dial that was refused does not prevent that a counter of the peers' operations is bound.
#[test]
fn an_endpoint_accepts_counters_after_a_refused_dial() {
    let domain = counting_domain();
    Transport::each(|transport| {
        let config = EndpointConfig {
            rma: true,
            target: true,
            connect_timeout: Some(Duration::from_secs(1)),
            ..transport.config()
        };
        let a = End::with(&domain, config.clone(), 0);
        let gone = End::with(&domain, config, 0);
        let to_gone = a.knows(&gone);
        gone.ep.close();
        let bytes = [1; 8];
        a.send(to_gone, None, &bytes, 1);
        let _ = error(&a);
        let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
        let bind = || a.ep.bind_counter(&counter, Flags::REMOTE_WRITE);
        assert_eq!(bound_soon(&a, bind), Ok(()));
    });
}

/// A counter of the peers' operations keeps nothing of an endpoint that is closed.
#[test]
fn a_closed_endpoint_leaves_the_counters_of_its_peers() {
    let domain = counting_domain();
    Transport::each(|transport| {
        let config = EndpointConfig {
            rma: true,
            target: true,
            ..transport.config()
        };
        let a = End::with(&domain, config.clone(), 0);
        let counter = Counter::open(domain.queues(), WaitKind::None).unwrap();
        let kinds = Flags::REMOTE_WRITE | Flags::REMOTE_READ;
        let b = End::before(&domain, config, 0, |ep| {
            ep.bind_counter(&counter, kinds).unwrap();
        });
        exchange(&a, &b);
        assert_eq!(counter.watched(), 2);
        b.ep.close();
        assert_eq!(counter.watched(), 0);
    });
}

/// An endpoint on a device that cannot resize queues has 40 peers: if the device makes the queue as
/// large as asked for, each keeps its link; otherwise idle ones make room for further ones.
#[test]
fn a_queue_that_cannot_be_resized_is_enough_for_all_peers() {
    for (small, links) in [(false, 40..=40), (true, 20..=25)] {
        let device = crate::verbs::devices(&[without_resize(small)], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let config = EndpointConfig {
            rma: true,
            target: true,
            ..Transport::Rc.config()
        };
        let hub = End::with(&domain, config, 0);
        let peers: Vec<End> = (0..40).map(|_| End::open(&domain)).collect();
        for peer in &peers {
            exchange(peer, &hub);
            exchange(&hub, peer);
        }
        let found = hub.state(|state| state.io.links.len());
        assert!(links.contains(&found), "{found} links");
    }
}
