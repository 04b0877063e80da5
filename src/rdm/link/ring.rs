//! The receive ring of a link (`verbs/ring.rs`), which only some devices have: `docs/rdm.md`,
//! "Rings". `wire/rdm/ring.rs` has the form of packets.

#![allow(
    unsafe_code,
    reason = "posts and reads memory of the application and of a ring"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forks::{Owner, PerProcess};

use crate::errno::Result;
use crate::log::info_log;
use crate::rdm::core::link::LinkKey;
use crate::rdm::iov::{Iov, MAX_IOV};
use crate::verbs::{Attached, Message, NextSlot, Polled, Posted, Qp, Ring, RingProbe};
use crate::wire::rdm::Number;
use crate::wire::rdm::packet::{HEADER_SIZE, MAX_HEAD};
use crate::wire::rdm::ring::{Head, PREFIX, Words, head, words};

/// Slots of a ring: the longest packet fits into half of them.
pub(in crate::rdm) const SLOTS: u32 = 128;
/// Longest payload in such a ring, in bytes.
const LONGEST: usize = 64 * (SLOTS as usize / 2 - 1);
/// Slots of a ring that carries long messages: 15 parts of 8 KiB.
pub(in crate::rdm) const LARGE: u32 = 2048;
/// Short messages that have arrived as SENDs before the ring is enlarged: the first ones of a
/// connection may be SENDs, because HELLO is under way.
const OVERFLOWS: u32 = 16;
/// Refused posts, two for a message, after which it is worth while to wait for room: the peer has
/// enlarged its ring by then, because as many messages were SENDs.
const REFUSALS: u32 = 4 * OVERFLOWS;

/// The payload of a packet in memory of the application or the engine.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) enum Content<'a> {
    None,
    Bytes(&'a [u8]),
    Buffers(&'a Iov),
}

/// The result of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(in crate::rdm) enum RingPost {
    /// The packet is in the peer's ring.
    Sent,
    /// Nothing was posted: the packet goes through the queue pair.
    No,
    /// As [`Self::No`], because the ring has no room now. The first [`REFUSALS`] are [`Self::No`].
    Full,
    /// The link has ended. The packet may be in the peer's ring.
    Ended,
}

/// The result of a post of a part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(in crate::rdm) enum PartInRing {
    /// The part is in the peer's ring.
    Sent,
    /// There is no room now.
    Full,
    /// Requests of the queue pair before it have not completed.
    Behind,
    /// The peer's ring is too small, or there is none.
    TooLong,
    /// The link has ended. The part may be in the peer's ring.
    Ended,
}

/// A packet in a ring, until [`LinkRing::consume`].
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct RingPacket {
    message: Message,
    /// Offset in the packet of the first byte of the ring's payload.
    begin: usize,
}

/// How long a packet may wait for those that precede it: a thread that takes one from the device
/// may not have the processor.
const EARLY: Duration = Duration::from_secs(1);

/// A packet that waits for those that precede it.
#[derive(Clone, Copy, Debug)]
struct Early {
    number: Number,
    /// When it was found, and the number of empty polls of the device before.
    since: Instant,
    polls: u32,
}

/// See the module.
#[derive(Debug)]
pub(in crate::rdm) struct LinkRing {
    ring: Ring,
    /// Whether the peer has a ring; `None`: not known yet.
    pub(in crate::rdm) attached: Option<bool>,
    /// Each progress call examines the ring.
    pub(in crate::rdm) hot: bool,
    /// A packet has arrived since [`Links::cool`](super::links::Links::cool) has examined the ring.
    pub(in crate::rdm) used: bool,
    /// Nothing will arrive any more.
    pub(in crate::rdm) ended: bool,
    /// The last packet that was found before those that precede it.
    early: Option<Early>,
    /// The larger ring, if it was made; `None`: not tried yet.
    large: Option<Option<Large>>,
    /// Number of short messages that have arrived as SENDs.
    overflows: u32,
    /// Posts that have found the peer's ring full.
    full: u32,
    /// The process that has created the ring.
    owner: Owner,
    /// The connection ends during the next post of a packet, but not of a part, and whether the
    /// packet is in the ring nevertheless.
    #[cfg(test)]
    pub(in crate::rdm) ends_next: Option<bool>,
}

/// Larger rings of the process.
static LARGE_RINGS: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::new(0));
/// Their largest number: half of the device's memory for rings stays for new connections.
const MOST: usize = 256;

/// A larger ring, with the number of those of its process.
#[derive(Debug)]
struct Large(&'static AtomicUsize);

impl Large {
    /// `None`: there are [`MOST`].
    fn new() -> Option<Self> {
        let most = |count| (count < MOST).then_some(count + 1);
        let all = LARGE_RINGS.get();
        let counted = all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, most);
        counted.ok().map(|_| Self(all))
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LinkRing {
    /// Creates the ring of a queue pair that is not connected yet. `None`: the device has none, or
    /// no memory for it.
    pub(in crate::rdm) fn create(qp: &Arc<Qp>, link: LinkKey) -> Option<Self> {
        // a forked child has no mapping of the ring
        if !forks::are_counted() {
            return None;
        }
        let ring = Ring::create(qp, SLOTS, link.number().into());
        let ring = ring.inspect_err(|error| info_log!(EpCtrl, "no ring for {link:?}: {error}"));
        Some(Self {
            ring: ring.ok()??,
            attached: None,
            hot: false,
            used: false,
            ended: false,
            early: None,
            large: None,
            overflows: 0,
            full: 0,
            owner: Owner::this_process(),
            #[cfg(test)]
            ends_next: None,
        })
    }

    /// The slot of the next packet.
    #[inline(always)]
    pub(in crate::rdm) fn next_slot(&self) -> NextSlot {
        self.ring.next_slot()
    }

    /// Whether the peer has a ring.
    #[inline]
    fn is_attached(&mut self) -> bool {
        self.attached.unwrap_or_else(|| self.attach())
    }

    #[cold]
    fn attach(&mut self) -> bool {
        self.attached = match self.ring.attach() {
            Ok(Attached::Ready(_)) => Some(true),
            Ok(Attached::Absent) => Some(false),
            Ok(Attached::NotYet) | Err(_) => None,
        };
        self.attached == Some(true)
    }

    /// The result of a post that cannot be passed to the device.
    #[inline(always)]
    fn refuses(&mut self) -> Option<RingPost> {
        if !self.is_attached() {
            return Some(RingPost::No);
        }
        #[cfg(test)]
        if self.ends_next.take_if(|arrives| !*arrives).is_some() {
            return Some(RingPost::Ended);
        }
        None
    }

    /// Posts EAGER with the words of [`crate::wire::rdm::ring::eager`].
    ///
    /// # Safety
    /// The application's buffers are readable.
    #[inline]
    pub(in crate::rdm) unsafe fn post_eager(&mut self, words: Words, payload: &Iov) -> RingPost {
        if let Some(refused) = self.refuses() {
            return refused;
        }
        // SAFETY: the caller promises the buffers.
        let posted = unsafe {
            match payload.in_one() {
                Some((addr, len)) => self.ring.post(words, addr, len, false),
                None => {
                    let mut pieces = [const { EMPTY }; MAX_IOV];
                    let count = payload.list(&mut pieces);
                    self.ring.post_pieces(words, &pieces[..count], false)
                }
            }
        };
        self.outcome(posted)
    }

    /// As [`Self::post_eager`], with a payload of one buffer.
    ///
    /// # Safety
    /// `len` bytes are readable.
    #[inline(always)]
    pub(in crate::rdm) unsafe fn post_buffer(
        &mut self,
        words: Words,
        from: *const u8,
        len: usize,
    ) -> RingPost {
        if let Some(refused) = self.refuses() {
            return refused;
        }
        // SAFETY: the caller promises the buffer.
        let posted = unsafe { self.ring.post(words, from, len, false) };
        self.outcome(posted)
    }

    /// Posts EAGER with the words and the prefix of
    /// [`crate::wire::rdm::ring::eager_with_data`].
    ///
    /// # Safety
    /// The application's buffers are readable.
    pub(in crate::rdm) unsafe fn post_prefixed(
        &mut self,
        whole: &(Words, [u8; PREFIX]),
        payload: &Iov,
    ) -> RingPost {
        if let Some(refused) = self.refuses() {
            return refused;
        }
        // SAFETY: the caller promises the buffers.
        let posted = unsafe { self.post_behind(whole, payload) };
        self.outcome(posted)
    }

    /// Posts words, and a payload behind its prefix, to an attached ring.
    ///
    /// # Safety
    /// The application's buffers are readable.
    unsafe fn post_behind(
        &mut self,
        (words, prefix): &(Words, [u8; PREFIX]),
        payload: &Iov,
    ) -> Result<Posted> {
        let mut pieces = [const { EMPTY }; 1 + MAX_IOV];
        pieces[0] = piece(prefix.as_ptr(), PREFIX);
        let count = 1 + payload.list(&mut pieces[1..]);
        // SAFETY: the prefix is only read, and the others are the caller's.
        unsafe { self.ring.post_pieces(*words, &pieces[..count], false) }
    }

    /// As [`Self::post_prefixed`], with a payload of one buffer.
    ///
    /// # Safety
    /// `len` bytes are readable.
    #[inline]
    pub(in crate::rdm) unsafe fn post_prefixed_buffer(
        &mut self,
        (words, prefix): &(Words, [u8; PREFIX]),
        from: *const u8,
        len: usize,
    ) -> RingPost {
        if let Some(refused) = self.refuses() {
            return refused;
        }
        let mut short = [0; PREFIX + SHORT];
        // SAFETY: the caller promises the buffer; the prefix is only read.
        let posted = unsafe {
            if len <= SHORT {
                short[..PREFIX].copy_from_slice(prefix);
                from.copy_to_nonoverlapping(short[PREFIX..].as_mut_ptr(), len);
                self.ring.post(*words, short.as_ptr(), PREFIX + len, false)
            } else {
                let pieces = [piece(prefix.as_ptr(), PREFIX), piece(from, len)];
                self.ring.post_pieces(*words, &pieces, false)
            }
        };
        self.outcome(posted)
    }

    /// Posts words and a payload that are a whole packet.
    #[inline]
    pub(in crate::rdm) fn post_packet<const N: usize>(
        &mut self,
        (words, payload): &(Words, [u8; N]),
    ) -> RingPost {
        if let Some(refused) = self.refuses() {
            return refused;
        }
        // SAFETY: the payload is only read.
        let posted = unsafe { self.ring.post(*words, payload.as_ptr(), N, false) };
        self.outcome(posted)
    }

    /// Posts a packet: `size` bytes of header and body, and the payload.
    ///
    /// # Safety
    /// The application's buffers are readable.
    pub(in crate::rdm) unsafe fn post(
        &mut self,
        (head, size): (&[u8; MAX_HEAD], usize),
        content: Content<'_>,
        solicited: bool,
    ) -> RingPost {
        if let Some(refused) = self.refuses() {
            return refused;
        }
        let (words, has_prefix) = words(head);
        let mut bytes = [0; PREFIX + MAX_HEAD];
        let mut begin = 0;
        if has_prefix {
            bytes[..PREFIX].copy_from_slice(&head[16..16 + PREFIX]);
            begin = PREFIX;
        }
        let body = &head[HEADER_SIZE..size];
        bytes[begin..begin + body.len()].copy_from_slice(body);
        begin += body.len();
        let mut pieces = [const { EMPTY }; 1 + MAX_IOV];
        pieces[0] = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: begin,
        };
        let count = match content {
            Content::None => 1,
            Content::Bytes(from) => {
                pieces[1] = libc::iovec {
                    iov_base: from.as_ptr().cast_mut().cast(),
                    iov_len: from.len(),
                };
                2
            }
            Content::Buffers(iov) => 1 + iov.list(&mut pieces[1..]),
        };
        // SAFETY: the first part is on the stack, the others are the caller's.
        let posted = unsafe { self.ring.post_pieces(words, &pieces[..count], solicited) };
        self.outcome(posted)
    }

    /// Posts a part of a message, with the words and the prefix of
    /// [`crate::wire::rdm::ring::data`].
    ///
    /// # Safety
    /// The application's buffers are readable.
    pub(in crate::rdm) unsafe fn post_part(
        &mut self,
        whole: &(Words, [u8; PREFIX]),
        part: &Iov,
    ) -> PartInRing {
        if !self.is_attached() {
            return PartInRing::TooLong;
        }
        // SAFETY: the caller promises the buffers.
        match unsafe { self.post_behind(whole, part) } {
            Ok(Posted::Sent) => PartInRing::Sent,
            Ok(Posted::Full) => PartInRing::Full,
            // in a forked child the queue pair refuses the packet too
            Ok(Posted::TooLong) | Err(_) => PartInRing::TooLong,
            Ok(Posted::Ended) => PartInRing::Ended,
        }
    }

    #[inline(always)]
    fn outcome(&mut self, posted: Result<Posted>) -> RingPost {
        #[cfg(test)]
        if self.ends_next.take().is_some() {
            return RingPost::Ended;
        }
        match posted {
            Ok(Posted::Sent) => RingPost::Sent,
            // in a forked child the queue pair refuses the packet too
            Ok(Posted::TooLong) | Err(_) => RingPost::No,
            Ok(Posted::Full) => {
                self.full = self.full.saturating_add(1);
                if self.full > REFUSALS {
                    RingPost::Full
                } else {
                    RingPost::No
                }
            }
            Ok(Posted::Ended) => RingPost::Ended,
        }
    }

    /// Offers the peer a larger ring, the first time; allocates. Returns whether it is one.
    #[cold]
    pub(in crate::rdm) fn grow(&mut self) -> bool {
        if self.large.is_none()
            && self.is_attached()
            && let Some(large) = Large::new()
        {
            let grown = self.ring.grow(LARGE);
            let grown = grown.inspect_err(|error| info_log!(EpData, "no larger ring: {error}"));
            self.large = Some(grown.ok().map(|()| large));
        }
        self.is_large()
    }

    /// A message of this length has arrived as a SEND. Returns whether the ring is too small.
    pub(in crate::rdm) fn overflows(&mut self, len: usize) -> bool {
        self.overflows = self.overflows.saturating_add(1);
        len > LONGEST || self.overflows > OVERFLOWS
    }

    #[inline]
    pub(in crate::rdm) fn is_large(&self) -> bool {
        matches!(self.large, Some(Some(_)))
    }

    /// Whether there may be a packet.
    #[inline]
    pub(in crate::rdm) fn is_ready(&self) -> bool {
        // SAFETY: in the process that has created the ring.
        self.is_here() && unsafe { self.ring.is_ready() }
    }

    /// The ring in a list of rings of the same process.
    pub(in crate::rdm) fn probe(&self) -> RingProbe {
        self.ring.probe()
    }

    /// The process that has created the ring.
    pub(in crate::rdm) const fn owner(&self) -> Owner {
        self.owner
    }

    /// Whether this is the process that has created the ring: [`Self::probe`] may be used.
    pub(in crate::rdm) fn is_here(&self) -> bool {
        self.owner.is_this_process()
    }

    /// Gives back the room of packets that were read in place: see [`Ring::give_back`].
    #[inline]
    pub(in crate::rdm) fn give_back(&mut self, slots: u32) {
        self.used = true;
        // in a forked child nothing is read; a call of the device may have given it back
        let _ = self.ring.give_back(slots);
    }

    /// The next message. In a forked child none.
    #[inline]
    pub(in crate::rdm) fn next(&mut self) -> Option<Message> {
        match self.ring.poll() {
            Ok(Polled::Message(message)) => Some(message),
            Ok(Polled::Empty | Polled::Ending) => None,
            Ok(Polled::Ended | Polled::Broken) | Err(_) => {
                self.ended = true;
                None
            }
        }
    }

    /// The next packet, with this number, waits for those that precede it. `polls`: number of polls
    /// of the device that have found nothing, which wraps. Returns whether it waits in vain: those
    /// before it were in the memory of this side when it was posted, and a poll that has found
    /// nothing since then would have found them.
    pub(in crate::rdm) fn waits_in_vain(&mut self, number: Number, polls: u32) -> bool {
        match self.early.filter(|early| early.number == number) {
            Some(early) => early.polls != polls && early.since.elapsed() >= EARLY,
            None => {
                self.early = Some(Early {
                    number,
                    since: Instant::now(),
                    polls,
                });
                false
            }
        }
    }

    /// Gives the memory of the last message back.
    #[inline]
    pub(in crate::rdm) fn consume(&mut self) {
        self.early = None;
        self.used = true;
        // it was polled
        let _ = self.ring.consume();
    }

    /// Makes the ring hot.
    pub(in crate::rdm) fn heat(&mut self) {
        if !std::mem::replace(&mut self.hot, true) {
            // the caller reads the ring afterwards
            let _ = self.ring.set_hot(true);
        }
    }

    /// Makes the ring cold, by a system call. Returns whether it may have a packet, of which the
    /// device makes no note.
    pub(in crate::rdm) fn cool(&mut self) -> bool {
        self.hot = false;
        // in a forked child nothing arrives
        self.ring.set_hot(false).unwrap_or(false)
    }
}

/// Longest payload that is copied behind its prefix, in bytes.
const SHORT: usize = 56;

fn piece(from: *const u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: from.cast_mut().cast(),
        iov_len: len,
    }
}

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

impl RingPacket {
    /// EAGER with a prefix of so many bytes.
    #[inline]
    pub(in crate::rdm) const fn eager(message: Message, prefix: usize) -> Self {
        let begin = HEADER_SIZE - prefix;
        Self { message, begin }
    }

    /// A packet and a copy of its begin; `None`: it is shorter than a header.
    pub(in crate::rdm) fn new(message: Message) -> (Self, Option<Head>) {
        let (payload, len) = (message.payload(), message.len());
        let copy = |at: usize, to: &mut [u8]| {
            debug_assert!(at + to.len() <= len);
            // SAFETY: the ring holds the payload until it is consumed, and `head` copies bytes of
            // it. A hostile peer may change them meanwhile: the copy is decoded.
            unsafe { std::ptr::copy_nonoverlapping(payload.add(at), to.as_mut_ptr(), to.len()) };
        };
        let head = head(&message.words(), len, copy).ok();
        let begin = head.map_or(HEADER_SIZE, |head| head.begin);
        (Self { message, begin }, head)
    }

    /// The byte of the packet at `offset`, behind its header.
    #[inline]
    pub(in crate::rdm) fn at(&self, offset: usize) -> *const u8 {
        self.message.payload().wrapping_add(offset - self.begin)
    }
}
