//! Local buffers that the application did not register (`FI_MR_LOCAL` off).

use super::*;

/// The connecting end without `FI_MR_LOCAL`; `checked` descriptors are valid or NULL.
fn unregistered(checked: bool, register_each: bool) -> (Side, Side) {
    let kind = DomainConfig {
        form: Form::new(Mode::NATIVE, checked),
        register_each,
        ..DomainConfig::default()
    };
    let (client, server) = connected_in(kind.clone(), false, |_| {});
    assert_ne!(client.domain.config().form, server.domain.config().form);
    (client, server)
}

fn plain(memory: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: memory.len(),
    }
}

/// Never followed: it points to nothing.
const RUBBISH: Desc = Desc(std::ptr::without_provenance_mut(0x5ba_d000));

#[test]
fn what_is_not_registered_is_sent_and_received() {
    for (checked, desc, each) in [
        (false, RUBBISH, true),
        (false, RUBBISH, false),
        (false, Desc::NULL, true),
        (true, Desc::NULL, false),
    ] {
        let (client, server) = unregistered(checked, each);
        let mut remote = Buffer::all(&server.domain, 100_000);
        for len in [0, 1, 64, 65, 4096, 100_000] {
            let sent: Vec<u8> = (0..len).map(|i| i as u8 ^ 0x3c).collect();
            let received = vec![0_u8; len];
            // there
            server.recv(&remote, 100_000, 1).unwrap();
            // SAFETY: the buffers outlive the operations.
            unsafe { client.ep.send(LocalIov::single(&plain(&sent), &desc), 2) }.unwrap();
            server.completion().unwrap();
            client.completion().unwrap();
            assert!(remote.memory[..len] == sent, "{len} bytes");
            // and back
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
            // by RMA
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
    let (client, server) = unregistered(true, false);
    let target = Buffer::all(&server.domain, 4096);
    let mut source = Buffer::all(&client.domain, 4096);
    source.fill(5);
    server.recv(&target, 4096, 1).unwrap();
    client.send(&source, 4096, 2).unwrap();
    server.completion().unwrap();
    assert!(target.memory == source.memory);
    // of another domain
    let (iov, desc) = target.part(0, 4096);
    // SAFETY: as below; it is refused before anything is read.
    let refused = unsafe { client.ep.send(LocalIov::single(&iov, &desc), 3) };
    assert_eq!(refused, Err(FiErrno::EINVAL));
}

#[test]
fn memory_that_is_not_there_is_refused_and_nothing_is_left() {
    let (client, server) = unregistered(false, true);
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
    for register_each in [true, false] {
        exchange_pages(register_each);
    }
}

fn exchange_pages(register_each: bool) {
    let (client, server) = unregistered(false, register_each);
    let target = Buffer::all(&server.domain, 1 << 16);
    let mut place: *mut c_void = std::ptr::null_mut();
    for round in 1..=20_u8 {
        let fixed = if place.is_null() { 0 } else { libc::MAP_FIXED };
        // SAFETY: a new mapping, or one in the place of the last one, which nobody uses any more.
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
