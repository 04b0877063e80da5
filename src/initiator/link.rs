//! Queue pair and counters that key look-ups and revocations need. No operation of the application
//! is posted here.

use std::fmt::Debug;
use std::sync::Arc;

use crate::queue::EngineLink;
use crate::verbs::{Pd, Qp, SrqNumber};

/// What look-ups of keys and revocations need of the queue pair of a [`Sq`](super::sq::Sq). Thread
/// safe, except [`Self::next_number`]. A clone refers to the same queue pair.
pub(crate) trait Link: EngineLink + Clone + Debug + 'static {
    fn pd(&self) -> &Arc<Pd>;

    /// The queue pair itself.
    fn qp(&self) -> &Qp;

    /// The shared receive queue that each request names, on an initiator of XRC.
    #[inline]
    fn srq(&self) -> Option<SrqNumber> {
        None
    }

    /// Whether one of the engine's own requests can be posted now.
    fn has_room(&self) -> bool {
        true
    }

    /// Number of the next request. Under the transmit lock only.
    fn next_number(&self) -> u32;

    /// Whether the completion of the request of this number has not been polled.
    fn is_outstanding(&self, number: u32) -> bool;

    /// Polls for a completion that an operation waits for. `polls`: number of such polls of the
    /// same call since the last completed read of a look-up, incremented here. Returns false,
    /// without polling, if the operation is to be deferred instead.
    fn poll_once_more(&self, polls: &mut u32) -> bool;

    /// Reverts [`EngineLink::request_progress`], when no operation is deferred any more.
    fn clear_progress_request(&self);

    /// Records whether this side holds keys of the peer, so that the peer waits for its
    /// acknowledgement of revocations.
    fn set_holds_keys(&self, holds: bool);

    /// Starts the lease timer, after [`Self::set_holds_keys`].
    fn start_lease(&self);
}
