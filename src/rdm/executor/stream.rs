//! Long messages as parts through the rings of links, while both sides poll.
//! `docs/protocol-rdm.md`, "Long messages".

#![allow(unsafe_code, reason = "posts from buffers of the application")]

use super::Executor;
use crate::rdm::core::direct::{PART, PartPost};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Uses;
use crate::rdm::core::{Core, Origin, SendOp};
use crate::rdm::link::ring::PartInRing;
use crate::rdm::long::paces::Way;
use crate::rdm::long::streams::Call;
use crate::rdm::operations::PARTS;
use crate::rdm::table_keys::{ArrivalKey, TxKey};
use crate::wire::rdm::ring;
use crate::wire::rdm::terms::MAX_DATA;

/// Parts of a message that one progress call posts.
const BATCH: usize = 64;

impl Executor {
    /// Sends parts of a message that the receiver has asked for.
    pub(super) fn continue_parts(&mut self, key: TxKey) {
        let streams = self
            .tx
            .get(key)
            .is_some_and(|op| !op.copied && op.parts == 0);
        if self.streams.polled && streams {
            if !self.streams.sent.contains(&key) {
                self.streams.sent.push_back(key);
            }
        } else {
            self.send_parts(key, PARTS);
        }
    }

    /// Posts parts of the messages that are streamed, and reads those whose parts do not come.
    pub(in crate::rdm) fn run_streams(&mut self, core: &mut Core<Self>, call: Call) {
        for _ in 0..self.streams.sent.len() {
            let key = self.streams.sent.pop_front();
            let waiting = key.filter(|key| self.stream(core, *key));
            self.streams.sent.extend(waiting);
        }
        self.run_pushes(false);
        self.read_stalled(Some(call));
    }

    /// The application does not poll: what was streamed becomes operations and READs.
    pub(in crate::rdm) fn stop_streams(&mut self) {
        self.streams.polled = false;
        if self.streams.is_empty() {
            return;
        }
        while let Some(key) = self.streams.sent.pop_front() {
            self.send_parts(key, PARTS);
        }
        self.run_pushes(true);
        self.read_stalled(None);
    }

    /// Posts parts of a message. `false`: this is not done by the next progress call.
    fn stream(&mut self, core: &mut Core<Self>, key: TxKey) -> bool {
        for _ in 0..BATCH {
            let Some(op) = self.tx.get_mut(key) else {
                return false;
            };
            let Some(receiver) = op.receiver else {
                return false;
            };
            if op.fin.is_some() || op.next == op.len || op.parts != 0 {
                return false;
            }
            let (offset, peer) = (op.next, op.peer);
            let len = (op.len - offset).min(MAX_DATA as usize);
            let part = op.iov.part(offset, len);
            let links = &mut self.links;
            let mut posted = PartInRing::Full;
            let result = core.send_part(peer, |link, header| {
                let Some(record) = links.get_mut(link) else {
                    return false;
                };
                if record.ring.is_none() {
                    posted = PartInRing::TooLong;
                } else if let Some(ring) = record.free_ring() {
                    let words = ring::data(&header, receiver, offset as u64, len as u32);
                    // SAFETY: the application keeps the buffers until the operation completes.
                    posted = unsafe { ring.post_part(&words, &part) };
                } else {
                    posted = PartInRing::Behind;
                }
                posted == PartInRing::Sent
            });
            match (result, posted) {
                (PartPost::Sent, _) => {
                    if let Some(op) = self.tx.get_mut(key) {
                        op.next = offset + len;
                    }
                }
                (PartPost::Refused, PartInRing::Ended) => {
                    // it may have arrived: the next packet with this number has to be the same
                    if let Some(part) = self.next_part(key) {
                        let send = SendOp {
                            op: part,
                            uses: Uses::Part(PART),
                            ack: false,
                        };
                        if core.send(peer, send, self).is_err() {
                            self.refused(part);
                        }
                    }
                    return false;
                }
                (PartPost::Refused, PartInRing::TooLong) | (PartPost::Closed, _) => {
                    self.send_parts(key, PARTS);
                    return false;
                }
                (PartPost::Refused, PartInRing::Behind)
                | (PartPost::Behind | PartPost::Credit, _) => {
                    // As an operation: it precedes new messages, its SEND does not wait for the
                    // requests before it, and the peer learns that it waits for credit. The stream
                    // goes on when it is complete.
                    self.send_parts(key, 1);
                    return false;
                }
                (PartPost::Refused, _) => return true,
            }
        }
        true
    }

    /// Reads messages whose parts do not come until this progress call; `None`: all.
    fn read_stalled(&mut self, call: Option<Call>) {
        // those that are being written are listed again
        for _ in 0..self.streams.arriving() {
            let arrivals = &self.rx.arrivals;
            let arrived = |key| {
                let arrival = arrivals.get(key)?;
                match &arrival.push {
                    Some(_) => Some(arrival.arrived),
                    None => arrival.fallback.map(|_| arrival.prefix),
                }
            };
            let Some(key) = self.streams.take_stalled(call, arrived) else {
                return;
            };
            let Some(arrival) = self.rx.arrivals.get_mut(key) else {
                continue;
            };
            if arrival.push.is_some() {
                self.push_stalled(key);
                continue;
            }
            let (peer, prefix) = (arrival.origin.peer, arrival.prefix);
            arrival.pull = arrival.fallback.take();
            if let Some(pull) = &mut arrival.pull {
                pull.next = prefix;
            }
            arrival.arrived = prefix;
            self.streams.is_late(peer);
            self.begin_pull(peer, key);
        }
    }

    /// Decides how a message arrives that could be read. `link`: that of its announcement.
    pub(in crate::rdm) fn choose(
        &mut self,
        origin: Origin,
        key: ArrivalKey,
        link: Option<LinkKey>,
    ) {
        let peer = origin.peer;
        let can_stream = self.streams.may_stream()
            && link.is_some_and(|link| self.enlarge_ring(link))
            && self.streams.may_begin(peer);
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return;
        };
        let len = arrival.envelope.len;
        let way = match can_stream {
            true => self.paces.choose(peer, len, key),
            false => Way::Read,
        };
        match way {
            Way::Stream => {}
            Way::Both if self.pulls.copies && self.begin_push(origin, key) => return,
            Way::Read | Way::Both => return self.begin_pull(peer, key),
        }
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return;
        };
        (arrival.fallback, arrival.asked) = (arrival.pull.take(), true);
        let op = arrival.op;
        self.streams.begin(key);
        self.ask_for_parts(origin, key, op);
    }

    /// A message has arrived as a SEND: it was too long for the ring of its link, or the ring was
    /// full, or other SENDs were under way.
    pub(super) fn overflows(&mut self, len: usize) {
        if let Some(key) = self.arriving
            && let Some(ring) = self.links.get_mut(key).and_then(|link| link.ring.as_mut())
            && ring.overflows(len)
        {
            self.enlarge_ring(key);
        }
    }

    /// Enlarges the ring of a link once. `false`: it has none, or is not enlarged.
    pub(super) fn enlarge_ring(&mut self, link: LinkKey) -> bool {
        let record = self.links.get_mut(link);
        let ring = record.and_then(|record| record.ring.as_mut());
        ring.is_some_and(|ring| ring.is_large() || ring.grow())
    }
}
