//! Connecting; and posting to endpoints that are disabled, not connected, or whose queue is full.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use abi_tests::call;
use abi_tests::objects::{Setup, bind, close, control, open_ep, register};
use libfabric_sys::*;

use super::{ACCESS, FLAGS, INVALID};

pub(super) unsafe fn connections(setup: &Setup) {
    let data = [0_u8; 512];
    // SAFETY: see `super::run`.
    unsafe {
        let fabric = setup.fabric;
        let info = setup.info.first();
        let mut pep = null_mut();
        assert_eq!(
            call!(
                (*fabric).ops,
                passive_ep,
                fabric,
                info,
                &raw mut pep,
                null_mut()
            ),
            0
        );
        let cm = (*pep).cm;
        assert!(call!(cm, listen, pep) < 0, "no event queue is bound");
        assert_eq!(bind(pep, setup.cq, 0), INVALID);
        assert_eq!(bind(pep, setup.eq, 0), 0);
        assert_eq!(bind(pep, setup.eq, 0), INVALID, "only one");
        assert_eq!(close(setup.eq), -FI_EBUSY);
        let fid = &raw mut (*pep).fid;
        assert_eq!(call!(cm, reject, pep, null_mut(), null(), 0), INVALID);
        assert_eq!(
            call!(cm, reject, pep, fid, null(), 0),
            INVALID,
            "not a request"
        );
        let mut len = 1;
        assert_eq!(
            call!(cm, getname, fid, null_mut(), &raw mut len),
            -FI_ETOOSMALL
        );
        assert_eq!(len, 16);
        assert_eq!(call!(cm, getname, fid, null_mut(), null_mut()), INVALID);
        assert_eq!(call!(cm, setname, fid, null_mut(), 16), INVALID);
        assert_eq!(close(pep), 0);

        let ep = open_ep(setup, info);
        let cm = (*ep).cm;
        let far = (*info).src_addr; // any address of the right form
        assert_eq!(
            call!(cm, connect, ep, null(), null(), 0),
            INVALID,
            "to where?"
        );
        assert_eq!(
            call!(cm, connect, ep, far, data.as_ptr().cast(), 512),
            INVALID,
            "too much data"
        );
        assert_eq!(call!(cm, connect, ep, far, null(), 8), INVALID);
        assert_eq!(
            call!(cm, accept, ep, null(), 0),
            -FI_EOPBADSTATE,
            "nothing to accept"
        );
        assert_eq!(call!(cm, shutdown, ep, 1), FLAGS);
        assert_eq!(call!(cm, shutdown, ep, 0), -FI_ENOTCONN);
        assert_eq!(call!(cm, listen, ep.cast()), -FI_ENOSYS, "for passive ones");
        let mut len = 64;
        let mut addr = [0_u8; 64];
        let buf = addr.as_mut_ptr().cast();
        assert_eq!(call!(cm, getpeer, ep, buf, &raw mut len), -FI_ENOTCONN);
        assert_eq!(close(ep), 0);
    }
}

pub(super) unsafe fn posting(setup: &Setup) {
    let mut memory = [0_u8; 4096];
    let buf = memory.as_mut_ptr().cast::<c_void>();
    // SAFETY: see `super::run`.
    unsafe {
        let ep = open_ep(setup, setup.info.first());
        let mr = register(setup.domain, memory.as_mut_ptr(), memory.len(), ACCESS);
        let desc = (*mr).mem_desc;
        let state = -(FI_EOPBADSTATE as isize);
        let send = (*(*ep).msg).send.expect("a slot");
        assert_eq!(send(ep, buf, 8, desc, 0, null_mut()), state, "not enabled");
        assert_eq!(
            call!((*ep).msg, recv, ep, buf, 8, desc, 0, null_mut()),
            state
        );
        assert_eq!(control(ep, FI_ENABLE, null_mut()), 0);
        let unconnected = -(FI_ENOTCONN as isize);
        assert_eq!(send(ep, buf, 8, desc, 0, null_mut()), unconnected);
        assert_eq!(call!((*ep).msg, inject, ep, buf, 8, 0), unconnected);
        assert_eq!(
            call!((*ep).rma, write, ep, buf, 8, desc, 0, 0, 1, null_mut()),
            unconnected
        );
        assert_eq!(call!((*ep).msg, sendmsg, ep, null(), 0), INVALID as isize);
        let iov = libc::iovec {
            iov_base: buf,
            iov_len: 8,
        };
        let mut descs = [desc];
        let msg = fi_msg {
            msg_iov: &raw const iov,
            desc: descs.as_mut_ptr(),
            iov_count: 1,
            addr: 0,
            context: null_mut(),
            data: 0,
        };
        assert_eq!(
            call!((*ep).msg, recvmsg, ep, &raw const msg, 1 << 40),
            FLAGS as isize
        );
        assert_eq!(
            call!((*ep).tagged, send, ep, buf, 8, desc, 0, 0, null_mut()),
            -(FI_ENOSYS as isize)
        );
        // receives can be posted before the connection exists, until the queue is full
        let mut posted = 0;
        let full = loop {
            match call!((*ep).msg, recv, ep, buf, 8, desc, 0, null_mut()) {
                0 => posted += 1,
                other => break other,
            }
            assert!(posted < 1_000_000);
        };
        assert_eq!(full, -(FI_EAGAIN as isize));
        assert!(
            posted >= (*(*setup.info.first()).rx_attr).size,
            "{posted} receives"
        );
        assert_eq!(close(ep), 0);
        assert_eq!(close(mr), 0);
        // unused receives may have been flushed to the completion queue
        let mut entry = std::mem::zeroed::<fi_cq_err_entry>();
        while call!((*setup.cq).ops, readerr, setup.cq, &raw mut entry, 0) == 1 {}
    }
}
