//! Receive rings through the table of functions.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::{End, verbs};

/// The page whose first access stops this process until the other one sends a line.
static GATE: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

extern "C" fn open_gate(_: libc::c_int) {
    let mut byte = 0u8;
    // SAFETY: only functions that may be called by a signal handler; the page is mapped.
    unsafe {
        libc::write(1, c"writing\n".as_ptr().cast(), 8);
        while libc::read(0, (&raw mut byte).cast(), 1) == 1 && byte != b'\n' {}
        let page = GATE.load(std::sync::atomic::Ordering::Relaxed) as *mut libc::c_void;
        if libc::mprotect(page, 4096, libc::PROT_READ) != 0 {
            libc::_exit(3);
        }
    }
}

/// The receive ring of a queue pair.
#[derive(Clone, Copy)]
pub struct Ring(pub *mut softdv_ring);

/// A message, copied.
#[derive(Debug, PartialEq, Eq)]
pub struct Received {
    pub words: [u64; 3],
    pub payload: Vec<u8>,
}

impl Ring {
    /// `softdv_ring_create`, or its errno.
    pub fn try_create(end: &End, slots: u32, cookie: u64) -> Result<Self, i32> {
        let attr = softdv_ring_attr {
            slots,
            reserved: 0,
            cookie,
        };
        let create = verbs().softdv_ring_create.expect("the device has it");
        // SAFETY: live queue pair.
        let ring = unsafe { create(end.qp, &raw const attr) };
        if ring.is_null() {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap());
        }
        Ok(Self(ring))
    }

    pub fn create(end: &End, slots: u32) -> Self {
        Self::try_create(end, slots, 0).unwrap()
    }

    /// `softdv_ring_attach`: 0 or its errno, and the limits.
    pub fn attach(self) -> (c_int, softdv_ring_info) {
        let mut info = softdv_ring_info::default();
        // SAFETY: live ring.
        let ret = unsafe { (verbs().softdv_ring_attach.unwrap())(self.0, &raw mut info) };
        (ret, info)
    }

    /// Attaches a ring to a connected one.
    pub fn join(self) -> softdv_ring_info {
        let (ret, info) = self.attach();
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
        info
    }

    #[inline]
    pub fn post(self, words: [u64; 3], payload: &[u8], flags: u32) -> c_int {
        let [w1, w2, w3] = words;
        let (addr, len) = (payload.as_ptr().cast(), payload.len() as u32);
        // SAFETY: live ring; the payload is readable.
        unsafe { (verbs().softdv_ring_post.unwrap())(self.0, w1, w2, w3, addr, len, flags) }
    }

    pub fn post_pieces(self, words: [u64; 3], pieces: &[&[u8]]) -> c_int {
        let iov: Vec<_> = pieces
            .iter()
            .map(|piece| libc::iovec {
                iov_base: piece.as_ptr().cast_mut().cast(),
                iov_len: piece.len(),
            })
            .collect();
        let count = iov.len() as c_int;
        let postv = verbs().softdv_ring_postv.unwrap();
        // SAFETY: live ring; the pieces are readable.
        unsafe { postv(self.0, words.as_ptr(), iov.as_ptr(), count, 0) }
    }

    /// Posts a message with 40 bytes of payload. In the middle of the call it says "writing" and
    /// waits for a line.
    pub fn post_slowly(self, words: [u64; 3]) -> c_int {
        // SAFETY: a new mapping, whose address the handler gets before it is accessed; live ring.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            GATE.store(page as usize, std::sync::atomic::Ordering::Relaxed);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = open_gate as extern "C" fn(libc::c_int) as usize;
            assert_eq!(
                libc::sigaction(libc::SIGSEGV, &raw const action, std::ptr::null_mut()),
                0
            );
            let [w1, w2, w3] = words;
            let ret = (verbs().softdv_ring_post.unwrap())(self.0, w1, w2, w3, page, 40, 0);
            libc::munmap(page, 4096);
            ret
        }
    }

    /// The next message, without consuming it; or the negative errno.
    pub fn peek(self) -> Result<Option<Received>, c_int> {
        let mut message = std::mem::MaybeUninit::<softdv_ring_message>::uninit();
        // SAFETY: live ring; a message's payload is readable until it is consumed.
        unsafe {
            match (verbs().softdv_ring_poll.unwrap())(self.0, message.as_mut_ptr()) {
                0 => Ok(None),
                1 => {
                    let message = message.assume_init();
                    let mut payload = vec![0; message.length as usize];
                    let from = message.payload.cast::<u8>();
                    from.copy_to_nonoverlapping(payload.as_mut_ptr(), payload.len());
                    let words = message.words;
                    Ok(Some(Received { words, payload }))
                }
                error => Err(error),
            }
        }
    }

    #[inline]
    pub fn consume(self) -> c_int {
        // SAFETY: live ring.
        unsafe { (verbs().softdv_ring_consume.unwrap())(self.0) }
    }

    /// `softdv_ring_advance`.
    pub fn advance(self, slots: u32) -> c_int {
        // SAFETY: live ring.
        unsafe { (verbs().softdv_ring_advance.unwrap())(self.0, slots) }
    }

    /// The number of slots from the next message to the end of the ring.
    pub fn left(self) -> u32 {
        // SAFETY: live ring.
        unsafe { (*self.0).left }
    }

    /// Reads messages that lie behind each other in place, at most `max`, and consumes them with
    /// one call, or, if `later`, records that they were taken.
    pub fn take_in_place(self, max: usize, later: bool) -> Vec<Received> {
        use std::sync::atomic::{AtomicU64, Ordering};
        let mut taken = Vec::new();
        // SAFETY: live ring; the slots up to its end are mapped, and written before they are
        // published.
        unsafe {
            let ring = &*self.0;
            let (mut at, mut expected) = (ring.next.cast::<u8>(), ring.expected);
            let mut left = ring.left;
            while taken.len() < max && left != 0 {
                let word = |index: usize| AtomicU64::from_ptr(at.add(8 * index).cast_mut().cast());
                let first = word(0).load(Ordering::Acquire);
                let len = (first >> 32) as usize;
                let (from, slots) = match len {
                    0..=32 => (32, 1),
                    _ => (64, 1 + len.div_ceil(64) as u32),
                };
                if first as u32 != expected || len > ring.longest as usize || slots > left {
                    break;
                }
                let mut payload = vec![0; len];
                at.add(from)
                    .copy_to_nonoverlapping(payload.as_mut_ptr(), len);
                let words = [1, 2, 3].map(|index| word(index).load(Ordering::Relaxed));
                taken.push(Received { words, payload });
                at = at.add(64 * slots as usize);
                expected = expected.wrapping_add(2 * slots);
                left -= slots;
            }
            let read = ring.left - left;
            if read != 0 && later && left != 0 {
                let ring = &mut *self.0;
                (ring.next, ring.expected, ring.left) = (at.cast(), expected, left);
                ring.ahead += read;
            } else if read != 0 {
                assert_eq!(self.advance(read), 0);
            }
        }
        taken
    }

    /// Takes the next message.
    pub fn poll(self) -> Result<Option<Received>, c_int> {
        let message = self.peek()?;
        if message.is_some() {
            assert_eq!(self.consume(), 0);
        }
        Ok(message)
    }

    /// Whether the ring has something to poll, by its words alone.
    pub fn is_ready(self) -> bool {
        // SAFETY: live ring, whose next word is mapped.
        unsafe {
            let ring = &*self.0;
            let next = std::sync::atomic::AtomicU32::from_ptr(ring.next.cast_mut());
            next.load(std::sync::atomic::Ordering::Acquire) == ring.expected
        }
    }

    /// Waits for the next message by polling.
    pub fn wait(self, limit: Duration) -> Received {
        let begin = Instant::now();
        loop {
            if let Some(message) = self.poll().unwrap() {
                return message;
            }
            assert!(begin.elapsed() < limit, "no message");
            std::hint::spin_loop();
        }
    }

    /// Waits for the end of the ring, with progress by polls of the completion queue. Returns the
    /// messages before it, and the result of the last poll.
    pub fn wait_end(self, end: &mut End, limit: Duration) -> (Vec<Received>, c_int) {
        let begin = Instant::now();
        let mut rest = Vec::new();
        loop {
            match self.poll() {
                Ok(Some(message)) => rest.push(message),
                Ok(None) => drop(end.poll()),
                // the sender is in the middle of a message
                Err(error) if error == -libc::EAGAIN => drop(end.poll()),
                Err(error) => return (rest, error),
            }
            assert!(begin.elapsed() < limit, "no end");
        }
    }

    pub fn sent(self) -> u32 {
        let mut position = 0;
        // SAFETY: live ring, writable position.
        let ret = unsafe { (verbs().softdv_ring_sent.unwrap())(self.0, &raw mut position) };
        assert_eq!(ret, 0);
        position
    }

    pub fn delivered(self) -> u32 {
        let mut position = 0;
        // SAFETY: live ring, writable position.
        let ret = unsafe { (verbs().softdv_ring_delivered.unwrap())(self.0, &raw mut position) };
        assert_eq!(ret, 0);
        position
    }

    /// Asks to be rung at the next consume.
    pub fn await_consume(self) -> c_int {
        // SAFETY: live ring.
        unsafe { (verbs().softdv_ring_await.unwrap())(self.0) }
    }

    /// Offers a larger ring: 0 or an errno.
    pub fn grow(self, slots: u32) -> c_int {
        // SAFETY: live ring.
        unsafe { (verbs().softdv_ring_grow.unwrap())(self.0, slots) }
    }

    pub fn set_hot(self, hot: bool) -> bool {
        // SAFETY: live ring.
        let ret = unsafe { (verbs().softdv_ring_set_hot.unwrap())(self.0, hot.into()) };
        assert!((0..=1).contains(&ret));
        ret == 1
    }
}

impl End {
    /// The cookies of cold rings with messages, at most `count`.
    pub fn arrivals(&self, count: usize) -> Vec<u64> {
        let mut cookies = vec![0; count];
        let arrivals = verbs().softdv_ring_arrivals.unwrap();
        // SAFETY: live queue, room for the cookies.
        let found = unsafe { arrivals(self.cq, cookies.as_mut_ptr(), count as c_int) };
        cookies.truncate(usize::try_from(found).unwrap());
        cookies
    }

    /// Arms the completion queue for ring messages.
    pub fn arm(&self, solicited: bool) {
        // SAFETY: live queue.
        assert_eq!(unsafe { ibv_req_notify_cq(self.cq, solicited.into()) }, 0);
    }

    /// Whether the channel becomes readable within this time; then takes the event, if there is
    /// one.
    pub fn sleep_on_channel(&self, limit: Duration) -> bool {
        // SAFETY: live objects.
        unsafe {
            let fd = (*self.channel).fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            let mut poll = libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            if libc::poll(&raw mut poll, 1, limit.as_millis() as c_int) == 0 {
                return false;
            }
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            if (verbs().ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context) == 0 {
                (verbs().ibv_ack_cq_events)(cq, 1);
            }
            true
        }
    }
}
