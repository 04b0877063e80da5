//! Attributes of devices and ports.

/// Attributes of a device that do not change during its life (`ibv_query_device(3)`).
#[derive(Clone, Debug)]
pub struct DeviceAttr {
    /// Firmware version; empty if the device reports none.
    pub fw_ver: String,
    /// GUID of the node as a 64-bit number.
    pub node_guid: u64,
    /// PCI vendor id.
    pub vendor_id: u32,
    /// PCI device id.
    pub vendor_part_id: u32,
    /// Hardware revision.
    pub hw_ver: u32,
    /// Maximum length of a memory region in bytes.
    pub max_mr_size: u64,
    /// Maximum number of queue pairs.
    pub max_qp: usize,
    /// Maximum number of work requests of a queue.
    pub max_qp_wr: usize,
    /// Maximum number of scatter/gather elements of a send or receive.
    pub max_sge: usize,
    /// Maximum number of scatter/gather elements of an RDMA read.
    pub max_sge_rd: usize,
    /// Maximum number of completion queues.
    pub max_cq: usize,
    /// Maximum number of completions of a completion queue.
    pub max_cqe: usize,
    /// Maximum number of memory regions.
    pub max_mr: usize,
    /// Maximum number of protection domains.
    pub max_pd: usize,
    /// Maximum number of RDMA reads and atomics that a queue pair executes at a time as the target.
    pub max_qp_rd_atom: usize,
    /// Maximum number of outstanding RDMA reads and atomics of a queue pair as the initiator.
    pub max_qp_init_rd_atom: usize,
    /// Maximum number of shared receive queues.
    pub max_srq: usize,
    /// Maximum number of receives of a shared receive queue.
    pub max_srq_wr: usize,
    /// Maximum number of scatter/gather elements of a receive of a shared receive queue.
    pub max_srq_sge: usize,
    /// Number of ports, which are numbered from 1.
    pub phys_port_cnt: u8,
    /// `IBV_TRANSPORT_IWARP`, which connections do not support: it has no immediate data and no RNR
    /// timers, and the local buffers of a READ need remote write access.
    pub iwarp: bool,
    /// `ibv_atomic_cap`: 0: no atomics; 1: atomic with respect to the device's other operations; 2:
    /// also with respect to the CPU.
    pub atomic_cap: u32,
    /// `IBV_DEVICE_XRC`: the device reports extended reliable connections. Their trial is
    /// [`Device::xrc_behaviour`](super::Device::xrc_behaviour).
    pub xrc: bool,
}

/// The link layer below the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// The device does not report one.
    Unspecified,
    /// InfiniBand.
    InfiniBand,
    /// Ethernet.
    Ethernet,
}

/// State of a port at the time of the query (`ibv_query_port(3)`).
#[derive(Clone, Debug)]
pub struct Port {
    /// The port's number, at least 1.
    pub number: u8,
    /// Whether the port is active (`IBV_PORT_ACTIVE`).
    pub active: bool,
    /// The MTU in use, in bytes.
    pub active_mtu: usize,
    /// Maximum length of a message in bytes.
    pub max_msg_size: usize,
    /// Speed in bits per second; 0 if unknown.
    pub speed: u64,
    /// The link layer.
    pub link_layer: LinkLayer,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The first GID of the port, if it has one.
    pub gid: Option<[u8; 16]>,
}

/// PCI address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    /// Domain.
    pub domain: u16,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}
