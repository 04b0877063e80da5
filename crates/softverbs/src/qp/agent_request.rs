//! Agent requests: work requests that the other end's agent executes. Such a work request stays at
//! the head of the send queue meanwhile, and no thread waits with a lock held.
//! `docs/softverbs-agent.md` has the protocol.

use rdma_core_sys::IBV_QPT_UC;

use super::{Qp, SendQueue};
use crate::agent::{Broken, Kind, Link, Outcome, PLACE, Request, Return};
use crate::key::Key;
use crate::process::{AgentLink, Process};
use crate::region::{AccessError, Change, IovecCursor, Shape};
use crate::sync::Arc;

/// The operation that an agent executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Write(Key, u64),
    Read(Key, u64),
    /// Writes into the receive with this number, or with this index of a shared queue.
    Receive(u32),
    Change(Key, u64, Change),
    /// Changes elements, and fetches their earlier values if the flag is set. The first two local
    /// ranges have the operands, the third one gets the earlier values.
    Elements(Key, u64, Shape, bool),
}

impl What {
    /// An atomic, which must not be executed twice.
    fn is_atomic(self) -> bool {
        matches!(self, Self::Change(..) | Self::Elements(..))
    }
}

/// An agent request in progress. Dropping it releases its place in the link's bounce file.
#[derive(Debug)]
pub(super) struct AgentRequest {
    process: &'static Process,
    link: Arc<Link>,
    place: usize,
    incarnation: u32,
    /// Bytes that are done, and bytes that are in progress.
    done: u64,
    asked: Option<u64>,
    receive: bool,
}

impl Drop for AgentRequest {
    fn drop(&mut self) {
        if self.link.release(self.place) {
            self.process.wake_up();
        }
    }
}

/// Progress of an agent request: its result (of an atomic, the old word; of elements, the number of
/// those that have changed), or `None` while it is in progress.
pub(super) type Progress = Option<Result<u64, AccessError>>;

impl SendQueue {
    /// Whether the kernel had no memory to send the agent request of the first request, or no
    /// descriptor or memory for the line, or the agent's queue of connections was full.
    pub(super) fn agent_lacks_memory(&self) -> bool {
        let lacks = |it: &AgentRequest| it.asked.is_none() && it.link.lacks_memory();
        self.lacks_line || self.agent_request.as_ref().is_some_and(lacks)
    }
}

impl Qp {
    /// Advances the first request's agent request, with `len` bytes in the sges `iovecs`. The first
    /// call begins it.
    #[cold]
    pub(super) fn by_agent(
        &self,
        sq: &mut SendQueue,
        what: What,
        iovecs: &[libc::iovec],
        len: u64,
    ) -> Progress {
        let done = self.agent_request_step(sq, what, iovecs, len);
        if done.is_some() {
            sq.agent_request = None;
        }
        done
    }

    fn agent_request_step(
        &self,
        sq: &mut SendQueue,
        what: What,
        iovecs: &[libc::iovec],
        len: u64,
    ) -> Progress {
        let conn = sq.conn.as_ref()?;
        let incarnation = conn.word.incarnation();
        let of_before = |agent_request: &AgentRequest| agent_request.incarnation != incarnation;
        let old = sq
            .agent_request
            .take_if(|agent_request| of_before(agent_request));
        drop(old);
        if sq.agent_request.is_none() {
            let link = self.process().link_to(&conn.peer);
            sq.lacks_line = matches!(link, Ok(AgentLink::Unopened));
            match link {
                Ok(AgentLink::Open(link)) => {
                    let begun = self.begin_agent_request(&link, incarnation);
                    let Some(begun) = begun else {
                        self.wait_for_place(sq, &link);
                        sq.queued_at = Some(link);
                        return None;
                    };
                    sq.agent_request = Some(begun);
                    sq.queued_at = None;
                    // the limit for its answer begins now, not with the wait for the place
                    sq.wait = None;
                }
                Ok(AgentLink::Requested | AgentLink::Unopened) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        let request = Request {
            qp: sq.dest,
            from: self.number(),
            incarnation,
            srq: conn.delivery.number,
            ..Request::new(Kind::Hello)
        };
        let agent_request = sq.agent_request.as_mut()?;
        loop {
            let result = if agent_request.asked.is_some() {
                agent_request.look(what, iovecs, len)
            } else {
                agent_request.ask(what, iovecs, len, request)
            };
            // From the moment the request is sent until the agent answers that it did nothing, an
            // atomic must not be executed again, also if the line breaks.
            let nothing = matches!(result, Ok(Advance::Again) | Err(AccessError::Remote));
            sq.may_have_changed |= what.is_atomic() && agent_request.asked.is_some();
            sq.may_have_changed &= !nothing;
            match result {
                // an agent that answers has a new limit for its next answer
                Ok(Advance::On | Advance::Again) => sq.wait = None,
                Ok(Advance::Ended(old)) => return Some(Ok(old)),
                Ok(Advance::No) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Acquires a place at an agent; `None` if no place is free.
    fn begin_agent_request(&self, link: &Arc<Link>, incarnation: u32) -> Option<AgentRequest> {
        link.take(self.index).map(|place| AgentRequest {
            process: self.process(),
            link: Arc::clone(link),
            place,
            incarnation,
            done: 0,
            asked: None,
            receive: false,
        })
    }

    /// The first request waits for no place at an agent any more. A queue pair behind it in the
    /// queue tries again.
    pub(super) fn leave_agent_queue(&self, sq: &mut SendQueue) {
        if let Some(link) = sq.queued_at.take()
            && link.leave(self.index)
        {
            self.process().wake_up();
        }
    }

    /// Abandons the agent request of the first request. If the agent may still write into the
    /// receive that the request claimed from a shared queue, the agent returns the claim when it
    /// has finished; then the result is true.
    #[cold]
    pub(super) fn drop_agent_request(&self, sq: &mut SendQueue, claim: Option<(u32, u32)>) -> bool {
        let stamp = sq.conn.as_ref().map_or(0, |conn| conn.delivery.stamp);
        self.leave_agent_queue(sq);
        let Some(agent_request) = sq.agent_request.take() else {
            return false;
        };
        match claim {
            Some((srq, index)) if agent_request.asked.is_some() && agent_request.receive => {
                agent_request.link.give_back(Return {
                    srq,
                    stamp,
                    index,
                    dest: sq.dest,
                    from: self.number(),
                })
            }
            _ => false,
        }
    }
}

/// Result of one step.
enum Advance {
    No,
    /// The request must be sent once more.
    Again,
    On,
    Ended(u64),
}

impl AgentRequest {
    /// Sends the next part.
    fn ask(
        &mut self,
        what: What,
        iovecs: &[libc::iovec],
        len: u64,
        request: Request,
    ) -> Result<Advance, AccessError> {
        let bytes = (len - self.done).min(PLACE as u64);
        let fills = matches!(what, What::Write(..) | What::Receive(_));
        if fills {
            self.each_part(iovecs, bytes, |link, place, list| link.fill(place, list))?;
        } else if let (What::Elements(..), Some(operands)) = (what, iovecs.get(..2)) {
            let filled = self.link.fill(self.place, operands);
            filled.map_err(|_| AccessError::Local)?;
        }
        let done = self.done;
        let request = match what {
            What::Write(key, addr) | What::Read(key, addr) => Request {
                kind: if fills { Kind::Write } else { Kind::Read },
                key: key.0,
                addr: addr.wrapping_add(done),
                len: bytes,
                ..request
            },
            What::Receive(number) => Request {
                kind: Kind::Receive,
                len: bytes,
                a: u64::from(number),
                b: done,
                ..request
            },
            What::Elements(key, addr, shape, fetches) => Request {
                kind: Kind::Elements,
                key: key.0,
                addr,
                len: bytes,
                a: shape.to_word(),
                b: fetches.into(),
                ..request
            },
            What::Change(key, addr, change) => {
                let (kind, a, b) = match change {
                    Change::Add(add) => (Kind::Add, add, 0),
                    Change::Swap(compare, swap) => (Kind::Swap, compare, swap),
                    Change::Store(value) => (Kind::Store, value, 0),
                };
                let key = key.0;
                Request {
                    kind,
                    key,
                    addr,
                    a,
                    b,
                    ..request
                }
            }
        };
        self.receive = matches!(what, What::Receive(_));
        let sent = self.link.ask(self.place, request);
        // without room in the socket the next progress sends it
        self.asked = sent.map_err(|Broken| AccessError::Dead)?.then_some(bytes);
        // The answer may come at once; otherwise the next progress reads it.
        Ok(Advance::No)
    }

    /// Takes the answer, if it has arrived.
    fn look(
        &mut self,
        what: What,
        iovecs: &[libc::iovec],
        len: u64,
    ) -> Result<Advance, AccessError> {
        let answer = self.link.answer(self.place, || self.process.wake_up());
        let Some(outcome) = answer.map_err(|Broken| AccessError::Dead)? else {
            return Ok(Advance::No);
        };
        let bytes = self.asked.take().unwrap_or(0);
        let old = match outcome {
            Outcome::Done(old) => old,
            Outcome::Refused => return Err(AccessError::Remote),
            // Another process held a lock, and the agent did nothing.
            Outcome::Busy => return Ok(Advance::Again),
        };
        if matches!(what, What::Read(..)) {
            self.each_part(iovecs, bytes, |link, place, list| link.empty(place, list))?;
        } else if let (What::Elements(..), Some(earlier)) = (what, iovecs.get(2..)) {
            let emptied = self.link.empty(self.place, earlier);
            emptied.map_err(|_| AccessError::Local)?;
        }
        self.done += bytes;
        Ok(if self.done == len {
            Advance::Ended(old)
        } else {
            Advance::On
        })
    }

    /// Calls `copy` with the local ranges of the next `bytes` bytes.
    fn each_part(
        &self,
        iovecs: &[libc::iovec],
        bytes: u64,
        copy: impl Fn(&Link, usize, &[libc::iovec]) -> crate::sys::Res<()>,
    ) -> Result<(), AccessError> {
        let mut iovecs = IovecCursor::new(iovecs);
        // A request has fewer sges than a batch has places.
        iovecs.next(self.done as usize);
        let (batch, count, found) = iovecs.next(bytes as usize);
        let whole = found as u64 == bytes;
        if whole && copy(&self.link, self.place, &batch[..count]).is_ok() {
            Ok(())
        } else {
            Err(AccessError::Local)
        }
    }
}

/// Maximum wait for an answer, in nanoseconds; 0 for no limit, as an unreliable request must not
/// fail.
pub(super) fn answer_wait_ns(kind: u32) -> u64 {
    if kind == IBV_QPT_UC {
        0
    } else {
        10_000_000_000
    }
}
