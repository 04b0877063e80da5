//! Copies between the memories of two processes, by the kernel.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;

use super::bounce::copy_own;
use super::{Errno, Res};

/// Maximum number of iovecs of one call, on either side.
pub(crate) const MAX_IOV: usize = 64;

/// An iovec of this process's memory.
pub(crate) fn as_local(addr: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: ptr::without_provenance_mut(addr as usize),
        iov_len: len,
    }
}

/// Copies local iovecs to iovecs of process `pid`. Returns the number of copied bytes, which is
/// smaller than requested if memory on either side is not mapped.
///
/// The kernel checks both sides, so no address can harm this process.
pub(crate) fn vm_write(pid: u32, local: &[libc::iovec], remote: &[libc::iovec]) -> Res<usize> {
    // SAFETY: the kernel checks every address; both ranges are registered memory that the
    // applications named in requests.
    let n = unsafe {
        libc::process_vm_writev(
            pid.cast_signed(),
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    match usize::try_from(n).map_err(|_| Errno::last()) {
        Err(error) if refused(error) && pid == std::process::id() => copy_own(local, remote),
        done => done,
    }
}

/// Copies iovecs of process `pid` to local iovecs; otherwise as [`vm_write`].
pub(crate) fn vm_read(pid: u32, local: &[libc::iovec], remote: &[libc::iovec]) -> Res<usize> {
    // SAFETY: as in `vm_write`; the local iovecs were checked to be the application's buffers.
    let n = unsafe {
        libc::process_vm_readv(
            pid.cast_signed(),
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    match usize::try_from(n).map_err(|_| Errno::last()) {
        Err(error) if refused(error) && pid == std::process::id() => copy_own(remote, local),
        done => done,
    }
}

/// Whether the kernel refuses the call itself, independent of the addresses. A seccomp filter may
/// return any errno.
pub(crate) fn refused(error: Errno) -> bool {
    let of_addresses = [libc::EFAULT, libc::ESRCH, libc::EINVAL, libc::ENOMEM];
    !of_addresses.contains(&error.0)
}

/// Whether the kernel permits the calls to this process: a call on its own memory fails for no
/// other reason.
pub(crate) fn copies_allowed() -> bool {
    let (from, mut to) = (1u8, 0u8);
    let local = [as_local((&raw mut to) as u64, 1)];
    let remote = [as_local((&raw const from) as u64, 1)];
    // SAFETY: both iovecs are this function's.
    let n = unsafe {
        libc::process_vm_readv(
            std::process::id().cast_signed(),
            local.as_ptr(),
            1,
            remote.as_ptr(),
            1,
            0,
        )
    };
    n == 1
}

fn page_size() -> usize {
    static SIZE: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    // SAFETY: no memory is passed.
    *SIZE.get_or_init(|| unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize })
}

/// Whether each page of a range of this process can be read. For error paths: one system call per
/// page.
pub(crate) fn readable_locally(addr: u64, len: usize) -> bool {
    each_page(addr, len, |at| {
        let mut byte = 0u8;
        let own = [as_local(at, 1)];
        let to = [libc::iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        }];
        vm_read(std::process::id(), &to, &own) == Ok(1)
    })
}

/// Whether each page of a range of this process can be written. Contents do not change. For error
/// paths: two system calls per page.
pub(crate) fn writable_locally(addr: u64, len: usize) -> bool {
    readable_locally(addr, len) && populate(addr, len, libc::MADV_POPULATE_WRITE)
}

fn each_page(addr: u64, len: usize, mut check: impl FnMut(u64) -> bool) -> bool {
    let page = page_size() as u64;
    let Some(end) = addr.checked_add(len as u64) else {
        return false;
    };
    let mut at = addr;
    while at < end {
        if !check(at) {
            return false;
        }
        at = (at / page + 1) * page;
    }
    true
}

fn populate(addr: u64, len: usize, advice: libc::c_int) -> bool {
    let page = page_size() as u64;
    let start = addr / page * page;
    let Some(end) = addr
        .checked_add(len as u64)
        .and_then(|end| end.checked_next_multiple_of(page))
    else {
        return false;
    };
    loop {
        // SAFETY: populating changes no content, and the kernel checks the range.
        let ret = unsafe {
            libc::madvise(
                ptr::without_provenance_mut(start as usize),
                (end - start) as usize,
                advice,
            )
        };
        if ret == 0 {
            return true;
        }
        match Errno::last().0 {
            libc::EINTR | libc::EAGAIN => {}
            // mappings of devices cannot be populated, and are present
            libc::EINVAL => {
                return readable_locally(addr, len)
                    && (advice != libc::MADV_POPULATE_WRITE || mapped_writable(start, end));
            }
            _ => return false,
        }
    }
}

/// Whether `/proc/self/maps` shows the whole range as writable.
fn mapped_writable(start: u64, end: u64) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return false;
    };
    let mut at = start;
    for line in maps.lines() {
        let Some(mapping) = mapped_range(line) else {
            continue;
        };
        let flags = line.split(' ').nth(1).unwrap_or_default();
        if mapping.contains(&at) {
            if flags.as_bytes().get(1) != Some(&b'w') {
                return false;
            }
            at = mapping.end;
        }
    }
    at >= end
}

/// The end of the page that ends at or after `addr`.
pub(crate) fn page_end(addr: u64) -> u64 {
    addr.checked_next_multiple_of(page_size() as u64)
        .unwrap_or(u64::MAX)
}

/// Number of pages that contain a mapped range.
pub(crate) fn pages_of(addr: u64, len: u64) -> u64 {
    let page = page_size() as u64;
    (addr % page + len).div_ceil(page)
}

/// Whether two addresses have the same offset in their pages.
pub(crate) fn same_page_offset(a: u64, b: u64) -> bool {
    (a ^ b).is_multiple_of(page_size() as u64)
}

/// Whether a range is mapped completely, and only by huge pages of the kernel's pool.
pub(crate) fn pages_huge(addr: u64, len: u64) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/smaps") else {
        return false;
    };
    let (mut at, end) = (addr, addr.saturating_add(len));
    let mut mapping = 0..0;
    for line in maps.lines() {
        if let Some(range) = mapped_range(line) {
            mapping = range;
        } else if let Some(size) = line.strip_prefix("KernelPageSize:") {
            let kilobytes = size.trim().trim_end_matches(" kB").parse::<usize>();
            if kilobytes.is_ok_and(|size| size > page_size() / 1024) && mapping.contains(&at) {
                at = mapping.end;
            }
        }
    }
    at >= end
}

/// The disk file that a range is a shared mapping of; `None`: it is not such a mapping.
///
/// # Errors
/// `ENOMEM`, `EMFILE`.
pub(crate) fn file_behind(addr: u64, len: u64) -> Res<Option<OwnedFd>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    Ok(file_in(&maps, addr, len))
}

fn file_in(maps: &str, addr: u64, len: u64) -> Option<OwnedFd> {
    let end = addr.checked_add(len)?;
    let line = maps.lines().find(|line| {
        mapped_range(line).is_some_and(|mapping| mapping.contains(&addr) && end <= mapping.end)
    })?;
    // addresses, rights, offset, device, inode, name
    let mut fields = line.split_ascii_whitespace();
    let shared = fields.nth(1)?.ends_with('s');
    let inode: u64 = fields.nth(2)?.parse().ok()?;
    let name = line.get(line.find(" /")? + 1..)?;
    if !shared {
        return None;
    }
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(name)
        .ok()?;
    let same = file.metadata().is_ok_and(|found| found.ino() == inode);
    // SAFETY: all zeros is a value of it.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: writable structure.
    let ret = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) };
    let memory = [libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, RAMFS_MAGIC];
    (same && ret == 0 && !memory.contains(&system.f_type)).then(|| file.into())
}

/// From linux/magic.h; not every libc has it.
const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;

/// Writes a file's dirty pages back, whichever process has changed them, and waits for the disk.
pub(crate) fn write_back(file: &OwnedFd) -> Res<()> {
    // SAFETY: no memory is passed.
    super::check(unsafe { libc::fdatasync(file.as_raw_fd()) }).map(|_| ())
}

/// The address range of a line of a list of mappings.
fn mapped_range(line: &str) -> Option<std::ops::Range<u64>> {
    let (from, rest) = line.split_once('-')?;
    let to = rest.split(' ').next()?;
    Some(u64::from_str_radix(from, 16).ok()?..u64::from_str_radix(to, 16).ok()?)
}

/// Makes the pages of a range present, for writing or for reading. Returns false if that is not
/// possible.
pub(crate) fn pages_usable(addr: u64, len: usize, write: bool) -> bool {
    let advice = if write {
        libc::MADV_POPULATE_WRITE
    } else {
        libc::MADV_POPULATE_READ
    };
    populate(addr, len, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_memory_is_seen() {
        let text = vec![7u8; 100_000];
        let addr = text.as_ptr() as u64;
        assert!(readable_locally(addr, text.len()));
        assert!(pages_usable(addr, text.len(), true));
        assert!(!readable_locally(8, 1));
        assert!(!pages_usable(8, 1, false));
        assert!(!pages_usable(u64::MAX - 5, 100, false));
        let constant: &'static [u8] = include_bytes!("vm.rs");
        assert!(pages_usable(
            constant.as_ptr() as u64,
            constant.len(),
            false
        ));
        assert!(!writable_locally(constant.as_ptr() as u64, constant.len()));
    }
}
