//! Closing objects that other objects use: fi_endpoint(3), fi_domain(3), fi_cq(3) and others.

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, cq_attr, open_cq, register};
use libfabric_sys::*;

use super::setup;

const INVALID: i32 = -FI_EINVAL;

/// Each object that another one uses: `fi_close` returns `-FI_EBUSY` until the user is closed, and
/// the object works until then.
pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |hints| hints.caps = FI_MSG | FI_RMA | FI_ATOMIC);
    // SAFETY: fids as they are opened; the memory outlives its region.
    unsafe { children(lib, &setup) };
    setup.close();
}

unsafe fn children(lib: &Lib, outer: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let info = outer.info.first();
        let Setup {
            fabric, domain, eq, ..
        } = *outer;
        let busy = |what: &str, parent: *mut fid, child: *mut fid| {
            for _ in 0..2 {
                assert_eq!(close(parent), -FI_EBUSY, "{what}");
            }
            assert_eq!(close(child), 0, "{what}: its child");
            assert_eq!(close(child), INVALID, "{what}: its child, twice");
        };
        let ops = (*domain).ops;
        let mut memory = [0_u8; 64];
        // a separate domain for each child, which only this child keeps open
        for what in ["cq", "cntr", "ep", "mr", "srx", "poll set"] {
            let mut own = null_mut();
            let ret = call!(
                (*fabric).ops,
                domain,
                fabric,
                info,
                &raw mut own,
                null_mut()
            );
            assert_eq!(ret, 0);
            let mut child = null_mut::<fid>();
            let out = &raw mut child;
            let none = null_mut();
            let ret = match what {
                "cq" => {
                    let mut attr = cq_attr(FI_CQ_FORMAT_MSG, FI_WAIT_NONE);
                    call!(ops, cq_open, own, &raw mut attr, out.cast(), none)
                }
                "cntr" => {
                    let mut attr = std::mem::zeroed::<fi_cntr_attr>();
                    call!(ops, cntr_open, own, &raw mut attr, out.cast(), none)
                }
                "ep" => call!(ops, endpoint, own, info, out.cast(), none),
                "mr" => {
                    *out = register(own, memory.as_mut_ptr(), 64, FI_SEND).cast();
                    0
                }
                "srx" => call!(ops, srx_ctx, own, null_mut(), out.cast(), none),
                _ => call!(ops, poll_open, own, null_mut(), out.cast()),
            };
            assert_eq!(ret, 0, "{what}");
            busy(what, own.cast(), child);
            assert_eq!(close(own), 0, "{what}");
        }
        // a fabric with a domain, with an event queue, with a passive endpoint
        let own = {
            let mut own = null_mut();
            assert_eq!(
                (lib.fabric)((*info).fabric_attr, &raw mut own, null_mut()),
                0
            );
            own
        };
        // fabrics of one name may be one object, which the outer domain and queues then keep open
        let mut pep = null_mut();
        let open = (*(*own).ops).passive_ep.expect("a slot");
        assert_eq!(open(own, info, &raw mut pep, null_mut()), 0);
        assert_eq!(close(own), -FI_EBUSY, "a passive endpoint");
        assert_eq!(bind(pep, eq, 0), 0);
        busy(
            "an event queue, of a passive endpoint",
            eq.cast(),
            pep.cast(),
        );
        assert_eq!(close(own), 0);

        let cq = open_cq(domain, cq_attr(FI_CQ_FORMAT_MSG, FI_WAIT_NONE));
        let mut cntr = null_mut();
        let mut attr = std::mem::zeroed::<fi_cntr_attr>();
        let ret = call!(
            ops,
            cntr_open,
            domain,
            &raw mut attr,
            &raw mut cntr,
            null_mut()
        );
        assert_eq!(ret, 0);
        let mut ep = null_mut();
        let ret = call!(ops, endpoint, domain, info, &raw mut ep, null_mut());
        assert_eq!(ret, 0);
        assert_eq!(bind(ep, cq, FI_TRANSMIT | FI_RECV), 0);
        assert_eq!(bind(ep, cntr, FI_SEND), 0);
        assert_eq!(bind(ep, eq, 0), 0);
        assert_eq!(close(cq), -FI_EBUSY, "bound to an endpoint");
        assert_eq!(close(eq), -FI_EBUSY, "bound to an endpoint");
        assert_eq!(close(domain), -FI_EBUSY);
        assert_eq!(close(fabric), -FI_EBUSY);
        busy("a counter, of an endpoint", cntr.cast(), ep.cast());
        let mut set = null_mut();
        assert_eq!(call!(ops, poll_open, domain, null_mut(), &raw mut set), 0);
        assert_eq!(call!((*set).ops, poll_add, set, cq.cast(), 0), 0);
        assert_eq!(call!((*set).ops, poll_add, set, cntr.cast(), 0), 0);
        // as with libfabric's own providers, whose test programs close the set last
        assert_eq!(close(cq), 0, "a queue, of a poll set");
        let mut contexts = [null_mut(); 2];
        let room = contexts.as_mut_ptr();
        assert_eq!(call!((*set).ops, poll, set, room, 2), 0);
        let left = call!((*set).ops, poll_del, set, cq.cast(), 0);
        assert_eq!(left, -FI_EINVAL, "it has left the set");
        assert_eq!(close(set), 0, "of a counter");
        assert_eq!(close(cntr), 0);
    }
}
