//! The memory of operations whose payload or operands were copied, and the links that wait for
//! some.

#![allow(unsafe_code, reason = "reads the application's buffers")]

use super::{Executor, Todo};
use crate::errno::{FiErrno, Result};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Form;
use crate::rdm::iov::Iov;
use crate::rdm::operations::{Kind, Operation, PAYLOAD};
use crate::rdm::packet_memory::Slot;

impl Executor {
    /// Copies the payload of an operation to a slot, so that its buffers can be reused. An empty
    /// payload needs none.
    ///
    /// # Errors
    /// No memory for packets: `EAGAIN`: packets under way free some; otherwise `ENOMEM`.
    ///
    /// # Safety
    /// The operation's buffers are readable.
    pub(in crate::rdm) unsafe fn copy_payload(&mut self, op: &mut Operation) -> Result<()> {
        if op.len == 0 {
            return Ok(());
        }
        let slot = self
            .memory
            .take()
            .map_err(|error| match self.frees_memory() {
                true => FiErrno::EAGAIN,
                false => error,
            })?;
        let to = &mut self.memory.bytes_mut(&slot)[PAYLOAD..PAYLOAD + op.len];
        // SAFETY: the caller promises the buffers.
        unsafe { op.iov.read(0, to) };
        (op.slot, op.copied, op.iov) = (Some(slot), true, Iov::default());
        Ok(())
    }

    /// Copies the operands of an atomic to a slot, the second ones behind the first ones.
    ///
    /// # Errors
    /// As [`Self::copy_payload`].
    ///
    /// # Safety
    /// The operands are readable; both together have at most the bytes of a payload.
    pub(in crate::rdm) unsafe fn copy_operands(
        &mut self,
        op: &mut Operation,
        operands: &Iov,
        compare: &Iov,
    ) -> Result<()> {
        let len = operands.len() + compare.len();
        (op.iov, op.len) = (*operands, operands.len());
        // SAFETY: the caller promises the buffers.
        unsafe { self.copy_payload(op) }?;
        if let Some(slot) = &op.slot {
            let to = &mut self.memory.bytes_mut(slot)[PAYLOAD + op.len..PAYLOAD + len];
            // SAFETY: the caller promises the buffers.
            unsafe { compare.read(0, to) };
        }
        op.len = len;
        Ok(())
    }

    /// Releases an operation that was not begun.
    pub(in crate::rdm) fn release(&mut self, op: Operation) {
        self.release_slot(op.slot);
        if let Some(source) = op.source {
            self.release_source(source);
        }
    }

    /// Gives the memory of an operation back that was not begun.
    pub(in crate::rdm) fn release_slot(&mut self, slot: Option<Slot>) {
        if let Some(slot) = slot {
            self.memory.give_back(slot);
            self.has_memory();
        }
    }

    /// A slot was given back: the links that wait for one continue.
    #[inline]
    pub(super) fn has_memory(&mut self) {
        if !self.waiting_for_memory.is_empty() {
            self.todo
                .extend(self.waiting_for_memory.drain(..).map(Todo::Room));
        }
    }

    /// Whether operations with memory give it back without a further packet of this side.
    #[cold]
    pub(in crate::rdm) fn frees_memory(&self) -> bool {
        let frees = |op: &Operation| match op.kind {
            // RESULT ends it
            Kind::Atomic(_) => op.posted,
            // FIN ends it, unless the receiver has asked for parts
            Kind::Message if op.form == Form::Rts => {
                op.parts == 0 && (op.receiver.is_none() || op.fin.is_some())
            }
            _ => op.in_core && op.posted_on.is_some(),
        };
        self.tx.any(|op| op.slot.is_some() && frees(op))
    }

    /// The next packet of a link has no memory: it waits until packets under way have given theirs
    /// back; if there are none, its operation fails.
    #[cold]
    pub(super) fn wait_for_memory(&mut self, link: LinkKey) {
        if self.frees_memory() {
            if !self.waiting_for_memory.contains(&link) {
                self.waiting_for_memory.push(link);
            }
        } else {
            let is_listed = |todo: &Todo| matches!(todo, Todo::NoMemory(of) if *of == link);
            if !self.todo.iter().any(is_listed) {
                self.todo.push_back(Todo::NoMemory(link));
            }
        }
    }
}
