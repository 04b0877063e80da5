//! Eviction: the choice of the link whose place an endpoint needs for a further one, and the
//! packets by which both sides agree. `docs/protocol-rdm.md`, "Eviction".

use std::collections::HashMap;

use super::core::{Core, Io};
use super::link::{Closing, Link, LinkKey, State};
use super::peer::PeerKey;
use crate::wire::rdm::{Body, Close, Packet, Reason};

/// Evictions and ends of links under way, beyond which no further eviction begins.
const UNDER_WAY: usize = 8;

/// How long an answer to CLOSE, or the disconnect request behind one, is awaited, in ns.
const SECOND: u64 = 1_000_000_000;

/// The links to the peers of a node.
#[derive(Debug, Default)]
struct Node {
    /// When one was used last.
    used: u64,
    busy: bool,
    peers: Vec<PeerKey>,
}

impl<I: Io> Core<I> {
    /// Begins to evict the link that was idle for longest. A link that was used since the previous
    /// call counts as used now, so nothing is recorded when packets are posted or arrive.
    pub(super) fn make_room(&mut self, io: &mut I) {
        if self.config.circuits {
            return self.evict_node(io);
        }
        let now = self.now;
        let mut under_way = 0;
        let mut longest: Option<(u64, PeerKey)> = None;
        let mut next = self.links.at_or_behind(0);
        while let Some(key) = next {
            next = self.links.after(key);
            let Some(peer) = self.count_use(key, now) else {
                let link = self.links.get(key);
                under_way += usize::from(link.is_some_and(|it| it.state != State::Lingering));
                continue;
            };
            let used = self.links.get(key).map_or(now, |link| link.used);
            if self.open_link(peer) == Some(key)
                && self.is_idle(peer)
                && longest.is_none_or(|(longest, _)| used < longest)
            {
                longest = Some((used, peer));
            }
        }
        if under_way < UNDER_WAY
            && let Some((_, peer)) = longest
        {
            self.evict(peer, io);
        }
    }

    /// As [`Self::make_room`], on circuits: evicts the links to the node whose links were all idle
    /// for longest. A circuit ends with the last of its links. A peer whose node is not known is
    /// one.
    fn evict_node(&mut self, io: &mut I) {
        let now = self.now;
        let mut under_way = 0;
        let mut nodes: HashMap<(bool, u64), Node> = HashMap::new();
        let mut next = self.links.at_or_behind(0);
        while let Some(key) = next {
            next = self.links.after(key);
            let Some(peer) = self.count_use(key, now) else {
                let link = self.links.get(key);
                under_way += usize::from(link.is_some_and(|it| it.state != State::Lingering));
                continue;
            };
            let of = match io.node_of(key) {
                Some(node) => (true, node),
                None => (false, peer.number().into()),
            };
            let used = self.links.get(key).map_or(now, |link| link.used);
            let node = nodes.entry(of).or_default();
            node.used = node.used.max(used);
            node.busy |= !self.is_idle(peer);
            if !node.peers.contains(&peer) {
                node.peers.push(peer);
            }
        }
        let idle = nodes.into_values().filter(|node| !node.busy);
        if let Some(node) = idle.min_by_key(|node| node.used)
            && under_way < UNDER_WAY
        {
            for peer in node.peers {
                self.evict(peer, io);
            }
        }
    }

    /// Notes whether a link was used since the last call. Returns its peer; `None`: it ends, or is
    /// being evicted.
    fn count_use(&mut self, key: LinkKey, now: u64) -> Option<PeerKey> {
        let link = self.links.get_mut(key)?;
        if matches!(link.state, State::Ending | State::Lingering) || link.closing != Closing::No {
            return None;
        }
        let peer = self.peers.get(link.peer)?;
        let numbers = Some((peer.next, peer.expected, peer.executed));
        if link.numbers != numbers {
            (link.numbers, link.used) = (numbers, now);
        }
        Some(link.peer)
    }

    /// Asks the peer, on the out-link, whether the links to it can be ended. `false`: they are in
    /// use.
    pub fn evict(&mut self, peer: PeerKey, io: &mut I) -> bool {
        let key = self.resolve(peer);
        let Some(out) = self.open_link(key).filter(|_| self.is_idle(key)) else {
            return false;
        };
        if !self.post_close(key, out, Close::Ask, io) {
            return false;
        }
        io.down(key, out);
        self.begin_closing(key, &[out], Closing::Asked);
        true
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
            (peer.closing, peer.close_at) = (true, Some(self.now + SECOND));
        }
        self.set_timer(key);
    }

    /// Whether nothing is under way to a peer, and each link to it is up.
    fn is_idle(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let up = |link: LinkKey| self.links.get(link).is_some_and(Link::is_open);
        let links = || [peer.own, peer.accepted].into_iter().flatten();
        let linked = links().next().is_some() && links().all(up);
        linked && !peer.has_ops() && !peer.has_report() && !peer.recalled
    }

    /// Posts CLOSE to a link, which may be another one than the out-link. `false`: no room.
    fn post_close(&mut self, key: PeerKey, link: LinkKey, close: Close, io: &mut I) -> bool {
        let Some(header) = self.header(key) else {
            return false;
        };
        let body = Body::Close(close);
        let posted = io.control(link, &Packet { header, body });
        let peer = self.peers.get_mut(key);
        // what another link carries may be lost although the out-link stays
        if let Some(peer) = peer.filter(|peer| posted && peer.out == Some(link)) {
            peer.mark_told();
        }
        posted
    }

    fn has_asked(&self, link: LinkKey) -> bool {
        let link = self.links.get(link);
        link.is_some_and(|link| link.closing == Closing::Asked)
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
        }
        self.settle(io);
    }

    /// CLOSE has arrived.
    pub(super) fn close(&mut self, link: LinkKey, close: Close, io: &mut I) {
        let Some(from @ Link { peer: key, .. }) = self.links.get(link).copied() else {
            return;
        };
        if close == Close::End && self.config.circuits {
            // the last packet of each side
            if let Some(out) = self.open_link(key) {
                self.post_close(key, out, Close::Accept, io);
            }
            return self.close_links(key, io);
        }
        if matches!(from.state, State::Ending | State::Lingering) {
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
        match (close, from.closing) {
            // both ask, each on its out-link, or this side has an answer
            (Close::Ask, Closing::No | Closing::Asked) if asks => self.close_links(key, io),
            (Close::Accept, Closing::Asked) => self.close_links(key, io),
            (Close::Refuse, Closing::Asked) => {
                if let Some(from) = self.links.get_mut(link) {
                    // other links are asked first
                    (from.closing, from.used) = (Closing::No, self.now);
                }
                if let Some(peer) = self.peers.get_mut(key) {
                    (peer.closing, peer.close_at) = (false, None);
                    self.retimed = true;
                }
                if let Some(terms) = from.terms {
                    io.up(key, link, &terms);
                }
                self.pump(key, io);
            }
            (Close::Ask, Closing::No) => {
                if self.is_idle(key) && self.post_close(key, link, Close::Accept, io) {
                    if let Some(out) = self.open_link(key) {
                        io.down(key, out);
                    }
                    let all = [Some(link), out];
                    let all: Vec<_> = all.into_iter().flatten().collect();
                    self.begin_closing(key, &all, Closing::Accepted);
                    if self.config.circuits {
                        // CLOSE was the last packet of each side
                        self.close_links(key, io);
                    }
                    return;
                }
                if let Some(link) = self.links.get_mut(link) {
                    link.refuses = true;
                }
                if let Some(peer) = self.peers.get_mut(key) {
                    peer.refuses = true;
                }
                self.refuse(key, io);
            }
            _ => self.violation(link, io),
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
