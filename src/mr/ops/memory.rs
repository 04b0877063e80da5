//! Memory that the provider allocates and processes share: sealed files, mapped.
//! `docs/shared-regions.md`.

#![allow(unsafe_code, reason = "system calls")]

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::grant::{self, Granted};
use crate::errno::{FiErrno, Result};
use crate::mr::Access;
use crate::verbs::{Adopted, Device};

/// The wanted address of a mapping.
#[derive(Clone, Copy, Debug)]
pub struct Hint {
    /// Any address in the first page; NULL for any page.
    pub addr: *mut c_void,
    /// Whether no other address is accepted. `addr` must then be the start of a page.
    pub fixed: bool,
}

/// Sizes in bytes of a page, and of a huge page of shared memory.
const PAGE: usize = 1 << 12;
const HUGE: usize = 1 << 21;
/// The size of the file is sealed: a truncated file would raise SIGBUS in each process that maps
/// it.
pub(super) const SIZE_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Shared memory, mapped in this process. Thread safe; unmapped on drop.
#[derive(Debug)]
pub struct SharedMemory {
    // first field: the device releases the memory before it is unmapped
    _adopted: Option<Adopted>,
    map: Map,
    file: OwnedFd,
    len: usize,
}

/// A mapping, unmapped on drop.
#[derive(Debug)]
struct Map {
    addr: *mut c_void,
    whole: usize,
}

// SAFETY: an address and a length; only devices and the application access the memory.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping; objects that use the memory hold a reference to it.
        unsafe { libc::munmap(self.addr, self.whole) };
    }
}

impl SharedMemory {
    /// Allocates `len` bytes of zeros with all pages present, huge ones if the kernel permits them
    /// for shared memory. Blocks while the kernel clears the pages.
    ///
    /// # Errors
    /// - `EINVAL`: `len` is 0, or the fixed address is NULL or not the start of a page.
    /// - `ENOMEM`: among others, more than the kernel estimates to be available. Without this
    ///   check the kernel would end processes, this one or others, to find the pages. Also more
    ///   than `RLIMIT_FSIZE` permits.
    /// - `EADDRINUSE`: memory is mapped at the fixed address. `EMFILE`.
    pub fn alloc(device: &Arc<Device>, len: usize, hint: Hint) -> Result<Arc<Self>> {
        let whole = whole(len)?;
        if available().is_some_and(|bytes| whole as u64 > bytes) {
            return Err(FiErrno::ENOMEM);
        }
        let file = create(c"weft-region")?;
        set_size(&file, whole)?;
        seal(&file, SIZE_SEALS | libc::F_SEAL_SEAL)?;
        let map = map(&file, whole, hint, true)?;
        // SAFETY: the mapping made above. An older kernel may refuse either advice, and huge pages
        // may be off.
        unsafe {
            libc::madvise(map.addr, whole, libc::MADV_HUGEPAGE);
            // before fallocate, which makes small pages
            libc::madvise(map.addr, whole, libc::MADV_POPULATE_WRITE);
        }
        in_pieces(whole, |at, len| {
            let (at, len) = (at as libc::off_t, len as libc::off_t);
            // SAFETY: no memory is passed.
            FiErrno::from_call(unsafe { libc::fallocate(file.as_raw_fd(), 0, at, len) })
        })?;
        Self::of(device, file, map, len)
    }

    /// Maps the memory of a handle that grants this access; writable if [`Access::is_written`].
    ///
    /// # Errors
    /// - `EINVAL`: not a handle (truncated, changed, or of another version); the memory is not as
    ///   its grant describes it; or the fixed address is NULL or not the start of a page.
    /// - `ENOENT`: the exporter or its region has ended, or never existed.
    /// - `EACCES`: access that was not granted, or an exporter whose files may not be opened.
    /// - `EADDRINUSE`: memory is mapped at the fixed address. `ENOMEM`, `EMFILE`.
    pub fn import(
        device: &Arc<Device>,
        handle: &[u8],
        access: Access,
        hint: Hint,
    ) -> Result<Arc<Self>> {
        let Granted { file, len } = grant::open(handle, access)?;
        let map = map(&file, whole(len)?, hint, access.is_written())?;
        // SAFETY: the mapping made above; the advice can only change the size of its pages.
        unsafe { libc::madvise(map.addr, map.whole, libc::MADV_HUGEPAGE) };
        Self::of(device, file, map, len)
    }

    fn of(device: &Arc<Device>, file: OwnedFd, map: Map, len: usize) -> Result<Arc<Self>> {
        // SAFETY: registrations hold this object, so they end before the mapping.
        let adopted = unsafe { Adopted::new(device, &file, map.addr, len)? };
        Ok(Arc::new(Self {
            _adopted: adopted,
            map,
            file,
            len,
        }))
    }

    /// The address of the first byte.
    pub fn addr(&self) -> *mut c_void {
        self.map.addr
    }

    /// The length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }
}

/// The length rounded up to whole pages, in bytes.
pub(super) fn whole(len: usize) -> Result<usize> {
    if len == 0 {
        return Err(FiErrno::EINVAL);
    }
    let whole = len.checked_next_multiple_of(PAGE);
    whole
        .filter(|whole| *whole <= isize::MAX as usize)
        .ok_or(FiErrno::ENOMEM)
}

/// Creates a file without a name.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub(super) fn create(name: &CStr) -> Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    FiErrno::from_call(fd)?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Allocates the first `whole` bytes of a file by calls of `allocate` for pieces, with the offset
/// and length of each. Halves a piece that was interrupted, down to a page, and doubles it behind
/// one that was not. Before Linux 6.11 a signal interrupts `fallocate(2)` on shared memory, which
/// then frees the pages that the call has allocated: in a process with a periodic signal,
/// repetitions of a call for a long range would not end.
///
/// # Errors
/// `ENOMEM`: `allocate` has failed with any other error than `EINTR`.
fn in_pieces(whole: usize, mut allocate: impl FnMut(usize, usize) -> Result<()>) -> Result<()> {
    // usually less than 1 ms of work
    let (mut done, mut most) = (0, HUGE);
    while done < whole {
        let piece = most.min(whole - done);
        match allocate(done, piece) {
            Ok(()) => {
                done += piece;
                most = HUGE.min(2 * most);
            }
            Err(FiErrno::EINTR) => most = PAGE.max(most / 2),
            Err(_) => return Err(FiErrno::ENOMEM),
        }
    }
    Ok(())
}

/// Gives a new file its size in bytes.
///
/// # Errors
/// Those of [`check_size`] and of `ftruncate(2)`.
fn set_size(file: &OwnedFd, size: usize) -> Result<()> {
    check_size(size)?;
    // SAFETY: no memory is passed.
    FiErrno::from_call(unsafe { libc::ftruncate(file.as_raw_fd(), size as libc::off_t) })
}

/// Whether this process may make a file of `size` bytes. The kernel sends `SIGXFSZ`, whose default
/// action ends the process, to a thread that makes a file larger than `RLIMIT_FSIZE` permits.
///
/// # Errors
/// `ENOMEM`: it may not.
pub(super) fn check_size(size: usize) -> Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a writable structure.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    // RLIM_INFINITY is the greatest value
    if ret == 0 && size as u64 > limit.rlim_cur {
        return Err(FiErrno::ENOMEM);
    }
    Ok(())
}

pub(super) fn seal(file: &OwnedFd, seals: i32) -> Result<()> {
    // SAFETY: no memory is passed.
    FiErrno::from_call(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })
}

/// Bytes that the kernel estimates to be available, with those of the swap space. `None`: there is
/// no `/proc`. The limit of a control group is not included.
fn available() -> Option<u64> {
    available_in(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// As [`available`], from the content of the file (proc_meminfo(5)).
fn available_in(meminfo: &str) -> Option<u64> {
    let kib = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let swap = kib("SwapFree:").unwrap_or(0);
    kib("MemAvailable:")?.checked_add(swap)?.checked_mul(1024)
}

fn map(file: &OwnedFd, whole: usize, hint: Hint, write: bool) -> Result<Map> {
    if hint.fixed && (hint.addr.is_null() || !hint.addr.addr().is_multiple_of(PAGE)) {
        return Err(FiErrno::EINVAL);
    }
    // a hint that is not fixed may be any address in the page (mmap(2))
    let near = hint.addr.map_addr(|addr| addr & !(PAGE - 1));
    if !near.is_null() {
        match map_at(file, whole, near, libc::MAP_FIXED_NOREPLACE, write) {
            Ok(map) if map.addr == near => return Ok(map),
            Err(FiErrno::ENOMEM) if hint.fixed => return Err(FiErrno::ENOMEM),
            Ok(_) | Err(_) if hint.fixed => return Err(FiErrno::EADDRINUSE),
            // a kernel before 4.17 ignores the flag and takes the address as a hint
            Ok(map) => return Ok(map),
            Err(_) => {}
        }
    }
    let nowhere = std::ptr::null_mut();
    if whole < HUGE {
        return map_at(file, whole, nowhere, 0, write);
    }
    // huge pages are aligned to their size: reserve more, and map inside
    // SAFETY: a new mapping at an address of the kernel's choice.
    let room = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(nowhere, whole + HUGE, libc::PROT_NONE, flags, -1, 0)
    };
    if room == libc::MAP_FAILED {
        return map_at(file, whole, nowhere, 0, write);
    }
    let before = room.addr().next_multiple_of(HUGE) - room.addr();
    let start = room.wrapping_byte_add(before);
    let map = map_at(file, whole, start, libc::MAP_FIXED, write);
    let kept = if map.is_ok() { whole } else { 0 };
    // SAFETY: unmaps only the unused parts of the reservation.
    unsafe {
        if before > 0 {
            libc::munmap(room, before);
        }
        if before + kept < whole + HUGE {
            libc::munmap(start.wrapping_byte_add(kept), whole + HUGE - before - kept);
        }
    }
    map
}

fn map_at(file: &OwnedFd, whole: usize, at: *mut c_void, flags: i32, write: bool) -> Result<Map> {
    let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
    let flags = libc::MAP_SHARED | flags;
    // SAFETY: the address is of the kernel's choice, unused, or in the reservation of `map`.
    let addr = unsafe { libc::mmap(at, whole, protection, flags, file.as_raw_fd(), 0) };
    if addr == libc::MAP_FAILED {
        return Err(FiErrno::last());
    }
    Ok(Map { addr, whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_available_memory_is_refused() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable:   2048 kB\nSwapFree:  1024 kB\n";
        assert_eq!(available_in(meminfo), Some(3 << 20));
        assert_eq!(available_in("MemTotal: 9 kB\n"), None);
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let hint = Hint {
            addr: std::ptr::null_mut(),
            fixed: false,
        };
        let refused = SharedMemory::alloc(&device, 1 << 46, hint);
        assert_eq!(refused.err(), Some(FiErrno::ENOMEM));
    }

    /// A kernel that interrupts each call for more than a page, and every third call.
    #[test]
    fn an_interrupted_allocation_makes_progress() {
        let (mut calls, mut next) = (0, 0);
        let done = in_pieces(3 * HUGE + PAGE, |at, len| {
            calls += 1;
            assert!(calls < 10_000, "it does not end");
            if len > PAGE || calls % 3 == 0 {
                return Err(FiErrno::EINTR);
            }
            assert_eq!(at, next);
            next += len;
            Ok(())
        });
        assert_eq!((done, next), (Ok(()), 3 * HUGE + PAGE));
        let failed = in_pieces(PAGE, |_, _| Err(FiErrno::ENOSPC));
        assert_eq!(failed, Err(FiErrno::ENOMEM));
    }

    #[test]
    fn a_file_above_the_limit_is_refused_without_a_signal() {
        let file = create(c"weft-test").unwrap();
        // SAFETY: the child makes system calls only; the structures are writable.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let mut limit = std::mem::zeroed::<libc::rlimit>();
                libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit);
                limit.rlim_cur = 1 << 20;
                let set = libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
                libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
                let good = set == 0
                    && set_size(&file, 2 << 20) == Err(FiErrno::ENOMEM)
                    && set_size(&file, 1 << 20) == Ok(());
                libc::_exit(i32::from(!good));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
    }
}
