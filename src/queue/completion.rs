//! Entries of a completion queue: the result of one operation.

use crate::errno::FiErrno;
use crate::flags::Flags;

/// A successful operation, with the fields of every format of `fi_cq(3)`; a format uses its part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The context that the operation was posted with.
    pub context: usize,
    /// The kind of operation: `FI_SEND | FI_MSG`, `FI_RECV | FI_MSG`, `FI_RMA | FI_WRITE`,
    /// `FI_RMA | FI_READ`, with `FI_REMOTE_CQ_DATA` where `data` is valid.
    pub flags: Flags,
    /// Bytes received; 0 for operations that this side initiated.
    pub len: usize,
    /// Where the data is, for multi-receive buffers; else 0.
    pub buf: usize,
    /// Remote completion data.
    pub data: u64,
    /// Tag of a tagged message; else 0.
    pub tag: u64,
    /// The sender's address (`fi_addr_t`) for `fi_cq_readfrom`; [`Self::NO_ADDR`] if there is none.
    pub src_addr: u64,
}

impl Completion {
    /// `FI_ADDR_NOTAVAIL`: the completion of a connected endpoint or of an operation that this side
    /// initiated.
    pub const NO_ADDR: u64 = u64::MAX;

    /// A completion without data or source.
    #[inline(always)]
    pub(super) fn new(context: usize, flags: Flags) -> Self {
        Self {
            context,
            flags,
            len: 0,
            buf: 0,
            data: 0,
            tag: 0,
            src_addr: Self::NO_ADDR,
        }
    }
}

/// A failed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionError {
    /// The operation's entry, as far as its fields are known.
    pub completion: Completion,
    /// Bytes of a message that did not fit; 0 where the device does not report them.
    pub olen: usize,
    /// The reason in libfabric's terms.
    pub err: FiErrno,
    /// The reason in the device's: `ibv_wc_status`. `CompletionQueue::strerror` names it.
    pub prov_errno: i32,
    /// The device's own code (`vendor_err` of `ibv_poll_cq(3)`): the entry's `err_data`.
    pub vendor_err: u32,
}

/// Where completions go: one implementation per format of entry, writing straight into the
/// application's buffer.
pub trait EntryWriter {
    /// Stores one completion. Called at most as often as the `max` of the read allows, in order,
    /// with the queue's lock held: it must be quick and call nothing of the engine.
    fn write(&mut self, completion: &Completion);
}

impl<F: FnMut(&Completion)> EntryWriter for F {
    #[inline]
    fn write(&mut self, completion: &Completion) {
        self(completion);
    }
}
