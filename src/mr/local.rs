//! The lkeys of local buffers: from descriptors or, without `FI_MR_LOCAL`, from registrations of
//! the engine.
//!
//! A buffer without a descriptor uses the domain's implicit on-demand region if the device supports
//! it, otherwise a registration of the cache (`docs/registration-cache.md`), otherwise a
//! registration for this operation only. The latter two are held until the operation is complete
//! and a later operation of the same direction is posted, or until the endpoint is closed. So are
//! the registrations of regions whose pages may change: a refresh must not end one that an
//! operation uses.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::collections::VecDeque;
use std::sync::Arc;

use rdma_core_sys as sys;

use super::MrDomain;
use super::registration::InUse;
use crate::errno::Result;
use crate::mr::cache::{Got, Held};
use crate::mr::{Desc, DescRule, DescScope, LocalCache};
use crate::verbs::{Lkey, Mr, Pd};

/// The device's access to a local buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// The device reads the buffer: the source of sends and writes.
    Source,
    /// The device writes the buffer: receives, results of reads.
    Sink,
}

/// The registration of an operation's buffer.
#[derive(Debug)]
pub(crate) enum Kept {
    /// A registration for this operation.
    Once {
        /// Deregistered when it is dropped.
        _mr: Mr,
    },
    /// A reference to a cached registration.
    Cached(Held),
    /// The use of a registration that a refresh may replace.
    Region(InUse),
}

/// Length in bytes up to which copying takes less time than the system call that checks whether a
/// cached registration is current (300 to 600 ns). `docs/registration-cache.md` has the
/// measurements.
pub(crate) const COPIED: usize = 8192;

/// The lkeys of one direction of an endpoint. Not thread safe: the posting thread holds that
/// direction's lock.
#[derive(Debug)]
pub(crate) struct LocalKeys {
    rule: DescRule,
    scope: DescScope,
    /// The lkey of the domain's implicit region.
    implicit: Option<Lkey>,
    cache: Option<Arc<LocalCache>>,
    /// Length in bytes up to which sources are copied instead of looked up in the cache.
    copied: usize,
    /// Registrations of the operation that is being posted.
    taken: Vec<Kept>,
    /// Whether that operation also uses the last registration of `held`.
    reused: bool,
    /// Registrations of outstanding operations, oldest first, each with the number of the last
    /// request that uses it. A cached registration that is last in the list stays after completion,
    /// so that repeated posts of one buffer do not change the registration's shared reference
    /// count.
    held: VecDeque<(u32, Kept)>,
}

impl LocalKeys {
    pub(crate) fn new(domain: &MrDomain, pd: &Arc<Pd>) -> Self {
        let cache = domain.local_cache(pd);
        // only for weft's own monitor; an application's monitor has other costs
        let asks = |cache: &Arc<LocalCache>| domain.config().cache.check && !cache.is_foreign();
        let copies = cache.as_ref().is_some_and(asks);
        Self {
            copied: if copies { COPIED } else { 0 },
            rule: domain.config().form.desc,
            scope: DescScope::new(domain, pd),
            implicit: domain.implicit_lkey(pd),
            cache,
            taken: Vec::new(),
            reused: false,
            held: VecDeque::new(),
        }
    }

    /// Whether buffers without descriptors must be registered before use. Callers copy short
    /// sources instead.
    #[inline]
    pub(crate) fn must_register(&self, has_descriptors: bool) -> bool {
        match self.rule {
            DescRule::Required => false,
            DescRule::Optional if has_descriptors => false,
            _ => self.implicit.is_none(),
        }
    }

    /// Length in bytes up to which sources that [must be registered](Self::must_register) are
    /// copied although a cached registration may exist.
    #[inline]
    pub(crate) fn copied(&self) -> usize {
        self.copied
    }

    /// Whether sources are copied up to [`Self::copied`] bytes.
    pub(crate) fn copies(&self) -> bool {
        self.copied != 0 && self.must_register(false)
    }

    /// The lkey of a buffer of at least one byte. After a cache miss, or without a cache, registers
    /// the buffer, which blocks and allocates.
    ///
    /// # Errors
    /// `EINVAL`: a required descriptor is invalid. Those of registering: `EFAULT`, `ENOMEM`.
    ///
    /// # Safety
    /// Where the domain's rule reads `desc`, it is NULL or the descriptor of an open region. The
    /// caller does not free the buffer before the operation is complete.
    #[inline(always)]
    pub(crate) unsafe fn lkey(&mut self, desc: Desc, iov: &libc::iovec, to: Use) -> Result<Lkey> {
        match self.rule {
            // SAFETY: as this function.
            DescRule::Required => unsafe { self.of_descriptor(desc, iov) },
            // SAFETY: as this function.
            DescRule::Optional if !desc.0.is_null() => unsafe { self.of_descriptor(desc, iov) },
            _ => match self.implicit {
                Some(lkey) => Ok(lkey),
                // SAFETY: as this function.
                None => unsafe { self.registered(iov, to) },
            },
        }
    }

    /// Whether a buffer with this descriptor may be accessed without a registration, by a device
    /// that can do that.
    #[inline]
    pub(crate) fn may_be_unregistered(&self, desc: Desc) -> bool {
        match self.rule {
            DescRule::Required => false,
            DescRule::Optional => desc.0.is_null(),
            _ => true,
        }
    }

    /// The lkey of a buffer by its descriptor. For an operation that is complete when it is posted,
    /// the caller calls [`Self::release_taken`] behind it.
    ///
    /// # Errors
    /// `EINVAL`: the descriptor is invalid.
    ///
    /// # Safety
    /// `desc` is NULL or the descriptor of an open region.
    #[inline(always)]
    pub(crate) unsafe fn of_descriptor(&mut self, desc: Desc, iov: &libc::iovec) -> Result<Lkey> {
        let Self { scope, taken, .. } = self;
        // SAFETY: as this function.
        unsafe { desc.lkey(scope, iov, |used| taken.push(Kept::Region(used))) }
    }

    /// The lkey of a cached registration, or else of a new one.
    #[inline]
    unsafe fn registered(&mut self, iov: &libc::iovec, to: Use) -> Result<Lkey> {
        if let Some(cache) = &self.cache {
            let start = iov.iov_base as u64;
            let end = start.saturating_add(iov.iov_len as u64);
            let last = match self.held.back() {
                Some((_, Kept::Cached(held))) => Some(held),
                _ => None,
            };
            if let Some(found) = cache.find(start, end, to == Use::Sink, last) {
                if last == Some(&found) {
                    self.reused = true;
                } else {
                    self.taken.push(Kept::Cached(found));
                }
                return Ok(found.key);
            }
        }
        // SAFETY: as this function.
        unsafe { self.register(iov, to) }
    }

    #[cold]
    unsafe fn register(&mut self, iov: &libc::iovec, to: Use) -> Result<Lkey> {
        let (kept, lkey) = if let Some(cache) = &self.cache {
            let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
            // SAFETY: the caller keeps the buffer valid; `LocalKeys` holds the registration until
            // the operation is complete.
            match unsafe { cache.get(addr, len, to == Use::Sink) }? {
                Got::Kept(held) => (Kept::Cached(held), held.key),
                Got::Once(mr, lkey) => (Kept::Once { _mr: mr }, lkey),
            }
        } else {
            let rights = match to {
                Use::Source => 0,
                Use::Sink => sys::IBV_ACCESS_LOCAL_WRITE,
            };
            // SAFETY: the caller keeps the buffer valid; `LocalKeys` holds the registration until
            // the operation is complete.
            let mr = unsafe { Mr::register(&self.scope.pd, iov.iov_base, iov.iov_len, rights) }?;
            let lkey = mr.lkey();
            (Kept::Once { _mr: mr }, lkey)
        };
        self.taken.push(kept);
        Ok(lkey)
    }

    /// Records that the operation was posted as request `number`; requests before `tail` are
    /// complete.
    #[inline]
    pub(crate) fn posted(&mut self, number: u32, tail: u32) {
        if !self.held.is_empty() || !self.taken.is_empty() {
            self.turn_over(number, tail);
        }
    }

    fn turn_over(&mut self, number: u32, tail: u32) {
        if std::mem::take(&mut self.reused)
            && let Some((last, _)) = self.held.back_mut()
        {
            *last = number;
        }
        if self.taken.len() == 1
            && let Some(kept) = self.taken.pop()
        {
            // fast path: one registration; avoids the cost of extending the list
            if let Kept::Region(used) = &kept
                && let Some((last, Kept::Region(before))) = self.held.back_mut()
                && used.is_same(before)
            {
                *last = number;
            } else {
                self.held.push_back((number, kept));
            }
        } else {
            self.held
                .extend(self.taken.drain(..).map(|kept| (number, kept)));
        }
        // A registration that stays after completion: its number would be compared with those of
        // requests 2^31 later, from which on it would count as not complete.
        if self.held.len() == 1
            && let Some((oldest, Kept::Cached(_))) = self.held.front_mut()
            && is_before(*oldest, tail)
        {
            *oldest = tail.wrapping_sub(1);
        }
        while let Some((oldest, kept)) = self.held.front()
            && is_before(*oldest, tail)
            && (self.held.len() > 1 || !matches!(kept, Kept::Cached(_)))
        {
            if let Some((_, kept)) = self.held.pop_front() {
                self.give_back(kept);
            }
        }
        self.tidy();
    }

    /// Deregisters the cache's dead registrations, if any.
    #[inline]
    fn tidy(&self) {
        if let Some(cache) = &self.cache
            && cache.has_zombies()
        {
            cache.drain();
        }
    }

    #[inline]
    fn give_back(&self, kept: Kept) {
        if let (Kept::Cached(held), Some(cache)) = (kept, &self.cache) {
            cache.release(&held);
        }
    }

    /// For a caller whose operations complete out of order: exchanges the registrations of an
    /// operation that is complete for those of the operation that was just posted.
    #[inline]
    pub(crate) fn exchange(&mut self, complete: &mut Vec<Kept>) {
        std::mem::swap(&mut self.taken, complete);
        self.release_taken();
        self.tidy();
    }

    /// Whether the operation that was just posted uses a registration.
    #[inline]
    pub(crate) fn has_taken(&self) -> bool {
        !self.taken.is_empty()
    }

    /// Releases the registrations that were taken since the last call of [`Self::posted`]: those of
    /// an operation that was not posted, or is complete.
    #[inline]
    pub(crate) fn release_taken(&mut self) {
        self.reused = false;
        while let Some(kept) = self.taken.pop() {
            self.give_back(kept);
        }
    }
}

impl Drop for LocalKeys {
    fn drop(&mut self) {
        self.release_taken();
        while let Some((_, kept)) = self.held.pop_front() {
            self.give_back(kept);
        }
        self.tidy();
    }
}

/// Whether request `number` precedes request `tail`, from which it is less than 2^31 requests away.
#[inline]
fn is_before(number: u32, tail: u32) -> bool {
    (tail.wrapping_sub(number) as i32) > 0
}

/// Registers the whole address space on demand, for local use.
///
/// # Errors
/// Those of the device, if it does not support this.
pub(crate) fn implicit_region(pd: &Arc<Pd>) -> Result<Mr> {
    let rights = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_ON_DEMAND;
    // In verbs, address 0 with the maximum length is the whole address space.
    // SAFETY: no memory is accessed before an operation names it, and that operation's caller keeps
    // its buffers valid; peers have no access right to the region.
    unsafe { Mr::register(pd, std::ptr::null(), usize::MAX, rights) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::mr::{Form, LocalMemory, Mode, MrConfig, monitor, tests};

    /// A cached registration that stays after its completion is released at the next use of another
    /// one, however many requests without a registration are between the two.
    #[test]
    #[allow(unsafe_code, reason = "looks up lkeys")]
    fn what_stays_is_released_after_any_number_of_requests() {
        const LEN: usize = 1 << 16;
        if !monitor::tests::available() {
            return;
        }
        let config = DomainConfig {
            mr: MrConfig {
                form: Form::new(Mode::ALLOCATED, false),
                local: LocalMemory::Cached,
                ..MrConfig::default()
            },
            ..DomainConfig::default()
        };
        let domain = Domain::open(&tests::device(), config).unwrap();
        let mut keys = LocalKeys::new(domain.mr(), domain.pd());
        let memory = vec![1_u8; 6 * LEN];
        let post = |keys: &mut LocalKeys, number, buffer: Option<usize>| {
            if let Some(buffer) = buffer {
                let iov = tests::iov(&memory[2 * buffer * LEN..][..LEN]);
                // SAFETY: nothing is posted.
                unsafe { keys.lkey(Desc::NULL, &iov, Use::Source) }.unwrap();
            }
            keys.posted(number, number);
        };
        post(&mut keys, 0, Some(0));
        assert!(matches!(keys.held.front(), Some((0, Kept::Cached(_)))));
        let last = (1 << 31) + (1 << 30);
        for number in [1 << 30, 1 << 31, last] {
            post(&mut keys, number, None);
            assert_eq!(keys.held.len(), 1);
        }
        for more in 1..=100 {
            post(&mut keys, last + more, Some(1 + more as usize % 2));
            assert!(keys.held.len() <= 2, "{more}: {}", keys.held.len());
        }
    }
}
