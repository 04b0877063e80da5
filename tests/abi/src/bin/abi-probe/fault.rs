//! A planted panic becomes `-FI_EOTHER` and poisons only the object of the call.

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::{getinfo, hints};
use abi_tests::load::Lib;
use abi_tests::objects::{close, cq_attr, open_domain, open_fabric};
use libfabric_sys::*;

const OTHER: i32 = -FI_EOTHER;

/// `place` is the value of `FI_WEFT_FAULT`.
pub(crate) fn run(lib: &Lib, place: &str) {
    let list = getinfo(lib, lib.version, None, None, 0, Some(&hints(lib))).expect("a list");
    let info = list.first();
    let memory = [0_u8; 64];
    // SAFETY: fids as they are opened.
    unsafe {
        let fabric = open_fabric(lib, info);
        if place == "domain" {
            let mut domain = null_mut();
            for _ in 0..2 {
                let ret = call!(
                    (*fabric).ops,
                    domain,
                    fabric,
                    info,
                    &raw mut domain,
                    null_mut()
                );
                assert_eq!(ret, OTHER);
                assert!(domain.is_null());
            }
            poisoned(fabric, info);
        } else {
            let domain = open_domain(fabric, info);
            let reg = || {
                let mut mr = null_mut();
                let ret = call!(
                    (*domain).mr,
                    reg,
                    domain.cast(),
                    memory.as_ptr().cast(),
                    64,
                    FI_SEND,
                    0,
                    0,
                    0,
                    &raw mut mr,
                    null_mut(),
                );
                assert_eq!(mr.is_null(), ret != 0);
                (ret, mr)
            };
            let open_cq = || {
                let mut attr = cq_attr(FI_CQ_FORMAT_MSG, FI_WAIT_NONE);
                let mut cq = null_mut();
                call!(
                    (*domain).ops,
                    cq_open,
                    domain,
                    &raw mut attr,
                    &raw mut cq,
                    null_mut()
                )
            };
            match place {
                "mr_reg" => assert_eq!(reg().0, OTHER),
                "cq_open" => {
                    let (ret, mr) = reg();
                    assert_eq!(ret, 0, "nothing is poisoned yet");
                    assert_eq!(close(mr), 0);
                    assert_eq!(open_cq(), OTHER);
                }
                _ => panic!("no fault is called {place}"),
            }
            assert_eq!(reg().0, OTHER, "the domain is poisoned");
            assert_eq!(open_cq(), OTHER, "the domain is poisoned");
            // a new object works until the next planted panic; a poisoned object can be closed
            let fresh = open_domain(fabric, info);
            assert_eq!(close(fresh), 0);
            assert_eq!(close(domain), 0);
        }
        assert_eq!(close(fabric), 0);
    }
    println!("survived");
}

/// All other calls on a fabric after a panic: none reaches its body.
unsafe fn poisoned(fabric: *mut fid_fabric, info: *mut fi_info) {
    let (mut eq, mut pep) = (null_mut(), null_mut());
    let mut attr = fi_eq_attr {
        size: 16,
        flags: 0,
        wait_obj: FI_WAIT_NONE,
        signaling_vector: 0,
        wait_set: null_mut(),
    };
    let none = null_mut();
    // SAFETY: an open fabric.
    unsafe {
        let ops = (*fabric).ops;
        let ret = call!(ops, eq_open, fabric, &raw mut attr, &raw mut eq, none);
        assert_eq!(ret, OTHER, "the fabric is poisoned");
        assert!(eq.is_null());
        let ret = call!(ops, passive_ep, fabric, info, &raw mut pep, none);
        assert_eq!(ret, OTHER, "the fabric is poisoned");
        assert!(pep.is_null());
        assert_eq!(call!(ops, trywait, fabric, null_mut(), 0), OTHER);
    }
}
