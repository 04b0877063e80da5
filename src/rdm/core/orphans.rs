//! Links of sessions that have ended, on circuits. `docs/protocol-xrc.md`, "Halves".
//!
//! The dialler of a link learns by ATTACH through which target its peer sends. Before that it can
//! neither make the peer's requests fail nor be certain that none succeeds. So a link on which
//! ATTACH has not arrived outlives its session at the dialler: what the peer reports as sent is
//! delivered. It closes when the peer has stated that it posts nothing on it, or when the target
//! that ATTACH names is in its error state.

use super::credit::Inbound;
use super::link::{LinkKey, State};
use super::peer::PeerKey;
use super::{Core, Io, Origin};
use crate::wire::rdm::packet::Close;
use crate::wire::rdm::{Body, Epoch, Number, Packet};

/// What remains of the session of such a link.
#[derive(Debug)]
pub(in crate::rdm) struct Orphan {
    pub(super) link: LinkKey,
    /// The count of a session that no credit is given back to: the session may have other links.
    session: u32,
    /// The number of the next packet of the peer.
    expected: Number,
    /// What the peer was granted.
    inbound: Inbound,
}

impl<I: Io> Core<I> {
    /// The session of a link on which ATTACH has not arrived ends, and nothing of this side is
    /// under way on it.
    pub(super) fn orphan(&mut self, link: LinkKey) {
        let Some(left) = self.links.get_mut(link) else {
            return;
        };
        // packets are not those of the peer's present session
        (left.state, left.greeted) = (State::Lingering, false);
        let key = left.peer;
        self.detach(key, link);
        let of = self.peers.get(key);
        if let Some((inbound, of)) = of.and_then(|peer| Some((peer.inbound?, peer))) {
            self.orphans.push(Orphan {
                link,
                session: of.session.wrapping_sub(1),
                expected: of.expected,
                inbound,
            });
        }
        self.end_session(key);
        self.list_idle(key);
    }

    /// The orphans of a peer, and of its aliases. An alias can be freed only without its own, so it
    /// has them too.
    pub(super) fn orphans_of(&self, key: PeerKey) -> impl Iterator<Item = LinkKey> {
        let is_its = move |link: LinkKey| {
            let peer = self.links.get(link).map(|link| link.peer);
            peer.is_some_and(|peer| peer == key || self.resolve(peer) == key)
        };
        self.orphans
            .iter()
            .map(|orphan| orphan.link)
            .filter(move |link| is_its(*link))
    }

    /// Whether orphans of a peer, on which the peer posts nothing more, have not ended.
    pub(super) fn is_closing_orphans(&self, key: PeerKey) -> bool {
        let closes = |link| self.links.get(link).is_some_and(|link| link.peer_ended);
        !self.orphans.is_empty() && self.orphans_of(key).any(closes)
    }

    /// The peer has ended the links that this side has dialled before an epoch; `None`: all.
    pub(super) fn close_orphans(&mut self, key: PeerKey, before: Option<Epoch>, io: &mut I) {
        let orphans: Vec<LinkKey> = self.orphans_of(key).collect();
        for link in orphans {
            if before.is_none() || self.is_before(link, before) {
                self.close_half(link, io);
            }
        }
    }

    /// The peer has no session any more, or its process has ended: it posts nothing on links on
    /// which ATTACH has not arrived.
    pub(super) fn close_unattached(&mut self, key: PeerKey, io: &mut I) {
        for link in self.links_of(key) {
            if self.is_unattached(link) {
                self.close_half(link, io);
            }
        }
        self.close_orphans(key, None, io);
    }

    /// Whether the target through which the peer sends on a link is not known, although it may
    /// send.
    pub(super) fn is_unattached(&self, link: LinkKey) -> bool {
        let link = self.links.get(link).filter(|_| self.config.circuits);
        link.is_some_and(|link| link.is_unattached())
    }

    /// ATTACH has arrived: the target of the peer is known.
    pub(super) fn attached(&mut self, link: LinkKey, io: &mut I) {
        let Some(key) = self.links.get(link).map(|record| record.peer) else {
            return;
        };
        self.note_attached(link);
        if self.peers.get(key).is_some_and(|peer| peer.ends) {
            self.silence(link, io);
        }
    }

    /// A packet has arrived on a link that has no session any more. `false`: it has one.
    pub(super) fn arrived_on_orphan(
        &mut self,
        link: LinkKey,
        packet: &Packet,
        slot: &mut Option<I::Slot>,
        io: &mut I,
    ) -> bool {
        let Some(at) = self.orphans.iter().position(|orphan| orphan.link == link) else {
            return false;
        };
        let Some(record) = self.links.get_mut(link) else {
            return false;
        };
        let key = record.peer;
        match packet.body {
            Body::Attach(_) => {
                record.attached = true;
                io.silence(link);
            }
            Body::Close(Close::End) => self.close_half(link, io),
            _ if packet.body.kind().is_numbered() => {
                let orphan = &mut self.orphans[at];
                let is_next = packet.header.number == orphan.expected;
                if !is_next || !orphan.inbound.arrive(packet.body.uses()) {
                    return true;
                }
                orphan.expected = orphan.expected.next();
                let origin = Origin {
                    peer: key,
                    session: orphan.session,
                };
                // an RTS cannot be answered
                if !matches!(packet.body, Body::Rts { .. })
                    && let Some(slot) = slot.take()
                {
                    self.charge_left(key, packet.body.uses().blocks);
                    let credit = io.deliver(origin, packet, slot);
                    self.give_back(origin, credit);
                }
            }
            _ => {}
        }
        true
    }
}
