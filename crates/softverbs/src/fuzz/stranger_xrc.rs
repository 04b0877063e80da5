//! A peer that writes arbitrary bytes into the shared parts of XRC: the domain's file, its shared
//! receive queues, its messages.
//!
//! The peer is that of [`super::stranger`]. The domain is this process's own, because any member
//! may write all of it.

use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use rdma_core_sys::*;

use super::Input;
use super::stranger::{COUNT, DESC_AT, INDEX, KEY, ORDER_AT, Stranger, child, show_order};
use super::xrc::Targeted;
use crate::entry::PANICKED;
use crate::process::Process;
use crate::ring::Header;
use crate::segment::layout::{OWNED, SEGMENT_SIZE, desc, qp_num, srq, xrc};
use crate::srq::{Shared, srq_num};
use crate::sync::Arc;
use crate::testing::{Buffer, End, SENDS, attributes, device, request, verbs};
use crate::xrc::Domain;

/// The peer's shared receive queue, and the queue pair number in its messages.
const SRQ: u32 = 1;
const QP: u32 = 3;
const SRQ_AT: usize = srq::AT + srq::STRIDE * SRQ as usize;

/// The entry of the queue as a process that follows the protocol writes it, in this domain, with
/// all receives posted.
fn show_queue(stranger: &Stranger, domain: u32) {
    let map = &stranger.segment.map;
    let stride = desc::stride(2) as u32;
    for (at, value) in [
        (srq::COUNT, COUNT),
        (srq::DESC_COUNT, COUNT),
        (srq::DESC_STRIDE, stride),
        (srq::XRCD, domain),
        (srq::PD, 1),
        (srq::CQ, 0),
        (srq::HINT, 1),
        (srq::WAITING, 0),
        (srq::STAMP, 5),
    ] {
        map.u32(SRQ_AT + at).store(value, Ordering::Relaxed);
    }
    show_order(map);
    map.u64(SRQ_AT + srq::DESC_AT)
        .store(DESC_AT as u64, Ordering::Relaxed);
    map.u64(SRQ_AT + srq::ORDER_AT)
        .store(ORDER_AT as u64, Ordering::Release);
}

/// A queue pair that is connected to the stranger, so that there is a ring from it to here.
fn neighbour(stranger: &Stranger) -> End {
    let end = End::new(IBV_QPT_RC, false);
    let mut attr = attributes(qp_num(stranger.slot, INDEX));
    attr.qp_state = IBV_QPS_INIT;
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    assert_eq!(end.modify(&mut attr, mask), 0);
    attr.qp_state = IBV_QPS_RTR;
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    assert_eq!(end.modify(&mut attr, mask), 0);
    end
}

/// Moves the peer's queue, or changes the sizes of its parts. A sender that has read them before
/// does not read them again during this life of the queue.
fn misplace(input: &mut Input<'_>, stranger: &Stranger) {
    let map = &stranger.segment.map;
    let end = (SEGMENT_SIZE as u64).wrapping_add(input.u64() % 8192 / 32 * 32) - 4096;
    let place = if input.u8() < 128 { end } else { input.edgy() };
    match input.u8() % 4 {
        0 => map
            .u64(SRQ_AT + srq::ORDER_AT)
            .store(place, Ordering::Relaxed),
        1..=2 => map
            .u64(SRQ_AT + srq::DESC_AT)
            .store(place, Ordering::Relaxed),
        _ => {
            let part = if input.u8() < 128 {
                srq::COUNT
            } else {
                srq::DESC_STRIDE
            };
            let value = if input.u8() < 128 {
                1 << (input.u8() % 32)
            } else {
                input.edgy() as u32
            };
            map.u32(SRQ_AT + part).store(value, Ordering::Relaxed);
        }
    }
}

/// The queue pair that sends through the target, to any queue.
struct Initiator {
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
}

impl Initiator {
    fn new() -> Self {
        let device = device();
        // SAFETY: all objects are live and of one context.
        unsafe {
            let cq = (verbs().ibv_create_cq)(device.context, 64, null_mut(), null_mut(), 0);
            let mut init = ibv_qp_init_attr_ex {
                comp_mask: IBV_QP_INIT_ATTR_PD,
                qp_type: IBV_QPT_XRC_SEND,
                pd: device.pd,
                send_cq: cq,
                sq_sig_all: 1,
                ..Default::default()
            };
            init.cap.max_send_wr = SENDS;
            init.cap.max_send_sge = 2;
            init.cap.max_inline_data = 64;
            let qp = ibv_create_qp_ex(device.context, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            Self { cq, qp }
        }
    }

    fn number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) {
        // SAFETY: live, with valid attributes.
        let ret = unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) };
        assert_eq!(ret, 0);
    }

    fn reset(&self) {
        let mut attr = attributes(0);
        attr.qp_state = IBV_QPS_RESET;
        self.modify(&mut attr, IBV_QP_STATE);
    }

    fn connect(&self, target: u32) {
        let mut attr = attributes(target);
        attr.rnr_retry = 1;
        attr.retry_cnt = 1;
        for (state, mask) in [
            (
                IBV_QPS_INIT,
                IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            ),
            (
                IBV_QPS_RTR,
                IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
            ),
            (
                IBV_QPS_RTS,
                IBV_QP_SQ_PSN
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            ),
        ] {
            attr.qp_state = state;
            self.modify(&mut attr, IBV_QP_STATE | mask);
        }
    }

    fn post(&self, wr: &mut ibv_send_wr) -> bool {
        let mut bad = null_mut();
        // SAFETY: live, a chain of one.
        unsafe { ibv_post_send(self.qp, wr, &raw mut bad) == 0 }
    }
}

impl Drop for Initiator {
    fn drop(&mut self) {
        // SAFETY: live, and not used afterwards.
        unsafe {
            assert_eq!((verbs().ibv_destroy_qp)(self.qp), 0);
            assert_eq!((verbs().ibv_destroy_cq)(self.cq), 0);
        }
    }
}

/// Connects the two. If a message from the stranger fails the target in between, this is repeated.
fn connect(through: &Targeted, initiator: &Initiator) {
    let all = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    let connected = (0..8).any(|_| {
        through.reset();
        through.connect(initiator.number(), all)
    });
    assert!(connected, "the target can't be connected");
    initiator.connect(through.number());
}

fn poll(cq: *mut ibv_cq, outstanding: &mut HashSet<u64>) {
    // SAFETY: live, room for one; all zeros is a value of it.
    unsafe {
        let mut wc: ibv_wc = std::mem::zeroed();
        loop {
            let count = ibv_poll_cq(cq, 1, &raw mut wc);
            assert!(count >= 0);
            if count == 0 {
                return;
            }
            assert!(outstanding.remove(&wc.wr_id), "completed twice");
        }
    }
}

/// Bytes of the inbox that receives refer to. Nothing is written after them.
const INBOX: usize = 4096;

/// One run: the objects of this process, and what it has posted.
struct Run {
    stranger: &'static Stranger,
    /// The domain's number, and the domain.
    number: u32,
    domain: Arc<Domain>,
    /// Offset of the target's entry in the domain.
    target: usize,
    initiator: Initiator,
    through: Targeted,
    /// Index of this process's shared receive queue, and the life that messages to it must name.
    own: u32,
    life: u8,
    outbox: Buffer,
    inbox: Buffer,
    /// Receives of this process's queue that the stranger has claimed.
    claimed: Vec<u32>,
    sent: HashSet<u64>,
    received: HashSet<u64>,
}

impl Run {
    /// The connected objects, and a queue pair of the stranger's ring.
    fn new() -> (Self, End) {
        let stranger = child();
        let (outbox, inbox) = (Buffer::new(16 << 10), Buffer::new(2 * INBOX));
        let through = Targeted::new(true);
        let initiator = Initiator::new();
        let process = Process::open().unwrap();
        let (number, index) = xrc::split_target(through.number()).unwrap();
        let domain: Arc<Domain> = process.domains.find(process, number).unwrap().unwrap();
        let target = domain.entry(index).unwrap();
        stranger.be_honest(initiator.number(), true);
        let neighbour = neighbour(stranger);
        show_queue(stranger, number);
        connect(&through, &initiator);
        let own = through.srqn & 0x3fff;
        let stamp = srq::AT + srq::STRIDE * own as usize + srq::STAMP;
        let life = process.segment.map.u32(stamp).load(Ordering::Relaxed) as u8;
        let this = Self {
            stranger,
            number,
            domain,
            target,
            initiator,
            through,
            own,
            life,
            outbox,
            inbox,
            claimed: Vec::new(),
            sent: HashSet::new(),
            received: HashSet::new(),
        };
        (this, neighbour)
    }

    /// Changes one word of the domain, of the peer's queue, or of the words of this process that
    /// senders write.
    fn scribble(&self, input: &mut Input<'_>) {
        match input.u8() % 5 {
            0 => {
                let half = if input.u8() < 128 { 0 } else { OWNED };
                let at = half + SRQ_AT + 8 * input.below(srq::STRIDE / 8);
                let map = &self.stranger.segment.map;
                map.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
            1 => self.stranger.scribble(input),
            2 => {
                let map = &Process::open().unwrap().segment.map;
                let entry = srq::AT + srq::STRIDE * self.own as usize;
                let order = map.u64(entry + srq::ORDER_AT).load(Ordering::Relaxed) as usize;
                let at = match input.u8() % 6 {
                    0 => entry + srq::HINT,
                    // names, and in some cases a request to ring them at the next post
                    1..=2 => {
                        let word = srq::WAITERS + 8 * input.below(srq::WAITER_WORDS);
                        map.u64(entry + word).store(input.edgy(), Ordering::Relaxed);
                        entry + srq::WAITING
                    }
                    _ => order + 8 * input.below(COUNT as usize),
                };
                map.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
            3 => {
                let at = self.target + 8 * input.below(xrc::STRIDE / 8);
                let map = &self.domain.map;
                map.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
            _ => {
                let at = 8 * input.below(16);
                // With a larger number of entries, readers would allocate the pages of entries
                // that do not exist.
                let value = if at == xrc::COUNT {
                    input.edgy() % 129
                } else {
                    input.edgy()
                };
                self.domain.map.u64(at).store(value, Ordering::Relaxed);
            }
        }
    }

    /// The stranger claims a receive in some cases, and sends messages.
    fn send_messages(&mut self, input: &mut Input<'_>) {
        let map = &Process::open().unwrap().segment.map;
        if input.u8() < 160
            && let Some(shared) = Shared::read(map, self.own)
        {
            let claim = shared.claim(map, self.stranger.slot);
            self.claimed.extend(claim.map(|claim| claim.index));
        }
        // In some cases more messages than the peer has claimed receives.
        let messages = if input.u8() < 200 { 1 } else { 2 };
        for _ in 0..messages {
            let stranger = self.stranger;
            stranger.send_any(input, 32, |input| self.message(input));
        }
    }

    /// A message to this process's queue, for one of the receives that the peer claimed last or for
    /// any receive.
    fn message(&self, input: &mut Input<'_>) -> Header {
        let wrong = |input: &mut Input<'_>| u32::from(input.u8() < 8);
        let last = self.claimed.len().saturating_sub(1 + input.below(2));
        let index = match self.claimed.get(last) {
            Some(&index) if input.u8() < 224 => index,
            _ => u32::from(input.u8() % 9),
        };
        Header {
            op: if input.u8() < 128 { 0 } else { input.u8() % 8 },
            flags: if input.u8() < 200 {
                8
            } else {
                input.u8() & 0x0f
            },
            dst_qpn: self.through.number() ^ wrong(input),
            incarnation: 1,
            len: u32::from(input.u16()) % 8193,
            imm: 7,
            msn: (self.own ^ wrong(input)) << 16 | index,
            src_qpn: qp_num(self.stranger.slot, QP),
            life: self.life ^ wrong(input) as u8,
        }
    }

    fn post_recv(&mut self, input: &mut Input<'_>, id: u64) {
        let mut sges = [self.inbox.part(input, INBOX)];
        if self.through.post_recv(&mut sges, id) == 0 {
            self.received.insert(id);
        }
    }

    /// Posts a request to the stranger's memory, or to a queue.
    fn post_send(&mut self, input: &mut Input<'_>, id: u64) {
        let mut sges = [self.outbox.piece(input), self.outbox.piece(input)];
        match input.u8() % 8 {
            0..=1 => (sges[0].length, sges[1].length) = (8, 0),
            2..=6 => (sges[0].length, sges[1].length) = (sges[0].length % 600, 0),
            _ => {}
        }
        let count = if sges[1].length == 0 { 1 } else { 2 };
        let mut wr = request(input, &mut sges[..count], id);
        let addr = self.stranger.memory.wrapping_add(match input.u8() % 16 {
            0 => input.edgy(),
            _ => 8 * u64::from(input.u8()),
        });
        if matches!(
            wr.opcode,
            IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_CMP_AND_SWP
        ) {
            wr.wr.atomic.remote_addr = addr;
            wr.wr.atomic.rkey = KEY;
        } else {
            wr.wr.rdma.remote_addr = addr;
            wr.wr.rdma.rkey = KEY;
        }
        wr.qp_type.xrc.remote_srqn = match input.u8() {
            0..=199 => srq_num(self.stranger.slot, SRQ),
            200..=252 => self.through.srqn,
            _ => input.u32(),
        };
        if self.initiator.post(&mut wr) {
            self.sent.insert(id);
        }
    }

    /// Makes a new connection. The completions of the old one no longer occur.
    fn reconnect(&mut self, input: &mut Input<'_>) {
        self.initiator.reset();
        self.through.reset();
        poll(self.initiator.cq, &mut self.sent);
        self.sent.clear();
        show_queue(self.stranger, self.number);
        if input.u8() < 64 {
            misplace(input, self.stranger);
        }
        connect(&self.through, &self.initiator);
    }

    /// Polls the receives, which write no other bytes.
    fn poll_receives(&mut self) {
        poll(self.through.cq, &mut self.received);
        assert!(self.inbox.is_empty_from(INBOX), "behind the receives");
    }

    /// Ends the connection: all requests complete.
    fn flush(&mut self) {
        let mut attr = attributes(0);
        attr.qp_state = IBV_QPS_ERR;
        self.initiator.modify(&mut attr, IBV_QP_STATE);
        // A flush may need more than one poll.
        for _ in 0..2000 {
            poll(self.initiator.cq, &mut self.sent);
            if self.sent.is_empty() {
                break;
            }
        }
        assert!(
            self.sent.is_empty(),
            "{} requests do not end",
            self.sent.len()
        );
    }
}

/// For any content of a domain's file, of a peer's shared queue and of its messages: requests of
/// XRC and receives complete, none of them twice, and only posted receives are written.
///
/// # Panics
/// If this property does not hold.
pub fn stranger_xrc(data: &[u8]) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(data);
    let (mut run, neighbour) = Run::new();
    for id in 0..200 {
        if input.is_empty() {
            break;
        }
        match input.u8() % 16 {
            0 => run.scribble(&mut input),
            1..=4 => run.send_messages(&mut input),
            5..=7 => run.post_recv(&mut input, id),
            8..=11 => run.post_send(&mut input, id),
            12..=13 => run.reconnect(&mut input),
            _ => {
                poll(run.initiator.cq, &mut run.sent);
                run.poll_receives();
            }
        }
        if input.u8() == 0 {
            let ring = &run.stranger.ring;
            ring.u32(64).store(input.u32(), Ordering::Relaxed);
        }
    }
    run.flush();
    drop(neighbour);
    run.poll_receives();
    assert!(!PANICKED.load(Ordering::Relaxed), "a call has panicked");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::{Consumer, op};
    use crate::segment::layout::{Fault, StateWord, qp};
    use crate::srq::before_claim;
    use crate::xrc::{hold_domain, in_reset};
    use std::time::Duration;

    /// The next message of this process to the stranger.
    fn next(ring: &mut Consumer) -> Option<Header> {
        let message = ring.peek().unwrap()?;
        ring.advance(&message);
        Some(message.header)
    }

    /// While the sender is stopped in front of its claim, the owner destroys the queue and creates
    /// another one with the same number. The sender claims a receive of that one.
    #[test]
    fn a_late_claim_is_returned_to_the_queue_of_the_receive() {
        let stranger = child();
        let process = Process::open().unwrap();
        let ring = stranger.segment.open_ring(process.slot).unwrap();
        let mut ring = Consumer::new(ring, process.identity.cookie);
        let (run, neighbour) = Run::new();
        let (addr, lkey) = run.outbox.place();
        let stamp = stranger.segment.map.u32(SRQ_AT + srq::STAMP);
        // a request of two sges takes the general path; the first one connects
        let rounds = [(1, 5, 0), (2, 6, 1), (1, 7, 3)];
        for (num_sge, life, first) in rounds {
            let mut sges = [ibv_sge {
                addr,
                length: 8,
                lkey,
            }; 2];
            // SAFETY: all zeros is a value of it.
            let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
            (wr.opcode, wr.send_flags) = (IBV_WR_SEND, IBV_SEND_SIGNALED);
            (wr.sg_list, wr.num_sge) = (sges.as_mut_ptr(), num_sge);
            wr.qp_type.xrc.remote_srqn = srq_num(stranger.slot, SRQ);
            let mut expected = vec![(op::SEND, first)];
            if life != 5 {
                before_claim::once(move || stamp.store(life, Ordering::Release));
                expected = vec![(op::RETURN, first), (op::SEND, first + 1)];
            }
            assert!(run.initiator.post(&mut wr));
            assert!(!before_claim::is_left());
            let mut sent = HashSet::from([0]);
            for _ in 0..1_000_000 {
                poll(run.initiator.cq, &mut sent);
                if sent.is_empty() {
                    break;
                }
            }
            for (op, index) in expected {
                let header = next(&mut ring).expect("a message");
                let expected = (op, SRQ << 16 | index, life as u8);
                assert_eq!((header.op, header.msn, header.life), expected);
            }
            assert!(sent.is_empty() && next(&mut ring).is_none());
        }
        drop(neighbour);
    }

    /// Another member changes the word of a target in RESET between any two steps of a call.
    #[test]
    fn calls_on_a_target_end_whatever_a_member_writes() {
        let process = Process::open().unwrap();
        let targeted = Targeted::new(true);
        let (number, index) = xrc::split_target(targeted.number()).unwrap();
        let domain = process.domains.find(process, number).unwrap().unwrap();
        let at = xrc::entry_at(index) + qp::STATE;
        in_reset::set(Some(Box::new(move || {
            let word = domain.map.u64(at);
            let incarnation = StateWord(word.load(Ordering::Relaxed)).incarnation() + 1;
            let reset = StateWord::new(IBV_QPS_RESET, 0, 0, incarnation);
            word.store(reset.0, Ordering::Relaxed);
        })));
        let mut attr = attributes(0);
        attr.qp_state = IBV_QPS_INIT;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(targeted.modify(&mut attr, mask), libc::EBUSY);
        // SAFETY: a live queue pair, which stays if the call fails.
        let destroyed = unsafe { (verbs().ibv_destroy_qp)(targeted.qp) };
        assert_eq!(destroyed, libc::EBUSY);
        in_reset::set(None);
    }

    /// The types of the unread events of a queue pair.
    fn events_of(qp: *mut ibv_qp) -> Vec<u32> {
        let context = device().context;
        let mut types = Vec::new();
        // SAFETY: a live context, and a descriptor of its own; each event is acknowledged once; all
        // members are pointers.
        unsafe {
            libc::fcntl((*context).async_fd, libc::F_SETFL, libc::O_NONBLOCK);
            let mut event: ibv_async_event = std::mem::zeroed();
            while (verbs().ibv_get_async_event)(context, &raw mut event) == 0 {
                if event.element.qp == qp {
                    types.push(event.event_type);
                }
                (verbs().ibv_ack_async_event)(&raw mut event);
            }
        }
        types
    }

    /// Another member writes failures of ever new connections, while nothing reads the events.
    #[test]
    fn a_target_has_one_unread_event_of_each_type() {
        let process = Process::open().unwrap();
        let targeted = Targeted::new(true);
        let (number, index) = xrc::split_target(targeted.number()).unwrap();
        let domain = process.domains.find(process, number).unwrap().unwrap();
        let word = |at: usize| domain.map.u64(xrc::entry_at(index) + at);
        let mut incarnation = StateWord(word(qp::STATE).load(Ordering::Relaxed)).incarnation();
        for _ in 0..2 {
            for round in 0..300 {
                let fault = [Fault::Access, Fault::Request, Fault::Fatal][round % 3];
                // one of a connection that was reset since, and one of the present one
                for at in [xrc::FAILED, qp::STATE] {
                    incarnation += 1;
                    let failed = StateWord::new(IBV_QPS_RTS, 0, 0, incarnation).failed(fault);
                    word(at).store(failed.0, Ordering::Relaxed);
                }
                let (mut attr, mut init) = (attributes(0), ibv_qp_init_attr::default());
                // SAFETY: live, with writable outputs.
                let ret =
                    unsafe { (verbs().ibv_query_qp)(targeted.qp, &raw mut attr, 0, &raw mut init) };
                assert_eq!((ret, attr.qp_state), (0, IBV_QPS_ERR));
            }
            let expected = [
                IBV_EVENT_QP_ACCESS_ERR,
                IBV_EVENT_QP_REQ_ERR,
                IBV_EVENT_QP_FATAL,
            ];
            assert_eq!(events_of(targeted.qp), expected);
        }
    }

    /// Time in which a call gets the lock is not time in which other members change the word.
    #[test]
    fn a_call_that_waited_for_the_lock_is_not_refused() {
        let process = Process::open().unwrap();
        let targeted = Targeted::new(true);
        let (number, _) = xrc::split_target(targeted.number()).unwrap();
        let while_another_holds_it = |call: &dyn Fn()| {
            let held = hold_domain(process.registry().file(), number).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(600));
                    drop(held);
                });
                call();
            });
        };
        while_another_holds_it(&|| {
            let mut attr = attributes(0);
            attr.qp_state = IBV_QPS_INIT;
            let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
            assert_eq!(targeted.modify(&mut attr, mask), 0);
        });
        let targeted = std::cell::Cell::new(Some(targeted));
        // destroys its queue pair, and expects success
        while_another_holds_it(&|| drop(targeted.take()));
    }
}
