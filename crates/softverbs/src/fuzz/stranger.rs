//! A peer that writes arbitrary bytes into all memory that it shares.
//!
//! The peer is a child process that only sleeps. This process writes the child's segment. An
//! initiator that uses these bytes reads or writes the child's memory, never this process's.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

use rdma_core_sys::*;

use super::Input;
use crate::entry::PANICKED;
use crate::process::Process;
use crate::registry::{Entry, Registry};
use crate::ring::{Consumer, Header, Producer, RING_SIZE, SLOTS_AT};
use crate::segment::layout::{
    Credit, OWNED, StateWord, announce, arena, cq, desc, header, order, qp, qp_num, region, rings,
    srq, stripe,
};
use crate::segment::{Mapping, OwnSegment};
use crate::sys::{self, Identity, Pipe};
use crate::testing::{Buffer, End, attributes, device, request};

pub(crate) const INDEX: u32 = 2;
const QP: usize = qp::AT + qp::STRIDE * INDEX as usize;
pub(crate) const DESC_AT: usize = arena::AT + 4096;
pub(crate) const ORDER_AT: usize = order::AT;
pub(crate) const COUNT: u32 = 8;
/// The region in the peer's table.
pub(crate) const KEY: u32 = 1 << 8 | 1;

pub(crate) struct Stranger {
    pub(crate) slot: u32,
    pub(crate) segment: OwnSegment,
    /// The ring that it made for this process.
    pub(crate) ring: Mapping,
    /// Memory of the child that it registered.
    pub(crate) memory: u64,
}

/// The words of a shared receive queue whose receives are all posted, from position 1 on.
pub(crate) fn show_order(map: &Mapping) {
    for index in 0..u64::from(COUNT) {
        let position = index + 1;
        let place = (position % u64::from(COUNT)) as usize;
        map.u64(ORDER_AT + 8 * place)
            .store(position << 32 | 1 << 16 | index, Ordering::Relaxed);
    }
}

pub(crate) fn child() -> &'static Stranger {
    static STRANGER: OnceLock<Stranger> = OnceLock::new();
    STRANGER.get_or_init(|| {
        device();
        let process = Process::open().unwrap();
        let cookie = sys::random() | 1;
        let segment = OwnSegment::create(cookie, process.node, true).unwrap();
        for (at, len) in [
            (cq::AT, cq::STRIDE),
            (QP, qp::STRIDE),
            (srq::AT, srq::STRIDE),
        ] {
            segment.back_halves(at, len).unwrap();
        }
        for (at, len) in [
            (region::AT, 2 * region::STRIDE),
            (order::AT, 1 << 12),
            (arena::AT, 1 << 16),
        ] {
            segment.back(at, len).unwrap();
        }
        Consumer::new(
            segment.open_ring(process.slot).unwrap(),
            process.identity.cookie,
        );
        let ring = Mapping::part(&segment.map, rings::ring_at(process.slot), RING_SIZE);
        let at = announce::AT + announce::STRIDE * process.slot as usize;
        let map = &segment.map;
        map.u64(at + announce::GRANTED)
            .store(process.identity.cookie, Ordering::Release);
        let memory = Box::leak(vec![0u8; 1 << 16].into_boxed_slice()).as_ptr() as u64;
        let life = Pipe::new().unwrap();
        map.u32(header::LIFE)
            .store(life.read_fd().cast_unsigned(), Ordering::Relaxed);
        map.u64(header::LIFE_INODE)
            .store(life.inode(), Ordering::Relaxed);
        // SAFETY: the child calls only functions that are permitted after fork, and ends with this
        // process.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
        }
        assert!(pid > 0);
        let pid = pid.cast_unsigned();
        let entry = Entry {
            identity: Identity {
                pid,
                start_time: sys::start_time(pid).unwrap(),
                cookie,
            },
            segment_fd: segment.fd(),
            segment_inode: segment.inode().unwrap(),
            node: process.node,
        };
        let slot = Registry::open().unwrap().join(entry).unwrap();
        // The child has the descriptors, and keeps them open.
        drop(life);
        Stranger {
            slot,
            segment,
            ring,
            memory,
        }
    })
}

impl Stranger {
    /// The content of the segment of a process that follows the protocol, with a queue pair that is
    /// connected to `dest`.
    pub(crate) fn be_honest(&self, dest: u32, shared: bool) {
        let map = &self.segment.map;
        let process = Process::open().unwrap();
        let hazards = announce::AT + announce::STRIDE * process.slot as usize + announce::HAZARDS;
        for i in 0..announce::HAZARD_COUNT {
            map.u64(hazards + 8 * i).store(0, Ordering::Relaxed);
        }
        for at in (0..1 << 14).step_by(8) {
            map.u64(arena::AT + at).store(0, Ordering::Relaxed);
        }
        for at in (0..1 << 12).step_by(8) {
            map.u64(order::AT + at).store(0, Ordering::Relaxed);
        }
        let stride = desc::stride(2);
        for i in 0..COUNT as usize {
            let at = DESC_AT + stride * i;
            map.u32(at + desc::TOTAL).store(1 << 15, Ordering::Relaxed);
            map.u32(at + desc::NUM_SGE).store(1, Ordering::Relaxed);
            map.u64(at + desc::FIRST)
                .store(self.memory, Ordering::Relaxed);
            map.u32(at + desc::FIRST + 8)
                .store(1 << 15, Ordering::Relaxed);
        }
        show_order(map);
        map.u32(srq::AT + srq::HINT).store(1, Ordering::Relaxed);
        for (at, value) in [
            (QP + qp::DESC_COUNT, COUNT),
            (QP + qp::DESC_STRIDE, stride as u32),
            (QP + qp::RECV_CQ, 0),
            (QP + qp::PD, 1),
            (QP + qp::RNR_TIMER, 1),
            (QP + qp::SRQ, u32::from(shared)),
            (QP + qp::TYPE, IBV_QPT_RC),
            (srq::AT + srq::COUNT, COUNT),
            (srq::AT + srq::DESC_COUNT, COUNT),
            (srq::AT + srq::DESC_STRIDE, stride as u32),
        ] {
            map.u32(at).store(value, Ordering::Relaxed);
        }
        map.u64(QP + qp::DESC_AT)
            .store(DESC_AT as u64, Ordering::Relaxed);
        map.u64(srq::AT + srq::DESC_AT)
            .store(DESC_AT as u64, Ordering::Relaxed);
        map.u64(srq::AT + srq::ORDER_AT)
            .store(ORDER_AT as u64, Ordering::Relaxed);
        let credit = Credit {
            posted: COUNT,
            least: 1 << 15,
        };
        map.u64(QP + qp::CREDIT)
            .store(credit.to_word(), Ordering::Relaxed);
        let at = region::AT + region::STRIDE;
        map.u32(at + region::ACCESS).store(0xf, Ordering::Relaxed);
        map.u32(at + region::PD).store(1, Ordering::Relaxed);
        map.u64(at + region::IOVA)
            .store(self.memory, Ordering::Relaxed);
        map.u64(at + region::LEN).store(1 << 16, Ordering::Relaxed);
        map.u64(at + region::ADDR)
            .store(self.memory, Ordering::Relaxed);
        map.u32(at + region::KEY).store(KEY, Ordering::Relaxed);
        let word = StateWord::new(IBV_QPS_RTS, dest, 0xf, 1);
        map.u64(QP + qp::STATE).store(word.0, Ordering::Release);
    }

    /// Changes one word that this process reads.
    pub(crate) fn scribble(&self, input: &mut Input<'_>) {
        let map = &self.segment.map;
        let slot = Process::open().unwrap().slot as usize;
        let which = input.u8();
        // The half of an entry: a process may also write wrong values to its own tables.
        let half = if which < 128 { 0 } else { OWNED };
        let at = match which % 10 {
            0..=2 => half + QP + 8 * input.below(qp::STRIDE / 8),
            3 => region::AT + region::STRIDE + 8 * input.below(5),
            4 => DESC_AT + 8 * input.below(COUNT as usize * desc::stride(2) / 8),
            5 => ORDER_AT + 8 * input.below(COUNT as usize),
            6 => half + srq::AT + 8 * input.below(srq::STRIDE / 8),
            7 => half + cq::AT + 8 * input.below(2),
            8 => half + header::SLEEPS + 8 * input.below(2),
            // Except the lock words: this process waits 2 s for a lock that a live process seems to
            // hold, as it must.
            _ => half + announce::AT + announce::STRIDE * slot + 8 * input.below(16),
        };
        assert!(!(stripe::AT..stripe::END).contains(&at));
        map.u64(at).store(input.edgy(), Ordering::Relaxed);
    }

    /// Writes to the ring from the stranger to this process, if there is one.
    fn send(&self, input: &mut Input<'_>, to: &End) {
        self.send_any(input, 3, |input| Header {
            op: input.u8() % 8,
            flags: input.u8() & 0x0f,
            dst_qpn: to.number() ^ u32::from(input.u8() == 0),
            incarnation: if input.u8() < 200 { 1 } else { input.u32() },
            len: u32::from(input.u16()) % 8193,
            imm: 7,
            msn: input.edgy() as u32,
            src_qpn: qp_num(self.slot, INDEX),
            life: 0,
        });
    }

    /// As [`Self::send`], with `message`; in one of `rarely` cases arbitrary content.
    pub(crate) fn send_any(
        &self,
        input: &mut Input<'_>,
        rarely: u8,
        message: impl Fn(&mut Input<'_>) -> Header,
    ) {
        let process = Process::open().unwrap();
        let map = &process.segment.map;
        let at = announce::AT + announce::STRIDE * self.slot as usize;
        let cookie = map.u64(at + announce::GRANTED).load(Ordering::Relaxed);
        if cookie != self.segment.map.u64(header::COOKIE).load(Ordering::Relaxed) {
            return;
        }
        let ring = Mapping::part(map, rings::ring_at(self.slot), RING_SIZE);
        match input.u8() % rarely {
            0 => {
                // Except the words that identify the ring: the receiver does not read them again,
                // and the next sender would not find the ring.
                let at = SLOTS_AT + input.below((RING_SIZE - SLOTS_AT) / 8) * 8;
                ring.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
            _ => {
                // After the messages that were read; the receiver stores their number.
                let Some(mut producer) = Producer::resume(ring, cookie) else {
                    return;
                };
                let header = message(input);
                producer.push(&header, |_| {});
            }
        }
    }
}

/// Connects a queue pair to the stranger's, whose segment may change between the steps.
fn connect(stranger: &Stranger, end: &End, kind: u32, input: &mut Input<'_>) -> ibv_qp_attr {
    let mut attr = attributes(qp_num(stranger.slot, INDEX));
    attr.rnr_retry = 1;
    attr.retry_cnt = 1;
    let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    let (first, second) = if kind == IBV_QPT_RC {
        (
            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
            IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
        )
    } else {
        (0, 0)
    };
    for (state, mask) in [
        (
            IBV_QPS_INIT,
            IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        ),
        (IBV_QPS_RTR, path | first),
        (IBV_QPS_RTS, IBV_QP_SQ_PSN | second),
    ] {
        if input.u8() == 0 {
            stranger.scribble(input);
        }
        attr.qp_state = state;
        assert_eq!(end.modify(&mut attr, IBV_QP_STATE | mask), 0);
    }
    attr
}

impl Stranger {
    /// Sets address and key of a request: in most cases those of a region of the stranger.
    fn aim(&self, input: &mut Input<'_>, wr: &mut ibv_send_wr) {
        let addr = self.memory.wrapping_add(match input.u8() % 4 {
            0 => input.edgy(),
            _ => 8 * u64::from(input.u8()),
        });
        let key = if input.u8() == 0 { input.u32() } else { KEY };
        if matches!(
            wr.opcode,
            IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_CMP_AND_SWP
        ) {
            wr.wr.atomic.remote_addr = addr;
            wr.wr.atomic.rkey = key;
        } else {
            wr.wr.rdma.remote_addr = addr;
            wr.wr.rdma.rkey = key;
        }
    }
}

/// For any content of a peer's segment and any messages of it: requests to the peer and receives
/// from it complete, none of them twice, and no other memory of this process changes.
///
/// # Panics
/// If this property does not hold.
pub fn stranger(data: &[u8]) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(data);
    let stranger = child();
    let kind = [IBV_QPT_RC, IBV_QPT_UC][input.below(2)];
    let shared = input.u8().is_multiple_of(2) && kind == IBV_QPT_RC;
    let end = End::new(kind, shared);
    let buffer = Buffer::new(16 << 10);
    stranger.be_honest(end.number(), input.u8().is_multiple_of(2));
    let mut attr = connect(stranger, &end, kind, &mut input);
    let mut outstanding = std::collections::HashSet::new();
    let mut id = 0;
    let mut steps = 0;
    while !input.is_empty() && steps < 200 {
        steps += 1;
        match input.u8() % 8 {
            0..=1 => stranger.scribble(&mut input),
            2 => stranger.send(&mut input, &end),
            3 => {
                let mut sges = [buffer.piece(&mut input), buffer.piece(&mut input)];
                if end.post_recv(&mut sges, id) == 0 {
                    outstanding.insert(id);
                    id += 1;
                }
            }
            4..=6 => {
                let mut sges = [buffer.piece(&mut input), buffer.piece(&mut input)];
                if input.u8().is_multiple_of(2) {
                    sges[0].length = 8;
                    sges[1].length = 0;
                }
                let mut wr = request(&mut input, &mut sges, id);
                stranger.aim(&mut input, &mut wr);
                if end.post_send(&mut wr) == 0 {
                    outstanding.insert(id);
                    id += 1;
                }
            }
            _ => {
                while let Some(wc) = end.poll() {
                    assert!(outstanding.remove(&wc.wr_id), "completed twice");
                }
            }
        }
        // Changes the number of read slots, which is in the stranger's memory.
        if input.u8() == 0 {
            stranger.ring.u32(64).store(input.u32(), Ordering::Relaxed);
        }
    }
    attr.qp_state = IBV_QPS_ERR;
    assert_eq!(end.modify(&mut attr, IBV_QP_STATE), 0);
    while let Some(wc) = end.poll() {
        assert!(outstanding.remove(&wc.wr_id), "completed twice");
    }
    assert!(!PANICKED.load(Ordering::Relaxed), "a call has panicked");
}
