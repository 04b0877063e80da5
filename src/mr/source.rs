//! Registrations of sources that peers read: of messages that a receiver fetches by READ.
//!
//! Each source is registered by itself, on demand, if the device does so without a call of the
//! kernel. Otherwise it uses a cache of its own (`docs/registration-cache.md`). A descriptor of the
//! application is not used: its region has more bytes than the message, and other rights.

#![allow(unsafe_code, reason = "registers buffers of the application")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::cache::{Got, Held};
use super::{MrDomain, SourceCache};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{Mr, Pd, Rkey};

/// Binary logarithm of the largest number of sources that are not registered after `ENOMEM`.
const MAX_PAUSE: u32 = 10;

/// The registration of one source. To be released by [`SourceKeys::release`] or
/// [`SourceKeys::withdraw`]; otherwise a cached registration is never deregistered.
#[derive(Debug)]
pub(crate) struct Source {
    rkey: Rkey,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    /// A registration of this source alone.
    Once(Mr),
    /// A reference to a cached registration.
    Cached(Held<Rkey>),
}

impl Source {
    /// The key for peers.
    pub(crate) fn rkey(&self) -> Rkey {
        self.rkey
    }
}

/// A source that no peer may read any more, and whose registration has not ended.
#[derive(Debug)]
pub(crate) struct Withdrawn(Ends);

#[derive(Debug)]
enum Ends {
    Once(Mr),
    Cached(Held<Rkey>, Arc<SourceCache>),
}

impl Withdrawn {
    /// Ends the registration, so that no peer reads the source when this has succeeded. The
    /// registration of one message does not wait for a READ that is being executed (softverbs);
    /// a cached one does, as `ibv_dereg_mr(3)`, unless other operations use it: then the caller has
    /// ended the peer's queue pairs before.
    ///
    /// # Errors
    /// The source itself: a READ is being executed, and no other one can begin. The caller repeats
    /// the call.
    pub(crate) fn end(self) -> std::result::Result<(), Self> {
        match self.0 {
            Ends::Once(mr) => mr.deregister_now().map_err(|mr| Self(Ends::Once(mr))),
            Ends::Cached(held, cache) => {
                cache.retire(held);
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
    pub(crate) unsafe fn register(&mut self, iov: &libc::iovec) -> Result<Source> {
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

    unsafe fn make(&self, iov: &libc::iovec) -> Result<Source> {
        let Some(cache) = &self.cache else {
            let on_demand = match self.at_once {
                true => sys::IBV_ACCESS_ON_DEMAND,
                false => 0,
            };
            let rights = sys::IBV_ACCESS_REMOTE_READ | on_demand;
            // SAFETY: the caller keeps the buffer.
            let mr = unsafe { Mr::register(&self.pd, iov.iov_base, iov.iov_len, rights) }?;
            return Ok(once(mr));
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
        Ok(Source {
            rkey: held.key,
            kept: Kept::Cached(held),
        })
    }

    /// Releases the source of a message that the receiver has ended. Does not wait: `Some` is to be
    /// ended by a thread that may.
    pub(crate) fn release(&self, source: Source) -> Option<Withdrawn> {
        match (source.kept, &self.cache) {
            (Kept::Once(mr), _) => {
                let withdrawn = Withdrawn(Ends::Once(mr));
                match self.at_once {
                    true => withdrawn.end().err(),
                    false => Some(withdrawn),
                }
            }
            (Kept::Cached(held), Some(cache)) => {
                cache.release(&held);
                if cache.has_zombies() {
                    cache.drain();
                }
                None
            }
            (Kept::Cached(_), None) => None,
        }
    }

    /// Releases the source of a message that has failed.
    pub(crate) fn withdraw(&self, source: Source) -> Option<Withdrawn> {
        match source.kept {
            Kept::Once(mr) => Some(Withdrawn(Ends::Once(mr))),
            Kept::Cached(held) => {
                let cache = Arc::clone(self.cache.as_ref()?);
                Some(Withdrawn(Ends::Cached(held, cache)))
            }
        }
    }
}

fn once(mr: Mr) -> Source {
    Source {
        rkey: mr.rkey(),
        kept: Kept::Once(mr),
    }
}
