//! RMA and atomics of an endpoint: the operations, from the call of the application to the
//! completion, and those that wait to be posted. `executor/rma.rs` posts them.

use std::collections::VecDeque;
use std::time::Instant;

use atomic_ops::Op;

use super::completions::Fault;
use super::core::link::LinkKey;
use super::core::peer::PeerKey;
use super::core::recover::Unposted;
use super::core::{Core, Io};
use super::iov::{Iov, MAX_IOV};
use super::number_map::NumberMap;
use super::operations::Atomic;
use super::packet_memory::Slot;
use super::slab::Slab;
use super::table_keys::{ArrivalKey, RmaKey, RmaMark, TxKey};
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::initiator::RemoteIov;
use crate::mr::{Desc, Following};
use crate::queue::Completion;
use crate::queue::event_cell::Counted;
use crate::verbs::SendOpcode;
use crate::wire::rdm::Number;

/// Maximum number of remote ranges of an operation.
pub(super) const MAX_RMA_IOV: usize = 4;

/// Remote CQ data of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// None, or the packet is complete.
    No,
    /// The packet follows the completion of the write.
    Due(u64),
    /// The packet was passed to the core.
    Sent,
}

/// What is known of the execution of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Executed,
    NotExecuted,
    Unknown,
}

/// What the requests of an operation are, apart from the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) opcode: SendOpcode,
    /// Flags of the call that the initiator examines: inject, fence, commit.
    pub(super) flags: Flags,
    /// Flags of the completion.
    pub(super) completion_flags: Flags,
    /// Operands of an atomic.
    pub(super) compare_add: u64,
    pub(super) swap: u64,
}

/// An atomic that the device executes, apart from its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceAtomic {
    pub(super) atomic: Atomic,
    /// Size of the operands in bytes; without any the packet of the atomic has no payload.
    pub(super) operands: usize,
}

/// An operation.
#[derive(Debug)]
pub(super) struct RmaOp {
    pub(super) request: Request,
    pub(super) peer: PeerKey,
    /// Place among all operations of the endpoint, in the order of the calls.
    pub(super) order: u64,
    pub(super) context: usize,
    /// Whether success has an entry for the application.
    pub(super) wanted: bool,
    /// The local buffers, and their descriptors.
    pub(super) iov: Iov,
    pub(super) desc: [Desc; MAX_IOV],
    /// Number of local buffers.
    pub(super) count: usize,
    /// The remote ranges.
    pub(super) remote: [RemoteIov; MAX_RMA_IOV],
    pub(super) ranges: usize,
    pub(super) notice: Notice,
    /// A copy of injected data, to which `iov` refers; the memory of an atomic
    /// (`executor/elements.rs`).
    pub(super) slot: Option<Slot>,
    /// An atomic that the device executes. `iov`: the buffers for the earlier values.
    pub(super) atomic: Option<DeviceAtomic>,
    /// The core holds the peer for it.
    pub(super) held: bool,
    /// It is in [`Rma::waiting`].
    pub(super) queued: bool,
    /// The range, and the offset in it, from which on nothing is posted.
    pub(super) next: (usize, usize),
    /// Number of parts that are posted or deferred, and not complete.
    pub(super) parts: u32,
    /// Number of parts that were executed. Parts complete in their order.
    pub(super) executed: u32,
    /// The link to which they were posted, as long as it has a record: the key of a later link can
    /// be the same.
    pub(super) link: Option<LinkKey>,
    /// They were posted to a link that has no record any more.
    pub(super) link_gone: bool,
    /// The number of the first packet that is posted to the link behind the operation. `None`:
    /// packets of the link are not ordered with its requests, or a part was deferred.
    pub(super) first_packet_after: Option<Number>,
    /// All packets before this number that the peer had not processed when the link became the
    /// out-link were posted to the link before the operation. `None`: none is known.
    pub(super) packets_before: Option<Number>,
    /// *expected* of the terms of the first out-link behind the one to which parts were posted. The
    /// peer has processed no later packet of that one.
    pub(super) expected_after: Option<Number>,
    /// Requests of the first part that is not complete were executed, and further ones follow:
    /// those for other buffers of the region, or the change of an atomic's event cell.
    pub(super) begun: bool,
    /// The first failure.
    pub(super) fault: Option<Fault>,
    /// Parts were not executed, because their link has broken before.
    pub(super) again: bool,
    /// Parts may have been executed or not.
    pub(super) uncertain: bool,
    /// If it could not be posted at once: the count of doubts about the peer's address then.
    pub(super) doubts: Option<u32>,
    /// RMA of the endpoint to itself: the generation of the region that is being copied.
    pub(super) generation: Option<u64>,
}

impl RmaOp {
    pub(super) fn new(request: Request, peer: PeerKey, order: u64) -> Self {
        Self {
            request,
            peer,
            order,
            context: 0,
            wanted: false,
            iov: Iov::default(),
            desc: [Desc::NULL; MAX_IOV],
            count: 0,
            remote: [RemoteIov::default(); MAX_RMA_IOV],
            ranges: 0,
            notice: Notice::No,
            slot: None,
            atomic: None,
            held: false,
            queued: false,
            next: (0, 0),
            parts: 0,
            executed: 0,
            link: None,
            link_gone: false,
            first_packet_after: None,
            packets_before: None,
            expected_after: None,
            begun: false,
            fault: None,
            again: false,
            uncertain: false,
            doubts: None,
            generation: None,
        }
    }

    /// Whether an operation that waits is posted to the next session of its peer, when the session
    /// ends: no part of it is under way or was executed, so it has nothing of a link.
    pub(super) fn is_kept(&self, waiting: Unposted) -> bool {
        let kept = match waiting {
            Unposted::Failed => false,
            Unposted::Kept => true,
            Unposted::KeptSince(doubts) => self.doubts == Some(doubts),
        };
        let begun = self.next != (0, 0) || self.executed != 0 || self.parts != 0;
        let broken = self.again || self.uncertain || self.fault.is_some();
        kept && !begun && !broken && self.link.is_none() && !self.link_gone
    }

    /// Whether parts were posted to a link before this one.
    pub(super) fn is_of_earlier_link(&self, link: LinkKey) -> bool {
        self.link_gone || self.link.is_some_and(|of| of != link)
    }

    /// The entry of the operation.
    pub(super) fn completion(&self) -> Completion {
        Completion::new(self.context, self.request.completion_flags)
    }

    /// The context of its call, if it is an atomic on one of several ranges.
    #[inline]
    pub(super) fn call(&self) -> Option<usize> {
        let atomic = self.atomic.as_ref()?;
        atomic.atomic.ranged.then_some(self.context)
    }

    /// The event cells that count its next part, of `len` bytes.
    pub(super) fn counted(&self, len: usize) -> Counted {
        let (index, offset) = self.next;
        let range = &self.remote[index];
        let later = self.remote[index + 1..self.ranges].iter();
        match &self.atomic {
            Some(device) => Counted {
                by_region: true,
                by_endpoint: device.atomic.last,
            },
            None if offset + len < range.len => Counted::NOT,
            None => Counted::of_range(range.key, later.map(|range| range.key)),
        }
    }

    /// Makes the closes of the regions of its descriptors wait, after it has waited.
    pub(super) fn follow(&self) -> Following<'static> {
        let mut follows = Following::default();
        let descs = self.desc.iter().take(self.count);
        descs.for_each(|desc| follows.add(*desc));
        follows
    }

    /// Its length in bytes.
    pub(super) fn len(&self) -> usize {
        self.remote[..self.ranges].iter().map(|it| it.len).sum()
    }

    /// Whether all parts are posted.
    pub(super) fn is_posted(&self) -> bool {
        self.next.0 >= self.ranges
    }

    /// Whether it waits for all earlier operations to the peer (`FI_FENCE`).
    pub(super) fn is_fenced(&self) -> bool {
        self.request.flags.contains(Flags::FENCE)
    }

    /// Whether a repetition has no effect besides the first execution.
    pub(super) fn is_repeatable(&self) -> bool {
        let reads = |it: &DeviceAtomic| u32::from(it.atomic.operator) == Op::Read as u32;
        self.request.opcode == SendOpcode::Read || self.atomic.as_ref().is_some_and(reads)
    }

    /// Whether the peer's answer is lost with the link, although the operation was executed.
    pub(super) fn has_lost_result(&self) -> bool {
        self.atomic.is_some_and(|it| it.atomic.fetches)
    }

    /// Whether its injected data exists no more: the requests that are lost had the only copy.
    pub(super) fn has_lost_data(&self) -> bool {
        let injected = self.request.flags.contains(Flags::INJECT);
        injected && self.slot.is_none() && self.iov.len() != 0
    }

    /// It fails, and nothing of it is posted any more.
    pub(super) fn give_up(&mut self) {
        (self.again, self.uncertain) = (false, false);
        self.fault = self.fault.or(Some(Fault::of(FiErrno::ECONNABORTED)));
        self.next = (self.ranges, 0);
        self.notice = Notice::No;
    }

    /// Begins it anew, behind the parts that were executed. `max_len`: largest part, in bytes.
    pub(super) fn rewind(&mut self, max_len: usize) {
        debug_assert_eq!(self.parts, 0);
        self.next = (0, 0);
        for _ in 0..self.executed {
            self.advance(max_len);
        }
        (self.link, self.link_gone, self.expected_after) = (None, false, None);
        (self.begun, self.again, self.uncertain) = (false, false, false);
    }

    /// Length of the next part in bytes.
    pub(super) fn next_len(&self, max_len: usize) -> usize {
        let (index, offset) = self.next;
        (self.remote[index].len - offset).min(max_len)
    }

    /// Moves behind the next part.
    pub(super) fn advance(&mut self, max_len: usize) {
        let (index, offset) = self.next;
        let end = offset + self.next_len(max_len);
        self.next = match end == self.remote[index].len {
            true => (index + 1, 0),
            false => (index, end),
        };
    }

    /// What is known of its execution if the peer has processed all packets before `expected`, and
    /// no later one: a queue pair executes requests in their order.
    pub(super) fn outcome(&self, expected: Number) -> Outcome {
        if self.is_posted()
            && self
                .first_packet_after
                .is_some_and(|it| it.is_before(expected))
        {
            Outcome::Executed
        } else if self.packets_before.is_some_and(|it| expected.is_before(it)) {
            Outcome::NotExecuted
        } else {
            Outcome::Unknown
        }
    }
}

/// See the module.
pub(super) struct Rma {
    pub(super) ops: Slab<RmaMark, RmaOp>,
    /// Operations that are not posted, or not completely, by the number of the peer; in order.
    waiting: NumberMap<VecDeque<RmaKey>>,
    /// Operations of unknown outcome, until a link to the peer shows it.
    pub(super) doubtful: NumberMap<Vec<RmaKey>>,
    /// Operations with requests that have not completed on a link that has ended. They end when the
    /// queue pair is destroyed: until then the device may access their buffers.
    pub(super) ending: Vec<RmaKey>,
    /// The link with requests that wait for further ones (`FI_MORE`).
    pub(super) delayed: Option<LinkKey>,
    /// Links whose initiators have deferred operations.
    pub(super) deferring: Vec<LinkKey>,
    /// Links on which a message waits for RMA.
    pub(super) blocked: Vec<LinkKey>,
    /// Links that hold keys of their peers, and when their leases expire.
    pub(super) leases: Vec<(LinkKey, Instant)>,
    /// Messages to the endpoint itself that are being copied, by several calls, as RMA to itself.
    pub(super) own_messages: VecDeque<(TxKey, ArrivalKey)>,
    /// Number of messages and atomics with a fence that are under way.
    pub(super) fences: u32,
    /// The order of the next operation, messages included.
    next: u64,
    /// Counts the calls of [`Self::peers_in_turn`]; wraps.
    turn: usize,
    /// The driver was called for what waits.
    pub(super) called: bool,
}

impl Rma {
    pub(super) fn new() -> Self {
        Self {
            ops: Slab::new(),
            waiting: NumberMap::default(),
            doubtful: NumberMap::default(),
            ending: Vec::new(),
            delayed: None,
            deferring: Vec::new(),
            blocked: Vec::new(),
            leases: Vec::new(),
            own_messages: VecDeque::new(),
            fences: 0,
            next: 0,
            turn: 0,
            called: false,
        }
    }

    /// The order of a new operation.
    #[inline]
    pub(super) fn next_order(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Whether an operation waits to be posted, or something is to be copied.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.deferring.is_empty() || !self.own_messages.is_empty()
    }

    /// Whether an operation to the peer waits to be posted, or one for the look-up of a key.
    pub(super) fn waits_for(&self, peer: PeerKey) -> bool {
        !self.deferring.is_empty() || self.first(peer).is_some()
    }

    /// Appends an operation to those of its peer that wait, or puts one back at its place.
    pub(super) fn wait(&mut self, key: RmaKey) {
        let Some(op) = self.ops.get_mut(key) else {
            return;
        };
        if std::mem::replace(&mut op.queued, true) {
            return;
        }
        let (peer, order) = (op.peer.number(), op.order);
        let queue = self.waiting.entry(peer).or_default();
        let ops = &self.ops;
        let earlier = |key: &RmaKey| ops.get(*key).is_some_and(|op| op.order < order);
        let at = match queue.back() {
            Some(last) if !earlier(last) => queue.partition_point(earlier),
            _ => queue.len(),
        };
        queue.insert(at, key);
    }

    /// The first operation of a peer that waits.
    pub(super) fn first(&self, peer: PeerKey) -> Option<RmaKey> {
        if self.waiting.is_empty() {
            return None;
        }
        self.waiting.get(&peer.number())?.front().copied()
    }

    /// The order of the first operation of a peer that may be posted again: it ends with the queue
    /// pair of its link, or its outcome is unknown.
    pub(super) fn first_open(&self, peer: PeerKey) -> Option<u64> {
        if self.ending.is_empty() && self.doubtful.is_empty() {
            return None;
        }
        let doubtful = self.doubtful.get(&peer.number());
        let open = self.ending.iter().chain(doubtful.into_iter().flatten());
        let open = open.filter_map(|key| self.ops.get(*key));
        let of_peer = open.filter(|op| op.peer == peer);
        of_peer.map(|op| op.order).min()
    }

    /// Whether a new operation to a peer has to wait behind earlier ones.
    pub(super) fn has_earlier(&self, peer: PeerKey) -> bool {
        self.first(peer).is_some() || self.first_open(peer).is_some()
    }

    /// Removes an operation that has ended, also from those that wait: its next part may wait for
    /// room when an earlier one fails.
    pub(super) fn free(&mut self, key: RmaKey) {
        if let Some(op) = self.ops.get(key)
            && op.queued
            && let Some(queue) = self.waiting.get_mut(&op.peer.number())
        {
            queue.retain(|waiting| *waiting != key);
            if queue.is_empty() {
                self.waiting.remove(&op.peer.number());
            }
        }
        self.ops.free(key);
    }

    /// Removes the operations of a peer that do not fulfil a condition from those that wait.
    pub(super) fn retain_waiting(&mut self, peer: PeerKey, keeps: impl Fn(&RmaOp) -> bool) {
        let Some(queue) = self.waiting.get_mut(&peer.number()) else {
            return;
        };
        let ops = &mut self.ops;
        queue.retain(|key| {
            let op = ops.get_mut(*key);
            op.is_some_and(|op| {
                op.queued = keeps(op);
                op.queued
            })
        });
        if queue.is_empty() {
            self.waiting.remove(&peer.number());
        }
    }

    /// Removes the first operation of a peer that waits.
    pub(super) fn pop(&mut self, peer: PeerKey) {
        let Some(queue) = self.waiting.get_mut(&peer.number()) else {
            return;
        };
        if let Some(key) = queue.pop_front()
            && let Some(op) = self.ops.get_mut(key)
        {
            op.queued = false;
        }
        if queue.is_empty() {
            self.waiting.remove(&peer.number());
        }
    }

    /// Whether an operation waits although there is a link: for room, credit or a key.
    pub(super) fn progresses<I: Io>(&self, core: &Core<I>) -> bool {
        let up = |peer: PeerKey| core.is_up(peer) || core.is_itself(peer);
        let busy = !self.deferring.is_empty() || !self.own_messages.is_empty();
        busy || self.peers().into_iter().any(up)
    }

    /// The peers with operations that wait.
    pub(super) fn peers(&self) -> Vec<PeerKey> {
        let numbers = self.waiting.keys();
        numbers
            .map(|number| PeerKey::from_number(*number))
            .collect()
    }

    /// As [`Self::peers`], each time with another one first: the links of a circuit share its
    /// requests, and one with large operations takes all that are free.
    pub(super) fn peers_in_turn(&mut self) -> Vec<PeerKey> {
        let mut peers = self.peers();
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn.checked_rem(peers.len()).unwrap_or(0);
        peers.rotate_left(first);
        peers
    }

    /// A peer is another address of `of`: its operations are moved.
    pub(super) fn merge(&mut self, peer: PeerKey, of: PeerKey) {
        let mut moved = Vec::new();
        while let Some(key) = self.first(peer) {
            self.pop(peer);
            moved.push(key);
        }
        for key in self.ops.keys_where(|op| op.peer == peer) {
            if let Some(op) = self.ops.get_mut(key) {
                op.peer = of;
            }
        }
        for key in moved {
            self.wait(key);
        }
        if let Some(keys) = self.doubtful.remove(&peer.number()) {
            self.doubtful.entry(of.number()).or_default().extend(keys);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(lens: &[usize]) -> RmaOp {
        let request = Request {
            opcode: SendOpcode::Write,
            flags: Flags::empty(),
            completion_flags: Flags::RMA,
            compare_add: 0,
            swap: 0,
        };
        let mut op = RmaOp::new(request, PeerKey::from_number(0), 1);
        op.ranges = lens.len();
        for (range, len) in op.remote.iter_mut().zip(lens) {
            range.len = *len;
        }
        op
    }

    #[test]
    fn parts_that_were_executed_are_not_repeated() {
        let parts = [(0, 0), (0, 10), (0, 20), (1, 0), (2, 0), (2, 10), (3, 0)];
        for (executed, next) in parts.into_iter().enumerate() {
            let mut op = op(&[25, 0, 20]);
            (op.next, op.executed, op.again) = ((3, 0), executed as u32, true);
            op.rewind(10);
            assert_eq!((op.next, op.again), (next, false));
        }
    }

    /// Three operations of a peer that wait, in their order.
    fn waiting() -> (Rma, [RmaKey; 3]) {
        let mut rma = Rma::new();
        let keys = [1, 2, 3].map(|order| {
            let op = RmaOp { order, ..op(&[8]) };
            let key = rma.ops.insert(op).expect("room");
            rma.wait(key);
            key
        });
        (rma, keys)
    }

    /// A part that waits for room belongs to an operation that fails by an earlier part.
    #[test]
    fn an_operation_that_has_ended_does_not_wait() {
        let (mut rma, [first, second, third]) = waiting();
        let peer = PeerKey::from_number(0);
        rma.free(second);
        rma.free(first);
        assert_eq!(rma.first(peer), Some(third));
        rma.free(third);
        assert_eq!((rma.first(peer), rma.has_work()), (None, false));
    }

    #[test]
    fn operations_that_are_kept_wait_in_their_order() {
        let (mut rma, keys) = waiting();
        let peer = PeerKey::from_number(0);
        rma.retain_waiting(peer, |op| op.order != 2);
        let queued = keys.map(|key| rma.ops.get(key).is_some_and(|op| op.queued));
        assert_eq!(queued, [true, false, true]);
        for key in [keys[0], keys[2]] {
            assert_eq!(rma.first(peer), Some(key));
            rma.pop(peer);
        }
        rma.wait(keys[1]);
        rma.retain_waiting(peer, |_| false);
        assert!(!rma.has_work());
    }

    #[test]
    fn packets_show_the_outcome() {
        let number = |number| Some(Number::new(number));
        let mut op = op(&[8]);
        op.next = (1, 0);
        // packets 5 and 6 were posted before it, 7 behind it
        (op.packets_before, op.first_packet_after) = (number(7), number(7));
        let outcomes = [5, 6, 7, 8].map(|expected| op.outcome(Number::new(expected)));
        let expected = [
            Outcome::NotExecuted,
            Outcome::NotExecuted,
            Outcome::Unknown,
            Outcome::Executed,
        ];
        assert_eq!(outcomes, expected);
        // a part is not posted
        op.next = (0, 4);
        assert_eq!(op.outcome(Number::new(8)), Outcome::Unknown);
        (op.packets_before, op.first_packet_after) = (None, None);
        assert_eq!(op.outcome(Number::new(5)), Outcome::Unknown);
    }
}
