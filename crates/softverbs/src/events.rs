//! Asynchronous events of a context: `ibv_get_async_event`.
//!
//! The descriptor is readable while an event is queued, and when the process has to make progress,
//! which may raise one. A call that leaves the queue empty makes that progress before it returns,
//! so that a program which reads events while the descriptor is readable stops there.

use std::collections::VecDeque;

use rdma_core_sys::{ibv_cq, ibv_event_type, ibv_qp, ibv_srq};

use crate::process::Process;
use crate::sync::Lock;
use crate::sys::{Epoll, Errno, Grow, Pipe, Res};

/// The object that an event reports on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Qp(*mut ibv_qp),
    Cq(*mut ibv_cq),
    Srq(*mut ibv_srq),
}

// SAFETY: the pointers are only handed to the application, which owns the objects.
unsafe impl Send for Element {}

/// The events of one context.
#[derive(Debug)]
pub(crate) struct AsyncQueue {
    process: &'static Process,
    pipe: Pipe,
    pub(crate) epoll: Epoll,
    events: Lock<VecDeque<(ibv_event_type, Element)>>,
}

impl AsyncQueue {
    pub(crate) fn new(process: &'static Process) -> Res<Self> {
        let pipe = Pipe::new()?;
        let epoll = Epoll::new()?;
        epoll.add(pipe.read_fd(), 0)?;
        epoll.add(process.wake.fd(), 1)?;
        Ok(Self {
            process,
            pipe,
            epoll,
            events: Lock::new(VecDeque::new()),
        })
    }

    /// Queues an event. Returns false without memory: the event is lost, as in the kernel.
    pub(crate) fn push(&self, event: ibv_event_type, element: Element) -> bool {
        self.append(&mut self.events.lock(), event, element)
    }

    /// As [`Self::push`], unless such an event of the object is unread. Returns whether it was
    /// queued. Takes time in proportion to the number of unread events.
    pub(crate) fn push_once(&self, event: ibv_event_type, element: Element) -> bool {
        let mut events = self.events.lock();
        !events.contains(&(event, element)) && self.append(&mut events, event, element)
    }

    fn append(
        &self,
        events: &mut VecDeque<(ibv_event_type, Element)>,
        event: ibv_event_type,
        element: Element,
    ) -> bool {
        let pushed = events.try_push((event, element)).is_ok();
        if pushed {
            // Under the lock: a ring behind another thread's `drain` would be one without an event.
            self.pipe.ring();
        }
        pushed
    }

    /// Drops the unread events of an object that is being destroyed; returns their number. The
    /// caller holds no lock of a queue.
    pub(crate) fn forget(&self, element: Element) -> u32 {
        let mut events = self.events.lock();
        let before = events.len();
        events.retain(|(_, other)| *other != element);
        let dropped = before - events.len();
        let was_last = dropped > 0 && events.is_empty();
        if was_last {
            self.pipe.drain();
        }
        drop(events);
        if was_last {
            self.process.prepare_sleep();
        }
        dropped as u32
    }

    fn take(&self) -> Option<(ibv_event_type, Element)> {
        let mut events = self.events.lock();
        let event = events.pop_front();
        let is_empty = events.is_empty();
        if is_empty {
            self.pipe.drain();
        }
        drop(events);
        if event.is_some() && is_empty {
            self.process.prepare_sleep();
        }
        event
    }

    /// The next event; waits for it unless the descriptor is non-blocking.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`.
    pub(crate) fn next(&self) -> Res<(ibv_event_type, Element)> {
        loop {
            if let Some(event) = self.take() {
                return Ok(event);
            }
            self.process.prepare_sleep();
            if let Some(event) = self.take() {
                return Ok(event);
            }
            if self.epoll.nonblocking() {
                return Err(Errno(libc::EAGAIN));
            }
            self.epoll.sleep()?;
        }
    }
}
