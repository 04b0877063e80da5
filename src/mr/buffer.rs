//! Buffers of memory, as applications name them.

#![allow(unsafe_code, reason = "addresses are shared between threads")]

use std::ffi::c_void;

/// One buffer (`struct iovec`, same layout). The engine never dereferences it; only devices access
/// the memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Buffer {
    /// First byte.
    pub addr: *const c_void,
    /// Bytes.
    pub len: usize,
}

// SAFETY: an address and a length; no thread of the engine dereferences the address.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// The buffers of a region, those that follow each other in memory as one: a local buffer may lie
/// across them, because "multiple memory buffers are registered as a single memory region"
/// (`fi_mr(3)`). Their ends do not overflow.
pub(super) fn joined(buffers: &[Buffer]) -> Box<[Buffer]> {
    let mut joined: Vec<Buffer> = Vec::with_capacity(buffers.len());
    for buffer in buffers {
        match joined.last_mut() {
            Some(last) if last.end() == buffer.start() => last.len += buffer.len,
            _ => joined.push(*buffer),
        }
    }
    joined.into()
}

impl Buffer {
    /// Address of the first byte.
    pub(super) fn start(&self) -> u64 {
        self.addr as u64
    }

    /// Address of the byte behind the last. Cannot overflow for a region's buffers
    /// (`RegionConfig::check`).
    pub(super) fn end(&self) -> u64 {
        self.start() + self.len as u64
    }

    /// Whether all `len` bytes from `addr` on are in the buffer.
    pub(super) fn contains(&self, addr: u64, len: u64) -> bool {
        let offset = addr.checked_sub(self.start());
        let end = offset.and_then(|offset| offset.checked_add(len));
        end.is_some_and(|end| end <= self.len as u64)
    }
}
