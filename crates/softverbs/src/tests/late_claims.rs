//! A sender is stopped in front of its claim of a receive, while the owner of the shared receive
//! queue destroys the queue and creates others.

use std::cell::Cell;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_core_sys::*;

use crate::srq::{Srq, before_claim};
use crate::testing::{Buffer, End, RECVS, create_srq, device, send_wr, verbs};

/// Held by each test: one that fills the segment releases the words that another one expects to
/// stay.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn destroy(srq: *mut ibv_srq) {
    // SAFETY: live, and not used afterwards.
    assert_eq!(unsafe { (verbs().ibv_destroy_srq)(srq) }, 0);
}

fn index_of(srq: *mut ibv_srq) -> u32 {
    // SAFETY: live.
    unsafe { Srq::from_ptr(srq) }.index()
}

/// A connection whose receiver uses `srq`: its sender, which waits for receives without a limit,
/// and its receiver.
fn pair(srq: *mut ibv_srq) -> (End, End) {
    let ends = (End::new(IBV_QPT_RC, false), End::on(srq, IBV_QPT_RC));
    ends.0.connect_with(ends.1.number(), 7);
    ends.1.connect_with(ends.0.number(), 7);
    ends
}

fn post_recv(end: &End, buffer: &Buffer) {
    assert_eq!(end.post_recv(&mut [buffer.sge(64)], 1), 0);
}

/// Posts a message of one sge, which takes the fast path, or of two.
fn post_send(end: &End, buffer: &Buffer, num_sge: i32) {
    let mut sges = [buffer.sge(8); 2];
    let mut wr = send_wr(IBV_WR_SEND);
    (wr.sg_list, wr.num_sge) = (sges.as_mut_ptr(), num_sge);
    assert_eq!(end.post_send(&mut wr), 0);
}

/// Sends a message, and while its sender is about to claim the second receive, destroys the
/// receiver and its queue, and posts two receives to the queue that `replace` makes of the
/// destroyed one's index. Whether another sender can claim both then.
fn are_left_by_a_late_claim(num_sge: i32, replace: fn(u32) -> *mut ibv_srq) -> bool {
    let buffer = Rc::new(Buffer::new(64));
    let (sender, receiver) = pair(create_srq(RECVS));
    // makes the ring, and the connection known
    post_recv(&receiver, &buffer);
    post_send(&sender, &buffer, num_sge);
    assert!(sender.wait_success() && receiver.wait_success());
    post_recv(&receiver, &buffer);
    let next = Rc::new(Cell::new(None));
    let (result, memory) = (Rc::clone(&next), Rc::clone(&buffer));
    before_claim::once(move || {
        let index = index_of(receiver.srq);
        drop(receiver);
        let ends = pair(replace(index));
        (0..2).for_each(|_| post_recv(&ends.1, &memory));
        result.set(Some(ends));
    });
    post_send(&sender, &buffer, num_sge);
    assert!(!before_claim::is_left());
    // takes the late message, if there is one
    assert!(sender.poll().is_none());
    let (other, receiver) = next.take().unwrap();
    (0..2).all(|_| {
        post_send(&other, &buffer, num_sge);
        other.wait_success() && receiver.wait_success()
    })
}

#[test]
fn a_late_claim_takes_no_receive_of_a_queue_with_another_number() {
    let _alone = alone();
    for num_sge in [1, 2] {
        assert!(are_left_by_a_late_claim(num_sge, |_| create_srq(RECVS)));
    }
}

#[test]
fn a_late_claim_of_a_queue_with_the_same_number_is_given_back() {
    let _alone = alone();
    // the number comes back when all free ones have been used
    let again = |index| loop {
        let srq = create_srq(RECVS);
        if index_of(srq) == index {
            return srq;
        }
        destroy(srq);
    };
    for num_sge in [1, 2] {
        assert!(are_left_by_a_late_claim(num_sge, again));
    }
}

/// The words of 128 orders of this length, or of fewer and longer ones, fill their part of the
/// segment.
#[test]
fn words_of_destroyed_queues_leave_room_for_others() {
    let _alone = alone();
    let context = device().context;
    // SAFETY: live objects, each destroyed once; valid attributes.
    unsafe {
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        let xrcd = ibv_open_xrcd(context, &raw mut init);
        assert!(!xrcd.is_null(), "{}", std::io::Error::last_os_error());
        let cq = (verbs().ibv_create_cq)(context, 8, null_mut(), null_mut(), 0);
        for round in 0..150 {
            destroy(create_srq(32_768));
            let mut init = ibv_srq_init_attr_ex {
                comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                    | IBV_SRQ_INIT_ATTR_PD
                    | IBV_SRQ_INIT_ATTR_XRCD
                    | IBV_SRQ_INIT_ATTR_CQ,
                srq_type: IBV_SRQT_XRC,
                pd: device().pd,
                xrcd,
                cq,
                ..Default::default()
            };
            (init.attr.max_wr, init.attr.max_sge) = (32_768, 1);
            let srq = ibv_create_srq_ex(context, &raw mut init);
            assert!(!srq.is_null(), "queue {round}");
            destroy(srq);
        }
        assert_eq!((verbs().ibv_destroy_cq)(cq), 0);
        assert_eq!(ibv_close_xrcd(xrcd), 0);
    }
}
