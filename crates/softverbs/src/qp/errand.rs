//! Requests that the other end's agent carries out: what is under way, and going on with it. They stay at the head of
//! the send queue meanwhile, and nobody waits with a lock held. `docs/softverbs-agent.md` has the protocol.

use rdma_core_sys::IBV_QPT_UC;

use super::{Qp, SendQueue};
use crate::agent::{Broken, Kind, Link, Outcome, PLACE, Request};
use crate::peer::Peer;
use crate::process::Process;
use crate::region::{AccessError, Change, Key, Pieces};
use crate::sync::Arc;

/// What is asked of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Write(Key, u64),
    Read(Key, u64),
    /// Into the receive with this number, or of a shared queue with this index.
    Receive(u32),
    Change(Key, u64, Change),
}

/// A request that an agent works on. Its place of the link's stage goes back with it.
#[derive(Debug)]
pub(super) struct Errand {
    process: &'static Process,
    link: Arc<Link>,
    place: usize,
    incarnation: u32,
    /// Bytes that are done, and those that are under way.
    done: u64,
    asked: Option<u64>,
    receive: bool,
}

impl Drop for Errand {
    fn drop(&mut self) {
        if self.link.release(self.place) {
            self.process.wake_up();
        }
    }
}

/// How far an errand came: it ended (an atomic with the old word), or not yet.
pub(super) type Progress = Option<Result<u64, AccessError>>;

impl Qp {
    /// Goes on with the first request's errand, `len` bytes in `pieces`; the first call begins it.
    #[cold]
    pub(super) fn by_agent(
        &self,
        sq: &mut SendQueue,
        what: What,
        pieces: &[libc::iovec],
        len: u64,
    ) -> Progress {
        let done = self.errand_step(sq, what, pieces, len);
        if done.is_some() {
            sq.errand = None;
        }
        done
    }

    fn errand_step(
        &self,
        sq: &mut SendQueue,
        what: What,
        pieces: &[libc::iovec],
        len: u64,
    ) -> Progress {
        let conn = sq.conn.as_ref()?;
        let incarnation = conn.word.incarnation();
        let of_before = |errand: &Errand| errand.incarnation != incarnation;
        let old = sq.errand.take_if(|errand| of_before(errand));
        drop(old);
        if sq.errand.is_none() {
            match self.begin_errand(&conn.peer, incarnation) {
                Ok(Some(errand)) => sq.errand = Some(errand),
                Ok(None) => return None,
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
        let errand = sq.errand.as_mut()?;
        loop {
            let result = if errand.asked.is_some() {
                errand.look(what, pieces, len)
            } else {
                errand.ask(what, pieces, len, request)
            };
            match result {
                Ok(Moved::On) => sq.wait = None,
                Ok(Moved::Again) => {}
                Ok(Moved::Ended(old)) => return Some(Ok(old)),
                Ok(Moved::No) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// A place at the agent of a peer; `None` where there is none yet.
    fn begin_errand(
        &self,
        peer: &Arc<Peer>,
        incarnation: u32,
    ) -> Result<Option<Errand>, AccessError> {
        let Some(link) = self.process().link_to(peer)? else {
            return Ok(None);
        };
        Ok(link.take(self.index).map(|place| Errand {
            process: self.process(),
            link,
            place,
            incarnation,
            done: 0,
            asked: None,
            receive: false,
        }))
    }

    /// The first request is given up. Where an agent may still write into the receive that it claimed of a shared
    /// queue, the agent gives that back when it is done: then this is true.
    #[cold]
    pub(super) fn drop_errand(&self, sq: &mut SendQueue, claim: Option<(u32, u32)>) -> bool {
        if let Some(link) = sq.conn.as_ref().and_then(|conn| conn.peer.link()) {
            link.leave(self.index);
        }
        let Some(errand) = sq.errand.take() else {
            return false;
        };
        match claim {
            Some((srq, index)) if errand.asked.is_some() && errand.receive => {
                errand.link.give_back(srq, index)
            }
            _ => false,
        }
    }
}

/// What a step did.
enum Moved {
    No,
    /// It is to be asked once more.
    Again,
    On,
    Ended(u64),
}

impl Errand {
    /// Sends the next part.
    fn ask(
        &mut self,
        what: What,
        pieces: &[libc::iovec],
        len: u64,
        request: Request,
    ) -> Result<Moved, AccessError> {
        let bytes = (len - self.done).min(PLACE as u64);
        let fills = matches!(what, What::Write(..) | What::Receive(_));
        if fills {
            self.each_part(pieces, bytes, |link, place, list| link.fill(place, list))?;
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
        self.asked = Some(bytes);
        self.link
            .ask(self.place, request)
            .map_err(|Broken| AccessError::Dead)?;
        // It may be quick; else the next progress looks.
        Ok(Moved::No)
    }

    /// Takes the answer, if it is there.
    fn look(&mut self, what: What, pieces: &[libc::iovec], len: u64) -> Result<Moved, AccessError> {
        let answer = self.link.answer(self.place, || self.process.wake_up());
        let Some(outcome) = answer.map_err(|Broken| AccessError::Dead)? else {
            return Ok(Moved::No);
        };
        let bytes = self.asked.take().unwrap_or(0);
        let old = match outcome {
            Outcome::Done(old) => old,
            Outcome::Refused => return Err(AccessError::Remote),
            // It was not done; until its time is up.
            Outcome::Busy => return Ok(Moved::Again),
        };
        if matches!(what, What::Read(..)) {
            self.each_part(pieces, bytes, |link, place, list| link.empty(place, list))?;
        }
        self.done += bytes;
        Ok(if self.done == len {
            Moved::Ended(old)
        } else {
            Moved::On
        })
    }

    /// Does something with the local pieces of the next `bytes` bytes.
    fn each_part(
        &self,
        pieces: &[libc::iovec],
        bytes: u64,
        copy: impl Fn(&Link, usize, &[libc::iovec]) -> crate::sys::Res<()>,
    ) -> Result<(), AccessError> {
        let mut pieces = Pieces::new(pieces);
        // A request has fewer pieces than a batch.
        pieces.next(self.done as usize);
        let (batch, count, found) = pieces.next(bytes as usize);
        let whole = found as u64 == bytes;
        if whole && copy(&self.link, self.place, &batch[..count]).is_ok() {
            Ok(())
        } else {
            Err(AccessError::Local)
        }
    }
}

/// How long an answer is waited for, in nanoseconds; 0 for any time: unreliable requests end without an error only.
pub(super) fn patience_ns(kind: u32) -> u64 {
    if kind == IBV_QPT_UC {
        0
    } else {
        10_000_000_000
    }
}
