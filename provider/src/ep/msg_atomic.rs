//! Atomics on connected endpoints. They are the atomics of verbs on one 64-bit integer: `FI_SUM`
//! and `FI_ATOMIC_READ` by fetch and add, and `FI_CSWAP`.
//!
//! `FI_ATOMIC_WRITE` is not supported: an RDMA write between the read and the write of another
//! atomic would be lost.

use libc::iovec;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::Desc;
use weft::msg::{ATOMIC_SIZE, AtomicKind, AtomicOp, LocalIov};
use weft::rdm::atomic_ops::Family;

use crate::data::atomic_call::{Atomics, Call, Vector, members};
use crate::data::traits::{buffer, token};
use crate::domain::Domain;
use crate::ep::msg_ep::Ep;
use crate::ffi::log::refused;

impl Atomics for Ep {
    #[inline(always)]
    unsafe fn atomic(&self, call: &Call<'_>) -> Result<()> {
        let msg = call.msg;
        check(call.family, msg.datatype, msg.op)?;
        // SAFETY: the caller passes readable operands, and a target with its members.
        let (op, target) = unsafe { (operation(call)?, target(msg)?) };
        if call.injected {
            return self.engine.inject_atomic(op, target);
        }
        let result;
        let (kind, local) = match call.family {
            Family::Base => (AtomicKind::Base, LocalIov::NONE),
            Family::Fetch | Family::Compare => {
                // SAFETY: the caller passes a vector with its members and descriptors.
                result = unsafe { result_of(call.result)? };
                (AtomicKind::Fetch, LocalIov::single(&result.0, &result.1))
            }
        };
        let context = token(msg.context);
        // SAFETY: the caller passes a result that stays valid.
        unsafe {
            self.engine
                .atomic((op, kind), local, target, context, call.flags)
        }
    }

    fn max_count(&self, family: Family, datatype: fi_datatype, op: fi_op) -> Result<usize> {
        if !self.engine.has_atomics() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        supports(family, datatype, op).map(|()| 1)
    }
}

/// `fi_query_atomic(3)` of a domain for connected endpoints.
///
/// # Errors
/// `EOPNOTSUPP`: the device has no atomics, or not this one.
pub(crate) fn query(
    domain: &Domain,
    family: Family,
    datatype: fi_datatype,
    op: fi_op,
) -> Result<fi_atomic_attr> {
    if domain.engine.device().attr().atomic_cap == 0 {
        return Err(FiErrno::EOPNOTSUPP);
    }
    supports(family, datatype, op)?;
    Ok(fi_atomic_attr {
        count: 1,
        size: ATOMIC_SIZE,
    })
}

/// # Errors
/// `EOPNOTSUPP`: not an operation of the family on a 64-bit integer. It is not logged.
#[inline(always)]
fn supports(family: Family, datatype: fi_datatype, op: fi_op) -> Result<()> {
    let ops: &[fi_op] = match family {
        Family::Base => &[FI_SUM],
        Family::Fetch => &[FI_SUM, FI_ATOMIC_READ],
        Family::Compare => &[FI_CSWAP],
    };
    if matches!(datatype, FI_INT64 | FI_UINT64) && ops.contains(&op) {
        Ok(())
    } else {
        Err(FiErrno::EOPNOTSUPP)
    }
}

/// As [`supports`], for a call that posts: logs the refusal at `info`.
///
/// # Errors
/// As [`supports`].
#[inline(always)]
fn check(family: Family, datatype: fi_datatype, op: fi_op) -> Result<()> {
    supports(family, datatype, op).map_err(|_| unsupported(family, datatype, op))
}

/// The operation of a call, with its operands; a read has none.
///
/// # Errors
/// As [`operand`].
///
/// # Safety
/// As [`operand`], for each operand.
#[inline(always)]
unsafe fn operation(call: &Call<'_>) -> Result<AtomicOp> {
    if call.msg.op == FI_ATOMIC_READ {
        return Ok(AtomicOp::Add(0));
    }
    // SAFETY: the caller passes readable operands.
    let value = unsafe { operand(Vector::of(call.msg)) };
    if call.family != Family::Compare {
        return value.map(AtomicOp::Add);
    }
    // SAFETY: the caller passes readable operands.
    let (compare, swap) = (unsafe { operand(call.compare)? }, value?);
    Ok(AtomicOp::CompareSwap { compare, swap })
}

/// The member that has the vector's only element, and the member's index. `elements` returns the
/// number of elements of a member.
///
/// # Errors
/// `EINVAL`: no element. `EMSGSIZE`: more than one.
#[inline(always)]
fn single<T: Copy>(vector: &[T], elements: impl Fn(&T) -> usize) -> Result<(usize, T)> {
    let sum = vector.iter().map(&elements);
    let sum = sum.fold(0_usize, usize::saturating_add);
    if sum != 1 {
        return Err(not_one(sum));
    }
    let mut members = vector.iter().copied().enumerate();
    let found = members.find(|(_, member)| elements(member) == 1);
    found.ok_or(FiErrno::EINVAL)
}

/// The target of a call: an address and a key.
///
/// # Errors
/// As [`members`] and [`single`].
///
/// # Safety
/// As [`members`], for the vector of targets.
#[inline(always)]
unsafe fn target(msg: &fi_msg_atomic) -> Result<(u64, u64)> {
    // SAFETY: the caller passes a vector of `rma_iov_count` members, or NULL.
    let vector = unsafe { members(msg.rma_iov, msg.rma_iov_count)? };
    let (_, member) = single(vector, |ioc| ioc.count)?;
    Ok((member.addr, member.key))
}

/// The value of an operand.
///
/// # Errors
/// As [`members`] and [`single`]; `EINVAL`: the element is at NULL.
///
/// # Safety
/// As [`members`]; the element has 8 bytes or is at NULL.
#[inline(always)]
unsafe fn operand(vector: Vector) -> Result<u64> {
    // SAFETY: the caller passes a vector with its members, or NULL.
    let (_, member) = single(unsafe { vector.members()? }, |ioc| ioc.count)?;
    if member.addr.is_null() {
        return Err(at_null("operand"));
    }
    // SAFETY: not NULL; the caller passes an element of 8 bytes.
    Ok(unsafe { member.addr.cast::<u64>().read_unaligned() })
}

/// The buffer for a result, and its descriptor.
///
/// # Errors
/// As [`operand`].
///
/// # Safety
/// As [`members`]; there are as many descriptors, or they are NULL.
#[inline(always)]
unsafe fn result_of(vector: Vector) -> Result<(iovec, Desc)> {
    // SAFETY: the caller passes a vector with its members, or NULL.
    let (index, member) = single(unsafe { vector.members()? }, |ioc| ioc.count)?;
    if member.addr.is_null() {
        return Err(at_null("result"));
    }
    // SAFETY: the vector has a member with this index.
    let desc = Desc(unsafe { vector.desc(index) });
    Ok((buffer(member.addr, ATOMIC_SIZE), desc))
}

/// Logs the refusal at `info`, as do those below.
#[cold]
fn unsupported(family: Family, datatype: fi_datatype, op: fi_op) -> FiErrno {
    let call = match family {
        Family::Base => "fi_atomic",
        Family::Fetch => "fi_fetch_atomic",
        Family::Compare => "fi_compare_atomic",
    };
    refused!(
        FI_LOG_EP_DATA,
        EOPNOTSUPP,
        "{call} does not support fi_op {op} on fi_datatype {datatype}; call fi_query_atomic first"
    )
}

#[cold]
fn not_one(count: usize) -> FiErrno {
    match count {
        0 => refused!(FI_LOG_EP_DATA, EINVAL, "the atomic has no elements"),
        _ => refused!(
            FI_LOG_EP_DATA,
            EMSGSIZE, // fi_atomic(3): more elements than supported
            "the atomic has {count} elements; the maximum is 1"
        ),
    }
}

#[cold]
fn at_null(name: &str) -> FiErrno {
    refused!(FI_LOG_EP_DATA, EINVAL, "the {name} of the atomic is NULL")
}
