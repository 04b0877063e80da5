//! The transmit side of an endpoint: an initiator, its send queue, and the lock of both.

#![allow(unsafe_code, reason = "posts buffers that the caller keeps valid")]

use std::sync::Arc;

use super::shared::Shared;
use crate::conn::State;
use crate::errno::{FiErrno, Result};
use crate::initiator::{Initiator, InitiatorConfig, QpLink, SlotSq, Transmit};
use crate::queue::{CqBinding, CqMember};
use crate::verbs::{Qp, SendOpcode, SrqNumber};

/// The transmit side of an endpoint that has a queue pair.
pub(crate) type TxSide = Initiator<SlotSq>;

impl Shared {
    /// Makes the transmit side of a new queue pair.
    /// `peer`: the peer's receive queue, if the queue pair is an initiator of XRC.
    pub(super) fn tx_side(
        &self,
        binding: &CqBinding,
        member: CqMember,
        qp: &Arc<Qp>,
        peer: Option<SrqNumber>,
    ) -> Result<TxSide> {
        let (cq, slots) = (Arc::clone(&binding.cq), Arc::clone(&self.slots));
        let link = QpLink::new(Arc::clone(qp), cq, member, slots, peer);
        let config = InitiatorConfig {
            selective: binding.selective,
            iov_limit: self.config.tx_iov_limit,
            max_inline: qp.limits().max_inline,
            inject_size: self.config.inject_size,
            slots: self.slots.tx.capacity(),
            late_slab: false,
            atomics: self.config.atomics,
        };
        Initiator::new(SlotSq::new(link), self.domain.mr(), &self.lengths, &config)
    }
}

impl Shared {
    /// Posts an operation of the transmit side.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline(never)]
    pub(super) unsafe fn transmit(&self, op: &Transmit<'_>) -> Result<()> {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.transmit_here(op) }
    }

    /// The transmit side, for a post in a state other than `Connected`.
    ///
    /// # Errors
    /// As [`Self::may_post`].
    #[cold]
    #[inline(never)]
    fn lock_again<'a>(
        &'a self,
        tx: biased_lock::MutexGuard<'a, Option<TxSide>>,
    ) -> Result<biased_lock::MutexGuard<'a, Option<TxSide>>> {
        // `may_post` waits for locks that precede this one
        drop(tx);
        loop {
            self.may_post()?;
            let tx = self.tx.lock();
            // under the lock, as in `transmit_here`
            if self.conn.state.can_post() {
                return Ok(tx);
            }
        }
    }

    /// As [`Self::transmit`], inlined: the compiler specializes it in callers where kind, flags and
    /// number of buffers are constants.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline(always)]
    pub(super) unsafe fn transmit_here(&self, op: &Transmit<'_>) -> Result<()> {
        let mut tx = self.tx.lock();
        // Under the lock: once a thread that has ended the connection has acquired it, no post
        // follows (`CircuitUser::send_end_notice`).
        if !self.conn.state.is(State::Connected) {
            tx = self.lock_again(tx)?;
        }
        let side = tx.as_mut().ok_or(FiErrno::ENOCQ)?;
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            if matches!(op.opcode, SendOpcode::Write | SendOpcode::Read) && side.execute_rma(op) {
                return Ok(());
            }
            side.submit(op)
        }
    }
}
