//! One operation of an initiator, made from the arguments of one call: a send, a read or write, an
//! atomic. It is the only form between the call and the work request ([`Transmit::request`]).

use super::atomic::{AtomicKind, AtomicOp};
use super::local::LocalIov;
use super::refusal;
use super::remote::RemoteIov;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::queue::event_cell::Counted;
use crate::queue::slots::{Failures, Slot};
use crate::verbs::{RemoteAddr, Rkey, SendOpcode, SendRequest, Sge};

/// Flags of sends, reads and writes of every endpoint type. `FI_MORE` has no effect on messages,
/// which are posted one by one.
pub(crate) const TRANSMIT_FLAGS: Flags = Flags::COMPLETION
    .union(Flags::INJECT)
    .union(Flags::INJECT_COMPLETE)
    .union(Flags::TRANSMIT_COMPLETE)
    .union(Flags::DELIVERY_COMPLETE)
    .union(Flags::REMOTE_CQ_DATA)
    .union(Flags::MORE)
    .union(Flags::FENCE);

/// Flags accepted by `fi_sendmsg` and `fi_writemsg` of connected endpoints.
const MSG_FLAGS: Flags = TRANSMIT_FLAGS.union(Flags::MATCH_COMPLETE);

/// Flags that need a request: a read or a write with one of them is not executed in its call.
pub(crate) const REQUEST_ONLY: Flags = Flags::FENCE
    .union(Flags::COMMIT_COMPLETE)
    .union(Flags::MORE);

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
    pub(crate) completion_flags: Flags,
    /// The event cells that count it.
    pub(crate) counted: Counted,
}

impl<'a> Transmit<'a> {
    /// A send (`fi_send(3)`).
    #[inline]
    pub(crate) fn send(local: LocalIov<'a>, context: usize, flags: Flags) -> Self {
        Self::new(SendOpcode::Send, local, (0, 0), context, flags)
    }

    /// A read or write of the range of the peer's memory at an address with a key (`fi_rma(3)`).
    #[inline]
    pub(crate) fn rma(
        opcode: SendOpcode,
        local: LocalIov<'a>,
        target: (u64, u64),
        context: usize,
        flags: Flags,
    ) -> Self {
        Self::new(opcode, local, target, context, flags)
    }

    /// As [`Self::rma`], of a list of remote ranges as C passes it.
    ///
    /// # Errors
    /// `EINVAL`: the number of ranges is not 1, or the length of the range differs from the local
    /// length.
    #[inline]
    pub(crate) fn rma_msg(
        opcode: SendOpcode,
        local: LocalIov<'a>,
        remote: &[RemoteIov],
        context: usize,
        flags: Flags,
    ) -> Result<Self> {
        let &[range] = remote else {
            return Err(FiErrno::EINVAL);
        };
        if range.len != local.len() {
            return Err(refusal::other_length(local.len(), range.len));
        }
        let target = (range.addr, range.key);
        Ok(Self::rma(opcode, local, target, context, flags))
    }

    /// An atomic (`fi_atomic(3)`) with `result` as local buffer; `kind` determines the flags of its
    /// completion.
    #[inline]
    pub(crate) fn atomic(
        (op, kind): (AtomicOp, AtomicKind),
        result: LocalIov<'a>,
        target: (u64, u64),
        context: usize,
        flags: Flags,
    ) -> Self {
        let (opcode, compare_add, swap) = match op {
            AtomicOp::Add(value) => (SendOpcode::FetchAdd, value, 0),
            AtomicOp::CompareSwap { compare, swap } => (SendOpcode::CompareSwap, compare, swap),
        };
        Self {
            compare_add,
            swap,
            completion_flags: match kind {
                AtomicKind::Base => Flags::ATOMIC.union(Flags::WRITE),
                AtomicKind::Fetch => Flags::ATOMIC.union(Flags::READ),
            },
            ..Self::new(opcode, result, target, context, flags)
        }
    }

    #[inline]
    fn new(
        opcode: SendOpcode,
        local: LocalIov<'a>,
        (remote_addr, key): (u64, u64),
        context: usize,
        flags: Flags,
    ) -> Self {
        Self {
            opcode,
            local,
            remote_addr,
            key,
            data: 0,
            context,
            flags,
            silent: false,
            compare_add: 0,
            swap: 0,
            completion_flags: completion_flags(opcode),
            counted: Counted::WHOLE,
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
            && !self.local.is_empty()
    }

    /// Whether the application posts a further operation at once (`FI_MORE`), so that this one may
    /// be posted together with it: a read or a write whose buffers the application keeps.
    #[inline]
    pub(crate) fn may_be_delayed(&self) -> bool {
        matches!(self.opcode, SendOpcode::Write | SendOpcode::Read)
            && self.flags & (Flags::MORE | Flags::INJECT) == Flags::MORE
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

impl Transmit<'_> {
    /// The remote memory as the peer's device addresses it, if the key is an rkey of the device or
    /// the operation has no key.
    #[inline]
    pub(crate) fn native_target(&self) -> (RemoteAddr, Rkey) {
        // native keys have 32 bits
        let rkey = Rkey::new(self.key as u32);
        (RemoteAddr::new(self.remote_addr), rkey)
    }

    /// The work request of the operation, or of a fragment: `opcode`, with these local buffers
    /// and this remote memory.
    #[inline(always)]
    pub(super) fn request<'b>(
        &self,
        opcode: SendOpcode,
        sges: &'b [Sge],
        target: (RemoteAddr, Rkey),
    ) -> SendRequest<'b> {
        let mut request = SendRequest::new(opcode, sges);
        // remote data has 4 bytes
        request.imm(self.data as u32);
        if opcode.is_atomic() {
            request.atomic(target, self.compare_add, self.swap);
        } else {
            request.rdma(target);
        }
        request
    }

    /// The record of the operation's last request. `visible`: its success is reported to the
    /// application.
    #[inline(always)]
    pub(super) fn slot(&self, visible: bool) -> Slot {
        Slot {
            context: self.context,
            flags: self.completion_flags,
            visible,
            failures: match self.silent {
                true => Failures::Refusals,
                false => Failures::All,
            },
            ..Slot::default()
        }
    }
}

/// Completion flags of an operation; [`Transmit::atomic`] sets those of an atomic.
#[inline]
fn completion_flags(opcode: SendOpcode) -> Flags {
    match opcode {
        SendOpcode::Send | SendOpcode::SendImm => Flags::SEND.union(Flags::MSG),
        SendOpcode::Write | SendOpcode::WriteImm => Flags::RMA.union(Flags::WRITE),
        SendOpcode::Read => Flags::RMA.union(Flags::READ),
        SendOpcode::CompareSwap | SendOpcode::FetchAdd | SendOpcode::Elements => {
            Flags::ATOMIC.union(Flags::READ)
        }
    }
}
