//! Attributes of endpoints.

use std::net::SocketAddr;
use std::time::Duration;

use super::recv::Directed;
use crate::Token;
use crate::auth::AuthKey;
use crate::flags::Flags;
use crate::mr::Access;

/// Default of `FI_OPT_MIN_MULTI_RECV`.
pub(super) const MIN_MULTI_RECV: usize = 64;

/// Attributes of a new endpoint (`fi_endpoint(3)`).
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Identifies the endpoint in events.
    pub token: Token,
    /// The context with which the application has opened the endpoint: that of the errors of
    /// operations without a context of their own.
    pub context: usize,
    /// Maximum number of transmit operations under way.
    pub tx_size: usize,
    /// Maximum number of posted receives.
    pub rx_size: usize,
    /// Maximum length of injected data, in bytes.
    pub inject_size: usize,
    /// Default flags of transmit operations (`tx_attr->op_flags`).
    pub tx_op_flags: Flags,
    /// Default flags of receives (`rx_attr->op_flags`).
    pub rx_op_flags: Flags,
    /// Whether the capabilities include sending.
    pub needs_tx: bool,
    /// Whether the capabilities include receiving.
    pub needs_rx: bool,
    /// Whether the capabilities include initiating RMA.
    pub rma: bool,
    /// Whether the capabilities include RMA of peers on regions of this side.
    pub target: bool,
    /// Whether writes can be made durable (`FI_RMA_PMEM`); requires a device with flush operations.
    pub durable: bool,
    /// Whether the endpoint initiates atomics.
    pub atomics: bool,
    /// Whether peers' RMA writes have remote CQ data at this side, which is discarded otherwise.
    pub accepts_data: bool,
    /// What atomics of peers may do to the regions of this side: the endpoint's rights, beside
    /// those of the region. Empty: it executes none.
    pub peer_atomics: Access,
    /// Whether RMA is processed behind earlier messages (`FI_ORDER_RAS`, `FI_ORDER_WAS`).
    pub rma_after_sends: bool,
    /// Whether messages are processed behind earlier RMA writes (`FI_ORDER_SAW`).
    pub sends_after_rma: bool,
    /// Whether receives are posted to a shared receive context, which is bound before enabling
    /// (`ep_attr->rx_ctx_cnt` of `FI_SHARED_CONTEXT`).
    pub shared_rx: bool,
    /// Which receives compare the source.
    pub directed: Directed,
    /// Whether completions have the source (`FI_SOURCE`).
    pub source: bool,
    /// Whether data progresses without calls of the application (`FI_PROGRESS_AUTO`).
    pub auto: bool,
    /// Whether links are on circuits (`FI_PROTO_RDMA_CM_IB_XRC`), which requires a device with XRC.
    pub xrc: bool,
    /// Authorization key; `None`: the domain's.
    pub auth: Option<AuthKey>,
    /// Traffic class of the packets; `None`: the domain's.
    pub traffic_class: Option<u8>,
    /// Local address, if the application has set one; port 0: any. Without a specific address the
    /// endpoint listens at all addresses of the device, or at those of the wildcard's family.
    pub src: Option<SocketAddr>,
    /// Maximum number of links; `None`: 3/4 of the device's queue pairs or of the process's
    /// descriptors, whichever is less. Idle links are evicted for further ones.
    pub max_links: Option<usize>,
    /// How long an unreachable address is dialled; `None`: 10 s.
    pub connect_timeout: Option<Duration>,
    /// Without `src`: whether the endpoint's name is an IPv4 address; `None`: of either family.
    pub ipv4: Option<bool>,
}
