//! Atomics, `fi_atomic(3)`, on endpoints with many peers: all operations and datatypes, and arrays.
//!
//! The arguments of calls without a `struct fi_msg_atomic` are stored in one, as in `atomic`.

use std::ffi::{c_int, c_void};

use libc::iovec;
use libfabric_sys::*;
use weft::av::FiAddr;
use weft::errno::{FiErrno, Result};
use weft::rdm::atomic_ops::{Family, Op, Operation};
use weft::rdm::{AtomicCall, LocalIov, max_atomic_count};

use crate::ep_traits::{TX_FLAGS, flags_of, message, post, token};
use crate::ffi::fid::{object, on};
use crate::ffi::log::refused;
use crate::rdm_ep::RdmEp;

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

/// Flags of the `msg` calls: an atomic has no remote CQ data.
const FLAGS: u64 = TX_FLAGS & !FI_REMOTE_CQ_DATA;

/// Maximum number of members of a vector, `iov_limit` and `rma_iov_limit` of the endpoint.
const MAX_VECTOR: usize = 4;

/// A vector in the memory of the caller: members and their number.
type Vector = (*const fi_ioc, usize);

const NONE: Vector = (std::ptr::null(), 0);

/// The buffers of a vector.
struct Buffers {
    list: [iovec; MAX_VECTOR],
    count: usize,
    /// Number of elements of all.
    elements: usize,
}

impl Buffers {
    /// # Errors
    /// `EINVAL`: NULL with a count; a member with elements at NULL; or more members than
    /// [`MAX_VECTOR`].
    ///
    /// # Safety
    /// The vector has its members, or is NULL.
    #[inline(always)]
    unsafe fn new((ioc, count): Vector, size: usize) -> Result<Self> {
        let empty = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        let mut this = Self {
            list: [empty; MAX_VECTOR],
            count,
            elements: 0,
        };
        if count == 0 {
            return Ok(this);
        }
        if ioc.is_null() || count > MAX_VECTOR {
            return Err(bad_vector(count));
        }
        // SAFETY: not NULL; the caller passes a vector of `count` members.
        let vector = unsafe { std::slice::from_raw_parts(ioc, count) };
        for (to, from) in this.list.iter_mut().zip(vector) {
            if from.addr.is_null() && from.count != 0 {
                return Err(bad_vector(count));
            }
            this.elements = this.elements.saturating_add(from.count);
            *to = iovec {
                iov_base: from.addr,
                iov_len: from.count.saturating_mul(size),
            };
        }
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

/// The address and the key of the target, and its number of elements, of `size` bytes each. Members
/// of one region that follow each other in memory are one target.
///
/// # Errors
/// `EINVAL`: NULL, no elements, or members in several places.
///
/// # Safety
/// The vector has `rma_iov_count` members, or is NULL.
#[inline(always)]
unsafe fn target(msg: &fi_msg_atomic, size: usize) -> Result<((u64, u64), usize)> {
    let count = msg.rma_iov_count;
    if msg.rma_iov.is_null() || !(1..=MAX_VECTOR).contains(&count) {
        return Err(bad_vector(count));
    }
    // SAFETY: not NULL; the caller passes a vector of `count` members.
    let vector = unsafe { std::slice::from_raw_parts(msg.rma_iov, count) };
    let mut members = vector.iter().filter(|member| member.count != 0);
    let first = members.next().ok_or_else(|| bad_vector(count))?;
    let mut elements = first.count;
    for member in members {
        let len = elements.saturating_mul(size) as u64;
        if member.key != first.key || first.addr.checked_add(len) != Some(member.addr) {
            return Err(bad_vector(count));
        }
        elements = elements.saturating_add(member.count);
    }
    Ok(((first.addr, first.key), elements))
}

/// Logs the refusal at `info`.
#[cold]
fn bad_vector(count: usize) -> FiErrno {
    refused!(
        FI_LOG_EP_DATA,
        EINVAL,
        "a vector of the atomic has {count} members: it is NULL, has a member at NULL, has more \
         than {MAX_VECTOR} members, or is a target without elements or in several places"
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

/// The operation of a call.
///
/// # Errors
/// `EOPNOTSUPP`: `fi_atomic(3)` does not define it.
fn operation(family: Family, datatype: fi_datatype, op: fi_op) -> Result<Operation> {
    Operation::of(family, op, datatype).ok_or(FiErrno::EOPNOTSUPP)
}

/// A call.
struct Call {
    family: Family,
    compare: Vector,
    result: Vector,
    /// `None`: the default flags.
    flags: Option<u64>,
    injected: bool,
}

impl Call {
    const fn new(family: Family, compare: Vector, result: Vector, flags: Option<u64>) -> Self {
        Self {
            family,
            compare,
            result,
            flags,
            injected: false,
        }
    }

    /// Posts it.
    ///
    /// # Safety
    /// The contract of fi_atomicmsg(3), fi_fetch_atomicmsg(3) or fi_compare_atomicmsg(3).
    #[inline(always)]
    unsafe fn post(self, ep: *mut fid_ep, msg: impl FnOnce() -> Result<fi_msg_atomic>) -> isize {
        // SAFETY: the caller keeps the contract of the `msg` call: an open endpoint, vectors with
        // their members, readable operands, and results that stay valid.
        unsafe {
            post::<RdmEp>(ep, |ep| {
                let msg = &msg()?;
                let flags = self.flags.map(|flags| flags_of(flags, FLAGS)).transpose()?;
                let operation = operation(self.family, msg.datatype, msg.op)?;
                let size = operation.datatype().size();
                let (target, count) = target(msg, size)?;
                let operands = match operation.op() {
                    Op::Read => Buffers::new(NONE, size)?,
                    _ => Buffers::new((msg.msg_iov, msg.iov_count), size)?,
                };
                let compare = Buffers::new(self.compare, size)?;
                let result = Buffers::new(self.result, size)?;
                let all = [&operands, &compare, &result];
                let used = [
                    operation.op() != Op::Read,
                    self.family == Family::Compare,
                    self.family != Family::Base,
                ];
                if all
                    .iter()
                    .zip(used)
                    .any(|(of, used)| used && of.elements != count)
                {
                    return Err(bad_lengths());
                }
                let call = AtomicCall {
                    family: self.family,
                    operation,
                    count,
                    operands: operands.local()?,
                    compare: compare.local()?,
                    result: result.local()?,
                    target,
                    context: token(msg.context),
                    flags,
                    injected: self.injected,
                };
                ep.engine.atomic(FiAddr(msg.addr), &call)
            })
        }
    }
}

fn elements(buf: *const c_void, count: usize) -> fi_ioc {
    let addr = buf.cast_mut();
    fi_ioc { addr, count }
}

/// A call as `struct fi_msg_atomic`, without its target.
fn describe(
    (msg_iov, iov_count): Vector,
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

/// The number of elements of a vector, for calls whose target has as many.
///
/// # Safety
/// The vector has its members, or is NULL.
unsafe fn sum((ioc, count): Vector) -> usize {
    if ioc.is_null() || count > MAX_VECTOR {
        return 0;
    }
    // SAFETY: not NULL; the caller passes a vector of `count` members.
    let vector = unsafe { std::slice::from_raw_parts(ioc, count) };
    vector
        .iter()
        .fold(0, |sum: usize, member| sum.saturating_add(member.count))
}

unsafe extern "C" fn write(
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
    let msg = describe(
        (&raw const iov, 1),
        dest_addr,
        &target,
        (datatype, op),
        context,
    );
    // SAFETY: the contract of fi_atomic(3).
    unsafe { Call::new(Family::Base, NONE, NONE, None).post(ep, || Ok(msg)) }
}

unsafe extern "C" fn writev(
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
    let count_there = unsafe { sum((iov, count)) };
    let target = fi_rma_ioc {
        addr,
        count: count_there,
        key,
    };
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    // SAFETY: the contract of fi_atomicv(3).
    unsafe { Call::new(Family::Base, NONE, NONE, None).post(ep, || Ok(msg)) }
}

unsafe extern "C" fn writemsg(ep: *mut fid_ep, msg: *const fi_msg_atomic, flags: u64) -> isize {
    let call = Call::new(Family::Base, NONE, NONE, Some(flags));
    // SAFETY: the contract of fi_atomicmsg(3).
    unsafe { call.post(ep, || message(msg).copied()) }
}

unsafe extern "C" fn inject(
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
    let msg = describe(
        (&raw const iov, 1),
        dest_addr,
        &target,
        (datatype, op),
        context,
    );
    let call = Call {
        injected: true,
        ..Call::new(Family::Base, NONE, NONE, None)
    };
    // SAFETY: the contract of fi_inject_atomic(3).
    unsafe { call.post(ep, || Ok(msg)) }
}

unsafe extern "C" fn readwrite(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let (iov, target) = (elements(buf, count), fi_rma_ioc { addr, count, key });
    let msg = describe(
        (&raw const iov, 1),
        dest_addr,
        &target,
        (datatype, op),
        context,
    );
    let result = elements(result, count);
    let call = Call::new(Family::Fetch, NONE, (&raw const result, 1), None);
    // SAFETY: the contract of fi_fetch_atomic(3).
    unsafe { call.post(ep, || Ok(msg)) }
}

unsafe extern "C" fn readwritev(
    ep: *mut fid_ep,
    iov: *const fi_ioc,
    _desc: *mut *mut c_void,
    count: usize,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let result = (resultv.cast_const(), result_count);
    // a read has no operands
    // SAFETY: the contract of fi_fetch_atomicv(3).
    let count_there = unsafe { sum(result) };
    let target = fi_rma_ioc {
        addr,
        count: count_there,
        key,
    };
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    let call = Call::new(Family::Fetch, NONE, result, None);
    // SAFETY: the contract of fi_fetch_atomicv(3).
    unsafe { call.post(ep, || Ok(msg)) }
}

unsafe extern "C" fn readwritemsg(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    let result = (resultv.cast_const(), result_count);
    let call = Call::new(Family::Fetch, NONE, result, Some(flags));
    // SAFETY: the contract of fi_fetch_atomicmsg(3).
    unsafe { call.post(ep, || message(msg).copied()) }
}

unsafe extern "C" fn compwrite(
    ep: *mut fid_ep,
    buf: *const c_void,
    count: usize,
    _desc: *mut c_void,
    compare: *const c_void,
    _compare_desc: *mut c_void,
    result: *mut c_void,
    _result_desc: *mut c_void,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    let (iov, target) = (elements(buf, count), fi_rma_ioc { addr, count, key });
    let msg = describe(
        (&raw const iov, 1),
        dest_addr,
        &target,
        (datatype, op),
        context,
    );
    let (compare, result) = (elements(compare, count), elements(result, count));
    let (compare, result) = ((&raw const compare, 1), (&raw const result, 1));
    // SAFETY: the contract of fi_compare_atomic(3).
    unsafe { Call::new(Family::Compare, compare, result, None).post(ep, || Ok(msg)) }
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
    _result_desc: *mut *mut c_void,
    result_count: usize,
    dest_addr: fi_addr_t,
    addr: u64,
    key: u64,
    datatype: fi_datatype,
    op: fi_op,
    context: *mut c_void,
) -> isize {
    // SAFETY: the contract of fi_compare_atomicv(3).
    let count_there = unsafe { sum((iov, count)) };
    let target = fi_rma_ioc {
        addr,
        count: count_there,
        key,
    };
    let msg = describe((iov, count), dest_addr, &target, (datatype, op), context);
    let (compare, result) = (
        (comparev, compare_count),
        (resultv.cast_const(), result_count),
    );
    // SAFETY: the contract of fi_compare_atomicv(3).
    unsafe { Call::new(Family::Compare, compare, result, None).post(ep, || Ok(msg)) }
}

unsafe extern "C" fn compwritemsg(
    ep: *mut fid_ep,
    msg: *const fi_msg_atomic,
    comparev: *const fi_ioc,
    _compare_desc: *mut *mut c_void,
    compare_count: usize,
    resultv: *mut fi_ioc,
    _result_desc: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    let (compare, result) = (
        (comparev, compare_count),
        (resultv.cast_const(), result_count),
    );
    let call = Call::new(Family::Compare, compare, result, Some(flags));
    // SAFETY: the contract of fi_compare_atomicmsg(3).
    unsafe { call.post(ep, || message(msg).copied()) }
}

/// `fi_atomicvalid`, `fi_fetch_atomicvalid` and `fi_compare_atomicvalid`.
///
/// # Safety
/// `ep` is a fid and `count` is NULL or writable.
unsafe fn valid(
    ep: *mut fid_ep,
    family: Family,
    datatype: fi_datatype,
    op: fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: an endpoint by the contract of fi_atomicvalid(3).
    let ep = unsafe { object::<RdmEp>(ep) };
    on(ep, |_| {
        if count.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let operation = operation(family, datatype, op)?;
        // SAFETY: not NULL; writable by the contract of fi_atomicvalid(3).
        unsafe { *count = max_atomic_count(family, operation) };
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

/// `fi_query_atomic(3)` of a domain for endpoints with many peers.
///
/// # Errors
/// `EOPNOTSUPP`: `fi_atomic(3)` does not define the operation. `EBADFLAGS`: unknown flags.
pub(crate) fn query(datatype: fi_datatype, op: fi_op, flags: u64) -> Result<fi_atomic_attr> {
    let family = match flags {
        0 => Family::Base,
        FI_FETCH_ATOMIC => Family::Fetch,
        FI_COMPARE_ATOMIC => Family::Compare,
        // tagged atomics do not exist
        _ if flags & FI_TAGGED != 0 => return Err(FiErrno::EOPNOTSUPP),
        _ => return Err(FiErrno::EBADFLAGS),
    };
    let operation = operation(family, datatype, op)?;
    Ok(fi_atomic_attr {
        count: max_atomic_count(family, operation),
        size: operation.datatype().size(),
    })
}
