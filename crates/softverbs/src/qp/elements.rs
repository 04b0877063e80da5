//! Atomics on elements of all datatypes (`docs/softverbs-atomics.md`), executed by the initiator.

use rdma_core_sys::*;

use super::agent_request::What;
use super::request::Request;
use super::waiting::{Reason, Step, lock_wait};
use super::{Qp, SendQueue};
use crate::key::Key;
use crate::region::{self, AccessError, Elements, MAX_ELEMENTS, Shape, Target};

/// The structure of a request, and what it asks for. `None`: it is none that the post has accepted.
fn asked(request: &Request<'_>) -> Option<(*mut softdv_atomic, softdv_atomic, Shape)> {
    let at = request.operands.compare_add as usize;
    let atomic: *mut softdv_atomic = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the post has checked the address; the caller of the post keeps the structure valid
    // until the request completes.
    let asked = unsafe { *atomic };
    let shape = Shape::new(asked.op, asked.datatype, asked.count)?;
    Some((atomic, asked, shape))
}

impl Qp {
    /// An operation on elements of the other end's memory.
    pub(super) fn run_elements(&self, sq: &mut SendQueue, request: &Request<'_>) -> Step {
        let Some(conn) = &sq.conn else {
            return Step::Wait(Reason::Connection);
        };
        let Some((atomic, asked, shape)) = asked(request) else {
            return Step::Done(IBV_WC_LOC_QP_OP_ERR);
        };
        let fetches = !request.iovecs.is_empty();
        if fetches && request.len != shape.len() as u64 {
            return Step::Done(IBV_WC_LOC_LEN_ERR);
        }
        // SAFETY: the caller of the post keeps the operands valid and unchanged until the request
        // completes.
        let Some(operands) = (unsafe { shape.operands_of(&asked) }) else {
            return Step::Done(IBV_WC_LOC_QP_OP_ERR);
        };
        let (key, addr) = (Key(request.operands.rkey), request.operands.remote_addr);
        let right = shape.rights(fetches);
        let mut earlier = [0; MAX_ELEMENTS];
        let mut elements = Elements {
            shape,
            operands,
            earlier: &mut earlier[..shape.len()],
            changed: 0,
        };
        let mut result = if conn.word.access() & right != right {
            Err(AccessError::Remote)
        } else if sq.agent_request.is_some() {
            Err(AccessError::Refused)
        } else {
            let target = Target {
                key,
                addr,
                pd: conn.pd,
                qp: sq.dest,
            };
            let (process, wait) = (self.process(), lock_wait(sq));
            let through = (target, conn.gate());
            region::change_elements(process, &conn.peer, through, right, wait, &mut elements)
        };
        match result {
            Err(AccessError::Unavailable) => return Step::Wait(Reason::Resource),
            Err(AccessError::Moved) => return self.moved(sq),
            _ => {}
        }
        sq.begun |= result != Err(AccessError::Refused);
        if result == Err(AccessError::Refused) {
            let what = What::Elements(key, addr, shape, fetches);
            match self.elements_by_agent(sq, what, &mut elements) {
                Some(done) => {
                    sq.begun = true;
                    result = done;
                }
                None => {
                    sq.begun |= sq.agent_request.is_some();
                    return Step::Wait(sq.agent_wait());
                }
            }
        }
        Step::Done(match result {
            Ok(()) => {
                // SAFETY: as for reading the structure; the sges are registered buffers of this
                // process, empty or as long as the elements.
                unsafe {
                    (*atomic).changed = elements.changed;
                    request.scatter(elements.earlier);
                }
                IBV_WC_SUCCESS
            }
            Err(AccessError::Remote) => return self.refused_access(sq),
            Err(AccessError::Local) => IBV_WC_LOC_PROT_ERR,
            Err(AccessError::Dead | AccessError::Unavailable) => IBV_WC_RETRY_EXC_ERR,
            Err(AccessError::Refused | AccessError::Moved) => IBV_WC_LOC_QP_OP_ERR,
        })
    }

    /// Advances an operation that the other end's agent executes. `None`: it is in progress.
    #[cold]
    fn elements_by_agent(
        &self,
        sq: &mut SendQueue,
        what: What,
        elements: &mut Elements<'_>,
    ) -> Option<Result<(), AccessError>> {
        let earlier = &mut elements.earlier;
        let [operands, compare] = elements.operands.map(|bytes| {
            let addr = bytes.as_ptr().expose_provenance() as u64;
            crate::sys::as_local(addr, bytes.len())
        });
        let to = earlier.as_mut_ptr().expose_provenance() as u64;
        let list = [operands, compare, crate::sys::as_local(to, earlier.len())];
        let len = earlier.len() as u64;
        let done = self.by_agent(sq, what, &list, len)?;
        Some(done.map(|changed| elements.changed = changed as u32))
    }
}
