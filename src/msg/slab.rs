//! Registered memory for injected data that is too long to go inline.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::errno::Result;
use crate::verbs::{Mr, Pd};

/// As many equal pieces as there are work slots: a slot's piece is free when the slot is.
#[derive(Debug)]
pub(crate) struct Slab {
    mr: Mr,
    memory: Box<[UnsafeCell<u8>]>,
    size: usize,
}

// SAFETY: the memory is written under the endpoint's lock only, and read by the device.
unsafe impl Send for Slab {}

impl Slab {
    pub(crate) fn new(pd: &Arc<Pd>, slots: usize, size: usize) -> Result<Self> {
        let memory: Box<[UnsafeCell<u8>]> = (0..slots * size).map(|_| UnsafeCell::new(0)).collect();
        // SAFETY: the registration is dropped first, as the first field. The device only reads.
        let mr = unsafe { Mr::register(pd, memory.as_ptr().cast(), memory.len(), 0) }?;
        Ok(Self { mr, memory, size })
    }

    /// A slot's piece, and the lkey for it.
    #[inline]
    pub(crate) fn slot(&mut self, index: usize) -> (*mut u8, u32) {
        let start = index * self.size;
        let piece = &self.memory[start..start + self.size];
        (piece.as_ptr().cast_mut().cast(), self.mr.lkey())
    }
}
