//! What follows from calls of the core, and the memory of a packet that has arrived.

use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Origin, SendOp};
use crate::rdm::link::ring::RingPacket;
use crate::rdm::packet_memory::Slot;
use crate::rdm::table_keys::{ArrivalKey, CircuitKey, RmaKey, TxKey};
use crate::wire::rdm::Credit;

/// What follows from a call of the core.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) enum Todo {
    GiveBack(Origin, Credit),
    Send(PeerKey, SendOp<TxKey>),
    Answer(Origin, TxKey),
    /// An answer that uses credit.
    AnswerWithCredit(Origin, SendOp<TxKey>),
    /// A message arrives by READs or in parts, if its session still exists.
    Begin(Origin, ArrivalKey),
    /// A message can be read or streamed.
    Choose(Origin, ArrivalKey, Option<LinkKey>),
    Release(PeerKey),
    LoopBack(TxKey),
    /// READs of the peer's messages can be posted.
    Pull(PeerKey),
    /// A post to the link has failed.
    Broken(LinkKey),
    /// The content of a delivered packet violates the protocol.
    Violated(LinkKey),
    /// A message of the session could not be stored.
    Dropped(Origin),
    /// There is memory for the packets of a link again.
    Room(LinkKey),
    /// An operation may have ended.
    EndOrRepeatRma(RmaKey),
    /// A link to the peer is up: outcomes are known.
    DecideRma(PeerKey),
    /// Operations that wait can be posted.
    RunRma,
    /// Messages and atomics to the endpoint itself that wait can be delivered.
    RunOwnSends,
    /// There is no memory for the next packet of a link, and no packet under way frees any.
    NoMemory(LinkKey),
    /// A link has got its circuit, and ATTACH can be posted.
    Attach(LinkKey),
    /// The dial of a link has failed at this side.
    NotDialled(LinkKey),
    /// A circuit has failed that was not up.
    CircuitNotDialled(CircuitKey),
    /// The target through which the peer sends on a link is in its error state.
    Silenced(LinkKey),
}

/// The memory of a packet that has arrived.
#[derive(Debug)]
pub(in crate::rdm) enum PacketMemoryRef {
    /// A receive of the shared receive queue.
    Slot(Slot),
    /// A ring, until the call of the core returns.
    Ring(RingPacket),
}
