//! Receive rings of queue pairs: direct verbs (`docs/softverbs-ring.md`).

use std::ffi::{c_int, c_void};

use rdma_core_sys::*;

use crate::cq::Cq;
use crate::entry::{errno_of, guard, non_null, pointer, status};
use crate::qp::{OutgoingMessage, OwnRing, Qp};
use crate::receive_ring::Fill;
use crate::sys::{Errno, Res};

/// `softdv_ring_create`.
pub(super) unsafe extern "C" fn create(
    qp: *mut ibv_qp,
    attr: *const softdv_ring_attr,
) -> *mut softdv_ring {
    pointer(|| {
        non_null(qp)?;
        non_null(attr)?;
        // SAFETY: the caller promises a live queue pair, whose memory is never freed, and a valid
        // structure.
        let (qp, attr) = unsafe { (Qp::from_ptr(qp), *attr) };
        qp.process().live()?;
        qp.create_receive_ring(attr.slots, attr.cookie)
            .map(<*mut _>::cast)
    })
}

/// `softdv_ring_attach`.
pub(super) unsafe extern "C" fn attach(
    ring: *mut softdv_ring,
    info: *mut softdv_ring_info,
) -> c_int {
    status(|| {
        non_null(info)?;
        // SAFETY: the caller promises a live ring and excludes other calls on it.
        let found = unsafe { OwnRing::attach(live(ring)?)? };
        // SAFETY: not NULL; the caller has room for it.
        unsafe { info.write(found) };
        Ok(())
    })
}

/// The ring behind a pointer.
///
/// # Errors
/// `EINVAL`: NULL. `EIO`: in a forked child.
///
/// # Safety
/// `ring` must be NULL or live.
#[inline(always)]
unsafe fn live(ring: *mut softdv_ring) -> Res<*mut OwnRing> {
    non_null(ring)?;
    let ring = OwnRing::from_ptr(ring);
    // SAFETY: the caller promises a live ring.
    unsafe { OwnRing::qp(ring) }.process().live()?;
    Ok(ring)
}

/// The payload of a post: bytes of the caller.
#[derive(Clone, Copy)]
struct Bytes {
    from: *const u8,
    len: usize,
}

impl Fill for Bytes {
    #[inline(always)]
    fn fill(self, to: *mut u8) {
        // SAFETY: the ring has room for the payload; the caller of the post promises the bytes.
        unsafe { crate::ring::copy(self.from, to, self.len) }
    }
}

/// `softdv_ring_post`.
pub(super) unsafe extern "C" fn post(
    ring: *mut softdv_ring,
    w1: u64,
    w2: u64,
    w3: u64,
    addr: *const c_void,
    length: u32,
    flags: u32,
) -> c_int {
    errno_of(|| {
        // SAFETY: the caller promises a live ring.
        let ring = match unsafe { live(ring) } {
            Ok(ring) => ring,
            Err(error) => return error.0,
        };
        let len = length as usize;
        let message = OutgoingMessage {
            words: [w1, w2, w3],
            len,
            solicited: flags & SOFTDV_RING_SOLICITED != 0,
            fill: Bytes {
                from: addr.cast(),
                len,
            },
        };
        // SAFETY: the caller serializes the sends of a ring.
        unsafe { OwnRing::post(ring, &message) }
    })
}

/// `softdv_ring_postv`.
pub(super) unsafe extern "C" fn postv(
    ring: *mut softdv_ring,
    words: *const u64,
    iov: *const libc::iovec,
    count: c_int,
    flags: u32,
) -> c_int {
    errno_of(|| {
        // SAFETY: the caller promises a live ring.
        let ring = match unsafe { live(ring) } {
            Ok(ring) => ring,
            Err(error) => return error.0,
        };
        let bad = words.is_null() || count < 0 || iov.is_null() && count > 0;
        if bad {
            return libc::EINVAL;
        }
        let pieces = if count == 0 {
            &[]
        } else {
            // SAFETY: the caller promises `count` pieces.
            unsafe { std::slice::from_raw_parts(iov, count.cast_unsigned() as usize) }
        };
        let len = pieces
            .iter()
            .fold(0, |len: usize, piece| len.saturating_add(piece.iov_len));
        let message = OutgoingMessage {
            // SAFETY: the caller promises three words.
            words: unsafe { words.cast::<[u64; 3]>().read() },
            len,
            solicited: flags & SOFTDV_RING_SOLICITED != 0,
            fill: |mut to: *mut u8| {
                for piece in pieces {
                    // SAFETY: the ring has room for all pieces, which the caller promises to be
                    // readable.
                    unsafe {
                        crate::ring::copy(piece.iov_base.cast(), to, piece.iov_len);
                        to = to.add(piece.iov_len);
                    }
                }
            },
        };
        // SAFETY: the caller serializes the sends of a ring.
        unsafe { OwnRing::post(ring, &message) }
    })
}

/// `softdv_ring_poll`.
pub(super) unsafe extern "C" fn poll(
    ring: *mut softdv_ring,
    message: *mut softdv_ring_message,
) -> c_int {
    let polled = guard(|| {
        non_null(message)?;
        // SAFETY: the caller promises a live ring and serializes its polls.
        let Some(found) = (unsafe { OwnRing::poll(live(ring)?)? }) else {
            return Ok(0);
        };
        // SAFETY: not NULL; the caller has room for it.
        unsafe {
            message.write(softdv_ring_message {
                words: found.words,
                payload: found.payload.cast(),
                length: found.len as u32,
            });
        }
        Ok(1)
    });
    polled.unwrap_or_else(|error: Errno| -error.0)
}

/// `softdv_ring_consume`.
pub(super) unsafe extern "C" fn consume(ring: *mut softdv_ring) -> c_int {
    // SAFETY: the caller promises a live ring and serializes its polls.
    let done = guard(|| unsafe { OwnRing::consume(live(ring)?) });
    done.map_or_else(|error| error.0, |()| 0)
}

/// `softdv_ring_advance`.
pub(super) unsafe extern "C" fn advance(ring: *mut softdv_ring, slots: u32) -> c_int {
    errno_of(|| {
        // SAFETY: the caller promises a live ring and serializes its polls.
        match unsafe { live(ring) } {
            // SAFETY: as above.
            Ok(ring) => unsafe { OwnRing::advance(ring, slots) },
            Err(error) => error.0,
        }
    })
}

/// `softdv_ring_sent`.
pub(super) unsafe extern "C" fn sent(ring: *mut softdv_ring, position: *mut u32) -> c_int {
    // SAFETY: the caller promises a live ring and serializes its sends.
    unsafe { position_of(ring, position, |ring| OwnRing::sent(ring)) }
}

/// `softdv_ring_delivered`.
pub(super) unsafe extern "C" fn delivered(ring: *mut softdv_ring, position: *mut u32) -> c_int {
    // SAFETY: the caller promises a live ring and serializes its sends.
    unsafe { position_of(ring, position, |ring| OwnRing::delivered(ring)) }
}

/// Writes the position that `read` finds; returns 0 or an errno.
///
/// # Safety
/// `ring` must be NULL or live, and `position` NULL or writable.
unsafe fn position_of(
    ring: *mut softdv_ring,
    position: *mut u32,
    read: impl FnOnce(*mut OwnRing) -> u32,
) -> c_int {
    let done = guard(|| {
        non_null(position)?;
        // SAFETY: the caller's promise.
        unsafe { position.write(read(live(ring)?)) };
        Ok(())
    });
    done.map_or_else(|error| error.0, |()| 0)
}

/// `softdv_ring_await`.
pub(super) unsafe extern "C" fn await_consume(ring: *mut softdv_ring) -> c_int {
    // SAFETY: the caller promises a live ring and serializes its sends.
    guard(|| Ok(unsafe { OwnRing::wait(live(ring)?) })).unwrap_or_else(|error| error.0)
}

/// `softdv_ring_grow`.
pub(super) unsafe extern "C" fn grow(ring: *mut softdv_ring, slots: u32) -> c_int {
    // SAFETY: the caller promises a live ring and serializes its polls.
    let done = guard(|| unsafe { OwnRing::grow(live(ring)?, slots) });
    done.map_or_else(|error| error.0, |()| 0)
}

/// `softdv_ring_set_hot`.
pub(super) unsafe extern "C" fn set_hot(ring: *mut softdv_ring, hot: c_int) -> c_int {
    // SAFETY: the caller promises a live ring and serializes its polls.
    let waits = guard(|| Ok(unsafe { OwnRing::set_hot(live(ring)?, hot != 0) }));
    waits.map_or_else(|error: Errno| -error.0, c_int::from)
}

/// `softdv_ring_arrivals`.
pub(super) unsafe extern "C" fn arrivals(
    cq: *mut ibv_cq,
    cookies: *mut u64,
    count: c_int,
) -> c_int {
    let found = guard(|| {
        non_null(cq)?;
        non_null(cookies)?;
        // SAFETY: the caller promises a live queue.
        let cq = unsafe { Cq::from_ptr(cq) };
        let process = cq.process().live()?;
        let mut found = 0;
        cq.drain_arrivals(|index| {
            if found >= count {
                return false;
            }
            let qp = process.qps.get(index);
            if let Some(cookie) = qp.and_then(|qp| qp.cookie_of_ring(cq)) {
                // SAFETY: the caller has room for `count` cookies.
                unsafe { cookies.add(found.cast_unsigned() as usize).write(cookie) };
                found += 1;
            }
            true
        });
        Ok(found)
    });
    found.unwrap_or_else(|error: Errno| -error.0)
}
