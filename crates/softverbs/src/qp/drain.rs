//! SQD: no more requests begin, and requests that have begun are finished (IB specification,
//! 10.3.1, "Send Queue Drain").
//!
//! Requests are executed in order when they are posted. So only the first waiting request, and
//! pending messages that a receiver is taking, can have begun.

use rdma_core_sys::{IBV_EVENT_SQ_DRAINED, IBV_QPS_RTS, IBV_QPS_SQD};

use super::{Qp, SendQueue};

/// The requests that a queue in SQD still executes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    /// Position behind the last request that has begun.
    to: u32,
    /// The application requested the event at the end of the drain (`en_sqd_async_notify`).
    tells: bool,
}

impl SendQueue {
    fn has_begun(&self) -> bool {
        self.drain.to.wrapping_sub(self.executed).cast_signed() > 0
    }
}

impl Qp {
    /// Whether the first waiting request may be executed.
    pub(super) fn may_execute(&self, sq: &SendQueue) -> bool {
        sq.executed != sq.head
            && match self.state() {
                IBV_QPS_RTS => true,
                IBV_QPS_SQD => sq.has_begun(),
                _ => false,
            }
    }

    /// Position behind the last request that may be executed.
    pub(super) fn runs_to(&self, sq: &SendQueue) -> u32 {
        if self.state() == IBV_QPS_SQD {
            sq.drain.to
        } else {
            sq.head
        }
    }

    /// Moves the queue pair from RTS to SQD. The caller has withdrawn the pending messages, unless
    /// a receiver holds one.
    pub(super) fn begin_drain(&self, sq: &mut SendQueue, tells: bool) {
        let to = if sq.pending.live() {
            sq.pending.end()
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

    /// Raises `IBV_EVENT_SQ_DRAINED` once, when no begun request is left.
    pub(super) fn note_drained(&self, sq: &mut SendQueue) {
        if sq.drain.tells && self.state() == IBV_QPS_SQD && !sq.has_begun() {
            sq.drain.tells = false;
            self.raise(IBV_EVENT_SQ_DRAINED);
        }
    }
}
