//! The addresses of an endpoint: where it listens, and from where it dials.
//!
//! An endpoint without a specific source address listens at each address of its device, at one port
//! for all. The first address is its name; HELLO has the others.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::Token;
use crate::conn::{CmSink, Listener, is_in_use};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{Device, DeviceAddress, address_rank};

/// Unanswered connection requests at each address.
const BACKLOG: usize = 1024;
/// Free ports that are tried until one is free at each address.
const PORTS: usize = 32;

/// The listeners of connections, and those for links on circuits.
type Bound = (Vec<Arc<Listener>>, Vec<Arc<Listener>>);

/// The listeners of an endpoint.
#[derive(Debug)]
pub(super) struct Listening {
    /// At least one; the first has the endpoint's name.
    listeners: Vec<Arc<Listener>>,
    /// Those for links on circuits, at the same addresses.
    services: Vec<Arc<Listener>>,
    /// The addresses, in the same order.
    own: Vec<DeviceAddress>,
    /// The scope of link-local addresses.
    scope: u32,
}

/// The IPv6 scope of a link-local address, otherwise 0.
fn scope_of(addr: &SocketAddr) -> u32 {
    match addr {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => v6.scope_id(),
        _ => 0,
    }
}

/// The addresses at which an endpoint listens. `src`: the address that the application has set; a
/// wildcard address stands for all addresses of its family. `ipv4`: without one, the family of the
/// name, if only one is possible.
fn choose(
    device: Vec<DeviceAddress>,
    src: Option<SocketAddr>,
    ipv4: Option<bool>,
) -> Vec<DeviceAddress> {
    if let Some(src) = src.filter(|src| !src.ip().is_unspecified()) {
        let same = |own: &DeviceAddress| {
            let scope = scope_of(&src);
            own.addr.ip() == src.ip() && (scope == 0 || scope == scope_of(&own.addr))
        };
        let known = device.into_iter().find(same);
        return vec![DeviceAddress {
            addr: src,
            // the device does not list it: the connection manager decides
            prefix_len: known.as_ref().map_or(0, |known| known.prefix_len),
            interface: known.map(|known| known.interface).unwrap_or_default(),
            loopback: src.ip().is_loopback(),
        }];
    }
    let mut chosen = device;
    if let Some(src) = src {
        chosen.retain(|own| own.addr.is_ipv4() == src.is_ipv4());
    }
    let other = |own: &DeviceAddress| ipv4.is_some_and(|ipv4| ipv4 != own.addr.is_ipv4());
    chosen.sort_by_key(|own| (other(own), address_rank(&own.addr)));
    if chosen.first().is_none_or(other) {
        // there is no address for the name
        chosen.clear();
    }
    chosen
}

/// Whether two addresses of one family are in the same network.
fn in_network(own: &DeviceAddress, to: IpAddr) -> bool {
    let (bits, differ) = match (own.addr.ip(), to) {
        (IpAddr::V4(own), IpAddr::V4(to)) => (32, u128::from(u32::from(own) ^ u32::from(to)) << 96),
        (IpAddr::V6(own), IpAddr::V6(to)) => (128, u128::from(own) ^ u128::from(to)),
        _ => return false,
    };
    let prefix = u32::from(own.prefix_len);
    prefix != 0 && prefix <= bits && differ.leading_zeros() >= prefix
}

/// The address of `own` from which `to` is dialled; `None`: the route decides.
fn source(own: &[DeviceAddress], to: SocketAddr) -> Option<SocketAddr> {
    let family = || own.iter().filter(|own| own.addr.is_ipv4() == to.is_ipv4());
    let same = |own: &&DeviceAddress| {
        let scope = scope_of(&to);
        own.addr.ip() == to.ip() && (scope == 0 || scope == scope_of(&own.addr))
    };
    let network = |own: &&DeviceAddress| {
        let (to_scope, own_scope) = (scope_of(&to), scope_of(&own.addr));
        in_network(own, to.ip()) && (to_scope == 0 || to_scope == own_scope)
    };
    let found = family().find(same).or_else(|| family().find(network));
    // the first one: a loopback or link-local address does not reach other networks
    let found = found.or_else(|| family().find(|own| address_rank(&own.addr) < 2));
    let mut found = found
        .or_else(|| family().next().filter(|_| own.len() == 1))?
        .addr;
    found.set_port(0);
    Some(found)
}

impl Listening {
    /// Binds a listener to each of the addresses. `port`: 0: a free one.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EADDRNOTAVAIL`: an address cannot be used. `ENOMEM`, `EMFILE`.
    fn bind_all(
        device: &Arc<Device>,
        own: &[DeviceAddress],
        port: u16,
        (token, xrc): (Token, bool),
    ) -> Result<Bound> {
        let open = |own: &DeviceAddress, port| {
            let mut addr = own.addr;
            addr.set_port(port);
            Listener::open(device, Some(addr), BACKLOG, token, &[])
        };
        let serve = |own: &DeviceAddress, port| {
            let mut addr = own.addr;
            addr.set_port(port);
            Listener::open_service(device, addr, BACKLOG, token)
        };
        let (first, others) = own.split_first().ok_or(FiErrno::EADDRNOTAVAIL)?;
        // kept until a port is found: each attempt gets another one
        let mut attempts = Vec::new();
        let mut last = FiErrno::EADDRINUSE;
        for _ in 0..PORTS {
            let first = open(first, port)?;
            let shared = first.local_addr()?.port();
            let mut listeners = vec![first];
            let mut services = Vec::new();
            let bound = others.iter().try_for_each(|own| {
                listeners.push(open(own, shared)?);
                Ok(())
            });
            let bound = bound.and_then(|()| {
                own.iter().filter(|_| xrc).try_for_each(|own| {
                    services.push(serve(own, shared)?);
                    Ok(())
                })
            });
            match bound {
                Ok(()) => return Ok((listeners, services)),
                Err(error) if port == 0 && is_in_use(error) => {
                    attempts.push((listeners, services));
                    last = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    /// Binds the listeners. `ipv4`: see [`choose`]. `xrc`: also for links on circuits. `fixed`: the
    /// port of `src` is required; otherwise another one is taken if it is in use.
    ///
    /// # Errors
    /// As [`Self::bind_all`].
    pub(super) fn open(
        device: &Arc<Device>,
        src: Option<SocketAddr>,
        (ipv4, xrc): (Option<bool>, bool),
        fixed: bool,
        token: Token,
    ) -> Result<Self> {
        let all = device.addresses();
        let scopes = all.iter().map(|own| scope_of(&own.addr));
        let scope = scopes.into_iter().find(|scope| *scope != 0);
        let mut own = choose(all, src, ipv4);
        let port = src.map_or(0, |src| src.port());
        let spaces = (token, xrc);
        let (listeners, services) = match Self::bind_all(device, &own, port, spaces) {
            Err(error) if port != 0 && !fixed && is_in_use(error) => {
                info_log!(
                    EpCtrl,
                    "port {port} is in use; the endpoint gets a free port"
                );
                Self::bind_all(device, &own, 0, spaces)
            }
            result => result,
        }?;
        for (own, listener) in own.iter_mut().zip(&listeners) {
            own.addr = listener.local_addr()?;
        }
        let bound = own.iter().map(|own| scope_of(&own.addr));
        let bound = bound.into_iter().find(|scope| *scope != 0);
        Ok(Self {
            listeners,
            services,
            own,
            scope: bound.or(scope).unwrap_or_default(),
        })
    }

    /// Passes the requests of peers to sinks from now on: `sidr` gets those for links on circuits.
    ///
    /// # Errors
    /// Those of the connection manager.
    pub(super) fn listen(&self, sink: &Arc<dyn CmSink>, sidr: &Arc<dyn CmSink>) -> Result<()> {
        let listeners = self.listeners.iter().map(|listener| (listener, sink));
        let services = self.services.iter().map(|service| (service, sidr));
        for (listener, sink) in listeners.chain(services) {
            listener.bind(sink)?;
            listener.listen()?;
        }
        Ok(())
    }

    /// Stops listening. Idempotent.
    pub(super) fn close(&self) {
        for listener in self.listeners.iter().chain(&self.services) {
            listener.close();
        }
    }

    /// The addresses; the first is the endpoint's name.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.own.iter().map(|own| own.addr)
    }

    /// The name, unless the endpoint has stopped listening.
    ///
    /// # Errors
    /// `EOPBADSTATE`: closed.
    pub(super) fn name(&self) -> Result<SocketAddr> {
        let first = self.listeners.first().ok_or(FiErrno::EOPBADSTATE)?;
        first.local_addr()
    }

    /// The scope of link-local addresses of peers.
    pub(super) fn scope(&self) -> u32 {
        self.scope
    }

    /// The addresses from which and to which a peer is dialled.
    pub(super) fn path(&self, to: SocketAddr) -> (Option<SocketAddr>, SocketAddr) {
        let to = scoped(to, self.scope);
        (source(&self.own, to), to)
    }
}

/// A link-local address without scope, with this one.
pub(super) fn scoped(addr: SocketAddr, scope: u32) -> SocketAddr {
    match addr {
        SocketAddr::V6(mut v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => {
            v6.set_scope_id(scope);
            v6.into()
        }
        _ => addr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{devices, replaced};

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// The addresses of a device, in the order in which it lists them.
    fn device() -> Vec<DeviceAddress> {
        let list = [
            ("[fe80::5%3]:0", 64),
            ("10.1.0.1:0", 24),
            ("10.2.0.1:0", 24),
            ("[fd00::1]:0", 64),
            ("127.0.0.1:0", 8),
            ("[::1]:0", 128),
        ];
        let own = |(text, prefix_len): (&str, u8)| DeviceAddress {
            addr: addr(text),
            prefix_len,
            interface: "v0".to_owned(),
            loopback: addr(text).ip().is_loopback(),
        };
        list.into_iter().map(own).collect()
    }

    fn chosen(src: Option<&str>, ipv4: Option<bool>) -> Vec<String> {
        let chosen = choose(device(), src.map(addr), ipv4);
        chosen.iter().map(|own| own.addr.ip().to_string()).collect()
    }

    #[test]
    fn without_a_specific_address_all_are_chosen_and_the_most_useful_one_is_the_name() {
        let v4 = ["10.1.0.1", "10.2.0.1", "127.0.0.1"];
        let all = [
            "10.1.0.1",
            "10.2.0.1",
            "fd00::1",
            "127.0.0.1",
            "::1",
            "fe80::5",
        ];
        assert_eq!(chosen(None, None), all);
        assert_eq!(chosen(None, Some(true))[..3], v4);
        let v6 = [
            "fd00::1",
            "::1",
            "fe80::5",
            "10.1.0.1",
            "10.2.0.1",
            "127.0.0.1",
        ];
        assert_eq!(chosen(None, Some(false)), v6);
        assert_eq!(chosen(Some("0.0.0.0:5"), None), v4);
        assert_eq!(chosen(Some("[::]:5"), None), v6[..3]);
        assert_eq!(chosen(Some("10.2.0.1:5"), None), ["10.2.0.1"]);
        let no_ipv6 = device().into_iter().filter(|own| own.addr.is_ipv4());
        assert!(choose(no_ipv6.collect(), None, Some(false)).is_empty());
    }

    #[test]
    fn a_peer_is_dialled_from_its_network() {
        let from = |to: &str| source(&device(), addr(to)).map(|from| from.to_string());
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(from("10.2.0.9:7"), is("10.2.0.1:0"));
        assert_eq!(from("10.2.0.1:7"), is("10.2.0.1:0"));
        assert_eq!(from("10.9.0.1:7"), is("10.1.0.1:0"));
        assert_eq!(from("127.0.0.1:7"), is("127.0.0.1:0"));
        assert_eq!(from("[fd00::9]:7"), is("[fd00::1]:0"));
        assert_eq!(from("[fe80::9%3]:7"), is("[fe80::5%3]:0"));
        // an endpoint with one address dials from it alone
        let only = choose(device(), Some(addr("127.0.0.1:9")), None);
        assert_eq!(source(&only, addr("10.1.0.1:7")), Some(addr("127.0.0.1:0")));
        assert_eq!(source(&only, addr("[fd00::9]:7")), None);
    }

    #[test]
    fn link_local_addresses_get_the_scope_of_the_interface() {
        assert_eq!(scoped(addr("[fe80::9]:7"), 3), addr("[fe80::9%3]:7"));
        assert_eq!(scoped(addr("[fe80::9%2]:7"), 3), addr("[fe80::9%2]:7"));
        assert_eq!(scoped(addr("[fd00::9]:7"), 3), addr("[fd00::9]:7"));
    }

    #[test]
    fn a_port_at_the_wildcard_address_of_another_listener_is_in_use() {
        let device = devices(&[replaced::with_taken_ports()], false).remove(0);
        let open = |src: SocketAddr, xrc, fixed| {
            let opened = Listening::open(&device, Some(src), (None, xrc), fixed, Token(0));
            opened.map(|listening| listening.name().unwrap())
        };
        let free = open(addr("127.0.0.1:0"), false, false).unwrap();
        replaced::BIND_FAILS.set(1);
        let other = open(free, false, false).unwrap();
        assert_eq!(other.ip(), free.ip());
        assert_ne!(other.port(), free.port());
        replaced::BIND_FAILS.set(1);
        assert_eq!(open(free, false, true), Err(FiErrno::EADDRNOTAVAIL));
        // at one of several addresses, or in the other port space
        replaced::BIND_FAILS.set(2);
        assert!(open(addr("127.0.0.1:0"), true, false).is_ok());
        assert_eq!(replaced::BIND_FAILS.get(), 0);
    }
}
