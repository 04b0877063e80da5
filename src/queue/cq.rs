//! Completion queues.
//!
//! Completions go from the device straight into the application's buffer. Only what is found
//! when nobody reads waits in a backlog: by a `trywait` that looks, by a post that makes room, by
//! the end of a connection. Errors wait there too, and whatever came after them.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rdma_core_sys as sys;

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::log::{info_log, warn_log};
use crate::queue::shared::{SharedId, SharedSlots};
use crate::queue::slots::{Own, Rings, Slot};
use crate::queue::wait::{WaitSet, deadline};
use crate::queue::{Completion, CompletionError, EntryWriter, WaitKind};
use crate::verbs::{AsyncEvent, AsyncListener, CompChannel, Cq, Wc};

/// Completions of a queue that wasn't asked for a size.
const DEFAULT_SIZE: usize = 1024;
/// Every so many reads in vain the time is looked at, for silent peers.
const VAIN_READS: u32 = 32;
/// Completions polled from the device at a time.
const BATCH: usize = 16;

/// What to open a completion queue with.
#[derive(Clone, Copy, Debug, Default)]
pub struct CqConfig {
    /// Completions that it must hold; 0 for the default of 1024. It grows as endpoints are bound,
    /// so that it never overruns.
    pub size: usize,
    /// How it can be waited on.
    pub wait: WaitKind,
    /// The completion vector (`FI_AFFINITY`), taken modulo those of the device.
    pub signaling_vector: u32,
}

/// A completion queue. Thread safe.
#[derive(Debug)]
pub struct CompletionQueue {
    domain: Arc<Domain>,
    cq: Arc<Cq>,
    /// Of this queue alone; none where it can't be waited on.
    channel: Option<Arc<CompChannel>>,
    kind: WaitKind,
    wait: Option<WaitSet>,
    signaled: AtomicBool,
    overrun: AtomicBool,
    size: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
enum Entry {
    Done(Completion),
    Failed(CompletionError),
}

#[derive(Debug, Default)]
struct Inner {
    backlog: VecDeque<Entry>,
    endpoints: Vec<Attachment>,
    /// Shared receive contexts whose receives may complete here, by their index.
    shared: Vec<Option<Sharer>>,
    /// Queue pairs that take receives of those, in order of their numbers, with their places.
    sharing: Vec<(u32, u16)>,
    /// Completions that the bound endpoints may have under way.
    reserved: usize,
    /// Reads in vain, wrapping.
    vain: u32,
    /// Whether an endpoint has something to go on with, after what was polled.
    resumable: Cell<bool>,
}

/// An endpoint's place in the table that `wr_id` refers to.
#[derive(Debug, Default)]
struct Attachment {
    generation: u16,
    rings: Option<Arc<Rings>>,
    /// Whether receives of a shared context complete visibly only where they were selected.
    selective: bool,
}

/// A shared receive context, as a queue sees it.
#[derive(Debug)]
struct Sharer {
    slots: Arc<SharedSlots>,
    /// Endpoints of this queue that take its receives.
    users: usize,
}

impl Attachment {
    /// A completion of another generation: the probe's, or of an endpoint that has gone.
    #[cold]
    fn stray(&self, id: WrId, wc: &Wc) {
        if id.generation() == self.generation | WrId::PROBE
            && let Some(rings) = &self.rings
        {
            let success = wc.status() == sys::IBV_WC_SUCCESS;
            match Own::of(id.0 as u32) {
                None => rings.probe_done(success),
                Some(own) => {
                    rings.own.end(own, success);
                    if !success {
                        rings.tell_failure();
                    }
                }
            }
        }
    }
}

/// `wr_id`: the direction, the endpoint's place in the queue's table, whether it is a probe, that
/// place's generation, the request's number. A completion that a device keeps after its queue pair
/// is gone is recognized by the generation; a probe by a generation that no place has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrId(u64);

impl WrId {
    const RECV: u64 = 1 << 63;
    /// Of the 15 bits that [`Self::generation`] gives, the one that is in no place's generation.
    const PROBE: u16 = 1 << 14;
    const GENERATIONS: u16 = Self::PROBE - 1;

    fn base(index: u16, generation: u16) -> Self {
        Self(u64::from(index) << 47 | u64::from(generation & Self::GENERATIONS) << 32)
    }

    /// The id of the probe.
    pub(crate) fn probe(self) -> u64 {
        self.0 | u64::from(Self::PROBE) << 32
    }

    /// The id of a request of the engine's own.
    pub(crate) fn own(self, own: Own) -> u64 {
        self.probe() | own as u64
    }

    /// The id of the send of this number.
    #[inline]
    pub(crate) fn send(self, number: u32) -> u64 {
        self.0 | u64::from(number)
    }

    /// The id of the receive of this number.
    #[inline]
    pub(crate) fn recv(self, number: u32) -> u64 {
        self.0 | Self::RECV | u64::from(number)
    }

    /// The id of the receive of this number of a shared context: that of no probe, which is sent, and of
    /// no place's generation.
    #[inline]
    pub(crate) fn shared(id: SharedId, number: u32) -> u64 {
        Self::base(id.index, id.generation).probe() | Self::RECV | u64::from(number)
    }

    fn is_shared(self) -> bool {
        self.0 & Self::RECV != 0 && self.generation() & Self::PROBE != 0
    }

    #[inline]
    fn index(self) -> usize {
        (self.0 >> 47) as usize & 0xffff
    }

    #[inline]
    fn generation(self) -> u16 {
        (self.0 >> 32) as u16 & 0x7fff
    }
}

/// The reason of a failure in libfabric's terms.
fn status_errno(status: u32, recv: bool) -> FiErrno {
    match status {
        sys::IBV_WC_LOC_LEN_ERR if recv => FiErrno::ETRUNC,
        sys::IBV_WC_LOC_LEN_ERR => FiErrno::EMSGSIZE,
        sys::IBV_WC_LOC_QP_OP_ERR => FiErrno::EINVAL,
        sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_ACCESS_ERR | sys::IBV_WC_MW_BIND_ERR => {
            FiErrno::EACCES
        }
        sys::IBV_WC_WR_FLUSH_ERR => FiErrno::ECANCELED,
        sys::IBV_WC_REM_ACCESS_ERR => FiErrno::EKEYREJECTED,
        sys::IBV_WC_REM_INV_REQ_ERR | sys::IBV_WC_REM_OP_ERR => FiErrno::EREMOTEIO,
        sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RESP_TIMEOUT_ERR => FiErrno::ETIMEDOUT,
        sys::IBV_WC_RNR_RETRY_EXC_ERR => FiErrno::ENORX,
        _ => FiErrno::EIO,
    }
}

fn failure(slot: &Slot, status: u32, vendor_err: u32) -> Entry {
    Entry::Failed(CompletionError {
        completion: Completion {
            context: slot.context,
            flags: slot.flags,
            len: 0,
            buf: 0,
            data: 0,
            tag: 0,
        },
        olen: 0,
        err: status_errno(status, slot.flags.contains(Flags::RECV)),
        prov_errno: status as i32,
        vendor_err,
    })
}

impl Completion {
    /// What a receive's work completion says.
    #[inline]
    fn received(&mut self, wc: &Wc) {
        self.len = wc.byte_len();
        if wc.is_recv_rdma() {
            self.flags = Flags::RMA | Flags::REMOTE_WRITE;
        }
        if let Some(imm) = wc.imm() {
            self.flags |= Flags::REMOTE_CQ_DATA;
            self.data = imm.into();
        }
    }
}

/// An operation that was refused here, for what the device would have refused it for.
#[cold]
fn refusal(slot: &Slot, error: FiErrno) -> Entry {
    let mut entry = failure(slot, sys::IBV_WC_REM_ACCESS_ERR, 0);
    if let Entry::Failed(failed) = &mut entry {
        failed.err = error;
    }
    entry
}

impl Inner {
    /// What a work completion means to the application; `None` if it means nothing.
    #[inline(always)]
    fn digest(&self, wc: &Wc) -> Option<Entry> {
        let id = WrId(wc.wr_id());
        let place = match self.endpoints.get(id.index()) {
            Some(place) if place.generation == id.generation() => place,
            _ if id.is_shared() => return self.digest_shared(id, wc),
            Some(place) => {
                place.stray(id, wc);
                if place.rings.as_ref().is_some_and(|rings| rings.is_waiting()) {
                    self.resumable.set(true);
                }
                return None;
            }
            None => return None,
        };
        let rings = place.rings.as_ref()?;
        if rings.is_waiting() {
            self.resumable.set(true);
        }
        let recv = id.0 & WrId::RECV != 0;
        let ring = if recv { &rings.rx } else { &rings.tx };
        // the low half is the number
        let slot = ring.complete(id.0 as u32)?;
        if let Some(counters) = rings.counters()
            && !slot.part
        {
            let success = wc.status() == sys::IBV_WC_SUCCESS && slot.refused.is_none();
            // a receive that a write consumed got no message
            if !(success && recv && wc.is_recv_rdma()) {
                counters.count(slot.flags, success);
            }
        }
        if wc.status() != sys::IBV_WC_SUCCESS {
            rings.tell_failure();
            let reported = if recv {
                slot.visible || slot.reports_failure
            } else {
                rings.reports_failure(&slot)
            };
            return reported.then(|| failure(&slot, wc.status(), wc.vendor_err()));
        }
        if let Some(error) = slot.refused {
            return Some(refusal(&slot, error));
        }
        if !slot.visible {
            return None;
        }
        let mut completion = Completion {
            context: slot.context,
            flags: slot.flags,
            len: 0,
            buf: 0,
            data: 0,
            tag: 0,
        };
        if recv {
            completion.received(wc);
        }
        Some(Entry::Done(completion))
    }

    /// As [`Self::digest`], where it is not worth a copy of its own.
    #[cold]
    fn digest_late(&self, wc: &Wc) -> Option<Entry> {
        self.digest(wc)
    }

    /// The same for a receive of a shared context.
    #[inline(never)]
    fn digest_shared(&self, id: WrId, wc: &Wc) -> Option<Entry> {
        let sharer = self.shared.get(id.index())?.as_ref()?;
        // the context's generation has more bits than go over the device and back
        if (sharer.slots.id().generation & WrId::GENERATIONS) | WrId::PROBE != id.generation() {
            return None;
        }
        // the low half is the number
        let recv = sharer.slots.complete(id.0 as u32)?;
        let number = wc.qp_num();
        let known = self.sharing.binary_search_by_key(&number, |entry| entry.0);
        let place = known
            .ok()
            .and_then(|at| self.sharing.get(at))
            .and_then(|entry| self.endpoints.get(usize::from(entry.1)));
        let rings = place.and_then(|place| place.rings.as_ref());
        let success = wc.status() == sys::IBV_WC_SUCCESS;
        let slot = Slot {
            context: recv.context,
            flags: Flags::RECV.union(Flags::MSG),
            ..Slot::default()
        };
        if let Some(rings) = rings {
            rings.shared_done();
            if let Some(counters) = rings.counters()
                && !(success && wc.is_recv_rdma())
            {
                counters.count(slot.flags, success);
            }
        }
        if !success {
            if let Some(rings) = rings {
                rings.tell_failure();
            }
            return Some(failure(&slot, wc.status(), wc.vendor_err()));
        }
        if place.is_some_and(|place| place.selective) && !recv.selected {
            return None;
        }
        let mut completion = Completion {
            context: slot.context,
            flags: slot.flags,
            len: 0,
            buf: 0,
            data: 0,
            tag: 0,
        };
        completion.received(wc);
        Some(Entry::Done(completion))
    }
}

impl CompletionQueue {
    /// Opens a completion queue.
    ///
    /// # Errors
    /// - `EINVAL`: more completions than the device allows.
    /// - `ENOMEM`, `EMFILE`: resources of the device or the process.
    pub fn open(domain: &Arc<Domain>, config: CqConfig) -> Result<Arc<Self>> {
        let device = domain.device();
        let size = match config.size {
            0 => DEFAULT_SIZE.min(device.attr().max_cqe),
            size => size,
        };
        let mut channel = None;
        let mut wait = None;
        if config.wait != WaitKind::None {
            let set = WaitSet::new()?;
            let new = Arc::new(CompChannel::create(device)?);
            set.add(new.fd())?;
            if let Some(keepalive) = domain.keepalive() {
                set.add(keepalive.fd())?;
            }
            channel = Some(new);
            wait = Some(set);
        }
        let cq = Cq::create(device, size, channel.clone(), config.signaling_vector)?;
        let this = Arc::new(Self {
            domain: Arc::clone(domain),
            cq: Arc::new(cq),
            channel,
            kind: config.wait,
            wait,
            signaled: AtomicBool::new(false),
            overrun: AtomicBool::new(false),
            size,
            inner: Mutex::default(),
        });
        let listener: Weak<dyn AsyncListener> = Arc::downgrade(&this) as _;
        device.listen(this.cq.object(), listener);
        Ok(this)
    }

    /// Reads up to `max` completions into `writer`; returns how many, at least 1. Never blocks.
    ///
    /// # Errors
    /// - `EAGAIN`: there are none.
    /// - `EAVAIL`: the next one is an error: [`Self::read_error`] has it.
    /// - `EOVERRUN`: the device lost completions; the queue is of no use any more.
    #[inline]
    pub fn read<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        let mut inner = self.inner.lock();
        let mut count = 0;
        if max == 0 {
            // a way to ask for progress
            self.progress_locked(&mut inner)?;
            return Err(FiErrno::EAGAIN);
        }
        if !inner.backlog.is_empty() {
            while count < max
                && let Some(Entry::Done(completion)) = inner.backlog.front()
            {
                writer.write(completion);
                inner.backlog.pop_front();
                count += 1;
            }
        }
        if inner.backlog.is_empty() {
            count += self.poll(&mut inner, max - count, writer)?;
        }
        if inner.resumable.get() {
            inner = self.resume(inner);
        }
        if count > 0 {
            Ok(count)
        } else if inner.backlog.is_empty() {
            inner.vain = inner.vain.wrapping_add(1);
            if inner.vain.is_multiple_of(VAIN_READS) {
                drop(inner);
                self.keep_alive();
            }
            Err(FiErrno::EAGAIN)
        } else {
            Err(FiErrno::EAVAIL)
        }
    }

    /// Lets endpoints go on with what waits. Gives the lock back and takes it again.
    #[cold]
    fn resume<'a>(&'a self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        inner.resumable.set(false);
        let places = inner.endpoints.iter();
        let waiting: Vec<_> = places
            .filter_map(|place| place.rings.as_ref().filter(|rings| rings.is_waiting()))
            .cloned()
            .collect();
        drop(inner);
        for owner in waiting
            .iter()
            .filter_map(|rings| rings.owner.get()?.upgrade())
        {
            owner.resume();
        }
        self.inner.lock()
    }

    /// Who reads without sleeping looks after silent peers now and then. No lock may be held.
    #[cold]
    fn keep_alive(&self) {
        if let Some(keepalive) = self.domain.keepalive() {
            keepalive.poll();
        }
    }

    /// Polls the device for up to `max` completions. An error, and what came after it in the same
    /// batch, goes to the backlog.
    #[inline]
    fn poll<W: EntryWriter>(&self, inner: &mut Inner, max: usize, writer: &mut W) -> Result<usize> {
        let mut buffer = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        let mut count = 0;
        while count < max {
            let want = BATCH.min(max - count);
            let wcs = self
                .cq
                .poll(&mut buffer, want)
                .map_err(|_| self.overran())?;
            for wc in wcs {
                match inner.digest(wc) {
                    Some(Entry::Done(completion)) if inner.backlog.is_empty() => {
                        writer.write(&completion);
                        count += 1;
                    }
                    Some(entry) => inner.backlog.push_back(entry),
                    None => {}
                }
            }
            if wcs.len() < want || !inner.backlog.is_empty() {
                break;
            }
        }
        Ok(count)
    }

    #[cold]
    fn overran(&self) -> FiErrno {
        if !self.overrun.swap(true, Ordering::Relaxed) {
            warn_log!(
                Cq,
                "a completion queue of {} has failed",
                self.cq.device().name()
            );
        }
        FiErrno::EOVERRUN
    }

    /// Moves what the device has into the backlog, if that isn't longer than the queue. Says
    /// whether anything is there to be read.
    pub(crate) fn progress(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let mut result = self.progress_locked(&mut inner)?;
        if inner.resumable.get() {
            inner = self.resume(inner);
            result = !inner.backlog.is_empty();
        }
        Ok(result)
    }

    /// The same, without letting endpoints go on: for who holds a lock of one.
    pub(crate) fn poll_quietly(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        self.progress_locked(&mut inner)
    }

    fn progress_locked(&self, inner: &mut Inner) -> Result<bool> {
        self.drain_locked(inner, self.size)
    }

    /// Moves what the device has into the backlog, until that has so many entries.
    fn drain_locked(&self, inner: &mut Inner, limit: usize) -> Result<bool> {
        let mut buffer = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        while inner.backlog.len() < limit {
            let wcs = self
                .cq
                .poll(&mut buffer, BATCH)
                .map_err(|_| self.overran())?;
            for wc in wcs {
                if let Some(entry) = inner.digest_late(wc) {
                    inner.backlog.push_back(entry);
                }
            }
            if wcs.len() < BATCH {
                break;
            }
        }
        Ok(!inner.backlog.is_empty())
    }

    /// Takes the error that [`Self::read`] stopped at. Never blocks.
    ///
    /// # Errors
    /// `EAGAIN`: the next completion is not an error.
    pub fn read_error(&self) -> Result<CompletionError> {
        let mut inner = self.inner.lock();
        match inner.backlog.front() {
            Some(&Entry::Failed(error)) => {
                inner.backlog.pop_front();
                Ok(error)
            }
            _ => Err(FiErrno::EAGAIN),
        }
    }

    /// Waits until `threshold` completions (at least 1, at most `max`) were read, and returns how
    /// many were; fewer when the time is over or [`Self::signal`] was called in between. `timeout`
    /// of `None` waits for ever.
    ///
    /// # Errors
    /// - `EAGAIN`: none came in time, or the queue was signalled.
    /// - `EAVAIL`: as for [`Self::read`].
    /// - `EINTR`: a signal handler ran.
    /// - `ENOSYS`: the queue was opened without a wait object.
    pub fn sread<W: EntryWriter>(
        &self,
        max: usize,
        threshold: usize,
        timeout: Option<Duration>,
        writer: &mut W,
    ) -> Result<usize> {
        let wait = self.wait.as_ref().ok_or(FiErrno::ENOSYS)?;
        let threshold = threshold.clamp(1, max.max(1));
        let deadline = deadline(timeout);
        let mut count = 0;
        let end = loop {
            match self.read(max - count, writer) {
                Ok(more) => count += more,
                Err(FiErrno::EAGAIN) => {}
                Err(error) => break error,
            }
            if count >= threshold {
                return Ok(count);
            }
            if self.take_signal(wait) {
                break FiErrno::EAGAIN;
            }
            match self.arm(wait) {
                Err(FiErrno::EAGAIN) => continue,
                Err(error) => break error,
                Ok(()) => {}
            }
            match wait.wait(deadline) {
                Ok(true) => {}
                Ok(false) => break FiErrno::EAGAIN,
                Err(error) => break error,
            }
        };
        if count > 0 { Ok(count) } else { Err(end) }
    }

    /// Wakes one thread that waits in [`Self::sread`], now or when it next tries
    /// (`fi_cq_signal`).
    ///
    /// # Errors
    /// `ENOSYS`: the queue was opened without a wait object.
    pub fn signal(&self) -> Result<()> {
        let wait = self.wait.as_ref().ok_or(FiErrno::ENOSYS)?;
        self.signaled.store(true, Ordering::Release);
        wait.wake();
        Ok(())
    }

    fn take_signal(&self, wait: &WaitSet) -> bool {
        let signaled = self.signaled.swap(false, Ordering::AcqRel);
        if signaled {
            wait.clear();
        }
        signaled
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`).
    ///
    /// # Errors
    /// - `EAGAIN`: there is something to read; don't wait.
    /// - `EINVAL`: no wait object.
    pub fn trywait(&self) -> Result<()> {
        let wait = self.wait.as_ref().ok_or(FiErrno::EINVAL)?;
        if self.take_signal(wait) {
            return Err(FiErrno::EAGAIN);
        }
        self.arm(wait)
    }

    /// Makes the next completion wake, then looks whether one came before that.
    fn arm(&self, wait: &WaitSet) -> Result<()> {
        if let Some(keepalive) = self.domain.keepalive() {
            keepalive.woken();
        }
        let mut inner = self.inner.lock();
        if !self.signaled.load(Ordering::Acquire) {
            // what it stood for is in the backlog, and was or will be read
            wait.clear();
            if self.signaled.load(Ordering::Acquire) {
                wait.wake();
            }
        }
        if !inner.backlog.is_empty() {
            return Err(FiErrno::EAGAIN);
        }
        self.cq.drain_channel();
        self.cq.arm()?;
        match self.progress_locked(&mut inner) {
            Ok(false) => Ok(()),
            // a failure is for the reader to find
            Ok(true) | Err(_) => Err(FiErrno::EAGAIN),
        }
    }

    /// Makes the next completion wake those who wait for a counter, if it has a channel, and takes in what
    /// came before. Who waits on the queue itself is told, because the channel's event is taken away.
    pub(crate) fn arm_for_counter(&self) {
        let mut inner = self.inner.lock();
        if self.channel.is_some() {
            self.cq.drain_channel();
            // what fails is for the queue's reader to find
            let _ = self.cq.arm();
        }
        let something = self.progress_locked(&mut inner);
        if let Some(wait) = &self.wait
            && !matches!(something, Ok(false))
        {
            wait.wake();
        }
    }

    /// What becomes readable when a completion comes after it was armed.
    pub(crate) fn channel_fd(&self) -> Option<RawFd> {
        self.channel.as_ref().map(|channel| channel.fd())
    }

    /// Makes progress, and says whether there is anything to read (`fi_poll(3)`).
    pub fn poll_ready(&self) -> bool {
        // a failure is to be read too
        self.progress().unwrap_or(true)
    }

    /// The descriptor to poll for reading, if the queue has a wait object. It belongs to the
    /// queue.
    pub fn fd(&self) -> Option<RawFd> {
        self.wait.as_ref().map(WaitSet::fd)
    }

    /// How it can be waited on.
    pub fn wait_kind(&self) -> WaitKind {
        self.kind
    }

    /// What a [`CompletionError::prov_errno`] means.
    pub fn strerror(&self, prov_errno: i32) -> &'static CStr {
        self.cq.status_str(prov_errno)
    }

    /// The domain it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(crate) fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// Gives an endpoint a place in the table, and room for `completions` more.
    ///
    /// # Errors
    /// `ENOSPC`: 65,536 endpoints are bound.
    pub(crate) fn attach(&self, rings: &Arc<Rings>, completions: usize) -> Result<WrId> {
        let mut inner = self.inner.lock();
        let free = inner
            .endpoints
            .iter()
            .position(|place| place.rings.is_none());
        let index = free.unwrap_or(inner.endpoints.len());
        let short = u16::try_from(index).map_err(|_| FiErrno::ENOSPC)?;
        if free.is_none() {
            inner.endpoints.push(Attachment::default());
        }
        self.reserve(&mut inner, completions);
        let place = &mut inner.endpoints[index];
        place.rings = Some(Arc::clone(rings));
        place.selective = false;
        Ok(WrId::base(short, place.generation))
    }

    /// Makes room for so many completions more.
    fn reserve(&self, inner: &mut Inner, completions: usize) {
        inner.reserved += completions;
        let wanted = inner.reserved.min(self.cq.device().attr().max_cqe);
        if wanted > self.cq.cqe()
            && let Err(error) = self.cq.resize(wanted)
        {
            info_log!(
                Cq,
                "a completion queue stays at {} entries: {error}",
                self.cq.cqe()
            );
        }
    }

    /// Queue pair `number`, of the endpoint at a place, takes receives of a shared context, and they
    /// complete here.
    pub(crate) fn share(&self, id: WrId, number: u32, slots: &Arc<SharedSlots>, selective: bool) {
        let mut inner = self.inner.lock();
        let index = usize::from(slots.id().index);
        if inner.shared.len() <= index {
            inner.shared.resize_with(index + 1, || None);
        }
        let entry = &mut inner.shared[index];
        match entry {
            Some(sharer) if Arc::ptr_eq(&sharer.slots, slots) => sharer.users += 1,
            _ => {
                let slots = Arc::clone(slots);
                let room = slots.depth();
                *entry = Some(Sharer { slots, users: 1 });
                self.reserve(&mut inner, room);
            }
        }
        // a place's index has 16 bits
        let place = id.index() as u16;
        match inner.sharing.binary_search_by_key(&number, |entry| entry.0) {
            Ok(at) => inner.sharing[at].1 = place,
            Err(at) => inner.sharing.insert(at, (number, place)),
        }
        if let Some(place) = inner.endpoints.get_mut(id.index()) {
            place.selective = selective;
        }
    }

    /// Undoes [`Self::share`], if it was done. The queue pair must be in its error state: what it had received is taken
    /// from the device first, because a device forgets that when the queue pair goes, and the receives
    /// with it.
    pub(crate) fn unshare(&self, id: WrId, slots: &Arc<SharedSlots>) {
        let mut inner = self.inner.lock();
        let mine = |entry: &(u32, u16)| usize::from(entry.1) == id.index();
        let Some(at) = inner.sharing.iter().position(mine) else {
            return;
        };
        let _ = self.drain_locked(&mut inner, usize::MAX);
        inner.sharing.remove(at);
        let index = usize::from(slots.id().index);
        if let Some(Some(sharer)) = inner.shared.get_mut(index)
            && Arc::ptr_eq(&sharer.slots, slots)
        {
            sharer.users -= 1;
            if sharer.users == 0 {
                inner.shared[index] = None;
                inner.reserved -= slots.depth();
            }
        }
    }

    /// A receive that no device ever had completes as cancelled.
    pub(crate) fn cancel(&self, id: WrId, number: u32) {
        let mut inner = self.inner.lock();
        let place = inner.endpoints.get(id.index());
        let Some(rings) = place.and_then(|place| place.rings.as_ref()) else {
            return;
        };
        let Some(slot) = rings.rx.complete(number) else {
            return;
        };
        if let Some(counters) = rings.counters() {
            counters.count(slot.flags, false);
        }
        let entry = failure(&slot, sys::IBV_WC_WR_FLUSH_ERR, 0);
        inner.backlog.push_back(entry);
        if let Some(wait) = &self.wait {
            wait.wake();
        }
    }

    /// Takes an endpoint out, when its queue pair is gone: what it still had under way completes
    /// as flushed.
    pub(crate) fn detach(&self, id: WrId, completions: usize, tx: bool, rx: bool) {
        let mut inner = self.inner.lock();
        // completions that the device still holds come before those that are made up here
        let _ = self.progress_locked(&mut inner);
        let Some(place) = inner.endpoints.get_mut(id.index()) else {
            return;
        };
        if place.generation != id.generation() {
            return;
        }
        let Some(rings) = place.rings.take() else {
            return;
        };
        place.generation = place.generation.wrapping_add(1) & WrId::GENERATIONS;
        inner.reserved -= completions;
        let directions = [(tx, &rings.tx), (rx, &rings.rx)];
        for (_, ring) in directions.into_iter().filter(|(mine, _)| *mine) {
            while let Some(slot) = ring.abandon() {
                if let Some(counters) = rings.counters()
                    && !slot.part
                {
                    counters.count(slot.flags, false);
                }
                let sent = std::ptr::eq(ring, &rings.tx);
                if (sent && rings.reports_failure(&slot)) || (!sent && slot.reports_failure) {
                    let entry = failure(&slot, sys::IBV_WC_WR_FLUSH_ERR, 0);
                    inner.backlog.push_back(entry);
                }
            }
        }
        if let Some(wait) = &self.wait
            && !inner.backlog.is_empty()
        {
            wait.wake();
        }
    }
}

impl AsyncListener for CompletionQueue {
    fn async_event(&self, event: AsyncEvent) {
        if event == AsyncEvent::CqError {
            let _ = self.overran();
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.domain.device().unlisten(self.cq.object());
        // its events must be acknowledged before it can be destroyed
        self.cq.drain_channel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wr_id_keeps_its_parts_apart() {
        for index in [0, 1, 0x8000, u16::MAX] {
            for generation in [0, 1, WrId::GENERATIONS] {
                let id = WrId::base(index, generation);
                for number in [0, 1, u32::MAX] {
                    let recv = WrId(id.recv(number));
                    assert_eq!(recv.index(), usize::from(index));
                    assert_eq!(recv.generation(), generation);
                    assert_eq!(recv.0 as u32, number);
                    assert_ne!(recv.0 & WrId::RECV, 0);
                    assert_eq!(WrId(id.send(number)).0 & WrId::RECV, 0);
                    let probe = WrId(id.probe());
                    assert_eq!(probe.index(), usize::from(index));
                    assert_eq!(probe.generation(), generation | WrId::PROBE);
                }
            }
        }
    }

    #[test]
    fn flushed_is_cancelled_and_the_rest_has_a_reason() {
        assert_eq!(
            status_errno(sys::IBV_WC_WR_FLUSH_ERR, true),
            FiErrno::ECANCELED
        );
        assert_eq!(status_errno(sys::IBV_WC_LOC_LEN_ERR, true), FiErrno::ETRUNC);
        assert_eq!(
            status_errno(sys::IBV_WC_RETRY_EXC_ERR, false),
            FiErrno::ETIMEDOUT
        );
        assert_eq!(
            status_errno(sys::IBV_WC_REM_ACCESS_ERR, false),
            FiErrno::EKEYREJECTED
        );
        assert_eq!(status_errno(9999, false), FiErrno::EIO);
    }
}
