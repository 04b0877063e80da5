//! Shared receive contexts, fi_endpoint(3).

use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, cq_attr, open_cq, register};
use abi_tests::pair::{Pair, Role, completion};
use libfabric_sys::*;

use super::setup;

const PIECE: usize = 64;
const SIZE: usize = 16;

unsafe fn open(setup: &Setup, attr: *mut fi_rx_attr) -> *mut fid_ep {
    let mut srx = null_mut();
    let domain = setup.domain;
    // SAFETY: the caller's objects.
    let ret = unsafe {
        call!(
            (*domain).ops,
            srx_ctx,
            domain,
            attr,
            &raw mut srx,
            null_mut()
        )
    };
    assert_eq!(ret, 0, "fi_srx_context");
    srx
}

pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |hints| {
        // SAFETY: hints have all their parts.
        unsafe {
            (*hints.ep_attr).rx_ctx_cnt = FI_SHARED_CONTEXT;
            (*hints.rx_attr).size = SIZE;
        }
    });
    let info = setup.info.first();
    // SAFETY: fids as they are opened; the memory outlives its region.
    unsafe {
        assert_eq!((*(*info).ep_attr).rx_ctx_cnt, FI_SHARED_CONTEXT);
        assert!((*(*info).domain_attr).max_ep_srx_ctx >= 1);
        let srx = open(&setup, (*info).rx_attr);
        assert_eq!((*srx).fid.fclass, FI_CLASS_SRX_CTX);
        let second = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_NONE));
        let connect = |cq: *mut fid_cq| {
            Pair::connect(lib, &setup, info, |ep, role| {
                assert_eq!(bind(ep, srx, 0), 0, "binding the context");
                assert_eq!(bind(ep, srx, 0), -FI_EINVAL, "only one");
                let queue = if role == Role::Server { cq } else { setup.cq };
                assert_eq!(bind(ep, queue, FI_TRANSMIT | FI_RECV), 0);
            })
        };
        // both ends of both pairs consume receives of one context
        let pairs = [connect(setup.cq), connect(second)];
        assert_eq!(close(srx), -FI_EBUSY, "endpoints use it");
        let mut memory = vec![0_u8; SIZE * PIECE];
        let mr = register(
            setup.domain,
            memory.as_mut_ptr(),
            memory.len(),
            FI_SEND | FI_RECV,
        );
        let desc = (*mr).mem_desc;
        let at = |piece: usize| {
            memory
                .as_ptr()
                .add(piece * PIECE)
                .cast_mut()
                .cast::<c_void>()
        };
        for piece in 0..SIZE {
            let ret = call!(
                (*srx).msg,
                recv,
                srx,
                at(piece),
                PIECE,
                desc,
                0,
                without_provenance_mut(piece)
            );
            assert_eq!(ret, 0, "receive {piece}");
        }
        let full = call!((*srx).msg, recv, srx, at(0), PIECE, desc, 0, null_mut());
        assert_eq!(full, -(FI_EAGAIN as isize));
        for (pair, text) in pairs.iter().zip([b"one", b"two"]) {
            let ret = call!(
                (*pair.client).msg,
                inject,
                pair.client,
                text.as_ptr().cast(),
                3,
                0
            );
            assert_eq!(ret, 0, "fi_inject");
        }
        for (cq, text) in [(second, b"two"), (setup.cq, b"one")] {
            let got = completion(cq).expect("a message");
            assert_eq!((got.len, got.flags), (3, FI_RECV | FI_MSG));
            let piece = got.op_context.addr();
            assert_eq!(&memory[piece * PIECE..][..3], text);
        }
        let on_ep = call!(
            (*pairs[0].client).msg,
            recv,
            pairs[0].client,
            at(0),
            8,
            desc,
            0,
            null_mut()
        );
        assert_eq!(
            on_ep,
            -(FI_EOPNOTSUPP as isize),
            "it has no receives of its own"
        );
        let send = call!((*srx).msg, send, srx, at(0), 8, desc, 0, null_mut());
        assert_eq!(send, -(FI_ENOSYS as isize), "a context only receives");
        let iov = libc::iovec {
            iov_base: at(0),
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
        let recvmsg = |flags| call!((*srx).msg, recvmsg, srx, &raw const msg, flags);
        assert_eq!(recvmsg(FI_FENCE), -(FI_EBADFLAGS as isize));
        assert_eq!(recvmsg(FI_COMPLETION), 0);
        for pair in pairs {
            pair.close();
        }
        assert_eq!(close(srx), 0);
        assert_eq!(close(srx), -FI_EINVAL, "twice");
        assert_eq!(close(mr), 0);
        assert_eq!(close(second), 0);
        refused(&setup, info);
    }
    setup.close();
}

unsafe fn refused(setup: &Setup, info: *mut fi_info) {
    // SAFETY: what is wrong with each call is what it checks.
    unsafe {
        let domain = setup.domain;
        let open = (*(*domain).ops).srx_ctx.expect("a slot");
        let mut srx = null_mut();
        let attr = (*info).rx_attr;
        assert_eq!(open(null_mut(), attr, &raw mut srx, null_mut()), -FI_EINVAL);
        assert_eq!(open(domain, attr, null_mut(), null_mut()), -FI_EINVAL);
        let size = (*attr).size;
        (*attr).size = usize::MAX;
        assert_eq!(open(domain, attr, &raw mut srx, null_mut()), -FI_EINVAL);
        (*attr).size = size;
        (*attr).op_flags = FI_INJECT;
        assert_eq!(open(domain, attr, &raw mut srx, null_mut()), -FI_EINVAL);
        (*attr).op_flags = 0;
        assert!(srx.is_null());
        assert_eq!(open(domain, null_mut(), &raw mut srx, null_mut()), 0);
        let mut ep = null_mut();
        assert_eq!(
            call!(
                (*domain).ops,
                endpoint,
                domain,
                info,
                &raw mut ep,
                null_mut()
            ),
            0
        );
        assert_eq!(bind(ep, setup.eq, 0), 0);
        assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
        assert_eq!(
            abi_tests::objects::control(ep, FI_ENABLE, null_mut()),
            -FI_EOPBADSTATE,
            "no context is bound"
        );
        assert_eq!(bind(ep, srx, FI_RECV), -FI_EBADFLAGS);
        assert_eq!(bind(srx, setup.cq, FI_RECV), -FI_ENOSYS);
        assert_eq!(close(ep), 0);
        assert_eq!(close(srx), 0);
    }
}
