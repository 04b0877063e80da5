//! Which way of long messages is the faster one, for each peer and length: streamed through the
//! ring, or read. `docs/protocol-rdm.md`, "Long messages".

use std::time::{Duration, Instant};

use super::number_map::NumberMap;
use super::peer::PeerKey;
use super::receives::ArrivalKey;

/// How a long message arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Both processors copy, through the ring.
    Stream,
    /// The receiver copies, by READs.
    Read,
}

/// The shortest messages, as the binary logarithm of their length, and the number of such ranges of
/// lengths; the last one has no end.
const SHORTEST: u32 = 14;
const RANGES: usize = 8;
/// Messages of a range that try each way first.
const TRIALS: u32 = 4;
/// One of so many messages tries the slower way, and of eight times as many if that takes more
/// than twice as long.
const AGAIN: u32 = 64;
/// One of so many other messages is measured.
const MEASURED: u32 = 4;

/// The times of one peer's messages of similar length.
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    messages: u32,
    /// Nanoseconds of 64 KiB, by way; 0: not measured.
    times: [u32; 2],
}

impl Range {
    /// The faster way. The sender computes while its message is read, so reading is preferred.
    fn faster(&self) -> Way {
        let [stream, read] = self.times;
        match stream != 0 && (read == 0 || stream < read - read / 16) {
            true => Way::Stream,
            false => Way::Read,
        }
    }

    /// The way of the next message, and whether it is measured. [`Self::count`] follows.
    fn next(&self) -> (Way, bool) {
        let number = self.messages;
        if number < 2 * TRIALS {
            let way = [Way::Stream, Way::Read][number as usize % 2];
            return (way, true);
        }
        let faster = self.faster();
        let (slower, least, most) = match faster {
            Way::Stream => (Way::Read, self.times[0], self.times[1]),
            Way::Read => (Way::Stream, self.times[1], self.times[0]),
        };
        let again = match most > 2 * least.min(u32::MAX / 2) {
            true => 8 * AGAIN,
            false => AGAIN,
        };
        match number % again {
            0 => (slower, true),
            _ => (faster, number % MEASURED == 1),
        }
    }

    /// The message has taken the way of [`Self::next`].
    fn count(&mut self) {
        self.messages = self.messages.wrapping_add(1);
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
    }
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

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Paces {
    /// By the number of the peer.
    ranges: NumberMap<[Range; RANGES]>,
    /// At most one message at a time.
    measured: Option<Measured>,
    /// The way of all messages.
    #[cfg(test)]
    pub(super) fixed: Option<Way>,
}

impl Paces {
    fn range(&mut self, peer: PeerKey, len: u64) -> &mut Range {
        let of = len.max(1).ilog2().saturating_sub(SHORTEST) as usize;
        let ranges = self.ranges.entry(peer.number()).or_default();
        &mut ranges[of.min(RANGES - 1)]
    }

    /// Decides how a message arrives.
    pub(super) fn choose(&mut self, peer: PeerKey, len: u64, key: ArrivalKey) -> Way {
        #[cfg(test)]
        if let Some(way) = self.fixed {
            return way;
        }
        let range = self.range(peer, len);
        let (way, measured) = range.next();
        range.count();
        if measured {
            self.measured = Some(Measured {
                key,
                peer,
                len,
                way,
                begin: Instant::now(),
            });
        }
        way
    }

    /// As [`Self::choose`], for a message that is read in this call: whether it is measured, by
    /// [`Self::has_read`]. `None`: it is not to be read, and nothing has changed.
    #[inline]
    pub(super) fn reads(&mut self, peer: PeerKey, len: u64) -> Option<bool> {
        #[cfg(test)]
        if let Some(way) = self.fixed {
            return (way == Way::Read).then_some(false);
        }
        let range = self.range(peer, len);
        let (way, measured) = range.next();
        (way == Way::Read).then(|| {
            range.count();
            measured
        })
    }

    /// A message was read in `time`.
    pub(super) fn has_read(&mut self, peer: PeerKey, len: u64, time: Duration) {
        self.range(peer, len).note(Way::Read, len, time);
    }

    /// A message was read that delays the one that is measured.
    #[inline]
    pub(super) fn interrupted(&mut self) {
        if let Some(measured) = &mut self.measured {
            measured.begin = Instant::now();
        }
    }

    /// A message is complete. Messages that were announced before it delay one that is measured.
    #[inline]
    pub(super) fn completed(&mut self, key: ArrivalKey) {
        if self.measured.is_some() {
            self.completed_at(key, Instant::now());
        }
    }

    fn completed_at(&mut self, key: ArrivalKey, now: Instant) {
        let Some(measured) = &mut self.measured else {
            return;
        };
        if measured.key != key {
            measured.begin = now;
            return;
        }
        let Measured {
            peer,
            len,
            way,
            begin,
            ..
        } = *measured;
        self.measured = None;
        let time = now.saturating_duration_since(begin);
        self.range(peer, len).note(way, len, time);
    }

    /// The session of a peer has ended.
    pub(super) fn forget_peer(&mut self, peer: PeerKey) {
        self.ranges.remove(&peer.number());
        self.measured.take_if(|measured| measured.peer == peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 1 << 16;

    fn peer() -> PeerKey {
        PeerKey::from_number(7)
    }

    /// Runs so many messages, which take these nanoseconds by way. Returns the number of streams.
    fn run(paces: &mut Paces, messages: u32, times: [u64; 2]) -> u32 {
        let mut streams = 0;
        for number in 0..messages {
            let key = ArrivalKey::from_number(number);
            let way = paces.choose(peer(), LEN, key);
            streams += u32::from(way == Way::Stream);
            if let Some(measured) = &paces.measured {
                let end = measured.begin + Duration::from_nanos(times[way as usize]);
                paces.completed_at(key, end);
            }
        }
        streams
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_one_tried_again() {
        let mut paces = Paces::default();
        // trials, and one of 64
        assert_eq!(run(&mut paces, 1024, [3000, 2000]), 4 + 15);
        let mut paces = Paces::default();
        assert_eq!(run(&mut paces, 1024, [5000, 2000]), 4 + 1);
        let mut paces = Paces::default();
        assert_eq!(run(&mut paces, 1024, [2000, 3000]), 1024 - 4 - 15);
        // about equal: the sender computes meanwhile
        let mut paces = Paces::default();
        assert_eq!(run(&mut paces, 1024, [1950, 2000]), 4 + 15);
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
        run(&mut paces, 1025, [2000, 3000]);
        paces
            .range(peer(), LEN)
            .note(Way::Stream, LEN, Duration::from_millis(9));
        assert_eq!(run(&mut paces, 60, [2000, 3000]), 60);
    }

    #[test]
    fn lengths_and_peers_are_apart() {
        let mut paces = Paces::default();
        run(&mut paces, 1024, [1000, 2000]);
        let key = ArrivalKey::from_number(1);
        for number in 0..2 * TRIALS {
            let way = paces.choose(peer(), 4 * LEN, key);
            assert_eq!(way == Way::Stream, number % 2 == 0);
        }
        paces.forget_peer(peer());
        assert!(paces.measured.is_none());
        assert_eq!(paces.choose(peer(), LEN, key), Way::Stream);
        assert_eq!(paces.choose(peer(), LEN, key), Way::Read);
    }

    /// A message waits behind another one for as long as that takes.
    #[test]
    fn the_message_before_is_not_measured_too() {
        let mut paces = Paces::default();
        let (first, second) = (ArrivalKey::from_number(1), ArrivalKey::from_number(2));
        paces.choose(peer(), LEN, second);
        let begin = paces.measured.unwrap().begin;
        paces.completed_at(first, begin + Duration::from_micros(50));
        paces.completed_at(second, begin + Duration::from_micros(52));
        assert_eq!(paces.range(peer(), LEN).times, [2000, 0]);
    }
}
