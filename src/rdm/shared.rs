//! The state that an endpoint shares with the driver thread and with its completion queues, and the
//! way of work completions to the core.
//!
//! In one file: the steps of `Todo` are executed only here, under the lock that this file defines.

mod circuit_steps;
mod circuits;
mod driven;
mod end;
mod entries;
mod failure;
mod search;
mod steps;

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use biased_lock::MutexGuard;
use forks::PerProcess;
use parking_lot::Mutex;

use super::config::EndpointConfig;
use super::context::SharedRx;
use super::core::link::LinkKey;
use super::core::peer::PeerKey;
use super::core::{Core, Failure};
use super::cq_source::CqSource;
use super::executor::{Executor, Todo};
use super::iov::MAX_IOV;
use super::listening::Listening;
use super::rings::Pace;
use super::vector::VectorUser;
use crate::av::FiAddr;
use crate::conn::{ConnectRequest, Driver, Tuning, Turn};
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::log::warn_log;
use crate::mr::Directory;
use crate::queue::event_cell::{Cell, Event, Watch};
use crate::queue::{Counter, Counters};
use crate::rdm::link::block::{LinkBlock, Uncounted};
use crate::rdm::link::cm::LinkCm;
use crate::rdm::link::outlet::CIRCUIT_RMA;
use crate::rdm::link::parked_ids::ParkedIds;
use crate::rdm::link::poster::{DriverRequest, RMA_REQUESTS};
use crate::rdm::link::ring::LinkRing;
use crate::rdm::link::send_queue::DEPTH;
use crate::rdm::xrc::circuit_cm::Held;
use crate::rdm::xrc::circuit_queue::CIRCUIT_DEPTH;
use crate::verbs::{CmId, Cq, Pd, Qp, QpConfig, RemoteAddr, Rkey, Transport, Wc};
use crate::wire::rdm::Listener;

pub(super) use circuit_steps::SrqEvents;
pub(super) use driven::RequestSink;
pub(super) use end::LINGER_PERIOD;
pub(super) use failure::CqEvents;

/// Maximum number of work completions per poll, and of polls per progress call.
const BATCH: usize = 16;
const POLLS: usize = 4;
/// Bytes of READs per poll on a device that copies them in the post, after which other threads get
/// the endpoint's lock, and the caller the entries.
const READ_BYTES: u64 = 1 << 20;
/// Maximum number of consecutive polls of the driver, which hold the endpoint's lock.
const ROUNDS: usize = 16;
/// The same before a search: enough polls for all packets that the posted receives (4,096) and a
/// ring (2,048) can have.
const SEARCH_ROUNDS: usize = 4096 / (BATCH * POLLS);

/// The endpoints of the process that are not dropped.
static ALL: PerProcess<Mutex<Vec<Weak<Shared>>>> = PerProcess::new(Mutex::new(Vec::new()));

/// The state under the endpoint's lock.
pub(super) struct State {
    pub(super) core: Core<Executor>,
    pub(super) io: Executor,
    /// Peers by `fi_addr_t`, as they were found in the address vector.
    peers: Vec<Option<PeerKey>>,
    /// Addresses of peers for `fi_cq_readfrom`, by the peer's place, each with the sum of the
    /// generation of the address vector and the count of [`Core::names`] at which it was found.
    source_addresses: Vec<(u64, u64)>,
    /// Number of calls of the application that have made progress; wraps.
    pub(super) progress_calls: u32,
    /// The same when the driver was called last.
    progress_calls_seen: u32,
    /// The time, in ns, of the last call of the driver that has found a change of it.
    polled_at: u64,
    /// Set while [`State::poll`] reads the rings, behind its poll of the device queue.
    pub(super) sends_polled: bool,
    /// Why it serves nothing any more: `EOVERRUN`, the device queue has lost completions; `EOTHER`,
    /// a call of the driver has panicked.
    pub(super) failed: Option<FiErrno>,
    /// Number of receives of the shared receive context that are not posted any more and keep their
    /// place in its size, as the context counts them.
    kept_receives: usize,
    /// There was no memory for a receive, which was logged.
    enomem_logged: bool,
    /// Sources may be armed.
    pub(super) sleepers: bool,
    /// Counts the progress calls since the last poll of the device (`rings.rs`).
    pub(super) device_turn: u32,
    /// What a progress call without a packet in a hot ring adds to `device_turn`.
    pub(super) step: u32,
    /// Number of polls of the device without a completion since the last one with a completion.
    pub(super) quiet: u32,
    pub(super) pace: Pace,
    /// Index of the hot ring that is examined first.
    pub(super) next_hot: usize,
    /// The link in whose ring messages were read last, if [`Self::end_run`] has to follow.
    pub(super) behind: Option<LinkKey>,
    /// [`Self::progress_calls`] at the last look at the revocations of peers.
    pub(super) looked: u32,
    /// Number of polls of all rings; wraps.
    pub(super) polls: u32,
    /// Number of calls of [`Driven::drive`].
    #[cfg(test)]
    pub(super) drives: usize,
    /// As if peers sent without a pause: the driver's polls never find the device queue and all
    /// rings empty.
    #[cfg(test)]
    pub(super) busy: bool,
    /// The driver was woken, and has not called [`Driven::drive`] since.
    woken: bool,
    /// The driver's part in delayed requests.
    delay_watch: driven::DelayWatch,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

/// Where the peers of an endpoint count their operations. The block of a link has the address of
/// the cell, which does not change while the link exists.
#[derive(Debug, Default)]
struct PeerCounts {
    /// Made for the first link that is begun with a counter of the peers' operations.
    cell: Option<Arc<Cell>>,
    /// Each block without a cell has a clone.
    uncounted: Uncounted,
}

impl PeerCounts {
    /// Whether a link was begun without a cell and has not ended.
    fn has_uncounted_link(&self) -> bool {
        // clones are made under the lock alone
        Arc::strong_count(&self.uncounted) > 1
    }
}

/// See the module.
pub(super) struct Shared {
    this: Weak<Self>,
    pub(super) domain: Arc<Domain>,
    pd: Arc<Pd>,
    pub(super) config: EndpointConfig,
    pub(super) counters: Arc<Counters>,
    driver: Arc<Driver>,
    pub(super) driver_turn: Arc<Turn>,
    /// The process that has opened the endpoint; a child of it has no use of the objects.
    owner: forks::Owner,
    /// Time 0 of the core.
    begin: Instant,
    pub(super) listening: OnceLock<Listening>,
    /// The shared receive context of an enabled endpoint.
    pub(super) context: OnceLock<Arc<SharedRx>>,
    /// `None` before enabling and after closing.
    state: biased_lock::Mutex<Option<State>>,
    /// The sources of the endpoint's completion queues.
    pub(super) cq_sources: Mutex<Vec<Arc<CqSource>>>,
    /// Identifiers that are destroyed when their port is active.
    pub(super) parked: ParkedIds,
    /// What links ask of the driver.
    driver_requests: Mutex<Vec<DriverRequest>>,
    /// The event cell in which the peers count their operations, for the counters of these.
    peer_counts: Mutex<PeerCounts>,
    /// As if the device had no rings.
    #[cfg(test)]
    pub(super) no_rings: std::sync::atomic::AtomicBool,
    /// The next call of the driver panics.
    #[cfg(test)]
    pub(super) panics: std::sync::atomic::AtomicBool,
    /// So many targets cannot be opened, for lack of descriptors.
    #[cfg(test)]
    pub(super) missing_descriptors: std::sync::atomic::AtomicU32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(
        domain: &Arc<Domain>,
        pd: Arc<Pd>,
        config: EndpointConfig,
    ) -> Result<Arc<Self>> {
        let driver = domain.driver()?;
        let this = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            domain: Arc::clone(domain),
            pd,
            config,
            counters: Arc::default(),
            driver,
            driver_turn: Arc::default(),
            owner: forks::Owner::this_process(),
            begin: Instant::now(),
            listening: OnceLock::new(),
            context: OnceLock::new(),
            state: biased_lock::Mutex::new(None),
            cq_sources: Mutex::default(),
            parked: ParkedIds::default(),
            driver_requests: Mutex::default(),
            peer_counts: Mutex::default(),
            #[cfg(test)]
            no_rings: false.into(),
            #[cfg(test)]
            panics: false.into(),
            #[cfg(test)]
            missing_descriptors: 0.into(),
        });
        let mut all = ALL.get().lock();
        all.retain(|shared| shared.strong_count() != 0);
        all.push(this.weak());
        drop(all);
        Ok(this)
    }

    pub(super) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// The state; `None` in the mutex: the endpoint is not enabled, or closed.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<State>> {
        Self::post_delayed_first(self.state.lock())
    }

    /// As [`Self::lock`], for an RMA operation: requests that were delayed for it stay delayed.
    #[inline]
    pub(super) fn lock_for_rma(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock()
    }

    /// As [`Self::lock`], if no other thread has it.
    #[inline(always)]
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Option<State>>> {
        self.state.try_lock().map(Self::post_delayed_first)
    }

    /// Posts the requests that were delayed for further RMA operations (`FI_MORE`).
    #[inline]
    fn post_delayed_first(
        mut guard: MutexGuard<'_, Option<State>>,
    ) -> MutexGuard<'_, Option<State>> {
        if let Some(state) = guard.as_mut()
            && state.io.rma.delayed.is_some()
        {
            state.io.post_delayed();
        }
        guard
    }

    /// What follows from a message that was announced
    /// ([`Executor::announce`](super::executor::Executor::announce)).
    #[inline(always)]
    pub(super) fn follow_announcement(&self, state: &mut State) {
        // something is to be done if its link has ended
        if !state.io.todo.is_empty() || self.may_wake(state) {
            self.run_todo_and_wake(state);
        }
    }

    #[inline(never)]
    fn run_todo_and_wake(&self, state: &mut State) {
        state.run_todo();
        self.wake_driver_and_readers(state);
    }

    /// Makes progress if `tx_size` operations are under way, which may complete one of them.
    ///
    /// # Errors
    /// `EAGAIN`: none has completed. `EOPBADSTATE`: not enabled, or closed. Those of the poll.
    #[inline]
    pub(super) fn reserve_tx<'a>(
        &self,
        mut guard: MutexGuard<'a, Option<State>>,
    ) -> Result<MutexGuard<'a, Option<State>>> {
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        if state.io.outstanding() < self.config.tx_size {
            return Ok(guard);
        }
        state.io.post_delayed();
        let polled = state.poll();
        self.wake_driver_and_readers(state);
        polled?;
        if state.io.outstanding() < self.config.tx_size {
            return Ok(guard);
        }
        drop(guard);
        self.domain.queues().help_from_poll();
        Err(FiErrno::EAGAIN)
    }

    /// Ends a call that posts. One that is refused because no packet is free makes progress, which
    /// frees packets.
    pub(super) fn end_post(
        &self,
        mut guard: MutexGuard<'_, Option<State>>,
        posted: Result<()>,
    ) -> Result<()> {
        let Some(state) = guard.as_mut() else {
            return posted;
        };
        if posted != Err(FiErrno::EAGAIN) {
            self.wake_driver_and_readers(state);
            return posted;
        }
        let polled = state.poll();
        self.wake_driver_and_readers(state);
        drop(guard);
        self.domain.queues().help_from_poll();
        polled?;
        posted
    }

    /// Whether [`Self::wake_driver_and_readers`] has something to do.
    #[inline(always)]
    pub(super) fn may_wake(&self, state: &State) -> bool {
        let io = &state.io;
        let driver = !io.steps.is_empty() || state.core.is_retimed() || io.rma.has_work();
        driver || io.posts_again() || state.sleepers || self.context.get().is_some()
    }

    /// The addresses from which and to which a peer is dialled.
    pub(super) fn path(&self, to: SocketAddr) -> (Option<SocketAddr>, SocketAddr) {
        let listening = self.listening.get();
        listening.map_or((None, to), |listening| listening.path(to))
    }

    /// Whether the calling process has opened the endpoint. A forked child has copies of the
    /// descriptors and of the memory, but none of the threads.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.owner.is_this_process()
    }

    /// The parameters of the endpoint's connections.
    pub(super) fn tuning(&self) -> Tuning {
        let class = self.config.traffic_class;
        self.domain.tuning().with_class(class)
    }

    /// Nanoseconds since time 0 of the core.
    pub(super) fn now(&self) -> u64 {
        // 2^64 ns are 584 years
        self.begin.elapsed().as_nanos() as u64
    }

    /// Changes the state by an event: not on the fast path.
    pub(super) fn apply_event(&self, event: impl FnOnce(&mut Core<Executor>, &mut Executor)) {
        let mut guard = self.lock();
        if let Some(state) = guard.as_mut().filter(|state| !state.has_panicked()) {
            state.core.set_now(self.now());
            event(&mut state.core, &mut state.io);
            state.run_todo();
            state.post_receives();
            self.wake_driver_and_readers(state);
        }
    }

    /// Follows a change of the state: wakes the driver if it has steps to execute, and the threads
    /// that wait for completions.
    #[inline]
    pub(super) fn wake_driver_and_readers(&self, state: &mut State) {
        // the driver posts operations that wait
        let waits = state.io.rma.has_work() && !std::mem::replace(&mut state.io.rma.called, true);
        // without a further operation the driver posts what was delayed
        let delayed = state.io.rma.delayed.is_some() && state.delay_watch.begins();
        let again = state.io.posts_again();
        let due =
            !state.io.steps.is_empty() || state.core.is_retimed() || waits || delayed || again;
        if due && !state.woken {
            state.woken = true;
            self.driver.wake(&self.driver_turn);
        }
        self.wake_readers(state);
        self.update_context(state);
    }

    /// Follows a change of the state at the shared receive context.
    #[inline]
    fn update_context(&self, state: &mut State) {
        if let Some(context) = self.context.get() {
            let mut kept = state.kept_receives;
            context.follow(&mut kept, state);
            state.kept_receives = kept;
            if std::mem::take(&mut state.io.found_for_others) {
                context.call_others();
            }
        }
    }

    /// Wakes the threads that sleep on a completion queue for which there is an entry.
    #[inline]
    pub(super) fn wake_readers(&self, state: &mut State) {
        if state.sleepers && (!state.io.completions.is_empty() || state.failed.is_some()) {
            self.wake_sources(state);
        }
    }

    /// Whether links have rings, if the device has them.
    pub(super) fn uses_rings(&self) -> bool {
        #[cfg(test)]
        if self.no_rings.load(std::sync::atomic::Ordering::Relaxed) {
            return false;
        }
        true
    }

    /// Whether the endpoint posts RMA, or peers access its regions.
    pub(super) fn has_rma(&self) -> bool {
        self.config.rma || self.config.target
    }

    /// Requests of the send queue of a link, or of its circuit.
    pub(super) fn depth(&self) -> usize {
        if self.config.xrc {
            // a circuit has at least one
            CIRCUIT_DEPTH + if self.has_rma() { CIRCUIT_RMA } else { 0 }
        } else if self.has_rma() {
            DEPTH + RMA_REQUESTS
        } else {
            DEPTH
        }
    }

    /// Binds a counter, with its kinds checked (`fi_ep_bind(3)`). The caller has the lock of the
    /// endpoint's control state.
    ///
    /// # Errors
    /// - `EINVAL`: a kind has a counter already.
    /// - `EOPBADSTATE`: a kind is one of the peers' operations, and a link that was begun without a
    ///   cell has not ended.
    /// - `EMFILE`, `ENOMEM`: resources of the process.
    pub(super) fn bind_counter(&self, counter: &Arc<Counter>, kinds: Flags) -> Result<()> {
        let peer_counts = self.peer_counts.lock();
        let events = Event::of(kinds);
        if events.clone().next().is_some() && peer_counts.has_uncounted_link() {
            return Err(FiErrno::EOPBADSTATE);
        }
        // only these kinds make the counter watch the queues
        if counter.waits() && kinds.intersects(Counters::KINDS) {
            // the lock of the control state keeps the list
            let sources = self.cq_sources.lock().clone();
            sources
                .iter()
                .try_for_each(|source| source.make_wakeable())?;
        }
        self.counters.bind(counter, kinds)?;
        if let Some(cell) = &peer_counts.cell {
            events.for_each(|event| counter.follow(Watch::new(cell, event)));
        }
        Ok(())
    }

    /// The event cell of a new link, `None` without counters of the peers' operations; then also
    /// what the block of the link keeps.
    fn event_cell(&self, directory: &Directory) -> Result<(Option<Arc<Cell>>, Option<Uncounted>)> {
        let mut peer_counts = self.peer_counts.lock();
        if peer_counts.cell.is_none() {
            let mut counters = self.counters.remote().peekable();
            if counters.peek().is_some() {
                let cell = directory.event_cell()?;
                counters.for_each(|(event, counter)| counter.follow(Watch::new(&cell, event)));
                peer_counts.cell = Some(cell);
            }
        }
        let PeerCounts { cell, uncounted } = &*peer_counts;
        let uncounted = cell.is_none().then(|| Arc::clone(uncounted));
        Ok((cell.clone(), uncounted))
    }

    /// The connection block of a link. `qp`: that of the link, which has none on a circuit.
    /// Acquires the lock of the key directory, and registers memory.
    pub(super) fn create_block(
        &self,
        link: LinkKey,
        qp: Option<&Arc<Qp>>,
    ) -> Result<Option<LinkBlock>> {
        if !self.has_rma() {
            return Ok(None);
        }
        let directory = self.domain.mr().directory(&self.pd)?;
        let (cell, uncounted) = self.event_cell(&directory)?;
        let block = directory.block(cell)?;
        let block = LinkBlock::new(self.weak(), link, qp, block, uncounted);
        Ok(Some(block))
    }

    /// Adds the last operations of the peers, whose links have ended, to the counters, which keep
    /// the event cell no longer.
    pub(super) fn leave_cell(&self) {
        let peer_counts = self.peer_counts.lock();
        let Some(cell) = &peer_counts.cell else {
            return;
        };
        for (_, counter) in self.counters.remote() {
            counter.leave(cell);
        }
    }

    /// The connection block of a link.
    pub(super) fn block_of(&self, link: LinkKey) -> (RemoteAddr, Rkey) {
        let mut guard = self.lock();
        let links = guard.as_mut().map(|state| &mut state.io.links);
        let block = links.and_then(|links| links.get_mut(link)?.block.as_ref());
        block.map_or((RemoteAddr::NULL, Rkey::default()), LinkBlock::block)
    }

    /// Creates the queue pair of a link.
    pub(super) fn create_qp(&self, id: &Arc<CmId>) -> Result<Qp> {
        let (cq, srq, entries) = {
            let guard = self.lock();
            let state = guard.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
            let objects = &state.io.objects;
            let requests = (state.io.links.len() + 1) * self.depth();
            let entries = requests + state.io.max_receives();
            (Arc::clone(&objects.cq), Arc::clone(&objects.srq), entries)
        };
        self.make_entries(&cq, entries)?;
        let transport = Transport::Rc {
            send_cq: &cq,
            recv_cq: &cq,
            srq: Some(&srq),
        };
        Qp::create(id, &self.pd, transport, &self.qp_config())
    }

    /// The sizes of the queue pair of a link or a circuit, whose receives are in shared queues.
    pub(in crate::rdm) fn qp_config(&self) -> QpConfig {
        QpConfig {
            max_send_wr: self.depth(),
            max_recv_wr: 0,
            max_send_sge: if self.config.rma { MAX_IOV } else { 1 },
            max_recv_sge: 0,
            max_inline: self.domain.device().max_inline(),
            flush: self.config.durable,
        }
    }

    /// Makes room in the device completion queue for so many requests and receives. Called by the
    /// driver alone, without the endpoint's lock: the device can need a system call for it.
    fn make_entries(&self, cq: &Cq, needed: usize) -> Result<()> {
        if needed > cq.cqe() {
            let most = self.domain.device().attr().max_cqe;
            cq.resize(needed.next_power_of_two().min(most).max(needed))?;
        }
        Ok(())
    }

    /// Sets the queue pair of a link and its block. `false`: the link has ended, or is being
    /// ended.
    pub(super) fn set_qp(
        &self,
        link: LinkKey,
        qp: &Arc<Qp>,
        ring: Option<LinkRing>,
        block: &mut Option<LinkBlock>,
    ) -> bool {
        let mut guard = self.lock();
        guard
            .as_mut()
            .is_some_and(|state| state.io.links.set_qp(link, qp, ring, block))
    }

    /// The queue pair of a link can send. Returns the queue pair.
    pub(super) fn mark_connected(&self, link: LinkKey) -> Option<Arc<Qp>> {
        let mut guard = self.lock();
        let record = guard.as_mut()?.io.links.get_mut(link)?;
        record.connected = true;
        record.qp.clone()
    }

    /// The reply to the request of a link was sent. Called by the driver, which examines the times
    /// after its steps.
    pub(super) fn accepted(&self, link: LinkKey) {
        if let Some(state) = self.lock().as_mut() {
            state.core.set_now(self.now());
            state.core.accepted(link);
        }
    }

    /// The connection of a link.
    pub(super) fn cm_of(&self, link: LinkKey) -> Option<Arc<LinkCm>> {
        let mut guard = self.lock();
        guard.as_mut()?.io.links.get_mut(link)?.cm.clone()
    }

    /// The queue pair of a link is in its error state.
    pub(super) fn begin_drain(&self, link: LinkKey) {
        if let Some(state) = self.lock().as_mut() {
            state.io.links.begin_drain(link);
        }
        self.driver.wake(&self.driver_turn);
    }

    /// The queue pair of a link consumes no receive any more: it is in its error state.
    pub(super) fn last_receive(&self, link: LinkKey) {
        self.apply_event(|core, io| {
            io.links.last_receive(link);
            core.broken(link, io);
        });
        self.driver.wake(&self.driver_turn);
    }

    /// All endpoints that this process has opened.
    pub(super) fn all() -> Vec<Arc<Self>> {
        // in a child whose fork was not counted (`forks`) the lock may be held for ever
        let Some(all) = ALL.get().try_lock() else {
            return Vec::new();
        };
        let open = all.iter().filter_map(Weak::upgrade);
        open.filter(|shared| shared.is_of_this_process()).collect()
    }

    /// A connection request has arrived; `sidr`: a request for a link on a circuit.
    fn requested(&self, request: ConnectRequest, sidr: bool) {
        let private_data = *request.private_data();
        self.apply_event(|core, io| match (sidr, &io.xrc) {
            (true, _) => io.link_requested(core, request),
            (false, Some(_)) => io.circuit_requested(request),
            (false, None) => {
                core.requested(Held::Connect(request), private_data.bytes(), io);
            }
        });
    }
}

impl State {
    pub(super) fn new(core: Core<Executor>, io: Executor) -> Self {
        let mut this = Self {
            core,
            io,
            peers: Vec::new(),
            source_addresses: Vec::new(),
            progress_calls: 0,
            progress_calls_seen: 0,
            polled_at: 0,
            sends_polled: false,
            failed: None,
            kept_receives: 0,
            enomem_logged: false,
            sleepers: false,
            device_turn: 0,
            step: 0,
            quiet: 0,
            pace: Pace::new(),
            next_hot: 0,
            behind: None,
            looked: 0,
            polls: 0,
            #[cfg(test)]
            drives: 0,
            #[cfg(test)]
            busy: false,
            woken: false,
            delay_watch: driven::DelayWatch::Off,
        };
        this.set_step();
        this
    }

    /// Number of receives whose places the context counts.
    pub(super) fn kept_receives(&self) -> usize {
        self.kept_receives
    }

    /// The device queue in which all requests complete.
    pub(super) fn device_queue(&self) -> Arc<Cq> {
        Arc::clone(&self.io.objects.cq)
    }

    /// Does what follows from calls of the core.
    #[inline]
    pub(super) fn run_todo(&mut self) {
        while let Some(todo) = self.io.todo.pop_front() {
            self.perform(todo);
        }
    }

    /// Reports credit that a call has freed behind the last poll, or without one: no further call
    /// of the application may follow. An endpoint that has failed posts nothing: a panic may have
    /// left its state in the middle of a change.
    #[cold]
    #[inline(never)]
    pub(super) fn report(&mut self) {
        if self.failed.is_some() {
            return;
        }
        self.core.flush(&mut self.io);
        self.run_todo();
    }

    fn perform(&mut self, todo: Todo) {
        let (core, io) = (&mut self.core, &mut self.io);
        match todo {
            Todo::GiveBack(origin, credit) => core.give_back(origin, credit),
            Todo::Send(peer, send) => {
                let open = io.is_part_of_open_message(send.op);
                if !open || core.send(peer, send, io).is_err() {
                    io.refused(send.op);
                }
            }
            Todo::AnswerWithCredit(origin, send) => {
                if !core.is_current(origin) || core.send(origin.peer, send, io).is_err() {
                    io.refused(send.op);
                }
            }
            Todo::Answer(origin, op) => {
                if core.answer(origin, op, io).is_err() {
                    io.answer_failed(op);
                }
            }
            Todo::Begin(origin, key) => {
                if core.is_current(origin) {
                    core.hold(origin.peer, io);
                } else {
                    io.fail_arrival(key, false);
                }
            }
            Todo::Choose(origin, key, link) => io.choose(origin, key, link),
            Todo::Release(peer) => core.release(peer, io),
            Todo::LoopBack(op) => io.loop_back(op),
            Todo::EndOrRepeatRma(op) => io.end_or_repeat_rma(core, op),
            Todo::DecideRma(peer) => io.decide_all_rma(core, peer),
            Todo::RunRma => io.run_rma(core),
            Todo::RunOwnSends => io.run_own_sends(),
            Todo::Pull(peer) => {
                if let Some(link) = core.open_link(peer) {
                    io.pull(peer, link);
                }
            }
            Todo::Violated(link) => core.content_violated(link, io),
            Todo::Dropped(origin) => core.dropped(origin, io),
            Todo::Room(link) => core.has_room(link, io),
            Todo::NoMemory(link) => core.no_memory(link, io),
            Todo::Broken(link) => io.broken(core, link),
            Todo::Attach(link) => io.attach(core, link),
            Todo::Silenced(link) => core.silenced(link, io),
            Todo::CircuitNotDialled(circuit) => {
                io.circuit_not_dialled(core, circuit, Failure::Silent, None);
            }
            Todo::NotDialled(link) => io.not_dialled(core, link, Failure::Silent),
        }
    }

    /// The number of receives that the peers may use.
    #[inline]
    pub(super) fn receives_needed(&self) -> usize {
        self.core.receives_needed(self.io.messages())
    }

    /// Posts as many receives as the peers may use.
    #[inline]
    pub(super) fn post_receives(&mut self) {
        let needed = self.receives_needed();
        if let Err(error) = self.io.post_receives(needed)
            && !std::mem::replace(&mut self.enomem_logged, true)
        {
            warn_log!(EpData, "no memory for packets of further peers: {error}");
        }
    }

    /// Processes work completions, at most [`POLLS`] times [`BATCH`], and those of READs that the
    /// device has executed in their post. Returns whether the device queue was empty at the end,
    /// apart from completions of further such READs (`Executor::reads_wait`).
    ///
    /// # Errors
    /// Why the endpoint has failed ([`Self::failed`]). `EOVERRUN`: the device has lost completions.
    #[inline]
    pub(super) fn poll(&mut self) -> Result<bool> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let mut buffer = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        let mut empty = false;
        let mut polled = 0;
        (self.io.bytes_read, self.io.reads_wait) = (0, false);
        self.io.bytes_copied = 0;
        for round in 0..POLLS {
            let Ok(wcs) = self.io.objects.cq.poll(&mut buffer, BATCH) else {
                self.fail(FiErrno::EOVERRUN);
                return Err(FiErrno::EOVERRUN);
            };
            let before = self.io.bytes_read;
            self.quiet = match wcs.is_empty() {
                true => self.quiet.saturating_add(1),
                false => 0,
            };
            let found_none = u32::from(wcs.is_empty());
            self.io.empty_polls = self.io.empty_polls.wrapping_add(found_none);
            for wc in wcs {
                self.io.completed(&mut self.core, wc);
                self.run_todo();
            }
            self.sends_polled = true;
            let all = self.poll_rings();
            self.sends_polled = false;
            self.set_step();
            let reads = self.io.bytes_read != before;
            self.io.reads_wait = reads;
            polled += wcs.len();
            self.io.polled.note(wcs.len(), wcs.len() < BATCH);
            empty = wcs.len() < BATCH && all;
            let quiet = !self.core.has_reports() && !self.io.rma.has_work();
            if round == 0 && wcs.is_empty() && empty && !reads && quiet {
                // nothing is to be reported
                self.post_receives();
                return Ok(true);
            }
            let pause = !self.io.completions.is_empty() || self.io.bytes_read >= READ_BYTES;
            if empty && !reads || reads && pause {
                break;
            }
        }
        if empty {
            self.io.backlog = 0;
        } else if polled != 0 {
            self.io.is_behind(polled);
        }
        if self.io.rma.has_work() {
            self.io.run_rma(&mut self.core);
            // once in a call, however often RMA is run for it
            self.io.run_own_messages();
            self.run_todo();
        }
        self.core.flush(&mut self.io);
        self.run_todo();
        self.post_receives();
        Ok(empty)
    }

    /// Polls until the device queue is empty or [`READ_BYTES`] were read, at most [`ROUNDS`] times.
    /// Returns whether it is empty; a failed queue is.
    fn poll_all(&mut self) -> bool {
        for _ in 0..ROUNDS {
            if !matches!(self.poll(), Ok(false)) {
                #[cfg(test)]
                if self.busy {
                    return false;
                }
                return true;
            }
            if self.io.bytes_read >= READ_BYTES {
                return false;
            }
        }
        false
    }

    /// Polls until the device queue and the rings are empty or [`READ_BYTES`] were read for long
    /// messages, at most [`SEARCH_ROUNDS`] times: a search must find a message that has arrived.
    /// The queue is empty when a poll has found nothing: `soft0` may return fewer completions than
    /// it has.
    ///
    /// # Errors
    /// As [`Self::poll`].
    pub(super) fn poll_before_search(&mut self) -> Result<()> {
        let mut read = 0;
        for _ in 0..SEARCH_ROUNDS {
            let before = self.io.empty_polls;
            let empty = self.poll()? && self.io.empty_polls != before;
            read += self.io.bytes_read + self.io.bytes_copied;
            if empty || read >= READ_BYTES {
                break;
            }
        }
        Ok(())
    }

    /// The peer of an address, if a call has used it before.
    #[inline(always)]
    pub(super) fn known_peer(&self, addr: FiAddr) -> Option<PeerKey> {
        *self.peers.get(usize::try_from(addr.0).ok()?)?
    }

    /// The peer of an address.
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the address vector. `ENOMEM`.
    #[inline]
    pub(super) fn peer_of(&mut self, addr: FiAddr) -> Result<PeerKey> {
        let known = usize::try_from(addr.0)
            .ok()
            .and_then(|at| self.peers.get(at));
        match known {
            Some(Some(peer)) => Ok(*peer),
            _ => self.find_peer(addr),
        }
    }

    #[cold]
    fn find_peer(&mut self, addr: FiAddr) -> Result<PeerKey> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let (vector, _) = self.io.vector.as_ref().ok_or(FiErrno::EINVAL)?;
        let address = vector.lookup(addr)?;
        let listener = Listener::new(address.ip(), address.port()).ok_or(FiErrno::EINVAL)?;
        let peer = self.core.peer_at(listener)?;
        if self.core.is_itself(peer) {
            self.core.unite_own(peer, &mut self.io);
        }
        // the vector has assigned the index, so there are as many addresses
        let at = addr.0 as usize;
        if self.peers.len() <= at {
            self.peers.resize(at + 1, None);
        }
        self.core.keep(peer);
        self.peers[at] = Some(peer);
        if self.core.is_doubtful(peer) {
            self.core.flush(&mut self.io);
        }
        Ok(peer)
    }
}

impl VectorUser for Shared {
    fn removed(&self, addr: FiAddr) {
        if let Some(state) = self.lock().as_mut()
            && let Some(place) = state.peers.get_mut(addr.0 as usize)
            && let Some(peer) = place.take()
        {
            state.core.set_now(self.now());
            state.core.unkeep(peer);
            self.wake_driver_and_readers(state);
        }
    }

    fn inserted(&self) {
        if let Some(context) = self.context.get() {
            context.addresses_inserted();
        }
    }
}
