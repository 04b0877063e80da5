//! Memory regions: registering and closing by size, compared with `ibv_reg_mr` of the same device;
//! and the time that a key of the directory adds compared with an rkey, from one region to a
//! million.
//!
//! Keys are measured with writes of 0 bytes in one process: a write without the copy, which the
//! kernel makes and which takes about a hundred times as long as resolving a key.

use std::hint::black_box;
use std::ptr::null_mut;
use std::time::Instant;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close};
use abi_tests::pair::{Pair, Role};
use libfabric_sys::*;
use rdma_core_sys::{IBV_ACCESS_ON_DEMAND, ibv_mr};

use crate::stats::{Quartiles, size, time};
use crate::subject::{Device, Side, verbs};
use crate::worker::pin;

const ROUNDS: usize = 15;
const SIZES: [usize; 6] = [4 << 10, 64 << 10, 1 << 20, 64 << 20, 1 << 30, 4 << 30];
/// Numbers of published regions.
const COUNTS: [usize; 5] = [1, 64, 4096, 65_536, 1_000_000];
/// Maximum number of regions with native keys: the device has 2^20 - 1 regions for both kinds.
const NATIVE: usize = 40_000;
/// Writes in one measurement.
const WRITES: usize = 20_000;

/// A domain with this `mr_mode`.
pub(crate) fn open(lib: &Lib, mr_mode: i32) -> Setup {
    let hints = hints(lib);
    // SAFETY: `hints` allocates all attribute structures.
    unsafe {
        let info = hints.first();
        (*info).caps = FI_MSG | FI_RMA;
        (*(*info).domain_attr).mr_mode = mr_mode;
        (*(*info).domain_attr).threading = FI_THREAD_DOMAIN;
    }
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
    // SAFETY: an `fi_info` from fi_getinfo has all attribute structures.
    let got = unsafe { (*(*setup.info.first()).domain_attr).mr_mode };
    assert_eq!(got, mr_mode, "the form that was asked for");
    setup
}

pub(crate) unsafe fn register(
    setup: &Setup,
    at: *mut u8,
    len: usize,
    access: u64,
    key: u64,
) -> *mut fid_mr {
    let (domain, mut mr) = (setup.domain, null_mut());
    // SAFETY: the caller's domain and memory.
    unsafe {
        let (fid, out) = (&raw mut (*domain).fid, &raw mut mr);
        let reg = (*(*domain).mr).reg.expect("a slot");
        let ret = reg(fid, at.cast(), len, access, 0, key, 0, out, null_mut());
        assert_eq!(ret, 0, "fi_mr_reg");
    }
    mr
}

/// Present pages that use no memory: every page is the kernel's page of zeros.
fn zeros(len: usize) -> *mut u8 {
    // SAFETY: a new mapping, read in its bounds.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = libc::mmap(
            null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        let at = at.cast::<u8>();
        for page in (0..len).step_by(4096) {
            black_box(at.add(page).read_volatile());
        }
        at
    }
}

/// The time since `start` divided by `count`; NaN for 0.
fn each(start: Instant, count: usize) -> f64 {
    start.elapsed().as_nanos() as f64 / if count == 0 { f64::NAN } else { count as f64 }
}

/// The text of a time; NaN is no time.
fn shown(nanos: f64) -> String {
    if nanos.is_nan() {
        String::from("-")
    } else {
        time(nanos)
    }
}

pub(crate) fn row(name: &str, len: usize, own: &[f64], peer: &[f64]) {
    let (own, peer) = (Quartiles::of(own), Quartiles::of(peer));
    let ratio = own.median / peer.median;
    println!(
        "{name:<24} {:>8}  {:>9} ({} - {})  {:>9}  {ratio:>5.2}",
        size(len),
        time(own.median),
        time(own.low),
        time(own.high),
        time(peer.median),
    );
}

/// Registers and closes regions of each size, pinned and on demand. The regions are read-only, so
/// that the checks that a device makes for each page are measured without using memory.
fn registration(lib: &Lib) {
    let native = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    let memory = zeros(SIZES[SIZES.len() - 1]);
    let device = Device::open(Side::First);
    println!(
        "registering and closing: fi_mr_reg, fi_close (quartiles)  ibv_reg_mr, ibv_dereg_mr  ratio"
    );
    for (kind, mode, rights) in [
        ("pinned", native, 0),
        ("on demand", native & !FI_MR_ALLOCATED, IBV_ACCESS_ON_DEMAND),
    ] {
        let setup = open(lib, mode);
        for len in SIZES {
            let count = ((1 << 22) / len).clamp(1, 200);
            let mut figures = [const { Vec::new() }; 4];
            for _ in 0..ROUNDS {
                let start = Instant::now();
                let mrs: Vec<_> = (0..count)
                    // SAFETY: the memory is never freed.
                    .map(|_| unsafe { register(&setup, memory, len, FI_SEND | FI_REMOTE_READ, 0) })
                    .collect();
                figures[0].push(start.elapsed().as_nanos() as f64 / count as f64);
                let start = Instant::now();
                for mr in mrs {
                    // SAFETY: closed once.
                    assert_eq!(unsafe { close(mr) }, 0);
                }
                figures[1].push(start.elapsed().as_nanos() as f64 / count as f64);
                let access = rdma_core_sys::IBV_ACCESS_REMOTE_READ | rights;
                let start = Instant::now();
                let mrs: Vec<*mut ibv_mr> = (0..count)
                    // SAFETY: a live domain; the memory is never freed.
                    .map(|_| unsafe {
                        (verbs().ibv_reg_mr)(device.pd(), memory.cast(), len, access.cast_signed())
                    })
                    .collect();
                figures[2].push(start.elapsed().as_nanos() as f64 / count as f64);
                assert!(mrs.iter().all(|mr| !mr.is_null()), "ibv_reg_mr");
                let start = Instant::now();
                for mr in mrs {
                    // SAFETY: deregistered once.
                    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(mr) }, 0);
                }
                figures[3].push(start.elapsed().as_nanos() as f64 / count as f64);
            }
            let [reg, end, verbs_reg, verbs_end] = figures;
            row(&format!("register, {kind}"), len, &reg, &verbs_reg);
            row(&format!("close, {kind}"), len, &end, &verbs_end);
        }
        setup.close();
    }
}

/// A connected pair, and regions of 8 bytes of the second endpoint.
struct Keys {
    setup: Setup,
    pair: Pair,
    local: *mut fid_mr,
    source: *mut u8,
    memory: *mut u8,
    mrs: Vec<*mut fid_mr>,
}

impl Keys {
    fn open(lib: &Lib, mr_mode: i32) -> Self {
        let setup = open(lib, mr_mode);
        // SAFETY: fids as they are opened; memory is never freed.
        unsafe {
            let cq = setup.cq;
            let pair = Pair::connect(lib, &setup, setup.info.first(), |ep, _: Role| {
                assert_eq!(bind(ep, cq, FI_TRANSMIT | FI_RECV), 0);
            });
            let source = zeros(4096);
            let local = register(&setup, source, 4096, FI_WRITE, 0);
            Self {
                setup,
                pair,
                local,
                source,
                memory: zeros(8 * COUNTS[COUNTS.len() - 1]),
                mrs: Vec::new(),
            }
        }
    }

    /// Publishes regions until there are `count`; returns the time of one registration.
    fn grow(&mut self, count: usize) -> f64 {
        let start = Instant::now();
        let before = self.mrs.len();
        for i in before..count {
            // SAFETY: inside the memory.
            let mr = unsafe {
                let at = self.memory.add(8 * i);
                register(&self.setup, at, 8, FI_REMOTE_WRITE, i as u64 + 1)
            };
            self.mrs.push(mr);
        }
        each(start, count - before)
    }

    /// One write of 0 bytes to a region, and its completion.
    #[inline(always)]
    fn write(&self, index: usize, virt_addr: bool) {
        // SAFETY: open fids; the buffers are never freed.
        unsafe {
            let (ep, cq, mr) = (self.pair.client, self.setup.cq, self.mrs[index]);
            let addr = if virt_addr {
                self.memory.add(8 * index) as u64
            } else {
                0
            };
            let desc = (*self.local).mem_desc;
            let (buf, key) = (self.source.cast(), (*mr).key);
            let ret = call!((*ep).rma, write, ep, buf, 0, desc, 0, addr, key, null_mut());
            assert_eq!(ret, 0);
            let mut entry = std::mem::MaybeUninit::<fi_cq_data_entry>::uninit();
            while call!((*cq).ops, read, cq, entry.as_mut_ptr().cast(), 1) != 1 {}
        }
    }

    /// The time of one write, for a write to each of these regions in turn.
    fn time(&self, order: &[usize], virt_addr: bool) -> f64 {
        let start = Instant::now();
        for &index in order {
            self.write(index, virt_addr);
        }
        each(start, order.len())
    }

    fn close(self) -> f64 {
        // SAFETY: closed once.
        unsafe {
            self.pair.close();
            let count = self.mrs.len();
            let start = Instant::now();
            for mr in self.mrs {
                assert_eq!(close(mr), 0);
            }
            let each = start.elapsed().as_nanos() as f64 / count as f64;
            assert_eq!(close(self.local), 0);
            self.setup.close();
            each
        }
    }
}

/// `count` region numbers below `among`, in an order without a pattern.
fn shuffled(count: usize, among: usize) -> Vec<usize> {
    let mut state = 1_u64;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % among
        })
        .collect()
}

/// Native keys compared with application keys, by the number of published regions.
fn keys(lib: &Lib) {
    let native = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    let mut own = Keys::open(lib, FI_MR_LOCAL | FI_MR_ALLOCATED);
    let mut peer = Keys::open(lib, native);
    println!("\nwrites of no bytes: application's keys, kept (quartiles)  native keys  difference");
    let (mut cold, mut made) = (Vec::new(), Vec::new());
    for count in COUNTS {
        let before = own.mrs.len();
        let natives = count.min(NATIVE);
        let old_natives = peer.mrs.len();
        made.push((count, own.grow(count), peer.grow(natives)));
        // one write for each new region: each write looks a key up
        let fresh: Vec<usize> = (before..count).collect();
        let looked_up = own.time(&fresh, false);
        let fresh: Vec<usize> = (old_natives..natives).collect();
        cold.push((count, looked_up, peer.time(&fresh, true)));
        for (name, order) in [("the same 64", 64), ("any", usize::MAX)] {
            let native = shuffled(WRITES, natives.min(order));
            let order = shuffled(WRITES, count.min(order));
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                for turn in 0..2 {
                    if (round + turn) % 2 == 0 {
                        ours.push(own.time(&order, false));
                    } else {
                        theirs.push(peer.time(&native, true));
                    }
                }
            }
            let (ours, theirs) = (Quartiles::of(&ours), Quartiles::of(&theirs));
            let more = ours.median - theirs.median;
            let verdict = if more <= 15.0 { "met" } else { "MISSED" };
            println!(
                "{:<24} {count:>8}  {:>9} ({} - {})  {:>9}  {more:>+6.1} ns  <= 15: {verdict}",
                format!("write, {name} of"),
                time(ours.median),
                time(ours.low),
                time(ours.high),
                time(theirs.median),
            );
        }
    }
    println!("\nthe first write to each region: application's keys, looked up  native keys");
    for (count, ours, theirs) in cold {
        println!(
            "{:<24} {count:>8}  {:>9}  {:>9}",
            "first write, up to",
            shown(ours),
            shown(theirs)
        );
    }
    println!("\nregistering 8 bytes: application's keys, published  native keys");
    for (count, ours, theirs) in made {
        println!(
            "{:<24} {count:>8}  {:>9}  {:>9}",
            "register, up to",
            shown(ours),
            shown(theirs)
        );
    }
    let (ours, theirs) = (own.close(), peer.close());
    println!(
        "{:<24} {:>8}  {:>9}  {:>9}",
        "close, all of",
        COUNTS[4],
        shown(ours),
        shown(theirs)
    );
}

/// `weft-bench regions`: registration by size, and keys by number of regions.
pub(crate) fn main() {
    pin(0);
    let path = std::env::var("WEFT_LIBFABRIC").unwrap_or_else(|_| String::from("libfabric.so.1"));
    let lib = Lib::open(&path);
    registration(&lib);
    keys(&lib);
    lib.close();
}
