//! The content of a request, and its sges.

use std::mem::MaybeUninit;

use rdma_core_sys::*;

use super::Operands;
use crate::key::Key;
use crate::limits::MAX_SGE;
use crate::mw::Bind;
use crate::object::Ah;
use crate::region::{self, Shape};
use crate::sys::{self, Errno, Res};

/// A request in execution, with its sges as memory ranges of this process.
pub(super) struct Request<'a> {
    pub(super) opcode: u32,
    pub(super) flags: u32,
    pub(super) imm: u32,
    pub(super) operands: Operands,
    pub(super) iovecs: &'a [libc::iovec],
    pub(super) len: u64,
}

impl Request<'_> {
    /// Copies the payload to contiguous memory.
    ///
    /// # Safety
    /// `to` must have room for the payload.
    #[inline]
    pub(super) unsafe fn gather(&self, to: *mut u8) {
        // SAFETY: the caller promises room; the sges are the application's registered buffers, or
        // inline data.
        unsafe { gather(self.iovecs, to) }
    }
}

/// Copies memory ranges of this process, one after the other, to contiguous memory. An empty range
/// can have any address.
///
/// # Safety
/// `to` must have room for all ranges, which must be readable.
#[inline]
pub(super) unsafe fn gather(iovecs: &[libc::iovec], mut to: *mut u8) {
    for iovec in iovecs {
        // SAFETY: the caller promises room and readable ranges.
        unsafe {
            to.copy_from_nonoverlapping(iovec.iov_base.cast(), iovec.iov_len);
            to = to.add(iovec.iov_len);
        }
    }
}

impl Request<'_> {
    /// Copies a result into the sges.
    ///
    /// # Safety
    /// The sges must be writable, and as long as the result.
    pub(super) unsafe fn scatter(&self, mut from: &[u8]) {
        for iovec in self.iovecs {
            let (now, later) = from.split_at(iovec.iov_len.min(from.len()));
            // SAFETY: the caller promises writable sges that are long enough.
            unsafe {
                iovec
                    .iov_base
                    .cast::<u8>()
                    .copy_from_nonoverlapping(now.as_ptr(), now.len());
            }
            from = later;
        }
    }
}

/// Reads the operands from the union of a work request, by queue pair type and opcode.
#[inline]
pub(super) fn operands(kind: u32, wr: &ibv_send_wr) -> Res<Operands> {
    if wr.opcode == IBV_WR_BIND_MW {
        return bind_operands(wr);
    }
    if kind != IBV_QPT_UD {
        // SAFETY: the union's members are read by opcode, and all bytes of it are initialised.
        let rdma = unsafe { wr.wr.rdma };
        // For other queue pair types the field is not initialised by the application.
        let qpn = if kind == IBV_QPT_XRC_SEND {
            // SAFETY: the union's members are read by opcode, and all bytes of it are initialised.
            unsafe { wr.qp_type.xrc }.remote_srqn
        } else {
            0
        };
        // A flush has its length and type in the operands of atomics.
        if is_atomic(wr.opcode) || wr.opcode == IBV_WR_FLUSH {
            // SAFETY: the union's members are read by opcode, and all bytes of it are initialised.
            let atomic = unsafe { wr.wr.atomic };
            if wr.opcode == SOFTDV_WR_ATOMIC {
                check_elements(atomic.compare_add, wr.num_sge != 0)?;
            }
            return Ok(Operands {
                remote_addr: atomic.remote_addr,
                rkey: atomic.rkey,
                compare_add: atomic.compare_add,
                swap: atomic.swap,
                qpn,
                ..Operands::default()
            });
        }
        return Ok(Operands {
            remote_addr: rdma.remote_addr,
            rkey: rdma.rkey,
            qpn,
            ..Operands::default()
        });
    }
    // SAFETY: the union's members are read by opcode, and all bytes of it are initialised.
    let ud = unsafe { wr.wr.ud };
    if ud.ah.is_null() {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: the caller of the post promises a live address handle.
    let ah = unsafe { Ah::from_ptr(ud.ah) };
    Ok(Operands {
        node: ah.node,
        flow: ah.flow,
        qpn: ud.remote_qpn & 0xff_ffff,
        qkey: ud.remote_qkey,
        ..Operands::default()
    })
}

/// Checks the operation at an address.
///
/// # Errors
/// `EINVAL`: it does not exist, has no effect, or the device has no such operations.
fn check_elements(at: u64, fetches: bool) -> Res<()> {
    let atomic: *const softdv_atomic = std::ptr::with_exposed_provenance(at as usize);
    if atomic.is_null() || !atomic.is_aligned() || !region::offers_elements() {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: not NULL; the caller of the post promises the structure.
    let asked = unsafe { *atomic };
    let shape = Shape::new(asked.op, asked.datatype, asked.count).ok_or(Errno(libc::EINVAL))?;
    // SAFETY: not used.
    let absent = unsafe { shape.operands_of(&asked) }.is_none();
    if absent || shape.rights(fetches) == 0 {
        return Err(Errno(libc::EINVAL));
    }
    Ok(())
}

/// The operands of a bind, stored in fields that have another meaning for other requests.
fn bind_operands(wr: &ibv_send_wr) -> Res<Operands> {
    // SAFETY: the union's members are read by opcode, and all bytes of it are initialised.
    let bind = unsafe { wr.__bindgen_anon_2.bind_mw };
    let info = bind.bind_info;
    if bind.mw.is_null() || info.mr.is_null() && (info.addr != 0 || info.length != 0) {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: the caller of the post promises a live window, and NULL or a live region.
    let (window, region) = unsafe {
        let region = info.mr.as_ref().map_or(0, |mr| mr.lkey);
        ((*bind.mw).handle, region)
    };
    Ok(Operands {
        remote_addr: info.addr,
        rkey: bind.rkey,
        compare_add: info.length,
        node: info.mw_access_flags,
        qpn: window,
        qkey: region,
        ..Operands::default()
    })
}

impl Operands {
    /// The bind whose operands these are.
    pub(super) fn as_bind(&self) -> Bind {
        Bind {
            window: self.qpn,
            key: Key(self.rkey),
            region: Key(self.qkey),
            addr: self.remote_addr,
            len: self.compare_add,
            access: self.node,
        }
    }
}

/// A list of memory ranges on the stack, not zeroed for speed.
pub(crate) struct IovecList {
    list: [MaybeUninit<libc::iovec>; MAX_SGE as usize],
    count: usize,
}

impl IovecList {
    #[inline]
    pub(super) fn new() -> Self {
        Self {
            list: [const { MaybeUninit::uninit() }; MAX_SGE as usize],
            count: 0,
        }
    }

    #[inline]
    pub(super) fn push(&mut self, addr: u64, len: usize) {
        self.list[self.count].write(sys::as_local(addr, len));
        self.count += 1;
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[libc::iovec] {
        // SAFETY: the first `count` entries were written.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr().cast(), self.count) }
    }
}

#[inline]
pub(super) fn is_atomic(opcode: u32) -> bool {
    matches!(
        opcode,
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD | SOFTDV_WR_ATOMIC
    )
}

/// Whether a request writes to its local sges.
#[inline]
pub(super) fn fetches(opcode: u32) -> bool {
    opcode == IBV_WR_RDMA_READ || is_atomic(opcode)
}

/// Whether a request accesses the memory of the other end by its address, and does nothing else.
pub(super) fn accesses(opcode: u32) -> bool {
    opcode == IBV_WR_RDMA_WRITE || fetches(opcode)
}

/// The `IBV_WC_*` opcode of a request.
#[inline]
pub(super) fn completion_opcode(opcode: u32) -> u32 {
    match opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => IBV_WC_RDMA_WRITE,
        IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP => IBV_WC_COMP_SWAP,
        IBV_WR_ATOMIC_FETCH_AND_ADD | SOFTDV_WR_ATOMIC => IBV_WC_FETCH_ADD,
        IBV_WR_FLUSH => IBV_WC_FLUSH,
        IBV_WR_ATOMIC_WRITE => IBV_WC_ATOMIC_WRITE,
        IBV_WR_BIND_MW => IBV_WC_BIND_MW,
        IBV_WR_LOCAL_INV => IBV_WC_LOCAL_INV,
        _ => IBV_WC_SEND,
    }
}

/// Whether queue pairs of this type support this opcode.
#[inline]
pub(super) fn offered(kind: u32, opcode: u32) -> bool {
    match kind {
        IBV_QPT_RC => matches!(
            opcode,
            IBV_WR_SEND
                | IBV_WR_SEND_WITH_IMM
                | IBV_WR_RDMA_WRITE
                | IBV_WR_RDMA_WRITE_WITH_IMM
                | IBV_WR_RDMA_READ
                | IBV_WR_ATOMIC_CMP_AND_SWP
                | IBV_WR_ATOMIC_FETCH_AND_ADD
                | IBV_WR_BIND_MW
                | IBV_WR_LOCAL_INV
                | IBV_WR_SEND_WITH_INV
                | IBV_WR_ATOMIC_WRITE
                | IBV_WR_FLUSH
                | SOFTDV_WR_ATOMIC
        ),
        IBV_QPT_UC => matches!(
            opcode,
            IBV_WR_SEND
                | IBV_WR_SEND_WITH_IMM
                | IBV_WR_RDMA_WRITE
                | IBV_WR_RDMA_WRITE_WITH_IMM
                | IBV_WR_BIND_MW
                | IBV_WR_LOCAL_INV
        ),
        IBV_QPT_XRC_SEND => matches!(
            opcode,
            IBV_WR_SEND
                | IBV_WR_SEND_WITH_IMM
                | IBV_WR_RDMA_WRITE
                | IBV_WR_RDMA_WRITE_WITH_IMM
                | IBV_WR_RDMA_READ
                | IBV_WR_ATOMIC_CMP_AND_SWP
                | IBV_WR_ATOMIC_FETCH_AND_ADD
                | IBV_WR_ATOMIC_WRITE
                | IBV_WR_FLUSH
                | SOFTDV_WR_ATOMIC
        ),
        IBV_QPT_UD => matches!(opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM),
        _ => false,
    }
}
