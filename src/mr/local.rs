//! The lkeys of local buffers: from descriptors, or made here where the application need not register
//! (`FI_MR_LOCAL` off).
//!
//! Without a descriptor a buffer is reached through the domain's implicit on-demand region, where the
//! device has one, else registered for this one operation. Such a registration is never used for another
//! one, so it can't refer to pages that were exchanged meanwhile; it ends when a later operation of the same
//! direction is posted, or the endpoint is closed.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::collections::VecDeque;
use std::sync::Arc;

use rdma_core_sys as sys;

use crate::domain::Domain;
use crate::errno::Result;
use crate::mr::{Desc, DescRule, Place};
use crate::verbs::{Mr, Pd};

/// What a device does with a local buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Reads it: the source of sends and writes.
    Source,
    /// Writes to it: receives, results of reads.
    Sink,
}

/// The lkeys of one direction of an endpoint. Not shared: whoever posts holds that direction's lock.
#[derive(Debug)]
pub(crate) struct LocalKeys {
    rule: DescRule,
    place: Place,
    /// Of the domain's implicit region.
    implicit: Option<u32>,
    /// Registrations of the operation that is being posted.
    taken: Vec<Mr>,
    /// Those of operations under way, by request number, oldest first.
    held: VecDeque<(u32, Vec<Mr>)>,
}

impl LocalKeys {
    pub(crate) fn new(domain: &Domain, pd: &Arc<Pd>) -> Self {
        Self {
            rule: domain.config().form.desc,
            place: Place::new(domain, pd),
            implicit: domain.implicit_lkey(pd),
            taken: Vec::new(),
            held: VecDeque::new(),
        }
    }

    /// The lkey for a buffer of at least one byte.
    ///
    /// # Errors
    /// `EINVAL`: a descriptor that is needed and wrong. Those of a registration: `EFAULT`, `ENOMEM`.
    ///
    /// # Safety
    /// `desc` is as the rule has it: where it counts, NULL or of a live region. The buffer stays the
    /// caller's until the operation is complete.
    #[inline]
    pub(crate) unsafe fn lkey(&mut self, desc: Desc, iov: &libc::iovec, to: Use) -> Result<u32> {
        match self.rule {
            // SAFETY: as this function.
            DescRule::Required => unsafe { desc.lkey(&self.place, iov) },
            // SAFETY: as this function.
            DescRule::Optional if !desc.0.is_null() => unsafe { desc.lkey(&self.place, iov) },
            _ => match self.implicit {
                Some(lkey) => Ok(lkey),
                // SAFETY: as this function.
                None => unsafe { self.register(iov, to) },
            },
        }
    }

    #[cold]
    unsafe fn register(&mut self, iov: &libc::iovec, to: Use) -> Result<u32> {
        let rights = match to {
            Use::Source => 0,
            Use::Sink => sys::IBV_ACCESS_LOCAL_WRITE,
        };
        // SAFETY: the caller's promise; the registration is held until the operation is complete.
        let mr = unsafe { Mr::register(&self.place.pd, iov.iov_base, iov.iov_len, rights) }?;
        let lkey = mr.lkey();
        self.taken.push(mr);
        Ok(lkey)
    }

    /// The operation was posted as request `number`; those before `tail` are complete.
    #[inline]
    pub(crate) fn posted(&mut self, number: u32, tail: u32) {
        if !self.held.is_empty() || !self.taken.is_empty() {
            self.turn_over(number, tail);
        }
    }

    #[cold]
    fn turn_over(&mut self, number: u32, tail: u32) {
        while let Some((oldest, _)) = self.held.front()
            && (tail.wrapping_sub(*oldest) as i32) > 0
        {
            self.held.pop_front();
        }
        if !self.taken.is_empty() {
            self.held
                .push_back((number, std::mem::take(&mut self.taken)));
        }
    }

    /// The registrations of the operation that was just posted, for a caller whose operations do not
    /// complete in order: to be kept until it is complete.
    #[inline]
    pub(crate) fn take(&mut self) -> Vec<Mr> {
        std::mem::take(&mut self.taken)
    }

    /// The operation was not posted.
    #[inline]
    pub(crate) fn refused(&mut self) {
        self.taken.clear();
    }
}

/// Registers the whole address space on demand, for local use.
///
/// # Errors
/// The device's, where it can't.
pub(crate) fn implicit_region(pd: &Arc<Pd>) -> Result<Mr> {
    let rights = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_ON_DEMAND;
    // Address 0 and all lengths is how verbs spells the whole address space.
    // SAFETY: nothing is touched before an operation names it, and its buffers are the caller's; peers
    // have no right on it.
    unsafe { Mr::register(pd, std::ptr::null(), usize::MAX, rights) }
}
