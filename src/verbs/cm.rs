//! The connection manager: event channels and identifiers.
//!
//! An event is copied and acknowledged before the engine processes it. Destroying an identifier
//! waits for the acknowledgement of its events, so it never waits for a lock of the engine.

#![allow(unsafe_code, reason = "calls the connection manager")]

use std::ffi::{CStr, c_void};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys::{self as sys, Backend};

use super::{Device, Pd, QpNumber, SockAddr};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// Time limit of the resolution of an address or a route, in milliseconds.
const RESOLVE_TIMEOUT: i32 = 2000;

/// Maximum length in bytes of private data in a message of the connection manager: that of an
/// acceptance (`rdma_accept(3)`). A request over an IP address has 56 bytes, a rejection 148, a
/// request for a service 180, its answer 136.
const MAX_PRIVATE_DATA: usize = 196;

/// `IB_SIDR_UNSUPPORTED` of the kernel's ib_cm.h: no process offers the service.
const NO_SERVICE: i32 = 1;
/// Reason of a rejection if no process listens (`IB_CM_REJ_INVALID_SERVICE_ID`).
const INVALID_SERVICE_ID: i32 = 8;

// the events of connections and of services have their private data in the same place
const _: () = {
    use std::mem::offset_of;
    use sys::{rdma_conn_param as conn, rdma_ud_param as ud};
    assert!(offset_of!(conn, private_data) == offset_of!(ud, private_data));
    assert!(offset_of!(conn, private_data_len) == offset_of!(ud, private_data_len));
};

/// Private data of a request, of its acceptance or of its rejection, as it was received. The
/// transport may have padded it with zeros.
#[derive(Clone, Copy)]
pub struct PrivateData {
    bytes: [u8; MAX_PRIVATE_DATA],
    len: u8,
}

impl PrivateData {
    /// No data.
    pub const EMPTY: Self = Self {
        bytes: [0; MAX_PRIVATE_DATA],
        len: 0,
    };

    /// Copies the first [`MAX_PRIVATE_DATA`] bytes.
    fn copy(bytes: &[u8]) -> Self {
        let mut this = Self::EMPTY;
        let count = bytes.len().min(MAX_PRIVATE_DATA);
        this.bytes[..count].copy_from_slice(&bytes[..count]);
        // fits: at most 196
        this.len = count as u8;
        this
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The data without its first `count` bytes.
    pub fn behind(&self, count: usize) -> Self {
        Self::copy(self.bytes().get(count..).unwrap_or_default())
    }
}

impl std::fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrivateData({:?})", self.bytes())
    }
}

/// The kind of an event of the connection manager (`rdma_get_cm_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmEventKind {
    /// The peer's address is resolved.
    AddrResolved,
    /// The route is resolved.
    RouteResolved,
    /// A peer requests a connection, or a service.
    ConnectRequest,
    /// The peer has accepted a request of an identifier without a queue pair
    /// ([`CmId::connect_with`]). [`CmId::establish`] completes the connection.
    ConnectResponse,
    /// The connection is established; or the service has answered.
    Established,
    /// The connection has ended.
    Disconnected,
    /// The peer has rejected the connection, or no process listens at the address.
    Rejected,
    /// The address, the route or the peer cannot be reached, or the handshake has failed.
    Unreachable,
    /// The device is being removed.
    DeviceRemoval,
    /// The interface has lost the address.
    AddrChange,
    /// An event that the engine ignores.
    Other,
}

/// An event, copied and acknowledged.
#[derive(Debug)]
pub struct CmEvent {
    /// The kind of event.
    pub kind: CmEventKind,
    /// The identifier of the event: [`CmId::object`]. For a request, the listening one.
    pub object: usize,
    /// The new identifier of a request.
    pub new_id: Option<CmId>,
    /// Reason of a failure, positive; 0 if the event is no failure.
    pub status: i32,
    /// The peer's private data.
    pub private_data: PrivateData,
    /// Of [`CmEventKind::ConnectResponse`]: the number of the peer's queue pair.
    pub peer_qp: Option<QpNumber>,
}

impl CmEvent {
    /// Whether a connection request was rejected because no process listens at the address. Other
    /// rejections are those of a process, which may have ended since.
    pub fn is_no_listener(&self) -> bool {
        self.kind == CmEventKind::Rejected && self.status == INVALID_SERVICE_ID
    }

    /// Whether a connection request was rejected without private data although a process listens or
    /// has listened at the address: it has destroyed the identifier of the request, could not
    /// accept it, or has no room for requests. The transport pads private data with zeros.
    pub fn is_unanswered(&self) -> bool {
        let rejected = self.kind == CmEventKind::Rejected && !self.is_no_listener();
        rejected && self.private_data.bytes().iter().all(|byte| *byte == 0)
    }

    /// Whether the request for a service has failed because no process listens at the address.
    pub fn is_no_service(&self) -> bool {
        self.kind == CmEventKind::Unreachable && self.status == NO_SERVICE
    }
}

/// Parameters of a connection (`rdma_connect(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnParam<'a> {
    /// Private data for the peer: at most 56 bytes to connect, 196 to accept.
    pub private_data: &'a [u8],
    /// Number of retransmissions of an unacknowledged packet, at most 7.
    pub retry_count: u8,
    /// Retries after the peer's RNR NAK (receiver not ready); 7 retries indefinitely.
    pub rnr_retry_count: u8,
}

impl<'a> ConnParam<'a> {
    /// The parameters of a service: its messages have private data alone.
    fn of_service(private_data: &'a [u8]) -> Self {
        Self {
            private_data,
            retry_count: 0,
            rnr_retry_count: 0,
        }
    }
}

/// Runs `f` on the parameters in C's form, with the number of the queue pair if the identifier has
/// none.
///
/// # Errors
/// `EINVAL`: more than 255 bytes of private data. Those of `f`.
fn with_c_param(
    param: &ConnParam<'_>,
    qp: Option<QpNumber>,
    f: impl FnOnce(*mut sys::rdma_conn_param) -> Result<()>,
) -> Result<()> {
    let mut c = sys::rdma_conn_param {
        private_data: param.private_data.as_ptr().cast(),
        private_data_len: data_len(param.private_data)?,
        // the library limits both to those of the device and the peer
        responder_resources: sys::RDMA_MAX_RESP_RES as u8,
        initiator_depth: sys::RDMA_MAX_INIT_DEPTH as u8,
        flow_control: 1,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        qp_num: qp.map_or(0, QpNumber::get),
        ..Default::default()
    };
    f(&raw mut c)
}

/// The length of private data in the type of the connection manager, which refuses a length above
/// its own limit.
fn data_len(private_data: &[u8]) -> Result<u8> {
    u8::try_from(private_data.len()).map_err(|_| FiErrno::EINVAL)
}

/// An event channel. Thread safe.
pub struct EventChannel {
    raw: *mut sys::rdma_event_channel,
    backend: &'static Backend,
}

// SAFETY: rdma_cm(7): the library is thread safe.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl std::fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EventChannel({:p})", self.raw)
    }
}

impl std::fmt::Debug for CmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CmId({:p})", self.raw)
    }
}

impl EventChannel {
    /// `rdma_create_event_channel(3)`.
    ///
    /// # Errors
    /// `ENODEV`: the kernel has no connection manager. `EMFILE`.
    pub fn create(backend: &'static Backend) -> Result<Arc<Self>> {
        // SAFETY: no arguments.
        let raw = unsafe { (backend.cm.rdma_create_event_channel)() };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        let this = Self { raw, backend };
        super::set_nonblocking(this.fd())?;
        Ok(Arc::new(this))
    }

    /// The backend of the object.
    pub fn backend(&self) -> &'static Backend {
        self.backend
    }

    /// The descriptor to poll for reading.
    pub fn fd(&self) -> RawFd {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).fd }
    }

    /// Creates an identifier for a reliable connection, with its events on this channel.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn create_id(self: &Arc<Self>) -> Result<CmId> {
        self.create_in(sys::RDMA_PS_TCP)
    }

    /// Creates an identifier for one exchange of a request and its answer without a connection
    /// (SIDR), or for a service that answers such requests; with its events on this channel. The
    /// port space is that of UDP.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn create_sidr_id(self: &Arc<Self>) -> Result<CmId> {
        self.create_in(sys::RDMA_PS_UDP)
    }

    fn create_in(self: &Arc<Self>, space: sys::rdma_port_space) -> Result<CmId> {
        let mut raw = null_mut();
        // SAFETY: the channel is live, `raw` writable.
        FiErrno::from_call(unsafe {
            (self.backend.cm.rdma_create_id)(self.raw, &raw mut raw, null_mut(), space)
        })?;
        Ok(self.own(raw))
    }

    fn own(self: &Arc<Self>, raw: *mut sys::rdma_cm_id) -> CmId {
        CmId {
            raw,
            backend: self.backend,
            channel: Mutex::new(Arc::clone(self)),
        }
    }

    /// Takes the next event. Never blocks.
    ///
    /// # Errors
    /// `EAGAIN`: the channel is empty. Others: the connection manager's.
    pub fn next_event(self: &Arc<Self>) -> Result<CmEvent> {
        let mut raw = null_mut();
        // SAFETY: the channel is live and non-blocking.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_get_cm_event)(self.raw, &raw mut raw) })?;
        // SAFETY: the event is valid until it is acknowledged.
        let event = unsafe { self.copy(&*raw) };
        // SAFETY: read above, acknowledged once, and not used afterwards.
        unsafe { (self.backend.cm.rdma_ack_cm_event)(raw) };
        Ok(event)
    }

    /// Copies an event.
    ///
    /// # Safety
    /// The event was read from this channel and is not acknowledged yet.
    unsafe fn copy(self: &Arc<Self>, event: &sys::rdma_cm_event) -> CmEvent {
        let kind = match event.event {
            sys::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddrResolved,
            sys::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
            sys::RDMA_CM_EVENT_CONNECT_REQUEST => CmEventKind::ConnectRequest,
            sys::RDMA_CM_EVENT_CONNECT_RESPONSE => CmEventKind::ConnectResponse,
            sys::RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established,
            sys::RDMA_CM_EVENT_DISCONNECTED => CmEventKind::Disconnected,
            sys::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected,
            sys::RDMA_CM_EVENT_ADDR_ERROR
            | sys::RDMA_CM_EVENT_ROUTE_ERROR
            | sys::RDMA_CM_EVENT_CONNECT_ERROR
            | sys::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable,
            sys::RDMA_CM_EVENT_DEVICE_REMOVAL => CmEventKind::DeviceRemoval,
            sys::RDMA_CM_EVENT_ADDR_CHANGE => CmEventKind::AddrChange,
            _ => CmEventKind::Other,
        };
        let carries_data = matches!(
            kind,
            CmEventKind::ConnectRequest
                | CmEventKind::ConnectResponse
                | CmEventKind::Established
                | CmEventKind::Rejected
        );
        let mut private_data = PrivateData::EMPTY;
        let mut peer_qp = None;
        if carries_data {
            // SAFETY: these events carry parameters of a connection, or of a service: both begin
            // with the private data.
            let conn = unsafe { &*(&raw const event.param).cast::<sys::rdma_conn_param>() };
            if kind == CmEventKind::ConnectResponse {
                peer_qp = QpNumber::new(conn.qp_num);
            }
            if !conn.private_data.is_null() {
                // SAFETY: the length is the event's own.
                let bytes = unsafe {
                    std::slice::from_raw_parts(
                        conn.private_data.cast::<u8>(),
                        conn.private_data_len.into(),
                    )
                };
                private_data = PrivateData::copy(bytes);
            }
        }
        let request = kind == CmEventKind::ConnectRequest;
        CmEvent {
            kind,
            object: if request { event.listen_id } else { event.id } as usize,
            new_id: request.then(|| self.own(event.id)),
            status: event.status.saturating_abs(),
            private_data,
            peer_qp,
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: created by this backend. Each identifier on the channel holds a reference to it,
        // so no such identifier exists any more.
        unsafe { (self.backend.cm.rdma_destroy_event_channel)(self.raw) }
    }
}

/// An identifier: one side of a connection, or a listener. Thread safe.
pub struct CmId {
    raw: *mut sys::rdma_cm_id,
    backend: &'static Backend,
    channel: Mutex<Arc<EventChannel>>,
}

// SAFETY: rdma_cm(7): the library is thread safe.
unsafe impl Send for CmId {}
// SAFETY: as above.
unsafe impl Sync for CmId {}

impl CmId {
    /// The backend of the object.
    pub fn backend(&self) -> &'static Backend {
        self.backend
    }

    /// The identifier's identity in events.
    pub fn object(&self) -> usize {
        self.raw as usize
    }

    /// The device's port of the identifier: 0 until an address is bound or resolved.
    pub fn port(&self) -> u8 {
        // SAFETY: live; the connection manager writes the field before it reports the address.
        unsafe { (*self.raw).port_num }
    }

    /// Moves the identifier's events to another channel of the same backend.
    ///
    /// # Errors
    /// `EINVAL`: the channel is of another backend. Others: the connection manager's.
    pub fn migrate(&self, to: &Arc<EventChannel>) -> Result<()> {
        let mut channel = self.channel.lock();
        if Arc::ptr_eq(&channel, to) {
            return Ok(());
        }
        if !std::ptr::eq(self.backend, to.backend) {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: both are live and of one backend.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_migrate_id)(self.raw, to.raw) })?;
        *channel = Arc::clone(to);
        Ok(())
    }

    /// Binds a local address. Port 0 selects a free port.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EADDRNOTAVAIL`, `ENODEV`.
    pub fn bind_addr(&self, addr: SocketAddr) -> Result<()> {
        let mut addr = SockAddr::from(addr);
        // SAFETY: live; the address has room for its family.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_bind_addr)(self.raw, addr.as_mut_ptr()) })
    }

    /// Begins to resolve the peer's address; an event reports the result.
    ///
    /// # Errors
    /// Those that the connection manager detects at once, for instance `ENETUNREACH` or `ENODEV`.
    pub fn resolve_addr(&self, src: Option<SocketAddr>, dst: SocketAddr) -> Result<()> {
        let mut src = src.map(SockAddr::from);
        let mut dst = SockAddr::from(dst);
        let src = src.as_mut().map_or(null_mut(), SockAddr::as_mut_ptr);
        // SAFETY: live; the addresses have room for their families.
        FiErrno::from_call(unsafe {
            (self.backend.cm.rdma_resolve_addr)(self.raw, src, dst.as_mut_ptr(), RESOLVE_TIMEOUT)
        })
    }

    /// Begins to resolve the route; an event reports the result.
    ///
    /// # Errors
    /// The connection manager's.
    pub fn resolve_route(&self) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_call(unsafe {
            (self.backend.cm.rdma_resolve_route)(self.raw, RESOLVE_TIMEOUT)
        })
    }

    /// Begins to connect; an event reports the result.
    ///
    /// # Errors
    /// The connection manager's.
    pub fn connect(&self, param: &ConnParam<'_>) -> Result<()> {
        self.connect_as(None, param)
    }

    /// Begins to connect a queue pair that the identifier does not own, and whose states the caller
    /// changes ([`Qp::advance_to_rts`](super::Qp::advance_to_rts)). An event reports the result:
    /// [`ConnectResponse`](CmEventKind::ConnectResponse).
    ///
    /// # Errors
    /// The connection manager's.
    pub fn connect_with(&self, qp: QpNumber, param: &ConnParam<'_>) -> Result<()> {
        self.connect_as(Some(qp), param)
    }

    fn connect_as(&self, qp: Option<QpNumber>, param: &ConnParam<'_>) -> Result<()> {
        with_c_param(param, qp, |param| {
            // SAFETY: live; the parameters live through the call.
            FiErrno::from_call(unsafe { (self.backend.cm.rdma_connect)(self.raw, param) })
        })
    }

    /// Completes the connection of [`Self::connect_with`], when the queue pair can send
    /// (`rdma_establish(3)`): the peer gets [`Established`](CmEventKind::Established), this side no
    /// event.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the library is older than release 25 of rdma-core. The connection manager's.
    pub fn establish(&self) -> Result<()> {
        let establish = self.backend.cm.rdma_establish;
        let establish = establish.ok_or(FiErrno::EOPNOTSUPP)?;
        // SAFETY: live.
        FiErrno::from_call(unsafe { establish(self.raw) })
    }

    /// Requests a service: the identifier is one of [`EventChannel::create_sidr_id`], its route
    /// resolved. `private_data` has at most 180 bytes. An event reports the result:
    /// [`Established`](CmEventKind::Established) with the private data of the answer, or
    /// [`Unreachable`](CmEventKind::Unreachable).
    ///
    /// # Errors
    /// The connection manager's.
    pub fn request_service(&self, private_data: &[u8]) -> Result<()> {
        self.connect_as(None, &ConnParam::of_service(private_data))
    }

    /// Answers the request for a service of this identifier, with at most 136 bytes. No event
    /// follows.
    ///
    /// # Errors
    /// The connection manager's.
    pub fn answer_service(&self, private_data: &[u8]) -> Result<()> {
        self.accept_as(None, &ConnParam::of_service(private_data))
    }

    /// Accepts the connection request of this identifier; an event reports the result.
    ///
    /// # Errors
    /// The connection manager's, for instance because the peer has ended the connection.
    pub fn accept(&self, param: &ConnParam<'_>) -> Result<()> {
        self.accept_as(None, param)
    }

    /// As [`Self::accept`], for a queue pair that the identifier does not own, and which can
    /// receive already ([`Target::advance_to_rts`](super::Target::advance_to_rts)).
    ///
    /// # Errors
    /// As [`Self::accept`].
    pub fn accept_with(&self, qp: QpNumber, param: &ConnParam<'_>) -> Result<()> {
        self.accept_as(Some(qp), param)
    }

    fn accept_as(&self, qp: Option<QpNumber>, param: &ConnParam<'_>) -> Result<()> {
        with_c_param(param, qp, |param| {
            // SAFETY: live; the parameters live through the call.
            FiErrno::from_call(unsafe { (self.backend.cm.rdma_accept)(self.raw, param) })
        })
    }

    /// The attributes and their mask with which a queue pair goes to `state`
    /// (`rdma_init_qp_attr(3)`).
    pub(super) fn init_qp_attr(&self, state: sys::ibv_qp_state) -> Result<(sys::ibv_qp_attr, u32)> {
        let fill = self.backend.cm.rdma_init_qp_attr;
        let fill = fill.ok_or(FiErrno::EOPNOTSUPP)?;
        let mut attr = sys::ibv_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        let mut mask = 0;
        // SAFETY: live; attributes and mask are writable.
        FiErrno::from_call(unsafe { fill(self.raw, &raw mut attr, &raw mut mask) })?;
        Ok((attr, mask.cast_unsigned()))
    }

    /// Rejects the connection request of this identifier, with at most 148 bytes of private data.
    ///
    /// # Errors
    /// The connection manager's, for instance because the peer has ended the connection.
    pub fn reject(&self, private_data: &[u8]) -> Result<()> {
        let len = data_len(private_data)?;
        let address: *const c_void = private_data.as_ptr().cast();
        // SAFETY: live; the data lives through the call and has `len` bytes.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_reject)(self.raw, address, len) })
    }

    /// Disconnects, or answers the peer's disconnect, and moves the queue pair to its error state.
    ///
    /// # Errors
    /// `EINVAL`: no connection exists.
    pub fn disconnect(&self) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_disconnect)(self.raw) })
    }

    /// Reports to the connection manager that the peer's first packet has arrived before the last
    /// message of the handshake, which may be lost.
    ///
    /// # Errors
    /// `EISCONN`: that message has arrived meanwhile.
    pub fn notify_established(&self) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_call(unsafe {
            (self.backend.cm.rdma_notify)(self.raw, sys::IBV_EVENT_COMM_EST)
        })
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EINVAL`.
    pub fn listen(&self, backlog: i32) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_listen)(self.raw, backlog) })
    }

    /// Sets the time after which an unacknowledged packet is sent again: 4.096 µs times 2 to the
    /// power of `exponent`. Before connecting or accepting.
    ///
    /// # Errors
    /// `ENOSYS`, `EINVAL`: the kernel is older than 5.1, or the device does not support the time.
    pub fn set_ack_timeout(&self, exponent: u8) -> Result<()> {
        let mut value = exponent;
        // SAFETY: live; the option is one byte.
        FiErrno::from_call(unsafe {
            (self.backend.cm.rdma_set_option)(
                self.raw,
                sys::RDMA_OPTION_ID as i32,
                sys::RDMA_OPTION_ID_ACK_TIMEOUT as i32,
                (&raw mut value).cast(),
                1,
            )
        })
    }

    /// Sets the type of service of the connection's packets. The caller does this before it
    /// resolves the peer's address or accepts a request.
    ///
    /// # Errors
    /// The connection manager's.
    pub fn set_type_of_service(&self, class: u8) -> Result<()> {
        let mut value = class;
        // SAFETY: live; the option is one byte.
        FiErrno::from_call(unsafe {
            (self.backend.cm.rdma_set_option)(
                self.raw,
                sys::RDMA_OPTION_ID as i32,
                sys::RDMA_OPTION_ID_TOS as i32,
                (&raw mut value).cast(),
                1,
            )
        })
    }

    /// Whether the identifier is bound to this device.
    pub fn is_on(&self, device: &Device) -> bool {
        device.is_of(self.context())
    }

    /// Name of the device that the identifier is bound to; `None` for a wildcard address.
    pub fn device_name(&self) -> Option<String> {
        let context = self.context();
        if context.is_null() {
            return None;
        }
        let name =
            // SAFETY: the connection manager keeps the context open while the identifier is on it.
            unsafe { CStr::from_ptr((self.backend.verbs.ibv_get_device_name)((*context).device)) };
        Some(name.to_string_lossy().into_owned())
    }

    /// Whether the identifier is bound to a device.
    pub fn has_device(&self) -> bool {
        !self.context().is_null()
    }

    pub(super) fn context(&self) -> *mut sys::ibv_context {
        // SAFETY: live. The field is one aligned word, which calls on this identifier and reads of
        // its events change.
        unsafe { (&raw const (*self.raw).verbs).read_volatile() }
    }

    /// This side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        // SAFETY: live; the field is an address with room for every family.
        unsafe { SockAddr::read((&raw const (*self.raw).route.addr.__bindgen_anon_1).cast()) }
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        // SAFETY: live; the field is an address with room for every family.
        unsafe { SockAddr::read((&raw const (*self.raw).route.addr.__bindgen_anon_2).cast()) }
    }

    pub(super) fn create_qp(
        &self,
        pd: &Pd,
        attr: &mut sys::ibv_qp_init_attr,
    ) -> Result<*mut sys::ibv_qp> {
        // SAFETY: live; identifier and protection domain are on one device.
        FiErrno::from_call(unsafe { (self.backend.cm.rdma_create_qp)(self.raw, pd.raw(), attr) })?;
        // SAFETY: live; the call has set the queue pair.
        Ok(unsafe { (*self.raw).qp })
    }

    /// As [`Self::create_qp`], with the extended attributes, which contain the protection domain.
    pub(super) fn create_qp_ex(
        &self,
        attr: &mut sys::ibv_qp_init_attr_ex,
    ) -> Result<*mut sys::ibv_qp> {
        let create = self.backend.cm.rdma_create_qp_ex;
        let create = create.ok_or(FiErrno::EOPNOTSUPP)?;
        // SAFETY: live; identifier and protection domain are on one device.
        FiErrno::from_call(unsafe { create(self.raw, attr) })?;
        // SAFETY: live; the call has set the queue pair.
        Ok(unsafe { (*self.raw).qp })
    }

    pub(super) fn destroy_qp(&self) {
        // SAFETY: live, with a queue pair; the queue pair's only owner calls this once.
        unsafe { (self.backend.cm.rdma_destroy_qp)(self.raw) }
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: created by this backend, destroyed once. A queue pair on the identifier holds a
        // reference to it, so none exists any more. All events of the identifier were acknowledged.
        let ret = unsafe { (self.backend.cm.rdma_destroy_id)(self.raw) };
        if let Err(error) = FiErrno::from_call(ret) {
            warn_log!(EpCtrl, "rdma_destroy_id: {error}");
        }
    }
}
