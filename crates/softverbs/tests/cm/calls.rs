//! Invalid calls, which are refused.

use super::*;

#[test]
fn addresses_and_ports_have_one_owner() {
    let channel = Channel::new();
    let (listener, at) = channel.listener(&on_device(0), 8);
    let at = at.to_string();
    let other = channel.id();
    assert_eq!(other.bind(&at), libc::EADDRINUSE);
    let foreign = if softverbs() {
        libc::EADDRNOTAVAIL
    } else {
        libc::ENODEV
    };
    assert_eq!(other.bind("192.0.2.7:0"), foreign);
    assert_eq!(other.bind("[2001:db8::7]:0"), foreign);
    // an id that listens shares its address with none
    let one = &1i32.to_ne_bytes();
    assert_eq!(other.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
    assert_eq!(other.bind(&at), libc::EADDRINUSE);
    listener.destroy();
    // the refused calls have changed nothing
    assert_eq!(other.bind(&at), 0);
    assert_eq!(other.listen(1), 0);
    assert_eq!(other.bind(&on_device(0)), libc::EINVAL);
    other.destroy();
    let (again, _) = channel.listener(&at, 1);
    again.destroy();
    // a listener without an address gets one
    let any = channel.id();
    assert_eq!(any.listen(0), 0);
    assert!(any.source().unwrap().ip().is_unspecified());
    assert_ne!(any.source().unwrap().port(), 0);
    assert!(any.c().verbs.is_null(), "any address is of no device");
    any.destroy();
    channel.destroy();
}

/// As the kernel's `resolve_prepare_src`.
#[test]
fn a_bound_id_resolves_addresses_of_its_family() {
    if skip_on_hardware("the addresses are those of no device") {
        return;
    }
    let channel = Channel::new();
    let [v4, v6, mapped] =
        ["127.0.0.1:9", "[::1]:9", "[::ffff:127.0.0.1]:9"].map(|to| to.parse().unwrap());
    // an IPv4-mapped address has the ports of IPv4, which an id with "::" owns unless it is
    // restricted to its own family
    for (from, restricted, to, other) in [
        ("0.0.0.0:0", 0, v4, v6),
        ("127.0.0.1:0", 0, v4, v6),
        ("[::]:0", 0, v6, v4),
        ("[::]:0", 0, mapped, v4),
        ("[::]:0", 1, v6, mapped),
        ("[::1]:0", 0, v6, v4),
        ("[::1]:0", 0, v6, mapped),
        ("[::ffff:127.0.0.1]:0", 0, mapped, v6),
    ] {
        let id = channel.id();
        let restricted = &i32::to_ne_bytes(restricted);
        assert_eq!(id.set_option(RDMA_OPTION_ID_AFONLY, restricted), 0);
        assert_eq!(id.bind(from), 0);
        let source = id.source();
        assert_eq!(id.resolve(None, other), libc::EINVAL, "{from}");
        assert_eq!(id.source(), source);
        channel.expect_silence();
        assert_eq!(id.resolve(None, to), 0, "{from}");
        channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        id.destroy();
    }
    channel.destroy();
}

/// rdma_set_option(3): the holder of an address permits others to bind it, and they permit it too.
#[test]
fn an_address_is_shared_by_those_who_all_permit_it() {
    if skip_on_hardware("the addresses are those of no device, and overlap with another errno") {
        return;
    }
    let channel = Channel::new();
    let one = &1i32.to_ne_bytes();
    let permitting = || {
        let id = channel.id();
        assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        id
    };
    for (first, second) in [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("[::]", "0.0.0.0"),
        ("[::]", "[::]"),
    ] {
        // the option may come before or after the address
        for early in [true, false] {
            let holder = channel.id();
            if early {
                assert_eq!(holder.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
            }
            assert_eq!(holder.bind(&format!("{first}:0")), 0);
            let at = format!("{second}:{}", holder.source().unwrap().port());
            let (sharing, other) = (permitting(), channel.id());
            if !early {
                assert_eq!(sharing.bind(&at), libc::EADDRINUSE, "{first} {at}");
                assert_eq!(holder.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
            }
            assert_eq!(other.bind(&at), libc::EADDRINUSE, "{first} {at}");
            assert_eq!(sharing.bind(&at), 0, "{first} {at}");
            assert_eq!(sharing.listen(1), libc::EADDRINUSE);
            assert_eq!(holder.listen(1), 0);
            let late = permitting();
            assert_eq!(late.bind(&at), libc::EADDRINUSE, "{first} {at}");
            holder.destroy();
            assert_eq!(sharing.listen(1), 0, "{first} {at}");
            for id in [sharing, other, late] {
                id.destroy();
            }
        }
    }
    channel.destroy();
}

/// The holder of all addresses has resolved one before it permits others to bind them.
#[test]
fn an_address_is_shared_as_it_was_bound() {
    if skip_on_hardware("the addresses are those of no device, and overlap with another errno") {
        return;
    }
    let channel = Channel::new();
    let one = &1i32.to_ne_bytes();
    let holder = channel.id();
    assert_eq!(holder.bind("0.0.0.0:0"), 0);
    let port = holder.source().unwrap().port();
    assert_eq!(
        holder.resolve(None, SocketAddr::from(([127, 0, 0, 1], 9))),
        0
    );
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    assert_eq!(
        holder.source().unwrap().to_string(),
        format!("127.0.0.1:{port}")
    );
    assert_eq!(holder.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
    for host in ["0.0.0.0", "127.0.0.1"] {
        let sharing = channel.id();
        assert_eq!(sharing.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        assert_eq!(sharing.bind(&format!("{host}:{port}")), 0, "{host}");
        sharing.destroy();
    }
    holder.destroy();
    channel.destroy();
}

/// The name of an active id ends with its connection.
#[test]
fn a_permission_ends_with_the_address() {
    if skip_on_hardware("an id has its port until it is destroyed") {
        return;
    }
    let channel = Channel::new();
    let one = &1i32.to_ne_bytes();
    let (listener, to) = channel.listener(&on_device(0), 8);
    for host in ["127.0.0.1", "[::]"] {
        let (former, owner, sharing) = (channel.id(), channel.id(), channel.id());
        for id in [former, sharing] {
            assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        }
        assert_eq!(former.bind(&format!("{host}:0")), 0);
        let at = format!("{host}:{}", former.source().unwrap().port());
        // a wildcard address has no connection in another family
        let to = match host {
            "[::]" => SocketAddr::new("::ffff:127.0.0.1".parse().unwrap(), to.port()),
            _ => to,
        };
        channel.route(former, to);
        assert_eq!(former.connect(&mut param(b"")), 0);
        let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
        assert_eq!(owner.bind(&at), libc::EADDRINUSE);
        assert_eq!(sharing.bind(&at), 0, "{at}");
        sharing.destroy();
        assert_eq!(passive.reject(b""), 0);
        channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
        // IPv6's half of "::" is free, and IPv4's is not
        let sharing = channel.id();
        for id in [owner, sharing] {
            assert_eq!(id.set_option(RDMA_OPTION_ID_AFONLY, one), 0);
        }
        assert_eq!(sharing.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        assert_eq!(owner.bind(&at), 0, "{at}");
        assert_eq!(sharing.bind(&at), libc::EADDRINUSE, "{at}");
        // the new owner can give the permission
        assert_eq!(owner.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        assert_eq!(sharing.bind(&at), 0, "{at}");
        for id in [sharing, owner, passive, former] {
            id.destroy();
        }
    }
    listener.destroy();
    channel.destroy();
}

/// The connection of the id has one of its names.
#[test]
fn an_address_is_shared_by_a_connected_id() {
    if skip_on_hardware("the addresses are those of no device, and overlap with another errno") {
        return;
    }
    let channel = Channel::new();
    let one = &1i32.to_ne_bytes();
    let (listener, to) = channel.listener("127.0.0.1:0", 8);
    let mapped = SocketAddr::new("::ffff:127.0.0.1".parse().unwrap(), to.port());
    for (host, to) in [("127.0.0.1", to), ("[::]", mapped)] {
        let (owner, sharing) = (channel.id(), channel.id());
        assert_eq!(owner.bind(&format!("{host}:0")), 0);
        let at = format!("{host}:{}", owner.source().unwrap().port());
        channel.route(owner, to);
        assert_eq!(owner.connect(&mut param(b"")), 0);
        let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
        assert_eq!(sharing.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        assert_eq!(sharing.bind(&at), libc::EADDRINUSE, "{at}");
        assert_eq!(owner.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        assert_eq!(sharing.bind(&at), 0, "{at}");
        for id in [sharing, passive, owner] {
            id.destroy();
        }
    }
    listener.destroy();
    channel.destroy();
}

/// The socket of an accepted connection shows the name of its listener, and does not own it.
#[test]
fn a_port_is_free_after_its_listener() {
    if skip_on_hardware("the addresses are those of no device") {
        return;
    }
    let channel = Channel::new();
    let one = &1i32.to_ne_bytes();
    for (first, second) in [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")] {
        let (listener, at) = channel.listener(&format!("{first}:0"), 8);
        let id = channel.routed(SocketAddr::from(([127, 0, 0, 1], at.port())));
        assert_eq!(id.connect(&mut param(b"")), 0);
        let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
        let again = format!("{second}:{}", at.port());
        let (sharing, other) = (channel.id(), channel.id());
        assert_eq!(other.bind(&again), libc::EADDRINUSE);
        assert_eq!(sharing.set_option(RDMA_OPTION_ID_REUSEADDR, one), 0);
        assert_eq!(sharing.bind(&again), libc::EADDRINUSE);
        listener.destroy();
        assert_eq!(sharing.bind(&again), 0, "{again}");
        assert_eq!(sharing.listen(1), 0, "{again}");
        sharing.destroy();
        assert_eq!(other.bind(&again), 0, "{again}");
        assert_eq!(other.listen(1), 0);
        for id in [other, id, passive] {
            id.destroy();
        }
    }
    channel.destroy();
}

#[test]
fn options() {
    let channel = Channel::new();
    let id = channel.id();
    assert_eq!(id.set_option(RDMA_OPTION_ID_TOS, &[8]), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_TOS, &[8, 0]), libc::EINVAL);
    assert_eq!(id.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, &[14]), 0);
    if softverbs() {
        // the kernel leaves this error to the queue pair
        let long = id.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, &[32]);
        assert_eq!(long, libc::EINVAL);
    }
    assert_eq!(id.set_option(99, &[1]), libc::ENOSYS);
    let service = channel.id_in(RDMA_PS_UDP);
    let timeout = service.set_option(RDMA_OPTION_ID_ACK_TIMEOUT, &[14]);
    assert_eq!(timeout, libc::EINVAL);
    service.destroy();
    let only = &1i32.to_ne_bytes();
    assert_eq!(id.bind("[::]:0"), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_AFONLY, only), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, only), 0);
    // this releases IPv4's half of the port
    let port = id.source().unwrap().port();
    let other = channel.id();
    assert_eq!(other.set_option(RDMA_OPTION_ID_AFONLY, only), 0);
    assert_eq!(other.bind(&format!("0.0.0.0:{port}")), 0);
    other.destroy();
    assert_eq!(id.listen(1), 0);
    assert_eq!(id.set_option(RDMA_OPTION_ID_AFONLY, only), libc::EINVAL);
    assert_eq!(id.set_option(RDMA_OPTION_ID_REUSEADDR, only), libc::EINVAL);
    id.destroy();
    channel.destroy();
}

/// As the kernel's `rdma_set_afonly`, before and after the id is bound.
#[test]
fn the_restriction_to_one_family_can_be_taken_back() {
    if skip_on_hardware("the kernel looks at the other family's port when it listens") {
        return;
    }
    let channel = Channel::new();
    let set = |id: Id, on: i32| id.set_option(RDMA_OPTION_ID_AFONLY, &on.to_ne_bytes());
    let id = channel.id();
    assert_eq!([set(id, 1), set(id, 0)], [0, 0]);
    assert_eq!(id.bind("[::]:0"), 0);
    assert_eq!(set(id, 0), 0);
    let port = id.source().unwrap().port();
    let ipv4 = format!("0.0.0.0:{port}");
    let other = channel.id();
    assert_eq!(other.bind(&ipv4), libc::EADDRINUSE);
    assert_eq!(set(id, 1), 0);
    assert_eq!(other.bind(&ipv4), 0);
    assert_eq!(set(other, 0), 0);
    // IPv4's half of the port has another owner
    assert_eq!(set(id, 0), libc::EADDRINUSE);
    other.destroy();
    assert_eq!(set(id, 0), 0);
    assert_eq!(set(id, 0), 0);
    let other = channel.id();
    assert_eq!(other.bind(&ipv4), libc::EADDRINUSE);
    other.destroy();
    // both halves listen
    assert_eq!(id.listen(1), 0);
    assert_eq!(set(id, 0), libc::EINVAL);
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let active = channel.routed(to);
    assert_eq!(active.connect(&mut param(b"")), 0);
    let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    for id in [passive, active, id] {
        id.destroy();
    }
    channel.destroy();
}

#[test]
fn calls_out_of_turn_are_refused() {
    if skip_on_hardware("the library follows pointers that are not there yet") {
        return;
    }
    let channel = Channel::new();
    let (listener, to) = channel.listener(&on_device(0), 8);
    let id = channel.id();
    assert_eq!(id.create_qp(), libc::EINVAL);
    assert_eq!(id.resolve_route(), libc::EINVAL);
    assert_eq!(id.connect(&mut param(b"")), libc::EINVAL);
    assert_eq!(id.accept(&mut param(b"")), libc::EINVAL);
    assert_eq!(id.reject(b""), libc::EINVAL);
    assert_eq!(id.disconnect(), libc::EINVAL);
    id.destroy();
    let id = channel.routed(to);
    assert_eq!(id.connect(&mut param(&[1; 57])), libc::EINVAL);
    let mut greedy = rdma_conn_param {
        responder_resources: 254,
        ..param(b"")
    };
    assert_eq!(id.connect(&mut greedy), libc::EINVAL);
    assert_eq!(id.resolve(None, to), libc::EINVAL);
    assert_eq!(id.connect(&mut param(&[1; 56])), 0);
    let passive = channel.expect(RDMA_CM_EVENT_CONNECT_REQUEST, 0).id;
    assert_eq!(passive.accept(&mut param(&[1; 197])), libc::EINVAL);
    assert_eq!(passive.reject(&[1; 149]), libc::EINVAL);
    assert_eq!(passive.accept(&mut param(&[1; 196])), 0);
    let said = channel.expect(RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    assert_eq!(said.data, [1; 196]);
    // the active side may reject the reply
    assert_eq!(id.reject(b"changed my mind"), 0);
    let said = channel.expect(RDMA_CM_EVENT_REJECTED, CONSUMER);
    assert_eq!(said.id, passive);
    assert_padded(&said.data, b"changed my mind", 148);
    for id in [id, passive, listener] {
        id.destroy();
    }
    channel.destroy();
}

#[test]
fn port_spaces() {
    let made = |space| {
        let mut id = std::ptr::null_mut();
        let null = std::ptr::null_mut();
        // SAFETY: NULL asks for a channel of the id's own; room for a pointer.
        let made = unsafe { (cm().rdma_create_id)(null, &raw mut id, null.cast(), space) };
        let errno = errno_of(made);
        if errno == 0 {
            Id(id).destroy();
        }
        errno
    };
    for space in [RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB] {
        assert_eq!(made(space), 0);
    }
    for space in [0, 1, 3, 0x107, u32::MAX] {
        assert_eq!(made(space), libc::EINVAL, "{space:#x}");
    }
    if softverbs() {
        assert_eq!(made(RDMA_PS_IPOIB), libc::EPROTONOSUPPORT);
    }
}
