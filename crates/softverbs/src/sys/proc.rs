//! What `/proc` says about processes, and reaching into them.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

use super::{Errno, Res, check};

/// Tells a process from every other that has or had its pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    /// Clock ticks since boot, field 22 of `/proc/<pid>/stat`.
    pub(crate) start_time: u64,
    /// Random, made when the process took its place in the registry.
    pub(crate) cookie: u64,
}

/// Whether a process that exists has this file open by this descriptor, which it has not after it
/// executed another program. True where that can't be known.
pub(crate) fn has_open(pid: u32, fd: RawFd, inode: u64) -> bool {
    match fs::metadata(format!("/proc/{pid}/fd/{fd}")) {
        Ok(file) => file.ino() == inode,
        // One whose first thread has ended shows nothing, and goes on.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => leader_ended(pid),
        Err(_) => true,
    }
}

/// A file that another process has open.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pid: u32,
    path: CString,
    device: u64,
    inode: u64,
}

impl OpenFile {
    /// The one that was opened by `fd` of that process.
    ///
    /// # Errors
    /// What the kernel says of looking at it.
    pub(crate) fn new(pid: u32, fd: RawFd, file: &OwnedFd) -> Res<Self> {
        // SAFETY: all zeros is a value of it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: writable structure.
        check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
        let path = CString::new(format!("/proc/{pid}/fd/{fd}"));
        Ok(Self {
            pid,
            path: path.map_err(|_| Errno(libc::EINVAL))?,
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }

    /// As [`has_open`].
    pub(crate) fn is_open(&self) -> bool {
        // SAFETY: all zeros is a value of it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a C string and a writable structure.
        match check(unsafe { libc::stat(self.path.as_ptr(), &raw mut stat) }) {
            Ok(_) => (stat.st_dev, stat.st_ino) == (self.device, self.inode),
            Err(Errno(libc::ENOENT)) => leader_ended(self.pid),
            Err(_) => true,
        }
    }
}

/// Whether the first thread of a process has ended and others have not.
fn leader_ended(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| parse_stat(&stat).is_some_and(|(_, zombie)| zombie))
}

/// The start time of a process that exists and is no zombie.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_start_time(&stat)
}

/// The start time of this process.
pub(crate) fn own_start_time() -> Option<u64> {
    fs::read_to_string("/proc/self/stat")
        .ok()
        .and_then(|stat| parse_start_time(&stat))
}

fn parse_start_time(stat: &str) -> Option<u64> {
    parse_stat(stat).map(|(start_time, _)| start_time)
}

/// The start time of a process that runs, and whether its first thread does not.
fn parse_stat(stat: &str) -> Option<(u64, bool)> {
    // The command, in parentheses, may hold anything.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u32 = fields.nth(16)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    match state {
        "X" | "x" => None,
        // The first thread waits for the others, which go on.
        "Z" => (threads > 1).then_some((start_time, true)),
        _ => Some((start_time, false)),
    }
}

/// The inode of one of this process's namespaces.
pub(crate) fn namespace(name: &str) -> u64 {
    fs::metadata(format!("/proc/self/ns/{name}")).map_or(0, |m| m.ino())
}

/// Names this host, across restarts of its processes.
pub(crate) fn machine_id() -> u64 {
    let text = fs::read("/etc/machine-id")
        .ok()
        .filter(|id| id.len() > 8)
        .or_else(|| fs::read("/proc/sys/kernel/random/boot_id").ok())
        .unwrap_or_default();
    hash(&text)
}

/// FNV-1a, the same in every program: any spread of the bits will do.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Opens the file behind a descriptor of another process, which may be any file: no terminal
/// becomes this process's, and nothing is waited for.
pub(crate) fn open_fd_of(pid: u32, fd: RawFd, flags: libc::c_int) -> Res<OwnedFd> {
    const OPEN: libc::c_int = libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    let path = CString::new(format!("/proc/{pid}/fd/{fd}")).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: a C string.
    let fd = check(unsafe { libc::open(path.as_ptr(), flags | OPEN) })?;
    // SAFETY: fresh and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A handle that becomes readable when a process ends.
#[derive(Debug)]
pub(crate) struct PidFd(OwnedFd);

impl PidFd {
    /// # Errors
    /// `ESRCH` where the process is gone.
    pub(crate) fn open(pid: u32) -> Res<Self> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = check(fd as libc::c_int)?;
        // SAFETY: fresh and owned by nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn alive(&self) -> bool {
        !super::epoll_readable(self.fd(), 0).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_survives_odd_names() {
        let tail = "S 1 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 777 1 1";
        assert_eq!(parse_start_time(&format!("5 (a b) c) {tail}")), Some(777));
        assert_eq!(parse_start_time("5 (a) Z 1"), None);
        let zombie = |threads: u32| {
            format!("5 (a) Z 1 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 777 0 0")
        };
        assert_eq!(parse_start_time(&zombie(1)), None);
        assert_eq!(parse_stat(&zombie(2)), Some((777, true)));
        assert_eq!(parse_start_time("rubbish"), None);
    }

    #[test]
    fn this_process_lives() {
        let pid = std::process::id();
        assert_eq!(start_time(pid), own_start_time());
        assert!(PidFd::open(pid).unwrap().alive());
    }

    #[test]
    fn an_ended_child_is_dead() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pidfd = PidFd::open(child.id()).unwrap();
        child.wait().unwrap();
        assert!(!pidfd.alive());
        assert!(PidFd::open(child.id()).is_err());
    }

    /// Its first thread waits for the others like a child that nobody waited for.
    #[test]
    fn a_process_without_its_first_thread_lives() {
        extern "C" fn rest(_: *mut libc::c_void) -> *mut libc::c_void {
            loop {
                // SAFETY: no memory is passed.
                unsafe { libc::pause() };
            }
        }
        // SAFETY: the child makes a thread and ends its first one; it is killed below.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let mut thread = std::mem::zeroed();
                let no = std::ptr::null_mut();
                libc::pthread_create(&raw mut thread, std::ptr::null(), rest, no);
                libc::syscall(libc::SYS_exit, 0);
            }
            let pid = child.cast_unsigned();
            let path = format!("/proc/{pid}/stat");
            while !fs::read_to_string(&path).unwrap().contains(") Z ") {
                std::thread::yield_now();
            }
            assert!(start_time(pid).is_some());
            assert!(has_open(pid, 5, 1));
            libc::kill(child, libc::SIGKILL);
            // It is there until it was waited for, and does not live.
            while start_time(pid).is_some() {
                std::thread::yield_now();
            }
            assert!(!has_open(pid, 5, 1));
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }
}
