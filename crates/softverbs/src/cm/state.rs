//! The mutable state of an id, and how the application sees it.
//!
//! Invariants: a state is used under its id's lock. The fields of `rdma_cm_id` are written only by
//! calls on the id and by the delivery of its events, during which the handle lives.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use libc::{c_int, sockaddr_storage};
use rdma_core_sys::*;

use super::address::{self, Permission, Space};
use super::channel::{Events, Spare};
use super::conversation::{Deadline, Heard, Link};
use super::device::{self, Device};
use super::event::{Kind, Raw, reason};
use super::id::Shared;
use super::redial::Redial;
use super::sock::Sock;
use super::wire::{Message, Party, Private};
use crate::sys::{self, Errno, Res};

/// The state of an id in the state diagram of `docs/softverbs-cm.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Listening,
    /// Active: the request is sent.
    ReqSent,
    /// Active: the reply is received, the queue pair is not yet ready.
    RepReceived,
    /// Passive: a peer has connected, and its request is not yet received.
    Accepted,
    /// Passive: the request is received.
    ReqReceived,
    /// Passive: the reply is sent.
    RepSent,
    Established,
    Disconnected,
    /// A datagram service has answered: there is no connection.
    Served,
    /// The attempt has failed or was rejected.
    Failed,
    /// Destroyed.
    Dead,
}

/// Options of `rdma_set_option(3)`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    pub(super) reuse_address: bool,
    pub(super) only_own_family: bool,
    pub(super) type_of_service: u8,
    pub(super) ack_timeout: Option<u8>,
}

/// A connection to a listener whose request event the application has not read yet.
pub(super) struct Child {
    pub(super) id: Arc<Shared>,
    /// Whether the request has been received.
    pub(super) asked: bool,
    /// The channel that the id will have, if the listener has none of the application.
    pub(super) spare: Option<Spare>,
}

/// The mutable state of an id.
pub(super) struct State {
    pub(super) events: Arc<Events>,
    /// The channel of an id that was created without one: calls then wait for their events.
    pub(super) own_channel: Option<*mut rdma_event_channel>,
    pub(super) phase: Phase,
    pub(super) space: Space,
    /// The type of the id's queue pair, from `rdma_connect` and `rdma_listen` on.
    pub(super) qp_type: ibv_qp_type,
    pub(super) options: Options,
    pub(super) source: Option<SocketAddr>,
    pub(super) destination: Option<SocketAddr>,
    /// The sockets that own the local address; in phase `Listening` they accept connections.
    pub(super) names: Vec<Sock>,
    /// The address that `names` own: the address that the id was bound to, of which
    /// `rdma_resolve_addr` may have replaced the host in `source`.
    pub(super) named: Option<SocketAddr>,
    /// Permissions for others to bind the address (RDMA_OPTION_ID_REUSEADDR), until the id listens:
    /// one for each of `names`, and for the name which the link has.
    pub(super) permissions: Vec<Permission>,
    pub(super) link: Option<Link>,
    /// Active: the request, while the listener's queue is full.
    pub(super) redial: Option<Redial>,
    /// Deadline of the current attempt.
    pub(super) timer: Option<Deadline>,
    /// Of a connection request that the application has: its socket is not watched until the
    /// application answers ([`super::hide_ends_of_requests`]).
    pub(super) is_unwatched: bool,
    /// Of a connection request: the deadline that its acceptance will have. It is not watched.
    pub(super) reserved: Option<Deadline>,
    pub(super) device: Option<Device>,
    /// First packet sequence number of this side.
    pub(super) psn: u32,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    /// RNR retry count of this side's queue pair.
    pub(super) rnr_retry_count: u8,
    pub(super) peer: Option<Party>,
    /// The peer's GID, if it is known.
    pub(super) peer_gid: Option<[u8; 16]>,
    /// Of a request to a datagram service: the client's queue pair.
    pub(super) client_qp: u32,
    /// The application has got a CONNECT_ERROR; later events of this connection are suppressed.
    pub(super) connect_error: bool,
    /// Listening: maximum number of pending requests.
    pub(super) backlog: usize,
    pub(super) children: Vec<Child>,
    /// Of the id of a connection request, until the application has it.
    pub(super) listener: Weak<Shared>,
}

// SAFETY: the raw pointers are the channel that this id owns and those that its requests will own,
// used by the rules of rdma_get_cm_event(3), which any thread may call.
unsafe impl Send for State {}

impl State {
    pub(super) fn new(events: Arc<Events>, phase: Phase) -> Self {
        Self {
            events,
            own_channel: None,
            phase,
            space: Space::Tcp,
            qp_type: IBV_QPT_RC,
            options: Options::default(),
            source: None,
            destination: None,
            names: Vec::new(),
            named: None,
            permissions: Vec::new(),
            link: None,
            redial: None,
            timer: None,
            is_unwatched: false,
            reserved: None,
            device: None,
            psn: (sys::random() & 0x00ff_ffff) as u32,
            responder_resources: 0,
            initiator_depth: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            peer: None,
            peer_gid: None,
            client_qp: 0,
            connect_error: false,
            backlog: 0,
            children: Vec::new(),
            listener: Weak::new(),
        }
    }

    /// Whether the id is one of a datagram service.
    pub(super) fn is_datagram(&self) -> bool {
        self.qp_type == IBV_QPT_UD
    }

    /// Queues an event of `id`, which this state belongs to.
    pub(super) fn push(&self, id: &Arc<Shared>, kind: Kind) {
        self.events.push(Raw {
            subject: Arc::clone(id),
            kind,
        });
    }

    /// Reports the end of the connection to the application. The device has no delayed packets, so
    /// the time for which a real device reserves the queue pair number (TimeWait) is over at once.
    pub(super) fn announce_disconnect(&self, id: &Arc<Shared>, why: Option<Errno>) {
        self.push(id, Kind::Disconnected(why.map_or(0, |Errno(errno)| -errno)));
        self.push(id, Kind::TimewaitExit);
    }

    /// Sends a message to the peer of the id, at once or as soon as the socket has room.
    ///
    /// # Errors
    /// `ECONNRESET`: the conversation has ended.
    pub(super) fn say(&mut self, id: &Shared, message: &Message) -> Res<()> {
        let ended = Errno(libc::ECONNRESET);
        let link = self.link.as_mut().ok_or(ended)?;
        link.send(message).map_err(|_| ended)?;
        if link.has_unsent() {
            self.events.rewatch(link.fd(), id, true);
        }
        Ok(())
    }

    /// The descriptors that the channel watches, and whether for writing too.
    pub(super) fn watched(&self) -> Vec<(c_int, bool)> {
        let names = if self.phase == Phase::Listening {
            &self.names[..]
        } else {
            &[]
        };
        let names = names.iter().map(|sock| (sock.fd(), false));
        let link = self.link.iter().filter(|_| !self.is_unwatched);
        let link = link.map(|link| (link.fd(), link.has_unsent()));
        names
            .chain(link)
            .chain(self.timer.iter().map(|timer| (timer.fd(), false)))
            .collect()
    }

    /// Ends the conversation and stops the timer.
    pub(super) fn close_link(&mut self) {
        self.stop_timer();
        if let Some(link) = self.link.take() {
            self.events.unwatch(link.fd());
            // before the name is free
            self.end_permissions();
            drop(link);
        }
    }

    /// Whether the id owns the name. Not for the ids of requests, whose sockets show the name of
    /// their listener.
    pub(super) fn owns(&self, name: &str) -> bool {
        let of_link = self.link.as_ref().is_some_and(|link| link.has_name(name));
        of_link || self.names.iter().any(|sock| sock.has_name(name))
    }

    /// Permissions for others to bind an address, as far as the id `owns` its names.
    pub(super) fn permissions_of(
        &self,
        source: &SocketAddr,
        owns: impl Fn(&str) -> bool,
    ) -> Res<Vec<Permission>> {
        let options = self.options;
        if !options.reuse_address {
            return Ok(Vec::new());
        }
        address::permit_others(self.space, source, options.only_own_family, owns)
    }

    /// Makes the permissions of a bound id fit its options and its names.
    pub(super) fn renew_permissions(&mut self) -> Res<()> {
        self.permissions.clear();
        if let Some(named) = self.named {
            self.permissions = self.permissions_of(&named, |name| self.owns(name))?;
        }
        Ok(())
    }

    /// Makes the permissions that a bound id lacks.
    pub(super) fn add_permissions(&mut self) -> Res<()> {
        if let Some(named) = self.named {
            let has = |name: &str| self.permissions.iter().any(|own| own.name == name);
            let added = self.permissions_of(&named, |name| self.owns(name) && !has(name))?;
            self.permissions.extend(added);
        }
        Ok(())
    }

    /// Ends the permissions for names that are not among those of the id any more. The caller still
    /// has the sockets of these names, and drops them afterwards: another id can own such a name
    /// then, which has not given this permission.
    pub(super) fn end_permissions(&mut self) {
        let mut permissions = std::mem::take(&mut self.permissions);
        permissions.retain(|permission| self.owns(&permission.name));
        self.permissions = permissions;
        #[cfg(test)]
        tests::permissions_ended();
    }

    pub(super) fn stop_timer(&mut self) {
        self.reserved = None;
        if let Some(timer) = self.timer.take() {
            self.events.unwatch(timer.fd());
        }
    }

    /// The peer has given up its request, or this side cannot serve it. A datagram service can
    /// still answer, without effect.
    pub(super) fn end_request(&mut self, id: &Arc<Shared>) {
        self.close_link();
        if self.phase == Phase::ReqReceived && !self.is_datagram() {
            self.phase = Phase::Failed;
            if super::ends_of_requests_are_hidden() {
                return;
            }
            self.push(
                id,
                Kind::Rejected {
                    reason: reason::TIMEOUT,
                    data: Private::EMPTY,
                },
            );
        }
    }

    /// Stops watching the socket of a connection request, if its end is to be hidden.
    pub(super) fn hide_end_of_request(&mut self) {
        if !super::ends_of_requests_are_hidden()
            || self.phase != Phase::ReqReceived
            || self.is_datagram()
        {
            return;
        }
        if let Some(link) = &self.link {
            self.events.unwatch(link.fd());
            self.is_unwatched = true;
        }
    }

    /// Watches the socket of a connection request again, for the application's answer.
    ///
    /// # Errors
    /// `EINVAL`: the peer has given up, as `ib_send_cm_rep` of the kernel. Those of watching.
    pub(super) fn show_end_of_request(&mut self, id: &Shared) -> Res<()> {
        let Some(link) = self.link.as_ref().filter(|_| self.is_unwatched) else {
            return Ok(());
        };
        if !matches!(link.hear(), Heard::Nothing) {
            self.is_unwatched = false;
            self.phase = Phase::Failed;
            self.close_link();
            return Err(Errno(libc::EINVAL));
        }
        self.events.watch(link.fd(), id, false)?;
        self.is_unwatched = false;
        Ok(())
    }

    /// Binds the id to the device.
    pub(super) fn bind_device(&mut self, id: &Shared) -> Res<()> {
        if self.device.is_some() {
            return Ok(());
        }
        self.device = Some(Device::acquire()?);
        self.show_device(id);
        Ok(())
    }

    /// Writes the device to the application's id.
    pub(super) fn show_device(&self, id: &Shared) {
        let handle = id.handle();
        let Some(device) = &self.device else { return };
        // SAFETY: the handle lives during a call on it and the delivery of its event.
        unsafe {
            (*handle).c.verbs = device.context;
            (*handle).c.pd = device.pd;
            (*handle).c.port_num = device::PORT;
            (*(&raw mut (*handle).c.route.addr.addr).cast::<rdma_ib_addr>()).pkey = device::PKEY;
        }
    }

    /// Writes the current addresses to the application's id.
    pub(super) fn show_addresses(&self, id: &Shared) {
        let handle = id.handle();
        // SAFETY: the handle lives (as above); both unions have the size of a storage, and the type
        // has GIDs at these offsets.
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
                // A listener is on this host's device and has its GID, unless its reply has
                // another.
                (*ib).dgid = device::gid_from(self.peer_gid.unwrap_or(device.gid));
            }
        }
    }

    /// Writes the device's only path to the application's id.
    pub(super) fn show_route(&self, id: &Shared) {
        let handle = id.handle();
        let Some(device) = &self.device else { return };
        let path = ibv_sa_path_rec {
            dgid: device::gid_from(self.peer_gid.unwrap_or(device.gid)),
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::c_void;

    use super::super::bind::rdma_set_option;
    use super::super::channel::Channel;
    use super::super::guard::lock;
    use super::super::id::Id;
    use super::*;

    thread_local! {
        /// A name, and whether a socket had it when permissions ended last.
        static NAME: RefCell<(String, bool)> = const { RefCell::new((String::new(), false)) };
    }

    fn is_taken(name: &str) -> bool {
        Sock::new().unwrap().bind(name) == Err(Errno(libc::EADDRINUSE))
    }

    pub(super) fn permissions_ended() {
        NAME.with_borrow_mut(|(name, was_taken)| *was_taken = name.is_empty() || is_taken(name));
    }

    /// Makes an id that shares its address lose names by `lose`, which returns the number of names
    /// that stay. The permission of each other name must end before another id can own the name.
    fn permissions_end_first(at: &str, lose: impl FnOnce(&Arc<Shared>, *mut rdma_cm_id) -> usize) {
        let channel = Channel::create().unwrap();
        // SAFETY: a live channel.
        let id = Shared::new(unsafe { Channel::events_of(channel) }, Phase::Bound);
        let handle = Id::make(&id, rdma_cm_id::default());
        let last = {
            let mut state = lock(&id.state);
            state.options.reuse_address = true;
            let wanted = at.parse().unwrap();
            let (owned, names) = address::own_any_port(Space::Tcp, &wanted, false).unwrap();
            (state.source, state.named, state.names) = (Some(owned), Some(owned), names);
            state.renew_permissions().unwrap();
            state.permissions.last().unwrap().name.clone()
        };
        NAME.set((last, false));
        let rest = lose(&id, handle.cast());
        assert!(
            NAME.take().1,
            "the name was free while its permission lived"
        );
        assert_eq!(lock(&id.state).permissions.len(), rest);
        drop(id);
        // SAFETY: made above, and not used any more.
        unsafe {
            Id::free(handle);
            Channel::destroy(channel);
        }
    }

    #[test]
    fn a_permission_ends_before_the_name_of_a_connection() {
        permissions_end_first("127.0.0.1:0", |id, _| {
            let mut state = lock(&id.state);
            let name = state.names.pop().unwrap();
            state.link = Some(Link::new(name));
            state.close_link();
            0
        });
    }

    #[test]
    fn a_permission_ends_before_the_name_of_the_other_family() {
        permissions_end_first("[::]:0", |id, handle| {
            assert_eq!(lock(&id.state).permissions.len(), 2);
            let mut only = 1i32;
            let value = (&raw mut only).cast::<c_void>();
            let option = RDMA_OPTION_ID_AFONLY.cast_signed();
            // SAFETY: a live id, and a value of 4 bytes.
            let ret =
                unsafe { rdma_set_option(handle, RDMA_OPTION_ID.cast_signed(), option, value, 4) };
            assert_eq!(ret, 0);
            1
        });
    }
}
