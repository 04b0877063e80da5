//! SQD: no request begins any more, and those that have begun are finished (IB specification, 10.3.1, "Send Queue
//! Drain").
//!
//! Requests run when they are posted, in order. So at most the first of those that wait has begun, and all that a
//! receiver is just taking.

use rdma_core_sys::{IBV_EVENT_SQ_DRAINED, IBV_QPS_RTS, IBV_QPS_SQD};

use super::{Qp, SendQueue};

/// How far a queue in SQD still runs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    /// Position behind the last request that has begun.
    to: u32,
    /// The application wants to hear when it has ended.
    tells: bool,
}

impl SendQueue {
    fn has_begun(&self) -> bool {
        self.drain.to.wrapping_sub(self.executed).cast_signed() > 0
    }
}

impl Qp {
    /// Whether the first of the requests that wait may run.
    pub(super) fn goes_on(&self, sq: &SendQueue) -> bool {
        sq.executed != sq.head
            && match self.state() {
                IBV_QPS_RTS => true,
                IBV_QPS_SQD => sq.has_begun(),
                _ => false,
            }
    }

    /// Position behind the last request that may run.
    pub(super) fn runs_to(&self, sq: &SendQueue) -> u32 {
        if self.state() == IBV_QPS_SQD {
            sq.drain.to
        } else {
            sq.head
        }
    }

    /// The queue pair goes from RTS to SQD; what a receiver could take was taken back.
    pub(super) fn begin_drain(&self, sq: &mut SendQueue, tells: bool) {
        let to = if sq.parked.live() {
            sq.parked.end()
        } else if sq.executed != sq.head && sq.wait.is_some() {
            sq.executed.wrapping_add(1)
        } else {
            sq.executed
        };
        sq.drain = Drain { to, tells };
    }

    pub(super) fn is_draining(&self, sq: &SendQueue) -> bool {
        self.state() == IBV_QPS_SQD && sq.has_begun()
    }

    /// Tells the application, once, where nothing that has begun is left.
    pub(super) fn note_drained(&self, sq: &mut SendQueue) {
        if sq.drain.tells && self.state() == IBV_QPS_SQD && !sq.has_begun() {
            sq.drain.tells = false;
            self.raise(IBV_EVENT_SQ_DRAINED);
        }
    }
}
