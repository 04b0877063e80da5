//! Atomics, `fi_atomic(3)`, on endpoints of any kind.
//!
//! The arguments of calls without a `struct fi_msg_atomic` are stored in one, so that all calls
//! have one body.

use std::ffi::c_void;

use libfabric_sys::*;
use weft::errno::Result;
use weft::msg::{AtomicKind, AtomicOp, LocalIov};

use crate::atomic_family::{Base, Compare, Family, Fetch, valid};
use crate::atomic_operand::{Vector, target};
use crate::ep_traits::{Atomics, TX_FLAGS, flags_of, message, post, token};

/// The table of an endpoint kind.
pub(crate) const fn ops<E: Atomics>() -> fi_ops_atomic {
    fi_ops_atomic {
        size: size_of::<fi_ops_atomic>(),
        write: Some(write::<E>),
        writev: Some(writev::<E>),
        writemsg: Some(writemsg::<E>),
        inject: Some(inject::<E>),
        readwrite: Some(readwrite::<E>),
        readwritev: Some(readwritev::<E>),
        readwritemsg: Some(readwritemsg::<E>),
        compwrite: Some(compwrite::<E>),
        compwritev: Some(compwritev::<E>),
        compwritemsg: Some(compwritemsg::<E>),
        writevalid: Some(valid::<E, Base>),
        readwritevalid: Some(valid::<E, Fetch>),
        compwritevalid: Some(valid::<E, Compare>),
    }
}

/// Flags of the `msg` calls: verbs atomics carry no immediate data.
const ATOMIC_FLAGS: u64 = TX_FLAGS & !FI_REMOTE_CQ_DATA;

const NO_VECTORS: (Vector, Vector) = (Vector::NONE, Vector::NONE);

#[inline(always)]
fn elements(buf: *const c_void, count: usize) -> fi_ioc {
    let addr = buf.cast_mut();
    fi_ioc { addr, count }
}

#[inline(always)]
fn element(addr: u64, key: u64) -> fi_rma_ioc {
    let count = 1;
    fi_rma_ioc { addr, count, key }
}

/// A call as `struct fi_msg_atomic`. Operands need no descriptors: the work request carries them.
#[inline(always)]
fn describe(
    (iov, count): (*const fi_ioc, usize),
    addr: fi_addr_t,
    target: &fi_rma_ioc,
    (datatype, op): (fi_datatype, fi_op),
    context: *mut c_void,
) -> fi_msg_atomic {
    fi_msg_atomic {
        msg_iov: iov,
        desc: std::ptr::null_mut(),
        iov_count: count,
        addr,
        rma_iov: target,
        rma_iov_count: 1,
        datatype,
        op,
        context,
        data: 0,
    }
}

/// A call of family `F`. Only the compare family reads `compare`, and the base family has no
/// result. `flags` is `None` for the default flags of the endpoint. `msg` is a closure so that the
/// compiler specializes the body for each entry point.
///
/// # Safety
/// The contract of fi_atomicmsg(3), fi_fetch_atomicmsg(3) or fi_compare_atomicmsg(3).
#[inline(always)]
unsafe fn call<E: Atomics, F: Family>(
    ep: *mut fid_ep,
    msg: impl FnOnce() -> Result<fi_msg_atomic>,
    (compare, result): (Vector, Vector),
    flags: Option<u64>,
) -> isize {
    // SAFETY: the caller keeps the contract of the `msg` call; see "# Safety".
    unsafe {
        post::<E>(ep, |ep| {
            let msg = &msg()?;
            let flags = flags
                .map(|flags| flags_of(flags, ATOMIC_FLAGS))
                .transpose()?;
            F::check(msg.datatype, msg.op)?;
            let op = (F::operation(msg, compare)?, F::KIND);
            let buffer;
            let local = match F::KIND {
                AtomicKind::Base => LocalIov::NONE,
                AtomicKind::Fetch => {
                    buffer = result.buffer()?;
                    LocalIov::single(&buffer.0, &buffer.1)
                }
            };
            ep.atomic(msg.addr, op, local, target(msg)?, token(msg.context), flags)
        })
    }
}

unsafe extern "C" fn write<E: Atomics>(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let (iov, target) = (elements(buf, count), element(addr, key));
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    // SAFETY: the contract of fi_atomic(3).
    unsafe { call::<E, Base>(ep, || Ok(msg), NO_VECTORS, None) }
}

unsafe extern "C" fn writev<E: Atomics>(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let target = element(addr, key);
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    // SAFETY: the contract of fi_atomicv(3).
    unsafe { call::<E, Base>(ep, || Ok(msg), NO_VECTORS, None) }
}

unsafe extern "C" fn writemsg<E: Atomics>(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_atomicmsg(3).
    unsafe { call::<E, Base>(ep, || message(msg).copied(), NO_VECTORS, Some(flags)) }
}

unsafe extern "C" fn inject<E: Atomics>(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
) -> isize {
    let iov = elements(buf, count);
    // SAFETY: the contract of fi_inject_atomic(3).
    unsafe {
        post::<E>(ep, |ep| {
            Base::check(datatype, op)?;
            let op = AtomicOp::Add(Vector::new(&iov, std::ptr::null(), 1).operand()?);
            ep.inject_atomic(dest_addr, op, (addr, key))
        })
    }
}

unsafe extern "C" fn readwrite<E: Atomics>(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    result_desc: *mut c_void,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let (iov, target) = (elements(buf, count), element(addr, key));
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    let result = elements(result, count);
    let result = Vector::new(&result, &result_desc, 1);
    // SAFETY: the contract of fi_fetch_atomic(3).
    unsafe { call::<E, Fetch>(ep, || Ok(msg), (Vector::NONE, result), None) }
}

unsafe extern "C" fn readwritev<E: Atomics>(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let target = element(addr, key);
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    let result = Vector::new(resultv, result_desc, result_count);
    // SAFETY: the contract of fi_fetch_atomicv(3).
    unsafe { call::<E, Fetch>(ep, || Ok(msg), (Vector::NONE, result), None) }
}

unsafe extern "C" fn readwritemsg<E: Atomics>(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    let result = Vector::new(resultv, result_desc, result_count);
    // SAFETY: the contract of fi_fetch_atomicmsg(3).
    unsafe {
        call::<E, Fetch>(
            ep,
            || message(msg).copied(),
            (Vector::NONE, result),
            Some(flags),
        )
    }
}

unsafe extern "C" fn compwrite<E: Atomics>(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *const c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    result_desc: *mut c_void,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let (iov, target) = (elements(buf, count), element(addr, key));
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    let (compare, result) = (elements(compare, count), elements(result, count));
    let compare = Vector::new(&compare, std::ptr::null(), 1);
    let result = Vector::new(&result, &result_desc, 1);
    // SAFETY: the contract of fi_compare_atomic(3).
    unsafe { call::<E, Compare>(ep, || Ok(msg), (compare, result), None) }
}

unsafe extern "C" fn compwritev<E: Atomics>(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    comparev: *const fi_ioc,
    compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let target = element(addr, key);
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    let compare = Vector::new(comparev, compare_desc, compare_count);
    let result = Vector::new(resultv, result_desc, result_count);
    // SAFETY: the contract of fi_compare_atomicv(3).
    unsafe { call::<E, Compare>(ep, || Ok(msg), (compare, result), None) }
}

unsafe extern "C" fn compwritemsg<E: Atomics>(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    comparev: *const fi_ioc,
    compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *mut fi_ioc,
    result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    let compare = Vector::new(comparev, compare_desc, compare_count);
    let result = Vector::new(resultv, result_desc, result_count);
    // SAFETY: the contract of fi_compare_atomicmsg(3).
    unsafe { call::<E, Compare>(ep, || message(msg).copied(), (compare, result), Some(flags)) }
}
