//! The addresses of `fi_av_insertsvc` and `fi_av_insertsym` (`fi_av(3)`): for each of several
//! consecutive nodes, several consecutive services.

use std::net::{IpAddr, SocketAddr};

use super::text;
use crate::errno::{FiErrno, Result};

/// One address to insert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// An address.
    Addr(SocketAddr),
    /// Names that the caller resolves: a host name, or a service name.
    Name {
        /// Host name or numeric address.
        node: String,
        /// Name or number of the service.
        service: String,
    },
}

#[derive(Clone, Debug)]
enum Node {
    Ip(IpAddr),
    /// A host name: the part before its last digits; their value and count.
    Name(String, Option<(u64, usize)>),
}

#[derive(Clone, Debug)]
enum Service {
    Port(u16),
    Name(String),
}

/// A checked request.
#[derive(Clone, Debug)]
pub struct Symmetric {
    node: Node,
    nodes: usize,
    service: Service,
    services: usize,
}

impl Symmetric {
    /// `nodes` nodes from `node` on, each with `services` services from `service` on. `node` is a
    /// numeric address, a host name, or an address string; `service` is decimal, or a name.
    /// `fi_av_insertsvc` has one of each.
    ///
    /// # Errors
    /// `EINVAL`: an address string with a service, or anything else without one; several nodes from
    /// a host name without digits at its end; a host name with more than 65535 digits at its end;
    /// several services from a name; a `service` above 65535; more than `u32::MAX` addresses.
    pub fn new(node: &str, nodes: usize, service: Option<&str>, services: usize) -> Result<Self> {
        let count = nodes.checked_mul(services).ok_or(FiErrno::EINVAL)?;
        if u32::try_from(count).is_err() || node.is_empty() {
            return Err(FiErrno::EINVAL);
        }
        let (node, service) = if text::looks_like_str(node) {
            if service.is_some() {
                return Err(FiErrno::EINVAL);
            }
            let addr = text::parse(node)?;
            (Node::Ip(addr.ip()), Service::Port(addr.port()))
        } else {
            let service = service.ok_or(FiErrno::EINVAL)?;
            let service = match service.parse() {
                Ok(port) => Service::Port(port),
                // a number that is no port
                Err(_) if service.bytes().all(|byte| byte.is_ascii_digit()) => {
                    return Err(FiErrno::EINVAL);
                }
                Err(_) => Service::Name(service.to_owned()),
            };
            let ip = node.parse().map(Node::Ip);
            (ip.or_else(|_| split(node))?, service)
        };
        let this = Self {
            node,
            nodes,
            service,
            services,
        };
        // names without a number are the first and only ones
        let counted_up = (nodes <= 1 || this.counts_nodes())
            && (services <= 1 || matches!(this.service, Service::Port(_)));
        match count == 0 || counted_up {
            true => Ok(this),
            false => Err(FiErrno::EINVAL),
        }
    }

    /// The number of addresses.
    #[must_use]
    pub fn count(&self) -> usize {
        self.nodes * self.services
    }

    /// The addresses in the order of insertion: all services of a node before the next node.
    /// `EINVAL`: a port above 65535, or a node beyond the last address or number.
    pub fn targets(&self) -> impl Iterator<Item = Result<Target>> + '_ {
        // without services no node has an address, and there may be `usize::MAX` nodes
        let nodes = if self.services == 0 { 0 } else { self.nodes };
        (0..nodes).flat_map(move |n| {
            let node = self.node(n);
            (0..self.services).map(move |n| {
                let existing = node.as_ref().zip(self.service(n));
                let (node, service) = existing.ok_or(FiErrno::EINVAL)?;
                Ok(target(node, service))
            })
        })
    }

    /// Whether there are nodes after the first one.
    fn counts_nodes(&self) -> bool {
        match &self.node {
            Node::Ip(_) => true,
            // an interface's name behind an address is not counted up
            Node::Name(name, number) => number.is_some() && !name.contains([':', '%']),
        }
    }

    /// The node after `n` others.
    fn node(&self, n: usize) -> Option<Node> {
        let n64 = u64::try_from(n).ok()?;
        Some(match &self.node {
            Node::Ip(IpAddr::V4(ip)) => {
                let bits = u32::from(*ip).checked_add(u32::try_from(n).ok()?)?;
                Node::Ip(IpAddr::V4(bits.into()))
            }
            Node::Ip(IpAddr::V6(ip)) => {
                let bits = u128::from(*ip).checked_add(n64.into())?;
                Node::Ip(IpAddr::V6(bits.into()))
            }
            Node::Name(..) if n == 0 => self.node.clone(),
            Node::Name(name, Some((number, width))) => {
                Node::Name(name.clone(), Some((number.checked_add(n64)?, *width)))
            }
            Node::Name(..) => return None,
        })
    }

    /// The service after `n` others.
    fn service(&self, n: usize) -> Option<Service> {
        match &self.service {
            Service::Port(port) => port.checked_add(u16::try_from(n).ok()?).map(Service::Port),
            Service::Name(_) if n == 0 => Some(self.service.clone()),
            Service::Name(_) => None,
        }
    }
}

/// A host name and the number at its end, which keeps its leading zeros.
///
/// # Errors
/// `EINVAL`: more digits than `format` accepts as a width.
fn split(name: &str) -> Result<Node> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &name[stem.len()..];
    if u16::try_from(digits.len()).is_err() {
        return Err(FiErrno::EINVAL);
    }
    Ok(match digits.parse() {
        Ok(number) => Node::Name(stem.to_owned(), Some((number, digits.len()))),
        Err(_) => Node::Name(name.to_owned(), None),
    })
}

fn target(node: &Node, service: Service) -> Target {
    let node = match (node, &service) {
        (Node::Ip(ip), Service::Port(port)) => return Target::Addr(SocketAddr::new(*ip, *port)),
        (Node::Ip(ip), Service::Name(_)) => ip.to_string(),
        (Node::Name(name, None), _) => name.clone(),
        (Node::Name(name, Some((number, width))), _) => format!("{name}{number:0width$}"),
    };
    let service = match service {
        Service::Port(port) => port.to_string(),
        Service::Name(name) => name,
    };
    Target::Name { node, service }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(node: &str, nodes: usize, service: &str, services: usize) -> Result<Vec<String>> {
        let service = (!service.is_empty()).then_some(service);
        let request = Symmetric::new(node, nodes, service, services)?;
        let targets: Vec<String> = request
            .targets()
            .map(|target| match target {
                Ok(Target::Addr(addr)) => addr.to_string(),
                Ok(Target::Name { node, service }) => format!("{node} {service}"),
                Err(error) => format!("{error:?}"),
            })
            .collect();
        assert_eq!(targets.len(), request.count());
        Ok(targets)
    }

    #[test]
    fn services_are_counted_before_nodes() {
        // the example of fi_av(3)
        assert_eq!(
            list("10.1.1.1", 2, "5000", 2).unwrap(),
            [
                "10.1.1.1:5000",
                "10.1.1.1:5001",
                "10.1.1.2:5000",
                "10.1.1.2:5001"
            ]
        );
        assert_eq!(
            list("host10", 2, "5000", 2).unwrap(),
            ["host10 5000", "host10 5001", "host11 5000", "host11 5001"]
        );
        assert_eq!(
            list("10.1.1.255", 2, "1", 1).unwrap(),
            ["10.1.1.255:1", "10.1.2.0:1"]
        );
        assert_eq!(
            list("fd00::ffff:ffff", 2, "1", 1).unwrap(),
            ["[fd00::ffff:ffff]:1", "[fd00::1:0:0]:1"]
        );
        assert_eq!(
            list("node099", 3, "7", 1).unwrap(),
            ["node099 7", "node100 7", "node101 7"]
        );
        assert_eq!(list("n9", 2, "7", 1).unwrap(), ["n9 7", "n10 7"]);
        assert_eq!(
            list("fi_sockaddr_in://10.0.0.1:5", 2, "", 2).unwrap(),
            ["10.0.0.1:5", "10.0.0.1:6", "10.0.0.2:5", "10.0.0.2:6"]
        );
        assert_eq!(list("10.0.0.1", 0, "5", 3).unwrap(), [""; 0]);
        assert_eq!(list("10.0.0.1", 3, "5", 0).unwrap(), [""; 0]);
        // with a look at each node it would take years
        assert_eq!(list("10.0.0.1", usize::MAX, "5", 0).unwrap(), [""; 0]);
    }

    #[test]
    fn one_address_may_need_any_resolution() {
        assert_eq!(list("localhost", 1, "http", 1).unwrap(), ["localhost http"]);
        assert_eq!(
            list("10.0.0.1", 2, "http", 1).unwrap(),
            ["10.0.0.1 http", "10.0.0.2 http"]
        );
        assert_eq!(list("fe80::1%eth0", 1, "5", 1).unwrap(), ["fe80::1%eth0 5"]);
        let zeros = "0".repeat(65_534);
        assert_eq!(
            list(&format!("x{zeros}7"), 1, "5", 1).unwrap(),
            [format!("x{zeros}7 5")]
        );
        let longer = format!("x{zeros}07");
        assert_eq!(list(&longer, 1, "5", 1), Err(FiErrno::EINVAL));
        let long = "x99999999999999999999999";
        assert_eq!(list(long, 1, "5", 1).unwrap(), [format!("{long} 5")]);
    }

    /// Each address of the range fails or exists for itself.
    #[test]
    fn a_range_may_go_beyond_the_last_address() {
        let none = format!("{:?}", FiErrno::EINVAL);
        let last = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
        assert_eq!(
            list("255.255.255.255", 2, "65535", 2).unwrap(),
            ["255.255.255.255:65535", &none, &none, &none]
        );
        assert_eq!(
            list("10.0.0.1", 2, "65535", 2).unwrap(),
            ["10.0.0.1:65535", &none, "10.0.0.2:65535", &none]
        );
        assert_eq!(
            list(last, 2, "1", 1).unwrap(),
            [format!("[{last}]:1"), none.clone()]
        );
        let name = "host18446744073709551615";
        assert_eq!(list(name, 2, "1", 1).unwrap(), [format!("{name} 1"), none]);
    }

    #[test]
    fn requests_that_name_no_range_are_refused() {
        for (node, nodes, service, services) in [
            ("10.0.0.1", 1, "65536", 1),
            ("10.0.0.1", 1, "http", 2),
            ("10.0.0.1", 1, "", 1),
            ("host", 2, "1", 1),
            ("fe80::1%eth0", 2, "1", 1),
            ("fi_sockaddr_in://10.0.0.1:5", 1, "5", 1),
            ("fi_sockaddr_in://10.0.0:5", 1, "", 1),
            ("", 1, "5", 1),
            ("10.0.0.1", usize::MAX, "5", 2),
            ("::", 1 << 33, "5", 1),
        ] {
            let found = list(node, nodes, service, services);
            assert_eq!(
                found,
                Err(FiErrno::EINVAL),
                "{node} {nodes} {service} {services}"
            );
        }
    }
}
