//! Receives, `fi_msg(3)`.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::shared::{EarlyRecv, Shared};
use crate::conn::State;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::local::MAX_IOV;
use crate::initiator::refusal;
use crate::mr::LocalKeys;
use crate::msg::{Endpoint, LocalIov};
use crate::queue::CqMember;
use crate::queue::slots::{Failures, Slot};
use crate::verbs::{Qp, RecvRequest};

/// Flags that `fi_recvmsg` accepts. A receive completes when its data is in memory, which satisfies
/// `FI_TRANSMIT_COMPLETE` too.
pub(super) const MSG_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::MORE)
    .union(Flags::TRANSMIT_COMPLETE);

/// The receive side of an enabled endpoint.
#[derive(Debug)]
pub(crate) struct RxSide {
    selective: bool,
    member: CqMember,
    qp: Option<Arc<Qp>>,
    /// Receives posted before the queue pair exists.
    early: Option<VecDeque<EarlyRecv>>,
    local: LocalKeys,
}

impl RxSide {
    pub(crate) fn new(
        shared: &Shared,
        selective: bool,
        member: CqMember,
        qp: Option<Arc<Qp>>,
        early: Option<VecDeque<EarlyRecv>>,
    ) -> Self {
        Self {
            selective,
            member,
            qp,
            early,
            local: LocalKeys::new(shared.domain.mr(), &shared.pd),
        }
    }

    pub(crate) fn take_early(&mut self) -> Option<VecDeque<EarlyRecv>> {
        self.early.take()
    }

    /// Takes over the registrations of the receive side that had no queue pair.
    pub(crate) fn inherit(&mut self, old: Self) {
        self.local = old.local;
    }

    /// Posts the early receives to the queue pair; their slots are assigned already.
    pub(crate) fn post_early(&self, early: VecDeque<EarlyRecv>) -> Result<()> {
        let qp = self.qp.as_ref().ok_or(FiErrno::EOPBADSTATE)?;
        for recv in early {
            let request = RecvRequest {
                wr_id: self.member.recv(recv.number),
                sges: &recv.sges,
            };
            // SAFETY: the caller that posted the receive promised that the buffers stay valid until
            // completion.
            unsafe { qp.post_recv(&request) }?;
        }
        Ok(())
    }
}

impl Shared {
    /// Posts a receive.
    ///
    /// # Safety
    /// As [`Endpoint::recv`].
    #[inline(always)]
    unsafe fn receive(&self, local: LocalIov<'_>, context: usize, flags: Flags) -> Result<()> {
        if self.config.shared_rx {
            // receives are posted to the shared context
            return Err(refusal::shared_receives());
        }
        match self.conn.state.get() {
            State::Idle | State::Closed => return Err(FiErrno::EOPBADSTATE),
            State::Disconnected | State::Broken => return Err(FiErrno::ESHUTDOWN),
            _ => {}
        }
        let (limit, longest) = (self.config.rx_iov_limit, self.domain.max_msg_size());
        if local.count() > limit {
            return Err(refusal::too_many_buffers(local.count(), limit));
        }
        if local.len() > longest {
            return Err(refusal::too_long(local.len(), longest));
        }
        let mut rx = self.rx.lock();
        let side = rx.as_mut().ok_or(FiErrno::ENOCQ)?;
        let ring = &self.slots.rx;
        if ring.is_full() {
            return Err(FiErrno::EAGAIN);
        }
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: the caller keeps the contract of this function.
        let sges = unsafe { local.recv_sges(&mut side.local, &mut sges) }
            .inspect_err(|_| side.local.release_taken())?;
        let number = ring.push(Slot {
            context,
            flags: Flags::RECV.union(Flags::MSG),
            visible: !side.selective || flags.contains(Flags::COMPLETION),
            failures: Failures::All,
            signaled: true,
            ..Slot::default()
        });
        if let Some(qp) = &side.qp {
            let wr_id = side.member.recv(number);
            // SAFETY: the caller keeps the contract of this function.
            if let Err(error) = unsafe { qp.post_recv(&RecvRequest { wr_id, sges }) } {
                ring.unpush();
                side.local.release_taken();
                return Err(error);
            }
            side.local.posted(number, ring.tail());
            return Ok(());
        }
        let early = side.early.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        early.push_back(EarlyRecv {
            number,
            context,
            sges: sges.to_vec(),
        });
        side.local.posted(number, ring.tail());
        Ok(())
    }

    /// Cancels the oldest early receive with this context.
    fn cancel(&self, context: usize) -> Result<()> {
        let control = self.control.lock();
        if self.conn.state.is(State::Closed) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let number = {
            let mut rx = self.rx.lock();
            let early = rx.as_mut().and_then(|side| side.early.as_mut());
            let early = early.ok_or(FiErrno::ENOENT)?;
            let found = early.iter().position(|recv| recv.context == context);
            let recv = found.and_then(|at| early.remove(at));
            recv.ok_or(FiErrno::ENOENT)?.number
        };
        // The receive is no longer in the list, and closing acquires the lock held here: no other
        // thread completes the receive.
        if let (Some(binding), Some(member)) = (&control.rx, control.rx_member) {
            binding.cq.cancel(member, number);
        }
        Ok(())
    }
}

/// Receives may be posted from the time the endpoint is enabled.
///
/// # Errors
/// - `EAGAIN`: the queue is full.
/// - `EINVAL`: too many buffers, or a required descriptor is wrong.
/// - `EMSGSIZE`: longer than the device's maximum message.
/// - `EBADFLAGS`: a flag that the operation does not accept.
/// - `ENOCQ`: no completion queue is bound for receiving.
/// - `EOPNOTSUPP`: the endpoint takes its receives from a shared context.
/// - `EOPBADSTATE`: not enabled. `ESHUTDOWN`: no longer connected.
///
/// # Safety
/// Buffers must stay valid until the operation completes, and descriptors be NULL or those of
/// live regions that cover the buffers.
#[allow(
    clippy::missing_safety_doc,
    reason = "one section for all methods, above"
)]
impl Endpoint {
    /// `fi_recv`, `fi_recvv`.
    #[inline(always)]
    pub unsafe fn recv(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        let flags = self.op_flags().rx();
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.receive(local, context, flags) }
    }

    /// `fi_recvmsg`.
    #[inline]
    pub unsafe fn recv_msg(&self, local: LocalIov<'_>, context: usize, flags: Flags) -> Result<()> {
        if flags.intersects(MSG_FLAGS.complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.receive(local, context, flags) }
    }

    /// Cancels a receive with this context (`fi_cancel(3)`); it completes with `ECANCELED`. Verbs
    /// cannot withdraw a posted receive, so only early receives can be cancelled: those of an
    /// endpoint that is enabled without a source address, before the peer's address is resolved.
    ///
    /// # Errors
    /// `ENOENT`: no such receive, or it is complete or posted to the device. `EOPBADSTATE`: closed.
    pub fn cancel(&self, context: usize) -> Result<()> {
        self.shared.cancel(context)
    }
}
