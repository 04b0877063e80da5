//! Copies of the payload of datagrams that wait in the send queue.

use super::request::gather;
use crate::sys::{self, Grow, Res};

/// Maximum number of buffers that are kept for the next copies, of at most 4 KiB each.
const SPARE: usize = 32;

/// The copies of one send queue. The memory of a copy is freed when its datagram is complete,
/// except for [`SPARE`] buffers, so that a flood of datagrams does not allocate for each of them.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// One for each slot of the send queue, empty for a slot without a copy; no entries before the
    /// first copy.
    slots: Box<[Vec<u8>]>,
    spare: Vec<Vec<u8>>,
}

impl Copies {
    /// The copy of the datagram in this slot.
    pub(super) fn get(&self, slot: usize) -> Option<&[u8]> {
        let copy = self.slots.get(slot)?;
        (!copy.is_empty()).then_some(copy)
    }

    /// Copies `len` bytes from the ranges `from` for the datagram in `slot` of a queue of `count`
    /// slots.
    ///
    /// # Errors
    /// `ENOMEM`: there is no copy.
    ///
    /// # Safety
    /// The ranges must be readable, and `len` bytes in total.
    #[cold]
    pub(super) unsafe fn put(
        &mut self,
        slot: usize,
        count: usize,
        from: &[libc::iovec],
        len: usize,
    ) -> Res<()> {
        if self.slots.is_empty() {
            let (slots, spare) = (sys::list(count, |_| Vec::new())?, sys::with_room(SPARE)?);
            (self.slots, self.spare) = (slots, spare);
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.make_room(len)?;
        // SAFETY: the caller promises the ranges, for which the list has room.
        unsafe {
            gather(from, copy.as_mut_ptr());
            copy.set_len(len);
        }
        self.slots[slot] = copy;
        Ok(())
    }

    /// The datagram in this slot is complete.
    #[inline]
    pub(super) fn free(&mut self, slot: usize) {
        let Some(copy) = self.slots.get_mut(slot) else {
            return;
        };
        let mut copy = std::mem::take(copy);
        if copy.capacity() > 0 && self.spare.len() < SPARE {
            copy.clear();
            self.spare.push(copy);
        }
    }
}
