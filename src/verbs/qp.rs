//! RC queue pairs, made on an identifier of the connection manager, which moves them through
//! their states.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;
use std::sync::Arc;

use rdma_core_sys as sys;

use super::{CmId, Cq, Device, Pd, Srq};
use crate::errno::{FiErrno, Result};

/// A buffer of a work request: address, length, lkey.
pub type Sge = sys::ibv_sge;

/// How large a queue pair is asked to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Sends and RDMA operations under way.
    pub max_send_wr: usize,
    /// Receives posted.
    pub max_recv_wr: usize,
    /// Buffers per send.
    pub max_send_sge: usize,
    /// Buffers per receive.
    pub max_recv_sge: usize,
    /// Bytes inline.
    pub max_inline: usize,
    /// Whether it flushes ([`Qp::post_flush`]).
    pub flush: bool,
}

/// How large it became.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLimits {
    /// Bytes inline.
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

/// The operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum SendOpcode {
    /// `IBV_WR_SEND`
    Send = sys::IBV_WR_SEND,
    /// `IBV_WR_SEND_WITH_IMM`
    SendImm = sys::IBV_WR_SEND_WITH_IMM,
    /// `IBV_WR_RDMA_WRITE`
    Write = sys::IBV_WR_RDMA_WRITE,
    /// `IBV_WR_RDMA_WRITE_WITH_IMM`
    WriteImm = sys::IBV_WR_RDMA_WRITE_WITH_IMM,
    /// `IBV_WR_RDMA_READ`
    Read = sys::IBV_WR_RDMA_READ,
    /// `IBV_WR_ATOMIC_CMP_AND_SWP`
    CompareSwap = sys::IBV_WR_ATOMIC_CMP_AND_SWP,
    /// `IBV_WR_ATOMIC_FETCH_AND_ADD`
    FetchAdd = sys::IBV_WR_ATOMIC_FETCH_AND_ADD,
}

impl SendOpcode {
    /// Whether it is a message.
    #[inline]
    pub(crate) fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendImm)
    }

    /// Whether its local buffers are read, not written.
    #[inline]
    pub(crate) fn sends_data(self) -> bool {
        // the others come after it in verbs' numbering
        (self as u32) < Self::Read as u32
    }

    /// Whether it is a 64-bit atomic.
    #[inline]
    pub(crate) fn is_atomic(self) -> bool {
        (self as u32) > Self::Read as u32
    }

    /// The same operation without immediate data.
    #[inline]
    pub(crate) fn without_imm(self) -> Self {
        match self {
            Self::SendImm => Self::Send,
            Self::WriteImm => Self::Write,
            other => other,
        }
    }

    /// The same operation with immediate data; reads and atomics have none.
    #[inline]
    pub(crate) fn with_imm(self) -> Self {
        match self {
            Self::Send => Self::SendImm,
            Self::Write => Self::WriteImm,
            other => other,
        }
    }
}

/// A request for the send queue.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// Handed back in the completion.
    pub wr_id: u64,
    /// The operation.
    pub opcode: SendOpcode,
    /// Local buffers.
    pub sges: &'a [Sge],
    /// Take the data now, by the CPU.
    pub inline: bool,
    /// Report success.
    pub signaled: bool,
    /// Wait for the reads before.
    pub fence: bool,
    /// Immediate data, for the opcodes that have it.
    pub imm: u32,
    /// The peer's address, for RDMA and atomics.
    pub remote_addr: u64,
    /// The peer's key, for RDMA and atomics.
    pub rkey: u32,
    /// Atomics: the value to compare with, or to add.
    pub compare_add: u64,
    /// Compare and swap: the new value.
    pub swap: u64,
}

impl SendRequest<'static> {
    /// A request that carries nothing, signaled.
    pub(crate) fn empty(wr_id: u64, opcode: SendOpcode) -> Self {
        Self {
            wr_id,
            opcode,
            sges: &[],
            inline: false,
            signaled: true,
            fence: false,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
        }
    }
}

/// A request for the receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest<'a> {
    /// Handed back in the completion.
    pub wr_id: u64,
    /// Local buffers.
    pub sges: &'a [Sge],
}

/// A queue pair. Thread safe.
#[derive(Debug)]
pub struct Qp {
    raw: *mut sys::ibv_qp,
    /// Where it was made for flushes.
    flush: Option<FlushCalls>,
    limits: QpLimits,
    id: Arc<CmId>,
    pd: Arc<Pd>,
    _send_cq: Arc<Cq>,
    _recv_cq: Arc<Cq>,
    _srq: Option<Arc<Srq>>,
    /// `send_flags` of the request posted last.
    #[cfg(test)]
    pub(crate) posted_flags: std::sync::atomic::AtomicU32,
    /// How many flushes were posted.
    #[cfg(test)]
    pub(crate) flushes: std::sync::atomic::AtomicUsize,
}

/// The calls that post a flush (`ibv_wr_post(3)`).
#[derive(Clone, Copy, Debug)]
struct FlushCalls {
    qp: *mut sys::ibv_qp_ex,
    start: unsafe extern "C" fn(*mut sys::ibv_qp_ex),
    flush: unsafe extern "C" fn(*mut sys::ibv_qp_ex, u32, u64, usize, u8, u8),
    complete: unsafe extern "C" fn(*mut sys::ibv_qp_ex) -> c_int,
}

impl FlushCalls {
    /// # Safety
    /// A live queue pair of this backend.
    unsafe fn of(id: &CmId, raw: *mut sys::ibv_qp) -> Option<Self> {
        let convert = id.backend().verbs.ibv_qp_to_qp_ex?;
        // SAFETY: the caller's promise; NULL where it was not made by extended attributes.
        unsafe {
            let qp = convert(raw);
            let calls = qp.as_ref()?;
            Some(Self {
                qp,
                start: calls.wr_start?,
                flush: calls.wr_flush?,
                complete: calls.wr_complete?,
            })
        }
    }
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

/// A queue pair that can flush too, of the size in `attr`, which receives the actual size.
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
    /// `rdma_create_qp(3)`: on an identifier that is bound to the device of `pd`. With `srq` the
    /// queue pair takes its receives from there, and has no receive queue of its own.
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
            // SAFETY: just made.
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

    /// The protection domain that it is in.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The actual limits of the queue pair.
    pub fn limits(&self) -> QpLimits {
        self.limits
    }

    /// Its number, for logs.
    pub fn number(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).qp_num }
    }

    /// Its identity in asynchronous events.
    pub(crate) fn object(&self) -> usize {
        self.raw as usize
    }

    fn modify(&self, attr: &mut sys::ibv_qp_attr, mask: u32) -> Result<()> {
        let verbs = &self.id.backend().verbs;
        // SAFETY: live and of this backend.
        FiErrno::from_verb(unsafe { (verbs.ibv_modify_qp)(self.raw, attr, mask as c_int) })
    }

    /// Ends its work: everything posted is flushed to the completion queues.
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

    /// Timers and retries as they are now (`ibv_query_qp(3)`).
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

    /// How long a peer waits that finds no receive posted here: `timer` as `ibv_modify_qp(3)`
    /// encodes it, 1 (0.01 ms) to 31 (491.52 ms), 0 for 655.36 ms.
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

    /// `ibv_post_send(3)` of one request.
    ///
    /// # Errors
    /// `ENOMEM`: the queue is full. `EINVAL`: the request, or the state of the queue pair.
    ///
    /// # Safety
    /// Inline data must be readable now; the rest stay the caller's until completion.
    #[inline(always)]
    pub unsafe fn post_send(&self, request: &SendRequest<'_>) -> Result<()> {
        let mut flags = 0;
        if request.inline {
            flags |= sys::IBV_SEND_INLINE;
        }
        if request.signaled {
            flags |= sys::IBV_SEND_SIGNALED;
        }
        if request.fence {
            flags |= sys::IBV_SEND_FENCE;
        }
        #[cfg(test)]
        self.posted_flags
            .store(flags, std::sync::atomic::Ordering::Relaxed);
        let mut wr = sys::ibv_send_wr {
            wr_id: request.wr_id,
            sg_list: request.sges.as_ptr().cast_mut(),
            num_sge: request.sges.len() as c_int,
            opcode: request.opcode as u32,
            send_flags: flags,
            ..Default::default()
        };
        wr.__bindgen_anon_1.bindgen_union_field = request.imm.to_be();
        if request.opcode.is_atomic() {
            wr.wr.atomic.remote_addr = request.remote_addr;
            wr.wr.atomic.rkey = request.rkey;
            wr.wr.atomic.compare_add = request.compare_add;
            wr.wr.atomic.swap = request.swap;
        } else {
            wr.wr.rdma.remote_addr = request.remote_addr;
            wr.wr.rdma.rkey = request.rkey;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is live, the request a valid chain of one.
        FiErrno::from_verb(unsafe { sys::ibv_post_send(self.raw, &raw mut wr, &raw mut bad) })
    }

    /// Makes `len` bytes at the peer's `addr` persistent across a loss of power: the data of
    /// earlier writes on this queue pair (`ibv_wr_flush`, `ibv_wr_post(3)`).
    ///
    /// # Errors
    /// `ENOMEM`: the queue is full. `EOPNOTSUPP`: the queue pair was created without flush.
    pub fn post_flush(
        &self,
        wr_id: u64,
        (addr, rkey): (u64, u32),
        len: usize,
        signaled: bool,
    ) -> Result<()> {
        let calls = self.flush.ok_or(FiErrno::EOPNOTSUPP)?;
        #[cfg(test)]
        self.flushes
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let flags = if signaled { sys::IBV_SEND_SIGNALED } else { 0 };
        // both, as persistence alone does not order visibility; the values fit in 8 bits
        let placement = (sys::IBV_FLUSH_GLOBAL | sys::IBV_FLUSH_PERSISTENT) as u8;
        let level = sys::IBV_FLUSH_RANGE as u8;
        // SAFETY: the queue pair is live and was made with these operations, which are called
        // between start and complete, as ibv_wr_post(3) requires; start locks out other threads
        // until complete.
        FiErrno::from_verb(unsafe {
            (calls.start)(calls.qp);
            (*calls.qp).wr_id = wr_id;
            (*calls.qp).wr_flags = flags;
            (calls.flush)(calls.qp, rkey, addr, len, placement, level);
            (calls.complete)(calls.qp)
        })
    }

    /// `ibv_post_recv(3)` of one request.
    ///
    /// # Errors
    /// `ENOMEM`: the queue is full. `EINVAL`: the request, or the state of the queue pair.
    ///
    /// # Safety
    /// The buffers stay the caller's until completion.
    #[inline(always)]
    pub unsafe fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        let mut wr = sys::ibv_recv_wr {
            wr_id: request.wr_id,
            next: std::ptr::null_mut(),
            sg_list: request.sges.as_ptr().cast_mut(),
            num_sge: request.sges.len() as c_int,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is live, the request a valid chain of one.
        FiErrno::from_verb(unsafe { sys::ibv_post_recv(self.raw, &raw mut wr, &raw mut bad) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.id.destroy_qp();
    }
}

/// Finds by trying how many bytes queue pairs of a device take inline.
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
            // SAFETY: made above, destroyed once.
            unsafe { (verbs.ibv_destroy_qp)(qp) };
            return Ok((attr.cap.max_inline_data as usize).min(512));
        }
    }
    Ok(0)
}
