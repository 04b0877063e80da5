//! The user of a socket by its inode number, sock_diag(7): unlike a connection to a listening
//! socket, the request leaves nothing in a queue.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::sys::{Errno, Res, check};

/// linux/sock_diag.h
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// linux/unix_diag.h
const UDIAG_SHOW_NAME: u32 = 1;
const UDIAG_SHOW_UID: u32 = 0x40;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_SHUTDOWN: u16 = 6;
const UNIX_DIAG_UID: u16 = 7;
/// Bytes of the header of a message, and of `struct unix_diag_msg` behind it.
const HEAD: usize = size_of::<libc::nlmsghdr>() + 16;

/// A message with `struct unix_diag_req`.
#[repr(C)]
struct Request {
    head: libc::nlmsghdr,
    family: u8,
    protocol: u8,
    pad: u16,
    states: u32,
    inode: u32,
    show: u32,
    cookie: [u32; 2],
}

const _: () = assert!(size_of::<Request>() == size_of::<libc::nlmsghdr>() + 24);

/// Maximum number of inode numbers of a name: for each one the kernel walks all sockets of the
/// network namespace.
const MOST_INODES: usize = 4;

/// Inode numbers, at most [`MOST_INODES`], that the list has in lines with this abstract name.
/// `lists` has the contents of `/proc/net/unix`, where names are not escaped: a process of another
/// user can bind a name with a newline, which adds a line with any inode number and any name.
pub(super) fn inodes(lists: &[u8], name: &str) -> impl Iterator<Item = u32> {
    let listed = lists.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
        let inode = words.nth(6)?.parse::<u32>().ok()?;
        let path = words.next()?.strip_prefix('@')?;
        (path == name && inode != 0).then_some(inode)
    });
    let distinct: BTreeSet<u32> = listed.collect();
    distinct.into_iter().take(MOST_INODES)
}

/// The user that has made the `AF_UNIX` socket of this network namespace with this inode number and
/// this abstract name, as the kernel shows it to this process. `None`: no such socket exists, it
/// has another name, or it was shut down; or the kernel has no answer (before Linux 5.3, or without
/// `CONFIG_UNIX_DIAG`).
///
/// # Errors
/// Those of `socket(2)`, `send(2)` and `recv(2)`.
pub(super) fn user_of(inode: u32, name: &str) -> Res<Option<u32>> {
    let request = Request {
        head: libc::nlmsghdr {
            nlmsg_len: size_of::<Request>() as u32,
            nlmsg_type: SOCK_DIAG_BY_FAMILY,
            nlmsg_flags: libc::NLM_F_REQUEST as u16,
            nlmsg_seq: 0,
            nlmsg_pid: 0,
        },
        family: libc::AF_UNIX as u8,
        protocol: 0,
        pad: 0,
        states: u32::MAX,
        inode,
        show: UDIAG_SHOW_NAME | UDIAG_SHOW_UID,
        // INET_DIAG_NOCOOKIE
        cookie: [u32::MAX; 2],
    };
    let (kind, protocol) = (libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_SOCK_DIAG);
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(libc::AF_NETLINK, kind, protocol) })?;
    // SAFETY: the call has just returned this descriptor; no other owner exists.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let (from, len) = (&raw const request, size_of::<Request>());
    // SAFETY: `len` readable bytes.
    if unsafe { libc::send(fd.as_raw_fd(), from.cast(), len, 0) } < 0 {
        return Err(Errno::last());
    }
    let mut answer = [0; 256];
    let (to, room) = (answer.as_mut_ptr(), answer.len());
    // The kernel has answered when send(2) returns.
    // SAFETY: `room` writable bytes.
    let got = unsafe { libc::recv(fd.as_raw_fd(), to.cast(), room, libc::MSG_DONTWAIT) };
    let len = usize::try_from(got).map_err(|_| Errno::last())?;
    Ok(answer.get(..len).and_then(|answer| user_in(answer, name)))
}

/// The user in an answer of the kernel about a socket with this abstract name.
fn user_in(answer: &[u8], name: &str) -> Option<u32> {
    let half = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..)?.first_chunk()?;
        Some(u16::from_ne_bytes(*bytes))
    };
    // else an error
    if half(answer, 4)? != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let mut rest = answer.get(HEAD..)?;
    let (mut is_named, mut user, mut shutdown) = (false, None, None);
    // attributes: length with this header, type, contents; each begins at a multiple of 4 bytes
    while let (Some(len), Some(kind)) = (half(rest, 0), half(rest, 2)) {
        let len = usize::from(len);
        let contents = rest.get(4..len)?;
        match kind {
            UNIX_DIAG_NAME => is_named = contents.strip_prefix(b"\0") == Some(name.as_bytes()),
            UNIX_DIAG_SHUTDOWN => shutdown = contents.first().copied(),
            UNIX_DIAG_UID => user = contents.first_chunk().copied().map(u32::from_ne_bytes),
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    user.filter(|_| is_named && shutdown == Some(0))
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;
    use crate::sys;

    #[test]
    fn the_user_of_a_socket() {
        let name = format!("softverbs-test/{}/user", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        let fd = OwnedFd::from(socket.try_clone().unwrap());
        let inode = u32::try_from(sys::inode_of(&fd).unwrap()).unwrap();
        let user = user_of(inode, &name);
        if !matches!(user, Ok(Some(_))) {
            println!("skipped: the kernel does not tell users of sockets: {user:?}");
            return;
        }
        assert_eq!(user, Ok(Some(sys::effective_uid())));
        let (start, longer) = (&name[..name.len() - 1], format!("{name}0"));
        for other in ["", start, &longer] {
            assert_eq!(user_of(inode, other), Ok(None), "{other}");
        }
        socket.shutdown(Shutdown::Both).unwrap();
        assert_eq!(user_of(inode, &name), Ok(None));
        assert_eq!(user_of(0, &name), Ok(None));
    }

    /// A process of another user can add lines with this name.
    #[test]
    fn a_name_has_few_inodes() {
        let line = |inode: u32| format!("0: 2 0 10000 5 1 {inode} @a/b {inode}\n");
        let list: String = [9, 0, 9, 8, 7, 8, 6, 5, 4].map(line).concat();
        assert_eq!(inodes(list.as_bytes(), "a/b").count(), MOST_INODES);
        let list: String = [9, 0, 9, 8].map(line).concat();
        let found: Vec<u32> = inodes(list.as_bytes(), "a/b").collect();
        assert_eq!(found, [8, 9]);
        assert_eq!(inodes(list.as_bytes(), "a").count(), 0);
    }
}
