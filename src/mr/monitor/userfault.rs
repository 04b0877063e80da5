//! Changes of memory, reported by userfaultfd(2): one descriptor and one thread for the process.
//!
//! The thread does not allocate or log, takes only the locks of [`super::list`] and of the caches,
//! and blocks all signals: a thread that changes watched memory waits for it, and may hold any lock
//! of an allocator.

#![allow(
    unsafe_code,
    reason = "system calls without a function in the C library"
)]

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::maps::Maps;
use super::{Gate, Listed, fork, list};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::mr::cache::{Index, Watch};

/// Names and values of linux/userfaultfd.h.
mod abi {
    pub(super) const UFFD_API: u64 = 0xaa;
    pub(super) const UFFD_USER_MODE_ONLY: libc::c_int = 1;
    pub(super) const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
    pub(super) const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    pub(super) const UFFD_FEATURE_EVENT_REMAP: u64 = 1 << 2;
    pub(super) const UFFD_FEATURE_EVENT_REMOVE: u64 = 1 << 3;
    pub(super) const UFFD_FEATURE_EVENT_UNMAP: u64 = 1 << 6;
    pub(super) const UFFD_EVENT_REMAP: u8 = 0x14;
    pub(super) const UFFD_EVENT_REMOVE: u8 = 0x15;
    pub(super) const UFFD_EVENT_UNMAP: u8 = 0x16;

    /// `_IOWR(UFFDIO, nr, size)` in the encoding of most architectures.
    const fn iowr(nr: u64, size: usize) -> u64 {
        3 << 30 | (size as u64) << 16 | UFFD_API << 8 | nr
    }

    /// `struct uffdio_api`
    #[repr(C)]
    pub(super) struct Api {
        pub(super) api: u64,
        pub(super) features: u64,
        pub(super) ioctls: u64,
    }

    /// `struct uffdio_register`, `struct uffdio_zeropage`
    #[repr(C)]
    #[derive(Default)]
    pub(super) struct Range {
        pub(super) start: u64,
        pub(super) len: u64,
        pub(super) mode: u64,
        pub(super) out: u64,
    }

    /// `struct uffd_msg`
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub(super) struct Msg {
        pub(super) event: u8,
        pub(super) reserved: [u8; 7],
        pub(super) arg: [u64; 3],
    }

    pub(super) const UFFDIO_API: u64 = iowr(0x3f, size_of::<Api>());
    pub(super) const UFFDIO_REGISTER: u64 = iowr(0, size_of::<Range>());
    /// `_IOR(UFFDIO, 1, struct uffdio_range)`
    pub(super) const UFFDIO_UNREGISTER: u64 = iowr(1, 16) & !(1 << 30);
    pub(super) const UFFDIO_ZEROPAGE: u64 = iowr(4, size_of::<Range>());
    /// `_IO(USERFAULTFD_IOC, 0)`
    pub(super) const USERFAULTFD_IOC_NEW: u64 = 0xaa << 8;
    const _: () = assert!(size_of::<Msg>() == 32);
}

/// Bits of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_OR_SHARED: u64 = 1 << 61;

/// The userfaultfd monitor of the process. Thread safe. Its thread stops when the last reference is
/// dropped.
#[derive(Debug)]
pub(crate) struct Userfault {
    // before the descriptors: ends before they are closed
    _unshared: fork::Unshared,
    fd: Arc<OwnedFd>,
    gate: Gate,
    stop: Arc<OwnedFd>,
    pagemap: OwnedFd,
    maps: Maps,
    shift: u32,
    thread: Option<JoinHandle<()>>,
}

static CURRENT: Mutex<Weak<Userfault>> = Mutex::new(Weak::new());

fn owned(fd: libc::c_long) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(FiErrno::last());
    }
    // SAFETY: the kernel has just returned this descriptor; no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn ioctl<T>(fd: RawFd, request: u64, argument: &mut T) -> Result<()> {
    // SAFETY: `T` is the structure of the request, by the callers in this module.
    let ret = unsafe { libc::ioctl(fd, request as _, std::ptr::from_mut(argument)) };
    if ret < 0 {
        return Err(FiErrno::last());
    }
    Ok(())
}

/// Opens a descriptor: without privileges (Linux 5.11), with privileges, or by the device file
/// (Linux 6.1).
fn open() -> Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let open =
        // SAFETY: a system call that takes flags.
        |more: libc::c_int| owned(unsafe { libc::syscall(libc::SYS_userfaultfd, flags | more) });
    open(abi::UFFD_USER_MODE_ONLY)
        .or_else(|_| open(0))
        .or_else(|error| {
            // SAFETY: a C string; the request takes flags.
            unsafe {
                let path = c"/dev/userfaultfd".as_ptr();
                let device = owned(libc::open(path, libc::O_RDWR | libc::O_CLOEXEC).into());
                let device = device.map_err(|own| if own.may_pass() { own } else { error })?;
                owned(libc::ioctl(device.as_raw_fd(), abi::USERFAULTFD_IOC_NEW as _, flags).into())
            }
        })
}

impl Userfault {
    /// The monitor of the process; starts it if it does not run.
    ///
    /// # Errors
    /// `EPERM`, `ENOSYS`, `EINVAL`: the kernel refuses userfaultfd, or this process is a forked
    /// child. `EACCES`, `ENOENT`: `/proc` is not accessible. `EMFILE`, `ENFILE`: no descriptor is
    /// free. `EAGAIN`: no thread could be started.
    pub(crate) fn get() -> Result<Arc<Self>> {
        if Gate::get().is_none_or(Gate::is_forked) {
            return Err(FiErrno::ENOSYS);
        }
        let mut current = CURRENT.lock();
        if let Some(known) = current.upgrade() {
            return Ok(known);
        }
        let new = Arc::new(Self::start()?);
        *current = Arc::downgrade(&new);
        Ok(new)
    }

    fn start() -> Result<Self> {
        let (mut this, reader) = Self::prepare()?;
        this.thread = Some(reader.spawn()?);
        Ok(this)
    }

    /// A monitor without a thread, and the reader of its events. No forked child shares its
    /// descriptor, except where forks overlap each attempt ([`fork::apart_from_forks`]).
    fn prepare() -> Result<(Self, Reader)> {
        fork::notice();
        fork::apart_from_forks(Self::open)
    }

    fn open() -> Result<(Self, Reader)> {
        let gate = Gate::get().ok_or(FiErrno::ENOSYS)?;
        let fd = Arc::new(open()?);
        let mut api = abi::Api {
            api: abi::UFFD_API,
            features: abi::UFFD_FEATURE_PAGEFAULT_FLAG_WP
                | abi::UFFD_FEATURE_EVENT_REMAP
                | abi::UFFD_FEATURE_EVENT_REMOVE
                | abi::UFFD_FEATURE_EVENT_UNMAP,
            ioctls: 0,
        };
        ioctl(fd.as_raw_fd(), abi::UFFDIO_API, &mut api)?;
        // SAFETY: a C string; a system call that takes numbers.
        let (pagemap, stop) = unsafe {
            let path = c"/proc/self/pagemap".as_ptr();
            let pagemap = libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC);
            (owned(pagemap.into())?, libc::eventfd(0, libc::EFD_CLOEXEC))
        };
        let stop = Arc::new(owned(stop.into())?);
        // SAFETY: `sysconf` has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let this = Self {
            _unshared: fork::Unshared::new(&fd, &stop),
            fd: Arc::clone(&fd),
            gate,
            stop: Arc::clone(&stop),
            pagemap,
            maps: Maps::open()?,
            shift: page.unsigned_abs().trailing_zeros(),
            thread: None,
        };
        let runs = false;
        Ok((
            this,
            Reader {
                fd,
                stop,
                gate,
                runs,
            },
        ))
    }

    /// Watches a range of whole pages, extended to whole mappings: the kernel splits a mapping at
    /// the ends of a watched range, and `mremap(2)` accepts only one mapping.
    ///
    /// # Errors
    /// `EFAULT`: not all of it is anonymous memory. `EINVAL`: memory of a kind that cannot be
    /// watched. `EBUSY`: another descriptor watches it.
    pub(super) fn watch_range(&self, start: u64, end: u64) -> Result<()> {
        let (start, end) = self.maps.around(start, end)?;
        self.register(start, end)
    }

    fn register(&self, start: u64, end: u64) -> Result<()> {
        let mut range = abi::Range {
            start,
            len: end - start,
            mode: abi::UFFDIO_REGISTER_MODE_WP,
            out: 0,
        };
        ioctl(self.fd.as_raw_fd(), abi::UFFDIO_REGISTER, &mut range)
    }

    /// Stops watching all memory that no other thread moves meanwhile. The kernel stops watching
    /// the rest when the last reference to the descriptor's file ends: that of this process,
    /// because forked children have replaced theirs ([`fork::Unshared`]). But a child of a bare
    /// `clone(2)` has one, and in rare cases a forked child, and an unmapping thread would wait for
    /// a reader without end.
    ///
    /// Older kernels let a descriptor unregister a range of another one, for example of another
    /// library's; so each mapping is registered first, which fails if another descriptor watches
    /// it.
    fn unwatch_all(&self) {
        for (start, end) in self.maps.anonymous().unwrap_or_default() {
            if self.register(start, end).is_ok() {
                let mut range = [start, end - start];
                let _ = ioctl(self.fd.as_raw_fd(), abi::UFFDIO_UNREGISTER, &mut range);
            }
        }
    }

    /// Whether a call is changing memory whose event has not been read yet. Asks the kernel:
    /// meanwhile it refuses every request that fills pages with `EAGAIN`, before it checks the
    /// argument (`EINVAL`).
    pub(super) fn is_changing(&self) -> bool {
        let mut nothing = abi::Range::default();
        ioctl(self.fd.as_raw_fd(), abi::UFFDIO_ZEROPAGE, &mut nothing) != Err(FiErrno::EINVAL)
    }

    /// Whether all pages of a range are anonymous and present or swapped out.
    pub(super) fn is_anonymous(&self, start: u64, end: u64) -> bool {
        let (mut page, behind) = (start >> self.shift, end >> self.shift);
        let mut words = [0_u64; 512];
        while page < behind {
            let count = (behind - page).min(words.len() as u64) as usize;
            let (bytes, offset) = (count * size_of::<u64>(), page * size_of::<u64>() as u64);
            // SAFETY: `words` has room for `bytes` bytes.
            let got = unsafe {
                let (fd, to) = (self.pagemap.as_raw_fd(), words.as_mut_ptr());
                libc::pread(fd, to.cast::<c_void>(), bytes, offset.cast_signed())
            };
            let good = |word: &u64| word & (PRESENT | SWAPPED) != 0 && word & FILE_OR_SHARED == 0;
            if got != bytes.cast_signed() || !words.iter().take(count).all(good) {
                return false;
            }
            page += count as u64;
        }
        true
    }
}

impl Drop for Userfault {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.gate.is_forked() {
            std::mem::forget(thread); // the thread runs only in the parent
            return;
        }
        self.unwatch_all();
        let one = 1_u64;
        // SAFETY: reads the 8 bytes of `one`.
        unsafe { libc::write(self.stop.as_raw_fd(), (&raw const one).cast(), 8) };
        let _ = thread.join();
    }
}

/// The state that the thread owns.
pub(super) struct Reader {
    fd: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    gate: Gate,
    /// Whether the thread runs, and was not stopped because no cache is left.
    runs: bool,
}

impl Drop for Reader {
    /// Ends all events and releases the waiting threads: another file replaces the descriptor. This
    /// must happen in the thread's own code: when the thread ends, it frees memory of its own,
    /// which may be in a watched mapping. The gate stays closed if the thread ends for an error; if
    /// it was not started, nothing is watched.
    fn drop(&mut self) {
        if self.runs {
            self.gate.close();
        }
        // SAFETY: two descriptors that this object owns.
        unsafe { libc::dup3(self.stop.as_raw_fd(), self.fd.as_raw_fd(), libc::O_CLOEXEC) };
    }
}

impl Reader {
    /// Starts the thread. It blocks all signals, because a handler could change memory.
    fn spawn(self) -> Result<JoinHandle<()>> {
        let mut old = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are written before they are read.
        unsafe {
            let mut all = MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
        }
        let thread = std::thread::Builder::new()
            .name("weft-monitor".to_owned())
            .spawn(move || self.run());
        // SAFETY: `old` is the mask that the first call has written.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
        thread.map_err(|_| FiErrno::EAGAIN)
    }

    fn run(mut self) {
        self.runs = true;
        loop {
            let poll = |fd: &Arc<OwnedFd>| libc::pollfd {
                fd: fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            let mut fds = [poll(&self.fd), poll(&self.stop)];
            // SAFETY: two elements.
            let ret = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
            if ret < 0 {
                if FiErrno::last() == FiErrno::EINTR {
                    continue;
                }
                return;
            }
            let [events, stop] = fds;
            if stop.revents != 0 {
                self.runs = false;
                return;
            }
            if events.revents & libc::POLLIN == 0 {
                return;
            }
            // before the events are read: a read releases the thread that waits for its event
            self.gate.close();
            let read = self.read_all();
            self.gate.open();
            if !read {
                return;
            }
        }
    }

    /// Reads all pending events, and invalidates the registrations that they concern. False: the
    /// descriptor failed.
    fn read_all(&self) -> bool {
        let mut messages = [abi::Msg::default(); 32];
        loop {
            // SAFETY: `messages` has that size, and any bytes are a valid message.
            let got = unsafe {
                let to = messages.as_mut_ptr().cast::<c_void>();
                libc::read(self.fd.as_raw_fd(), to, size_of_val(&messages))
            };
            if got < 0 {
                match FiErrno::last() {
                    FiErrno::EAGAIN => return true,
                    FiErrno::EINTR => continue,
                    _ => return false,
                }
            }
            let count = got.unsigned_abs() / size_of::<abi::Msg>();
            for message in messages.iter().take(count) {
                let [first, second, third] = message.arg;
                match message.event {
                    abi::UFFD_EVENT_UNMAP | abi::UFFD_EVENT_REMOVE => list::kill(first, second),
                    abi::UFFD_EVENT_REMAP => {
                        list::kill(first, first.saturating_add(third));
                        list::kill(second, second.saturating_add(third));
                    }
                    // unexpected: no range is write-protected for faults, and no other events were
                    // requested
                    _ => list::kill(0, u64::MAX),
                }
            }
        }
    }
}

/// Connects one cache to the monitor.
#[derive(Debug)]
pub(crate) struct Watching {
    monitor: Arc<Userfault>,
    _listed: Listed,
    check: bool,
}

impl Watching {
    /// Registers a cache for changes. `check`: whether each use asks the kernel if a change is in
    /// progress.
    ///
    /// # Errors
    /// Those of [`Userfault::get`]. `ENOSPC`: too many caches.
    pub(crate) fn new(index: Arc<dyn Index + Send>, check: bool) -> Result<Self> {
        let monitor = Userfault::get()?;
        let listed = Listed::new(index, monitor.gate)?;
        Ok(Self {
            monitor,
            _listed: listed,
            check,
        })
    }
}

#[cfg(test)]
impl Watching {
    /// With a monitor that the test has made.
    pub(super) fn by(
        monitor: Arc<Userfault>,
        index: Arc<dyn Index + Send>,
        check: bool,
    ) -> Result<Self> {
        let listed = Listed::new(index, monitor.gate)?;
        Ok(Self {
            monitor,
            _listed: listed,
            check,
        })
    }
}

impl Watch for Watching {
    #[inline]
    fn is_current(&self, _: u64, _: u64) -> bool {
        if self.check {
            if self.monitor.is_changing() {
                return false;
            }
            // the kernel's answer is older than the word of the gate that is read next
            fence(Ordering::SeqCst);
        }
        self.monitor.gate.is_open()
    }

    fn asks_of_registrations(&self) -> bool {
        false
    }

    fn is_quiet(&self) -> bool {
        self.is_current(0, 0)
    }

    fn watch(&self, start: u64, end: u64) -> Result<()> {
        self.monitor.watch_range(start, end)
    }

    fn unwatch(&self, _: u64, _: u64) {
        // other registrations may need the range; it ends with its mapping
    }

    fn tells_all(&self, start: u64, end: u64) -> bool {
        self.monitor.is_anonymous(start, end)
    }

    fn is_forked(&self) -> bool {
        self.monitor.gate.is_forked()
    }
}

/// Logs why no registration is cached, as a warning once.
pub(crate) fn refused(error: FiErrno) {
    if Gate::get().is_some_and(Gate::is_forked) {
        info_log!(
            Mr,
            "a forked child caches no registrations: each operation registers its local buffers"
        );
        return;
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        warn_log!(
            Mr,
            "userfaultfd is not available ({error}): each operation registers its local buffers"
        );
        info_log!(
            Mr,
            "userfaultfd needs Linux 5.11, or vm.unprivileged_userfaultfd=1, CAP_SYS_PTRACE or access to \
             /dev/userfaultfd; and no seccomp filter that forbids it"
        );
    });
}

/// A monitor without a thread. [`Reader::end`] ends the descriptor.
#[cfg(test)]
pub(super) fn without_thread() -> (Userfault, Reader) {
    Userfault::prepare().expect("userfaultfd")
}

#[cfg(test)]
impl Userfault {
    /// The number of the descriptor.
    pub(super) fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
impl Reader {
    pub(super) fn end(self) {
        drop(self);
    }
}
