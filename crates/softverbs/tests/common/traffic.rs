//! Requests, receives, and their completions.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::{Buffer, End, verbs};

/// A completion without its union.
#[derive(Clone, Copy, Debug)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub vendor_err: u32,
    pub opcode: u32,
    pub byte_len: u32,
    pub imm: Option<u32>,
}

/// `ibv_post_srq_recv` of one receive with the whole of `buffer`.
pub fn post_srq(srq: *mut ibv_srq, buffer: &Buffer, id: u64) -> i32 {
    let mut sge = ibv_sge {
        addr: buffer.addr(),
        length: buffer.len() as u32,
        lkey: buffer.lkey(),
    };
    let mut wr = ibv_recv_wr {
        wr_id: id,
        next: std::ptr::null_mut(),
        sg_list: &raw mut sge,
        num_sge: 1,
    };
    let mut bad = std::ptr::null_mut();
    // SAFETY: a live queue, a chain of one.
    unsafe { ibv_post_srq_recv(srq, &raw mut wr, &raw mut bad) }
}

impl End {
    pub fn post(&mut self, wr: &mut ibv_send_wr) {
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue pair, a chain of one.
        let ret = unsafe { ibv_post_send(self.qp, wr, &raw mut bad) };
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
    }

    pub fn send(&mut self, buffer: &mut Buffer, len: usize, imm: Option<u32>, flags: u32, id: u64) {
        let mut sge = ibv_sge {
            addr: buffer.addr(),
            length: len as u32,
            lkey: buffer.lkey(),
        };
        self.post_send(&mut sge, imm, flags, id);
    }

    pub fn send_unregistered(&mut self, bytes: &mut [u8], imm: Option<u32>, flags: u32, id: u64) {
        let mut sge = ibv_sge {
            addr: bytes.as_ptr() as u64,
            length: bytes.len() as u32,
            lkey: 0,
        };
        self.post_send(&mut sge, imm, flags, id);
    }

    fn post_send(&mut self, sge: &mut ibv_sge, imm: Option<u32>, flags: u32, id: u64) {
        // SAFETY: all zeros is a value of it.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = id;
        wr.sg_list = sge;
        wr.num_sge = 1;
        wr.send_flags = flags;
        wr.opcode = if imm.is_some() {
            IBV_WR_SEND_WITH_IMM
        } else {
            IBV_WR_SEND
        };
        wr.__bindgen_anon_1.bindgen_union_field = imm.unwrap_or(0);
        self.post(&mut wr);
    }

    pub fn rdma(
        &mut self,
        opcode: u32,
        buffer: &Buffer,
        len: usize,
        addr: u64,
        rkey: u32,
        imm: Option<u32>,
    ) {
        let mut sge = ibv_sge {
            addr: buffer.addr(),
            length: len as u32,
            lkey: buffer.lkey(),
        };
        // SAFETY: all zeros is a value of it.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.opcode = opcode;
        wr.__bindgen_anon_1.bindgen_union_field = imm.unwrap_or(0);
        wr.wr.rdma.remote_addr = addr;
        wr.wr.rdma.rkey = rkey;
        self.post(&mut wr);
    }

    pub fn recv(&mut self, buffer: &Buffer, id: u64) {
        self.recv_pieces(buffer, &[buffer.len()], id);
    }

    pub fn recv_pieces(&mut self, buffer: &Buffer, pieces: &[usize], id: u64) {
        let mut at = buffer.addr();
        let mut sges: Vec<_> = pieces
            .iter()
            .map(|&len| {
                let sge = ibv_sge {
                    addr: at,
                    length: len as u32,
                    lkey: buffer.lkey(),
                };
                at += len as u64;
                sge
            })
            .collect();
        let mut wr = ibv_recv_wr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as c_int,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue pair, a chain of one.
        let ret = unsafe { ibv_post_recv(self.qp, &raw mut wr, &raw mut bad) };
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
    }

    pub fn poll(&mut self) -> Option<Wc> {
        if let Some(wc) = self.polled.pop_front() {
            return Some(wc);
        }
        // SAFETY: live queue, room for eight.
        let count = unsafe {
            let mut wcs: [ibv_wc; 8] = std::mem::zeroed();
            let count = ibv_poll_cq(self.cq, 8, wcs.as_mut_ptr());
            assert!(count >= 0);
            for wc in &wcs[..count as usize] {
                self.polled.push_back(Wc {
                    wr_id: wc.wr_id,
                    status: wc.status,
                    opcode: wc.opcode,
                    vendor_err: wc.vendor_err,
                    byte_len: wc.byte_len,
                    imm: (wc.wc_flags & IBV_WC_WITH_IMM != 0)
                        .then_some(wc.__bindgen_anon_1.bindgen_union_field),
                });
            }
            count
        };
        if count > 0 {
            self.polled.pop_front()
        } else {
            None
        }
    }

    /// The status of the next completion, by polling with the fewest instructions.
    pub fn wait_raw(&mut self) -> u32 {
        assert!(self.polled.is_empty());
        let begin = Instant::now();
        let mut wc = std::mem::MaybeUninit::<ibv_wc>::uninit();
        let mut round = 0u32;
        loop {
            // SAFETY: live queue, room for one.
            if unsafe { ibv_poll_cq(self.cq, 1, wc.as_mut_ptr()) } == 1 {
                // SAFETY: the device wrote it.
                return unsafe { (*wc.as_ptr()).status };
            }
            round = round.wrapping_add(1);
            assert!(
                !round.is_multiple_of(1 << 24) || begin.elapsed() < Duration::from_secs(20),
                "no completion"
            );
        }
    }

    /// The next completion, by polling.
    pub fn wait(&mut self, limit: Duration) -> Wc {
        let begin = Instant::now();
        loop {
            if let Some(wc) = self.poll() {
                return wc;
            }
            assert!(begin.elapsed() < limit, "no completion");
            std::hint::spin_loop();
        }
    }

    /// The next completion, by sleeping.
    pub fn sleep(&mut self, limit: Duration) -> Wc {
        self.sleep_for(0, limit)
    }

    pub fn sleep_solicited(&mut self, limit: Duration) -> Wc {
        self.sleep_for(1, limit)
    }

    fn sleep_for(&mut self, solicited: c_int, limit: Duration) -> Wc {
        let begin = Instant::now();
        if solicited == 0
            && let Some(wc) = self.poll()
        {
            return wc;
        }
        loop {
            // SAFETY: live objects.
            unsafe {
                assert_eq!(ibv_req_notify_cq(self.cq, solicited), 0);
                if solicited == 0
                    && let Some(wc) = self.poll()
                {
                    return wc;
                }
                // a test that fails is more useful than one that hangs
                let mut poll = libc::pollfd {
                    fd: (*self.channel).fd,
                    events: libc::POLLIN,
                    revents: 0,
                };
                let left = limit.saturating_sub(begin.elapsed()).as_millis() as c_int;
                assert_eq!(libc::poll(&raw mut poll, 1, left), 1, "nobody rang");
                let flags = libc::fcntl((*self.channel).fd, libc::F_GETFL);
                libc::fcntl((*self.channel).fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
                let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
                let got = (verbs().ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context);
                if got == 0 {
                    assert_eq!(cq, self.cq);
                    (verbs().ibv_ack_cq_events)(cq, 1);
                } else {
                    let error = std::io::Error::last_os_error();
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                    continue;
                }
            }
            if let Some(wc) = self.poll() {
                return wc;
            }
        }
    }
}
