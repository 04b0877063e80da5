//! The `wr_id` of a work request, which the device returns in its completion.

use crate::queue::slots::EngineRequest;
use crate::queue::srx_slots::SharedId;

/// `wr_id`: the direction, the endpoint's index in the queue's table, the probe bit, the generation
/// of that index, the request's number. The generation identifies completions that the device
/// returns after their queue pair was destroyed. The probe bit, which no index's generation has,
/// identifies the engine's own requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrId(pub(super) u64);

impl WrId {
    pub(super) const RECV: u64 = 1 << 63;
    /// The bit of the 15 bits of [`Self::generation`] that no index's generation has.
    pub(super) const PROBE: u16 = 1 << 14;
    pub(super) const GENERATIONS: u16 = Self::PROBE - 1;

    pub(super) fn base(index: u16, generation: u16) -> Self {
        Self(u64::from(index) << 47 | u64::from(generation & Self::GENERATIONS) << 32)
    }

    /// The id of the probe.
    pub(crate) fn probe(self) -> u64 {
        self.0 | u64::from(Self::PROBE) << 32
    }

    /// The id of a request of the engine's own.
    pub(crate) fn engine_request(self, kind: EngineRequest) -> u64 {
        self.probe() | kind as u64
    }

    /// The id of the send of this number.
    #[inline]
    pub(crate) fn send(self, number: u32) -> u64 {
        self.0 | u64::from(number)
    }

    /// The id of the receive of this number.
    #[inline]
    pub(crate) fn recv(self, number: u32) -> u64 {
        self.0 | Self::RECV | u64::from(number)
    }

    /// The id of receive `number` of a shared context. It differs from a probe's id, which has no
    /// receive bit, and from every endpoint's id, whose generation never has the probe bit.
    #[inline]
    pub(crate) fn shared(id: SharedId, number: u32) -> u64 {
        Self::base(id.index, id.generation).probe() | Self::RECV | u64::from(number)
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wr_id_keeps_its_parts_apart() {
        for index in [0, 1, 0x8000, u16::MAX] {
            for generation in [0, 1, WrId::GENERATIONS] {
                let id = WrId::base(index, generation);
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
