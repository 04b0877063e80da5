//! Ids: the application's objects, the connection manager's state of them, and their lifetimes.
//!
//! Invariants: an [`Id`] is freed once, by `rdma_destroy_id`, after all its reported events were
//! acknowledged. A [`Shared`] lives longer if a thread still uses it; its phase stays
//! `Dead` then. Lock order: a requested id before its listener, an id before a
//! channel, a channel before the count of events.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rdma_core_sys::*;

use super::channel::Events;
use super::guard::lock;
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

    /// The number of events that the application has got.
    pub(super) fn reported(&self) -> u64 {
        lock(&self.count).reported
    }

    /// Waits until the application has acknowledged that many events.
    pub(super) fn wait_for_acknowledgements(&self, of: u64) {
        let mut count = lock(&self.count);
        while count.completed < of {
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

    /// Makes the application's id.
    pub(super) fn make(shared: &Arc<Shared>, c: rdma_cm_id) -> *mut Self {
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
                (state.timer.take(), state.reserved.take()),
                (state.device.take(), state.spare_channel.take()),
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

/// Moves the id with its descriptors and queued events to another channel, and with it the ids of
/// connection requests that the application does not have yet. Returns the number of events that
/// the application had got before any of the new channel.
pub(super) fn move_to(shared: &Arc<Shared>, events: &Arc<Events>) -> u64 {
    let (children, reported) = {
        let mut state = lock(&shared.state);
        if Arc::ptr_eq(&state.events, events) {
            return shared.reported();
        }
        let old = std::mem::replace(&mut state.events, Arc::clone(events));
        let waiting = old.expel(shared);
        let reported = shared.reported();
        events.enroll(shared);
        for (fd, writable) in state.watched() {
            old.unwatch(fd);
            // Fails for lack of memory only; the end of the peer's socket reveals it.
            let _ = events.watch(fd, shared, writable);
        }
        for event in waiting {
            events.push(event);
        }
        (state.children.clone(), reported)
    };
    for (child, _) in children {
        if child.handle().is_null() {
            move_to(&child, events);
        }
    }
    reported
}
