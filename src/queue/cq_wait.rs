//! Waiting for completions: `fi_cq_sread`, `fi_cq_signal`, `fi_trywait`, poll sets and counters.

use std::os::fd::RawFd;
use std::time::Duration;

use parking_lot::Mutex;

use crate::errno::{FiErrno, Result};
use crate::queue::cq::{CompletionQueue, Inner};
use crate::queue::device_queue::DeviceQueue;
use crate::queue::source::Entry;
use crate::queue::wait::{WaitSet, deadline, pause};
use crate::queue::{EntryWriter, WaitKind};
use crate::verbs::{AsyncEvent, AsyncListener};

/// Signals of [`CompletionQueue::signal`] to the threads that wait in [`CompletionQueue::sread`].
#[derive(Debug, Default)]
pub(super) struct Signals(Mutex<SignalState>);

#[derive(Debug, Default)]
struct SignalState {
    /// Number of signals; wraps.
    count: u64,
    /// Number of waiting threads.
    waiting: usize,
    /// Number of waiting threads that were waiting at the last signal.
    released: usize,
    /// Whether a signal, for which no thread waited, ends the next wait.
    kept: bool,
}

impl Signals {
    /// Releases the waiting threads.
    fn signal(&self) {
        let mut state = self.0.lock();
        state.count = state.count.wrapping_add(1);
        state.released = state.waiting;
        state.kept |= state.waiting == 0;
    }

    /// Adds the calling thread to the waiting threads, until the result is dropped.
    fn join(&self) -> SignalWaiter<'_> {
        let mut state = self.0.lock();
        state.waiting += 1;
        SignalWaiter {
            signals: self,
            count: state.count,
        }
    }

    fn take_kept(&self) -> bool {
        std::mem::take(&mut self.0.lock().kept)
    }

    /// Whether the wait object must stay readable for a thread that has not seen a signal.
    fn is_pending(&self) -> bool {
        let state = self.0.lock();
        state.kept || state.released != 0
    }
}

/// A waiting thread.
struct SignalWaiter<'a> {
    signals: &'a Signals,
    /// Number of signals when the wait began.
    count: u64,
}

impl SignalWaiter<'_> {
    /// Whether a signal ends the wait.
    fn is_released(&self) -> bool {
        let mut state = self.signals.0.lock();
        state.count != self.count || std::mem::take(&mut state.kept)
    }
}

impl Drop for SignalWaiter<'_> {
    fn drop(&mut self) {
        let mut state = self.signals.0.lock();
        state.waiting -= 1;
        if state.count != self.count {
            state.released -= 1;
        }
    }
}

impl CompletionQueue {
    /// Waits until `threshold` completions (at least 1, at most `max`) were read, and returns their
    /// number; fewer after the timeout, or if [`Self::signal`] was called meanwhile. `timeout` of
    /// `None` is no limit. With a `max` of 0, waits until the queue has an entry.
    ///
    /// # Errors
    /// - `EAGAIN`: no completion within the timeout, or the queue was signalled, or `max` is 0.
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
        let mut waiter = None;
        let end = loop {
            match self.read(max - count, writer) {
                Ok(more) => count += more,
                Err(FiErrno::EAGAIN) => {}
                Err(error) => break error,
            }
            if count >= threshold || (max == 0 && self.poll_ready()) {
                break FiErrno::EAGAIN;
            }
            if waiter
                .get_or_insert_with(|| self.signals.join())
                .is_released()
            {
                break FiErrno::EAGAIN;
            }
            match self.arm(wait) {
                Err(FiErrno::EAGAIN) => continue,
                Err(error) => break error,
                Ok(()) => {}
            }
            let woken = if self.signals.is_pending() {
                // for other threads, which have not left yet
                Ok(pause(deadline))
            } else {
                wait.wait(deadline)
            };
            match woken {
                Ok(true) => {}
                Ok(false) => break FiErrno::EAGAIN,
                Err(error) => break error,
            }
        };
        if waiter.is_some() {
            self.pass_on(wait, end);
        }
        if count > 0 { Ok(count) } else { Err(end) }
    }

    /// Wakes another thread that waits on the queue, if the queue has an entry or has failed: the
    /// calling thread, whose wait ends with `end`, may have cleared the wake-up of that thread when
    /// it armed the queue.
    #[cold]
    fn pass_on(&self, wait: &WaitSet, end: FiErrno) {
        let passing = [FiErrno::EAGAIN, FiErrno::EAVAIL, FiErrno::EINTR].contains(&end);
        if !passing || !self.inner.lock().backlog.is_empty() {
            wait.wake();
        }
    }

    /// Ends the waits of all threads in [`Self::sread`]; if none waits, the next such call that
    /// would wait returns instead (`fi_cq_signal`).
    ///
    /// # Errors
    /// `ENOSYS`: the queue was opened without a wait object.
    pub fn signal(&self) -> Result<()> {
        let wait = self.wait.as_ref().ok_or(FiErrno::ENOSYS)?;
        self.signals.signal();
        wait.wake();
        Ok(())
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`).
    ///
    /// # Errors
    /// - `EAGAIN`: the queue has an entry, or an endpoint can resume; the caller reads the queue
    ///   instead of waiting.
    /// - `EINVAL`: no wait object.
    pub fn trywait(&self) -> Result<()> {
        let wait = self.wait.as_ref().ok_or(FiErrno::EINVAL)?;
        self.domain.help_from_poll();
        if self.signals.take_kept() {
            return Err(FiErrno::EAGAIN);
        }
        let armed = self.arm(wait);
        if let Err(end) = armed {
            self.pass_on(wait, end);
        }
        armed
    }

    /// Arms the sources for the next completion, then checks for earlier completions. A caller that
    /// gets an error does not sleep; before it returns to the application, it calls
    /// [`Self::pass_on`].
    fn arm(&self, wait: &WaitSet) -> Result<()> {
        if let Some(keepalive) = self.domain.keepalive() {
            keepalive.woken();
        }
        let mut inner = self.inner.lock();
        if !self.signals.is_pending() {
            // the entry that caused the wake-up is in the backlog or has been read
            wait.clear();
            if self.signals.is_pending() {
                wait.wake();
            }
        }
        // before the look at the backlog: another thread, whose wake-up was just cleared, may sleep
        inner.armed = true;
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
            Ok(_) => Err(FiErrno::EAGAIN),
            Err(_) => {
                // The caller's next read returns the failure, which nothing reports again: other
                // threads that wait find the wait object readable.
                wait.wake();
                Err(FiErrno::EAGAIN)
            }
        }
    }

    /// For a thread that waits for a counter: arms the queue's channel, if any, and the sources for
    /// the next completion, polls the earlier ones, and resumes their endpoints. Because consuming
    /// the event of a descriptor could lose the wake-up of a thread that waits on the queue itself,
    /// wakes that thread too.
    ///
    /// # Errors
    /// The device has lost completions, or cannot make the channel readable.
    pub(crate) fn arm_for_counter(&self) -> Result<()> {
        let mut inner = self.inner.lock();
        let mut armed = match &self.device {
            Some(device) if device.fd().is_some() => device.arm(),
            _ => Ok(()),
        };
        for source in &inner.sources {
            if source.fd().is_some() {
                armed = armed.and(source.arm());
            }
        }
        let polled = self.progress_for_counter_locked(&mut inner);
        let something = self.resume_after(inner, polled);
        if let Some(wait) = &self.wait
            && !matches!(something, Ok(false))
        {
            wait.wake();
        }
        something.and(armed)
    }

    /// As [`Self::progress`], for a counter: it counts operations that have completed also while
    /// the application does not read a full queue.
    pub(crate) fn progress_for_counter(&self) -> Result<bool> {
        let mut inner = self.inner.lock();
        let result = self.progress_for_counter_locked(&mut inner);
        self.resume_after(inner, result)
    }

    /// As [`Self::progress_for_counter`], but resumes no endpoint.
    fn progress_for_counter_locked(&self, inner: &mut Inner) -> Result<bool> {
        let progressed = self.progress_locked(inner);
        // otherwise it has polled until the device had no further completion
        if inner.backlog.len() >= self.size || !inner.sources.is_empty() {
            return progressed.and(self.drain_all(inner));
        }
        progressed
    }

    /// Follows the failure of the device queue, which makes no event of its channel. The first call
    /// wakes the threads that wait on the queue, and on counters of the endpoints of its device
    /// queue.
    #[cold]
    #[inline(never)]
    pub(super) fn report_failure(&self, inner: &Inner) {
        if !self.device.as_ref().is_some_and(DeviceQueue::takes_report) {
            return;
        }
        if let Some(wait) = &self.wait {
            wait.wake();
        }
        let endpoints = inner.table.endpoints.iter();
        for slots in endpoints.filter_map(|attachment| attachment.slots.as_ref()) {
            if let Some(counters) = slots.counters() {
                let all = counters.tx().chain(counters.rx());
                all.for_each(|counter| counter.wake());
            }
        }
    }

    /// Passes on the descriptor of the device queue's channel, if the queue has a device queue, and
    /// those of the sources. A descriptor becomes readable when a completion arrives after
    /// [`Self::arm_for_counter`]; `None`: one of them has no descriptor.
    pub(crate) fn for_wake_fds(&self, mut each: impl FnMut(Option<RawFd>)) {
        if let Some(device) = &self.device {
            each(device.fd());
        }
        for source in &self.inner.lock().sources {
            each(source.fd());
        }
    }

    /// Makes progress, and returns whether the queue has an entry or an error (`fi_poll(3)`).
    pub fn poll_ready(&self) -> bool {
        self.domain.help_from_poll();
        // a read returns the failure
        self.progress().unwrap_or(true)
    }

    /// Makes progress, and examines the next entry without removing it.
    ///
    /// # Errors
    /// As [`Self::read`]; `EAVAIL`: the next entry is an error.
    pub fn next_entry(&self) -> Result<()> {
        self.domain.help_from_poll();
        let progress = self.progress();
        match self.inner.lock().backlog.front() {
            Some(Entry::Done(_)) => Ok(()),
            Some(Entry::Failed(_)) => Err(FiErrno::EAVAIL),
            None => progress.and(Err(FiErrno::EAGAIN)),
        }
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

impl AsyncListener for CompletionQueue {
    fn async_event(&self, event: AsyncEvent) {
        if event == AsyncEvent::CqError
            && let Some(device) = &self.device
        {
            let _ = device.overran();
            // a poll after this finds the failure
            self.report_failure(&self.inner.lock());
        }
    }
}
