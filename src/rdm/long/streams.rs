//! Long messages that are streamed through rings, in both directions. `docs/protocol-rdm.md`, "Long
//! messages".

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::rdm::core::Origin;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::number_map::NumberMap;
use crate::rdm::table_keys::{ArrivalKey, TxKey};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::OpId;

/// How long, and how often, a receiver polls without a further part of a message before it reads
/// it. The sender may compute, or may not have the processor. Or it writes the ends of other
/// messages, of up to 4 MiB.
const PART_WAIT: Duration = Duration::from_micros(600);
const PART_POLLS: u32 = 4096;
/// Messages of such a peer that are read, before one is streamed again.
const READ: u32 = 16;

/// The time of a progress call, and its number, which wraps.
pub(in crate::rdm) type Call = (Instant, u32);

/// A message that arrives.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    key: ArrivalKey,
    /// Number of bytes that had arrived at the last look; `None`: there was none.
    seen: Option<u64>,
    /// The progress call that has first seen them; `None`: there was none.
    since: Option<Call>,
}

/// The end of a message that its receiver has asked for.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Asked {
    pub(in crate::rdm) origin: Origin,
    /// The link on which it was asked for.
    pub(in crate::rdm) link: LinkKey,
    pub(in crate::rdm) op: TxKey,
    /// The arrival at the receiver.
    pub(in crate::rdm) receiver: OpId,
    /// Where the byte at `offset` is written.
    pub(in crate::rdm) to: (RemoteAddr, Rkey),
    pub(in crate::rdm) offset: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Streams {
    /// The last progress call that took entries was one of a thread that polls. It can go on with a
    /// stream; one that sleeps, or the driver, cannot.
    pub(in crate::rdm) polled: bool,
    /// Messages whose next part is posted by each progress call, if there is room for it.
    pub(in crate::rdm) sent: VecDeque<TxKey>,
    /// Ends of messages that their receivers have asked for, and that are written by the next
    /// progress calls.
    pub(in crate::rdm) asked: VecDeque<Asked>,
    arriving: Vec<Arriving>,
    /// Number of messages of a peer that are still to be read.
    late: NumberMap<u32>,
    /// Number of messages that were streamed, and of those that were read after all.
    #[cfg(test)]
    pub(in crate::rdm) begun: u32,
    #[cfg(test)]
    pub(in crate::rdm) stalled: u32,
    /// All messages are read.
    #[cfg(test)]
    pub(in crate::rdm) off: bool,
}

impl Streams {
    /// Whether no message is streamed.
    #[inline]
    pub(in crate::rdm) fn is_empty(&self) -> bool {
        self.is_idle() && self.arriving.is_empty()
    }

    /// Whether no progress call goes on with a message of this side.
    #[inline(always)]
    pub(in crate::rdm) fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.asked.is_empty()
    }

    /// Whether messages may be streamed now.
    #[inline]
    pub(in crate::rdm) fn may_stream(&self) -> bool {
        #[cfg(test)]
        if self.off {
            return false;
        }
        self.polled
    }

    /// Whether messages of a peer are read because it was late.
    #[inline]
    pub(in crate::rdm) fn was_late(&self, peer: PeerKey) -> bool {
        self.late.contains_key(&peer.number())
    }

    /// The next message of a peer can be streamed. Counts those that are read instead.
    pub(in crate::rdm) fn may_begin(&mut self, peer: PeerKey) -> bool {
        let Some(left) = self.late.get_mut(&peer.number()) else {
            return true;
        };
        *left -= 1;
        if *left == 0 {
            self.late.remove(&peer.number());
        }
        false
    }

    /// Number of messages that arrive.
    pub(in crate::rdm) fn arriving(&self) -> usize {
        self.arriving.len()
    }

    /// The parts of a message, or its end, were asked for; or its end, which is still listed, is
    /// waited for again.
    pub(in crate::rdm) fn begin(&mut self, key: ArrivalKey) {
        if self.arriving.iter().any(|it| it.key == key) {
            return;
        }
        #[cfg(test)]
        {
            self.begun += 1;
        }
        self.arriving.push(Arriving {
            key,
            seen: None,
            since: None,
        });
    }

    /// A message of a peer was not continued.
    pub(in crate::rdm) fn is_late(&mut self, peer: PeerKey) {
        #[cfg(test)]
        {
            self.stalled += 1;
        }
        self.late.insert(peer.number(), READ);
    }

    /// As if no message that arrives could be read.
    #[cfg(test)]
    pub(in crate::rdm) fn forget_spare(&mut self) {
        self.arriving.clear();
    }

    /// The session of a peer has ended.
    pub(in crate::rdm) fn forget_peer(&mut self, peer: PeerKey) {
        self.late.remove(&peer.number());
    }

    /// Removes a message whose parts do not come until this progress call; `None`: any message.
    /// `arrived`: the number of bytes of a message that have arrived, `None` if it is complete.
    pub(in crate::rdm) fn take_stalled(
        &mut self,
        call: Option<Call>,
        arrived: impl Fn(ArrivalKey) -> Option<u64>,
    ) -> Option<ArrivalKey> {
        let mut at = 0;
        while let Some(message) = self.arriving.get_mut(at) {
            let found = arrived(message.key);
            let since = message.since;
            let waits = |(now, call): Call| {
                since.is_some_and(|(begin, first)| {
                    now.saturating_duration_since(begin) <= PART_WAIT
                        || call.wrapping_sub(first) <= PART_POLLS
                })
            };
            match (found, call) {
                (Some(_), Some(_)) if found != message.seen => {
                    (message.seen, message.since) = (found, call);
                }
                (Some(_), Some(call)) if waits(call) => {}
                _ => {
                    let message = self.arriving.swap_remove(at);
                    if found.is_some() {
                        return Some(message.key);
                    }
                    continue;
                }
            }
            at += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_stalled_after_a_time_and_many_calls_without_bytes() {
        let mut streams = Streams::default();
        let (moving, stalled, complete) = (1, 2, 3);
        for number in [moving, stalled, complete] {
            streams.begin(ArrivalKey::from_number(number));
        }
        // the number of calls wraps
        let (begin, first) = (Instant::now(), u32::MAX - 1000);
        // either is not enough
        for call in [
            (begin, first),
            (begin + 9 * PART_WAIT, first),
            (begin, first.wrapping_add(9 * PART_POLLS)),
        ] {
            let found = streams.take_stalled(Some(call), |key| (key.number() != 3).then_some(0));
            assert_eq!(found, None);
        }
        for look in 0..=7 {
            let now = begin + look * PART_WAIT / 6;
            let now = (now, first.wrapping_add(look * PART_POLLS / 6));
            let found = streams.take_stalled(Some(now), |key| match key.number() {
                1 => Some(look.into()),
                2 => Some(0),
                _ => None,
            });
            let last = look == 7;
            assert_eq!(found.map(|key| key.number()), last.then_some(stalled));
        }
        let now = streams.take_stalled(None, |_| Some(1));
        assert_eq!(now.map(|key| key.number()), Some(moving));
        assert!(streams.is_empty());
    }

    #[test]
    fn a_message_is_listed_once() {
        let mut streams = Streams::default();
        let key = ArrivalKey::from_number(4);
        streams.begin(key);
        streams.begin(key);
        assert_eq!(streams.arriving(), 1);
        assert!(streams.take_stalled(None, |_| Some(1)).is_some());
        streams.begin(key);
        assert_eq!(streams.arriving(), 1);
    }

    #[test]
    fn messages_of_a_late_peer_are_read_for_a_while() {
        let mut streams = Streams::default();
        let peer = PeerKey::from_number(7);
        assert!(streams.may_begin(peer));
        streams.is_late(peer);
        for _ in 0..READ {
            assert!(!streams.may_begin(peer));
        }
        assert!(streams.may_begin(peer));
        streams.is_late(peer);
        streams.forget_peer(peer);
        assert!(streams.may_begin(peer));
    }
}
