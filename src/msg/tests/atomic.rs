//! Atomics.

use super::keys::in_form;
use super::transfer::no_completion;
use super::*;
use crate::queue::Counter;

/// A 64-bit cell in a buffer's memory, read as an application reads it.
fn cell(buffer: &Buffer, index: usize) -> u64 {
    let bytes = &buffer.memory[index * 8..][..8];
    u64::from_ne_bytes(bytes.try_into().unwrap())
}

fn set(buffer: &mut Buffer, index: usize, value: u64) {
    buffer.memory[index * 8..][..8].copy_from_slice(&value.to_ne_bytes());
}

fn fetch(
    side: &Side,
    op: AtomicOp,
    (result, piece): (&Buffer, usize),
    (target, index): (&Buffer, usize),
) -> Result<()> {
    let (iov, desc) = result.part(piece * 8, 8);
    let to = (target.addr() + 8 * index as u64, target.region.key());
    let local = LocalIov::single(&iov, &desc);
    // SAFETY: tests keep their buffers until completion.
    unsafe { side.ep.atomic((op, AtomicKind::Fetch), local, to, 5, None) }
}

#[test]
fn values_come_back_as_they_were_before() {
    let (client, server) = connected(false, |_| {});
    let result = Buffer::all(&client.domain, 64);
    let mut target = Buffer::all(&server.domain, 64);
    set(&mut target, 2, u64::MAX - 1);
    set(&mut target, 3, 77);
    let swap = |compare, swap| AtomicOp::CompareSwap { compare, swap };
    let cases = [
        (AtomicOp::Add(5), 2, u64::MAX - 1, 3),
        (AtomicOp::Add(0), 2, 3, 3),
        (AtomicOp::Add(1_u64.wrapping_neg()), 2, 3, 2),
        (swap(2, 0x0123_4567_89ab_cdef), 2, 2, 0x0123_4567_89ab_cdef),
        (swap(2, 9), 2, 0x0123_4567_89ab_cdef, 0x0123_4567_89ab_cdef),
    ];
    for (op, index, before, after) in cases {
        fetch(&client, op, (&result, 1), (&target, index)).unwrap();
        let done = client.completion().unwrap();
        assert_eq!(done.flags, Flags::ATOMIC | Flags::READ);
        assert_eq!(done.context, 5);
        assert_eq!((cell(&result, 1), cell(&target, index)), (before, after));
    }
    assert_eq!((cell(&target, 1), cell(&target, 3)), (0, 77));
    assert_eq!((cell(&result, 0), cell(&result, 2)), (0, 0));
    no_completion(&server);
}

#[test]
fn an_atomic_without_a_result_changes_the_target_alone() {
    let (client, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 64);
    let to = (target.addr(), target.region.key());
    let base = (AtomicOp::Add(3), AtomicKind::Base);
    // SAFETY: no buffers.
    unsafe { client.ep.atomic(base, LocalIov::NONE, to, 7, None) }.unwrap();
    let done = client.completion().unwrap();
    assert_eq!(
        (done.context, done.flags),
        (7, Flags::ATOMIC | Flags::WRITE)
    );
    client.ep.inject_atomic(AtomicOp::Add(4), to).unwrap();
    // an operation that is posted later completes later
    // SAFETY: no buffers.
    unsafe { client.ep.atomic(base, LocalIov::NONE, to, 8, None) }.unwrap();
    assert_eq!(client.completion().unwrap().context, 8, "inject is silent");
    assert_eq!(cell(&target, 0), 10);
}

#[test]
fn two_connections_add_to_one_cell_and_lose_nothing() {
    const COUNT: u64 = 2_000;
    let (first, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 8);
    let to = (target.addr(), target.region.key());
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let second = Side::new(&device, config(CLIENT), false);
    second.ep.connect(Some(addr), b"hello").unwrap();
    let request = pump(&second, || {
        eq.read(false, |event| match event {
            Event::ConnReq { request, .. } => Ok(request.take()),
            other => panic!("{other:?}"),
        })
        .ok()
        .flatten()
    });
    let accepting = Endpoint::from_request(&server.domain, config(SERVER), request);
    let accepting = accepting.map_err(|(error, _)| error).unwrap();
    let other = Side::bound(Arc::clone(&server.domain), accepting, false);
    other.ep.accept(b"").unwrap();
    next_event(&second.eq).unwrap();
    next_event(&other.eq).unwrap();
    std::thread::scope(|scope| {
        for side in [&first, &second] {
            scope.spawn(move || {
                let start = Instant::now();
                let mut done = 0;
                while done < COUNT {
                    match side.ep.inject_atomic(AtomicOp::Add(1), to) {
                        Ok(()) => done += 1,
                        Err(FiErrno::EAGAIN) => std::thread::yield_now(),
                        Err(error) => panic!("{error:?}"),
                    }
                    assert!(start.elapsed() < LIMIT);
                }
                let result = Buffer::all(&side.domain, 8);
                let (iov, desc) = result.part(0, 8);
                let op = (AtomicOp::Add(0), AtomicKind::Fetch);
                let local = LocalIov::single(&iov, &desc);
                loop {
                    // SAFETY: the buffer outlives the operation.
                    match unsafe { side.ep.atomic(op, local, to, 0, None) } {
                        Ok(()) => break,
                        Err(FiErrno::EAGAIN) => std::thread::yield_now(),
                        Err(error) => panic!("{error:?}"),
                    }
                }
                side.completion().unwrap();
                assert!(cell(&result, 0) >= COUNT);
            });
        }
    });
    assert_eq!(cell(&target, 0), 2 * COUNT);
}

#[test]
fn counters_count_fetches_as_reads_and_the_rest_as_writes() {
    let counters = std::cell::RefCell::new(Vec::new());
    let (client, server) = connected_before(DomainConfig::default(), true, |client| {
        for kind in [Flags::READ, Flags::WRITE] {
            let counter = Counter::open(client.domain.queues(), WaitKind::Unspec).unwrap();
            client.ep.bind_counter(&counter, kind).unwrap();
            counters.borrow_mut().push(counter);
        }
    });
    let counters = counters.into_inner();
    let target = Buffer::all(&server.domain, 8);
    let result = Buffer::all(&client.domain, 8);
    fetch(&client, AtomicOp::Add(1), (&result, 0), (&target, 0)).unwrap();
    let to = (target.addr(), target.region.key());
    for _ in 0..3 {
        client.ep.inject_atomic(AtomicOp::Add(1), to).unwrap();
    }
    assert_eq!(counters[0].wait(1, Some(LIMIT)), Ok(()));
    assert_eq!(counters[1].wait(3, Some(LIMIT)), Ok(()));
    assert_eq!((counters[0].read(), counters[1].read()), (1, 3));
}

/// The address of the target is what has to be aligned: with offsets, the sum of base and offset.
#[test]
fn the_base_of_a_region_counts_for_the_alignment_of_an_offset() {
    for mode in [Mode::empty(), Mode::PROV_KEY, Mode::VIRT_ADDR] {
        let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL | mode);
        let mut memory = vec![0_u64; 8];
        let start = memory.as_mut_ptr().cast::<u8>().wrapping_add(4);
        let config = RegionConfig {
            buffers: &[crate::mr::Buffer {
                addr: start.cast_const().cast(),
                len: 48,
            }],
            access: Access::all(),
            requested_key: 5,
            ..RegionConfig::default()
        };
        // SAFETY: the region is dropped before the memory, which does not move.
        let region = unsafe { Region::register(server.domain.mr(), &config) }.unwrap();
        let base = match mode.contains(Mode::VIRT_ADDR) {
            true => start as u64,
            false => 0,
        };
        let to = |offset| (base + offset, region.key());
        let add = |value, offset, context| {
            let op = (AtomicOp::Add(value), AtomicKind::Base);
            // SAFETY: no buffers.
            unsafe { (client.ep).atomic(op, LocalIov::NONE, to(offset), context, None) }
        };
        add(1, 4, 7).unwrap();
        assert_eq!(client.completion().unwrap().context, 7, "{mode:?}");
        client.ep.inject_atomic(AtomicOp::Add(2), to(4)).unwrap();
        add(4, 4, 8).unwrap();
        assert_eq!(client.completion().unwrap().context, 8, "{mode:?}");
        add(8, 0, 9).unwrap();
        let error = client.completion().unwrap_err();
        let found = (error.completion.context, error.err);
        assert_eq!(found, (9, FiErrno::EINVAL), "{mode:?}");
        // the refusal does not end the connection
        add(16, 12, 10).unwrap();
        assert_eq!(client.completion().unwrap().context, 10, "{mode:?}");
        drop(region);
        assert_eq!(memory, [0, 7, 16, 0, 0, 0, 0, 0], "{mode:?}");
    }
}

#[test]
fn what_verbs_has_not_is_refused_before_it_is_posted() {
    let (client, server) = connected(false, |_| {});
    let target = Buffer::all(&server.domain, 64);
    let result = Buffer::all(&client.domain, 64);
    let (addr, key) = (target.addr(), target.region.key());
    let op = (AtomicOp::Add(1), AtomicKind::Fetch);
    let (short, desc) = result.part(0, 4);
    let (whole, _) = result.part(0, 8);
    let call = |iov, to, flags| {
        // SAFETY: the call is refused, or its buffers outlive the operation.
        unsafe {
            let local = LocalIov::single(iov, &desc);
            client.ep.atomic(op, local, to, 0, flags)
        }
    };
    assert_eq!(call(&short, (addr, key), None), Err(FiErrno::EINVAL));
    assert_eq!(call(&whole, (addr + 4, key), None), Err(FiErrno::EINVAL));
    let no_key = call(&whole, (addr, 1 << 40), None);
    assert_eq!(no_key, Err(FiErrno::EKEYREJECTED));
    let flags = Some(Flags::REMOTE_CQ_DATA);
    assert_eq!(call(&whole, (addr, key), flags), Err(FiErrno::EBADFLAGS));
    assert_eq!(call(&whole, (addr, key), Some(Flags::FENCE)), Ok(()));
    client.completion().unwrap();
    // a region without remote write access cannot be a target
    let locked = Buffer::new(&server.domain, 8, Access::REMOTE_READ);
    let to = (locked.addr(), locked.region.key());
    assert_eq!(call(&whole, to, None), Ok(()));
    let error = client.completion().unwrap_err();
    assert_eq!(error.err, FiErrno::EKEYREJECTED);
    assert_eq!(cell(&locked, 0), 0);
    let mut without = config(CLIENT);
    without.atomics = false;
    let side = Side::new(&device(), without, false);
    let refused = side.ep.inject_atomic(AtomicOp::Add(1), (0, 0));
    assert_eq!(refused, Err(FiErrno::EOPNOTSUPP));
}
