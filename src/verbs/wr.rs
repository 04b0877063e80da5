//! Work requests, and their post to a queue pair (`ibv_post_send(3)`, `ibv_post_recv(3)`).

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::offset_of;

use rdma_core_sys as sys;

use super::{ElementsRequest, Lkey, Qp, RemoteAddr, Rkey, SrqNumber};
use crate::errno::{FiErrno, Result};

/// A buffer of a work request (`struct ibv_sge`, same layout).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Local address.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// Key of the buffer's registration; unused for inline data.
    pub lkey: Lkey,
}

const _: () = {
    assert!(size_of::<Sge>() == size_of::<sys::ibv_sge>());
    assert!(align_of::<Sge>() == align_of::<sys::ibv_sge>());
    assert!(offset_of!(Sge, addr) == offset_of!(sys::ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(sys::ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(sys::ibv_sge, lkey));
};

/// The list of `sges` in verbs' form. Verbs does not write to the list.
#[inline]
pub(super) fn sg_list(sges: &[Sge]) -> *mut sys::ibv_sge {
    sges.as_ptr().cast_mut().cast()
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
    /// `SOFTDV_WR_ATOMIC`: an operation of `fi_atomic(3)` on elements (`verbs/elements.rs`).
    Elements = sys::SOFTDV_WR_ATOMIC,
}

impl SendOpcode {
    /// Whether the operation is a send.
    #[inline]
    pub(crate) fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendImm)
    }

    /// Whether the device reads the local buffers; otherwise it writes them.
    #[inline]
    pub(crate) fn sends_data(self) -> bool {
        // in verbs' numbering, reads and atomics follow sends and writes
        (self as u32) < Self::Read as u32
    }

    /// Whether the operation is an atomic.
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

/// A request for the send queue: the `struct ibv_send_wr` that the device reads, and the lifetime
/// of its sges. The layers above fill it in: the initiator the operation, the send queue its
/// `wr_id` and whether it is signaled.
pub struct SendRequest<'a> {
    pub(super) wr: sys::ibv_send_wr,
    sges: PhantomData<&'a [Sge]>,
}

impl<'a> SendRequest<'a> {
    /// A request without flags, immediate data or remote memory, and with `wr_id` 0.
    #[inline(always)]
    pub fn new(opcode: SendOpcode, sges: &'a [Sge]) -> Self {
        let mut request = Self {
            wr: sys::ibv_send_wr::default(),
            sges: PhantomData,
        };
        request.wr.sg_list = sg_list(sges);
        request.wr.num_sge = sges.len() as c_int;
        request.wr.opcode = opcode as u32;
        request
    }

    /// Its local buffers.
    #[inline]
    pub(super) fn sges(&self) -> &[Sge] {
        match self.wr.num_sge {
            0 => &[],
            // SAFETY: `new` has set both from a list of the lifetime of this request.
            count => unsafe { std::slice::from_raw_parts(self.wr.sg_list.cast(), count as usize) },
        }
    }

    /// Sets the work request's id, which its completion contains.
    #[inline(always)]
    pub fn wr_id(&mut self, wr_id: u64) -> &mut Self {
        self.wr.wr_id = wr_id;
        self
    }

    /// With `inline` the CPU copies the data into the request during the post.
    #[inline(always)]
    pub fn inline(&mut self, inline: bool) -> &mut Self {
        self.flag(sys::IBV_SEND_INLINE, inline)
    }

    /// With `signaled` success generates a completion.
    #[inline(always)]
    pub fn signaled(&mut self, signaled: bool) -> &mut Self {
        self.flag(sys::IBV_SEND_SIGNALED, signaled)
    }

    /// With `solicited` the receive of a send raises the event of a completion queue that is armed
    /// for solicited completions alone ([`Cq::arm_solicited`](super::Cq::arm_solicited)).
    #[inline(always)]
    pub fn solicited(&mut self, solicited: bool) -> &mut Self {
        self.flag(sys::IBV_SEND_SOLICITED, solicited)
    }

    /// With `fence` the request starts only after all earlier reads and atomics are complete.
    #[inline(always)]
    pub fn fence(&mut self, fence: bool) -> &mut Self {
        self.flag(sys::IBV_SEND_FENCE, fence)
    }

    /// Sets the flag if `on`; no flag is set twice.
    #[inline(always)]
    fn flag(&mut self, flag: u32, on: bool) -> &mut Self {
        self.wr.send_flags |= if on { flag } else { 0 };
        self
    }

    /// Sets the immediate data, for the opcodes that have it.
    #[inline(always)]
    pub fn imm(&mut self, imm: u32) -> &mut Self {
        self.wr.__bindgen_anon_1.bindgen_union_field = imm.to_be();
        self
    }

    /// Sets the shared receive queue that a request on an initiator of XRC names.
    #[inline(always)]
    pub fn to_srq(&mut self, srq: SrqNumber) -> &mut Self {
        self.wr.qp_type.xrc.remote_srqn = srq.get();
        self
    }

    /// Sets the remote memory of a read or write. Sends ignore it.
    #[inline(always)]
    pub fn rdma(&mut self, (addr, rkey): (RemoteAddr, Rkey)) -> &mut Self {
        self.wr.wr.rdma.remote_addr = addr.get();
        self.wr.wr.rdma.rkey = rkey.get();
        self
    }

    /// Sets the remote memory and the operands of an atomic: `compare_add` is the value to compare
    /// with or to add, `swap` the new value of a compare and swap.
    #[inline(always)]
    pub fn atomic(
        &mut self,
        (addr, rkey): (RemoteAddr, Rkey),
        compare_add: u64,
        swap: u64,
    ) -> &mut Self {
        self.wr.wr.atomic.remote_addr = addr.get();
        self.wr.wr.atomic.rkey = rkey.get();
        self.wr.wr.atomic.compare_add = compare_add;
        self.wr.wr.atomic.swap = swap;
        self
    }
}

impl std::fmt::Debug for SendRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendRequest")
            .field("wr_id", &self.wr.wr_id)
            .field("opcode", &self.wr.opcode)
            .field("send_flags", &self.wr.send_flags)
            .finish_non_exhaustive()
    }
}

/// A request for the receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest<'a> {
    /// The work request's id, which its completion contains.
    pub wr_id: u64,
    /// Local buffers.
    pub sges: &'a [Sge],
}

impl RecvRequest<'_> {
    /// A chain of this request alone.
    #[inline(always)]
    pub(super) fn wr(&self) -> sys::ibv_recv_wr {
        sys::ibv_recv_wr {
            wr_id: self.wr_id,
            next: std::ptr::null_mut(),
            sg_list: sg_list(self.sges),
            num_sge: self.sges.len() as c_int,
        }
    }
}

/// The calls that post a flush (`ibv_wr_post(3)`).
#[derive(Clone, Copy, Debug)]
pub(super) struct FlushCalls {
    qp: *mut sys::ibv_qp_ex,
    start: unsafe extern "C" fn(*mut sys::ibv_qp_ex),
    flush: unsafe extern "C" fn(*mut sys::ibv_qp_ex, u32, u64, usize, u8, u8),
    /// Of an initiator of XRC.
    to_srq: Option<unsafe extern "C" fn(*mut sys::ibv_qp_ex, u32)>,
    complete: unsafe extern "C" fn(*mut sys::ibv_qp_ex) -> c_int,
}

impl FlushCalls {
    /// # Safety
    /// `raw` is a live queue pair of the backend.
    pub(super) unsafe fn of(backend: &sys::Backend, raw: *mut sys::ibv_qp) -> Option<Self> {
        let convert = backend.verbs.ibv_qp_to_qp_ex?;
        // SAFETY: as this function. The result is NULL if the queue pair was not created by
        // extended attributes.
        unsafe {
            let qp = convert(raw);
            let calls = qp.as_ref()?;
            Some(Self {
                qp,
                start: calls.wr_start?,
                flush: calls.wr_flush?,
                to_srq: calls.wr_set_xrc_srqn,
                complete: calls.wr_complete?,
            })
        }
    }
}

impl Qp {
    /// `ibv_post_send(3)` of one request.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. `EINVAL`: the request, or the queue pair's state, is invalid.
    ///
    /// # Safety
    /// Inline data is readable during the call. The caller keeps all other buffers valid until
    /// completion.
    #[inline(always)]
    pub unsafe fn post_send(&self, request: &mut SendRequest<'_>) -> Result<()> {
        #[cfg(test)]
        self.note_fence(&request.wr);
        let mut bad = std::ptr::null_mut();
        let wr = &raw mut request.wr;
        // SAFETY: the queue pair is live, the request a valid chain of one.
        FiErrno::from_post(unsafe { sys::ibv_post_send(self.raw, wr, &raw mut bad) })
    }

    /// Whether the device has [`Self::execute`].
    #[inline(always)]
    pub fn executes(&self) -> bool {
        self.executes.is_some()
    }

    /// Executes a READ or WRITE in this call, behind all posted requests, without a request and its
    /// completion. `keyed`: the buffer is checked against its lkey. `srq`: as
    /// [`SendRequest::to_srq`], on an initiator of XRC. `false`: it has to be posted; the device
    /// cannot execute it, or not now.
    ///
    /// # Safety
    /// The buffer is readable, or writable for a READ, during the call.
    #[inline(always)]
    pub unsafe fn execute(
        &self,
        opcode: SendOpcode,
        (sge, keyed): (&Sge, bool),
        (addr, rkey): (RemoteAddr, Rkey),
        srq: Option<SrqNumber>,
    ) -> bool {
        let Some(calls) = &self.executes else {
            return false;
        };
        let flags = if keyed {
            0
        } else {
            sys::SOFTDV_ACCESS_UNCHECKED
        };
        let sge = sg_list(std::slice::from_ref(sge));
        let (opcode, addr, rkey) = (opcode as u32, addr.get(), rkey.get());
        match srq {
            // SAFETY: live and of this backend; a readable sge.
            None => unsafe { (calls.access)(self.raw, opcode, sge, flags, addr, rkey) == 0 },
            // SAFETY: as above.
            Some(srq) => calls.to_srq.is_some_and(|call| unsafe {
                call(self.raw, opcode, sge, flags, srq.get(), addr, rkey) == 0
            }),
        }
    }

    /// As [`Self::execute`], READs of several addresses, one to each buffer, by one call of the
    /// device. Returns the number of those that were executed, from the first one on; the others
    /// have to be posted. The three lists have the same length.
    ///
    /// # Safety
    /// The buffers are writable during the call.
    pub unsafe fn execute_reads(
        &self,
        (sges, keyed): (&[Sge], bool),
        (addrs, rkeys): (&[RemoteAddr], &[Rkey]),
    ) -> usize {
        let calls = self.executes.as_ref();
        let (Some(call), Ok(count)) = (
            calls.and_then(|calls| calls.list),
            c_int::try_from(sges.len().min(addrs.len()).min(rkeys.len())),
        ) else {
            return 0;
        };
        let flags = if keyed {
            0
        } else {
            sys::SOFTDV_ACCESS_UNCHECKED
        };
        let (opcode, to) = (SendOpcode::Read as u32, sg_list(sges));
        // the same layouts
        let (from, keys) = (addrs.as_ptr().cast(), rkeys.as_ptr().cast());
        // SAFETY: live and of this backend; `count` writable sges, addresses and keys.
        let done = unsafe { call(self.raw, opcode, to, count, flags, from, keys) };
        usize::try_from(done).unwrap_or(0)
    }

    /// As [`Self::execute`], an operation on elements. `results` gets their earlier values, unless
    /// it is NULL.
    ///
    /// # Safety
    /// The operands are readable during the call, and `results` has room for the elements.
    #[inline(always)]
    pub(crate) unsafe fn execute_elements(
        &self,
        request: &mut ElementsRequest,
        results: *mut u8,
        (addr, rkey): (RemoteAddr, Rkey),
        srq: Option<SrqNumber>,
    ) -> bool {
        let Some(calls) = &self.executes else {
            return false;
        };
        let (asked, results) = (request.as_raw(), results.cast());
        let (addr, rkey) = (addr.get(), rkey.get());
        match srq {
            None => calls.atomic.is_some_and(|call| {
                // SAFETY: live and of this backend; memory as this function.
                unsafe { call(self.raw, asked, results, addr, rkey) == 0 }
            }),
            Some(srq) => calls.atomic_to_srq.is_some_and(|call| {
                // SAFETY: as above.
                unsafe { call(self.raw, asked, results, srq.get(), addr, rkey) == 0 }
            }),
        }
    }

    /// A request is posted.
    #[cfg(test)]
    pub(super) fn note_fence(&self, wr: &sys::ibv_send_wr) {
        let fence = u64::from(wr.send_flags & sys::IBV_SEND_FENCE != 0);
        let order = std::sync::atomic::Ordering::Relaxed;
        let fences = self.posted_fences.load(order);
        self.posted_fences.store(fences << 1 | fence, order);
    }

    /// Makes `len` bytes at the peer's `addr` persistent across a loss of power: the data of
    /// earlier writes on this queue pair (`ibv_wr_flush`, `ibv_wr_post(3)`). `srq`: as
    /// [`SendRequest::to_srq`], on an initiator of XRC.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. `EOPNOTSUPP`: the queue pair was created without flush.
    pub fn post_flush(
        &self,
        wr_id: u64,
        srq: Option<SrqNumber>,
        ((addr, rkey), len): ((RemoteAddr, Rkey), usize),
        signaled: bool,
    ) -> Result<()> {
        let calls = self.flush.ok_or(FiErrno::EOPNOTSUPP)?;
        let names = calls.to_srq.zip(srq);
        if srq.is_some() && names.is_none() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        #[cfg(test)]
        self.flushes
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let flags = if signaled { sys::IBV_SEND_SIGNALED } else { 0 };
        // both, because persistence does not imply global visibility; the values fit in 8 bits
        let placement = (sys::IBV_FLUSH_GLOBAL | sys::IBV_FLUSH_PERSISTENT) as u8;
        let level = sys::IBV_FLUSH_RANGE as u8;
        // SAFETY: the queue pair is live and was created with these operations, which are called
        // between start and complete, as ibv_wr_post(3) requires. Start acquires the queue's lock
        // until complete.
        FiErrno::from_post(unsafe {
            (calls.start)(calls.qp);
            (*calls.qp).wr_id = wr_id;
            (*calls.qp).wr_flags = flags;
            (calls.flush)(calls.qp, rkey.get(), addr.get(), len, placement, level);
            if let Some((name, srq)) = names {
                name(calls.qp, srq.get());
            }
            (calls.complete)(calls.qp)
        })
    }

    /// `ibv_post_recv(3)` of one request.
    ///
    /// # Errors
    /// `EAGAIN`: the queue is full. `EINVAL`: the request, or the queue pair's state, is invalid.
    ///
    /// # Safety
    /// The caller keeps the buffers valid until completion.
    #[inline(always)]
    pub unsafe fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        let mut wr = request.wr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is live, the request a valid chain of one.
        FiErrno::from_post(unsafe { sys::ibv_post_recv(self.raw, &raw mut wr, &raw mut bad) })
    }
}
