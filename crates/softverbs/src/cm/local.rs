//! Which addresses are of this host, and the source address towards one.
//!
//! Invariant: the kernel is asked by UDP sockets that send no packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};

use super::address::{canonical, from_c, is_any, with_port};
use crate::sys::{self, Errno, Res};

/// No UDP port is free.
const NO_UDP_PORT: Errno = Errno(libc::EAGAIN);

fn is_group(ip: IpAddr) -> bool {
    ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST)
}

/// A UDP socket at `address`, with a port of the kernel's choice.
///
/// # Errors
/// `EAGAIN`: other sockets, possibly of another user, have all UDP ports of the range. Those of
/// `bind(2)`.
fn udp_socket(address: &SocketAddr) -> Res<UdpSocket> {
    match UdpSocket::bind(with_port(address, 0)).map_err(Errno::from) {
        // EADDRINUSE would be taken for an error about the port of `address`.
        Err(Errno(libc::EADDRINUSE)) => Err(NO_UDP_PORT),
        socket => socket,
    }
}

/// The error of a destination for one of [`check_local`] or [`source_of`]. A shortage says nothing
/// about the address.
pub(super) fn as_of_destination(errno: Errno) -> Errno {
    match errno {
        Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) | NO_UDP_PORT => errno,
        _ => Errno(libc::ENETUNREACH),
    }
}

/// Checks that an address is one of this host, without sending a packet.
///
/// # Errors
/// `EADDRNOTAVAIL`: it is not. `EAGAIN`: no UDP port is free, and the address is neither a loopback
/// address nor that of an interface. Those of `bind(2)`.
pub(super) fn check_local(address: &SocketAddr) -> Res<()> {
    if is_any(address) {
        return Ok(());
    }
    let ip = canonical(address.ip());
    if is_group(ip) {
        return Err(Errno(libc::EADDRNOTAVAIL));
    }
    let is_local = match udp_socket(address) {
        // A subnet's broadcast address can be bound, but connecting to it fails.
        Ok(socket) => socket.connect(with_port(address, 9)).is_ok() && is_own(address)?,
        // the kernel has accepted the address before it has looked for a port
        Err(NO_UDP_PORT) if is_loopback(ip) || is_of_interface(ip)? => true,
        Err(errno) => return Err(errno),
    };
    if is_local {
        Ok(())
    } else {
        Err(Errno(libc::EADDRNOTAVAIL))
    }
}

/// Whether each host has the address: not the broadcast address of 127.0.0.0/8.
fn is_loopback(ip: IpAddr) -> bool {
    ip.is_loopback() && ip != Ipv4Addr::new(127, 255, 255, 255)
}

/// Whether an address is one of this host. bind(2) accepts others too where the administrator has
/// set `net.ipv4.ip_nonlocal_bind` or `net.ipv6.ip_nonlocal_bind`.
///
/// # Errors
/// `EAGAIN`: as [`check_local`]. Those of [`is_of_interface`].
fn is_own(address: &SocketAddr) -> Res<bool> {
    let ip = canonical(address.ip());
    if is_loopback(ip) {
        return Ok(true);
    }
    // Towards an address of a local route (`ip route add local`) the kernel sends from the address
    // itself; towards a second address of an interface from the first one. This needs a socket that
    // is not bound: one that is bound to the address has it as its source in any case.
    let source = source_towards(address);
    if source.is_ok_and(|source| canonical(source.ip()) == ip) || is_of_interface(ip)? {
        return Ok(true);
    }
    match source {
        Err(NO_UDP_PORT) => Err(NO_UDP_PORT),
        _ => Ok(false),
    }
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

/// The source address of this host towards `destination`, one of its own, with port 0. If no UDP
/// port is free, with which the kernel is asked, `destination` itself.
pub(super) fn source_of(destination: &SocketAddr) -> Res<SocketAddr> {
    match source_towards(destination) {
        Err(NO_UDP_PORT) => Ok(with_port(destination, 0)),
        source => source,
    }
}

/// The source address that the kernel chooses for packets to `destination`, with port 0.
fn source_towards(destination: &SocketAddr) -> Res<SocketAddr> {
    let any: SocketAddr = match destination {
        SocketAddr::V4(_) => SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, 0, 0, 0).into(),
    };
    let socket = udp_socket(&any)?;
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

    /// Whether the calling thread has a network namespace of its own, with a loopback interface and
    /// four UDP ports for sockets without a number.
    fn in_small_network() -> bool {
        // SAFETY: all zeros is a value of the structure, which has a name and flags; a socket of
        // the call.
        let made = unsafe {
            let mut lo: libc::ifreq = std::mem::zeroed();
            (lo.ifr_name[0], lo.ifr_name[1]) = (b'l'.cast_signed(), b'o'.cast_signed());
            lo.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
            libc::unshare(libc::CLONE_NEWNET) == 0 && {
                let fd = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
                let up = libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw const lo) == 0;
                libc::close(fd);
                up
            }
        };
        made && std::fs::write(
            "/proc/sys/net/ipv4/ip_local_port_range",
            format!("{} {}", RANGE.start(), RANGE.end()),
        )
        .is_ok()
    }

    const RANGE: std::ops::RangeInclusive<u16> = 40_000..=40_003;

    #[test]
    fn a_shortage_says_nothing_about_a_destination() {
        for errno in [libc::EMFILE, libc::ENOMEM, libc::EAGAIN].map(Errno) {
            assert_eq!(as_of_destination(errno), errno);
        }
        for errno in [libc::EADDRNOTAVAIL, libc::EACCES].map(Errno) {
            assert_eq!(as_of_destination(errno), Errno(libc::ENETUNREACH));
        }
    }

    /// Another user can have them all.
    #[test]
    fn addresses_of_interfaces_are_local_without_a_free_udp_port() {
        let body = || {
            if !in_small_network() {
                println!("skipped: no network namespace for this thread");
                return;
            }
            let sockets = RANGE.map(|port| UdpSocket::bind(("0.0.0.0", port)).unwrap());
            let sockets: Vec<_> = sockets.collect();
            let lo = address("127.0.0.1:7");
            assert_eq!(check_local(&lo), Ok(()));
            assert_eq!(source_of(&lo), Ok(address("127.0.0.1:0")));
            assert_eq!(check_local(&address("127.9.9.9:7")), Ok(()));
            // the kernel takes it for an address of this host when it is bound
            let broadcast = address("127.255.255.255:7");
            assert_eq!(check_local(&broadcast), Err(NO_UDP_PORT));
            let foreign = check_local(&address("192.0.2.1:7"));
            assert_eq!(foreign, Err(Errno(libc::EADDRNOTAVAIL)));
            drop(sockets);
            let none = check_local(&broadcast);
            assert_eq!(none, Err(Errno(libc::EADDRNOTAVAIL)));
        };
        std::thread::spawn(body).join().unwrap();
    }
}
