//! Address strings (`FI_ADDR_STR`, `fi_getinfo(3)`): `fi_sockaddr_in://192.0.2.1:7471` and
//! `fi_sockaddr_in6://[2001:db8::1]:7471`, and the same with the format `fi_sockaddr`, whose
//! address in brackets is IPv6. And the rule for short buffers of `fi_av_lookup` and
//! `fi_av_straddr`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::errno::{FiErrno, Result};

/// Whether `text` has the prefix of an address string; any other text is a host name.
#[must_use]
pub fn looks_like_str(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    let formats = ["fi_sockaddr://", "fi_sockaddr_in://", "fi_sockaddr_in6://"];
    formats.iter().any(|format| text.starts_with(format))
}

/// Reads an address string.
///
/// # Errors
/// `EINVAL`: not an address string.
pub fn parse(text: &str) -> Result<SocketAddr> {
    let (format, rest) = text.split_once("://").ok_or(FiErrno::EINVAL)?;
    // A missing port is port 0, as in libfabric's own parser.
    let whole = |ip: IpAddr, port: &str| -> Result<SocketAddr> {
        let port = match port.strip_prefix(':') {
            None | Some("") => 0,
            Some(port) => port.parse().map_err(|_| FiErrno::EINVAL)?,
        };
        Ok(SocketAddr::new(ip, port))
    };
    // of either family; IPv6 addresses are in brackets
    let format = match (format, rest.starts_with('[')) {
        (either, false) if either.eq_ignore_ascii_case("fi_sockaddr") => "fi_sockaddr_in",
        (either, true) if either.eq_ignore_ascii_case("fi_sockaddr") => "fi_sockaddr_in6",
        (format, _) => format,
    };
    if format.eq_ignore_ascii_case("fi_sockaddr_in") {
        let (ip, port) = rest.split_at(rest.find(':').unwrap_or(rest.len()));
        let ip: Ipv4Addr = if ip.is_empty() {
            Ipv4Addr::UNSPECIFIED
        } else {
            ip.parse().map_err(|_| FiErrno::EINVAL)?
        };
        whole(ip.into(), port)
    } else if format.eq_ignore_ascii_case("fi_sockaddr_in6") {
        let (ip, port) = rest
            .strip_prefix('[')
            .and_then(|rest| rest.split_once(']'))
            .ok_or(FiErrno::EINVAL)?;
        let ip: Ipv6Addr = ip.parse().map_err(|_| FiErrno::EINVAL)?;
        if !port.is_empty() && !port.starts_with(':') {
            return Err(FiErrno::EINVAL);
        }
        whole(ip.into(), port)
    } else {
        Err(FiErrno::EINVAL)
    }
}

/// Writes an address string.
#[must_use]
pub fn to_string(addr: &SocketAddr) -> String {
    match addr {
        SocketAddr::V4(v4) => format!("fi_sockaddr_in://{}:{}", v4.ip(), v4.port()),
        SocketAddr::V6(v6) => format!("fi_sockaddr_in6://[{}]:{}", v6.ip(), v6.port()),
    }
}

/// The answer of `fi_av_lookup`: copies the bytes that fit, and returns the length of the whole
/// address. The call succeeds although the address is truncated (`fi_av(3)`).
pub fn answer_bytes(addr: &[u8], buf: &mut [u8]) -> usize {
    let count = addr.len().min(buf.len());
    buf[..count].copy_from_slice(&addr[..count]);
    addr.len()
}

/// The answer of `fi_av_straddr`, and of `fi_av_lookup` with `FI_ADDR_STR`: as [`answer_bytes`],
/// but a truncated string ends with a NUL too. The length includes the NUL.
pub fn answer_text(text: &str, buf: &mut [u8]) -> usize {
    let count = text.len().min(buf.len().saturating_sub(1));
    buf[..count].copy_from_slice(&text.as_bytes()[..count]);
    if let Some(end) = buf.get_mut(count) {
        *end = 0;
    }
    text.len() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_read_and_written() {
        for (text, addr) in [
            ("fi_sockaddr_in://127.0.0.1:7471", "127.0.0.1:7471"),
            ("fi_sockaddr_in6://[2001:db8::1]:0", "[2001:db8::1]:0"),
            ("fi_sockaddr_in://0.0.0.0:65535", "0.0.0.0:65535"),
        ] {
            let addr: SocketAddr = addr.parse().unwrap();
            assert_eq!(parse(text), Ok(addr));
            assert_eq!(to_string(&addr), text);
            assert!(looks_like_str(text));
        }
        assert_eq!(
            parse("FI_SOCKADDR_IN://:5"),
            Ok("0.0.0.0:5".parse().unwrap())
        );
        assert_eq!(
            parse("fi_sockaddr_in://1.2.3.4"),
            Ok("1.2.3.4:0".parse().unwrap())
        );
        for (text, addr) in [
            ("fi_sockaddr://10.31.6.12:7471", "10.31.6.12:7471"),
            ("fi_sockaddr://[2001:db8::1]:5", "[2001:db8::1]:5"),
        ] {
            assert!(looks_like_str(text));
            assert_eq!(parse(text), Ok(addr.parse().unwrap()));
        }
    }

    #[test]
    fn rubbish_is_refused() {
        for text in [
            "",
            "10.0.0.1",
            "fi_sockaddr_in://300.0.0.1:1",
            "fi_sockaddr_in://1.2.3.4:99999",
            "fi_sockaddr_in6://::1:5",
            "fi_sockaddr_in6://[::1]5",
            "fi_sockaddr_ib://x",
            "fi_sockaddr://::1:5",
            "fi_sockaddr://1.2.3.4:5?qos=3",
        ] {
            assert_eq!(parse(text), Err(FiErrno::EINVAL), "{text}");
        }
    }

    #[test]
    fn a_short_buffer_gets_a_part_and_the_length() {
        let mut buf = [0xee; 4];
        assert_eq!(answer_bytes(&[1, 2, 3, 4, 5, 6], &mut buf), 6);
        assert_eq!(buf, [1, 2, 3, 4]);
        assert_eq!(answer_bytes(&[7, 8], &mut buf), 2);
        assert_eq!(buf, [7, 8, 3, 4]);
        assert_eq!(answer_bytes(&[7, 8], &mut []), 2);
        assert_eq!(answer_text("fi_x", &mut buf), 5);
        assert_eq!(&buf, b"fi_\0");
        assert_eq!(answer_text("ab", &mut buf), 3);
        assert_eq!(&buf[..3], b"ab\0");
        assert_eq!(answer_text("ab", &mut []), 3);
    }
}
