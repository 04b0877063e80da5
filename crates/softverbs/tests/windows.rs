//! Memory windows between two processes, as in `two_processes.rs`.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::ptr::null_mut;

use common::*;
use rdma_core_sys::*;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);
const READ: u32 = IBV_ACCESS_REMOTE_READ;
const WRITE: u32 = IBV_ACCESS_REMOTE_WRITE;
/// Length of a region, and number of its bytes that windows expose.
const LEN: usize = 4096;
const FROM: usize = 1000;
const SHOWN: usize = 100;

pub(crate) fn main() {
    let cases: &[Case] = &[
        ("bounds_of_windows", bounds_parent, bounds_child),
        ("windows_end", ends_parent, ends_child),
        ("requests_that_fail", failures, nothing),
    ];
    run(cases);
}

fn nothing(_: &mut Link) {}

struct Window {
    mw: *mut ibv_mw,
    mr: *mut ibv_mr,
}

impl Window {
    fn new(end: &End, bytes: &'static mut [u8], kind: u32) -> Self {
        let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND).cast_signed();
        // SAFETY: live domain; the memory is never freed.
        unsafe {
            let start = bytes.as_mut_ptr();
            let mr = (verbs().ibv_reg_mr)(end.pd, start.cast(), bytes.len(), access);
            let mw = (*end.context).ops.alloc_mw.unwrap()(end.pd, kind);
            assert!(!mr.is_null() && !mw.is_null());
            Self { mw, mr }
        }
    }

    fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mw).rkey }
    }

    fn info(&self, len: usize, access: u32) -> ibv_mw_bind_info {
        // SAFETY: live.
        let start = unsafe { (*self.mr).addr } as u64;
        ibv_mw_bind_info {
            mr: if len == 0 { null_mut() } else { self.mr },
            addr: if len == 0 { 0 } else { start + FROM as u64 },
            length: len as u64,
            mw_access_flags: access,
        }
    }

    /// Binds the window as its type requires, and returns its key.
    fn bind(&self, end: &mut End, len: usize, access: u32) -> (u32, u32) {
        let info = self.info(len, access);
        // SAFETY: live objects.
        if unsafe { (*self.mw).type_ } == IBV_MW_TYPE_1 {
            let mut bind = ibv_mw_bind {
                wr_id: 0,
                send_flags: IBV_SEND_SIGNALED,
                bind_info: info,
            };
            let code =
                // SAFETY: live objects of this device.
                unsafe { (*end.context).ops.bind_mw.unwrap()(end.qp, self.mw, &raw mut bind) };
            assert_eq!(code, 0);
            (self.rkey(), end.wait(LIMIT).status)
        } else {
            let rkey = self.rkey() & !0xff | 0x77;
            (rkey, self.bind_as(end, rkey, info))
        }
    }

    fn bind_as(&self, end: &mut End, rkey: u32, bind_info: ibv_mw_bind_info) -> u32 {
        let mut wr = request(IBV_WR_BIND_MW);
        wr.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: self.mw,
            rkey,
            bind_info,
        };
        end.post(&mut wr);
        let wc = end.wait(LIMIT);
        assert!(wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_BIND_MW);
        wc.status
    }

    fn dereg(&self) -> i32 {
        // SAFETY: live.
        unsafe { (verbs().ibv_dereg_mr)(self.mr) }
    }

    fn free(&self, end: &End) {
        // SAFETY: live.
        unsafe { assert_eq!((*end.context).ops.dealloc_mw.unwrap()(self.mw), 0) };
    }
}

fn request(opcode: u32) -> ibv_send_wr {
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = opcode;
    wr
}

fn invalidate(end: &mut End, opcode: u32, rkey: u32) -> u32 {
    let mut wr = request(opcode);
    wr.__bindgen_anon_1.bindgen_union_field = rkey;
    end.post(&mut wr);
    end.wait(LIMIT).status
}

fn memory() -> &'static mut [u8] {
    Box::leak(vec![0u8; LEN].into_boxed_slice())
}

/// Accesses through one window: offset from its first byte, length, opcode, and whether the access
/// succeeds.
const ACCESSES: [(i64, usize, u32, bool); 6] = [
    (0, SHOWN, IBV_WR_RDMA_WRITE, true),
    (SHOWN as i64 - 8, 8, IBV_WR_RDMA_WRITE, true),
    (SHOWN as i64 - 7, 8, IBV_WR_RDMA_WRITE, false),
    (-1, 8, IBV_WR_RDMA_WRITE, false),
    (0, LEN, IBV_WR_RDMA_WRITE, false),
    (0, 8, IBV_WR_RDMA_READ, false),
];

fn bounds_parent(link: &mut Link) {
    for _ in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        for (from, len, opcode, good) in ACCESSES {
            let mut end = End::connect(link, 8, 8, 1);
            let (addr, rkey) = link.numbers();
            let source = end.buffer(&vec![7; len]);
            let to = addr.wrapping_add_signed(from);
            end.rdma(opcode, &source, len, to, rkey as u32, None);
            let status = end.wait(LIMIT).status;
            let expected = if good {
                IBV_WC_SUCCESS
            } else {
                IBV_WC_REM_ACCESS_ERR
            };
            assert_eq!(status, expected, "{from} {len} {opcode}");
            link.say("done");
        }
    }
}

fn bounds_child(link: &mut Link) {
    for kind in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
        for (from, len, _, good) in ACCESSES {
            let mut end = End::create(link, 8, 8, 1);
            let bytes = memory();
            let start = bytes.as_ptr();
            let window = Window::new(&end, bytes, kind);
            end.join(link);
            let (rkey, status) = window.bind(&mut end, SHOWN, WRITE);
            assert_eq!(status, IBV_WC_SUCCESS);
            assert_eq!(window.dereg(), libc::EBUSY);
            link.say_numbers(start as u64 + FROM as u64, u64::from(rkey));
            link.expect("done");
            let written: Vec<u8> = (0..LEN)
                // SAFETY: the memory is never freed.
                .map(|i| unsafe { start.add(i).read_volatile() })
                .collect();
            let mut expected = vec![0; LEN];
            if good {
                let at = FROM.wrapping_add_signed(from as isize);
                expected[at..at + len].fill(7);
            }
            assert_eq!(written, expected);
            window.free(&end);
            assert_eq!(window.dereg(), 0);
        }
    }
}

/// How a window ends before the peer's second write to it.
const ENDS: [&str; 6] = ["rebound", "unbound", "local", "remote", "freed", "another"];

fn ends_parent(link: &mut Link) {
    for how in ENDS {
        let mut end = End::connect(link, 8, 8, 1);
        let (addr, rkey) = link.numbers();
        let rkey = rkey as u32;
        let source = end.buffer(&[7; 8]);
        let write = |end: &mut End| {
            end.rdma(IBV_WR_RDMA_WRITE, &source, 8, addr, rkey, None);
            end.wait(LIMIT).status
        };
        if how == "another" {
            // a second connection with the same domain
            let mut other = End::connect(link, 8, 8, 1);
            other.rdma(
                IBV_WR_RDMA_WRITE,
                &other.buffer(&[7; 8]),
                8,
                addr,
                rkey,
                None,
            );
            assert_eq!(other.wait(LIMIT).status, IBV_WC_REM_ACCESS_ERR);
            assert_eq!(write(&mut end), IBV_WC_SUCCESS);
            link.say("written");
            continue;
        }
        assert_eq!(write(&mut end), IBV_WC_SUCCESS, "{how}");
        if how == "remote" {
            let status = invalidate(&mut end, IBV_WR_SEND_WITH_INV, rkey);
            assert_eq!(status, IBV_WC_SUCCESS);
            link.expect("ended");
            // the second time the key is invalid, and the connection ends
            let status = invalidate(&mut end, IBV_WR_SEND_WITH_INV, rkey);
            assert_eq!(status, IBV_WC_REM_ACCESS_ERR);
        } else {
            link.say("written");
            link.expect("ended");
            assert_eq!(write(&mut end), IBV_WC_REM_ACCESS_ERR, "{how}");
        }
        link.say("end");
    }
}

fn ends_child(link: &mut Link) {
    for how in ENDS {
        let mut end = End::create(link, 8, 8, 1);
        let bytes = memory();
        let addr = bytes.as_ptr() as u64 + FROM as u64;
        let one = matches!(how, "rebound" | "unbound");
        let kind = if one { IBV_MW_TYPE_1 } else { IBV_MW_TYPE_2 };
        let window = Window::new(&end, bytes, kind);
        let empty = end.buffer(&[]);
        end.recv(&empty, 9);
        end.join(link);
        let (rkey, status) = window.bind(&mut end, SHOWN, READ | WRITE);
        assert_eq!(status, IBV_WC_SUCCESS);
        link.say_numbers(addr, u64::from(rkey));
        if how == "another" {
            let qp = create_second(&end);
            let mut other = end.with_qp(qp);
            other.join(link);
            link.expect("written");
            // destroying its queue pair unbinds the window
            // SAFETY: live, and freed by the call.
            unsafe { assert_eq!((verbs().ibv_destroy_qp)(end.qp), 0) };
            assert_eq!(window.dereg(), 0);
            window.free(&end);
            continue;
        }
        if how != "remote" {
            link.expect("written");
        }
        match how {
            "rebound" => {
                let (other, status) = window.bind(&mut end, SHOWN, READ | WRITE);
                assert_eq!(status, IBV_WC_SUCCESS);
                assert_ne!(rkey, other);
            }
            "unbound" => {
                assert_eq!(window.bind(&mut end, 0, 0).1, IBV_WC_SUCCESS);
                assert_eq!(window.dereg(), 0);
            }
            "local" => {
                let status = invalidate(&mut end, IBV_WR_LOCAL_INV, rkey);
                assert_eq!(status, IBV_WC_SUCCESS);
                // then it can be bound again, with another key
                let info = window.info(SHOWN, READ);
                let status = window.bind_as(&mut end, rkey ^ 1, info);
                assert_eq!(status, IBV_WC_SUCCESS);
            }
            "remote" => {
                let (status, flags, key) = poll_raw(&end);
                assert_eq!(status, IBV_WC_SUCCESS);
                assert_eq!((flags, key), (IBV_WC_WITH_INV, rkey));
                assert_eq!(window.dereg(), 0);
            }
            _ => window.free(&end),
        }
        link.say("ended");
        link.expect("end");
    }
}

/// The next completion with the fields that common's completion does not have: flags and
/// invalidated key.
fn poll_raw(end: &End) -> (u32, u32, u32) {
    let begin = std::time::Instant::now();
    loop {
        // SAFETY: live queue, room for one; all zeros is a value of it.
        unsafe {
            let mut wc: ibv_wc = std::mem::zeroed();
            if ibv_poll_cq(end.cq, 1, &raw mut wc) == 1 {
                let key = wc.__bindgen_anon_1.bindgen_union_field;
                return (wc.status, wc.wc_flags, key);
            }
        }
        assert!(begin.elapsed() < LIMIT, "no completion");
    }
}

/// Another queue pair of the same domain.
fn create_second(end: &End) -> *mut ibv_qp {
    // SAFETY: live objects; all zeros is a value of it.
    unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = end.cq;
        init.recv_cq = end.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 8;
        init.cap.max_recv_wr = 8;
        let qp = (verbs().ibv_create_qp)(end.pd, &raw mut init);
        assert!(!qp.is_null());
        qp
    }
}

/// Each failure moves the queue pair, which is connected to itself, to ERR.
fn failures(_: &mut Link) {
    let connected = || {
        let mut end = End::with(8, 8, 1);
        let own = end.address();
        end.enter_rtr(own);
        end.enter_rts();
        end
    };
    let mut end = connected();
    let window = Window::new(&end, memory(), IBV_MW_TYPE_2);
    let (rkey, status) = window.bind(&mut end, SHOWN, READ);
    assert_eq!(status, IBV_WC_SUCCESS);
    // bound already
    let again = window.bind_as(&mut end, rkey ^ 1, window.info(SHOWN, READ));
    assert_eq!((again, end.state()), (IBV_WC_MW_BIND_ERR, IBV_QPS_ERR));
    let mut end = connected();
    let window = Window::new(&end, memory(), IBV_MW_TYPE_1);
    let beyond = window.info(LEN, READ);
    let status = window.bind_as(&mut end, window.rkey() ^ 1, beyond);
    assert_eq!((status, end.state()), (IBV_WC_MW_BIND_ERR, IBV_QPS_ERR));
    let mut end = connected();
    let status = invalidate(&mut end, IBV_WR_LOCAL_INV, window.rkey());
    assert_eq!((status, end.state()), (IBV_WC_LOC_QP_OP_ERR, IBV_QPS_ERR));
    // SAFETY: live domain.
    let mw = unsafe { (*end.context).ops.alloc_mw.unwrap()(end.pd, 3) };
    assert!(mw.is_null());
    let error = std::io::Error::last_os_error().raw_os_error();
    assert_eq!(error, Some(libc::EINVAL));
}
