//! Registered memory for data that is copied: injected data that is too long to go inline, and
//! short sources that would have to be registered.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::errno::Result;
use crate::mr::COPIED;
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

/// Pieces of [`COPIED`] bytes for short sources, taken in turn: of the oldest request first, given
/// back when it is complete. Fewer than there are work slots: where all are taken, sources go the
/// longer way.
#[derive(Debug)]
pub(crate) struct Bounce {
    slab: Slab,
    /// The request that uses each piece.
    numbers: [u32; PIECES],
    /// Pieces taken and given back so far, wrapping.
    head: u32,
    tail: u32,
    /// Whether the operation that is being posted uses the next one.
    taken: bool,
}

/// Pieces of a transmit side: 256 KiB.
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

    /// A piece for the operation that is being posted, and the lkey for it; requests before `tail`
    /// are complete.
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

    /// The operation was posted; `number` is that of its last request. One that was refused leaves
    /// its piece to the next one.
    #[inline]
    pub(crate) fn posted(&mut self, number: u32) {
        if std::mem::take(&mut self.taken) {
            self.numbers[self.head as usize % PIECES] = number;
            self.head = self.head.wrapping_add(1);
        }
    }
}
