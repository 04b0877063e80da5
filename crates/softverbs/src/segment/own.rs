//! The segment of this process.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::arena::Arena;
use super::layout::{self, OWNED, SEGMENT_SIZE, SHARED_SIZE, TABLES_SIZE, header};
use super::mapping::Mapping;
use crate::sync::Arc;
use crate::sys::{Res, Tables, fallocate, inode_of, memfd_create, zeroed};

/// This process's segment: its two files, their mapping, and what of it has pages and is in use.
#[derive(Debug)]
pub(crate) struct OwnSegment {
    shared: OwnedFd,
    tables: OwnedFd,
    /// Nobody but this process can write into its tables; where the kernel can't promise that, nobody's are asked for it.
    pub(crate) guarded: bool,
    pub(crate) map: Arc<Mapping>,
    room: Mutex<Room>,
}

#[derive(Debug)]
struct Room {
    arena: Arena,
    order: Arena,
    /// One bit for each [`STEP`] bytes that has pages.
    backed: Box<[u64]>,
}

/// How much gets pages at once.
const STEP: usize = 64 << 10;

impl OwnSegment {
    /// # Errors
    /// `ENOMEM`, `EMFILE`, or what else the kernel says of making and mapping a file.
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
                backed: zeroed(SEGMENT_SIZE / STEP / 64 + 1)?,
            }),
        };
        segment.back_halves(0, layout::announce::END)?;
        segment.back(
            layout::stripe::AT,
            layout::stripe::STRIDE * layout::stripe::COUNT,
        )?;
        // A member of a domain is looked for here before it has shown anything.
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

    /// The tables' inode; they name the other file.
    ///
    /// # Errors
    /// What the kernel says of looking at an open file.
    pub(crate) fn inode(&self) -> Res<u64> {
        inode_of(&self.tables)
    }

    /// The tables' descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.tables.as_raw_fd()
    }

    /// The descriptor of the file that peers write.
    pub(crate) fn shared_fd(&self) -> RawFd {
        self.shared.as_raw_fd()
    }

    /// Makes sure that a range has pages, so that no access to it can fail.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn back(&self, at: usize, len: usize) -> Res<()> {
        self.back_locked(&mut self.lock(), at, len)
    }

    /// As [`Self::back`], of entries with a half in either file.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn back_halves(&self, at: usize, len: usize) -> Res<()> {
        self.back(at, len)?;
        self.back(OWNED + at, len)
    }

    fn back_locked(&self, room: &mut Room, at: usize, len: usize) -> Res<()> {
        // No step has a part in both files.
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

    /// A place for descriptors, with pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take(&self, len: usize) -> Res<usize> {
        self.take_from(|room| &mut room.arena, len)
    }

    /// Gives back what [`Self::take`] gave for this length.
    pub(crate) fn give(&self, at: usize, len: usize) {
        self.lock().arena.give(at, len);
    }

    /// A place for an order's words, which peers write, with pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take_order(&self, len: usize) -> Res<usize> {
        self.take_from(|room| &mut room.order, len)
    }

    /// Gives back what [`Self::take_order`] gave for this length.
    pub(crate) fn give_order(&self, at: usize, len: usize) {
        self.lock().order.give(at, len);
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
