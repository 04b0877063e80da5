//! What a link on XRC has of circuits (`xrc`): the one on which it posts, the target from which it
//! receives, and its tag.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sidr::LinkSidr;
use crate::rdm::table_keys::CircuitKey;
use crate::verbs::QpNumber;
use crate::wire::rdm::xrc::{Inbox, LinkRequest, LinkTag, NodeId};
use crate::wire::rdm::{EndpointId, Listener, Request};

/// Where the packets of a link go, and whence they come.
#[derive(Debug)]
pub(in crate::rdm) struct Port {
    /// The tag of the packets to this side.
    pub(in crate::rdm) tag: LinkTag,
    /// Where the peer receives.
    pub(in crate::rdm) inbox: Option<Inbox>,
    /// The circuit that the link uses or waits for.
    pub(in crate::rdm) circuit: Option<CircuitKey>,
    /// The target through which the peer sends.
    pub(in crate::rdm) from: Option<QpNumber>,
    /// Packets can be posted: HELLO, at the dialler; at the acceptor ATTACH was posted.
    pub(in crate::rdm) attached: bool,
    /// A packet was posted or has arrived.
    pub(in crate::rdm) used: bool,
    /// Number of posted packets, probes and READs of messages that have not completed, and of the
    /// READs among them.
    pub(in crate::rdm) under_way: u32,
    pub(in crate::rdm) reads: u32,
    /// A probe has not completed.
    pub(in crate::rdm) probing: bool,
    /// The listening address of the peer, and its endpoint if that is known. At the side that
    /// accepts, the IP address is that from which the connection manager has got the request.
    pub(in crate::rdm) address: Listener,
    /// The core has its peer at another address, which another request has stated, so nothing but
    /// the end of the link makes this side forget the node at [`Self::address`], and no request
    /// states *failed circuit* to it.
    pub(in crate::rdm) forgets: bool,
    pub(in crate::rdm) peer: Option<EndpointId>,
    /// The peer's node, at the side that accepts.
    pub(in crate::rdm) node: Option<NodeId>,
    /// The request, at the side that dials, the number of its answers NODE, and its exchange with
    /// the limit of its time.
    pub(in crate::rdm) request: Option<Request>,
    pub(in crate::rdm) elsewhere: u8,
    pub(in crate::rdm) exchange: Option<(Arc<LinkSidr>, Instant)>,
    /// The request and the reply to it, at the side that accepts: a repeated request gets the same
    /// reply.
    pub(in crate::rdm) reply: Option<Box<(LinkRequest, Vec<u8>)>>,
    /// When the side that accepts gives up to dial its circuit, and how long it waits before the
    /// next attempt.
    pub(in crate::rdm) retries: Option<(Instant, Duration)>,
}

impl Port {
    pub(in crate::rdm) fn new(tag: LinkTag, address: Listener) -> Self {
        Self {
            tag,
            inbox: None,
            circuit: None,
            from: None,
            attached: false,
            used: false,
            under_way: 0,
            reads: 0,
            probing: false,
            address,
            forgets: false,
            peer: None,
            node: None,
            request: None,
            elsewhere: 0,
            exchange: None,
            reply: None,
            retries: None,
        }
    }
}
