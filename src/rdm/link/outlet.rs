//! The queue pair to which the requests of a link besides packets are posted ([`Outlet`]): that of
//! the link, or on XRC the initiator of its circuit, once the link may post.

#![allow(unsafe_code, reason = "posts requests whose caller promises for them")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::errno::{FiErrno, Result};
use crate::verbs::{Qp, SendRequest, SrqNumber};

/// Requests of a circuit besides packets, of all its links; and the part of them that operations do
/// not use, because the requests for keys are not repeated at once.
pub(in crate::rdm) const CIRCUIT_RMA: usize = 256;
pub(super) const CIRCUIT_ENGINE: usize = 64;

/// The requests of a circuit besides packets that have not completed.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Room {
    used: AtomicUsize,
    /// A request for keys found no room.
    refused: AtomicBool,
}

impl Room {
    /// Whether all requests have completed.
    pub(in crate::rdm) fn is_empty(&self) -> bool {
        self.used.load(Ordering::Relaxed) == 0
    }

    /// Whether so many requests can be posted.
    #[inline]
    fn has(&self, count: usize) -> bool {
        self.used.load(Ordering::Relaxed) + count <= CIRCUIT_RMA
    }

    /// # Errors
    /// `EAGAIN`: the queue is full.
    #[inline]
    fn take(&self) -> Result<()> {
        if self.used.fetch_add(1, Ordering::Relaxed) < CIRCUIT_RMA {
            return Ok(());
        }
        self.give(1);
        Err(FiErrno::EAGAIN)
    }

    /// So many requests have completed, or were not posted.
    #[inline]
    pub(in crate::rdm) fn give(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }

    /// As if so many requests were under way.
    #[cfg(test)]
    pub(in crate::rdm) fn occupy(&self, count: usize) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }

    /// Whether a notification of a revocation found no room since the last call.
    #[inline]
    pub(in crate::rdm) fn take_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed) && self.refused.swap(false, Ordering::Relaxed)
    }
}

/// Where the requests of a link are posted.
#[derive(Clone, Debug)]
pub(in crate::rdm) struct Outlet {
    pub(super) qp: Arc<Qp>,
    /// On a circuit: the receive queue of the peer, which each request names, and the room.
    pub(super) circuit: Option<(SrqNumber, Arc<Room>)>,
}

impl Outlet {
    /// The queue pair of a link.
    pub(in crate::rdm) fn of_qp(qp: &Arc<Qp>) -> Self {
        Self {
            qp: Arc::clone(qp),
            circuit: None,
        }
    }

    /// A circuit, to a peer with this shared receive queue.
    pub(in crate::rdm) fn of_circuit(qp: &Arc<Qp>, srq: SrqNumber, room: &Arc<Room>) -> Self {
        Self {
            qp: Arc::clone(qp),
            circuit: Some((srq, Arc::clone(room))),
        }
    }

    pub(super) fn srq(&self) -> Option<SrqNumber> {
        self.circuit.as_ref().map(|(srq, _)| *srq)
    }

    /// # Errors
    /// `EAGAIN`: the queue is full.
    #[inline(always)]
    pub(super) fn take_room(&self) -> Result<()> {
        match &self.circuit {
            None => Ok(()),
            Some((_, room)) => room.take(),
        }
    }

    /// On a circuit: a notification of a revocation found no room.
    pub(super) fn note_refused(&self) {
        if let Some((_, room)) = &self.circuit {
            room.refused.store(true, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(super) fn give_room(&self) {
        if let Some((_, room)) = &self.circuit {
            room.give(1);
        }
    }

    /// Whether so many requests can be posted.
    #[inline(always)]
    pub(super) fn has_room(&self, count: usize) -> bool {
        let circuit = self.circuit.as_ref();
        circuit.is_none_or(|(_, room)| room.has(count))
    }

    /// Completes a request: its receive queue.
    #[inline(always)]
    pub(super) fn direct(&self, request: &mut SendRequest<'_>) {
        if let Some(srq) = self.srq() {
            request.to_srq(srq);
        }
    }

    /// Posts a request.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. The device's.
    ///
    /// # Safety
    /// As [`Qp::post_send`].
    #[inline(always)]
    pub(super) unsafe fn post(&self, request: &mut SendRequest<'_>) -> Result<()> {
        self.take_room()?;
        self.direct(request);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.qp.post_send(request) }.inspect_err(|_| self.give_room())
    }
}
