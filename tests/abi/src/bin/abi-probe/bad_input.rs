//! Invalid calls: each returns its errno and changes nothing.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use abi_tests::call;
use abi_tests::fabric::{getinfo, hints};
use abi_tests::load::Lib;
use abi_tests::objects::{
    Setup, bind, close, control, cq_attr, foreign, open_cq, open_ep, register,
};
use libfabric_sys::*;

mod endpoints;
mod regions;
mod vectors;

const INVALID: i32 = -FI_EINVAL;
const FLAGS: i32 = -FI_EBADFLAGS;
const ACCESS: u64 = FI_SEND | FI_RECV;

pub(crate) fn run(lib: &Lib) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
    // SAFETY: what is wrong with each call is what it checks; everything else is as it must be.
    unsafe {
        getinfo_and_fabric(lib);
        opening(&setup);
        binding(&setup);
        regions::run(&setup);
        queues(&setup);
        endpoints::connections(&setup);
        endpoints::posting(&setup);
        closed(lib, &setup);
    }
    setup.close(); // and it all still works
    vectors::run(lib);
    println!("bad input is refused and changes nothing");
}

unsafe fn getinfo_and_fabric(lib: &Lib) {
    // SAFETY: see `run`.
    unsafe {
        let list = getinfo(lib, lib.version, None, None, 0, Some(&hints(lib))).expect("a list");
        let mut fabric = null_mut();
        let attr = (*list.first()).fabric_attr;
        let name = (*attr).name;
        (*attr).name = c"no such fabric".as_ptr().cast_mut();
        let ret = (lib.fabric)(attr, &raw mut fabric, null_mut());
        (*attr).name = name;
        assert!(
            ret < 0 && fabric.is_null(),
            "a fabric that is not there: {ret}"
        );
    }
}

unsafe fn opening(setup: &Setup) {
    let info = setup.info.first();
    // SAFETY: see `run`.
    unsafe {
        let (fabric, domain) = (setup.fabric, setup.domain);
        let mut out: *mut fid_domain = null_mut();
        let open = (*(*fabric).ops).domain.expect("a slot");
        assert_eq!(open(null_mut(), info, &raw mut out, null_mut()), INVALID);
        assert_eq!(open(fabric, null_mut(), &raw mut out, null_mut()), INVALID);
        assert_eq!(open(fabric, info, null_mut(), null_mut()), INVALID);
        assert_eq!(
            open(domain.cast(), info, &raw mut out, null_mut()),
            INVALID,
            "a domain as fabric"
        );
        let mut other = foreign(FI_CLASS_FABRIC);
        assert_eq!(
            open((&raw mut *other).cast(), info, &raw mut out, null_mut()),
            INVALID
        );
        let name = (*(*info).domain_attr).name;
        (*(*info).domain_attr).name = c"nothing0".as_ptr().cast_mut();
        let ret = open(fabric, info, &raw mut out, null_mut());
        (*(*info).domain_attr).name = name;
        assert_eq!(ret, -FI_ENODEV);
        assert!(
            out.is_null(),
            "an output was written though nothing was opened"
        );

        let open = (*(*domain).ops).cq_open.expect("a slot");
        let mut cq: *mut fid_cq = null_mut();
        let good = cq_attr(FI_CQ_FORMAT_MSG, FI_WAIT_NONE);
        let try_open = |change: &dyn Fn(&mut fi_cq_attr), out: *mut *mut fid_cq| {
            let mut attr = good;
            change(&mut attr);
            open(domain, &raw mut attr, out, null_mut())
        };
        let cq_out = &raw mut cq;
        assert_eq!(open(domain, null_mut(), cq_out, null_mut()), INVALID);
        assert_eq!(try_open(&|_| {}, null_mut()), INVALID);
        assert_eq!(try_open(&|attr| attr.flags = 1, cq_out), FLAGS);
        assert_eq!(try_open(&|attr| attr.format = 99, cq_out), INVALID);
        assert_eq!(try_open(&|attr| attr.wait_obj = 99, cq_out), INVALID);
        assert_eq!(
            try_open(&|attr| attr.wait_obj = FI_WAIT_SET, cq_out),
            -FI_ENOSYS
        );
        let unknown_condition = |attr: &mut fi_cq_attr| {
            attr.wait_obj = FI_WAIT_FD;
            attr.wait_cond = 99;
        };
        assert_eq!(try_open(&unknown_condition, cq_out), INVALID);
        assert!(try_open(&|attr| attr.size = usize::MAX, cq_out) < 0);
        assert!(cq.is_null());

        let mut ep: *mut fid_ep = null_mut();
        let open = (*(*domain).ops).endpoint.expect("a slot");
        assert_eq!(open(domain, null_mut(), &raw mut ep, null_mut()), INVALID);
        let ep_attr = (*info).ep_attr;
        (*ep_attr).type_ = FI_EP_RDM;
        let ret = open(domain, info, &raw mut ep, null_mut());
        (*ep_attr).type_ = FI_EP_MSG;
        assert_eq!(ret, INVALID, "a type that the device doesn't have");
        let size = (*(*info).tx_attr).size;
        (*(*info).tx_attr).size = usize::MAX;
        let ret = open(domain, info, &raw mut ep, null_mut());
        (*(*info).tx_attr).size = size;
        assert_eq!(ret, INVALID, "a queue that the device doesn't have");
        let mut connreq = foreign(FI_CLASS_CONNREQ);
        (*info).handle = &raw mut *connreq;
        let ret = open(domain, info, &raw mut ep, null_mut());
        (*info).handle = null_mut();
        assert_eq!(ret, INVALID, "somebody else's connection request");
        assert!(ep.is_null());

        let mut cntr = null_mut();
        let open = (*(*domain).ops).cntr_open.expect("a slot");
        let good = std::mem::zeroed::<fi_cntr_attr>();
        let mut try_open = |change: &dyn Fn(&mut fi_cntr_attr)| {
            let mut attr = good;
            change(&mut attr);
            open(domain, &raw mut attr, &raw mut cntr, null_mut())
        };
        let nosys = -FI_ENOSYS;
        assert_eq!(try_open(&|attr| attr.wait_obj = FI_WAIT_SET), nosys);
        assert_eq!(try_open(&|attr| attr.wait_obj = 99), INVALID);
        assert_eq!(try_open(&|attr| attr.flags = 1), FLAGS);
        assert_eq!(try_open(&|attr| attr.events = 99), INVALID);
        assert!(cntr.is_null());
        let mut attr = good;
        assert_eq!(open(domain, &raw mut attr, null_mut(), null_mut()), INVALID);
        // calls that the provider does not support have a slot in the table too
        let mut av = null_mut();
        let mut attr = std::mem::zeroed::<fi_av_attr>();
        let ret = call!(
            (*domain).ops,
            av_open,
            domain,
            &raw mut attr,
            &raw mut av,
            null_mut()
        );
        assert_eq!(ret, -FI_ENOSYS);
    }
}

unsafe fn binding(setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let ep = open_ep(setup, setup.info.first());
        assert_eq!(bind(ep, null_mut::<fid>(), 0), INVALID);
        assert_eq!(
            bind(ep, setup.fabric, 0),
            INVALID,
            "a fabric can't be bound"
        );
        let mut other = foreign(FI_CLASS_CQ);
        assert_eq!(bind(ep, &raw mut *other, FI_TRANSMIT), INVALID);
        let mut other = foreign(FI_CLASS_CNTR);
        assert_eq!(bind(ep, &raw mut *other, FI_SEND), INVALID);
        assert_eq!(bind(ep, setup.cq, 1 << 40), FLAGS);
        assert_eq!(bind(ep, setup.eq, FI_RECV), FLAGS);
        assert!(
            bind(ep, setup.cq, FI_RECV) < 0,
            "that side has a queue already"
        );
        assert_eq!(control(ep, 9999, null_mut()), -FI_ENOSYS);
        assert_eq!(control(ep, FI_GETOPSFLAG, null_mut()), INVALID);
        let mut flags = FI_TRANSMIT | FI_RECV;
        assert_eq!(control(ep, FI_GETOPSFLAG, (&raw mut flags).cast()), INVALID);
        flags = FI_TRANSMIT | FI_MULTI_RECV;
        assert_eq!(control(ep, FI_SETOPSFLAG, (&raw mut flags).cast()), FLAGS);
        flags = FI_TRANSMIT;
        assert_eq!(control(ep, FI_GETOPSFLAG, (&raw mut flags).cast()), 0);

        let mut value = 0_usize;
        let mut len = 2;
        let get = (*(*ep).ops).getopt.expect("a slot");
        let fid = &raw mut (*ep).fid;
        let option = FI_OPT_CM_DATA_SIZE.cast_signed();
        let buf = (&raw mut value).cast::<c_void>();
        assert_eq!(get(fid, 0, option, buf, &raw mut len), -FI_ETOOSMALL);
        assert_eq!(len, size_of::<usize>());
        assert_eq!(get(fid, 0, option, buf, &raw mut len), 0);
        assert!(value >= 24, "ofi_rxm needs that many bytes");
        assert_eq!(get(fid, 0, 4711, buf, &raw mut len), -FI_ENOPROTOOPT);
        assert_eq!(get(fid, 5, option, buf, &raw mut len), -FI_ENOPROTOOPT);
        assert_eq!(get(fid, 0, option, buf, null_mut()), INVALID);
        assert_eq!(close(ep), 0);
    }
}

unsafe fn queues(setup: &Setup) {
    let mut entries = [std::mem::MaybeUninit::<fi_cq_data_entry>::uninit(); 4];
    let buf = entries.as_mut_ptr().cast::<c_void>();
    // SAFETY: see `run`.
    unsafe {
        let cq = setup.cq;
        let again = -(FI_EAGAIN as isize);
        let invalid = INVALID as isize;
        assert_eq!(call!((*cq).ops, read, cq, buf, 4), again);
        assert_eq!(call!((*cq).ops, read, cq, null_mut(), 4), invalid);
        assert_eq!(call!((*cq).ops, read, cq, null_mut(), 0), again);
        assert_eq!(call!((*cq).ops, sread, cq, buf, 4, null(), 10), again);
        assert_eq!(call!((*cq).ops, readerr, cq, null_mut(), 0), invalid);
        let mut entry = std::mem::zeroed::<fi_cq_err_entry>();
        assert_eq!(call!((*cq).ops, readerr, cq, &raw mut entry, 0), again);
        assert_eq!(
            call!((*cq).ops, readerr, cq, &raw mut entry, 1),
            FLAGS as isize
        );
        assert_eq!(
            call!((*cq).ops, readerr, setup.eq.cast(), &raw mut entry, 0),
            invalid
        );
        assert_eq!(control(cq, FI_GETWAIT, null_mut()), INVALID);
        assert_eq!(control(cq, 9999, null_mut()), -FI_ENOSYS);
        let silent = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE));
        let mut fd = 0_i32;
        assert_eq!(
            control(silent, FI_GETWAIT, (&raw mut fd).cast()),
            -FI_ENODATA
        );
        assert!(
            call!((*silent).ops, sread, silent, buf, 1, null(), 0) < 0,
            "it can't be waited on"
        );
        assert_eq!(close(silent), 0);

        let eq = setup.eq;
        let mut event = 0_u32;
        let read = (*(*eq).ops).read.expect("a slot");
        assert_eq!(read(eq, &raw mut event, buf, 64, 0), again);
        assert_eq!(read(eq, null_mut(), buf, 64, 0), invalid);
        assert_eq!(read(eq, &raw mut event, null_mut(), 64, 0), invalid);
        assert_eq!(read(eq, &raw mut event, buf, 64, 1 << 9), FLAGS as isize);
        let write = (*(*eq).ops).write.expect("a slot");
        assert_eq!(write(eq, 77, c"word".as_ptr().cast(), 5, 0), 5);
        assert_eq!(write(eq, 77, null(), 5, 0), invalid);
        assert_eq!(
            read(eq, &raw mut event, buf, 2, 0),
            -(FI_ETOOSMALL as isize)
        );
        assert_eq!(
            read(eq, &raw mut event, buf, 64, FI_PEEK),
            5,
            "it was not lost"
        );
        assert_eq!(read(eq, &raw mut event, buf, 64, 0), 5);
        assert_eq!(event, 77);
        assert_eq!(read(eq, &raw mut event, buf, 64, 0), again);
        let mut entry = std::mem::zeroed::<fi_eq_err_entry>();
        assert_eq!(call!((*eq).ops, readerr, eq, &raw mut entry, 0), again);
        assert_eq!(call!((*eq).ops, readerr, eq, null_mut(), 0), invalid);

        let fabric = setup.fabric;
        let trywait = (*(*fabric).ops).trywait.expect("a slot");
        let mut fids = [&raw mut (*setup.domain).fid];
        assert_eq!(trywait(fabric, fids.as_mut_ptr(), 1), INVALID);
        assert_eq!(trywait(fabric, null_mut(), 1), INVALID);
        assert_eq!(trywait(fabric, fids.as_mut_ptr(), -1), INVALID);
    }
}

/// Handles of closed objects, while their memory is not reused.
unsafe fn closed(lib: &Lib, setup: &Setup) {
    let mut memory = [0_u8; 64];
    // SAFETY: see `run`.
    unsafe {
        let mr = register(setup.domain, memory.as_mut_ptr(), memory.len(), ACCESS);
        assert_eq!(close(mr), 0);
        assert_eq!(close(mr), INVALID, "a region closed twice");
        let ep = open_ep(setup, setup.info.first());
        assert_eq!(close(ep), 0);
        assert_eq!(close(ep), INVALID, "an endpoint closed twice");
        assert_eq!(bind(ep, setup.cq, FI_RECV), INVALID);
        assert_eq!(control(ep, FI_ENABLE, null_mut()), INVALID);
        let buf = memory.as_mut_ptr().cast();
        assert_eq!(
            call!((*ep).msg, send, ep, buf, 1, null_mut(), 0, null_mut()),
            INVALID as isize
        );
        assert_eq!(
            call!((*ep).rma, read, ep, buf, 1, null_mut(), 0, 0, 0, null_mut()),
            INVALID as isize
        );
        assert_eq!(call!((*ep).cm, shutdown, ep, 0), INVALID);
        let cq = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_MSG, FI_WAIT_NONE));
        assert_eq!(close(cq), 0);
        assert_eq!(call!((*cq).ops, read, cq, buf, 1), INVALID as isize);
        assert_eq!(close(cq), INVALID);
        let ep = open_ep(setup, setup.info.first());
        assert_eq!(bind(ep, cq, FI_RECV), INVALID, "a closed queue");
        assert_eq!(close(ep), 0);
        let hints = hints(lib);
        let second = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
        let (fabric, domain) = (second.fabric, second.domain);
        second.close();
        assert_eq!(close(domain), INVALID);
        assert_eq!(close(fabric), INVALID);
        let mut mr = null_mut();
        let ret = call!(
            (*domain).mr,
            reg,
            domain.cast(),
            buf,
            64,
            ACCESS,
            0,
            0,
            0,
            &raw mut mr,
            null_mut(),
        );
        assert_eq!(ret, INVALID);
    }
}
