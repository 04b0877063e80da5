//! The `wr_id` of a work request, which the device returns in its completion.

use crate::queue::slots::EngineRequest;
use crate::queue::srx_slots::SharedId;

/// `wr_id`: the direction, the endpoint's index in the queue's table, the probe bit, the generation
/// of that index, the request's number. The generation identifies completions that the device
/// returns after their queue pair was destroyed. The probe bit, which no index's generation has,
/// identifies the engine's own requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrId(pub(super) u64);

impl WrId {
    pub(super) const RECV: u64 = 1 << 63;
    /// The bit of the 15 bits of [`Self::generation`] that no index's generation has.
    pub(super) const PROBE: u16 = 1 << 14;
    pub(super) const GENERATIONS: u16 = Self::PROBE - 1;

    pub(super) fn is_shared(self) -> bool {
        self.0 & Self::RECV != 0 && self.generation() & Self::PROBE != 0
    }

    #[inline]
    pub(super) fn index(self) -> usize {
        (self.0 >> 47) as usize & 0xffff
    }

    #[inline]
    pub(super) fn generation(self) -> u16 {
        (self.0 >> 32) as u16 & 0x7fff
    }
}

/// An endpoint in the table of a completion queue: its index, and the generation of that. They are
/// stored as they are in the `wr_id` of its requests, so a post adds the number only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CqMember(u64);

impl CqMember {
    pub(super) fn new(index: u16, generation: u16) -> Self {
        Self(u64::from(index) << 47 | u64::from(generation & WrId::GENERATIONS) << 32)
    }

    /// The `wr_id` of the probe.
    pub(crate) fn probe(self) -> u64 {
        self.0 | u64::from(WrId::PROBE) << 32
    }

    /// The `wr_id` of a request of the engine's own.
    pub(crate) fn engine(self, kind: EngineRequest) -> u64 {
        self.probe() | kind as u64
    }

    /// The `wr_id` of the send of this number.
    #[inline]
    pub(crate) fn send(self, number: u32) -> u64 {
        self.0 | u64::from(number)
    }

    /// The `wr_id` of the receive of this number.
    #[inline]
    pub(crate) fn recv(self, number: u32) -> u64 {
        self.0 | WrId::RECV | u64::from(number)
    }

    #[inline]
    pub(super) fn index(self) -> usize {
        WrId(self.0).index()
    }

    #[inline]
    pub(super) fn generation(self) -> u16 {
        WrId(self.0).generation()
    }
}

/// The `wr_id` of receive `number` of a shared context. It differs from that of a probe, which has
/// no receive bit, and from that of every endpoint, whose generation never has the probe bit.
#[inline]
pub(crate) fn shared_recv(id: SharedId, number: u32) -> u64 {
    CqMember::new(id.index, id.generation).probe() | WrId::RECV | u64::from(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wr_id_keeps_its_parts_apart() {
        for index in [0, 1, 0x8000, u16::MAX] {
            for generation in [0, 1, WrId::GENERATIONS] {
                let id = CqMember::new(index, generation);
                for number in [0, 1, u32::MAX] {
                    let recv = WrId(id.recv(number));
                    assert_eq!(recv.index(), usize::from(index));
                    assert_eq!(recv.generation(), generation);
                    assert_eq!(recv.0 as u32, number);
                    assert_ne!(recv.0 & WrId::RECV, 0);
                    assert_eq!(WrId(id.send(number)).0 & WrId::RECV, 0);
                    let probe = WrId(id.probe());
                    assert_eq!(probe.index(), usize::from(index));
                    assert_eq!(probe.generation(), generation | WrId::PROBE);
                }
            }
        }
    }
}
