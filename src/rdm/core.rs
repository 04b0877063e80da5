//! The state of the peers and links of an endpoint, and its interface in both directions. The
//! modules below implement [`Core`], and use nothing else of the endpoint (`tests/dependencies`).
//! `docs/protocol-rdm.md` has the protocol; each rule named below is there.
//!
//! [`Core`] is a state machine without device, lock, thread or clock. The endpoint that owns it
//! - calls its methods with what has happened: a post, a packet, a completion of a SEND, events of
//!   the connection manager, the time;
//! - implements [`Io`], by which it acts on queue pairs, operations and matching.
//!
//! # For the author of the endpoint
//! - All calls are serialized by the lock of the endpoint. No call blocks, and none allocates once
//!   the tables have grown, except calls of the connection manager's events. Methods of [`Io`] must
//!   not call back into the [`Core`].
//! - Call [`Core::set_now`] before the other methods, except those of the application's calls,
//!   which read [`Io::now`] where they begin a limit of time; [`Core::flush`] at the end of each
//!   progress call, and [`Core::tick`] when [`Core::deadline`] has passed.
//! - [`LinkKey`] fits into 32 bits and names one queue pair; use its number in `wr_id`. Events of a
//!   link that has ended are ignored, so a late completion does no harm.
//! - Events of one link have to be passed in their order: each SEND's completion, each packet.
//!   After [`Io::end`], all of them are passed, and [`Core::ended`] last.
//! - A packet is decoded by [`Packet::decode`](crate::wire::rdm::Packet::decode) from memory that
//!   the peer cannot write any more, and passed to [`Core::arrived`]; one that is refused to
//!   [`Core::violated`].
//! - Credit of a delivered packet is given back by [`Core::give_back`]: its slot when the receive
//!   was posted again, its blocks when the message was matched.
//! - Sends to the own endpoint come back by [`Io::loop_back`].
//! - A message that was posted as [`Form::Rts`] is held until the caller calls [`Core::release`],
//!   when FIN has arrived. For RMA and other operations with an answer, call [`Core::hold`] first.
//! - RMA is posted to the link of the last [`Io::up`] only, and not after its [`Io::down`].
//! - Answers to packets go by [`Core::answer`], never to another session than that of the packet.
//! - CTS, DATA, FIN and RESULT with the name of an operation that does not exist are ignored, and
//!   their slot is given back as usual: the operation has failed ([`Io::fail_peer`]) or was
//!   cancelled, before the peer was notified. So the name of an operation has to contain a
//!   generation. An RTS or ATOMIC always begins something new. A packet whose content is impossible
//!   (DATA beyond the message, an operator that does not exist) is a violation:
//!   [`Core::content_violated`].
//! - [`Io::fail_peer`] ends the session at both sides: the caller drops the stored RTS of the peer
//!   and stops READs of matched ones before it returns to the application.
//!
//! [`Core`] decides what is posted where and when, and which operations are complete. It handles no
//! payload, matching, key or rendezvous: RTS, CTS, FIN and the other numbered packets are delivered
//! as they are.
//!
//! In one file: the calls from outside, the calls to outside ([`Io`]), and the state of both.

#[cfg(test)]
mod audit;
pub(super) mod connect;
pub(super) mod credit;
pub(super) mod direct;
mod evict;
mod identity;
mod idle;
pub(super) mod link;
pub(super) mod ops;
mod orphans;
pub(super) mod peer;
mod places;
pub(super) mod recover;
mod shares;
mod timers;
mod traffic;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use self::connect::HeldRequest;
use self::credit::{Pool, SMALLEST};
use self::link::{Link, LinkKey, LinkMark};
use self::ops::{Entry, Form, List, Table, Uses};
use self::orphans::Orphan;
use self::peer::{Peer, PeerKey, PeerMark};
use self::recover::Unposted;
use self::shares::Hosts;
use super::slab::Slab;
use crate::errno::{FiErrno, Result};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::{
    Credit, EndpointId, Epoch, Header, Listener, Number, Packet, Rejection, Reply, Request, Secret,
    Terms,
};

/// Draws of a token until one is neither 0 nor in use. With 2^24 peers, one draw of 256 fails.
const DRAWS: u32 = 16;

/// Operations whose answers have receives of their own; further ones may find none at once.
const ANSWERS: usize = 64;

/// The result of [`Io::post`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// The send queue has no room, and nothing was posted; [`Core::has_room`] must follow.
    Refused,
    /// The packet was posted. [`Core::sent`] follows, or the end of the link.
    Posted,
    /// The packet, and all earlier numbered packets of the link, are in the memory of the peer,
    /// which processes them although the link breaks. [`Core::sent`] does not follow.
    Delivered,
}

/// What an endpoint does for its [`Core`].
pub trait Io {
    /// The caller's name of an operation.
    type Op: Copy;
    /// A connection request that waits for its answer.
    type Held;
    /// Memory in which a packet has arrived.
    type Slot;

    /// The present time for [`Core::set_now`]. `None`: that of the last call of it.
    fn now(&self) -> Option<u64> {
        None
    }

    /// Sends a connection request. [`Core::requesting`] follows when it was sent, not during this
    /// call. Its result is [`Core::replied`], [`Core::rejected`] or [`Core::dial_failed`].
    fn dial(&mut self, link: LinkKey, to: Listener, request: &Request);

    /// Whether a queue pair for one more link can be had. If not, [`Core`] evicts a link. On
    /// circuits [`Core`] counts the places, and `false` refuses one besides.
    fn has_place(&mut self) -> bool;

    /// The number of links that can exist; on circuits, that of circuits and targets.
    fn places(&self) -> usize {
        usize::MAX
    }

    /// Whether no RMA and no READ is under way on a link, so that nothing has an unknown outcome if
    /// the link is ended. Between [`Self::down`] and [`Self::up`] it becomes `true` some time.
    fn is_quiet(&mut self, _link: LinkKey) -> bool {
        true
    }

    /// On circuits: whether all requests of a link have completed. Two links of a peer can be on
    /// different circuits, whose packets overtake each other.
    fn has_completed(&mut self, _link: LinkKey) -> bool {
        true
    }

    /// On circuits: the node to which a link to this address leads, if it is known or assumed, and
    /// the IP address. One circuit leads to all peers with equal ones.
    fn node_at(&self, _address: Listener) -> Option<(IpAddr, u64)> {
        None
    }

    /// On circuits: as [`Self::node_at`], for the circuit that a link uses, or that is chosen for
    /// it. `peer`: where the peer is dialled. A peer that dials can state another address than that
    /// from which its request has come.
    fn node_of(&self, _link: LinkKey, peer: Option<Listener>) -> Option<(IpAddr, u64)> {
        peer.and_then(|peer| self.node_at(peer))
    }

    /// On circuits: the address to which the circuit for a link is dialled, if this request is
    /// accepted.
    fn source_of(&self, _held: &Self::Held, request: &Request) -> Listener {
        request.listener
    }

    /// The address from which a request has come: not one that it states, if the connection manager
    /// has another one.
    fn host_of(&self, _held: &Self::Held, request: &Request) -> IpAddr {
        request.listener.socket_addr().ip()
    }

    /// On circuits: whether all peers that are known are on one node.
    fn has_one_node(&self) -> bool {
        false
    }

    /// Accepts a request. [`Core::accepted`] follows when the reply was sent, not during this call.
    /// `peer`: where the peer is dialled; [`Self::free`] names this address.
    fn accept(&mut self, link: LinkKey, held: Self::Held, reply: &Reply, peer: Option<Listener>);

    /// Rejects a request.
    fn reject(&mut self, held: Self::Held, rejection: &Rejection);

    /// Whether an operation was posted later than another one: messages and requests that wait for
    /// a peer are in this order. `false`: as they are passed to the core.
    fn is_later(&self, _op: Self::Op, _than: Self::Op) -> bool {
        false
    }

    /// Posts the numbered packet of an operation.
    fn post(&mut self, link: LinkKey, header: Header, op: Self::Op, form: Form) -> Post;

    /// Posts a packet that has no number. `false`: as [`Post::Refused`]. `true`, also if the link
    /// has ended during the post: the peer has got the packet, or never gets it.
    fn control(&mut self, link: LinkKey, packet: &Packet) -> bool;

    /// Ends a link in any state: moves its queue pair to ERR, and passes what has arrived and what
    /// has completed to the core, and then [`Core::ended`], not during this call.
    ///
    /// On a circuit: nothing is posted any more. [`Core::half_ended`] follows when all requests of
    /// the link have completed, or can have no effect at the peer any more.
    fn end(&mut self, link: LinkKey);

    /// The peer posts nothing more on a link on a circuit, which is in the state Lingering. What
    /// has arrived is passed to the core, then the link accepts nothing any more, and then
    /// [`Core::ended`] follows, not during this call.
    fn close(&mut self, _link: LinkKey) {}

    /// The endpoint of the peer of a link is being closed.
    fn departs(&mut self, _link: LinkKey) {}

    /// What the peer posts on a link on a circuit has no effect any more, and it has not stated
    /// that it posts nothing. Moves the target through which it sends to ERR, so that it gets
    /// errors. [`Core::silenced`] follows for all links of the target, not during this call.
    fn silence(&mut self, _link: LinkKey) {}

    /// The device may still send the packet of an operation. [`Self::complete`] follows at once,
    /// but the memory of the packet must not change before its link has ended.
    fn keep_packet(&mut self, _op: Self::Op) {}

    /// An operation is complete. With an error its packet may have arrived or not.
    fn complete(&mut self, op: Self::Op, result: Result<()>);

    /// A numbered packet, each once and in the order of the peer. Returns the credit of it that is
    /// free at once; the rest is given back by [`Core::give_back`].
    fn deliver(&mut self, from: Origin, packet: &Packet, slot: Self::Slot) -> Credit;

    /// A packet has been handled; its memory can be posted again. Its credit is not given back by
    /// the caller: it used none.
    fn discard(&mut self, slot: Self::Slot);

    /// The operations of a peer fail, but those that `waiting` keeps. Those that the core has and
    /// that fail are passed to [`Self::complete`]; the caller completes its own ones, which the
    /// peer was held for, and releases none of them. Returns the number of its own operations that
    /// it keeps, which hold the peer as before.
    ///
    /// If the peer had a session, it has ended: messages of the peer that were delivered as RTS and
    /// are not complete are void. Their data must not be read any more, and [`Core::answer`]
    /// refuses answers. The credit of stored ones is given back by the caller.
    fn fail_peer(&mut self, peer: PeerKey, error: FiErrno, waiting: Unposted) -> u32;

    /// The connection block of this side for a link, which may not exist yet: an address that is a
    /// multiple of 8, and its rkey. [`RemoteAddr::NULL`]: none.
    fn block(&mut self, peer: PeerKey, link: LinkKey) -> (RemoteAddr, Rkey);

    /// Requests to the peer can be posted to this link, RMA included, until [`Self::down`]. `terms`
    /// are the peer's for this link. Called before the first packet is posted.
    fn up(&mut self, peer: PeerKey, link: LinkKey, terms: &Terms);

    /// The terms of the peer for a link have arrived. The peer can access the connection block of
    /// this side, and this side that of the peer.
    fn introduced(&mut self, _link: LinkKey, _terms: &Terms) {}

    /// Nothing can be posted to the link any more: it ends, or its eviction has begun. If the
    /// peer refuses the eviction, [`Self::up`] follows with the same link.
    fn down(&mut self, peer: PeerKey, link: LinkKey);

    /// On circuits: with `true`, notices of revocations, which other threads post, and returns of
    /// keys are posted to this link no more: CLOSE follows, or a drain, and the peer may end its
    /// side as soon as it has CLOSE. With `false`, or [`Self::up`], they are posted again.
    fn hold_own_requests(&mut self, _link: LinkKey, _holds: bool) {}

    /// Posts a request that has no effect, a WRITE of 0 bytes, unless an earlier one is under way.
    /// If the peer does not acknowledge it, the link breaks ([`Core::broken`]). Returns whether
    /// requests of the link are under way that must complete within some seconds, and none has
    /// completed since the last call.
    fn probe(&mut self, link: LinkKey) -> bool;

    /// An operation was sent to an address of this endpoint itself. The caller delivers it.
    fn loop_back(&mut self, op: Self::Op);

    /// A peer turned out to be another address of `of`; `None`: of this endpoint. Both keys are
    /// valid, and its operations were moved, or follow by [`Self::loop_back`].
    fn alias(&mut self, peer: PeerKey, of: Option<PeerKey>);

    /// Removes those of the peers from the list that the caller names: in operations, messages,
    /// receives or entries. The others are freed after this call, and their keys name other peers
    /// later: the caller forgets what it has of them. `address` is where a peer was dialled.
    fn free(&mut self, peers: &mut Vec<(PeerKey, Option<Listener>)>);
}

/// A source of random bits that an attacker cannot predict. Its errors are those of the system.
pub type Random = Box<dyn FnMut() -> Result<u64> + Send>;

/// Parameters of an endpoint.
pub struct Config {
    /// The endpoint's id: random.
    pub id: EndpointId,
    /// Where it listens.
    pub listener: Listener,
    /// Further addresses at which it listens. Peers learn the first 8.
    pub further: Vec<Listener>,
    /// Tag of its authorization key; 0: none.
    pub auth: u64,
    /// Random bits, for tokens.
    pub random: Random,
    /// Whether the application chooses all keys of this side.
    pub application_keys: bool,
    /// Whether links are on circuits (`docs/protocol-xrc.md`).
    pub circuits: bool,
    /// The device of a peer may execute atomics on the regions of this side.
    pub device_atomics: bool,
    /// The largest payload of EAGER that this endpoint sends or takes, in bytes.
    pub eager: u32,
    /// Dials that can be under way.
    pub dials: usize,
    /// Peers that can exist; a request of a further one is rejected.
    pub peers: usize,
    /// How long an address is dialled, in ns.
    pub timeout: u64,
    /// How long a dial to a peer with a session remains without answer before it is repeated, in
    /// ns.
    pub answer: u64,
    /// The period in which a silent peer is probed while something is awaited from it, in ns.
    /// `None`: never, because the device reports by itself that a peer has ended.
    pub beat: Option<u64>,
    /// How long the device of this side repeats a request that is not acknowledged, at least, in
    /// ns.
    pub retries: u64,
    /// How long a peer without links is kept, in ns: one with a session, and one that has got a
    /// token and may have begun a session. `u64::MAX`: for ever.
    pub idle: (u64, u64),
    /// The credit of the endpoint beyond the smallest windows.
    pub pool: Credit,
}

/// The session to which a packet belongs: its credit is given back to that session, or to the next
/// one of the peer, or to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The peer. It stays the same if its session ends.
    pub peer: PeerKey,
    pub(super) session: u32,
}

impl Origin {
    /// A message of the endpoint to itself, which has no session and uses no credit.
    pub(super) const fn of_itself(peer: PeerKey) -> Self {
        Self { peer, session: 0 }
    }

    /// A packet of a peer's first session.
    #[cfg(test)]
    pub(super) fn of_test(peer: PeerKey) -> Self {
        Self { peer, session: 0 }
    }
}

/// How a dial has ended without a reply or a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nothing listens at the address, or another program does.
    Refused,
    /// No answer, a rejection without private data of a process that listens, no route, or no
    /// resources on this side.
    Silent,
}

/// An operation to be sent.
#[derive(Clone, Copy, Debug)]
pub struct SendOp<O> {
    /// The caller's name of it.
    pub op: O,
    /// What it uses at the peer.
    pub uses: Uses,
    /// Whether it completes when the peer has processed it, rather than when it has arrived. The
    /// packet must have its flag ACK.
    pub ack: bool,
}

/// The state machine of an endpoint.
pub struct Core<I: Io> {
    pub(super) config: Config,
    pub(super) now: u64,
    /// The epoch of the next dial.
    epoch: Epoch,
    pub(super) peers: Slab<PeerMark, Peer>,
    pub(super) links: Slab<LinkMark, Link>,
    pub(super) ops: Table<I::Op>,
    pub(super) ids: HashMap<EndpointId, PeerKey>,
    pub(super) addresses: HashMap<Listener, PeerKey>,
    /// The addresses in [`Peer::further`], each with the number of peers that have stated it.
    pub(super) further: HashMap<Listener, u32>,
    /// The peer that is this endpoint itself: the first address of it that was used.
    pub(super) own: Option<PeerKey>,
    /// Counts the changes of what [`Self::source_address`] and [`Self::addresses`] return.
    names: u64,
    /// Addresses of peers besides [`Peer::address`]: those of their aliases, freed or not.
    others: HashMap<PeerKey, Vec<Listener>>,
    /// How many addresses [`Self::addresses`] has examined.
    #[cfg(test)]
    pub(super) examined: std::cell::Cell<usize>,
    pub(super) pool: Pool,
    /// What peers have that no `fi_addr_t` names, by the host from which they dial.
    pub(super) hosts: Hosts,
    /// Requests that wait until older links have ended: at most one per peer.
    pub(super) held: Vec<HeldRequest<I::Held>>,
    /// Links whose sessions have ended before their peers were able to learn it.
    orphans: Vec<Orphan>,
    /// Dials under way, and peers that wait for one.
    dials: usize,
    queue: VecDeque<PeerKey>,
    /// Peers that may have something to report.
    reports: Vec<PeerKey>,
    /// Peers with a time in [`self::peer::Dial`] or `close_at`.
    timers: Vec<PeerKey>,
    /// The earliest of these times, unless a time has changed since it was computed.
    earliest: Option<u64>,
    retimed: bool,
    /// When silent peers are probed.
    beat: Option<u64>,
    /// Peers that wait for a place for a link, and when room is made again.
    waiters: VecDeque<PeerKey>,
    room_at: Option<u64>,
    /// The peer whose turn it is to take a free place.
    turn: Option<PeerKey>,
    /// The peer to which a token was given.
    secrets: HashMap<Secret, PeerKey>,
    /// Where the next search for a peer to recall credit from begins.
    recall_from: usize,
    /// Peers whose state is to be advanced, instead of a recursion.
    changed: Vec<PeerKey>,
    /// Peers without links, and when they are examined next.
    idle: Vec<PeerKey>,
    free_at: Option<u64>,
    /// The count of sessions with which new peers begin: no peer that was freed has reached it.
    pub(super) session: u32,
    /// The endpoint is being closed ([`Self::leave`]).
    left: bool,
    /// Packets that violate the protocol.
    #[cfg(test)]
    pub(super) violations: u32,
}

impl<I: Io> Core<I> {
    /// An endpoint without peers.
    pub fn new(config: Config) -> Self {
        Self {
            pool: Pool::new(config.pool),
            config,
            now: 0,
            epoch: Epoch::FIRST,
            peers: Slab::new(),
            links: Slab::new(),
            ops: Table::new(),
            ids: HashMap::new(),
            addresses: HashMap::new(),
            further: HashMap::new(),
            own: None,
            names: 0,
            others: HashMap::new(),
            #[cfg(test)]
            examined: Default::default(),
            hosts: Hosts::new(),
            held: Vec::new(),
            orphans: Vec::new(),
            dials: 0,
            queue: VecDeque::new(),
            reports: Vec::new(),
            timers: Vec::new(),
            earliest: None,
            retimed: false,
            beat: None,
            waiters: VecDeque::new(),
            room_at: None,
            turn: None,
            secrets: HashMap::new(),
            recall_from: 0,
            changed: Vec::new(),
            idle: Vec::new(),
            free_at: None,
            session: 0,
            left: false,
            #[cfg(test)]
            violations: 0,
        }
    }

    /// The time of the calls that follow, in ns since any begin; it does not decrease.
    pub fn set_now(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// Sets the time from [`Io::now`]. Called where a call of the application begins a limit of
    /// time: such calls do not call [`Self::set_now`], and the last event can be long ago.
    pub(super) fn read_clock(&mut self, io: &I) {
        if let Some(now) = io.now() {
            self.set_now(now);
        }
    }

    /// The peer at an address; a new one if the address is unknown. Connects to nothing. But if a
    /// peer has stated the address as a further one, it is dialled ([`Self::is_doubtful`]), so that
    /// messages of that peer match receives from this address.
    ///
    /// # Errors
    /// `ENOMEM`: 2^24 peers.
    pub fn peer_at(&mut self, address: Listener) -> Result<PeerKey> {
        if let Some(peer) = self.addresses.get(&address) {
            return Ok(*peer);
        }
        let itself = self.is_own(address);
        let key = self.add_peer(Some(address), None)?;
        if let Some(peer) = self.peers.get_mut(key) {
            peer.itself = itself;
        }
        self.addresses.insert(address, key);
        if self.further.contains_key(&address) {
            self.names += 1;
            self.doubt(key);
        }
        Ok(key)
    }

    /// Whether a dial is to show which endpoint has the address of a peer: [`Self::flush`] begins
    /// it.
    pub fn is_doubtful(&self, peer: PeerKey) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.probe)
    }

    /// Whether this endpoint listens at the address.
    pub(super) fn is_own(&self, address: Listener) -> bool {
        address == self.config.listener || self.config.further.contains(&address)
    }

    pub(super) fn add_peer(
        &mut self,
        address: Option<Listener>,
        id: Option<EndpointId>,
    ) -> Result<PeerKey> {
        let mut peer = Peer::new(address, id);
        peer.session = self.session;
        self.peers.insert(peer).ok_or(FiErrno::ENOMEM)
    }

    /// The token that this side gives to a peer, drawn when the first request or reply needs it.
    ///
    /// # Errors
    /// Those of the source of random bits. `EAGAIN`: it returns the same bits again and again.
    pub(super) fn token(&mut self, key: PeerKey) -> Result<Secret> {
        let peer = self.peers.get_mut(key).ok_or(FiErrno::EINVAL)?;
        if let Some(token) = peer.gives {
            return Ok(token);
        }
        for _ in 0..DRAWS {
            let bits = (self.config.random)()?;
            if let Some(token) = Secret::new((bits >> 32) as u32)
                && !self.secrets.contains_key(&token)
            {
                self.secrets.insert(token, key);
                peer.gives = Some(token);
                return Ok(token);
            }
        }
        Err(FiErrno::EAGAIN)
    }

    /// The peer itself, or the one that it is an address of.
    #[inline]
    pub fn resolve(&self, mut peer: PeerKey) -> PeerKey {
        while let Some(of) = self.peers.get(peer).and_then(|peer| peer.alias) {
            peer = of;
        }
        peer
    }

    /// Whether a time has changed since the last [`Self::deadline`].
    #[inline]
    pub const fn is_retimed(&self) -> bool {
        self.retimed
    }

    /// Whether [`Self::flush`] may have something to report.
    #[inline]
    pub fn has_reports(&self) -> bool {
        !self.reports.is_empty()
    }

    /// Whether [`Self::leave`] was called.
    pub(super) fn has_left(&self) -> bool {
        self.left
    }

    /// How long an address is dialled.
    pub fn timeout(&self) -> std::time::Duration {
        std::time::Duration::from_nanos(self.config.timeout)
    }

    /// Whether packets to the peer can be posted: a dial is not needed.
    #[inline]
    pub fn is_up(&self, peer: PeerKey) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.out.is_some())
    }

    /// The link to which packets to the peer are posted.
    #[inline]
    pub fn out_link(&self, peer: PeerKey) -> Option<LinkKey> {
        self.peers.get(peer)?.out
    }

    /// The number of the next new packet to a peer.
    #[inline]
    pub(super) fn next_number(&self, peer: PeerKey) -> Number {
        self.peers
            .get(peer)
            .map_or(Number::default(), |peer| peer.next)
    }

    /// All numbered packets to a peer before this number were posted to the out-link, if the peer
    /// had not processed them. `None`: some are not posted again yet.
    pub(super) fn posted_until(&self, peer: PeerKey) -> Option<Number> {
        let peer = self.peers.get(peer)?;
        peer.repost.is_none().then_some(peer.next)
    }

    /// The first operation of the application to a peer that fulfils `is` and whose packet is not
    /// posted to the out-link.
    pub(super) fn first_unposted(
        &self,
        peer: PeerKey,
        is: impl Fn(I::Op) -> bool,
    ) -> Option<I::Op> {
        let peer = self.peers.get(peer)?;
        let from = |first| std::iter::successors(first, |op| List::next(&self.ops, *op));
        from(peer.repost)
            .chain(from(peer.waiting.first()))
            .filter_map(|op| Some(self.ops.get(op)?.op))
            .find(|op| is(*op))
    }

    /// Whether the peer is an address of this endpoint.
    pub(super) fn is_itself(&self, peer: PeerKey) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.itself)
    }

    /// The peer of a link.
    pub fn peer_of(&self, link: LinkKey) -> Option<PeerKey> {
        Some(self.links.get(link)?.peer)
    }

    /// The address at which a peer is dialled.
    pub fn address(&self, peer: PeerKey) -> Option<std::net::SocketAddr> {
        let address = self.peers.get(peer)?.address?;
        Some(address.socket_addr())
    }

    /// The address at which a peer is dialled, unless it leads to another peer with a session: a
    /// peer can state any address. While the address is in doubt it counts as the peer's, which may
    /// be the successor of the other one.
    pub fn source_address(&self, peer: PeerKey) -> Option<std::net::SocketAddr> {
        let address = self.peers.get(peer)?.address?;
        let at = self.addresses.get(&address).map(|at| self.resolve(*at));
        // the peer may have become an alias behind the message
        let of = self.resolve(peer);
        let other = at.filter(|at| *at != of);
        let taken = other.is_some_and(|other| self.session(other).is_some());
        (!taken).then(|| address.socket_addr())
    }

    /// Counts the changes of the addresses of peers: results of [`Self::source_address`] and
    /// [`Self::addresses`] are valid as long as the count is the same. If two peers state one
    /// address, no session begins at it before one of them is known to have it.
    pub const fn names(&self) -> u64 {
        self.names
    }

    /// All addresses of a peer, also those that it has stated and that lead to no other one.
    pub fn addresses(&self, peer: PeerKey) -> Vec<std::net::SocketAddr> {
        let Some(of) = self.peers.get(peer) else {
            return Vec::new();
        };
        let stated = of.further.iter().copied();
        let stated = stated.filter(|address| !self.addresses.contains_key(address));
        let mut all: Vec<Listener> = stated.collect();
        let leads = |address: &&Listener| {
            #[cfg(test)]
            self.examined.set(self.examined.get() + 1);
            let at = self.addresses.get(*address);
            at.is_some_and(|at| self.resolve(*at) == peer)
        };
        let others = self.others.get(&peer).into_iter().flatten();
        // its own address can have been that of an alias
        let others = others.filter(|other| Some(**other) != of.address);
        all.extend(of.address.iter().chain(others).filter(leads));
        all.into_iter().map(Listener::socket_addr).collect()
    }

    /// Number of links, connected or not.
    pub fn link_count(&self) -> usize {
        self.links.len()
    }

    /// Number of receives that must be posted, so that each packet that the peers may send finds
    /// one: the windows, five or six for the packets without number of each link, and two for the
    /// answers to each operation of the application, `answered` of which are not complete.
    pub fn receives_needed(&self, answered: usize) -> usize {
        let windows = self.pool.taken().slots as usize + SMALLEST.slots as usize * self.peers.len();
        let controls = if self.config.circuits { 6 } else { 5 };
        windows + controls * self.links.len() + 2 * answered.min(ANSWERS)
    }

    /// The endpoint for which operations are meant: that of the session, unless the session ends or
    /// the peer's address is in doubt.
    pub fn session(&self, peer: PeerKey) -> Option<EndpointId> {
        let peer = self.peers.get(self.resolve(peer))?;
        if peer.begun && !peer.ends && !peer.probe {
            peer.id
        } else {
            None
        }
    }

    /// Sends an operation behind the earlier ones to the peer, but in front of those that wait and
    /// are later ([`Io::is_later`]). It completes by [`Io::complete`], perhaps during this call.
    ///
    /// # Errors
    /// `EINVAL`: no such peer. `EAGAIN`: the table of operations has 2^24 entries; the caller's
    /// limit is smaller.
    pub fn send(&mut self, peer: PeerKey, send: SendOp<I::Op>, io: &mut I) -> Result<()> {
        let key = self.resolve(peer);
        if self.post_at_once(key, &send, io) {
            self.posted_one(key);
            return Ok(());
        }
        let peer = self.peers.get_mut(key).ok_or(FiErrno::EINVAL)?;
        let entry = Entry::new(send.op, send.uses, send.ack);
        let op = self.ops.insert(entry).ok_or(FiErrno::EAGAIN)?;
        let first = peer.is_next(send.uses);
        if let Some(out) = peer.out
            && first
            && self.is_open(out)
            && self.post_new(key, out, op, io)
        {
            self.posted_one(key);
            return Ok(());
        }
        let Some(peer) = self.peers.get_mut(key) else {
            return Ok(());
        };
        if let Some(entry) = self.ops.get_mut(op) {
            entry.doubts = peer.doubts;
        }
        match send.uses {
            // mostly the last of them
            Uses::Message(_) | Uses::Request(_) => {
                let later = |op, than| io.is_later(op, than);
                let mut list = List::of(op);
                peer.waiting.merge(&mut self.ops, &mut list, later);
            }
            Uses::Part(_) | Uses::Answer => peer.list(send.uses).push(&mut self.ops, op),
        }
        if peer.out.is_some() {
            self.pump(key, io);
        } else {
            peer.end_pause();
            self.advance(key, io);
            self.advance_changed(io);
        }
        Ok(())
    }

    /// Whether the session of a packet exists, and does not end with its links.
    pub fn is_current(&self, origin: Origin) -> bool {
        let peer = self.peers.get(origin.peer);
        peer.is_some_and(|peer| peer.session == origin.session && !peer.ends)
    }

    /// Sends the answer to a packet, if the session of the packet exists.
    ///
    /// # Errors
    /// `ECONNABORTED`: the session has ended, or ends with its links. As [`Self::send`].
    pub fn answer(&mut self, to: Origin, op: I::Op, io: &mut I) -> Result<()> {
        if !self.is_current(to) {
            return Err(FiErrno::ECONNABORTED);
        }
        let send = SendOp {
            op,
            uses: Uses::Answer,
            ack: false,
        };
        self.send(to.peer, send, io)
    }

    /// Begins an operation that needs a peer besides the packets of the core: RMA, or one that
    /// waits for CTS, DATA, FIN or RESULT. The peer is dialled for it, and its link is not evicted,
    /// until [`Self::release`] or [`Io::fail_peer`]. The core itself begins one for each message
    /// that it posts as RTS.
    pub fn hold(&mut self, peer: PeerKey, io: &mut I) {
        let key = self.resolve(peer);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.holds += 1;
            if peer.out.is_none() {
                peer.end_pause();
                self.advance(key, io);
                self.advance_changed(io);
            } else {
                self.await_answer();
            }
        }
    }

    /// The time of doubts about a peer's address ([`Unposted::KeptSince`]).
    pub(super) fn doubts(&self, peer: PeerKey) -> u32 {
        let peer = self.peers.get(self.resolve(peer));
        peer.map_or(0, |peer| peer.doubts)
    }

    /// An operation without packets has used the link of a peer: RMA.
    #[inline]
    pub(super) fn note_executed(&mut self, peer: PeerKey) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.executed = peer.executed.wrapping_add(1);
        }
    }

    /// Ends such an operation.
    pub fn release(&mut self, peer: PeerKey, io: &mut I) {
        let key = self.resolve(peer);
        if let Some(peer) = self.peers.get_mut(key) {
            debug_assert!(peer.holds > 0);
            peer.holds = peer.holds.saturating_sub(1);
            if peer.holds == 0 && peer.out.is_none() {
                // a dial may have become superfluous
                self.advance(key, io);
                self.advance_changed(io);
            }
        }
    }

    /// Whether a peer with an out-link waits for *processed* of packets that have arrived.
    pub fn owes(&self) -> bool {
        let owes = |peer: &Peer| peer.out.is_some() && peer.owes_ack;
        let mut next = self.peers.at_or_behind(0);
        while let Some(key) = next {
            if self.peers.get(key).is_some_and(owes) {
                return true;
            }
            next = self.peers.after(key);
        }
        false
    }

    /// The number of queue pairs to a peer.
    pub fn links_to(&self, peer: PeerKey) -> usize {
        let peer = self.peers.get(self.resolve(peer));
        peer.map_or(0, |peer| {
            usize::from(peer.own.is_some()) + usize::from(peer.accepted.is_some())
        })
    }
}
