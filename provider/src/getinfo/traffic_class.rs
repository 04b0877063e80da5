//! Traffic classes (`tclass`, `fi_endpoint(3)`).

use libfabric_sys::{FI_TC_DSCP, FI_TC_LABEL, FI_TC_UNSPEC};

use crate::ffi::log::info;

/// Bits of a differentiated services code point, and of the octet of a packet below it.
const DSCP_BITS: u32 = 6;
const ECN_BITS: u32 = 8 - DSCP_BITS;

/// A traffic class that packets can have: a code point, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrafficClass(Option<u8>);

impl TrafficClass {
    /// The default of the domain, or of the connection manager.
    pub(crate) const UNSPEC: Self = Self(None);

    /// The class for a *tclass* of hints. Labels, and values of other providers, are ignored: which
    /// code point a network has for each of them is known to its administrator alone. `None`: more
    /// than 6 bits of a code point.
    pub(crate) fn of(tclass: u32) -> Option<Self> {
        match tclass {
            FI_TC_UNSPEC => Some(Self::UNSPEC),
            FI_TC_DSCP..FI_TC_LABEL => {
                let point = u8::try_from(tclass - FI_TC_DSCP).ok();
                let point = point.filter(|point| *point < 1 << DSCP_BITS)?;
                Some(Self(Some(point)))
            }
            label => {
                info!(FI_LOG_FABRIC, "traffic class {label:#x} is ignored");
                Some(Self::UNSPEC)
            }
        }
    }

    /// The *tclass* of an answer.
    pub(crate) fn number(self) -> u32 {
        self.0
            .map_or(FI_TC_UNSPEC, |point| FI_TC_DSCP | u32::from(point))
    }

    /// The octet in packets: the type of service of IPv4, the traffic class of IPv6 and InfiniBand.
    pub(crate) fn octet(self) -> Option<u8> {
        self.0.map(|point| point << ECN_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_points_are_honoured_and_labels_ignored() {
        let class = |tclass| TrafficClass::of(tclass).map(|class| (class.number(), class.octet()));
        assert_eq!(class(FI_TC_UNSPEC), Some((0, None)));
        for (point, octet) in [(0, 0), (46, 0xb8), (63, 0xfc)] {
            let asked = FI_TC_DSCP | point;
            assert_eq!(class(asked), Some((asked, Some(octet))));
        }
        for none in [64, 255] {
            assert_eq!(class(FI_TC_DSCP | none), None);
        }
        for label in [FI_TC_LABEL, FI_TC_LABEL + 5, 1 << 20, u32::MAX] {
            assert_eq!(class(label), Some((0, None)));
        }
    }
}
