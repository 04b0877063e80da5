//! Private data of the three messages of a handshake. `docs/protocol-rdm.md`, "Connecting".

use super::terms::{TERMS_SIZE, Terms};
use super::values::{EndpointId, Epoch, Listener, Secret};
use super::{Bad, bytes, get16, get32, get64, put, reserved};
use crate::wire::cm_data::PRIVATE_DATA_SIZE;
use crate::wire::records::{CHECKSUM_START, checksum_on};

/// Size of a request in bytes.
pub const REQUEST_SIZE: usize = 56;
/// Size of a reply in bytes.
pub const REPLY_SIZE: usize = TERMS + TERMS_SIZE;
/// Size of a rejection in bytes.
pub const REJECTION_SIZE: usize = 32;

/// Where the content of the three messages ends that those of links on XRC have too (`xrc.rs`).
/// That of a reply ends before its terms.
pub(super) const REQUEST_END: usize = 56;
pub(super) const REPLY_END: usize = 32;
pub(super) const REJECTION_END: usize = 22;

/// The version of this page.
pub const VERSION: u8 = 1;

const REQUEST: u8 = 0x81;
const REPLY: u8 = 0x82;
const REJECTION: u8 = 0x83;

/// Flag of a request.
const FRESH: u16 = 1;

/// Offset of the terms in a reply.
const TERMS: usize = 40;

const _: () = assert!(REQUEST_SIZE <= PRIVATE_DATA_SIZE);

/// The check of a message: a checksum of all bytes except the two of the check.
fn check(message: &[u8]) -> u16 {
    let (head, rest) = message.split_at(2.min(message.len()));
    let mut others = head.iter().chain(rest.iter().skip(2)).peekable();
    let mut sum = CHECKSUM_START;
    while others.peek().is_some() {
        let word = std::array::from_fn(|_| others.next().copied().unwrap_or_default());
        sum = checksum_on(sum, &[u64::from_le_bytes(word)]);
    }
    sum as u16
}

/// Writes type, version and check of a message.
pub(super) fn seal(message: &mut [u8], kind: u8, version: u8) {
    put(message, 0, [kind, version, 0, 0]);
    let check = check(message);
    put(message, 2, check.to_le_bytes());
}

/// The first `N` bytes of private data, if they are a message of this type and version.
pub(super) fn opened<const N: usize>(private_data: &[u8], kind: u8) -> Result<[u8; N], Bad> {
    let message = sealed::<N>(private_data, kind)?;
    match message[1] {
        VERSION => Ok(message),
        other => Err(Bad::Version(other)),
    }
}

/// As [`opened`], of any version.
pub(super) fn sealed<const N: usize>(private_data: &[u8], kind: u8) -> Result<[u8; N], Bad> {
    let message: [u8; N] = bytes(private_data, 0)?;
    if message[0] != kind || get16(&message, 2)? != check(&message) {
        return Err(Bad::Value);
    }
    Ok(message)
}

/// A connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Where the dialler listens.
    pub listener: Listener,
    /// The dialler's endpoint id.
    pub id: EndpointId,
    /// Tag of the dialler's authorization key; 0: none.
    pub auth: u64,
    /// The epoch of this dial.
    pub epoch: Epoch,
    /// The dialler has ended all links of the acceptor with an epoch before this one.
    pub ended: Option<Epoch>,
    /// The token that the dialler gives to the acceptor.
    pub gives: Secret,
    /// The token that the acceptor has given to the dialler; `None`: the first contact.
    pub shows: Option<Secret>,
    /// The dialler has ended the session of this token.
    pub fresh: bool,
}

impl Request {
    /// The private data.
    pub fn encode(&self) -> [u8; REQUEST_SIZE] {
        let mut out = [0; REQUEST_SIZE];
        self.put(&mut out);
        seal(&mut out, REQUEST, VERSION);
        out
    }

    /// Writes the content, bytes 4 to [`REQUEST_END`].
    pub(super) fn put(&self, out: &mut [u8]) {
        put(out, 4, u16::from(self.fresh).to_le_bytes());
        put(out, 6, self.listener.port().to_le_bytes());
        put(out, 8, self.listener.octets());
        put(out, 24, self.id.get().to_le_bytes());
        put(out, 32, self.auth.to_le_bytes());
        put(out, 40, self.epoch.get().to_le_bytes());
        put(out, 44, self.ended.map_or(0, Epoch::get).to_le_bytes());
        put(out, 48, self.gives.get().to_le_bytes());
        put(out, 52, self.shows.map_or(0, Secret::get).to_le_bytes());
        seal(out, REQUEST, VERSION);
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        Self::get(&opened::<REQUEST_SIZE>(private_data, REQUEST)?)
    }

    /// Reads the content, bytes 4 to [`REQUEST_END`].
    pub(super) fn get(from: &[u8]) -> Result<Self, Bad> {
        let flags = get16(from, 4)?;
        reserved(flags & !FRESH)?;
        let shows = Secret::new(get32(from, 52)?);
        let fresh = flags & FRESH != 0;
        if fresh && shows.is_none() {
            return Err(Bad::Value);
        }
        Ok(Self {
            listener: Listener::of(bytes(from, 8)?, get16(from, 6)?).ok_or(Bad::Value)?,
            id: EndpointId::new(get64(from, 24)?).ok_or(Bad::Value)?,
            auth: get64(from, 32)?,
            epoch: Epoch::new(get32(from, 40)?).ok_or(Bad::Value)?,
            ended: Epoch::new(get32(from, 44)?),
            gives: Secret::new(get32(from, 48)?).ok_or(Bad::Value)?,
            shows,
            fresh,
        })
    }
}

/// The reply of an acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The epoch of the request.
    pub epoch: Epoch,
    /// The acceptor's endpoint id.
    pub id: EndpointId,
    /// Tag of the acceptor's authorization key; 0: none.
    pub auth: u64,
    /// The token that the acceptor gives to the dialler.
    pub gives: Secret,
    /// The acceptor has ended all links of its own with an epoch before this one.
    pub ended: Option<Epoch>,
    /// The terms of the acceptor.
    pub terms: Terms,
}

impl Reply {
    /// The private data.
    pub fn encode(&self) -> [u8; REPLY_SIZE] {
        let mut out = [0; REPLY_SIZE];
        self.put(&mut out);
        put(&mut out, TERMS, self.terms.encode());
        seal(&mut out, REPLY, VERSION);
        out
    }

    /// Writes the content but for the terms, bytes 4 to [`REPLY_END`].
    pub(super) fn put(&self, out: &mut [u8]) {
        put(out, 4, self.epoch.get().to_le_bytes());
        put(out, 8, self.id.get().to_le_bytes());
        put(out, 16, self.auth.to_le_bytes());
        put(out, 24, self.gives.get().to_le_bytes());
        put(out, 28, self.ended.map_or(0, Epoch::get).to_le_bytes());
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = opened::<REPLY_SIZE>(private_data, REPLY)?;
        reserved(get64(&from, 32)?)?;
        Self::get(&from, Terms::decode(&from[TERMS..])?)
    }

    /// Reads the content but for the terms, bytes 4 to [`REPLY_END`].
    pub(super) fn get(from: &[u8], terms: Terms) -> Result<Self, Bad> {
        Ok(Self {
            epoch: Epoch::new(get32(from, 4)?).ok_or(Bad::Value)?,
            id: EndpointId::new(get64(from, 8)?).ok_or(Bad::Value)?,
            auth: get64(from, 16)?,
            gives: Secret::new(get32(from, 24)?).ok_or(Bad::Value)?,
            ended: Epoch::new(get32(from, 28)?),
            terms,
        })
    }
}

/// Why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Reason {
    /// Not a request of this protocol.
    Foreign = 1,
    /// A request of an unknown version.
    Version = 2,
    /// Another authorization key.
    Auth = 3,
    /// A token that this acceptor has not given to the dialler: another endpoint was meant.
    Other = 4,
    /// No token, but there is a session with the dialler, or the dialler is the acceptor.
    Known = 5,
    /// The acceptor has a newer epoch of the dialler.
    Stale = 6,
    /// No queue pair or memory left.
    Busy = 7,
    /// One of the endpoints is on RC, the other one on XRC.
    Transport = 8,
    /// The target is not in the acceptor's XRC domain. Only a rejection of a link on XRC has it
    /// (`docs/protocol-xrc.md`, "Link rejection").
    Node = 9,
}

impl Reason {
    /// Whether each further request of the same endpoint to the same address has this answer.
    pub fn is_lasting(self) -> bool {
        match self {
            Self::Foreign | Self::Version | Self::Auth | Self::Known | Self::Transport => true,
            Self::Other | Self::Stale | Self::Busy | Self::Node => false,
        }
    }

    const ALL: [Self; 9] = [
        Self::Foreign,
        Self::Version,
        Self::Auth,
        Self::Other,
        Self::Known,
        Self::Stale,
        Self::Busy,
        Self::Transport,
        Self::Node,
    ];
}

/// A rejection. Its format is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The newest version of the acceptor.
    pub version: u8,
    /// The epoch of the request; `None`: the request could not be decoded.
    pub epoch: Option<Epoch>,
    /// The acceptor's endpoint id.
    pub id: EndpointId,
    /// The newest epoch of the dialler that the acceptor has.
    pub newest: Option<Epoch>,
    /// The reason.
    pub reason: Reason,
}

impl Rejection {
    /// The private data.
    pub fn encode(&self) -> [u8; REJECTION_SIZE] {
        let mut out = [0; REJECTION_SIZE];
        self.put(&mut out);
        seal(&mut out, REJECTION, self.version);
        out
    }

    /// Writes the content, bytes 4 to [`REJECTION_END`].
    pub(super) fn put(&self, out: &mut [u8]) {
        put(out, 4, self.epoch.map_or(0, Epoch::get).to_le_bytes());
        put(out, 8, self.id.get().to_le_bytes());
        put(out, 16, self.newest.map_or(0, Epoch::get).to_le_bytes());
        put(out, 20, (self.reason as u16).to_le_bytes());
    }

    /// Decodes private data, padded or not.
    ///
    /// # Errors
    /// See [`Bad`]; never [`Bad::Version`].
    pub fn decode(private_data: &[u8]) -> Result<Self, Bad> {
        let from = sealed::<REJECTION_SIZE>(private_data, REJECTION)?;
        reserved(get16(&from, 22)?)?;
        reserved(get64(&from, 24)?)?;
        let this = Self::get(&from)?;
        match this.reason {
            Reason::Node => Err(Bad::Value),
            _ => Ok(this),
        }
    }

    /// Reads version and content, bytes 1 and 4 to [`REJECTION_END`].
    pub(super) fn get<const N: usize>(from: &[u8; N]) -> Result<Self, Bad> {
        let reason = get16(from, 20)?;
        let mut reasons = Reason::ALL.into_iter();
        Ok(Self {
            version: bytes::<1>(from, 1)?[0],
            epoch: Epoch::new(get32(from, 4)?),
            id: EndpointId::new(get64(from, 8)?).ok_or(Bad::Value)?,
            newest: Epoch::new(get32(from, 16)?),
            reason: reasons
                .find(|known| *known as u16 == reason)
                .ok_or(Bad::Value)?,
        })
    }
}
