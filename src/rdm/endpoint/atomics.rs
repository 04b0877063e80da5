//! Atomics of an endpoint: `fi_atomic(3)`.

#![allow(unsafe_code, reason = "takes buffers as C passes them")]

use std::sync::atomic::Ordering;

use atomic_ops::{Family, Op, Operation as Arithmetic};

use super::super::core::Send;
use super::super::iov::Iov;
use super::super::operations::{Atomic, Kind, Operation};
use super::super::ops::Uses;
use super::super::peer::PeerKey;
use super::super::rma::{Request, RmaOp};
use super::super::shared::State;
use super::Endpoint;
use super::rma::POLLS;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::{LocalIov, RemoteIov};
use crate::mr::{Mode, mapped_key};
use crate::verbs::SendOpcode;
use crate::wire::rdm::Credit;
use crate::wire::rdm::packet::MAX_OPERANDS;

/// Flags of atomics that the engine knows. `FI_MORE` has no effect on packets. Each entry follows
/// the execution at the target, which is beyond all completion levels.
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
    ///   [`Limits::iov_limit`](super::super::Limits::iov_limit); a virtual address that is not
    ///   aligned to the datatype; an address that is not in the address vector.
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
            && result.len() == if family == Family::Base { 0 } else { len };
        let shared = self.shared();
        // the initiator does not know the address of an offset
        let virt = shared
            .domain
            .mr()
            .config()
            .form
            .mode
            .contains(Mode::VIRT_ADDR);
        if !fits || virt && !addr.is_multiple_of(alignment) {
            return Err(FiErrno::EINVAL);
        }
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
        if state.executes_atomics(peer) {
            let request = Request {
                opcode: SendOpcode::Elements,
                flags: flags & Flags::FENCE,
                kind: Flags::ATOMIC
                    | if atomic.fetches {
                        Flags::READ
                    } else {
                        Flags::WRITE
                    },
                compare_add: 0,
                swap: 0,
            };
            let mut op = RmaOp::new(request, peer, state.io.rma.next_order());
            op.context = if call.injected {
                config.context
            } else {
                call.context
            };
            op.wanted = wanted && !call.injected;
            op.iov = result;
            op.remote[0] = RemoteIov { addr, len, key };
            op.ranges = 1;
            let operands = if reads { Iov::default() } else { operands };
            let sizes = (len, operation.datatype().size());
            // the initiator finds the meaning of a key of `fi_mr_map_raw(3)` by itself
            let whole = (Atomic { key, ..atomic }, sizes);
            // SAFETY: the caller promises readable operands.
            unsafe {
                state
                    .io
                    .prepare_atomic(&mut op, whole, (&operands, &compare))
            }?;
            return self.begin_device_atomic(state, op);
        }
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

    /// Begins an atomic that the device executes.
    fn begin_device_atomic(&self, state: &mut State, op: RmaOp) -> Result<()> {
        let (shared, peer) = (self.shared(), op.peer);
        if !state.core.is_up(peer) {
            state.core.set_now(shared.now());
        }
        // SAFETY: operands and results are in the slot of the operation.
        let begun = unsafe { state.io.begin_rma(&mut state.core, op) };
        state.settle();
        if begun.is_ok() {
            state.poll_for_keys(peer);
        }
        shared.after(state);
        begun
    }
}

impl State {
    /// Whether the device executes atomics on the regions of a peer. Without a link this is not
    /// known, and the operation waits for one.
    fn executes_atomics(&mut self, peer: PeerKey) -> bool {
        if !self.io.expects_device_atomics() || self.core.is_itself(peer) {
            return false;
        }
        match self.core.open_link(peer) {
            Some(link) => self.io.has_device_atomics(link),
            None => true,
        }
    }

    /// Polls for the reads of the look-up of a key, for which an operation to the peer waits.
    fn poll_for_keys(&mut self, peer: PeerKey) {
        for _ in 0..POLLS {
            if !self.io.rma.waits() || !self.core.is_up(peer) {
                break;
            }
            let _ = self.poll();
        }
    }
}
