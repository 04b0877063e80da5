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

const MS: u64 = 1_000_000;
/// How long links are searched that are idle, before one that is in use is evicted; a link is used
/// at least so long. In ns.
const CROWDED: u64 = 250 * MS;
/// How long the requests on a link that is in use may take to complete, and the interval at which
/// this is examined.
const DRAIN: u64 = 500 * MS;
const LOOK: u64 = MS;
/// How long neither side dials after the eviction of a link that was in use: longer than the
/// longest interval between the dials of the peer that needs the place.
pub(super) const YIELD: u64 = 300 * MS;

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
    /// call counts as used now, so nothing is recorded when packets are posted or arrive. If no
    /// link is idle for a while, begins to evict the one that was the out-link for longest.
    pub(super) fn make_room(&mut self, io: &mut I) {
        if self.config.circuits {
            return self.evict_node(io);
        }
        let now = self.now;
        let mut under_way = 0;
        let mut longest: Option<(u64, PeerKey)> = None;
        let mut oldest: Option<(u64, PeerKey)> = None;
        let mut next = self.links.at_or_behind(0);
        while let Some(key) = next {
            next = self.links.after(key);
            let Some(peer) = self.count_use(key, now) else {
                let link = self.links.get(key);
                under_way += usize::from(link.is_some_and(|it| it.state != State::Lingering));
                continue;
            };
            let times = self.links.get(key).map(|link| (link.used, link.since));
            let (used, since) = times.unwrap_or((now, now));
            if self.open_link(peer) != Some(key) {
                continue;
            }
            if !self.is_idle(peer) {
                if oldest.is_none_or(|(oldest, _)| since < oldest) {
                    oldest = Some((since, peer));
                }
            } else if longest.is_none_or(|(longest, _)| used < longest) {
                longest = Some((used, peer));
            }
        }
        if under_way >= UNDER_WAY {
            return;
        }
        if let Some((_, peer)) = longest {
            self.crowded = None;
            self.evict(peer, io);
        } else if let Some((since, peer)) = oldest {
            let row = self.crowded.filter(|(_, last)| now - last < SECOND);
            let first = row.map_or(now, |(first, _)| first);
            self.crowded = Some((first, now));
            if now - first >= CROWDED && now - since >= CROWDED {
                self.evict_used(peer, io);
            }
        }
    }

    /// Begins to evict the links of a peer, which may be in use: posts nothing more, and asks when
    /// the requests on the out-link have completed. `false`: a link of the peer is not up.
    pub fn evict_used(&mut self, peer: PeerKey, io: &mut I) -> bool {
        let key = self.resolve(peer);
        let out = self.open_link(key).filter(|_| self.may_yield(key));
        if let Some(out) = out {
            self.begin_drain(key, out, Closing::Draining, io);
        }
        out.is_some()
    }

    /// Whether the links of a peer can be evicted although they are in use. A link on a circuit
    /// cannot.
    fn may_yield(&self, key: PeerKey) -> bool {
        !self.config.circuits && self.all_up(key)
    }

    /// Nothing is posted to the out-link of a peer any more; CLOSE follows.
    fn begin_drain(&mut self, key: PeerKey, out: LinkKey, closing: Closing, io: &mut I) {
        if let Some(link) = self.links.get_mut(out) {
            if link.closing == Closing::No {
                io.down(key, out);
            }
            link.closing = closing;
        }
        if let Some(peer) = self.peers.get_mut(key) {
            peer.closing = true;
            peer.drain_by = self.now + DRAIN;
        }
        self.drain(key, io);
    }

    /// Posts the CLOSE of a link that is being drained, when it is due. `false`: none is.
    pub(super) fn drain(&mut self, key: PeerKey, io: &mut I) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let Some((out, link)) = peer.out.and_then(|out| Some((out, *self.links.get(out)?))) else {
            return false;
        };
        let (on, close, closing) = match link.closing {
            Closing::Draining => (out, Close::Yield, Closing::Asked),
            Closing::Yielding => (
                peer.asked_on.unwrap_or(out),
                Close::Accept,
                Closing::Accepted,
            ),
            _ => return false,
        };
        let over = self.now >= peer.drain_by;
        if io.is_quiet(out) && self.post_close(key, on, close, io) {
            for link in [on, out] {
                if let Some(link) = self.links.get_mut(link) {
                    link.yields = true;
                }
            }
            self.begin_closing(key, &[on, out], closing);
        } else if over {
            self.end_drain(key, out, io);
        } else {
            if let Some(peer) = self.peers.get_mut(key) {
                peer.close_at = Some(self.now + LOOK);
            }
            self.set_timer(key);
        }
        true
    }

    /// The requests on a link that is being drained take too long: it is used again.
    fn end_drain(&mut self, key: PeerKey, out: LinkKey, io: &mut I) {
        let Some(link) = self.links.get_mut(out) else {
            return;
        };
        let yields = link.closing == Closing::Yielding;
        // other links are tried first
        (link.closing, link.since) = (Closing::No, self.now);
        let terms = link.terms;
        let asked_on = self.peers.get_mut(key).and_then(|peer| {
            (peer.closing, peer.close_at) = (false, None);
            peer.asked_on.take()
        });
        self.retimed = true;
        if let Some(on) = asked_on.filter(|_| yields) {
            self.begin_refuse(key, on, io);
        }
        if let Some(terms) = terms {
            io.up(key, out, &terms);
        }
        self.pump(key, io);
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
        self.all_up(key) && !peer.has_ops() && !peer.has_report() && !peer.recalled
    }

    /// Whether a peer has links, and each of them is up.
    fn all_up(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let up = |link: LinkKey| self.links.get(link).is_some_and(Link::is_open);
        let links = || [peer.own, peer.accepted].into_iter().flatten();
        links().next().is_some() && links().all(up)
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
        let drains = out.and_then(|out| self.links.get(out));
        let drains = drains.is_some_and(|out| out.closing == Closing::Draining);
        match (close, from.closing) {
            // both ask, each on its out-link, or this side has an answer
            (Close::Ask | Close::Yield, Closing::No | Closing::Asked) if asks => {
                self.close_links(key, io);
            }
            // this side would have asked next
            (Close::Ask | Close::Yield, Closing::No | Closing::Draining) if drains => {
                if let Some(out) = out {
                    self.yield_to(key, link, out, io);
                }
            }
            (Close::Accept, Closing::Asked) => self.close_links(key, io),
            (Close::Refuse, Closing::Asked) => {
                if let Some(from) = self.links.get_mut(link) {
                    // other links are asked first
                    (from.closing, from.yields) = (Closing::No, false);
                    (from.used, from.since) = (self.now, self.now);
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
                self.begin_refuse(key, link, io);
            }
            (Close::Yield, Closing::No) => match self.open_link(key) {
                Some(out) if self.may_yield(key) => self.yield_to(key, link, out, io),
                _ => self.begin_refuse(key, link, io),
            },
            _ => self.violation(link, io),
        }
    }

    /// A peer asks on a link: answers when the requests on the out-link have completed.
    fn yield_to(&mut self, key: PeerKey, link: LinkKey, out: LinkKey, io: &mut I) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.asked_on = Some(link);
        }
        self.begin_drain(key, out, Closing::Yielding, io);
    }

    /// CLOSE (refuse) is due on a link.
    fn begin_refuse(&mut self, key: PeerKey, link: LinkKey, io: &mut I) {
        if let Some(link) = self.links.get_mut(link) {
            link.refuses = true;
        }
        if let Some(peer) = self.peers.get_mut(key) {
            peer.refuses = true;
        }
        self.refuse(key, io);
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
