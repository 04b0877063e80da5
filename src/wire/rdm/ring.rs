//! The form of packets in a ring: three words and a payload. `docs/protocol-rdm.md`, "Rings".

use super::packet::{DATA, HEADER_SIZE, Header, Kind, MAX_HEAD, TAGGED};
use super::terms::MAX_EAGER;
use super::values::{GrantNumber, Number, OpId, PeerIndex};
use super::{Bad, get64, put};

/// Bytes 16 to 24 of the header, which are in front of the payload of most packets.
pub const PREFIX: usize = 8;

/// The words of a packet in a ring.
pub type Words = [u64; 3];

/// The words of EAGER without remote CQ data and without ACK.
#[inline(always)]
pub fn eager(header: &Header, tag: Option<u64>) -> Words {
    words_of(header, tag, 0)
}

/// The words of EAGER with remote CQ data of 32 bits, without ACK, with a payload of `len` bytes,
/// and the prefix of its payload in the ring.
#[inline(always)]
pub fn eager_with_data(
    header: &Header,
    tag: Option<u64>,
    data: u32,
    len: u32,
) -> (Words, [u8; PREFIX]) {
    let prefix = u64::from(len) | u64::from(data) << 32;
    (words_of(header, tag, DATA), prefix.to_le_bytes())
}

#[inline(always)]
fn words_of(header: &Header, tag: Option<u64>, more: u8) -> Words {
    let flags = more | if tag.is_some() { TAGGED } else { 0 };
    let kind = Kind::Eager as u64 | u64::from(flags) << 8;
    let seen = u64::from(header.seen.get()) << 16;
    [
        u64::from(header.number.get()) | u64::from(header.processed.get()) << 32,
        kind | seen | u64::from(header.to.get()) << 32,
        tag.unwrap_or_default(),
    ]
}

/// The words of DATA with a payload of `len` bytes, and the prefix of its payload in the ring.
#[inline]
pub fn data(header: &Header, op: OpId, offset: u64, len: u32) -> (Words, [u8; PREFIX]) {
    let seen = u64::from(header.seen.get()) << 16;
    let words = [
        u64::from(header.number.get()) | u64::from(header.processed.get()) << 32,
        Kind::Data as u64 | seen | u64::from(header.to.get()) << 32,
        offset,
    ];
    let prefix = u64::from(len) | u64::from(op.get()) << 32;
    (words, prefix.to_le_bytes())
}

/// EAGER in a ring, without ACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eager {
    /// The header.
    pub header: Header,
    /// The tag of a tagged message.
    pub tag: Option<u64>,
    /// Remote CQ data.
    pub data: Option<u32>,
}

impl Eager {
    /// Number of bytes of the ring's payload in front of that of the packet.
    #[inline(always)]
    pub const fn prefix(&self) -> usize {
        match self.data {
            Some(_) => PREFIX,
            None => 0,
        }
    }
}

/// The packet of [`eager`] or [`eager_with_data`] with these words, whose payload has `len` bytes
/// in the ring. `prefix` returns the first 8 of them, if there are so many. `None`: another packet,
/// or none at all, which [`Packet::decode`](super::Packet::decode) has to decode.
#[inline(always)]
pub fn as_eager(words: &Words, len: usize, prefix: impl FnOnce() -> u64) -> Option<Eager> {
    let [first, second, tag] = *words;
    // the numbers of a header fill its halves
    let (kind, flags) = (second as u8, (second >> 8) as u8);
    let tagged = flags & TAGGED != 0;
    let plain = flags & !(TAGGED | DATA) == 0 && (tagged || tag == 0);
    if kind != Kind::Eager as u8 || !plain {
        return None;
    }
    let (data, len) = match flags & DATA {
        0 => (None, len),
        _ => {
            let len = len.checked_sub(PREFIX)?;
            let prefix = prefix();
            if prefix as u32 as usize != len {
                return None;
            }
            (Some((prefix >> 32) as u32), len)
        }
    };
    if len > MAX_EAGER as usize {
        return None;
    }
    let header = Header {
        number: Number::new(first as u32),
        processed: Number::new((first >> 32) as u32),
        seen: GrantNumber::new((second >> 16) as u16),
        to: PeerIndex::new((second >> 32) as u32),
    };
    Some(Eager {
        header,
        tag: tagged.then_some(tag),
        data,
    })
}

/// The words of an encoded packet, and whether its payload has the [`PREFIX`].
#[inline]
pub fn words(head: &[u8; MAX_HEAD]) -> (Words, bool) {
    let word = |at| get64(head, at).unwrap_or_default();
    let words = [word(0), word(8), word(24)];
    (words, has_prefix(&words))
}

/// Whether the payload begins with bytes 16 to 24 of the header. EAGER without remote CQ data has
/// no such bytes: its length is that of the payload.
#[inline]
fn has_prefix(words: &Words) -> bool {
    // the lowest bytes
    let (kind, flags) = (words[1] as u8, (words[1] >> 8) as u8);
    kind != Kind::Eager as u8 || flags & DATA != 0
}

/// The begin of a packet as [`Packet::decode`](super::Packet::decode) takes it, whose payload has
/// `len` bytes in the ring. `copy` gets an offset in that payload and copies the bytes from there
/// on. Returns the bytes and their number, the size of the packet, and the offset in the packet of
/// the ring's first byte of payload.
///
/// # Errors
/// `Length`: no prefix.
pub fn head(words: &Words, len: usize, copy: impl Fn(usize, &mut [u8])) -> Result<Head, Bad> {
    let mut bytes = [0; MAX_HEAD];
    put(&mut bytes, 0, words[0].to_le_bytes());
    put(&mut bytes, 8, words[1].to_le_bytes());
    put(&mut bytes, 24, words[2].to_le_bytes());
    let prefix = if has_prefix(words) { PREFIX } else { 0 };
    let rest = len.checked_sub(prefix).ok_or(Bad::Length)?;
    if prefix == 0 {
        // a longer payload is refused by the decoder
        let length = u32::try_from(rest).map_err(|_| Bad::Length)?;
        put(&mut bytes, 16, length.to_le_bytes());
    } else {
        copy(0, &mut bytes[16..16 + PREFIX]);
    }
    let body = rest.min(MAX_HEAD - HEADER_SIZE);
    copy(prefix, &mut bytes[HEADER_SIZE..HEADER_SIZE + body]);
    Ok(Head {
        bytes,
        len: HEADER_SIZE + body,
        total: HEADER_SIZE + rest,
        begin: HEADER_SIZE - prefix,
    })
}

/// See [`head`].
#[derive(Clone, Copy, Debug)]
pub struct Head {
    bytes: [u8; MAX_HEAD],
    len: usize,
    /// Size of the packet in bytes.
    pub total: usize,
    /// The offset in the packet of the first byte of the ring's payload.
    pub begin: usize,
}

impl Head {
    /// The begin of the packet.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
