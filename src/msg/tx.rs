//! The transmit side of an endpoint: posts sends, RMA and atomics.

#![allow(unsafe_code, reason = "posts buffers whose caller promises for them")]

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::atomic::Scratch;
use super::core::{Core, CqBinding};
use super::local::MAX_IOV;
use super::refusal;
use super::remote::{Remote, Waiting};
use super::slab::{Bounce, Slab};
use super::transmit::{Target, Transmit};
use crate::conn::State;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::keys::KeyCache;
use crate::mr::mapped::MappedKey;
use crate::mr::{LocalKeys, MrDomain, Use};
use crate::msg::LengthOption;
use crate::queue::slots::{Rings, Slot, SlotRing};
use crate::queue::{CompletionQueue, WrId};
use crate::verbs::{Qp, SendOpcode, SendRequest, Sge};

/// The transmit side of an endpoint that has a queue pair.
#[derive(Debug)]
pub(crate) struct TxSide {
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<CompletionQueue>,
    pub(super) place: WrId,
    pub(super) selective: bool,
    iov_limit: usize,
    max_inline: usize,
    /// Maximum lengths in bytes: of messages, of RMA.
    max_inject: [usize; 2],
    max_len: [usize; 2],
    /// One request in `period` is signaled, so that the slots of the unsignaled ones become free.
    pub(super) period: u32,
    pub(super) unsignaled: u32,
    /// Whether a counter is bound: every request is then signaled, because an unsignaled last
    /// request would never be counted.
    pub(super) counted: bool,
    slab: Option<Slab>,
    /// Bounce buffer for short sources that would otherwise need a registration.
    pub(super) bounce: Option<Bounce>,
    pub(super) local: LocalKeys,
    scratch: Option<Scratch>,
    /// Whether all keys of the peer are chosen by its application.
    pub(super) application_keys: bool,
    /// Set once the peer's introduction was received.
    pub(super) remote: Option<Box<Remote>>,
    /// The mapped keys of the domain.
    pub(super) domain: Arc<MrDomain>,
    /// Cache of mapped keys that operations have used.
    pub(super) mapped: KeyCache<Arc<MappedKey>>,
    /// Pending operations: the first waits for a key look-up, the others are behind it.
    pub(super) waiting: VecDeque<Waiting>,
}

impl TxSide {
    pub(crate) fn new(core: &Core, binding: &CqBinding, place: WrId, qp: &Arc<Qp>) -> Result<Self> {
        let config = &core.config;
        let max_inline = qp.limits().max_inline;
        let slab = if max_inline < config.inject_size {
            let slots = core.rings.tx.capacity();
            Some(Slab::new(&core.pd, slots, config.inject_size)?)
        } else {
            None
        };
        let local = LocalKeys::new(core.domain.mr(), &core.pd);
        let bounce = if local.copies() {
            Some(Bounce::new(&core.pd)?)
        } else {
            None
        };
        Ok(Self {
            qp: Arc::clone(qp),
            cq: Arc::clone(&binding.cq),
            place,
            selective: binding.selective,
            iov_limit: config.tx_iov_limit,
            max_inline,
            max_inject: [LengthOption::InjectMsg, LengthOption::InjectRma]
                .map(|option| core.lengths.get(option)),
            max_len: [LengthOption::MaxMsg, LengthOption::MaxRma]
                .map(|option| core.lengths.get(option)),
            period: (core.rings.tx.depth() / 4).max(1),
            unsignaled: 0,
            counted: core
                .rings
                .counters()
                .is_some_and(|c| c.tx().next().is_some()),
            slab,
            bounce,
            local,
            scratch: match config.atomics {
                true => Some(Scratch::new(&core.pd)?),
                false => None,
            },
            application_keys: false,
            remote: None,
            domain: Arc::clone(core.domain.mr()),
            mapped: KeyCache::default(),
            waiting: VecDeque::new(),
        })
    }

    /// Whether the operation's key is an rkey of the device.
    #[inline]
    pub(super) fn has_native_key(&self, op: &Transmit<'_>) -> bool {
        op.key >> 32 == 0 && !self.application_keys
    }

    /// Whether the operation is posted as one unmodified request.
    #[inline]
    pub(super) fn is_native(&self, op: &Transmit<'_>) -> bool {
        (self.has_native_key(op) && !op.is_durable())
            || matches!(op.opcode, SendOpcode::Send | SendOpcode::SendImm)
    }

    /// Posts an operation, or makes it pending.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline]
    unsafe fn submit(&mut self, rings: &Rings, op: &Transmit<'_>) -> Result<()> {
        // SAFETY: as this function.
        unsafe {
            if self.is_native(op) && self.waiting.is_empty() {
                let len = self.check(op)?;
                self.post(&rings.tx, op, len, Target::native(op))
            } else {
                self.submit_resolved(rings, op)
            }
        }
    }

    /// Makes the checks that do not depend on the peer. Returns the length in bytes.
    #[inline]
    pub(super) fn check(&self, op: &Transmit<'_>) -> Result<usize> {
        // checked before the list is read: a wrong count may exceed the list
        if op.local.count() > self.iov_limit {
            return Err(refusal::too_many_buffers(op.local.count(), self.iov_limit));
        }
        let len = op.local.len();
        let inject = op.flags.contains(Flags::INJECT);
        let kind = usize::from(!op.opcode.is_send());
        if len > self.max_len[kind] {
            return Err(refusal::too_long(len, self.max_len[kind]));
        }
        if inject && len > self.max_inject[kind] {
            return Err(refusal::too_long_to_inject(len, self.max_inject[kind]));
        }
        Ok(len)
    }

    /// The sges of an operation's local buffers, and whether the data is sent inline.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline]
    pub(super) unsafe fn gather<'b>(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        sges: &'b mut [MaybeUninit<Sge>; MAX_IOV],
    ) -> Result<(&'b [Sge], bool)> {
        let inline = len <= self.max_inline && op.opcode.sends_data();
        let sges = if inline {
            // SAFETY: as this function.
            unsafe { op.local.sges(None, sges) }?
        } else if op.opcode.is_atomic() && op.local.count() == 0 {
            let scratch = self.scratch.as_ref().ok_or(FiErrno::EOPNOTSUPP)?;
            std::slice::from_ref(sges[0].write(scratch.sge()))
        } else if op.opcode.sends_data()
            && (op.flags.contains(Flags::INJECT) || self.is_better_copied(op, len))
        {
            let slab = self.slab.as_mut().ok_or(FiErrno::EMSGSIZE)?;
            let (to, lkey) = slab.slot(ring.next_index());
            // SAFETY: the slot is free and holds `inject_size` bytes; buffers as this function.
            unsafe { op.local.copy_to(to) };
            let addr = to as u64;
            std::slice::from_ref(sges[0].write(Sge {
                addr,
                length: len as u32,
                lkey,
            }))
        } else if let Some((to, lkey)) = self.bounced(ring, op, len) {
            // SAFETY: the bounce buffer has handed out a free piece of at least `len` bytes;
            // buffers as this function.
            unsafe { op.local.copy_to(to) };
            std::slice::from_ref(sges[0].write(Sge {
                addr: to as u64,
                length: len as u32,
                lkey,
            }))
        } else {
            let to = if op.opcode.sends_data() {
                Use::Source
            } else {
                Use::Sink
            };
            // SAFETY: as this function.
            unsafe { op.local.sges(Some((&mut self.local, to)), sges) }
                .inspect_err(|_| self.local.refused())?
        };
        Ok((sges, inline))
    }

    /// Whether a short source that would need a registration is copied to the inject slab instead.
    #[inline]
    fn is_better_copied(&self, op: &Transmit<'_>, len: usize) -> bool {
        self.slab.is_some()
            && !op.opcode.is_atomic()
            && len <= self.max_inject[usize::from(!op.opcode.is_send())]
            && self.local.must_register(op.local.has_descriptors())
    }

    /// Bounce memory for a source that is copied because its registration would take longer. `None`
    /// if the source does not qualify or no bounce memory is free.
    #[inline]
    fn bounced(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
    ) -> Option<(*mut u8, u32)> {
        let bounce = self.bounce.as_mut()?;
        let copied = len <= self.local.copied()
            && len != 0
            && op.opcode.sends_data()
            && !op.opcode.is_atomic()
            && self.local.must_register(op.local.has_descriptors());
        if copied {
            bounce.take(ring.tail())
        } else {
            None
        }
    }

    /// Records that an operation was posted; `number` is the slot number of its last request.
    #[inline]
    pub(super) fn posted(&mut self, number: u32, tail: u32) {
        self.local.posted(number, tail);
        if let Some(bounce) = &mut self.bounce {
            bounce.posted(number);
        }
    }

    /// Posts an operation with a resolved target as one request.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline]
    pub(super) unsafe fn post(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        target: Target,
    ) -> Result<()> {
        if ring.is_full() && !self.make_room(ring)? {
            return Err(FiErrno::EAGAIN);
        }
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (sges, inline) = unsafe { self.gather(ring, op, len, &mut sges) }?;
        let visible = !op.silent && (!self.selective || op.flags.contains(Flags::COMPLETION));
        let signaled = visible || self.counted || self.unsignaled + 1 >= self.period;
        let number = ring.push(Slot {
            context: op.context,
            flags: op.kind,
            visible,
            reports_failure: !op.silent,
            signaled,
            ..Slot::default()
        });
        let request = SendRequest {
            wr_id: self.place.send(number),
            opcode: op.opcode,
            sges,
            inline,
            signaled,
            fence: op.flags.contains(Flags::FENCE),
            // remote data has 4 bytes
            imm: op.data as u32,
            remote_addr: target.addr,
            rkey: target.rkey,
            compare_add: op.compare_add,
            swap: op.swap,
        };
        // SAFETY: as this function; the caller keeps buffers that are not inline valid until
        // completion.
        if let Err(error) = unsafe { self.qp.post_send(&request) } {
            ring.unpush();
            self.local.refused();
            return Err(post_errno(error));
        }
        self.posted(number, ring.tail());
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        Ok(())
    }

    /// Registers this endpoint with the domain's thread, which retries the pending operations if no
    /// application thread does.
    pub(super) fn wake_helper(&self) {
        if let Some(remote) = &self.remote {
            let rings = Arc::downgrade(remote.rings());
            self.cq.domain().helper().add(rings, &self.cq);
        }
    }

    /// Polls for completions to free slots: an application that only injects may never read its
    /// completion queue.
    #[cold]
    pub(super) fn make_room(&self, ring: &SlotRing) -> Result<bool> {
        self.cq.poll_quietly()?;
        Ok(!ring.is_full())
    }

    /// Posts an empty request behind all others. On a queue pair in its error state it is flushed
    /// last, so an unsignaled request without an error before it has succeeded.
    pub(crate) fn post_marker(&mut self, ring: &SlotRing) {
        if ring.outstanding() == 0 || ring.outstanding() > ring.depth() {
            return;
        }
        let number = ring.push(Slot {
            signaled: true,
            ..Slot::default()
        });
        let request = SendRequest::empty(self.place.send(number), SendOpcode::Send);
        // SAFETY: no buffers.
        if unsafe { self.qp.post_send(&request) }.is_err() {
            ring.unpush();
        }
    }
}

/// Maps the device's "queue full" (`ENOMEM`) to `EAGAIN`.
pub(crate) fn post_errno(error: FiErrno) -> FiErrno {
    if error == FiErrno::ENOMEM {
        FiErrno::EAGAIN
    } else {
        error
    }
}

impl Core {
    /// Posts an operation of the transmit side.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline(never)]
    pub(crate) unsafe fn transmit(&self, op: &Transmit<'_>) -> Result<()> {
        // SAFETY: as this function.
        unsafe { self.transmit_here(op) }
    }

    /// As [`Self::transmit`], inlined: the compiler specializes it in callers where kind, flags and
    /// number of buffers are constants.
    ///
    /// # Safety
    /// As [`crate::msg::Endpoint::send`].
    #[inline(always)]
    pub(super) unsafe fn transmit_here(&self, op: &Transmit<'_>) -> Result<()> {
        if !self.conn.state.is(State::Connected) {
            self.may_post()?;
        }
        let mut tx = self.tx.lock();
        let side = tx.as_mut().ok_or(FiErrno::ENOCQ)?;
        // SAFETY: as this function.
        unsafe { side.submit(&self.rings, op) }
    }
}
