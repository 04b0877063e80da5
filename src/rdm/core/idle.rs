//! Peers without links, and when they are freed. `docs/rdm-memory.md`, "The life of a peer".

use std::collections::{HashMap, HashSet};

use super::link::{Closing, Link};
use super::peer::{Fate, Peer, PeerKey, When};
use super::{Core, Io, Origin};
use crate::wire::rdm::{Credit, Listener};

/// The shortest time between two examinations of the list, in ns.
const PERIOD: u64 = 500_000_000;

/// The time after which a peer is examined again that was due but is in use, in ns: at least this,
/// and as long as it has had no link.
const AGAIN: u64 = 5_000_000_000;

/// How long the out-link of a peer has to be broken until the peer is dialled to find out whether
/// its endpoint has ended, in ns. A peer that has something to send dials before.
const ASK: u64 = 1_000_000_000;

impl<I: Io> Core<I> {
    /// A `fi_addr_t` names the peer, until [`Self::unkeep`]: it is not freed.
    pub fn keep(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.kept += 1;
        }
        self.name_strangers(self.resolve(key));
    }

    /// A `fi_addr_t` that named the peer was removed.
    pub fn unkeep(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key) {
            debug_assert!(peer.kept > 0);
            peer.kept = peer.kept.saturating_sub(1);
        }
        self.list_idle(key);
    }

    /// Lists a peer that may have no link any more.
    pub(super) fn list_idle(&mut self, key: PeerKey) {
        let now = self.now;
        if self.links_of(key).next().is_some() {
            return;
        }
        let listed = |peer: &&mut Peer| peer.kept == 0 && peer.aliases == 0 && !peer.itself;
        let Some(peer) = self.peers.get_mut(key).filter(listed) else {
            return;
        };
        if std::mem::replace(&mut peer.idle_since, When::at(now)) == When::NONE {
            self.idle.push(key);
        }
        if self.free_at.is_none_or(|time| time > now + PERIOD) {
            self.free_at = Some(now + PERIOD);
            self.retimed = true;
        }
    }

    /// A link is gone. If it was the out-link of a session and has broken, the process of the peer
    /// may have ended.
    pub(super) fn note_break(&mut self, ended: &Link) {
        if let Some(peer) = self.peers.get_mut(ended.peer)
            && ended.was_out
            && ended.closing == Closing::No
            && peer.begun
            && !peer.ends
            && !peer.leaves
        {
            peer.fate = Fate::Broken;
        }
    }

    /// The dial that asks whether the endpoint of a peer has ended is over.
    pub(super) fn end_question(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key)
            && let Fate::Asked(since) = peer.fate
        {
            peer.fate = Fate::Open;
            // the link that was dialled is none
            if peer.idle_since != When::NONE {
                peer.idle_since = When::at(since);
            }
        }
    }

    /// Dials peers whose out-links have broken, to find out whether their endpoints have ended. A
    /// refused dial shows that, and frees the peer; without an answer nothing changes. Takes no
    /// place from others, and at most half of the dials. Returns whether some are left.
    fn ask(&mut self, broken: Vec<PeerKey>, io: &mut I) -> bool {
        let most = (self.config.dials / 2).max(1);
        let mut left = false;
        for key in broken {
            if self.dials >= most || !self.has_spare_place(key, io) {
                left = true;
                continue;
            }
            let Some(peer) = self.peers.get_mut(key) else {
                continue;
            };
            peer.fate = Fate::Asked(peer.idle_since.get().unwrap_or(self.now));
            self.advance(key, io);
        }
        left
    }

    /// When a peer is freed unless it is in use; `None`: it has a link, a `fi_addr_t` or an alias.
    fn idle_until(&self, key: PeerKey) -> Option<u64> {
        let peer = self.peers.get(key)?;
        let since = peer.idle_since.get()?;
        let named = peer.kept != 0 || peer.aliases != 0 || peer.itself;
        if named || self.links_of(key).next().is_some() {
            return None;
        }
        let (session, token) = self.config.idle;
        let time = if peer.alias.is_some() || peer.has_session() && !peer.leaves {
            session
        } else if peer.gives.is_some() && !peer.leaves {
            token
        } else {
            0
        };
        Some(since.saturating_add(time))
    }

    /// The peers that lists of the core name.
    fn listed_peers(&self) -> HashSet<PeerKey> {
        let mut listed: HashSet<PeerKey> = self.held.iter().map(|it| it.peer).collect();
        listed.extend(&self.queue);
        listed.extend(&self.reports);
        listed.extend(&self.timers);
        listed.extend(&self.waiters);
        listed.extend(&self.changed);
        listed.extend(self.turn);
        let links = std::iter::successors(self.links.at_or_behind(0), |key| self.links.after(*key));
        listed.extend(links.filter_map(|key| Some(self.links.get(key)?.peer)));
        listed
    }

    /// Frees the peers that were without links for long enough and that nothing names, if it is
    /// time to examine them.
    pub(super) fn free_idle(&mut self, io: &mut I) {
        if self.free_at.is_none_or(|time| time > self.now) {
            return;
        }
        let now = self.now;
        let listed = self.listed_peers();
        let mut next = u64::MAX;
        let mut free = Vec::new();
        let mut again = HashMap::new();
        let mut broken = Vec::new();
        let mut idle = std::mem::take(&mut self.idle);
        idle.retain(|key| {
            let until = self.idle_until(*key);
            let Some(peer) = self.peers.get_mut(*key) else {
                return false;
            };
            let Some(until) = until else {
                peer.idle_since = When::NONE;
                return false;
            };
            let since = peer.idle_since.get().unwrap_or(now);
            if until > now {
                next = next.min(until);
                if peer.fate == Fate::Broken && peer.address.is_some() && peer.alias.is_none() {
                    match since + ASK {
                        at if at <= now => broken.push(*key),
                        at => next = next.min(at),
                    }
                }
                return true;
            }
            again.insert(
                *key,
                now.saturating_add(AGAIN.max(now.saturating_sub(since))),
            );
            if !peer.is_in_use() && !listed.contains(key) {
                free.push((*key, peer.address));
            }
            true
        });
        for key in again.keys() {
            // nothing is posted so long after HELLO
            self.close_orphans(*key, None, io);
        }
        if !free.is_empty() {
            io.free(&mut free);
        }
        for (key, _) in &free {
            again.remove(key);
        }
        next = again.into_values().fold(next, u64::min);
        self.idle = idle;
        self.free_at = (next != u64::MAX).then(|| next.max(now + PERIOD));
        self.retimed = true;
        self.free_peers(free.iter().map(|it| it.0));
        if !broken.is_empty() && !self.left {
            if self.ask(broken, io) {
                let at = now + PERIOD;
                self.free_at = Some(self.free_at.map_or(at, |time| time.min(at)));
            }
            self.advance_changed(io);
        }
    }

    /// Frees peers. What an alias has passes to its peer.
    fn free_peers(&mut self, keys: impl Iterator<Item = PeerKey>) {
        let mut freed: HashMap<PeerKey, Option<PeerKey>> = HashMap::new();
        for key in keys {
            self.forget_further(key);
            self.close_window(key);
            if let Some(peer) = self.peers.get(key) {
                // no message names it
                let (base, lent) = peer.left().held();
                let origin = Origin {
                    peer: key,
                    session: peer.session,
                };
                self.give_back_left(origin, Credit::new(base + lent, 0));
            }
            let Some(peer) = self.peers.remove(key) else {
                continue;
            };
            self.others.remove(&key);
            if let Some(id) = peer.id
                && self.ids.get(&id) == Some(&key)
            {
                self.ids.remove(&id);
            }
            if let Some(of) = peer.alias
                && let Some(peer) = self.peers.get_mut(of)
            {
                peer.aliases -= 1;
                self.list_idle(of);
            }
            if (peer.session.wrapping_sub(self.session) as i32) >= 0 {
                self.session = peer.session.wrapping_add(1);
            }
            freed.insert(key, peer.alias);
        }
        if freed.is_empty() {
            return;
        }
        self.idle.retain(|key| !freed.contains_key(key));
        let pass_on = |at: &mut PeerKey| match freed.get(at) {
            None => true,
            Some(None) => false,
            Some(Some(of)) => {
                *at = *of;
                true
            }
        };
        self.addresses.retain(|_, at| pass_on(at));
        self.names += 1;
        self.secrets.retain(|_, at| pass_on(at));
    }

    /// A peer has become an alias of another one, which has its addresses now: `own`, and those of
    /// its aliases.
    pub(super) fn move_addresses(&mut self, (key, own): (PeerKey, Option<Listener>), of: PeerKey) {
        let others = self.others.remove(&key).unwrap_or_default();
        if own.is_some() || !others.is_empty() {
            let all = self.others.entry(of).or_default();
            for address in own.into_iter().chain(others) {
                if !all.contains(&address) {
                    all.push(address);
                }
            }
        }
    }

    /// A peer has become an alias of another one: so do its own aliases, and no chain arises.
    pub(super) fn move_aliases(&mut self, key: PeerKey, of: PeerKey) {
        let count = self.peers.get_mut(key);
        let count = count.map_or(0, |peer| std::mem::take(&mut peer.aliases));
        if count == 0 {
            return;
        }
        for alias in self.peers.keys_where(|peer| peer.alias == Some(key)) {
            if let Some(alias) = self.peers.get_mut(alias) {
                alias.alias = Some(of);
            }
        }
        if let Some(of) = self.peers.get_mut(of) {
            of.aliases += count;
            of.aliased = true;
        }
    }
}

impl Peer {
    /// Whether this side or the peer may have a session of the two.
    fn has_session(&self) -> bool {
        self.begun || self.ends || self.former.is_some()
    }

    /// Whether the core itself has something to do for the peer.
    fn is_in_use(&self) -> bool {
        self.has_ops() || self.probe || self.is_asked() || self.meant.is_some()
    }

    /// Whether the peer is dialled to find out whether its endpoint has ended.
    pub(super) const fn is_asked(&self) -> bool {
        matches!(self.fate, Fate::Asked(_))
    }

    /// As [`Self::is_asked`], and nothing else needs the dial.
    pub(super) fn is_only_asked(&self) -> bool {
        self.is_asked() && !self.has_ops() && !self.probe
    }
}
