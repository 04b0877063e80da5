//! From a link that ends to the next one. `docs/protocol-rdm.md`, "Use of links" and "Recovery".

use super::connect::PATIENCE;
use super::core::{Core, Io};
use super::link::{Closing, Link, LinkKey, Role, State};
use super::ops::{Entry, List};
use super::peer::{Dial, PeerKey};
use crate::errno::FiErrno;
use crate::wire::rdm::{Number, Terms};

/// Links that may end because of a peer's packets before its operations fail.
const STRIKES: u32 = 16;

/// What becomes of the operations that were never posted, when those of a session fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    Failed,
    Kept,
    /// Those are kept that were posted since the peer's address is in doubt, for the time with this
    /// number.
    KeptSince(u32),
}

impl<I: Io> Core<I> {
    /// A link has broken: an error completion, an event of the queue pair, a disconnect.
    pub fn broken(&mut self, link: LinkKey, io: &mut I) {
        self.end_link(link, io);
        self.settle(io);
    }

    /// A packet violates the protocol.
    pub(super) fn violation(&mut self, link: LinkKey, io: &mut I) {
        let Some(key) = self.links.get(link).map(|link| link.peer) else {
            return;
        };
        #[cfg(test)]
        {
            self.violations += 1;
        }
        self.end_link(link, io);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.strikes += 1;
            if peer.strikes > STRIKES {
                peer.strikes = 0;
                self.fail(key, FiErrno::ECONNABORTED, io);
            }
        }
    }

    /// Begins to end a link.
    pub(super) fn end_link(&mut self, link: LinkKey, io: &mut I) {
        let Some(ending) = self.links.get_mut(link) else {
            return;
        };
        let (state, key) = (ending.state, ending.peer);
        if state == State::Ending {
            return;
        }
        ending.state = State::Ending;
        let agreed = ending.closing == Closing::Accepted;
        if let Some(peer) = self.peers.get_mut(key)
            && peer.out == Some(link)
        {
            (peer.out, peer.closing) = (None, false);
            peer.close_at = None;
            self.retimed = true;
            ending.was_out = true;
            if ending.closing == Closing::No {
                io.down(key, link);
            }
        }
        if state == State::Dialling {
            self.dialled();
        }
        io.end(link);
        if agreed {
            // the peer ends all of them
            if let Some(peer) = self.peers.get_mut(key) {
                (peer.closing, peer.close_at) = (false, None);
                self.retimed = true;
            }
            self.end_links(key, io);
        }
    }

    pub(super) fn end_links(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        for link in [peer.own, peer.accepted].into_iter().flatten() {
            self.end_link(link, io);
        }
    }

    /// A link has ended: all that had arrived or completed on it was passed.
    pub fn ended(&mut self, link: LinkKey, io: &mut I) {
        let Some(ended) = self.links.remove(link) else {
            return;
        };
        let key = ended.peer;
        self.unlink(key, link);
        // an evicted link is not replaced by the dialler, and a session that ends has failed
        let patient = ended.was_out && ended.role == Role::Accepted;
        let patient = patient && ended.closing == Closing::No;
        if patient && let Some(peer) = self.peers.get_mut(key) {
            // normally the dialler replaces the link
            peer.dial.not_before = Some(self.now + PATIENCE);
            self.set_timer(key);
        }
        self.advance(key, io);
        self.settle(io);
    }

    /// A link is gone.
    pub(super) fn unlink(&mut self, key: PeerKey, link: LinkKey) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        for of in [&mut peer.own, &mut peer.accepted] {
            if *of == Some(link) {
                *of = None;
            }
        }
        if peer.unseen.is_some_and(|(on, _)| on == link) {
            peer.unseen = None;
            peer.restate = true;
        }
        if peer.stated == Some(link) {
            peer.stated = None;
            peer.restate = true;
        }
        if peer.recalling.is_some_and(|(on, _)| on == link) {
            peer.recalling = None;
        }
        if peer.returned == Some(link) {
            // it may be lost, and with it the newest *processed*
            (peer.returned, peer.recalled) = (None, true);
        }
        self.end_session(key);
    }

    /// Drops a session that ends, if it has no links.
    pub(super) fn end_session(&mut self, key: PeerKey) {
        let peer = self.peers.get(key);
        if !peer.is_some_and(|it| it.ends && it.own.is_none() && it.accepted.is_none()) {
            return;
        }
        if let Some(peer) = self.peers.get_mut(key) {
            if peer.former.is_none()
                && let Some(id) = peer.id
            {
                self.ids.remove(&id);
            }
            debug_assert!(peer.posted.is_empty());
            if let Some(token) = peer.gives {
                self.secrets.remove(&token);
            }
            let aliased = peer.aliased;
            peer.forget(&mut self.pool);
            if aliased {
                self.forget_tokens(key);
            }
        }
    }

    /// Forgets the tokens that were given by the other addresses of a peer.
    fn forget_tokens(&mut self, key: PeerKey) {
        let given = self.secrets.iter();
        let given = given.filter(|(_, at)| self.resolve(**at) == key);
        let given: Vec<_> = given.map(|(token, at)| (*token, *at)).collect();
        for (token, at) in given {
            self.secrets.remove(&token);
            if let Some(peer) = self.peers.get_mut(at) {
                peer.gives = None;
            }
        }
    }

    /// Completes all operations of a peer in error, and ends its links and the session. The next
    /// request informs the peer.
    pub(super) fn fail(&mut self, key: PeerKey, error: FiErrno, io: &mut I) {
        self.fail_ops(key, error, Waiting::Failed, io);
        if let Some(peer) = self.peers.get_mut(key)
            && peer.begun
        {
            peer.former = peer.shows;
            peer.ends = true;
        }
        self.end_links(key, io);
        self.end_session(key);
    }

    /// Completes the operations of a peer in error.
    pub(super) fn fail_ops(&mut self, key: PeerKey, error: FiErrno, waiting: Waiting, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        if waiting != Waiting::Kept {
            peer.meant = None;
        }
        peer.probe = false;
        self.retimed = true;
        (peer.acks, peer.holds) = (0, 0);
        (peer.repost, peer.unsent) = (None, None);
        peer.dial = Dial {
            queued: peer.dial.queued,
            ..Dial::default()
        };
        let mut kept = List::default();
        // parts belong to operations of the session that has failed
        let lists = [
            &mut peer.posted,
            &mut peer.answers,
            &mut peer.parts,
            &mut peer.waiting,
        ];
        for (number, list) in lists.into_iter().enumerate() {
            while let Some(op) = list.pop(&self.ops) {
                let keeps = |entry: &Entry<I::Op>| match waiting {
                    Waiting::Failed => false,
                    Waiting::Kept => true,
                    Waiting::KeptSince(doubts) => entry.doubts == doubts,
                };
                if number == 3 && self.ops.get(op).is_some_and(keeps) {
                    kept.push(&mut self.ops, op);
                    continue;
                }
                if let Some(entry) = self.ops.remove(op)
                    && !entry.done
                {
                    io.complete(entry.op, Err(error));
                }
            }
        }
        peer.waiting = kept;
        io.failed(key, error);
    }

    /// Whether the peer needs an out-link.
    fn needs(&self, key: PeerKey) -> bool {
        let Some(peer) = self.peers.get(key) else {
            return false;
        };
        let up = |link: LinkKey| self.links.get(link).is_some_and(|it| it.state == State::Up);
        let linked = peer.own.is_some_and(up) || peer.accepted.is_some_and(up);
        peer.has_ops() || peer.probe || linked && (peer.has_report() || peer.has_return())
    }

    /// Takes the next steps of a peer, after any change.
    pub(super) fn advance(&mut self, key: PeerKey, io: &mut I) {
        self.accept_held(key, io);
        self.greet(key, io);
        let Some(peer) = self.peers.get(key) else {
            return;
        };
        if peer.alias.is_some() {
            return;
        }
        if peer.itself {
            return self.loop_back(key, io);
        }
        if peer.out.is_none() {
            let links = [peer.own, peer.accepted];
            if let Some(link) = links
                .into_iter()
                .flatten()
                .find(|link| self.is_final(*link))
            {
                self.adopt(key, link, io);
            } else if self.needs(key) {
                self.seek(key, io);
            } else if let Some(peer) = self.peers.get_mut(key) {
                // no dial is repeated
                if peer.own.is_none() {
                    peer.dial.since = None;
                    peer.dial.backoff = 0;
                }
            }
        }
        self.pump(key, io);
    }

    /// Advances peers that others have changed, and those whose dial can begin.
    pub(super) fn settle(&mut self, io: &mut I) {
        loop {
            if let Some(key) = self.changed.pop() {
                self.advance(key, io);
            } else if self.dials < self.config.dials
                && let Some(key) = self.queue.pop_front()
            {
                if let Some(peer) = self.peers.get_mut(key) {
                    peer.dial.queued = false;
                }
                self.changed.push(key);
            } else {
                return;
            }
        }
    }

    /// Whether a link is up, and its terms were stated after the last out-link had ended.
    fn is_final(&self, link: LinkKey) -> bool {
        let Some(Link {
            peer,
            state: State::Up,
            mark,
            terms: Some(_),
            ..
        }) = self.links.get(link)
        else {
            return false;
        };
        let outs = self.peers.get(*peer).map(|peer| peer.outs);
        mark.is_some() && *mark == outs
    }

    /// Looks for an out-link: dials, or ends an own link that is no use, in order to dial.
    fn seek(&mut self, key: PeerKey, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let link = |link: Option<LinkKey>| self.links.get(link?);
        let own = link(peer.own).map(|own| own.state);
        // its HELLO is awaited, and will make it the out-link
        let coming = link(peer.accepted)
            .is_some_and(|it| it.state == State::Replied && it.mark == Some(peer.outs));
        // it may have been the out-link: the request must state that it has ended
        let ending = link(peer.accepted).is_some_and(|it| it.state == State::Ending);
        match (own, peer.own) {
            (Some(State::Up), Some(own)) if !coming => self.end_link(own, io),
            (None, _) if !coming && !ending => self.dial(key, io),
            _ => {
                peer.dial.since = peer.dial.since.or(Some(self.now));
                self.set_timer(key);
            }
        }
    }

    /// Makes a link the out-link, and repeats on it what has not arrived.
    fn adopt(&mut self, key: PeerKey, link: LinkKey, io: &mut I) {
        let Some(terms) = self.links.get(link).and_then(|link| link.terms) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let expected = terms.expected;
        let damaged = expected.is_before(peer.completed) || peer.next.is_before(expected);
        if damaged {
            return self.fail(key, FiErrno::ECONNABORTED, io);
        }
        (peer.out, peer.closing) = (Some(link), false);
        peer.outs = peer.outs.wrapping_add(1);
        peer.restate |= peer.stated.is_some_and(|stated| stated != link);
        peer.dial = Dial {
            queued: peer.dial.queued,
            ..Dial::default()
        };
        (peer.probe, peer.confirm, peer.heard) = (false, true, true);
        self.retimed = true;
        self.resume(key, &terms, io);
        io.up(key, link, &terms);
    }

    fn resume(&mut self, key: PeerKey, terms: &Terms, io: &mut I) {
        let Some(peer) = self.peers.get_mut(key) else {
            return;
        };
        let (mut number, mut used): (Number, _) = (terms.expected, terms.used);
        let mut next = peer.posted.first();
        (peer.repost, peer.unsent) = (None, None);
        while let Some(op) = next {
            next = List::next(&self.ops, op);
            let Some(entry) = self.ops.get_mut(op) else {
                break;
            };
            if entry.number.is_before(terms.expected) {
                peer.acks -= u32::from(!entry.acked);
                if !entry.done {
                    entry.done = true;
                    io.complete(entry.op, Ok(()));
                }
                continue;
            }
            debug_assert_eq!(entry.number, number);
            entry.sent = false;
            number = number.next();
            used = used.add(entry.spent);
            peer.repost = peer.repost.or(Some(op));
            peer.unsent = peer.unsent.or(Some(op));
        }
        peer.outbound.resume(used);
        (peer.next, peer.completed) = (number, terms.expected);
        self.retire(key);
    }
}
