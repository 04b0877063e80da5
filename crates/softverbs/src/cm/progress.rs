//! What happens because of the peer: connections that come in, messages, ends, silence.
//!
//! Invariants: nothing here waits. Whatever a peer sends, an id takes one step of the picture in
//! `docs/softverbs-cm.md` or its conversation ends; no message is trusted for more than its
//! fields' ranges. An id whose conversation has ended hears nothing more.

use std::sync::Arc;

use super::channel::lock;
use super::connect;
use super::event::{Kind, Raw, reason};
use super::id::{Id, Shared};
use super::link::{Heard, Link};
use super::state::{Phase, State};
use super::wire::{Message, Private, Rej, Req};
use crate::sys::{self, Errno, Res};

/// Connections that may have asked for nothing yet. Past this the oldest makes room.
const SILENT: usize = 64;
/// Connections taken in at a time, so that other ids have their turn.
const ACCEPTED_AT_ONCE: usize = 64;

/// Processes the events of an id's descriptors.
///
/// # Errors
/// Why connections can't be taken in, such as `EMFILE`: they wait.
pub(super) fn act(id: &Arc<Shared>) -> Res<()> {
    let mut state = lock(&id.state);
    match state.phase {
        Phase::Dead => Ok(()),
        Phase::Listening => {
            let accepted = accept(&mut state);
            let crowd = silent_crowd(&mut state);
            drop(state);
            crowd.iter().for_each(Id::abandon);
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
                        .retain(|(child, _)| child.serial != id.serial);
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

/// Takes connections in, while requests that wait for the application are fewer than the backlog.
/// Past that they wait in the socket, which has the same limit; those who find no room try again.
fn accept(state: &mut State) -> Res<()> {
    let asked = state.children.iter().filter(|(_, asked)| *asked).count();
    let mut room = state.backlog.saturating_sub(asked).min(ACCEPTED_AT_ONCE);
    let (events, listener) = (Arc::clone(&state.events), state.listener.clone());
    for name in &state.names {
        while room > 0 {
            let Some(sock) = name.accept()? else { break };
            room -= 1;
            if sock.peer_uid()? != sys::effective_uid() {
                continue;
            }
            let child = Shared::new(Arc::clone(&events), Phase::Accepted);
            events.enroll(&child);
            events.watch(sock.fd(), &child, false)?;
            {
                // Nobody else can have this lock long: the child knows no listener yet, so that
                // the order of locks does no harm.
                let mut inner = lock(&child.state);
                inner.options = state.options;
                inner.listener = listener.clone();
                inner.link = Some(Link::new(sock));
            }
            state.children.push((child, false));
        }
    }
    Ok(())
}

/// The oldest connections without a request, if there are more than 64.
fn silent_crowd(state: &mut State) -> Vec<Arc<Shared>> {
    let silent = state.children.iter().filter(|(_, asked)| !asked).count();
    let mut surplus = silent.saturating_sub(SILENT);
    let mut gone = Vec::new();
    state.children.retain(|(child, asked)| {
        if *asked || surplus == 0 {
            return true;
        }
        surplus -= 1;
        gone.push(Arc::clone(child));
        false
    });
    gone
}

/// Receives the first message of a new connection. Returns false if none will come.
fn hear_request(state: &mut State, id: &Arc<Shared>) -> bool {
    let Some(link) = &state.link else {
        // It is being made.
        return true;
    };
    match link.hear() {
        Heard::Nothing => true,
        Heard::Message(Message::Req(req)) => request(state, id, &req),
        Heard::Message(_) | Heard::Malformed | Heard::End => false,
    }
}

/// Delivers a request to the listener's application.
fn request(state: &mut State, id: &Arc<Shared>, req: &Req) -> bool {
    let Some(listener) = state.listener.upgrade() else {
        return false;
    };
    let mut above = lock(&listener.state);
    let known = above
        .children
        .iter_mut()
        .find(|(child, _)| child.serial == id.serial);
    let Some((_, asked)) = known else {
        return false;
    };
    *asked = true;
    state.phase = Phase::ReqReceived;
    state.source = Some(req.destination);
    state.destination = Some(req.source);
    state.responder_resources = req.party.initiator_depth;
    state.initiator_depth = req.party.responder_resources;
    state.retry_count = req.retry_count;
    state.rnr_retry_count = req.party.rnr_retry_count;
    state.peer = Some(req.party);
    above.events.push(Raw {
        subject: Arc::clone(&listener),
        kind: Kind::Request {
            child: Arc::clone(id),
            party: req.party,
            retry_count: req.retry_count,
            data: req.data,
        },
    });
    true
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

/// Sends waiting messages, receives messages, and detects timeouts.
fn converse(state: &mut State, id: &Arc<Shared>) {
    connect::repeat(state, id);
    if let Some(link) = &mut state.link {
        let waited = link.has_unsent();
        link.flush();
        if waited && !link.has_unsent() {
            state.events.rewatch(link.fd(), id, false);
        }
    }
    while let Some(link) = &state.link {
        let heard = link.hear();
        let talking = in_conversation(state.phase);
        match heard {
            Heard::Nothing => break,
            Heard::Message(message) if talking => {
                if !understand(state, id, message) {
                    end(state, id, Some(Errno(libc::EPROTO)));
                }
            }
            // Only last words of this side are still to be sent.
            Heard::Message(_) => {}
            Heard::Malformed => end(state, id, Some(Errno(libc::EPROTO))),
            Heard::End => end(state, id, None),
        }
    }
    if !in_conversation(state.phase) && state.link.as_ref().is_some_and(|l| !l.has_unsent()) {
        state.close_link();
    }
    if state
        .timer
        .as_ref()
        .is_some_and(super::link::Deadline::has_passed)
    {
        state.phase = Phase::Failed;
        state.redial = None;
        state.close_link();
        state.push(id, Kind::Unreachable(Errno(libc::ETIMEDOUT)));
    }
}

/// Executes one step of the state machine. Returns false if the message is not valid in this phase.
fn understand(state: &mut State, id: &Arc<Shared>, message: Message) -> bool {
    match (state.phase, message) {
        (Phase::ReqSent, Message::Rep(rep)) => {
            state.stop_timer();
            state.phase = Phase::RepReceived;
            state.responder_resources = rep.party.initiator_depth;
            state.initiator_depth = rep.party.responder_resources;
            state.rnr_retry_count = rep.party.rnr_retry_count;
            state.peer = Some(rep.party);
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
        // The application had heard of it from the queue pair, and had said so.
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

fn rejected(
    state: &mut State,
    id: &Arc<Shared>,
    reason: u16,
    data: Private<{ super::wire::REJ_DATA }>,
) {
    state.phase = Phase::Failed;
    state.close_link();
    state.push(id, Kind::Rejected { reason, data });
}

/// Ends an established connection.
pub(super) fn disconnected(state: &mut State, id: &Arc<Shared>, why: Option<Errno>) {
    state.phase = Phase::Disconnected;
    state.close_link();
    announce_disconnect(state, id, why);
}

/// Tells the application that the connection is no more. No packet lingers in this device, so that
/// the time in which a real one keeps the queue pair's number back is over at once.
pub(super) fn announce_disconnect(state: &State, id: &Arc<Shared>, why: Option<Errno>) {
    state.push(id, Kind::Disconnected(why.map_or(0, |Errno(errno)| -errno)));
    state.push(id, Kind::TimewaitExit);
}

/// The peer has closed or died, or `why` it isn't listened to any more. What a dead peer's
/// kernel would say on a real network, its socket's end says here.
fn end(state: &mut State, id: &Arc<Shared>, why: Option<Errno>) {
    let failed = |state: &mut State, kind| {
        state.phase = Phase::Failed;
        state.close_link();
        state.push(id, kind);
    };
    match (state.phase, why) {
        (Phase::ReqSent | Phase::RepReceived, Some(why)) => {
            failed(state, Kind::Unreachable(why));
        }
        (Phase::ReqReceived | Phase::RepSent, Some(why)) => {
            failed(state, Kind::ConnectError(why));
        }
        (Phase::ReqReceived, None) => rejected(state, id, reason::TIMEOUT, Private::EMPTY),
        (Phase::ReqSent | Phase::RepReceived | Phase::RepSent, None) => {
            rejected(state, id, reason::CONSUMER_DEFINED, Private::EMPTY);
        }
        (Phase::Established, why) => disconnected(state, id, why),
        _ => state.close_link(),
    }
}
