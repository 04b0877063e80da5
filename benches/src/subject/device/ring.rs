//! Receive rings of softverbs' queue pairs.

use std::time::Instant;

use rdma_core_sys::*;

use super::super::{Patience, Side, Subject};
use super::common::{Address, End, verbs};
use crate::op::Op;

/// Slots of each ring: the longest payload is 8,160 bytes.
const SLOTS: u32 = 256;

/// One end of a connection with receive rings.
pub(crate) struct Ring {
    side: Side,
    end: End,
    ring: *mut softdv_ring,
    payload: Vec<u8>,
    inbox: Vec<u8>,
}

impl Ring {
    pub(crate) fn open(side: Side) -> Self {
        let end = End::with(16, 16, 1);
        let attr = softdv_ring_attr {
            slots: SLOTS,
            reserved: 0,
            cookie: 0,
        };
        let create = verbs().softdv_ring_create.expect("the device has it");
        // SAFETY: live queue pair.
        let ring = unsafe { create(end.qp, &raw const attr) };
        assert!(!ring.is_null(), "{}", std::io::Error::last_os_error());
        Self {
            side,
            end,
            ring,
            payload: vec![1; 8192],
            inbox: vec![0; 8192],
        }
    }

    /// Moves the queue pair to RTS, connected to the other end.
    pub(crate) fn enter_rts(&mut self, other: &str) {
        self.end.enter_rtr(Address::parse(other));
        self.end.enter_rts();
    }

    /// Waits until the other end is connected, and makes the ring hot.
    pub(crate) fn attach(&mut self) {
        let attach = verbs().softdv_ring_attach.expect("the device has it");
        let set_hot = verbs().softdv_ring_set_hot.expect("the device has it");
        let mut info = softdv_ring_info::default();
        let mut patience = Patience::default();
        // SAFETY: live ring.
        unsafe {
            while attach(self.ring, &raw mut info) == libc::EAGAIN {
                patience.wait();
            }
            assert_ne!(info.max_send, 0);
            set_hot(self.ring, 1);
        }
    }

    /// Sends a message.
    #[inline]
    pub(crate) fn post(&mut self, len: usize) {
        let post = verbs().softdv_ring_post.expect("the device has it");
        let mut patience = Patience::default();
        loop {
            // SAFETY: live ring; the payload is readable.
            let ret = unsafe {
                post(
                    self.ring,
                    1,
                    2,
                    3,
                    self.payload.as_ptr().cast(),
                    len as u32,
                    0,
                )
            };
            match ret {
                0 => return,
                libc::EAGAIN => patience.wait(),
                error => panic!("{}", std::io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// Polls once; copies and consumes a message.
    #[inline]
    pub(crate) fn poll(&mut self) -> bool {
        let poll = verbs().softdv_ring_poll.expect("the device has it");
        let consume = verbs().softdv_ring_consume.expect("the device has it");
        let mut message = std::mem::MaybeUninit::uninit();
        // SAFETY: live ring; the payload is there until it is consumed, and at most 8,160 bytes
        // long.
        unsafe {
            match poll(self.ring, message.as_mut_ptr()) {
                0 => return false,
                1 => {}
                error => panic!("{}", std::io::Error::from_raw_os_error(-error)),
            }
            let message: &softdv_ring_message = message.assume_init_ref();
            let from = message.payload.cast::<u8>();
            from.copy_to_nonoverlapping(self.inbox.as_mut_ptr(), message.length as usize);
            assert_eq!(consume(self.ring), 0);
        }
        true
    }

    #[inline]
    fn receive(&mut self) {
        let mut patience = Patience::default();
        let mut in_vain = 0u32;
        while !self.poll() {
            patience.wait();
            in_vain += 1;
            // as polls of a completion queue: a spinning process leaves a busy processor to its
            // peer
            if in_vain > 4096 && in_vain.is_multiple_of(64) {
                std::thread::yield_now();
            }
        }
    }

    fn pingpong(&mut self, len: usize, count: u64) -> f64 {
        let mut begin = Instant::now();
        for i in 0..count {
            if i == count / 10 {
                begin = Instant::now();
            }
            if self.side.is_first() {
                self.post(len);
                self.receive();
            } else {
                self.receive();
                self.post(len);
            }
        }
        begin.elapsed().as_nanos() as f64 / (count - count / 10) as f64 / 2.0
    }

    fn stream(&mut self, len: usize, count: u64) -> f64 {
        let begin = Instant::now();
        if self.side.is_first() {
            for _ in 0..count {
                self.post(len);
            }
            self.receive();
        } else {
            for _ in 0..count {
                self.receive();
            }
            self.post(8);
        }
        begin.elapsed().as_nanos() as f64 / count as f64
    }
}

impl Subject for Ring {
    fn address(&mut self) -> String {
        let Address { qpn, gid } = self.end.address();
        format!("{qpn} {gid}")
    }

    fn connect(&mut self, other: &str) {
        self.enter_rts(other);
        self.attach();
    }

    fn run(&mut self, op: Op, len: usize, count: u64) -> f64 {
        match op {
            Op::Pingpong => self.pingpong(len, count),
            Op::Stream => self.stream(len, count),
            other => panic!("rings have no {other}"),
        }
    }
}
