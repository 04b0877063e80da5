//! Refusals of operations with invalid arguments: each function logs the reason at `info` and
//! returns the errno.
//!
//! Cold functions with arguments by value, so the fast path contains only a branch. A full queue
//! (`EAGAIN`) and a state in which nothing can be posted are not logged.

use crate::errno::FiErrno;
use crate::log::refused;

/// A vector with more buffers than the endpoint's limit.
#[cold]
pub(crate) fn too_many_buffers(count: usize, limit: usize) -> FiErrno {
    refused!(EpData, EINVAL, "{count} buffers, and iov_limit is {limit}")
}

/// A count of buffers with a NULL vector.
#[cold]
pub(crate) fn no_buffers(count: usize) -> FiErrno {
    refused!(EpData, EINVAL, "a vector at NULL of {count} buffers")
}

/// More bytes than the limit of an operation.
#[cold]
pub(crate) fn too_long(len: usize, max: usize) -> FiErrno {
    refused!(
        EpData,
        EMSGSIZE,
        "{len} bytes, and an operation has at most {max}"
    )
}

/// More bytes than the limit of inject.
#[cold]
pub(crate) fn too_long_to_inject(len: usize, max: usize) -> FiErrno {
    refused!(EpData, EMSGSIZE, "{len} bytes, and inject_size is {max}")
}

/// Local and remote lengths of an RMA operation differ.
#[cold]
pub(crate) fn other_length(local: usize, remote: usize) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "{local} bytes of local buffers, and {remote} bytes of the peer's memory"
    )
}

/// A durable write on an endpoint without durable writes.
#[cold]
pub(crate) fn not_durable() -> FiErrno {
    refused!(
        EpData,
        EBADFLAGS,
        "FI_COMMIT_COMPLETE, and the endpoint was opened without FI_RMA_PMEM"
    )
}

/// A value that cannot be a key of the peer.
#[cold]
pub(crate) fn no_such_key(key: u64, introduced: bool) -> FiErrno {
    if introduced {
        refused!(
            EpData,
            EKEYREJECTED,
            "{key:#x} is neither an rkey nor a handle, and the peer has no other keys"
        )
    } else {
        refused!(
            EpData,
            EKEYREJECTED,
            "{key:#x} is no rkey, and the peer has a key directory only if it is weft"
        )
    }
}

/// An atomic on an endpoint without atomics.
#[cold]
pub(crate) fn no_atomics() -> FiErrno {
    refused!(
        EpData,
        EOPNOTSUPP,
        "the endpoint was opened without FI_ATOMIC"
    )
}

/// An atomic whose result has another size.
#[cold]
pub(crate) fn other_result(len: usize) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "a result of {len} bytes, and an atomic has 8"
    )
}

/// An atomic whose target is not aligned.
#[cold]
pub(crate) fn unaligned(addr: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the target of an atomic, {addr:#x}, is not a multiple of 8"
    )
}

/// A receive on an endpoint that uses a shared context.
#[cold]
pub(crate) fn shared_receives() -> FiErrno {
    refused!(
        EpData,
        EOPNOTSUPP,
        "receives of this endpoint are posted to its shared context"
    )
}
