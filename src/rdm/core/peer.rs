//! Peers: the state of an endpoint for one remote endpoint, or for an address whose endpoint is not
//! known yet.

use std::num::NonZero;

use super::credit::{Inbound, Outbound};
use super::link::LinkKey;
use super::ops::{Form, List, OpKey, Uses};
use super::shares::Share;
use crate::rdm::slab::Key;
use crate::wire::rdm::packet::{RTS_CREDIT, eager_credit};
use crate::wire::rdm::{
    Credit, EndpointId, Epoch, GrantNumber, Header, Listener, Number, PeerIndex, Secret,
};

/// Marks keys of peers.
pub enum PeerMark {}

/// A peer of an endpoint. Its number is the `to` of packets to this endpoint.
pub type PeerKey = Key<PeerMark>;

/// A time in ns, or none, in 8 bytes: an endpoint has a record of each of its peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rdm) struct When(Option<NonZero<u64>>);

impl When {
    pub(super) const NONE: Self = Self(None);

    pub(super) const fn at(time: u64) -> Self {
        // 0 is a time too
        Self(NonZero::new(time.saturating_add(1)))
    }

    pub(super) fn get(self) -> Option<u64> {
        self.0.map(|time| time.get() - 1)
    }

    /// The same, or this time if there is none.
    pub(super) fn or(self, time: u64) -> Self {
        Self::at(self.get().unwrap_or(time))
    }
}

/// When a peer is dialled.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::rdm) struct Dial {
    /// The first dial since the last link or failure, in ns.
    pub(super) since: When,
    /// When the first dial was begun, in ns; none: it waits for a place, for other dials, or for
    /// the end of links.
    pub(in crate::rdm) begun: When,
    /// The last sign of life of a peer whose link has broken because it acknowledges nothing, in
    /// ns.
    pub(super) silent_since: When,
    /// The next dial is not before this time.
    pub(super) not_before: When,
    /// Dials that were ended because they had no answer.
    pub(super) unanswered: u8,
    /// The next interval, in ns.
    pub(super) backoff: u32,
    /// In the queue of dials.
    pub(super) queued: bool,
}

/// The wait until RMA on a link has completed and CLOSE has room.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Drain {
    /// When it is given up, in ns.
    pub(super) until: u64,
    /// The link of the peer's question; `None`: this side asks.
    pub(super) question: Option<LinkKey>,
}

/// The position of a peer without out-link among those that wait for a place.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::rdm) struct Position {
    /// Since when it needs a place, in ns; none: it needs no place, or its place is that of the
    /// out-link.
    pub(super) since: When,
    /// How long its links have had a place since then, in ns.
    pub(in crate::rdm) spent: u64,
}

/// What is known of the endpoint of a peer without links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rdm) enum Fate {
    /// Nothing shows that it has ended, or it was dialled without a result.
    #[default]
    Open,
    /// The last out-link has broken without CLOSE: perhaps its process has ended.
    Broken,
    /// It is dialled to find that out; it has had no link since this time, in ns.
    Asked(u64),
}

/// A peer.
#[derive(Debug)]
pub(in crate::rdm) struct Peer {
    /// Where it is dialled.
    pub(super) address: Option<Listener>,
    pub(in crate::rdm) id: Option<EndpointId>,
    /// This peer is an address of that one.
    pub(super) alias: Option<PeerKey>,
    /// The token that this side gives, and the one that it got.
    pub(super) gives: Option<Secret>,
    pub(super) shows: Option<Secret>,
    /// `to` of packets to the peer.
    pub(super) to: PeerIndex,
    /// The newest accepted epoch.
    pub(super) newest: Option<Epoch>,
    /// The count of its requests that were accepted or held; wraps.
    pub(super) requests: u32,
    /// Requests with an epoch before this one are given up: *ended* of the last reply.
    pub(super) void: Option<Epoch>,
    /// Count of sessions.
    pub(in crate::rdm) session: u32,
    /// The session has begun.
    pub(in crate::rdm) begun: bool,
    /// The token of a session that this side has ended. The next request shows it, so that the
    /// peer ends the session too.
    pub(super) former: Option<Secret>,
    /// Operations that wait are meant for this endpoint, which has ended the session.
    pub(super) meant: Option<EndpointId>,
    /// The operations of the session have failed. It ends with the last link.
    pub(super) ends: bool,
    /// The address is one of this endpoint itself.
    pub(super) itself: bool,
    /// Another endpoint states the address of this peer: it is dialled.
    pub(in crate::rdm) probe: bool,
    /// How often another endpoint has stated the address of this peer; wraps. While this is in
    /// doubt ([`Self::probe`]), later operations are meant for the endpoint that has the address.
    pub(super) doubts: u32,
    /// Links ended because of the peer's packets or terms, since the last packet that was
    /// processed.
    pub(super) strikes: u32,

    pub(super) own: Option<LinkKey>,
    pub(super) accepted: Option<LinkKey>,
    pub(super) out: Option<LinkKey>,
    /// Links in the state Lingering: at most one own and one accepted.
    pub(super) lingering: [Option<LinkKey>; 2],
    /// The eviction of its links has begun, also if none of them is the out-link: nothing is posted
    /// to the peer, no link is adopted, and none is dialled.
    pub(super) closing: bool,
    /// The count of out-links.
    pub(super) outs: u32,
    pub(super) dial: Dial,
    /// On circuits: since when each link to it has ended before one of both sides has posted
    /// ATTACH, in ns. Its dials count from this time on: a peer that can never make its circuit
    /// would be dialled without end.
    pub(super) unattached: When,
    /// Number of peers that are aliases of this one.
    pub(super) aliases: u32,
    /// Another peer is an alias of this one, or was, and this one has its tokens.
    pub(super) aliased: bool,
    /// Further addresses that it has stated in its last HELLO: at most 8, of which none is proven.
    pub(in crate::rdm) further: Box<[Listener]>,
    /// Number of `fi_addr_t` that name this peer.
    pub(super) kept: u32,
    /// The endpoint of the peer is being closed: it has said so. Or nothing listens at its address
    /// any more.
    pub(super) leaves: bool,
    pub(super) fate: Fate,
    /// In the list of peers without links ([`Core::list_idle`](super::Core::list_idle)): the
    /// time, in ns, since which it has none.
    pub(super) idle_since: When,
    /// In the list of timers.
    pub(super) timed: bool,
    /// When a CLOSE without answer ends its link, or when it is looked whether it has drained.
    pub(super) close_at: When,
    /// The out-link drains, or another link without out-link waits for room for CLOSE (demand).
    pub(super) drain: Option<Drain>,
    /// The place of the out-link was demanded, by this side or by the peer.
    pub(super) demanded: bool,
    /// Number of links in a row on which nothing has passed until their places were demanded.
    pub(super) fruitless: u8,
    /// In the queue of peers that wait for a place for a link.
    pub(super) waits: bool,
    pub(super) position: Position,
    /// On a circuit: its last HELLO has arrived after the link was given up.
    pub(super) late: bool,

    /// Numbered packets that are not complete.
    pub(super) posted: List,
    /// The first of them that is not on the out-link.
    pub(super) repost: Option<OpKey>,
    /// The first of them whose SEND has not completed.
    pub(super) unsent: Option<OpKey>,
    /// Operations that wait, in the order in which the lists are posted: answers; packets that end
    /// earlier operations, which later ones may wait for; operations of the application.
    pub(super) answers: List,
    pub(super) parts: List,
    pub(super) waiting: List,
    /// The number that is assigned next.
    pub(in crate::rdm) next: Number,
    /// The number behind the last packet that is known to have arrived.
    pub(super) completed: Number,
    /// How many posted operations wait for *processed*.
    pub(super) acks: u32,
    /// How many operations of the endpoint need the peer besides these packets.
    pub(in crate::rdm) holds: u32,
    pub(super) outbound: Outbound,
    /// The largest payload of EAGER that the peer takes.
    pub(super) eager: u32,
    /// No packet has confirmed to the peer that its newest grant was received.
    pub(super) confirm: bool,
    /// The newest grant asks for unused credit.
    pub(super) recalled: bool,
    /// The link on which this was answered.
    pub(super) returned: Option<LinkKey>,

    /// The number of the next packet of the peer.
    pub(in crate::rdm) expected: Number,
    /// The window of its session.
    pub(in crate::rdm) inbound: Option<Inbound>,
    /// What is left of earlier windows, and the share of which the window is.
    pub(super) share: Option<Box<Share>>,
    /// The newest CREDIT and its link, until the peer has seen it.
    pub(super) unseen: Option<(LinkKey, GrantNumber)>,
    /// The link with the newest terms of this side.
    pub(super) stated: Option<LinkKey>,
    /// The newest grant may be lost.
    pub(super) restate: bool,
    /// No packet has confirmed to the peer that its last packet with ACK was processed.
    pub(super) owes_ack: bool,
    /// The link of the last RETURN or CLOSE that has told the peer so, if nothing shows that it has
    /// arrived, and no packet behind it has told it that is repeated when it gets lost.
    pub(super) acked_on: Option<LinkKey>,
    /// Unused credit is to be asked for.
    pub(super) recall: bool,
    /// The link on which such a question was sent and its grant, until the answer.
    pub(super) recalling: Option<(LinkKey, GrantNumber)>,
    /// Number of operations that the device has executed in their call; wraps.
    pub(super) executed: u32,
    /// A packet has arrived since the last search for a peer to recall credit from.
    pub(super) busy: bool,
    /// A packet has arrived, or a SEND has completed, since the last beat.
    pub(super) heard: bool,
    /// Number of beats in a row in which neither has happened although requests were under way.
    pub(super) stands: u8,
    /// In the list of peers that may have something to report.
    pub(super) listed: bool,
    /// An answer to CLOSE may wait for room.
    pub(super) refuses: bool,
}

/// The number with which each direction of a session begins.
#[cfg(not(test))]
const fn first_number() -> Number {
    Number::new(0)
}

#[cfg(test)]
fn first_number() -> Number {
    FIRST_NUMBER.get()
}

#[cfg(test)]
thread_local! {
    /// As if so many packets had passed in each session of the endpoints of a test.
    pub(in crate::rdm) static FIRST_NUMBER: std::cell::Cell<Number> =
        const { std::cell::Cell::new(Number::new(0)) };
}

impl Peer {
    /// Since when the dials of this peer count, if that is not from now on. `earliest`: see
    /// [`Core::earliest_unattached`](super::Core::earliest_unattached). An earlier time of
    /// links without ATTACH does not count: nothing needed the last one of them for a while.
    pub(super) fn dials_since(&self, earliest: u64) -> When {
        let unattached = self.unattached.get().filter(|since| *since >= earliest);
        let since = self.dial.since.get().or(unattached);
        since.map_or(When::NONE, When::at)
    }

    pub(super) fn new(address: Option<Listener>, id: Option<EndpointId>) -> Self {
        Self {
            address,
            id,
            alias: None,
            gives: None,
            shows: None,
            to: PeerIndex::default(),
            newest: None,
            requests: 0,
            void: None,
            session: 0,
            begun: false,
            former: None,
            meant: None,
            ends: false,
            itself: false,
            probe: false,
            doubts: 0,
            strikes: 0,
            own: None,
            accepted: None,
            out: None,
            lingering: [None; 2],
            closing: false,
            outs: 0,
            dial: Dial::default(),
            unattached: When::NONE,
            aliases: 0,
            aliased: false,
            further: Box::default(),
            kept: 0,
            leaves: false,
            fate: Fate::Open,
            idle_since: When::NONE,
            timed: false,
            close_at: When::NONE,
            drain: None,
            demanded: false,
            fruitless: 0,
            waits: false,
            position: Position::default(),
            late: false,
            posted: List::default(),
            repost: None,
            unsent: None,
            answers: List::default(),
            parts: List::default(),
            waiting: List::default(),
            next: first_number(),
            completed: first_number(),
            acks: 0,
            holds: 0,
            outbound: Outbound::default(),
            eager: 0,
            confirm: false,
            recalled: false,
            returned: None,
            expected: first_number(),
            inbound: None,
            share: None,
            unseen: None,
            stated: None,
            restate: false,
            owes_ack: false,
            acked_on: None,
            recall: false,
            recalling: None,
            executed: 0,
            busy: false,
            heard: false,
            stands: 0,
            listed: false,
            refuses: false,
        }
    }

    /// Ends the session, whose window was closed: what remains is the address, what is left of the
    /// window, and the operations that wait.
    pub(super) fn forget(&mut self) {
        debug_assert!(self.inbound.is_none());
        // the endpoint of a session that this side has ended is the same, unless it restarts
        let id = self.id.filter(|_| self.former.is_some());
        let fresh = Self::new(self.address, id);
        *self = Self {
            answers: self.answers,
            parts: self.parts,
            waiting: self.waiting,
            holds: self.holds,
            outs: self.outs,
            doubts: self.doubts,
            requests: self.requests,
            session: self.session.wrapping_add(1),
            former: self.former,
            meant: self.meant,
            strikes: self.strikes,
            aliases: self.aliases,
            aliased: self.aliased,
            further: std::mem::take(&mut self.further),
            kept: self.kept,
            leaves: self.leaves,
            idle_since: self.idle_since,
            share: self.share.take(),
            timed: self.timed,
            listed: self.listed,
            waits: self.waits,
            position: self.position,
            ..fresh
        };
    }

    /// The header of a packet to the peer.
    #[inline]
    pub(super) fn header(&self, number: Number) -> Header {
        Header {
            number,
            processed: self.expected,
            seen: self.outbound.grant().number,
            to: self.to,
        }
    }

    /// A packet with such a header was posted, which is repeated if it gets lost.
    #[inline]
    pub(super) fn mark_told(&mut self) {
        self.owes_ack = false;
        self.confirm = false;
        self.acked_on = None;
    }

    /// As [`Self::mark_told`], of RETURN or CLOSE on the out-link, but not CLOSE (refuse). If they
    /// get lost, only the answer to RECALL is repeated.
    pub(super) fn mark_told_once(&mut self, out: LinkKey) {
        if self.owes_ack {
            self.acked_on = Some(out);
        }
        self.owes_ack = false;
        self.confirm = false;
    }

    /// *processed* that RETURN or CLOSE has told the peer is to be told again.
    pub(super) fn owe_again(&mut self) {
        self.owes_ack |= self.acked_on.take().is_some();
    }

    /// Whether a new operation can be posted now as far as earlier ones are concerned: no packet is
    /// to be repeated, and none waits in its list or in one that is before it.
    #[inline]
    pub(super) fn is_next(&self, uses: Uses) -> bool {
        let none = self.repost.is_none() && self.answers.is_empty();
        none && match uses {
            Uses::Answer => true,
            Uses::Part(_) => self.parts.is_empty(),
            Uses::Message(_) | Uses::Request(_) => !self.has_waiting(),
        }
    }

    /// The form in which the packet of an operation would be posted now, and its credit.
    #[inline]
    pub(super) fn form_of(&self, uses: Uses) -> (Form, Credit) {
        match uses {
            Uses::Answer => (Form::Whole, Credit::ZERO),
            Uses::Part(uses) | Uses::Request(uses) => (Form::Whole, uses),
            Uses::Message(len) => match u32::try_from(len) {
                Ok(len) if len <= self.eager && self.outbound.has(eager_credit(len)) => {
                    (Form::Whole, eager_credit(len))
                }
                _ => (Form::Rts, RTS_CREDIT),
            },
        }
    }

    /// Whether an operation waits that is no answer.
    #[inline]
    fn has_waiting(&self) -> bool {
        !self.parts.is_empty() || !self.waiting.is_empty()
    }

    /// Whether a message that needs no operation can be posted now as far as earlier packets are
    /// concerned: [`Self::is_next`], and all SENDs have completed.
    #[inline(always)]
    pub(in crate::rdm) fn is_clear(&self) -> bool {
        // without branches: all of them are false
        let posted = self.unsent.is_some() | self.repost.is_some();
        let waiting = !self.answers.is_empty() | !self.parts.is_empty() | !self.waiting.is_empty();
        !(posted | waiting | self.closing)
    }

    /// The list in which such operations wait.
    #[inline]
    pub(super) fn list(&mut self, uses: Uses) -> &mut List {
        match uses {
            Uses::Answer => &mut self.answers,
            Uses::Part(_) => &mut self.parts,
            Uses::Message(_) | Uses::Request(_) => &mut self.waiting,
        }
    }

    /// The operation that is posted next, apart from packets that are repeated.
    #[inline]
    pub(super) fn first(&self) -> Option<OpKey> {
        let lists = [&self.answers, &self.parts, &self.waiting];
        lists.into_iter().find_map(List::first)
    }

    /// Whether operations are to be posted or completed.
    pub(super) fn has_ops(&self) -> bool {
        let idle = self.posted.is_empty() && self.answers.is_empty() && !self.has_waiting();
        !idle || self.holds > 0
    }

    /// Whether the peer has to send something: an answer, credit, or *processed*.
    #[inline]
    pub(super) fn awaits(&self) -> bool {
        self.holds > 0 || self.acks > 0 || self.has_waiting()
    }

    /// A new operation: a pause after links on which nothing has passed is over.
    pub(super) fn end_pause(&mut self) {
        if std::mem::take(&mut self.fruitless) != 0 {
            self.dial.not_before = When::NONE;
        }
    }

    /// A newer grant has replaced the last one.
    pub(super) fn granted(&mut self, recall: bool) {
        (self.confirm, self.recalled, self.returned) = (true, recall, None);
    }

    /// Whether there is something to report to the peer: CREDIT.
    #[inline]
    pub(super) fn has_report(&self) -> bool {
        let credit = self.inbound.as_ref().is_some_and(Inbound::is_due);
        credit || self.restate || self.recall || self.owes_ack
    }

    /// Whether [`Core::flush`](super::Core::flush) has something to do for the peer.
    #[inline(always)]
    pub(super) fn is_reporting(&self) -> bool {
        // mostly none of them, so without branches
        let flags = self.restate | self.recall | self.recalled | self.refuses | self.owes_ack;
        let inbound = self.inbound.as_ref();
        flags || inbound.is_some_and(|inbound| inbound.reports()) || self.has_return()
    }

    /// Whether the newest grant is to be answered: RETURN.
    #[inline]
    pub(super) fn has_return(&self) -> bool {
        self.recalled || self.confirm && (self.acks > 0 || self.has_waiting())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_none() {
        for time in [0, 1, u64::MAX - 1] {
            assert_eq!(When::at(time).get(), Some(time));
        }
        assert_eq!(When::NONE.get(), None);
        assert_eq!(size_of::<When>(), 8);
    }

    /// Records of peers are kept for an hour after their last link.
    #[test]
    fn the_record_of_a_peer_is_small() {
        let size = size_of::<Peer>();
        assert!(size <= 512, "{size}");
    }
}
