//! Registrations that stay after the messages whose sources or sinks they were: an application
//! sends from, and receives into, the same buffers again.
//!
//! Only for a device that registers on demand without a call of the kernel. There a registration
//! holds no pages and translates no address: each access finds the memory that is at the addresses
//! then. So it stays correct when the application unmaps the buffer, and needs no monitor.
//!
//! The lock of the endpoint protects the table, and so the numbers of uses: an atomic operation for
//! each message would wait until the packet before it is in the memory of the peer.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::verbs::{Mr, Rkey};

/// Registrations that an endpoint keeps.
const KEPT: usize = 128;

/// Memory, and whether peers write or read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) written: bool,
}

/// A registration that operations and the table share.
#[derive(Debug)]
pub(super) struct Recent {
    rkey: Rkey,
    range: Range,
    /// `None`: it has ended.
    mr: Mutex<Option<Mr>>,
}

impl Recent {
    /// Ends the registration without a wait.
    ///
    /// # Errors
    /// A peer executes a READ or a WRITE, and no other one can begin. The caller repeats the call.
    pub(super) fn end(&self) -> Result<(), ()> {
        let mut held = self.mr.lock();
        let ended = held.take().map_or(Ok(()), Mr::deregister_now);
        ended.map_err(|mr| *held = Some(mr))
    }

    #[cfg(test)]
    pub(super) fn is_registered(&self) -> bool {
        self.mr.lock().is_some()
    }
}

/// The use of a registration by one operation. To be given back by [`RecentKeys::release`] or
/// [`RecentKeys::withdraw`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RecentKey(u32);

/// A registration in the table.
#[derive(Debug)]
struct Slot {
    recent: Arc<Recent>,
    /// Number of operations.
    uses: u32,
    /// Whether later operations find it.
    kept: bool,
}

/// A place without a registration.
const NONE: u32 = u32::MAX;

/// The table: each range has one place.
#[derive(Debug)]
pub(super) struct RecentKeys {
    /// Indices of slots. Allocated with the first registration.
    places: Vec<u32>,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
}

impl RecentKeys {
    pub(super) const fn new() -> Self {
        Self {
            places: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Where the registration of a range is kept; that of another range there is replaced.
    #[inline(always)]
    pub(super) fn place(range: Range) -> usize {
        // Fibonacci hashing; buffers differ in the bits from 6 on
        let mixed = range.addr >> 6 ^ (range.len as u64) << 1 ^ u64::from(range.written);
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - KEPT.ilog2())) as usize
    }

    fn slot(&mut self, index: u32) -> Option<&mut Slot> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    /// The registration of exactly this range, for one more operation.
    #[inline(always)]
    pub(super) fn find(&mut self, range: Range) -> Option<(RecentKey, Rkey)> {
        let index = *self.places.get(Self::place(range))?;
        let slot = self.slot(index).filter(|it| it.recent.range == range)?;
        slot.uses += 1;
        Some((RecentKey(index), slot.recent.rkey))
    }

    /// Keeps a registration that an operation uses. Also returns the registration that was in the
    /// same place, if no operation uses it any more; the caller ends it.
    pub(super) fn keep(&mut self, mr: Mr, range: Range) -> (RecentKey, Option<Arc<Recent>>) {
        if self.places.is_empty() {
            self.places.resize(KEPT, NONE);
        }
        let slot = Some(Slot {
            recent: Arc::new(Recent {
                rkey: mr.rkey(),
                range,
                mr: Mutex::new(Some(mr)),
            }),
            uses: 1,
            kept: true,
        });
        let index = match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                // as many as operations, which are fewer than 2^24, and places
                (self.slots.len() - 1) as u32
            }
        };
        let old = std::mem::replace(&mut self.places[Self::place(range)], index);
        if let Some(slot) = self.slot(old) {
            slot.kept = false;
        }
        (RecentKey(index), self.take_unused(old))
    }

    /// Removes a registration that is not found and that no operation uses.
    #[inline]
    fn take_unused(&mut self, index: u32) -> Option<Arc<Recent>> {
        let slot = self.slots.get_mut(index as usize)?;
        let unused = slot.take_if(|it| !it.kept && it.uses == 0)?;
        self.free.push(index);
        Some(unused.recent)
    }

    /// Ends the use by an operation. Returns the registration if it is to be ended.
    #[inline]
    pub(super) fn release(&mut self, RecentKey(index): RecentKey) -> Option<Arc<Recent>> {
        let slot = self.slot(index)?;
        slot.uses -= 1;
        if slot.kept {
            return None;
        }
        self.take_unused(index)
    }

    /// Ends the use by an operation that has failed. The registration is to be ended, though others
    /// may use it, and later operations do not find it.
    pub(super) fn withdraw(&mut self, key: RecentKey) -> Option<Arc<Recent>> {
        let slot = self.slot(key.0)?;
        let recent = Arc::clone(&slot.recent);
        slot.kept = false;
        let place = Self::place(recent.range);
        if self.places.get(place) == Some(&key.0) {
            self.places[place] = NONE;
        }
        self.release(key);
        Some(recent)
    }

    /// All registrations; the table is empty then.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Arc<Recent>> {
        let Self { slots, .. } = std::mem::replace(self, Self::new());
        slots.into_iter().flatten().map(|slot| slot.recent)
    }

    /// The registration, and the number of operations that use it.
    #[cfg(test)]
    pub(super) fn uses(&self, key: &RecentKey) -> (Arc<Recent>, u32) {
        let slot = self.slots[key.0 as usize].as_ref().unwrap();
        (Arc::clone(&slot.recent), slot.uses)
    }

    /// Whether an operation would find a registration of the range.
    #[cfg(test)]
    pub(super) fn has(&self, range: Range) -> bool {
        let index = self.places.get(Self::place(range)).copied();
        let slot = index.and_then(|at| self.slots.get(at as usize)?.as_ref());
        slot.is_some_and(|slot| slot.recent.range == range)
    }
}
