//! Which endpoint a peer is: addresses of one endpoint become one peer, and a restarted process is
//! another endpoint at the same address. `docs/protocol-rdm.md`, "Several addresses of one
//! endpoint".

use super::peer::{Dial, PeerKey};
use super::recover::Unposted;
use super::{Core, Io};
use crate::errno::FiErrno;
use crate::wire::rdm::{EndpointId, Listener, Reply};

/// Further addresses of one peer: as many as HELLO has.
const FURTHER: usize = 8;

impl<I: Io> Core<I> {
    /// The acceptor knows this endpoint by another address, or is this endpoint.
    pub(super) fn known(&mut self, key: PeerKey, id: EndpointId, io: &mut I) {
        let new = self.is_new(key);
        if id == self.config.id {
            if new && let Some(peer) = self.peers.get_mut(key) {
                peer.itself = true;
                peer.probe = false;
                peer.dial = Dial {
                    queued: peer.dial.queued,
                    ..Dial::default()
                };
                io.alias(key, None);
                self.unite_own(key, io);
            }
            return;
        }
        if let Some(of) = self.ids.get(&id).copied()
            && of != key
            && new
        {
            self.merge(key, of, io);
        }
    }

    /// Makes a peer that is this endpoint itself an alias of the first one: messages to one address
    /// of the endpoint match receives from another one.
    pub fn unite_own(&mut self, key: PeerKey, io: &mut I) {
        let own = *self.own.get_or_insert(key);
        if own != self.resolve(key) {
            self.merge(key, own, io);
        }
    }

    /// Whether a peer is an address whose endpoint is not certain: it is not known, or nothing has
    /// been heard of it since its request or since this side has ended the session, and it may have
    /// restarted.
    pub(super) fn is_new(&self, key: PeerKey) -> bool {
        let held = || self.held.iter().any(|it| it.peer == key);
        let peer = self.peers.get(key);
        peer.is_some_and(|peer| match peer.id {
            None => !peer.itself,
            Some(_) => !peer.begun && peer.accepted.is_none() && !held(),
        })
    }

    /// Passes the operations to an address of this endpoint to the caller.
    pub(super) fn loop_back(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        for list in [&mut peer.answers, &mut peer.parts, &mut peer.waiting] {
            while let Some(op) = list.pop(&self.ops) {
                if let Some(entry) = self.ops.remove(op) {
                    io.loop_back(entry.op);
                }
            }
        }
    }

    /// Makes `key`, a peer without session and links, an alias of `of`.
    pub(in crate::rdm) fn merge(&mut self, key: PeerKey, of: PeerKey, io: &mut I) {
        let into = self.peers.get(of).and_then(|of| of.id);
        self.names += 1;
        self.forget_further(key);
        let meant = self.peers.get_mut(key).and_then(|it| it.meant.take());
        if meant.is_some() && meant != into {
            self.fail_ops(key, FiErrno::ECONNABORTED, Unposted::Failed, io);
        }
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        (peer.alias, peer.probe) = (Some(of), false);
        let lingering = peer.lingering;
        let former = peer.former.take();
        if let Some(id) = peer.id.take()
            && self.ids.get(&id) == Some(&key)
        {
            self.ids.remove(&id);
        }
        (peer.dial, peer.unattached) = (Dial::default(), Default::default());
        let holds = std::mem::take(&mut peer.holds);
        let address = peer
            .address
            .filter(|address| self.addresses.get(address) == Some(&key));
        let (mut answers, mut parts) = (peer.answers, peer.parts);
        let mut waiting = peer.waiting;
        (peer.answers, peer.parts, peer.waiting) = Default::default();
        if let Some(into) = self.peers.get_mut(of) {
            into.answers.append(&mut self.ops, &mut answers);
            into.parts.append(&mut self.ops, &mut parts);
            // one with a fence waits for all earlier ones, to either address
            let later = |op, than| io.is_later(op, than);
            into.waiting.merge(&mut self.ops, &mut waiting, later);
            into.holds += holds;
            if !into.begun {
                into.former = into.former.or(former);
            }
            into.aliases += 1;
            into.aliased = true;
        }
        self.move_addresses((key, address), of);
        self.move_aliases(key, of);
        // by this address, or by one that was an alias of it
        if self.is_named(of) {
            self.name_strangers(of);
        }
        io.alias(key, Some(of));
        for link in lingering.into_iter().flatten() {
            // that of another endpoint, which had the address
            self.silence(link, io);
        }
        self.list_idle(key);
        self.changed.push(of);
    }

    /// Another endpoint states the address of this peer: perhaps a restarted process. Only a dial
    /// shows which endpoint has the address.
    pub(super) fn doubt(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key)
            && !peer.itself
        {
            peer.probe = true;
            peer.doubts = peer.doubts.wrapping_add(1);
            self.names += 1;
            self.changed.push(key);
        }
    }

    /// The further addresses of a peer, which HELLO states, replace those that it has stated
    /// before. Any peer can state any address, so no message goes to it for that. The address is
    /// dialled as soon as the application uses it, and an endpoint that is there proves that it is
    /// this peer (KNOWN).
    pub(in crate::rdm) fn state_further(&mut self, key: PeerKey, addresses: &[Listener]) {
        let before = self.drop_further(key);
        let (mut further, mut others) = (Vec::new(), Vec::new());
        for address in addresses.iter().copied() {
            let at = self.addresses.get(&address);
            let at = at.map(|at| self.resolve(*at));
            if at == Some(key) || self.is_own(address) {
                continue;
            }
            if further.len() < FURTHER && !further.contains(&address) {
                further.push(address);
            }
            others.extend(at);
        }
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        for address in &further {
            *self.further.entry(*address).or_default() += 1;
        }
        self.names += u64::from(*further != *before);
        peer.further = further.into();
        for other in others {
            self.doubt(other);
        }
    }

    /// A peer states its further addresses no more.
    pub(super) fn forget_further(&mut self, key: PeerKey) {
        let dropped = self.drop_further(key);
        self.names += u64::from(!dropped.is_empty());
    }

    /// Takes the further addresses from a peer.
    fn drop_further(&mut self, key: PeerKey) -> Box<[Listener]> {
        let peer = self.peers.get_mut(key);
        let addresses = peer.map(|peer| std::mem::take(&mut peer.further));
        let addresses = addresses.unwrap_or_default();
        for address in &addresses {
            if let Some(count) = self.further.get_mut(address) {
                *count -= 1;
                if *count == 0 {
                    self.further.remove(address);
                }
            }
        }
        addresses
    }

    /// The endpoint of a peer is known: the one with this id.
    pub(super) fn name(&mut self, key: PeerKey, id: EndpointId, io: &mut I) {
        let mut former = [None; 2];
        let known = self.peers.get(key).and_then(|peer| peer.id);
        if known.is_some_and(|known| known != id) {
            self.forget_further(key);
        }
        if let Some(peer) = self.peers.get_mut(key) {
            if let Some(old) = peer.id.replace(id).filter(|old| *old != id) {
                // epochs and tokens are those of one endpoint
                (peer.newest, peer.void, peer.former) = (None, None, None);
                peer.leaves = false;
                former = peer.lingering;
                if self.ids.get(&old) == Some(&key) {
                    self.ids.remove(&old);
                }
            }
            self.ids.insert(id, key);
            if peer.meant.take().is_some_and(|meant| meant != id) {
                self.fail_ops(key, FiErrno::ECONNABORTED, Unposted::Failed, io);
            }
        }
        for link in former.into_iter().flatten() {
            // that of the endpoint which had the address
            self.silence(link, io);
        }
    }

    /// A peer has accepted a request that shows no session, by another address: when it did it had
    /// none. If this side still has one, and no link, the peer has ended that one.
    pub(super) fn accepted_anew(&mut self, key: PeerKey, reply: &Reply, io: &mut I) {
        let peer = self.peers.get(key);
        let other = peer.is_some_and(|peer| {
            // the token of a session that has begun since is the one of this reply
            peer.begun && !peer.ends && peer.shows != Some(reply.gives)
        });
        if other && self.links_of(key).next().is_none() {
            self.replaced(key, reply.id, io);
        }
    }
}
