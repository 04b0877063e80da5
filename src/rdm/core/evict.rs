//! Eviction: the choice of the link whose place an endpoint needs for a further one, and the
//! packets by which both sides agree. `docs/protocol-rdm.md`, "Eviction".

use super::link::{Closing, Link, LinkKey, Numbers, State};
use super::peer::{Drain, PeerKey, When};
use super::{Core, Io};
use crate::wire::rdm::{Body, Close, Packet, Reason, Terms};

/// Evictions and ends of links under way, beyond which no further eviction begins.
const UNDER_WAY: usize = 8;

/// How long a link in use keeps its place, in ns.
const TURN: u64 = 50_000_000;

/// How long HELLO on a circuit is awaited while other peers wait for the places of the link, in ns.
/// Nothing states that its dialler has ended the link before the reply.
const HELLO_WAIT: u64 = 5 * TURN;

/// How long RMA on a link in use is waited for, and how often it is looked, in ns.
const DRAIN: u64 = 500_000_000;
const LOOK: u64 = 1_000_000;

/// The first pause after a link on which nothing has passed is twice this, in ns, and the last one
/// this, doubled so often.
const PAUSE: (u64, u8) = (50_000_000, 6);

/// How long an answer to CLOSE, or the disconnect request behind one, is awaited, in ns.
const SECOND: u64 = 1_000_000_000;

/// A link whose place is needed.
enum Choice {
    None,
    /// The dial of a link to a peer that has dialled too, and whose link is the out-link.
    Dial(LinkKey),
    /// A link on a circuit on which HELLO has not arrived for a time.
    Silent(LinkKey),
    /// The links of a peer that is idle.
    Idle(PeerKey),
    /// Those of a peer that uses them.
    InUse(PeerKey),
}

impl<I: Io> Core<I> {
    /// Begins to evict links: those that were idle for longest, or else those that are in use for
    /// longest. A link that was used since the previous call counts as used now,
    /// so nothing is recorded when packets are posted or arrive.
    pub(in crate::rdm) fn make_room(&mut self, io: &mut I) {
        let most = self.waiters.len().clamp(1, UNDER_WAY);
        let (mut begun, mut no_room) = (0, Vec::new());
        while begun < most {
            match self.choose(most, &no_room) {
                Choice::None => return,
                Choice::Dial(link) | Choice::Silent(link) => self.end_link(link, io),
                Choice::Idle(peer) => {
                    if !self.evict(peer, io) {
                        no_room.push(peer);
                        continue;
                    }
                }
                Choice::InUse(peer) => {
                    if !self.demand(peer, io) {
                        return;
                    }
                }
            }
            begun += 1;
        }
    }

    /// The next link to be evicted, unless `most` are being evicted or ended. `no_room`: idle peers
    /// to which CLOSE cannot be posted now; after 8 of them no further idle one is tried. On
    /// circuits, if no other peer has a link, that to the first of them is drained, which ends it
    /// after a time.
    fn choose(&mut self, most: usize, no_room: &[PeerKey]) -> Choice {
        let now = self.now;
        let mut under_way = 0;
        let (mut dial, mut silent) = (None, None);
        let (mut idle, mut in_use): (Option<(u64, PeerKey)>, _) = (None, None);
        let mut has_turn = false;
        let mut next = self.links.at_or_behind(0);
        while let Some(key) = next {
            next = self.links.after(key);
            let Some(peer) = self.count_use(key, now) else {
                let link = self.links.get(key);
                under_way += usize::from(link.is_some_and(|it| it.state != State::Lingering));
                continue;
            };
            let open = self.open_link(peer);
            // on circuits the links of a peer have the same places
            let gives_up = dial.is_none() && !self.config.circuits;
            if gives_up && open.is_some() && self.is_dialling(peer) {
                dial = self.peers.get(peer).and_then(|peer| peer.own);
            }
            if silent.is_none() && self.is_overdue(key) {
                silent = Some(key);
            }
            if self.link_to_close(peer) != Some(key) || no_room.contains(&peer) {
                continue;
            }
            let Some(link) = self.links.get(key) else {
                continue;
            };
            let before = |of: u64, other: Option<(u64, PeerKey)>| other.is_none_or(|it| of < it.0);
            if self.is_idle(peer) && !link.refused {
                if before(link.used, idle) && no_room.len() < UNDER_WAY {
                    idle = Some((link.used, peer));
                }
            } else if self.is_linked(peer) {
                has_turn = true;
                if now >= link.since + TURN && before(link.since, in_use) {
                    in_use = Some((link.since, peer));
                }
            }
        }
        match (dial, idle, silent, in_use) {
            _ if under_way >= most => Choice::None,
            (Some(link), ..) => Choice::Dial(link),
            (_, Some((_, peer)), ..) => Choice::Idle(peer),
            (_, _, Some(link), _) => Choice::Silent(link),
            (_, _, _, Some((_, peer))) => Choice::InUse(peer),
            (None, None, None, None) => {
                let only = self.config.circuits && !has_turn;
                let first = no_room.first().filter(|_| only);
                first.map_or(Choice::None, |peer| Choice::InUse(*peer))
            }
        }
    }

    /// Whether HELLO on a link on a circuit is awaited for so long that its dialler has probably
    /// ended it. Not if the last HELLO of the peer was later still.
    fn is_overdue(&self, key: LinkKey) -> bool {
        let Some(link) = self.links.get(key).filter(|_| self.config.circuits) else {
            return false;
        };
        let late = self.peers.get(link.peer).is_some_and(|peer| peer.late);
        let replied = link.replied_at().filter(|_| !late);
        replied.is_some_and(|time| time + HELLO_WAIT <= self.now)
    }

    /// A link has become the out-link.
    pub(super) fn begin_use(&mut self, key: PeerKey, link: LinkKey) {
        let numbers = self.numbers(key);
        if let Some(link) = self.links.get_mut(link) {
            (link.begin, link.since) = (numbers, self.now);
        }
    }

    fn numbers(&self, key: PeerKey) -> Option<Numbers> {
        let peer = self.peers.get(key)?;
        Some((peer.next, peer.expected, peer.executed))
    }

    /// Notes whether a link was used since the last call. Returns its peer; `None`: it ends, or is
    /// being evicted.
    fn count_use(&mut self, key: LinkKey, now: u64) -> Option<PeerKey> {
        let link = self.links.get(key)?;
        if link.is_ending() || link.closing != Closing::No {
            return None;
        }
        let peer = link.peer;
        let numbers = self.numbers(peer);
        let link = self.links.get_mut(key)?;
        if link.numbers != numbers {
            (link.numbers, link.used) = (numbers, now);
        }
        Some(peer)
    }

    /// The link on which a peer is asked for its place: the out-link, or without one a link that
    /// the peer may use, if this side needs no out-link.
    fn link_to_close(&self, key: PeerKey) -> Option<LinkKey> {
        let peer = self.peers.get(key)?;
        if peer.out.is_some() {
            return self.open_link(key);
        }
        if self.needs(key) {
            return None;
        }
        let mut links = [peer.own, peer.accepted].into_iter().flatten();
        links.find(|link| self.is_open(*link))
    }

    /// Asks the peer whether the links to it can be ended. `false`: they are in use.
    pub fn evict(&mut self, peer: PeerKey, io: &mut I) -> bool {
        let key = self.resolve(peer);
        let link = self.link_to_close(key);
        let Some(link) = link.filter(|_| self.is_idle(key)) else {
            return false;
        };
        if !self.post_close(key, link, Close::Ask, io) {
            self.release_own_requests(key, io);
            return false;
        }
        if self.open_link(key).is_some() {
            io.down(key, link);
        }
        self.begin_closing(key, &[link], Closing::Asked);
        self.meet_question(key, io);
        true
    }

    /// This side has asked or demanded. On circuits, if the refusal of a question of the peer has
    /// not been posted yet for want of room, both ask: the peer takes this question for its answer
    /// and closes all links, and a refusal behind it would break the circuit.
    fn meet_question(&mut self, key: PeerKey, io: &mut I) {
        let mut refuses = false;
        let circuits = self.config.circuits;
        for link in self.links_of(key).filter(|_| circuits) {
            if let Some(link) = self.links.get_mut(link).filter(|it| !it.is_ending()) {
                refuses |= std::mem::take(&mut link.refuses);
            }
        }
        if refuses {
            self.close_links(key, io);
        }
    }

    /// Begins to evict the links of a peer that uses them: drains the out-link, then demands its
    /// place. On a link that is no out-link there is nothing to drain, but room for CLOSE is waited
    /// for in the same way.
    fn demand(&mut self, key: PeerKey, io: &mut I) -> bool {
        let link = self.link_to_close(key);
        if let Some(link) = link {
            self.begin_drain(key, link, None, io);
        }
        link.is_some()
    }

    /// Stops posting to a peer, and waits until RMA on this link, the out-link if there is one, has
    /// completed; then answers the question, or demands the place.
    fn begin_drain(&mut self, key: PeerKey, link: LinkKey, question: Option<LinkKey>, io: &mut I) {
        if self.open_link(key).is_some() {
            io.down(key, link);
        }
        self.hold_own_requests(key, true, io);
        self.read_clock(io);
        let until = self.now + DRAIN;
        if let Some(link) = self.links.get_mut(link) {
            link.closing = Closing::Draining;
        }
        if let Some(peer) = self.peers.get_mut(key) {
            peer.closing = true;
            peer.drain = Some(Drain { until, question });
        }
        self.drain(key, io);
    }

    /// The link of a peer that drains.
    fn draining(&self, key: PeerKey) -> Option<LinkKey> {
        let peer = self.peers.get(key)?;
        let drains = |link: &LinkKey| {
            let link = self.links.get(*link);
            link.is_some_and(|link| link.closing == Closing::Draining)
        };
        let mut links = [peer.own, peer.accepted].into_iter().flatten();
        links.find(drains)
    }

    /// Looks whether the link of a peer that drains has drained.
    pub(super) fn drain(&mut self, key: PeerKey, io: &mut I) {
        let drain = self.peers.get(key).and_then(|peer| peer.drain);
        let (Some(Drain { until, question }), Some(on)) = (drain, self.draining(key)) else {
            return;
        };
        let up = |link: LinkKey| self.links.get(link).is_some_and(|it| it.state == State::Up);
        let asks = question.is_none_or(up);
        let mut quiet = io.is_quiet(on);
        if self.config.circuits && question.is_some_and(|question| question != on) {
            // the answer states that all packets have arrived
            quiet &= io.has_completed(on);
        }
        let late = until <= self.now;
        if quiet {
            let (link, close, closing) = match question {
                Some(link) => (link, Close::Accept, Closing::Accepted),
                None => (on, Close::Demand, Closing::Asked),
            };
            if asks && self.post_close(key, link, close, io) {
                if let Some(peer) = self.peers.get_mut(key) {
                    (peer.drain, peer.demanded) = (None, true);
                }
                self.begin_closing(key, &[link, on], closing);
                if closing == Closing::Asked {
                    self.meet_question(key, io);
                } else if self.config.circuits {
                    // CLOSE was the last packet of each side
                    self.close_links(key, io);
                }
                return;
            }
        }
        if !asks || late && !(quiet && question.is_none()) {
            // its peer has ended the link on which it has asked, or RMA takes long
            self.reopen(key, io);
            if let Some(question) = question {
                self.refuse_on(key, question, io);
            }
        } else if late {
            // no room for a packet, since the link has drained
            self.end_links(key, io);
        } else {
            if let Some(peer) = self.peers.get_mut(key) {
                peer.close_at = When::at(self.now + LOOK);
            }
            self.set_timer(key);
        }
    }

    /// The links of a peer are used again. Their places are the last ones to be demanded.
    fn reopen(&mut self, key: PeerKey, io: &mut I) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        (peer.closing, peer.close_at, peer.drain) = (false, When::NONE, None);
        let out = peer.out;
        self.retimed = true;
        for link in self.links_of(key) {
            if let Some(link) = self.links.get_mut(link)
                && link.closing != Closing::No
            {
                link.closing = Closing::No;
                (link.used, link.since) = (now, now);
            }
        }
        self.hold_own_requests(key, false, io);
        let Some((out, link)) = out.and_then(|out| Some((out, self.links.get(out)?))) else {
            // what has waited for the answer may need an out-link
            return self.advance(key, io);
        };
        if let Some(terms) = link.terms {
            io.up(key, out, &terms);
        }
        self.list(key);
        self.pump(key, io);
    }

    /// Posts CLOSE (refuse) to a link, now or when there is room.
    pub(super) fn refuse_on(&mut self, key: PeerKey, link: LinkKey, io: &mut I) {
        let Some(link) = self.links.get_mut(link) else {
            return;
        };
        link.refuses = true;
        if let Some(peer) = self.peers.get_mut(key) {
            peer.refuses = true;
        }
        self.refuse(key, io);
    }

    /// The pause before the next dial of a peer whose out-link has ended: if its place was
    /// demanded, and nothing had passed on it.
    pub(super) fn pause_demanded(&mut self, ended: &Link) {
        let key = ended.peer;
        let numbers = self.numbers(key);
        let Some(peer) = self.peers.get_mut(key).filter(|peer| peer.demanded) else {
            return;
        };
        peer.demanded = false;
        if ended.begin != numbers {
            peer.fruitless = 0;
            return;
        }
        peer.fruitless = (peer.fruitless + 1).min(PAUSE.1);
        peer.dial.not_before = When::at(self.now + (PAUSE.0 << peer.fruitless));
        self.set_timer(key);
    }

    /// Nothing is posted to a peer any more, until the links have ended or the peer refuses.
    fn begin_closing(&mut self, key: PeerKey, links: &[LinkKey], closing: Closing) {
        for link in links {
            if let Some(link) = self.links.get_mut(*link) {
                link.closing = closing;
            }
        }
        if let Some(peer) = self.peers.get_mut(key) {
            // the answer, or the disconnect request, may not come
            (peer.closing, peer.close_at) = (true, When::at(self.now + SECOND));
        }
        self.set_timer(key);
    }

    /// Whether nothing is under way to a peer, and each link to it is up.
    fn is_idle(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        self.is_linked(key) && !peer.has_ops() && !peer.has_report() && !peer.recalled
    }

    /// Whether there is a link to a peer, and each one is up.
    fn is_linked(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let up = |link: LinkKey| self.links.get(link).is_some_and(Link::is_open);
        let links = || [peer.own, peer.accepted].into_iter().flatten();
        links().next().is_some() && links().all(up)
    }

    /// The terms of the peer for a link have arrived.
    pub(super) fn introduce(&mut self, key: PeerKey, link: LinkKey, terms: &Terms, io: &mut I) {
        if self.config.circuits && self.peers.get(key).is_some_and(|peer| peer.closing) {
            io.hold_own_requests(link, true);
        }
        io.introduced(link, terms);
    }

    /// On circuits: requests of this side that are no packets are held back on the open links of a
    /// peer, or posted again. CLOSE concerns all these links.
    pub(super) fn hold_own_requests(&mut self, key: PeerKey, holds: bool, io: &mut I) {
        let open = |link: &LinkKey| self.links.get(*link).is_some_and(|it| !it.is_ending());
        if self.config.circuits {
            let links = self.links_of(key).filter(open);
            links.for_each(|link| io.hold_own_requests(link, holds));
        }
    }

    /// The links of a peer stay open, unless they are being closed for another reason.
    pub(super) fn release_own_requests(&mut self, key: PeerKey, io: &mut I) {
        if self.peers.get(key).is_some_and(|peer| !peer.closing) {
            self.hold_own_requests(key, false, io);
        }
    }

    /// Posts CLOSE to a link, which may be another one than the out-link. `false`: no room. If the
    /// links stay open then, [`Self::release_own_requests`] follows, except behind
    /// [`Close::Refuse`].
    fn post_close(&mut self, key: PeerKey, link: LinkKey, close: Close, io: &mut I) -> bool {
        let Some(header) = self.header(key) else {
            return false;
        };
        let body = Body::Close(close);
        if close != Close::Refuse {
            self.hold_own_requests(key, true, io);
        }
        let posted = io.control(link, &Packet { header, body });
        // CREDIT follows a refusal, and is repeated if it gets lost
        let tells = posted && close != Close::Refuse;
        let peer = self.peers.get_mut(key);
        // what another link carries may be lost although the out-link stays
        if let Some(peer) = peer.filter(|peer| tells && peer.out == Some(link)) {
            peer.mark_told_once(link);
        }
        posted
    }

    fn has_asked(&self, link: LinkKey) -> bool {
        let link = self.links.get(link);
        link.is_some_and(|link| link.closing == Closing::Asked)
    }

    /// The endpoint is being closed: informs the peers to which a link is open, so that they need
    /// not keep their sessions. On circuits [`Self::leave`] does this.
    pub fn announce_end(&mut self, io: &mut I) {
        let mut next = self.peers.at_or_behind(0);
        while let Some(key) = next {
            next = self.peers.after(key);
            if let Some(out) = self.open_link(key) {
                self.post_close(key, out, Close::End, io);
            }
        }
    }

    /// The endpoint is being closed: ends all links, on circuits, and informs the peers, so that
    /// they post nothing more. Nothing is dialled or accepted any more.
    pub fn leave(&mut self, io: &mut I) {
        self.left = true;
        let mut next = self.peers.at_or_behind(0);
        while let Some(key) = next {
            next = self.peers.after(key);
            self.reject_held(key, Reason::Busy, None, io);
            if let Some(out) = self.open_link(key)
                && self.post_close(key, out, Close::End, io)
            {
                io.down(key, out);
                for link in self.links_of(key) {
                    if let Some(link) = self.links.get_mut(link) {
                        link.closing = Closing::Asked;
                    }
                }
            }
            self.end_links(key, io);
            self.close_orphans(key, None, io);
        }
        self.advance_changed(io);
    }

    /// CLOSE has arrived.
    pub(super) fn close_arrived(&mut self, link: LinkKey, close: Close, io: &mut I) {
        let Some(from @ Link { peer: key, .. }) = self.links.get(link).copied() else {
            return;
        };
        if close == Close::End
            && let Some(peer) = self.peers.get_mut(key)
        {
            peer.leaves = true;
            if !self.config.circuits {
                // the disconnect of the link follows
                return;
            }
        }
        if close == Close::End {
            io.departs(link);
            // the last packet of each side
            if let Some(out) = self.open_link(key) {
                self.post_close(key, out, Close::Accept, io);
            }
            return self.close_links(key, io);
        }
        self.read_clock(io);
        if from.is_ending() {
            if close == Close::Accept && from.closing == Closing::Asked {
                for link in self.links_of(key) {
                    if self.has_asked(link) {
                        self.close_half(link, io);
                    }
                }
            }
            return;
        }
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        let (out, own, accepted) = (peer.out, peer.own, peer.accepted);
        let mut links = [own, accepted].into_iter().flatten();
        let asks = links.any(|link| self.has_asked(link));
        if matches!(close, Close::Accept | Close::Refuse)
            && from.closing == Closing::Asked
            && let Some(peer) = self.peers.get_mut(key)
        {
            // the question has arrived, and with it *processed*
            peer.acked_on.take_if(|on| *on == link);
        }
        let drain = self.peers.get(key).and_then(|peer| peer.drain);
        match (close, from.closing) {
            // both ask, each on its out-link, or this side has an answer
            (Close::Ask | Close::Demand, Closing::No | Closing::Asked) if asks => {
                self.close_links(key, io)
            }
            (Close::Ask | Close::Demand, Closing::No | Closing::Draining)
                if drain.is_some_and(|drain| drain.question.is_none()) =>
            {
                if let Some(Drain { question, .. }) =
                    self.peers.get_mut(key).and_then(|peer| peer.drain.as_mut())
                {
                    *question = Some(link);
                }
                self.drain(key, io);
            }
            (Close::Accept, Closing::Asked) => self.close_links(key, io),
            (Close::Refuse, Closing::Asked) => {
                if let Some(from) = self.links.get_mut(link) {
                    from.refused = true;
                }
                if let Some(peer) = self.peers.get_mut(key) {
                    peer.demanded = false;
                }
                self.reopen(key, io);
            }
            (Close::Ask, Closing::No) => {
                if !self.is_idle(key) {
                    return self.refuse_on(key, link, io);
                }
                self.accept_close(key, link, io);
            }
            // nothing of this side is under way on a link
            (Close::Demand, Closing::No) if out.is_none() && self.is_linked(key) => {
                self.accept_close(key, link, io);
            }
            (Close::Demand, Closing::No) => {
                match self.open_link(key).filter(|_| self.is_linked(key)) {
                    Some(out) => self.begin_drain(key, out, Some(link), io),
                    None => self.refuse_on(key, link, io),
                }
            }
            _ => self.violation(link, io),
        }
    }

    /// Accepts on the link of a question, while nothing of this side is under way on a link; or
    /// refuses, if there is no room.
    fn accept_close(&mut self, key: PeerKey, link: LinkKey, io: &mut I) {
        if !self.post_close(key, link, Close::Accept, io) {
            self.release_own_requests(key, io);
            return self.refuse_on(key, link, io);
        }
        if let Some(out) = self.open_link(key) {
            io.down(key, out);
        }
        let out = self.peers.get(key).and_then(|peer| peer.out);
        let all: Vec<_> = [Some(link), out].into_iter().flatten().collect();
        self.begin_closing(key, &all, Closing::Accepted);
        if self.config.circuits {
            // CLOSE was the last packet of each side
            self.close_links(key, io);
        }
    }

    /// Posts CLOSE (refuse), if it is due.
    pub(super) fn refuse(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get(key).filter(|peer| peer.refuses) else {
            return;
        };
        let refuses = |link: &LinkKey| {
            let link = self.links.get(*link);
            link.is_some_and(|link| link.refuses && link.is_open())
        };
        let due = [peer.own, peer.accepted];
        let due = due.into_iter().flatten().find(refuses);
        if due.is_some_and(|link| !self.post_close(key, link, Close::Refuse, io)) {
            return;
        }
        if let Some(link) = due.and_then(|link| self.links.get_mut(link)) {
            link.refuses = false;
        }
        if let Some(peer) = self.peers.get_mut(key) {
            peer.refuses = false;
        }
    }
}
