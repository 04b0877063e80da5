//! Shared receive queues.

#![allow(unsafe_code, reason = "calls verbs")]

use std::sync::Arc;

use rdma_core_sys as sys;

use super::{Cq, Pd, RecvRequest, SrqNumber, Xrcd};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// A shared receive queue, whose receives any queue pair that was created with it may consume; or
/// one of an XRC domain, whose receives the requests that name it consume. Thread safe.
#[derive(Debug)]
pub struct Srq {
    raw: *mut sys::ibv_srq,
    pd: Arc<Pd>,
    xrc: Option<Xrc>,
}

/// What a queue of an XRC domain has in addition.
#[derive(Debug)]
struct Xrc {
    number: SrqNumber,
    /// Live until the queue is destroyed.
    _domain: Arc<Xrcd>,
    /// For completions of its receives; live until the queue is destroyed.
    _cq: Arc<Cq>,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    /// `ibv_create_srq(3)`: creates a queue for at least `max_wr` receives of `max_sge` buffers
    /// each.
    ///
    /// # Errors
    /// `EINVAL`: a size exceeds the device's limit. `ENOSYS`, `EOPNOTSUPP`: the device has no
    /// shared receive queues. `ENOMEM`.
    pub fn create(pd: &Arc<Pd>, max_wr: usize, max_sge: usize) -> Result<Self> {
        let mut init = sys::ibv_srq_init_attr::default();
        init.attr.max_wr = u32::try_from(max_wr).map_err(|_| FiErrno::EINVAL)?;
        init.attr.max_sge = u32::try_from(max_sge).map_err(|_| FiErrno::EINVAL)?;
        // SAFETY: the protection domain is live and of this backend.
        let raw = unsafe { (pd.device().backend().verbs.ibv_create_srq)(pd.raw(), &raw mut init) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self {
            raw,
            pd: Arc::clone(pd),
            xrc: None,
        })
    }

    /// `ibv_create_srq_ex(3)`: creates a queue of an XRC domain, as [`Self::create`], whose
    /// receives complete in `cq`. Keys of requests that name the queue are those of `pd`.
    ///
    /// # Errors
    /// `EINVAL`: a size exceeds the device's limit; or the domain is closed. `EOPNOTSUPP`: the
    /// device has no XRC. `ENOMEM`.
    pub fn create_xrc(
        pd: &Arc<Pd>,
        xrcd: &Arc<Xrcd>,
        cq: &Arc<Cq>,
        max_wr: usize,
        max_sge: usize,
    ) -> Result<Self> {
        let mut init = sys::ibv_srq_init_attr_ex {
            comp_mask: sys::IBV_SRQ_INIT_ATTR_TYPE
                | sys::IBV_SRQ_INIT_ATTR_PD
                | sys::IBV_SRQ_INIT_ATTR_XRCD
                | sys::IBV_SRQ_INIT_ATTR_CQ,
            srq_type: sys::IBV_SRQT_XRC,
            pd: pd.raw(),
            cq: cq.raw(),
            ..Default::default()
        };
        init.attr.max_wr = u32::try_from(max_wr).map_err(|_| FiErrno::EINVAL)?;
        init.attr.max_sge = u32::try_from(max_sge).map_err(|_| FiErrno::EINVAL)?;
        let raw = xrcd.with_raw(|domain| {
            init.xrcd = domain;
            // SAFETY: all objects are live and of this backend.
            let raw = unsafe { sys::ibv_create_srq_ex(pd.device().context(), &raw mut init) };
            if raw.is_null() {
                return Err(FiErrno::last());
            }
            Ok(raw)
        })?;
        // from here on, an error destroys the queue
        let mut this = Self {
            raw,
            pd: Arc::clone(pd),
            xrc: None,
        };
        let mut number = 0;
        // SAFETY: live; `number` is writable.
        FiErrno::from_verb(unsafe { sys::ibv_get_srq_num(raw, &raw mut number) })?;
        this.xrc = Some(Xrc {
            number: SrqNumber::of_device(number),
            _domain: Arc::clone(xrcd),
            _cq: Arc::clone(cq),
        });
        Ok(this)
    }

    /// The number by which requests name a queue of an XRC domain; `None` for other queues.
    pub fn number(&self) -> Option<SrqNumber> {
        self.xrc.as_ref().map(|xrc| xrc.number)
    }

    /// The queue's identity in asynchronous events.
    pub fn object(&self) -> usize {
        self.raw as usize
    }

    /// `ibv_modify_srq(3)`: when fewer than `limit` receives are posted, the device raises
    /// [`AsyncEvent::SrqLimit`](super::AsyncEvent::SrqLimit) once. 0: no event.
    ///
    /// # Errors
    /// `EINVAL`: the limit exceeds the size of the queue. Others: the device's.
    pub fn arm_limit(&self, limit: u32) -> Result<()> {
        let mut attr = sys::ibv_srq_attr {
            srq_limit: limit,
            ..Default::default()
        };
        let modify = self.pd.device().backend().verbs.ibv_modify_srq;
        // SAFETY: live and of this backend.
        let ret = unsafe { modify(self.raw, &raw mut attr, sys::IBV_SRQ_LIMIT as i32) };
        FiErrno::from_verb(ret)
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_srq {
        self.raw
    }

    /// `ibv_post_srq_recv(3)` of one request.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. `EINVAL`: the request is invalid.
    ///
    /// # Safety
    /// The caller keeps the buffers valid until completion, or until the queue is destroyed.
    #[inline]
    pub unsafe fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        let mut wr = request.wr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is live, the request a valid chain of one.
        FiErrno::from_post(unsafe { sys::ibv_post_srq_recv(self.raw, &raw mut wr, &raw mut bad) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: created by this backend. Each queue pair on the queue holds a reference to it, so
        // no such queue pair exists any more.
        let ret = unsafe { (self.pd.device().backend().verbs.ibv_destroy_srq)(self.raw) };
        if let Err(error) = FiErrno::from_verb(ret) {
            warn_log!(EpData, "ibv_destroy_srq: {error}");
        }
    }
}
