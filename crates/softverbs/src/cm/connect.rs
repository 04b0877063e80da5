//! The calls of the application that make and end connections.
//!
//! Invariants: a call that fails leaves the phase of the id unchanged. A started operation ends
//! with an event. Limits are InfiniBand's, so that an application that works here stays within
//! them.

use std::sync::Arc;

use libc::{c_int, c_void};
use rdma_core_sys::*;

use super::address;
use super::conversation::Deadline;
use super::event::{Kind, reason};
use super::guard::{lock, status};
use super::id::{Id, Shared};
use super::redial::Redial;
use super::state::{Phase, State};
use super::synchronous::{collect, complete};
use super::wire::{Message, Party, Private, Rej, Rep, Req, Transport};
use super::{dial, qp, service};
use crate::sys::{Errno, Res};

const INVALID: Errno = Errno(libc::EINVAL);

/// RDMA_MAX_RESP_RES: the device's maximum, in responder_resources and initiator_depth.
const MAXIMUM: u8 = RDMA_MAX_RESP_RES as u8;

/// The private data of the application.
///
/// # Safety
/// `data` must be NULL or have `len` bytes.
unsafe fn private<'a>(data: *const c_void, len: u8) -> &'a [u8] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller promises the bytes.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }
}

/// The private data of connection parameters.
///
/// # Safety
/// As [`private`].
unsafe fn given_data<'a>(param: Option<&rdma_conn_param>) -> &'a [u8] {
    // SAFETY: the caller promises it.
    param.map_or(&[], |param| unsafe {
        private(param.private_data, param.private_data_len)
    })
}

/// The connection parameters and retry counts of this side, checked against the device's limits.
fn party(
    state: &State,
    handle: *mut Id,
    param: Option<&rdma_conn_param>,
    otherwise: (u8, u8),
) -> Res<(Party, u8)> {
    let device = state.device.as_ref().ok_or(INVALID)?;
    let own = qp::of(handle);
    let (qp_num, srq) = match (own.is_null(), param) {
        // SAFETY: the application keeps a queue pair alive while its id has it.
        (false, _) => unsafe { ((*own).qp_num, !(*own).srq.is_null()) },
        (true, Some(param)) => (param.qp_num, param.srq != 0),
        (true, None) => return Err(INVALID),
    };
    let limited = |wanted: Option<u8>, most: u8, otherwise: u8| match wanted {
        None | Some(MAXIMUM) => Ok(otherwise.min(most)),
        Some(wanted) if wanted <= most => Ok(wanted),
        Some(_) => Err(INVALID),
    };
    let (resources, depth) = otherwise;
    let party = Party {
        qp_num: qp_num & 0x00ff_ffff,
        psn: state.psn,
        gid: device.gid,
        responder_resources: limited(
            param.map(|p| p.responder_resources),
            device.max_responder_resources,
            resources,
        )?,
        initiator_depth: limited(
            param.map(|p| p.initiator_depth),
            device.max_initiator_depth,
            depth,
        )?,
        flow_control: param.is_some_and(|p| p.flow_control != 0),
        rnr_retry_count: param.map_or(7, |p| p.rnr_retry_count.min(7)),
        srq,
    };
    Ok((party, param.map_or(7, |p| p.retry_count.min(7))))
}

fn connect(id: &Arc<Shared>, param: Option<&rdma_conn_param>) -> Res<()> {
    let mut state = lock(&id.state);
    let (Phase::RouteResolved, Some(source), Some(destination)) =
        (state.phase, state.source, state.destination)
    else {
        return Err(INVALID);
    };
    state.qp_type = qp::type_of(id.handle());
    // SAFETY: the application promises `private_data_len` bytes.
    let data = unsafe { given_data(param) };
    let (request, promised) = if state.is_datagram() {
        let qp_num = service::qp_num(id, param).unwrap_or(0);
        let request = service::request(&state, qp_num, (source, destination), data)?;
        (request, None)
    } else {
        let transport = match state.qp_type {
            IBV_QPT_RC => Transport::Rc,
            IBV_QPT_XRC_SEND => Transport::Xrc,
            _ => return Err(INVALID),
        };
        let (party, retry_count) = party(&state, id.handle(), param, (MAXIMUM, MAXIMUM))?;
        let req = Req {
            transport,
            party,
            retry_count,
            source,
            destination,
            data: Private::new(data).ok_or(INVALID)?,
        };
        (Message::Req(req), Some((party, retry_count)))
    };
    let deadline = Deadline::new()?;
    state.events.watch(deadline.fd(), id, false)?;
    state.timer = Some(deadline);
    let names = address::candidates(state.space, &destination);
    let called = match dial::call(&mut state, id, &names) {
        Ok(called) => called,
        Err(errno) => {
            state.stop_timer();
            return Err(errno);
        }
    };
    dial::proceed(&mut state, id, called, Redial::new(request, destination));
    if state.phase != Phase::Failed {
        state.phase = Phase::ReqSent;
    }
    if let Some((party, retry_count)) = promised {
        state.responder_resources = party.responder_resources;
        state.initiator_depth = party.initiator_depth;
        state.retry_count = retry_count;
    }
    Ok(())
}

fn accept(id: &Arc<Shared>, param: Option<&rdma_conn_param>) -> Res<()> {
    let mut state = lock(&id.state);
    if state.phase != Phase::ReqReceived {
        return Err(INVALID);
    }
    // SAFETY: the application promises `private_data_len` bytes.
    let data = unsafe { given_data(param) };
    if state.is_datagram() {
        let qp_num = service::qp_num(id, param).ok_or(INVALID)?;
        service::accept(&mut state, id, qp_num, data)?;
        close_when_sent(&mut state);
        return Ok(());
    }
    let asked = (state.responder_resources, state.initiator_depth);
    let (party, _) = party(&state, id.handle(), param, asked)?;
    let data = Private::new(data).ok_or(INVALID)?;
    // after all that may refuse the call: if it is refused, the end of the request stays hidden
    state.show_end_of_request(id)?;
    let mut deadline = match state.reserved.take() {
        Some(reserved) => reserved,
        None => Deadline::new()?,
    };
    deadline.restart();
    (state.responder_resources, state.initiator_depth) =
        (party.responder_resources, party.initiator_depth);
    let answered = answer(&mut state, id, &deadline, Rep { party, data });
    match answered {
        Ok(()) => {
            state.timer = Some(deadline);
            state.phase = Phase::RepSent;
        }
        // The application may repeat the call.
        Err(_) => {
            state.reserved = Some(deadline);
            (state.responder_resources, state.initiator_depth) = asked;
        }
    }
    answered
}

/// Connects the queue pair and sends the reply, last: the peer must not see one that is taken back.
/// A failure leaves the deadline unwatched.
fn answer(state: &mut State, id: &Arc<Shared>, deadline: &Deadline, reply: Rep) -> Res<()> {
    state.events.watch(deadline.fd(), id, false)?;
    let answered = qp::to_ready(state, id.handle()).and_then(|()| {
        let said = state.say(id, &Message::Rep(reply));
        if said.is_err() {
            let _ = qp::to_error(id.handle());
        }
        said
    });
    if answered.is_err() {
        state.events.unwatch(deadline.fd());
    }
    answered
}

fn reject(id: &Arc<Shared>, data: &[u8]) -> Res<()> {
    let mut state = lock(&id.state);
    if state.is_datagram() && state.phase == Phase::ReqReceived {
        let data = Private::new(data).ok_or(INVALID)?;
        service::reject(&mut state, id, data);
        close_when_sent(&mut state);
        return Ok(());
    }
    if !matches!(
        state.phase,
        Phase::ReqReceived | Phase::RepReceived | Phase::RepSent
    ) {
        return Err(INVALID);
    }
    let rej = Message::Rej(Rej {
        reason: reason::CONSUMER_DEFINED,
        data: Private::new(data).ok_or(INVALID)?,
    });
    state.show_end_of_request(id)?;
    // A peer that has closed needs no refusal.
    let _ = state.say(id, &rej);
    state.phase = Phase::Failed;
    close_when_sent(&mut state);
    Ok(())
}

/// Ends the conversation now, or after the last message has been sent.
fn close_when_sent(state: &mut State) {
    state.stop_timer();
    if state.link.as_ref().is_some_and(|link| !link.has_unsent()) {
        state.close_link();
    }
}

/// Returns whether the application gets an event of this call.
fn disconnect(id: &Arc<Shared>) -> Res<bool> {
    let mut state = lock(&id.state);
    if state.device.is_none() {
        return Err(INVALID);
    }
    match state.phase {
        Phase::RepReceived | Phase::RepSent | Phase::Established => {
            qp::to_error(id.handle())?;
            let _ = state.say(id, &Message::Dreq);
            state.phase = Phase::Disconnected;
            close_when_sent(&mut state);
            state.announce_disconnect(id, None);
            Ok(!state.connect_error)
        }
        // The peer has disconnected first, or there is no connection: only the queue pair is moved.
        Phase::ReqSent | Phase::ReqReceived | Phase::Disconnected | Phase::Failed => {
            qp::to_error(id.handle()).map(|()| false)
        }
        // A datagram service has no connection.
        Phase::Served => Ok(false),
        _ => Err(INVALID),
    }
}

/// The parameters of the application; `None` for NULL.
///
/// # Safety
/// `param` must be NULL or valid during the call.
unsafe fn given<'a>(param: *mut rdma_conn_param) -> Option<&'a rdma_conn_param> {
    // SAFETY: the caller promises it.
    unsafe { param.as_ref() }
}

pub(super) unsafe extern "C" fn rdma_connect(
    id: *mut rdma_cm_id,
    conn_param: *mut rdma_conn_param,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id and valid parameters.
        unsafe {
            connect(&Id::shared_of(id)?, given(conn_param))?;
            complete(id)
        }
    })
}

pub(super) unsafe extern "C" fn rdma_accept(
    id: *mut rdma_cm_id,
    conn_param: *mut rdma_conn_param,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id and valid parameters.
        unsafe {
            let shared = Id::shared_of(id)?;
            accept(&shared, given(conn_param))?;
            // The side of a datagram service has no further event.
            if lock(&shared.state).phase == Phase::Served {
                return Ok(());
            }
            complete(id)
        }
    })
}

pub(super) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id and `private_data_len` bytes.
        unsafe { reject(&Id::shared_of(id)?, private(private_data, private_data_len)) }
    })
}

pub(super) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        unsafe {
            if disconnect(&Id::shared_of(id)?)? {
                complete(id)
            } else {
                collect(id)
            }
        }
    })
}

pub(super) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        let mut state = lock(&shared.state);
        if !qp::of(shared.handle()).is_null() || state.phase != Phase::RepReceived {
            return Err(INVALID);
        }
        state.say(&shared, &Message::Rtu)?;
        state.phase = Phase::Established;
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        let mut state = lock(&shared.state);
        match (event, state.phase) {
            (IBV_EVENT_COMM_EST, Phase::RepSent) => {
                state.stop_timer();
                state.phase = Phase::Established;
                state.push(&shared, Kind::Established);
                Ok(())
            }
            (IBV_EVENT_COMM_EST, Phase::Established) => Err(Errno(libc::EISCONN)),
            // The device has one path: no migration event.
            _ => Err(INVALID),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::channel::Channel;
    use super::super::conversation::Link;
    use super::super::sock::Sock;
    use super::*;

    /// Of a request whose end is hidden until the application answers.
    #[test]
    fn a_refused_answer_leaves_the_end_of_its_request_hidden() {
        let channel = Channel::create().unwrap();
        // SAFETY: a live channel.
        let events = unsafe { Channel::events_of(channel) };
        let request = Shared::new(events, Phase::ReqReceived);
        let listener = Sock::new().unwrap();
        listener.bind("softverbs-test/connect-1").unwrap();
        listener.listen(1).unwrap();
        let client = Sock::new().unwrap();
        client.connect("softverbs-test/connect-1").unwrap();
        {
            let mut state = lock(&request.state);
            state.link = Some(Link::new(listener.accept().unwrap().unwrap()));
            state.is_unwatched = true;
        }
        let is_hidden = || lock(&request.state).is_unwatched;
        // without a device there are no parameters
        assert_eq!(accept(&request, None), Err(INVALID));
        assert!(is_hidden());
        // longer than the private data of a REJ
        assert_eq!(reject(&request, &[0; 255]), Err(INVALID));
        assert!(is_hidden());
        assert_eq!(reject(&request, b"no"), Ok(()));
        assert!(!is_hidden());
        drop(request);
        // SAFETY: made above, and not used any more.
        unsafe { Channel::destroy(channel) };
    }
}
