//! RMA of an endpoint to itself: the processor copies, by `mr/own_access.rs`. `docs/rdm.md`, "RMA".
//! And long messages to itself, which are copied by several calls too.

#![allow(unsafe_code, reason = "copies from and to buffers of the application")]

use super::Executor;
use super::rma_recovery::refused_part;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::RemoteIov;
use crate::mr::{RemainingRange, mapped_key};
use crate::queue::event_cell::{Counted, Event};
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Core, Origin};
use crate::rdm::iov::Iov;
use crate::rdm::operations::Operation;
use crate::rdm::receives::{Arrival, Envelope, Target};
use crate::rdm::rma::{Notice, RmaOp};
use crate::rdm::table_keys::{RmaKey, TxKey};
use crate::verbs::SendOpcode;
use crate::wire::rdm::OpId;

/// Bytes that are copied under the lock of the domain's regions.
const PIECE: usize = 1 << 20;

/// Bytes that are copied in one call under the endpoint's lock, by [`PIECE`].
pub(in crate::rdm) const CALL: usize = 4 << 20;

impl Executor {
    /// Executes an operation, or lists it behind those that wait.
    ///
    /// # Errors
    /// The operation is not begun. `EKEYREJECTED`: a mapped key that is not mapped any more.
    /// `EAGAIN`, `ENOMEM`: there is no memory for it.
    ///
    /// # Safety
    /// As [`Self::begin_rma`].
    pub(super) unsafe fn begin_own_rma(&mut self, core: &mut Core<Self>, op: RmaOp) -> Result<()> {
        // atomics of an endpoint on itself are packets
        debug_assert!(op.atomic.is_none());
        for range in &op.remote[..op.ranges] {
            mapped_key(&self.objects.mr, range.key)?;
        }
        let inject = op.request.flags.contains(Flags::INJECT);
        let waits = self.rma.first(op.peer).is_some() || self.own_rma_waits(&op);
        let peer = op.peer;
        let key = self.rma.ops.insert(op).ok_or(FiErrno::EAGAIN)?;
        if !waits {
            // injected data is less than the budget
            let mut budget = CALL;
            if !self.own_rma(core, key, &mut budget) {
                self.rma.wait(key);
                self.leave_busy(peer);
            }
            return Ok(());
        }
        // SAFETY: as this function.
        if let Err(error) = unsafe { self.copy_rma(key, inject) } {
            self.forget_rma(key);
            return Err(error);
        }
        self.rma.wait(key);
        Ok(())
    }

    /// Executes the operations that wait, up to the first one that is behind a message, or until
    /// [`CALL`] bytes are copied: the next progress call or the driver continues.
    pub(super) fn run_own_rma(&mut self, core: &mut Core<Self>, peer: PeerKey) {
        let mut budget = CALL;
        self.own_busy.retain(|busy| *busy != peer);
        while let Some(key) = self.rma.first(peer) {
            let op = self.rma.ops.get(key);
            let order = op.map_or(0, |op| op.order);
            self.loop_back_before(peer, order);
            let waits = |op: &RmaOp| self.own_rma_waits(op);
            if self.rma.ops.get(key).is_some_and(waits) {
                break;
            }
            if self.rma.ops.get(key).is_some_and(|op| op.atomic.is_some()) {
                // posted when another endpoint was expected at the address
                self.rma.pop(peer);
                self.post_as_packet(core, key);
                continue;
            }
            if budget == 0 {
                return self.leave_busy(peer);
            }
            self.rma.pop(peer);
            if !self.own_rma(core, key, &mut budget) {
                self.rma.wait(key);
                return self.leave_busy(peer);
            }
        }
        self.loop_back_before(peer, u64::MAX);
    }

    /// Leaves the rest of a copy to the next progress call or the driver. The driver may have been
    /// called before, for operations that wait for a link, and sleep since then.
    fn leave_busy(&mut self, peer: PeerKey) {
        self.own_busy.push(peer);
        self.rma.called = false;
    }

    /// Executes an operation and ends it. `false`: the budget, in bytes, is used up before.
    fn own_rma(&mut self, core: &mut Core<Self>, key: RmaKey, budget: &mut usize) -> bool {
        let Some(op) = self.rma.ops.get_mut(key) else {
            return true;
        };
        let (iov, peer, notice) = (op.iov, op.peer, op.notice);
        let event = match op.request.opcode {
            SendOpcode::Read => Event::Read,
            _ => Event::Write,
        };
        let (remote, ranges) = (op.remote, op.ranges);
        let (mut next, mut generation) = (op.next, op.generation);
        let mut result = Ok(());
        while next.0 < ranges && result.is_ok() {
            let range = &remote[next.0];
            let before = remote[..next.0].iter().map(|range| range.len);
            let later = remote[next.0 + 1..ranges].iter().map(|range| range.key);
            let counted = Counted::of_range(range.key, later);
            let local = iov.part(before.sum(), range.len);
            let mut part = (next.1, generation);
            // SAFETY: the application keeps the buffers until the operation completes; injected
            // data is valid during the call of the application, or in a slot.
            result = unsafe { self.own_range((range, counted), &local, event, &mut part, budget) };
            (next.1, generation) = part;
            if result.is_ok() && next.1 < range.len {
                if let Some(op) = self.rma.ops.get_mut(key) {
                    (op.next, op.generation) = (next, generation);
                }
                return false;
            }
            if result.is_ok() {
                if counted.by_endpoint {
                    self.completions.count_remote(event);
                }
                (next, generation) = ((next.0 + 1, 0), None);
            }
        }
        if let Some(op) = self.rma.ops.get_mut(key) {
            (op.next, op.notice) = ((ranges, 0), Notice::No);
            if let Err(error) = result {
                refused_part(op, error);
            }
        }
        if let (Ok(()), Notice::Due(data)) = (result, notice)
            // as for the notice of a peer
            && self.accepts.data
        {
            let len = remote[..ranges].iter().map(|range| range.len);
            self.completions.own_notice(peer, data, len.sum());
        }
        self.end_or_repeat_rma(core, key);
        true
    }

    /// Copies one range from an offset on, until it ends or the budget is used up. The region is
    /// the one of the generation, which the first piece finds.
    ///
    /// # Safety
    /// The local buffers are readable, for a read writable.
    unsafe fn own_range(
        &self,
        (range, counted): (&RemoteIov, Counted),
        local: &Iov,
        event: Event,
        (offset, generation): &mut (usize, Option<u64>),
        budget: &mut usize,
    ) -> Result<()> {
        let mr = &self.objects.mr;
        let key = mapped_key(mr, range.key)?;
        let mut rest = RemainingRange {
            addr: range.addr.wrapping_add(*offset as u64),
            key,
            left: range.len - *offset,
            event,
            generation: *generation,
            counted: counted.by_region,
        };
        if range.len == 0 {
            // as on a link, nothing is accessed, so the key need not be one
            // SAFETY: there are no buffers.
            let _ = unsafe {
                mr.accessible_regions()
                    .copy(&self.objects.pd, &mut rest, &[])
            };
            return Ok(());
        }
        while rest.left != 0 && *budget != 0 {
            let before = rest.left;
            let len = before.min(PIECE).min(*budget);
            let buffers = local.part(*offset, len).iovecs();
            // SAFETY: the caller promises the buffers.
            unsafe {
                mr.accessible_regions()
                    .copy(&self.objects.pd, &mut rest, &buffers)
            }?;
            let moved = before - rest.left;
            *offset += moved;
            *budget -= moved.min(*budget);
        }
        *generation = rest.generation;
        Ok(())
    }

    /// Whether RMA of the endpoint on itself, or a message to itself, waits only because [`CALL`]
    /// bytes were copied.
    pub(in crate::rdm) fn copies(&self) -> bool {
        !self.own_busy.is_empty() || !self.rma.own_messages.is_empty()
    }

    /// Begins to copy a long message to its receive. As a message of a peer that arrives, it
    /// returns its receive to a shared receive context if the endpoint is closed before its end.
    #[cold]
    pub(super) fn begin_own_copy(&mut self, key: TxKey, envelope: &Envelope, target: &Target) {
        let from = (Origin::of_itself(envelope.peer), OpId::new(0));
        let arrival = Arrival::new(from, *envelope, *target, None);
        let Some(arrival) = self.rx.arrivals.insert(arrival) else {
            let error = FiErrno::ENOMEM;
            self.received_message(target, envelope, 0, Err((error, 0)), None);
            return self.finish(key, Err(error));
        };
        self.rma.own_messages.push_back((key, arrival));
        if self.rma.own_messages.len() == 1 {
            self.run_own_messages();
            // as `leave_busy`
            self.rma.called &= self.rma.own_messages.is_empty();
        }
    }

    /// Copies messages to the endpoint itself, until [`CALL`] bytes are copied: the next progress
    /// call or the driver continues.
    pub(in crate::rdm) fn run_own_messages(&mut self) {
        let mut budget = CALL;
        while let Some((key, arriving)) = self.rma.own_messages.front().copied() {
            let op = self.tx.get(key);
            if let Some((op, arrival)) = op.zip(self.rx.arrivals.get_mut(arriving)) {
                let to = &arrival.target.receive.iov;
                // at most the length of the receive
                let (next, len) = (arrival.arrived as usize, op.iov.len().min(to.len()));
                let part = budget.min(len - next);
                // SAFETY: the application keeps the buffers until both operations complete.
                unsafe { to.part(next, part).copy_from(&op.iov.part(next, part)) };
                arrival.arrived += part as u64;
                budget -= part;
                #[cfg(test)]
                {
                    self.tests.own_parts += 1;
                }
                if next + part != len {
                    return;
                }
            }
            self.rma.own_messages.pop_front();
            if let Some(arrival) = self.rx.arrivals.remove(arriving) {
                self.message_complete(&arrival.target, &arrival.envelope, None);
                self.finish(key, Ok(()));
            }
        }
    }

    /// Delivers a message or an atomic to the endpoint itself, or lists it behind what was posted
    /// before.
    pub(in crate::rdm) fn loop_back(&mut self, key: TxKey) {
        let Some(op) = self.tx.get(key) else {
            return;
        };
        if self.is_behind_own_sends(op.peer, op.order) || self.own_send_waits(op) {
            return self.own_sends.push_back(key);
        }
        self.loop_back_now(key);
    }

    /// Whether a listed message or atomic was posted before an operation.
    fn is_behind_own_sends(&self, peer: PeerKey, order: u64) -> bool {
        let earlier = |op: &Operation| op.peer == peer && op.order < order;
        let mut listed = self.own_sends.iter();
        listed.any(|key| self.tx.get(*key).is_some_and(earlier))
    }

    /// Whether a message or an atomic waits for earlier operations: for RMA that was not executed;
    /// with a fence, for all that are not complete.
    fn own_send_waits(&self, op: &Operation) -> bool {
        let first = self.rma.first(op.peer);
        let first = first.and_then(|key| self.rma.ops.get(key));
        let behind_rma = first.is_some_and(|first| first.order < op.order);
        behind_rma || op.is_fenced() && self.is_behind_own(op.peer, op.order)
    }

    /// Whether RMA waits: for messages and atomics that are listed; with a fence, for all earlier
    /// operations that are not complete.
    fn own_rma_waits(&self, op: &RmaOp) -> bool {
        let fence = op.request.flags.contains(Flags::FENCE);
        self.is_behind_own_sends(op.peer, op.order)
            || fence && self.is_behind_own(op.peer, op.order)
    }

    /// Whether an earlier operation is not complete.
    fn is_behind_own(&self, peer: PeerKey, order: u64) -> bool {
        let rma = |rma: &RmaOp| rma.peer == peer && rma.order < order;
        let sent = |op: &Operation| op.is_of_application() && op.peer == peer && op.order < order;
        self.rma.ops.any(rma) || self.tx.any(sent)
    }

    /// Delivers the listed messages and atomics of an address that were posted before an operation,
    /// up to the first one that still waits.
    fn loop_back_before(&mut self, peer: PeerKey, order: u64) {
        let mut at = 0;
        while let Some(key) = self.own_sends.get(at).copied() {
            match self.tx.get(key) {
                Some(op) if op.peer != peer => at += 1,
                Some(op) if op.order >= order || self.own_send_waits(op) => return,
                _ => {
                    self.own_sends.remove(at);
                    self.loop_back_now(key);
                }
            }
        }
    }

    /// An operation has ended: delivers what has waited for it with a fence.
    pub(in crate::rdm) fn run_own_sends(&mut self) {
        let mut peers: Vec<_> = self
            .own_sends
            .iter()
            .filter_map(|key| self.tx.get(*key))
            .map(|op| op.peer)
            .collect();
        peers.dedup();
        for peer in peers {
            self.loop_back_before(peer, u64::MAX);
        }
    }
}
