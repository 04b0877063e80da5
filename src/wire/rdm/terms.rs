//! Terms: what a peer must know before it can send. `docs/protocol-rdm.md`, "Terms".

use super::values::{Credit, GrantNumber, Number, PeerIndex};
use super::{Bad, get16, get32, get64, put, reserved};
use crate::verbs::{RemoteAddr, Rkey};

/// Size in bytes.
pub const TERMS_SIZE: usize = 56;

/// Largest payload of EAGER in bytes.
pub const MAX_EAGER: u32 = 8192;

/// Largest payload of DATA in bytes: what a slot of the receive queue holds. All endpoints state
/// it.
pub const MAX_DATA: u32 = MAX_EAGER;

const APPLICATION_KEYS: u16 = 1;

/// In the word of the atomic mechanisms.
const DEVICE_ATOMICS: u32 = 1;

/// The positions up to which the peer may use credit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Replaces grants with earlier numbers.
    pub number: GrantNumber,
    /// Positions.
    pub limit: Credit,
}

/// Terms of the sender, for packets in the direction towards it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Number of the next packet.
    pub expected: Number,
    /// Positions after the last processed packet.
    pub used: Credit,
    /// The newest grant.
    pub grant: Grant,
    /// Value of `to` in packets to the sender of the terms.
    pub index: PeerIndex,
    /// Whether the application of the sender chooses all its keys.
    pub application_keys: bool,
    /// rkey of the connection block.
    pub block_rkey: Rkey,
    /// Address of the connection block, a multiple of 8.
    pub block_addr: RemoteAddr,
    /// Largest payload of EAGER in bytes, at most [`MAX_EAGER`].
    pub eager: u32,
    /// Whether a peer's device may execute atomics on the sender's regions.
    pub device_atomics: bool,
}

impl Terms {
    /// The encoded bytes.
    pub fn encode(&self) -> [u8; TERMS_SIZE] {
        let mut out = [0; TERMS_SIZE];
        put(&mut out, 0, self.expected.get().to_le_bytes());
        put(&mut out, 4, self.grant.number.get().to_le_bytes());
        put(&mut out, 6, u16::from(self.application_keys).to_le_bytes());
        put(&mut out, 8, self.used.blocks.to_le_bytes());
        put(&mut out, 12, self.used.slots.to_le_bytes());
        put(&mut out, 16, self.grant.limit.blocks.to_le_bytes());
        put(&mut out, 20, self.grant.limit.slots.to_le_bytes());
        put(&mut out, 24, self.index.get().to_le_bytes());
        put(&mut out, 28, self.block_rkey.get().to_le_bytes());
        put(&mut out, 32, self.block_addr.get().to_le_bytes());
        put(&mut out, 40, self.eager.to_le_bytes());
        put(&mut out, 44, MAX_DATA.to_le_bytes());
        put(&mut out, 48, u32::from(self.device_atomics).to_le_bytes());
        out
    }

    /// Decodes the terms at the begin of `from`; bytes that follow are not read.
    ///
    /// # Errors
    /// See [`Bad`]. Positions that are used but not granted, and another largest payload of DATA
    /// than [`MAX_DATA`], are [`Bad::Value`].
    pub fn decode(from: &[u8]) -> Result<Self, Bad> {
        let flags = get16(from, 6)?;
        reserved(flags & !APPLICATION_KEYS)?;
        let mechanisms = get32(from, 48)?;
        reserved(mechanisms & !DEVICE_ATOMICS)?;
        reserved(get32(from, 52)?)?;
        let this = Self {
            expected: Number::new(get32(from, 0)?),
            used: Credit::new(get32(from, 8)?, get32(from, 12)?),
            grant: Grant {
                number: GrantNumber::new(get16(from, 4)?),
                limit: Credit::new(get32(from, 16)?, get32(from, 20)?),
            },
            index: PeerIndex::new(get32(from, 24)?),
            application_keys: flags & APPLICATION_KEYS != 0,
            block_rkey: Rkey::new(get32(from, 28)?),
            block_addr: RemoteAddr::new(get64(from, 32)?),
            eager: get32(from, 40)?,
            device_atomics: mechanisms & DEVICE_ATOMICS != 0,
        };
        let fits = this.used.until(this.grant.limit).is_some()
            && this.block_addr.is_multiple_of(8)
            && this.eager <= MAX_EAGER
            && get32(from, 44)? == MAX_DATA;
        if fits { Ok(this) } else { Err(Bad::Value) }
    }
}
