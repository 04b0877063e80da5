//! Atomics on endpoints with many peers: all operations and datatypes of `fi_atomic(3)`, and
//! arrays.

use libc::iovec;
use libfabric_sys::*;
use weft::av::FiAddr;
use weft::errno::{FiErrno, Result};
use weft::rdm::atomic_ops::{Family, Op, Operation};
use weft::rdm::{AtomicCall, LocalIov, RemoteIov, max_atomic_count};

use crate::data::atomic_call::{Atomics, Call, Vector, members};
use crate::data::traits::token;
use crate::ep::rdm_ep::RdmEp;
use crate::ffi::log::refused;

/// `iov_limit` and `rma_iov_limit` of the endpoint.
const IOV_LIMIT: usize = 4;

impl Atomics for RdmEp {
    #[inline(always)]
    unsafe fn atomic(&self, call: &Call<'_>) -> Result<()> {
        let (family, msg) = (call.family, call.msg);
        has(self.api_version, msg.datatype, msg.op)?;
        let operation = operation(family, msg.datatype, msg.op)?;
        let (reads, size) = (operation.op() == Op::Read, operation.datatype().size());
        // SAFETY: the caller passes a target with its members.
        let target = unsafe { target(msg, size)? };
        let count = target.elements;
        let operands = if reads { None } else { Some(Vector::of(msg)) };
        let compare = (family == Family::Compare).then_some(call.compare);
        let result = (family != Family::Base).then_some(call.result);
        // SAFETY: the caller passes vectors with their members.
        let (operands, compare, result) = unsafe {
            let buffers = |vector| Buffers::new(vector, size, count);
            (buffers(operands)?, buffers(compare)?, buffers(result)?)
        };
        let call = AtomicCall {
            family,
            operation,
            count,
            operands: operands.local()?,
            compare: compare.local()?,
            result: result.local()?,
            targets: target.ranges.get(..target.len).unwrap_or_default(),
            context: token(msg.context),
            flags: call.flags,
            injected: call.injected,
        };
        // SAFETY: the caller passes readable operands, and results that stay valid.
        unsafe { self.engine.atomic(FiAddr(msg.addr), &call) }
    }

    fn max_count(&self, family: Family, datatype: fi_datatype, op: fi_op) -> Result<usize> {
        has(self.api_version, datatype, op)?;
        operation(family, datatype, op).map(|operation| max_atomic_count(family, operation))
    }
}

/// `fi_query_atomic(3)` of a domain for endpoints with many peers.
///
/// # Errors
/// As [`has`] and [`operation`].
pub(crate) fn query(
    version: u32,
    family: Family,
    datatype: fi_datatype,
    op: fi_op,
) -> Result<fi_atomic_attr> {
    has(version, datatype, op)?;
    let operation = operation(family, datatype, op)?;
    Ok(fi_atomic_attr {
        count: max_atomic_count(family, operation),
        size: operation.datatype().size(),
    })
}

/// Whether the application's release of libfabric has a datatype and an operator: an application
/// that asks for numbers without a name there must not take the answer for one of its own.
///
/// # Errors
/// `EOPNOTSUPP`: it does not. 128-bit integers came with 1.13; 16-bit and 8-bit floating point
/// numbers, and `FI_DIFF`, with 2.0 (`fi_domain.h`, at first `fi_atomic.h`).
fn has(version: u32, datatype: fi_datatype, op: fi_op) -> Result<()> {
    let since = match (datatype, op) {
        (FI_FLOAT16.., _) | (_, FI_DIFF..) => fi_version(2, 0),
        (FI_INT128.., _) => fi_version(1, 13),
        _ => 0,
    };
    if version < since {
        return Err(FiErrno::EOPNOTSUPP);
    }
    Ok(())
}

/// The operation of a call.
///
/// # Errors
/// `EOPNOTSUPP`: `fi_atomic(3)` does not define it.
fn operation(family: Family, datatype: fi_datatype, op: fi_op) -> Result<Operation> {
    Operation::of(family, op, datatype).ok_or(FiErrno::EOPNOTSUPP)
}

/// The buffers of a vector.
struct Buffers {
    list: [iovec; IOV_LIMIT],
    count: usize,
}

impl Buffers {
    /// The members of `vector`, if the operation has it, which have `elements` elements of `size`
    /// bytes.
    ///
    /// # Errors
    /// `EINVAL`: NULL or without members, a member with elements at NULL, more members than
    /// [`IOV_LIMIT`], or another number of elements.
    ///
    /// # Safety
    /// The vector has its members, or is NULL.
    #[inline(always)]
    unsafe fn new(vector: Option<Vector>, size: usize, elements: usize) -> Result<Self> {
        let empty = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let mut this = Self {
            list: [empty; IOV_LIMIT],
            count: 0,
        };
        let Some(vector) = vector else {
            return Ok(this);
        };
        // SAFETY: the caller passes a vector with its members, or NULL.
        let members = unsafe { vector.members()? };
        if members.len() > IOV_LIMIT {
            return Err(bad_vector(members.len()));
        }
        let mut sum = 0_usize;
        for (to, from) in this.list.iter_mut().zip(members) {
            if from.addr.is_null() && from.count != 0 {
                return Err(bad_vector(members.len()));
            }
            sum = sum.saturating_add(from.count);
            *to = iovec {
                iov_base: from.addr,
                iov_len: from.count.saturating_mul(size),
            };
        }
        if sum != elements {
            return Err(bad_lengths());
        }
        this.count = members.len();
        Ok(this)
    }

    #[inline(always)]
    fn local(&self) -> Result<LocalIov<'_>> {
        let list = self.list.get(..self.count).unwrap_or_default();
        // operands and results are copied, so their descriptors are not used
        // SAFETY: the list has that many members, and there are no descriptors.
        unsafe { LocalIov::from_raw(list.as_ptr(), std::ptr::null(), list.len()) }
    }
}

/// The ranges of a target, and the number of elements in all of them.
struct Target {
    ranges: [RemoteIov; IOV_LIMIT],
    len: usize,
    elements: usize,
}

/// The target of a call with elements of `size` bytes. Members of one region that follow each other
/// in memory are one range.
///
/// # Errors
/// `EINVAL`: NULL, no elements, or more members than [`IOV_LIMIT`].
///
/// # Safety
/// The vector has `rma_iov_count` members, or is NULL.
#[inline(always)]
unsafe fn target(msg: &fi_msg_atomic, size: usize) -> Result<Target> {
    // SAFETY: the caller passes a vector of `rma_iov_count` members, or NULL.
    let vector = unsafe { members(msg.rma_iov, msg.rma_iov_count)? };
    let count = vector.len();
    if count > IOV_LIMIT {
        return Err(bad_vector(count));
    }
    let mut this = Target {
        ranges: [RemoteIov::default(); IOV_LIMIT],
        len: 0,
        elements: 0,
    };
    for member in vector.iter().filter(|member| member.count != 0) {
        let (len, key) = (member.count.saturating_mul(size), member.key);
        this.elements = this.elements.saturating_add(member.count);
        let last = this.ranges.get_mut(this.len.wrapping_sub(1));
        match last {
            Some(last)
                if last.key == key
                    && last.addr.checked_add(last.len as u64) == Some(member.addr) =>
            {
                last.len = last.len.saturating_add(len);
            }
            _ => {
                if let Some(next) = this.ranges.get_mut(this.len) {
                    *next = RemoteIov {
                        addr: member.addr,
                        len,
                        key,
                    };
                }
                this.len += 1;
            }
        }
    }
    match this.elements {
        0 => Err(bad_vector(count)),
        _ => Ok(this),
    }
}

/// Logs the refusal at `info`.
#[cold]
fn bad_vector(count: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "a vector of the atomic has {count} members: it has a member at NULL, has more than \
         {IOV_LIMIT} members, or is a target without elements"
    )
}

/// Logs the refusal at `info`.
#[cold]
fn bad_lengths() -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "operands, results and target of the atomic have different numbers of elements"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_answer_for_the_release_of_the_application() {
        let count = |version: (u32, u32), datatype, op| {
            let found = query(fi_version(version.0, version.1), Family::Base, datatype, op);
            found.map(|attr| attr.size)
        };
        let none = Err(FiErrno::EOPNOTSUPP);
        for minor in [12, 17, 22] {
            let old = |datatype, op| count((1, minor), datatype, op);
            assert_eq!(old(FI_LONG_DOUBLE_COMPLEX, FI_SUM), Ok(32));
            assert_eq!(old(FI_UINT64, FI_ATOMIC_WRITE), Ok(8));
            let wide = if minor < 13 { none } else { Ok(16) };
            assert_eq!(old(FI_INT128, FI_SUM), wide);
            assert_eq!(old(FI_UINT128, FI_SUM), wide);
            for datatype in FI_FLOAT16..=FI_FLOAT8_E5M2 {
                assert_eq!(old(datatype, FI_SUM), none, "{datatype}");
            }
            assert_eq!(old(FI_UINT64, FI_DIFF), none);
        }
        let new = |datatype, op| count((2, 0), datatype, op);
        let sizes = [FI_INT128, FI_BFLOAT16, FI_FLOAT8_E5M2].map(|of| new(of, FI_SUM));
        assert_eq!(sizes, [Ok(16), Ok(2), Ok(1)]);
        assert_eq!(new(FI_UINT64, FI_DIFF), Ok(8));
        assert_eq!(new(FI_FLOAT8_E5M2 + 1, FI_SUM), none);
    }
}
