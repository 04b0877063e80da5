//! Atomics of connected endpoints, fi_atomic(3).

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, open_ep, register};
use abi_tests::pair::{Pair, completion, is_empty};
use libfabric_sys::*;

use super::setup;

const NOT_THERE: isize = -(FI_EOPNOTSUPP as isize);
const INVALID: isize = -(FI_EINVAL as isize);

pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |hints| hints.caps = FI_MSG | FI_RMA | FI_ATOMIC);
    let info = setup.info.first();
    // SAFETY: fids as they are opened; the memory outlives its region.
    unsafe {
        assert_ne!((*info).caps & FI_ATOMIC, 0);
        assert_ne!((*(*info).tx_attr).caps & FI_ATOMIC, 0);
        query(&setup);
        let pair = Pair::connect(lib, &setup, info, |ep, _| {
            assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
        });
        let mut cells = [0_u64; 4]; // target, result, operand, comparand
        let access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let mr = register(setup.domain, cells.as_mut_ptr().cast(), 32, access);
        calls(&setup, &pair, &mut cells, mr);
        refused(&pair, &mut cells, mr);
        pair.close();
        assert_eq!(close(mr), 0);
    }
    setup.close();
    without(lib);
}

unsafe fn query(setup: &Setup) {
    // SAFETY: an open domain.
    unsafe {
        let domain = setup.domain;
        let ask = |datatype, op, flags| {
            let mut attr = fi_atomic_attr { count: 9, size: 9 };
            let query = (*(*domain).ops).query_atomic.expect("a slot");
            let ret = query(domain, datatype, op, &raw mut attr, flags);
            (ret, attr.count, attr.size)
        };
        for datatype in [FI_INT64, FI_UINT64] {
            assert_eq!(ask(datatype, FI_SUM, 0), (0, 1, 8));
            assert_eq!(ask(datatype, FI_SUM, FI_FETCH_ATOMIC), (0, 1, 8));
            assert_eq!(ask(datatype, FI_ATOMIC_READ, FI_FETCH_ATOMIC), (0, 1, 8));
            assert_eq!(ask(datatype, FI_CSWAP, FI_COMPARE_ATOMIC), (0, 1, 8));
        }
        let no = (-FI_EOPNOTSUPP, 9, 9);
        assert_eq!(ask(FI_UINT32, FI_SUM, 0), no);
        assert_eq!(ask(FI_DOUBLE, FI_CSWAP, FI_COMPARE_ATOMIC), no);
        assert_eq!(ask(FI_UINT64, FI_CSWAP, 0), no);
        assert_eq!(ask(FI_UINT64, FI_ATOMIC_READ, 0), no);
        assert_eq!(ask(FI_UINT64, FI_ATOMIC_WRITE, 0), no);
        assert_eq!(ask(FI_UINT64, FI_SUM, FI_COMPARE_ATOMIC), no);
        assert_eq!(ask(FI_UINT64, FI_SUM, FI_TAGGED), no);
        assert_eq!(ask(99, 99, 0), no);
        assert_eq!(ask(FI_UINT64, FI_SUM, 1), (-FI_EBADFLAGS, 9, 9));
        let query = (*(*domain).ops).query_atomic.expect("a slot");
        let ret = query(domain, FI_UINT64, FI_SUM, null_mut(), 0);
        assert_eq!(ret, -FI_EINVAL);
    }
}

unsafe fn calls(setup: &Setup, pair: &Pair, cells: &mut [u64; 4], mr: *mut fid_mr) {
    // SAFETY: fids as they are opened; the cells are registered.
    unsafe {
        let ep = pair.client;
        let ops = (*ep).atomic;
        let cell = cells.as_mut_ptr();
        let (to, key, desc) = (cell as u64, (*mr).key, (*mr).mem_desc);
        let at = |index| cell.add(index).cast::<c_void>();
        let mut result_desc = [desc];
        let context = at(0);
        let set = |index, value: u64| cell.add(index).write_volatile(value);
        let get = |index| cell.add(index).read_volatile();
        let done = |flags| {
            let done = completion(setup.cq).expect("an atomic");
            assert_eq!((done.flags, done.op_context), (flags, context));
        };
        let (wrote, read) = (FI_ATOMIC | FI_WRITE, FI_ATOMIC | FI_READ);
        let (operand, comparand) = (
            fi_ioc {
                addr: at(2),
                count: 1,
            },
            fi_ioc {
                addr: at(3),
                count: 1,
            },
        );
        let mut result = [fi_ioc {
            addr: at(1),
            count: 1,
        }];
        let target = fi_rma_ioc {
            addr: to,
            count: 1,
            key,
        };
        let message = |op| fi_msg_atomic {
            msg_iov: &raw const operand,
            desc: null_mut(),
            iov_count: 1,
            addr: 0,
            rma_iov: &raw const target,
            rma_iov_count: 1,
            datatype: FI_UINT64,
            op,
            context,
            data: 0,
        };

        set(0, 10);
        set(2, 1);
        let u64s = FI_UINT64;
        let ret = call!(
            ops,
            write,
            ep,
            at(2),
            1,
            null_mut(),
            0,
            to,
            key,
            u64s,
            FI_SUM,
            context
        );
        assert_eq!(ret, 0, "fi_atomic");
        done(wrote);
        let iov = &raw const operand;
        let ret = call!(
            ops,
            writev,
            ep,
            iov,
            null_mut(),
            1,
            0,
            to,
            key,
            u64s,
            FI_SUM,
            context
        );
        assert_eq!(ret, 0, "fi_atomicv");
        done(wrote);
        let msg = message(FI_SUM);
        assert_eq!(call!(ops, writemsg, ep, &raw const msg, FI_COMPLETION), 0);
        done(wrote);
        let ret = call!(ops, inject, ep, at(2), 1, 0, to, key, u64s, FI_SUM);
        assert_eq!(ret, 0, "fi_inject_atomic");

        let ret = call!(
            ops,
            readwrite,
            ep,
            null(),
            1,
            null_mut(),
            at(1),
            desc,
            0,
            to,
            key,
            u64s,
            FI_ATOMIC_READ,
            context
        );
        assert_eq!(ret, 0, "fi_fetch_atomic");
        done(read);
        assert_eq!((get(0), get(1)), (14, 14), "four were added");
        let (into, descs) = (result.as_mut_ptr(), result_desc.as_mut_ptr());
        let ret = call!(
            ops,
            readwritev,
            ep,
            iov,
            null_mut(),
            1,
            into,
            descs,
            1,
            0,
            to,
            key,
            FI_INT64,
            FI_SUM,
            context
        );
        assert_eq!(ret, 0, "fi_fetch_atomicv");
        done(read);
        assert_eq!((get(0), get(1)), (15, 14));
        let ret = call!(ops, readwritemsg, ep, &raw const msg, into, descs, 1, 0);
        assert_eq!(ret, 0, "fi_fetch_atomicmsg");
        done(read);
        assert_eq!((get(0), get(1)), (16, 15));

        set(2, 100);
        set(3, 16);
        let ret = call!(
            ops,
            compwrite,
            ep,
            at(2),
            1,
            null_mut(),
            at(3),
            null_mut(),
            at(1),
            desc,
            0,
            to,
            key,
            u64s,
            FI_CSWAP,
            context
        );
        assert_eq!(ret, 0, "fi_compare_atomic");
        done(read);
        assert_eq!((get(0), get(1)), (100, 16));
        let ret = call!(
            ops,
            compwritev,
            ep,
            iov,
            null_mut(),
            1,
            &raw const comparand,
            null_mut(),
            1,
            into,
            descs,
            1,
            0,
            to,
            key,
            u64s,
            FI_CSWAP,
            context
        );
        assert_eq!(ret, 0, "fi_compare_atomicv");
        done(read);
        assert_eq!((get(0), get(1)), (100, 100), "16 is no longer there");
        set(2, 7);
        set(3, 100);
        let msg = message(FI_CSWAP);
        let ret = call!(
            ops,
            compwritemsg,
            ep,
            &raw const msg,
            &raw const comparand,
            null_mut(),
            1,
            into,
            descs,
            1,
            FI_FENCE
        );
        assert_eq!(ret, 0, "fi_compare_atomicmsg");
        done(read);
        assert_eq!((get(0), get(1)), (7, 100));
        assert!(is_empty(setup.cq), "inject makes no completion");
    }
}

unsafe fn refused(pair: &Pair, cells: &mut [u64; 4], mr: *mut fid_mr) {
    // SAFETY: what is wrong with each call is what it checks.
    unsafe {
        let ep = pair.client;
        let ops = (*ep).atomic;
        let before = *cells;
        let cell = cells.as_mut_ptr();
        let (to, key) = (cell as u64, (*mr).key);
        let buf = cell.add(2).cast::<c_void>();
        let write = |buf: *mut c_void, count, to, datatype, op| {
            let call = (*ops).write.expect("a slot");
            let none = null_mut();
            call(ep, buf, count, none, 0, to, key, datatype, op, none)
        };
        assert_eq!(write(buf, 1, to, FI_UINT64, FI_PROD), NOT_THERE);
        assert_eq!(write(buf, 1, to, FI_UINT64, FI_ATOMIC_WRITE), NOT_THERE);
        assert_eq!(write(buf, 1, to, FI_INT8, FI_SUM), NOT_THERE);
        assert_eq!(write(buf, 1, to, 99, 99), NOT_THERE);
        assert_eq!(write(buf, 0, to, FI_UINT64, FI_SUM), INVALID);
        let many = write(buf, 2, to, FI_UINT64, FI_SUM);
        assert_eq!(many, -(FI_EMSGSIZE as isize));
        assert_eq!(write(null_mut(), 1, to, FI_UINT64, FI_SUM), INVALID);
        let askew = write(buf, 1, to + 1, FI_UINT64, FI_SUM);
        assert_eq!(askew, INVALID, "not aligned");
        assert_eq!(call!(ops, writemsg, ep, null(), 0), INVALID);
        let msg = std::mem::zeroed::<fi_msg_atomic>();
        let ret = call!(ops, writemsg, ep, &raw const msg, 1 << 40);
        assert_eq!(ret, -(FI_EBADFLAGS as isize));
        let mut count = 5;
        let valid = (*ops).writevalid.expect("a slot");
        assert_eq!(valid(ep, FI_UINT64, FI_MIN, &raw mut count), -FI_EOPNOTSUPP);
        assert_eq!(valid(ep, FI_UINT64, FI_SUM, null_mut()), -FI_EINVAL);
        assert_eq!(
            valid(null_mut(), FI_UINT64, FI_SUM, &raw mut count),
            -FI_EINVAL
        );
        assert_eq!(count, 5, "an output was written");
        assert_eq!(valid(ep, FI_UINT64, FI_SUM, &raw mut count), 0);
        assert_eq!(count, 1);
        let valid = (*ops).readwritevalid.expect("a slot");
        assert_eq!(valid(ep, FI_INT64, FI_ATOMIC_READ, &raw mut count), 0);
        let valid = (*ops).compwritevalid.expect("a slot");
        assert_eq!(valid(ep, FI_INT64, FI_CSWAP, &raw mut count), 0);
        assert_eq!(
            valid(ep, FI_INT64, FI_MSWAP, &raw mut count),
            -FI_EOPNOTSUPP
        );
        assert_eq!(*cells, before, "a refused call changed something");
    }
}

/// An endpoint that was opened without FI_ATOMIC refuses atomics.
fn without(lib: &Lib) {
    let setup = setup(lib, |hints| hints.caps = FI_MSG | FI_RMA);
    // SAFETY: fids as they are opened.
    unsafe {
        let info = setup.info.first();
        assert_eq!((*info).caps & FI_ATOMIC, 0);
        let ep = open_ep(&setup, info);
        assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
        let ops = (*ep).atomic;
        let one = 1_u64;
        let buf = (&raw const one).cast();
        let ret = call!(ops, inject, ep, buf, 1, 0, 8, 1, FI_UINT64, FI_SUM);
        assert_eq!(ret, NOT_THERE);
        let mut count = 0;
        let valid = (*ops).writevalid.expect("a slot");
        assert_eq!(valid(ep, FI_UINT64, FI_SUM, &raw mut count), -FI_EOPNOTSUPP);
        assert_eq!(close(ep), 0);
    }
    setup.close();
}
