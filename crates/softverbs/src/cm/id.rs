//! Ids: the application's objects, the connection manager's state of them, and their lifetimes.
//!
//! Invariants: an [`Id`] is freed once, by `rdma_destroy_id`, after all its reported events were
//! acknowledged. A [`Shared`] lives longer if a thread still uses it; its phase stays
//! `Dead` then. Lock order: a requested id before its listener, an id before a
//! channel, a channel before the count of events.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use libc::{c_int, c_void};
use rdma_core_sys::*;

use super::channel::{Channel, Events, lock};
use super::state::{Phase, State};
use crate::sys::{Errno, Res};

/// The object that the application holds.
#[repr(C)]
pub(super) struct Id {
    pub(super) c: rdma_cm_id,
    pub(super) shared: Arc<Shared>,
    /// The target of `c.route.path_rec`.
    pub(super) path: Box<ibv_sa_path_rec>,
}

#[derive(Default)]
struct Count {
    reported: u64,
    completed: u64,
}

/// The connection manager's state of an id.
pub(super) struct Shared {
    /// Unique in the process.
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
            state: Mutex::new(State::new(events, phase)),
            handle: AtomicPtr::new(null_mut()),
            count: Mutex::default(),
            acknowledged: Condvar::new(),
        })
    }

    /// The application's id; NULL until it has been made.
    pub(super) fn handle(&self) -> *mut Id {
        self.handle.load(Ordering::Acquire)
    }

    /// Counts an event that the application gets.
    pub(super) fn report(&self) {
        lock(&self.count).reported += 1;
    }

    /// Counts an event that the application has acknowledged.
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

impl Id {
    /// The connection manager's state of an application's id.
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

    /// Makes the id of a connection request. It inherits from the listener, which lives because it
    /// has an event in the channel whose lock the caller holds.
    pub(super) fn make_for_request(
        child: &Arc<Shared>,
        listener: &Shared,
        channel: *mut rdma_event_channel,
    ) {
        let listener = listener.handle();
        // SAFETY: the listener lives, see above.
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
    /// `id` must have been made by this module, and no thread may use it any more.
    pub(super) unsafe fn free(id: *mut Self) {
        // SAFETY: the caller promises both.
        drop(unsafe { Box::from_raw(id) });
    }

    /// Ends all activity of the id. The peer notices it by the end of the socket.
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
        // Requests in the queue hold only objects that `children` has too.
        drop(events);
        for (child, _) in children {
            // A child whose event was taken from the queue before the events were removed belongs
            // to the application.
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
        // SAFETY: the caller promises a live id.
        unsafe { acknowledge_last(id) };
        shared.wait_for_acknowledgements();
        let own_channel = lock(&shared.state).own_channel.take();
        // SAFETY: no other thread uses the id or, if the id owned it, its channel.
        unsafe {
            Id::free(id.cast());
            if let Some(channel) = own_channel {
                Channel::destroy(channel);
            }
        }
        Ok(())
    })
}

/// Acknowledges the event that a waiting call has left in the id.
///
/// # Safety
/// `id` must be live.
unsafe fn acknowledge_last(id: *mut rdma_cm_id) {
    // SAFETY: the caller promises a live id; its event is NULL or not yet acknowledged.
    unsafe {
        let event = std::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            super::event::rdma_ack_cm_event(event);
        }
    }
}

/// On an id without a channel of the application, waits for the event of the call that has just
/// begun (rdma_create_id(3), synchronous operation).
///
/// # Errors
/// The status of the event, as an errno.
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
    // SAFETY: the event has just been returned.
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
            // SAFETY: the caller promises a live id.
            unsafe { acknowledge_last(id) };
        }
        shared.wait_for_acknowledgements();
        // SAFETY: the id lives; no other id uses its own channel, which it has left.
        unsafe {
            (*id).channel = channel;
            if let Some(left) = left {
                Channel::destroy(left);
            }
        }
        Ok(())
    })
}

/// Moves the id with its descriptors and queued events to another channel, and with it the ids of
/// connection requests that the application does not have yet.
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
            // Fails for lack of memory only; the end of the peer's socket reveals it.
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
