//! Calls that fail for lack of a resource leave nothing half done, and can be repeated.

use std::net::Ipv6Addr;
use std::os::fd::AsRawFd;

use super::*;

/// The descriptor of this process whose socket has a name that ends with `end`.
fn socket_named(end: &str) -> i32 {
    let named = |fd: i32| {
        // SAFETY: all zeros is a value of it; the length is that of the structure.
        unsafe {
            let mut name: libc::sockaddr_un = std::mem::zeroed();
            let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            if libc::getsockname(fd, (&raw mut name).cast(), &raw mut len) != 0 {
                return false;
            }
            let path = name.sun_path.map(|byte| byte as u8);
            let len = len as usize - size_of::<libc::sa_family_t>();
            path[..len].ends_with(end.as_bytes())
        }
    };
    (0..1024).find(|&fd| named(fd)).unwrap()
}

/// Runs `act` while the channel watches a descriptor of this process already, so that it cannot be
/// watched (`EEXIST`).
fn watched_already<T>(channel: Channel, fd: i32, act: impl FnOnce() -> T) -> T {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let (set, add, remove) = (channel.fd(), libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_DEL);
    // SAFETY: a readable structure and descriptors of this process.
    let watched = unsafe { libc::epoll_ctl(set, add, fd, &raw mut event) };
    assert_eq!(watched, 0);
    let out = act();
    // SAFETY: as above. The act may have removed it.
    unsafe { libc::epoll_ctl(set, remove, fd, &raw mut event) };
    out
}

#[test]
fn a_listener_that_cannot_be_watched_does_not_listen() {
    if skip_on_hardware("its sockets are in the kernel") {
        return;
    }
    let channel = Channel::new();
    let listener = channel.id();
    assert_eq!(listener.bind("[::]:0"), 0);
    let to = SocketAddr::from(([127, 0, 0, 1], listener.source().unwrap().port()));
    assert_eq!(channel.without_epoll(|| listener.listen(1)), libc::EINVAL);
    let id = channel.routed(to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
    id.destroy();
    // the second of the two names cannot be watched, because it is already
    let second = socket_named(&format!("/any4/{}", to.port()));
    let failed = watched_already(channel, second, || listener.listen(1));
    assert_eq!(failed, libc::EEXIST);
    assert_eq!(listener.listen(1), 0);
    let id = channel.routed(to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    for id in [id, passive, listener] {
        id.destroy();
    }
    channel.destroy();
}

#[test]
fn an_id_that_cannot_be_watched_does_not_move() {
    if skip_on_hardware("its sockets are in the kernel") {
        return;
    }
    let (first, other) = (Channel::new(), Channel::new());
    let (listener, at) = first.listener("[::]:0", 8);
    let to = SocketAddr::from((Ipv6Addr::LOCALHOST, at.port()));
    let failed = other.without_epoll(|| listener.migrate(other));
    assert_eq!((failed, listener.c().channel), (libc::EINVAL, first.0));
    // the second of the two names cannot be watched; the first one is not any more
    let second = socket_named(&format!("/any4/{}", at.port()));
    let failed = watched_already(other, second, || listener.migrate(other));
    assert_eq!((failed, listener.c().channel), (libc::EEXIST, first.0));
    let id = first.routed(to);
    assert_eq!(id.connect(&mut param(b"")), 0);
    assert!(!other.readable(Duration::ZERO));
    let passive = first.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(passive.c().channel, first.0);
    assert_eq!(listener.migrate(other), 0);
    assert_eq!(passive.reject(b""), 0);
    first.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    for id in [passive, id, listener] {
        id.destroy();
    }
    first.destroy();
    other.destroy();
}

/// Another id can bind and listen then.
#[test]
fn a_listener_that_fails_does_not_keep_an_address_that_it_shares() {
    if skip_on_hardware("its sockets are in the kernel") {
        return;
    }
    let channel = Channel::new();
    let (owner, sharing) = (channel.id(), channel.id());
    let on = 1i32.to_ne_bytes();
    for id in [owner, sharing] {
        assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, &on), 0);
    }
    assert_eq!(owner.bind(&on_device(0)), 0);
    let at = owner.source().unwrap();
    assert_eq!(sharing.bind(&at.to_string()), 0);
    owner.destroy();
    assert_eq!(channel.without_epoll(|| sharing.listen(8)), libc::EINVAL);
    let (other, _) = channel.listener(&at.to_string(), 8);
    assert_eq!(sharing.listen(8), libc::EADDRINUSE);
    other.destroy();
    assert_eq!(sharing.listen(8), 0);
    assert_eq!(taken(at), libc::EADDRINUSE);
    sharing.destroy();
    channel.destroy();
}

/// The result of binding another id to an address.
fn taken(address: SocketAddr) -> i32 {
    let channel = Channel::new();
    let other = channel.id();
    let errno = other.bind(&address.to_string());
    other.destroy();
    channel.destroy();
    errno
}

#[test]
fn an_attempt_that_cannot_be_watched_keeps_its_port() {
    if skip_on_hardware("its sockets are in the kernel") {
        return;
    }
    let (server, channel) = (Channel::new(), Channel::new());
    let (listener, to) = server.listener(&on_device(0), 8);
    let id = channel.routed(to);
    let from = id.source().unwrap();
    let socket = socket_named(&format!("/{}/{}", from.ip(), from.port()));
    let connect = || id.connect(&mut param(b""));
    // its deadline, then its socket
    assert_eq!(channel.without_epoll(connect), libc::EINVAL);
    assert_eq!(watched_already(channel, socket, connect), libc::EEXIST);
    assert!(!server.readable(Duration::ZERO), "a connection came");
    assert_eq!(taken(from), libc::EADDRINUSE);
    assert_eq!(connect(), 0);
    let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(passive.destination(), Some(from));
    assert_eq!(taken(from), libc::EADDRINUSE);
    for id in [id, passive, listener] {
        id.destroy();
    }
    server.destroy();
    channel.destroy();
}

/// As one that finds the listener's queue full.
#[test]
fn a_repeated_attempt_that_cannot_be_watched_is_repeated_again() {
    if skip_on_hardware("its sockets are in the kernel") {
        return;
    }
    let (server, channel) = (Channel::new(), Channel::new());
    let (listener, to) = server.listener(&on_device(0), 1);
    let ids = [(); 2].map(|()| channel.routed(to));
    for id in ids {
        assert_eq!(id.connect(&mut param(b"")), 0);
    }
    let from = ids[1].source().unwrap();
    let socket = socket_named(&format!("/{}/{}", from.ip(), from.port()));
    let first = watched_already(channel, socket, || {
        // there is room now
        let first = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            assert_eq!(channel.raw().unwrap_err(), libc::EAGAIN);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!server.readable(Duration::ZERO), "a connection came");
        first
    });
    assert_eq!(taken(from), libc::EADDRINUSE);
    let until = Instant::now() + PATIENCE;
    let second = loop {
        assert!(Instant::now() < until, "no request came");
        channel.wakes(Duration::ZERO);
        if let Some(said) = server.next_within(Duration::from_millis(5)) {
            assert_eq!(said.kind, RDMA_CM_EVENT_CONNECT_REQUEST);
            break said.id;
        }
    };
    assert_eq!(second.destination(), Some(from));
    for id in [first, second, listener, ids[0], ids[1]] {
        id.destroy();
    }
    server.destroy();
    channel.destroy();
}

#[test]
fn an_acceptance_that_fails_is_not_sent() {
    if skip_on_hardware("its sockets are in the kernel") {
        return;
    }
    let (server, channel) = (Channel::new(), Channel::new());
    let (listener, to) = server.listener(&on_device(0), 8);
    let request = || {
        let id = channel.routed(to);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"")), 0);
        let passive = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
        assert_eq!(passive.create_qp(), 0);
        (id, passive)
    };
    // the first connection of two processes opens descriptors
    let (first, second) = request();
    assert_eq!(second.accept(&mut param(b"")), 0);
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    let (id, passive) = request();
    let with = |resources, depth| rdma_conn_param {
        responder_resources: resources,
        initiator_depth: depth,
        ..param(b"")
    };
    // the deadline cannot be watched
    let failed = server.without_epoll(|| passive.accept(&mut with(1, 1)));
    assert_eq!(failed, libc::EINVAL);
    channel.expect_silence();
    // the queue pair cannot be connected
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_ERR,
        ..ibv_qp_attr::default()
    };
    // SAFETY: a live queue pair and a readable structure.
    let moved =
        unsafe { (verbs().ibv_modify_qp)(passive.c().qp, &raw mut attr, IBV_QP_STATE as i32) };
    assert_eq!(moved, 0);
    assert_ne!(passive.accept(&mut with(1, 1)), 0);
    channel.expect_silence();
    // SAFETY: a live id with a queue pair.
    unsafe { (cm().rdma_destroy_qp)(passive.0) };
    assert_eq!(passive.create_qp(), 0);
    // the request has kept its deadline's descriptor and its limits
    let accepted = without_descriptors(|| passive.accept(&mut with(255, 255)));
    assert_eq!(accepted, 0);
    let said = channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    let limits = (said.conn.responder_resources, said.conn.initiator_depth);
    assert_eq!(limits, (3, 2));
    server.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    for id in [first, second, id, passive, listener] {
        id.destroy();
    }
    server.destroy();
    channel.destroy();
}

fn open_files() -> libc::rlimit {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a writable structure.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(got, 0);
    limit
}

/// Runs `act` with `free` descriptors above the highest one in use.
pub(crate) fn with_descriptors<T>(free: u64, act: impl FnOnce() -> T) -> T {
    let highest = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<u64>().ok())
        .max()
        .unwrap();
    // the gaps below it
    let mut gaps = Vec::new();
    loop {
        let file = std::fs::File::open("/dev/null").unwrap();
        if file.as_raw_fd() as u64 > highest {
            break;
        }
        gaps.push(file);
    }
    let before = open_files();
    let set = |rlim_cur| {
        let limit = libc::rlimit { rlim_cur, ..before };
        // SAFETY: a readable structure.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        assert_eq!(set, 0);
    };
    set(highest + 1 + free);
    let out = act();
    set(before.rlim_cur);
    out
}

fn without_descriptors<T>(act: impl FnOnce() -> T) -> T {
    with_descriptors(0, act)
}

/// rdma_get_devices(3): the number is that of the devices returned.
#[test]
fn no_device_is_counted_if_none_can_be_opened() {
    if skip_on_hardware("the library opens its devices once") {
        return;
    }
    let mut count = 7;
    // SAFETY: a writable integer.
    let get = |count| unsafe { (cm().rdma_get_devices)(count) };
    // the first call of the process that opens the device
    let devices = without_descriptors(|| get(&raw mut count));
    assert!(devices.is_null());
    assert_eq!(count, 0);
    let devices = get(&raw mut count);
    assert!(!devices.is_null());
    assert_eq!(count, 1);
    // SAFETY: the list from above, which is not used again.
    unsafe { (cm().rdma_free_devices)(devices) };
}

/// The owner of an address that overlaps is found in a list, which takes a descriptor to read.
#[test]
fn an_address_is_not_taken_for_free_without_descriptors() {
    if skip_on_hardware("its addresses are the kernel's") {
        return;
    }
    let channel = Channel::new();
    let (listener, at) = channel.listener("0.0.0.0:0", 8);
    let id = channel.id();
    let to = format!("127.0.0.1:{}", at.port());
    assert_eq!(id.bind(&to), libc::EADDRINUSE);
    // opens the device
    let other = channel.id();
    assert_eq!(other.bind("127.0.0.1:0"), 0);
    // for the socket with the name
    assert_eq!(with_descriptors(1, || id.bind(&to)), libc::EMFILE);
    listener.destroy();
    assert_eq!(id.bind(&to), 0);
    id.destroy();
    other.destroy();
    channel.destroy();
}

#[test]
fn a_request_needs_no_more_descriptors_than_its_own() {
    if skip_on_hardware("its connections are the kernel's") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let dialler = Second::start("dial", &[("CM_TO", &to.to_string()), ("CM_SAY", "1")]);
    dialler.expect("connecting");
    // the connection and its deadline
    let event = with_descriptors(2, || {
        loop {
            assert!(channel.readable(PATIENCE), "no request came");
            match channel.raw() {
                Ok(event) => break event,
                Err(errno) => assert_eq!(errno, libc::EAGAIN),
            }
        }
    });
    let said = read(event);
    assert_eq!(said.kind, RDMA_CM_EVENT_CONNECT_REQUEST);
    // SAFETY: an event not acknowledged before.
    assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
    assert_eq!(said.id.reject(b""), 0);
    dialler.expect(&format!("REJECTED {CONSUMER} data "));
    dialler.finish();
    for id in [said.id, listener] {
        id.destroy();
    }
    channel.destroy();
}

/// The first request to a listener of all addresses opens the device.
#[test]
fn a_request_without_a_device_stays_in_the_queue() {
    if skip_on_hardware("its device is opened when the application lists the devices") {
        return;
    }
    let channel = Channel::new();
    let (listener, at) = channel.listener("0.0.0.0:0", 8);
    let to = format!("127.0.0.1:{}", at.port());
    let dialler = Second::start("dial", &[("CM_TO", &to), ("CM_SAY", "1")]);
    dialler.expect("connecting");
    assert!(channel.readable(PATIENCE));
    // enough for the connection and its deadline
    with_descriptors(2, || {
        for _ in 0..4 {
            assert_eq!(channel.raw().unwrap_err(), libc::EMFILE);
            assert!(channel.readable(Duration::ZERO));
        }
    });
    let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert!(!passive.c().verbs.is_null());
    assert_eq!(passive.create_qp(), 0);
    assert_eq!(passive.accept(&mut param(b"")), 0);
    dialler.expect("ESTABLISHED 0 data ");
    channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
    dialler.finish();
    for id in [passive, listener] {
        id.destroy();
    }
    channel.destroy();
}
