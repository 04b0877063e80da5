//! Requests of the active side: connects to the listener's socket and sends the request.

use std::sync::Arc;

use super::address;
use super::conversation::Link;
use super::event::{Kind, reason, sidr};
use super::id::Shared;
use super::redial::Redial;
use super::sock::Sock;
use super::state::{Phase, State};
use super::wire::{Private, SidrRep};
use crate::sys::{Errno, Res};

/// Result of connecting to a listener.
pub(super) enum Called {
    Answered(Sock),
    /// No process listens there.
    Nobody,
    /// The listener's queue is full.
    Busy,
}

/// Connects to the listener on one of `names`. The socket has the name of the local address, if the
/// id alone owns that.
pub(super) fn call(state: &mut State, names: &[String]) -> Res<Called> {
    let mut sock = if state.names.is_empty() {
        Sock::new()?
    } else {
        state.names.remove(0)
    };
    let mut busy = false;
    let result = (|| {
        for name in names {
            match sock.connect(name) {
                Ok(()) if sock.is_of_own_user()? => return Ok(true),
                // A process of another user has taken the name: it counts as no listener. The
                // socket cannot be connected a second time.
                Ok(()) => sock = Sock::new()?,
                Err(Errno(libc::ECONNREFUSED)) => {}
                // The user of a full queue is not known, so the other name is tried too.
                Err(Errno(libc::EAGAIN)) => busy = true,
                Err(errno) => return Err(errno),
            }
        }
        Ok(false)
    })();
    match result {
        Ok(true) => return Ok(Called::Answered(sock)),
        _ => state.names.insert(0, sock),
    }
    result.map(|_| if busy { Called::Busy } else { Called::Nobody })
}

/// Continues after an attempt: sends the request, schedules the next attempt, or refuses.
pub(super) fn proceed(
    state: &mut State,
    id: &Arc<Shared>,
    called: Called,
    mut redial: Redial,
) -> Res<()> {
    match called {
        Called::Answered(sock) => {
            state.events.watch(sock.fd(), id, false)?;
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
    Ok(())
}

/// Repeats a request that is due.
pub(super) fn repeat(state: &mut State, id: &Arc<Shared>) {
    let Some(redial) = state.redial.take_if(|redial| redial.is_due()) else {
        return;
    };
    // An attempt that fails for lack of memory or descriptors is repeated, as for a full queue.
    let names = address::candidates(state.space, &redial.destination);
    let called = call(state, &names);
    if proceed(state, id, called.unwrap_or(Called::Busy), redial).is_err() {
        // The end of an unwatched socket would not be noticed; the deadline ends the attempt.
        state.link = None;
        if let Some(timer) = &state.timer {
            timer.look_in(0);
        }
    }
}
