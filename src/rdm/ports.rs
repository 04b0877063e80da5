//! What an endpoint on XRC has beside its links: the send queues of its circuits, the targets
//! through which its peers send, and the tags of its links.

#![allow(unsafe_code, reason = "posts requests")]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::circuit_cm::{InitiatorCm, LinkSidr, TargetCm};
use super::circuits::{CircuitKey, Circuits};
use super::counts::Counts;
use super::link::LinkKey;
use super::link_end::{Outlet, Room};
use super::links::{LinkQp, Posted, WrId};
use super::number_map::NumberMap;
use super::pulls::ReadKey;
use super::send_queue::{SendQueue, Sent};
use crate::conn::ConnectRequest;
use crate::errno::{FiErrno, Result};
use crate::mr::random;
use crate::verbs::{
    Qp, QpNumber, RemoteAddr, Rkey, SendOpcode, SendRequest, Sge, SrqNumber, Target,
};
use crate::wire::rdm::xrc::{CircuitNumber, Inbox, LinkRequest, LinkTag, NodeId, OnCircuit};
use crate::wire::rdm::{EndpointId, Listener, Request};
use crate::xrc::XrcDomain;

/// How long a circuit without links is kept. If both sides of several peers dial at once, links end
/// and others follow.
pub(super) const UNUSED: Duration = Duration::from_millis(100);
/// After this time without an answer to a circuit request, another peer is asked for one; the next
/// one after twice this time, and so on.
const SECOND: Duration = Duration::from_millis(100);

/// A circuit on which no request completes for this time, while several links have some, is ended.
const STALL: Duration = Duration::from_secs(2);
/// The period at which the driver looks at circuits with requests.
pub(super) const WATCH: Duration = Duration::from_millis(500);

/// Size of the send queue of a circuit.
pub(super) const CIRCUIT_DEPTH: usize = 256;

/// Where the packets of a link go, and whence they come.
#[derive(Debug)]
pub(super) struct Port {
    /// The tag of the packets to this side.
    pub(super) tag: LinkTag,
    /// Where the peer receives.
    pub(super) inbox: Option<Inbox>,
    /// The circuit that the link uses or waits for.
    pub(super) circuit: Option<CircuitKey>,
    /// The target through which the peer sends.
    pub(super) from: Option<QpNumber>,
    /// Packets can be posted: HELLO, at the dialler; at the acceptor ATTACH was posted.
    pub(super) attached: bool,
    /// A packet was posted or has arrived.
    pub(super) used: bool,
    /// Number of posted packets, probes and READs of messages that have not completed, and of the
    /// READs among them.
    pub(super) under_way: u32,
    pub(super) reads: u32,
    /// A probe has not completed.
    pub(super) probing: bool,
    /// The listening address of the peer, and its endpoint if that is known. At the side that
    /// accepts, the IP address is that from which the connection manager has got the request.
    pub(super) address: Listener,
    /// The core has its peer at another address, which another request has stated, so nothing but the
    /// end of the link makes this side forget the node at [`Self::address`], and no request states
    /// *failed circuit* to it.
    pub(super) forgets: bool,
    pub(super) peer: Option<EndpointId>,
    /// The peer's node, at the side that accepts.
    pub(super) node: Option<NodeId>,
    /// The request, at the side that dials, and its exchange with the limit of its time.
    pub(super) request: Option<Request>,
    pub(super) exchange: Option<(Arc<LinkSidr>, Instant)>,
    /// The request and the reply to it, at the side that accepts: a repeated request gets the same
    /// reply.
    pub(super) reply: Option<Box<(LinkRequest, Vec<u8>)>>,
    /// When the side that accepts gives up to dial its circuit, and how long it waits before the
    /// next attempt.
    pub(super) retries: Option<(Instant, Duration)>,
}

impl Port {
    pub(super) fn new(tag: LinkTag, address: Listener) -> Self {
        Self {
            tag,
            inbox: None,
            circuit: None,
            from: None,
            attached: false,
            used: false,
            under_way: 0,
            reads: 0,
            probing: false,
            address,
            forgets: false,
            peer: None,
            node: None,
            request: None,
            exchange: None,
            reply: None,
            retries: None,
        }
    }
}

/// The end of a circuit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failing {
    pub(super) since: Instant,
    /// The initiator is in its error state.
    pub(super) done: bool,
}

/// The requests of a circuit when the driver looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    /// The position of the first one that has not completed.
    first: u16,
    /// None was under way.
    empty: bool,
}

/// The initiator of a circuit.
#[derive(Debug)]
pub(super) struct CircuitQueue {
    key: CircuitKey,
    pub(super) cm: Arc<InitiatorCm>,
    pub(super) qp: Option<Arc<Qp>>,
    pub(super) queue: SendQueue<LinkKey>,
    /// The requests besides packets.
    pub(super) room: Arc<Room>,
    /// Links to which room was refused, in this order.
    waiting: VecDeque<LinkKey>,
    /// The link that has the next free place, and whether it has used it.
    turn: Option<(LinkKey, bool)>,
    /// Until when it is kept without links.
    pub(super) unused_until: Option<Instant>,
    /// Links that post to the circuit.
    pub(super) users: usize,
    pub(super) failing: Option<Failing>,
    /// When its dial began.
    pub(super) dialled: Instant,
    /// When a further circuit is dialled for a link that waits for this one.
    pub(super) second_at: Instant,
    /// How long the next one is awaited.
    pub(super) pause: Duration,
    /// A request has completed, so the target is connected; [`Xrc::proven`] has returned it.
    pub(super) proven: bool,
    told: bool,
    /// The driver watches the progress of requests.
    watched: bool,
    /// What the driver saw at its last look, and since when it has seen the same.
    stands: Option<(Seen, Instant)>,
}

impl CircuitQueue {
    fn new(key: CircuitKey, cm: Arc<InitiatorCm>) -> Self {
        let now = Instant::now();
        Self {
            key,
            cm,
            qp: None,
            queue: SendQueue::new(CIRCUIT_DEPTH, 1),
            room: Arc::default(),
            waiting: VecDeque::new(),
            turn: None,
            unused_until: None,
            users: 0,
            failing: None,
            dialled: now,
            second_at: now + SECOND,
            pause: SECOND * 2,
            proven: false,
            told: false,
            watched: false,
            stands: None,
        }
    }

    pub(super) const fn key(&self) -> CircuitKey {
        self.key
    }

    /// Whether nothing of the circuit is under way any more.
    pub(super) fn is_flushed(&self) -> bool {
        let done = self.failing.is_some_and(|failing| failing.done);
        done && self.queue.is_empty() && self.room.is_empty()
    }
}

/// A circuit of a peer, as the peer has named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OfPeer {
    pub(super) peer: EndpointId,
    pub(super) number: CircuitNumber,
    pub(super) initiator: QpNumber,
}

impl OfPeer {
    /// The circuit that a link request names.
    pub(super) fn of(request: &Request, on: &OnCircuit) -> Self {
        Self {
            peer: request.id,
            number: on.number,
            initiator: on.initiator,
        }
    }
}

/// A target that this endpoint holds or opens. Other endpoints of the node may hold it too.
#[derive(Debug)]
pub(super) struct HeldTarget {
    /// This endpoint's handle; `None`: it is being opened, or does not exist.
    pub(super) target: Option<Arc<Target>>,
    pub(super) cm: Arc<TargetCm>,
    /// Its circuit; `None`: not known. Certain if `target` is there.
    pub(super) of: Option<OfPeer>,
    /// The links through which the peer sends.
    pub(super) links: Vec<LinkKey>,
    /// Requests for links that wait until it is opened.
    pub(super) requests: Vec<(ConnectRequest, Box<LinkRequest>)>,
    /// When it was made, or its last link has ended.
    pub(super) loose_since: Instant,
    pub(super) failing: Option<Failing>,
}

impl HeldTarget {
    /// One that is to be opened.
    pub(super) fn opening(cm: Arc<TargetCm>, of: Option<OfPeer>) -> Self {
        Self {
            target: None,
            cm,
            of,
            links: Vec::new(),
            requests: Vec::new(),
            loose_since: Instant::now(),
            failing: None,
        }
    }

    /// Whether nothing needs it.
    pub(super) fn is_loose(&self) -> bool {
        self.links.is_empty() && self.requests.is_empty()
    }
}

/// See the module.
pub(super) struct Xrc {
    pub(super) circuits: Circuits,
    queues: Vec<Option<CircuitQueue>>,
    /// Circuits that are being ended.
    pub(super) ending: Vec<CircuitKey>,
    /// Links to which nothing more is posted and whose requests may not have completed, with the
    /// begin of their end.
    pub(super) half_ends: Vec<(LinkKey, Instant)>,
    /// Accepted links that choose a circuit again at a time.
    pub(super) retries: Vec<(Instant, LinkKey)>,
    /// Links that this side has dialled, and when each ends if ATTACH has not arrived.
    pub(super) attaches: Vec<(Instant, LinkKey)>,
    /// Targets that the device could not open, and when it is asked again.
    pub(super) reopens: Vec<(Instant, Arc<TargetCm>, QpNumber, Option<QpNumber>)>,
    /// The link that was accepted last from each endpoint, if it exists.
    pub(super) accepted: HashMap<EndpointId, LinkKey>,
    pub(super) targets: HashMap<QpNumber, HeldTarget>,
    /// *failed circuit*, by the address of the peer, until the peer is freed: its newest circuit
    /// whose target has failed, and which was not stated yet.
    pub(super) failed: HashMap<Listener, CircuitNumber>,
    tags: NumberMap<LinkKey>,
    pub(super) node: NodeId,
    pub(super) id: EndpointId,
    pub(super) auth: u64,
    pub(super) srq: SrqNumber,
    pub(super) domain: Arc<XrcDomain>,
    pub(super) counts: Counts,
    /// The limit of the receive queue for which its event was requested; 0: none.
    pub(super) limit: u32,
    /// The driver was asked to request it.
    pub(super) arms: bool,
    /// A circuit has got a request that is not watched.
    look: bool,
}

impl std::fmt::Debug for Xrc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Xrc").finish_non_exhaustive()
    }
}

impl Xrc {
    /// Without circuits. `srq`: the shared receive queue of the endpoint, in `domain`.
    pub(super) fn new(
        domain: Arc<XrcDomain>,
        srq: SrqNumber,
        (id, auth): (EndpointId, u64),
    ) -> Self {
        let node = NodeId::new(domain.node().get());
        Self {
            circuits: Circuits::new(),
            queues: Vec::new(),
            ending: Vec::new(),
            half_ends: Vec::new(),
            retries: Vec::new(),
            attaches: Vec::new(),
            reopens: Vec::new(),
            accepted: HashMap::new(),
            targets: HashMap::new(),
            failed: HashMap::new(),
            tags: NumberMap::default(),
            node,
            id,
            auth,
            srq,
            domain,
            counts: Counts::default(),
            limit: 0,
            arms: false,
            look: false,
        }
    }

    /// The peer sends on a link through a target, which is held or being opened.
    pub(super) fn use_target(&mut self, number: QpNumber, link: LinkKey) {
        if let Some(held) = self.targets.get_mut(&number) {
            held.links.push(link);
            self.counts.count_target(number);
        }
        self.counts.targets_most = self.counts.targets_most.max(self.targets.len());
    }

    /// A tag for the packets of a link.
    ///
    /// # Errors
    /// Those of getrandom(2).
    pub(super) fn add_tag(&mut self, link: LinkKey) -> Result<LinkTag> {
        loop {
            // the low half of 64 random bits
            let tag = LinkTag::new(random()? as u32);
            if let Some(tag) = tag.filter(|tag| !self.tags.contains_key(&tag.get())) {
                self.tags.insert(tag.get(), link);
                return Ok(tag);
            }
        }
    }

    pub(super) fn remove_tag(&mut self, tag: LinkTag) {
        self.tags.remove(&tag.get());
    }

    /// The link of a packet.
    #[inline]
    pub(super) fn tagged(&self, tag: u32) -> Option<LinkKey> {
        self.tags.get(&tag).copied()
    }

    pub(super) fn add_queue(&mut self, key: CircuitKey, cm: Arc<InitiatorCm>) {
        if self.queues.len() <= key.place() {
            self.queues.resize_with(key.place() + 1, || None);
        }
        self.queues[key.place()] = Some(CircuitQueue::new(key, cm));
    }

    #[inline]
    pub(super) fn queue_mut(&mut self, key: CircuitKey) -> Option<&mut CircuitQueue> {
        let queue = self.queues.get_mut(key.place())?.as_mut()?;
        (queue.key == key).then_some(queue)
    }

    pub(super) fn remove_queue(&mut self, key: CircuitKey) -> Option<CircuitQueue> {
        self.queue_mut(key)?;
        self.ending.retain(|ending| *ending != key);
        self.circuits.remove(key);
        self.queues.get_mut(key.place())?.take()
    }

    /// Circuits, and targets through which peers send. Targets without links are not counted: they
    /// are closed soon.
    pub(super) fn places_used(&self) -> usize {
        let used = self.targets.values().filter(|held| !held.is_loose());
        self.circuits.in_use() + used.count()
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &CircuitQueue> {
        self.queues.iter().flatten()
    }

    /// The connections of circuits whose targets are connected, each once.
    pub(super) fn proven(&mut self) -> impl Iterator<Item = Arc<InitiatorCm>> + '_ {
        self.queues.iter_mut().flatten().filter_map(|queue| {
            let first = queue.proven && !std::mem::replace(&mut queue.told, queue.proven);
            first.then(|| Arc::clone(&queue.cm))
        })
    }

    /// Whether a circuit has requests and the driver does not watch it yet. Returns true once.
    #[inline]
    pub(super) fn take_look(&mut self) -> bool {
        std::mem::take(&mut self.look)
    }

    /// The circuits on which no request has completed for [`STALL`] although requests of several
    /// links are under way. Sets `watches` if the driver has to look again.
    pub(super) fn watch(&mut self, now: Instant, watches: &mut bool) -> Vec<CircuitKey> {
        let mut stalled = Vec::new();
        for queue in self.queues.iter_mut().flatten() {
            if queue.look(now) {
                stalled.push(queue.key);
            }
            *watches |= queue.watched && queue.failing.is_none();
        }
        self.counts.stalls += stalled.len() as u64;
        stalled
    }

    /// The keys of all circuits.
    pub(super) fn keys(&self) -> Vec<CircuitKey> {
        self.queues().map(|queue| queue.key).collect()
    }

    /// Whether a packet of a link can be posted. If not, the link continues when its circuit has
    /// room, or when it has one.
    #[inline]
    pub(super) fn has_room(&mut self, link: &LinkQp, numbered: bool) -> bool {
        let (key, open) = (link.key(), !link.is_ending());
        let Some(port) = link.port.as_ref().filter(|port| port.attached && open) else {
            return false;
        };
        let Some(queue) = port.circuit.and_then(|circuit| self.queue_mut(circuit)) else {
            return false;
        };
        let open = queue.qp.is_some() && queue.failing.is_none();
        if open && queue.queue.has_room(numbered) && queue.has_turn(key, port.under_way, numbered) {
            return true;
        }
        queue.wait(key);
        false
    }

    /// As [`Self::has_room`], for a READ of a message. At most `most` of the link are under way.
    pub(super) fn has_room_for_read(&mut self, link: &LinkQp, most: usize) -> bool {
        let port = link.port.as_ref();
        let reads = port.map_or(0, |port| port.reads as usize);
        reads < most && self.has_room(link, true)
    }

    /// Executes a READ of `from` to `sge` in this call; with `true` its lkey is checked. Returns
    /// false if the READ has to be posted.
    ///
    /// # Safety
    /// The sge is writable.
    pub(super) unsafe fn read_at_once(
        &mut self,
        link: &LinkQp,
        sge: (&Sge, bool),
        from: (RemoteAddr, Rkey),
    ) -> bool {
        let port = link
            .port
            .as_ref()
            .filter(|port| port.attached && !link.is_ending());
        let Some(port) = port else {
            return false;
        };
        let queue = port.circuit.and_then(|circuit| self.queue_mut(circuit));
        let (Some(queue), Some(inbox)) = (queue, port.inbox) else {
            return false;
        };
        let Some(qp) = queue.qp.as_ref().filter(|_| queue.failing.is_none()) else {
            return false;
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { qp.execute(SendOpcode::Read, sge, from, Some(inbox.srq)) }
    }

    /// Posts a READ of `from` to `sge`.
    ///
    /// # Errors
    /// As [`Self::post`].
    ///
    /// # Safety
    /// The sge is writable until the READ has completed or the queue pair is destroyed.
    pub(super) unsafe fn post_read(
        &mut self,
        link: &mut LinkQp,
        sge: Sge,
        from: (RemoteAddr, Rkey),
        read: ReadKey,
    ) -> Result<()> {
        let key = link.key();
        let port = link.port.as_mut().ok_or(FiErrno::ENOTCONN)?;
        let inbox = port.inbox.ok_or(FiErrno::ENOTCONN)?;
        let circuit = port.circuit.ok_or(FiErrno::ENOTCONN)?;
        let on = self.queue_mut(circuit).ok_or(FiErrno::ENOTCONN)?;
        let qp = on.qp.as_ref().ok_or(FiErrno::ENOTCONN)?;
        let sges = [sge];
        let mut request = SendRequest::new(SendOpcode::Read, &sges);
        request.rdma(from).to_srq(inbox.srq);
        let wr_id = |position| WrId::circuit(circuit, position);
        let record = (key, Sent::Read(read));
        // SAFETY: the caller keeps the memory.
        unsafe { on.queue.post(qp, wr_id, &mut request, record) }?;
        let unwatched = on.note_posted();
        port.under_way += 1;
        port.reads += 1;
        self.look |= unwatched;
        Ok(())
    }

    /// Posts a WRITE of 0 bytes for a link, unless one is under way or there is no room. Another
    /// process may delay it for as long as that has no receive, so it does not count as a request
    /// that waits ([`Self::watch`]).
    pub(super) fn probe(&mut self, link: &mut LinkQp) {
        let (key, open) = (link.key(), !link.is_ending());
        let port = link.port.as_mut().filter(|port| port.attached && open);
        let Some((port, inbox)) = port.and_then(|port| port.inbox.map(|inbox| (port, inbox)))
        else {
            return;
        };
        let circuit = port.circuit.filter(|_| !port.probing);
        let Some(on) = circuit.and_then(|circuit| self.queue_mut(circuit)) else {
            return;
        };
        let room = on.failing.is_none() && on.queue.has_room(false);
        let Some((qp, circuit)) = on.qp.as_ref().filter(|_| room).zip(circuit) else {
            return;
        };
        let mut request = SendRequest::new(SendOpcode::Write, &[]);
        request.to_srq(inbox.srq);
        let wr_id = |position| WrId::circuit(circuit, position);
        let record = (key, Sent::Probe);
        // SAFETY: no buffers.
        let posted = unsafe { on.queue.post(qp, wr_id, &mut request, record) }.is_ok();
        port.under_way += u32::from(posted);
        port.probing = posted;
    }

    /// Where the other requests of a link are posted, if it may post. `None`: it has no circuit, or
    /// waits for ATTACH.
    pub(super) fn outlet(&mut self, port: &Port) -> Option<Outlet> {
        let inbox = port.inbox.filter(|_| port.attached)?;
        let on = self.queue_mut(port.circuit?)?;
        let qp = on.qp.as_ref().filter(|_| on.failing.is_none())?;
        Some(Outlet::of_circuit(qp, inbox.srq, &on.room))
    }

    /// Posts a packet: `inline` bytes, or the memory of a slot.
    ///
    /// # Errors
    /// `ENOTCONN`: the link has no circuit. The device's.
    #[inline]
    pub(super) fn post(
        &mut self,
        link: &mut LinkQp,
        sge: Sge,
        inline: bool,
        solicited: bool,
        posted: Posted,
    ) -> Result<()> {
        let key = link.key();
        let port = link.port.as_mut().ok_or(FiErrno::ENOTCONN)?;
        let inbox = port.inbox.ok_or(FiErrno::ENOTCONN)?;
        let circuit = port.circuit.ok_or(FiErrno::ENOTCONN)?;
        let on = self.queue_mut(circuit).ok_or(FiErrno::ENOTCONN)?;
        let qp = on.qp.as_ref().ok_or(FiErrno::ENOTCONN)?;
        let sges = [sge];
        let mut request = SendRequest::new(SendOpcode::SendImm, &sges);
        request
            .imm(inbox.tag.get())
            .to_srq(inbox.srq)
            .inline(inline)
            .solicited(solicited);
        let sent = match posted {
            Posted::Numbered(number) => Sent::Numbered(number),
            Posted::Control(slot) => Sent::Control(slot),
        };
        let wr_id = |position| WrId::circuit(circuit, position);
        // SAFETY: inline data is copied by the call; otherwise the sge is of a slot, which is kept
        // until the request has completed or the queue pair is destroyed.
        unsafe { on.queue.post(qp, wr_id, &mut request, (key, sent)) }?;
        let unwatched = on.note_posted();
        port.used = true;
        port.under_way += 1;
        self.look |= unwatched;
        Ok(())
    }
}

impl CircuitQueue {
    /// The link that has its turn has used it. Returns whether the requests were not watched.
    #[inline]
    fn note_posted(&mut self) -> bool {
        if let Some((_, used)) = &mut self.turn {
            *used = true;
        }
        !std::mem::replace(&mut self.watched, true)
    }

    /// The driver looks at the requests. Returns whether none has completed for [`STALL`] although
    /// requests of several links are under way. A circuit is watched until it had no request and
    /// completed none for [`WATCH`]: otherwise the posts of a circuit whose requests complete at
    /// once would wake the driver again and again.
    fn look(&mut self, now: Instant) -> bool {
        if self.failing.is_some() || !self.watched {
            return false;
        }
        let seen = Seen {
            first: self.queue.position(),
            empty: self.queue.is_empty(),
        };
        let since = match self.stands {
            Some((before, since)) if before == seen => since,
            _ => now,
        };
        self.stands = Some((seen, since));
        if seen.empty {
            if now >= since + WATCH {
                (self.watched, self.stands) = (false, None);
            }
            return false;
        }
        let mut owners = self.queue.owners();
        let first = owners.next();
        now >= since + STALL && owners.any(|of| Some(of) != first)
    }

    /// Lists a link that continues when there is room.
    fn wait(&mut self, link: LinkKey) {
        if !self.waiting.contains(&link) {
            self.waiting.push_back(link);
        }
    }

    /// Whether a link waits for room.
    pub(super) fn is_waiting(&self, link: LinkKey) -> bool {
        self.waiting.contains(&link)
    }

    /// Whether a link with so many requests under way may use a free place. Links that wait get
    /// places in turn, one each; no link has more than half of them, unless it is the only one.
    /// Packets without number have places of their own.
    fn has_turn(&self, link: LinkKey, under_way: u32, numbered: bool) -> bool {
        if !numbered {
            return true;
        }
        let share = self.users < 2 || (under_way as usize) < CIRCUIT_DEPTH / 2;
        share
            && match self.turn {
                Some((of, used)) => of == link && (!used || self.waiting.is_empty()),
                None => self.waiting.is_empty(),
            }
    }

    /// The link that waits for the longest time, if there is room: it has the next place until
    /// [`Self::end_turn`].
    pub(super) fn next_turn(&mut self) -> Option<LinkKey> {
        if !self.queue.has_room(true) {
            return None;
        }
        let link = self.waiting.pop_front()?;
        self.turn = Some((link, false));
        Some(link)
    }

    /// Returns whether the link has used its place.
    pub(super) fn end_turn(&mut self) -> bool {
        self.turn.take().is_some_and(|(_, used)| used)
    }

    /// Number of links that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::rdm::slab::Slab;

    fn queue() -> CircuitQueue {
        let key = Slab::new().insert(()).unwrap();
        CircuitQueue::new(key, InitiatorCm::new(&Weak::new(), key))
    }

    #[test]
    fn links_that_wait_get_places_in_turn() {
        let mut links = Slab::new();
        let [a, b, c] = [(), (), ()].map(|()| links.insert(()).unwrap());
        let mut queue = queue();
        queue.users = 3;
        assert!(queue.has_turn(a, 0, true), "no link waits");
        for link in [a, b, a] {
            queue.wait(link);
        }
        assert_eq!(queue.waiting(), 2);
        // not before those that wait, apart from packets with places of their own
        assert!(!queue.has_turn(c, 0, true) && queue.has_turn(c, 0, false));
        assert_eq!(queue.next_turn(), Some(a));
        assert!(queue.has_turn(a, 0, true) && !queue.has_turn(b, 0, true));
        queue.turn = Some((a, true));
        assert!(!queue.has_turn(a, 0, true), "one place");
        queue.wait(a);
        assert!(queue.end_turn());
        assert_eq!(queue.next_turn(), Some(b));
        // it needs none
        assert!(!queue.end_turn());
        assert_eq!(queue.next_turn(), Some(a));
        queue.turn = Some((a, true));
        assert!(queue.has_turn(a, 0, true), "no other link waits");
    }

    /// A request of a link was posted. Returns whether the driver is woken.
    fn posts(queue: &mut CircuitQueue, link: LinkKey) -> bool {
        queue.queue.record(link, Sent::Control(None));
        queue.note_posted()
    }

    fn completes(queue: &mut CircuitQueue) {
        assert!(queue.queue.take_completed(queue.queue.position()).is_some());
    }

    #[test]
    fn the_driver_is_woken_once_while_requests_complete_at_once() {
        let link = Slab::new().insert(()).unwrap();
        let mut queue = queue();
        let begin = Instant::now();
        assert!(posts(&mut queue, link), "it begins to watch");
        for n in 0..2_000 {
            completes(&mut queue);
            assert!(!queue.look(begin + WATCH * n / 500));
            assert!(!posts(&mut queue, link), "after {n} requests");
        }
        completes(&mut queue);
        let end = begin + WATCH * 4;
        assert!(!queue.look(end) && queue.watched);
        assert!(!queue.look(end + WATCH / 2) && queue.watched);
        assert!(!queue.look(end + WATCH) && !queue.watched);
        assert!(posts(&mut queue, link), "it was not watched");
    }

    #[test]
    fn a_circuit_stalls_when_requests_of_several_links_do_not_complete() {
        let mut links = Slab::new();
        let [a, b] = [(), ()].map(|()| links.insert(()).unwrap());
        let mut queue = queue();
        let begin = Instant::now();
        posts(&mut queue, a);
        completes(&mut queue);
        assert!(!queue.look(begin));
        posts(&mut queue, a);
        // the first request is as old as the look that has seen it
        let begin = begin + WATCH - Duration::from_millis(1);
        assert!(!queue.look(begin));
        assert!(
            !queue.look(begin + STALL * 2),
            "one link waits for its peer alone"
        );
        posts(&mut queue, b);
        let early = begin + STALL - Duration::from_millis(1);
        assert!(queue.look(begin + STALL) && !queue.look(early));
        completes(&mut queue);
        assert!(!queue.look(begin + STALL * 3), "a request has completed");
        posts(&mut queue, a);
        assert!(queue.look(begin + STALL * 4));
        queue.failing = Some(Failing {
            since: begin,
            done: false,
        });
        assert!(!queue.look(begin + STALL * 5), "it ends already");
    }

    #[test]
    fn a_link_has_half_of_a_shared_queue() {
        let mut links = Slab::new();
        let link = links.insert(()).unwrap();
        let mut queue = queue();
        let half = CIRCUIT_DEPTH as u32 / 2;
        for (users, under_way, may) in [(1, half, true), (2, half - 1, true), (2, half, false)] {
            queue.users = users;
            assert_eq!(
                queue.has_turn(link, under_way, true),
                may,
                "{users} {under_way}"
            );
        }
    }
}
