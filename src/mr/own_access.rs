//! Regions that the processor of their owner accesses for an operation: atomics of peers
//! (`docs/protocol-rdm.md`, "Atomics"), and RMA of an endpoint to itself (`docs/rdm.md`, "RMA").
//!
//! One lock per domain makes atomics atomic with each other. If the device executes such atomics of
//! peers, it executes these too, under its own exclusion. A close takes the lock before it
//! ends the region, so afterwards no operation accesses the memory. `own_copy.rs` copies.

#![allow(unsafe_code, reason = "accesses memory for which the caller promises")]

use std::collections::HashMap;
use std::sync::Arc;

use atomic_ops::{Op, Operation};
use parking_lot::Mutex;

use super::own_copy::{PIECES, Pieces, iovec};
use super::{Access, Buffer};
use crate::errno::{FiErrno, Result};
use crate::queue::Counter;
use crate::queue::event_cell::Event;
use crate::verbs::{Device, ElementsRequest, Pd};
use crate::wire::rdm::packet::MAX_OPERANDS;

const BYTES: usize = MAX_OPERANDS as usize;

/// A region that peers can access.
#[derive(Debug)]
pub(super) struct AccessibleRegion {
    pub(super) pd: Arc<Pd>,
    /// The region's generation: a device can reuse the key of a closed region.
    pub(super) generation: u64,
    /// Of the rights, those of peers count.
    pub(super) access: Access,
    /// The address of the first byte for peers.
    pub(super) first: u64,
    pub(super) buffers: Box<[Buffer]>,
    /// The counters that count peers' operations on the region.
    pub(super) counters: Vec<(Event, Arc<Counter>)>,
}

/// The regions of a domain by key. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct AccessibleRegions {
    regions: Mutex<HashMap<u64, AccessibleRegion>>,
}

impl AccessibleRegion {
    /// Whether `len` bytes from `offset` on are in the region.
    fn contains(&self, offset: u64, len: usize) -> bool {
        let whole: u64 = self.buffers.iter().map(|buffer| buffer.len as u64).sum();
        let end = offset.checked_add(len as u64);
        end.is_some_and(|end| end <= whole)
    }

    /// The counter of an event.
    fn counter(&self, event: Event) -> Option<Arc<Counter>> {
        let mut counters = self.counters.iter();
        let found = counters.find(|(counted, _)| *counted == event);
        found.map(|(_, counter)| Arc::clone(counter))
    }
}

/// What is not copied yet of a range of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemainingRange {
    /// Address and key, as the application has them.
    pub(crate) addr: u64,
    pub(crate) key: u64,
    pub(crate) left: usize,
    /// Whether the region is read or written.
    pub(crate) event: Event,
    /// The generation of the region, once it is known.
    pub(crate) generation: Option<u64>,
    /// Whether the counters of the region count it.
    pub(crate) counted: bool,
}

/// An operation on the elements of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementsAccess<'a> {
    pub(crate) operation: Operation,
    /// Address and key, as the application of the peer has them.
    pub(crate) addr: u64,
    pub(crate) key: u64,
    /// Number of elements; their bytes are at most [`MAX_OPERANDS`].
    pub(crate) count: usize,
    /// One operand per element, and after these, for operations that compare, one more per element;
    /// empty if the operation reads only.
    pub(crate) operands: &'a [u8],
    /// Whether the peer gets the earlier values.
    pub(crate) fetches: bool,
}

impl ElementsAccess<'_> {
    /// Size of the elements in bytes.
    pub(crate) fn len(&self) -> usize {
        self.count * self.operation.datatype().size()
    }

    /// The rights that it needs: "the target buffer of fetch-atomic operations must be enabled for
    /// remote read access" (`fi_atomic(3)`).
    pub(crate) fn access(&self) -> Access {
        let mut access = Access::empty();
        access.set(Access::REMOTE_READ, self.fetches);
        access.set(Access::REMOTE_WRITE, self.operation.op().writes());
        access
    }

    /// The operands of the element at this offset.
    fn operands_at(&self, offset: usize) -> (&[u8], &[u8]) {
        let at = |offset| self.operands.get(offset..).unwrap_or_default();
        (at(offset), at(self.len() + offset))
    }
}

impl AccessibleRegions {
    pub(super) fn insert(&self, key: u64, region: AccessibleRegion) {
        // dropped without the lock
        let _former = self.regions.lock().insert(key, region);
    }

    /// Removes a region, if it is there. After the call no operation accesses its memory.
    pub(super) fn remove(&self, key: u64, generation: u64) {
        let mut regions = self.regions.lock();
        let removed = match regions.get(&key) {
            Some(region) if region.generation == generation => regions.remove(&key),
            _ => None,
        };
        drop(regions);
        drop(removed);
    }

    /// Adds a counter to a region that is open already.
    pub(super) fn add_counter(&self, key: u64, event: Event, counter: &Arc<Counter>) {
        if let Some(region) = self.regions.lock().get_mut(&key) {
            region.counters.push((event, Arc::clone(counter)));
        }
    }

    /// Executes an operation of a peer of a queue pair in `pd`. `earlier` gets the earlier values
    /// of the elements.
    ///
    /// # Errors
    /// - `EKEYREJECTED`: no region of `pd` that permits atomics has the key.
    /// - `EACCES`: the region does not permit peers to read, for an operation that fetches, or to
    ///   write, for one that can change the elements; the elements are not all inside the region,
    ///   or in more than 8 of its buffers.
    /// - `EFAULT`: they are not all mapped, or not writable; some elements may have changed.
    /// - Others of `process_vm_readv(2)`.
    pub(crate) fn change(
        &self,
        pd: &Arc<Pd>,
        change: &ElementsAccess<'_>,
        earlier: &mut [u8; BYTES],
    ) -> Result<()> {
        let counter;
        {
            let regions = self.regions.lock();
            let region = regions.get(&change.key);
            let region = region.filter(|region| Arc::ptr_eq(&region.pd, pd));
            let region = region.ok_or(FiErrno::EKEYREJECTED)?;
            if !region.access.contains(change.access()) {
                return Err(FiErrno::EACCES);
            }
            let offset = change.addr.checked_sub(region.first);
            let pieces =
                offset.and_then(|offset| Pieces::of(&region.buffers, offset, change.len()));
            let pieces = pieces.ok_or(FiErrno::EACCES)?;
            let written = if pd.device().max_elements() < BYTES {
                execute(&pieces, change, earlier)?
            } else {
                execute_by_device(pd.device(), &pieces, change, earlier)?
            };
            counter = region.counter(if written { Event::Write } else { Event::Read });
        }
        if let Some(counter) = counter {
            counter.count(1);
        }
        Ok(())
    }

    /// Copies the first bytes of a range, at most those of `local`: from the region to `local` if
    /// the event is a read, otherwise from `local` to the region. Updates the range. Counts the
    /// operation when nothing is left.
    ///
    /// # Errors
    /// - `EKEYREJECTED`: no region of `pd` has the key, or another one than before has it.
    /// - `EACCES`: the region does not permit the access, or the range is not inside it.
    /// - `EFAULT`: some bytes are not mapped, or not writable; bytes before may have been copied.
    /// - Others of `process_vm_readv(2)`.
    ///
    /// # Safety
    /// For a read the buffers of `local` are writable memory of the application.
    pub(crate) unsafe fn copy(
        &self,
        pd: &Arc<Pd>,
        range: &mut RemainingRange,
        local: &[libc::iovec],
    ) -> Result<()> {
        let counter;
        {
            let regions = self.regions.lock();
            let known = |region: &&AccessibleRegion| {
                let same = range.generation.is_none_or(|it| it == region.generation);
                same && Arc::ptr_eq(&region.pd, pd)
            };
            let region = regions.get(&range.key).filter(known);
            let region = region.ok_or(FiErrno::EKEYREJECTED)?;
            let right = match range.event {
                Event::Read => Access::REMOTE_READ,
                Event::Write => Access::REMOTE_WRITE,
            };
            if !region.access.contains(right) {
                return Err(FiErrno::EACCES);
            }
            let offset = range.addr.checked_sub(region.first);
            let offset = offset.filter(|offset| region.contains(*offset, range.left));
            let offset = offset.ok_or(FiErrno::EACCES)?;
            if range.left != 0 {
                let pieces = Pieces::first(&region.buffers, offset, range.left);
                // SAFETY: the caller promises the buffers.
                let moved = unsafe { pieces.exchange(local, range.event) }?;
                range.addr += moved as u64;
                range.left -= moved;
            }
            range.generation = Some(region.generation);
            let ended = range.counted && range.left == 0;
            counter = region.counter(range.event).filter(|_| ended);
        }
        if let Some(counter) = counter {
            counter.count(1);
        }
        Ok(())
    }
}

/// Executes an operation. Returns whether it counts as a write (`docs/mr-modes.md`). If it fails
/// with `EFAULT`, the elements before some may have changed.
fn execute(
    pieces: &Pieces,
    change: &ElementsAccess<'_>,
    earlier: &mut [u8; BYTES],
) -> Result<bool> {
    let (len, size) = (change.len(), change.operation.datatype().size());
    let values = earlier.get_mut(..len).ok_or(FiErrno::EINVAL)?;
    pieces.read(values)?;
    let mut new = [0; BYTES];
    new[..len].copy_from_slice(values);
    // one write for each run of elements that change
    let mut run = 0..0;
    for at in (0..len).step_by(size) {
        let (operand, compare) = change.operands_at(at);
        let element = &mut new[at..at + size];
        if change.operation.apply(element, operand, compare) {
            if run.end != at {
                pieces.write(&new[run.clone()], run.start)?;
                run = at..at;
            }
            run.end = at + size;
        }
    }
    pieces.write(&new[run.clone()], run.start)?;
    // a write counts as one, whatever the memory has contained
    Ok(change.operation.op() == Op::Write || earlier[..len] != new[..len])
}

/// As [`execute`], atomically with the device's own atomics on this memory.
fn execute_by_device(
    device: &Device,
    pieces: &Pieces,
    change: &ElementsAccess<'_>,
    earlier: &mut [u8; BYTES],
) -> Result<bool> {
    let (operation, (operands, compare)) = (change.operation, change.operands_at(0));
    let absent = |from: &[u8], needed: bool| needed && from.len() < change.len();
    let op = operation.op();
    if absent(operands, op.writes()) || absent(compare, op.compares()) {
        return Err(FiErrno::EINVAL);
    }
    let (op, datatype) = (op as u8, operation.datatype() as u8);
    // at most BYTES
    let numbers = (op, datatype, change.count as u16);
    let mut request = ElementsRequest::new(numbers, operands.as_ptr(), compare.as_ptr());
    let mut list = [iovec(0, 0); PIECES];
    for (to, (addr, len)) in list.iter_mut().zip(pieces.list) {
        *to = iovec(addr, len);
    }
    let list = &list[..pieces.count];
    // SAFETY: the operands were checked to be those of the operation, and `earlier` has room for
    // all operations; the buffers are in a region that peers may change.
    let changed = unsafe { device.change_elements(&mut request, list, earlier.as_mut_ptr()) }?;
    Ok(changed != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use atomic_ops::Datatype;

    /// Executes an operation on the elements at `offset` of several buffers, of which each is as
    /// long as one member of `memory`. Returns the earlier values.
    fn run(
        memory: &mut [Vec<u8>],
        offset: u64,
        (op, datatype, count): (Op, Datatype, usize),
        operands: &[u8],
    ) -> Result<Vec<u8>> {
        let buffers: Vec<_> = memory
            .iter_mut()
            .map(|bytes| Buffer {
                addr: bytes.as_mut_ptr().cast_const().cast(),
                len: bytes.len(),
            })
            .collect();
        on(&buffers, offset, (op, datatype, count), operands)
    }

    fn on(
        buffers: &[Buffer],
        offset: u64,
        (op, datatype, count): (Op, Datatype, usize),
        operands: &[u8],
    ) -> Result<Vec<u8>> {
        let change = ElementsAccess {
            operation: Operation::new(op, datatype).unwrap(),
            addr: 0,
            key: 0,
            count,
            operands,
            fetches: true,
        };
        let mut earlier = [0; BYTES];
        let pieces = Pieces::of(buffers, offset, change.len()).ok_or(FiErrno::EACCES)?;
        execute(&pieces, &change, &mut earlier)?;
        Ok(earlier[..change.len()].to_vec())
    }

    #[test]
    fn elements_can_lie_in_several_buffers() {
        let mut memory = [vec![1; 3], vec![2; 1], vec![3; 4]];
        let earlier = run(&mut memory, 1, (Op::Sum, Datatype::Uint16, 3), &[16; 6]);
        assert_eq!(earlier, Ok(vec![1, 1, 2, 3, 3, 3]));
        assert_eq!(memory, [vec![1, 17, 17], vec![18], vec![19, 19, 19, 3]]);
    }

    #[test]
    fn only_elements_that_change_are_written() {
        // the elements that are equal to the second operand are swapped
        let mut memory = [vec![9, 1, 1, 5, 1, 9]];
        let operands = [7, 7, 7, 7, 1, 1, 1, 1];
        let earlier = run(&mut memory, 1, (Op::SwapEq, Datatype::Uint8, 4), &operands);
        assert_eq!(earlier, Ok(vec![1, 1, 5, 1]));
        assert_eq!(memory, [[9, 7, 7, 5, 7, 9]]);
        let earlier = run(&mut memory, 0, (Op::Read, Datatype::Uint8, 6), &[]);
        assert_eq!(earlier, Ok(vec![9, 7, 7, 5, 7, 9]));
    }

    #[test]
    fn changes_count_as_writes() {
        let mut word = [5_u8];
        let buffers = [Buffer {
            addr: word.as_mut_ptr().cast_const().cast(),
            len: 1,
        }];
        let cases = [
            (Op::Read, &[][..], false),
            (Op::Sum, &[0], false),
            (Op::Sum, &[1], true),
            (Op::SwapEq, &[9, 1], false),
            (Op::SwapEq, &[9, 6], true),
            (Op::Min, &[10], false),
            (Op::Write, &[9], true),
        ];
        for (op, operands, written) in cases {
            let change = change(op, operands, true);
            let pieces = Pieces::of(&buffers, 0, 1).unwrap();
            let result = execute(&pieces, &change, &mut [0; BYTES]);
            assert_eq!(result, Ok(written), "{op:?} {operands:?}");
        }
    }

    /// An operation on one byte.
    fn change(op: Op, operands: &[u8], fetches: bool) -> ElementsAccess<'_> {
        ElementsAccess {
            operation: Operation::new(op, Datatype::Uint8).unwrap(),
            addr: 0,
            key: 0,
            count: 1,
            operands,
            fetches,
        }
    }

    #[test]
    fn each_operation_needs_its_rights() {
        let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
        let cases = [
            (change(Op::Read, &[], true), read),
            (change(Op::Sum, &[1], false), write),
            (change(Op::Write, &[1], false), write),
            (change(Op::Sum, &[1], true), read | write),
            (change(Op::Write, &[1], true), read | write),
            (change(Op::SwapEq, &[1, 1], true), read | write),
            (change(Op::MaskedSwap, &[1, 1], true), read | write),
        ];
        for (change, access) in cases {
            assert_eq!(change.access(), access, "{change:?}");
        }
    }

    #[test]
    fn ranges_outside_the_buffers_are_refused() {
        let mut memory = [vec![0; 8], vec![0; 8]];
        for offset in [9, 16, u64::MAX] {
            let refused = run(&mut memory, offset, (Op::Sum, Datatype::Uint64, 1), &[1; 8]);
            assert_eq!(refused, Err(FiErrno::EACCES), "{offset}");
        }
        assert_eq!(memory, [[0; 8], [0; 8]]);
        let mut many = vec![vec![0; 1]; 16];
        let refused = run(&mut many, 0, (Op::Write, Datatype::Uint128, 1), &[1; 16]);
        assert_eq!(refused, Err(FiErrno::EACCES));
    }

    #[test]
    fn memory_that_is_not_mapped_is_an_error() {
        let whole = [Buffer {
            addr: std::ptr::null(),
            len: usize::MAX,
        }];
        let sum = (Op::Sum, Datatype::Uint32, 1);
        assert_eq!(on(&whole, 8, sum, &[1; 4]), Err(FiErrno::EFAULT));
        let mut word = 5_u32;
        let at = (&raw mut word).expose_provenance() as u64;
        let earlier = on(&whole, at, sum, &1_u32.to_ne_bytes());
        assert_eq!(earlier, Ok(5_u32.to_ne_bytes().to_vec()));
        // SAFETY: a variable, which the kernel has changed.
        assert_eq!(unsafe { (&raw const word).read_volatile() }, 6);
    }
}
