//! The structures and flags of softverbs' direct verbs (`docs/softverbs.md`,
//! `docs/softverbs-ring.md`, `docs/softverbs-atomics.md`); the functions `softdv_*` are in
//! [`VerbsFns`](crate::VerbsFns).

use core::ffi::c_void;

/// Wakes a completion queue that is armed for solicited events, as `IBV_SEND_SOLICITED` does.
pub const SOFTDV_RING_SOLICITED: u32 = 1;

/// A flag of `softdv_access` and its variants: the lkey of the local memory is not checked, so the
/// memory needs no region. It is readable, for a READ writable, by the guarantee of the caller.
pub const SOFTDV_ACCESS_UNCHECKED: u32 = 1;

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
#[derive(Clone, Copy, Debug)]
pub struct softdv_ring_info {
    /// Longest payload that can be sent, in bytes.
    pub max_send: u32,
    /// Longest payload that can arrive, in bytes.
    pub max_recv: u32,
    /// A word, valid as long as the ring, that has the address of the slot of the next message to be
    /// sent. It changes in `softdv_ring_post` and `softdv_ring_postv`. The address serves as a hint
    /// to the processor alone: nothing may be read or written there.
    pub slot: *const *const c_void,
}

impl Default for softdv_ring_info {
    fn default() -> Self {
        Self {
            max_send: 0,
            max_recv: 0,
            slot: std::ptr::null(),
        }
    }
}

/// The part of a receive ring that its user may read: the ring has something to poll if the 32 bits
/// at `next` are `expected`. It changes only in `softdv_ring_poll`, `softdv_ring_consume`,
/// `softdv_ring_advance` and calls that change the queue pair's state, and when the user takes
/// messages at `next`: it may go behind messages of less than `left` slots by changing `next`,
/// `expected`, `left` and `ahead` accordingly. The next of these calls gives their room back.
#[repr(C)]
#[derive(Debug)]
pub struct softdv_ring {
    /// The first word of the next message, to be read atomically (acquire).
    pub next: *const u32,
    /// Its value if there is a message.
    pub expected: u32,
    /// Slots from `next` to the end of the ring; 0: nothing at `next` may be read but this word.
    pub left: u32,
    /// Longest payload of a message, in bytes.
    pub longest: u32,
    /// Slots of the messages that the user has taken in this way and not given back.
    pub ahead: u32,
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

/// The opcode of `ibv_post_send(3)` for a [`softdv_atomic`], whose address is in
/// `wr.atomic.compare_add`. No opcode of verbs has this number.
pub const SOFTDV_WR_ATOMIC: u32 = 0x100;

/// An operation of `fi_atomic(3)` on elements of one datatype. It and its operands stay valid until
/// the request completes, and only the device changes it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct softdv_atomic {
    /// The number of `enum fi_op`.
    pub op: u8,
    /// The number of `enum fi_datatype`.
    pub datatype: u8,
    /// Number of elements.
    pub count: u16,
    /// Written by the device: number of elements that have changed.
    pub changed: u32,
    /// One operand per element; not read by `FI_ATOMIC_READ`.
    pub operands: *const c_void,
    /// For operators that compare: one value per element to compare with.
    pub compare: *const c_void,
}
