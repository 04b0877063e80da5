//! Waiting for completions: `fi_cq_sread`, `fi_cq_signal`, `fi_trywait`, poll sets and counters.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::errno::{FiErrno, Result};
use crate::queue::cq::CompletionQueue;
use crate::queue::device::DeviceQueue;
use crate::queue::wait::{WaitSet, deadline};
use crate::queue::{EntryWriter, WaitKind};

impl CompletionQueue {
    /// Waits until `threshold` completions (at least 1, at most `max`) were read, and returns their
    /// number; fewer after the timeout, or if [`Self::signal`] was called meanwhile. `timeout` of
    /// `None` is no limit.
    ///
    /// # Errors
    /// - `EAGAIN`: no completion within the timeout, or the queue was signalled.
    /// - `EAVAIL`: as for [`Self::read`].
    /// - `EINTR`: a signal handler ran.
    /// - `ENOSYS`: the queue was opened without a wait object.
    pub fn sread<W: EntryWriter>(
        &self,
        max: usize,
        threshold: usize,
        timeout: Option<Duration>,
        writer: &mut W,
    ) -> Result<usize> {
        let wait = self.wait.as_ref().ok_or(FiErrno::ENOSYS)?;
        let threshold = threshold.clamp(1, max.max(1));
        let deadline = deadline(timeout);
        let mut count = 0;
        let end = loop {
            match self.read(max - count, writer) {
                Ok(more) => count += more,
                Err(FiErrno::EAGAIN) => {}
                Err(error) => break error,
            }
            if count >= threshold {
                return Ok(count);
            }
            if self.take_signal(wait) {
                break FiErrno::EAGAIN;
            }
            match self.arm(wait) {
                Err(FiErrno::EAGAIN) => continue,
                Err(error) => break error,
                Ok(()) => {}
            }
            match wait.wait(deadline) {
                Ok(true) => {}
                Ok(false) => break FiErrno::EAGAIN,
                Err(error) => break error,
            }
        };
        if count > 0 { Ok(count) } else { Err(end) }
    }

    /// Wakes one thread that waits in [`Self::sread`]; if none waits, the next such call that would
    /// wait returns instead (`fi_cq_signal`).
    ///
    /// # Errors
    /// `ENOSYS`: the queue was opened without a wait object.
    pub fn signal(&self) -> Result<()> {
        let wait = self.wait.as_ref().ok_or(FiErrno::ENOSYS)?;
        self.signaled.store(true, Ordering::Release);
        wait.wake();
        Ok(())
    }

    fn take_signal(&self, wait: &WaitSet) -> bool {
        let signaled = self.signaled.swap(false, Ordering::AcqRel);
        if signaled {
            wait.clear();
        }
        signaled
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`).
    ///
    /// # Errors
    /// - `EAGAIN`: the queue has an entry, or an endpoint can resume; the caller reads the queue
    ///   instead of waiting.
    /// - `EINVAL`: no wait object.
    pub fn trywait(&self) -> Result<()> {
        let wait = self.wait.as_ref().ok_or(FiErrno::EINVAL)?;
        if self.take_signal(wait) {
            return Err(FiErrno::EAGAIN);
        }
        self.arm(wait)
    }

    /// Arms the sources for the next completion, then checks for earlier completions.
    fn arm(&self, wait: &WaitSet) -> Result<()> {
        if let Some(keepalive) = self.domain.keepalive() {
            keepalive.woken();
        }
        let mut inner = self.inner.lock();
        if !self.signaled.load(Ordering::Acquire) {
            // the entry that caused the wake-up is in the backlog or has been read
            wait.clear();
            if self.signaled.load(Ordering::Acquire) {
                wait.wake();
            }
        }
        if !inner.backlog.is_empty() {
            return Err(FiErrno::EAGAIN);
        }
        if let Some(device) = &self.device {
            device.arm()?;
        }
        for source in &inner.sources {
            source.arm()?;
        }
        match self.progress_locked(&mut inner) {
            // otherwise the caller's next read resumes the endpoint
            Ok(false) if !inner.table.resumes() => Ok(()),
            // the caller's next read returns the failure
            _ => Err(FiErrno::EAGAIN),
        }
    }

    /// For a thread that waits for a counter: arms the queue's channel, if any, for the next
    /// completion, polls the earlier ones, and resumes their endpoints. Because consuming the
    /// channel's event could lose the wake-up of a thread that waits on the queue itself, wakes that
    /// thread too.
    pub(crate) fn arm_for_counter(&self) {
        let mut inner = self.inner.lock();
        if let Some(device) = &self.device
            && device.fd().is_some()
        {
            // a reader of the queue gets the error
            let _ = device.arm();
        }
        let polled = self.progress_locked(&mut inner);
        let something = self.resume_after(inner, polled);
        if let Some(wait) = &self.wait
            && !matches!(something, Ok(false))
        {
            wait.wake();
        }
    }

    /// The descriptor of the device queue's channel, readable when a completion arrives after the
    /// channel was armed.
    pub(crate) fn channel_fd(&self) -> Option<RawFd> {
        self.device.as_ref().and_then(DeviceQueue::fd)
    }

    /// Whether the queue has sources besides its device queue.
    pub(crate) fn has_sources(&self) -> bool {
        !self.inner.lock().sources.is_empty()
    }

    /// Makes progress, and returns whether the queue has an entry or an error (`fi_poll(3)`).
    pub fn poll_ready(&self) -> bool {
        // a read returns the failure
        self.progress().unwrap_or(true)
    }

    /// The descriptor to poll for reading, if the queue has a wait object. The queue owns it.
    pub fn fd(&self) -> Option<RawFd> {
        self.wait.as_ref().map(WaitSet::fd)
    }

    /// The kind of the queue's wait object.
    pub fn wait_kind(&self) -> WaitKind {
        self.kind
    }
}
