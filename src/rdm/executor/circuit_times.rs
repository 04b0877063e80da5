//! What the driver does for circuits and targets when its time has come: the end of those that are
//! unused, silent or stalled, and further dials. `docs/protocol-xrc.md`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::circuits::{FLUSH, PAUSES};
use super::handshake::LINK_REPLY_WAIT;
use super::{Executor, Todo};
use crate::log::info_log;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::{self, Core};
use crate::rdm::step::Step;
use crate::rdm::xrc::circuit_cm::{Held, XrcStep};
use crate::rdm::xrc::circuit_queue::{CircuitQueue, Failing, WATCH};
use crate::rdm::xrc::ports::HeldTarget;

/// How long a target without links is held.
const LOOSE: Duration = Duration::from_secs(2);

impl Executor {
    /// Ends what is not needed any more, and exchanges without an answer. Returns the time of the
    /// next call.
    pub(in crate::rdm) fn tend_circuits(
        &mut self,
        core: &mut Core<Self>,
        empty: bool,
        now: Instant,
    ) -> Option<Instant> {
        let mut next = self.end_silent_exchanges(core, now);
        next = next
            .into_iter()
            .chain(self.end_silent_circuits(core, now))
            .min();
        next = next.into_iter().chain(self.choose_after_pauses(now)).min();
        next = next.into_iter().chain(self.dial_seconds(now)).min();
        next = next.into_iter().chain(self.watch_circuits(now)).min();
        next = next.into_iter().chain(self.end_unused(now)).min();
        next = next.into_iter().chain(self.end_unattached(now)).min();
        self.arm_receives();
        let xrc = self.xrc.as_mut()?;
        let mut later = |time: Instant| next = Some(next.map_or(time, |it: Instant| it.min(time)));
        let mut steps = Vec::new();
        let mut unfinished = Vec::new();
        for circuit in xrc.ending.clone() {
            let Some(queue) = xrc.queue_mut(circuit) else {
                continue;
            };
            let Some(Failing { since, done, .. }) = queue.failing else {
                continue;
            };
            if !done || !queue.is_flushed() && now < since + FLUSH {
                // at once when its queue pair is in the error state
                later((since + FLUSH).max(now + PAUSES.0));
                continue;
            }
            if let Some(queue) = xrc.remove_queue(circuit) {
                unfinished.push((circuit, queue));
            }
        }
        for queue in xrc.proven() {
            steps.push(XrcStep::EndCircuitCm(queue));
        }
        // requests that wait for a place name them
        for waiting in &core.held {
            if let Held::Link(_, request) = &waiting.held
                && let Some(circuit) = request.circuit
                && let Some(target) = xrc.targets.get_mut(&circuit.target)
            {
                target.loose_since = now;
            }
        }
        // one through which the peer may have posted ends when all that has arrived was processed
        let (polled, cqe) = (self.polled, self.objects.cq.cqe());
        let closes = |held: &mut HeldTarget| {
            let done = held.failing.as_mut().filter(|failing| failing.done);
            let processed = done.is_some_and(|failing| {
                let earlier = *failing.polled.get_or_insert(polled);
                empty || polled.covers(earlier, cqe)
            });
            let unused = held.failing.is_none() && held.target.is_some();
            let unused = unused && now >= held.loose_since + LOOSE;
            held.is_loose() && (processed || unused)
        };
        for (_, held) in xrc.targets.extract_if(|_, held| closes(held)) {
            steps.push(XrcStep::CloseTarget(held.cm, held.target));
        }
        for held in xrc.targets.values().filter(|held| held.is_loose()) {
            match held.failing {
                Some(_) => later(now + PAUSES.0),
                None => later(held.loose_since + LOOSE),
            }
        }
        for (_, cm, number, initiator) in xrc.reopens.extract_if(.., |(time, ..)| *time <= now) {
            steps.push(XrcStep::OpenTarget(cm, number, initiator));
        }
        xrc.reopens.iter().for_each(|(time, ..)| later(*time));
        for (circuit, mut queue) in unfinished {
            let sent = queue.queue.drain().collect();
            let unfinished = self.take_unfinished(circuit, sent);
            steps.push(XrcStep::DestroyCircuit(queue.cm, queue.qp, unfinished));
        }
        self.steps.extend(steps.into_iter().map(Step::Xrc));
        next
    }

    /// Ends the circuits that have had no link for [`UNUSED`].
    fn end_unused(&mut self, now: Instant) -> Option<Instant> {
        let xrc = self.xrc.as_mut()?;
        let mut next: Option<Instant> = None;
        for circuit in xrc.keys() {
            let Some(xrc) = &mut self.xrc else {
                break;
            };
            let unused = xrc.circuits.is_unused(circuit);
            let Some(queue) = xrc.queue_mut(circuit) else {
                continue;
            };
            match queue.unused_until {
                Some(until) if unused && until > now => {
                    next = Some(next.map_or(until, |next| next.min(until)));
                }
                Some(_) => {
                    queue.unused_until = None;
                    if unused {
                        self.break_circuit(circuit);
                    }
                }
                None => {}
            }
        }
        next
    }

    /// Ends the dialled links on which ATTACH has not arrived in time: their peers may have ended,
    /// and the device does not report that, because no target of them is known.
    fn end_unattached(&mut self, now: Instant) -> Option<Instant> {
        let xrc = self.xrc.as_mut()?;
        let links = &mut self.links;
        xrc.attaches.retain(|(time, link)| {
            let record = links.get_open(*link);
            let waits = record.and_then(|record| record.port.as_ref());
            let waits = waits.is_some_and(|port| port.from.is_none());
            if waits && *time <= now {
                self.todo.push_back(Todo::Broken(*link));
            }
            waits && *time > now
        });
        xrc.attaches.iter().map(|(time, _)| *time).min()
    }

    /// Gives up circuits whose acceptors do not answer.
    fn end_silent_circuits(&mut self, core: &mut Core<Self>, now: Instant) -> Option<Instant> {
        let xrc = self.xrc.as_ref()?;
        let mut next: Option<Instant> = None;
        let mut silent = Vec::new();
        for queue in xrc
            .queues()
            .filter(|queue| xrc.circuits.is_dialled(queue.key()))
        {
            match queue.dialled + LINK_REPLY_WAIT {
                limit if limit <= now => silent.push(queue.key()),
                limit => next = next.into_iter().chain([limit]).min(),
            }
        }
        for circuit in silent {
            self.circuit_not_dialled(core, circuit, core::Failure::Silent, None);
        }
        next
    }

    /// Ends circuits on which no request completes although the device reports no error: the
    /// process that has the first one is stopped and has no receive, and the others wait for it.
    fn watch_circuits(&mut self, now: Instant) -> Option<Instant> {
        let xrc = self.xrc.as_mut()?;
        let mut watches = false;
        let stalled = xrc.watch(&self.links, now, &mut watches);
        for circuit in stalled {
            info_log!(EpData, "circuit {circuit:?} does not proceed");
            self.break_circuit(circuit);
        }
        watches.then_some(now + WATCH)
    }

    /// The driver watches the circuit of a link to which RMA was posted.
    #[inline]
    pub(super) fn watch_rma(&mut self, link: LinkKey) {
        if self.xrc.is_none() {
            return;
        }
        let circuit = self.port_mut(link).and_then(|port| port.circuit);
        let queue = circuit.and_then(|circuit| self.xrc.as_mut()?.queue_mut(circuit));
        if queue.is_some_and(CircuitQueue::note_rma_posted) {
            self.begin_watch();
        }
    }

    /// A request was posted to a circuit that the driver does not watch yet: it begins.
    #[cold]
    pub(super) fn begin_watch(&mut self) {
        self.xrc_step(XrcStep::Look);
    }

    /// Fewer receives are posted than the peers may use, so the device shall report when they run
    /// out: asks the driver to arm that, if it has not for about as many. While each packet that
    /// may come has a receive, the driver arms it when it runs.
    #[cold]
    pub(super) fn ask_to_arm(&mut self) {
        let quarter = self.receives_quarter();
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        if quarter.is_some_and(|limit| limit >= 2 * xrc.limit) && !xrc.arms {
            xrc.arms = true;
            self.xrc_step(XrcStep::Look);
        }
    }

    /// Makes the device report when the receives run out, at a quarter of those that are posted.
    fn arm_receives(&mut self) {
        let (quarter, srq) = (self.receives_quarter(), Arc::clone(&self.objects.srq));
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        xrc.arms = false;
        if let Some(limit) = quarter
            && limit >= 2 * xrc.limit
        {
            xrc.limit = limit;
            self.xrc_step(XrcStep::Arm(srq, limit));
        }
    }

    /// Dials further circuits for links that wait for one whose acceptor does not answer.
    fn dial_seconds(&mut self, now: Instant) -> Option<Instant> {
        let xrc = self.xrc.as_mut()?;
        let mut next: Option<Instant> = None;
        for key in xrc.keys() {
            let Some(xrc) = &mut self.xrc else {
                break;
            };
            if !xrc.circuits.has_waiting(key) {
                continue;
            }
            let at = xrc.queue_mut(key).map_or(now, |queue| queue.second_at);
            if at > now {
                next = Some(next.map_or(at, |next| next.min(at)));
                continue;
            }
            if let Some(queue) = xrc.queue_mut(key) {
                queue.second_at = now + queue.pause;
                queue.pause *= 2;
            }
            let links = &mut self.links;
            let ports = |link| Some(links.get_mut(link)?.port.as_ref()?.address);
            let second = xrc.circuits.dial_second(key, ports);
            if let Some((link, choice)) = second {
                xrc.counts.second_requests += 1;
                self.follow(link, choice);
                self.xrc_step(XrcStep::Look);
            }
        }
        next
    }

    /// Accepted links whose circuits could not be dialled choose again.
    fn choose_after_pauses(&mut self, now: Instant) -> Option<Instant> {
        let xrc = self.xrc.as_mut()?;
        let due = xrc.retries.extract_if(.., |(time, _)| *time <= now);
        for (_, link) in due.collect::<Vec<_>>() {
            self.choose_again(link);
        }
        let xrc = self.xrc.as_ref()?;
        xrc.retries.iter().map(|(time, _)| *time).min()
    }
}
