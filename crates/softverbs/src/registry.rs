//! The list of processes that have the device open: a small file that all of them find by name.
//!
//! The file is read and written with `pread` and `pwrite` and never mapped, so truncating the file
//! does no harm. The owner of a place holds a lock on the bytes of its entry while it has the file
//! open; no process waits for such a lock. Readers take no lock: an entry has a checksum. The XRC
//! domains (`crate::xrc`) follow the entries of the processes.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::environment;
use crate::segment::layout::MAX_PLACES;
use crate::sync::pause;
use crate::sys::{self, Errno, Identity, Res, ShortPath};

/// Bytes of an entry: pid u32, descriptor of the segment's tables u32, start time u64, cookie u64,
/// node u32, valid u32, inode of the tables u64, and as the last word a u64 checksum of the other
/// bytes.
pub(crate) const ENTRY: usize = 64;
const SUM: usize = 56;
const VALID: u32 = 0x7667_7403;

/// Bytes of a path, with the terminating 0.
const MAX_PATH: usize = libc::PATH_MAX as usize;

/// Maximum number of reads of an entry with a bad checksum: its owner may be writing it.
const READS: u32 = 50;

/// A process in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) identity: Identity,
    pub(crate) segment_fd: RawFd,
    pub(crate) segment_inode: u64,
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
        bytes[32..40].copy_from_slice(&self.segment_inode.to_ne_bytes());
        let sum = sum(&bytes);
        bytes[SUM..].copy_from_slice(&sum.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; ENTRY]) -> Option<Self> {
        let u32_at = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let valid = u32_at(28) == VALID && u32_at(0) != 0 && u64_at(SUM) == sum(bytes);
        valid.then(|| Self {
            identity: Identity {
                pid: u32_at(0),
                start_time: u64_at(8),
                cookie: u64_at(16),
            },
            segment_fd: u32_at(4).cast_signed(),
            segment_inode: u64_at(32),
            node: u32_at(24),
        })
    }

    /// Whether the process runs and still executes the program that made the entry, or that cannot
    /// be found out now.
    fn lives(&self) -> bool {
        let Identity {
            pid, start_time, ..
        } = self.identity;
        sys::may_run(pid, start_time) && sys::has_open(pid, self.segment_fd, self.segment_inode)
    }
}

/// The byte range of a place in the file.
fn bytes_of(slot: u32) -> Range<u64> {
    let at = u64::from(slot) * ENTRY as u64;
    at..at + ENTRY as u64
}

fn sum(bytes: &[u8; ENTRY]) -> u64 {
    sys::hash(&bytes[..SUM])
}

/// The registry's file, open.
#[derive(Debug)]
pub(crate) struct Registry {
    file: File,
}

/// The state of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    Taken(Entry),
    /// The process of the entry has ended.
    Ended,
    /// No valid entry.
    Empty,
}

impl Registry {
    /// Opens the registry of this user and these namespaces, and creates it if it does not exist.
    ///
    /// # Errors
    /// `EACCES`: no directory accepts the file, or the file belongs to another user. `EMFILE` and
    /// others ([`is_lack`]): in another directory this process might be alone. Otherwise the error
    /// of the last directory.
    pub(crate) fn open() -> Res<Self> {
        first_of(directories(), |directory| Self::open_in(directory.as_ref()))
    }

    /// Opens the registry and enters this process; returns its slot.
    ///
    /// # Errors
    /// As [`Self::open`] and [`Self::join`].
    pub(crate) fn enter(entry: Entry) -> Res<(Self, u32)> {
        loop {
            let registry = Self::open()?;
            let slot = registry.join(entry)?;
            // If another process has removed the file in between, later processes open another
            // file: try again.
            if registry.is_there() {
                return Ok((registry, slot));
            }
        }
    }

    fn open_in(directory: &Path) -> Res<Self> {
        // Processes in other namespaces cannot be reached; they count as other hosts.
        let path = ShortPath::<MAX_PATH>::below(
            directory,
            format_args!(
                "/softverbs10.{}.{}.{}",
                sys::effective_uid(),
                sys::namespace("net"),
                sys::namespace("pid"),
            ),
        )?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path.as_path())?;
        let meta = file.metadata()?;
        if meta.uid() != sys::effective_uid() || !meta.is_file() || meta.mode() & 0o077 != 0 {
            return Err(Errno(libc::EACCES));
        }
        Ok(Self { file })
    }

    /// A registry without a name in the file system, and its file.
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

    fn read(&self, slot: u32) -> EntryState {
        let mut bytes = [0; ENTRY];
        for round in 0..READS {
            if self
                .file
                .read_exact_at(&mut bytes, bytes_of(slot).start)
                .is_err()
                || bytes == [0; ENTRY]
            {
                return EntryState::Empty;
            }
            if let Some(entry) = Entry::from_bytes(&bytes) {
                return if entry.lives() {
                    EntryState::Taken(entry)
                } else {
                    EntryState::Ended
                };
            }
            pause(round);
        }
        EntryState::Empty
    }

    /// Enters this process; returns its slot, which the process keeps while the file is open.
    ///
    /// # Errors
    /// `ENOMEM`: living processes have all places.
    pub(crate) fn join(&self, entry: Entry) -> Res<u32> {
        // The search starts at a place derived from the pid, so that a slot is rarely reused soon.
        let count = MAX_PLACES as u32;
        let start = if environment::REUSE_SRQ.is_on() {
            0
        } else {
            entry.identity.pid % count
        };
        for slot in (0..count).map(|i| (start + i) % count) {
            if matches!(self.read(slot), EntryState::Taken(_))
                || sys::lock(&self.file, bytes_of(slot)).is_err()
            {
                continue;
            }
            // Another process may have written its entry between the read and the lock.
            if matches!(self.read(slot), EntryState::Taken(_)) {
                sys::unlock(&self.file, bytes_of(slot))?;
                continue;
            }
            self.file
                .write_all_at(&entry.to_bytes(), bytes_of(slot).start)?;
            return Ok(slot);
        }
        Err(Errno(libc::ENOMEM))
    }

    /// The living process in `slot`.
    pub(crate) fn lookup(&self, slot: u32) -> Option<Entry> {
        match self.read(slot) {
            EntryState::Taken(entry) => Some(entry),
            EntryState::Ended | EntryState::Empty => None,
        }
    }

    /// Whether the process that had `slot` may still be running. Another process may have
    /// overwritten its entry; the lock on the entry remains.
    pub(crate) fn may_live(&self, slot: u32) -> bool {
        match self.read(slot) {
            EntryState::Taken(_) => true,
            EntryState::Ended => false,
            EntryState::Empty => sys::locked(&self.file, bytes_of(slot)),
        }
    }

    /// The registry's file, which also holds the XRC domains.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Whether the file still has a name, so that other processes can open it.
    fn is_there(&self) -> bool {
        self.file.metadata().is_ok_and(|meta| meta.nlink() > 0)
    }
}

impl AsRawFd for Registry {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// What `open` returns for the first directory that accepts the file.
///
/// # Errors
/// `EACCES`: there is no directory. The first error that is [a lack](is_lack), or the last one.
fn first_of<D, T>(directories: impl IntoIterator<Item = D>, open: impl Fn(D) -> Res<T>) -> Res<T> {
    let mut last = Errno(libc::EACCES);
    for directory in directories {
        match open(directory) {
            Err(error) if !is_lack(error) => last = error,
            result => return result,
        }
    }
    Err(last)
}

/// Whether the error passes, so that other processes of the user may open the file in the
/// directory. All of them get any other error, for instance `ENXIO` if another user has made a
/// socket of this name in a directory that all users may write, and use the next directory.
fn is_lack(error: Errno) -> bool {
    matches!(
        error.0,
        libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSPC | libc::EDQUOT | libc::EINTR
    )
}

/// Directories for the registry, preferred ones first. Some systems clean them when a user's last
/// session ends: processes that have the file open then continue, and do not find processes that
/// start later.
fn directories() -> impl Iterator<Item = Cow<'static, Path>> {
    let fixed = |path| Cow::Borrowed(Path::new(path));
    // Evaluated only if the first directory fails.
    let of_user = || {
        environment::RUNTIME_DIR
            .value()
            .map(|path| Cow::Owned(path.into()))
    };
    std::iter::once(fixed("/dev/shm"))
        .chain(std::iter::once_with(of_user).flatten())
        .chain(std::iter::once(fixed("/tmp")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(file: &File, start_time: u64) -> Entry {
        Entry {
            identity: Identity {
                pid: std::process::id(),
                start_time,
                cookie: 9,
            },
            segment_fd: file.as_raw_fd(),
            segment_inode: file.metadata().unwrap().ino(),
            node: 1,
        }
    }

    #[test]
    fn entries_survive_their_bytes() {
        let (_, file) = Registry::anonymous().unwrap();
        let e = entry(&file, u64::MAX - 3);
        assert_eq!(Entry::from_bytes(&e.to_bytes()), Some(e));
        assert_eq!(Entry::from_bytes(&[0; ENTRY]), None);
        assert_eq!(Entry::from_bytes(&[0xff; ENTRY]), None);
        for byte in 0..ENTRY {
            let mut torn = e.to_bytes();
            torn[byte] ^= 0x10;
            assert_eq!(Entry::from_bytes(&torn), None);
        }
    }

    /// A process without a descriptor for a moment does not use another registry than the others.
    #[test]
    fn a_lack_of_resources_leads_to_no_other_directory() {
        let opened = |errors: &[i32]| {
            first_of(errors, |errno| match errno {
                0 => Ok(()),
                errno => Err(Errno(*errno)),
            })
        };
        let lacks = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOSPC];
        for errno in lacks.into_iter().chain([libc::EDQUOT, libc::EINTR]) {
            assert_eq!(opened(&[errno, 0]), Err(Errno(errno)));
            assert_eq!(opened(&[libc::ENOENT, errno, 0]), Err(Errno(errno)));
        }
        let of_the_place = [libc::ENOENT, libc::EACCES, libc::EROFS, libc::ELOOP];
        for errno in of_the_place.into_iter().chain([libc::ENXIO, libc::ETXTBSY]) {
            assert_eq!(opened(&[errno, 0]), Ok(()));
            assert_eq!(opened(&[libc::EPERM, errno]), Err(Errno(errno)));
        }
        assert_eq!(opened(&[]), Err(Errno(libc::EACCES)));
    }

    /// Another user's socket has the name of the file.
    #[test]
    fn a_socket_of_the_name_leads_to_the_next_directory() {
        let name = format!("softverbs-test-{}", sys::random());
        let directories = ["socket", "next"].map(|part| {
            let directory = std::env::temp_dir().join(format!("{name}-{part}"));
            std::fs::create_dir(&directory).unwrap();
            directory
        });
        let registry = Registry::open_in(&directories[0]).unwrap();
        drop(registry);
        let mut files = std::fs::read_dir(&directories[0]).unwrap();
        let file = files.next().unwrap().unwrap().path();
        std::fs::remove_file(&file).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(&file).unwrap();
        let opened = first_of(&directories, |directory| Registry::open_in(directory));
        let name = file.file_name().unwrap();
        let inode = |opened: &File| opened.metadata().unwrap().ino();
        let next = File::open(directories[1].join(name)).unwrap();
        assert_eq!(inode(opened.unwrap().file()), inode(&next));
        drop(socket);
        for directory in directories {
            std::fs::remove_dir_all(directory).unwrap();
        }
    }

    #[test]
    fn places_of_the_dead_are_taken() {
        let (registry, file) = Registry::anonymous().unwrap();
        let me = entry(&file, sys::own_start_time().unwrap());
        let dead = entry(&file, 1);
        let first = registry.join(dead).unwrap();
        assert_eq!(registry.lookup(first), None);
        assert!(!registry.may_live(first));
        assert_eq!(registry.join(me).unwrap(), first);
        assert_eq!(registry.lookup(first), Some(me));
        assert!(registry.may_live(first));
        let second = registry.join(me).unwrap();
        assert_ne!(second, first);
        // The process executes another program.
        let elsewhere = Entry {
            segment_inode: me.segment_inode + 1,
            ..me
        };
        let at = u64::from(second) * ENTRY as u64;
        file.write_all_at(&elsewhere.to_bytes(), at).unwrap();
        assert_eq!(registry.lookup(second), None);
        assert!(!registry.may_live(second));
    }

    /// A process that is stopped while it holds a lock blocks only its own place.
    #[test]
    fn nobody_waits_for_a_lock() {
        let directory = std::env::temp_dir().join(format!("softverbs-test-{}", sys::random()));
        std::fs::create_dir(&directory).unwrap();
        let open = || Registry::open_in(&directory).unwrap();
        let (stopped, registry) = (open(), open());
        let me = entry(&registry.file, sys::own_start_time().unwrap());
        stopped.file.lock().unwrap();
        let slot = stopped.join(me).unwrap();
        // The stopped process has taken the lock and not yet written its entry.
        let at = u64::from(slot) * ENTRY as u64;
        stopped.file.write_all_at(&[0; ENTRY], at).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = registry.join(me).unwrap();
                tell.send((other, registry.lookup(other))).unwrap();
            });
            let limit = std::time::Duration::from_secs(20);
            let got = told.recv_timeout(limit);
            // A waiting thread must end before the test does.
            stopped.file.unlock().unwrap();
            let (other, found) = got.expect("it waits");
            assert_ne!(other, slot);
            assert_eq!(found, Some(me));
        });
        // Truncating the file does not make a living process count as dead.
        registry.file.set_len(0).unwrap();
        assert_eq!(registry.lookup(slot), None);
        assert!(registry.may_live(slot));
        drop(stopped);
        assert!(!registry.may_live(slot));
        assert!(registry.is_there());
        std::fs::remove_dir_all(directory).unwrap();
        assert!(!registry.is_there());
    }
}
