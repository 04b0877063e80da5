//! Entries of a completion queue: the result of one operation.

use crate::errno::FiErrno;
use crate::flags::Flags;

/// A successful operation, with the fields of all formats of `fi_cq(3)`; each format uses some of
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The context that the operation was posted with.
    pub context: usize,
    /// The kind of operation: `FI_SEND | FI_MSG`, `FI_RECV | FI_MSG`, `FI_RMA | FI_WRITE`,
    /// `FI_RMA | FI_READ`, with `FI_REMOTE_CQ_DATA` where `data` is valid.
    pub flags: Flags,
    /// Bytes received; 0 for operations that this side initiated.
    pub len: usize,
    /// Address of the data in a multi-receive buffer; otherwise 0.
    pub buf: usize,
    /// Remote completion data.
    pub data: u64,
    /// Tag of a tagged message; otherwise 0.
    pub tag: u64,
    /// The sender's address (`fi_addr_t`) for `fi_cq_readfrom`; [`Self::NO_ADDR`] if the completion
    /// has no address.
    pub src_addr: u64,
}

impl Completion {
    /// `FI_ADDR_NOTAVAIL`: the completion of a connected endpoint or of an operation that this side
    /// initiated.
    pub const NO_ADDR: u64 = u64::MAX;

    /// A completion without data or source.
    #[inline(always)]
    pub(crate) fn new(context: usize, flags: Flags) -> Self {
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
    /// The operation's entry, in which only the known fields are set.
    pub completion: Completion,
    /// Number of bytes of a message beyond the receive buffer; 0 if the device does not report it.
    pub olen: usize,
    /// The reason as libfabric's errno.
    pub err: FiErrno,
    /// The reason as the device's status, `ibv_wc_status`; in a queue that has only sources, that
    /// of a request that the device or the peer has refused, otherwise the errno again.
    /// `CompletionQueue::strerror` names it.
    pub prov_errno: i32,
    /// The device's own code (`vendor_err` of `ibv_poll_cq(3)`): the entry's `err_data`. `None`: no
    /// work completion is the reason.
    pub vendor_err: Option<u32>,
}

/// Destination of completions. Each format of entries has an implementation, which writes directly
/// to the application's buffer.
pub trait EntryWriter {
    /// Stores one completion. Called at most as often as the `max` of the read allows, in order,
    /// with the queue's lock held: the implementation must not block or call the engine.
    fn write(&mut self, completion: &Completion);

    /// Whether it uses [`Completion::src_addr`]. If not, a source of completions need not find it.
    fn uses_sources(&self) -> bool {
        true
    }
}

impl<F: FnMut(&Completion)> EntryWriter for F {
    #[inline]
    fn write(&mut self, completion: &Completion) {
        self(completion);
    }
}
