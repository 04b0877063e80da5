//! Events, in the queue of a channel and as the application gets them.
//!
//! Invariants: the effects of an event on its id (fields, state of the queue pair) happen when it
//! is delivered, in the thread that takes it, so an id changes only during calls of the
//! application. A reported event holds its subject until it is acknowledged.

use std::sync::Arc;

use libc::{c_char, c_int};
use rdma_core_sys::*;

use super::channel::{Events, lock};
use super::id::{Id, Shared};
use super::state::{Phase, State};
use super::wire::{Message, Party, Private, REJ_DATA, REP_DATA, REQ_DATA};
use super::{conversation, id, qp};
use crate::sys::{Errno, Res};

/// Reject reasons of the InfiniBand specification, which applications find in an event's status.
pub(super) mod reason {
    /// The peer has given up.
    pub(in super::super) const TIMEOUT: u16 = 4;
    /// No process listens.
    pub(in super::super) const INVALID_SERVICE_ID: u16 = 8;
    /// The application has rejected, or has ended.
    pub(in super::super) const CONSUMER_DEFINED: u16 = 28;
}

/// An event in a channel's queue.
pub(super) struct Raw {
    /// The id that counts the event: the listener for a connection request.
    pub(super) subject: Arc<Shared>,
    pub(super) kind: Kind,
}

/// The kind of an event. A status is a negative errno.
#[allow(
    clippy::large_enum_variant,
    reason = "few exist, and none is on a fast path"
)]
pub(super) enum Kind {
    AddrResolved,
    AddrError(Errno),
    RouteResolved,
    Request {
        child: Arc<Shared>,
        party: Party,
        retry_count: u8,
        data: Private<REQ_DATA>,
    },
    Response {
        party: Party,
        data: Private<REP_DATA>,
    },
    Established,
    Rejected {
        reason: u16,
        data: Private<REJ_DATA>,
    },
    Unreachable(Errno),
    ConnectError(Errno),
    /// 0, or the reason as a negative errno.
    Disconnected(c_int),
    TimewaitExit,
}

/// The object that the application holds.
#[repr(C)]
pub(super) struct Event {
    c: rdma_cm_event,
    private: [u8; 256],
    subject: Arc<Shared>,
}

impl Event {
    fn new(subject: Arc<Shared>, event: rdma_cm_event_type, status: c_int) -> Box<Self> {
        let mut out = Box::new(Self {
            c: rdma_cm_event::default(),
            private: [0; 256],
            subject,
        });
        out.c.id = out.subject.handle().cast();
        out.c.event = event;
        out.c.status = status;
        out
    }

    fn conn(&mut self) -> &mut rdma_conn_param {
        // SAFETY: a member of the union, of which all bits are initialized.
        unsafe { self.c.param.conn.as_mut() }
    }

    /// Sets the peer's parameters. The peer's initiator depth is this side's number of responder
    /// resources, and the reverse.
    fn set_party(&mut self, party: &Party) {
        let conn = self.conn();
        conn.responder_resources = party.initiator_depth;
        conn.initiator_depth = party.responder_resources;
        conn.flow_control = u8::from(party.flow_control);
        conn.rnr_retry_count = party.rnr_retry_count;
        conn.srq = u8::from(party.srq);
        conn.qp_num = party.qp_num;
    }

    fn set_data(&mut self, data: &[u8]) {
        for (to, from) in self.private.iter_mut().zip(data) {
            *to = *from;
        }
        let at = self.private.as_ptr();
        let conn = self.conn();
        conn.private_data = at.cast();
        conn.private_data_len = data.len() as u8;
    }

    pub(super) fn into_c(self: Box<Self>) -> *mut rdma_cm_event {
        Box::into_raw(self).cast()
    }
}

/// The part of delivery that happens when an event is taken from the queue: creates the id of a
/// connection request, so that a thread that takes the id's next event finds it. The caller holds
/// the channel's lock.
pub(super) fn prepare(raw: &Raw, channel: *mut rdma_event_channel) {
    if let Kind::Request { child, .. } = &raw.kind {
        Id::make_for_request(child, &raw.subject, channel);
    }
}

/// Turns an event of `channel` into the object for the application; `None` if the application must
/// not see it.
pub(super) fn deliver(raw: Raw, channel: &Arc<Events>) -> Option<Box<Event>> {
    let Raw { subject, kind } = raw;
    let plain = |event, status| Some(Event::new(Arc::clone(&subject), event, status));
    let delivered = match kind {
        Kind::AddrResolved => {
            let mut state = lock(&subject.state);
            match state.bind_device(&subject) {
                Ok(()) => {
                    state.show_addresses(&subject);
                    plain(RDMA_CM_EVENT_ADDR_RESOLVED, 0)
                }
                Err(Errno(errno)) => {
                    state.phase = Phase::Bound;
                    plain(RDMA_CM_EVENT_ADDR_ERROR, -errno)
                }
            }
        }
        Kind::AddrError(Errno(errno)) => plain(RDMA_CM_EVENT_ADDR_ERROR, -errno),
        Kind::RouteResolved => {
            lock(&subject.state).show_route(&subject);
            plain(RDMA_CM_EVENT_ROUTE_RESOLVED, 0)
        }
        Kind::Request {
            child,
            party,
            retry_count,
            data,
        } => deliver_request(&subject, &child, channel).map(|()| {
            let mut event = Event::new(Arc::clone(&subject), RDMA_CM_EVENT_CONNECT_REQUEST, 0);
            event.c.id = child.handle().cast();
            event.c.listen_id = subject.handle().cast();
            event.set_party(&party);
            event.conn().retry_count = retry_count;
            event.set_data(data.padded());
            event
        }),
        Kind::Response { party, data } => {
            let (event, status) = deliver_response(&subject);
            let mut event = Event::new(Arc::clone(&subject), event, status);
            event.set_party(&party);
            event.set_data(data.padded());
            Some(event)
        }
        Kind::Established => plain(RDMA_CM_EVENT_ESTABLISHED, 0),
        Kind::Rejected { reason, data } => {
            let state = lock(&subject.state);
            if state.connect_error {
                None
            } else {
                // The event informs the application. Moving fails only for a queue pair that is in
                // the error state already, or that is still in the reset state.
                let _ = qp::to_error(subject.handle());
                drop(state);
                let mut event =
                    Event::new(Arc::clone(&subject), RDMA_CM_EVENT_REJECTED, reason.into());
                event.set_data(data.padded());
                Some(event)
            }
        }
        Kind::Unreachable(Errno(errno)) => plain(RDMA_CM_EVENT_UNREACHABLE, -errno),
        Kind::ConnectError(Errno(errno)) => plain(RDMA_CM_EVENT_CONNECT_ERROR, -errno),
        Kind::Disconnected(_) | Kind::TimewaitExit if lock(&subject.state).connect_error => None,
        Kind::Disconnected(status) => plain(RDMA_CM_EVENT_DISCONNECTED, status),
        Kind::TimewaitExit => plain(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0),
    };
    if delivered.is_none() {
        subject.acknowledge();
    }
    delivered
}

/// Prepares the new id for the application. `None` without a device.
fn deliver_request(listener: &Shared, child: &Arc<Shared>, channel: &Arc<Events>) -> Option<()> {
    // the listener, and the child with it, may have moved to another channel after the event was
    // taken from the queue
    id::move_to(child, channel);
    lock(&listener.state)
        .children
        .retain(|(other, _)| other.serial != child.serial);
    let mut state = lock(&child.state);
    if state.bind_device(child).is_ok() {
        state.show_addresses(child);
        state.show_route(child);
        return Some(());
    }
    drop(state);
    Id::abandon(child);
    // SAFETY: made when the event was taken, and never passed to the application.
    unsafe { Id::free(child.handle()) };
    None
}

/// Completes the connection on the active side, if the id has a queue pair.
fn deliver_response(subject: &Shared) -> (rdma_cm_event_type, c_int) {
    let mut state = lock(&subject.state);
    let handle = subject.handle();
    if qp::of(handle).is_null() {
        return (RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    }
    match complete_connection(&mut state, subject, handle) {
        Ok(()) => (RDMA_CM_EVENT_ESTABLISHED, 0),
        Err(Errno(errno)) => {
            let _ = qp::to_error(handle);
            state.connect_error = true;
            (RDMA_CM_EVENT_CONNECT_ERROR, -errno)
        }
    }
}

fn complete_connection(state: &mut State, subject: &Shared, handle: *mut Id) -> Res<()> {
    if state.phase != Phase::RepReceived {
        return Err(Errno(libc::ECONNRESET));
    }
    qp::to_ready(state, handle)?;
    conversation::say(state, subject, &Message::Rtu)?;
    state.phase = Phase::Established;
    Ok(())
}

pub(super) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    super::status(|| {
        if event.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: every event of this connection manager is an `Event`; the caller does not use it
        // again.
        let event = unsafe { Box::from_raw(event.cast::<Event>()) };
        event.subject.acknowledge();
        Ok(())
    })
}

pub(super) extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    let name = match event {
        RDMA_CM_EVENT_ADDR_RESOLVED => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        RDMA_CM_EVENT_ADDR_ERROR => c"RDMA_CM_EVENT_ADDR_ERROR",
        RDMA_CM_EVENT_ROUTE_RESOLVED => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        RDMA_CM_EVENT_ROUTE_ERROR => c"RDMA_CM_EVENT_ROUTE_ERROR",
        RDMA_CM_EVENT_CONNECT_REQUEST => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        RDMA_CM_EVENT_CONNECT_RESPONSE => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        RDMA_CM_EVENT_CONNECT_ERROR => c"RDMA_CM_EVENT_CONNECT_ERROR",
        RDMA_CM_EVENT_UNREACHABLE => c"RDMA_CM_EVENT_UNREACHABLE",
        RDMA_CM_EVENT_REJECTED => c"RDMA_CM_EVENT_REJECTED",
        RDMA_CM_EVENT_ESTABLISHED => c"RDMA_CM_EVENT_ESTABLISHED",
        RDMA_CM_EVENT_DISCONNECTED => c"RDMA_CM_EVENT_DISCONNECTED",
        RDMA_CM_EVENT_DEVICE_REMOVAL => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        RDMA_CM_EVENT_MULTICAST_JOIN => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        RDMA_CM_EVENT_MULTICAST_ERROR => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        RDMA_CM_EVENT_ADDR_CHANGE => c"RDMA_CM_EVENT_ADDR_CHANGE",
        RDMA_CM_EVENT_TIMEWAIT_EXIT => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        RDMA_CM_EVENT_ADDRINFO_RESOLVED => c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        RDMA_CM_EVENT_ADDRINFO_ERROR => c"RDMA_CM_EVENT_ADDRINFO_ERROR",
        _ => c"UNKNOWN EVENT",
    };
    name.as_ptr()
}
