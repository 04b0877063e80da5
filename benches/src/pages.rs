//! Pages of regions: registering new memory pinned, on demand, and in the background; a peer's
//! first access to a page, with and without a prefetch; and memory that processes share, compared
//! with ordinary memory.
//!
//! Every round has new memory, so the kernel allocates its pages in the round. The process is not
//! pinned to a processor, because background registration uses several threads.

use std::hint::black_box;
use std::ptr::null_mut;
use std::time::Instant;

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control};
use abi_tests::pair::Pair;
use abi_tests::weft::{WEFT_MR_HANDLE_SIZE, mr_ops, weft_mr_attr};
use libfabric_sys::*;

use crate::regions::{open, register, row};
use crate::stats::{Quartiles, size, time};
use crate::subject::{Device, Side, verbs};

const NATIVE: i32 = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
const ON_DEMAND: i32 = NATIVE & !FI_MR_ALLOCATED;
const MIDDLE: usize = 64 << 20;
const PAGE: usize = 4096;

/// A mapping without pages; with `small`, the kernel uses no huge pages for it.
struct Fresh(*mut u8, usize);

impl Fresh {
    fn new(len: usize, small: bool) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(null_mut(), len, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            if small {
                libc::madvise(at, len, libc::MADV_NOHUGEPAGE);
            }
            Self(at.cast(), len)
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // SAFETY: this object's mapping; its regions are closed.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

fn since(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

fn end(mr: *mut fid_mr) {
    // SAFETY: closed once.
    assert_eq!(unsafe { close(mr) }, 0);
}

/// The greatest of 4 GiB, 2 GiB, 1 GiB, ... that is at most a third of the available memory, but at
/// least [`MIDDLE`].
fn large() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
    let spare = (kib.unwrap_or(0) / 3) << 10;
    let mut len = 4 << 30;
    while len > spare && len > MIDDLE {
        len /= 2;
    }
    len
}

/// Waits for the completion of a background registration.
fn completed(eq: *mut fid_eq) {
    let mut number = 0;
    let mut entry = [0_u64; 16];
    // SAFETY: an open queue and a buffer of that size.
    let ret = unsafe {
        let (to, len) = (entry.as_mut_ptr().cast(), size_of_val(&entry));
        call!((*eq).ops, sread, eq, &raw mut number, to, len, 60_000, 0)
    };
    assert!(ret > 0 && number == FI_MR_COMPLETE, "{ret} {number}");
}

/// New memory of this length: `ibv_reg_mr`, `fi_mr_reg` pinned, on demand, and in the background;
/// of the last one the time of the call, and the time until it completes.
fn fresh(lib: &Lib, len: usize, rounds: usize) {
    let access = FI_RECV | FI_REMOTE_WRITE;
    let pinned = open(lib, NATIVE);
    let background = open(lib, NATIVE);
    // SAFETY: open fids.
    let bound = unsafe { bind(background.domain, background.eq, FI_REG_MR) };
    assert_eq!(bound, 0, "fi_domain_bind");
    let on_demand = open(lib, ON_DEMAND);
    let device = Device::open(Side::First);
    let mut figures = [const { Vec::new() }; 5];
    for _ in 0..rounds {
        let memory = Fresh::new(len, false);
        let rights = rdma_core_sys::IBV_ACCESS_LOCAL_WRITE | rdma_core_sys::IBV_ACCESS_REMOTE_WRITE;
        let start = Instant::now();
        // SAFETY: a live domain; the memory outlives the registration.
        unsafe {
            let mr = (verbs().ibv_reg_mr)(device.pd(), memory.0.cast(), len, rights.cast_signed());
            figures[0].push(since(start));
            assert!(!mr.is_null(), "ibv_reg_mr");
            assert_eq!((verbs().ibv_dereg_mr)(mr), 0);
        }
        // one at a time, so that for each the kernel has the same free memory
        drop(memory);
        for (setup, to) in [(&pinned, 1), (&on_demand, 2), (&background, 3)] {
            let memory = Fresh::new(len, false);
            let start = Instant::now();
            // SAFETY: the memory outlives the region.
            let mr = unsafe { register(setup, memory.0, len, access, 0) };
            figures[to].push(since(start));
            if to == 3 {
                completed(setup.eq);
                figures[4].push(since(start));
            }
            end(mr);
        }
    }
    let [verbs, pinned_reg, paged, called, done] = figures;
    row("pinned", len, &pinned_reg, &verbs);
    row("on demand", len, &paged, &verbs);
    row("background, the call", len, &called, &verbs);
    row("background, its end", len, &done, &verbs);
    let (paged, pinned_reg) = (
        Quartiles::of(&paged).median,
        Quartiles::of(&pinned_reg).median,
    );
    let times = pinned_reg / paged;
    let verdict = if times >= 10.0 { "met" } else { "MISSED" };
    println!("on demand is {times:.0} times cheaper than pinned; wanted 10: {verdict}");
    for setup in [pinned, background, on_demand] {
        setup.close();
    }
}

/// A peer's writes of one page each, to absent pages and to prefetched pages.
fn first_touch(lib: &Lib) {
    let setup = open(lib, ON_DEMAND);
    let (cq, info) = (setup.cq, setup.info.first());
    let source = vec![7_u8; PAGE];
    // SAFETY: open fids; the buffers outlive their use.
    unsafe {
        let pair = Pair::connect(lib, &setup, info, |ep, _| {
            assert_eq!(bind(ep, cq, FI_TRANSMIT | FI_RECV), 0);
        });
        let local = register(&setup, source.as_ptr().cast_mut(), PAGE, FI_WRITE, 0);
        let mut figures = [const { Vec::new() }; 3];
        for _ in 0..7 {
            for fetched in [false, true] {
                let memory = Fresh::new(MIDDLE, true);
                let mr = register(&setup, memory.0, MIDDLE, FI_REMOTE_WRITE, 0);
                if fetched {
                    let start = Instant::now();
                    refresh(mr, memory.0, MIDDLE);
                    figures[2].push(since(start) / (MIDDLE / PAGE) as f64);
                }
                let start = Instant::now();
                for at in (0..MIDDLE).step_by(PAGE) {
                    write(
                        &setup,
                        &pair,
                        local,
                        &source,
                        memory.0.add(at) as u64,
                        (*mr).key,
                    );
                }
                figures[usize::from(fetched)].push(since(start) / (MIDDLE / PAGE) as f64);
                end(mr);
            }
        }
        let [first, later, refreshing] = figures;
        println!(
            "\na peer's write to each page: fetched by fi_mr_refresh (quartiles)  not there  ratio"
        );
        row("4 KiB", MIDDLE, &later, &first);
        let each = Quartiles::of(&refreshing).median;
        println!("fi_mr_refresh: {} a page", time(each));
        end(local);
        pair.close();
        setup.close();
    }
}

unsafe fn refresh(mr: *mut fid_mr, at: *mut u8, len: usize) {
    let iov = libc::iovec {
        iov_base: at.cast(),
        iov_len: len,
    };
    // SAFETY: an open region, and a list of one.
    unsafe {
        let mut modify = std::mem::zeroed::<fi_mr_modify>();
        modify.attr.__bindgen_anon_1.mr_iov = &raw const iov;
        modify.attr.iov_count = 1;
        assert_eq!(control(mr, FI_REFRESH, (&raw mut modify).cast()), 0);
    }
}

unsafe fn write(
    setup: &Setup,
    pair: &Pair,
    local: *mut fid_mr,
    source: &[u8],
    addr: u64,
    key: u64,
) {
    // SAFETY: open fids; the buffer outlives the operation.
    unsafe {
        let (ep, cq, desc) = (pair.client, setup.cq, (*local).mem_desc);
        let (buf, len) = (source.as_ptr().cast(), source.len());
        let ret = call!(
            (*ep).rma,
            write,
            ep,
            buf,
            len,
            desc,
            0,
            addr,
            key,
            null_mut()
        );
        assert_eq!(ret, 0);
        let mut entry = std::mem::MaybeUninit::<fi_cq_data_entry>::uninit();
        while call!((*cq).ops, read, cq, entry.as_mut_ptr().cast(), 1) != 1 {}
    }
}

/// Copies into memory of `mr_import`, compared with copies into the process's own memory.
fn shared(lib: &Lib) {
    let setup = open(lib, NATIVE);
    let attr = weft_mr_attr {
        size: size_of::<weft_mr_attr>(),
        access: FI_RECV | FI_REMOTE_WRITE,
        requested_key: 0,
        flags: 0,
        addr: null_mut(),
        map_flags: 0,
        context: null_mut(),
    };
    let (mut addr, mut mr, mut view, mut imported) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    let mut handle = [0_u8; WEFT_MR_HANDLE_SIZE];
    let mut bytes = handle.len();
    // SAFETY: an open domain, and room for a handle.
    unsafe {
        let (ops, attr) = (mr_ops(setup.domain), &raw const attr);
        let alloc = ops.mr_alloc.expect("mr_alloc");
        assert_eq!(
            alloc(setup.domain, MIDDLE, attr, &raw mut addr, &raw mut mr),
            0
        );
        let export = ops.mr_export.expect("mr_export");
        let to = handle.as_mut_ptr().cast();
        assert_eq!(export(mr, FI_RECV | FI_REMOTE_WRITE, to, &raw mut bytes), 0);
        let import = ops.mr_import.expect("mr_import");
        let (from, view, out) = (handle.as_ptr().cast(), &raw mut view, &raw mut imported);
        assert_eq!(
            import(setup.domain, from, bytes, attr, view, null_mut(), out),
            0
        );
    }
    let own = Fresh::new(MIDDLE, false);
    let source = vec![1_u8; MIDDLE];
    println!("\nmemcpy into a shared region (quartiles)  into ordinary memory  ratio");
    for len in [64, PAGE, 1 << 20, MIDDLE] {
        let count = ((256 << 20) / len).min(200_000);
        let mut figures = [const { Vec::new() }; 2];
        for round in 0..16 {
            for (to, into) in [(view.cast::<u8>(), 0), (own.0, 1)] {
                let start = Instant::now();
                for i in 0..count {
                    let at = (i * len) % MIDDLE;
                    // SAFETY: inside both buffers.
                    unsafe {
                        let from = black_box(source.as_ptr().add(at));
                        to.add(at).copy_from_nonoverlapping(from, len);
                    }
                }
                // the first round allocates the pages
                if round > 0 {
                    figures[into].push(since(start) / count as f64);
                }
            }
        }
        let [ours, theirs] = figures;
        row("copy", len, &ours, &theirs);
    }
    end(imported);
    end(mr);
    setup.close();
}

/// `weft-bench pages`: registration of new memory, first access, and shared memory.
pub(crate) fn main() {
    let path = std::env::var("WEFT_LIBFABRIC").unwrap_or_else(|_| String::from("libfabric.so.1"));
    let lib = Lib::open(&path);
    println!("registering fresh memory: fi_mr_reg (quartiles)  ibv_reg_mr  ratio");
    fresh(&lib, MIDDLE, 15);
    let most = large();
    println!("at most {} are registered here", size(most));
    fresh(&lib, most, 3);
    first_touch(&lib);
    shared(&lib);
    lib.close();
}
