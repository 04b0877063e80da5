//! What is due at a time: the end of a dial and of a handshake, the next dial, the steps of an
//! eviction, the probe of silent peers.

use super::link::{GREETING, LinkKey, State};
use super::peer::{Dial, Peer, PeerKey, When};
use super::{Config, Core, Io};
use crate::errno::FiErrno;

/// A link is ended after this number of beats in a row in which nothing has completed or arrived
/// although requests were under way: 15 s with a beat of 750 ms. A device reports a dead peer
/// before (`docs/protocol.md`: after at most 7.5 s), unless it has stopped. rxe has needed 7.7 s
/// for a message whose packets were reordered (`docs/real-verbs.md`).
const STANDS: u8 = 20;

/// The part of the connect timeout after which the operations of a silent peer fail, counted from
/// its last sign of life, which is estimated at most two beats too late.
const SILENT: (u64, u64) = (17, 20);

/// Dials of a recovery that are ended if they have no answer. The next one has the rest of the
/// connect timeout, so that a peer that is slow, or busy with many others, can answer.
const LIMITED: u8 = 3;

impl<I: Io> Core<I> {
    /// The time at which [`Self::tick`] has something to do. `None`, and no work, while all links
    /// are up and nothing is awaited. A post can make it earlier; it is then at least a beat ahead.
    pub fn deadline(&mut self) -> Option<u64> {
        if self.retimed {
            self.retimed = false;
            let mut timers = std::mem::take(&mut self.timers);
            let others = [self.beat, self.room_at, self.free_at];
            let mut earliest = others.into_iter().flatten().min();
            timers.retain(|key| {
                let time = self.time_of(*key);
                earliest = earliest.into_iter().chain(time).min();
                if time.is_none()
                    && let Some(peer) = self.peers.get_mut(*key)
                {
                    peer.timed = false;
                }
                time.is_some()
            });
            (self.timers, self.earliest) = (timers, earliest);
        }
        self.earliest
    }

    /// Something is awaited from a peer to which a link is up.
    #[inline]
    pub(in crate::rdm) fn await_answer(&mut self) {
        if self.beat.is_none()
            && let Some(beat) = self.config.beat
        {
            self.beat = Some(self.now + beat);
            self.retimed = true;
        }
    }

    /// Probes the peers that were silent since the last beat and from which something is awaited.
    /// The device detects by itself that a packet is not acknowledged, but not that no answer
    /// comes: the peer may have ended the link, and its disconnect request may be lost. Ends a link
    /// whose device has stopped.
    fn beat(&mut self, io: &mut I) {
        let mut awaits = false;
        let mut next = self.peers.at_or_behind(0);
        while let Some(key) = next {
            next = self.peers.after(key);
            let open = self.open_link(key);
            let Some(peer) = self.peers.get_mut(key) else {
                continue;
            };
            if let Some(out) = open
                && peer.awaits()
            {
                awaits = true;
                let silent = !std::mem::replace(&mut peer.heard, false);
                peer.stands = match silent && io.probe(out) {
                    true => peer.stands + 1,
                    false => 0,
                };
                if peer.stands == STANDS {
                    self.note_silence(out);
                    self.end_link(out, io);
                }
            } else {
                // what is awaited later begins a silence of its own
                peer.stands = 0;
            }
        }
        if awaits {
            self.await_answer();
        }
    }

    /// A link has broken because the peer acknowledges nothing, perhaps after another report of the
    /// break.
    pub fn unacknowledged(&mut self, link: LinkKey, io: &mut I) {
        self.note_silence(link);
        self.broken(link, io);
    }

    /// The peer of the out-link is silent: the dials that follow end earlier. Not on devices that
    /// report the end of a process by themselves.
    fn note_silence(&mut self, link: LinkKey) {
        let peer = self.links.get(link).map(|link| link.peer);
        let peer = peer.and_then(|peer| self.peers.get_mut(peer));
        if let Some((peer, beat)) = peer.zip(self.config.beat)
            && peer.out.is_none_or(|out| out == link)
        {
            // the count is that of the present silence while the beats go on
            let current = peer.awaits() && !peer.heard;
            let beats = u64::from(current) * (u64::from(peer.stands) + 1);
            let silence = self.config.retries.max(beats * beat);
            peer.dial.silent_since = When::at(self.now.saturating_sub(silence));
            peer.stands = 0;
        }
    }

    /// A sign of life of a peer that is dialled.
    pub(super) fn end_silence(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(key)
            && std::mem::take(&mut peer.dial.silent_since) != When::NONE
        {
            self.retimed = true;
        }
    }

    /// When the operations of a peer that is dialled fail. A silent peer has at least the time of
    /// one answer, which begins with its first dial: until then nothing can show that it lives.
    fn dials_until(&self, dial: &Dial) -> Option<u64> {
        let Config {
            timeout, answer, ..
        } = self.config;
        let since = dial.since.get()?;
        let latest = since + timeout;
        let Some((silent, begun)) = dial.silent_since.get().zip(dial.begun.get()) else {
            return Some(latest);
        };
        let earliest = (begun + answer).min(latest);
        Some((silent + timeout / SILENT.1 * SILENT.0).clamp(earliest, latest))
    }

    /// The request of [`Io::dial`] was passed to the connection manager: the answer is awaited from
    /// now on. Without one the link is ended, and the peer dialled again, because the connection
    /// manager repeats a request that gets lost every 4 to 5 s only. Not the first request to a
    /// peer: the first answers of many processes that begin at the same time can take longer.
    pub fn requesting(&mut self, link: LinkKey) {
        let answer_by = self.now + self.config.answer;
        let Some(dialled) = self.links.get_mut(link) else {
            return;
        };
        let key = dialled.peer;
        let peer = self.peers.get(key);
        let limited = peer.is_some_and(|peer| peer.begun && peer.dial.unanswered < LIMITED);
        if limited && dialled.state == State::Dialling {
            dialled.answer_by = Some(answer_by);
            self.set_timer(key);
        }
    }

    /// The reply of [`Io::accept`] was sent: HELLO is awaited from now on.
    pub fn accepted(&mut self, link: LinkKey) {
        let hello_by = self.now + GREETING;
        if let Some(link) = self.links.get_mut(link) {
            link.hello_by = Some(hello_by);
            let key = link.peer;
            self.set_timer(key);
        }
    }

    fn time_of(&self, key: PeerKey) -> Option<u64> {
        let peer = self.peers.get(key)?;
        let times = [
            self.dials_until(&peer.dial),
            peer.dial.not_before.get(),
            peer.close_at.get(),
            self.hello_by(key),
            self.answer_by(key),
        ];
        times.into_iter().flatten().min()
    }

    /// When HELLO has to have arrived on the accepted link of a peer.
    fn hello_by(&self, key: PeerKey) -> Option<u64> {
        let link = self.links.get(self.peers.get(key)?.accepted?)?;
        link.hello_by.filter(|_| link.state == State::Replied)
    }

    /// When the dial to a peer is to be repeated, unless it is answered.
    fn answer_by(&self, key: PeerKey) -> Option<u64> {
        let link = self.links.get(self.peers.get(key)?.own?)?;
        link.answer_by.filter(|_| link.state == State::Dialling)
    }

    pub(super) fn set_timer(&mut self, key: PeerKey) {
        self.retimed = true;
        if let Some(peer) = self.peers.get_mut(key)
            && !peer.timed
        {
            peer.timed = true;
            self.timers.push(key);
        }
    }

    /// Does what is due at the present time.
    pub fn tick(&mut self, io: &mut I) {
        self.retimed = true;
        if self.beat.is_some_and(|time| time <= self.now) {
            self.beat = None;
            self.beat(io);
        }
        self.make_room_again(io);
        let mut at = 0;
        while let Some(key) = self.timers.get(at).copied() {
            match self.time_of(key) {
                Some(time) if time > self.now => at += 1,
                time => {
                    self.timers.swap_remove(at);
                    if let Some(peer) = self.peers.get_mut(key) {
                        peer.timed = false;
                    }
                    if time.is_some() {
                        self.timer(key, io);
                    }
                }
            }
        }
        self.advance_changed(io);
        self.free_idle(io);
    }

    fn timer(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let now = self.now;
        let expired = |time: Option<u64>| time.is_some_and(|time| time <= now);
        if expired(peer.dial.not_before.get()) {
            peer.dial.not_before = When::NONE;
        }
        let closes = expired(peer.close_at.get());
        if closes {
            peer.close_at = When::NONE;
        }
        let drains = peer.drain.is_some();
        let (dial, own, accepted) = (peer.dial, peer.own, peer.accepted);
        let greeted = !expired(self.hello_by(key));
        if let Some(accepted) = accepted.filter(|_| !greeted) {
            // its dialler has ended it, and the disconnect request was lost
            self.end_link(accepted, io);
        }
        let answered = !expired(self.answer_by(key));
        if let Some(own) = own.filter(|_| !answered) {
            if let Some(peer) = self.peers.get_mut(key) {
                peer.dial.unanswered += 1;
            }
            // when it has ended, the peer is dialled again
            self.end_link(own, io);
        }
        let asked = self.peers.get(key).is_some_and(Peer::is_only_asked);
        if expired(self.dials_until(&dial)) && asked {
            // no answer shows nothing
            self.end_links(key, io);
            self.end_question(key);
            if let Some(peer) = self.peers.get_mut(key) {
                // the link may end later, and this time is not one after which operations fail
                (peer.dial.since, peer.dial.begun) = (When::NONE, When::NONE);
            }
        } else if expired(self.dials_until(&dial)) {
            self.fail(key, FiErrno::EHOSTUNREACH, io);
        } else if closes && drains {
            self.drain(key, io);
        } else if closes {
            self.end_links(key, io);
        }
        self.advance(key, io);
        if self.time_of(key).is_some() {
            self.set_timer(key);
        }
    }
}
