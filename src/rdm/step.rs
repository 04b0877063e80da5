//! What an endpoint has the driver do without the endpoint's lock. `shared/steps.rs` executes it,
//! `shared/circuit_steps.rs` the steps of endpoints on XRC.

use std::net::SocketAddr;
use std::sync::Arc;

use super::receives::Arrival;
use crate::conn::ConnectRequest;
use crate::errno::FiErrno;
use crate::initiator::Initiator;
use crate::mr::Withdrawn;
use crate::queue::Completion;
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::cm::{Ended, LinkCm};
use crate::rdm::link::initiator_sq::LinkSq;
use crate::rdm::xrc::circuit_cm::XrcStep;
use crate::verbs::Qp;
use crate::wire::rdm::Reply;

/// The connection block of a link, and what posts RMA to the link.
type RmaParts = (Option<LinkBlock>, Option<Box<Initiator<LinkSq>>>);

/// A step that the driver executes.
#[derive(Debug)]
pub(super) enum Step {
    /// Dial.
    Dial(Arc<LinkCm>, SocketAddr),
    /// Accept a request.
    Accept(Arc<LinkCm>, ConnectRequest, Reply),
    /// Reject a request, with this private data.
    Reject(ConnectRequest, Vec<u8>),
    /// Disconnect, and move the queue pair to its error state.
    End(Arc<LinkCm>, Option<Arc<Qp>>),
    /// Destroy the queue pair and the identifier of a link that has ended.
    Destroy(Arc<LinkCm>, Option<Arc<Qp>>, RmaParts, Ended),
    /// Deregister the source of an operation, then report the operation if it has failed. Follows
    /// all other steps of its time; a report, the earlier ends of links too
    /// ([`Step::execute_all`]): the peer's queue pairs have ended.
    Withdraw(Option<Withdrawn>, Option<(Completion, FiErrno)>),
    /// End the registration of a part of a receive, then report the receive, which has failed.
    EndSink(Withdrawn, Box<Arrival>),
    /// A step of an endpoint on XRC.
    Xrc(XrcStep),
}
