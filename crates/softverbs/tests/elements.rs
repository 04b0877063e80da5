//! Atomics on elements of all datatypes (`docs/softverbs-atomics.md`), between two processes as in
//! `two_processes.rs`.
//!
//! One file, because the cases share the operations that the two processes execute.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use atomic_ops::{Datatype, Op, Operation};
use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(10);
const REMOTE: u32 = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
const ALL: u32 = IBV_ACCESS_LOCAL_WRITE | REMOTE;

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("each_operation", each_parent, each_child),
        ("bytes_beside_an_element", beside_parent, beside_child),
        ("the_last_bytes", last_parent, last_child),
        ("all_sizes_add_up", sums_parent, sums_child),
        ("a_stopped_target", stopped_parent, stopped_child),
        ("refused_accesses", refused_parent, refused_child),
        ("refused_posts", posts_parent, posts_child),
        ("without_a_request", at_once_parent, at_once_child),
        ("own_memory", own, |_| ()),
        ("memory_for_reading", reading_parent, reading_child),
    ];
    run(cases);
}

/// An operation, its operands included.
struct Atomic {
    raw: softdv_atomic,
    _operands: Box<[u8]>,
}

fn atomic(op: Op, datatype: Datatype, count: usize, operands: &[u8]) -> Atomic {
    let operands: Box<[u8]> = operands.into();
    Atomic {
        raw: softdv_atomic {
            op: op as u8,
            datatype: datatype as u8,
            count: count as u16,
            changed: u32::MAX,
            operands: operands.as_ptr().cast(),
            compare: operands[operands.len() / 2..].as_ptr().cast(),
        },
        _operands: operands,
    }
}

/// Posts an operation; the results of `len` bytes replace the beginning of `results`.
fn post(end: &mut End, atomic: &mut Atomic, results: (&Buffer, usize), to: (u64, u32)) -> i32 {
    let mut sge = ibv_sge {
        addr: results.0.addr(),
        length: results.1 as u32,
        lkey: results.0.lkey(),
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = (results.1 != 0).into();
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = SOFTDV_WR_ATOMIC;
    wr.wr.atomic.remote_addr = to.0;
    wr.wr.atomic.rkey = to.1;
    wr.wr.atomic.compare_add = (&raw mut atomic.raw).expose_provenance() as u64;
    let mut bad = null_mut();
    // SAFETY: a live queue pair and a valid request.
    unsafe { ibv_post_send(end.qp, &raw mut wr, &raw mut bad) }
}

/// The status of an operation that the post accepts.
fn run_atomic(
    end: &mut End,
    atomic: &mut Atomic,
    results: (&Buffer, usize),
    to: (u64, u32),
) -> u32 {
    assert_eq!(post(end, atomic, results, to), 0);
    end.wait(LIMIT).status
}

/// Executes an operation without a request, if the device can. `results`: empty, or of its size.
fn at_once(end: &End, atomic: &mut Atomic, results: &mut [u8], to: (u64, u32)) -> bool {
    let call = verbs().softdv_atomic_access.unwrap();
    let results = match results {
        [] => null_mut(),
        results => results.as_mut_ptr().cast(),
    };
    // SAFETY: a live queue pair, operands, and results of the size of the elements.
    let done = unsafe { call(end.qp, &raw mut atomic.raw, results, to.0, to.1) };
    assert!(done == 0 || done == libc::EAGAIN, "{done}");
    done == 0
}

fn verb(end: &mut End, opcode: u32, buffer: &Buffer, len: usize, to: (u64, u32)) {
    end.rdma(opcode, buffer, len, to.0, to.1, None);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
}

/// Memory that the device allocates, and the key of a region of it.
fn device_buffer(end: &End, len: usize) -> (*mut u8, u32) {
    let (addr, mr) = device_region(end, len, ALL);
    // SAFETY: live.
    (addr, unsafe { (*mr).rkey })
}

/// As [`device_buffer`], with these rights, and the region.
fn device_region(end: &End, len: usize, access: u32) -> (*mut u8, *mut ibv_mr) {
    let mut buf = null_mut();
    // SAFETY: live objects, writable output; never freed.
    unsafe {
        let addr = verbs().ibv_alloc_buf.unwrap()(end.pd, len, &raw mut buf);
        assert!(!addr.is_null());
        let register = verbs().ibv_reg_buf_mr.unwrap();
        let mr = register(end.pd, buf, addr, len, access.cast_signed());
        assert!(!mr.is_null());
        (addr.cast(), mr)
    }
}

const AREA: usize = 256;

/// Every operation on every datatype, one to three elements, in ordinary memory and in a buffer,
/// also across words, with and without results, with and without a request. Bytes beside the
/// elements stay.
fn each_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let places = [link.numbers(), link.numbers()].map(|(addr, key)| (addr, key as u32));
    let (mut area, mut results) = (end.buffer(&[0; AREA]), end.buffer(&[0; AREA]));
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // small values, which compare equal at times
        if seed >> 63 == 0 {
            (seed >> 40) as u8
        } else {
            (seed >> 40) as u8 & 1
        }
    };
    let mut executed = 0;
    for &op in Op::ALL {
        for &datatype in Datatype::ALL {
            let Some(operation) = Operation::new(op, datatype) else {
                continue;
            };
            for (to, count, fetches, request) in [
                (0, 1, true, true),
                (1, 1, true, true),
                (0, 3, false, true),
                (1, 3, true, true),
                (0, 1, true, false),
                (1, 1, true, false),
                (1, 3, false, false),
                (1, 3, true, false),
            ] {
                let fetches = fetches || op == Op::Read;
                let (size, len) = (datatype.size(), count * datatype.size());
                let before: Vec<u8> = (0..AREA).map(|_| random()).collect();
                let operands: Vec<u8> = (0..2 * len).map(|_| random()).collect();
                copy_in(&mut area, &before);
                let (addr, key) = places[to];
                verb(&mut end, IBV_WR_RDMA_WRITE, &area, AREA, (addr, key));
                // of a complex number, also across words
                let first = 16 + datatype.alignment();
                let mut asked = atomic(op, datatype, count, &operands);
                results.fill(0x55);
                let sges = if fetches { len } else { 0 };
                let target = (addr + first as u64, key);
                let mut earlier = vec![0x55; sges];
                if !request && at_once(&end, &mut asked, &mut earlier, target) {
                    assert!(to == 1 && size <= 8, "{op:?} {datatype:?}");
                    copy_in(&mut results, &earlier);
                } else {
                    let words = to == 1 && size <= 8 && first.is_multiple_of(size);
                    assert!(request || !words, "{op:?} {datatype:?} {count}");
                    let status = run_atomic(&mut end, &mut asked, (&results, sges), target);
                    assert_eq!(status, IBV_WC_SUCCESS, "{op:?} {datatype:?} {to}");
                }
                verb(&mut end, IBV_WR_RDMA_READ, &area, AREA, (addr, key));
                let mut after = before.clone();
                let mut changed = 0;
                for at in (0..len).step_by(size) {
                    let element = &mut after[first + at..first + at + size];
                    let old = element.to_vec();
                    operation.apply(element, &operands[at..], &operands[len + at..]);
                    changed += u32::from(op == Op::Write || old != *element);
                }
                assert_eq!(area.bytes(), after, "{op:?} {datatype:?} {to} {count}");
                assert_eq!(
                    asked.raw.changed, changed,
                    "{op:?} {datatype:?} {to} {count}"
                );
                let found = results.bytes();
                assert_eq!(
                    found[..sges],
                    before[first..first + sges],
                    "{op:?} {datatype:?}"
                );
                assert!(found[sges..].iter().all(|byte| *byte == 0x55));
                executed += 1;
            }
        }
    }
    assert!(executed > 1000, "{executed}");
    link.say("done");
}

fn copy_in(buffer: &mut Buffer, bytes: &[u8]) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(buffer.addr() as usize);
    // SAFETY: inside the buffer; no request names it now.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn each_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let ordinary = end.buffer(&[0; AREA]);
    let (addr, key) = device_buffer(&end, AREA);
    link.say_numbers(ordinary.addr(), ordinary.rkey().into());
    link.say_numbers(addr as u64, key.into());
    link.expect("done");
}

const COUNT: u64 = 20_000;

/// The owner's processor increments 16-bit integers on both sides of an element of 2 bytes, with
/// plain loads and stores, while another process adds to the element.
fn beside_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let ordinary = end.buffer(&[0; 64]);
    let (buffer, key) = device_buffer(&end, 64);
    for (at, key) in [(ordinary.addr(), ordinary.rkey()), (buffer as u64, key)] {
        link.say_numbers(at, key.into());
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let base = std::ptr::with_exposed_provenance_mut::<u16>(at as usize);
            let mut count = 0_u16;
            while !asked.load(Ordering::Relaxed) {
                for beside in [4, 6] {
                    // SAFETY: inside the memory; a load and a store, not one atomic instruction.
                    let word = unsafe { AtomicU16::from_ptr(base.add(beside)) };
                    word.store(
                        word.load(Ordering::Relaxed).wrapping_add(1),
                        Ordering::Relaxed,
                    );
                }
                count = count.wrapping_add(1);
            }
            count
        });
        link.expect("done");
        stop.store(true, Ordering::Relaxed);
        let count = thread.join().unwrap();
        let word = |index: usize| {
            let base = std::ptr::with_exposed_provenance::<u16>(at as usize);
            // SAFETY: inside the memory.
            unsafe { base.add(index).read_volatile() }
        };
        assert_eq!((word(4), word(5), word(6)), (count, COUNT as u16, count));
        assert_eq!((word(3), word(7)), (0, 0));
    }
}

fn beside_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let results = end.buffer(&[0; 8]);
    for _ in 0..2 {
        let (addr, key) = link.numbers();
        let mut add = atomic(Op::Sum, Datatype::Uint16, 1, &1_u16.to_ne_bytes());
        for _ in 0..COUNT {
            let status = run_atomic(&mut end, &mut add, (&results, 0), (addr + 10, key as u32));
            assert_eq!(status, IBV_WC_SUCCESS);
        }
        link.say("done");
    }
}

/// The last bytes of a region and of the memory: the next page is not mapped.
fn last_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    // SAFETY: new memory, whose second page becomes inaccessible.
    let base = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = libc::mmap(null_mut(), 8192, protection, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED);
        assert_eq!(libc::munmap(base.byte_add(4096), 4096), 0);
        base.cast::<u8>()
    };
    // SAFETY: 15 bytes at the end of the page.
    let mr = unsafe { ibv_reg_mr(verbs(), end.pd, base.add(4081).cast(), 15, ALL) };
    assert!(!mr.is_null());
    // SAFETY: live.
    link.say_numbers(base as u64 + 4096, unsafe { (*mr).rkey }.into());
    link.expect("done");
    let mut found = [0; 17];
    for (i, byte) in found.iter_mut().enumerate() {
        // SAFETY: inside the page.
        *byte = unsafe { base.add(4079 + i).read_volatile() };
    }
    let mut wanted = [0; 17];
    (wanted[13], wanted[15], wanted[16]) = (5, 6, 7);
    assert_eq!(found, wanted);
}

fn last_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let results = end.buffer(&[0; 8]);
    let (after, key) = link.numbers();
    for (datatype, back, operand) in [
        (Datatype::Uint32, 4, &[5, 0, 0, 0][..]),
        (Datatype::Uint16, 2, &[6, 0]),
        (Datatype::Uint8, 1, &[7]),
    ] {
        let mut add = atomic(Op::Sum, datatype, 1, operand);
        let target = (after - back, key as u32);
        let status = run_atomic(&mut end, &mut add, (&results, operand.len()), target);
        assert_eq!(status, IBV_WC_SUCCESS);
    }
    link.say("done");
}

/// Two processes add 1 to the same bytes: by the fetch and add of verbs, by elements of 1 to 16
/// bytes, by arrays, and the owner by `softdv_atomic_own`.
fn sums_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let ordinary = end.buffer_with(&[0; 64], ALL);
    let aligned = (ordinary.addr() + 15) & !15;
    let (buffer, key) = device_buffer(&end, 64);
    for (at, key, sizes) in [
        (aligned, ordinary.rkey(), &WIDTHS[..]),
        // in a buffer elements of 16 bytes are atomic with each other only
        (buffer as u64, key, &WIDTHS[..4]),
    ] {
        link.say_numbers(at, key.into());
        link.say_numbers(sizes.len() as u64, 0);
        let call = verbs().softdv_atomic_own.unwrap();
        let mut seen = vec![0; 16];
        for i in 0..ROUNDS {
            let datatype = sizes[i as usize % sizes.len()];
            let mut add = one(datatype);
            let iov = libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(at as usize),
                iov_len: datatype.size(),
            };
            // SAFETY: live context; the memory and the results have the size of the element.
            let done = unsafe {
                let results = seen.as_mut_ptr().cast();
                call(end.context, &raw mut add.raw, &raw const iov, 1, results)
            };
            assert_eq!((done, add.raw.changed), (0, 1));
        }
        link.expect("done");
        let word = std::ptr::with_exposed_provenance_mut::<u64>(at as usize);
        // SAFETY: inside the memory.
        let sum = unsafe { AtomicU64::from_ptr(word) }.load(Ordering::SeqCst);
        // SAFETY: inside the memory.
        let high = unsafe { AtomicU64::from_ptr(word.add(1)) }.load(Ordering::SeqCst);
        assert_eq!((sum, high), (3 * ROUNDS, 0));
    }
}

/// The sum of all additions fits in 16 bits.
const ROUNDS: u64 = 6_000;
const _: () = assert!(3 * ROUNDS <= u16::MAX as u64);

const WIDTHS: [Datatype; 5] = [
    Datatype::Uint64,
    Datatype::Uint32,
    Datatype::Uint16,
    Datatype::Int64,
    Datatype::Uint128,
];

fn one(datatype: Datatype) -> Atomic {
    let mut bytes = [0; 16];
    bytes[0] = 1;
    atomic(Op::Sum, datatype, 1, &bytes)
}

fn sums_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let results = end.buffer(&[0; 64]);
    for _ in 0..2 {
        let ((addr, key), (count, _)) = (link.numbers(), link.numbers());
        let (key, sizes) = (key as u32, &WIDTHS[..count as usize]);
        for i in 0..ROUNDS {
            let datatype = sizes[(i % count) as usize];
            let mut add = one(datatype);
            let sges = if i % 2 == 0 { datatype.size() } else { 0 };
            let mut earlier = [0; 16];
            let earlier = &mut earlier[..sges];
            if i % 4 > 1 || !at_once(&end, &mut add, earlier, (addr, key)) {
                let status = run_atomic(&mut end, &mut add, (&results, sges), (addr, key));
                assert_eq!(status, IBV_WC_SUCCESS);
            }
            assert_eq!(add.raw.changed, 1);
            let status = fetch_add(&mut end, &results, (addr, key));
            assert_eq!(status, IBV_WC_SUCCESS);
        }
        link.say("done");
    }
}

fn fetch_add(end: &mut End, result: &Buffer, (addr, rkey): (u64, u32)) -> u32 {
    let mut sge = ibv_sge {
        addr: result.addr(),
        length: 8,
        lkey: result.lkey(),
    };
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.sg_list = &raw mut sge;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    wr.wr.atomic.remote_addr = addr;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = 1;
    end.post(&mut wr);
    end.wait(LIMIT).status
}

fn stopped_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, key) = link.numbers();
    let results = end.buffer(&[0; 64]);
    link.stop();
    for datatype in [
        Datatype::Uint8,
        Datatype::Double,
        Datatype::LongDoubleComplex,
    ] {
        let Some(operation) = Operation::new(Op::Write, datatype) else {
            continue;
        };
        let operand = vec![1; operation.datatype().size()];
        let mut write = atomic(Op::Write, datatype, 1, &operand);
        let status = run_atomic(
            &mut end,
            &mut write,
            (&results, operand.len()),
            (addr, key as u32),
        );
        assert_eq!(status, IBV_WC_SUCCESS);
    }
    link.go_on();
    link.say("done");
}

fn stopped_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let memory = end.buffer(&[0; 64]);
    link.say_numbers(memory.addr(), memory.rkey().into());
    link.expect("done");
    assert!(memory.bytes()[..8].iter().all(|byte| *byte == 1));
}

/// Rights of the regions that the target offers, in order.
const RIGHTS: [u32; 3] = [
    ALL,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
];

/// Region, offset, operator, whether it fetches, and the status.
const REFUSALS: [(usize, u64, Op, bool, u32); 9] = [
    (0, 0, Op::Sum, true, IBV_WC_SUCCESS),
    (0, 60, Op::Sum, true, IBV_WC_REM_ACCESS_ERR),
    (0, 64, Op::Write, false, IBV_WC_REM_ACCESS_ERR),
    (0, 3, Op::Sum, false, IBV_WC_SUCCESS),
    (1, 0, Op::Write, false, IBV_WC_REM_ACCESS_ERR),
    (1, 0, Op::Read, true, IBV_WC_SUCCESS),
    (2, 0, Op::Sum, true, IBV_WC_REM_ACCESS_ERR),
    (2, 0, Op::Sum, false, IBV_WC_SUCCESS),
    (2, 0, Op::Read, true, IBV_WC_REM_ACCESS_ERR),
];

fn refused_parent(link: &mut Link) {
    for (region, offset, op, fetches, wanted) in REFUSALS {
        let mut end = End::connect(link, 8, 8, 1);
        let places: Vec<_> = RIGHTS.iter().map(|_| link.numbers()).collect();
        let results = end.buffer(&[0; 64]);
        let (addr, key) = places[region];
        let mut asked = atomic(op, Datatype::Uint32, 2, &[1; 8]);
        let sges = if fetches { 8 } else { 0 };
        let target = (addr + offset, key as u32);
        let status = run_atomic(&mut end, &mut asked, (&results, sges), target);
        assert_eq!(status, wanted, "{region} {offset} {op:?} {fetches}");
        link.say("done");
    }
}

fn refused_child(link: &mut Link) {
    for (region, offset, op, fetches, status) in REFUSALS {
        let end = End::connect(link, 8, 8, 1);
        let memory = RIGHTS.map(|access| end.buffer_with(&[7; 64], access));
        for buffer in &memory {
            link.say_numbers(buffer.addr(), buffer.rkey().into());
        }
        link.expect("done");
        for (at, buffer) in memory.iter().enumerate() {
            let mut wanted = [7; 64];
            if at == region && status == IBV_WC_SUCCESS && op == Op::Sum {
                wanted[offset as usize..][..8].fill(8);
            }
            assert_eq!(buffer.bytes(), wanted, "{region} {offset} {op:?} {fetches}");
        }
    }
}

/// What the post refuses, and local buffers of a wrong length.
fn posts_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, key) = link.numbers();
    let (to, results) = ((addr, key as u32), end.buffer(&[0; 4096]));
    let invalid = [
        (255, Datatype::Uint8 as u8, 1, 0),
        (Op::Sum as u8, 255, 1, 0),
        (Op::Xor as u8, Datatype::Double as u8, 1, 0),
        (Op::Sum as u8, Datatype::Uint64 as u8, 0, 0),
        (Op::Sum as u8, Datatype::Uint64 as u8, 129, 0),
        (Op::Read as u8, Datatype::Uint64 as u8, 1, 0),
    ];
    for (op, datatype, count, sges) in invalid {
        let mut asked = atomic(Op::Sum, Datatype::Uint64, 1, &[0; 4096]);
        (asked.raw.op, asked.raw.datatype, asked.raw.count) = (op, datatype, count);
        assert_eq!(
            post(&mut end, &mut asked, (&results, sges), to),
            libc::EINVAL
        );
    }
    let mut asked = atomic(Op::Sum, Datatype::Uint64, 1, &[0; 8]);
    asked.raw.operands = std::ptr::null();
    asked.raw.compare = std::ptr::null();
    assert_eq!(post(&mut end, &mut asked, (&results, 0), to), libc::EINVAL);
    // the most elements
    let mut asked = atomic(Op::Sum, Datatype::Uint64, 128, &[1; 1024]);
    assert_eq!(
        run_atomic(&mut end, &mut asked, (&results, 1024), to),
        IBV_WC_SUCCESS
    );
    assert_eq!(asked.raw.changed, 128);
    assert_eq!(
        run_atomic(&mut end, &mut asked, (&results, 1016), to),
        IBV_WC_LOC_LEN_ERR
    );
    link.say("done");
}

fn posts_child(link: &mut Link) {
    let end = End::connect(link, 8, 8, 1);
    let memory = end.buffer(&[0; 1024]);
    link.say_numbers(memory.addr(), memory.rkey().into());
    link.expect("done");
    assert_eq!(memory.bytes(), [1; 1024]);
}

/// What is not executed without a request, and the order behind requests.
fn at_once_parent(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, key) = link.numbers();
    let to = |offset: u64| (addr + offset, key as u32);
    let mut add = atomic(Op::Sum, Datatype::Uint64, 1, &1_u64.to_ne_bytes());
    let mut earlier = [9; 8];
    // the first access may map the buffer by the peer's agent
    let results = end.buffer(&[0; 8]);
    let status = run_atomic(&mut end, &mut add, (&results, 0), to(16));
    assert_eq!(status, IBV_WC_SUCCESS);
    assert!(at_once(&end, &mut add, &mut earlier, to(8)));
    assert_eq!((earlier, add.raw.changed), ([0; 8], 1));
    // the last word; beyond it; across words
    assert!(at_once(&end, &mut add, &mut [], to(248)));
    for offset in [249, 256, 4, 4096, u64::MAX - 7] {
        let offset = to(0).0.wrapping_add(offset);
        assert!(!at_once(&end, &mut add, &mut [], (offset, key as u32)));
    }
    // other keys, and operations that a post refuses
    assert!(!at_once(&end, &mut add, &mut [], (to(8).0, key as u32 ^ 1)));
    assert!(!at_once(&end, &mut add, &mut [], (to(8).0, !(key as u32))));
    for (op, datatype, count) in [(255, 6, 1), (2, 255, 1), (2, 6, 0), (2, 6, 200)] {
        let mut asked = atomic(Op::Sum, Datatype::Uint64, 1, &[0; 2048]);
        (asked.raw.op, asked.raw.datatype, asked.raw.count) = (op, datatype, count);
        assert!(!at_once(&end, &mut asked, &mut [], to(8)));
    }
    let mut read = atomic(Op::Read, Datatype::Uint64, 1, &[]);
    assert!(!at_once(&end, &mut read, &mut [], to(8)));
    assert!(at_once(&end, &mut read, &mut earlier, to(8)));
    assert_eq!((u64::from_ne_bytes(earlier), read.raw.changed), (1, 0));
    // the peer has no receive, so the message waits, and what is behind it
    let mut message = end.buffer(&[1; 8]);
    end.send(&mut message, 8, None, IBV_SEND_SIGNALED, 1);
    assert!(!at_once(&end, &mut add, &mut [], to(8)));
    link.say("receive");
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    assert!(at_once(&end, &mut add, &mut earlier, to(8)));
    assert_eq!(u64::from_ne_bytes(earlier), 1);
    // a region without the right to read, and one that is gone
    link.say("rights");
    let (addr, key) = link.numbers();
    let place = (addr, key as u32);
    assert!(!at_once(&end, &mut add, &mut earlier, place));
    let status = run_atomic(&mut end, &mut add, (&results, 0), place);
    assert_eq!(status, IBV_WC_SUCCESS);
    assert!(!at_once(&end, &mut add, &mut earlier, place));
    assert!(at_once(&end, &mut add, &mut [], place));
    link.say("deregister");
    link.expect("deregistered");
    assert!(!at_once(&end, &mut add, &mut [], place));
    link.say("done");
}

fn at_once_child(link: &mut Link) {
    let mut end = End::connect(link, 8, 8, 1);
    let (addr, key) = device_buffer(&end, 256);
    link.say_numbers(addr as u64, key.into());
    link.expect("receive");
    let buffer = end.buffer(&[0; 8]);
    end.recv(&buffer, 1);
    assert_eq!(end.wait(LIMIT).status, IBV_WC_SUCCESS);
    link.expect("rights");
    let (addr, mr) = device_region(&end, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    // SAFETY: live.
    link.say_numbers(addr as u64, unsafe { (*mr).rkey }.into());
    link.expect("deregister");
    // SAFETY: live, and not used afterwards.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
    link.say("deregistered");
    link.expect("done");
    // SAFETY: inside the memory, which stays.
    let word = |at: *mut u8| unsafe { at.cast::<u64>().read_volatile() };
    assert_eq!(word(addr), 2);
}

/// Elements of the process's own memory, in several buffers.
fn own(link: &mut Link) {
    let end = End::create(link, 8, 8, 1);
    let (buffer, _) = device_buffer(&end, 64);
    let mut memory = [0_u64; 3];
    let base = (&raw mut memory).cast::<u8>();
    let call = verbs().softdv_atomic_own.unwrap();
    // an element of 8 bytes across two buffers, then one in memory of the device
    let mut list = [
        (base, 4),
        (base.wrapping_add(16), 4),
        (buffer.wrapping_add(8), 8),
    ]
    .map(|(at, len)| libc::iovec {
        iov_base: at.cast(),
        iov_len: len,
    });
    let operand = u64::MAX.to_ne_bytes();
    let mut results = [7_u64; 2];
    let mut asked = atomic(Op::Sum, Datatype::Uint64, 2, &[operand, operand].concat());
    let execute = |list: &[libc::iovec], asked: &mut Atomic, results: *mut u64| {
        let count = list.len() as i32;
        // SAFETY: live context; the list and the results have the size of the elements.
        unsafe {
            call(
                end.context,
                &raw mut asked.raw,
                list.as_ptr(),
                count,
                results.cast(),
            )
        }
    };
    assert_eq!(execute(&list, &mut asked, results.as_mut_ptr()), 0);
    assert_eq!((asked.raw.changed, results), (2, [0, 0]));
    let word = |at: usize| {
        // SAFETY: inside the memory.
        unsafe { base.cast::<u64>().add(at).read_volatile() }
    };
    assert_eq!(
        [word(0), word(1), word(2)],
        [u32::MAX.into(), 0, u32::MAX.into()]
    );
    // SAFETY: inside the buffer.
    let in_buffer = unsafe { buffer.add(8).cast::<u64>().read_volatile() };
    assert_eq!(in_buffer, u64::MAX);
    assert_eq!(execute(&list[..2], &mut asked, null_mut()), libc::EINVAL);
    // no memory
    list[2].iov_base = std::ptr::without_provenance_mut(8);
    assert_eq!(execute(&list, &mut asked, null_mut()), libc::EFAULT);
    // memory that wraps at the end of the address space; a call that loops ends the test
    // SAFETY: has no memory; the process has no other alarm.
    unsafe { libc::alarm(20) };
    for (at, len) in [(usize::MAX - 7, 16), (usize::MAX, 16)] {
        let wraps = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(at),
            iov_len: len,
        };
        assert_eq!(execute(&[wraps], &mut asked, null_mut()), libc::EFAULT);
        let last = libc::iovec {
            iov_len: 8,
            ..wraps
        };
        let lists = [[list[2], last], [last, list[2]]];
        for list in lists {
            assert_eq!(execute(&list, &mut asked, null_mut()), libc::EFAULT);
        }
    }
    // SAFETY: as above.
    unsafe { libc::alarm(0) };
    // SAFETY: live context.
    let most = unsafe { verbs().softdv_max_atomic.unwrap()(end.context) };
    assert_eq!(most, 1024);
}

/// A file that another process permits only to be read, mapped for reading and adopted as a buffer;
/// and the first word of the file, mapped for writing.
fn file_for_reading(end: &End) -> (*mut libc::c_void, *mut u64) {
    // SAFETY: new mappings of an own file, which are never unmapped; a live context.
    unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        let fd = libc::memfd_create(c"exported".as_ptr(), flags);
        assert_eq!(libc::ftruncate(fd, 4096), 0);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        let path = std::ffi::CString::new(format!("/proc/self/fd/{fd}")).unwrap();
        let again = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let map = |fd, rights| libc::mmap(null_mut(), 4096, rights, libc::MAP_SHARED, fd, 0);
        let exported = map(fd, libc::PROT_READ | libc::PROT_WRITE);
        let imported = map(again, libc::PROT_READ);
        assert!(exported != libc::MAP_FAILED && imported != libc::MAP_FAILED);
        let adopt = verbs().softdv_adopt_buf.unwrap();
        assert!(!adopt(end.context, again, imported, 4096).is_null());
        (imported, exported.cast())
    }
}

/// What the peer does, and whether it succeeds on memory for reading.
const READINGS: [(&str, bool); 6] = [
    ("READ", true),
    ("WRITE", false),
    ("fetch and add", false),
    ("sum", false),
    ("sum of two", false),
    ("atomic read", true),
];

fn reading_parent(link: &mut Link) {
    for (what, works) in READINGS {
        for region in ["all rights", "to read", "all memory"] {
            let mut end = End::connect(link, 8, 8, 1);
            let (addr, key) = link.numbers();
            let to = (addr, key as u32);
            let buffer = end.buffer(&[1; 16]);
            let mut elements = |op, count| {
                let mut asked = atomic(op, Datatype::Uint64, count, &[1; 16]);
                run_atomic(&mut end, &mut asked, (&buffer, 8 * count), to)
            };
            let status = match what {
                "sum" => elements(Op::Sum, 1),
                "sum of two" => elements(Op::Sum, 2),
                "atomic read" => elements(Op::Read, 1),
                "fetch and add" => fetch_add(&mut end, &buffer, to),
                _ => {
                    let write = what == "WRITE";
                    let opcode = if write {
                        IBV_WR_RDMA_WRITE
                    } else {
                        IBV_WR_RDMA_READ
                    };
                    end.rdma(opcode, &buffer, 8, to.0, to.1, None);
                    end.wait(LIMIT).status
                }
            };
            let wanted = if works {
                IBV_WC_SUCCESS
            } else {
                IBV_WC_REM_ACCESS_ERR
            };
            assert_eq!(status, wanted, "{what}, region: {region}");
            if works {
                assert_eq!(buffer.bytes()[..8], 7_u64.to_ne_bytes(), "{what}");
            }
            link.say("done");
        }
    }
}

/// Memory of another process that may only be read: no operation of a peer, and none of this
/// process, writes there, also not by a region with rights to write, which an on-demand region can
/// have.
fn reading_child(link: &mut Link) {
    for (what, _) in READINGS {
        for region in ["all rights", "to read", "all memory"] {
            let end = End::connect(link, 8, 8, 1);
            let (memory, word) = file_for_reading(&end);
            // SAFETY: inside the mapping.
            unsafe { word.write_volatile(7) };
            let odp = ALL | IBV_ACCESS_ON_DEMAND;
            let (from, len, access) = match region {
                "all rights" => (memory, 4096, odp),
                "to read" => (memory, 4096, IBV_ACCESS_REMOTE_READ),
                _ => (null_mut(), usize::MAX, odp),
            };
            // SAFETY: live domain and mapping.
            let mr = unsafe { ibv_reg_mr(verbs(), end.pd, from, len, access) };
            assert!(!mr.is_null());
            // SAFETY: live.
            link.say_numbers(memory as u64, unsafe { (*mr).rkey }.into());
            link.expect("done");
            let call = verbs().softdv_atomic_own.unwrap();
            let list = libc::iovec {
                iov_base: memory,
                iov_len: 8,
            };
            for (op, wanted) in [(Op::Read, 0), (Op::Sum, libc::EFAULT)] {
                let mut asked = atomic(op, Datatype::Uint64, 1, &[1; 8]);
                let mut result = 0_u64;
                let to = (&raw mut result).cast();
                // SAFETY: live context; the list and the result have the size of the element.
                let done = unsafe { call(end.context, &raw mut asked.raw, &raw const list, 1, to) };
                assert_eq!(done, wanted, "{op:?}");
                assert!(op != Op::Read || result == 7);
            }
            // SAFETY: inside the mapping.
            let now = unsafe { word.read_volatile() };
            assert_eq!(now, 7, "{what}, region: {region}");
        }
    }
}
