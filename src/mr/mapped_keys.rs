//! Raw keys that were mapped into a domain (`fi_mr_map_raw(3)`).
//!
//! A mapped key is a number that the domain assigns and never reuses. It stands for a key of the
//! peer: if the raw key is a record, for one registration of that key; else for the key alone
//! (`docs/protocol.md`, "Raw keys"). Endpoints cache the mapped keys that they use;
//! [`MappedKey::is_mapped`] is false after `fi_mr_unmap_key(3)`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::MrDomain;
use super::key_cache::{Keyed, kind};
use super::lookup::{Resolved, SegmentBlock};
use crate::errno::{FiErrno, Result};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::raw_key::{self, RawKey};
use crate::wire::records::Entry;

/// The content of a raw key, except for the key itself.
#[derive(Debug)]
pub(crate) enum Meaning {
    /// None: the raw key is the key that `fi_mr_key(3)` returns at the peer.
    Key,
    /// The registration with this generation, in the key directory of this domain.
    Published { domain: u64, generation: u64 },
    /// A native key, and the resolution of its region.
    Native(Resolved),
}

/// A mapped key.
#[derive(Debug)]
pub(crate) struct MappedKey {
    /// The key that the application uses.
    number: u64,
    /// The peer's key.
    pub(crate) key: u64,
    pub(crate) meaning: Meaning,
    mapped: AtomicBool,
}

impl MappedKey {
    /// False after `fi_mr_unmap_key(3)`.
    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.load(Ordering::Acquire)
    }
}

impl Keyed for Arc<MappedKey> {
    fn kept_as(&self) -> u64 {
        self.number
    }
}

/// The key by which the owner of a region has it: `key`, or the key that it stands for.
///
/// # Errors
/// `EKEYREJECTED`: a mapped key that is not mapped any more.
#[inline]
pub(crate) fn mapped_key(domain: &MrDomain, key: u64) -> Result<u64> {
    if key >> 48 != kind::MAPPED {
        return Ok(key);
    }
    let mapped = domain.mapped().get(key).filter(|mapped| mapped.is_mapped());
    mapped.map(|mapped| mapped.key).ok_or(FiErrno::EKEYREJECTED)
}

/// The mapped keys of one domain. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    keys: HashMap<u64, Arc<MappedKey>>,
    /// Number of keys mapped so far.
    count: u64,
}

/// Decodes a raw key: the peer's key, and its meaning.
fn decode(raw: &[u8]) -> Result<(u64, Meaning)> {
    let (key, meaning) = match raw_key::decode_short(raw) {
        Some(key) => (key, Meaning::Key),
        None => {
            let raw = RawKey::decode(raw).map_err(|_| FiErrno::EINVAL)?;
            let meaning = if raw.published {
                Meaning::Published {
                    domain: raw.domain,
                    generation: raw.entry.generation,
                }
            } else {
                Meaning::Native(Resolved {
                    // native keys have no event cell: a counted region is published
                    entry: Entry {
                        cell: RemoteAddr::NULL,
                        once: false,
                        ..raw.entry
                    },
                    cells_rkey: Rkey::default(),
                    blocks: match &*raw.segments {
                        [] => Box::default(),
                        segments => Box::new([SegmentBlock::of(segments)]),
                    },
                    used: false,
                })
            };
            (raw.entry.key, meaning)
        }
    };
    // a peer has no key in the range of mapped keys, and none that is `FI_KEY_NOTAVAIL`
    if key >> 48 == kind::MAPPED || key == u64::MAX {
        return Err(FiErrno::EINVAL);
    }
    Ok((key, meaning))
}

impl Mapped {
    /// Maps a raw key; returns the key for the application's operations (`fi_mr_map_raw(3)`).
    ///
    /// # Errors
    /// `EINVAL`: not a raw key, or one that was truncated, changed, or made by another version.
    pub(crate) fn map(&self, raw: &[u8]) -> Result<u64> {
        let (key, meaning) = decode(raw)?;
        let mut inner = self.inner.lock();
        inner.count += 1;
        // the number is unique for 2^48 mappings
        let number = kind::MAPPED << 48 | (inner.count & 0xffff_ffff_ffff);
        let mapped = MappedKey {
            number,
            key,
            meaning,
            mapped: AtomicBool::new(true),
        };
        inner.keys.insert(number, Arc::new(mapped));
        Ok(number)
    }

    /// Unmaps a key: operations that are posted later with it are refused.
    ///
    /// # Errors
    /// `EINVAL`: no such key is mapped.
    pub(crate) fn unmap(&self, number: u64) -> Result<()> {
        let mapped = self.inner.lock().keys.remove(&number);
        let mapped = mapped.ok_or(FiErrno::EINVAL)?;
        mapped.mapped.store(false, Ordering::Release);
        Ok(())
    }

    pub(crate) fn get(&self, number: u64) -> Option<Arc<MappedKey>> {
        self.inner.lock().keys.get(&number).cloned()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inner.lock().keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::key_cache::KeyCache;

    #[test]
    fn what_was_unmapped_is_not_kept() {
        let mapped = Mapped::default();
        let mut kept = KeyCache::default();
        let stays: Vec<u64> = (0..9_u64)
            .map(|key| mapped.map(&key.to_le_bytes()).unwrap())
            .collect();
        for number in &stays {
            kept.keep(mapped.get(*number).unwrap());
        }
        for round in 0..10_000_u64 {
            let number = mapped.map(&round.to_le_bytes()).unwrap();
            kept.keep(mapped.get(number).unwrap());
            assert!(kept.get(number).unwrap().is_mapped());
            mapped.unmap(number).unwrap();
            assert!(kept.get(number).is_none_or(|one| !one.is_mapped()));
            assert!(kept.len() <= 64, "{} after {round} rounds", kept.len());
        }
        for (number, key) in stays.iter().zip(0..) {
            assert_eq!(kept.get(*number).unwrap().key, key);
            mapped.unmap(*number).unwrap();
            assert_eq!(mapped.unmap(*number), Err(FiErrno::EINVAL));
        }
        assert!(mapped.is_empty());
    }

    #[test]
    fn numbers_of_mapped_keys_are_not_mapped_again() {
        let mapped = Mapped::default();
        let number = mapped.map(&7_u64.to_le_bytes()).unwrap();
        for key in [number, u64::MAX] {
            assert_eq!(mapped.map(&key.to_le_bytes()), Err(FiErrno::EINVAL));
        }
    }
}
