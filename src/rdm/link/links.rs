//! The queue pairs of an endpoint's links, and the requests that are posted to each.
//!
//! In one file, because the record of a link and the lists of links change together.

#![allow(unsafe_code, reason = "posts requests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::block::LinkBlock;
use super::cm::LinkCm;
use super::ending::{Ending, Polled};
use super::initiator_sq::LinkSq;
use super::port::Port;
use super::ring::LinkRing;
use super::send_queue::{DEPTH, SendQueue, Sent, UNSIGNALED};
use super::wr_id::WrId;
use crate::errno::{FiErrno, Result};
use crate::initiator::Initiator;
use crate::rdm::core::link::LinkKey;
use crate::rdm::number_map::NumberMap;
use crate::rdm::packet_memory::Slot;
use crate::rdm::table_keys::{CircuitKey, ReadKey};
use crate::verbs::{Qp, RemoteAddr, RingProbe, Rkey, SendOpcode, SendRequest, Sge, Wc};
use crate::wire::introduction::Introduction;
use crate::wire::rdm::Number;

/// Largest number of rings that each progress call examines.
pub(in crate::rdm) const HOT_RINGS: usize = 64;
/// Number of rings that stay hot although nothing arrives in them.
pub(in crate::rdm) const IDLE_RINGS: usize = 8;
/// Largest number of rings that one call makes cold.
const COOLED: usize = 4;
/// Time after which a queue pair is destroyed although the device has not reported that its
/// receives have ended.
const DRAIN: Duration = Duration::from_secs(1);

/// What the executor has of a link: its queue pair, rings, port, block and initiator.
#[derive(Debug)]
pub(in crate::rdm) struct LinkRecord {
    key: LinkKey,
    /// The connection; `None`: the link is on a circuit.
    pub(in crate::rdm) cm: Option<Arc<LinkCm>>,
    pub(in crate::rdm) port: Option<Box<Port>>,
    pub(in crate::rdm) qp: Option<Arc<Qp>>,
    /// The rings of the queue pairs, if the device has them.
    pub(in crate::rdm) ring: Option<LinkRing>,
    pub(in crate::rdm) connected: bool,
    queue: SendQueue<()>,
    /// A post was refused for lack of room.
    starved: bool,
    /// See [`LinkRecord::refuse`].
    #[cfg(test)]
    refused: Vec<FiErrno>,
    ending: Option<Ending>,
    /// The queue pair consumes no receive any more. The device can report this before it reports
    /// that the queue pair has failed.
    last_receive: bool,
    /// A probe has not completed.
    probing: bool,
    /// On circuits: nothing is posted to the link, which may end at the peer at any time. A request
    /// that the peer refuses then would end the circuit of other links. The outlet of the block is
    /// shut.
    pub(in crate::rdm) down: bool,
    /// The first packet and the first request of RMA that had not completed at the last beat.
    stood: Option<(u16, u32)>,
    /// Slots of operations that have failed, whose requests have not completed.
    kept: Vec<Slot>,
    /// The connection block of the link, if the endpoint has RMA.
    pub(in crate::rdm) block: Option<LinkBlock>,
    /// Posts RMA; made by the first operation on the link.
    pub(in crate::rdm) initiator: Option<Box<Initiator<LinkSq>>>,
    /// The peer's connection block and the form of its keys.
    pub(in crate::rdm) introduction: Option<Introduction>,
    /// A request has failed, and none of those behind it was or will be executed.
    pub(in crate::rdm) stopped: bool,
    /// As if the acknowledgements of all requests that have not completed were lost.
    #[cfg(test)]
    pub(in crate::rdm) loses: bool,
    /// As if the device flushed no requests.
    #[cfg(test)]
    pub(in crate::rdm) silent: bool,
    /// The terms permit the device to execute atomics on the regions of the peer.
    pub(in crate::rdm) device_atomics: bool,
}

/// What is posted.
pub(in crate::rdm) enum Posted {
    /// A numbered packet. Each of them completes, because an operation ends with it.
    Numbered(Number),
    /// A packet without number.
    Control(Option<Slot>),
}

impl LinkRecord {
    fn new(key: LinkKey, cm: Option<Arc<LinkCm>>, port: Option<Box<Port>>) -> Self {
        Self {
            key,
            cm,
            qp: None,
            ring: None,
            connected: false,
            queue: SendQueue::new(DEPTH, UNSIGNALED),
            port,
            starved: false,
            #[cfg(test)]
            refused: Vec::new(),
            ending: None,
            last_receive: false,
            probing: false,
            down: false,
            stood: None,
            kept: Vec::new(),
            block: None,
            initiator: None,
            introduction: None,
            stopped: false,
            #[cfg(test)]
            loses: false,
            #[cfg(test)]
            silent: false,
            device_atomics: false,
        }
    }

    pub(in crate::rdm) const fn key(&self) -> LinkKey {
        self.key
    }

    /// Whether nothing is posted any more.
    pub(in crate::rdm) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether requests of RMA have not completed.
    #[inline]
    pub(in crate::rdm) fn has_rma(&self) -> bool {
        self.block
            .as_ref()
            .is_some_and(|block| block.poster.is_busy())
    }

    /// On a circuit: whether requests have not completed.
    pub(in crate::rdm) fn is_under_way(&self) -> bool {
        let packets = self.port.as_ref().is_some_and(|port| port.under_way != 0);
        packets
            || self
                .block
                .as_ref()
                .is_some_and(|block| block.poster.has_requests())
    }

    /// Keeps a slot until the queue pair has ended.
    pub(in crate::rdm) fn keep_until_removed(&mut self, slot: Slot) {
        self.kept.push(slot);
    }

    /// Number of slots that are kept.
    #[cfg(test)]
    pub(in crate::rdm) fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Whether a packet can be posted. If not, [`Links::completed`] reports when it can.
    pub(in crate::rdm) fn has_room(&mut self, numbered: bool) -> bool {
        let room = self.queue.has_room(numbered) && self.qp.is_some() && self.ending.is_none();
        self.starved |= !room;
        room
    }

    /// The next posts of packets fail with these errors, the last one first.
    #[cfg(test)]
    pub(in crate::rdm) fn refuse(&mut self, errors: &[FiErrno]) {
        self.refused = errors.to_vec();
    }

    #[cfg(test)]
    pub(in crate::rdm) fn refuse_next(&mut self) -> Option<FiErrno> {
        self.refused.pop()
    }

    /// Whether the queue pair was moved to ERR.
    #[cfg(test)]
    pub(in crate::rdm) fn is_draining(&self) -> bool {
        self.ending.as_ref().is_some_and(|it| it.since.is_some())
    }

    /// As if a SEND were under way for ever.
    #[cfg(test)]
    pub(in crate::rdm) fn occupy(&mut self) {
        self.queue.occupy();
    }

    /// The ring, if the next packet can go there: all SENDs have completed, so the packets before
    /// it have arrived, and so has RMA, which must not be overtaken (`FI_ORDER_SAW`).
    #[inline(always)]
    pub(in crate::rdm) fn free_ring(&mut self) -> Option<&mut LinkRing> {
        let rma = self.has_rma();
        match !self.queue.has_packets() && self.ending.is_none() && !rma {
            true => self.ring.as_mut(),
            false => None,
        }
    }

    /// Whether the next packet could go to the ring if the SENDs before it had completed.
    pub(in crate::rdm) fn ring_waits(&self) -> bool {
        self.ring.is_some() && self.ending.is_none() && self.queue.has_packets()
    }

    /// Posts a packet: `inline` bytes, or the memory of a slot.
    ///
    /// # Errors
    /// The device's.
    #[inline]
    pub(in crate::rdm) fn post(
        &mut self,
        sge: Sge,
        inline: bool,
        solicited: bool,
        posted: Posted,
    ) -> Result<()> {
        let qp = self.qp.as_ref().ok_or(FiErrno::ENOTCONN)?;
        let sges = [sge];
        let mut request = SendRequest::new(SendOpcode::Send, &sges);
        request.inline(inline).solicited(solicited);
        let sent = match posted {
            Posted::Numbered(number) => Sent::Numbered(number),
            Posted::Control(slot) => Sent::Control(slot),
        };
        let wr_id = |position| WrId::send(self.key, position);
        // SAFETY: inline data is copied by the call; otherwise the sge is of a slot, which is kept
        // until the request has completed or the queue pair is destroyed.
        unsafe { self.queue.post(qp, wr_id, &mut request, ((), sent)) }
    }

    /// Whether a READ can be posted. If not, the completion of a READ or
    /// [`Completed::room`] reports when it can.
    /// At most `most` READs are under way.
    pub(in crate::rdm) fn has_room_for_read(&mut self, most: usize) -> bool {
        self.queue.reads() < most && self.has_room(true)
    }

    /// Number of READs under way.
    pub(in crate::rdm) fn reads(&self) -> usize {
        self.queue.reads()
    }

    /// Executes a READ of `from` to `sge` in this call; with `true` its lkey is checked. Returns
    /// false if the READ has to be posted.
    ///
    /// # Safety
    /// The sge is writable.
    pub(in crate::rdm) unsafe fn read_at_once(
        &self,
        sge: (&Sge, bool),
        from: (RemoteAddr, Rkey),
    ) -> bool {
        let Some(qp) = self.qp.as_ref().filter(|_| self.ending.is_none()) else {
            return false;
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { qp.execute(SendOpcode::Read, sge, from, None) }
    }

    /// As [`Self::read_at_once`], several READs by one call of the device. Returns the number of
    /// those that were executed, from the first one on.
    ///
    /// # Safety
    /// The sges are writable.
    pub(in crate::rdm) unsafe fn read_list(
        &self,
        sges: (&[Sge], bool),
        from: (&[RemoteAddr], &[Rkey]),
    ) -> usize {
        let Some(qp) = self.qp.as_ref().filter(|_| self.ending.is_none()) else {
            return 0;
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { qp.execute_reads(sges, from) }
    }

    /// Executes a WRITE of `sge`, without check of its lkey, to `to` in this call. `false`: it was
    /// not executed, or in part.
    ///
    /// # Safety
    /// The sge is readable.
    pub(in crate::rdm) unsafe fn write_at_once(&self, sge: &Sge, to: (RemoteAddr, Rkey)) -> bool {
        let Some(qp) = self.qp.as_ref().filter(|_| self.ending.is_none()) else {
            return false;
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { qp.execute(SendOpcode::Write, (sge, false), to, None) }
    }

    /// Posts a READ of `from` to `sge`.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// The sge is writable until the READ has completed or the queue pair is destroyed.
    pub(in crate::rdm) unsafe fn post_read(
        &mut self,
        sge: Sge,
        from: (RemoteAddr, Rkey),
        read: ReadKey,
    ) -> Result<()> {
        let qp = self.qp.as_ref().ok_or(FiErrno::ENOTCONN)?;
        let sges = [sge];
        let mut request = SendRequest::new(SendOpcode::Read, &sges);
        request.rdma(from);
        let wr_id = |position| WrId::send(self.key, position);
        let sent = Sent::Read(read);
        // SAFETY: the caller keeps the memory.
        unsafe { self.queue.post(qp, wr_id, &mut request, ((), sent)) }
    }

    /// The requests that have not completed, of a link that is removed.
    pub(in crate::rdm) fn take_sent(&mut self) -> impl Iterator<Item = Sent> + '_ {
        let kept = self.kept.drain(..).map(|slot| Sent::Control(Some(slot)));
        self.queue.drain().map(|(_, sent)| sent).chain(kept)
    }

    /// Posts a request without data. An error has no effect: a time limit ends the wait for a
    /// marker, and the next probe follows.
    fn post_empty(&mut self, opcode: SendOpcode, posted: Sent) -> Option<()> {
        let qp = self.qp.as_ref()?;
        let mut request = SendRequest::new(opcode, &[]);
        let wr_id = |position| WrId::send(self.key, position);
        // SAFETY: no buffers.
        unsafe { self.queue.post(qp, wr_id, &mut request, ((), posted)) }.ok()
    }

    /// Posts the last request, which completes behind all others.
    fn post_marker(&mut self) {
        let _ = self.post_empty(SendOpcode::Send, Sent::Marker);
    }

    /// Posts a probe, unless one is under way.
    pub(in crate::rdm) fn probe(&mut self) {
        if !self.probing && self.has_room(false) {
            let posted = self.post_empty(SendOpcode::Write, Sent::Probe);
            self.probing = posted.is_some();
        }
    }

    /// Whether requests are under way, and none has completed since the last call.
    pub(in crate::rdm) fn stands(&mut self) -> bool {
        let rma = self.block.as_ref().map_or(0, |block| block.poster.first());
        let first = (self.queue.position(), rma);
        let before = self.stood.replace(first);
        before == Some(first) && (!self.queue.is_empty() || self.has_rma())
    }
}

/// The requests that a completion has ended.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Completed {
    /// The last numbered packet of them.
    pub(in crate::rdm) number: Option<Number>,
    /// A refused post can be repeated.
    pub(in crate::rdm) room: bool,
    /// The READ of them. Each READ has a completion of its own.
    pub(in crate::rdm) read: Option<ReadKey>,
}

/// A link in the list of hot rings. Its ring lives as long as it is listed.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Hot {
    pub(in crate::rdm) link: LinkKey,
    pub(in crate::rdm) ring: RingProbe,
}

/// The queue pairs by link.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Links {
    places: Vec<Option<LinkRecord>>,
    /// Links by the number of their queue pair, and the last one that was found.
    numbers: NumberMap<LinkKey>,
    last: Option<(u32, LinkKey)>,
    /// Links that are being ended.
    ending: Vec<LinkKey>,
    /// Links whose rings each progress call examines, and others in whose rings packets have
    /// arrived.
    pub(in crate::rdm) hot: Vec<Hot>,
    pub(in crate::rdm) cold: Vec<LinkKey>,
    /// The process that has created the hot rings; `None`: there was none yet.
    owner: Option<forks::Owner>,
    count: usize,
    /// The most at a time.
    most: usize,
}

impl Links {
    pub(in crate::rdm) fn len(&self) -> usize {
        self.count
    }

    pub(in crate::rdm) fn add(
        &mut self,
        key: LinkKey,
        cm: Option<Arc<LinkCm>>,
        port: Option<Box<Port>>,
    ) {
        if self.places.len() <= key.place() {
            self.places.resize_with(key.place() + 1, || None);
        }
        if let Some(place) = self.places.get_mut(key.place()) {
            debug_assert!(place.is_none());
            *place = Some(LinkRecord::new(key, cm, port));
            self.count += 1;
            self.most = self.most.max(self.count);
        }
    }

    /// The largest number of links at a time.
    pub(in crate::rdm) fn most(&self) -> usize {
        self.most
    }

    /// The link that has the place of a new one.
    pub(in crate::rdm) fn occupant(&self, new: LinkKey) -> Option<LinkKey> {
        let link = self.places.get(new.place())?.as_ref()?;
        Some(link.key)
    }

    pub(in crate::rdm) fn get(&self, key: LinkKey) -> Option<&LinkRecord> {
        let link = self.places.get(key.place())?.as_ref()?;
        (link.key == key).then_some(link)
    }

    #[inline]
    pub(in crate::rdm) fn get_mut(&mut self, key: LinkKey) -> Option<&mut LinkRecord> {
        let link = self.places.get_mut(key.place())?.as_mut()?;
        (link.key == key).then_some(link)
    }

    /// The link, unless it is being ended.
    #[inline]
    pub(in crate::rdm) fn get_open(&mut self, key: LinkKey) -> Option<&mut LinkRecord> {
        self.get_mut(key).filter(|link| !link.is_ending())
    }

    /// Sets the block of a link on a circuit. `false`: the link has ended, or is being ended.
    pub(in crate::rdm) fn set_block(
        &mut self,
        key: LinkKey,
        block: &mut Option<LinkBlock>,
    ) -> bool {
        let Some(link) = self.get_open(key) else {
            return false;
        };
        link.block = block.take();
        true
    }

    /// Status and vendor error of a request that has completed.
    #[inline]
    pub(in crate::rdm) fn status(&self, _key: LinkKey, wc: &Wc) -> (u32, u32) {
        #[cfg(test)]
        if self.is(_key, |link| link.loses) {
            return (rdma_core_sys::IBV_WC_WR_FLUSH_ERR, 0);
        }
        (wc.status(), wc.vendor_err())
    }

    /// As [`Self::status`], of a packet or READ on a circuit.
    #[inline]
    pub(in crate::rdm) fn circuit_status(&mut self, _circuit: CircuitKey, wc: &Wc) -> (u32, u32) {
        #[cfg(test)]
        if self.of_circuit(_circuit).any(|link| link.loses) {
            return (rdma_core_sys::IBV_WC_WR_FLUSH_ERR, 0);
        }
        (wc.status(), wc.vendor_err())
    }

    /// Whether the completion of a request is not to be processed.
    #[cfg(test)]
    pub(in crate::rdm) fn is_silent(&self, request: WrId) -> bool {
        match request {
            WrId::Receive(_) | WrId::Circuit(..) => false,
            WrId::Send(key, _) | WrId::Rma(key, _) | WrId::Engine(key, _) => {
                self.is(key, |link| link.silent)
            }
        }
    }

    #[cfg(test)]
    fn is(&self, key: LinkKey, what: impl Fn(&LinkRecord) -> bool) -> bool {
        let link = self.places.get(key.place()).and_then(Option::as_ref);
        link.is_some_and(|link| link.key == key && what(link))
    }

    /// Whether the ring of a link may have a packet.
    #[inline]
    pub(in crate::rdm) fn ring_is_ready(&self, key: LinkKey) -> bool {
        let link = self.places.get(key.place()).and_then(Option::as_ref);
        link.is_some_and(|link| link.ring.as_ref().is_some_and(LinkRing::is_ready))
    }

    /// The ring of a link, to be read in place. `None`: there is none, or this is a forked child.
    pub(in crate::rdm) fn probe(&self, key: LinkKey) -> Option<RingProbe> {
        let link = self.places.get(key.place()).and_then(Option::as_ref)?;
        let ring = link.ring.as_ref().filter(|_| link.key == key)?;
        ring.is_here().then(|| ring.probe())
    }

    /// Gives back the room of packets that were read in the ring of a link
    /// ([`Ring::give_back`](crate::verbs::Ring::give_back)).
    pub(in crate::rdm) fn give_back(&mut self, key: LinkKey, slots: u32) {
        if let Some(ring) = self.get_mut(key).and_then(|link| link.ring.as_mut()) {
            ring.give_back(slots);
        }
    }

    /// The index of the first hot ring from `at` on that may have a packet. A forked child has
    /// none.
    #[inline(always)]
    pub(in crate::rdm) fn next_ready(&self, at: usize) -> Option<usize> {
        if !self.owner.is_some_and(forks::Owner::is_this_process) {
            return None;
        }
        let rest = self.hot.get(at..)?;
        // SAFETY: a link leaves the list before its ring is dropped, methods of the ring need this
        // object exclusively, and this is the process that has created the rings.
        let found = rest.iter().position(|hot| unsafe { hot.ring.is_ready() })?;
        Some(at + found)
    }

    /// A packet has arrived in a ring that is not examined by each progress call. The first
    /// [`HOT_RINGS`] of these are examined from now on.
    pub(in crate::rdm) fn ring_arrival(&mut self, key: LinkKey) {
        let heats = self.hot.len() < HOT_RINGS;
        let Some(ring) = self.get_mut(key).and_then(|link| link.ring.as_mut()) else {
            return;
        };
        if ring.hot {
            return;
        }
        if heats {
            ring.heat();
            let (owner, ring) = (ring.owner(), ring.probe());
            self.owner = Some(owner);
            self.hot.push(Hot { link: key, ring });
        } else if !self.cold.contains(&key) {
            self.cold.push(key);
        }
    }

    /// Makes some of the hot rings cold in which nothing has arrived since the last call. The
    /// caller reads the cold rings afterwards.
    #[cold]
    pub(in crate::rdm) fn cool(&mut self) {
        let mut left = COOLED;
        for at in (0..self.hot.len()).rev() {
            if left == 0 || self.hot.len() <= IDLE_RINGS {
                break;
            }
            let key = self.hot[at].link;
            let ring = self.get_mut(key).and_then(|link| link.ring.as_mut());
            let Some(ring) = ring else {
                continue;
            };
            if std::mem::take(&mut ring.used) {
                continue;
            }
            let may_have_packet = ring.cool();
            self.hot.swap_remove(at);
            if may_have_packet {
                self.cold.push(key);
            }
            left -= 1;
        }
    }

    /// The links that are being ended, apart from those on circuits that may still get packets.
    pub(in crate::rdm) fn ending(&self) -> &[LinkKey] {
        &self.ending
    }

    /// The links that have requests on a circuit besides packets.
    pub(in crate::rdm) fn with_requests_besides(
        &self,
        key: CircuitKey,
    ) -> impl Iterator<Item = LinkKey> + '_ {
        let has = move |link: &&LinkRecord| {
            let circuit = link.port.as_ref().and_then(|port| port.circuit);
            let block = link.block.as_ref();
            circuit == Some(key) && block.is_some_and(|block| block.poster.has_requests())
        };
        let links = self.places.iter().flatten();
        links.filter(has).map(|link| link.key)
    }

    /// The links that post to a circuit.
    pub(in crate::rdm) fn of_circuit(
        &mut self,
        key: CircuitKey,
    ) -> impl Iterator<Item = &mut LinkRecord> {
        let posts = move |port: &Port| port.circuit == Some(key);
        let links = self.places.iter_mut().flatten();
        links.filter(move |link| link.port.as_deref().is_some_and(posts))
    }

    pub(in crate::rdm) fn keys(&self) -> impl Iterator<Item = LinkKey> + '_ {
        self.places.iter().flatten().map(|link| link.key)
    }

    /// The link of a queue pair.
    #[inline]
    pub(in crate::rdm) fn of_qp(&mut self, number: u32) -> Option<LinkKey> {
        match self.last {
            Some((last, key)) if last == number => Some(key),
            _ => {
                let key = *self.numbers.get(&number)?;
                self.last = Some((number, key));
                Some(key)
            }
        }
    }

    /// Sets the queue pair and the block of a link. `false`: the link has ended, or is being ended.
    pub(in crate::rdm) fn set_qp(
        &mut self,
        key: LinkKey,
        qp: &Arc<Qp>,
        ring: Option<LinkRing>,
        block: &mut Option<LinkBlock>,
    ) -> bool {
        let Some(link) = self.get_open(key) else {
            return false;
        };
        (link.qp, link.ring) = (Some(Arc::clone(qp)), ring);
        link.block = block.take();
        self.numbers.insert(qp.number(), key);
        true
    }

    /// Removes a link.
    pub(in crate::rdm) fn remove(&mut self, key: LinkKey) -> Option<LinkRecord> {
        self.get_mut(key)?;
        let link = self.places.get_mut(key.place())?.take()?;
        self.count -= 1;
        for list in [&mut self.ending, &mut self.cold] {
            list.retain(|listed| *listed != key);
        }
        self.hot.retain(|hot| hot.link != key);
        if let Some(qp) = &link.qp {
            self.numbers.remove(&qp.number());
            self.last = None;
        }
        Some(link)
    }

    /// A send has completed, and all before it. Calls `free` with the slots of these requests.
    #[inline]
    pub(in crate::rdm) fn completed(
        &mut self,
        key: LinkKey,
        position: u16,
        mut free: impl FnMut(Slot),
    ) -> Completed {
        let mut completed = Completed::default();
        let Some(link) = self.get_mut(key) else {
            return completed;
        };
        let (ending, probing) = (&mut link.ending, &mut link.probing);
        let known = link.queue.completed(position, |(), sent| match sent {
            Sent::Numbered(number) => completed.number = Some(number),
            Sent::Control(Some(slot)) => free(slot),
            Sent::Marker => {
                if let Some(ending) = ending {
                    ending.sends = true;
                }
            }
            Sent::Read(read) => completed.read = Some(read),
            Sent::Probe => *probing = false,
            Sent::Control(None) => {}
        });
        if !known {
            return completed;
        }
        completed.room = std::mem::take(&mut link.starved);
        completed
    }

    /// Begins to end a link: nothing is posted any more.
    pub(in crate::rdm) fn begin_end(
        &mut self,
        key: LinkKey,
    ) -> Option<(Arc<LinkCm>, Option<Arc<Qp>>)> {
        let cm = self.get_mut(key)?.cm.clone()?;
        let link = self.get_mut(key)?;
        link.ending = Some(Ending {
            receives: link.last_receive || !link.connected,
            ..Ending::default()
        });
        if let Some(block) = &link.block {
            block.poster.set_ended();
        }
        let parts = (cm, link.qp.clone());
        self.ending.push(key);
        Some(parts)
    }

    /// Nothing more is posted to a link on a circuit. Requests of the key directory, which other
    /// threads post without the endpoint's lock, are refused from now on, and those that were
    /// posted count as under way ([`LinkRecord::is_under_way`]): the link leaves its circuit, whose
    /// room they use, behind them.
    pub(in crate::rdm) fn begin_half_end(&mut self, key: LinkKey) {
        if let Some(link) = self.get_mut(key) {
            link.ending = Some(Ending::default());
            if let Some(block) = &link.block {
                block.poster.shut();
            }
        }
    }

    /// The peer posts nothing more to a link on a circuit, to which this side posts nothing: it has
    /// ended when the completion queue was polled until it was empty.
    pub(in crate::rdm) fn close_half(&mut self, key: LinkKey) {
        if let Some(link) = self.get_mut(key) {
            if let Some(block) = &link.block {
                // the peer uses no key any more
                block.poster.set_ended();
            }
            link.ending = Some(Ending {
                since: Some(Instant::now()),
                sends: true,
                receives: true,
                drained: None,
            });
            self.ending.push(key);
        }
    }

    /// The queue pair of an ending link is in its error state.
    pub(in crate::rdm) fn begin_drain(&mut self, key: LinkKey) {
        let Some(link) = self.get_mut(key) else {
            return;
        };
        if link.qp.is_some() && link.connected {
            link.post_marker();
        }
        if let Some(ending) = &mut link.ending {
            ending.since = Some(Instant::now());
            ending.sends = !link.connected || link.qp.is_none();
        }
    }

    /// The queue pair consumes no receive any more.
    pub(in crate::rdm) fn last_receive(&mut self, key: LinkKey) {
        let Some(link) = self.get_mut(key) else {
            return;
        };
        link.last_receive = true;
        if let Some(ending) = &mut link.ending {
            ending.receives = true;
        }
    }

    /// Whether packets without number may not have reached their peers. Only one of 16
    /// completes, so a probe follows them.
    pub(in crate::rdm) fn sends_control(&mut self) -> bool {
        let mut sends = false;
        for link in self.places.iter_mut().flatten() {
            if link.connected && link.ending.is_none() && link.queue.has_control() {
                sends = true;
                link.probe();
            }
        }
        sends
    }

    /// Whether a link is being ended. One on a circuit may still accept packets.
    pub(in crate::rdm) fn ends(&self, key: LinkKey) -> bool {
        let link = self.places.get(key.place()).and_then(Option::as_ref);
        link.is_some_and(|link| link.key == key && link.is_ending())
    }

    /// Whether links are being ended.
    pub(in crate::rdm) fn is_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    /// Whether all completions of a link that [`Self::drained`] has returned were polled, although
    /// the device queue may not have been empty since: its peers can keep it filled.
    pub(in crate::rdm) fn is_covered(&self, key: LinkKey, polled: Polled, cqe: usize) -> bool {
        let ending = self.get(key).and_then(|link| link.ending.as_ref());
        let drained = ending.and_then(|ending| ending.drained);
        drained.is_some_and(|earlier| polled.covers(earlier, cqe))
    }

    /// The links whose completions have all been polled if the completion queue is empty now, and
    /// the time at which another one is to be examined.
    pub(in crate::rdm) fn drained(
        &mut self,
        now: Instant,
        polled: Polled,
    ) -> (Vec<LinkKey>, Option<Instant>) {
        let mut drained = Vec::new();
        let mut next = None;
        for index in 0..self.ending.len() {
            let key = self.ending[index];
            let Some(link) = self.get_mut(key) else {
                continue;
            };
            let Some(Ending {
                since: Some(since),
                sends,
                receives,
                ..
            }) = link.ending
            else {
                continue;
            };
            let limit = since + DRAIN;
            // a link that was never connected receives nothing
            let ring = !link.connected || link.ring.as_ref().is_none_or(|ring| ring.ended);
            if sends && receives && ring || limit <= now {
                drained.push(key);
                if let Some(ending) = &mut link.ending {
                    ending.drained.get_or_insert(polled);
                }
            } else {
                next = Some(next.map_or(limit, |next: Instant| next.min(limit)));
            }
        }
        (drained, next)
    }
}
