//! Places for links, of which an endpoint has a limited number: the peers that wait for one, in
//! the order in which they get them. `docs/protocol-rdm.md`, "Eviction".
//!
//! On circuits nothing waits here: a dial is repeated, and a request is rejected.

use super::core::{Core, Io};
use super::link::State;
use super::peer::PeerKey;
use crate::wire::rdm::{Reason, Request};

/// Peers that can wait; requests of further ones are rejected.
const WAITERS: usize = 256;

/// How often room is made for those that wait, in ns.
const AGAIN: u64 = 2_000_000;

impl<I: Io> Core<I> {
    /// Whether a place for a link of a peer can be taken now. `dial`: for one that this side dials.
    /// If not, the peer waits for it, and is advanced when it gets it.
    pub(super) fn takes_place(&mut self, key: PeerKey, dial: bool, io: &mut I) -> bool {
        if self.config.circuits {
            if !dial || io.has_place() {
                // that of a request was looked for when it arrived
                return true;
            }
            self.make_room(io);
            self.plan(key, false);
            return false;
        }
        let turn = self.turn.take_if(|turn| *turn == key).is_some();
        let held = self.held.iter().any(|(of, ..)| *of == key);
        if !turn && dial && held {
            // its request has the same place, and was first
            return false;
        }
        let free = || self.waiters.is_empty() && (!dial || self.may_dial_more(io));
        if !(turn || free() && io.has_place()) {
            self.wait_for_place(key, io);
            return false;
        }
        if dial && io.places() == 1 {
            self.reject_greater(io);
        }
        true
    }

    /// The only place is used by a dial: requests that would not wait for it do not either if they
    /// have waited before.
    fn reject_greater(&mut self, io: &mut I) {
        let greater = |it: &&(PeerKey, I::Held, Request)| it.2.id.get() > self.config.id.get();
        let rejected: Vec<_> = self.held.iter().filter(greater).map(|it| it.0).collect();
        for key in rejected {
            self.reject_held(key, Reason::Busy, None, io);
        }
    }

    /// Whether one more place can be used by a dial. The last one serves requests, so that endpoints
    /// that wait for places of each other make progress.
    fn may_dial_more(&self, io: &I) -> bool {
        self.dials + 1 < io.places().max(2)
    }

    fn wait_for_place(&mut self, key: PeerKey, io: &mut I) {
        if let Some(peer) = self.peers.get_mut(key)
            && !peer.waits
        {
            peer.waits = true;
            self.waiters.push_back(key);
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
        let dial = self.may_dial_more(io);
        let mut waiters = self.waiters.iter();
        let next = waiters.position(|key| dial || self.held.iter().any(|(of, ..)| of == key));
        let Some(key) = next.and_then(|next| self.waiters.remove(next)) else {
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

    /// Whether a request can be accepted, now or when there is a place. `key`: its peer, if it has
    /// one. The peer has no accepted link.
    pub(super) fn may_request(
        &mut self,
        request: &Request,
        key: Option<PeerKey>,
        io: &mut I,
    ) -> bool {
        if io.has_place() {
            return true;
        }
        if self.config.circuits {
            self.make_room(io);
            return false;
        }
        if key.is_some_and(|key| self.is_dialling(key)) {
            // one of both sides gives its dial up
            return self.yields(request, io);
        }
        // with one place it may be used by a dial, which may wait for the place of another endpoint
        let ends = self.dials < io.places() || request.id.get() < self.config.id.get();
        ends && self.waiters.len() < WAITERS
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
