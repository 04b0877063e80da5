//! This process as a part of the device: its segment, its peers, and the progress of all work that
//! other processes can't do for it.
//!
//! There is one [`Process`] from the first `ibv_open_device` until the process ends. A forked child
//! that opens the device gets its own.

mod incoming;
mod own_copies;
mod pool;
mod progress;
mod progress_flags;
mod repeat;
mod retry_thread;
mod waiting;

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use pool::Pool;
pub(crate) use progress::ticks;

use forks::PerProcess;
use rdma_core_sys::IBV_ACCESS_FLUSH_PERSISTENT;

use crate::agent::{self, Link, Requester};
use crate::agent_thread::Agent;
use crate::cq::Cq;
use crate::dm::Buffers;
use crate::environment;
use crate::hazard::{Hazards, Visitor};
use crate::key::Key;
use crate::limits::MAX_NODES;
use crate::mw::{Owner, Windows};
use crate::peer::{Peer, Signature};
use crate::qp::Qp;
use crate::region::{AccessError, Description, Initiator, Range, Regions, Target, access};
use crate::registry::{Entry, Registry};
use crate::repeat::Repeats;
use crate::segment::layout::{MAX_CQS, MAX_PROCESSES, MAX_QPS, MAX_SRQS, header};
use crate::segment::{Mapping, OwnSegment};
use crate::signal::{self, Attention};
use crate::srq::Srq;
use crate::sync::{Arc, Lock, register_for_barriers};
use crate::sys::{self, Epoll, Errno, Identity, Pipe, Res, Timer};

/// This process, see the module documentation.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) slot: u32,
    pub(crate) node: u32,
    pub(crate) identity: Identity,
    pub(crate) segment: OwnSegment,
    pub(crate) regions: Regions,
    pub(crate) windows: Windows,
    pub(crate) buffers: Buffers,
    files: Mutex<Files>,
    /// Source of contexts' numbers.
    pub(crate) next_context: AtomicU32,
    pub(crate) imports: crate::dm::Imports,
    pub(crate) domains: crate::xrc::Domains,
    pub(crate) qps: Pool<Qp>,
    pub(crate) cqs: Pool<Cq>,
    pub(crate) srqs: Pool<Srq>,
    /// Source of protection domain handles.
    pub(crate) next_pd: AtomicU32,
    registry: Registry,
    peers: Mutex<HashMap<u32, Arc<Peer>>>,
    /// Serializes the opening of peers, so that each peer is opened once. For each slot, the
    /// process that was opened there last, and this process's hazards in its segment: if the same
    /// process is opened again, its object uses the same words.
    opening: Mutex<HashMap<u32, (Identity, Arc<Hazards>)>>,
    incoming: incoming::Incoming,
    /// There is a ring for a process without barriers, which may wait for a shared receive: threads
    /// that post one use a full fence.
    pub(crate) unfenced: AtomicBool,
    /// Indices of the queue pairs whose first request waits.
    waiting: Lock<waiting::Waiting>,
    /// Number of finished turns of datagrams at full rings, wrapping.
    turns: AtomicU32,
    /// Messages that belong to no request and found no room in a ring, or no ring.
    late: Lock<Vec<progress::Late>>,
    /// Completion queues that hold an event back, see [`Cq::moderate`].
    moderated: Lock<Vec<u32>>,
    /// Queues that may have pending messages to pull, and since when, in processor ticks.
    pulls: Lock<Vec<(progress::Puller, u64)>>,
    attention: Attention,
    progress_flags: progress_flags::ProgressFlags,
    /// A process was opened to which queue pairs may already be connected.
    newcomers: AtomicBool,
    /// Dead peers whose queue pairs are not cleaned up yet.
    dead_peers: Mutex<Vec<Arc<Peer>>>,
    /// Serializes the cleanup of dead peers. In the lock order before all locks of queues.
    cleaning_up: Mutex<()>,
    /// Time of the last check for ended peers, in processor ticks.
    liveness_tick: AtomicU64,
    /// The last round of flushes of failed queue pairs; rounds begin at 1.
    flush_round: AtomicU64,
    /// When the queues with processes that are not rung yet are looked at next, in [`ticks`].
    unrung_due: AtomicU64,
    /// Peers may be open that no descriptor watches; `last_look`: slot of the last one that was
    /// looked at.
    any_unwatched: AtomicBool,
    last_look: AtomicU32,
    doorbell: Pipe,
    /// Nothing is written to it; see [`header::LIFE`].
    life: Pipe,
    timer: Arc<Timer>,
    /// The time at which actions towards peers that have failed are repeated. The actions are
    /// listed apart: doorbells to ring (`Peer::has_unrung`), calls of processes (`uncalled`),
    /// requests to agents (`unasked`), and rings that peers have requested.
    repeats: Arc<Repeats>,
    /// Slots, as bits, of processes that are to check the states of their queue pairs, and could
    /// not be opened for the call.
    uncalled: [AtomicU64; MAX_PROCESSES / 64],
    /// Those of them that a repetition is calling.
    calling: [AtomicU64; MAX_PROCESSES / 64],
    /// As `uncalled`, of processes whose agents are to make progress.
    unasked: [AtomicU64; MAX_PROCESSES / 64],
    /// Readable when any of doorbell, timer and pidfds is; a member of the set of every channel
    /// that has a queue.
    pub(crate) wake: Epoll,
    /// See [`Process::removed_wakes`].
    removed_wakes: Lock<u32>,
    agent: Agent,
    retry_thread: retry_thread::RetryThread,
    /// The word that [`header::PROBE`] points to.
    _probe: Box<u64>,
    /// Descriptors of the completion channels' doorbells, which peers open.
    pub(crate) channels: Lock<Vec<i32>>,
    owner: forks::Owner,
}

/// Files that persistent flushes write back.
#[derive(Debug, Default)]
struct Files {
    /// By key of their region. The number tells apart two regions that had the same key.
    of_keys: HashMap<u32, (u64, OwnedFd)>,
    next: u64,
}

impl Files {
    /// There is room, from `try_reserve`.
    fn insert(&mut self, key: Key, file: OwnedFd) {
        self.next += 1;
        self.of_keys.insert(key.0, (self.next, file));
    }

    /// The number of the key's file.
    fn number(&self, key: Key) -> Option<u64> {
        self.of_keys.get(&key.0).map(|file| file.0)
    }
}

/// Result of [`Process::link_to`].
pub(crate) enum AgentLink {
    Open(Arc<Link>),
    /// The agent does not run yet. The call has requested it; the peer rings when it runs.
    Requested,
    /// There is no descriptor or memory for the line, or too many connections wait for the agent,
    /// which runs. Nothing wakes this process when that ends.
    Unopened,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
static OPENING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::new(()));

impl Process {
    /// This process, opened on the first call.
    ///
    /// # Errors
    /// Those of creating a segment or entering the registry. `ENOMEM`: also if forked children
    /// could not be recognized.
    pub(crate) fn open() -> Res<&'static Self> {
        if let Some(process) = Self::current() {
            return Ok(process);
        }
        let opening = OPENING.try_get().ok_or(Errno(libc::ENOMEM))?;
        let _opening = opening.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(process) = Self::current() {
            return Ok(process);
        }
        // Never freed: objects of this process point to it, and so may objects in forked children.
        let room = sys::room()?;
        let process: &'static Self = Box::leak(Box::write(room, Self::create()?));
        CURRENT.store(std::ptr::from_ref(process).cast_mut(), Ordering::Release);
        if agent::needed_from_start() {
            process.start_agent();
        }
        Ok(process)
    }

    /// This process, if a context has been opened in it.
    pub(crate) fn current() -> Option<&'static Self> {
        let process = CURRENT.load(Ordering::Acquire);
        // SAFETY: NULL, or a process that was leaked.
        unsafe { process.as_ref() }.filter(|process| !process.forked())
    }

    fn create() -> Res<Self> {
        // otherwise a forked child would use the objects of its parent
        if !forks::are_counted() {
            return Err(Errno(libc::ENOMEM));
        }
        let owner = forks::Owner::this_process();
        let barriers = register_for_barriers();
        let identity = Identity {
            pid: std::process::id(),
            start_time: sys::own_start_time().ok_or(Errno(libc::ENODEV))?,
            cookie: sys::random() | 1,
        };
        let node = emulated_node();
        let segment = OwnSegment::create(identity.cookie, node, barriers)?;
        let (doorbell, life) = (Pipe::new()?, Pipe::new()?);
        let timer = Arc::try_new(Timer::new()?)?;
        let repeats = Arc::try_new(Repeats::new(Arc::clone(&timer)))?;
        let wake = wake_set(&doorbell, &timer)?;
        let probe = sys::try_box(identity.cookie)?;
        describe_process(&segment.map, &doorbell, &life, &probe);
        if !segment.guarded {
            crate::log::say(
                "softverbs: the kernel has no F_SEAL_FUTURE_WRITE (Linux 5.1): processes of this user can write each other's tables",
            );
        }
        agent::allow_tracers();
        let (qps, cqs) = (Pool::new(2, MAX_QPS)?, Pool::new(0, MAX_CQS)?);
        // Index 0 is unused: a request without the number of a shared receive queue must reach
        // none. The first index is random: otherwise the first queue of a process had the number of
        // the first queue of the process that had this slot before.
        let srqs = Pool::new(1, MAX_SRQS)?;
        let srqs = if environment::REUSE_SRQ.is_on() {
            srqs.reusing()
        } else {
            srqs.starting(sys::random())
        };
        let (regions, incoming) = (Regions::new()?, incoming::Incoming::new()?);
        // Each list has room for all its possible entries, so adding an entry can't fail.
        let waiting = waiting::Waiting::with_room(MAX_QPS)?;
        let moderated = sys::with_room(MAX_CQS)?;
        let pulls = sys::with_room(MAX_QPS + MAX_SRQS)?;
        let dead_peers = sys::with_room(progress::DEAD_PEERS)?;
        // The steps that are not undone on a failure come last.
        let (registry, slot) = Registry::enter(Entry {
            identity,
            segment_fd: segment.fd(),
            segment_inode: segment.inode()?,
            node,
        })?;
        Ok(Self {
            slot,
            node,
            identity,
            segment,
            regions,
            windows: Windows::default(),
            buffers: Buffers::default(),
            files: Mutex::default(),
            next_context: AtomicU32::new(1),
            imports: crate::dm::Imports::default(),
            domains: crate::xrc::Domains::default(),
            qps,
            cqs,
            srqs,
            next_pd: AtomicU32::new(1),
            registry,
            peers: Mutex::new(HashMap::new()),
            opening: Mutex::default(),
            incoming,
            unfenced: AtomicBool::new(false),
            waiting: Lock::new(waiting),
            turns: AtomicU32::new(0),
            late: Lock::new(Vec::new()),
            moderated: Lock::new(moderated),
            pulls: Lock::new(pulls),
            attention: Attention::default(),
            progress_flags: progress_flags::ProgressFlags::default(),
            newcomers: AtomicBool::new(false),
            dead_peers: Mutex::new(dead_peers),
            cleaning_up: Mutex::new(()),
            liveness_tick: AtomicU64::new(0),
            flush_round: AtomicU64::new(0),
            unrung_due: AtomicU64::new(u64::MAX),
            any_unwatched: AtomicBool::new(false),
            last_look: AtomicU32::new(0),
            doorbell,
            life,
            timer,
            repeats,
            uncalled: [const { AtomicU64::new(0) }; MAX_PROCESSES / 64],
            calling: [const { AtomicU64::new(0) }; MAX_PROCESSES / 64],
            unasked: [const { AtomicU64::new(0) }; MAX_PROCESSES / 64],
            wake,
            removed_wakes: Lock::new(0),
            agent: Agent::default(),
            retry_thread: retry_thread::RetryThread::default(),
            _probe: probe,
            channels: Lock::new(Vec::new()),
            owner,
        })
    }

    /// Whether this is a forked child of the process that the object belongs to. A child must not
    /// use the object.
    #[inline]
    pub(crate) fn forked(&self) -> bool {
        !self.owner.is_this_process()
    }

    /// Returns `self`, for a call on one of the process's objects.
    ///
    /// # Errors
    /// `EIO`: this is a forked child.
    #[inline]
    pub(crate) fn live(&self) -> Res<&Self> {
        if self.forked() {
            Err(Errno(libc::EIO))
        } else {
            Ok(self)
        }
    }

    /// The registry, for other data in it.
    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<u32, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The live process in `slot`; opens it if it is not open. Looks at once whether the one that
    /// is open has ended: another process may have taken its slot since the last look, also one
    /// with the same pid, by executing another program.
    ///
    /// # Errors
    /// `ESRCH`: no process is in the slot. Others: the process can't be opened.
    pub(crate) fn peer(&self, slot: u32) -> Res<Arc<Peer>> {
        if let Some(peer) = self.mapped_peer(slot)
            && !peer.has_ended()
        {
            return Ok(peer);
        }
        let mut opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = self.registry.lookup(slot).ok_or(Errno(libc::ESRCH))?;
        // the cleanup gets the former process of the slot before the new process replaces it
        let old = self.mapped_peer(slot);
        if let Some(old) = old {
            if old.identity == entry.identity && !old.is_given_up() {
                return Ok(old);
            }
            self.peers().remove(&slot);
            self.request_cleanup(&old);
        }
        let full = |_| Errno(libc::ENOMEM);
        self.peers().try_reserve(1).map_err(full)?;
        opening.try_reserve(1).map_err(full)?;
        let same = opening.get(&slot).filter(|last| last.0 == entry.identity);
        let hazards = same.map(|(_, hazards)| Arc::clone(hazards));
        let own = (self.slot, self.identity.cookie);
        let guarded = self.segment.guarded;
        let peer = Peer::open(&entry, slot, own, guarded, &self.repeats, hazards)?;
        let peer = Arc::try_new(peer)?;
        opening.insert(slot, (peer.identity, Arc::clone(&peer.hazards)));
        // The peer is added to the epoll set before it can be used: otherwise its end would not be
        // noticed. A thread that reads the set in between finds no peer of that slot, and checks
        // again.
        peer.watch(&self.wake, progress::peer_token(slot, &peer.identity))?;
        self.peers().insert(slot, Arc::clone(&peer));
        if peer.is_unwatched() {
            self.any_unwatched.store(true, Ordering::Relaxed);
        }
        if self.qps.iter().any(|qp| qp.may_miss(slot)) {
            // The caller may hold locks of a queue pair.
            self.newcomers.store(true, Ordering::Release);
            signal::call_attention(&self.segment.map);
            self.doorbell.ring();
        }
        if slot != self.slot && agent::needed_for(peer.may_copy) {
            self.start_agent();
        }
        if peer.refuses() {
            self.call_agent(&peer);
        }
        Ok(peer)
    }

    /// The process in `slot`, if it is open.
    pub(crate) fn mapped_peer(&self, slot: u32) -> Option<Arc<Peer>> {
        self.peers().get(&slot).cloned()
    }

    /// Starts this process's agent if processes that are not open here may need it: they most
    /// likely have the same restrictions on copies.
    pub(crate) fn start_agent_for_strangers(&self) {
        if agent::needed_for(sys::copies_allowed()) {
            self.start_agent();
        }
    }

    /// Starts this process's agent. Without it, requests of its peers fail or wait without result.
    #[cold]
    pub(crate) fn start_agent(&self) {
        let Some(process) = Self::current().filter(|process| std::ptr::eq(*process, self)) else {
            return;
        };
        // The peer that requested the agent tries again when it is rung.
        if let Ok(true) = self.agent.start(process) {
            self.ring_all_peers();
        }
    }

    /// Requests that a peer starts its agent, once.
    fn call_agent(&self, peer: &Peer) {
        if signal::call_agent(&peer.map) {
            signal::call_attention(&peer.map);
            peer.ring_process();
        }
    }

    /// The link to a peer's agent, which is opened if there is none.
    ///
    /// # Errors
    /// [`AccessError::Dead`]: the peer has ended, or its agent has closed the new line.
    /// [`AccessError::Refused`]: its agent can't be reached either.
    pub(crate) fn link_to(&self, peer: &Arc<Peer>) -> Result<AgentLink, AccessError> {
        if let Some(link) = peer.link().filter(|link| !link.is_broken()) {
            return Ok(AgentLink::Open(link));
        }
        if !peer.check_alive() {
            return Err(AccessError::Dead);
        }
        let token = progress::TOKEN_LINK | u64::from(peer.slot);
        match peer.open_link(self.slot, &self.wake, token) {
            Ok((link, broken)) => {
                if let Some(broken) = broken {
                    self.return_unsent(peer, &broken);
                }
                Ok(AgentLink::Open(link))
            }
            Err(Errno(libc::ECONNREFUSED)) => {
                self.call_agent(peer);
                Ok(AgentLink::Requested)
            }
            Err(Errno(libc::EAGAIN)) => Ok(AgentLink::Unopened),
            Err(error) if sys::is_shortage(error) => Ok(AgentLink::Unopened),
            Err(Errno(libc::EPIPE | libc::ECONNRESET)) => Err(AccessError::Dead),
            Err(_) => Err(AccessError::Refused),
        }
    }

    /// The link to the agent of the process in `slot`, if there is one.
    pub(crate) fn link_of(&self, slot: u32) -> Option<Arc<Link>> {
        let peer = self.mapped_peer(slot)?;
        peer.link()
    }

    /// The local address of `len` bytes that a peer names, from private memory only. The caller has
    /// published a hazard for the key.
    pub(crate) fn own_place(&self, target: Target, len: u64, right: u32) -> Option<u64> {
        let (what, qp) = match self.regions.describe(target.key) {
            Some(region) => (region, 0),
            None => self.windows.describe(target.key)?,
        };
        let offset = target.addr.wrapping_sub(what.range.iova);
        let room = what.range.len;
        let allowed = what.access & right == right
            && what.pd == target.pd
            && (qp == 0 || qp == target.qp)
            && offset <= room
            && len <= room - offset;
        allowed.then(|| what.range.addr.wrapping_add(offset))
    }

    /// Process id of the live process in `slot`: of the one that is open. The registry, which every
    /// process of the user can write, is read only if none is.
    pub(crate) fn pid_of(&self, slot: u32) -> Option<u32> {
        let open = self.mapped_peer(slot).filter(|peer| !peer.has_ended());
        let pid = open.map(|peer| peer.identity.pid);
        pid.or_else(|| self.registry.lookup(slot).map(|entry| entry.identity.pid))
    }

    /// Whether the requester is `connected`, or without it the process that is open in its slot. If
    /// none is open there, or one that has ended, the check of the line's first message stands
    /// ([`Self::pid_of`]).
    pub(crate) fn admits(&self, requester: Requester, connected: Option<Arc<Peer>>) -> bool {
        let mapped = || {
            self.mapped_peer(requester.slot)
                .filter(|peer| !peer.has_ended())
        };
        let open = connected.or_else(mapped);
        let is_it =
            |peer: Arc<Peer>| (peer.slot, peer.identity.pid) == (requester.slot, requester.pid);
        open.is_none_or(|peer| peer.check_alive() && is_it(peer))
    }

    /// Reopens the file behind `fd` if this process shares it with its peers; `None` for all other
    /// open files.
    pub(crate) fn shown_file(&self, fd: i32) -> Option<OwnedFd> {
        let open = |flags| sys::open_fd_of(std::process::id(), fd, flags).ok();
        // These descriptors stay open while the process lives.
        if fd == self.segment.shared_fd() || fd == self.doorbell.read_fd() {
            return open(libc::O_RDWR);
        }
        if fd == self.segment.fd() || fd == self.life.read_fd() {
            return open(libc::O_RDONLY);
        }
        // These are not closed while the locks are held.
        let channels = self.channels.lock();
        if channels.contains(&fd) {
            return open(libc::O_RDWR);
        }
        drop(channels);
        let files = self.files();
        if files
            .of_keys
            .values()
            .any(|(_, file)| file.as_raw_fd() == fd)
        {
            return open(libc::O_RDONLY);
        }
        drop(files);
        let buffer = self.buffers.reopen(fd);
        buffer.or_else(|| self.domains.reopen(fd))
    }

    /// Whether a process may still be alive: any process of a slot, or the visitor with a cookie.
    pub(crate) fn lives(&self, process: impl Into<Visitor>) -> bool {
        let Visitor { slot, cookie } = process.into();
        let is_it = |found: u64| cookie.is_none_or(|cookie| cookie == found);
        // The registry is a file that any process may corrupt.
        let known = self.mapped_peer(slot);
        if known.is_some_and(|peer| is_it(peer.identity.cookie) && peer.check_alive()) {
            return true;
        }
        match self.cookie_of(slot) {
            Some(found) => is_it(found),
            None => self.registry.may_live(slot),
        }
    }

    /// The cookie that distinguishes the live process in `slot` from other processes of that slot.
    pub(crate) fn cookie_of(&self, slot: u32) -> Option<u64> {
        self.registry
            .lookup(slot)
            .map(|entry| entry.identity.cookie)
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a region to peers. A region inside a buffer of the device is recorded as a part of
    /// that buffer.
    ///
    /// # Errors
    /// `ENOMEM`: no memory. `EINVAL`: persistent flush was requested for memory that is no shared
    /// mapping of a file on a disk.
    pub(crate) fn add_region(&self, pd: u32, range: Range, access: u32) -> Res<Key> {
        let file = if access & IBV_ACCESS_FLUSH_PERSISTENT != 0 {
            Some(sys::file_behind(range.addr, range.len)?.ok_or(Errno(libc::EINVAL))?)
        } else {
            None
        };
        let mut files = match &file {
            Some(_) => {
                let mut files = self.files();
                files
                    .of_keys
                    .try_reserve(1)
                    .map_err(|_| Errno(libc::ENOMEM))?;
                Some(files)
            }
            None => None,
        };
        let writes = access::writable(access);
        let direct = self.buffers.cover(range.addr, range.len, writes);
        let what = Description {
            access,
            pd,
            range,
            direct,
            file: file
                .as_ref()
                .map_or(0, |file| file.as_raw_fd().cast_unsigned() + 1),
        };
        let added = self.regions.add(&self.segment, &what);
        match (&added, file, &mut files) {
            (Ok(key), Some(file), Some(files)) => {
                files.insert(*key, file);
            }
            (Err(_), ..) => self.buffers.uncover(&self.segment, direct.stamp),
            _ => {}
        }
        added
    }

    /// Ends a region.
    ///
    /// # Errors
    /// `EBUSY`: a window is bound to it; or after a timeout an initiator still uses it, or a window
    /// that was bound, or a thread of this process still copies. The call can be repeated. The
    /// region's own key may be invalid by now.
    pub(crate) fn end_region(&self, key: Key) -> Res<()> {
        self.with_windows(|windows, owner| windows.await_former(owner, key))?;
        let (regions, segment) = (&self.regions, &self.segment);
        self.end_region_by(key, || {
            if regions.is_received(key) {
                self.poison_receives(key.0);
            }
            self.await_own_copies()?;
            regions.deregister(segment, key, |visitor| self.lives(visitor))
        })
    }

    /// As [`Self::end_region`], without a wait. Does not look at the copies of this process's
    /// threads: the caller has seen the ends of the requests and receives that name the region.
    pub(crate) fn end_region_now(&self, key: Key) -> Res<()> {
        let (regions, segment) = (&self.regions, &self.segment);
        self.end_region_by(key, || {
            regions.deregister_now(segment, key, |visitor| self.lives(visitor))
        })
    }

    fn end_region_by(&self, key: Key, deregister: impl FnOnce() -> Res<()>) -> Res<()> {
        let (regions, segment) = (&self.regions, &self.segment);
        self.with_windows(|windows, owner| {
            windows.unless_bound(owner, key, || regions.kill(segment, key))
        })?;
        let stamp = regions.stamp_of(key);
        let file = self.files().number(key);
        deregister()?;
        self.buffers.uncover(segment, stamp);
        // Another region may have the key by now, and a file of its own.
        if file.is_some() {
            let mut files = self.files();
            if files.number(key) == file {
                files.of_keys.remove(&key.0);
            }
        }
        Ok(())
    }

    /// Runs `change` on the windows, with access to their regions and to the liveness of peers.
    pub(crate) fn with_windows<T>(&self, change: impl FnOnce(&Windows, &Owner<'_>) -> T) -> T {
        let owner = Owner {
            regions: &self.regions,
            segment: &self.segment,
            lives: &|visitor| self.lives(visitor),
        };
        change(&self.windows, &owner)
    }

    /// Makes the posted receives fail that name a key which changes or ends. The caller holds no
    /// lock of a queue.
    pub(crate) fn poison_receives(&self, lkey: u32) {
        for qp in self.qps.iter() {
            qp.poison_receives(lkey);
        }
        for srq in self.srqs.iter() {
            srq.poison_receives(lkey);
        }
    }

    /// The signature with which this process, as a sender, identifies its rings.
    #[inline]
    pub(crate) fn signature(&self) -> Signature<'_> {
        Signature {
            slot: self.slot,
            cookie: self.identity.cookie,
            segment: &self.segment.map,
        }
    }

    /// Rings all open peers, as any of them may wait for this process.
    pub(crate) fn ring_all_peers(&self) {
        let mut slots = [0_u64; MAX_PROCESSES / 64];
        for slot in self.peers().keys() {
            if let Some(word) = slots.get_mut(*slot as usize / 64) {
                *word |= 1 << (slot % 64);
            }
        }
        self.ring_peers(&slots);
    }

    /// Rings those of the open peers whose slots have their bits set. Other bits have no effect.
    /// Returns the number of these peers.
    pub(crate) fn ring_peers(&self, slots: &[u64]) -> u32 {
        let mut rung = 0;
        // A ring is a system call, so the list is not locked meanwhile. It is reached from a post,
        // which must not end for lack of memory.
        for (word, mut slots) in (0..).zip(slots.iter().copied()) {
            while slots != 0 {
                let slot = 64 * word + slots.trailing_zeros();
                slots &= slots - 1;
                if let Some(peer) = self.mapped_peer(slot) {
                    peer.ring_process();
                    rung += 1;
                }
            }
        }
        rung
    }

    /// Publishes that this process may sleep, so that peers ring it when they change a state that
    /// its requests wait for. The caller then executes a heavy fence and one more round of
    /// progress.
    pub(crate) fn will_sleep(&self) {
        signal::will_sleep(&self.segment.map);
    }
}

impl Initiator for Process {
    fn identity(&self) -> (u32, u64) {
        (self.slot, self.identity.cookie)
    }

    fn cookie_of(&self, slot: u32) -> Option<u64> {
        Self::cookie_of(self, slot)
    }

    fn lives(&self, slot: u32) -> bool {
        Self::lives(self, slot)
    }
}

/// The set that wakes the process's threads. Peers and links are added when they are opened.
fn wake_set(doorbell: &Pipe, timer: &Timer) -> Res<Epoll> {
    let wake = Epoll::new()?;
    wake.add(doorbell.read_fd(), progress::TOKEN_DOORBELL)?;
    wake.add(timer.fd(), progress::TOKEN_TIMER)?;
    Ok(wake)
}

/// Writes to the process's segment how peers ring it, notice its end and reach its memory.
fn describe_process(map: &Mapping, doorbell: &Pipe, life: &Pipe, probe: &u64) {
    map.u32(header::DOORBELL)
        .store(doorbell.read_fd().cast_unsigned(), Ordering::Relaxed);
    map.u64(header::DOORBELL_INODE)
        .store(doorbell.inode(), Ordering::Release);
    map.u32(header::LIFE)
        .store(life.read_fd().cast_unsigned(), Ordering::Relaxed);
    map.u64(header::LIFE_INODE)
        .store(life.inode(), Ordering::Relaxed);
    map.u64(header::PROBE)
        .store(std::ptr::from_ref(probe) as u64, Ordering::Relaxed);
    map.u32(header::MAY_COPY)
        .store(u32::from(sys::copies_allowed()), Ordering::Relaxed);
    // An application can poll descriptors before any call that sleeps. So from now on, until such a
    // call, peers ring this process, or its doorbell is already readable.
    signal::will_sleep(map);
}

/// The emulated node that the environment asks for.
pub(crate) fn emulated_node() -> u32 {
    environment::NODE
        .number()
        .filter(|&node| node < MAX_NODES)
        .unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests;
