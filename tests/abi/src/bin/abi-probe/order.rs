//! Objects are opened in valid orders and closed in every order: with users, closing returns
//! `-FI_EBUSY` and changes nothing; without users, it succeeds.

use std::ptr::null_mut;

use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, close, control, cq_attr, open_cq, open_ep, register};
use libfabric_sys::*;

const BUSY: i32 = -FI_EBUSY;
const READ_WRITE: u64 = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

pub(crate) fn run(lib: &Lib) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
    let mut memory = vec![0_u8; 4096];
    // SAFETY: fids as they are opened; `memory` outlives its region.
    unsafe {
        // a parent with children stays open, however often it is closed
        for _ in 0..2 {
            assert_eq!(close(setup.fabric), BUSY);
            assert_eq!(close(setup.domain), BUSY);
        }
        let mr = register(setup.domain, memory.as_mut_ptr(), memory.len(), READ_WRITE);
        let other = open_cq(setup.domain, cq_attr(FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE));
        let ep = open_ep(&setup, setup.info.first());
        assert_eq!(close(setup.eq), BUSY);
        assert_eq!(close(setup.cq), BUSY);
        assert_eq!(close(other), 0, "nobody uses it");
        assert_eq!(
            control(ep, FI_ENABLE, null_mut()),
            0,
            "busy queues still work"
        );
        assert_eq!(close(setup.cq), BUSY);

        // a region and an endpoint do not use each other
        assert_eq!(close(mr), 0);
        assert_eq!(close(setup.domain), BUSY);
        assert_eq!(close(ep), 0);
        let ep = open_ep(&setup, setup.info.first());
        let mr = register(setup.domain, memory.as_mut_ptr(), memory.len(), READ_WRITE);
        assert_eq!(close(ep), 0);
        assert_eq!(close(mr), 0);
        assert_eq!(close(setup.fabric), BUSY);

        many(&setup);
    }
    setup.close();
    println!("every order of closing is safe");
}

/// More closed handles than the provider remembers: their memory must stay bounded, and closed
/// handles stay invalid.
unsafe fn many(setup: &Setup) {
    let mut memory = [0_u8; 64];
    for _ in 0..3000 {
        // SAFETY: as in `run`.
        unsafe {
            let mr = register(setup.domain, memory.as_mut_ptr(), memory.len(), READ_WRITE);
            assert_eq!(close(mr), 0);
        }
    }
}
