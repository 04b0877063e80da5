//! Registered memory for copied data: injected data that is too long to send inline, and short
//! sources that would need a registration.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::errno::Result;
use crate::mr::COPIED;
use crate::verbs::{Mr, Pd};

/// One piece of `size` bytes per work slot: a slot's piece is free when the slot is.
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
        // SAFETY: `Slab` drops the registration before the memory (field order). The device only
        // reads.
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

/// Pieces of [`COPIED`] bytes for short sources, used as a ring: each is released when its request
/// is complete. There are fewer pieces than work slots; when all are used, a source is registered
/// instead.
#[derive(Debug)]
pub(crate) struct Bounce {
    slab: Slab,
    /// Slot number of the request that uses each piece.
    numbers: [u32; PIECES],
    /// Pieces taken and released so far, wrapping.
    head: u32,
    tail: u32,
    /// Whether the operation that is being posted uses the piece at `head`.
    taken: bool,
}

/// Pieces per transmit side, 256 KiB in total.
const PIECES: usize = 32;

impl Bounce {
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Self> {
        Ok(Self {
            slab: Slab::new(pd, PIECES, COPIED)?,
            numbers: [0; PIECES],
            head: 0,
            tail: 0,
            taken: false,
        })
    }

    /// A piece for the operation that is being posted, and its lkey. Requests before `tail` are
    /// complete.
    #[inline]
    pub(crate) fn take(&mut self, tail: u32) -> Option<(*mut u8, u32)> {
        while self.tail != self.head
            && (tail.wrapping_sub(self.numbers[self.tail as usize % PIECES]) as i32) > 0
        {
            self.tail = self.tail.wrapping_add(1);
        }
        if self.head.wrapping_sub(self.tail) as usize == PIECES {
            return None;
        }
        self.taken = true;
        Some(self.slab.slot(self.head as usize % PIECES))
    }

    /// Records that the operation was posted; `number` is the slot number of its last request. A
    /// refused operation leaves its piece to the next one.
    #[inline]
    pub(crate) fn posted(&mut self, number: u32) {
        if std::mem::take(&mut self.taken) {
            self.numbers[self.head as usize % PIECES] = number;
            self.head = self.head.wrapping_add(1);
        }
    }
}
