//! Queue pairs that are reset or fail, at a particular moment of another call.

use std::rc::Rc;

use rdma_core_sys::*;

use crate::process::Process;
use crate::qp::meanwhile::{self, At};
use crate::testing::{Buffer, End, RECVS, attributes};

/// The attributes of a change from RESET to INIT.
const TO_INIT: u32 = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

/// Moves a queue pair to a state, with these further attributes.
fn move_to(end: &End, state: u32, mask: u32) {
    let mut attr = attributes(0);
    attr.qp_state = state;
    assert_eq!(end.modify(&mut attr, IBV_QP_STATE | mask), 0);
}

fn post_recv(end: &End, buffer: &Buffer, len: usize) {
    assert_eq!(end.post_recv(&mut [buffer.sge(len)], 1), 0);
}

/// A thread that polls takes a completion of the queue pair before the reset removes the others.
#[test]
fn a_poll_during_a_reset_uses_no_receive_of_the_next_connection() {
    let (end, buffer) = (Rc::new(End::new(IBV_QPT_RC, false)), Buffer::new(64));
    end.connect(end.number());
    (0..RECVS).for_each(|_| post_recv(&end, &buffer, 64));
    move_to(&end, IBV_QPS_ERR, 0);
    // flushes the receives
    Process::current().unwrap().progress();
    let polls = Rc::clone(&end);
    meanwhile::once(At::Purge, move || assert!(polls.poll().is_some()));
    move_to(&end, IBV_QPS_RESET, 0);
    assert!(!meanwhile::is_left());
    move_to(&end, IBV_QPS_INIT, TO_INIT);
    (0..RECVS).for_each(|_| post_recv(&end, &buffer, 64));
}
