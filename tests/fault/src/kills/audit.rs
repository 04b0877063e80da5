//! Checks that all receives of the shared queue can be consumed while no other process sends: a
//! connection of the process with itself consumes each of them once.

use std::time::Instant;

use rdma_core_sys::{IBV_QPT_RC, IBV_WC_SUCCESS};

use super::bond::Common;
use super::layout::{Kind, id_of, parts_of};
use crate::device::{Op, Pair, Retries, Wc};
use crate::notice::LIMIT;

/// A connection of a process with itself.
pub(crate) struct Audit {
    from: Pair,
    to: Pair,
    taken: Vec<usize>,
    sent: usize,
    begin: Instant,
}

impl Audit {
    /// Sends as many messages as there are receives.
    pub(crate) fn begin(common: &Common, receives: usize) -> Self {
        let from = common.device.pair(IBV_QPT_RC, &common.queue, None);
        let shared = Some(&common.shared);
        let to = common.device.pair(IBV_QPT_RC, &common.queue, shared);
        let retries = Retries {
            timeout: 14,
            count: 7,
        };
        common.device.connect(&from, to.number(), retries);
        common.device.connect(&to, from.number(), retries);
        for place in 0..receives {
            let id = id_of(0, Kind::Send, place);
            from.post(id, Op::Inline, &common.target, 0, 8);
        }
        Self {
            from,
            to,
            taken: Vec::new(),
            sent: 0,
            begin: Instant::now(),
        }
    }

    /// Processes a completion of the audit; false if it is another one.
    pub(crate) fn take(&mut self, wc: &Wc) -> bool {
        if wc.number == self.from.number() {
            assert_eq!(wc.status, IBV_WC_SUCCESS, "a message to oneself");
            self.sent += 1;
        } else if wc.number == self.to.number() {
            assert_eq!(wc.status, IBV_WC_SUCCESS, "a receive of the shared queue");
            self.taken.push(parts_of(wc.id).2);
        } else {
            return false;
        }
        true
    }

    /// Whether all receives were consumed.
    pub(crate) fn is_over(&self, receives: usize) -> bool {
        let count = self.taken.len();
        assert!(
            self.begin.elapsed() < LIMIT,
            "{count} of {receives} receives of the shared queue are to be had"
        );
        count == receives && self.sent == receives
    }

    /// The receives to post again.
    pub(crate) fn end(self) -> Vec<usize> {
        self.from.destroy();
        self.to.destroy();
        self.taken
    }
}
