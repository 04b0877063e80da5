//! Payload that is too long for the ring: the sender copies it directly into the receive.
//!
//! The receive may become invalid at any time: its region is deregistered, or its queue pair fails,
//! is reset or destroyed. So the sender copies each part under a hazard that names the key and the
//! receive, and only if both are still valid after the hazard was published. The owner first
//! invalidates them and then waits for the hazard.

use super::agent_request::What;
use super::remote_qp::{Connection, Receive};
use super::request::Request;
use super::{Qp, SendQueue};
use crate::hazard::{Hazard, MOST_AT_ONCE};
use crate::key::Key;
use crate::region::{AccessError, IovecCursor, write_bytes};

/// Reason why a payload is not in the receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unpushed {
    /// The receive can't be written.
    Access(AccessError),
    /// The other end is in another state now. A part may have been copied.
    Moved,
    /// The other end's agent is executing the copy.
    Asked,
}

impl From<AccessError> for Unpushed {
    fn from(error: AccessError) -> Self {
        Self::Access(error)
    }
}

impl Qp {
    /// Copies a payload that is too long for the ring directly into the receive.
    pub(super) fn push_payload(
        &self,
        sq: &mut SendQueue,
        request: &Request<'_>,
    ) -> Result<(), Unpushed> {
        if sq.pushed {
            return Ok(());
        }
        let Some(conn) = &sq.conn else {
            return Err(Unpushed::Moved);
        };
        let number = sq.claim.unwrap_or(sq.claimed);
        let receive = conn.receive(number, request.len as usize);
        let there: u64 = receive
            .iovecs
            .as_slice()
            .iter()
            .map(|iovec| iovec.iov_len as u64)
            .sum();
        if there < request.len {
            return Err(AccessError::Remote.into());
        }
        let copied = if conn.peer.refuses() {
            Err(AccessError::Refused.into())
        } else {
            self.copy_to(conn, number, &receive, request)
        };
        match copied {
            Err(Unpushed::Access(AccessError::Refused)) => {
                let what = What::Receive(number);
                match self.by_agent(sq, what, request.iovecs, request.len) {
                    Some(done) => done.map(drop)?,
                    None => return Err(Unpushed::Asked),
                }
            }
            done => done?,
        }
        sq.pushed = true;
        Ok(())
    }

    fn copy_to(
        &self,
        conn: &Connection,
        number: u32,
        receive: &Receive,
        request: &Request<'_>,
    ) -> Result<(), Unpushed> {
        let mut local = IovecCursor::new(request.iovecs);
        let mut remote = IovecCursor::new(receive.iovecs.as_slice());
        let mut at = 0;
        while at < receive.iovecs.as_slice().len() {
            // Adjacent sges of one region are copied together.
            let key = receive.keys[at];
            let mut left = 0;
            while at < receive.iovecs.as_slice().len() && receive.keys[at] == key {
                left += receive.iovecs.as_slice()[at].iov_len;
                at += 1;
            }
            while left > 0 {
                let (from, from_count, bytes) = local.next(left.min(MOST_AT_ONCE));
                let (to, to_count, room) = remote.next(bytes);
                if bytes == 0 || room != bytes {
                    return Err(AccessError::Remote.into());
                }
                let what = conn.used_receive(Key(key));
                let peer = &conn.peer;
                let hazard = Hazard::publish(&peer.hazards, &peer.map, self.process().slot, what);
                if !conn.current() && !conn.lives_on() || !conn.still_delivers() {
                    return Err(Unpushed::Moved);
                }
                if !conn.still_named(number, key) {
                    return Err(AccessError::Remote.into());
                }
                if !peer.check_alive() {
                    return Err(AccessError::Dead.into());
                }
                write_bytes(peer, &from[..from_count], &to[..to_count], bytes)?;
                drop(hazard);
                left -= bytes;
            }
        }
        Ok(())
    }
}
