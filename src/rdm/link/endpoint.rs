//! What the connections and the posters of links call at the endpoint that they belong to.

use super::cm::LinkCm;
use super::poster::DriverRequest;
use super::sidr::LinkSidr;
use crate::rdm::core::link::LinkKey;
use crate::verbs::{AsyncEvent, CmEvent};

/// The endpoint of a link.
pub(in crate::rdm) trait LinkEndpoint: Send + Sync {
    /// Nanoseconds since time 0 of the core.
    fn now(&self) -> u64;

    /// An event of the connection manager for the connection of a link.
    fn link_event(&self, cm: &LinkCm, event: CmEvent);

    /// An asynchronous event of the queue pair of a link.
    fn link_async_event(&self, cm: &LinkCm, event: AsyncEvent);

    /// An event of the connection manager for the exchange by which a link is dialled.
    fn exchange_event(&self, sidr: &LinkSidr, event: CmEvent);

    /// Asks the driver for something. Acquires leaf locks alone.
    fn request_driver(&self, request: DriverRequest);

    /// Polls, unless another thread or the caller holds the endpoint's lock.
    fn try_poll(&self);

    /// Acknowledges the revocations of a link's peer, unless the endpoint's lock is held.
    fn acknowledge(&self, link: LinkKey);

    /// Moves the targets through which the peer of a link may send to their error state: it
    /// accesses no region of this side any more. May be called with the lock of a key directory.
    fn sever_targets(&self, link: LinkKey);
}
