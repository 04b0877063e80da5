//! Source and destination addresses: node, service and address hints as pairs of addresses.

use std::ffi::{CStr, CString, c_char};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use libfabric_sys::{FI_NUMERICHOST, FI_SOURCE};
use weft::errno::{FiErrno, Result};
use weft::verbs::address_rank;

use super::addresses::OwnAddresses;
use super::hints::Hints;
use crate::addr::{self, Format};

/// Source and destination address of an endpoint, as far as they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
}

impl Path {
    /// Whether a format can express both addresses.
    pub(crate) fn is_expressed(&self, format: Format) -> bool {
        let mut addrs = [self.src, self.dst].into_iter().flatten();
        addrs.all(|addr| format.expresses(&addr))
    }
}

/// The paths that node, service and hints mean, best first.
///
/// # Errors
/// `ENODATA`: a name that doesn't resolve, or no address of the requested format. `EINVAL`: an
/// address string together with a service.
pub(crate) fn paths(
    node: Option<&CStr>,
    service: Option<&CStr>,
    flags: u64,
    hints: &Hints,
) -> Result<Vec<Path>> {
    let fits = |addr: &SocketAddr| hints.format.is_none_or(|format| format.expresses(addr));
    let found = if node.is_some() || service.is_some() {
        let mut found = lookup(node, service, flags, hints.format)?;
        found.retain(fits);
        if found.is_empty() {
            return Err(FiErrno::ENODATA);
        }
        Some(found)
    } else {
        None
    };
    // the hints have no addresses that the call ignores
    Ok(match (found, flags & FI_SOURCE != 0) {
        (Some(found), true) => found
            .into_iter()
            .map(|src| Path {
                src: Some(src),
                dst: hints.dst,
            })
            .collect(),
        (Some(found), false) => found
            .into_iter()
            .map(|dst| Path {
                src: hints.src,
                dst: Some(dst),
            })
            .collect(),
        (None, _) => vec![Path {
            src: hints.src,
            dst: hints.dst,
        }],
    })
}

/// The first address of a node and a service that has the format.
///
/// # Errors
/// `ENODATA`: the names do not resolve to such an address. `EINVAL`: a name with a NUL.
pub(crate) fn name(node: &str, service: &str, format: Format) -> Result<SocketAddr> {
    let text = |text| CString::new(text).map_err(|_| FiErrno::EINVAL);
    let (node, service) = (text(node)?, text(service)?);
    let found = lookup(Some(&node), Some(&service), 0, Some(format))?;
    let mut fits = found.into_iter().filter(|addr| format.expresses(addr));
    fits.next().ok_or(FiErrno::ENODATA)
}

fn lookup(
    node: Option<&CStr>,
    service: Option<&CStr>,
    flags: u64,
    format: Option<Format>,
) -> Result<Vec<SocketAddr>> {
    if let Some(text) = node.and_then(|node| node.to_str().ok())
        && addr::looks_like_str(text)
    {
        if service.is_some() {
            return Err(FiErrno::EINVAL);
        }
        return Ok(vec![addr::parse(text)?]);
    }
    // SAFETY: all zeros is a valid `addrinfo`: hints without a request.
    let mut wish: libc::addrinfo = unsafe { std::mem::zeroed() };
    wish.ai_socktype = libc::SOCK_STREAM;
    wish.ai_family = match format {
        Some(Format::In) => libc::AF_INET,
        Some(Format::In6) => libc::AF_INET6,
        _ => libc::AF_UNSPEC,
    };
    if flags & FI_SOURCE != 0 {
        wish.ai_flags |= libc::AI_PASSIVE;
    }
    if flags & FI_NUMERICHOST != 0 && node.is_some() {
        wish.ai_flags |= libc::AI_NUMERICHOST;
    }
    let text = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    let mut list: *mut libc::addrinfo = std::ptr::null_mut();
    let ret =
        // SAFETY: strings or NULL, not both NULL; `list` is writable.
        unsafe { libc::getaddrinfo(text(node), text(service), &raw const wish, &raw mut list) };
    if ret != 0 {
        return Err(FiErrno::ENODATA);
    }
    let mut found = Vec::new();
    let mut entry = list;
    while !entry.is_null() {
        // SAFETY: a node of getaddrinfo's list; its address has `ai_addrlen` bytes.
        let (addr, next) = unsafe {
            let addr =
                Format::Sockaddr.read((*entry).ai_addr.cast(), Some((*entry).ai_addrlen as usize));
            (addr, (*entry).ai_next)
        };
        if let Ok(addr) = addr
            && !found.contains(&addr)
        {
            found.push(addr);
        }
        entry = next;
    }
    // SAFETY: the list of getaddrinfo, freed once.
    unsafe { libc::freeaddrinfo(list) };
    // The wildcard of IPv4 first: an application that takes the first answer then listens on IPv4.
    found.sort_by_key(|addr| addr.ip().is_unspecified() && addr.is_ipv6());
    Ok(found)
}

/// The address of this host that its routing selects as the source for `dst`, with a port.
fn route(dst: SocketAddr) -> Option<SocketAddr> {
    let any: IpAddr = if dst.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // Connecting a datagram socket only looks the route up, and sends nothing.
    let mut dst = dst;
    dst.set_port(dst.port().max(1));
    socket.connect(dst).ok()?;
    socket.local_addr().ok()
}

/// The requested paths that belong to a device, as far as the format can express them: source
/// addresses that are its own, destinations that it reaches.
pub(crate) fn of_device(
    own: &OwnAddresses,
    host_only: bool,
    path: &Path,
    format: Option<Format>,
) -> Vec<Path> {
    let mut paths = every_of_device(own, host_only, path);
    paths.retain(|path| format.is_none_or(|format| path.is_expressed(format)));
    paths
}

/// As [`of_device`], in any format.
fn every_of_device(own: &OwnAddresses, host_only: bool, path: &Path) -> Vec<Path> {
    if let Some(dst) = path.dst {
        if dst.ip().is_unspecified() || (host_only && !own.has(dst.ip())) {
            return Vec::new();
        }
        let src = match path.src {
            Some(src) if !src.ip().is_unspecified() => src,
            given => match route(dst) {
                Some(src) => with_port(src, given.map_or(0, |src| src.port())),
                None => return Vec::new(),
            },
        };
        if src.is_ipv4() != dst.is_ipv4() || !own.has(src.ip()) {
            return Vec::new();
        }
        return vec![Path {
            src: Some(src),
            dst: Some(dst),
        }];
    }
    match path.src {
        Some(src) if src.ip().is_unspecified() => {
            // a wildcard address stands for each address of its family that the device has
            let family = own.iter().filter(|own| own.is_ipv4() == src.is_ipv4());
            let family = family.map(|own| with_port(own, src.port()));
            if own.are_some() {
                // a wildcard would also listen on the addresses that the parameters exclude
                return family.map(from).collect();
            }
            family.take(1).map(|_| *path).collect()
        }
        Some(src) => own.has(src.ip()).then_some(*path).into_iter().collect(),
        None => {
            let mut own = own.iter().collect::<Vec<_>>();
            own.sort_by_key(address_rank);
            own.into_iter().map(from).collect()
        }
    }
}

/// The address, and the scope that it may have, with another port.
fn with_port(mut addr: SocketAddr, port: u16) -> SocketAddr {
    addr.set_port(port);
    addr
}

/// A path from an address to any destination.
fn from(src: SocketAddr) -> Path {
    Path {
        src: Some(src),
        dst: None,
    }
}

/// A C string argument that may be NULL; an empty one counts as NULL.
///
/// # Safety
/// `text` is NULL or a C string that outlives the result.
pub(crate) unsafe fn argument<'a>(text: *const c_char) -> Option<&'a CStr> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not NULL; the caller passes a C string that outlives the result.
    let text = unsafe { CStr::from_ptr(text) };
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_alone_is_the_wildcard_of_the_source() {
        let paths = paths(None, Some(c"7471"), FI_SOURCE, &Hints::default()).unwrap();
        assert_eq!(paths[0].src, Some("0.0.0.0:7471".parse().unwrap()));
        assert_eq!(paths[0].dst, None);
    }

    #[test]
    fn names_that_do_not_resolve_are_no_data() {
        let hints = Hints::default();
        assert_eq!(
            paths(Some(c"no-such-host.invalid"), None, 0, &hints),
            Err(FiErrno::ENODATA)
        );
        assert_eq!(
            paths(Some(c"localhost"), None, FI_NUMERICHOST, &hints),
            Err(FiErrno::ENODATA)
        );
        assert_eq!(
            paths(
                Some(c"::1"),
                None,
                0,
                &Hints {
                    format: Some(Format::In),
                    ..Hints::default()
                }
            ),
            Err(FiErrno::ENODATA)
        );
    }

    #[test]
    fn a_wildcard_is_the_addresses_that_are_offered_where_some_are_not() {
        let addr = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let paths = |some| {
            let own = OwnAddresses::of_list(&["10.77.0.1:0", "[fd77::1]:0"].map(addr), some);
            let found = of_device(&own, false, &from(addr("0.0.0.0:7471")), None);
            found
                .into_iter()
                .map(|path| path.src.unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(paths(false), [addr("0.0.0.0:7471")]);
        assert_eq!(paths(true), [addr("10.77.0.1:7471")]);
    }

    /// A string has no scope, without which a link-local address cannot be used. The other
    /// addresses of the wildcard are listed.
    #[test]
    fn an_address_that_the_format_cannot_express_is_left_out() {
        let addr = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let own = OwnAddresses::of_list(&["[fe80::1]:0", "[fd77::1]:0"].map(addr), true);
        let paths = |src: Option<&str>, format| {
            let path = Path {
                src: src.map(addr),
                dst: None,
            };
            let found = of_device(&own, false, &path, Some(format)).into_iter();
            found.map(|path| path.src.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(paths(Some("[::]:9"), Format::Str), [addr("[fd77::1]:9")]);
        assert_eq!(paths(None, Format::Str), [addr("[fd77::1]:0")]);
        let both = [addr("[fe80::1]:9"), addr("[fd77::1]:9")];
        assert_eq!(paths(Some("[::]:9"), Format::In6), both);
        assert!(paths(None, Format::In).is_empty());
    }

    #[test]
    fn an_address_string_is_a_node() {
        let hints = Hints::default();
        for (node, dst) in [
            (c"fi_sockaddr_in://10.1.2.3:99", "10.1.2.3:99"),
            (c"fi_sockaddr://10.1.2.3:99", "10.1.2.3:99"),
            (c"fi_sockaddr://[2001:db8::1]:99", "[2001:db8::1]:99"),
        ] {
            let found = paths(Some(node), None, 0, &hints).unwrap();
            assert_eq!(found[0].dst, Some(dst.parse().unwrap()), "{node:?}");
            assert_eq!(
                paths(Some(node), Some(c"1"), 0, &hints),
                Err(FiErrno::EINVAL)
            );
        }
    }
}
