//! Event channels: a queue of events, and the descriptors that cause events.
//!
//! Invariants: the channel's descriptor is readable while the queue has an event that is due
//! ([`Raw::is_due`]), or a descriptor of one of its ids is ready. An id is in the `sources` of
//! exactly one channel, that of its state. The lock of an id is taken before that of a channel.
//! Taking an event from the queue counts it as reported under the channel's lock; so a thread that
//! removes an id's events under this lock has the exact number of events that the application
//! holds.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rdma_core_sys::rdma_event_channel;

use super::event::{Kind, Raw};
use super::guard::{lock, pointer, void};
use super::id::{Id, Shared};
use super::sock::{Flag, Poll};
use crate::sys::{Errno, Res};

/// The token of the channel's flag; the tokens of ids are above 0.
const FLAG: u64 = 0;

/// The object that the application holds.
#[repr(C)]
pub(super) struct Channel {
    c: rdma_event_channel,
    events: Arc<Events>,
}

/// The channel itself; its ids hold references to it.
pub(super) struct Events {
    /// The application's object, which the ids of connection requests get.
    address: AtomicPtr<Channel>,
    poll: Poll,
    flag: Flag,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    queue: VecDeque<Raw>,
    sources: HashMap<u64, Weak<Shared>>,
}

impl Pending {
    /// Whether an event is due.
    fn has_due(&self) -> bool {
        self.queue.iter().any(Raw::is_due)
    }
}

impl Channel {
    pub(super) fn create() -> Res<*mut rdma_event_channel> {
        let (poll, flag) = (Poll::new()?, Flag::new()?);
        poll.add(flag.fd(), FLAG, false)?;
        let fd = poll.fd();
        let events = Arc::new(Events {
            address: AtomicPtr::default(),
            poll,
            flag,
            pending: Mutex::default(),
        });
        let channel = Box::into_raw(Box::new(Self {
            c: rdma_event_channel { fd },
            events: Arc::clone(&events),
        }));
        events.address.store(channel, Ordering::Release);
        Ok(channel.cast())
    }

    /// The channel of the application's object, as ids hold it.
    ///
    /// # Safety
    /// `channel` must be a live channel of this connection manager.
    pub(super) unsafe fn events_of(channel: *mut rdma_event_channel) -> Arc<Events> {
        // SAFETY: every channel of this connection manager is a `Channel`, and `c` is its head.
        Arc::clone(unsafe { &(*channel.cast::<Self>()).events })
    }

    /// Frees the application's object.
    ///
    /// # Safety
    /// As `rdma_destroy_event_channel(3)`: `channel` is live, and no thread uses it any more.
    pub(super) unsafe fn destroy(channel: *mut rdma_event_channel) {
        // SAFETY: made by `create`; the caller does not use it again.
        let channel = unsafe { Box::from_raw(channel.cast::<Self>()) };
        // Ids that the application has not destroyed would keep the channel alive through their
        // events.
        let left = std::mem::take(&mut lock(&channel.events.pending).queue);
        drop(left);
    }
}

/// A channel for an id without a channel of the application, until the id has it.
pub(super) struct Spare(*mut rdma_event_channel);

impl Spare {
    pub(super) fn create() -> Res<Self> {
        Channel::create().map(Self)
    }

    pub(super) fn channel(&self) -> *mut rdma_event_channel {
        self.0
    }

    /// The channel, which the caller destroys.
    pub(super) fn take(self) -> *mut rdma_event_channel {
        std::mem::ManuallyDrop::new(self).0
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        // SAFETY: made by `create`; no id and no thread uses it.
        unsafe { Channel::destroy(self.0) };
    }
}

impl Events {
    /// Queues an event. The caller holds the lock of the subject's state.
    pub(super) fn push(&self, event: Raw) {
        let mut pending = lock(&self.pending);
        let is_due = event.is_due();
        pending.queue.push_back(event);
        if is_due {
            self.flag.set();
        }
    }

    /// An id was given to the application, so that its events are due. The caller holds the lock of
    /// its state.
    pub(super) fn given(&self) {
        let pending = lock(&self.pending);
        if pending.has_due() {
            self.flag.set();
        }
    }

    /// Takes the next event from the queue, and counts it as reported. Returns it with its number
    /// ([`Shared::report`]). Makes the id of a connection request. Until the request is delivered
    /// an event of that id stays: another thread would give the id to the application, which could
    /// destroy it during the delivery.
    pub(super) fn pop(&self) -> Option<(Raw, u64)> {
        let mut pending = lock(&self.pending);
        let queue = &mut pending.queue;
        let next = queue.iter().position(Raw::is_due)?;
        let event = queue.remove(next)?;
        if !pending.has_due() {
            self.flag.clear();
        }
        let number = event.subject.report();
        if let Kind::Request { child, .. } | Kind::ServiceRequest { child, .. } = &event.kind {
            let channel = self.address.load(Ordering::Acquire);
            Id::make_for_request(child, &event.subject, channel.cast());
        }
        Some((event, number))
    }

    /// Adds the id to those whose descriptors are processed.
    pub(super) fn enroll(&self, id: &Arc<Shared>) {
        lock(&self.pending)
            .sources
            .insert(id.serial, Arc::downgrade(id));
    }

    /// Removes the id; returns the events that it still had.
    pub(super) fn expel(&self, id: &Shared) -> Vec<Raw> {
        let mut pending = lock(&self.pending);
        pending.sources.remove(&id.serial);
        let (gone, rest) = std::mem::take(&mut pending.queue)
            .into_iter()
            .partition(|event| event.subject.serial == id.serial);
        pending.queue = rest;
        if !pending.has_due() {
            self.flag.clear();
        }
        Vec::from(std::convert::identity::<VecDeque<Raw>>(gone))
    }

    /// Watches a descriptor of the id.
    pub(super) fn watch(&self, fd: RawFd, id: &Shared, writable: bool) -> Res<()> {
        self.poll.add(fd, id.serial, writable)
    }

    /// Changes whether the channel waits until `fd` is writable.
    pub(super) fn rewatch(&self, fd: RawFd, id: &Shared, writable: bool) {
        // Fails only for a descriptor that is no longer watched because it has ended.
        let _ = self.poll.change(fd, id.serial, writable);
    }

    /// Stops watching a descriptor.
    pub(super) fn unwatch(&self, fd: RawFd) {
        self.poll.remove(fd);
    }

    /// Calls `act` for the ids with ready descriptors, whether or not it fails for one of them: a
    /// listener without a free descriptor stays ready, and keeps no other id waiting. Returns
    /// whether there was one.
    ///
    /// # Errors
    /// The first one of `act`.
    pub(super) fn turn(&self, act: impl Fn(&Arc<Shared>) -> Res<()>) -> Res<bool> {
        let mut result = Ok(false);
        for token in self.poll.ready()? {
            // The lock must not be held while an id is processed.
            let id = lock(&self.pending)
                .sources
                .get(&token)
                .and_then(Weak::upgrade);
            if let Some(id) = id {
                result = result.and(act(&id).map(|()| true));
            }
        }
        result
    }

    /// Whether an event is queued that [`Self::pop`] returns.
    pub(super) fn has_event(&self) -> bool {
        lock(&self.pending).has_due()
    }

    /// Waits until an event is queued or a descriptor is ready.
    ///
    /// # Errors
    /// `EAGAIN`: the channel is non-blocking. `EINTR`.
    pub(super) fn wait(&self) -> Res<()> {
        if !self.has_event() {
            if self.poll.nonblocking() {
                return Err(Errno(libc::EAGAIN));
            }
            self.poll.sleep()?;
        }
        Ok(())
    }
}

pub(super) extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(Channel::create)
}

pub(super) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    void(|| {
        if !channel.is_null() {
            // SAFETY: the caller promises a channel that no thread uses any more.
            unsafe { Channel::destroy(channel) };
        }
    });
}

#[cfg(test)]
mod tests {
    use rdma_core_sys::rdma_cm_id;

    use super::super::state::Phase;
    use super::*;

    #[test]
    fn an_event_of_a_request_stays_until_the_application_has_the_request() {
        let channel = Channel::create().unwrap();
        // SAFETY: a live channel.
        let events = unsafe { Channel::events_of(channel) };
        let [early, known] = [(); 2].map(|()| Shared::new(Arc::clone(&events), Phase::ReqReceived));
        let push = |id: &Arc<Shared>| {
            events.push(Raw {
                subject: Arc::clone(id),
                kind: Kind::TimewaitExit,
            });
        };
        let popped = || events.pop().map(|(raw, _)| raw.subject.serial);
        let known_id = Id::make(&known, rdma_cm_id::default());
        push(&early);
        assert_eq!((popped(), events.has_event()), (None, false));
        push(&known);
        assert_eq!(popped(), Some(known.serial));
        let early_id = Id::make(&early, rdma_cm_id::default());
        assert!(events.has_event());
        assert_eq!(popped(), Some(early.serial));
        assert_eq!((popped(), events.has_event()), (None, false));
        // SAFETY: made above, and not used any more.
        unsafe {
            Id::free(early_id);
            Id::free(known_id);
            Channel::destroy(channel);
        }
    }
}
