//! Receive rings of queue pairs: messages without receives and completions (`softdv_ring_*`,
//! `docs/softverbs-ring.md`), which only softverbs has.
//!
//! Use by the owner of a connection, which serializes all calls on a [`Ring`]:
//!
//! 1. Queue pair created, before the request or its acceptance: [`Ring::create`].
//! 2. Connection established: [`Ring::attach`]; [`Attached::Absent`] on both sides or on none.
//! 3. Send: [`Ring::post`]; after [`Posted::Full`] the caller posts again after a poll or wake-up.
//! 4. Progress: [`Ring::is_ready`], then [`RingProbe::run`] and [`Ring::give_back`], or
//!    [`Ring::poll`] and [`Ring::consume`], of each hot ring; [`Cq::ring_arrivals`] for the cold
//!    ones; a poll of the completion queue.
//! 5. Before sleeping: [`Cq::req_notify`](super::Cq::req_notify) of the receive queue, one more
//!    round of progress, [`Ring::await_consume`] for each ring with waiting sends, and one more
//!    post; then the channel's descriptor.
//! 6. Link end (event of the queue pair, disconnect, [`Posted::Ended`]): [`Qp::set_error`], then
//!    [`Ring::poll`] until [`Polled::Ended`].
//!
//! Duties of the caller (`docs/softverbs-ring.md`, "Duties of the caller"):
//!
//! - The steps before sleeping are done in this order before *each* sleep, also after a call of
//!   [`Cq::drain_channel`](super::Cq::drain_channel), which may take the request of
//!   [`Cq::arm`](super::Cq::arm). A wake-up that an earlier step could have missed is found by the
//!   last post.
//! - The calls on rings make no progress of the device. Only polls of a completion queue, arming
//!   and the channel's descriptor detect the end of a peer.
//! - Before each sleep the room of all messages that were taken is given back.
//! - A cookie from [`Cq::ring_arrivals`], and true from [`Ring::set_hot`], are returned once: the
//!   caller polls that ring until it is empty, in this or a later call of its own.
//! - The end of a ring makes no completion. The thread that gets the event of the queue pair wakes
//!   the others.

#![allow(unsafe_code, reason = "calls verbs")]

mod run;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rdma_core_sys as sys;

use super::{Cq, Qp};
use crate::errno::{FiErrno, Result};

pub use run::{Next, Run};

type PostCall = unsafe extern "C" fn(
    *mut sys::softdv_ring,
    u64,
    u64,
    u64,
    *const std::ffi::c_void,
    u32,
    u32,
) -> c_int;
type PostvCall = unsafe extern "C" fn(
    *mut sys::softdv_ring,
    *const u64,
    *const libc::iovec,
    c_int,
    u32,
) -> c_int;
type PollCall = unsafe extern "C" fn(*mut sys::softdv_ring, *mut sys::softdv_ring_message) -> c_int;
type AdvanceCall = unsafe extern "C" fn(*mut sys::softdv_ring, u32) -> c_int;
type RingCall = unsafe extern "C" fn(*mut sys::softdv_ring) -> c_int;
type PositionCall = unsafe extern "C" fn(*mut sys::softdv_ring, *mut u32) -> c_int;

/// Results of the device's poll besides 0 and 1.
const ENDED: c_int = -libc::ENOTCONN;
const ENDING: c_int = -libc::EAGAIN;
const BROKEN: c_int = -libc::EPROTO;

/// The device's functions, all or none of which it has.
#[derive(Clone, Copy, Debug)]
struct Calls {
    post: PostCall,
    postv: PostvCall,
    poll: PollCall,
    consume: RingCall,
    advance: AdvanceCall,
    sent: PositionCall,
    delivered: PositionCall,
    await_consume: RingCall,
    set_hot: unsafe extern "C" fn(*mut sys::softdv_ring, c_int) -> c_int,
    grow: unsafe extern "C" fn(*mut sys::softdv_ring, u32) -> c_int,
    attach: unsafe extern "C" fn(*mut sys::softdv_ring, *mut sys::softdv_ring_info) -> c_int,
}

impl Calls {
    fn of(verbs: &sys::VerbsFns) -> Option<Self> {
        Some(Self {
            post: verbs.softdv_ring_post?,
            postv: verbs.softdv_ring_postv?,
            poll: verbs.softdv_ring_poll?,
            consume: verbs.softdv_ring_consume?,
            advance: verbs.softdv_ring_advance?,
            sent: verbs.softdv_ring_sent?,
            delivered: verbs.softdv_ring_delivered?,
            await_consume: verbs.softdv_ring_await?,
            set_hot: verbs.softdv_ring_set_hot?,
            grow: verbs.softdv_ring_grow?,
            attach: verbs.softdv_ring_attach?,
        })
    }
}

/// The receive ring of a queue pair, and the way into the ring of the connected one.
///
/// May move between threads, but the calls on one ring are serialized. The queue pair must not be
/// moved to RESET by other means.
#[derive(Debug)]
pub struct Ring {
    raw: NonNull<sys::softdv_ring>,
    calls: Calls,
    /// The word of the device that has the address of the next slot; `None` before the connection.
    next_slot: Option<NonNull<*mut u8>>,
    /// The ring is freed with its queue pair.
    qp: Arc<Qp>,
}

// SAFETY: rings may be used by any thread (docs/softverbs-ring.md, "Interface"); the methods that
// exclude each other take `&mut self`.
unsafe impl Send for Ring {}
// SAFETY: the methods with `&self` read the address of the ring and its queue pair, which do not
// change; fields that only methods with `&mut self` change; and the word of the next message, which
// the peer changes and which is accessed by atomics alone.
unsafe impl Sync for Ring {}

/// The address of a ring, to examine it and read it in place.
#[derive(Clone, Copy, Debug)]
pub struct RingProbe(NonNull<sys::softdv_ring>);

// SAFETY: as for [`Ring`]: its methods name the calls that they exclude.
unsafe impl Send for RingProbe {}
// SAFETY: as above.
unsafe impl Sync for RingProbe {}

impl RingProbe {
    /// As [`Ring::is_ready`].
    ///
    /// # Safety
    /// The [`Ring`] lives, no method with `&mut` of it runs meanwhile, and this is not a forked
    /// child of the process that created the ring.
    #[inline(always)]
    pub unsafe fn is_ready(self) -> bool {
        // SAFETY: live, by the caller's promise; its fields do not change meanwhile. The next word
        // is mapped in this process as long as the ring lives, and accessed by atomics only.
        unsafe {
            let ring = self.0.as_ref();
            AtomicU32::from_ptr(ring.next.cast_mut()).load(Ordering::Acquire) == ring.expected
        }
    }
}

/// The slot in which the next message of a ring will be written, if no other message is before it.
#[derive(Clone, Copy, Debug, Default)]
pub struct NextSlot(usize);

impl NextSlot {
    /// Has the processor request the line of the slot, which it will write: the receiver has read
    /// it last. For a message of at most [`Self::LONGEST`] bytes, right before its post: the header
    /// of a longer one is written behind its payload, and the receiver, which polls it, would have
    /// taken the line back by then. A hint, which has no other effect wherever the slot is, or was.
    #[inline(always)]
    pub fn acquire(self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `prefetchw` accesses no memory that the program can observe and never faults,
        // whatever the address is; processors without it execute it as a NOP.
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) self.0,
                options(nostack, preserves_flags, readonly)
            );
        }
    }

    /// Longest payload of a message of one slot, in bytes.
    pub const LONGEST: usize = run::SLOT - run::HEADER;
}

/// Result of [`Ring::attach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// Both queue pairs have a ring.
    Ready(RingLimits),
    /// The other queue pair has no ring. It gets the same result, and both send by
    /// [`Qp::post_send`].
    Absent,
    /// The queue pairs are not connected yet. If the other queue pair has been reset or destroyed
    /// since, the result stays the same: the connection manager reports that end.
    NotYet,
}

/// Limits of the messages of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    /// Longest payload that can be sent, in bytes, until the receiver's ring [grows](Ring::grow).
    pub max_send: usize,
    /// Longest payload that can arrive, in bytes.
    pub max_recv: usize,
}

/// Result of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Posted {
    /// The message is delivered, even if this process ends, unless the receiver's process ends or
    /// resets its queue pair. The payload may be reused.
    Sent,
    /// There is no room. Nothing was sent.
    Full,
    /// The queue pair is not connected, or the connection has ended. If it ended during the call,
    /// the message may have arrived.
    Ended,
    /// The payload is longer than [`RingLimits::max_send`].
    TooLong,
}

/// Result of a poll.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub enum Polled {
    /// The next message.
    Message(Message),
    /// No message.
    Empty,
    /// No message, but the queue pair is in its error state and the sender in the middle of a
    /// message. The channel of the receive queue becomes readable when the sender has finished or
    /// ended, if the queue was armed before this poll. If the sender is stopped, a poll 5 s after
    /// the first one returns [`Self::Ended`], without a wake-up.
    Ending,
    /// No message, and none will arrive.
    Ended,
    /// The sender has written an invalid header: the queue pair is in its error state, and the ring
    /// must not be polled for further messages.
    Broken,
}

/// A message in a ring. It stays the next message, and its payload stays where it is, until
/// [`Ring::consume`]. It does not borrow the ring, so that the caller can send while it reads.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    raw: sys::softdv_ring_message,
}

impl Ring {
    /// Gives a reliable connection that is not connected yet a ring of `slots` slots of 64 bytes, a
    /// power of two from 64 to 4,096. The longest payload is 32 `slots` - 64 bytes. `cookie`
    /// identifies the ring in [`Cq::ring_arrivals`]. `None`: the device has no rings.
    ///
    /// # Errors
    /// `EINVAL`: the state of the queue pair, or `slots`. `EEXIST`: the queue pair has a ring.
    /// `ENOMEM`.
    pub fn create(qp: &Arc<Qp>, slots: u32, cookie: u64) -> Result<Option<Self>> {
        let verbs = &qp.pd().device().backend().verbs;
        let (Some(create), Some(calls)) = (verbs.softdv_ring_create, Calls::of(verbs)) else {
            return Ok(None);
        };
        let attr = sys::softdv_ring_attr {
            slots,
            reserved: 0,
            cookie,
        };
        // SAFETY: the queue pair is live and of this backend.
        let raw = unsafe { create(qp.raw, &raw const attr) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Some(Self {
                raw,
                calls,
                next_slot: None,
                qp: Arc::clone(qp),
            })),
            None => match FiErrno::last() {
                FiErrno::EOPNOTSUPP => Ok(None),
                error => Err(error),
            },
        }
    }

    /// The slot of the next message.
    #[inline(always)]
    pub fn next_slot(&self) -> NextSlot {
        let word = self.next_slot.map_or(0, |word| {
            // SAFETY: the device keeps the word as long as the ring, and changes it by atomics.
            let word = unsafe { AtomicPtr::from_ptr(word.as_ptr()) };
            word.load(Ordering::Relaxed).addr()
        });
        NextSlot(word)
    }

    /// The queue pair.
    pub fn qp(&self) -> &Arc<Qp> {
        &self.qp
    }

    /// Finds the ring of the connected queue pair. Called when the connection is established.
    ///
    /// # Errors
    /// `ENOTCONN`: the connection has ended. `ENOMEM`.
    pub fn attach(&mut self) -> Result<Attached> {
        let mut info = sys::softdv_ring_info::default();
        // SAFETY: live; `&mut self` excludes other calls.
        let ret = unsafe { (self.calls.attach)(self.raw.as_ptr(), &raw mut info) };
        match FiErrno::from_verb(ret) {
            Ok(()) => {
                self.next_slot = NonNull::new(info.slot.cast_mut().cast());
                Ok(Attached::Ready(RingLimits {
                    max_send: info.max_send as usize,
                    max_recv: info.max_recv as usize,
                }))
            }
            Err(FiErrno::EOPNOTSUPP) => Ok(Attached::Absent),
            Err(FiErrno::EAGAIN) => Ok(Attached::NotYet),
            Err(error) => Err(error),
        }
    }

    /// Sends a message with `len` bytes of payload at `addr`, at most [`RingLimits::max_send`].
    /// `solicited` wakes a queue that is armed for solicited events. Neither blocks nor allocates;
    /// a system call wakes a sleeping receiver.
    ///
    /// # Errors
    /// `EBUSY`: the queue pair is in SQD. `EIO`: in a forked child.
    ///
    /// # Safety
    /// `addr` must be readable for `len` bytes.
    #[inline(always)]
    pub unsafe fn post(
        &mut self,
        words: [u64; 3],
        addr: *const u8,
        len: usize,
        solicited: bool,
    ) -> Result<Posted> {
        let (ring, [w1, w2, w3]) = (self.raw.as_ptr(), words);
        let flags = if solicited {
            sys::SOFTDV_RING_SOLICITED
        } else {
            0
        };
        // SAFETY: live; the caller promises the payload. A length above 32 bits exceeds every
        // limit.
        let ret = unsafe {
            let len = u32::try_from(len).unwrap_or(u32::MAX);
            (self.calls.post)(ring, w1, w2, w3, addr.cast(), len, flags)
        };
        posted(ret)
    }

    /// As [`Self::post`], with the payload in several pieces.
    ///
    /// # Errors
    /// As [`Self::post`].
    ///
    /// # Safety
    /// Each piece must be readable.
    #[inline]
    pub unsafe fn post_pieces(
        &mut self,
        words: [u64; 3],
        pieces: &[libc::iovec],
        solicited: bool,
    ) -> Result<Posted> {
        let flags = if solicited {
            sys::SOFTDV_RING_SOLICITED
        } else {
            0
        };
        let count = c_int::try_from(pieces.len()).unwrap_or(-1);
        // SAFETY: live; the caller promises the pieces.
        let ret = unsafe {
            (self.calls.postv)(
                self.raw.as_ptr(),
                words.as_ptr(),
                pieces.as_ptr(),
                count,
                flags,
            )
        };
        posted(ret)
    }

    /// Position behind the last message sent, in slots, wrapping.
    ///
    /// # Errors
    /// `EIO`: in a forked child.
    #[inline]
    pub fn sent(&mut self) -> Result<u32> {
        self.position(self.calls.sent)
    }

    /// Reads the position behind the last message that the receiver has consumed. A message is
    /// consumed if `delivered - position` is not negative as a signed number, where `position` is
    /// [`Self::sent`] after its post. After the end of the connection the position stays:
    /// [`Self::await_consume`] reports the end.
    ///
    /// # Errors
    /// `EIO`: in a forked child.
    #[inline]
    pub fn delivered(&mut self) -> Result<u32> {
        self.position(self.calls.delivered)
    }

    #[inline]
    fn position(&mut self, call: PositionCall) -> Result<u32> {
        let mut position = 0;
        // SAFETY: live; `position` is writable.
        FiErrno::from_verb(unsafe { call(self.raw.as_ptr(), &raw mut position) })?;
        Ok(position)
    }

    /// Asks for a wake-up at the next consume, or at the end of the connection: the channel of the
    /// receive queue becomes readable, if that queue was armed before this call. The caller then
    /// posts, or compares positions, once more before it sleeps. A system call.
    ///
    /// # Errors
    /// `ENOTCONN`: the connection has ended. `EIO`: in a forked child.
    pub fn await_consume(&mut self) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_verb(unsafe { (self.calls.await_consume)(self.raw.as_ptr()) })
    }

    /// Whether the ring has something to poll: a hint, which a hostile neighbour can make false or
    /// true. The end of a ring does not count.
    ///
    /// # Safety
    /// Not in a forked child of the process that created the ring: the ring is not mapped there.
    #[inline(always)]
    pub unsafe fn is_ready(&self) -> bool {
        // SAFETY: live, and `&self` excludes methods with `&mut self`; the caller's promise.
        unsafe { self.probe().is_ready() }
    }

    /// A copy of the ring's address, for a list of rings to examine.
    #[inline(always)]
    pub fn probe(&self) -> RingProbe {
        RingProbe(self.raw)
    }

    /// The next message.
    ///
    /// # Errors
    /// `EIO`: in a forked child.
    #[inline]
    pub fn poll(&mut self) -> Result<Polled> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: live; `raw` is writable.
        let polled = unsafe { (self.calls.poll)(self.raw.as_ptr(), raw.as_mut_ptr()) };
        Ok(match polled {
            1 => Polled::Message(Message {
                // SAFETY: written by the call.
                raw: unsafe { raw.assume_init() },
            }),
            0 => Polled::Empty,
            ENDED => Polled::Ended,
            ENDING => Polled::Ending,
            BROKEN => Polled::Broken,
            error => return Err(FiErrno::new(-error)),
        })
    }

    /// Gives the room of the message that the last poll returned back to the sender. A system call
    /// wakes a sender that waits.
    ///
    /// # Errors
    /// `EINVAL`: the last poll returned no message, or it is consumed. `EIO`: in a forked child.
    #[inline]
    pub fn consume(&mut self) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_verb(unsafe { (self.calls.consume)(self.raw.as_ptr()) })
    }

    /// Consumes messages of so many slots, which a [`Run`] has taken and not recorded, and those
    /// that it has recorded ([`Run::leave`]): gives their room back to the sender. A system call
    /// wakes a sender that waits.
    ///
    /// # Errors
    /// `EINVAL`: there are none. `EIO`: in a forked child.
    #[inline]
    pub fn give_back(&mut self, slots: u32) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_verb(unsafe { (self.calls.advance)(self.raw.as_ptr(), slots) })
    }

    /// Offers the sender a larger ring of `slots` slots, to which it moves when it has no room for
    /// a message. Once per ring; the memory is kept until the queue pair is destroyed. Messages
    /// arrive as before.
    ///
    /// # Errors
    /// `EALREADY`: a larger ring was offered before. `EINVAL`: not a power of two up to 4,096 that
    /// is larger. `ENOTCONN`: the queue pair does not receive. `ENOMEM`. `EIO`: in a forked child.
    pub fn grow(&mut self, slots: u32) -> Result<()> {
        // SAFETY: live.
        FiErrno::from_verb(unsafe { (self.calls.grow)(self.raw.as_ptr(), slots) })
    }

    /// Publishes whether this process examines the ring in each progress call. Messages in a cold
    /// ring, as each ring is at first, are noted for [`Cq::ring_arrivals`]. Returns whether the
    /// ring may hold a message; the caller then polls it until it is empty. Making a ring cold is a
    /// system call.
    ///
    /// # Errors
    /// `EIO`: in a forked child.
    pub fn set_hot(&mut self, hot: bool) -> Result<bool> {
        // SAFETY: live.
        match unsafe { (self.calls.set_hot)(self.raw.as_ptr(), c_int::from(hot)) } {
            0 => Ok(false),
            1 => Ok(true),
            error => Err(FiErrno::new(-error)),
        }
    }
}

#[inline(always)]
fn posted(ret: c_int) -> Result<Posted> {
    match ret {
        0 => Ok(Posted::Sent),
        libc::EAGAIN => Ok(Posted::Full),
        libc::EMSGSIZE => Ok(Posted::TooLong),
        libc::ENOTCONN => Ok(Posted::Ended),
        error => Err(FiErrno::new(error)),
    }
}

impl Message {
    /// The sender's words.
    #[inline]
    pub fn words(&self) -> [u64; 3] {
        self.raw.words
    }

    /// Bytes of the payload.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a message is not a collection")]
    pub fn len(&self) -> usize {
        self.raw.length as usize
    }

    /// The first byte of the payload. A hostile sender may change the bytes at any time.
    #[inline]
    pub fn payload(&self) -> *const u8 {
        self.raw.payload.cast()
    }

    /// Copies at most `len` bytes of the payload, from `offset` on. Returns the number of bytes
    /// copied. A hostile sender may change the payload at any time, so its content is checked in
    /// the copy.
    ///
    /// # Safety
    /// The message must not be consumed, and its [`Ring`] must live. `to` must be writable for
    /// `len` bytes and not lie in the ring. Not in a forked child.
    #[inline]
    pub unsafe fn copy_to(&self, offset: usize, to: *mut u8, len: usize) -> usize {
        let offset = offset.min(self.len());
        let len = len.min(self.len() - offset);
        // SAFETY: the ring holds the payload until it is consumed; the caller promises the
        // destination.
        unsafe {
            let from = self.payload().add(offset);
            from.copy_to_nonoverlapping(to, len);
        }
        len
    }
}

impl Cq {
    /// Writes the cookies of cold rings in which messages have arrived since the last call to
    /// `cookies`, and returns their number; the rest is returned by the next call. The rings are
    /// those of queue pairs that receive through this queue.
    ///
    /// Another thread may destroy a queue pair between this call and the use of its cookie, so a
    /// cookie is a key of a table, not a pointer. Neighbours can note arrivals as fast as they are
    /// returned, so a progress call makes a bounded number of these calls.
    ///
    /// # Errors
    /// `EIO`: in a forked child.
    #[inline]
    pub fn ring_arrivals(&self, cookies: &mut [u64]) -> Result<usize> {
        let Some(arrivals) = self.device().backend().verbs.softdv_ring_arrivals else {
            return Ok(0);
        };
        let room = c_int::try_from(cookies.len()).unwrap_or(c_int::MAX);
        // SAFETY: live and of this backend; the array is writable.
        let found = unsafe { arrivals(self.raw(), cookies.as_mut_ptr(), room) };
        usize::try_from(found).map_err(|_| FiErrno::new(-found))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::time::{Duration, Instant};

    use super::super::{
        CmEventKind, CmId, ConnParam, EventChannel, Pd, QpConfig, Transport, devices,
    };
    use super::*;

    /// A queue pair of an identifier, with a ring or without.
    fn queue_pair(id: &Arc<CmId>, pd: &Arc<Pd>, cq: &Arc<Cq>) -> Arc<Qp> {
        let transport = Transport::Rc {
            send_cq: cq,
            recv_cq: cq,
            srq: None,
        };
        Arc::new(Qp::create(id, pd, transport, &QpConfig::SMALL).unwrap())
    }

    struct End {
        _id: Arc<CmId>,
        qp: Arc<Qp>,
        ring: Option<Ring>,
        cq: Arc<Cq>,
    }

    /// Two connected ends of this process.
    fn connect(rings: [bool; 2]) -> [End; 2] {
        let backend = softverbs::backend();
        let device = devices(&[backend], false).remove(0);
        let channel = EventChannel::create(backend).unwrap();
        let pd = Arc::new(Pd::alloc(&device).unwrap());
        let next = || {
            let begin = Instant::now();
            loop {
                match channel.next_event() {
                    Ok(event) => return event,
                    Err(error) => assert_eq!(error, FiErrno::EAGAIN),
                }
                assert!(begin.elapsed() < Duration::from_secs(20), "no event");
                std::thread::yield_now();
            }
        };
        let listener = Arc::new(channel.create_id().unwrap());
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        listener.bind_addr(any).unwrap();
        listener.listen(4).unwrap();
        let dialler = Arc::new(channel.create_id().unwrap());
        dialler
            .resolve_addr(None, listener.local_addr().unwrap())
            .unwrap();
        assert_eq!(next().kind, CmEventKind::AddrResolved);
        let end = |id: &Arc<CmId>, has_ring: bool, cookie| {
            let cq = Arc::new(Cq::create(&device, 16, None, 0).unwrap());
            let qp = queue_pair(id, &pd, &cq);
            let ring = has_ring.then(|| Ring::create(&qp, 64, cookie).unwrap().unwrap());
            End {
                _id: Arc::clone(id),
                qp,
                ring,
                cq,
            }
        };
        dialler.resolve_route().unwrap();
        let first = end(&dialler, rings[0], 1);
        assert_eq!(next().kind, CmEventKind::RouteResolved);
        let param = ConnParam {
            private_data: &[],
            retry_count: 7,
            rnr_retry_count: 7,
        };
        dialler.connect(&param).unwrap();
        let request = next();
        assert_eq!(request.kind, CmEventKind::ConnectRequest);
        let id = Arc::new(request.new_id.unwrap());
        let second = end(&id, rings[1], 2);
        id.accept(&param).unwrap();
        for _ in 0..2 {
            assert_eq!(next().kind, CmEventKind::Established);
        }
        [first, second]
    }

    fn attach(end: &mut End) -> Attached {
        end.ring.as_mut().unwrap().attach().unwrap()
    }

    fn is_ready(ring: &Ring) -> bool {
        // SAFETY: not in a forked child.
        unsafe { ring.is_ready() }
    }

    /// Sends a message, whose receiver has this cookie, and an answer.
    fn exchange(from: &mut End, to: &mut End, cookie: u64) {
        let payload: Vec<u8> = (0..100).collect();
        let sender = from.ring.as_mut().unwrap();
        // SAFETY: the payload is readable.
        let sent = unsafe { sender.post([1, 2, 3], payload.as_ptr(), payload.len(), false) };
        assert_eq!(sent, Ok(Posted::Sent));
        let position = sender.sent();
        assert_ne!(sender.delivered(), position);
        let mut cookies = [0; 4];
        assert_eq!(to.cq.ring_arrivals(&mut cookies), Ok(1));
        assert_eq!(cookies[0], cookie);
        let receiver = to.ring.as_mut().unwrap();
        assert!(is_ready(receiver));
        let Ok(Polled::Message(message)) = receiver.poll() else {
            panic!("no message");
        };
        // a message does not prevent the receiver from sending
        // SAFETY: no payload.
        let sent = unsafe { receiver.post([7; 3], std::ptr::null(), 0, false) };
        assert_eq!(sent, Ok(Posted::Sent));
        assert_eq!((message.words(), message.len()), ([1, 2, 3], 100));
        let mut got = [0; 60];
        // SAFETY: the array has that room.
        assert_eq!(unsafe { message.copy_to(50, got.as_mut_ptr(), 60) }, 50);
        assert_eq!(got[..50], payload[50..]);
        receiver.consume().unwrap();
        assert_eq!(receiver.consume(), Err(FiErrno::EINVAL));
        assert!(!is_ready(receiver));
        assert!(matches!(receiver.poll(), Ok(Polled::Empty)));
        let sender = from.ring.as_mut().unwrap();
        assert_eq!(sender.delivered(), position);
        let answer = sender.poll();
        assert!(matches!(answer, Ok(Polled::Message(message)) if message.words() == [7; 3]));
        sender.consume().unwrap();
        let mut cookies = [0; 4];
        assert_eq!(from.cq.ring_arrivals(&mut cookies), Ok(1));
    }

    #[test]
    fn messages_of_both_directions_and_the_end() {
        let [mut a, mut b] = connect([true, true]);
        for end in [&mut a, &mut b] {
            let limits = RingLimits {
                max_send: 1984,
                max_recv: 1984,
            };
            assert_eq!(attach(end), Attached::Ready(limits));
        }
        exchange(&mut a, &mut b, 2);
        exchange(&mut b, &mut a, 1);
        let sender = a.ring.as_mut().unwrap();
        // SAFETY: no payload.
        let sent = unsafe { sender.post([4; 3], std::ptr::null(), 0, false) };
        assert_eq!(sent, Ok(Posted::Sent));
        b.qp.set_error().unwrap();
        // SAFETY: no payload.
        let sent = unsafe { sender.post([5; 3], std::ptr::null(), 0, false) };
        assert_eq!(sent, Ok(Posted::Ended));
        let receiver = b.ring.as_mut().unwrap();
        let Ok(Polled::Message(_)) = receiver.poll() else {
            panic!("the message before the end is lost");
        };
        receiver.consume().unwrap();
        assert!(matches!(receiver.poll(), Ok(Polled::Ended)));
        assert!(!is_ready(receiver));
        let sender = a.ring.as_mut().unwrap();
        assert_eq!(sender.await_consume(), Err(FiErrno::new(libc::ENOTCONN)));
    }

    #[test]
    fn a_ring_on_one_side_is_not_used() {
        let [mut a, b] = connect([true, false]);
        assert_eq!(attach(&mut a), Attached::Absent);
        drop(b);
    }
}
