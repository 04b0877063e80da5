//! Buffers that the application does not register (no `FI_MR_LOCAL`), whose pages are replaced
//! between operations: each operation must access the current pages. Prints `kept` or `each`:
//! whether registrations are cached, or made for each operation.
//!
//! soft0 does not pin pages, so it cannot reveal a stale cached registration:
//! `tests/vm/cases/25-weft-unregistered.sh` tests a device that pins. This role tests the
//! provider's parameters, and memory that is unmapped while its registration is cached.

use std::ffi::c_void;
use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, register};
use abi_tests::pair::{Pair, completion};
use libfabric_sys::*;

const PAGE: usize = 4096;
/// Longer than the copied lengths, and not a whole number of pages.
const LEN: usize = 5 * PAGE + 100;
const ROUNDS: usize = 120;

/// New pages, at any address or in place of others.
fn map(at: *mut u8, len: usize) -> *mut u8 {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED };
    // SAFETY: a new mapping, or in the place of one of this file's.
    let new = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(at.cast(), len, rights, flags, -1, 0)
    };
    assert_ne!(new, libc::MAP_FAILED);
    new.cast()
}

/// Replaces the pages at the same addresses.
fn exchange(at: *mut u8, way: usize) {
    let (old, len) = (at.cast::<c_void>(), LEN.next_multiple_of(PAGE));
    // SAFETY: mappings of this file, which no operation uses now.
    unsafe {
        match way % 6 {
            0 => {
                libc::munmap(old, len);
                map(at, len);
            }
            1 => assert_eq!(libc::madvise(old, len, libc::MADV_DONTNEED), 0),
            2 => {
                let move_to = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let aside = map(null_mut(), len);
                let moved = libc::mremap(old, len, len, move_to, aside.cast::<c_void>());
                assert_eq!(moved, aside.cast());
                map(at, len);
                libc::munmap(moved, len);
            }
            3 => {
                let aside = map(null_mut(), len);
                aside.write_bytes(0x55, len);
                let move_to = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                assert_eq!(libc::mremap(aside.cast(), len, len, move_to, old), old);
            }
            4 => {
                let child = libc::fork();
                if child == 0 {
                    at.write_bytes(0x33, len);
                    libc::_exit(0);
                }
                let mut status = -1;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                assert_eq!(status, 0);
            }
            _ => {
                map(at, len);
            }
        }
    }
}

fn pattern(round: usize, what: usize) -> Vec<u8> {
    (0..LEN)
        .map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ round.wrapping_mul(7) ^ what) as u8)
        .collect()
}

fn fill(at: *mut u8, bytes: &[u8]) {
    // SAFETY: a mapping that has as many.
    unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn look(at: *const u8, wanted: &[u8], what: &str) {
    // SAFETY: a mapping that has as many, which no operation writes to now.
    let found = unsafe { std::slice::from_raw_parts(at, wanted.len()) };
    assert!(found == wanted, "{what}");
}

/// Whether `userfaultfd(2)` watches the memory.
fn is_watched(at: *const u8) -> bool {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("/proc/self/smaps");
    let mut inside = false;
    for line in maps.lines() {
        if let Some((range, _)) = line.split_once(' ')
            && let Some((start, end)) = range.split_once('-')
            && let (Ok(start), Ok(end)) = (
                usize::from_str_radix(start, 16),
                usize::from_str_radix(end, 16),
            )
        {
            inside = (start..end).contains(&(at as usize));
        } else if inside && line.starts_with("VmFlags:") {
            // write-protection by userfaultfd (proc_pid_smaps(5))
            return line.split_whitespace().any(|flag| flag == "uw");
        }
    }
    false
}

/// `fi_writemsg`, or `fi_readmsg`, of a buffer of [`LEN`] bytes. With a fence: soft0 executes other
/// operations in their call, without a registration of the buffer.
unsafe fn access(client: *mut fid_ep, write: bool, buffer: *mut c_void, (addr, key): (u64, u64)) {
    let local = libc::iovec {
        iov_base: buffer,
        iov_len: LEN,
    };
    let remote = fi_rma_iov {
        addr,
        len: LEN,
        key,
    };
    let msg = fi_msg_rma {
        msg_iov: &raw const local,
        desc: null_mut(),
        iov_count: 1,
        addr: 0,
        rma_iov: &raw const remote,
        rma_iov_count: 1,
        context: null_mut(),
        data: 0,
    };
    let flags = FI_FENCE | FI_COMPLETION;
    // SAFETY: a connected endpoint, and buffers that stay until the completion.
    let ret = unsafe {
        match write {
            true => call!((*client).rma, writemsg, client, &raw const msg, flags),
            false => call!((*client).rma, readmsg, client, &raw const msg, flags),
        }
    };
    assert_eq!(ret, 0, "write: {write}");
}

pub(crate) fn run(lib: &Lib) {
    let hints = hints(lib);
    // SAFETY: hints have all their parts.
    let setup = unsafe {
        let native = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        (*(*hints.first()).domain_attr).mr_mode = native;
        let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
        assert_eq!((*(*setup.info.first()).domain_attr).mr_mode, native);
        setup
    };
    let len = LEN.next_multiple_of(PAGE);
    let [from, into, away] = [(); 3].map(|()| map(null_mut(), len));
    let target = map(null_mut(), len);
    // SAFETY: fids as they are opened; memory that is there while operations use it.
    unsafe {
        let cq = setup.cq;
        let pair = Pair::connect(lib, &setup, setup.info.first(), |ep, _| {
            assert_eq!(bind(ep, cq, FI_TRANSMIT | FI_RECV), 0);
        });
        let (client, server) = (pair.client, pair.server);
        let remote = register(setup.domain, target, LEN, FI_REMOTE_READ | FI_REMOTE_WRITE);
        let (addr, key) = (target as u64, (*remote).key);
        let desc = null_mut();
        let complete = |count| {
            for _ in 0..count {
                completion(cq).expect("a good completion");
            }
        };
        for round in 0..ROUNDS {
            exchange(from, round);
            exchange(into, round / 6);
            let sent = pattern(round, 1);
            fill(from, &sent);
            let (to, out) = (into.cast::<c_void>(), from.cast::<c_void>());
            let ret = call!((*server).msg, recv, server, to, LEN, desc, 0, null_mut());
            assert_eq!(ret, 0, "fi_recv");
            let ret = call!((*client).msg, send, client, out, LEN, desc, 0, null_mut());
            assert_eq!(ret, 0, "fi_send");
            complete(2);
            look(into, &sent, "received");

            // the same buffer again, now with a cached registration
            let written = pattern(round, 2);
            fill(from, &written);
            access(client, true, out, (addr, key));
            complete(1);
            look(target, &written, "written");

            // unmapped and mapped again while no operation uses it
            exchange(into, round);
            access(client, false, to, (addr, key));
            complete(1);
            look(into, &written, "read");
        }
        println!("{}", if is_watched(from) { "kept" } else { "each" });

        // a cached registration of memory that is unmapped
        access(client, true, away.cast(), (addr, key));
        complete(1);
        assert_eq!(libc::mprotect(away.cast(), len, libc::PROT_NONE), 0);
        assert_eq!(libc::munmap(away.cast(), len), 0);
        assert_eq!(close(remote), 0);
        pair.close();
    }
    setup.close();
    for at in [from, into, target] {
        // SAFETY: nothing uses it.
        assert_eq!(unsafe { libc::munmap(at.cast(), len) }, 0);
    }
    println!("buffers need no registration");
}
