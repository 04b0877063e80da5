//! IP addresses: conversion from and to C, and the socket names that represent them.
//! `docs/softverbs-cm.md`, "Names".
//!
//! Invariants: the owner of the name `softverbs/<uid>/<ip>/<port>` owns that port of that address
//! for its user in its network namespace. `any4` and `any6` represent the unspecified addresses. An
//! IPv4-mapped IPv6 address has the name of the IPv4 address.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ops::RangeInclusive;
use std::thread;
use std::time::Duration;

use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

use super::diag;
use super::sock::Sock;
use crate::sys::{self, Errno, Res};

/// Reads an address of the application.
///
/// # Errors
/// `EINVAL`: NULL, or a family other than IPv4 and IPv6.
///
/// # Safety
/// `addr` must be NULL or point to a complete structure of its family.
pub(super) unsafe fn from_c(addr: *const sockaddr) -> Res<SocketAddr> {
    if addr.is_null() {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: every socket address begins with its family; it may be unaligned.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    match c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: the caller promises the structure that belongs to the family.
            let v4 = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the caller promises the structure that belongs to the family.
            let v6 = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let scope = if ip.is_unicast_link_local() {
                v6.sin6_scope_id
            } else {
                0
            };
            Ok(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, scope).into())
        }
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// Converts an address to C.
pub(super) fn to_c(address: &SocketAddr) -> sockaddr_storage {
    // SAFETY: all zeros is a valid value.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(v4) => {
            // SAFETY: a storage has room and alignment for every socket address.
            let out = unsafe { &mut *(&raw mut storage).cast::<sockaddr_in>() };
            out.sin_family = libc::AF_INET as libc::sa_family_t;
            out.sin_port = v4.port().to_be();
            out.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            // SAFETY: a storage has room and alignment for every socket address.
            let out = unsafe { &mut *(&raw mut storage).cast::<sockaddr_in6>() };
            out.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            out.sin6_port = v6.port().to_be();
            out.sin6_addr.s6_addr = v6.ip().octets();
            out.sin6_scope_id = v6.scope_id();
        }
    }
    storage
}

/// The port of an address of C in network byte order; 0 for other families.
///
/// # Safety
/// `addr` must point to a `sockaddr_storage`.
pub(super) unsafe fn port_of(addr: *const sockaddr_storage) -> u16 {
    // SAFETY: the caller promises a storage, which holds every socket address.
    unsafe {
        match c_int::from((*addr).ss_family) {
            libc::AF_INET => (*addr.cast::<sockaddr_in>()).sin_port,
            libc::AF_INET6 => (*addr.cast::<sockaddr_in6>()).sin6_port,
            _ => 0,
        }
    }
}

/// The form for looking up listeners: an IPv4-mapped IPv6 address becomes the IPv4 address.
pub(super) fn canonical(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// Whether the address stands for all addresses of this host.
pub(super) fn is_any(address: &SocketAddr) -> bool {
    canonical(address.ip()).is_unspecified()
}

pub(super) fn with_port(address: &SocketAddr, port: u16) -> SocketAddr {
    let mut address = *address;
    address.set_port(port);
    address
}

/// The loopback address of the same family, with the same port.
pub(super) fn loopback(like: &SocketAddr) -> SocketAddr {
    match like {
        SocketAddr::V4(_) => SocketAddrV4::new(Ipv4Addr::LOCALHOST, like.port()).into(),
        SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some() => {
            let ip = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
            SocketAddrV6::new(ip, like.port(), 0, 0).into()
        }
        SocketAddr::V6(_) => SocketAddrV6::new(Ipv6Addr::LOCALHOST, like.port(), 0, 0).into(),
    }
}

/// A port space, rdma_create_id(3): the same number in two of them is two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Tcp,
    Udp,
    Ib,
}

impl Space {
    fn prefix(self) -> String {
        let uid = sys::effective_uid();
        match self {
            Self::Tcp => format!("softverbs/{uid}/"),
            Self::Udp => format!("softverbs/{uid}/udp/"),
            Self::Ib => format!("softverbs/{uid}/ib/"),
        }
    }
}

/// The host part of the name of an address.
fn host_part(address: &SocketAddr) -> String {
    match (canonical(address.ip()), address) {
        (IpAddr::V4(Ipv4Addr::UNSPECIFIED), _) => "any4".into(),
        (IpAddr::V6(Ipv6Addr::UNSPECIFIED), _) => "any6".into(),
        (IpAddr::V6(ip), SocketAddr::V6(v6)) if v6.scope_id() != 0 => {
            format!("{ip}%{}", v6.scope_id())
        }
        (ip, _) => ip.to_string(),
    }
}

/// The host part of all addresses of the family of an address.
fn any_of(address: &SocketAddr) -> String {
    let any = if canonical(address.ip()).is_ipv4() {
        "any4"
    } else {
        "any6"
    };
    any.into()
}

fn name(space: Space, host: &str, port: u16) -> String {
    format!("{}{host}/{port}", space.prefix())
}

/// The names that a listener for connections to `destination` may have, the most specific first.
pub(super) fn candidates(space: Space, destination: &SocketAddr) -> [String; 2] {
    [
        name(space, &host_part(destination), destination.port()),
        name(space, &any_of(destination), destination.port()),
    ]
}

/// The hosts whose names a bound address owns.
fn hosts(address: &SocketAddr, only_own_family: bool) -> Vec<String> {
    let host = host_part(address);
    if host == "any6" && !only_own_family {
        vec![host, "any4".into()]
    } else {
        vec![host]
    }
}

/// Whether owners of the two hosts with the same port would listen on a common address.
fn overlap(mine: &str, other: &str) -> bool {
    let v6 = |host: &str| host == "any6" || host.contains(':');
    mine == other || (mine.starts_with("any") || other.starts_with("any")) && v6(mine) == v6(other)
}

/// Whether [`host_part`] makes this text of an address. A process of another user can bind a name
/// with any bytes in this place; and the names of another port space have a longer prefix.
fn is_host(text: &str) -> bool {
    let is_of = |address: String| {
        let address = address.parse::<SocketAddr>();
        address.is_ok_and(|address| host_part(&address) == text)
    };
    matches!(text, "any4" | "any6") || is_of(format!("{text}:0")) || is_of(format!("[{text}]:0"))
}

/// For each port of `range` the hosts of this user's sockets whose names overlap with `mine`.
/// `taken` is the contents of `/proc/net/unix`.
fn overlapping(
    taken: &[u8],
    space: Space,
    mine: &[String],
    range: &RangeInclusive<u16>,
) -> BTreeMap<u16, BTreeSet<String>> {
    let prefix = format!("@{}", space.prefix());
    let name_of = |line: &[u8]| {
        let path = std::str::from_utf8(line).ok()?.split_whitespace().last()?;
        let (other, number) = path.strip_prefix(prefix.as_str())?.rsplit_once('/')?;
        let port = number.parse().ok().filter(|port| range.contains(port))?;
        let counts = port.to_string() == number
            && !mine.iter().any(|host| host == other)
            && mine.iter().any(|host| overlap(host, other))
            && is_host(other);
        counts.then(|| (port, other.to_owned()))
    };
    let mut found = BTreeMap::<u16, BTreeSet<String>>::new();
    for (port, host) in taken.split(|byte| *byte == b'\n').filter_map(name_of) {
        found.entry(port).or_default().insert(host);
    }
    found
}

/// Whether a socket owns the name. `/proc/net/unix` does not tell: the socket of an accepted
/// connection shows the name of its listener, and does not own it. The name is taken for the
/// duration of the call.
fn is_owned(name: &str) -> Res<bool> {
    match Sock::new()?.bind(name) {
        Ok(()) => Ok(false),
        Err(Errno(libc::EADDRINUSE)) => Ok(true),
        Err(errno) => Err(errno),
    }
}

/// Whether a socket owns the name of one of the hosts.
fn is_one_owned(space: Space, hosts: &BTreeSet<String>, port: u16) -> Res<bool> {
    for host in hosts {
        if is_owned(&name(space, host, port))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The contents of `/proc/net/unix`, which is long where many sockets exist. Empty without /proc.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`: the list cannot be read.
fn read_list() -> Res<Vec<u8>> {
    #[cfg(test)]
    tests::READS.with(|reads| reads.set(reads.get() + 1));
    match fs::read("/proc/net/unix").map_err(Errno::from) {
        Err(errno @ Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => Err(errno),
        read => Ok(read.unwrap_or_default()),
    }
}

/// The contents of two readings of `/proc/net/unix`. The kernel returns a page per read(2), and
/// finds its place in the list by counting: if a socket that it has returned ends meanwhile,
/// another one is missing.
///
/// # Errors
/// As [`read_list`].
fn read_lists() -> Res<Vec<u8>> {
    Ok([read_list()?, read_list()?].concat())
}

/// The hosts whose names another socket of this user shows, and that overlap with `mine`.
fn shown(lists: &[u8], space: Space, mine: &[String], port: u16) -> BTreeSet<String> {
    let mut found = overlapping(lists, space, mine, &(port..=port));
    found.remove(&port).unwrap_or_default()
}

/// Milliseconds before each attempt: a process that is ending may still have the name. Another
/// caller of [`is_owned`] can have the name of an address for a moment.
const PAUSES: [u64; 3] = [0, 1, 2];

/// The name that the owner of a host's name with `port` also owns while it permits others to bind
/// the address ([`permit_others`]). [`overlapping`] takes it for that of another port space.
fn permission(space: Space, host: &str, port: u16) -> String {
    format!("{}shared/{host}/{port}", space.prefix())
}

/// Permits other ids to bind an address with this name ([`permit_others`]), which this one owns.
pub(super) struct Permission {
    pub(super) name: String,
    _sock: Sock,
}

/// Permits other ids to bind `address` too, as far as the caller owns its names. The sockets
/// listen, so that another process finds the user of the permission also by a connection
/// ([`is_granted`]). No connection is accepted.
///
/// # Errors
/// `EMFILE` and others: no socket.
pub(super) fn permit_others(
    space: Space,
    address: &SocketAddr,
    only_own_family: bool,
    owns: impl Fn(&str) -> bool,
) -> Res<Vec<Permission>> {
    let port = address.port();
    let mut permissions = Vec::new();
    for host in hosts(address, only_own_family) {
        let name = name(space, &host, port);
        if !owns(&name) {
            continue;
        }
        let sock = Sock::new()?;
        for pause in PAUSES {
            thread::sleep(Duration::from_millis(pause));
            match sock.bind(&permission(space, &host, port)) {
                Ok(()) => {
                    sock.listen(i32::MAX)?;
                    permissions.push(Permission { name, _sock: sock });
                    break;
                }
                Err(Errno(libc::EADDRINUSE)) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    Ok(permissions)
}

/// Whether a process of this user has the permission of this name. The user of a socket in `lists`
/// is asked for first: a connection stays in the permission's queue, which has only
/// `net.core.somaxconn` places.
fn is_granted(lists: &[u8], name: &str) -> Res<bool> {
    for inode in diag::inodes(lists, name) {
        match diag::user_of(inode, name) {
            // without a process: the overflow user is never this one
            Ok(Some(user)) if sys::is_own_user(user, 0) => return Ok(true),
            Err(errno) if sys::is_shortage(errno) => return Err(errno),
            _ => {}
        }
    }
    let sock = Sock::new()?;
    match sock.connect(name) {
        Ok(()) => sock.is_of_own_user(),
        Err(errno) if sys::is_shortage(errno) => Err(errno),
        // No socket listens, or the queue is full: the user is not known.
        Err(_) => Ok(false),
    }
}

/// Whether all owners of the port for an overlapping address permit others to bind it.
///
/// # Errors
/// As [`own`].
pub(super) fn is_permitted(space: Space, address: &SocketAddr, only_own_family: bool) -> Res<bool> {
    let (mine, port) = (hosts(address, only_own_family), address.port());
    let lists = read_lists()?;
    let others = shown(&lists, space, &mine, port);
    let mut left: Vec<&String> = mine.iter().chain(&others).collect();
    for pause in PAUSES {
        thread::sleep(Duration::from_millis(pause));
        let mut refused = Vec::new();
        for host in left {
            if is_owned(&name(space, host, port))?
                && !is_granted(&lists, &permission(space, host, port))?
            {
                refused.push(host);
            }
        }
        if refused.is_empty() {
            return Ok(true);
        }
        left = refused;
    }
    Ok(false)
}

/// Sockets that own the hosts' names with `port`.
///
/// # Errors
/// `EADDRINUSE`: another socket owns the port for an overlapping address.
fn own_hosts(space: Space, mine: &[String], port: u16) -> Res<Vec<Sock>> {
    // After binding the names: of two sockets with overlapping names at least one sees the other.
    let sockets = own_names(space, mine, port)?;
    let others = shown(&read_lists()?, space, mine, port);
    for pause in PAUSES {
        thread::sleep(Duration::from_millis(pause));
        if !is_one_owned(space, &others, port)? {
            return Ok(sockets);
        }
    }
    Err(Errno(libc::EADDRINUSE))
}

/// Sockets that own `address` with its port: one, or two if the IPv4 addresses are included.
///
/// # Errors
/// `EADDRINUSE`: another socket owns the port for an overlapping address.
pub(super) fn own(space: Space, address: &SocketAddr, only_own_family: bool) -> Res<Vec<Sock>> {
    own_hosts(space, &hosts(address, only_own_family), address.port())
}

/// The sockets that [`own`] returns for `address` in addition if the IPv4 addresses are included:
/// one for `::`, none for other addresses.
///
/// # Errors
/// As [`own`].
pub(super) fn own_other_family(space: Space, address: &SocketAddr) -> Res<Vec<Sock>> {
    match hosts(address, false).get(1..) {
        Some(rest) if !rest.is_empty() => own_hosts(space, rest, address.port()),
        _ => Ok(Vec::new()),
    }
}

fn own_names(space: Space, hosts: &[String], port: u16) -> Res<Vec<Sock>> {
    hosts
        .iter()
        .map(|host| {
            let sock = Sock::new()?;
            sock.bind(&name(space, host, port))?;
            Ok(sock)
        })
        .collect()
}

/// As [`own`], with a free port of the ephemeral range of the host.
///
/// # Errors
/// `EADDRNOTAVAIL`: none is free.
pub(super) fn own_any_port(
    space: Space,
    address: &SocketAddr,
    only_own_family: bool,
) -> Res<(SocketAddr, Vec<Sock>)> {
    own_port_of(&ephemeral_ports(), space, address, only_own_family)
}

/// Maximum number of ports for which [`own_port_of`] reads the lists of the sockets.
const MOST_LOOKS: usize = 4;

/// As [`own`], with a free port of `range`. Reads the list of the sockets once, and twice for each
/// of at most [`MOST_LOOKS`] ports.
///
/// # Errors
/// `EADDRNOTAVAIL`: none is free, or each of these ports has an owner for an overlapping address
/// that the readings before did not have. A process of another user can cause that.
fn own_port_of(
    range: &RangeInclusive<u16>,
    space: Space,
    address: &SocketAddr,
    only_own_family: bool,
) -> Res<(SocketAddr, Vec<Sock>)> {
    let unavailable = Errno(libc::EADDRNOTAVAIL);
    let mine = hosts(address, only_own_family);
    let (first, count) = (*range.start(), u64::from(range.end() - range.start()) + 1);
    let start = sys::random() % count;
    let ports = (0..count).map(|step| first + ((start + step) % count) as u16);
    // One address overlaps with all addresses of its family only: the list is not read for it.
    if let [host] = &mine[..]
        && !host.starts_with("any")
    {
        let others = BTreeSet::from([any_of(address)]);
        let found = first_free(ports, space, &mine, |_| Some(&others))?;
        let (port, sockets) = found.ok_or(unavailable)?;
        return Ok((with_port(address, port), sockets));
    }
    let mut listed = overlapping(&read_list()?, space, &mine, range);
    for _ in 0..MOST_LOOKS {
        let unlisted = ports.clone().filter(|port| !listed.contains_key(port));
        // A name in the list may be that of a listener that has ended.
        let rest = ports.clone().filter(|port| listed.contains_key(port));
        let ports = unlisted.chain(rest);
        let found = first_free(ports, space, &mine, |port| listed.get(&port))?;
        let (port, sockets) = found.ok_or(unavailable)?;
        // After binding the names, as in `own_hosts`.
        let lists = read_lists()?;
        if !is_one_owned(space, &shown(&lists, space, &mine, port), port)? {
            return Ok((with_port(address, port), sockets));
        }
        listed = overlapping(&lists, space, &mine, range);
    }
    Err(unavailable)
}

/// The first of the ports whose names for the hosts `mine` are free, with sockets that own them.
/// The names of the hosts of `others` are free too.
fn first_free<'a>(
    ports: impl Iterator<Item = u16>,
    space: Space,
    mine: &[String],
    others: impl Fn(u16) -> Option<&'a BTreeSet<String>>,
) -> Res<Option<(u16, Vec<Sock>)>> {
    for port in ports {
        let sockets = match own_names(space, mine, port) {
            Ok(sockets) => sockets,
            Err(Errno(libc::EADDRINUSE)) => continue,
            Err(errno) => return Err(errno),
        };
        let is_overlapping = match others(port) {
            Some(hosts) => is_one_owned(space, hosts, port)?,
            None => false,
        };
        if !is_overlapping {
            return Ok(Some((port, sockets)));
        }
    }
    Ok(None)
}

fn ephemeral_ports() -> RangeInclusive<u16> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ports = text.split_whitespace().map(str::parse::<u16>);
    match (ports.next(), ports.next()) {
        (Some(Ok(low)), Some(Ok(high))) if 0 < low && low <= high => low..=high,
        _ => 32768..=60999,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// How often this thread has read the list of the sockets.
        pub(super) static READS: Cell<usize> = const { Cell::new(0) };
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_survive_the_way_to_c_and_back() {
        for text in [
            "1.2.3.4:5",
            "[fe80::1%7]:65535",
            "[2001:db8::1]:80",
            "0.0.0.0:0",
        ] {
            let before = address(text);
            let storage = to_c(&before);
            // SAFETY: a storage is a complete structure of every family.
            let after = unsafe { from_c((&raw const storage).cast()) };
            assert_eq!(after, Ok(before));
            // SAFETY: a storage is a complete structure of every family.
            let port = unsafe { port_of(&raw const storage) };
            assert_eq!(port, before.port().to_be());
        }
        // SAFETY: NULL is allowed.
        let null = unsafe { from_c(std::ptr::null()) };
        assert_eq!(null, Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn names_of_addresses() {
        let uid = sys::effective_uid();
        let names = |text: &str| candidates(Space::Tcp, &address(text));
        assert_eq!(
            names("10.1.2.3:7"),
            [
                format!("softverbs/{uid}/10.1.2.3/7"),
                format!("softverbs/{uid}/any4/7")
            ]
        );
        assert_eq!(names("[::ffff:10.1.2.3]:7"), names("10.1.2.3:7"));
        assert_eq!(
            names("[fe80::1%3]:7")[0],
            format!("softverbs/{uid}/fe80::1%3/7")
        );
        assert_eq!(hosts(&address("[::]:1"), false), ["any6", "any4"]);
        assert_eq!(hosts(&address("[::]:1"), true), ["any6"]);
        let udp = candidates(Space::Udp, &address("10.1.2.3:7"));
        assert_eq!(udp[0], format!("softverbs/{uid}/udp/10.1.2.3/7"));
    }

    #[test]
    fn the_same_port_of_two_spaces_is_two_ports() {
        let (bound, _tcp) = own_any_port(Space::Tcp, &address("127.0.0.1:0"), false).unwrap();
        let any = address(&format!("0.0.0.0:{}", bound.port()));
        let _udp = own(Space::Udp, &any, false).unwrap();
        let taken = Err(Errno(libc::EADDRINUSE));
        assert_eq!(own(Space::Udp, &bound, false).map(drop), taken);
        assert_eq!(own(Space::Ib, &any, false).map(drop), Ok(()));
        // nor is the listener of another space in the way of a second one in this space
        drop(_tcp);
        assert_eq!(own(Space::Tcp, &any, false).map(drop), Ok(()));
    }

    #[test]
    fn overlapping_addresses_exclude_each_other() {
        let (ip4, second) = (address("127.0.0.1:0"), address("127.0.0.2:0"));
        let (bound, held) = own_any_port(Space::Tcp, &ip4, false).unwrap();
        let at = |host: &str| address(&format!("{host}:{}", bound.port()));
        let taken = Err(Errno(libc::EADDRINUSE));
        assert_eq!(own(Space::Tcp, &bound, false).map(drop), taken);
        assert_eq!(own(Space::Tcp, &at("0.0.0.0"), false).map(drop), taken);
        assert_eq!(own(Space::Tcp, &at("[::]"), false).map(drop), taken);
        assert_eq!(own(Space::Tcp, &at("[::]"), true).map(drop), Ok(()));
        assert_eq!(
            own(Space::Tcp, &with_port(&second, bound.port()), false).map(drop),
            Ok(())
        );
        drop(held);
        let all = own(Space::Tcp, &at("[::]"), false).unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(own(Space::Tcp, &bound, false).map(drop), taken);
    }

    #[test]
    fn other_users_names_do_not_count() {
        let list = format!(
            "0: 2 0 10000 5 1 1 @softverbs/{}/any4/9\n0: 2 0 0 5 1 1 @x/any4/9\n\n",
            sys::effective_uid().wrapping_add(1)
        );
        let mine = ["127.0.0.1".to_owned()];
        let overlapping = |list: &str, port| {
            let found = overlapping(list.as_bytes(), Space::Tcp, &mine, &(port..=port));
            found.into_values().flatten().collect::<BTreeSet<_>>()
        };
        assert!(overlapping(&list, 9).is_empty());
        let own = format!(
            "0: 2 0 10000 5 1 1 @softverbs/{}/any4/9",
            sys::effective_uid()
        );
        assert!(overlapping(&own, 9).contains("any4"));
        assert!(overlapping(&own, 19).is_empty());
    }

    /// See [`read_lists`].
    #[test]
    fn the_list_is_read_twice() {
        let (bound, held) = own_any_port(Space::Ib, &address("127.0.0.1:0"), false).unwrap();
        drop(held);
        let before = READS.get();
        own(Space::Ib, &bound, false).unwrap();
        assert_eq!(READS.get() - before, 2);
    }

    /// The queue of a permission has a limit.
    #[test]
    fn a_look_at_a_permission_is_no_connection_to_it() {
        let (bound, _held) = own_any_port(Space::Ib, &address("127.0.0.1:0"), false).unwrap();
        let permissions = permit_others(Space::Ib, &bound, false, |_| true).unwrap();
        let [Permission { _sock: sock, .. }] = &permissions[..] else {
            panic!("{} permissions", permissions.len());
        };
        let name = permission(Space::Ib, "127.0.0.1", bound.port());
        let lists = read_lists().unwrap();
        assert_eq!(is_granted(&lists, &name), Ok(true));
        let inode = diag::inodes(&lists, &name).next();
        let user = inode.map(|inode| diag::user_of(inode, &name));
        if !matches!(user, Some(Ok(Some(_)))) {
            println!("skipped: the kernel does not tell users of sockets: {user:?}");
            return;
        }
        assert_eq!(sock.has_connection(), Ok(false));
        // what the list does not have is asked for by a connection
        assert_eq!(is_granted(b"", &name), Ok(true));
        assert_eq!(sock.has_connection(), Ok(true));
        drop(permissions);
        assert_eq!(is_granted(&lists, &name), Ok(false));
    }

    #[test]
    fn only_texts_of_addresses_are_hosts() {
        for text in [
            "0.0.0.0:1",
            "10.1.2.3:1",
            "[::]:1",
            "[fe80::1%3]:1",
            "[2001:db8::7]:1",
        ] {
            assert!(is_host(&host_part(&address(text))), "{text}");
        }
        for text in [
            "",
            "any",
            "anyx",
            "any4x",
            "any\u{fffd}",
            "0.0.0.0",
            "10.1.2.03",
            "::ffff:10.1.2.3",
            "FE80::1",
            "udp/any4",
        ] {
            assert!(!is_host(text), "{text}");
        }
    }

    /// The lossy form of the name would be longer than a name can be.
    #[test]
    fn a_name_that_is_no_text_does_not_count() {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};

        let ip4 = address("127.0.0.1:0");
        let (bound, held) = own_any_port(Space::Ib, &ip4, false).unwrap();
        drop(held);
        let name = [
            format!("{}any", Space::Ib.prefix()).into_bytes(),
            vec![0xff; 30],
            format!("/{}", bound.port()).into_bytes(),
        ]
        .concat();
        // the list has the sockets of each type
        let _other = UnixDatagram::bind_addr(&UnixAddr::from_abstract_name(name).unwrap()).unwrap();
        let range = bound.port()..=bound.port();
        assert_eq!(own(Space::Ib, &bound, false).map(drop), Ok(()));
        let any = own_port_of(&range, Space::Ib, &address("0.0.0.0:0"), false);
        assert_eq!(any.map(drop), Ok(()));
    }

    #[test]
    fn a_port_of_the_range_has_no_overlapping_owner() {
        let own_port = |range: &RangeInclusive<u16>, host| {
            own_port_of(range, Space::Tcp, &address(host), false)
        };
        for (first, second) in [
            ("127.0.0.1:0", "0.0.0.0:0"),
            ("0.0.0.0:0", "127.0.0.1:0"),
            ("[::1]:0", "[::]:0"),
            ("[::]:0", "[::1]:0"),
            ("[::]:0", "127.0.0.1:0"),
        ] {
            let (bound, held) = own_any_port(Space::Tcp, &address(first), false).unwrap();
            let range = bound.port()..=bound.port();
            let taken = own_port(&range, second).map(drop);
            assert_eq!(taken, Err(Errno(libc::EADDRNOTAVAIL)), "{first} {second}");
            drop(held);
            assert_eq!(own_port(&range, second).map(drop), Ok(()));
        }
    }

    /// The list is long where another user has many sockets. A reading can lack a name, because
    /// other tests close sockets meanwhile.
    #[test]
    fn the_search_for_a_port_reads_the_list_a_few_times() {
        let range = 20_000..=20_199;
        let search = || {
            let before = READS.get();
            let found = own_port_of(&range, Space::Ib, &address("0.0.0.0:0"), false);
            let reads = READS.get() - before;
            assert!(reads <= 1 + 2 * MOST_LOOKS, "{reads} reads");
            found.map(|(bound, _)| bound.port())
        };
        let owner = |port| {
            let sock = Sock::new().unwrap();
            sock.bind(&name(Space::Ib, "127.0.0.1", port)).unwrap();
            sock
        };
        let mut owners: BTreeMap<u16, Sock> =
            range.clone().map(|port| (port, owner(port))).collect();
        let none = Err(Errno(libc::EADDRNOTAVAIL));
        assert_eq!(search(), none);
        owners.remove(&20_100);
        assert_eq!(search(), Ok(20_100));
        // one that is in the list, as the name of an accepted connection
        owners.insert(20_100, owner(20_100));
        let listener = owners.remove(&20_150).unwrap();
        listener.listen(1).unwrap();
        let client = Sock::new().unwrap();
        client
            .connect(&name(Space::Ib, "127.0.0.1", 20_150))
            .unwrap();
        let accepted = listener.accept().unwrap();
        assert!(accepted.is_some());
        assert_eq!(search(), none);
        drop(listener);
        assert_eq!(search(), Ok(20_150));
    }

    #[test]
    fn addresses_that_do_not_overlap_can_be_owned_at_the_same_time() {
        let (bound, held) = own_any_port(Space::Tcp, &address("127.0.0.9:0"), false).unwrap();
        let threads: Vec<_> = (1..5)
            .map(|host| {
                let mine = address(&format!("127.0.0.{host}:{}", bound.port()));
                thread::spawn(move || {
                    for _ in 0..500 {
                        own(Space::Tcp, &mine, false).map(drop).unwrap();
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        drop(held);
    }
}
