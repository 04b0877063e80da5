//! Completion queues.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::domain::Domain;
use crate::errno::{FiErrno, Result};
use crate::queue::{CompletionError, EntryWriter, WaitKind};

/// What to open a completion queue with.
#[derive(Clone, Copy, Debug, Default)]
pub struct CqConfig {
    /// Completions that it must hold; 0 for the default of 1024. It grows as endpoints are bound,
    /// so that it never overruns.
    pub size: usize,
    /// How it can be waited on.
    pub wait: WaitKind,
    /// The completion vector (`FI_AFFINITY`), taken modulo those of the device.
    pub signaling_vector: u32,
}

/// A completion queue. Thread safe.
#[derive(Debug)]
pub struct CompletionQueue {
    domain: Arc<Domain>,
}

impl CompletionQueue {
    /// Opens a completion queue.
    ///
    /// # Errors
    /// - `EINVAL`: more completions than the device allows.
    /// - `ENOMEM`, `EMFILE`: resources of the device or the process.
    pub fn open(domain: &Arc<Domain>, _config: CqConfig) -> Result<Arc<Self>> {
        let _ = domain;
        Err(FiErrno::ENOSYS)
    }

    /// Reads up to `max` completions into `writer`; returns how many, at least 1. Never blocks.
    ///
    /// # Errors
    /// - `EAGAIN`: there are none.
    /// - `EAVAIL`: the next one is an error: [`Self::read_error`] has it.
    #[inline]
    pub fn read<W: EntryWriter>(&self, max: usize, writer: &mut W) -> Result<usize> {
        let _ = (max, writer);
        Err(FiErrno::ENOSYS)
    }

    /// Takes the error that [`Self::read`] stopped at. Never blocks.
    ///
    /// # Errors
    /// `EAGAIN`: the next completion is not an error.
    pub fn read_error(&self) -> Result<CompletionError> {
        Err(FiErrno::ENOSYS)
    }

    /// Waits until `threshold` completions (at least 1, at most `max`) were read, and returns how
    /// many were; fewer when the time is over or [`Self::signal`] was called in between. `timeout`
    /// of `None` waits for ever.
    ///
    /// # Errors
    /// - `EAGAIN`: none came in time, or the queue was signalled.
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
        let _ = (max, threshold, timeout, writer);
        Err(FiErrno::ENOSYS)
    }

    /// Wakes one thread that waits in [`Self::sread`], now or when it next tries
    /// (`fi_cq_signal`).
    ///
    /// # Errors
    /// `ENOSYS`: the queue was opened without a wait object.
    pub fn signal(&self) -> Result<()> {
        Err(FiErrno::ENOSYS)
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`).
    ///
    /// # Errors
    /// - `EAGAIN`: there is something to read; don't wait.
    /// - `EINVAL`: no wait object.
    pub fn trywait(&self) -> Result<()> {
        Err(FiErrno::ENOSYS)
    }

    /// The descriptor to poll for reading, if the queue has a wait object. It belongs to the
    /// queue.
    pub fn fd(&self) -> Option<RawFd> {
        None
    }

    /// How it can be waited on.
    pub fn wait_kind(&self) -> WaitKind {
        WaitKind::None
    }

    /// What a [`CompletionError::prov_errno`] means.
    pub fn strerror(&self, prov_errno: i32) -> &'static CStr {
        let _ = prov_errno;
        c""
    }

    /// The domain it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }
}
