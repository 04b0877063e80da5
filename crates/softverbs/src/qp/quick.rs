//! The way of most messages: of one piece, on a reliable connection on which nothing waits, with a receive that is
//! known to be there and long enough. It does what the general way does ([`super::send`]), with a third of the
//! instructions; whatever is not plain is left to that, untouched.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::send::outcome;
use super::{Qp, SendQueue};
use crate::peer::Push;
use crate::ring::{Header, MAX_PAYLOAD, copy, flag, op};

impl Qp {
    /// Sends `wr`, or does nothing and says so.
    ///
    /// # Safety
    /// `wr` must be a valid request.
    #[inline(always)]
    pub(super) unsafe fn send_quickly(&self, sq: &mut SendQueue, wr: &ibv_send_wr) -> bool {
        let Some(conn) = &sq.conn else {
            return false;
        };
        let with_imm = wr.opcode == IBV_WR_SEND_WITH_IMM;
        let plain = (wr.opcode == IBV_WR_SEND || with_imm)
            && wr.num_sge == 1
            && sq.max_sge > 0
            && sq.kind == IBV_QPT_RC
            && self.state() == IBV_QPS_RTS
            && sq.executed == sq.head
            && sq.head.wrapping_sub(self.send_done.load(Ordering::Acquire)) < sq.max_wr
            && sq.claimed != sq.credit.posted
            && conn.srq.is_none()
            && conn.current();
        if !plain {
            return false;
        }
        // SAFETY: the caller promises a valid list of one.
        let sge = unsafe { &*wr.sg_list };
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        let most = if inline {
            sq.max_inline
        } else {
            MAX_PAYLOAD as u32
        };
        if sge.length > most.min(MAX_PAYLOAD as u32).min(sq.credit.least) {
            return false;
        }
        let process = self.process();
        let addr = if inline {
            sge.addr
        } else {
            match process.regions.local_again(&mut sq.seen, sge, sq.pd, false) {
                Some(addr) => addr,
                None => return false,
            }
        };
        let solicited = wr.send_flags & IBV_SEND_SOLICITED != 0;
        let header = Header {
            op: if with_imm { op::SEND_IMM } else { op::SEND },
            flags: if solicited { flag::SOLICITED } else { 0 },
            dst_qpn: sq.dest,
            incarnation: conn.word.incarnation(),
            len: sge.length,
            imm: wr.__bindgen_anon_1.bindgen_union_field,
            msn: sq.claimed,
            src_qpn: self.number(),
        };
        let pushed = conn.peer.push(process.signature(), &header, |to| {
            let from = std::ptr::without_provenance(addr as usize);
            // SAFETY: the place has room for the message; inside the application's registered buffer,
            // or its inline data.
            unsafe { copy(from, to, sge.length as usize) };
        });
        if pushed != Push::Sent {
            return false;
        }
        let status = outcome(conn, IBV_QPT_RC, sq.claimed);
        conn.peer.notify_cq(conn.recv_cq, solicited);
        sq.claimed = sq.claimed.wrapping_add(1);
        sq.head = sq.head.wrapping_add(1);
        if status != IBV_WC_SUCCESS {
            let len = u64::from(sge.length);
            self.finish(sq, wr.wr_id, wr.opcode, wr.send_flags, len, status);
            return true;
        }
        sq.executed = sq.head;
        if sq.signal_all || wr.send_flags & IBV_SEND_SIGNALED != 0 {
            self.complete_send(sq, wr.wr_id, wr.opcode, IBV_WC_SUCCESS, sge.length);
        }
        true
    }
}
