//! The surviving process. It starts the victims, steps through their calls, kills them, and checks
//! the state that each leaves.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdma_core_sys::{
    IBV_QPS_ERR, IBV_QPT_RC, IBV_QPT_UD, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS,
};

use super::bystander;
use super::path::{Delivers, Path};
use super::trace::Victim;
use super::victim::fill_ring;
use crate::device::{Device, Op, Pair, Queue, Region, Retries, Shared, Wc};
use crate::extended::Window;
use crate::leftovers::Leftovers;
use crate::link::Link;
use crate::notice::{LIMIT, Way};
use crate::random::pattern;
use crate::remains::{UNTOUCHED, await_error, is_written};

/// Number of receives of the connected queue pair, of the shared queue and of the datagram queue
/// pair, and the bytes of each.
const OWN: u64 = 4;
const SHARED: u64 = 8;
const DATAGRAMS: u64 = 4;
const ROOM: usize = 128 << 10;
/// Their first numbers.
const OWN_AT: u64 = 200;
const SHARED_AT: u64 = 100;
const DATAGRAMS_AT: u64 = 300;
/// Numbers of the survivor's own requests: one that waits for the victim, two more, and one that
/// detects whether the other end lives.
const AWAITED: u64 = 400;
const EXTRA_SEND: u64 = 401;
const EXTRA_WRITE: u64 = 402;
const PROBE: u64 = 403;
/// Offsets in the target region: a word, and the written bytes, with bytes around them that must
/// not change.
const TARGET: usize = 64 << 10;
const WRITTEN_AT: usize = 4096;
/// A datagram's receive begins with a global route header.
const GRH: usize = 40;

/// The time at which the survivor posts requests to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Never,
    /// While the victim is stopped.
    Before,
    /// After its death, before the next poll.
    After,
}

/// The parameters of one round.
#[derive(Clone, Copy)]
pub(crate) struct Round {
    pub(crate) path: Path,
    /// Number of instructions after which the victim is killed.
    pub(crate) steps: usize,
    pub(crate) way: Way,
    pub(crate) work: Work,
    pub(crate) tag: u64,
}

/// The result of a round.
pub(crate) struct Outcome {
    pub(crate) steps: usize,
    pub(crate) ended: bool,
    pub(crate) delivered: bool,
    pub(crate) notice: Option<Duration>,
}

pub(crate) struct Survivor {
    device: Device,
    queue: Queue,
    to_bystander: Queue,
    target: Region,
    /// The region that windows are bound to.
    windowed: Region,
    receives: Region,
    scratch: Region,
    shared: Shared,
    shared_region: Region,
    shared_free: Vec<u64>,
    bystander: Link,
    leftovers: Leftovers,
}

/// The queue pairs of a round.
struct Pairs {
    rc: Pair,
    on_shared: Pair,
    ud: Pair,
}

/// Completions by request number; each may arrive once.
#[derive(Default)]
struct Book(HashMap<u64, Wc>);

impl Book {
    fn add(&mut self, wc: Wc) {
        if let Some(first) = self.0.insert(wc.id, wc) {
            panic!("two completions of one request: {first:?}, {wc:?}");
        }
    }

    fn has(&self, ids: &[u64]) -> bool {
        ids.iter().all(|id| self.0.contains_key(id))
    }

    /// Successful completions with these numbers, in order.
    fn good(&self, from: u64, count: u64) -> Vec<Wc> {
        (from..from + count)
            .filter_map(|id| self.0.get(&id))
            .filter(|wc| wc.status == IBV_WC_SUCCESS)
            .copied()
            .collect()
    }
}

impl Survivor {
    pub(crate) fn new() -> Self {
        let device = Device::open();
        let to_bystander = device.queue(64);
        let shared = device.shared(SHARED as u32);
        let pair = device.pair(IBV_QPT_RC, &to_bystander, Some(&shared));
        let arguments = ["bystander".to_owned(), pair.number().to_string()];
        let (_, mut bystander) = Link::start(&arguments);
        let theirs = bystander.hear_numbers()[0] as u32;
        let retries = Retries {
            timeout: 14,
            count: 7,
        };
        device.connect(&pair, theirs, retries);
        let mut survivor = Self {
            device,
            queue: device.queue(256),
            to_bystander,
            target: device.region(TARGET),
            windowed: device.region(TARGET),
            receives: device.region(ROOM * OWN as usize),
            scratch: device.region(2 * ROOM),
            shared,
            shared_region: device.region(ROOM * SHARED as usize),
            shared_free: (0..SHARED).collect(),
            bystander,
            leftovers: Leftovers::default(),
        };
        survivor.post_shared();
        survivor
    }

    fn post_shared(&mut self) {
        for index in self.shared_free.drain(..) {
            let offset = ROOM * index as usize;
            self.shared
                .receive(SHARED_AT + index, &self.shared_region, offset, ROOM);
        }
    }

    /// Starts a victim, kills it after the round's number of instructions, and checks the remaining
    /// state.
    pub(crate) fn round(&mut self, round: &Round) -> Outcome {
        let path = round.path;
        self.target.fill(UNTOUCHED);
        self.target.write(0, &0u64.to_ne_bytes());
        let pairs = Pairs {
            rc: if path.invalidates() {
                self.device.builder_pair(path.kind(), &self.queue, None)
            } else {
                self.device.pair(path.kind(), &self.queue, None)
            },
            on_shared: self
                .device
                .pair(IBV_QPT_RC, &self.queue, Some(&self.shared)),
            ud: self.device.pair(IBV_QPT_UD, &self.queue, None),
        };
        for i in 0..OWN {
            let offset = ROOM * i as usize;
            pairs.rc.receive(OWN_AT + i, &self.receives, offset, ROOM);
        }
        for i in 0..DATAGRAMS {
            let offset = 8192 * i as usize;
            pairs
                .ud
                .receive(DATAGRAMS_AT + i, &self.scratch, offset, 8192);
        }
        let window = path.invalidates().then(|| self.device.window());
        let (mut victim, theirs) = self.start(round, &pairs, window);
        let mut ids: Vec<u64> = Vec::new();
        if path.is_connected() && path.is_reliable() {
            ids.extend(OWN_AT..OWN_AT + OWN);
        }
        if path.is_awaited() || path.fills_ring() {
            ids.push(AWAITED);
        }
        let mut book = Book::default();
        if matches!(path, Path::SendWakes | Path::Connect) {
            self.queue.arm();
        }
        let (steps, ended) = victim.walk(round.steps);
        let works = path.is_connected() && round.work != Work::Never;
        if works && round.work == Work::Before {
            self.work_beside(&pairs.rc, &theirs, &mut book);
        }
        let killed = Instant::now();
        victim.kill();
        if works && round.work == Work::After {
            self.post_both(&pairs.rc, &theirs);
        }
        if works {
            ids.extend([EXTRA_SEND, EXTRA_WRITE]);
        }
        let notice = self.notice(round, &pairs, &mut book, &mut ids, killed);
        let delivered = self.check(round, &pairs, &book, ended);
        if let Some(window) = window {
            self.check_window(window, delivered);
        }
        self.device.drain_events();
        pairs.rc.destroy();
        pairs.on_shared.destroy();
        pairs.ud.destroy();
        self.go_on_with_the_bystander(round, ended);
        self.leftovers.check();
        Outcome {
            steps,
            ended,
            delivered,
            notice,
        }
    }

    /// Starts a victim up to the beginning of its call; returns its numbers.
    fn start(
        &mut self,
        round: &Round,
        pairs: &Pairs,
        window: Option<Window>,
    ) -> (Victim, Vec<u64>) {
        let path = round.path;
        let arguments = [
            "victim".to_owned(),
            path.name(),
            round.tag.to_string(),
            pairs.rc.number().to_string(),
            pairs.on_shared.number().to_string(),
            pairs.ud.number().to_string(),
            self.target.addr(WRITTEN_AT).to_string(),
            self.target.rkey().to_string(),
            window.map_or(0, Window::key).to_string(),
        ];
        let (child, mut link) = Link::start(&arguments);
        let victim = Victim::new(&child);
        let theirs = link.hear_numbers();
        if path.is_connected() {
            let retries = Retries {
                timeout: 10,
                count: 7,
            };
            self.device.connect(&pairs.rc, theirs[0] as u32, retries);
            self.device
                .connect(&pairs.on_shared, theirs[1] as u32, retries);
        }
        if let Some(window) = window {
            let batch = pairs.rc.batch();
            batch.bind(PROBE, window, &self.windowed).post();
            let mut wcs = Vec::new();
            self.queue.poll(&mut wcs);
            let bound = matches!(
                wcs[..],
                [Wc {
                    status: IBV_WC_SUCCESS,
                    ..
                }]
            );
            assert!(bound, "a window: {wcs:?}");
        }
        self.scratch
            .write(ROOM, &pattern(round.tag ^ 2, path.len()));
        if path.is_awaited() {
            let pair = if path.is_awaited_on_shared() {
                &pairs.on_shared
            } else {
                &pairs.rc
            };
            pair.post(AWAITED, Op::Send, &self.scratch, ROOM, path.len());
        }
        if path.fills_ring() {
            let (queue, ud, number) = (&self.queue, &pairs.ud, theirs[2] as u32);
            let handle = self.device.handle();
            fill_ring(queue, ud, handle, number, &self.scratch, ROOM);
            let op = Op::Datagram(handle, number);
            ud.post(AWAITED, op, &self.scratch, ROOM, path.len());
        }
        if path.is_sent_to() {
            let op = Op::Send;
            pairs.rc.post(AWAITED, op, &self.scratch, ROOM, path.len());
        }
        link.say("go");
        (victim, theirs)
    }

    fn post_both(&self, rc: &Pair, theirs: &[u64]) {
        let to = Op::Write(theirs[3] + (1 << 17), theirs[4] as u32);
        rc.post(EXTRA_WRITE, to, &self.scratch, ROOM, 8);
        rc.post(EXTRA_SEND, Op::Inline, &self.scratch, ROOM, 8);
    }

    /// A process that is stopped at any instruction delays no other process.
    fn work_beside(&self, rc: &Pair, theirs: &[u64], book: &mut Book) {
        let begin = Instant::now();
        self.post_both(rc, theirs);
        let mut wcs = Vec::new();
        for _ in 0..20 {
            self.queue.poll(&mut wcs);
        }
        self.queue.arm();
        self.queue.event();
        self.queue.poll(&mut wcs);
        wcs.into_iter().for_each(|wc| book.add(wc));
        assert!(
            begin.elapsed() < LIMIT,
            "a process that stands still holds the survivor up"
        );
    }

    /// Waits until every request and receive of the connection has completed.
    fn notice(
        &self,
        round: &Round,
        pairs: &Pairs,
        book: &mut Book,
        ids: &mut Vec<u64>,
        killed: Instant,
    ) -> Option<Duration> {
        let mut first = None;
        let mut take = |book: &mut Book, wcs: &mut Vec<Wc>| {
            for wc in wcs.drain(..) {
                if wc.status != IBV_WC_SUCCESS && first.is_none() {
                    first = Some(killed.elapsed());
                }
                book.add(wc);
            }
        };
        let mut wcs = Vec::new();
        let path = round.path;
        if path.lets_go() || !path.is_connected() || !path.is_reliable() {
            for _ in 0..3 {
                std::thread::sleep(Duration::from_millis(2));
                self.queue.poll(&mut wcs);
                take(book, &mut wcs);
            }
            if path.is_connected() && path.is_reliable() && !book.has(ids) {
                ids.push(PROBE);
                pairs.rc.post(PROBE, Op::Send, &self.scratch, ROOM, 48);
            }
        }
        while !book.has(ids) {
            let left = LIMIT.saturating_sub(killed.elapsed());
            assert!(
                !left.is_zero(),
                "{:?} and no completion of all of {ids:?}: {:?}",
                LIMIT,
                book.0
            );
            round.way.wait(&self.queue, &mut wcs, left);
            take(book, &mut wcs);
        }
        // other completions: datagrams, and receives of the shared queue
        self.queue.poll(&mut wcs);
        take(book, &mut wcs);
        first
    }

    /// The victim's message has arrived as a whole or not at all; returns whether it has arrived.
    fn check(&mut self, round: &Round, pairs: &Pairs, book: &Book, ended: bool) -> bool {
        let path = round.path;
        let delivers = path.delivers();
        let own = book.good(OWN_AT, OWN);
        let shared = book.good(SHARED_AT, SHARED);
        let datagrams = book.good(DATAGRAMS_AT, DATAGRAMS);
        let warm = usize::from(path.is_warm());
        let more = |got: &[Wc], kind: Delivers| {
            let most = warm + usize::from(delivers == kind);
            assert!(
                got.len() >= warm && got.len() <= most,
                "{kind:?}: {} messages, {warm} before the call",
                got.len()
            );
            got.len() > warm
        };
        let delivered = more(&own, Delivers::Message)
            | more(&shared, Delivers::Shared)
            | more(&datagrams, Delivers::Datagram);
        for (got, region, room, at, grh) in [
            (&own, &self.receives, ROOM, OWN_AT, 0),
            (&shared, &self.shared_region, ROOM, SHARED_AT, 0),
            (&datagrams, &self.scratch, 8192, DATAGRAMS_AT, GRH),
        ] {
            for (i, wc) in got.iter().enumerate() {
                let (tag, len) = if i < warm {
                    (round.tag ^ 1, 48)
                } else {
                    (round.tag, path.len())
                };
                assert_eq!(wc.len, len + grh, "length of message {i}: {wc:?}");
                if wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM {
                    let offset = room * (wc.id - at) as usize + grh;
                    assert!(
                        region.read(offset, len) == pattern(tag, len),
                        "payload of message {i}: {wc:?}"
                    );
                }
                if wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM || path.has_imm() && i >= warm {
                    assert_eq!(wc.imm, round.tag as u32);
                }
            }
        }
        for wc in &shared {
            self.shared_free.push(wc.id - SHARED_AT);
        }
        if ended && delivers != Delivers::Nothing && path != Path::DatagramFirst {
            assert!(delivered, "what was sent got lost");
        }
        let written = self.check_target(round, ended);
        assert!(
            written || !(delivered && path.writes()),
            "a notice without its data"
        );
        if ended && path.takes_awaited() {
            let status = book.0[&AWAITED].status;
            assert_eq!(status, IBV_WC_SUCCESS, "a message that was taken");
        }
        if path.is_connected() && !path.lets_go() {
            if path.is_reliable() {
                assert_eq!(pairs.rc.state(), IBV_QPS_ERR);
            }
            if path != Path::Connect {
                await_error(&pairs.on_shared, &self.queue);
            }
        }
        delivered
    }

    /// The window is bound until the message that invalidates it has arrived, and not afterwards.
    fn check_window(&mut self, window: Window, delivered: bool) {
        // a region with a bound window cannot be deregistered
        let kept = self.windowed.deregister().is_err();
        assert_eq!(kept, !delivered, "the window is bound");
        window.free();
        if kept {
            self.windowed
                .deregister()
                .expect("a region without windows");
        }
        self.device.register_again(&mut self.windowed);
    }

    /// The target of writes contains all of the bytes or none, and the bytes around them are
    /// unchanged.
    fn check_target(&self, round: &Round, ended: bool) -> bool {
        let writes = round.path.writes();
        let len = if writes { round.path.len() } else { 48 };
        let written = is_written(&self.target, WRITTEN_AT, &pattern(round.tag, len));
        assert!(!written || writes, "a write that nobody asked for");
        assert!(written || !writes || !ended, "a write that got lost");
        written
    }

    /// Another process uses the same shared queue, lock and region; then the region is
    /// deregistered.
    fn go_on_with_the_bystander(&mut self, round: &Round, ended: bool) {
        let word = format!("add {} {}", self.target.addr(0), self.target.rkey());
        self.bystander.say(&word);
        let word = self.bystander.hear_numbers()[0];
        let changes = round.path.changes_word();
        assert!(
            word == 0 && !(changes && ended) || word == 1 && changes,
            "the word is {word}"
        );
        let count = SHARED - self.shared_free.len() as u64;
        self.bystander.say(&format!("send {} {count}", round.tag));
        let begin = Instant::now();
        let mut wcs = Vec::new();
        while (wcs.len() as u64) < count {
            self.to_bystander.poll(&mut wcs);
            assert!(
                begin.elapsed() < LIMIT,
                "{} of {count} receives of the shared queue are to be had",
                wcs.len()
            );
            if (wcs.len() as u64) < count {
                std::thread::yield_now();
            }
        }
        for (i, wc) in wcs.iter().enumerate() {
            assert_eq!((wc.status, wc.len), (IBV_WC_SUCCESS, bystander::LEN));
            let index = wc.id - SHARED_AT;
            assert!(
                !self.shared_free.contains(&index),
                "a receive that was taken twice"
            );
            let got = self.shared_region.read(ROOM * index as usize, wc.len);
            assert!(
                got == pattern(round.tag + i as u64, wc.len),
                "the bystander's message"
            );
            self.shared_free.push(index);
        }
        assert_eq!(self.bystander.hear(), "sent");
        self.post_shared();
        let begin = Instant::now();
        self.target
            .deregister()
            .expect("the target's deregistration");
        assert!(
            begin.elapsed() < Duration::from_secs(2),
            "a dead process was waited for"
        );
        self.device.register_again(&mut self.target);
    }
}
