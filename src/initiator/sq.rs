//! The send queue below an initiator.
//!
//! The initiator uses [`Sq`] under the transmit lock. [`Link`] is the part that other threads use
//! too, with [`OwnLink`] for the engine's own requests. An endpoint type implements both for its records of posted
//! requests: a ring of slots per queue pair for MSG.

#![allow(unsafe_code, reason = "posts requests")]

use std::fmt::Debug;
use std::sync::Arc;

use crate::errno::{FiErrno, Result};
use crate::queue::OwnLink;
use crate::queue::slots::Slot;
use crate::verbs::{Pd, RemoteAddr, Rkey, SendRequest};

/// Whether the device reports the success of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// Never. A later request completes this one.
    No,
    /// If the send queue needs the completion to count operations or to free their records.
    Auto,
    /// Always.
    Yes,
}

/// Posts the requests of operations. Used under the transmit lock of its endpoint.
pub(crate) trait Sq: Debug {
    type Link: Link;

    fn link(&self) -> &Self::Link;

    /// Whether the queue has no room for an operation.
    fn is_full(&self) -> bool;

    /// Polls for completions of a full queue. Returns whether the queue has room now.
    ///
    /// # Errors
    /// `EOVERRUN`: the completion queue has failed.
    fn make_room(&self) -> Result<bool>;

    /// Checks for room for an operation, and polls for completions if the queue is full.
    ///
    /// # Errors
    /// `EAGAIN`: no room. Others as [`Self::make_room`].
    #[inline]
    fn reserve(&self) -> Result<()> {
        if self.is_full() && !self.make_room()? {
            return Err(FiErrno::EAGAIN);
        }
        Ok(())
    }

    /// Whether one more operation may be deferred if `deferred` are deferred already.
    fn can_defer(&self, deferred: usize) -> bool;

    /// Index of the next request's record, less than the number of records: the inject slab has a
    /// buffer for each.
    fn next_index(&self) -> usize;

    /// Number of the oldest request that is not complete.
    fn tail(&self) -> u32;

    /// Posts a request, after setting its `wr_id` and whether it is signaled. `slot` is its record,
    /// except [`Slot::signaled`]. Returns the request's number. [`Self::is_full`] was false at the
    /// operation's first request.
    ///
    /// # Errors
    /// `EAGAIN`: the device's queue is full. Others of the device. Nothing was posted.
    ///
    /// # Safety
    /// As [`crate::verbs::Qp::post_send`].
    unsafe fn post(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32>;

    /// As [`Self::post`], for a flush of `len` bytes at the peer's address `to` with its rkey.
    ///
    /// # Errors
    /// As [`Self::post`].
    fn post_flush(
        &mut self,
        to: (RemoteAddr, Rkey),
        len: usize,
        slot: Slot,
        signal: Signal,
    ) -> Result<u32>;

    /// Moves the queue pair to its error state: a partly posted operation cannot be withdrawn.
    fn fail(&self);
}

/// The queue pair of a [`Sq`] as the peer's keys use it. Thread safe, except
/// [`Self::next_number`]. A clone refers to the same queue pair.
pub(crate) trait Link: OwnLink + Clone + Debug + 'static {
    fn pd(&self) -> &Arc<Pd>;

    /// Number of the next request. Under the transmit lock only.
    fn next_number(&self) -> u32;

    /// Whether the completion of the request of this number has not been polled.
    fn is_outstanding(&self, number: u32) -> bool;

    /// Polls for a completion that an operation waits for. `polls`: number of such polls of the
    /// same call since the last completed read of a look-up, incremented here. Returns false,
    /// without polling, if the operation is to be deferred instead.
    fn poll_once_more(&self, polls: &mut u32) -> bool;

    /// Reverts [`OwnLink::request_progress`], when no operation is deferred any more.
    fn clear_progress_request(&self);

    /// Records whether this side holds keys of the peer, so that the peer waits for its
    /// acknowledgement of revocations.
    fn set_holds_keys(&self, holds: bool);

    /// Starts the lease timer, after [`Self::set_holds_keys`].
    fn start_lease(&self);
}
