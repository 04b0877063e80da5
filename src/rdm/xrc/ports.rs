//! What an endpoint on XRC has beside its links: the send queues of its circuits, the targets
//! through which its peers send, and the tags of its links.

#![allow(unsafe_code, reason = "posts requests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::circuit_cm::{InitiatorCm, TargetCm};
use super::circuit_queue::{CircuitQueue, Failing, Progress};
use super::circuits::Circuits;
use crate::conn::ConnectRequest;
use crate::errno::{FiErrno, Result};
use crate::mr::random;
use crate::rdm::core::link::LinkKey;
use crate::rdm::counts::Counts;
use crate::rdm::link::links::{LinkRecord, Links, Posted};
use crate::rdm::link::outlet::Outlet;
use crate::rdm::link::port::Port;
use crate::rdm::link::send_queue::Sent;
use crate::rdm::link::wr_id::WrId;
use crate::rdm::number_map::NumberMap;
use crate::rdm::table_keys::{CircuitKey, ReadKey};
use crate::verbs::{QpNumber, RemoteAddr, Rkey, SendOpcode, SendRequest, Sge, SrqNumber, Target};
use crate::wire::rdm::xrc::{CircuitNumber, LinkRequest, LinkTag, NodeId, OnCircuit};
use crate::wire::rdm::{EndpointId, Listener, Request};
use crate::xrc::XrcDomain;

/// A link to which nothing more is posted and whose requests may not have completed.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct HalfEnd {
    pub(in crate::rdm) link: LinkKey,
    /// When its end began, or when a request of its circuit was seen to have completed since.
    pub(in crate::rdm) since: Instant,
    pub(in crate::rdm) seen: Option<Progress>,
}

/// A circuit of a peer, as the peer has named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) struct OfPeer {
    pub(in crate::rdm) peer: EndpointId,
    pub(in crate::rdm) number: CircuitNumber,
    pub(in crate::rdm) initiator: QpNumber,
}

impl OfPeer {
    /// The circuit that a link request names.
    pub(in crate::rdm) fn of(request: &Request, circuit: &OnCircuit) -> Self {
        Self {
            peer: request.id,
            number: circuit.number,
            initiator: circuit.initiator,
        }
    }
}

/// A target that this endpoint holds or opens. Other endpoints of the node may hold it too.
#[derive(Debug)]
pub(in crate::rdm) struct HeldTarget {
    /// This endpoint's handle; `None`: it is being opened, or does not exist.
    pub(in crate::rdm) target: Option<Arc<Target>>,
    pub(in crate::rdm) cm: Arc<TargetCm>,
    /// Its circuit; `None`: not known. Certain if `target` is there.
    pub(in crate::rdm) of: Option<OfPeer>,
    /// The links through which the peer sends.
    pub(in crate::rdm) links: Vec<LinkKey>,
    /// Requests for links that wait until it is opened.
    pub(in crate::rdm) requests: Vec<(ConnectRequest, Box<LinkRequest>)>,
    /// When it was made, or its last link has ended.
    pub(in crate::rdm) loose_since: Instant,
    pub(in crate::rdm) failing: Option<Failing>,
}

impl HeldTarget {
    /// One that is to be opened.
    pub(in crate::rdm) fn opening(cm: Arc<TargetCm>, of: Option<OfPeer>) -> Self {
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
    pub(in crate::rdm) fn is_loose(&self) -> bool {
        self.links.is_empty() && self.requests.is_empty()
    }
}

/// See the module.
pub(in crate::rdm) struct Xrc {
    pub(in crate::rdm) circuits: Circuits,
    queues: Vec<Option<CircuitQueue>>,
    /// Circuits that are being ended.
    pub(in crate::rdm) ending: Vec<CircuitKey>,
    pub(in crate::rdm) half_ends: Vec<HalfEnd>,
    /// Accepted links that choose a circuit again at a time.
    pub(in crate::rdm) retries: Vec<(Instant, LinkKey)>,
    /// Links whose requests wait for their answers, and some whose exchanges have ended.
    pub(in crate::rdm) exchanging: Vec<LinkKey>,
    /// Links that this side has dialled, and when each ends if ATTACH has not arrived.
    pub(in crate::rdm) attaches: Vec<(Instant, LinkKey)>,
    /// Targets that the device could not open, and when it is asked again.
    pub(in crate::rdm) reopens: Vec<(Instant, Arc<TargetCm>, QpNumber, Option<QpNumber>)>,
    /// The link that was accepted last from each endpoint, if it exists.
    pub(in crate::rdm) accepted: HashMap<EndpointId, LinkKey>,
    pub(in crate::rdm) targets: HashMap<QpNumber, HeldTarget>,
    /// *failed circuit*, by the address of the peer, until the peer is freed: its newest circuit
    /// whose target has failed, and which was not stated yet.
    pub(in crate::rdm) failed: HashMap<Listener, CircuitNumber>,
    tags: NumberMap<LinkKey>,
    pub(in crate::rdm) node: NodeId,
    pub(in crate::rdm) id: EndpointId,
    pub(in crate::rdm) auth: u64,
    pub(in crate::rdm) srq: SrqNumber,
    pub(in crate::rdm) domain: Arc<XrcDomain>,
    pub(in crate::rdm) counts: Counts,
    /// The limit of the receive queue for which its event was requested; 0: none.
    pub(in crate::rdm) limit: u32,
    /// The driver was asked to request it.
    pub(in crate::rdm) arms: bool,
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
    pub(in crate::rdm) fn new(
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
            exchanging: Vec::new(),
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
    pub(in crate::rdm) fn use_target(&mut self, number: QpNumber, link: LinkKey) {
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
    pub(in crate::rdm) fn add_tag(&mut self, link: LinkKey) -> Result<LinkTag> {
        loop {
            // the low half of 64 random bits
            let tag = LinkTag::new(random()? as u32);
            if let Some(tag) = tag.filter(|tag| !self.tags.contains_key(&tag.get())) {
                self.tags.insert(tag.get(), link);
                return Ok(tag);
            }
        }
    }

    pub(in crate::rdm) fn remove_tag(&mut self, tag: LinkTag) {
        self.tags.remove(&tag.get());
    }

    /// The link of a packet.
    #[inline]
    pub(in crate::rdm) fn tagged(&self, tag: u32) -> Option<LinkKey> {
        self.tags.get(&tag).copied()
    }

    pub(in crate::rdm) fn add_queue(&mut self, key: CircuitKey, cm: Arc<InitiatorCm>) {
        if self.queues.len() <= key.place() {
            self.queues.resize_with(key.place() + 1, || None);
        }
        self.queues[key.place()] = Some(CircuitQueue::new(key, cm));
    }

    #[inline]
    pub(in crate::rdm) fn queue_mut(&mut self, key: CircuitKey) -> Option<&mut CircuitQueue> {
        let queue = self.queues.get_mut(key.place())?.as_mut()?;
        (queue.key() == key).then_some(queue)
    }

    pub(in crate::rdm) fn remove_queue(&mut self, key: CircuitKey) -> Option<CircuitQueue> {
        self.queue_mut(key)?;
        self.ending.retain(|ending| *ending != key);
        self.circuits.remove(key);
        self.queues.get_mut(key.place())?.take()
    }

    /// Circuits, and targets through which peers send. Targets without links are not counted: they
    /// are closed soon.
    pub(in crate::rdm) fn places_used(&self) -> usize {
        let used = self.targets.values().filter(|held| !held.is_loose());
        self.circuits.in_use() + used.count()
    }

    pub(in crate::rdm) fn queues(&self) -> impl Iterator<Item = &CircuitQueue> {
        self.queues.iter().flatten()
    }

    /// The connections of circuits whose targets are connected, each once.
    pub(in crate::rdm) fn proven(&mut self) -> impl Iterator<Item = Arc<InitiatorCm>> + '_ {
        self.queues.iter_mut().flatten().filter_map(|queue| {
            let first = queue.proven && !std::mem::replace(&mut queue.reported, queue.proven);
            first.then(|| Arc::clone(&queue.cm))
        })
    }

    /// Whether a circuit has requests and the driver does not watch it yet. Returns true once.
    #[inline]
    pub(in crate::rdm) fn take_look(&mut self) -> bool {
        std::mem::take(&mut self.look)
    }

    /// The circuits on which no request has completed for [`STALL`] although requests of several
    /// links are under way. Sets `watches` if the driver has to look again.
    pub(in crate::rdm) fn watch(
        &mut self,
        links: &Links,
        now: Instant,
        watches: &mut bool,
    ) -> Vec<CircuitKey> {
        let mut stalled = Vec::new();
        for queue in self.queues.iter_mut().flatten() {
            if queue.look(now, links.with_requests_besides(queue.key())) {
                stalled.push(queue.key());
            }
            *watches |= queue.watched && queue.failing.is_none();
        }
        self.counts.stalls += stalled.len() as u64;
        stalled
    }

    /// The keys of all circuits.
    pub(in crate::rdm) fn keys(&self) -> Vec<CircuitKey> {
        self.queues().map(CircuitQueue::key).collect()
    }

    /// Whether a packet of a link can be posted. If not, the link continues when its circuit has
    /// room, or when it has one.
    #[inline]
    pub(in crate::rdm) fn has_room(&mut self, link: &LinkRecord, numbered: bool) -> bool {
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
    pub(in crate::rdm) fn has_room_for_read(&mut self, link: &LinkRecord, most: usize) -> bool {
        let port = link.port.as_ref();
        let reads = port.map_or(0, |port| port.reads as usize);
        reads < most && self.has_room(link, true)
    }

    /// Executes a READ of `from` to `sge` in this call; with `true` its lkey is checked. Returns
    /// false if the READ has to be posted.
    ///
    /// # Safety
    /// The sge is writable.
    pub(in crate::rdm) unsafe fn read_at_once(
        &mut self,
        link: &LinkRecord,
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
    pub(in crate::rdm) unsafe fn post_read(
        &mut self,
        link: &mut LinkRecord,
        sge: Sge,
        from: (RemoteAddr, Rkey),
        read: ReadKey,
    ) -> Result<()> {
        let sges = [sge];
        let mut request = SendRequest::new(SendOpcode::Read, &sges);
        request.rdma(from);
        // SAFETY: the caller keeps the memory.
        let port = unsafe { self.post_request(link, &mut request, Sent::Read(read)) }?;
        port.reads += 1;
        Ok(())
    }

    /// Posts a WRITE of 0 bytes for a link, unless one is under way or there is no room. Another
    /// process may delay it for as long as that has no receive, so it does not count as a request
    /// that waits ([`Self::watch`]).
    pub(in crate::rdm) fn probe(&mut self, link: &mut LinkRecord) {
        let (key, open) = (link.key(), !link.is_ending());
        let port = link.port.as_mut().filter(|port| port.attached && open);
        let Some((port, inbox)) = port.and_then(|port| port.inbox.map(|inbox| (port, inbox)))
        else {
            return;
        };
        let circuit = port.circuit.filter(|_| !port.probing);
        let Some(queue) = circuit.and_then(|circuit| self.queue_mut(circuit)) else {
            return;
        };
        let room = queue.failing.is_none() && queue.queue.has_room(false);
        let Some((qp, circuit)) = queue.qp.as_ref().filter(|_| room).zip(circuit) else {
            return;
        };
        let mut request = SendRequest::new(SendOpcode::Write, &[]);
        request.to_srq(inbox.srq);
        let wr_id = |position| WrId::circuit(circuit, position);
        let record = (key, Sent::Probe);
        // SAFETY: no buffers.
        let posted = unsafe { queue.queue.post(qp, wr_id, &mut request, record) }.is_ok();
        port.under_way += u32::from(posted);
        port.probing = posted;
    }

    /// Where the other requests of a link are posted, if it may post. `None`: it has no circuit, or
    /// waits for ATTACH.
    pub(in crate::rdm) fn outlet(&mut self, port: &Port) -> Option<Outlet> {
        let inbox = port.inbox.filter(|_| port.attached)?;
        let queue = self.queue_mut(port.circuit?)?;
        let qp = queue.qp.as_ref().filter(|_| queue.failing.is_none())?;
        Some(Outlet::of_circuit(qp, inbox.srq, &queue.room))
    }

    /// Posts a packet: `inline` bytes, or the memory of a slot.
    ///
    /// # Errors
    /// `ENOTCONN`: the link has no circuit. The device's.
    #[inline]
    pub(in crate::rdm) fn post(
        &mut self,
        link: &mut LinkRecord,
        sge: Sge,
        inline: bool,
        solicited: bool,
        posted: Posted,
    ) -> Result<()> {
        let sges = [sge];
        let mut request = SendRequest::new(SendOpcode::SendImm, &sges);
        request.inline(inline).solicited(solicited);
        let sent = match posted {
            Posted::Numbered(number) => Sent::Numbered(number),
            Posted::Control(slot) => Sent::Control(slot),
        };
        // SAFETY: inline data is copied by the call; otherwise the sge is of a slot, which is kept
        // until the request has completed or the queue pair is destroyed.
        let port = unsafe { self.post_request(link, &mut request, sent) }?;
        port.used = true;
        Ok(())
    }

    /// Posts a packet or READ of a link on its circuit, to the peer's receive queue. A packet has
    /// the peer's tag as immediate data.
    ///
    /// # Errors
    /// As [`Self::post`].
    ///
    /// # Safety
    /// As [`SendQueue::post`](crate::rdm::link::send_queue::SendQueue::post).
    #[inline(always)]
    unsafe fn post_request<'a>(
        &mut self,
        link: &'a mut LinkRecord,
        request: &mut SendRequest<'_>,
        sent: Sent,
    ) -> Result<&'a mut Port> {
        let key = link.key();
        let port = link.port.as_mut().ok_or(FiErrno::ENOTCONN)?;
        let inbox = port.inbox.ok_or(FiErrno::ENOTCONN)?;
        let circuit = port.circuit.ok_or(FiErrno::ENOTCONN)?;
        let queue = self.queue_mut(circuit).ok_or(FiErrno::ENOTCONN)?;
        let qp = queue.qp.as_ref().ok_or(FiErrno::ENOTCONN)?;
        request.to_srq(inbox.srq);
        if !matches!(sent, Sent::Read(_)) {
            request.imm(inbox.tag.get());
        }
        let wr_id = |position| WrId::circuit(circuit, position);
        // SAFETY: the caller promises for the buffers.
        unsafe { queue.queue.post(qp, wr_id, request, (key, sent)) }?;
        let unwatched = queue.note_posted();
        port.under_way += 1;
        self.look |= unwatched;
        Ok(port)
    }
}
