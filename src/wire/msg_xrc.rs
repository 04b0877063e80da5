//! Private data of connected endpoints on XRC: 16 bytes in network byte order, as version 2 of the
//! XRC handshake of libfabric's `verbs` provider has them (`prov/verbs/src/verbs_ofi.h`,
//! `vrb_xrc_cm_data`), then the [data of the application](super::cm_data) and `weft`'s own.
//! `docs/protocol-xrc.md`, "MSG endpoints".

use super::cm_data::CmData;
use super::records::checksum;

/// Size in bytes of the header.
pub const HEADER_SIZE: usize = 16;

/// Size in bytes of a notice of the end.
pub const END_SIZE: usize = 16;

/// The version of the header.
pub const VERSION: u8 = 2;
/// The mark of a `weft` endpoint in a request.
const MARK: [u8; 4] = *b"wefx";
/// The first byte of a notice of the end.
const END: u8 = 0x87;
const END_VERSION: u8 = 1;
/// The mark of a rejection because the two endpoints have different transports.
const TRANSPORT: [u8; 4] = *b"weft";
/// Behind that mark: the transport of the endpoint that has rejected.
const OF_RC: u8 = 1;
const OF_XRC: u8 = 2;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request of `fi_connect(3)`, and its answer.
    Original,
    /// The request by which the accepting side connects the other direction, and its answer.
    Reciprocal,
    /// An answer between `weft` endpoints: the application has rejected the request, which named a
    /// target.
    Rejected,
    /// An answer between `weft` endpoints: the target of the request is not in the XRC domain of
    /// the process that answers.
    OtherDomain,
}

/// The header of a request or an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind.
    pub kind: Kind,
    /// In requests: the port at which the sender takes reciprocal requests and notices of the end.
    /// In answers of `weft` to an original request of `weft`: the port at which the answering side
    /// takes notices. Otherwise 0.
    pub port: u16,
    /// In requests: the number of the target, if the sender's circuit exists; 0: the request makes
    /// it. In answers of `weft` to an original request: the number by which the answering side
    /// finds its endpoint. Otherwise 0.
    pub target: u32,
    /// The number of the sender's shared receive queue.
    pub srq: u32,
    /// The number by which the connecting side finds its endpoint.
    pub tag: u32,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The tag of the authorization key; `None`: no key, or the peer is no `weft` endpoint.
    pub auth: Option<u64>,
    /// The number of the initiator, in requests that name a target.
    pub initiator: Option<u32>,
}

impl Header {
    /// The encoded header.
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0] = VERSION;
        bytes[1] = match self.kind {
            Kind::Original => 0,
            Kind::Reciprocal => 1,
            Kind::Rejected => 2,
            Kind::OtherDomain => 3,
        };
        bytes[2..4].copy_from_slice(&self.port.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.target.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.srq.to_be_bytes());
        bytes[12..].copy_from_slice(&self.tag.to_be_bytes());
        bytes
    }

    /// Decodes the header of private data. `None`: too short, or of another version or kind.
    pub fn decode(private_data: &[u8]) -> Option<Self> {
        let bytes = private_data.first_chunk::<HEADER_SIZE>()?;
        if bytes[0] != VERSION {
            return None;
        }
        let kind = match bytes[1] {
            0 => Kind::Original,
            1 => Kind::Reciprocal,
            2 => Kind::Rejected,
            3 => Kind::OtherDomain,
            _ => return None,
        };
        let word = |at: usize| {
            let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
            word.map_or(0, |word| u32::from_be_bytes(*word))
        };
        Some(Self {
            kind,
            port: u16::from_be_bytes([bytes[2], bytes[3]]),
            target: word(4),
            srq: word(8),
            tag: word(12),
        })
    }
}

/// The bytes behind the header: the data of the application, and what follows it.
pub fn data_of(private_data: &[u8]) -> &[u8] {
    private_data.get(HEADER_SIZE..).unwrap_or_default()
}

/// The private data of a request. A connection request has no room for the number of the initiator.
pub fn request(header: &Header, data: &CmData, mark: &Mark) -> Vec<u8> {
    let mut bytes = answer(header, data);
    bytes.extend_from_slice(&MARK);
    if mark.auth.is_some() || mark.initiator.is_some() {
        bytes.extend_from_slice(&mark.auth.unwrap_or(0).to_be_bytes());
    }
    if let Some(initiator) = mark.initiator {
        bytes.extend_from_slice(&initiator.to_be_bytes());
    }
    bytes
}

/// The private data of an answer.
pub fn answer(header: &Header, data: &CmData) -> Vec<u8> {
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(data.encoded());
    bytes
}

/// The mark of a request of a `weft` endpoint on XRC.
pub fn mark(private_data: &[u8]) -> Option<Mark> {
    Header::decode(private_data)?;
    let data = data_of(private_data);
    let length = usize::from(*data.first()?);
    let rest = data.get(1 + length..)?.strip_prefix(&MARK)?;
    // the transport pads with zeros: a key whose tag is 0 counts as none, as such a number
    let auth = rest.first_chunk().map(|tag| u64::from_be_bytes(*tag));
    let initiator = rest.get(8..).and_then(<[u8]>::first_chunk);
    let initiator = initiator.map(|number| u32::from_be_bytes(*number));
    Some(Mark {
        auth: auth.filter(|tag| *tag != 0),
        initiator: initiator.filter(|number| *number != 0),
    })
}

/// The notice that a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The number by which the receiver finds its endpoint.
    pub to: u32,
    /// The number by which the sender finds its endpoint.
    pub from: u32,
}

impl End {
    fn check(bytes: &[u8; END_SIZE]) -> [u8; 2] {
        let mut words = [0; 2];
        let others = bytes[..2].iter().chain(&bytes[4..]);
        for (index, byte) in others.enumerate() {
            words[index / 8] |= u64::from(*byte) << (index % 8 * 8);
        }
        (checksum(&words) as u16).to_le_bytes()
    }

    /// The encoded notice.
    pub fn encode(&self) -> [u8; END_SIZE] {
        let mut bytes = [0; END_SIZE];
        bytes[0] = END;
        bytes[1] = END_VERSION;
        bytes[4..8].copy_from_slice(&self.to.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.from.to_be_bytes());
        let check = Self::check(&bytes);
        bytes[2..4].copy_from_slice(&check);
        bytes
    }

    /// Decodes private data. `None`: it is no notice of this version.
    pub fn decode(private_data: &[u8]) -> Option<Self> {
        let bytes = private_data.first_chunk::<END_SIZE>()?;
        let tail: &[u8; 4] = bytes.last_chunk()?;
        if bytes[..2] != [END, END_VERSION] || bytes[2..4] != Self::check(bytes) || *tail != [0; 4]
        {
            return None;
        }
        let word = |at: usize| {
            let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
            word.map_or(0, |word| u32::from_be_bytes(*word))
        };
        Some(Self {
            to: word(4),
            from: word(8),
        })
    }
}

/// The private data of a rejection by an endpoint of the other transport than the peer's: no data
/// of the application, and the mark. `xrc`: the endpoint that rejects is on XRC.
pub fn other_transport(xrc: bool) -> &'static [u8] {
    const fn bytes(of: u8) -> [u8; 6] {
        let [a, b, c, d] = TRANSPORT;
        [0, a, b, c, d, of]
    }
    static RC: [u8; 6] = bytes(OF_RC);
    static XRC: [u8; 6] = bytes(OF_XRC);
    if xrc { &XRC } else { &RC }
}

/// Whether a rejection has this reason. `xrc`: the receiver of the rejection is on XRC.
pub fn is_other_transport(private_data: &[u8], xrc: bool) -> bool {
    private_data.starts_with(other_transport(!xrc))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::cm_data::{CM_DATA_SIZE, KEYED_CM_DATA_SIZE, PRIVATE_DATA_SIZE};

    /// What SIDR leaves over an IP address.
    const SERVICE_DATA_SIZE: usize = 180;
    const HEADER: Header = Header {
        kind: Kind::Original,
        port: 0x1234,
        target: 0x00ab_cdef,
        srq: 0x0012_3456,
        tag: 0xfeed_f00d,
    };

    #[test]
    fn a_header_is_that_of_libfabric() {
        let bytes = [
            2, 0, 0x12, 0x34, 0, 0xab, 0xcd, 0xef, 0, 0x12, 0x34, 0x56, 0xfe, 0xed, 0xf0, 0x0d,
        ];
        assert_eq!(HEADER.encode(), bytes);
        for (code, kind) in [
            (0, Kind::Original),
            (1, Kind::Reciprocal),
            (2, Kind::Rejected),
            (3, Kind::OtherDomain),
        ] {
            let header = Header { kind, ..HEADER };
            assert_eq!(header.encode()[1], code);
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
        let changed = |at: usize, to: u8| {
            let mut bytes = bytes;
            bytes[at] = to;
            Header::decode(&bytes)
        };
        assert_eq!(changed(0, 1), None);
        assert_eq!(changed(0, 3), None);
        assert_eq!(changed(1, 4), None);
        assert_eq!(Header::decode(&bytes[..15]), None);
    }

    #[test]
    fn a_request_of_each_length_fits_and_survives_padding() {
        let plain = (0..=CM_DATA_SIZE).map(|length| (length, None));
        let keyed = (0..=KEYED_CM_DATA_SIZE).map(|length| (length, Some(0x1122_3344_5566_7788)));
        for (length, auth) in plain.chain(keyed) {
            let data = vec![0x5a; length];
            for initiator in [None, Some(0x00ab_cdef)] {
                let sent = Mark { auth, initiator };
                let mut bytes = request(&HEADER, &CmData::new(&data).unwrap(), &sent);
                let most = match initiator {
                    None => PRIVATE_DATA_SIZE,
                    Some(_) => SERVICE_DATA_SIZE,
                };
                assert!(bytes.len() <= most);
                bytes.resize(most + 8, 0);
                assert_eq!(Header::decode(&bytes), Some(HEADER));
                assert_eq!(CmData::decode(data_of(&bytes)).data(), data);
                assert_eq!(mark(&bytes), Some(sent));
            }
        }
        let foreign = answer(&HEADER, &CmData::new(b"abc").unwrap());
        assert_eq!(mark(&foreign), None);
        assert_eq!(mark(&[]), None);
        assert_eq!(mark(&[255; 56]), None);
    }

    #[test]
    fn a_changed_notice_is_none() {
        let end = End {
            to: 0x0102_0304,
            from: u32::MAX,
        };
        let bytes = end.encode();
        assert_eq!(End::decode(&bytes), Some(end));
        for at in 0..bytes.len() {
            let mut changed = bytes;
            changed[at] ^= 0x40;
            assert_eq!(End::decode(&changed), None, "byte {at}");
            assert_eq!(End::decode(&bytes[..at]), None);
        }
        assert_eq!(Header::decode(&bytes), None);
    }

    #[test]
    fn each_transport_recognizes_the_rejection_of_the_other_one() {
        for xrc in [false, true] {
            let mut bytes = other_transport(xrc).to_vec();
            bytes.resize(148, 0);
            assert!(is_other_transport(&bytes, !xrc));
            assert!(!is_other_transport(&bytes, xrc));
            assert_eq!(CmData::decode(&bytes).data(), b"");
        }
        assert!(!is_other_transport(&[0], true) && !is_other_transport(&[], false));
    }
}
