//! A device that keeps references to pages as hardware does: each registration is a pipe.

#![allow(unsafe_code, reason = "pipes, and pages of a caller")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::PAGE;
use crate::errno::{FiErrno, Result};
use crate::mr::cache::{Cache, Got, Registrar};
use crate::verbs::Lkey;

/// A pipe that keeps the pages that were mapped when it was made (`vmsplice(2)`).
#[derive(Debug)]
pub(super) struct Pipe {
    read: OwnedFd,
    _write: OwnedFd,
    start: u64,
}

/// Maximum size of a pipe without privileges, the usual `pipe-max-size` of pipe(7). Larger
/// registrations are refused, as a device may refuse a merged one. Reading a registration takes a
/// second pipe with two more pages.
const MOST: usize = 1 << 20;

fn pipe(len: usize) -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: `fds` has two elements; the descriptors in it are new.
    unsafe {
        if libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
            return Err(FiErrno::last());
        }
        let ends = (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]));
        if libc::fcntl(fds[1], libc::F_SETPIPE_SZ, len) < 0 {
            return Err(FiErrno::ENOMEM);
        }
        Ok(ends)
    }
}

/// As [`pipe`]; retries for up to 60 seconds while other processes of the user have no room left
/// (`pipe-user-pages-soft` of pipe(7)).
fn pipe_soon(len: usize) -> (OwnedFd, OwnedFd) {
    let start = Instant::now();
    loop {
        match pipe(len) {
            Ok(ends) => return ends,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Pipe {
    /// The bytes of the pages that the registration has.
    fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let offset = (addr - self.start) as usize;
        let (from, to) = pipe_soon(offset + len + 2 * PAGE);
        let mut bytes = vec![0; offset + len];
        // SAFETY: pipes of this test; `bytes` has that size.
        unsafe {
            let got = libc::tee(self.read.as_raw_fd(), to.as_raw_fd(), offset + len, 0);
            assert_eq!(got, (offset + len) as isize);
            let mut at = 0;
            while at < bytes.len() {
                let room = bytes[at..].as_mut_ptr().cast();
                let got = libc::read(from.as_raw_fd(), room, bytes.len() - at);
                assert!(got > 0, "{}", FiErrno::last());
                at += got as usize;
            }
        }
        bytes.split_off(offset)
    }
}

/// The registrar whose registrations are pipes.
#[derive(Debug)]
pub(super) struct Pipes;

impl Registrar for Pipes {
    type Mr = Arc<Pipe>;
    type Key = Lkey;
    unsafe fn register(&self, start: u64, len: u64, _: bool) -> Result<(Arc<Pipe>, Lkey)> {
        if len as usize > MOST - 2 * PAGE {
            return Err(FiErrno::ENOMEM);
        }
        // a buffer of one operation need not begin at a page
        let before = start % PAGE as u64;
        let (read, write) = pipe_soon((before + len) as usize + PAGE);
        // a device's pin makes a private page the mapping's own, as a write does (FOLL_LONGTERM)
        // SAFETY: changes no byte.
        let ret = unsafe {
            let place = std::ptr::without_provenance_mut((start - before) as usize);
            libc::madvise(place, (before + len) as usize, libc::MADV_POPULATE_WRITE)
        };
        if ret != 0 {
            return Err(FiErrno::last());
        }
        let mut at = 0;
        while at < len {
            let part = libc::iovec {
                iov_base: std::ptr::without_provenance_mut((start + at) as usize),
                iov_len: (len - at) as usize,
            };
            // SAFETY: the kernel refuses memory that is not mapped.
            let got = unsafe { libc::vmsplice(write.as_raw_fd(), &raw const part, 1, 0) };
            if got <= 0 {
                return Err(FiErrno::last());
            }
            at += got as u64;
        }
        let pipe = Pipe {
            read,
            _write: write,
            start,
        };
        Ok((Arc::new(pipe), Lkey::default()))
    }
}

pub(super) type Tested = Cache<Pipes>;

/// Number of uses of a cached registration.
pub(super) static HITS: AtomicU64 = AtomicU64::new(0);

/// Checks that the device reads the bytes that are in memory.
pub(super) fn transfer(cache: &Tested, place: *const u8, len: usize) {
    let addr = place as u64;
    let found = cache.find(addr, addr + len as u64, false, None);
    HITS.fetch_add(u64::from(found.is_some()), Ordering::Relaxed);
    // SAFETY: the memory is this thread's until the transfer is complete.
    let got = match found {
        Some(held) => Got::Kept(held),
        // SAFETY: as above.
        None => unsafe { cache.get(addr, len as u64, false) }.expect("a registration"),
    };
    let device = match &got {
        Got::Kept(held) => cache.owned(held).expect("one that is held").read(addr, len),
        Got::Once(pipe, _) => pipe.read(addr, len),
    };
    // SAFETY: as above.
    let memory = unsafe { std::slice::from_raw_parts(place, len) };
    let differs = device.iter().zip(memory).position(|(a, b)| a != b);
    if let Some(at) = differs {
        panic!("stale: byte {at} of {len} at {place:?}, {got:?}");
    }
    if let Got::Kept(held) = got {
        cache.release(&held);
    }
}
