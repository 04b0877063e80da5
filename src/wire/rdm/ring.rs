//! The form of packets in a ring: three words and a payload. `docs/protocol-rdm.md`, "Rings".

use super::packet::{
    DATA, HEADER_SIZE, Header, Kind, MAX_HEAD, MAX_STATUS, PUSH_SIZE, RTS_SIZE, TAGGED, is_sink,
    is_source,
};
use super::terms::MAX_EAGER;
use super::values::{GrantNumber, Number, OpId, PeerIndex};
use super::{Bad, get64, put};
use crate::verbs::{RemoteAddr, Rkey};

/// Bytes 16 to 24 of the header, which are in front of the payload of most packets.
pub const PREFIX: usize = 8;

/// The words of a packet in a ring.
pub type Words = [u64; 3];

/// The words of EAGER without remote CQ data and without ACK.
#[inline(always)]
pub fn eager(header: &Header, tag: Option<u64>) -> Words {
    words_of(header, Kind::Eager, tag, 0)
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
    (
        words_of(header, Kind::Eager, tag, DATA),
        prefix.to_le_bytes(),
    )
}

#[inline(always)]
fn words_of(header: &Header, kind: Kind, tag: Option<u64>, more: u8) -> Words {
    let flags = more | if tag.is_some() { TAGGED } else { 0 };
    let kind = kind as u64 | u64::from(flags) << 8;
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

/// The header in the first two words, whose halves its numbers fill.
#[inline(always)]
fn header_of(&[first, second, _]: &Words) -> Header {
    Header {
        number: Number::new(first as u32),
        processed: Number::new((first >> 32) as u32),
        seen: GrantNumber::new((second >> 16) as u16),
        to: PeerIndex::new((second >> 32) as u32),
    }
}

/// Bytes of the ring's payload of an RTS without wide data: the prefix and the body.
pub const RTS: usize = PREFIX + RTS_SIZE;

/// The source of a message that is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The sender's operation.
    pub op: OpId,
    /// NULL: it cannot be read.
    pub addr: RemoteAddr,
    /// Length of the message in bytes.
    pub len: u64,
    /// 0 without an address.
    pub rkey: Rkey,
}

/// The words of RTS with remote CQ data of at most 32 bits, without ACK, and its payload in the
/// ring.
#[inline]
pub fn rts(
    header: &Header,
    (tag, data): (Option<u64>, Option<u32>),
    source: &Source,
) -> (Words, [u8; RTS]) {
    let more = if data.is_some() { DATA } else { 0 };
    let words = words_of(header, Kind::Rts, tag, more);
    // the length of the body
    let prefix = RTS_SIZE as u64 | u64::from(data.unwrap_or_default()) << 32;
    let last = u64::from(source.rkey.get()) | u64::from(source.op.get()) << 32;
    let mut payload = [0; RTS];
    put(&mut payload, 0, prefix.to_le_bytes());
    put(&mut payload, 8, source.addr.get().to_le_bytes());
    put(&mut payload, 16, source.len.to_le_bytes());
    put(&mut payload, 24, last.to_le_bytes());
    (words, payload)
}

/// The words of FIN, and its payload in the ring.
#[inline]
pub fn fin(header: &Header, op: OpId, status: u16) -> (Words, [u8; PREFIX]) {
    let mut words = words_of(header, Kind::Fin, None, 0);
    words[2] = u64::from(status);
    let prefix = u64::from(op.get()) << 32;
    (words, prefix.to_le_bytes())
}

/// Bytes of the ring's payload of a PUSH: the prefix and the body.
pub const PUSH: usize = PREFIX + PUSH_SIZE;

/// The end of a message that its receiver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The sender's operation.
    pub op: OpId,
    /// Offset in the message of its first byte.
    pub offset: u64,
    /// Where that is written; not NULL. Address plus offset do not overflow.
    pub addr: RemoteAddr,
    /// The rkey of that memory.
    pub rkey: Rkey,
    /// The receiver's operation, which PUSHED names.
    pub receiver: OpId,
}

/// The words of PUSH, and its payload in the ring.
#[inline]
pub fn push(header: &Header, end: &End) -> (Words, [u8; PUSH]) {
    let mut words = words_of(header, Kind::Push, None, 0);
    words[2] = end.offset;
    // the length of the body
    let prefix = PUSH_SIZE as u64 | u64::from(end.op.get()) << 32;
    let last = u64::from(end.rkey.get()) | u64::from(end.receiver.get()) << 32;
    let mut payload = [0; PUSH];
    put(&mut payload, 0, prefix.to_le_bytes());
    put(&mut payload, 8, end.addr.get().to_le_bytes());
    put(&mut payload, 16, last.to_le_bytes());
    (words, payload)
}

/// The words of PUSHED, and its payload in the ring. `op`: the receiver's operation.
#[inline]
pub fn pushed(header: &Header, op: OpId, written: u64) -> (Words, [u8; PREFIX]) {
    let mut words = words_of(header, Kind::Pushed, None, 0);
    words[2] = written;
    let prefix = u64::from(op.get()) << 32;
    (words, prefix.to_le_bytes())
}

/// A packet of [`rts`], [`fin`], [`push`] or [`pushed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// RTS: tag, remote CQ data, and source.
    Rts(Option<u64>, Option<u32>, Source),
    /// FIN: the sender's operation, and the status.
    Fin(OpId, u16),
    /// PUSH.
    Push(End),
    /// PUSHED: the receiver's operation, and the number of bytes that were written.
    Pushed(OpId, u64),
}

/// The packet of [`rts`], [`fin`], [`push`] or [`pushed`] with these words, whose payload has `len`
/// bytes in the ring. `word` returns the one of its words at an offset, if it has that. `None`:
/// another packet, or none at all, which [`Packet::decode`](super::Packet::decode) has to decode.
#[inline]
pub fn as_announced(
    words: &Words,
    len: usize,
    word: impl Fn(usize) -> u64,
) -> Option<(Header, Announced)> {
    let [_, second, last] = *words;
    let (kind, flags) = (second as u8, (second >> 8) as u8);
    let announced = if kind == Kind::Fin as u8 && len == PREFIX {
        let prefix = word(0);
        // no length, and no flags
        if flags != 0 || prefix as u32 != 0 || last > MAX_STATUS {
            return None;
        }
        Announced::Fin(OpId::new((prefix >> 32) as u32), last as u16)
    } else if kind == Kind::Rts as u8 && len == RTS {
        let (tagged, has_data) = (flags & TAGGED != 0, flags & DATA != 0);
        let (prefix, addr, size, rest) = (word(0), word(8), word(16), word(24));
        let data = (prefix >> 32) as u32;
        let plain = flags & !(TAGGED | DATA) == 0
            && (tagged || last == 0)
            && (has_data || data == 0)
            && prefix as u32 as usize == RTS_SIZE;
        let (addr, rkey) = (RemoteAddr::new(addr), Rkey::new(rest as u32));
        if !plain || !is_source(addr, size, rkey) {
            return None;
        }
        let source = Source {
            op: OpId::new((rest >> 32) as u32),
            addr,
            len: size,
            rkey,
        };
        Announced::Rts(tagged.then_some(last), has_data.then_some(data), source)
    } else if kind == Kind::Push as u8 && len == PUSH {
        let (prefix, addr, rest) = (word(0), RemoteAddr::new(word(8)), word(16));
        if flags != 0 || prefix as u32 as usize != PUSH_SIZE || !is_sink(addr, last) {
            return None;
        }
        Announced::Push(End {
            op: OpId::new((prefix >> 32) as u32),
            offset: last,
            addr,
            rkey: Rkey::new(rest as u32),
            receiver: OpId::new((rest >> 32) as u32),
        })
    } else if kind == Kind::Pushed as u8 && len == PREFIX {
        let prefix = word(0);
        if flags != 0 || prefix as u32 != 0 {
            return None;
        }
        Announced::Pushed(OpId::new((prefix >> 32) as u32), last)
    } else {
        return None;
    };
    Some((header_of(words), announced))
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
    let [_, second, tag] = *words;
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
    Some(Eager {
        header: header_of(words),
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
