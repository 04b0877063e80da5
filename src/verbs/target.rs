//! Targets: the receiving side of an extended reliable connection (XRC), which belongs to an XRC
//! domain, not to a process.
//!
//! A target has no queues and no protection domain: each request names a shared receive queue of
//! the domain ([`Srq::create_xrc`](super::Srq::create_xrc)). It exists while a process has a handle
//! of it.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;
use std::sync::Arc;

use rdma_core_sys as sys;

use super::advance::{Advance, Receiving};
use super::qp_create::never_wait;
use super::{CmId, Device, QpNumber, Xrcd};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// What the peers of a target may do in the regions of the queues that they name. Keys decide the
/// rest.
const ACCESS: u32 =
    sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;

/// A handle of a target. Thread safe. Dropped, it is closed; the device destroys the target with
/// the last handle of all processes.
#[derive(Debug)]
pub struct Target {
    raw: *mut sys::ibv_qp,
    xrcd: Arc<Xrcd>,
}

/// The connection of a target (`ibv_query_qp(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// Whether the target is in the state RTR or RTS.
    pub receives: bool,
    /// The number of the initiator that it is connected to; without a meaning before RTR.
    pub peer: QpNumber,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    /// Creates a target in the state RESET (`ibv_create_qp_ex(3)`).
    ///
    /// # Errors
    /// `EINVAL`: the domain is closed. `EOPNOTSUPP`: the device has no XRC. `ENOMEM`. `EBUSY`:
    /// other processes held the domain's lock for 5 s (softverbs).
    pub fn create(xrcd: &Arc<Xrcd>) -> Result<Self> {
        Self::own(xrcd, |raw| {
            let mut attr = sys::ibv_qp_init_attr_ex {
                qp_type: sys::IBV_QPT_XRC_RECV,
                comp_mask: sys::IBV_QP_INIT_ATTR_XRCD,
                xrcd: raw,
                ..Default::default()
            };
            // SAFETY: a live context and domain.
            unsafe { sys::ibv_create_qp_ex(xrcd.device().context(), &raw mut attr) }
        })
    }

    /// Opens a further handle of a target of the domain (`ibv_open_qp(3)`).
    ///
    /// # Errors
    /// `EINVAL`, `ENOENT`: no target of the domain has this number; or the domain is closed.
    /// `EOPNOTSUPP`: the device has no XRC. `ENOMEM`. `EBUSY`: as [`Self::create`].
    pub fn open(xrcd: &Arc<Xrcd>, number: QpNumber) -> Result<Self> {
        Self::own(xrcd, |raw| {
            let mut attr = sys::ibv_qp_open_attr {
                comp_mask: sys::IBV_QP_OPEN_ATTR_NUM
                    | sys::IBV_QP_OPEN_ATTR_XRCD
                    | sys::IBV_QP_OPEN_ATTR_TYPE,
                qp_num: number.get(),
                xrcd: raw,
                qp_type: sys::IBV_QPT_XRC_RECV,
                ..Default::default()
            };
            // SAFETY: a live context and domain.
            unsafe { sys::ibv_open_qp(xrcd.device().context(), &raw mut attr) }
        })
    }

    /// The handle that `make` returns, or the error that it has left in `errno`.
    fn own(
        xrcd: &Arc<Xrcd>,
        make: impl FnOnce(*mut sys::ibv_xrcd) -> *mut sys::ibv_qp,
    ) -> Result<Self> {
        let raw = xrcd.with_raw(|raw| {
            let qp = make(raw);
            if qp.is_null() {
                return Err(FiErrno::last());
            }
            Ok(qp)
        })?;
        // SAFETY: the new handle, of this backend.
        unsafe { never_wait(xrcd.device(), raw) };
        Ok(Self {
            raw,
            xrcd: Arc::clone(xrcd),
        })
    }

    /// The target's number, which completions of receives contain ([`Wc::qp_num`](super::Wc)).
    pub fn number(&self) -> QpNumber {
        // SAFETY: live until dropped.
        QpNumber::of_device(unsafe { (*self.raw).qp_num })
    }

    /// The handle's identity in asynchronous events.
    pub fn object(&self) -> usize {
        self.raw as usize
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_qp {
        self.raw
    }

    /// The XRC domain.
    pub fn xrcd(&self) -> &Arc<Xrcd> {
        &self.xrcd
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.xrcd.device()
    }

    /// Moves a new target through INIT and RTR to RTS, with the attributes of a connection request:
    /// `id` is that of the request, owns no queue pair, and has not accepted yet. The target
    /// permits remote reads, writes and atomics. `min_rnr_timer` as
    /// [`Qp::set_min_rnr_timer`](super::Qp::set_min_rnr_timer).
    ///
    /// # Errors
    /// `EINVAL`: the identifier or the target is in another state. `EOPNOTSUPP`: librdmacm is older
    /// than release 25 of rdma-core. The device's.
    pub fn advance_to_rts(&self, id: &CmId, min_rnr_timer: u8) -> Result<()> {
        let receiving = Some(Receiving {
            access: ACCESS,
            min_rnr_timer,
        });
        // SAFETY: live until dropped, and of this device.
        let advance = unsafe { Advance::new(self.raw, self.device(), id) }?;
        advance.init(receiving)?;
        advance.rts(receiving)
    }

    /// Moves the target to its error state, for all processes that have a handle of it: it
    /// acknowledges no further request.
    ///
    /// # Errors
    /// The device's.
    pub fn set_error(&self) -> Result<()> {
        let mut attr = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_ERR,
            ..Default::default()
        };
        let modify = self.device().backend().verbs.ibv_modify_qp;
        // SAFETY: live and of this backend.
        FiErrno::from_verb(unsafe { modify(self.raw, &raw mut attr, sys::IBV_QP_STATE as c_int) })
    }

    /// Queries state and peer (`ibv_query_qp(3)`).
    ///
    /// # Errors
    /// The device's.
    pub fn query(&self) -> Result<TargetState> {
        let mut attr = sys::ibv_qp_attr::default();
        let mut init = sys::ibv_qp_init_attr::default();
        let mask = (sys::IBV_QP_STATE | sys::IBV_QP_DEST_QPN) as c_int;
        let query = self.device().backend().verbs.ibv_query_qp;
        // SAFETY: live and of this backend; both structures are writable.
        FiErrno::from_verb(unsafe { query(self.raw, &raw mut attr, mask, &raw mut init) })?;
        Ok(TargetState {
            receives: matches!(attr.qp_state, sys::IBV_QPS_RTR | sys::IBV_QPS_RTS),
            peer: QpNumber::of_device(attr.dest_qp_num),
        })
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // SAFETY: created by this backend, destroyed once.
        let ret = unsafe { (self.device().backend().verbs.ibv_destroy_qp)(self.raw) };
        if let Err(error) = FiErrno::from_verb(ret) {
            warn_log!(EpCtrl, "ibv_destroy_qp of a target: {error}");
        }
    }
}
