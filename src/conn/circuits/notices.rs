//! The notices by which endpoints end their connections: those of this side, until the peers have
//! answered or cannot access anything any more, and those of peers, until this side answers.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::super::circuit::{Circuit, CircuitUser};
use super::super::end_notice::{Keep, Notice};
use super::{BACKLOG, Circuits, Step, overdue};
use crate::verbs::CmId;
use crate::wire::msg_xrc::End;

/// How long a notice of the end may take, and how long the close of the domain, or of a context,
/// waits for notices.
const NOTICE: Duration = Duration::from_secs(1);
/// When a notice without an answer is repeated, and the target of its peer is looked for. The time
/// doubles up to the second.
const REPEAT: Duration = Duration::from_secs(1);
const LONGEST_REPEAT: Duration = Duration::from_secs(64);
/// Maximum number of such notices. Beyond it, the peer of the oldest one is cut off.
const LINGERING: usize = 1024;
/// How often the driver examines whether a notice can be answered.
const LOOK: Duration = Duration::from_millis(1);

/// A notice that is repeated. Nothing waits for it.
#[derive(Debug)]
struct Lingering {
    notice: Arc<Notice>,
    due: Instant,
    /// The time from then to the next repetition.
    pause: Duration,
}

impl Lingering {
    fn new(notice: Arc<Notice>) -> Self {
        Self {
            notice,
            due: Instant::now() + REPEAT,
            pause: 2 * REPEAT,
        }
    }
}

/// A peer's notice of the end. When it is answered, the peer may end its receive queue, which
/// breaks the circuit of a request to it: so the requests of the endpoint complete before, if they
/// can.
#[derive(Debug)]
struct Unanswered {
    id: CmId,
    end: End,
    user: Weak<dyn CircuitUser>,
    due: Instant,
}

fn answer_notice(id: &CmId, end: &End) {
    // the peer has nothing to do with an error
    let _ = id.answer_service(&end.encode());
}

/// The notices of a domain.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// Notices under way, each with the end of the wait for its answer.
    awaited: Vec<(Arc<Notice>, Instant)>,
    /// Notices without an answer, whose peers may still access what is kept for them; oldest first.
    lingering: Vec<Lingering>,
    /// Notices of peers that are not answered yet.
    unanswered: Vec<Unanswered>,
}

impl Notices {
    /// Whether a notice has neither an answer nor failed, and its time has not passed.
    pub(super) fn are_awaited(&self) -> bool {
        !self.awaited.is_empty()
    }

    fn is_awaited(&self, notice: &Arc<Notice>) -> bool {
        let mut awaited = self.awaited.iter();
        awaited.any(|(other, _)| Arc::ptr_eq(other, notice))
    }

    /// The notices under way that prolong the life of the circuit.
    fn that_retain(&self, circuit: &Arc<Circuit>) -> Vec<Arc<Notice>> {
        let notices = self.awaited.iter().map(|(notice, _)| notice);
        let notices = notices.filter(|notice| notice.retains(circuit));
        notices.map(Arc::clone).collect()
    }

    /// No answer to the notice is awaited any more.
    fn end_wait(&mut self, notice: &Arc<Notice>) {
        self.awaited
            .retain(|(other, _)| !Arc::ptr_eq(other, notice));
    }

    fn remove(&mut self, notice: &Arc<Notice>) {
        self.end_wait(notice);
        self.lingering
            .retain(|other| !Arc::ptr_eq(&other.notice, notice));
    }

    /// The notice is repeated from now on. Returns the oldest one if there are too many.
    fn linger(&mut self, notice: &Arc<Notice>) -> Option<Arc<Notice>> {
        self.end_wait(notice);
        self.lingering.push(Lingering::new(Arc::clone(notice)));
        (self.lingering.len() > LINGERING).then(|| self.lingering.remove(0).notice)
    }

    /// The repeated notices whose time has come. Sets the times of their next repetitions.
    fn take_due(&mut self, now: Instant) -> Vec<Arc<Notice>> {
        let mut due = Vec::new();
        for lingering in &mut self.lingering {
            if lingering.due <= now {
                lingering.due = now + lingering.pause;
                lingering.pause = LONGEST_REPEAT.min(2 * lingering.pause);
                due.push(Arc::clone(&lingering.notice));
            }
        }
        due
    }

    /// The time of the next repetition.
    fn next_repeat(&self) -> Option<Instant> {
        self.lingering.iter().map(|lingering| lingering.due).min()
    }

    /// Takes the notices under way whose time has passed.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<Arc<Notice>> {
        overdue(&mut self.awaited, now)
    }

    /// When the waits for answers end.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Instant> {
        self.awaited.iter().map(|(_, at)| *at)
    }

    /// Without a driver, what is kept for a peer stays until the domain is closed.
    fn keep(&mut self, notice: Arc<Notice>) {
        if let Some(keep) = notice.keep() {
            keep.give_up();
            self.lingering.push(Lingering::new(notice));
        }
    }

    /// The driver has failed: no answer is awaited any more. Returns the notices that were under
    /// way.
    pub(super) fn give_up(&mut self) -> Vec<Arc<Notice>> {
        let notices = std::mem::take(&mut self.awaited).into_iter();
        let notices: Vec<_> = notices.map(|(notice, _)| notice).collect();
        for notice in &notices {
            self.keep(Arc::clone(notice));
        }
        notices
    }
}

impl Circuits {
    /// [`NOTICE`], unless a test has replaced it.
    pub(super) fn notice_limit(&self) -> Duration {
        #[cfg(test)]
        if let Some(limit) = self.notice_limit.get() {
            return *limit;
        }
        NOTICE
    }

    /// Notifies the peer at this address that a connection has ended. `keep` lives until the peer
    /// has answered, or after 1 s until it is not [needed](Keep::is_needed) any more: memory that
    /// the peer may access until then. `circuit`: the connection's, to which nothing is posted any
    /// more; it lives until the peer has answered, at most 1 s.
    pub(crate) fn notify(
        &self,
        (from, to): (Option<SocketAddr>, SocketAddr),
        end: End,
        keep: Option<Box<dyn Keep>>,
        circuit: Option<Arc<Circuit>>,
    ) {
        self.send(Notice::new(
            &self.this,
            (from, to),
            end,
            None,
            keep,
            circuit,
        ));
    }

    /// No notice under way prolongs the life of the circuit: requests are posted to it that the
    /// device has not flushed, so it ends with its users.
    pub(crate) fn release(&self, circuit: &Arc<Circuit>) {
        let notices = self.state.lock().notices.that_retain(circuit);
        notices.iter().for_each(|notice| notice.release());
    }

    /// Asks whether the process lives that takes notices at the second address: a living one
    /// answers a notice that names no endpoint. If it has ended, the user gets
    /// [`CircuitUser::process_ended`].
    pub(crate) fn ask(&self, path: (Option<SocketAddr>, SocketAddr), user: Weak<dyn CircuitUser>) {
        let nobody = End { to: 0, from: 0 };
        let notice = Notice::new(&self.this, path, nobody, Some(user), None, None);
        self.send(notice);
    }

    fn send(&self, notice: Arc<Notice>) {
        let mut state = self.state.lock();
        // a forked child has no driver
        if state.closed || !self.driver.is_of_this_process() {
            return;
        }
        if state.failed {
            state.notices.keep(Arc::clone(&notice));
            drop(state);
            return notice.release();
        }
        let due = Instant::now() + self.notice_limit();
        state.notices.awaited.push((Arc::clone(&notice), due));
        state.steps.push_back(Step::Notify(notice));
        drop(state);
        self.driver.wake(&self.turn);
    }

    /// Waits until all notices are answered, at most 1 s. Not inside an event, and not in the
    /// driver's thread.
    pub(crate) fn await_notices(&self) {
        let deadline = Instant::now() + self.notice_limit();
        let mut state = self.state.lock();
        while state.notices.are_awaited() && self.driver.is_of_this_process() {
            if self.ended.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
    }

    pub(super) fn end_notice(&self, notice: &Arc<Notice>) {
        if let Some(id) = notice.take_id() {
            self.drop_id(id);
        }
        notice.release();
        self.state.lock().notices.remove(notice);
        self.ended.notify_all();
    }

    pub(super) fn fail_notice(&self, notice: &Arc<Notice>) {
        if let Some(id) = notice.take_id() {
            self.drop_id(id);
        }
        let awaited = self.state.lock().notices.is_awaited(notice);
        if awaited {
            self.linger(notice);
        }
    }

    /// A notice has no answer. While requests of the peer may arrive, it stays, and is repeated.
    pub(super) fn linger(&self, notice: &Arc<Notice>) {
        // before `is_needed`, which may wait for other processes
        notice.release();
        let Some(keep) = notice.keep().filter(|keep| keep.is_needed()) else {
            return self.end_notice(notice);
        };
        keep.give_up();
        let mut state = self.state.lock();
        let oldest = match state.closed {
            true => {
                state.notices.end_wait(notice);
                None
            }
            false => state.notices.linger(notice),
        };
        drop(state);
        self.ended.notify_all();
        if let Some(oldest) = oldest {
            if let Some(keep) = oldest.keep() {
                keep.cut_off();
            }
            self.end_notice(&oldest);
        }
    }

    /// Ends the notices whose peers' requests cannot arrive any more, and repeats the others that
    /// are due. Returns the time of the next call.
    pub(super) fn repeat_notices(&self, now: Instant) -> Option<Instant> {
        let due = self.state.lock().notices.take_due(now);
        for notice in due {
            if notice.keep().is_none_or(|keep| !keep.is_needed()) {
                self.end_notice(&notice);
                continue;
            }
            if let Some(id) = notice.take_id() {
                self.drop_id(id);
            }
            notice.send(self);
        }
        self.state.lock().notices.next_repeat()
    }

    /// A peer's notice, for a user of this domain or for none.
    pub(super) fn take_notice(&self, id: CmId, end: End, user: Option<&Arc<dyn CircuitUser>>) {
        let mut state = self.state.lock();
        let unanswered = &mut state.notices.unanswered;
        // each connection has one; a peer that sends more does not use up the memory
        let Some(user) = user.filter(|_| unanswered.len() < BACKLOG) else {
            drop(state);
            return answer_notice(&id, &end);
        };
        // answered behind the user's `send_end_notice`
        unanswered.push(Unanswered {
            id,
            end,
            user: Arc::downgrade(user),
            due: Instant::now() + self.notice_limit(),
        });
        drop(state);
        self.driver.wake(&self.turn);
    }

    /// Answers the notices of peers to which nothing is under way any more. Returns the time of the
    /// next look.
    pub(super) fn answer_notices(&self, now: Instant) -> Option<Instant> {
        let mut held = std::mem::take(&mut self.state.lock().notices.unanswered);
        let shares_with_requests = |user: Arc<dyn CircuitUser>| {
            if user.has_requests() {
                user.progress_requests();
            }
            // the requests of a lone user are left on its circuit, which no other one joins then
            user.has_requests() && !user.retire_circuit_if_alone()
        };
        held.retain(|notice| {
            let waits = notice.due > now && notice.user.upgrade().is_some_and(shares_with_requests);
            if !waits {
                answer_notice(&notice.id, &notice.end);
            }
            waits
        });
        let waits = !held.is_empty();
        self.state.lock().notices.unanswered.append(&mut held);
        waits.then(|| now + LOOK)
    }

    /// Sets the limit of notices, once.
    #[cfg(test)]
    pub(crate) fn set_notice_limit(&self, limit: Duration) {
        self.notice_limit.set(limit).expect("not set yet");
    }

    /// The numbers of notices that are awaited, and of those that linger.
    #[cfg(test)]
    pub(crate) fn notices(&self) -> (usize, usize) {
        let notices = &self.state.lock().notices;
        (notices.awaited.len(), notices.lingering.len())
    }
}
