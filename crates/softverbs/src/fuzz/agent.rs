//! A line to this process's agent, with arbitrary bytes on it.
//!
//! The process is its own peer: its queue pairs are connected to each other, and the agent is a
//! thread of the same process. The test computes from its own objects which access each request
//! has.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

use atomic_ops::{Datatype, Op, Operation};
use rdma_core_sys::*;

use super::Input;
use super::xrc::Targeted;
use crate::agent::name as agent_name;
use crate::process::Process;
use crate::region::Shape;
use crate::segment::layout::{StateWord, qp, srq};
use crate::srq::{Shared, split_srq_num};
use crate::sys::{self, BounceFile, Line};
use crate::testing::{End, attributes, device, verbs};

/// Bytes of each part of the memory, and of a receive.
const PART: usize = 4096;
const RECEIVE: usize = 512;
const RECEIVES: usize = 4;
/// Access of the parts: unregistered, any access, read only, local only, receives, of another
/// domain, unregistered.
const ACCESS: [Option<u32>; 7] = [
    None,
    Some(
        IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_ATOMIC,
    ),
    Some(IBV_ACCESS_REMOTE_READ),
    Some(IBV_ACCESS_LOCAL_WRITE),
    Some(IBV_ACCESS_LOCAL_WRITE),
    Some(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE),
    None,
];
const INBOX: usize = 4;
const FOREIGN: usize = 5;

/// Number of places of a bounce file, and bytes of each, as in the document.
const PLACES: u32 = 8;
const PLACE: usize = 256 << 10;

/// Memory that is never freed, and its regions' keys.
struct Memory {
    at: usize,
    keys: [(u32, u32); ACCESS.len()],
}

fn memory() -> &'static Memory {
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY.get_or_init(|| {
        let bytes = vec![0u8; PART * (ACCESS.len() + 1)];
        let all = Box::leak(bytes.into_boxed_slice());
        let at = (all.as_mut_ptr() as usize).next_multiple_of(PART);
        // SAFETY: live context.
        let other = unsafe { (verbs().ibv_alloc_pd)(device().context) };
        let mut keys = [(0, 0); ACCESS.len()];
        for (part, access) in ACCESS.iter().enumerate() {
            let Some(access) = access else { continue };
            let pd = if part == FOREIGN { other } else { device().pd };
            let start = std::ptr::without_provenance_mut(at + PART * part);
            // SAFETY: live domain, and memory that is never freed.
            unsafe {
                let mr = (verbs().ibv_reg_mr)(pd, start, PART, access.cast_signed());
                assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
                keys[part] = ((*mr).rkey, (*mr).lkey);
            }
        }
        Memory { at, keys }
    })
}

impl Memory {
    fn bytes(&self) -> Vec<u8> {
        let from: *const u8 = std::ptr::with_exposed_provenance(self.at);
        (0..PART * ACCESS.len())
            // SAFETY: inside the memory; the agent has answered, and no longer writes.
            .map(|i| unsafe { from.add(i).read_volatile() })
            .collect()
    }

    fn receive(&self, number: usize) -> usize {
        PART * INBOX + RECEIVE * number
    }

    fn sge(&self, number: usize) -> ibv_sge {
        ibv_sge {
            addr: (self.at + self.receive(number)) as u64,
            length: RECEIVE as u32,
            lkey: self.keys[INBOX].1,
        }
    }
}

/// A request, in the form in which it is written to a line.
#[derive(Clone, Copy, Debug)]
struct Request {
    kind: u32,
    place: u32,
    id: u64,
    qp: u32,
    from: u32,
    incarnation: u32,
    key: u32,
    addr: u64,
    len: u64,
    a: u64,
    b: u64,
    srq: u32,
}

impl Request {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(self.place.to_ne_bytes());
        bytes.extend(self.id.to_ne_bytes());
        for word in [self.qp, self.from, self.incarnation, self.key] {
            bytes.extend(word.to_ne_bytes());
        }
        for word in [self.addr, self.len, self.a, self.b] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(self.srq.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes
    }
}

const HELLO: u32 = 1;
const WRITE: u32 = 2;
const READ: u32 = 3;
const TO_RECEIVE: u32 = 4;
const ADD: u32 = 5;
const SWAP: u32 = 6;
const STORE: u32 = 7;
const FILE: u32 = 8;
const GO_ON: u32 = 9;
const RETURN: u32 = 10;
const ELEMENTS: u32 = 11;

/// A line on which the greeting was sent.
struct Asker {
    line: Line,
    bounce: BounceFile,
}

fn dial() -> Line {
    let process = Process::open().unwrap();
    process.start_agent();
    Line::connect(&agent_name(process.slot, &process.identity)).unwrap()
}

fn greeting(slot: u64) -> Vec<u8> {
    let hello = Request {
        kind: HELLO,
        place: 0,
        id: 0,
        qp: 0,
        from: 0,
        incarnation: 0,
        key: 0,
        addr: 0,
        len: 0,
        a: slot,
        b: 0,
        srq: 0,
    };
    hello.bytes()
}

impl Asker {
    fn new() -> Self {
        let line = dial();
        let bounce = BounceFile::create(PLACES as usize * PLACE).unwrap();
        let slot = Process::open().unwrap().slot;
        line.send(&greeting(slot.into()), Some(bounce.as_fd()))
            .unwrap();
        Self { line, bounce }
    }
}

/// An answer: its status and value, and a file if one came. `None`: the agent has closed the line.
fn answer(line: &Line, id: u64) -> Option<(u32, u64, Option<OwnedFd>)> {
    let mut bytes = [0; 24];
    loop {
        assert!(
            sys::epoll_readable(line.as_raw_fd(), 20_000).unwrap(),
            "no answer, and no end"
        );
        let file = match line.receive(&mut bytes) {
            Ok(file) => file,
            Err(sys::Errno(libc::EAGAIN)) => continue,
            Err(_) => return None,
        };
        let word = |at: usize| u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
        assert_eq!(word(8), id, "somebody else's answer");
        return Some((word(0) as u32, word(16), file));
    }
}

/// The objects that requests name, and the rights of the requests.
struct World {
    ends: [End; 2],
    through: Targeted,
    /// Rights of requests through the queue pair and through the target.
    rights: [u32; 2],
    incarnations: [u32; 2],
    claimed: BTreeSet<u64>,
}

impl World {
    fn new(input: &mut Input<'_>) -> Self {
        let some = |input: &mut Input<'_>| {
            let all = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
            let byte = input.u8();
            if byte < 128 {
                all
            } else {
                u32::from(byte) & all
            }
        };
        let rights = [some(input), some(input)];
        let ends = [End::new(IBV_QPT_RC, false), End::new(IBV_QPT_RC, false)];
        for i in 0..2 {
            let mut attr = attributes(ends[1 - i].number());
            attr.qp_access_flags = rights[0];
            attr.qp_state = IBV_QPS_INIT;
            let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
            assert_eq!(ends[i].modify(&mut attr, init), 0);
            for number in 0..RECEIVES {
                assert_eq!(ends[i].post_recv(&mut [memory().sge(number)], 0), 0);
            }
            attr.qp_state = IBV_QPS_RTR;
            let rtr = IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER;
            assert_eq!(ends[i].modify(&mut attr, rtr), 0);
        }
        let through = Targeted::new(false);
        for number in 0..RECEIVES {
            let mut sge = [memory().sge(RECEIVES + number)];
            assert_eq!(through.post_recv(&mut sge, number as u64), 0);
        }
        assert!(through.connect(ends[1].number(), rights[1]));
        let process = Process::open().unwrap();
        let (_, index) = crate::segment::layout::split_qp_num(ends[0].number());
        let own = qp::AT + qp::STRIDE * index as usize + qp::STATE;
        let word = StateWord(process.segment.map.u64(own).load(Ordering::Relaxed));
        let (domain, target) = crate::segment::layout::xrc::split_target(through.number()).unwrap();
        let domain = process.domains.find(process, domain).unwrap().unwrap();
        let at = domain.entry(target).unwrap() + qp::STATE;
        let theirs = StateWord(domain.map.u64(at).load(Ordering::Relaxed));
        Self {
            incarnations: [word.incarnation(), theirs.incarnation()],
            ends,
            through,
            rights,
            claimed: BTreeSet::new(),
        }
    }

    /// Claims the next shared receive, as an initiator does.
    fn claim(&mut self) {
        let process = Process::open().unwrap();
        let map = &process.segment.map;
        let (_, index) = split_srq_num(self.through.srqn).unwrap();
        let shared = Shared::read(map, index).unwrap();
        let claim = shared.claim(map, process.slot);
        self.claimed
            .extend(claim.map(|claim| u64::from(claim.index)));
    }

    fn request(&self, input: &mut Input<'_>, id: u64) -> Request {
        let memory = memory();
        let which = usize::from(input.u8() % 2);
        let numbers = [self.ends[0].number(), self.through.number()];
        let rarely = |input: &mut Input<'_>, right: u32, wrong: u32| {
            if input.u8() < 16 { wrong } else { right }
        };
        let part = input.below(ACCESS.len());
        let inside = (memory.at + PART * part) as u64 + u64::from(input.u16()) % 4104;
        let addr = match input.u8() % 8 {
            0 => input.edgy(),
            1 => inside,
            _ => inside & !7,
        };
        let key = if input.u8() < 16 {
            input.edgy() as u32
        } else {
            let part = if input.u8() < 16 {
                input.below(ACCESS.len())
            } else {
                part
            };
            memory.keys[part].0
        };
        // Up to the end of the part, or one byte more.
        let rest = ((memory.at + PART * (part + 1)) as u64).wrapping_sub(addr);
        let len = match input.u8() % 5 {
            0 => u64::from(input.u16()) % 4104,
            1 => input.edgy(),
            2 => rest.wrapping_add(u64::from(input.u8() % 2)),
            _ => u64::from(input.u8()),
        };
        let kind = match input.u8() % 16 {
            0 => u32::from(input.u8()),
            1..=3 => WRITE,
            4..=5 => READ,
            6..=8 => TO_RECEIVE,
            9 => ELEMENTS,
            10 => ADD,
            11 => SWAP,
            12 => STORE,
            13 => RETURN,
            14 => FILE,
            _ => GO_ON,
        };
        let mut len = len;
        let (a, b) = match kind {
            ELEMENTS => {
                let (op, datatype) = (input.u8() % 24, input.u8() % 24);
                let (count, high) = (input.u8() % 9, input.u8());
                let a = u64::from(op) | u64::from(datatype) << 8 | u64::from(count) << 16;
                if let Some(shape) = Shape::of_word(a).filter(|_| high >= 32) {
                    len = shape.len() as u64;
                }
                (a | u64::from(high == 0) << 40, u64::from(high % 2))
            }
            TO_RECEIVE => (u64::from(input.u8() % 6), u64::from(input.u16()) % 600),
            RETURN => (
                u64::from(rarely(input, self.through.srqn & 0x3fff, 3)),
                u64::from(input.u8() % 6),
            ),
            FILE => {
                let registry = Process::open().unwrap().registry().file().as_raw_fd();
                let fd = u64::from(input.u8() % 64);
                (if fd < 16 { registry as u64 } else { fd }, 0)
            }
            _ => (input.edgy(), input.edgy()),
        };
        Request {
            kind,
            place: rarely(input, u32::from(input_place(id)), 8 + id as u32 % 5),
            id,
            qp: rarely(input, numbers[which], numbers[1 - which] ^ 1),
            from: rarely(input, self.ends[1].number(), numbers[which]),
            incarnation: {
                let right = match kind {
                    RETURN => self.stamp(),
                    _ => self.incarnations[which],
                };
                rarely(input, right, right.wrapping_add(1))
            },
            key,
            addr,
            len,
            a,
            b,
            srq: rarely(input, self.through.srqn, self.through.srqn ^ 1),
        }
    }

    /// The stamp of the shared receive queue, which a request that returns a receive names.
    fn stamp(&self) -> u32 {
        let process = Process::open().unwrap();
        let at = srq::AT + srq::STRIDE * (self.through.srqn & 0x3fff) as usize;
        let stamp = process.segment.map.u32(at + srq::STAMP);
        stamp.load(Ordering::Relaxed)
    }

    /// The rights of a request, if its initiator and connection are valid.
    fn rights(&self, request: &Request) -> Option<u32> {
        let from = request.from == self.ends[1].number();
        let same = |i: usize| request.incarnation == self.incarnations[i];
        if request.qp == self.ends[0].number() {
            (from && same(0)).then_some(self.rights[0])
        } else if request.qp == self.through.number() {
            let srq = request.srq == self.through.srqn;
            (from && same(1) && srq).then_some(self.rights[1])
        } else {
            None
        }
    }

    /// The offset of the request's bytes in the memory, if the request is permitted.
    fn place(&self, request: &Request, len: u64) -> Option<usize> {
        let right = match request.kind {
            WRITE | STORE => IBV_ACCESS_REMOTE_WRITE,
            READ => IBV_ACCESS_REMOTE_READ,
            ELEMENTS => match Shape::of_word(request.a)?.rights(request.b != 0) {
                0 => return None,
                right => right,
            },
            _ => IBV_ACCESS_REMOTE_ATOMIC,
        };
        let part = (0..ACCESS.len())
            .find(|&part| ACCESS[part].is_some() && memory().keys[part].0 == request.key)?;
        let allowed = self.rights(request)? & ACCESS[part].unwrap() & right == right;
        let start = (memory().at + PART * part) as u128;
        let (addr, end) = (
            u128::from(request.addr),
            u128::from(request.addr) + u128::from(len),
        );
        let inside = addr >= start && end <= start + PART as u128;
        (allowed && part != FOREIGN && inside).then(|| (addr - start) as usize + PART * part)
    }

    /// The offset of the request's bytes in a receive, if the request is permitted.
    fn receive(&self, request: &Request) -> Option<usize> {
        self.rights(request)?;
        let there = request.b.min(RECEIVE as u64);
        if request.len > RECEIVE as u64 - there {
            return None;
        }
        let number = if request.qp == self.through.number() {
            // Descriptors are assigned from the first one on.
            self.claimed
                .contains(&request.a)
                .then_some(RECEIVES + request.a as usize)?
        } else {
            (request.a < RECEIVES as u64).then_some(request.a as usize)?
        };
        Some(memory().receive(number) + there as usize)
    }
}

/// Uses the places one after another.
fn input_place(id: u64) -> u8 {
    (id % u64::from(PLACES)) as u8
}

/// One run: a line to the agent, and the expected content of the memory.
struct Run {
    asker: Asker,
    world: World,
    bytes: Vec<u8>,
}

impl Run {
    /// Sends a message that has the length of no request, and is not empty: an empty one ends the
    /// line without an error.
    fn send_nonsense(&mut self, input: &mut Input<'_>, id: u64) {
        let len = 1 + input.below(71);
        let line = &self.asker.line;
        line.send(&vec![input.u8(); len], None).unwrap();
        assert!(answer(line, id).is_none(), "{len} bytes are enough");
        self.asker = Asker::new();
    }

    /// Sends a request, and checks its effect.
    fn ask(&mut self, input: &mut Input<'_>, id: u64) {
        let request = self.world.request(input, id);
        let fill: Vec<u8> = (0..PART).map(|i| (i as u64 * 7 + id) as u8).collect();
        let at = request.place as usize % PLACES as usize * PLACE;
        self.asker.bounce.fill(at, &[piece(&fill)]).unwrap();
        self.asker.line.send(&request.bytes(), None).unwrap();
        let moves = (WRITE..=STORE).contains(&request.kind) || request.kind == ELEMENTS;
        let known = (HELLO + 1..=ELEMENTS).contains(&request.kind);
        let fits = request.place < PLACES && request.len <= PLACE as u64;
        if !known || moves && !fits {
            assert!(answer(&self.asker.line, id).is_none(), "{request:?}");
            self.asker = Asker::new();
            return;
        }
        match request.kind {
            GO_ON => {}
            RETURN => self.await_return(&request),
            _ => self.check(&request, &fill, at),
        }
    }

    /// A request that returns a receive has no reply. The reply to the next request on the line
    /// shows that it was executed, before more receives are claimed.
    fn await_return(&mut self, request: &Request) {
        let named = request.a == u64::from(self.world.through.srqn & 0x3fff);
        if named && request.incarnation == self.world.stamp() {
            self.world.claimed.remove(&request.b);
        }
        let behind = Request {
            kind: READ,
            place: 0,
            qp: 0,
            len: 0,
            ..*request
        };
        let line = &self.asker.line;
        line.send(&behind.bytes(), None).unwrap();
        assert!(answer(line, request.id).is_some(), "{behind:?}");
    }

    /// Checks the answer to a request, and that it changed what it may change and nothing else.
    /// `fill`: the bytes at `at` in the bounce file.
    fn check(&mut self, request: &Request, fill: &[u8], at: usize) {
        let (status, value, file) = answer(&self.asker.line, request.id).unwrap_or_else(|| {
            panic!("the line was cut: {request:?}");
        });
        let done = match request.kind {
            FILE => {
                if file.is_some() {
                    assert_shown(request.a);
                }
                status == 0
            }
            WRITE | TO_RECEIVE => self.is_written(request, fill),
            READ => self.is_read(request, at),
            ELEMENTS => {
                let changed = self.elements(request, fill, at);
                let right = status != 0 || changed.is_none_or(|changed| value == changed);
                assert!(right, "{request:?}");
                changed.is_some()
            }
            _ => {
                let old = self.changed(request);
                let right = status != 0 || old.is_none_or(|old| value == old);
                assert!(right, "{request:?}");
                old.is_some()
            }
        };
        assert_eq!(status == 0, done, "{request:?}: {status}");
        assert!(
            memory().bytes() == self.bytes,
            "{request:?} wrote elsewhere"
        );
    }

    /// Whether a request may write. Writes to the expected content.
    fn is_written(&mut self, request: &Request, fill: &[u8]) -> bool {
        let len = request.len as usize;
        let to = if request.kind == WRITE {
            self.world.place(request, request.len)
        } else {
            self.world.receive(request)
        };
        if let Some(to) = to {
            self.bytes[to..to + len].copy_from_slice(&fill[..len]);
        }
        to.is_some()
    }

    /// Whether a request may read. Checks the bytes that it has read.
    fn is_read(&self, request: &Request, at: usize) -> bool {
        let from = self.world.place(request, request.len);
        if let Some(from) = from {
            let mut read = vec![0; request.len as usize];
            let bounce = &self.asker.bounce;
            bounce.empty(at, &[piece_mut(&mut read)]).unwrap();
            assert_eq!(read, self.bytes[from..from + read.len()]);
        }
        from.is_some()
    }

    /// The number of elements that a request changes, if it may. Changes the expected content, and
    /// checks the earlier values.
    fn elements(&mut self, request: &Request, fill: &[u8], at: usize) -> Option<u64> {
        let shape = Shape::of_word(request.a).filter(|it| it.len() as u64 == request.len)?;
        let to = self.world.place(request, request.len)?;
        let area = to..to + shape.len();
        if request.b != 0 {
            let mut read = vec![0; shape.len()];
            let bounce = &self.asker.bounce;
            bounce.empty(at, &[piece_mut(&mut read)]).unwrap();
            assert_eq!(read, self.bytes[area.clone()], "{request:?}");
        }
        let (op, datatype) = (request.a as u8, (request.a >> 8) as u8);
        let datatype = Datatype::of(datatype.into())?;
        let operation = Operation::new(Op::of(op.into())?, datatype)?;
        let (len, mut changed) = (shape.len(), 0);
        let elements = self.bytes[area].chunks_exact_mut(datatype.size());
        for (index, element) in elements.enumerate() {
            let (old, at) = (element.to_vec(), index * datatype.size());
            operation.apply(element, &fill[at..], &fill[len + at..]);
            changed += u64::from(operation.op() == Op::Write || old != *element);
        }
        Some(changed)
    }

    /// The previous value of the word of an atomic request or a store, if it may change the word.
    /// Changes the expected content.
    fn changed(&mut self, request: &Request) -> Option<u64> {
        let at = self.world.place(request, 8);
        let at = at.filter(|_| request.addr.is_multiple_of(8))?;
        let word = &mut self.bytes[at..at + 8];
        let old = u64::from_ne_bytes(*word.first_chunk().unwrap());
        let new = match request.kind {
            ADD => old.wrapping_add(request.a),
            SWAP if old == request.a => request.b,
            SWAP => old,
            _ => request.a,
        };
        word.copy_from_slice(&new.to_ne_bytes());
        Some(old)
    }
}

/// A message with any bytes gets only the access that the queue pairs of its line have, in regions
/// that permit it, and changes nothing else. A message that is not a request ends the line.
///
/// # Panics
/// If this property does not hold.
pub fn agent(data: &[u8]) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(data);
    let memory = memory();
    let world = World::new(&mut input);
    // The regions and the written bytes remain for the next input.
    let mut run = Run {
        asker: Asker::new(),
        world,
        bytes: memory.bytes(),
    };
    for id in 1..=64 {
        if input.is_empty() {
            break;
        }
        match input.u8() {
            0..=7 => refuse_greeting(&mut input),
            8..=15 => run.send_nonsense(&mut input, id),
            kind => {
                if kind < 64 {
                    run.world.claim();
                }
                run.ask(&mut input, id);
            }
        }
    }
}

fn piece(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn piece_mut(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

/// The agent closes a line that begins with anything other than a valid greeting.
fn refuse_greeting(input: &mut Input<'_>) {
    let line = dial();
    let slot = u64::from(Process::open().unwrap().slot);
    let (bytes, file) = match input.u8() % 4 {
        0 => (greeting(slot + 1 + u64::from(input.u8())), None),
        1 => (greeting(slot | 1 << 32), None),
        2 => {
            // A bounce file of another size.
            let bounce = BounceFile::create(PLACES as usize * PLACE / 2).unwrap();
            (greeting(slot), Some(bounce))
        }
        _ => {
            let mut bytes = greeting(slot);
            bytes[0] = 2 + input.u8() % 200;
            (bytes, None)
        }
    };
    line.send(&bytes, file.as_ref().map(AsFd::as_fd)).unwrap();
    assert!(answer(&line, 0).is_none());
}

/// A file from an agent belongs to the device.
fn assert_shown(fd: u64) {
    let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
    let name = name.to_string_lossy();
    let own = name.starts_with("/memfd:softverbs") || name.starts_with("pipe:");
    assert!(own, "{name} is nobody else's");
}
