//! Calls on ids without a channel of the application, which wait for their events
//! (rdma_create_id(3), synchronous operation).

use std::ptr::null_mut;

use rdma_core_sys::*;

use super::channel::Channel;
use super::deliver::rdma_ack_cm_event;
use super::get_event;
use super::guard::lock;
use super::id::Id;
use crate::sys::{Errno, Res};

/// Acknowledges the event that a waiting call has left in the id.
///
/// # Safety
/// `id` must be live.
pub(super) unsafe fn acknowledge_last(id: *mut rdma_cm_id) {
    // SAFETY: the caller promises a live id; its event is NULL or not yet acknowledged.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            rdma_ack_cm_event(event);
        }
    }
}

/// On an id without a channel of the application, waits for the event of the call that has just
/// begun, also while signal handlers are called.
///
/// # Errors
/// The status of the event, as an errno.
///
/// # Safety
/// `id` must be live.
pub(super) unsafe fn complete(id: *mut rdma_cm_id) -> Res<()> {
    // SAFETY: the caller promises a live id.
    let shared = unsafe { Id::shared_of(id)? };
    let Some(channel) = lock(&shared.state).own_channel else {
        return Ok(());
    };
    // SAFETY: as above; the channel is the id's.
    let events = unsafe {
        acknowledge_last(id);
        Channel::events_of(channel)
    };
    let event = loop {
        match get_event::next(&events) {
            // The operation has begun, and the call could not be repeated.
            Err(Errno(libc::EINTR)) => {}
            next => break next?.into_c(),
        }
    };
    // SAFETY: the event has just been returned.
    let (kind, status) = unsafe {
        (*id).event = event;
        ((*event).event, (*event).status)
    };
    match (kind, status) {
        (_, 0) => Ok(()),
        (RDMA_CM_EVENT_REJECTED, _) => Err(Errno(libc::ECONNREFUSED)),
        (_, status) => Err(Errno(status.abs())),
    }
}
