//! Messages that are in the memory of the peer when they are posted ([`Post::Delivered`]): they
//! need no operation in the tables. Such a message takes the same number and uses the same credit
//! as any other, so these calls and the other ones can be mixed.
//!
//! [`Post::Delivered`]: super::Post::Delivered

use super::credit::{Inbound, Pool};
use super::link::LinkKey;
use super::ops::{Entry, Form, Uses};
use super::peer::{Peer, PeerKey};
use super::{Core, Io, Origin};
use crate::wire::rdm::packet::{RTS_CREDIT, eager_credit};
use crate::wire::rdm::{Body, Credit, GrantNumber, Header, Number, Packet};

/// Credit of a part of a message.
pub(in crate::rdm) const PART: Credit = Credit::new(0, 1);

/// The result of [`Core::send_part`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartPost {
    /// The part is in the memory of the peer.
    Sent,
    /// Packets before it are not known to have arrived.
    Behind,
    /// There is no credit for it.
    Credit,
    /// There is no link to which it can be posted.
    Closed,
    /// `deliver` has not delivered it.
    Refused,
}

/// EAGER packets without ACK that have arrived on a link, in their order.
pub trait RingMessages {
    /// The content of a packet.
    type Message;

    /// The next packet: its header, and the length of its payload in bytes. It stays the next one
    /// until it is delivered. Not called after [`Self::is_done`].
    fn next(&mut self) -> Option<(Header, u32, Self::Message)>;

    /// Delivers the packet that [`Self::next`] has just returned to matching. Returns the credit
    /// that it does not use any more, as [`Io::deliver`].
    fn deliver(&mut self, from: Origin, message: Self::Message) -> Credit;

    /// Whether no further packet is to be taken, after a delivery.
    fn is_done(&mut self) -> bool;
}

/// A message that can be written to the memory of its peer. Nothing has changed before
/// [`Self::sent`].
pub struct Direct<'a> {
    peer: &'a mut Peer,
    uses: Credit,
    /// The link to which it is written.
    pub link: LinkKey,
    /// Its header.
    pub header: Header,
}

impl Direct<'_> {
    /// The message is in the memory of the peer.
    #[inline(always)]
    pub fn sent(self) {
        let Self { peer, uses, .. } = self;
        peer.outbound.spend_granted(uses);
        peer.next = self.header.number.next();
        peer.completed = peer.next;
        peer.mark_told();
    }

    /// As [`Self::sent`], RTS: FIN ends the operation of the message ([`Core::take_end`], or
    /// [`Core::release`]). [`Core::await_answer`] follows.
    #[inline(always)]
    pub fn announced(self) {
        self.peer.holds += 1;
        self.sent();
    }
}

/// The peer of a link whose EAGER packets without ACK are taken one after the other.
pub struct DirectFrom<'a> {
    /// The peer.
    pub origin: Origin,
    next: Number,
    /// A packet whose header acknowledges this grant, or a later one, is left to [`Core::arrived`].
    unseen: Option<GrantNumber>,
    inbound: &'a mut Inbound,
    expected: &'a mut Number,
    pool: &'a mut Pool,
}

impl DirectFrom<'_> {
    /// Whether this is the next packet of the peer, which has credit for its payload of `len`
    /// bytes. If not, it is passed to [`Core::arrived`].
    #[inline(always)]
    pub fn is_next(&self, header: &Header, len: u32) -> bool {
        header.to.get() == self.origin.peer.number()
            && header.number == *self.expected
            && header.processed.until(self.next) >= 0
            && self
                .unseen
                .is_none_or(|number| header.seen.is_before(number))
            && self.inbound.has(eager_credit(len))
    }

    /// Takes the packet for which [`Self::is_next`] was true.
    #[inline(always)]
    pub fn take(&mut self, len: u32) {
        *self.expected = self.expected.next();
        self.inbound.spend(eager_credit(len));
    }

    /// The packets that were taken do not use this credit any more.
    #[inline(always)]
    pub fn give_back(&mut self, credit: Credit) {
        self.inbound.give_back(credit, self.pool);
    }

    /// Whether the peer has used half of its credit: [`Core::end_direct`] follows at once.
    #[inline(always)]
    pub fn is_half_used(&self) -> bool {
        self.inbound.is_half_used()
    }
}

impl<I: Io> Core<I> {
    /// Whether a message of this length is sent as EAGER on the present link. `true` without one.
    #[inline]
    pub fn may_be_eager(&self, peer: PeerKey, len: usize) -> bool {
        let peer = self.peers.get(peer);
        peer.is_none_or(|peer| peer.out.is_none() || len <= peer.eager as usize)
    }

    /// Begins a message with a payload of `len` bytes, which is sent as EAGER. `None`: something to
    /// the peer is before it, or it needs more credit, and the caller uses [`Self::send`].
    #[inline(always)]
    pub fn direct(&mut self, peer: PeerKey, len: usize) -> Option<Direct<'_>> {
        let peer = self.peers.get_mut(peer)?;
        // an alias has no out-link
        let link = peer.out?;
        // if earlier packets were not known to have arrived, neither would this one be
        if len > peer.eager as usize || !peer.is_clear() {
            return None;
        }
        debug_assert!(self.links.get(link).is_some_and(|link| link.is_open()));
        // at most 8 KiB
        let uses = eager_credit(len as u32);
        let header = peer.header(peer.next);
        peer.outbound.has(uses).then_some(Direct {
            peer,
            uses,
            link,
            header,
        })
    }

    /// Begins the announcement of a message of `len` bytes that is too long for EAGER on the
    /// present link. `None`: as [`Self::direct`].
    #[inline]
    pub fn direct_announcement(&mut self, peer: PeerKey, len: usize) -> Option<Direct<'_>> {
        // a packet whose link ends takes a place (`Self::announced_at_end`)
        if self.ops.is_full() {
            return None;
        }
        let peer = self.peers.get_mut(peer)?;
        let link = peer.out?;
        if len <= peer.eager as usize || !peer.is_clear() {
            return None;
        }
        let header = peer.header(peer.next);
        peer.outbound.has(RTS_CREDIT).then_some(Direct {
            peer,
            uses: RTS_CREDIT,
            link,
            header,
        })
    }

    /// The link has ended while the RTS of [`Self::direct_announcement`] was written, which may
    /// have arrived: it counts as posted, and is posted again on the next link with the same
    /// number.
    #[cold]
    pub fn announced_at_end(&mut self, key: PeerKey, op: I::Op, len: u64) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let number = peer.next;
        peer.outbound.spend_granted(RTS_CREDIT);
        peer.holds += 1;
        peer.next = number.next();
        peer.mark_told();
        let mut entry = Entry::new(op, Uses::Message(len), false);
        (entry.number, entry.form, entry.spent) = (number, Form::Rts, RTS_CREDIT);
        self.keep_posted(key, entry);
        self.posted_one(key);
    }

    /// Sends a part of a message without an operation, if `deliver` writes it to the memory of the
    /// peer; it gets the link and the header. With [`PartPost::Refused`] nothing has changed.
    pub fn send_part(
        &mut self,
        peer: PeerKey,
        deliver: impl FnOnce(LinkKey, Header) -> bool,
    ) -> PartPost {
        let Some(peer) = self.peers.get_mut(peer) else {
            return PartPost::Closed;
        };
        let Some(out) = peer.out else {
            return PartPost::Closed;
        };
        if !self.links.get(out).is_some_and(|link| link.is_open()) {
            return PartPost::Closed;
        }
        if peer.unsent.is_some() || !peer.is_next(Uses::Part(PART)) {
            return PartPost::Behind;
        }
        if !peer.outbound.spend(PART) {
            return PartPost::Credit;
        }
        let number = peer.next;
        if !deliver(out, peer.header(number)) {
            peer.outbound.unspend(PART);
            return PartPost::Refused;
        }
        peer.next = number.next();
        peer.completed = peer.next;
        peer.mark_told();
        PartPost::Sent
    }

    /// The peer of a link, if its EAGER packets without ACK need no further processing than
    /// [`DirectFrom`] has. [`Self::end_direct`] follows if messages were taken.
    #[inline(always)]
    pub fn direct_from(&mut self, link: LinkKey) -> Option<DirectFrom<'_>> {
        let from = self.links.get(link)?;
        let (key, greeted) = (from.peer, from.greeted);
        let peer = self.peers.get_mut(key)?;
        if !greeted || peer.acks != 0 {
            return None;
        }
        Some(DirectFrom {
            origin: Origin {
                peer: key,
                session: peer.session,
            },
            next: peer.next,
            unseen: peer.unseen.map(|(_, number)| number),
            inbound: peer.inbound.as_mut()?,
            expected: &mut peer.expected,
            pool: &mut self.pool,
        })
    }

    /// The peer of a link and its out-link, if a packet with this header is the next one of the
    /// peer, which has credit for it, and an answer can be posted at once. [`Self::take_answered`]
    /// takes the packet; otherwise it is passed to [`Self::arrived`].
    #[inline]
    pub fn answered(
        &self,
        link: LinkKey,
        header: &Header,
        uses: Credit,
    ) -> Option<(Origin, LinkKey)> {
        let from = self.links.get(link)?;
        let key = from.peer;
        let peer = self.peers.get(key)?;
        let out = peer.out?;
        let is_next = from.greeted
            && peer.acks == 0
            && header.to.get() == key.number()
            && header.number == peer.expected
            && header.processed.until(peer.next) >= 0
            && peer
                .unseen
                .is_none_or(|(_, number)| header.seen.is_before(number))
            && peer.inbound.as_ref()?.has(uses);
        let origin = Origin {
            peer: key,
            session: peer.session,
        };
        (is_next && !peer.ends && peer.is_clear()).then_some((origin, out))
    }

    /// Takes the packet for which [`Self::answered`] had a result, and `back` of its credit, which
    /// it does not use any more. Returns whether the peer has used half of its credit:
    /// [`Self::end_direct`] follows at once, and otherwise later.
    #[inline]
    pub fn take_answered(&mut self, peer: PeerKey, uses: Credit, back: Credit) -> bool {
        let Some(peer) = self.peers.get_mut(peer) else {
            return false;
        };
        peer.expected = peer.expected.next();
        let Some(inbound) = &mut peer.inbound else {
            return false;
        };
        inbound.spend(uses);
        inbound.give_back(back, &mut self.pool);
        inbound.is_half_used()
    }

    /// As [`Self::take_answered`], a packet without credit. `ends`: it ends an operation, as
    /// [`Self::release`].
    #[inline(always)]
    pub fn take_end(&mut self, peer: PeerKey, ends: bool) {
        let Some(peer) = self.peers.get_mut(peer) else {
            return;
        };
        peer.expected = peer.expected.next();
        if ends {
            // the peer has an out-link, so no dial becomes superfluous
            debug_assert!(peer.holds > 0 && peer.out.is_some());
            peer.holds = peer.holds.saturating_sub(1);
        }
    }

    /// A packet that was taken by [`Self::take_answered`] does not use this credit any more.
    /// Returns whether the peer has used half of its credit.
    #[inline]
    pub fn give_back_answered(&mut self, peer: PeerKey, back: Credit) -> bool {
        let peer = self.peers.get_mut(peer);
        let Some(inbound) = peer.and_then(|peer| peer.inbound.as_mut()) else {
            return false;
        };
        inbound.give_back(back, &mut self.pool);
        inbound.is_half_used()
    }

    /// Begins an answer without payload, which uses this credit. `None`: something to the peer is
    /// before it, or it needs more credit.
    #[inline]
    pub fn direct_answer(&mut self, peer: PeerKey, uses: Credit) -> Option<Direct<'_>> {
        let peer = self.peers.get_mut(peer)?;
        let link = peer.out?;
        let header = peer.header(peer.next);
        (peer.is_clear() && peer.outbound.has(uses)).then_some(Direct {
            peer,
            uses,
            link,
            header,
        })
    }

    /// Messages with more bytes than this are announced by peers.
    pub(in crate::rdm) const fn eager(&self) -> u32 {
        self.config.eager
    }

    /// Messages of a peer have arrived on a link as EAGER without ACK. Takes them as long as they
    /// are the next ones of the peer; the caller passes another packet to [`Self::arrived`].
    /// [`Self::end_direct`] follows if there were any.
    #[inline]
    pub fn arrived_direct(&mut self, link: LinkKey, messages: &mut impl RingMessages) {
        let Some(mut from) = self.direct_from(link) else {
            return;
        };
        while let Some((header, len, message)) = messages.next() {
            if !from.is_next(&header, len) {
                break;
            }
            from.take(len);
            let credit = messages.deliver(from.origin, message);
            from.give_back(credit);
            if messages.is_done() {
                break;
            }
        }
    }

    /// What follows from messages that were taken on a link: reports to the peer.
    pub fn end_direct(&mut self, link: LinkKey) {
        let Some(key) = self.links.get(link).map(|link| link.peer) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        peer.strikes = 0;
        (peer.busy, peer.heard) = (true, true);
        if !peer.listed && peer.is_reporting() {
            peer.listed = true;
            self.reports.push(key);
        }
    }

    /// Whether others of the peer have to be processed before a packet: it is behind the next
    /// numbered one that is expected, or HELLO has not arrived.
    pub fn is_early(&self, link: LinkKey, packet: &Packet) -> bool {
        let Some(from) = self.links.get(link) else {
            return false;
        };
        let hello = matches!(packet.body, Body::Hello(_));
        let numbered = packet.body.kind().is_numbered();
        let peer = self.peers.get(from.peer);
        !from.greeted && !hello
            || numbered && peer.is_some_and(|it| it.expected.is_before(packet.header.number))
    }
}
