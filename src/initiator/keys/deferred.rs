//! Deferred operations: kept with all data needed to post them later, and retried in order.

#![allow(unsafe_code, reason = "keeps the caller's buffers")]

use libc::iovec;

use super::resolve::Resolution;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::initiator::link::Link;
use crate::initiator::local::LocalIov;
use crate::initiator::sq::Sq;
use crate::initiator::{Initiator, Transmit};
use crate::mr::Desc;
use crate::queue::EngineLink;
use crate::queue::event_cell::Counted;
use crate::verbs::SendOpcode;

/// An operation that is not or not completely posted: it waits for a look-up, for a result or for
/// room in the send queue, or follows such an operation.
#[derive(Debug)]
pub(crate) struct Deferred {
    opcode: SendOpcode,
    iov: Vec<iovec>,
    desc: Vec<Desc>,
    /// A copy of injected data, to which `iov` refers; otherwise empty.
    _copy: Vec<u8>,
    remote_addr: u64,
    key: u64,
    data: u64,
    context: usize,
    flags: Flags,
    silent: bool,
    compare_add: u64,
    swap: u64,
    completion_flags: Flags,
    counted: Counted,
    /// Number of bytes of the operation that are posted.
    posted: u64,
}

// SAFETY: the caller keeps the buffers valid until completion (fi_rma(3)), on whichever thread the
// operation is posted. Descriptors are read under the contract of `Desc::lkey`.
unsafe impl Send for Deferred {}

impl Deferred {
    /// `posted`: bytes of the operation that are posted. Allocates.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    pub(super) unsafe fn new(op: &Transmit<'_>, posted: u64) -> Self {
        let inject = op.flags.contains(Flags::INJECT) && op.opcode.sends_data();
        let (iov, desc, copy);
        if inject {
            let mut bytes = vec![0; op.local.len()];
            // SAFETY: the caller promises readable buffers; `bytes` has their total length.
            unsafe { op.local.copy_to(bytes.as_mut_ptr()) };
            iov = vec![iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            }];
            desc = vec![Desc::NULL];
            copy = bytes;
        } else {
            (iov, desc) = op.local.to_owned();
            copy = Vec::new();
        }
        Self {
            opcode: op.opcode,
            iov,
            desc,
            _copy: copy,
            remote_addr: op.remote_addr,
            key: op.key,
            data: op.data,
            context: op.context,
            // retried without a further operation
            flags: op.flags - Flags::MORE,
            silent: op.silent,
            compare_add: op.compare_add,
            swap: op.swap,
            completion_flags: op.completion_flags,
            counted: op.counted,
            posted,
        }
    }

    /// Sets the number of bytes that are posted.
    pub(super) fn set_posted(&mut self, posted: u64) {
        self.posted = posted;
    }

    /// Number of bytes of the operation that are posted.
    pub(super) fn posted(&self) -> u64 {
        self.posted
    }

    pub(super) fn transmit(&self) -> Transmit<'_> {
        Transmit {
            opcode: self.opcode,
            local: LocalIov::borrowed(&self.iov, &self.desc),
            remote_addr: self.remote_addr,
            key: self.key,
            data: self.data,
            context: self.context,
            flags: self.flags,
            silent: self.silent,
            compare_add: self.compare_add,
            swap: self.swap,
            completion_flags: self.completion_flags,
            counted: self.counted,
        }
    }
}

impl<Q: Sq> Initiator<Q> {
    /// Appends an operation to the deferred operations.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    pub(super) unsafe fn defer(&mut self, op: &Transmit<'_>) {
        // SAFETY: as this function.
        self.deferred.push_back(unsafe { Deferred::new(op, 0) });
        self.sq.link().request_progress();
    }

    /// Retries the deferred operations in order, and stops at the first that cannot be posted.
    pub(crate) fn resume(&mut self) {
        self.sq.post_delayed();
        if let Some(peer) = &mut self.peer {
            peer.catch_up();
            peer.acknowledge();
        }
        while let Some(mut deferred) = self.deferred.pop_front() {
            // SAFETY: the caller that posted the operation promised that the buffers stay valid
            // until completion. A descriptor may be of a region that was closed meanwhile, which is
            // refused, or that is being closed: `retry` holds a `Following` (`Desc::lkey`).
            if !unsafe { self.retry(&mut deferred) } {
                self.deferred.push_front(deferred);
                return;
            }
        }
        self.sq.link().clear_progress_request();
    }

    /// Posts a deferred operation, or the rest of one. Returns whether all of it is posted.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    unsafe fn retry(&mut self, deferred: &mut Deferred) -> bool {
        if self.has_compare_swap() {
            // SAFETY: as this function.
            return unsafe { self.count_compare(&deferred.transmit()) };
        }
        loop {
            let done = deferred.posted();
            let op = deferred.transmit();
            if self.sq.is_full() && !(done != 0 && self.sq.make_room().unwrap_or(false)) {
                return false;
            }
            let len = op.local.len();
            let resolution = match self.is_native(&op) {
                true => None,
                false => Some(self.resolve(&op, len, done)),
            };
            if matches!(resolution, Some(Resolution::Pending)) {
                return false;
            }
            // the application may close the region of a local buffer at the same time
            let follows = op.local.follow();
            let result = match resolution {
                // SAFETY: as this function.
                None => unsafe { self.post(&op, len, op.native_target()) }.map(|()| None),
                Some(Resolution::Compare(offset)) => {
                    // SAFETY: as this function.
                    match unsafe { self.compare(&op, len, offset) } {
                        Ok(all) => return all,
                        Err(error) => Err(error),
                    }
                }
                // SAFETY: as this function.
                Some(resolution) => unsafe { self.post_resolved(&op, len, done, resolution) },
            };
            drop(follows);
            match result {
                Ok(None) => return true,
                Ok(Some(done)) => deferred.set_posted(done),
                Err(FiErrno::EAGAIN) => return false,
                Err(error) => return self.post_failure(&op, error).is_ok(),
            }
        }
    }

    /// The context of the first deferred operation.
    pub(crate) fn first_deferred(&self) -> Option<usize> {
        self.deferred.front().map(|deferred| deferred.context)
    }

    /// Takes the deferred operations after the end of the connection: their contexts, and whether a
    /// request of them was posted.
    pub(crate) fn take_deferred(&mut self) -> Vec<(usize, bool)> {
        let compares = self.has_compare_swap();
        let taken = self.deferred.drain(..).enumerate();
        let posted = |(at, deferred): (usize, Deferred)| {
            (
                deferred.context,
                deferred.posted != 0 || compares && at == 0,
            )
        };
        taken.map(posted).collect()
    }

    /// Acknowledges the revocations of the peer's keys, behind the delayed requests, which use the
    /// keys from before.
    pub(crate) fn acknowledge(&mut self) {
        self.sq.post_delayed();
        if let Some(peer) = &mut self.peer {
            peer.catch_up();
            peer.acknowledge();
        }
    }

    /// Fails the deferred operations with `ECANCELED` after the end of the connection, in order, as
    /// far as the send queue has room.
    pub(crate) fn cancel_deferred(&mut self) {
        self.sq.post_delayed();
        if let Some(peer) = &mut self.peer {
            peer.compare_swap = None;
        }
        while let Some(deferred) = self.deferred.pop_front() {
            let op = deferred.transmit();
            if self.sq.is_full() || self.post_failure(&op, FiErrno::ECANCELED).is_err() {
                self.deferred.push_front(deferred);
                return;
            }
        }
        self.sq.link().clear_progress_request();
    }
}
