//! Private data of the handshakes of endpoints on XRC: of a circuit, and of a link.
//! `docs/protocol-xrc.md`, "Circuits" and "Links".

use std::num::NonZeroU32;

use super::cm::{REJECTION_END, REPLY_END, REQUEST_END, VERSION, opened, seal, sealed};
use super::terms::{TERMS_SIZE, Terms};
use super::values::{EndpointId, nonzero};
use super::{Bad, Rejection, Reply, Request, get16, get32, get64, put, reserved};
use crate::verbs::{QpNumber, RemoteAddr, Rkey, SrqNumber};
use crate::wire::cm_data::PRIVATE_DATA_SIZE;

/// Size of a circuit request in bytes.
pub const CIRCUIT_REQUEST_SIZE: usize = 48;
/// Size of a circuit reply in bytes.
pub const CIRCUIT_REPLY_SIZE: usize = 32;
/// Size of a link request in bytes.
pub const LINK_REQUEST_SIZE: usize = 112;
/// Size of a link reply in bytes.
pub const LINK_REPLY_SIZE: usize = 120;
/// Size of a link rejection in bytes.
pub const LINK_REJECTION_SIZE: usize = 40;

const CIRCUIT_REQUEST: u8 = 0x91;
const CIRCUIT_REPLY: u8 = 0x92;
const LINK_REQUEST: u8 = 0x84;
const LINK_REPLY: u8 = 0x85;
const LINK_REJECTION: u8 = 0x86;

/// Offset of the terms in a link reply.
const TERMS: usize = 40;

/// What SIDR messages over an IP address leave: a request, and its answer.
const SERVICE_REQUEST: usize = 180;
const SERVICE_ANSWER: usize = 136;

const _: () = assert!(CIRCUIT_REQUEST_SIZE <= PRIVATE_DATA_SIZE);
const _: () = assert!(LINK_REQUEST_SIZE <= SERVICE_REQUEST);
const _: () = assert!(LINK_REPLY_SIZE <= SERVICE_ANSWER);
const _: () = assert!(REQUEST_END == 56 && REPLY_END == 32 && REJECTION_END == 22);
const _: () = assert!(TERMS + TERMS_SIZE == 96);

/// The number of a circuit at the endpoint of its initiator; counts up, and wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct CircuitNumber(NonZeroU32);

nonzero!(CircuitNumber, NonZeroU32, u32);

impl CircuitNumber {
    /// The first circuit of an endpoint.
    pub const FIRST: Self = Self(NonZeroU32::MIN);

    /// Whether a circuit with this number was dialled before another one.
    pub const fn is_before(self, other: Self) -> bool {
        (other.get().wrapping_sub(self.get()) as i32) > 0
    }

    /// The number of the next circuit; 1 follows 2^32 - 1.
    #[must_use]
    pub const fn next(self) -> Self {
        match NonZeroU32::new(self.0.get().wrapping_add(1)) {
            Some(number) => Self(number),
            None => Self::FIRST,
        }
    }
}

/// The id of a node: a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct NodeId(u64);

impl NodeId {
    /// With this value.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What each packet on a link carries as immediate data; chosen by the receiver of the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct LinkTag(NonZeroU32);

nonzero!(LinkTag, NonZeroU32, u32);

/// Where an endpoint receives the packets of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inbox {
    /// Its shared receive queue.
    pub srq: SrqNumber,
    /// The tag of the link.
    pub tag: LinkTag,
}

/// The presence word of an endpoint; address NULL and rkey 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// A multiple of 8.
    pub addr: RemoteAddr,
    /// Permits remote read.
    pub rkey: Rkey,
}

impl Presence {
    fn of(addr: u64, rkey: u32) -> Result<Self, Bad> {
        let this = Self {
            addr: RemoteAddr::new(addr),
            rkey: Rkey::new(rkey),
        };
        let none = this.addr == RemoteAddr::NULL && rkey != 0;
        if none || !this.addr.is_multiple_of(8) {
            return Err(Bad::Value);
        }
        Ok(this)
    }
}

fn qp_number(from: &[u8], at: usize) -> Result<QpNumber, Bad> {
    QpNumber::new(get32(from, at)?).ok_or(Bad::Value)
}

/// A number, or 0.
fn put_circuit(out: &mut [u8], at: usize, number: Option<CircuitNumber>) {
    let number = number.map_or(0, CircuitNumber::get);
    put(out, at, number.to_le_bytes());
}

/// A request for a circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CircuitRequest {
    /// The number of the circuit.
    pub number: CircuitNumber,
    /// The endpoint of the initiator.
    pub id: EndpointId,
    /// Tag of its authorization key; 0: none.
    pub auth: u64,
    /// The node of its process.
    pub node: NodeId,
    /// The initiator.
    pub initiator: QpNumber,
}

impl CircuitRequest {
    /// The private data.
    pub fn encode(&self) -> [u8; CIRCUIT_REQUEST_SIZE] {
        let mut out = [0; CIRCUIT_REQUEST_SIZE];
        put_circuit(&mut out, 4, Some(self.number));
        put(&mut out, 8, self.id.get().to_le_bytes());
        put(&mut out, 16, self.auth.to_le_bytes());
        put(&mut out, 24, self.node.get().to_le_bytes());
        put(&mut out, 32, self.initiator.get().to_le_bytes());
        seal(&mut out, CIRCUIT_REQUEST, VERSION);
        out
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = opened::<CIRCUIT_REQUEST_SIZE>(private_data, CIRCUIT_REQUEST)?;
        reserved(get32(&from, 36)?)?;
        reserved(get64(&from, 40)?)?;
        Ok(Self {
            number: CircuitNumber::new(get32(&from, 4)?).ok_or(Bad::Value)?,
            id: EndpointId::new(get64(&from, 8)?).ok_or(Bad::Value)?,
            auth: get64(&from, 16)?,
            node: NodeId::new(get64(&from, 24)?),
            initiator: qp_number(&from, 32)?,
        })
    }
}

/// The reply to a request for a circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CircuitReply {
    /// The number of the circuit.
    pub number: CircuitNumber,
    /// The node of the acceptor.
    pub node: NodeId,
    /// Tag of the acceptor's authorization key; 0: none.
    pub auth: u64,
    /// The target.
    pub target: QpNumber,
}

impl CircuitReply {
    /// The private data.
    pub fn encode(&self) -> [u8; CIRCUIT_REPLY_SIZE] {
        let mut out = [0; CIRCUIT_REPLY_SIZE];
        put_circuit(&mut out, 4, Some(self.number));
        put(&mut out, 8, self.node.get().to_le_bytes());
        put(&mut out, 16, self.auth.to_le_bytes());
        put(&mut out, 24, self.target.get().to_le_bytes());
        seal(&mut out, CIRCUIT_REPLY, VERSION);
        out
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = opened::<CIRCUIT_REPLY_SIZE>(private_data, CIRCUIT_REPLY)?;
        reserved(get32(&from, 28)?)?;
        Ok(Self {
            number: CircuitNumber::new(get32(&from, 4)?).ok_or(Bad::Value)?,
            node: NodeId::new(get64(&from, 8)?),
            auth: get64(&from, 16)?,
            target: qp_number(&from, 24)?,
        })
    }
}

/// The circuit on which the sender of a link request will post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnCircuit {
    /// The node that its reply has stated.
    pub node: NodeId,
    /// Its number.
    pub number: CircuitNumber,
    /// Its initiator.
    pub initiator: QpNumber,
    /// Its target.
    pub target: QpNumber,
}

/// A request for a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRequest {
    /// What a request of an endpoint on RC has.
    pub request: Request,
    /// The node of the dialler.
    pub node: NodeId,
    /// The dialler's circuit; `None`: the request asks for the acceptor's node.
    pub circuit: Option<OnCircuit>,
    /// The dialler has ended its circuits to the acceptor's node before this one.
    pub ended: Option<CircuitNumber>,
    /// Where the dialler receives.
    pub inbox: Inbox,
    /// The dialler's presence word.
    pub presence: Presence,
    /// The newest circuit of the acceptor whose target has failed at the dialler.
    pub failed: Option<CircuitNumber>,
}

impl LinkRequest {
    /// The private data.
    pub fn encode(&self) -> [u8; LINK_REQUEST_SIZE] {
        let mut out = [0; LINK_REQUEST_SIZE];
        self.request.put(&mut out);
        put(&mut out, 56, self.node.get().to_le_bytes());
        if let Some(circuit) = &self.circuit {
            put(&mut out, 64, circuit.node.get().to_le_bytes());
            put_circuit(&mut out, 72, Some(circuit.number));
            put(&mut out, 76, circuit.initiator.get().to_le_bytes());
            put(&mut out, 80, circuit.target.get().to_le_bytes());
        }
        put_circuit(&mut out, 84, self.ended);
        put(&mut out, 88, self.inbox.srq.get().to_le_bytes());
        put(&mut out, 92, self.inbox.tag.get().to_le_bytes());
        put(&mut out, 96, self.presence.addr.get().to_le_bytes());
        put(&mut out, 104, self.presence.rkey.get().to_le_bytes());
        put_circuit(&mut out, 108, self.failed);
        seal(&mut out, LINK_REQUEST, VERSION);
        out
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = opened::<LINK_REQUEST_SIZE>(private_data, LINK_REQUEST)?;
        let node = get64(&from, 64)?;
        let (initiator, target) = (qp_number(&from, 76)?, qp_number(&from, 80)?);
        let circuit = match CircuitNumber::new(get32(&from, 72)?) {
            Some(number) => Some(OnCircuit {
                node: NodeId::new(node),
                number,
                initiator,
                target,
            }),
            None => {
                reserved(node)?;
                reserved(initiator.get() | target.get())?;
                None
            }
        };
        Ok(Self {
            request: Request::get(&from)?,
            node: NodeId::new(get64(&from, 56)?),
            circuit,
            ended: CircuitNumber::new(get32(&from, 84)?),
            inbox: Inbox {
                srq: SrqNumber::new(get32(&from, 88)?).ok_or(Bad::Value)?,
                tag: LinkTag::new(get32(&from, 92)?).ok_or(Bad::Value)?,
            },
            presence: Presence::of(get64(&from, 96)?, get32(&from, 104)?)?,
            failed: CircuitNumber::new(get32(&from, 108)?),
        })
    }
}

/// The reply to a request for a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkReply {
    /// What a reply of an endpoint on RC has.
    pub reply: Reply,
    /// The acceptor's presence word.
    pub presence: Presence,
    /// The node of the acceptor.
    pub node: NodeId,
    /// Where the acceptor receives.
    pub inbox: Inbox,
    /// The acceptor has ended its circuits to the dialler's node before this one.
    pub ended: Option<CircuitNumber>,
}

impl LinkReply {
    /// The private data.
    pub fn encode(&self) -> [u8; LINK_REPLY_SIZE] {
        let mut out = [0; LINK_REPLY_SIZE];
        self.reply.put(&mut out);
        put(&mut out, 32, self.presence.addr.get().to_le_bytes());
        put(&mut out, TERMS, self.reply.terms.encode());
        put(&mut out, 96, self.node.get().to_le_bytes());
        put(&mut out, 104, self.inbox.srq.get().to_le_bytes());
        put(&mut out, 108, self.inbox.tag.get().to_le_bytes());
        put(&mut out, 112, self.presence.rkey.get().to_le_bytes());
        put_circuit(&mut out, 116, self.ended);
        seal(&mut out, LINK_REPLY, VERSION);
        out
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = opened::<LINK_REPLY_SIZE>(private_data, LINK_REPLY)?;
        Ok(Self {
            reply: Reply::get(&from, Terms::decode(&from[TERMS..])?)?,
            presence: Presence::of(get64(&from, 32)?, get32(&from, 112)?)?,
            node: NodeId::new(get64(&from, 96)?),
            inbox: Inbox {
                srq: SrqNumber::new(get32(&from, 104)?).ok_or(Bad::Value)?,
                tag: LinkTag::new(get32(&from, 108)?).ok_or(Bad::Value)?,
            },
            ended: CircuitNumber::new(get32(&from, 116)?),
        })
    }
}

/// The rejection of a request for a link. Its format is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkRejection {
    /// What a rejection of an endpoint on RC has.
    pub rejection: Rejection,
    /// The node of the acceptor.
    pub node: NodeId,
}

impl LinkRejection {
    /// The private data.
    pub fn encode(&self) -> [u8; LINK_REJECTION_SIZE] {
        let mut out = [0; LINK_REJECTION_SIZE];
        self.rejection.put(&mut out);
        put(&mut out, 24, self.node.get().to_le_bytes());
        seal(&mut out, LINK_REJECTION, self.rejection.version);
        out
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`]; never [`Bad::Version`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = sealed::<LINK_REJECTION_SIZE>(private_data, LINK_REJECTION)?;
        reserved(get16(&from, REJECTION_END)?)?;
        reserved(get64(&from, 32)?)?;
        Ok(Self {
            rejection: Rejection::get(&from)?,
            node: NodeId::new(get64(&from, 24)?),
        })
    }
}
