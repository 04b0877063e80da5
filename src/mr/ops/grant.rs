//! Grants and handles: how the exporter describes shared memory to other processes, and how the
//! importer verifies it.
//!
//! A grant is a sealed file of the exporter; a handle names its process and descriptor. Both are
//! arrays of 64-bit words in native byte order. The importer maps memory of another process only
//! after it has checked that its size is sealed.

#![allow(unsafe_code, reason = "system calls")]

use std::ffi::CString;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use super::memory::{SIZE_SEALS, check_size, create, seal};
use crate::errno::{FiErrno, Result};
use crate::mr::{Access, random};
use crate::wire::records::checksum;

const GRANT_MAGIC: u64 = 0x0001_746e_7261_6777;
const HANDLE_MAGIC: u64 = 0x0001_6c64_6e68_6777;
/// Words: magic, token (2), access, length, descriptor, device, inode, checksum.
const GRANT: usize = 9;
/// Words: magic, process, descriptor, token (2), checksum.
const HANDLE: usize = 6;

/// Length of a handle in bytes.
pub const HANDLE_SIZE: usize = HANDLE * 8;

/// A grant of this process: its handle is valid until the grant is dropped.
#[derive(Debug)]
pub(super) struct Grant {
    access: Access,
    token: [u64; 2],
    file: OwnedFd,
}

/// Memory of a verified grant.
pub(super) struct Granted {
    pub(super) file: OwnedFd,
    pub(super) len: usize,
}

fn bytes<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Decodes `N` words, of which the first is `magic` and the last the checksum of the others.
fn words<const N: usize>(bytes: &[u8], magic: u64) -> Option<[u64; N]> {
    let chunks = bytes.as_chunks::<8>();
    let words: Vec<_> = chunks
        .0
        .iter()
        .map(|&word| u64::from_ne_bytes(word))
        .collect();
    let words: [u64; N] = words.try_into().ok().filter(|_| chunks.1.is_empty())?;
    let (last, rest) = words.split_last()?;
    (rest.first() == Some(&magic) && *last == checksum(rest)).then_some(words)
}

impl Grant {
    /// Grants `access` to the memory to every process that has the handle and may open this
    /// process's files.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`.
    pub(super) fn new(memory: &OwnedFd, len: usize, access: Access) -> Result<Self> {
        let stat = stat(memory)?;
        let token = [random()?, random()?];
        let fd = memory.as_raw_fd() as u64;
        let mut words = [
            GRANT_MAGIC,
            token[0],
            token[1],
            access.bits(),
            len as u64,
            fd,
            stat.st_dev,
            stat.st_ino,
            0,
        ];
        words[GRANT - 1] = checksum(&words[..GRANT - 1]);
        check_size(GRANT * 8)?;
        let file: std::fs::File = create(c"weft-grant")?.into();
        file.write_all_at(&bytes(words), 0)?;
        let file = file.into();
        seal(&file, SIZE_SEALS | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL)?;
        Ok(Self {
            access,
            token,
            file,
        })
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    pub(super) fn handle(&self) -> Vec<u8> {
        let mut words = [
            HANDLE_MAGIC,
            u64::from(std::process::id()),
            self.file.as_raw_fd() as u64,
            self.token[0],
            self.token[1],
            0,
        ];
        words[HANDLE - 1] = checksum(&words[..HANDLE - 1]);
        bytes(words)
    }
}

/// The memory of a handle, opened for `access`.
///
/// # Errors
/// Those of [`super::SharedMemory::import`] that concern the handle.
pub(super) fn open(handle: &[u8], access: Access) -> Result<Granted> {
    let [_, pid, fd, first, second, _] =
        words::<HANDLE>(handle, HANDLE_MAGIC).ok_or(FiErrno::EINVAL)?;
    let (pid, fd) = (number(pid)?, number(fd)?);
    // after a grant has ended, its descriptor number may be a file of another kind
    let file = open_of(pid, fd, false)?.ok_or(FiErrno::ENOENT)?;
    let mut read = [0; GRANT * 8];
    std::fs::File::from(file)
        .read_exact_at(&mut read, 0)
        .map_err(|_| FiErrno::ENOENT)?;
    let [_, token1, token2, granted, len, fd, device, inode, _] =
        words::<GRANT>(&read, GRANT_MAGIC).ok_or(FiErrno::ENOENT)?;
    if [token1, token2] != [first, second] {
        return Err(FiErrno::ENOENT);
    }
    if !Access::from_bits_truncate(granted).contains(access) {
        return Err(FiErrno::EACCES);
    }
    let file = open_of(pid, number(fd)?, access.is_written())?.ok_or(FiErrno::EINVAL)?;
    let stat = stat(&file)?;
    let size = u64::try_from(stat.st_size).map_err(|_| FiErrno::EINVAL)?;
    let len_there = len.checked_next_multiple_of(1 << 12);
    if (stat.st_dev, stat.st_ino) != (device, inode) || len == 0 || len_there != Some(size) {
        return Err(FiErrno::EINVAL);
    }
    // at most the size of the file
    let len = usize::try_from(len).map_err(|_| FiErrno::EINVAL)?;
    Ok(Granted { file, len })
}

/// Decodes a process id or descriptor.
fn number(word: u64) -> Result<i32> {
    i32::try_from(word).map_err(|_| FiErrno::EINVAL)
}

/// Opens a descriptor of a process again. `None`: not a regular file of ordinary shared memory
/// pages with a sealed size. The type is checked before the file is opened, because opening some
/// files has effects.
///
/// # Errors
/// `ENOENT`: no such process, or no such descriptor in it. `EACCES`: the process's files may not be
/// opened. `EMFILE`.
fn open_of(pid: i32, fd: RawFd, write: bool) -> Result<Option<OwnedFd>> {
    let there = open_path(&format!("/proc/{pid}/fd/{fd}"), libc::O_PATH)?;
    if stat(&there)?.st_mode & libc::S_IFMT != libc::S_IFREG || !is_shared_memory(&there)? {
        return Ok(None);
    }
    let flags = if write { libc::O_RDWR } else { libc::O_RDONLY };
    let again = format!("/proc/self/fd/{}", there.as_raw_fd());
    let file = open_path(&again, flags)?;
    // SAFETY: no memory is passed.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    Ok((seals >= 0 && seals & SIZE_SEALS == SIZE_SEALS).then_some(file))
}

fn open_path(path: &str, flags: i32) -> Result<OwnedFd> {
    let path = CString::new(path).map_err(|_| FiErrno::EINVAL)?;
    // SAFETY: a C string.
    let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) };
    if fd < 0 {
        let error = std::io::Error::last_os_error();
        return Err(match error.kind() {
            ErrorKind::PermissionDenied => FiErrno::EACCES, // EPERM included
            _ if error.raw_os_error() == Some(libc::ESRCH) => FiErrno::ENOENT,
            _ => error.into(),
        });
    }
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the file is on tmpfs, with ordinary pages; hugetlbfs is not.
fn is_shared_memory(file: &OwnedFd) -> Result<bool> {
    // SAFETY: all zeros is a valid value.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a writable structure.
    FiErrno::from_call(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) })?;
    Ok(system.f_type == libc::TMPFS_MAGIC)
}

fn stat(file: &OwnedFd) -> Result<libc::stat> {
    // SAFETY: all zeros is a valid value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a writable structure.
    FiErrno::from_call(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
    Ok(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 5000;
    const BOTH: Access = Access::SEND.union(Access::RECV);

    /// A file of two pages with these seals.
    fn memory(seals: i32) -> OwnedFd {
        let file = create(c"test").unwrap();
        // SAFETY: no memory is passed.
        assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 8192) }, 0);
        seal(&file, seals).unwrap();
        file
    }

    fn refused(handle: &[u8]) -> FiErrno {
        match open(handle, Access::SEND) {
            Ok(_) => panic!("it was taken for a grant"),
            Err(error) => error,
        }
    }

    /// A handle with one word changed and a valid checksum.
    fn forged(grant: &Grant, at: usize, word: u64) -> Vec<u8> {
        let mut words = words::<HANDLE>(&grant.handle(), HANDLE_MAGIC).unwrap();
        assert_ne!(words[at], word);
        words[at] = word;
        words[HANDLE - 1] = checksum(&words[..HANDLE - 1]);
        bytes(words)
    }

    #[test]
    fn what_is_granted_is_opened_and_no_more() {
        let file = memory(SIZE_SEALS);
        let grant = Grant::new(&file, LEN, BOTH).unwrap();
        let handle = grant.handle();
        assert_eq!(handle.len(), HANDLE_SIZE);
        for (access, write) in [(Access::SEND, false), (Access::RECV, true)] {
            let granted = open(&handle, access).unwrap();
            assert_eq!(granted.len, LEN);
            assert_eq!(
                stat(&granted.file).unwrap().st_ino,
                stat(&file).unwrap().st_ino
            );
            let mode = write_mode(&granted.file);
            assert_eq!(mode == libc::O_RDWR, write, "{access:?}");
        }
        for access in [Access::REMOTE_READ, BOTH | Access::WRITE] {
            assert_eq!(open(&handle, access).err(), Some(FiErrno::EACCES));
        }
        drop(grant);
        assert_eq!(refused(&handle), FiErrno::ENOENT);
    }

    fn write_mode(file: &OwnedFd) -> i32 {
        // SAFETY: no memory is passed.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) & libc::O_ACCMODE }
    }

    #[test]
    fn a_grant_cannot_be_changed() {
        let grant = Grant::new(&memory(SIZE_SEALS), LEN, Access::SEND).unwrap();
        let file = std::fs::File::from(grant.file.try_clone().unwrap());
        assert!(file.write_all_at(&[0xff], 24).is_err());
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn handles_forged_with_a_right_sum() {
        let file = memory(SIZE_SEALS);
        let grant = Grant::new(&file, LEN, BOTH).unwrap();
        let words = words::<HANDLE>(&grant.handle(), HANDLE_MAGIC).unwrap();
        let other = Grant::new(&file, LEN, BOTH).unwrap();
        // token
        assert_eq!(refused(&forged(&grant, 3, words[3] ^ 1)), FiErrno::ENOENT);
        assert_eq!(refused(&forged(&grant, 4, 0)), FiErrno::ENOENT);
        // another process, and numbers of none
        for pid in [1, 0, i32::MAX as u64] {
            let error = refused(&forged(&grant, 1, pid));
            assert!([FiErrno::ENOENT, FiErrno::EACCES].contains(&error), "{pid}");
        }
        for word in [1 << 31, u64::MAX] {
            assert_eq!(refused(&forged(&grant, 1, word)), FiErrno::EINVAL);
            assert_eq!(refused(&forged(&grant, 2, word)), FiErrno::EINVAL);
        }
        // the descriptor of another grant, of the memory, and one that is not open
        for fd in [other.file.as_raw_fd(), file.as_raw_fd(), 999_999] {
            assert_eq!(refused(&forged(&grant, 2, fd as u64)), FiErrno::ENOENT);
        }
        // another version
        assert_eq!(
            refused(&forged(&grant, 0, HANDLE_MAGIC + 1)),
            FiErrno::EINVAL
        );
        assert!(open(&grant.handle(), BOTH).is_ok());
    }

    /// Opening a pipe without a writer would block.
    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let grant = Grant::new(&memory(SIZE_SEALS), LEN, BOTH).unwrap();
        let mut ends = [0; 2];
        // SAFETY: `ends` has two elements.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        // SAFETY: the call has just returned these descriptors; no other owner exists.
        let [read, write] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        drop(write);
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let disk: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        for file in [&read, &null, &disk] {
            let handle = forged(&grant, 2, file.as_raw_fd() as u64);
            assert_eq!(refused(&handle), FiErrno::ENOENT);
        }
    }

    /// A process that publishes a false grant.
    #[test]
    fn grants_that_lie() {
        let file = memory(SIZE_SEALS);
        let there = stat(&file).unwrap();
        let show = |memory: &OwnedFd, len: u64, inode: u64| {
            let mut words = [
                GRANT_MAGIC,
                1,
                2,
                BOTH.bits(),
                len,
                memory.as_raw_fd() as u64,
                there.st_dev,
                inode,
                0,
            ];
            words[GRANT - 1] = checksum(&words[..GRANT - 1]);
            let shown = std::fs::File::from(create(c"lie").unwrap());
            shown.write_all_at(&bytes(words), 0).unwrap();
            let file: OwnedFd = shown.into();
            seal(&file, SIZE_SEALS | libc::F_SEAL_WRITE).unwrap();
            let grant = Grant {
                access: BOTH,
                token: [1, 2],
                file,
            };
            open(&grant.handle(), Access::SEND).map(|granted| granted.len)
        };
        assert_eq!(show(&file, 8192, there.st_ino), Ok(8192));
        for len in [0, 4096, 8193, u64::MAX, 1 << 63] {
            assert_eq!(
                show(&file, len, there.st_ino),
                Err(FiErrno::EINVAL),
                "{len}"
            );
        }
        assert_eq!(
            show(&file, LEN as u64, there.st_ino + 1),
            Err(FiErrno::EINVAL)
        );
        for seals in [0, libc::F_SEAL_GROW, libc::F_SEAL_SHRINK] {
            let loose = memory(seals);
            let inode = stat(&loose).unwrap().st_ino;
            assert_eq!(
                show(&loose, LEN as u64, inode),
                Err(FiErrno::EINVAL),
                "{seals}"
            );
        }
        let gone = 999_999;
        // SAFETY: never used as a descriptor: nothing of that number is open.
        let gone = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(gone) });
        assert_eq!(show(&gone, LEN as u64, there.st_ino), Err(FiErrno::ENOENT));
    }
}
