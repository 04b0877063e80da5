//! The segment of this process.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::arena::Arena;
use super::layout::{self, SEGMENT_SIZE, header};
use super::mapping::Mapping;
use crate::sync::Arc;
use crate::sys::{Res, fallocate, inode_of, memfd_create, zeroed};

/// This process's segment: the file, its mapping, and what of it has pages and is in use.
#[derive(Debug)]
pub(crate) struct OwnSegment {
    file: OwnedFd,
    pub(crate) map: Arc<Mapping>,
    room: Mutex<Room>,
}

#[derive(Debug)]
struct Room {
    arena: Arena,
    /// One bit for each [`STEP`] bytes that has pages.
    backed: Box<[u64]>,
}

/// How much gets pages at once.
const STEP: usize = 64 << 10;

impl OwnSegment {
    /// # Errors
    /// `ENOMEM`, `EMFILE`, or what else the kernel says of making and mapping a file.
    pub(crate) fn create(cookie: u64, node: u32, barriers: bool) -> Res<Self> {
        let file = memfd_create(c"softverbs", SEGMENT_SIZE)?;
        let map = Arc::try_new(Mapping::new(&file, SEGMENT_SIZE)?)?;
        let segment = Self {
            file,
            map,
            room: Mutex::new(Room {
                arena: Arena::new(layout::arena::AT, layout::arena::LEN)?,
                backed: zeroed(SEGMENT_SIZE / STEP / 64 + 1)?,
            }),
        };
        segment.back(0, layout::announce::END)?;
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
        map.u64(header::MAGIC)
            .store(layout::MAGIC, Ordering::Release);
        Ok(segment)
    }

    /// # Errors
    /// What the kernel says of looking at an open file.
    pub(crate) fn inode(&self) -> Res<u64> {
        inode_of(&self.file)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Makes sure that a range has pages, so that no access to it can fail.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn back(&self, at: usize, len: usize) -> Res<()> {
        let mut room = self.lock();
        Self::back_locked(&self.file, &mut room, at, len)
    }

    fn back_locked(file: &OwnedFd, room: &mut Room, at: usize, len: usize) -> Res<()> {
        for step in at / STEP..(at + len).div_ceil(STEP) {
            let (word, bit) = (step / 64, 1u64 << (step % 64));
            if room.backed[word] & bit == 0 {
                let from = step * STEP;
                fallocate(file.as_raw_fd(), from, STEP.min(SEGMENT_SIZE - from))?;
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
        let mut room = self.lock();
        let at = room.arena.take(len)?;
        if let Err(error) = Self::back_locked(&self.file, &mut room, at, len) {
            room.arena.give(at, len);
            return Err(error);
        }
        Ok(at)
    }

    /// Gives back what [`Self::take`] gave for this length.
    pub(crate) fn give(&self, at: usize, len: usize) {
        self.lock().arena.give(at, len);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Room> {
        self.room
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
