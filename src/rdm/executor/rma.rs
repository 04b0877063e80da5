//! RMA and atomics on links: posts and completions. `docs/protocol-rdm.md`, "RMA". Their order is
//! in `rma_order.rs`, what follows from the end of a link in `rma_recovery.rs`.

#![allow(unsafe_code, reason = "posts buffers that the application keeps valid")]

use super::rma_recovery::{Failure, refused_part};
use super::{Executor, Todo};
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::keys::PeerKeys;
use crate::initiator::local::LocalRange;
use crate::initiator::sq::Sq as _;
use crate::initiator::{Initiator, InitiatorConfig, Lengths, LocalIov, Transmit};
use crate::rdm::completions::Fault;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Uses;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Core, Origin, SendOp};
use crate::rdm::iov::{Iov, MAX_IOV};
use crate::rdm::link::initiator_sq::LinkSq;
use crate::rdm::operations::{Kind, Operation, PAYLOAD};
use crate::rdm::rma::{Notice, RmaOp};
use crate::rdm::table_keys::RmaKey;
use crate::verbs::Wc;
use crate::wire::rdm::Credit;

/// Parameters of the initiators of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct RmaConfig {
    /// Maximum length of injected data in bytes.
    pub(in crate::rdm) inject_size: usize,
    /// Maximum length of inline data in bytes.
    pub(in crate::rdm) max_inline: usize,
    /// Largest request of the device in bytes.
    pub(in crate::rdm) max_len: usize,
    pub(in crate::rdm) atomics: bool,
    /// The device executes atomics on elements of all datatypes.
    pub(in crate::rdm) device_atomics: bool,
    /// Operations are posted behind earlier messages, and messages behind earlier operations.
    pub(in crate::rdm) after_sends: bool,
    pub(in crate::rdm) before_sends: bool,
}

impl Executor {
    /// The link to a peer if nothing is in front of a new operation.
    #[inline(always)]
    pub(super) fn executing_link(&self, core: &Core<Self>, peer: PeerKey) -> Option<LinkKey> {
        let rma = &self.rma;
        if rma.ops.len() != 0 || rma.fences != 0 || rma.delayed.is_some() {
            return None;
        }
        let link = core.open_link(peer)?;
        let behind = self.rma_config.after_sends && core.first_unposted(peer, |_| true).is_some();
        (!behind).then_some(link)
    }

    /// Executes a read or write of one range in this call, if nothing is in front of it and the
    /// device can. `false`: nothing has changed, and the caller begins an operation.
    ///
    /// # Safety
    /// The local buffers are valid during the call.
    #[inline]
    pub(in crate::rdm) unsafe fn execute_rma(
        &mut self,
        core: &mut Core<Self>,
        peer: PeerKey,
        transmit: &Transmit<'_>,
    ) -> bool {
        let Some(link) = self.executing_link(core, peer) else {
            return false;
        };
        let record = self.links.get_mut(link);
        let Some(initiator) = record.and_then(|record| record.initiator.as_deref_mut()) else {
            return false;
        };
        // SAFETY: the caller keeps the contract of this function.
        let executed = unsafe { initiator.execute(transmit) };
        if executed {
            core.note_executed(peer);
        }
        executed
    }

    /// Begins an operation: posts it, or lists it behind those that wait.
    ///
    /// # Errors
    /// Those of the initiator; the operation is not begun.
    ///
    /// # Safety
    /// The local buffers stay valid until the operation completes; those of injected data until
    /// this call returns.
    pub(in crate::rdm) unsafe fn begin_rma(
        &mut self,
        core: &mut Core<Self>,
        op: RmaOp,
    ) -> Result<()> {
        let peer = op.peer;
        if core.is_itself(peer) {
            self.post_delayed();
            // SAFETY: as this function.
            return unsafe { self.begin_own_rma(core, op) };
        }
        let inject = op.request.flags.contains(Flags::INJECT);
        let link = core.open_link(peer);
        let ready_link = link.filter(|_| !self.rma.has_earlier(peer));
        let ready_link = ready_link.filter(|_| !self.is_behind_sends(core, &op));
        let atomic = op.atomic.is_some();
        let more = op.request.flags.contains(Flags::MORE);
        if self.rma.delayed.is_some() && (self.rma.delayed != ready_link || atomic) {
            self.post_delayed();
        }
        let key = self.rma.ops.insert(op).ok_or(FiErrno::EAGAIN)?;
        if let Some(link) = ready_link.filter(|_| atomic)
            && !self.has_device_atomics(link)
        {
            self.post_as_packet(core, key);
            return Ok(());
        }
        let posted = match ready_link {
            Some(link) => self.post_rma(core, link, key),
            None => Ok(false),
        };
        if more || self.rma.delayed.is_some() {
            self.note_delayed(ready_link, key);
        }
        match posted {
            Ok(true) => {
                let deferred = self.rma.deferring.iter().any(|of| Some(*of) == link);
                if deferred {
                    // SAFETY: as this function. Without memory the copy of the initiator remains,
                    // which ends with the link.
                    let _ = unsafe { self.copy_rma(key, inject) };
                }
            }
            // SAFETY: as this function.
            Ok(false) => match unsafe { self.copy_rma(key, inject) } {
                Ok(()) => self.rma.wait(key),
                Err(error) => {
                    // parts may be under way
                    let begun = self.rma.ops.get(key).is_some_and(|op| op.link.is_some());
                    if !begun {
                        self.forget_rma(key);
                        return Err(error);
                    }
                    self.fail_rma(core, key, Fault::of(error));
                }
            },
            Err(error) => {
                self.forget_rma(key);
                return Err(error);
            }
        }
        self.hold_rma(core, key);
        Ok(())
    }

    /// Keeps the peer's link, or makes the core dial.
    fn hold_rma(&mut self, core: &mut Core<Self>, key: RmaKey) {
        if let Some(op) = self.rma.ops.get_mut(key) {
            op.held = true;
            let peer = op.peer;
            op.doubts = op.link.is_none().then(|| core.doubts(peer));
            core.hold(peer, self);
        }
    }

    /// Copies injected data, which is not posted, to a slot.
    ///
    /// # Safety
    /// The operation's buffers are readable.
    pub(super) unsafe fn copy_rma(&mut self, key: RmaKey, inject: bool) -> Result<()> {
        let op = self.rma.ops.get_mut(key).filter(|_| inject);
        let Some(op) = op.filter(|op| op.iov.len() != 0) else {
            return Ok(());
        };
        let slot = self.memory.take()?;
        let len = op.iov.len();
        let to = &mut self.memory.bytes_mut(&slot)[PAYLOAD..PAYLOAD + len];
        // SAFETY: the caller promises the buffers.
        unsafe { op.iov.read(0, to) };
        op.iov = Iov::of_memory(to);
        (op.count, op.slot) = (1, Some(slot));
        Ok(())
    }

    /// The initiator of a link.
    fn initiator(&mut self, link: LinkKey) -> Result<&mut Initiator<LinkSq>> {
        let config = self.rma_config;
        let record = self.links.get_mut(link).ok_or(FiErrno::ENOTCONN)?;
        if record.initiator.is_none() {
            let block = record.block.as_ref().ok_or(FiErrno::EOPNOTSUPP)?;
            let sq = block.sq().ok_or(FiErrno::ENOTCONN)?;
            let lengths = Lengths::new(config.max_len, config.inject_size);
            let slots = sq.capacity();
            let config = InitiatorConfig {
                selective: false,
                iov_limit: MAX_IOV,
                max_inline: config.max_inline,
                inject_size: config.inject_size,
                slots,
                late_slab: true,
                atomics: config.atomics,
            };
            let introduction = record.introduction.map(|peer| {
                let keys = PeerKeys::new(sq.link().clone(), peer, block.connection_block());
                (peer, keys)
            });
            let mut initiator = Initiator::new(sq, &self.objects.mr, &lengths, &config)?;
            if let Some((peer, keys)) = introduction {
                initiator.introduce(&peer, keys);
            }
            record.initiator = Some(Box::new(initiator));
        }
        record.initiator.as_deref_mut().ok_or(FiErrno::EOPNOTSUPP)
    }

    /// Posts what is not posted of an operation. `false`: the rest waits for room.
    ///
    /// # Errors
    /// Those of the initiator; no part of the operation is under way.
    fn post_rma(&mut self, core: &Core<Self>, link: LinkKey, key: RmaKey) -> Result<bool> {
        let posted = self.post_parts(core, link, key);
        posted.inspect(|_| self.watch_rma(link))
    }

    fn post_parts(&mut self, core: &Core<Self>, link: LinkKey, key: RmaKey) -> Result<bool> {
        let max_len = self.largest_part();
        let port = self.port_mut(link);
        if port.is_some_and(|port| !port.attached) {
            // until ATTACH is posted
            return Ok(false);
        }
        self.initiator(link)?;
        let Some(op) = self.rma.ops.get_mut(key) else {
            return Ok(true);
        };
        let Some(record) = self.links.get_mut(link) else {
            return Ok(false);
        };
        let Some(initiator) = record.initiator.as_deref_mut() else {
            return Ok(false);
        };
        if op.link.is_none() {
            op.link = Some(link);
            // packets in rings are not ordered with requests
            let posted = core.posted_until(op.peer);
            op.packets_before = posted.filter(|_| record.ring.is_none());
        }
        let (iov, desc) = (op.iov.iovecs(), op.desc);
        let whole = LocalIov::borrowed(&iov[..op.count], &desc[..op.count]);
        while !op.is_posted() {
            let (index, offset) = op.next;
            let remote = op.remote[index];
            let len = op.next_len(max_len);
            let mut part = None;
            let local = match op.ranges == 1 && remote.len == len {
                true => whole,
                false => {
                    let before = op.remote[..index].iter().map(|range| range.len);
                    let start = before.sum::<usize>() + offset;
                    part.insert(LocalRange::default()).of(&whole, start, len)
                }
            };
            let request = &op.request;
            let transmit = Transmit {
                opcode: request.opcode,
                local,
                remote_addr: remote.addr.wrapping_add(offset as u64),
                key: remote.key,
                data: 0,
                context: key.number() as usize,
                flags: request.flags,
                silent: false,
                compare_add: request.compare_add,
                swap: request.swap,
                completion_flags: request.completion_flags,
                counted: op.counted(len),
            };
            // SAFETY: the application keeps the buffers until the operation completes; injected
            // data is valid during the call of the application, or in a slot.
            match unsafe { initiator.submit(&transmit) } {
                Ok(()) => op.parts += 1,
                Err(FiErrno::EAGAIN) => {
                    if op.parts == 0 && op.next == (0, 0) {
                        op.link = None;
                    }
                    return Ok(false);
                }
                Err(error) if op.parts == 0 && op.next == (0, 0) => return Err(error),
                Err(error) => {
                    op.fault = op.fault.or(Some(Fault::of(error)));
                    op.next = (op.ranges, 0);
                    break;
                }
            }
            op.advance(max_len);
        }
        let deferred = initiator.has_deferred();
        // a part that is deferred is posted behind later packets
        let ordered = record.ring.is_none() && !deferred;
        op.first_packet_after = ordered.then(|| core.next_number(op.peer));
        if deferred && !self.rma.deferring.contains(&link) {
            self.rma.deferring.push(link);
        }
        Ok(true)
    }

    /// Notes the link whose requests wait for further ones, after an operation was begun on it.
    #[cold]
    fn note_delayed(&mut self, link: Option<LinkKey>, key: RmaKey) {
        if let Some(op) = self.rma.ops.get_mut(key) {
            // what is posted later has no further operation behind it
            op.request.flags -= Flags::MORE;
        }
        let record = link.and_then(|link| self.links.get_mut(link));
        let initiator = record.and_then(|record| record.initiator.as_deref());
        let delayed = initiator.is_some_and(|initiator| initiator.sq.has_delayed());
        self.rma.delayed = link.filter(|_| delayed);
        if !self.todo.is_empty() {
            // may post packets, which are behind the operation
            self.post_delayed();
        }
    }

    /// Posts the requests that were delayed because the application announced further ones
    /// (`FI_MORE`). Called before anything else is done under the endpoint's lock, so packets and
    /// polls are behind them.
    #[cold]
    pub(in crate::rdm) fn post_delayed(&mut self) {
        if let Some(link) = self.rma.delayed.take()
            && let Some(record) = self.links.get_mut(link)
            && let Some(initiator) = record.initiator.as_deref_mut()
        {
            initiator.sq.post_delayed();
        }
    }

    /// Posts the operations that wait and can be posted.
    #[cold]
    pub(in crate::rdm) fn run_rma(&mut self, core: &mut Core<Self>) {
        for link in std::mem::take(&mut self.rma.deferring) {
            let Some(record) = self.links.get_mut(link) else {
                continue;
            };
            if record.is_ending() {
                // their rest is not posted; `end_rma` takes them back for the next link
                self.rma.deferring.push(link);
                continue;
            }
            if let Some(initiator) = record.initiator.as_deref_mut() {
                initiator.resume();
                if initiator.has_deferred() {
                    self.rma.deferring.push(link);
                }
                self.watch_rma(link);
            }
        }
        for peer in self.rma.peers_in_turn() {
            if core.is_itself(peer) {
                self.run_own_rma(core, peer);
                continue;
            }
            let Some(link) = core.open_link(peer) else {
                continue;
            };
            while let Some(key) = self.rma.first(peer) {
                let Some(op) = self.rma.ops.get(key) else {
                    self.rma.pop(peer);
                    continue;
                };
                let behind_sends = op.next == (0, 0) && self.is_behind_sends(core, op);
                let elsewhere = op.is_of_earlier_link(link);
                let earlier = self.rma.first_open(peer);
                if behind_sends || elsewhere || earlier.is_some_and(|earlier| earlier < op.order) {
                    break;
                }
                if op.atomic.is_some() && !self.has_device_atomics(link) {
                    self.rma.pop(peer);
                    self.post_as_packet(core, key);
                    continue;
                }
                let follows = self.rma.ops.get(key).map(RmaOp::follow);
                let posted = self.post_rma(core, link, key);
                drop(follows);
                match posted {
                    Ok(true) => self.rma.pop(peer),
                    Ok(false) => break,
                    Err(error) => {
                        self.rma.pop(peer);
                        self.fail_rma(core, key, Fault::of(error));
                    }
                }
                self.end_or_repeat_rma(core, key);
            }
        }
        let blocked = std::mem::take(&mut self.rma.blocked);
        self.todo.extend(blocked.into_iter().map(Todo::Room));
    }

    /// Fails an operation of which no part is under way.
    fn fail_rma(&mut self, core: &mut Core<Self>, key: RmaKey, fault: Fault) {
        if let Some(op) = self.rma.ops.get_mut(key) {
            op.fault = op.fault.or(Some(fault));
            op.next = (op.ranges, 0);
            op.notice = Notice::No;
        }
        self.end_or_repeat_rma(core, key);
    }

    /// A request of an operation has completed.
    #[inline]
    pub(super) fn rma_completed(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        number: u16,
        wc: &Wc,
    ) {
        let failure = Failure::of(self.links.status(link, wc), self.not_executed);
        let Some(record) = self.links.get_mut(link) else {
            return;
        };
        let block = record
            .block
            .as_ref()
            .filter(|block| !block.poster.is_abandoned());
        let Some((slot, before)) = block.and_then(|block| block.poster.complete(number)) else {
            return;
        };
        let stopped = record.stopped;
        if record.port.is_some() {
            self.room_on_circuit(link, usize::from(before) + 1);
        }
        // the context of a request is the key of its operation
        let key = RmaKey::from_number(slot.context as u32);
        if let Some(op) = self.rma.ops.get_mut(key) {
            match failure {
                // unsignaled requests of the part, before this one, have succeeded
                Some(failure) => {
                    // the engine posts a request without effect for a part that it has refused
                    let refused = slot.refused.is_some();
                    let not_executed = refused || stopped || failure.not_executed();
                    let untouched = not_executed && before == 0 && !op.begun;
                    op.note_failure(&failure, untouched);
                }
                None => match slot.refused {
                    Some(error) => refused_part(op, error),
                    None => {
                        op.executed += u32::from(!slot.more);
                        op.begun = slot.more;
                    }
                },
            }
            if !slot.more {
                op.parts = op.parts.saturating_sub(1);
            }
        }
        #[cfg(test)]
        if failure.is_none() && slot.more && std::mem::take(&mut self.tests.breaks_begun) {
            let record = self.links.get_mut(link);
            let qp = record.and_then(|record| record.qp.clone());
            qp.map(|qp| qp.set_error());
        }
        if let Some(failure) = failure {
            self.request_failed(core, link, &failure);
        }
        if !slot.more {
            self.end_or_repeat_rma(core, key);
        }
    }

    /// Ends an operation of which nothing is under way any more, or repeats it.
    #[inline]
    pub(in crate::rdm) fn end_or_repeat_rma(&mut self, core: &mut Core<Self>, key: RmaKey) {
        let Some(op) = self.rma.ops.get_mut(key) else {
            return;
        };
        let broken = op.again || op.uncertain || op.fault.is_some();
        if op.parts != 0 || !op.is_posted() && !broken {
            return;
        }
        if op.fault.is_none() && (op.again || op.uncertain) {
            return self.recover_rma(core, key);
        }
        match (op.fault, op.notice) {
            (None, Notice::Due(data)) => {
                op.notice = Notice::Sent;
                self.send_notice(core, key, data);
            }
            (None, Notice::Sent) => {}
            (_, _) => self.finish_rma(core, key),
        }
    }

    /// Sends the remote CQ data of a write.
    fn send_notice(&mut self, core: &mut Core<Self>, of: RmaKey, data: u64) {
        let Some(op) = self.rma.ops.get(of) else {
            return;
        };
        let (peer, order) = (op.peer, op.order);
        let len = u32::try_from(op.len()).unwrap_or(u32::MAX);
        let mut notice = Operation::new(Kind::Notice { of, data, len }, peer);
        notice.order = order;
        let Some(key) = self.tx.insert(notice) else {
            return self.notice_ended(of, Err(FiErrno::ENOMEM));
        };
        let send = SendOp {
            op: key,
            uses: Uses::Part(Credit::new(1, 1)),
            ack: false,
        };
        if let Err(error) = core.send(peer, send, self) {
            self.tx.free(key);
            self.notice_ended(of, Err(error));
        }
    }

    /// The packet with the remote CQ data of a write is complete. Called by the core, which is
    /// called afterwards.
    pub(super) fn notice_ended(&mut self, of: RmaKey, result: Result<()>) {
        if let Some(op) = self.rma.ops.get_mut(of) {
            op.notice = Notice::No;
            if let Err(error) = result {
                op.fault = op.fault.or(Some(Fault::of(error)));
            }
            self.todo.push_back(Todo::EndOrRepeatRma(of));
        }
    }

    /// Reports an operation.
    fn finish_rma(&mut self, core: &mut Core<Self>, key: RmaKey) {
        let Some(op) = self.rma.ops.get_mut(key) else {
            return;
        };
        let completion = op.completion();
        if op.atomic.is_some() && op.fault.is_none() {
            self.copy_results(key);
        }
        let Some(op) = self.rma.ops.get_mut(key) else {
            return;
        };
        match (op.call(), op.fault) {
            (Some(call), fault) => self.completions.ranges_ended(call, 1, fault),
            (None, None) => self.completions.rma_done(completion, op.wanted),
            (None, Some(fault)) => self.completions.rma_failed(completion, fault),
        }
        let (slot, held, peer) = (op.slot.take(), op.held, op.peer);
        if op.fault.is_none() {
            core.note_executed(peer);
        }
        self.rma.free(key);
        if let Some(slot) = slot {
            self.memory.give_back(slot);
            self.has_memory();
        }
        if held {
            core.release(peer, self);
        }
        if !self.rma.blocked.is_empty() {
            let blocked = std::mem::take(&mut self.rma.blocked);
            self.todo.extend(blocked.into_iter().map(Todo::Room));
        }
    }

    /// Removes an operation that was refused.
    pub(super) fn forget_rma(&mut self, key: RmaKey) {
        if let Some(op) = self.rma.ops.remove(key)
            && let Some(slot) = op.slot
        {
            self.memory.give_back(slot);
        }
    }

    /// Remote CQ data of a peer's write has arrived.
    pub(super) fn noticed(&mut self, origin: Origin, data: u64, len: u32) -> Credit {
        let blocks = Credit::new(1, 0);
        match self.completions.noticed(origin, (data, len), blocks) {
            true => Credit::new(0, 1),
            false => Credit::new(1, 1),
        }
    }

    /// Whether injected data, or remote CQ data, has not reached its peer. An operation without a
    /// hold has failed, or its peer is this endpoint, which is being closed.
    pub(super) fn owes_rma(&self) -> bool {
        self.rma
            .ops
            .any(|op| op.held && (op.request.flags.contains(Flags::INJECT) || op.atomic.is_some()))
    }
}
