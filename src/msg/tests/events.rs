//! Regions whose accesses are counted (`FI_RMA_EVENT`).

use super::keys::{TARGET, connect, connect_with, in_form, kind};
use super::*;
use crate::initiator::qp_link::{POLL_LIMIT, POLLS};
use crate::msg::{AtomicKind, AtomicOp};
use crate::queue::Counter;

/// Forms with events: handles, application keys, zero-based addresses.
fn forms() -> [Mode; 3] {
    let all = Mode::LOCAL | Mode::ALLOCATED | Mode::RMA_EVENT;
    [all, all | Mode::PROV_KEY, all | Mode::NATIVE]
}

/// A region over `memory` that is not enabled yet.
fn disabled(domain: &Arc<Domain>, memory: &[&[u8]], access: Access, key: u64) -> Arc<Region> {
    let buffers: Vec<_> = memory
        .iter()
        .map(|part| crate::mr::Buffer {
            addr: part.as_ptr().cast(),
            len: part.len(),
        })
        .collect();
    let config = RegionConfig {
        buffers: &buffers,
        access,
        requested_key: key,
        counted: true,
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    unsafe { Region::register(domain.mr(), &config) }.unwrap()
}

/// A counter bound to a region for these kinds.
pub(super) fn counter(domain: &Domain, region: &Region, kinds: Flags) -> Arc<Counter> {
    let counter = Counter::open(domain.queues(), WaitKind::Fd).unwrap();
    region.bind_counter(&counter, kinds).unwrap();
    counter
}

fn start(region: &Region, memory: &[u8]) -> u64 {
    let mode = region.domain().config().form.mode;
    match mode.contains(Mode::VIRT_ADDR) {
        true => memory.as_ptr() as u64,
        false => 0,
    }
}

fn add(side: &Side, result: &Buffer, addr: u64, key: u64, kind: AtomicKind) {
    let (iov, desc) = result.part(0, 8);
    let local = match kind {
        AtomicKind::Fetch => LocalIov::single(&iov, &desc),
        AtomicKind::Base => LocalIov::NONE,
    };
    // SAFETY: the buffers outlive the operation.
    unsafe {
        let op = (AtomicOp::Add(1), kind);
        side.ep.atomic(op, local, (addr, key), 3, None).unwrap();
    }
}

#[test]
fn each_operation_counts_once_and_none_else() {
    for mode in forms() {
        let (client, server) = in_form(mode);
        let source = Buffer::all(&client.domain, 4096);
        let memory = vec![0_u64; 512];
        // SAFETY: plain numbers, as bytes.
        let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), 4096) };
        let region = disabled(&server.domain, &[memory], TARGET, 7);
        let writes = counter(&server.domain, &region, Flags::REMOTE_WRITE);
        let reads = counter(&server.domain, &region, Flags::REMOTE_READ);
        region.enable().unwrap();
        let uncounted = Buffer::with_key(&server.domain, 64, TARGET, 8);
        let (base, key) = (start(&region, memory), region.key());
        assert_eq!((writes.read(), reads.read()), (0, 0));
        let seen = || (writes.read(), reads.read());
        // an operation completes after its event is counted
        for len in [0, 1, 64, 65, 4096] {
            let before = seen();
            client.write(&source, len, base, key, 1).unwrap();
            assert_eq!(client.completion().unwrap().context, 1);
            assert_eq!(seen(), (before.0 + 1, before.1), "{mode:?} write {len}");
            client.read(&source, len, base, key, 2).unwrap();
            assert_eq!(client.completion().unwrap().context, 2);
            assert_eq!(seen(), (before.0 + 1, before.1 + 1), "{mode:?} read {len}");
        }
        add(&client, &source, base, key, AtomicKind::Fetch);
        add(&client, &source, base, key, AtomicKind::Base);
        assert_eq!(client.completion().unwrap().context, 3);
        assert_eq!(client.completion().unwrap().context, 3);
        assert_eq!(seen(), (7, 5));
        // remote CQ data consumes a receive; the event consumes none
        let land = Buffer::all(&server.domain, 8);
        for slot in 0..3 {
            server.recv(&land, 8, slot).unwrap();
        }
        let (iov, desc) = source.part(0, 16);
        // SAFETY: the buffer outlives the operation; inject is done with its own when it returns.
        unsafe {
            let local = LocalIov::single(&iov, &desc);
            client.ep.write_data(local, 0xda7a, base, key, 4).unwrap();
            let injected = [7_u8; 8];
            let from = injected.as_ptr().cast();
            client.ep.inject_write(from, 8, base, key).unwrap();
        }
        assert_eq!(client.completion().unwrap().context, 4);
        assert_eq!(server.completion().unwrap().data, 0xda7a);
        super::transfer::no_completion(&server);
        assert_eq!(writes.wait(9, Some(LIMIT)), Ok(()));
        // neither refused operations nor operations on other regions are counted
        client.write(&source, 8, base + 4090, key, 5).unwrap();
        assert_eq!(client.refused(5), FiErrno::EACCES);
        let other = if mode.contains(Mode::VIRT_ADDR) {
            uncounted.addr()
        } else {
            0
        };
        client
            .write(&source, 8, other, uncounted.region.key(), 6)
            .unwrap();
        client.completion().unwrap();
        assert_eq!(seen(), (9, 5));
        // the application sets the value, and further operations add to it
        writes.set(100);
        assert_eq!(writes.read(), 100);
        writes.add(10);
        client.write(&source, 8, base, key, 7).unwrap();
        client.completion().unwrap();
        assert_eq!(writes.read(), 111);
        // setting a value discards the operations that were counted before
        client.write(&source, 8, base, key, 8).unwrap();
        client.completion().unwrap();
        writes.set(0);
        assert_eq!(writes.read(), 0);
        drop(region);
        assert_eq!(writes.read(), 0);
    }
}

/// More operations than the queue has slots, from several peers, without reading the counter
/// meanwhile.
#[test]
fn many_operations_of_many_peers_are_all_counted() {
    const EACH: u64 = 5000;
    let mode = forms()[0];
    let device = device();
    let server = Domain::open(&device, kind(mode)).unwrap();
    let memory = [0_u8; 64];
    let parts = [&memory[..5], &memory[5..6], &memory[6..]];
    let region = disabled(&server, &parts, TARGET, 1);
    let both = counter(&server, &region, Flags::REMOTE_WRITE | Flags::REMOTE_READ);
    region.enable().unwrap();
    let sides: Vec<_> = (0..3)
        .map(|_| {
            let client = Domain::open(&device, kind(mode)).unwrap();
            connect(client, Arc::clone(&server))
        })
        .collect();
    std::thread::scope(|scope| {
        for (client, _) in &sides {
            scope.spawn(|| {
                let source = Buffer::all(&client.domain, 64);
                let (mut posted, mut done) = (0, 0);
                while done < EACH {
                    let result = match posted {
                        EACH => Err(FiErrno::EAGAIN),
                        n if n % 3 == 0 => client.read(&source, 64, 0, 1, 1),
                        n if n % 3 == 1 => client.write(&source, 64, 0, 1, 1),
                        _ => client.write(&source, 1, 9, 1, 1),
                    };
                    match result {
                        Ok(()) => posted += 1,
                        Err(error) => {
                            assert_eq!(error, FiErrno::EAGAIN);
                            client.completion().unwrap();
                            done += 1;
                        }
                    }
                }
            });
        }
    });
    assert_eq!(both.read(), 3 * EACH);
    drop(region);
}

/// A waiting thread of the target is woken although no thread of the target polls a queue.
#[test]
fn who_waits_is_woken() {
    let (client, server) = in_form(forms()[0]);
    let source = Buffer::all(&client.domain, 8);
    let memory = [0_u8; 8];
    let region = disabled(&server.domain, &[&memory], TARGET, 1);
    let writes = counter(&server.domain, &region, Flags::REMOTE_WRITE);
    region.enable().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| writes.wait(2, Some(LIMIT)));
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(30));
            client.write(&source, 8, 0, 1, 1).unwrap();
            client.completion().unwrap();
        }
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
    // a wait on the descriptor
    let mut poll = libc::pollfd {
        fd: writes.fd().unwrap(),
        events: libc::POLLIN,
        revents: 0,
    };
    let start = Instant::now();
    let mut told = false;
    while writes.read() < 3 {
        assert!(start.elapsed() < LIMIT, "nobody was woken");
        if writes.trywait().is_ok() {
            if !told {
                client.write(&source, 8, 0, 1, 1).unwrap();
                told = true;
            }
            // SAFETY: one descriptor.
            assert!(unsafe { libc::poll(&raw mut poll, 1, 10_000) } >= 0);
        }
    }
    drop(region);
}

/// In a domain with events but without `FI_MR_RMA_EVENT`, accesses to a region are counted from the
/// time that a counter is bound, independent of the kind of its key.
#[test]
fn regions_that_are_enabled_can_be_counted() {
    for mode in [Mode::LOCAL | Mode::ALLOCATED, Mode::LOCAL | Mode::NATIVE] {
        let device = device();
        let events = DomainConfig {
            mr: MrConfig {
                events: true,
                ..kind(mode).mr
            },
            ..DomainConfig::default()
        };
        let server = Domain::open(&device, events).unwrap();
        let (client, server) = connect(Domain::open(&device, kind(mode)).unwrap(), server);
        let source = Buffer::all(&client.domain, 8);
        let target = Buffer::with_key(&server.domain, 64, TARGET, 9);
        let (addr, key) = (start(&target.region, &target.memory), target.region.key());
        client.write(&source, 8, addr, key, 1).unwrap();
        client.completion().unwrap();
        let writes = counter(&server.domain, &target.region, Flags::REMOTE_WRITE);
        for _ in 0..3 {
            client.write(&source, 8, addr, key, 1).unwrap();
            client.completion().unwrap();
            client.read(&source, 8, addr, key, 1).unwrap();
            client.completion().unwrap();
        }
        assert_eq!(writes.read(), 3, "{mode:?}");
        let reads = counter(&server.domain, &target.region, Flags::REMOTE_READ);
        client.read(&source, 8, addr, key, 1).unwrap();
        client.completion().unwrap();
        assert_eq!((writes.read(), reads.read()), (3, 1));
        client.write(&source, 8, addr + 60, key, 2).unwrap();
        assert_eq!(client.refused(2), FiErrno::EACCES, "no key is native");
        drop(target);
    }
}

fn compare(
    side: &Side,
    slot: usize,
    result: &Buffer,
    (compare, swap): (u64, u64),
    to: (u64, u64),
) -> crate::errno::Result<()> {
    let (iov, desc) = result.part(8 * slot, 8);
    let op = AtomicOp::CompareSwap { compare, swap };
    // SAFETY: the buffers outlive the operation.
    unsafe {
        let op = (op, AtomicKind::Fetch);
        let local = LocalIov::single(&iov, &desc);
        side.ep.atomic(op, local, to, slot, None)
    }
}

/// The result arrives before the call returns, or later: then operations posted behind it are
/// deferred.
#[test]
fn a_compare_counts_by_its_result() {
    for polls in [POLL_LIMIT, 0] {
        POLLS.set(polls);
        for mode in forms() {
            let (client, server) = in_form(mode);
            let source = Buffer::all(&client.domain, 4096);
            let memory = vec![0_u64; 512];
            // SAFETY: plain numbers, as bytes.
            let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), 4096) };
            let region = disabled(&server.domain, &[memory], TARGET, 7);
            let writes = counter(&server.domain, &region, Flags::REMOTE_WRITE);
            let reads = counter(&server.domain, &region, Flags::REMOTE_READ);
            region.enable().unwrap();
            let to = (start(&region, memory), region.key());
            for slot in 0..20_u64 {
                let found = if slot % 2 == 0 { slot / 2 } else { 99 };
                compare(&client, slot as usize, &source, (found, slot / 2 + 1), to).unwrap();
            }
            client.write(&source, 8, to.0 + 64, to.1, 20).unwrap();
            client.send(&source, 8, 21).unwrap();
            for context in 0..20 {
                assert_eq!(client.completion().unwrap().context, context, "{mode:?}");
                let (failed, done) = (context as u64 / 2, (context as u64 + 2) / 2);
                // later operations may be counted already
                assert!(writes.read() >= done && reads.read() >= failed);
                let before = source.memory[8 * context..][..8].try_into().unwrap();
                assert_eq!(u64::from_ne_bytes(before), (context as u64).div_ceil(2));
            }
            assert_eq!(client.completion().unwrap().context, 20);
            assert_eq!((writes.read(), reads.read()), (11, 10), "{mode:?}");
            let land = Buffer::all(&server.domain, 8);
            server.recv(&land, 8, 0).unwrap();
            assert_eq!(client.completion().unwrap().context, 21);
        }
        POLLS.set(POLL_LIMIT);
    }
}

/// Each operation completes once when the connection ends, independent of the parts that had been
/// posted.
#[test]
fn a_compare_is_completed_when_the_peer_goes() {
    for polls in [POLL_LIMIT, 0] {
        for goes_at in [0, 3] {
            let (client, server) = in_form(forms()[0]);
            let source = Buffer::all(&client.domain, 4096);
            let memory = [0_u64; 8];
            // SAFETY: plain numbers, as bytes.
            let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), 64) };
            let region = disabled(&server.domain, &[memory], TARGET, 7);
            let writes = counter(&server.domain, &region, Flags::REMOTE_WRITE);
            region.enable().unwrap();
            let to = (start(&region, memory), region.key());
            client.write(&source, 8, to.0, to.1, 9).unwrap();
            client.completion().unwrap();
            POLLS.set(polls);
            let mut posted = 0;
            while posted < 4 {
                if posted == goes_at {
                    server.ep.close();
                }
                // this side may have processed the end of the connection already
                if compare(&client, posted, &source, (0, 0), to).is_err() {
                    break;
                }
                posted += 1;
            }
            assert!(posted >= goes_at);
            for context in 0..posted {
                let end = client.completion();
                let told = match &end {
                    Ok(completion) => completion.context,
                    Err(error) => error.completion.context,
                };
                assert_eq!(told, context, "{end:?}");
                assert!(end.is_err() || context < goes_at);
            }
            super::transfer::no_completion(&client);
            assert!(writes.read() <= 1 + goes_at as u64);
            POLLS.set(POLL_LIMIT);
        }
    }
}

#[test]
fn bindings_have_their_time_and_their_kinds() {
    let domain = Domain::open(&device(), kind(forms()[2])).unwrap();
    let memory = [0_u8; 64];
    let region = disabled(&domain, &[&memory], TARGET, 1);
    let open = || Counter::open(domain.queues(), WaitKind::None).unwrap();
    let (first, second) = (open(), open());
    assert!(!region.is_enabled());
    assert_eq!(region.key(), Region::NO_KEY);
    assert_eq!(region.raw_key().err(), Some(FiErrno::EOPBADSTATE));
    for kinds in [
        Flags::empty(),
        Flags::REMOTE_WRITE | Flags::SEND,
        Flags::WRITE,
    ] {
        let refused = region.bind_counter(&first, kinds);
        assert_eq!(refused, Err(FiErrno::EBADFLAGS));
    }
    region.bind_counter(&first, Flags::REMOTE_WRITE).unwrap();
    let both = Flags::REMOTE_WRITE | Flags::REMOTE_READ;
    assert_eq!(
        region.bind_counter(&second, both),
        Err(FiErrno::EINVAL),
        "one has a counter"
    );
    region.bind_counter(&second, Flags::REMOTE_READ).unwrap();
    let foreign = Domain::open(&device(), kind(forms()[2])).unwrap();
    let stranger = Counter::open(foreign.queues(), WaitKind::None).unwrap();
    assert_eq!(
        region.bind_counter(&stranger, Flags::REMOTE_READ),
        Err(FiErrno::EDOMAIN)
    );
    region.enable().unwrap();
    assert_ne!(region.key(), Region::NO_KEY);
    assert_eq!(region.enable(), Err(FiErrno::EOPBADSTATE));
    assert_eq!(
        region.bind_counter(&second, Flags::REMOTE_READ),
        Err(FiErrno::EOPBADSTATE)
    );
    // a region without the events flag is enabled by its registration
    let plain = Buffer::with_key(&domain, 8, TARGET, 2);
    assert!(plain.region.is_enabled());
    assert_eq!(
        plain.region.bind_counter(&first, Flags::REMOTE_READ),
        Err(FiErrno::EOPBADSTATE)
    );
    // a domain without events refuses the flag
    let without = Domain::open(&device(), kind(Mode::NATIVE)).unwrap();
    let buffers = [crate::mr::Buffer {
        addr: memory.as_ptr().cast(),
        len: 64,
    }];
    let config = RegionConfig {
        buffers: &buffers,
        access: TARGET,
        requested_key: 0,
        counted: true,
        ..RegionConfig::default()
    };
    // SAFETY: the call is refused.
    let refused = unsafe { Region::register(without.mr(), &config) };
    assert_eq!(refused.err(), Some(FiErrno::EBADFLAGS));
    let plain = Buffer::with_key(&without, 8, TARGET, 2);
    let cntr = Counter::open(without.queues(), WaitKind::None).unwrap();
    assert_eq!(
        plain.region.bind_counter(&cntr, Flags::REMOTE_READ),
        Err(FiErrno::ENOSYS)
    );
}

/// Before a region is enabled, this side's operations can use it; its descriptor does not change.
#[test]
fn a_disabled_region_is_for_this_side_only() {
    let (client, server) = in_form(forms()[0]);
    let source = Buffer::all(&client.domain, 4096);
    // longer than the inline size
    let memory = [3_u8; 4096];
    let region = disabled(&server.domain, &[&memory], Access::all(), 1);
    client.write(&source, 8, 0, 1, 1).unwrap();
    assert_eq!(client.refused(1), FiErrno::EKEYREJECTED);
    let iov = libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: 4096,
    };
    let desc = Desc(region.desc());
    for enabled in [false, true] {
        if enabled {
            region.enable().unwrap();
        }
        client.recv(&source, 4096, 2).unwrap();
        // SAFETY: the buffer outlives the operation.
        unsafe { server.ep.send(LocalIov::single(&iov, &desc), 3) }.unwrap();
        assert_eq!(client.completion().unwrap().context, 2);
        assert_eq!(server.completion().unwrap().context, 3);
    }
    client.write(&source, 8, 0, 1, 1).unwrap();
    client.completion().unwrap();
    drop(region);
}

/// Counters of an endpoint count the operations of its peer on any region; counters of regions
/// count all operations on the region.
#[test]
fn endpoints_count_what_their_peer_does() {
    for mode in forms() {
        let device = device();
        let domain = || Domain::open(&device, kind(mode)).unwrap();
        let server = domain();
        let open = || Counter::open(server.queues(), WaitKind::Fd).unwrap();
        let (writes, reads, others, both) = (open(), open(), open(), open());
        let (client, first) = connect_with(domain(), Arc::clone(&server), |side| {
            let bind = |counter: &Arc<Counter>, kinds| side.ep.bind_counter(counter, kinds);
            assert_eq!(bind(&writes, Flags::REMOTE_WRITE), Ok(()));
            assert_eq!(bind(&reads, Flags::REMOTE_READ | Flags::SEND), Ok(()));
            for taken in [Flags::REMOTE_WRITE, Flags::REMOTE_READ | Flags::RECV] {
                assert_eq!(bind(&others, taken), Err(FiErrno::EINVAL));
            }
            let wrong = Flags::REMOTE_WRITE | Flags::FENCE;
            assert_eq!(bind(&others, wrong), Err(FiErrno::EBADFLAGS));
        });
        let late = first.ep.bind_counter(&others, Flags::REMOTE_READ);
        assert_eq!(late, Err(FiErrno::EOPBADSTATE));
        let (second, _other) = connect_with(domain(), Arc::clone(&server), |side| {
            let kinds = Flags::REMOTE_WRITE | Flags::REMOTE_READ;
            side.ep.bind_counter(&others, kinds).unwrap();
        });
        let (third, _third) = connect(domain(), Arc::clone(&server));
        let memory = vec![0_u64; 512];
        // SAFETY: plain numbers, as bytes.
        let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), 4096) };
        let counted = disabled(&server, &[&memory[..1000], &memory[1000..]], TARGET, 7);
        counted
            .bind_counter(&both, Flags::REMOTE_WRITE | Flags::REMOTE_READ)
            .unwrap();
        counted.enable().unwrap();
        let plain = Buffer::with_key(&server, 4096, TARGET, 8);
        let plain_base = start(&plain.region, &plain.memory);
        let regions = [
            (start(&counted, memory), counted.key()),
            (plain_base, plain.region.key()),
        ];
        let seen = || (writes.read(), reads.read(), others.read(), both.read());
        assert_eq!(seen(), (0, 0, 0, 0));
        let source = Buffer::all(&client.domain, 4096);
        for (round, (base, key)) in (1..).zip(regions) {
            // a write over both buffers of the first region
            client.write(&source, 4096, base, key, 1).unwrap();
            client.completion().unwrap();
            client.read(&source, 8, base, key, 2).unwrap();
            client.completion().unwrap();
            // a fetching atomic is a read for an endpoint and a write for a region; other atomics
            // are writes for both
            add(&client, &source, base, key, AtomicKind::Fetch);
            client.completion().unwrap();
            add(&client, &source, base, key, AtomicKind::Base);
            client.completion().unwrap();
            client.write(&source, 8, base + 4090, key, 3).unwrap();
            assert_eq!(client.refused(3), FiErrno::EACCES);
            assert_eq!(seen(), (2 * round, 2 * round, 0, 4), "{mode:?}");
        }
        let (base, key) = regions[1];
        let theirs = Buffer::all(&second.domain, 64);
        second.write(&theirs, 64, base, key, 1).unwrap();
        second.completion().unwrap();
        let nobodys = Buffer::all(&third.domain, 64);
        third.write(&nobodys, 64, base, key, 1).unwrap();
        third.completion().unwrap();
        assert_eq!(seen(), (4, 4, 1, 4), "each its own peer's");
        first.ep.close();
        assert_eq!(seen(), (4, 4, 1, 4));
        drop(counted);
    }
}

/// More operations than the queue has slots, of the longest form: several parts, and two events.
#[test]
fn what_is_counted_twice_does_not_overflow_the_queue() {
    const COUNT: u64 = 3000;
    let device = device();
    let domain = || Domain::open(&device, kind(forms()[0])).unwrap();
    let server = domain();
    let counter = Counter::open(server.queues(), WaitKind::None).unwrap();
    let (client, _server) = connect_with(domain(), Arc::clone(&server), |side| {
        side.ep.bind_counter(&counter, Flags::REMOTE_WRITE).unwrap();
    });
    let memory = [0_u8; 64];
    let parts: Vec<_> = memory.chunks(8).collect();
    let region = disabled(&server, &parts, TARGET, 1);
    let of_region = self::counter(&server, &region, Flags::REMOTE_WRITE);
    region.enable().unwrap();
    let source = Buffer::all(&client.domain, 64);
    let (mut posted, mut done) = (0, 0);
    while done < COUNT {
        match client.write(&source, 64, 0, 1, 1) {
            Ok(()) if posted < COUNT => posted += 1,
            Ok(()) => panic!("one too many"),
            Err(error) => {
                assert_eq!(error, FiErrno::EAGAIN);
                client.completion().unwrap();
                done += 1;
            }
        }
        while posted == COUNT && done < COUNT {
            client.completion().unwrap();
            done += 1;
        }
    }
    assert_eq!((counter.read(), of_region.read()), (COUNT, COUNT));
    drop(region);
}
