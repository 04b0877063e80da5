//! The send queue of a circuit, which its links share: their turns, and whether requests complete.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::circuit_cm::InitiatorCm;
use crate::rdm::core::link::LinkKey;
use crate::rdm::link::ending::Polled;
use crate::rdm::link::outlet::Room;
use crate::rdm::link::send_queue::SendQueue;
use crate::rdm::table_keys::CircuitKey;
use crate::verbs::Qp;

/// How long a circuit without links is kept. If both sides of several peers dial at once, links end
/// and others follow.
pub(in crate::rdm) const UNUSED: Duration = Duration::from_millis(100);
/// After this time without an answer to a circuit request, another peer is asked for one; the next
/// one after twice this time, and so on.
const SECOND: Duration = Duration::from_millis(100);

/// A circuit on which no request completes for this time, while several links have some, is ended.
const STALL: Duration = Duration::from_secs(2);
/// The period at which the driver looks at circuits with requests.
pub(in crate::rdm) const WATCH: Duration = Duration::from_millis(500);

/// Size of the send queue of a circuit.
pub(in crate::rdm) const CIRCUIT_DEPTH: usize = 256;

/// The end of a circuit.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Failing {
    pub(in crate::rdm) since: Instant,
    /// The queue pair is in its error state.
    pub(in crate::rdm) done: bool,
    /// Of a target: what had been polled when it was first found to be done.
    pub(in crate::rdm) polled: Option<Polled>,
}

impl Failing {
    pub(in crate::rdm) fn new(done: bool) -> Self {
        Self {
            since: Instant::now(),
            done,
            polled: None,
        }
    }
}

/// The position of the first packet, probe or READ of a message on a circuit that has not
/// completed, and the number of the other requests that have completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdm) struct Progress(u16, u32);

/// The requests of a circuit when the driver looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    progress: Progress,
    /// None was under way.
    empty: bool,
}

/// The initiator of a circuit.
#[derive(Debug)]
pub(in crate::rdm) struct CircuitQueue {
    key: CircuitKey,
    pub(in crate::rdm) cm: Arc<InitiatorCm>,
    pub(in crate::rdm) qp: Option<Arc<Qp>>,
    pub(in crate::rdm) queue: SendQueue<LinkKey>,
    /// The requests besides packets, and the number of those that have completed; wraps.
    pub(in crate::rdm) room: Arc<Room>,
    others: u32,
    /// Links to which room was refused, in this order.
    waiting: VecDeque<LinkKey>,
    /// The link that has the next free place, and whether it has used it.
    turn: Option<(LinkKey, bool)>,
    /// Until when it is kept without links.
    pub(in crate::rdm) unused_until: Option<Instant>,
    /// Links that post to the circuit.
    pub(in crate::rdm) users: usize,
    pub(in crate::rdm) failing: Option<Failing>,
    /// When its dial began.
    pub(in crate::rdm) dialled: Instant,
    /// When a further circuit is dialled for a link that waits for this one.
    pub(in crate::rdm) second_at: Instant,
    /// How long the next one is awaited.
    pub(in crate::rdm) pause: Duration,
    /// A request has completed, so the target is connected.
    pub(in crate::rdm) proven: bool,
    /// [`Xrc::proven`](super::ports::Xrc::proven) has returned the connection.
    pub(in crate::rdm) reported: bool,
    /// The driver watches the progress of requests.
    pub(in crate::rdm) watched: bool,
    /// What the driver saw at its last look, and since when it has seen the same.
    stands: Option<(Seen, Instant)>,
}

impl CircuitQueue {
    pub(in crate::rdm) fn new(key: CircuitKey, cm: Arc<InitiatorCm>) -> Self {
        let now = Instant::now();
        Self {
            key,
            cm,
            qp: None,
            queue: SendQueue::new(CIRCUIT_DEPTH, 1),
            room: Arc::default(),
            others: 0,
            waiting: VecDeque::new(),
            turn: None,
            unused_until: None,
            users: 0,
            failing: None,
            dialled: now,
            second_at: now + SECOND,
            pause: SECOND * 2,
            proven: false,
            reported: false,
            watched: false,
            stands: None,
        }
    }

    pub(in crate::rdm) const fn key(&self) -> CircuitKey {
        self.key
    }

    /// Whether nothing of the circuit is under way any more.
    pub(in crate::rdm) fn is_flushed(&self) -> bool {
        let done = self.failing.is_some_and(|failing| failing.done);
        done && self.queue.is_empty() && self.room.is_empty()
    }

    /// The link that has its turn has used it. Returns whether the requests were not watched.
    #[inline]
    pub(in crate::rdm) fn note_posted(&mut self) -> bool {
        if let Some((_, used)) = &mut self.turn {
            *used = true;
        }
        !std::mem::replace(&mut self.watched, true)
    }

    /// RMA was posted. Returns whether the requests were not watched.
    #[inline]
    pub(in crate::rdm) fn note_rma_posted(&mut self) -> bool {
        !std::mem::replace(&mut self.watched, true)
    }

    /// So many requests besides packets have completed.
    #[inline]
    pub(in crate::rdm) fn others_completed(&mut self, count: usize) {
        self.room.give(count);
        self.others = self.others.wrapping_add(count as u32);
    }

    /// What changes with each request that completes.
    pub(in crate::rdm) fn progress(&self) -> Progress {
        Progress(self.queue.position(), self.others)
    }

    /// The driver looks at the requests. Returns whether none has completed for [`STALL`] although
    /// requests of several links are under way; `besides`: the links that have some besides
    /// packets. A circuit is watched until it had no request and completed none for [`WATCH`]:
    /// otherwise the posts of a circuit whose requests complete at once would wake the driver again
    /// and again.
    pub(in crate::rdm) fn look(
        &mut self,
        now: Instant,
        besides: impl Iterator<Item = LinkKey>,
    ) -> bool {
        if self.failing.is_some() || !self.watched {
            return false;
        }
        let seen = Seen {
            progress: self.progress(),
            empty: self.queue.is_empty() && self.room.is_empty(),
        };
        let since = match self.stands {
            Some((before, since)) if before == seen => since,
            _ => now,
        };
        self.stands = Some((seen, since));
        if seen.empty {
            if now >= since + WATCH {
                (self.watched, self.stands) = (false, None);
            }
            return false;
        }
        if now < since + STALL {
            return false;
        }
        let mut owners = self.queue.owners().copied().chain(besides);
        let first = owners.next();
        owners.any(|of| Some(of) != first)
    }

    /// Lists a link that continues when there is room.
    pub(in crate::rdm) fn wait(&mut self, link: LinkKey) {
        if !self.waiting.contains(&link) {
            self.waiting.push_back(link);
        }
    }

    /// Whether a link waits for room.
    pub(in crate::rdm) fn is_waiting(&self, link: LinkKey) -> bool {
        self.waiting.contains(&link)
    }

    /// Whether a link with so many requests under way may use a free place. Links that wait get
    /// places in turn, one each; no link has more than half of them, unless it is the only one.
    /// Packets without number have places of their own.
    pub(in crate::rdm) fn has_turn(&self, link: LinkKey, under_way: u32, numbered: bool) -> bool {
        if !numbered {
            return true;
        }
        let share = self.users < 2 || (under_way as usize) < CIRCUIT_DEPTH / 2;
        share
            && match self.turn {
                Some((of, used)) => of == link && (!used || self.waiting.is_empty()),
                None => self.waiting.is_empty(),
            }
    }

    /// The link that waits for the longest time, if there is room: it has the next place until
    /// [`Self::end_turn`].
    pub(in crate::rdm) fn next_turn(&mut self) -> Option<LinkKey> {
        if !self.queue.has_room(true) {
            return None;
        }
        let link = self.waiting.pop_front()?;
        self.turn = Some((link, false));
        Some(link)
    }

    /// Returns whether the link has used its place.
    pub(in crate::rdm) fn end_turn(&mut self) -> bool {
        self.turn.take().is_some_and(|(_, used)| used)
    }

    /// Number of links that wait.
    pub(in crate::rdm) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::rdm::link::send_queue::Sent;
    use crate::rdm::shared::Shared;
    use crate::rdm::slab::Slab;
    use crate::rdm::xrc::endpoint::CircuitEndpoint;

    fn queue() -> CircuitQueue {
        let key = Slab::new().insert(()).unwrap();
        let endpoint: Weak<dyn CircuitEndpoint> = Weak::<Shared>::new();
        CircuitQueue::new(key, InitiatorCm::new(&endpoint, key))
    }

    #[test]
    fn links_that_wait_get_places_in_turn() {
        let mut links = Slab::new();
        let [a, b, c] = [(), (), ()].map(|()| links.insert(()).unwrap());
        let mut queue = queue();
        queue.users = 3;
        assert!(queue.has_turn(a, 0, true), "no link waits");
        for link in [a, b, a] {
            queue.wait(link);
        }
        assert_eq!(queue.waiting(), 2);
        // not before those that wait, apart from packets with places of their own
        assert!(!queue.has_turn(c, 0, true) && queue.has_turn(c, 0, false));
        assert_eq!(queue.next_turn(), Some(a));
        assert!(queue.has_turn(a, 0, true) && !queue.has_turn(b, 0, true));
        queue.turn = Some((a, true));
        assert!(!queue.has_turn(a, 0, true), "one place");
        queue.wait(a);
        assert!(queue.end_turn());
        assert_eq!(queue.next_turn(), Some(b));
        // it needs none
        assert!(!queue.end_turn());
        assert_eq!(queue.next_turn(), Some(a));
        queue.turn = Some((a, true));
        assert!(queue.has_turn(a, 0, true), "no other link waits");
    }

    /// A request of a link was posted. Returns whether the driver is woken.
    fn posts(queue: &mut CircuitQueue, link: LinkKey) -> bool {
        queue.queue.record(link, Sent::Control(None));
        queue.note_posted()
    }

    fn none() -> std::iter::Empty<LinkKey> {
        std::iter::empty()
    }

    fn completes(queue: &mut CircuitQueue) {
        assert!(queue.queue.take_completed(queue.queue.position()).is_some());
    }

    #[test]
    fn the_driver_is_woken_once_while_requests_complete_at_once() {
        let link = Slab::new().insert(()).unwrap();
        let mut queue = queue();
        let begin = Instant::now();
        assert!(posts(&mut queue, link), "it begins to watch");
        for n in 0..2_000 {
            completes(&mut queue);
            assert!(!queue.look(begin + WATCH * n / 500, none()));
            assert!(!posts(&mut queue, link), "after {n} requests");
        }
        completes(&mut queue);
        let end = begin + WATCH * 4;
        assert!(!queue.look(end, none()) && queue.watched);
        assert!(!queue.look(end + WATCH / 2, none()) && queue.watched);
        assert!(!queue.look(end + WATCH, none()) && !queue.watched);
        assert!(posts(&mut queue, link), "it was not watched");
    }

    #[test]
    fn a_circuit_stalls_when_requests_of_several_links_do_not_complete() {
        let mut links = Slab::new();
        let [a, b] = [(), ()].map(|()| links.insert(()).unwrap());
        let mut queue = queue();
        let begin = Instant::now();
        posts(&mut queue, a);
        completes(&mut queue);
        assert!(!queue.look(begin, none()));
        posts(&mut queue, a);
        // the first request is as old as the look that has seen it
        let begin = begin + WATCH - Duration::from_millis(1);
        assert!(!queue.look(begin, none()));
        assert!(
            !queue.look(begin + STALL * 2, none()),
            "one link waits for its peer alone"
        );
        posts(&mut queue, b);
        let early = begin + STALL - Duration::from_millis(1);
        assert!(queue.look(begin + STALL, none()) && !queue.look(early, none()));
        completes(&mut queue);
        assert!(
            !queue.look(begin + STALL * 3, none()),
            "a request has completed"
        );
        posts(&mut queue, a);
        assert!(queue.look(begin + STALL * 4, none()));
        queue.failing = Some(Failing::new(false));
        assert!(!queue.look(begin + STALL * 5, none()), "it ends already");
    }

    /// RMA of another link waits behind the packet of a process that has no receive.
    #[test]
    fn rma_of_another_link_waits_too() {
        let mut links = Slab::new();
        let [a, b] = [(), ()].map(|()| links.insert(()).unwrap());
        let mut queue = queue();
        let begin = Instant::now();
        posts(&mut queue, a);
        assert!(!queue.look(begin, none()));
        let late = begin + STALL;
        assert!(!queue.look(late, none()) && !queue.look(late, [a].into_iter()));
        assert!(queue.look(late, [a, b].into_iter()));
        // also without a packet
        completes(&mut queue);
        queue.room.occupy(2);
        assert!(!queue.look(late, [a, b].into_iter()));
        assert!(queue.look(late + STALL, [a, b].into_iter()));
        assert!(!queue.look(late + STALL, [b].into_iter()));
    }

    #[test]
    fn rma_that_completes_is_no_stall() {
        let mut links = Slab::new();
        let [a, b] = [(), ()].map(|()| links.insert(()).unwrap());
        let mut queue = queue();
        let begin = Instant::now();
        queue.room.occupy(9);
        assert!(queue.note_rma_posted(), "it begins to watch");
        posts(&mut queue, a);
        posts(&mut queue, b);
        for n in 0..8 {
            assert!(!queue.look(begin + STALL * n, [a].into_iter()));
            queue.others_completed(1);
        }
        assert!(!queue.look(begin + STALL * 8, [a].into_iter()));
        assert!(queue.look(begin + STALL * 9, [a].into_iter()));
        // nothing is under way, then the circuit is watched no more
        queue.others_completed(1);
        completes(&mut queue);
        completes(&mut queue);
        let end = begin + STALL * 10;
        assert!(!queue.look(end, none()) && queue.watched);
        assert!(!queue.look(end + WATCH, none()) && !queue.watched);
    }

    #[test]
    fn a_link_has_half_of_a_shared_queue() {
        let mut links = Slab::new();
        let link = links.insert(()).unwrap();
        let mut queue = queue();
        let half = CIRCUIT_DEPTH as u32 / 2;
        for (users, under_way, may) in [(1, half, true), (2, half - 1, true), (2, half, false)] {
            queue.users = users;
            assert_eq!(
                queue.has_turn(link, under_way, true),
                may,
                "{users} {under_way}"
            );
        }
    }
}
