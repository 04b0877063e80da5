//! Places for links, of which an endpoint has a limited number: the peers that wait for one, in
//! the order in which they get them. `docs/protocol-rdm.md`, "Eviction".
//!
//! On circuits a peer with links has two places: that of the target through which it sends, and
//! that of the circuit to its node, which all peers of the node share. Both are counted from the
//! begin of its first link, although the circuit is dialled, and the target opened, later.
//! `docs/protocol-xrc.md`, "Eviction and turns".

use std::collections::HashSet;
use std::net::IpAddr;

use super::connect::HeldRequest;
use super::link::{Link, State};
use super::peer::{PeerKey, Position, When};
use super::{Core, Io};
use crate::wire::rdm::{Listener, Reason, Request};

/// Peers that can wait; requests of further ones are rejected.
const WAITERS: usize = 256;

/// How long the links of a peer can have a place, before one is the out-link, until the peer loses
/// its position, in ns.
const SPENDABLE: u64 = 500_000_000;

/// How often room is made for those that wait, in ns.
const AGAIN: u64 = 2_000_000;

/// The places of a peer on circuits: its target, and its circuit.
const OF_PEER: usize = 2;

/// What has a place on circuits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    /// The target through which a peer sends.
    Target(PeerKey),
    /// The circuit to a node at an IP address.
    Circuit((IpAddr, u64)),
    /// The circuit to the node of a peer, which is not known.
    CircuitOf(PeerKey),
}

/// The holders of places on circuits.
struct Taken {
    all: HashSet<Holder>,
    /// Those of peers that are dialled. Nothing but the answers of these peers ends this.
    dials: HashSet<Holder>,
}

/// A peer that needs its places on circuits; `None`: one that is not known yet.
#[derive(Clone, Copy)]
struct Applicant {
    key: Option<PeerKey>,
    node: Option<(IpAddr, u64)>,
}

impl Applicant {
    /// `address`: where its circuit is dialled.
    fn new(key: Option<PeerKey>, address: Option<Listener>, io: &impl Io) -> Self {
        let node = address.and_then(|at| io.node_at(at));
        Self { key, node }
    }

    /// The number of places, with those of the applicant.
    fn added_to(self, holders: &HashSet<Holder>) -> usize {
        let target = self.key.map(Holder::Target);
        let circuit = match self.node {
            Some(node) => Some(Holder::Circuit(node)),
            None => self.key.map(Holder::CircuitOf),
        };
        let new = |holder: &Option<Holder>| holder.is_none_or(|holder| !holders.contains(&holder));
        holders.len() + [target, circuit].iter().filter(|it| new(it)).count()
    }
}

impl<I: Io> Core<I> {
    /// Whether a place for a link of a peer can be taken now. `dial`: for one that this side dials.
    /// If not, the peer waits for it, and is advanced when it gets it.
    pub(super) fn takes_place(&mut self, key: PeerKey, dial: bool, io: &mut I) -> bool {
        let turn = self.turn.take_if(|turn| *turn == key).is_some();
        if self.config.circuits && self.has_link(key) {
            // its places are those of the other link
            return true;
        }
        let held = self.held.iter().any(|it| it.peer == key);
        if !turn && dial && held {
            // its request has the same place, and was first
            return false;
        }
        let free = turn
            || self.waiters.is_empty()
                && (!dial || self.may_dial_more(key, io))
                && self.has_place(Some(key), self.source(key, dial), io);
        if !free {
            self.wait_for_place(key, io);
            return false;
        }
        self.line_up(key);
        if dial {
            self.reject_greater(key, io);
        }
        true
    }

    /// The time that gives a peer its position among those that wait for a place: that of its first
    /// attempt to get one since its last out-link. It keeps it if its request, or the dial of this
    /// side, is rejected, but not for longer than the connect timeout.
    pub(super) fn line_up(&mut self, key: PeerKey) -> u64 {
        let (now, timeout) = (self.now, self.config.timeout);
        let Some(peer) = self.peers.get_mut(key).filter(|peer| peer.out.is_none()) else {
            return now;
        };
        let lapsed = |since: u64| since.saturating_add(timeout) < now;
        if peer.position.since.get().is_none_or(lapsed) {
            peer.position = Position {
                since: When::at(now),
                spent: 0,
            };
        }
        peer.position.since.get().unwrap_or(now)
    }

    /// A link has returned its place. A peer loses its position if its links have had places for
    /// long and were not used: otherwise it would keep the position by requests alone.
    pub(super) fn spend(&mut self, link: &Link) {
        let time = self.now.saturating_sub(link.since);
        let unused = link.begin.is_none();
        if let Some(peer) = self.peers.get_mut(link.peer).filter(|_| unused) {
            peer.position.spent = peer.position.spent.saturating_add(time);
            if peer.position.spent > SPENDABLE {
                peer.position = Position::default();
            }
        }
    }

    /// Whether a dial to a peer would take a place that no other peer waits for.
    pub(super) fn has_spare_place(&self, key: PeerKey, io: &mut I) -> bool {
        self.waiters.is_empty()
            && self.may_dial_more(key, io)
            && self.has_place(Some(key), self.dialled_at(key), io)
    }

    /// The peer is dialled, and each request that it leaves no place for does not wait any more, as
    /// if it had arrived afterwards.
    fn reject_greater(&mut self, dialled: PeerKey, io: &mut I) {
        if self.held.is_empty() {
            return;
        }
        let mut dials = HashSet::new();
        if self.config.circuits {
            dials = self.taken(io).dials;
            let applicant = Applicant::new(Some(dialled), self.dialled_at(dialled), io);
            dials.insert(Holder::Target(dialled));
            dials.insert(match applicant.node {
                Some(node) => Holder::Circuit(node),
                None => Holder::CircuitOf(dialled),
            });
        } else if io.places() != 1 {
            return;
        }
        let no_place = |it: &&HeldRequest<I::Held>| {
            let applicant = Applicant::new(Some(it.peer), Some(it.source), io);
            let fits = self.config.circuits && applicant.added_to(&dials) <= io.places();
            !fits && it.request.id.get() > self.config.id.get()
        };
        let rejected: Vec<_> = self
            .held
            .iter()
            .filter(no_place)
            .map(|it| it.peer)
            .collect();
        for key in rejected {
            self.reject_held(key, Reason::Busy, None, io);
        }
    }

    /// Whether one more place can be used by a dial. The last one serves requests, so that
    /// endpoints that wait for places of each other make progress.
    fn may_dial_more(&self, key: PeerKey, io: &I) -> bool {
        if !self.config.circuits {
            return self.dials + 1 < io.places().max(2);
        }
        if self.dials == 0 || (self.dials + 2) * OF_PEER <= io.places() {
            return true;
        }
        let dials = self.taken(io).dials;
        self.may_dial_beside(&dials, key, io)
    }

    /// As [`Self::may_dial_more`], on circuits.
    fn may_dial_beside(&self, dials: &HashSet<Holder>, key: PeerKey, io: &I) -> bool {
        // a request of a further peer of the only node needs no circuit
        let request = if io.has_one_node() { 1 } else { OF_PEER };
        let applicant = Applicant::new(Some(key), self.dialled_at(key), io);
        self.dials == 0 || applicant.added_to(dials) + request <= io.places()
    }

    /// Where a peer is dialled.
    pub(super) fn dialled_at(&self, key: PeerKey) -> Option<Listener> {
        self.peers.get(key)?.address
    }

    /// Where the circuit for the next link of a peer is dialled: `dial`, if this side dials the
    /// link.
    fn source(&self, key: PeerKey, dial: bool) -> Option<Listener> {
        let mut held = self.held.iter().filter(|_| !dial);
        let held = held.find(|it| it.peer == key);
        held.map(|it| it.source).or_else(|| self.dialled_at(key))
    }

    /// Whether the places of a peer whose circuit is dialled to this address can be had now.
    fn has_place(&self, key: Option<PeerKey>, address: Option<Listener>, io: &mut I) -> bool {
        if !io.has_place() {
            return false;
        }
        if !self.config.circuits || (self.links.len() + 1) * OF_PEER <= io.places() {
            return true;
        }
        let taken = self.taken(io).all;
        Applicant::new(key, address, io).added_to(&taken) <= io.places()
    }

    /// The places that are used on circuits. A lingering link has none: this side does not post to
    /// it any more, and the peer decides when it ends. The links of a peer that dials from another
    /// address than it states have a circuit each.
    fn taken(&self, io: &I) -> Taken {
        let (mut all, mut dials) = (HashSet::new(), HashSet::new());
        let mut next = self.links.at_or_behind(0);
        while let Some(key) = next {
            next = self.links.after(key);
            let Some(link) = self.links.get(key) else {
                continue;
            };
            if link.state == State::Lingering {
                continue;
            }
            let node = io.node_of(key, self.dialled_at(link.peer));
            let circuit = node.map_or(Holder::CircuitOf(link.peer), Holder::Circuit);
            for holder in [Holder::Target(link.peer), circuit] {
                all.insert(holder);
                if link.state == State::Dialling {
                    dials.insert(holder);
                }
            }
        }
        Taken { all, dials }
    }

    /// The places that are used on circuits.
    #[cfg(test)]
    pub(in crate::rdm) fn places_taken(&self, io: &I) -> usize {
        self.taken(io).all.len()
    }

    /// Whether a peer has a link that does not linger.
    fn has_link(&self, key: PeerKey) -> bool {
        let peer = self.peers.get(key);
        peer.is_some_and(|peer| peer.own.is_some() || peer.accepted.is_some())
    }

    fn wait_for_place(&mut self, key: PeerKey, io: &mut I) {
        let since = self.line_up(key);
        if let Some(peer) = self.peers.get_mut(key)
            && !peer.waits
        {
            peer.waits = true;
            let since_of = |other: &PeerKey| self.peers.get(*other)?.position.since.get();
            let before = |other: &PeerKey| since_of(other).is_none_or(|other| other <= since);
            let behind = self.waiters.iter().rposition(before);
            self.waiters.insert(behind.map_or(0, |at| at + 1), key);
        }
        if self.room_at.is_none() {
            self.room_at = Some(self.now + AGAIN);
            self.retimed = true;
        }
        self.make_room(io);
    }

    /// Gives a free place to the peer that waits for longest. `false`: there is none. Otherwise
    /// the peer has taken it, or does not need it any more.
    pub(super) fn assign_place(&mut self, io: &mut I) -> bool {
        if self.waiters.is_empty() || !io.has_place() {
            return false;
        }
        self.reject_late(io);
        let taken = self.config.circuits.then(|| self.taken(io));
        let may_dial = |key| match &taken {
            None => self.may_dial_more(key, io),
            Some(taken) => self.may_dial_beside(&taken.dials, key, io),
        };
        let may = |key: &PeerKey| may_dial(*key) || self.held.iter().any(|it| it.peer == *key);
        let Some(next) = self.waiters.iter().position(may) else {
            return false;
        };
        // those behind it wait until its places are free
        if let Some((taken, key)) = taken.zip(self.waiters.get(next).copied())
            && !self.has_link(key)
            && let applicant = Applicant::new(Some(key), self.source(key, false), io)
            && applicant.added_to(&taken.all) > io.places()
        {
            return false;
        }
        let Some(key) = self.waiters.remove(next) else {
            return false;
        };
        if let Some(peer) = self.peers.get_mut(key) {
            peer.waits = false;
        }
        self.turn = Some(key);
        self.advance(key, io);
        self.turn = None;
        true
    }

    /// Makes room for those that wait, if it is time.
    pub(super) fn make_room_again(&mut self, io: &mut I) {
        if self.room_at.is_none_or(|time| time > self.now) {
            return;
        }
        self.room_at = None;
        if !self.waiters.is_empty() {
            self.room_at = Some(self.now + AGAIN);
            self.make_room(io);
        }
    }

    /// Whether a request can be accepted, now or when there is a place. `source`:
    /// [`Io::source_of`]. `key`: its peer, if it has one. The peer has no accepted link.
    pub(super) fn may_request(
        &mut self,
        (request, source): (&Request, Listener),
        key: Option<PeerKey>,
        io: &mut I,
    ) -> bool {
        let circuits = self.config.circuits;
        if circuits && key.is_some_and(|key| self.has_link(key)) {
            return true;
        }
        if self.has_place(key, Some(source), io) {
            return true;
        }
        if !circuits && key.is_some_and(|key| self.is_dialling(key)) {
            // one of both sides gives its dial up
            return self.yields(request, io);
        }
        // a dial may have its place, and wait for the place of another endpoint
        let ends = match circuits {
            false => self.dials < io.places(),
            true => {
                let applicant = Applicant::new(key, Some(source), io);
                self.dials == 0 || applicant.added_to(&self.taken(io).dials) <= io.places()
            }
        };
        (ends || request.id.get() < self.config.id.get()) && self.waiters.len() < WAITERS
    }

    /// Both sides dial each other, and this one has no further place: whether it gives its dial up.
    pub(super) fn yields(&self, request: &Request, io: &mut I) -> bool {
        !self.config.circuits && request.id.get() < self.config.id.get() && !io.has_place()
    }

    /// Whether a dial to a peer is under way.
    pub(super) fn is_dialling(&self, key: PeerKey) -> bool {
        let own = self.peers.get(key).and_then(|peer| peer.own);
        let own = own.and_then(|own| self.links.get(own));
        own.is_some_and(|own| own.state == State::Dialling)
    }
}
