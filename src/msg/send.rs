//! Sends, and what they share with RMA: the transmit side of an endpoint.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Arc;

use libc::iovec;

use super::atomic::Scratch;
use super::core::{Core, CqBinding, State};
use super::remote::{Remote, Waiting};
use super::slab::Slab;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::keys::Piece;
use crate::mr::{Desc, LocalKeys, Use};
use crate::msg::{Endpoint, LengthOption};
use crate::queue::slots::{Rings, Slot, SlotRing};
use crate::queue::{CompletionQueue, WrId};
use crate::verbs::{Qp, SendOpcode, SendRequest, Sge};

/// The most buffers that an operation has here.
pub(crate) const MAX_IOV: usize = 16;

/// Flags that `fi_sendmsg`, `fi_writemsg` take. `FI_MORE` changes nothing: held back, a request would
/// move only when the application calls again, though data progress is the device's (`FI_PROGRESS_AUTO`), and
/// a refusal (`EAGAIN`) could no longer be told by the call that posted it.
const MSG_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::INJECT)
    .union(Flags::INJECT_COMPLETE)
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::DELIVERY_COMPLETE)
    .union(Flags::REMOTE_CQ_DATA)
    .union(Flags::MORE)
    .union(Flags::FENCE);

/// The local memory of one operation: buffers, and the descriptors of the regions they lie in.
#[derive(Clone, Copy, Debug)]
pub struct LocalIov<'a> {
    iov: *const iovec,
    desc: *const Desc,
    count: usize,
    lifetime: PhantomData<&'a [iovec]>,
}

impl<'a> LocalIov<'a> {
    /// No buffer at all.
    pub const NONE: LocalIov<'static> = LocalIov {
        iov: std::ptr::null(),
        desc: std::ptr::null(),
        count: 0,
        lifetime: PhantomData,
    };

    /// One buffer. A NULL descriptor will do for inject, for what goes inline, and for length 0.
    #[inline]
    pub fn single(iov: &'a iovec, desc: &'a Desc) -> Self {
        Self {
            iov,
            desc,
            count: 1,
            lifetime: PhantomData,
        }
    }

    /// C's way: `count` buffers, and as many descriptors unless `desc` is NULL.
    ///
    /// # Errors
    /// `EINVAL`: NULL with a count.
    ///
    /// # Safety
    /// `iov`, and `desc` if it isn't NULL, point to `count` elements that live for `'a`.
    #[inline]
    pub unsafe fn from_raw(
        iov: *const iovec,
        desc: *const *mut c_void,
        count: usize,
    ) -> Result<Self> {
        if count != 0 && iov.is_null() {
            return Err(FiErrno::EINVAL);
        }
        Ok(Self {
            iov,
            desc: desc.cast(),
            count,
            lifetime: PhantomData,
        })
    }

    /// Buffers that live for `'a`, and as many descriptors.
    pub(crate) fn borrowed(iov: &'a [iovec], desc: &'a [Desc]) -> Self {
        Self {
            iov: iov.as_ptr(),
            desc: desc.as_ptr(),
            count: iov.len().min(desc.len()),
            lifetime: PhantomData,
        }
    }

    /// The buffers and as many descriptors, for later; what is in the buffers is not copied.
    pub(crate) fn to_owned(self) -> (Vec<iovec>, Vec<Desc>) {
        let desc = if self.desc.is_null() || self.count == 0 {
            vec![Desc::NULL; self.count]
        } else {
            // SAFETY: whoever made this promised as many descriptors as buffers, for `'a`.
            unsafe { std::slice::from_raw_parts(self.desc, self.count) }.to_vec()
        };
        (self.iov().to_vec(), desc)
    }

    /// How many buffers.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    #[inline]
    fn iov(&self) -> &'a [iovec] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: whoever made this promised `count` elements for `'a`.
        unsafe { std::slice::from_raw_parts(self.iov, self.count) }
    }

    /// Bytes in all.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        // no memory is longer than usize counts; rubbish saturates and is refused as too long
        self.iov()
            .iter()
            .fold(0_usize, |sum, iov| sum.saturating_add(iov.iov_len))
    }

    /// The device's form of the buffers, without those of no length, which some devices take for
    /// 2 GiB. `keys` are needed where the device reaches the memory itself.
    ///
    /// # Errors
    /// `EINVAL`: more buffers than fit, or a descriptor that is needed and wrong. Else those of
    /// registering a buffer.
    ///
    /// # Safety
    /// As [`LocalKeys::lkey`] for each buffer. Lengths fit 32 bits.
    #[inline(always)]
    pub(crate) unsafe fn sges<'b>(
        &self,
        keys: Option<(&mut LocalKeys, Use)>,
        out: &'b mut [MaybeUninit<Sge>; MAX_IOV],
    ) -> Result<&'b [Sge]> {
        // SAFETY: as this function.
        unsafe { self.sges_but(keys, out, |iov| iov.iov_len == 0) }
    }

    /// As [`Self::sges`], of a receive: a buffer at NULL is left out too. It has room for nothing, which
    /// is enough for a message without data; fabtests' `fi_shared_ctx` posts such receives.
    ///
    /// # Errors
    /// As [`Self::sges`].
    ///
    /// # Safety
    /// As [`Self::sges`].
    #[inline(always)]
    pub(crate) unsafe fn recv_sges<'b>(
        &self,
        keys: &mut LocalKeys,
        out: &'b mut [MaybeUninit<Sge>; MAX_IOV],
    ) -> Result<&'b [Sge]> {
        // SAFETY: as this function.
        unsafe {
            self.sges_but(Some((keys, Use::Sink)), out, |iov| {
                iov.iov_len == 0 || iov.iov_base.is_null()
            })
        }
    }

    #[inline(always)]
    unsafe fn sges_but<'b>(
        &self,
        mut keys: Option<(&mut LocalKeys, Use)>,
        out: &'b mut [MaybeUninit<Sge>; MAX_IOV],
        left_out: impl Fn(&iovec) -> bool,
    ) -> Result<&'b [Sge]> {
        let mut count = 0;
        for (index, iov) in self.iov().iter().enumerate() {
            if left_out(iov) {
                continue;
            }
            let lkey = match &mut keys {
                None => 0,
                // SAFETY: there are as many descriptors as buffers, or none at all; else as this
                // function.
                Some((keys, to)) => unsafe {
                    let desc = if self.desc.is_null() {
                        Desc::NULL
                    } else {
                        *self.desc.add(index)
                    };
                    keys.lkey(desc, iov, *to)
                }?,
            };
            out.get_mut(count).ok_or(FiErrno::EINVAL)?.write(Sge {
                addr: iov.iov_base as u64,
                length: iov.iov_len as u32,
                lkey,
            });
            count += 1;
        }
        // SAFETY: the first `count` were written.
        Ok(unsafe { std::slice::from_raw_parts(out.as_ptr().cast(), count) })
    }

    /// Copies the bytes to `to`.
    ///
    /// # Safety
    /// `to` has room for [`Self::len`] bytes, and the buffers are readable.
    pub(crate) unsafe fn copy_to(&self, to: *mut u8) {
        let mut offset = 0;
        for iov in self.iov().iter().filter(|iov| iov.iov_len != 0) {
            // SAFETY: as this function.
            unsafe {
                std::ptr::copy_nonoverlapping(iov.iov_base.cast(), to.add(offset), iov.iov_len);
            }
            offset += iov.iov_len;
        }
    }
}

/// One operation of the transmit side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transmit<'a> {
    pub(crate) opcode: SendOpcode,
    pub(crate) local: LocalIov<'a>,
    pub(crate) remote_addr: u64,
    pub(crate) key: u64,
    pub(crate) data: u64,
    pub(crate) context: usize,
    pub(crate) flags: Flags,
    /// An inject call: it never completes visibly.
    pub(crate) silent: bool,
    /// Operands of an atomic.
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    /// What its completion says of it.
    pub(crate) kind: Flags,
}

impl<'a> Transmit<'a> {
    #[inline]
    fn send(local: LocalIov<'a>, context: usize, flags: Flags) -> Self {
        Self {
            opcode: SendOpcode::Send,
            local,
            remote_addr: 0,
            key: 0,
            data: 0,
            context,
            flags,
            silent: false,
            compare_add: 0,
            swap: 0,
            kind: completion_flags(SendOpcode::Send),
        }
    }

    /// Lets `data` go along.
    #[inline]
    pub(crate) fn with_data(mut self, data: u64) -> Self {
        self.opcode = self.opcode.with_imm();
        self.data = data;
        self
    }

    /// Makes it an inject call.
    #[inline]
    pub(crate) fn injected(mut self) -> Self {
        self.flags |= Flags::INJECT;
        self.silent = true;
        self
    }

    /// As a call with flags asks.
    #[inline]
    pub(crate) fn with_flags_checked(mut self, data: u64) -> Result<Self> {
        if self.flags.intersects(MSG_FLAGS.complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        if self.flags.contains(Flags::REMOTE_CQ_DATA) {
            self = self.with_data(data);
        }
        Ok(self)
    }
}

/// The peer's memory, as its device knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    addr: u64,
    rkey: u32,
}

impl Target {
    /// Of an operation whose key is the device's own, or that has none.
    #[inline]
    pub(super) fn native(op: &Transmit<'_>) -> Self {
        Self {
            addr: op.remote_addr,
            // native keys have 32 bits
            rkey: op.key as u32,
        }
    }

    #[inline]
    pub(super) fn of(piece: &Piece) -> Self {
        Self {
            addr: piece.addr,
            rkey: piece.rkey,
        }
    }
}

/// What a completion says of an operation, unless it is an atomic.
#[inline]
pub(super) fn completion_flags(opcode: SendOpcode) -> Flags {
    match opcode {
        SendOpcode::Send | SendOpcode::SendImm => Flags::SEND.union(Flags::MSG),
        SendOpcode::Write | SendOpcode::WriteImm => Flags::RMA.union(Flags::WRITE),
        SendOpcode::Read => Flags::RMA.union(Flags::READ),
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => Flags::ATOMIC.union(Flags::READ),
    }
}

/// The transmit side of an endpoint that has a queue pair.
#[derive(Debug)]
pub(crate) struct TxSide {
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<CompletionQueue>,
    place: WrId,
    selective: bool,
    iov_limit: usize,
    max_inline: usize,
    /// Of messages, and of RMA.
    max_inject: [usize; 2],
    max_len: [usize; 2],
    /// Every so many unsignaled requests one is signaled, so that their slots become free.
    period: u32,
    unsignaled: u32,
    /// Counted operations are all signaled: nobody would poll for the last ones otherwise.
    counted: bool,
    slab: Option<Slab>,
    local: LocalKeys,
    scratch: Option<Scratch>,
    /// Whether all keys of the peer are its application's.
    pub(super) application_keys: bool,
    /// A peer that has introduced itself.
    pub(super) remote: Option<Box<Remote>>,
    /// What waits for a key to be looked up, and what was posted behind that.
    pub(super) waiting: VecDeque<Waiting>,
}

impl TxSide {
    pub(crate) fn new(core: &Core, binding: &CqBinding, place: WrId, qp: &Arc<Qp>) -> Result<Self> {
        let config = &core.config;
        let max_inline = qp.limits().max_inline;
        let slab = if max_inline < config.inject_size {
            let slots = core.rings.tx.capacity();
            Some(Slab::new(core.domain.pd(), slots, config.inject_size)?)
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
            local: LocalKeys::new(&core.domain, core.domain.pd()),
            scratch: match config.atomics {
                true => Some(Scratch::new(core.domain.pd())?),
                false => None,
            },
            application_keys: false,
            remote: None,
            waiting: VecDeque::new(),
        })
    }

    /// Whether the operation's key, if it has one, is the device's own.
    #[inline]
    pub(super) fn is_native(&self, op: &Transmit<'_>) -> bool {
        (op.key >> 32 == 0 && !self.application_keys)
            || matches!(op.opcode, SendOpcode::Send | SendOpcode::SendImm)
    }

    /// Posts an operation, or lets it wait.
    ///
    /// # Safety
    /// As [`Endpoint::send`].
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

    /// Checks what can be checked without the peer; gives the length.
    #[inline]
    pub(super) fn check(&self, op: &Transmit<'_>) -> Result<usize> {
        // before the list is looked at: a wrong count may be longer than the list
        if op.local.count() > self.iov_limit {
            return Err(FiErrno::EINVAL);
        }
        let len = op.local.len();
        let inject = op.flags.contains(Flags::INJECT);
        let kind = usize::from(!op.opcode.is_send());
        if len > self.max_len[kind] || (inject && len > self.max_inject[kind]) {
            return Err(FiErrno::EMSGSIZE);
        }
        Ok(len)
    }

    /// The device's form of an operation's local buffers, and whether they go inline.
    ///
    /// # Safety
    /// As [`Endpoint::send`].
    #[inline]
    unsafe fn gather<'b>(
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
        } else if op.flags.contains(Flags::INJECT) && op.opcode.sends_data() {
            let slab = self.slab.as_mut().ok_or(FiErrno::EMSGSIZE)?;
            let (to, lkey) = slab.slot(ring.next_index());
            // SAFETY: the slot is free and has room for what inject takes; buffers as this function.
            unsafe { op.local.copy_to(to) };
            let addr = to as u64;
            std::slice::from_ref(sges[0].write(Sge {
                addr,
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

    /// Posts an operation whose target is known, in one request.
    ///
    /// # Safety
    /// As [`Endpoint::send`].
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
            // the size of remote data is 4 bytes
            imm: op.data as u32,
            remote_addr: target.addr,
            rkey: target.rkey,
            compare_add: op.compare_add,
            swap: op.swap,
        };
        // SAFETY: as this function; what is not inline stays until completion.
        if let Err(error) = unsafe { self.qp.post_send(&request) } {
            ring.unpush();
            self.local.refused();
            return Err(post_errno(error));
        }
        self.local.posted(number, ring.tail());
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        Ok(())
    }

    /// Posts an operation as several requests, each to its piece of the target; the last one is the
    /// operation's own.
    ///
    /// # Safety
    /// As [`Endpoint::send`].
    pub(super) unsafe fn post_pieces(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        len: usize,
        pieces: &[Piece],
    ) -> Result<()> {
        if ring.is_full() && !self.make_room(ring)? {
            return Err(FiErrno::EAGAIN);
        }
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (mut rest, inline) = unsafe { self.gather(ring, op, len, &mut sges) }?;
        // bytes of the first of `rest` that are taken already
        let mut taken = 0;
        let mut last = 0;
        for (index, piece) in pieces.iter().enumerate() {
            let mut part = [Sge::default(); MAX_IOV];
            let mut count = 0;
            let mut left = piece.len;
            while left > 0
                && let Some((first, others)) = rest.split_first()
                && let Some(place) = part.get_mut(count)
            {
                let bytes = left.min(u64::from(first.length - taken)) as u32;
                *place = Sge {
                    addr: first.addr + u64::from(taken),
                    length: bytes,
                    lkey: first.lkey,
                };
                count += 1;
                left -= u64::from(bytes);
                taken += bytes;
                if taken == first.length {
                    (rest, taken) = (others, 0);
                }
            }
            let visible = !op.silent && (!self.selective || op.flags.contains(Flags::COMPLETION));
            let more = piece
                .last
                .then_some(self.unsignaled as usize + pieces.len());
            let signaled = piece.last
                && (visible || self.counted || more.is_some_and(|n| n >= self.period as usize));
            last = ring.push(Slot {
                context: op.context,
                flags: op.kind,
                visible: piece.last && visible,
                reports_failure: !op.silent,
                signaled,
                part: !piece.last,
                ..Slot::default()
            });
            let request = SendRequest {
                wr_id: self.place.send(last),
                opcode: if piece.last {
                    op.opcode
                } else {
                    op.opcode.without_imm()
                },
                sges: &part[..count],
                inline,
                signaled,
                fence: index == 0 && op.flags.contains(Flags::FENCE),
                imm: op.data as u32,
                remote_addr: piece.addr,
                rkey: piece.rkey,
                compare_add: 0,
                swap: 0,
            };
            // SAFETY: as this function.
            if let Err(error) = unsafe { self.qp.post_send(&request) } {
                ring.unpush();
                if index == 0 {
                    self.local.refused();
                    return Err(post_errno(error));
                }
                // half an operation can't be taken back: it ends with the connection
                let _ = self.qp.set_error();
                let _ = self.post_failure(ring, op, error);
                break;
            }
            self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        }
        self.local.posted(last, ring.tail());
        Ok(())
    }

    /// Lets an operation fail in its place among the others: a request that does nothing takes it.
    pub(super) fn post_failure(
        &mut self,
        ring: &SlotRing,
        op: &Transmit<'_>,
        error: FiErrno,
    ) -> Result<()> {
        if ring.is_full() && !self.make_room(ring)? {
            return Err(FiErrno::EAGAIN);
        }
        let number = ring.push(Slot {
            context: op.context,
            flags: op.kind,
            visible: true,
            reports_failure: true,
            signaled: true,
            refused: Some(error),
            ..Slot::default()
        });
        let request = SendRequest {
            wr_id: self.place.send(number),
            opcode: SendOpcode::Write,
            sges: &[],
            inline: false,
            signaled: true,
            fence: false,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
        };
        // SAFETY: no buffers.
        if let Err(error) = unsafe { self.qp.post_send(&request) } {
            ring.unpush();
            return Err(post_errno(error));
        }
        self.unsignaled = 0;
        Ok(())
    }

    /// Lets the domain's thread go on with what waits, should nobody else.
    pub(super) fn wake_helper(&self) {
        if let Some(remote) = &self.remote {
            let rings = Arc::downgrade(remote.rings());
            self.cq.domain().helper().add(rings, &self.cq);
        }
    }

    /// The application may never read its queue, when it injects only: looks for completions.
    #[cold]
    pub(super) fn make_room(&self, ring: &SlotRing) -> Result<bool> {
        self.cq.poll_quietly()?;
        Ok(!ring.is_full())
    }

    /// Posts a request that does nothing behind all others: on a queue pair in its error state it
    /// is flushed last, so what was not reported before it has succeeded.
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

/// A device that says its queue is full means: not now.
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
    /// As [`Endpoint::send`].
    #[inline(never)]
    pub(crate) unsafe fn transmit(&self, op: &Transmit<'_>) -> Result<()> {
        // SAFETY: as this function.
        unsafe { self.transmit_here(op) }
    }

    /// As [`Self::transmit`], for the calls that are worth a copy in which their kind, flags and number of buffers are
    /// known.
    ///
    /// # Safety
    /// As [`Endpoint::send`].
    #[inline(always)]
    unsafe fn transmit_here(&self, op: &Transmit<'_>) -> Result<()> {
        if !self.state.is(State::Connected) {
            return Err(self.why_not_connected());
        }
        let mut tx = self.tx.lock();
        let side = tx.as_mut().ok_or(FiErrno::ENOCQ)?;
        // SAFETY: as this function.
        unsafe { side.submit(&self.rings, op) }
    }

    #[cold]
    fn why_not_connected(&self) -> FiErrno {
        match self.state.get() {
            State::Idle | State::Closed => FiErrno::EOPBADSTATE,
            State::Disconnected => FiErrno::ESHUTDOWN,
            _ => FiErrno::ENOTCONN,
        }
    }
}

/// Operations without flags take the endpoint's default ones; those named `_msg` take theirs, and
/// with `FI_SELECTIVE_COMPLETION` complete visibly only if `FI_COMPLETION` is among them.
///
/// None of them blocks, allocates, or makes a system call. All answer `EAGAIN` when the queue is
/// full: read the completion queue and try again.
///
/// # Errors
/// - `EAGAIN`: the queue is full.
/// - `EINVAL`: too many buffers, or a descriptor that is needed and wrong.
/// - `EMSGSIZE`: more bytes than the device, or inject, takes.
/// - `EBADFLAGS`: a flag that the operation doesn't have.
/// - `ENOCQ`: no completion queue is bound for transmitting.
/// - `EOPBADSTATE`: not enabled. `ENOTCONN`: not connected. `ESHUTDOWN`: no longer connected.
///
/// # Safety
/// Buffers must stay valid until the operation completes (inject: until it returns), and
/// descriptors be NULL or those of live regions that cover the buffers.
#[allow(clippy::missing_safety_doc, reason = "said once, above")]
impl Endpoint {
    /// `fi_send`, `fi_sendv`.
    #[inline(always)]
    pub unsafe fn send(&self, local: LocalIov<'_>, context: usize) -> Result<()> {
        let op = Transmit::send(local, context, self.tx_op_flags());
        // SAFETY: as this function.
        unsafe { self.core.transmit_here(&op) }
    }

    /// `fi_senddata`: the low 32 bits of `data` go along.
    #[inline]
    pub unsafe fn send_data(&self, local: LocalIov<'_>, data: u64, context: usize) -> Result<()> {
        let op = Transmit::send(local, context, self.tx_op_flags());
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op.with_data(data)) }
    }

    /// `fi_sendmsg`.
    #[inline]
    pub unsafe fn send_msg(
        &self,
        local: LocalIov<'_>,
        data: u64,
        context: usize,
        flags: Flags,
    ) -> Result<()> {
        let op = Transmit::send(local, context, flags).with_flags_checked(data)?;
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op) }
    }

    /// `fi_inject`: no completion, and the buffer is free on return.
    #[inline(always)]
    pub unsafe fn inject(&self, buf: *const c_void, len: usize) -> Result<()> {
        let iov = buffer(buf, len);
        let op = Transmit::send(LocalIov::single(&iov, &Desc::NULL), 0, Flags::empty());
        // SAFETY: as this function.
        unsafe { self.core.transmit_here(&op.injected()) }
    }

    /// `fi_injectdata`.
    #[inline]
    pub unsafe fn inject_data(&self, buf: *const c_void, len: usize, data: u64) -> Result<()> {
        let iov = buffer(buf, len);
        let op = Transmit::send(LocalIov::single(&iov, &Desc::NULL), 0, Flags::empty());
        // SAFETY: as this function.
        unsafe { self.core.transmit(&op.injected().with_data(data)) }
    }
}

/// C's form of a buffer that is only read.
#[inline]
pub(crate) fn buffer(buf: *const c_void, len: usize) -> iovec {
    iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }
}
