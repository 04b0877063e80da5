//! The end of an executor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Executor;
use crate::rdm::circuit_cm::XrcStep;
use crate::rdm::link::LinkKey;
use crate::rdm::link_cm::Step;
use crate::rdm::receives::Left;
use crate::rdm::shared::Shared;

/// How long a close waits for READs of its sources that are being executed (softverbs), and the
/// period of its attempts.
const WITHDRAWAL: Duration = Duration::from_secs(5);
const WITHDRAWAL_PERIOD: Duration = Duration::from_millis(1);

impl Executor {
    /// Disconnects all links and releases the objects of the device. The receives and the
    /// operations under way end without entries: nobody could read them. Returns what
    /// a shared receive context reports.
    pub(in crate::rdm) fn close(mut self, shared: &Shared) -> Left {
        let keys: Vec<LinkKey> = self.links.keys().collect();
        let mut steps = std::mem::take(&mut self.steps);
        // dials and acceptances that were not begun
        steps.retain(|step| match step {
            Step::Dial(..) | Step::Accept(..) => false,
            Step::Xrc(step) => matches!(step, XrcStep::LeaveEnd(..)),
            _ => true,
        });
        steps.append(&mut self.withdrawing);
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
                let source = self.sources.withdraw(source);
                self.steps.push(Step::Withdraw(source, None));
            }
        }
        for key in self.rx.arrivals.keys_where(|it| it.push.is_some()) {
            let push = self.rx.arrivals.get_mut(key).and_then(|it| it.push.take());
            let busy = push.and_then(|push| push.sink.end(&mut self.sources).err());
            self.steps
                .extend(busy.map(|sink| Step::EndSink(sink, None)));
        }
        let recent = self.sources.take_recent();
        self.steps
            .extend(recent.map(|source| Step::Withdraw(Some(source), None)));
        steps.append(&mut self.steps);
        steps.sort_by_key(Step::is_last);
        let limit = Instant::now() + WITHDRAWAL;
        while !steps.is_empty() {
            steps = steps
                .into_iter()
                .filter_map(|step| step.execute(shared))
                .collect();
            if Instant::now() >= limit {
                break;
            }
            if !steps.is_empty() {
                std::thread::sleep(WITHDRAWAL_PERIOD);
            }
        }
        for step in steps {
            if let Step::Withdraw(Some(source), _) = step {
                source.abandon();
            }
        }
        // the queue pairs are destroyed
        self.pulls.end_all();
        self.rx.leave()
    }
}
