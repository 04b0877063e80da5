//! Application keys and zero-based addresses, through the key directory.

use std::collections::HashMap;

use super::*;
use crate::initiator::qp_link::{POLL_LIMIT, POLLS};
use crate::msg::{AtomicKind, AtomicOp};

/// The access of target regions.
pub(super) const TARGET: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

pub(super) fn kind(mode: Mode) -> DomainConfig {
    DomainConfig {
        mr: MrConfig {
            form: Form::new(mode, false),
            ..MrConfig::default()
        },
        ..DomainConfig::default()
    }
}

/// Two connected ends in domains with this `mr_mode`.
pub(super) fn in_form(mode: Mode) -> (Side, Side) {
    let device = device();
    let domain = || Domain::open(&device, kind(mode)).unwrap();
    connect(domain(), domain())
}

/// Two connected ends in these domains.
pub(super) fn connect(client: Arc<Domain>, server: Arc<Domain>) -> (Side, Side) {
    connect_with(client, server, |_| ())
}

/// As [`connect`]; `early` is called with the accepting end before it is enabled.
pub(super) fn connect_with(
    client: Arc<Domain>,
    server: Arc<Domain>,
    early: impl FnOnce(&Side),
) -> (Side, Side) {
    let device = Arc::clone(client.device());
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let mut client_config = config(CLIENT);
    client_config.src = Some(address(&device));
    let client = Side::new_in(client, client_config, false);
    client.ep.connect(Some(addr), b"hello").unwrap();
    let (request, _) = pump(&client, || {
        let taken = eq.read(false, |event| match event {
            Event::ConnReq { request, .. } => Ok((request.take(), ())),
            other => panic!("{other:?}"),
        });
        taken.ok()
    });
    let ep = Endpoint::from_request(&server, config(SERVER), request.unwrap());
    let server = Side::bound(server, ep.map_err(|(error, _)| error).unwrap(), false);
    early(&server);
    server.ep.accept(b"welcome").unwrap();
    assert!(matches!(next_event(&client.eq), Ok(Told::Connected(..))));
    assert!(matches!(next_event(&server.eq), Ok(Told::Connected(..))));
    (client, server)
}

/// Every combination of the bits that determine keys and addresses.
fn forms() -> Vec<Mode> {
    let choices = [Mode::VIRT_ADDR, Mode::PROV_KEY];
    (0..4)
        .map(|mask| {
            let chosen = choices
                .iter()
                .enumerate()
                .filter(|(i, _)| mask >> i & 1 == 1);
            chosen.fold(Mode::ALLOCATED | Mode::LOCAL, |mode, (_, bit)| mode | *bit)
        })
        .collect()
}

impl Side {
    pub(super) fn write(
        &self,
        from: &Buffer,
        len: usize,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let (iov, desc) = from.part(0, len);
        // SAFETY: tests keep their buffers until completion.
        unsafe {
            let local = LocalIov::single(&iov, &desc);
            self.ep.write(local, addr, key, context)
        }
    }

    pub(super) fn read(
        &self,
        into: &Buffer,
        len: usize,
        addr: u64,
        key: u64,
        context: usize,
    ) -> Result<()> {
        let (iov, desc) = into.part(0, len);
        // SAFETY: as above.
        unsafe {
            let local = LocalIov::single(&iov, &desc);
            self.ep.read(local, addr, key, context)
        }
    }

    /// The error that an operation ends with.
    pub(super) fn refused(&self, context: usize) -> FiErrno {
        let error = self.completion().unwrap_err();
        assert_eq!(error.completion.context, context);
        error.err
    }
}

/// The remote address of the first byte of a region in its addressing mode.
fn start(side: &Side, buffer: &Buffer) -> u64 {
    let mode = side.domain.mr().config().form.mode;
    if mode.contains(Mode::VIRT_ADDR) {
        buffer.addr()
    } else {
        0
    }
}

#[test]
fn what_is_written_and_read_is_what_is_there() {
    for mode in forms() {
        let (client, server) = in_form(mode);
        let mut source = Buffer::all(&client.domain, 70_000);
        let back = Buffer::with_key(&client.domain, 70_000, Access::READ, 0);
        let target = Buffer::with_key(&server.domain, 70_000, TARGET, 77);
        let (base, key) = (start(&server, &target), target.region.key());
        assert!(mode.contains(Mode::PROV_KEY) || key == 77);
        for (i, len) in [0, 1, 8, 64, 65, 4096, 60_000].into_iter().enumerate() {
            source.fill(i as u8 + 1);
            let at = base + 10_000;
            client.write(&source, len, at, key, 1).unwrap();
            assert_eq!(client.completion().unwrap().context, 1);
            assert!(
                target.memory[10_000..][..len] == source.memory[..len],
                "{mode:?} {len}"
            );
            client.read(&back, len, at, key, 2).unwrap();
            assert_eq!(client.completion().unwrap().context, 2);
            assert!(
                back.memory[..len] == source.memory[..len],
                "{mode:?} {len} back"
            );
        }
        // SAFETY: inject is done with the buffer when it returns.
        unsafe {
            client
                .ep
                .inject_write(b"injected".as_ptr().cast(), 8, base, key)
        }
        .unwrap();
        let land = Buffer::all(&server.domain, 8);
        server.recv(&land, 8, 3).unwrap();
        let (iov, desc) = source.part(0, 16);
        // SAFETY: the buffer outlives the operation.
        unsafe {
            let local = LocalIov::single(&iov, &desc);
            client.ep.write_data(local, 0xfeed, base + 8, key, 4)
        }
        .unwrap();
        assert_eq!(server.completion().unwrap().data, 0xfeed);
        assert_eq!(&target.memory[..8], b"injected");
        assert_eq!(target.memory[8..24], source.memory[..16]);
    }
}

#[test]
fn what_is_refused_leaves_the_connection_whole_and_keeps_its_place() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 4096);
    let target = Buffer::with_key(&server.domain, 1000, TARGET, 1);
    let _unwritable = Buffer::with_key(&server.domain, 1000, Access::REMOTE_READ, 2);
    let _unreadable = Buffer::with_key(&server.domain, 1000, Access::REMOTE_WRITE, 3);
    for polls in [POLL_LIMIT, 0] {
        POLLS.set(polls);
        client.write(&source, 1000, 0, 1, 0).unwrap();
        client.write(&source, 1000, 1, 1, 1).unwrap(); // one byte too many
        client.write(&source, 8, 0, 99, 2).unwrap(); // no such key
        client.write(&source, 8, 0, 2, 3).unwrap();
        client.read(&source, 8, 0, 3, 4).unwrap();
        client.read(&source, 8, u64::MAX - 3, 1, 5).unwrap(); // wraps around
        client.read(&source, 1000, 0, 1, 6).unwrap();
        assert_eq!(client.completion().unwrap().context, 0);
        assert_eq!(client.refused(1), FiErrno::EACCES);
        assert_eq!(client.refused(2), FiErrno::EKEYREJECTED);
        assert_eq!(client.refused(3), FiErrno::EACCES);
        assert_eq!(client.refused(4), FiErrno::EACCES);
        assert_eq!(client.refused(5), FiErrno::EACCES);
        assert_eq!(client.completion().unwrap().context, 6);
    }
    POLLS.set(POLL_LIMIT);
    client.write(&source, 1000, 0, 1, 7).unwrap();
    client.completion().unwrap();
    drop(target);
}

#[test]
fn keys_that_cannot_be_chosen_are_refused() {
    let domain = Domain::open(&device(), kind(Mode::ALLOCATED)).unwrap();
    let memory = [0_u8; 64];
    let register = |key: u64, access: Access| {
        let buffers = [crate::mr::Buffer {
            addr: memory.as_ptr().cast(),
            len: 64,
        }];
        let config = RegionConfig {
            buffers: &buffers,
            access,
            requested_key: key,
            ..RegionConfig::default()
        };
        // SAFETY: the regions are dropped before the memory.
        unsafe { Region::register(domain.mr(), &config) }
    };
    let read = Access::REMOTE_READ;
    let first = register(5, read).unwrap();
    assert_eq!(register(5, read).err(), Some(FiErrno::ENOKEY));
    for key in [0xfffd << 48, 0xfffe << 48 | 1, u64::MAX] {
        assert_eq!(register(key, read).err(), Some(FiErrno::EKEYREJECTED));
    }
    assert_eq!(
        register(0xfffd << 48, Access::RECV).unwrap().key(),
        0xfffd << 48
    );
    register(0xfffd_0000_0000_0000 - 1, read).unwrap();
    // a region without remote access does not use its key
    let local = register(5, Access::RECV).unwrap();
    drop(first);
    let again = register(5, read).unwrap();
    assert_eq!((local.key(), again.key()), (5, 5));
}

#[test]
fn a_key_that_is_used_again_means_the_new_region() {
    for polls in [POLL_LIMIT, 0] {
        POLLS.set(polls);
        let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
        let mut source = Buffer::all(&client.domain, 512);
        let directory = server.domain.mr().directory(server.domain.pd()).unwrap();
        for round in 0..50 {
            let target = Buffer::with_key(&server.domain, 512, TARGET, 9);
            source.fill(round);
            client.write(&source, 512, 0, 9, 1).unwrap();
            client.completion().unwrap();
            assert!(target.memory == source.memory, "round {round}");
            drop(target);
            client.write(&source, 512, 0, 9, 2).unwrap();
            assert_eq!(client.refused(2), FiErrno::EKEYREJECTED);
            if round > 1 {
                // the initiator acknowledges the revocations of which it was notified
                assert!(directory.retired() <= 1, "{}", directory.retired());
            }
        }
    }
    POLLS.set(POLL_LIMIT);
}

#[test]
fn many_keys_are_told_apart() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 8);
    let target = Buffer::with_key(&server.domain, 8 * 3000, TARGET, u64::MAX >> 2);
    let mut regions = HashMap::new();
    for i in 0..3000_u64 {
        let buffers = [crate::mr::Buffer {
            addr: target.memory[8 * i as usize..].as_ptr().cast(),
            len: 8,
        }];
        let config = RegionConfig {
            buffers: &buffers,
            access: TARGET,
            requested_key: i << 20,
            ..RegionConfig::default()
        };
        // SAFETY: the regions are dropped before the memory.
        let region = unsafe { Region::register(server.domain.mr(), &config) }.unwrap();
        regions.insert(i, region);
        if i % 3 == 2 {
            // while the table grows, the peer reads it
            regions.remove(&(i / 2));
            client.write(&source, 8, 0, i << 20, 1).unwrap();
            client.completion().unwrap();
        }
    }
    for i in 0..3000_u64 {
        // SAFETY: inject is done with the buffer when it returns.
        let written = unsafe {
            let value = (i + 1).to_ne_bytes();
            client.ep.inject_write(value.as_ptr().cast(), 8, 0, i << 20)
        };
        written.unwrap();
        if !regions.contains_key(&i) {
            assert_eq!(client.refused(ENDPOINT), FiErrno::EKEYREJECTED);
        }
    }
    client.read(&source, 0, 0, 0, 5).unwrap();
    client.completion().unwrap();
    for i in 0..3000_u64 {
        let word = target.memory[8 * i as usize..][..8].try_into().unwrap();
        let expected = if regions.contains_key(&i) { i + 1 } else { 0 };
        assert_eq!(u64::from_ne_bytes(word), expected, "key {i}");
    }
    drop(regions);
}

/// Operations behind an operation that waits for its key are deferred too.
#[test]
fn order_is_kept_behind_a_lookup() {
    POLLS.set(0);
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let target = Buffer::with_key(&server.domain, 4096, TARGET, 4);
    let land = Buffer::all(&server.domain, 4096);
    for slot in 0..40 {
        server.recv(&land, 8, slot).unwrap();
    }
    let source = Buffer::all(&client.domain, 4096);
    for round in 0..20_u64 {
        let key = if round == 0 { 4 } else { 1000 + round };
        client.write(&source, 4096, 0, key, 1).unwrap();
        let mut value = round.to_ne_bytes();
        // SAFETY: inject is done with the buffer when it returns.
        unsafe {
            client
                .ep
                .inject_write(value.as_ptr().cast(), 8, 0, 4)
                .unwrap();
            client.ep.inject(value.as_ptr().cast(), 8).unwrap();
        }
        value.fill(0xff);
        client.send(&source, 8, 2).unwrap();
        assert_eq!(server.completion().unwrap().context, 2 * round as usize);
        assert_eq!(server.completion().unwrap().context, 2 * round as usize + 1);
        assert_eq!(
            target.memory[..8],
            round.to_ne_bytes(),
            "the message overtook the write"
        );
        if round == 0 {
            assert_eq!(client.completion().unwrap().context, 1);
        } else {
            assert_eq!(client.refused(1), FiErrno::EKEYREJECTED);
        }
        assert_eq!(client.completion().unwrap().context, 2);
    }
    POLLS.set(POLL_LIMIT);
}

/// The initiator does not read its completion queue, and the operation completes nevertheless.
#[test]
fn what_waits_needs_nobody_to_go_on() {
    POLLS.set(0);
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let target = Buffer::with_key(&server.domain, 8, TARGET, 4);
    // SAFETY: inject is done with the buffer when it returns.
    unsafe { client.ep.inject_write(b"by itsel".as_ptr().cast(), 8, 0, 4) }.unwrap();
    let start = Instant::now();
    let word = target.memory.as_ptr().cast::<u64>();
    // SAFETY: the buffer is live; the device writes to it.
    while unsafe { word.read_volatile() } != u64::from_ne_bytes(*b"by itsel") {
        assert!(start.elapsed() < LIMIT, "it still waits");
        std::thread::yield_now();
    }
    POLLS.set(POLL_LIMIT);
}

/// The peer closes while operations wait for a key, and the initiator only reads its completion
/// queue.
#[test]
fn what_waits_when_the_peer_goes_is_completed() {
    POLLS.set(0);
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 64);
    let _target = Buffer::with_key(&server.domain, 64, TARGET, 4);
    server.ep.close();
    for context in 0..3 {
        client.write(&source, 64, 0, 4, context).unwrap();
    }
    for context in 0..3 {
        let error = client.completion().expect_err("nobody is there");
        assert_eq!(error.completion.context, context);
    }
    POLLS.set(POLL_LIMIT);
}

/// Closing the endpoint completes its deferred operations.
#[test]
fn what_waits_when_the_connection_ends_is_cancelled() {
    POLLS.set(0);
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 64);
    let _target = Buffer::with_key(&server.domain, 64, TARGET, 4);
    for context in 0..10 {
        client.write(&source, 64, 0, 4, context).unwrap();
    }
    client.ep.close();
    for context in 0..10 {
        match client.completion() {
            Ok(done) => assert_eq!(done.context, context),
            Err(error) => {
                assert_eq!(error.completion.context, context);
                assert_eq!(error.err, FiErrno::ECANCELED);
            }
        }
    }
    POLLS.set(POLL_LIMIT);
}

/// The alignment of an atomic's target depends on the base address of the region.
#[test]
fn atomics_go_through_the_directory() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let result = Buffer::all(&client.domain, 8);
    let target = Buffer::with_key(&server.domain, 64, TARGET, 1);
    let write_only = Buffer::with_key(&server.domain, 64, Access::REMOTE_WRITE, 2);
    let _read_only = Buffer::with_key(&server.domain, 64, Access::REMOTE_READ, 3);
    let aligned = target.addr().next_multiple_of(8) - target.addr();
    let (iov, desc) = result.part(0, 8);
    let fetch = |addr: u64, key: u64, context: usize| {
        let op = (AtomicOp::Add(5), AtomicKind::Fetch);
        let local = LocalIov::single(&iov, &desc);
        // SAFETY: the buffers outlive the operations.
        unsafe { client.ep.atomic(op, local, (addr, key), context, None) }.unwrap();
    };
    fetch(aligned, 1, 0);
    client.completion().unwrap();
    fetch(aligned, 1, 1);
    client.completion().unwrap();
    assert_eq!(result.memory, 5_u64.to_ne_bytes());
    assert_eq!(target.memory[aligned as usize..][..8], 10_u64.to_ne_bytes());
    // FI_REMOTE_WRITE permits atomics (fi_mr(3)); those that fetch need FI_REMOTE_READ too
    let writable = write_only.addr().next_multiple_of(8) - write_only.addr();
    let base = (AtomicOp::Add(7), AtomicKind::Base);
    // SAFETY: no buffers.
    unsafe {
        client
            .ep
            .atomic(base, LocalIov::NONE, (writable, 2), 2, None)
    }
    .unwrap();
    assert_eq!(client.completion().unwrap().context, 2);
    assert_eq!(
        write_only.memory[writable as usize..][..8],
        7_u64.to_ne_bytes()
    );
    for (addr, key, error) in [
        (writable, 2, FiErrno::EACCES),
        (64, 1, FiErrno::EACCES), // behind the end
        (0, 3, FiErrno::EACCES),
        (0, 9, FiErrno::EKEYREJECTED),
    ] {
        fetch(addr, key, 7);
        assert_eq!(client.refused(7), error, "{addr} {key}");
    }
    // a base address that is not aligned
    let buffers = [crate::mr::Buffer {
        addr: target.memory[aligned as usize + 1..].as_ptr().cast(),
        len: 32,
    }];
    let config = RegionConfig {
        buffers: &buffers,
        access: TARGET,
        requested_key: 8,
        ..RegionConfig::default()
    };
    // SAFETY: the region is dropped before the memory.
    let crooked = unsafe { Region::register(server.domain.mr(), &config) }.unwrap();
    fetch(8, 8, 9);
    assert_eq!(client.refused(9), FiErrno::EINVAL);
    drop(crooked);
    fetch(aligned, 1, 10);
    client.completion().unwrap();
}

/// A region of several buffers with different lengths, and its memory.
pub(super) fn scattered(
    domain: &Arc<Domain>,
    key: u64,
    lens: &[usize],
) -> (Arc<Region>, Vec<Vec<u8>>) {
    let memory: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
    let buffers: Vec<_> = memory
        .iter()
        .map(|buffer| crate::mr::Buffer {
            addr: buffer.as_ptr().cast(),
            len: buffer.len(),
        })
        .collect();
    let config = RegionConfig {
        buffers: &buffers,
        access: Access::all(),
        requested_key: key,
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
    (region, memory)
}

#[test]
fn several_buffers_are_one_region() {
    for mode in forms() {
        let (client, server) = in_form(mode);
        let mut source = Buffer::all(&client.domain, 20_000);
        let back = Buffer::with_key(&client.domain, 20_000, Access::all(), 1);
        let lens = [5000, 1, 300, 64, 9000, 7, 8, 620];
        let total: usize = lens.iter().sum();
        let (region, memory) = scattered(&server.domain, 6, &lens);
        let base = if mode.contains(Mode::VIRT_ADDR) {
            memory[0].as_ptr() as u64
        } else {
            0
        };
        let key = region.key();
        for (i, (at, len)) in [
            (0, total),
            (4999, 3),
            (5000, 1),
            (4990, 400),
            (0, 0),
            (total - 1, 1),
        ]
        .into_iter()
        .enumerate()
        {
            source.fill(i as u8 * 7 + 1);
            client
                .write(&source, len, base + at as u64, key, 1)
                .unwrap();
            assert_eq!(client.completion().unwrap().context, 1);
            let flat: Vec<u8> = memory.iter().flatten().copied().collect();
            assert!(
                flat[at..at + len] == source.memory[..len],
                "{mode:?} {at} {len}"
            );
            client.read(&back, len, base + at as u64, key, 2).unwrap();
            assert_eq!(client.completion().unwrap().context, 2);
            assert!(
                back.memory[..len] == source.memory[..len],
                "{mode:?} {at} {len} back"
            );
        }
        client
            .write(&source, 2, base + total as u64 - 1, key, 3)
            .unwrap();
        assert_eq!(client.refused(3), FiErrno::EACCES);
        // remote CQ data arrives once, with the last part; inject copies the data
        let land = Buffer::all(&server.domain, 8);
        server.recv(&land, 8, 4).unwrap();
        let (iov, desc) = source.part(0, 6000);
        // SAFETY: the buffer outlives the operation; inject is done with its own when it returns.
        unsafe {
            let local = LocalIov::single(&iov, &desc);
            client.ep.write_data(local, 0xda7a, base, key, 5).unwrap();
            client
                .ep
                .inject_write([9_u8; 60].as_ptr().cast(), 60, base + 4980, key)
                .unwrap();
        }
        assert_eq!(server.completion().unwrap().data, 0xda7a);
        assert_eq!(client.completion().unwrap().context, 5);
        client.read(&back, 60, base + 4980, key, 6).unwrap();
        client.completion().unwrap();
        assert_eq!(back.memory[..60], [9; 60]);
        super::transfer::no_completion(&server);
        // a local buffer in any of them is found by its address
        let iov = libc::iovec {
            iov_base: memory[4].as_ptr().cast_mut().cast(),
            iov_len: 9000,
        };
        let desc = Desc(region.desc());
        client.recv(&back, 9000, 7).unwrap();
        // SAFETY: the buffer outlives the operation.
        unsafe { server.ep.send(LocalIov::single(&iov, &desc), 8) }.unwrap();
        assert_eq!(client.completion().unwrap().len, 9000);
        assert!(back.memory[..9000] == memory[4]);
        server.completion().unwrap();
        let beyond = libc::iovec {
            iov_len: 9001,
            ..iov
        };
        // SAFETY: the call is refused before it reads the buffer.
        let refused = unsafe { server.ep.send(LocalIov::single(&beyond, &desc), 9) };
        assert_eq!(refused, Err(FiErrno::EINVAL));
        // parts use slots beyond the application's own
        for round in 0..200 {
            client.write(&source, total, base, key, round).unwrap();
            assert_eq!(client.completion().unwrap().context, round);
        }
        drop(region);
    }
}

/// The whole operation has one error when one of its parts breaks the connection.
#[test]
fn a_broken_operation_of_several_parts_is_told_once() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 3000);
    let (region, memory) = scattered(&server.domain, 6, &[1000, 1000, 1000]);
    client.write(&source, 3000, 0, 6, 1).unwrap();
    client.completion().unwrap();
    server.ep.shutdown().unwrap();
    let mut posted = 0;
    while posted < 5 && client.write(&source, 3000, 0, 6, posted).is_ok() {
        posted += 1;
    }
    client.ep.close();
    for context in 0..posted {
        let error = client.completion().unwrap_err();
        assert_eq!(error.completion.context, context);
    }
    super::transfer::no_completion(&client);
    drop(region);
    drop(memory);
}

#[test]
fn raw_keys_are_mapped_and_used() {
    for mode in forms().into_iter().map(|mode| mode | Mode::RAW) {
        let (client, server) = in_form(mode);
        let source = Buffer::all(&client.domain, 4096);
        let target = Buffer::with_key(&server.domain, 4096, TARGET, 3);
        let (base, raw) = target.region.raw_key().unwrap();
        assert_eq!(base, start(&server, &target));
        let key = client.domain.mr().map_raw(&raw).unwrap();
        let again = client.domain.mr().map_raw(&raw).unwrap();
        assert_ne!(key, again);
        assert!(client.domain.mr().has_mapped_keys());
        for key in [key, again, key] {
            client.write(&source, 4096, base, key, 1).unwrap();
            client.completion().unwrap();
            client.write(&source, 4096, base + 1, key, 2).unwrap();
            assert_eq!(client.refused(2), FiErrno::EACCES);
        }
        assert!(target.memory == source.memory);
        // a key that is not mapped, of another domain, or forged
        client
            .write(&source, 8, base, 0xfffe_ffff_ffff_ffff, 3)
            .unwrap();
        assert_eq!(client.refused(3), FiErrno::EKEYREJECTED);
        for len in 0..raw.len() {
            assert_eq!(
                client.domain.mr().map_raw(&raw[..len]),
                Err(FiErrno::EINVAL)
            );
        }
        let mut forged = crate::wire::raw_key::RawKey::decode(&raw).unwrap();
        if forged.entry.key >> 32 != 0 || !mode.contains(Mode::PROV_KEY) {
            forged.entry.generation += 1;
            let stale = client.domain.mr().map_raw(&forged.encode()).unwrap();
            client.write(&source, 8, base, stale, 4).unwrap();
            assert_eq!(client.refused(4), FiErrno::EKEYREJECTED);
            forged.entry.generation -= 1;
            forged.domain ^= 1;
            let foreign = client.domain.mr().map_raw(&forged.encode()).unwrap();
            client.write(&source, 8, base, foreign, 5).unwrap();
            assert_eq!(client.refused(5), FiErrno::EKEYREJECTED);
            // a new region with the same key is not the region that was mapped
            drop(target);
            let _anew = Buffer::with_key(&server.domain, 4096, TARGET, 3);
            client.write(&source, 8, base, key, 6).unwrap();
            assert_eq!(client.refused(6), FiErrno::EKEYREJECTED);
            for key in [stale, foreign] {
                client.domain.mr().unmap_key(key).unwrap();
            }
        }
        for key in [key, again] {
            client.domain.mr().unmap_key(key).unwrap();
            assert_eq!(client.domain.mr().unmap_key(key), Err(FiErrno::EINVAL));
        }
        assert!(!client.domain.mr().has_mapped_keys());
    }
}

/// If keys have 8 bytes (`mr_key_size`), the raw key is the key.
#[test]
fn raw_keys_of_other_forms_are_the_keys() {
    for mode in forms() {
        let (client, server) = in_form(mode);
        let source = Buffer::all(&client.domain, 4096);
        let target = Buffer::with_key(&server.domain, 4096, TARGET, 3);
        let (base, raw) = target.region.raw_key().unwrap();
        assert_eq!(raw, target.region.key().to_le_bytes());
        for len in 0..raw.len() {
            assert_eq!(
                client.domain.mr().map_raw(&raw[..len]),
                Err(FiErrno::EINVAL)
            );
        }
        let key = client.domain.mr().map_raw(&raw).unwrap();
        // a raw key at the start of a longer buffer
        let longer = [&raw[..], &[0xee; 500]].concat();
        let again = client.domain.mr().map_raw(&longer).unwrap();
        for key in [key, again, target.region.key()] {
            client.write(&source, 4096, base, key, 1).unwrap();
            client.completion().unwrap();
        }
        assert!(target.memory == source.memory);
        client.domain.mr().unmap_key(key).unwrap();
        client.write(&source, 8, base, key, 2).unwrap();
        assert_eq!(client.refused(2), FiErrno::EKEYREJECTED);
        client.write(&source, 8, base, again, 3).unwrap();
        client.completion().unwrap();
        // a raw key of no region
        let nowhere = client
            .domain
            .mr()
            .map_raw(&(5_u64 << 40).to_le_bytes())
            .unwrap();
        client.write(&source, 8, base, nowhere, 4).unwrap();
        assert_eq!(client.refused(4), FiErrno::EKEYREJECTED);
        for key in [again, nowhere] {
            client.domain.mr().unmap_key(key).unwrap();
        }
        assert!(!client.domain.mr().has_mapped_keys());
    }
}

/// An operation that waits for its key is refused when the key is unmapped meanwhile.
#[test]
fn an_operation_that_waits_by_a_mapped_key() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 64);
    let target = Buffer::with_key(&server.domain, 64, TARGET, 3);
    let (base, raw) = target.region.raw_key().unwrap();
    for unmapped in [false, true] {
        let key = client.domain.mr().map_raw(&raw).unwrap();
        POLLS.set(0);
        client.write(&source, 64, base, 77, 1).unwrap();
        client.write(&source, 64, base, key, 2).unwrap();
        if unmapped {
            client.domain.mr().unmap_key(key).unwrap();
        }
        assert_eq!(client.refused(1), FiErrno::EKEYREJECTED);
        POLLS.set(POLL_LIMIT);
        if unmapped {
            assert_eq!(client.refused(2), FiErrno::EKEYREJECTED);
        } else {
            assert_eq!(client.completion().unwrap().context, 2);
            client.domain.mr().unmap_key(key).unwrap();
        }
    }
}
