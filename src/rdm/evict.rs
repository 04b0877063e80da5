//! The choice of the link that is evicted when an endpoint has no place for a further one.
//! `docs/protocol-rdm.md`, "Eviction".

use super::core::{Core, Io};
use super::link::{Closing, LinkKey, State};
use super::peer::PeerKey;

/// Evictions and ends of links under way, beyond which no further eviction begins.
const UNDER_WAY: usize = 8;

impl<I: Io> Core<I> {
    /// Begins to evict the link that was idle for longest. A link that was used since the previous
    /// call counts as used now, so nothing is recorded when packets are posted or arrive.
    pub(super) fn make_room(&mut self, io: &mut I) {
        let now = self.now;
        let mut under_way = 0;
        let mut longest: Option<(u64, PeerKey)> = None;
        let mut next = self.links.at_or_behind(0);
        while let Some(key) = next {
            next = self.links.after(key);
            let Some(peer) = self.count_use(key, now) else {
                under_way += 1;
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

    /// Notes whether a link was used since the last call. Returns its peer; `None`: it ends, or is
    /// being evicted.
    fn count_use(&mut self, key: LinkKey, now: u64) -> Option<PeerKey> {
        let link = self.links.get_mut(key)?;
        if link.state == State::Ending || link.closing != Closing::No {
            return None;
        }
        let peer = self.peers.get(link.peer)?;
        let numbers = Some((peer.next, peer.expected));
        if link.numbers != numbers {
            (link.numbers, link.used) = (numbers, now);
        }
        Some(link.peer)
    }
}
