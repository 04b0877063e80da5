//! Event queues.

use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::Token;
use crate::errno::{FiErrno, Result};
use crate::msg::ConnectRequest;
use crate::queue::WaitKind;
use crate::wire::cm_data::CmData;

/// What to open an event queue with.
#[derive(Clone, Copy, Debug, Default)]
pub struct EqConfig {
    /// How it can be waited on.
    pub wait: WaitKind,
}

/// An event.
#[derive(Debug)]
pub enum Event {
    /// A connection request reached a passive endpoint (`FI_CONNREQ`).
    ConnReq {
        /// The passive endpoint.
        pep: Token,
        /// The request, to be taken when the event is consumed; dropping it rejects.
        request: Option<ConnectRequest>,
        /// Data of the application at the peer.
        data: CmData,
        /// For the provider, when it peeks: what it made of the request already.
        attachment: Option<Box<dyn Any + Send>>,
    },
    /// An endpoint is connected (`FI_CONNECTED`).
    Connected {
        /// The endpoint.
        ep: Token,
        /// Data that the peer accepted with, on the side that connected.
        data: CmData,
    },
    /// A connection has ended (`FI_SHUTDOWN`): told once per connection, after its operations
    /// were flushed to the completion queues.
    Shutdown {
        /// The endpoint.
        ep: Token,
    },
    /// Written by the application, or by the provider for operations of its own.
    User {
        /// The number of the event.
        event: u32,
        /// Its content.
        bytes: Box<[u8]>,
        /// Whom it is about, if it must go when that is closed.
        owner: Token,
    },
}

/// An event that is an error.
#[derive(Clone, Debug)]
pub struct EqError {
    /// Whom it is about.
    pub owner: Token,
    /// The reason in libfabric's terms.
    pub err: FiErrno,
    /// The reason in the connection manager's: the `status` of its event, made positive.
    pub prov_errno: i32,
    /// Data that the peer rejected with.
    pub data: CmData,
    /// `data` of `fi_eq_err_entry`: for operations of the provider.
    pub context: usize,
}

/// An event queue. Reading it makes the connection manager's progress. Thread safe.
#[derive(Debug)]
pub struct EventQueue {}

impl EventQueue {
    /// Opens an event queue.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`: resources of the process.
    pub fn open(config: EqConfig) -> Result<Arc<Self>> {
        let _ = config;
        Err(FiErrno::ENOSYS)
    }

    /// Passes the first event to `take` and, unless it fails or `peek` is set, removes the event.
    /// Never blocks. `take` runs with the queue's lock held and must not call the engine.
    ///
    /// # Errors
    /// - `EAGAIN`: there is none.
    /// - `EAVAIL`: an error comes first: [`Self::read_error`] has it.
    /// - what `take` answers, for instance `ETOOSMALL`.
    pub fn read<R>(&self, peek: bool, take: impl FnOnce(&mut Event) -> Result<R>) -> Result<R> {
        let _ = (peek, take);
        Err(FiErrno::ENOSYS)
    }

    /// Takes the error that [`Self::read`] stopped at. Never blocks.
    ///
    /// # Errors
    /// `EAGAIN`: no error comes first.
    pub fn read_error(&self) -> Result<EqError> {
        Err(FiErrno::ENOSYS)
    }

    /// As [`Self::read`], but waits for an event. `None` waits for ever.
    ///
    /// # Errors
    /// As [`Self::read`]; `EAGAIN` when the time is over, `EINTR` when a signal handler ran,
    /// `ENOSYS` where the queue was opened without a wait object.
    pub fn sread<R>(
        &self,
        peek: bool,
        timeout: Option<Duration>,
        take: impl FnOnce(&mut Event) -> Result<R>,
    ) -> Result<R> {
        let _ = (peek, timeout, take);
        Err(FiErrno::ENOSYS)
    }

    /// Appends an event (`fi_eq_write(3)`, or one of the provider's own) and wakes who waits.
    pub fn write(&self, event: u32, bytes: &[u8], owner: Token) {
        let _ = (event, bytes, owner);
    }

    /// Prepares for waiting on [`Self::fd`] (`fi_trywait(3)`).
    ///
    /// # Errors
    /// `EAGAIN`: there is something to read; don't wait. `EINVAL`: no wait object.
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
}
