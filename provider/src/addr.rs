//! Addresses as applications pass them: socket addresses, or address strings
//! ([`weft::av::text`]), for instance `fi_sockaddr_in://192.0.2.1:7471` (fi_getinfo(3)).

use std::ffi::c_void;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libfabric_sys::{
    FI_ADDR_STR, FI_FORMAT_UNSPEC, FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOCKADDR_IP,
};
pub(crate) use weft::av::text::{looks_like_str, parse, to_string};
use weft::errno::{FiErrno, Result};

/// A format of addresses (`fi_info.addr_format`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    /// Any socket address.
    Sockaddr,
    /// IPv4 or IPv6 (releases after 2.1).
    Ip,
    /// `struct sockaddr_in`
    In,
    /// `struct sockaddr_in6`
    In6,
    /// A string.
    Str,
}

impl Format {
    /// The format with this number; `None` for `FI_FORMAT_UNSPEC`.
    ///
    /// # Errors
    /// `ENODATA`: a format that is not supported.
    pub(crate) fn of(number: u32) -> Result<Option<Self>> {
        Ok(Some(match number {
            FI_FORMAT_UNSPEC => return Ok(None),
            FI_SOCKADDR => Self::Sockaddr,
            FI_SOCKADDR_IP => Self::Ip,
            FI_SOCKADDR_IN => Self::In,
            FI_SOCKADDR_IN6 => Self::In6,
            FI_ADDR_STR => Self::Str,
            _ => return Err(FiErrno::ENODATA),
        }))
    }

    /// The format's number in `fi_info.addr_format`.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Sockaddr => FI_SOCKADDR,
            Self::Ip => FI_SOCKADDR_IP,
            Self::In => FI_SOCKADDR_IN,
            Self::In6 => FI_SOCKADDR_IN6,
            Self::Str => FI_ADDR_STR,
        }
    }

    /// The format of an address if none was requested.
    pub(crate) fn native(addr: &SocketAddr) -> Self {
        if addr.is_ipv4() { Self::In } else { Self::In6 }
    }

    /// Whether this format has addresses of the family of `addr`.
    pub(crate) fn fits(self, addr: &SocketAddr) -> bool {
        match self {
            Self::Sockaddr | Self::Ip | Self::Str => true,
            Self::In => addr.is_ipv4(),
            Self::In6 => addr.is_ipv6(),
        }
    }

    /// Whether this format can express all of `addr`. A string has no scope, without which an IPv6
    /// link-local address cannot be bound or reached.
    pub(crate) fn expresses(self, addr: &SocketAddr) -> bool {
        let needs_scope = matches!(addr, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local());
        self.fits(addr) && !(needs_scope && self == Self::Str)
    }

    /// Whether addresses of the format `other` can be read as ones of this format.
    pub(crate) fn reads(self, other: Self) -> bool {
        match self {
            Self::Sockaddr | Self::Ip => other != Self::Str,
            Self::In | Self::In6 | Self::Str => self == other,
        }
    }

    /// Whether the addresses of this format are IPv4 addresses; `None`: they can have either
    /// family.
    pub(crate) fn is_ipv4(self) -> Option<bool> {
        match self {
            Self::In => Some(true),
            Self::In6 => Some(false),
            Self::Sockaddr | Self::Ip | Self::Str => None,
        }
    }

    /// Every address of this host, with a port that is assigned, if the format admits one family
    /// alone that is not the default.
    pub(crate) fn any(self) -> Option<SocketAddr> {
        (self.is_ipv4() == Some(false)).then(|| (Ipv6Addr::UNSPECIFIED, 0).into())
    }

    /// Reads an address of this format.
    ///
    /// # Errors
    /// `EINVAL`: NULL, too short, of another family, or not an address.
    ///
    /// # Safety
    /// `addr` is NULL or has the memory of its format: `len` bytes if `len` is `Some`, a C string
    /// for [`Format::Str`].
    pub(crate) unsafe fn read(self, addr: *const c_void, len: Option<usize>) -> Result<SocketAddr> {
        if addr.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let parsed = if self == Self::Str {
            let room = len.unwrap_or(MAX_STR);
            // SAFETY: a C string, or at least `len` bytes, by the caller's promise.
            let text = unsafe {
                let used = libc::strnlen(addr.cast(), room.min(MAX_STR));
                std::slice::from_raw_parts(addr.cast::<u8>(), used)
            };
            parse(std::str::from_utf8(text).map_err(|_| FiErrno::EINVAL)?)?
        } else {
            // SAFETY: the caller passes NULL or the memory of this format: `len` bytes, or a C
            // string.
            unsafe { read_sockaddr(addr, len)? }
        };
        if self.fits(&parsed) {
            Ok(parsed)
        } else {
            Err(FiErrno::EINVAL)
        }
    }

    /// The bytes of `addr` in this format; a string has its NUL.
    pub(crate) fn bytes(self, addr: &SocketAddr) -> Vec<u8> {
        if self == Self::Str {
            let mut text = to_string(addr).into_bytes();
            text.push(0);
            return text;
        }
        match addr {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(v4.ip().octets()),
                    },
                    sin_zero: [0; 8],
                };
                bytes_of(&raw)
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                };
                bytes_of(&raw)
            }
        }
    }

    /// The result of `fi_getname(3)` and `fi_getpeer(3)`: copies the bytes of the address that fit,
    /// and sets `*len` to the length of the whole address.
    ///
    /// # Errors
    /// `EINVAL`: `len` is NULL. `ETOOSMALL`: the address does not fit; `*len` is set.
    ///
    /// # Safety
    /// `len` is NULL or writable; `buf` is NULL or has `*len` bytes.
    pub(crate) unsafe fn answer(
        self,
        addr: &SocketAddr,
        buf: *mut c_void,
        len: *mut usize,
    ) -> Result<()> {
        if len.is_null() {
            return Err(FiErrno::EINVAL);
        }
        let bytes = self.bytes(addr);
        // SAFETY: not NULL, writable by the caller's promise.
        let room = unsafe { len.replace(bytes.len()) };
        let room = if buf.is_null() { 0 } else { room };
        let count = room.min(bytes.len());
        if count != 0 {
            // SAFETY: `buf` has `room` bytes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), count) };
        }
        if count < bytes.len() {
            return Err(FiErrno::ETOOSMALL);
        }
        Ok(())
    }
}

/// Maximum length of an address string, in bytes.
const MAX_STR: usize = 128;

fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: a sockaddr has no padding (asserted by its C layout), so all its bytes are set.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
        .to_vec()
}

/// # Safety
/// `addr` is a socket address of `len` bytes, or of the size of its family.
unsafe fn read_sockaddr(addr: *const c_void, len: Option<usize>) -> Result<SocketAddr> {
    let has = |size: usize| len.is_none_or(|len| len >= size);
    if !has(size_of::<libc::sa_family_t>()) {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: the address has at least its family; it may be unaligned.
    let family = unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() };
    match i32::from(family) {
        libc::AF_INET if has(size_of::<libc::sockaddr_in>()) => {
            // SAFETY: the family and the length are those of this type.
            let raw = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Ok(SocketAddr::V4(SocketAddrV4::new(
                Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes()),
                u16::from_be(raw.sin_port),
            )))
        }
        libc::AF_INET6 if has(size_of::<libc::sockaddr_in6>()) => {
            // SAFETY: the family and the length are those of this type.
            let raw = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Ok(SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from(raw.sin6_addr.s6_addr),
                u16::from_be(raw.sin6_port),
                raw.sin6_flowinfo,
                raw.sin6_scope_id,
            )))
        }
        _ => Err(FiErrno::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addrs() -> [SocketAddr; 5] {
        [
            "127.0.0.1:7471".parse().unwrap(),
            "[2001:db8::1]:0".parse().unwrap(),
            "0.0.0.0:65535".parse().unwrap(),
            "[fe80::1%3]:7".parse().unwrap(),
            "[fe80::1]:7".parse().unwrap(),
        ]
    }

    #[test]
    fn strings_are_read_as_no_other_format() {
        let all = [
            Format::Sockaddr,
            Format::Ip,
            Format::In,
            Format::In6,
            Format::Str,
        ];
        let read_by = |format: Format| all.map(|other| format.reads(other));
        assert_eq!(read_by(Format::Sockaddr), [true, true, true, true, false]);
        assert_eq!(read_by(Format::Ip), [true, true, true, true, false]);
        assert_eq!(read_by(Format::In), [false, false, true, false, false]);
        assert_eq!(read_by(Format::Str), [false, false, false, false, true]);
    }

    #[test]
    fn every_format_reads_what_it_writes() {
        for addr in addrs() {
            for format in [
                Format::Sockaddr,
                Format::Ip,
                Format::In,
                Format::In6,
                Format::Str,
            ] {
                if !format.expresses(&addr) {
                    assert!(format == Format::Str || !format.fits(&addr), "{addr}");
                    continue;
                }
                let bytes = format.bytes(&addr);
                // SAFETY: the vector has those bytes.
                let back = unsafe { format.read(bytes.as_ptr().cast(), Some(bytes.len())) };
                assert_eq!(back, Ok(addr), "{format:?}");
                // SAFETY: the vector has more bytes than the length that is passed.
                let short = unsafe { format.read(bytes.as_ptr().cast(), Some(bytes.len() / 2)) };
                assert_ne!(short, Ok(addr), "{format:?} of too few bytes");
            }
        }
    }

    #[test]
    fn the_wrong_family_is_refused() {
        let v4 = Format::Sockaddr.bytes(&addrs()[0]);
        // SAFETY: the vector has those bytes.
        let read = unsafe { Format::In6.read(v4.as_ptr().cast(), Some(v4.len())) };
        assert_eq!(read, Err(FiErrno::EINVAL));
    }

    #[test]
    fn a_short_buffer_gets_a_part_and_the_length() {
        let addr = addrs()[0];
        let mut buf = [0xee_u8; 16];
        let mut len = 4;
        // SAFETY: 4 of 16 bytes.
        let ret = unsafe { Format::In.answer(&addr, buf.as_mut_ptr().cast(), &raw mut len) };
        assert_eq!((ret, len), (Err(FiErrno::ETOOSMALL), 16));
        assert_eq!(buf[4], 0xee);
        // SAFETY: 16 bytes.
        let ret = unsafe { Format::In.answer(&addr, buf.as_mut_ptr().cast(), &raw mut len) };
        assert_eq!(ret, Ok(()));
    }
}
