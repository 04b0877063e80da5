//! Packets through the rings of links. `docs/rdm.md`, "Rings".

use super::{Executor, PacketMemoryRef, Todo};
use crate::rdm::completions::Reader;
use crate::rdm::core::direct::{Direct, RingMessages};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Form;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Core, Origin, Post};
use crate::rdm::iov::Iov;
use crate::rdm::link::ring::{Content, LARGE, LinkRing, RingPacket, RingPost, SLOTS};
use crate::rdm::operations::{Operation, PAYLOAD};
use crate::rdm::packet_memory::PacketMemory;
use crate::rdm::receives::Envelope;
use crate::rdm::table_keys::TxKey;
use crate::verbs::{Message as RingMessage, Next, NextSlot, RingProbe, Run};
use crate::wire::rdm::packet::{HEADER_SIZE, MAX_HEAD, Message, SLOT_SIZE, eager_credit};
use crate::wire::rdm::ring::{self, Eager};
use crate::wire::rdm::{Credit, Header, Number, Packet};

/// Packets in the rings of a link that are read before a packet of its shared receive queue: a
/// packet has a slot or more, so the rings have fewer.
const ALL: usize = (SLOTS + LARGE) as usize;

/// Slots after which a run ends, so that a sender whose messages fill the ring does not wait for
/// its room until all messages were read: 16 KiB.
const SHARE: u32 = 256;
/// Slots whose room is given back to the sender at once; that of fewer slots by a later call.
pub(super) const MANY: u32 = 8;

/// Why a run of messages in a ring has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum Stop {
    /// The ring has no further packet.
    Empty,
    /// The reader has no room for another entry.
    Full,
    /// Any other reason.
    Other,
}

/// Messages in a ring, in front of the device's calls.
struct RingRun<'a, 'b, 'c> {
    executor: &'a mut Executor,
    key: LinkKey,
    run: Run,
    reader: Option<&'a mut Reader<'b, 'c>>,
    /// How many further messages it takes.
    left: usize,
    stop: Stop,
    /// A message was not delivered by the fast path.
    other: bool,
}

impl RingMessages for RingRun<'_, '_, '_> {
    type Message = (Eager, RingMessage);

    #[inline(always)]
    fn next(&mut self) -> Option<(Header, u32, Self::Message)> {
        // SAFETY: `read_run`.
        let message = match unsafe { self.run.peek() } {
            Next::Message(message) => message,
            Next::Empty => {
                self.stop = Stop::Empty;
                return None;
            }
            Next::Other => return None,
        };
        // SAFETY: nothing of the ring is consumed meanwhile.
        let (eager, len) = unsafe { as_eager(&message) }?;
        Some((eager.header, len, (eager, message)))
    }

    #[inline(always)]
    fn deliver(&mut self, from: Origin, (eager, message): Self::Message) -> Credit {
        self.run.take(&message);
        self.run.prefetch();
        self.left -= 1;
        let reader = self.reader.as_deref_mut();
        // SAFETY: the ring holds the payload until it is consumed.
        if unsafe { self.executor.deliver_whole(from, &eager, &message, reader) } {
            return eager_credit((message.len() - eager.prefix()) as u32);
        }
        self.other = true;
        self.executor.arriving = Some(self.key);
        self.executor.deliver_any(from, &eager, &message)
    }

    #[inline(always)]
    fn is_done(&mut self) -> bool {
        if self.reader.as_ref().is_some_and(|reader| reader.is_full()) {
            self.stop = Stop::Full;
            return true;
        }
        let share = self.run.taken() >= SHARE;
        self.left == 0 || share || self.other && !self.executor.todo.is_empty()
    }
}

/// A message in a ring as EAGER without ACK, and the length of its payload in bytes. `None`: it is
/// another packet, or none at all.
///
/// # Safety
/// The ring holds the payload.
#[inline(always)]
unsafe fn as_eager(message: &RingMessage) -> Option<(Eager, u32)> {
    // SAFETY: the caller's promise; a hostile peer may change the bytes.
    let prefix = || unsafe { message.payload().cast::<u64>().read_unaligned() };
    let eager = ring::as_eager(&message.words(), message.len(), || u64::from_le(prefix()))?;
    // at most 8 KiB
    let len = (message.len() - eager.prefix()) as u32;
    Some((eager, len))
}

impl Executor {
    /// Sends a message through a ring without an operation. If the link has ended, the message may
    /// have arrived, and has to be posted as an operation next: with the same number.
    ///
    /// # Safety
    /// The buffers are readable.
    #[inline]
    pub(in crate::rdm) unsafe fn send_direct(
        &mut self,
        core: &mut Core<Self>,
        peer: PeerKey,
        message: &Message,
        iov: &Iov,
    ) -> RingPost {
        let Some(data) = message.narrow() else {
            return RingPost::No;
        };
        let Some((direct, ring)) = self.direct(core, peer, iov.len()) else {
            return RingPost::No;
        };
        // SAFETY: the caller promises the buffers.
        let posted = unsafe {
            match data {
                None => ring.post_eager(ring::eager(&direct.header, message.tag), iov),
                Some(data) => {
                    // at most 8 KiB
                    let len = iov.len() as u32;
                    let whole = ring::eager_with_data(&direct.header, message.tag, data, len);
                    ring.post_prefixed(&whole, iov)
                }
            }
        };
        if posted == RingPost::Sent {
            direct.sent();
        }
        posted
    }

    /// As [`Self::send_direct`], for a message of one buffer without ACK and with CQ data of at
    /// most 32 bits ([`Message::narrow`]).
    ///
    /// # Safety
    /// `len` bytes are readable.
    #[inline(always)]
    pub(in crate::rdm) unsafe fn send_buffer(
        &mut self,
        core: &mut Core<Self>,
        (peer, tag, data): (PeerKey, Option<u64>, Option<u32>),
        (from, len): (*const u8, usize),
    ) -> RingPost {
        // the line arrives while the message is examined
        if len <= NextSlot::LONGEST
            && data.is_none()
            && let Some((of, slot)) = self.next_slot
            && of == peer
        {
            slot.acquire();
        }
        let Some((direct, ring)) = self.direct(core, peer, len) else {
            return RingPost::No;
        };
        // SAFETY: the caller promises the buffer.
        let posted = unsafe {
            match data {
                None => ring.post_buffer(ring::eager(&direct.header, tag), from, len),
                Some(data) => {
                    // at most 8 KiB
                    let whole = ring::eager_with_data(&direct.header, tag, data, len as u32);
                    ring.post_prefixed_buffer(&whole, from, len)
                }
            }
        };
        if posted == RingPost::Sent {
            direct.sent();
            let slot = ring.next_slot();
            self.next_slot = Some((peer, slot));
        }
        posted
    }

    /// A message that can be written to a ring now, and the ring.
    #[inline(always)]
    fn direct<'a>(
        &'a mut self,
        core: &'a mut Core<Self>,
        peer: PeerKey,
        len: usize,
    ) -> Option<(Direct<'a>, &'a mut LinkRing)> {
        // a message may have to wait for RMA (`waits_for_rma`)
        if self.rma.ops.len() != 0 {
            return None;
        }
        let direct = core.direct(peer, len)?;
        let ring = self.links.get_mut(direct.link)?.free_ring()?;
        Some((direct, ring))
    }

    /// Whether a message to the peer could go through a ring, if SENDs before it had completed.
    #[inline]
    pub(in crate::rdm) fn ring_waits(&mut self, core: &Core<Self>, peer: PeerKey) -> bool {
        let link = core
            .out_link(peer)
            .and_then(|link| self.links.get_mut(link));
        link.is_some_and(|link| link.ring_waits())
    }

    /// Posts a numbered packet to the ring of a link. `None`: the packet goes through the queue
    /// pair.
    pub(super) fn post_to_ring(
        &mut self,
        link: LinkKey,
        header: Header,
        key: TxKey,
        form: Form,
    ) -> Option<Post> {
        self.links.get_mut(link)?.free_ring()?;
        if form == Form::Rts {
            self.register_source(key);
        }
        let ring = self.links.get_mut(link)?.free_ring()?;
        let op = self.tx.get_mut(key)?;
        let posted = match op.announcement(key, form, &header) {
            Some(whole) => ring.post_packet(&whole),
            None => Self::post_any(ring, &self.memory, op, (key, form), header),
        };
        match posted {
            RingPost::No | RingPost::Full => return None,
            RingPost::Sent => {}
            RingPost::Ended => self.todo.push_back(Todo::Broken(link)),
        }
        (op.form, op.posted) = (form, true);
        Some(match posted {
            RingPost::Sent => Post::Delivered,
            // it is posted again on the next link
            _ => Post::Posted,
        })
    }

    /// Posts the packet of an operation to a ring, whatever it is.
    fn post_any(
        ring: &mut LinkRing,
        memory: &PacketMemory,
        op: &Operation,
        (key, form): (TxKey, Form),
        header: Header,
    ) -> RingPost {
        let packet = Packet {
            header,
            body: op.body(key, form),
        };
        let mut head = [0; MAX_HEAD];
        let size = packet.encode(&mut head);
        let content = match &op.slot {
            _ if !op.has_payload(form) => Content::None,
            Some(slot) if op.copied => {
                Content::Bytes(&memory.bytes(slot)[PAYLOAD..PAYLOAD + op.len])
            }
            _ => Content::Buffers(&op.iov),
        };
        // SAFETY: the application keeps the buffers until the operation completes.
        unsafe { ring.post((&head, size), content, op.is_solicited()) }
    }

    /// Posts a packet without number to the ring of a link. `false`: nothing was posted, and it
    /// goes through the queue pair. If the link has ended, the packet may be in the ring: it counts
    /// as posted, and what follows is what follows from the end of a link. A grant whose number was
    /// used again could be dropped by the peer as one that it has already.
    pub(super) fn control_to_ring(
        &mut self,
        link: LinkKey,
        head: (&[u8; MAX_HEAD], usize),
        solicited: bool,
    ) -> bool {
        let record = self.links.get_mut(link);
        let Some(ring) = record.and_then(|record| record.free_ring()) else {
            return false;
        };
        // SAFETY: no buffers of the application.
        match unsafe { ring.post(head, Content::None, solicited) } {
            RingPost::Sent => true,
            RingPost::No | RingPost::Full => false,
            RingPost::Ended => {
                self.todo.push_back(Todo::Broken(link));
                true
            }
        }
    }

    /// Lists the rings in which packets have arrived, and that are not examined by each progress
    /// call. Returns whether there are others than those listed.
    pub(in crate::rdm) fn find_arrivals(&mut self) -> bool {
        const COUNT: usize = 16;
        let mut cookies = [0; COUNT];
        // in a forked child nothing arrives
        let found = self.objects.cq.ring_arrivals(&mut cookies).unwrap_or(0);
        for cookie in cookies.iter().take(found) {
            // the number of a link; one of a link that has ended is not found
            self.links
                .ring_arrival(LinkKey::from_number(*cookie as u32));
        }
        found == COUNT
    }

    /// Fast path of [`Self::read_run`]: one message, whose receive is there and takes all of it,
    /// for a reader that has room. Returns whether [`Self::end_run`] must follow at once; if not,
    /// it follows later.
    ///
    /// # Errors
    /// The run: nothing has changed.
    ///
    /// # Safety
    /// As [`Self::read_run`]; the message is that of [`Run::peek`].
    #[inline(always)]
    pub(in crate::rdm) unsafe fn read_one(
        &mut self,
        core: &mut Core<Self>,
        key: LinkKey,
        (mut run, message): (Run, &RingMessage),
        reader: &mut Reader<'_, '_>,
    ) -> Result<bool, Run> {
        // Below no link is removed and no ring read.
        // SAFETY: nothing of the ring is consumed meanwhile.
        let Some((eager, len)) = (unsafe { as_eager(message) }) else {
            return Err(run);
        };
        let Some(mut from) = core.direct_from(key) else {
            return Err(run);
        };
        if !from.is_next(&eager.header, len) {
            return Err(run);
        }
        // SAFETY: the ring holds the payload until it is consumed.
        if !unsafe { self.deliver_whole(from.origin, &eager, message, Some(reader)) } {
            return Err(run);
        }
        from.take(len);
        from.give_back(eager_credit(len));
        run.take(message);
        let half = from.is_half_used();
        // SAFETY: as above.
        let behind = unsafe { run.leave() }.unwrap_or_else(|slots| self.give_back(key, slots));
        Ok(half || behind >= MANY)
    }

    /// Gives back the room of packets at the end of a ring. Returns [`MANY`].
    #[cold]
    pub(super) fn give_back(&mut self, key: LinkKey, slots: u32) -> u32 {
        self.links.give_back(key, slots);
        MANY
    }

    /// As [`Self::fill_whole`], of a message in a ring.
    ///
    /// # Safety
    /// The ring holds the payload.
    #[inline(always)]
    unsafe fn deliver_whole(
        &mut self,
        from: Origin,
        eager: &Eager,
        message: &RingMessage,
        reader: Option<&mut Reader<'_, '_>>,
    ) -> bool {
        let (prefix, envelope) = (eager.prefix(), (eager.tag, eager.data));
        // SAFETY: the caller's promise; the prefix is a part of the payload.
        unsafe {
            let content = (message.payload().add(prefix), message.len() - prefix);
            self.fill_whole(from.peer, envelope, content, reader)
        }
    }

    /// Processes messages in the ring of a link that need no call of the device: at most `max`.
    /// Stops when the reader is full, or when a message adds to [`Executor::todo`]. Returns the
    /// number of messages and the reason to stop. If the number is not 0, the caller continues with
    /// [`Self::end_run`]. At the call `max` is not 0, the reader has room, and `todo` is empty.
    ///
    /// # Safety
    /// The ring is that of the link, which lives, and this is not a forked child.
    pub(in crate::rdm) unsafe fn read_run(
        &mut self,
        core: &mut Core<Self>,
        (key, ring): (LinkKey, RingProbe),
        max: usize,
        reader: Option<&mut Reader<'_, '_>>,
    ) -> (usize, Stop) {
        // SAFETY: the caller's promise; neither the delivery of a message nor matching removes a
        // link or reads a ring: what does is listed in `todo`, and done after this call.
        let run = unsafe { ring.run() };
        let mut messages = RingRun {
            executor: self,
            key,
            run,
            reader,
            left: max,
            stop: Stop::Other,
            other: false,
        };
        core.arrived_direct(key, &mut messages);
        let (run, taken, stop) = (messages.run, max - messages.left, messages.stop);
        // SAFETY: as above.
        let left = unsafe { run.leave() };
        left.unwrap_or_else(|slots| self.give_back(key, slots));
        (taken, stop)
    }

    /// What follows from messages that [`Self::read_run`] has processed: their room is given back
    /// to the sender, and the peer gets credit.
    pub(in crate::rdm) fn end_run(&mut self, core: &mut Core<Self>, key: LinkKey) {
        self.links.give_back(key, 0);
        core.end_direct(key);
    }

    /// Whether the next packet in the ring of a link acknowledges an operation of which the device
    /// queue has the completion still.
    pub(in crate::rdm) fn acknowledges_unsent(&mut self, core: &Core<Self>, key: LinkKey) -> bool {
        core.acknowledges_unsent(key, || {
            let ring = self.links.get_mut(key)?.ring.as_mut()?;
            let (_, head) = RingPacket::new(ring.next()?);
            let head = head.filter(|head| head.total <= SLOT_SIZE)?;
            let packet = Packet::decode(head.bytes(), head.total).ok()?;
            Some(packet.header.processed)
        })
    }

    /// Processes the next packet in the ring of a link, whatever it is. `false`: there is none, or
    /// it has to wait for packets in the shared receive queue. One that waits in vain violates the
    /// protocol.
    pub(in crate::rdm) fn read_ring(&mut self, core: &mut Core<Self>, key: LinkKey) -> bool {
        let ring = self.links.get_mut(key).and_then(|link| link.ring.as_mut());
        let Some(message) = ring.and_then(|ring| ring.next()) else {
            return false;
        };
        self.arriving = Some(key);
        let (place, head) = RingPacket::new(message);
        let packet = match head {
            Some(head) if head.total <= SLOT_SIZE => Packet::decode(head.bytes(), head.total).ok(),
            _ => None,
        };
        match packet {
            // otherwise the core ends the link
            Some(packet)
                if core.is_early(key, &packet) && !self.is_overdue(key, packet.header.number) =>
            {
                return false;
            }
            Some(packet) => core.arrived(key, &packet, PacketMemoryRef::Ring(place), self),
            None => core.violated(key, PacketMemoryRef::Ring(place), self),
        }
        if let Some(ring) = self.links.get_mut(key).and_then(|link| link.ring.as_mut()) {
            ring.consume();
        }
        true
    }

    /// Whether the next packet in a ring, which waits for packets in the shared receive queue,
    /// waits in vain.
    #[cold]
    fn is_overdue(&mut self, key: LinkKey, number: Number) -> bool {
        let polls = self.empty_polls;
        let ring = self.links.get_mut(key).and_then(|link| link.ring.as_mut());
        ring.is_some_and(|ring| ring.waits_in_vain(number, polls))
    }

    /// Delivers a message in a ring that is not announced. Returns the credit that it does not use
    /// any more.
    #[inline(never)]
    fn deliver_any(&mut self, origin: Origin, eager: &Eager, message: &RingMessage) -> Credit {
        let prefix = eager.prefix();
        let envelope = Envelope {
            peer: origin.peer,
            tag: eager.tag,
            data: eager.data.map(u64::from),
            len: (message.len() - prefix) as u64,
        };
        let place = PacketMemoryRef::Ring(RingPacket::eager(*message, prefix));
        self.eager(origin, &envelope, &place, HEADER_SIZE)
    }

    /// Processes the packets of a link that were sent before one that has arrived in the shared
    /// receive queue.
    #[inline]
    pub(super) fn read_earlier(&mut self, core: &mut Core<Self>, key: LinkKey) {
        let ring = self.links.get_mut(key).and_then(|link| link.ring.as_ref());
        if ring.is_some_and(|ring| ring.is_ready()) {
            for _ in 0..ALL {
                if !self.read_ring(core, key) {
                    break;
                }
            }
        }
    }

    /// Releases the memory of a packet.
    #[inline]
    pub(super) fn free(&mut self, place: PacketMemoryRef) {
        if let PacketMemoryRef::Slot(slot) = place {
            self.post_receive(slot);
        }
    }
}

impl PacketMemoryRef {
    /// Copies a part of the packet to buffers of the application.
    ///
    /// # Safety
    /// The buffers are writable; the decoder has checked the part.
    #[inline]
    pub(super) unsafe fn copy_to(
        &self,
        memory: &PacketMemory,
        (at, len): (usize, usize),
        to: &Iov,
        offset: usize,
    ) {
        match self {
            // SAFETY: the caller promises the buffers.
            Self::Slot(slot) => unsafe {
                to.write(offset, &memory.bytes(slot)[at..at + len]);
            },
            // SAFETY: the caller promises the buffers, and the ring holds the packet.
            Self::Ring(packet) => unsafe {
                to.write_from(offset, packet.at(at), len);
            },
        }
    }
}
