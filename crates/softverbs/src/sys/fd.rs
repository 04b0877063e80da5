//! Pipes as doorbells, timers, and epoll sets.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use super::{Res, check, now_ns};

/// Reads of 1 KiB that drain a doorbell, at most: those of a full pipe of the usual size. Every
/// process of the user can write to it.
const DRAINS: u32 = 64;

/// A non-blocking pipe that serves as a doorbell: it is readable after a ring and carries no data.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    inode: u64,
}

impl Pipe {
    pub(crate) fn new() -> Res<Self> {
        let mut fds = [0; 2];
        // SAFETY: room for two descriptors.
        check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) })?;
        // SAFETY: the call made both, and nothing else owns them.
        let (read, write) = unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) };
        let inode = pipe_of(read.as_raw_fd())?;
        Ok(Self { read, write, inode })
    }

    /// The end that peers reopen.
    pub(crate) fn read_fd(&self) -> RawFd {
        self.read.as_raw_fd()
    }

    /// The inode: distinguishes this pipe from a later file with the same descriptor number.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Makes it readable. A full pipe is readable already.
    pub(crate) fn ring(&self) {
        ring_fd(self.write.as_raw_fd());
    }

    /// Makes it unreadable; returns false if it was unreadable already. A process that writes to it
    /// all the time can leave it readable, for one superfluous wake-up.
    pub(crate) fn drain(&self) -> bool {
        let mut buffer = [0u8; 1024];
        let mut any = false;
        for _ in 0..DRAINS {
            // SAFETY: the buffer has the length given.
            let n = unsafe {
                libc::read(
                    self.read.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                )
            };
            if n <= 0 {
                return any;
            }
            any = true;
            if (n as usize) < buffer.len() {
                return true;
            }
        }
        any
    }
}

/// Writes one byte to a doorbell.
pub(crate) fn ring_fd(fd: RawFd) {
    // SAFETY: one readable byte; an error means that it is full or gone, and neither needs action.
    unsafe { libc::write(fd, [1u8].as_ptr().cast(), 1) };
}

/// Checks that a file is the pipe with that inode.
///
/// # Errors
/// `ESTALE`: it is another file.
pub(crate) fn is_pipe(file: &OwnedFd, inode: u64) -> Res<()> {
    if pipe_of(file.as_raw_fd())? == inode {
        Ok(())
    } else {
        Err(super::Errno(libc::ESTALE))
    }
}

/// The inode of a pipe without a name. Only inodes of one filesystem are unique, so the filesystem
/// is checked too.
///
/// # Errors
/// `ESTALE`: the file is not such a pipe.
fn pipe_of(fd: RawFd) -> Res<u64> {
    const PIPEFS: libc::__fsword_t = 0x5049_5045;
    // SAFETY: all zeros is a value of both.
    let (mut stat, mut system): (libc::stat, libc::statfs) = unsafe { std::mem::zeroed() };
    // SAFETY: writable structures.
    unsafe {
        check(libc::fstat(fd, &raw mut stat))?;
        check(libc::fstatfs(fd, &raw mut system))?;
    }
    if stat.st_mode & libc::S_IFMT != libc::S_IFIFO || system.f_type != PIPEFS {
        return Err(super::Errno(libc::ESTALE));
    }
    Ok(stat.st_ino)
}

/// A one-shot timer descriptor that several threads set.
#[derive(Debug)]
pub(crate) struct Timer {
    fd: OwnedFd,
    /// Time at which it expires, in nanoseconds of the monotonic clock; 0: not armed.
    at: Mutex<u64>,
}

impl Timer {
    pub(crate) fn new() -> Res<Self> {
        // SAFETY: no memory is passed.
        let fd = check(unsafe {
            libc::timerfd_create(
                libc::CLOCK_MONOTONIC,
                libc::TFD_CLOEXEC | libc::TFD_NONBLOCK,
            )
        })?;
        Ok(Self {
            // SAFETY: the call has just returned this descriptor; no other owner exists.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            at: Mutex::new(0),
        })
    }

    /// Makes the timer readable at `at` (monotonic clock, nanoseconds) at the latest; 0 means
    /// never. An earlier time that another thread has set stays.
    pub(crate) fn arm(&self, at: u64) {
        let mut armed = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        if at != 0 && (*armed == 0 || at < *armed) {
            *armed = at;
            self.set(at);
        }
    }

    /// Makes the timer unreadable until `at` (monotonic clock, nanoseconds), also if it was set to
    /// an earlier time or has expired; 0 means never.
    pub(crate) fn set_to(&self, at: u64) {
        let mut armed = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        *armed = at;
        self.set(at);
    }

    /// Makes the timer neither readable nor armed. Afterwards the caller checks for waiting
    /// requests, and arms the timer again for them. Returns whether it may have been readable.
    pub(crate) fn disarm(&self) -> bool {
        let mut armed = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        let at = std::mem::take(&mut *armed);
        if at == 0 {
            return false;
        }
        self.set(0);
        at <= now_ns()
    }

    fn set(&self, at: u64) {
        let spec = libc::itimerspec {
            it_interval: libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: libc::timespec {
                tv_sec: (at / 1_000_000_000).cast_signed(),
                tv_nsec: (at % 1_000_000_000).cast_signed(),
            },
        };
        // SAFETY: a readable structure.
        unsafe {
            libc::timerfd_settime(
                self.fd.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const spec,
                std::ptr::null_mut(),
            )
        };
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// An epoll set.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    pub(crate) fn new() -> Res<Self> {
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the call has just returned this descriptor; no other owner exists.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Adds a descriptor, whose events are reported with `token`.
    pub(crate) fn add(&self, fd: RawFd, token: u64) -> Res<()> {
        self.add_for(libc::EPOLLIN as u32, fd, token)
    }

    /// Adds a pipe's end for reading, whose hang-up alone is reported with `token`, not its bytes.
    pub(crate) fn add_hang_up(&self, fd: RawFd, token: u64) -> Res<()> {
        // `EPOLLHUP` is always reported.
        self.add_for(0, fd, token)
    }

    fn add_for(&self, events: u32, fd: RawFd, token: u64) -> Res<()> {
        let mut event = libc::epoll_event { events, u64: token };
        // SAFETY: a readable structure.
        check(unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) })?;
        Ok(())
    }

    /// Reports `fd` with `token` once (`EPOLLONESHOT`), until this is called again. Adds `fd` if
    /// the set does not have it.
    pub(crate) fn add_once(&self, fd: RawFd, token: u64) -> Res<()> {
        let mut event = libc::epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLONESHOT) as u32,
            u64: token,
        };
        // SAFETY: a readable structure.
        let ret = unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_MOD, fd, &raw mut event) };
        if ret != 0 {
            // SAFETY: a readable structure.
            check(unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) })?;
        }
        Ok(())
    }

    /// Removes a descriptor, if the set contains it.
    pub(crate) fn remove(&self, fd: RawFd) {
        // SAFETY: a NULL event is allowed for this operation.
        unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// Tokens of readable descriptors, at most 16; waits at most `timeout_ms` for one (−1: no
    /// limit).
    pub(crate) fn wait(&self, timeout_ms: i32) -> Res<([u64; 16], usize)> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: room for the number of events given.
        let n = check(unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), 16, timeout_ms) })?;
        let mut tokens = [0; 16];
        for (token, event) in tokens.iter_mut().zip(events) {
            *token = event.u64;
        }
        Ok((tokens, n as usize))
    }

    /// Blocks until a descriptor is readable.
    ///
    /// # Errors
    /// `EINTR`: a signal handler was called. After a stop and SIGCONT the wait continues, unlike
    /// one by `epoll_wait(2)` (`signal(7)`).
    pub(crate) fn sleep(&self) -> Res<()> {
        epoll_readable(self.fd(), -1).map(drop)
    }

    /// Whether the application made the set's descriptor non-blocking.
    pub(crate) fn nonblocking(&self) -> bool {
        // SAFETY: no memory is passed.
        let flags = unsafe { libc::fcntl(self.fd(), libc::F_GETFL) };
        flags >= 0 && flags & libc::O_NONBLOCK != 0
    }
}

/// Waits until `fd` is readable, at most `timeout_ms` (−1: no limit).
pub(crate) fn epoll_readable(fd: RawFd, timeout_ms: i32) -> Res<bool> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one writable element.
    Ok(check(unsafe { libc::poll(&raw mut poll, 1, timeout_ms) })? > 0)
}

/// Waits until one of two descriptors is readable.
pub(crate) fn one_readable(fds: [RawFd; 2]) -> Res<()> {
    let mut polls = fds.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: two writable elements.
    check(unsafe { libc::poll(polls.as_mut_ptr(), 2, -1) })?;
    Ok(())
}

/// The names in a directory; tests also count descriptors with it.
#[allow(dead_code, reason = "tests only")]
pub(crate) fn count_entries(path: &str) -> usize {
    fs::read_dir(path).map_or(0, Iterator::count)
}

/// Permits this number of further descriptors during the call.
#[cfg(test)]
pub(crate) fn with_descriptors<T>(count: u64, call: impl FnOnce() -> T) -> T {
    let limits = |limit: &libc::rlimit| {
        // SAFETY: a structure that lives as long as the call.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }).unwrap();
    };
    let mut before = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writable structure.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) }).unwrap();
    // the lowest one that is free
    let lowest = fs::File::open("/dev/null").unwrap().as_raw_fd();
    let few = u64::try_from(lowest).unwrap() + count;
    limits(&libc::rlimit {
        rlim_cur: few,
        ..before
    });
    let result = call();
    limits(&before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread arms the timer with 0 (never) just after another thread's request has started to
    /// wait.
    #[test]
    fn an_earlier_time_stays() {
        let timer = Timer::new().unwrap();
        let set = || {
            // SAFETY: all zeros is a value of it, and writable.
            unsafe {
                let mut spec: libc::itimerspec = std::mem::zeroed();
                check(libc::timerfd_gettime(timer.fd(), &raw mut spec)).unwrap();
                spec.it_value.tv_sec
            }
        };
        let second = 1_000_000_000;
        let now = super::super::now_ns();
        timer.arm(now + 1000 * second);
        for other in [0, now + 5000 * second] {
            timer.arm(other);
            assert!((990..1001).contains(&set()), "{}", set());
        }
        timer.arm(now + 500 * second);
        assert!((490..501).contains(&set()), "{}", set());
        timer.disarm();
        assert_eq!(set(), 0);
        timer.arm(now + 5000 * second);
        assert!((4990..5001).contains(&set()), "{}", set());
    }

    /// As if another process wrote to it all the time.
    #[test]
    fn a_doorbell_is_drained_with_a_bound() {
        let pipe = Pipe::new().unwrap();
        let (fd, size) = (pipe.write.as_raw_fd(), 1 << 20);
        // SAFETY: no memory is passed.
        let room = check(unsafe { libc::fcntl(fd, libc::F_SETPIPE_SZ, size) }).unwrap();
        assert_eq!(room, size);
        let block = vec![1u8; 1 << 20];
        // SAFETY: a readable buffer of the length given.
        let written = unsafe { libc::write(fd, block.as_ptr().cast(), block.len()) };
        assert_eq!(written, 1 << 20);
        assert!(pipe.drain());
        assert!(epoll_readable(pipe.read_fd(), 0).unwrap());
        // each call empties as much as a pipe of the usual size holds
        assert_eq!((0..100).filter(|_| pipe.drain()).count(), 15);
        assert!(!epoll_readable(pipe.read_fd(), 0).unwrap());
    }

    #[test]
    fn only_the_pipe_itself_is_a_doorbell() {
        let pid = std::process::id();
        let pipe = Pipe::new().unwrap();
        let open = |fd| {
            let file = super::super::open_fd_of(pid, fd, libc::O_RDWR)?;
            is_pipe(&file, pipe.inode()).map(|()| file)
        };
        let bell = open(pipe.read_fd()).unwrap();
        ring_fd(bell.as_raw_fd());
        assert!(pipe.drain());
        let stale = Err(super::super::Errno(libc::ESTALE));
        let number = |fd| open(fd).map(drop);
        assert_eq!(number(Pipe::new().unwrap().read_fd()), stale);
        // the same inode number in another filesystem
        let path = std::env::temp_dir().join(format!("softverbs-fifo-{}", crate::sys::random()));
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: a C string.
        check(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }).unwrap();
        let fifo = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(
            pipe_of(fifo.as_raw_fd()),
            Err(super::super::Errno(libc::ESTALE))
        );
    }
}
