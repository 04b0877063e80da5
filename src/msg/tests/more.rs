//! `FI_MORE`: reads and writes that are posted together with those that follow.

use super::keys::{TARGET, in_form};
use super::*;
use crate::initiator::sq::Sq as _;
use crate::msg::shared::Shared;
use crate::queue::slots::FailureListener as _;

struct Ends {
    client: Side,
    server: Side,
    source: Buffer,
    target: Buffer,
}

impl Ends {
    fn new() -> Self {
        let (client, server) = connected(false, |_| {});
        let mut source = Buffer::all(&client.domain, 4096);
        source
            .memory
            .iter_mut()
            .zip(1_u8..=250)
            .for_each(|(to, byte)| *to = byte);
        let target = Buffer::all(&server.domain, 4096);
        Self {
            client,
            server,
            source,
            target,
        }
    }

    /// Writes byte `at`.
    fn write(&self, at: usize, flags: Flags) -> Result<()> {
        let (iov, desc) = self.source.part(at, 1);
        let remote = [RemoteIov {
            addr: self.target.addr() + at as u64,
            len: 1,
            key: self.target.region.key(),
        }];
        let local = LocalIov::single(&iov, &desc);
        // SAFETY: the buffers outlive the operations.
        unsafe { self.client.ep.write_msg(local, &remote, 0, at, flags) }
    }

    /// The first `count` bytes at the target.
    fn arrived(&self, count: usize) -> Vec<u8> {
        let at = self.target.memory.as_ptr();
        // SAFETY: inside the buffer, which the device writes.
        let byte = |i| unsafe { at.add(i).read_volatile() };
        (0..count).map(byte).collect()
    }

    fn is_delayed(&self) -> bool {
        is_delayed(&self.client.ep.shared)
    }

    fn completed(&self, contexts: std::ops::Range<usize>) {
        for context in contexts {
            assert_eq!(self.client.completion().unwrap().context, context);
        }
    }
}

/// Whether a request waits for further ones.
fn is_delayed(shared: &Shared) -> bool {
    let tx = shared.tx.lock();
    tx.as_ref().is_some_and(|tx| tx.sq.has_delayed())
}

/// Waits without a call to the endpoint or its queue.
fn wait(done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LIMIT, "nothing happens");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// soft0 executes a write while it is posted, so the memory shows what is posted. The helper
/// thread may post requests earlier; it holds the lock of the endpoint for that.
#[test]
fn a_list_is_posted_with_its_last_operation() {
    let ends = Ends::new();
    ends.write(0, Flags::empty()).unwrap();
    assert_eq!(ends.arrived(1), [1]);
    // the helper thread posts nothing meanwhile: it begins 100 us after the first one
    let delayed = (0..1000).any(|_| {
        ends.write(1, Flags::MORE).unwrap();
        let delayed = ends.arrived(2)[1] == 0;
        ends.write(2, Flags::empty()).unwrap();
        assert_eq!(ends.arrived(3), [1, 2, 3]);
        delayed
    });
    assert!(delayed);
}

#[test]
fn a_list_without_an_end_is_posted_nevertheless() {
    let ends = Ends::new();
    for at in 0..5 {
        ends.write(at, Flags::MORE).unwrap();
    }
    wait(|| ends.arrived(5) == [1, 2, 3, 4, 5]);
    ends.completed(0..5);
}

/// The next read of the queue posts a list. The helper thread posts it too, so a round counts only
/// if the list was delayed until the read.
#[test]
fn a_read_of_the_queue_posts_a_list() {
    let ends = Ends::new();
    let reads: [&dyn Fn() -> Result<usize>; 2] = [
        &|| ends.client.cq.read(1, &mut |_: &Completion| {}),
        &|| ends.client.cq.read(0, &mut |_: &Completion| {}),
    ];
    let mut at = 0;
    for read in reads {
        let mut rounds = 0;
        while rounds < 20 {
            assert!(at < 4000, "the list is never delayed");
            ends.write(at % 250, Flags::MORE).unwrap();
            let delayed = ends.is_delayed();
            let found = read();
            rounds += usize::from(delayed);
            assert!(!ends.is_delayed(), "{at}: {found:?}");
            if found.is_err() {
                ends.completed(at % 250..at % 250 + 1);
            }
            at += 1;
        }
    }
}

/// An acknowledgement of revoked keys, and the return of keys, are posted behind the delayed
/// requests, which use these keys. A round counts as above.
#[test]
fn keys_are_acknowledged_behind_a_list() {
    const KEY: u64 = 7;
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 64);
    let target = Buffer::with_key(&server.domain, 64, TARGET, KEY);
    let (iov, desc) = source.part(0, 64);
    let (addr, len) = (0, 64);
    let remote = [RemoteIov {
        addr,
        len,
        key: KEY,
    }];
    let shared = &client.ep.shared;
    let ways: [&dyn Fn(); 3] = [
        &|| shared.acknowledge(),
        &|| {
            shared.tend_keys();
        },
        &|| {
            let mut tx = shared.tx.lock();
            tx.as_mut().unwrap().return_keys_and_wait();
        },
    ];
    for (i, way) in ways.into_iter().enumerate() {
        let (mut rounds, mut at) = (0, 0);
        while rounds < 20 {
            assert!(at < 4000, "{i}: the list is never delayed");
            // the key is looked up
            client.write(&source, 64, 0, KEY, 1).unwrap();
            assert_eq!(client.completion().unwrap().context, 1);
            let local = LocalIov::single(&iov, &desc);
            // SAFETY: the buffers outlive the operation.
            unsafe { client.ep.write_msg(local, &remote, 0, 2, Flags::MORE) }.unwrap();
            let delayed = is_delayed(shared);
            way();
            rounds += usize::from(delayed);
            assert!(!is_delayed(shared), "{i}: in round {at}");
            assert_eq!(client.completion().unwrap().context, 2);
            at += 1;
        }
    }
    assert!(target.memory == source.memory);
}

#[test]
fn other_operations_end_a_list() {
    let ends = Ends::new();
    let (iov, desc) = ends.source.part(0, 1);
    let local = LocalIov::single(&iov, &desc);
    let key = ends.target.region.key();
    let back = Buffer::all(&ends.client.domain, 1);
    let (to, to_desc) = back.part(0, 1);
    let result = LocalIov::single(&to, &to_desc);
    let ep = &ends.client.ep;
    let others: [&dyn Fn() -> Result<()>; 3] = [
        // SAFETY: the buffers outlive the operations.
        &|| unsafe { ep.write(local, ends.target.addr(), key, 99) },
        // SAFETY: as above.
        &|| unsafe { ep.read(result, ends.target.addr(), key, 99) },
        // SAFETY: as above.
        &|| unsafe {
            let at: *const c_void = ends.source.memory.as_ptr().cast();
            ep.inject_write(at, 1, ends.target.addr(), key)
        },
    ];
    for (i, other) in others.into_iter().enumerate() {
        ends.write(10 + i, Flags::MORE).unwrap();
        other().unwrap();
        assert_eq!(ends.arrived(14)[10 + i], 11 + i as u8);
        assert_eq!(ends.client.completion().unwrap().context, 10 + i);
        if i < 2 {
            assert_eq!(ends.client.completion().unwrap().context, 99);
        }
    }
    // injected data is not delayed, although the flag is set
    ends.write(20, Flags::MORE | Flags::INJECT).unwrap();
    assert_eq!(ends.arrived(21)[20], 21);
    ends.completed(20..21);
}

/// A list has at most 64 requests, and a full queue has none that is delayed.
#[test]
fn long_lists_and_full_queues() {
    let ends = Ends::new();
    let mut posted = 0;
    let mut done = 0;
    while posted < 200 {
        match ends.write(posted, Flags::MORE) {
            Ok(()) => posted += 1,
            Err(FiErrno::EAGAIN) => {
                // each that was accepted completes without a further operation
                ends.completed(done..posted);
                done = posted;
            }
            Err(error) => panic!("{error}"),
        }
    }
    ends.completed(done..200);
    assert!(ends.arrived(200).into_iter().eq(1..=200));
}

/// A wrong key fails its operation and those behind it, each with an entry.
#[test]
fn a_failure_within_a_list() {
    let ends = Ends::new();
    let (iov, desc) = ends.source.part(0, 1);
    let local = LocalIov::single(&iov, &desc);
    let wrong = [RemoteIov {
        addr: ends.target.addr() + 4096,
        len: 1,
        key: ends.target.region.key(),
    }];
    ends.write(0, Flags::MORE).unwrap();
    // SAFETY: the buffers outlive the operations.
    unsafe { ends.client.ep.write_msg(local, &wrong, 0, 1, Flags::MORE) }.unwrap();
    ends.write(2, Flags::empty()).unwrap();
    ends.completed(0..1);
    for _ in 1..3 {
        ends.client.completion().unwrap_err();
    }
    assert_eq!(ends.arrived(3), [1, 0, 0]);
}

/// What is delayed when the connection ends has an entry too.
#[test]
fn an_end_within_a_list() {
    let ends = Ends::new();
    for at in 0..3 {
        ends.write(at, Flags::MORE).unwrap();
    }
    ends.server.ep.shutdown().unwrap();
    for context in 0..3 {
        match ends.client.completion() {
            Ok(completion) => assert_eq!(completion.context, context),
            Err(error) => assert_eq!(error.completion.context, context),
        }
    }
}

/// The device executes a write in the call if no request is under way. Its entry wakes a thread
/// that sleeps on the queue. One entry is put there at a time; their order is that of the calls.
#[test]
fn a_write_that_is_executed_in_its_call_wakes_a_reader() {
    let ends = Ends::new();
    for round in 0..20 {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| ends.client.completion().unwrap().context);
            // the reader sleeps, or is about to
            std::thread::sleep(Duration::from_millis(round % 4));
            ends.write(7, Flags::empty()).unwrap();
            assert_eq!(reader.join().unwrap(), 7);
        });
        // no request is under way, so these are executed at once, and posted
        for at in 0..5 {
            ends.write(at, Flags::empty()).unwrap();
        }
        assert_eq!(ends.arrived(5), [1, 2, 3, 4, 5]);
        ends.completed(0..5);
        let posted = ends.client.ep.shared.slots.tx.outstanding();
        assert_eq!(posted, 0, "round {round}");
    }
}

/// Reads of one entry find that of a receive, although each write puts one in front of it.
#[test]
fn writes_that_are_executed_in_their_call_do_not_hide_a_receive() {
    let ends = Ends::new();
    ends.write(0, Flags::empty()).unwrap();
    ends.completed(0..1);
    let target = Buffer::all(&ends.client.domain, 64);
    ends.client.recv(&target, 64, 99).unwrap();
    ends.server.send(&ends.target, 8, 1).unwrap();
    assert_eq!(ends.server.completion().unwrap().context, 1);
    let read = || {
        ends.write(1, Flags::empty()).unwrap();
        ends.client.completion().unwrap().context
    };
    assert!((0..400).any(|_| read() == 99));
}

/// The limit of injected data is that of a request.
#[test]
fn injected_data_is_as_long_as_that_of_a_request() {
    let ends = Ends::new();
    ends.write(0, Flags::empty()).unwrap();
    ends.completed(0..1);
    let write = |len| {
        let (iov, desc) = ends.source.part(0, len);
        let remote = [RemoteIov {
            addr: ends.target.addr(),
            len,
            key: ends.target.region.key(),
        }];
        let local = LocalIov::single(&iov, &desc);
        let flags = Flags::INJECT | Flags::COMPLETION;
        // SAFETY: the buffers outlive the operations.
        unsafe { ends.client.ep.write_msg(local, &remote, 0, 7, flags) }
    };
    let most = config(CLIENT).inject_size;
    assert_eq!(write(most + 1), Err(FiErrno::EMSGSIZE));
    write(most).unwrap();
    assert_eq!(ends.client.completion().unwrap().context, 7);
}
