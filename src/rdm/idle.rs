//! Peers without links, and when they are freed. `docs/rdm.md`, "The life of a peer".

use std::collections::{HashMap, HashSet};

use super::core::{Core, Io};
use super::peer::{Peer, PeerKey};

/// The shortest time between two examinations of the list, in ns.
const PERIOD: u64 = 500_000_000;

/// The time after which a peer is examined again that was due but is in use, in ns: at least this,
/// and as long as it has had no link.
const AGAIN: u64 = 5_000_000_000;

impl<I: Io> Core<I> {
    /// A `fi_addr_t` names the peer, until [`Self::unkeep`]: it is not freed.
    pub fn keep(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key) {
            peer.kept += 1;
        }
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
        if peer.idle_since.replace(now).is_none() {
            self.idle.push(key);
        }
        if self.free_at.is_none_or(|time| time > now + PERIOD) {
            self.free_at = Some(now + PERIOD);
            self.retimed = true;
        }
    }

    /// When a peer is freed unless it is in use; `None`: it has a link, a `fi_addr_t` or an alias.
    fn idle_until(&self, key: PeerKey) -> Option<u64> {
        let peer = self.peers.get(key)?;
        let since = peer.idle_since?;
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
        let mut listed: HashSet<PeerKey> = self.held.iter().map(|it| it.0).collect();
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
        let mut idle = std::mem::take(&mut self.idle);
        idle.retain(|key| {
            let until = self.idle_until(*key);
            let Some(peer) = self.peers.get_mut(*key) else {
                return false;
            };
            let Some(until) = until else {
                peer.idle_since = None;
                return false;
            };
            if until > now {
                next = next.min(until);
                return true;
            }
            let since = peer.idle_since.unwrap_or(now);
            again.insert(*key, now + AGAIN.max(now.saturating_sub(since)));
            if !peer.is_in_use() && !listed.contains(key) {
                free.push((*key, peer.address));
            }
            true
        });
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
    }

    /// Frees peers. What an alias has passes to its peer.
    fn free_peers(&mut self, keys: impl Iterator<Item = PeerKey>) {
        let mut freed: HashMap<PeerKey, Option<PeerKey>> = HashMap::new();
        for key in keys {
            let Some(peer) = self.peers.remove(key) else {
                continue;
            };
            if let Some(id) = peer.id
                && self.ids.get(&id) == Some(&key)
            {
                self.ids.remove(&id);
            }
            if let Some(inbound) = peer.inbound {
                inbound.release(&mut self.pool);
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
        self.secrets.retain(|_, at| pass_on(at));
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
        self.has_ops() || self.probe || self.meant.is_some()
    }
}
