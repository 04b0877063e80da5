//! Messages that are in the memory of the peer when they are posted ([`Post::Delivered`]): they
//! need no operation in the tables. Such a message takes the same number and uses the same credit
//! as any other, so these calls and the other ones can be mixed.
//!
//! [`Post::Delivered`]: super::core::Post::Delivered

use super::core::{Core, Io, Origin};
use super::link::LinkKey;
use super::ops::Uses;
use super::peer::{Peer, PeerKey};
use crate::wire::rdm::packet::eager_credit;
use crate::wire::rdm::{Body, Credit, Header, Packet};

/// Credit of a part of a message.
pub(super) const PART: Credit = Credit::new(0, 1);

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
pub trait Arrivals {
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

    /// Messages of a peer have arrived on a link as EAGER without ACK. Takes them as long as they
    /// are the next ones of the peer; the caller passes another packet to [`Self::arrived`].
    #[inline]
    pub fn arrived_direct(&mut self, link: LinkKey, arrivals: &mut impl Arrivals) {
        let Some(from) = self.links.get(link) else {
            return;
        };
        let (key, greeted) = (from.peer, from.greeted);
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let Some(inbound) = peer.inbound.as_mut() else {
            return;
        };
        if !greeted || peer.acks != 0 {
            return;
        }
        // the packet that has seen the last grant is not ordinary, those before it are
        let unseen = peer.unseen.map(|(_, number)| number);
        let origin = Origin {
            peer: key,
            session: peer.session,
        };
        let first = peer.expected;
        while let Some((header, len, message)) = arrivals.next() {
            let ordinary = header.to.get() == key.number()
                && header.number == peer.expected
                && header.processed.until(peer.next) >= 0
                && unseen.is_none_or(|number| header.seen.is_before(number));
            if !ordinary || !inbound.arrive(eager_credit(len)) {
                break;
            }
            peer.expected = header.number.next();
            let credit = arrivals.deliver(origin, message);
            inbound.give_back(credit, &mut self.pool);
            if arrivals.is_done() {
                break;
            }
        }
        if peer.expected == first {
            return;
        }
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
