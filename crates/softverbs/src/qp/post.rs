//! Posting send requests: a request is checked, and executed at once ([`super::send`]), or stored
//! until it can be executed ([`super::waiting`]).

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::request::{IovecList, Request, fetches, offered, operands};
use super::waiting::Step;
use super::{Operands, Qp, SendQueue, Stored};
use crate::limits::MAX_MESSAGE;
use crate::sync::Guard;
use crate::sys::{Errno, Res};

/// `ibv_post_send`.
///
/// # Safety
/// `qp` must be live, `wr` a valid chain, `bad` writable.
pub(crate) unsafe fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> i32 {
    // SAFETY: the caller promises a live queue pair.
    let this = unsafe { Qp::from_ptr(qp) };
    if this.process().forked() {
        // SAFETY: the caller promises a writable pointer.
        unsafe { *bad = wr };
        return libc::EIO;
    }
    let mut sq = this.sq.lock();
    let waited = sq.executed != sq.head;
    // SAFETY: the caller promises a valid chain.
    let ret = match unsafe { this.post_chain(&mut sq, wr, false) } {
        Ok(()) => 0,
        Err((error, at)) => {
            // SAFETY: the caller promises a writable pointer.
            unsafe { *bad = at };
            error.0
        }
    };
    this.end_post(sq, waited);
    ret
}

/// Posts a chain of `count` requests, all or none.
///
/// # Safety
/// `wr` must be a valid chain.
pub(super) unsafe fn post_all(qp: &Qp, wr: *mut ibv_send_wr, count: usize) -> i32 {
    if qp.process().forked() {
        return libc::EIO;
    }
    let mut sq = qp.sq.lock();
    let (mut next, mut inline) = (wr, false);
    // SAFETY: the caller promises a valid chain.
    while let Some(request) = unsafe { next.as_ref() } {
        if let Err(error) = qp.check(&sq, request).and(operands(sq.kind, request)) {
            return error.0;
        }
        inline |= request.send_flags & IBV_SEND_INLINE != 0;
        next = request.next;
    }
    let room = |sq: &SendQueue| {
        let used = sq.head.wrapping_sub(qp.send_done.load(Ordering::Acquire));
        count as u64 <= u64::from(sq.max_wr.saturating_sub(used))
    };
    let fits = room(&sq) || qp.reclaim(&sq) && room(&sq);
    if !fits {
        return libc::ENOMEM;
    }
    let waited = sq.executed != sq.head;
    // Each request will wait. A lack of memory must be found before the first one is posted.
    if (waited || qp.state() == IBV_QPS_SQD)
        && let Err(error) = sq.make_room(inline)
    {
        return error.0;
    }
    // The loop above has checked the requests, and there is room.
    // SAFETY: the caller promises a valid chain.
    let ret =
        unsafe { qp.post_chain(&mut sq, wr, inline) }.map_or_else(|(error, _)| error.0, |()| 0);
    qp.end_post(sq, waited);
    ret
}

impl Qp {
    /// Posts the requests of a chain in order, up to the first one that cannot be posted. `inline`:
    /// the first request that waits makes room for inline data of the later ones too, so that none
    /// of these is refused for a lack of memory.
    ///
    /// # Safety
    /// `wr` must be a valid chain.
    #[inline(always)]
    unsafe fn post_chain(
        &self,
        sq: &mut SendQueue,
        wr: *mut ibv_send_wr,
        inline: bool,
    ) -> Result<(), (Errno, *mut ibv_send_wr)> {
        let mut next = wr;
        // SAFETY: the caller promises a valid chain.
        while let Some(request) = unsafe { next.as_ref() } {
            if matches!(request.opcode, IBV_WR_RDMA_WRITE | IBV_WR_RDMA_READ) {
                // SAFETY: as above.
                let executed = unsafe { self.access_fast(sq, next) };
                if executed.rest != next && !executed.stopped {
                    next = executed.rest;
                    if !next.is_null() {
                        self.sq.let_pass();
                    }
                    continue;
                }
                next = executed.rest;
            // SAFETY: as above.
            } else if unsafe { self.send_fast(sq, request) } {
                next = request.next;
                continue;
            }
            // SAFETY: as above.
            let Some(request) = (unsafe { next.as_ref() }) else {
                break;
            };
            self.post_one(sq, request, inline)
                .map_err(|error| (error, next))?;
            self.sq.let_pass();
            next = request.next;
        }
        Ok(())
    }

    /// Ends a post: enters the queue pair for retries if requests wait now. `waited`: some did
    /// before the post.
    #[inline(always)]
    fn end_post(&self, sq: Guard<'_, SendQueue>, waited: bool) {
        if sq.executed != sq.head && (!waited || sq.pending.news) {
            self.begin_to_wait(sq);
        }
    }

    #[cold]
    fn begin_to_wait(&self, sq: Guard<'_, SendQueue>) {
        drop(sq);
        self.process().wait(self.index);
        self.run_waiting();
    }

    /// Checks whether a request may be posted. Returns its sges and their total length.
    #[inline]
    fn check<'a>(&self, sq: &SendQueue, wr: &'a ibv_send_wr) -> Res<(&'a [ibv_sge], u64)> {
        let state = self.state();
        if !matches!(state, IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE | IBV_QPS_ERR) {
            return Err(Errno(libc::EINVAL));
        }
        // `num_sge` is an int and may be negative.
        let num_sge = wr.num_sge.cast_unsigned();
        if num_sge > sq.max_sge || !offered(sq.kind, wr.opcode) {
            return Err(Errno(libc::EINVAL));
        }
        let sges = if num_sge == 0 {
            &[]
        } else {
            // SAFETY: the caller promises a valid list of `num_sge` sges.
            unsafe { std::slice::from_raw_parts(wr.sg_list, num_sge as usize) }
        };
        let len: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        if len > MAX_MESSAGE || inline && (len > u64::from(sq.max_inline) || fetches(wr.opcode)) {
            return Err(Errno(libc::EINVAL));
        }
        Ok((sges, len))
    }

    /// Posts a request that the fast paths have left. `later_inline`: as `inline` of
    /// [`Self::post_chain`].
    #[inline(never)]
    fn post_one(&self, sq: &mut SendQueue, wr: &ibv_send_wr, later_inline: bool) -> Res<()> {
        let (sges, len) = self.check(sq, wr)?;
        let state = self.state();
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        if sq.head.wrapping_sub(self.send_done.load(Ordering::Acquire)) >= sq.max_wr
            && !self.reclaim(sq)
        {
            return Err(Errno(libc::ENOMEM));
        }
        let operands = operands(sq.kind, wr)?;
        if state != IBV_QPS_RTS || sq.executed != sq.head {
            return self.post_later(sq, wr, operands, sges, len, state);
        }
        let mut list = IovecList::new();
        for sge in sges {
            let addr = if inline {
                Some(sge.addr)
            } else {
                let write = fetches(wr.opcode);
                self.process().regions.local(sge, sq.pd, write)
            };
            let Some(addr) = addr else {
                self.finish_posted(sq, wr, 0, IBV_WC_LOC_PROT_ERR);
                return Ok(());
            };
            list.push(addr, sge.length as usize);
        }
        let request = Request {
            opcode: wr.opcode,
            flags: wr.send_flags,
            imm: wr.__bindgen_anon_1.bindgen_union_field,
            operands,
            iovecs: list.as_slice(),
            len,
        };
        match self.run(sq, &request) {
            Step::Done(status) | Step::Refused(status) => {
                self.finish_posted(sq, wr, len, status);
            }
            Step::Wait(reason) => {
                self.note_wait(sq, reason);
                if sq.make_room(inline || later_inline).is_err() {
                    // The attempt may have begun the request, so the post cannot be refused.
                    self.finish_posted(sq, wr, 0, IBV_WC_LOC_QP_OP_ERR);
                    return Ok(());
                }
                self.store(sq, wr, operands, sges, len);
                if let Some(status) = Self::give_up_at_once(sq) {
                    self.finish(sq, wr.wr_id, wr.opcode, wr.send_flags, 0, status);
                }
            }
        }
        Ok(())
    }

    /// Frees the slots of executed unsignaled requests, if no completion is left to be polled.
    #[cold]
    fn reclaim(&self, sq: &SendQueue) -> bool {
        let done = self.send_done.load(Ordering::Acquire);
        if sq.signaled.wrapping_sub(done).cast_signed() > 0 {
            return false;
        }
        self.send_done.store(sq.executed, Ordering::Release);
        sq.head.wrapping_sub(sq.executed) < sq.max_wr
    }

    #[cold]
    fn post_later(
        &self,
        sq: &mut SendQueue,
        wr: &ibv_send_wr,
        operands: Operands,
        sges: &[ibv_sge],
        len: u64,
        state: u32,
    ) -> Res<()> {
        if matches!(state, IBV_QPS_ERR | IBV_QPS_SQE) {
            sq.head = sq.head.wrapping_add(1);
            sq.executed = sq.head;
            self.complete_send(sq, wr.wr_id, wr.opcode, IBV_WC_WR_FLUSH_ERR, 0);
        } else {
            sq.make_room(wr.send_flags & IBV_SEND_INLINE != 0)?;
            self.store(sq, wr, operands, sges, len);
            if state == IBV_QPS_RTS {
                self.publish_another_pending(sq);
            }
        }
        Ok(())
    }

    /// Stores a request that is executed later. The caller has made room for it.
    fn store(
        &self,
        sq: &mut SendQueue,
        wr: &ibv_send_wr,
        operands: Operands,
        sges: &[ibv_sge],
        len: u64,
    ) {
        let slot = sq.head as usize & (sq.stored.len() - 1);
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        sq.stored[slot] = Stored {
            wr_id: wr.wr_id,
            opcode: wr.opcode,
            flags: wr.send_flags,
            imm: wr.__bindgen_anon_1.bindgen_union_field,
            operands,
            num_sge: sges.len() as u32,
            inline_len: if inline { len as u32 } else { 0 },
        };
        let first = slot * sq.max_sge as usize;
        sq.sges[first..first + sges.len()].copy_from_slice(sges);
        if inline {
            let mut at = slot * sq.max_inline as usize;
            for sge in sges {
                let to = &mut sq.inline[at..at + sge.length as usize];
                // SAFETY: the application's buffer, which verbs.h lets the device read until the
                // post returns; the lengths were summed and checked.
                unsafe {
                    to.as_mut_ptr().copy_from_nonoverlapping(
                        std::ptr::without_provenance(sge.addr as usize),
                        to.len(),
                    );
                }
                at += to.len();
            }
        } else if sq.kind == IBV_QPT_UD {
            self.copy_payload(sq, slot, sges, len);
        }
        sq.head = sq.head.wrapping_add(1);
    }
}
