//! The process at the other end of the ring. It starts the victims, steps through their calls,
//! kills them, and checks both directions of the connection.

use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_QPS_ERR, IBV_QPT_RC, IBV_WC_SUCCESS};

use super::path::Path;
use super::{LARGER, SHORT, SLOTS, message};
use crate::device::{Device, Op, Pair, Queue, Received, Region, Retries, Ring, Wc};
use crate::leftovers::Leftovers;
use crate::link::{Link, readable};
use crate::notice::{LIMIT, Way};
use crate::random::pattern;
use crate::steps::trace::Victim;

/// Cookies of the rings.
const COOKIE: u64 = 1000;
const OWN_COOKIES: [u64; 2] = [1, 2];
/// Numbers of the requests.
const RECEIVE: u64 = 200;
const PROBE: u64 = 201;
/// Longest time for what must not wait for the victim.
const PROMPT: Duration = Duration::from_secs(2);

/// What the survivor does besides waiting for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Never,
    /// Uses the rings while the victim is stopped,
    Before,
    /// after its death, before the next poll of the queue.
    After,
    /// Moves its queue pair to ERR while the victim is stopped.
    Fails,
}

impl Work {
    pub(crate) const ALL: [Self; 4] = [Self::Never, Self::Before, Self::After, Self::Fails];
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
    region: Region,
    /// A connection of the survivor with itself, on the same queue.
    own: [Ring; 2],
    own_sent: u64,
    /// Address of the victim's connection's ring: each round uses the same memory.
    at: Option<usize>,
    leftovers: Leftovers,
}

/// The survivor's end of a round's connection.
struct End {
    pair: Pair,
    ring: Ring,
    /// Messages taken from the ring.
    taken: u64,
    /// Messages posted to the victim.
    given: u64,
    /// The ring has ended.
    ended: bool,
}

const RETRIES: Retries = Retries {
    timeout: 10,
    count: 7,
};

/// Ends a part that must not wait for the victim.
fn prompt(begin: Instant, what: &str) {
    let took = begin.elapsed();
    assert!(took < PROMPT, "{what}: {took:?}");
}

impl Survivor {
    pub(crate) fn new() -> Self {
        let device = Device::open();
        let queue = device.queue(256);
        let ends = OWN_COOKIES.map(|cookie| {
            let pair = device.pair(IBV_QPT_RC, &queue, None);
            (pair, pair.ring(SLOTS, cookie))
        });
        device.connect(&ends[0].0, ends[1].0.number(), RETRIES);
        device.connect(&ends[1].0, ends[0].0.number(), RETRIES);
        ends.iter().for_each(|(_, ring)| ring.attach());
        Self {
            device,
            queue,
            region: device.region(4096),
            own: ends.map(|(_, ring)| ring),
            own_sent: 0,
            at: None,
            leftovers: Leftovers::default(),
        }
    }

    /// Starts a victim, kills it after the round's number of instructions, and checks the remaining
    /// state.
    pub(crate) fn round(&mut self, round: &Round) -> Outcome {
        let path = round.path;
        let pair = self.device.pair(IBV_QPT_RC, &self.queue, None);
        let ring = pair.ring(SLOTS, COOKIE);
        let at = *self.at.get_or_insert(ring.next());
        assert_eq!(ring.next(), at, "the memory of the last ring is not free");
        pair.receive(RECEIVE, &self.region, 0, 64);
        let mut end = End {
            pair,
            ring,
            taken: 0,
            given: 0,
            ended: false,
        };
        let mut wcs = Vec::new();
        let mut victim = self.start(round, &mut end);
        let (steps, ended) = victim.walk(round.steps);
        if ended && path.wakes() {
            assert!(readable(self.queue.fd(), PROMPT), "no wake-up");
        }
        let mut noted = Vec::new();
        if path.is_connected() {
            match round.work {
                Work::Before => noted.extend(self.use_rings(round, &mut end)),
                Work::Fails => self.fail(round, &mut end, &mut wcs),
                Work::Never | Work::After => {}
            }
        }
        self.talk_to_itself();
        let killed = Instant::now();
        victim.kill();
        if path.is_connected() && round.work == Work::After {
            noted.extend(self.use_rings(round, &mut end));
        }
        let notice = path
            .is_connected()
            .then(|| self.notice(round, &end, &mut wcs, killed));
        if path.is_connected() {
            self.take_rest(round, &mut end);
            self.check_sends(round, &mut end, ended);
        }
        let expected = path.posted();
        let delivered = end.taken > expected;
        assert!(
            end.taken == expected || path.may_deliver() && end.taken == expected + 1,
            "{} messages, {expected} before the call",
            end.taken
        );
        if ended && path.delivers() {
            assert!(delivered, "a message that was sent got lost");
            noted.extend(self.queue.arrivals());
            if path != Path::PostHot {
                assert!(noted.contains(&COOKIE), "the arrival was not noted");
            }
        }
        self.talk_to_itself();
        self.device.drain_events();
        let begin = Instant::now();
        if round.tag & 4 != 0 && path.is_connected() {
            end.pair.reset();
            assert_eq!(end.ring.peek(), Err(-libc::ENOTCONN));
        }
        end.pair.destroy();
        prompt(begin, "destroying the queue pair");
        self.leftovers.check();
        Outcome {
            steps,
            ended,
            delivered,
            notice,
        }
    }

    /// Starts a victim up to the beginning of its call.
    fn start(&mut self, round: &Round, end: &mut End) -> Victim {
        let path = round.path;
        let arguments = [
            "ring-victim".to_owned(),
            path.name(),
            round.tag.to_string(),
            end.pair.number().to_string(),
        ];
        let (child, mut link) = Link::start(&arguments);
        let victim = Victim::new(&child);
        let theirs = link.hear_numbers()[0] as u32;
        if !path.is_connected() {
            link.say("go");
            return victim;
        }
        self.device.connect(&end.pair, theirs, RETRIES);
        if path == Path::PostHot {
            end.ring.set_hot(true);
        }
        link.say("connect");
        assert_eq!(link.hear(), "connected");
        end.ring.attach();
        link.say("attached");
        assert_eq!(link.hear(), "posted");
        for _ in 0..path.taken() {
            assert!(self.take(round, end), "no message");
        }
        for _ in 0..path.received() {
            assert_eq!(self.give(round, end, SHORT), 0);
        }
        link.say("take");
        assert_eq!(link.hear(), "taken");
        for len in path.given() {
            assert_eq!(self.give(round, end, len), 0);
        }
        // drops what the preparation has noted
        self.queue.arrivals();
        self.queue.event();
        if path.is_ended() {
            end.pair.fail();
        }
        if path.moves() {
            assert_eq!(end.ring.grow(LARGER), 0);
        }
        if path == Path::PostWakes || path.is_awaited() {
            self.queue.arm();
        }
        if path == Path::PostSolicited {
            self.queue.arm_solicited();
        }
        if path.is_awaited() {
            assert_eq!(end.ring.await_consume(), 0);
            let full = path != Path::ConsumeDelivers;
            assert!(!full || self.give(round, end, SHORT) == libc::EAGAIN);
        }
        link.say("call");
        victim
    }

    /// Posts the next message to the victim; 0 or an errno.
    fn give(&self, round: &Round, end: &mut End, len: usize) -> i32 {
        let (words, payload) = message(round.tag ^ 1, end.given, len);
        let ret = end.ring.post(words, &payload, 0);
        end.given += u64::from(ret == 0);
        ret
    }

    /// Takes and checks the next message, if there is one.
    fn take(&self, round: &Round, end: &mut End) -> bool {
        match end.ring.poll() {
            Ok(Some(received)) => {
                let of_call = end.taken == round.path.posted();
                let len = if of_call { round.path.len() } else { SHORT };
                let (words, payload) = message(round.tag, end.taken, len);
                let right = Received { words, payload };
                assert!(received == right, "message {}: {received:?}", end.taken);
                end.taken += 1;
                true
            }
            Ok(None) => false,
            Err(error) => {
                assert!(
                    error == -libc::ENOTCONN || error == -libc::EAGAIN,
                    "softdv_ring_poll: {error}"
                );
                end.ended |= error == -libc::ENOTCONN;
                false
            }
        }
    }

    /// Uses both directions while the other end is stopped or dead. Returns the cookies of noted
    /// rings.
    fn use_rings(&self, round: &Round, end: &mut End) -> Vec<u64> {
        let begin = Instant::now();
        let noted = self.queue.arrivals();
        for _ in 0..3 {
            let ret = self.give(round, end, SHORT);
            assert!(matches!(ret, 0 | libc::EAGAIN | libc::ENOTCONN), "{ret}");
        }
        while self.take(round, end) {}
        let ret = end.ring.await_consume();
        assert!(matches!(ret, 0 | libc::ENOTCONN), "{ret}");
        self.queue.arm();
        end.ring.set_hot(round.tag & 8 != 0);
        while self.take(round, end) {}
        end.ring.positions();
        self.queue.event();
        prompt(begin, "the use of rings beside a stopped or dead process");
        noted
    }

    /// Moves the queue pair to ERR, and takes what has arrived, while the victim is stopped.
    fn fail(&self, round: &Round, end: &mut End, wcs: &mut Vec<Wc>) {
        let begin = Instant::now();
        end.pair.fail();
        self.queue.poll(wcs);
        while self.take(round, end) {}
        assert_eq!(self.give(round, end, SHORT), libc::ENOTCONN);
        prompt(begin, "ERR beside a stopped process");
    }

    /// Messages between the survivor's own queue pairs.
    fn talk_to_itself(&mut self) {
        let begin = Instant::now();
        for (from, to) in [(0, 1), (1, 0)] {
            self.own_sent += 1;
            let payload = pattern(self.own_sent, 700);
            let words = [self.own_sent; 3];
            assert_eq!(self.own[from].post(words, &payload, 0), 0);
            let received = self.own[to].poll();
            assert!(
                received == Ok(Some(Received { words, payload })),
                "{received:?}"
            );
        }
        prompt(begin, "messages of others");
    }

    /// Waits until the queue pair has failed.
    fn notice(&self, round: &Round, end: &End, wcs: &mut Vec<Wc>, killed: Instant) -> Duration {
        let mut probed = false;
        let has = |wcs: &[Wc], id| wcs.iter().any(|wc: &Wc| wc.id == id);
        if round.path.lets_go() {
            for _ in 0..3 {
                std::thread::sleep(Duration::from_millis(2));
                self.queue.poll(wcs);
            }
            if end.pair.state() != IBV_QPS_ERR {
                end.pair.post(PROBE, Op::Inline, &self.region, 0, 8);
                probed = true;
            }
        }
        while !has(wcs, RECEIVE) || probed && !has(wcs, PROBE) {
            let left = LIMIT.saturating_sub(killed.elapsed());
            assert!(!left.is_zero(), "no end of the connection: {wcs:?}");
            round.way.wait(&self.queue, wcs, left);
        }
        let notice = killed.elapsed();
        let count = 1 + usize::from(probed);
        assert!(
            wcs.len() == count && wcs.iter().all(|wc| wc.status != IBV_WC_SUCCESS),
            "{wcs:?}"
        );
        assert_eq!(end.pair.state(), IBV_QPS_ERR);
        notice
    }

    /// Takes the messages of the dead victim, up to the end of the ring.
    fn take_rest(&self, round: &Round, end: &mut End) {
        let begin = Instant::now();
        while !end.ended {
            self.take(round, end);
            // the sender is dead, so nothing has to be waited for
            prompt(begin, "the end of the ring");
        }
        assert_eq!(end.ring.peek(), Err(-libc::ENOTCONN));
    }

    /// Sends to the dead victim fail, and consumed messages are counted.
    fn check_sends(&self, round: &Round, end: &mut End, ended: bool) {
        assert_eq!(self.give(round, end, SHORT), libc::ENOTCONN);
        assert_eq!(end.ring.await_consume(), libc::ENOTCONN);
        let (sent, delivered) = end.ring.positions();
        let path = round.path;
        // all messages before the padded one take one slot
        let first = path.received() as u32 + path.drained();
        let consumed = match path {
            Path::TakePadded => SLOTS + 32,
            _ => first + 1,
        };
        // the last value before the end of the connection
        assert!(
            delivered <= first || path.consumes() && delivered == consumed,
            "{delivered} of {sent} slots consumed"
        );
        if round.work == Work::Before && !path.is_ended() && !path.lets_go() {
            let right = if ended && path.consumes() {
                delivered == consumed
            } else {
                delivered >= first
            };
            assert!(right, "{delivered} of {sent} slots consumed");
        }
    }
}
