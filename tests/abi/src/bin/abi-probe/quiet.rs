//! Calls that accept objects of several kinds log no refusal when they succeed. The last call is
//! refused: it logs one line.

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, close, open_ep};
use libfabric_sys::*;

pub(crate) fn run(lib: &Lib) {
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints(lib));
    let none = null_mut();
    // SAFETY: fids as they are opened.
    unsafe {
        let (fabric, domain, info) = (setup.fabric, setup.domain, setup.info.first());
        let mut cntr = null_mut();
        let mut attr = std::mem::zeroed::<fi_cntr_attr>();
        attr.wait_obj = FI_WAIT_FD;
        let (ops, out) = ((*domain).ops, &raw mut cntr);
        assert_eq!(call!(ops, cntr_open, domain, &raw mut attr, out, none), 0);
        let mut fids: [*mut fid; 3] = [setup.cq.cast(), cntr.cast(), setup.eq.cast()];
        let ret = call!((*fabric).ops, trywait, fabric, fids.as_mut_ptr(), 3);
        assert_eq!(ret, 0);

        let mut poll = null_mut();
        let mut attr = std::mem::zeroed::<fi_poll_attr>();
        let out = &raw mut poll;
        assert_eq!(call!(ops, poll_open, domain, &raw mut attr, out), 0);
        for member in &fids[..2] {
            assert_eq!(call!((*poll).ops, poll_add, poll, *member, 0), 0);
        }
        assert_eq!(close(poll), 0);
        assert_eq!(close(cntr), 0);

        let (mut pep, out) = (null_mut(), (*fabric).ops);
        let ret = call!(out, passive_ep, fabric, info, &raw mut pep, none);
        assert_eq!(ret, 0);
        let ep = open_ep(&setup, info);
        for (cm, handle) in [((*pep).cm, pep.cast::<fid>()), ((*ep).cm, ep.cast())] {
            let mut addr = [0_u64; 8];
            let (to, mut len) = (addr.as_mut_ptr().cast(), 64);
            // refused or not, for the state of the endpoint: its class is right
            call!(cm, getname, handle, to, &raw mut len);
            let len = size_of::<libc::sockaddr_in>();
            call!(cm, setname, handle, to, len);
        }
        assert_eq!(close(ep), 0);
        assert_eq!(close(pep), 0);

        let mut wrong: *mut fid = domain.cast();
        let ret = call!((*fabric).ops, trywait, fabric, &raw mut wrong, 1);
        assert_eq!(ret, -FI_EINVAL);
    }
    setup.close();
}
