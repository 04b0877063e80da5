//! The receiver of the results of connections.

use std::fmt::Debug;
use std::sync::Weak;

use super::{CmTarget, ConnectRequest, Dispatcher};
use crate::Token;
use crate::errno::FiErrno;
use crate::verbs::PrivateData;

/// The result of steps of a connection or of a listener.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A peer requests a connection from a listener.
    Requested(ConnectRequest),
    /// The connection is established; with the private data of the peer's reply on the side that
    /// dialled, without data on the other.
    Connected(PrivateData),
    /// The connection could not be established, or the listener has ended.
    Failed {
        /// The reason in libfabric's terms.
        err: FiErrno,
        /// The reason in the connection manager's: the `status` of its event, made positive.
        status: i32,
        /// Private data of the peer's rejection.
        private_data: PrivateData,
    },
    /// An established connection has ended. [`CmTarget::before_shutdown`] is to be called, without
    /// a lock, before an application learns of it.
    Ended(Weak<dyn CmTarget>),
}

/// Drives the connection manager for the connections that are bound to it, and receives their
/// results.
pub(crate) trait CmSink: Debug + Send + Sync {
    /// The dispatcher whose events the sink takes.
    fn dispatcher(&self) -> &Dispatcher;

    /// Receives a result of the connection or listener `owner`. Called with the locks of the
    /// dispatcher and of the owner held; neither blocks nor acquires a lock that precedes them.
    fn report(&self, owner: Token, outcome: Outcome);

    /// Discards the results of `owner` that were received and not taken. No later call reports one
    /// of `owner`.
    fn forget(&self, owner: Token);
}
