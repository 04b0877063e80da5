//! The pull of long messages: READs from the memory of the sender. `docs/protocol-rdm.md`, "Long
//! messages".

#![allow(
    unsafe_code,
    reason = "posts requests that write to the application's buffers"
)]

use rdma_core_sys as sys;

use super::{Executor, Step, Todo};
use crate::errno::FiErrno;
use crate::log::info_log;
use crate::mr::{Following, Source};
use crate::queue::{Completion, is_refusal};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::long::pulls::{Pull, PullState, Waiting};
use crate::rdm::operations::Kind;
use crate::rdm::receives::{Arrival, AtSender};
use crate::rdm::table_keys::{ArrivalKey, ReadKey, TxKey};
use crate::verbs::Sge;

/// Breaks of links without a READ that succeeds between, after which a message is asked for in
/// parts.
const BREAKS: u32 = 16;
/// Bytes that one call reads at most without requests.
pub(super) const READ_BYTES: u64 = 1 << 22;

impl Pull {
    /// A READ could not be executed on a link, which has broken. `false`: the message is not read
    /// any more.
    fn continues_after(&mut self, link: LinkKey) -> bool {
        if self.broken.replace(link) != Some(link) {
            self.breaks += 1;
        }
        if self.breaks > BREAKS {
            self.state = PullState::Refused;
        }
        self.state == PullState::Reads
    }
}

impl Executor {
    /// Registers the source of a message that is announced. Without a registration the receiver
    /// asks for the message in parts.
    pub(super) fn register_source(&mut self, key: TxKey) {
        let Some(op) = self.tx.get_mut(key) else {
            return;
        };
        let Kind::Message = op.kind else {
            return;
        };
        if op.copied || op.source.is_some() {
            return;
        }
        if let Some(buffer) = op.iov.single() {
            // SAFETY: the application keeps the buffer until the operation is reported. Before that
            // the source is released: at success, before the entry can be read, and at a failure by
            // the step that reports it.
            let source = unsafe { self.source_keys.register(&buffer.iovec()) };
            op.source = source.ok();
            if let Some(old) = self.source_keys.replaced() {
                self.steps.push(Step::Withdraw(Some(old), None));
            }
        }
    }

    /// How a message of a peer is read, if it can be.
    pub(super) fn pull_of(&mut self, peer: PeerKey, from: &AtSender, len: u64) -> Option<Pull> {
        let reads = !from.addr.is_null() && self.pulls.reads_next(peer);
        reads.then_some(Pull {
            from: (from.addr, from.rkey),
            end: len,
            next: 0,
            reads: 0,
            breaks: 0,
            broken: None,
            refused: false,
            state: PullState::Reads,
        })
    }

    /// Lists the pieces of a message to be read.
    pub(super) fn begin_pull(&mut self, peer: PeerKey, key: ArrivalKey) {
        self.pulls.wait(peer, Waiting::Pieces(key));
        self.todo.push_back(Todo::Pull(peer));
    }

    /// Posts READs to the out-link of a peer, as many as have room.
    pub(in crate::rdm) fn pull(&mut self, peer: PeerKey, link: LinkKey) {
        let most = self.pulls.most;
        while let Some(waiting) = self.pulls.first(peer) {
            if let Waiting::Pieces(key) = waiting
                && self.read_at_once(link, key)
            {
                self.pulls.pop(peer, waiting);
                self.pulls.succeeded(peer);
                self.pull_ended(key);
                continue;
            }
            let room = match (self.links.get_mut(link), &mut self.xrc) {
                (Some(record), None) => record.has_room_for_read(most),
                (Some(record), Some(xrc)) => xrc.has_room_for_read(record, most),
                (None, _) => false,
            };
            if !room {
                return;
            }
            // until the READ is posted
            let mut follows = Following::default();
            let (read, last) = match waiting {
                Waiting::Again(read) => (Some(read), true),
                Waiting::Pieces(key) => match self.next_piece(peer, key, &mut follows) {
                    Some((read, last)) => (Some(read), last),
                    None => (None, true),
                },
            };
            if last {
                self.pulls.pop(peer, waiting);
            }
            if let Waiting::Again(read) = waiting
                && !self.renew_read(read, &mut follows)
            {
                continue;
            }
            if let Some(read) = read
                && !self.post_read(peer, link, read)
            {
                return;
            }
        }
    }

    /// Reads a message in this call without requests, if the device can, at most [`READ_BYTES`] in
    /// a progress call. Returns whether the whole message is read; READs are posted for the rest.
    pub(super) fn read_at_once(&mut self, at: LinkKey, key: ArrivalKey) -> bool {
        #[cfg(test)]
        if self.tests.refuse_reads.is_some() || self.tests.posts_reads {
            return false;
        }
        let (Some(link), Some(arrival)) = (self.links.get_mut(at), self.rx.arrivals.get_mut(key))
        else {
            return false;
        };
        let Some(pull) = arrival.pull.as_mut() else {
            return false;
        };
        if pull.state != PullState::Reads || pull.reads != 0 {
            return false;
        }
        let receive = &arrival.target.receive;
        let mut follows = Following::default();
        while pull.next != pull.end {
            let left = READ_BYTES.saturating_sub(self.bytes_copied);
            // within the receive, whose length is a usize
            let (offset, len) = (pull.next as usize, left.min(pull.end - pull.next) as usize);
            let Some(to) = receive.iov.piece(offset, len) else {
                return false;
            };
            let to = to.iovec();
            // SAFETY: the application keeps the buffer until the receive is reported. The region of
            // its descriptor may be closed: `follows` is kept.
            let key = unsafe { self.pulls.key_at_once(receive, &to, &mut follows) };
            let Some((lkey, keyed)) = key else {
                return false;
            };
            let sge = Sge {
                addr: to.iov_base as u64,
                // at most 4 MiB
                length: to.iov_len as u32,
                lkey,
            };
            let from = (pull.from.0.wrapping_add(pull.next), pull.from.1);
            let done = match &mut self.xrc {
                // SAFETY: as above.
                None => unsafe { link.read_at_once((&sge, keyed), from) },
                // SAFETY: as above.
                Some(xrc) => unsafe { xrc.read_at_once(link, (&sge, keyed), from) },
            };
            if !done {
                return false;
            }
            let len = u64::from(sge.length);
            self.bytes_copied += len;
            #[cfg(test)]
            {
                self.tests.read_at_once += 1;
            }
            pull.next += len;
            arrival.arrived += len;
            pull.breaks = 0;
        }
        true
    }

    /// The READ of the next piece of a peer's message, and whether it is the last one. `None`:
    /// there is none, or its buffer cannot be registered.
    fn next_piece(
        &mut self,
        peer: PeerKey,
        key: ArrivalKey,
        follows: &mut Following<'static>,
    ) -> Option<(ReadKey, bool)> {
        let arrivals = &mut self.rx.arrivals;
        let arrival = arrivals.get_mut(key).filter(|it| it.origin.peer == peer)?;
        if arrival.has_all_parts() {
            return None;
        }
        let pull = arrival.pull.as_mut()?;
        if pull.state != PullState::Reads || pull.next == pull.end {
            return None;
        }
        let (offset, len) = (pull.next, self.pulls.piece.min(pull.end - pull.next));
        // both are within the receive, whose length is a usize
        let receive = &arrival.target.receive;
        let to = receive.iov.piece(offset as usize, len as usize)?;
        // SAFETY: the application keeps the buffer until the receive completes, which follows the
        // end of all its READs. The region of its descriptor may be closed: the caller keeps
        // `follows`.
        match unsafe { self.pulls.begin(key, offset, receive, &to, follows) } {
            Ok(read) => {
                pull.next += to.iovec().iov_len as u64;
                Some((read, pull.next == pull.end))
            }
            Err(error) => {
                info_log!(EpData, "a receive is not read into: {error}");
                pull.state = PullState::Refused;
                self.pull_ended(key);
                None
            }
        }
    }

    /// Makes a READ that was posted before ready to be posted again. `false`: the message is not
    /// read any more, because the region of its receive is closed.
    fn renew_read(&mut self, key: ReadKey, follows: &mut Following<'static>) -> bool {
        let Some(of) = self.pulls.get(key).map(|read| read.of) else {
            return true;
        };
        let Some(arrival) = self.rx.arrivals.get_mut(of) else {
            return true;
        };
        let receive = &arrival.target.receive;
        // SAFETY: the application keeps the buffer until the receive completes, which follows the
        // end of all its READs. The region of its descriptor may be closed: `follows` is kept.
        let Err(error) = (unsafe { self.pulls.renew(key, receive, follows) }) else {
            return true;
        };
        info_log!(EpData, "a receive is not read into again: {error}");
        if let Some(pull) = arrival.pull.as_mut()
            && pull.state == PullState::Reads
        {
            pull.state = PullState::Refused;
        }
        self.pulls.end(key);
        self.pull_ended(of);
        false
    }

    /// Posts a READ. `false`: nothing further can be posted to the link at present.
    fn post_read(&mut self, peer: PeerKey, at: LinkKey, key: ReadKey) -> bool {
        let Some(read) = self.pulls.get(key) else {
            return true;
        };
        let (of, offset, sge) = (read.of, read.offset, read.sge);
        let pull = self.rx.arrivals.get_mut(of).and_then(|it| it.pull.as_mut());
        let pull = pull.filter(|pull| pull.state == PullState::Reads);
        let (Some(link), Some(pull)) = (self.links.get_mut(at), pull) else {
            self.pulls.end(key);
            return true;
        };
        let from = (pull.from.0.wrapping_add(offset), pull.from.1);
        #[cfg(test)]
        let refusal = self.tests.refuse_reads;
        #[cfg(not(test))]
        let refusal = None;
        let posted = match (refusal, &mut self.xrc) {
            (Some(error), _) => Err(error),
            // SAFETY: the memory is part of a receive that is reported only after the end of the
            // READ.
            (None, None) => unsafe { link.post_read(sge, from, key) },
            // SAFETY: as above.
            (None, Some(xrc)) => unsafe { xrc.post_read(link, sge, from, key) },
        };
        let Err(error) = posted else {
            pull.reads += 1;
            if self.pulls.copies {
                self.bytes_read += u64::from(sge.length);
            }
            return true;
        };
        info_log!(EpData, "ibv_post_send of a READ: {error}");
        if error == FiErrno::EAGAIN {
            self.pulls.wait(peer, Waiting::Again(key));
            self.post_refused(at, error);
            return false;
        }
        if std::mem::replace(&mut pull.refused, true) {
            // on a second link too
            pull.state = PullState::Refused;
            self.pulls.refused(peer);
            self.pulls.end(key);
            self.pull_ended(of);
            return true;
        }
        if pull.continues_after(at) {
            self.pulls.wait(peer, Waiting::Again(key));
        } else {
            self.pulls.end(key);
            self.pull_ended(of);
        }
        self.todo.push_back(Todo::Broken(at));
        false
    }

    /// The queue pair of a link is destroyed, and with it these READs.
    pub(in crate::rdm) fn reads_ended(&mut self, link: LinkKey, reads: Vec<ReadKey>) {
        for read in reads {
            self.read_ended(read, link, None);
        }
    }

    /// A READ has completed, or its queue pair is destroyed (`None`).
    pub(super) fn read_ended(&mut self, key: ReadKey, link: LinkKey, status: Option<u32>) {
        let Some(read) = self.pulls.get(key) else {
            return;
        };
        let (of, len) = (read.of, u64::from(read.sge.length));
        let Some(Arrival {
            pull: Some(pull),
            arrived,
            origin,
            ..
        }) = self.rx.arrivals.get_mut(of)
        else {
            return self.pulls.end(key);
        };
        let peer = origin.peer;
        pull.reads -= 1;
        let mut again = false;
        match status {
            Some(sys::IBV_WC_SUCCESS) => {
                *arrived += len;
                pull.breaks = 0;
                self.pulls.succeeded(peer);
            }
            _ if pull.state != PullState::Reads => {}
            Some(status) if is_refusal(status) => {
                info_log!(
                    EpData,
                    "a READ of a message has failed with status {status}"
                );
                pull.state = PullState::Refused;
                self.pulls.refused(peer);
            }
            _ => again = pull.continues_after(link),
        }
        if again {
            #[cfg(test)]
            {
                self.tests.pull_failures.0 += 1;
            }
            self.pulls.wait(peer, Waiting::Again(key));
        } else {
            self.pulls.end(key);
            self.pull_ended(of);
        }
        if self.pulls.has_waiting(peer) {
            self.todo.push_back(Todo::Pull(peer));
        }
    }

    /// A READ of a message has ended: all of it is read, or the rest is not read any more.
    pub(super) fn pull_ended(&mut self, key: ArrivalKey) {
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return;
        };
        let Some(pull) = arrival.pull.filter(|pull| pull.reads == 0) else {
            return;
        };
        match pull.state {
            // PUSHED is to arrive
            PullState::Reads if arrival.arrived == pull.end && arrival.push.is_some() => {}
            PullState::Reads if arrival.arrived == pull.end => self.arrival_complete(key),
            PullState::Reads if arrival.has_all_parts() => {
                let peer = arrival.origin.peer;
                self.pulls.forget(peer, key);
                self.arrival_complete(key);
            }
            PullState::Reads => {}
            PullState::Failed => self.fail_arrival(key, false),
            // the sender is writing: it is tried again
            PullState::Refused if !arrival.end_push(&mut self.source_keys) => {
                self.streams.begin(key)
            }
            PullState::Refused => {
                #[cfg(test)]
                {
                    self.tests.pull_failures.1 += 1;
                }
                let (origin, op) = (arrival.origin, arrival.op);
                let asked = std::mem::replace(&mut arrival.asked, true);
                let all = arrival.has_all_parts();
                (arrival.pull, arrival.arrived) = (None, 0);
                self.pulls.forget(origin.peer, key);
                if all {
                    self.arrival_complete(key);
                } else if !asked {
                    self.ask_for_parts(origin, key, op);
                }
            }
        }
    }

    /// The session of a message has ended, and nothing of it waits for a link. `false`: READs are
    /// under way, whose end fails it.
    pub(super) fn end_pull(&mut self, key: ArrivalKey) -> bool {
        let Some(arrival) = self.rx.arrivals.get_mut(key) else {
            return true;
        };
        let Some(pull) = &mut arrival.pull else {
            return true;
        };
        pull.state = PullState::Failed;
        pull.reads == 0
    }

    /// Whether READs are under way, and whether further ones wait for a link of the peer.
    #[cfg(test)]
    pub(in crate::rdm) fn is_reading(&self, peer: PeerKey) -> (bool, bool) {
        let reads = |arrival: &Arrival| arrival.pull.is_some_and(|pull| pull.reads != 0);
        (self.rx.arrivals.any(reads), self.pulls.has_waiting(peer))
    }

    /// Whether a READ that was posted before waits for a link of the peer.
    #[cfg(test)]
    pub(in crate::rdm) fn reads_again(&self, peer: PeerKey) -> bool {
        matches!(self.pulls.first(peer), Some(Waiting::Again(_)))
    }

    /// Ends the registrations of all sources, as if the rkeys in RTS were wrong.
    #[cfg(test)]
    pub(in crate::rdm) fn revoke_sources(&mut self) {
        for key in self.tx.keys_where(|op| op.source.is_some()) {
            if let Some(source) = self.tx.get_mut(key).and_then(|op| op.source.take()) {
                let withdrawn = self.source_keys.withdraw(source);
                assert!(withdrawn.is_some_and(|it| it.end().is_ok()));
            }
        }
    }

    /// Ends the registration of the source of a message that the receiver has ended. If the
    /// receiver reads it nevertheless, the driver waits for that.
    #[inline]
    pub(super) fn release_source(&mut self, source: Source) {
        if let Some(busy) = self.source_keys.release(source) {
            self.steps.push(Step::Withdraw(Some(busy), None));
        }
    }

    /// No peer can read the source of a failed operation any more.
    pub(in crate::rdm) fn withdrawn(&mut self, completion: Completion, error: FiErrno) {
        self.messages -= 1;
        self.completions.failed(completion, 0, error);
    }
}
