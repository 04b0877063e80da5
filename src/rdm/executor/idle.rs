//! What an executor names and keeps of peers that are to be freed. `docs/rdm-memory.md`, "The life
//! of a peer".

use std::collections::HashSet;

use super::Executor;
use crate::rdm::completions::{Entry, Side};
use crate::rdm::core::peer::PeerKey;
use crate::rdm::listening::scoped;
use crate::wire::rdm::Listener;

impl Executor {
    /// Removes the peers from the list that something names, and forgets the others.
    pub(super) fn free_peers(&mut self, peers: &mut Vec<(PeerKey, Option<Listener>)>) {
        if !self.todo.is_empty() {
            // it may name any of them
            return peers.clear();
        }
        if let Some((vector, scope)) = &self.vector {
            // it may be used later, and the peer may use memory of this endpoint meanwhile
            let known = |at: Listener| {
                let addr = at.socket_addr();
                vector.source(&[scoped(addr, *scope), addr])
            };
            peers.retain(|(_, address)| address.and_then(known).is_none());
        }
        let named = self.named_peers();
        peers.retain(|(peer, _)| !named.contains(peer) && !self.pulls.has_waiting(*peer));
        self.rx.retain_unnamed(peers);
        for (peer, address) in peers.iter() {
            self.pulls.forget_peer(*peer);
            self.streams.forget_peer(*peer);
            self.paces.forget_peer(*peer);
            self.rx.forget_peer(*peer);
            if let Some((xrc, address)) = self.xrc.as_mut().zip(*address) {
                xrc.circuits.forget(address);
                xrc.failed.remove(&address);
            }
            self.freed.push(*peer);
        }
    }

    /// The peers of operations and of entries that were not read.
    fn named_peers(&mut self) -> HashSet<PeerKey> {
        let mut named: HashSet<PeerKey> = self.rma.peers().into_iter().collect();
        for key in self.tx.keys_where(|_| true) {
            named.extend(self.tx.get(key).map(|op| op.peer));
        }
        for key in self.rma.ops.keys_where(|_| true) {
            named.extend(self.rma.ops.get(key).map(|op| op.peer));
        }
        for side in [Side::Tx, Side::Rx] {
            for (_, entry) in &*self.completions.of(side) {
                match entry {
                    Entry::Done(_, peer) => named.extend(*peer),
                    Entry::Held(_, peer, origin, _) => {
                        named.extend(*peer);
                        named.insert(origin.peer);
                    }
                    Entry::Part(_, peer, origin, ..) => named.extend([*peer, origin.peer]),
                    Entry::Failed(_) | Entry::FailedPart(..) => {}
                }
            }
        }
        named
    }
}
