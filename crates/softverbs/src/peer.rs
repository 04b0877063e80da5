//! A process that has the device open. This process itself is also a peer, and is reached in the
//! same way.
//!
//! In one file, because the ring, the doorbells and the line to the agent are opened by one
//! [`Opener`], and end with the peer.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::agent::{self, Link, Opener};
use crate::dm::Directs;
use crate::hazard::{Hazards, become_visitor};
use crate::registry::Entry;
use crate::repeat::Repeats;
use crate::ring::{Header, Producer, Pushed, RING_SIZE};
use crate::segment::Mapping;
use crate::segment::layout::{
    self, OWNED, SEGMENT_SIZE, SHARED_SIZE, TABLES_SIZE, announce, cq, header, qp, rings,
};
use crate::signal;
use crate::sync::{Arc, Lock};
use crate::sys::{self, Epoll, Errno, Grow, Identity, OpenFile, PidFd, Res};

/// Nanoseconds of [`sys::tick_ns`] for which a peer counts as alive after a check: at most 10 ms,
/// with the ticks of the kernel's clock. A pid is not reused within that time, but a slot can be.
const FRESH_NS: u64 = 1_000_000;

/// Doorbells of one peer that are kept open; the oldest is closed first.
const DOORBELLS: usize = 64;

/// Shares of the limit of descriptors, as divisors: above the first one pidfds are closed at once,
/// above the second one pipes of peers. Connections need the rest.
const PIDFDS: u64 = 2;
const PIPES: u64 = 4;

/// A process, its mapped segment and its open files. Kept while a queue pair is connected to the
/// process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) identity: Identity,
    pub(crate) slot: u32,
    pub(crate) node: u32,
    /// The peer's segment. Every word of it may be invalid. From [`OWNED`] on, only the peer itself
    /// can write it, and this process must not.
    pub(crate) map: Arc<Mapping>,
    /// The peer runs barriers before it sleeps.
    pub(crate) barriers: bool,
    /// The kernel allows the peer to copy between processes.
    pub(crate) may_copy: bool,
    /// `None` for this process itself.
    life: Option<Life>,
    checked: AtomicU64,
    given_up: AtomicBool,
    /// The receives that it had claimed from shared queues are posted again.
    claims_returned: AtomicBool,
    /// Handling of datagrams while there is no ring: a [`WithoutRing`].
    without_ring: AtomicU8,
    out: Lock<Option<Producer>>,
    doorbells: Mutex<Vec<Doorbell>>,
    /// Doorbells that could not be opened. They are rung again at the time in `repeats`.
    unrung: Lock<Vec<Bell>>,
    repeats: Arc<Repeats>,
    pub(crate) hazards: Arc<Hazards>,
    directs: Directs,
    /// Opens the peer's files.
    pub(crate) opener: Opener,
    /// The kernel refuses copies from and to the peer's memory: the peer's agent makes them.
    refuses: AtomicBool,
    /// The connection to the peer's agent, if there is one.
    link: Lock<Option<Arc<Link>>>,
}

/// Detects the end of a process or of its program: a process that executes another program keeps
/// its pid, but loses its memory and its segment.
#[derive(Debug)]
struct Life {
    pid: u32,
    start_time: u64,
    /// The peer's tables file, which is open in the peer as long as its program runs.
    tables: OpenFile,
    watch: Lock<Watch>,
}

/// Descriptors that become readable at the end. A process with few descriptors left does without
/// ([`sys::is_spare`]); it then looks at the peer now and then ([`Process::look_at_peers`]), and
/// when a conversation with it ends.
///
/// [`Process::look_at_peers`]: crate::process::Process
#[derive(Debug, Default)]
struct Watch {
    pidfd: Option<PidFd>,
    /// A pipe that hangs up when the program ends, unless a forked child keeps it open.
    pipe: Option<OwnedFd>,
}

impl Watch {
    /// Adds the descriptors to `set`.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`; the set then contains none of them.
    fn add_to(&self, set: &Epoll, token: u64) -> Res<()> {
        if let Some(pidfd) = &self.pidfd {
            set.add(pidfd.fd(), token)?;
        }
        // Every process of the user can write to the pipe, which would be no sign of an end.
        let pipe = self.pipe.as_ref();
        let added = pipe.map_or(Ok(()), |pipe| set.add_hang_up(pipe.as_raw_fd(), token));
        if added.is_err() {
            self.fds().for_each(|fd| set.remove(fd));
        }
        added
    }

    fn fds(&self) -> impl Iterator<Item = RawFd> {
        let pidfd = self.pidfd.as_ref().map(PidFd::fd);
        pidfd
            .into_iter()
            .chain(self.pipe.as_ref().map(AsRawFd::as_raw_fd))
    }
}

impl Life {
    fn open(opener: &Opener, pidfd: PidFd, map: &Mapping, tables: OpenFile) -> Res<Self> {
        let (pid, start_time) = (opener.identity.pid, opener.identity.start_time);
        let mut watch = Watch::default();
        if sys::is_spare(pidfd.fd(), PIPES) {
            let fd = map.u32(header::LIFE).load(Ordering::Relaxed);
            let inode = map.u64(header::LIFE_INODE).load(Ordering::Relaxed);
            let pipe = opener.open(fd.cast_signed(), libc::O_RDONLY)?;
            sys::is_pipe(&pipe, inode)?;
            watch.pipe = Some(pipe);
        }
        watch.pidfd = Some(pidfd).filter(|pidfd| sys::is_spare(pidfd.fd(), PIDFDS));
        Ok(Self {
            pid,
            start_time,
            tables,
            watch: Lock::new(watch),
        })
    }

    /// Watches the process if it is unwatched; see [`Peer::watch_now`].
    #[cold]
    fn watch_now(&self, set: &Epoll, token: u64) -> Res<()> {
        let mut watch = self.watch.lock();
        if watch.pidfd.is_some() {
            return Ok(());
        }
        let pidfd = PidFd::open(self.pid)?;
        // The pidfd may have taken the last descriptor, so that the start time cannot be read. If
        // it belongs to a later process with the same pid, `is_there` finds that the tables' file
        // is not open any more.
        if !sys::may_run(self.pid, self.start_time) {
            return Err(Errno(libc::ESRCH));
        }
        set.add(pidfd.fd(), token)?;
        watch.pidfd = Some(pidfd);
        Ok(())
    }

    fn is_there(&self) -> bool {
        let runs = match &self.watch.lock().pidfd {
            Some(pidfd) => pidfd.alive(),
            None => sys::may_run(self.pid, self.start_time),
        };
        runs && self.tables.is_open()
    }
}

/// What a doorbell of the peer wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bell {
    Process,
    /// The threads that sleep on the completion queue whose entry is at this offset.
    Cq(usize),
}

impl Bell {
    /// Whether the peer still has to be woken; the caller then rings.
    fn must_ring(self, map: &Mapping) -> bool {
        match self {
            Self::Process => signal::must_ring(map),
            Self::Cq(at) => signal::must_notify(map, at, true, false),
        }
    }

    /// Undoes [`Self::must_ring`].
    fn must_still_ring(self, map: &Mapping) {
        match self {
            Self::Process => signal::must_still_ring(map),
            Self::Cq(at) => signal::must_still_notify(map, at),
        }
    }

    /// Descriptor and inode of the doorbell.
    fn place(self, map: &Mapping) -> (RawFd, u64) {
        let (fd, inode) = match self {
            Self::Process => (header::DOORBELL, header::DOORBELL_INODE),
            Self::Cq(at) => (at + cq::DOORBELL, at + cq::DOORBELL_INODE),
        };
        let fd = map.u32(fd).load(Ordering::Relaxed);
        (fd.cast_signed(), map.u64(inode).load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
struct Doorbell {
    fd: RawFd,
    inode: u64,
    pipe: OwnedFd,
}

/// The sending process: its slot, the cookie that identifies it in its rings, and its segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signature<'a> {
    pub(crate) slot: u32,
    pub(crate) cookie: u64,
    pub(crate) segment: &'a Mapping,
}

/// Result of pushing a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Push {
    Sent,
    /// The ring is full; the peer will ring this process when slots are free.
    Full,
    /// The peer has not made the ring yet; it will ring this process when the ring is there.
    Unmade,
    /// The ring cannot be opened.
    NoMemory,
}

/// Handling of the datagrams to a receiver that has not made a ring yet. `Waits` again after a
/// datagram has been pushed into its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WithoutRing {
    /// A datagram waits for the ring in its send queue, for up to 1 s.
    Waits = 0,
    /// An earlier datagram has waited for 1 s: a datagram is copied to the process's list of late
    /// messages, so that its send queue is not blocked. Without room in that list it waits.
    Kept = 1,
    /// Datagrams are dropped: an earlier one had no room in that list at the end of its wait, or
    /// its receiver was stopped then.
    Lost = 2,
}

/// Maps the segment of a process: the shared file, and the tables, which only the process itself
/// writes. Returns the tables' file too.
///
/// # Errors
/// As [`Peer::open`].
fn map_segment(opener: &Opener, entry: &Entry, guarded: bool) -> Res<(Mapping, OwnedFd)> {
    let tables = opener.open(entry.segment_fd, libc::O_RDONLY)?;
    if sys::sealed_size(&tables)? != TABLES_SIZE {
        return Err(Errno(libc::EPROTO));
    }
    if guarded && !sys::is_guarded(&tables)? {
        return Err(Errno(libc::EPERM));
    }
    // The tables, which only the owner can write, name the shared file.
    let shared_fd = sys::read_word(&tables, header::SHARED - OWNED)? as u32;
    let shared = opener.open(shared_fd.cast_signed(), libc::O_RDWR)?;
    let inode = sys::read_word(&tables, header::SHARED_INODE - OWNED)?;
    if sys::sealed_size(&shared)? != SHARED_SIZE || sys::inode_of(&shared)? != inode {
        return Err(Errno(libc::EPROTO));
    }
    let map = Mapping::pair((&shared, SHARED_SIZE), (&tables, TABLES_SIZE), false)?;
    let whole = map.u64(header::MAGIC).load(Ordering::Acquire) == layout::MAGIC
        && map.u64(header::SIZE).load(Ordering::Relaxed) == SEGMENT_SIZE as u64
        && map.u64(header::COOKIE).load(Ordering::Relaxed) == entry.identity.cookie;
    if whole {
        Ok((map, tables))
    } else {
        Err(Errno(libc::EPROTO))
    }
}

impl Peer {
    /// Opens the process that the registry has in `slot`. `own`: slot and cookie of this process.
    /// With `guarded`, the peer's tables must be sealed against writes by other processes.
    /// `former`: this process's hazards there, if it has opened the same process before.
    ///
    /// # Errors
    /// `ESRCH`: the process has ended. `EACCES`: it cannot be reached. `EPERM`: its files are not
    /// sealed. `EPROTO`: its segment is invalid. `EMFILE`, `ENFILE`, `ENOMEM`.
    pub(crate) fn open(
        entry: &Entry,
        slot: u32,
        own: (u32, u64),
        guarded: bool,
        repeats: &Arc<Repeats>,
        former: Option<Arc<Hazards>>,
    ) -> Res<Self> {
        let ((own_slot, own_cookie), pid) = (own, entry.identity.pid);
        // Not for this process itself: it needs no liveness check, and tools that run it may not
        // support the system call.
        let pidfd = if slot == own_slot {
            None
        } else {
            Some(PidFd::open(pid)?)
        };
        let opener = Opener {
            identity: entry.identity,
            slot,
            own_slot,
        };
        let (map, tables) = map_segment(&opener, entry, guarded)?;
        let life = match pidfd {
            None => None,
            Some(pidfd) => {
                let tables = OpenFile::new(pid, entry.segment_fd, &tables)?;
                Some(Life::open(&opener, pidfd, &map, tables)?)
            }
        };
        // Checks that the pidfd belongs to the registry's process and not to a later process with
        // the same pid.
        if sys::start_time(pid)? != entry.identity.start_time {
            return Err(Errno(libc::ESRCH));
        }
        let hazards = match former {
            // Threads may be in the middle of accesses under these words, which the owner reads
            // since the process was opened first.
            Some(former) => former,
            None => {
                let hazards = Arc::try_new(Hazards::new())?;
                become_visitor(&map, own_slot, own_cookie);
                hazards
            }
        };
        let peer = Self {
            identity: entry.identity,
            slot,
            node: entry.node,
            barriers: map.u32(header::BARRIERS).load(Ordering::Relaxed) == 1,
            may_copy: map.u32(header::MAY_COPY).load(Ordering::Relaxed) == 1,
            map: Arc::try_new(map)?,
            life,
            checked: AtomicU64::new(0),
            given_up: AtomicBool::new(false),
            claims_returned: AtomicBool::new(false),
            without_ring: AtomicU8::new(WithoutRing::Waits as u8),
            out: Lock::new(None),
            doorbells: Mutex::new(Vec::new()),
            unrung: Lock::new(Vec::new()),
            repeats: Arc::clone(repeats),
            hazards,
            directs: Directs::default(),
            opener,
            refuses: AtomicBool::new(false),
            link: Lock::new(None),
        };
        if peer.life.is_some() {
            peer.probe();
        }
        Ok(peer)
    }

    /// Adds the peer to `set`: `token` is readable when the process or its program has ended.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`; the set then does not contain the peer.
    pub(crate) fn watch(&self, set: &Epoll, token: u64) -> Res<()> {
        let Some(life) = &self.life else {
            return Ok(());
        };
        life.watch.lock().add_to(set, token)
    }

    /// Whether no descriptor becomes readable when the peer ends.
    pub(crate) fn is_unwatched(&self) -> bool {
        self.life
            .as_ref()
            .is_some_and(|life| life.watch.lock().pidfd.is_none())
    }

    /// Watches an unwatched peer after the end of a conversation with it: its process may be ending
    /// at this moment. The descriptor takes the place of the conversation's. The caller then checks
    /// [`Self::has_ended`].
    ///
    /// # Errors
    /// Those of `pidfd_open(2)`, `ESRCH` among them, and of `epoll_ctl(2)`.
    #[cold]
    pub(crate) fn watch_now(&self, set: &Epoll, token: u64) -> Res<()> {
        match &self.life {
            Some(life) => life.watch_now(set, token),
            None => Ok(()),
        }
    }

    /// Undoes [`Self::watch`], and removes the connection to the peer's agent from `set`. The
    /// caller has marked the peer as dead.
    pub(crate) fn unwatch(&self, set: &Epoll) {
        if let Some(link) = self.link() {
            set.remove(link.fd());
        }
        if let Some(life) = &self.life {
            life.watch.lock().fds().for_each(|fd| set.remove(fd));
        }
    }

    /// Whether the process and its program are alive. Checks with two system calls, at most once
    /// per millisecond, and per tick of the kernel's clock.
    pub(crate) fn check_alive(&self) -> bool {
        if self.given_up.load(Ordering::Relaxed) {
            return false;
        }
        let Some(life) = &self.life else {
            return true;
        };
        let now = sys::tick_ns();
        if now.wrapping_sub(self.checked.load(Ordering::Relaxed)) < FRESH_NS {
            return true;
        }
        if life.is_there() {
            self.checked.store(now, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// As [`Self::check_alive`], for a caller with a sign that the peer has ended: checks at once.
    #[cold]
    pub(crate) fn has_ended(&self) -> bool {
        self.is_given_up() || self.life.as_ref().is_some_and(|life| !life.is_there())
    }

    /// Whether the peer's program has ended. A peer that [is given up](Self::is_given_up) can also
    /// be a running process that has sent invalid messages.
    #[cold]
    pub(crate) fn has_ended_for_good(&self) -> bool {
        self.life.as_ref().is_some_and(|life| !life.is_there())
    }

    /// Maps the peer's device memory buffer with this stamp. `None` for stamp 0, and if the buffer
    /// cannot be mapped.
    #[inline]
    pub(crate) fn direct(&self, stamp: u64) -> Option<Arc<Mapping>> {
        if stamp == 0 {
            return None;
        }
        self.directs.get(&self.map, &self.opener, stamp)
    }

    /// Whether the kernel refuses copies from and to the peer's memory.
    #[inline]
    pub(crate) fn refuses(&self) -> bool {
        self.refuses.load(Ordering::Relaxed)
    }

    /// Records that the kernel refused a copy with this error; the refusal is permanent.
    #[cold]
    pub(crate) fn set_refuses(&self, error: Errno) {
        // Not for this process itself: after a refusal, `sys::vm_read` and `sys::vm_write` copy its
        // memory through a memfd.
        if self.life.is_some() && !self.refuses.swap(true, Ordering::Relaxed) {
            agent::log_once(&format!(
                "the kernel refuses process_vm_readv and process_vm_writev (errno {})",
                error.0
            ));
        }
    }

    /// Reads the word at the address in `header::PROBE` from the peer's memory, to find a refusal
    /// before the first request.
    fn probe(&self) {
        let mut word = 0u64;
        let local = [sys::as_local((&raw mut word) as u64, 8)];
        let addr = self.map.u64(header::PROBE).load(Ordering::Relaxed);
        if let Err(error) = sys::vm_read(self.identity.pid, &local, &[sys::as_local(addr, 8)])
            && sys::refused(error)
        {
            self.set_refuses(error);
        }
    }

    /// The connection to the peer's agent, if there is one.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.link.lock().clone()
    }

    /// Opens a connection to the peer's agent and watches it in `set` with `token`. Returns also
    /// the broken connection that it replaces.
    ///
    /// # Errors
    /// `ECONNREFUSED`, `EAGAIN`: the caller can retry later. Other errors of the system calls.
    pub(crate) fn open_link(
        &self,
        own_slot: u32,
        set: &Epoll,
        token: u64,
    ) -> Res<(Arc<Link>, Option<Arc<Link>>)> {
        let link = Arc::try_new(Link::open(self.slot, &self.identity, own_slot)?)?;
        set.add(link.fd(), token)?;
        let mut slot = self.link.lock();
        if let Some(other) = slot.as_ref().filter(|other| !other.is_broken()) {
            set.remove(link.fd());
            return Ok((Arc::clone(other), None));
        }
        let old = slot.replace(Arc::clone(&link));
        drop(slot);
        if let Some(old) = &old {
            set.remove(old.fd());
        }
        // A connection that ends stays readable, and the set would wake a thread for it in vain
        // again and again. Either this call sees that the peer has ended, or [`Self::unwatch`]
        // finds the connection.
        if self.is_given_up() {
            set.remove(link.fd());
        }
        Ok((link, old))
    }

    /// Whether the peer has ended or has sent an invalid message: it is not used any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Whether the caller, which cleans up after the peer, is to return the receives that the
    /// process of its slot has claimed. Only the first caller: later claims are those of the next
    /// process with the slot.
    pub(crate) fn begin_return_of_claims(&self) -> bool {
        !self.claims_returned.swap(true, Ordering::Relaxed)
    }

    /// Handling of datagrams while there is no ring.
    pub(crate) fn without_ring(&self) -> WithoutRing {
        match self.without_ring.load(Ordering::Relaxed) {
            0 => WithoutRing::Waits,
            1 => WithoutRing::Kept,
            _ => WithoutRing::Lost,
        }
    }

    #[inline]
    pub(crate) fn set_without_ring(&self, handling: WithoutRing) {
        if self.without_ring.load(Ordering::Relaxed) != handling as u8 {
            self.without_ring.store(handling as u8, Ordering::Relaxed);
        }
    }

    /// Whether the process is stopped by a signal or a debugger. Reads a file in `/proc`.
    #[cold]
    pub(crate) fn is_stopped(&self) -> bool {
        self.life.is_some() && sys::is_stopped(self.identity.pid)
    }

    /// Pushes a message of one slot, with `len` bytes at `from`, into the ring towards the peer.
    /// Returns false if there is no ring, or no room according to the last position that was read
    /// from the receiver.
    ///
    /// # Safety
    /// As [`Producer::push_short`].
    #[inline(always)]
    pub(crate) unsafe fn push_short(&self, header: &Header, from: *const u8, len: usize) -> bool {
        let mut out = self.out.lock();
        match out.as_mut() {
            // SAFETY: the caller promises the same for `from` and `len`.
            Some(producer) => unsafe { producer.push_short(header, from, len) },
            None => false,
        }
    }

    /// Pushes a message into the ring towards the peer, and opens the ring first if necessary.
    #[inline(never)]
    pub(crate) fn push(&self, own: Signature<'_>, header: &Header, fill: impl Fn(*mut u8)) -> Push {
        let mut out = self.out.lock();
        if out.is_none() {
            match self.open_ring(own) {
                Ok(producer) => *out = producer,
                Err(_) => return Push::NoMemory,
            }
        }
        let Some(producer) = out.as_mut() else {
            return Push::Unmade;
        };
        // Under the lock: a thread that finds the request already set can rely on it.
        if producer.push_or_ask(header, fill, || signal::may_sleep(own.segment)) {
            Push::Sent
        } else {
            Push::Full
        }
    }

    /// As [`Self::push`], for a datagram of the queue pair `qpn`; `None` if there is no ring yet.
    #[inline(never)]
    pub(crate) fn push_datagram(
        &self,
        own: Signature<'_>,
        qpn: u32,
        header: &Header,
        fill: impl Fn(*mut u8),
    ) -> Option<Pushed> {
        let mut out = self.out.lock();
        if out.is_none() {
            match self.open_ring(own) {
                Ok(producer) => *out = producer,
                // A peer whose ring cannot be opened is unreachable.
                Err(_) => return Some(Pushed::Lost),
            }
        }
        let may_sleep = || signal::may_sleep(own.segment);
        Some(out.as_mut()?.push_datagram(qpn, header, fill, may_sleep))
    }

    /// The datagram of the queue pair `qpn` no longer waits for room. Returns true if `qpn` had the
    /// turn: the caller then retries other queue pairs.
    pub(crate) fn leave_turn(&self, qpn: u32) -> bool {
        self.out.lock().as_mut().is_some_and(|out| out.leave(qpn))
    }

    /// Latest time until which the datagram of the queue pair `qpn` waits for room, in nanoseconds
    /// of the monotonic clock; `None` if the wait is over at `now`. `u64::MAX` if another queue
    /// pair has the turn: the end of that queue pair's wait ends the turn. With `looks`, reads a
    /// file to check whether the peer is stopped; a stopped peer ends the wait.
    #[cold]
    pub(crate) fn waits_for_room(&self, qpn: u32, now: u64, looks: bool) -> Option<u64> {
        let has_turn = || {
            self.out
                .lock()
                .as_ref()
                .is_some_and(|out| out.is_turn_of(qpn))
        };
        let stopped = looks && has_turn() && self.is_stopped();
        let mut out = self.out.lock();
        let Some(out) = out.as_mut().filter(|out| out.is_turn_of(qpn)) else {
            return Some(u64::MAX);
        };
        if !stopped {
            let until = out.patient_until();
            if now < until {
                return Some(until);
            }
        }
        out.give_up();
        None
    }

    /// Whether there is a ring towards the peer. If not, requests one; the peer rings this process
    /// when the ring is there.
    ///
    /// # Errors
    /// The error of opening the ring. A sender retries.
    #[cold]
    pub(crate) fn has_ring(&self, own: Signature<'_>) -> Res<bool> {
        let mut out = self.out.lock();
        if out.is_none() {
            *out = self.open_ring(own)?;
        }
        Ok(out.is_some())
    }

    /// Opens the ring that the peer made for this process. If there is none yet, requests it once
    /// from the peer and returns `None`.
    #[cold]
    fn open_ring(&self, own: Signature<'_>) -> Res<Option<Producer>> {
        let (own_slot, own_cookie) = (own.slot, own.cookie);
        let at = announce::AT + announce::STRIDE * own_slot as usize;
        let granted = self.map.u64(at + announce::GRANTED);
        let wanted = self.map.u64(at + announce::RING_WANTED_BY);
        let call = || {
            self.map
                .u32(header::RING_REQUESTS)
                .fetch_add(1, Ordering::SeqCst);
            self.ring_process();
        };
        if !signal::is_granted(granted, wanted, own_cookie, call) {
            return Ok(None);
        }
        // The memory of an ended peer is still mapped; a message in it would be lost.
        if self.has_ended() {
            return Err(Errno(libc::ESRCH));
        }
        let map = Mapping::part(&self.map, rings::ring_at(own_slot), RING_SIZE);
        Producer::new(map, own_cookie)
            .map(Some)
            .ok_or(Errno(libc::EPROTO))
    }

    /// Wakes the threads that sleep on one of the peer's completion queues, after the caller has
    /// published a message for it.
    #[inline(always)]
    pub(crate) fn notify_cq(&self, index: u32, solicited: bool) {
        let at = cq::AT + cq::STRIDE * (index as usize % layout::MAX_CQS);
        if signal::must_notify(&self.map, at, solicited, self.barriers) {
            self.ring_cq(at);
        }
    }

    /// Wakes the threads that sleep on the completion queue to which the peer's queue pair with
    /// this number receives.
    #[cold]
    pub(crate) fn notify_cq_of(&self, qp_num: u32) {
        let (_, index) = layout::split_qp_num(qp_num);
        let at = qp::AT + qp::STRIDE * index as usize;
        let cq = self.map.u32(at + qp::RECV_CQ).load(Ordering::Relaxed);
        self.notify_cq(cq, true);
    }

    /// Rings the doorbell of the completion queue whose entry is at `at`, whose request the caller
    /// has taken.
    #[cold]
    pub(crate) fn ring_cq(&self, at: usize) {
        self.ring(Bell::Cq(at));
    }

    /// Wakes the peer if it may sleep, so that the peer handles a request or an event of this
    /// process.
    pub(crate) fn ring_process(&self) {
        if signal::must_ring(&self.map) {
            self.ring(Bell::Process);
        }
    }

    /// Rings a doorbell. If it cannot be opened now, publishes the peer's request again, and enters
    /// the doorbell in the list of those that are rung again.
    #[cold]
    fn ring(&self, bell: Bell) {
        let unrung = self.unrung.lock();
        if unrung.contains(&bell) {
            // Under the lock: `ring_again` finds the request, or has removed the doorbell before.
            bell.must_still_ring(&self.map);
            return;
        }
        drop(unrung);
        let began = sys::now_ns();
        let place = bell.place(&self.map);
        let Err(error) = self.ring_doorbell(place) else {
            return;
        };
        // A doorbell that does not exist any more belongs to a channel or process that has ended.
        if place.0 < 0 || !self.repeats.may_pass(error) || self.is_given_up() {
            return;
        }
        let mut unrung = self.unrung.lock();
        // Without memory for the list, the next ring of any process wakes the peer.
        if !unrung.contains(&bell) {
            let _ = unrung.try_push(bell);
        }
        bell.must_still_ring(&self.map);
        drop(unrung);
        self.repeats.add(began);
    }

    /// Whether doorbells are to be rung again.
    pub(crate) fn has_unrung(&self) -> bool {
        !self.unrung.lock().is_empty()
    }

    /// Rings the doorbells that could not be opened before, unless other processes have rung them.
    #[cold]
    pub(crate) fn ring_again(&self) {
        let count = self.unrung.lock().len();
        for _ in 0..count {
            let mut unrung = self.unrung.lock();
            if unrung.is_empty() {
                return;
            }
            let bell = unrung.remove(0);
            let rings = bell.must_ring(&self.map);
            drop(unrung);
            if rings {
                self.ring(bell);
            }
        }
    }

    /// # Errors
    /// Those of opening the doorbell. `ESTALE`: the descriptor is another file by now.
    fn ring_doorbell(&self, (fd, inode): (RawFd, u64)) -> Res<()> {
        let mut doorbells = self
            .doorbells
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = doorbells.iter().find(|b| b.fd == fd && b.inode == inode) {
            sys::ring_fd(bell.pipe.as_raw_fd());
            return Ok(());
        }
        let pipe = self.opener.open(fd, libc::O_RDWR)?;
        sys::is_pipe(&pipe, inode)?;
        sys::ring_fd(pipe.as_raw_fd());
        if sys::is_spare(pipe.as_raw_fd(), PIPES) {
            doorbells.retain(|b| b.fd != fd);
            if doorbells.len() >= DOORBELLS {
                doorbells.remove(0);
            }
            // Without memory for the list, the doorbell is opened again at the next ring.
            let _ = doorbells.try_push(Doorbell { fd, inode, pipe });
        }
        Ok(())
    }

    /// Moves one of the peer's queue pairs to ERR if its state word still is `word`, and notifies
    /// the peer. Returns whether it was moved.
    pub(crate) fn fail_qp(&self, at: usize, word: layout::StateWord, fault: layout::Fault) -> bool {
        let moved = signal::move_state(&self.map, at, word, word.failed(fault));
        if moved {
            self.call_attention();
        }
        moved
    }

    /// Requests that the peer looks at what was changed for it, see [`header::ATTENTION`].
    pub(crate) fn call_attention(&self) {
        signal::call_attention(&self.map);
        self.ring_process();
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
