//! The connection manager: librdmacm's functions between the processes of one user on one host.
//!
//! `docs/softverbs-cm.md` has the bytes that two sides exchange, and the states of an id.
//!
//! Invariants:
//! - There is no internal thread: calls of the application do all work, and `rdma_get_cm_event`
//!   processes the messages of peers. A channel's descriptor is readable whenever that call has
//!   work to do.
//! - Only these calls block: `rdma_get_cm_event` on a blocking channel, the calls that librdmacm
//!   documents as waiting for acknowledgements, and calls on ids without a channel.
//! - A peer is a process of the same user, verified with `SO_PEERCRED`, and not trusted further:
//!   its messages can end the conversation, and have no effect outside of it.
//! - Ids are C objects of the application. All other state is behind locks, so that threads may
//!   use different ids and channels concurrently.

use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::CmFns;

mod address;
mod bind;
mod channel;
mod connect;
mod conversation;
mod deliver;
mod device;
mod diag;
mod dial;
mod event;
mod get_event;
mod guard;
mod id;
mod lifetime;
mod local;
mod progress;
mod qp;
mod redial;
mod service;
mod sock;
mod state;
mod synchronous;
mod wire;

static HIDES_ENDS_OF_REQUESTS: AtomicBool = AtomicBool::new(false);

/// From now on, the id of a connection request has no event before the application has accepted it,
/// and no channel is readable for one: as the kernel's file `rdma_cm`, which drops these events
/// (`ucma_event_handler` of `drivers/infiniband/core/ucma.c`). `rdma_accept` and `rdma_reject` are
/// `EINVAL` if the peer has given up.
pub fn hide_ends_of_requests() {
    HIDES_ENDS_OF_REQUESTS.store(true, Ordering::Relaxed);
}

fn ends_of_requests_are_hidden() -> bool {
    HIDES_ENDS_OF_REQUESTS.load(Ordering::Relaxed)
}

/// A message that decodes must encode to the same bytes.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_packet(packet: &[u8]) {
    if let Ok(message) = wire::decode(packet) {
        assert_eq!(message.encode(), packet);
    }
}

/// This device's implementation of the functions of librdmacm.
pub(crate) fn table() -> CmFns {
    CmFns {
        rdma_create_event_channel: channel::rdma_create_event_channel,
        rdma_destroy_event_channel: channel::rdma_destroy_event_channel,
        rdma_create_id: lifetime::rdma_create_id,
        rdma_destroy_id: lifetime::rdma_destroy_id,
        rdma_bind_addr: bind::rdma_bind_addr,
        rdma_resolve_addr: bind::rdma_resolve_addr,
        rdma_resolve_route: bind::rdma_resolve_route,
        rdma_create_qp: qp::rdma_create_qp,
        rdma_destroy_qp: qp::rdma_destroy_qp,
        rdma_connect: connect::rdma_connect,
        rdma_listen: bind::rdma_listen,
        rdma_accept: connect::rdma_accept,
        rdma_reject: connect::rdma_reject,
        rdma_notify: connect::rdma_notify,
        rdma_disconnect: connect::rdma_disconnect,
        rdma_get_cm_event: get_event::rdma_get_cm_event,
        rdma_ack_cm_event: deliver::rdma_ack_cm_event,
        rdma_get_src_port: bind::rdma_get_src_port,
        rdma_get_dst_port: bind::rdma_get_dst_port,
        rdma_get_devices: bind::rdma_get_devices,
        rdma_free_devices: bind::rdma_free_devices,
        rdma_event_str: event::rdma_event_str,
        rdma_set_option: bind::rdma_set_option,
        rdma_migrate_id: lifetime::rdma_migrate_id,
        rdma_create_qp_ex: Some(qp::rdma_create_qp_ex),
        rdma_establish: Some(connect::rdma_establish),
        rdma_init_qp_attr: Some(qp::rdma_init_qp_attr),
    }
}
