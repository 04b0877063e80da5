//! Packets in both directions on links that are up.

use super::credit::Inbound;
use super::link::{Link, LinkKey, Role, State};
use super::ops::{Entry, Form, List, OpKey, Uses};
use super::peer::{PeerKey, When};
use super::{Core, Io, Origin, Post, SendOp};
use crate::errno::FiErrno;
use crate::wire::rdm::packet::Attach;
use crate::wire::rdm::{Body, Credit, Grant, Header, Number, Packet, PeerIndex};

/// How many peers one search for credit to recall examines.
const SEARCH: usize = 64;

impl<I: Io> Core<I> {
    /// The header of a packet without number.
    #[inline]
    pub(super) fn header(&self, key: PeerKey) -> Option<Header> {
        Some(self.peers.get(key)?.header(Number::default()))
    }

    /// Posts ATTACH to a link that this side has accepted. `false`: no room.
    pub(in crate::rdm) fn attach(&mut self, link: LinkKey, attach: Attach, io: &mut I) -> bool {
        let key = self.links.get(link).map(|link| link.peer);
        let Some(header) = key.and_then(|key| self.header(key)) else {
            return false;
        };
        let body = Body::Attach(attach);
        let posted = io.control(link, &Packet { header, body });
        if posted {
            self.note_attached(link);
        }
        posted
    }

    /// ATTACH was posted to a link, or has arrived on it.
    pub(super) fn note_attached(&mut self, link: LinkKey) {
        let record = self.links.get_mut(link);
        let peer = record.and_then(|record| {
            record.attached = true;
            self.peers.get_mut(record.peer)
        });
        if let Some(peer) = peer {
            peer.unattached = When::NONE;
        }
    }

    /// A packet with such a header was posted.
    #[inline]
    pub(super) fn posted(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.mark_told();
        }
    }

    /// Posts what can be posted to a peer: packets of the last link, answers, new packets.
    pub(super) fn pump(&mut self, key: PeerKey, io: &mut I) {
        let Some(out) = self.open_link(key) else {
            return;
        };
        while self.post_next(key, out, io) {}
        self.posted_one(key);
    }

    /// Follows posts to a peer.
    #[inline]
    pub(super) fn posted_one(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let awaits = peer.awaits();
        if !peer.listed && peer.is_reporting() {
            peer.listed = true;
            self.reports.push(key);
        }
        if awaits {
            self.await_answer();
        }
    }

    /// Whether packets may be posted to an out-link.
    #[inline]
    pub(super) fn is_open(&self, out: LinkKey) -> bool {
        self.links.get(out).is_some_and(Link::is_open)
    }

    /// The out-link, if packets may be posted to it.
    pub(in crate::rdm) fn open_link(&self, key: PeerKey) -> Option<LinkKey> {
        let out = self.peers.get(key)?.out?;
        self.is_open(out).then_some(out)
    }

    /// Posts one packet. `false`: none can be posted now.
    fn post_next(&mut self, key: PeerKey, out: LinkKey, io: &mut I) -> bool {
        let Some(peer) = self.peers.get_mut(key) else {
            return false;
        };
        if let Some(op) = peer.repost {
            let Some(entry) = self.ops.get(op) else {
                return false;
            };
            let (header, number) = (peer.header(entry.number), entry.number);
            let post = io.post(out, header, entry.op, entry.form);
            if post == Post::Refused {
                return false;
            }
            peer.repost = List::next(&self.ops, op);
            peer.mark_told();
            if post == Post::Delivered {
                self.delivered(key, number, io);
            }
            return true;
        }
        let first = peer
            .first()
            .and_then(|op| Some((op, self.ops.get(op)?.uses)));
        let Some((op, uses)) = first else {
            return false;
        };
        // post_new appends it to another list
        peer.list(uses).pop(&self.ops);
        let posted = self.post_new(key, out, op, io);
        if !posted && let Some(peer) = self.peers.get_mut(key) {
            peer.list(uses).push_front(&mut self.ops, op);
        }
        posted
    }

    /// Posts the packet of an operation that is in no list, if the credit and the send queue permit
    /// it, and appends it to the posted ones.
    #[inline]
    pub(super) fn post_new(&mut self, key: PeerKey, out: LinkKey, op: OpKey, io: &mut I) -> bool {
        let Some(peer) = self.peers.get_mut(key) else {
            return false;
        };
        let Some(entry) = self.ops.get_mut(op) else {
            return false;
        };
        let (form, uses) = peer.form_of(entry.uses);
        if !peer.outbound.spend(uses) {
            return false;
        }
        let number = peer.next;
        let post = io.post(out, peer.header(number), entry.op, form);
        if post == Post::Refused {
            peer.outbound.unspend(uses);
            return false;
        }
        (entry.number, entry.form, entry.spent) = (number, form, uses);
        peer.holds += u32::from(is_answered(form, entry.uses));
        peer.acks += u32::from(entry.ack);
        peer.next = number.next();
        peer.mark_told();
        peer.unsent = peer.unsent.or(Some(op));
        peer.posted.push(&mut self.ops, op);
        if post == Post::Delivered {
            self.delivered(key, number, io);
        }
        true
    }

    /// Posts the packet of a new operation without ACK, if no earlier packet is under way or waits.
    /// A packet that is delivered at once needs no place in the table. `false`: nothing was posted.
    #[inline]
    pub(super) fn post_at_once(&mut self, key: PeerKey, send: &SendOp<I::Op>, io: &mut I) -> bool {
        let Some(peer) = self.peers.get_mut(key) else {
            return false;
        };
        let Some(out) = peer.out.filter(|_| peer.is_clear()) else {
            return false;
        };
        if send.ack || self.ops.is_full() {
            return false;
        }
        let (form, uses) = peer.form_of(send.uses);
        if !peer.outbound.has(uses) {
            return false;
        }
        let number = peer.next;
        let post = io.post(out, peer.header(number), send.op, form);
        if post == Post::Refused {
            return false;
        }
        peer.outbound.spend_granted(uses);
        peer.holds += u32::from(is_answered(form, send.uses));
        peer.next = number.next();
        peer.mark_told();
        if post == Post::Delivered {
            peer.completed = peer.next;
            io.complete(send.op, Ok(()));
            return true;
        }
        let mut entry = Entry::new(send.op, send.uses, false);
        (entry.number, entry.form, entry.spent) = (number, form, uses);
        self.keep_posted(key, entry);
        true
    }

    /// Enters a packet that was posted, before which none is under way or waits. The table has room
    /// for it.
    pub(super) fn keep_posted(&mut self, key: PeerKey, entry: Entry<I::Op>) {
        if let Some(peer) = self.peers.get_mut(key)
            && let Some(op) = self.ops.insert(entry)
        {
            peer.unsent = Some(op);
            peer.posted.push(&mut self.ops, op);
        }
    }

    /// The SENDs of all numbered packets on a link up to this number have completed.
    pub fn sent(&mut self, link: LinkKey, number: Number, io: &mut I) {
        let Some(key) = self.links.get(link).map(|link| link.peer) else {
            return;
        };
        if let Some(peer) = self.peers.get_mut(key) {
            peer.heard = true;
            self.delivered(key, number, io);
            self.pump(key, io);
        }
    }

    /// All numbered packets to a peer up to this number are in its memory.
    fn delivered(&mut self, key: PeerKey, number: Number, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let behind = number.next();
        if peer.completed.is_before(behind) {
            peer.completed = behind;
        }
        while let Some(op) = peer.unsent {
            let Some(entry) = self.ops.get_mut(op) else {
                break;
            };
            if !entry.number.is_before(behind) {
                break;
            }
            entry.sent = true;
            if entry.acked {
                entry.done = true;
                io.complete(entry.op, Ok(()));
            }
            peer.unsent = List::next(&self.ops, op);
        }
        self.retire(key);
    }

    /// There is room in the send queue of a link again.
    pub fn has_room(&mut self, link: LinkKey, io: &mut I) {
        let Some(link) = self.links.get(link).copied() else {
            return;
        };
        if link.state == State::Greeting {
            return self.advance(link.peer, io);
        }
        self.pump(link.peer, io);
        self.report(link.peer, io);
    }

    /// The next packet of a link cannot be posted for lack of memory: its operation fails. If the
    /// peer has parts of the message already or waits for the packet, all its operations fail.
    pub fn no_memory(&mut self, link: LinkKey, io: &mut I) {
        let Some(key) = self.links.get(link).map(|link| link.peer) else {
            return;
        };
        let Some(peer) = self
            .peers
            .get_mut(key)
            .filter(|peer| peer.out == Some(link))
        else {
            return;
        };
        let first = peer.waiting.first().and_then(|op| self.ops.get(op));
        let waits = !peer.is_next(Uses::Part(Credit::ZERO));
        if !waits && first.is_some_and(|entry| matches!(entry.uses, Uses::Message(_))) {
            if let Some(op) = peer.waiting.pop(&self.ops)
                && let Some(entry) = self.ops.remove(op)
            {
                io.complete(entry.op, Err(FiErrno::ENOMEM));
            }
            self.pump(key, io);
        } else if waits || first.is_some() {
            self.fail(key, FiErrno::ENOMEM, io);
        }
        self.advance_changed(io);
    }

    /// Removes completed operations from the begin of the list.
    pub(super) fn retire(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        while let Some(op) = peer.posted.first() {
            if !self.ops.get(op).is_some_and(|entry| entry.done) {
                break;
            }
            if peer.repost == Some(op) {
                peer.repost = List::next(&self.ops, op);
            }
            peer.posted.pop(&self.ops);
            self.ops.free(op);
        }
    }

    /// Whether *processed* of a packet on this link acknowledges an operation whose SEND has not
    /// been reported as complete: its completion follows the packet, unless that is reported first.
    pub fn acknowledges_unsent(
        &self,
        link: LinkKey,
        processed: impl FnOnce() -> Option<Number>,
    ) -> bool {
        let key = self.links.get(link).map(|link| link.peer);
        let peer = key.and_then(|key| self.peers.get(key));
        let Some(peer) = peer.filter(|peer| peer.acks != 0) else {
            return false;
        };
        let Some(processed) = processed() else {
            return false;
        };
        let mut next = peer.posted.first();
        while let Some(op) = next {
            let Some(entry) = self.ops.get(op) else {
                return false;
            };
            if !entry.number.is_before(processed) {
                return false;
            }
            if !entry.acked && !entry.sent {
                return true;
            }
            next = List::next(&self.ops, op);
        }
        false
    }

    /// *processed* of a packet: completes operations with ACK.
    fn processed(&mut self, key: PeerKey, processed: Number, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let mut next = peer.posted.first();
        while let Some(op) = next {
            let Some(entry) = self.ops.get_mut(op) else {
                break;
            };
            if peer.acks == 0 || !entry.number.is_before(processed) {
                break;
            }
            if !entry.acked {
                entry.acked = true;
                peer.acks -= 1;
                if entry.sent {
                    entry.done = true;
                    io.complete(entry.op, Ok(()));
                }
            }
            next = List::next(&self.ops, op);
        }
        self.retire(key);
    }

    /// A packet on a link could not be decoded.
    pub fn violated(&mut self, link: LinkKey, slot: I::Slot, io: &mut I) {
        io.discard(slot);
        self.violation(link, io);
    }

    /// A packet that was delivered violates the protocol in what the core does not examine. The
    /// caller has handled it otherwise. Packets with the name of an operation that does not exist
    /// are no violation: see the head of [`crate::rdm::core`].
    pub fn content_violated(&mut self, link: LinkKey, io: &mut I) {
        self.violation(link, io);
        self.advance_changed(io);
    }

    /// A packet has arrived on a link.
    pub fn arrived(&mut self, link: LinkKey, packet: &Packet, slot: I::Slot, io: &mut I) {
        let Some(from) = self.links.get(link) else {
            return io.discard(slot);
        };
        let key = from.peer;
        let to = PeerIndex::new(key.number());
        let alias = || self.resolve(PeerKey::from_number(packet.header.to.get())) == key;
        let known = packet.header.to == to || alias();
        let hello = matches!(packet.body, Body::Hello(_));
        let greets = from.role == Role::Accepted && !from.greeted;
        let early = from.role == Role::Own && !from.greeted;
        let Some(peer) = self.peers.get_mut(key) else {
            return io.discard(slot);
        };
        let future = packet.header.processed.until(peer.next) < 0;
        if !known || hello != greets || early || future {
            let mut slot = Some(slot);
            let orphan = self.arrived_on_orphan(link, packet, &mut slot, io);
            slot.into_iter().for_each(|slot| io.discard(slot));
            return match orphan {
                true => self.advance_changed(io),
                false => self.violation(link, io),
            };
        }
        (peer.busy, peer.heard) = (true, true);
        let acks = peer.acks > 0;
        if let Some((_, number)) = peer.unseen
            && !packet.header.seen.is_before(number)
        {
            peer.unseen = None;
            // CREDIT can be posted again
            peer.owe_again();
            // a later grant has replaced the question
            let seen = packet.header.seen;
            peer.recalling.take_if(|(_, of)| of.is_before(seen));
            self.list(key);
        }
        if acks {
            self.processed(key, packet.header.processed, io);
        }
        if packet.body.kind().is_numbered() {
            return self.numbered(link, key, packet, slot, io);
        }
        io.discard(slot);
        self.unnumbered(link, key, &packet.body, io);
    }

    #[inline]
    fn numbered(
        &mut self,
        link: LinkKey,
        key: PeerKey,
        packet: &Packet,
        slot: I::Slot,
        io: &mut I,
    ) {
        let Some(peer) = self.peers.get_mut(key) else {
            return io.discard(slot);
        };
        let number = packet.header.number;
        if number.is_before(peer.expected) {
            return io.discard(slot);
        }
        let granted = peer.inbound.as_mut();
        if number != peer.expected || !granted.is_some_and(|it| it.arrive(packet.body.uses())) {
            io.discard(slot);
            return self.violation(link, io);
        }
        peer.expected = number.next();
        peer.strikes = 0;
        let ends = peer.ends;
        let origin = Origin {
            peer: key,
            session: peer.session,
        };
        peer.owes_ack |= packet.body.wants_ack();
        if let Body::Rts { len, .. } = packet.body
            && len <= self.config.eager.into()
        {
            self.grow(key);
        }
        if ends && matches!(packet.body, Body::Rts { .. }) {
            // it cannot be answered
            self.give_back(origin, packet.body.uses());
            self.list(key);
            return io.discard(slot);
        }
        let credit = io.deliver(origin, packet, slot);
        self.give_back(origin, credit);
    }

    /// A message did not fit into the window.
    pub(in crate::rdm) fn grow(&mut self, key: PeerKey) {
        self.limit_window(key);
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let inbound = peer.inbound.as_mut();
        if !inbound.is_some_and(|inbound| inbound.grow(&mut self.pool)) {
            self.recall_one(key);
        }
    }

    /// Asks one peer other than `key`, from which nothing has arrived for a while, for its credit.
    pub(super) fn recall_one(&mut self, key: PeerKey) {
        let mut at = self.peers.at_or_behind(self.recall_from);
        for _ in 0..SEARCH {
            let Some(found) = at.or_else(|| self.peers.at_or_behind(0)) else {
                return;
            };
            at = self.peers.after(found);
            self.recall_from = at.map_or(0, |at| at.place());
            let Some(peer) = self.peers.get_mut(found) else {
                return;
            };
            let busy = std::mem::take(&mut peer.busy);
            let recallable = peer.inbound.as_ref().is_some_and(Inbound::is_recallable);
            let asked = peer.recalling.is_some();
            if found != key && !busy && !asked && recallable && peer.out.is_some() {
                peer.recall = true;
                return self.list(found);
            }
        }
    }

    fn unnumbered(&mut self, link: LinkKey, key: PeerKey, body: &Body, io: &mut I) {
        match body {
            Body::Hello(hello) => {
                let Some(from) = self.links.get_mut(link) else {
                    return;
                };
                if hello.epoch != from.epoch {
                    return self.violation(link, io);
                }
                from.greeted = true;
                from.terms = Some(hello.terms);
                let given = from.given;
                let late = from.state != State::Replied;
                if !late {
                    from.state = State::Up;
                }
                let first = self.peers.get_mut(key);
                let first = first.is_some_and(|peer| {
                    peer.late = late;
                    peer.former = None;
                    let first = !std::mem::replace(&mut peer.begun, true);
                    if first {
                        // a request that has come since then, by another address, gives another one
                        peer.shows = given;
                    }
                    first
                });
                self.introduce(key, link, &hello.terms, io);
                self.take_terms(key, &hello.terms, first);
                let further: Vec<_> = hello.listeners().collect();
                self.state_further(key, &further);
                self.advance(key, io);
            }
            // the caller has examined it
            Body::Attach(_) if self.config.circuits => self.attached(link, io),
            Body::Credit { grant, recall } => {
                if let Some(peer) = self.peers.get_mut(key)
                    && peer.outbound.receive(*grant, false)
                {
                    peer.granted(*recall);
                }
                self.pump(key, io);
            }
            Body::Return(kept) => self.returned(link, key, *kept, io),
            Body::Close(close) => self.close_arrived(link, *close, io),
            _ => self.violation(link, io),
        }
    }

    fn returned(&mut self, link: LinkKey, key: PeerKey, kept: Grant, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let inbound = peer.inbound.as_mut();
        if !inbound.is_some_and(|inbound| inbound.take_back(kept, &mut self.pool)) {
            return self.violation(link, io);
        }
        if peer
            .inbound
            .as_ref()
            .is_some_and(|it| it.grant().number == kept.number)
        {
            peer.recalling = None;
        }
        self.list(key);
    }

    /// Credit of delivered packets: blocks of matched messages, slots that were posted again. The
    /// next [`Self::flush`] notifies the peer. Those of a session that has ended return to the
    /// share of the peer.
    #[inline]
    pub fn give_back(&mut self, from: Origin, credit: Credit) {
        if let Some(peer) = self.peers.get_mut(from.peer)
            && peer.session == from.session
            && let Some(inbound) = &mut peer.inbound
        {
            inbound.give_back(credit, &mut self.pool);
            if !peer.listed && peer.is_reporting() {
                peer.listed = true;
                self.reports.push(from.peer);
            }
        } else {
            self.give_back_left(from, credit);
        }
    }

    /// A message was dropped for lack of memory although its SEND has completed. Its session ends,
    /// so that the peer learns that messages are lost.
    #[cold]
    pub fn dropped(&mut self, from: Origin, io: &mut I) {
        if self.is_current(from) {
            self.fail(from.peer, FiErrno::ENOMEM, io);
        }
        self.advance_changed(io);
    }

    /// Lists a peer to which something may have to be reported.
    #[inline]
    pub(super) fn list(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key)
            && !peer.listed
        {
            peer.listed = true;
            self.reports.push(key);
        }
    }

    /// Reports credit and *processed*: to be called at the end of a progress call.
    pub fn flush(&mut self, io: &mut I) {
        while let Some(key) = self.reports.pop() {
            if let Some(peer) = self.peers.get_mut(key) {
                peer.listed = false;
            }
            self.report(key, io);
        }
        self.advance_changed(io);
    }

    /// Posts RETURN, CREDIT and the answer to CLOSE, if they are due and a link is open. A peer
    /// without out-link is dialled if the report is a reason.
    fn report(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let inbound = peer.inbound.as_ref();
        let fills = inbound.is_some_and(|inbound| inbound.is_short() || inbound.is_full());
        if fills {
            self.limit_window(key);
        }
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if let Some(inbound) = peer.inbound.as_mut().filter(|_| fills) {
            inbound.grow_blocks(&mut self.pool);
            if inbound.is_full() {
                inbound.add_extra(&mut self.pool);
            }
        }
        if !peer.has_report() && !peer.has_return() && !peer.refuses {
            // the window has grown, which is no reason by itself
            return;
        }
        self.refuse(key, io);
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if peer.out.is_none() && (peer.has_report() || peer.has_return()) {
            return self.advance(key, io);
        }
        let Some(out) = self.open_link(key) else {
            return;
        };
        let Some(header) = self.header(key) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if peer.has_return() {
            let before = peer.outbound;
            let body = Body::Return(peer.outbound.keep(peer.recalled));
            if !io.control(out, &Packet { header, body }) {
                peer.outbound = before;
                return;
            }
            if std::mem::take(&mut peer.recalled) {
                peer.returned = Some(out);
            }
            if peer.unseen.is_some() {
                peer.mark_told_once(out);
            } else {
                // CREDIT follows if *processed* was owed: the peer shows that it has seen it
                peer.confirm = false;
            }
        }
        let recall = peer.recall && peer.recalling.is_none();
        if !peer.has_report() || peer.unseen.is_some() && !recall {
            return;
        }
        let Some(inbound) = &mut peer.inbound else {
            return;
        };
        inbound.grow_busy(&mut self.pool);
        let before = *inbound;
        let grant = inbound.renew();
        let body = Body::Credit { grant, recall };
        if !io.control(out, &Packet { header, body }) {
            *inbound = before;
            return;
        }
        peer.restate = false;
        peer.unseen = Some((out, grant.number));
        if recall {
            peer.recall = false;
            peer.recalling = Some((out, grant.number));
        }
        self.posted(key);
    }
}

/// Whether FIN or RESULT ends the operation of a packet.
#[inline]
fn is_answered(form: Form, uses: Uses) -> bool {
    form == Form::Rts || matches!(uses, Uses::Request(_))
}
