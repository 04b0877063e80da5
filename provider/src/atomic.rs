//! Atomics, `fi_atomic(3)`: those that verbs has, which are `FI_SUM` and `FI_ATOMIC_READ` by fetch
//! and add, and `FI_CSWAP`, on one 64-bit integer.
//!
//! `FI_ATOMIC_WRITE` is not among them: an RDMA write between the halves of another atomic would be
//! lost.

use std::ffi::{c_int, c_void};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::mr::Desc;
use weft::msg::{ATOMIC_SIZE, AtomicKind, AtomicOp, LocalIov};

use crate::domain::Domain;
use crate::ep::Ep;
use crate::ffi::fid::{object, on};
use crate::ffi::log::refused;
use crate::msg::{TX_FLAGS, buffer, flags_of, no_message, post, token};

/// Those of connected endpoints.
pub(crate) static OPS: fi_ops_atomic = fi_ops_atomic {
    size: size_of::<fi_ops_atomic>(),
    write: Some(write),
    writev: Some(writev),
    writemsg: Some(writemsg),
    inject: Some(inject),
    readwrite: Some(readwrite),
    readwritev: Some(readwritev),
    readwritemsg: Some(readwritemsg),
    compwrite: Some(compwrite),
    compwritev: Some(compwritev),
    compwritemsg: Some(compwritemsg),
    writevalid: Some(writevalid),
    readwritevalid: Some(readwritevalid),
    compwritevalid: Some(compwritevalid),
};

/// Flags of the calls with flags: verbs atomics carry no immediate data.
const ATOMIC_FLAGS: u64 = TX_FLAGS & !FI_REMOTE_CQ_DATA;

/// The three families of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Base,
    Fetch,
    Compare,
}

/// # Errors
/// `EOPNOTSUPP`: not one that verbs has.
#[inline]
fn supported(family: Family, datatype: fi_datatype, op: fi_op) -> Result<()> {
    let integer = matches!(datatype, FI_INT64 | FI_UINT64);
    let has = match family {
        Family::Base => op == FI_SUM,
        Family::Fetch => matches!(op, FI_SUM | FI_ATOMIC_READ),
        Family::Compare => op == FI_CSWAP,
    };
    if integer && has {
        Ok(())
    } else {
        Err(FiErrno::EOPNOTSUPP)
    }
}

/// As [`supported`], for a call that posts: the reason of a refusal is logged. It is not logged for
/// `fi_atomicvalid(3)` and `fi_query_atomic(3)`, whose callers expect a refusal.
#[inline]
fn posts(family: Family, datatype: fi_datatype, op: fi_op) -> Result<()> {
    supported(family, datatype, op).map_err(|_| unsupported(family, datatype, op))
}

/// The reason of a refusal, at `info`, as are those below.
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
        "{call} has no operation {op} on datatype {datatype}; fi_query_atomic tells which it has"
    )
}

#[cold]
fn not_one(count: usize) -> FiErrno {
    match count {
        0 => refused!(FI_LOG_EP_DATA, EINVAL, "an atomic on no element"),
        _ => refused!(
            FI_LOG_EP_DATA,
            EMSGSIZE, // as fi_atomic(3) has it for too many
            "an atomic on {count} elements, and the limit is 1"
        ),
    }
}

#[cold]
fn no_list(count: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "a vector of {count} elements, or at NULL, in an atomic"
    )
}

#[cold]
fn at_null(what: &str) -> FiErrno {
    refused!(FI_LOG_EP_DATA, EINVAL, "the {what} of an atomic is NULL")
}

/// The longest list that is looked at: a wrong count must not be followed.
const LONGEST: usize = 16;

/// The one element of a vector of operands or of a buffer.
///
/// # Errors
/// `EINVAL`: none, or a list longer than any endpoint takes. `EMSGSIZE`: more than one.
///
/// # Safety
/// `iov` has `count` elements or is NULL.
#[inline]
unsafe fn single(iov: *const fi_ioc, count: usize) -> Result<(*mut c_void, usize)> {
    if iov.is_null() || !(1..=LONGEST).contains(&count) {
        return Err(no_list(count));
    }
    // SAFETY: the caller's promise.
    let all = unsafe { std::slice::from_raw_parts(iov, count) };
    let elements = all
        .iter()
        .fold(0_usize, |sum, one| sum.saturating_add(one.count));
    one(elements)?;
    let index = all.iter().position(|one| one.count == 1);
    let index = index.ok_or(FiErrno::EINVAL)?;
    Ok((all[index].addr, index))
}

/// The one target of a vector of targets.
///
/// # Errors
/// As [`single`].
///
/// # Safety
/// `iov` has `count` elements or is NULL.
unsafe fn target(iov: *const fi_rma_ioc, count: usize) -> Result<(u64, u64)> {
    if iov.is_null() || !(1..=LONGEST).contains(&count) {
        return Err(no_list(count));
    }
    // SAFETY: the caller's promise.
    let all = unsafe { std::slice::from_raw_parts(iov, count) };
    let elements = all
        .iter()
        .fold(0_usize, |sum, one| sum.saturating_add(one.count));
    one(elements)?;
    let one = all.iter().find(|one| one.count == 1);
    one.map(|one| (one.addr, one.key)).ok_or(FiErrno::EINVAL)
}

/// # Errors
/// `EINVAL`: none. `EMSGSIZE`: more than one.
#[inline]
fn one(count: usize) -> Result<()> {
    if count == 1 {
        Ok(())
    } else {
        Err(not_one(count))
    }
}

/// An operand.
///
/// # Errors
/// `EINVAL`: NULL.
///
/// # Safety
/// `from` is NULL or points to 8 bytes.
#[inline]
unsafe fn operand(from: *const c_void) -> Result<u64> {
    if from.is_null() {
        return Err(at_null("operand"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { from.cast::<u64>().read_unaligned() })
}

/// The operation of a base or fetching call. A read has no operand.
///
/// # Errors
/// As [`operand`].
///
/// # Safety
/// As [`operand`].
#[inline]
unsafe fn adding(op: fi_op, from: *const c_void) -> Result<AtomicOp> {
    if op == FI_ATOMIC_READ {
        return Ok(AtomicOp::Add(0));
    }
    // SAFETY: the caller's promise.
    unsafe { operand(from) }.map(AtomicOp::Add)
}

/// Posts a call that has a result.
///
/// # Safety
/// The contract of fi_fetch_atomic(3).
#[inline]
unsafe fn with_result(
    ep: &Ep,
    op: AtomicOp,
    (result, desc): (*mut c_void, *mut c_void),
    target: (u64, u64),
    context: *mut c_void,
    flags: Option<Flags>,
) -> Result<()> {
    if result.is_null() {
        return Err(at_null("result"));
    }
    let (iov, desc) = (buffer(result, ATOMIC_SIZE), Desc(desc));
    // SAFETY: the caller's promise.
    unsafe {
        ep.engine.atomic(
            (op, AtomicKind::Fetch),
            LocalIov::single(&iov, &desc),
            target,
            token(context),
            flags,
        )
    }
}

/// The descriptor of an element.
///
/// # Safety
/// `desc` is NULL or has an element at `index`.
unsafe fn desc_of(desc: *mut *mut c_void, index: usize) -> *mut c_void {
    if desc.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    unsafe { *desc.add(index) }
}

unsafe extern "C" fn write(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_atomic(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Base, datatype, op)?;
            one(count)?;
            let op = (adding(op, buf)?, AtomicKind::Base);
            let target = (addr, key);
            ep.engine
                .atomic(op, LocalIov::NONE, target, token(context), None)
        })
    }
}

unsafe extern "C" fn writev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_atomicv(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Base, datatype, op)?;
            let (buf, _) = single(iov, count)?;
            let op = (adding(op, buf)?, AtomicKind::Base);
            let target = (addr, key);
            ep.engine
                .atomic(op, LocalIov::NONE, target, token(context), None)
        })
    }
}

unsafe extern "C" fn writemsg(ep: *mut fid_ep, msg: *const fi_msg_atomic, flags: u64) -> isize {
    // SAFETY: the contract of fi_atomicmsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            let flags = flags_of(flags, ATOMIC_FLAGS)?;
            posts(Family::Base, msg.datatype, msg.op)?;
            let (buf, _) = single(msg.msg_iov, msg.iov_count)?;
            let op = (adding(msg.op, buf)?, AtomicKind::Base);
            let target = target(msg.rma_iov, msg.rma_iov_count)?;
            let context = token(msg.context);
            ep.engine
                .atomic(op, LocalIov::NONE, target, context, Some(flags))
        })
    }
}

unsafe extern "C" fn inject(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
) -> isize {
    // SAFETY: the contract of fi_inject_atomic(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Base, datatype, op)?;
            one(count)?;
            ep.engine.inject_atomic(adding(op, buf)?, (addr, key))
        })
    }
}

unsafe extern "C" fn readwrite(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    result_desc: *mut c_void,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_fetch_atomic(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Fetch, datatype, op)?;
            one(count)?;
            let op = adding(op, buf)?;
            with_result(ep, op, (result, result_desc), (addr, key), context, None)
        })
    }
}

/// The operation of a fetching call with vectors.
///
/// # Safety
/// As [`single`] and [`operand`].
unsafe fn adding_of(op: fi_op, iov: *const fi_ioc, count: usize) -> Result<AtomicOp> {
    if op == FI_ATOMIC_READ {
        return Ok(AtomicOp::Add(0));
    }
    // SAFETY: the caller's promise.
    unsafe { adding(op, single(iov, count)?.0) }
}

unsafe extern "C" fn readwritev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_fetch_atomicv(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Fetch, datatype, op)?;
            let op = adding_of(op, iov, count)?;
            let (result, index) = single(resultv, result_count)?;
            let result = (result, desc_of(result_desc, index));
            with_result(ep, op, result, (addr, key), context, None)
        })
    }
}

unsafe extern "C" fn readwritemsg(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_fetch_atomicmsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            let flags = flags_of(flags, ATOMIC_FLAGS)?;
            posts(Family::Fetch, msg.datatype, msg.op)?;
            let op = adding_of(msg.op, msg.msg_iov, msg.iov_count)?;
            let (result, index) = single(resultv, result_count)?;
            let result = (result, desc_of(result_desc, index));
            let target = target(msg.rma_iov, msg.rma_iov_count)?;
            with_result(ep, op, result, target, msg.context, Some(flags))
        })
    }
}

unsafe extern "C" fn compwrite(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *const c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    result_desc: *mut c_void,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_compare_atomic(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Compare, datatype, op)?;
            one(count)?;
            let op = AtomicOp::CompareSwap {
                compare: operand(compare)?,
                swap: operand(buf)?,
            };
            with_result(ep, op, (result, result_desc), (addr, key), context, None)
        })
    }
}

unsafe extern "C" fn compwritev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    comparev: *const fi_ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    _dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_compare_atomicv(3).
    unsafe {
        post(ep, |ep| {
            posts(Family::Compare, datatype, op)?;
            let op = AtomicOp::CompareSwap {
                compare: operand(single(comparev, compare_count)?.0)?,
                swap: operand(single(iov, count)?.0)?,
            };
            let (result, index) = single(resultv, result_count)?;
            let result = (result, desc_of(result_desc, index));
            with_result(ep, op, result, (addr, key), context, None)
        })
    }
}

unsafe extern "C" fn compwritemsg(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    comparev: *const fi_ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_compare_atomicmsg(3).
    unsafe {
        post(ep, |ep| {
            let msg = msg.as_ref().ok_or_else(no_message)?;
            let flags = flags_of(flags, ATOMIC_FLAGS)?;
            posts(Family::Compare, msg.datatype, msg.op)?;
            let op = AtomicOp::CompareSwap {
                compare: operand(single(comparev, compare_count)?.0)?,
                swap: operand(single(msg.msg_iov, msg.iov_count)?.0)?,
            };
            let (result, index) = single(resultv, result_count)?;
            let result = (result, desc_of(result_desc, index));
            let target = target(msg.rma_iov, msg.rma_iov_count)?;
            with_result(ep, op, result, target, msg.context, Some(flags))
        })
    }
}

/// # Safety
/// `ep` is NULL or readable as a fid; `count` is NULL or writable.
unsafe fn valid(
    ep: *mut fid_ep,
    family: Family,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let ep = unsafe { object::<Ep>(ep) };
    on(ep, |ep| {
        if count.is_null() {
            return Err(FiErrno::EINVAL);
        }
        if !ep.engine.has_atomics() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        supported(family, datatype, op)?;
        // SAFETY: not NULL.
        unsafe { *count = 1 };
        Ok(0)
    })
}

unsafe extern "C" fn writevalid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the contract of fi_atomicvalid(3).
    unsafe { valid(ep, Family::Base, datatype, op, count) }
}

unsafe extern "C" fn readwritevalid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the contract of fi_fetch_atomicvalid(3).
    unsafe { valid(ep, Family::Fetch, datatype, op, count) }
}

unsafe extern "C" fn compwritevalid(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the contract of fi_compare_atomicvalid(3).
    unsafe { valid(ep, Family::Compare, datatype, op, count) }
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
        let family = match flags & !FI_TAGGED {
            0 => Family::Base,
            FI_FETCH_ATOMIC => Family::Fetch,
            FI_COMPARE_ATOMIC => Family::Compare,
            _ => return Err(FiErrno::EBADFLAGS),
        };
        if flags & FI_TAGGED != 0 || domain.engine.device().attr().atomic_cap == 0 {
            return Err(FiErrno::EOPNOTSUPP);
        }
        supported(family, datatype, op)?;
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
