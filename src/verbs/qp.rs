//! Creation, states and attributes of RC queue pairs, which are created on an identifier of the
//! connection manager. The connection manager changes their states. `post.rs` posts to them.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;
use std::sync::Arc;

use rdma_core_sys as sys;

use super::post::FlushCalls;
use super::{CmId, Cq, Device, Pd, Srq};
use crate::errno::{FiErrno, Result};

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
    limits: QpLimits,
    id: Arc<CmId>,
    pd: Arc<Pd>,
    _send_cq: Arc<Cq>,
    _recv_cq: Arc<Cq>,
    _srq: Option<Arc<Srq>>,
    /// `send_flags` of the request posted last.
    #[cfg(test)]
    pub(crate) posted_flags: std::sync::atomic::AtomicU32,
    /// Number of posted flushes.
    #[cfg(test)]
    pub(crate) flushes: std::sync::atomic::AtomicUsize,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

fn init_attr(config: &QpConfig, send_cq: &Cq, recv_cq: &Cq) -> sys::ibv_qp_init_attr {
    let mut attr = sys::ibv_qp_init_attr {
        send_cq: send_cq.raw(),
        recv_cq: recv_cq.raw(),
        qp_type: sys::IBV_QPT_RC,
        ..Default::default()
    };
    // all are clipped to the device's limits, which are of type c_int
    attr.cap.max_send_wr = config.max_send_wr as u32;
    attr.cap.max_recv_wr = config.max_recv_wr as u32;
    attr.cap.max_send_sge = config.max_send_sge as u32;
    attr.cap.max_recv_sge = config.max_recv_sge as u32;
    attr.cap.max_inline_data = config.max_inline as u32;
    attr
}

/// Creates a queue pair that supports flushes, of the size in `attr`, which receives the actual
/// size.
fn create_flushing(
    id: &CmId,
    pd: &Pd,
    attr: &mut sys::ibv_qp_init_attr,
) -> Result<*mut sys::ibv_qp> {
    let operations = sys::IBV_QP_EX_WITH_SEND
        | sys::IBV_QP_EX_WITH_SEND_WITH_IMM
        | sys::IBV_QP_EX_WITH_RDMA_WRITE
        | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | sys::IBV_QP_EX_WITH_RDMA_READ
        | sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | sys::IBV_QP_EX_WITH_FLUSH;
    let mut extended = sys::ibv_qp_init_attr_ex {
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        pd: pd.raw(),
        send_ops_flags: operations.into(),
        ..Default::default()
    };
    let raw = id.create_qp_ex(&mut extended)?;
    attr.cap = extended.cap;
    Ok(raw)
}

impl Qp {
    /// `rdma_create_qp(3)`: creates a queue pair on an identifier that is bound to the device of
    /// `pd`. With `srq` the queue pair uses the receives of that queue, and has no receive queue of
    /// its own.
    ///
    /// # Errors
    /// `EINVAL`: the identifier has no device, another device, or a queue pair; or the device
    /// refuses the size. `ENOMEM`. `EOPNOTSUPP`: flush is requested, and the device has none.
    pub fn create(
        id: &Arc<CmId>,
        pd: &Arc<Pd>,
        send_cq: &Arc<Cq>,
        recv_cq: &Arc<Cq>,
        srq: Option<&Arc<Srq>>,
        config: &QpConfig,
    ) -> Result<Self> {
        if !id.is_on(pd.device()) {
            return Err(FiErrno::EINVAL);
        }
        let mut attr = init_attr(config, send_cq, recv_cq);
        attr.srq = srq.map_or(std::ptr::null_mut(), |srq| srq.raw());
        let (raw, flush) = if config.flush {
            let raw = create_flushing(id, pd, &mut attr)?;
            // SAFETY: `raw` is the queue pair that was created above.
            let Some(calls) = (unsafe { FlushCalls::of(id, raw) }) else {
                id.destroy_qp();
                return Err(FiErrno::EOPNOTSUPP);
            };
            (raw, Some(calls))
        } else {
            (id.create_qp(pd, &mut attr)?, None)
        };
        Ok(Self {
            raw,
            flush,
            limits: QpLimits {
                max_inline: attr.cap.max_inline_data as usize,
            },
            id: Arc::clone(id),
            pd: Arc::clone(pd),
            _send_cq: Arc::clone(send_cq),
            _recv_cq: Arc::clone(recv_cq),
            _srq: srq.map(Arc::clone),
            #[cfg(test)]
            posted_flags: Default::default(),
            #[cfg(test)]
            flushes: Default::default(),
        })
    }

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

    /// The queue pair's identity in asynchronous events.
    pub(crate) fn object(&self) -> usize {
        self.raw as usize
    }

    fn modify(&self, attr: &mut sys::ibv_qp_attr, mask: u32) -> Result<()> {
        let verbs = &self.id.backend().verbs;
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
        let verbs = &self.id.backend().verbs;
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
        self.id.destroy_qp();
    }
}

/// Determines the maximum length of inline data, by creating queue pairs with decreasing lengths
/// from 512 bytes.
pub(super) fn probe_max_inline(device: &Arc<Device>) -> Result<usize> {
    let verbs = &device.backend().verbs;
    let pd = Pd::alloc(device)?;
    let cq = Cq::create(device, 1, None, 0)?;
    for max_inline in [512, 384, 256, 128, 64, 32] {
        let config = QpConfig {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline,
            flush: false,
        };
        let mut attr = init_attr(&config, &cq, &cq);
        // SAFETY: protection domain and queue are live and of this backend.
        let qp = unsafe { (verbs.ibv_create_qp)(pd.raw(), &raw mut attr) };
        if !qp.is_null() {
            // SAFETY: created above, destroyed once.
            unsafe { (verbs.ibv_destroy_qp)(qp) };
            return Ok((attr.cap.max_inline_data as usize).min(512));
        }
    }
    Ok(0)
}
