//! Long messages that both processors copy at the same time: the receiver reads the begin, and the
//! sender, if its application polls, writes the end. `docs/protocol-rdm.md`, "Long messages".
//!
//! The fast path takes RTS, PUSH and PUSHED where they are found in a ring
//! (`executor::announced`): none of them has an operation. Everything else takes the way through
//! the tables.

#![allow(
    unsafe_code,
    reason = "registers and writes buffers of the application"
)]

use super::announced::{Announcement, Taken};
use super::pull::READ_BYTES;
use super::{Executor, Step, Todo};
use crate::mr::Withdrawn;
use crate::rdm::completions::Reader;
use crate::rdm::core::direct::PART;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Uses;
use crate::rdm::core::{Core, Origin, SendOp};
use crate::rdm::iov::Iov;
use crate::rdm::long::pulls::{PullState, Push, Sink};
use crate::rdm::long::streams::Asked;
use crate::rdm::operations::{Kind, Operation};
use crate::rdm::receives::{Arrival, AtSender, Target, index_of};
use crate::rdm::table_keys::{ArrivalKey, TxKey};
use crate::verbs::{Lkey, RemoteAddr, Rkey, Sge};
use crate::wire::rdm::packet::RTS_CREDIT;
use crate::wire::rdm::ring::{self, End, Source};
use crate::wire::rdm::{Credit, Header, OpId};

/// The end of a message begins at a multiple of this.
const ALIGN: u64 = 4096;

/// Offset of the end of a message of `len` bytes that its sender writes: its half, or less if that
/// is more than the sender writes in one call.
const fn end_offset(len: u64) -> u64 {
    let half = len / 2 / ALIGN * ALIGN;
    let last = len.saturating_sub(READ_BYTES);
    if half > last { half } else { last }
}

impl Executor {
    /// Asks the sender to write the end of a message, and begins to read the begin. `false`:
    /// nothing has begun, because that part of the receive is no single buffer, or cannot be
    /// registered.
    pub(super) fn begin_push(&mut self, origin: Origin, key: ArrivalKey) -> bool {
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return false;
        };
        let Some(pull) = &mut arrival.pull else {
            return false;
        };
        let (op, iov, len) = (arrival.op, arrival.target.receive.iov, pull.end);
        let Some(receiver) = self.rx.arrivals.name(key) else {
            return false;
        };
        let Some((push, to)) = self.register_end(&iov, len) else {
            return false;
        };
        let offset = push.offset;
        if let Some(arrival) = self.rx.arrivals.get_mut(key) {
            if let Some(pull) = &mut arrival.pull {
                pull.end = offset;
            }
            arrival.push = Some(push);
        }
        let push = Kind::Push {
            op,
            offset,
            to,
            receiver,
        };
        self.streams.begin(key);
        self.answer(origin, push);
        self.begin_pull(origin.peer, key);
        true
    }

    /// Registers the end of a receive for a message of `len` bytes, which fits into it. `None`:
    /// that part is no single buffer, or cannot be registered.
    #[inline]
    fn register_end(&mut self, iov: &Iov, len: u64) -> Option<(Push, (RemoteAddr, Rkey))> {
        let offset = end_offset(len);
        // within the receive, whose length is a usize
        let len = (len - offset) as usize;
        let piece = iov.piece(offset as usize, len)?.iovec();
        if piece.iov_len != len {
            return None;
        }
        // SAFETY: the application keeps the buffer until the receive is reported. Before that the
        // sink has ended, or its sender has stated that it has written.
        let sink = unsafe { self.source_keys.open_sink(&piece) }.ok()?;
        let replaced = self.source_keys.replaced();
        self.withdraw(replaced);
        let to = (RemoteAddr::new(piece.iov_base as u64), sink.rkey());
        let sink = Sink::Open(sink);
        Some((Push { offset, sink }, to))
    }

    /// Releases the registration of the end of a message that its sender has written.
    #[inline]
    fn release_sink(&mut self, push: Option<Push>) {
        let busy = match push.map(|push| push.sink) {
            Some(Sink::Open(source)) => self.source_keys.release(source),
            Some(Sink::Ends(withdrawn)) => Some(withdrawn),
            None => None,
        };
        self.withdraw(busy);
    }

    /// A registration that is ended by a thread that may wait.
    #[inline]
    fn withdraw(&mut self, busy: Option<Withdrawn>) {
        self.steps
            .extend(busy.map(|it| Step::Withdraw(Some(it), None)));
    }

    /// Takes the announcement of a message that both sides copy, which is the next packet of its
    /// peer ([`Self::may_read`]): asks for the end of the message and reads the begin, without
    /// operations. `None`: nothing has changed.
    pub(super) fn announced_to_both(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        announcement: &Announcement,
        (origin, out): (Origin, LinkKey),
    ) -> Option<Taken> {
        let peer = origin.peer;
        let ring = self.links.get_mut(key)?.ring.as_ref()?;
        if !ring.is_large() || self.streams.was_late(peer) {
            return None;
        }
        let envelope = announcement.envelope_of(peer);
        let store = self.rx.own()?;
        let target = match store.recent(envelope.tag, index_of(peer)) {
            Some((found, receive)) => {
                let receive = *receive;
                store.take_recent(envelope.tag.is_some(), &found);
                Target {
                    receive,
                    multi: None,
                    posting: None,
                }
            }
            None => {
                let matched = store.find(&envelope, index_of(peer))?;
                store.target(&matched)?
            }
        };
        let half = core.take_answered(peer, RTS_CREDIT, Credit::new(0, 1));
        let Source { op, addr, rkey, .. } = announcement.source;
        let at = AtSender {
            op,
            addr,
            rkey,
            link: Some(key),
        };
        let fits =
            target.multi.is_none() && target.receive.iov.first(envelope.len as usize).is_some();
        let end = match fits {
            true => self.register_end(&target.receive.iov, envelope.len),
            false => None,
        };
        let Some((push, to)) = end else {
            // the way of all other messages
            self.begin_arrival(origin, at, envelope, target);
            return Some(Taken::Begun(half));
        };
        let half = half | core.give_back_answered(peer, Credit::new(2, 0));
        let offset = push.offset;
        // it has an address, and READs from the peer have not been refused
        let pull = self.pull_of(peer, &at, offset);
        let arrival = Arrival::new((origin, op), envelope, target, pull);
        let arrival = self.insert_arrival(arrival);
        let named = arrival.and_then(|key| Some((key, self.rx.arrivals.name(key)?)));
        let Some((arrival, receiver)) = named else {
            self.release_sink(Some(push));
            return Some(Taken::Begun(half));
        };
        if let Some(arrival) = self.rx.arrivals.get_mut(arrival) {
            arrival.push = Some(push);
        }
        #[cfg(test)]
        {
            self.tests.both_in_ring.0 += 1;
        }
        core.hold(peer, self);
        self.paces.choose(peer, envelope.len, arrival);
        self.streams.begin(arrival);
        let end = End {
            op,
            offset,
            addr: to.0,
            rkey: to.1,
            receiver,
        };
        if !self.answer_to_ring(core, (peer, Credit::ZERO), |header| {
            ring::push(header, &end)
        }) {
            let push = Kind::Push {
                op,
                offset,
                to,
                receiver,
            };
            self.answer(origin, push);
        }
        match self.read_at_once(out, arrival) {
            true => self.pulls.succeeded(peer),
            false => self.begin_pull(peer, arrival),
        }
        Some(Taken::Begun(half))
    }

    /// Takes PUSH, if it is the next packet of its peer and this call may write what it asks for:
    /// writes it and answers, without an operation. `None`: nothing has changed.
    pub(super) fn asked_in_ring(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        (header, end): (&Header, &End),
    ) -> Option<()> {
        let (origin, _) = core.answered(link, header, Credit::ZERO)?;
        let asked = Asked {
            origin,
            link,
            op: TxKey::from_number(end.op.get()),
            receiver: end.receiver,
            to: (end.addr, end.rkey),
            offset: end.offset,
        };
        if !self.streams.polled || !self.streams.asked.is_empty() || self.bytes_copied >= READ_BYTES
        {
            return None;
        }
        let op = self.tx.get_mut(asked.op)?;
        if !op.is_announced() || op.peer != origin.peer || op.pushed {
            return None;
        }
        op.pushed = true;
        core.take_end(origin.peer, false);
        let written = self.write_end(&asked).unwrap_or(0);
        let sent = self.answer_to_ring(core, (origin.peer, PART), |header| {
            ring::pushed(header, asked.receiver, written.into())
        });
        if !sent {
            self.post_pushed(&asked, written);
        }
        Some(())
    }

    /// Takes PUSHED, if it is the next packet of its peer and completes a message: ends the message
    /// without an operation. `None`: nothing has changed. Otherwise whether the peer has used half
    /// of its credit.
    pub(super) fn pushed_in_ring(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        (header, name, written): (&Header, OpId, u64),
        reader: Option<&mut Reader<'_, '_>>,
    ) -> Option<bool> {
        let (origin, _) = core.answered(link, header, PART)?;
        let key = self.rx.arrivals.named(name)?;
        let arrival = self.rx.arrivals.get(key)?;
        let (pull, push) = (arrival.pull.as_ref()?, arrival.push.as_ref()?);
        let target = &arrival.target;
        let ends = arrival.origin == origin
            && pull.state == PullState::Reads
            && pull.reads == 0
            && arrival.arrived == pull.end
            && arrival.envelope.len - push.offset == written
            && matches!(push.sink, Sink::Open(_))
            && !arrival.held
            && target.multi.is_none()
            && target.posting.is_none();
        if !ends || self.rx.own().is_none() {
            return None;
        }
        let arrival = self.rx.arrivals.remove(key)?;
        #[cfg(test)]
        {
            self.tests.both_in_ring.1 += 1;
        }
        let half = core.take_answered(origin.peer, PART, PART);
        self.release_sink(arrival.push);
        self.paces.completed(key);
        self.end_at_sender(core, origin, arrival.op);
        self.pass_received(&arrival.envelope, &arrival.target.receive, reader);
        core.release(origin.peer, self);
        Some(half)
    }

    /// A receiver asks for the end of a message: it is written now, if those before it are written
    /// and this call has copied less than [`READ_BYTES`]. A receiver asks once for a message. A
    /// hostile one asks again: this is ignored, so it costs neither a copy nor an operation.
    pub(super) fn push(&mut self, asked: Asked) {
        let op = self.tx.get_mut(asked.op);
        let Some(op) = op.filter(|op| op.is_announced() && op.peer == asked.origin.peer) else {
            // it may have failed before the packet arrived
            return;
        };
        if std::mem::replace(&mut op.pushed, true) {
            return;
        }
        let writes = self.bytes_copied < READ_BYTES;
        match self.streams.polled {
            // no later call goes on: the receiver reads what this one does not write
            false => self.answer_push(&asked, writes),
            true if writes && self.streams.asked.is_empty() => self.answer_push(&asked, true),
            true => self.streams.asked.push_back(asked),
        }
    }

    /// Writes ends of messages; `now`: the application does not poll any more, and they are not
    /// written.
    pub(super) fn run_pushes(&mut self, now: bool) {
        while now || self.bytes_copied < READ_BYTES {
            let Some(asked) = self.streams.asked.pop_front() else {
                return;
            };
            self.answer_push(&asked, !now);
        }
    }

    /// Answers a request for the end of a message, which is written before if `writes`.
    fn answer_push(&mut self, asked: &Asked, writes: bool) {
        let written = match writes {
            true => self.write_end(asked).unwrap_or(0),
            false => 0,
        };
        self.post_pushed(asked, written);
    }

    fn post_pushed(&mut self, asked: &Asked, written: u32) {
        let answer = Kind::Pushed {
            op: asked.receiver,
            written: written.into(),
        };
        let peer = asked.origin.peer;
        match self.tx.insert(Operation::new(answer, peer)) {
            Some(op) => {
                let send = SendOp {
                    op,
                    uses: Uses::Part(PART),
                    ack: false,
                };
                self.todo
                    .push_back(Todo::AnswerWithCredit(asked.origin, send));
            }
            None => self.todo.push_back(Todo::Violated(asked.link)),
        }
    }

    /// Writes the end of a message to the memory of its receiver. Returns the number of bytes.
    /// `None`: none, or only a part of them was written.
    fn write_end(&mut self, asked: &Asked) -> Option<u32> {
        let op = self.tx.get(asked.op)?;
        // its parts were not asked for, and its buffer is registered, so it has one
        let asks = op.fin.is_none() && op.receiver.is_none() && op.source.is_some();
        let len = (op.len as u64).checked_sub(asked.offset)?;
        if !asks || !(1..=READ_BYTES).contains(&len) {
            return None;
        }
        let from = op.iov.single()?.iovec();
        let sge = Sge {
            // within the message
            addr: from.iov_base as u64 + asked.offset,
            // at most 4 MiB
            length: len as u32,
            lkey: Lkey::default(),
        };
        let link = self.links.get_mut(asked.link)?;
        // SAFETY: the application keeps the buffer until the operation is reported.
        let done = unsafe { link.write_at_once(&sge, asked.to) };
        self.bytes_copied += len;
        #[cfg(test)]
        {
            self.tests.pushed += u32::from(done);
        }
        done.then_some(sge.length)
    }

    /// The sender has written the end of a message, or has not.
    pub(super) fn pushed(&mut self, origin: Origin, name: OpId, written: u64) {
        let Some(key) = self.rx.arrivals.named(name) else {
            // the receive has failed meanwhile, or the end was read
            return;
        };
        let arrival = self.rx.arrivals.get_mut(key);
        let Some(arrival) = arrival.filter(|it| it.origin == origin) else {
            // the same, and the name was used again
            return;
        };
        let Some(push) = &arrival.push else {
            // it was read
            return;
        };
        let whole = arrival.envelope.len - push.offset == written;
        let open = matches!(push.sink, Sink::Open(_));
        if whole && open {
            let push = arrival.push.take();
            self.release_sink(push);
        } else if !arrival.end_push(&mut self.source_keys) {
            // another process writes, which has guessed the key
            return;
        }
        match whole {
            true => self.end_written(key),
            false => self.read_end(key),
        }
    }

    /// The end of a message is written.
    fn end_written(&mut self, key: ArrivalKey) {
        let pull = self.rx.arrivals.get(key).and_then(|it| it.pull);
        match pull.map(|pull| pull.state) {
            Some(PullState::Reads) => self.pull_ended(key),
            _ => self.read_end(key),
        }
    }

    /// Reads the end of a message that its sender was asked to write and does not write any more.
    fn read_end(&mut self, key: ArrivalKey) {
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return;
        };
        let (peer, len) = (arrival.origin.peer, arrival.envelope.len);
        let Some(pull) = &mut arrival.pull else {
            return;
        };
        if pull.state != PullState::Reads {
            return self.pull_ended(key);
        }
        // otherwise its begin is still listed
        let listed = pull.next != pull.end;
        pull.end = len;
        if !listed {
            self.begin_pull(peer, key);
        }
    }

    /// As if the receiver of the only announced message asked for its end with a wrong key, `times`
    /// times, and for another message. Returns the number of answers.
    #[cfg(test)]
    pub(in crate::rdm) fn is_asked(&mut self, origin: Origin, times: usize) -> usize {
        let [op] = self.tx.keys_where(Operation::is_announced)[..] else {
            panic!("several messages");
        };
        let link = self.links.keys().next().unwrap();
        let asked = Asked {
            origin,
            link,
            op,
            receiver: OpId::new(!0),
            to: (RemoteAddr::new(4096), Rkey::new(!0)),
            offset: 4096,
        };
        let before = self.tx.len();
        let other = TxKey::from_number(op.number() ^ 1 << 20);
        self.push(Asked { op: other, ..asked });
        for _ in 0..times {
            self.push(asked);
        }
        self.tx.len() - before
    }

    /// The end of a message does not come: it is read.
    pub(super) fn push_stalled(&mut self, key: ArrivalKey) {
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return;
        };
        let peer = arrival.origin.peer;
        if !arrival.end_push(&mut self.source_keys) {
            // the sender is writing
            return self.streams.begin(key);
        }
        self.streams.is_late(peer);
        self.read_end(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_half_of_a_message_and_at_most_what_one_call_writes() {
        for len in [
            1,
            4096,
            8192,
            65_536,
            100_000,
            1 << 20,
            8 << 20,
            (8 << 20) + 1,
            64 << 20,
        ] {
            let end = end_offset(len);
            assert!(end < len && len - end <= READ_BYTES);
            assert!(end == len / 2 / ALIGN * ALIGN || end == len - READ_BYTES);
        }
    }
}
