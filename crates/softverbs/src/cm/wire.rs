//! Messages between two connection managers, as bytes. `docs/softverbs-cm.md` has the tables.
//!
//! Invariants: every kind of message has one length, every number is little-endian, and unused
//! bytes are zero. [`decode`] takes untrusted bytes: it returns a message that [`Message::encode`]
//! could have made, or an error.

use std::net::{Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// "SVCM" in the order of the bytes.
const MAGIC: u32 = u32::from_le_bytes(*b"SVCM");
/// Incremented with every change of the tables; both sides must have the same.
const VERSION: u16 = 2;
/// Length of the header of every message.
const HEADER: usize = 12;
/// Length of the longest message in bytes.
pub(super) const MAX_MESSAGE: usize = HEADER + 68 + SIDR_REQ_DATA;

/// Maximum private data of a request: InfiniBand's 92 bytes without the 36 of librdmacm's header.
pub(super) const REQ_DATA: usize = 56;
/// Maximum private data of a reply.
pub(super) const REP_DATA: usize = 196;
/// Maximum private data of a rejection.
pub(super) const REJ_DATA: usize = 148;
/// Maximum private data of a datagram service's request: 216 bytes without those 36.
pub(super) const SIDR_REQ_DATA: usize = 180;
/// Maximum private data of a datagram service's reply.
pub(super) const SIDR_REP_DATA: usize = 136;

const KIND_REQ: u8 = 1;
const KIND_REP: u8 = 2;
const KIND_RTU: u8 = 3;
const KIND_REJ: u8 = 4;
const KIND_DREQ: u8 = 5;
const KIND_SIDR_REQ: u8 = 6;
const KIND_SIDR_REP: u8 = 7;

/// Status of a datagram service's answer, which applications find in an event's status.
pub(super) mod sidr {
    pub(in super::super) const SUCCESS: u8 = 0;
    /// No process listens.
    pub(in super::super) const UNSUPPORTED: u8 = 1;
    /// The application has rejected, or has ended.
    pub(in super::super) const REJECT: u8 = 2;
}

/// The transport service of a connection, as in InfiniBand's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Rc,
    Xrc,
}

impl Transport {
    fn number(self) -> u8 {
        match self {
            Self::Rc => 0,
            Self::Xrc => 3,
        }
    }
}

/// Private data of the application: at most `N` bytes, zero after `len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Private<const N: usize> {
    len: u8,
    bytes: [u8; N],
}

impl<const N: usize> Private<N> {
    /// No private data.
    pub(super) const EMPTY: Self = Self {
        len: 0,
        bytes: [0; N],
    };

    /// The bytes of `data`; `None` if they are too long.
    pub(super) fn new(data: &[u8]) -> Option<Self> {
        let mut bytes = [0; N];
        bytes.get_mut(..data.len())?.copy_from_slice(data);
        Some(Self {
            len: u8::try_from(data.len()).ok()?,
            bytes,
        })
    }

    /// The whole field. InfiniBand's messages do not contain the length of private data, so the
    /// receiver's application gets the whole field.
    pub(super) fn padded(&self) -> &[u8] {
        &self.bytes
    }
}

/// The parameters that both sides of a connection send about their queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Party {
    /// Queue pair number, 24 bits.
    pub(super) qp_num: u32,
    /// First packet sequence number, 24 bits.
    pub(super) psn: u32,
    pub(super) gid: [u8; 16],
    /// Maximum number of reads and atomics that the sender answers concurrently.
    pub(super) responder_resources: u8,
    /// Maximum number of outstanding reads and atomics of the sender.
    pub(super) initiator_depth: u8,
    pub(super) flow_control: bool,
    /// RNR retry count, 3 bits.
    pub(super) rnr_retry_count: u8,
    pub(super) srq: bool,
}

/// Connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Req {
    pub(super) transport: Transport,
    pub(super) party: Party,
    /// Retry count, 3 bits.
    pub(super) retry_count: u8,
    /// Source and destination have the same family.
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
    pub(super) data: Private<REQ_DATA>,
}

/// Reply: accepts a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rep {
    pub(super) party: Party,
    pub(super) data: Private<REP_DATA>,
}

/// Rejects a request or a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rej {
    /// Reject reason of the InfiniBand specification, table 103.
    pub(super) reason: u16,
    pub(super) data: Private<REJ_DATA>,
}

/// Asks a datagram service for its queue pair (InfiniBand: service ID resolution).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SidrReq {
    pub(super) gid: [u8; 16],
    /// Number of the client's queue pair, 24 bits.
    pub(super) qp_num: u32,
    /// Source and destination have the same family.
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
    pub(super) data: Private<SIDR_REQ_DATA>,
}

/// A datagram service's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SidrRep {
    /// Status of the InfiniBand specification's SIDR_REP: 0 for success, or 2 for a refusal.
    pub(super) status: u8,
    /// Queue pair number, 24 bits.
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
    pub(super) gid: [u8; 16],
    pub(super) data: Private<SIDR_REP_DATA>,
}

/// A message, which is one packet of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    clippy::large_enum_variant,
    reason = "is on the stack for one call only"
)]
pub(super) enum Message {
    Req(Req),
    Rep(Rep),
    /// The queue pair of the active side is ready to use.
    Rtu,
    Rej(Rej),
    /// The sender has disconnected.
    Dreq,
    SidrReq(SidrReq),
    SidrRep(SidrRep),
}

/// Error: the bytes are no message of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Appends fields.
struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn bytes(&mut self, value: &[u8]) {
        self.0.extend_from_slice(value);
    }
    fn party(&mut self, party: &Party) {
        self.u32(party.qp_num);
        self.u32(party.psn);
        self.bytes(&party.gid);
        self.u8(party.responder_resources);
        self.u8(party.initiator_depth);
        self.u8(u8::from(party.flow_control));
        self.u8(party.rnr_retry_count);
        self.u8(u8::from(party.srq));
    }
    fn address(&mut self, address: &SocketAddr) {
        let (ip, scope) = match address {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped().octets(), 0),
            SocketAddr::V6(v6) => (v6.ip().octets(), v6.scope_id()),
        };
        self.bytes(&ip);
        self.u32(scope);
        self.u16(address.port());
    }
}

/// Reads fields in order; fails at the first that is missing.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }
    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }
    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }
    fn at_most(&mut self, limit: u8) -> Result<u8, Malformed> {
        self.u8().and_then(|value| {
            if value <= limit {
                Ok(value)
            } else {
                Err(Malformed)
            }
        })
    }
    fn bool(&mut self) -> Result<bool, Malformed> {
        self.at_most(1).map(|value| value == 1)
    }
    fn bits24(&mut self) -> Result<u32, Malformed> {
        self.u32().and_then(|value| {
            if value >> 24 == 0 {
                Ok(value)
            } else {
                Err(Malformed)
            }
        })
    }
    /// The status of a datagram service's answer.
    fn status(&mut self) -> Result<u8, Malformed> {
        self.u8().and_then(|value| match value {
            sidr::SUCCESS | sidr::REJECT => Ok(value),
            _ => Err(Malformed),
        })
    }
    fn zeros(&mut self, count: usize) -> Result<(), Malformed> {
        if self.take(count)?.iter().all(|&byte| byte == 0) {
            Ok(())
        } else {
            Err(Malformed)
        }
    }
    fn party(&mut self) -> Result<Party, Malformed> {
        Ok(Party {
            qp_num: self.bits24()?,
            psn: self.bits24()?,
            gid: self.array()?,
            responder_resources: self.u8()?,
            initiator_depth: self.u8()?,
            flow_control: self.bool()?,
            rnr_retry_count: self.at_most(7)?,
            srq: self.bool()?,
        })
    }
    fn address(&mut self, v6: bool) -> Result<SocketAddr, Malformed> {
        let ip = Ipv6Addr::from(self.array::<16>()?);
        let scope = self.u32()?;
        let port = self.u16()?;
        if v6 {
            return Ok(SocketAddrV6::new(ip, port, 0, scope).into());
        }
        match (ip.to_ipv4_mapped(), scope) {
            (Some(v4), 0) => Ok(SocketAddrV4::new(v4, port).into()),
            _ => Err(Malformed),
        }
    }
    fn private<const N: usize>(&mut self, len: u8) -> Result<Private<N>, Malformed> {
        let bytes = self.array::<N>()?;
        match bytes.get(usize::from(len)..) {
            Some(rest) if rest.iter().all(|&byte| byte == 0) => Ok(Private { len, bytes }),
            _ => Err(Malformed),
        }
    }
}

impl Message {
    /// Encodes the message as one packet.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(MAX_MESSAGE));
        out.u32(MAGIC);
        out.u16(VERSION);
        out.u8(match self {
            Self::Req(_) => KIND_REQ,
            Self::Rep(_) => KIND_REP,
            Self::Rtu => KIND_RTU,
            Self::Rej(_) => KIND_REJ,
            Self::Dreq => KIND_DREQ,
            Self::SidrReq(_) => KIND_SIDR_REQ,
            Self::SidrRep(_) => KIND_SIDR_REP,
        });
        out.u8(match self {
            Self::Req(req) => req.transport.number(),
            _ => 0,
        });
        out.bytes(&[0; 4]);
        match self {
            Self::Req(req) => {
                out.party(&req.party);
                out.u8(req.retry_count);
                out.u8(u8::from(req.source.is_ipv6()));
                out.u8(req.data.len);
                out.address(&req.source);
                out.address(&req.destination);
                out.bytes(&req.data.bytes);
            }
            Self::Rep(rep) => {
                out.party(&rep.party);
                out.u8(rep.data.len);
                out.bytes(&[0; 2]);
                out.bytes(&rep.data.bytes);
            }
            Self::Rej(rej) => {
                out.u16(rej.reason);
                out.u8(rej.data.len);
                out.u8(0);
                out.bytes(&rej.data.bytes);
            }
            Self::SidrReq(req) => {
                out.bytes(&req.gid);
                out.u32(req.qp_num);
                out.u8(u8::from(req.source.is_ipv6()));
                out.u8(req.data.len);
                out.bytes(&[0; 2]);
                out.address(&req.source);
                out.address(&req.destination);
                out.bytes(&req.data.bytes);
            }
            Self::SidrRep(rep) => {
                out.u8(rep.status);
                out.u8(rep.data.len);
                out.bytes(&[0; 2]);
                out.u32(rep.qp_num);
                out.u32(rep.qkey);
                out.bytes(&rep.gid);
                out.bytes(&rep.data.bytes);
            }
            Self::Rtu | Self::Dreq => {}
        }
        out.0
    }
}

/// Decodes a packet.
///
/// # Errors
/// [`Malformed`]: [`Message::encode`] makes no such packet.
pub(super) fn decode(packet: &[u8]) -> Result<Message, Malformed> {
    let mut body = Reader(packet);
    if body.u32()? != MAGIC || body.u16()? != VERSION {
        return Err(Malformed);
    }
    let kind = body.u8()?;
    let transport = match (kind, body.u8()?) {
        (_, 0) => Transport::Rc,
        (KIND_REQ, 3) => Transport::Xrc,
        _ => return Err(Malformed),
    };
    body.zeros(4)?;
    let message = match kind {
        KIND_REQ => {
            let party = body.party()?;
            let retry_count = body.at_most(7)?;
            let v6 = body.bool()?;
            let len = body.u8()?;
            Message::Req(Req {
                transport,
                party,
                retry_count,
                source: body.address(v6)?,
                destination: body.address(v6)?,
                data: body.private(len)?,
            })
        }
        KIND_REP => {
            let party = body.party()?;
            let len = body.u8()?;
            body.zeros(2)?;
            Message::Rep(Rep {
                party,
                data: body.private(len)?,
            })
        }
        KIND_RTU => Message::Rtu,
        KIND_REJ => {
            let reason = body.u16()?;
            let len = body.u8()?;
            body.zeros(1)?;
            Message::Rej(Rej {
                reason,
                data: body.private(len)?,
            })
        }
        KIND_DREQ => Message::Dreq,
        KIND_SIDR_REQ => {
            let gid = body.array()?;
            let qp_num = body.bits24()?;
            let v6 = body.bool()?;
            let len = body.u8()?;
            body.zeros(2)?;
            Message::SidrReq(SidrReq {
                gid,
                qp_num,
                source: body.address(v6)?,
                destination: body.address(v6)?,
                data: body.private(len)?,
            })
        }
        KIND_SIDR_REP => {
            let status = body.status()?;
            let len = body.u8()?;
            body.zeros(2)?;
            Message::SidrRep(SidrRep {
                status,
                qp_num: body.bits24()?,
                qkey: body.u32()?,
                gid: body.array()?,
                data: body.private(len)?,
            })
        }
        _ => return Err(Malformed),
    };
    if body.0.is_empty() {
        Ok(message)
    } else {
        Err(Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generator of test values: xorshift with a fixed seed, so that a failure can be repeated.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }
        fn below(&mut self, limit: u64) -> u64 {
            self.next() % limit
        }
        fn byte(&mut self) -> u8 {
            self.next().to_le_bytes()[3]
        }
        fn array<const N: usize>(&mut self) -> [u8; N] {
            std::array::from_fn(|_| self.byte())
        }
        fn private<const N: usize>(&mut self) -> Private<N> {
            let len = self.below(N as u64 + 1) as usize;
            Private::new(&self.array::<N>()[..len]).unwrap()
        }
        fn party(&mut self) -> Party {
            Party {
                qp_num: self.below(1 << 24) as u32,
                psn: self.below(1 << 24) as u32,
                gid: self.array(),
                responder_resources: self.byte(),
                initiator_depth: self.byte(),
                flow_control: self.below(2) == 1,
                rnr_retry_count: self.below(8) as u8,
                srq: self.below(2) == 1,
            }
        }
        fn address(&mut self, v6: bool) -> SocketAddr {
            let port = self.below(1 << 16) as u16;
            if v6 {
                SocketAddrV6::new(self.array::<16>().into(), port, 0, self.next() as u32).into()
            } else {
                SocketAddrV4::new(self.array::<4>().into(), port).into()
            }
        }
        fn message(&mut self) -> Message {
            match self.below(7) {
                0 => {
                    let v6 = self.below(2) == 1;
                    Message::Req(Req {
                        transport: [Transport::Rc, Transport::Xrc][self.below(2) as usize],
                        party: self.party(),
                        retry_count: self.below(8) as u8,
                        source: self.address(v6),
                        destination: self.address(v6),
                        data: self.private(),
                    })
                }
                1 => Message::Rep(Rep {
                    party: self.party(),
                    data: self.private(),
                }),
                2 => Message::Rtu,
                3 => Message::Rej(Rej {
                    reason: self.next() as u16,
                    data: self.private(),
                }),
                4 => Message::Dreq,
                5 => {
                    let v6 = self.below(2) == 1;
                    Message::SidrReq(SidrReq {
                        gid: self.array(),
                        qp_num: self.below(1 << 24) as u32,
                        source: self.address(v6),
                        destination: self.address(v6),
                        data: self.private(),
                    })
                }
                _ => Message::SidrRep(SidrRep {
                    status: [sidr::SUCCESS, sidr::REJECT][self.below(2) as usize],
                    qp_num: self.below(1 << 24) as u32,
                    qkey: self.next() as u32,
                    gid: self.array(),
                    data: self.private(),
                }),
            }
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for _ in 0..20_000 {
            let message = random.message();
            let packet = message.encode();
            assert!(packet.len() <= MAX_MESSAGE);
            assert_eq!(decode(&packet), Ok(message));
        }
    }

    #[test]
    fn whatever_decodes_is_what_encode_makes() {
        let mut random = Random(0x2545_f491_4f6c_dd1d);
        let mut accepted = 0;
        for _ in 0..200_000 {
            let mut packet = random.message().encode();
            for _ in 0..random.below(3) {
                let at = random.below(packet.len() as u64) as usize;
                packet[at] = random.byte();
            }
            if random.below(4) == 0 {
                packet.truncate(random.below(packet.len() as u64 + 1) as usize);
            }
            if random.below(8) == 0 {
                packet.push(random.byte());
            }
            if let Ok(message) = decode(&packet) {
                accepted += 1;
                assert_eq!(message.encode(), packet);
            }
        }
        assert!(
            accepted > 1000,
            "the property was hardly exercised: {accepted}"
        );
    }

    #[test]
    fn rubbish_is_refused() {
        let mut random = Random(77);
        for _ in 0..100_000 {
            let len = random.below(MAX_MESSAGE as u64 + 40) as usize;
            let packet: Vec<u8> = (0..len).map(|_| random.byte()).collect();
            assert_eq!(decode(&packet), Err(Malformed));
        }
        assert_eq!(decode(&[]), Err(Malformed));
    }

    #[test]
    fn the_documented_bytes() {
        let dreq = Message::Dreq.encode();
        assert_eq!(dreq, *b"SVCM\x02\x00\x05\x00\x00\x00\x00\x00");
        let rej = Message::Rej(Rej {
            reason: 28,
            data: Private::new(b"no").unwrap(),
        })
        .encode();
        assert_eq!(rej.len(), 12 + 4 + 148);
        assert_eq!(rej[12..18], [28, 0, 2, 0, b'n', b'o']);
        let rep = Message::SidrRep(SidrRep {
            status: 2,
            qp_num: 0x0001_0203,
            qkey: 0x0405_0607,
            gid: [8; 16],
            data: Private::new(b"yes").unwrap(),
        })
        .encode();
        assert_eq!(rep.len(), 12 + 28 + 136);
        assert_eq!(
            rep[6..24],
            *b"\x07\0\0\0\0\0\x02\x03\0\0\x03\x02\x01\0\x07\x06\x05\x04"
        );
        assert_eq!(
            rep[24..44],
            *b"\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08\x08yes\0"
        );
    }

    /// Status 1, no listener, is not sent: the client finds no socket.
    #[test]
    fn a_service_succeeds_or_refuses() {
        for status in 0..=u8::MAX {
            let packet = Message::SidrRep(SidrRep {
                status,
                qp_num: 0,
                qkey: 0,
                gid: [0; 16],
                data: Private::EMPTY,
            })
            .encode();
            let known = [sidr::SUCCESS, sidr::REJECT].contains(&status);
            assert_eq!(decode(&packet).is_ok(), known, "{status}");
        }
    }

    #[test]
    fn private_data_has_a_limit() {
        assert!(Private::<56>::new(&[1; 56]).is_some());
        assert!(Private::<56>::new(&[1; 57]).is_none());
    }
}
