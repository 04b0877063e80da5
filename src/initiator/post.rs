//! Posts operations: checks lengths, determines the lkeys of the local buffers or copies them, and
//! posts one request if the target is one contiguous range whose key needs no look-up.

#![allow(unsafe_code, reason = "posts buffers that the caller keeps valid")]

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::elements::Elements;
use super::keys::{Deferred, PeerKeys};
use super::lengths::{LengthOption, Lengths};
use super::link::Link;
use super::local::MAX_IOV;
use super::refusal;
use super::scratch::{ATOMIC_SIZE, Scratch};
use super::slab::{Bounce, Slab};
use super::sq::{Signal, Sq};
use super::transmit::Transmit;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::key_cache::KeyCache;
use crate::mr::mapped_keys::MappedKey;
use crate::mr::{Desc, LocalKeys, MrDomain, Use};
use crate::verbs::{ElementsRequest, Lkey, RemoteAddr, Rkey, SendOpcode, Sge};
use crate::wire::introduction::Introduction;

/// Parameters of an initiator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InitiatorConfig {
    /// Whether only operations with `FI_COMPLETION` produce completion entries.
    pub(crate) selective: bool,
    /// Maximum number of buffers per operation; at most [`MAX_IOV`].
    pub(crate) iov_limit: usize,
    /// Maximum length of inline data in bytes.
    pub(crate) max_inline: usize,
    /// Maximum length of injected data in bytes.
    pub(crate) inject_size: usize,
    /// Number of records of posted requests in the send queue.
    pub(crate) slots: usize,
    /// Whether the slab is registered by the first operation that copies to it.
    pub(crate) late_slab: bool,
    pub(crate) atomics: bool,
}

/// The requests of one queue pair's send side. Used under its endpoint's transmit lock.
#[derive(Debug)]
pub(crate) struct Initiator<Q: Sq> {
    pub(crate) sq: Q,
    selective: bool,
    iov_limit: usize,
    max_inline: usize,
    /// Maximum lengths in bytes, of messages and of RMA.
    max_inject: [usize; 2],
    max_len: [usize; 2],
    slab: Option<Slab>,
    /// Number and size of the buffers of a slab that is not registered yet.
    late_slab: Option<(usize, usize)>,
    /// Bounce buffers for short sources that would otherwise need a registration.
    bounce: Option<Bounce>,
    local: LocalKeys,
    scratch: Option<Scratch>,
    /// Whether the peer's application chooses all keys of the peer.
    pub(super) application_keys: bool,
    /// Set once the peer's introduction was received.
    pub(super) peer: Option<Box<PeerKeys<Q::Link>>>,
    /// The domain whose mapped keys operations may use.
    pub(super) domain: Arc<MrDomain>,
    /// Cache of mapped keys that operations have used.
    pub(super) mapped: KeyCache<Arc<MappedKey>>,
    /// Operations to be posted later, in order. The first waits for a key look-up, a result or room
    /// in the send queue.
    pub(super) deferred: VecDeque<Deferred>,
}

impl<Q: Sq> Initiator<Q> {
    /// Registers the slab and the other memory of copied data.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(crate) fn new(
        sq: Q,
        domain: &Arc<MrDomain>,
        lengths: &Lengths,
        config: &InitiatorConfig,
    ) -> Result<Self> {
        let pd = sq.link().pd();
        let copies = config.max_inline < config.inject_size;
        let sizes = (config.slots, config.inject_size);
        let (slab, late_slab) = match (copies, config.late_slab) {
            (false, _) => (None, None),
            (true, true) => (None, Some(sizes)),
            (true, false) => (Some(Slab::new(pd, sizes.0, sizes.1)?), None),
        };
        let local = LocalKeys::new(domain, pd);
        let bounce = if local.copies() {
            Some(Bounce::new(pd)?)
        } else {
            None
        };
        Ok(Self {
            selective: config.selective,
            iov_limit: config.iov_limit,
            max_inline: config.max_inline,
            max_inject: [LengthOption::InjectMsg, LengthOption::InjectRma]
                .map(|option| lengths.get(option)),
            max_len: [LengthOption::MaxMsg, LengthOption::MaxRma].map(|option| lengths.get(option)),
            slab,
            late_slab,
            bounce,
            local,
            scratch: match config.atomics {
                true => Some(Scratch::new(pd)?),
                false => None,
            },
            application_keys: false,
            peer: None,
            domain: Arc::clone(domain),
            mapped: KeyCache::default(),
            deferred: VecDeque::new(),
            sq,
        })
    }

    /// Sets the peer's introduction and the state for resolving its keys.
    pub(crate) fn introduce(&mut self, peer: &Introduction, keys: PeerKeys<Q::Link>) {
        self.application_keys = peer.application_keys;
        self.peer = Some(Box::new(keys));
    }

    /// The state of the peer's keys, after [`Self::introduce`], for tests.
    #[cfg(test)]
    pub(crate) fn peer_keys(&mut self) -> Option<&mut PeerKeys<Q::Link>> {
        self.peer.as_deref_mut()
    }

    /// Whether any operation is deferred.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Whether a key of the peer is an rkey of the device.
    #[inline]
    fn is_rkey(&self, key: u64) -> bool {
        key >> 32 == 0 && !self.application_keys
    }

    /// Whether the operation's key is an rkey of the device.
    #[inline]
    pub(super) fn has_native_key(&self, op: &Transmit<'_>) -> bool {
        self.is_rkey(op.key)
    }

    /// Whether the operation is posted as one unmodified request.
    #[inline]
    pub(super) fn is_native(&self, op: &Transmit<'_>) -> bool {
        (self.has_native_key(op) && !op.is_durable())
            || matches!(op.opcode, SendOpcode::Send | SendOpcode::SendImm)
    }

    /// Posts an operation, or defers it.
    ///
    /// # Errors
    /// - `EAGAIN`: no room in the send queue or for one more deferred operation.
    /// - `EMSGSIZE`, `EINVAL`: the length, the number of buffers or a descriptor is invalid.
    /// - `EKEYREJECTED`: the value cannot be a key of the peer.
    /// - Others: errors of registering a local buffer, and of the device.
    ///
    /// # Safety
    /// The local buffers stay valid until the operation completes, or until the return of this call
    /// for inject. Descriptors are NULL or those of live regions that cover the buffers. An
    /// operation on elements has its memory as [`super::elements`] describes.
    #[inline]
    pub(crate) unsafe fn submit(&mut self, op: &Transmit<'_>) -> Result<()> {
        // SAFETY: as this function.
        unsafe {
            if self.is_native(op) && self.deferred.is_empty() {
                let len = self.check(op)?;
                self.post(op, len, op.native_target())
            } else {
                self.submit_unresolved(op)
            }
        }
    }

    /// Checks the properties that do not depend on the regions of the peer. Returns the length in
    /// bytes.
    #[inline]
    pub(super) fn check(&self, op: &Transmit<'_>) -> Result<usize> {
        // checked before the list is read: a wrong count may exceed the list
        if op.local.count() > self.iov_limit {
            return Err(refusal::too_many_buffers(op.local.count(), self.iov_limit));
        }
        let len = op.local.len();
        let inject = op.flags.contains(Flags::INJECT);
        let class = usize::from(!op.opcode.is_send());
        if len > self.max_len[class] {
            return Err(refusal::too_long(len, self.max_len[class]));
        }
        if inject && len > self.max_inject[class] {
            return Err(refusal::too_long_to_inject(len, self.max_inject[class]));
        }
        // with other keys the base of the region counts too
        if matches!(op.opcode, SendOpcode::FetchAdd | SendOpcode::CompareSwap)
            && !op.remote_addr.is_multiple_of(ATOMIC_SIZE as u64)
            && self.has_native_key(op)
        {
            return Err(refusal::unaligned(op.remote_addr));
        }
        Ok(len)
    }

    /// The sges of an operation's local buffers, and whether the data is sent inline.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[inline]
    pub(super) unsafe fn gather<'b>(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        sges: &'b mut [MaybeUninit<Sge>; MAX_IOV],
    ) -> Result<(&'b [Sge], bool)> {
        let inline = len <= self.max_inline && op.opcode.sends_data();
        let sges = if inline {
            // SAFETY: as this function.
            unsafe { op.local.sges(None, sges) }?
        } else if op.opcode == SendOpcode::Elements {
            // SAFETY: as this function.
            match unsafe { Elements::result(op) } {
                Some(result) => std::slice::from_ref(sges[0].write(result)),
                None => &[],
            }
        } else if op.opcode.is_atomic() && op.local.count() == 0 {
            let scratch = self.scratch.as_ref().ok_or(FiErrno::EOPNOTSUPP)?;
            std::slice::from_ref(sges[0].write(scratch.sge()))
        } else if op.opcode.sends_data()
            && (op.flags.contains(Flags::INJECT) || self.is_better_copied(op, len))
        {
            if self.slab.is_none() {
                self.open_slab()?;
            }
            let slab = self.slab.as_mut().ok_or(FiErrno::EMSGSIZE)?;
            let (to, lkey) = slab.buffer(self.sq.next_index());
            // SAFETY: the buffer is free and holds `inject_size` bytes; buffers as this function.
            unsafe { op.local.copy_to(to) };
            let addr = to as u64;
            std::slice::from_ref(sges[0].write(Sge {
                addr,
                length: len as u32,
                lkey,
            }))
        } else if let Some((to, lkey)) = self.bounced(op, len) {
            // SAFETY: `bounced` has returned a free buffer of at least `len` bytes; buffers as this
            // function.
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
                .inspect_err(|_| self.local.release_taken())?
        };
        Ok((sges, inline))
    }

    /// Registers the slab, if that was left to the first use.
    #[cold]
    fn open_slab(&mut self) -> Result<()> {
        if let Some((count, size)) = self.late_slab {
            self.slab = Some(Slab::new(self.sq.link().pd(), count, size)?);
        }
        Ok(())
    }

    /// Whether a short source that would need a registration is copied to the inject slab instead.
    #[inline]
    fn is_better_copied(&self, op: &Transmit<'_>, len: usize) -> bool {
        (self.slab.is_some() || self.late_slab.is_some())
            && !op.opcode.is_atomic()
            && len <= self.max_inject[usize::from(!op.opcode.is_send())]
            && self.local.must_register(op.local.has_descriptors())
    }

    /// Bounce memory for a source that is copied because its registration would take longer. `None`
    /// if the source is not to be copied or no bounce buffer is free.
    #[inline]
    fn bounced(&mut self, op: &Transmit<'_>, len: usize) -> Option<(*mut u8, Lkey)> {
        let bounce = self.bounce.as_mut()?;
        let copied = len <= self.local.copied()
            && len != 0
            && op.opcode.sends_data()
            && !op.opcode.is_atomic()
            && self.local.must_register(op.local.has_descriptors());
        if copied {
            bounce.take(self.sq.tail())
        } else {
            None
        }
    }

    /// Records that an operation was posted; `number` is that of its last request.
    #[inline]
    pub(super) fn posted(&mut self, number: u32) {
        self.local.posted(number, self.sq.tail());
        if let Some(bounce) = &mut self.bounce {
            bounce.posted(number, self.sq.tail());
        }
    }

    /// Posts an operation as one request to the target that its key stands for.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[inline]
    pub(crate) unsafe fn post(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        target: (RemoteAddr, Rkey),
    ) -> Result<()> {
        // SAFETY: as this function.
        unsafe {
            if op.may_be_delayed() || self.sq.has_delayed() {
                self.post_in_list(op, len, target)
            } else {
                self.post_one::<false>(op, len, target)
            }
        }
    }

    /// As [`Self::post`], together with operations before or behind it (`FI_MORE`).
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[cold]
    #[inline(never)]
    unsafe fn post_in_list(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        target: (RemoteAddr, Rkey),
    ) -> Result<()> {
        // SAFETY: as this function.
        unsafe { self.post_one::<true>(op, len, target) }
    }

    /// As [`Self::post`]; `LIST`: by [`Self::post_in_list`].
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[inline(always)]
    unsafe fn post_one<const LIST: bool>(
        &mut self,
        op: &Transmit<'_>,
        len: usize,
        target: (RemoteAddr, Rkey),
    ) -> Result<()> {
        self.sq.reserve()?;
        let mut sges = [const { MaybeUninit::uninit() }; MAX_IOV];
        // SAFETY: as this function.
        let (sges, inline) = unsafe { self.gather(op, len, &mut sges) }?;
        let visible = self.is_visible(op);
        let signal = if visible { Signal::Yes } else { Signal::Auto };
        let mut request = op.request(op.opcode, sges, target);
        request
            .inline(inline)
            .fence(op.flags.contains(Flags::FENCE));
        // SAFETY: as this function; the caller keeps buffers that are not inline valid until
        // completion, if the request is delayed all of them.
        let posted = unsafe {
            if LIST {
                let more = op.may_be_delayed();
                self.sq
                    .post_in_list(&mut request, op.slot(visible), signal, more)
            } else {
                self.sq.post(&mut request, op.slot(visible), signal)
            }
        };
        match posted {
            Ok(number) => {
                self.posted(number);
                Ok(())
            }
            Err(error) => {
                self.not_posted();
                Err(error)
            }
        }
    }

    /// Whether the device may execute an operation in its call, because none is in front of it.
    #[inline(always)]
    fn executes(&self) -> bool {
        self.sq.executes() && self.deferred.is_empty() && !self.sq.has_delayed()
    }

    /// Executes an operation on elements in this call, as [`Self::execute`]. `results` gets their
    /// earlier values, unless it is NULL.
    ///
    /// # Safety
    /// The operands are readable, and `results` has room for the elements.
    #[inline]
    pub(crate) unsafe fn execute_elements(
        &mut self,
        request: &mut ElementsRequest,
        results: *mut u8,
        (addr, key): (u64, u64),
    ) -> bool {
        if !self.executes() || !self.is_rkey(key) {
            return false;
        }
        // native keys have 32 bits
        let target = (RemoteAddr::new(addr), Rkey::new(key as u32));
        let link = self.sq.link();
        // SAFETY: as this function.
        unsafe {
            link.qp()
                .execute_elements(request, results, target, link.srq())
        }
    }

    /// Executes a read or write of one buffer in this call, if the device can do that now. `false`:
    /// it has to be submitted, and nothing has changed for the initiator.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    #[inline]
    pub(crate) unsafe fn execute(&mut self, op: &Transmit<'_>) -> bool {
        if !self.executes() || !self.is_native(op) {
            return false;
        }
        // the submission refuses it
        let Ok(len) = self.check(op) else {
            return false;
        };
        let [buffer] = op.local.iov() else {
            return false;
        };
        let desc = op.local.common_desc().unwrap_or(Desc::NULL);
        let inject = op.flags.contains(Flags::INJECT);
        let inline = (len <= self.max_inline || inject) && op.opcode.sends_data();
        let lkey = match self.local.may_be_unregistered(desc) || inline {
            true => None,
            // SAFETY: as this function.
            false => match unsafe { self.local.of_descriptor(desc, buffer) } {
                Ok(lkey) => Some(lkey),
                // as the submission finds out
                Err(_) => return false,
            },
        };
        let sge = Sge {
            addr: buffer.iov_base as u64,
            length: len as u32,
            lkey: lkey.unwrap_or_default(),
        };
        let (link, local) = (self.sq.link(), (&sge, lkey.is_some()));
        let target = op.native_target();
        // SAFETY: as this function.
        let executed = unsafe { link.qp().execute(op.opcode, local, target, link.srq()) };
        self.local.release_taken();
        executed
    }

    /// Whether the operation's success is reported to the application.
    #[inline]
    pub(super) fn is_visible(&self, op: &Transmit<'_>) -> bool {
        !op.silent && (!self.selective || op.flags.contains(Flags::COMPLETION))
    }

    /// Releases the registrations of an operation that was not posted.
    #[inline]
    pub(super) fn not_posted(&mut self) {
        self.local.release_taken();
    }
}
