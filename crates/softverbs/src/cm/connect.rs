//! The calls of the application that make and end connections.
//!
//! Invariants: a call that fails leaves the phase of the id unchanged. A started operation ends
//! with an event. Limits are InfiniBand's, so that an application that works here stays within
//! them.

use std::sync::Arc;

use libc::{c_int, c_void};
use rdma_core_sys::*;

use super::address;
use super::channel::lock;
use super::conversation::{Deadline, Link, say};
use super::event::{Kind, reason};
use super::id::{Id, Shared, complete};
use super::sock::Sock;
use super::state::{Phase, State};
use super::wire::{Message, Party, Private, Rej, Rep, Req};
use super::{progress, qp};
use crate::sys::{self, Errno, Res};

const INVALID: Errno = Errno(libc::EINVAL);

/// RDMA_MAX_RESP_RES: the device's maximum, in responder_resources and initiator_depth.
const MAXIMUM: u8 = RDMA_MAX_RESP_RES as u8;

/// The private data of the application.
///
/// # Safety
/// `data` must be NULL or have `len` bytes.
unsafe fn private<const N: usize>(data: *const c_void, len: u8) -> Res<Private<N>> {
    if data.is_null() || len == 0 {
        return Ok(Private::EMPTY);
    }
    // SAFETY: the caller promises the bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) };
    Private::new(bytes).ok_or(INVALID)
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

/// Result of connecting to a listener.
enum Called {
    Answered(Sock),
    /// No process listens there.
    Nobody,
    /// The listener's queue is full.
    Busy,
}

/// Connects to the listener on one of `names`. The socket has the name of the local address, if the
/// id alone owns that.
fn call(state: &mut State, names: &[String]) -> Res<Called> {
    let sock = if state.names.is_empty() {
        Sock::new()?
    } else {
        state.names.remove(0)
    };
    for name in names {
        match sock.connect(name) {
            // A process of another user has taken the name: it counts as no listener.
            Ok(()) if sock.peer_uid()? != sys::effective_uid() => return Ok(Called::Nobody),
            Ok(()) => return Ok(Called::Answered(sock)),
            Err(Errno(libc::ECONNREFUSED)) => {}
            Err(Errno(libc::EAGAIN)) => {
                state.names.insert(0, sock);
                return Ok(Called::Busy);
            }
            Err(errno) => {
                state.names.insert(0, sock);
                return Err(errno);
            }
        }
    }
    state.names.insert(0, sock);
    Ok(Called::Nobody)
}

fn connect(id: &Arc<Shared>, param: Option<&rdma_conn_param>) -> Res<()> {
    let mut state = lock(&id.state);
    let (Phase::RouteResolved, Some(source), Some(destination)) =
        (state.phase, state.source, state.destination)
    else {
        return Err(INVALID);
    };
    let (party, retry_count) = party(&state, id.handle(), param, (MAXIMUM, MAXIMUM))?;
    let data = match param {
        // SAFETY: the application promises `private_data_len` bytes.
        Some(param) => unsafe { private(param.private_data, param.private_data_len)? },
        None => Private::EMPTY,
    };
    let req = Req {
        party,
        retry_count,
        source,
        destination,
        data,
    };
    let deadline = Deadline::new()?;
    let called = call(&mut state, &address::candidates(&destination))?;
    state.events.watch(deadline.fd(), id, false)?;
    state.timer = Some(deadline);
    if let Err(errno) = go_on(&mut state, id, called, Redial::new(req)) {
        state.stop_timer();
        return Err(errno);
    }
    if state.phase != Phase::Failed {
        state.phase = Phase::ReqSent;
    }
    state.responder_resources = party.responder_resources;
    state.initiator_depth = party.initiator_depth;
    state.retry_count = retry_count;
    Ok(())
}

/// A connection request that the listener's queue had no room for. The active side repeats it until
/// the deadline of the attempt, as a real device does.
#[derive(Debug)]
pub(super) struct Redial {
    req: Req,
    /// Nanoseconds until the next attempt.
    pause: u64,
    /// Time of the next attempt in nanoseconds of the monotonic clock.
    at: u64,
}

impl Redial {
    const FIRST_PAUSE: u64 = 1_000_000;
    const LONGEST_PAUSE: u64 = 250_000_000;

    fn new(req: Req) -> Self {
        Self {
            req,
            pause: Self::FIRST_PAUSE,
            at: 0,
        }
    }
}

/// Continues after an attempt: sends the request, schedules the next attempt, or refuses.
fn go_on(state: &mut State, id: &Arc<Shared>, called: Called, mut redial: Redial) -> Res<()> {
    match called {
        Called::Answered(sock) => {
            state.events.watch(sock.fd(), id, false)?;
            state.link = Some(Link::new(sock));
            // A listener that closes at this moment is processed later as a refusal.
            let _ = say(state, id, &Message::Req(redial.req));
            if let Some(timer) = &state.timer {
                timer.look_in(0);
            }
        }
        Called::Busy => {
            redial.at = sys::now_ns().saturating_add(redial.pause);
            if let Some(timer) = &state.timer {
                timer.look_in(redial.pause);
            }
            redial.pause = (redial.pause * 2).min(Redial::LONGEST_PAUSE);
            state.redial = Some(redial);
        }
        Called::Nobody => {
            state.stop_timer();
            state.phase = Phase::Failed;
            state.push(
                id,
                Kind::Rejected {
                    reason: reason::INVALID_SERVICE_ID,
                    data: Private::EMPTY,
                },
            );
        }
    }
    Ok(())
}

/// Repeats a request that is due.
pub(super) fn repeat(state: &mut State, id: &Arc<Shared>) {
    let due = |redial: &mut Redial| sys::now_ns() >= redial.at;
    let Some(redial) = state.redial.take_if(due) else {
        return;
    };
    // An attempt that fails for lack of memory or descriptors is repeated, as for a full queue.
    let called = call(state, &address::candidates(&redial.req.destination));
    if go_on(state, id, called.unwrap_or(Called::Busy), redial).is_err() {
        // The end of an unwatched socket would not be noticed; the deadline ends the attempt.
        state.link = None;
    }
}

fn accept(id: &Arc<Shared>, param: Option<&rdma_conn_param>) -> Res<()> {
    let mut state = lock(&id.state);
    if state.phase != Phase::ReqReceived {
        return Err(INVALID);
    }
    let asked = (state.responder_resources, state.initiator_depth);
    let (party, _) = party(&state, id.handle(), param, asked)?;
    let data = match param {
        // SAFETY: the application promises `private_data_len` bytes.
        Some(param) => unsafe { private(param.private_data, param.private_data_len)? },
        None => Private::EMPTY,
    };
    let deadline = Deadline::new()?;
    state.responder_resources = party.responder_resources;
    state.initiator_depth = party.initiator_depth;
    qp::to_ready(&state, id.handle())?;
    let said = say(&mut state, id, &Message::Rep(Rep { party, data }));
    if let Err(errno) = said.and_then(|()| state.events.watch(deadline.fd(), id, false)) {
        let _ = qp::to_error(id.handle());
        return Err(errno);
    }
    state.timer = Some(deadline);
    state.phase = Phase::RepSent;
    Ok(())
}

fn reject(id: &Arc<Shared>, data: Private<{ super::wire::REJ_DATA }>) -> Res<()> {
    let mut state = lock(&id.state);
    if !matches!(
        state.phase,
        Phase::ReqReceived | Phase::RepReceived | Phase::RepSent
    ) {
        return Err(INVALID);
    }
    let rej = Message::Rej(Rej {
        reason: reason::CONSUMER_DEFINED,
        data,
    });
    // A peer that has closed needs no refusal.
    let _ = say(&mut state, id, &rej);
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

fn disconnect(id: &Arc<Shared>) -> Res<()> {
    let mut state = lock(&id.state);
    if state.device.is_none() {
        return Err(INVALID);
    }
    match state.phase {
        Phase::RepReceived | Phase::RepSent | Phase::Established => {
            qp::to_error(id.handle())?;
            let _ = say(&mut state, id, &Message::Dreq);
            state.phase = Phase::Disconnected;
            close_when_sent(&mut state);
            progress::announce_disconnect(&state, id, None);
            Ok(())
        }
        // The peer has disconnected first, or there is no connection: only the queue pair is moved.
        Phase::ReqSent | Phase::ReqReceived | Phase::Disconnected | Phase::Failed => {
            qp::to_error(id.handle())
        }
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
    super::status(|| {
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
    super::status(|| {
        // SAFETY: the caller promises a live id and valid parameters.
        unsafe {
            accept(&Id::shared_of(id)?, given(conn_param))?;
            complete(id)
        }
    })
}

pub(super) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    super::status(|| {
        // SAFETY: the caller promises a live id and `private_data_len` bytes.
        unsafe {
            reject(
                &Id::shared_of(id)?,
                private(private_data, private_data_len)?,
            )
        }
    })
}

pub(super) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    super::status(|| {
        // SAFETY: the caller promises a live id.
        unsafe {
            disconnect(&Id::shared_of(id)?)?;
            complete(id)
        }
    })
}

pub(super) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    super::status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        let mut state = lock(&shared.state);
        if !qp::of(shared.handle()).is_null() || state.phase != Phase::RepReceived {
            return Err(INVALID);
        }
        say(&mut state, &shared, &Message::Rtu)?;
        state.phase = Phase::Established;
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    super::status(|| {
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
