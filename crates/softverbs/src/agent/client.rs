//! The requesting side: a line to one peer's agent, and the users of the places in its bounce file.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use super::name;
use super::wire::{Kind, Outcome, PLACE, PLACES, REPLY, Reply, Request};
use crate::sync::Lock;
use crate::sys::{self, BounceFile, Errno, Grow, Identity, Line, Res};

/// Maximum wait for a file.
const FILE_WAIT: Duration = Duration::from_secs(2);

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

/// A claimed receive of a shared queue that no message will consume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Return {
    pub(crate) srq: u32,
    /// The stamp of the queue if it is one of XRC, otherwise 0.
    pub(crate) stamp: u32,
    pub(crate) index: u32,
    /// The queue pair or target for which the receive was claimed, and the claiming queue pair.
    pub(crate) dest: u32,
    pub(crate) from: u32,
}

impl Return {
    fn request(&self) -> Request {
        Request {
            incarnation: self.stamp,
            a: u64::from(self.srq),
            b: u64::from(self.index),
            ..Request::new(Kind::Return)
        }
    }
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
    places: [RequestSlot; PLACES],
    /// Queue pairs that wait for a place, first come first served.
    queue: VecDeque<u32>,
    /// Receives of [`Link::give_back`] for which the socket had no room. Each belongs to a place
    /// with a request in progress, and [`Link::ask`] begins none while one is left, so [`PLACES`]
    /// suffice.
    unsent: Vec<Return>,
    next_id: u64,
    /// When the last answer was read, in nanoseconds of the monotonic clock; 0: none was.
    answered: u64,
    /// The kernel had no memory for the last request.
    lacks_memory: bool,
    broken: bool,
}

/// The state of a place for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestSlot {
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
    /// `ECONNREFUSED`, `EAGAIN`, and those of a shortage ([`sys::is_shortage`]): a later try may
    /// succeed. `EPIPE`, `ECONNRESET`: the agent has closed the line, or its process has ended.
    /// Others are permanent.
    pub(crate) fn open(slot: u32, identity: &Identity, own_slot: u32) -> Res<Self> {
        // A connection that this side closes again keeps its place in the agent's queue until the
        // agent accepts it. So the descriptor of the file comes first.
        let bounce = BounceFile::unallocated(PLACES * PLACE)?;
        let line = connect(slot, identity)?;
        bounce.allocate(PLACES * PLACE)?;
        let hello = Request {
            a: u64::from(own_slot),
            ..Request::new(Kind::Hello)
        };
        let mut unsent = Vec::new();
        unsent
            .try_reserve_exact(PLACES)
            .map_err(|_| Errno(libc::ENOMEM))?;
        line.send(&hello.to_bytes(), Some(bounce.as_fd()))?;
        Ok(Self {
            line,
            bounce,
            state: Lock::new(State {
                places: [RequestSlot::Free; PLACES],
                queue: VecDeque::new(),
                unsent,
                next_id: 1,
                answered: 0,
                lacks_memory: false,
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
        let any = |what: fn(&RequestSlot) -> bool| state.places.iter().any(what);
        if any(|place| matches!(place, RequestSlot::Answered(_))) {
            Due::Answer
        } else if !state.broken
            && any(|place| {
                matches!(
                    place,
                    RequestSlot::Asked {
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
        let free = state
            .places
            .iter()
            .filter(|&&place| place == RequestSlot::Free);
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
            .position(|&place| place == RequestSlot::Free)?;
        state.places[place] = RequestSlot::Taken;
        Some(place)
    }

    /// When the last answer was read, for any user of a place, in nanoseconds of the monotonic
    /// clock; 0: none was.
    pub(crate) fn answered(&self) -> u64 {
        self.state.lock().answered
    }

    /// Removes a queue pair from the queue for a place. Returns true if it was there and others
    /// wait: one of them may get a place now.
    pub(crate) fn leave(&self, qp: u32) -> bool {
        let mut state = self.state.lock();
        let before = state.queue.len();
        state.queue.retain(|&waiting| waiting != qp);
        state.queue.len() != before && !state.queue.is_empty()
    }

    /// Releases a place; an answer that arrives later is dropped. Returns true if a queue pair
    /// waits for a place.
    pub(crate) fn release(&self, place: usize) -> bool {
        let mut state = self.state.lock();
        state.places[place] = match state.places[place] {
            RequestSlot::Asked { id, .. } => RequestSlot::Asked {
                id,
                abandoned: true,
            },
            _ => RequestSlot::Free,
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

    /// Whether the kernel had no memory for the last request. No answer wakes the process to repeat
    /// it.
    pub(crate) fn lacks_memory(&self) -> bool {
        self.state.lock().lacks_memory
    }

    /// Sends a request for a place that the caller has acquired. Returns false if the socket has no
    /// room, because the peer is stopped, or if [`Self::lacks_memory`]: the caller repeats the
    /// call.
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
            state.places[place] = RequestSlot::Asked {
                id,
                abandoned: false,
            };
        }
        Ok(sent)
    }

    /// Sends a request. False: the socket or the kernel has no room, or the line is broken.
    fn send(&self, state: &mut State, request: &Request) -> bool {
        let sent = match state.broken {
            true => Err(Errno(libc::EPIPE)),
            false => self.line.send(&request.to_bytes(), None),
        };
        state.lacks_memory = matches!(sent, Err(Errno(libc::ENOBUFS | libc::ENOMEM)));
        match sent {
            Ok(()) => true,
            Err(Errno(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM)) => false,
            Err(_) => {
                self.break_line(state);
                false
            }
        }
    }

    /// Ends the line. The descriptor becomes readable, so that progress finds its end.
    fn break_line(&self, state: &mut State) {
        state.broken = true;
        self.line.hang_up();
    }

    /// The receives that could not be given back before the line broke, each one once. The agent
    /// has closed the line between two requests, and executes of those in its socket only the ones
    /// that give receives back; or it is hostile.
    pub(crate) fn take_unreturned(&self) -> Vec<Return> {
        let mut state = self.state.lock();
        match state.broken {
            true => std::mem::take(&mut state.unsent),
            false => Vec::new(),
        }
    }

    /// Sends the requests for which the socket had no room. False: one is left.
    fn send_unsent(&self, state: &mut State) -> bool {
        while let Some(it) = state.unsent.last().copied() {
            if !self.send(state, &it.request()) {
                return false;
            }
            state.unsent.pop();
        }
        true
    }

    /// Sends a request that gives a claimed receive back to its shared queue, behind the requests
    /// in progress for it: at once, or when the socket has room again. If the line breaks before,
    /// [`Self::take_unreturned`] has it. Returns false if the line is broken, so that no request
    /// can be in progress.
    pub(crate) fn give_back(&self, claim: Return) -> bool {
        let mut state = self.state.lock();
        if !self.send(&mut state, &claim.request())
            && !state.broken
            && state.unsent.try_push(claim).is_err()
        {
            // without memory the agent could still write into a receive that is posted again
            self.break_line(&mut state);
        }
        !state.broken
    }

    /// Asks the peer to make progress. The request is omitted if the peer has so many others to
    /// read that one of them asks for the same: at most [`PLACES`] are for places and as many give
    /// receives back. So a stopped peer leaves room for these. Returns false if the kernel has no
    /// memory for the request: the caller repeats the call.
    pub(crate) fn ask_to_go_on(&self) -> bool {
        if self.line.is_crowded() {
            return true;
        }
        let request = Request::new(Kind::GoOn);
        let sent = self.line.send(&request.to_bytes(), None);
        !matches!(sent, Err(Errno(libc::ENOBUFS | libc::ENOMEM)))
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
            RequestSlot::Answered(outcome) => {
                state.places[place] = RequestSlot::Taken;
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
                    RequestSlot::Asked { id, abandoned } if id == reply.id => {
                        // another request of the same place follows a lock that is held
                        if reply.outcome != Outcome::Busy {
                            state.answered = sys::now_ns();
                        }
                        // Another queue pair may wait for a place that becomes free.
                        others |= own != Some(reply.place as usize);
                        *place = if abandoned {
                            RequestSlot::Free
                        } else {
                            RequestSlot::Answered(reply.outcome)
                        };
                    }
                    _ => break,
                },
                None => break,
            }
        }
        self.break_line(state);
        true
    }
}

/// Fetches through the agent a file of a process whose descriptors this process can't open. Waits
/// at most 2 s.
///
/// # Errors
/// `EACCES`: there is no agent, or it refuses, or it has closed the line. `ETIMEDOUT`: no answer
/// within 2 s. `EAGAIN`: its queue of connections is full. `EMFILE`, `ENFILE`, `ENOMEM`, `ENOSPC`:
/// a shortage of this process or the kernel.
pub(crate) fn fetch_file(slot: u32, identity: &Identity, own_slot: u32, fd: RawFd) -> Res<OwnedFd> {
    fetch_over(connect(slot, identity), own_slot, fd)
}

/// As [`fetch_file`], over a line to the agent.
fn fetch_over(line: Res<Line>, own_slot: u32, fd: RawFd) -> Res<OwnedFd> {
    let file = line.and_then(|line| request_file(&line, own_slot, fd));
    file.map_err(|error| match error.0 {
        // it runs, but more connections wait for it than the kernel queues
        libc::ETIMEDOUT | libc::EAGAIN => error,
        // the kernel had no memory for a message
        libc::ENOBUFS => Errno(libc::ENOMEM),
        // too many descriptors are in messages that no process has received
        libc::ETOOMANYREFS => Errno(libc::EMFILE),
        _ if sys::is_shortage(error) => error,
        // Also if the line is closed, which this side finds in one call or another: the process
        // may live. If it has ended, its slot is empty at the next try.
        _ => Errno(libc::EACCES),
    })
}

/// # Errors
/// `EACCES`: the agent refuses. `ETIMEDOUT`: no answer within 2 s. Those of the line.
fn request_file(line: &Line, own_slot: u32, fd: RawFd) -> Res<OwnedFd> {
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
        let left = FILE_WAIT.saturating_sub(begin.elapsed());
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
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::REQUEST;
    use super::*;
    use crate::sys::{Listener, with_descriptors};

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

    /// The agent accepts a connection that this side has closed like any other one.
    #[test]
    fn a_line_without_a_descriptor_takes_no_place_in_the_queue_of_the_agent() {
        let identity = Identity {
            pid: std::process::id(),
            start_time: 0,
            cookie: sys::random(),
        };
        let listener = Listener::bind(&name(11, &identity)).unwrap();
        let opened = sys::with_descriptors(1, || Link::open(11, &identity, 1));
        assert_eq!(opened.err(), Some(Errno(libc::EMFILE)));
        assert_eq!(listener.accept().err(), Some(Errno(libc::EAGAIN)));
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

    fn claim(stamp: u32, index: u32) -> Return {
        Return {
            srq: 3,
            stamp,
            index,
            dest: 7,
            from: 8,
        }
    }

    fn fill(link: &Link) {
        let request = Request::new(Kind::GoOn).to_bytes();
        while link.line.send(&request, None).is_ok() {}
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
            assert!(link.give_back(claim(0, qp)));
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
        fill(&link);
        assert!(link.give_back(claim(9, 4)));
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

    #[test]
    fn receives_of_a_broken_line_are_returned_otherwise() {
        let (link, agent) = to_a_stopped_agent(9);
        let claims: Vec<_> = (0..PLACES as u32).map(|i| claim(9, i)).collect();
        for qp in 0..PLACES as u32 {
            let place = link.take(qp).unwrap();
            assert_eq!(link.ask(place, Request::new(Kind::Receive)), Ok(true));
        }
        fill(&link);
        for &it in &claims {
            assert!(link.give_back(it));
        }
        assert_eq!(link.take_unreturned(), []);
        drop(agent);
        link.look();
        assert!(link.is_broken());
        assert!(!link.give_back(claim(9, 77)));
        assert_eq!(link.take_unreturned(), claims);
        assert_eq!(link.take_unreturned(), []);
    }

    /// An agent that has no room for a further line closes it: its process lives. Which call finds
    /// that depends on which side is quicker.
    #[test]
    fn a_file_may_come_later_over_another_line() {
        let identity = Identity {
            pid: std::process::id(),
            start_time: 0,
            cookie: sys::random(),
        };
        let listener = Listener::bind(&name(11, &identity)).unwrap();
        let refused = Some(Errno(libc::EACCES));
        let line = connect(11, &identity);
        drop(listener.accept().unwrap());
        assert_eq!(fetch_over(line, 1, 5).err(), refused, "before the request");
        let line = connect(11, &identity);
        drop(listener);
        assert_eq!(
            fetch_over(line, 1, 5).err(),
            refused,
            "before it is accepted"
        );
        assert_eq!(fetch_file(11, &identity, 1, 5).err(), refused, "no agent");
    }

    /// It has no effect on the time for which a silent agent is awaited.
    #[test]
    fn a_shortage_is_no_refusal() {
        let identity = Identity {
            pid: std::process::id(),
            start_time: 0,
            cookie: 0,
        };
        let file = with_descriptors(0, || fetch_file(12, &identity, 1, 5));
        assert_eq!(file.err(), Some(Errno(libc::EMFILE)));
    }

    /// The line has the last descriptor that is free.
    #[test]
    fn a_file_that_finds_no_descriptor_is_a_lack_of_one() {
        let identity = Identity {
            pid: std::process::id(),
            start_time: 0,
            cookie: sys::random(),
        };
        let listener = Listener::bind(&name(11, &identity)).unwrap();
        let file = sys::memfd_create(c"test", 4096).unwrap();
        let fetched = std::thread::scope(|scope| {
            let fetch = scope.spawn(|| fetch_file(11, &identity, 1, 5));
            let agent = loop {
                if let Ok(line) = listener.accept() {
                    break line;
                }
                std::thread::yield_now();
            };
            for kind in [Kind::Hello, Kind::File] {
                let request = loop {
                    assert!(sys::epoll_readable(agent.as_raw_fd(), 20_000).unwrap());
                    if let Some(request) = next(&agent) {
                        break request;
                    }
                };
                assert_eq!(request.kind, kind);
            }
            sys::with_descriptors(0, || {
                let answer = Reply {
                    outcome: Outcome::Done(0),
                    place: 0,
                    id: 0,
                };
                agent.send(&answer.to_bytes(), Some(file.as_fd())).unwrap();
                fetch.join().unwrap()
            })
        });
        assert_eq!(fetched.err(), Some(Errno(libc::EMFILE)));
        let nobody = sys::with_descriptors(0, || fetch_file(12, &identity, 1, 5));
        assert_eq!(nobody.err(), Some(Errno(libc::EMFILE)));
        let nobody = fetch_file(12, &identity, 1, 5);
        assert_eq!(nobody.err(), Some(Errno(libc::EACCES)));
    }

    #[test]
    fn a_line_that_this_side_breaks_is_found() {
        let (link, agent) = to_a_stopped_agent(10);
        let answer = Reply {
            outcome: Outcome::Busy,
            place: 0,
            id: 5,
        };
        agent.send(&answer.to_bytes(), None).unwrap();
        link.look();
        assert!(link.is_broken());
        // no more to read but the end
        assert!(sys::epoll_readable(link.fd(), 0).unwrap());
    }
}
