//! Shared receive contexts, `fi_srx_context(3)`: receives that all bound endpoints consume.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::recv::MSG_FLAGS;
use crate::conn::Circuits;
use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::local::MAX_IOV;
use crate::initiator::refusal;
use crate::log::warn_log;
use crate::mr::{Kept, LocalKeys};
use crate::msg::{Limits, LocalIov};
use crate::queue::srx_slots::{SharedRecv, SharedSlots};
use crate::queue::xrc_receives::{PostedBuffers, Strangers, XrcReceives};
use crate::queue::{CompletionQueue, shared_recv};
use crate::verbs::{QpNumber, RecvRequest, Sge, Srq, SrqNumber, Xrcd};

/// Attributes of a new shared receive context (`fi_srx_context(3)`).
#[derive(Clone, Copy, Debug)]
pub struct SharedRxConfig {
    /// Maximum number of posted receives, at least 1.
    pub size: usize,
    /// Buffers per receive, at least 1.
    pub iov_limit: usize,
    /// Default flags of receives (`rx_attr->op_flags`).
    pub op_flags: Flags,
    /// Whether the endpoints of the context may be on XRC: the first one that is enabled decides.
    pub xrc: bool,
}

/// A shared receive context (`fi_srx_context(3)`) on a shared receive queue. Thread safe.
///
/// Completions go to the completion queues of the endpoints that consumed the receives. Receives
/// still posted when the context is dropped are discarded without a completion; by then no endpoint
/// is left, because endpoints hold a reference to the context.
#[derive(Debug)]
pub struct SharedRx {
    domain: Arc<Domain>,
    /// Created with the first endpoint if the endpoints may be on XRC. Changed under `posting`.
    queue: OnceLock<Queue>,
    size: usize,
    slots: Arc<SharedSlots>,
    iov_limit: usize,
    op_flags: Flags,
    posting: Mutex<Posting>,
}

/// The receive queue of the device.
#[derive(Debug)]
enum Queue {
    Rc(Arc<Srq>),
    /// All receives complete in one completion queue.
    Xrc(Arc<Srq>, Arc<CompletionQueue>, Arc<PostedBuffers>),
}

/// Ends targets through which messages come that were meant for another queue.
#[derive(Debug)]
struct Ender {
    circuits: Weak<Circuits>,
    xrcd: Arc<Xrcd>,
}

impl Strangers for Ender {
    fn met(&self, target: u32) {
        if let (Some(circuits), Some(target)) = (self.circuits.upgrade(), QpNumber::new(target)) {
            circuits.fail_target(&self.xrcd, target);
        }
    }
}

impl Queue {
    #[inline(always)]
    fn srq(&self) -> &Srq {
        match self {
            Self::Rc(srq) => srq,
            Self::Xrc(srq, ..) => srq,
        }
    }

    /// Stores the buffers of a receive that will be posted.
    #[inline(always)]
    fn keep(&self, number: u32, sges: &[Sge]) {
        if let Self::Xrc(_, _, buffers) = self {
            buffers.keep(number, sges);
        }
    }
}

/// A receive that was posted before the queue exists.
#[derive(Debug)]
struct Early {
    wr_id: u64,
    sges: Vec<Sge>,
}

/// State for posting receives.
#[derive(Debug)]
struct Posting {
    early: Vec<Early>,
    local: LocalKeys,
    /// Registrations of the receives under way, indexed by slot number; empty if the application
    /// registers the buffers, unless a refresh may replace their registrations.
    held: Vec<Vec<Kept>>,
    /// Index in `held` that [`Self::release_some`] examines next.
    next: usize,
}

impl Posting {
    /// Examines two slots, and releases the registrations there if the receive is complete: the
    /// slots that are used again are the last ones that became free, so those of a burst of
    /// receives may not be used again for long.
    fn release_some(&mut self, slots: &SharedSlots) {
        for _ in 0..2 {
            self.next = match self.next + 1 {
                next if next < self.held.len() => next,
                _ => 0,
            };
            if let Some(kept) = self.held.get_mut(self.next)
                && !kept.is_empty()
                && !slots.is_posted(self.next as u32)
            {
                self.local.exchange(kept);
            }
        }
    }
}

impl Drop for Posting {
    fn drop(&mut self) {
        for kept in &mut self.held {
            self.local.exchange(kept);
            self.local.release_taken();
        }
    }
}

impl SharedRx {
    /// Opens a shared receive context (`fi_srx_context(3)`).
    ///
    /// # Errors
    /// - `EINVAL`: a size is 0 or exceeds the device's limit.
    /// - `ENOSYS`: the device has no shared receive queues.
    /// - `ENOMEM`, `ENOSPC`: no resources left.
    pub fn open(domain: &Arc<Domain>, config: SharedRxConfig) -> Result<Arc<Self>> {
        let limits = Limits::of(domain.device());
        if limits.shared_rx_size == 0 {
            return Err(FiErrno::ENOSYS);
        }
        if !(1..=limits.shared_rx_size).contains(&config.size)
            || !(1..=limits.shared_rx_iov_limit).contains(&config.iov_limit)
        {
            return Err(FiErrno::EINVAL);
        }
        let queue = OnceLock::new();
        if !config.xrc {
            let srq = Srq::create(domain.pd(), config.size, config.iov_limit)?;
            queue.get_or_init(|| Queue::Rc(Arc::new(srq)));
        }
        let id = domain.shared_ids().take()?;
        Ok(Arc::new(Self {
            domain: Arc::clone(domain),
            queue,
            size: config.size,
            slots: Arc::new(SharedSlots::new(id, config.size)),
            iov_limit: config.iov_limit,
            op_flags: config.op_flags,
            posting: Mutex::new(Posting {
                early: Vec::new(),
                local: LocalKeys::new(domain.mr(), domain.pd()),
                held: Vec::new(),
                next: 0,
            }),
        }))
    }

    /// The domain that the context belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// The queue of endpoints on RC.
    ///
    /// # Errors
    /// `EINVAL`: the context has endpoints on XRC. Those of [`Srq::create`].
    pub(super) fn rc_queue(&self) -> Result<&Arc<Srq>> {
        if self.queue.get().is_none() {
            let mut posting = self.posting.lock();
            if self.queue.get().is_none() {
                let srq = Srq::create(self.domain.pd(), self.size, self.iov_limit)?;
                self.begin(&mut posting, Queue::Rc(Arc::new(srq)))?;
            }
        }
        match self.queue.get() {
            Some(Queue::Rc(srq)) => Ok(srq),
            _ => Err(FiErrno::EINVAL),
        }
    }

    /// Creates the queue of endpoints on XRC, unless it exists.
    ///
    /// # Errors
    /// `EINVAL`: the context has endpoints on RC, or its receives complete in another queue than
    /// `cq`. Those of [`Srq::create_xrc`].
    pub(super) fn enable_xrc(&self, xrcd: &Arc<Xrcd>, cq: &Arc<CompletionQueue>) -> Result<()> {
        let mut posting = self.posting.lock();
        match self.queue.get() {
            Some(Queue::Xrc(_, bound, _)) if Arc::ptr_eq(bound, cq) => return Ok(()),
            Some(Queue::Xrc(..)) => {
                warn_log!(
                    EpCtrl,
                    "all endpoints on XRC of one shared receive context have the same completion \
                     queue of receives"
                );
                return Err(FiErrno::EINVAL);
            }
            Some(Queue::Rc(_)) => {
                warn_log!(
                    EpCtrl,
                    "a shared receive context has endpoints on RC or on XRC"
                );
                return Err(FiErrno::EINVAL);
            }
            None => {}
        }
        let (pd, device_cq) = (self.domain.pd(), cq.device_cq()?);
        let srq = Srq::create_xrc(pd, xrcd, device_cq, self.size, self.iov_limit)?;
        let srq = Arc::new(srq);
        let buffers = Arc::new(PostedBuffers::new(self.slots.depth(), self.iov_limit));
        let behaviour = self.domain.device().xrc_behaviour();
        let shows_target = behaviour.is_ok_and(|seen| seen.target_number.works());
        let receives = shows_target.then(|| {
            let circuits = self.domain.circuits().map(Arc::downgrade);
            let ender = Ender {
                circuits: circuits.unwrap_or_default(),
                xrcd: Arc::clone(xrcd),
            };
            XrcReceives::new(Arc::clone(&srq), Arc::clone(&buffers), Box::new(ender))
        });
        cq.add_context(&self.slots, receives)?;
        let begun = self.begin(&mut posting, Queue::Xrc(srq, Arc::clone(cq), buffers));
        begun.inspect_err(|_| cq.remove_context(&self.slots))
    }

    /// An endpoint on XRC receives through this target, or does so no more. Each call is for one
    /// endpoint.
    pub(super) fn receive_through(&self, target: QpNumber, on: bool) {
        if let Some(Queue::Xrc(_, cq, _)) = self.queue.get() {
            cq.receive_through(&self.slots, target.get(), on);
        }
    }

    /// Waits until the peers of the endpoints on XRC that were closed post nothing to the context
    /// any more, at most 1 s: a request to a queue that has ended would break the connections of
    /// other processes too. No endpoint uses the context. Not inside an event.
    pub fn await_notices(&self) {
        if let Some(Queue::Xrc(..)) = self.queue.get()
            && let Ok(circuits) = self.domain.circuits()
        {
            circuits.await_notices();
        }
    }

    /// Posts the early receives to the queue, and uses it from now on.
    fn begin(&self, posting: &mut Posting, queue: Queue) -> Result<()> {
        for early in &posting.early {
            let (wr_id, sges) = (early.wr_id, &early.sges[..]);
            // the low 32 bits are the number
            queue.keep(wr_id as u32, sges);
            // SAFETY: the callers of `receive` keep its contract.
            unsafe { queue.srq().post_recv(&RecvRequest { wr_id, sges }) }?;
        }
        posting.early = Vec::new();
        // set once: the caller has seen none under the lock
        let _ = self.queue.set(queue);
        Ok(())
    }

    /// The number of the queue of endpoints on XRC.
    pub(super) fn number(&self) -> Option<SrqNumber> {
        self.queue.get().and_then(|queue| queue.srq().number())
    }

    /// Number of registrations of receives that are not released yet.
    #[cfg(test)]
    pub(super) fn registrations(&self) -> usize {
        self.posting.lock().held.iter().map(Vec::len).sum()
    }

    pub(super) fn slots(&self) -> &Arc<SharedSlots> {
        &self.slots
    }

    /// `fi_recv`, `fi_recvv` on the context.
    ///
    /// # Errors
    /// - `EAGAIN`: the maximum number of receives is posted.
    /// - `EINVAL`: too many buffers, or a required descriptor is wrong.
    /// - `EMSGSIZE`: longer than the device's maximum message.
    ///
    /// # Safety
    /// Buffers must stay valid until the operation completes or the context is dropped, and
    /// descriptors be NULL or those of live regions that cover the buffers.
    #[inline]
    pub unsafe fn recv(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.receive(local, context, self.op_flags) }
    }

    /// `fi_recvmsg` on the context.
    ///
    /// # Errors
    /// As [`Self::recv`]; `EBADFLAGS`: a flag that the operation does not accept.
    ///
    /// # Safety
    /// As [`Self::recv`].
    #[inline]
    pub unsafe fn recv_msg(&self, local: LocalIov<'_>, context: usize, flags: Flags) -> Result<()> {
        if flags.intersects(MSG_FLAGS.complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.receive(local, context, flags) }
    }

    #[inline]
    unsafe fn receive(&self, local: LocalIov<'_>, context: usize, flags: Flags) -> Result<()> {
        let longest = self.domain.max_msg_size();
        if local.count() > self.iov_limit {
            return Err(refusal::too_many_buffers(local.count(), self.iov_limit));
        }
        if local.len() > longest {
            return Err(refusal::too_long(local.len(), longest));
        }
        let mut posting = self.posting.lock();
        let Posting {
            local: keys,
            held,
            early,
            ..
        } = &mut *posting;
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: the caller keeps the contract of this function.
        let sges =
            unsafe { local.recv_sges(keys, &mut sges) }.inspect_err(|_| keys.release_taken())?;
        let recv = SharedRecv {
            context,
            selected: flags.contains(Flags::COMPLETION),
        };
        let number = self.slots.take(recv).ok_or(FiErrno::EAGAIN);
        let number = number.inspect_err(|_| keys.release_taken())?;
        let wr_id = shared_recv(self.slots.id(), number);
        let posted = match self.queue.get() {
            Some(queue) => {
                queue.keep(number, sges);
                // SAFETY: the caller keeps the contract of this function.
                unsafe { queue.srq().post_recv(&RecvRequest { wr_id, sges }) }
            }
            None => post_early(early, wr_id, sges),
        };
        if let Err(error) = posted {
            self.slots.complete(number);
            keys.release_taken();
            return Err(error);
        }
        hold(held, number as usize, keys);
        if !held.is_empty() {
            posting.release_some(&self.slots);
        }
        Ok(())
    }
}

/// Keeps a receive until the queue exists.
#[cold]
fn post_early(early: &mut Vec<Early>, wr_id: u64, sges: &[Sge]) -> Result<()> {
    let sges = sges.to_vec();
    early.push(Early { wr_id, sges });
    Ok(())
}

/// Stores a receive's registrations until its slot number is reused, or
/// [`Posting::release_some`] finds the receive complete.
#[inline]
fn hold(held: &mut Vec<Vec<Kept>>, number: usize, keys: &mut LocalKeys) {
    if number >= held.len() && keys.has_taken() {
        held.resize_with(number + 1, Vec::new);
    }
    if let Some(place) = held.get_mut(number) {
        keys.exchange(place);
    }
}

impl Drop for SharedRx {
    fn drop(&mut self) {
        if let Some(Queue::Xrc(srq, cq, _)) = self.queue.take() {
            // the device discards the completions of a queue that is destroyed
            cq.remove_context(&self.slots);
            drop(srq);
        }
        self.domain.shared_ids().give_back(self.slots.id());
    }
}
