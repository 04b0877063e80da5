//! The asking side: a line to one peer's agent, and who uses which place of its stage.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use super::name;
use super::wire::{Kind, Outcome, PLACE, PLACES, REPLY, Reply, Request};
use crate::sync::Lock;
use crate::sys::{self, Errno, Identity, Line, Res, Stage};

/// How long a file is waited for.
const FILE_PATIENCE: Duration = Duration::from_secs(2);

/// Why there is no answer, and will be none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// What is to be expected of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Answer,
    Later,
}

/// A line to the agent of a peer. All calls return at once.
#[derive(Debug)]
pub(crate) struct Link {
    line: Line,
    stage: Stage,
    state: Lock<State>,
}

#[derive(Debug)]
struct State {
    places: [Place; PLACES],
    /// Queue pairs that wait for a place, first come first served.
    queue: VecDeque<u32>,
    next_id: u64,
    broken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Free,
    /// A queue pair has it, and nothing is under way.
    Taken,
    /// A request is under way; with its user gone, the place is free when the answer comes.
    Asked {
        id: u64,
        abandoned: bool,
    },
    Answered(Outcome),
}

/// Connects to the agent of a process.
///
/// # Errors
/// `ECONNREFUSED` where it does not run, `EAGAIN` where too many connect, `EACCES` where somebody else answers.
fn connect(slot: u32, identity: &Identity) -> Res<Line> {
    let line = Line::connect(&name(slot, identity))?;
    let there = line.credentials()?;
    if there.uid != sys::effective_uid() || there.pid != identity.pid {
        return Err(Errno(libc::EACCES));
    }
    Ok(line)
}

impl Link {
    /// A line from the process in `own_slot` to the one that the registry has in `slot`.
    ///
    /// # Errors
    /// `ECONNREFUSED`, `EAGAIN`: later, perhaps. Others: never.
    pub(crate) fn open(slot: u32, identity: &Identity, own_slot: u32) -> Res<Self> {
        let line = connect(slot, identity)?;
        let stage = Stage::create(PLACES * PLACE)?;
        let hello = Request {
            a: u64::from(own_slot),
            ..Request::new(Kind::Hello)
        };
        line.send(&hello.to_bytes(), Some(stage.as_fd()))?;
        Ok(Self {
            line,
            stage,
            state: Lock::new(State {
                places: [Place::Free; PLACES],
                queue: VecDeque::new(),
                next_id: 1,
                broken: false,
            }),
        })
    }

    /// Readable when there may be an answer.
    pub(crate) fn fd(&self) -> RawFd {
        self.line.as_raw_fd()
    }

    /// What is due: an answer that nobody has looked at, or one that has not come.
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

    /// A place for a request of the queue pair with this index; one that gets none is in the queue for it.
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

    /// A queue pair waits for no place any more.
    pub(crate) fn leave(&self, qp: u32) {
        self.state.lock().queue.retain(|&waiting| waiting != qp);
    }

    /// Gives a place back; an answer that is still to come is nobody's. True where somebody waits for a place.
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

    /// Copies local pieces to a place.
    ///
    /// # Errors
    /// `EFAULT` where local memory is missing.
    pub(crate) fn fill(&self, place: usize, from: &[libc::iovec]) -> Res<()> {
        self.stage.fill(place * PLACE, from)
    }

    /// The other way round.
    ///
    /// # Errors
    /// As [`Self::fill`].
    pub(crate) fn empty(&self, place: usize, to: &[libc::iovec]) -> Res<()> {
        self.stage.empty(place * PLACE, to)
    }

    /// Sends a request for a place that the caller has.
    ///
    /// # Errors
    /// [`Broken`].
    pub(crate) fn ask(&self, place: usize, request: Request) -> Result<(), Broken> {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        let request = Request {
            place: place as u32,
            id,
            ..request
        };
        // There is room: no more requests are under way than there are places.
        if state.broken || self.line.send(&request.to_bytes(), None).is_err() {
            state.broken = true;
            return Err(Broken);
        }
        state.places[place] = Place::Asked {
            id,
            abandoned: false,
        };
        Ok(())
    }

    /// Gives a claimed receive of a shared queue back, behind what is under way for it. False where nothing can be
    /// under way any more.
    pub(crate) fn give_back(&self, srq: u32, index: u32) -> bool {
        let request = Request {
            a: u64::from(srq),
            b: u64::from(index),
            ..Request::new(Kind::Return)
        };
        let mut state = self.state.lock();
        if !state.broken && self.line.send(&request.to_bytes(), None).is_err() {
            state.broken = true;
        }
        !state.broken
    }

    /// Has the peer make progress; nothing is lost where it does not.
    pub(crate) fn ask_to_go_on(&self) {
        let request = Request::new(Kind::GoOn);
        let _ = self.line.send(&request.to_bytes(), None);
    }

    /// The answer for a place, if it has come. `others` is called where answers for others came with it, which they
    /// have to be told.
    ///
    /// # Errors
    /// [`Broken`]: none will.
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

    /// Takes what came, for places whose users are gone too. True where somebody has to be told.
    pub(crate) fn look(&self) -> bool {
        self.take_answers(&mut self.state.lock(), None)
    }

    /// True where there are answers for others than the user of `own`.
    fn take_answers(&self, state: &mut State, own: Option<usize>) -> bool {
        let mut others = false;
        let mut bytes = [0; REPLY];
        // Whoever answers more than was asked is cut off.
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
                        // A place that is free may be waited for.
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

/// A file of a process whose descriptors are closed to this one, by its agent. Waits for it, some seconds at
/// most.
///
/// # Errors
/// `EACCES` where there is no agent or it says no, `ETIMEDOUT`.
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
