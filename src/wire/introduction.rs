//! The introduction: `weft`'s own connection data, which follows the application's data.
//! `docs/protocol.md`, "The introduction".

use super::records::checksum;
use crate::verbs::{RemoteAddr, Rkey};

/// Size in bytes of an introduction without an authorization key.
pub const INTRODUCTION_SIZE: usize = 20;

/// Size in bytes of an introduction with an authorization key.
pub const KEYED_SIZE: usize = INTRODUCTION_SIZE + 8;

const MAGIC: [u8; 4] = *b"weft";
const VERSION: u8 = 1;
const APPLICATION_KEYS: u8 = 1;
const AUTH_KEY: u8 = 2;

/// The data that a peer needs before it can use keys of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// Whether the application chooses all keys of this side.
    pub application_keys: bool,
    /// Address of this side's connection block.
    pub block_addr: RemoteAddr,
    /// rkey of that block.
    pub block_rkey: Rkey,
    /// The tag of the authorization key of this side's endpoint.
    pub auth: Option<u64>,
}

/// The checksum of all bytes except the two of the checksum.
fn check(bytes: &[u8]) -> [u8; 2] {
    let mut words = [0_u64; 4];
    let others = bytes[..6].iter().chain(&bytes[8..]);
    for (index, byte) in others.enumerate() {
        words[index / 8] |= u64::from(*byte) << (index % 8 * 8);
    }
    let count = (bytes.len() - 2).div_ceil(8);
    (checksum(&words[..count]) as u16).to_le_bytes()
}

impl Introduction {
    /// Encoded size in bytes.
    pub fn size(&self) -> usize {
        if self.auth.is_some() {
            KEYED_SIZE
        } else {
            INTRODUCTION_SIZE
        }
    }

    /// The encoded bytes: [`Self::size`] bytes, then zeros.
    pub fn encode(&self) -> [u8; KEYED_SIZE] {
        let mut bytes = [0; KEYED_SIZE];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        if self.application_keys {
            bytes[5] |= APPLICATION_KEYS;
        }
        bytes[8..16].copy_from_slice(&self.block_addr.get().to_le_bytes());
        bytes[16..20].copy_from_slice(&self.block_rkey.get().to_le_bytes());
        if let Some(tag) = self.auth {
            bytes[5] |= AUTH_KEY;
            bytes[20..].copy_from_slice(&tag.to_le_bytes());
        }
        let check = check(&bytes[..self.size()]);
        bytes[6..8].copy_from_slice(&check);
        bytes
    }

    /// Decodes an introduction. `None`: the bytes are no introduction, or one of an unknown
    /// version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let keyed = bytes.get(5)? & AUTH_KEY != 0;
        let bytes = bytes.get(..if keyed { KEYED_SIZE } else { INTRODUCTION_SIZE })?;
        if bytes[..4] != MAGIC || bytes[4] != VERSION || bytes[6..8] != check(bytes) {
            return None;
        }
        let (_, addr) = bytes[..16].split_last_chunk()?;
        let (_, rkey) = bytes[..20].split_last_chunk()?;
        let auth = bytes[20..].first_chunk();
        Some(Self {
            application_keys: bytes[5] & APPLICATION_KEYS != 0,
            block_addr: RemoteAddr::new(u64::from_le_bytes(*addr)),
            block_rkey: Rkey::new(u32::from_le_bytes(*rkey)),
            auth: auth.map(|tag| u64::from_le_bytes(*tag)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_introduction_survives_and_a_changed_one_does_not() {
        for (application_keys, auth) in [
            (false, None),
            (true, None),
            (false, Some(0)),
            (true, Some(u64::MAX - 7)),
        ] {
            let this = Introduction {
                application_keys,
                block_addr: RemoteAddr::new(0x7fff_1234_5678_9abc),
                block_rkey: Rkey::new(0xfeed_f00d),
                auth,
            };
            let bytes = &this.encode()[..this.size()];
            assert_eq!(Introduction::decode(bytes), Some(this));
            let mut padded = bytes.to_vec();
            padded.resize(100, 0xee);
            assert_eq!(Introduction::decode(&padded), Some(this));
            for at in 0..bytes.len() {
                let mut changed = bytes.to_vec();
                changed[at] ^= 0x10;
                assert_eq!(Introduction::decode(&changed), None, "byte {at}");
                assert_eq!(Introduction::decode(&bytes[..at]), None, "{at} bytes");
            }
        }
        assert_eq!(Introduction::decode(&[0; 64]), None);
    }
}
