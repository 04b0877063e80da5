//! The device queue of a completion queue: the source of endpoints whose work requests complete in
//! it. Other sources have their own polling (`source.rs`).

use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::queue::EntryWriter;
use crate::queue::complete::EndpointTable;
use crate::queue::source::{NoReader, Sink};
use crate::verbs::{CompChannel, Cq, Device, Wc};

/// Maximum number of work completions per poll.
const BATCH: usize = 16;

/// See the module. Polled with the completion queue's lock held.
#[derive(Debug)]
pub(super) struct DeviceQueue {
    cq: Arc<Cq>,
    /// The channel, which no other queue uses; `None` without a wait object.
    channel: Option<Arc<CompChannel>>,
    /// Whether the device has lost completions.
    overrun: AtomicBool,
    /// Whether a thread reports the loss, or has reported it.
    reported: AtomicBool,
}

impl DeviceQueue {
    /// Creates a device queue of at least `size` entries, with a channel if `waits` is set.
    ///
    /// # Errors
    /// `EINVAL`: too many entries. `ENOMEM`, `EMFILE`: resources of the device or the process.
    pub(super) fn create(
        device: &Arc<Device>,
        size: usize,
        waits: bool,
        vector: u32,
    ) -> Result<Self> {
        let channel = match waits {
            true => Some(Arc::new(CompChannel::create(device)?)),
            false => None,
        };
        let (cq, _) = Cq::create_growing(device, size, channel.as_ref(), vector)?;
        Ok(Self {
            cq: Arc::new(cq),
            channel,
            overrun: AtomicBool::new(false),
            reported: AtomicBool::new(false),
        })
    }

    pub(super) fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// Passes completions to `sink`, which must be open, until the sink is full or the device queue
    /// is empty.
    ///
    /// # Errors
    /// `EOVERRUN`: the device has lost completions.
    #[inline(always)]
    pub(super) fn poll<W: EntryWriter>(
        &self,
        table: &EndpointTable,
        sink: &mut Sink<'_, W>,
    ) -> Result<()> {
        let mut buffer = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        loop {
            let want = BATCH.min(sink.room());
            let polled = self.cq.poll(&mut buffer, want);
            let wcs = polled.map_err(|_| self.overran())?;
            if wcs.is_empty() {
                return self.has_ended();
            }
            for wc in wcs {
                table.complete(wc, sink);
            }
            if wcs.len() < want || !sink.is_open() {
                return Ok(());
            }
        }
    }

    /// Moves completions to the backlog until it has `limit` entries.
    ///
    /// # Errors
    /// As [`Self::poll`], also if this call has moved completions: the caller may sleep afterwards,
    /// and a queue that has failed does not wake it.
    pub(super) fn drain(
        &self,
        table: &EndpointTable,
        sink: &mut Sink<'_, NoReader>,
        limit: usize,
    ) -> Result<()> {
        let mut buffer = [const { MaybeUninit::<Wc>::uninit() }; BATCH];
        while sink.queued() < limit {
            let polled = self.cq.poll(&mut buffer, BATCH);
            let wcs = polled.map_err(|_| self.overran())?;
            for wc in wcs {
                table.complete_late(wc, sink);
            }
            if wcs.len() < BATCH {
                break;
            }
        }
        self.has_ended()
    }

    /// The result of polls that have not failed. A device may report the loss by an event
    /// (`IBV_EVENT_CQ_ERR`), and still return the completions that precede the loss.
    #[inline(always)]
    fn has_ended(&self) -> Result<()> {
        match self.overrun.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(FiErrno::EOVERRUN),
        }
    }

    /// Makes the channel readable at the next completion. The caller polls afterwards, since
    /// earlier completions do not make it readable.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn arm(&self) -> Result<()> {
        self.cq.drain_channel();
        self.cq.arm()
    }

    /// The channel's descriptor.
    pub(super) fn fd(&self) -> Option<RawFd> {
        self.channel.as_ref().map(|channel| channel.fd())
    }

    /// Records that the device has lost completions. Returns the error.
    #[cold]
    pub(super) fn overran(&self) -> FiErrno {
        self.overrun.store(true, Ordering::Relaxed);
        FiErrno::EOVERRUN
    }

    /// For a caller that has found the loss: logs it once. Returns whether the caller is the first
    /// one, which wakes the others.
    #[cold]
    pub(super) fn takes_report(&self) -> bool {
        let first = !self.reported.swap(true, Ordering::Relaxed);
        if first {
            warn_log!(
                Cq,
                "{}: a completion queue has failed, and completions are lost",
                self.cq.device().name()
            );
        }
        first
    }
}

impl Drop for DeviceQueue {
    fn drop(&mut self) {
        // the queue's events must be acknowledged before the queue is destroyed
        self.cq.drain_channel();
    }
}
