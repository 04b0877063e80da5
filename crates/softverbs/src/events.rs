//! Asynchronous events of a context: `ibv_get_async_event`.

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
        let pushed = self.events.lock().try_push((event, element)).is_ok();
        if pushed {
            self.pipe.ring();
        }
        pushed
    }

    /// Drops the unread events of an object that is being destroyed; returns their number.
    pub(crate) fn forget(&self, element: Element) -> u32 {
        let mut events = self.events.lock();
        let before = events.len();
        events.retain(|(_, other)| *other != element);
        (before - events.len()) as u32
    }

    fn pop(&self) -> Option<(ibv_event_type, Element)> {
        let mut events = self.events.lock();
        let event = events.pop_front();
        if events.is_empty() {
            self.pipe.drain();
        }
        event
    }

    /// The next event; waits for it unless the descriptor is non-blocking.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`.
    pub(crate) fn next(&self) -> Res<(ibv_event_type, Element)> {
        loop {
            if let Some(event) = self.pop() {
                return Ok(event);
            }
            self.process.prepare_sleep();
            if let Some(event) = self.pop() {
                return Ok(event);
            }
            if self.epoll.nonblocking() {
                return Err(Errno(libc::EAGAIN));
            }
            self.epoll.sleep()?;
        }
    }
}
