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
use super::recent::{Range, Recent, RecentKey, RecentKeys};
use super::{MrDomain, SourceCache};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{Mr, Pd, Rkey};

/// Binary logarithm of the largest number of sources that are not registered after `ENOMEM`.
const MAX_PAUSE: u32 = 10;

/// The registration of one source, or of a sink. To be released by [`SourceKeys::release`] or
/// [`SourceKeys::withdraw`]; otherwise a registration that others use too is never deregistered.
#[derive(Debug)]
pub(crate) struct Source {
    rkey: Rkey,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    /// A registration that later sources, or sinks, of the same range use too.
    Recent(RecentKey),
    /// A registration of this source alone.
    Once(Box<Mr>),
    /// A reference to a cached registration.
    Cached(Box<Held<Rkey>>),
}

impl Source {
    /// The key for peers.
    #[inline]
    pub(crate) const fn rkey(&self) -> Rkey {
        self.rkey
    }
}

/// A source that no peer may use any more, and whose registration has not ended.
#[derive(Debug)]
pub(crate) struct Withdrawn(Ends);

#[derive(Debug)]
enum Ends {
    /// A peer uses it as long as the value is `true`.
    #[cfg(test)]
    Used(Arc<std::sync::atomic::AtomicBool>),
    Recent(Arc<Recent>),
    Once(Box<Mr>),
    Cached(Box<Held<Rkey>>, Arc<SourceCache>),
}

impl Withdrawn {
    /// Ends the registration, so that no peer accesses the source or sink when this has succeeded.
    /// The registration of one message does not wait for a READ or WRITE that is being executed
    /// (softverbs), nor does one that later messages would have used: those of these are refused. A
    /// cached one waits, as `ibv_dereg_mr(3)`, unless other operations use it: then the caller has
    /// ended the peer's queue pairs before.
    ///
    /// # Errors
    /// The source itself: a READ or a WRITE is being executed, and no other one can begin. The
    /// caller repeats the call.
    pub(crate) fn end(self) -> std::result::Result<(), Self> {
        match self.0 {
            #[cfg(test)]
            Ends::Used(used) => match used.load(std::sync::atomic::Ordering::Relaxed) {
                true => Err(Self(Ends::Used(used))),
                false => Ok(()),
            },
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

    /// One that a peer uses as long as the value is `true`.
    #[cfg(test)]
    pub(crate) fn of_test(used: &Arc<std::sync::atomic::AtomicBool>) -> Self {
        Self(Ends::Used(Arc::clone(used)))
    }

    /// Leaves the registration to the device, which never ends it.
    #[cold]
    pub(crate) fn abandon(self) {
        warn_log!(
            Mr,
            "a message or a receive is being accessed by a peer; its registration remains"
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
    recent: RecentKeys,
    /// A registration whose place another one has, and that a peer uses.
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
            recent: RecentKeys::new(),
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
    #[inline(always)]
    pub(crate) unsafe fn register(&mut self, iov: &libc::iovec) -> Result<Source> {
        if let Some(found) = self.find(iov, false) {
            return Ok(found);
        }
        // SAFETY: as this function.
        unsafe { self.register_new(iov) }
    }

    #[inline(always)]
    fn find(&mut self, iov: &libc::iovec, written: bool) -> Option<Source> {
        let (key, rkey) = self.recent.find(range_of(iov, written))?;
        let kept = Kept::Recent(key);
        Some(Source { rkey, kept })
    }

    #[inline(never)]
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

    /// Registers a part of a receive, a sink, for remote write.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the device does not register on demand without a call of the kernel. Those of
    /// `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// The caller does not free the buffer before it releases the sink, because its sender has
    /// stated that it has written, or the withdrawn sink has ended.
    #[inline]
    pub(crate) unsafe fn open_sink(&mut self, iov: &libc::iovec) -> Result<Source> {
        if let Some(found) = self.find(iov, true) {
            return Ok(found);
        }
        // SAFETY: as this function.
        unsafe { self.open_new_sink(iov) }
    }

    unsafe fn open_new_sink(&mut self, iov: &libc::iovec) -> Result<Source> {
        if !self.at_once {
            return Err(FiErrno::EOPNOTSUPP);
        }
        let rights =
            sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_ON_DEMAND;
        // SAFETY: as this function. If the registration stays longer, the device does not access
        // the memory by itself, and a peer writes only what a receive has asked for.
        let mr = unsafe { Mr::register(&self.pd, iov.iov_base, iov.iov_len, rights) }?;
        Ok(match mr.is_in_device_memory() {
            true => once(mr),
            false => self.keep(mr, range_of(iov, true)),
        })
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
            return Ok(self.keep(mr, range_of(iov, false)));
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
        let rkey = held.key;
        let kept = Kept::Cached(Box::new(held));
        Ok(Source { rkey, kept })
    }

    /// Keeps a registration for later sources or sinks.
    fn keep(&mut self, mr: Mr, range: Range) -> Source {
        let rkey = mr.rkey();
        let (key, replaced) = self.recent.keep(mr, range);
        if let Some(old) = replaced.and_then(ended)
            && let Some(busy) = self.replaced.replace(old)
        {
            // the caller has not taken it
            busy.abandon();
        }
        let kept = Kept::Recent(key);
        Source { rkey, kept }
    }

    /// A registration that was replaced by the last [`Self::register`] or [`Self::open_sink`] and
    /// is to be ended by a thread that may wait, because a peer uses it.
    #[inline]
    pub(crate) fn replaced(&mut self) -> Option<Withdrawn> {
        self.replaced.take()
    }

    /// All registrations that are kept for later sources and sinks; the endpoint is closed.
    pub(crate) fn take_recent(&mut self) -> impl Iterator<Item = Withdrawn> {
        self.recent
            .take()
            .map(|recent| Withdrawn(Ends::Recent(recent)))
    }

    /// Releases the source of a message that the receiver has ended, or a sink that the sender has
    /// written. Does not wait: `Some` is to be ended by a thread that may.
    #[inline(always)]
    pub(crate) fn release(&mut self, source: Source) -> Option<Withdrawn> {
        match source.kept {
            Kept::Recent(key) => self.recent.release(key).and_then(ended),
            kept => self.release_other(kept),
        }
    }

    #[inline(never)]
    fn release_other(&mut self, kept: Kept) -> Option<Withdrawn> {
        match kept {
            Kept::Recent(key) => self.recent.release(key).and_then(ended),
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

    /// Releases the source of a message that has failed, or a sink that its sender does not write.
    /// Later ones do not use its registration.
    pub(crate) fn withdraw(&mut self, source: Source) -> Option<Withdrawn> {
        match source.kept {
            Kept::Recent(key) => {
                let recent = self.recent.withdraw(key)?;
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

fn range_of(iov: &libc::iovec, written: bool) -> Range {
    Range {
        addr: iov.iov_base as u64,
        len: iov.iov_len,
        written,
    }
}

fn once(mr: Mr) -> Source {
    let rkey = mr.rkey();
    let kept = Kept::Once(Box::new(mr));
    Source { rkey, kept }
}

/// Ends a registration that nothing else uses. Returns it if a peer uses it.
fn ended(recent: Arc<Recent>) -> Option<Withdrawn> {
    Withdrawn(Ends::Recent(recent)).end().err()
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

    fn iov_of(bytes: &[u8]) -> libc::iovec {
        libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        }
    }

    fn register(keys: &mut SourceKeys, bytes: &[u8]) -> Source {
        // SAFETY: the tests keep the bytes.
        unsafe { keys.register(&iov_of(bytes)) }.unwrap()
    }

    /// Keys that keep registrations: not if the device pins, as some runs of the tests have it.
    fn keeping(domain: &Domain) -> Option<SourceKeys> {
        let keys = SourceKeys::new(domain.mr(), domain.pd());
        let pins = std::env::var_os("SOFTVERBS_ODP").is_some_and(|value| value == "0");
        assert_eq!(keys.at_once, !pins);
        keys.at_once.then_some(keys)
    }

    fn uses(keys: &SourceKeys, source: &Source) -> u32 {
        match &source.kept {
            Kept::Recent(key) => keys.recent.uses(key).1,
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
        // one that does not replace the first, which depends on where the bytes are
        let place = |bytes| RecentKeys::place(range_of(&iov_of(bytes), false));
        let other = (1..100).map(|at| &bytes[at..]);
        let other = other.into_iter().find(|it| place(it) != place(&bytes));
        let other = register(&mut keys, other.unwrap());
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
            // SAFETY: no thread writes the bytes.
            unsafe { keys.open_sink(&iov) }.unwrap()
        };
        let first = open(&mut keys);
        let key = first.rkey();
        assert!(keys.release(first).is_none());
        let (second, third) = (open(&mut keys), open(&mut keys));
        assert_eq!((second.rkey(), third.rkey()), (key, key));
        // a source of the same bytes has a key of its own
        let source = register(&mut keys, &bytes);
        assert_ne!(source.rkey(), key);
        // its sender does not write: no later receive has this key
        assert!(keys.withdraw(second).unwrap().end().is_ok());
        let fresh = open(&mut keys);
        assert_ne!(fresh.rkey(), key);
        assert!(keys.release(third).is_none());
        let again = open(&mut keys);
        assert_eq!(again.rkey(), fresh.rkey());
        for sink in [fresh, again] {
            assert!(keys.release(sink).is_none());
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
        let Kept::Recent(key) = &first.kept else {
            panic!("{first:?}");
        };
        let (recent, _) = keys.recent.uses(key);
        let range = Range {
            addr: bytes.as_ptr() as u64,
            len: 1,
            written: false,
        };
        assert!(keys.recent.has(range));
        // more ranges than there are places, whatever the place of each range is
        for len in 2..1 << 14 {
            let source = register(&mut keys, &bytes[..len]);
            assert!(keys.release(source).is_none() && keys.replaced().is_none());
        }
        assert!(!keys.recent.has(range));
        assert!(recent.is_registered());
        assert!(keys.release(first).is_none());
        assert!(!recent.is_registered());
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
        assert!(!matches!(source.kept, Kept::Recent(_)));
        assert!(keys.release(source).is_none_or(|it| it.end().is_ok()));
    }
}
