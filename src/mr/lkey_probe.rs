//! Finds the lkey of a local buffer as each post does, but posts nothing: for benchmarks.

#![allow(unsafe_code, reason = "registers buffers that the caller keeps valid")]

use std::ffi::c_void;
use std::sync::Arc;

use super::{Desc, LocalKeys, MrDomain, Use};
use crate::errno::Result;
use crate::verbs::Lkey;

/// One direction of an endpoint that posts nothing. Not thread safe.
#[derive(Debug)]
pub struct LocalProbe {
    keys: LocalKeys,
    number: u32,
}

impl LocalProbe {
    /// A probe with the cache or implicit region of a domain.
    pub fn new(domain: &Arc<MrDomain>) -> Self {
        Self {
            keys: LocalKeys::new(domain, domain.pd()),
            number: 0,
        }
    }

    /// The lkey of a source buffer. The buffer's registration is released by a later call.
    ///
    /// # Errors
    /// Those of registering.
    ///
    /// # Safety
    /// The memory is mapped.
    #[inline]
    pub unsafe fn source(&mut self, addr: *const c_void, len: usize) -> Result<Lkey> {
        let iov = libc::iovec {
            iov_base: addr.cast_mut(),
            iov_len: len,
        };
        // SAFETY: the caller promises the memory; nothing is posted.
        let lkey = unsafe { self.keys.lkey(Desc::NULL, &iov, Use::Source) }?;
        self.number = self.number.wrapping_add(1);
        self.keys.posted(self.number, self.number);
        Ok(lkey)
    }
}
