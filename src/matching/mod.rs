//! Matching of messages with receives: `docs/matching.md` has the structures and their costs.
//!
//! One instance has the posted receives and the unexpected messages of one kind: an endpoint, or a
//! shared receive context, has one instance for tagged and one for untagged messages. It holds no
//! memory of messages and calls nothing: the owner's handles `R` (of a receive) and `M` (of a
//! message) are stored and returned.
//!
//! Not thread safe; the owner's lock protects it. No call blocks.
//!
//! Invariants:
//! 1. No listed message matches a posted receive. The owner keeps it by two rules: a message is
//!    [stored](Matching::store) only if [`Matching::arrive`] has just returned `None` for it, and
//!    receives are posted by [`Matching::receive`] and [`Matching::receive_multi`], which search
//!    the listed messages first.
//! 2. A message matches the receive that was posted first among those that match it; a receive, or
//!    a peek, matches the message that arrived first. So messages of one peer that match the same
//!    receives match in the order of their arrival.
//! 3. A message is in one place: listed, claimed, or returned to the owner.
//! 4. A peer's index does not change its meaning while an entry has it. The owner holds the index
//!    (`av`) until it has removed these entries.

mod arrivals;
mod cost;
mod list;
mod multi;
mod posted;
mod queues;
mod table;
#[cfg(test)]
mod tests;
mod unexpected;

use std::fmt::Debug;

use self::multi::Buffers;
use self::posted::{Posted, Recent};
use self::unexpected::Unexpected;
use crate::PeerIndex;
use crate::hash::Hasher;

/// The messages that a receive or a peek asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// The tag; its bits that are set in `ignore` have no meaning.
    pub tag: u64,
    /// Bits of the tag that are not compared. Every mask is valid, whatever `mem_tag_format`.
    pub ignore: u64,
    /// The only peer whose messages match; `None` for `FI_ADDR_UNSPEC`, and without
    /// `FI_DIRECTED_RECV`.
    pub from: Option<PeerIndex>,
}

impl Want {
    /// A tagged receive.
    #[must_use]
    pub const fn tagged(tag: u64, ignore: u64, from: Option<PeerIndex>) -> Self {
        Self { tag, ignore, from }
    }

    /// A receive of the instance of untagged messages.
    #[must_use]
    pub const fn untagged(from: Option<PeerIndex>) -> Self {
        Self {
            tag: 0,
            ignore: u64::MAX,
            from,
        }
    }

    /// Whether a message with this tag from this peer matches: `fi_tagged(3)`, DESCRIPTION.
    #[must_use]
    pub fn matches(&self, tag: u64, peer: PeerIndex) -> bool {
        tag & !self.ignore == self.tag & !self.ignore && self.from.is_none_or(|from| from == peer)
    }
}

/// A message that has arrived, with the owner's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<M> {
    /// 0 for an untagged message.
    pub tag: u64,
    /// The sender.
    pub peer: PeerIndex,
    /// Length of the message in bytes.
    pub len: u64,
    /// The owner's handle.
    pub payload: M,
}

/// A receive that an arrival has matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matched<R> {
    /// The owner's handle.
    pub receive: R,
    /// The application's context.
    pub context: usize,
    /// The part of a multi-receive buffer; `None`: the receive takes this message alone.
    pub piece: Option<Piece>,
}

/// A receive that matches a message and is still posted.
#[derive(Clone, Copy, Debug)]
pub struct Found<R>(Recent<R>);

impl<R: Copy> Found<R> {
    /// The owner's handle.
    #[inline(always)]
    pub fn receive(&self) -> R {
        self.0.receive
    }
}

/// A multi-receive buffer of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MultiId(u32);

/// The part of a multi-receive buffer for one message. The owner calls [`Matching::finished`] once,
/// in the order in which the application gets the completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The buffer.
    pub buffer: MultiId,
    /// Offset of the part in the buffer, in bytes.
    pub offset: u64,
    /// Length of the part in bytes: less than that of the message if that is truncated.
    pub len: u64,
}

/// What becomes of a multi-receive buffer when a message in it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// It takes further messages, or others are still being received into it.
    Held,
    /// It is released: this completion has `FI_MULTI_RECV`.
    Last,
    /// It is released and was cancelled: after this completion the owner reports `FI_ECANCELED`
    /// with `FI_MULTI_RECV`.
    Cancelled,
}

/// A posted receive that was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cancelled<R> {
    /// The owner's handle.
    pub receive: R,
    /// The application's context.
    pub context: usize,
    /// Whether the buffer is released. If not, messages are being received into a multi-receive
    /// buffer, and `FI_ECANCELED` is reported when [`Matching::finished`] returns
    /// [`Release::Cancelled`].
    pub released: bool,
    /// Whether it is a multi-receive buffer.
    pub multi: bool,
}

/// A claimed message: index and generation, 64 bits that the owner stores in the application's
/// `fi_context`. A claim that was altered, or used before, is recognized by its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim(u64);

impl Claim {
    fn new(index: u32, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(index))
    }

    fn parts(self) -> (u32, u32) {
        (self.0 as u32, (self.0 >> 32) as u32)
    }

    /// The claim as bits.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The reverse of [`Self::to_bits`]; any bits are allowed.
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// Posted receives and unexpected messages of one kind.
///
/// `R` and `M` are copied, so they are small: an entry of a receive has 56 bytes and `R`, an entry
/// of a message 40 bytes and `M`.
#[derive(Debug)]
pub struct Matching<R, M> {
    posted: Posted<R>,
    unexpected: Unexpected<M>,
    buffers: Buffers,
}

impl<R: Copy + Debug, M: Copy + Debug> Matching<R, M> {
    /// An empty instance with memory for so many receives and messages, rounded up to 1,024; more
    /// are allocated when they are needed. `seed` is secret and random: with a known seed a peer
    /// could choose tags that make searches slow.
    #[must_use]
    pub fn new(seed: u64, receives: usize, messages: usize) -> Self {
        let hasher = Hasher::new(seed);
        Self {
            posted: Posted::with_capacity(hasher, receives),
            unexpected: Unexpected::with_capacity(hasher, messages),
            buffers: Buffers::default(),
        }
    }

    /// The number of posted receives; a multi-receive buffer counts as one.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.posted.len()
    }

    /// The number of listed messages.
    #[must_use]
    pub fn listed(&self) -> usize {
        self.unexpected.len()
    }

    /// The number of claimed messages.
    #[must_use]
    pub fn claimed(&self) -> usize {
        self.unexpected.claimed()
    }

    /// Matches a message of `len` bytes that has just arrived. The receive is removed, unless it is
    /// a multi-receive buffer with room. `None`: no receive matches, and the owner calls
    /// [`Self::store`], or drops the message if it must not be kept. Does not allocate.
    #[inline]
    pub fn arrive(&mut self, tag: u64, peer: PeerIndex, len: u64) -> Option<Matched<R>> {
        let found = self.posted.find(tag, peer)?;
        let (receive, context, multi) = self.posted.of(found.index);
        let matched = Matched {
            receive,
            context,
            piece: None,
        };
        let Some(buffer) = multi else {
            self.posted.remove_found(found);
            return Some(matched);
        };
        let (piece, full) = self.buffers.fill(buffer, len);
        if full {
            self.posted.remove_found(found);
        }
        Some(Matched {
            piece: Some(piece),
            ..matched
        })
    }

    /// Fast path of [`Self::arrive`]: most messages arrive for a receive that takes one message, of
    /// the class and the key of the receive that was posted last. Nothing changes until
    /// [`Self::take_recent`].
    #[inline(always)]
    #[must_use]
    pub fn recent(&self, tag: u64, peer: PeerIndex) -> Option<Found<R>> {
        self.posted.find_recent(tag, peer).map(Found)
    }

    /// Removes the last result of [`Self::recent`], without a change since. Does not allocate.
    #[inline(always)]
    pub fn take_recent(&mut self, found: &Found<R>) {
        self.posted.remove_recent(&found.0);
    }

    /// Lists a message behind all others, for which [`Self::arrive`] has just returned `None`.
    /// Allocates if no entry is free (see [`Self::new`]), or if a class's hash grows.
    pub fn store(&mut self, tag: u64, peer: PeerIndex, len: u64, payload: M) {
        debug_assert!(self.posted.find(tag, peer).is_none(), "a receive matches");
        self.unexpected.store(tag, peer, len, payload);
    }

    /// A receive: removes and returns the first listed message that matches, or posts the receive
    /// if none does. Allocates if no entry is free, if the class's hash grows, and at the first use
    /// of a class while messages are listed.
    #[inline]
    pub fn receive(&mut self, want: &Want, context: usize, receive: R) -> Option<Message<M>> {
        if let Some(found) = self.unexpected.find(want) {
            return Some(self.unexpected.take(found));
        }
        self.posted.post(want, context, receive, None);
        None
    }

    /// A post number for [`Self::receive_again`], behind those of all receives so far. Does not
    /// allocate.
    pub fn next_number(&mut self) -> u64 {
        self.posted.next_number()
    }

    /// As [`Self::receive`], of a receive that was posted before with this number, or has got its
    /// message at once: it matches before all receives with a later number. After one or several of
    /// these calls, and before the next arrival, the caller calls [`Self::restore_order`], unless
    /// all of them had the [last number](Self::next_number).
    pub fn receive_again(
        &mut self,
        want: &Want,
        context: usize,
        receive: R,
        number: u64,
    ) -> Option<Message<M>> {
        if let Some(found) = self.unexpected.find(want) {
            return Some(self.unexpected.take(found));
        }
        self.posted.post_again(want, context, receive, number);
        None
    }

    /// To be called after calls of [`Self::receive_again`]. Takes O(entries) and allocates, if one
    /// of them has posted a receive that does not have the last number.
    pub fn restore_order(&mut self) {
        self.posted.restore_order();
    }

    /// Whether no message is listed: then a receive is posted without a search.
    #[inline(always)]
    #[must_use]
    pub fn lists_none(&self) -> bool {
        self.unexpected.is_empty()
    }

    /// The peers that posted receives name. Takes O(entries), allocates.
    #[must_use]
    pub fn named(&self) -> Vec<PeerIndex> {
        self.posted.named()
    }

    /// As [`Self::receive`], while [`Self::lists_none`].
    #[inline(always)]
    pub fn post(&mut self, want: &Want, context: usize, receive: R) {
        debug_assert!(self.lists_none());
        self.posted.post(want, context, receive, None);
    }

    /// A receive into a multi-receive buffer (`FI_MULTI_RECV`) of `size` bytes. Calls `take` for
    /// each listed message that matches, in the order of arrival. Posts the receive unless that
    /// left fewer than `min` bytes (`FI_OPT_MIN_MULTI_RECV`), or none. Allocates as
    /// [`Self::receive`].
    pub fn receive_multi(
        &mut self,
        want: &Want,
        context: usize,
        receive: R,
        (size, min): (u64, u64),
        mut take: impl FnMut(Message<M>, Piece),
    ) {
        let buffer = self.buffers.add(size, min);
        while let Some(found) = self.unexpected.find(want) {
            let message = self.unexpected.take(found);
            let (piece, full) = self.buffers.fill(buffer, message.len);
            take(message, piece);
            if full {
                return;
            }
        }
        self.posted.post(want, context, receive, Some(buffer));
    }

    /// A message in a multi-receive buffer is complete: called once for each [`Piece`], before its
    /// completion is reported, which depends on the result. If completions of one buffer are
    /// reported in several queues, it is called when the application takes each of them. Does not
    /// allocate.
    pub fn finished(&mut self, buffer: MultiId) -> Release {
        self.buffers.finished(buffer)
    }

    /// `FI_PEEK`: the first listed message that matches, which stays. `None` is `FI_ENOMSG`. This
    /// and the next two allocate at the first use of a class while messages are listed.
    pub fn peek(&mut self, want: &Want) -> Option<Message<M>> {
        let found = self.unexpected.find(want)?;
        Some(self.unexpected.message(found.index))
    }

    /// `FI_PEEK | FI_CLAIM`: the first listed message that matches; it is removed from the list,
    /// and only [`Self::redeem`] finds it.
    pub fn claim(&mut self, want: &Want) -> Option<(Claim, Message<M>)> {
        let found = self.unexpected.find(want)?;
        let message = self.unexpected.message(found.index);
        Some((self.unexpected.claim(found), message))
    }

    /// `FI_PEEK | FI_DISCARD`: removes the first listed message that matches. The owner releases
    /// its payload.
    pub fn discard(&mut self, want: &Want) -> Option<Message<M>> {
        let found = self.unexpected.find(want)?;
        Some(self.unexpected.take(found))
    }

    /// `FI_CLAIM` without `FI_PEEK`, with and without `FI_DISCARD`: removes a claimed message.
    /// `None`: the claim is not, or no longer, of a message. Does not allocate.
    pub fn redeem(&mut self, claim: Claim) -> Option<Message<M>> {
        self.unexpected.redeem(claim)
    }

    /// `fi_cancel(3)`: removes a posted receive with this context; if several have it, one of them.
    /// Reads entries until it finds one, beginning behind the one that the previous call has found;
    /// so receives that are cancelled in the order of posting take O(1) each, and a context that is
    /// not posted takes O(entries).
    pub fn cancel(&mut self, context: usize) -> Option<Cancelled<R>> {
        let index = self.posted.with_context(context)?;
        Some(self.cancel_entry(index))
    }

    fn cancel_entry(&mut self, index: u32) -> Cancelled<R> {
        let (receive, context, buffer) = self.posted.of(index);
        let cancelled = Cancelled {
            receive,
            context,
            released: buffer.is_none_or(|buffer| self.buffers.cancel(buffer)),
            multi: buffer.is_some(),
        };
        self.posted.remove(index);
        cancelled
    }

    /// Removes the messages that `keep` refuses: of a peer whose payload can no longer be fetched,
    /// or all when the owner is closed. `keep` releases the payload of a message that it refuses.
    /// The flag says that the message is claimed; [`Self::redeem`] then returns `None` for it.
    /// Takes O(entries), in the order of arrival. Does not allocate.
    pub fn retain(&mut self, keep: impl FnMut(&Message<M>, bool) -> bool) {
        self.unexpected.retain(keep);
    }

    /// Entries of `from` become entries of `into`, because both peers are one endpoint. If
    /// receives from one of the two match listed messages of the other, `matched` is called for
    /// each pair, in the order of arrival. Takes O(entries), allocates.
    pub fn merge(
        &mut self,
        from: PeerIndex,
        into: PeerIndex,
        mut matched: impl FnMut(Message<M>, Matched<R>),
    ) {
        self.posted.merge(from, into);
        self.unexpected.merge(from, into);
        for index in self.unexpected.of_peer(into) {
            let message = self.unexpected.message(index);
            if let Some(receive) = self.arrive(message.tag, into, message.len) {
                matched(self.unexpected.take_listed(index), receive);
            }
        }
    }
}
