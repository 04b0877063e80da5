//! Completion queues.
//!
//! A completion queue reads its sources: the device queue of its MSG endpoints
//! (`device_queue.rs`) and sources that poll for their endpoints (`source.rs`). A read stores the
//! device's completions directly in the application's buffer. Completions that are polled outside a
//! read (by `trywait`, by a post that makes room, at the end of a connection), errors, and the
//! completions that follow an error are queued in the backlog.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::{Arc, Weak};

use biased_lock::{Mutex, MutexGuard};

use crate::errno::{FiErrno, Result};
use crate::queue::complete::{EndpointTable, ONLY_SOURCES, SOURCES};
use crate::queue::cq_wait::Signals;
use crate::queue::device_queue::DeviceQueue;
use crate::queue::slots::EndpointSlots;
use crate::queue::source::{BATCH, Entry, NoReader, Sink, Source, take};
use crate::queue::wait::WaitSet;
use crate::queue::{CompletionError, CqMember, EntryWriter, QueueDomain, WaitKind, is_refusal};
use crate::verbs::{AsyncListener, Cq};

/// Size of a queue in completions if the application gives none.
const DEFAULT_SIZE: usize = 1024;
/// Number of empty reads, or of reads of a queue that has only sources, between two calls of
/// [`QueueDomain::help_from_poll`].
const EMPTY_READS: u32 = 32;
/// Number of endpoints of the device queue that each such check examines for revoked keys. A source
/// examines its own.
const HOLDERS: usize = 4;

/// Parameters of a completion queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct CqConfig {
    /// Completions that the queue must hold; 0: the default of 1024. The queue grows when endpoints
    /// are enabled, so that it does not overrun.
    pub size: usize,
    /// The kind of wait object.
    pub wait: WaitKind,
    /// The completion vector (`FI_AFFINITY`), modulo the number of the device's vectors.
    pub signaling_vector: u32,
    /// Whether the queue has only sources ([`CompletionQueue::add_source`]) and no device queue, so
    /// that no MSG endpoint can be bound to it.
    pub sources_only: bool,
}

/// The state under a completion queue's lock.
#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) backlog: VecDeque<Entry>,
    /// A thread may sleep on the wait object until the next completion.
    pub(super) armed: bool,
    /// Number of entries put by [`CompletionQueue::put`] since the device queue was polled last.
    pub(super) put: u32,
    /// The endpoints of the device queue.
    pub(super) table: EndpointTable,
    pub(super) sources: Vec<Arc<dyn Source>>,
    /// The source that the next progress outside a read polls first. 0: the device queue; `n`:
    /// `sources[n - 1]`.
    next_turn: usize,
    /// Maximum number of outstanding completions of the bound endpoints.
    pub(super) reserved: usize,
    /// Number of empty reads, or of all reads of a queue that has only sources; wraps.
    empty_reads: u32,
    /// Number of reads that were full before the sources could run; wraps (`run_sources`).
    full_reads: u32,
    /// Index of the endpoint to examine next for revoked keys.
    next_holder: usize,
}

impl Inner {
    /// Counts a read that [`EMPTY_READS`] is about. Returns whether it is the last one of that
    /// number.
    #[inline]
    fn counts_a_read(&mut self) -> bool {
        self.empty_reads = self.empty_reads.wrapping_add(1);
        self.empty_reads.is_multiple_of(EMPTY_READS)
    }

    /// Runs the sources for a read of at most `max` completions that has `count` already. Returns
    /// the first error of a source, and the new count.
    ///
    /// A source may pass its part of the reader's room. If that is less than `max`, it may pass up
    /// to `max` completions, at most [`BATCH`], of which the backlog holds the rest. The sources
    /// run again only when the backlog is empty and the device queue was polled once more. So
    /// neither the device queue nor a source starves the others, and the backlog is bounded.
    fn run_sources<W: EntryWriter>(
        &mut self,
        max: usize,
        count: usize,
        writer: &mut W,
    ) -> (Result<()>, usize) {
        if !self.backlog.is_empty() {
            return (Ok(()), count);
        }
        if count == max {
            // of two such reads, at least one has polled the device queue
            self.full_reads = self.full_reads.wrapping_add(1);
            if !self.full_reads.is_multiple_of(2) {
                return (Ok(()), count);
            }
        }
        let mut sink = Sink::new(writer, max - count, &mut self.backlog);
        if let [only] = &self.sources[..] {
            let most = sink.room().max(max.min(BATCH));
            let result = sink.run(&**only, most);
            return (result, max - sink.room());
        }
        let mut result = Ok(());
        for (i, source) in self.sources.iter().enumerate() {
            // without a division for the last one
            let part = match self.sources.len() - i {
                1 => sink.room(),
                left => sink.room().div_ceil(left),
            };
            let most = part.max(max.min(BATCH));
            result = result.and(sink.run(&**source, most));
        }
        (result, max - sink.room())
    }
}

/// A completion queue. Thread safe.
///
/// `repr(C)`: a read executes fewer instructions with `device` first; otherwise the size of `inner`
/// decides its offset.
#[derive(Debug)]
#[repr(C)]
pub struct CompletionQueue {
    /// The device queue, in which requests of MSG endpoints complete.
    pub(super) device: Option<DeviceQueue>,
    pub(super) domain: Arc<QueueDomain>,
    pub(super) kind: WaitKind,
    pub(super) wait: Option<WaitSet>,
    pub(super) signals: Signals,
    pub(super) size: usize,
    pub(super) inner: Mutex<Inner>,
}

impl CompletionQueue {
    /// Opens a completion queue.
    ///
    /// # Errors
    /// - `EINVAL`: more completions than the device allows.
    /// - `ENOMEM`, `EMFILE`: resources of the device or the process.
    pub fn open(domain: &Arc<QueueDomain>, config: CqConfig) -> Result<Arc<Self>> {
        let device = domain.device();
        let size = match config.size {
            0 => DEFAULT_SIZE.min(device.attr().max_cqe),
            size => size,
        };
        let wait = match config.wait {
            WaitKind::None => None,
            WaitKind::Unspec | WaitKind::Yield | WaitKind::Fd => Some(WaitSet::new()?),
        };
        let queue = match config.sources_only {
            true => None,
            false => {
                let vector = config.signaling_vector;
                Some(DeviceQueue::create(device, size, wait.is_some(), vector)?)
            }
        };
        if let Some(wait) = &wait {
            if let Some(fd) = queue.as_ref().and_then(DeviceQueue::fd) {
                wait.add(fd)?;
            }
            if let Some(keepalive) = domain.keepalive() {
                wait.add(keepalive.fd())?;
            }
        }
        let this = Arc::new(Self {
            domain: Arc::clone(domain),
            device: queue,
            kind: config.wait,
            wait,
            signals: Signals::default(),
            size,
            inner: Mutex::default(),
        });
        if let Some(queue) = &this.device {
            let listener: Weak<dyn AsyncListener> = Arc::downgrade(&this) as _;
            device.listen(queue.cq().object(), listener);
        }
        Ok(this)
    }

    /// Whether the queue has a wait object, so that its sources need a descriptor.
    pub(crate) fn waits(&self) -> bool {
        self.wait.is_some()
    }

    /// Adds a source. Later reads of the queue run it, and it wakes threads that wait on the queue.
    /// A source whose operations move a counter is added before the counter is bound.
    ///
    /// # Errors
    /// `EINVAL`: the queue has a wait object, and the source has no descriptor. `ENOMEM`.
    pub fn add_source(&self, source: Arc<dyn Source>) -> Result<()> {
        let mut inner = self.inner.lock();
        if let Some(wait) = &self.wait {
            wait.add(source.fd().ok_or(FiErrno::EINVAL)?)?;
        }
        inner.sources.push(source);
        inner.table.set_more(SOURCES, true);
        let only = inner.table.endpoints.is_empty();
        inner.table.set_more(ONLY_SOURCES, only);
        if let Some(wait) = &self.wait {
            // a thread that sleeps has not armed the source
            wait.wake();
        }
        Ok(())
    }

    /// Removes a source without running it again. No effect if the queue does not have it.
    pub fn remove_source(&self, source: &Arc<dyn Source>) {
        let removed = {
            let mut inner = self.inner.lock();
            let at = inner.sources.iter().position(|s| Arc::ptr_eq(s, source));
            let removed = at.map(|at| inner.sources.swap_remove(at));
            if inner.sources.is_empty() {
                inner.table.set_more(SOURCES | ONLY_SOURCES, false);
            }
            removed
        };
        if let (Some(wait), Some(fd)) = (&self.wait, removed.and_then(|source| source.fd())) {
            wait.remove(fd);
        }
    }

    /// Removes a source that has ended, after `rest` has passed on its last completions, whatever
    /// the size of the queue. Wakes the threads that wait on the queue, if it has an entry.
    pub(crate) fn finish_source(&self, source: &Arc<dyn Source>, rest: impl FnOnce(&mut Sink<'_>)) {
        let has_entry = {
            let mut guard = self.inner.lock();
            let inner = &mut *guard;
            let mut none = NoReader;
            rest(&mut Sink::of_source(&mut none, &mut inner.backlog));
            !inner.backlog.is_empty()
        };
        self.remove_source(source);
        if let Some(wait) = self.wait.as_ref().filter(|_| has_entry) {
            wait.wake();
        }
    }

    /// Reads up to `max` completions into `writer`. Returns their number, at least 1. Never blocks.
    ///
    /// # Errors
    /// - `EAGAIN`: the queue is empty.
    /// - `EAVAIL`: the next entry is an error, which [`Self::read_error`] returns.
    /// - `EOVERRUN`: the device lost completions; the queue is unusable. A read returns the error
    ///   after all completions that were polled before.
    #[inline(always)]
    pub fn read<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        match &self.device {
            None if max != 0 => self.read_sources(max, writer),
            _ => self.read_device(max, writer),
        }
    }

    /// As [`Self::read`].
    #[inline]
    fn read_device<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        if inner.table.more.get() & ONLY_SOURCES != 0 && max != 0 {
            drop(guard);
            return self.read_other_sources(max, writer);
        }
        let mut count = 0;
        if !inner.backlog.is_empty() {
            count = take(&mut inner.backlog, max, writer);
        }
        let mut sink = Sink::new(writer, max - count, &mut inner.backlog);
        match &self.device {
            Some(device) if sink.is_open() => {
                inner.put = 0;
                if device.poll(&inner.table, &mut sink).is_err() {
                    let count = max - sink.room();
                    return self.read_failed(guard, max, count, writer);
                }
                count = max - sink.room();
            }
            _ if max == 0 => {
                // a read of 0 completions only makes progress
                let progressed = self.progress_locked(&mut guard);
                if guard.backlog.is_empty() {
                    progressed?;
                }
                if guard.table.resumes() {
                    guard = self.resume(guard);
                }
                if guard.counts_a_read() {
                    drop(guard);
                    self.domain.help_from_poll();
                }
                return Err(FiErrno::EAGAIN);
            }
            _ => {}
        }
        if inner.table.more.get() != 0 {
            (guard, count) = self.read_more(guard, max, count, writer)?;
        }
        if count > 0 {
            Ok(count)
        } else if guard.backlog.is_empty() {
            if guard.counts_a_read() {
                self.after_empty_reads(guard);
            }
            Err(FiErrno::EAGAIN)
        } else {
            Err(FiErrno::EAVAIL)
        }
    }

    /// As [`Self::read`], of a queue without endpoints in a device queue: it is not polled, and no
    /// endpoint is resumed.
    #[inline(always)]
    fn read_sources<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        if let [only] = &inner.sources[..]
            && inner.backlog.is_empty()
        {
            // as `run_sources`, which gives an only source all of the room
            let mut sink = Sink::of_reader(writer, max, &mut inner.backlog);
            let result = only.progress(&mut sink, max);
            let count = max - sink.room();
            if inner.backlog.is_empty() && result.is_ok() {
                if inner.counts_a_read() {
                    return self.after_reads(guard, count);
                }
                return if count != 0 {
                    Ok(count)
                } else {
                    Err(FiErrno::EAGAIN)
                };
            }
            return self.read_some(guard, max, count, result, writer);
        }
        let mut count = 0;
        if !guard.backlog.is_empty() {
            count = take(&mut guard.backlog, max, writer);
        }
        let (result, count) = guard.run_sources(max, count, writer);
        self.read_some(guard, max, count, result, writer)
    }

    #[cold]
    #[inline(never)]
    fn read_other_sources<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        self.read_sources(max, writer)
    }

    /// The end of a read of sources that has counted as one of [`EMPTY_READS`], the last of them.
    #[cold]
    #[inline(never)]
    fn after_reads(&self, guard: MutexGuard<'_, Inner>, count: usize) -> Result<usize> {
        drop(guard);
        self.domain.help_from_poll();
        if count > 0 {
            Ok(count)
        } else {
            Err(FiErrno::EAGAIN)
        }
    }

    /// The end of a read that has `count` completions of sources, with this result, and may have
    /// more in the backlog.
    #[inline(never)]
    fn read_some<W: EntryWriter>(
        &self,
        mut guard: MutexGuard<'_, Inner>,
        max: usize,
        mut count: usize,
        result: Result<()>,
        writer: &mut W,
    ) -> Result<usize> {
        count += take(&mut guard.backlog, max - count, writer);
        let has_error = !guard.backlog.is_empty();
        if guard.counts_a_read() {
            drop(guard);
            self.domain.help_from_poll();
        }
        if count > 0 {
            return Ok(count);
        }
        result?;
        Err(if has_error {
            FiErrno::EAVAIL
        } else {
            FiErrno::EAGAIN
        })
    }

    /// Ends a read that found the device queue failed after `count` completions: returns them, and
    /// those of the other sources. The next read finds the failure again.
    #[cold]
    #[inline(never)]
    fn read_failed<W: EntryWriter>(
        &self,
        guard: MutexGuard<'_, Inner>,
        max: usize,
        count: usize,
        writer: &mut W,
    ) -> Result<usize> {
        self.report_failure(&guard);
        match self.read_more(guard, max, count, writer) {
            Ok((_, count)) if count > 0 => Ok(count),
            _ => Err(FiErrno::EOVERRUN),
        }
    }

    /// Continues a read that has got `count` of at most `max` completions from the device queue:
    /// runs the other sources, and resumes endpoints with deferred operations. Returns the lock and
    /// the new count.
    #[cold]
    #[inline(never)]
    fn read_more<'a, W: EntryWriter>(
        &'a self,
        mut guard: MutexGuard<'a, Inner>,
        max: usize,
        count: usize,
        writer: &mut W,
    ) -> Result<(MutexGuard<'a, Inner>, usize)> {
        let (result, mut count) = guard.run_sources(max, count, writer);
        if count == 0 {
            result?;
        }
        if guard.table.resumes() {
            guard = self.resume(guard);
            // a resumed endpoint may have polled completions into the backlog
            count += take(&mut guard.backlog, max - count, writer);
        }
        Ok((guard, count))
    }

    /// Resumes the endpoints with deferred operations. Releases the lock and acquires it again.
    #[cold]
    fn resume<'a>(&'a self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        let waiting = inner.table.take_waiting();
        drop(inner);
        for owner in waiting
            .iter()
            .filter_map(|slots| slots.owner.get()?.upgrade())
        {
            owner.resume();
        }
        self.inner.lock()
    }

    /// Makes the next read resume the endpoint with this place. The caller may hold the endpoint's
    /// transmit lock.
    #[cold]
    pub(crate) fn resume_in_next_read(&self, member: CqMember) {
        let inner = self.inner.lock();
        let attached = inner.table.endpoints.get(member.index());
        if attached.is_some_and(|it| it.generation == member.generation()) {
            inner.table.add_waiting(member.index());
        }
    }

    /// Called every [`EMPTY_READS`] empty reads: acknowledges revoked keys, and probes silent
    /// peers.
    #[cold]
    fn after_empty_reads(&self, inner: MutexGuard<'_, Inner>) {
        if self.domain.helper().has_holders() {
            let holders = Self::some_holders(inner);
            for slots in holders.into_iter().flatten() {
                if let Some(owner) = slots.owner.get().and_then(Weak::upgrade) {
                    owner.acknowledge();
                }
            }
        } else {
            drop(inner);
        }
        self.domain.help_from_poll();
    }

    /// Of the next [`HOLDERS`] endpoints, those that hold keys of their peers.
    fn some_holders(mut inner: MutexGuard<'_, Inner>) -> [Option<Arc<EndpointSlots>>; HOLDERS] {
        let count = inner.table.endpoints.len();
        let first = inner.next_holder;
        inner.next_holder = (first + HOLDERS) % count.max(1);
        std::array::from_fn(|i| {
            let place = inner.table.endpoints.get((first + i) % count.max(1));
            let slots = place.filter(|_| i < count)?.slots.as_ref();
            slots.filter(|slots| slots.holds_keys()).cloned()
        })
    }

    /// Polls the device queue, until the backlog has as many entries as the queue's size, and runs
    /// the sources; the completions are queued in the backlog. Then resumes endpoints with deferred
    /// operations. Returns whether the backlog has an entry.
    pub(crate) fn progress(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let result = self.progress_locked(&mut inner);
        self.resume_after(inner, result)
    }

    /// As [`Self::progress`], but runs no source, and polls all completions that the device has,
    /// also while the application does not read a full queue: at the end of a connection none may
    /// be lost.
    pub(crate) fn drain_device_queue(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let result = self.drain_all(&mut inner);
        self.resume_after(inner, result)
    }

    /// Resumes endpoints with deferred operations after a poll with this result. Returns whether
    /// the backlog has an entry.
    pub(super) fn resume_after(
        &self,
        inner: MutexGuard<'_, Inner>,
        polled: Result<bool>,
    ) -> Result<bool> {
        if !inner.table.resumes() {
            return polled;
        }
        let inner = self.resume(inner);
        polled.map(|_| !inner.backlog.is_empty())
    }

    /// Polls only the device queue and resumes no endpoint, for a caller that holds an endpoint's
    /// lock.
    pub(crate) fn poll_quietly(&self) -> Result<bool> {
        self.drain_locked(&mut self.inner.lock(), self.size)
    }

    /// As [`Self::poll_quietly`], but also while the application does not read a full queue,
    /// because the engine's own requests complete in it too.
    pub(crate) fn progress_engine_requests(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let limit = self.size + inner.reserved;
        self.drain_locked(&mut inner, limit)
    }

    /// As [`Self::progress`], but resumes no endpoint.
    pub(super) fn progress_locked(&self, inner: &mut Inner) -> Result<bool> {
        if inner.sources.is_empty() {
            return self.drain_locked(inner, self.size);
        }
        // the device queue and the sources, each in turn first, with an equal part of the room
        let count = 1 + inner.sources.len();
        let first = inner.next_turn;
        inner.next_turn = (first + 1) % count;
        let mut result = Ok(());
        for i in 0..count {
            let room = self.size.saturating_sub(inner.backlog.len());
            let part = room.div_ceil(count - i);
            let progressed = match ((first + i) % count).checked_sub(1) {
                None => {
                    let limit = inner.backlog.len() + part;
                    self.drain_locked(inner, limit).map(|_| ())
                }
                Some(at) => {
                    let mut none = NoReader;
                    let mut sink = Sink::of_source(&mut none, &mut inner.backlog);
                    inner.sources[at].progress(&mut sink, part)
                }
            };
            // a failure does not stop the others
            result = result.and(progressed);
        }
        result.map(|()| !inner.backlog.is_empty())
    }

    /// Polls all completions that the device has into the backlog. Returns whether the backlog has
    /// an entry.
    pub(super) fn drain_all(&self, inner: &mut Inner) -> Result<bool> {
        // a device has at most the outstanding completions
        let limit = inner.backlog.len() + inner.reserved;
        self.drain_locked(inner, limit)
    }

    /// Polls completions from the device queue into the backlog, until the backlog has `limit`
    /// entries. Returns whether the backlog has an entry.
    pub(super) fn drain_locked(&self, inner: &mut Inner, limit: usize) -> Result<bool> {
        if let Some(device) = &self.device {
            let mut none = NoReader;
            let mut sink = Sink::queueing(&mut none, &mut inner.backlog);
            device
                .drain(&inner.table, &mut sink, limit)
                .inspect_err(|_| self.report_failure(inner))?;
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

    /// The text of a [`CompletionError::prov_errno`].
    pub fn strerror(&self, prov_errno: i32) -> &'static CStr {
        // in a queue of sources: these numbers are no errnos of their failures
        let refusal = u32::try_from(prov_errno).is_ok_and(is_refusal);
        if self.device.is_some() || refusal {
            self.domain.device().status_str(prov_errno)
        } else {
            reason(FiErrno::new(prov_errno))
        }
    }

    /// The part of the domain that the queue belongs to.
    pub fn domain(&self) -> &Arc<QueueDomain> {
        &self.domain
    }

    /// Number of entries of the backlog, for tests.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.inner.lock().backlog.len()
    }

    /// The device's queue, in which requests of MSG endpoints complete.
    ///
    /// # Errors
    /// `EINVAL`: the queue was opened without one.
    pub(crate) fn device_cq(&self) -> Result<&Arc<Cq>> {
        let device = self.device.as_ref().ok_or(FiErrno::EINVAL)?;
        Ok(device.cq())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            self.domain.device().unlisten(device.cq().object());
        }
    }
}

/// The text of an error of a source's operation.
fn reason(error: FiErrno) -> &'static CStr {
    match error {
        FiErrno::ENOMSG => c"no message matches",
        FiErrno::ECANCELED => c"the operation was cancelled",
        FiErrno::ETRUNC => c"the message is longer than the receive",
        FiErrno::EHOSTUNREACH => c"the peer cannot be reached",
        FiErrno::ECONNREFUSED => c"the peer has refused the connection",
        FiErrno::ECONNABORTED => c"the peer has ended, or the connection to it was lost",
        FiErrno::EACCES => c"the peer has another authorization key",
        FiErrno::ENOMEM => c"no memory",
        _ => c"the operation has failed",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::flags::Flags;
    use crate::queue::Completion;
    use crate::queue::complete::Attachment;
    use crate::queue::slots::FailureListener;

    /// An endpoint that adds this entry to the backlog when it is resumed.
    struct GoesOn(Weak<CompletionQueue>, fn(Completion) -> Entry);

    impl FailureListener for GoesOn {
        fn operation_failed(&self) {}
        fn resume(&self) {
            let found = (self.1)(Completion::new(7, Flags::SEND));
            let cq = self.0.upgrade().expect("it is being read");
            cq.inner.lock().backlog.push_back(found);
        }
    }

    /// [`CompletionQueue::strerror`] takes them for statuses.
    #[test]
    fn no_errno_with_a_text_is_the_status_of_a_refusal() {
        for status in (0..64).filter(|status| is_refusal(*status)) {
            let errno = FiErrno::new(status.cast_signed());
            assert_eq!(reason(errno), reason(FiErrno::EIO), "{status}");
        }
    }

    fn failed(completion: Completion) -> Entry {
        Entry::Failed(CompletionError {
            completion,
            olen: 0,
            err: FiErrno::EIO,
            prov_errno: 0,
            vendor_err: Some(0),
        })
    }

    /// The result of a read whose first poll is empty, and after which an endpoint resumes.
    fn read(found: fn(Completion) -> Entry) -> (Result<usize>, Vec<usize>, Result<usize>) {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let cq = CompletionQueue::open(domain.queues(), CqConfig::default()).unwrap();
        let owner: Arc<dyn FailureListener> = Arc::new(GoesOn(Arc::downgrade(&cq), found));
        let slots = Arc::new(EndpointSlots::new(4, 4));
        assert!(slots.owner.set(Arc::downgrade(&owner)).is_ok());
        slots.set_needs_progress();
        {
            let mut inner = cq.inner.lock();
            inner.table.endpoints.push(Attachment {
                slots: Some(Arc::clone(&slots)),
                ..Attachment::default()
            });
            inner.table.add_waiting(0);
        }
        let mut contexts = Vec::new();
        let read = cq.read(4, &mut |completion: &Completion| {
            contexts.push(completion.context);
        });
        assert!(slots.clear_needs_progress());
        (read, contexts, cq.read_error().map(|_| 0))
    }

    /// An endpoint that counts how often it is resumed.
    #[derive(Default)]
    struct Resumed(AtomicUsize);

    impl FailureListener for Resumed {
        fn operation_failed(&self) {}
        fn resume(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Of 10,000 endpoints, a read visits those that have deferred operations.
    #[test]
    fn resuming_visits_the_waiting_endpoints_alone() {
        const ENDPOINTS: usize = 10_000;
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let cq = CompletionQueue::open(domain.queues(), CqConfig::default()).unwrap();
        let endpoint = |_| {
            let owner = Arc::new(Resumed::default());
            let listener: Arc<dyn FailureListener> = Arc::clone(&owner) as _;
            let slots = Arc::new(EndpointSlots::new(1, 1));
            assert!(slots.owner.set(Arc::downgrade(&listener)).is_ok());
            let id = cq.attach(&slots, 1).unwrap();
            (owner, slots, id)
        };
        let endpoints: Vec<_> = (0..ENDPOINTS).map(endpoint).collect();
        // reads after a completion of each of these; returns the visits, and the resumed endpoints
        let completed = |of: &[usize]| {
            for &index in of {
                cq.inner
                    .lock()
                    .table
                    .add_waiting(endpoints[index].2.index());
            }
            assert_eq!(cq.read(1, &mut |_: &Completion| {}), Err(FiErrno::EAGAIN));
            let resumed = |(owner, ..): &(Arc<Resumed>, _, _)| owner.0.swap(0, Ordering::Relaxed);
            let found = endpoints.iter().enumerate();
            let found = found.filter(|(_, endpoint)| resumed(endpoint) == 1);
            let found: Vec<_> = found.map(|(index, _)| index).collect();
            (cq.inner.lock().table.visits.take(), found)
        };
        let waits = |index: usize| endpoints[index].1.set_needs_progress();
        waits(7_000);
        assert_eq!(completed(&[7_000, 7_000]), (1, vec![7_000]));
        // a completion of one resumes the other too
        waits(3);
        assert_eq!(completed(&[3]), (2, vec![3, 7_000]));
        assert_eq!(completed(&[]), (0, vec![]));
        assert!(endpoints[7_000].1.clear_needs_progress());
        assert_eq!(completed(&[3]), (2, vec![3]));
        assert_eq!(completed(&[3]), (1, vec![3]), "the other has left the list");
        // an endpoint that is detached leaves it too
        let (_, slots, id) = &endpoints[3];
        cq.detach(*id, 1, crate::queue::Direction::BOTH);
        assert_eq!(completed(&[3]), (1, vec![]));
        assert_eq!(cq.attach(slots, 1).unwrap().index(), id.index());
        assert_eq!(completed(&[3]), (1, vec![3]), "and comes back");
    }

    #[test]
    fn what_comes_while_endpoints_go_on_is_what_it_is() {
        let nothing = Err(FiErrno::EAGAIN);
        assert_eq!(read(Entry::Done), (Ok(1), vec![7], nothing));
        assert_eq!(read(failed), (Err(FiErrno::EAVAIL), vec![], Ok(0)));
    }
}
