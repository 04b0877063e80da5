//! Remote reads and writes of an endpoint, `fi_rma(3)`.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use super::Endpoint;
use crate::av::FiAddr;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::initiator::local::buffer;
use crate::initiator::{LocalIov, REQUEST_ONLY, RemoteIov, TRANSMIT_FLAGS, Transmit, refusal};
use crate::mr::Desc;
use crate::queue::Completion;
use crate::rdm::completions::Side;
use crate::rdm::iov::Iov;
use crate::rdm::rma::{MAX_RMA_IOV, Notice, Request, RmaOp};
use crate::verbs::SendOpcode;

/// Flags of reads and writes that the engine knows.
const RMA_FLAGS: Flags = TRANSMIT_FLAGS.union(Flags::COMMIT_COMPLETE);

/// Polls of a post whose operation waits for a look-up: a device that executes requests in their
/// post completes one request of the look-up for each poll.
pub(super) const POLLS: usize = 8;

/// The arguments of one call of `fi_rma(3)` or `fi_atomic(3)`.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct RmaCall<'a> {
    pub(in crate::rdm) to: FiAddr,
    pub(in crate::rdm) request: Request,
    pub(in crate::rdm) local: LocalIov<'a>,
    pub(in crate::rdm) remote: &'a [RemoteIov],
    /// Remote CQ data of a write.
    pub(in crate::rdm) data: Option<u64>,
    pub(in crate::rdm) context: usize,
    /// Whether success has an entry in a queue with `FI_SELECTIVE_COMPLETION`.
    pub(in crate::rdm) selected: bool,
    /// A call without an entry.
    pub(in crate::rdm) silent: bool,
}

/// A read or a write.
fn request(opcode: SendOpcode, flags: Flags) -> Request {
    let kind = match opcode {
        SendOpcode::Read => Flags::READ,
        _ => Flags::WRITE,
    };
    Request {
        opcode,
        flags: flags & (Flags::INJECT | Flags::FENCE | Flags::COMMIT_COMPLETE | Flags::MORE),
        completion_flags: Flags::RMA | kind,
        compare_add: 0,
        swap: 0,
    }
}

/// The calls of `fi_rma(3)`. `flags`: `None` for the default flags.
///
/// # Errors
/// - `EAGAIN`: `tx_size` operations are under way.
/// - `EINVAL`: more buffers than [`Limits::iov_limit`](crate::rdm::Limits::iov_limit) or more
///   remote ranges than 4; both have different lengths; a local buffer at NULL with a length; an
///   invalid descriptor; or the address is not in the address vector.
/// - `EMSGSIZE`: injected and longer than the inject size.
/// - `EBADFLAGS`: a flag that the operation does not accept.
/// - `EKEYREJECTED`: the value cannot be a key of the peer.
/// - `EOPBADSTATE`: not enabled, or closed. `EOPNOTSUPP`: opened without RMA.
/// - Others: those of registering a local buffer.
///
/// # Safety
/// The buffers stay valid until the operation completes; injected ones during the call.
/// Descriptors are NULL or those of live regions that cover the buffers.
#[allow(
    clippy::missing_safety_doc,
    reason = "one section for all methods, above"
)]
impl Endpoint {
    /// `fi_read` and its forms.
    pub unsafe fn read(
        &self,
        from: FiAddr,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let inject = Flags::INJECT | Flags::REMOTE_CQ_DATA;
        let flags = match flags {
            Some(flags) if flags.intersects(RMA_FLAGS.complement() | inject) => {
                return Err(FiErrno::EBADFLAGS);
            }
            Some(flags) => flags,
            // these have no meaning for an operation that writes local memory
            None => self.op_flags().tx() - inject - Flags::COMMIT_COMPLETE,
        };
        let call = RmaCall {
            to: from,
            request: request(SendOpcode::Read, flags),
            local,
            remote,
            data: None,
            context,
            selected: flags.contains(Flags::COMPLETION),
            silent: false,
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.rma(&call) }
    }

    /// `fi_write` and its forms; with `data`, the target has a completion with it.
    pub unsafe fn write(
        &self,
        to: FiAddr,
        local: LocalIov<'_>,
        remote: &[RemoteIov],
        data: Option<u64>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        let flags = self.tx_flags(flags, RMA_FLAGS)?;
        // remote CQ data follows the completion of its write
        let flags = match data {
            Some(_) => flags - Flags::MORE,
            None => flags,
        };
        if flags.contains(Flags::COMMIT_COMPLETE) && !self.is_durable() {
            return Err(refusal::not_durable());
        }
        let call = RmaCall {
            to,
            request: request(SendOpcode::Write, flags),
            local,
            remote,
            data,
            context,
            selected: flags.contains(Flags::COMPLETION),
            silent: false,
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.rma(&call) }
    }

    /// `fi_inject_write` and its form with data: no entry in the completion queue.
    pub unsafe fn inject_write(
        &self,
        to: FiAddr,
        (buf, len): (*const c_void, usize),
        (addr, key): (u64, u64),
        data: Option<u64>,
    ) -> Result<()> {
        let iov = buffer(buf, len);
        let call = RmaCall {
            to,
            request: request(SendOpcode::Write, Flags::INJECT),
            local: LocalIov::single(&iov, &Desc::NULL),
            remote: &[RemoteIov { addr, len, key }],
            data,
            // fi_endpoint(3): an error without an operation's context has that of the endpoint
            context: self.shared().config.context,
            selected: false,
            silent: true,
        };
        // SAFETY: the caller keeps the contract of this function.
        unsafe { self.rma(&call) }
    }

    /// Fast path of [`Self::rma`]: a read or write of one range that the device executes in this
    /// call. `false`: nothing has changed.
    #[inline]
    unsafe fn execute(&self, call: &RmaCall<'_>) -> bool {
        let shared = self.shared();
        let config = &shared.config;
        let request = &call.request;
        let (&[remote], [buffer]) = (call.remote, call.local.iov()) else {
            return false;
        };
        let inject = request.flags.contains(Flags::INJECT);
        // the other way refuses it, unless it has no bytes
        let null = buffer.iov_base.is_null();
        let plain = call.data.is_none()
            && !request.opcode.is_atomic()
            && !request.flags.intersects(REQUEST_ONLY)
            && buffer.iov_len == remote.len
            && !(null || inject && remote.len > config.inject_size);
        if !plain {
            return false;
        }
        let mut guard = shared.lock_for_rma();
        let Some(state) = guard.as_mut() else {
            return false;
        };
        let Some(peer) = state.known_peer(call.to) else {
            return false;
        };
        if state.io.outstanding() >= config.tx_size {
            return false;
        }
        let peer = state.core.resolve(peer);
        let transmit = Transmit {
            completion_flags: request.completion_flags,
            ..Transmit::rma(
                request.opcode,
                call.local,
                (remote.addr, remote.key),
                call.context,
                request.flags,
            )
        };
        // SAFETY: the caller keeps the contract of this function.
        if !unsafe { state.io.execute_rma(&mut state.core, peer, &transmit) } {
            return false;
        }
        let all = self.common.tx_all.load(Ordering::Relaxed);
        let wanted = !call.silent && (call.selected || all);
        let completion = Completion::new(call.context, request.completion_flags);
        state.io.completions.rma_done(completion, wanted);
        shared.wake_readers(state);
        true
    }

    /// Posts the operations that were delayed for further ones (`FI_MORE`).
    #[cold]
    pub fn post_delayed(&self) {
        // acquiring the lock posts them
        drop(self.shared().lock());
    }

    /// Posts an operation of one call.
    pub(in crate::rdm) unsafe fn rma(&self, call: &RmaCall<'_>) -> Result<()> {
        let shared = self.shared();
        let config = &shared.config;
        if !config.rma {
            return Err(FiErrno::EOPNOTSUPP);
        }
        // SAFETY: the caller keeps the contract of this function.
        if unsafe { self.execute(call) } {
            return Ok(());
        }
        let iov = Iov::of_transfer(&call.local)?;
        let inject = call.request.flags.contains(Flags::INJECT);
        if inject && iov.len() > config.inject_size {
            return Err(refusal::too_long_to_inject(iov.len(), config.inject_size));
        }
        if call.remote.is_empty() || call.remote.len() > MAX_RMA_IOV {
            return Err(FiErrno::EINVAL);
        }
        let len = call.remote.iter().map(|range| range.len);
        let len = len.fold(0_usize, usize::saturating_add);
        if !call.request.opcode.is_atomic() && len != call.local.len() {
            return Err(refusal::other_length(call.local.len(), len));
        }
        let mut guard = shared.lock_for_rma();
        guard = shared.reserve_tx(guard)?;
        let state = guard.as_mut().ok_or(FiErrno::EOPBADSTATE)?;
        let peer = state.peer_of(call.to)?;
        let peer = state.core.resolve(peer);
        if call.data.is_some()
            && state.core.is_itself(peer)
            && state.io.completions.len(Side::Rx) >= 2 * config.rx_size.max(config.tx_size)
        {
            // on a link credit bounds the entries that no queue has taken
            return Err(FiErrno::EAGAIN);
        }
        let mut op = RmaOp::new(call.request, peer, state.io.rma.next_order());
        op.context = call.context;
        let all = self.common.tx_all.load(Ordering::Relaxed);
        op.wanted = !call.silent && (call.selected || all);
        (op.iov, op.count, op.desc) = (iov, call.local.count(), call.local.descriptors());
        op.ranges = call.remote.len();
        op.remote[..op.ranges].copy_from_slice(call.remote);
        if let Some(data) = call.data {
            op.notice = Notice::Due(data);
        }
        if !state.core.is_up(peer) {
            state.core.set_now(shared.now());
        }
        // SAFETY: the caller keeps the contract of this function.
        let begun = unsafe { state.io.begin_rma(&mut state.core, op) };
        state.run_todo();
        if begun.is_ok() {
            // the remote CQ data follows the completion of the write
            let mut polls = usize::from(call.data.is_some());
            if state.io.rma.waits_for(peer) && state.core.is_up(peer) {
                polls = POLLS;
            }
            if polls != 0 {
                state.io.post_delayed();
            }
            for _ in 0..polls {
                let _ = state.poll();
                if !state.io.rma.waits_for(peer) {
                    break;
                }
            }
        }
        shared.end_post(guard, begun)
    }
}
