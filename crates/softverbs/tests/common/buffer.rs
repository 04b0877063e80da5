//! Registered memory.

use rdma_core_sys::*;

use super::{End, verbs};

/// A registered buffer.
pub struct Buffer {
    bytes: *mut u8,
    len: usize,
    mr: *mut ibv_mr,
}

impl Buffer {
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn addr(&self) -> u64 {
        self.bytes as u64
    }
    pub fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }
    pub fn lkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).lkey }
    }
    /// A copy of the current bytes.
    pub fn bytes(&self) -> Vec<u8> {
        (0..self.len)
            // SAFETY: inside the buffer; another process may write it.
            .map(|i| unsafe { self.bytes.add(i).read_volatile() })
            .collect()
    }
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: inside the buffer; no request names it now.
        unsafe { self.bytes.write_bytes(byte, self.len) };
    }
    /// A second registration of the same memory.
    pub fn again(&self) -> Self {
        Self {
            bytes: self.bytes,
            len: self.len,
            mr: self.mr,
        }
    }
    /// Leaves it registered until the process ends.
    pub fn leak(self) -> &'static [u8] {
        // SAFETY: never freed; the caller's peer is done with it.
        unsafe { std::slice::from_raw_parts(self.bytes, self.len) }
    }
}

impl End {
    pub fn buffer(&self, bytes: &[u8]) -> Buffer {
        let all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
        self.buffer_with(bytes, all)
    }

    pub fn buffer_with(&self, bytes: &[u8], access: u32) -> Buffer {
        let mut memory = bytes.to_vec();
        memory.reserve_exact(1);
        memory.resize(bytes.len().max(1), 0);
        let memory = Box::leak(memory.into_boxed_slice());
        let start = memory.as_mut_ptr();
        // SAFETY: live domain; the memory stays registered until it is freed.
        let mr = unsafe {
            (verbs().ibv_reg_mr)(self.pd, start.cast(), memory.len(), access.cast_signed())
        };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        Buffer {
            bytes: start,
            len: bytes.len(),
            mr,
        }
    }

    pub fn deregister(&self, buffer: Buffer) -> &'static [u8] {
        // SAFETY: live region.
        assert_eq!(unsafe { (verbs().ibv_dereg_mr)(buffer.mr) }, 0);
        buffer.leak()
    }

    pub fn release(&self, buffer: Buffer) {
        let _ = self.deregister(buffer);
    }
}
