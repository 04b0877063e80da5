//! Conversion of socket addresses between Rust's and C's types.

#![allow(unsafe_code, reason = "reads and fills C's tagged union of addresses")]

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

/// An IPv4 or IPv6 address as C passes it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct SockAddr(sockaddr_storage);

impl SockAddr {
    /// Reads an address by its `sa_family`; `None` for NULL and for families other than IPv4 and
    /// IPv6.
    ///
    /// # Safety
    /// `addr` is NULL, or points to an address with the size of its family.
    pub unsafe fn read(addr: *const sockaddr) -> Option<SocketAddr> {
        if addr.is_null() {
            return None;
        }
        // SAFETY: every address begins with its family; the read does not require alignment.
        match i32::from(unsafe { (&raw const (*addr).sa_family).read_unaligned() }) {
            libc::AF_INET => {
                // SAFETY: the caller promises the bytes of the family.
                let sin = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
                let ip = Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr));
                Some(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the caller promises the bytes of the family.
                let sin6 = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
                let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
                let port = u16::from_be(sin6.sin6_port);
                Some(SocketAddrV6::new(ip, port, sin6.sin6_flowinfo, sin6.sin6_scope_id).into())
            }
            _ => None,
        }
    }

    /// The address as C's type.
    pub fn as_mut_ptr(&mut self) -> *mut sockaddr {
        (&raw mut self.0).cast()
    }
}

impl From<SocketAddr> for SockAddr {
    fn from(addr: SocketAddr) -> Self {
        // SAFETY: all zeros is an address of no family.
        let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
        match addr {
            SocketAddr::V4(v4) => {
                let sin = (&raw mut storage).cast::<sockaddr_in>();
                // SAFETY: the storage is large enough for every family, aligned, and all zeros.
                unsafe {
                    (*sin).sin_family = libc::AF_INET as u16;
                    (*sin).sin_port = v4.port().to_be();
                    (*sin).sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                }
            }
            SocketAddr::V6(v6) => {
                let sin6 = (&raw mut storage).cast::<sockaddr_in6>();
                // SAFETY: the storage is large enough for every family, aligned, and all zeros.
                unsafe {
                    (*sin6).sin6_family = libc::AF_INET6 as u16;
                    (*sin6).sin6_port = v6.port().to_be();
                    (*sin6).sin6_flowinfo = v6.flowinfo();
                    (*sin6).sin6_scope_id = v6.scope_id();
                    (*sin6).sin6_addr.s6_addr = v6.ip().octets();
                }
            }
        }
        Self(storage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_survive() {
        for text in ["127.0.0.1:4711", "[::1]:9", "[fe80::1%3]:65535"] {
            let addr: SocketAddr = text.parse().unwrap();
            let mut c = SockAddr::from(addr);
            // SAFETY: the storage has room for every family.
            assert_eq!(unsafe { SockAddr::read(c.as_mut_ptr()) }, Some(addr));
        }
    }

    #[test]
    fn other_families_and_null_are_nothing() {
        let mut c = SockAddr::from(SocketAddr::from(([0, 0, 0, 0], 0)));
        c.0.ss_family = libc::AF_UNIX as u16;
        // SAFETY: the storage has room for every family.
        assert_eq!(unsafe { SockAddr::read(c.as_mut_ptr()) }, None);
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { SockAddr::read(std::ptr::null()) }, None);
    }
}
