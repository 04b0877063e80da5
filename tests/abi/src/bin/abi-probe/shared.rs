//! Memory that the provider allocates, in one process and in several: `mr_alloc`, `mr_export`,
//! `mr_import` and `mr_free` of `weft_mr_ops`. `docs/shared-regions.md` specifies them.

mod alone;
mod others;

use std::ffi::c_void;
use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind};
use abi_tests::pair::{Pair, completion};
use abi_tests::weft::*;
use libfabric_sys::*;

pub(crate) use others::{exporter, importer, storer, stranger};

const PAGE: usize = 4096;
const INVALID: i32 = -FI_EINVAL;
/// All access rights of a region.
const ALL: u64 = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
const LOOK: u64 = FI_SEND | FI_REMOTE_READ;
/// The application's key.
const KEY: u64 = 0x5ea;

/// Shared memory and its region.
#[derive(Clone, Copy, Debug)]
struct Memory {
    addr: *mut u8,
    len: usize,
    mr: *mut fid_mr,
}

impl Memory {
    fn byte(self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: mapped; others write there.
        unsafe { self.addr.add(at).read_volatile() }
    }

    fn put(self, at: usize, byte: u8) {
        assert!(at < self.len);
        // SAFETY: mapped writable; others read there.
        unsafe { self.addr.add(at).write_volatile(byte) };
    }

    /// Fills the memory with bytes that depend on a seed.
    fn fill(self, seed: u8) {
        (0..self.len).for_each(|at| self.put(at, (at as u8).wrapping_mul(13) ^ seed));
    }

    fn has(self, seed: u8) -> bool {
        (0..self.len).all(|at| self.byte(at) == (at as u8).wrapping_mul(13) ^ seed)
    }
}

struct World {
    lib: Lib,
    setup: Setup,
    ops: &'static weft_mr_ops,
}

impl World {
    fn new(lib: &Lib, mr_mode: i32) -> Self {
        let hints = hints(lib);
        // SAFETY: hints have all their parts; an open domain.
        unsafe {
            (*hints.first()).caps = FI_MSG | FI_RMA | FI_ATOMIC;
            (*(*hints.first()).domain_attr).mr_mode = mr_mode;
            let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
            let ops = mr_ops(setup.domain);
            let lib = *lib;
            Self { lib, setup, ops }
        }
    }

    fn connect(&self) -> Pair {
        let (cq, info) = (self.setup.cq, self.setup.info.first());
        // SAFETY: fids as they are opened.
        unsafe {
            Pair::connect(&self.lib, &self.setup, info, |ep, _| {
                assert_eq!(bind(ep, cq, FI_TRANSMIT | FI_RECV), 0);
            })
        }
    }

    fn attr(access: u64) -> weft_mr_attr {
        weft_mr_attr {
            size: size_of::<weft_mr_attr>(),
            access,
            requested_key: KEY,
            flags: 0,
            addr: null_mut(),
            map_flags: 0,
            context: null_mut(),
        }
    }

    fn alloc_with(&self, len: usize, attr: &weft_mr_attr) -> Result<Memory, i32> {
        let (mut addr, mut mr) = (null_mut(), null_mut());
        let call = self.ops.mr_alloc.expect("mr_alloc");
        // SAFETY: an open domain.
        let ret = unsafe { call(self.setup.domain, len, attr, &raw mut addr, &raw mut mr) };
        let addr = addr.cast();
        match ret {
            0 => Ok(Memory { addr, len, mr }),
            ret => {
                assert!(addr.is_null() && mr.is_null(), "outputs after an error");
                Err(ret)
            }
        }
    }

    fn alloc(&self, len: usize, access: u64) -> Memory {
        self.alloc_with(len, &Self::attr(access)).expect("mr_alloc")
    }

    fn import_with(&self, handle: &[u8], attr: &weft_mr_attr) -> Result<Memory, i32> {
        let (mut addr, mut len, mut mr) = (null_mut(), 0, null_mut());
        let call = self.ops.mr_import.expect("mr_import");
        let (bytes, size) = (handle.as_ptr().cast(), handle.len());
        // SAFETY: an open domain, a handle of that size.
        let ret = unsafe {
            let domain = self.setup.domain;
            call(
                domain,
                bytes,
                size,
                attr,
                &raw mut addr,
                &raw mut len,
                &raw mut mr,
            )
        };
        let addr = addr.cast();
        match ret {
            0 => Ok(Memory { addr, len, mr }),
            ret => {
                assert!(
                    addr.is_null() && mr.is_null() && len == 0,
                    "outputs after an error"
                );
                Err(ret)
            }
        }
    }

    /// Imports under another key than that of the allocation.
    fn import(&self, handle: &[u8], access: u64) -> Result<Memory, i32> {
        let mut attr = Self::attr(access);
        attr.requested_key = KEY + 1;
        self.import_with(handle, &attr)
    }

    fn export(&self, mr: *mut fid_mr, access: u64) -> Result<Vec<u8>, i32> {
        let mut handle = vec![0_u8; WEFT_MR_HANDLE_SIZE];
        let mut size = handle.len();
        let call = self.ops.mr_export.expect("mr_export");
        // SAFETY: a region, and room for as much.
        let ret = unsafe { call(mr, access, handle.as_mut_ptr().cast(), &raw mut size) };
        assert!(ret != 0 || size == handle.len());
        if ret == 0 { Ok(handle) } else { Err(ret) }
    }

    fn free(&self, memory: Memory) -> i32 {
        let call = self.ops.mr_free.expect("mr_free");
        // SAFETY: a region.
        unsafe { call(memory.mr) }
    }

    /// One operation between the pair, which must succeed. The descriptor is that of `local`.
    fn transfer(&self, pair: &Pair, write: bool, local: Memory, at: (u64, u64), len: usize) {
        let (addr, key) = at;
        let buf = local.addr.cast::<c_void>();
        // SAFETY: connected endpoints; the memory outlives the operation.
        unsafe {
            let (ep, desc) = (pair.client, (*local.mr).mem_desc);
            let ret = if write {
                call!((*ep).rma, write, ep, buf, len, desc, 0, addr, key, buf)
            } else {
                call!((*ep).rma, read, ep, buf, len, desc, 0, addr, key, buf)
            };
            assert_eq!(ret, 0, "posting");
            assert_eq!(
                completion(self.setup.cq).map(|entry| entry.op_context),
                Ok(buf)
            );
        }
    }

    /// Adds to a word at the peer.
    fn add(&self, pair: &Pair, local: Memory, at: (u64, u64)) {
        let (addr, key) = at;
        let buf = local.addr.cast::<c_void>();
        // SAFETY: connected endpoints; the memory outlives the operation.
        unsafe {
            let (ep, desc) = (pair.client, (*local.mr).mem_desc);
            let ret = call!(
                (*ep).atomic,
                write,
                ep,
                buf,
                1,
                desc,
                0,
                addr,
                key,
                FI_UINT64,
                FI_SUM,
                buf
            );
            assert_eq!(ret, 0, "posting");
            assert_eq!(
                completion(self.setup.cq).map(|entry| entry.op_context),
                Ok(buf)
            );
        }
    }
}

/// The key that peers use.
fn key(mr: *mut fid_mr) -> u64 {
    // SAFETY: an open region.
    unsafe { (*mr).key }
}

pub(crate) fn run(lib: &Lib) {
    alone::run(lib);
    others::run(lib);
    println!("memory is shared as it was granted, and outlives its maker");
}
