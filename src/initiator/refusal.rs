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
    refused!(
        EpData,
        EINVAL,
        "the operation has {count} buffers; iov_limit is {limit}"
    )
}

/// A count of buffers with a NULL vector.
#[cold]
pub(crate) fn no_buffers(count: usize) -> FiErrno {
    refused!(EpData, EINVAL, "iov is NULL and its count is {count}")
}

/// A buffer at NULL that has a length.
#[cold]
pub(crate) fn null_buffer() -> FiErrno {
    refused!(EpData, EINVAL, "a buffer at NULL has a length")
}

/// More bytes than the limit of an operation.
#[cold]
pub(crate) fn too_long(len: usize, max: usize) -> FiErrno {
    refused!(
        EpData,
        EMSGSIZE,
        "the operation has {len} bytes; the maximum is {max}"
    )
}

/// More bytes than the limit of inject.
#[cold]
pub(crate) fn too_long_to_inject(len: usize, max: usize) -> FiErrno {
    refused!(
        EpData,
        EMSGSIZE,
        "the operation has {len} bytes; inject_size is {max}"
    )
}

/// Local and remote lengths of an RMA operation differ.
#[cold]
pub(crate) fn other_length(local: usize, remote: usize) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the local buffers have {local} bytes, the remote range has {remote} bytes"
    )
}

/// A durable write on an endpoint without durable writes.
#[cold]
pub(crate) fn not_durable() -> FiErrno {
    refused!(
        EpData,
        EBADFLAGS,
        "FI_COMMIT_COMPLETE requires an endpoint that was opened with FI_RMA_PMEM"
    )
}

/// A value that cannot be a key of the peer.
#[cold]
pub(crate) fn no_such_key(key: u64, introduced: bool) -> FiErrno {
    if introduced {
        refused!(
            EpData,
            EKEYREJECTED,
            "key {key:#x} is not an rkey, and the peer's directory has no keys of this form"
        )
    } else {
        refused!(
            EpData,
            EKEYREJECTED,
            "key {key:#x} is not an rkey, and the peer has no key directory: it is not weft"
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
        "the result buffer has {len} bytes; an atomic returns 8 bytes"
    )
}

/// An atomic whose target is not aligned.
#[cold]
pub(crate) fn unaligned(addr: u64) -> FiErrno {
    refused!(
        EpData,
        EINVAL,
        "the remote address {addr:#x} of the atomic is not a multiple of 8"
    )
}

/// A receive on an endpoint that uses a shared context.
#[cold]
pub(crate) fn shared_receives() -> FiErrno {
    refused!(
        EpData,
        EOPNOTSUPP,
        "the endpoint has a shared receive context: post the receive to that context"
    )
}
