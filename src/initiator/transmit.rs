//! One operation of an initiator, before it is posted.

use super::local::LocalIov;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::mr::keys::Fragment;
use crate::verbs::{RemoteAddr, Rkey, SendOpcode};

/// Flags accepted by `fi_sendmsg` and `fi_writemsg`. `FI_MORE` has no effect: a delayed request
/// would be sent only by the application's next call, although progress is automatic
/// (`FI_PROGRESS_AUTO`), and the call that delayed it could no longer return `EAGAIN`.
const MSG_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::INJECT)
    .union(Flags::INJECT_COMPLETE)
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::DELIVERY_COMPLETE)
    .union(Flags::MATCH_COMPLETE)
    .union(Flags::REMOTE_CQ_DATA)
    .union(Flags::MORE)
    .union(Flags::FENCE);

/// One operation of an initiator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transmit<'a> {
    pub(crate) opcode: SendOpcode,
    pub(crate) local: LocalIov<'a>,
    /// In the addressing mode of the region: the peer's virtual address, or an offset.
    pub(crate) remote_addr: u64,
    pub(crate) key: u64,
    pub(crate) data: u64,
    pub(crate) context: usize,
    pub(crate) flags: Flags,
    /// Set for inject calls, which have no completion entry.
    pub(crate) silent: bool,
    /// Operands of an atomic.
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    /// Flags of the operation's completion.
    pub(crate) kind: Flags,
}

impl<'a> Transmit<'a> {
    #[inline]
    pub(crate) fn send(local: LocalIov<'a>, context: usize, flags: Flags) -> Self {
        Self {
            opcode: SendOpcode::Send,
            local,
            remote_addr: 0,
            key: 0,
            data: 0,
            context,
            flags,
            silent: false,
            compare_add: 0,
            swap: 0,
            kind: completion_flags(SendOpcode::Send),
        }
    }

    /// Adds remote data.
    #[inline]
    pub(crate) fn with_data(mut self, data: u64) -> Self {
        self.opcode = self.opcode.with_imm();
        self.data = data;
        self
    }

    /// Changes the operation to an inject call.
    #[inline]
    pub(crate) fn injected(mut self) -> Self {
        self.flags |= Flags::INJECT;
        self.silent = true;
        self
    }

    /// Whether the operation completes only after its data is persistent across a loss of power.
    #[inline]
    pub(crate) fn is_durable(&self) -> bool {
        self.flags.contains(Flags::COMMIT_COMPLETE)
            && matches!(self.opcode, SendOpcode::Write | SendOpcode::WriteImm)
            && self.local.len() != 0
    }

    /// Checks and applies the flags of `fi_sendmsg` and similar calls.
    #[inline]
    pub(crate) fn with_flags_checked(mut self, data: u64) -> Result<Self> {
        if self.flags.intersects(MSG_FLAGS.complement()) {
            return Err(FiErrno::EBADFLAGS);
        }
        if self.flags.contains(Flags::REMOTE_CQ_DATA) {
            self = self.with_data(data);
        }
        Ok(self)
    }
}

/// The target memory, as the peer's device addresses it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) addr: RemoteAddr,
    pub(crate) rkey: Rkey,
}

impl Target {
    /// The target of an operation whose key is an rkey of the device, or that has no key.
    #[inline]
    pub(crate) fn native(op: &Transmit<'_>) -> Self {
        Self {
            addr: RemoteAddr::new(op.remote_addr),
            // native keys have 32 bits
            rkey: Rkey::new(op.key as u32),
        }
    }

    #[inline]
    pub(crate) fn of(fragment: &Fragment) -> Self {
        Self {
            addr: fragment.addr,
            rkey: fragment.rkey,
        }
    }
}

/// Completion flags of an operation; those of atomics are set by the caller.
#[inline]
pub(crate) fn completion_flags(opcode: SendOpcode) -> Flags {
    match opcode {
        SendOpcode::Send | SendOpcode::SendImm => Flags::SEND.union(Flags::MSG),
        SendOpcode::Write | SendOpcode::WriteImm => Flags::RMA.union(Flags::WRITE),
        SendOpcode::Read => Flags::RMA.union(Flags::READ),
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => Flags::ATOMIC.union(Flags::READ),
    }
}
