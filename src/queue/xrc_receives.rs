//! Receives of a shared receive context on XRC: through which targets its messages arrive, and the
//! buffers of the posted receives, so that the receive of a message for another queue can be posted
//! again. `docs/protocol-xrc.md`, "Stale SRQ numbers".

#![allow(
    unsafe_code,
    reason = "posts receives again, in buffers that were posted"
)]

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_core_sys as sys;

use crate::log::info_log;
use crate::sync::{AtomicU32, AtomicU64};
use crate::verbs::{Lkey, RecvRequest, Sge, Srq, Wc};

/// Targets that a context has used last, through which late messages may come.
const LEFT: usize = 64;
/// Buffers of a receive that is posted again without an allocation.
const PARTS: usize = 16;

/// The receiver of what a context has found out. Thread safe.
pub(crate) trait Strangers: Send + Sync + std::fmt::Debug {
    /// A message has come through a target that no endpoint of the context has ever used. Called
    /// once for each target, with the lock of a completion queue held.
    fn met(&self, target: u32);
}

/// One buffer of a posted receive.
#[derive(Debug, Default)]
struct Part {
    addr: AtomicU64,
    length: AtomicU32,
    lkey: AtomicU32,
}

/// The buffers of the posted receives of a context, by the number of their slot. Those of one slot
/// are written by the poster that has taken it, and read by the poller that has its completion.
#[derive(Debug)]
pub(crate) struct PostedBuffers {
    /// Buffers per receive.
    most: usize,
    counts: Box<[AtomicU32]>,
    parts: Box<[Part]>,
}

impl PostedBuffers {
    /// For `depth` receives of at most `most` buffers.
    pub(crate) fn new(depth: usize, most: usize) -> Self {
        debug_assert!(most <= PARTS, "the limit of an endpoint");
        Self {
            most,
            counts: (0..depth).map(|_| AtomicU32::new(0)).collect(),
            parts: (0..depth * most).map(|_| Part::default()).collect(),
        }
    }

    /// Stores the buffers of a receive before it is posted.
    #[inline]
    pub(crate) fn keep(&self, number: u32, sges: &[Sge]) {
        let first = number as usize * self.most;
        let parts = self.parts.get(first..).unwrap_or_default();
        for (part, sge) in parts.iter().zip(sges) {
            part.addr.store(sge.addr, Ordering::Relaxed);
            part.length.store(sge.length, Ordering::Relaxed);
            part.lkey.store(sge.lkey.get(), Ordering::Relaxed);
        }
        if let Some(count) = self.counts.get(number as usize) {
            // at most `most`, which is a small number
            count.store(sges.len() as u32, Ordering::Release);
        }
    }

    /// The buffers of a receive that has completed.
    fn of(&self, number: u32) -> impl Iterator<Item = Sge> {
        let count = self.counts.get(number as usize);
        let count = count.map_or(0, |count| count.load(Ordering::Acquire));
        let first = number as usize * self.most;
        let parts = self.parts.get(first..).unwrap_or_default();
        parts.iter().take(count as usize).map(|part| Sge {
            addr: part.addr.load(Ordering::Relaxed),
            length: part.length.load(Ordering::Relaxed),
            lkey: Lkey::new(part.lkey.load(Ordering::Relaxed)),
        })
    }
}

/// A context, as the completion queue of its receives uses it, under that queue's lock.
#[derive(Debug)]
pub(crate) struct XrcReceives {
    srq: Arc<Srq>,
    buffers: Arc<PostedBuffers>,
    strangers: Box<dyn Strangers>,
    /// The numbers of the targets that its endpoints use, each with the number of these endpoints,
    /// sorted.
    targets: Vec<(u32, u32)>,
    /// The target of the last message.
    last: Cell<u32>,
    /// Targets that its endpoints have left (true), and those of strangers that were reported
    /// (false); the newest last.
    left: RefCell<Vec<(u32, bool)>>,
}

impl XrcReceives {
    /// Of a device that reports the target in the completions of receives.
    pub(crate) fn new(
        srq: Arc<Srq>,
        buffers: Arc<PostedBuffers>,
        strangers: Box<dyn Strangers>,
    ) -> Self {
        Self {
            srq,
            buffers,
            strangers,
            targets: Vec::new(),
            last: Cell::new(0),
            left: RefCell::default(),
        }
    }

    /// One more endpoint receives through this target.
    pub(super) fn join(&mut self, target: u32) {
        match self.targets.binary_search_by_key(&target, |entry| entry.0) {
            Ok(at) => self.targets[at].1 += 1,
            Err(at) => self.targets.insert(at, (target, 1)),
        }
        // the number may be that of an earlier target
        self.left.get_mut().retain(|(left, _)| *left != target);
    }

    /// Reverts [`Self::join`].
    pub(super) fn leave(&mut self, target: u32) {
        let Ok(at) = self.targets.binary_search_by_key(&target, |entry| entry.0) else {
            return;
        };
        self.targets[at].1 -= 1;
        if self.targets[at].1 == 0 {
            self.targets.remove(at);
            self.last.set(0);
            note(self.left.get_mut(), (target, true));
        }
    }

    /// Whether a completion is that of a message to another queue, which has the number of this one
    /// now or had it.
    #[inline]
    pub(super) fn is_strange(&self, wc: &Wc) -> bool {
        let target = wc.qp_num();
        if target == self.last.get() {
            return false;
        }
        let found = self.targets.binary_search_by_key(&target, |entry| entry.0);
        if found.is_ok() {
            self.last.set(target);
            return false;
        }
        // a receive that was flushed has met no message; a late message of a peer that has not got
        // the notice of the end is delivered, as those before it
        matches!(wc.status(), sys::IBV_WC_SUCCESS | sys::IBV_WC_LOC_LEN_ERR)
            && !self.left.borrow().contains(&(target, true))
    }

    /// Posts the receive of a strange message again. Returns whether that succeeded.
    #[cold]
    pub(super) fn post_again(&self, number: u32, wc: &Wc) -> bool {
        let target = wc.qp_num();
        info_log!(
            EpData,
            "a message through target {target:#x} is dropped: no endpoint of the shared receive \
             context has used this target"
        );
        let reported = self.left.borrow().contains(&(target, false));
        if !reported {
            note(&mut self.left.borrow_mut(), (target, false));
            self.strangers.met(target);
        }
        let mut sges = [Sge::default(); PARTS];
        let mut count = 0;
        for (place, sge) in sges.iter_mut().zip(self.buffers.of(number)) {
            *place = sge;
            count += 1;
        }
        let request = RecvRequest {
            wr_id: wc.wr_id(),
            sges: &sges[..count],
        };
        // SAFETY: the application keeps the buffers until the receive completes for it.
        let posted = unsafe { self.srq.post_recv(&request) };
        posted.is_ok()
    }
}

fn note(left: &mut Vec<(u32, bool)>, target: (u32, bool)) {
    if left.len() == LEFT {
        left.remove(0);
    }
    left.push(target);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffers_of_each_slot_are_kept() {
        let buffers = PostedBuffers::new(3, 2);
        let sge = |n: u32| Sge {
            addr: u64::from(n) << 40,
            length: n,
            lkey: Lkey::new(n + 100),
        };
        buffers.keep(1, &[sge(1), sge(2)]);
        buffers.keep(2, &[sge(3)]);
        buffers.keep(0, &[]);
        let of = |number| buffers.of(number).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(1), [sge(1), sge(2)]);
        assert_eq!(of(2), [sge(3)]);
        buffers.keep(1, &[sge(4)]);
        assert_eq!(of(1), [sge(4)]);
        // no slot has this number
        assert_eq!(of(3), []);
        buffers.keep(3, &[sge(5)]);
    }

    #[test]
    fn the_last_targets_that_were_left_are_noted() {
        let mut left = Vec::new();
        for target in 0..LEFT as u32 + 2 {
            note(&mut left, (target, true));
        }
        assert_eq!(left.len(), LEFT);
        assert_eq!((left[0].0, left[LEFT - 1].0), (2, LEFT as u32 + 1));
    }
}
