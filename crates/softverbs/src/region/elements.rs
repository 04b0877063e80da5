//! Atomics on elements of all datatypes (`docs/softverbs-atomics.md`).
//!
//! An element in a word of a device buffer changes by the processor's atomics. All other elements
//! change under the locks of the words that they touch, which are those of [`super::atomic`].

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use atomic_ops::{Datatype, Op, Operation};
use rdma_core_sys::{IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, softdv_atomic};

use super::atomic::{Initiator, LOCK_WAIT, LockWait, Stripe, holder, index_of, lives, whole};
use super::remote::{AccessError, Target, resolve};
use crate::dm::{Buffer, Buffers, Shown};
use crate::environment;
use crate::hazard::{Gate, Hazard};
use crate::peer::Peer;
use crate::segment::Mapping;
use crate::segment::layout::stripe;
use crate::sync::Arc;
use crate::sys;

/// Largest size of the elements of an operation, in bytes.
pub(crate) const MAX_ELEMENTS: usize = 1024;
/// The words that so many bytes touch at most.
const MOST_WORDS: usize = MAX_ELEMENTS / 8 + 1;
const _: () = assert!(MOST_WORDS < stripe::COUNT);

/// Whether the device has these atomics.
pub(crate) fn offered() -> bool {
    static OFFERED: OnceLock<bool> = OnceLock::new();
    *OFFERED.get_or_init(|| {
        environment::ATOMICS
            .value()
            .is_none_or(|value| value != "0")
    })
}

/// What an operation does, without its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    operation: Operation,
    count: usize,
}

impl Shape {
    /// `None`: the numbers are those of no operation, or the elements are none or too large.
    pub(crate) fn new(op: u8, datatype: u8, count: u16) -> Option<Self> {
        let op = Op::of(op.into())?;
        let operation = Operation::new(op, Datatype::of(datatype.into())?)?;
        let this = Self {
            operation,
            count: count.into(),
        };
        (count != 0 && this.len() <= MAX_ELEMENTS).then_some(this)
    }

    /// The number in a request to an agent.
    pub(crate) fn to_word(self) -> u64 {
        let (op, datatype) = (self.operation.op() as u64, self.operation.datatype() as u64);
        op | datatype << 8 | (self.count as u64) << 16
    }

    /// See [`Self::to_word`].
    pub(crate) fn of_word(word: u64) -> Option<Self> {
        if word >> 32 != 0 {
            return None;
        }
        Self::new(word as u8, (word >> 8) as u8, (word >> 16) as u16)
    }

    /// Size of an element in bytes.
    fn size(self) -> usize {
        self.operation.datatype().size()
    }

    /// Size of all elements in bytes.
    pub(crate) fn len(self) -> usize {
        self.count * self.size()
    }

    /// Size of the operands, and of the values to compare with, in bytes.
    pub(crate) fn operands(self) -> (usize, usize) {
        match self.operation.op() {
            Op::Read => (0, 0),
            op if op.compares() => (self.len(), self.len()),
            _ => (self.len(), 0),
        }
    }

    /// The operands of a request, and the values to compare with; `None`: they are NULL.
    ///
    /// # Safety
    /// Operands that are not NULL are readable, and unchanged while the result is used.
    pub(crate) unsafe fn operands_of<'a>(self, atomic: &softdv_atomic) -> Option<[&'a [u8]; 2]> {
        let bytes = |at: *const c_void, len: usize| match len {
            0 => Some(&[][..]),
            _ if at.is_null() => None,
            // SAFETY: the caller's promise.
            len => Some(unsafe { std::slice::from_raw_parts(at.cast(), len) }),
        };
        let (operands, compare) = self.operands();
        Some([
            bytes(atomic.operands, operands)?,
            bytes(atomic.compare, compare)?,
        ])
    }

    /// The rights that the operation needs; 0 if it has no effect.
    pub(crate) fn rights(self, fetches: bool) -> u32 {
        let write = if self.operation.op().writes() {
            IBV_ACCESS_REMOTE_WRITE
        } else {
            0
        };
        let read = if fetches { IBV_ACCESS_REMOTE_READ } else { 0 };
        write | read
    }
}

/// An operation in execution.
pub(crate) struct Elements<'a> {
    pub(crate) shape: Shape,
    /// The operands, and the values to compare with: [`Shape::operands`] bytes.
    pub(crate) operands: [&'a [u8]; 2],
    /// Gets the earlier values, [`Shape::len`] bytes.
    pub(crate) earlier: &'a mut [u8],
    /// Number of elements that have changed.
    pub(crate) changed: u32,
}

impl Elements<'_> {
    /// Applies the operation to the element at `offset`. Returns whether it is to be written.
    fn apply(&self, offset: usize, element: &mut [u8]) -> bool {
        let [operand, compare] = self
            .operands
            .map(|bytes| bytes.get(offset..).unwrap_or_default());
        self.shape.operation.apply(element, operand, compare)
    }

    /// Counts an element that has become `new`.
    fn count(&mut self, earlier: &[u8], new: &[u8]) {
        let differs = self.shape.operation.op() == Op::Write || earlier != new;
        self.changed += u32::from(differs);
    }
}

/// A device buffer in which an element lies.
enum BufferMap {
    Mapped(Arc<Mapping>),
    Own(Arc<Buffer>),
}

impl BufferMap {
    fn map(&self) -> &Mapping {
        match self {
            Self::Mapped(map) => map,
            Self::Own(buffer) => &buffer.map,
        }
    }
}

/// The memory on which an operation works: that of a process.
struct Memory<'a, I, F> {
    initiator: &'a I,
    /// Its owner.
    peer: &'a Peer,
    /// The owner's buffer that contains these bytes, and their offset in it.
    buffer: F,
    wait: Duration,
}

/// Changes elements of a peer's region. Waits at most `wait` for the locks.
///
/// # Errors
/// [`AccessError`]. `Dead`, `Refused`, `Unavailable`: nothing has changed. `Remote`: elements
/// before one may have changed if memory is not writable.
pub(crate) fn change_elements(
    initiator: &impl Initiator,
    peer: &Peer,
    (target, gate): (Target, Gate<'_>),
    right: u32,
    wait: Duration,
    elements: &mut Elements<'_>,
) -> Result<(), AccessError> {
    let (slot, _) = initiator.identity();
    let entered = gate.enter(right).ok_or(AccessError::Moved)?;
    let used = gate.used(target.key, right);
    let hazard = Hazard::publish(&peer.hazards, &peer.map, slot, used);
    if !gate.is_open() {
        return Err(AccessError::Moved);
    }
    let len = elements.shape.len();
    let resolved = resolve(&peer.map, target, target.addr, len as u64, right);
    let resolved = resolved.filter(|resolved| !wraps(resolved.addr, len));
    let resolved = resolved.ok_or(AccessError::Remote)?;
    let writes = elements.shape.operation.op().writes();
    // most memory is in no buffer, so the table is not searched for each element
    let ordinary =
        resolved.direct.stamp == 0 && !Shown::any(&peer.map, resolved.addr, len as u64, writes);
    let memory = Memory {
        initiator,
        peer,
        // the address, not the key, decides, as in `change`
        buffer: |addr: u64, len: usize| {
            if resolved.direct.stamp != 0 {
                // the whole region is in this buffer
                let map = peer.direct(resolved.direct.stamp);
                // a wrong sum is outside the mapping, or in other memory of this peer
                let inside = addr.wrapping_sub(resolved.addr);
                let offset = resolved.direct.offset.wrapping_add(inside);
                return Ok(Some((
                    BufferMap::Mapped(map.ok_or(AccessError::Refused)?),
                    offset,
                )));
            }
            if ordinary {
                return Ok(None);
            }
            let Some(shown) = Shown::at(&peer.map, addr, writes) else {
                return Ok(None);
            };
            let offset = addr.wrapping_sub(shown.addr);
            if len as u64 > shown.len - offset {
                return Ok(None);
            }
            let map = peer.direct(shown.stamp).ok_or(AccessError::Refused)?;
            Ok(Some((BufferMap::Mapped(map), offset)))
        },
        wait,
    };
    let result = memory.change(&[(resolved.addr, len)], elements);
    drop((hazard, entered));
    result
}

/// As [`change_elements`], if all elements are words of one buffer of the device. The caller holds
/// a hazard for the key. `false`: they are not, or an error; nothing has changed.
#[inline]
pub(crate) fn change_words(
    peer: &Peer,
    target: Target,
    right: u32,
    elements: &mut Elements<'_>,
) -> bool {
    let (len, size) = (elements.shape.len(), elements.shape.size());
    let Some(resolved) = resolve(&peer.map, target, target.addr, len as u64, right) else {
        return false;
    };
    // as `Memory::way` decides for each element
    let (stamp, offset) = (resolved.direct.stamp, resolved.direct.offset);
    let words = size <= 8 && (resolved.addr | offset).is_multiple_of(size as u64);
    if stamp == 0 || !words {
        return false;
    }
    let Some(map) = peer.direct(stamp) else {
        return false;
    };
    let room = map.len() as u64;
    if offset > room || room - offset < len as u64 {
        return false;
    }
    elements.changed = 0;
    for at in (0..len).step_by(size) {
        // every word is inside the mapping
        let _ = change_word(&map, offset + at as u64, at, elements);
    }
    true
}

/// Changes elements of this process's own memory, which lie in the ranges one after the other;
/// `own` is this process as a peer. For the memory of a region the caller holds a hazard for its
/// key.
///
/// # Errors
/// As [`change_elements`].
pub(crate) fn change_own_elements(
    initiator: &impl Initiator,
    buffers: &Buffers,
    own: &Peer,
    ranges: &[(u64, usize)],
    wait: Duration,
    elements: &mut Elements<'_>,
) -> Result<(), AccessError> {
    if ranges.iter().any(|&(addr, len)| wraps(addr, len)) {
        return Err(AccessError::Remote);
    }
    let ordinary = !ranges
        .iter()
        .any(|&(addr, len)| buffers.any(addr, len as u64));
    let writes = elements.shape.operation.op().writes();
    let memory = Memory {
        initiator,
        peer: own,
        buffer: |addr: u64, len: usize| {
            if ordinary {
                return Ok(None);
            }
            let found = buffers.find(addr, len as u64, writes);
            Ok(found.map(|(buffer, offset)| (BufferMap::Own(buffer), offset)))
        },
        wait,
    };
    memory.change(ranges, elements)
}

/// Whether a range wraps at the end of the address space, where no memory is. Its words are not
/// counted, and their locks not acquired: the owner of a region can publish any address.
fn wraps(addr: u64, len: usize) -> bool {
    addr.checked_add(len as u64).is_none()
}

/// The error of an operation. `begun`: elements have changed, so that an agent must not repeat it.
fn after(begun: bool, error: AccessError) -> AccessError {
    match error {
        AccessError::Refused | AccessError::Dead | AccessError::Unavailable if begun => {
            AccessError::Remote
        }
        error => error,
    }
}

/// How an element changes.
enum Way {
    /// In a word at this offset of a mapping.
    Word(BufferMap, u64),
    Locked,
}

impl<I, F> Memory<'_, I, F>
where
    I: Initiator,
    F: Fn(u64, usize) -> Result<Option<(BufferMap, u64)>, AccessError>,
{
    /// Executes an operation on elements in `ranges`, which have [`Shape::len`] bytes in total.
    fn change(
        &self,
        ranges: &[(u64, usize)],
        elements: &mut Elements<'_>,
    ) -> Result<(), AccessError> {
        let (len, size) = (elements.shape.len(), elements.shape.size());
        elements.changed = 0;
        // elements under locks that are not executed yet begin here
        let mut locked = 0;
        for at in (0..len).step_by(size) {
            let way = self.way(ranges, at, size);
            let Way::Word(buffer, offset) = way.map_err(|error| after(locked != 0, error))? else {
                continue;
            };
            let run = self.change_locked(ranges, locked..at, elements);
            run.map_err(|error| after(locked != 0, error))?;
            change_word(buffer.map(), offset, at, elements)?;
            locked = at + size;
        }
        let run = self.change_locked(ranges, locked..len, elements);
        run.map_err(|error| after(locked != 0, error))
    }

    /// How the element at `at` changes.
    fn way(&self, ranges: &[(u64, usize)], at: usize, size: usize) -> Result<Way, AccessError> {
        if size > 8 {
            return Ok(Way::Locked);
        }
        let mut before = 0;
        for &(addr, len) in ranges {
            let offset = at - before;
            if offset < len {
                let addr = addr.wrapping_add(offset as u64);
                if size > len - offset || !addr.is_multiple_of(size as u64) {
                    break;
                }
                let found = (self.buffer)(addr, size)?;
                let in_word = found.filter(|(_, offset)| offset.is_multiple_of(size as u64));
                return Ok(in_word.map_or(Way::Locked, |(buffer, at)| Way::Word(buffer, at)));
            }
            before += len;
        }
        Ok(Way::Locked)
    }

    /// Executes the operation on the elements of these bytes, under the locks of their words.
    fn change_locked(
        &self,
        ranges: &[(u64, usize)],
        part: std::ops::Range<usize>,
        elements: &mut Elements<'_>,
    ) -> Result<(), AccessError> {
        if part.is_empty() {
            return Ok(());
        }
        if !self.peer.check_alive() {
            return Err(AccessError::Dead);
        }
        if self.peer.refuses() {
            return Err(AccessError::Refused);
        }
        if let [(addr, len)] = *ranges
            && len == elements.shape.size()
            && len <= 8
            && addr.is_multiple_of(len as u64)
        {
            return self.change_one(addr, elements);
        }
        // after the first element the operation is not repeated, so it waits
        let wait = if part.start == 0 {
            self.wait
        } else {
            LOCK_WAIT
        };
        let locks = self.lock(ranges, part.clone(), LockWait::new(wait));
        let locks = locks.ok_or(AccessError::Unavailable)?;
        let (first, size) = (part.start, elements.shape.size());
        self.read(ranges, first, &mut elements.earlier[part.clone()])?;
        let mut bytes = [0; MAX_ELEMENTS];
        let new = &mut bytes[..part.len()];
        new.copy_from_slice(&elements.earlier[part.clone()]);
        // one write for each run of elements that change
        let (mut run, mut written) = (0..0, false);
        for at in (0..part.len()).step_by(size) {
            let element = at..at + size;
            if elements.apply(first + at, &mut new[element.clone()]) {
                if run.end != at {
                    self.write_run(ranges, first + run.start, &new[run.clone()], &mut written)?;
                    run = at..at;
                }
                run.end = at + size;
            }
        }
        self.write_run(ranges, first + run.start, &new[run], &mut written)?;
        drop(locks);
        for at in (0..part.len()).step_by(size) {
            let mut earlier = [0; atomic_ops::MAX_SIZE];
            let earlier = &mut earlier[..size];
            earlier.copy_from_slice(&elements.earlier[first + at..][..size]);
            elements.count(earlier, &new[at..at + size]);
        }
        Ok(())
    }

    /// Fast path of [`Self::change_locked`]: the operation on one element, which is in a word.
    fn change_one(&self, addr: u64, elements: &mut Elements<'_>) -> Result<(), AccessError> {
        let (slot, cookie) = self.initiator.identity();
        let stripe = Stripe::lock(
            &self.peer.map,
            addr,
            holder(slot, cookie),
            self.wait,
            |it| lives(self.initiator, it),
        );
        let stripe = stripe.ok_or(AccessError::Unavailable)?;
        let (pid, size) = (self.peer.identity.pid, elements.shape.size());
        let remote = [sys::as_local(addr, size)];
        let mut word = [0_u8; 8];
        let old = word.get_mut(..size).unwrap_or_default();
        let local = [sys::as_local(
            old.as_mut_ptr().expose_provenance() as u64,
            size,
        )];
        whole(self.peer, sys::vm_read(pid, &local, &remote), size)?;
        let mut changed = word;
        let new = changed.get_mut(..size).unwrap_or_default();
        if elements.apply(0, new) {
            let local = [sys::as_local(new.as_ptr().expose_provenance() as u64, size)];
            whole(self.peer, sys::vm_write(pid, &local, &remote), size)?;
        }
        drop(stripe);
        let old = word.get(..size).unwrap_or_default();
        elements.earlier.copy_from_slice(old);
        elements.count(old, new);
        Ok(())
    }

    /// Acquires the locks of all words of a part, in ascending order.
    fn lock(
        &self,
        ranges: &[(u64, usize)],
        part: std::ops::Range<usize>,
        mut wait: LockWait,
    ) -> Option<[Option<Stripe<'_>>; MOST_LOCKS]> {
        let mut wanted = [0_u64; stripe::COUNT / 64];
        each_range(ranges, part.start, part.len(), |addr, len| {
            // the range does not wrap, see `wraps`
            let last = addr.saturating_add(len as u64 - 1);
            for word in addr >> 3..=last >> 3 {
                let index = index_of(word << 3);
                wanted[index / 64] |= 1 << (index % 64);
            }
        });
        let (slot, cookie) = self.initiator.identity();
        let own = holder(slot, cookie);
        let mut held = [const { None }; MOST_LOCKS];
        let mut free = held.iter_mut();
        for (at, mut bits) in wanted.into_iter().enumerate() {
            while bits != 0 {
                let index = 64 * at + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let lives = |held| lives(self.initiator, held);
                *free.next()? = Some(Stripe::lock_index(
                    &self.peer.map,
                    index,
                    own,
                    &mut wait,
                    lives,
                )?);
            }
        }
        Some(held)
    }

    /// Reads bytes of the elements from `offset` on.
    fn read(
        &self,
        ranges: &[(u64, usize)],
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), AccessError> {
        let pid = self.peer.identity.pid;
        let (list, count) = remote(ranges, offset, to.len());
        let local = [sys::as_local(
            to.as_mut_ptr().expose_provenance() as u64,
            to.len(),
        )];
        whole(
            self.peer,
            sys::vm_read(pid, &local, &list[..count]),
            to.len(),
        )
    }

    /// As [`Self::write`]; `written`: elements have changed before.
    fn write_run(
        &self,
        ranges: &[(u64, usize)],
        offset: usize,
        from: &[u8],
        written: &mut bool,
    ) -> Result<(), AccessError> {
        let begun = std::mem::replace(written, *written || !from.is_empty());
        let done = self.write(ranges, offset, from);
        done.map_err(|error| after(begun, error))
    }

    /// Writes bytes of the elements from `offset` on.
    fn write(
        &self,
        ranges: &[(u64, usize)],
        offset: usize,
        from: &[u8],
    ) -> Result<(), AccessError> {
        if from.is_empty() {
            return Ok(());
        }
        let pid = self.peer.identity.pid;
        let (list, count) = remote(ranges, offset, from.len());
        let local = [sys::as_local(
            from.as_ptr().expose_provenance() as u64,
            from.len(),
        )];
        whole(
            self.peer,
            sys::vm_write(pid, &local, &list[..count]),
            from.len(),
        )
    }
}

/// Maximum number of ranges of an operation.
pub(crate) const MAX_RANGES: usize = 8;
/// Each range can touch one word more than its bytes fill.
const MOST_LOCKS: usize = MOST_WORDS + MAX_RANGES;
const _: () = assert!(MOST_LOCKS <= stripe::COUNT);

/// Calls `each` with the parts of the ranges that `len` bytes from `offset` on cover.
fn each_range(
    ranges: &[(u64, usize)],
    mut offset: usize,
    mut len: usize,
    mut each: impl FnMut(u64, usize),
) {
    for &(addr, room) in ranges {
        let skipped = offset.min(room);
        let part = (room - skipped).min(len);
        offset -= skipped;
        if part != 0 {
            each(addr.wrapping_add(skipped as u64), part);
            len -= part;
        }
    }
}

/// As [`each_range`], as a list for the kernel.
fn remote(
    ranges: &[(u64, usize)],
    offset: usize,
    len: usize,
) -> ([libc::iovec; MAX_RANGES], usize) {
    let mut list = [sys::as_local(0, 0); MAX_RANGES];
    let mut count = 0;
    each_range(ranges, offset, len, |addr, len| {
        if let Some(place) = list.get_mut(count) {
            *place = sys::as_local(addr, len);
            count += 1;
        }
    });
    (list, count)
}

/// An integer that the processor changes atomically.
trait Word: Copy + PartialEq {
    const SIZE: usize;
    /// # Safety
    /// `at` is aligned and valid for an atomic access.
    unsafe fn load(at: *mut u8) -> Self;
    /// Stores `new` if the word is `old`; otherwise returns the word.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn swap(at: *mut u8, old: Self, new: Self) -> Result<Self, Self>;
    fn to_bytes(self) -> [u8; 8];
    fn of_bytes(bytes: [u8; 8]) -> Self;
}

macro_rules! word {
    ($int:ty, $atomic:ty) => {
        impl Word for $int {
            const SIZE: usize = size_of::<$int>();

            unsafe fn load(at: *mut u8) -> Self {
                // SAFETY: the caller promises an aligned, valid word.
                unsafe { <$atomic>::from_ptr(at.cast()) }.load(Ordering::Acquire)
            }

            unsafe fn swap(at: *mut u8, old: Self, new: Self) -> Result<Self, Self> {
                // SAFETY: the caller promises an aligned, valid word.
                let word = unsafe { <$atomic>::from_ptr(at.cast()) };
                word.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Acquire)
            }

            fn to_bytes(self) -> [u8; 8] {
                let mut bytes = [0; 8];
                bytes[..Self::SIZE].copy_from_slice(&self.to_ne_bytes());
                bytes
            }

            fn of_bytes(bytes: [u8; 8]) -> Self {
                let mut own = [0; Self::SIZE];
                own.copy_from_slice(&bytes[..Self::SIZE]);
                Self::from_ne_bytes(own)
            }
        }
    };
}

word!(u8, AtomicU8);
word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);

/// Executes the operation on the element at `at`, in a word of a mapping.
///
/// # Errors
/// [`AccessError::Remote`]: the word is outside the mapping.
fn change_word(
    map: &Mapping,
    offset: u64,
    at: usize,
    elements: &mut Elements<'_>,
) -> Result<(), AccessError> {
    let size = elements.shape.size() as u64;
    let room = map.len() as u64;
    let inside = offset.is_multiple_of(size) && offset < room && room - offset >= size;
    if !inside {
        return Err(AccessError::Remote);
    }
    let word = map.bytes(offset as usize, size as usize);
    // SAFETY: the element is inside the mapping, which begins at a page, and at a multiple of its
    // size. Other processes change it by atomics or instructions of the same kind.
    unsafe {
        match size {
            1 => swap::<u8>(word, at, elements),
            2 => swap::<u16>(word, at, elements),
            4 => swap::<u32>(word, at, elements),
            _ => swap::<u64>(word, at, elements),
        }
    }
    Ok(())
}

/// # Safety
/// As [`Word::load`].
#[inline]
unsafe fn swap<W: Word>(word: *mut u8, at: usize, elements: &mut Elements<'_>) {
    // SAFETY: the caller's promise.
    let mut old = unsafe { W::load(word) };
    let (earlier, new) = loop {
        let earlier = old.to_bytes();
        let mut new = earlier;
        if !elements.apply(at, &mut new[..W::SIZE]) {
            break (earlier, earlier);
        }
        // SAFETY: the caller's promise.
        match unsafe { W::swap(word, old, W::of_bytes(new)) } {
            Ok(_) => break (earlier, new),
            Err(found) => old = found,
        }
    };
    elements.earlier[at..at + W::SIZE].copy_from_slice(&earlier[..W::SIZE]);
    elements.count(&earlier[..W::SIZE], &new[..W::SIZE]);
}
