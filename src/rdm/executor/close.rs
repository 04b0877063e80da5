//! The end of an executor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Executor;
use crate::mr::Withdrawn;
use crate::rdm::core::link::LinkKey;
use crate::rdm::receives::EndedReceives;
use crate::rdm::step::Step;
use crate::rdm::table_keys::ArrivalKey;
use crate::rdm::xrc::circuit_cm::XrcStep;

/// How long a close waits for READs of its sources and WRITEs to its receives that are being
/// executed (softverbs), and the period of its attempts.
const WITHDRAWAL: Duration = Duration::from_secs(5);
const WITHDRAWAL_PERIOD: Duration = Duration::from_millis(1);

/// The registration of a part of a receive that its sender, or another peer, is writing, and the
/// message that was arriving there.
pub(super) type ClosingSink = (Withdrawn, ArrivalKey);

impl Executor {
    /// The endpoint begins to close. Receives that have failed, and that the driver would report
    /// when no peer writes to them any more, count as those of messages that are arriving: they
    /// return to a shared receive context.
    pub(in crate::rdm) fn take_sinks(&mut self) {
        let mut steps = std::mem::take(&mut self.steps);
        steps.extend(self.withdrawing.drain(..).map(|(_, step)| step));
        for step in steps {
            match step {
                Step::EndSink(sink, arrival) => {
                    self.rx.failing -= 1;
                    match self.rx.arrivals.insert(*arrival) {
                        Some(key) => self.sinks.push((sink, key)),
                        // 2^24 messages are arriving
                        None => sink.abandon(),
                    }
                }
                step => self.steps.push(step),
            }
        }
    }

    /// Disconnects all links and releases the objects of the device. The receives and the
    /// operations under way end without entries: no call could read them. Returns what
    /// a shared receive context reports. `execute`: executes steps, each with its time, and returns
    /// those that are to be executed again.
    pub(in crate::rdm) fn close(
        mut self,
        execute: impl Fn(Vec<(u64, Step)>) -> Vec<(u64, Step)>,
    ) -> EndedReceives {
        let keys: Vec<LinkKey> = self.links.keys().collect();
        let mut steps = std::mem::take(&mut self.steps);
        // dials and acceptances that were not begun
        steps.retain(|step| match step {
            Step::Dial(..) | Step::Accept(..) => false,
            Step::Xrc(step) => matches!(step, XrcStep::CloseBlock(..)),
            _ => true,
        });
        steps.extend(self.withdrawing.drain(..).map(|(_, step)| step));
        for key in keys {
            if let Some(link) = self.links.get_mut(key)
                && let Some(cm) = &link.cm
            {
                steps.push(Step::End(Arc::clone(cm), link.qp.clone()));
            }
            self.remove_link(key);
        }
        steps.extend(self.close_circuits());
        for key in self.tx.keys_where(|op| op.source.is_some()) {
            if let Some(source) = self.tx.get_mut(key).and_then(|op| op.source.take()) {
                let source = self.source_keys.withdraw(source);
                self.steps.push(Step::Withdraw(source, None));
            }
        }
        for key in self.rx.arrivals.keys_where(|it| it.push.is_some()) {
            let push = self.rx.arrivals.get_mut(key).and_then(|it| it.push.take());
            let busy = push.and_then(|push| push.sink.end(&mut self.source_keys).err());
            self.sinks.extend(busy.map(|sink| (sink, key)));
        }
        let recent = self.source_keys.take_recent();
        self.steps
            .extend(recent.map(|source| Step::Withdraw(Some(source), None)));
        steps.append(&mut self.steps);
        // all of one time: each report is behind the end of each link
        let mut steps: Vec<_> = steps.into_iter().map(|step| (0, step)).collect();
        let mut sinks = std::mem::take(&mut self.sinks);
        let limit = Instant::now() + WITHDRAWAL;
        while !steps.is_empty() || !sinks.is_empty() {
            steps = execute(steps);
            let sinks_left = sinks.into_iter();
            sinks = sinks_left
                .filter_map(|(sink, key)| Some((sink.end().err()?, key)))
                .collect();
            if Instant::now() >= limit {
                break;
            }
            if !steps.is_empty() || !sinks.is_empty() {
                std::thread::sleep(WITHDRAWAL_PERIOD);
            }
        }
        for (_, step) in steps {
            if let Step::Withdraw(Some(source), _) = step {
                source.abandon();
            }
        }
        for (sink, key) in sinks {
            sink.abandon();
            self.rx.end_in_leave(key);
        }
        // the queue pairs are destroyed
        self.pulls.end_all();
        self.rx.leave()
    }
}
