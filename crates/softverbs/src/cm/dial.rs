//! Requests of the active side: connects to the listener's socket and sends the request.

use std::sync::Arc;

use super::address;
use super::conversation::Link;
use super::event::{Kind, reason};
use super::id::Shared;
use super::redial::Redial;
use super::sock::Sock;
use super::state::{Phase, State};
use super::wire::{Private, SidrRep, sidr};
use crate::sys::{Errno, Res};

/// Result of connecting to a listener.
pub(super) enum Called {
    /// The socket is watched.
    Answered(Sock),
    /// No process listens there.
    Nobody,
    /// The listener's queue is full.
    Busy,
}

/// Result of connecting to one name.
enum Attempt {
    Answered,
    /// No socket listens there.
    Refused,
    /// The queue is full.
    Busy,
    /// A process of another user has taken the name: it counts as no listener.
    Stranger,
}

/// Connects to one name. The socket is watched before: if that fails, the listener has no
/// connection, and the socket can be used again. It stays watched if it is answered.
fn attempt(state: &State, id: &Shared, sock: &Sock, name: &str) -> Res<Attempt> {
    state.events.watch(sock.fd(), id, false)?;
    let attempt = match sock.connect(name) {
        Ok(()) if sock.is_of_own_user().unwrap_or(false) => return Ok(Attempt::Answered),
        Ok(()) => Ok(Attempt::Stranger),
        Err(Errno(libc::ECONNREFUSED)) => Ok(Attempt::Refused),
        Err(Errno(libc::EAGAIN)) => Ok(Attempt::Busy),
        Err(errno) => Err(errno),
    };
    state.events.unwatch(sock.fd());
    attempt
}

/// Connects to the listener on one of `names`. The socket has the name of the local address, if the
/// id alone owns that, and the id keeps it unless the listener has answered.
///
/// # Errors
/// Those of watching and of connecting; the call can be repeated.
pub(super) fn call(state: &mut State, id: &Shared, names: &[String]) -> Res<Called> {
    let mut busy = false;
    for name in names {
        let sock = if state.names.is_empty() {
            Sock::new()?
        } else {
            state.names.remove(0)
        };
        let attempt = attempt(state, id, &sock, name);
        match attempt {
            Ok(Attempt::Answered) => return Ok(Called::Answered(sock)),
            // The socket cannot be connected a second time.
            Ok(Attempt::Stranger) => {
                // Between the two sockets another id can own the name.
                state.end_permissions();
                state.names.insert(0, sock.renewed()?);
                // Without descriptors for it, the address is not shared.
                let _ = state.add_permissions();
            }
            _ => state.names.insert(0, sock),
        }
        // The user of a full queue is not known, so the other name is tried too.
        busy |= matches!(attempt?, Attempt::Busy);
    }
    Ok(if busy { Called::Busy } else { Called::Nobody })
}

/// Continues after an attempt: sends the request, schedules the next attempt, or refuses.
pub(super) fn proceed(state: &mut State, id: &Arc<Shared>, called: Called, mut redial: Redial) {
    match called {
        Called::Answered(sock) => {
            state.link = Some(Link::new(sock));
            // A listener that closes at this moment is processed later as a refusal.
            let _ = state.say(id, &redial.request);
            if let Some(timer) = &state.timer {
                timer.look_in(0);
            }
        }
        Called::Busy => {
            let pause = redial.postpone();
            if let Some(timer) = &state.timer {
                timer.look_in(pause);
            }
            state.redial = Some(redial);
        }
        Called::Nobody => {
            state.stop_timer();
            state.phase = Phase::Failed;
            let nobody = if state.is_datagram() {
                Kind::Service(SidrRep::refusal(sidr::UNSUPPORTED))
            } else {
                Kind::Rejected {
                    reason: reason::INVALID_SERVICE_ID,
                    data: Private::EMPTY,
                }
            };
            state.push(id, nobody);
        }
    }
}

/// Repeats a request that is due.
pub(super) fn repeat(state: &mut State, id: &Arc<Shared>) {
    let Some(redial) = state.redial.take_if(|redial| redial.is_due()) else {
        return;
    };
    // An attempt that fails for lack of memory or descriptors is repeated, as for a full queue.
    let names = address::candidates(state.space, &redial.destination);
    let called = call(state, id, &names);
    proceed(state, id, called.unwrap_or(Called::Busy), redial);
}
