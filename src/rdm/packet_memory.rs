//! Registered memory of packets: slots of one size, of which each receives or sends one packet.

#![allow(unsafe_code, reason = "memory that the device writes")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys as sys;

use crate::errno::{FiErrno, Result};
use crate::verbs::{Mr, Pd, Sge};
use crate::wire::rdm::packet::SLOT_SIZE;

/// Number of slots that are allocated and registered at once: 516 KiB.
const CHUNK: usize = 64;
/// Alignment and size of a chunk: no other memory is in its pages, which are registered.
const PAGE: usize = 4096;
const _: () = assert!((CHUNK * SLOT_SIZE).is_multiple_of(PAGE));

/// A slot. Not `Copy`: the holder alone may read, write or post the slot's memory.
#[derive(Debug)]
pub(super) struct Slot(u32);

impl Slot {
    /// The number, for the `wr_id` of a posted receive.
    pub(super) const fn number(&self) -> u32 {
        self.0
    }

    /// The slot of a request that was not posted, and that was dropped with its record.
    pub(super) const fn of_refused_post(number: u32) -> Self {
        Self(number)
    }

    /// The slot of a receive that has completed, from the number in its `wr_id`.
    pub(super) const fn of_completed_receive(number: u32) -> Self {
        Self(number)
    }
}

/// The memory of [`CHUNK`] slots.
#[derive(Debug)]
struct Chunk {
    /// As it was allocated, and the first slot in it.
    allocated: NonNull<u8>,
    memory: NonNull<u8>,
    /// `None` only while the chunk is dropped: the registration ends before the memory.
    mr: Option<Mr>,
}

// SAFETY: the chunk owns its memory.
unsafe impl Send for Chunk {}

impl Chunk {
    const LEN: usize = CHUNK * SLOT_SIZE;
    /// With the alignment of `calloc`: memory of a larger alignment is zeroed by writing it, which
    /// uses all of its pages.
    const LAYOUT: Layout = match Layout::from_size_align(Self::LEN + PAGE, align_of::<usize>()) {
        Ok(layout) => layout,
        Err(_) => panic!("the size does not overflow, the alignment is a power of two"),
    };

    fn new(pd: &Arc<Pd>) -> Result<Self> {
        // SAFETY: the size of the layout is not 0.
        let memory = NonNull::new(unsafe { alloc_zeroed(Self::LAYOUT) }).ok_or(FiErrno::ENOMEM)?;
        // SAFETY: less than PAGE, by which the allocation is longer than the slots.
        let first = unsafe { memory.add(memory.align_offset(PAGE)) };
        let mut chunk = Self {
            allocated: memory,
            memory: first,
            mr: None,
        };
        let addr = first.as_ptr().cast();
        // SAFETY: the chunk owns the memory and drops the registration first.
        let mr = unsafe { Mr::register(pd, addr, Self::LEN, sys::IBV_ACCESS_LOCAL_WRITE) }?;
        chunk.mr = Some(mr);
        Ok(chunk)
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if self.mr.take().is_none_or(Mr::release) {
            // SAFETY: allocated by `new` with this layout; the device has no access to it any more.
            unsafe { dealloc(self.allocated.as_ptr(), Self::LAYOUT) }
        }
    }
}

/// All slots of an endpoint. The owner drops its queue pairs and its shared receive queue first.
#[derive(Debug)]
pub(super) struct PacketMemory {
    pd: Arc<Pd>,
    chunks: Vec<Chunk>,
    free: Vec<u32>,
    /// No further memory can be registered.
    #[cfg(test)]
    exhausted: bool,
}

impl PacketMemory {
    pub(super) fn new(pd: &Arc<Pd>) -> Self {
        Self {
            pd: Arc::clone(pd),
            chunks: Vec::new(),
            free: Vec::new(),
            #[cfg(test)]
            exhausted: false,
        }
    }

    /// A slot; allocates and registers [`CHUNK`] slots if none is free.
    ///
    /// # Errors
    /// `ENOMEM`, and others of a registration.
    pub(super) fn take(&mut self) -> Result<Slot> {
        if let Some(number) = self.free.pop() {
            return Ok(Slot(number));
        }
        self.grow()
    }

    #[cold]
    fn grow(&mut self) -> Result<Slot> {
        #[cfg(test)]
        if self.exhausted {
            return Err(FiErrno::ENOMEM);
        }
        let first = (self.chunks.len() * CHUNK) as u32;
        self.chunks.push(Chunk::new(&self.pd)?);
        // the lowest numbers are used first
        self.free.extend((first + 1..first + CHUNK as u32).rev());
        Ok(Slot(first))
    }

    #[cfg(test)]
    pub(super) fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// From now on, at most so many slots are free, and no further memory can be registered.
    #[cfg(test)]
    pub(super) fn exhaust(&mut self, left: usize) {
        while self.free.len() < left {
            let slot = self.grow().expect("memory");
            self.free.push(slot.0);
        }
        self.free.truncate(left);
        self.exhausted = true;
    }

    /// Makes a slot available that neither the device nor a caller uses any more.
    pub(super) fn give_back(&mut self, Slot(number): Slot) {
        self.free.push(number);
    }

    fn address(&self, slot: &Slot) -> (NonNull<u8>, &Chunk) {
        let chunk = &self.chunks[slot.0 as usize / CHUNK];
        let offset = slot.0 as usize % CHUNK * SLOT_SIZE;
        // SAFETY: the offset is within the chunk.
        (unsafe { chunk.memory.add(offset) }, chunk)
    }

    /// The sge of a part of the slot.
    pub(super) fn sge(&self, slot: &Slot, offset: usize, len: usize) -> Sge {
        debug_assert!(offset + len <= SLOT_SIZE);
        let (at, chunk) = self.address(slot);
        Sge {
            addr: at.as_ptr() as u64 + offset as u64,
            length: len as u32,
            lkey: chunk.mr.as_ref().map(Mr::lkey).unwrap_or_default(),
        }
    }

    /// The bytes of a slot that is not posted.
    pub(super) fn bytes(&self, slot: &Slot) -> &[u8] {
        let (at, _) = self.address(slot);
        // SAFETY: the slot lies in the chunk. Its holder has not posted it, so the device does not
        // write it.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), SLOT_SIZE) }
    }

    /// As [`Self::bytes`], to write.
    pub(super) fn bytes_mut(&mut self, slot: &Slot) -> &mut [u8] {
        let (at, _) = self.address(slot);
        // SAFETY: as in `bytes`; the slot's holder is the only one that uses its memory.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), SLOT_SIZE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::verbs::replaced::{self, BUSY};

    /// A peer that was stopped while it wrote a packet continues later.
    #[test]
    fn memory_in_use_is_not_freed() {
        let device = crate::verbs::devices(&[replaced::with_busy_regions()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let chunk = Chunk::new(domain.pd()).unwrap();
        let first = chunk.memory;
        BUSY.with(|busy| busy.set(true));
        drop(chunk);
        BUSY.with(|busy| busy.set(false));
        let mut resident = [0_u8; Chunk::LEN / PAGE];
        // SAFETY: one byte for each page; the kernel checks that the pages are mapped.
        let ret = unsafe { libc::mincore(first.as_ptr().cast(), Chunk::LEN, &raw mut resident[0]) };
        assert_eq!(ret, 0, "unmapped");
        let next = Chunk::new(domain.pd()).unwrap();
        assert_ne!(next.memory, first, "used again");
    }
}
