//! The atomics of verbs: 64-bit fetch and add, 64-bit compare and swap.
//!
//! The work request carries the operands, so the application's operand buffers are free when a call
//! returns and need no registration. The device writes the target's previous value to the result
//! buffer; an operation without a result (`fi_atomic`) uses a scratch cell.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::ATOMIC_SIZE;
use crate::initiator::Transmit;
use crate::initiator::refusal;
use crate::msg::{AtomicKind, AtomicOp, Endpoint, LocalIov};

/// Flags accepted by calls with flags. `FI_INJECT` has no effect: operands are always copied.
const MSG_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::INJECT)
    .union(Flags::INJECT_COMPLETE)
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::DELIVERY_COMPLETE)
    .union(Flags::MORE)
    .union(Flags::FENCE);

impl Endpoint {
    /// Posts an atomic: the calls of `fi_atomic(3)`; `flags` is `Some` for the calls with flags.
    /// `result` receives the previous value, unless it has no buffers.
    ///
    /// # Errors
    /// - `EOPNOTSUPP`: the endpoint was made without atomics.
    /// - `EINVAL`: the result buffer is not 8 bytes long, the target address is no multiple of 8
    ///   with a key of the device, or a descriptor is wrong. With other keys the base of the region
    ///   is known when the key is resolved: then an unaligned target is an error entry.
    /// - `EKEYREJECTED`: the value cannot be a key of the peer.
    /// - `EBADFLAGS`: a flag that the operation does not accept.
    /// - the errors of [`Self::send`].
    ///
    /// # Safety
    /// As [`Self::send`]; the only buffers are those of the result.
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
            None => self.op_flags().tx(),
            Some(flags) if flags.intersects(MSG_FLAGS.complement()) => {
                return Err(FiErrno::EBADFLAGS);
            }
            Some(flags) => flags,
        };
        let op = self.describe(op, kind, result, (addr, key), context, flags)?;
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.shared.transmit(&op) }
    }

    /// `fi_inject_atomic` (`fi_atomic(3)`): no completion, but an error entry if the peer or the
    /// device refuses it.
    ///
    /// # Errors
    /// As [`Self::atomic`].
    #[inline]
    pub fn inject_atomic(&self, op: AtomicOp, target: (u64, u64)) -> Result<()> {
        let flags = Flags::empty();
        let context = self.shared.config.context;
        let op = self.describe(op, AtomicKind::Base, LocalIov::NONE, target, context, flags)?;
        // SAFETY: no buffers.
        unsafe { self.shared.transmit(&op.injected()) }
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
        if !self.shared.config.atomics {
            return Err(refusal::no_atomics());
        }
        if result.count() != 0 && result.len() != ATOMIC_SIZE {
            return Err(refusal::other_result(result.len()));
        }
        let op = (op, kind);
        Ok(Transmit::atomic(op, result, (addr, key), context, flags))
    }
}
