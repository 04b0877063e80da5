//! The supported atomics, `fi_atomicvalid(3)` and `fi_query_atomic(3)`. They are the atomics of
//! verbs on one 64-bit integer: `FI_SUM` and `FI_ATOMIC_READ` by fetch and add, and `FI_CSWAP`.
//!
//! `FI_ATOMIC_WRITE` is not supported: an RDMA write between the read and the write of another
//! atomic would be lost.

use std::ffi::c_int;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::msg::{ATOMIC_SIZE, AtomicKind, AtomicOp};

use crate::atomic_operand::Vector;
use crate::domain::Domain;
use crate::ep_traits::Atomics;
use crate::ffi::fid::{object, on};
use crate::ffi::log::refused;
use crate::rdm_atomic;

/// A family of calls.
pub(crate) trait Family {
    /// The first call of the family.
    const CALL: &str;
    const KIND: AtomicKind = AtomicKind::Fetch;
    const OPS: &[fi_op];

    /// The operation of a call, with its operands; a read has none.
    ///
    /// # Errors
    /// As [`Vector::operand`].
    ///
    /// # Safety
    /// As [`Vector::operand`], for each operand.
    #[inline(always)]
    unsafe fn operation(msg: &fi_msg_atomic, _compare: Vector) -> Result<AtomicOp> {
        if msg.op == FI_ATOMIC_READ {
            return Ok(AtomicOp::Add(0));
        }
        // SAFETY: the caller keeps the contract of `Vector::operand`.
        unsafe { Vector::of(msg).operand() }.map(AtomicOp::Add)
    }

    /// # Errors
    /// `EOPNOTSUPP`: not an operation of the family on a 64-bit integer. It is not logged, because
    /// callers of `fi_atomicvalid(3)` and `fi_query_atomic(3)` expect it.
    #[inline(always)]
    fn supports(datatype: fi_datatype, op: fi_op) -> Result<()> {
        if matches!(datatype, FI_INT64 | FI_UINT64) && Self::OPS.contains(&op) {
            Ok(())
        } else {
            Err(FiErrno::EOPNOTSUPP)
        }
    }

    /// As [`Self::supports`], for a call that posts: logs the refusal at `info`.
    ///
    /// # Errors
    /// As [`Self::supports`].
    #[inline(always)]
    fn check(datatype: fi_datatype, op: fi_op) -> Result<()> {
        Self::supports(datatype, op).map_err(|_| unsupported(Self::CALL, datatype, op))
    }
}

pub(crate) struct Base;
pub(crate) struct Fetch;
pub(crate) struct Compare;

impl Family for Base {
    const CALL: &str = "fi_atomic";
    const KIND: AtomicKind = AtomicKind::Base;
    const OPS: &[fi_op] = &[FI_SUM];
}

impl Family for Fetch {
    const CALL: &str = "fi_fetch_atomic";
    const OPS: &[fi_op] = &[FI_SUM, FI_ATOMIC_READ];
}

impl Family for Compare {
    const CALL: &str = "fi_compare_atomic";
    const OPS: &[fi_op] = &[FI_CSWAP];

    #[inline(always)]
    unsafe fn operation(msg: &fi_msg_atomic, compare: Vector) -> Result<AtomicOp> {
        // SAFETY: the caller keeps the contract of `Vector::operand` for both operands.
        let (compare, swap) = unsafe { (compare.operand()?, Vector::of(msg).operand()?) };
        Ok(AtomicOp::CompareSwap { compare, swap })
    }
}

/// Logs the refusal at `info`.
#[cold]
fn unsupported(call: &str, datatype: fi_datatype, op: fi_op) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EOPNOTSUPP,
        "{call} does not support fi_op {op} on fi_datatype {datatype}; call fi_query_atomic first"
    )
}

/// `fi_atomicvalid`, `fi_fetch_atomicvalid` and `fi_compare_atomicvalid`, by family.
pub(crate) unsafe extern "C" fn valid<E: Atomics, F: Family>(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_atomicvalid(3).
    let ep = unsafe { object::<E>(ep) };
    on(ep, |ep| {
        if count.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if !ep.has_atomics() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        F::supports(datatype, op)?;
        // SAFETY: not NULL; writable by the contract of fi_atomicvalid(3).
        unsafe { *count = 1 };
        Ok(0)
    })
}

/// `fi_query_atomic(3)`
pub(crate) unsafe extern "C" fn query(
    domain: *mut fid_domain,
    datatype: fi_datatype,
    op: fi_op,
    attr: *mut fi_atomic_attr,
    flags: u64,
) -> c_int {
    // SAFETY: a domain by the contract of fi_query_atomic(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        if attr.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if domain.rdm {
            let found = rdm_atomic::query(datatype, op, flags)?;
            // SAFETY: not NULL; the structure never changed.
            unsafe { *attr = found };
            return Ok(0);
        }
        let supports = match flags & !FI_TAGGED {
            0 => Base::supports,
            FI_FETCH_ATOMIC => Fetch::supports,
            FI_COMPARE_ATOMIC => Compare::supports,
            _ => return Err(FiErrno::EBADFLAGS),
        };
        if flags & FI_TAGGED != 0 || domain.engine.device().attr().atomic_cap == 0 {
            return Err(FiErrno::EOPNOTSUPP);
        }
        supports(datatype, op)?;
        // SAFETY: not NULL; the structure never changed.
        unsafe {
            *attr = fi_atomic_attr {
                count: 1,
                size: ATOMIC_SIZE,
            };
        }
        Ok(0)
    })
}
