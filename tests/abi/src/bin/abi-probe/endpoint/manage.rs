//! Connection management, fi_cm(3): names, private data of maximum length, rejection, fi_shutdown
//! and fi_close.

use std::ffi::c_void;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::ptr::{null, null_mut, without_provenance_mut};

use abi_tests::call;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, control, open_ep, register};
use abi_tests::pair::{Pair, completion, event, event_with_data};
use libfabric_sys::*;

use super::setup;

const LOCAL: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// `FI_OPT_CM_DATA_SIZE`
const LIMIT: usize = 35;
/// The same of `fi_reject(3)`, and of the option of passive endpoints.
const REJECT_LIMIT: usize = 55;
const STATE: i32 = -FI_EOPBADSTATE;

fn sockaddr(addr: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: addr.port().to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(*addr.ip()).to_be(),
        },
        sin_zero: [0; 8],
    }
}

/// `fi_setname`
unsafe fn set_name(cm: *mut fi_ops_cm, fid: *mut fid, ip: Ipv4Addr) -> i32 {
    let mut addr = sockaddr(SocketAddrV4::new(ip, 0));
    let from = (&raw mut addr).cast::<c_void>();
    // SAFETY: an open endpoint and an address of its format.
    unsafe { call!(cm, setname, fid, from, size_of_val(&addr)) }
}

/// `fi_getname` or `fi_getpeer`
unsafe fn ask(get: impl FnOnce(*mut c_void, *mut usize) -> i32) -> Result<SocketAddrV4, i32> {
    let mut addr = sockaddr(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
    let mut len = size_of_val(&addr);
    match get((&raw mut addr).cast(), &raw mut len) {
        0 => {
            assert_eq!(len, size_of_val(&addr));
            let ip = Ipv4Addr::from(u32::from_be(addr.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(addr.sin_port)))
        }
        errno => Err(errno),
    }
}

unsafe fn name_of(cm: *mut fi_ops_cm, fid: *mut fid) -> Result<SocketAddrV4, i32> {
    // SAFETY: an open endpoint.
    unsafe { ask(|to, len| call!(cm, getname, fid, to, len)) }
}

unsafe fn peer_of(ep: *mut fid_ep) -> Result<SocketAddrV4, i32> {
    // SAFETY: an open endpoint.
    unsafe { ask(|to, len| call!((*ep).cm, getpeer, ep, to, len)) }
}

/// The next event, which must be an error of `ep`: its error and data.
unsafe fn error_with_data(eq: *mut fid_eq, ep: *mut fid_ep) -> (i32, Vec<u8>) {
    let mut buf = [0_u64; 32];
    let mut number = 0;
    let mut data = [0_u8; 128];
    // SAFETY: as above.
    unsafe {
        let to = buf.as_mut_ptr().cast();
        let ret = call!((*eq).ops, sread, eq, &raw mut number, to, 256, 20_000, 0);
        assert_eq!(ret, -(FI_EAVAIL as isize));
        let mut error = std::mem::zeroed::<fi_eq_err_entry>();
        error.err_data = data.as_mut_ptr().cast();
        error.err_data_size = data.len();
        assert!(call!((*eq).ops, readerr, eq, &raw mut error, 0) > 0);
        assert_eq!(error.fid, ep.cast());
        (error.err, data[..error.err_data_size].to_vec())
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7) ^ seed).collect()
}

unsafe fn listen(setup: &Setup) -> (*mut fid_pep, libc::sockaddr_in) {
    // SAFETY: fids as they are opened.
    unsafe {
        let mut pep = null_mut();
        let (fabric, info) = (setup.fabric, setup.info.first());
        let open = (*(*fabric).ops).passive_ep.expect("a slot");
        assert_eq!(open(fabric, info, &raw mut pep, null_mut()), 0);
        let (cm, fid) = ((*pep).cm, &raw mut (*pep).fid);
        assert_eq!(bind(pep, setup.eq, 0), 0);
        // no host has an address in 203.0.113.0/24 (RFC 5737)
        let ret = set_name(cm, fid, Ipv4Addr::new(203, 0, 113, 1));
        assert_eq!(ret, -libc::EADDRNOTAVAIL);
        assert_eq!(set_name(cm, fid, LOCAL), 0);
        assert_eq!(call!(cm, listen, pep), 0);
        assert_eq!(call!(cm, listen, pep), STATE, "twice");
        assert_eq!(set_name(cm, fid, LOCAL), STATE, "it listens");
        let name = name_of(cm, fid).expect("a name");
        assert_eq!(*name.ip(), LOCAL);
        assert_ne!(name.port(), 0);
        (pep, sockaddr(name))
    }
}

pub(super) fn run(lib: &Lib) {
    let setup = setup(lib, |_| {});
    // SAFETY: fids as they are opened.
    unsafe {
        let (pep, to) = listen(&setup);
        rejected(lib, &setup, pep, &to);
        accepted(lib, &setup, pep, &to);
        assert_eq!(close(pep), 0);
        nobody(&setup, &to);
        of_the_domain(lib, &to);
        orderly(lib, &setup);
        abrupt(lib, &setup);
    }
    setup.close();
}

/// Connects with the maximum of private data; one byte more is refused and changes nothing.
unsafe fn connect(setup: &Setup, to: &libc::sockaddr_in, seed: u8) -> *mut fid_ep {
    // SAFETY: fids as they are opened.
    unsafe {
        let client = open_ep(setup, setup.info.first());
        let (cm, fid) = ((*client).cm, &raw mut (*client).fid);
        assert_eq!(set_name(cm, fid, LOCAL), 0);
        let data = pattern(LIMIT + 1, seed);
        let (data, to) = (
            data.as_ptr().cast::<c_void>(),
            std::ptr::from_ref(to).cast(),
        );
        let ret = call!(cm, connect, client, to, data, LIMIT + 1);
        assert_eq!(ret, -FI_EINVAL, "one byte too many");
        assert_eq!(peer_of(client), Err(-FI_ENOTCONN));
        assert_eq!(call!(cm, connect, client, to, data, LIMIT), 0);
        assert_eq!(set_name(cm, fid, LOCAL), STATE, "it connects");
        let ret = call!(cm, connect, client, to, data, LIMIT);
        assert_eq!(ret, STATE, "twice");
        client
    }
}

unsafe fn request(setup: &Setup, seed: u8) -> *mut fi_info {
    // SAFETY: an open queue.
    unsafe {
        let (number, entry, data) = event_with_data(setup.eq);
        assert_eq!(number, FI_CONNREQ);
        assert_eq!(data, pattern(LIMIT, seed));
        entry.info
    }
}

unsafe fn rejected(lib: &Lib, setup: &Setup, pep: *mut fid_pep, to: &libc::sockaddr_in) {
    // SAFETY: see `run`.
    unsafe {
        for len in [REJECT_LIMIT, 1, 0] {
            let client = connect(setup, to, 3);
            let info = request(setup, 3);
            let data = pattern(REJECT_LIMIT + 1, 4);
            let (from, handle) = (data.as_ptr().cast::<c_void>(), (*info).handle);
            let ret = call!((*pep).cm, reject, pep, handle, from, REJECT_LIMIT + 1);
            assert_eq!(ret, -FI_EINVAL, "one byte too many");
            let ret = call!((*pep).cm, reject, pep, handle, null(), 1);
            assert_eq!(ret, -FI_EINVAL, "a length without data");
            assert_eq!(call!((*pep).cm, reject, pep, handle, from, len), 0);
            let ret = call!((*pep).cm, reject, pep, handle, from, len);
            assert_eq!(ret, -FI_EINVAL, "answered already");
            (lib.freeinfo)(info);
            let (err, said) = error_with_data(setup.eq, client);
            assert_eq!((err, said), (FI_ECONNREFUSED, pattern(len, 4)));
            assert_eq!(peer_of(client), Err(-FI_ENOTCONN));
            let ret = call!((*client).cm, shutdown, client, 0);
            assert_eq!(ret, -FI_ENOTCONN);
            assert_eq!(close(client), 0);
        }
    }
}

unsafe fn accepted(lib: &Lib, setup: &Setup, pep: *mut fid_pep, to: &libc::sockaddr_in) {
    // SAFETY: see `run`.
    unsafe {
        let client = connect(setup, to, 5);
        let info = request(setup, 5);
        let server = open_ep(setup, info);
        let ret = call!((*pep).cm, reject, pep, (*info).handle, null(), 0);
        assert_eq!(ret, -FI_EINVAL, "an endpoint was made of it");
        (lib.freeinfo)(info);
        let (cm, fid) = ((*server).cm, &raw mut (*server).fid);
        assert_eq!(
            set_name(cm, fid, LOCAL),
            STATE,
            "the request has its address"
        );
        let ret = call!(cm, connect, server, null(), null(), 0);
        assert_eq!(ret, STATE, "it answers");
        let data = pattern(LIMIT + 1, 6);
        let from = data.as_ptr().cast::<c_void>();
        let ret = call!(cm, accept, server, from, LIMIT + 1);
        assert_eq!(ret, -FI_EINVAL, "one byte too many");
        assert_eq!(call!(cm, accept, server, from, LIMIT), 0);
        assert_eq!(call!(cm, accept, server, from, LIMIT), STATE, "twice");
        let mut seen = 0;
        for _ in 0..2 {
            let (number, entry, data) = event_with_data(setup.eq);
            assert_eq!(number, FI_CONNECTED);
            if entry.fid == client.cast() {
                assert_eq!(data, pattern(LIMIT, 6));
                seen |= 1;
            } else {
                assert_eq!(entry.fid, server.cast());
                seen |= 2;
            }
        }
        assert_eq!(seen, 3);
        // fi_getpeer returns the name that fi_getname returns at the other end
        for (one, other) in [(client, server), (server, client)] {
            let name = name_of((*one).cm, &raw mut (*one).fid).expect("a name");
            assert_eq!(peer_of(other), Ok(name));
            assert_eq!(*name.ip(), LOCAL);
            let mut len = 3;
            let short = call!((*other).cm, getpeer, other, null_mut(), &raw mut len);
            assert_eq!((short, len), (-FI_ETOOSMALL, 16));
        }
        let ret = call!((*client).cm, connect, client, null(), null(), 0);
        assert_eq!(ret, -FI_EISCONN);
        assert_eq!(control(client, FI_ENABLE, null_mut()), 0, "it is enabled");
        Pair { client, server }.close();
    }
}

/// Without a listener the connection request is refused.
unsafe fn nobody(setup: &Setup, to: &libc::sockaddr_in) {
    // SAFETY: see `run`.
    unsafe {
        let client = connect(setup, to, 1);
        let (err, said) = error_with_data(setup.eq, client);
        assert_eq!((err, said), (FI_ECONNREFUSED, Vec::new()));
        assert_eq!(close(client), 0);
    }
}

/// An endpoint that is bound to no event queue uses its domain's. The registration of regions stays
/// synchronous.
unsafe fn of_the_domain(lib: &Lib, to: &libc::sockaddr_in) {
    let setup = setup(lib, |_| {});
    let mut memory = [0_u8; 64];
    // SAFETY: fids as they are opened; the memory outlives its region.
    unsafe {
        let mut ep = null_mut();
        let (domain, info) = (setup.domain, setup.info.first());
        let open = (*(*domain).ops).endpoint.expect("a slot");
        assert_eq!(open(domain, info, &raw mut ep, null_mut()), 0);
        assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
        assert_eq!(control(ep, FI_ENABLE, null_mut()), -FI_ENOEQ);
        assert_eq!(bind(domain, setup.eq, 0), 0);
        assert_eq!(bind(domain, setup.eq, 0), -FI_EINVAL, "twice");
        assert_eq!(close(setup.eq), -FI_EBUSY, "the domain uses it");
        let (cm, address) = ((*ep).cm, std::ptr::from_ref(to).cast());
        assert_eq!(call!(cm, connect, ep, address, null(), 0), 0);
        assert_eq!(bind(ep, setup.eq, 0), -FI_EINVAL, "it has one");
        let (err, said) = error_with_data(setup.eq, ep);
        assert_eq!((err, said), (FI_ECONNREFUSED, Vec::new()));
        let mr = register(domain, memory.as_mut_ptr(), memory.len(), FI_SEND);
        silent(setup.eq);
        assert_eq!((close(mr), close(ep)), (0, 0));
    }
    setup.close();
}

unsafe fn pair(lib: &Lib, setup: &Setup) -> Pair {
    // SAFETY: an open setup.
    unsafe {
        let pair = Pair::connect(lib, setup, setup.info.first(), |ep, _| {
            assert_eq!(bind(ep, setup.cq, FI_TRANSMIT | FI_RECV), 0);
        });
        for (ep, context) in [(pair.client, 1), (pair.server, 2)] {
            let (none, context) = (null_mut(), without_provenance_mut(context));
            assert_eq!(call!((*ep).msg, recv, ep, none, 0, none, 0, context), 0);
        }
        pair
    }
}

unsafe fn flushed(setup: &Setup) -> (i32, usize) {
    // SAFETY: an open queue.
    let (err, context) = unsafe { completion(setup.cq) }.err().expect("flushed");
    (err, context.addr())
}

/// The queue has no further connection event.
unsafe fn silent(eq: *mut fid_eq) {
    let (mut buf, mut number) = ([0_u64; 16], 0);
    // SAFETY: an open queue and a buffer of that size.
    let ret = unsafe {
        let to = buf.as_mut_ptr().cast();
        call!((*eq).ops, sread, eq, &raw mut number, to, 128, 20, 0)
    };
    assert_eq!(ret, -(FI_EAGAIN as isize), "event {number}");
}

/// `fi_shutdown`: messages sent before it arrive, and each side gets one event.
unsafe fn orderly(lib: &Lib, setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let Pair { client, server } = pair(lib, setup);
        let ret = call!((*client).msg, inject, client, null(), 0, 0);
        assert_eq!(ret, 0);
        assert_eq!(call!((*client).cm, shutdown, client, 1), -FI_EBADFLAGS);
        assert_eq!(call!((*client).cm, shutdown, client, 0), 0);
        let ret = call!((*client).cm, shutdown, client, 0);
        assert_eq!(ret, -FI_ENOTCONN, "twice");
        let mut left = vec![client.cast::<fid>(), server.cast::<fid>()];
        while !left.is_empty() {
            let (number, entry) = event(setup.eq);
            assert_eq!(number, FI_SHUTDOWN);
            assert!(left.contains(&entry.fid), "told twice");
            left.retain(|fid| *fid != entry.fid);
        }
        silent(setup.eq);
        let done = completion(setup.cq).expect("the message that was sent before");
        assert_eq!(done.op_context.addr(), 2);
        assert_eq!(flushed(setup), (FI_ECANCELED, 1));
        let gone = -(FI_ESHUTDOWN as isize);
        for ep in [client, server] {
            let none = null_mut();
            assert_eq!(call!((*ep).msg, send, ep, none, 0, none, 0, none), gone);
            assert_eq!(call!((*ep).msg, recv, ep, none, 0, none, 0, none), gone);
            assert_eq!(peer_of(ep), Err(-FI_ENOTCONN));
            assert_eq!(call!((*ep).cm, connect, ep, null(), null(), 0), STATE);
        }
        Pair { client, server }.close();
    }
}

/// One end is closed without fi_shutdown.
unsafe fn abrupt(lib: &Lib, setup: &Setup) {
    // SAFETY: see `run`.
    unsafe {
        let Pair { client, server } = pair(lib, setup);
        assert_eq!(close(client), 0);
        assert_eq!(flushed(setup), (FI_ECANCELED, 1), "by closing");
        let (number, entry) = event(setup.eq);
        assert_eq!((number, entry.fid), (FI_SHUTDOWN, server.cast()));
        assert_eq!(flushed(setup), (FI_ECANCELED, 2));
        silent(setup.eq);
        assert_eq!(close(server), 0);
        silent(setup.eq);
    }
}
