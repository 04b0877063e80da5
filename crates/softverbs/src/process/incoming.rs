//! The rings that other processes send through to this one.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Process;
use crate::peer::Peer;
use crate::ring::{Consumer, RING_SIZE};
use crate::segment::Mapping;
use crate::segment::layout::{MAX_PROCESSES, announce, header};
use crate::sync::{Lock, light_fence};
use crate::sys::{self, Errno, Res};

/// Messages that are taken from one ring before the next one has its turn.
const BATCH: usize = 64;

/// All incoming rings. An entry for a sender's slot is made when its first ring is found, and
/// stays; its ring comes and goes.
#[derive(Debug)]
pub(super) struct Incoming {
    /// The first `count` are set, and stay.
    active: Box<[AtomicPtr<Line>]>,
    count: AtomicUsize,
    seen: AtomicU32,
    attach: Mutex<()>,
}

#[derive(Debug)]
struct Line {
    slot: u32,
    ring: Lock<Option<Attached>>,
}

#[derive(Debug)]
struct Attached {
    consumer: Consumer,
    peer: Arc<Peer>,
}

impl Incoming {
    pub(super) fn new() -> Self {
        Self {
            active: (0..MAX_PROCESSES)
                .map(|_| AtomicPtr::new(std::ptr::null_mut()))
                .collect(),
            count: AtomicUsize::new(0),
            seen: AtomicU32::new(0),
            attach: Mutex::new(()),
        }
    }

    #[inline]
    fn lines(&self) -> impl Iterator<Item = &Line> {
        let count = self.count.load(Ordering::Acquire);
        self.active[..count].iter().map(|line| {
            // SAFETY: set before `count` was raised over it, and never freed.
            unsafe { &*line.load(Ordering::Relaxed) }
        })
    }

    fn line(&self, slot: u32) -> &Line {
        if let Some(line) = self.lines().find(|line| line.slot == slot) {
            return line;
        }
        let line = Box::leak(Box::new(Line {
            slot,
            ring: Lock::new(None),
        }));
        let count = self.count.load(Ordering::Relaxed);
        self.active[count].store(line, Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Release);
        line
    }
}

impl Process {
    /// Takes what is in the rings, and attaches rings that were announced.
    #[inline]
    pub(super) fn drain_rings(&self) {
        for line in self.incoming.lines() {
            if let Some(mut ring) = line.ring.try_lock()
                && let Some(attached) = ring.as_mut()
                && attached.consumer.ready()
            {
                self.drain(attached, BATCH);
            }
        }
        let announced = self
            .segment
            .map
            .u32(header::ANNOUNCED)
            .load(Ordering::Relaxed);
        if announced != self.incoming.seen.load(Ordering::Relaxed) {
            self.attach_rings();
        }
    }

    #[inline]
    fn drain(&self, attached: &mut Attached, most: usize) {
        let mut broken = false;
        for _ in 0..most {
            match attached.consumer.peek() {
                Ok(Some(message)) => {
                    crate::qp::deliver(self, attached.peer.slot, &attached.consumer, &message);
                    attached.consumer.advance(&message);
                }
                Ok(None) => break,
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        if attached.consumer.publish() {
            light_fence(attached.peer.barriers);
            if attached.consumer.sender_waits() {
                attached.peer.ring_process();
            }
        }
        if broken {
            // Its sender writes rubbish: the same as if it had ended.
            self.request_burial(&attached.peer);
        }
    }

    #[cold]
    fn attach_rings(&self) {
        let _one = self
            .incoming
            .attach
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let announced = self
            .segment
            .map
            .u32(header::ANNOUNCED)
            .load(Ordering::Acquire);
        let mut complete = true;
        for slot in 0..MAX_PROCESSES as u32 {
            let at = announce::AT + announce::STRIDE * slot as usize;
            let cookie = self
                .segment
                .map
                .u64(at + announce::COOKIE)
                .load(Ordering::Acquire);
            if cookie == 0 {
                continue;
            }
            let known = self
                .incoming
                .lines()
                .find(|line| line.slot == slot)
                .is_some_and(|line| {
                    line.ring
                        .lock()
                        .as_ref()
                        .is_some_and(|a| a.peer.identity.cookie == cookie)
                });
            if known {
                continue;
            }
            let fd = self
                .segment
                .map
                .u32(at + announce::FD)
                .load(Ordering::Relaxed);
            match self.open_ring(slot, cookie, fd.cast_signed()) {
                Ok(attached) => {
                    let mut ring = self.incoming.line(slot).ring.lock();
                    if let Some(old) = ring.as_mut() {
                        // What an ended process of that slot had sent was sent.
                        self.drain(old, usize::MAX);
                    }
                    *ring = Some(attached);
                }
                // Not the sender's fault: again at the next progress.
                Err(Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => complete = false,
                // A sender that died before, or lies, has no ring.
                Err(_) => {
                    let _ = self
                        .segment
                        .map
                        .u64(at + announce::COOKIE)
                        .compare_exchange(cookie, 0, Ordering::Relaxed, Ordering::Relaxed);
                }
            }
        }
        if complete {
            self.incoming.seen.store(announced, Ordering::Relaxed);
        }
    }

    fn open_ring(&self, slot: u32, cookie: u64, fd: RawFd) -> Res<Attached> {
        let peer = self.peer(slot)?;
        if peer.identity.cookie != cookie {
            return Err(Errno(libc::ESTALE));
        }
        let file = sys::open_fd_of(peer.identity.pid, fd, libc::O_RDWR)?;
        if sys::sealed_size(&file)? != RING_SIZE {
            return Err(Errno(libc::EPROTO));
        }
        let consumer =
            Consumer::new(Mapping::new(&file, RING_SIZE)?, cookie).ok_or(Errno(libc::EPROTO))?;
        Ok(Attached { consumer, peer })
    }

    /// Takes everything that an ended process had sent, and lets its ring go.
    pub(super) fn close_ring_of(&self, peer: &Arc<Peer>) {
        for line in self.incoming.lines().filter(|line| line.slot == peer.slot) {
            let mut ring = line.ring.lock();
            if let Some(attached) = ring.as_mut()
                && Arc::ptr_eq(&attached.peer, peer)
            {
                self.drain(attached, usize::MAX);
                *ring = None;
            }
        }
    }

    /// Whether a message waits to be taken. Waits for who is taking some: that one may leave the
    /// rest.
    pub(super) fn rings_ready(&self) -> bool {
        self.incoming.lines().any(|line| {
            let ring = line.ring.lock();
            ring.as_ref().is_some_and(|a| a.consumer.ready())
        })
    }
}
