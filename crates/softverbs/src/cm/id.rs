//! Ids: the application's objects, the connection manager's state of them, and their lifetimes.
//!
//! Invariants: an [`Id`] is freed once, by `rdma_destroy_id`, after all its reported events were
//! acknowledged. A [`Shared`] lives longer if a thread still uses it; its phase stays
//! `Dead` then. Lock order: a requested id before its listener, an id before a
//! channel, a channel before the count of events.

use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rdma_core_sys::*;

use super::channel::{Events, Spare};
use super::guard::lock;
use super::state::{Child, Phase, State};
use crate::sys::{Errno, Res};

/// The object that the application holds.
#[repr(C)]
pub(super) struct Id {
    pub(super) c: rdma_cm_id,
    pub(super) shared: Arc<Shared>,
    /// The target of `c.route.path_rec`.
    pub(super) path: Box<ibv_sa_path_rec>,
}

/// The events of an id that the application has got. They are numbered from 1.
#[derive(Default)]
struct Count {
    reported: u64,
    /// The numbers of those that are not acknowledged.
    open: BTreeSet<u64>,
}

impl Count {
    /// Whether the application has acknowledged the first `of` events.
    fn are_acknowledged(&self, of: u64) -> bool {
        self.open.first().is_none_or(|number| *number > of)
    }
}

/// The connection manager's state of an id.
pub(super) struct Shared {
    /// Unique in the process.
    pub(super) serial: u64,
    pub(super) state: Mutex<State>,
    handle: AtomicPtr<Id>,
    /// Whether the application has the id, or gets it by an event that is complete.
    given: AtomicBool,
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
            given: AtomicBool::new(false),
            count: Mutex::default(),
            acknowledged: Condvar::new(),
        })
    }

    /// The application's id; NULL until it has been made.
    pub(super) fn handle(&self) -> *mut Id {
        self.handle.load(Ordering::Acquire)
    }

    /// The application gets the id of a connection request: from now on it may get events of the
    /// id, and destroy it.
    pub(super) fn give(&self) {
        self.given.store(true, Ordering::Release);
    }

    /// Whether the application has the id.
    pub(super) fn is_given(&self) -> bool {
        self.given.load(Ordering::Acquire)
    }

    /// Counts an event that the application gets. Returns its number.
    pub(super) fn report(&self) -> u64 {
        let mut count = lock(&self.count);
        count.reported += 1;
        let number = count.reported;
        count.open.insert(number);
        number
    }

    /// The application has acknowledged the event of this number.
    pub(super) fn acknowledge(&self, number: u64) {
        lock(&self.count).open.remove(&number);
        self.acknowledged.notify_all();
    }

    /// The number of events that the application has got.
    pub(super) fn reported(&self) -> u64 {
        lock(&self.count).reported
    }

    /// Waits until the application has acknowledged the first `of` events. It may acknowledge later
    /// ones before.
    pub(super) fn wait_for_acknowledgements(&self, of: u64) {
        let mut count = lock(&self.count);
        while !count.are_acknowledged(of) {
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
        let id = Self::make_ungiven(shared, c);
        shared.give();
        id
    }

    fn make_ungiven(shared: &Arc<Shared>, c: rdma_cm_id) -> *mut Self {
        let id = Box::into_raw(Box::new(Self {
            c,
            shared: Arc::clone(shared),
            path: Box::default(),
        }));
        shared.handle.store(id, Ordering::Release);
        id
    }

    /// Makes the id of a connection request, which the application gets by [`Shared::give`]. It
    /// inherits from the listener, which lives because it has an event in the channel whose lock
    /// the caller holds.
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
        Self::make_ungiven(
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
        let (children, events, names, parts) = {
            let mut state = lock(&shared.state);
            for (fd, _) in state.watched() {
                state.events.unwatch(fd);
            }
            state.phase = Phase::Dead;
            let events = state.events.expel(shared);
            let names = std::mem::take(&mut state.names);
            let parts = (
                std::mem::take(&mut state.permissions),
                state.link.take(),
                (state.timer.take(), state.reserved.take()),
                state.device.take(),
            );
            // A child whose event was taken from the queue before the events were removed belongs
            // to the application.
            let (children, taken) = std::mem::take(&mut state.children)
                .into_iter()
                .partition::<Vec<Child>, _>(|child| child.id.handle().is_null());
            state.children = taken;
            (children, events, names, parts)
        };
        drop(parts);
        // Requests in the queue hold only objects that `children` has too.
        drop(events);
        for child in children {
            Self::abandon(&child.id);
        }
        // Last: this takes descriptors, which the children may have left free. Without one the
        // clients in the queue are not rejected before the last copy of the socket is closed.
        for name in names {
            name.end_queue();
        }
    }
}

/// Moves the id of a connection request that the application does not have yet, as
/// [`move_watched`]. If a descriptor cannot be watched in the new channel, nothing would notice
/// what the peer does: the request ends, as if the peer had given up.
pub(super) fn move_request(state: &mut State, shared: &Arc<Shared>, events: &Arc<Events>) {
    if Arc::ptr_eq(&state.events, events) {
        return;
    }
    if watch_all(state, shared, events).is_err() {
        state.end_request(shared);
    }
    move_watched(state, shared, events, |_| {});
}

/// Moves the id with its queued events to another channel, in which its descriptors are watched
/// already. Runs `act` while the id's events are in no channel. Returns the number of events that
/// the application had got before any of the new channel. The caller holds the lock of the state,
/// which is that of the id.
fn move_watched(
    state: &mut State,
    shared: &Arc<Shared>,
    events: &Arc<Events>,
    act: impl FnOnce(&mut State),
) -> u64 {
    if Arc::ptr_eq(&state.events, events) {
        return shared.reported();
    }
    let old = std::mem::replace(&mut state.events, Arc::clone(events));
    let waiting = old.expel(shared);
    let reported = shared.reported();
    act(state);
    events.enroll(shared);
    for (fd, _) in state.watched() {
        old.unwatch(fd);
    }
    for event in waiting {
        events.push(event);
    }
    reported
}

/// Watches the descriptors of the id in a channel, all or none.
fn watch_all(state: &State, shared: &Shared, events: &Events) -> Res<()> {
    let descriptors = state.watched();
    for (count, &(fd, writable)) in descriptors.iter().enumerate() {
        events.watch(fd, shared, writable).inspect_err(|_| {
            for &(fd, _) in descriptors.iter().take(count) {
                events.unwatch(fd);
            }
        })?;
    }
    Ok(())
}

/// Moves an id of the application as [`move_watched`], and with it the ids of connection requests
/// that the application does not have yet. `own` is the new channel if it is not the application's.
/// Returns the number of events as [`move_watched`], and the former channel if it was not the
/// application's.
///
/// # Errors
/// Those of creating channels for the ids of requests, and of watching the descriptors of the id in
/// the new channel; then nothing has moved.
pub(super) fn migrate(
    shared: &Arc<Shared>,
    events: &Arc<Events>,
    own: Option<Spare>,
) -> Res<(u64, Option<*mut rdma_event_channel>)> {
    let mut state = lock(&shared.state);
    let old = Arc::clone(&state.events);
    let needed = own.as_ref().map_or(0, |_| state.children.len());
    let mut spares = (0..needed)
        .map(|_| Spare::create())
        .collect::<Res<Vec<_>>>()?;
    if !Arc::ptr_eq(&old, events) {
        watch_all(&state, shared, events)?;
    }
    let (mut left, mut children) = (None, Vec::new());
    let reported = move_watched(&mut state, shared, events, |state| {
        left = std::mem::replace(&mut state.own_channel, own.map(Spare::take));
        for child in &mut state.children {
            // A request whose event was taken from the queue before is one of the old channel.
            if child.id.handle().is_null() {
                child.spare = spares.pop();
                children.push(Arc::clone(&child.id));
            }
        }
    });
    drop(state);
    for child in children {
        let mut state = lock(&child.state);
        // A thread that has taken its event from the new channel may have moved it further.
        if Arc::ptr_eq(&state.events, &old) {
            move_request(&mut state, &child, events);
        }
        // One that has no request yet will have none.
        let is_lost = state.phase == Phase::Accepted && state.link.is_none();
        drop(state);
        if is_lost {
            Id::abandon(&child);
            let mut above = lock(&shared.state);
            above
                .children
                .retain(|other| other.id.serial != child.serial);
        }
    }
    Ok((reported, left))
}

#[cfg(test)]
mod tests {
    use super::super::channel::Channel;
    use super::*;

    /// A move waits for the first event, and the second one is of the new channel.
    #[test]
    fn a_later_acknowledgement_is_not_an_earlier_one() {
        let channel = Channel::create().unwrap();
        // SAFETY: a live channel.
        let events = unsafe { Channel::events_of(channel) };
        let id = Shared::new(events, Phase::Idle);
        let are_acknowledged = |of| lock(&id.count).are_acknowledged(of);
        assert_eq!([id.report(), id.report()], [1, 2]);
        id.acknowledge(2);
        assert_eq!([0, 1, 2].map(are_acknowledged), [true, false, false]);
        id.acknowledge(1);
        assert!(are_acknowledged(2));
        drop(id);
        // SAFETY: made above, and not used any more.
        unsafe { Channel::destroy(channel) };
    }
}
