//! Address vectors: `docs/addresses.md` has the structures, and what the endpoint and the provider
//! add to them.
//!
//! An [`Av`] maps each `fi_addr_t` to a [`PeerIndex`], and each peer to its address and to the
//! `fi_addr_t` that is reported as the source of its messages. Duplicates of an address are one
//! peer.
//!
//! Not thread safe; the owner's lock protects it. No call blocks; names are resolved by the caller.
//!
//! Invariants:
//! 1. An address has at most one peer, whatever its form: an IPv4 address is the same as the IPv6
//!    address that contains it (`::ffff:10.1.2.3`), the scope is part of a link-local address
//!    alone, the flow label of none. The peer exists as long as a `fi_addr_t` refers to it, or an
//!    endpoint holds it; its index does not change and is not used for another address meanwhile.
//! 2. The `fi_addr_t` of a peer are in a list in the order of insertion; its first element is the
//!    source.
//! 3. A `fi_addr_t` is the lowest index that is not in use, in both types of address vectors.

mod lowest;
pub mod symmetric;
#[cfg(test)]
mod tests;
pub mod text;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use self::lowest::Lowest;
use crate::PeerIndex;
use crate::chunks::Chunks;
use crate::errno::{FiErrno, Result};
use crate::hash::Hasher;

/// An address of `fi_av_insert(3)`. `FI_ADDR_UNSPEC` and `FI_ADDR_NOTAVAIL` (`u64::MAX`) are in no
/// address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FiAddr(pub u64);

/// The result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// The peer of the address.
    pub peer: PeerIndex,
    /// The address that is reported as the source from now on; `None`: `FI_ADDR_NOTAVAIL`.
    pub source: Option<FiAddr>,
}

/// No index.
const NIL: u32 = u32::MAX;
/// Maximum number of addresses for which memory is reserved: about 54 MiB.
const RESERVED: usize = 1 << 20;
/// Maximum average length of the chains of the hash; at least half of it when it has grown.
const CHAIN: usize = 4;

/// A `fi_addr_t`: 12 bytes. Not in use if `peer` is [`NIL`].
#[derive(Clone, Copy, Debug)]
struct Entry {
    peer: u32,
    /// Neighbours in the list of the peer: `prev` of the first is the last, `next` of the last is
    /// [`NIL`].
    next: u32,
    prev: u32,
}

const UNUSED: Entry = Entry {
    peer: NIL,
    next: NIL,
    prev: NIL,
};

/// A peer: 40 bytes.
#[derive(Clone, Copy, Debug)]
struct Peer {
    ip: [u8; 16],
    scope: u32,
    flow: u32,
    port: u16,
    family: Family,
    /// The first `fi_addr_t`, or [`NIL`].
    first: u32,
    /// Number of holds.
    holds: u32,
    /// The next peer in the chain of the hash, or the next free one.
    next: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Family {
    /// The entry is free.
    None,
    V4,
    V6,
}

impl Peer {
    fn new(addr: &SocketAddr) -> Self {
        let (ip, family) = match addr.ip() {
            IpAddr::V4(ip) => (ip.to_ipv6_mapped(), Family::V4),
            IpAddr::V6(ip) => (ip, Family::V6),
        };
        let (scope, flow) = match addr {
            SocketAddr::V4(_) => (0, 0),
            SocketAddr::V6(v6) => (v6.scope_id(), v6.flowinfo()),
        };
        Self {
            ip: ip.octets(),
            scope,
            flow,
            port: addr.port(),
            family,
            first: NIL,
            holds: 0,
            next: NIL,
        }
    }

    fn addr(&self) -> SocketAddr {
        let ip = Ipv6Addr::from(self.ip);
        if self.family == Family::V4 {
            let ip = ip.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED);
            return SocketAddr::new(ip.into(), self.port);
        }
        SocketAddrV6::new(ip, self.port, self.flow, self.scope).into()
    }

    /// The scope, if it distinguishes addresses.
    fn scope(&self) -> u32 {
        match Ipv6Addr::from(self.ip).is_unicast_link_local() {
            true => self.scope,
            false => 0,
        }
    }

    /// Whether the addresses are the same, perhaps in different forms.
    fn is(&self, other: &Self) -> bool {
        (self.ip, self.port, self.scope()) == (other.ip, other.port, other.scope())
    }

    fn hash(&self, hasher: Hasher) -> u64 {
        let ip = u128::from_ne_bytes(self.ip);
        let first = hasher.hash(ip as u64, (ip >> 64) as u64);
        hasher.hash(first, u64::from(self.scope()) << 16 | u64::from(self.port))
    }
}

/// Empty chains of a hash.
///
/// # Errors
/// `ENOMEM`.
fn chains(count: usize) -> Result<Box<[u32]>> {
    let mut chains = Vec::new();
    chains
        .try_reserve_exact(count)
        .map_err(|_| FiErrno::ENOMEM)?;
    chains.resize(count, NIL);
    Ok(chains.into_boxed_slice())
}

/// An address vector of type map or table.
#[derive(Debug)]
pub struct Av {
    entries: Chunks<Entry>,
    /// Indices below `entries.len()` that are not in use.
    unused: Lowest,
    len: u32,
    /// The addresses whose form is not that of their peer, by their `fi_addr_t`.
    forms: HashMap<u32, SocketAddr>,
    peers: Chunks<Peer>,
    /// The first free peer.
    free: u32,
    /// Number of peers in use.
    count: u32,
    /// First peer of each chain, 2^n chains.
    chains: Box<[u32]>,
    hasher: Hasher,
}

impl Av {
    /// An empty address vector with memory for `count` addresses (`fi_av_attr.count`, any value),
    /// at most 2^20; more are allocated when they are inserted. `seed` is secret and random: remote
    /// endpoints choose the addresses that [`Self::learn`] looks up.
    #[must_use]
    pub fn new(seed: u64, count: usize) -> Self {
        let count = count.min(RESERVED);
        let chains = count.div_ceil(CHAIN).next_power_of_two();
        Self {
            entries: Chunks::with_capacity(count),
            unused: Lowest::default(),
            len: 0,
            forms: HashMap::new(),
            peers: Chunks::with_capacity(count),
            free: NIL,
            count: 0,
            chains: vec![NIL; chains].into_boxed_slice(),
            hasher: Hasher::new(seed),
        }
    }

    /// The number of addresses (`fi_addr_t`).
    #[must_use]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no address is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of peers, with those that have no `fi_addr_t`.
    #[must_use]
    pub fn peers(&self) -> usize {
        self.count as usize
    }

    /// Inserts an address at the lowest unused index. A duplicate gets an index of its own and the
    /// same peer. Amortized O(1): a growing hash walks all peers.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL`: no peer can have the address: it is unspecified, or its port is 0.
    /// `ENOMEM`: there are 2^32 - 3 addresses, or no memory for a larger hash.
    pub fn insert(&mut self, addr: &SocketAddr) -> Result<FiAddr> {
        if addr.ip().to_canonical().is_unspecified() || addr.port() == 0 {
            return Err(FiErrno::EADDRNOTAVAIL);
        }
        let peer = self.add_peer(addr)?;
        let index = match self.reserve() {
            Ok(index) => index,
            Err(error) => {
                self.forget(peer);
                return Err(error);
            }
        };
        let first = self.peers[peer].first;
        let prev = if first == NIL {
            self.peers[peer].first = index;
            index
        } else {
            let last = std::mem::replace(&mut self.entries[first].prev, index);
            self.entries[last].next = index;
            last
        };
        self.entries[index] = Entry {
            peer,
            next: NIL,
            prev,
        };
        if self.peers[peer].addr() != *addr {
            self.forms.insert(index, *addr);
        }
        self.len += 1;
        Ok(FiAddr(index.into()))
    }

    /// Inserts addresses in their order, and calls `each` with the position and the result of each
    /// one. Returns the number that were inserted. An item that is an error (an address that could
    /// not be read or resolved) is reported like an address that is refused.
    ///
    /// The index of a failed address stays unused during this call, so that the indices of the
    /// others do not depend on it: an application that passes no array for the results finds the
    /// failed ones by `fi_av_lookup`.
    pub fn insert_all(
        &mut self,
        addrs: impl IntoIterator<Item = Result<SocketAddr>>,
        mut each: impl FnMut(usize, Result<FiAddr>),
    ) -> usize {
        let mut inserted = 0;
        // the entries of the skipped indices are a list, which needs no memory that may be absent
        let mut skipped = NIL;
        for (position, addr) in addrs.into_iter().enumerate() {
            let result = addr.and_then(|addr| self.insert(&addr));
            match result {
                Ok(_) => inserted += 1,
                Err(_) => {
                    if let Ok(index) = self.reserve() {
                        self.entries[index].next = std::mem::replace(&mut skipped, index);
                    }
                }
            }
            each(position, result);
        }
        while skipped != NIL {
            let index = skipped;
            skipped = std::mem::replace(&mut self.entries[index], UNUSED).next;
            self.unused.add(index);
        }
        inserted
    }

    /// Removes an address. Its peer stays if it has other addresses, or while it is held. No other
    /// address gets the index before [`Self::release_index`].
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the vector.
    pub fn remove(&mut self, addr: FiAddr) -> Result<Removed> {
        let index = self.index(addr)?;
        let Entry { peer, next, prev } = self.entries[index];
        if self.peers[peer].first == index {
            self.peers[peer].first = next;
            if next != NIL {
                self.entries[next].prev = prev;
            }
        } else {
            self.entries[prev].next = next;
            let after = if next == NIL {
                self.peers[peer].first
            } else {
                next
            };
            self.entries[after].prev = prev;
        }
        self.entries[index] = UNUSED;
        self.forms.remove(&index);
        self.len -= 1;
        let removed = Removed {
            peer: PeerIndex(peer),
            source: self.source(PeerIndex(peer)),
        };
        self.forget(peer);
        Ok(removed)
    }

    /// The index of an address that was removed, and not released since, can be used again.
    pub fn release_index(&mut self, removed: FiAddr) {
        debug_assert_eq!(
            self.index(removed),
            Err(FiErrno::EINVAL),
            "{removed:?} is in use"
        );
        if let Ok(index) = u32::try_from(removed.0) {
            self.unused.add(index);
        }
    }

    /// The peer of an address. O(1), does not allocate.
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the vector.
    #[inline]
    pub fn peer(&self, addr: FiAddr) -> Result<PeerIndex> {
        let index = self.index(addr)?;
        Ok(PeerIndex(self.entries[index].peer))
    }

    /// The address as it was inserted.
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the vector.
    pub fn lookup(&self, addr: FiAddr) -> Result<SocketAddr> {
        let index = self.index(addr)?;
        let form = self.forms.get(&index).copied();
        Ok(form.unwrap_or_else(|| self.peers[self.entries[index].peer].addr()))
    }

    /// The address that is reported as the source of a peer's messages: the first inserted one that
    /// was not removed. `None`: `FI_ADDR_NOTAVAIL`. O(1), does not allocate.
    #[inline]
    #[must_use]
    pub fn source(&self, peer: PeerIndex) -> Option<FiAddr> {
        let first = self.peers.get(peer.0)?.first;
        (first != NIL).then(|| FiAddr(first.into()))
    }

    /// The remote address of a peer, in one of its forms. `None`: the index is not in use.
    #[must_use]
    pub fn peer_addr(&self, peer: PeerIndex) -> Option<SocketAddr> {
        let peer = self.peers.get(peer.0)?;
        (peer.family != Family::None).then(|| peer.addr())
    }

    /// The peer with this remote address, in any form, if there is one.
    #[must_use]
    pub fn find(&self, addr: &SocketAddr) -> Option<PeerIndex> {
        self.find_peer(&Peer::new(addr)).map(PeerIndex)
    }

    /// The peer of a remote endpoint that has sent something, which need not have a `fi_addr_t`; it
    /// is created if it does not exist. The caller holds it: [`Self::release`].
    ///
    /// # Errors
    /// `ENOMEM`: there are 2^32 - 3 peers, or no memory for a larger hash.
    pub fn learn(&mut self, addr: &SocketAddr) -> Result<PeerIndex> {
        let peer = self.add_peer(addr)?;
        self.peers[peer].holds += 1;
        Ok(PeerIndex(peer))
    }

    /// Holds a peer of [`Self::peer`] or [`Self::find`]: its index stays valid, also after its
    /// addresses are removed.
    pub fn hold(&mut self, peer: PeerIndex) {
        debug_assert!(self.peer_addr(peer).is_some());
        self.peers[peer.0].holds += 1;
    }

    /// Ends one hold.
    pub fn release(&mut self, peer: PeerIndex) {
        debug_assert!(self.peers[peer.0].holds != 0);
        self.peers[peer.0].holds -= 1;
        self.forget(peer.0);
    }

    /// The index of an address in use.
    #[inline]
    fn index(&self, addr: FiAddr) -> Result<u32> {
        let index = u32::try_from(addr.0).map_err(|_| FiErrno::EINVAL)?;
        match self.entries.get(index) {
            Some(entry) if entry.peer != NIL => Ok(index),
            _ => Err(FiErrno::EINVAL),
        }
    }

    /// The lowest unused index, which is then neither unused nor in use.
    fn reserve(&mut self) -> Result<u32> {
        if let Some(index) = self.unused.take() {
            return Ok(index);
        }
        if self.entries.is_full() {
            return Err(FiErrno::ENOMEM);
        }
        Ok(self.entries.push(UNUSED))
    }

    fn chain(&self, peer: &Peer) -> usize {
        peer.hash(self.hasher) as usize >> 8 & (self.chains.len() - 1)
    }

    fn find_peer(&self, wanted: &Peer) -> Option<u32> {
        let mut at = self.chains[self.chain(wanted)];
        while at != NIL {
            let peer = &self.peers[at];
            if peer.is(wanted) {
                return Some(at);
            }
            at = peer.next;
        }
        None
    }

    /// The peer of an address; it is created if it does not exist.
    fn add_peer(&mut self, addr: &SocketAddr) -> Result<u32> {
        let mut peer = Peer::new(addr);
        if let Some(found) = self.find_peer(&peer) {
            return Ok(found);
        }
        if self.free == NIL && self.peers.is_full() {
            return Err(FiErrno::ENOMEM);
        }
        if self.count as usize >= self.chains.len() * CHAIN {
            self.grow()?;
        }
        let chain = self.chain(&peer);
        peer.next = self.chains[chain];
        let index = if self.free == NIL {
            self.peers.push(peer)
        } else {
            let index = self.free;
            let place = &mut self.peers[index];
            self.free = place.next;
            *place = peer;
            index
        };
        self.chains[chain] = index;
        self.count += 1;
        Ok(index)
    }

    /// Doubles the number of chains.
    ///
    /// # Errors
    /// `ENOMEM`; nothing has changed.
    fn grow(&mut self) -> Result<()> {
        self.chains = chains(self.chains.len() * 2)?;
        for index in 0..self.peers.len() {
            if self.peers[index].family == Family::None {
                continue;
            }
            let chain = self.chain(&self.peers[index]);
            self.peers[index].next = std::mem::replace(&mut self.chains[chain], index);
        }
        Ok(())
    }

    /// Frees a peer that has no address and is not held.
    fn forget(&mut self, index: u32) {
        let peer = self.peers[index];
        if peer.first != NIL || peer.holds != 0 {
            return;
        }
        let chain = self.chain(&peer);
        let mut at = self.chains[chain];
        if at == index {
            self.chains[chain] = peer.next;
        } else {
            while self.peers[at].next != index {
                at = self.peers[at].next;
            }
            self.peers[at].next = peer.next;
        }
        let place = &mut self.peers[index];
        place.family = Family::None;
        place.next = std::mem::replace(&mut self.free, index);
        self.count -= 1;
    }

    /// Bytes of memory, in use and reserved.
    #[cfg(test)]
    fn bytes(&self) -> usize {
        let forms = self.forms.capacity() * size_of::<(u32, SocketAddr)>();
        self.entries.bytes()
            + self.peers.bytes()
            + size_of_val(&*self.chains)
            + self.unused.bytes()
            + forms
    }
}
