//! Delivers events: their effects on their ids, and the objects that the application gets.
//!
//! Invariants: the effects of an event on its id (fields, state of the queue pair) happen when it
//! is delivered, in the thread that takes it, so an id changes only during calls of the
//! application. A reported event holds its subject until it is acknowledged.

use std::sync::Arc;

use libc::c_int;
use rdma_core_sys::*;

use super::channel::{Channel, Events};
use super::event::{Kind, Raw};
use super::guard::{lock, status};
use super::id::{self, Id, Shared};
use super::qp;
use super::state::{Phase, State};
use super::wire::{Message, Party, sidr};
use crate::sys::{Errno, Res};

/// The object that the application holds.
#[repr(C)]
pub(super) struct Event {
    c: rdma_cm_event,
    private: [u8; 256],
    subject: Arc<Shared>,
    /// Of [`Shared::report`].
    number: u64,
}

impl Event {
    fn new(subject: Arc<Shared>, event: rdma_cm_event_type, status: c_int) -> Box<Self> {
        let mut out = Box::new(Self {
            c: rdma_cm_event::default(),
            private: [0; 256],
            subject,
            number: 0,
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

    /// Sets the parameters of an event of a datagram service.
    fn set_service(&mut self, param: rdma_ud_param, data: &[u8]) {
        for (to, from) in self.private.iter_mut().zip(data) {
            *to = *from;
        }
        let at = self.private.as_ptr();
        // SAFETY: a member of the union, of which all bits are initialized.
        let ud = unsafe { self.c.param.ud.as_mut() };
        *ud = param;
        ud.private_data = at.cast();
        ud.private_data_len = data.len() as u8;
    }

    pub(super) fn into_c(self: Box<Self>) -> *mut rdma_cm_event {
        Box::into_raw(self).cast()
    }
}

/// Turns an event of `channel`, which has this number, into the object for the application; `None`
/// if the application must not see it.
pub(super) fn deliver(raw: Raw, number: u64, channel: &Arc<Events>) -> Option<Box<Event>> {
    let Raw { subject, kind } = raw;
    let plain = |event, status| Some(Event::new(Arc::clone(&subject), event, status));
    let mut delivered = match kind {
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
        } => {
            deliver_request(&subject, &child, channel);
            let mut event = Event::new(Arc::clone(&subject), RDMA_CM_EVENT_CONNECT_REQUEST, 0);
            event.c.id = child.handle().cast();
            event.c.listen_id = subject.handle().cast();
            event.set_party(&party);
            event.conn().retry_count = retry_count;
            event.set_data(data.padded());
            Some(event)
        }
        Kind::Response { party, data } => {
            let (event, status) = deliver_response(&subject);
            let mut event = Event::new(Arc::clone(&subject), event, status);
            event.set_party(&party);
            event.set_data(data.padded());
            Some(event)
        }
        Kind::ServiceRequest { child, data } => {
            deliver_request(&subject, &child, channel);
            let mut event = Event::new(Arc::clone(&subject), RDMA_CM_EVENT_CONNECT_REQUEST, 0);
            event.c.id = child.handle().cast();
            event.c.listen_id = subject.handle().cast();
            event.set_service(rdma_ud_param::default(), data.padded());
            Some(event)
        }
        Kind::Service(answer) => {
            let (event, status) = match answer.status {
                sidr::SUCCESS => (RDMA_CM_EVENT_ESTABLISHED, 0),
                status => (RDMA_CM_EVENT_UNREACHABLE, c_int::from(status)),
            };
            let mut event = Event::new(Arc::clone(&subject), event, status);
            let state = lock(&subject.state);
            let param = answer.param(state.options.type_of_service);
            event.set_service(param, answer.data.padded());
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
        // The kernel raises no TIMEWAIT_EXIT either: librdmacm has rejected the reply
        // (`cm_send_rej_locked`).
        Kind::Disconnected(_) | Kind::TimewaitExit if lock(&subject.state).connect_error => None,
        Kind::Disconnected(status) => plain(RDMA_CM_EVENT_DISCONNECTED, status),
        Kind::TimewaitExit => plain(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0),
    };
    match &mut delivered {
        Some(event) => event.number = number,
        None => subject.acknowledge(number),
    }
    delivered
}

/// Prepares the new id for the application. It has its device and its channel since its connection
/// was accepted. If the kernel cannot watch its socket in that channel, the application gets the id
/// of a request whose peer has given up.
fn deliver_request(listener: &Shared, child: &Arc<Shared>, channel: &Arc<Events>) {
    let spare = {
        let mut above = lock(&listener.state);
        let at = above
            .children
            .iter()
            .position(|other| other.id.serial == child.serial);
        at.and_then(|at| above.children.remove(at).spare)
    };
    match spare {
        // As `ucma_process_conn_req` of librdmacm: calls on the new id wait for their events too.
        // The listener's channel ends with the listener.
        Some(spare) => {
            let own = spare.take();
            // SAFETY: a live channel.
            let events = unsafe { Channel::events_of(own) };
            let mut state = lock(&child.state);
            id::move_request(&mut state, child, &events);
            state.own_channel = Some(own);
            // SAFETY: the id lives, and the application does not have it yet.
            unsafe { (*child.handle()).c.channel = own };
        }
        // The listener, and the child with it, may have moved to another channel after the event
        // was taken from the queue.
        None => {
            id::move_request(&mut lock(&child.state), child, channel);
        }
    }
    let mut state = lock(&child.state);
    state.hide_end_of_request();
    state.show_device(child);
    state.show_addresses(child);
    state.show_route(child);
    // with the lock of the state: the application, which may get another event of the id at once,
    // does not destroy the id before the end of this call
    child.give();
    state.events.given();
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
    state.say(subject, &Message::Rtu)?;
    state.phase = Phase::Established;
    Ok(())
}

pub(super) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    status(|| {
        if event.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: every event of this connection manager is an `Event`; the caller does not use it
        // again.
        let event = unsafe { Box::from_raw(event.cast::<Event>()) };
        event.subject.acknowledge(event.number);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::wire::Private;
    use super::*;

    fn is_readable(channel: *mut rdma_event_channel) -> bool {
        let mut entry = libc::pollfd {
            // SAFETY: the caller passes a live channel.
            fd: unsafe { (*channel).fd },
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry is passed.
        unsafe { libc::poll(&raw mut entry, 1, 0) > 0 }
    }

    /// Another thread looks for an event of a new id while its request is delivered.
    #[test]
    fn an_event_of_a_request_stays_until_the_request_is_delivered() {
        let channel = Channel::create().unwrap();
        // SAFETY: a live channel.
        let events = unsafe { Channel::events_of(channel) };
        let listener = Shared::new(Arc::clone(&events), Phase::Listening);
        let listener_id = Id::make(&listener, rdma_cm_id::default());
        let child = Shared::new(Arc::clone(&events), Phase::ReqReceived);
        let push = |subject: &Arc<Shared>, kind| {
            let subject = Arc::clone(subject);
            events.push(Raw { subject, kind });
        };
        let data = Private::EMPTY;
        let request = Kind::ServiceRequest {
            child: Arc::clone(&child),
            data,
        };
        push(&listener, request);
        push(&child, Kind::TimewaitExit);
        let (request, number) = events.pop().unwrap();
        assert!(!child.handle().is_null());
        assert!(!events.has_event() && events.pop().is_none());
        // a thread that waits sleeps meanwhile
        assert!(!is_readable(channel));
        let delivered = deliver(request, number, &events).unwrap();
        assert!(is_readable(channel));
        assert_eq!(delivered.c.id, child.handle().cast());
        let (next, _) = events.pop().unwrap();
        assert_eq!(next.subject.serial, child.serial);
        assert!(!is_readable(channel));
        drop((delivered, next));
        // SAFETY: made above, and not used any more.
        unsafe {
            Id::free(child.handle());
            Id::free(listener_id);
            Channel::destroy(channel);
        }
    }
}
