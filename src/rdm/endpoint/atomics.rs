//! Atomics of an endpoint: `fi_atomic(3)`.

#![allow(unsafe_code, reason = "takes buffers as C passes them")]

use std::sync::atomic::Ordering;

use atomic_ops::{Family, Op, Operation as Arithmetic};

use super::Endpoint;
use super::rma::POLLS;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::{LocalIov, RemoteIov, refusal};
use crate::log::info_log;
use crate::mr::{Mode, mapped_key};
use crate::queue::Completion;
use crate::rdm::completions::Fault;
use crate::rdm::core::SendOp;
use crate::rdm::core::ops::Uses;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::iov::Iov;
use crate::rdm::operations::{Atomic, Kind, Operation};
use crate::rdm::rma::{MAX_RMA_IOV, Request, RmaOp};
use crate::rdm::shared::State;
use crate::verbs::{ElementsRequest, SendOpcode};
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
    /// The ranges of the target: their bytes are those of the elements.
    pub targets: &'a [RemoteIov],
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
    /// - `EINVAL`: no elements, or a range without elements; vectors of different lengths, or with
    ///   more members than [`Limits::iov_limit`](crate::rdm::Limits::iov_limit); a virtual
    ///   address that is not aligned to the datatype; an address that is not in the address vector.
    /// - `EMSGSIZE`: more elements than [`max_atomic_count`].
    /// - `EBADFLAGS`: a flag that the operation does not accept.
    /// - `EKEYREJECTED`: a key that `fi_mr_map_raw(3)` has returned and that is not mapped.
    /// - `EOPBADSTATE`: not enabled, or closed. `EOPNOTSUPP`: opened without atomics.
    ///
    /// # Safety
    /// The operands are readable during the call. The buffers of the result stay valid until the
    /// operation completes.
    pub unsafe fn atomic(&self, to: FiAddr, call: &AtomicCall<'_>) -> Result<()> {
        let (family, operation) = (call.family, call.operation);
        if !self.shared().config.atomics {
            return Err(refusal::no_atomics());
        }
        let flags = self.tx_flags(call.flags, FLAGS)?;
        let selected = flags.contains(Flags::COMPLETION);
        let wanted = selected || self.common.tx_all.load(Ordering::Relaxed);
        if call.count > max_atomic_count(family, operation) {
            return Err(FiErrno::EMSGSIZE);
        }
        // SAFETY: the caller keeps the contract of this function.
        if unsafe { self.execute_atomic(to, call, flags, wanted) } {
            return Ok(());
        }
        let size = operation.datatype().size();
        let len = call.count * size;
        let alignment = operation.datatype().alignment() as u64;
        let (operands, compare) = (Iov::new(&call.operands)?, Iov::new(&call.compare)?);
        let result = Iov::new(&call.result)?;
        let reads = operation.op() == Op::Read;
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
        let aligned = |range: &RemoteIov| !virt || range.addr.is_multiple_of(alignment);
        if !fits || !is_target(call.targets, len, size) || !call.targets.iter().all(aligned) {
            return Err(FiErrno::EINVAL);
        }
        let config = &shared.config;
        let context = if call.injected {
            // fi_endpoint(3): an error without an operation's context has that of the endpoint
            config.context
        } else {
            call.context
        };
        let whole = Atomic {
            addr: 0,
            key: 0,
            operator: operation.op() as u8,
            datatype: operation.datatype() as u8,
            count: 0,
            fetches: family != Family::Base,
            ranged: false,
            last: true,
        };
        let buffers = Buffers {
            operands: if reads { Iov::default() } else { operands },
            compare,
            result,
        };
        let mut guard = shared.lock();
        guard = shared.reserve_tx(guard)?;
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        let peer = state.peer_of(to)?;
        let peer = state.core.resolve(peer);
        let device = state.executes_atomics(peer);
        let parameters = Parameters {
            peer,
            atomic: whole,
            size,
            context,
            wanted: wanted && !call.injected,
            fence: flags.contains(Flags::FENCE),
        };
        if !state.core.is_up(peer) {
            state.core.set_now(shared.now());
        }
        // SAFETY: the caller promises readable operands, and results that stay valid.
        let begun = unsafe {
            match call.targets {
                [only] if device => state
                    .device_atomic(&parameters, only, &buffers)
                    .and_then(|op| state.io.begin_rma(&mut state.core, op)),
                [only] => state
                    .packet_atomic(&parameters, only, &buffers)
                    .and_then(|op| state.begin_packet(op)),
                ranges => state.begin_ranges(&parameters, ranges, &buffers, device),
            }
        };
        state.run_todo();
        if begun.is_ok() && device {
            state.poll_for_keys(peer);
        }
        shared.end_post(guard, begun)
    }
}

impl Endpoint {
    /// Fast path of [`Self::atomic`]: an operation on one range with buffers in one piece that the
    /// device executes in this call. `false`: nothing has changed.
    ///
    /// # Safety
    /// As [`Self::atomic`].
    #[inline]
    unsafe fn execute_atomic(
        &self,
        to: FiAddr,
        call: &AtomicCall<'_>,
        flags: Flags,
        wanted: bool,
    ) -> bool {
        let (op, datatype) = (call.operation.op(), call.operation.datatype());
        let len = call.count * datatype.size();
        let &[range] = call.targets else {
            return false;
        };
        let plain = len != 0
            && range.len == len
            && range.addr.is_multiple_of(datatype.alignment() as u64)
            && !flags.contains(Flags::FENCE);
        let operands = match op == Op::Read {
            true => Some(std::ptr::null_mut()),
            false => whole(&call.operands, len),
        };
        let compare = match call.family == Family::Compare {
            true => whole(&call.compare, len),
            false => none(&call.compare),
        };
        let results = match call.family == Family::Base {
            true => none(&call.result),
            false => whole(&call.result, len),
        };
        let (Some(operands), Some(compare), Some(results), true) =
            (operands, compare, results, plain)
        else {
            return false;
        };
        // at most 1,024 elements
        let numbers = (op as u8, datatype as u8, call.count as u16);
        let mut request = ElementsRequest::new(numbers, operands, compare);
        let shared = self.shared();
        let mut guard = shared.lock_for_rma();
        let Some(state) = guard.as_mut() else {
            return false;
        };
        let Some(peer) = state.known_peer(to) else {
            return false;
        };
        if state.io.outstanding() >= shared.config.tx_size {
            return false;
        }
        let peer = state.core.resolve(peer);
        let target = (range.addr, range.key);
        let State { core, io, .. } = state;
        // SAFETY: the caller promises operands and results, which are in one piece.
        if !unsafe { io.execute_atomic(core, peer, &mut request, results, target) } {
            return false;
        }
        let direction = match call.family {
            Family::Base => Flags::WRITE,
            Family::Fetch | Family::Compare => Flags::READ,
        };
        let completion = Completion::new(call.context, Flags::ATOMIC | direction);
        io.completions
            .rma_done(completion, wanted && !call.injected);
        shared.wake_readers(state);
        true
    }
}

/// The address of `len` bytes that are in one piece.
fn whole(local: &LocalIov<'_>, len: usize) -> Option<*mut u8> {
    match local.iov() {
        [only] if only.iov_len == len => Some(only.iov_base.cast()),
        _ => None,
    }
}

/// NULL, if there are no buffers.
fn none(local: &LocalIov<'_>) -> Option<*mut u8> {
    local.is_empty().then_some(std::ptr::null_mut())
}

/// Whether the ranges of a call are elements of `size` bytes, not empty, not more than the limit,
/// and `len` bytes together.
#[inline]
fn is_target(ranges: &[RemoteIov], len: usize, size: usize) -> bool {
    let lens = ranges.iter().map(|range| range.len);
    let sum = lens.fold(0, usize::saturating_add);
    let whole = |range: &RemoteIov| range.len != 0 && range.len.is_multiple_of(size);
    let whole = ranges.iter().all(whole);
    sum == len && whole && (1..=MAX_RMA_IOV).contains(&ranges.len())
}

/// The buffers of a call, or of one of its ranges.
struct Buffers {
    operands: Iov,
    compare: Iov,
    result: Iov,
}

impl Buffers {
    /// Those of the `len` bytes of elements from `start` on.
    fn part(&self, start: usize, len: usize) -> Self {
        let part = |iov: &Iov| match iov.len() {
            0 => Iov::default(),
            _ => iov.part(start, len),
        };
        Self {
            operands: part(&self.operands),
            compare: part(&self.compare),
            result: part(&self.result),
        }
    }
}

/// What all operations of a call have.
#[derive(Clone, Copy)]
struct Parameters {
    peer: PeerKey,
    /// Without target and number of elements.
    atomic: Atomic,
    /// Size of an element in bytes.
    size: usize,
    context: usize,
    wanted: bool,
    fence: bool,
}

impl Parameters {
    /// The flag of the entry: whether the call counts as a read or as a write.
    fn direction(&self) -> Flags {
        match self.atomic.fetches {
            true => Flags::READ,
            false => Flags::WRITE,
        }
    }

    fn on(&self, range: &RemoteIov, key: u64) -> Atomic {
        Atomic {
            addr: range.addr,
            key,
            // at most 1024
            count: (range.len / self.size) as u16,
            ..self.atomic
        }
    }
}

/// An operation on one range, with its memory.
enum Prepared {
    Device(RmaOp),
    Packet(Operation),
}

impl State {
    /// An operation that the device executes.
    ///
    /// # Errors
    /// No memory for packets.
    ///
    /// # Safety
    /// The operands are readable.
    #[inline]
    unsafe fn device_atomic(
        &mut self,
        parameters: &Parameters,
        range: &RemoteIov,
        buffers: &Buffers,
    ) -> Result<RmaOp> {
        // a mapped key that is not mapped
        mapped_key(&self.io.objects.mr, range.key)?;
        let request = Request {
            opcode: SendOpcode::Elements,
            flags: match parameters.fence {
                true => Flags::FENCE,
                false => Flags::empty(),
            },
            completion_flags: Flags::ATOMIC | parameters.direction(),
            compare_add: 0,
            swap: 0,
        };
        let mut op = RmaOp::new(request, parameters.peer, self.io.rma.next_order());
        (op.context, op.wanted, op.iov) = (parameters.context, parameters.wanted, buffers.result);
        (op.remote[0], op.ranges) = (*range, 1);
        // the initiator finds the meaning of a key of `fi_mr_map_raw(3)` by itself
        let whole = (
            parameters.on(range, range.key),
            (range.len, parameters.size),
        );
        let operands = (&buffers.operands, &buffers.compare);
        // SAFETY: the caller promises readable operands.
        unsafe { self.io.prepare_atomic(&mut op, whole, operands) }?;
        Ok(op)
    }

    /// An operation that the processor of the target executes.
    ///
    /// # Errors
    /// As [`Self::device_atomic`]. `EAGAIN`: packets under way free memory.
    ///
    /// # Safety
    /// As [`Self::device_atomic`].
    #[inline]
    unsafe fn packet_atomic(
        &mut self,
        parameters: &Parameters,
        range: &RemoteIov,
        buffers: &Buffers,
    ) -> Result<Operation> {
        let key = mapped_key(&self.io.objects.mr, range.key)?;
        let atomic = parameters.on(range, key);
        let mut op = Operation::new(Kind::Atomic(atomic), parameters.peer);
        (op.order, op.fence) = (self.io.rma.next_order(), parameters.fence);
        (op.context, op.wanted) = (parameters.context, parameters.wanted);
        if buffers.operands.len() != 0 {
            // SAFETY: the caller promises readable operands.
            unsafe {
                self.io
                    .copy_operands(&mut op, &buffers.operands, &buffers.compare)
            }?;
        }
        op.iov = buffers.result;
        Ok(op)
    }

    /// Passes an operation to the core.
    #[inline]
    fn begin_packet(&mut self, op: Operation) -> Result<()> {
        let peer = op.peer;
        let key = self.io.begin(op)?;
        let send = SendOp {
            op: key,
            uses: Uses::Request(Credit::new(0, 1)),
            ack: false,
        };
        let sent = self.core.send(peer, send, &mut self.io);
        sent.inspect_err(|_| self.io.abandon(key))
    }

    /// Begins an operation for each range; the entry of the call follows the last of them. Memory
    /// is acquired for all before the first one begins, because a call that returns an error has
    /// executed nothing.
    ///
    /// # Errors
    /// Those of the first operation. A later one that is refused makes the call fail.
    ///
    /// # Safety
    /// As [`Endpoint::atomic`].
    #[cold]
    unsafe fn begin_ranges(
        &mut self,
        parameters: &Parameters,
        ranges: &[RemoteIov],
        buffers: &Buffers,
        device: bool,
    ) -> Result<()> {
        let completion =
            Completion::new(parameters.context, Flags::ATOMIC | parameters.direction());
        let (completions, wanted) = (&mut self.io.completions, parameters.wanted);
        let call = completions.begin_call(completion, wanted, ranges.len());
        let call = call.ok_or(FiErrno::EAGAIN)?;
        let mut parameters = Parameters {
            context: call,
            ..*parameters
        };
        parameters.atomic.ranged = true;
        let mut prepared = [const { None }; MAX_RMA_IOV];
        let (mut start, mut refused) = (0, None);
        for (index, (to, range)) in prepared.iter_mut().zip(ranges).enumerate() {
            let buffers = buffers.part(start, range.len);
            parameters.atomic.last = index + 1 == ranges.len();
            // SAFETY: the caller promises readable operands.
            let op = unsafe {
                match device {
                    true => self
                        .device_atomic(&parameters, range, &buffers)
                        .map(Prepared::Device),
                    false => self
                        .packet_atomic(&parameters, range, &buffers)
                        .map(Prepared::Packet),
                }
            };
            match op {
                Ok(op) => *to = Some(op),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
            // the later ranges are posted behind the first one
            parameters.fence = false;
            start += range.len;
        }
        let mut begun = 0;
        for op in prepared.into_iter().flatten() {
            if refused.is_some() {
                match op {
                    Prepared::Device(op) => self.io.release_slot(op.slot),
                    Prepared::Packet(op) => self.io.release(op),
                }
                continue;
            }
            let result = match op {
                // SAFETY: operands are in the slot of the operation; the caller promises results
                // that stay valid.
                Prepared::Device(op) => unsafe { self.io.begin_rma(&mut self.core, op) },
                Prepared::Packet(op) => self.begin_packet(op),
            };
            match result {
                Ok(()) => begun += 1,
                Err(error) => refused = Some(error),
            }
        }
        let completions = &mut self.io.completions;
        match refused {
            Some(error) if begun == 0 => {
                completions.forget_call(call);
                return Err(error);
            }
            Some(error) => {
                info_log!(EpData, "an atomic failed in its range {begun}: {error}");
                let fault = Some(Fault::of(error));
                completions.ranges_ended(call, ranges.len() - begun, fault);
            }
            None => {}
        }
        Ok(())
    }

    /// Whether the device executes atomics on the regions of a peer. Without a link this is not
    /// known, and the operation waits for one. Behind operations that wait it waits too: those with
    /// atomics become packets when it is their turn (`run_rma`), and a packet that is posted now
    /// would overtake them.
    fn executes_atomics(&mut self, peer: PeerKey) -> bool {
        if !self.io.expects_device_atomics() || self.core.is_itself(peer) {
            return false;
        }
        match self.core.open_link(peer) {
            Some(link) => self.io.has_device_atomics(link) || self.io.rma.has_earlier(peer),
            None => true,
        }
    }

    /// Polls for the reads of the look-up of a key, for which an operation to the peer waits.
    fn poll_for_keys(&mut self, peer: PeerKey) {
        for _ in 0..POLLS {
            if !self.io.rma.waits_for(peer) || !self.core.is_up(peer) {
                break;
            }
            let _ = self.poll();
        }
    }
}
