//! Calls on ids without a channel of the application, which wait for their events
//! (rdma_create_id(3), synchronous operation).

use std::ptr::null_mut;
use std::sync::Arc;

use rdma_core_sys::*;

use super::channel::{Channel, Events};
use super::deliver::{Event, rdma_ack_cm_event};
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
    let Some(events) = (unsafe { own_events(id)? }) else {
        return Ok(());
    };
    // SAFETY: as above.
    unsafe { acknowledge_last(id) };
    let event = loop {
        match get_event::next(&events) {
            // The operation has begun, and the call could not be repeated.
            Err(Errno(libc::EINTR)) => {}
            next => break next?,
        }
    };
    // SAFETY: as above.
    unsafe { keep(id, event) }
}

/// On an id without a channel of the application, takes the event that the id has, if it has one,
/// in place of the last one: a call that has begun no operation has no event to wait for.
///
/// # Errors
/// The status of the event, as an errno.
///
/// # Safety
/// `id` must be live.
pub(super) unsafe fn collect(id: *mut rdma_cm_id) -> Res<()> {
    // SAFETY: the caller promises a live id.
    let Some(event) = (unsafe { own_events(id)? }).and_then(|events| get_event::queued(&events))
    else {
        return Ok(());
    };
    // SAFETY: as above.
    unsafe {
        acknowledge_last(id);
        keep(id, event)
    }
}

/// The channel of an id without a channel of the application.
///
/// # Safety
/// `id` must be live.
unsafe fn own_events(id: *mut rdma_cm_id) -> Res<Option<Arc<Events>>> {
    // SAFETY: the caller promises a live id.
    let shared = unsafe { Id::shared_of(id)? };
    let channel = lock(&shared.state).own_channel;
    // SAFETY: as above; the channel is the id's.
    Ok(channel.map(|channel| unsafe { Channel::events_of(channel) }))
}

/// Leaves an event in the id.
///
/// # Errors
/// Its status, as an errno.
///
/// # Safety
/// `id` must be live.
unsafe fn keep(id: *mut rdma_cm_id, event: Box<Event>) -> Res<()> {
    let event = event.into_c();
    // SAFETY: the caller promises a live id; the event has just been made.
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
