//! Raw keys that were mapped into a domain (`fi_mr_map_raw(3)`).
//!
//! A mapped key is a number of the domain's own, never given twice. Of a region that its owner has published it
//! stands for that registration: an endpoint looks the entry up in the peer's directory, and takes no other
//! generation for it. Of one with a native key it is the record itself.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::keys::kind;
use crate::errno::{FiErrno, Result};
use crate::wire::raw_key::RawKey;

/// Those of one domain. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    keys: HashMap<u64, RawKey>,
    /// How many were mapped so far.
    count: u64,
}

impl Mapped {
    /// # Errors
    /// `EINVAL`: no raw key, or one that was truncated, changed, or made by another version.
    pub(crate) fn map(&self, raw: &[u8]) -> Result<u64> {
        let raw = RawKey::decode(raw).map_err(|_| FiErrno::EINVAL)?;
        let mut inner = self.inner.lock();
        inner.count += 1;
        // 48 bits of numbers last for centuries
        let key = kind::MAPPED << 48 | (inner.count & 0xffff_ffff_ffff);
        inner.keys.insert(key, raw);
        Ok(key)
    }

    /// # Errors
    /// `EINVAL`: no such key is mapped.
    pub(crate) fn unmap(&self, key: u64) -> Result<()> {
        let known = self.inner.lock().keys.remove(&key);
        known.map(|_| ()).ok_or(FiErrno::EINVAL)
    }

    pub(crate) fn get(&self, key: u64) -> Option<RawKey> {
        self.inner.lock().keys.get(&key).cloned()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inner.lock().keys.is_empty()
    }
}
