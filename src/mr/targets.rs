//! Regions as targets of operations that the processor of their owner executes: atomics of peers
//! (`docs/protocol-rdm.md`, "Atomics"), and RMA of an endpoint to itself (`docs/rdm.md`, "RMA").
//!
//! One lock per domain makes atomics atomic with each other. If the device executes such atomics of
//! peers, it executes these too, under its own exclusion. A close takes the lock before it
//! ends the region, so afterwards no operation accesses the memory. The memory is accessed by
//! `process_vm_readv(2)` of this process, because a region can contain addresses that are not
//! mapped: then the operation fails, and the process does not.

#![allow(
    unsafe_code,
    reason = "process_vm_readv(2) and process_vm_writev(2) of this process"
)]

use std::collections::HashMap;
use std::sync::Arc;

use atomic_ops::{Op, Operation};
use parking_lot::Mutex;

use super::{Access, Buffer};
use crate::errno::{FiErrno, Result};
use crate::queue::Counter;
use crate::queue::event_cell::Event;
use crate::verbs::{Device, ElementsRequest, Pd};
use crate::wire::rdm::packet::MAX_OPERANDS;

const BYTES: usize = MAX_OPERANDS as usize;

/// A region that peers can access.
#[derive(Debug)]
pub(super) struct Target {
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
pub(crate) struct Targets {
    regions: Mutex<HashMap<u64, Target>>,
}

impl Target {
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
pub(crate) struct Span {
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
pub(crate) struct Change<'a> {
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

impl Change<'_> {
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

impl Targets {
    pub(super) fn insert(&self, key: u64, target: Target) {
        // dropped without the lock
        let _former = self.regions.lock().insert(key, target);
    }

    /// Removes a region, if it is there. After the call no operation accesses its memory.
    pub(super) fn remove(&self, key: u64, generation: u64) {
        let mut regions = self.regions.lock();
        let removed = match regions.get(&key) {
            Some(target) if target.generation == generation => regions.remove(&key),
            _ => None,
        };
        drop(regions);
        drop(removed);
    }

    /// Adds a counter to a region that is open already.
    pub(super) fn add_counter(&self, key: u64, event: Event, counter: &Arc<Counter>) {
        if let Some(target) = self.regions.lock().get_mut(&key) {
            target.counters.push((event, Arc::clone(counter)));
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
        change: &Change<'_>,
        earlier: &mut [u8; BYTES],
    ) -> Result<()> {
        let counter;
        {
            let regions = self.regions.lock();
            let target = regions.get(&change.key);
            let target = target.filter(|target| Arc::ptr_eq(&target.pd, pd));
            let target = target.ok_or(FiErrno::EKEYREJECTED)?;
            if !target.access.contains(change.access()) {
                return Err(FiErrno::EACCES);
            }
            let offset = change.addr.checked_sub(target.first);
            let pieces =
                offset.and_then(|offset| Pieces::of(&target.buffers, offset, change.len()));
            let pieces = pieces.ok_or(FiErrno::EACCES)?;
            let written = if pd.device().max_elements() < BYTES {
                execute(&pieces, change, earlier)?
            } else {
                execute_by_device(pd.device(), &pieces, change, earlier)?
            };
            counter = target.counter(if written { Event::Write } else { Event::Read });
        }
        if let Some(counter) = counter {
            counter.count(1);
        }
        Ok(())
    }

    /// Copies the first bytes of a span, at most those of `local`: from the region to `local` if
    /// the event is a read, otherwise from `local` to the region. Updates the span. Counts the
    /// operation when nothing is left.
    ///
    /// # Errors
    /// - `EKEYREJECTED`: no region of `pd` has the key, or another one than before has it.
    /// - `EACCES`: the region does not permit the access, or the span is not inside it.
    /// - `EFAULT`: some bytes are not mapped, or not writable; bytes before may have been copied.
    /// - Others of `process_vm_readv(2)`.
    ///
    /// # Safety
    /// For a read the buffers of `local` are writable memory of the application.
    pub(crate) unsafe fn copy(
        &self,
        pd: &Arc<Pd>,
        span: &mut Span,
        local: &[libc::iovec],
    ) -> Result<()> {
        let counter;
        {
            let regions = self.regions.lock();
            let known = |target: &&Target| {
                let same = span.generation.is_none_or(|it| it == target.generation);
                same && Arc::ptr_eq(&target.pd, pd)
            };
            let target = regions.get(&span.key).filter(known);
            let target = target.ok_or(FiErrno::EKEYREJECTED)?;
            let right = match span.event {
                Event::Read => Access::REMOTE_READ,
                Event::Write => Access::REMOTE_WRITE,
            };
            if !target.access.contains(right) {
                return Err(FiErrno::EACCES);
            }
            let offset = span.addr.checked_sub(target.first);
            let offset = offset.filter(|offset| target.contains(*offset, span.left));
            let offset = offset.ok_or(FiErrno::EACCES)?;
            if span.left != 0 {
                let pieces = Pieces::first(&target.buffers, offset, span.left);
                // SAFETY: the caller promises the buffers.
                let moved = unsafe { pieces.exchange(local, span.event) }?;
                span.addr += moved as u64;
                span.left -= moved;
            }
            span.generation = Some(target.generation);
            let ended = span.counted && span.left == 0;
            counter = target.counter(span.event).filter(|_| ended);
        }
        if let Some(counter) = counter {
            counter.count(1);
        }
        Ok(())
    }
}

/// Executes an operation. Returns whether it counts as a write (`docs/mr-modes.md`). If it fails
/// with `EFAULT`, the elements before some may have changed.
fn execute(pieces: &Pieces, change: &Change<'_>, earlier: &mut [u8; BYTES]) -> Result<bool> {
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
    change: &Change<'_>,
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

/// The memory of the elements.
struct Pieces {
    /// Addresses and lengths. Elements lie in one buffer, or in neighbours of the region's list.
    list: [(u64, usize); PIECES],
    count: usize,
}

/// Buffers that the elements of one operation can lie in.
const PIECES: usize = 8;

impl Pieces {
    /// `None`: some of the bytes are outside the region, or in more than [`PIECES`] buffers.
    fn of(buffers: &[Buffer], offset: u64, len: usize) -> Option<Self> {
        let this = Self::first(buffers, offset, len);
        let covered: usize = this.list.iter().map(|(_, len)| len).sum();
        (covered == len && len != 0).then_some(this)
    }

    /// The first [`PIECES`] pieces of the bytes, as far as they are in the region.
    fn first(buffers: &[Buffer], mut offset: u64, mut left: usize) -> Self {
        let mut this = Self {
            list: [(0, 0); PIECES],
            count: 0,
        };
        for buffer in buffers {
            let len = buffer.len as u64;
            if offset >= len {
                offset -= len;
                continue;
            }
            // at most the rest of the elements
            let part = usize::try_from(len - offset).map_or(left, |rest| rest.min(left));
            let Some(piece) = this.list.get_mut(this.count).filter(|_| left != 0) else {
                break;
            };
            *piece = (buffer.start() + offset, part);
            (this.count, left, offset) = (this.count + 1, left - part, 0);
        }
        this
    }

    /// Copies to `local` or from it, as far as both reach. Returns the number of copied bytes, at
    /// least 1.
    ///
    /// # Safety
    /// For a read, the buffers of `local` are writable memory of the application.
    unsafe fn exchange(&self, local: &[libc::iovec], event: Event) -> Result<usize> {
        let mut remote = [iovec(0, 0); PIECES];
        for (to, (addr, len)) in remote.iter_mut().zip(self.list) {
            *to = iovec(addr, len);
        }
        let (own, theirs) = (local.len() as u64, self.count as u64);
        let (local, remote) = (local.as_ptr(), remote.as_ptr());
        // SAFETY: for a read the caller promises the local buffers; for a write the other addresses
        // are in a region that peers may change. The kernel checks that all are mapped.
        let moved = unsafe {
            match event {
                Event::Read => libc::process_vm_readv(own_pid(), local, own, remote, theirs, 0),
                Event::Write => libc::process_vm_writev(own_pid(), local, own, remote, theirs, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => Err(FiErrno::EFAULT),
            Ok(moved) => Ok(moved),
            Err(_) => Err(FiErrno::last()),
        }
    }

    /// Reads all bytes.
    fn read(&self, to: &mut [u8]) -> Result<()> {
        let local = iovec(to.as_mut_ptr() as u64, to.len());
        self.transfer(0, to.len(), |remote| {
            // SAFETY: the local memory is that of `to`; the kernel checks the other addresses.
            unsafe {
                libc::process_vm_readv(
                    own_pid(),
                    &raw const local,
                    1,
                    remote.as_ptr(),
                    remote.len() as u64,
                    0,
                )
            }
        })
    }

    /// Writes the bytes from `offset` on.
    fn write(&self, from: &[u8], offset: usize) -> Result<()> {
        let local = iovec(from.as_ptr() as u64, from.len());
        self.transfer(offset, from.len(), |remote| {
            // SAFETY: the local memory is that of `from` and is only read; the other addresses are
            // in a region that peers may change, and the kernel checks that they are mapped.
            unsafe {
                libc::process_vm_writev(
                    own_pid(),
                    &raw const local,
                    1,
                    remote.as_ptr(),
                    remote.len() as u64,
                    0,
                )
            }
        })
    }

    /// Calls `call` with the memory of `len` bytes from `offset` on.
    fn transfer(
        &self,
        mut offset: usize,
        len: usize,
        call: impl Fn(&[libc::iovec]) -> isize,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let mut remote = [iovec(0, 0); PIECES];
        let (mut count, mut left) = (0, len);
        for (addr, piece) in &self.list[..self.count] {
            let skipped = offset.min(*piece);
            let part = (piece - skipped).min(left);
            offset -= skipped;
            if part != 0 {
                remote[count] = iovec(addr + skipped as u64, part);
                (count, left) = (count + 1, left - part);
            }
        }
        let moved = call(&remote[..count]);
        match usize::try_from(moved) {
            Ok(moved) if moved == len => Ok(()),
            Ok(_) => Err(FiErrno::EFAULT),
            Err(_) => Err(FiErrno::last()),
        }
    }
}

fn own_pid() -> libc::pid_t {
    std::process::id().cast_signed()
}

fn iovec(addr: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: addr as *mut std::ffi::c_void,
        iov_len: len,
    }
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
        let change = Change {
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
    fn change(op: Op, operands: &[u8], fetches: bool) -> Change<'_> {
        Change {
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
