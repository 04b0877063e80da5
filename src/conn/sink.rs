//! The receiver of the results of connections.

use std::fmt::Debug;
use std::sync::Weak;

use super::{CmTarget, ConnectRequest, Dispatcher};
use crate::Token;
use crate::errno::FiErrno;
use crate::verbs::PrivateData;

/// A result of a connection or of a listener.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A peer requests a connection from a listener.
    Requested(ConnectRequest),
    /// The connection is established. The private data is that of the peer's reply on the dialling
    /// side, and empty on the accepting side.
    Connected(PrivateData),
    /// The connection could not be established, or the listener has ended.
    Failed {
        /// The reason as libfabric's errno.
        err: FiErrno,
        /// The reason as the connection manager's status, made positive.
        status: i32,
        /// Private data of the peer's rejection.
        private_data: PrivateData,
    },
    /// An established connection has ended. The sink calls [`CmTarget::before_shutdown`], without a
    /// lock, before it passes the event to the application.
    Ended(Weak<dyn CmTarget>),
}

/// Drives the connection manager for the connections that are bound to it, and receives their
/// results.
pub(crate) trait CmSink: Debug + Send + Sync {
    /// The dispatcher whose events the sink takes.
    fn dispatcher(&self) -> &Dispatcher;

    /// Receives a result of the connection or listener `owner`. Called with the locks of the
    /// dispatcher and of the owner held; must not block, nor acquire a lock that precedes these
    /// locks.
    fn report(&self, owner: Token, outcome: Outcome);

    /// Discards the unread results of `owner`. No later call reports a result of `owner`.
    fn forget(&self, owner: Token);
}
