//! Devices, which are listed by the connection manager and opened once per process. A forked child
//! lists and opens its own, and examines them anew: the contexts of its parent are of no use there.
//!
//! librdmacm can connect only queue pairs on its own context of the device. So a device here is an
//! entry of `rdma_get_devices(3)` and is never opened by `ibv_open_device`. The list is referenced
//! as long as one of its devices is in use, because librdmacm closes contexts without a reference.
//!
//! In one file: what is asked of a device is cached in it, and tested here.

#![allow(unsafe_code, reason = "calls verbs")]

use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use forks::PerProcess;
use parking_lot::Mutex;
use rdma_core_sys::{self as sys, Backend};

use super::attr::{DeviceAttr, LinkLayer, PciAddress, Port};
use super::cm::{CmId, EventChannel};
use super::qp_create::probe_max_inline;
use super::quirks::{Behaviour, NoBehaviour, XrcBehaviour};
use super::sockaddr::SockAddr;
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};

/// A reference to librdmacm's list of contexts.
struct ContextList {
    backend: &'static Backend,
    list: *mut *mut sys::ibv_context,
}

// SAFETY: `rdma_get_devices(3)` and `rdma_free_devices(3)` may be called from any thread
// (rdma_cm(7): the library is thread safe); the array itself is only read.
unsafe impl Send for ContextList {}
// SAFETY: as above.
unsafe impl Sync for ContextList {}

impl Drop for ContextList {
    fn drop(&mut self) {
        // SAFETY: the list was returned by `rdma_get_devices` of this backend and is freed once.
        unsafe { (self.backend.cm.rdma_free_devices)(self.list) }
    }
}

/// An address by which a device can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAddress {
    /// The address, with port 0.
    pub addr: SocketAddr,
    /// Length of the network's prefix in bits.
    pub prefix_len: u8,
    /// Name of the network interface.
    pub interface: String,
    /// Whether the interface is a loopback interface.
    pub loopback: bool,
}

/// Sort key of addresses: one that more peers can use comes first. Addresses below 2 reach other
/// networks.
pub fn address_rank(addr: &SocketAddr) -> u8 {
    match addr.ip() {
        IpAddr::V4(ip) if ip.is_loopback() => 2,
        IpAddr::V4(_) => 0,
        IpAddr::V6(ip) if ip.is_loopback() => 3,
        IpAddr::V6(ip) if ip.is_unicast_link_local() => 4,
        IpAddr::V6(_) => 1,
    }
}

/// An asynchronous event of an object (`ibv_get_async_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The queue pair has failed.
    QpError,
    /// The peer's first packet has arrived before the last message of the connection manager's
    /// handshake.
    QpEstablished,
    /// The queue pair has failed and consumes no more receives of its shared receive queue.
    QpLastReceive,
    /// Fewer receives are posted to the shared receive queue than its limit
    /// ([`Srq::arm_limit`](super::Srq::arm_limit)).
    SrqLimit,
    /// The completion queue has overrun or failed.
    CqError,
    /// The device has failed or was removed.
    DeviceFatal,
    /// Another event, with its `ibv_event_type`.
    Other(u32),
}

/// A receiver of the asynchronous events of an object.
pub(crate) trait AsyncListener: Send + Sync {
    /// Processes an event. Called without a lock, by the thread that takes the device's events
    /// ([`Device::dispatch_async`]). The object of the event may be destroyed already.
    fn async_event(&self, event: AsyncEvent);
}

type InterfaceList = Vec<DeviceAddress>;

/// How long a list of addresses is used while an address cannot be bound: the detection of
/// duplicates takes about this time, and an address that has one never can be.
const TENTATIVE: Duration = Duration::from_secs(1);

/// The result of the last search for the addresses of a device.
struct Found {
    /// The host's interfaces at that time.
    interfaces: InterfaceList,
    addresses: InterfaceList,
    /// When the list has to be renewed, although the interfaces are the same.
    until: Option<Instant>,
}

/// A device. Thread safe.
pub struct Device {
    backend: &'static Backend,
    context: *mut sys::ibv_context,
    name: String,
    attr: DeviceAttr,
    max_inline: OnceLock<usize>,
    behaviour: OnceLock<Behaviour>,
    /// Why the last trials had no result. Held while they run.
    no_behaviour: Mutex<Option<NoBehaviour>>,
    xrc_behaviour: OnceLock<XrcBehaviour>,
    /// Whether `ibv_rereg_mr(3)` has assigned another key to a registration.
    pub(super) changes_keys: AtomicBool,
    addresses: Mutex<Option<Found>>,
    /// Indexed by the address of the verbs object.
    listeners: Mutex<HashMap<usize, Weak<dyn AsyncListener>>>,
    _list: Arc<ContextList>,
}

// SAFETY: verbs contexts may be used by any thread: `ibv_open_device(3)`'s library is "fully thread
// safe" (Documentation/libibverbs.md of rdma-core); all other fields are `Send` and `Sync`.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("backend", &self.backend.name)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// All devices that this process has found.
static DEVICES: PerProcess<Mutex<Vec<Arc<Device>>>> = PerProcess::new(Mutex::new(Vec::new()));

/// The devices of these backends, in the order of `backends`. Listed once per process, and again
/// with `rescan` (`FI_RESCAN`). A device that is no longer listed stays valid for the objects that
/// hold a reference to it.
///
/// If the devices of a backend cannot be listed, logs the error and returns none of it.
pub fn devices(backends: &[&'static Backend], rescan: bool) -> Vec<Arc<Device>> {
    let mut known = DEVICES.get().lock();
    let mut found = Vec::new();
    for &backend in backends {
        let cached = known
            .iter()
            .filter(|device| std::ptr::eq(device.backend, backend))
            .cloned()
            .collect::<Vec<_>>();
        if !rescan && !cached.is_empty() {
            found.extend(cached);
            continue;
        }
        match scan(backend, &cached) {
            Ok(current) => {
                known.retain(|device| !std::ptr::eq(device.backend, backend));
                known.extend(current.iter().cloned());
                found.extend(current);
            }
            Err(error) => info_log!(
                Fabric,
                "{}: the devices could not be listed: {error}",
                backend.name
            ),
        }
    }
    found
}

/// The device that an identifier is bound to, if this process has found it.
pub(crate) fn known_device(id: &CmId) -> Option<Arc<Device>> {
    let known = DEVICES.get().lock();
    let device = known.iter().find(|device| id.is_on(device));
    device.cloned()
}

/// Lists the devices of a backend, reusing those in `cached`.
fn scan(backend: &'static Backend, cached: &[Arc<Device>]) -> Result<Vec<Arc<Device>>> {
    fork_init(backend);
    if !has_devices(backend) {
        // without RDMA in the kernel, librdmacm would write warnings to stderr
        return Ok(Vec::new());
    }
    let mut count: c_int = 0;
    // SAFETY: `count` is writable.
    let list = unsafe { (backend.cm.rdma_get_devices)(&raw mut count) };
    if list.is_null() {
        return Err(FiErrno::last());
    }
    let owner = Arc::new(ContextList { backend, list });
    let mut devices = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` elements.
        let context = unsafe { *list.add(index) };
        if let Some(device) = cached.iter().find(|device| device.context == context) {
            devices.push(Arc::clone(device));
            continue;
        }
        match Device::new(backend, context, &owner) {
            Ok(device) => devices.push(Arc::new(device)),
            Err(error) => warn_log!(
                Fabric,
                "a device of {} is not offered: {error}",
                backend.name
            ),
        }
    }
    Ok(devices)
}

/// `ibv_fork_init(3)`, once per backend and before anything is registered.
fn fork_init(backend: &'static Backend) {
    // a repetition in a forked child has no effect
    static DONE: PerProcess<Mutex<Vec<&'static str>>> = PerProcess::new(Mutex::new(Vec::new()));
    let mut done = DONE.get().lock();
    if done.contains(&backend.name) {
        return;
    }
    done.push(backend.name);
    // SAFETY: no arguments; nothing is registered yet.
    if let Err(error) = FiErrno::from_verb(unsafe { (backend.verbs.ibv_fork_init)() }) {
        info_log!(
            Fabric,
            "{}: ibv_fork_init: {error}; after a fork the device may access outdated pages",
            backend.name
        );
    }
}

fn has_devices(backend: &Backend) -> bool {
    let mut count: c_int = 0;
    // SAFETY: `count` is writable; the list is freed at once.
    unsafe {
        let list = (backend.verbs.ibv_get_device_list)(&raw mut count);
        if list.is_null() {
            return false;
        }
        (backend.verbs.ibv_free_device_list)(list);
    }
    count > 0
}

fn count(value: c_int) -> usize {
    usize::try_from(value).unwrap_or(0)
}

impl Device {
    fn new(
        backend: &'static Backend,
        context: *mut sys::ibv_context,
        list: &Arc<ContextList>,
    ) -> Result<Self> {
        let mut attr = sys::ibv_device_attr_ex::default();
        // SAFETY: `context` is an element of the list, and therefore live and of this backend.
        FiErrno::from_verb(unsafe {
            sys::ibv_query_device_ex(&backend.verbs, context, &raw mut attr)
        })?;
        let orig = &attr.orig_attr;
        // SAFETY: the device of a live context is live, its name a C string inside it.
        let (name, transport) = unsafe {
            let device = (*context).device;
            let name = CStr::from_ptr((backend.verbs.ibv_get_device_name)(device));
            (
                name.to_string_lossy().into_owned(),
                (*device).transport_type,
            )
        };
        // SAFETY: an array of 64 bytes that contains a NUL-terminated string.
        let fw_ver = unsafe { CStr::from_ptr(orig.fw_ver.as_ptr()) };
        let attr = DeviceAttr {
            fw_ver: fw_ver.to_string_lossy().into_owned(),
            node_guid: u64::from_be(orig.node_guid),
            vendor_id: orig.vendor_id,
            vendor_part_id: orig.vendor_part_id,
            hw_ver: orig.hw_ver,
            max_mr_size: orig.max_mr_size,
            max_qp: count(orig.max_qp),
            max_qp_wr: count(orig.max_qp_wr),
            max_sge: count(orig.max_sge),
            max_sge_rd: count(orig.max_sge_rd),
            max_cq: count(orig.max_cq),
            max_cqe: count(orig.max_cqe),
            max_mr: count(orig.max_mr),
            max_pd: count(orig.max_pd),
            max_qp_rd_atom: count(orig.max_qp_rd_atom),
            max_qp_init_rd_atom: count(orig.max_qp_init_rd_atom),
            max_srq: count(orig.max_srq),
            max_srq_wr: count(orig.max_srq_wr),
            max_srq_sge: count(orig.max_srq_sge),
            phys_port_cnt: orig.phys_port_cnt,
            iwarp: transport == sys::IBV_TRANSPORT_IWARP,
            atomic_cap: orig.atomic_cap,
            xrc: orig.device_cap_flags & sys::IBV_DEVICE_XRC != 0,
        };
        // SAFETY: the context is live.
        super::set_nonblocking(unsafe { (*context).async_fd })?;
        Ok(Self {
            backend,
            context,
            name,
            attr,
            max_inline: OnceLock::new(),
            behaviour: OnceLock::new(),
            no_behaviour: Mutex::new(None),
            xrc_behaviour: OnceLock::new(),
            changes_keys: AtomicBool::new(false),
            addresses: Mutex::new(None),
            listeners: Mutex::new(HashMap::new()),
            _list: Arc::clone(list),
        })
    }

    /// The device's backend.
    pub fn backend(&self) -> &'static Backend {
        self.backend
    }

    /// Whether idle connections need probes to detect dead peers.
    pub fn needs_keepalive(&self) -> bool {
        !self.backend.notices_dead_peers
    }

    /// The text of a work completion's status (`ibv_wc_status_str(3)`).
    pub(crate) fn status_str(&self, status: i32) -> &'static CStr {
        let status = u32::try_from(status).unwrap_or(sys::IBV_WC_GENERAL_ERR);
        // SAFETY: for any value the function returns a string that exists as long as the library,
        // which is never unloaded.
        unsafe { CStr::from_ptr((self.backend().verbs.ibv_wc_status_str)(status)) }
    }

    /// The device's name, for instance `mlx5_0`, `rxe0` or `soft0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's attributes.
    pub fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    pub(super) fn context(&self) -> *mut sys::ibv_context {
        self.context
    }

    pub(super) fn is_of(&self, context: *mut sys::ibv_context) -> bool {
        self.context == context
    }

    /// Storage for the result of [`Device::behaviour`].
    pub(super) fn observed(&self) -> &OnceLock<Behaviour> {
        &self.behaviour
    }

    /// Storage for the error of [`Device::behaviour`].
    pub(super) fn not_observed(&self) -> &Mutex<Option<NoBehaviour>> {
        &self.no_behaviour
    }

    /// Storage for the result of [`Device::xrc_behaviour`].
    pub(super) fn observed_xrc(&self) -> &OnceLock<XrcBehaviour> {
        &self.xrc_behaviour
    }

    /// Maximum length in bytes of inline data of an RC queue pair with one send request and one
    /// sge, at most 512. Determined once, by creating queue pairs; 0 if none can be created. A lack
    /// of memory or descriptors also gives 0, and the next call determines it again.
    pub fn max_inline(self: &Arc<Self>) -> usize {
        if let Some(max_inline) = self.max_inline.get() {
            return *max_inline;
        }
        match probe_max_inline(self) {
            Ok(max_inline) => *self.max_inline.get_or_init(|| max_inline),
            Err(error) => {
                info_log!(
                    Fabric,
                    "{}: the maximum of inline data could not be determined: {error}",
                    self.name
                );
                if !error.may_pass() {
                    return *self.max_inline.get_or_init(|| 0);
                }
                0
            }
        }
    }

    /// The current state of a port. Ports are numbered from 1.
    ///
    /// # Errors
    /// `EINVAL`: no such port.
    pub fn port(&self, number: u8) -> Result<Port> {
        let mut attr = sys::ibv_port_attr::default();
        // SAFETY: the context is live and of this backend.
        FiErrno::from_verb(unsafe {
            sys::ibv_query_port(&self.backend.verbs, self.context, number, &raw mut attr)
        })?;
        Ok(Port {
            number,
            active: attr.state == sys::IBV_PORT_ACTIVE,
            active_mtu: mtu_bytes(attr.active_mtu),
            max_msg_size: attr.max_msg_sz as usize,
            speed: link_speed(&attr),
            link_layer: match u32::from(attr.link_layer) {
                sys::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::Unspecified,
            },
            lid: attr.lid,
            gid: self.gid(number, 0),
        })
    }

    /// An entry of a port's GID table; `None` if the table has no such entry.
    pub fn gid(&self, port: u8, index: u8) -> Option<[u8; 16]> {
        let mut gid = sys::ibv_gid::default();
        let query = self.backend.verbs.ibv_query_gid;
        // SAFETY: the context is live and of this backend, `gid` writable.
        let ret = unsafe { query(self.context, port, index.into(), &raw mut gid) };
        // SAFETY: both types have 16 bytes, and every value is valid.
        let raw = unsafe { std::mem::transmute_copy::<sys::ibv_gid, [u8; 16]>(&gid) };
        (ret == 0).then_some(raw)
    }

    /// The device's PCI address, if it is a PCI device.
    pub fn pci_address(&self) -> Option<PciAddress> {
        let link = std::fs::canonicalize(self.sysfs("device")?).ok()?;
        parse_pci(link.file_name()?.to_str()?)
    }

    /// Name of the device's kernel driver, if it has one.
    pub fn driver(&self) -> Option<String> {
        let link = std::fs::canonicalize(self.sysfs("device/driver")?).ok()?;
        Some(link.file_name()?.to_str()?.to_owned())
    }

    fn sysfs(&self, entry: &str) -> Option<std::path::PathBuf> {
        let path = Path::new("/sys/class/infiniband")
            .join(&self.name)
            .join(entry);
        path.exists().then_some(path)
    }

    /// The addresses of this host that reach the device: the connection manager binds them to the
    /// device. Loopback addresses come last. The list is renewed when the host's interfaces have
    /// changed, and until no lack of memory or descriptors has hidden an address. It is renewed
    /// each second while the host has an IPv6 address that cannot be bound: duplicates of it are
    /// looked for, or have been found (RFC 4862). It is empty on a host without a connection
    /// manager.
    pub fn addresses(self: &Arc<Self>) -> Vec<DeviceAddress> {
        let interfaces = interfaces();
        let mut cache = self.addresses.lock();
        if let Some(found) = &*cache
            && found.interfaces == interfaces
            && found.until.is_none_or(|until| Instant::now() < until)
        {
            return found.addresses.clone();
        }
        let mut addresses = Vec::new();
        let mut failure = None;
        let mut tentative = false;
        match EventChannel::create(self.backend) {
            Ok(channel) => {
                for interface in &interfaces {
                    match self.owns_address(&channel, interface.addr) {
                        Ok(true) => addresses.push(interface.clone()),
                        Err(error) if error.may_pass() => failure = Some(error),
                        Err(FiErrno::EADDRNOTAVAIL) => tentative = true,
                        // the device does not have it
                        Ok(false) | Err(_) => {}
                    }
                }
            }
            Err(error) => failure = Some(error),
        }
        if failure.is_none_or(|error| !error.may_pass()) {
            *cache = Some(Found {
                interfaces,
                addresses: addresses.clone(),
                until: tentative.then(|| Instant::now() + TENTATIVE),
            });
        }
        if let Some(error) = failure {
            warn_log!(
                Fabric,
                "{}: its addresses could not be determined: {error}",
                self.name
            );
        }
        addresses
    }

    fn owns_address(&self, channel: &Arc<EventChannel>, addr: SocketAddr) -> Result<bool> {
        let id = channel.create_id()?;
        id.bind_addr(addr)?;
        Ok(id.is_on(self))
    }

    /// Whether this address of the host reaches the device. True for wildcard addresses.
    pub fn has_address(self: &Arc<Self>, ip: IpAddr) -> bool {
        ip.is_unspecified() || self.addresses().iter().any(|a| a.addr.ip() == ip)
    }

    /// The descriptor that becomes readable with asynchronous events.
    pub(crate) fn async_fd(&self) -> c_int {
        // SAFETY: the context is live.
        unsafe { (*self.context).async_fd }
    }

    pub(crate) fn listen(&self, object: usize, listener: Weak<dyn AsyncListener>) {
        self.listeners.lock().insert(object, listener);
    }

    pub(crate) fn unlisten(&self, object: usize) {
        self.listeners.lock().remove(&object);
    }

    /// Takes the queued asynchronous events and passes each to its listener. Never blocks.
    pub(crate) fn dispatch_async(&self) {
        loop {
            let mut event = sys::ibv_async_event::default();
            let ret =
                // SAFETY: the context is live and non-blocking, and `event` is writable.
                unsafe { (self.backend.verbs.ibv_get_async_event)(self.context, &raw mut event) };
            if ret != 0 {
                return;
            }
            // SAFETY: the type determines the valid field of the union, and all fields that are
            // pointers have the same offset.
            let object = unsafe { event.element.qp } as usize;
            let kind = classify(event.event_type);
            // Destroying an object waits for the acknowledgement of its events: until then no other
            // object has its address, and the listener found is that of the event's object. The
            // listener may acquire a lock that a destroying thread holds, so it is called after the
            // acknowledgement. Its object may be destroyed by then.
            let listeners = self.listeners_of(kind, object);
            // SAFETY: read above, acknowledged once.
            unsafe { (self.backend.verbs.ibv_ack_async_event)(&raw mut event) };
            for listener in listeners {
                listener.async_event(kind);
            }
        }
    }

    /// As if the device had raised an event of `object`.
    #[cfg(test)]
    pub(crate) fn raise(&self, event: AsyncEvent, object: usize) {
        for listener in self.listeners_of(event, object) {
            listener.async_event(event);
        }
    }

    /// The listeners of an event of `object`; all listeners, if the device has failed.
    fn listeners_of(&self, event: AsyncEvent, object: usize) -> Vec<Arc<dyn AsyncListener>> {
        if let AsyncEvent::Other(number) = event {
            info_log!(Domain, "{}: asynchronous event {number}", self.name);
            return Vec::new();
        }
        let listeners = self.listeners.lock();
        if event == AsyncEvent::DeviceFatal {
            warn_log!(Domain, "{}: the device is gone", self.name);
            return listeners.values().filter_map(Weak::upgrade).collect();
        }
        let listener = listeners.get(&object).and_then(Weak::upgrade);
        listener.into_iter().collect()
    }
}

fn classify(event: sys::ibv_event_type) -> AsyncEvent {
    match event {
        sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
            AsyncEvent::QpError
        }
        sys::IBV_EVENT_COMM_EST => AsyncEvent::QpEstablished,
        sys::IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::QpLastReceive,
        sys::IBV_EVENT_SRQ_LIMIT_REACHED => AsyncEvent::SrqLimit,
        sys::IBV_EVENT_CQ_ERR => AsyncEvent::CqError,
        sys::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        other => AsyncEvent::Other(other),
    }
}

fn mtu_bytes(mtu: sys::ibv_mtu) -> usize {
    match mtu {
        1..=5 => 128 << mtu,
        _ => 0,
    }
}

/// Bits per second: the number of lanes times the rate of one, as `ibv_port_attr` encodes them.
fn link_speed(attr: &sys::ibv_port_attr) -> u64 {
    let lanes = match attr.active_width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let code = match attr.active_speed_ex {
        0 => u32::from(attr.active_speed),
        extended => extended,
    };
    let megabits = match code {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        256 => 200_000,
        _ => 0,
    };
    lanes * megabits * 1_000_000
}

/// Parses a PCI address in the form of sysfs, `0000:3b:00.1`.
fn parse_pci(name: &str) -> Option<PciAddress> {
    let (domain, rest) = name.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    Some(PciAddress {
        domain: u16::from_str_radix(domain, 16).ok()?,
        bus: u8::from_str_radix(bus, 16).ok()?,
        device: u8::from_str_radix(device, 16).ok()?,
        function: u8::from_str_radix(function, 16).ok()?,
    })
}

/// The IP addresses of this host's interfaces that are up; loopback interfaces come last.
fn interfaces() -> InterfaceList {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is writable.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Vec::new();
    }
    let mut list = Vec::new();
    let mut next = head;
    while !next.is_null() {
        // SAFETY: an element of the list that `getifaddrs` has returned.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: NULL, or an address of its family.
        let Some(addr) = (unsafe { SockAddr::read(entry.ifa_addr) }) else {
            continue;
        };
        // SAFETY: NULL, or an address of its family.
        let prefix_len = match unsafe { SockAddr::read(entry.ifa_netmask) }.map(|m| m.ip()) {
            Some(IpAddr::V4(mask)) => u32::from(mask).count_ones(),
            Some(IpAddr::V6(mask)) => u128::from(mask).count_ones(),
            None => 0,
        };
        // SAFETY: the name is a C string of the element.
        let interface = unsafe { CStr::from_ptr(entry.ifa_name) };
        list.push(DeviceAddress {
            addr,
            // fits: at most 128
            prefix_len: prefix_len as u8,
            interface: interface.to_string_lossy().into_owned(),
            loopback: entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
        });
    }
    // SAFETY: returned by `getifaddrs`, freed once.
    unsafe { libc::freeifaddrs(head) };
    list.sort_by_key(|address| address.loopback);
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::replaced;

    #[test]
    fn the_loopback_is_an_interface_and_comes_last() {
        let list = interfaces();
        let last = list.last().expect("a host has a loopback");
        assert!(last.loopback, "{list:?}");
        assert!(list.iter().all(|a| a.addr.port() == 0));
    }

    /// The device of [`an_event_is_for_the_object_that_had_it`], and the listener of the second
    /// object.
    static REUSED: Mutex<Option<(Arc<Device>, Arc<Notified>)>> = Mutex::new(None);
    /// Address of both objects.
    const ADDRESS: usize = 0x1000;

    #[derive(Default)]
    struct Notified(Mutex<Vec<AsyncEvent>>);

    impl AsyncListener for Notified {
        fn async_event(&self, event: AsyncEvent) {
            self.0.lock().push(event);
        }
    }

    unsafe extern "C" fn one_event(
        _: *mut sys::ibv_context,
        event: *mut sys::ibv_async_event,
    ) -> c_int {
        if REUSED.lock().is_none() {
            return -1;
        }
        // SAFETY: `dispatch_async` passes a writable event.
        unsafe {
            (*event).event_type = sys::IBV_EVENT_QP_FATAL;
            (*event).element.qp = std::ptr::without_provenance_mut(ADDRESS);
        }
        0
    }

    /// Another thread destroys the object as soon as its event is acknowledged, and creates another
    /// object at the same address.
    unsafe extern "C" fn reuse_address(_: *mut sys::ibv_async_event) {
        let (device, second) = REUSED.lock().take().unwrap();
        device.unlisten(ADDRESS);
        let second: Weak<dyn AsyncListener> = Arc::<Notified>::downgrade(&second);
        device.listen(ADDRESS, second);
    }

    #[test]
    fn an_event_is_for_the_object_that_had_it() {
        let mut backend = *softverbs::backend();
        backend.name = "reused addresses";
        backend.verbs.ibv_get_async_event = one_event;
        backend.verbs.ibv_ack_async_event = reuse_address;
        let backend = Box::leak(Box::new(backend));
        let device = scan(backend, &[]).unwrap().remove(0);
        let [first, second] = [(); 2].map(|()| Arc::new(Notified::default()));
        let listener: Weak<dyn AsyncListener> = Arc::<Notified>::downgrade(&first);
        device.listen(ADDRESS, listener);
        *REUSED.lock() = Some((Arc::clone(&device), Arc::clone(&second)));
        device.dispatch_async();
        assert_eq!(*first.0.lock(), [AsyncEvent::QpError]);
        assert_eq!(*second.0.lock(), []);
    }

    /// A process that is short of descriptors for a moment has its addresses and inline data
    /// afterwards.
    #[test]
    fn an_error_that_may_pass_is_not_stored() {
        let device = scan(replaced::with_shortage(), &[]).unwrap().remove(0);
        let short = |verb| replaced::SHORT.set(Some((verb, FiErrno::EMFILE.code())));
        for verb in ["rdma_create_event_channel", "rdma_create_id"] {
            short(verb);
            assert_eq!(device.addresses(), []);
        }
        for verb in ["ibv_create_cq", "ibv_create_qp"] {
            short(verb);
            assert_eq!(device.max_inline(), 0);
        }
        // IPv6 addresses while duplicates of them are looked for
        let tentative = ("rdma_bind_addr", FiErrno::EADDRNOTAVAIL.code());
        replaced::SHORT.set(Some(tentative));
        assert_eq!(device.addresses(), []);
        replaced::SHORT.set(None);
        // this answer is stored for a limited time, whose end the test chooses
        let ends = |at| device.addresses.lock().as_mut().unwrap().until.replace(at);
        assert!(ends(Instant::now() + Duration::from_hours(1)).is_some());
        assert_eq!(device.addresses(), []);
        ends(Instant::now());
        let reference = scan(softverbs::backend(), &[]).unwrap().remove(0);
        assert_eq!(device.addresses(), reference.addresses());
        assert!(device.max_inline() > 0);
        assert_eq!(device.max_inline(), reference.max_inline());
        // both are stored
        short("rdma_create_event_channel");
        assert_ne!(device.addresses(), []);
        // a host without a connection manager
        let alone = scan(replaced::with_shortage(), &[]).unwrap().remove(0);
        let missing = ("rdma_create_event_channel", FiErrno::ENODEV.code());
        replaced::SHORT.set(Some(missing));
        assert_eq!(alone.addresses(), []);
        replaced::SHORT.set(None);
        assert_eq!(alone.addresses(), []);
        short("ibv_create_qp");
        assert!(device.max_inline() > 0);
        // a device that refuses all lengths
        let none = scan(replaced::with_shortage(), &[]).unwrap().remove(0);
        replaced::SHORT.set(Some(("ibv_create_qp", FiErrno::EINVAL.code())));
        assert_eq!(none.max_inline(), 0);
        replaced::SHORT.set(None);
        assert_eq!(none.max_inline(), 0);
    }

    #[test]
    fn pci_addresses_are_read() {
        let pci = parse_pci("0000:3b:00.1").unwrap();
        assert_eq!(
            (pci.domain, pci.bus, pci.device, pci.function),
            (0, 0x3b, 0, 1)
        );
        assert_eq!(parse_pci("rxe0"), None);
    }

    #[test]
    fn mtu_and_speed_are_decoded() {
        assert_eq!(mtu_bytes(sys::IBV_MTU_4096), 4096);
        assert_eq!(mtu_bytes(0), 0);
        let attr = sys::ibv_port_attr {
            active_width: 2,
            active_speed: 32,
            ..Default::default()
        };
        assert_eq!(link_speed(&attr), 100_000_000_000);
    }
}
