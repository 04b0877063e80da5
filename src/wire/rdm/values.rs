//! Numbers of the RDM protocol, each a separate type.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::{NonZeroU32, NonZeroU64};

/// The conversions of a type of numbers other than 0.
macro_rules! nonzero {
    ($name:ident, $inner:ident, $number:ty) => {
        impl $name {
            /// `None`: `number` is 0, which means that there is none.
            pub const fn new(number: $number) -> Option<Self> {
                match $inner::new(number) {
                    Some(number) => Some(Self(number)),
                    None => None,
                }
            }

            /// The number.
            pub const fn get(self) -> $number {
                self.0.get()
            }
        }
    };
}
pub(super) use nonzero;

/// The id of an endpoint: random, chosen when the endpoint is enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct EndpointId(NonZeroU64);

nonzero!(EndpointId, NonZeroU64, u64);

/// A token: 32 random bits that one endpoint gives to one peer, which returns them in requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Secret(NonZeroU32);

nonzero!(Secret, NonZeroU32, u32);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The number of a dial. Epochs of one endpoint are not reused; they are compared in sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Epoch(NonZeroU32);

nonzero!(Epoch, NonZeroU32, u32);

impl Epoch {
    /// The first epoch of an endpoint.
    pub const FIRST: Self = Self(NonZeroU32::MIN);

    /// The next epoch; 1 follows 2^32 - 1.
    #[must_use]
    pub const fn next(self) -> Self {
        match NonZeroU32::new(self.0.get().wrapping_add(1)) {
            Some(number) => Self(number),
            None => Self::FIRST,
        }
    }

    /// Whether this epoch is before the other one, in sequence.
    pub const fn is_before(self, other: Self) -> bool {
        (other.get().wrapping_sub(self.get()) as i32) > 0
    }
}

/// The number of a numbered packet; wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Number(u32);

impl Number {
    /// With this value.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The value.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number of the next packet.
    #[inline]
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// The number of the packet `count` packets later.
    #[inline]
    #[must_use]
    pub const fn add(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// The count of packets from this one to the other one; negative if the other one is earlier.
    #[inline]
    pub const fn until(self, other: Self) -> i32 {
        other.0.wrapping_sub(self.0) as i32
    }

    /// Whether this packet is before the other one.
    #[inline]
    pub const fn is_before(self, other: Self) -> bool {
        self.until(other) > 0
    }
}

/// The number of a grant; wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct GrantNumber(u16);

impl GrantNumber {
    /// With this value.
    #[inline]
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// The value.
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The next grant's number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Whether this grant is before the other one.
    pub const fn is_before(self, other: Self) -> bool {
        (other.0.wrapping_sub(self.0) as i16) > 0
    }
}

/// Blocks and slots: positions since the begin of the session, which wrap, or amounts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Credit {
    /// Units of 64 bytes of memory for unexpected messages.
    pub blocks: u32,
    /// Receives of the shared receive queue.
    pub slots: u32,
}

impl Credit {
    /// None.
    pub const ZERO: Self = Self::new(0, 0);

    /// Of blocks and slots.
    #[inline]
    pub const fn new(blocks: u32, slots: u32) -> Self {
        Self { blocks, slots }
    }

    /// A position after this one.
    #[inline]
    #[must_use]
    pub const fn add(self, amount: Self) -> Self {
        Self {
            blocks: self.blocks.wrapping_add(amount.blocks),
            slots: self.slots.wrapping_add(amount.slots),
        }
    }

    /// A position before this one.
    #[inline]
    #[must_use]
    pub const fn sub(self, amount: Self) -> Self {
        Self {
            blocks: self.blocks.wrapping_sub(amount.blocks),
            slots: self.slots.wrapping_sub(amount.slots),
        }
    }

    /// The amount from this position to a later one. `None`: the other position is earlier, in
    /// blocks or in slots.
    #[inline]
    pub const fn until(self, later: Self) -> Option<Self> {
        let amount = later.sub(self);
        if (amount.blocks as i32) < 0 || (amount.slots as i32) < 0 {
            None
        } else {
            Some(amount)
        }
    }

    /// Whether an amount is at least the other one, in blocks and in slots.
    #[inline]
    pub const fn covers(self, other: Self) -> bool {
        self.blocks >= other.blocks && self.slots >= other.slots
    }
}

/// The name under which a receiver finds the peer of a packet: opaque to its sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct PeerIndex(u32);

impl PeerIndex {
    /// With this value.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The value.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// The name of an operation at its owner: opaque to the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct OpId(u32);

impl OpId {
    /// With this value.
    #[inline]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The value.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A listening address: an IPv6 address, or an IPv4 address mapped to one, and a port. A receiver
/// of a link-local address adds the scope of its own interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Listener {
    ip: Ipv6Addr,
    port: u16,
}

impl Listener {
    /// `None`: an unspecified address or port 0, which cannot be dialled.
    pub fn new(ip: IpAddr, port: u16) -> Option<Self> {
        let ip = match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self::checked(ip, port)
    }

    fn checked(ip: Ipv6Addr, port: u16) -> Option<Self> {
        let unspecified = ip.is_unspecified() || ip == Ipv4Addr::UNSPECIFIED.to_ipv6_mapped();
        (!unspecified && port != 0).then_some(Self { ip, port })
    }

    /// From the bytes of a message.
    pub(super) fn of(ip: [u8; 16], port: u16) -> Option<Self> {
        Self::checked(Ipv6Addr::from(ip), port)
    }

    pub(super) fn octets(self) -> [u8; 16] {
        self.ip.octets()
    }

    /// The port.
    pub const fn port(self) -> u16 {
        self.port
    }

    /// The address to dial, of scope 0.
    pub fn socket_addr(self) -> SocketAddr {
        SocketAddr::new(self.ip.to_canonical(), self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wrap() {
        let last = Number::new(u32::MAX);
        assert!(last.is_before(last.next()));
        assert!(!last.next().is_before(last));
        assert!(!last.is_before(last));
        assert_eq!(last.until(last.add(5)), 5);
        let last = Epoch::new(u32::MAX).unwrap();
        assert!(last.is_before(last.next()) && last.next() == Epoch::FIRST);
        let last = GrantNumber::new(u16::MAX);
        assert!(last.is_before(last.next()) && !last.next().is_before(last));
    }

    #[test]
    fn positions_wrap() {
        let near = Credit::new(u32::MAX - 1, u32::MAX);
        let far = near.add(Credit::new(4, 2));
        assert_eq!(near.until(far), Some(Credit::new(4, 2)));
        assert_eq!(far.until(near), None);
        assert_eq!(near.until(near), Some(Credit::ZERO));
        assert_eq!(
            near.until(near.add(Credit::new(1, 0)).sub(Credit::new(0, 1))),
            None
        );
        assert!(!Credit::new(5, 0).covers(Credit::new(1, 1)));
    }

    #[test]
    fn listeners_can_be_dialled() {
        let text = |text: &str| text.parse::<SocketAddr>().unwrap();
        for addr in ["10.1.2.3:7", "[fe80::1]:65535"].map(text) {
            let listener = Listener::new(addr.ip(), addr.port()).unwrap();
            assert_eq!(listener.socket_addr(), addr);
            assert_eq!(
                Listener::of(listener.octets(), listener.port()),
                Some(listener)
            );
        }
        for addr in ["0.0.0.0:7", "[::]:7", "10.1.2.3:0"].map(text) {
            assert_eq!(Listener::new(addr.ip(), addr.port()), None);
        }
    }
}
