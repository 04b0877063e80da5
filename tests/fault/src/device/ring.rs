//! Receive rings of queue pairs (`docs/softverbs-ring.md`).

use std::ffi::c_int;
use std::mem::MaybeUninit;

use rdma_core_sys::*;

use super::{Pair, Queue, check, last_error, verbs};

/// A receive ring, and the sends through the ring of the other end. Destroyed with its queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Ring(*mut softdv_ring);

/// A message that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) words: [u64; 3],
    pub(crate) payload: Vec<u8>,
}

impl Pair {
    /// Gives the queue pair a receive ring.
    pub(crate) fn ring(&self, slots: u32, cookie: u64) -> Ring {
        let attr = softdv_ring_attr {
            slots,
            reserved: 0,
            cookie,
        };
        let create = verbs().softdv_ring_create.expect("a device with rings");
        // SAFETY: live queue pair, valid attributes.
        let ring = unsafe { create(self.qp, &raw const attr) };
        assert!(!ring.is_null(), "{}", last_error());
        Ring(ring)
    }

    /// Moves the queue pair to RESET.
    pub(crate) fn reset(&self) {
        self.modify(&mut Self::attributes(IBV_QPS_RESET), IBV_QP_STATE);
    }
}

impl Queue {
    /// `ibv_req_notify_cq` for solicited events.
    pub(crate) fn arm_solicited(&self) {
        // SAFETY: live queue.
        assert_eq!(unsafe { ibv_req_notify_cq(self.cq, 1) }, 0);
    }

    /// The cookies of cold rings in which messages have arrived, at most 16.
    pub(crate) fn arrivals(&self) -> Vec<u64> {
        let mut cookies = vec![0; 16];
        let arrivals = verbs().softdv_ring_arrivals.expect("a device with rings");
        // SAFETY: live queue, room for the cookies.
        let found = unsafe { arrivals(self.cq, cookies.as_mut_ptr(), 16) };
        cookies.truncate(usize::try_from(found).expect("arrivals"));
        cookies
    }
}

impl Ring {
    /// Address of the next slot in the process's own mapping.
    pub(crate) fn next(self) -> usize {
        // SAFETY: live ring.
        unsafe { (*self.0).next as usize }
    }

    pub(crate) fn attach(self) {
        let mut info = softdv_ring_info::default();
        let attach = verbs().softdv_ring_attach.expect("a device with rings");
        // SAFETY: live ring, writable properties.
        check(unsafe { attach(self.0, &raw mut info) }).expect("softdv_ring_attach");
    }

    /// Sends a message; 0 or an errno.
    pub(crate) fn post(self, words: [u64; 3], payload: &[u8], flags: u32) -> c_int {
        let [w1, w2, w3] = words;
        let (addr, len) = (payload.as_ptr().cast(), payload.len() as u32);
        let post = verbs().softdv_ring_post.expect("a device with rings");
        // SAFETY: live ring; the payload is readable.
        unsafe { post(self.0, w1, w2, w3, addr, len, flags) }
    }

    /// Sends a message with a payload of three pieces; 0 or an errno.
    pub(crate) fn post_pieces(self, words: [u64; 3], payload: &[u8]) -> c_int {
        let third = payload.len() / 3;
        let iov: Vec<_> = [
            &payload[..third],
            &payload[third..2 * third],
            &payload[2 * third..],
        ]
        .map(|piece| libc::iovec {
            iov_base: piece.as_ptr().cast_mut().cast(),
            iov_len: piece.len(),
        })
        .into();
        let postv = verbs().softdv_ring_postv.expect("a device with rings");
        // SAFETY: live ring; the pieces are readable.
        unsafe { postv(self.0, words.as_ptr(), iov.as_ptr(), 3, 0) }
    }

    /// The next message, without consuming it; or the negative errno.
    pub(crate) fn peek(self) -> Result<Option<Received>, c_int> {
        let mut message = MaybeUninit::<softdv_ring_message>::uninit();
        let poll = verbs().softdv_ring_poll.expect("a device with rings");
        // SAFETY: live ring; the payload of a message is readable until it is consumed.
        unsafe {
            match poll(self.0, message.as_mut_ptr()) {
                0 => Ok(None),
                1 => {
                    let message = message.assume_init();
                    let mut payload = vec![0; message.length as usize];
                    let from = message.payload.cast::<u8>();
                    from.copy_to_nonoverlapping(payload.as_mut_ptr(), payload.len());
                    Ok(Some(Received {
                        words: message.words,
                        payload,
                    }))
                }
                error => Err(error),
            }
        }
    }

    pub(crate) fn consume(self) -> c_int {
        let consume = verbs().softdv_ring_consume.expect("a device with rings");
        // SAFETY: live ring.
        unsafe { consume(self.0) }
    }

    /// Takes the next message; or the negative errno.
    pub(crate) fn poll(self) -> Result<Option<Received>, c_int> {
        let message = self.peek()?;
        if message.is_some() {
            assert_eq!(self.consume(), 0, "softdv_ring_consume");
        }
        Ok(message)
    }

    /// Asks for a wake-up at the next consume; 0 or an errno.
    pub(crate) fn await_consume(self) -> c_int {
        let wait = verbs().softdv_ring_await.expect("a device with rings");
        // SAFETY: live ring.
        unsafe { wait(self.0) }
    }

    /// Positions behind the last message sent, and behind the last one that was consumed.
    pub(crate) fn positions(self) -> (u32, u32) {
        let (mut sent, mut delivered) = (0, 0);
        let fns = verbs();
        // SAFETY: live ring, writable positions.
        unsafe {
            let of = fns.softdv_ring_sent.expect("a device with rings");
            check(of(self.0, &raw mut sent)).expect("softdv_ring_sent");
            let of = fns.softdv_ring_delivered.expect("a device with rings");
            check(of(self.0, &raw mut delivered)).expect("softdv_ring_delivered");
        }
        (sent, delivered)
    }

    /// Offers a larger ring; 0 or an errno.
    pub(crate) fn grow(self, slots: u32) -> c_int {
        let grow = verbs().softdv_ring_grow.expect("a device with rings");
        // SAFETY: live ring.
        unsafe { grow(self.0, slots) }
    }

    /// Makes the ring hot or cold; whether it is not empty.
    pub(crate) fn set_hot(self, hot: bool) -> bool {
        let set_hot = verbs().softdv_ring_set_hot.expect("a device with rings");
        // SAFETY: live ring.
        let ret = unsafe { set_hot(self.0, hot.into()) };
        assert!(ret >= 0, "softdv_ring_set_hot: {ret}");
        ret == 1
    }
}
