//! Messages that contain their sender and sequence number.

use crate::random::pattern;

/// Bytes of a header.
pub(crate) const HEADER: usize = 40;
const MAGIC: u32 = 0x6661_756c;

/// The header of each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) from: u8,
    pub(crate) to: u8,
    /// 0 and 1: the connected streams; 2: the datagrams.
    pub(crate) stream: u8,
    /// Whether the receiver must acknowledge it.
    pub(crate) is_data: bool,
    /// The connection's number.
    pub(crate) nonce: u32,
    /// Length in bytes of the message with its header.
    pub(crate) len: u32,
    pub(crate) seq: u64,
    /// Number of data messages that the sender has received.
    pub(crate) ack: u64,
}

/// The seed of a payload's bytes.
pub(crate) fn tag(from: u8, to: u8, stream: u8, nonce: u32, seq: u64) -> u64 {
    let who = u64::from(from) << 8 | u64::from(to) << 16 | u64::from(stream) << 24;
    (who | u64::from(nonce) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seq << 3
}

impl Header {
    fn tag(&self) -> u64 {
        tag(self.from, self.to, self.stream, self.nonce, self.seq)
    }

    /// The bytes of the message.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len as usize);
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&[self.from, self.to, self.stream, u8::from(self.is_data)]);
        bytes.extend_from_slice(&self.nonce.to_le_bytes());
        bytes.extend_from_slice(&self.len.to_le_bytes());
        bytes.extend_from_slice(&self.seq.to_le_bytes());
        bytes.extend_from_slice(&self.ack.to_le_bytes());
        bytes.extend_from_slice(&(!self.seq).to_le_bytes());
        bytes.extend(pattern(self.tag(), self.len as usize - HEADER));
        bytes
    }

    /// The header of a message, all of whose bytes must be as they were sent.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        assert!(
            bytes.len() >= HEADER && u32_at(0) == MAGIC,
            "no message: {:?}",
            &bytes[..bytes.len().min(64)]
        );
        let header = Self {
            from: bytes[4],
            to: bytes[5],
            stream: bytes[6],
            is_data: bytes[7] != 0,
            nonce: u32_at(8),
            len: u32_at(12),
            seq: u64_at(16),
            ack: u64_at(24),
        };
        assert_eq!(header.len as usize, bytes.len(), "{header:?}");
        assert_eq!(u64_at(32), !header.seq, "{header:?}");
        assert!(
            bytes[HEADER..] == pattern(header.tag(), bytes.len() - HEADER),
            "a payload that was not sent: {header:?}"
        );
        header
    }
}
