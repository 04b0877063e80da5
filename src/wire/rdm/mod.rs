//! Formats of native RDM endpoints: connection data and packets. `docs/protocol-rdm.md` has the
//! bytes.
//!
//! Every value has one encoding: the decoders refuse reserved bits, so a message that decodes
//! encodes to the same bytes. They do not panic, allocate, or keep references to their input. A
//! decoded value has only the properties that its type states; whether it fits the session is
//! checked in `rdm`.

pub mod cm;
pub mod hello;
pub mod packet;
pub mod ring;
pub mod terms;
pub mod values;
pub mod xrc;

pub use cm::{Reason, Rejection, Reply, Request};
pub use hello::Hello;
pub use packet::{Body, Close, Header, Kind, Packet};
pub use terms::{Grant, Terms};
pub use values::{
    Credit, EndpointId, Epoch, GrantNumber, Listener, Number, OpId, PeerIndex, Secret,
};

/// Reason why received bytes are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// Fewer bytes than the format requires, or a length that does not agree with the content.
    Length,
    /// A value that this version does not define.
    Value,
    /// A handshake message of another version, which is the value.
    Version(u8),
}

/// The `N` bytes from `at` on.
#[inline(always)]
fn bytes<const N: usize>(from: &[u8], at: usize) -> Result<[u8; N], Bad> {
    let found = from.get(at..).and_then(<[u8]>::first_chunk);
    found.copied().ok_or(Bad::Length)
}

#[inline(always)]
fn get16(from: &[u8], at: usize) -> Result<u16, Bad> {
    bytes(from, at).map(u16::from_le_bytes)
}

#[inline(always)]
fn get32(from: &[u8], at: usize) -> Result<u32, Bad> {
    bytes(from, at).map(u32::from_le_bytes)
}

#[inline(always)]
fn get64(from: &[u8], at: usize) -> Result<u64, Bad> {
    bytes(from, at).map(u64::from_le_bytes)
}

/// Refuses reserved bits that are set.
#[inline(always)]
fn reserved(bits: impl Into<u64>) -> Result<(), Bad> {
    if bits.into() == 0 {
        Ok(())
    } else {
        Err(Bad::Value)
    }
}

/// Copies `from` to the offset `at`. The encoders use constant offsets inside their arrays.
fn put<const N: usize>(to: &mut [u8], at: usize, from: [u8; N]) {
    to[at..at + N].copy_from_slice(&from);
}

#[cfg(test)]
mod tests;
