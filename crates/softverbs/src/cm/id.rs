//! Ids: what the application holds, what the connection manager keeps, and their lives.
//!
//! Invariants: an [`Id`] is freed once, by `rdma_destroy_id`, after all its reported events were
//! acknowledged. A [`Shared`] outlives it where a thread still looks at it; its phase is `Dead`
//! then, and nothing more happens to it. Lock order: a requested id before its listener,
//! an id before a channel, a channel before the count of events. The fields of `rdma_cm_id` are
//! written only by calls on the id and by the delivery of its events.

use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use libc::{c_int, c_void, sockaddr_storage};
use rdma_core_sys::*;

use super::address;
use super::channel::{Channel, Events, lock};
use super::connect::Redial;
use super::device::{self, Device};
use super::event::Kind;
use super::event::Raw;
use super::link::{Deadline, Link};
use super::sock::Sock;
use super::wire::Party;
use crate::sys::{self, Errno, Res};

/// What the application holds.
#[repr(C)]
pub(super) struct Id {
    pub(super) c: rdma_cm_id,
    pub(super) shared: Arc<Shared>,
    /// What `c.route.path_rec` points to.
    path: Box<ibv_sa_path_rec>,
}

/// Where an id is in its life. `docs/softverbs-cm.md` has the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Listening,
    /// Active: asked.
    ReqSent,
    /// Active: the answer is there, the queue pair not yet ready.
    RepReceived,
    /// Passive: somebody has connected and not yet said what for.
    Accepted,
    /// Passive: asked.
    ReqReceived,
    /// Passive: has agreed.
    RepSent,
    Established,
    Disconnected,
    /// The attempt has failed or was refused.
    Failed,
    /// Destroyed.
    Dead,
}

/// What can be set by `rdma_set_option(3)`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    pub(super) reuse_address: bool,
    pub(super) only_own_family: bool,
    pub(super) type_of_service: u8,
    pub(super) ack_timeout: Option<u8>,
}

/// The part that changes.
pub(super) struct State {
    pub(super) events: Arc<Events>,
    /// The channel of an id without one of the application's: calls wait for their events.
    pub(super) own_channel: Option<*mut rdma_event_channel>,
    pub(super) phase: Phase,
    pub(super) options: Options,
    pub(super) source: Option<SocketAddr>,
    pub(super) destination: Option<SocketAddr>,
    /// What owns the local address; in phase `Listening` they accept.
    pub(super) names: Vec<Sock>,
    pub(super) link: Option<Link>,
    /// Active: the request, while the listener has no room for it.
    pub(super) redial: Option<Redial>,
    /// Ends an attempt that the peer does not answer.
    pub(super) timer: Option<Deadline>,
    pub(super) device: Option<Device>,
    /// First packet sequence number of this side.
    pub(super) psn: u32,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    /// For this side's queue pair.
    pub(super) rnr_retry_count: u8,
    pub(super) peer: Option<Party>,
    /// The application saw a CONNECT_ERROR, and is spared what follows from it.
    pub(super) connect_error: bool,
    /// Listening: how many requests may wait.
    pub(super) backlog: usize,
    /// Listening: who has connected and is not with the application yet, and whether it has asked.
    pub(super) children: Vec<(Arc<Shared>, bool)>,
    /// Of an id that came from a request, until it is with the application.
    pub(super) listener: Weak<Shared>,
}

// SAFETY: the one raw pointer is a channel that belongs to this id and is used under the rules of
// rdma_get_cm_event(3), which any thread may call.
unsafe impl Send for State {}

#[derive(Default)]
struct Count {
    reported: u64,
    completed: u64,
}

/// What the connection manager keeps of an id.
pub(super) struct Shared {
    /// Never used twice in a process.
    pub(super) serial: u64,
    pub(super) state: Mutex<State>,
    handle: AtomicPtr<Id>,
    count: Mutex<Count>,
    acknowledged: Condvar,
}

impl Shared {
    pub(super) fn new(events: Arc<Events>, phase: Phase) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            state: Mutex::new(State {
                events,
                own_channel: None,
                phase,
                options: Options::default(),
                source: None,
                destination: None,
                names: Vec::new(),
                link: None,
                redial: None,
                timer: None,
                device: None,
                psn: (sys::random() & 0x00ff_ffff) as u32,
                responder_resources: 0,
                initiator_depth: 0,
                retry_count: 7,
                rnr_retry_count: 7,
                peer: None,
                connect_error: false,
                backlog: 0,
                children: Vec::new(),
                listener: Weak::new(),
            }),
            handle: AtomicPtr::new(null_mut()),
            count: Mutex::default(),
            acknowledged: Condvar::new(),
        })
    }

    /// The application's id; NULL until it has one.
    pub(super) fn handle(&self) -> *mut Id {
        self.handle.load(Ordering::Acquire)
    }

    /// One more event is with the application.
    pub(super) fn report(&self) {
        lock(&self.count).reported += 1;
    }

    /// One less.
    pub(super) fn acknowledge(&self) {
        lock(&self.count).completed += 1;
        self.acknowledged.notify_all();
    }

    fn wait_for_acknowledgements(&self) {
        let mut count = lock(&self.count);
        while count.completed < count.reported {
            count = self
                .acknowledged
                .wait(count)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl State {
    /// Adds an event of `id`, whose state this is.
    pub(super) fn push(&self, id: &Arc<Shared>, kind: Kind) {
        self.events.push(Raw {
            subject: Arc::clone(id),
            kind,
        });
    }

    /// The descriptors that the channel listens to.
    fn watched(&self) -> Vec<(c_int, bool)> {
        let names = if self.phase == Phase::Listening {
            &self.names[..]
        } else {
            &[]
        };
        let names = names.iter().map(|sock| (sock.fd(), false));
        let link = self.link.iter().map(|link| (link.fd(), link.has_unsent()));
        names
            .chain(link)
            .chain(self.timer.iter().map(|timer| (timer.fd(), false)))
            .collect()
    }

    /// Ends the conversation, if there is one.
    pub(super) fn close_link(&mut self) {
        self.stop_timer();
        if let Some(link) = self.link.take() {
            self.events.unwatch(link.fd());
        }
    }

    pub(super) fn stop_timer(&mut self) {
        if let Some(timer) = self.timer.take() {
            self.events.unwatch(timer.fd());
        }
    }

    /// Gives the id its device.
    pub(super) fn bind_device(&mut self, id: &Shared) -> Res<()> {
        if self.device.is_some() {
            return Ok(());
        }
        let device = Device::acquire()?;
        let handle = id.handle();
        // SAFETY: the handle lives: this is a call on it or the delivery of its event.
        unsafe {
            (*handle).c.verbs = device.context;
            (*handle).c.pd = device.pd;
            (*handle).c.port_num = device::PORT;
            (*(&raw mut (*handle).c.route.addr.addr).cast::<rdma_ib_addr>()).pkey = device::PKEY;
        }
        self.device = Some(device);
        Ok(())
    }

    /// Shows the application what the id's addresses are now.
    pub(super) fn show_addresses(&self, id: &Shared) {
        let handle = id.handle();
        // SAFETY: the handle lives (as above); both unions have the size of a storage, and a GID
        // is at the offsets that the type says.
        unsafe {
            let addr = &raw mut (*handle).c.route.addr;
            if let Some(source) = &self.source {
                let to = (&raw mut (*addr).__bindgen_anon_1).cast::<sockaddr_storage>();
                to.write(address::to_c(source));
            }
            if let Some(destination) = &self.destination {
                let to = (&raw mut (*addr).__bindgen_anon_2).cast::<sockaddr_storage>();
                to.write(address::to_c(destination));
            }
            let ib = (&raw mut (*addr).addr).cast::<rdma_ib_addr>();
            if let Some(device) = &self.device {
                (*ib).sgid = device::gid_from(device.gid);
                // Whoever is asked for is on this host's device, and has its GID until it says
                // otherwise.
                let peer = self.peer.as_ref().map_or(device.gid, |peer| peer.gid);
                (*ib).dgid = device::gid_from(peer);
            }
        }
    }

    /// Shows the application the one path there is.
    pub(super) fn show_route(&self, id: &Shared) {
        let handle = id.handle();
        let Some(device) = &self.device else { return };
        let path = ibv_sa_path_rec {
            dgid: device::gid_from(self.peer.as_ref().map_or(device.gid, |peer| peer.gid)),
            sgid: device::gid_from(device.gid),
            hop_limit: 64,
            reversible: 1,
            numb_path: 1,
            pkey: device::PKEY,
            mtu_selector: 2,
            mtu: device.mtu as u8,
            rate_selector: 2,
            packet_life_time_selector: 2,
            ..ibv_sa_path_rec::default()
        };
        // SAFETY: the handle lives (as above), and its path with it.
        unsafe {
            *(*handle).path = path;
            (*handle).c.route.path_rec = &raw mut *(*handle).path;
            (*handle).c.route.num_paths = 1;
        }
    }
}

impl Id {
    /// The connection manager's half of an application's id.
    ///
    /// # Safety
    /// `id` must be NULL or a live id of this connection manager.
    pub(super) unsafe fn shared_of(id: *mut rdma_cm_id) -> Res<Arc<Shared>> {
        if id.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: every id of this connection manager is an `Id`, and `c` is its head.
        Ok(Arc::clone(unsafe { &(*id.cast::<Self>()).shared }))
    }

    fn make(shared: &Arc<Shared>, c: rdma_cm_id) -> *mut Self {
        let id = Box::into_raw(Box::new(Self {
            c,
            shared: Arc::clone(shared),
            path: Box::default(),
        }));
        shared.handle.store(id, Ordering::Release);
        id
    }

    /// The id that a request's event brings. It inherits from the listener, which lives, since it
    /// has an event in the channel whose lock the caller holds.
    pub(super) fn make_for_request(
        child: &Arc<Shared>,
        listener: &Shared,
        channel: *mut rdma_event_channel,
    ) {
        let listener = listener.handle();
        // SAFETY: it lives, see above.
        let (context, ps, qp_type) = unsafe {
            let c = &raw const (*listener).c;
            ((*c).context, (*c).ps, (*c).qp_type)
        };
        Self::make(
            child,
            rdma_cm_id {
                channel,
                context,
                ps,
                qp_type,
                ..rdma_cm_id::default()
            },
        );
    }

    /// Frees the application's id.
    ///
    /// # Safety
    /// `id` must have been made by this module, and be used by nobody any more.
    pub(super) unsafe fn free(id: *mut Self) {
        // SAFETY: the caller promises both.
        drop(unsafe { Box::from_raw(id) });
    }

    /// Ends all that the id does. What the peer learns, it learns by the socket's end.
    pub(super) fn abandon(shared: &Arc<Shared>) {
        let (children, events, parts) = {
            let mut state = lock(&shared.state);
            for (fd, _) in state.watched() {
                state.events.unwatch(fd);
            }
            state.phase = Phase::Dead;
            let events = state.events.expel(shared);
            let names = std::mem::take(&mut state.names);
            let parts = (
                names,
                state.link.take(),
                state.timer.take(),
                state.device.take(),
            );
            (std::mem::take(&mut state.children), events, parts)
        };
        drop(parts);
        // Requests that wait in the channel hold nothing that is not in `children`.
        drop(events);
        for (child, _) in children {
            // One that was taken out of the channel before its events were expelled is the
            // application's.
            if child.handle().is_null() {
                Self::abandon(&child);
            }
        }
    }
}

pub(super) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    super::status(|| {
        if id.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // Datagram services (RDMA_PS_UDP, RDMA_PS_IPOIB) need address handles and multicast, and
        // RDMA_PS_IB native addresses; this device connects queue pairs over IP addresses only.
        if ps != RDMA_PS_TCP {
            return Err(Errno(libc::EPROTONOSUPPORT));
        }
        let own_channel = if channel.is_null() {
            Some(Channel::create()?)
        } else {
            None
        };
        let channel = own_channel.unwrap_or(channel);
        // SAFETY: the caller promises a live channel, or it was made above.
        let events = unsafe { Channel::events_of(channel) };
        let shared = Shared::new(Arc::clone(&events), Phase::Idle);
        events.enroll(&shared);
        lock(&shared.state).own_channel = own_channel;
        let made = Id::make(
            &shared,
            rdma_cm_id {
                channel,
                context,
                ps,
                qp_type: IBV_QPT_RC,
                ..rdma_cm_id::default()
            },
        );
        // SAFETY: the caller promises room for a pointer.
        unsafe { *id = made.cast() };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    super::status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        Id::abandon(&shared);
        // SAFETY: as above.
        unsafe { acknowledge_last(id) };
        shared.wait_for_acknowledgements();
        let own_channel = lock(&shared.state).own_channel.take();
        // SAFETY: nobody else has the id or, if it was the id's own, its channel.
        unsafe {
            Id::free(id.cast());
            if let Some(channel) = own_channel {
                Channel::destroy(channel);
            }
        }
        Ok(())
    })
}

/// Acknowledges the event that a waiting call left in the id.
///
/// # Safety
/// `id` must be live.
unsafe fn acknowledge_last(id: *mut rdma_cm_id) {
    // SAFETY: the caller promises a live id; its event is NULL or one that was not acknowledged.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            super::event::rdma_ack_cm_event(event);
        }
    }
}

/// Of an id without a channel of the application's, waits for what a call has begun.
///
/// # Errors
/// What the event says, as an errno.
///
/// # Safety
/// `id` must be live.
pub(super) unsafe fn complete(id: *mut rdma_cm_id) -> Res<()> {
    // SAFETY: the caller promises a live id.
    let shared = unsafe { Id::shared_of(id)? };
    let Some(channel) = lock(&shared.state).own_channel else {
        return Ok(());
    };
    // SAFETY: as above; the channel is the id's.
    let event = unsafe {
        acknowledge_last(id);
        Channel::events_of(channel).next()?.into_c()
    };
    // SAFETY: a fresh event.
    let (kind, status) = unsafe {
        (*id).event = event;
        ((*event).event, (*event).status)
    };
    match (kind, status) {
        (_, 0) => Ok(()),
        (RDMA_CM_EVENT_REJECTED, _) => Err(Errno(libc::ECONNREFUSED)),
        (_, status) => Err(Errno(status.abs())),
    }
}

pub(super) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    super::status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        if channel.is_null() && lock(&shared.state).own_channel.is_some() {
            return Err(Errno(libc::EINVAL));
        }
        let own_channel = if channel.is_null() {
            Some(Channel::create()?)
        } else {
            None
        };
        let channel = own_channel.unwrap_or(channel);
        // SAFETY: the caller promises a live channel, or it was made above.
        let events = unsafe { Channel::events_of(channel) };
        move_to(&shared, &events);
        let left = std::mem::replace(&mut lock(&shared.state).own_channel, own_channel);
        if left.is_some() {
            // SAFETY: as above.
            unsafe { acknowledge_last(id) };
        }
        shared.wait_for_acknowledgements();
        // SAFETY: the id lives; its own channel, which it has left, is nobody else's.
        unsafe {
            (*id).channel = channel;
            if let Some(left) = left {
                Channel::destroy(left);
            }
        }
        Ok(())
    })
}

/// Takes the id with its descriptors and waiting events to another channel, and so those who have
/// asked it and are not with the application yet.
pub(super) fn move_to(shared: &Arc<Shared>, events: &Arc<Events>) {
    let children = {
        let mut state = lock(&shared.state);
        if Arc::ptr_eq(&state.events, events) {
            return;
        }
        let old = std::mem::replace(&mut state.events, Arc::clone(events));
        let waiting = old.expel(shared);
        events.enroll(shared);
        for (fd, writable) in state.watched() {
            old.unwatch(fd);
            // Fails for lack of memory only; the peer's end of the conversation shows it.
            let _ = events.watch(fd, shared, writable);
        }
        for event in waiting {
            events.push(event);
        }
        state.children.clone()
    };
    for (child, _) in children {
        if child.handle().is_null() {
            move_to(&child, events);
        }
    }
}
