//! Peers that violate the protocol of the connection manager.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::repeats::with_descriptors;
use super::*;

/// A socket of the connection manager's type, which the standard library cannot create.
fn packet_socket() -> OwnedFd {
    // SAFETY: no memory is passed; the result is checked and owned by nobody else.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// The kernel's form of an address's name.
fn name_of(address: SocketAddr) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: no memory is passed.
    let uid = unsafe { libc::geteuid() };
    abstract_name(&format!(
        "softverbs/{uid}/{}/{}",
        address.ip(),
        address.port()
    ))
}

fn abstract_name(name: &str) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: all zeros is a value of it.
    let mut raw: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    raw.sun_family = libc::AF_UNIX as u16;
    for (to, from) in raw.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    (raw, (2 + 1 + name.len()) as libc::socklen_t)
}

type Call = unsafe extern "C" fn(i32, *const libc::sockaddr, libc::socklen_t) -> i32;

/// Calls `bind` or `connect` with a name; returns whether it succeeded.
fn with_name(call: Call, socket: &OwnedFd, name: &(libc::sockaddr_un, libc::socklen_t)) -> bool {
    // SAFETY: `name.1` bytes of the structure are set.
    unsafe { call(socket.as_raw_fd(), (&raw const name.0).cast(), name.1) == 0 }
}

/// A connection to a listener's socket, without the connection manager.
fn dialled(to: SocketAddr) -> UnixStream {
    let socket = packet_socket();
    assert!(with_name(libc::connect, &socket, &name_of(to)));
    // packets are read and written with the calls of a stream
    UnixStream::from(socket)
}

/// As [`dialled`], by a child of this process, which has ended when this returns: the kernel's
/// record of the socket names the child.
fn dialled_by_a_child(to: SocketAddr) -> UnixStream {
    let (socket, name) = (packet_socket(), name_of(to));
    // SAFETY: the child makes one system call and ends.
    let status = unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            libc::_exit(i32::from(!with_name(libc::connect, &socket, &name)));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    };
    assert_eq!(status, 0);
    UnixStream::from(socket)
}

/// A request in the format of `docs/softverbs-cm.md`.
fn request() -> Vec<u8> {
    let mut bytes = b"SVCM\x02\x00\x01\x00\x00\x00\x00\x00".to_vec();
    bytes.extend_from_slice(&5u32.to_le_bytes());
    bytes.extend_from_slice(&6u32.to_le_bytes());
    bytes.extend_from_slice(&[3; 16]);
    bytes.extend_from_slice(&[1, 1, 0, 7, 0, 7, 0, 2]);
    for port in [9u16, 10] {
        bytes.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1]);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&port.to_le_bytes());
    }
    bytes.extend_from_slice(b"hi");
    bytes.extend_from_slice(&[0; 54]);
    bytes
}

#[test]
fn a_listener_ignores_rubbish() {
    if skip_on_hardware("its messages are the kernel's") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let mut far = request();
    far.push(0);
    let mut wrong_version = request();
    wrong_version[4] = 9;
    let mut long_data = request();
    long_data[43] = 200;
    let rubbish: Vec<Vec<u8>> = vec![
        b"x".to_vec(),
        vec![0xff; 4000],
        request()[..100].to_vec(),
        b"SVCM\x02\x00\x03\x00\x00\x00\x00\x00".to_vec(),
        far,
        wrong_version,
        long_data,
    ];
    for packet in rubbish {
        let mut peer = dialled(to);
        assert_eq!(peer.write(&packet).unwrap(), packet.len());
        channel.expect_silence();
        // the listener has closed the socket, possibly before it has read all bytes
        assert!(
            matches!(peer.read(&mut [0; 16]), Ok(0) | Err(_)),
            "{packet:?}"
        );
    }
    // the listener still works: the request above was refused for its contents
    let mut peer = dialled(to);
    peer.write_all(&request()).unwrap();
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_padded(&said.data, b"hi", 56);
    assert_eq!(
        said.id.destination().unwrap(),
        on_device(9).parse().unwrap()
    );
    // an invalid reply, before and after the listener's own
    peer.write_all(b"rubbish").unwrap();
    channel.expect(RDMA_CM_EVENT_CONNECT_ERROR, -libc::EPROTO);
    assert_eq!(said.id.accept(&mut param(b"")), libc::EINVAL);
    said.id.destroy();
    let mut peer = dialled(to);
    peer.write_all(&request()).unwrap();
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.id.accept(&mut param(b"")), 0);
    peer.write_all(&request()).unwrap();
    channel.expect(RDMA_CM_EVENT_CONNECT_ERROR, -libc::EPROTO);
    said.id.destroy();
    listener.destroy();
    channel.destroy();
}

#[test]
fn an_established_connection_ends_at_rubbish() {
    if skip_on_hardware("its messages are the kernel's") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let mut peer = dialled(to);
    peer.write_all(&request()).unwrap();
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    assert_eq!(said.id.accept(&mut param(b"")), 0);
    peer.write_all(b"SVCM\x02\x00\x03\x00\x00\x00\x00\x00")
        .unwrap();
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    peer.write_all(b"SVCM\x02\x00\x09\x00\x00\x00\x00\x00")
        .unwrap();
    channel.expect(RDMA_CM_EVENT_DISCONNECTED, -libc::EPROTO);
    channel.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
    said.id.destroy();
    listener.destroy();
    channel.destroy();
}

#[test]
fn those_who_connect_and_say_nothing_keep_nobody_out() {
    if skip_on_hardware("its messages are the kernel's") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 1000);
    let silent: Vec<_> = (0..200).map(|_| dialled(to)).collect();
    channel.expect_silence();
    let mut peer = dialled(to);
    peer.write_all(&request()).unwrap();
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    // the first connections were closed to make room
    silent[0].set_read_timeout(Some(PATIENCE)).unwrap();
    let heard = (&silent[0]).read(&mut [0; 16]);
    assert!(
        heard
            .as_ref()
            .map_or_else(|e| e.raw_os_error() == Some(libc::ECONNRESET), |n| *n == 0),
        "{heard:?}"
    );
    said.id.destroy();
    listener.destroy();
    channel.destroy();
}

#[test]
fn a_client_gives_up_on_a_listener_that_talks_rubbish() {
    if skip_on_hardware("its messages are the kernel's") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    listener.destroy();
    let socket = packet_socket();
    assert!(with_name(libc::bind, &socket, &name_of(to)));
    // SAFETY: no memory is passed.
    assert_eq!(unsafe { libc::listen(socket.as_raw_fd(), 8) }, 0);
    for packet in [&b"rubbish"[..], &[1; 3000], &request()] {
        let id = channel.routed(to);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"")), 0);
        // SAFETY: NULL says that the address is not wanted.
        let peer = unsafe {
            let fd = libc::accept(
                socket.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            );
            assert!(fd >= 0);
            OwnedFd::from_raw_fd(fd)
        };
        UnixStream::from(peer).write_all(packet).unwrap();
        channel.expect(RDMA_CM_EVENT_UNREACHABLE, -libc::EPROTO);
        id.destroy();
    }
    channel.destroy();
}

/// Runs `body` in a child process of another user. `body` must only make system calls, and returns
/// whether they succeeded.
fn as_another_user(body: impl FnOnce() -> bool) {
    // SAFETY: the child makes system calls only, and ends without unwinding.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            let changed = libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) == 0;
            libc::_exit(i32::from(!(changed && body())));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "the other user could not do it");
    }
}

#[test]
fn other_users_are_nobody() {
    if skip_on_hardware("its messages are the kernel's") {
        return;
    }
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: only root can act for another user");
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let (socket, packet, name) = (packet_socket(), request(), name_of(to));
    as_another_user(|| {
        with_name(libc::connect, &socket, &name)
            // SAFETY: the packet's bytes.
            && unsafe { libc::send(socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), 0) } > 0
    });
    channel.expect_silence();
    listener.destroy();
    // a process that binds the name of a free port
    let socket = packet_socket();
    as_another_user(|| {
        with_name(libc::bind, &socket, &name)
            // SAFETY: no memory is passed.
            && unsafe { libc::listen(socket.as_raw_fd(), 8) } == 0
    });
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(b"secret")), 0);
    channel.expect(RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
    // the id has its port still
    let other = channel.id();
    let from = id.source().unwrap().to_string();
    assert_eq!(other.bind(&from), libc::EADDRINUSE);
    other.destroy();
    id.destroy();
    // also with one descriptor, which the deadline takes
    let id = channel.routed(to);
    let connected = with_descriptors(1, || id.connect(&mut param(b"secret")));
    assert_eq!(connected, 0);
    channel.expect(RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
    id.destroy();
    channel.destroy();
}

/// The inode number of the socket with this name. A reading of the list lacks a socket if another
/// one ends meanwhile: the kernel finds its place in the list by counting.
fn inode_of(name: &str) -> String {
    let begin = Instant::now();
    let name = format!(" @{name}");
    loop {
        let list = std::fs::read("/proc/net/unix").unwrap();
        let list = String::from_utf8_lossy(&list);
        if let Some(line) = list.lines().find(|line| line.ends_with(&name)) {
            return line.split_whitespace().nth(6).unwrap().to_owned();
        }
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "{name} is not listed"
        );
    }
}

/// `RDMA_OPTION_ID_REUSEADDR`: the owner of the address has not set it.
#[test]
fn other_users_permit_nothing() {
    if skip_on_hardware("its addresses are the kernel's") {
        return;
    }
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: only root can act for another user");
        return;
    }
    let channel = Channel::new();
    let (owner, sharing) = (channel.id(), channel.id());
    assert_eq!(owner.bind(&on_device(0)), 0);
    let at = owner.source().unwrap();
    let one = &1i32.to_ne_bytes();
    assert_eq!(sharing.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
    let permission = format!("softverbs/0/shared/{}/{}", at.ip(), at.port());
    let (socket, name) = (packet_socket(), abstract_name(&permission));
    // as if the other user had made it
    std::os::unix::fs::fchown(&socket, Some(65534), None).unwrap();
    as_another_user(|| with_name(libc::bind, &socket, &name));
    assert_eq!(sharing.bind(&at.to_string()), libc::EADDRINUSE);
    // SAFETY: no memory is passed.
    as_another_user(|| unsafe { libc::listen(socket.as_raw_fd(), 8) } == 0);
    assert_eq!(sharing.bind(&at.to_string()), libc::EADDRINUSE);
    // a name that looks like a line of the list, with the inode number of the owner's socket
    let inode = inode_of(&format!("softverbs/0/{}/{}", at.ip(), at.port()));
    let name = abstract_name(&format!("x\n0: 0 0 0 0 0 {inode} @{permission}"));
    let forger = packet_socket();
    as_another_user(|| with_name(libc::bind, &forger, &name));
    assert_eq!(sharing.bind(&at.to_string()), libc::EADDRINUSE);
    owner.destroy();
    sharing.destroy();
    channel.destroy();
}

/// A process cannot have a queue pair connected to one of another process.
#[test]
fn a_request_names_a_queue_pair_of_its_sender() {
    if skip_on_hardware("its messages are the kernel's") {
        return;
    }
    for (dial, result) in [
        (dialled as fn(SocketAddr) -> UnixStream, 0),
        (dialled_by_a_child, libc::EPROTO),
    ] {
        let channel = Channel::new();
        let (_, to) = channel.listener(&on_device(0), 8);
        let mut peer = dial(to);
        let mut message = request();
        let own = channel.routed(to);
        assert_eq!(own.create_qp(), 0);
        // SAFETY: the id has a queue pair and an address of an InfiniBand device.
        let (number, gid) = unsafe {
            let route = &own.c().route.addr.addr;
            (
                (*own.c().qp).qp_num,
                *route.ibaddr.as_ref().sgid.raw.as_ref(),
            )
        };
        message[12..16].copy_from_slice(&number.to_le_bytes());
        message[20..36].copy_from_slice(&gid);
        peer.write_all(&message).unwrap();
        let said = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0);
        assert_eq!(said.id.create_qp(), 0);
        assert_eq!(said.id.accept(&mut param(b"")), result);
    }
}
