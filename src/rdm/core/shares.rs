//! Shares of credit windows and of the memory for stored messages. All sessions of a peer have one
//! share together, and so have all endpoints that dial from one host.
//! `docs/protocol-rdm.md`, "Shares".

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use super::credit::{FIRST, Inbound, LeftCredit, Pool, Room, SMALLEST};
use super::peer::{Peer, PeerKey};
use super::{Core, Io, Origin};
use crate::wire::rdm::Credit;

/// The share of a host has at least so many blocks, also if the pool is small.
const LEAST: u32 = 256 * SMALLEST.blocks;

/// What the strangers of one host have: peers that no `fi_addr_t` names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::rdm) struct Host {
    /// The number of their sessions, without those to which the smallest window is not given.
    sessions: u32,
    /// Blocks of messages that have outlived the sessions: without those from the reserve, and
    /// these.
    left: (u32, u32),
    /// Peers to which the smallest window is not given: numbers of their keys.
    withheld: BTreeSet<u32>,
}

/// Number of strangers that are offered blocks of the reserve at a time.
const OFFERS: usize = 4;

impl Host {
    #[cfg(test)]
    pub(in crate::rdm) fn left(&self) -> (u32, u32) {
        self.left
    }

    /// Whether one more session may have the smallest window.
    fn has_room(&self, pool: &Pool) -> bool {
        let most = u64::from(pool.largest().blocks.max(LEAST));
        let used = u64::from(self.left.0) + smallest(self.sessions);
        used + smallest(1) <= most
    }

    /// What one more session may take.
    fn room(&self, pool: &Pool) -> Room {
        let sessions = u64::from(self.sessions) + 1;
        let first = u64::from(self.left.0) + sessions * u64::from(FIRST.blocks);
        Room {
            most: pool.largest().blocks.saturating_sub(self.left.0),
            lent: self.left.1,
            first: first <= u64::from(pool.half()),
            smallest: self.has_room(pool),
        }
    }
}

/// The blocks of so many smallest windows.
fn smallest(sessions: u32) -> u64 {
    u64::from(sessions) * u64::from(SMALLEST.blocks)
}

/// What a peer, or its host, has for all sessions.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Share {
    /// What messages hold while the peer has no session.
    left: LeftCredit,
    /// The host from which the peer dials, or at which it was dialled.
    host: Option<IpAddr>,
    /// The window, or what is left, is charged to the host.
    charged: bool,
}

impl Share {
    const NONE: Self = Self {
        left: LeftCredit::NONE,
        host: None,
        charged: false,
    };

    fn charged_host(&self) -> Option<IpAddr> {
        self.host.filter(|_| self.charged)
    }
}

/// The hosts from which strangers dial.
pub(in crate::rdm) type Hosts = HashMap<IpAddr, Host>;

/// The same for all addresses of one host that are known to be that.
pub(super) fn host_of(ip: IpAddr) -> IpAddr {
    let ip = ip.to_canonical();
    if ip.is_loopback() {
        return Ipv4Addr::LOCALHOST.into();
    }
    ip
}

impl<I: Io> Core<I> {
    /// A request from this address was accepted or held.
    pub(super) fn note_source(&mut self, key: PeerKey, ip: IpAddr) {
        if let Some(peer) = self.peers.get_mut(key)
            && peer.inbound.is_none()
        {
            let share = peer.share.get_or_insert_with(|| Box::new(Share::NONE));
            if !share.charged {
                share.host = Some(host_of(ip));
            }
        }
    }

    /// The window of a session, which begins now if there is none.
    pub(super) fn open_window(&mut self, key: PeerKey) -> Option<&mut Inbound> {
        let begins = self.peers.get(key)?.inbound.is_none();
        let named = begins && self.is_named(key);
        let peer = self.peers.get_mut(key)?;
        let mut before = None;
        if begins {
            let share = peer.share.as_deref().copied().unwrap_or(Share::NONE);
            // from now on it is part of the window
            let left = share.left;
            before = share.charged_host();
            Self::uncharge(&mut self.hosts, before, left.held());
            // a peer that does not dial was dialled
            let dialled = peer.address.map(|at| host_of(at.socket_addr().ip()));
            let host = share.host.or(dialled).filter(|_| !named);
            let room = match host {
                Some(host) => self.hosts.entry(host).or_default().room(&self.pool),
                None => Room::of_peer(&self.pool),
            };
            let inbound = Inbound::new(&mut self.pool, left, room);
            peer.share = host.map(|host| {
                Box::new(Share {
                    left: LeftCredit::NONE,
                    host: Some(host),
                    charged: true,
                })
            });
            if let Some(host) = host {
                let of = self.hosts.entry(host).or_default();
                if inbound.is_withheld() {
                    of.withheld.insert(key.number());
                } else {
                    of.sessions += 1;
                }
            }
            peer.inbound = Some(inbound);
        }
        if let Some(host) = before {
            self.admit(host);
        }
        self.peers.get_mut(key)?.inbound.as_mut()
    }

    /// Before the window of a session grows: the strangers of its host may use more or less than
    /// before.
    pub(super) fn limit_window(&mut self, key: PeerKey) {
        let peer = self.peers.get_mut(key);
        if let Some((inbound, share)) =
            peer.and_then(|it| it.inbound.as_mut().zip(it.share.as_ref()))
            && let Some(of) = share.charged_host().and_then(|host| self.hosts.get(&host))
        {
            inbound.limit(of.room(&self.pool));
        }
    }

    /// The session of a peer ends, or the peer is freed: what its messages hold is left.
    pub(super) fn close_window(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let Some(inbound) = peer.inbound.take() else {
            return;
        };
        let left = inbound.end(&mut self.pool);
        let mut share = peer.share.as_deref().copied().unwrap_or(Share::NONE);
        let host = share.charged_host();
        share.left = left;
        share.charged &= left != LeftCredit::NONE;
        let mut remains = left != LeftCredit::NONE;
        if !self.orphans.is_empty() {
            // their messages may be charged to the host later
            remains |= self.orphans_of(key).next().is_some();
        }
        if let Some(peer) = self.peers.get_mut(key) {
            peer.share = remains.then(|| Box::new(share));
        }
        let Some(host) = host else {
            return;
        };
        let of = self.hosts.entry(host).or_default();
        if inbound.is_withheld() {
            of.withheld.remove(&key.number());
        } else {
            of.sessions -= 1;
        }
        let (base, lent) = left.held();
        of.left = (of.left.0 + base, of.left.1 + lent);
        self.admit(host);
    }

    /// Messages of sessions that have ended do not use this credit any more: the next session of
    /// the peer gets it, or the pool.
    #[cold]
    pub(super) fn give_back_left(&mut self, from: Origin, credit: Credit) {
        // slots are those of the session
        let blocks = credit.blocks;
        let Some(peer) = self.peers.get_mut(from.peer).filter(|_| blocks != 0) else {
            return;
        };
        if let Some(inbound) = &mut peer.inbound {
            inbound.give_back(Credit::new(blocks, 0), &mut self.pool);
            return self.list(from.peer);
        }
        let Some(share) = &mut peer.share else {
            return;
        };
        let before = share.left.held();
        share.left.give_back(blocks, &mut self.pool);
        let after = share.left.held();
        let host = share.charged_host();
        share.charged &= share.left != LeftCredit::NONE;
        let less = (before.0 - after.0, before.1 - after.1);
        Self::uncharge(&mut self.hosts, host, less);
        if let Some(host) = host {
            self.admit(host);
            self.offer(host, after.0 + after.1);
        }
    }

    /// A message of a session that has ended is stored.
    pub(super) fn charge_left(&mut self, key: PeerKey, blocks: u32) {
        let share = self.peers.get(key).map(|peer| &peer.share);
        let first =
            share.is_some_and(|it| it.as_ref().is_none_or(|it| it.left == LeftCredit::NONE));
        let named = blocks != 0 && first && self.is_named(self.resolve(key));
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if let Some(inbound) = &mut peer.inbound {
            return inbound.charge(blocks, &mut self.pool);
        }
        let share = peer.share.get_or_insert_with(|| Box::new(Share::NONE));
        if share.left == LeftCredit::NONE && blocks != 0 {
            share.charged = share.host.is_some() && !named;
        }
        share.left.charge(blocks, &mut self.pool);
        if let Some(host) = share.charged_host() {
            self.hosts.entry(host).or_default().left.0 += blocks;
        }
    }

    /// A `fi_addr_t` names the peer, or an alias of it: none of its addresses is a stranger any
    /// more.
    pub(super) fn name_strangers(&mut self, key: PeerKey) {
        if self.hosts.is_empty() {
            return; // nothing is charged to a host
        }
        self.name_stranger(key);
        if self.peers.get(key).is_some_and(|peer| peer.aliases != 0) {
            // messages of the time before it was an alias
            for alias in self.peers.keys_where(|peer| peer.alias == Some(key)) {
                self.name_stranger(alias);
            }
        }
    }

    fn name_stranger(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let Some(share) = &mut peer.share else {
            return;
        };
        let Some(host) = share.charged_host() else {
            return;
        };
        share.charged = false;
        let left = share.left.held();
        if let Some(inbound) = &mut peer.inbound {
            let of = self.hosts.entry(host).or_default();
            if inbound.is_withheld() {
                of.withheld.remove(&key.number());
            } else {
                of.sessions -= 1;
            }
            let waits = inbound.is_withheld();
            inbound.free(&self.pool);
            if waits {
                self.list(key);
            }
        }
        Self::uncharge(&mut self.hosts, Some(host), left);
        self.admit(host);
    }

    /// Whether a `fi_addr_t` names the peer. A stranger can have aliases: its own addresses.
    pub(super) fn is_named(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let names = |alias: &Peer| alias.alias == Some(key) && alias.kept != 0;
        peer.kept != 0 || peer.aliases != 0 && !self.peers.keys_where(names).is_empty()
    }

    fn uncharge(hosts: &mut Hosts, host: Option<IpAddr>, (base, lent): (u32, u32)) {
        if let Some(of) = host.and_then(|host| hosts.get_mut(&host)) {
            debug_assert!(of.left.0 >= base && of.left.1 >= lent);
            of.left = (
                of.left.0.saturating_sub(base),
                of.left.1.saturating_sub(lent),
            );
        }
    }

    /// Strangers of a host have given back blocks, of which the reserve gives some of the others
    /// theirs: to those that have no window, from another one on each time. `turn` differs from
    /// that of the last call.
    fn offer(&mut self, host: IpAddr, turn: u32) {
        let Some(of) = self.hosts.get(&host) else {
            return;
        };
        let all = of.withheld.len();
        let first = (turn as usize).checked_rem(all).unwrap_or(0);
        let next = of.withheld.iter().cycle().skip(first).take(all.min(OFFERS));
        let next: Vec<_> = next.copied().collect();
        for number in next {
            self.list(PeerKey::from_number(number));
        }
    }

    /// The strangers of a host use less: others may get their smallest windows.
    fn admit(&mut self, host: IpAddr) {
        while let Some(of) = self.hosts.get_mut(&host) {
            if *of == Host::default() {
                self.hosts.remove(&host);
                return;
            }
            if of.withheld.is_empty() || !of.has_room(&self.pool) {
                return;
            }
            let Some(number) = of.withheld.pop_first() else {
                return;
            };
            of.sessions += 1;
            let key = PeerKey::from_number(number);
            let peer = self.peers.get_mut(key);
            if let Some(inbound) = peer.and_then(|peer| peer.inbound.as_mut()) {
                inbound.admit();
            }
            self.list(key);
        }
    }
}

impl Peer {
    /// What messages hold while the peer has no session.
    pub(in crate::rdm) fn left(&self) -> LeftCredit {
        self.share
            .as_ref()
            .map_or(LeftCredit::NONE, |share| share.left)
    }
}

#[cfg(test)]
impl<I: Io> Core<I> {
    /// Blocks that messages hold which have outlived their sessions, while their peers have none.
    pub(in crate::rdm) fn left(&self) -> u32 {
        let first = self.peers.at_or_behind(0);
        let all = std::iter::successors(first, |key| self.peers.after(*key));
        all.filter_map(|key| Some(self.peers.get(key)?.left().held()))
            .map(|(base, lent)| base + lent)
            .sum()
    }

    /// What the hosts are charged is what their peers have.
    pub(in crate::rdm) fn check_hosts(&self) {
        let mut hosts = Hosts::new();
        let first = self.peers.at_or_behind(0);
        for key in std::iter::successors(first, |key| self.peers.after(*key)) {
            let Some(peer) = self.peers.get(key) else {
                continue;
            };
            let Some(host) = peer.share.as_ref().and_then(|share| share.charged_host()) else {
                continue;
            };
            let of = hosts.entry(host).or_default();
            match &peer.inbound {
                Some(inbound) if inbound.is_withheld() => {
                    of.withheld.insert(key.number());
                }
                Some(_) => of.sessions += 1,
                None => assert_ne!(peer.left(), LeftCredit::NONE),
            }
            let (base, lent) = peer.left().held();
            of.left = (of.left.0 + base, of.left.1 + lent);
        }
        assert_eq!(hosts, self.hosts);
    }
}
