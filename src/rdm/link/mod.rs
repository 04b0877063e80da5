//! Links: the queue pair of each, and what is posted to it. The protocol's part is `core/link.rs`.

pub(super) mod block;
pub(super) mod cm;
pub(super) mod ending;
pub(super) mod endpoint;
pub(super) mod initiator_sq;
pub(super) mod links;
pub(super) mod outlet;
pub(super) mod parked_ids;
pub(super) mod port;
pub(super) mod poster;
pub(super) mod ring;
pub(super) mod send_queue;
pub(super) mod sidr;
pub(super) mod wr_id;
