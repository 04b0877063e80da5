//! The addresses of a device that are offered: all, unless the parameters `interface` and
//! `gid_index` select a part of them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use weft::verbs::{Device, DeviceAddress, LinkLayer};

use crate::ffi::param;

/// The addresses of a device that are offered.
#[derive(Clone, Debug)]
pub(crate) struct OwnAddresses {
    list: Vec<DeviceAddress>,
    /// Whether the parameters exclude addresses of the device.
    some: bool,
}

impl OwnAddresses {
    /// The addresses that the parameters select. `port` has the GID table.
    pub(crate) fn of(device: &Arc<Device>, port: u8, has_ip_gids: bool) -> Self {
        let params = param::values();
        let gid = params
            .gid_index
            .filter(|_| has_ip_gids)
            .map(|index| device.gid(port, index).and_then(address_of_gid));
        let mut list = device.addresses();
        let all = list.len();
        list.retain(|own| {
            params
                .interfaces
                .as_ref()
                .is_none_or(|names| names.contains(&own.interface))
                && gid.is_none_or(|gid| gid == Some(own.addr.ip()))
        });
        let some = list.len() != all;
        Self { list, some }
    }

    #[cfg(test)]
    pub(crate) fn of_list(list: &[SocketAddr], some: bool) -> Self {
        let list = list.iter().map(|&addr| DeviceAddress {
            addr,
            prefix_len: 24,
            interface: "v0".to_owned(),
            loopback: false,
        });
        Self {
            list: list.collect(),
            some,
        }
    }

    /// Whether `ip` is one of the addresses. With an IPv4 address of the loopback interface the
    /// host has all of 127.0.0.0/8: Debian's installer gives the host's name 127.0.1.1.
    pub(crate) fn has(&self, ip: IpAddr) -> bool {
        let loopback = |ip: IpAddr| ip.is_ipv4() && ip.is_loopback();
        self.list.iter().any(|own| {
            own.addr.ip() == ip || own.loopback && loopback(own.addr.ip()) && loopback(ip)
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SocketAddr> {
        self.list.iter().map(|own| own.addr)
    }

    /// Whether the device has further addresses, on which a wildcard address would listen too.
    pub(crate) fn are_some(&self) -> bool {
        self.some
    }
}

/// Whether the GIDs of such a port are IP addresses: on RoCE they are (InfiniBand annex A17.4.1.2).
pub(crate) fn has_ip_gids(layer: LinkLayer, host_only: bool) -> bool {
    layer == LinkLayer::Ethernet && !host_only
}

/// The IP address that a GID stands for.
fn address_of_gid(gid: [u8; 16]) -> Option<IpAddr> {
    let ip = IpAddr::from(gid).to_canonical();
    (!ip.is_unspecified()).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_has_all_of_its_network() {
        let own = |addr: &str, loopback| DeviceAddress {
            addr: addr.parse().unwrap(),
            prefix_len: 8,
            interface: "lo".to_owned(),
            loopback,
        };
        let has = |list: &[DeviceAddress], ip: &str| {
            let (list, some) = (list.to_vec(), false);
            OwnAddresses { list, some }.has(ip.parse().unwrap())
        };
        let lo = [own("127.0.0.1:0", true), own("[::1]:0", true)];
        assert!(has(&lo, "127.0.0.1") && has(&lo, "127.0.1.1") && has(&lo, "::1"));
        assert!(!has(&lo, "128.0.0.1") && !has(&lo, "::2") && !has(&lo, "::ffff:127.0.0.1"));
        assert!(!has(&lo[1..], "127.0.1.1"));
        assert!(!has(&[own("10.0.0.1:0", false)], "10.0.0.2"));
    }

    #[test]
    fn a_gid_is_an_ipv6_address_or_an_ipv4_address_in_one() {
        let gid = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        let ip = |text: &str| Some(text.parse().unwrap());
        assert_eq!(address_of_gid(gid("::ffff:10.77.0.1")), ip("10.77.0.1"));
        assert_eq!(address_of_gid(gid("fd77::1")), ip("fd77::1"));
        assert_eq!(address_of_gid(gid("::")), None);
    }
}
