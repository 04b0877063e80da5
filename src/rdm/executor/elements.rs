//! Atomics that the device executes: they are RMA operations, whose operands and earlier values are
//! in a slot. `docs/rdm.md`, "Atomics".

#![allow(unsafe_code, reason = "memory that the device reads and writes")]

use atomic_ops::Op;

use super::Executor;
use crate::errno::{FiErrno, Result};
use crate::initiator::elements::{Elements, Shape};
use crate::log::info_log;
use crate::rdm::completions::Fault;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Uses;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::{Core, SendOp};
use crate::rdm::iov::Iov;
use crate::rdm::operations::{Atomic, Kind, Operation, PAYLOAD};
use crate::rdm::packet_memory::Slot;
use crate::rdm::rma::{DeviceAtomic, RmaOp};
use crate::rdm::table_keys::RmaKey;
use crate::verbs::{ElementsRequest, Sge};
use crate::wire::rdm::Credit;
use crate::wire::rdm::packet::{MAX_OPERANDS, SLOT_SIZE};

/// Places in the slot: the operands as in a packet, the earlier values, and the request.
const RESULTS: usize = PAYLOAD + MAX_OPERANDS as usize;
const REQUEST: usize = RESULTS + MAX_OPERANDS as usize;
const _: () = {
    assert!(REQUEST.is_multiple_of(align_of::<Elements>()));
    assert!(SLOT_SIZE.is_multiple_of(align_of::<Elements>()));
    assert!(REQUEST + size_of::<Elements>() <= SLOT_SIZE);
};

/// Size of the elements, and of one of them, in bytes.
pub(in crate::rdm) type Sizes = (usize, usize);

impl Executor {
    /// Whether the device executes atomics on the peer of a link.
    pub(in crate::rdm) fn has_device_atomics(&mut self, link: LinkKey) -> bool {
        let record = self.links.get_mut(link);
        self.rma_config.device_atomics && record.is_some_and(|record| record.device_atomics)
    }

    /// Whether an atomic to a peer without a link is left to the device.
    pub(in crate::rdm) fn expects_device_atomics(&self) -> bool {
        self.rma_config.device_atomics
    }

    /// Atomics become packets, as on a device that does not have them.
    #[cfg(test)]
    pub(in crate::rdm) fn send_atomics(&mut self) {
        self.rma_config.device_atomics = false;
    }

    /// Executes an operation in this call, if nothing is in front of it and the device can.
    /// `results` gets the earlier values, unless it is NULL. `false`: nothing has changed, and the
    /// caller begins an operation.
    ///
    /// # Safety
    /// The operands are readable, and `results` has room for the elements.
    #[inline]
    pub(in crate::rdm) unsafe fn execute_atomic(
        &mut self,
        core: &mut Core<Self>,
        peer: PeerKey,
        request: &mut ElementsRequest,
        results: *mut u8,
        target: (u64, u64),
    ) -> bool {
        let Some(link) = self.executing_link(core, peer) else {
            return false;
        };
        if !self.rma_config.device_atomics {
            return false;
        }
        let record = self
            .links
            .get_mut(link)
            .filter(|record| record.device_atomics);
        let Some(initiator) = record.and_then(|record| record.initiator.as_deref_mut()) else {
            return false;
        };
        // SAFETY: the caller keeps the contract of this function.
        let executed = unsafe { initiator.execute_elements(request, results, target) };
        if executed {
            core.note_executed(peer);
        }
        executed
    }

    /// Copies the operands to a slot, and makes the request of an operation.
    ///
    /// # Errors
    /// Those of [`crate::rdm::packet_memory::PacketMemory::take`].
    ///
    /// # Safety
    /// The operands are readable.
    pub(in crate::rdm) unsafe fn prepare_atomic(
        &mut self,
        op: &mut RmaOp,
        (atomic, (len, size)): (Atomic, Sizes),
        (operands, compare): (&Iov, &Iov),
    ) -> Result<()> {
        let slot = self.memory.take()?;
        let bytes = self.memory.bytes_mut(&slot);
        let (first, second) = bytes[PAYLOAD..].split_at_mut(operands.len());
        // SAFETY: the caller promises the buffers.
        unsafe {
            operands.read(0, first);
            compare.read(0, &mut second[..compare.len()]);
        }
        let (first, second) = (first.as_ptr(), second.as_ptr());
        let numbers = (atomic.operator, atomic.datatype, atomic.count);
        let whole = ElementsRequest::new(numbers, first, second);
        let result = match atomic.fetches {
            true => self.memory.sge(&slot, RESULTS, len),
            false => Sge::default(),
        };
        let operator = Op::of(atomic.operator.into());
        let shape = Shape {
            len,
            size,
            fetches: atomic.fetches,
            writes: operator.is_some_and(Op::writes),
            always: operator == Some(Op::Write),
        };
        let to = self.memory.sge(&slot, REQUEST, size_of::<Elements>()).addr;
        let request: *mut Elements = std::ptr::with_exposed_provenance_mut(to as usize);
        // SAFETY: inside the slot, which this operation holds, and aligned.
        unsafe { request.write(Elements::new(whole, result)) };
        (op.request.compare_add, op.request.swap) = (to, shape.to_word());
        op.slot = Some(slot);
        op.atomic = Some(DeviceAtomic {
            atomic,
            operands: operands.len() + compare.len(),
        });
        Ok(())
    }

    /// Copies the earlier values of a completed operation to the buffers of the application.
    pub(super) fn copy_results(&self, key: RmaKey) {
        let op = self.rma.ops.get(key);
        if let Some((op, slot)) = op.and_then(|op| Some((op, op.slot.as_ref()?))) {
            let values = &self.memory.bytes(slot)[RESULTS..RESULTS + op.iov.len()];
            // SAFETY: the application keeps the buffers until the operation completes.
            unsafe { op.iov.write(0, values) };
        }
    }

    /// Sends an operation, of which nothing is posted, as a packet: the peer's processor executes
    /// it. Later messages that wait already stay behind it ([`Io::is_later`]).
    ///
    /// [`Io::is_later`]: crate::rdm::core::Io::is_later
    #[cold]
    pub(super) fn post_as_packet(&mut self, core: &mut Core<Self>, key: RmaKey) {
        let Some(mut rma) = self.rma.ops.remove(key) else {
            return;
        };
        let Some(DeviceAtomic { atomic, operands }) = rma.atomic else {
            return;
        };
        let (completion, call) = (rma.completion(), rma.call());
        let (peer, held) = (rma.peer, rma.held);
        let sent = self.packet_of(&mut rma, atomic, operands);
        let sent = sent.and_then(|key| {
            let send = SendOp {
                op: key,
                uses: Uses::Request(Credit::new(0, 1)),
                ack: false,
            };
            let sent = core.send(peer, send, self);
            sent.inspect_err(|_| self.abandon(key))
        });
        if let Err(error) = sent {
            info_log!(EpData, "an atomic could not be sent: {error}");
            let fault = Fault::of(error);
            match call {
                Some(call) => self.completions.ranges_ended(call, 1, Some(fault)),
                None => self.completions.rma_failed(completion, fault),
            }
        }
        if held {
            core.release(peer, self);
        }
    }

    /// The operation of a packet.
    fn packet_of(
        &mut self,
        rma: &mut RmaOp,
        mut atomic: Atomic,
        operands: usize,
    ) -> Result<crate::rdm::table_keys::TxKey> {
        let mut slot: Option<Slot> = rma.slot.take();
        if operands == 0
            && let Some(slot) = slot.take()
        {
            self.memory.give_back(slot);
        }
        let key = crate::mr::mapped_key(&self.objects.mr, atomic.key);
        let key = key.and_then(|key| {
            atomic.key = key;
            let mut op = Operation::new(Kind::Atomic(atomic), rma.peer);
            (op.order, op.fence) = (rma.order, rma.is_fenced());
            (op.context, op.wanted, op.iov) = (rma.context, rma.wanted, rma.iov);
            (op.len, op.copied) = (operands, slot.is_some());
            op.slot = slot.take();
            self.begin(op)
        });
        if let Some(slot) = slot {
            self.memory.give_back(slot);
        }
        key.map_err(|error| match error {
            FiErrno::EAGAIN => FiErrno::ENOMEM,
            error => error,
        })
    }
}
