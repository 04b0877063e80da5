//! Long messages that both processors copy at the same time: the receiver reads the begin, and the
//! sender, if its application polls, writes the end. `docs/protocol-rdm.md`, "Long messages".

#![allow(
    unsafe_code,
    reason = "registers and writes buffers of the application"
)]

use super::super::core::{Origin, Send};
use super::super::direct::PART;
#[cfg(test)]
use super::super::operations::TxKey;
use super::super::operations::{Kind, Operation};
use super::super::ops::Uses;
use super::super::pull::{PullState, Push};
use super::super::receives::ArrivalKey;
use super::super::streams::Asked;
use super::pull::READ_BYTES;
use super::{Executor, Todo};
#[cfg(test)]
use crate::verbs::Rkey;
use crate::verbs::{Lkey, RemoteAddr, Sge};
use crate::wire::rdm::OpId;

/// The end of a message begins at a multiple of this.
const ALIGN: u64 = 4096;

/// Offset of the end of a message of `len` bytes that its sender writes: its half, or less if that
/// is more than the sender writes in one call.
const fn end_of(len: u64) -> u64 {
    let half = len / 2 / ALIGN * ALIGN;
    let last = len.saturating_sub(READ_BYTES);
    if half > last { half } else { last }
}

impl Executor {
    /// Asks the sender to write the end of a message, and begins to read the begin. `false`: nothing
    /// has begun, because that part of the receive is no single buffer, or cannot be registered.
    pub(super) fn begin_push(&mut self, origin: Origin, key: ArrivalKey) -> bool {
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return false;
        };
        let Some(pull) = &mut arrival.pull else {
            return false;
        };
        let offset = end_of(pull.len);
        // within the receive, whose length is a usize
        let len = (pull.len - offset) as usize;
        let piece = arrival.target.receive.iov.piece(offset as usize, len);
        let Some(piece) = piece
            .map(|piece| piece.iovec())
            .filter(|it| it.iov_len == len)
        else {
            return false;
        };
        // SAFETY: the application keeps the buffer until the receive is reported, and that is after
        // the end of the sink.
        let Ok(sink) = (unsafe { self.sources.open_sink(&piece) }) else {
            return false;
        };
        pull.len = offset;
        let to = (RemoteAddr::new(piece.iov_base as u64), sink.rkey());
        arrival.push = Some(Push { offset, sink });
        let push = Kind::Push {
            op: arrival.op,
            offset,
            to,
            receiver: OpId::new(key.number()),
        };
        self.streams.begin(key);
        self.answer(origin, push);
        self.begin_pull(origin.peer, key);
        true
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
        let answer = Kind::Pushed {
            op: asked.receiver,
            written: written.into(),
        };
        let peer = asked.origin.peer;
        match self.tx.insert(Operation::new(answer, peer)) {
            Some(op) => {
                let send = Send {
                    op,
                    uses: Uses::Part(PART),
                    ack: false,
                };
                self.todo.push_back(Todo::Push(asked.origin, send));
            }
            None => self.todo.push_back(Todo::Refused(asked.link)),
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
            self.pushed += u32::from(done);
        }
        done.then_some(sge.length)
    }

    /// The sender has written the end of a message, or has not.
    pub(super) fn pushed(&mut self, origin: Origin, key: ArrivalKey, written: u64) {
        let arrival = self.rx.arrivals.get_mut(key);
        let Some(arrival) = arrival.filter(|it| it.origin == origin) else {
            // the receive has failed meanwhile
            return;
        };
        let Some(push) = &arrival.push else {
            // it was read
            return;
        };
        let whole = arrival.envelope.len - push.offset == written;
        if !arrival.end_push() {
            // another process writes, which has guessed the key
            return;
        }
        match arrival.pull.map(|pull| pull.state) {
            Some(PullState::Reads) if whole => self.pull_ended(key),
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
        let listed = pull.next != pull.len;
        pull.len = len;
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
        if !arrival.end_push() {
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
            let end = end_of(len);
            assert!(end < len && len - end <= READ_BYTES);
            assert!(end == len / 2 / ALIGN * ALIGN || end == len - READ_BYTES);
        }
    }
}
