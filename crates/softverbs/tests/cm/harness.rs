//! Common parts of the tests of the connection manager: wrappers of its C objects, and the
//! selection of the device.

use std::ffi::CStr;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};
use rdma_core_sys::*;

/// Limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The device: softverbs, or the system's if `CM_BACKEND` is `rdma-core`. The assertions about the
/// connection manager must also hold there.
fn backend() -> &'static Backend {
    if softverbs() {
        softverbs::backend()
    } else {
        rdma_core_sys::system::backend().expect("rdma-core")
    }
}

pub(crate) fn softverbs() -> bool {
    std::env::var_os("CM_BACKEND").is_none_or(|name| name != "rdma-core")
}

pub(crate) fn cm() -> &'static CmFns {
    &backend().cm
}

pub(crate) fn verbs() -> &'static VerbsFns {
    &backend().verbs
}

/// Prints why a test does not apply to the system's device; returns true if it does not.
pub(crate) fn skip_on_hardware(reason: &str) -> bool {
    if softverbs() {
        return false;
    }
    println!("skipped on the system's device: {reason}");
    true
}

/// An address of the device (`CM_HOST`), with a port.
pub(crate) fn on_device(port: u16) -> String {
    let host = std::env::var("CM_HOST").unwrap_or_else(|_| "127.0.0.1".into());
    format!("{host}:{port}")
}

/// 0, or the errno of a call that returned −1.
pub(crate) fn errno_of(ret: c_int) -> c_int {
    match ret {
        0 => 0,
        -1 => std::io::Error::last_os_error().raw_os_error().unwrap(),
        other => panic!("a call returned {other}"),
    }
}

pub(crate) fn storage(address: SocketAddr) -> sockaddr_storage {
    // SAFETY: all zeros is a value of it; it has room and alignment for every socket address.
    unsafe {
        let mut storage: sockaddr_storage = std::mem::zeroed();
        match address {
            SocketAddr::V4(v4) => {
                let out = &mut *(&raw mut storage).cast::<sockaddr_in>();
                out.sin_family = libc::AF_INET as u16;
                out.sin_port = v4.port().to_be();
                out.sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                let out = &mut *(&raw mut storage).cast::<sockaddr_in6>();
                out.sin6_family = libc::AF_INET6 as u16;
                out.sin6_port = v6.port().to_be();
                out.sin6_addr.s6_addr = v6.ip().octets();
                out.sin6_scope_id = v6.scope_id();
            }
        }
        storage
    }
}

/// Converts an address from C.
fn address(storage: *const sockaddr_storage) -> Option<SocketAddr> {
    // SAFETY: callers pass a whole storage.
    unsafe {
        match i32::from((*storage).ss_family) {
            libc::AF_INET => {
                let v4 = &*storage.cast::<sockaddr_in>();
                let ip = v4.sin_addr.s_addr.to_ne_bytes();
                Some((ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                let v6 = &*storage.cast::<sockaddr_in6>();
                Some((v6.sin6_addr.s6_addr, u16::from_be(v6.sin6_port)).into())
            }
            _ => None,
        }
    }
}

/// The contents of an event.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) kind: rdma_cm_event_type,
    pub(crate) status: c_int,
    pub(crate) id: Id,
    pub(crate) listener: Id,
    pub(crate) data: Vec<u8>,
    pub(crate) conn: rdma_conn_param,
}

impl Said {
    pub(crate) fn name(&self) -> String {
        // SAFETY: the function returns a static string for every number.
        let name = unsafe { CStr::from_ptr((cm().rdma_event_str)(self.kind)) };
        name.to_str()
            .unwrap()
            .trim_start_matches("RDMA_CM_EVENT_")
            .to_owned()
    }
}

/// A non-blocking event channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel(pub(crate) *mut rdma_event_channel);

// SAFETY: rdma_cm(7): the library is thread safe.
unsafe impl Send for Channel {}

impl Channel {
    pub(crate) fn new() -> Self {
        // SAFETY: no arguments.
        let channel = unsafe { (cm().rdma_create_event_channel)() };
        assert!(!channel.is_null(), "{}", std::io::Error::last_os_error());
        let channel = Self(channel);
        // SAFETY: the channel's descriptor.
        let set = unsafe { libc::fcntl(channel.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        assert_eq!(set, 0);
        channel
    }

    pub(crate) fn fd(self) -> c_int {
        // SAFETY: a live channel.
        unsafe { (*self.0).fd }
    }

    pub(crate) fn readable(self, wait: Duration) -> bool {
        let mut poll = libc::pollfd {
            fd: self.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one writable element.
        unsafe { libc::poll(&raw mut poll, 1, wait.as_millis() as c_int) == 1 }
    }

    /// The next event without acknowledging it, or the errno.
    pub(crate) fn raw(self) -> Result<*mut rdma_cm_event, c_int> {
        let mut event = null_mut();
        // SAFETY: a live channel and room for a pointer.
        match errno_of(unsafe { (cm().rdma_get_cm_event)(self.0, &raw mut event) }) {
            0 => Ok(event),
            errno => Err(errno),
        }
    }

    /// The next event, acknowledged; within [`PATIENCE`].
    pub(crate) fn next(self) -> Said {
        self.next_within(PATIENCE).expect("no event came")
    }

    pub(crate) fn next_within(self, wait: Duration) -> Option<Said> {
        let until = Instant::now() + wait;
        loop {
            match self.raw() {
                Ok(event) => {
                    let said = read(event);
                    // SAFETY: an event not acknowledged before.
                    assert_eq!(unsafe { (cm().rdma_ack_cm_event)(event) }, 0);
                    if said.kind == RDMA_CM_EVENT_TIMEWAIT_EXIT && !softverbs() {
                        continue;
                    }
                    return Some(said);
                }
                Err(errno) => assert_eq!(errno, libc::EAGAIN),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.readable(left) {
                return None;
            }
        }
    }

    /// The next event, which must have this kind and status.
    pub(crate) fn expect(self, kind: rdma_cm_event_type, status: c_int) -> Said {
        let said = self.next();
        assert_eq!(
            (said.kind, said.status),
            (kind, status),
            "{} came: {said:?}",
            said.name()
        );
        said
    }

    /// Expects the event after the time in which a queue pair's number is not reused. On a network
    /// this is the maximum lifetime of packets, so the event is not awaited there.
    pub(crate) fn expect_timewait(self) {
        if softverbs() {
            self.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
        }
    }

    pub(crate) fn expect_silence(self) {
        if let Some(said) = self.next_within(Duration::from_millis(50)) {
            panic!("an event came: {} {said:?}", said.name());
        }
    }

    /// How often the descriptor is readable during `span`, without an event for the application.
    pub(crate) fn wakes(self, span: Duration) -> usize {
        let until = Instant::now() + span;
        let mut count = 0;
        while self.readable(until.saturating_duration_since(Instant::now())) {
            assert_eq!(self.raw().unwrap_err(), libc::EAGAIN);
            count += 1;
            if Instant::now() >= until {
                break;
            }
        }
        count
    }

    /// Runs `act` while the channel's descriptor is no epoll set, so that no descriptor can be
    /// watched (`EINVAL`).
    pub(crate) fn without_epoll<T>(self, act: impl FnOnce() -> T) -> T {
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: descriptors of this test.
        let kept = unsafe { libc::fcntl(self.fd(), libc::F_DUPFD_CLOEXEC, 0) };
        assert!(kept >= 0);
        let replace = |fd| {
            // SAFETY: as above.
            let replaced = unsafe { libc::dup3(fd, self.fd(), libc::O_CLOEXEC) };
            assert_eq!(replaced, self.fd());
        };
        replace(null.as_raw_fd());
        let out = act();
        replace(kept);
        // SAFETY: as above.
        unsafe { libc::close(kept) };
        out
    }

    pub(crate) fn destroy(self) {
        // SAFETY: the tests use it no more.
        unsafe { (cm().rdma_destroy_event_channel)(self.0) };
    }

    pub(crate) fn id(self) -> Id {
        self.id_in(RDMA_PS_TCP)
    }

    /// An id of a port space.
    pub(crate) fn id_in(self, ps: rdma_port_space) -> Id {
        let mut id = null_mut();
        // SAFETY: a live channel and room for a pointer.
        let ret = unsafe { (cm().rdma_create_id)(self.0, &raw mut id, null_mut(), ps) };
        assert_eq!(errno_of(ret), 0);
        Id(id)
    }

    /// A listening id, and its address.
    pub(crate) fn listener(self, on: &str, backlog: c_int) -> (Id, SocketAddr) {
        let id = self.id();
        assert_eq!(id.bind(on), 0);
        assert_eq!(id.listen(backlog), 0);
        (id, id.source().unwrap())
    }

    /// An id with a route to `to`.
    pub(crate) fn routed(self, to: SocketAddr) -> Id {
        self.route(self.id(), to)
    }

    /// Resolves the route of an id.
    pub(crate) fn route(self, id: Id, to: SocketAddr) -> Id {
        assert_eq!(id.resolve(None, to), 0);
        self.expect(RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        assert_eq!(id.resolve_route(), 0);
        self.expect(RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        id
    }
}

/// Copies the contents of an event.
pub(crate) fn read(event: *mut rdma_cm_event) -> Said {
    // SAFETY: a live event, whose private data has the length that it says.
    unsafe {
        let conn = *(*event).param.conn.as_ref();
        let data = if conn.private_data.is_null() {
            Vec::new()
        } else {
            std::slice::from_raw_parts(conn.private_data.cast::<u8>(), conn.private_data_len.into())
                .to_vec()
        };
        Said {
            kind: (*event).event,
            status: (*event).status,
            id: Id((*event).id),
            listener: Id((*event).listen_id),
            data,
            conn,
        }
    }
}

/// A connection identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) *mut rdma_cm_id);

// SAFETY: rdma_cm(7): the library is thread safe.
unsafe impl Send for Id {}

impl Id {
    pub(crate) fn c<'a>(self) -> &'a mut rdma_cm_id {
        // SAFETY: a live id; the tests keep no such reference, and look from one thread at a time.
        unsafe { &mut *self.0 }
    }

    pub(crate) fn bind(self, address: &str) -> c_int {
        let mut to = storage(address.parse().unwrap());
        // SAFETY: a live id and a valid address.
        errno_of(unsafe { (cm().rdma_bind_addr)(self.0, (&raw mut to).cast()) })
    }

    pub(crate) fn listen(self, backlog: c_int) -> c_int {
        // SAFETY: a live id.
        errno_of(unsafe { (cm().rdma_listen)(self.0, backlog) })
    }

    /// This id, listening at an address of the device, and the address.
    pub(crate) fn listening(self) -> (Self, SocketAddr) {
        assert_eq!(self.bind(&on_device(0)), 0);
        assert_eq!(self.listen(8), 0);
        (self, self.source().unwrap())
    }

    pub(crate) fn resolve(self, from: Option<SocketAddr>, to: SocketAddr) -> c_int {
        let mut from = from.map(storage);
        let from = from
            .as_mut()
            .map_or(null_mut(), |from| (&raw mut *from).cast::<sockaddr>());
        let mut to = storage(to);
        // SAFETY: a live id and valid addresses.
        errno_of(unsafe { (cm().rdma_resolve_addr)(self.0, from, (&raw mut to).cast(), 2000) })
    }

    pub(crate) fn resolve_route(self) -> c_int {
        // SAFETY: a live id.
        errno_of(unsafe { (cm().rdma_resolve_route)(self.0, 2000) })
    }

    pub(crate) fn source(self) -> Option<SocketAddr> {
        address((&raw const self.c().route.addr.__bindgen_anon_1).cast())
    }

    pub(crate) fn destination(self) -> Option<SocketAddr> {
        address((&raw const self.c().route.addr.__bindgen_anon_2).cast())
    }

    pub(crate) fn connect(self, param: &mut rdma_conn_param) -> c_int {
        // SAFETY: a live id; the private data outlives the call.
        errno_of(unsafe { (cm().rdma_connect)(self.0, param) })
    }

    pub(crate) fn accept(self, param: &mut rdma_conn_param) -> c_int {
        // SAFETY: as above.
        errno_of(unsafe { (cm().rdma_accept)(self.0, param) })
    }

    pub(crate) fn reject(self, data: &[u8]) -> c_int {
        // SAFETY: a live id and the bytes of a slice.
        errno_of(unsafe { (cm().rdma_reject)(self.0, data.as_ptr().cast(), data.len() as u8) })
    }

    pub(crate) fn disconnect(self) -> c_int {
        // SAFETY: a live id.
        errno_of(unsafe { (cm().rdma_disconnect)(self.0) })
    }

    pub(crate) fn migrate(self, channel: Channel) -> c_int {
        // SAFETY: a live id and a live channel.
        errno_of(unsafe { (cm().rdma_migrate_id)(self.0, channel.0) })
    }

    pub(crate) fn set_option(self, option: u32, value: &[u8]) -> c_int {
        let at = value.as_ptr().cast_mut().cast();
        // SAFETY: a live id; the value is only read.
        errno_of(unsafe {
            (cm().rdma_set_option)(
                self.0,
                RDMA_OPTION_ID as c_int,
                option as c_int,
                at,
                value.len(),
            )
        })
    }

    /// Creates a queue pair and a completion queue for the id.
    pub(crate) fn create_qp(self) -> c_int {
        let mut attr = ibv_qp_init_attr {
            qp_type: IBV_QPT_RC,
            cap: ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            ..ibv_qp_init_attr::default()
        };
        // SAFETY: a live id; NULL asks for the default protection domain.
        errno_of(unsafe { (cm().rdma_create_qp)(self.0, null_mut(), &raw mut attr) })
    }

    pub(crate) fn qp_state(self) -> ibv_qp_state {
        let mut attr = ibv_qp_attr::default();
        let mut init = ibv_qp_init_attr::default();
        // SAFETY: a live queue pair and writable structures.
        let ret = unsafe {
            (verbs().ibv_query_qp)(
                self.c().qp,
                &raw mut attr,
                IBV_QP_STATE as c_int,
                &raw mut init,
            )
        };
        assert_eq!(ret, 0);
        attr.qp_state
    }

    /// Destroys the id and its queue pair.
    pub(crate) fn destroy(self) {
        // SAFETY: a live id, which the tests use no more.
        unsafe {
            if !self.c().qp.is_null() {
                (cm().rdma_destroy_qp)(self.0);
            }
            assert_eq!(errno_of((cm().rdma_destroy_id)(self.0)), 0);
        }
    }
}

/// Connection parameters with private data, which must outlive them.
pub(crate) fn param(data: &[u8]) -> rdma_conn_param {
    // for ids without a queue pair; a real device refuses a number that has a connection
    static QP_NUM: AtomicU32 = AtomicU32::new(1);
    let own = QP_NUM.fetch_add(1, Ordering::Relaxed);
    rdma_conn_param {
        qp_num: (std::process::id() & 0xfff) << 12 | own & 0xfff,
        private_data: data.as_ptr().cast(),
        private_data_len: data.len() as u8,
        responder_resources: 3,
        initiator_depth: 2,
        retry_count: 6,
        rnr_retry_count: 5,
        ..rdma_conn_param::default()
    }
}

/// Whether `data` is `start`, and zeros up to the field's length.
pub(crate) fn assert_padded(data: &[u8], start: &[u8], len: usize) {
    assert_eq!(data.len(), len);
    assert_eq!(&data[..start.len()], start);
    assert!(data[start.len()..].iter().all(|&byte| byte == 0));
}
