//! Event channels: a queue of events, and the descriptors from which events come.
//!
//! Invariants: the channel's descriptor is readable while the queue has an event, or a descriptor
//! of one of its ids has something to say. An id is in the `sources` of exactly one channel, that
//! of its state. The channel's lock is taken after an id's and never before; taking an event
//! out counts it as reported under this lock, so whoever removes an id's events under it knows
//! how many of them are with the application.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use libc::c_int;
use rdma_core_sys::rdma_event_channel;

use super::event::{self, Event, Raw};
use super::id::Shared;
use super::sock::{Flag, Poll};
use super::{progress, void};
use crate::sys::{Errno, Res};

/// The token of the flag; ids have others.
const FLAG: u64 = 0;

/// Takes a lock. A panic elsewhere must not spread through a lock into every later call.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the application holds.
#[repr(C)]
pub(super) struct Channel {
    c: rdma_event_channel,
    events: Arc<Events>,
}

/// The channel itself, which its ids keep.
pub(super) struct Events {
    /// What the application holds, to be shown in the ids that requests bring.
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

    /// What its ids keep.
    ///
    /// # Safety
    /// `channel` must be a live channel of this connection manager.
    pub(super) unsafe fn events_of(channel: *mut rdma_event_channel) -> Arc<Events> {
        // SAFETY: every channel of this connection manager is a `Channel`, and `c` is its head.
        Arc::clone(unsafe { &(*channel.cast::<Self>()).events })
    }

    /// Gives a channel back.
    ///
    /// # Safety
    /// As `rdma_destroy_event_channel(3)`: live, and used by nobody any more.
    pub(super) unsafe fn destroy(channel: *mut rdma_event_channel) {
        // SAFETY: made by `create`; the caller gives it up.
        let channel = unsafe { Box::from_raw(channel.cast::<Self>()) };
        // Ids that the application should have destroyed would keep it alive through their events.
        let left = std::mem::take(&mut lock(&channel.events.pending).queue);
        drop(left);
    }
}

impl Events {
    /// Adds an event. The caller holds the lock of the subject's state.
    pub(super) fn push(&self, event: Raw) {
        let mut pending = lock(&self.pending);
        pending.queue.push_back(event);
        self.flag.set();
    }

    /// Takes the next event out, and counts it as reported.
    fn pop(&self) -> Option<Raw> {
        let mut pending = lock(&self.pending);
        let event = pending.queue.pop_front()?;
        if pending.queue.is_empty() {
            self.flag.clear();
        }
        event.subject.report();
        event::prepare(&event, self.address.load(Ordering::Acquire).cast());
        Some(event)
    }

    /// Makes the id's descriptors heard.
    pub(super) fn enroll(&self, id: &Arc<Shared>) {
        lock(&self.pending)
            .sources
            .insert(id.serial, Arc::downgrade(id));
    }

    /// Forgets the id and returns the events that it still had.
    pub(super) fn expel(&self, id: &Shared) -> Vec<Raw> {
        let mut pending = lock(&self.pending);
        pending.sources.remove(&id.serial);
        let (gone, rest) = std::mem::take(&mut pending.queue)
            .into_iter()
            .partition(|event| event.subject.serial == id.serial);
        pending.queue = rest;
        if pending.queue.is_empty() {
            self.flag.clear();
        }
        Vec::from(std::convert::identity::<VecDeque<Raw>>(gone))
    }

    /// Listens to a descriptor of the id.
    pub(super) fn watch(&self, fd: RawFd, id: &Shared, writable: bool) -> Res<()> {
        self.poll.add(fd, id.serial, writable)
    }

    /// Changes whether room to write is waited for.
    pub(super) fn rewatch(&self, fd: RawFd, id: &Shared, writable: bool) {
        // It fails only for a descriptor that isn't watched, which has ended then.
        let _ = self.poll.change(fd, id.serial, writable);
    }

    /// Listens to a descriptor no more.
    pub(super) fn unwatch(&self, fd: RawFd) {
        self.poll.remove(fd);
    }

    /// Lets the ids that have something to say act.
    fn turn(&self) -> Res<()> {
        for token in self.poll.ready()? {
            // The lock must not be held while an id acts.
            let id = lock(&self.pending)
                .sources
                .get(&token)
                .and_then(Weak::upgrade);
            if let Some(id) = id {
                progress::act(&id)?;
            }
        }
        Ok(())
    }

    /// The next event as the application gets it.
    ///
    /// # Errors
    /// `EAGAIN` where there is none and the descriptor is non-blocking; `EINTR`.
    pub(super) fn next(self: &Arc<Self>) -> Res<Box<Event>> {
        loop {
            while let Some(raw) = self.pop() {
                if let Some(event) = event::deliver(raw, self) {
                    return Ok(event);
                }
            }
            self.turn()?;
            if lock(&self.pending).queue.is_empty() {
                if self.poll.nonblocking() {
                    return Err(Errno(libc::EAGAIN));
                }
                self.poll.sleep()?;
            }
        }
    }
}

pub(super) extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    super::pointer(Channel::create)
}

pub(super) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    void(|| {
        if !channel.is_null() {
            // SAFETY: the caller promises a channel that it uses no more.
            unsafe { Channel::destroy(channel) };
        }
    });
}

pub(super) unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_core_sys::rdma_cm_event,
) -> c_int {
    super::status(|| {
        if channel.is_null() || event.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises a live channel.
        let next = unsafe { Channel::events_of(channel) }.next()?;
        // SAFETY: the caller promises room for a pointer.
        unsafe { *event = next.into_c() };
        Ok(())
    })
}
