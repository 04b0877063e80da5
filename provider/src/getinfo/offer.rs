//! The capabilities of a device in the terms of `fi_getinfo`: every limit comes from the device.

use std::sync::Arc;

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::msg::Limits;
use weft::rdm;
use weft::verbs::{Device, DeviceAttr, LinkLayer, Port, XrcBehaviour};

use super::addresses::{self, OwnAddresses};
use super::ep_type::{self, EpType};
use crate::ffi::log::refused;
use crate::ffi::nic::Nic;
use crate::ffi::param;
use crate::opened;

/// Bytes of a key: an rkey has 4, a handle or an application's key 8.
pub(crate) const MR_KEY_SIZE: usize = 8;
/// Buffers of a region.
pub(crate) const MR_IOV_LIMIT: usize = weft::wire::records::MAX_SEGMENTS;
/// Counters of a domain: no device sets a limit, memory does.
pub(crate) const CNTR_CNT: usize = 65_536;
/// A device and its limits, for one endpoint type.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) ep: &'static EpType,
    pub(crate) device: Arc<Device>,
    /// Whether the device reaches only addresses of this host.
    pub(crate) host_only: bool,
    /// The port with the GID table, and whether its GIDs are IP addresses.
    port: u8,
    has_ip_gids: bool,
    pub(crate) fabric_name: String,
    pub(crate) protocol: u32,
    /// The endpoint type's primary capabilities that the device has.
    pub(crate) primary_caps: u64,
    /// Whether peers can count their operations: the device's atomics are atomic among all of its
    /// queue pairs.
    pub(crate) events: bool,
    pub(crate) max_msg_size: usize,
    /// Length up to which RMA operations are ordered (`max_order_raw_size`, `max_order_waw_size`).
    pub(crate) max_order_size: usize,
    /// Length up to which an atomic that writes is ordered after one that reads
    /// (`max_order_war_size`).
    pub(crate) max_order_war_size: usize,
    /// Greatest and default depth of the transmit queue.
    pub(crate) tx_size: (usize, usize),
    /// Greatest and default inject size.
    pub(crate) inject: (usize, usize),
    pub(crate) tx_iov_limit: usize,
    pub(crate) rx: RxLimits,
    /// The limits of shared receive contexts; `None` if there are none.
    pub(crate) shared_rx: Option<RxLimits>,
    pub(crate) cq_cnt: usize,
    pub(crate) ep_cnt: usize,
    pub(crate) mr_cnt: usize,
    pub(crate) nic: Nic,
}

/// The limits of an endpoint's receives, or of a shared receive context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RxLimits {
    /// Greatest and default depth.
    pub(crate) size: (usize, usize),
    pub(crate) iov_limit: usize,
}

impl RxLimits {
    /// Those of shared receive contexts; `None` if the device has no shared receive queues.
    pub(crate) fn shared(device: &Device) -> Option<Self> {
        let limits = Limits::of(device);
        (limits.shared_rx_size != 0).then(|| Self {
            size: depth(limits.shared_rx_size, param::values().rx_size),
            iov_limit: limits.shared_rx_iov_limit,
        })
    }
}

impl RxLimits {
    /// Those of endpoints with many peers and of their shared receive contexts.
    ///
    /// # Errors
    /// `ENOSYS`: the device has no such endpoints.
    pub(crate) fn many_peers(device: &Device) -> Result<Self> {
        let limits = rdm::Limits::of(device).ok_or(FiErrno::ENOSYS)?;
        Ok(Self::of_many_peers(&limits))
    }

    fn of_many_peers(limits: &rdm::Limits) -> Self {
        let wanted = param::values().rx_size.or(Some(RDM_RX_DEPTH));
        Self {
            size: depth(limits.rx_size, wanted),
            iov_limit: limits.iov_limit,
        }
    }
}

/// Greatest and default depth of a queue.
fn depth(greatest: usize, wanted: Option<usize>) -> (usize, usize) {
    (greatest, wanted.unwrap_or(DEFAULT_DEPTH).clamp(1, greatest))
}

/// Depth of a queue and inject size unless hints or parameters set others.
const DEFAULT_DEPTH: usize = 384;
const DEFAULT_INJECT: usize = 64;
/// The depths of endpoints with many peers. MPI implementations repeat a receive that returns
/// `-FI_EAGAIN` before they post their sends, so two processes that both reach the limit wait for
/// each other. A copied message (`fi_inject(3)`) takes 8 KiB until its peer accepts it, so a sender
/// to a process that takes nothing uses 8 MiB.
const RDM_TX_DEPTH: usize = 1 << 10;
const RDM_RX_DEPTH: usize = 1 << 16;
/// Bytes of `ibv_wc.vendor_err`, and the most private data that a rejection carries.
pub(crate) const MAX_ERR_DATA: usize = weft::wire::cm_data::MAX_CM_DATA;

/// The reason for which a device is not offered at all; `None`: it is.
pub(crate) fn unsupported(attr: &DeviceAttr) -> Option<&'static str> {
    // It has no immediate data, and the local buffers of a READ need remote write access.
    attr.iwarp
        .then_some("iWARP is not supported; select RoCEv2 if the device has it")
}

impl Offer {
    /// Queries the current limits of a device.
    ///
    /// # Errors
    /// The device's errno, if the device is gone. `ENOSYS`: the device has no endpoints of this
    /// type, or no endpoints ([`unsupported`]).
    pub(crate) fn of(device: &Arc<Device>, ep: &'static EpType) -> Result<Self> {
        Self::of_attr(device, device.attr(), ep)
    }

    /// [`Self::of`] a device with these attributes.
    fn of_attr(device: &Arc<Device>, attr: &DeviceAttr, ep: &'static EpType) -> Result<Self> {
        if let Some(reason) = unsupported(attr) {
            let name = device.name();
            return Err(refused!(FI_LOG_FABRIC, ENOSYS, "{name}: {reason}"));
        }
        if ep.xrc && !attr.xrc {
            return Err(FiErrno::ENOSYS);
        }
        if ep.number == FI_EP_RDM {
            let limits = rdm::Limits::of(device).ok_or(FiErrno::ENOSYS)?;
            return Ok(Self::connected(device)?.with_many_peers(ep, &limits));
        }
        let mut offer = Self::connected(device)?;
        if ep.xrc {
            offer.ep = ep;
            offer.protocol = FI_PROTO_RDMA_CM_IB_XRC;
            offer.ep_cnt = device.attr().max_srq;
        }
        Ok(offer)
    }

    /// Of connected endpoints.
    fn connected(device: &Arc<Device>) -> Result<Self> {
        let ep = &ep_type::MSG;
        let attr = device.attr();
        let ports = ports(device);
        let port = match naming_port(&ports) {
            Some(port) => port.clone(),
            None => device.port(1)?,
        };
        let host_only = std::ptr::eq(device.backend(), softverbs::backend());
        let params = param::values();
        let limits = Limits::of(device);
        let max_inline = device.max_inline();
        Ok(Self {
            port: port.number,
            has_ip_gids: addresses::has_ip_gids(port.link_layer, host_only),
            fabric_name: fabric_name(&port, host_only),
            protocol: FI_PROTO_RDMA_CM_IB_RC,
            primary_caps: match attr.atomic_cap {
                0 => ep.primary_caps & !FI_ATOMIC,
                _ => ep.primary_caps,
            },
            events: attr.atomic_cap != 0,
            max_msg_size: port.max_msg_size,
            max_order_size: port.max_msg_size,
            max_order_war_size: 0,
            tx_size: depth(limits.tx_size, params.tx_size),
            inject: (
                max_inline,
                params.inline_size.unwrap_or(DEFAULT_INJECT).min(max_inline),
            ),
            tx_iov_limit: limits.tx_iov_limit,
            rx: RxLimits {
                size: depth(limits.rx_size, params.rx_size),
                iov_limit: limits.rx_iov_limit,
            },
            shared_rx: RxLimits::shared(device),
            cq_cnt: attr.max_cq,
            ep_cnt: attr.max_qp,
            mr_cnt: attr.max_mr,
            nic: nic_of(device, &port, host_only),
            device: Arc::clone(device),
            host_only,
            ep,
        })
    }

    /// The offer of the same device for an endpoint type with many peers.
    fn with_many_peers(mut self, ep: &'static EpType, limits: &rdm::Limits) -> Self {
        let params = param::values();
        self.ep = ep;
        self.protocol = match ep.xrc {
            true => FI_PROTO_RDMA_CM_IB_XRC,
            false => FI_PROTO_IB_RDM,
        };
        self.primary_caps = ep.primary_caps;
        self.max_msg_size = rdm::Limits::max_msg_size(ep.xrc);
        self.max_order_size = self.max_msg_size;
        self.max_order_war_size = rdm::MAX_ATOMIC_SIZE;
        self.tx_size = depth(limits.tx_size, params.tx_size.or(Some(RDM_TX_DEPTH)));
        self.rx = RxLimits::of_many_peers(limits);
        self.inject = (limits.inject_size, limits.inject_size);
        self.tx_iov_limit = limits.iov_limit;
        self.shared_rx = Some(self.rx);
        if ep.xrc {
            self.ep_cnt = self.device.attr().max_srq;
        }
        self
    }
}

impl Offer {
    /// The current addresses at which the device is offered.
    pub(crate) fn addresses(&self) -> OwnAddresses {
        OwnAddresses::of(&self.device, self.port, self.has_ip_gids)
    }

    /// How many endpoints may use one shared receive context; 0 if there are none.
    pub(crate) fn max_sharing(&self) -> usize {
        self.shared_rx.map_or(0, |_| self.ep_cnt)
    }

    /// The limits of an endpoint's receives. `shared`: whether they come from a shared context.
    pub(crate) fn rx_limits(&self, shared: bool) -> RxLimits {
        self.shared_rx.filter(|_| shared).unwrap_or(self.rx)
    }

    /// Whether peers' writes can be made persistent, found by a trial. For a given memory only its
    /// registration shows it.
    pub(crate) fn flushes(&self) -> bool {
        if self.ep.xrc {
            let seen = self.device.xrc_behaviour();
            return seen.is_ok_and(|behaviour| behaviour.flush.works());
        }
        let seen = self.device.behaviour();
        seen.is_ok_and(|behaviour| behaviour.flush_global.works())
    }

    /// Whether XRC works as the device reports it, found by a trial, if the endpoints are on XRC.
    pub(crate) fn transport_works(&self) -> bool {
        !self.ep.xrc || {
            let seen = self.device.xrc_behaviour();
            seen.is_ok_and(XrcBehaviour::is_usable)
        }
    }

    /// Whether memory without pages can be registered, found by a trial.
    pub(crate) fn on_demand(&self) -> bool {
        let seen = self.device.behaviour();
        seen.is_ok_and(|behaviour| behaviour.odp.works())
    }
}

/// The ports that can be queried.
fn ports(device: &Device) -> Vec<Port> {
    let numbers = 1..=device.attr().phys_port_cnt.max(1);
    numbers
        .filter_map(|number| device.port(number).ok())
        .collect()
}

/// Whether any active port of a device is in the fabric of this name; without an active one its
/// first port, by which `fi_getinfo` names the fabric then. A port of InfiniBand that is down has
/// the default prefix.
pub(crate) fn has_port_in(device: &Device, name: &str) -> bool {
    let host_only = std::ptr::eq(device.backend(), softverbs::backend());
    is_name_of_any(&ports(device), host_only, name)
}

/// Whether `fi_getinfo` names the fabric of the device so.
pub(crate) fn is_named(device: &Device, fabric: &str) -> bool {
    let host_only = std::ptr::eq(device.backend(), softverbs::backend());
    let ports = ports(device);
    naming_port(&ports).is_some_and(|port| fabric_name(port, host_only) == fabric)
}

/// The port by which `fi_getinfo` names the fabric of a device, and whose addresses and attributes
/// it reports: the first active one.
fn naming_port(ports: &[Port]) -> Option<&Port> {
    ports.iter().find(|port| port.active).or(ports.first())
}

/// Whether domains of a device can be opened in an open fabric: `fi_getinfo` has named the device's
/// fabric so when the fabric was opened, or the device has a port there now. The name of an
/// InfiniBand fabric contains the prefix that the subnet manager assigns, which may change; and
/// `fi_getinfo` names a device's fabric by one of its ports, which may go down.
pub(crate) fn is_in_fabric(device: &Device, fabric: &opened::Fabric) -> bool {
    fabric.devices.iter().any(|name| name == device.name()) || has_port_in(device, &fabric.name)
}

fn is_name_of_any(ports: &[Port], host_only: bool, name: &str) -> bool {
    let is_named = |port: &Port| fabric_name(port, host_only) == name;
    match ports.iter().any(|port| port.active) {
        true => ports.iter().any(|port| port.active && is_named(port)),
        false => ports.first().is_some_and(is_named),
    }
}

/// A fabric is a set of ports that reach each other: an InfiniBand subnet, the Ethernet, or this
/// host.
fn fabric_name(port: &Port, host_only: bool) -> String {
    if host_only {
        return "softverbs".to_owned();
    }
    match (port.link_layer, port.gid) {
        (LinkLayer::InfiniBand, Some(gid)) => {
            let prefix = gid[..8]
                .iter()
                .fold(0_u64, |sum, byte| (sum << 8) | u64::from(*byte));
            format!("IB-0x{prefix:016x}")
        }
        (LinkLayer::InfiniBand, None) => "IB".to_owned(),
        _ => "Ethernet".to_owned(),
    }
}

fn nic_of(device: &Arc<Device>, port: &Port, host_only: bool) -> Nic {
    let attr = device.attr();
    let hex = |value: u32| Some(format!("0x{value:04x}"));
    Nic {
        name: Some(device.name().to_owned()),
        device_id: hex(attr.vendor_part_id),
        device_version: Some(attr.hw_ver.to_string()),
        vendor_id: hex(attr.vendor_id),
        driver: device
            .driver()
            .or_else(|| host_only.then(|| device.backend().name.to_owned())),
        firmware: (!attr.fw_ver.is_empty()).then(|| attr.fw_ver.clone()),
        pci: device
            .pci_address()
            .map(|pci| (pci.domain, pci.bus, pci.device, pci.function)),
        address: match (port.link_layer, port.gid) {
            (LinkLayer::InfiniBand, _) if port.lid != 0 => Some(format!("0x{:04x}", port.lid)),
            (_, Some(gid)) => Some(std::net::Ipv6Addr::from(gid).to_string()),
            _ => None,
        },
        mtu: port.active_mtu,
        speed: usize::try_from(port.speed).unwrap_or(usize::MAX),
        up: Some(port.active),
        network_type: match port.link_layer {
            LinkLayer::InfiniBand => Some("InfiniBand".to_owned()),
            LinkLayer::Ethernet => Some("Ethernet".to_owned()),
            LinkLayer::Unspecified => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iwarp_is_not_offered() {
        let device = weft::verbs::devices(&[softverbs::backend()], false).remove(0);
        let mut attr = device.attr().clone();
        for ep in ep_type::offered(FI_PROTO_UNSPEC) {
            attr.iwarp = true;
            let offer = Offer::of_attr(&device, &attr, ep);
            assert_eq!(offer.err(), Some(FiErrno::ENOSYS));
        }
        attr.iwarp = false;
        assert!(Offer::of_attr(&device, &attr, &ep_type::MSG).is_ok());
    }

    /// The first active port names the fabric in `fi_getinfo`, and each active port is in its own
    /// fabric.
    #[test]
    fn each_active_port_of_a_device_is_in_a_fabric() {
        let port = |number, active, prefix: u8| {
            let mut gid = [0; 16];
            (gid[0], gid[7]) = (0xfe, prefix);
            Port {
                number,
                active,
                active_mtu: 4096,
                max_msg_size: 1 << 30,
                speed: 0,
                link_layer: LinkLayer::InfiniBand,
                lid: 0,
                gid: Some(gid),
            }
        };
        let ports = [port(1, false, 1), port(2, true, 2), port(3, true, 3)];
        for (prefix, is_in) in [(1, false), (2, true), (3, true), (4, false)] {
            let name = format!("IB-0xfe0000000000000{prefix}");
            assert_eq!(is_name_of_any(&ports, false, &name), is_in, "{name}");
        }
        assert_eq!(naming_port(&ports).map(|port| port.number), Some(2));
        assert!(!is_name_of_any(&ports, false, "Ethernet"));
        let down = [port(1, false, 1), port(2, false, 2)];
        assert_eq!(naming_port(&down).map(|port| port.number), Some(1));
        assert!(is_name_of_any(&down, false, "IB-0xfe00000000000001"));
        assert!(!is_name_of_any(&down, false, "IB-0xfe00000000000002"));
    }
}
