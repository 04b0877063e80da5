//! The requesting side: a line to one peer's agent, and the users of the places in its bounce file.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use super::name;
use super::wire::{Kind, Outcome, PLACE, PLACES, REPLY, Reply, Request};
use crate::sync::Lock;
use crate::sys::{self, BounceFile, Errno, Grow, Identity, Line, Res};

/// Maximum wait for a file.
const FILE_PATIENCE: Duration = Duration::from_secs(2);

/// The line is broken: no answer will come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// The answers that are expected on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Answer,
    Later,
}

/// A line to the agent of a peer. No call blocks.
#[derive(Debug)]
pub(crate) struct Link {
    line: Line,
    bounce: BounceFile,
    state: Lock<State>,
}

#[derive(Debug)]
struct State {
    places: [Place; PLACES],
    /// Queue pairs that wait for a place, first come first served.
    queue: VecDeque<u32>,
    /// Requests of [`Link::give_back`] for which the socket had no room.
    unsent: Vec<Request>,
    next_id: u64,
    broken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    /// A queue pair has acquired the place, and no request is in progress.
    Taken,
    /// A request is in progress. If its user has released the place, the place becomes free when
    /// the answer arrives.
    Asked {
        id: u64,
        abandoned: bool,
    },
    Answered(Outcome),
}

/// Connects to the agent of a process.
///
/// # Errors
/// `ECONNREFUSED`: the agent does not run. `EAGAIN`: too many connections wait. `EACCES`: another
/// process listens on the name.
fn connect(slot: u32, identity: &Identity) -> Res<Line> {
    let line = Line::connect(&name(slot, identity))?;
    let there = line.credentials()?;
    if there.pid != identity.pid || !sys::is_own_user(there.uid, there.pid) {
        return Err(Errno(libc::EACCES));
    }
    Ok(line)
}

impl Link {
    /// Opens a line from the process in `own_slot` to the process that the registry has in `slot`.
    ///
    /// # Errors
    /// `ECONNREFUSED`, `EAGAIN`: a later try may succeed. Others are permanent.
    pub(crate) fn open(slot: u32, identity: &Identity, own_slot: u32) -> Res<Self> {
        let line = connect(slot, identity)?;
        let bounce = BounceFile::create(PLACES * PLACE)?;
        let hello = Request {
            a: u64::from(own_slot),
            ..Request::new(Kind::Hello)
        };
        line.send(&hello.to_bytes(), Some(bounce.as_fd()))?;
        Ok(Self {
            line,
            bounce,
            state: Lock::new(State {
                places: [Place::Free; PLACES],
                queue: VecDeque::new(),
                unsent: Vec::new(),
                next_id: 1,
                broken: false,
            }),
        })
    }

    /// The descriptor, which is readable when an answer may have arrived.
    pub(crate) fn fd(&self) -> RawFd {
        self.line.as_raw_fd()
    }

    /// The answers that are due: one that has arrived and was not read, or one that has not
    /// arrived.
    pub(crate) fn due(&self) -> Due {
        let state = self.state.lock();
        let any = |what: fn(&Place) -> bool| state.places.iter().any(what);
        if any(|place| matches!(place, Place::Answered(_))) {
            Due::Answer
        } else if !state.broken
            && any(|place| {
                matches!(
                    place,
                    Place::Asked {
                        abandoned: false,
                        ..
                    }
                )
            })
        {
            Due::Later
        } else {
            Due::Nothing
        }
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.state.lock().broken
    }

    /// Acquires a place for a request of the queue pair with this index. If none is free, the queue
    /// pair is appended to the queue.
    pub(crate) fn take(&self, qp: u32) -> Option<usize> {
        let mut state = self.state.lock();
        let free = state.places.iter().filter(|&&place| place == Place::Free);
        let before = state.queue.iter().position(|&waiting| waiting == qp);
        if before.unwrap_or(state.queue.len()) >= free.count() {
            if before.is_none() {
                state.queue.push_back(qp);
            }
            return None;
        }
        state.queue.retain(|&waiting| waiting != qp);
        let place = state
            .places
            .iter()
            .position(|&place| place == Place::Free)?;
        state.places[place] = Place::Taken;
        Some(place)
    }

    /// Removes a queue pair from the queue for a place.
    pub(crate) fn leave(&self, qp: u32) {
        self.state.lock().queue.retain(|&waiting| waiting != qp);
    }

    /// Releases a place; an answer that arrives later is dropped. Returns true if a queue pair
    /// waits for a place.
    pub(crate) fn release(&self, place: usize) -> bool {
        let mut state = self.state.lock();
        state.places[place] = match state.places[place] {
            Place::Asked { id, .. } => Place::Asked {
                id,
                abandoned: true,
            },
            _ => Place::Free,
        };
        !state.queue.is_empty()
    }

    /// Copies local memory ranges to a place.
    ///
    /// # Errors
    /// `EFAULT`: local memory is not mapped.
    pub(crate) fn fill(&self, place: usize, from: &[libc::iovec]) -> Res<()> {
        self.bounce.fill(place * PLACE, from)
    }

    /// Copies a place to local memory ranges.
    ///
    /// # Errors
    /// As [`Self::fill`].
    pub(crate) fn empty(&self, place: usize, to: &[libc::iovec]) -> Res<()> {
        self.bounce.empty(place * PLACE, to)
    }

    /// Sends a request for a place that the caller has acquired. Returns false if the socket has no
    /// room, because the peer is stopped: the caller repeats the call.
    ///
    /// # Errors
    /// [`Broken`].
    pub(crate) fn ask(&self, place: usize, request: Request) -> Result<bool, Broken> {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        let request = Request {
            place: place as u32,
            id,
            ..request
        };
        let sent = self.send_unsent(&mut state) && self.send(&mut state, &request);
        if state.broken {
            return Err(Broken);
        }
        if sent {
            state.places[place] = Place::Asked {
                id,
                abandoned: false,
            };
        }
        Ok(sent)
    }

    /// Sends a request. False: the socket has no room, or the line is broken.
    fn send(&self, state: &mut State, request: &Request) -> bool {
        let sent = match state.broken {
            true => Err(Errno(libc::EPIPE)),
            false => self.line.send(&request.to_bytes(), None),
        };
        state.broken |= !matches!(sent, Ok(()) | Err(Errno(libc::EAGAIN)));
        sent.is_ok()
    }

    /// Sends the requests for which the socket had no room. False: one is left.
    fn send_unsent(&self, state: &mut State) -> bool {
        while let Some(request) = state.unsent.last().copied() {
            if !self.send(state, &request) {
                return false;
            }
            state.unsent.pop();
        }
        true
    }

    /// Sends a request that gives a claimed receive back to its shared queue, behind the requests
    /// in progress for it: at once, or when the socket has room again. `stamp`: that of the queue if
    /// it is one of XRC, otherwise 0. Returns false if the line is broken, so that no request can be
    /// in progress.
    pub(crate) fn give_back(&self, srq: u32, stamp: u32, index: u32) -> bool {
        let request = Request {
            incarnation: stamp,
            a: u64::from(srq),
            b: u64::from(index),
            ..Request::new(Kind::Return)
        };
        let mut state = self.state.lock();
        if !self.send(&mut state, &request) && !state.broken {
            // without memory the agent could still write into a receive that is posted again
            state.broken = state.unsent.try_push(request).is_err();
        }
        !state.broken
    }

    /// Asks the peer to make progress. The request is omitted if the peer has so many others to read
    /// that one of them asks for the same: at most [`PLACES`] are for places and as many give
    /// receives back. So a stopped peer leaves room for these.
    pub(crate) fn ask_to_go_on(&self) {
        if !self.line.is_crowded() {
            let request = Request::new(Kind::GoOn);
            let _ = self.line.send(&request.to_bytes(), None);
        }
    }

    /// The answer for a place, if it has arrived. Calls `others` if answers for other users arrived
    /// too, so that they are woken.
    ///
    /// # Errors
    /// [`Broken`]: no answer will come.
    pub(crate) fn answer(
        &self,
        place: usize,
        others: impl FnOnce(),
    ) -> Result<Option<Outcome>, Broken> {
        let mut state = self.state.lock();
        if self.take_answers(&mut state, Some(place)) {
            others();
        }
        match state.places[place] {
            Place::Answered(outcome) => {
                state.places[place] = Place::Taken;
                Ok(Some(outcome))
            }
            _ if state.broken => Err(Broken),
            _ => Ok(None),
        }
    }

    /// Takes the answers that have arrived, also for released places. Returns true if other users
    /// must be woken.
    pub(crate) fn look(&self) -> bool {
        self.take_answers(&mut self.state.lock(), None)
    }

    /// Returns true if there are answers for users other than that of `own`.
    fn take_answers(&self, state: &mut State, own: Option<usize>) -> bool {
        let mut others = false;
        self.send_unsent(state);
        let mut bytes = [0; REPLY];
        // The loop is bounded: an agent with more answers than requests is cut off.
        for _ in 0..=PLACES {
            match self.line.receive(&mut bytes) {
                Ok(_) => {}
                Err(Errno(libc::EAGAIN)) => return others,
                Err(_) => break,
            }
            let reply = Reply::of_bytes(&bytes);
            match state.places.get_mut(reply.place as usize) {
                Some(place) => match *place {
                    Place::Asked { id, abandoned } if id == reply.id => {
                        // Another queue pair may wait for a place that becomes free.
                        others |= own != Some(reply.place as usize);
                        *place = if abandoned {
                            Place::Free
                        } else {
                            Place::Answered(reply.outcome)
                        };
                    }
                    _ => break,
                },
                None => break,
            }
        }
        state.broken = true;
        true
    }
}

/// Fetches through the agent a file of a process whose descriptors this process can't open. Waits
/// at most 2 s.
///
/// # Errors
/// `EACCES`: there is no agent, or it refuses. `ETIMEDOUT`: no answer within 2 s.
pub(crate) fn fetch_file(slot: u32, identity: &Identity, own_slot: u32, fd: RawFd) -> Res<OwnedFd> {
    let line = connect(slot, identity).map_err(|_| Errno(libc::EACCES))?;
    let hello = Request {
        a: u64::from(own_slot),
        ..Request::new(Kind::Hello)
    };
    let request = Request {
        a: u64::from(fd.cast_unsigned()),
        ..Request::new(Kind::File)
    };
    for request in [hello, request] {
        line.send(&request.to_bytes(), None)?;
    }
    let begin = Instant::now();
    let mut bytes = [0; REPLY];
    loop {
        let left = FILE_PATIENCE.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Err(Errno(libc::ETIMEDOUT));
        }
        match sys::epoll_readable(line.as_raw_fd(), left.as_millis() as i32 + 1) {
            Ok(_) | Err(Errno(libc::EINTR)) => {}
            Err(error) => return Err(error),
        }
        match line.receive(&mut bytes) {
            Ok(file) => return file.ok_or(Errno(libc::EACCES)),
            Err(Errno(libc::EAGAIN)) => {}
            Err(_) => return Err(Errno(libc::EACCES)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::REQUEST;
    use super::*;
    use crate::sys::Listener;

    /// A line to an agent that does not read: the other end, and a name that no other test has.
    fn to_a_stopped_agent(slot: u32) -> (Link, Line) {
        let identity = Identity {
            pid: std::process::id(),
            start_time: 0,
            cookie: sys::random(),
        };
        let listener = Listener::bind(&name(slot, &identity)).unwrap();
        let link = Link::open(slot, &identity, 1).unwrap();
        let agent = listener.accept().unwrap();
        assert_eq!(next(&agent).unwrap().kind, Kind::Hello);
        (link, agent)
    }

    fn next(agent: &Line) -> Option<Request> {
        let mut bytes = [0; REQUEST];
        match agent.receive(&mut bytes) {
            Ok(_) => Request::of_bytes(&bytes),
            Err(error) => {
                assert_eq!(error, Errno(libc::EAGAIN));
                None
            }
        }
    }

    #[test]
    fn requests_to_go_on_leave_room_for_others() {
        let (link, agent) = to_a_stopped_agent(7);
        for _ in 0..5000 {
            link.ask_to_go_on();
        }
        for qp in 0..PLACES as u32 {
            let place = link.take(qp).unwrap();
            assert_eq!(link.ask(place, Request::new(Kind::Read)), Ok(true));
            assert!(link.give_back(3, 0, qp));
        }
        let kinds: Vec<_> = std::iter::from_fn(|| next(&agent))
            .map(|it| it.kind)
            .collect();
        let count = |kind| kinds.iter().filter(|&&other| other == kind).count();
        assert!((1..500).contains(&count(Kind::GoOn)));
        assert_eq!((count(Kind::Read), count(Kind::Return)), (PLACES, PLACES));
        // the agent reads again
        link.ask_to_go_on();
        assert_eq!(next(&agent).unwrap().kind, Kind::GoOn);
    }

    #[test]
    fn a_full_socket_breaks_no_line() {
        let (link, agent) = to_a_stopped_agent(8);
        let place = link.take(5).unwrap();
        assert_eq!(link.ask(place, Request::new(Kind::Receive)), Ok(true));
        let second = link.take(6).unwrap();
        while link
            .line
            .send(&Request::new(Kind::GoOn).to_bytes(), None)
            .is_ok()
        {}
        assert!(link.give_back(3, 9, 4));
        assert_eq!(link.ask(second, Request::new(Kind::Write)), Ok(false));
        link.ask_to_go_on();
        assert!(!link.look() && !link.is_broken());
        let first = next(&agent).unwrap();
        assert_eq!(first.kind, Kind::Receive);
        while let Some(request) = next(&agent) {
            assert_eq!(request.kind, Kind::GoOn);
        }
        // what found no room follows, in its order
        assert_eq!(link.ask(second, Request::new(Kind::Write)), Ok(true));
        let returned = next(&agent).unwrap();
        let (kind, stamp) = (returned.kind, returned.incarnation);
        assert_eq!(
            (kind, stamp, returned.a, returned.b),
            (Kind::Return, 9, 3, 4)
        );
        assert_eq!(next(&agent).unwrap().kind, Kind::Write);
        drop(agent);
        assert_eq!(link.ask(place, Request::new(Kind::Write)), Err(Broken));
    }
}
