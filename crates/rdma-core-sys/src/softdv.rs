//! The structures of softverbs' direct verbs (`docs/softverbs-ring.md`); the functions `softdv_*`
//! are in [`VerbsFns`](crate::VerbsFns).

use core::ffi::c_void;

/// Wakes a completion queue that is armed for solicited events, as `IBV_SEND_SOLICITED` does.
pub const SOFTDV_RING_SOLICITED: u32 = 1;

/// Attributes of a new receive ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct softdv_ring_attr {
    /// Slots of 64 bytes: a power of two, 64 to 4,096.
    pub slots: u32,
    /// 0.
    pub reserved: u32,
    /// The value that `softdv_ring_arrivals` returns for this ring.
    pub cookie: u64,
}

/// Properties of a connection's rings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct softdv_ring_info {
    /// Longest payload that can be sent, in bytes.
    pub max_send: u32,
    /// Longest payload that can arrive, in bytes.
    pub max_recv: u32,
}

/// The part of a receive ring that its user may read: the ring has something to poll if the 32 bits
/// at `next` are `expected`. Both change only in `softdv_ring_poll`, `softdv_ring_consume` and calls
/// that change the queue pair's state.
#[repr(C)]
#[derive(Debug)]
pub struct softdv_ring {
    /// The first word of the next message, to be read atomically (acquire).
    pub next: *const u32,
    /// Its value if there is a message.
    pub expected: u32,
}

/// A message in a ring.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct softdv_ring_message {
    /// The sender's words.
    pub words: [u64; 3],
    /// The payload in shared memory, which a hostile sender may change at any time.
    pub payload: *const c_void,
    /// Bytes of the payload.
    pub length: u32,
}
