//! Converts work completions of a device queue to the completions that the application reads.

use std::cell::{Cell, RefCell};
use std::num::NonZeroU32;
use std::sync::Arc;

use rdma_core_sys as sys;

use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::queue::slots::{EndpointSlots, EngineRequest, Slot};
use crate::queue::source::{Entry, NoReader, Sink};
use crate::queue::srx_slots::SharedSlots;
use crate::queue::wr_id::WrId;
use crate::queue::xrc_receives::XrcReceives;
use crate::queue::{Completion, CompletionError, EntryWriter};
use crate::verbs::Wc;

/// Set after a completion of an endpoint with deferred operations.
const RESUME: u8 = 1;
/// Set if the queue has sources besides the device queue.
pub(super) const SOURCES: u8 = 2;
/// Set if the queue has sources, and its device queue has never had an endpoint.
pub(super) const ONLY_SOURCES: u8 = 4;

/// The endpoints whose requests complete in a device queue.
#[derive(Debug, Default)]
pub(super) struct EndpointTable {
    /// Indexed by the index in `wr_id`.
    pub(super) endpoints: Vec<Attachment>,
    /// Unused indices of `endpoints`.
    pub(super) free: Vec<u16>,
    /// Shared receive contexts whose receives may complete in this queue, by their index.
    pub(super) shared: Vec<Option<Sharer>>,
    /// Queue pairs that consume receives of `shared`, sorted by number, each with its endpoint's
    /// index.
    pub(super) sharing: Vec<(u32, u16)>,
    /// Work of a read besides polling the device queue: [`RESUME`], [`SOURCES`],
    /// [`ONLY_SOURCES`].
    pub(super) more: Cell<u8>,
    /// Indices of the endpoints that completions have found with deferred operations.
    waiting: RefCell<Vec<u16>>,
    /// Endpoints visited by [`Self::take_waiting`], for tests.
    #[cfg(test)]
    pub(super) visits: Cell<usize>,
}

/// An endpoint's entry in the table that `wr_id` refers to.
#[derive(Debug, Default)]
pub(super) struct Attachment {
    pub(super) generation: u16,
    pub(super) slots: Option<Arc<EndpointSlots>>,
    /// Whether only selected receives of a shared context produce completion entries.
    pub(super) selective: bool,
    /// The queue pair's number in [`EndpointTable::sharing`]. No endpoint's queue pair has number
    /// 0.
    pub(super) sharing: Option<NonZeroU32>,
    /// Whether [`EndpointTable::waiting`] has the endpoint's index.
    pub(super) listed: Cell<bool>,
}

/// A shared receive context whose receives complete in this queue.
#[derive(Debug)]
pub(super) struct Sharer {
    pub(super) slots: Arc<SharedSlots>,
    /// Number of this queue's endpoints that use the context; 1 for a context of an XRC domain.
    pub(super) users: usize,
    /// The endpoints on XRC that use the context, by their index. They have one setting and the
    /// same counters: a completion shows the target, which many endpoints use.
    pub(super) on_xrc: Vec<u16>,
    /// Of a context on XRC, if the device reports the target of a message.
    pub(super) xrc: Option<XrcReceives>,
}

impl Attachment {
    /// Processes a completion whose generation is not the endpoint's: of the probe or another of
    /// the engine's own requests. A completion of a closed endpoint is ignored.
    #[cold]
    fn stray(&self, id: WrId, wc: &Wc) {
        if id.generation() == self.generation | WrId::PROBE
            && let Some(slots) = &self.slots
        {
            let success = wc.status() == sys::IBV_WC_SUCCESS;
            match EngineRequest::of(id.0 as u32) {
                None => slots.probe_done(success),
                Some(kind) => {
                    slots.engine_requests.end(kind, success);
                    if !success {
                        slots.notify_failure();
                    }
                }
            }
        }
    }
}

/// Whether a request with this status (`ibv_wc_status`) would fail on each connection. Others fail
/// with their connection.
pub(crate) fn is_refusal(status: u32) -> bool {
    matches!(
        status,
        sys::IBV_WC_LOC_LEN_ERR
            | sys::IBV_WC_LOC_QP_OP_ERR
            | sys::IBV_WC_LOC_PROT_ERR
            | sys::IBV_WC_LOC_ACCESS_ERR
            | sys::IBV_WC_REM_ACCESS_ERR
            | sys::IBV_WC_REM_INV_REQ_ERR
            | sys::IBV_WC_REM_OP_ERR
            | sys::IBV_WC_BAD_RESP_ERR
    )
}

/// The errno for a failed work completion (`ibv_wc_status`).
pub(crate) fn status_errno(status: u32, recv: bool) -> FiErrno {
    match status {
        sys::IBV_WC_LOC_LEN_ERR if recv => FiErrno::ETRUNC,
        sys::IBV_WC_LOC_LEN_ERR => FiErrno::EMSGSIZE,
        sys::IBV_WC_LOC_QP_OP_ERR => FiErrno::EINVAL,
        sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_ACCESS_ERR | sys::IBV_WC_MW_BIND_ERR => {
            FiErrno::EACCES
        }
        sys::IBV_WC_WR_FLUSH_ERR => FiErrno::ECANCELED,
        sys::IBV_WC_REM_ACCESS_ERR => FiErrno::EKEYREJECTED,
        sys::IBV_WC_REM_INV_REQ_ERR | sys::IBV_WC_REM_OP_ERR => FiErrno::EREMOTEIO,
        sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RESP_TIMEOUT_ERR => FiErrno::ETIMEDOUT,
        sys::IBV_WC_RNR_RETRY_EXC_ERR => FiErrno::ENORX,
        _ => FiErrno::EIO,
    }
}

#[cold]
pub(super) fn failure(slot: &Slot, status: u32, vendor_err: u32) -> CompletionError {
    CompletionError {
        completion: Completion::new(slot.context, slot.flags),
        olen: 0,
        err: status_errno(status, slot.flags.contains(Flags::RECV)),
        prov_errno: status as i32,
        vendor_err: Some(vendor_err),
    }
}

impl Completion {
    /// Fills in the fields of a receive from its work completion.
    #[inline]
    fn received(&mut self, wc: &Wc) {
        self.len = wc.byte_len();
        if wc.is_recv_rdma() {
            self.flags = Flags::RMA | Flags::REMOTE_WRITE;
        }
        if let Some(imm) = wc.imm() {
            self.flags |= Flags::REMOTE_CQ_DATA;
            self.data = imm.into();
        }
    }
}

/// The error entry of an operation that the engine refused, with the status of a device's refusal.
#[cold]
fn refusal(slot: &Slot, error: FiErrno) -> CompletionError {
    CompletionError {
        err: error,
        ..failure(slot, sys::IBV_WC_REM_ACCESS_ERR, 0)
    }
}

impl EndpointTable {
    /// Sets or clears a flag of [`Self::more`].
    pub(super) fn set_more(&self, flag: u8, on: bool) {
        let others = self.more.get() & !flag;
        self.more.set(if on { others | flag } else { others });
    }

    /// Whether endpoints with deferred operations must be resumed.
    pub(super) fn resumes(&self) -> bool {
        self.more.get() & RESUME != 0
    }

    /// Records that the endpoint at `index` has deferred operations. Allocates.
    #[cold]
    #[inline(never)]
    pub(super) fn add_waiting(&self, index: usize) {
        self.set_more(RESUME, true);
        if self.endpoints[index].listed.replace(true) {
            return;
        }
        // an endpoint's index has 16 bits
        self.waiting.borrow_mut().push(index as u16);
    }

    /// The endpoints that must be resumed now: of those in the list, the ones that still have
    /// deferred operations. The others leave the list.
    pub(super) fn take_waiting(&self) -> Vec<Arc<EndpointSlots>> {
        self.set_more(RESUME, false);
        let mut waiting = self.waiting.borrow_mut();
        let mut found = Vec::with_capacity(waiting.len());
        waiting.retain(|&index| {
            #[cfg(test)]
            self.visits.set(self.visits.get() + 1);
            let place = &self.endpoints[usize::from(index)];
            let slots = place.slots.as_ref().filter(|slots| slots.needs_progress());
            found.extend(slots.cloned());
            place.listed.set(slots.is_some());
            slots.is_some()
        });
        found
    }

    /// Processes a work completion, and passes at most one completion of the application to `sink`.
    #[inline(always)]
    pub(super) fn complete<W: EntryWriter>(&self, wc: &Wc, sink: &mut Sink<'_, W>) {
        let id = WrId(wc.wr_id());
        let place = match self.endpoints.get(id.index()) {
            Some(place) if place.generation == id.generation() => place,
            _ if id.is_shared() => {
                if let Some(entry) = self.complete_shared(id, wc) {
                    sink.pass(&entry);
                }
                return;
            }
            Some(place) => {
                place.stray(id, wc);
                if place
                    .slots
                    .as_ref()
                    .is_some_and(|slots| slots.needs_progress())
                {
                    self.add_waiting(id.index());
                }
                return;
            }
            None => return,
        };
        let Some(slots) = place.slots.as_ref() else {
            return;
        };
        if slots.needs_progress() {
            self.add_waiting(id.index());
        }
        let recv = id.0 & WrId::RECV != 0;
        let ring = if recv { &slots.rx } else { &slots.tx };
        // the low 32 bits are the number
        let Some(slot) = ring.complete(id.0 as u32) else {
            return;
        };
        if let Some(counters) = slots.counters()
            && !slot.more
        {
            let success = wc.status() == sys::IBV_WC_SUCCESS && slot.refused.is_none();
            // a receive that a peer's write consumed has received no message
            if !(success && recv && wc.is_recv_rdma()) {
                counters.count(slot.flags, success);
            }
        }
        if wc.status() != sys::IBV_WC_SUCCESS {
            slots.notify_failure();
            let error = failure(&slot, wc.status(), wc.vendor_err());
            let reported = if recv {
                slot.visible || slot.failures.include(error.err)
            } else {
                slots.reports_failure(&slot, error.err)
            };
            if reported {
                sink.fail(error);
            }
            return;
        }
        if let Some(error) = slot.refused {
            if slot.failures.include(error) {
                sink.fail(refusal(&slot, error));
            }
            return;
        }
        if !slot.visible {
            return;
        }
        let mut completion = Completion::new(slot.context, slot.flags);
        if recv {
            completion.received(wc);
        }
        sink.complete(&completion);
    }

    /// As [`Self::complete`], not inlined.
    #[cold]
    pub(super) fn complete_late(&self, wc: &Wc, sink: &mut Sink<'_, NoReader>) {
        self.complete(wc, sink);
    }

    /// As [`Self::complete`], for a receive of a shared context.
    #[inline(never)]
    fn complete_shared(&self, id: WrId, wc: &Wc) -> Option<Entry> {
        let sharer = self.shared.get(id.index())?.as_ref()?;
        // the `wr_id` contains only the low bits of the context's generation
        if (sharer.slots.id().generation & WrId::GENERATIONS) | WrId::PROBE != id.generation() {
            return None;
        }
        let strange = sharer.xrc.as_ref().filter(|xrc| xrc.is_strange(wc));
        // the low 32 bits are the number
        if strange.is_some_and(|xrc| xrc.post_again(id.0 as u32, wc)) {
            return None;
        }
        let recv = sharer.slots.complete(id.0 as u32)?;
        let number = wc.qp_num();
        let entry = self.sharing.binary_search_by_key(&number, |entry| entry.0);
        let consumer = entry.ok().and_then(|at| self.sharing.get(at));
        let consumer = consumer.map(|entry| entry.1);
        let place = consumer
            .or_else(|| sharer.on_xrc.first().copied())
            .and_then(|index| self.endpoints.get(usize::from(index)));
        let slots = place.and_then(|place| place.slots.as_ref());
        let success = wc.status() == sys::IBV_WC_SUCCESS && strange.is_none();
        let slot = Slot {
            context: recv.context,
            flags: Flags::RECV.union(Flags::MSG),
            ..Slot::default()
        };
        if let Some(slots) = slots {
            slots.shared_done();
            if let Some(counters) = slots.counters()
                && !(success && wc.is_recv_rdma())
            {
                counters.count(slot.flags, success);
            }
        }
        if !success {
            // the users of a target that has failed get an event
            if let (Some(_), Some(slots)) = (consumer, slots) {
                slots.notify_failure();
            }
            let status = match strange {
                // the message is not the application's, and the receive is not posted
                Some(_) => sys::IBV_WC_WR_FLUSH_ERR,
                None => wc.status(),
            };
            let error = failure(&slot, status, wc.vendor_err());
            return Some(Entry::Failed(error));
        }
        if place.is_some_and(|place| place.selective) && !recv.selected {
            return None;
        }
        let mut completion = Completion::new(slot.context, slot.flags);
        completion.received(wc);
        Some(Entry::Done(completion))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushed_is_cancelled_and_the_rest_has_a_reason() {
        assert_eq!(
            status_errno(sys::IBV_WC_WR_FLUSH_ERR, true),
            FiErrno::ECANCELED
        );
        assert_eq!(status_errno(sys::IBV_WC_LOC_LEN_ERR, true), FiErrno::ETRUNC);
        assert_eq!(
            status_errno(sys::IBV_WC_RETRY_EXC_ERR, false),
            FiErrno::ETIMEDOUT
        );
        assert_eq!(
            status_errno(sys::IBV_WC_REM_ACCESS_ERR, false),
            FiErrno::EKEYREJECTED
        );
        assert_eq!(status_errno(9999, false), FiErrno::EIO);
    }
}
