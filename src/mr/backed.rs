//! The parts of the address space that are mapped: `/proc/self/maps` (`proc_pid_maps(5)`).

use std::fs::File;
use std::io::{ErrorKind, Result as IoResult};
use std::os::unix::fs::FileExt as _;

use super::procmap::{OR_NEXT, Query, READABLE, WRITABLE};
use crate::errno::FiErrno;

#[cfg(test)]
thread_local! {
    /// Tests emulate a kernel without the query for the refreshes of this thread.
    pub(crate) static OLD_KERNEL: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// Tests emulate a process without a free descriptor.
    pub(crate) static NO_DESCRIPTOR: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Opens `/proc/self/maps`; for each call: after a fork it is that of the child.
fn open() -> IoResult<File> {
    #[cfg(test)]
    if NO_DESCRIPTOR.get() {
        return Err(std::io::Error::from_raw_os_error(libc::EMFILE));
    }
    File::open("/proc/self/maps")
}

/// The parts of a range that are readable, and writable if `write`: pairs of the first byte and the
/// byte behind the last, in ascending order, one for each mapping. A mapped page may have no memory
/// yet: registering allocates it.
///
/// Takes time in proportion to the mappings in the range, not to those of the process.
///
/// # Errors
/// - `ENOTTY`: a kernel before Linux 6.11, on which all mappings of the process must be
///   [read](read_parts).
/// - `EACCES`, `ENOENT`: `/proc` is not accessible. `EMFILE`, `ENFILE`: no descriptor is free.
///   Others of the query.
pub(super) fn parts(start: u64, end: u64, write: bool) -> Result<Vec<(u64, u64)>, FiErrno> {
    #[cfg(test)]
    if OLD_KERNEL.get() {
        return Err(FiErrno::ENOTTY);
    }
    let maps = open().map_err(FiErrno::from)?;
    let flags = OR_NEXT | READABLE | if write { WRITABLE } else { 0 };
    let (mut parts, mut at) = (Vec::new(), start);
    while at < end {
        match Query::ask(&maps, at, flags) {
            Ok(found) if found.start < end && at < found.end => {
                parts.push((found.start.max(start), found.end.min(end)));
                at = found.end;
            }
            Ok(_) | Err(FiErrno::ENOENT) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(parts)
}

/// As [`parts`], on every kernel; reads all mappings of the process.
///
/// # Errors
/// `EACCES`, `EPERM`, `ENOENT`: `/proc` is not accessible. `EMFILE`, `ENFILE`: no descriptor is
/// free. Others of reading.
pub(super) fn read_parts(start: u64, end: u64, write: bool) -> Result<Vec<(u64, u64)>, FiErrno> {
    Ok(parse(&read_all(&open()?)?, start, end, write))
}

/// All mappings of the process that are not of a file, in ascending order: pairs of the first byte
/// and the byte behind the last. Adjacent mappings are not merged. `maps` is `/proc/self/maps`,
/// opened by this process; no further descriptor is necessary.
///
/// # Errors
/// Those of reading, for lack of memory.
pub(super) fn anonymous(maps: &File) -> IoResult<Vec<(u64, u64)>> {
    let text = read_all(maps)?;
    let own = lines(&text).filter(|(_, _, rest)| is_anonymous(rest));
    Ok(own.map(|(from, to, _)| (from, to)).collect())
}

/// Reads a file from its begin. The position of the descriptor is not used. A name of a mapped file
/// may be any bytes: those that are not UTF-8 are replaced.
fn read_all(file: &File) -> IoResult<String> {
    let (mut bytes, mut part) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        match file.read_at(&mut part, bytes.len() as u64) {
            Ok(0) => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Ok(count) => bytes.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Decides by the part of a line behind its range: rights, offset, device, inode and name.
fn is_anonymous(rest: &str) -> bool {
    let mut words = rest.split_whitespace().skip(3);
    // huge pages of `MAP_ANONYMOUS` belong to an internal file of the kernel, which has an inode
    words.next() == Some("0") || words.eq(["/anon_hugepage", "(deleted)"])
}

/// The range and the rest of each line; other lines are skipped.
fn lines(maps: &str) -> impl Iterator<Item = (u64, u64, &str)> {
    maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(from)?, number(to)?, rest))
    })
}

fn parse(maps: &str, start: u64, end: u64, write: bool) -> Vec<(u64, u64)> {
    let mut parts = Vec::new();
    for (from, to, rights) in lines(maps) {
        if !rights.starts_with('r') || (write && !rights.starts_with("rw")) {
            continue;
        }
        let (from, to) = (from.max(start), to.min(end));
        if from < to {
            parts.push((from, to));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-5000 r--p 00000000 fe:01 123                        /a file
5000-6000 ---p 00000000 00:00 0
6000-7000 rw-s 00000000 00:01 9                          /dev/zero (deleted)
8000-9000 rw-p 00000000 00:00 0                          [heap]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]
rubbish
";

    #[test]
    fn parts_have_the_rights_and_the_bounds() {
        let all = parse(MAPS, 0, u64::MAX, false);
        let files = [(0x3000, 0x5000), (0x6000, 0x7000), (0x8000, 0x9000)];
        assert_eq!((all[0], &all[1..]), ((0x1000, 0x3000), &files[..]));
        let written = parse(MAPS, 0, u64::MAX, true);
        assert_eq!(written[0], (0x1000, 0x3000));
        assert_eq!(written.len(), 3);
        assert_eq!(parse(MAPS, 0x2010, 0x2011, true), [(0x2010, 0x2011)]);
        assert_eq!(parse(MAPS, 0x5000, 0x6000, false), []);
    }

    #[test]
    fn a_mapping_is_a_file_s_by_its_inode() {
        let of = |line: &str| lines(line).all(|(_, _, rest)| is_anonymous(rest));
        let anonymous: Vec<_> = MAPS.lines().filter(|line| of(line)).collect();
        assert_eq!(anonymous.len(), 5, "{anonymous:?}"); // with the line that is no mapping
        assert!(of(
            "1000-3000 rw-p 00000000 00:0f 77   /anon_hugepage (deleted)"
        ));
        assert!(!of("1000-3000 rw-p 00000000 00:0f 77   /memfd:x (deleted)"));
        assert!(!of("1000-3000 rw-p 00000000 00:0f 77"));
    }

    /// The kernel writes the name of a mapped file as it is, except line feeds.
    #[test]
    #[allow(unsafe_code, reason = "maps a file")]
    fn a_name_that_is_not_utf_8_hides_no_mapping() {
        // SAFETY: a C string.
        let fd = unsafe { libc::memfd_create(c"\xff\xfe".as_ptr(), libc::MFD_CLOEXEC) };
        assert_ne!(fd, -1);
        // SAFETY: the new descriptor, which nothing else owns.
        let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
        file.set_len(4096).unwrap();
        let shared = libc::MAP_SHARED;
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, shared, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        let start = at as u64;
        let found = read_parts(start, start + 4096, false);
        assert_eq!(found, Ok(vec![(start, start + 4096)]));
        // SAFETY: the mapping above.
        unsafe { libc::munmap(at, 4096) };
    }

    #[test]
    fn what_is_there_is_found() {
        let memory = vec![0_u8; 100_000];
        let start = memory.as_ptr() as u64;
        let whole = vec![(start, start + 100_000)];
        assert_eq!(read_parts(start, start + 100_000, true).unwrap(), whole);
        match parts(start, start + 100_000, true) {
            Ok(found) => assert_eq!(found, whole),
            Err(error) => assert_eq!(error, FiErrno::ENOTTY),
        }
    }

    /// The query and the reading of all mappings agree.
    #[test]
    #[allow(unsafe_code, reason = "maps memory")]
    fn both_ways_find_the_same() {
        const PAGE: usize = 4096;
        let (none, anywhere) = (libc::PROT_NONE, std::ptr::null_mut());
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping of this test, whose pages get different rights.
        let start = unsafe {
            let new = libc::mmap(anywhere, 12 * PAGE, none, flags, -1, 0);
            assert_ne!(new, libc::MAP_FAILED);
            let both = libc::PROT_READ | libc::PROT_WRITE;
            for (page, count, rights) in [(1, 2, both), (3, 1, libc::PROT_READ), (6, 4, both)] {
                let at = new.wrapping_byte_add(page * PAGE);
                assert_eq!(libc::mprotect(at, count * PAGE, rights), 0);
            }
            new as u64
        };
        let page = PAGE as u64;
        for (from, to) in [
            (0, 12),
            (0, 1),
            (1, 2),
            (2, 4),
            (3, 4),
            (4, 7),
            (9, 12),
            (10, 12),
        ] {
            for write in [false, true] {
                let (from, to) = (start + from * page + 1, start + to * page - 1);
                let read = read_parts(from, to, write).unwrap();
                match parts(from, to, write) {
                    Ok(found) => assert_eq!(found, read),
                    Err(error) => assert_eq!(error, FiErrno::ENOTTY),
                }
            }
        }
    }
}
