//! The identifiers of answered requests, which stay until the peer has the answer.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::super::answered::Answered;
use super::super::circuit::CircuitUser;
use super::super::incoming::Incoming;
use super::{Circuits, RECIPROCAL, overdue};
use crate::verbs::CmId;

/// How long the identifiers of answered requests stay.
const RETIRED: Duration = Duration::from_secs(1);

/// The identifier of a request that is answered.
#[derive(Clone, Debug)]
pub(super) enum Retired {
    Request(#[allow(dead_code, reason = "ends when it is dropped")] Arc<Incoming>),
    Answered(Arc<Answered>),
    Dial(Arc<CmId>),
}

impl Retired {
    fn keeps(&self, answered: &Answered) -> bool {
        match self {
            Self::Answered(kept) => std::ptr::eq(Arc::as_ptr(kept), answered),
            Self::Request(_) | Self::Dial(_) => false,
        }
    }
}

/// The identifiers, each with the time of its end.
#[derive(Debug, Default)]
pub(super) struct RetiredIds(Vec<(Retired, Instant)>);

impl RetiredIds {
    /// Keeps an identifier for this time.
    fn add(&mut self, retired: Retired, span: Duration) {
        self.0.push((retired, Instant::now() + span));
    }

    /// The answer to this request is confirmed: its identifier ends [`RETIRED`] from now.
    fn confirm(&mut self, answered: &Answered) {
        let due = Instant::now() + RETIRED;
        let mut retired = self.0.iter_mut();
        if let Some((_, at)) = retired.find(|(retired, _)| retired.keeps(answered)) {
            *at = due;
        }
    }

    /// Takes those whose time has come.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<Retired> {
        overdue(&mut self.0, now)
    }

    /// The times of their ends.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.0.iter().map(|(_, at)| *at)
    }
}

impl Circuits {
    /// Keeps the identifier of an answered request until the peer has the answer.
    pub(crate) fn retire(&self, request: Incoming) {
        self.add_retired(Retired::Request(Arc::new(request)), RETIRED);
    }

    /// As [`Self::retire`], of a reciprocal request that makes a circuit, of a `weft` peer: until
    /// the peer has confirmed the answer, at most 10 s. The user gets [`CircuitUser::peer_ended`]
    /// if the exchange fails before. Inside an event.
    pub(crate) fn await_confirmation(&self, request: Incoming, user: Weak<dyn CircuitUser>) {
        let object = request.object();
        let answered = Answered::new(&self.this, request, user);
        let target: Weak<Answered> = Arc::downgrade(&answered);
        self.driver.dispatcher().insert(object, target);
        self.add_retired(Retired::Answered(answered), RECIPROCAL);
    }

    /// The peer has confirmed an answer, or the exchange has ended: the identifier of the request
    /// ends like those of other requests.
    pub(in crate::conn) fn note_confirmation(&self, answered: &Answered) {
        self.state.lock().retired.confirm(answered);
        self.driver.wake(&self.turn);
    }

    /// As [`Self::retire`], of a request of this side. libfabric's provider requires that the side
    /// with the target disconnects first.
    pub(in crate::conn) fn retire_id(&self, id: Arc<CmId>) {
        self.add_retired(Retired::Dial(id), RETIRED);
    }

    fn add_retired(&self, retired: Retired, span: Duration) {
        self.state.lock().retired.add(retired, span);
        self.driver.wake(&self.turn);
    }

    /// Ends identifiers whose time has come. The driver's thread.
    pub(super) fn end_ids(&self, due: Vec<Retired>) {
        for retired in due {
            match retired {
                Retired::Request(_) => {}
                Retired::Answered(answered) => {
                    let mut registry = self.driver.dispatcher().registry();
                    // a confirmation that is still missing may be lost: no end of the connection
                    registry.remove(answered.object());
                }
                Retired::Dial(id) => self.drop_id(id),
            }
        }
    }

    /// The number of identifiers of answered requests that have not ended.
    #[cfg(test)]
    pub(crate) fn retired(&self) -> usize {
        self.state.lock().retired.0.len()
    }

    /// Ends the identifiers of answered requests, as a process that ends.
    #[cfg(test)]
    pub(crate) fn end_retired(&self) {
        let retired = std::mem::take(&mut self.state.lock().retired);
        let mut registry = self.driver.dispatcher().registry();
        for (retired, _) in &retired.0 {
            if let Retired::Answered(answered) = retired {
                registry.remove(answered.object());
            }
        }
        drop(registry);
        drop(retired);
    }
}
