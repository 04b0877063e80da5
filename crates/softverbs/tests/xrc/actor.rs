//! A process that executes XRC commands: it reads one command per line, and prints one line as the
//! answer.
//!
//! In one file, because all commands use and change the objects of the one process.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use atomic_ops::{Datatype, Op};
use rdma_core_sys::*;

use super::common::{open, verbs};

/// Set in a process that has executed itself: it opens the device on command.
const AGAIN: &str = "SOFTVERBS_TEST_AGAIN";
/// Limit of every wait.
const LIMIT: Duration = Duration::from_secs(20);
/// Bytes of each receive, and of the memory that peers write and read.
pub(crate) const ROOM: usize = 200_000;

/// A byte of a message, which depends on the message's number.
pub(crate) fn byte(number: u64, at: usize) -> u8 {
    (number as usize * 31 + at * 7 + (at >> 8)) as u8
}

struct Actor {
    context: *mut ibv_context,
    channel: *mut ibv_comp_channel,
    pd: *mut ibv_pd,
    /// The completion queues of the shared receive queue and of sends.
    inbox: *mut ibv_cq,
    outbox: *mut ibv_cq,
    xrcd: *mut ibv_xrcd,
    srq: *mut ibv_srq,
    memory: *mut ibv_mr,
    qps: HashMap<u32, *mut ibv_qp>,
    /// Completions that arrived while it waited for a command.
    kept: HashMap<*mut ibv_cq, VecDeque<ibv_wc>>,
}

/// A live queue pair, for use by several threads.
#[derive(Clone, Copy)]
struct Handle(*mut ibv_qp);

// SAFETY: queue pairs may be used by several threads at once.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn modify(self, mask: u32, set: impl FnOnce(&mut ibv_qp_attr)) -> i32 {
        let mut attr = ibv_qp_attr::default();
        set(&mut attr);
        // SAFETY: live queue pair, valid attributes.
        unsafe { (verbs().ibv_modify_qp)(self.0, &raw mut attr, mask.cast_signed()) }
    }

    fn init(self) -> i32 {
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(mask, |attr| {
            attr.qp_state = IBV_QPS_INIT;
            attr.port_num = 1;
            attr.qp_access_flags =
                IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        })
    }

    fn query(self) -> ibv_qp_attr {
        let mut attr = ibv_qp_attr::default();
        let mut init = ibv_qp_init_attr::default();
        // SAFETY: live queue pair, writable outputs.
        let ret = unsafe { (verbs().ibv_query_qp)(self.0, &raw mut attr, 0, &raw mut init) };
        assert_eq!(ret, 0);
        attr
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn answer<T>(pointer: *mut T, text: impl FnOnce() -> String) -> String {
    if pointer.is_null() {
        format!("errno {}", errno())
    } else {
        text()
    }
}

/// Sets the limit of descriptors; those with larger numbers stay open.
fn allow_descriptors(count: u64) -> String {
    // SAFETY: a structure on the stack; all zeros is a value of it.
    code(unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = count;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)
    })
}

fn code(ret: i32) -> String {
    if ret == 0 {
        "ok".into()
    } else {
        format!("errno {ret}")
    }
}

fn poll_one(cq: *mut ibv_cq) -> Option<ibv_wc> {
    // SAFETY: live queue, room for one; all zeros is a completion.
    unsafe {
        let mut wc: ibv_wc = std::mem::zeroed();
        match ibv_poll_cq(cq, 1, &raw mut wc) {
            0 => None,
            count => {
                assert_eq!(count, 1);
                Some(wc)
            }
        }
    }
}

/// Reads commands until the end of the input.
pub(crate) fn run() {
    let answer = |reply: &str| {
        println!("{reply}");
        std::io::stdout().flush().unwrap();
    };
    if std::env::var_os(AGAIN).is_some() {
        answer("ok");
        assert_eq!(line().as_deref(), Some("open"));
        answer("ok");
    }
    let mut actor = Actor::new();
    while let Some(line) = actor.command() {
        let words: Vec<&str> = line.split(' ').collect();
        answer(&actor.act(words[0], &words[1..]));
    }
}

/// The next line. Reads no further byte, because `poll` would not report buffered input.
fn line() -> Option<String> {
    let mut line = Vec::new();
    loop {
        let mut byte = [0u8];
        // SAFETY: room for one byte.
        if unsafe { libc::read(0, byte.as_mut_ptr().cast(), 1) } != 1 {
            return None;
        }
        if byte == *b"\n" {
            return Some(String::from_utf8(line).unwrap());
        }
        line.extend(byte);
    }
}

impl Actor {
    fn new() -> Self {
        let context = open();
        // SAFETY: all objects are live and of one context; the memory is never freed.
        unsafe {
            let channel = (verbs().ibv_create_comp_channel)(context);
            let null = std::ptr::null_mut();
            let cq = |channel| (verbs().ibv_create_cq)(context, 256, null, channel, 0);
            let (inbox, outbox) = (cq(channel), cq(channel));
            let pd = (verbs().ibv_alloc_pd)(context);
            let bytes = Box::leak(vec![0u8; 9 * ROOM].into_boxed_slice());
            let all = IBV_ACCESS_LOCAL_WRITE
                | IBV_ACCESS_REMOTE_READ
                | IBV_ACCESS_REMOTE_WRITE
                | IBV_ACCESS_REMOTE_ATOMIC;
            let at = bytes.as_mut_ptr().cast();
            let memory = (verbs().ibv_reg_mr)(pd, at, bytes.len(), all.cast_signed());
            assert!(!inbox.is_null() && !outbox.is_null() && !memory.is_null());
            Self {
                context,
                channel,
                pd,
                inbox,
                outbox,
                xrcd: std::ptr::null_mut(),
                srq: std::ptr::null_mut(),
                memory,
                qps: HashMap::new(),
                kept: HashMap::new(),
            }
        }
    }

    /// The next line. Polls the queues until one arrives, because a process receives only while it
    /// polls.
    fn command(&mut self) -> Option<String> {
        loop {
            let mut poll = libc::pollfd {
                fd: 0,
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one descriptor.
            if unsafe { libc::poll(&raw mut poll, 1, 1) } != 0 {
                return line();
            }
            for cq in [self.inbox, self.outbox] {
                while let Some(wc) = poll_one(cq) {
                    self.kept.entry(cq).or_default().push_back(wc);
                }
            }
        }
    }

    /// Memory of the receive with this number, up to 7; 8 is the source of sends and the
    /// destination of reads.
    fn place(&self, number: u64) -> u64 {
        // SAFETY: live.
        unsafe { (*self.memory).addr as u64 + number * ROOM as u64 }
    }

    fn lkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.memory).lkey }
    }

    fn read(&self, number: u64, len: usize) -> Vec<u8> {
        let at: *const u8 = std::ptr::without_provenance(self.place(number) as usize);
        (0..len)
            // SAFETY: inside the memory; another process may write it.
            .map(|i| unsafe { at.add(i).read_volatile() })
            .collect()
    }

    fn fill(&self, number: u64, content: impl Fn(usize) -> u8, len: usize) {
        let to: *mut u8 = std::ptr::without_provenance_mut(self.place(number) as usize);
        for i in 0..len {
            // SAFETY: inside the memory; no request names it now.
            unsafe { to.add(i).write_volatile(content(i)) };
        }
    }

    fn act(&mut self, verb: &str, words: &[&str]) -> String {
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        match verb {
            "domain" => self.domain(words),
            // SAFETY: live.
            "leave" => code(unsafe { ibv_close_xrcd(self.xrcd) }),
            "srq" => self.create_srq(number(0) as u32),
            "basic_srq" => self.create_basic_srq(number(0) as u32),
            "number" => self.srq_num(),
            // SAFETY: live.
            "end_srq" => code(unsafe { (verbs().ibv_destroy_srq)(self.srq) }),
            "receive" => self.receive(number(0), number(1) as u32),
            "target" => self.target(None),
            "hold" => self.target(Some(number(0) as u32)),
            "initiator" => self.initiator(number(0) as u8),
            "rc" => self.reliable(),
            "init" => self.init(number(0) as u32),
            "rtr" => self.rtr(number(0) as u32, number(1) as u32),
            "rts" => self.rts(number(0) as u32, 7, 14),
            "rts_retries" => self.rts(number(0) as u32, number(1) as u8, 14),
            "rts_timeout" => self.rts(number(0) as u32, 7, number(1) as u8),
            "restrict" => self.restrict(number(0) as u32, Duration::from_millis(number(1))),
            "contend" => self.contend(number(0) as u32, Duration::from_millis(number(1))),
            "fail" => self.modify(number(0) as u32, IBV_QP_STATE, |attr| {
                attr.qp_state = IBV_QPS_ERR;
            }),
            "reset" => self.modify(number(0) as u32, IBV_QP_STATE, |attr| {
                attr.qp_state = IBV_QPS_RESET;
            }),
            "state" => self.state(number(0) as u32),
            "destroy" => {
                let qp = self.qps.remove(&(number(0) as u32)).unwrap();
                // SAFETY: live.
                code(unsafe { (verbs().ibv_destroy_qp)(qp) })
            }
            "send" => self.post(words, IBV_WR_SEND),
            "send_imm" => self.post(words, IBV_WR_SEND_WITH_IMM),
            "write" => self.post(words, IBV_WR_RDMA_WRITE),
            "write_imm" => self.post(words, IBV_WR_RDMA_WRITE_WITH_IMM),
            "read" => self.post(words, IBV_WR_RDMA_READ),
            "add" => self.post(words, IBV_WR_ATOMIC_FETCH_AND_ADD),
            "swap" => self.post(words, IBV_WR_ATOMIC_CMP_AND_SWP),
            "batch" => self.batch(words),
            "write_now" => self.access(words, IBV_WR_RDMA_WRITE),
            "read_now" => self.access(words, IBV_WR_RDMA_READ),
            "change_now" => self.change(words),
            "receive_away" => {
                // posts a receive, and makes no call for a time
                let reply = self.receive(number(0), number(1) as u32);
                std::thread::sleep(Duration::from_millis(number(2)));
                reply
            }
            "away" => {
                // no call of the device, also not one of those that await a command
                std::thread::sleep(Duration::from_millis(number(0)));
                "ok".into()
            }
            "doze" => self.doze(Duration::from_millis(number(0))),
            "sent" => self.sent(),
            "unsent" => self.unsent(),
            "received" => self.received(false),
            "awaken" => self.received(true),
            "again" => {
                // it keeps its pid, which determines the slot, and for all others it has ended
                let mut command = Command::new(std::env::current_exe().unwrap());
                panic!("{}", command.env(AGAIN, "1").exec());
            }
            "limit" => self.set_limit(number(0) as u32),
            "sleep" => self.sleep_for_event(),
            "event" => self.event(),
            "events" => self.no_event(),
            "descriptors" => allow_descriptors(number(0)),
            "mapped" => self.await_domain(),
            "deregister" => {
                // SAFETY: live; the region is not used again.
                code(unsafe { (verbs().ibv_dereg_mr)(self.memory) })
            }
            "memory" => {
                // SAFETY: live.
                let rkey = unsafe { (*self.memory).rkey };
                format!("{} {rkey}", self.place(0))
            }
            "clear" => {
                self.fill(number(0), |_| 0, ROOM);
                "ok".into()
            }
            "holds" => {
                let (place, message, len) = (number(0), number(1), number(2) as usize);
                let bytes = self.read(place, len + 1);
                let whole = (0..len).all(|i| bytes[i] == byte(message, i)) && bytes[len] == 0;
                whole.to_string()
            }
            "word" => {
                let bytes = self.read(number(0), 8);
                u64::from_ne_bytes(bytes.try_into().unwrap()).to_string()
            }
            _ => panic!("{verb}"),
        }
    }

    fn domain(&mut self, words: &[&str]) -> String {
        let file = (words[0] != "-").then(|| {
            std::fs::File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(words[0])
        });
        let file = match file.transpose() {
            Ok(file) => file,
            Err(error) => return format!("errno {}", error.raw_os_error().unwrap_or(0)),
        };
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: file.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            oflags: words[1].parse().unwrap(),
        };
        // SAFETY: live context, valid attributes.
        let xrcd = unsafe { ibv_open_xrcd(self.context, &raw mut init) };
        if !xrcd.is_null() {
            self.xrcd = xrcd;
        }
        answer(xrcd, || "ok".into())
    }

    fn create_srq(&mut self, receives: u32) -> String {
        let mut init = ibv_srq_init_attr_ex {
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd: self.pd,
            xrcd: self.xrcd,
            cq: self.inbox,
            ..Default::default()
        };
        init.attr.max_wr = receives;
        init.attr.max_sge = 1;
        // SAFETY: live objects, valid attributes.
        self.srq = unsafe { ibv_create_srq_ex(self.context, &raw mut init) };
        // the queue's actual sizes are stored, and are at least the requested ones
        assert!(self.srq.is_null() || init.attr.max_wr >= receives && init.attr.max_sge >= 1);
        answer(self.srq, || self.srq_num())
    }

    /// A shared receive queue of connections.
    fn create_basic_srq(&mut self, receives: u32) -> String {
        let mut init = ibv_srq_init_attr::default();
        init.attr.max_wr = receives;
        init.attr.max_sge = 1;
        // SAFETY: live domain, valid attributes.
        self.srq = unsafe { (verbs().ibv_create_srq)(self.pd, &raw mut init) };
        answer(self.srq, || "ok".into())
    }

    fn srq_num(&self) -> String {
        let mut number = 0;
        // SAFETY: live queue.
        assert_eq!(unsafe { ibv_get_srq_num(self.srq, &raw mut number) }, 0);
        number.to_string()
    }

    fn receive(&self, number: u64, len: u32) -> String {
        self.fill(number, |_| 0, ROOM);
        let mut sge = ibv_sge {
            addr: self.place(number),
            length: len,
            lkey: self.lkey(),
        };
        let mut wr = ibv_recv_wr {
            wr_id: number,
            sg_list: &raw mut sge,
            num_sge: 1,
            ..Default::default()
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: live queue, a chain of one.
        code(unsafe { ibv_post_srq_recv(self.srq, &raw mut wr, &raw mut bad) })
    }

    fn keep(&mut self, qp: *mut ibv_qp) -> String {
        answer(qp, || {
            // SAFETY: live.
            let number = unsafe { (*qp).qp_num };
            self.qps.insert(number, qp);
            number.to_string()
        })
    }

    fn target(&mut self, known: Option<u32>) -> String {
        // SAFETY: live objects, valid attributes.
        let qp = unsafe {
            if let Some(qp_num) = known {
                let mut attr = ibv_qp_open_attr {
                    comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                    qp_num,
                    xrcd: self.xrcd,
                    qp_type: IBV_QPT_XRC_RECV,
                    ..Default::default()
                };
                ibv_open_qp(self.context, &raw mut attr)
            } else {
                let mut init = ibv_qp_init_attr_ex {
                    comp_mask: IBV_QP_INIT_ATTR_XRCD,
                    qp_type: IBV_QPT_XRC_RECV,
                    xrcd: self.xrcd,
                    ..Default::default()
                };
                ibv_create_qp_ex(self.context, &raw mut init)
            }
        };
        self.keep(qp)
    }

    fn initiator(&mut self, _: u8) -> String {
        let mut init = ibv_qp_init_attr_ex {
            comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            qp_type: IBV_QPT_XRC_SEND,
            pd: self.pd,
            send_cq: self.outbox,
            send_ops_flags: u64::from(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE),
            ..Default::default()
        };
        init.cap.max_send_wr = 64;
        init.cap.max_send_sge = 1;
        init.cap.max_inline_data = 64;
        // SAFETY: live objects, valid attributes.
        let qp = unsafe { ibv_create_qp_ex(self.context, &raw mut init) };
        self.keep(qp)
    }

    /// A reliable connection, on the shared receive queue if there is one.
    fn reliable(&mut self) -> String {
        let mut init = ibv_qp_init_attr {
            send_cq: self.outbox,
            recv_cq: self.inbox,
            srq: self.srq,
            qp_type: IBV_QPT_RC,
            ..Default::default()
        };
        init.cap.max_send_wr = 64;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_wr = 1;
        init.cap.max_recv_sge = 1;
        // SAFETY: live objects, valid attributes.
        let qp = unsafe { (verbs().ibv_create_qp)(self.pd, &raw mut init) };
        self.keep(qp)
    }

    fn modify(&self, qp: u32, mask: u32, set: impl FnOnce(&mut ibv_qp_attr)) -> String {
        code(Handle(self.qps[&qp]).modify(mask, set))
    }

    fn init(&self, qp: u32) -> String {
        code(Handle(self.qps[&qp]).init())
    }

    fn has_type(&self, qp: u32, wanted: ibv_qp_type) -> bool {
        // SAFETY: live.
        unsafe { (*self.qps[&qp]).qp_type == wanted }
    }

    fn rtr(&self, qp: u32, dest: u32) -> String {
        let mut mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        if !self.has_type(qp, IBV_QPT_XRC_SEND) {
            mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        }
        self.modify(qp, mask, |attr| {
            attr.qp_state = IBV_QPS_RTR;
            attr.path_mtu = IBV_MTU_1024;
            attr.dest_qp_num = dest;
            attr.max_dest_rd_atomic = 4;
            attr.min_rnr_timer = 12;
            attr.ah_attr.dlid = 1;
            attr.ah_attr.port_num = 1;
        })
    }

    fn rts(&self, qp: u32, rnr_retry: u8, timeout: u8) -> String {
        let mut mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN;
        if !self.has_type(qp, IBV_QPT_XRC_RECV) {
            mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        }
        self.modify(qp, mask, |attr| {
            attr.qp_state = IBV_QPS_RTS;
            attr.timeout = timeout;
            attr.retry_cnt = 7;
            attr.rnr_retry = rnr_retry;
            attr.max_rd_atomic = 4;
        })
    }

    /// Opens a second handle on a target, which another thread changes all the time. Meanwhile calls
    /// `check` with the first one until its answer is not "ok", or for the given time.
    fn beside(
        &mut self,
        target: u32,
        limit: Duration,
        change: fn(Handle),
        mut check: impl FnMut(Handle) -> String,
    ) -> String {
        let first = Handle(self.qps[&target]);
        let opened = self.target(Some(target));
        if opened != target.to_string() {
            return opened;
        }
        let second = Handle(self.qps[&target]);
        let over = AtomicBool::new(false);
        let mut result = String::from("ok");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    change(second);
                }
            });
            let begin = Instant::now();
            while result == "ok" && begin.elapsed() < limit {
                result = check(first);
            }
            over.store(true, Ordering::Relaxed);
        });
        // SAFETY: live, and not used any more.
        assert_eq!(unsafe { (verbs().ibv_destroy_qp)(first.0) }, 0);
        result
    }

    /// One handle of a connected target removes all rights while another one sets a timer.
    fn restrict(&mut self, target: u32, limit: Duration) -> String {
        fn set_timer(handle: Handle) {
            // it may find the target changed meanwhile
            handle.modify(IBV_QP_MIN_RNR_TIMER, |attr| attr.min_rnr_timer = 3);
        }
        fn allow(handle: Handle, rights: u32) {
            let set = |attr: &mut ibv_qp_attr| attr.qp_access_flags = rights;
            while handle.modify(IBV_QP_ACCESS_FLAGS, set) != 0 {}
        }
        self.beside(target, limit, set_timer, |handle| {
            allow(handle, IBV_ACCESS_REMOTE_WRITE);
            allow(handle, 0);
            let left = (0..20).map(|_| handle.query().qp_access_flags);
            match left.max() {
                Some(0) => "ok".into(),
                left => format!("{left:?}"),
            }
        })
    }

    /// One handle of a target moves it to RESET while another one moves it to ERR.
    fn contend(&mut self, target: u32, limit: Duration) -> String {
        fn fail(handle: Handle) {
            // illegal behind the RESET
            handle.modify(IBV_QP_STATE, |attr| attr.qp_state = IBV_QPS_ERR);
        }
        self.beside(target, limit, fail, |handle| {
            // in INIT or, by the other handle, in ERR
            handle.init();
            code(handle.modify(IBV_QP_STATE, |attr| attr.qp_state = IBV_QPS_RESET))
        })
    }

    fn state(&self, qp: u32) -> String {
        let attr = Handle(self.qps[&qp]).query();
        format!("{} {}", attr.qp_state, attr.dest_qp_num)
    }

    /// `qp srqn message len [addr rkey [imm or operand]]`.
    fn post(&self, words: &[&str], opcode: u32) -> String {
        let given: Vec<u64> = words.iter().map(|word| word.parse().unwrap()).collect();
        let more = |i: usize| given.get(i).copied().unwrap_or(0);
        let len = more(3) as usize;
        self.fill(8, |i| byte(more(2), i), len);
        let mut sge = ibv_sge {
            addr: self.place(8),
            length: len as u32,
            lkey: self.lkey(),
        };
        // SAFETY: all zeros is a request.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = more(2);
        wr.sg_list = &raw mut sge;
        wr.num_sge = 1;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.opcode = opcode;
        wr.qp_type.xrc.remote_srqn = more(1) as u32;
        wr.__bindgen_anon_1.bindgen_union_field = more(6) as u32;
        if matches!(
            opcode,
            IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_CMP_AND_SWP
        ) {
            wr.wr.atomic.remote_addr = more(4);
            wr.wr.atomic.rkey = more(5) as u32;
            wr.wr.atomic.compare_add = more(6);
            wr.wr.atomic.swap = more(7);
        } else {
            wr.wr.rdma.remote_addr = more(4);
            wr.wr.rdma.rkey = more(5) as u32;
        }
        let mut bad = std::ptr::null_mut();
        let qp = self.qps[&(more(0) as u32)];
        // SAFETY: live queue pair, a chain of one.
        code(unsafe { ibv_post_send(qp, &raw mut wr, &raw mut bad) })
    }

    /// `qp srqn message len addr rkey`: a WRITE or READ without a request.
    fn access(&self, words: &[&str], opcode: u32) -> String {
        let given: Vec<u64> = words.iter().map(|word| word.parse().unwrap()).collect();
        let (message, len) = (given[2], given[3] as usize);
        if opcode == IBV_WR_RDMA_WRITE {
            self.fill(8, |i| byte(message, i), len);
        }
        let sge = ibv_sge {
            addr: self.place(8),
            length: len as u32,
            lkey: self.lkey(),
        };
        let (qp, srqn) = (self.qps[&(given[0] as u32)], given[1] as u32);
        let (addr, rkey) = (given[4], given[5] as u32);
        let call = verbs().softdv_access_srq.unwrap();
        // SAFETY: a live queue pair and a registered buffer.
        code(unsafe { call(qp, opcode, &raw const sge, 0, srqn, addr, rkey) })
    }

    /// `qp srqn operand addr rkey`: adds to a word without a request. The former value becomes the
    /// first word of place 8.
    fn change(&self, words: &[&str]) -> String {
        let given: Vec<u64> = words.iter().map(|word| word.parse().unwrap()).collect();
        let (qp, srqn, operand) = (self.qps[&(given[0] as u32)], given[1] as u32, given[2]);
        let operands = (&raw const operand).cast();
        let mut atomic = softdv_atomic {
            op: Op::Sum as u8,
            datatype: Datatype::Uint64 as u8,
            count: 1,
            changed: 0,
            operands,
            compare: std::ptr::null(),
        };
        let (call, mut earlier) = (verbs().softdv_atomic_access_srq.unwrap(), 0_u64);
        let results = (&raw mut earlier).cast();
        let (addr, rkey) = (given[3], given[4] as u32);
        // SAFETY: a live queue pair, an operand, and room for one value.
        let ret = unsafe { call(qp, &raw mut atomic, results, srqn, addr, rkey) };
        let bytes = earlier.to_ne_bytes();
        self.fill(8, |i| bytes[i], bytes.len());
        code(ret)
    }

    /// As `send`, with the calls of `ibv_wr_*`, and inline.
    fn batch(&self, words: &[&str]) -> String {
        let given: Vec<u64> = words.iter().map(|word| word.parse().unwrap()).collect();
        let (message, len) = (given[2], given[3] as usize);
        let mut bytes: Vec<u8> = (0..len).map(|i| byte(message, i)).collect();
        // SAFETY: a live queue pair with these calls; the bytes live until the post.
        unsafe {
            let qp = (verbs().ibv_qp_to_qp_ex.unwrap())(self.qps[&(given[0] as u32)]);
            (*qp).wr_start.unwrap()(qp);
            (*qp).wr_id = message;
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            (*qp).wr_send.unwrap()(qp);
            (*qp).wr_set_xrc_srqn.unwrap()(qp, given[1] as u32);
            (*qp).wr_set_inline_data.unwrap()(qp, bytes.as_mut_ptr().cast(), len);
            code((*qp).wr_complete.unwrap()(qp))
        }
    }

    fn next(&mut self, cq: *mut ibv_cq, sleeps: bool) -> Option<ibv_wc> {
        let known = self.kept.entry(cq).or_default().pop_front();
        let begin = Instant::now();
        let mut found = known.or_else(|| poll_one(cq));
        while found.is_none() && begin.elapsed() < LIMIT {
            if sleeps {
                found = self.sleep(cq);
            } else {
                std::thread::yield_now();
            }
            found = found.or_else(|| poll_one(cq));
        }
        found
    }

    /// Sleeps until the channel has an event.
    fn sleep(&self, cq: *mut ibv_cq) -> Option<ibv_wc> {
        // SAFETY: live objects.
        unsafe {
            assert_eq!(ibv_req_notify_cq(cq, 0), 0);
            if let Some(wc) = poll_one(cq) {
                return Some(wc);
            }
            let mut poll = libc::pollfd {
                fd: (*self.channel).fd,
                events: libc::POLLIN,
                revents: 0,
            };
            let flags = libc::fcntl(poll.fd, libc::F_GETFL);
            libc::fcntl(poll.fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            libc::poll(&raw mut poll, 1, LIMIT.as_millis() as i32);
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            if (verbs().ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context) == 0 {
                (verbs().ibv_ack_cq_events)(cq, 1);
            }
            None
        }
    }

    /// Sleeps in the device until a request has completed, at most for the given time. Returns how
    /// many times the process was woken.
    fn doze(&mut self, limit: Duration) -> String {
        // SAFETY: live objects.
        let fd = unsafe { (*self.channel).fd };
        let (begin, mut woken) = (Instant::now(), 0);
        loop {
            // SAFETY: live objects. The call returns an event or EAGAIN, after it has prepared the
            // process for sleep.
            unsafe {
                let flags = libc::fcntl(fd, libc::F_GETFL);
                libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
                let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
                if (verbs().ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context) == 0 {
                    (verbs().ibv_ack_cq_events)(cq, 1);
                }
                // the retry thread may complete the request
                ibv_req_notify_cq(self.outbox, 0);
            }
            if let Some(wc) = poll_one(self.outbox) {
                self.kept.entry(self.outbox).or_default().push_back(wc);
                break;
            }
            let left = limit.saturating_sub(begin.elapsed());
            let mut poll = libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one descriptor.
            if unsafe { libc::poll(&raw mut poll, 1, left.as_millis() as i32) } == 0 {
                break;
            }
            woken += 1;
        }
        woken.to_string()
    }

    /// The result of a request: its number and status, and the word that it fetched.
    fn sent(&mut self) -> String {
        match self.next(self.outbox, false) {
            None => "nothing".into(),
            Some(wc) => format!("{} {}", wc.wr_id, wc.status),
        }
    }

    /// As `sent`, with the vendor error.
    fn unsent(&mut self) -> String {
        match self.next(self.outbox, false) {
            None => "nothing".into(),
            Some(wc) => format!("{} {} {}", wc.wr_id, wc.status, wc.vendor_err),
        }
    }

    /// The result of a receive: slot, status, length, immediate, queue pair.
    fn received(&mut self, sleeps: bool) -> String {
        let Some(wc) = self.next(self.inbox, sleeps) else {
            return "nothing".into();
        };
        let with_imm = wc.wc_flags & IBV_WC_WITH_IMM != 0;
        let imm = if with_imm {
            wc.__bindgen_anon_1.bindgen_union_field
        } else {
            0
        };
        format!(
            "{} {} {} {imm} {}",
            wc.wr_id, wc.status, wc.byte_len, wc.qp_num
        )
    }

    fn event_within(&self, limit: Duration) -> Option<String> {
        // SAFETY: live context; the event is acknowledged once; all members of the union are
        // pointers.
        unsafe {
            let fd = (*self.context).async_fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            let begin = Instant::now();
            loop {
                let mut event: ibv_async_event = std::mem::zeroed();
                if (verbs().ibv_get_async_event)(self.context, &raw mut event) == 0 {
                    let number = if matches!(
                        event.event_type,
                        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED
                    ) {
                        0
                    } else {
                        (*event.element.qp).qp_num
                    };
                    (verbs().ibv_ack_async_event)(&raw mut event);
                    return Some(format!("{} {number}", event.event_type));
                }
                if begin.elapsed() >= limit {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Polls until the process has mapped the file of a domain.
    fn await_domain(&mut self) -> String {
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            let maps = std::fs::read_to_string("/proc/self/maps");
            if maps.is_ok_and(|maps| maps.contains("softverbs-xrc")) {
                return "ok".into();
            }
            if let Some(wc) = poll_one(self.outbox) {
                self.kept.entry(self.outbox).or_default().push_back(wc);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        "nothing".into()
    }

    fn set_limit(&self, limit: u32) -> String {
        let mut attr = ibv_srq_attr {
            srq_limit: limit,
            ..Default::default()
        };
        let mask = IBV_SRQ_LIMIT.cast_signed();
        // SAFETY: live queue, valid attributes.
        code(unsafe { (verbs().ibv_modify_srq)(self.srq, &raw mut attr, mask) })
    }

    /// Sleeps in poll(2) until the context has an event, without a call of verbs meanwhile, unless
    /// its descriptor is readable.
    fn sleep_for_event(&self) -> String {
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            if let Some(event) = self.event_within(Duration::ZERO) {
                return event;
            }
            let mut poll = libc::pollfd {
                // SAFETY: live context.
                fd: unsafe { (*self.context).async_fd },
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one descriptor.
            if unsafe { libc::poll(&raw mut poll, 1, 3000) } == 0 {
                return "nothing".into();
            }
        }
        "nothing".into()
    }

    fn event(&self) -> String {
        self.event_within(LIMIT).unwrap_or("nothing".into())
    }

    fn no_event(&self) -> String {
        let soon = self.event_within(Duration::from_millis(30));
        soon.unwrap_or("none".into())
    }
}
