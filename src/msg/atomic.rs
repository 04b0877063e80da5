//! Atomics that verbs has: 64-bit fetch and add, 64-bit compare and swap.
//!
//! The operands go along in the work request, so the application's operand buffers are free when a
//! call returns, and need no registration. The device writes the value that was there before into
//! the result buffer; an operation without one (`fi_atomic`) has it written to a scratch cell.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::cell::UnsafeCell;
use std::sync::Arc;

use super::refusal;
use super::transmit::Transmit;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::msg::{Endpoint, LocalIov};
use crate::verbs::{Mr, Pd, SendOpcode, Sge};

/// Bytes that an atomic works on; its target is aligned to as many.
pub const ATOMIC_SIZE: usize = 8;

/// What to do with the target, a 64-bit integer in the byte order of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds, wrapping.
    Add(u64),
    /// Puts `swap` there if the target is `compare`.
    CompareSwap {
        /// What the target must be.
        compare: u64,
        /// What it becomes then.
        swap: u64,
    },
}

/// Which kind of call an atomic came by: how its completion and its counter name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// `fi_atomic` and its kin: counted as a write.
    Base,
    /// `fi_fetch_atomic`, `fi_compare_atomic`: counted as a read.
    Fetch,
}

/// Where results go that nobody wants. Devices write to it, nobody reads it.
#[derive(Debug)]
pub(super) struct Scratch {
    mr: Mr,
    cell: Box<UnsafeCell<u64>>,
}

// SAFETY: this side never reads or writes the cell.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(super) fn new(pd: &Arc<Pd>) -> Result<Self> {
        let cell = Box::new(UnsafeCell::new(0_u64));
        let write = rdma_core_sys::IBV_ACCESS_LOCAL_WRITE;
        // SAFETY: the registration is dropped first, as the first field; the cell never moves.
        let mr = unsafe { Mr::register(pd, cell.get().cast(), ATOMIC_SIZE, write) }?;
        Ok(Self { mr, cell })
    }

    pub(super) fn sge(&self) -> Sge {
        Sge {
            addr: self.cell.get() as u64,
            length: ATOMIC_SIZE as u32,
            lkey: self.mr.lkey(),
        }
    }
}

/// Flags that calls with flags take. `FI_INJECT` asks for what is so anyway.
const MSG_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::INJECT)
    .union(Flags::INJECT_COMPLETE)
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::DELIVERY_COMPLETE)
    .union(Flags::MORE)
    .union(Flags::FENCE);

impl Endpoint {
    /// Posts an atomic: `fi_atomic(3)`'s calls, those with flags if `flags` are given. `result` gets the
    /// value before, unless it has no buffers.
    ///
    /// # Errors
    /// - `EOPNOTSUPP`: the endpoint was made without atomics.
    /// - `EINVAL`: a result of other than 8 bytes, a target that is not aligned to 8, or a descriptor
    ///   that is wrong.
    /// - `EKEYREJECTED`: a key that can't be one.
    /// - `EBADFLAGS`: a flag that the operation doesn't have.
    /// - as for sends.
    ///
    /// # Safety
    /// As for sends, of the result.
    #[inline]
    pub unsafe fn atomic(
        &self,
        (op, kind): (AtomicOp, AtomicKind),
        result: LocalIov<'_>,
        (addr, key): (u64, u64),
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let flags = match flags {
            None => self.tx_op_flags(),
            Some(flags) if flags.intersects(MSG_FLAGS.complement()) => {
                return Err(FiErrno::EBADFLAGS);
            }
            Some(flags) => flags,
        };
        let op = self.describe(op, kind, result, (addr, key), context, flags)?;
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op) }
    }

    /// `fi_inject_atomic`: no completion.
    ///
    /// # Errors
    /// As [`Self::atomic`].
    #[inline]
    pub fn inject_atomic(&self, op: AtomicOp, target: (u64, u64)) -> Result<()> {
        let flags = Flags::empty();
        let op = self.describe(op, AtomicKind::Base, LocalIov::NONE, target, 0, flags)?;
        // SAFETY: no buffers.
        unsafe { self.core.transmit(&op.injected()) }
    }

    #[inline]
    fn describe<'a>(
        &self,
        op: AtomicOp,
        kind: AtomicKind,
        result: LocalIov<'a>,
        (addr, key): (u64, u64),
        context: usize,
        flags: Flags,
    ) -> Result<Transmit<'a>> {
        if !self.core.config.atomics {
            return Err(refusal::no_atomics());
        }
        if result.count() != 0 && result.len() != ATOMIC_SIZE {
            return Err(refusal::other_result(result.len()));
        }
        if !addr.is_multiple_of(ATOMIC_SIZE as u64) {
            return Err(refusal::unaligned(addr));
        }
        let (opcode, compare_add, swap) = match op {
            AtomicOp::Add(value) => (SendOpcode::FetchAdd, value, 0),
            AtomicOp::CompareSwap { compare, swap } => (SendOpcode::CompareSwap, compare, swap),
        };
        let mut op = Transmit::rma(opcode, result, addr, key, context, flags)?;
        op.compare_add = compare_add;
        op.swap = swap;
        op.kind = match kind {
            AtomicKind::Base => Flags::ATOMIC.union(Flags::WRITE),
            AtomicKind::Fetch => Flags::ATOMIC.union(Flags::READ),
        };
        Ok(op)
    }
}
