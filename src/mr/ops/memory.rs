//! Memory that the provider allocates, and that processes share: sealed files, mapped. `docs/shared-regions.md`.

#![allow(unsafe_code, reason = "system calls")]

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::grant::{self, Granted};
use crate::errno::{FiErrno, Result};
use crate::mr::Access;
use crate::verbs::{Adopted, Device};

/// Where memory is to be mapped.
#[derive(Clone, Copy, Debug)]
pub struct Hint {
    /// The address of its first byte, or any in its first page; NULL for any.
    pub addr: *mut c_void,
    /// Whether any other will not do. Then it is a page's.
    pub fixed: bool,
}

/// Bytes of a page, and of one of the huge pages that shared memory has.
const PAGE: usize = 1 << 12;
const HUGE: usize = 1 << 21;
/// What keeps everybody who has it mapped from SIGBUS.
pub(super) const SIZE_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Shared memory, mapped here. Thread safe; unmapped when it is dropped.
#[derive(Debug)]
pub struct SharedMemory {
    // first: the device is told before the memory goes
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

// SAFETY: an address and a length; the memory is reached by devices and the application only.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; who holds the memory keeps it from being dropped.
        unsafe { libc::munmap(self.addr, self.whole) };
    }
}

impl SharedMemory {
    /// Memory of `len` bytes, zeros, with all its pages: huge ones where the kernel gives them to shared memory.
    ///
    /// # Errors
    /// `EINVAL`: no bytes, or an address that it has to be at and that is no page's. `EADDRINUSE`: it has to be there, and something is. `ENOMEM`, `EMFILE`.
    pub fn alloc(device: &Arc<Device>, len: usize, hint: Hint) -> Result<Arc<Self>> {
        let whole = whole(len)?;
        let file = create(c"weft-region")?;
        // SAFETY: no memory is passed.
        FiErrno::from_call(unsafe { libc::ftruncate(file.as_raw_fd(), whole as libc::off_t) })?;
        seal(&file, SIZE_SEALS | libc::F_SEAL_SEAL)?;
        let map = map(&file, whole, hint, true)?;
        // SAFETY: the mapping made above. Both may be refused: older kernels, huge pages turned off.
        unsafe {
            libc::madvise(map.addr, whole, libc::MADV_HUGEPAGE);
            libc::madvise(map.addr, whole, libc::MADV_POPULATE_WRITE); // before the next, which takes small ones
        }
        loop {
            // SAFETY: no memory is passed.
            let ret = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, whole as libc::off_t) };
            match FiErrno::from_call(ret) {
                Ok(()) => break,
                Err(FiErrno::EINTR) => {}
                Err(_) => return Err(FiErrno::ENOMEM),
            }
        }
        Self::of(device, file, map, len)
    }

    /// The memory that a handle stands for, if it grants this access; writable if [`Access::is_written`].
    ///
    /// # Errors
    /// - `EINVAL`: no handle: truncated, changed, of another version; what it names is not what it says; an address that it has to be
    ///   at and that is no page's.
    /// - `ENOENT`: its process or its region has ended, or nobody made it.
    /// - `EACCES`: access that was not granted, or a process that can't be looked into.
    /// - `EADDRINUSE`: it has to be at the hint, and something is. `ENOMEM`, `EMFILE`.
    pub fn import(
        device: &Arc<Device>,
        handle: &[u8],
        access: Access,
        hint: Hint,
    ) -> Result<Arc<Self>> {
        let Granted { file, len } = grant::open(handle, access)?;
        let map = map(&file, whole(len)?, hint, access.is_written())?;
        // SAFETY: the mapping made above; nothing changes but, maybe, the size of its pages.
        unsafe { libc::madvise(map.addr, map.whole, libc::MADV_HUGEPAGE) };
        Self::of(device, file, map, len)
    }

    fn of(device: &Arc<Device>, file: OwnedFd, map: Map, len: usize) -> Result<Arc<Self>> {
        // SAFETY: registrations hold this object, so the mapping ends after them.
        let adopted = unsafe { Adopted::new(device, &file, map.addr, len)? };
        Ok(Arc::new(Self {
            _adopted: adopted,
            map,
            file,
            len,
        }))
    }

    /// The first byte.
    pub fn addr(&self) -> *mut c_void {
        self.map.addr
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }
}

/// Bytes of whole pages.
pub(super) fn whole(len: usize) -> Result<usize> {
    if len == 0 {
        return Err(FiErrno::EINVAL);
    }
    let whole = len.checked_next_multiple_of(PAGE);
    whole
        .filter(|whole| *whole <= isize::MAX as usize)
        .ok_or(FiErrno::ENOMEM)
}

/// A file without a name.
///
/// # Errors
/// `EMFILE`, `ENOMEM`.
pub(super) fn create(name: &CStr) -> Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    FiErrno::from_call(fd)?;
    // SAFETY: just made, nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn seal(file: &OwnedFd, seals: i32) -> Result<()> {
    // SAFETY: no memory is passed.
    FiErrno::from_call(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })
}

fn map(file: &OwnedFd, whole: usize, hint: Hint, write: bool) -> Result<Map> {
    if hint.fixed && (hint.addr.is_null() || !hint.addr.addr().is_multiple_of(PAGE)) {
        return Err(FiErrno::EINVAL);
    }
    // of a mere hint the page (mmap(2))
    let near = hint.addr.map_addr(|addr| addr & !(PAGE - 1));
    if !near.is_null() {
        match map_at(file, whole, near, libc::MAP_FIXED_NOREPLACE, write) {
            Ok(map) if map.addr == near => return Ok(map),
            Err(FiErrno::ENOMEM) if hint.fixed => return Err(FiErrno::ENOMEM),
            Ok(_) | Err(_) if hint.fixed => return Err(FiErrno::EADDRINUSE),
            Ok(map) => return Ok(map), // a kernel that takes it for a hint
            Err(_) => {}
        }
    }
    let nowhere = std::ptr::null_mut();
    if whole < HUGE {
        return map_at(file, whole, nowhere, 0, write);
    }
    // huge pages begin at their multiples: reserve more, and map within
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
    // SAFETY: what of the reserved room is not in use.
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
    // SAFETY: at an address of the kernel's choice, where nothing is, or in the place of what `map` has reserved.
    let addr = unsafe { libc::mmap(at, whole, protection, flags, file.as_raw_fd(), 0) };
    if addr == libc::MAP_FAILED {
        return Err(FiErrno::last());
    }
    Ok(Map { addr, whole })
}
