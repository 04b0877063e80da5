//! Progress of the rings of an endpoint's links. `docs/rdm.md`, "Rings".

#![allow(unsafe_code, reason = "passes buffers on")]

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use super::completions::{Entry, Reader, Side};
use super::core::link::LinkKey;
use super::core::peer::PeerKey;
use super::executor::Stop;
use super::iov::Iov;
use super::shared::State;
use crate::errno::Result;
use crate::queue::source::Sink;
use crate::rdm::link::links::Hot;
use crate::rdm::link::ring::RingPost;
use crate::verbs::{Message as RingMessage, Next, RingProbe, Run};
use crate::wire::rdm::packet::Message;

/// Maximum number of packets of one ring that one progress call processes.
const BATCH: usize = 16;
/// Number of progress calls that find no packet in a hot ring for each poll of the device, while
/// the device is quiet ([`QUIET`]).
const CALLS_QUIET: u32 = 64;
/// Number of progress calls that find no packet for each poll of the device, while the device is
/// not quiet.
const CALLS_ACTIVE: u32 = 4;
/// Number of progress calls that find a packet or an entry for each poll of the device.
const CALLS_FOUND: u32 = 16;
/// How often a post to a ring without room is repeated before the message is a SEND: 1 to 2 us. A
/// receiver that polls has made room by then. A SEND costs more, and so do all messages behind it,
/// which cannot use the ring before it has completed.
const ROOM: u32 = 64;
/// Interval between two calls of the application from which on each call polls the device: a poll
/// takes at most a tenth of it. Such an application computes, or yields the processor to others,
/// and each call that does not poll delays what the device has by one interval.
const SLOW: Duration = Duration::from_micros(2);
/// Number of calls from one look at their time to the next, at least.
const TIMED: u32 = 16;
/// The device is quiet after so many polls without a completion, if no RMA is under way.
const QUIET: u32 = 64;
/// Of so many polls of the device, one looks for hot rings that are not used.
const COOLING: u32 = 1024;

/// What a call that finds a packet or an entry adds to [`State::device_turn`].
const TURN: u32 = CALLS_QUIET / CALLS_FOUND;

/// The result of [`State::read_first`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// The reader has the entry, and the call is done.
    Done,
    /// The reader has the entry; [`State::read_on`] follows.
    Entry,
    /// No entry was passed; [`State::read_on`] follows.
    Nothing,
}

/// The result of [`State::read_announced`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Announced {
    /// Nothing has changed.
    No,
    /// A packet was processed, and nothing has followed from it.
    Done,
    /// A packet was processed, and something has followed: [`State::read_on`] follows.
    Followed,
}

/// What a progress call has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Nothing,
    /// The hot ring at this place has a packet, and nothing else is to be done.
    Ring(usize),
    /// There are entries, and nothing else is to be done first.
    Entries,
    /// Anything.
    Any,
}

/// How often the application calls.
#[derive(Debug)]
pub(super) struct Pace {
    /// [`State::progress_calls`] at the last look, and its time.
    calls: u32,
    at: Instant,
    /// The calls before it were [`SLOW`].
    slow: bool,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            calls: 0,
            at: Instant::now(),
            slow: false,
        }
    }

    fn look(&mut self, calls: u32, now: Instant) {
        let interval = now.saturating_duration_since(self.at);
        self.slow = interval >= SLOW * calls.wrapping_sub(self.calls);
        (self.calls, self.at) = (calls, now);
    }
}

impl State {
    /// What a progress call has to do, for a caller that does not sleep afterwards. Counts a call
    /// that has nothing to do.
    #[inline(always)]
    pub(super) fn work(&mut self) -> Work {
        // a thread that sleeps on another queue would wait for the further parts
        self.io.streams.polled = !self.sleepers;
        self.io.bytes_copied = 0;
        let usual = self.io.streams.is_idle()
            && self.io.bytes_read == 0
            && !self.core.has_reports()
            && self.failed.is_none();
        if !usual || self.device_turn >= CALLS_QUIET {
            return Work::Any;
        }
        if !self.io.completions.is_empty() {
            return Work::Entries;
        }
        if let Some(at) = self.next_ready() {
            return Work::Ring(at);
        }
        self.device_turn += self.step;
        // the call that has the device's turn polls it
        match self.device_turn < CALLS_QUIET && self.behind.is_none() {
            true => Work::Nothing,
            false => Work::Any,
        }
    }

    /// Does what follows from messages that were read in a ring ([`Executor::end_run`]), if it is
    /// still to be done. The call that has read them returns without it, because the application
    /// waits for them; the next call that finds no packet does it, and any that polls the device.
    ///
    /// [`Executor::end_run`]: super::executor::Executor::end_run
    #[inline(always)]
    pub(super) fn end_run(&mut self) {
        if let Some(link) = self.behind {
            self.end_run_of(link);
        }
    }

    #[inline(never)]
    fn end_run_of(&mut self, link: LinkKey) {
        self.behind = None;
        self.io.end_run(&mut self.core, link);
    }

    /// The next hot ring with a packet; the last read has ended in front of `next_hot`.
    #[inline(always)]
    fn next_ready(&mut self) -> Option<usize> {
        let first = std::mem::take(&mut self.next_hot);
        let found = self.io.links.next_ready(first);
        match found {
            None if first != 0 => self.io.links.next_ready(0),
            found => found,
        }
    }

    /// Decides how often the device is polled from now on, after a poll.
    #[inline]
    pub(super) fn set_step(&mut self) {
        if self.progress_calls.wrapping_sub(self.pace.calls) >= TIMED {
            self.pace.look(self.progress_calls, Instant::now());
        }
        self.step = match self.quiet < QUIET || self.io.rma.ops.len() != 0 {
            // only the device has news
            _ if self.io.links.hot.is_empty() || self.pace.slow => CALLS_QUIET,
            true => CALLS_QUIET / CALLS_ACTIVE,
            false => 1,
        };
    }

    /// Fast path of [`Self::read_from`], after [`Work::Ring`], for a reader of the entries of
    /// sends: processes the packet in the hot ring at `at`, if it is one of an announced message.
    /// Returns whether it has, and nothing has followed from it that the call has to do.
    #[inline(always)]
    pub(super) fn read_first_announced(&mut self, at: usize) -> bool {
        let Some(&Hot { link, ring }) = self.io.links.hot.get(at) else {
            return false;
        };
        if self.device_turn + TURN >= CALLS_QUIET
            || self.behind.is_some_and(|behind| behind != link)
        {
            return false;
        }
        self.next_hot = at;
        // SAFETY: a listed ring is that of its link, and a forked child has no `Work::Ring`.
        let read = unsafe { self.read_next_announced((link, ring), None) };
        read == Announced::Done
    }

    /// Fast path of [`Self::read_from`], after [`Work::Ring`]: the reader, which has room, gets the
    /// entry of the first message in the hot ring at `at`, if that arrives whole or is read in this
    /// call. Counts the call, if it is done.
    #[inline(always)]
    pub(super) fn read_first(&mut self, at: usize, reader: &mut Reader<'_, '_>) -> First {
        let Some(&Hot { link, ring }) = self.io.links.hot.get(at) else {
            return First::Nothing;
        };
        if self.behind.is_some_and(|behind| behind != link) {
            // the next call posts the reports
            self.end_run();
        }
        // SAFETY: a listed ring is that of its link, and a forked child has no `Work::Ring`.
        let run = unsafe { ring.run() };
        // SAFETY: as above.
        let Next::Message(message) = (unsafe { run.peek() }) else {
            self.next_hot = at;
            return First::Nothing;
        };
        let next = (run, &message);
        // SAFETY: as above, and the message is the next one.
        let ends = match unsafe { self.io.read_one(&mut self.core, link, next, reader) } {
            Ok(ends) => ends,
            Err(run) => {
                self.next_hot = at;
                let left = reader.left();
                let next = (run, &message);
                // SAFETY: as above: nothing has changed.
                let read = unsafe { self.read_announced(link, next, Some(reader)) };
                if read == Announced::No || reader.left() == left {
                    return First::Nothing;
                }
                read == Announced::Followed
            }
        };
        self.behind = Some(link);
        // SAFETY: as above.
        let last = || self.io.links.hot.len() == 1 && unsafe { !ring.is_ready() };
        if ends || self.device_turn + TURN >= CALLS_QUIET || !reader.is_full() && !last() {
            // the ring has the rest of the run
            self.next_hot = if reader.is_full() { at + 1 } else { at };
            return First::Entry;
        }
        self.next_hot = at + 1;
        self.device_turn += TURN;
        First::Done
    }

    /// Processes packets in the hot rings, from the one at `at` on, which has one, until the reader
    /// is full: it gets entries of received messages directly. Counts the call. Returns whether
    /// [`Self::poll_rest`] has something to do.
    fn read_from(&mut self, at: usize, reader: Option<&mut Reader<'_, '_>>) -> bool {
        self.read_hot(at, reader);
        self.after_reads()
    }

    /// As [`Self::read_from`] of the next ring with a packet, after [`Self::read_first`] was not
    /// done; without reader if that has no room any more.
    pub(super) fn read_on(&mut self, has_room: bool, reader: Option<&mut Reader<'_, '_>>) -> bool {
        self.end_run();
        if has_room && let Some(first) = self.next_ready() {
            self.read_hot(first, reader);
        }
        self.after_reads()
    }

    /// The rest of [`Self::read_from`].
    #[inline]
    fn after_reads(&mut self) -> bool {
        if !self.io.streams.is_idle() {
            self.run_streams();
        }
        self.device_turn += TURN;
        self.device_turn >= CALLS_QUIET || self.io.bytes_read != 0 || self.core.has_reports()
    }

    /// As [`Self::read_from`], of all hot rings, whether they have packets or not.
    pub(super) fn read_all(&mut self, reader: Option<&mut Reader<'_, '_>>) -> bool {
        self.end_run();
        let rest = match self.next_ready() {
            Some(first) => self.read_from(first, reader),
            None => {
                if !self.io.streams.is_idle() {
                    self.run_streams();
                }
                self.device_turn += self.step;
                self.device_turn >= CALLS_QUIET
            }
        };
        rest || self.io.links.hot.is_empty() || self.core.has_reports()
    }

    /// The rest of a progress call after [`Self::read_from`]: polls the device in some of them.
    ///
    /// # Errors
    /// As [`Self::poll`].
    pub(super) fn poll_rest(&mut self) -> Result<()> {
        let reads = self.io.bytes_read != 0;
        if self.device_turn >= CALLS_QUIET || reads || self.io.links.hot.is_empty() {
            self.device_turn = 0;
            // messages of peers that do not go on with them
            if !self.io.streams.is_empty() {
                self.run_streams();
            }
            return self.poll().map(drop);
        }
        if self.core.has_reports() {
            self.core.flush(&mut self.io);
            self.run_todo();
            self.post_receives();
        }
        Ok(())
    }

    #[inline(never)]
    fn run_streams(&mut self) {
        let call = (Instant::now(), self.progress_calls);
        self.io.run_streams(&mut self.core, call);
        self.run_todo();
    }

    /// The application does not poll any more.
    pub(super) fn stop_streams(&mut self) {
        self.io.stop_streams();
        self.run_todo();
    }

    /// As [`Executor::send_direct`](super::executor::Executor::send_direct), after progress if
    /// something was in the way.
    ///
    /// # Safety
    /// The buffers are readable.
    #[inline]
    pub(super) unsafe fn send_direct(
        &mut self,
        peer: PeerKey,
        message: &Message,
        iov: &Iov,
    ) -> RingPost {
        // SAFETY: the caller promises the buffers.
        let posted = unsafe { self.io.send_direct(&mut self.core, peer, message, iov) };
        // no progress helps a message that is too long
        if matches!(posted, RingPost::Sent | RingPost::Ended)
            || !self.core.may_be_eager(peer, iov.len())
        {
            return posted;
        }
        // the entries of such messages need no poll, so the credit may be in a ring
        if self.io.ring_waits(&self.core, peer) {
            let _ = self.poll();
        } else {
            self.poll_rings();
        }
        let mut post = || {
            // SAFETY: as above.
            unsafe { self.io.send_direct(&mut self.core, peer, message, iov) }
        };
        let mut posted = post();
        for _ in 0..ROOM {
            if posted != RingPost::Full {
                break;
            }
            spin_loop();
            posted = post();
        }
        posted
    }

    /// Passes the entry of a send or of RMA to a reader of one entry, if it is the first one, and
    /// counts the call, which has had [`Work::Entries`]. `receives`: the reader's queue gets the
    /// entries of receives too.
    #[inline(always)]
    pub(super) fn pass_sent(&mut self, sink: &mut Sink<'_>, receives: bool) -> bool {
        let completions = &mut self.io.completions;
        if receives && completions.first_side() != Some(Side::Tx) {
            return false;
        }
        let sent = completions.of(Side::Tx);
        let Some((_, Entry::Done(completion, None))) = sent.front() else {
            return false;
        };
        sink.complete(completion);
        sent.pop_front();
        self.progress_calls = self.progress_calls.wrapping_add(1);
        self.device_turn += TURN;
        true
    }

    /// Counts a progress call that had enough entries without a poll.
    #[inline]
    pub(super) fn skip_poll(&mut self) {
        if !self.io.streams.is_empty() {
            self.run_streams();
        }
        self.device_turn += TURN;
        if self.device_turn >= CALLS_QUIET {
            self.device_turn = 0;
            // a call without entries reports a failure
            let _ = self.poll();
        }
    }

    /// Processes packets in all rings. Returns whether all were taken.
    pub(super) fn poll_rings(&mut self) -> bool {
        self.end_run();
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(COOLING) {
            self.io.links.cool();
        }
        let mut all = !self.io.find_arrivals();
        if !self.io.links.cold.is_empty() {
            // the device has noted arrivals
            self.quiet = 0;
        }
        if let Some(first) = self.io.links.next_ready(0) {
            all &= self.read_hot(first, None);
        }
        for at in (0..self.io.links.cold.len()).rev() {
            if let Some(link) = self.io.links.cold.get(at).copied() {
                let ring = self.io.links.probe(link);
                // SAFETY: the ring of the link, in the process that has created it.
                let read = ring.is_none_or(|ring| unsafe { self.read((link, ring), None) });
                all &= read;
                // a packet that has to wait for one of the shared receive queue stays
                if read && !self.io.links.ring_is_ready(link) {
                    self.io.links.cold.swap_remove(at);
                }
            }
        }
        for at in 0..self.io.links.ending().len() {
            if let Some(link) = self.io.links.ending().get(at).copied() {
                all &= self.read_ending(link);
            }
        }
        all
    }

    /// Processes packets in the hot rings, from the one at `at` on, which has one, until the reader
    /// is full; the next call begins with the next ring. Returns whether all were taken.
    fn read_hot(&mut self, mut at: usize, mut reader: Option<&mut Reader<'_, '_>>) -> bool {
        let mut all = true;
        self.next_hot = 0;
        loop {
            if let Some(&Hot { link, ring }) = self.io.links.hot.get(at) {
                // SAFETY: a listed ring is that of its link, and a forked child finds none with a
                // packet.
                all &= unsafe { self.read((link, ring), reader.as_deref_mut()) };
            }
            at += 1;
            if reader.as_ref().is_some_and(|reader| reader.is_full()) {
                self.next_hot = at;
                return false;
            }
            match self.io.links.next_ready(at) {
                Some(next) => at = next,
                None => return all,
            }
        }
    }

    /// Processes packets in the ring of a link, until the reader is full. Returns whether all were
    /// taken.
    ///
    /// # Safety
    /// The ring is that of the link, which lives, and this is not a forked child.
    unsafe fn read(
        &mut self,
        (link, ring): (LinkKey, RingProbe),
        reader: Option<&mut Reader<'_, '_>>,
    ) -> bool {
        self.end_run();
        // SAFETY: the caller's promise.
        let all = unsafe { self.read_batch((link, ring), reader) };
        // the caller may sleep
        self.end_run();
        all
    }

    /// As [`Self::read`]; [`Self::end_run`] follows.
    ///
    /// # Safety
    /// As [`Self::read`].
    #[inline(always)]
    unsafe fn read_batch(
        &mut self,
        (link, ring): (LinkKey, RingProbe),
        mut reader: Option<&mut Reader<'_, '_>>,
    ) -> bool {
        let mut left = BATCH;
        while left != 0 {
            let to = reader.as_deref_mut();
            // SAFETY: the caller's promise.
            let (taken, stop) = unsafe { self.io.read_run(&mut self.core, (link, ring), left, to) };
            left -= taken;
            if taken != 0 {
                self.io.end_run(&mut self.core, link);
            }
            self.run_todo();
            match stop {
                Stop::Empty => return true,
                Stop::Full => return false,
                Stop::Other if taken != 0 => {}
                Stop::Other => {
                    left -= 1;
                    // SAFETY: as above.
                    let announced =
                        unsafe { self.read_next_announced((link, ring), reader.as_deref_mut()) };
                    if announced != Announced::No {
                        if reader.as_ref().is_some_and(|reader| reader.is_full()) {
                            return false;
                        }
                        continue;
                    }
                    if !self.sends_polled && self.io.acknowledges_unsent(&self.core, link) {
                        // the call polls the device first: the entry of the send is before that of
                        // the answer
                        self.device_turn = CALLS_QUIET;
                        return false;
                    }
                    let read = self.io.read_ring(&mut self.core, link);
                    self.run_todo();
                    if !read || !self.io.links.ring_is_ready(link) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// [`Self::read_announced`] of the next packet in a ring.
    ///
    /// # Safety
    /// As [`Self::read`].
    #[inline]
    unsafe fn read_next_announced(
        &mut self,
        (link, ring): (LinkKey, RingProbe),
        reader: Option<&mut Reader<'_, '_>>,
    ) -> Announced {
        // SAFETY: the caller's promise.
        let run = unsafe { ring.run() };
        // SAFETY: as above.
        match unsafe { run.peek() } {
            // SAFETY: as above, and the message is the next one.
            Next::Message(message) => unsafe { self.read_announced(link, (run, &message), reader) },
            _ => Announced::No,
        }
    }

    /// [`Executor::read_announced`](super::executor::Executor::read_announced), and what follows
    /// from it; [`Self::end_run`] follows later.
    ///
    /// # Safety
    /// As [`Self::read`]; the message is that of [`Run::peek`].
    #[inline]
    unsafe fn read_announced(
        &mut self,
        link: LinkKey,
        next: (Run, &RingMessage),
        reader: Option<&mut Reader<'_, '_>>,
    ) -> Announced {
        // SAFETY: the caller's promise.
        let ends = unsafe { self.io.read_announced(&mut self.core, link, next, reader) };
        let Some(ends) = ends else {
            return Announced::No;
        };
        self.behind = Some(link);
        if self.io.todo.is_empty() && !ends {
            return Announced::Done;
        }
        if ends {
            self.end_run();
        }
        self.run_todo();
        Announced::Followed
    }

    /// Whether nothing of a link that is being ended can be in the device queue any more, nor in
    /// its ring, which is read.
    pub(super) fn is_polled(&mut self, link: LinkKey) -> bool {
        let (polled, cqe) = (self.io.polled, self.io.objects.cq.cqe());
        self.io.links.is_covered(link, polled, cqe) && self.read_ending(link)
    }

    /// Processes packets in the ring of a link that ends. Returns whether all were taken.
    fn read_ending(&mut self, link: LinkKey) -> bool {
        for _ in 0..BATCH {
            // also finds the end of the ring
            let read = self.io.read_ring(&mut self.core, link);
            self.run_todo();
            if !read || !self.io.links.ring_is_ready(link) {
                return true;
            }
        }
        false
    }
}
