//! The peers of a key directory: they have the address of a connection block. Which of them may
//! still use revoked records. `docs/protocol.md`, "Stale keys".
//!
//! A peer's slot has the number of its connection block, so adding and removing a peer takes
//! constant time. Only peers that held keys at a revocation can lag behind it. A peer is listed
//! when it is notified and is removed from the list when it has confirmed, so a search visits only
//! unconfirmed peers. A peer announces that it holds keys by an RDMA write to its block, which the
//! owner's CPU is not notified of: a revocation reads one word of each block to find these peers
//! ([`Directory`](super::Directory)).

use std::sync::{Arc, Weak};

use super::connection_block::BlockPlace;
use super::directory::Peer;
use crate::wire::records::Block;

/// A peer that has the address of its connection block.
pub(super) struct DirectoryPeer {
    pub(super) peer: Weak<dyn Peer>,
    place: BlockPlace,
    /// The revocation count of the last notification; notifications go only to holders of keys.
    notified: u64,
    /// `settled`: the revocation count that the peer has confirmed in its word *settled*. `asked`:
    /// the revocation count when this side last posted a read of that word.
    settled: u64,
    asked: u64,
    /// The revocation count that the peer had been notified of when the owner gave up waiting for
    /// it. Not the peer's word, which the peer can change at any time.
    given_up: Option<u64>,
    /// Index in [`Members::unconfirmed`].
    listed: Option<usize>,
}

impl DirectoryPeer {
    pub(super) fn new(peer: Weak<dyn Peer>, place: BlockPlace) -> Self {
        Self {
            peer,
            place,
            notified: 0,
            settled: 0,
            asked: 0,
            given_up: None,
            listed: None,
        }
    }

    /// Whether the peer may still act on records older than revocation number `wanted`. A peer that
    /// has announced since then that it holds keys has read the table after the revocation.
    pub(super) fn lags(&self, wanted: u64) -> bool {
        let acknowledged = self.place.acknowledged();
        let behind = acknowledged != 0 && acknowledged - 1 < wanted;
        behind && self.notified >= wanted && self.settled < wanted
    }

    /// Whether the peer lags behind no revocation that it was notified of. A later announcement
    /// needs no confirmation: the peer reads the table after it.
    fn has_confirmed(&self) -> bool {
        let acknowledged = self.place.acknowledged();
        acknowledged == 0 || self.settled.max(acknowledged - 1) >= self.notified
    }

    /// Whether the owner has given up waiting for this peer, and the peer has not acknowledged
    /// since then what it had been notified of.
    pub(super) fn is_given_up(&self) -> bool {
        let acknowledged = self.place.acknowledged();
        let behind = |count| acknowledged != 0 && acknowledged - 1 < count;
        self.given_up.is_some_and(behind)
    }

    pub(super) fn is_awaited(&self, wanted: u64) -> bool {
        self.lags(wanted) && !self.is_given_up()
    }

    /// Records the peer's word *settled*, as read by [`Peer::look`].
    pub(super) fn answered(&mut self, settled: u64) {
        let count = match settled {
            Block::HOLDS_NONE => self.asked,
            _ => settled.saturating_sub(Block::SETTLED_COUNT),
        };
        self.settled = self.settled.max(count);
    }

    /// Records that a read of *settled* was posted when the revocation count was `count`.
    pub(super) fn asked(&mut self, count: u64) {
        self.asked = count;
    }

    /// Whether this peer is asked by `peer`.
    pub(super) fn is(&self, peer: &Arc<dyn Peer>) -> bool {
        std::ptr::addr_eq(self.peer.as_ptr(), Arc::as_ptr(peer))
    }

    pub(super) fn give_up(&mut self) {
        self.given_up = Some(self.notified);
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Members {
    /// Indexed by the number of the connection block.
    slots: Vec<Option<DirectoryPeer>>,
    /// Numbers of the peers that were notified of a revocation and have not confirmed it.
    unconfirmed: Vec<usize>,
    /// Peers visited, for tests.
    #[cfg(test)]
    pub(super) visits: usize,
}

impl Members {
    /// Adds the peer of connection block `number`.
    pub(super) fn insert(&mut self, number: usize, member: DirectoryPeer) {
        self.remove(number);
        if self.slots.len() <= number {
            self.slots.resize_with(number + 1, || None);
        }
        self.slots[number] = Some(member);
    }

    /// Replaces what is asked about the peer of connection block `number`, if there is one.
    pub(super) fn succeed(&mut self, number: usize, peer: Weak<dyn Peer>) {
        if let Some(member) = self.slots.get_mut(number).and_then(Option::as_mut) {
            member.peer = peer;
        }
    }

    /// Removes the peer of connection block `number`. Returns whether it had not confirmed.
    pub(super) fn remove(&mut self, number: usize) -> bool {
        let listed = self.slots.get_mut(number).and_then(Option::take);
        match listed.and_then(|member| member.listed) {
            Some(at) => {
                self.unlist(at);
                true
            }
            None => false,
        }
    }

    /// Removes an entry of the list; the last entry moves to its index.
    fn unlist(&mut self, at: usize) {
        let number = self.unconfirmed.swap_remove(at);
        if let Some(member) = self.slots[number].as_mut() {
            member.listed = None;
        }
        if let Some(&moved) = self.unconfirmed.get(at)
            && let Some(member) = self.slots[moved].as_mut()
        {
            member.listed = Some(at);
        }
    }

    /// Notifies the peer of block `number`, which holds keys, that the revocation count is `count`.
    pub(super) fn notify(&mut self, number: usize, count: u64) {
        self.visit();
        let Some(member) = self.slots.get_mut(number).and_then(Option::as_mut) else {
            return;
        };
        let Some(peer) = member.peer.upgrade() else {
            self.remove(number);
            return;
        };
        member.notified = count;
        if member.listed.is_none() {
            member.listed = Some(self.unconfirmed.len());
            self.unconfirmed.push(number);
        }
        peer.notify_revocations();
    }

    /// Whether any unconfirmed peer meets a condition. Removes the peers from the list that it
    /// finds to have confirmed.
    pub(super) fn any_unconfirmed(&mut self, condition: impl Fn(&DirectoryPeer) -> bool) -> bool {
        let mut at = 0;
        while let Some(&number) = self.unconfirmed.get(at) {
            self.visit();
            match &self.slots[number] {
                Some(member) if !member.has_confirmed() => {
                    if condition(member) {
                        return true;
                    }
                    at += 1;
                }
                _ => self.unlist(at),
            }
        }
        false
    }

    /// Removes the peers that have not confirmed and that meet a condition.
    pub(super) fn remove_unconfirmed(&mut self, mut condition: impl FnMut(&DirectoryPeer) -> bool) {
        for at in (0..self.unconfirmed.len()).rev() {
            self.visit();
            let number = self.unconfirmed[at];
            if self.slots[number].as_ref().is_some_and(&mut condition) {
                self.remove(number);
            }
        }
    }

    /// Iterates over all peers, with the numbers of their connection blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &DirectoryPeer)> {
        let all = self.slots.iter().enumerate();
        all.filter_map(|(number, slot)| Some((number, slot.as_ref()?)))
    }

    /// The peer of connection block `number`.
    pub(super) fn get_mut(&mut self, number: usize) -> Option<&mut DirectoryPeer> {
        self.slots.get_mut(number)?.as_mut()
    }

    /// Iterates over all peers.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut DirectoryPeer> {
        self.slots.iter_mut().flatten()
    }

    #[inline]
    fn visit(&mut self) {
        #[cfg(test)]
        {
            self.visits += 1;
        }
    }
}
