//! The states of a queue pair that no identifier of the connection manager owns, by the attributes
//! of an identifier's connection (`rdma_init_qp_attr(3)`).
//!
//! The identifier may be destroyed afterwards, without an effect on the queue pair.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;

use rdma_core_sys as sys;

use super::{CmId, Device, Qp};
use crate::errno::{FiErrno, Result};

/// The RNR retry count that retries indefinitely.
const RNR_RETRY_INDEFINITELY: u8 = 7;

/// What a receiving queue pair sets itself, instead of the connection's values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receiving {
    /// `IBV_ACCESS_*`.
    pub(super) access: u32,
    /// As `ibv_modify_qp(3)` encodes it, 0 to 31.
    pub(super) min_rnr_timer: u8,
}

/// A queue pair in the course of its states: RESET, INIT, RTR, RTS.
pub(super) struct Advance<'a> {
    raw: *mut sys::ibv_qp,
    device: &'a Device,
    id: &'a CmId,
}

impl<'a> Advance<'a> {
    /// # Errors
    /// `EINVAL`: the identifier has no device or another one.
    ///
    /// # Safety
    /// `raw` is a live queue pair of `device`, also during the methods of the result.
    pub(super) unsafe fn new(
        raw: *mut sys::ibv_qp,
        device: &'a Device,
        id: &'a CmId,
    ) -> Result<Self> {
        if !id.is_on(device) {
            return Err(FiErrno::EINVAL);
        }
        Ok(Self { raw, device, id })
    }

    /// To INIT.
    pub(super) fn init(&self, receiving: Option<Receiving>) -> Result<()> {
        let (mut attr, mask) = self.id.init_qp_attr(sys::IBV_QPS_INIT)?;
        if let Some(receiving) = receiving {
            // with flushes, where the connection manager grants them
            attr.qp_access_flags |= receiving.access;
        }
        self.modify(&mut attr, mask)
    }

    /// To RTR and RTS.
    pub(super) fn rts(&self, receiving: Option<Receiving>) -> Result<()> {
        let limit = |depth: u8, limit: usize| u8::try_from(limit).map_or(depth, |l| depth.min(l));
        let (mut attr, mut mask) = self.id.init_qp_attr(sys::IBV_QPS_RTR)?;
        // the peer's values may exceed those of this device (`rdma_accept(3)` limits them only for
        // queue pairs of the identifier)
        attr.max_dest_rd_atomic = limit(attr.max_dest_rd_atomic, self.device.attr().max_qp_rd_atom);
        if let Some(receiving) = receiving {
            attr.min_rnr_timer = receiving.min_rnr_timer;
            mask |= sys::IBV_QP_MIN_RNR_TIMER;
        }
        self.modify(&mut attr, mask)?;
        let (mut attr, mask) = self.id.init_qp_attr(sys::IBV_QPS_RTS)?;
        attr.max_rd_atomic = limit(attr.max_rd_atomic, self.device.attr().max_qp_init_rd_atom);
        attr.rnr_retry = RNR_RETRY_INDEFINITELY;
        self.modify(&mut attr, mask)
    }

    fn modify(&self, attr: &mut sys::ibv_qp_attr, mask: u32) -> Result<()> {
        let modify = self.device.backend().verbs.ibv_modify_qp;
        // SAFETY: live and of this backend, by the promise of `new`.
        FiErrno::from_verb(unsafe { modify(self.raw, attr, mask as c_int) })
    }
}

impl Qp {
    /// Moves an [initiator](Self::create_initiator) to INIT, on the port of `id`, whose route is
    /// resolved and which owns no queue pair.
    ///
    /// # Errors
    /// `EINVAL`: the identifier or the queue pair is in another state. `EOPNOTSUPP`: librdmacm is
    /// older than release 25 of rdma-core. The device's.
    pub fn advance_to_init(&self, id: &CmId) -> Result<()> {
        self.advance(id)?.init(None)
    }

    /// Moves an initiator from INIT to RTS, with the attributes of the connection of `id`, after
    /// its [`ConnectResponse`](super::CmEventKind::ConnectResponse). The RNR retry count is 7.
    ///
    /// # Errors
    /// As [`Self::advance_to_init`].
    pub fn advance_to_rts(&self, id: &CmId) -> Result<()> {
        self.advance(id)?.rts(None)
    }

    fn advance<'a>(&'a self, id: &'a CmId) -> Result<Advance<'a>> {
        // SAFETY: live until dropped, and of this device.
        unsafe { Advance::new(self.raw, self.pd.device(), id) }
    }
}
