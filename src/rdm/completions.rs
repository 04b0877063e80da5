//! Completions of an endpoint that no completion queue has taken yet, and its counters.

mod ranges;

use std::collections::VecDeque;
use std::sync::Arc;

use self::ranges::Calls;
use super::core::Origin;
use super::core::peer::PeerKey;
use super::operations::completion;
use super::receives::MultiBuffer;
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::queue::event_cell::Event;
use crate::queue::source::Sink;
use crate::queue::{Completion, CompletionError, Counters};
use crate::wire::rdm::Credit;
use crate::wire::rdm::packet::Message;

/// The direction of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Sends.
    Tx,
    /// Receives.
    Rx,
}

/// The reason of a failure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) err: FiErrno,
    /// The status of the work completion and the device's code, if one is the reason.
    pub(super) status: Option<(u32, u32)>,
}

impl Fault {
    pub(super) const fn of(err: FiErrno) -> Self {
        Self { err, status: None }
    }
}

/// An entry for the application.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    /// A success, and the sender of a message.
    Done(Completion, Option<PeerKey>),
    /// A success in a multi-receive buffer. Such a receive has any number of entries, so the
    /// message keeps its credit until the entry is taken.
    Held(Completion, Option<PeerKey>, Origin, Credit),
    /// As [`Self::Held`], in a buffer of a shared receive context, whose entries can be in several
    /// queues: the last one that is taken reports its release.
    Part(Completion, PeerKey, Origin, Credit, MultiBuffer),
    /// A failure.
    Failed(CompletionError),
    /// A failure, with the number of bytes beyond the buffer, of such a message.
    FailedPart(Completion, usize, FiErrno, MultiBuffer),
}

/// An entry, and its number among those of both directions, which counts up and wraps.
pub(super) type Numbered = (u32, Entry);

/// A read of a completion queue that takes the entries of received messages as they are, without
/// the addresses of the senders.
pub(super) struct Reader<'a, 'b> {
    sink: &'a mut Sink<'b>,
    /// How many entries it takes; each of them has room in the reader's buffer.
    left: usize,
    /// Whether its queue gets the entries of sends too.
    sends: bool,
}

impl<'a, 'b> Reader<'a, 'b> {
    /// A reader of at most `max` entries, of a queue that gets those of sends too if `sends` is
    /// set. `None`: the next one would wait in the queue.
    #[inline]
    pub(super) fn new(sink: &'a mut Sink<'b>, max: usize, sends: bool) -> Option<Self> {
        let left = max.min(sink.room());
        (left != 0 && sink.is_open()).then_some(Self { sink, left, sends })
    }

    /// Whether it takes no further entry.
    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.left == 0
    }

    /// How many further entries it takes.
    #[inline(always)]
    pub(super) fn left(&self) -> usize {
        self.left
    }

    #[inline(always)]
    fn pass(&mut self, completion: &Completion) {
        self.left -= 1;
        self.sink.complete_open(completion);
    }
}

/// See the module. An operation keeps its place in the transmit or receive size until its entry is
/// taken, and a message in a multi-receive buffer its credit, so the lists are bounded, except for
/// the entries of peeks: those that the application has asked for.
#[derive(Debug, Default)]
pub(super) struct Completions {
    tx: VecDeque<Numbered>,
    rx: VecDeque<Numbered>,
    /// The number of the next entry.
    next: u32,
    counters: Arc<Counters>,
    /// Atomics on several ranges.
    calls: Calls,
    /// Whether a completion queue takes the entries of a direction: transmit, receive. Otherwise
    /// only counters show its operations.
    pub(super) bound: [bool; 2],
}

impl Completions {
    pub(super) fn new(counters: &Arc<Counters>) -> Self {
        Self {
            counters: Arc::clone(counters),
            bound: [true; 2],
            ..Self::default()
        }
    }

    /// Counts an operation of a peer, or of the endpoint itself, on a region of this side that this
    /// side has executed.
    pub(super) fn count_remote(&self, event: Event) {
        self.counters.count_remote(event);
    }

    #[inline]
    fn push(&mut self, side: Side, entry: Entry) {
        let number = self.next;
        self.next = number.wrapping_add(1);
        self.of(side).push_back((number, entry));
    }

    /// Number of the first entry of a direction.
    #[inline]
    fn first(&self, side: Side) -> Option<u32> {
        let first = match side {
            Side::Tx => self.tx.front(),
            Side::Rx => self.rx.front(),
        };
        first.map(|(number, _)| *number)
    }

    /// The direction of the entry that was made first; `None`: there is none.
    ///
    /// The entry of a send is made before that of the peer's answer to it, so a queue of both
    /// directions has them in this order. `comp_order` does not promise it, but libfabric's own
    /// providers have it, and programs rely on it (Intel MPI).
    #[inline]
    pub(super) fn first_side(&self) -> Option<Side> {
        match (self.first(Side::Tx), self.first(Side::Rx)) {
            (None, None) => None,
            (Some(_), None) => Some(Side::Tx),
            (None, Some(_)) => Some(Side::Rx),
            // fewer than 2^31 entries wait
            (Some(tx), Some(rx)) if rx.wrapping_sub(tx) < 1 << 31 => Some(Side::Tx),
            (Some(_), Some(_)) => Some(Side::Rx),
        }
    }

    /// The entries of a direction.
    #[inline]
    pub(super) fn of(&mut self, side: Side) -> &mut VecDeque<Numbered> {
        match side {
            Side::Tx => &mut self.tx,
            Side::Rx => &mut self.rx,
        }
    }

    /// Whether there is no entry of either direction.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.tx.is_empty() && self.rx.is_empty()
    }

    /// Number of entries of a direction.
    #[inline]
    pub(super) fn len(&self, side: Side) -> usize {
        match side {
            Side::Tx => self.tx.len(),
            Side::Rx => self.rx.len(),
        }
    }

    /// An operation has succeeded; `wanted`: its entry is for the application.
    #[inline]
    pub(super) fn done(&mut self, completion: Completion, from: Option<PeerKey>, wanted: bool) {
        let side = side_of(completion.flags);
        self.counters.count(completion.flags, true);
        if wanted && self.bound[side as usize] {
            self.push(side, Entry::Done(completion, from));
        }
    }

    /// A message is complete in its receive. `reader` gets the entry, unless earlier ones wait.
    #[inline(always)]
    pub(super) fn received(
        &mut self,
        completion: &Completion,
        from: PeerKey,
        wanted: bool,
        reader: Option<&mut Reader<'_, '_>>,
    ) {
        self.counters.count(kind(Side::Rx), true);
        if !wanted || !self.bound[Side::Rx as usize] {
            return;
        }
        match reader {
            Some(reader)
                if reader.left != 0
                    && self.rx.is_empty()
                    && (self.tx.is_empty() || !reader.sends) =>
            {
                reader.pass(completion);
            }
            _ => self.push(Side::Rx, Entry::Done(*completion, Some(from))),
        }
    }

    /// A message has been sent.
    #[inline]
    pub(super) fn sent(&mut self, message: &Message, context: usize, wanted: bool) {
        self.counters.count(kind(Side::Tx), true);
        if wanted && self.bound[Side::Tx as usize] {
            self.push(Side::Tx, Entry::Done(completion(message, context), None));
        }
    }

    /// As [`Self::sent`].
    #[inline(always)]
    pub(super) fn sent_direct(&mut self, tagged: bool, context: usize, wanted: bool) {
        self.counters.count(kind(Side::Tx), true);
        if wanted && self.bound[Side::Tx as usize] {
            let kind = if tagged { Flags::TAGGED } else { Flags::MSG };
            let completion = Completion::new(context, Flags::SEND | kind);
            self.push(Side::Tx, Entry::Done(completion, None));
        }
    }

    /// A message is complete in a multi-receive buffer. Returns whether its entry keeps the credit.
    pub(super) fn held(
        &mut self,
        completion: Completion,
        from: PeerKey,
        wanted: bool,
        (origin, credit): (Origin, Credit),
    ) -> bool {
        self.counters.count(Flags::RECV, true);
        let kept = wanted && self.bound[Side::Rx as usize];
        if kept {
            let entry = Entry::Held(completion, Some(from), origin, credit);
            self.push(Side::Rx, entry);
        }
        kept
    }

    /// A message is complete in a multi-receive buffer of a shared receive context, and has an
    /// entry. An error has the number of bytes beyond the buffer.
    pub(super) fn part(
        &mut self,
        completion: Completion,
        from: PeerKey,
        result: Result<(Origin, Credit), (FiErrno, usize)>,
        buffer: MultiBuffer,
    ) {
        self.counters.count(completion.flags, result.is_ok());
        let entry = match result {
            Ok((origin, credit)) => Entry::Part(completion, from, origin, credit, buffer),
            Err((error, olen)) => Entry::FailedPart(completion, olen, error, buffer),
        };
        self.push(Side::Rx, entry);
    }

    /// An RMA operation has succeeded.
    #[inline]
    pub(super) fn rma_done(&mut self, completion: Completion, wanted: bool) {
        self.counters.count(completion.flags, true);
        if wanted && self.bound[Side::Tx as usize] {
            self.push(Side::Tx, Entry::Done(completion, None));
        }
    }

    /// An RMA operation has failed.
    #[cold]
    pub(super) fn rma_failed(&mut self, completion: Completion, fault: Fault) {
        self.counters.count(completion.flags, false);
        if !self.bound[Side::Tx as usize] {
            return;
        }
        self.push(
            Side::Tx,
            Entry::Failed(CompletionError {
                completion,
                olen: 0,
                err: fault.err,
                prov_errno: match fault.status {
                    Some((status, _)) => status.cast_signed(),
                    None => fault.err.code(),
                },
                vendor_err: fault.status.map(|(_, vendor_err)| vendor_err),
            }),
        );
    }

    /// Remote CQ data of a peer's write has arrived. Returns whether its entry keeps the credit.
    pub(super) fn noticed(
        &mut self,
        origin: Origin,
        (data, len): (u64, u32),
        credit: Credit,
    ) -> bool {
        let kept = self.bound[Side::Rx as usize];
        if kept {
            let flags = Flags::RMA | Flags::REMOTE_WRITE | Flags::REMOTE_CQ_DATA;
            let completion = Completion {
                data,
                len: len as usize,
                ..Completion::new(0, flags)
            };
            let from = Some(origin.peer);
            self.push(Side::Rx, Entry::Held(completion, from, origin, credit));
        }
        kept
    }

    /// A write of the endpoint to itself has remote CQ data.
    pub(super) fn own_notice(&mut self, from: PeerKey, data: u64, len: usize) {
        if self.bound[Side::Rx as usize] {
            let flags = Flags::RMA | Flags::REMOTE_WRITE | Flags::REMOTE_CQ_DATA;
            let completion = Completion {
                data,
                len,
                ..Completion::new(0, flags)
            };
            self.push(Side::Rx, Entry::Done(completion, Some(from)));
        }
    }

    /// A peek has found a message. No operation has completed, so no counter counts it.
    pub(super) fn peeked(&mut self, completion: Completion, from: Option<PeerKey>) {
        if self.bound[Side::Rx as usize] {
            self.push(Side::Rx, Entry::Done(completion, from));
        }
    }

    /// A peek has found no message.
    pub(super) fn not_found(&mut self, completion: Completion) {
        if self.bound[Side::Rx as usize] {
            self.push(Side::Rx, failure(completion, 0, FiErrno::ENOMSG));
        }
    }

    /// An operation has failed.
    #[cold]
    pub(super) fn failed(&mut self, completion: Completion, olen: usize, err: FiErrno) {
        let side = side_of(completion.flags);
        self.counters.count(completion.flags, false);
        if !self.bound[side as usize] {
            return;
        }
        self.push(side, failure(completion, olen, err));
    }
}

fn failure(completion: Completion, olen: usize, err: FiErrno) -> Entry {
    Entry::Failed(error_of(completion, olen, err))
}

/// An error that no work completion has caused.
pub(super) fn error_of(completion: Completion, olen: usize, err: FiErrno) -> CompletionError {
    CompletionError {
        completion,
        olen,
        err,
        prov_errno: err.code(),
        vendor_err: None,
    }
}

fn side_of(flags: Flags) -> Side {
    if flags.contains(Flags::RECV) {
        Side::Rx
    } else {
        Side::Tx
    }
}

const fn kind(side: Side) -> Flags {
    match side {
        Side::Tx => Flags::SEND,
        Side::Rx => Flags::RECV,
    }
}
