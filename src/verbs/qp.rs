//! Queue pairs: sizes, states and attributes. `qp_create.rs` creates them, `wr.rs` posts to them.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;
use std::sync::Arc;

use rdma_core_sys as sys;

use super::wr::FlushCalls;
use super::{CmId, Cq, Pd, QpNumber, Srq, Xrcd};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// Requested sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Maximum number of outstanding sends and RDMA operations.
    pub max_send_wr: usize,
    /// Maximum number of posted receives.
    pub max_recv_wr: usize,
    /// Maximum number of buffers per send.
    pub max_send_sge: usize,
    /// Maximum number of buffers per receive.
    pub max_recv_sge: usize,
    /// Maximum length of inline data in bytes.
    pub max_inline: usize,
    /// Whether the queue pair supports flushes ([`Qp::post_flush`]).
    pub flush: bool,
}

#[cfg(test)]
impl QpConfig {
    /// A small queue pair.
    pub(crate) const SMALL: Self = Self {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        flush: false,
    };
}

/// Actual sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLimits {
    /// Maximum length of inline data in bytes.
    pub max_inline: usize,
}

/// The attributes of a queue pair, in verbs' own terms (`ibv_query_qp(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of struct ibv_qp_attr")]
pub struct QpState {
    pub min_rnr_timer: u8,
    pub rnr_retry: u8,
    pub retry_cnt: u8,
    pub timeout: u8,
    pub traffic_class: u8,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_inline_data: u32,
}

/// A queue pair. Thread safe.
#[derive(Debug)]
pub struct Qp {
    pub(super) raw: *mut sys::ibv_qp,
    /// The calls that post flushes, if the queue pair supports them.
    pub(super) flush: Option<FlushCalls>,
    /// The call that executes RMA at once, if the device has it.
    pub(super) executes: Option<ExecuteCalls>,
    pub(super) limits: QpLimits,
    pub(super) owner: Owner,
    pub(super) pd: Arc<Pd>,
    pub(super) _objects: Objects,
    /// Which of the last 64 requests were posted with a fence; bit 0: the last one.
    #[cfg(test)]
    pub(crate) posted_fences: std::sync::atomic::AtomicU64,
    /// Number of posted flushes.
    #[cfg(test)]
    pub(crate) flushes: std::sync::atomic::AtomicUsize,
}

/// The calls that execute an operation without a request, of devices that have them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExecuteCalls {
    pub(super) access: AccessCall,
    pub(super) list: Option<ListAccessCall>,
    pub(super) atomic: Option<AtomicAccessCall>,
    /// The same on an initiator of XRC, with the number of a shared receive queue.
    pub(super) to_srq: Option<SrqAccessCall>,
    pub(super) atomic_to_srq: Option<SrqAtomicAccessCall>,
}

impl ExecuteCalls {
    pub(super) fn of(verbs: &sys::VerbsFns) -> Option<Self> {
        Some(Self {
            access: verbs.softdv_access?,
            list: verbs.softdv_access_list,
            atomic: verbs.softdv_atomic_access,
            to_srq: verbs.softdv_access_srq,
            atomic_to_srq: verbs.softdv_atomic_access_srq,
        })
    }
}

/// `softdv_atomic_access`
pub(super) type AtomicAccessCall = unsafe extern "C" fn(
    *mut sys::ibv_qp,
    *mut sys::softdv_atomic,
    *mut std::ffi::c_void,
    u64,
    u32,
) -> c_int;

/// `softdv_access`
pub(super) type AccessCall =
    unsafe extern "C" fn(*mut sys::ibv_qp, u32, *const sys::ibv_sge, u32, u64, u32) -> c_int;

/// `softdv_access_list`
pub(super) type ListAccessCall = unsafe extern "C" fn(
    *mut sys::ibv_qp,
    u32,
    *const sys::ibv_sge,
    c_int,
    u32,
    *const u64,
    *const u32,
) -> c_int;

/// `softdv_access_srq`
pub(super) type SrqAccessCall =
    unsafe extern "C" fn(*mut sys::ibv_qp, u32, *const sys::ibv_sge, u32, u32, u64, u32) -> c_int;

/// `softdv_atomic_access_srq`
pub(super) type SrqAtomicAccessCall = unsafe extern "C" fn(
    *mut sys::ibv_qp,
    *mut sys::softdv_atomic,
    *mut std::ffi::c_void,
    u32,
    u64,
    u32,
) -> c_int;

/// The object that destroys a queue pair.
#[derive(Debug)]
pub(super) enum Owner {
    /// The identifier of the connection manager that created it and changes its states.
    Id(Arc<CmId>),
    /// The queue pair was created by `ibv_create_qp(3)`.
    Verbs,
}

/// The objects that a queue pair uses, which live until it is destroyed.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) send_cq: Option<Arc<Cq>>,
    pub(super) recv_cq: Option<Arc<Cq>>,
    pub(super) srq: Option<Arc<Srq>>,
    pub(super) _xrcd: Option<Arc<Xrcd>>,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// The queue pair's protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The actual limits of the queue pair.
    pub fn limits(&self) -> QpLimits {
        self.limits
    }

    /// The queue pair's number, for logs.
    pub fn number(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).qp_num }
    }

    /// The queue pair's number.
    pub fn qp_number(&self) -> QpNumber {
        QpNumber::of_device(self.number())
    }

    /// The queue pair's identity in asynchronous events.
    pub(crate) fn object(&self) -> usize {
        self.raw as usize
    }

    pub(super) fn modify(&self, attr: &mut sys::ibv_qp_attr, mask: u32) -> Result<()> {
        let verbs = &self.pd.device().backend().verbs;
        // SAFETY: live and of this backend.
        FiErrno::from_verb(unsafe { (verbs.ibv_modify_qp)(self.raw, attr, mask as c_int) })
    }

    /// Moves the queue pair to its error state: the device flushes all outstanding requests to the
    /// completion queues.
    ///
    /// # Errors
    /// The device's.
    pub fn set_error(&self) -> Result<()> {
        let mut attr = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_ERR,
            ..Default::default()
        };
        self.modify(&mut attr, sys::IBV_QP_STATE)
    }

    /// Whether the queue pair is in its error state (`ibv_query_qp(3)`).
    ///
    /// # Errors
    /// The device's.
    pub fn is_in_error(&self) -> Result<bool> {
        let mut attr = sys::ibv_qp_attr::default();
        let mut init = sys::ibv_qp_init_attr::default();
        let verbs = &self.pd.device().backend().verbs;
        let mask = sys::IBV_QP_STATE as c_int;
        // SAFETY: live and of this backend; both structures are writable.
        FiErrno::from_verb(unsafe {
            (verbs.ibv_query_qp)(self.raw, &raw mut attr, mask, &raw mut init)
        })?;
        Ok(attr.qp_state == sys::IBV_QPS_ERR)
    }

    /// Queries the current attributes (`ibv_query_qp(3)`).
    ///
    /// # Errors
    /// The device's.
    pub fn query(&self) -> Result<QpState> {
        let mut attr = sys::ibv_qp_attr::default();
        let mut init = sys::ibv_qp_init_attr::default();
        let mask = sys::IBV_QP_MIN_RNR_TIMER
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_CAP
            | sys::IBV_QP_AV;
        let verbs = &self.pd.device().backend().verbs;
        // SAFETY: live and of this backend; both structures are writable.
        FiErrno::from_verb(unsafe {
            (verbs.ibv_query_qp)(self.raw, &raw mut attr, mask as c_int, &raw mut init)
        })?;
        Ok(QpState {
            min_rnr_timer: attr.min_rnr_timer,
            rnr_retry: attr.rnr_retry,
            retry_cnt: attr.retry_cnt,
            timeout: attr.timeout,
            traffic_class: attr.ah_attr.grh.traffic_class,
            max_send_wr: attr.cap.max_send_wr,
            max_recv_wr: attr.cap.max_recv_wr,
            max_inline_data: attr.cap.max_inline_data,
        })
    }

    /// Sets the RNR timer, the time that the peer waits before a retry if no receive is posted
    /// here: `timer` as `ibv_modify_qp(3)` encodes it, 1 (0.01 ms) to 31 (491.52 ms), 0 for 655.36
    /// ms.
    ///
    /// # Errors
    /// The device's.
    pub fn set_min_rnr_timer(&self, timer: u8) -> Result<()> {
        let mut attr = sys::ibv_qp_attr {
            min_rnr_timer: timer,
            ..Default::default()
        };
        self.modify(&mut attr, sys::IBV_QP_MIN_RNR_TIMER)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Id(id) => id.destroy_qp(),
            Owner::Verbs => {
                // SAFETY: created by this backend, destroyed once.
                let ret = unsafe { (self.pd.device().backend().verbs.ibv_destroy_qp)(self.raw) };
                if let Err(error) = FiErrno::from_verb(ret) {
                    warn_log!(EpCtrl, "ibv_destroy_qp: {error}");
                }
            }
        }
    }
}
