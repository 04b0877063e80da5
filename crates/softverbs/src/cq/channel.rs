//! Completion channels: an epoll set over the channel's doorbell and the process's wake set.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rdma_core_sys::{ibv_comp_channel, ibv_context, ibv_cq};

use super::Cq;
use crate::process::Process;
use crate::sync::Lock;
use crate::sys::{Epoll, Errno, Grow, Pipe, Res, epoll_readable, room};

/// Tokens of the channel's pipe and of the process's wake set.
const PIPE: u64 = 0;
const WAKE: u64 = 1;

/// See [`answer_every_wake`].
static ANSWERS_EVERY_WAKE: AtomicBool = AtomicBool::new(false);

/// For programs that take a readable channel for one with an event, and end at `EAGAIN`: if a
/// non-blocking channel was readable for another reason, `ibv_get_cq_event` returns an event of one
/// of its queues from now on.
pub fn answer_every_wake() {
    ANSWERS_EVERY_WAKE.store(true, Ordering::Relaxed);
}

/// Whether [`answer_every_wake`] was called.
pub(crate) fn answers_every_wake() -> bool {
    ANSWERS_EVERY_WAKE.load(Ordering::Relaxed)
}

/// A completion channel. The C object comes first, so a pointer to it is also a pointer to this.
#[repr(C)]
pub(crate) struct Channel {
    object: ibv_comp_channel,
    pub(crate) process: &'static Process,
    pub(crate) pipe: Pipe,
    epoll: Epoll,
    /// Indices of the queues that received a completion after they were armed. While there are
    /// some, the pipe is readable.
    events: Lock<VecDeque<u32>>,
    /// Indices of the queues that use the channel. Acquired before the lock of a queue's
    /// moderation, and that before `events`.
    cqs: Lock<Vec<u32>>,
    /// [`Process::removed_wakes`] when a call on the channel last looked at it.
    seen_wakes: AtomicU32,
    pub(crate) users: AtomicU32,
}

impl Channel {
    /// # Safety
    /// `channel` must come from [`create_channel`] and be live.
    pub(crate) unsafe fn from_ptr<'a>(channel: *mut ibv_comp_channel) -> &'a Self {
        // SAFETY: the C object is the first field; the caller promises the rest.
        unsafe { &*channel.cast::<Self>() }
    }

    /// Adds a queue to the channel.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn attach(&self, cq: u32) -> Res<()> {
        let mut cqs = self.cqs.lock();
        // reserves room for one event of each queue
        let mut events = self.events.lock();
        let more = cqs.len() + 1;
        let room = more.saturating_sub(events.len());
        events.make_room(room)?;
        drop(events);
        cqs.try_push(cq)?;
        if more == 1 {
            // A channel without queues has no event, and is not readable.
            self.pipe.drain();
            self.watch().inspect_err(|_| {
                cqs.pop();
            })?;
            self.note_wakes(|| false);
        }
        self.users.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the channel readable with its pipe, and when the process has to make progress.
    fn watch(&self) -> Res<()> {
        let pipe = self.pipe.read_fd();
        self.epoll.add(pipe, PIPE)?;
        let added = self.epoll.add(self.process.wake.fd(), WAKE);
        added.inspect_err(|_| self.epoll.remove(pipe))
    }

    /// Removes a queue and its queued events.
    pub(crate) fn detach(&self, cq: u32) {
        let mut cqs = self.cqs.lock();
        cqs.retain(|&index| index != cq);
        if cqs.is_empty() {
            self.epoll.remove(self.process.wake.fd());
            self.epoll.remove(self.pipe.read_fd());
        }
        drop(cqs);
        let mut events = self.events.lock();
        events.retain(|&index| index != cq);
        // a peer may have rung for a message that this process has not taken
        let was_last = events.is_empty() && self.pipe.drain();
        drop(events);
        if was_last {
            self.be_quiet();
        }
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// Queues the event that the application has requested of a queue, if it has, and makes the
    /// channel readable. Under the lock of the events, so that a thread that has this lock finds
    /// the request or the event; and that a thread that takes the event and empties the pipe does
    /// so after the ring, which would make the channel readable without an event.
    pub(super) fn raise(&self, cq: &Cq) {
        let mut events = self.events.lock();
        if cq.withdraw() {
            let is_first = events.is_empty();
            Self::add(&mut events, cq.index());
            if is_first {
                self.pipe.ring();
            }
        }
    }

    fn add(events: &mut VecDeque<u32>, cq: u32) {
        if events.try_push(cq).is_err() {
            // Without memory for one more: keeps one event per queue, which wakes every waiting
            // thread.
            let (mut seen, mut kept) = (false, 0);
            while kept < events.len() {
                let again = events.range(..kept).any(|&other| other == events[kept]);
                seen |= events[kept] == cq;
                if again {
                    events.remove(kept);
                } else {
                    kept += 1;
                }
            }
            if !seen {
                events.push_back(cq);
            }
        }
    }

    fn pop(&self) -> Option<&'static Cq> {
        let mut events = self.events.lock();
        let cq = self.process.cqs.get(events.pop_front()?)?;
        // Under the lock: the thread that destroys the queue either drops the event or waits for
        // its acknowledgement.
        cq.event_taken();
        if events.is_empty() {
            // the channel is readable only while it has events; rings that arrive now are found
            // below
            self.pipe.drain();
            drop(events);
            self.be_quiet();
        }
        Some(cq)
    }

    /// Makes the progress for which the channel would be readable without an event. Peers have rung
    /// for messages that this call finds, and their rings may have withdrawn requests that were
    /// made since.
    fn be_quiet(&self) {
        self.rearm();
        self.process.prepare_sleep();
        self.note_wakes(|| false);
    }

    /// Returns whether a thread has removed what made the channel readable since the last call, for
    /// another reason than an event; or `is_readable`, which is called while no thread does so.
    fn note_wakes(&self, is_readable: impl FnOnce() -> bool) -> bool {
        let (now, is_readable) = self.process.removed_wakes(is_readable);
        self.seen_wakes.swap(now, Ordering::Relaxed) != now || is_readable
    }

    /// Arms the queues that still wait again: peers ring only for armed queues, and an earlier ring
    /// may have cleared the word.
    fn rearm(&self) {
        let cqs = self.cqs.lock();
        for cq in cqs.iter().filter_map(|&index| self.process.cqs.get(index)) {
            cq.rearm();
        }
    }

    /// Takes an event that no completion has raised: of a queue that is armed, or else of any. Not
    /// of one whose events are moderated: each message makes the channel readable, so nothing would
    /// be delayed. Nor of one without queue pairs: a thread may destroy it, and no completion
    /// follows for which a program would expect an event then.
    fn take_without_completion(&self) -> Option<&'static Cq> {
        let cqs = self.cqs.lock();
        let queues = cqs.iter().filter_map(|&index| self.process.cqs.get(index));
        // the lock of the moderation precedes that of the events
        let may = |cq: &&Cq| cq.users.load(Ordering::Relaxed) != 0 && !cq.is_moderated();
        let mut queues = queues.filter(may);
        let first = queues.clone().next()?;
        let armed = queues.find(|cq| {
            let _events = self.events.lock();
            cq.withdraw()
        });
        let taken = armed.unwrap_or(first);
        // Under the lock, for which the thread that destroys the queue waits: it finds the event.
        taken.event_taken();
        drop(cqs);
        // a request that another thread has made meanwhile may have been withdrawn with the first
        self.be_quiet();
        Some(taken)
    }

    fn next(&self) -> Res<&'static Cq> {
        if let Some(cq) = self.pop() {
            return Ok(cq);
        }
        let nonblocking = self.epoll.nonblocking();
        // poll(2) can be interrupted though it does not wait
        let is_readable = || epoll_readable(self.epoll.fd(), 0) == Ok(true);
        if nonblocking && !self.note_wakes(is_readable) {
            return Err(Errno(libc::EAGAIN));
        }
        loop {
            if let Some(cq) = self.pop() {
                return Ok(cq);
            }
            #[cfg(all(test, not(loom)))]
            before_drain::run();
            // Under the lock: the rings of events that have come meanwhile stay, as the caller may
            // take only one of these events before it looks at the descriptor again, and other
            // threads sleep on it.
            let events = self.events.lock();
            if events.is_empty() {
                self.pipe.drain();
            }
            drop(events);
            self.be_quiet();
            if let Some(cq) = self.pop() {
                return Ok(cq);
            }
            if nonblocking {
                // An event of a queue without completions is usual: a poll can take the completion
                // of an event before the program reads the event.
                let answers = answers_every_wake();
                let next = answers.then(|| self.take_without_completion()).flatten();
                return next.ok_or(Errno(libc::EAGAIN));
            }
            self.epoll.sleep()?;
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
    let room = room()?;
    process.channels.lock().try_push(pipe.read_fd())?;
    let channel = Channel {
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
        seen_wakes: AtomicU32::new(0),
        users: AtomicU32::new(0),
    };
    Ok(Box::into_raw(Box::write(room, channel)).cast())
}

/// `ibv_destroy_comp_channel`.
///
/// # Errors
/// `EBUSY`: completion queues use the channel.
///
/// # Safety
/// `channel` must be live; it is freed on success.
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
/// `EAGAIN`: the descriptor is non-blocking, and there is no event. `EINTR`.
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

/// `ibv_ack_cq_events`. In a forked child it does nothing: another thread of the parent may have
/// had the mutex at the fork.
///
/// # Safety
/// `cq` must be live.
pub(crate) unsafe fn ack_cq_events(cq: *mut ibv_cq, count: u32) {
    // SAFETY: the caller promises a live queue.
    if unsafe { Cq::from_ptr(cq) }.process().forked() {
        return;
    }
    // SAFETY: the caller promises a live queue, whose mutex and condition were initialised.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*cq).mutex);
        (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(count);
        libc::pthread_cond_signal(&raw mut (*cq).cond);
        libc::pthread_mutex_unlock(&raw mut (*cq).mutex);
    }
}

/// What other threads do in tests between two steps of this one.
#[cfg(all(test, not(loom)))]
macro_rules! between {
    ($name:ident) => {
        pub(super) mod $name {
            use std::cell::Cell;

            type Action = Box<dyn FnOnce()>;

            thread_local!(static NEXT: Cell<Option<Action>> = const { Cell::new(None) });

            /// Runs `action` once, at this place.
            pub(in crate::cq) fn once(action: impl FnOnce() + 'static) {
                NEXT.set(Some(Box::new(action)));
            }

            pub(in crate::cq) fn run() {
                if let Some(action) = NEXT.take() {
                    action();
                }
            }
        }
    };
}
// the thread has found no event
#[cfg(all(test, not(loom)))]
between!(before_drain);
// the thread has withdrawn a request, which is still published
#[cfg(all(test, not(loom)))]
between!(before_disarm);

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ptr::null_mut;

    use super::super::{Cqe, req_notify, test_context};
    use super::*;
    use crate::testing::is_alone;

    /// A program that takes one event each time when the channel is readable takes all events.
    #[test]
    fn a_channel_with_an_event_is_readable() {
        let verbs = &crate::backend().verbs;
        let context = test_context();
        // SAFETY: live objects, which are never destroyed; writable outputs.
        unsafe {
            let channel = (verbs.ibv_create_comp_channel)(context);
            let cqs = [(); 2].map(|()| (verbs.ibv_create_cq)(context, 4, null_mut(), channel, 0));
            for cq in cqs {
                assert_eq!(req_notify(cq, 0), 0);
            }
            before_drain::once(move || {
                for cq in cqs {
                    Cq::from_ptr(cq).push(Cqe::default(), false);
                }
            });
            for expected in cqs {
                let (mut cq, mut cq_context) = (null_mut(), null_mut());
                assert_eq!(
                    get_cq_event(channel, &raw mut cq, &raw mut cq_context),
                    Ok(())
                );
                assert_eq!(cq, expected);
                ack_cq_events(cq, 1);
                let readable = epoll_readable((*channel).fd, 0).unwrap();
                assert!(readable || cq == cqs[1], "an event is left");
            }
        }
    }

    /// A request that another thread makes while an event is taken without a completion stays
    /// published: the peers ring for it.
    #[test]
    fn a_request_beside_a_taken_event_stays() {
        if !is_alone("cq::channel::tests::a_request_beside_a_taken_event_stays") {
            return;
        }
        answer_every_wake();
        let verbs = &crate::backend().verbs;
        let context = test_context();
        // SAFETY: live objects, which are never destroyed; writable outputs.
        unsafe {
            let channel = (verbs.ibv_create_comp_channel)(context);
            let fd = (*channel).fd;
            assert_eq!(libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK), 0);
            let created = (verbs.ibv_create_cq)(context, 4, null_mut(), channel, 0);
            // as if it had a queue pair
            Cq::from_ptr(created).users.store(1, Ordering::Relaxed);
            let at = created as usize;
            assert_eq!(req_notify(created, 0), 0);
            Channel::from_ptr(channel).process.wake_up();
            before_disarm::once(move || assert_eq!(req_notify(at as *mut ibv_cq, 0), 0));
            let (mut cq, mut cq_context) = (null_mut(), null_mut());
            let taken = get_cq_event(channel, &raw mut cq, &raw mut cq_context);
            assert_eq!((taken, cq), (Ok(()), created));
            ack_cq_events(cq, 1);
            let queue = Cq::from_ptr(created);
            assert!(queue.is_armed() && !queue.is_withdrawn());
        }
    }

    /// A program that reads an event when the channel is readable finds one.
    #[test]
    fn each_wake_has_an_event() {
        if !is_alone("cq::channel::tests::each_wake_has_an_event") {
            return;
        }
        answer_every_wake();
        let verbs = &crate::backend().verbs;
        let context = test_context();
        // SAFETY: live objects, which are never destroyed; writable outputs.
        unsafe {
            let channel = (verbs.ibv_create_comp_channel)(context);
            let fd = (*channel).fd;
            assert_eq!(libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK), 0);
            let process = Channel::from_ptr(channel).process;
            process.wake_up();
            assert!(!epoll_readable(fd, 0).unwrap(), "no queue");
            process.prepare_sleep();
            let created = (verbs.ibv_create_cq)(context, 4, null_mut(), channel, 0);
            // as if it had a queue pair
            Cq::from_ptr(created).users.store(1, Ordering::Relaxed);
            let (mut cq, mut cq_context) = (null_mut(), null_mut());
            let mut get = || get_cq_event(channel, &raw mut cq, &raw mut cq_context);
            assert_eq!(req_notify(created, 0), 0);
            assert!(!epoll_readable(fd, 0).unwrap());
            assert_eq!(get(), Err(Errno(libc::EAGAIN)), "not readable");
            process.wake_up();
            assert!(epoll_readable(fd, 0).unwrap());
            assert_eq!(get(), Ok(()));
            process.wake_up();
            assert_eq!(get(), Ok(()), "not armed");
            assert_eq!(get(), Err(Errno(libc::EAGAIN)), "once for each wake");
            // another thread makes progress after the program has found the channel readable
            assert_eq!(req_notify(created, 0), 0);
            process.wake_up();
            process.prepare_sleep();
            assert!(!epoll_readable(fd, 0).unwrap());
            assert_eq!(get(), Ok(()));
            assert_eq!(get(), Err(Errno(libc::EAGAIN)), "once");
            Cq::from_ptr(created).users.store(0, Ordering::Relaxed);
            process.wake_up();
            assert_eq!(get(), Err(Errno(libc::EAGAIN)), "no queue pair");
            assert_eq!(cq, created);
            ack_cq_events(cq, 3);
            // the last event goes with its queue
            assert_eq!(req_notify(created, 0), 0);
            Cq::from_ptr(created).push(Cqe::default(), false);
            let other = (verbs.ibv_create_cq)(context, 4, null_mut(), channel, 0);
            assert!(epoll_readable(fd, 0).unwrap());
            assert_eq!((verbs.ibv_destroy_cq)(created), 0);
            assert!(!epoll_readable(fd, 0).unwrap());
            assert_eq!((verbs.ibv_destroy_cq)(other), 0);
        }
    }
}
