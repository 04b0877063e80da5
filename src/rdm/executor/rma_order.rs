//! The order of RMA operations, messages and atomics to one peer: which of them wait for which.
//! `docs/protocol-rdm.md`, "RMA".

use super::{Executor, Todo};
use crate::flags::Flags;
use crate::rdm::core::Core;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::operations::{Kind, Operation};
use crate::rdm::rma::RmaOp;
use crate::rdm::table_keys::{RmaKey, TxKey};

/// The place of an operation in the order of those to its peer.
#[derive(Clone, Copy, Debug)]
struct Position {
    peer: PeerKey,
    order: u64,
}

impl Position {
    /// Whether the operation at `order` to `peer` is an earlier one to the same peer.
    fn follows(self, peer: PeerKey, order: u64) -> bool {
        peer == self.peer && order < self.order
    }
}

impl Executor {
    /// Whether a message or an atomic waits for earlier RMA operations to the peer: with a fence,
    /// for those that are not complete; messages, if sends are ordered behind writes, for those
    /// that are not posted; both, for those with a fence that are not posted. With a fence they
    /// also wait for earlier messages and atomics that are not complete: RMA behind the fence is
    /// executed by the device and could overtake these.
    #[inline]
    pub(super) fn waits_for_rma(&mut self, link: LinkKey, op: TxKey) -> bool {
        let any = self.rma.ops.len() != 0 || self.rma.fences != 0;
        any && self.wait_behind_rma(link, op)
    }

    /// [`Self::waits_for_rma`]; the link of an operation that waits is listed in `blocked`.
    #[cold]
    fn wait_behind_rma(&mut self, link: LinkKey, op: TxKey) -> bool {
        let Some(op) = self.tx.get(op) else {
            return false;
        };
        if !op.is_of_application() {
            return false;
        }
        let message = matches!(op.kind, Kind::Message);
        let (peer, order, fence) = (op.peer, op.order, op.fence);
        let position = Position { peer, order };
        let waits = if fence {
            self.follows_any(position)
        } else {
            let fenced = |rma: &RmaOp| {
                position.follows(rma.peer, rma.order)
                    && !rma.is_posted()
                    && rma.request.flags.contains(Flags::FENCE)
            };
            let behind_fence = self.rma.first(peer).is_some() && self.rma.ops.any(fenced);
            let ordered = message && self.rma_config.before_sends;
            let first = if ordered {
                self.first_unposted_order(link, peer)
            } else {
                None
            };
            behind_fence || first.is_some_and(|first| first < order)
        };
        if waits && !self.rma.blocked.contains(&link) {
            self.rma.blocked.push(link);
        }
        waits
    }

    /// Called when a message or an atomic ends. Lists the posts that have waited for it: operations
    /// with a fence, and RMA that follows its fence.
    #[cold]
    pub(super) fn pass_fences(&mut self, key: TxKey) {
        let ended = self.tx.get(key).is_some_and(Operation::is_fenced);
        self.rma.fences -= u32::from(ended);
        let blocked = std::mem::take(&mut self.rma.blocked);
        self.todo.extend(blocked.into_iter().map(Todo::Room));
        if self.rma.has_work() {
            self.todo.push_back(Todo::RunRma);
        }
        if !self.own_sends.is_empty() {
            self.todo.push_back(Todo::RunOwnSends);
        }
    }

    /// The order of the first RMA operation to a peer that is not completely posted.
    fn first_unposted_order(&mut self, link: LinkKey, peer: PeerKey) -> Option<u64> {
        let initiator = self
            .links
            .get_mut(link)
            .and_then(|record| record.initiator.as_ref());
        let deferred = initiator.and_then(|initiator| initiator.first_deferred());
        // the context of a request is the key of its operation
        let deferred = deferred.map(|number| RmaKey::from_number(number as u32));
        let first = deferred.or_else(|| self.rma.first(peer));
        let first = first.and_then(|first| Some(self.rma.ops.get(first)?.order));
        first.into_iter().chain(self.rma.first_open(peer)).min()
    }

    /// Whether an RMA operation, a message or an atomic to the peer precedes a position.
    fn follows_any(&self, position: Position) -> bool {
        let sent = |other: &Operation| {
            other.is_of_application() && position.follows(other.peer, other.order)
        };
        let rma = |other: &RmaOp| position.follows(other.peer, other.order);
        self.rma.ops.any(rma) || self.tx.any(sent)
    }

    /// Whether an operation waits for earlier messages and atomics to the peer.
    pub(super) fn is_behind_sends(&self, core: &Core<Self>, op: &RmaOp) -> bool {
        let fence = op.request.flags.contains(Flags::FENCE);
        let position = Position {
            peer: op.peer,
            order: op.order,
        };
        if fence {
            return self.follows_any(position);
        }
        let fenced =
            |other: &Operation| other.is_fenced() && position.follows(other.peer, other.order);
        if self.rma.fences != 0 && self.tx.any(fenced) {
            return true;
        }
        if !self.rma_config.after_sends {
            return false;
        }
        let message = |op: &Operation| matches!(op.kind, Kind::Message);
        let first = core.first_unposted(op.peer, |op| self.tx.get(op).is_some_and(message));
        first.is_some_and(|first| self.tx.get(first).is_some_and(|it| it.order < op.order))
    }
}
