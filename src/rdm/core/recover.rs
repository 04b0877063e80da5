//! From a link that ends to the next one. `docs/protocol-rdm.md`, "Use of links" and "Recovery".

use super::connect::ACCEPTOR_WAIT;
use super::link::{Closing, Link, LinkKey, Role, State};
use super::ops::{Entry, List};
use super::peer::{Dial, Fate, Peer, PeerKey, Position, When};
use super::{Core, Io};
use crate::errno::FiErrno;
use crate::wire::rdm::{Epoch, Number, Reason, Terms};

/// Links that may end because of a peer's packets before its operations fail.
const STRIKES: u32 = 16;

/// What becomes of the operations that were never posted, when those of a session fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unposted {
    /// They fail too.
    Failed,
    /// They wait for the next session.
    Kept,
    /// Those are kept that were posted since the peer's address is in doubt, for the time with this
    /// number.
    KeptSince(u32),
}

impl<I: Io> Core<I> {
    /// A link has broken: an error completion, an event of the queue pair, a disconnect.
    pub fn broken(&mut self, link: LinkKey, io: &mut I) {
        self.end_link(link, io);
        self.advance_changed(io);
    }

    /// A dial was refused: the process of the peer has ended, unless it has a link to this side. A
    /// process that has dialled since this dial began may have started after the refusal, and the
    /// next dial decides.
    pub(super) fn after_refusal(&mut self, dialled: &Link, io: &mut I) {
        let Some(peer) = self.peers.get(dialled.peer) else {
            return;
        };
        let dials = peer.requests != dialled.requests;
        if peer.accepted.is_some() || dials {
            return;
        }
        let fails = peer.begun && !peer.ends;
        self.close_unattached(dialled.peer, io);
        if fails {
            self.fail(dialled.peer, FiErrno::ECONNABORTED, io);
            if let Some(peer) = self.peers.get_mut(dialled.peer) {
                // nothing is left of its session that it could continue
                peer.leaves = true;
            }
            self.list_idle(dialled.peer);
        }
    }

    /// A packet violates the protocol.
    pub(super) fn violation(&mut self, link: LinkKey, io: &mut I) {
        let Some(of) = self.links.get(link) else {
            return;
        };
        // what follows such a packet in the shared receive queue has later numbers than expected
        let (key, first) = (of.peer, !of.is_ending());
        #[cfg(test)]
        {
            self.violations += 1;
        }
        self.end_link(link, io);
        self.silence(link, io);
        if let Some(peer) = self.peers.get_mut(key).filter(|_| first) {
            peer.strikes += 1;
            if peer.strikes > STRIKES {
                peer.strikes = 0;
                self.fail(key, FiErrno::ECONNABORTED, io);
            }
        }
    }

    /// Begins to end a link.
    pub(in crate::rdm) fn end_link(&mut self, link: LinkKey, io: &mut I) {
        self.end_one(link, io);
        let Some(ended) = self.links.get(link) else {
            return;
        };
        let key = ended.peer;
        // an eviction that had begun on the link does not concern the other one any more
        self.release_own_requests(key, io);
    }

    /// As [`Self::end_link`]; the other link, if there is one, ends too, or is not being evicted.
    fn end_one(&mut self, link: LinkKey, io: &mut I) {
        let Some(ending) = self.links.get_mut(link) else {
            return;
        };
        let (state, key) = (ending.state, ending.peer);
        if ending.is_ending() {
            return;
        }
        ending.state = State::Ending;
        let closing = ending.closing;
        let mut drain = None;
        if let Some(peer) = self.peers.get_mut(key) {
            let out = peer.out == Some(link);
            if out {
                peer.out = None;
                ending.was_out = true;
                if closing == Closing::No {
                    io.down(key, link);
                }
            }
            // the link that is being evicted need not be the out-link
            if out || closing != Closing::No {
                (peer.closing, peer.close_at) = (false, When::NONE);
                drain = peer.drain.take();
                self.retimed = true;
            }
        }
        if state == State::Dialling {
            self.dialled();
        }
        io.end(link);
        if let Some(question) = drain.and_then(|drain| drain.question) {
            self.refuse_on(key, question, io);
        }
        if closing == Closing::Accepted {
            // the peer ends all of them
            self.end_links(key, io);
        }
    }

    pub(in crate::rdm) fn end_links(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        for link in [peer.own, peer.accepted].into_iter().flatten() {
            self.end_one(link, io);
        }
    }

    /// The peer posts nothing more on a link on a circuit: it has stated so, or its target is in
    /// the error state. The link is being ended, or lingers.
    pub(super) fn close_half(&mut self, link: LinkKey, io: &mut I) {
        let circuits = self.config.circuits;
        let half = self.links.get_mut(link);
        let Some(half) = half.filter(|half| circuits && !half.peer_ended) else {
            return;
        };
        half.peer_ended = true;
        if half.state == State::Lingering {
            io.close(link);
        }
    }

    /// Nothing that the peer posts on a link on a circuit is accepted by the device any more.
    pub fn silenced(&mut self, link: LinkKey, io: &mut I) {
        self.end_link(link, io);
        self.close_half(link, io);
        self.advance_changed(io);
    }

    /// Accepts nothing on a link on a circuit any more, although the peer has stated nothing. What
    /// the peer posts is accepted until the target through which it sends is known and has failed.
    pub(super) fn silence(&mut self, link: LinkKey, io: &mut I) {
        let silenced = self.links.get(link).filter(|_| self.config.circuits);
        let Some(silenced) = silenced.filter(|link| !link.peer_ended) else {
            return;
        };
        if !silenced.is_unattached() {
            return io.silence(link);
        }
        let ends = self.peers.get(silenced.peer).is_some_and(|peer| peer.ends);
        if ends && silenced.state == State::Lingering {
            self.orphan(link);
        }
    }

    /// Ends all links of a peer, and accepts nothing on them any more.
    pub(super) fn drop_links(&mut self, key: PeerKey, io: &mut I) {
        self.end_links(key, io);
        for link in self.links_of(key) {
            self.silence(link, io);
        }
    }

    /// Ends all links of a peer, which posts nothing more.
    pub(super) fn close_links(&mut self, key: PeerKey, io: &mut I) {
        self.end_links(key, io);
        for link in self.links_of(key) {
            self.close_half(link, io);
        }
    }

    /// All links of a peer.
    pub(super) fn links_of(&self, key: PeerKey) -> impl Iterator<Item = LinkKey> + use<I> {
        let links = self.peers.get(key).map(|peer| {
            let [first, second] = peer.lingering;
            [peer.own, peer.accepted, first, second]
        });
        links.into_iter().flatten().flatten()
    }

    /// The peer has ended those links that this side has dialled before the epoch `own`, and those
    /// that it has dialled before `accepted`.
    pub(super) fn stated(
        &mut self,
        key: PeerKey,
        (own, accepted): (Option<Epoch>, Option<Epoch>),
        io: &mut I,
    ) {
        if own.is_some() {
            self.close_orphans(key, own, io);
        }
        for link in self.links_of(key) {
            let role = self.links.get(link).map(|link| link.role);
            let before = match role {
                Some(Role::Own) => own,
                _ => accepted,
            };
            if self.is_before(link, before) {
                self.end_link(link, io);
                self.close_half(link, io);
            }
        }
    }

    /// Whether links of a peer, on which the peer posts nothing more, have not ended. Until then
    /// what this side expects next is not certain. The same holds for all links of a session that
    /// ends.
    pub(super) fn is_closing(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let ended = |link: LinkKey| self.links.get(link).is_some_and(|it| it.peer_ended);
        let mut lingering = peer.lingering.into_iter().flatten();
        lingering.any(|link| peer.ends || ended(link)) || self.is_closing_orphans(key)
    }

    /// On a circuit: all requests of a link that is being ended have completed, or can have no
    /// effect any more. [`Self::peer_of`] shows whether the link is still there.
    pub fn half_ended(&mut self, link: LinkKey, io: &mut I) {
        let ending = self.links.get_mut(link);
        let Some(half) = ending.filter(|half| half.state == State::Ending) else {
            return;
        };
        if half.role == Role::Own && !half.greeted {
            // the peer posts nothing before HELLO
            return self.ended(link, io);
        }
        half.state = State::Lingering;
        let half = *half;
        self.spend(&half);
        let key = half.peer;
        let ends = self.peers.get(key).is_some_and(|peer| peer.ends);
        if ends && half.is_unattached() && !half.peer_ended {
            self.orphan(link);
            self.advance(key, io);
            return self.advance_changed(io);
        }
        self.detach(key, link);
        if let Some(peer) = self.peers.get_mut(key) {
            let place = peer.lingering.iter_mut().find(|place| place.is_none());
            debug_assert!(place.is_some());
            place.into_iter().for_each(|place| *place = Some(link));
        }
        if half.peer_ended {
            io.close(link);
        }
        self.pause_dial(&half);
        self.advance(key, io);
        self.advance_changed(io);
    }

    /// A link has ended: all that had arrived or completed on it was passed.
    pub fn ended(&mut self, link: LinkKey, io: &mut I) {
        let Some(ended) = self.links.remove(link) else {
            return;
        };
        let key = ended.peer;
        if let Some(at) = self.orphans.iter().position(|it| it.link == link) {
            self.orphans.swap_remove(at);
            self.list_idle(key);
            self.advance(self.resolve(key), io);
            return self.advance_changed(io);
        }
        self.unlink(key, link);
        self.note_break(&ended);
        if ended.state != State::Lingering {
            self.spend(&ended);
            self.pause_dial(&ended);
        }
        self.advance(key, io);
        self.advance_changed(io);
    }

    /// The acceptor of a link that has broken waits: normally the dialler replaces it. It does not
    /// replace an evicted link, and a session that ends has failed.
    fn pause_dial(&mut self, ended: &Link) {
        let patient = ended.was_out && ended.role == Role::Accepted;
        let patient = patient && ended.closing == Closing::No;
        if patient && let Some(peer) = self.peers.get_mut(ended.peer) {
            peer.dial.not_before = When::at(self.now + ACCEPTOR_WAIT);
            self.set_timer(ended.peer);
        }
        if ended.was_out {
            self.pause_demanded(ended);
        }
    }

    /// A link is gone.
    pub(super) fn unlink(&mut self, key: PeerKey, link: LinkKey) {
        self.detach(key, link);
        self.end_session(key);
        self.list_idle(key);
        self.end_question(key);
    }

    /// Nothing is posted to a link any more, and what was posted may be lost.
    pub(super) fn detach(&mut self, key: PeerKey, link: LinkKey) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let [first, second] = &mut peer.lingering;
        for of in [&mut peer.own, &mut peer.accepted, first, second] {
            if *of == Some(link) {
                *of = None;
            }
        }
        if peer.unseen.is_some_and(|(of, _)| of == link) {
            peer.unseen = None;
            peer.restate = true;
        }
        if peer.stated == Some(link) {
            peer.stated = None;
            peer.restate = true;
        }
        if peer.recalling.is_some_and(|(of, _)| of == link) {
            peer.recalling = None;
        }
        if peer.returned == Some(link) {
            // it may be lost, and with it the newest *processed*
            (peer.returned, peer.recalled) = (None, true);
        }
        if peer.acked_on == Some(link) {
            peer.owe_again();
        }
    }

    /// Drops a session that ends, if it has no links.
    pub(super) fn end_session(&mut self, key: PeerKey) {
        // an alias stays one
        let ends = |peer: &Peer| peer.ends && peer.alias.is_none();
        let ends = self.peers.get(key).is_some_and(ends);
        if !ends || self.links_of(key).next().is_some() {
            return;
        }
        self.close_window(key);
        let former = self.peers.get(key).and_then(|peer| peer.former);
        if former.is_none() {
            // the next session may be one of another endpoint
            self.forget_further(key);
        }
        if let Some(peer) = self.peers.get_mut(key) {
            if former.is_none()
                && let Some(id) = peer.id
            {
                self.ids.remove(&id);
            }
            debug_assert!(peer.posted.is_empty());
            self.names += u64::from(peer.doubts != 0);
            if let Some(token) = peer.gives {
                self.secrets.remove(&token);
            }
            let aliased = peer.aliased;
            peer.forget();
            if aliased {
                self.forget_tokens(key);
            }
        }
        self.list_idle(key);
    }

    /// Forgets the tokens that were given by the other addresses of a peer.
    fn forget_tokens(&mut self, key: PeerKey) {
        let given = self.secrets.iter();
        let given = given.filter(|(_, at)| self.resolve(**at) == key);
        let given: Vec<_> = given.map(|(token, at)| (*token, *at)).collect();
        for (token, at) in given {
            self.secrets.remove(&token);
            if let Some(peer) = self.peers.get_mut(at) {
                peer.gives = None;
            }
        }
    }

    /// Completes all operations of a peer in error, and ends its links and the session. The next
    /// request informs the peer.
    pub(in crate::rdm) fn fail(&mut self, key: PeerKey, error: FiErrno, io: &mut I) {
        self.fail_but(key, error, Unposted::Failed, io);
    }

    /// The terms of a peer contradict what this side has posted: they are those of another session.
    /// Operations that were never posted are not affected, and wait for the next one, unless this
    /// happens again and again.
    fn damaged(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        peer.strikes += 1;
        if peer.strikes > STRIKES {
            peer.strikes = 0;
            return self.fail(key, FiErrno::ECONNABORTED, io);
        }
        self.fail_but(key, FiErrno::ECONNABORTED, Unposted::Kept, io);
    }

    /// As [`Self::fail`], but for the operations that are to wait for the next session.
    fn fail_but(&mut self, key: PeerKey, error: FiErrno, waiting: Unposted, io: &mut I) {
        self.fail_ops(key, error, waiting, io);
        let peer = self.peers.get_mut(key);
        let begun = peer.filter(|peer| peer.begun).map(|peer| {
            peer.former = peer.shows;
            peer.ends = true;
            if waiting == Unposted::Kept && (!peer.waiting.is_empty() || peer.holds != 0) {
                peer.meant = peer.id;
            }
        });
        self.drop_links(key, io);
        if begun.is_some() {
            // a request of the session, which waits for these links
            self.reject_held(key, Reason::Busy, None, io);
        }
        self.end_session(key);
    }

    /// Completes the operations of a peer in error.
    pub(super) fn fail_ops(&mut self, key: PeerKey, error: FiErrno, waiting: Unposted, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if waiting != Unposted::Kept {
            peer.meant = None;
        }
        peer.probe = false;
        peer.position = Position::default();
        self.retimed = true;
        (peer.acks, peer.holds) = (0, 0);
        (peer.repost, peer.unsent) = (None, None);
        peer.dial = Dial {
            queued: peer.dial.queued,
            ..Dial::default()
        };
        peer.unattached = When::NONE;
        let mut kept = List::default();
        // parts belong to operations of the session that has failed
        let lists = [
            &mut peer.posted,
            &mut peer.answers,
            &mut peer.parts,
            &mut peer.waiting,
        ];
        for (number, list) in lists.into_iter().enumerate() {
            while let Some(op) = list.pop(&self.ops) {
                let keeps = |entry: &Entry<I::Op>| match waiting {
                    Unposted::Failed => false,
                    Unposted::Kept => true,
                    Unposted::KeptSince(doubts) => entry.doubts == doubts,
                };
                if number == 3 && self.ops.get(op).is_some_and(keeps) {
                    kept.push(&mut self.ops, op);
                    continue;
                }
                if let Some(entry) = self.ops.remove(op)
                    && !entry.done
                {
                    if number == 0 && !entry.sent {
                        io.keep_packet(entry.op);
                    }
                    // that the peer has processed it is known although its SEND has not completed
                    let processed = entry.ack && entry.acked;
                    let result = if processed { Ok(()) } else { Err(error) };
                    io.complete(entry.op, result);
                }
            }
        }
        peer.waiting = kept;
        let holds = io.fail_peer(key, error, waiting);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.holds = holds;
        }
    }

    /// Whether the peer needs an out-link.
    pub(super) fn needs(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let up = |link: LinkKey| self.links.get(link).is_some_and(|it| it.state == State::Up);
        // a peer that has not ended its half may wait for a report
        let open = |link: LinkKey| self.links.get(link).is_some_and(|it| !it.peer_ended);
        let linked = peer.own.is_some_and(up)
            || peer.accepted.is_some_and(up)
            || peer.lingering.into_iter().flatten().any(open);
        let asks = peer.probe || peer.is_asked();
        peer.has_ops() || asks || linked && (peer.has_report() || peer.has_return())
    }

    /// Takes the next steps of a peer, after any change.
    pub(super) fn advance(&mut self, key: PeerKey, io: &mut I) {
        self.accept_held(key, io);
        self.greet(key, io);
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        if peer.alias.is_some() {
            return;
        }
        if peer.itself {
            return self.loop_back(key, io);
        }
        // while a link is being evicted, the answer or its end is awaited
        if peer.out.is_none() && !peer.closing {
            let links = [peer.own, peer.accepted];
            if let Some(link) = links
                .into_iter()
                .flatten()
                .find(|link| self.is_final(*link))
            {
                self.adopt(key, link, io);
            } else if self.needs(key) {
                self.seek(key, io);
            } else if let Some(peer) = self.peers.get_mut(key) {
                // no dial is repeated
                peer.unattached = When::NONE;
                if peer.own.is_none() {
                    (peer.dial.since, peer.dial.begun) = (When::NONE, When::NONE);
                    peer.dial.silent_since = When::NONE;
                    peer.dial.backoff = 0;
                }
            }
        }
        self.pump(key, io);
    }

    /// Advances peers that others have changed, and those whose dial can begin.
    pub(in crate::rdm) fn advance_changed(&mut self, io: &mut I) {
        loop {
            if let Some(key) = self.changed.pop() {
                self.advance(key, io);
            } else if self.dials < self.config.dials
                && let Some(key) = self.queue.pop_front()
            {
                if let Some(peer) = self.peers.get_mut(key) {
                    peer.dial.queued = false;
                }
                self.changed.push(key);
            } else if !self.assign_place(io) {
                return;
            }
        }
    }

    /// Whether a link is up, and its terms were stated after the last out-link had ended.
    fn is_final(&self, link: LinkKey) -> bool {
        let Some(Link {
            peer,
            state: State::Up,
            mark,
            terms: Some(_),
            ..
        }) = self.links.get(link)
        else {
            return false;
        };
        let outs = self.peers.get(*peer).map(|peer| peer.outs);
        mark.is_some() && *mark == outs
    }

    /// Looks for an out-link: dials, or ends an own link that is no use, in order to dial.
    fn seek(&mut self, key: PeerKey, io: &mut I) {
        self.read_clock(io);
        let closing = self.is_closing(key);
        let earliest = self.earliest_unattached();
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let link = |link: Option<LinkKey>| self.links.get(link?);
        let own = link(peer.own).map(|own| own.state);
        // its HELLO is awaited, and will make it the out-link
        let coming = link(peer.accepted)
            .is_some_and(|it| it.state == State::Replied && it.mark == Some(peer.outs));
        // it may have been the out-link: the request must state that it has ended
        let ending = link(peer.accepted).is_some_and(|it| it.state == State::Ending);
        // a request of the peer, or its reply, is answered when they have ended
        let ending = ending || closing;
        match (own, peer.own) {
            (Some(State::Up), Some(own)) if !coming => self.end_link(own, io),
            (None, _) if !coming && !ending => self.dial(key, io),
            _ => {
                peer.dial.since = peer.dials_since(earliest).or(self.now);
                self.set_timer(key);
            }
        }
    }

    /// Makes a link the out-link, and repeats on it what has not arrived.
    fn adopt(&mut self, key: PeerKey, link: LinkKey, io: &mut I) {
        let now = self.now;
        let earliest = self.earliest_unattached();
        let Some((terms, attached)) = self.links.get(link).and_then(|link| {
            let attached = link.attached || !self.config.circuits;
            Some((link.terms?, attached))
        }) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let expected = terms.expected;
        let damaged = expected.is_before(peer.completed) || peer.next.is_before(expected);
        if damaged {
            return self.damaged(key, io);
        }
        (peer.out, peer.closing, peer.demanded) = (Some(link), false, false);
        peer.position = Position::default();
        peer.outs = peer.outs.wrapping_add(1);
        peer.restate |= peer.stated.is_some_and(|stated| stated != link);
        let since = peer.dials_since(earliest).or(now);
        peer.unattached = if attached { When::NONE } else { since };
        peer.dial = Dial {
            queued: peer.dial.queued,
            ..Dial::default()
        };
        // others have stated its address, which is its own now
        self.names += u64::from(peer.doubts != 0);
        (peer.probe, peer.confirm, peer.heard) = (false, true, true);
        peer.fate = Fate::Open;
        self.retimed = true;
        self.resume(key, &terms, io);
        self.begin_use(key, link);
        io.up(key, link, &terms);
    }

    fn resume(&mut self, key: PeerKey, terms: &Terms, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let (mut number, mut used): (Number, _) = (terms.expected, terms.used);
        let mut next = peer.posted.first();
        (peer.repost, peer.unsent) = (None, None);
        while let Some(op) = next {
            next = List::next(&self.ops, op);
            let Some(entry) = self.ops.get_mut(op) else {
                break;
            };
            if entry.number.is_before(terms.expected) {
                peer.acks -= u32::from(!entry.acked);
                if !entry.done {
                    entry.done = true;
                    io.complete(entry.op, Ok(()));
                }
                continue;
            }
            debug_assert_eq!(entry.number, number);
            entry.sent = false;
            number = number.next();
            used = used.add(entry.spent);
            peer.repost = peer.repost.or(Some(op));
            peer.unsent = peer.unsent.or(Some(op));
        }
        peer.outbound.resume(used);
        (peer.next, peer.completed) = (number, terms.expected);
        self.retire(key);
    }
}
