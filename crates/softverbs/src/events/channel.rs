//! Completion channels: an epoll set over the channel's doorbell and the process's wake set.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core_sys::{ibv_comp_channel, ibv_context, ibv_cq};

use crate::cq::Cq;
use crate::process::Process;
use crate::sync::Lock;
use crate::sys::{Epoll, Errno, Pipe, Res};

/// A completion channel. The C object comes first, so a pointer to it is one to this.
#[repr(C)]
pub(crate) struct Channel {
    object: ibv_comp_channel,
    pub(crate) process: &'static Process,
    pub(crate) pipe: Pipe,
    epoll: Epoll,
    /// Indices of queues that had a completion after they were armed.
    events: Lock<VecDeque<u32>>,
    /// Indices of the queues that use the channel.
    cqs: Lock<Vec<u32>>,
    pub(crate) users: AtomicU32,
}

impl Channel {
    /// # Safety
    /// `channel` must come from [`create_channel`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(channel: *mut ibv_comp_channel) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*channel.cast::<Self>() }
    }

    /// A queue uses the channel from now on.
    pub(crate) fn attach(&self, cq: u32) {
        self.users.fetch_add(1, Ordering::Relaxed);
        self.cqs.lock().push(cq);
    }

    /// The queue's events are gone with it.
    pub(crate) fn detach(&self, cq: u32) {
        self.cqs.lock().retain(|&index| index != cq);
        self.events.lock().retain(|&index| index != cq);
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// Queues an event and makes the channel readable.
    pub(crate) fn push(&self, cq: u32) {
        self.events.lock().push_back(cq);
        self.pipe.ring();
    }

    fn pop(&self) -> Option<&'static Cq> {
        let mut events = self.events.lock();
        let cq = self.process.cqs.get(events.pop_front()?)?;
        // Under the lock: who destroys the queue either drops the event or waits for its
        // acknowledgement.
        cq.event_taken();
        if events.is_empty() {
            // Readable means that there is an event; whoever else rang is looked for right away.
            self.pipe.drain();
            drop(events);
            // A late ring for an earlier message may have taken what a queue armed since.
            self.rearm();
            self.process.after_arming(&self.pipe);
            self.process.progress();
        }
        Some(cq)
    }

    /// Peers ring only for queues that say so: say it again for those that still wait, as an
    /// earlier ring may have taken it.
    fn rearm(&self) {
        let cqs = self.cqs.lock().clone();
        for cq in cqs
            .into_iter()
            .filter_map(|index| self.process.cqs.get(index))
        {
            cq.rearm();
        }
    }

    fn next(&self) -> Res<&'static Cq> {
        loop {
            if let Some(cq) = self.pop() {
                return Ok(cq);
            }
            self.pipe.drain();
            self.rearm();
            self.process.prepare_sleep();
            if let Some(cq) = self.pop() {
                return Ok(cq);
            }
            if self.epoll.nonblocking() {
                return Err(Errno(libc::EAGAIN));
            }
            self.epoll.wait(-1)?;
        }
    }
}

/// `ibv_create_comp_channel`.
pub(crate) fn create_channel(
    context: *mut ibv_context,
    process: &'static Process,
) -> Res<*mut ibv_comp_channel> {
    let pipe = Pipe::new()?;
    let epoll = Epoll::new()?;
    epoll.add(pipe.read_fd(), 0)?;
    epoll.add(process.wake.fd(), 1)?;
    process.channels.lock().push(pipe.read_fd());
    let channel = Box::new(Channel {
        object: ibv_comp_channel {
            context,
            fd: epoll.fd(),
            refcnt: 0,
        },
        process,
        pipe,
        epoll,
        events: Lock::new(VecDeque::new()),
        cqs: Lock::new(Vec::new()),
        users: AtomicU32::new(0),
    });
    Ok(Box::into_raw(channel).cast())
}

/// `ibv_destroy_comp_channel`.
///
/// # Errors
/// `EBUSY` while completion queues use it.
///
/// # Safety
/// `channel` must be live, and is gone after success.
pub(crate) unsafe fn destroy_channel(channel: *mut ibv_comp_channel) -> Res<()> {
    // SAFETY: the caller promises a live channel.
    let this = unsafe { Channel::from_ptr(channel) };
    this.process.live()?;
    if this.users.load(Ordering::Relaxed) > 0 {
        return Err(Errno(libc::EBUSY));
    }
    let pipe = this.pipe.read_fd();
    this.process.channels.lock().retain(|&fd| fd != pipe);
    // SAFETY: made by `Box::into_raw` in `create_channel`.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
    Ok(())
}

/// `ibv_get_cq_event`: waits for an event, unless the application made the channel's descriptor
/// non-blocking.
///
/// # Errors
/// `EAGAIN` where it is and there is none, `EINTR`.
///
/// # Safety
/// `channel` must be live, the others writable.
pub(crate) unsafe fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> Res<()> {
    // SAFETY: the caller promises a live channel.
    let channel = unsafe { Channel::from_ptr(channel) };
    if channel.process.forked() {
        return Err(Errno(libc::EIO));
    }
    let ready = channel.next()?.as_ptr();
    // SAFETY: the caller promises writable pointers, and the queue is live while it has events.
    unsafe {
        cq.write(ready);
        cq_context.write((*ready).cq_context);
    }
    Ok(())
}

/// `ibv_ack_cq_events`.
///
/// # Safety
/// `cq` must be live.
pub(crate) unsafe fn ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: the caller promises a live queue, whose mutex and condition were initialised.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*cq).mutex);
        (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(count);
        libc::pthread_cond_signal(&raw mut (*cq).cond);
        libc::pthread_mutex_unlock(&raw mut (*cq).mutex);
    }
}
