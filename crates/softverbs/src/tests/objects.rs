//! Objects whose creation or end fails.

use std::cell::Cell;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use crate::agent::{Kind, Request};
use crate::agent_thread;
use crate::hazard::Hazard;
use crate::key::Key;
use crate::mw::{self, Bind};
use crate::object::{Import, Pd};
use crate::process::Process;
use crate::qp::{Qp, behind_child};
use crate::region::Range;
use crate::segment::layout::{member, qp, split_qp_num, xrc};
use crate::srq::Srq;
use crate::testing::{Buffer, End, attributes, device, send_wr, verbs};

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

/// The requester counts a receive as returned when it has sent the request.
#[test]
fn receives_are_returned_over_a_line_that_the_agent_closes() {
    let end = End::new(IBV_QPT_RC, true);
    let buffer = Buffer::new(64);
    assert_eq!(end.post_recv(&mut [buffer.sge(64)], 1), 0);
    let process = Process::current().unwrap();
    // SAFETY: a live queue.
    let srq = unsafe { Srq::from_ptr(end.srq) };
    let index = srq.claim_next(8).unwrap();
    assert!(srq.claimed(index, process.slot).is_some());
    let hello = Request {
        a: process.slot.into(),
        ..Request::new(Kind::Hello)
    };
    let returned = Request {
        a: srq.index().into(),
        b: index.into(),
        ..Request::new(Kind::Return)
    };
    // a WRITE needs the file that the greeting does not have
    let refused = Request::new(Kind::Write);
    agent_thread::serve(process, &[hello, refused, refused, returned]);
    assert!(srq.claimed(index, process.slot).is_none(), "not returned");
}

/// The cleanup is repeated for a queue pair that was connected meanwhile. The next process of the
/// slot has claimed a receive since.
#[test]
fn the_second_cleanup_of_a_peer_returns_no_receives() {
    let end = End::new(IBV_QPT_RC, true);
    let buffer = Buffer::new(64);
    let process = Process::current().unwrap();
    let peer = process.peer(process.slot).unwrap();
    // SAFETY: a live queue.
    let srq = unsafe { Srq::from_ptr(end.srq) };
    for left in [false, true] {
        assert_eq!(end.post_recv(&mut [buffer.sge(64)], 1), 0);
        let index = srq.claim_next(8).unwrap();
        assert!(srq.claimed(index, process.slot).is_some());
        process.request_cleanup(&peer);
        process.clean_up_dead_peers();
        assert_eq!(srq.claimed(index, process.slot).is_some(), left);
        if left {
            srq.give_back(index, process.slot);
        }
    }
}

/// The agent may have executed an atomic whose line breaks. If the other end was reset meanwhile, a
/// request without an answer waits for the next connection, and is executed then.
#[test]
fn an_atomic_that_an_agent_may_have_executed_does_not_wait_for_the_next_connection() {
    let (one, other) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
    let buffer = Buffer::new(64);
    let mut sge = buffer.sge(8);
    one.connect(other.number());
    other.connect(one.number());
    let mut wr = send_wr(IBV_WR_RDMA_READ);
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = buffer.place();
    assert_eq!(one.post_send(&mut wr), 0);
    assert!(one.wait_success());
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(one.qp) };
    assert!(!qp.waits_unanswered(false));
    let mut attr = attributes(0);
    attr.qp_state = IBV_QPS_RESET;
    assert_eq!(other.modify(&mut attr, IBV_QP_STATE), 0);
    assert!(qp.waits_unanswered(false));
    assert!(!qp.waits_unanswered(true));
}

/// Another process clears the word by which the sender asks for a ring, all the time.
#[test]
fn a_post_returns_while_its_request_to_ring_is_cleared_again_and_again() {
    let (one, other) = (End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false));
    one.connect_with(other.number(), 7);
    other.connect_with(one.number(), 7);
    // no message that the receiver could take itself
    let mut wr = send_wr(IBV_WR_RDMA_WRITE_WITH_IMM);
    let process = Process::current().unwrap();
    let (_, index) = split_qp_num(other.number());
    let at = qp::AT + qp::STRIDE * index as usize + qp::WAITING;
    let (second, begin) = (Duration::from_secs(1), Instant::now());
    let took = std::thread::scope(|scope| {
        scope.spawn(|| {
            while begin.elapsed() < 3 * second {
                (0..1000).for_each(|_| process.segment.map.u32(at).store(0, Ordering::Relaxed));
            }
        });
        std::thread::sleep(second / 10);
        let begin = Instant::now();
        assert_eq!(one.post_send(&mut wr), 0);
        assert!(one.poll().is_none());
        begin.elapsed()
    });
    assert!(took < second, "{took:?}");
    let buffer = Buffer::new(64);
    assert_eq!(other.post_recv(&mut [buffer.sge(64)], 1), 0);
    assert!(one.wait_success());
}

/// Another thread closes the domain as soon as its last target is no child of it: the membership
/// ends in that call, under the lock of the memberships, and not later.
#[test]
fn a_domain_is_left_by_the_call_that_closes_it() {
    let context = device().context;
    let map = &Process::current().unwrap().segment.map;
    let left = Rc::new(Cell::new(None));
    // SAFETY: live objects, each destroyed once; valid attributes.
    unsafe {
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        let xrcd = ibv_open_xrcd(context, &raw mut init);
        assert!(!xrcd.is_null(), "{}", std::io::Error::last_os_error());
        let mut init = ibv_qp_init_attr_ex {
            comp_mask: IBV_QP_INIT_ATTR_XRCD,
            qp_type: IBV_QPT_XRC_RECV,
            xrcd,
            ..Default::default()
        };
        let target = ibv_create_qp_ex(context, &raw mut init);
        assert!(!target.is_null(), "{}", std::io::Error::last_os_error());
        let (number, _) = xrc::split_target((*target).qp_num).unwrap();
        let cookie = map.u64(member::AT + member::STRIDE * number as usize + member::COOKIE);
        assert_ne!(cookie.load(Ordering::Relaxed), 0);
        let result = Rc::clone(&left);
        behind_child::once(move || {
            let closed = ibv_close_xrcd(xrcd);
            result.set(Some((closed, cookie.load(Ordering::Relaxed))));
        });
        assert_eq!((verbs().ibv_destroy_qp)(target), 0);
    }
    assert_eq!(left.get(), Some((0, 0)));
}

/// The thread that ends a region waits until `awaited` returns true.
fn until_awaited<T>(awaited: &dyn Fn() -> bool, ends: &JoinHandle<T>) {
    while !awaited() {
        assert!(!ends.is_finished(), "the copies are not awaited");
        std::thread::yield_now();
    }
}

/// Another thread of the process has looked up the key, and copies.
#[test]
fn a_deregistration_waits_for_the_copies_of_the_own_process() {
    let end = End::new(IBV_QPT_RC, false);
    let process = Process::current().unwrap();
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(end.qp) };
    let begin = || {
        let range = Range {
            addr: 0x1000,
            len: 8,
            iova: 0,
        };
        let key = process.add_region(1, range, 0).unwrap();
        (key, std::thread::spawn(move || process.end_region(key)))
    };
    for sends in [true, false] {
        let ends = qp.while_copying(sends, |awaited, _| {
            let (key, ends) = begin();
            until_awaited(awaited, &ends);
            assert!(process.regions.describe(key).is_none());
            ends
        });
        assert_eq!(ends.join().unwrap(), Ok(()));
        // the thread executes another request then, under the same lock
        qp.while_copying(sends, |awaited, pass| {
            let (_, ends) = begin();
            until_awaited(awaited, &ends);
            pass();
            assert_eq!(ends.join().unwrap(), Ok(()));
        });
    }
    let other = end.number();
    end.connect(other);
    // the end waits for no lock that is free
    let (_, ends) = begin();
    assert_eq!(ends.join().unwrap(), Ok(()));
}

/// A region for other threads.
struct Region(*mut ibv_mr);

// SAFETY: regions may be used by several threads.
unsafe impl Send for Region {}

impl Region {
    /// Reregisters it, with these rights, in a thread.
    fn change(&self, access: u32) -> JoinHandle<i32> {
        let this = Self(self.0);
        std::thread::spawn(move || {
            let this = this;
            let (null, flags) = (null_mut(), IBV_REREG_MR_CHANGE_ACCESS.cast_signed());
            let call = verbs().ibv_rereg_mr.unwrap();
            // SAFETY: the test keeps the region live, and makes no other call on it.
            unsafe { call(this.0, flags, null, null.cast(), 0, access.cast_signed()) }
        })
    }
}

/// A reregistration waits as a deregistration does: for copies of this process, and for accesses
/// through a window that was bound.
#[test]
fn a_reregistration_waits_as_a_deregistration() {
    const ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
    const NOBODY: u32 = 99;
    let end = End::new(IBV_QPT_RC, false);
    let process = Process::current().unwrap();
    // SAFETY: a live queue pair.
    let qp = unsafe { Qp::from_ptr(end.qp) };
    let memory = vec![0_u8; 4096];
    let (pd, addr) = (device().pd, memory.as_ptr().cast_mut());
    // SAFETY: live memory, and a live domain.
    let region = Region(unsafe { (verbs().ibv_reg_mr)(pd, addr.cast(), 4096, ACCESS as i32) });
    assert!(!region.0.is_null());
    // SAFETY: live.
    let (key, domain) = unsafe { (Key((*region.0).lkey), Pd::from_ptr(pd).number) };
    for sends in [true, false] {
        // it locks the receive queues too
        let changes = qp.while_copying(sends, |awaited, _| {
            let changes = region.change(ACCESS);
            if sends {
                until_awaited(awaited, &changes);
            }
            changes
        });
        assert_eq!(changes.join().unwrap(), 0);
        assert!(process.regions.describe(key).is_some());
    }
    let window = process.with_windows(|windows, owner| {
        let window = windows.alloc(owner, mw::Kind::TwoB, domain).unwrap();
        let bind = Bind {
            window: window.index() as u32,
            key: Key(window.0 & !0xff | window.0.wrapping_add(1) & 0xff),
            region: key,
            addr: addr as u64,
            len: 8,
            access: IBV_ACCESS_REMOTE_READ,
        };
        windows.bind(owner, &bind, NOBODY, domain).unwrap();
        bind
    });
    let own = process.peer(process.slot).unwrap();
    let map = &process.segment.map;
    let hazard = Hazard::publish(&own.hazards, map, process.slot, window.key);
    process.with_windows(|windows, owner| windows.release(owner, NOBODY));
    let begin = Instant::now();
    let changes = region.change(0);
    while begin.elapsed() < Duration::from_millis(100) {
        assert!(!changes.is_finished(), "{:?}", changes.join());
        std::thread::yield_now();
    }
    drop(hazard);
    assert_eq!(changes.join().unwrap(), 0);
    assert_eq!(process.regions.describe(key).map(|it| it.access), Some(0));
    process
        .with_windows(|windows, owner| windows.free(owner, window.window))
        .unwrap();
    // SAFETY: live, and not used afterwards.
    assert_eq!(unsafe { (verbs().ibv_dereg_mr)(region.0) }, 0);
}
