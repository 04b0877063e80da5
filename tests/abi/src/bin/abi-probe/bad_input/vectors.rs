//! Vectors with a count that no vector has: the call is refused before it reads a member.

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close};
use libfabric_sys::*;

use super::INVALID;

/// More members than any endpoint accepts.
const COUNTS: [usize; 4] = [17, 1 << 40, isize::MAX as usize, usize::MAX];

pub(super) fn run(lib: &Lib) {
    for kind in [FI_EP_RDM, FI_EP_MSG] {
        let hints = hints(lib);
        let caps = FI_MSG | FI_RMA | FI_ATOMIC;
        // SAFETY: made by this libfabric, and nobody else's; fids as they are opened.
        unsafe {
            let info = hints.first();
            (*(*info).ep_attr).type_ = kind;
            (*info).caps = if kind == FI_EP_RDM {
                caps | FI_TAGGED
            } else {
                caps
            };
            let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
            let mut ep = null_mut();
            let (domain, info) = (setup.domain, setup.info.first());
            let ops = (*domain).ops;
            let ret = call!(ops, endpoint, domain, info, &raw mut ep, null_mut());
            assert_eq!(ret, 0);
            assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
            for count in COUNTS {
                buffers(ep, count, kind == FI_EP_RDM);
                elements(ep, count);
            }
            assert_eq!(close(ep), 0);
            setup.close();
        }
    }
}

unsafe fn buffers(ep: *mut fid_ep, count: usize, tagged: bool) {
    let mut memory = [0_u8; 8];
    let iov = libc::iovec {
        iov_base: memory.as_mut_ptr().cast(),
        iov_len: 8,
    };
    let (iov, none, refused) = (&raw const iov, null_mut(), INVALID as isize);
    let mut desc = null_mut();
    let desc = &raw mut desc;
    let message = fi_msg {
        msg_iov: iov,
        desc,
        iov_count: count,
        addr: 0,
        context: null_mut(),
        data: 0,
    };
    let target = fi_rma_iov {
        addr: 0,
        len: 8,
        key: 0,
    };
    let access = fi_msg_rma {
        msg_iov: iov,
        desc,
        iov_count: count,
        addr: 0,
        rma_iov: &raw const target,
        rma_iov_count: 1,
        context: null_mut(),
        data: 0,
    };
    let many = fi_msg_rma {
        iov_count: 1,
        rma_iov_count: count,
        ..access
    };
    let (message, access, many) = (&raw const message, &raw const access, &raw const many);
    // SAFETY: an open endpoint; what is wrong is the count.
    unsafe {
        let (msg, rma) = ((*ep).msg, (*ep).rma);
        let results = [
            call!(msg, sendv, ep, iov, desc, count, 0, none),
            call!(msg, recvv, ep, iov, desc, count, 0, none),
            call!(msg, sendmsg, ep, message, 0),
            call!(msg, recvmsg, ep, message, 0),
            call!(rma, writev, ep, iov, desc, count, 0, 0, 0, none),
            call!(rma, readv, ep, iov, desc, count, 0, 0, 0, none),
            call!(rma, writemsg, ep, access, 0),
            call!(rma, readmsg, ep, access, 0),
            call!(rma, writemsg, ep, many, 0),
            call!(rma, readmsg, ep, many, 0),
        ];
        assert_eq!(results, [refused; 10], "{count}");
        if !tagged {
            return;
        }
        let (ops, message) = ((*ep).tagged, *message);
        let message = fi_msg_tagged {
            msg_iov: message.msg_iov,
            desc: message.desc,
            iov_count: count,
            addr: 0,
            tag: 0,
            ignore: 0,
            context: null_mut(),
            data: 0,
        };
        let message = &raw const message;
        let results = [
            call!(ops, sendv, ep, iov, desc, count, 0, 0, none),
            call!(ops, recvv, ep, iov, desc, count, 0, 0, 0, none),
            call!(ops, sendmsg, ep, message, 0),
            call!(ops, recvmsg, ep, message, 0),
        ];
        assert_eq!(results, [refused; 4], "{count}");
    }
}

unsafe fn elements(ep: *mut fid_ep, count: usize) {
    let mut memory = [0_u64; 1];
    let mut ioc = fi_ioc {
        addr: memory.as_mut_ptr().cast(),
        count: 1,
    };
    let target = fi_rma_ioc {
        addr: 0,
        count: 1,
        key: 0,
    };
    let (ioc, none, refused) = (&raw mut ioc, null_mut(), INVALID as isize);
    let mut desc = null_mut();
    let desc = &raw mut desc;
    let one = |op| fi_msg_atomic {
        msg_iov: ioc,
        desc,
        iov_count: 1,
        addr: 0,
        rma_iov: &raw const target,
        rma_iov_count: 1,
        datatype: FI_UINT64,
        op,
        context: null_mut(),
        data: 0,
    };
    let operands = |op| fi_msg_atomic {
        iov_count: count,
        ..one(op)
    };
    let targets = |op| fi_msg_atomic {
        rma_iov_count: count,
        ..one(op)
    };
    let (kind, sum, swap) = (FI_UINT64, FI_SUM, FI_CSWAP);
    // SAFETY: an open endpoint; what is wrong is a count.
    unsafe {
        let ops = (*ep).atomic;
        let write = |msg: fi_msg_atomic| call!(ops, writemsg, ep, &raw const msg, 0);
        let fetch = |msg: fi_msg_atomic, results| {
            call!(ops, readwritemsg, ep, &raw const msg, ioc, desc, results, 0)
        };
        let compare = |msg: fi_msg_atomic, compares, results| {
            let (msg, call) = (&raw const msg, (*ops).compwritemsg.expect("a slot"));
            call(ep, msg, ioc, desc, compares, ioc, desc, results, 0)
        };
        let fetchv = |count, results| {
            let call = (*ops).readwritev.expect("a slot");
            call(
                ep, ioc, desc, count, ioc, desc, results, 0, 0, 0, kind, sum, none,
            )
        };
        let comparev = |count, compares, results| {
            let call = (*ops).compwritev.expect("a slot");
            call(
                ep, ioc, desc, count, ioc, desc, compares, ioc, desc, results, 0, 0, 0, kind, swap,
                none,
            )
        };
        let results = [
            call!(ops, writev, ep, ioc, desc, count, 0, 0, 0, kind, sum, none),
            write(operands(sum)),
            write(targets(sum)),
            fetchv(count, 1),
            fetchv(1, count),
            fetch(operands(sum), 1),
            fetch(targets(sum), 1),
            fetch(one(sum), count),
            comparev(count, 1, 1),
            comparev(1, count, 1),
            comparev(1, 1, count),
            compare(operands(swap), 1, 1),
            compare(targets(swap), 1, 1),
            compare(one(swap), count, 1),
            compare(one(swap), 1, count),
        ];
        assert_eq!(results, [refused; 15], "{count}");
    }
}
