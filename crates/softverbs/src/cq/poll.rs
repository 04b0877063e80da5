//! `ibv_poll_cq` and `ibv_req_notify_cq`.

use std::sync::atomic::Ordering;

use rdma_core_sys::{ibv_cq, ibv_wc};

use super::{Cq, Cqe, Retires, Ring};
use crate::process::Process;
use crate::sys::{Errno, Res};

/// Number of consecutive polls that find completions in the queue, after which one makes progress.
const MOST_WITHOUT_PROGRESS: u32 = 8;

/// Writes at most `most` completions to `wc`. Returns their number, or −1 after an overrun.
///
/// # Safety
/// `cq` must be live and `wc` have room.
pub(crate) unsafe fn poll_cq(cq: *mut ibv_cq, most: i32, wc: *mut ibv_wc) -> i32 {
    // SAFETY: the caller promises a live queue.
    let cq = unsafe { Cq::from_ptr(cq) };
    let process = cq.process();
    if process.forked() {
        return -1;
    }
    let mut poll = Poll {
        cq,
        wc,
        most: most.max(0).cast_unsigned(),
        got: 0,
    };
    if cq.may_have_some() {
        // SAFETY: the caller promises room.
        let got = unsafe { take(cq, process, poll.most, wc) };
        if got > 0 {
            cq.count_full_poll(process);
            return got;
        }
    }
    if poll.most == 0 {
        return 0;
    }
    cq.yielding.before_look();
    let polls = cq.polls.load(Ordering::Relaxed).wrapping_add(1);
    let looked = process.progress_of_poll(polls, &mut poll);
    cq.polls
        .store(if looked { 0 } else { polls }, Ordering::Relaxed);
    if poll.got > 0 {
        cq.yielding.poll_was_full();
        return poll.got.cast_signed();
    }
    if cq.may_have_some() {
        // SAFETY: the caller promises room.
        let got = unsafe { take(cq, process, poll.most, wc) };
        if got != 0 {
            return got;
        }
    }
    cq.yielding.poll_was_empty();
    0
}

/// Progress for a program whose polls are full each time, with completions of requests that it has
/// just posted: messages that have arrived get their completions in the queue, behind those. This
/// poll does all other work too. If it left the rest to a later poll, as polls that take messages
/// do, the count would start again before that poll.
#[cold]
fn progress_behind(cq: &Cq, process: &Process) {
    process.progress();
    cq.polls.store(0, Ordering::Relaxed);
}

/// A poll of an empty queue, during which messages are taken from the rings. Their completions need
/// not go through the queue.
pub(crate) struct Poll {
    cq: *const Cq,
    wc: *mut ibv_wc,
    most: u32,
    got: u32,
}

impl Poll {
    /// A poll that takes no completion, for progress outside of polls.
    pub(crate) fn none() -> Self {
        Self {
            cq: std::ptr::null(),
            wc: std::ptr::null_mut(),
            most: 0,
            got: 0,
        }
    }

    /// Whether the caller's array is full; never true for [`Self::none`].
    #[inline(always)]
    pub(crate) fn is_full(&self) -> bool {
        self.got == self.most && self.got > 0
    }

    /// The slot where a receive's completion on `cq` may be written directly, with its slot in the
    /// receive queue freed; `None` if the completion must go into the queue. The caller holds the
    /// lock of the receive queue, and no thread holds back an earlier completion.
    #[inline(always)]
    pub(crate) fn wc_slot(&mut self, cq: &Cq) -> Option<WcSlot> {
        // Completions that other threads have put into the queue come first: they were added before
        // those threads released the lock of the receive queue. If an event was requested, the
        // completion must go through the queue, which raises the event.
        let direct = std::ptr::eq(self.cq, cq)
            && self.got < self.most
            && !cq.filled.load(Ordering::Acquire)
            && !cq.is_armed();
        if !direct {
            return None;
        }
        // SAFETY: `got` is below `most`, for which `poll_cq`'s caller has room.
        let slot = unsafe { self.wc.add(self.got as usize) };
        self.got += 1;
        Some(WcSlot(slot))
    }
}

/// Room for one completion.
pub(crate) struct WcSlot(*mut ibv_wc);

impl WcSlot {
    #[inline(always)]
    pub(crate) fn put(self, cqe: &Cqe) {
        // SAFETY: made for one completion by `Poll::wc_slot`.
        unsafe { write(self.0, cqe) };
    }
}

/// The next completion for `ibv_start_poll` and `ibv_next_poll`.
///
/// # Errors
/// `ENOENT`: no completion. `EIO`: overrun, or this is a forked child.
pub(super) fn next_one(cq: &Cq) -> Res<Cqe> {
    let process = cq.process();
    if process.forked() {
        return Err(Errno(libc::EIO));
    }
    for last in [false, true] {
        {
            let mut ring = cq.ring.lock();
            if ring.len() > 0 {
                cq.yielding.poll_was_full();
                let cqe = next(&mut ring, process);
                cq.restart_if_empty(&mut ring);
                drop(ring);
                cq.count_full_poll(process);
                return Ok(cqe);
            }
            if ring.overrun {
                return Err(Errno(libc::EIO));
            }
        }
        if !last {
            cq.yielding.before_look();
            process.progress();
        }
    }
    cq.yielding.poll_was_empty();
    Err(Errno(libc::ENOENT))
}

/// # Safety
/// `wc` must have room for `most`.
#[inline(never)]
unsafe fn take(cq: &Cq, process: &Process, most: u32, wc: *mut ibv_wc) -> i32 {
    let mut ring = cq.ring.lock();
    let count = ring.len().min(most);
    if count != 0 {
        cq.yielding.poll_was_full();
    }
    for i in 0..count {
        let cqe = next(&mut ring, process);
        // SAFETY: `i` is below `most`.
        unsafe { write(wc.add(i as usize), &cqe) };
    }
    if count == 0 && ring.overrun {
        return -1;
    }
    cq.restart_if_empty(&mut ring);
    count.cast_signed()
}

impl Cq {
    /// Counts a poll that has found completions in the queue, and makes progress behind each
    /// [`MOST_WITHOUT_PROGRESS`]th one. The caller holds no lock.
    #[inline(always)]
    fn count_full_poll(&self, process: &Process) {
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if polls >= MOST_WITHOUT_PROGRESS {
            progress_behind(self, process);
        }
    }

    /// Behind a poll. `ring` is the queue's own.
    #[inline]
    fn restart_if_empty(&self, ring: &mut Ring) {
        if ring.len() == 0 && !ring.overrun {
            (ring.head, ring.tail, ring.announced) = (0, 0, 0);
            ring.is_event_read = false;
            // Release: after the slots that the completions freed, for threads that read only this
            // flag.
            self.filled.store(false, Ordering::Release);
        }
    }
}

/// Takes the first completion. The ring must not be empty.
#[inline]
fn next(ring: &mut Ring, process: &Process) -> Cqe {
    let cqe = ring.entries[ring.slot(ring.tail)];
    ring.tail = ring.tail.wrapping_add(1);
    match cqe.retires {
        Retires::Nothing => {}
        Retires::Send => {
            if let Some(qp) = process.qp_by_num(cqe.qp_num) {
                qp.send_polled(cqe.done);
            }
        }
        Retires::Recv => {
            if let Some(qp) = process.qp_by_num(cqe.qp_num) {
                qp.recv_polled(cqe.done);
            }
        }
    }
    cqe
}

/// # Safety
/// `wc` must be writable.
#[inline]
unsafe fn write(wc: *mut ibv_wc, cqe: &Cqe) {
    // SAFETY: the caller promises a writable structure; fields are written one by one as it is
    // not initialised.
    unsafe {
        (&raw mut (*wc).wr_id).write(cqe.wr_id);
        (&raw mut (*wc).status).write(cqe.status);
        (&raw mut (*wc).opcode).write(cqe.opcode);
        (&raw mut (*wc).vendor_err).write(cqe.vendor_err);
        (&raw mut (*wc).byte_len).write(cqe.byte_len);
        (&raw mut (*wc).__bindgen_anon_1)
            .cast::<u32>()
            .write(cqe.imm);
        (&raw mut (*wc).qp_num).write(cqe.qp_num);
        (&raw mut (*wc).src_qp).write(cqe.src_qp);
        (&raw mut (*wc).wc_flags).write(cqe.wc_flags);
        (&raw mut (*wc).pkey_index).write(0);
        (&raw mut (*wc).slid).write(0);
        (&raw mut (*wc).sl).write(0);
        (&raw mut (*wc).dlid_path_bits).write(0);
    }
}

/// `ibv_req_notify_cq`.
///
/// # Safety
/// `cq` must be live.
pub(crate) unsafe fn req_notify(cq: *mut ibv_cq, solicited_only: i32) -> i32 {
    // SAFETY: the caller promises a live queue.
    let cq = unsafe { Cq::from_ptr(cq) };
    if cq.process().forked() {
        return libc::EIO;
    }
    cq.arm(solicited_only != 0);
    0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ptr::null_mut;

    use rdma_core_sys::{IBV_QPT_RC, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, IBV_WR_SEND};

    use super::super::{CqInit, create, test_context};
    use super::*;
    use crate::testing::{Buffer, End, send_wr};

    /// Posts a request of 8 bytes, from one part of the buffer to another one.
    fn post(end: &End, buffer: &Buffer, opcode: u32) {
        let mut sge = buffer.sge(8);
        let mut wr = send_wr(opcode);
        (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
        let (addr, rkey) = buffer.place();
        (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (addr + 32, rkey);
        assert_eq!(end.post_send(&mut wr), 0);
    }

    /// The queue is never empty, as each request is executed in its call.
    #[test]
    fn completions_that_are_read_one_by_one_do_not_hide_a_receive() {
        let (end, buffer) = (End::new(IBV_QPT_RC, false), Buffer::new(64));
        end.connect(end.number());
        // SAFETY: a live queue.
        let cq = unsafe { Cq::from_ptr(end.cq) };
        let receive = |id| assert_eq!(end.post_recv(&mut [buffer.sge(8)], id), 0);
        // the first message makes the ring
        receive(1);
        post(&end, &buffer, IBV_WR_SEND);
        for _ in 0..2 {
            let wc = (0..1_000_000).find_map(|_| next_one(cq).ok());
            assert_eq!(wc.unwrap().status, IBV_WC_SUCCESS);
        }
        receive(99);
        post(&end, &buffer, IBV_WR_SEND);
        let found = (0..64).any(|_| {
            post(&end, &buffer, IBV_WR_RDMA_WRITE);
            next_one(cq).unwrap().wr_id == 99
        });
        assert!(found);
    }

    /// The memory of a long queue stays unused, with either kind of poll.
    #[test]
    fn an_emptied_queue_starts_at_its_first_entry() {
        let init = CqInit {
            context: test_context(),
            cqe: 8,
            cq_context: null_mut(),
            channel: null_mut(),
            comp_vector: 0,
            extended: Some(0),
        };
        // SAFETY: a live context; the queue is never destroyed.
        let cq = unsafe { create(&init) }.unwrap();
        for one_by_one in [false, true] {
            for _ in 0..3 {
                cq.push(Cqe::default(), false);
            }
            for _ in 0..3 {
                assert!(cq.may_have_some());
                if one_by_one {
                    next_one(cq).unwrap();
                } else {
                    // SAFETY: all zeros is a completion; a live queue, and room for one.
                    unsafe {
                        let mut wc: ibv_wc = std::mem::zeroed();
                        assert_eq!(poll_cq(cq.as_ptr(), 1, &raw mut wc), 1);
                    }
                }
            }
            let ring = cq.ring.lock();
            assert_eq!((ring.head, ring.tail), (0, 0));
            assert!(!cq.may_have_some());
        }
    }
}
