//! The introduction: what `weft` says of itself behind the application's data when it connects.
//! `docs/protocol.md`, "The introduction".

use super::records::checksum;

/// Bytes of it.
pub const INTRODUCTION_SIZE: usize = 20;

const MAGIC: [u8; 4] = *b"weft";
const VERSION: u8 = 1;
const APPLICATION_KEYS: u8 = 1;

/// What a peer has to be told before it can use keys of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// Whether all keys of this side are the application's.
    pub application_keys: bool,
    /// Address of this side's connection block.
    pub block_addr: u64,
    /// rkey of it.
    pub block_rkey: u32,
}

fn check(bytes: &[u8; INTRODUCTION_SIZE]) -> [u8; 2] {
    let mut words = [0_u64; 3];
    let others = bytes[..6].iter().chain(&bytes[8..]);
    for (index, byte) in others.enumerate() {
        words[index / 8] |= u64::from(*byte) << (index % 8 * 8);
    }
    (checksum(&words) as u16).to_le_bytes()
}

impl Introduction {
    /// The bytes.
    pub fn encode(&self) -> [u8; INTRODUCTION_SIZE] {
        let mut bytes = [0; INTRODUCTION_SIZE];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = if self.application_keys {
            APPLICATION_KEYS
        } else {
            0
        };
        bytes[8..16].copy_from_slice(&self.block_addr.to_le_bytes());
        bytes[16..].copy_from_slice(&self.block_rkey.to_le_bytes());
        let check = check(&bytes);
        bytes[6..8].copy_from_slice(&check);
        bytes
    }

    /// `None`: the peer has not introduced itself, or in a version that is not known.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; INTRODUCTION_SIZE] = bytes.first_chunk()?;
        if bytes[..4] != MAGIC || bytes[4] != VERSION || bytes[6..8] != check(bytes) {
            return None;
        }
        let (_, addr) = bytes[..16].split_last_chunk()?;
        let (_, rkey) = bytes.split_last_chunk()?;
        Some(Self {
            application_keys: bytes[5] & APPLICATION_KEYS != 0,
            block_addr: u64::from_le_bytes(*addr),
            block_rkey: u32::from_le_bytes(*rkey),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_introduction_survives_and_a_changed_one_does_not() {
        for application_keys in [false, true] {
            let this = Introduction {
                application_keys,
                block_addr: 0x7fff_1234_5678_9abc,
                block_rkey: 0xfeed_f00d,
            };
            let bytes = this.encode();
            assert_eq!(Introduction::decode(&bytes), Some(this));
            let mut padded = bytes.to_vec();
            padded.resize(100, 0xee);
            assert_eq!(Introduction::decode(&padded), Some(this));
            for at in 0..INTRODUCTION_SIZE {
                let mut changed = bytes;
                changed[at] ^= 0x10;
                assert_eq!(Introduction::decode(&changed), None, "byte {at}");
                assert_eq!(Introduction::decode(&bytes[..at]), None, "{at} bytes");
            }
        }
        assert_eq!(Introduction::decode(&[0; 64]), None);
    }
}
