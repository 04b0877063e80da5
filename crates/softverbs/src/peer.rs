//! Another process that has the device open (or this one itself, which is reached the same way).

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::agent::{self, Link, Opener};
use crate::region::{Directs, Hazards};
use crate::registry::Entry;
use crate::ring::{Header, Producer, Pushed, RING_SIZE};
use crate::segment::Mapping;
use crate::segment::layout::{
    self, OWNED, SEGMENT_SIZE, SHARED_SIZE, TABLES_SIZE, announce, cq, header,
};
use crate::signal;
use crate::sync::{Arc, Lock};
use crate::sys::{self, Epoll, Errno, Grow, Identity, OpenFile, PidFd, Res};

/// How long a peer is taken to live after it was seen alive. A pid can't come back so soon.
const FRESH_NS: u64 = 1_000_000;

/// Doorbells of one peer that are kept open; the oldest goes first.
const DOORBELLS: usize = 64;

/// A process and what is mapped of it. Kept while a queue pair is connected to it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) identity: Identity,
    pub(crate) slot: u32,
    pub(crate) node: u32,
    /// The peer's segment. Whatever it holds may be wrong; from [`OWNED`] on by the peer's own doing only, and it must not be written.
    pub(crate) map: Arc<Mapping>,
    /// The peer runs barriers before it sleeps.
    pub(crate) barriers: bool,
    /// The kernel lets it copy between processes.
    pub(crate) copies: bool,
    /// `None` for this process itself.
    life: Option<Life>,
    checked: AtomicU64,
    dead: AtomicBool,
    /// What becomes of datagrams while there is no ring: an [`Unmade`].
    unmade: AtomicU8,
    out: Lock<Option<Producer>>,
    doorbells: Mutex<Vec<Doorbell>>,
    pub(crate) hazards: Hazards,
    directs: Directs,
    /// How its files are opened.
    pub(crate) opener: Opener,
    /// The kernel refuses copies: its agent makes them.
    refuses: AtomicBool,
    /// The line to its agent, where there is one.
    link: Lock<Option<Arc<Link>>>,
}

/// How the end of a process is seen, and that of its program: one that executes another keeps its
/// pid, and its memory is another one's.
#[derive(Debug)]
struct Life {
    pidfd: PidFd,
    /// Hangs up when the program ends, unless a forked child keeps it open.
    pipe: OwnedFd,
    /// Is there as long as the program runs.
    tables: OpenFile,
}

impl Life {
    fn is_there(&self) -> bool {
        self.pidfd.alive() && self.tables.is_open()
    }
}

#[derive(Debug)]
struct Doorbell {
    fd: RawFd,
    inode: u64,
    pipe: OwnedFd,
}

/// Who sends: what its rings are signed with, and its segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signature<'a> {
    pub(crate) slot: u32,
    pub(crate) cookie: u64,
    pub(crate) segment: &'a Mapping,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Push {
    Sent,
    /// The ring is full; the peer will ring this process when that changes.
    Full,
    /// The ring is not made yet; as above.
    Unmade,
    /// The ring can't be opened.
    NoMemory,
}

/// What becomes of a datagram where the receiver has not made a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmade {
    /// It waits for the ring in its queue,
    Waits = 0,
    /// or is kept apart from it if there are not too many already,
    Kept = 1,
    /// or lost if so.
    Lost = 2,
}

impl Peer {
    /// Opens the process that the registry has in `slot`; `guarded`: its tables must be sealed against all others.
    ///
    /// # Errors
    /// `ESRCH` where it has ended, `EACCES` where it can't be reached, `EPERM` where its files are not sealed, `EPROTO` where its segment
    /// is not one.
    pub(crate) fn open(entry: &Entry, slot: u32, own_slot: u32, guarded: bool) -> Res<Self> {
        let pid = entry.identity.pid;
        // A process outlives itself, and tools that run it may not know the call.
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
        let tables = opener.open(entry.segment_fd, libc::O_RDONLY)?;
        if sys::sealed_size(&tables)? != TABLES_SIZE {
            return Err(Errno(libc::EPROTO));
        }
        if guarded && !sys::is_guarded(&tables)? {
            return Err(Errno(libc::EPERM));
        }
        // Only the owner can say which file is the other one.
        let shared_fd = sys::read_word(&tables, header::SHARED - OWNED)? as u32;
        let shared = opener.open(shared_fd.cast_signed(), libc::O_RDWR)?;
        let inode = sys::read_word(&tables, header::SHARED_INODE - OWNED)?;
        if sys::sealed_size(&shared)? != SHARED_SIZE || sys::inode_of(&shared)? != inode {
            return Err(Errno(libc::EPROTO));
        }
        let map = Mapping::pair((&shared, SHARED_SIZE), (&tables, TABLES_SIZE), false)?;
        let tables = OpenFile::new(pid, entry.segment_fd, &tables)?;
        let whole = map.u64(header::MAGIC).load(Ordering::Acquire) == layout::MAGIC
            && map.u64(header::SIZE).load(Ordering::Relaxed) == SEGMENT_SIZE as u64
            && map.u64(header::COOKIE).load(Ordering::Relaxed) == entry.identity.cookie;
        if !whole {
            return Err(Errno(libc::EPROTO));
        }
        let life = match pidfd {
            None => None,
            Some(pidfd) => {
                let fd = map.u32(header::LIFE).load(Ordering::Relaxed);
                let inode = map.u64(header::LIFE_INODE).load(Ordering::Relaxed);
                let pipe = opener.open(fd.cast_signed(), libc::O_RDONLY)?;
                sys::is_pipe(&pipe, inode)?;
                Some(Life {
                    pidfd,
                    pipe,
                    tables,
                })
            }
        };
        // The pidfd is of the process that the registry means, not of a later one of that pid.
        if sys::start_time(pid) != Some(entry.identity.start_time) {
            return Err(Errno(libc::ESRCH));
        }
        // An ended process of this slot may have left hazards.
        let hazards = announce::AT + announce::STRIDE * own_slot as usize + announce::HAZARDS;
        for i in 0..announce::HAZARD_COUNT {
            map.u64(hazards + 8 * i).store(0, Ordering::Relaxed);
        }
        map.u64(header::VISITORS + 8 * (own_slot as usize / 64))
            .fetch_or(1 << (own_slot % 64), Ordering::SeqCst);
        let peer = Self {
            identity: entry.identity,
            slot,
            node: entry.node,
            barriers: map.u32(header::BARRIERS).load(Ordering::Relaxed) == 1,
            copies: map.u32(header::COPIES).load(Ordering::Relaxed) == 1,
            map: Arc::try_new(map)?,
            life,
            checked: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            unmade: AtomicU8::new(Unmade::Waits as u8),
            out: Lock::new(None),
            doorbells: Mutex::new(Vec::new()),
            hazards: Hazards::new(),
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

    /// Has `set` readable with `token` when the process or its program has ended.
    ///
    /// # Errors
    /// What the kernel says of a set; nothing is in it then.
    pub(crate) fn watch(&self, set: &Epoll, token: u64) -> Res<()> {
        let Some(life) = &self.life else {
            return Ok(());
        };
        set.add(life.pidfd.fd(), token)?;
        set.add(life.pipe.as_raw_fd(), token)
            .inspect_err(|_| set.remove(life.pidfd.fd()))
    }

    /// Takes back [`Self::watch`].
    pub(crate) fn unwatch(&self, set: &Epoll) {
        if let Some(link) = self.link() {
            set.remove(link.fd());
        }
        if let Some(life) = &self.life {
            set.remove(life.pidfd.fd());
            set.remove(life.pipe.as_raw_fd());
        }
    }

    /// Whether the process lives, and its program. Costs two system calls once in a millisecond.
    pub(crate) fn check_alive(&self) -> bool {
        if self.dead.load(Ordering::Relaxed) {
            return false;
        }
        let Some(life) = &self.life else {
            return true;
        };
        let now = sys::now_ns();
        if now.wrapping_sub(self.checked.load(Ordering::Relaxed)) < FRESH_NS {
            return true;
        }
        if life.is_there() {
            self.checked.store(now, Ordering::Relaxed);
            return true;
        }
        false
    }

    /// As [`Self::check_alive`], where something says that it has ended: looks now.
    #[cold]
    pub(crate) fn has_ended(&self) -> bool {
        self.is_dead() || self.life.as_ref().is_some_and(|life| !life.is_there())
    }

    /// The peer's buffer of device memory with this stamp, mapped here; `None` for stamp 0, and where it
    /// can't be.
    #[inline]
    pub(crate) fn direct(&self, stamp: u64) -> Option<Arc<Mapping>> {
        if stamp == 0 {
            return None;
        }
        self.directs.get(&self.map, &self.opener, stamp)
    }

    /// Whether the kernel refuses copies from and to its memory.
    #[inline]
    pub(crate) fn refuses(&self) -> bool {
        self.refuses.load(Ordering::Relaxed)
    }

    /// The kernel refused a copy with this error; it will again.
    #[cold]
    pub(crate) fn set_refuses(&self, error: Errno) {
        // Within a process nothing is refused in the end.
        if self.life.is_some() && !self.refuses.swap(true, Ordering::Relaxed) {
            agent::tell(&format!(
                "the kernel refuses process_vm_readv and process_vm_writev (errno {})",
                error.0
            ));
        }
    }

    /// Tries to read a word of the process's memory that it shows. A refusal is found out before the first request.
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

    /// The line to the process's agent, unless there is none.
    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.link.lock().clone()
    }

    /// Another line to its agent, watched in `set` with `token`; the old one is let go.
    ///
    /// # Errors
    /// `ECONNREFUSED`, `EAGAIN`: later, perhaps; what else the system says.
    pub(crate) fn open_link(&self, own_slot: u32, set: &Epoll, token: u64) -> Res<Arc<Link>> {
        let link = Arc::try_new(Link::open(self.slot, &self.identity, own_slot)?)?;
        set.add(link.fd(), token)?;
        let mut slot = self.link.lock();
        if let Some(other) = slot.as_ref().filter(|other| !other.is_broken()) {
            set.remove(link.fd());
            return Ok(Arc::clone(other));
        }
        let old = slot.replace(Arc::clone(&link));
        drop(slot);
        if let Some(old) = old {
            set.remove(old.fd());
        }
        Ok(link)
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// What becomes of datagrams while there is no ring.
    pub(crate) fn unmade(&self) -> Unmade {
        match self.unmade.load(Ordering::Relaxed) {
            0 => Unmade::Waits,
            1 => Unmade::Kept,
            _ => Unmade::Lost,
        }
    }

    #[inline]
    pub(crate) fn set_unmade(&self, unmade: Unmade) {
        if self.unmade.load(Ordering::Relaxed) != unmade as u8 {
            self.unmade.store(unmade as u8, Ordering::Relaxed);
        }
    }

    /// Whether the process is stopped, by a signal or a debugger. Reads a file.
    #[cold]
    pub(crate) fn is_stopped(&self) -> bool {
        self.life.is_some() && sys::is_stopped(self.identity.pid)
    }

    /// Puts a message of one slot, of `len` bytes at `from`, into the ring towards the peer, if that is there and has room as far as this
    /// side knows.
    ///
    /// # Safety
    /// As [`Producer::push_short`].
    #[inline(always)]
    pub(crate) unsafe fn push_short(&self, header: &Header, from: *const u8, len: usize) -> bool {
        let mut out = self.out.lock();
        match out.as_mut() {
            // SAFETY: as the caller promises.
            Some(producer) => unsafe { producer.push_short(header, from, len) },
            None => false,
        }
    }

    /// Puts a message into the ring towards the peer.
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
        // Under the lock, so that who finds that the receiver is asked already can rely on it.
        if producer.push_or_ask(header, fill, || signal::may_sleep(own.segment)) {
            Push::Sent
        } else {
            Push::Full
        }
    }

    /// As [`Self::push`] of a datagram of the queue pair `qpn`; `None` where there is no ring yet.
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
                // A process that gives no ring can't be reached.
                Err(_) => return Some(Pushed::Lost),
            }
        }
        let may_sleep = || signal::may_sleep(own.segment);
        Some(out.as_mut()?.push_datagram(qpn, header, fill, may_sleep))
    }

    /// The datagram of the queue pair `qpn` waits for room no longer. True where `qpn` had the turn,
    /// so that other queue pairs can be tried.
    pub(crate) fn leave_line(&self, qpn: u32) -> bool {
        self.out.lock().as_mut().is_some_and(|out| out.leave(qpn))
    }

    /// Until when the datagram of the queue pair `qpn` waits for room at most, in nanoseconds of the
    /// monotonic clock; `None` where the wait is over at `now`. `u64::MAX` where another queue pair
    /// has the turn: the end of its wait ends the turn. With `looks`, reads a file to find out
    /// whether the process is stopped.
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

    /// Whether there is a ring towards the peer. One that is not made yet is asked for; the peer rings when it is.
    ///
    /// # Errors
    /// Why it can't be opened. Who sends tries again.
    #[cold]
    pub(crate) fn has_ring(&self, own: Signature<'_>) -> Res<bool> {
        let mut out = self.out.lock();
        if out.is_none() {
            *out = self.open_ring(own)?;
        }
        Ok(out.is_some())
    }

    /// The ring that the peer made for this process. A peer that has not made one is asked to.
    #[cold]
    fn open_ring(&self, own: Signature<'_>) -> Res<Option<Producer>> {
        let (own_slot, own_cookie) = (own.slot, own.cookie);
        let at = announce::AT + announce::STRIDE * own_slot as usize;
        let granted = self.map.u64(at + announce::GRANTED);
        if granted.load(Ordering::Acquire) != own_cookie {
            let wanted = self.map.u64(at + announce::WANTED);
            if wanted.swap(own_cookie, Ordering::AcqRel) != own_cookie {
                let count = self.map.u32(header::WANTED);
                count.fetch_add(1, Ordering::SeqCst);
                self.ring_process();
            }
            return Ok(None);
        }
        let fd = self.map.u32(at + announce::FD).load(Ordering::Relaxed);
        let file = self.opener.open(fd.cast_signed(), libc::O_RDWR)?;
        if sys::sealed_size(&file)? != RING_SIZE {
            return Err(Errno(libc::EPROTO));
        }
        let map = Mapping::new(&file, RING_SIZE)?;
        Producer::new(map, own_cookie)
            .map(Some)
            .ok_or(Errno(libc::EPROTO))
    }

    /// Wakes who sleeps on one of the peer's completion queues, after a message for it was
    /// published.
    #[inline(always)]
    pub(crate) fn notify_cq(&self, index: u32, solicited: bool) {
        let at = cq::AT + cq::STRIDE * (index as usize % layout::MAX_CQS);
        if signal::must_notify(&self.map, at, solicited, self.barriers) {
            self.ring_cq(at);
        }
    }

    #[cold]
    fn ring_cq(&self, at: usize) {
        let fd = self.map.u32(at + cq::DOORBELL).load(Ordering::Relaxed);
        let inode = self
            .map
            .u64(at + cq::DOORBELL_INODE)
            .load(Ordering::Relaxed);
        self.ring_doorbell(fd.cast_signed(), inode);
    }

    /// Wakes the peer, if it may sleep, so that it goes on with what waited for this process.
    pub(crate) fn ring_process(&self) {
        if signal::must_ring(&self.map) {
            let fd = self.map.u32(header::DOORBELL).load(Ordering::Relaxed);
            let inode = self.map.u64(header::DOORBELL_INODE).load(Ordering::Relaxed);
            self.ring_doorbell(fd.cast_signed(), inode);
        }
    }

    fn ring_doorbell(&self, fd: RawFd, inode: u64) {
        let mut doorbells = self
            .doorbells
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = doorbells.iter().find(|b| b.fd == fd && b.inode == inode) {
            sys::ring_fd(bell.pipe.as_raw_fd());
            return;
        }
        // One that can't be opened belongs to a channel or process that is gone.
        let pipe = self.opener.open(fd, libc::O_RDWR);
        if let Ok(pipe) = pipe
            && sys::is_pipe(&pipe, inode).is_ok()
        {
            sys::ring_fd(pipe.as_raw_fd());
            doorbells.retain(|b| b.fd != fd);
            if doorbells.len() >= DOORBELLS {
                doorbells.remove(0);
            }
            // Without room it is opened again the next time.
            let _ = doorbells.try_push(Doorbell { fd, inode, pipe });
        }
    }

    /// Moves one of the peer's queue pairs to ERR, if it still is in the state that `word` says,
    /// and tells the peer.
    pub(crate) fn fail_qp(&self, at: usize, word: layout::StateWord, fault: layout::Fault) {
        if signal::move_state(&self.map, at, word, word.failed(fault)) {
            self.call_attention();
        }
    }

    /// Has the peer look at its queue pairs.
    pub(crate) fn call_attention(&self) {
        signal::call_attention(&self.map);
        self.ring_process();
    }
}
