//! Completion queues of the device, and the channels that wake waiting threads.

#![allow(unsafe_code, reason = "calls verbs")]

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys as sys;

use super::Device;
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};

/// Entries of a queue that cannot be resized: 4 MiB with entries of 64 bytes.
const FIXED: usize = 1 << 16;

/// A completion channel: readable when an armed queue has got a completion. Thread safe.
#[derive(Debug)]
pub struct CompChannel {
    raw: *mut sys::ibv_comp_channel,
    device: Arc<Device>,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for CompChannel {}
// SAFETY: as above.
unsafe impl Sync for CompChannel {}

impl CompChannel {
    /// `ibv_create_comp_channel(3)`.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`.
    pub fn create(device: &Arc<Device>) -> Result<Self> {
        // SAFETY: the context is live and of this backend.
        let raw = unsafe { (device.backend().verbs.ibv_create_comp_channel)(device.context()) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        let this = Self {
            raw,
            device: Arc::clone(device),
        };
        super::set_nonblocking(this.fd())?;
        Ok(this)
    }

    /// The descriptor to poll for reading.
    pub fn fd(&self) -> RawFd {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).fd }
    }

    /// Consumes the events that make the channel readable, and calls `each` with the
    /// [identity](Cq::object) of their queues, which may have been destroyed meanwhile. Never
    /// blocks. The caller ensures that one thread at a time calls this.
    pub(crate) fn drain(&self, mut each: impl FnMut(usize)) {
        let verbs = &self.device.backend().verbs;
        loop {
            let mut cq = std::ptr::null_mut();
            let mut context = std::ptr::null_mut();
            let ret =
                // SAFETY: the channel is live and non-blocking.
                unsafe { (verbs.ibv_get_cq_event)(self.raw, &raw mut cq, &raw mut context) };
            if ret != 0 {
                return;
            }
            let object = cq as usize;
            // SAFETY: the event was read above and is acknowledged once; until then the queue is
            // not destroyed.
            unsafe { (verbs.ibv_ack_cq_events)(cq, 1) };
            each(object);
        }
    }
}

impl Drop for CompChannel {
    fn drop(&mut self) {
        // SAFETY: created by this backend. Each queue on the channel holds a reference to it, so no
        // such queue exists any more.
        let ret = unsafe { (self.device.backend().verbs.ibv_destroy_comp_channel)(self.raw) };
        if let Err(error) = FiErrno::from_verb(ret) {
            warn_log!(Cq, "ibv_destroy_comp_channel: {error}");
        }
    }
}

/// A work completion.
#[repr(transparent)]
pub struct Wc(sys::ibv_wc);

impl Wc {
    /// The `wr_id` of the work request.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// `ibv_wc_status`; 0 is success. After a failure only `wr_id`, `vendor_err` and `qp_num` are
    /// valid.
    #[inline]
    pub fn status(&self) -> u32 {
        self.0.status
    }

    /// Number of bytes received.
    #[inline]
    pub fn byte_len(&self) -> usize {
        self.0.byte_len as usize
    }

    /// Immediate data, if the completion has any.
    #[inline]
    pub fn imm(&self) -> Option<u32> {
        // the union's members share their four bytes
        (self.0.wc_flags & sys::IBV_WC_WITH_IMM != 0)
            .then(|| u32::from_be(self.0.__bindgen_anon_1.bindgen_union_field))
    }

    /// Whether a receive was consumed by a peer's write with immediate data.
    #[inline]
    pub fn is_recv_rdma(&self) -> bool {
        self.0.opcode == sys::IBV_WC_RECV_RDMA_WITH_IMM
    }

    /// Number of the request's queue pair; valid after failures too.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    /// The device's own error code.
    pub fn vendor_err(&self) -> u32 {
        self.0.vendor_err
    }
}

/// A completion queue. Thread safe.
#[derive(Debug)]
pub struct Cq {
    raw: *mut sys::ibv_cq,
    channel: Option<Arc<CompChannel>>,
    device: Arc<Device>,
    /// Whether polls fail.
    #[cfg(test)]
    fails: AtomicBool,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// `ibv_create_cq(3)`: creates a queue for at least `cqe` completions.
    ///
    /// # Errors
    /// `EINVAL`: `cqe` exceeds the device's limit. `ENOMEM`.
    pub fn create(
        device: &Arc<Device>,
        cqe: usize,
        channel: Option<Arc<CompChannel>>,
        vector: u32,
    ) -> Result<Self> {
        let cqe = c_int::try_from(cqe).map_err(|_| FiErrno::EINVAL)?;
        // SAFETY: the context is live.
        let vectors = unsafe { (*device.context()).num_comp_vectors }.max(1);
        let vector = (vector % vectors as u32) as c_int;
        let raw_channel = channel.as_ref().map_or(std::ptr::null_mut(), |c| c.raw);
        // SAFETY: context and channel are live and of this backend.
        let raw = unsafe {
            (device.backend().verbs.ibv_create_cq)(
                device.context(),
                cqe,
                std::ptr::null_mut(),
                raw_channel,
                vector,
            )
        };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self {
            raw,
            channel,
            device: Arc::clone(device),
            #[cfg(test)]
            fails: AtomicBool::new(false),
        })
    }

    /// As [`Self::create`], a queue that the caller resizes when it needs more room. If the device
    /// cannot resize queues, it gets at least [`FIXED`] entries at once, or as many as the device
    /// makes. Returns the queue, and whether it can be resized.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) fn create_growing(
        device: &Arc<Device>,
        cqe: usize,
        channel: Option<&Arc<CompChannel>>,
        vector: u32,
    ) -> Result<(Self, bool)> {
        let create = |cqe| Self::create(device, cqe, channel.cloned(), vector);
        let cq = create(cqe)?;
        // No device has so many entries: one that can resize queues refuses the number, without
        // effect.
        let trial = cq.resize(c_int::MAX as usize);
        if !matches!(trial, Err(FiErrno::EOPNOTSUPP | FiErrno::ENOSYS)) {
            return Ok((cq, true));
        }
        info_log!(Cq, "{}: completion queues cannot be resized", device.name());
        // without memory for the larger one, the smaller one serves fewer connections
        let larger = create(FIXED.max(cqe).min(device.attr().max_cqe));
        Ok((larger.unwrap_or(cq), false))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw
    }

    /// The queue's identity in asynchronous events.
    pub(crate) fn object(&self) -> usize {
        self.raw as usize
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Number of completions that the queue has room for.
    pub fn cqe(&self) -> usize {
        // SAFETY: live until dropped.
        usize::try_from(unsafe { (*self.raw).cqe }).unwrap_or(0)
    }

    /// `ibv_resize_cq(3)`.
    ///
    /// # Errors
    /// `EINVAL`: `cqe` exceeds the device's limit. `EOPNOTSUPP`, `ENOSYS`: the device cannot resize
    /// queues.
    pub fn resize(&self, cqe: usize) -> Result<()> {
        let cqe = c_int::try_from(cqe).map_err(|_| FiErrno::EINVAL)?;
        // SAFETY: live and of this backend.
        FiErrno::from_verb(unsafe { (self.device.backend().verbs.ibv_resize_cq)(self.raw, cqe) })
    }

    /// `ibv_poll_cq(3)`: polls at most `max` completions, in the order of their arrival.
    ///
    /// # Errors
    /// The device's.
    #[inline]
    pub fn poll<'a, const N: usize>(
        &self,
        buffer: &'a mut [MaybeUninit<Wc>; N],
        max: usize,
    ) -> Result<&'a [Wc]> {
        #[cfg(test)]
        if self.fails.load(Ordering::Relaxed) {
            return Err(FiErrno::EIO);
        }
        let max = max.min(N) as c_int;
        // SAFETY: the queue is live, and the buffer has room for `max`.
        let ret = unsafe { sys::ibv_poll_cq(self.raw, max, buffer.as_mut_ptr().cast()) };
        match usize::try_from(ret) {
            Ok(count) => {
                // SAFETY: the device has written `count` elements, at most `max`.
                Ok(unsafe { std::slice::from_raw_parts(buffer.as_ptr().cast(), count.min(N)) })
            }
            Err(_) => Err(FiErrno::EIO),
        }
    }

    /// As if the device had lost completions: later polls fail, and nothing else reports it.
    #[cfg(test)]
    pub(crate) fn fail_polls(&self) {
        self.fails.store(true, Ordering::Relaxed);
    }

    /// `ibv_req_notify_cq(3)`: the next completion makes the channel readable.
    ///
    /// # Errors
    /// The device's.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: the queue is live.
        FiErrno::from_verb(unsafe { sys::ibv_req_notify_cq(self.raw, 0) })
    }

    /// As [`Self::arm`], but only a receive of a send with the solicited flag, and a failed
    /// completion, make the channel readable.
    ///
    /// # Errors
    /// The device's.
    pub fn arm_solicited(&self) -> Result<()> {
        // SAFETY: the queue is live.
        FiErrno::from_verb(unsafe { sys::ibv_req_notify_cq(self.raw, 1) })
    }

    /// Consumes the events that make the channel readable. No other queue may use the channel.
    /// Never blocks. The caller ensures that one thread at a time calls this.
    pub fn drain_channel(&self) {
        if let Some(channel) = &self.channel {
            channel.drain(|_| {});
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: created by this backend. Each queue pair on the queue holds a reference to it, so
        // no such queue pair exists any more. Each event of the queue is acknowledged when it is
        // read (`CompChannel::drain`).
        let ret = unsafe { (self.device.backend().verbs.ibv_destroy_cq)(self.raw) };
        if let Err(error) = FiErrno::from_verb(ret) {
            warn_log!(Cq, "ibv_destroy_cq: {error}");
        }
    }
}
