//! What tests with two processes share: starting the other one, and one end of a connection.

#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    missing_debug_implementations,
    reason = "shared by tests, each of which uses a part"
)]

pub mod refuse;
pub mod suites;

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rdma_core_sys::*;

const CASE: &str = "SOFTVERBS_TEST_CASE";
/// Cases that do not run where others run these, by name; who sets it says why.
pub const SKIPPED: &str = "SOFTVERBS_TEST_SKIPPED";

/// A test: its name, and what the two processes do.
pub type Case = (&'static str, fn(&mut Link), fn(&mut Link));

/// Runs the cases that the command line names (all, without one), or one child's part.
pub fn run(cases: &[Case]) {
    if let Ok(name) = std::env::var(CASE) {
        let case = cases
            .iter()
            .find(|case| case.0 == name)
            .expect("a known case");
        (case.2)(&mut Link::of_child());
        // No destructors: ends as programs do.
        return;
    }
    let arguments: Vec<_> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    if std::env::args().any(|a| a == "--list") {
        // A runner asks twice: for all, and for those that are ignored. None is.
        let ignored = std::env::args().any(|a| a == "--ignored");
        for case in cases.iter().filter(|case| !ignored && !is_skipped(case.0)) {
            println!("{}: test", case.0);
        }
        return;
    }
    let exact = std::env::args().any(|a| a == "--exact");
    let mut failed = Vec::new();
    let mut count = 0;
    for case in cases {
        let asked = |a: &String| {
            if exact {
                case.0 == a
            } else {
                case.0.contains(a.as_str())
            }
        };
        if !arguments.is_empty() && !arguments.iter().any(asked) {
            continue;
        }
        if is_skipped(case.0) {
            println!("test {} ... skipped", case.0);
            continue;
        }
        count += 1;
        let begin = Instant::now();
        let result = std::panic::catch_unwind(|| {
            let mut link = Link::of_parent(case.0);
            (case.1)(&mut link);
            link.finish();
        });
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!(
            "test {} ... {verdict} ({} ms)",
            case.0,
            begin.elapsed().as_millis()
        );
        if result.is_err() {
            failed.push(case.0);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
    println!("test result: ok. {count} passed; 0 failed; 0 ignored");
}

fn is_skipped(case: &str) -> bool {
    let skipped = std::env::var(SKIPPED).unwrap_or_default();
    skipped.split(' ').any(|name| name == case)
}

/// The line to the other process.
pub struct Link {
    child: Option<Child>,
    to: Box<dyn Write>,
    from: Box<dyn BufRead>,
    killed: bool,
}

impl Link {
    fn of_parent(case: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(CASE, case)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to: ChildStdin = child.stdin.take().unwrap();
        let from: ChildStdout = child.stdout.take().unwrap();
        Self {
            child: Some(child),
            to: Box::new(to),
            from: Box::new(BufReader::new(from)),
            killed: false,
        }
    }

    fn of_child() -> Self {
        Self {
            child: None,
            to: Box::new(std::io::stdout()),
            from: Box::new(BufReader::new(std::io::stdin())),
            killed: false,
        }
    }

    pub fn say(&mut self, text: &str) {
        writeln!(self.to, "{text}").unwrap();
        self.to.flush().unwrap();
    }

    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the other process has ended");
        line.trim_end().to_owned()
    }

    pub fn expect(&mut self, text: &str) {
        assert_eq!(self.hear(), text);
    }

    pub fn say_numbers(&mut self, a: u64, b: u64) {
        self.say(&format!("{a} {b}"));
    }

    pub fn numbers(&mut self) -> (u64, u64) {
        let line = self.hear();
        let (a, b) = line.split_once(' ').unwrap();
        (a.parse().unwrap(), b.parse().unwrap())
    }

    pub fn pid(&self) -> i32 {
        self.child.as_ref().unwrap().id().cast_signed()
    }

    fn signal(&self, signal: c_int) {
        // SAFETY: the child is this process's own and not waited for yet.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Stops the other process, and returns when it has stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let path = format!("/proc/{}/stat", self.pid());
        while !std::fs::read_to_string(&path).unwrap().contains(") T ") {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    pub fn kill(&mut self) {
        self.killed = true;
        let child = self.child.as_mut().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Until the parent lets this process go.
    pub fn wait_end(&mut self) {
        let mut rest = String::new();
        self.from.read_line(&mut rest).unwrap();
    }

    fn finish(mut self) {
        self.to = Box::new(std::io::sink());
        if !self.killed {
            let status = self.child.as_mut().unwrap().wait().unwrap();
            assert!(status.success(), "the child: {status}");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A completion without its union.
#[derive(Clone, Copy, Debug)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub byte_len: u32,
    pub imm: Option<u32>,
}

/// A registered buffer.
pub struct Buffer {
    bytes: *mut u8,
    len: usize,
    mr: *mut ibv_mr,
}

impl Buffer {
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn addr(&self) -> u64 {
        self.bytes as u64
    }
    pub fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }
    pub fn lkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).lkey }
    }
    /// A copy of what is there now.
    pub fn bytes(&self) -> Vec<u8> {
        (0..self.len)
            // SAFETY: inside the buffer; another process may write it.
            .map(|i| unsafe { self.bytes.add(i).read_volatile() })
            .collect()
    }
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: inside the buffer; no request names it now.
        unsafe { self.bytes.write_bytes(byte, self.len) };
    }
    /// The same memory and registration once more.
    pub fn again(&self) -> Self {
        Self {
            bytes: self.bytes,
            len: self.len,
            mr: self.mr,
        }
    }
    /// Leaves it registered for as long as the process lives.
    pub fn leak(self) -> &'static [u8] {
        // SAFETY: never freed; the caller's peer is done with it.
        unsafe { std::slice::from_raw_parts(self.bytes, self.len) }
    }
}

/// `ibv_post_srq_recv` of one receive, all of `buffer`.
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

/// Address of a queue pair.
#[derive(Clone, Copy)]
pub struct Address {
    pub qpn: u32,
    pub gid: u128,
}

impl Address {
    /// What [`End::say_address`] said.
    pub fn parse(line: &str) -> Self {
        let (qpn, gid) = line.split_once(' ').unwrap();
        Self {
            qpn: qpn.parse().unwrap(),
            gid: gid.parse().unwrap(),
        }
    }
}

/// One end of a connection, with everything that it needs.
pub struct End {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub rnr_retry: u8,
    polled: VecDeque<Wc>,
}

pub fn verbs() -> &'static VerbsFns {
    &softverbs::backend().verbs
}

pub fn open() -> *mut ibv_context {
    // SAFETY: the list is freed after its only use.
    unsafe {
        let mut count = 0;
        let list = (verbs().ibv_get_device_list)(&raw mut count);
        assert_eq!(count, 1);
        let context = (verbs().ibv_open_device)(*list);
        assert!(!context.is_null(), "{}", std::io::Error::last_os_error());
        (verbs().ibv_free_device_list)(list);
        context
    }
}

impl End {
    pub fn create(_link: &mut Link, sends: u32, recvs: u32, pieces: u32) -> Self {
        Self::with(sends, recvs, pieces)
    }

    pub fn with(sends: u32, recvs: u32, pieces: u32) -> Self {
        Self::of_type(IBV_QPT_RC, sends, recvs, pieces)
    }

    /// One of another type, still in RESET.
    pub fn of_type(kind: u32, sends: u32, recvs: u32, pieces: u32) -> Self {
        let context = open();
        // SAFETY: all objects are live and of one context.
        unsafe {
            let channel = (verbs().ibv_create_comp_channel)(context);
            let pd = (verbs().ibv_alloc_pd)(context);
            let cqe = (sends + recvs) as c_int;
            let cq = (verbs().ibv_create_cq)(context, cqe, std::ptr::null_mut(), channel, 0);
            assert!(!channel.is_null() && !pd.is_null() && !cq.is_null());
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = cq;
            init.recv_cq = cq;
            init.qp_type = kind;
            init.cap.max_send_wr = sends;
            init.cap.max_recv_wr = recvs;
            init.cap.max_send_sge = pieces;
            init.cap.max_recv_sge = pieces;
            init.cap.max_inline_data = 64;
            let qp = (verbs().ibv_create_qp)(pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            let mut end = Self {
                context,
                channel,
                pd,
                cq,
                qp,
                rnr_retry: 7,
                polled: VecDeque::new(),
            };
            if kind == IBV_QPT_RC {
                end.enter_init();
            }
            end
        }
    }

    /// One of any type, still in RESET.
    pub fn of_type_in_reset(kind: u32) -> Self {
        let mut end = Self::of_type(kind, 16, 16, 1);
        if kind == IBV_QPT_RC {
            end.reset();
        }
        end
    }

    /// One that was put together elsewhere.
    pub fn of_parts(
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        pd: *mut ibv_pd,
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
    ) -> Self {
        Self {
            context,
            channel,
            pd,
            cq,
            qp,
            rnr_retry: 7,
            polled: VecDeque::new(),
        }
    }

    /// A shared receive queue of `count` receives of one piece.
    pub fn create_srq(&self, count: u32) -> *mut ibv_srq {
        // SAFETY: all zeros is a value of it; the domain is live.
        unsafe {
            let mut init: ibv_srq_init_attr = std::mem::zeroed();
            init.attr.max_wr = count;
            init.attr.max_sge = 1;
            let srq = (verbs().ibv_create_srq)(self.pd, &raw mut init);
            assert!(!srq.is_null(), "{}", std::io::Error::last_os_error());
            srq
        }
    }

    /// Another connection of the same process, which takes its receives from `srq`. Completions
    /// come to the first end.
    pub fn on_srq(&self, srq: *mut ibv_srq) -> Self {
        // SAFETY: all objects are live and of one context.
        unsafe {
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.send_cq = self.cq;
            init.recv_cq = self.cq;
            init.srq = srq;
            init.qp_type = IBV_QPT_RC;
            init.cap.max_send_wr = 16;
            init.cap.max_send_sge = 1;
            let qp = (verbs().ibv_create_qp)(self.pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            self.with_qp(qp)
        }
    }

    /// The same with another queue pair, which goes to INIT.
    pub fn with_qp(&self, qp: *mut ibv_qp) -> Self {
        let mut end = Self {
            qp,
            polled: VecDeque::new(),
            ..*self
        };
        end.enter_init();
        end
    }

    /// Creates an end, connects it, and waits until the other one is connected too.
    pub fn connect(link: &mut Link, sends: u32, recvs: u32, pieces: u32) -> Self {
        let mut end = Self::create(link, sends, recvs, pieces);
        end.join(link);
        end
    }

    pub fn modify(&mut self, attr: &mut ibv_qp_attr, mask: u32) {
        // SAFETY: live queue pair, valid attributes.
        let ret = unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) };
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
    }

    pub fn reset(&mut self) {
        // SAFETY: all zeros is a value of it, and RESET.
        self.modify(&mut unsafe { std::mem::zeroed() }, IBV_QP_STATE);
    }

    pub fn enter_init(&mut self) {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags =
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        self.modify(
            &mut attr,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        );
    }

    pub fn address(&self) -> Address {
        // SAFETY: live objects; a GID is 16 bytes.
        unsafe {
            let mut gid: ibv_gid = std::mem::zeroed();
            assert_eq!((verbs().ibv_query_gid)(self.context, 1, 0, &raw mut gid), 0);
            Address {
                qpn: (*self.qp).qp_num,
                gid: (&raw const gid).cast::<u128>().read_unaligned(),
            }
        }
    }

    pub fn exchange(&self, link: &mut Link) -> Address {
        self.say_address(link);
        Address::parse(&link.hear())
    }

    pub fn say_address(&self, link: &mut Link) {
        let own = self.address();
        link.say(&format!("{} {}", own.qpn, own.gid));
    }

    pub fn enter_rtr(&mut self, other: Address) {
        let ret = self.try_enter_rtr(other);
        assert_eq!(ret, 0, "{}", std::io::Error::from_raw_os_error(ret));
    }

    pub fn try_enter_rtr(&mut self, other: Address) -> c_int {
        // SAFETY: all zeros is a value of it; a GID is 16 bytes.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = other.qpn;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        // SAFETY: as above.
        unsafe {
            (&raw mut attr.ah_attr.grh.dgid)
                .cast::<u128>()
                .write_unaligned(other.gid);
        }
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        // SAFETY: live queue pair, valid attributes.
        unsafe { (verbs().ibv_modify_qp)(self.qp, &raw mut attr, mask.cast_signed()) }
    }

    pub fn enter_rts(&mut self) {
        self.enter_rts_within(14, 7);
    }

    /// With `timeout` and `retry_cnt` of `ibv_modify_qp(3)`.
    pub fn enter_rts_within(&mut self, timeout: u8, retries: u8) {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = timeout;
        attr.retry_cnt = retries;
        attr.rnr_retry = self.rnr_retry;
        attr.max_rd_atomic = 1;
        self.modify(
            &mut attr,
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
        );
    }

    /// From SQD back to RTS.
    pub fn enter_rts_again(&mut self) {
        // SAFETY: all zeros is a value of it.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        self.modify(&mut attr, IBV_QP_STATE);
    }

    pub fn join_early(&mut self, link: &mut Link) {
        let other = self.exchange(link);
        self.enter_rtr(other);
        self.enter_rts();
    }

    pub fn join(&mut self, link: &mut Link) {
        self.join_early(link);
        link.say("ready");
        link.expect("ready");
    }

    pub fn buffer(&self, bytes: &[u8]) -> Buffer {
        let all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
        self.buffer_with(bytes, all)
    }

    pub fn buffer_with(&self, bytes: &[u8], access: u32) -> Buffer {
        let mut memory = bytes.to_vec();
        memory.reserve_exact(1);
        memory.resize(bytes.len().max(1), 0);
        let memory = Box::leak(memory.into_boxed_slice());
        let start = memory.as_mut_ptr();
        // SAFETY: live domain; the memory stays registered until it is freed.
        let mr = unsafe {
            (verbs().ibv_reg_mr)(self.pd, start.cast(), memory.len(), access.cast_signed())
        };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        Buffer {
            bytes: start,
            len: bytes.len(),
            mr,
        }
    }

    pub fn deregister(&self, buffer: Buffer) -> &'static [u8] {
        // SAFETY: live region.
        assert_eq!(unsafe { (verbs().ibv_dereg_mr)(buffer.mr) }, 0);
        buffer.leak()
    }

    pub fn release(&self, buffer: Buffer) {
        let _ = self.deregister(buffer);
    }

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

    /// The next completion's status, by polling with the least around it.
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
                // A test that hangs tells less than one that fails.
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

    pub fn async_event(&mut self) -> u32 {
        let (event, element) = self.any_async_event();
        assert_eq!(element, self.qp as usize);
        event
    }

    /// The next event and the address of what it is about.
    pub fn any_async_event(&mut self) -> (u32, usize) {
        // SAFETY: live context; the event is acknowledged once; all members are pointers.
        unsafe {
            let mut event: ibv_async_event = std::mem::zeroed();
            assert_eq!(
                (verbs().ibv_get_async_event)(self.context, &raw mut event),
                0
            );
            let element = event.element.qp as usize;
            (verbs().ibv_ack_async_event)(&raw mut event);
            (event.event_type, element)
        }
    }

    pub fn state(&self) -> u32 {
        // SAFETY: live queue pair, writable outputs.
        unsafe {
            let mut attr: ibv_qp_attr = std::mem::zeroed();
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            let mask = IBV_QP_STATE.cast_signed();
            let ret = (verbs().ibv_query_qp)(self.qp, &raw mut attr, mask, &raw mut init);
            assert_eq!(ret, 0);
            attr.qp_state
        }
    }

    /// In a forked child: whether every call fails and none crashes.
    pub fn refuses_everything(&mut self) -> bool {
        // SAFETY: live objects of the parent.
        unsafe {
            let mut wc: ibv_wc = std::mem::zeroed();
            let mut wr: ibv_send_wr = std::mem::zeroed();
            let mut bad = std::ptr::null_mut();
            let mut attr: ibv_device_attr = std::mem::zeroed();
            let memory = [0u8; 8];
            ibv_poll_cq(self.cq, 1, &raw mut wc) < 0
                && ibv_post_send(self.qp, &raw mut wr, &raw mut bad) != 0
                && ibv_req_notify_cq(self.cq, 0) != 0
                && (verbs().ibv_query_device)(self.context, &raw mut attr) != 0
                && (verbs().ibv_reg_mr)(self.pd, memory.as_ptr().cast_mut().cast(), 8, 0).is_null()
                && (verbs().ibv_alloc_pd)(self.context).is_null()
                && self.works_anew()
        }
    }

    /// In a forked child: a context of its own works.
    fn works_anew(&self) -> bool {
        let mut own = Self::with(4, 4, 1);
        let address = own.address();
        if address.qpn >> 14 == self.address_number() >> 14 {
            return false;
        }
        let receive = own.buffer(&[0; 8]);
        own.recv(&receive, 1);
        own.enter_rtr(address);
        own.enter_rts();
        own.send_unregistered(&mut [3; 8], None, IBV_SEND_INLINE, 2);
        let wc = own.wait(Duration::from_secs(5));
        wc.wr_id == 1 && receive.bytes() == [3; 8]
    }

    fn address_number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }
}

pub const QKEY: u32 = 0x1111_1111;

/// A queue pair of datagrams, ready to send.
pub fn datagram_end() -> End {
    ready_for_datagrams(End::of_type(IBV_QPT_UD, 16, 16, 2))
}

/// Another one of the same process, which takes its receives from `srq`.
pub fn datagram_end_on(first: &End, srq: *mut ibv_srq) -> End {
    // SAFETY: all zeros is a value of it; all objects are live and of one context.
    unsafe {
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = first.cq;
        init.recv_cq = first.cq;
        init.srq = srq;
        init.qp_type = IBV_QPT_UD;
        init.cap.max_send_wr = 4;
        init.cap.max_send_sge = 1;
        let qp = (verbs().ibv_create_qp)(first.pd, &raw mut init);
        assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
        ready_for_datagrams(End {
            qp,
            polled: VecDeque::new(),
            ..*first
        })
    }
}

fn ready_for_datagrams(mut end: End) -> End {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qkey = QKEY;
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    end.modify(&mut attr, mask);
    attr.qp_state = IBV_QPS_RTR;
    end.modify(&mut attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    end.modify(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
    end
}

pub fn address_handle(end: &End, to: Address) -> *mut ibv_ah {
    // SAFETY: all zeros is a value of it; a GID is 16 bytes; the domain is live.
    unsafe {
        let mut attr: ibv_ah_attr = std::mem::zeroed();
        attr.port_num = 1;
        let ah = (verbs().ibv_create_ah)(end.pd, &raw mut attr);
        assert!(ah.is_null(), "an Ethernet port needs a global route");
        attr.is_global = 1;
        attr.grh.traffic_class = 5;
        attr.grh.flow_label = 0x12345;
        (&raw mut attr.grh.dgid)
            .cast::<u128>()
            .write_unaligned(to.gid);
        let ah = (verbs().ibv_create_ah)(end.pd, &raw mut attr);
        assert!(!ah.is_null(), "{}", std::io::Error::last_os_error());
        ah
    }
}

pub fn send_datagram(end: &mut End, buffer: &Buffer, len: usize, to: (*mut ibv_ah, u32, u32)) {
    post_datagram(end, buffer, len, to, IBV_SEND_SIGNALED);
}

pub fn post_datagram(
    end: &mut End,
    buffer: &Buffer,
    len: usize,
    to: (*mut ibv_ah, u32, u32),
    flags: u32,
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
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.send_flags = flags;
    wr.__bindgen_anon_1.bindgen_union_field = len as u32;
    wr.wr.ud.ah = to.0;
    wr.wr.ud.remote_qpn = to.1;
    wr.wr.ud.remote_qkey = to.2;
    end.post(&mut wr);
}
