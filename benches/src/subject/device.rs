//! softverbs through verbs, as in a program that links softverbs as `libibverbs`.

#[path = "../../../crates/softverbs/tests/common/mod.rs"]
mod common;
mod ring;
mod shared;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::time::Instant;

use rdma_core_sys::*;

pub(crate) use self::common::verbs;
use self::common::{Address, End};
pub(crate) use self::ring::Ring;
use self::shared::Shared;
use super::{Patience, Side, Subject, idle};
use crate::memory::Memory;
use crate::op::Op;

const BUFFER: usize = 1 << 20;
/// Number of posted receives.
const RECEIVES: u32 = 256;
const WINDOW: u64 = 64;
const INLINE: usize = 64;

pub(crate) struct Device {
    side: Side,
    end: End,
    /// The shared receive queue, if the queue pair has no receive queue.
    shared: Option<Shared>,
    inbox: ibv_mr,
    send: Box<(ibv_sge, ibv_send_wr)>,
    recv: Box<(ibv_sge, ibv_recv_wr)>,
    remote: Option<(u64, u32)>,
    /// Number of outstanding signaled requests.
    signaled: u64,
}

fn register(end: &End, memory: Memory) -> ibv_mr {
    let access = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_ATOMIC;
    // SAFETY: live domain; the memory is never freed.
    unsafe {
        let mr = (verbs().ibv_reg_mr)(
            end.pd,
            memory.at.cast(),
            memory.len,
            access.cast_signed() as c_int,
        );
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        *mr
    }
}

/// Memory that the device allocates, never freed.
fn allocate(end: &End) -> Memory {
    let mut buf = std::ptr::null_mut();
    let alloc = verbs().ibv_alloc_buf.expect("the device has it");
    // SAFETY: live domain, a writable pointer.
    let at = unsafe { alloc(end.pd, BUFFER, &raw mut buf) };
    assert!(!at.is_null(), "{}", std::io::Error::last_os_error());
    Memory {
        at: at.cast(),
        len: BUFFER,
    }
}

impl Device {
    /// The protection domain; valid as long as this object.
    pub(crate) fn pd(&self) -> *mut ibv_pd {
        self.end.pd
    }

    pub(crate) fn open(side: Side) -> Self {
        let end = End::with(256, RECEIVES, 1);
        let inbox = register(&end, Memory::new(BUFFER));
        Self::of(side, end, None, inbox)
    }

    /// As `open`; the memory that the peer accesses is allocated by the device.
    pub(crate) fn open_with_buffer(side: Side) -> Self {
        let end = End::with(256, RECEIVES, 1);
        let inbox = register(&end, allocate(&end));
        Self::of(side, end, None, inbox)
    }

    /// As `open`, with a shared receive queue.
    pub(crate) fn open_shared(side: Side) -> Self {
        let (end, shared) = shared::rc();
        let inbox = register(&end, Memory::new(BUFFER));
        Self::of(side, end, Some(shared), inbox)
    }

    /// As `open`, with XRC.
    pub(crate) fn open_xrc(side: Side) -> Self {
        let (end, shared) = shared::xrc();
        let inbox = register(&end, Memory::new(BUFFER));
        Self::of(side, end, Some(shared), inbox)
    }

    fn of(side: Side, end: End, shared: Option<Shared>, inbox: ibv_mr) -> Self {
        let outbox = register(&end, Memory::new(BUFFER));
        let sge = |mr: &ibv_mr| ibv_sge {
            addr: mr.addr as u64,
            length: BUFFER as u32,
            lkey: mr.lkey,
        };
        // SAFETY: all zeros is a valid `ibv_send_wr`.
        let wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        let mut send = Box::new((sge(&outbox), wr));
        send.1.sg_list = &raw mut send.0;
        send.1.num_sge = 1;
        let recv_wr = ibv_recv_wr {
            wr_id: 1,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 1,
        };
        let mut recv = Box::new((sge(&inbox), recv_wr));
        recv.1.sg_list = &raw mut recv.0;
        let device = Self {
            side,
            end,
            shared,
            inbox,
            send,
            recv,
            remote: None,
            signaled: 0,
        };
        for _ in 0..RECEIVES {
            device.post_recv();
        }
        device
    }

    /// Posts one more receive.
    #[inline]
    pub(crate) fn post_recv(&self) {
        let mut bad = std::ptr::null_mut();
        let wr = (&raw const self.recv.1).cast_mut();
        // SAFETY: live queues, a chain of one.
        let ret = unsafe {
            match &self.shared {
                None => ibv_post_recv(self.end.qp, wr, &raw mut bad),
                Some(shared) => ibv_post_srq_recv(shared.srq, wr, &raw mut bad),
            }
        };
        assert_eq!(ret, 0);
    }

    /// Posts a request.
    #[inline]
    pub(crate) fn post(&mut self, opcode: u32, len: usize, signaled: bool) {
        let inline = len <= INLINE && matches!(opcode, IBV_WR_SEND | IBV_WR_RDMA_WRITE);
        let (sge, wr) = &mut *self.send;
        sge.length = len as u32;
        wr.opcode = opcode;
        wr.send_flags = if inline { IBV_SEND_INLINE } else { 0 };
        if signaled {
            wr.send_flags |= IBV_SEND_SIGNALED;
            self.signaled += 1;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue pair, a chain of one.
        let ret = unsafe { ibv_post_send(self.end.qp, &raw mut *wr, &raw mut bad) };
        assert_eq!(ret, 0);
    }

    /// Polls once. `Some(true)`: the completion of a receive; `Some(false)`: of another request.
    #[inline]
    pub(crate) fn poll(&mut self) -> Option<bool> {
        let mut wc = MaybeUninit::<ibv_wc>::uninit();
        // SAFETY: live queue, room for one.
        let wc = unsafe {
            match ibv_poll_cq(self.end.cq, 1, wc.as_mut_ptr()) {
                0 => return None,
                1 => wc.assume_init_ref(),
                ret => panic!("ibv_poll_cq: {ret}"),
            }
        };
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        let message = wc.opcode & IBV_WC_RECV != 0;
        self.signaled -= u64::from(!message);
        Some(message)
    }

    /// Waits for the next message.
    #[inline]
    fn arrive(&mut self) {
        let mut patience = Patience::default();
        while self.poll() != Some(true) {
            patience.wait();
        }
    }

    /// Waits for the next message, and posts another receive.
    #[inline]
    fn receive(&mut self) {
        self.arrive();
        self.post_recv();
    }

    /// Waits until at most `most` signaled requests are outstanding.
    #[inline]
    fn drain(&mut self, most: u64) {
        while self.signaled > most {
            assert_ne!(self.poll(), Some(true), "a message that nobody expects");
        }
    }

    fn pingpong(&mut self, len: usize, count: u64) -> f64 {
        let mut begin = Instant::now();
        let first = self.side.is_first();
        for i in 0..count {
            if i == count / 10 {
                begin = Instant::now();
            }
            // one request in 64 is signaled: its completion frees the slots of those before it
            let signaled = i % 64 == 0;
            if !first {
                self.arrive();
            }
            self.post(IBV_WR_SEND, len, signaled);
            // posted while the message is in flight
            if !first || i > 0 {
                self.post_recv();
            }
            if first {
                self.arrive();
            }
        }
        let nanos = begin.elapsed().as_nanos() as f64;
        if first {
            self.post_recv();
        }
        self.drain(0);
        nanos / (count - count / 10) as f64 / 2.0
    }

    fn stream(&mut self, len: usize, count: u64) -> f64 {
        let begin = Instant::now();
        let windows = count.div_ceil(WINDOW);
        if !self.side.is_first() {
            for _ in 0..windows {
                for _ in 0..WINDOW {
                    self.receive();
                }
                self.post(IBV_WR_SEND, 8, true);
            }
            self.drain(0);
            return 0.0;
        }
        let mut answers = 0;
        for window in 0..windows {
            for i in 1..=WINDOW {
                self.post(IBV_WR_SEND, len, i == WINDOW);
            }
            while answers + 1 < window {
                self.receive();
                answers += 1;
            }
        }
        while answers < windows {
            self.receive();
            answers += 1;
        }
        self.drain(0);
        begin.elapsed().as_nanos() as f64 / (windows * WINDOW) as f64
    }

    fn access(&mut self, opcode: u32, len: usize, count: u64) -> f64 {
        if !self.side.is_first() {
            return 0.0;
        }
        let (addr, rkey) = self.remote.expect("connected");
        self.send.1.wr.rdma.remote_addr = addr;
        self.send.1.wr.rdma.rkey = rkey;
        let begin = Instant::now();
        for _ in 0..count {
            self.post(opcode, len, true);
            self.drain(0);
        }
        begin.elapsed().as_nanos() as f64 / count as f64
    }

    fn atomic(&mut self, count: u64) -> f64 {
        if !self.side.is_first() {
            return 0.0;
        }
        let (addr, rkey) = self.remote.expect("connected");
        self.send.1.wr.atomic.remote_addr = addr;
        self.send.1.wr.atomic.rkey = rkey;
        self.send.1.wr.atomic.compare_add = 1;
        let begin = Instant::now();
        for _ in 0..count {
            self.post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, true);
            self.drain(0);
        }
        begin.elapsed().as_nanos() as f64 / count as f64
    }

    /// Registers and deregisters a region on demand. The addresses need not be mapped, because the
    /// region is not accessed.
    fn register_on_demand(&self, len: usize, count: u64) -> f64 {
        let at = self.inbox.addr;
        let access = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        let begin = Instant::now();
        for _ in 0..count {
            // SAFETY: live domain; the region is never used.
            unsafe {
                let mr = (verbs().ibv_reg_mr)(self.end.pd, at, len, access.cast_signed());
                assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
                assert_eq!((verbs().ibv_dereg_mr)(mr), 0);
            }
        }
        begin.elapsed().as_nanos() as f64 / count as f64
    }

    /// Processor time per second while a thread waits in `ibv_get_cq_event`.
    fn idle(&mut self, seconds: u64) -> f64 {
        struct Waiter(*mut ibv_cq, *mut ibv_comp_channel);
        // SAFETY: verbs objects may be used by any thread.
        unsafe impl Send for Waiter {}
        impl Waiter {
            fn wait(&self) {
                let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
                // SAFETY: live objects; the event is acknowledged once.
                unsafe {
                    assert_eq!(ibv_req_notify_cq(self.0, 0), 0);
                    let ret = (verbs().ibv_get_cq_event)(self.1, &raw mut cq, &raw mut context);
                    assert_eq!(ret, 0);
                    (verbs().ibv_ack_cq_events)(cq, 1);
                }
            }
        }
        let waiter = Waiter(self.end.cq, self.end.channel);
        let thread = std::thread::spawn(move || waiter.wait());
        let used = idle(seconds);
        // each side wakes the peer's waiting thread
        self.post(IBV_WR_SEND, 8, true);
        thread.join().expect("the waiter");
        self.receive();
        self.drain(0);
        used
    }
}

impl Subject for Device {
    fn address(&mut self) -> String {
        let Address { qpn, gid } = self.end.address();
        let (target, srqn) = self.shared.as_ref().map_or((0, 0), Shared::numbers);
        let (addr, rkey) = (self.inbox.addr as u64, self.inbox.rkey);
        format!("{qpn} {gid} {addr} {rkey} {target} {srqn}")
    }

    fn connect(&mut self, other: &str) {
        let words: Vec<u128> = other
            .split(' ')
            .map(|word| word.parse().expect("a number"))
            .collect();
        let [qpn, gid, addr, rkey, target, srqn] = words[..] else {
            panic!("{other}: not an end's address")
        };
        let qpn = qpn as u32;
        self.remote = Some((addr as u64, rkey as u32));
        let other = Address { qpn, gid };
        match &self.shared {
            Some(shared) if shared.connect(&self.end, other) => {
                let qpn = target as u32;
                shared::enter_rtr(&mut self.end, Address { qpn, gid });
                self.send.1.qp_type.xrc.remote_srqn = srqn as u32;
            }
            _ => self.end.enter_rtr(other),
        }
        self.end.enter_rts();
    }

    fn run(&mut self, op: Op, len: usize, count: u64) -> f64 {
        match op {
            Op::Pingpong => self.pingpong(len, count),
            Op::Stream => self.stream(len, count),
            Op::Write => self.access(IBV_WR_RDMA_WRITE, len, count),
            Op::Read => self.access(IBV_WR_RDMA_READ, len, count),
            Op::Atomic => self.atomic(count),
            Op::Register => self.register_on_demand(len, count),
            Op::Idle => self.idle(count),
            other => panic!("verbs has no {other}"),
        }
    }
}
