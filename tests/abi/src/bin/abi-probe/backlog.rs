//! `FI_WEFT_BACKLOG`: the number of connection requests that soft0 queues for a passive endpoint
//! whose event queue is not read.

use std::mem::{offset_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close};
use libfabric_sys::*;

/// Listens, then connects until the listener's queue is full. No thread reads the passive
/// endpoint's event queue.
pub(crate) fn run(lib: &Lib, expected: usize) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
    let mut pep = null_mut();
    // SAFETY: objects as they are opened, a name with room for any address.
    let port = unsafe {
        let fabric = setup.fabric;
        let open = (*(*fabric).ops).passive_ep.expect("a slot");
        assert_eq!(
            open(fabric, setup.info.first(), &raw mut pep, null_mut()),
            0
        );
        assert_eq!(bind(pep, setup.eq, 0), 0);
        assert_eq!(call!((*pep).cm, listen, pep), 0);
        let mut name: libc::sockaddr_in6 = zeroed();
        let mut len = size_of::<libc::sockaddr_in6>();
        let to = (&raw mut name).cast();
        assert_eq!(
            call!((*pep).cm, getname, &raw mut (*pep).fid, to, &raw mut len),
            0
        );
        // the port is at the same offset in both address families
        u16::from_be(name.sin6_port)
    };
    let name = listening(port);
    let mut clients = Vec::new();
    while let Some(client) = knock(&name) {
        clients.push(client);
        assert!(clients.len() <= 2000, "there is no end to it");
    }
    assert_eq!(clients.len(), expected, "at {name}");
    // SAFETY: open, and not used any more.
    assert_eq!(unsafe { close(pep) }, 0);
    setup.close();
}

/// The name of soft0's listening socket on this port (`docs/softverbs-cm.md`).
fn listening(port: u16) -> String {
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("a list of sockets");
    let end = format!("/{port}");
    let mut names = sockets.lines().filter_map(|line| {
        let name = line.split_whitespace().last()?.strip_prefix('@')?;
        (name.starts_with("softverbs/") && name.ends_with(&end)).then(|| name.to_owned())
    });
    names.next().expect("a listening socket")
}

/// Connects to the socket of this name; `None` if its queue is full.
fn knock(name: &str) -> Option<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a new descriptor; an address of the length that is given.
    unsafe {
        let raw = libc::socket(libc::AF_UNIX, kind, 0);
        assert!(raw >= 0);
        let fd = OwnedFd::from_raw_fd(raw);
        let mut address: libc::sockaddr_un = zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        let len = offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
        let len = len as libc::socklen_t;
        if libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) == 0 {
            return Some(fd);
        }
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
        None
    }
}
