//! Attributes of devices and ports.

/// Attributes of a device that do not change during its life (`ibv_query_device(3)`).
#[derive(Clone, Debug)]
pub struct DeviceAttr {
    /// Firmware version, empty where the device has none.
    pub fw_ver: String,
    /// GUID of the node, as the 64-bit number it denotes.
    pub node_guid: u64,
    /// PCI vendor.
    pub vendor_id: u32,
    /// PCI device.
    pub vendor_part_id: u32,
    /// Hardware revision.
    pub hw_ver: u32,
    /// The longest memory region, in bytes.
    pub max_mr_size: u64,
    /// How many queue pairs.
    pub max_qp: usize,
    /// How many work requests a queue holds.
    pub max_qp_wr: usize,
    /// How many scatter/gather elements a send or receive has.
    pub max_sge: usize,
    /// How many scatter/gather elements an RDMA read has.
    pub max_sge_rd: usize,
    /// How many completion queues.
    pub max_cq: usize,
    /// How many completions a completion queue holds.
    pub max_cqe: usize,
    /// How many memory regions.
    pub max_mr: usize,
    /// How many protection domains.
    pub max_pd: usize,
    /// How many RDMA reads and atomics a queue pair answers at a time.
    pub max_qp_rd_atom: usize,
    /// How many RDMA reads and atomics a queue pair has under way at a time.
    pub max_qp_init_rd_atom: usize,
    /// How many shared receive queues.
    pub max_srq: usize,
    /// How many receives a shared receive queue holds.
    pub max_srq_wr: usize,
    /// How many scatter/gather elements a receive of a shared receive queue has.
    pub max_srq_sge: usize,
    /// How many ports; numbered from 1.
    pub phys_port_cnt: u8,
    /// `IBV_TRANSPORT_IWARP`: the connecting side of a connection sends first, and there are no
    /// RNR timers.
    pub iwarp: bool,
    /// Atomic operations: `ibv_atomic_cap`, 0 none, 1 among the device's own, 2 with the CPU.
    pub atomic_cap: u32,
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

/// A port as it was when asked (`ibv_query_port(3)`).
#[derive(Clone, Debug)]
pub struct Port {
    /// Its number; ports count from 1.
    pub number: u8,
    /// Whether it is `IBV_PORT_ACTIVE`.
    pub active: bool,
    /// The MTU in use, in bytes.
    pub active_mtu: usize,
    /// The longest message, in bytes.
    pub max_msg_size: usize,
    /// Speed in bits per second; 0 where it isn't known.
    pub speed: u64,
    /// The link layer.
    pub link_layer: LinkLayer,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The first GID of the port, if it has one.
    pub gid: Option<[u8; 16]>,
}

/// Where a device sits on the PCI bus.
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
