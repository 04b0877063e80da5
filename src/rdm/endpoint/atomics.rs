//! Atomics of an endpoint: `fi_atomic(3)`.

#![allow(unsafe_code, reason = "takes buffers as C passes them")]

use std::sync::atomic::Ordering;

use atomic_ops::{Family, Op, Operation as Arithmetic};

use super::super::core::Send;
use super::super::iov::Iov;
use super::super::operations::{Atomic, Kind, Operation};
use super::super::ops::Uses;
use super::Endpoint;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::LocalIov;
use crate::mr::mapped_key;
use crate::wire::rdm::Credit;
use crate::wire::rdm::packet::MAX_OPERANDS;

/// Flags of atomics that the engine knows. `FI_MORE` has no effect on packets. Each entry follows the execution at the target,
/// which is beyond all completion levels.
const FLAGS: Flags = Flags::COMPLETION
    .union(Flags::INJECT)
    .union(Flags::INJECT_COMPLETE)
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::DELIVERY_COMPLETE)
    .union(Flags::MORE)
    .union(Flags::FENCE);

/// A call of `fi_atomic(3)`.
#[derive(Clone, Copy, Debug)]
pub struct AtomicCall<'a> {
    /// The family of the call.
    pub family: Family,
    /// Operator and datatype.
    pub operation: Arithmetic,
    /// Number of elements.
    pub count: usize,
    /// The first operands; ignored by [`Op::Read`].
    pub operands: LocalIov<'a>,
    /// The second operands of the compare family.
    pub compare: LocalIov<'a>,
    /// The buffers for the earlier values; empty in the base family.
    pub result: LocalIov<'a>,
    /// Address and key of the target.
    pub target: (u64, u64),
    /// The context of the entry.
    pub context: usize,
    /// `None`: the default flags.
    pub flags: Option<Flags>,
    /// `fi_inject_atomic`: no entry.
    pub injected: bool,
}

/// Largest size of the elements of an atomic, in bytes.
pub const MAX_ATOMIC_SIZE: usize = MAX_OPERANDS as usize;

/// Largest number of elements of an operation of a family.
#[must_use]
pub fn max_atomic_count(family: Family, operation: Arithmetic) -> usize {
    let operands = match family {
        Family::Compare => 2,
        Family::Base | Family::Fetch => 1,
    };
    MAX_ATOMIC_SIZE / operands / operation.datatype().size()
}

impl Endpoint {
    /// Posts an atomic (`fi_atomic(3)`). The operands are copied.
    ///
    /// # Errors
    /// - `EAGAIN`: `tx_size` operations are under way.
    /// - `EINVAL`: no elements; vectors of different lengths, or with more buffers than
    ///   [`Limits::iov_limit`](super::super::Limits::iov_limit); a target that is not aligned to
    ///   the datatype; an address that is not in the address vector.
    /// - `EMSGSIZE`: more elements than [`max_atomic_count`].
    /// - `EBADFLAGS`: a flag that the operation does not accept.
    /// - `EKEYREJECTED`: a key that `fi_mr_map_raw(3)` has returned and that is not mapped.
    /// - `EOPBADSTATE`: not enabled, or closed.
    ///
    /// # Safety
    /// The operands are readable during the call. The buffers of the result stay valid until the
    /// operation completes.
    pub unsafe fn atomic(&self, to: FiAddr, call: &AtomicCall<'_>) -> Result<()> {
        let (family, operation) = (call.family, call.operation);
        let flags = match call.flags {
            Some(flags) if flags.intersects(FLAGS.complement()) => {
                return Err(FiErrno::EBADFLAGS);
            }
            Some(flags) => flags,
            None => self.tx_op_flags(),
        };
        let selected = flags.contains(Flags::COMPLETION);
        let wanted = selected || self.common.tx_all.load(Ordering::Relaxed);
        if call.count > max_atomic_count(family, operation) {
            return Err(FiErrno::EMSGSIZE);
        }
        let len = call.count * operation.datatype().size();
        let alignment = operation.datatype().alignment() as u64;
        let (operands, compare) = (Iov::new(&call.operands)?, Iov::new(&call.compare)?);
        let result = Iov::new(&call.result)?;
        let reads = operation.op() == Op::Read;
        let (addr, key) = call.target;
        let fits = len != 0
            && (reads || operands.len() == len)
            && compare.len() == if family == Family::Compare { len } else { 0 }
            && result.len() == if family == Family::Base { 0 } else { len }
            && addr.is_multiple_of(alignment);
        if !fits {
            return Err(FiErrno::EINVAL);
        }
        let shared = self.shared();
        let config = &shared.config;
        let atomic = Atomic {
            addr,
            key: mapped_key(shared.domain.mr(), key)?,
            operator: operation.op() as u8,
            datatype: operation.datatype() as u8,
            // at most 1024
            count: call.count as u16,
            fetches: family != Family::Base,
        };
        let mut guard = shared.lock();
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        if state.io.outstanding() >= config.tx_size {
            // a post that is refused makes progress
            let polled = state.poll();
            shared.after(state);
            polled?;
            if state.io.outstanding() >= config.tx_size {
                drop(guard);
                shared.domain.queues().polled();
                return Err(FiErrno::EAGAIN);
            }
        }
        let peer = state.peer_of(to)?;
        let peer = state.core.resolve(peer);
        let mut op = Operation::new(Kind::Atomic(atomic), peer);
        (op.order, op.fence) = (state.io.rma.next_order(), flags.contains(Flags::FENCE));
        op.context = if call.injected {
            // fi_endpoint(3): an error without an operation's context has that of the endpoint
            config.context
        } else {
            call.context
        };
        op.wanted = wanted && !call.injected;
        if !reads {
            // SAFETY: the caller promises readable operands.
            unsafe { state.io.copy_operands(&mut op, &operands, &compare) }?;
        }
        op.iov = result;
        if !state.core.is_up(peer) {
            state.core.set_now(shared.now());
        }
        let key = state.io.begin(op)?;
        let send = Send {
            op: key,
            uses: Uses::Request(Credit::new(0, 1)),
            ack: false,
        };
        if let Err(error) = state.core.send(peer, send, &mut state.io) {
            state.io.abandon(key);
            return Err(error);
        }
        state.settle();
        shared.after(state);
        Ok(())
    }
}
