//! Effects of the peer: incoming connections, messages, closed sockets, timeouts.
//!
//! Invariants: no call blocks. For every input of a peer an id takes one step of the state diagram
//! in `docs/softverbs-cm.md` or its conversation ends; of a message only the ranges of its fields
//! are relied on. After the end of its conversation an id receives nothing.

use std::sync::{Arc, Weak};

use rdma_core_sys::*;

use super::channel::Spare;
use super::conversation::{Deadline, Heard, Link};
use super::device::Device;
use super::dial;
use super::event::{Kind, Raw, reason};
use super::guard::lock;
use super::id::{Id, Shared};
use super::service;
use super::state::{Child, Phase, State};
use super::wire::{Message, Private, REJ_DATA, Rej, Req, SidrRep, SidrReq, Transport, sidr};
use crate::process::Process;
use crate::segment::layout::{split_qp_num, xrc::split_target};
use crate::sys::{Errno, Res};

/// Maximum number of connections without a request; a further one ends the oldest.
const SILENT: usize = 64;
/// Maximum number of connections accepted at a time, so that other ids are processed too.
const ACCEPTED_AT_ONCE: usize = 64;

/// Processes the ready descriptors of an id.
///
/// # Errors
/// Those of accepting connections, such as `EMFILE`; the connections stay in the socket's queue.
pub(super) fn act(id: &Arc<Shared>) -> Res<()> {
    let mut state = lock(&id.state);
    match state.phase {
        Phase::Dead => Ok(()),
        Phase::Listening => {
            let accepted = accept(&mut state);
            let crowd = silent_crowd(&state);
            drop(state);
            for child in crowd {
                // Its request may wait in the socket.
                act(&child)?;
                drop_silent(id, &child);
            }
            accepted
        }
        Phase::Accepted => {
            let stays = hear_request(&mut state, id);
            if !stays {
                let listener = state.listener.upgrade();
                drop(state);
                Id::abandon(id);
                if let Some(listener) = listener {
                    lock(&listener.state)
                        .children
                        .retain(|child| child.id.serial != id.serial);
                }
            }
            Ok(())
        }
        _ => {
            converse(&mut state, id);
            Ok(())
        }
    }
}

/// Accepts connections while fewer requests than the backlog wait for the application. Further
/// connections wait in the socket's queue, which has the same limit; a peer that finds it full
/// repeats its request. A connection whose request could not be delivered or accepted later, for
/// lack of the device or of descriptors for its deadline and its channel, stays in the queue too;
/// one that cannot be watched is closed.
fn accept(state: &mut State) -> Res<()> {
    let asked = state.children.iter().filter(|child| child.asked).count();
    let mut room = state.backlog.saturating_sub(asked).min(ACCEPTED_AT_ONCE);
    let (events, listener) = (Arc::clone(&state.events), state.listener.clone());
    for name in &state.names {
        while room > 0 && name.has_connection()? {
            let reserved = match state.qp_type {
                IBV_QPT_UD => None,
                _ => Some(Deadline::new()?),
            };
            let device = Device::acquire()?;
            let spare = match state.own_channel {
                Some(_) => Some(Spare::create()?),
                None => None,
            };
            let Some(sock) = name.accept()? else { break };
            room -= 1;
            if !sock.is_of_own_user()? {
                continue;
            }
            let child = Shared::new(Arc::clone(&events), Phase::Accepted);
            events.enroll(&child);
            if let Err(error) = events.watch(sock.fd(), &child, false) {
                events.expel(&child);
                return Err(error);
            }
            {
                // This is the reverse of the lock order, and safe: the child has no listener yet,
                // so a thread with the child's lock does not wait for the listener's.
                let mut inner = lock(&child.state);
                inner.options = state.options;
                (inner.space, inner.qp_type) = (state.space, state.qp_type);
                inner.listener = listener.clone();
                inner.link = Some(Link::new(sock));
                inner.reserved = reserved;
                inner.device = Some(device);
            }
            state.children.push(Child {
                id: child,
                asked: false,
                spare,
            });
        }
    }
    Ok(())
}

/// The oldest connections without a request beyond [`SILENT`].
fn silent_crowd(state: &State) -> Vec<Arc<Shared>> {
    let silent = || state.children.iter().filter(|child| !child.asked);
    let surplus = silent().count().saturating_sub(SILENT);
    let oldest = silent().take(surplus);
    oldest.map(|child| Arc::clone(&child.id)).collect()
}

/// Ends a connection to `listener`, unless its request has been received.
fn drop_silent(listener: &Shared, child: &Arc<Shared>) {
    let mut state = lock(&listener.state);
    let before = state.children.len();
    state
        .children
        .retain(|other| other.asked || other.id.serial != child.serial);
    let dropped = state.children.len() < before;
    drop(state);
    if dropped {
        Id::abandon(child);
    }
}

/// Receives the first message of a new connection. Returns false if none will come.
fn hear_request(state: &mut State, id: &Arc<Shared>) -> bool {
    let Some(link) = &state.link else {
        // The connection is being set up.
        return true;
    };
    match link.hear() {
        Heard::Nothing => true,
        Heard::Message(Message::Req(req)) if state.qp_type == listener_type(req.transport) => {
            request(state, id, &req)
        }
        Heard::Message(Message::SidrReq(req)) if state.is_datagram() => {
            service_request(state, id, &req)
        }
        Heard::Message(_) | Heard::Malformed | Heard::End => false,
    }
}

/// The type of the queue pair of a listener for requests of this transport service.
fn listener_type(transport: Transport) -> ibv_qp_type {
    match transport {
        Transport::Rc => IBV_QPT_RC,
        Transport::Xrc => IBV_QPT_XRC_RECV,
    }
}

/// Queues a request for the listener's application. Returns false if the listener is gone.
fn announce(listener: &Weak<Shared>, id: &Arc<Shared>, kind: Kind) -> bool {
    let Some(listener) = listener.upgrade() else {
        return false;
    };
    let mut above = lock(&listener.state);
    let known = above
        .children
        .iter_mut()
        .find(|child| child.id.serial == id.serial);
    let Some(child) = known else {
        return false;
    };
    child.asked = true;
    above.events.push(Raw {
        subject: Arc::clone(&listener),
        kind,
    });
    true
}

/// Delivers a request to the listener's application.
fn request(state: &mut State, id: &Arc<Shared>, req: &Req) -> bool {
    state.phase = Phase::ReqReceived;
    state.source = Some(req.destination);
    state.destination = Some(req.source);
    state.responder_resources = req.party.initiator_depth;
    state.initiator_depth = req.party.responder_resources;
    state.retry_count = req.retry_count;
    state.rnr_retry_count = req.party.rnr_retry_count;
    state.peer = Some(req.party);
    state.peer_gid = Some(req.party.gid);
    let kind = Kind::Request {
        child: Arc::clone(id),
        party: req.party,
        retry_count: req.retry_count,
        data: req.data,
    };
    announce(&state.listener, id, kind)
}

/// As [`request`], of a datagram service.
fn service_request(state: &mut State, id: &Arc<Shared>, req: &SidrReq) -> bool {
    state.phase = Phase::ReqReceived;
    state.source = Some(req.destination);
    state.destination = Some(req.source);
    state.peer_gid = Some(req.gid);
    state.client_qp = req.qp_num;
    let kind = Kind::ServiceRequest {
        child: Arc::clone(id),
        data: req.data,
    };
    announce(&state.listener, id, kind)
}

fn in_conversation(phase: Phase) -> bool {
    matches!(
        phase,
        Phase::ReqSent
            | Phase::RepReceived
            | Phase::ReqReceived
            | Phase::RepSent
            | Phase::Established
    )
}

/// Maximum number of messages of one link that one call processes.
const MOST_MESSAGES: usize = 16;

/// Sends waiting messages, receives messages, and detects timeouts.
fn converse(state: &mut State, id: &Arc<Shared>) {
    dial::repeat(state, id);
    if let Some(link) = &mut state.link {
        let waited = link.has_unsent();
        link.flush();
        if waited && !link.has_unsent() {
            state.events.rewatch(link.fd(), id, false);
        }
    }
    // A peer that sends without end does not keep the caller; the link stays readable.
    for _ in 0..MOST_MESSAGES {
        let Some(link) = &state.link else {
            break;
        };
        let heard = link.hear();
        let talking = in_conversation(state.phase);
        match heard {
            Heard::Nothing => break,
            Heard::Message(message) if talking => {
                if !understand(state, id, message) {
                    end(state, id, Some(Errno(libc::EPROTO)));
                }
            }
            // Only the last messages of this side are still to be sent.
            Heard::Message(_) => {}
            Heard::Malformed => end(state, id, Some(Errno(libc::EPROTO))),
            Heard::End => {
                let peer = state.peer;
                end(state, id, None);
                if let Some(party) = peer {
                    process_may_have_ended(party.qp_num);
                }
            }
        }
    }
    if !in_conversation(state.phase) && state.link.as_ref().is_some_and(|l| !l.has_unsent()) {
        state.close_link();
    }
    if state.timer.as_ref().is_some_and(Deadline::has_passed) {
        state.phase = Phase::Failed;
        state.redial = None;
        state.close_link();
        state.push(id, Kind::Unreachable(Errno(libc::ETIMEDOUT)));
    }
}

/// Executes one step of the state machine. Returns false if the message is not valid in this phase.
fn understand(state: &mut State, id: &Arc<Shared>, message: Message) -> bool {
    if state.is_datagram() {
        return match (state.phase, message) {
            (Phase::ReqSent, Message::SidrRep(answer)) => {
                service::answered(state, id, answer);
                true
            }
            _ => false,
        };
    }
    match (state.phase, message) {
        (Phase::ReqSent, Message::Rep(rep)) => {
            state.stop_timer();
            state.phase = Phase::RepReceived;
            state.responder_resources = rep.party.initiator_depth;
            state.initiator_depth = rep.party.responder_resources;
            state.rnr_retry_count = rep.party.rnr_retry_count;
            state.peer = Some(rep.party);
            state.peer_gid = Some(rep.party.gid);
            state.push(
                id,
                Kind::Response {
                    party: rep.party,
                    data: rep.data,
                },
            );
        }
        (Phase::RepSent, Message::Rtu) => {
            state.stop_timer();
            state.phase = Phase::Established;
            state.push(id, Kind::Established);
        }
        // `rdma_notify` has reported the establishment before the message.
        (Phase::Established, Message::Rtu) => {}
        (Phase::RepReceived | Phase::RepSent | Phase::Established, Message::Dreq) => {
            disconnected(state, id, None);
        }
        (Phase::Established, Message::Rej(_)) => disconnected(state, id, None),
        (_, Message::Rej(Rej { reason, data })) => rejected(state, id, reason, data),
        _ => return false,
    }
    true
}

fn rejected(state: &mut State, id: &Arc<Shared>, reason: u16, data: Private<REJ_DATA>) {
    state.phase = Phase::Failed;
    state.close_link();
    state.push(id, Kind::Rejected { reason, data });
}

/// Ends an established connection.
fn disconnected(state: &mut State, id: &Arc<Shared>, why: Option<Errno>) {
    state.phase = Phase::Disconnected;
    state.close_link();
    state.announce_disconnect(id, why);
}

/// The peer of a conversation, which had the queue pair `qp_num`, has closed its socket: it has
/// destroyed its id, or its process has ended. The socket is closed, so that there is a descriptor.
fn process_may_have_ended(qp_num: u32) {
    if split_target(qp_num).is_none()
        && let Some(process) = Process::current()
    {
        process.conversation_ended(split_qp_num(qp_num).0);
    }
}

/// Ends the conversation: the peer has closed or its process has ended, or this side refuses it
/// with `why`. The end of the socket takes the place of the message that a dead peer's kernel would
/// send.
fn end(state: &mut State, id: &Arc<Shared>, why: Option<Errno>) {
    let failed = |state: &mut State, kind| {
        state.phase = Phase::Failed;
        state.close_link();
        state.push(id, kind);
    };
    match (state.phase, why) {
        (Phase::ReqSent, None) if state.is_datagram() => {
            service::answered(state, id, SidrRep::refusal(sidr::REJECT));
        }
        (Phase::ReqReceived, _) if state.is_datagram() => state.end_request(id),
        (Phase::ReqSent | Phase::RepReceived, Some(why)) => {
            failed(state, Kind::Unreachable(why));
        }
        (Phase::ReqReceived | Phase::RepSent, Some(why)) => {
            failed(state, Kind::ConnectError(why));
        }
        (Phase::ReqReceived, None) => state.end_request(id),
        (Phase::ReqSent | Phase::RepReceived | Phase::RepSent, None) => {
            rejected(state, id, reason::CONSUMER_DEFINED, Private::EMPTY);
        }
        (Phase::Established, why) => disconnected(state, id, why),
        _ => state.close_link(),
    }
}
