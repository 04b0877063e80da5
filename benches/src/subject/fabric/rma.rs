//! Remote reads, writes and atomics.

use std::ptr::null_mut;
use std::time::Instant;

use abi_tests::call;
use abi_tests::weft::{mr_ops, weft_mr_attr};
use libfabric_sys::*;

use super::{Fabric, WINDOW, posted, unmeasured};
use crate::memory::Memory;
use crate::op::Op;
use crate::subject::Patience;

/// The operand of an atomic.
static ONE: u64 = 1;

/// Memory that weft allocates, and its region.
///
/// # Safety
/// A live domain of weft.
pub(super) unsafe fn allocate(
    domain: *mut fid_domain,
    len: usize,
    access: u64,
    key: u64,
) -> (Memory, *mut fid_mr) {
    let attr = weft_mr_attr {
        size: size_of::<weft_mr_attr>(),
        access,
        requested_key: key,
        flags: 0,
        addr: null_mut(),
        map_flags: 0,
        context: null_mut(),
    };
    let (mut at, mut mr) = (null_mut(), null_mut());
    // SAFETY: the caller's promise; the region is never closed.
    unsafe {
        let alloc = mr_ops(domain).mr_alloc.expect("mr_alloc");
        let ret = alloc(domain, len, &raw const attr, &raw mut at, &raw mut mr);
        assert_eq!(ret, 0, "mr_alloc");
        at.cast::<u8>().write_bytes(1, len);
    }
    (Memory { at: at.cast(), len }, mr)
}

impl Fabric {
    /// Posts a read or write with a completion. False if the queue is full.
    #[inline]
    pub(crate) fn post_rma(&mut self, read: bool, len: usize) -> bool {
        let context = self.context();
        let (ep, at) = (self.ep, self.outbox.at.cast());
        let (desc, peer, (addr, key)) = (self.out_desc, self.peer, self.remote);
        // SAFETY: a live endpoint, a registered buffer.
        let ret = unsafe {
            if read {
                call!((*ep).rma, read, ep, at, len, desc, peer, addr, key, context)
            } else {
                call!(
                    (*ep).rma,
                    write,
                    ep,
                    at,
                    len,
                    desc,
                    peer,
                    addr,
                    key,
                    context
                )
            }
        };
        posted(ret, "fi_read or fi_write")
    }

    /// Posts a fetch and add of 1 to the first word of the peer's memory. False if the queue is
    /// full. The endpoint must have `FI_ATOMIC`.
    pub(crate) fn post_fetch_add(&mut self) -> bool {
        let context = self.context();
        let (ep, at, one) = (self.ep, self.outbox.at.cast(), &raw const ONE);
        let (desc, peer, (addr, key)) = (self.out_desc, self.peer, self.remote);
        // SAFETY: a live endpoint; a readable operand; a registered buffer for the result.
        let ret = unsafe {
            call!(
                (*ep).atomic,
                readwrite,
                ep,
                one.cast(),
                1,
                null_mut(),
                at,
                desc,
                peer,
                addr,
                key,
                FI_UINT64,
                FI_SUM,
                context
            )
        };
        posted(ret, "fi_fetch_atomic")
    }

    /// As [`Self::post_rma`] of a write at an offset, which another one follows at once if `more`.
    #[inline]
    fn post_write_more(&mut self, (offset, len): (usize, usize), more: bool) -> bool {
        let context = self.context();
        let (addr, key) = self.remote;
        let addr = addr + offset as u64;
        let mut desc = self.out_desc;
        let iov = libc::iovec {
            iov_base: self.outbox.at.wrapping_add(offset).cast(),
            iov_len: len,
        };
        let range = fi_rma_iov { addr, len, key };
        let msg = fi_msg_rma {
            msg_iov: &raw const iov,
            desc: &raw mut desc,
            iov_count: 1,
            addr: self.peer,
            rma_iov: &raw const range,
            rma_iov_count: 1,
            context,
            data: 0,
        };
        let flags = FI_COMPLETION | if more { FI_MORE } else { 0 };
        let ep = self.ep;
        // SAFETY: a live endpoint, a registered buffer.
        let ret = unsafe { call!((*ep).rma, writemsg, ep, &raw const msg, flags) };
        posted(ret, "fi_writemsg")
    }

    /// Posts an operation of a window; `at`: its number in it.
    #[inline]
    fn post_access(&mut self, op: Op, len: usize, (at, window): (u64, u64)) -> bool {
        let more = at + 1 != window;
        match op {
            Op::Read | Op::ReadStream => self.post_rma(true, len),
            Op::WriteStreamMore => self.post_write_more((0, len), more),
            // a window is within the buffers
            Op::WriteStreamNext => self.post_write_more((at as usize * len, len), more),
            Op::FetchAdd => self.post_fetch_add(),
            _ => self.post_rma(false, len),
        }
    }

    /// Half a round trip of writes. The last byte of each write is the number of the round, which
    /// the peer's previous write did not have.
    pub(super) fn write_pingpong(&mut self, len: usize, count: u64) -> f64 {
        let first = self.side.is_first();
        let (out, last) = (self.outbox.at, self.inbox.at.wrapping_add(len - 1));
        // SAFETY: the last byte is inside the buffer; the peer writes it by the device.
        unsafe { last.write_volatile(0) };
        let send = |this: &mut Self, number: u8| {
            // SAFETY: inside the buffer; no operation is under way.
            unsafe { out.wrapping_add(len - 1).write_volatile(number) };
            while !this.post_rma(false, len) {
                this.poll(this.tx, 1);
            }
            this.complete(1);
        };
        // The messages that say that a side's memory is ready arrive in the same memory. So the
        // second side sends its own when it has the other: no message arrives after a write.
        if !first {
            self.receive(1, 1);
        }
        let open = self.send(8, true);
        self.complete(open);
        if first {
            self.receive(1, 1);
        }
        let warm = unmeasured(count);
        let mut begin = Instant::now();
        for i in 0..count {
            if i == warm {
                begin = Instant::now();
            }
            let number = (i % 255) as u8 + 1;
            if first {
                send(self, number);
            }
            let mut patience = Patience::default();
            // SAFETY: as above.
            while unsafe { last.read_volatile() } != number {
                self.poll(self.tx, 1);
                patience.wait();
            }
            if !first {
                send(self, number);
            }
        }
        begin.elapsed().as_nanos() as f64 / (count - warm) as f64 / 2.0
    }

    /// Accesses the peer's memory, one operation at a time or in windows.
    pub(super) fn access(&mut self, op: Op, len: usize, count: u64) -> f64 {
        if !self.side.is_first() {
            // the second side makes progress for providers that need it
            self.receive(1, 1);
            let open = self.send(8, true);
            self.complete(open);
            return 0.0;
        }
        let window = match op {
            Op::WriteStream | Op::ReadStream | Op::WriteStreamMore | Op::WriteStreamNext => WINDOW,
            _ => 1,
        };
        let windows = count.div_ceil(window);
        let warm = unmeasured(windows);
        let mut begin = Instant::now();
        for i in 0..windows {
            if i == warm {
                begin = Instant::now();
            }
            let mut done = 0;
            let mut patience = Patience::default();
            for at in 0..window {
                while !self.post_access(op, len, (at, window)) {
                    done += self.poll(self.tx, 16);
                    patience.wait();
                }
            }
            self.complete(window - done);
        }
        let nanos = begin.elapsed().as_nanos() as f64 / ((windows - warm) * window) as f64;
        let open = self.send(8, true);
        self.complete(open);
        self.receive(1, 1);
        nanos
    }
}
