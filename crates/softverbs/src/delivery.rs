//! What queue pairs and shared receive queues have in common: the post of a chain of receives, and
//! the delivery of a message into the receive that they choose, by the copy of its payload and its
//! completion.

use rdma_core_sys::*;

use crate::cq::{Cq, Cqe, Retires};
use crate::process::Process;
use crate::ring::{Consumer, Header, Message, flag, op};
use crate::segment::Mapping;
use crate::segment::layout::desc;
pub(crate) use crate::segment::layout::receives;
use crate::sync::atomic::Ordering;
use crate::sys::Res;

/// The receive into which a message is delivered.
pub(crate) struct Receive<'a> {
    pub(crate) wr_id: u64,
    pub(crate) total: u32,
    pub(crate) pd: u32,
    pub(crate) sges: &'a [ibv_sge],
    pub(crate) done: u32,
    pub(crate) retires: Retires,
}

/// The completion queue for messages, and the queue pair number in their completions.
pub(crate) struct Inbox<'a> {
    pub(crate) process: &'a Process,
    pub(crate) cq: &'a Cq,
    pub(crate) number: u32,
}

/// Posts the receives of a chain in order, up to the first one that `post` refuses, which is stored
/// in `bad` then. Returns the number of posted receives, and 0 or the errno of the refusal.
///
/// # Safety
/// `wr` must be a valid chain, `bad` writable.
#[inline(always)]
pub(crate) unsafe fn post_receives(
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    mut post: impl FnMut(&ibv_recv_wr) -> Res<()>,
) -> (u32, i32) {
    let (mut posted, mut next) = (0, wr);
    // SAFETY: the caller promises a valid chain.
    while let Some(receive) = unsafe { next.as_ref() } {
        if let Err(error) = post(receive) {
            // SAFETY: the caller promises a writable pointer.
            unsafe { *bad = next };
            return (posted, error.0);
        }
        posted += 1;
        next = receive.next;
    }
    (posted, 0)
}

/// Stores the descriptor of a receive of one sge, whose bytes are at `addr`, at offset `at` of the
/// owner's segment (`map`). The caller publishes it.
#[inline(always)]
pub(crate) fn store_descriptor(map: &Mapping, at: usize, sge: &ibv_sge, addr: u64) {
    const LEN: usize = (desc::FIRST + desc::SGE_STRIDE) / 4;
    let words = map.u32s::<LEN>(at);
    words[desc::TOTAL / 4].store(sge.length, Ordering::Relaxed);
    words[desc::NUM_SGE / 4].store(1, Ordering::Relaxed);
    words[(desc::FIRST + 8) / 4].store(sge.length, Ordering::Relaxed);
    words[(desc::FIRST + desc::LKEY) / 4].store(sge.lkey, Ordering::Relaxed);
    map.u64(at + desc::FIRST).store(addr, Ordering::Relaxed);
}

impl Inbox<'_> {
    /// Copies a message into its receive and adds the completion, whose status it returns.
    /// `invalidate` invalidates the window that the message names; it returns false if the key
    /// names no window.
    #[inline(always)]
    pub(crate) fn complete_message(
        &self,
        receive: &Receive<'_>,
        ring: &Consumer,
        message: &Message,
        invalidate: impl Fn(u32) -> bool,
    ) -> ibv_wc_status {
        let header = &message.header;
        let status = match header.op {
            op::SEND | op::SEND_IMM | op::SEND_INV if header.len > receive.total => {
                IBV_WC_LOC_LEN_ERR
            }
            op::SEND_INV if !invalidate(header.imm) => IBV_WC_LOC_QP_OP_ERR,
            op::SEND | op::SEND_IMM | op::SEND_INV if message.inside > 0 => {
                self.scatter(receive.sges, receive.pd, ring, message)
            }
            op::SEND | op::SEND_IMM | op::SEND_INV if !self.all_valid(receive, header.len) => {
                IBV_WC_LOC_PROT_ERR
            }
            op::SEND | op::SEND_IMM | op::SEND_INV | op::WRITE_IMM => IBV_WC_SUCCESS,
            op::TOO_LONG => IBV_WC_LOC_LEN_ERR,
            op::UNWRITABLE => IBV_WC_LOC_PROT_ERR,
            _ => IBV_WC_LOC_QP_OP_ERR,
        };
        self.push_receive(receive, header, status);
        status
    }

    /// Whether the keys of the receive's first `len` bytes are still valid, as they were for the
    /// sender.
    #[cold]
    fn all_valid(&self, receive: &Receive<'_>, len: u32) -> bool {
        let mut left = len;
        receive.sges.iter().all(|sge| {
            let used = left > 0;
            left -= left.min(sge.length);
            !used || self.process.regions.local(sge, receive.pd, true).is_some()
        })
    }

    #[inline(always)]
    pub(crate) fn push_receive(
        &self,
        receive: &Receive<'_>,
        header: &Header,
        status: ibv_wc_status,
    ) {
        let (opcode, wc_flags) = match header.op {
            op::SEND_IMM => (IBV_WC_RECV, IBV_WC_WITH_IMM),
            op::SEND_INV => (IBV_WC_RECV, IBV_WC_WITH_INV),
            op::WRITE_IMM => (IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM),
            _ => (IBV_WC_RECV, 0),
        };
        let cqe = Cqe {
            wc_flags,
            opcode,
            status,
            done: receive.done,
            retires: receive.retires,
            ..Cqe::of_receive(receive.wr_id, self.number, header)
        };
        self.cq.push(cqe, header.flags & flag::SOLICITED != 0);
    }

    /// Copies a payload from the ring into the receive's sges.
    #[inline(always)]
    fn scatter(
        &self,
        sges: &[ibv_sge],
        pd: u32,
        ring: &Consumer,
        message: &Message,
    ) -> ibv_wc_status {
        let mut offset = 0;
        for sge in sges {
            let len = (sge.length as usize).min(message.inside - offset);
            if len == 0 {
                continue;
            }
            // The region may have been deregistered since the receive was posted.
            let Some(addr) = self.process.regions.local(sge, pd, true) else {
                return IBV_WC_LOC_PROT_ERR;
            };
            // SAFETY: inside a region that the application registered for local writes and has not
            // deregistered; the ring is a mapping that this crate owns.
            unsafe {
                ring.copy_payload(
                    message,
                    offset,
                    std::ptr::without_provenance_mut(addr as usize),
                    len,
                );
            }
            offset += len;
        }
        IBV_WC_SUCCESS
    }
}
