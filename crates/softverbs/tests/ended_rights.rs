//! Rights that a queue pair no longer grants: when the call that ends them has returned, no READ,
//! WRITE or atomic through the queue pair accesses memory.
//!
//! One file, because the cases share the accesses that the two processes make.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const LIMIT: Duration = Duration::from_secs(60);
/// Longest wait of a call, and the time that it may take beyond.
const PEER_WAIT: Duration = Duration::from_secs(5);
const ROOM: Duration = Duration::from_secs(5);

pub(crate) fn main() {
    run(&[
        (
            "a_queue_pair_in_error",
            |l| target(l, Way::Error),
            initiator,
        ),
        ("a_reset_queue_pair", |l| target(l, Way::Reset), initiator),
        (
            "a_destroyed_queue_pair",
            |l| target(l, Way::Destroy),
            initiator,
        ),
        (
            "a_queue_pair_without_the_right",
            |l| target(l, Way::Rights),
            initiator,
        ),
        ("a_connection_within_a_process", within, |_| {}),
        (
            "an_xrc_target_in_error",
            |l| xrc_target(l, Way::Error),
            xrc_initiator,
        ),
        (
            "a_reset_xrc_target",
            |l| xrc_target(l, Way::Reset),
            xrc_initiator,
        ),
        (
            "a_destroyed_xrc_target",
            |l| xrc_target(l, Way::Destroy),
            xrc_initiator,
        ),
        (
            "an_xrc_target_without_the_right",
            |l| xrc_target(l, Way::Rights),
            xrc_initiator,
        ),
        ("a_stopped_initiator_of_xrc", xrc_stopped, xrc_writer),
        ("rights_that_stay", staying, reader),
        ("a_stopped_initiator", stopped, writer),
        ("a_queue_pair_that_does_not_wait", impatient, writer),
        (
            "an_initiator_that_executes_another_program",
            replaced,
            replaced_writer,
        ),
    ]);
}

const LEN: usize = 4 << 20;
const ALL: u32 = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
/// What initiators write, and what the target writes when the right has ended.
const THEIRS: u8 = 7;
const OURS: u8 = 9;

/// Memory of this process that is registered for one end.
struct Memory {
    addr: *mut u8,
    mr: *mut ibv_mr,
}

// SAFETY: plain memory, which tests access by volatile reads and writes.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(end: &End, device: bool) -> Self {
        let access = (ALL | IBV_ACCESS_LOCAL_WRITE).cast_signed();
        // SAFETY: live domain; the memory is never freed while it is registered.
        unsafe {
            if device {
                let mut buf = std::ptr::null_mut();
                let addr = (verbs().ibv_alloc_buf.unwrap())(end.pd, LEN, &raw mut buf);
                assert!(!addr.is_null());
                let mr = (verbs().ibv_reg_buf_mr.unwrap())(end.pd, buf, addr, LEN, access);
                assert!(!mr.is_null());
                return Self {
                    addr: addr.cast(),
                    mr,
                };
            }
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let addr = libc::mmap(std::ptr::null_mut(), LEN, rights, flags, -1, 0);
            assert_ne!(addr, libc::MAP_FAILED);
            let mr = (verbs().ibv_reg_mr)(end.pd, addr, LEN, access);
            assert!(!mr.is_null());
            Self {
                addr: addr.cast(),
                mr,
            }
        }
    }

    fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.mr).rkey }
    }

    fn sge(&self, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.addr as u64,
            length: len as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    /// All bytes, as words.
    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        let word = |at| {
            // SAFETY: inside the memory, which is never freed, and aligned. It is accessed by
            // atomics alone, as another process may write it.
            unsafe { &*self.addr.add(at).cast() }
        };
        (0..LEN).step_by(8).map(word)
    }

    fn fill(&self, byte: u8) {
        let value = u64::from_ne_bytes([byte; 8]);
        self.words()
            .for_each(|word| word.store(value, Ordering::Relaxed));
    }

    /// Whether each byte is this one.
    fn is(&self, byte: u8) -> bool {
        let value = u64::from_ne_bytes([byte; 8]);
        self.words()
            .all(|word| word.load(Ordering::Relaxed) == value)
    }

    fn has(&self, byte: u8) -> bool {
        let found = |word: &AtomicU64| word.load(Ordering::Relaxed).to_ne_bytes().contains(&byte);
        self.words().any(found)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Error,
    Reset,
    Destroy,
    Rights,
}

/// What an initiator repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write(usize),
    Read(usize),
    /// A chain of requests.
    List,
    Add,
    /// Without a request.
    AtOnce,
}

/// The requests of the rounds, and whether the memory is the device's.
const KINDS: [(Kind, bool); 8] = [
    (Kind::Write(LEN), false),
    (Kind::Write(8), false),
    (Kind::List, false),
    (Kind::Add, false),
    (Kind::AtOnce, false),
    (Kind::Read(LEN), false),
    (Kind::Write(LEN), true),
    (Kind::Read(LEN), true),
];
/// Rounds of each kind.
const ROUNDS: u32 = 5;

fn attributes(state: u32) -> ibv_qp_attr {
    // SAFETY: all zeros is a value of it.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

/// Calls `ibv_modify_qp`, and returns its result.
fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: u32) -> i32 {
    // SAFETY: a live queue pair and valid attributes.
    unsafe { (verbs().ibv_modify_qp)(qp, attr, mask.cast_signed()) }
}

/// Ends the rights of a kind, and returns the result of the call.
fn end_rights(qp: *mut ibv_qp, way: Way, kind: Kind) -> i32 {
    match way {
        Way::Error => modify(qp, &mut attributes(IBV_QPS_ERR), IBV_QP_STATE),
        Way::Reset => modify(qp, &mut attributes(IBV_QPS_RESET), IBV_QP_STATE),
        // SAFETY: live; not used again after success.
        Way::Destroy => unsafe { (verbs().ibv_destroy_qp)(qp) },
        Way::Rights => {
            let mut attr = attributes(IBV_QPS_RTS);
            attr.qp_access_flags = match kind {
                Kind::Read(_) => IBV_ACCESS_REMOTE_WRITE,
                _ => IBV_ACCESS_REMOTE_READ,
            };
            modify(qp, &mut attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS)
        }
    }
}

/// An end whose requests give up after 9 ms.
fn connect(link: &mut Link) -> End {
    let mut end = End::with(64, 8, 1);
    let other = end.exchange(link);
    end.enter_rtr(other);
    end.enter_rts_within(8, 7);
    link.say("ready");
    link.expect("ready");
    end
}

fn target(link: &mut Link, way: Way) {
    for (kind, device) in KINDS {
        for round in 0..ROUNDS {
            let end = connect(link);
            let memory = Memory::new(&end, device);
            memory.fill(0);
            link.say_numbers(memory.addr as u64, memory.rkey().into());
            link.expect("begun");
            // at any point of a request
            let until = Instant::now() + Duration::from_micros(u64::from(round) * 170);
            while Instant::now() < until {}
            assert_eq!(end_rights(end.qp, way, kind), 0, "{way:?} {kind:?}");
            memory.fill(OURS);
            link.expect("ended");
            assert!(memory.is(OURS), "{way:?} {kind:?} {device} {round}");
            clear(&end, &memory, way != Way::Destroy);
        }
    }
    link.say("done");
}

/// Destroys what a round has made.
fn clear(end: &End, memory: &Memory, has_qp: bool) {
    // SAFETY: live objects, which are not used again; memory of the device stays.
    unsafe {
        if has_qp {
            assert_eq!((verbs().ibv_destroy_qp)(end.qp), 0);
        }
        assert_eq!((verbs().ibv_dereg_mr)(memory.mr), 0);
    }
}

/// Repeats the requests of each round until one fails.
fn initiator(link: &mut Link) {
    for (kind, _) in KINDS {
        for round in 0..ROUNDS {
            let mut end = connect(link);
            let memory = Memory::new(&end, false);
            memory.fill(THEIRS);
            let (addr, rkey) = link.numbers();
            let mut first = true;
            while request(&mut end, &memory, kind, (addr, rkey as u32)) {
                if std::mem::take(&mut first) {
                    link.say("begun");
                }
            }
            if matches!(kind, Kind::Read(_)) {
                assert!(!memory.has(OURS), "{kind:?} {round}");
            }
            link.say("ended");
            clear(&end, &memory, true);
        }
    }
    link.expect("done");
}

/// The shared receive queue that the requests of this process name; 0 for none.
static SRQN: AtomicU32 = AtomicU32::new(0);

/// Executes requests of this kind, and returns whether they were successful.
fn request(end: &mut End, memory: &Memory, kind: Kind, (addr, rkey): (u64, u32)) -> bool {
    const PARTS: usize = 16;
    let srqn = SRQN.load(Ordering::Relaxed);
    let (opcode, len, count) = match kind {
        Kind::Write(len) => (IBV_WR_RDMA_WRITE, len, 1),
        Kind::Read(len) => (IBV_WR_RDMA_READ, len, 1),
        Kind::List => (IBV_WR_RDMA_WRITE, LEN / PARTS, PARTS),
        Kind::Add => (IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 1),
        Kind::AtOnce => {
            let (sge, write) = (memory.sge(LEN), IBV_WR_RDMA_WRITE);
            // SAFETY: a live queue pair, and registered memory.
            let ret = unsafe {
                if srqn == 0 {
                    let call = verbs().softdv_access.unwrap();
                    call(end.qp, write, &raw const sge, 0, addr, rkey)
                } else {
                    let call = verbs().softdv_access_srq.unwrap();
                    call(end.qp, write, &raw const sge, 0, srqn, addr, rkey)
                }
            };
            if ret == 0 {
                return true;
            }
            // it has to be posted
            (IBV_WR_RDMA_WRITE, LEN, 1)
        }
    };
    let mut sges = [memory.sge(len); PARTS];
    // SAFETY: all zeros is a value of it.
    let mut list: [ibv_send_wr; PARTS] = unsafe { std::mem::zeroed() };
    for i in (0..count).rev() {
        let next = match list.get_mut(i + 1) {
            Some(next) if i + 1 < count => std::ptr::from_mut(next),
            _ => std::ptr::null_mut(),
        };
        sges[i].addr += (i * len) as u64;
        let wr = &mut list[i];
        (wr.next, wr.num_sge, wr.opcode) = (next, 1, opcode);
        wr.sg_list = &raw mut sges[i];
        wr.send_flags = IBV_SEND_SIGNALED;
        if srqn != 0 {
            wr.qp_type.xrc.remote_srqn = srqn;
        }
        if kind == Kind::Add {
            wr.wr.atomic.remote_addr = addr;
            wr.wr.atomic.rkey = rkey;
            wr.wr.atomic.compare_add = 1;
        } else {
            wr.wr.rdma.remote_addr = addr + (i * len) as u64;
            wr.wr.rdma.rkey = rkey;
        }
    }
    end.post(&mut list[0]);
    // each has a completion
    let failed = |_: &usize| end.wait(LIMIT).status != IBV_WC_SUCCESS;
    (0..count).filter(failed).count() == 0
}

/// Lets another thread use an end.
struct Lent<T>(T);
// SAFETY: verbs' calls are safe from any thread, and only one thread has it.
unsafe impl<T> Send for Lent<T> {}

impl<T> Lent<T> {
    fn get(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Connects two ends of this process.
fn pair() -> (End, End) {
    let (mut a, mut b) = (End::with(64, 8, 1), End::with(64, 8, 1));
    let (x, y) = (a.address(), b.address());
    a.enter_rtr(y);
    b.enter_rtr(x);
    a.enter_rts_within(8, 7);
    b.enter_rts_within(8, 7);
    (a, b)
}

fn within(_: &mut Link) {
    for way in [Way::Error, Way::Reset, Way::Destroy, Way::Rights] {
        for (kind, device) in KINDS {
            let (mut a, b) = pair();
            let (from, to) = (Memory::new(&a, false), Memory::new(&b, device));
            from.fill(THEIRS);
            let named = (to.addr as u64, to.rkey());
            let begun = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (begun, from) = (&begun, &from);
                let mut lent = Lent(&mut a);
                let sender = scope.spawn(move || {
                    while request(lent.get(), from, kind, named) {
                        begun.store(true, Ordering::Release);
                    }
                });
                while !begun.load(Ordering::Acquire) {}
                assert_eq!(end_rights(b.qp, way, kind), 0, "{way:?} {kind:?}");
                to.fill(OURS);
                sender.join().unwrap();
                assert!(to.is(OURS), "{way:?} {kind:?} {device}");
                if matches!(kind, Kind::Read(_)) {
                    assert!(!from.has(OURS), "{way:?} {kind:?}");
                }
            });
            clear(&b, &to, way != Way::Destroy);
            clear(&a, &from, true);
        }
    }
}

/// A change of rights does not wait for a request that needs others, although its initiator is
/// stopped in the middle.
fn staying(link: &mut Link) {
    let end = connect(link);
    let memory = Memory::new(&end, false);
    memory.fill(0);
    link.say_numbers(memory.addr as u64, memory.rkey().into());
    link.expect("begun");
    for round in 0..20 {
        std::thread::sleep(Duration::from_micros(1000 + 170 * round));
        link.stop();
        let begin = Instant::now();
        for flags in [IBV_ACCESS_REMOTE_READ, ALL] {
            let mut attr = attributes(IBV_QPS_RTS);
            attr.qp_access_flags = flags;
            let mask = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS;
            assert_eq!(modify(end.qp, &mut attr, mask), 0);
        }
        assert!(begin.elapsed() < PEER_WAIT / 2, "{:?}", begin.elapsed());
        link.go_on();
    }
    // all requests so far were successful
    link.say("enough");
    link.expect("done");
}

fn reader(link: &mut Link) {
    let mut end = connect(link);
    let memory = Memory::new(&end, false);
    let (addr, rkey) = link.numbers();
    let (stop, begun) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (stop, begun, memory) = (&stop, &begun, &memory);
        let mut lent = Lent(&mut end);
        let reads = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                assert!(request(
                    lent.get(),
                    memory,
                    Kind::Read(LEN),
                    (addr, rkey as u32)
                ));
                begun.store(true, Ordering::Relaxed);
            }
        });
        while !begun.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        link.say("begun");
        link.expect("enough");
        stop.store(true, Ordering::Relaxed);
        reads.join().unwrap();
    });
    link.say("done");
}

/// Writes until it fails; then again, for each round.
fn writer(link: &mut Link) {
    while link.hear() == "again" {
        let mut end = connect(link);
        let memory = Memory::new(&end, false);
        memory.fill(THEIRS);
        let (addr, rkey) = link.numbers();
        link.say("begun");
        while request(&mut end, &memory, Kind::Write(LEN), (addr, rkey as u32)) {}
        link.say("ended");
        clear(&end, &memory, true);
    }
}

/// Begins a round with a [`writer`], and stops it at any point of a request.
fn stop_in_the_middle(link: &mut Link, round: u64) -> (End, Memory) {
    link.say("again");
    let end = connect(link);
    let memory = Memory::new(&end, false);
    memory.fill(0);
    link.say_numbers(memory.addr as u64, memory.rkey().into());
    link.expect("begun");
    std::thread::sleep(Duration::from_micros(3000 + 170 * round));
    link.stop();
    (end, memory)
}

/// The call waits 5 s for an initiator that is stopped in the middle of an access, and no other
/// connection waits with it. Repeated, it succeeds when the access is over.
fn stopped(link: &mut Link) {
    const WAYS: [Way; 2] = [Way::Error, Way::Destroy];
    let mut busy = 0;
    for round in 0..40 {
        let way = WAYS[busy];
        let (end, memory) = stop_in_the_middle(link, round);
        let over = AtomicBool::new(false);
        let begin = Instant::now();
        let mut ret = 0;
        let (mut a, b) = pair();
        let (from, to) = (Memory::new(&a, false), Memory::new(&b, false));
        let named = (to.addr as u64, to.rkey());
        let other = std::thread::scope(|scope| {
            let (over, from) = (&over, &from);
            let mut lent = Lent(&mut a);
            let others = scope.spawn(move || {
                let mut longest = Duration::ZERO;
                while !over.load(Ordering::Acquire) {
                    let begin = Instant::now();
                    assert!(request(lent.get(), from, Kind::Write(8), named));
                    longest = longest.max(begin.elapsed());
                }
                longest
            });
            ret = end_rights(end.qp, way, Kind::Write(LEN));
            over.store(true, Ordering::Release);
            others.join().unwrap()
        });
        let took = begin.elapsed();
        clear(&a, &from, true);
        clear(&b, &to, true);
        assert!(other < PEER_WAIT / 2, "another connection: {other:?}");
        if was_busy(link, (&end, &memory), way, (ret, took)) {
            busy += 1;
        }
        if busy == WAYS.len() {
            return link.say("enough");
        }
    }
    panic!("the initiator was never stopped in an access: {busy}");
}

/// The end of a round with a stopped initiator. Returns whether it was stopped in an access, for
/// which the call has waited 5 s; otherwise it was stopped between two accesses, or a call of it
/// has returned meanwhile.
fn was_busy(
    link: &mut Link,
    (end, memory): (&End, &Memory),
    way: Way,
    (ret, took): (i32, Duration),
) -> bool {
    assert!(took < PEER_WAIT + ROOM, "{took:?}");
    if ret == 0 {
        memory.fill(OURS);
    } else {
        assert_eq!(ret, libc::EBUSY, "{way:?}");
        assert!(took >= PEER_WAIT, "{took:?}");
    }
    link.go_on();
    if ret != 0 {
        // the access ends now
        assert_eq!(end_rights(end.qp, way, Kind::Write(LEN)), 0, "{way:?}");
        memory.fill(OURS);
    }
    link.expect("ended");
    assert!(memory.is(OURS), "{way:?} {ret}");
    clear(end, memory, way != Way::Destroy);
    ret != 0
}

/// Set for a program that an initiator executes in the middle of its accesses.
const LATER: &str = "SOFTVERBS_TEST_LATER";

/// The program that follows in the slot of an initiator has not opened this process. No call waits
/// for what the initiator has left.
fn replaced(link: &mut Link) {
    for round in 0..12 {
        link.say("again");
        let end = connect(link);
        let memory = Memory::new(&end, false);
        link.say_numbers(memory.addr as u64, memory.rkey().into());
        link.expect("begun");
        std::thread::sleep(Duration::from_micros(170 * round));
        link.say("execute");
        link.expect("opened");
        let begin = Instant::now();
        if round % 2 == 0 {
            // SAFETY: live, and not used again.
            assert_eq!(unsafe { (verbs().ibv_dereg_mr)(memory.mr) }, 0);
            assert_eq!(end_rights(end.qp, Way::Destroy, Kind::Write(LEN)), 0);
        } else {
            assert_eq!(end_rights(end.qp, Way::Reset, Kind::Write(LEN)), 0);
            clear(&end, &memory, true);
        }
        assert!(begin.elapsed() < PEER_WAIT / 2, "{:?}", begin.elapsed());
    }
    link.say("enough");
}

/// Opens the device, and writes until it is to execute the same program again.
fn replaced_writer(link: &mut Link) {
    if std::env::var_os(LATER).is_some() {
        open();
        link.say("opened");
    }
    if link.hear() == "enough" {
        return;
    }
    let mut end = connect(link);
    let memory = Memory::new(&end, false);
    let (addr, rkey) = link.numbers();
    let mut lent = Lent(&mut end);
    std::thread::scope(|scope| {
        let memory = &memory;
        scope.spawn(
            move || while request(lent.get(), memory, Kind::Write(LEN), (addr, rkey as u32)) {},
        );
        link.say("begun");
        link.expect("execute");
        let mut program = Command::new(std::env::current_exe().unwrap());
        panic!("{}", program.env(LATER, "1").exec());
    });
}

/// A queue pair that does not wait ([`VerbsFns::softdv_set_access_wait`]).
fn impatient(link: &mut Link) {
    for (round, way) in [Way::Error, Way::Rights, Way::Reset, Way::Destroy]
        .iter()
        .enumerate()
    {
        let (end, memory) = stop_in_the_middle(link, round as u64);
        // SAFETY: live.
        let ret = unsafe { (verbs().softdv_set_access_wait.unwrap())(end.qp, 0) };
        assert_eq!(ret, 0);
        let begin = Instant::now();
        assert_eq!(end_rights(end.qp, *way, Kind::Write(LEN)), 0, "{way:?}");
        assert!(begin.elapsed() < PEER_WAIT / 2, "{:?}", begin.elapsed());
        link.go_on();
        link.expect("ended");
        clear(&end, &memory, *way != Way::Destroy);
    }
    link.say("enough");
}

/// A process with an XRC domain and a shared receive queue.
struct Owner {
    base: End,
    xrcd: *mut ibv_xrcd,
    number: u32,
}

impl Owner {
    fn new() -> Self {
        let base = End::with(1, 1, 1);
        let mut domain = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        // SAFETY: live objects, valid attributes.
        unsafe {
            let xrcd = ibv_open_xrcd(base.context, &raw mut domain);
            assert!(!xrcd.is_null(), "{}", std::io::Error::last_os_error());
            let mut init = ibv_srq_init_attr_ex {
                comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                    | IBV_SRQ_INIT_ATTR_PD
                    | IBV_SRQ_INIT_ATTR_XRCD
                    | IBV_SRQ_INIT_ATTR_CQ,
                srq_type: IBV_SRQT_XRC,
                pd: base.pd,
                xrcd,
                cq: base.cq,
                ..Default::default()
            };
            init.attr.max_wr = 1;
            init.attr.max_sge = 1;
            let srq = ibv_create_srq_ex(base.context, &raw mut init);
            assert!(!srq.is_null(), "{}", std::io::Error::last_os_error());
            let mut number = 0;
            assert_eq!(ibv_get_srq_num(srq, &raw mut number), 0);
            Self { base, xrcd, number }
        }
    }

    /// A target that is connected to the other process, and memory that its requests reach.
    fn begin(&self, link: &mut Link, device: bool) -> (End, Memory) {
        let mut init = ibv_qp_init_attr_ex {
            qp_type: IBV_QPT_XRC_RECV,
            comp_mask: IBV_QP_INIT_ATTR_XRCD,
            xrcd: self.xrcd,
            ..Default::default()
        };
        let base = &self.base;
        // SAFETY: live objects, valid attributes.
        let qp = unsafe { ibv_create_qp_ex(base.context, &raw mut init) };
        assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
        let end = xrc_connect(
            link,
            End::of_parts(base.context, base.channel, base.pd, base.cq, qp),
        );
        let memory = Memory::new(&end, device);
        memory.fill(0);
        link.say_numbers(memory.addr as u64, memory.rkey().into());
        link.say_numbers(self.number.into(), 0);
        link.expect("begun");
        (end, memory)
    }
}

fn xrc_connect(link: &mut Link, mut end: End) -> End {
    end.enter_init();
    let other = end.exchange(link);
    end.enter_rtr(other);
    end.enter_rts_within(8, 7);
    link.say("ready");
    link.expect("ready");
    end
}

/// As [`target`].
fn xrc_target(link: &mut Link, way: Way) {
    let owner = Owner::new();
    for (kind, device) in KINDS {
        for round in 0..ROUNDS {
            let (end, memory) = owner.begin(link, device);
            let until = Instant::now() + Duration::from_micros(u64::from(round) * 170);
            while Instant::now() < until {}
            assert_eq!(end_rights(end.qp, way, kind), 0, "{way:?} {kind:?}");
            memory.fill(OURS);
            link.expect("ended");
            assert!(memory.is(OURS), "{way:?} {kind:?} {device} {round}");
            clear(&end, &memory, way != Way::Destroy);
        }
    }
    link.say("done");
}

/// Makes an initiator, and repeats requests until one fails.
fn initiate(link: &mut Link, base: &End, kind: Kind) {
    let mut init = ibv_qp_init_attr_ex {
        qp_type: IBV_QPT_XRC_SEND,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd: base.pd,
        send_cq: base.cq,
        ..Default::default()
    };
    init.cap.max_send_wr = 64;
    init.cap.max_send_sge = 1;
    // SAFETY: live objects, valid attributes.
    let qp = unsafe { ibv_create_qp_ex(base.context, &raw mut init) };
    assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
    let mut end = xrc_connect(
        link,
        End::of_parts(base.context, base.channel, base.pd, base.cq, qp),
    );
    let memory = Memory::new(&end, false);
    memory.fill(THEIRS);
    let (addr, rkey) = link.numbers();
    SRQN.store(link.numbers().0 as u32, Ordering::Relaxed);
    let mut first = true;
    while request(&mut end, &memory, kind, (addr, rkey as u32)) {
        if std::mem::take(&mut first) {
            link.say("begun");
        }
    }
    assert!(!first, "the first request failed");
    if matches!(kind, Kind::Read(_)) {
        assert!(!memory.has(OURS), "{kind:?}");
    }
    link.say("ended");
    clear(&end, &memory, true);
}

/// As [`initiator`].
fn xrc_initiator(link: &mut Link) {
    let base = End::with(64, 64, 1);
    for (kind, _) in KINDS {
        for _ in 0..ROUNDS {
            initiate(link, &base, kind);
        }
    }
    link.expect("done");
}

/// As [`writer`].
fn xrc_writer(link: &mut Link) {
    let base = End::with(64, 64, 1);
    while link.hear() == "again" {
        initiate(link, &base, Kind::Write(LEN));
    }
}

/// As [`stopped`].
fn xrc_stopped(link: &mut Link) {
    const WAYS: [Way; 2] = [Way::Reset, Way::Destroy];
    let owner = Owner::new();
    let mut busy = 0;
    for round in 0..40 {
        let way = WAYS[busy];
        link.say("again");
        let (end, memory) = owner.begin(link, false);
        std::thread::sleep(Duration::from_micros(3000 + 170 * round));
        link.stop();
        let begin = Instant::now();
        let ret = end_rights(end.qp, way, Kind::Write(LEN));
        let took = begin.elapsed();
        if was_busy(link, (&end, &memory), way, (ret, took)) {
            busy += 1;
        }
        if busy == WAYS.len() {
            return link.say("enough");
        }
    }
    panic!("the initiator was never stopped in an access: {busy}");
}
