//! The segment of this process.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::arena::Arena;
use super::layout::{self, OWNED, SEGMENT_SIZE, SHARED_SIZE, TABLES_SIZE, header};
use super::mapping::Mapping;
use crate::sync::Arc;
use crate::sys::{Res, Tables, fallocate, inode_of, memfd_create, punch_hole, zeroed};

/// This process's segment: its two files, their mapping, and the state of its ranges (backed by
/// pages, allocated).
#[derive(Debug)]
pub(crate) struct OwnSegment {
    shared: OwnedFd,
    tables: OwnedFd,
    /// The tables are sealed so that only this process can write them. On a kernel without that
    /// seal, this is false, and peers' tables are not required to have the seal either.
    pub(crate) guarded: bool,
    pub(crate) map: Arc<Mapping>,
    room: Mutex<Room>,
}

#[derive(Debug)]
struct Room {
    arena: Arena,
    order: Arena,
    rings: Arena,
    /// One bit for each [`STEP`] bytes; set if the range has pages.
    backed: Box<[u64]>,
    /// The slot of the last ring that was closed after its sender had ended: it has its first page.
    closed_ring: Option<u32>,
}

/// Bytes that are backed with pages in one step.
const STEP: usize = 64 << 10;

impl OwnSegment {
    /// # Errors
    /// `ENOMEM`, `EMFILE`, or the error of creating or mapping a file.
    pub(crate) fn create(cookie: u64, node: u32, barriers: bool) -> Res<Self> {
        let shared = memfd_create(c"softverbs", SHARED_SIZE)?;
        let tables = Tables::create(c"softverbs-tables", TABLES_SIZE)?;
        let halves = ((&shared, SHARED_SIZE), (tables.file(), TABLES_SIZE));
        let map = Arc::try_new(Mapping::pair(halves.0, halves.1, true)?)?;
        let (tables, guarded) = tables.seal()?;
        let segment = Self {
            shared,
            tables,
            guarded,
            map,
            room: Mutex::new(Room {
                arena: Arena::new(layout::arena::AT, layout::arena::LEN)?,
                order: Arena::new(layout::order::AT, layout::order::LEN)?,
                rings: Arena::new(layout::receive_rings::AT, layout::receive_rings::LEN)?,
                backed: zeroed(SEGMENT_SIZE / STEP / 64 + 1)?,
                closed_ring: None,
            }),
        };
        segment.back_halves(0, layout::announce::END)?;
        segment.back(
            layout::stripe::AT,
            layout::stripe::STRIDE * layout::stripe::COUNT,
        )?;
        // Peers read the entry of an XRC domain's member also before the member has published it.
        segment.back(layout::member::AT, layout::member::END - layout::member::AT)?;
        let map = &segment.map;
        map.u64(header::SIZE)
            .store(SEGMENT_SIZE as u64, Ordering::Relaxed);
        map.u64(header::COOKIE).store(cookie, Ordering::Relaxed);
        map.u32(header::BARRIERS)
            .store(u32::from(barriers), Ordering::Relaxed);
        map.u32(header::NODE).store(node, Ordering::Relaxed);
        map.u32(header::SHARED).store(
            segment.shared.as_raw_fd().cast_unsigned(),
            Ordering::Relaxed,
        );
        map.u64(header::SHARED_INODE)
            .store(inode_of(&segment.shared)?, Ordering::Relaxed);
        map.u64(header::MAGIC)
            .store(layout::MAGIC, Ordering::Release);
        Ok(segment)
    }

    /// The inode of the tables' file. The tables name the shared file.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub(crate) fn inode(&self) -> Res<u64> {
        inode_of(&self.tables)
    }

    /// The descriptor of the tables' file.
    pub(crate) fn fd(&self) -> RawFd {
        self.tables.as_raw_fd()
    }

    /// The descriptor of the file that peers write.
    pub(crate) fn shared_fd(&self) -> RawFd {
        self.shared.as_raw_fd()
    }

    /// Backs a range with pages, so that no access to the range can fail.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn back(&self, at: usize, len: usize) -> Res<()> {
        self.back_locked(&mut self.lock(), at, len)
    }

    /// As [`Self::back`], for entries that have a half in each of the two files.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn back_halves(&self, at: usize, len: usize) -> Res<()> {
        self.back(at, len)?;
        self.back(OWNED + at, len)
    }

    fn back_locked(&self, room: &mut Room, at: usize, len: usize) -> Res<()> {
        // No step crosses the border of the two files.
        const { assert!(OWNED.is_multiple_of(STEP)) };
        for step in at / STEP..(at + len).div_ceil(STEP) {
            let (word, bit) = (step / 64, 1u64 << (step % 64));
            if room.backed[word] & bit == 0 {
                let from = step * STEP;
                match from.checked_sub(OWNED) {
                    None => fallocate(self.shared_fd(), from, STEP)?,
                    Some(at) => fallocate(self.fd(), at, STEP.min(TABLES_SIZE - at))?,
                }
                room.backed[word] |= bit;
            }
        }
        Ok(())
    }

    /// Allocates a range for descriptors and backs it with pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take(&self, len: usize) -> Res<usize> {
        self.take_from(|room| &mut room.arena, len)
    }

    /// As [`Self::take`] for all the room that is left: the ranges, without pages.
    #[cfg(test)]
    pub(crate) fn exhaust(&self) -> Vec<(usize, usize)> {
        let mut room = self.lock();
        let mut ranges = Vec::new();
        let mut len = layout::arena::LEN;
        while len >= 32 {
            match room.arena.take(len) {
                Ok(at) => ranges.push((at, len)),
                Err(_) => len /= 2,
            }
        }
        ranges
    }

    /// Releases a range that [`Self::take`] returned for this length.
    pub(crate) fn give(&self, at: usize, len: usize) {
        self.lock().arena.give(at, len);
    }

    /// Allocates a range for the words of an SRQ's order, in the file that peers write, and backs
    /// it with pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take_order(&self, len: usize) -> Res<usize> {
        self.take_from(|room| &mut room.order, len)
    }

    /// Releases a range that [`Self::take_order`] returned for this length.
    pub(crate) fn give_order(&self, at: usize, len: usize) {
        self.lock().order.give(at, len);
    }

    /// Allocates a range for a receive ring or for arrivals, in the file that peers write, and
    /// backs it with pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take_ring(&self, len: usize) -> Res<usize> {
        self.take_from(|room| &mut room.rings, len)
    }

    /// Releases a range that [`Self::take_ring`] returned for this length.
    pub(crate) fn give_ring(&self, at: usize, len: usize) {
        self.lock().rings.give(at, len);
    }

    /// Backs the ring from the process in `slot` with pages, and returns its memory, all zeros.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn open_ring(&self, slot: u32) -> Res<Mapping> {
        let (at, len) = (layout::rings::ring_at(slot), layout::rings::STRIDE);
        self.lock().closed_ring.take_if(|closed| *closed == slot);
        // Pages that an earlier ring had are taken away, so that the memory is zero again.
        punch_hole(self.shared_fd(), at, len)?;
        fallocate(self.shared_fd(), at, len)?;
        Ok(Mapping::part(&self.map, at, len))
    }

    /// Takes the pages of that ring's slots away. A process that still writes into a slot gets a
    /// new page, which the next [`Self::open_ring`] takes away. The page with its positions stays;
    /// if the sender has `ended`, until another such ring is closed, so that one page is left of
    /// all of them.
    pub(crate) fn close_ring(&self, slot: u32, ended: bool) {
        let at = layout::rings::ring_at(slot) + layout::rings::SLOTS_AT;
        // A failure leaves the pages in use.
        let _ = punch_hole(
            self.shared_fd(),
            at,
            layout::rings::STRIDE - layout::rings::SLOTS_AT,
        );
        if ended {
            // the lock is held meanwhile: `open_ring` must not have opened the ring
            let mut room = self.lock();
            let last = room.closed_ring.replace(slot).filter(|last| *last != slot);
            if let Some(last) = last {
                let at = layout::rings::ring_at(last);
                let _ = punch_hole(self.shared_fd(), at, layout::rings::SLOTS_AT);
            }
        }
    }

    fn take_from(&self, which: impl Fn(&mut Room) -> &mut Arena, len: usize) -> Res<usize> {
        let mut room = self.lock();
        let at = which(&mut room).take(len)?;
        if let Err(error) = self.back_locked(&mut room, at, len) {
            which(&mut room).give(at, len);
            return Err(error);
        }
        Ok(at)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Room> {
        self.room
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
