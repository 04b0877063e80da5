//! Registrations of sources that peers read: of messages that a receiver fetches by READ; and of
//! sinks that peers write: parts of receives.
//!
//! Each source is registered by itself, on demand, if the device does so without a call of the
//! kernel; the last registrations stay for later messages. Otherwise it uses a cache of its own
//! (`docs/registration-cache.md`). A descriptor of the application is not used: its region has more
//! bytes than the message, and other rights.

#![allow(unsafe_code, reason = "registers buffers of the application")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::cache::{Got, Held};
use super::recent_sources::{Recent, RecentSources};
use super::{MrDomain, SourceCache};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{Mr, Pd, Rkey};

/// Binary logarithm of the largest number of sources that are not registered after `ENOMEM`.
const MAX_PAUSE: u32 = 10;

/// The registration of one source. To be released by [`SourceKeys::release`] or
/// [`SourceKeys::withdraw`]; otherwise a cached registration is never deregistered.
#[derive(Debug)]
pub(crate) struct Source(Kept);

#[derive(Debug)]
enum Kept {
    /// A registration that later sources of the same range use too.
    Recent(Arc<Recent>),
    /// A registration of this source alone.
    Once(Box<Mr>),
    /// A reference to a cached registration.
    Cached(Box<Held<Rkey>>),
}

impl Source {
    /// The key for peers.
    #[inline]
    pub(crate) fn rkey(&self) -> Rkey {
        match &self.0 {
            Kept::Recent(recent) => recent.rkey(),
            Kept::Once(mr) => mr.rkey(),
            Kept::Cached(held) => held.key,
        }
    }
}

/// The registration of a part of a receive that its sender writes. To be released by
/// [`SourceKeys::release_sink`] or ended by [`Self::end`].
#[derive(Debug)]
pub(crate) struct Sink(Arc<Recent>);

impl Sink {
    /// The key for the sender.
    #[inline]
    pub(crate) fn rkey(&self) -> Rkey {
        self.0.rkey()
    }

    /// Ends the registration, so that no peer writes when this has succeeded, and no later receive
    /// uses it. WRITEs to other receives in the same memory are refused. Does not wait.
    ///
    /// # Errors
    /// The sink itself: a WRITE is being executed, and no other one can begin. The caller repeats
    /// the call.
    pub(crate) fn end(self) -> std::result::Result<(), Self> {
        self.0.end().map_err(|()| self)
    }
}

/// A source that no peer may read any more, and whose registration has not ended.
#[derive(Debug)]
pub(crate) struct Withdrawn(Ends);

#[derive(Debug)]
enum Ends {
    Recent(Arc<Recent>),
    Once(Box<Mr>),
    Cached(Box<Held<Rkey>>, Arc<SourceCache>),
}

impl Withdrawn {
    /// Ends the registration, so that no peer reads the source when this has succeeded. The
    /// registration of one message does not wait for a READ that is being executed (softverbs), nor
    /// does one that later messages would have used: the READs of these are refused. A cached one
    /// waits, as `ibv_dereg_mr(3)`, unless other operations use it: then the caller has ended the
    /// peer's queue pairs before.
    ///
    /// # Errors
    /// The source itself: a READ is being executed, and no other one can begin. The caller repeats
    /// the call.
    pub(crate) fn end(self) -> std::result::Result<(), Self> {
        match self.0 {
            Ends::Recent(recent) => match recent.end() {
                Ok(()) => Ok(()),
                Err(()) => Err(Self(Ends::Recent(recent))),
            },
            Ends::Once(mr) => {
                let ended = mr.deregister_now();
                ended.map_err(|mr| Self(Ends::Once(Box::new(mr))))
            }
            Ends::Cached(held, cache) => {
                cache.retire(*held);
                Ok(())
            }
        }
    }

    /// Leaves the registration to the device, which never ends it.
    #[cold]
    pub(crate) fn abandon(self) {
        warn_log!(
            Mr,
            "a message is being read by a peer; its registration remains"
        );
        std::mem::forget(self);
    }
}

/// Registers the sources of one endpoint. Not thread safe.
#[derive(Debug)]
pub(crate) struct SourceKeys {
    pd: Arc<Pd>,
    /// The device registers on demand without a call of the kernel.
    at_once: bool,
    recent: RecentSources,
    /// Those of sinks.
    sinks: RecentSources,
    /// A registration whose place another one has, and that a peer reads.
    replaced: Option<Withdrawn>,
    cache: Option<Arc<SourceCache>>,
    /// Number of consecutive failures with `ENOMEM`, and of sources that are not registered before
    /// the next attempt.
    failures: u32,
    skipped: u32,
}

impl SourceKeys {
    /// May open the domain's cache, which starts the monitor's thread.
    pub(crate) fn new(domain: &MrDomain, pd: &Arc<Pd>) -> Self {
        let device = domain.device();
        let at_once = device.backend().registers_without_kernel
            && device.behaviour().is_ok_and(|seen| seen.odp.works());
        let cache = match at_once {
            true => None,
            false => domain.source_cache(pd),
        };
        Self {
            pd: Arc::clone(pd),
            at_once,
            recent: RecentSources::new(),
            sinks: RecentSources::new(),
            replaced: None,
            cache,
            failures: 0,
            skipped: 0,
        }
    }

    /// Registers a source of at least one byte for remote read.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`. `ENOMEM` also for the next sources, 1 to 1,024 of them, because
    /// the failure of a registration takes as long as its pages are pinned.
    ///
    /// # Safety
    /// The caller does not free the buffer before it releases the source.
    #[inline]
    pub(crate) unsafe fn register(&mut self, iov: &libc::iovec) -> Result<Source> {
        if let Some(recent) = self.recent.find(range_of(iov)) {
            return Ok(Source(Kept::Recent(Arc::clone(recent))));
        }
        // SAFETY: as this function.
        unsafe { self.register_new(iov) }
    }

    unsafe fn register_new(&mut self, iov: &libc::iovec) -> Result<Source> {
        if self.skipped != 0 {
            self.skipped -= 1;
            return Err(FiErrno::ENOMEM);
        }
        // SAFETY: as this function.
        let source = unsafe { self.make(iov) };
        match &source {
            Ok(_) => self.failures = 0,
            Err(FiErrno::ENOMEM) => self.pause(iov.iov_len),
            Err(_) => {}
        }
        source
    }

    /// Registers a part of a receive for remote write.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the device does not register on demand without a call of the kernel. Those of
    /// `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// The caller does not free the buffer before the sink has ended, or its sender has stated that
    /// it has written.
    #[inline]
    pub(crate) unsafe fn open_sink(&mut self, iov: &libc::iovec) -> Result<Sink> {
        if let Some(recent) = self.sinks.find(range_of(iov)) {
            return Ok(Sink(Arc::clone(recent)));
        }
        // SAFETY: as this function.
        unsafe { self.open_new_sink(iov) }
    }

    unsafe fn open_new_sink(&mut self, iov: &libc::iovec) -> Result<Sink> {
        if !self.at_once {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let rights =
            sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_ON_DEMAND;
        // SAFETY: as this function. If the registration stays longer, the device does not access the
        // memory by itself, and a peer writes only what a receive has asked for.
        let mr = unsafe { Mr::register(&self.pd, iov.iov_base, iov.iov_len, rights) }?;
        let stays = !mr.is_in_device_memory();
        let recent = Recent::new(mr, range_of(iov));
        if stays {
            let replaced = self.sinks.keep(&recent);
            self.end_replaced(replaced);
        }
        Ok(Sink(recent))
    }

    /// Releases the sink of a receive whose sender has written it. Does not wait: `Some` is to be
    /// ended by a thread that may.
    #[inline]
    pub(crate) fn release_sink(&self, sink: Sink) -> Option<Withdrawn> {
        last(sink.0)
    }

    #[cold]
    fn pause(&mut self, len: usize) {
        if self.failures == 0 {
            info_log!(
                Mr,
                "{len} bytes cannot be registered for remote read: no memory; \
                 the receiver asks for them in parts"
            );
        }
        self.skipped = 1 << self.failures.min(MAX_PAUSE);
        self.failures = self.failures.saturating_add(1);
    }

    unsafe fn make(&mut self, iov: &libc::iovec) -> Result<Source> {
        let Some(cache) = &self.cache else {
            let on_demand = match self.at_once {
                true => sys::IBV_ACCESS_ON_DEMAND,
                false => 0,
            };
            let rights = sys::IBV_ACCESS_REMOTE_READ | on_demand;
            // SAFETY: the caller keeps the buffer. If the registration stays longer, the device
            // does not access the memory by itself, and the kernel checks the accesses of peers.
            let mr = unsafe { Mr::register(&self.pd, iov.iov_base, iov.iov_len, rights) }?;
            if !self.at_once || mr.is_in_device_memory() {
                return Ok(once(mr));
            }
            return Ok(Source(Kept::Recent(self.keep(mr, iov))));
        };
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        let known = cache.find(addr, addr.saturating_add(len), false, None);
        let held = match known {
            Some(held) => held,
            // SAFETY: the caller keeps the buffer until it releases the registration.
            None => match unsafe { cache.get(addr, len, false) }? {
                Got::Kept(held) => held,
                Got::Once(mr, _) => return Ok(once(mr)),
            },
        };
        Ok(Source(Kept::Cached(Box::new(held))))
    }

    /// Keeps a registration for later sources.
    fn keep(&mut self, mr: Mr, iov: &libc::iovec) -> Arc<Recent> {
        let recent = Recent::new(mr, range_of(iov));
        let replaced = self.recent.keep(&recent);
        self.end_replaced(replaced);
        recent
    }

    /// Ends a registration whose place another one has, when no operation uses it.
    fn end_replaced(&mut self, replaced: Option<Arc<Recent>>) {
        if let Some(old) = replaced.and_then(last)
            && let Some(busy) = self.replaced.replace(old)
        {
            // the caller has not taken it
            busy.abandon();
        }
    }

    /// A registration that was replaced by the last [`Self::register`] or [`Self::open_sink`] and is
    /// to be ended by a thread that may wait, because a peer uses it.
    #[inline]
    pub(crate) fn replaced(&mut self) -> Option<Withdrawn> {
        self.replaced.take()
    }

    /// All registrations that are kept for later sources and sinks; the endpoint is closed.
    pub(crate) fn take_recent(&mut self) -> impl Iterator<Item = Withdrawn> {
        let recent = self.recent.take().chain(self.sinks.take());
        recent.map(|recent| Withdrawn(Ends::Recent(recent)))
    }

    /// Releases the source of a message that the receiver has ended. Does not wait: `Some` is to be
    /// ended by a thread that may.
    #[inline]
    pub(crate) fn release(&self, source: Source) -> Option<Withdrawn> {
        match source.0 {
            Kept::Recent(recent) => last(recent),
            Kept::Once(mr) => {
                let withdrawn = Withdrawn(Ends::Once(mr));
                match self.at_once {
                    true => withdrawn.end().err(),
                    false => Some(withdrawn),
                }
            }
            Kept::Cached(held) => {
                let cache = self.cache.as_ref()?;
                cache.release(&held);
                if cache.has_zombies() {
                    cache.drain();
                }
                None
            }
        }
    }

    /// Releases the source of a message that has failed. Later sources do not use its registration.
    pub(crate) fn withdraw(&mut self, source: Source) -> Option<Withdrawn> {
        match source.0 {
            Kept::Recent(recent) => {
                self.recent.forget(&recent);
                Some(Withdrawn(Ends::Recent(recent)))
            }
            Kept::Once(mr) => Some(Withdrawn(Ends::Once(mr))),
            Kept::Cached(held) => {
                let cache = Arc::clone(self.cache.as_ref()?);
                Some(Withdrawn(Ends::Cached(held, cache)))
            }
        }
    }
}

fn range_of(iov: &libc::iovec) -> (u64, usize) {
    (iov.iov_base as u64, iov.iov_len)
}

fn once(mr: Mr) -> Source {
    Source(Kept::Once(Box::new(mr)))
}

/// Ends a registration if nothing else refers to it. Returns it if a peer uses it.
#[inline]
fn last(recent: Arc<Recent>) -> Option<Withdrawn> {
    // a reference is only taken under the endpoint's lock, as this function is called
    match Arc::strong_count(&recent) {
        1 => Withdrawn(Ends::Recent(recent)).end().err(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::verbs::Buf;

    fn domain() -> Arc<Domain> {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        Domain::open(&device, DomainConfig::default()).unwrap()
    }

    fn register(keys: &mut SourceKeys, bytes: &[u8]) -> Source {
        let iov = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        // SAFETY: the tests keep the bytes.
        unsafe { keys.register(&iov) }.unwrap()
    }

    /// Keys that keep registrations: not if the device pins, as some runs of the tests have it.
    fn keeping(domain: &Domain) -> Option<SourceKeys> {
        let keys = SourceKeys::new(domain.mr(), domain.pd());
        let pins = std::env::var_os("SOFTVERBS_ODP").is_some_and(|value| value == "0");
        assert_eq!(keys.at_once, !pins);
        keys.at_once.then_some(keys)
    }

    fn uses(keys: &SourceKeys, source: &Source) -> usize {
        match &source.0 {
            Kept::Recent(recent) => {
                let table = keys.recent.find(recent.range()).is_some();
                Arc::strong_count(recent) - usize::from(table)
            }
            _ => 0,
        }
    }

    #[test]
    fn sources_of_one_range_share_a_registration_until_it_is_withdrawn() {
        let domain = domain();
        let Some(mut keys) = keeping(&domain) else {
            return;
        };
        let bytes = vec![1; 1 << 14];
        let (first, second) = (register(&mut keys, &bytes), register(&mut keys, &bytes));
        assert_eq!((first.rkey(), uses(&keys, &first)), (second.rkey(), 2));
        let other = register(&mut keys, &bytes[1..]);
        assert_ne!(other.rkey(), first.rkey());
        assert!(keys.release(other).is_none());
        let key = first.rkey();
        assert!(keys.release(first).is_none());
        let again = register(&mut keys, &bytes);
        assert_eq!((again.rkey(), uses(&keys, &again)), (key, 2));
        // an operation fails: later ones have another key, and the earlier one has none
        assert!(keys.withdraw(again).unwrap().end().is_ok());
        let fresh = register(&mut keys, &bytes);
        assert_ne!(fresh.rkey(), key);
        assert!(keys.release(second).is_none());
        assert!(keys.release(fresh).is_none());
        for withdrawn in keys.take_recent().collect::<Vec<_>>() {
            assert!(withdrawn.end().is_ok());
        }
    }

    #[test]
    fn a_sink_stays_until_it_is_ended() {
        let domain = domain();
        let Some(mut keys) = keeping(&domain) else {
            return;
        };
        let bytes = vec![1; 1 << 14];
        let open = |keys: &mut SourceKeys| {
            let iov = libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            };
            // SAFETY: nobody writes the bytes.
            unsafe { keys.open_sink(&iov) }.unwrap()
        };
        let first = open(&mut keys);
        let key = first.rkey();
        assert!(keys.release_sink(first).is_none());
        let (second, third) = (open(&mut keys), open(&mut keys));
        assert_eq!((second.rkey(), third.rkey()), (key, key));
        // a source of the same bytes has a key of its own
        let source = register(&mut keys, &bytes);
        assert_ne!(source.rkey(), key);
        // its sender does not write: no later receive has this key
        assert!(second.end().is_ok());
        let fresh = open(&mut keys);
        assert_ne!(fresh.rkey(), key);
        assert!(keys.release_sink(third).is_none());
        let again = open(&mut keys);
        assert_eq!(again.rkey(), fresh.rkey());
        for sink in [fresh, again] {
            assert!(keys.release_sink(sink).is_none());
        }
        assert!(keys.release(source).is_none());
        let kept: Vec<_> = keys.take_recent().collect();
        assert_eq!(kept.len(), 2);
        assert!(kept.into_iter().all(|it| it.end().is_ok()));
    }

    #[test]
    fn a_registration_that_is_replaced_ends_with_its_last_operation() {
        let domain = domain();
        let Some(mut keys) = keeping(&domain) else {
            return;
        };
        let bytes = vec![1; 1 << 20];
        let first = register(&mut keys, &bytes[..1]);
        let Kept::Recent(recent) = &first.0 else {
            panic!("{first:?}");
        };
        let recent = Arc::clone(recent);
        // as many as have no place besides each other, whatever their places are
        for len in 2..1 << 14 {
            let source = register(&mut keys, &bytes[..len]);
            assert!(keys.release(source).is_none() && keys.replaced().is_none());
        }
        assert!(keys.recent.find(recent.range()).is_none());
        assert!(recent.is_registered());
        drop(recent);
        let Kept::Recent(recent) = &first.0 else {
            panic!("{first:?}");
        };
        let weak = Arc::downgrade(recent);
        assert!(keys.release(first).is_none());
        assert!(weak.upgrade().is_none());
    }

    /// A buffer of the device stays reachable by a registration after other memory is at its
    /// addresses.
    #[test]
    fn memory_of_the_device_is_registered_for_one_message() {
        let domain = domain();
        let mut keys = SourceKeys::new(domain.mr(), domain.pd());
        let buf = Buf::alloc(domain.pd(), 1 << 14);
        // SAFETY: the buffer has these bytes.
        let bytes = unsafe { std::slice::from_raw_parts(buf.addr, 1 << 14) };
        let source = register(&mut keys, bytes);
        assert!(!matches!(source.0, Kept::Recent(_)));
        assert!(keys.release(source).is_none_or(|it| it.end().is_ok()));
    }
}
