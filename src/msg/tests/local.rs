//! Local buffers that the application did not register (`FI_MR_LOCAL` off).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::mr::lkey_probe::LocalProbe;
use crate::mr::{CacheConfig, Monitor, memory_changed};

/// Two connected ends; the connecting one has no `FI_MR_LOCAL`. `checked` descriptors are valid or
/// NULL.
fn unregistered(checked: bool, local: LocalMemory) -> (Side, Side) {
    let kind = DomainConfig {
        mr: MrConfig {
            form: Form::new(Mode::NATIVE, checked),
            local,
            ..MrConfig::default()
        },
        ..DomainConfig::default()
    };
    let (client, server) = connected_in(kind.clone(), false, |_| {});
    assert_ne!(
        client.domain.mr().config().form,
        server.domain.mr().config().form
    );
    (client, server)
}

fn plain(memory: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: memory.len(),
    }
}

/// An invalid descriptor, which must not be dereferenced.
const RUBBISH: Desc = Desc(std::ptr::without_provenance_mut(0x5ba_d000));

#[test]
fn what_is_not_registered_is_sent_and_received() {
    for (checked, desc, each) in [
        (false, RUBBISH, LocalMemory::Each),
        (false, RUBBISH, LocalMemory::Best),
        (false, RUBBISH, LocalMemory::Cached),
        (false, Desc::NULL, LocalMemory::Each),
        (true, Desc::NULL, LocalMemory::Best),
        (true, Desc::NULL, LocalMemory::Cached),
    ] {
        let (client, server) = unregistered(checked, each);
        let mut remote = Buffer::all(&server.domain, 100_000);
        for len in [0, 1, 64, 65, 4096, 100_000] {
            let sent: Vec<u8> = (0..len).map(|i| i as u8 ^ 0x3c).collect();
            let received = vec![0_u8; len];
            // a send to the server
            server.recv(&remote, 100_000, 1).unwrap();
            // SAFETY: the buffers outlive the operations.
            unsafe { client.ep.send(LocalIov::single(&plain(&sent), &desc), 2) }.unwrap();
            server.completion().unwrap();
            client.completion().unwrap();
            assert!(remote.memory[..len] == sent, "{len} bytes");
            // a send to the client
            // SAFETY: as above.
            unsafe {
                client
                    .ep
                    .recv(LocalIov::single(&plain(&received), &desc), 3)
            }
            .unwrap();
            server.send(&remote, len, 4).unwrap();
            client.completion().unwrap();
            server.completion().unwrap();
            assert!(received == sent, "{len} bytes back");
            // RMA in both directions
            remote.fill(9);
            let (addr, key) = (remote.addr(), remote.region.key());
            // SAFETY: as above.
            unsafe {
                let into = plain(&received);
                client.ep.read(LocalIov::single(&into, &desc), addr, key, 5)
            }
            .unwrap();
            client.completion().unwrap();
            assert!(received == remote.memory[..len], "{len} bytes read");
            // SAFETY: as above.
            unsafe {
                let from = plain(&sent);
                client
                    .ep
                    .write(LocalIov::single(&from, &desc), addr, key, 6)
            }
            .unwrap();
            client.completion().unwrap();
            assert!(remote.memory[..len] == sent, "{len} bytes written");
        }
    }
}

#[test]
fn a_descriptor_is_used_where_it_may_be_relied_upon() {
    let (client, server) = unregistered(true, LocalMemory::Best);
    let target = Buffer::all(&server.domain, 4096);
    let mut source = Buffer::all(&client.domain, 4096);
    source.fill(5);
    server.recv(&target, 4096, 1).unwrap();
    client.send(&source, 4096, 2).unwrap();
    server.completion().unwrap();
    assert!(target.memory == source.memory);
    // a descriptor of another domain
    let (iov, desc) = target.part(0, 4096);
    // SAFETY: as below; the call is refused before it reads the buffer.
    let refused = unsafe { client.ep.send(LocalIov::single(&iov, &desc), 3) };
    assert_eq!(refused, Err(FiErrno::EINVAL));
}

#[test]
fn memory_that_is_not_there_is_refused_and_nothing_is_left() {
    let (client, server) = unregistered(false, LocalMemory::Each);
    let hole = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(4096),
        iov_len: 4096,
    };
    for _ in 0..200 {
        // SAFETY: the memory is not read: registering it is refused.
        let refused = unsafe { client.ep.send(LocalIov::single(&hole, &Desc::NULL), 1) };
        assert_eq!(refused, Err(FiErrno::EFAULT));
    }
    let target = Buffer::all(&server.domain, 4096);
    server.recv(&target, 4096, 2).unwrap();
    let source = vec![7_u8; 4096];
    // SAFETY: the buffer outlives the operation.
    unsafe {
        client
            .ep
            .send(LocalIov::single(&plain(&source), &Desc::NULL), 3)
    }
    .unwrap();
    server.completion().unwrap();
    assert!(target.memory == source);
}

/// Other pages at the same addresses, between two operations.
#[test]
fn exchanged_pages_are_noticed() {
    for local in [LocalMemory::Each, LocalMemory::Best, LocalMemory::Cached] {
        exchange_pages(local);
    }
}

fn exchange_pages(local: LocalMemory) {
    let (client, server) = unregistered(false, local);
    let target = Buffer::all(&server.domain, 1 << 16);
    let mut place: *mut c_void = std::ptr::null_mut();
    for round in 1..=20_u8 {
        let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
        // SAFETY: a new mapping, or one that replaces the last one, which is no longer used.
        let memory = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            place = libc::mmap(place, 1 << 16, prot, flags, -1, 0);
            assert_ne!(place, libc::MAP_FAILED);
            std::slice::from_raw_parts_mut(place.cast::<u8>(), 1 << 16)
        };
        memory.fill(round);
        server.recv(&target, 1 << 16, 0).unwrap();
        // SAFETY: the mapping outlives the operation.
        unsafe {
            client
                .ep
                .send(LocalIov::single(&plain(memory), &Desc::NULL), 0)
        }
        .unwrap();
        client.completion().unwrap();
        server.completion().unwrap();
        assert!(
            target.memory.iter().all(|byte| *byte == round),
            "round {round}"
        );
    }
    // SAFETY: mapped above; the operations are complete.
    unsafe { libc::munmap(place, 1 << 16) };
}

/// The registration of one operation serves the next ones, in all directions that may use it.
#[test]
fn what_was_registered_is_used_again() {
    if !crate::mr::monitor::tests::available() {
        return;
    }
    let (client, server) = unregistered(false, LocalMemory::Cached);
    let target = Buffer::all(&server.domain, 1 << 16);
    let (sent, received) = (vec![3_u8; 1 << 16], vec![0_u8; 1 << 16]);
    for _ in 0..100 {
        server.recv(&target, 1 << 16, 1).unwrap();
        // SAFETY: the buffers outlive the operations.
        unsafe {
            client
                .ep
                .send(LocalIov::single(&plain(&sent), &Desc::NULL), 2)
        }
        .unwrap();
        client.completion().unwrap();
        server.completion().unwrap();
        // SAFETY: as above.
        unsafe {
            client
                .ep
                .recv(LocalIov::single(&plain(&received), &Desc::NULL), 3)
        }
        .unwrap();
        server.send(&target, 1 << 16, 4).unwrap();
        client.completion().unwrap();
        server.completion().unwrap();
        assert!(received == sent);
    }
    let cache = client.domain.mr().local_cache(client.domain.pd());
    let misses = cache.expect("userfaultfd").misses();
    // forks and unmapping in other tests cause misses, more of them on a busy machine
    assert!(misses < 200, "each operation registered");
}

/// Without a region and without a cache, short messages are copied, and no memory is registered.
#[test]
fn short_messages_need_no_registration() {
    if !crate::mr::monitor::tests::available() {
        return;
    }
    let kind = DomainConfig {
        mr: MrConfig {
            form: Form::new(Mode::NATIVE, false),
            local: LocalMemory::Cached,
            ..MrConfig::default()
        },
        ..DomainConfig::default()
    };
    // an inject size above the inline size
    let longer = EndpointConfig {
        inject_size: 2048,
        ..config(CLIENT)
    };
    let early = |client: &Side| client.ep.enable().unwrap();
    let (client, server) = connected_as(kind, longer, false, early);
    let most = crate::mr::COPIED;
    let target = Buffer::all(&server.domain, 2 * most);
    for len in [1000, 2048, 2049, most, most + 1] {
        let sent = vec![len as u8; len];
        server.recv(&target, 2 * most, 1).unwrap();
        // SAFETY: the buffer outlives the operation.
        unsafe {
            client
                .ep
                .send(LocalIov::single(&plain(&sent), &Desc::NULL), 2)
        }
        .unwrap();
        client.completion().unwrap();
        server.completion().unwrap();
        assert!(target.memory[..len] == sent);
        let cache = client.domain.mr().local_cache(client.domain.pd());
        let misses = cache.expect("userfaultfd").misses();
        assert_eq!(misses != 0, len > most, "{len} bytes");
    }
}

/// More short sends under way than bounce memory, in several rounds: each message arrives
/// unchanged.
#[test]
fn copies_do_not_overtake_each_other() {
    if !crate::mr::monitor::tests::available() {
        return;
    }
    const LEN: usize = 4096;
    const COUNT: usize = 50;
    let (client, server) = unregistered(false, LocalMemory::Cached);
    let target = Buffer::all(&server.domain, LEN);
    let mut source = vec![0_u8; COUNT * LEN];
    for round in 0..5 {
        for (i, bytes) in source.chunks_mut(LEN).enumerate() {
            bytes.fill((round * 50 + i) as u8);
        }
        let count = if round == 0 { COUNT } else { 7 * round };
        for bytes in source.chunks(LEN).take(count) {
            let local = plain(bytes);
            // SAFETY: the buffer outlives the operation.
            unsafe { client.ep.send(LocalIov::single(&local, &Desc::NULL), 2) }.unwrap();
        }
        for i in 0..count {
            server.recv(&target, LEN, 1).unwrap();
            server.completion().unwrap();
            client.completion().unwrap();
            let wanted = (round * 50 + i) as u8;
            assert!(
                target.memory.iter().all(|byte| *byte == wanted),
                "{round} {i}"
            );
        }
    }
}

#[test]
fn nothing_is_kept_where_the_parameters_say_so() {
    let domain = |cache: CacheConfig| {
        let kind = DomainConfig {
            mr: MrConfig {
                form: Form::new(Mode::NATIVE, false),
                local: LocalMemory::Cached,
                cache,
                ..MrConfig::default()
            },
            ..DomainConfig::default()
        };
        Domain::open(&device(), kind).unwrap()
    };
    let none = CacheConfig {
        max_count: 0,
        ..CacheConfig::default()
    };
    let disabled = CacheConfig {
        userfaultfd: false,
        ..CacheConfig::default()
    };
    for cache in [none, disabled] {
        let domain = domain(cache);
        assert!(domain.mr().local_cache(domain.pd()).is_none(), "{cache:?}");
    }
    let refused = domain(none)
        .mr()
        .import_monitor(|| panic!("nothing is kept here"));
    assert_eq!(refused, Err(FiErrno::EOPNOTSUPP));
    // the setting disables only the kernel's monitor, not the application's
    let told = Arc::new(Told::default());
    let domain = domain(disabled);
    let import = || Ok(Box::new(Teller(told)) as Box<dyn Monitor>);
    domain.mr().import_monitor(import).unwrap();
    assert!(domain.mr().local_cache(domain.pd()).is_some());
}

/// State of a monitor whose results the test sets.
#[derive(Debug, Default)]
struct Told {
    valid: AtomicBool,
    /// Number of current subscriptions.
    ranges: AtomicUsize,
}

#[derive(Debug)]
struct Teller(Arc<Told>);

impl Monitor for Teller {
    fn subscribe(&self, addr: u64, len: u64) -> Result<()> {
        assert!(addr.is_multiple_of(4096) && len.is_multiple_of(4096));
        self.0.ranges.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn unsubscribe(&self, _: u64, _: u64) {
        self.0.ranges.fetch_sub(1, Ordering::Relaxed);
    }
    fn is_valid(&self, addr: u64, len: u64) -> bool {
        assert!(addr.is_multiple_of(4096) && len.is_multiple_of(4096));
        self.0.valid.load(Ordering::Relaxed)
    }
}

#[test]
fn a_monitor_of_the_application_is_believed() {
    let kind = |mode| DomainConfig {
        mr: MrConfig {
            form: Form::new(mode, false),
            local: LocalMemory::Cached,
            ..MrConfig::default()
        },
        ..DomainConfig::default()
    };
    let told = Arc::new(Told::default());
    told.valid.store(true, Ordering::Relaxed);
    let device = device();
    let registers = Domain::open(&device, kind(Mode::NATIVE | Mode::LOCAL)).unwrap();
    let none = registers
        .mr()
        .import_monitor(|| panic!("nothing is kept here"));
    assert_eq!(none, Err(FiErrno::EOPNOTSUPP));
    let domain = Domain::open(&device, kind(Mode::NATIVE)).unwrap();
    let import = |domain: &Domain| {
        domain
            .mr()
            .import_monitor(|| Ok(Box::new(Teller(Arc::clone(&told)))))
    };
    import(&domain).unwrap();
    assert_eq!(import(&domain), Err(FiErrno::EBUSY));
    let memory = vec![1_u8; 1 << 16];
    let mut probe = LocalProbe::new(domain.mr());
    let cache = domain.mr().local_cache(domain.pd()).unwrap();
    let mut tries = || {
        let before = cache.misses();
        for _ in 0..100 {
            // SAFETY: the memory outlives the probe.
            unsafe { probe.source(memory.as_ptr().cast(), memory.len()) }.unwrap();
        }
        cache.misses() - before
    };
    // forks in other tests invalidate cached registrations, and unmapping in other tests disables
    // cache hits for a moment
    assert!((1..100).contains(&tries()));
    assert!(tries() < 100);
    memory_changed(memory.as_ptr() as u64 + 5000, 1);
    assert!((1..100).contains(&tries()));
    told.valid.store(false, Ordering::Relaxed);
    assert_eq!(tries(), 100);
    drop(probe);
    drop(cache);
    drop(domain);
    assert_eq!(told.ranges.load(Ordering::Relaxed), 0);
    assert_eq!(
        Arc::strong_count(&told),
        1,
        "the monitor goes with the domain"
    );
}
