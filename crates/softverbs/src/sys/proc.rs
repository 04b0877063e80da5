//! Processes as `/proc` shows them: identity, state, and their open files.

use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;

use super::{Errno, Res, ShortPath, check};

/// Identifies a process; no other process that has or had the same pid is equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    /// Start time in clock ticks since boot, field 22 of `/proc/<pid>/stat`.
    pub(crate) start_time: u64,
    /// A random number, drawn when the process entered the registry.
    pub(crate) cookie: u64,
}

/// Long enough for all paths in `/proc` here.
type ProcPath = ShortPath<48>;

fn path_of_fd(pid: u32, fd: RawFd) -> Res<ProcPath> {
    ProcPath::new(format_args!("/proc/{pid}/fd/{fd}"))
}

/// The beginning of a file, read without an allocation: a lack of memory must not make a process
/// count as ended.
struct Start {
    bytes: [u8; 2048],
    len: usize,
}

impl Start {
    /// The contents of `/proc/<pid>/stat`.
    fn of_stat(pid: u32) -> Res<Self> {
        Self::of_file(ProcPath::new(format_args!("/proc/{pid}/stat"))?.as_path())
    }

    fn of_file(path: &Path) -> Res<Self> {
        let mut bytes = [0; 2048];
        let mut file = fs::File::open(path)?;
        // one read returns the whole of a file in `/proc`, and of any other short file
        let len = file.read(&mut bytes)?;
        Ok(Self { bytes, len })
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Whether an existing process has this file open with this descriptor; after it has executed
/// another program, it has not. Returns true if `/proc` does not tell.
pub(crate) fn has_open(pid: u32, fd: RawFd, inode: u64) -> bool {
    let file = path_of_fd(pid, fd).and_then(|path| Ok(fs::metadata(path.as_path())?));
    match file {
        Ok(file) => file.ino() == inode,
        // the files of a process whose first thread has ended or is ending are not shown, while its
        // other threads run
        Err(Errno(libc::ENOENT)) => leader_ends(pid),
        Err(_) => true,
    }
}

/// A file that another process has open.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pid: u32,
    path: ProcPath,
    device: u64,
    inode: u64,
}

impl OpenFile {
    /// The file that process `pid` has open as `fd`. `file` is this process's descriptor of the
    /// same file.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub(crate) fn new(pid: u32, fd: RawFd, file: &OwnedFd) -> Res<Self> {
        // SAFETY: all zeros is a value of it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: writable structure.
        check(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
        Ok(Self {
            pid,
            path: path_of_fd(pid, fd)?,
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }

    /// As [`has_open`].
    pub(crate) fn is_open(&self) -> bool {
        // SAFETY: all zeros is a value of it.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: a C string and a writable structure.
        match check(unsafe { libc::stat(self.path.as_c_str().as_ptr(), &raw mut stat) }) {
            Ok(_) => (stat.st_dev, stat.st_ino) == (self.device, self.inode),
            Err(Errno(libc::ENOENT)) => leader_ends(self.pid),
            Err(_) => true,
        }
    }
}

/// Whether the first thread of a process has ended or is ending, and others have not.
fn leader_ends(pid: u32) -> bool {
    match Start::of_stat(pid) {
        Ok(stat) => parse_stat(stat.as_bytes()).is_some_and(|(_, ends)| ends),
        Err(error) => is_lack(error) && may_have_threads(pid),
    }
}

/// Whether a process has more threads than the first one, of which a zombie has none. Needs no
/// descriptor. The directory of the threads has 2 links and one for each thread. Returns true if
/// `/proc` does not tell.
fn may_have_threads(pid: u32) -> bool {
    let threads = ProcPath::new(format_args!("/proc/{pid}/task"))
        .and_then(|path| Ok(fs::metadata(path.as_path())?));
    match threads {
        Ok(threads) => threads.nlink() != 3,
        Err(error) => !matches!(error.0, libc::ENOENT | libc::ESRCH),
    }
}

/// Whether a look at a process failed for lack of descriptors or memory.
fn is_lack(error: Errno) -> bool {
    matches!(error.0, libc::EMFILE | libc::ENFILE | libc::ENOMEM)
}

/// Whether a process is stopped, by a signal or a tracer.
pub(crate) fn is_stopped(pid: u32) -> bool {
    Start::of_stat(pid).is_ok_and(|stat| says_stopped(stat.as_bytes()))
}

fn says_stopped(stat: &[u8]) -> bool {
    // the command ends at the last parenthesis, as in `parse_stat`
    let command = stat.iter().rposition(|&byte| byte == b')');
    let state = command.and_then(|at| stat.get(at + 2));
    matches!(state, Some(b'T' | b't'))
}

/// The start time of a process that exists and is no zombie.
///
/// # Errors
/// `ESRCH`: there is no such process. `EMFILE`, `ENFILE`, `ENOMEM`: it cannot be found out now.
pub(crate) fn start_time(pid: u32) -> Res<u64> {
    const GONE: Errno = Errno(libc::ESRCH);
    let stat = Start::of_stat(pid).map_err(|error| if is_lack(error) { error } else { GONE })?;
    parse_start_time(stat.as_bytes()).ok_or(GONE)
}

/// Whether a process has this start time. Returns true if a lack of descriptors or memory prevents
/// the look.
pub(crate) fn may_run(pid: u32, start_time: u64) -> bool {
    match self::start_time(pid) {
        Ok(found) => found == start_time,
        Err(error) => error != Errno(libc::ESRCH),
    }
}

/// The start time of this process.
pub(crate) fn own_start_time() -> Option<u64> {
    let stat = Start::of_file(Path::new("/proc/self/stat")).ok()?;
    parse_start_time(stat.as_bytes())
}

fn parse_start_time(stat: &[u8]) -> Option<u64> {
    parse_stat(stat).map(|(start_time, _)| start_time)
}

/// Set in a thread's flags from the beginning of its end: `PF_EXITING` of the kernel's
/// `include/linux/sched.h`.
const EXITING: u64 = 4;

/// The start time of a process that runs, and whether its first thread has ended or is ending while
/// others run. A thread that is ending gives its files back before it becomes a zombie.
fn parse_stat(stat: &[u8]) -> Option<(u64, bool)> {
    // the command, in parentheses, can contain any bytes
    let command = stat.iter().rposition(|&byte| byte == b')')?;
    let mut fields = str::from_utf8(&stat[command + 1..])
        .ok()?
        .split_ascii_whitespace();
    // fields 3, 9, 20 and 22 of proc_pid_stat(5)
    let state = fields.next()?;
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    let threads: u32 = fields.nth(10)?.parse().ok()?;
    let start_time = fields.nth(1)?.parse().ok()?;
    let others = threads > 1;
    match state {
        "X" | "x" => None,
        // A zombie first thread: the other threads still run.
        "Z" => others.then_some((start_time, true)),
        _ => Some((start_time, others && flags & EXITING != 0)),
    }
}

/// The inode of one of this process's namespaces.
pub(crate) fn namespace(name: &str) -> u64 {
    ProcPath::new(format_args!("/proc/self/ns/{name}"))
        .and_then(|path| Ok(fs::metadata(path.as_path())?))
        .map_or(0, |file| file.ino())
}

/// Identifies this host; the same in all its processes. Kept once it is read: a process that has no
/// free descriptor later has the same GIDs.
pub(crate) fn machine_id() -> u64 {
    static KNOWN: OnceLock<u64> = OnceLock::new();
    if let Some(id) = KNOWN.get() {
        return *id;
    }
    // Both files have 33 to 37 bytes; an empty one identifies nothing.
    let read = ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"]
        .iter()
        .filter_map(|path| Start::of_file(Path::new(path)).ok())
        .find(|id| id.as_bytes().len() > 8);
    read.map_or(hash(&[]), |id| *KNOWN.get_or_init(|| hash(id.as_bytes())))
}

/// FNV-1a, which is the same in every program.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Opens the file behind a descriptor of another process, which may be any file. The call does not
/// wait, and no terminal becomes the controlling terminal of this process.
pub(crate) fn open_fd_of(pid: u32, fd: RawFd, flags: libc::c_int) -> Res<OwnedFd> {
    const OPEN: libc::c_int = libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK;
    let path = path_of_fd(pid, fd)?;
    // SAFETY: a C string.
    let fd = check(unsafe { libc::open(path.as_c_str().as_ptr(), flags | OPEN) })?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A handle that becomes readable when a process ends.
#[derive(Debug)]
pub(crate) struct PidFd(OwnedFd);

impl PidFd {
    /// # Errors
    /// `ESRCH`: the process has ended.
    pub(crate) fn open(pid: u32) -> Res<Self> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = check(fd as libc::c_int)?;
        // SAFETY: the call has just returned this descriptor; no other owner exists.
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
    use super::super::with_descriptors;
    use super::*;

    #[test]
    fn the_start_time_survives_odd_names() {
        let tail = "S 1 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 777 1 1";
        let stat = |text: String| parse_start_time(text.as_bytes());
        assert_eq!(stat(format!("5 (a b) c) {tail}")), Some(777));
        assert_eq!(stat("5 (a) Z 1".to_owned()), None);
        let no_text = [b"5 (\xff\xfe) ", tail.as_bytes()].concat();
        assert_eq!(parse_start_time(&no_text), Some(777));
        let zombie = |threads: u32| {
            format!("5 (a) Z 1 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 777 0 0")
        };
        assert_eq!(stat(zombie(1)), None);
        assert_eq!(parse_stat(zombie(2).as_bytes()), Some((777, true)));
        let ending = |threads: u32| {
            let text =
                format!("5 (a) R 1 1 1 0 -1 4194308 1 0 0 0 0 0 0 0 20 0 {threads} 0 777 0 0");
            parse_stat(text.as_bytes())
        };
        assert_eq!(ending(2), Some((777, true)));
        assert_eq!(ending(1), Some((777, false)));
        assert_eq!(stat("rubbish".to_owned()), None);
    }

    #[test]
    fn who_is_stopped() {
        assert!(says_stopped(b"5 (a) S b) T 1 5"));
        assert!(says_stopped(b"5 (a) t 1 5"));
        for other in [&b"5 (T) S 1"[..], b"5 (a) ", b"5 (a)", b"", b"T"] {
            assert!(!says_stopped(other), "{other:?}");
        }
        assert!(!is_stopped(std::process::id()));
    }

    #[test]
    fn this_process_lives() {
        let pid = std::process::id();
        assert_eq!(start_time(pid).ok(), own_start_time());
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

    /// A child whose first thread calls `before` and ends, while another thread runs. The caller
    /// kills it.
    ///
    /// # Safety
    /// `before` may only make system calls, as the child is that of a process with threads.
    unsafe fn without_its_first_thread(before: impl FnOnce()) -> libc::pid_t {
        extern "C" fn rest(_: *mut libc::c_void) -> *mut libc::c_void {
            loop {
                // SAFETY: no memory is passed.
                unsafe { libc::pause() };
            }
        }
        // SAFETY: the child makes a thread and ends its first one.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let mut thread = std::mem::zeroed();
                let no = std::ptr::null_mut();
                libc::pthread_create(&raw mut thread, std::ptr::null(), rest, no);
                before();
                libc::syscall(libc::SYS_exit, 0);
            }
            child
        }
    }

    /// The first thread has given its files back and is no zombie yet. In the child it has a list
    /// of files of its own, whose last one takes the kernel about a millisecond to give back.
    #[test]
    fn a_process_whose_first_thread_is_ending_lives() {
        const SIZE: libc::off_t = 16 << 20;
        let (_, file) = crate::registry::Registry::anonymous().unwrap();
        let (fd, inode) = (file.as_raw_fd(), file.metadata().unwrap().ino());
        for round in 0..20 {
            let before = || {
                // SAFETY: a C string; the descriptor is this thread's.
                unsafe {
                    libc::unshare(libc::CLONE_FILES);
                    let large = libc::memfd_create(c"large".as_ptr(), 0);
                    libc::fallocate(large, 0, 0, SIZE);
                }
            };
            // SAFETY: `before` makes system calls only.
            let child = unsafe { without_its_first_thread(before) };
            let pid = child.cast_unsigned();
            let open = OpenFile::new(pid, fd, &file.try_clone().unwrap().into()).unwrap();
            let stat = format!("/proc/{pid}/stat");
            while !fs::read_to_string(&stat).unwrap().contains(") Z ") {
                assert!(has_open(pid, fd, inode) && open.is_open(), "{round}");
            }
            // SAFETY: this process's child, which is not waited for yet.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
    }

    /// The first thread has ended and is a zombie while another thread runs.
    #[test]
    fn a_process_without_its_first_thread_lives() {
        // SAFETY: the child is killed below.
        unsafe {
            let child = without_its_first_thread(|| ());
            let pid = child.cast_unsigned();
            let path = format!("/proc/{pid}/stat");
            while !fs::read_to_string(&path).unwrap().contains(") Z ") {
                std::thread::yield_now();
            }
            let open = || {
                let at_the_limit = with_descriptors(0, || has_open(pid, 5, 1));
                [has_open(pid, 5, 1), at_the_limit]
            };
            assert!(start_time(pid).is_ok());
            assert_eq!(open(), [true, true]);
            libc::kill(child, libc::SIGKILL);
            // the process exists until it is waited for, but is not alive
            while start_time(pid).is_ok() {
                std::thread::yield_now();
            }
            assert_eq!(open(), [false, false]);
            libc::waitpid(child, std::ptr::null_mut(), 0);
            assert_eq!(open(), [false, false]);
        }
    }
}
