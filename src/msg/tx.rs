//! The transmit side of an endpoint: an initiator that posts to the endpoint's send queue.

#![allow(unsafe_code, reason = "posts buffers that the caller keeps valid")]

use std::sync::Arc;

use super::core::{Core, CqBinding};
use super::sq::{QpLink, SendQueue};
use crate::conn::State;
use crate::errno::{FiErrno, Result};
use crate::initiator::{Initiator, InitiatorConfig, Transmit};
use crate::queue::WrId;
use crate::verbs::Qp;

/// The transmit side of an endpoint that has a queue pair.
pub(crate) type TxSide = Initiator<SendQueue>;

impl Core {
    /// Makes the transmit side of a new queue pair.
    pub(super) fn tx_side(&self, binding: &CqBinding, place: WrId, qp: &Arc<Qp>) -> Result<TxSide> {
        let link = QpLink {
            qp: Arc::clone(qp),
            cq: Arc::clone(&binding.cq),
            place,
            rings: Arc::clone(&self.rings),
        };
        let config = InitiatorConfig {
            selective: binding.selective,
            iov_limit: self.config.tx_iov_limit,
            max_inline: qp.limits().max_inline,
            inject_size: self.config.inject_size,
            slots: self.rings.tx.capacity(),
            atomics: self.config.atomics,
        };
        Initiator::new(
            SendQueue::new(link),
            self.domain.mr(),
            &self.lengths,
            &config,
        )
    }
}

impl Core {
    /// Posts an operation of the transmit side.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline(never)]
    pub(super) unsafe fn transmit(&self, op: &Transmit<'_>) -> Result<()> {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.transmit_here(op) }
    }

    /// As [`Self::transmit`], inlined: the compiler specializes it in callers where kind, flags and
    /// number of buffers are constants.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline(always)]
    pub(super) unsafe fn transmit_here(&self, op: &Transmit<'_>) -> Result<()> {
        if !self.conn.state.is(State::Connected) {
            self.may_post()?;
        }
        let mut tx = self.tx.lock();
        let side = tx.as_mut().ok_or(FiErrno::ENOCQ)?;
        // SAFETY: the caller keeps the contract of this function.
        unsafe { side.submit(op) }
    }
}
