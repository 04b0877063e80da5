//! Atomics that the target's processor executes: packets ATOMIC and RESULT.
//! `docs/protocol-rdm.md`, "Atomics".

#![allow(
    unsafe_code,
    reason = "copies from rings and to buffers of the application"
)]

use super::{Executor, PacketMemoryRef, Todo};
use crate::errno::{FiErrno, Result};
use crate::mr::ElementsAccess;
use crate::queue::event_cell::Event;
use crate::rdm::core::Origin;
use crate::rdm::operations::{Atomic, Kind, Operation, PAYLOAD};
use crate::rdm::table_keys::TxKey;
use crate::wire::rdm::packet::{MAX_OPERANDS, Payload};
use crate::wire::rdm::{Credit, OpId};
use atomic_ops::{Datatype, Family, Op, Operation as Arithmetic};

const BYTES: usize = MAX_OPERANDS as usize;

/// Number of incomplete RESULT packets of an endpoint beyond which a request keeps its credit.
const MAX_RESULTS: usize = 1024;

/// The credit of ATOMIC.
const CREDIT: Credit = Credit::new(0, 1);

/// RESULT packets, or FIN packets, that are not complete.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Answers {
    pub(super) incomplete: usize,
    /// Those that hold credit of the packets that they answer.
    pub(super) held: usize,
}

impl Answers {
    /// Whether credit waits for a completion. The completion of an answer wakes no thread, so the
    /// driver polls for it.
    pub(in crate::rdm) const fn holds_credit(&self) -> bool {
        self.held != 0
    }
}

/// The arithmetic of an operator and a datatype of a packet. `None`: this side does not have it.
fn arithmetic(atomic: &Atomic) -> Option<Arithmetic> {
    let op = Op::of(atomic.operator.into())?;
    Arithmetic::new(op, Datatype::of(atomic.datatype.into())?)
}

/// Whether the operands, and the presence of results, are those of the operation.
fn is_complete(atomic: &Atomic, arithmetic: Arithmetic, operands: usize) -> bool {
    let len = usize::from(atomic.count) * arithmetic.datatype().size();
    let op = arithmetic.op();
    let sent = match op {
        Op::Read => 0,
        _ if op.compares() => 2 * len,
        _ => len,
    };
    let fetches = atomic.fetches || op.is_of(Family::Base);
    len <= BYTES && operands == sent && fetches
}

impl Executor {
    /// ATOMIC: executes it and answers.
    #[inline(never)]
    pub(super) fn atomic(
        &mut self,
        origin: Origin,
        op: OpId,
        atomic: &Atomic,
        (place, operands): (&PacketMemoryRef, Payload),
    ) {
        let arithmetic = arithmetic(atomic);
        if arithmetic.is_some_and(|it| !is_complete(atomic, it, operands.len as usize)) {
            self.todo.push_back(Todo::GiveBack(origin, CREDIT));
            return self.todo.extend(self.arriving.map(Todo::Violated));
        }
        // the memory of the answer comes first: an operation that is executed has its answer
        let answer = if atomic.fetches {
            self.memory.take().map(Some)
        } else {
            Ok(None)
        };
        let mut earlier = [0; BYTES];
        let (answer, result) = match (answer, arithmetic) {
            (Err(error), _) => (None, Err(error)),
            (Ok(answer), None) => (answer, Err(FiErrno::EOPNOTSUPP)),
            (Ok(answer), Some(arithmetic)) => {
                let mut bytes = [0; BYTES];
                let operands = self.copy_of(place, operands, &mut bytes);
                let result = self.change(atomic, arithmetic, operands, &mut earlier);
                (answer, result)
            }
        };
        let (status, len) = match result {
            Ok(len) => (0, len),
            // an error number of fi_errno(3) is less than 4096
            Err(error) => (error.code() as u16, 0),
        };
        let held = self.result_begins(origin);
        let mut result = Operation::new(Kind::Result { op, status, held }, origin.peer);
        match answer {
            Some(slot) if len != 0 => {
                let to = &mut self.memory.bytes_mut(&slot)[PAYLOAD..PAYLOAD + len];
                to.copy_from_slice(&earlier[..len]);
                (result.slot, result.copied, result.len) = (Some(slot), true, len);
            }
            Some(slot) => self.memory.give_back(slot),
            None => {}
        }
        self.answer_with(origin, result);
    }

    /// Gives the credit of an ATOMIC back, or returns its packet: then the credit is given back
    /// when the answer is complete.
    fn result_begins(&mut self, origin: Origin) -> Option<Origin> {
        self.results.incomplete += 1;
        if self.results.incomplete > MAX_RESULTS {
            self.results.held += 1;
            return Some(origin);
        }
        self.todo.push_back(Todo::GiveBack(origin, CREDIT));
        None
    }

    /// An answer is complete, or has failed.
    #[cold]
    pub(super) fn result_ended(&mut self, held: Option<Origin>) {
        self.results.incomplete -= 1;
        if let Some(origin) = held {
            self.results.held -= 1;
            self.todo.push_back(Todo::GiveBack(origin, CREDIT));
        }
    }

    /// Copies a payload once: a peer can change a packet in a ring at any time.
    fn copy_of<'a>(
        &self,
        place: &PacketMemoryRef,
        payload: Payload,
        to: &'a mut [u8; BYTES],
    ) -> &'a [u8] {
        // the decoder has checked the length
        let (from, len) = (payload.offset, payload.len as usize);
        let to = to.get_mut(..len).unwrap_or_default();
        match place {
            PacketMemoryRef::Slot(slot) => {
                to.copy_from_slice(&self.memory.bytes(slot)[from..from + to.len()])
            }
            // SAFETY: the decoder has checked that the packet has these bytes, and a ring stays
            // mapped while its packet is processed.
            PacketMemoryRef::Ring(packet) => unsafe {
                to.as_mut_ptr()
                    .copy_from_nonoverlapping(packet.at(from), to.len());
            },
        }
        to
    }

    /// Executes an operation. Returns the size of the results in bytes.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the endpoint was opened without atomics of peers. `EACCES`: without the right
    /// that the operation needs. Those of the region.
    fn change(
        &self,
        atomic: &Atomic,
        operation: Arithmetic,
        operands: &[u8],
        earlier: &mut [u8; BYTES],
    ) -> Result<usize> {
        let change = ElementsAccess {
            operation,
            addr: atomic.addr,
            key: atomic.key,
            count: atomic.count.into(),
            operands,
            fetches: atomic.fetches,
        };
        let rights = self.accepts.atomics;
        if rights.is_empty() {
            return Err(FiErrno::EOPNOTSUPP);
        }
        if !rights.contains(change.access()) {
            return Err(FiErrno::EACCES);
        }
        let regions = self.objects.mr.accessible_regions();
        regions.change(&self.objects.pd, &change, earlier)?;
        // as the peers of a key of the directory count (`docs/protocol.md`, "Counted events")
        let event = match atomic.fetches {
            true => Event::Read,
            false => Event::Write,
        };
        if atomic.last {
            self.completions.count_remote(event);
        }
        Ok(if atomic.fetches { change.len() } else { 0 })
    }

    /// RESULT: ends the operation that it answers.
    pub(super) fn result(
        &mut self,
        origin: Origin,
        key: TxKey,
        status: u16,
        (place, values): (&PacketMemoryRef, Payload),
    ) {
        let Some(op) = self.tx.get_mut(key) else {
            return;
        };
        let Kind::Atomic(_) = op.kind else {
            return;
        };
        if op.peer != origin.peer || !op.posted || op.fin.is_some() {
            return;
        }
        let expected = if status == 0 { op.iov.len() } else { 0 };
        if values.len as usize != expected {
            return self.todo.extend(self.arriving.map(Todo::Violated));
        }
        let to = op.iov;
        let mut bytes = [0; BYTES];
        let values = self.copy_of(place, values, &mut bytes);
        // SAFETY: the application keeps the buffers until the operation completes.
        unsafe { to.write(0, values) };
        let Some(op) = self.tx.get_mut(key) else {
            return;
        };
        op.fin = Some(status);
        self.todo.push_back(Todo::Release(origin.peer));
        self.finish_if_over(key);
    }

    /// Executes an atomic of this endpoint on itself.
    pub(super) fn own_atomic(&mut self, key: TxKey, atomic: &Atomic) {
        let Some(op) = self.tx.get(key) else {
            return;
        };
        let (len, to) = (op.len, op.iov);
        let operands = op
            .slot
            .as_ref()
            .map(|slot| &self.memory.bytes(slot)[PAYLOAD..PAYLOAD + len]);
        let mut earlier = [0; BYTES];
        let result = match arithmetic(atomic) {
            Some(arithmetic) => self.change(
                atomic,
                arithmetic,
                operands.unwrap_or_default(),
                &mut earlier,
            ),
            None => Err(FiErrno::EOPNOTSUPP),
        };
        if let Ok(len) = result {
            // SAFETY: the application keeps the buffers until the operation completes.
            unsafe { to.write(0, &earlier[..len]) };
        }
        self.finish(key, result.map(|_| ()));
    }
}
