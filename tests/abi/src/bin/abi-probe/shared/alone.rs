//! In one process: arguments, addresses, RMA through the region, invalid handles, the order of
//! closing.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{close, control, register};
use abi_tests::weft::*;
use libfabric_sys::*;

use super::{ALL, INVALID, LOOK, Memory, PAGE, World, key};

const HUGE: usize = 2 << 20;

pub(super) fn run(lib: &Lib) {
    let world = World::new(
        lib,
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY,
    );
    arguments(&world);
    places(&world);
    grants(&world);
    not_handles(&world);
    parts(&world);
    rma(&world, true);
    atomics(&world);
    world.setup.close();
    // form: application keys, addresses from 0, on-demand regions
    let world = World::new(lib, FI_MR_LOCAL);
    rma(&world, false);
    refreshed(&world);
    world.setup.close();
}

fn arguments(world: &World) {
    let attr = World::attr(ALL);
    let refused = |change: &dyn Fn(&mut weft_mr_attr), len: usize| {
        let mut wrong = attr;
        change(&mut wrong);
        world.alloc_with(len, &wrong).expect_err("refused")
    };
    assert_eq!(refused(&|_| (), 0), INVALID, "no bytes");
    assert_eq!(refused(&|_| (), usize::MAX), -FI_ENOMEM);
    assert_eq!(refused(&|_| (), usize::MAX / 2 - PAGE), -FI_ENOMEM);
    assert_eq!(refused(&|a| a.size -= 1, PAGE), INVALID);
    assert_eq!(refused(&|a| a.access = 1, PAGE), INVALID);
    assert_eq!(refused(&|a| a.flags = FI_RMA_PMEM, PAGE), -FI_EBADFLAGS);
    assert_eq!(refused(&|a| a.map_flags = 2, PAGE), -FI_EBADFLAGS);
    assert_eq!(
        refused(&|a| a.map_flags = WEFT_MAP_FIXED, PAGE),
        INVALID,
        "fixed, nowhere"
    );
    let odd = |a: &mut weft_mr_attr| {
        a.addr = std::ptr::without_provenance_mut(PAGE * 999 + 8);
        a.map_flags = WEFT_MAP_FIXED;
    };
    assert_eq!(refused(&odd, PAGE), INVALID, "no page's address");
    let (alloc, domain) = (world.ops.mr_alloc.expect("mr_alloc"), world.setup.domain);
    let (mut addr, mut mr) = (null_mut(), null_mut());
    // SAFETY: what is wrong is what is tried.
    unsafe {
        let (addr, mr) = (&raw mut addr, &raw mut mr);
        assert_eq!(alloc(domain, PAGE, std::ptr::null(), addr, mr), INVALID);
        assert_eq!(
            alloc(domain, PAGE, &raw const attr, null_mut(), mr),
            INVALID
        );
        assert_eq!(
            alloc(domain, PAGE, &raw const attr, addr, null_mut()),
            INVALID
        );
        assert_eq!(alloc(null_mut(), PAGE, &raw const attr, addr, mr), INVALID);
        let free = world.ops.mr_free.expect("mr_free");
        assert_eq!(free(null_mut()), INVALID);
        let mut own = [0_u8; 64];
        let ordinary = register(domain, own.as_mut_ptr(), own.len(), FI_SEND);
        assert_eq!(free(ordinary), INVALID, "an ordinary region");
        assert_eq!(world.export(ordinary, FI_SEND), Err(-FI_EOPNOTSUPP));
        assert_eq!(close(ordinary), 0);
        assert_eq!(world.export(ordinary, FI_SEND), Err(INVALID), "closed");
        assert_eq!(world.export(null_mut(), FI_SEND), Err(INVALID));
    }
}

fn places(world: &World) {
    for len in [1, PAGE, PAGE + 1, HUGE, 3 * HUGE + 5] {
        let memory = world.alloc(len, ALL);
        assert!((0..len).all(|at| memory.byte(at) == 0), "zeros");
        let page = if len < HUGE { PAGE } else { HUGE };
        assert!(memory.addr.addr().is_multiple_of(page), "{len}");
        memory.fill(3);
        assert!(memory.has(3));
        assert_eq!(world.free(memory), 0);
        assert_eq!(world.free(memory), INVALID, "freed");
    }
    // the former address of a freed allocation
    let before = world.alloc(PAGE, ALL);
    let taken = world.alloc(PAGE, ALL);
    let (gone, kept) = (before.addr, taken.addr);
    assert_eq!(world.free(before), 0);
    let at = |addr: *mut u8, map_flags| {
        let mut attr = World::attr(ALL);
        attr.addr = addr.cast();
        attr.map_flags = map_flags;
        world.alloc_with(PAGE, &attr)
    };
    // any hint is accepted: an address inside a page means this page
    let near = at(gone.wrapping_add(8), 0).expect("a hint");
    assert_eq!(near.addr, gone);
    assert_eq!(world.free(near), 0);
    let odd = at(std::ptr::without_provenance_mut(1), 0).expect("a hint");
    assert_eq!(world.free(odd), 0);
    let again = at(gone, WEFT_MAP_FIXED).expect("the address is free");
    assert_eq!(again.addr, gone);
    let elsewhere = at(kept, 0).expect("a hint only");
    assert_ne!(elsewhere.addr, kept);
    assert_eq!(at(kept, WEFT_MAP_FIXED).expect_err("taken"), -FI_EADDRINUSE);
    taken.put(0, 77);
    assert_eq!(taken.byte(0), 77, "what was there still is");
    for memory in [again, elsewhere, taken] {
        // closed by `fi_close` instead of `mr_free`
        // SAFETY: an open region.
        assert_eq!(unsafe { close(memory.mr) }, 0);
    }
}

fn grants(world: &World) {
    let memory = world.alloc(2 * PAGE, LOOK | FI_RECV);
    let export = |access| world.export(memory.mr, access);
    assert_eq!(export(FI_REMOTE_WRITE), Err(-FI_EACCES), "not the region's");
    assert_eq!(export(LOOK | FI_REMOTE_WRITE), Err(-FI_EACCES));
    assert_eq!(export(1), Err(INVALID));
    let handle = export(LOOK).expect("mr_export");
    assert_eq!(export(LOOK), Ok(handle.clone()), "the same again");
    assert_ne!(export(FI_SEND), Ok(handle.clone()));
    let call = world.ops.mr_export.expect("mr_export");
    let (mut size, mut bytes) = (WEFT_MR_HANDLE_SIZE - 1, [7_u8; WEFT_MR_HANDLE_SIZE]);
    // SAFETY: an open region.
    unsafe {
        let to = bytes.as_mut_ptr().cast();
        assert_eq!(call(memory.mr, LOOK, to, &raw mut size), -FI_ETOOSMALL);
        assert_eq!(
            (size, bytes),
            (WEFT_MR_HANDLE_SIZE, [7; WEFT_MR_HANDLE_SIZE])
        );
        assert_eq!(call(memory.mr, LOOK, null_mut(), &raw mut size), INVALID);
        assert_eq!(call(memory.mr, LOOK, to, null_mut()), INVALID);
    }
    let import = |access| world.import(&handle, access);
    for access in [FI_RECV, LOOK | FI_RECV, FI_REMOTE_WRITE, ALL] {
        assert_eq!(import(access).expect_err("not granted"), -FI_EACCES);
    }
    let view = import(LOOK).expect("mr_import");
    assert_eq!(view.len, 2 * PAGE);
    assert_ne!(view.addr, memory.addr);
    memory.fill(9);
    assert!(view.has(9), "the same pages");
    // an imported region can be exported again, with at most its own access; the handle is valid
    // after the first region is closed
    assert_eq!(world.export(view.mr, LOOK | FI_RECV), Err(-FI_EACCES));
    let next = world
        .export(view.mr, FI_SEND)
        .expect("mr_export of an import");
    assert_eq!(world.free(memory), 0);
    assert_eq!(import(LOOK).expect_err("its region is closed"), -FI_ENOENT);
    assert!(view.has(9), "it outlives who made it");
    let last = world.import(&next, FI_SEND).expect("of the import");
    assert!(last.has(9));
    assert_eq!(world.free(view), 0);
    assert_eq!(
        world.import(&next, FI_SEND).expect_err("closed"),
        -FI_ENOENT
    );
    assert!(last.has(9));
    assert_eq!(world.free(last), 0);
}

/// Truncated, too long, or modified handles. Forged handles with a valid checksum are tested in the
/// engine.
fn not_handles(world: &World) {
    let memory = world.alloc(PAGE, ALL);
    let handle = world.export(memory.mr, ALL).expect("mr_export");
    let refused = |bytes: &[u8]| world.import(bytes, LOOK).expect_err("no handle");
    for len in 0..handle.len() {
        assert_eq!(refused(&handle[..len]), INVALID, "{len} bytes");
    }
    assert_eq!(refused(&[&handle[..], &[0]].concat()), INVALID, "too long");
    for at in 0..handle.len() {
        for bit in [0, 3, 7] {
            let mut changed = handle.clone();
            changed[at] ^= 1 << bit;
            assert_eq!(refused(&changed), INVALID, "byte {at}");
        }
    }
    let call = world.ops.mr_import.expect("mr_import");
    let (mut addr, mut mr) = (null_mut(), null_mut());
    let attr = World::attr(LOOK);
    // SAFETY: what is wrong is what is tried.
    unsafe {
        let (domain, bytes) = (world.setup.domain, handle.as_ptr().cast());
        let (attr, addr, mr) = (&raw const attr, &raw mut addr, &raw mut mr);
        let size = handle.len();
        assert_eq!(
            call(domain, std::ptr::null(), size, attr, addr, null_mut(), mr),
            INVALID
        );
        assert_eq!(
            call(domain, bytes, size, std::ptr::null(), addr, null_mut(), mr),
            INVALID
        );
        assert_eq!(
            call(null_mut(), bytes, size, attr, addr, null_mut(), mr),
            INVALID
        );
        assert_eq!(
            call(domain, bytes, size, attr, null_mut(), null_mut(), mr),
            INVALID
        );
        // the length output may be NULL
        assert_eq!(call(domain, bytes, size, attr, addr, null_mut(), mr), 0);
        assert_eq!(close(*mr), 0);
    }
    assert_eq!(world.free(memory), 0);
}

/// A region with sub-regions stays open until these are closed.
fn parts(world: &World) {
    if world.lib.version < fi_version(2, 0) {
        return; // fi_mr_attr has no base_mr
    }
    let memory = world.alloc(4 * PAGE, ALL);
    let mut part = null_mut();
    // SAFETY: an open domain, and memory of its region.
    unsafe {
        let iov = libc::iovec {
            iov_base: memory.addr.add(PAGE).cast(),
            iov_len: PAGE,
        };
        let mut attr = std::mem::zeroed::<fi_mr_attr>();
        attr.__bindgen_anon_1.mr_iov = &raw const iov;
        attr.iov_count = 1;
        attr.access = ALL;
        attr.base_mr = memory.mr;
        let (domain, attr) = (world.setup.domain, &raw const attr);
        let ret = call!((*domain).mr, regattr, domain.cast(), attr, 0, &raw mut part);
        assert_eq!(ret, 0, "fi_mr_regattr");
        assert_eq!(world.export(part, FI_SEND), Err(-FI_EOPNOTSUPP), "a part");
        assert_eq!(world.free(memory), -FI_EBUSY);
        assert_eq!(close(memory.mr), -FI_EBUSY);
        memory.fill(4);
        assert!(memory.has(4), "untouched");
        assert_eq!(close(part), 0);
    }
    assert_eq!(world.free(memory), 0);
}

/// Data that peers write with the key of one region is in all regions of the memory.
fn rma(world: &World, virtual_addresses: bool) {
    let pair = world.connect();
    let target = world.alloc(HUGE + PAGE, ALL);
    let handle = world.export(target.mr, ALL).expect("mr_export");
    let second = world.import(&handle, ALL).expect("mr_import");
    let mut attr = World::attr(FI_SEND | FI_RECV | FI_READ | FI_WRITE);
    attr.requested_key = 99;
    let local = world.alloc_with(HUGE + PAGE, &attr).expect("mr_alloc");
    for (memory, seed) in [(target, 1), (second, 2)] {
        let base = if virtual_addresses {
            memory.addr as u64
        } else {
            0
        };
        local.fill(seed);
        world.transfer(&pair, true, local, (base, key(memory.mr)), local.len);
        assert!(target.has(seed) && second.has(seed), "written");
        local.fill(0);
        world.transfer(&pair, false, local, (base, key(memory.mr)), local.len);
        assert!(local.has(seed), "read back");
    }
    // SAFETY: opened here.
    unsafe { pair.close() };
    for memory in [target, second, local] {
        assert_eq!(world.free(memory), 0);
    }
}

/// One word, changed concurrently by atomics through two keys and by CPU instructions: no change is
/// lost.
fn atomics(world: &World) {
    const ROUNDS: u64 = 2_000;
    let pair = world.connect();
    let target = world.alloc(PAGE, ALL);
    let handle = world.export(target.mr, ALL).expect("mr_export");
    let second = world.import(&handle, ALL).expect("mr_import");
    let local = world.alloc(64, ALL);
    // SAFETY: of a page, aligned.
    unsafe { local.addr.cast::<u64>().write(1) };
    // SAFETY: mapped while the thread below runs.
    let word = unsafe { AtomicU64::from_ptr(target.addr.add(64).cast()) };
    let done = AtomicBool::new(false);
    let by_instructions = std::thread::scope(|scope| {
        let counting = scope.spawn(|| {
            let mut count = 0;
            while !done.load(Ordering::Relaxed) {
                word.fetch_add(1 << 32, Ordering::Relaxed);
                count += 1;
            }
            count
        });
        for round in 0..ROUNDS {
            let memory = if round & 1 == 0 { target } else { second };
            world.add(&pair, local, (memory.addr as u64 + 64, key(memory.mr)));
        }
        done.store(true, Ordering::Relaxed);
        counting.join().expect("it counts")
    });
    let found: u64 = word.load(Ordering::Relaxed);
    assert_eq!(
        (found & 0xffff_ffff, found >> 32),
        (ROUNDS, by_instructions & 0xffff_ffff)
    );
    // SAFETY: opened here.
    unsafe { pair.close() };
    for memory in [target, second, local] {
        assert_eq!(world.free(memory), 0);
    }
}

/// Refresh is permitted as for other regions, and has no effect.
fn refreshed(world: &World) {
    let memory: Memory = world.alloc(PAGE, ALL);
    let iov = libc::iovec {
        iov_base: memory.addr.cast(),
        iov_len: PAGE,
    };
    // SAFETY: an open region, and a list of one.
    unsafe {
        let mut modify = std::mem::zeroed::<fi_mr_modify>();
        modify.attr.__bindgen_anon_1.mr_iov = &raw const iov;
        modify.attr.iov_count = 1;
        assert_eq!(control(memory.mr, FI_REFRESH, (&raw mut modify).cast()), 0);
    }
    assert_eq!(world.free(memory), 0);
}
