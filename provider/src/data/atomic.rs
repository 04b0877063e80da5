//! Atomics, `fi_atomic(3)`, on endpoints of any kind.
//!
//! The arguments of calls without a `struct fi_msg_atomic` are stored in one, so that all calls
//! have one body.

use std::ffi::{c_int, c_void};

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::rdm::atomic_ops::Family;

use crate::data::atomic_call::{Atomics, Call, Vector};
use crate::data::traits::{TX_FLAGS, flags_of, message, post};
use crate::ffi::fid::{object, on};
use crate::ffi::stub;

/// The table of an endpoint kind.
pub(crate) const fn ops<E: Atomics>() -> fi_ops_atomic {
    write_ops::<E>(read_ops::<E>(stub::atomic::<FI_ENOSYS>()))
}

/// The table of a kind with the families that return values; its other calls are those of `rest`.
pub(crate) const fn read_ops<E: Atomics>(rest: fi_ops_atomic) -> fi_ops_atomic {
    fi_ops_atomic {
        readwrite: Some(readwrite::<E>),
        readwritev: Some(readwritev::<E>),
        readwritemsg: Some(readwritemsg::<E>),
        compwrite: Some(compwrite::<E>),
        compwritev: Some(compwritev::<E>),
        compwritemsg: Some(compwritemsg::<E>),
        readwritevalid: Some(readwritevalid::<E>),
        compwritevalid: Some(compwritevalid::<E>),
        ..rest
    }
}

/// The table of a kind with the base family alone; its other calls are those of `rest`.
pub(crate) const fn write_ops<E: Atomics>(rest: fi_ops_atomic) -> fi_ops_atomic {
    fi_ops_atomic {
        write: Some(write::<E>),
        writev: Some(writev::<E>),
        writemsg: Some(writemsg::<E>),
        inject: Some(inject::<E>),
        writevalid: Some(writevalid::<E>),
        ..rest
    }
}

/// Flags of the `msg` calls: an atomic has no remote CQ data.
const ATOMIC_FLAGS: u64 = TX_FLAGS & !FI_REMOTE_CQ_DATA;

/// The vectors that a call has in addition to those of `struct fi_msg_atomic`, and its flags;
/// `flags` is `None` for the default flags of the endpoint.
#[derive(Clone, Copy)]
struct More {
    compare: Vector,
    result: Vector,
    flags: Option<u64>,
    injected: bool,
}

impl More {
    const NONE: Self = Self {
        compare: Vector::NONE,
        result: Vector::NONE,
        flags: None,
        injected: false,
    };

    #[inline(always)]
    const fn result(result: Vector) -> Self {
        Self {
            result,
            ..Self::NONE
        }
    }

    #[inline(always)]
    const fn compare(compare: Vector, result: Vector) -> Self {
        Self {
            compare,
            result,
            ..Self::NONE
        }
    }

    #[inline(always)]
    const fn flags(self, flags: u64) -> Self {
        Self {
            flags: Some(flags),
            ..self
        }
    }
}

#[inline(always)]
fn elements(buf: *const c_void, count: usize) -> fi_ioc {
    let addr = buf.cast_mut();
    fi_ioc { addr, count }
}

/// A call as `struct fi_msg_atomic`. Operands need no descriptors: they are copied.
#[inline(always)]
fn describe(
    (msg_iov, iov_count): (*const fi_ioc, usize),
    addr: fi_addr_t,
    rma_iov: &fi_rma_ioc,
    (datatype, op): (fi_datatype, fi_op),
    context: *mut c_void,
) -> fi_msg_atomic {
    fi_msg_atomic {
        msg_iov,
        desc: std::ptr::null_mut(),
        iov_count,
        addr,
        rma_iov,
        rma_iov_count: 1,
        datatype,
        op,
        context,
        data: 0,
    }
}

/// Posts a call. `msg` is a closure so that the compiler specializes the body for each entry point.
///
/// # Safety
/// The contract of fi_atomicmsg(3), fi_fetch_atomicmsg(3) or fi_compare_atomicmsg(3).
#[inline(always)]
unsafe fn call<E: Atomics>(
    ep: *mut fid_ep,
    family: Family,
    msg: impl FnOnce() -> Result<fi_msg_atomic>,
    more: More,
) -> isize {
    // SAFETY: the caller keeps the contract of the `msg` call; see "# Safety".
    unsafe {
        post::<E>(ep, |ep| {
            let flags = more.flags.map(|flags| flags_of(flags, ATOMIC_FLAGS));
            ep.atomic(&Call {
                family,
                msg: &msg()?,
                compare: more.compare,
                result: more.result,
                flags: flags.transpose()?,
                injected: more.injected,
            })
        })
    }
}

/// The target of a call with a vector: as many elements as the vector has.
///
/// # Safety
/// As [`Vector::elements`].
#[inline(always)]
unsafe fn target_of(vector: Vector, addr: u64, key: u64) -> fi_rma_ioc {
    // SAFETY: the caller keeps the contract.
    let count = unsafe { vector.elements() };
    fi_rma_ioc { addr, count, key }
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
    let (iov, target) = (elements(buf, count), fi_rma_ioc { addr, count, key });
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    // SAFETY: the contract of fi_atomic(3).
    unsafe { call::<E>(ep, Family::Base, || Ok(msg), More::NONE) }
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
    // SAFETY: the contract of fi_atomicv(3).
    let target = unsafe { target_of(Vector::new(iov, std::ptr::null(), count), addr, key) };
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    // SAFETY: the contract of fi_atomicv(3).
    unsafe { call::<E>(ep, Family::Base, || Ok(msg), More::NONE) }
}

unsafe extern "C" fn writemsg<E: Atomics>(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    flags: u64,
) -> isize {
    // SAFETY: the contract of fi_atomicmsg(3).
    unsafe {
        call::<E>(
            ep,
            Family::Base,
            || message(msg).copied(),
            More::NONE.flags(flags),
        )
    }
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
    let (iov, target) = (elements(buf, count), fi_rma_ioc { addr, count, key });
    let context = std::ptr::null_mut();
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    let more = More {
        injected: true,
        ..More::NONE
    };
    // SAFETY: the contract of fi_inject_atomic(3).
    unsafe { call::<E>(ep, Family::Base, || Ok(msg), more) }
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
    let (iov, target) = (elements(buf, count), fi_rma_ioc { addr, count, key });
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    let result = elements(result, count);
    let result = Vector::new(&result, &result_desc, 1);
    // SAFETY: the contract of fi_fetch_atomic(3).
    unsafe { call::<E>(ep, Family::Fetch, || Ok(msg), More::result(result)) }
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
    let result = Vector::new(resultv, result_desc, result_count);
    // SAFETY: the contract of fi_fetch_atomicv(3). A read has no operands.
    let target = unsafe { target_of(result, addr, key) };
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    // SAFETY: the contract of fi_fetch_atomicv(3).
    unsafe { call::<E>(ep, Family::Fetch, || Ok(msg), More::result(result)) }
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
        call::<E>(
            ep,
            Family::Fetch,
            || message(msg).copied(),
            More::result(result).flags(flags),
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
    let (iov, target) = (elements(buf, count), fi_rma_ioc { addr, count, key });
    let msg = describe((&iov, 1), dest_addr, &target, (datatype, op), context);
    let (compare, result) = (elements(compare, count), elements(result, count));
    let compare = Vector::new(&compare, std::ptr::null(), 1);
    let result = Vector::new(&result, &result_desc, 1);
    // SAFETY: the contract of fi_compare_atomic(3).
    unsafe {
        call::<E>(
            ep,
            Family::Compare,
            || Ok(msg),
            More::compare(compare, result),
        )
    }
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
    // SAFETY: the contract of fi_compare_atomicv(3).
    let target = unsafe { target_of(Vector::new(iov, std::ptr::null(), count), addr, key) };
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    let compare = Vector::new(comparev, compare_desc, compare_count);
    let result = Vector::new(resultv, result_desc, result_count);
    // SAFETY: the contract of fi_compare_atomicv(3).
    unsafe {
        call::<E>(
            ep,
            Family::Compare,
            || Ok(msg),
            More::compare(compare, result),
        )
    }
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
    unsafe {
        call::<E>(
            ep,
            Family::Compare,
            || message(msg).copied(),
            More::compare(compare, result).flags(flags),
        )
    }
}

/// `fi_atomicvalid`, `fi_fetch_atomicvalid` and `fi_compare_atomicvalid`.
///
/// # Safety
/// `ep` is a fid and `count` is NULL or writable.
unsafe fn valid<E: Atomics>(
    ep: *mut fid_ep,
    family: Family,
    (datatype, op): (fi_datatype, fi_op),
    count: *mut usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_atomicvalid(3).
    let ep = unsafe { object::<E>(ep) };
    on(ep, |ep| {
        if count.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let found = ep.max_count(family, datatype, op)?;
        // SAFETY: not NULL; writable by the contract of fi_atomicvalid(3).
        unsafe { *count = found };
        Ok(0)
    })
}

unsafe extern "C" fn writevalid<E: Atomics>(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the contract of fi_atomicvalid(3).
    unsafe { valid::<E>(ep, Family::Base, (datatype, op), count) }
}

unsafe extern "C" fn readwritevalid<E: Atomics>(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the contract of fi_fetch_atomicvalid(3).
    unsafe { valid::<E>(ep, Family::Fetch, (datatype, op), count) }
}

unsafe extern "C" fn compwritevalid<E: Atomics>(
    ep: *mut fid_ep,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: the contract of fi_compare_atomicvalid(3).
    unsafe { valid::<E>(ep, Family::Compare, (datatype, op), count) }
}
