//! Links: one connected queue pair each. `docs/protocol-rdm.md`, "Use of links".

use super::peer::PeerKey;
use crate::rdm::slab::Key;
use crate::wire::rdm::{Epoch, Number, Secret, Terms};

/// How long an acceptor waits for HELLO after it has sent the reply, in ns. The dialler posts it as
/// soon as its device has ended the link that this one replaces, at most 1 s.
pub(super) const GREETING: u64 = 2_000_000_000;

/// Marks keys of links.
pub enum LinkMark {}

/// A link of an endpoint. Keys are not reused at once, so late events of an ended link find none.
pub type LinkKey = Key<LinkMark>;

/// Which side dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum Role {
    /// This side.
    Own,
    /// The peer.
    Accepted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum State {
    /// Own: the request was sent.
    Dialling,
    /// Own: the reply has arrived; an accepted link must end before HELLO.
    Greeting,
    /// Accepted: the reply was sent; HELLO has not arrived.
    Replied,
    /// In use.
    Up,
    /// Being ended: what has arrived is processed, nothing is posted.
    Ending,
    /// On a circuit: nothing of this side is under way any more, and packets of the peer are
    /// accepted until it has stated that it posts none.
    Lingering,
}

/// The steps of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum Closing {
    No,
    /// The link is in use, and this side waits until its RMA on it has completed and CLOSE has
    /// room, before it demands or accepts.
    Draining,
    /// This side has asked.
    Asked,
    /// This side has accepted.
    Accepted,
}

/// Numbers of the next packets in both directions, and of operations that were executed.
pub(in crate::rdm) type Numbers = (Number, Number, u32);

#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Link {
    pub(super) peer: PeerKey,
    pub(super) role: Role,
    pub(super) epoch: Epoch,
    pub(super) state: State,
    /// The count of the peer's out-links when this side sent the request or the reply; `None`: it
    /// had one.
    pub(super) mark: Option<u32>,
    /// The token that the request of this side has shown.
    pub(super) shown: Option<Secret>,
    /// Accepted: the token that the request of the peer has given.
    pub(super) given: Option<Secret>,
    /// The request has NEW.
    pub(super) fresh: bool,
    /// Own: the count of the peer's requests when this side dialled.
    pub(super) requests: u32,
    /// Accepted: when the link is ended if HELLO has not arrived; `None`: the reply was not sent.
    pub(super) hello_by: Option<u64>,
    /// Own: when the dial is ended if it was not answered; `None`: the device decides.
    pub(super) answer_by: Option<u64>,
    /// The terms that were received with the link.
    pub(super) terms: Option<Terms>,
    /// HELLO was sent or has arrived.
    pub(super) greeted: bool,
    /// On a circuit: ATTACH has arrived, or was posted to a link that was accepted.
    pub(super) attached: bool,
    /// It was the out-link.
    pub(super) was_out: bool,
    /// On a circuit: the peer posts nothing more on it.
    pub(super) peer_ended: bool,
    pub(super) closing: Closing,
    /// An answer to CLOSE that waits for room.
    pub(super) refuses: bool,
    /// The numbers of the next packets in both directions, and that of executed operations, at the
    /// last search for an idle link, and the time of the first search that found them, in ns.
    pub(super) numbers: Option<Numbers>,
    pub(in crate::rdm) used: u64,
    /// These numbers when it became the out-link; `None`: it was never the out-link.
    pub(super) begin: Option<Numbers>,
    /// When it got its place, became the out-link, or was last used again after an eviction that
    /// the peer has refused or that was given up, whichever is latest.
    pub(super) since: u64,
    /// The peer has refused CLOSE (ask): it uses the link.
    pub(super) refused: bool,
}

impl Link {
    pub(super) fn new(peer: PeerKey, role: Role, epoch: Epoch, mark: Option<u32>) -> Self {
        Self {
            peer,
            role,
            epoch,
            state: match role {
                Role::Own => State::Dialling,
                Role::Accepted => State::Replied,
            },
            mark,
            shown: None,
            given: None,
            fresh: false,
            requests: 0,
            hello_by: None,
            answer_by: None,
            terms: None,
            greeted: false,
            attached: false,
            was_out: false,
            peer_ended: false,
            closing: Closing::No,
            refuses: false,
            numbers: None,
            used: 0,
            begin: None,
            since: 0,
            refused: false,
        }
    }

    /// When the reply was sent, if HELLO is awaited.
    pub(super) fn replied_at(&self) -> Option<u64> {
        let hello_by = self.hello_by.filter(|_| self.state == State::Replied);
        Some(hello_by?.saturating_sub(GREETING))
    }

    /// Whether HELLO has not arrived in time on a link on a circuit that the peer has dialled.
    pub(super) fn is_silent(&self) -> bool {
        self.state == State::Lingering && self.role == Role::Accepted && !self.greeted
    }

    /// On a circuit: whether the peer may post, and it is not known through which target.
    pub(super) fn is_unattached(&self) -> bool {
        self.role == Role::Own && self.greeted && !self.attached
    }

    /// Whether its end has begun.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending | State::Lingering)
    }

    /// Whether packets may be posted.
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Up && self.closing == Closing::No
    }
}
