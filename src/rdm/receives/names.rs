//! The peers that receives and messages name. They are not freed (`docs/rdm-memory.md`, "The life
//! of a peer").

use std::collections::HashSet;

use super::{Home, PeerKey, Receives, Store, index_of};

/// Number of indices of a shared receive context beyond which no peer of its endpoints is freed.
/// An index has 24 bits and is not reused, and each endpoint can have 2^20 peers at a time.
const INDICES: usize = 1 << 23;

impl Store {
    /// The places in matching that posted receives name.
    fn named(&self) -> HashSet<u32> {
        let both = [&self.tagged, &self.untagged].into_iter();
        both.flat_map(|messages| messages.named())
            .map(|peer| peer.0)
            .collect()
    }

    /// The peers of stored messages of an endpoint.
    fn senders(&self, owner: u32) -> HashSet<PeerKey> {
        let mut senders = HashSet::new();
        for key in self.stored.keys_where(|stored| stored.owner == owner) {
            senders.extend(self.stored.get(key).map(|stored| stored.envelope.peer));
        }
        senders
    }
}

impl Receives {
    /// Removes the peers from the list that posted receives, stored messages or messages that are
    /// arriving name.
    pub(in crate::rdm) fn retain_unnamed<T>(&mut self, peers: &mut Vec<(PeerKey, T)>) {
        let mut arriving = HashSet::new();
        for key in self.arrivals.keys_where(|_| true) {
            if let Some(arrival) = self.arrivals.get(key) {
                arriving.extend([arrival.envelope.peer, arrival.origin.peer]);
            }
        }
        peers.retain(|(peer, _)| !arriving.contains(peer));
        match &mut self.home {
            Home::Own(store) => {
                let (named, senders) = (store.named(), store.senders(0));
                peers.retain(|(peer, _)| {
                    !senders.contains(peer) && !named.contains(&index_of(*peer).0)
                });
            }
            Home::Shared(member) => {
                let state = &mut *member.shared.lock();
                let transient = !state.pending.is_empty() || !state.returning.is_empty();
                if transient || state.indices.len() >= INDICES {
                    return peers.clear();
                }
                let named: HashSet<u32> = state.store.named();
                let named: HashSet<u32> = named
                    .into_iter()
                    .map(|index| state.find(crate::PeerIndex(index)).0)
                    .collect();
                let senders = state.store.senders(member.owner);
                peers.retain(|(peer, _)| {
                    let index = match member.indices.get(peer.place()) {
                        Some(Some((known, index))) if known == peer => Some(state.find(*index).0),
                        _ => None,
                    };
                    !senders.contains(peer) && index.is_none_or(|index| !named.contains(&index))
                });
            }
        }
    }

    /// A peer was freed, which nothing names.
    pub(in crate::rdm) fn forget_peer(&mut self, peer: PeerKey) {
        if let Home::Shared(member) = &mut self.home
            && let Some(place) = member.indices.get_mut(peer.place())
        {
            *place = None;
        }
    }
}
