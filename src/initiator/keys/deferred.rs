//! A deferred operation, with all data needed to post it later.

#![allow(unsafe_code, reason = "keeps the caller's buffers")]

use libc::iovec;

use crate::flags::Flags;
use crate::initiator::Transmit;
use crate::initiator::local::LocalIov;
use crate::mr::Desc;
use crate::verbs::SendOpcode;

/// An operation that is not or not completely posted: it waits for a look-up, for a result or for
/// room in the send queue, or follows such an operation.
#[derive(Debug)]
pub(crate) struct Deferred {
    opcode: SendOpcode,
    iov: Vec<iovec>,
    desc: Vec<Desc>,
    /// A copy of injected data, to which `iov` refers; otherwise empty.
    _copy: Vec<u8>,
    remote_addr: u64,
    key: u64,
    data: u64,
    context: usize,
    flags: Flags,
    silent: bool,
    compare_add: u64,
    swap: u64,
    kind: Flags,
    /// Number of bytes of the operation that are posted.
    posted: u64,
}

// SAFETY: the caller keeps the buffers valid until completion (fi_rma(3)), on whichever thread the
// operation is posted.
unsafe impl Send for Deferred {}

impl Deferred {
    /// `posted`: bytes of the operation that are posted. Allocates.
    ///
    /// # Safety
    /// As [`Initiator::submit`].
    pub(super) unsafe fn new(op: &Transmit<'_>, posted: u64) -> Self {
        let inject = op.flags.contains(Flags::INJECT) && op.opcode.sends_data();
        let (iov, desc, copy);
        if inject {
            let mut bytes = vec![0; op.local.len()];
            // SAFETY: the caller promises readable buffers; `bytes` has their total length.
            unsafe { op.local.copy_to(bytes.as_mut_ptr()) };
            iov = vec![iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            }];
            desc = vec![Desc::NULL];
            copy = bytes;
        } else {
            (iov, desc) = op.local.to_owned();
            copy = Vec::new();
        }
        Self {
            opcode: op.opcode,
            iov,
            desc,
            _copy: copy,
            remote_addr: op.remote_addr,
            key: op.key,
            data: op.data,
            context: op.context,
            flags: op.flags,
            silent: op.silent,
            compare_add: op.compare_add,
            swap: op.swap,
            kind: op.kind,
            posted,
        }
    }

    /// Sets the number of bytes that are posted.
    pub(super) fn set_posted(&mut self, posted: u64) {
        self.posted = posted;
    }

    /// Number of bytes of the operation that are posted.
    pub(super) fn posted(&self) -> u64 {
        self.posted
    }

    pub(super) fn transmit(&self) -> Transmit<'_> {
        Transmit {
            opcode: self.opcode,
            local: LocalIov::borrowed(&self.iov, &self.desc),
            remote_addr: self.remote_addr,
            key: self.key,
            data: self.data,
            context: self.context,
            flags: self.flags,
            silent: self.silent,
            compare_add: self.compare_add,
            swap: self.swap,
            kind: self.kind,
        }
    }
}
