//! The answers of `fi_getinfo` to hints, addresses and flags, as a table.

use std::ffi::c_void;

use abi_tests::fabric::{Infos, getinfo, hints};
use abi_tests::load::Lib;
use libfabric_sys::*;

/// One call of `fi_getinfo`.
struct Case {
    name: &'static str,
    node: Option<&'static str>,
    service: Option<&'static str>,
    flags: u64,
    change: fn(&mut Parts<'_>),
    expected: i32,
}

/// The structures of the hints.
struct Parts<'a> {
    info: &'a mut fi_info,
    tx: &'a mut fi_tx_attr,
    rx: &'a mut fi_rx_attr,
    ep: &'a mut fi_ep_attr,
    domain: &'a mut Domain,
}

/// The part of `fi_domain_attr` that every release has.
type Domain = fi_domain_attr;

fn ask(name: &'static str, change: fn(&mut Parts<'_>), expected: i32) -> Case {
    Case {
        name,
        node: None,
        service: None,
        flags: 0,
        change,
        expected,
    }
}

fn at(
    name: &'static str,
    node: Option<&'static str>,
    service: Option<&'static str>,
    flags: u64,
    expected: i32,
) -> Case {
    Case {
        name,
        node,
        service,
        flags,
        change: |_| {},
        expected,
    }
}

const NONE: i32 = -FI_ENODATA;

fn cases() -> Vec<Case> {
    vec![
        ask("as they are", |_| {}, 0),
        ask("messages only", |p| p.info.caps = FI_MSG, 0),
        ask("RMA only", |p| p.info.caps = FI_RMA, 0),
        ask(
            "initiating RMA only",
            |p| p.info.caps = FI_RMA | FI_WRITE,
            0,
        ),
        ask("tagged", |p| p.info.caps = FI_TAGGED, NONE),
        ask(
            "an unknown capability",
            |p| p.info.caps = FI_MSG | 1 << 62,
            NONE,
        ),
        ask("datagrams", |p| p.ep.type_ = FI_EP_DGRAM, NONE),
        ask("an unknown endpoint type", |p| p.ep.type_ = 77, NONE),
        ask("another protocol", |p| p.ep.protocol = FI_PROTO_UDP, NONE),
        ask(
            "a message too long",
            |p| p.ep.max_msg_size = usize::MAX,
            NONE,
        ),
        ask("a prefix", |p| p.ep.msg_prefix_size = 8, NONE),
        ask(
            "shared transmit contexts",
            |p| p.ep.tx_ctx_cnt = FI_SHARED_CONTEXT,
            NONE,
        ),
        ask(
            "write after read in order",
            |p| p.ep.max_order_war_size = 1,
            NONE,
        ),
        ask("no mr_mode at all", |p| p.domain.mr_mode = 0, 0),
        ask("scalable", |p| p.domain.mr_mode = FI_MR_SCALABLE, 0),
        ask(
            "scalable beside another bit",
            |p| p.domain.mr_mode = FI_MR_SCALABLE | FI_MR_LOCAL,
            NONE,
        ),
        ask("raw keys", |p| p.domain.mr_mode |= FI_MR_RAW, 0),
        ask(
            "more mr_mode bits than are used",
            |p| p.domain.mr_mode |= FI_MR_ENDPOINT | FI_MR_RAW | FI_MR_MMU_NOTIFY,
            0,
        ),
        ask(
            "more transmit contexts than endpoints",
            |p| p.domain.tx_ctx_cnt = 1 << 30,
            NONE,
        ),
        ask(
            "more receive contexts than endpoints",
            |p| p.domain.rx_ctx_cnt = 1 << 30,
            NONE,
        ),
        ask("an unknown threading", |p| p.domain.threading = 99, NONE),
        ask(
            "one thread a domain",
            |p| p.domain.threading = FI_THREAD_DOMAIN,
            0,
        ),
        ask("a long key", |p| p.domain.mr_key_size = 64, NONE),
        ask(
            "a long key with the bit for it",
            |p| {
                p.domain.mr_key_size = 64;
                p.domain.mr_mode |= FI_MR_RAW;
            },
            0,
        ),
        ask("eight buffers", |p| p.domain.mr_iov_limit = 8, 0),
        ask("nine buffers", |p| p.domain.mr_iov_limit = 9, NONE),
        ask("much remote data", |p| p.domain.cq_data_size = 9, NONE),
        ask(
            "all the queues of the world",
            |p| p.domain.cq_cnt = usize::MAX,
            NONE,
        ),
        ask(
            "remote data without the mode that it needs",
            |p| {
                p.info.mode = 0;
                p.domain.cq_data_size = 4;
            },
            NONE,
        ),
        ask("no mode at all", |p| p.info.mode = 0, 0),
        ask(
            "an operation flag that is none",
            |p| p.tx.op_flags = FI_MULTI_RECV,
            NONE,
        ),
        ask(
            "delivery complete",
            |p| p.tx.op_flags = FI_DELIVERY_COMPLETE,
            0,
        ),
        ask("send after send", |p| p.tx.msg_order = FI_ORDER_SAS, 0),
        ask("write after read", |p| p.tx.msg_order = FI_ORDER_WAR, NONE),
        ask("a large inject", |p| p.tx.inject_size = 1 << 30, NONE),
        ask("a long queue", |p| p.rx.size = usize::MAX, NONE),
        ask("a long vector", |p| p.rx.iov_limit = 100_000, NONE),
        ask("IPv4", |p| p.info.addr_format = FI_SOCKADDR_IN, 0),
        ask(
            "any socket address",
            |p| p.info.addr_format = FI_SOCKADDR,
            0,
        ),
        ask("strings", |p| p.info.addr_format = FI_ADDR_STR, 0),
        ask(
            "InfiniBand addresses",
            |p| p.info.addr_format = FI_SOCKADDR_IB,
            NONE,
        ),
        ask("an unknown format", |p| p.info.addr_format = 12345, NONE),
        at("a node of this host", Some("127.0.0.1"), Some("7471"), 0, 0),
        at("a name of this host", Some("localhost"), Some("7471"), 0, 0),
        at("another host", Some("203.0.113.1"), Some("7471"), 0, NONE),
        at(
            "a name that doesn't resolve",
            Some("no-such-host.invalid"),
            None,
            0,
            NONE,
        ),
        at(
            "a name where a number must be",
            Some("localhost"),
            None,
            FI_NUMERICHOST,
            NONE,
        ),
        at("an own source", Some("127.0.0.1"), None, FI_SOURCE, 0),
        at(
            "a foreign source",
            Some("203.0.113.1"),
            None,
            FI_SOURCE,
            NONE,
        ),
        at("a service as source", None, Some("7471"), FI_SOURCE, 0),
        at(
            "an address string",
            Some("fi_sockaddr_in://127.0.0.1:7471"),
            None,
            0,
            0,
        ),
        at(
            "a broken address string",
            Some("fi_sockaddr_in://127.0.0.1:x"),
            None,
            0,
            NONE,
        ),
        at("an IPv6 node", Some("::1"), Some("7471"), 0, ipv6()),
        ask("a source that is no address", no_source, NONE),
        ask("a destination that is no address", no_destination, NONE),
        // addresses that the call ignores (fi_getinfo(3), `src_addrlen` and `dest_addrlen`)
        Case {
            change: no_source,
            ..at("an own source instead of it", NODE, None, FI_SOURCE, 0)
        },
        Case {
            change: no_source,
            ..at("any source instead of it", None, None, FI_SOURCE, 0)
        },
        Case {
            change: no_destination,
            ..at("a node instead of it", NODE, Some("7471"), 0, 0)
        },
        Case {
            change: no_destination,
            ..at("beside an own source", NODE, None, FI_SOURCE, NONE)
        },
        Case {
            change: no_source,
            ..at("beside a node", NODE, Some("7471"), 0, NONE)
        },
    ]
}

const NODE: Option<&str> = Some("127.0.0.1");

/// An address of no family, which is freed with the hints.
fn no_address() -> (*mut c_void, usize) {
    // SAFETY: memory of 16 bytes, or NULL.
    let memory = unsafe { libc::calloc(16, 1) };
    assert!(!memory.is_null());
    (memory, 16)
}

fn no_source(parts: &mut Parts<'_>) {
    (parts.info.src_addr, parts.info.src_addrlen) = no_address();
}

fn no_destination(parts: &mut Parts<'_>) {
    (parts.info.dest_addr, parts.info.dest_addrlen) = no_address();
}

/// The expected result for IPv6 on this host.
fn ipv6() -> i32 {
    if std::net::UdpSocket::bind("[::1]:0").is_ok() {
        0
    } else {
        NONE
    }
}

fn parts(hints: &Infos) -> Parts<'_> {
    // SAFETY: hints with all their parts, which only this function uses. Their domain attributes
    // may be shorter than the bound structure; only fields of all releases are accessed.
    unsafe {
        let info = hints.first();
        Parts {
            tx: &mut *(*info).tx_attr,
            rx: &mut *(*info).rx_attr,
            ep: &mut *(*info).ep_attr,
            domain: &mut *(*info).domain_attr,
            info: &mut *info,
        }
    }
}

pub(crate) fn run(lib: &Lib) {
    let mut count = 0;
    for case in cases() {
        let hints = hints(lib);
        (case.change)(&mut parts(&hints));
        let answer = getinfo(
            lib,
            lib.version,
            case.node,
            case.service,
            case.flags,
            Some(&hints),
        );
        let got = answer.as_ref().map_or_else(|errno| *errno, |_| 0);
        assert_eq!(got, case.expected, "{}", case.name);
        if let Ok(list) = answer {
            for info in list.all() {
                check(&case, &mut parts(&hints), info);
            }
        }
        count += 1;
    }
    println!("{count} questions answered as they must be");
}

/// Properties of every answer, for all hints.
fn check(case: &Case, asked: &mut Parts<'_>, info: &fi_info) {
    let name = case.name;
    // SAFETY: an fi_info of libfabric's with all its parts.
    unsafe {
        let domain = info.domain_attr;
        assert_eq!(
            (*domain).mr_mode & !asked.domain.mr_mode,
            0,
            "{name}: mr_mode"
        );
        assert_eq!(info.mode & !asked.info.mode, 0, "{name}: mode");
        assert_eq!(asked.info.caps & !info.caps, 0, "{name}: caps");
        if asked.info.addr_format != FI_FORMAT_UNSPEC {
            assert_eq!(info.addr_format, asked.info.addr_format, "{name}: format");
        }
        if asked.domain.threading != FI_THREAD_UNSPEC {
            assert_eq!(
                (*domain).threading,
                asked.domain.threading,
                "{name}: threading"
            );
        }
        assert!((*info.tx_attr).size >= asked.tx.size, "{name}: tx size");
        assert!(!info.src_addr.is_null(), "{name}: source");
        let wants_destination = case.node.is_some() && case.flags & FI_SOURCE == 0;
        assert_eq!(
            !info.dest_addr.is_null(),
            wants_destination,
            "{name}: destination"
        );
    }
}
