//! What an endpoint on XRC has beside its links: the send queues of its circuits, the targets
//! through which its peers send, and the tags of its links.

#![allow(unsafe_code, reason = "posts requests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::circuit_cm::{InitiatorCm, LinkSidr, TargetCm};
use super::circuits::{CircuitKey, Circuits};
use super::link::LinkKey;
use super::links::{LinkQp, Posted, WrId};
use super::number_map::NumberMap;
use super::send_queue::{SendQueue, Sent};
use crate::errno::{FiErrno, Result};
use crate::mr::random;
use crate::verbs::{Qp, QpNumber, SendOpcode, SendRequest, Sge, SrqNumber, Target, Xrcd};
use crate::wire::rdm::xrc::{CircuitNumber, Inbox, LinkRequest, LinkTag, NodeId};
use crate::wire::rdm::{EndpointId, Listener, Request};

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
    /// Number of posted packets that have not completed.
    pub(super) under_way: u32,
    /// The listening address of the peer, and its endpoint if that is known.
    pub(super) address: Listener,
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
            address,
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

/// The initiator of a circuit.
#[derive(Debug)]
pub(super) struct CircuitQueue {
    key: CircuitKey,
    pub(super) cm: Arc<InitiatorCm>,
    pub(super) qp: Option<Arc<Qp>>,
    pub(super) queue: SendQueue<LinkKey>,
    /// Links to which room was refused, in this order.
    pub(super) waiting: Vec<LinkKey>,
    pub(super) failing: Option<Failing>,
    /// When its dial began.
    pub(super) dialled: Instant,
    /// A request has completed, so the target is connected; [`Xrc::proven`] has returned it.
    pub(super) proven: bool,
    told: bool,
}

impl CircuitQueue {
    pub(super) const fn key(&self) -> CircuitKey {
        self.key
    }

    /// Whether nothing of the circuit is under way any more.
    pub(super) fn is_flushed(&self) -> bool {
        self.failing.is_some_and(|failing| failing.done) && self.queue.is_empty()
    }
}

/// A target that this endpoint holds.
#[derive(Debug)]
pub(super) struct HeldTarget {
    pub(super) target: Arc<Target>,
    pub(super) cm: Arc<TargetCm>,
    /// The circuit, as its initiator's endpoint has named it.
    pub(super) peer: EndpointId,
    pub(super) number: CircuitNumber,
    pub(super) initiator: QpNumber,
    /// The links through which the peer sends.
    pub(super) links: Vec<LinkKey>,
    /// When it was made, or its last link has ended.
    pub(super) loose_since: Instant,
    pub(super) failing: Option<Failing>,
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
    /// Number of links that only accept packets.
    pub(super) lingering: usize,
    /// Accepted links that choose a circuit again at a time.
    pub(super) retries: Vec<(Instant, LinkKey)>,
    /// The link that was accepted last from each endpoint, if it exists.
    pub(super) accepted: HashMap<EndpointId, LinkKey>,
    pub(super) targets: HashMap<QpNumber, HeldTarget>,
    tags: NumberMap<LinkKey>,
    pub(super) node: NodeId,
    pub(super) id: EndpointId,
    pub(super) auth: u64,
    pub(super) srq: SrqNumber,
    pub(super) domain: Arc<Xrcd>,
}

impl std::fmt::Debug for Xrc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Xrc").finish_non_exhaustive()
    }
}

impl Xrc {
    /// Without circuits. `srq`: the shared receive queue of the endpoint, in `domain`.
    pub(super) fn new(
        domain: Arc<Xrcd>,
        srq: SrqNumber,
        (id, node, auth): (EndpointId, NodeId, u64),
    ) -> Self {
        Self {
            circuits: Circuits::new(),
            queues: Vec::new(),
            ending: Vec::new(),
            half_ends: Vec::new(),
            lingering: 0,
            retries: Vec::new(),
            accepted: HashMap::new(),
            targets: HashMap::new(),
            tags: NumberMap::default(),
            node,
            id,
            auth,
            srq,
            domain,
        }
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
        self.queues[key.place()] = Some(CircuitQueue {
            key,
            cm,
            qp: None,
            queue: SendQueue::new(CIRCUIT_DEPTH, 1),
            waiting: Vec::new(),
            failing: None,
            dialled: Instant::now(),
            proven: false,
            told: false,
        });
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
        if open && queue.queue.has_room(numbered) {
            return true;
        }
        queue.wait(key);
        false
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
        port.used = true;
        port.under_way += 1;
        Ok(())
    }
}

impl CircuitQueue {
    /// Lists a link that continues when there is room.
    pub(super) fn wait(&mut self, link: LinkKey) {
        if !self.waiting.contains(&link) {
            self.waiting.push(link);
        }
    }
}
