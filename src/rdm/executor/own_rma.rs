//! RMA of an endpoint to itself: the processor copies, by `mr/targets.rs`. `docs/rdm.md`, "RMA".

#![allow(unsafe_code, reason = "copies from and to buffers of the application")]

use std::sync::Arc;

use super::Executor;
use super::rma::refused_part;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::RemoteIov;
use crate::mr::{Span, mapped_key};
use crate::queue::event_cell::Event;
use crate::rdm::core::Core;
use crate::rdm::iov::Iov;
use crate::rdm::peer::PeerKey;
use crate::rdm::rma::{Notice, RmaKey, RmaOp};
use crate::verbs::SendOpcode;

/// Bytes that are copied under the lock of the domain's regions.
const PIECE: usize = 1 << 20;

impl Executor {
    /// Executes an operation, or lists it behind those that wait.
    ///
    /// # Errors
    /// The operation is not begun. `EKEYREJECTED`: a mapped key that is not mapped any more.
    /// `EAGAIN`, `ENOMEM`: there is no memory for it.
    ///
    /// # Safety
    /// As [`Self::begin_rma`].
    pub(super) unsafe fn begin_own_rma(&mut self, core: &mut Core<Self>, op: RmaOp) -> Result<()> {
        // atomics of an endpoint on itself are packets
        debug_assert!(op.atomic.is_none());
        for range in &op.remote[..op.ranges] {
            mapped_key(&self.objects.mr, range.key)?;
        }
        let inject = op.request.flags.contains(Flags::INJECT);
        let waits = self.rma.first(op.peer).is_some() || self.is_behind_sends(core, &op);
        let key = self.rma.ops.insert(op).ok_or(FiErrno::EAGAIN)?;
        if !waits {
            self.own_rma(core, key);
            return Ok(());
        }
        // SAFETY: as this function.
        if let Err(error) = unsafe { self.copy_rma(key, inject) } {
            self.forget_rma(key);
            return Err(error);
        }
        self.rma.wait(key);
        Ok(())
    }

    /// Executes the operations that wait, up to the first one that is behind a message.
    pub(super) fn run_own_rma(&mut self, core: &mut Core<Self>, peer: PeerKey) {
        while let Some(key) = self.rma.first(peer) {
            if let Some(op) = self.rma.ops.get(key)
                && self.is_behind_sends(core, op)
            {
                break;
            }
            self.rma.pop(peer);
            if self.rma.ops.get(key).is_some_and(|op| op.atomic.is_some()) {
                // posted when another endpoint was expected at the address
                self.post_as_packet(core, key);
                continue;
            }
            self.own_rma(core, key);
        }
    }

    /// Executes an operation and ends it.
    fn own_rma(&mut self, core: &mut Core<Self>, key: RmaKey) {
        let Some(op) = self.rma.ops.get(key) else {
            return;
        };
        let (iov, peer, notice) = (op.iov, op.peer, op.notice);
        let event = match op.request.opcode {
            SendOpcode::Read => Event::Read,
            _ => Event::Write,
        };
        let (remote, ranges) = (op.remote, op.ranges);
        let mut start = 0;
        let mut result = Ok(());
        for range in &remote[..ranges] {
            let part = iov.part(start, range.len);
            start += range.len;
            // SAFETY: the application keeps the buffers until the operation completes; injected
            // data is valid during the call of the application, or in a slot.
            result = unsafe { self.own_range(range, &part, event) };
            if result.is_err() {
                break;
            }
            self.count_own(event);
        }
        if let Some(op) = self.rma.ops.get_mut(key) {
            (op.next, op.notice) = ((ranges, 0), Notice::No);
            if let Err(error) = result {
                refused_part(op, error);
            }
        }
        if let (Ok(()), Notice::Due(data)) = (result, notice) {
            self.completions.own_notice(peer, data, start);
        }
        self.settle_rma(core, key);
    }

    /// Copies one range.
    ///
    /// # Safety
    /// The local buffers are readable, for a read writable.
    unsafe fn own_range(&self, range: &RemoteIov, local: &Iov, event: Event) -> Result<()> {
        let mr = &self.objects.mr;
        let key = mapped_key(mr, range.key)?;
        let mut span = Span {
            addr: range.addr,
            key,
            left: range.len,
            event,
            generation: None,
        };
        if range.len == 0 {
            // as on a link, nothing is accessed, so the key need not be one
            // SAFETY: there are no buffers.
            let _ = unsafe { mr.targets().copy(&self.objects.pd, &mut span, &[]) };
            return Ok(());
        }
        while span.left != 0 {
            let done = range.len - span.left;
            let buffers = local.part(done, span.left.min(PIECE)).iovecs();
            // SAFETY: the caller promises the buffers.
            unsafe { mr.targets().copy(&self.objects.pd, &mut span, &buffers) }?;
        }
        Ok(())
    }

    /// Counts an operation on a region of this side, as the counters of the endpoint want it.
    fn count_own(&self, event: Event) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let counters = shared.remote_counters.lock();
        let counter = counters.iter().find(|(counted, _)| *counted == event);
        let counter = counter.map(|(_, counter)| Arc::clone(counter));
        drop(counters);
        if let Some(counter) = counter {
            counter.add(1);
        }
    }
}
