//! What an endpoint does for its [`Core`]: packets on queue pairs, matching, the results of
//! operations, and the steps of connections, which the driver executes later.
//!
//! A call of the core must not lead to another one ([`Io`]), so what follows from a call is listed
//! in [`Executor::todo`], and done after it (`shared.rs`).
//!
//! In one file: the state, and the steps that several of the modules below share.

#![allow(
    unsafe_code,
    reason = "copies from and to buffers of the application, posts receives"
)]

mod announce;
mod announced;
mod announced_list;
mod atomic;
mod circuit_times;
mod circuits;
mod close;
mod elements;
mod handshake;
mod idle;
mod io;
mod keys;
mod messages;
mod operation_memory;
mod own_rma;
mod packet_receives;
mod pull;
mod push;
mod rings;
mod rma;
mod rma_order;
mod rma_recovery;
mod stream;
mod todo;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use self::atomic::Answers;
use super::completions::{Completions, Fault, Side};
use super::core::link::LinkKey;
use super::core::ops::Form;
use super::core::peer::PeerKey;
use super::core::{Core, Io};
use super::operations::{Kind, Operation, PAYLOAD};
use super::packet_memory::{PacketMemory, Slot};
use super::receives::Receives;
use super::rma::Rma;
use super::slab::Slab;
use super::table_keys::{TxKey, TxMark};
use super::vector::AddressVector;
use crate::conn::REFUSAL_WAIT;
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::mr::{Access, MrDomain, SourceKeys};
use crate::rdm::link::cm::{Ended, LinkCm};
use crate::rdm::link::ending::Polled;
use crate::rdm::link::endpoint::LinkEndpoint;
use crate::rdm::link::links::{LinkRecord, Links, Posted};
use crate::rdm::link::port::Port;
use crate::rdm::link::send_queue::Sent;
use crate::rdm::link::wr_id::WrId;
use crate::rdm::long::paces::Paces;
use crate::rdm::long::pulls::Pulls;
use crate::rdm::long::streams::Streams;
use crate::rdm::step::Step;
use crate::rdm::xrc::circuit_cm::XrcStep;
use crate::rdm::xrc::endpoint::CircuitEndpoint;
use crate::rdm::xrc::ports::Xrc;
use crate::verbs::{Cq, Lkey, NextSlot, Pd, Sge, Srq, Wc};
use crate::wire::rdm::packet::{MAX_HEAD, SLOT_SIZE};
use crate::wire::rdm::{Body, Header, Packet};
use crate::xrc::XrcDomain;

pub(super) use self::announce::EntryRequest;
#[cfg(test)]
pub(super) use self::own_rma::CALL;
use self::packet_receives::PacketReceives;
pub(super) use self::rings::Stop;
pub(super) use self::rma::RmaConfig;
use self::rma_recovery::Failure;
pub(super) use self::todo::{PacketMemoryRef, Todo};

/// Largest number of bytes that are sent inline.
const MAX_INLINE: usize = 512;

/// Objects of the device that the endpoint owns. The queue pairs are in [`Links`].
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) srq: Arc<Srq>,
    pub(super) cq: Arc<Cq>,
    pub(super) pd: Arc<Pd>,
    /// The regions of the domain.
    pub(super) mr: Arc<MrDomain>,
    /// The XRC domain, whose file is collected when the objects in it have ended.
    pub(super) _node: Option<Arc<XrcDomain>>,
}

/// See the module. Fields are dropped in their order: queue pairs before the memory of their
/// packets.
pub(super) struct Executor {
    endpoint: Weak<dyn CircuitEndpoint>,
    pub(super) links: Links,
    /// Circuits and targets; `None` on RC.
    pub(super) xrc: Option<Box<Xrc>>,
    pub(super) objects: Objects,
    pub(super) memory: PacketMemory,
    receives: PacketReceives,
    /// Completions that were polled since a poll has emptied the device queue.
    pub(super) backlog: usize,
    pub(super) polled: Polled,
    /// Number of polls of the device that have found nothing; wraps.
    pub(super) empty_polls: u32,
    max_inline: usize,
    pub(super) max_links: usize,
    pub(super) tx: Slab<TxMark, Operation>,
    pub(super) rx: Receives,
    source_keys: SourceKeys,
    pulls: Pulls,
    pub(super) streams: Streams,
    pub(super) paces: Paces,
    /// Messages that are read together; empty between calls.
    list: announced_list::List,
    /// Bytes that this progress call has read without requests.
    pub(super) bytes_copied: u64,
    /// Bytes of READs that the device has copied in their posts since the last poll.
    pub(super) bytes_read: u64,
    /// Completions of such READs have not been polled.
    pub(super) reads_wait: bool,
    pub(super) completions: Completions,
    pub(super) todo: VecDeque<Todo>,
    pub(super) steps: Vec<Step>,
    /// Steps that are executed again by the next call of the driver, with their times.
    pub(super) withdrawing: Vec<(u64, Step)>,
    /// Number of calls of the driver that have taken steps, which is the time of [`Self::steps`].
    pub(super) step_calls: u64,
    /// Of an endpoint that is being closed: registrations of receives that are to be ended.
    sinks: Vec<close::ClosingSink>,
    pub(super) rma: Rma,
    /// Messages and atomics to the endpoint itself that wait for earlier operations
    /// (`own_rma.rs`), in order.
    own_sends: VecDeque<TxKey>,
    /// Addresses of the endpoint itself to which RMA is continued by the next call.
    own_busy: Vec<PeerKey>,
    rma_config: RmaConfig,
    accepts: Accepts,
    /// The vendor error of requests that were not executed, if the device reports them.
    pub(super) not_executed: Option<u32>,
    /// See [`REFUSAL_WAIT`]; 0 if the device reports it.
    pub(super) answer: Duration,
    /// The link of the packet that is being processed.
    arriving: Option<LinkKey>,
    /// The peer of the last message of one buffer that was written to a ring, and the next slot of
    /// that ring.
    next_slot: Option<(PeerKey, NextSlot)>,
    /// Number of messages of the application in `tx`.
    messages: usize,
    pub(super) results: Answers,
    pub(super) fins: Answers,
    /// Links whose next packet waits for memory.
    waiting_for_memory: Vec<LinkKey>,
    /// Links on which the device has refused a request although its send queue has room: the driver
    /// posts it again.
    again: Vec<LinkKey>,
    /// Messages of other endpoints of the shared receive context have got a receive
    /// ([`Receives::take_pending`]).
    pub(super) found_for_others: bool,
    /// The address vector of the endpoint, whose peers are not freed, and the scope of link-local
    /// addresses.
    pub(super) vector: Option<(Arc<AddressVector>, u32)>,
    /// Peers that were freed, of which [`State`](super::shared::State) has entries.
    pub(super) freed: Vec<PeerKey>,
    #[cfg(test)]
    pub(super) tests: TestHooks,
}

/// What tests count and change.
#[cfg(test)]
#[derive(Debug, Default)]
pub(super) struct TestHooks {
    /// READs that were repeated, and messages that were asked for in parts after a READ.
    pub(in crate::rdm) pull_failures: (u32, u32),
    /// With what the posts of READs fail.
    pub(in crate::rdm) refuse_reads: Option<FiErrno>,
    /// Messages are read by requests alone.
    pub(in crate::rdm) posts_reads: bool,
    /// Number of READs without requests.
    pub(in crate::rdm) read_at_once: u32,
    /// Messages that were read when their announcement was found in a ring.
    pub(in crate::rdm) read_in_ring: u32,
    /// Messages that were announced without the lists of the core.
    pub(in crate::rdm) announced: u32,
    /// Messages whose end was asked for, and those that were completed, when RTS and PUSHED were
    /// found in a ring.
    pub(in crate::rdm) both_in_ring: (u32, u32),
    /// Those of them that were read together with others.
    pub(in crate::rdm) read_in_lists: u32,
    /// Ends of messages that were written.
    pub(in crate::rdm) pushed: u32,
    /// Parts of messages to the endpoint itself that were copied.
    pub(in crate::rdm) own_parts: u32,
    /// The next link breaks on which a request was executed that others of its part follow, before
    /// those that wait for its completion are posted.
    pub(in crate::rdm) breaks_begun: bool,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}

/// Operations of peers that the endpoint's capabilities permit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Accepts {
    /// Remote CQ data of RMA writes.
    pub(super) data: bool,
    /// The rights of atomics.
    pub(super) atomics: Access,
}

/// The registrations of the application's buffers that are made for messages.
#[derive(Debug)]
pub(super) struct Registrations {
    pub(super) sources: SourceKeys,
    pub(super) pulls: Pulls,
}

/// Sizes of an executor's queues, how it posts RMA, and what it accepts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) max_receives: usize,
    pub(super) max_inline: usize,
    pub(super) max_links: usize,
    pub(super) rma: RmaConfig,
    pub(super) accepts: Accepts,
}

/// Whether a packet can be posted to a link: to its queue pair, or to its circuit.
#[inline]
fn has_room(link: &mut LinkRecord, xrc: &mut Option<Box<Xrc>>, numbered: bool) -> bool {
    match xrc {
        None => link.has_room(numbered),
        Some(xrc) => xrc.has_room(link, numbered),
    }
}

/// How a packet is posted.
#[derive(Clone, Copy, Debug)]
struct SendFlags {
    inline: bool,
    /// With the solicited bit.
    solicited: bool,
}

/// Posts a packet.
///
/// # Errors
/// The device's.
#[inline]
fn post(
    link: &mut LinkRecord,
    xrc: &mut Option<Box<Xrc>>,
    sge: Sge,
    SendFlags { inline, solicited }: SendFlags,
    posted: Posted,
) -> Result<()> {
    #[cfg(test)]
    if let Some(error) = link.refuse_next() {
        return Err(error);
    }
    match xrc {
        None => link.post(sge, inline, solicited, posted),
        Some(xrc) => xrc.post(link, sge, inline, solicited, posted),
    }
}

impl Executor {
    pub(super) fn new(
        endpoint: Weak<dyn CircuitEndpoint>,
        objects: Objects,
        memory: PacketMemory,
        registrations: Registrations,
        completions: Completions,
        rx: Receives,
        sizes: Sizes,
    ) -> Self {
        let Registrations { sources, pulls } = registrations;
        let not_executed = objects.mr.device().backend().not_executed;
        let answer = not_executed.map_or(REFUSAL_WAIT, |_| Duration::ZERO);
        Self {
            endpoint,
            links: Links::default(),
            xrc: None,
            objects,
            memory,
            receives: PacketReceives::new(sizes.max_receives),
            backlog: 0,
            polled: Polled::default(),
            empty_polls: 0,
            max_inline: sizes.max_inline.min(MAX_INLINE),
            max_links: sizes.max_links,
            tx: Slab::new(),
            rx,
            source_keys: sources,
            pulls,
            streams: Streams::default(),
            paces: Paces::default(),
            list: announced_list::List::new(),
            bytes_copied: 0,
            bytes_read: 0,
            reads_wait: false,
            completions,
            todo: VecDeque::new(),
            steps: Vec::new(),
            withdrawing: Vec::new(),
            step_calls: 0,
            sinks: Vec::new(),
            rma: Rma::new(),
            own_sends: VecDeque::new(),
            own_busy: Vec::new(),
            rma_config: sizes.rma,
            accepts: sizes.accepts,
            not_executed,
            answer,
            arriving: None,
            next_slot: None,
            messages: 0,
            results: Answers::default(),
            fins: Answers::default(),
            waiting_for_memory: Vec::new(),
            again: Vec::new(),
            found_for_others: false,
            vector: None,
            freed: Vec::new(),
            #[cfg(test)]
            tests: TestHooks::default(),
        }
    }

    /// The endpoint, as its links use it.
    fn link_endpoint(&self) -> Weak<dyn LinkEndpoint> {
        let endpoint: Weak<dyn CircuitEndpoint> = Weak::clone(&self.endpoint);
        endpoint
    }

    /// The new steps and those that are left, with their times.
    pub(super) fn take_steps(&mut self) -> Vec<(u64, Step)> {
        let time = self.step_calls;
        self.step_calls += 1;
        let new = self.steps.drain(..).map(|step| (time, step));
        new.chain(self.withdrawing.drain(..)).collect()
    }

    /// Adds a link, which may have the place of one that the core has just removed.
    fn add_link(&mut self, link: LinkKey, cm: Option<&Arc<LinkCm>>, port: Option<Box<Port>>) {
        if let Some(old) = self.links.occupant(link) {
            self.remove_link(old);
        }
        self.links.add(link, cm.cloned(), port);
    }

    /// Removes a link whose dial has failed. A link that is being ended stays until it has ended.
    pub(super) fn remove_dialled(&mut self, key: LinkKey) {
        if !self.links.ends(key) {
            self.remove_link(key);
        }
    }

    /// The connection manager has reported that a dial has failed. A link that was answered has
    /// broken instead: an acceptor that ends a link before the connection manager's last message
    /// of the handshake has arrived rejects it.
    pub(super) fn dial_ended(&mut self, core: &mut Core<Self>, key: LinkKey) {
        match core.peer_of(key) {
            Some(_) => core.broken(key, self),
            None => self.remove_dialled(key),
        }
    }

    /// Removes a link that the core does not have any more; its objects are destroyed by a step.
    pub(super) fn remove_link(&mut self, key: LinkKey) {
        self.end_rma(key);
        let rma = self.take_rma_of_ended(key);
        if let Some(mut link) = self.links.remove(key) {
            let mut reads = Vec::new();
            for sent in link.take_sent() {
                match sent {
                    Sent::Control(Some(slot)) => self.memory.give_back(slot),
                    Sent::Read(read) => reads.push(read),
                    _ => {}
                }
            }
            self.has_memory();
            let posts = (link.block.take(), link.initiator.take());
            if let Some(port) = link.port.take() {
                self.remove_port(key, &port);
            }
            if let Some(cm) = link.cm.take() {
                let ended = Ended { reads, rma };
                let step = Step::Destroy(cm, link.qp.take(), posts, ended);
                self.steps.push(step);
            } else if let (block, initiator) = posts
                && (block.is_some() || initiator.is_some())
            {
                self.xrc_step(XrcStep::CloseBlock(block, initiator));
            }
        }
    }

    /// Processes a work completion.
    #[inline]
    pub(super) fn completed(&mut self, core: &mut Core<Self>, wc: &Wc) {
        #[cfg(test)]
        if self.links.is_silent(WrId::of(wc.wr_id())) {
            return;
        }
        match WrId::of(wc.wr_id()) {
            WrId::Receive(number) => {
                let slot = self.receives.completed(number);
                match self.xrc {
                    None => self.received(core, slot, wc),
                    Some(_) => self.received_on_circuit(core, slot, wc),
                }
            }
            WrId::Circuit(circuit, position) => {
                self.sent_on_circuit(core, circuit, position, wc);
            }
            WrId::Send(link, position) => self.sent(core, link, position, wc),
            WrId::Rma(link, number) => self.rma_completed(core, link, number, wc),
            WrId::Engine(link, kind) => {
                self.engine_request_completed(core, link, kind, wc);
            }
        }
    }

    #[inline]
    fn received(&mut self, core: &mut Core<Self>, slot: Slot, wc: &Wc) {
        let link = self.links.of_qp(wc.qp_num());
        let (Some(link), 0) = (link, wc.status()) else {
            self.post_receive(slot);
            if let Some(link) = link {
                self.broken(core, link);
            }
            return;
        };
        self.read_earlier(core, link);
        self.arriving = Some(link);
        let total = wc.byte_len();
        let packet = match wc.is_recv_rdma() || total > SLOT_SIZE {
            true => None,
            false => Packet::decode(&self.memory.bytes(&slot)[..total], total).ok(),
        };
        match packet {
            Some(packet) => core.arrived(link, &packet, PacketMemoryRef::Slot(slot), self),
            None => core.violated(link, PacketMemoryRef::Slot(slot), self),
        }
    }

    /// A request of a link has failed. The core's time is set, because it begins to dial.
    #[cold]
    pub(super) fn broken(&mut self, core: &mut Core<Self>, link: LinkKey) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            core.set_now(endpoint.now());
        }
        core.broken(link, self);
    }

    /// A link has broken because the peer acknowledges nothing.
    #[cold]
    pub(super) fn unacknowledged(&mut self, core: &mut Core<Self>, link: LinkKey) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            core.set_now(endpoint.now());
        }
        core.unacknowledged(link, self);
    }

    #[inline]
    fn sent(&mut self, core: &mut Core<Self>, link: LinkKey, position: u16, wc: &Wc) {
        let status = self.links.status(link, wc);
        let (memory, waiting) = (&mut self.memory, &mut self.waiting_for_memory);
        let todo = &mut self.todo;
        let completed = self.links.completed(link, position, |slot| {
            memory.give_back(slot);
            todo.extend(waiting.drain(..).map(Todo::Room));
        });
        if let Some(read) = completed.read {
            self.read_ended(read, link, Some(status.0));
        }
        if let Some(failure) = Failure::of(status, self.not_executed) {
            return self.request_failed(core, link, &failure);
        }
        if let Some(number) = completed.number {
            core.sent(link, number, self);
        }
        if completed.room {
            core.has_room(link, self);
            let peer = core.peer_of(link);
            if let Some(peer) = peer.filter(|peer| self.pulls.has_waiting(*peer)) {
                self.todo.push_back(Todo::Pull(peer));
            }
        }
    }

    /// Ends an operation: removes it, and reports the result of a message. The peer of one that has
    /// failed may be reading its source: the driver reports it when that has ended.
    fn finish(&mut self, key: TxKey, result: Result<()>) {
        let Some(op) = self.tx.get_mut(key) else {
            return;
        };
        let mut source = op.source.take();
        if op.is_of_application() {
            match (result, source.take_if(|_| op.fin.is_none())) {
                (Err(error), Some(source)) => {
                    let source = self.source_keys.withdraw(source);
                    let failed = Some((op.completion(), error));
                    self.steps.push(Step::Withdraw(source, failed));
                }
                (Err(error), None) => {
                    self.messages -= 1;
                    match op.call() {
                        Some(call) => {
                            let fault = Some(Fault::of(error));
                            self.completions.ranges_ended(call, 1, fault);
                        }
                        None => self.completions.failed(op.completion(), 0, error),
                    }
                }
                (Ok(()), unread) => {
                    source = source.or(unread);
                    self.messages -= 1;
                    match op.kind {
                        Kind::Message => {
                            self.completions.sent(&op.message, op.context, op.wanted);
                        }
                        _ => match op.call() {
                            Some(call) => self.completions.ranges_ended(call, 1, None),
                            None => self.completions.done(op.completion(), None, op.wanted),
                        },
                    }
                }
            }
        }
        let (slot, posted_on) = (op.slot.take(), op.posted_on);
        // an answered packet was sent
        let answered = op.fin.is_some();
        let kind = op.kind;
        self.answer_ended(kind);
        if self.rma.fences != 0 {
            self.pass_fences(key);
        }
        self.tx.free(key);
        if let Some(source) = source {
            self.release_source(source);
        }
        let Some(slot) = slot else {
            return;
        };
        match posted_on.and_then(|link| self.links.get_mut(link)) {
            // the device may still send it
            Some(link) if result.is_err() && !answered => link.keep_until_removed(slot),
            _ => self.memory.give_back(slot),
        }
        self.has_memory();
    }

    /// Ends a message that was not sent as EAGER, if all about it is known.
    fn finish_if_over(&mut self, key: TxKey) {
        let Some(op) = self.tx.get(key).filter(|op| op.is_over()) else {
            return;
        };
        let result = match op.fin {
            None | Some(0) => Ok(()),
            Some(status) => Err(FiErrno::new(status.into())),
        };
        self.finish(key, result);
    }

    /// Posts a numbered packet. `None`: no room, or no memory.
    fn post_packet(&mut self, link: LinkKey, header: Header, key: TxKey, form: Form) -> Option<()> {
        if form == Form::Rts && has_room(self.links.get_mut(link)?, &mut self.xrc, true) {
            self.register_source(key);
        }
        let record = self.links.get_mut(link)?;
        if !has_room(record, &mut self.xrc, true) {
            return None;
        }
        let op = self.tx.get_mut(key)?;
        let packet = Packet {
            header,
            body: op.body(key, form),
        };
        let mut bytes = [0; MAX_INLINE];
        // the array is longer
        let size = bytes
            .first_chunk_mut()
            .map_or(0, |head| packet.encode(head));
        let len = if op.has_payload(form) { op.len } else { 0 };
        let posted = Posted::Numbered(header.number);
        if size + len <= self.max_inline {
            let payload = &mut bytes[size..size + len];
            match &op.slot {
                Some(slot) if op.copied => {
                    let copied = &self.memory.bytes(slot)[PAYLOAD..PAYLOAD + len];
                    payload.copy_from_slice(copied);
                }
                // SAFETY: the application keeps the buffers until the operation completes.
                _ => unsafe { op.iov.read(0, payload) },
            }
            let sge = Sge {
                addr: bytes.as_ptr() as u64,
                length: (size + len) as u32,
                lkey: Lkey::default(),
            };
            let solicited = op.is_solicited();
            if let Err(error) = post(
                record,
                &mut self.xrc,
                sge,
                SendFlags {
                    inline: true,
                    solicited,
                },
                posted,
            ) {
                self.post_refused(link, error);
                return None;
            }
            (op.form, op.posted) = (form, true);
            return Some(());
        }
        if op.slot.is_none() {
            let Ok(slot) = self.memory.take() else {
                self.wait_for_memory(link);
                return None;
            };
            op.slot = Some(slot);
        }
        let slot = op.slot.as_ref()?;
        let packet = self.memory.bytes_mut(slot);
        let begin = PAYLOAD - size;
        packet[begin..PAYLOAD].copy_from_slice(&bytes[..size]);
        if !op.copied {
            // SAFETY: the application keeps the buffers until the operation completes.
            unsafe { op.iov.read(0, &mut packet[PAYLOAD..PAYLOAD + len]) };
        }
        let sge = self.memory.sge(slot, begin, size + len);
        let solicited = op.is_solicited();
        if let Err(error) = post(
            record,
            &mut self.xrc,
            sge,
            SendFlags {
                inline: false,
                solicited,
            },
            posted,
        ) {
            self.post_refused(link, error);
            return None;
        }
        (op.form, op.posted, op.posted_on) = (form, true, Some(record.key()));
        Some(())
    }

    /// The device has refused a request although the send queue of the link has room. After an
    /// error that passes, the driver posts it again ([`Self::post_again`]); another one breaks the
    /// link.
    #[cold]
    fn post_refused(&mut self, link: LinkKey, error: FiErrno) {
        info_log!(EpData, "ibv_post_send: {error}");
        if error != FiErrno::EAGAIN {
            self.todo.push_back(Todo::Broken(link));
        } else if !self.again.contains(&link) {
            self.again.push(link);
        }
    }

    /// Whether the device has refused requests, which the driver posts again.
    #[inline]
    pub(super) fn posts_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// What follows if the device has refused requests: they are posted again.
    pub(super) fn post_again(&mut self, core: &Core<Self>) {
        for link in self.again.drain(..) {
            self.todo.push_back(Todo::Room(link));
            let peer = core.peer_of(link);
            let reads = peer.filter(|peer| self.pulls.has_waiting(*peer));
            self.todo.extend(reads.map(Todo::Pull));
        }
    }

    /// Posts a packet without number. `None`: no room, or no memory.
    fn post_control(&mut self, link: LinkKey, packet: &Packet) -> Option<()> {
        let mut head = [0; MAX_HEAD];
        let size = packet.encode(&mut head);
        let solicited = matches!(
            packet.body,
            Body::Hello(_) | Body::Close(_) | Body::Attach(_)
        ) || matches!(packet.body, Body::Credit { recall: true, .. });
        if self.control_to_ring(link, (&head, size), solicited) {
            return Some(());
        }
        let record = self.links.get_mut(link)?;
        if !has_room(record, &mut self.xrc, false) {
            return None;
        }
        if size <= self.max_inline {
            let sge = Sge {
                addr: head.as_ptr() as u64,
                length: size as u32,
                lkey: Lkey::default(),
            };
            let posted = Posted::Control(None);
            let sent = post(
                record,
                &mut self.xrc,
                sge,
                SendFlags {
                    inline: true,
                    solicited,
                },
                posted,
            );
            return sent.map_err(|error| self.post_refused(link, error)).ok();
        }
        let Ok(slot) = self.memory.take() else {
            self.wait_for_memory(link);
            return None;
        };
        self.memory.bytes_mut(&slot)[..size].copy_from_slice(&head[..size]);
        let sge = self.memory.sge(&slot, 0, size);
        let number = slot.number();
        let posted = Posted::Control(Some(slot));
        let sent = post(
            record,
            &mut self.xrc,
            sge,
            SendFlags {
                inline: false,
                solicited,
            },
            posted,
        );
        let refused = |error| {
            self.memory.give_back(Slot::of_refused_post(number));
            self.post_refused(link, error);
        };
        sent.map_err(refused).ok()
    }

    /// Begins a message of the application.
    ///
    /// # Errors
    /// `EAGAIN`: 2^24 operations are under way.
    pub(super) fn begin(&mut self, op: Operation) -> Result<TxKey> {
        let fenced = op.is_fenced();
        let key = self.tx.insert(op).ok_or(FiErrno::EAGAIN)?;
        self.rma.fences += u32::from(fenced);
        self.messages += 1;
        Ok(key)
    }

    /// Reverts [`Self::begin`]: the operation was refused.
    pub(super) fn abandon(&mut self, key: TxKey) {
        if let Some(op) = self.tx.remove(key) {
            self.messages -= 1;
            self.rma.fences -= u32::from(op.is_fenced());
            self.release(op);
        }
    }

    /// A part of a message could not be passed to the core, because there is no memory, or the
    /// message or its session has ended.
    pub(super) fn refused(&mut self, key: TxKey) {
        self.complete(key, Err(FiErrno::ENOMEM));
    }

    /// Whether the message of a part is still under way, and the receiver has not ended it.
    pub(super) fn is_part_of_open_message(&self, part: TxKey) -> bool {
        let kind = self.tx.get(part).map(|part| part.kind);
        let open = |of| self.tx.get(of).is_some_and(|op| op.fin.is_none());
        matches!(kind, Some(Kind::Data { of, .. }) if open(of))
    }

    /// Number of messages and atomics that are not complete. Those that were announced, and
    /// atomics, are answered after their packet is complete.
    #[inline]
    pub(super) fn messages(&self) -> usize {
        self.messages
    }

    /// Number of messages that are under way, or whose entry was not taken.
    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        self.messages + self.rma.ops.len() + self.completions.len(Side::Tx)
    }

    /// Whether packets have not reached their peers that the application cannot repeat: copies,
    /// answers, and packets without number, which may be the last *processed*.
    pub(super) fn owes(&mut self) -> bool {
        let sends = self.tx.any(|op| match op.kind {
            // a message that was announced is at this side until it is answered
            Kind::Message | Kind::Atomic(_) => op.copied && !op.is_over(),
            Kind::Data { of, .. } => op.in_core && self.tx.get(of).is_some_and(|it| it.copied),
            _ => op.in_core,
        });
        // posts probes, so it is called in any case
        self.links.sends_control() || self.circuits_send_control() || sends || self.owes_rma()
    }
}
