//! Messages and RMA between two connected ends.

use super::*;
use crate::flags::Direction;
use crate::initiator::local::MAX_IOV;

pub(super) fn readable(fd: i32) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry is passed.
    unsafe { libc::poll(&raw mut entry, 1, 0) > 0 }
}

pub(super) fn no_completion(side: &Side) {
    let mut nothing = |c: &Completion| panic!("{c:?}");
    assert_eq!(side.cq.read(1, &mut nothing), Err(FiErrno::EAGAIN));
}

#[test]
fn messages_of_every_size_arrive_in_order() {
    let (client, server) = connected(false, |_| {});
    let mut source = Buffer::all(&client.domain, 1 << 20);
    let target = Buffer::all(&server.domain, 1 << 20);
    for (i, len) in [0, 1, 8, 63, 64, 65, 500, 4096, 65_537, 1 << 20]
        .into_iter()
        .enumerate()
    {
        source.fill(i as u8);
        server.recv(&target, 1 << 20, 100 + i).unwrap();
        client.send(&source, len, i).unwrap();
        let got = server.completion().unwrap();
        assert_eq!(got.context, 100 + i);
        assert_eq!(got.len, len);
        assert_eq!(got.flags, Flags::RECV | Flags::MSG);
        assert!(target.memory[..len] == source.memory[..len], "{len} bytes");
        let sent = client.completion().unwrap();
        assert_eq!((sent.context, sent.flags), (i, Flags::SEND | Flags::MSG));
    }
    no_completion(&client);
    no_completion(&server);
}

#[test]
fn a_receive_posted_before_connecting_is_used() {
    let mut early = None;
    let (client, server) = connected(false, |client| {
        let target = Buffer::all(&client.domain, 16);
        client.recv(&target, 16, 1).unwrap();
        early = Some(target);
    });
    let mut source = Buffer::all(&server.domain, 16);
    source.fill(9);
    server.send(&source, 16, 2).unwrap();
    assert_eq!(client.completion().unwrap().context, 1);
    assert_eq!(early.unwrap().memory, source.memory);
}

/// Without a source address there is no queue pair before the peer's address is resolved.
#[test]
fn a_receive_posted_before_there_is_a_queue_pair_is_used() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.enable().unwrap();
    let target = Buffer::all(&client.domain, 32);
    for context in 0..2 {
        let (iov, desc) = target.part(context * 16, 16);
        // SAFETY: the buffer outlives the endpoint's use of it.
        unsafe { client.ep.recv(LocalIov::single(&iov, &desc), context) }.unwrap();
    }
    client.ep.connect(Some(addr), b"hello").unwrap();
    let server = accept(&device, &client, &eq);
    assert!(matches!(
        next_event(&client.eq),
        Ok(Told::Connected(CLIENT, _))
    ));
    assert!(matches!(
        next_event(&server.eq),
        Ok(Told::Connected(SERVER, _))
    ));
    let mut source = Buffer::all(&server.domain, 32);
    source.fill(3);
    for part in 0..2 {
        let (iov, desc) = source.part(part * 16, 16);
        // SAFETY: as above.
        unsafe { server.ep.send(LocalIov::single(&iov, &desc), part) }.unwrap();
        assert_eq!(client.completion().unwrap().context, part);
    }
    assert_eq!(target.memory, source.memory);
}

/// Only receives that are not posted to the device can be cancelled.
#[test]
fn a_receive_that_waits_for_a_queue_pair_is_cancelled() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let client = Side::new(&device, config(CLIENT), false);
    assert_eq!(client.ep.cancel(1), Err(FiErrno::ENOENT));
    client.ep.enable().unwrap();
    let target = Buffer::all(&client.domain, 8);
    for context in [1, 2, 2, 3] {
        client.recv(&target, 8, context).unwrap();
    }
    assert_eq!(client.ep.cancel(4), Err(FiErrno::ENOENT));
    no_completion(&client);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.completion());
        std::thread::sleep(Duration::from_millis(20));
        client.ep.cancel(2).unwrap();
        let error = waiting.join().unwrap().unwrap_err();
        assert_eq!(
            (error.completion.context, error.err),
            (2, FiErrno::ECANCELED)
        );
        assert_eq!(error.completion.flags, Flags::RECV | Flags::MSG);
    });
    client.ep.cancel(1).unwrap();
    assert_eq!(client.completion().unwrap_err().completion.context, 1);
    assert_eq!(client.ep.cancel(1), Err(FiErrno::ENOENT), "twice");

    client.ep.connect(Some(addr), b"hello").unwrap();
    let server = accept(&device, &client, &eq);
    for side in [&client, &server] {
        assert!(matches!(next_event(&side.eq), Ok(Told::Connected(..))));
    }
    for context in [2, 3] {
        assert_eq!(client.ep.cancel(context), Err(FiErrno::ENOENT), "posted");
    }
    let source = Buffer::all(&server.domain, 8);
    // the other receives get the messages in order, and all slots are free again
    for context in [2, 3].into_iter().chain(10..200) {
        if context >= 10 {
            client.recv(&target, 8, context).unwrap();
        }
        server.send(&source, 8, 0).unwrap();
        server.completion().unwrap();
        assert_eq!(client.completion().unwrap().context, context);
    }
    client.ep.close();
    no_completion(&client);
    assert_eq!(client.ep.cancel(1), Err(FiErrno::EOPBADSTATE));
}

#[test]
fn several_buffers_make_one_message() {
    let (client, server) = connected(false, |_| {});
    let mut source = Buffer::all(&client.domain, 4096);
    source.fill(1);
    let target = Buffer::all(&server.domain, 4096);
    let pieces = [
        source.part(0, 1000),
        source.part(1000, 0),
        source.part(1000, 24),
        source.part(1024, 976),
    ];
    let holes = [
        target.part(0, 1),
        target.part(1, 1500),
        target.part(1501, 2595),
    ];
    let (iov, desc): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
    let (riov, rdesc): (Vec<_>, Vec<_>) = holes.into_iter().unzip();
    // SAFETY: the arrays and the buffers outlive the operations.
    unsafe {
        let into = LocalIov::from_raw(riov.as_ptr(), rdesc.as_ptr().cast(), 3).unwrap();
        server.ep.recv(into, 1).unwrap();
        let from = LocalIov::from_raw(iov.as_ptr(), desc.as_ptr().cast(), 4).unwrap();
        client.ep.send(from, 2).unwrap();
    }
    // a count over the limit is refused before the list, which is shorter, is read
    for count in [MAX_IOV + 1, 1 << 40, usize::MAX] {
        // SAFETY: the list is shorter, and is not read.
        let none = unsafe { LocalIov::from_raw(iov.as_ptr(), desc.as_ptr().cast(), count) };
        assert_eq!(none.unwrap_err(), FiErrno::EINVAL);
    }
    for count in [5, MAX_IOV] {
        // SAFETY: see above.
        unsafe {
            let too_many = LocalIov::from_raw(iov.as_ptr(), desc.as_ptr().cast(), count).unwrap();
            let refused = Err(FiErrno::EINVAL);
            assert_eq!(client.ep.send(too_many, 2), refused);
            assert_eq!(client.ep.write(too_many, 0, 0, 2), refused);
            assert_eq!(client.ep.read(too_many, 0, 0, 2), refused);
            assert_eq!(server.ep.recv(too_many, 2), refused);
        }
    }
    assert_eq!(server.completion().unwrap().len, 2000);
    assert_eq!(target.memory[..2000], source.memory[..2000]);
}

#[test]
fn remote_data_goes_along() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 1024);
    let target = Buffer::all(&server.domain, 1024);
    for len in [8, 1024] {
        server.recv(&target, 1024, 1).unwrap();
        let (iov, desc) = source.part(0, len);
        // SAFETY: the buffer outlives the operation.
        unsafe {
            client
                .ep
                .send_data(LocalIov::single(&iov, &desc), 0x1234_5678, 2)
        }
        .unwrap();
        let got = server.completion().unwrap();
        assert_eq!(got.data, 0x1234_5678);
        assert_eq!(got.flags, Flags::RECV | Flags::MSG | Flags::REMOTE_CQ_DATA);
        assert_eq!(client.completion().unwrap().data, 0);
    }
    server.recv(&target, 1024, 1).unwrap();
    // SAFETY: inject is done with the buffer when it returns.
    unsafe { client.ep.inject_data(source.memory.as_ptr().cast(), 8, 7) }.unwrap();
    assert_eq!(server.completion().unwrap().data, 7);
    no_completion(&client);
}

#[test]
fn injected_data_may_be_overwritten_at_once() {
    let (client, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 64 * 64);
    for slot in 0..32 {
        let (iov, desc) = target.part(slot * 64, 64);
        // SAFETY: the buffer outlives the operation.
        unsafe { server.ep.recv(LocalIov::single(&iov, &desc), slot) }.unwrap();
    }
    let mut bytes = [0_u8; 64];
    for value in 0..32 {
        bytes.fill(value);
        // SAFETY: inject is done with the buffer when it returns.
        unsafe { client.ep.inject(bytes.as_ptr().cast(), 64) }.unwrap();
        bytes.fill(0xff);
    }
    for value in 0..32_usize {
        assert_eq!(server.completion().unwrap().context, value);
        assert_eq!(target.memory[value * 64..][..64], [value as u8; 64]);
    }
    no_completion(&client);
    // SAFETY: as above.
    let too_long = unsafe { client.ep.inject([0_u8; 65].as_ptr().cast(), 65) };
    assert_eq!(too_long, Err(FiErrno::EMSGSIZE));
}

#[test]
fn a_sender_that_only_injects_never_has_to_read_its_queue() {
    let (client, server) = connected(true, |_| {});
    let target = Buffer::all(&server.domain, 64);
    let bytes = [5_u8; 8];
    let mut sent = 0;
    let mut received = 0;
    let start = Instant::now();
    for _ in 0..32 {
        server.recv(&target, 64, 0).unwrap();
    }
    while received < 1000 {
        if sent < 1000 {
            // SAFETY: inject is done with the buffer when it returns.
            match unsafe { client.ep.inject(bytes.as_ptr().cast(), 8) } {
                Ok(()) => sent += 1,
                Err(FiErrno::EAGAIN) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
        let mut count = 0;
        match server.cq.read(16, &mut |_: &Completion| count += 1) {
            Ok(n) => assert_eq!(n, count),
            Err(FiErrno::EAGAIN) => {}
            Err(error) => panic!("{error:?}"),
        }
        for _ in 0..count {
            server.recv(&target, 64, 0).unwrap();
        }
        received += count;
        assert!(start.elapsed() < LIMIT, "{sent} sent, {received} received");
    }
    no_completion(&client);
}

#[test]
fn a_full_queue_says_try_again_and_loses_nothing() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 4096);
    let target = Buffer::all(&server.domain, 4096);
    let mut posted = 0;
    // no receive is posted yet, so no send completes
    while client.send(&source, 4096, posted) == Ok(()) {
        posted += 1;
        assert!(posted <= 64, "more than the queue holds");
    }
    assert_eq!(posted, 64);
    assert_eq!(client.send(&source, 8, 0), Err(FiErrno::EAGAIN));
    let mut receives = 0;
    while server.recv(&target, 4096, receives) == Ok(()) {
        receives += 1;
        assert!(receives <= 64, "more than the queue holds");
    }
    assert_eq!(server.recv(&target, 8, 0), Err(FiErrno::EAGAIN));
    for context in 0..64 {
        assert_eq!(server.completion().unwrap().context, context);
        assert_eq!(client.completion().unwrap().context, context);
    }
    client.send(&source, 8, 0).unwrap();
}

#[test]
fn selective_completion_shows_what_was_asked_for() {
    let (client, server) = connected(true, |_| {});
    let source = Buffer::all(&client.domain, 1024);
    let target = Buffer::all(&server.domain, 1024);
    for i in 0..200 {
        server.recv(&target, 1024, i).unwrap();
        let (iov, desc) = source.part(0, 1024);
        let flags = if i % 10 == 9 {
            Flags::COMPLETION
        } else {
            Flags::empty()
        };
        // SAFETY: the buffer outlives the operation.
        unsafe {
            client
                .ep
                .send_msg(LocalIov::single(&iov, &desc), 0, i, flags)
        }
        .unwrap();
        assert_eq!(server.completion().unwrap().context, i);
        if i % 10 == 9 {
            assert_eq!(client.completion().unwrap().context, i);
        }
        no_completion(&client);
    }
    client
        .ep
        .op_flags()
        .set(Direction::Transmit, Flags::COMPLETION);
    server.recv(&target, 1024, 0).unwrap();
    client.send(&source, 8, 4711).unwrap();
    assert_eq!(client.completion().unwrap().context, 4711);
}

#[test]
fn flags_that_mean_nothing_are_refused() {
    let (client, _server) = connected(false, |_| {});
    let buffer = Buffer::all(&client.domain, 8);
    let (iov, desc) = buffer.part(0, 8);
    let local = LocalIov::single(&iov, &desc);
    let wrong = Flags::from_bits_retain(1 << 60);
    // SAFETY: the buffer outlives the endpoint.
    unsafe {
        assert_eq!(
            client.ep.send_msg(local, 0, 0, wrong),
            Err(FiErrno::EBADFLAGS)
        );
        assert_eq!(client.ep.recv_msg(local, 0, wrong), Err(FiErrno::EBADFLAGS));
        let remote = [RemoteIov {
            addr: 0,
            len: 8,
            key: 1,
        }];
        assert_eq!(
            client.ep.read_msg(local, &remote, 0, Flags::INJECT),
            Err(FiErrno::EBADFLAGS)
        );
        assert_eq!(
            client.ep.write_msg(local, &[], 0, 0, Flags::empty()),
            Err(FiErrno::EINVAL)
        );
        assert_eq!(
            client.ep.write(local, 0, 1 << 32, 0),
            Err(FiErrno::EKEYREJECTED)
        );
    }
}

/// Checks the flag of the request, because softverbs runs requests in order with and without it. On
/// hardware the flag makes the request wait for the reads and atomics before it.
#[test]
fn a_fence_reaches_the_device() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 256);
    let target = Buffer::all(&server.domain, 256);
    let (iov, desc) = source.part(0, 256);
    let local = LocalIov::single(&iov, &desc);
    let remote = [RemoteIov {
        addr: target.addr(),
        len: 256,
        key: target.region.key(),
    }];
    let ep = &client.ep;
    let fences = || {
        let control = ep.shared.control.lock();
        let fences = &control.qp.as_ref().unwrap().posted_fences;
        fences.load(std::sync::atomic::Ordering::Relaxed)
    };
    let fenced = || fences() & 1 != 0;
    for flags in [Flags::FENCE, Flags::empty()] {
        let expected = flags.contains(Flags::FENCE);
        server.recv(&target, 256, 0).unwrap();
        // SAFETY: the buffers outlive the operations.
        unsafe {
            ep.send_msg(local, 0, 1, flags).unwrap();
            assert_eq!(fenced(), expected, "send");
            ep.write_msg(local, &remote, 0, 2, flags).unwrap();
            assert_eq!(fenced(), expected, "write");
            ep.read_msg(local, &remote, 3, flags).unwrap();
            assert_eq!(fenced(), expected, "read");
        }
        server.completion().unwrap();
        for context in 1..=3 {
            assert_eq!(client.completion().unwrap().context, context);
        }
    }
    // lists; the helper thread may post a part of one earlier
    let more = Flags::MORE;
    for list in [
        [Flags::FENCE | more, more, Flags::FENCE],
        [more, Flags::FENCE | more, Flags::empty()],
    ] {
        for (i, flags) in list.into_iter().enumerate() {
            // SAFETY: the buffers outlive the operations.
            unsafe {
                match i {
                    1 => ep.read_msg(local, &remote, i, flags).unwrap(),
                    _ => ep.write_msg(local, &remote, 0, i, flags).unwrap(),
                }
            }
        }
        let expected = list.into_iter().fold(0, |bits, flags| {
            bits << 1 | u64::from(flags.contains(Flags::FENCE))
        });
        assert_eq!(fences() & 0b111, expected, "{list:?}");
        for context in 0..3 {
            assert_eq!(client.completion().unwrap().context, context);
        }
    }
}

#[test]
fn a_descriptor_is_needed_where_the_device_reads() {
    let (client, server) = connected(false, |_| {});
    let buffer = vec![1_u8; 4096];
    let iov = libc::iovec {
        iov_base: buffer.as_ptr().cast_mut().cast(),
        iov_len: 4096,
    };
    // SAFETY: refused before the device sees it.
    unsafe {
        let local = LocalIov::single(&iov, &Desc::NULL);
        assert_eq!(client.ep.send(local, 0), Err(FiErrno::EINVAL));
        assert_eq!(client.ep.recv(local, 0), Err(FiErrno::EINVAL));
    }
    // a buffer of 0 bytes needs no descriptor
    let empty = libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    };
    // SAFETY: no bytes.
    unsafe {
        server
            .ep
            .recv(LocalIov::single(&empty, &Desc::NULL), 1)
            .unwrap();
        client
            .ep
            .send(LocalIov::single(&empty, &Desc::NULL), 2)
            .unwrap();
    }
    assert_eq!(server.completion().unwrap().len, 0);
    assert_eq!(client.completion().unwrap().context, 2);
}

#[test]
fn a_message_too_long_is_an_error_on_both_sides() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 4096);
    let target = Buffer::all(&server.domain, 100);
    server.recv(&target, 100, 1).unwrap();
    client.send(&source, 4096, 2).unwrap();
    let error = server.completion().unwrap_err();
    assert_eq!((error.completion.context, error.err), (1, FiErrno::ETRUNC));
    let error = client.completion().unwrap_err();
    assert_eq!(
        (error.completion.context, error.err),
        (2, FiErrno::EREMOTEIO)
    );
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(SERVER)));
}

#[test]
fn writes_and_reads_reach_the_peer_s_memory() {
    let (client, server) = connected(false, |_| {});
    let mut source = Buffer::all(&client.domain, 1 << 16);
    let target = Buffer::new(
        &server.domain,
        1 << 16,
        Access::REMOTE_READ | Access::REMOTE_WRITE,
    );
    let key = target.region.key();
    for (i, len) in [1, 8, 64, 4096, 1 << 16].into_iter().enumerate() {
        source.fill(i as u8);
        let (iov, desc) = source.part(0, len);
        let local = LocalIov::single(&iov, &desc);
        // SAFETY: the buffers outlive the operations.
        unsafe { client.ep.write(local, target.addr(), key, i) }.unwrap();
        let done = client.completion().unwrap();
        assert_eq!((done.context, done.flags), (i, Flags::RMA | Flags::WRITE));
        assert!(
            target.memory[..len] == source.memory[..len],
            "write of {len}"
        );

        let back = Buffer::all(&client.domain, len);
        let (iov, desc) = back.part(0, len);
        let local = LocalIov::single(&iov, &desc);
        // SAFETY: as above.
        unsafe { client.ep.read(local, target.addr(), key, i) }.unwrap();
        let done = client.completion().unwrap();
        assert_eq!((done.context, done.flags), (i, Flags::RMA | Flags::READ));
        assert!(back.memory[..] == source.memory[..len], "read of {len}");
    }
    // SAFETY: inject is done with the buffer when it returns.
    unsafe {
        client
            .ep
            .inject_write(b"injected".as_ptr().cast(), 8, target.addr(), key)
    }
    .unwrap();
    let back = Buffer::all(&client.domain, 8);
    let (iov, desc) = back.part(0, 8);
    let remote = [RemoteIov {
        addr: target.addr(),
        len: 8,
        key,
    }];
    // SAFETY: the buffer outlives the operation.
    unsafe {
        client
            .ep
            .read_msg(LocalIov::single(&iov, &desc), &remote, 9, Flags::FENCE)
    }
    .unwrap();
    assert_eq!(client.completion().unwrap().context, 9);
    assert_eq!(back.memory, b"injected");
    no_completion(&server);
}

#[test]
fn a_write_with_data_consumes_a_receive() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 256);
    let target = Buffer::all(&server.domain, 256);
    let (iov, desc) = source.part(0, 256);
    for round in 0..2 {
        server.recv(&target, 0, 40 + round).unwrap();
        let local = LocalIov::single(&iov, &desc);
        let key = target.region.key();
        // SAFETY: the buffers outlive the operations.
        unsafe {
            if round == 0 {
                client
                    .ep
                    .write_data(local, 99, target.addr(), key, 1)
                    .unwrap();
                client.completion().unwrap();
            } else {
                let small = source.memory.as_ptr().cast();
                client
                    .ep
                    .inject_write_data(small, 16, 99, target.addr(), key)
                    .unwrap();
            }
        }
        let got = server.completion().unwrap();
        assert_eq!((got.context, got.data), (40 + round, 99));
        assert_eq!(
            got.flags,
            Flags::RMA | Flags::REMOTE_WRITE | Flags::REMOTE_CQ_DATA
        );
    }
}

#[test]
fn a_wrong_key_ends_the_connection_on_both_sides() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 4096);
    let target = Buffer::new(&server.domain, 4096, Access::REMOTE_READ);
    let waiting = Buffer::all(&server.domain, 8);
    server.recv(&waiting, 8, 3).unwrap();
    let (iov, desc) = source.part(0, 4096);
    // the region may be read, not written
    // SAFETY: the buffers outlive the operation.
    unsafe {
        client.ep.write(
            LocalIov::single(&iov, &desc),
            target.addr(),
            target.region.key(),
            1,
        )
    }
    .unwrap();
    let error = client.completion().unwrap_err();
    assert_eq!(
        (error.completion.context, error.err),
        (1, FiErrno::EKEYREJECTED)
    );
    assert_eq!(error.completion.flags, Flags::RMA | Flags::WRITE);
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert_eq!(next_event(&server.eq), Ok(Told::Shutdown(SERVER)));
    assert_eq!(server.completion().unwrap_err().err, FiErrno::ECANCELED);
    assert!(target.memory.iter().all(|&byte| byte == 0));
}

#[test]
fn a_closed_region_s_key_is_rejected() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 4096);
    let target = Buffer::all(&server.domain, 4096);
    let (addr, key) = (target.addr(), target.region.key());
    let Buffer { region, memory } = target;
    drop(region);
    let (iov, desc) = source.part(0, 4096);
    // SAFETY: the buffer outlives the operation.
    unsafe { client.ep.write(LocalIov::single(&iov, &desc), addr, key, 1) }.unwrap();
    assert_eq!(client.completion().unwrap_err().err, FiErrno::EKEYREJECTED);
    assert!(memory.iter().all(|&byte| byte == 0));
}

#[test]
fn waiting_readers_are_woken() {
    let (client, server) = connected(false, |_| {});
    let mut nothing = |c: &Completion| panic!("{c:?}");
    let start = Instant::now();
    let short = Some(Duration::from_millis(30));
    assert_eq!(
        server.cq.sread(1, 1, short, &mut nothing),
        Err(FiErrno::EAGAIN)
    );
    assert!(start.elapsed() >= Duration::from_millis(30));

    let signalled = std::thread::scope(|scope| {
        let reader = scope.spawn(|| server.cq.sread(1, 1, None, &mut |_: &Completion| {}));
        std::thread::sleep(Duration::from_millis(30));
        server.cq.signal().unwrap();
        reader.join().unwrap()
    });
    assert_eq!(signalled, Err(FiErrno::EAGAIN));

    let target = Buffer::all(&server.domain, 64);
    let source = Buffer::all(&client.domain, 64);
    for _ in 0..3 {
        server.recv(&target, 64, 8).unwrap();
    }
    let mut contexts = Vec::new();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            server.cq.sread(3, 3, Some(LIMIT), &mut |c: &Completion| {
                contexts.push(c.context)
            })
        });
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(10));
            client.send(&source, 64, 0).unwrap();
        }
        assert_eq!(reader.join().unwrap(), Ok(3));
    });
    assert_eq!(contexts, [8, 8, 8]);
}

#[test]
fn a_file_descriptor_tells_of_completions() {
    let (client, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 64);
    let source = Buffer::all(&client.domain, 64);
    let fd = server.cq.fd().unwrap();
    for context in 0..10 {
        server.recv(&target, 64, context).unwrap();
        assert_eq!(server.cq.trywait(), Ok(()));
        assert!(!readable(fd), "round {context}");
        client.send(&source, 64, context).unwrap();
        let start = Instant::now();
        while !readable(fd) {
            assert!(start.elapsed() < LIMIT, "never readable");
        }
        assert_eq!(server.cq.trywait(), Err(FiErrno::EAGAIN));
        let mut seen = None;
        assert_eq!(
            server
                .cq
                .read(4, &mut |c: &Completion| seen = Some(c.context)),
            Ok(1)
        );
        assert_eq!(seen, Some(context));
        client.completion().unwrap();
    }
}

#[test]
fn many_threads_share_an_endpoint() {
    let (client, server) = connected(false, |_| {});
    let source = Buffer::all(&client.domain, 256);
    let target = Buffer::all(&server.domain, 256);
    let count = 4000;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for i in 0..count / 4 {
                    while let Err(error) = client.send(&source, 256, i) {
                        assert_eq!(error, FiErrno::EAGAIN);
                        std::thread::yield_now();
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..count {
                client.completion().unwrap();
            }
        });
        let mut posted = 0;
        let mut received = 0;
        while received < count {
            while posted < count && server.recv(&target, 256, posted).is_ok() {
                posted += 1;
            }
            assert_eq!(server.completion().unwrap().context, received);
            received += 1;
        }
    });
    no_completion(&client);
    no_completion(&server);
}

#[test]
fn a_descriptor_of_another_domain_is_refused() {
    let (client, server) = connected(false, |_| {});
    let foreign = Buffer::all(&server.domain, 4096);
    assert_eq!(client.send(&foreign, 4096, 1), Err(FiErrno::EINVAL));
    assert_eq!(client.recv(&foreign, 4096, 1), Err(FiErrno::EINVAL));
    let own = Buffer::all(&client.domain, 4096);
    client.recv(&own, 4096, 1).unwrap();
}
