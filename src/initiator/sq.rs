//! The send queue below an initiator: room for requests, and their post.
//!
//! The initiator uses [`Sq`] under the transmit lock. It is a trait because the records of posted
//! requests can differ between endpoint types; connected endpoints use [`super::SlotSq`].

#![allow(unsafe_code, reason = "posts requests")]

use std::fmt::Debug;

use super::link::Link;
use crate::errno::{FiErrno, Result};
use crate::queue::slots::Slot;
use crate::verbs::{RemoteAddr, Rkey, SendRequest};

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

    /// Whether the device may execute an operation in its call ([`crate::verbs::Qp::execute`]): it
    /// can do that, and no request is under way, so the entries keep their order.
    fn executes(&self) -> bool;

    /// Whether there are delayed requests. A full queue has none.
    fn has_delayed(&self) -> bool;

    /// As [`Self::post`], in one list with the delayed requests. With `more` the request is delayed
    /// itself, until the next post of any kind, or until [`Self::post_delayed`]; the queue requests
    /// progress, or the endpoint makes it.
    ///
    /// # Errors
    /// As [`Self::post`].
    ///
    /// # Safety
    /// As [`Self::post`].
    unsafe fn post_in_list(
        &mut self,
        request: &mut SendRequest<'_>,
        slot: Slot,
        signal: Signal,
        more: bool,
    ) -> Result<u32>;

    /// Posts the delayed requests. If the device refuses one, the connection fails.
    fn post_delayed(&mut self);

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
