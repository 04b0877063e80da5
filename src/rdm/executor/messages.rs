//! Messages between packets and receives: matching, storing, the parts of long messages, and
//! messages to the endpoint itself.

use super::own_rma::CALL;
use super::{Executor, PacketMemoryRef, Step, Todo};
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::matching::Release;
use crate::rdm::completions::{Reader, Side};
use crate::rdm::core::direct::PART;
use crate::rdm::core::ops::{Form, Uses};
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Origin, SendOp};
use crate::rdm::iov::{Iov, copy_short};
use crate::rdm::operations::{Kind, Operation, PAYLOAD};
use crate::rdm::receive::completion_of;
use crate::rdm::receives::{Arrival, AtSender, Envelope, Payload, Stored, Target, index_of};
use crate::rdm::table_keys::{ArrivalKey, StoredKey, TxKey};
use crate::wire::rdm::packet::eager_credit;
use crate::wire::rdm::terms::MAX_DATA;
use crate::wire::rdm::{Credit, OpId};

/// Number of incomplete FIN packets of an endpoint beyond which FIN holds credit of its RTS.
const MAX_FINS: usize = 1024;

/// The blocks of RTS, and the part of them that FIN holds. The entry of a message in a
/// multi-receive buffer may hold the other part, so each of them is bounded.
const BLOCKS: Credit = Credit::new(2, 0);
const HELD: Credit = Credit::new(1, 0);

impl Executor {
    /// A message that arrives as EAGER. Returns the credit that it does not use any more.
    #[inline]
    pub(super) fn eager(
        &mut self,
        origin: Origin,
        envelope: &Envelope,
        place: &PacketMemoryRef,
        at: usize,
    ) -> Credit {
        let len = envelope.len as usize;
        let target = match self.rx.own() {
            Some(store) => {
                let matched = store.find(envelope, index_of(envelope.peer));
                // a whole receive that is long enough
                if let Some(matched) = &matched
                    && matched.piece.is_none()
                    && let Some(receive) = store.receive(matched.receive)
                    && receive.iov.len() >= len
                {
                    // SAFETY: the application keeps the buffers until the receive completes; the
                    // decoder has checked the length.
                    unsafe { place.copy_to(&self.memory, (at, len), &receive.iov, 0) };
                    let completion = receive.completion(envelope.tag, envelope.data, len);
                    let (from, wanted) = (Some(envelope.peer), receive.wanted);
                    self.completions.done(completion, from, wanted);
                    store.release(matched.receive);
                    return eager_credit(len as u32);
                }
                matched.and_then(|matched| store.target(&matched))
            }
            None => self.rx.arrive(envelope),
        };
        match target {
            Some(target) => {
                let to = &target.receive.iov;
                // SAFETY: the application keeps the buffers until the receive completes; the
                // decoder has checked the length.
                unsafe { place.copy_to(&self.memory, (at, len), to, 0) };
                // at most 8 KiB
                let credit = eager_credit(len as u32);
                let blocks = Credit::new(credit.blocks, 0);
                if self.message_complete(&target, envelope, Some((origin, blocks))) {
                    Credit::new(0, 1)
                } else {
                    credit
                }
            }
            None => {
                let payload = match place {
                    PacketMemoryRef::Slot(slot) => {
                        self.rx.copy(&self.memory.bytes(slot)[at..at + len])
                    }
                    // SAFETY: the decoder has checked the length, and the ring holds the packet.
                    PacketMemoryRef::Ring(packet) => unsafe {
                        self.rx.copy_from(packet.at(at), len)
                    },
                };
                if !self.store(envelope, Payload::Bytes(origin, payload)) {
                    self.todo.push_back(Todo::Dropped(origin));
                    return eager_credit(len as u32);
                }
                Credit::new(0, 1)
            }
        }
    }

    /// Fast path of [`Self::eager`]: copies `len` bytes at `from` into a receive that takes one
    /// message and whose first buffer is long enough. `false`: nothing has changed.
    ///
    /// # Safety
    /// The bytes are readable; a hostile peer may change them.
    #[inline(always)]
    pub(super) unsafe fn fill_whole(
        &mut self,
        peer: PeerKey,
        (tag, data): (Option<u64>, Option<u32>),
        (from, len): (*const u8, usize),
        reader: Option<&mut Reader<'_, '_>>,
    ) -> bool {
        let Some(store) = self.rx.own() else {
            return false;
        };
        let Some((found, receive)) = store.recent(tag, index_of(peer)) else {
            return false;
        };
        let Some(to) = receive.iov.first(len) else {
            return false;
        };
        // SAFETY: the application keeps the buffer until the receive completes; the caller promises
        // the source, which is memory of the engine.
        unsafe { copy_short(from, to, len) };
        let completion = receive.completion(tag, data.map(u64::from), len);
        let wanted = receive.wanted;
        store.take_recent(tag.is_some(), &found);
        self.completions.received(&completion, peer, wanted, reader);
        true
    }

    /// Stores a message that no receive has matched. `false`: 2^24 messages are stored.
    pub(super) fn store(&mut self, envelope: &Envelope, payload: Payload) -> bool {
        match self.rx.store(*envelope, payload) {
            Ok(None) => true,
            Ok(Some((stored, target))) => {
                self.deliver_message(stored, target);
                true
            }
            Err(()) => false,
        }
    }

    /// A message is complete in its receive. `blocks`: the credit that it uses. Returns whether its
    /// entry keeps this credit; otherwise the caller gives it back.
    #[inline]
    pub(super) fn message_complete(
        &mut self,
        target: &Target,
        envelope: &Envelope,
        blocks: Option<(Origin, Credit)>,
    ) -> bool {
        let len = (target.receive.iov.len() as u64).min(envelope.len);
        let beyond = envelope.len - len;
        let result = if beyond == 0 {
            Ok(())
        } else {
            Err((FiErrno::ETRUNC, beyond as usize))
        };
        self.received_message(target, envelope, len as usize, result, blocks)
    }

    /// Reports the result of a receive: with an error, the number of bytes beyond the buffer too.
    /// `blocks` and the result: see [`Self::message_complete`].
    pub(super) fn received_message(
        &mut self,
        target: &Target,
        envelope: &Envelope,
        len: usize,
        result: std::result::Result<(), (FiErrno, usize)>,
        blocks: Option<(Origin, Credit)>,
    ) -> bool {
        let mut kept = false;
        let receive = &target.receive;
        let mut completion = receive.completion(envelope.tag, envelope.data, len);
        let mut cancelled = None;
        if let Some(multi) = target.multi {
            completion.buf = receive.iov.addr();
            let wanted = result.is_err() || receive.wanted || self.rx.reports_all();
            if wanted && self.rx.is_of_context() && self.completions.bound[Side::Rx as usize] {
                // the buffer is released when this entry, and all others of it, were taken
                let none = (Origin::of_itself(envelope.peer), Credit::ZERO);
                let result = result.map(|()| blocks.unwrap_or(none));
                let kept = result.is_ok() && blocks.is_some();
                self.completions
                    .part(completion, envelope.peer, result, multi);
                return kept;
            }
            match self.rx.finished(receive.tagged, multi) {
                Release::Held => {}
                Release::Last => completion.flags |= Flags::MULTI_RECV,
                Release::Cancelled => cancelled = Some(completion_of(receive)),
            }
        }
        match result {
            Ok(()) => {
                let released = completion.flags.contains(Flags::MULTI_RECV);
                let wanted = receive.wanted || self.rx.reports_all() || released;
                let from = envelope.peer;
                match blocks.filter(|_| target.multi.is_some()) {
                    Some(blocks) => {
                        kept = self.completions.held(completion, from, wanted, blocks);
                    }
                    None => self.completions.done(completion, Some(from), wanted),
                }
            }
            Err((error, olen)) => self.completions.failed(completion, olen, error),
        }
        if let Some(mut completion) = cancelled {
            completion.flags |= Flags::MULTI_RECV;
            self.completions.failed(completion, 0, FiErrno::ECANCELED);
        }
        kept
    }

    /// A stored message has got its receive.
    pub(in crate::rdm) fn deliver_stored(&mut self, key: StoredKey, target: Target) {
        if let Some(stored) = self.rx.take(key) {
            self.deliver_message(stored, target);
        }
    }

    fn deliver_message(&mut self, stored: Stored, target: Target) {
        let envelope = stored.envelope;
        match stored.payload {
            Payload::Bytes(origin, bytes) => {
                // SAFETY: the application keeps the buffers until the receive completes.
                unsafe { target.receive.iov.write(0, &bytes) };
                let blocks = Credit::new(eager_credit(bytes.len() as u32).blocks, 0);
                if !self.message_complete(&target, &envelope, Some((origin, blocks))) {
                    self.todo.push_back(Todo::GiveBack(origin, blocks));
                }
                self.rx.recycle(bytes);
            }
            Payload::AtSender(origin, at) => self.begin_arrival(origin, at, envelope, target),
            Payload::Own(op) => self.deliver_own(op, &envelope, &target),
            Payload::Lost => {
                let result = Err((FiErrno::ECONNABORTED, 0));
                self.received_message(&target, &envelope, 0, result, None);
            }
        }
    }

    /// Releases the memory of a stored message, and gives its blocks back.
    fn forget_bytes(&mut self, origin: Origin, bytes: Vec<u8>) {
        let blocks = Credit::new(eager_credit(bytes.len() as u32).blocks, 0);
        self.todo.push_back(Todo::GiveBack(origin, blocks));
        self.rx.recycle(bytes);
    }

    /// Drops a stored message without a receive (`FI_DISCARD`, close).
    pub(in crate::rdm) fn discard_stored(&mut self, key: StoredKey) {
        let Some(stored) = self.rx.take(key) else {
            return;
        };
        match stored.payload {
            Payload::Bytes(origin, bytes) => self.forget_bytes(origin, bytes),
            Payload::AtSender(origin, AtSender { op, .. }) => {
                let (held, blocks) = self.credit_of_fin();
                self.todo.push_back(Todo::GiveBack(origin, blocks));
                self.post_fin(origin, op, 0, held);
            }
            Payload::Own(op) => {
                if let Some(op) = self.tx.get_mut(op) {
                    (op.in_core, op.form) = (false, Form::Whole);
                }
                self.finish_if_over(op);
            }
            Payload::Lost => {}
        }
    }

    /// Begins to read a message from its sender, or asks for its parts.
    pub(super) fn begin_arrival(
        &mut self,
        origin: Origin,
        at: AtSender,
        envelope: Envelope,
        target: Target,
    ) {
        let (held, blocks) = self.credit_of_fin();
        let op = at.op;
        let room = (target.receive.iov.len() as u64).min(envelope.len);
        let pull = self.pull_of(origin.peer, &at, room);
        if envelope.len == 0 || pull.is_some() && room == 0 {
            if !self.message_complete(&target, &envelope, Some((origin, blocks))) {
                self.todo.push_back(Todo::GiveBack(origin, blocks));
            }
            return self.post_fin(origin, op, 0, held);
        }
        // the entries of such messages in a multi-receive buffer are bounded by its length
        self.todo.push_back(Todo::GiveBack(origin, blocks));
        let mut arrival = Arrival::new((origin, op), envelope, target, pull);
        arrival.held = held;
        let Some(key) = self.insert_arrival(arrival) else {
            return;
        };
        self.todo.push_back(Todo::Begin(origin, key));
        match pull {
            // a truncated message is not needed as a whole
            Some(_) if self.streams.polled && room == envelope.len => {
                self.todo.push_back(Todo::Choose(origin, key, at.link));
            }
            Some(_) => self.begin_pull(origin.peer, key),
            None => self.ask_for_parts(origin, key, op),
        }
    }

    /// Asks the sender of a message for its parts.
    pub(super) fn ask_for_parts(&mut self, origin: Origin, key: ArrivalKey, op: OpId) {
        if let Some(receiver) = self.rx.arrivals.name(key) {
            self.answer(origin, Kind::Cts { op, receiver });
        }
    }

    /// Enters a message that arrives. `None`: 2^24 do already, and it has failed.
    pub(super) fn insert_arrival(&mut self, arrival: Arrival) -> Option<ArrivalKey> {
        let Arrival {
            target,
            envelope,
            origin,
            op,
            held,
            ..
        } = arrival;
        let key = self.rx.arrivals.insert(arrival);
        if key.is_none() {
            let result = Err((FiErrno::ENOMEM, 0));
            self.received_message(&target, &envelope, 0, result, None);
            let status = FiErrno::ENOMEM.code() as u16;
            self.post_fin(origin, op, status, held);
        }
        key
    }

    /// Whether FIN of a message holds credit of its RTS, and the blocks that are given back before.
    /// A peer that takes its answers slowly cannot make this side keep any number of them.
    fn credit_of_fin(&self) -> (bool, Credit) {
        match self.fins.incomplete < MAX_FINS {
            true => (false, BLOCKS),
            false => (true, BLOCKS.sub(HELD)),
        }
    }

    /// Posts FIN. `held`: see [`Self::credit_of_fin`].
    pub(super) fn post_fin(&mut self, origin: Origin, op: OpId, status: u16, held: bool) {
        self.fins.incomplete += 1;
        self.fins.held += usize::from(held);
        let held = held.then_some(origin);
        self.answer(origin, Kind::Fin { op, status, held });
    }

    /// A packet is complete, or has failed. If it is an answer that holds credit, the credit is
    /// given back.
    #[inline]
    pub(super) fn answer_ended(&mut self, kind: Kind) {
        match kind {
            Kind::Result { held, .. } => self.result_ended(held),
            Kind::Fin { held, .. } => self.fin_ended(held),
            _ => {}
        }
    }

    fn fin_ended(&mut self, held: Option<Origin>) {
        self.fins.incomplete -= 1;
        if let Some(origin) = held {
            self.fins.held -= 1;
            self.todo.push_back(Todo::GiveBack(origin, HELD));
        }
    }

    /// Answers a packet.
    pub(super) fn answer(&mut self, origin: Origin, kind: Kind) {
        self.answer_with(origin, Operation::new(kind, origin.peer));
    }

    /// As [`Self::answer`], with an operation that may have a payload.
    pub(super) fn answer_with(&mut self, origin: Origin, answer: Operation) {
        let kind = answer.kind;
        if let Some(key) = self.tx.insert(answer) {
            self.todo.push_back(Todo::Answer(origin, key));
        } else {
            self.answer_ended(kind);
            self.todo.extend(self.arriving.map(Todo::Violated));
        }
    }

    /// An answer could not be sent, because the session of its packet has ended.
    pub(in crate::rdm) fn answer_failed(&mut self, key: TxKey) {
        let kind = self.tx.get(key).map(|op| op.kind);
        self.finish(key, Err(FiErrno::ECONNABORTED));
        match kind {
            Some(Kind::Cts { receiver, .. }) => {
                if let Some(arrival) = self.rx.arrivals.named(receiver) {
                    self.fail_arrival(arrival, true);
                }
            }
            Some(Kind::Push { receiver, .. }) => {
                if let Some(arrival) = self.rx.arrivals.named(receiver)
                    && self.end_pull(arrival)
                {
                    self.fail_arrival(arrival, true);
                }
            }
            _ => {}
        }
    }

    /// Ends an arrival in error. `held`: its peer is held.
    pub(in crate::rdm) fn fail_arrival(&mut self, key: ArrivalKey, held: bool) {
        if let Some(mut arrival) = self.rx.arrivals.remove(key) {
            let peer = arrival.origin.peer;
            if arrival.held {
                self.todo.push_back(Todo::GiveBack(arrival.origin, HELD));
            }
            let push = arrival.push.take();
            match push.map(|push| push.sink.end(&mut self.source_keys)) {
                // its sender, or another peer, is writing
                Some(Err(sink)) => {
                    self.rx.failing += 1;
                    self.steps.push(Step::EndSink(sink, Box::new(arrival)));
                }
                _ => self.arrival_failed(&arrival),
            }
            if held {
                self.todo.push_back(Todo::Release(peer));
            }
        }
    }

    /// No peer writes any more to the buffer of a receive that has failed.
    pub(in crate::rdm) fn sink_ended(&mut self, arrival: &Arrival) {
        self.rx.failing -= 1;
        self.arrival_failed(arrival);
    }

    /// Reports a receive that has failed.
    fn arrival_failed(&mut self, arrival: &Arrival) {
        let result = Err((FiErrno::ECONNABORTED, 0));
        let len = arrival.arrived.max(arrival.prefix) as usize;
        self.received_message(&arrival.target, &arrival.envelope, len, result, None);
    }

    /// A part of a message.
    pub(super) fn data(
        &mut self,
        origin: Origin,
        op: OpId,
        offset: u64,
        from: &PacketMemoryRef,
        (at, len): (usize, usize),
    ) {
        let Some(key) = self.rx.arrivals.named(op) else {
            // the receive has failed meanwhile, or was completed by READs
            return;
        };
        let arrival = self.rx.arrivals.get_mut(key);
        let Some(arrival) = arrival.filter(|it| it.origin == origin) else {
            // the same, and the name was used again
            return;
        };
        let left = arrival.envelope.len - arrival.prefix;
        if !arrival.asked || offset != arrival.prefix || len as u64 > left {
            return self.todo.extend(self.arriving.map(Todo::Violated));
        }
        let to = &arrival.target.receive.iov;
        // SAFETY: the application keeps the buffers until the receive completes; the decoder has
        // checked the length.
        unsafe { from.copy_to(&self.memory, (at, len), to, offset as usize) };
        arrival.prefix += len as u64;
        if arrival.has_all_parts() {
            // READs of a message that was not continued may be under way
            match arrival.pull.map(|pull| pull.reads) {
                None => self.arrival_complete(key),
                Some(0) => {
                    self.pulls.forget(origin.peer, key);
                    self.arrival_complete(key);
                }
                Some(_) => {}
            }
        }
    }

    /// All of a message has arrived: reports it, and ends the operation of the sender.
    pub(super) fn arrival_complete(&mut self, key: ArrivalKey) {
        if let Some(arrival) = self.rx.arrivals.remove(key) {
            self.paces.completed(key);
            let (origin, op) = (arrival.origin, arrival.op);
            self.message_complete(&arrival.target, &arrival.envelope, None);
            self.todo.push_back(Todo::Release(origin.peer));
            self.post_fin(origin, op, 0, arrival.held);
        }
    }

    /// The receiver asks for the parts of a message. `None`: it has no such message, whose
    /// operation may have failed.
    pub(super) fn cts(&mut self, origin: Origin, key: TxKey, receiver: OpId) -> Option<()> {
        let op = self.tx.get_mut(key)?;
        if !op.is_announced() || op.peer != origin.peer || op.receiver.is_some() {
            return None;
        }
        op.receiver = Some(receiver);
        self.continue_parts(key);
        Some(())
    }

    /// Sends further parts of a message, of which at most `most` are under way.
    pub(super) fn send_parts(&mut self, key: TxKey, most: u32) {
        while let Some(op) = self.tx.get(key)
            && op.fin.is_none()
            && op.parts < most
            && let peer = op.peer
            && let Some(part) = self.next_part(key)
        {
            let send = SendOp {
                op: part,
                uses: Uses::Part(PART),
                ack: false,
            };
            self.todo.push_back(Todo::Send(peer, send));
        }
    }

    /// The operation of the next part of a message that the receiver has asked for.
    pub(super) fn next_part(&mut self, key: TxKey) -> Option<TxKey> {
        let op = self.tx.get(key).filter(|op| op.next < op.len)?;
        let (receiver, offset) = (op.receiver?, op.next);
        let len = (op.len - offset).min(MAX_DATA as usize);
        // the message keeps its slot until all parts are complete
        let iov = match &op.slot {
            Some(slot) if op.copied => {
                Iov::of_memory(&self.memory.bytes(slot)[PAYLOAD..PAYLOAD + op.len])
            }
            _ => op.iov,
        };
        let data = Kind::Data {
            of: key,
            offset: offset as u64,
        };
        let mut part = Operation::new(data, op.peer);
        (part.receiver, part.len) = (Some(receiver), len);
        part.iov = iov.part(offset, len);
        let part = self.tx.insert(part)?;
        let op = self.tx.get_mut(key)?;
        op.next += len;
        op.parts += 1;
        Some(part)
    }

    /// Delivers a message to this endpoint itself.
    pub(super) fn loop_back_now(&mut self, key: TxKey) {
        let Some(op) = self.tx.get(key) else {
            return;
        };
        if let Kind::Atomic(atomic) = op.kind {
            return self.own_atomic(key, &atomic);
        }
        let envelope = Envelope {
            peer: op.peer,
            tag: op.message.tag,
            data: op.message.data,
            len: op.len as u64,
        };
        match self.rx.arrive(&envelope) {
            Some(target) => self.deliver_own(key, &envelope, &target),
            None => {
                if !self.store(&envelope, Payload::Own(key)) {
                    self.finish(key, Err(FiErrno::ENOMEM));
                }
            }
        }
    }

    fn deliver_own(&mut self, key: TxKey, envelope: &Envelope, target: &Target) {
        if let Some(op) = self.tx.get(key) {
            let to = &target.receive.iov;
            match &op.slot {
                Some(slot) if op.copied => {
                    let payload = &self.memory.bytes(slot)[PAYLOAD..PAYLOAD + op.len];
                    // SAFETY: the application keeps the buffers until the receive completes.
                    unsafe { to.write(0, payload) };
                }
                _ if op.iov.len().min(to.len()) > CALL => {
                    return self.begin_own_copy(key, envelope, target);
                }
                // SAFETY: the application keeps the buffers until both operations complete.
                _ => unsafe {
                    to.copy_from(&op.iov);
                },
            }
        }
        self.message_complete(target, envelope, None);
        self.finish(key, Ok(()));
    }
}
