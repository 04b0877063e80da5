//! Which addresses are of this host, and the source address towards one.
//!
//! Invariant: the kernel is asked by UDP sockets that send no packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};

use super::address::{canonical, from_c, is_any, with_port};
use crate::sys::{self, Errno, Res};

fn is_group(ip: IpAddr) -> bool {
    ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST)
}

/// Checks that an address is one of this host, without sending a packet.
///
/// # Errors
/// `EADDRNOTAVAIL`: it is not. Those of `bind(2)`.
pub(super) fn check_local(address: &SocketAddr) -> Res<()> {
    if is_any(address) {
        return Ok(());
    }
    if is_group(canonical(address.ip())) {
        return Err(Errno(libc::EADDRNOTAVAIL));
    }
    let socket = UdpSocket::bind(with_port(address, 0))?;
    // A subnet's broadcast address can be bound, but connecting to it fails.
    if socket.connect(with_port(address, 9)).is_ok() && is_own(address)? {
        Ok(())
    } else {
        Err(Errno(libc::EADDRNOTAVAIL))
    }
}

/// Whether an address is one of this host. bind(2) accepts others too where the administrator has
/// set `net.ipv4.ip_nonlocal_bind` or `net.ipv6.ip_nonlocal_bind`.
///
/// # Errors
/// As [`is_of_interface`].
fn is_own(address: &SocketAddr) -> Res<bool> {
    let ip = canonical(address.ip());
    // Towards an address of a local route (`ip route add local`) the kernel sends from the address
    // itself; towards a second address of an interface from the first one. This needs a socket that
    // is not bound: one that is bound to the address has it as its source in any case.
    let from_itself = || source_towards(address).is_ok_and(|source| canonical(source.ip()) == ip);
    Ok(ip.is_loopback() || from_itself() || is_of_interface(ip)?)
}

/// Whether an interface of this host has the address.
///
/// # Errors
/// `EMFILE` and others of getifaddrs(3).
fn is_of_interface(ip: IpAddr) -> Res<bool> {
    let mut list = std::ptr::null_mut();
    // SAFETY: room for a pointer.
    sys::check(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut next: *const libc::ifaddrs = list;
    let mut found = false;
    // SAFETY: NULL, or an element of the list.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: NULL, or an address of its family.
        let address = unsafe { from_c(entry.ifa_addr) };
        found |= address.is_ok_and(|address| canonical(address.ip()) == ip);
        next = entry.ifa_next;
    }
    // SAFETY: returned by getifaddrs(3), freed once.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// The source address of this host towards `destination`, with port 0.
pub(super) fn source_towards(destination: &SocketAddr) -> Res<SocketAddr> {
    let any: SocketAddr = match destination {
        SocketAddr::V4(_) => SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(with_port(destination, 9))?;
    Ok(with_port(&socket.local_addr()?, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_this_hosts_addresses_are_local() {
        for local in ["127.0.0.1:1", "127.9.9.9:1", "0.0.0.0:1", "[::]:1"] {
            assert_eq!(check_local(&address(local)), Ok(()), "{local}");
        }
        for foreign in [
            "192.0.2.1:1",
            "224.0.0.1:1",
            "255.255.255.255:1",
            "[ff02::1]:1",
        ] {
            let errno = check_local(&address(foreign)).unwrap_err();
            assert_eq!(errno, Errno(libc::EADDRNOTAVAIL), "{foreign}");
        }
    }

    /// Independent of what bind(2) accepts.
    #[test]
    fn an_address_of_another_host_is_not_ones_own() {
        let own = |text: &str| is_own(&address(text));
        for local in [
            "127.0.0.1:1",
            "127.9.9.9:1",
            "[::1]:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert_eq!(own(local), Ok(true), "{local}");
        }
        for foreign in ["192.0.2.1:1", "[2001:db8::7]:1", "[::ffff:192.0.2.1]:1"] {
            assert_eq!(own(foreign), Ok(false), "{foreign}");
        }
        assert_eq!(is_of_interface(Ipv4Addr::LOCALHOST.into()), Ok(true));
        assert_eq!(
            is_of_interface(Ipv4Addr::new(192, 0, 2, 1).into()),
            Ok(false)
        );
        // the address of an interface towards other hosts, if it has one
        if let Ok(source) = source_towards(&address("192.0.2.1:1")) {
            assert_eq!(is_own(&source), Ok(true), "{source}");
            assert_eq!(is_of_interface(source.ip()), Ok(true), "{source}");
        }
    }
}
