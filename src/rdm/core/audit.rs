//! What tests read of an endpoint's state, and what always holds in it.

use super::credit::LeftCredit;
use super::link;
use super::*;
use crate::wire::rdm::Grant;

/// What a test compares between two endpoints.
#[derive(Debug)]
pub(in crate::rdm) struct Audit {
    pub(in crate::rdm) id: Option<EndpointId>,
    /// It has an out-link.
    pub(in crate::rdm) up: bool,
    pub(in crate::rdm) next: Number,
    pub(in crate::rdm) spent: Credit,
    pub(in crate::rdm) expected: Number,
    pub(in crate::rdm) used: Credit,
    pub(in crate::rdm) stored: Credit,
    /// The newest grant of the peer, and that of this side. `None`: a further one is due.
    pub(in crate::rdm) grant: Grant,
    pub(in crate::rdm) granted: Option<Grant>,
}

impl<I: Io> Core<I> {
    pub(in crate::rdm) fn peer_keys(&self) -> impl Iterator<Item = PeerKey> + '_ {
        let first = self.peers.at_or_behind(0);
        let all = std::iter::successors(first, |key| self.peers.after(*key));
        all.filter(|key| self.resolve(*key) == *key)
    }

    /// The number of peers and of the entries that lead to them, without the peers that are this
    /// endpoint itself.
    pub(in crate::rdm) fn unfreed(&self) -> usize {
        let peers = self.peers.keys_where(|peer| !peer.itself).len();
        let at = |key: &&PeerKey| self.peers.get(**key).is_none_or(|peer| !peer.itself);
        let addresses = self.addresses.values().filter(at).count();
        let stated = self.further.len();
        peers + addresses + stated + self.ids.len() + self.secrets.len() + self.idle.len()
    }

    pub(in crate::rdm) fn set_random(&mut self, random: Random) {
        self.config.random = random;
    }

    /// No peer has a token.
    pub(in crate::rdm) fn random_is_unused(&self) -> bool {
        self.secrets.is_empty()
    }

    pub(in crate::rdm) fn audit(&self, key: PeerKey) -> Option<Audit> {
        let peer = self.peers.get(key)?;
        let inbound = peer.inbound.as_ref()?;
        Some(Audit {
            id: peer.id,
            up: peer.out.is_some(),
            next: peer.next,
            spent: peer.outbound.used(),
            expected: peer.expected,
            used: inbound.used(),
            stored: inbound.stored(),
            grant: peer.outbound.grant(),
            granted: (!peer.has_report()).then(|| inbound.grant()),
        })
    }

    /// Prints the state of all peers and links.
    pub(in crate::rdm) fn print(&self) {
        let all = std::iter::successors(self.peers.at_or_behind(0), |key| self.peers.after(*key));
        for key in all {
            let peer = self.peers.get(key);
            eprintln!("  peer {key:?}: {peer:?}");
            let links = peer.iter().flat_map(|peer| {
                let [first, second] = peer.lingering;
                [peer.own, peer.accepted, first, second]
            });
            for link in links.flatten() {
                eprintln!("    link {link:?}: {:?}", self.links.get(link));
            }
        }
    }

    /// What always holds between calls.
    pub(in crate::rdm) fn check(&self) {
        assert_eq!(self.violations, 0, "a packet violates the protocol");
        assert!(self.dials <= self.config.dials);
        let mut taken = Credit::ZERO;
        let mut lent = 0;
        let mut links = 0;
        let mut dials = 0;
        let all = std::iter::successors(self.peers.at_or_behind(0), |key| self.peers.after(*key));
        for key in all {
            let Some(peer) = self.peers.get(key) else {
                continue;
            };
            let (base, from_reserve) = peer.left().taken();
            taken = taken.add(Credit::new(base, 0));
            lent += from_reserve;
            if let Some(inbound) = &peer.inbound {
                assert_eq!(peer.left(), LeftCredit::NONE);
                let extra = Credit::new(inbound.extra(), 0);
                taken = taken.add(inbound.window().sub(extra).sub(SMALLEST));
                lent += extra.blocks;
            }
            for link in [peer.own, peer.accepted].into_iter().flatten() {
                let link = self.links.get(link).expect("a link of a peer");
                assert_eq!(link.peer, key);
                assert_ne!(link.state, link::State::Lingering);
                links += 1;
                dials += usize::from(link.state == link::State::Dialling);
            }
            for link in peer.lingering.into_iter().flatten() {
                let link = self.links.get(link).expect("a lingering link of a peer");
                assert_eq!((link.peer, link.state), (key, link::State::Lingering));
                links += 1;
            }
            let named = peer.id.is_some_and(|id| self.ids.get(&id) == Some(&key));
            assert!(named || !peer.begun, "a session without endpoint id");
            let out = peer.out.and_then(|out| self.links.get(out));
            assert!(out.is_none_or(|out| out.state == link::State::Up));
            assert!(peer.out.is_none() || peer.out == peer.own || peer.out == peer.accepted);
            assert!(peer.alias.is_none() || peer.out.is_none());
            let open = out.is_some_and(link::Link::is_open);
            assert_eq!(open, out.is_some() && !peer.closing);
        }
        links += self.orphans.len();
        assert_eq!(
            (taken, links, dials),
            (self.pool.taken(), self.links.len(), self.dials)
        );
        // on circuits blocks of the messages of orphans come on top
        let blocks = if self.config.circuits {
            0
        } else {
            taken.blocks
        };
        let bounded = Credit::new(blocks, taken.slots);
        assert!(self.config.pool.covers(bounded));
        self.check_hosts();
        if !self.others.is_empty() || self.peers.any(|peer| peer.alias.is_some()) {
            self.check_addresses();
        }
        assert_eq!(lent, self.pool.lent());
    }

    /// All addresses that lead to each peer are found.
    fn check_addresses(&self) {
        let mut leads: HashMap<PeerKey, Vec<_>> = HashMap::new();
        for (address, at) in &self.addresses {
            let of = leads.entry(self.resolve(*at)).or_default();
            of.push(address.socket_addr());
        }
        for key in self.peer_keys() {
            let mut leads = leads.remove(&key).unwrap_or_default();
            let mut found = self.addresses(key);
            let stated = self.peers.get(key).map(|peer| &peer.further);
            let stated = stated.into_iter().flatten().map(|it| it.socket_addr());
            let stated: Vec<_> = stated.collect();
            found.retain(|it| leads.contains(it) || !stated.contains(it));
            leads.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, leads);
        }
        assert!(leads.is_empty(), "addresses of no peer");
    }
}
