//! Objects whose creation or end fails.

use std::ptr::null_mut;

use rdma_core_sys::*;

use super::device::{device, verbs};
use crate::hazard::Hazard;
use crate::key::Key;
use crate::object::{Import, Pd};
use crate::process::Process;

/// The index of a shared receive queue whose creation has failed can be named by any message and
/// by any agent request of another process.
#[test]
fn a_shared_queue_that_was_not_created_gives_and_takes_nothing() {
    let device = device();
    let process = Process::current().unwrap();
    let room = process.segment.exhaust();
    // SAFETY: a live domain; all zeros is a value of the attributes.
    let (srq, error) = unsafe {
        let mut init: ibv_srq_init_attr = std::mem::zeroed();
        (init.attr.max_wr, init.attr.max_sge) = (8, 1);
        let srq = (verbs().ibv_create_srq)(device.pd, &raw mut init);
        (srq, std::io::Error::last_os_error().raw_os_error())
    };
    for (at, len) in room {
        process.segment.give(at, len);
    }
    assert_eq!((srq, error), (null_mut(), Some(libc::ENOMEM)));
    let mut count = 0;
    for srq in process.srqs.iter() {
        count += 1;
        srq.give_back(0, 5);
        assert!(srq.take(0, 5).is_none());
        assert!(srq.claimed(0, 5).is_none());
        assert!(srq.receive_places(0, 0, 8, 5).is_none());
        assert!(srq.enter_target(7, 0).is_none());
        assert!(srq.granted_through(7, 7, 0, 5).is_none());
        srq.poison_receives(1);
        srq.notice_limit();
        srq.notice_overrun();
        srq.claimant_died(5);
        srq.ring_further(u64::MAX / 2);
    }
    assert_eq!(count, 1);
}

/// A process that was stopped during an access keeps the region, not the objects of the
/// application, because a call without a result cannot be repeated.
#[test]
fn an_imported_region_that_is_in_use_leaves_its_domain() {
    let context = device().context;
    let process = Process::current().unwrap();
    let memory = vec![0_u8; 4096];
    // SAFETY: all objects are live until their last use; no other thread uses the domain.
    unsafe {
        let pd = (verbs().ibv_alloc_pd)(context);
        let addr = memory.as_ptr().cast_mut().cast();
        let mr = (verbs().ibv_reg_mr)(pd, addr, memory.len(), 0);
        assert!(!pd.is_null() && !mr.is_null());
        // as if another process had made the domain
        (*pd.cast::<Pd>()).import = Some(Import {
            handle: 77,
            foreign: true,
        });
        let own = process.peer(process.slot).unwrap();
        let key = Key((*mr).lkey);
        let hazard = Hazard::publish(&own.hazards, &process.segment.map, process.slot, key);
        verbs().ibv_unimport_mr.unwrap()(mr);
        drop(hazard);
        assert!(process.regions.describe(key).is_none());
        (*pd.cast::<Pd>()).import = None;
        assert_eq!((verbs().ibv_dealloc_pd)(pd), 0);
    }
}
