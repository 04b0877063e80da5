//! The atomics of verbs, on words of 8 bytes, executed by the initiator.

use rdma_core_sys::*;

use super::agent_request::What;
use super::request::Request;
use super::waiting::{Reason, Step, lock_wait};
use super::{Qp, SendQueue};
use crate::key::Key;
use crate::region::{self, AccessError, Change, Target};
use crate::segment::layout::Fault;

impl Qp {
    /// An atomic: also executed by this thread.
    pub(super) fn run_atomic(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        let Some(conn) = &sq.conn else {
            return Step::Wait(Reason::Connection);
        };
        let operands = &request.operands;
        if request.len != 8 {
            return Step::Done(IBV_WC_LOC_LEN_ERR);
        }
        let change = match request.opcode {
            IBV_WR_ATOMIC_FETCH_AND_ADD => Change::Add(operands.compare_add),
            IBV_WR_ATOMIC_WRITE => {
                let mut value = [0u8; 8];
                // SAFETY: `value` has room for the 8 bytes of the request.
                unsafe { request.gather(value.as_mut_ptr()) };
                Change::Store(u64::from_ne_bytes(value))
            }
            _ => Change::Swap(operands.compare_add, operands.swap),
        };
        let result = if !operands.remote_addr.is_multiple_of(8) {
            return self.refused(sq, Fault::Request, IBV_WC_REM_INV_REQ_ERR);
        } else if conn.word.access() & change.right() == 0 {
            Err(AccessError::Remote)
        } else if sq.agent_request.is_some() {
            Err(AccessError::Refused)
        } else {
            let target = Target {
                key: Key(operands.rkey),
                addr: operands.remote_addr,
                pd: conn.pd,
                qp: sq.dest,
            };
            region::change(
                self.process(),
                &conn.peer,
                (target, conn.gate()),
                change,
                lock_wait(sq),
            )
        };
        match result {
            Err(AccessError::Unavailable) => return Step::Wait(Reason::Resource),
            Err(AccessError::Moved) => return self.moved(sq),
            _ => {}
        }
        sq.begun = true;
        let result = if result == Err(AccessError::Refused) {
            let what = What::Change(Key(operands.rkey), operands.remote_addr, change);
            match self.by_agent(sq, what, &[], 0) {
                Some(done) => done,
                None => return Step::Wait(sq.agent_wait()),
            }
        } else {
            result
        };
        Step::Done(match result {
            Ok(_) if request.opcode == IBV_WR_ATOMIC_WRITE => IBV_WC_SUCCESS,
            Ok(old) => {
                // SAFETY: the sges are registered buffers of this process, 8 bytes in total.
                unsafe { request.scatter(&old.to_ne_bytes()) };
                IBV_WC_SUCCESS
            }
            Err(AccessError::Remote) => return self.refused_access(sq),
            Err(AccessError::Local) => IBV_WC_LOC_PROT_ERR,
            Err(AccessError::Dead | AccessError::Unavailable) => IBV_WC_RETRY_EXC_ERR,
            Err(AccessError::Refused | AccessError::Moved) => IBV_WC_LOC_QP_OP_ERR,
        })
    }
}
