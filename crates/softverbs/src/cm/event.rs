//! Events as a channel queues them.

use std::sync::Arc;

use libc::{c_char, c_int};
use rdma_core_sys::*;

use super::id::Shared;
use super::wire::{Party, Private, REJ_DATA, REP_DATA, REQ_DATA, SIDR_REQ_DATA, SidrRep};
use crate::sys::Errno;

/// Reject reasons of the InfiniBand specification, which applications find in an event's status.
pub(super) mod reason {
    /// The peer has given up.
    pub(in super::super) const TIMEOUT: u16 = 4;
    /// No process listens.
    pub(in super::super) const INVALID_SERVICE_ID: u16 = 8;
    /// The application has rejected, or has ended.
    pub(in super::super) const CONSUMER_DEFINED: u16 = 28;
}

/// An event in a channel's queue.
pub(super) struct Raw {
    /// The id that counts the event: the listener for a connection request.
    pub(super) subject: Arc<Shared>,
    pub(super) kind: Kind,
}

impl Raw {
    /// Whether the application has the id.
    pub(super) fn is_due(&self) -> bool {
        self.subject.is_given()
    }
}

/// The kind of an event. A status is a negative errno.
#[allow(
    clippy::large_enum_variant,
    reason = "few exist, and none is on a fast path"
)]
pub(super) enum Kind {
    AddrResolved,
    AddrError(Errno),
    RouteResolved,
    Request {
        child: Arc<Shared>,
        party: Party,
        retry_count: u8,
        data: Private<REQ_DATA>,
    },
    Response {
        party: Party,
        data: Private<REP_DATA>,
    },
    /// A process asks for the queue pair of a datagram service.
    ServiceRequest {
        child: Arc<Shared>,
        data: Private<SIDR_REQ_DATA>,
    },
    /// A datagram service's answer.
    Service(SidrRep),
    Established,
    Rejected {
        reason: u16,
        data: Private<REJ_DATA>,
    },
    Unreachable(Errno),
    ConnectError(Errno),
    /// 0, or the reason as a negative errno.
    Disconnected(c_int),
    TimewaitExit,
}

pub(super) extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    let name = match event {
        RDMA_CM_EVENT_ADDR_RESOLVED => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        RDMA_CM_EVENT_ADDR_ERROR => c"RDMA_CM_EVENT_ADDR_ERROR",
        RDMA_CM_EVENT_ROUTE_RESOLVED => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        RDMA_CM_EVENT_ROUTE_ERROR => c"RDMA_CM_EVENT_ROUTE_ERROR",
        RDMA_CM_EVENT_CONNECT_REQUEST => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        RDMA_CM_EVENT_CONNECT_RESPONSE => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        RDMA_CM_EVENT_CONNECT_ERROR => c"RDMA_CM_EVENT_CONNECT_ERROR",
        RDMA_CM_EVENT_UNREACHABLE => c"RDMA_CM_EVENT_UNREACHABLE",
        RDMA_CM_EVENT_REJECTED => c"RDMA_CM_EVENT_REJECTED",
        RDMA_CM_EVENT_ESTABLISHED => c"RDMA_CM_EVENT_ESTABLISHED",
        RDMA_CM_EVENT_DISCONNECTED => c"RDMA_CM_EVENT_DISCONNECTED",
        RDMA_CM_EVENT_DEVICE_REMOVAL => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        RDMA_CM_EVENT_MULTICAST_JOIN => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        RDMA_CM_EVENT_MULTICAST_ERROR => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        RDMA_CM_EVENT_ADDR_CHANGE => c"RDMA_CM_EVENT_ADDR_CHANGE",
        RDMA_CM_EVENT_TIMEWAIT_EXIT => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        RDMA_CM_EVENT_ADDRINFO_RESOLVED => c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        RDMA_CM_EVENT_ADDRINFO_ERROR => c"RDMA_CM_EVENT_ADDRINFO_ERROR",
        _ => c"UNKNOWN EVENT",
    };
    name.as_ptr()
}
