//! RMA on links that break: what a failed request shows, and what becomes of its operation.
//! `docs/protocol-rdm.md`, "Recovery".

use rdma_core_sys as sys;

use super::{Executor, Todo};
use crate::errno::FiErrno;
use crate::initiator::Initiator;
use crate::queue::{is_refusal, status_errno};
use crate::rdm::completions::Fault;
use crate::rdm::core::Core;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::recover::Unposted;
use crate::rdm::link::cm::Ended;
use crate::rdm::link::initiator_sq::LinkSq;
use crate::rdm::link::send_queue::Sent;
use crate::rdm::rma::{Notice, Outcome, RmaOp};
use crate::rdm::table_keys::{CircuitKey, RmaKey};
use crate::rdm::xrc::circuit_cm::{Unfinished, XrcStep};
use crate::wire::rdm::{Number, Terms};

/// Largest part of an operation, in bytes; and on a circuit, where a request that takes
/// [`STALL`](crate::rdm::xrc::circuit_queue) would be taken for one that waits.
const PART: usize = 1 << 30;
const CIRCUIT_PART: usize = 1 << 20;

/// Status and vendor error of a request that has failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    status: u32,
    vendor_err: u32,
    not_executed: bool,
}

impl Failure {
    /// `None`: the request has succeeded. `not_executed`: see
    /// [`Backend`](rdma_core_sys::Backend::not_executed).
    #[inline]
    pub(super) fn of((status, vendor_err): (u32, u32), not_executed: Option<u32>) -> Option<Self> {
        (status != sys::IBV_WC_SUCCESS).then(|| Self {
            status,
            vendor_err,
            not_executed: not_executed == Some(vendor_err),
        })
    }

    /// Of a packet on a circuit: whether the peer's receive queue does not exist.
    pub(super) fn is_refusal(&self) -> bool {
        self.status == sys::IBV_WC_REM_INV_REQ_ERR
    }

    /// Whether the device reports that no part of the request was executed.
    pub(super) fn not_executed(&self) -> bool {
        self.not_executed
    }

    /// Whether the peer has not acknowledged the request.
    fn is_silence(&self) -> bool {
        self.status == sys::IBV_WC_RETRY_EXC_ERR
    }

    /// Whether none of the requests behind it was or will be executed. The queue pair of a peer
    /// that answers with an error executes nothing any more (IB specification, 9.9.3), and a
    /// request waits behind one for which the peer has no receive.
    pub(super) fn stops(&self) -> bool {
        let answers = [
            sys::IBV_WC_REM_INV_REQ_ERR,
            sys::IBV_WC_REM_ACCESS_ERR,
            sys::IBV_WC_REM_OP_ERR,
            sys::IBV_WC_RNR_RETRY_EXC_ERR,
        ];
        self.not_executed || answers.contains(&self.status)
    }
}

impl RmaOp {
    /// A request has failed with its link. `untouched`: it was not executed, nor was an earlier one
    /// of the same part.
    #[cold]
    pub(super) fn note_failure(&mut self, failure: &Failure, untouched: bool) {
        if is_refusal(failure.status) {
            let fault = Fault {
                err: status_errno(failure.status, false),
                status: Some((failure.status, failure.vendor_err)),
            };
            self.fault = self.fault.or(Some(fault));
        } else if untouched {
            self.again = true;
        } else {
            self.uncertain = true;
        }
    }
}

/// The engine has refused a part of an operation.
#[cold]
pub(super) fn refused_part(op: &mut RmaOp, error: FiErrno) {
    let fault = Fault {
        err: error,
        status: Some((sys::IBV_WC_REM_ACCESS_ERR, 0)),
    };
    op.fault = op.fault.or(Some(fault));
}

impl Executor {
    /// Largest part of an operation, in bytes.
    pub(super) fn largest_part(&self) -> usize {
        let part = match self.xrc {
            Some(_) => CIRCUIT_PART,
            None => PART,
        };
        self.rma_config.max_len.min(part)
    }

    /// A request of a link has failed, and with it its queue pair: on XRC the circuit, with all its
    /// links.
    #[cold]
    pub(super) fn request_failed(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        failure: &Failure,
    ) {
        let Some(record) = self.links.get_mut(link) else {
            return;
        };
        if let Some(port) = &record.port {
            let circuit = port.circuit;
            return circuit
                .into_iter()
                .for_each(|it| self.circuit_request_failed(it, failure));
        }
        record.stopped |= failure.stops();
        match failure.is_silence() {
            true => self.unacknowledged(core, link),
            false => self.broken(core, link),
        }
    }

    /// A request on a circuit has failed.
    #[cold]
    pub(super) fn circuit_request_failed(&mut self, circuit: CircuitKey, failure: &Failure) {
        if failure.stops() {
            self.links
                .of_circuit(circuit)
                .for_each(|record| record.stopped = true);
        }
        self.break_circuit(circuit);
    }

    /// Requests besides packets have completed on the circuit of a link: those which found no room
    /// are repeated.
    #[inline]
    pub(super) fn room_on_circuit(&mut self, link: LinkKey, count: usize) {
        let circuit = self.port_mut(link).and_then(|port| port.circuit);
        let Some((circuit, xrc)) = circuit.zip(self.xrc.as_mut()) else {
            return;
        };
        let Some(queue) = xrc.queue_mut(circuit) else {
            return;
        };
        queue.others_completed(count);
        if queue.room.take_refused() {
            let ends = self
                .links
                .of_circuit(circuit)
                .filter_map(|record| record.block.as_ref());
            ends.for_each(|block| block.notifier().notify_again());
        }
    }

    /// On XRC: a link may post from now on, if it has a circuit, and need not wait for ATTACH or
    /// the answer to CLOSE.
    pub(super) fn open_outlet(&mut self, link: LinkKey) {
        let Some(xrc) = &mut self.xrc else {
            return;
        };
        let open = self.links.get_open(link);
        let Some(record) = open.filter(|record| !record.down) else {
            return;
        };
        let Some(outlet) = record.port.as_deref().and_then(|port| xrc.outlet(port)) else {
            return;
        };
        if let Some(block) = &record.block {
            block.poster.open(outlet);
            block.notifier().notify_again();
        }
    }

    /// On XRC: READs of messages and RMA that wait for a link can be posted.
    pub(super) fn pull_and_run(&mut self, core: &Core<Self>, link: LinkKey) {
        let Some(peer) = core.peer_of(link) else {
            return;
        };
        if self.pulls.has_waiting(peer) {
            self.todo.push_back(Todo::Pull(peer));
        }
        if self.rma.first(peer).is_some() {
            self.todo.push_back(Todo::RunRma);
        }
    }

    /// On XRC: nothing more is posted to a link, and its circuit is not used any more.
    pub(super) fn shut_outlet(&mut self, link: LinkKey) {
        let Some(record) = self.links.get_mut(link) else {
            return;
        };
        if let Some(block) = &record.block {
            block.shut();
        }
        if let Some(initiator) = record.initiator.take() {
            self.xrc_step(XrcStep::CloseBlock(None, Some(initiator)));
        }
    }

    /// A circuit is destroyed. `sent`: those of the requests of its list that have not completed.
    /// The other requests that have not completed never will either.
    pub(super) fn take_unfinished(
        &mut self,
        circuit: CircuitKey,
        sent: Vec<(LinkKey, Sent)>,
    ) -> Vec<Unfinished> {
        let mut reads = Vec::new();
        for (link, sent) in sent {
            let read = matches!(sent, Sent::Read(_));
            if let Some(port) = self.port_mut(link) {
                port.under_way -= 1;
                port.reads -= u32::from(read);
            }
            match sent {
                Sent::Control(Some(slot)) => self.memory.give_back(slot),
                Sent::Read(read) => reads.push((link, read)),
                _ => {}
            }
        }
        let links: Vec<LinkKey> = self
            .links
            .of_circuit(circuit)
            .map(|record| record.key())
            .collect();
        let mut unfinished = Vec::new();
        for link in links {
            let Some(record) = self.links.get_mut(link) else {
                continue;
            };
            let busy = record
                .block
                .as_ref()
                .is_some_and(|block| block.poster.has_requests());
            if let Some(block) = &record.block {
                block.poster.abandon();
            }
            let mut initiator = record.initiator.take();
            if busy || initiator.is_some() {
                self.end_rma_with(link, initiator.as_deref_mut());
            }
            let of_link = reads.extract_if(.., |(of, _)| *of == link);
            let ended = Ended {
                reads: of_link.map(|(_, read)| read).collect(),
                rma: self.take_rma_of_ended(link),
            };
            if initiator.is_some() || !ended.reads.is_empty() || !ended.rma.is_empty() {
                unfinished.push(Unfinished(link, initiator, ended));
            }
        }
        unfinished
    }

    /// An operation was not executed completely on a link that has broken.
    #[cold]
    pub(super) fn recover_rma(&mut self, core: &mut Core<Self>, key: RmaKey) {
        let Some(op) = self.rma.ops.get_mut(key) else {
            return;
        };
        if op.is_repeatable() || !op.uncertain {
            return self.repeat_rma(core, key);
        }
        let (expected_after, peer) = (op.expected_after, op.peer);
        let doubtful = self.rma.doubtful.entry(peer.number()).or_default();
        // on XRC a link can be ended twice: with its circuit, and then its half
        doubtful.retain(|listed| *listed != key);
        if expected_after.is_none() {
            doubtful.push(key);
        } else if doubtful.is_empty() {
            self.rma.doubtful.remove(&peer.number());
        }
        if let Some(expected) = expected_after {
            self.decide_rma(core, key, expected);
        }
    }

    /// Posts what was not executed of an operation to the next link.
    fn repeat_rma(&mut self, core: &mut Core<Self>, key: RmaKey) {
        let max_len = self.largest_part();
        let Some(op) = self.rma.ops.get_mut(key) else {
            return;
        };
        if op.has_lost_data() {
            op.give_up();
            return self.end_or_repeat_rma(core, key);
        }
        op.rewind(max_len);
        self.rma.wait(key);
    }

    /// The peer has processed all packets before `expected`, and no others.
    fn decide_rma(&mut self, core: &mut Core<Self>, key: RmaKey, expected: Number) {
        let Some(op) = self.rma.ops.get_mut(key).filter(|op| op.uncertain) else {
            return;
        };
        match op.outcome(expected) {
            Outcome::Executed if op.has_lost_result() => op.give_up(),
            Outcome::Executed => (op.again, op.uncertain) = (false, false),
            Outcome::NotExecuted => return self.repeat_rma(core, key),
            Outcome::Unknown => op.give_up(),
        }
        self.end_or_repeat_rma(core, key);
    }

    /// A link to a peer is up: the outcome of operations becomes known.
    pub(super) fn rma_up(&mut self, peer: PeerKey, link: LinkKey, terms: &Terms) {
        if let Some(record) = self.links.get_mut(link) {
            record.device_atomics = terms.device_atomics;
        }
        let earlier = |op: &RmaOp| op.peer == peer && op.is_of_earlier_link(link);
        if self.rma.ops.len() != 0 {
            for key in self.rma.ops.keys_where(earlier) {
                if let Some(op) = self.rma.ops.get_mut(key) {
                    // a later link states what was posted to the next one too
                    op.expected_after.get_or_insert(terms.expected);
                }
            }
        }
        if self.rma.doubtful.contains_key(&peer.number()) {
            self.todo.push_back(Todo::DecideRma(peer));
        }
        if self.rma.first(peer).is_some() {
            self.todo.push_back(Todo::RunRma);
        }
    }

    /// See [`Self::decide_rma`].
    pub(in crate::rdm) fn decide_all_rma(&mut self, core: &mut Core<Self>, peer: PeerKey) {
        let known = |key: &RmaKey| {
            let op = self.rma.ops.get(*key);
            op.is_some_and(|op| op.expected_after.is_some())
        };
        let doubtful = self.rma.doubtful.remove(&peer.number());
        let doubtful = doubtful.into_iter().flatten();
        let (decided, others): (Vec<_>, Vec<_>) = doubtful.partition(known);
        if !others.is_empty() {
            self.rma.doubtful.insert(peer.number(), others);
        }
        for key in decided {
            self.recover_rma(core, key);
        }
        // posts what has waited for these outcomes too: messages, and RMA behind them
        self.todo.push_back(Todo::RunRma);
    }

    /// The operations of a peer fail, but those that `waiting` keeps: they wait for its next
    /// session, in their order. Parts that are under way end with their link. Returns the number of
    /// operations that are kept.
    pub(super) fn rma_failed(&mut self, peer: PeerKey, error: FiErrno, waiting: Unposted) -> u32 {
        if self.rma.ops.len() == 0 {
            return 0;
        }
        self.rma.retain_waiting(peer, |op| op.is_kept(waiting));
        self.rma.doubtful.remove(&peer.number());
        let mut holds = 0;
        for key in self.rma.ops.keys_where(|op| op.peer == peer) {
            let Some(op) = self.rma.ops.get_mut(key) else {
                continue;
            };
            if op.queued {
                holds += u32::from(op.held);
            } else {
                // the core has dropped its holds
                op.held = false;
                op.fault = op.fault.or(Some(Fault::of(error)));
                op.next = (op.ranges, 0);
                op.notice = Notice::No;
                self.todo.push_back(Todo::EndOrRepeatRma(key));
            }
        }
        holds
    }

    /// A link has ended. Operations with requests that have not completed end with its queue pair;
    /// the others are settled by the caller, before anything is posted to the next link.
    pub(in crate::rdm) fn end_rma(&mut self, link: LinkKey) {
        self.rma.leases.retain(|(of, _)| *of != link);
        self.rma.deferring.retain(|of| *of != link);
        self.rma.blocked.retain(|of| *of != link);
        let Some(record) = self.links.get_mut(link) else {
            return;
        };
        let mut initiator = record.initiator.take();
        self.end_rma_with(link, initiator.as_deref_mut());
        if let Some(record) = self.links.get_mut(link) {
            record.initiator = initiator;
        }
    }

    /// As [`Self::end_rma`], of a link that had this initiator.
    fn end_rma_with(&mut self, link: LinkKey, initiator: Option<&mut Initiator<LinkSq>>) {
        let stopped = self
            .links
            .get_mut(link)
            .is_some_and(|record| record.stopped);
        for (context, posted) in initiator.map(Initiator::take_deferred).unwrap_or_default() {
            if let Some(op) = self.rma.ops.get_mut(RmaKey::from_number(context as u32)) {
                op.again = true;
                op.uncertain |= posted;
                op.parts = op.parts.saturating_sub(1);
            }
        }
        if self.rma.ops.len() == 0 {
            return;
        }
        for key in self.rma.ops.keys_where(|op| op.link == Some(link)) {
            let Some(op) = self.rma.ops.get_mut(key) else {
                continue;
            };
            op.again |= !op.is_posted();
            if op.parts == 0 {
                self.todo.push_back(Todo::EndOrRepeatRma(key));
            } else if !self.rma.ending.contains(&key) {
                // requests complete in their order, so these are behind one that has failed
                let untouched = stopped && !op.begun;
                op.again |= untouched;
                op.uncertain |= !untouched;
                self.rma.ending.push(key);
            }
        }
    }

    /// The operations that end with the queue pair of a link. No operation has the key of the link
    /// any more.
    pub(super) fn take_rma_of_ended(&mut self, link: LinkKey) -> Vec<RmaKey> {
        if self.rma.ops.len() == 0 {
            return Vec::new();
        }
        let mut of_link = self.rma.ops.keys_where(|op| op.link == Some(link));
        for key in &of_link {
            if let Some(op) = self.rma.ops.get_mut(*key) {
                (op.link, op.link_gone) = (None, true);
            }
        }
        of_link.retain(|key| self.rma.ending.contains(key));
        of_link
    }

    /// A queue pair is destroyed: the device accesses no buffer of these operations any more.
    pub(in crate::rdm) fn rma_ended(&mut self, core: &mut Core<Self>, ended: &[RmaKey]) {
        self.rma.ending.retain(|key| !ended.contains(key));
        for key in ended {
            if let Some(op) = self.rma.ops.get_mut(*key) {
                op.parts = 0;
                self.end_or_repeat_rma(core, *key);
            }
        }
        self.todo.push_back(Todo::RunRma);
    }
}
