//! Authorization keys: only endpoints with equal keys connect, and a region with a key is reached
//! only through endpoints with that key (`fi_endpoint(3)`, `fi_mr(3)`, *auth_key*). Each key has
//! its own protection domain.

use std::fmt;

use crate::errno::{FiErrno, Result};

/// The bytes of a key, 1 to [`Self::MAX_SIZE`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct AuthKey(Box<[u8]>);

impl AuthKey {
    /// Maximum length in bytes.
    pub const MAX_SIZE: usize = 64;

    /// A key of these bytes.
    ///
    /// # Errors
    /// `EINVAL`: no bytes, or more than [`Self::MAX_SIZE`].
    pub fn new(bytes: &[u8]) -> Result<Self> {
        if (1..=Self::MAX_SIZE).contains(&bytes.len()) {
            Ok(Self(bytes.into()))
        } else {
            Err(FiErrno::EINVAL)
        }
    }

    /// The bytes of the key.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The hash of the key that connecting endpoints exchange; different keys have different tags
    /// with very high probability.
    pub(crate) fn tag(&self) -> u64 {
        // the length first, so that a key with zeros appended has another tag
        let length = self.0.len() as u64;
        let words = self.0.chunks(8).map(|chunk| {
            let bytes = chunk.iter().rev();
            bytes.fold(0, |word, byte| word << 8 | u64::from(*byte))
        });
        std::iter::once(length).chain(words).fold(SEED, mix)
    }
}

const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// Each bit of both arguments changes about half of the result's bits: docs/protocol.md,
/// "Authorization keys".
fn mix(sum: u64, word: u64) -> u64 {
    let product = (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let product = (product ^ product >> 33).wrapping_mul(SEED);
    product ^ product >> 29
}

impl fmt::Debug for AuthKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthKey({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_bytes_and_tags_of_their_own() {
        for wrong in [0, AuthKey::MAX_SIZE + 1] {
            assert_eq!(AuthKey::new(&vec![1; wrong]), Err(FiErrno::EINVAL));
        }
        let mut tags = std::collections::HashSet::new();
        for length in 1..=AuthKey::MAX_SIZE {
            let zeros = vec![0; length];
            assert!(tags.insert(AuthKey::new(&zeros).unwrap().tag()));
            for byte in 0..length {
                for bit in 0..8 {
                    let mut key = zeros.clone();
                    key[byte] = 1 << bit;
                    let key = AuthKey::new(&key).unwrap();
                    assert!(tags.insert(key.tag()), "{:?}", key.bytes());
                    assert_eq!(key.tag(), key.clone().tag());
                }
            }
        }
        let secret = AuthKey::new(b"secret").unwrap();
        assert!(!format!("{secret:?}").contains("secret"));
    }
}
