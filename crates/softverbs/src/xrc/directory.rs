//! The registry's part for XRC domains: the file of each number, and the member processes.
//!
//! Membership is a lock on a byte without content: it can't be forged for a live process, and ends
//! with the process, or with the last of its forked children that execute no other program.
//!
//! The locks of one call ([`hold_all`], [`hold_domain`]) are taken on the registry's file, opened
//! for the call. So a forked child can keep such a lock only if it was forked while the call held
//! it, and the parent was killed before the end of the call.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use crate::limits::PEER_WAIT;
use crate::registry::ENTRY;
use crate::segment::layout::xrc::MAX_DOMAINS;
use crate::segment::layout::{MAX_PLACES, MAX_PROCESSES};
use crate::sync::pause;
use crate::sys::{self, Errno, Grow, Res};

/// Entries follow those of the processes: node u32, valid u32, device u64, inode u64, cookie u64,
/// and at the end a u64 checksum of the rest.
const ENTRIES_AT: u64 = (MAX_PROCESSES * ENTRY) as u64;
const SUM: usize = 56;
/// Bytes of an entry that are its name.
const NAME: usize = 24;
const VALID: u32 = 0x7867_7401;

/// Offset of the locks, behind all content. One byte for each slot of each domain, one for each
/// domain, and one for all domains.
const MEMBERS_AT: u64 = 1 << 24;
const CONTROL_AT: u64 = 1 << 26;
const ALL_AT: u64 = 1 << 27;

/// The key of a domain: the emulated node and a file, or no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) node: u32,
    /// Device and inode; `None` for a domain that other processes can't find.
    pub(crate) file: Option<(u64, u64)>,
}

impl Name {
    /// The first bytes of an entry with this name.
    fn to_bytes(self) -> [u8; NAME] {
        let mut bytes = [0; NAME];
        let (device, inode) = self.file.unwrap_or((0, 0));
        let kind = VALID | u32::from(self.file.is_some()) << 31;
        bytes[0..4].copy_from_slice(&self.node.to_ne_bytes());
        bytes[4..8].copy_from_slice(&kind.to_ne_bytes());
        bytes[8..16].copy_from_slice(&device.to_ne_bytes());
        bytes[16..24].copy_from_slice(&inode.to_ne_bytes());
        bytes
    }
}

/// A domain's entry in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: Name,
    /// Unique among all domains; not 0.
    pub(crate) cookie: u64,
}

impl Entry {
    fn to_bytes(self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..NAME].copy_from_slice(&self.name.to_bytes());
        bytes[NAME..NAME + 8].copy_from_slice(&self.cookie.to_ne_bytes());
        let sum = sys::hash(&bytes[..SUM]);
        bytes[SUM..].copy_from_slice(&sum.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let first = word(0)?;
        let (node, kind) = (first as u32, (first >> 32) as u32);
        let cookie = word(NAME)?;
        let good =
            kind & !(1 << 31) == VALID && cookie != 0 && word(SUM)? == sys::hash(&bytes[..SUM]);
        let file = (word(8)?, word(16)?);
        good.then_some(Self {
            name: Name {
                node,
                file: (kind >> 31 == 1).then_some(file),
            },
            cookie,
        })
    }
}

/// Holds a lock of the registry until it is dropped.
pub(crate) struct RangeLock<'a> {
    file: Reopened<'a>,
    byte: u64,
}

/// The open file that a lock belongs to.
enum Reopened<'a> {
    /// The registry, opened for this lock.
    Own(File),
    /// The process's own one, if the registry cannot be opened again (no descriptor or memory, no
    /// `/proc`, no permission): a target can be closed in any case. Locks of this kind do not
    /// exclude each other within the process.
    Shared(&'a File),
}

impl std::ops::Deref for Reopened<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::Own(file) => file,
            Self::Shared(file) => file,
        }
    }
}

impl Drop for RangeLock<'_> {
    fn drop(&mut self) {
        // Closing the file is not enough: a child that was forked meanwhile has a copy. A lock that
        // can't be released ends with the last process that has the open file.
        let _ = sys::unlock(&self.file, byte(self.byte));
    }
}

fn byte(at: u64) -> Range<u64> {
    at..at + 1
}

fn members(domain: u32) -> u64 {
    MEMBERS_AT + u64::from(domain) * MAX_PROCESSES as u64
}

/// Acquires a lock; waits at most 5 s for its holder. The callers exclude threads of one process by
/// a mutex, as locks of [`Reopened::Shared`] do not.
///
/// # Errors
/// `EBUSY`: another process holds the lock for 5 s.
fn hold(file: &File, at: u64) -> Res<RangeLock<'_>> {
    let begin = Instant::now();
    let mut round = 64;
    let file = match sys::reopen(file) {
        Ok(own) => Reopened::Own(own),
        Err(_) => Reopened::Shared(file),
    };
    while let Err(error) = sys::lock(&file, byte(at)) {
        if !matches!(error, Errno(libc::EAGAIN | libc::EACCES)) {
            return Err(error);
        }
        if begin.elapsed() > PEER_WAIT {
            return Err(Errno(libc::EBUSY));
        }
        round += 8;
        pause(round);
    }
    Ok(RangeLock { file, byte: at })
}

/// Acquires the lock against opening domains.
pub(crate) fn hold_all(file: &File) -> Res<RangeLock<'_>> {
    hold(file, ALL_AT)
}

/// Acquires the lock under which processes create, open and destroy targets of a domain.
///
/// # Errors
/// `EBUSY`: another process holds the lock for 5 s. Those of `fcntl(2)`.
pub(crate) fn hold_domain(file: &File, domain: u32) -> Res<RangeLock<'_>> {
    // Every second byte: the kernel merges adjacent locks of one open file into one lock, whose
    // range would identify no single domain.
    hold(file, CONTROL_AT + 2 * u64::from(domain))
}

/// The entry of the domain with this number, if it ever existed.
pub(crate) fn read(file: &File, domain: u32) -> Option<Entry> {
    let mut bytes = [0; ENTRY];
    let at = ENTRIES_AT + u64::from(domain) * ENTRY as u64;
    file.read_exact_at(&mut bytes, at).ok()?;
    Entry::from_bytes(&bytes)
}

/// Writes a domain's entry. The caller holds [`hold_all`].
pub(crate) fn write(file: &File, domain: u32, entry: Entry) -> Res<()> {
    let at = ENTRIES_AT + u64::from(domain) * ENTRY as u64;
    Ok(file.write_all_at(&entry.to_bytes(), at)?)
}

/// All numbers whose entry has this name; the domains may have no members.
///
/// # Errors
/// `ENOMEM`: no memory. Others: those of the read.
pub(crate) fn named(file: &File, name: Name) -> Res<Vec<(u32, Entry)>> {
    let mut all = sys::zeroed::<u8>(MAX_DOMAINS * ENTRY)?;
    let there = read_what_is_there(file, &mut all)?;
    let wanted = name.to_bytes();
    let mut found = Vec::new();
    for (domain, bytes) in all[..there].chunks_exact(ENTRY).enumerate() {
        if bytes.starts_with(&wanted)
            && let Some(entry) = Entry::from_bytes(bytes)
        {
            found.try_push((domain as u32, entry))?;
        }
    }
    Ok(found)
}

/// Reads the entries that the file has, from the first one on. Returns the number of bytes.
fn read_what_is_there(file: &File, into: &mut [u8]) -> Res<usize> {
    let mut there = 0;
    while there < into.len() {
        match file.read_at(&mut into[there..], ENTRIES_AT + there as u64) {
            Ok(0) => break,
            Ok(count) => there += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(there)
}

/// Enters the process in `slot` as a member.
///
/// # Errors
/// `EAGAIN`: another process holds the lock on the byte.
pub(crate) fn join(file: &File, domain: u32, slot: u32) -> Res<()> {
    sys::lock(file, byte(members(domain) + u64::from(slot)))
}

pub(crate) fn leave(file: &File, domain: u32, slot: u32) {
    // A lock that can't be released ends with the process and its forked children.
    let _ = sys::unlock(file, byte(members(domain) + u64::from(slot)));
}

/// Whether the process in `slot`, not this one, is a member.
pub(crate) fn is_member(file: &File, domain: u32, slot: u32) -> bool {
    sys::locked(file, byte(members(domain) + u64::from(slot)))
}

/// Slots of the members other than this process.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn others(file: &File, domain: u32) -> Res<Vec<u32>> {
    let first = members(domain);
    let end = first + MAX_PLACES as u64;
    let mut found = sys::with_room(MAX_PLACES)?;
    // The kernel reports any one lock of a range, not necessarily the first.
    let mut ranges = sys::with_room(MAX_PLACES + 1)?;
    ranges.push(first..end);
    while let Some(range) = ranges.pop() {
        let Some(held) = sys::holder(file, range.clone()) else {
            continue;
        };
        // A process may have locked more than one byte.
        let (from, to) = (held.start.max(range.start), held.end.min(range.end));
        found.extend((from..to).map(|at| (at - first) as u32));
        ranges.extend(
            [range.start..from, to..range.end]
                .into_iter()
                .filter(|r| !r.is_empty()),
        );
    }
    Ok(found)
}

/// Whether another process is a member.
pub(crate) fn is_open_elsewhere(file: &File, domain: u32) -> bool {
    let first = members(domain);
    sys::locked(file, first..first + MAX_PLACES as u64)
}

#[cfg(test)]
#[allow(unsafe_code, reason = "forks")]
mod tests {
    use std::time::Duration;

    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    fn two() -> (File, File) {
        let path = std::env::temp_dir().join(format!("softverbs-xrc-{}", sys::random()));
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .unwrap()
        };
        let both = (open(), open());
        std::fs::remove_file(&path).unwrap();
        assert_ne!(both.0.as_raw_fd(), both.1.as_raw_fd());
        both
    }

    #[test]
    fn entries_survive_their_bytes() {
        let (file, _) = two();
        let name = |file| Name { node: 3, file };
        for name in [name(None), name(Some((1, u64::MAX)))] {
            let entry = Entry { name, cookie: 9 };
            write(&file, 511, entry).unwrap();
            assert_eq!(read(&file, 511), Some(entry));
            write(&file, 7, entry).unwrap();
            assert_eq!(named(&file, name).unwrap(), [(7, entry), (511, entry)]);
            file.write_all_at(&[0; ENTRY], ENTRIES_AT + 7 * ENTRY as u64)
                .unwrap();
            assert_eq!(named(&file, name).unwrap(), [(511, entry)]);
            for at in 0..ENTRY {
                let mut torn = entry.to_bytes();
                torn[at] ^= 0x10;
                assert_eq!(Entry::from_bytes(&torn), None);
            }
        }
        assert_eq!(read(&file, 0), None);
        // a file that ends within the table has the entries before its end
        file.set_len(ENTRIES_AT + 511 * ENTRY as u64 + 10).unwrap();
        assert!(named(&file, name(None)).unwrap().is_empty());
        assert_eq!(Entry::from_bytes(&[0; 7]), None);
    }

    #[test]
    fn members_are_those_who_hold_a_lock() {
        let (mine, theirs) = two();
        assert!(!is_open_elsewhere(&mine, 7));
        for slot in [0, 5, 6, 895] {
            join(&theirs, 7, slot).unwrap();
        }
        join(&theirs, 6, 895).unwrap();
        join(&theirs, 8, 0).unwrap();
        join(&mine, 7, 9).unwrap();
        let mut found = others(&mine, 7).unwrap();
        found.sort_unstable();
        assert_eq!(found, [0, 5, 6, 895]);
        assert!(is_member(&mine, 7, 5) && !is_member(&mine, 7, 4) && !is_member(&mine, 7, 9));
        assert_eq!(join(&mine, 7, 5), Err(Errno(libc::EAGAIN)));
        leave(&theirs, 7, 5);
        assert!(!is_member(&mine, 7, 5) && is_member(&mine, 7, 6));
        // closing the file releases the process's locks, and so its memberships
        drop(theirs);
        assert!(others(&mine, 7).unwrap().is_empty() && !is_open_elsewhere(&mine, 6));
    }

    #[test]
    fn one_waits_for_the_other() {
        let (mine, theirs) = two();
        let held = hold_domain(&mine, 3).unwrap();
        let other = hold_domain(&theirs, 4).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| hold_domain(&theirs, 3).map(drop));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waits.is_finished());
            drop(held);
            waits.join().unwrap().unwrap();
        });
        drop(other);
    }

    /// A process that ends with the test, whatever its result.
    struct Forked(libc::pid_t);

    impl Drop for Forked {
        fn drop(&mut self) {
            // SAFETY: a child of this process that was not waited for: the number is no other's.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    /// Closes all descriptors but these: a forked process has copies of those of other tests.
    fn keep(mut fds: [i32; 3]) {
        fds.sort_unstable();
        let mut first = 0;
        for fd in fds.into_iter().chain([i32::MAX]) {
            if first < fd {
                // SAFETY: no memory is passed; a forked process drops no owner of a descriptor.
                unsafe { libc::syscall(libc::SYS_close_range, first, fd - 1, 0) };
            }
            first = fd.saturating_add(1);
        }
    }

    /// Waits until no process has the other end of the pipe, and ends this process.
    fn end_with(mut test: impl Read) -> ! {
        let _ = test.read(&mut [0]);
        // SAFETY: no memory is passed.
        unsafe { libc::_exit(1) }
    }

    /// A child that executes no other program has copies of its parent's descriptors. If it was
    /// forked before the call in which the parent is killed, it does not keep the lock of the call.
    #[test]
    fn a_child_keeps_no_lock_of_a_killed_parent() {
        let (file, theirs) = two();
        let (mut from, mut to) = std::io::pipe().unwrap();
        let (test, alive) = std::io::pipe().unwrap();
        // SAFETY: the processes call functions of the kernel, and never return.
        let parent = unsafe { libc::fork() };
        if parent == 0 {
            keep([file.as_raw_fd(), to.as_raw_fd(), test.as_raw_fd()]);
            // SAFETY: as above.
            let child = unsafe { libc::fork() };
            if child == 0 {
                keep([file.as_raw_fd(), test.as_raw_fd(), test.as_raw_fd()]);
                end_with(test);
            }
            let lock = hold_domain(&file, 3);
            if child < 0 || lock.is_err() || to.write_all(b"held").is_err() {
                // SAFETY: no memory is passed.
                unsafe { libc::_exit(1) };
            }
            end_with(test);
        }
        assert!(parent > 0);
        let parent = Forked(parent);
        drop((to, test));
        from.read_exact(&mut [0; 4]).expect("the parent has failed");
        assert_eq!(
            sys::lock(&theirs, byte(CONTROL_AT + 6)),
            Err(Errno(libc::EAGAIN))
        );
        drop(parent);
        let free = hold_domain(&theirs, 3).map(drop);
        drop(alive);
        assert_eq!(free, Ok(()));
    }
}
