//! Completion queues.
//!
//! A read copies completions from the device directly into the application's buffer. Completions
//! that are polled outside a read (by `trywait`, by a post that makes room, at the end of a
//! connection) are queued in a backlog. So are errors, and the completions that follow them.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::queue::complete::{Entry, Inner};
use crate::queue::slots::Rings;
use crate::queue::wait::WaitSet;
use crate::queue::{CompletionError, EntryWriter, WaitKind};
use crate::verbs::{AsyncEvent, AsyncListener, CompChannel, Cq, Wc};

/// Completions that a queue holds if the application gives no size.
const DEFAULT_SIZE: usize = 1024;
/// Empty reads between two checks of the clock, for silent peers.
const VAIN_READS: u32 = 32;
/// Endpoints that each such check examines for revoked keys.
const HOLDERS: usize = 4;
/// Completions polled from the device at a time.
const BATCH: usize = 16;

/// Parameters of a completion queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct CqConfig {
    /// Completions that the queue must hold; 0: the default of 1024. It grows as endpoints are
    /// bound, so that it never overruns.
    pub size: usize,
    /// How it can be waited on.
    pub wait: WaitKind,
    /// The completion vector (`FI_AFFINITY`), taken modulo those of the device.
    pub signaling_vector: u32,
}

/// A completion queue. Thread safe.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(super) domain: Arc<Domain>,
    pub(super) cq: Arc<Cq>,
    /// The channel of this queue alone; `None` for a queue without a wait object.
    pub(super) channel: Option<Arc<CompChannel>>,
    pub(super) kind: WaitKind,
    pub(super) wait: Option<WaitSet>,
    pub(super) signaled: AtomicBool,
    pub(super) overrun: AtomicBool,
    pub(super) size: usize,
    pub(super) inner: Mutex<Inner>,
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
    /// - `EOVERRUN`: the device lost completions; the queue is unusable.
    #[inline]
    pub fn read<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        let mut inner = self.inner.lock();
        let mut count = 0;
        if max == 0 {
            // a read of 0 completions only makes progress
            self.progress_locked(&mut inner)?;
            return Err(FiErrno::EAGAIN);
        }
        if !inner.backlog.is_empty() {
            count = Self::take(&mut inner, max, writer);
        }
        if inner.backlog.is_empty() {
            count += self.poll(&mut inner, max - count, writer)?;
        }
        if inner.resumable.get() {
            inner = self.resume(inner);
            // endpoints that resumed may have polled
            count += Self::take(&mut inner, max - count, writer);
        }
        if count > 0 {
            Ok(count)
        } else if inner.backlog.is_empty() {
            inner.vain = inner.vain.wrapping_add(1);
            if inner.vain.is_multiple_of(VAIN_READS) {
                self.read_in_vain(inner);
            }
            Err(FiErrno::EAGAIN)
        } else {
            Err(FiErrno::EAVAIL)
        }
    }

    /// Writes at most `max` completions of the backlog, up to its first error.
    fn take<W: EntryWriter>(inner: &mut Inner, max: usize, writer: &mut W) -> usize {
        let mut count = 0;
        while count < max
            && let Some(Entry::Done(completion)) = inner.backlog.front()
        {
            writer.write(completion);
            inner.backlog.pop_front();
            count += 1;
        }
        count
    }

    /// Resumes the pending operations of endpoints. Releases the lock and acquires it again.
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

    /// On behalf of a thread that reads without sleeping: acknowledges revoked keys, and probes
    /// silent peers.
    #[cold]
    fn read_in_vain(&self, inner: MutexGuard<'_, Inner>) {
        if self.domain.helper().has_holders() {
            let holders = Self::some_holders(inner);
            for rings in holders.into_iter().flatten() {
                if let Some(owner) = rings.owner.get().and_then(Weak::upgrade) {
                    owner.acknowledge();
                }
            }
        } else {
            drop(inner);
        }
        self.keep_alive();
    }

    /// The next [`HOLDERS`] endpoints, reduced to those that hold keys of their peers.
    fn some_holders(mut inner: MutexGuard<'_, Inner>) -> [Option<Arc<Rings>>; HOLDERS] {
        let count = inner.endpoints.len();
        let first = inner.next_holder;
        inner.next_holder = (first + HOLDERS) % count.max(1);
        std::array::from_fn(|i| {
            let place = inner.endpoints.get((first + i) % count.max(1));
            let rings = place.filter(|_| i < count)?.rings.as_ref();
            rings.filter(|rings| rings.holds_keys()).cloned()
        })
    }

    /// Probes silent peers if their period is over. The caller holds no lock.
    fn keep_alive(&self) {
        if let Some(keepalive) = self.domain.keepalive() {
            keepalive.poll();
        }
    }

    /// Polls the device for up to `max` completions. An error goes to the backlog, together with
    /// the completions that follow it in the same batch.
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

    /// Polls completions from the device into the backlog, unless the backlog is as long as the
    /// queue. Returns whether the backlog has an entry. Resumes pending operations of endpoints.
    pub(crate) fn progress(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let mut result = self.progress_locked(&mut inner)?;
        if inner.resumable.get() {
            inner = self.resume(inner);
            result = !inner.backlog.is_empty();
        }
        Ok(result)
    }

    /// As [`Self::progress`], but resumes no endpoint: for a caller that holds an endpoint's lock.
    pub(crate) fn poll_quietly(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        self.progress_locked(&mut inner)
    }

    /// As [`Self::poll_quietly`], also when the application leaves the queue full: the engine's own
    /// requests complete in it too.
    pub(crate) fn progress_own(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let limit = self.size + inner.reserved;
        self.drain_locked(&mut inner, limit)
    }

    pub(super) fn progress_locked(&self, inner: &mut Inner) -> Result<bool> {
        self.drain_locked(inner, self.size)
    }

    /// Polls completions from the device into the backlog, until that has `limit` entries.
    pub(super) fn drain_locked(&self, inner: &mut Inner, limit: usize) -> Result<bool> {
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

    /// The text of a [`CompletionError::prov_errno`].
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
    use crate::domain::DomainConfig;
    use crate::flags::Flags;
    use crate::queue::Completion;
    use crate::queue::complete::Attachment;
    use crate::queue::slots::FailureListener;

    /// An endpoint that polls when it resumes, and finds this entry.
    struct GoesOn(Weak<CompletionQueue>, fn(Completion) -> Entry);

    impl FailureListener for GoesOn {
        fn operation_failed(&self) {}
        fn resume(&self) {
            let found = (self.1)(Completion {
                context: 7,
                flags: Flags::SEND,
                len: 0,
                buf: 0,
                data: 0,
                tag: 0,
            });
            let cq = self.0.upgrade().expect("it is being read");
            cq.inner.lock().backlog.push_back(found);
        }
    }

    fn failed(completion: Completion) -> Entry {
        Entry::Failed(CompletionError {
            completion,
            olen: 0,
            err: FiErrno::EIO,
            prov_errno: 0,
            vendor_err: 0,
        })
    }

    /// The result of a read whose first poll is empty, and after which an endpoint resumes.
    fn read(found: fn(Completion) -> Entry) -> (Result<usize>, Vec<usize>, Result<usize>) {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let cq = CompletionQueue::open(&domain, CqConfig::default()).unwrap();
        let owner: Arc<dyn FailureListener> = Arc::new(GoesOn(Arc::downgrade(&cq), found));
        let rings = Arc::new(Rings::new(4, 4));
        assert!(rings.owner.set(Arc::downgrade(&owner)).is_ok());
        rings.set_waiting(true);
        {
            let mut inner = cq.inner.lock();
            inner.endpoints.push(Attachment {
                rings: Some(Arc::clone(&rings)),
                ..Attachment::default()
            });
            inner.resumable.set(true);
        }
        let mut contexts = Vec::new();
        let read = cq.read(4, &mut |completion: &Completion| {
            contexts.push(completion.context);
        });
        rings.set_waiting(false);
        (read, contexts, cq.read_error().map(|_| 0))
    }

    #[test]
    fn what_comes_while_endpoints_go_on_is_what_it_is() {
        let nothing = Err(FiErrno::EAGAIN);
        assert_eq!(read(Entry::Done), (Ok(1), vec![7], nothing));
        assert_eq!(read(failed), (Err(FiErrno::EAVAIL), vec![], Ok(0)));
    }
}
