//! A hostile neighbour: a process of the same user overwrites all memory of two others that it can
//! write, with random bytes and wrong addresses, while they connect, send, write, read, count and
//! register. They receive errors. They must not crash, hang, or access memory that is not
//! registered. The neighbour cannot write the parts that only their owner may write.
//!
//! `SOFTVERBS_HOSTILE_SECONDS` sets the duration (default 3), `SOFTVERBS_HOSTILE_SEED` repeats a
//! run.

#![allow(unsafe_code, reason = "verbs is a C interface")]

mod common;
#[path = "hostile/tables.rs"]
mod tables;

use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rdma_core_sys::*;

const VICTIMS: &str = "SOFTVERBS_HOSTILE_VICTIMS";
/// A round takes milliseconds, or as long as the retries of a send.
const ROUND_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn main() {
    if let Ok(victims) = std::env::var(VICTIMS) {
        vandal(&victims);
    }
    run(&[
        ("nobody_else_writes_tables", tables::attacker, tables::owner),
        ("a_hostile_neighbour", survivor_parent, survivor_child),
    ]);
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Numbers that look random: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// The mapped shared memory of a victim.
struct Prey {
    addr: *mut u8,
    /// Start and end of the parts of the file that have pages.
    parts: Vec<(usize, usize)>,
}

/// Finds all files of the device in a process that can be mapped for writing, and their parts in
/// use.
fn prey_of(pid: &str, known: &mut Vec<u64>) -> Vec<Prey> {
    let mut found = Vec::new();
    let Ok(list) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return found;
    };
    for entry in list.flatten() {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        if !name.to_string_lossy().starts_with("/memfd:softverbs") {
            continue;
        }
        let Ok(file) = std::fs::File::options()
            .read(true)
            .write(true)
            .open(entry.path())
        else {
            continue;
        };
        let data = file.metadata().unwrap();
        let inode = std::os::unix::fs::MetadataExt::ino(&data);
        if known.contains(&inode) {
            continue;
        }
        let (fd, len) = (file.as_raw_fd(), data.len() as usize);
        let mut parts = Vec::new();
        let mut at = 0;
        // SAFETY: no memory is passed.
        while let Ok(from) = usize::try_from(unsafe { libc::lseek(fd, at, libc::SEEK_DATA) }) {
            // SAFETY: as above.
            at = unsafe { libc::lseek(fd, from as libc::off_t, libc::SEEK_HOLE) };
            parts.push((from, at as usize));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let addr = unsafe { libc::mmap(null_mut(), len, protection, libc::MAP_SHARED, fd, 0) };
        if addr == libc::MAP_FAILED {
            known.push(inode);
        } else if !parts.is_empty() {
            known.push(inode);
            found.push(Prey {
                addr: addr.cast(),
                parts,
            });
        }
    }
    found
}

/// Changes about half of the shared addresses of the victims' registered memory to addresses before
/// that memory.
fn lead_astray(prey: &Prey, random: &mut Random) {
    for &(from, to) in &prey.parts {
        for at in (from..to).step_by(8) {
            // SAFETY: inside the mapping, in a part that has pages; aligned, because parts begin
            // with a page.
            unsafe {
                let word = prey.addr.add(at).cast::<u64>();
                let found = word.read_volatile();
                // not all words, because a name and its address may be equal
                if PLACES.contains(&found) && random.below(2) == 0 {
                    word.write_volatile(found - LEN as u64);
                }
            }
        }
    }
}

/// Overwrites the memory that the victims share until it is killed or they have ended.
fn vandal(victims: &str) -> ! {
    let seed = number("SOFTVERBS_HOSTILE_SEED", 1);
    let mut random = Random(seed | 1);
    // Random bytes break most connections at once. Without them, more requests use a wrong address.
    let amount = [400, 100, 0][(seed % 3) as usize];
    // the beginning of a ring identifies it, so half of the runs do not overwrite it
    let spared = if seed.is_multiple_of(2) { 64 } else { 0 };
    let mut prey = Vec::new();
    let mut known = Vec::new();
    loop {
        for pid in victims.split(',') {
            if !std::path::Path::new(&format!("/proc/{pid}/fd")).exists() {
                std::process::exit(0);
            }
            prey.extend(prey_of(pid, &mut known));
        }
        for prey in &prey {
            lead_astray(prey, &mut random);
        }
        for _ in 0..amount {
            if prey.is_empty() {
                break;
            }
            let Prey { addr, parts } = &prey[random.below(prey.len() as u64) as usize];
            let (from, to) = parts[random.below(parts.len() as u64) as usize];
            // sometimes near the beginning, where counts and state words are adjacent
            let reach = if random.below(2) == 0 {
                to - from
            } else {
                (to - from).min(8192)
            };
            let at = (from + random.below(reach as u64) as usize).max(spared);
            let count = 1 << random.below(7);
            let kind = random.below(4);
            for i in at..(at + count).min(to) {
                let byte = match kind {
                    0 => 0,
                    1 => 0xff,
                    _ => random.next() as u8,
                };
                // SAFETY: inside the mapping, in a part that has pages.
                unsafe { addr.add(i).write_volatile(byte) };
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Set after the first round, which is undisturbed.
static DISTURBED: AtomicBool = AtomicBool::new(false);
/// Set by a panic inside the device: panics are caught, and are failures nevertheless.
static PANICKED: AtomicBool = AtomicBool::new(false);
/// Start of the current round in milliseconds since the start of the test; for the watchdog.
static ROUND: AtomicU64 = AtomicU64::new(0);

/// Ends the process if a round does not end.
fn watch(begin: Instant) {
    std::panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        PANICKED.store(true, Ordering::Relaxed);
    }));
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(500));
            let since = begin.elapsed() - Duration::from_millis(ROUND.load(Ordering::Relaxed));
            if since > ROUND_LIMIT {
                eprintln!("a round does not end");
                std::process::abort();
            }
        }
    });
}

fn survivor_parent(link: &mut Link) {
    let seed = number("SOFTVERBS_HOSTILE_SEED", std::process::id().into());
    let seconds = number("SOFTVERBS_HOSTILE_SECONDS", 3);
    eprintln!("SOFTVERBS_HOSTILE_SEED={seed}, {seconds} s");
    let begin = Instant::now();
    watch(begin);
    let device = Device::new();
    let victims = format!("{},{}", std::process::id(), link.pid());
    let mut vandal: Option<Child> = None;
    let mut rounds = 0u64;
    let mut good = 0u64;
    while begin.elapsed() < Duration::from_secs(seconds) {
        ROUND.store(begin.elapsed().as_millis() as u64, Ordering::Relaxed);
        link.say("round");
        good += round(link, &device, seed ^ rounds);
        rounds += 1;
        // the first round is undisturbed, and shows that all operations work
        if vandal.is_none() {
            DISTURBED.store(true, Ordering::Relaxed);
            assert_eq!(good, OPERATIONS, "without a hostile neighbour");
            let own = std::env::current_exe().unwrap();
            let mut command = Command::new(own);
            command.env(VICTIMS, &victims);
            command.env("SOFTVERBS_HOSTILE_SEED", seed.to_string());
            vandal = Some(command.spawn().unwrap());
        }
    }
    link.say("end");
    link.expect("whole");
    let mut vandal = vandal.unwrap();
    assert!(
        vandal.try_wait().unwrap().is_none(),
        "the neighbour ended early"
    );
    vandal.kill().unwrap();
    vandal.wait().unwrap();
    eprintln!("{rounds} rounds, {good} good completions of {OPERATIONS} a round");
    assert!(rounds > 3);
    assert!(!PANICKED.load(Ordering::Relaxed), "the device panicked");
}

fn survivor_child(link: &mut Link) {
    let begin = Instant::now();
    watch(begin);
    let device = Device::new();
    let mut rounds = 0;
    while link.hear() == "round" {
        ROUND.store(begin.elapsed().as_millis() as u64, Ordering::Relaxed);
        round(link, &device, rounds);
        rounds += 1;
        DISTURBED.store(true, Ordering::Relaxed);
    }
    assert!(!PANICKED.load(Ordering::Relaxed), "the device panicked");
    link.say("whole");
}

/// The objects that all rounds use.
struct Device {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
}

impl Device {
    fn new() -> Self {
        let context = open();
        // SAFETY: live objects.
        unsafe {
            let pd = (verbs().ibv_alloc_pd)(context);
            let cq = (verbs().ibv_create_cq)(context, 4096, null_mut(), null_mut(), 0);
            assert!(!pd.is_null() && !cq.is_null());
            Self { context, pd, cq }
        }
    }
}

const OPERATIONS: u64 = 60;
const LEN: usize = 64 << 10;

/// Where the victims' memory lies: each round has a [`Field`] of it, one after the other. There are
/// places for 5 million rounds: without random bytes, 2,200 rounds end in a second.
const PLACES: std::ops::Range<u64> = 0x2000_0000_0000..0x2100_0000_0000;

/// The value of memory that no message changes.
const PATTERN: u8 = 0x5a;
/// Parts of a round's memory: receives; the target of the other end's reads and writes, and a word
/// for its atomics; the source and the destination of this end's requests. All parts except
/// receives and words contain [`PATTERN`] all the time.
const RECEIVES: usize = 0;
const TARGET: usize = 16 << 10;
const SOURCE: usize = 32 << 10;
const COUNTER: usize = 48 << 10;
const OLD_COUNT: usize = COUNTER + 64;
const REST: usize = COUNTER + 128;

/// Registered memory between two unregistered ranges of the same length.
struct Field(*mut u8);

impl Field {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(PLACES.start);
        let at = NEXT.fetch_add(3 * LEN as u64, Ordering::Relaxed);
        assert!(at + 3 * LEN as u64 <= PLACES.end, "no place is left");
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let at = std::ptr::without_provenance_mut(at as usize);
        // SAFETY: nothing that is mapped is replaced.
        let field = unsafe { libc::mmap(at, 3 * LEN, protection, flags, -1, 0) };
        assert_eq!(field, at, "{}", std::io::Error::last_os_error());
        // SAFETY: just mapped.
        unsafe { field.cast::<u8>().write_bytes(PATTERN, 3 * LEN) };
        Self(field.cast())
    }

    fn memory(&self) -> *mut libc::c_void {
        self.0.wrapping_add(LEN).cast()
    }

    /// Checks all memory that must be unchanged.
    fn check(&self) {
        let mut whole = vec![(0, LEN), (2 * LEN, 3 * LEN)];
        // the bounce file of an agent contains payload, and the neighbour may overwrite it
        if copies_are_allowed() {
            whole.extend([(LEN + TARGET, LEN + COUNTER), (LEN + REST, 2 * LEN)]);
        }
        for (from, to) in whole {
            let changed =
                // SAFETY: mapped; others may write there, as is to be seen.
                (from..to).find(|&at| unsafe { self.0.add(at).read_volatile() } != PATTERN);
            assert_eq!(changed, None, "written at this place of {from}..{to}");
        }
    }

    fn unmap(self) {
        // SAFETY: mapped, and used by nobody any more.
        assert_eq!(unsafe { libc::munmap(self.0.cast(), 3 * LEN) }, 0);
    }
}

/// Whether the kernel permits copies between processes; tried on this process itself.
fn copies_are_allowed() -> bool {
    let (from, mut to) = (1u8, 0u8);
    let iov = |base: *const u8| libc::iovec {
        iov_base: base.cast_mut().cast(),
        iov_len: 1,
    };
    let (local, remote) = (iov(&raw mut to), iov(&raw const from));
    // SAFETY: both ranges are local variables of one byte; only `to` is written.
    unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) == 1
    }
}

const ALL: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_ATOMIC;

/// Changes the state of a queue pair. The result is not checked: later steps show it.
fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: u32) {
    // SAFETY: live queue pair, valid attributes.
    unsafe { (verbs().ibv_modify_qp)(qp, attr, mask.cast_signed()) };
}

/// One connection with all operations. Returns the number of successful completions.
fn round(link: &mut Link, device: &Device, seed: u64) -> u64 {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let field = Field::new();
    let memory = field.memory();
    // SAFETY: objects of one device, each ended after its last use; all zeros is a value of each
    // structure.
    unsafe {
        let mr = ibv_reg_mr(verbs(), device.pd, memory, LEN, ALL);
        assert!(!mr.is_null());
        let mut init: ibv_qp_init_attr = std::mem::zeroed();
        init.send_cq = device.cq;
        init.recv_cq = device.cq;
        init.qp_type = IBV_QPT_RC;
        init.cap.max_send_wr = 128;
        init.cap.max_recv_wr = 128;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        if random.below(2) == 0 {
            let mut shared: ibv_srq_init_attr = std::mem::zeroed();
            shared.attr.max_wr = 128;
            shared.attr.max_sge = 1;
            init.srq = (verbs().ibv_create_srq)(device.pd, &raw mut shared);
            assert!(!init.srq.is_null());
        }
        let qp = (verbs().ibv_create_qp)(device.pd, &raw mut init);
        assert!(!qp.is_null());
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = ALL;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        modify(qp, &mut attr, mask);
        for _ in 0..OPERATIONS {
            let mut sge = sge_of(mr, RECEIVES as u64, 16 << 10);
            let mut wr = ibv_recv_wr {
                sg_list: &raw mut sge,
                num_sge: 1,
                ..ibv_recv_wr::default()
            };
            let mut bad = null_mut();
            if init.srq.is_null() {
                ibv_post_recv(qp, &raw mut wr, &raw mut bad);
            } else {
                ibv_post_srq_recv(init.srq, &raw mut wr, &raw mut bad);
            }
        }
        let ring = ring_of(qp);
        link.say_numbers((*qp).qp_num.into(), (*mr).rkey.into());
        let (qpn, rkey) = link.numbers();
        link.say_numbers(memory as u64, 0);
        let (addr, _) = link.numbers();
        connect(device, qp, qpn as u32);
        link.say("connected");
        link.expect("connected");
        let arrived = exchange(device, ring, memory.cast::<u8>().add(SOURCE), &mut random);
        if !DISTURBED.load(Ordering::Relaxed) {
            assert_eq!(arrived, MESSAGES, "without a hostile neighbour");
        }
        let mut posted = 0;
        for _ in 0..OPERATIONS {
            let opcode = [
                IBV_WR_SEND,
                IBV_WR_RDMA_WRITE,
                IBV_WR_RDMA_READ,
                IBV_WR_ATOMIC_FETCH_AND_ADD,
            ][random.below(4) as usize];
            let len = match opcode {
                IBV_WR_ATOMIC_FETCH_AND_ADD => 8,
                _ => 1 << random.below(15),
            };
            let counts = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
            let (from, to) = if counts {
                (OLD_COUNT, COUNTER)
            } else {
                (SOURCE, TARGET)
            };
            let mut sge = sge_of(mr, from as u64, len);
            let mut wr: ibv_send_wr = std::mem::zeroed();
            wr.opcode = opcode;
            wr.send_flags = IBV_SEND_SIGNALED;
            wr.sg_list = &raw mut sge;
            wr.num_sge = 1;
            let to = addr + to as u64;
            if counts {
                wr.wr.atomic.remote_addr = to;
                wr.wr.atomic.rkey = rkey as u32;
                wr.wr.atomic.compare_add = 1;
            } else {
                wr.wr.rdma.remote_addr = to;
                wr.wr.rdma.rkey = rkey as u32;
            }
            let mut bad = null_mut();
            if ibv_post_send(qp, &raw mut wr, &raw mut bad) == 0 {
                posted += 1;
            }
        }
        let good = poll(device, qp, posted);
        link.say("over");
        link.expect("over");
        // if a neighbour pretends to use the region, the call reports that the region is busy
        let mut code = (verbs().ibv_dereg_mr)(mr);
        for _ in 0..3 {
            if code == libc::EBUSY {
                code = (verbs().ibv_dereg_mr)(mr);
            }
        }
        assert!(code == 0 || code == libc::EBUSY, "{code}");
        assert_eq!((verbs().ibv_destroy_qp)(qp), 0);
        if !init.srq.is_null() {
            assert_eq!((verbs().ibv_destroy_srq)(init.srq), 0);
        }
        field.check();
        if code == 0 {
            field.unmap();
        }
        good
    }
}

/// Messages of a round through the receive ring.
const MESSAGES: u64 = 200;

/// Gives the queue pair a receive ring.
///
/// # Safety
/// `qp` must be live.
unsafe fn ring_of(qp: *mut ibv_qp) -> *mut softdv_ring {
    let attr = softdv_ring_attr {
        slots: 64,
        reserved: 0,
        cookie: 7,
    };
    // SAFETY: the caller promises that.
    let ring = unsafe { (verbs().softdv_ring_create.unwrap())(qp, &raw const attr) };
    assert!(!ring.is_null(), "{}", std::io::Error::last_os_error());
    ring
}

/// Sends messages from `source` through the ring of the other end, and takes those of the other
/// end, for a limited time. Returns the number of messages that arrived whole.
///
/// # Safety
/// All must be live.
unsafe fn exchange(
    device: &Device,
    ring: *mut softdv_ring,
    source: *const u8,
    random: &mut Random,
) -> u64 {
    let (post, poll) = (verbs().softdv_ring_post, verbs().softdv_ring_poll);
    let (post, poll) = (post.unwrap(), poll.unwrap());
    let limit = if DISTURBED.load(Ordering::Relaxed) {
        Duration::from_millis(20)
    } else {
        Duration::from_secs(20)
    };
    let begin = Instant::now();
    let (mut sent, mut taken, mut whole) = (0, 0, 0);
    // SAFETY: the caller promises live objects; a message is readable until it is consumed.
    unsafe {
        let mut info = softdv_ring_info::default();
        (verbs().softdv_ring_attach.unwrap())(ring, &raw mut info);
        assert!(info.max_send <= 1984 && info.max_recv <= 1984);
        let grows = random.below(2) == 0;
        let longest = if grows { 8128 } else { info.max_recv };
        while (sent < MESSAGES || taken < MESSAGES) && begin.elapsed() < limit {
            let len = random.below(u64::from(info.max_send) + 1) as u32;
            if sent < MESSAGES {
                let ret = post(ring, sent, 1, 2, source.cast(), len, 0);
                assert!([0, libc::EAGAIN, libc::ENOTCONN].contains(&ret), "{ret}");
                sent += u64::from(ret == 0);
            }
            let mut message = std::mem::MaybeUninit::<softdv_ring_message>::uninit();
            match poll(ring, message.as_mut_ptr()) {
                0 => {}
                1 => {
                    let message = message.assume_init();
                    assert!(message.length <= longest || info.max_recv == 0);
                    let payload = message.payload.cast::<u8>();
                    let good = (0..message.length as usize)
                        .all(|at| payload.add(at).read_volatile() == PATTERN);
                    whole += u64::from(good && message.words == [taken, 1, 2]);
                    assert_eq!((verbs().softdv_ring_consume.unwrap())(ring), 0);
                    taken += 1;
                    if grows && taken == MESSAGES / 4 {
                        // a neighbour can make the queue pair fail
                        let ret = (verbs().softdv_ring_grow.unwrap())(ring, 256);
                        assert!([0, libc::ENOTCONN, libc::EALREADY].contains(&ret), "{ret}");
                    }
                }
                error => {
                    let documented = [-libc::EAGAIN, -libc::ENOTCONN, -libc::EPROTO];
                    assert!(documented.contains(&error), "{error}");
                }
            }
            match random.below(16) {
                0 => {
                    (verbs().softdv_ring_set_hot.unwrap())(ring, (len & 1).cast_signed());
                }
                1 => {
                    (verbs().softdv_ring_await.unwrap())(ring);
                }
                2 => {
                    let mut cookies = [0; 4];
                    let arrivals = verbs().softdv_ring_arrivals.unwrap();
                    let found = arrivals(device.cq, cookies.as_mut_ptr(), 4);
                    assert!((0..=4).contains(&found), "{found}");
                }
                _ => {}
            }
        }
    }
    whole
}

/// # Safety
/// `mr` must be live.
unsafe fn sge_of(mr: *mut ibv_mr, from: u64, length: u32) -> ibv_sge {
    // SAFETY: the caller promises that.
    unsafe {
        ibv_sge {
            addr: (*mr).addr as u64 + from,
            length,
            lkey: (*mr).lkey,
        }
    }
}

/// # Safety
/// Both must be live.
unsafe fn connect(device: &Device, qp: *mut ibv_qp, dest: u32) {
    // SAFETY: the caller promises that; all zeros is a value of each structure.
    unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = dest;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        let gid = &raw mut attr.ah_attr.grh.dgid;
        assert_eq!((verbs().ibv_query_gid)(device.context, 1, 0, gid), 0);
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        modify(qp, &mut attr, mask);
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 10;
        attr.retry_cnt = 3;
        attr.rnr_retry = 3;
        attr.max_rd_atomic = 1;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        modify(qp, &mut attr, mask);
    }
}

/// Polls until all requests have completed, or for a limited time; returns the number of successful
/// completions.
///
/// # Safety
/// Both must be live.
unsafe fn poll(device: &Device, qp: *mut ibv_qp, posted: u64) -> u64 {
    let begin = Instant::now();
    let (mut good, mut done) = (0, 0);
    // SAFETY: the caller promises live objects; room for 16.
    unsafe {
        let mut wcs: [ibv_wc; 16] = std::mem::zeroed();
        while done < posted && begin.elapsed() < Duration::from_millis(500) {
            let count = ibv_poll_cq(device.cq, 16, wcs.as_mut_ptr());
            assert!((0..=16).contains(&count));
            for wc in &wcs[..count as usize] {
                let mine = wc.qp_num == (*qp).qp_num;
                // the opcode of a failed completion is undefined
                if mine && (wc.status != IBV_WC_SUCCESS || wc.opcode & IBV_WC_RECV == 0) {
                    done += 1;
                    good += u64::from(wc.status == IBV_WC_SUCCESS);
                }
            }
        }
    }
    good
}
