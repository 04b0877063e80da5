//! Event cells (`FI_RMA_EVENT`): words to which initiators add 1 after each operation on a region
//! with counted accesses. The region's counters read them. `docs/protocol.md`, "Counted events".
//!
//! A cell has 16 bytes: the count of writes and atomics, and the count of reads. Both only
//! increase, also when the cell is reused for another region; a counter therefore adds the
//! difference since its last read. A cell is reused only when no peer can add to it for the
//! previous region; except, on soft0, a peer that is stopped while it adds: the cell does not wait
//! for that, so it is reused as late as possible. Peers have access to every cell of a protection
//! domain, so a faulty peer can falsify any count.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys as sys;

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::verbs::{Pd, RemoteAddr, Rkey, Words};

/// Maximum number of event cells in use per protection domain.
const CELLS: usize = 1 << 16;
/// The event cells that count a part of an operation. An operation on several ranges, or in several
/// parts, is one operation for each region and one for the endpoint (`FI_CNTR_EVENTS_COMP`,
/// `fi_cntr(3)`): the last part there counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) by_region: bool,
    pub(crate) by_endpoint: bool,
}

impl Counted {
    /// An operation in one part.
    pub(crate) const WHOLE: Self = Self {
        by_region: true,
        by_endpoint: true,
    };
    /// A part of a range, with more of that range behind it.
    pub(crate) const NOT: Self = Self {
        by_region: false,
        by_endpoint: false,
    };

    /// The last part of a range. `later`: the keys of the ranges of the operation behind it.
    pub(crate) fn of_range(key: u64, mut later: impl ExactSizeIterator<Item = u64>) -> Self {
        Self {
            by_endpoint: later.len() == 0,
            by_region: later.all(|other| other != key),
        }
    }
}

/// Words of a cell.
const WORDS: usize = 2;

/// The kinds of events that a cell counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// RMA writes and atomics.
    Write = 0,
    /// RMA reads.
    Read = 1,
}

impl Event {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; WORDS] = [Self::Write, Self::Read];

    /// The events that a counter with these flags counts.
    pub(crate) fn of(kinds: Flags) -> impl Iterator<Item = Self> + Clone {
        let asked = move |event: &Self| kinds.contains(event.kind());
        Self::ALL.into_iter().filter(asked)
    }

    /// The flag of the event in `fi_cntr(3)`.
    fn kind(self) -> Flags {
        match self {
            Self::Write => Flags::REMOTE_WRITE,
            Self::Read => Flags::REMOTE_READ,
        }
    }

    /// Offset of the event's word in the cell, in bytes.
    pub(crate) fn offset(self) -> u64 {
        self as u64 * 8
    }
}

/// The cells of a protection domain. Thread safe.
#[derive(Debug)]
pub(crate) struct Cells {
    words: Words,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Cells that were in use, in the order in which they became free.
    back: VecDeque<u32>,
    /// The first cell that was never used.
    next: u32,
}

impl Cells {
    /// Allocates and registers all cells; their addresses do not change.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering memory.
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Arc<Self>> {
        let rights = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
        Ok(Arc::new(Self {
            words: Words::new(pd, CELLS * WORDS, rights)?,
            free: Mutex::default(),
        }))
    }

    pub(crate) fn rkey(&self) -> Rkey {
        self.words.rkey()
    }

    /// Reserves a cell until the returned reference is dropped: one that was never used, or else
    /// the one that has been free for the longest time.
    ///
    /// # Errors
    /// `ENOMEM`: all cells are in use.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Arc<Cell>> {
        let mut free = self.free.lock();
        let index = if (free.next as usize) < CELLS {
            free.next += 1;
            free.next - 1
        } else {
            free.back.pop_front().ok_or(FiErrno::ENOMEM)?
        };
        drop(free);
        Ok(Arc::new(Cell {
            cells: Arc::clone(self),
            index,
        }))
    }
}

/// One cell. Released when its last reference is dropped.
#[derive(Debug)]
pub(crate) struct Cell {
    cells: Arc<Cells>,
    index: u32,
}

impl Cell {
    /// Address of the cell.
    pub(crate) fn addr(&self) -> RemoteAddr {
        self.cells.words.remote_addr(self.index as usize * WORDS)
    }

    /// The count of an event since the cells were allocated; wraps.
    #[inline]
    pub(crate) fn load(&self, event: Event) -> u64 {
        let word = self.index as usize * WORDS + event as usize;
        self.cells.words.load(word)
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        self.cells.free.lock().back.push_back(self.index);
    }
}

/// A counter's position in one count of a cell.
#[derive(Debug)]
pub(crate) struct Watch {
    cell: Arc<Cell>,
    event: Event,
    seen: u64,
}

impl Watch {
    /// Counts the events after this call.
    pub(crate) fn new(cell: &Arc<Cell>, event: Event) -> Self {
        Self {
            seen: cell.load(event),
            cell: Arc::clone(cell),
            event,
        }
    }

    /// Whether the cell is the watched one.
    pub(crate) fn is_of(&self, cell: &Arc<Cell>) -> bool {
        Arc::ptr_eq(&self.cell, cell)
    }

    /// The number of events since the last call.
    #[inline]
    pub(crate) fn take(&mut self) -> u64 {
        let now = self.cell.load(self.event);
        now.wrapping_sub(std::mem::replace(&mut self.seen, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::devices;

    #[test]
    fn an_operation_on_several_ranges_counts_once_for_each_region() {
        let keys = [7, 8, 7, 9];
        let counted =
            |index: usize| Counted::of_range(keys[index], keys[index + 1..].iter().copied());
        let by_region = [0, 1, 2, 3].map(|index| counted(index).by_region);
        let by_endpoint = [0, 1, 2, 3].map(|index| counted(index).by_endpoint);
        assert_eq!(by_region, [false, true, true, true]);
        assert_eq!(by_endpoint, [false, false, false, true]);
    }

    #[test]
    fn a_cell_is_given_out_again_only_when_nobody_holds_it() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let cells = Cells::new(&Pd::alloc(&device).unwrap()).unwrap();
        let all: Vec<_> = (0..CELLS).map(|_| cells.take().unwrap()).collect();
        assert_eq!(cells.take().err(), Some(FiErrno::ENOMEM));
        let mut places: Vec<_> = all.iter().map(|cell| cell.addr()).collect();
        places.sort_unstable();
        assert!(
            places
                .windows(2)
                .all(|pair| pair[0].checked_add(16) == Some(pair[1]))
        );
        let held = Arc::clone(&all[7]);
        let (held_at, other_at) = (held.addr(), all[8].addr());
        let mut all = all;
        all.drain(7..9);
        let again = cells.take().unwrap();
        assert_eq!(again.addr(), other_at);
        assert!(cells.take().is_err(), "somebody holds {held_at:?}");
        drop(held);
        assert_eq!(cells.take().unwrap().addr(), held_at);
    }

    #[test]
    fn a_cell_is_reused_as_late_as_possible() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let cells = Cells::new(&Pd::alloc(&device).unwrap()).unwrap();
        let addrs: Vec<_> = (0..CELLS).map(|_| cells.take().unwrap().addr()).collect();
        let mut distinct = addrs.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), CELLS);
        for addr in addrs {
            assert_eq!(cells.take().unwrap().addr(), addr);
        }
    }

    #[test]
    fn what_came_before_does_not_count_and_wrapping_does_no_harm() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let cells = Cells::new(&Pd::alloc(&device).unwrap()).unwrap();
        let cell = cells.take().unwrap();
        let word = cell.index as usize * WORDS;
        cells.words.store(word, u64::MAX - 1);
        let mut watch = Watch::new(&cell, Event::Write);
        assert_eq!(watch.take(), 0);
        cells.words.store(word, 3);
        cells.words.store(word + 1, 77);
        assert_eq!(watch.take(), 5);
        assert_eq!(watch.take(), 0);
    }
}
