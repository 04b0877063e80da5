//! Requests for memory windows: bind, local invalidate and remote invalidate.

use std::ffi::c_int;

use rdma_core_sys::*;

use super::request::Request;
use super::waiting::{Reason, Step};
use super::{Qp, SendQueue};
use crate::key::Key;
use crate::mw::Progress;
use crate::region::{self, Target};

/// `ibv_bind_mw`: a request that gives a window of type 1 its next key.
///
/// # Safety
/// All objects must be live, `bind` valid.
pub(crate) unsafe fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller promises live objects; all zeros is a request.
    unsafe {
        let (mw, bind) = (&mut *mw, &*bind);
        if mw.type_ != IBV_MW_TYPE_1 {
            return libc::EINVAL;
        }
        let rkey = mw.rkey & !0xff | mw.rkey.wrapping_add(1) & 0xff;
        let mut wr: ibv_send_wr = std::mem::zeroed();
        wr.wr_id = bind.wr_id;
        wr.opcode = IBV_WR_BIND_MW;
        wr.send_flags = bind.send_flags;
        wr.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw,
            rkey,
            bind_info: bind.bind_info,
        };
        let mut bad = std::ptr::null_mut();
        let code = super::post_send(qp, &raw mut wr, &raw mut bad);
        if code == 0 {
            mw.rkey = rkey;
        }
        code
    }
}

impl Qp {
    /// Bind and local invalidate: they change only this process, and complete when no initiator
    /// uses the old key any more.
    #[cold]
    pub(super) fn run_window(&self, sq: &SendQueue, request: &Request<'_>) -> Step {
        let number = self.number();
        let (result, wrong) = self.process().with_windows(|windows, owner| {
            if request.opcode == IBV_WR_BIND_MW {
                let bind = request.operands.as_bind();
                let result = windows.bind(owner, &bind, number, sq.pd);
                (result, IBV_WC_MW_BIND_ERR)
            } else {
                let result = windows.invalidate(owner, Key(request.imm), sq.pd);
                (result, IBV_WC_LOC_QP_OP_ERR)
            }
        });
        match result {
            Ok(Progress::Done) => Step::Done(IBV_WC_SUCCESS),
            Ok(Progress::Used) => Step::Wait(Reason::Hazard),
            Err(_) => Step::Done(wrong),
        }
    }

    /// A send with invalidate, of a window of the other end.
    #[cold]
    pub(super) fn run_send_inv(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        let Some(conn) = &sq.conn else {
            return Step::Wait(Reason::Connection);
        };
        let target = Target {
            key: Key(request.imm),
            addr: 0,
            pd: conn.pd,
            qp: sq.dest,
        };
        // The window's owner checks its own list again when the message arrives.
        if !region::may_invalidate(&conn.peer.map, target) {
            return self.refused_access(sq);
        }
        self.run_message(sq, request)
    }

    /// Invalidates a window of this queue pair for a message of the other end. Returns false if the
    /// key names none.
    #[cold]
    pub(super) fn invalidate_remotely(&self, rkey: u32) -> bool {
        let number = self.number();
        self.process()
            .with_windows(|windows, owner| windows.invalidate_remotely(owner, Key(rkey), number))
            .is_ok()
    }
}
