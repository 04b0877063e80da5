//! Registered memory for copied data: injected data that is too long to send inline, and short
//! sources that would need a registration.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::errno::Result;
use crate::mr::COPIED;
use crate::verbs::{Lkey, Mr, Pd};

/// One buffer of `size` bytes for each record of a posted request. A buffer is free when its record
/// is free.
#[derive(Debug)]
pub(super) struct Slab {
    /// `None` only during the drop.
    mr: Option<Mr>,
    memory: Box<[UnsafeCell<u8>]>,
    size: usize,
}

// SAFETY: the memory is written under the transmit lock only, and read by the device.
unsafe impl Send for Slab {}

impl Slab {
    pub(crate) fn new(pd: &Arc<Pd>, count: usize, size: usize) -> Result<Self> {
        // zeroed memory of the allocator, whose pages are used when they are written
        let memory = Box::into_raw(vec![0_u8; count * size].into_boxed_slice());
        // SAFETY: `UnsafeCell<u8>` has the layout of `u8`, and the box is not used otherwise.
        let memory = unsafe { Box::from_raw(memory as *mut [UnsafeCell<u8>]) };
        // SAFETY: `Slab` ends the registration before it frees the memory. The device only reads.
        let mr = unsafe { Mr::register(pd, memory.as_ptr().cast(), memory.len(), 0) }?;
        let mr = Some(mr);
        Ok(Self { mr, memory, size })
    }

    /// The buffer at `index`, and its lkey.
    #[inline]
    pub(crate) fn buffer(&mut self, index: usize) -> (*mut u8, Lkey) {
        let start = index * self.size;
        let buffer = &self.memory[start..start + self.size];
        let lkey = self.mr.as_ref().map(Mr::lkey).unwrap_or_default();
        (buffer.as_ptr().cast_mut().cast(), lkey)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if !self.mr.take().is_none_or(Mr::release) {
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}

/// Buffers of [`COPIED`] bytes for short sources, used as a ring: each is released when its request
/// is complete. There may be fewer buffers than requests; when all are in use, sources are
/// registered instead.
#[derive(Debug)]
pub(super) struct Bounce {
    slab: Slab,
    /// Number of the request that uses each buffer.
    numbers: [u32; BUFFERS],
    /// Number of buffers taken and released so far; wrap.
    head: u32,
    tail: u32,
    /// Whether the operation that is being posted uses the buffer at `head`.
    taken: bool,
}

/// Buffers per initiator, 256 KiB in total.
const BUFFERS: usize = 32;

impl Bounce {
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Self> {
        Ok(Self {
            slab: Slab::new(pd, BUFFERS, COPIED)?,
            numbers: [0; BUFFERS],
            head: 0,
            tail: 0,
            taken: false,
        })
    }

    /// A buffer for the operation that is being posted, and its lkey. Requests before `tail` are
    /// complete.
    #[inline]
    pub(crate) fn take(&mut self, tail: u32) -> Option<(*mut u8, Lkey)> {
        self.release(tail);
        if self.head.wrapping_sub(self.tail) as usize == BUFFERS {
            return None;
        }
        self.taken = true;
        Some(self.slab.buffer(self.head as usize % BUFFERS))
    }

    /// Releases the buffers of the requests before `tail`.
    #[inline]
    fn release(&mut self, tail: u32) {
        while self.tail != self.head
            && (tail.wrapping_sub(self.numbers[self.tail as usize % BUFFERS]) as i32) > 0
        {
            self.tail = self.tail.wrapping_add(1);
        }
    }

    /// Records that an operation was posted, also one that uses no buffer; `number` is that of its
    /// last request, and requests before `tail` are complete. If an operation is refused, the next
    /// one uses its buffer.
    #[inline]
    pub(crate) fn posted(&mut self, number: u32, tail: u32) {
        // also without a buffer: a number of 2^31 requests ago would count as not complete
        self.release(tail);
        if std::mem::take(&mut self.taken) {
            self.numbers[self.head as usize % BUFFERS] = number;
            self.head = self.head.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::devices;

    /// A buffer is free after its request, however many requests without one follow.
    #[test]
    fn a_bounce_buffer_is_free_after_any_number_of_requests() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let mut bounce = Bounce::new(&Pd::alloc(&device).unwrap()).unwrap();
        assert!(bounce.take(0).is_some());
        bounce.posted(0, 0);
        let last = (1 << 31) + (1 << 30);
        for number in [1 << 30, 1 << 31, last] {
            bounce.posted(number, number);
        }
        for _ in 0..BUFFERS {
            assert!(bounce.take(last).is_some());
            bounce.posted(last, last);
        }
        assert!(bounce.take(last).is_none(), "all are in use");
        assert!(bounce.take(last + 1).is_some());
    }
}
