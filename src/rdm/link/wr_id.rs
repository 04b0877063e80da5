//! The `wr_id` of the requests of an endpoint with many peers.

use crate::queue::slots::EngineRequest;
use crate::rdm::core::link::LinkKey;
use crate::rdm::table_keys::CircuitKey;

/// `wr_id` of sends: this bit, the link's key (32 bits), the position in its send queue (16 bits).
/// That of receives is the number of a slot.
const SEND: u64 = 1 << 63;
/// Set besides [`SEND`] for requests that are not packets: operations, with the low bits of the
/// request's number, and the engine's own requests, with their kind.
const RMA: u64 = 1 << 62;
const ENGINE: u64 = 1 << 61;
/// Both: a packet on a circuit, whose key is in the place of the link's.
const CIRCUIT: u64 = RMA | ENGINE;

/// The request of a work completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum WrId {
    /// A receive into this slot.
    Receive(u32),
    /// A send of a link, with its position.
    Send(LinkKey, u16),
    /// A packet on a circuit, with its position.
    Circuit(CircuitKey, u16),
    /// A request of RMA or an atomic, with the low bits of its number.
    Rma(LinkKey, u16),
    /// One of the engine's own requests, with its kind.
    Engine(LinkKey, u16),
}

impl WrId {
    pub(in crate::rdm) fn of(wr_id: u64) -> Self {
        let link = LinkKey::from_number((wr_id >> 16) as u32);
        if wr_id & SEND == 0 {
            Self::Receive(wr_id as u32)
        } else if wr_id & (RMA | ENGINE) == 0 {
            Self::Send(link, wr_id as u16)
        } else if wr_id & CIRCUIT == CIRCUIT {
            let circuit = CircuitKey::from_number((wr_id >> 16) as u32);
            Self::Circuit(circuit, wr_id as u16)
        } else if wr_id & RMA != 0 {
            Self::Rma(link, wr_id as u16)
        } else {
            Self::Engine(link, wr_id as u16)
        }
    }

    pub(in crate::rdm) const fn rma(link: LinkKey, number: u32) -> u64 {
        SEND | RMA | (link.number() as u64) << 16 | number as u16 as u64
    }

    pub(in crate::rdm) const fn engine(link: LinkKey, kind: EngineRequest) -> u64 {
        SEND | ENGINE | (link.number() as u64) << 16 | kind as u64
    }

    pub(in crate::rdm) const fn circuit(circuit: CircuitKey, position: u16) -> u64 {
        SEND | CIRCUIT | (circuit.number() as u64) << 16 | position as u64
    }

    pub(in crate::rdm) const fn send(link: LinkKey, position: u16) -> u64 {
        SEND | (link.number() as u64) << 16 | position as u64
    }
}
