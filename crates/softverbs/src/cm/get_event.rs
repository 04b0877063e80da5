//! `rdma_get_cm_event`: processes what peers have done, and delivers the next event of a channel.

use std::sync::Arc;

use libc::c_int;
use rdma_core_sys::{rdma_cm_event, rdma_event_channel};

use super::channel::{Channel, Events};
use super::deliver::{Event, deliver};
use super::guard::status;
use super::progress;
use crate::sys::{Errno, Res};

/// The next event for the application of those that are queued.
pub(super) fn queued(events: &Arc<Events>) -> Option<Box<Event>> {
    std::iter::from_fn(|| events.pop()).find_map(|(raw, number)| deliver(raw, number, events))
}

/// Maximum number of looks at the descriptors of a non-blocking channel in one call.
const LOOKS: usize = 4;

/// The next event for the application. A new connection and its request are two steps, so another
/// look follows one that has led to no event.
///
/// # Errors
/// `EAGAIN`: none, and the channel is non-blocking. `EINTR`. Those of accepting connections.
pub(super) fn next(events: &Arc<Events>) -> Res<Box<Event>> {
    let mut looks = 0;
    loop {
        if let Some(event) = queued(events) {
            return Ok(event);
        }
        looks += 1;
        match events.turn(progress::act) {
            // The error is returned by the call that finds no event.
            Err(_) if events.has_event() => {}
            Err(errno) => return Err(errno),
            Ok(any) if any && looks < LOOKS => {}
            Ok(_) => events.wait()?,
        }
    }
}

pub(super) unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    status(|| {
        if channel.is_null() || event.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises a live channel.
        let events = unsafe { Channel::events_of(channel) };
        let next = next(&events)?;
        // SAFETY: the caller promises room for a pointer.
        unsafe { *event = next.into_c() };
        Ok(())
    })
}
