//! Which way of long messages is the fastest one, for each peer and length: streamed through the
//! ring, read, or written and read. `docs/protocol-rdm.md`, "Long messages".

use std::time::{Duration, Instant};

use crate::rdm::core::peer::PeerKey;
use crate::rdm::number_map::NumberMap;
use crate::rdm::table_keys::ArrivalKey;

/// How a long message arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) enum Way {
    /// Both processors copy, through the ring.
    Stream,
    /// The receiver copies, by READs.
    Read,
    /// The receiver copies the begin by READs, and the sender the end by a WRITE.
    Both,
}

/// The shortest messages, as the binary logarithm of their length, and the number of such ranges of
/// lengths; the last one has no end.
const SHORTEST: u32 = 14;
const RANGES: usize = 8;
/// The first range whose messages are long enough for [`Way::Both`]: 32 KiB.
const FIRST_OF_BOTH: usize = 1;
/// The ways of a range, in the order in which they are tried; shorter messages have two.
const WAYS: [Way; 3] = [Way::Stream, Way::Read, Way::Both];
/// Consecutive messages of a range that try a way: its code is in no cache at the first one.
const TRIALS: u32 = 4;
/// Messages from one trial to the next, at first and at most. The distance doubles with each trial
/// that changes nothing.
const AGAIN: u32 = 64 * TRIALS;
const AGAIN_AT_MOST: u32 = 32 * AGAIN;
/// One of so many other messages is measured.
const MEASURED: u32 = 16;

/// Messages that are measured at the same time.
const AT_ONCE: usize = 16;

/// Messages that could not be measured, after which the measured ones are forgotten.
const SKIPPED: u32 = 4096;

/// The times of one peer's messages of similar length.
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    /// Trials that were begun before the present one. The first ones try each way.
    trials: u32,
    /// Messages since the present trial began.
    since: u32,
    /// Messages since the last one that was measured.
    unmeasured: u32,
    /// Number of messages after which the next trial begins.
    distance: u32,
    /// The fastest way, and its time, when the present trial began.
    before: Option<(Way, u32)>,
    /// Nanoseconds of 64 KiB, by way; 0: not measured.
    times: [u32; 3],
}

impl Range {
    /// The fastest of the first `ways`. The sender computes while its message is read, so reading
    /// is preferred.
    fn fastest(&self, ways: u32) -> Way {
        let time = |way: Way| match self.times[way as usize] {
            0 => u32::MAX,
            time => time,
        };
        let read = time(Way::Read);
        let others = [Way::Stream, Way::Both];
        let others = others.into_iter().filter(|way| (*way as u32) < ways);
        match others.min_by_key(|way| time(*way)) {
            Some(way) if time(way) < read - read / 16 => way,
            _ => Way::Read,
        }
    }

    /// The way of the next message, of the first `ways`, and whether it is measured.
    /// [`Self::count`] follows.
    #[inline]
    fn next(&self, ways: u32) -> (Way, bool) {
        if self.trials < ways {
            return (WAYS[self.trials as usize], true);
        }
        let fastest = self.fastest(ways);
        if self.since >= TRIALS {
            return (fastest, self.unmeasured + 1 >= MEASURED);
        }
        // the others in turn
        let other = fastest as u32 + 1 + self.trials % (ways - 1);
        (WAYS[(other % ways) as usize], true)
    }

    /// Whether the next messages take the fastest way, and that is to read them.
    #[inline]
    fn reads_on(&self, ways: u32) -> bool {
        self.trials >= ways && self.since >= TRIALS && self.fastest(ways) == Way::Read
    }

    /// The message has taken the way of [`Self::next`].
    #[inline]
    fn count(&mut self, ways: u32, measured: bool) {
        self.unmeasured = if measured { 0 } else { self.unmeasured + 1 };
        self.since += 1;
        let first = self.trials < ways;
        if first && self.since == TRIALS {
            self.trials += 1;
            // the fastest way follows the last of the first trials
            let last = self.trials == ways;
            (self.since, self.distance) = (if last { TRIALS } else { 0 }, AGAIN);
        } else if !first && self.since >= self.distance {
            self.begin_trial(ways);
        }
    }

    #[cold]
    fn begin_trial(&mut self, ways: u32) {
        let fastest = self.fastest(ways);
        let now = (fastest, self.times[fastest as usize]);
        let same = self
            .before
            .is_some_and(|(way, time)| way == fastest && !is_longer(now.1, time));
        self.distance = match same {
            true => AGAIN_AT_MOST.min(2 * self.distance),
            false => AGAIN,
        };
        self.before = Some(now);
        self.trials = self.trials.wrapping_add(1).max(ways);
        self.since = 0;
    }

    /// A message has taken `time`. A shorter time than before counts at once, a longer one, which
    /// can have been an interruption, by an eighth.
    fn note(&mut self, way: Way, len: u64, time: Duration) {
        let whole = (time.as_nanos() << 16) / u128::from(len.max(1));
        let new = u32::try_from(whole).unwrap_or(u32::MAX).max(1);
        let known = &mut self.times[way as usize];
        *known = match *known {
            0 => new,
            old if new <= old => new,
            old => {
                let more = (new - old).min(old);
                old.saturating_add(more.div_ceil(8))
            }
        };
        // The way that was the fastest is not what it was: the others are tried soon.
        if let Some((fastest, time)) = self.before
            && fastest == way
            && is_longer(*known, time)
        {
            self.distance = AGAIN;
        }
    }
}

/// Whether a way that took the time `before` takes longer, by a quarter.
fn is_longer(now: u32, before: u32) -> bool {
    now > before.saturating_add(before / 4)
}

/// The message that is measured.
#[derive(Clone, Copy, Debug)]
struct Measured {
    key: ArrivalKey,
    peer: PeerKey,
    len: u64,
    way: Way,
    /// When it was begun, or the message before it was complete.
    begin: Instant,
}

/// The times of one peer.
#[derive(Debug)]
struct OfPeer {
    /// Its number.
    peer: u32,
    ranges: [Range; RANGES],
}

/// See the module.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Paces {
    peers: Vec<OfPeer>,
    /// Indices in `peers`, by the number of the peer.
    places: NumberMap<u32>,
    /// Index of the peer that was looked up last, which is mostly the next one too.
    last: usize,
    /// At most [`AT_ONCE`]. A sender that has many messages outstanding announces them before the
    /// first one is complete.
    measured: Vec<Measured>,
    /// Messages since that were not measured, because there were so many.
    skipped: u32,
    /// The way of all messages.
    #[cfg(test)]
    pub(in crate::rdm) fixed: Option<Way>,
}

impl Paces {
    /// The range of a message, and the number of its ways.
    #[inline]
    fn range(&mut self, peer: PeerKey, len: u64) -> (&mut Range, u32) {
        let of = len.max(1).ilog2().saturating_sub(SHORTEST) as usize;
        let of = of.min(RANGES - 1);
        let last = self.peers.get(self.last);
        if last.is_none_or(|last| last.peer != peer.number()) {
            self.look_up(peer.number());
        }
        let ranges = &mut self.peers[self.last].ranges;
        (&mut ranges[of], if of < FIRST_OF_BOTH { 2 } else { 3 })
    }

    /// Makes this peer the last one.
    #[inline(never)]
    fn look_up(&mut self, peer: u32) {
        // fewer than 2^24, as peers
        let next = self.peers.len() as u32;
        let place = *self.places.entry(peer).or_insert(next);
        if place == next {
            let ranges = Default::default();
            self.peers.push(OfPeer { peer, ranges });
        }
        self.last = place as usize;
    }

    /// Decides how a message arrives.
    pub(in crate::rdm) fn choose(&mut self, peer: PeerKey, len: u64, key: ArrivalKey) -> Way {
        #[cfg(test)]
        if let Some(way) = self.fixed {
            return way;
        }
        let (range, ways) = self.range(peer, len);
        let (way, measured) = range.next(ways);
        range.count(ways, measured);
        if measured && self.measured.len() == AT_ONCE {
            self.skipped += 1;
            if self.skipped == SKIPPED {
                // they have failed
                (self.skipped, self.measured) = (0, Vec::new());
            }
        } else if measured {
            self.measured.push(Measured {
                key,
                peer,
                len,
                way,
                begin: Instant::now(),
            });
        }
        way
    }

    /// How the next message arrives, and whether it is measured. Nothing changes; if it is read in
    /// this call, [`Self::has_read`] follows, otherwise [`Self::choose`].
    #[inline]
    pub(in crate::rdm) fn next(&mut self, peer: PeerKey, len: u64) -> (Way, bool) {
        #[cfg(test)]
        if let Some(way) = self.fixed {
            return (way, false);
        }
        let (range, ways) = self.range(peer, len);
        range.next(ways)
    }

    /// Whether a message is read that is read together with others and not measured.
    #[inline]
    pub(in crate::rdm) fn reads_more(&mut self, peer: PeerKey, len: u64) -> bool {
        #[cfg(test)]
        if let Some(way) = self.fixed {
            return way == Way::Read;
        }
        let (range, ways) = self.range(peer, len);
        range.reads_on(ways)
    }

    /// A message was read in this call, in this time if it was measured. It delays those that are
    /// measured.
    #[inline]
    pub(in crate::rdm) fn has_read(&mut self, peer: PeerKey, len: u64, time: Option<Duration>) {
        let (range, ways) = self.range(peer, len);
        range.count(ways, time.is_some());
        if let Some(time) = time {
            range.note(Way::Read, len, time);
        }
        if !self.measured.is_empty() {
            let now = Instant::now();
            self.measured.iter_mut().for_each(|it| it.begin = now);
        }
    }

    /// A message is complete. Messages that were announced before it delay one that is measured.
    #[inline]
    pub(in crate::rdm) fn completed(&mut self, key: ArrivalKey) {
        if !self.measured.is_empty() {
            self.completed_at(key, Instant::now());
        }
    }

    fn completed_at(&mut self, key: ArrivalKey, now: Instant) {
        let at = self.measured.iter().position(|it| it.key == key);
        let done = at.map(|at| self.measured.swap_remove(at));
        self.skipped *= u32::from(done.is_none());
        self.measured.iter_mut().for_each(|it| it.begin = now);
        let Some(Measured {
            peer,
            len,
            way,
            begin,
            ..
        }) = done
        else {
            return;
        };
        let time = now.saturating_duration_since(begin);
        self.range(peer, len).0.note(way, len, time);
    }

    /// The session of a peer has ended.
    pub(in crate::rdm) fn forget_peer(&mut self, peer: PeerKey) {
        if let Some(place) = self.places.remove(&peer.number()) {
            self.peers.swap_remove(place as usize);
            // the last one has its place now
            if let Some(moved) = self.peers.get(place as usize) {
                self.places.insert(moved.peer, place);
            }
        }
        self.measured.retain(|measured| measured.peer != peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It has two ways.
    const LEN: u64 = 1 << 14;
    const LONG: u64 = 1 << 20;

    fn peer() -> PeerKey {
        PeerKey::from_number(7)
    }

    /// Runs so many messages, which take these nanoseconds by way. Returns the number of streams.
    fn run(paces: &mut Paces, messages: u32, times: [u64; 2]) -> u32 {
        run_of(paces, LEN, messages, [times[0], times[1], 1])[0]
    }

    /// The same of messages of this length. Returns the number of messages by way.
    fn run_of(paces: &mut Paces, len: u64, messages: u32, times: [u64; 3]) -> [u32; 3] {
        let mut ways = [0; 3];
        for number in 0..messages {
            let key = ArrivalKey::from_number(number);
            let way = paces.choose(peer(), len, key);
            ways[way as usize] += 1;
            if let Some(measured) = paces.measured.first() {
                let end = measured.begin + Duration::from_nanos(times[way as usize]);
                paces.completed_at(key, end);
            }
        }
        ways
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_one_tried_again() {
        // trials after 256, 256, 512, 1,024 ... messages
        let mut paces = Paces::default();
        assert_eq!(run(&mut paces, 4096, [3000, 2000]), 4 + 4 * 4);
        let mut paces = Paces::default();
        assert_eq!(run(&mut paces, 4096, [2000, 3000]), 4096 - 4 - 4 * 4);
        // about equal: the sender computes meanwhile
        let mut paces = Paces::default();
        assert_eq!(run(&mut paces, 4096, [1950, 2000]), 4 + 4 * 4);
        // in the end 4 of 8,192
        run(&mut paces, 3 * AGAIN_AT_MOST, [3000, 2000]);
        let streams = run(&mut paces, 4 * AGAIN_AT_MOST, [3000, 2000]);
        assert_eq!(streams, 4 * TRIALS);
    }

    #[test]
    fn long_messages_have_three_ways() {
        let ways = |times| run_of(&mut Paces::default(), LONG, 4096, times);
        // 4 trials of each, and 4 times the others in turn
        assert_eq!(ways([30_000, 20_000, 16_000]), [4 + 8, 4 + 8, 4096 - 24]);
        assert_eq!(ways([30_000, 20_000, 25_000]), [4 + 8, 4096 - 24, 4 + 8]);
        assert_eq!(ways([10_000, 20_000, 15_000]), [4096 - 24, 4 + 8, 4 + 8]);
        // about equal: the sender computes meanwhile
        assert_eq!(
            ways([19_500, 20_000, 19_000])[Way::Read as usize],
            4096 - 24
        );
        let mut paces = Paces::default();
        run_of(&mut paces, LONG, 1024, [30_000, 20_000, 16_000]);
        let ways = run_of(&mut paces, LONG, 2048, [30_000, 10_000, 30_000]);
        assert!(ways[Way::Read as usize] > 1700, "{ways:?}");
    }

    /// A way that becomes slower leads to trials at once, however long nothing has changed before.
    #[test]
    fn the_others_are_tried_when_the_fastest_way_becomes_slower() {
        let mut paces = Paces::default();
        run(&mut paces, 8 * AGAIN_AT_MOST, [3000, 2000]);
        let streams = run(&mut paces, 1024, [3000, 4000]);
        assert!(streams > 1024 - 2 * AGAIN, "{streams}");
    }

    #[test]
    fn processes_that_move_change_the_way() {
        let mut paces = Paces::default();
        run(&mut paces, 1024, [3000, 2000]);
        let streams = run(&mut paces, 2048, [1000, 2000]);
        assert!(streams > 1900, "{streams}");
        let streams = run(&mut paces, 2048, [4000, 2000]);
        assert!(streams < 200, "{streams}");
    }

    #[test]
    fn one_interruption_does_not_count() {
        let mut paces = Paces::default();
        run(&mut paces, 900, [2000, 3000]);
        paces
            .range(peer(), LEN)
            .0
            .note(Way::Stream, LEN, Duration::from_millis(9));
        assert_eq!(run(&mut paces, 60, [2000, 3000]), 60);
    }

    #[test]
    fn lengths_and_peers_are_apart() {
        let mut paces = Paces::default();
        run(&mut paces, 1024, [1000, 2000]);
        let key = ArrivalKey::from_number(1);
        for number in 0..2 * TRIALS {
            let way = paces.choose(peer(), 2 * LEN, key);
            assert_eq!(way == Way::Stream, number < TRIALS);
        }
        paces.forget_peer(peer());
        assert!(paces.measured.is_empty());
        for number in 0..2 * TRIALS {
            let way = paces.choose(peer(), LEN, key);
            assert_eq!(way == Way::Stream, number < TRIALS);
        }
    }

    #[test]
    fn peers_that_are_forgotten_leave_the_others_theirs() {
        let mut paces = Paces::default();
        let peers = [3, 9, 1 << 24 | 3, 4].map(PeerKey::from_number);
        for (trials, peer) in (1..).zip(peers) {
            paces.range(peer, LEN).0.trials = trials;
        }
        paces.forget_peer(peers[0]);
        paces.forget_peer(peers[0]);
        paces.forget_peer(PeerKey::from_number(5));
        let mut trials = |peer| paces.range(peer, LEN).0.trials;
        assert_eq!(peers.map(&mut trials), [0, 2, 3, 4]);
        let peers = [peers[3], peers[1]];
        peers.iter().for_each(|peer| paces.forget_peer(*peer));
        assert_eq!((paces.peers.len(), paces.places.len()), (2, 2));
        assert_eq!(
            paces.range(PeerKey::from_number(1 << 24 | 3), LEN).0.trials,
            3
        );
    }

    /// All messages are announced before the first one is complete.
    #[test]
    fn messages_that_are_announced_together_are_measured_each() {
        let mut paces = Paces::default();
        for number in 0..100 {
            paces.choose(peer(), LONG, ArrivalKey::from_number(number));
        }
        let mut now = paces.measured[0].begin;
        for number in 0..100 {
            // nothing is known when those behind the trials are chosen: they are read
            let time = [300, 200, 150].get((number / TRIALS) as usize);
            now += Duration::from_micros(*time.unwrap_or(&200));
            paces.completed_at(ArrivalKey::from_number(number), now);
        }
        assert_eq!(paces.range(peer(), LONG).0.times, [18_750, 12_500, 9_375]);
        assert!(paces.measured.is_empty());
    }

    /// A message waits behind another one for as long as that takes.
    #[test]
    fn the_message_before_is_not_measured_too() {
        let mut paces = Paces::default();
        let (first, second) = (ArrivalKey::from_number(1), ArrivalKey::from_number(2));
        paces.choose(peer(), LEN, second);
        let begin = paces.measured[0].begin;
        paces.completed_at(first, begin + Duration::from_micros(50));
        paces.completed_at(second, begin + Duration::from_micros(52));
        assert_eq!(paces.range(peer(), LEN).0.times, [8000, 0, 0]);
    }
}
