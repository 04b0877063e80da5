//! The list of processes that have the device open: a small file that all of them find by name.
//!
//! It is read and written with `pread` and `pwrite` under a lock on the open file, and never
//! mapped, so truncating it can hurt nobody. Whoever takes the lock may meet entries of dead
//! processes, and takes their places.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::segment::layout::MAX_PROCESSES;
use crate::sys::{self, Errno, Identity, Res};

/// Bytes of an entry: pid u32, segment fd u32, start time u64, cookie u64, node u32, valid u32.
const ENTRY: usize = 64;
const VALID: u32 = 0x7667_7401;

/// What the registry says about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) identity: Identity,
    pub(crate) segment_fd: RawFd,
    pub(crate) node: u32,
}

impl Entry {
    pub(crate) fn to_bytes(self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[0..4].copy_from_slice(&self.identity.pid.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.segment_fd.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.identity.start_time.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.identity.cookie.to_ne_bytes());
        bytes[24..28].copy_from_slice(&self.node.to_ne_bytes());
        bytes[28..32].copy_from_slice(&VALID.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; ENTRY]) -> Option<Self> {
        let u32_at = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        (u32_at(28) == VALID && u32_at(0) != 0).then(|| Self {
            identity: Identity {
                pid: u32_at(0),
                start_time: u64_at(8),
                cookie: u64_at(16),
            },
            segment_fd: u32_at(4).cast_signed(),
            node: u32_at(24),
        })
    }

    fn lives(&self) -> bool {
        sys::start_time(self.identity.pid) == Some(self.identity.start_time)
    }
}

/// The registry's file, open.
#[derive(Debug)]
pub(crate) struct Registry {
    file: File,
}

/// Holds the registry's lock.
struct Locked<'a>(&'a File);

impl<'a> Locked<'a> {
    fn new(file: &'a File) -> Res<Self> {
        // A lock of the open file, not of the process: it is released when the holder dies, and
        // another descriptor of the same file does not release it.
        loop {
            match file.lock() {
                Ok(()) => return Ok(Self(file)),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // The lock goes with the file at the latest.
        let _ = self.0.unlock();
    }
}

impl Registry {
    /// Opens the registry of this user and these namespaces, and makes it if it is not there.
    ///
    /// # Errors
    /// `EACCES` where no directory takes it or it belongs to somebody else.
    pub(crate) fn open() -> Res<Self> {
        let mut last = Errno(libc::EACCES);
        for directory in directories() {
            match Self::open_in(&directory) {
                Ok(registry) => return Ok(registry),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn open_in(directory: &Path) -> Res<Self> {
        // Processes in other namespaces can't be reached, so they are other hosts.
        let name = format!(
            "softverbs.{}.{}.{}",
            sys::effective_uid(),
            sys::namespace("net"),
            sys::namespace("pid"),
        );
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(directory.join(name))?;
        let meta = file.metadata()?;
        if meta.uid() != sys::effective_uid() || !meta.is_file() || meta.mode() & 0o077 != 0 {
            return Err(Errno(libc::EACCES));
        }
        Ok(Self { file })
    }

    /// One that nobody else finds, and its file.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn anonymous() -> Res<(Self, File)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .open(std::env::temp_dir())?;
        Ok((
            Self {
                file: file.try_clone()?,
            },
            file,
        ))
    }

    fn read(&self, slot: usize) -> Option<Entry> {
        let mut bytes = [0; ENTRY];
        self.file
            .read_exact_at(&mut bytes, (slot * ENTRY) as u64)
            .ok()?;
        Entry::from_bytes(&bytes)
    }

    /// Enters this process; its slot.
    ///
    /// # Errors
    /// `ENOMEM` where all places are taken by living processes.
    pub(crate) fn join(&self, entry: Entry) -> Res<u32> {
        let _lock = Locked::new(&self.file)?;
        // Start at a place of one's own, so that a number rarely comes back soon.
        let start = entry.identity.pid as usize % MAX_PROCESSES;
        let slot = (0..MAX_PROCESSES)
            .map(|i| (start + i) % MAX_PROCESSES)
            .find(|&slot| self.read(slot).is_none_or(|other| !other.lives()))
            .ok_or(Errno(libc::ENOMEM))?;
        self.file
            .write_all_at(&entry.to_bytes(), (slot * ENTRY) as u64)?;
        Ok(slot as u32)
    }

    /// The living process in `slot`.
    pub(crate) fn lookup(&self, slot: u32) -> Option<Entry> {
        let _lock = Locked::new(&self.file).ok()?;
        self.read(slot as usize).filter(Entry::lives)
    }
}

impl AsRawFd for Registry {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Where the registry may be, best first. Nothing cleans the first two while processes run.
fn directories() -> Vec<PathBuf> {
    let mut list = vec![PathBuf::from("/dev/shm")];
    list.extend(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from));
    list.push(PathBuf::from("/tmp"));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: u32, start_time: u64) -> Entry {
        Entry {
            identity: Identity {
                pid,
                start_time,
                cookie: 9,
            },
            segment_fd: 5,
            node: 1,
        }
    }

    #[test]
    fn entries_survive_their_bytes() {
        let e = entry(77, u64::MAX - 3);
        assert_eq!(Entry::from_bytes(&e.to_bytes()), Some(e));
        assert_eq!(Entry::from_bytes(&[0; ENTRY]), None);
        assert_eq!(Entry::from_bytes(&[0xff; ENTRY]), None);
    }

    #[test]
    fn places_of_the_dead_are_taken() {
        let directory = std::env::temp_dir().join(format!("softverbs-test-{}", sys::random()));
        std::fs::create_dir(&directory).unwrap();
        let registry = Registry::open_in(&directory).unwrap();
        let me = entry(std::process::id(), sys::own_start_time().unwrap());
        let dead = entry(me.identity.pid, 1);
        let first = registry.join(dead).unwrap();
        assert_eq!(registry.lookup(first), None);
        assert_eq!(registry.join(me).unwrap(), first);
        assert_eq!(registry.lookup(first), Some(me));
        assert_ne!(registry.join(me).unwrap(), first);
        std::fs::remove_dir_all(directory).unwrap();
    }
}
