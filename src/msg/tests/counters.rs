//! Counters of an endpoint's operations.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use super::transfer::readable;
use super::*;
use crate::queue::slots::EndpointSlots;
use crate::queue::{Counter, Direction};
use crate::verbs::AsyncEvent;
use crate::verbs::replaced::without_resize;

/// Delay of another thread's operation, after which this thread is waiting.
const LATER: Duration = Duration::from_millis(100);

/// Two connected ends. The connecting end's operations are counted, and its sends have no
/// completion entries.
fn counted(kinds: &[Flags]) -> (Side, Side, Vec<Arc<Counter>>) {
    let mut counters = Vec::new();
    let (client, server) = connected_before(DomainConfig::default(), true, |client| {
        for &kind in kinds {
            let counter = Counter::open(client.domain.queues(), WaitKind::Fd).unwrap();
            client.ep.bind_counter(&counter, kind).unwrap();
            counters.push(counter);
        }
    });
    (client, server, counters)
}

/// Waits for a value while another thread changes the counter every [`LATER`] until the wait has
/// ended. A wait that begins behind a change of the number of failures does not end by it, so one
/// change would be too few where this thread does not run for [`LATER`].
fn wait_while_changed(counter: &Counter, value: u64, change: fn(&Counter)) -> Result<()> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                std::thread::sleep(LATER);
                change(counter);
            }
        });
        let result = counter.wait(value, Some(LIMIT));
        over.store(true, Ordering::Release);
        result
    })
}

fn nothing_to_read(side: &Side) {
    let mut nothing = |c: &Completion| panic!("{c:?}");
    assert_eq!(side.cq.read(1, &mut nothing), Err(FiErrno::EAGAIN));
}

#[test]
fn a_value_is_read_set_and_waited_for() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Unspec).unwrap();
    counter.set(5);
    counter.add(2);
    counter.set_errors(1);
    counter.add_errors(3);
    assert_eq!((counter.read(), counter.read_errors()), (7, 4));
    let now = Some(Duration::ZERO);
    assert_eq!(counter.wait(7, now), Ok(()));
    assert_eq!(counter.wait(8, now), Err(FiErrno::ETIMEDOUT));
    let start = Instant::now();
    let short = Some(Duration::from_millis(30));
    assert_eq!(counter.wait(8, short), Err(FiErrno::ETIMEDOUT));
    assert!(start.elapsed() >= Duration::from_millis(30));
    let later = |change: fn(&Counter)| {
        let counter = Arc::clone(&counter);
        std::thread::spawn(move || {
            std::thread::sleep(LATER);
            change(&counter);
        })
    };
    let adding = later(|counter| counter.add(1));
    assert_eq!(counter.wait(8, Some(LIMIT)), Ok(()));
    adding.join().unwrap();
    let failed = wait_while_changed(&counter, 1000, |counter| counter.add_errors(1));
    assert_eq!(failed, Err(FiErrno::EAVAIL));
    let unwaited = Counter::open(domain.queues(), WaitKind::None).unwrap();
    assert_eq!(unwaited.wait(0, None), Ok(()));
    let start = Instant::now();
    assert_eq!(unwaited.wait(1, short), Err(FiErrno::ETIMEDOUT));
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(unwaited.trywait(), Err(FiErrno::EINVAL));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(LATER);
            unwaited.add(3);
        });
        assert_eq!(unwaited.wait(3, Some(LIMIT)), Ok(()));
    });
    let failed = wait_while_changed(&unwaited, 4, |counter| counter.add_errors(1));
    assert_eq!(failed, Err(FiErrno::EAVAIL));
}

/// "Any change in a counter's error value will unblock any thread inside fi_cntr_wait"
/// (fi_cntr(3)), also if the thread runs after the value is as before.
#[test]
fn a_wait_ends_though_the_number_of_failures_is_the_same_again() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    for kind in [WaitKind::Unspec, WaitKind::None] {
        let counter = Counter::open(domain.queues(), kind).unwrap();
        let changes: [fn(&Counter); 2] = [
            |counter| {
                counter.add_errors(1);
                counter.add_errors(u64::MAX);
            },
            |counter| {
                counter.set_errors(5);
                counter.set_errors(0);
            },
        ];
        for change in changes {
            let ended = wait_while_changed(&counter, 1, change);
            assert_eq!(ended, Err(FiErrno::EAVAIL));
            assert_eq!(counter.read_errors(), 0);
        }
        // these change nothing
        counter.add_errors(0);
        counter.set_errors(0);
        let short = Some(Duration::from_millis(30));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                counter.add_errors(0);
                counter.set_errors(0);
            });
            assert_eq!(counter.wait(1, short), Err(FiErrno::ETIMEDOUT));
        });
    }
}

/// A thread that was told to wait polls the descriptor; another one is then told not to.
#[test]
fn a_refused_trywait_leaves_the_descriptor_readable() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    let fd = counter.fd().unwrap();
    assert_eq!(counter.trywait(), Ok(()));
    assert!(!readable(fd));
    counter.add(1);
    assert!(readable(fd));
    assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
    assert!(readable(fd));
    assert_eq!(counter.read(), 1);
    assert_eq!(counter.trywait(), Ok(()));
    assert!(!readable(fd));
}

/// A thread that was told to wait polls the descriptor; another one begins to wait for the counter.
#[test]
fn a_wait_leaves_the_descriptor_readable() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    let fd = counter.fd().unwrap();
    assert_eq!(counter.trywait(), Ok(()));
    counter.add(1);
    assert!(readable(fd));
    let wait = |value| counter.wait(value, Some(Duration::ZERO));
    assert_eq!(wait(5), Err(FiErrno::ETIMEDOUT));
    assert!(readable(fd));
    assert_eq!(wait(1), Ok(()));
    assert!(readable(fd));
    assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
    // an armed counter wakes both kinds of sleepers
    assert_eq!(counter.read(), 1);
    assert_eq!(counter.trywait(), Ok(()));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| counter.wait(2, Some(LIMIT)));
        std::thread::sleep(LATER);
        assert!(!readable(fd));
        counter.add(1);
        assert!(readable(fd));
        assert_eq!(waits.join().unwrap(), Ok(()));
    });
    let unspecified = Counter::open(domain.queues(), WaitKind::Unspec).unwrap();
    assert_eq!((unspecified.fd(), unspecified.trywait()), (None, Ok(())));
}

/// Each thread that polls the descriptor waits for a value of its own. One that was told to wait
/// before a change finds the descriptor readable, whenever it runs.
#[test]
fn a_polling_thread_takes_no_wake_up_of_another_one() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    // a busy machine delays the threads of a test for longer than the time that applies otherwise
    counter.set_patience(LIMIT);
    let fd = counter.fd().unwrap();
    let step = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!((counter.read(), counter.trywait()), (0, Ok(())));
            step.wait();
            // the other thread is about to wait for the next change
            step.wait();
            assert!(readable(fd));
            assert_eq!(counter.read(), 1);
            step.wait();
            // it has slept meanwhile
            step.wait();
            // another thread has read the change, and this one has not
            assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
            assert_eq!((counter.read(), counter.trywait()), (2, Ok(())));
            // it ends, and keeps nobody from waiting
        });
        step.wait();
        counter.count(1);
        assert_eq!(counter.read(), 1);
        for _ in 0..3 {
            assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
            assert!(readable(fd));
        }
        step.wait();
        step.wait();
        assert_eq!(counter.trywait(), Ok(()));
        assert!(!readable(fd));
        counter.count(1);
        assert_eq!(counter.read(), 2);
        assert_eq!(
            counter.trywait(),
            Ok(()),
            "the other thread was not told to wait"
        );
        step.wait();
    });
    counter.count(1);
    assert_eq!(counter.read(), 3);
    let start = Instant::now();
    while counter.trywait() != Ok(()) {
        // the thread-local data of the other thread may outlive the scope
        assert!(start.elapsed() < LIMIT);
    }
    assert!(!readable(fd));
}

/// Runs a test while another thread lives, which was told to wait and does not call the counter
/// again.
fn beside_a_thread_that_was_told_to_wait(counter: &Counter, test: impl FnOnce()) {
    let step = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(counter.trywait(), Ok(()));
            step.wait();
            step.wait();
        });
        step.wait();
        test();
        step.wait();
    });
}

/// A thread that was told to wait, and never calls the counter again.
#[test]
fn a_thread_that_does_not_come_back_keeps_others_awake_for_a_limited_time() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    beside_a_thread_that_was_told_to_wait(&counter, || {
        assert_eq!(counter.trywait(), Ok(()));
        counter.count(1);
        assert_eq!(counter.read(), 1);
        let start = Instant::now();
        while counter.trywait() != Ok(()) {
            assert!(start.elapsed() < LIMIT);
        }
        assert!(start.elapsed() >= Duration::from_secs(1));
        // once for each time that it was told to wait
        counter.count(1);
        assert_eq!((counter.read(), counter.trywait()), (2, Ok(())));
    });
}

/// Each kind of operation, including inject, without reading the completion queue.
#[test]
fn each_kind_of_operation_has_its_counter() {
    let kinds = [Flags::SEND, Flags::RECV, Flags::WRITE, Flags::READ];
    let (client, server, counters) = counted(&kinds);
    let buffer = Buffer::all(&client.domain, 256);
    let target = Buffer::all(&server.domain, 256);
    let wait = |index: usize, count| counters[index].wait(count, Some(LIMIT));
    let (iov, desc) = buffer.part(0, 200);
    let (addr, key) = (target.addr(), target.region.key());
    for i in 0..100 {
        server.recv(&target, 256, i).unwrap();
        // SAFETY: the buffers outlive the connection.
        unsafe {
            if i % 2 == 0 {
                client.send(&buffer, 200, i).unwrap();
            } else {
                client.ep.inject(iov.iov_base, 8).unwrap();
            }
            assert_eq!(wait(0, i as u64 + 1), Ok(()));
            client
                .ep
                .write(LocalIov::single(&iov, &desc), addr, key, i)
                .unwrap();
            assert_eq!(wait(2, i as u64 + 1), Ok(()));
        }
        server.completion().unwrap();
    }
    // SAFETY: as above.
    unsafe { client.ep.read(LocalIov::single(&iov, &desc), addr, key, 0) }.unwrap();
    assert_eq!(wait(3, 1), Ok(()));
    client.recv(&buffer, 256, 0).unwrap();
    assert_eq!(counters[1].read(), 0);
    server.send(&target, 256, 0).unwrap();
    assert_eq!(wait(1, 1), Ok(()));
    let values: Vec<_> = counters.iter().map(|c| c.read()).collect();
    assert_eq!(values, [100, 1, 100, 1]);
    assert!(counters.iter().all(|c| c.read_errors() == 0));
    // completions that reading a counter has polled stay in the completion queue, in order
    assert_eq!(client.completion().unwrap().flags, Flags::RECV | Flags::MSG);
    nothing_to_read(&client);
}

/// More operations than the queue has entries, none of which is read.
#[test]
fn a_counter_counts_behind_a_full_queue() {
    const SENDS: usize = 32;
    let mut counter = None;
    let (client, server) = connected_before(DomainConfig::default(), false, |client| {
        let sends = Counter::open(client.domain.queues(), WaitKind::Unspec).unwrap();
        client.ep.bind_counter(&sends, Flags::SEND).unwrap();
        counter = Some(sends);
    });
    let counter = counter.unwrap();
    let (buffer, target) = (
        Buffer::all(&client.domain, 64),
        Buffer::all(&server.domain, 64),
    );
    for context in 0..SENDS {
        server.recv(&target, 64, context).unwrap();
        let start = Instant::now();
        while let Err(error) = client.send(&buffer, 64, context) {
            assert_eq!(error, FiErrno::EAGAIN);
            assert!(start.elapsed() < LIMIT);
            counter.read();
        }
    }
    assert_eq!(counter.wait(SENDS as u64, Some(LIMIT)), Ok(()));
    for context in 0..SENDS {
        assert_eq!(client.completion().unwrap().context, context);
    }
    nothing_to_read(&client);
}

/// The device reports by the event alone that its queue has failed.
#[test]
fn the_failure_of_a_queue_ends_all_waits() {
    let mut counter = None;
    let (client, server) = connected_before(DomainConfig::default(), false, |client| {
        let sends = Counter::open(client.domain.queues(), WaitKind::Fd).unwrap();
        client.ep.bind_counter(&sends, Flags::SEND).unwrap();
        counter = Some(sends);
    });
    let counter = counter.unwrap();
    let (buffer, target) = (
        Buffer::all(&client.domain, 64),
        Buffer::all(&server.domain, 64),
    );
    let mut ignore = |_: &Completion| {};
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| client.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {}));
        let waiter = scope.spawn(|| counter.wait(1, Some(LIMIT)));
        std::thread::sleep(LATER);
        assert_eq!(counter.trywait(), Ok(()));
        let queue = client.cq.device_cq().unwrap().object();
        client.domain.device().raise(AsyncEvent::CqError, queue);
        assert!(readable(counter.fd().unwrap()));
        assert_eq!(reader.join().unwrap(), Err(FiErrno::EOVERRUN));
        assert_eq!(waiter.join().unwrap(), Err(FiErrno::EOVERRUN));
    });
    // a completion that the device has nevertheless is not lost
    server.recv(&target, 64, 1).unwrap();
    client.send(&buffer, 64, 7).unwrap();
    server.completion().unwrap();
    let start = Instant::now();
    while client.cq.read(1, &mut ignore) != Ok(1) {
        assert!(start.elapsed() < LIMIT);
    }
    assert_eq!(client.cq.read(1, &mut ignore), Err(FiErrno::EOVERRUN));
    assert_eq!(client.cq.trywait(), Err(FiErrno::EAGAIN));
    assert_eq!(counter.read(), 1);
    assert_eq!(counter.trywait(), Err(FiErrno::EOVERRUN));
}

/// The device has a completion besides the failure: one that the counter does not count, or one
/// without an entry.
#[test]
fn a_failure_behind_a_completion_is_found_before_a_wait() {
    let failed = |kind| {
        let (client, server, counters) = counted(&[kind]);
        let target = Buffer::all(&server.domain, 64);
        server.recv(&target, 64, 1).unwrap();
        let buffer = Buffer::all(&client.domain, 64);
        client.send(&buffer, 64, 7).unwrap();
        server.completion().unwrap();
        let queue = client.cq.device_cq().unwrap().object();
        client.domain.device().raise(AsyncEvent::CqError, queue);
        (client, server, counters, (target, buffer))
    };
    let (_client, _server, counters, _buffers) = failed(Flags::WRITE);
    assert_eq!(counters[0].trywait(), Err(FiErrno::EOVERRUN));
    let (client, _server, _counters, _buffers) = failed(Flags::SEND);
    assert_eq!(client.cq.trywait(), Err(FiErrno::EAGAIN));
}

/// A read of no entries makes progress, and finds the failure behind an entry.
#[test]
fn the_entries_before_a_failure_are_read_first() {
    let (client, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 64);
    server.recv(&target, 64, 1).unwrap();
    let buffer = Buffer::all(&client.domain, 64);
    client.send(&buffer, 64, 7).unwrap();
    server.completion().unwrap();
    let start = Instant::now();
    while !client.cq.poll_ready() {
        assert!(start.elapsed() < LIMIT);
    }
    client.cq.device_cq().unwrap().fail_polls();
    let mut ignore = |_: &Completion| {};
    assert_eq!(client.cq.read(0, &mut ignore), Err(FiErrno::EAGAIN));
    assert_eq!(client.cq.read(1, &mut ignore), Ok(1));
    assert_eq!(client.cq.read(0, &mut ignore), Err(FiErrno::EOVERRUN));
}

/// The device makes no event, and one thread finds the failure in a poll.
#[test]
fn a_poll_that_finds_a_failure_wakes_all_threads() {
    let ways: [fn(&CompletionQueue); 2] = [
        |cq| {
            let mut ignore = |_: &Completion| {};
            assert_eq!(cq.read(1, &mut ignore), Err(FiErrno::EOVERRUN));
        },
        |cq| assert!(cq.poll_ready()),
    ];
    for finds in ways {
        let side = Side::new(&device(), config(CLIENT), false);
        let counter = Counter::open(side.domain.queues(), WaitKind::Fd).unwrap();
        side.ep.bind_counter(&counter, Flags::SEND).unwrap();
        side.ep.enable().unwrap();
        assert_eq!(counter.trywait(), Ok(()));
        assert_eq!(side.cq.trywait(), Ok(()));
        side.cq.device_cq().unwrap().fail_polls();
        let fds = [counter.fd().unwrap(), side.cq.fd().unwrap()];
        assert_eq!(fds.map(readable), [false, false]);
        finds(&side.cq);
        assert_eq!(fds.map(readable), [true, true]);
        assert_eq!(counter.trywait(), Err(FiErrno::EOVERRUN));
        assert_eq!(side.cq.trywait(), Err(FiErrno::EAGAIN));
    }
}

/// The failure of a queue is reported although another thread has to wake up first.
#[test]
fn a_thread_that_does_not_come_back_hides_no_failure() {
    let side = Side::new(&device(), config(CLIENT), false);
    let counter = Counter::open(side.domain.queues(), WaitKind::Fd).unwrap();
    side.ep.bind_counter(&counter, Flags::SEND).unwrap();
    side.ep.enable().unwrap();
    beside_a_thread_that_was_told_to_wait(&counter, || {
        counter.count(1);
        assert_eq!(counter.read(), 1);
        assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
        side.cq.device_cq().unwrap().fail_polls();
        assert!(side.cq.poll_ready());
        assert_eq!(counter.trywait(), Err(FiErrno::EOVERRUN));
    });
}

/// The failure of a queue wakes the counters of the endpoints that it has. A counter that would
/// follow the queue before that, and whose thread sleeps again, would miss it.
#[test]
fn a_counter_follows_no_queue_that_does_not_have_its_endpoint() {
    let device = devices(&[without_resize(true)], false).remove(0);
    let side = Side::new(&device, config(CLIENT), false);
    let counter = Counter::open(side.domain.queues(), WaitKind::Fd).unwrap();
    side.ep.bind_counter(&counter, Flags::SEND).unwrap();
    // the queue has no room for the endpoint
    let queue = side.cq.device_cq().unwrap();
    let slots = Arc::new(EndpointSlots::new(1, 1));
    let member = side.cq.attach(&slots, queue.cqe()).unwrap();
    assert_eq!(side.ep.enable(), Err(FiErrno::ENOSPC));
    device.raise(AsyncEvent::CqError, queue.object());
    assert_eq!(counter.trywait(), Ok(()));
    side.cq.detach(member, queue.cqe(), Direction::BOTH);
    side.ep.enable().unwrap();
    assert!(readable(counter.fd().unwrap()));
    assert_eq!(counter.trywait(), Err(FiErrno::EOVERRUN));
}

/// Whether the descriptor of a counter becomes readable behind a `trywait` without a change.
fn readable_soon(counter: &Counter) -> bool {
    assert_eq!(counter.trywait(), Ok(()));
    std::thread::sleep(Duration::from_millis(20));
    readable(counter.fd().unwrap())
}

/// A queue without a wait object, which makes a counter look at it every 1 ms.
fn silent_queue(domain: &Arc<Domain>) -> Arc<CompletionQueue> {
    let none = CqConfig {
        wait: WaitKind::None,
        ..CqConfig::default()
    };
    CompletionQueue::open(domain.queues(), none).unwrap()
}

/// The timer for a queue ends with the last endpoint of the queue.
#[test]
fn a_counter_without_a_queue_wakes_nobody() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    let (silent, woken) = (silent_queue(&domain), open_cq(&domain));
    for queue in [&silent, &silent, &woken] {
        counter.watch(queue);
    }
    counter.unwatch(&silent);
    assert!(readable_soon(&counter));
    counter.unwatch(&silent);
    assert!(!readable_soon(&counter));
    counter.unwatch(&woken);
    assert!(!readable_soon(&counter));
    // and begins again
    counter.watch(&silent);
    assert!(readable_soon(&counter));
}

/// The timer for the queue of an endpoint ends with the endpoint.
#[test]
fn a_counter_leaves_the_queue_of_an_endpoint_that_ends() {
    let side = Side::new(&device(), config(CLIENT), false);
    let silent = silent_queue(&side.domain);
    let counter = Counter::open(side.domain.queues(), WaitKind::Fd).unwrap();
    let ep = Endpoint::open(&side.domain, config(CLIENT)).unwrap();
    ep.bind_cq(&silent, BindFlags::TRANSMIT | BindFlags::RECV)
        .unwrap();
    ep.bind_counter(&counter, Flags::SEND | Flags::RECV)
        .unwrap();
    ep.bind_eq(&side.eq).unwrap();
    ep.enable().unwrap();
    assert!(readable_soon(&counter));
    ep.close();
    assert!(!readable_soon(&counter));
}

/// The process that has opened the counter removes the channel of the queue from it, and no forked
/// child, which shares the wait object.
#[test]
fn the_channel_of_a_queue_ends_with_the_endpoint_in_its_own_process() {
    let (client, server, counters) = counted(&[Flags::RECV]);
    let counter = &counters[0];
    let fd = counter.fd().unwrap();
    let buffer = Buffer::all(&client.domain, 64);
    client.recv(&buffer, 64, 0).unwrap();
    assert_eq!(counter.trywait(), Ok(()));
    // SAFETY: the child changes its copy of the counter, and exits; the alarm ends one that waits.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::alarm(10);
            counter.unwatch(&client.cq);
            libc::_exit(0);
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
        assert_eq!(status, 0);
    }
    // SAFETY: inject is done with the buffer when it returns.
    unsafe { server.ep.inject([1_u8].as_ptr().cast(), 1) }.unwrap();
    let start = Instant::now();
    while !readable(fd) {
        assert!(start.elapsed() < LIMIT);
    }
    counter.unwatch(&client.cq);
    assert!(!readable(fd));
}

/// A thread that waits on the queue and a thread that waits on the counter are both woken,
/// independent of which of them polls the completion.
#[test]
fn a_queue_and_its_counter_wake_both_who_wait() {
    let (client, server, counters) = counted(&[Flags::RECV]);
    let buffer = Buffer::all(&client.domain, 64);
    let source = Buffer::all(&server.domain, 64);
    let counter = &counters[0];
    const COUNT: usize = 200;
    for _ in 0..8 {
        client.recv(&buffer, 64, 0).unwrap();
    }
    std::thread::scope(|scope| {
        let by_counter = scope.spawn(|| {
            for value in 1..=COUNT as u64 {
                counter.wait(value, Some(LIMIT)).unwrap();
            }
        });
        let by_queue = scope.spawn(|| {
            for _ in 0..COUNT {
                client.completion().unwrap();
                client.recv(&buffer, 64, 0).unwrap();
            }
        });
        for i in 0..COUNT {
            server.send(&source, 8, i).unwrap();
            server.completion().unwrap();
            if i % 16 == 0 {
                // both threads sleep by then
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        by_queue.join().unwrap();
        by_counter.join().unwrap();
    });
    assert_eq!(counter.read(), COUNT as u64);
}

/// Queues without a wait object use no descriptor: the kernel limits how many epoll sets may watch
/// one descriptor through other epoll sets.
#[test]
fn a_thousand_queues_and_a_counter_that_waits_for_one_of_them() {
    let (client, server) = {
        let device = device();
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let silent = CqConfig {
            size: 16,
            wait: WaitKind::None,
            ..CqConfig::default()
        };
        let open = || CompletionQueue::open(domain.queues(), silent).unwrap();
        let queues: Vec<_> = (0..1100).map(|_| open()).collect();
        let counter = Counter::open(domain.queues(), WaitKind::Unspec).unwrap();
        let eq = EventQueue::open(EqConfig::default()).unwrap();
        let (_pep, addr) = listener(&device, &eq);
        let ep = Endpoint::open(&domain, config(CLIENT)).unwrap();
        let side = Side {
            domain: Arc::clone(&domain),
            eq: EventQueue::open(EqConfig::default()).unwrap(),
            cq: Arc::clone(&queues[1000]),
            ep,
        };
        side.ep.bind_eq(&side.eq).unwrap();
        let both = BindFlags::TRANSMIT | BindFlags::RECV;
        side.ep.bind_cq(&side.cq, both).unwrap();
        side.ep.bind_counter(&counter, Flags::RECV).unwrap();
        side.ep.connect(Some(addr), b"hello").unwrap();
        let server = accept(&device, &side, &eq);
        next_event(&side.eq).unwrap();
        next_event(&server.eq).unwrap();
        ((side, counter), server)
    };
    let (side, counter) = client;
    let buffer = Buffer::all(&side.domain, 64);
    side.recv(&buffer, 64, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(LATER);
            // SAFETY: inject is done with the buffer when it returns.
            unsafe { server.ep.inject([1_u8].as_ptr().cast(), 1) }.unwrap();
        });
        assert_eq!(counter.wait(1, Some(LIMIT)), Ok(()));
    });
}

#[test]
fn a_change_is_told_once_by_trywait_and_by_poll() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    let fd = counter.fd().unwrap();
    assert_eq!(counter.trywait(), Ok(()));
    assert!(!super::transfer::readable(fd));
    counter.add_errors(1);
    assert!(super::transfer::readable(fd));
    assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
    assert_eq!(counter.trywait(), Ok(()));
    counter.add(1);
    assert!(counter.poll());
    assert!(!counter.poll());
    counter.set(9);
    assert_eq!(counter.read(), 9);
    assert!(counter.poll(), "perhaps another thread has read it");
    assert!(!counter.poll());
    assert_eq!(counter.trywait(), Ok(()), "it was read");
    assert_eq!(counter.wait_kind(), WaitKind::Fd);
}

#[test]
fn operations_that_restore_the_value_before_a_set_are_a_change() {
    let domain = Domain::open(&device(), DomainConfig::default()).unwrap();
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    counter.count(3);
    counter.count_errors(1);
    assert_eq!((counter.read(), counter.read_errors()), (3, 1));
    assert!(counter.poll());
    counter.set(0);
    counter.count(3);
    assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
    assert!(counter.poll());
    assert_eq!(counter.read(), 3);
    assert_eq!((counter.trywait(), counter.poll()), (Ok(()), false));
    counter.add(3_u64.wrapping_neg());
    counter.count(3);
    assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
    assert!(counter.poll());
    assert_eq!((counter.trywait(), counter.poll()), (Ok(()), false));
    counter.set_errors(0);
    counter.count_errors(1);
    assert_eq!(counter.trywait(), Err(FiErrno::EAGAIN));
    assert!(counter.poll());
}

#[test]
fn failures_are_counted_apart_and_wake_who_waits() {
    let (client, server, counters) = counted(&[Flags::SEND | Flags::WRITE, Flags::RECV]);
    let buffer = Buffer::all(&client.domain, 256);
    for context in 0..3 {
        client.recv(&buffer, 256, context).unwrap();
    }
    client.send(&buffer, 256, 9).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(LATER);
            server.ep.shutdown().unwrap();
            assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
            client.ep.close();
        });
        let waited = counters[1].wait(1, Some(LIMIT));
        assert_eq!(waited, Err(FiErrno::EAVAIL));
    });
    assert_eq!((counters[0].read(), counters[0].read_errors()), (0, 1));
    assert_eq!((counters[1].read(), counters[1].read_errors()), (0, 3));
}

#[test]
fn a_binding_that_means_nothing_is_refused() {
    let device = device();
    let side = Side::new(&device, config(CLIENT), false);
    let counter = Counter::open(side.domain.queues(), WaitKind::None).unwrap();
    let bind = |kinds| side.ep.bind_counter(&counter, kinds);
    assert_eq!(bind(Flags::REMOTE_WRITE), Err(FiErrno::EOPNOTSUPP));
    assert_eq!(bind(Flags::SEND | Flags::FENCE), Err(FiErrno::EBADFLAGS));
    assert_eq!(bind(Flags::empty()), Ok(()));
    assert_eq!(bind(Flags::SEND), Ok(()));
    assert_eq!(bind(Flags::SEND | Flags::RECV), Err(FiErrno::EINVAL));
    assert_eq!(bind(Flags::RECV), Ok(()));
    let other = Domain::open(&device, DomainConfig::default()).unwrap();
    let foreign = Counter::open(other.queues(), WaitKind::None).unwrap();
    let bound = side.ep.bind_counter(&foreign, Flags::READ);
    assert_eq!(bound, Err(FiErrno::EDOMAIN));
}
