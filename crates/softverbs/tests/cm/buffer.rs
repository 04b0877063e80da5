//! Memory, requests and completions, for connections that transfer data.

use std::ptr::null_mut;
use std::time::{Duration, Instant};

use libc::c_int;
use rdma_core_sys::*;

use crate::harness::*;

/// 64 registered bytes.
pub(crate) struct Buffer {
    mr: *mut ibv_mr,
    bytes: *mut [u8; 64],
}

impl Buffer {
    pub(crate) fn new(id: Id, text: &[u8]) -> Self {
        let mut bytes = Box::new([0; 64]);
        bytes[..text.len()].copy_from_slice(text);
        let bytes = Box::into_raw(bytes);
        // SAFETY: the default protection domain of a live id, and owned memory.
        let mr = unsafe {
            (verbs().ibv_reg_mr)(id.c().pd, bytes.cast(), 64, IBV_ACCESS_LOCAL_WRITE as c_int)
        };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        Self { mr, bytes }
    }

    pub(crate) fn bytes(&self) -> &[u8; 64] {
        // SAFETY: owned, and the device writes it only while a receive is posted.
        unsafe { &*self.bytes }
    }

    fn sge(&self) -> ibv_sge {
        ibv_sge {
            addr: self.bytes as u64,
            length: 64,
            // SAFETY: a live region.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    pub(crate) fn post_recv(&mut self, id: Id) {
        let mut sge = self.sge();
        let mut wr = ibv_recv_wr {
            sg_list: &raw mut sge,
            num_sge: 1,
            ..ibv_recv_wr::default()
        };
        let mut bad = null_mut();
        // SAFETY: a live queue pair and a valid request.
        let posted = unsafe { ibv_post_recv(id.c().qp, &raw mut wr, &raw mut bad) };
        assert_eq!(posted, 0);
    }

    pub(crate) fn post_send(&mut self, id: Id) {
        let mut sge = self.sge();
        let mut wr = ibv_send_wr {
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: IBV_WR_SEND,
            send_flags: IBV_SEND_SIGNALED,
            ..ibv_send_wr::default()
        };
        let mut bad = null_mut();
        // SAFETY: as above.
        let posted = unsafe { ibv_post_send(id.c().qp, &raw mut wr, &raw mut bad) };
        assert_eq!(posted, 0);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: made by `new`; nothing is posted with it any more.
        unsafe {
            assert_eq!((verbs().ibv_dereg_mr)(self.mr), 0);
            drop(Box::from_raw(self.bytes));
        }
    }
}

/// A completion; `None`: the queue is empty.
pub(crate) fn completion(cq: *mut ibv_cq) -> Option<ibv_wc> {
    let mut wc = ibv_wc::default();
    // SAFETY: a live completion queue and room for one.
    match unsafe { ibv_poll_cq(cq, 1, &raw mut wc) } {
        0 => None,
        1 => Some(wc),
        other => panic!("polling returned {other}"),
    }
}

pub(crate) fn wait_for_completion(cq: *mut ibv_cq) -> ibv_wc {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(wc) = completion(cq) {
            return wc;
        }
        assert!(Instant::now() < until, "no completion");
        std::thread::sleep(Duration::from_millis(1));
    }
}
