//! Receives of a shared receive context whose endpoints close. A receive whose message was arriving
//! at such an endpoint is posted again, in its place among the others, for messages of the other
//! endpoints.

use super::{Arrival, Delivery, Envelope, Home, Owner, Receives, SharedState, Target};
use crate::PeerIndex;
use crate::matching::{Matched, Release, Want};
use crate::queue::Completion;
use crate::rdm::receive::Receive;
use crate::rdm::table_keys::{ArrivalKey, RxKey, StoredKey};

/// A post of a receive.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdm) struct Posting {
    /// What it matches. The peer may have been [replaced](SharedState::find) since.
    pub(in crate::rdm) want: Want,
    /// The number of the post in its instance of matching.
    pub(in crate::rdm) number: u64,
    /// `fi_cancel(3)` was called while the message was arriving: the receive is not posted again.
    pub(in crate::rdm) cancelled: bool,
}

/// A receive that an endpoint which is closing will return.
#[derive(Debug)]
pub(super) struct Returning {
    owner: Owner,
    arrival: ArrivalKey,
    context: usize,
    cancelled: bool,
}

/// What ends with an endpoint: the shared receive context reports it.
#[derive(Debug, Default)]
pub(in crate::rdm) struct EndedReceives {
    /// Receives that end with `FI_ECANCELED`: cancelled ones, and those of claimed messages.
    pub(in crate::rdm) ended: Vec<Receive>,
    /// Multi-receive buffers that are released.
    pub(in crate::rdm) released: Vec<Receive>,
}

/// The result of `fi_cancel(3)`.
#[derive(Debug)]
pub(in crate::rdm) enum Cancel {
    /// The receive has ended, with this entry.
    Done(Completion),
    /// Its entry follows.
    Later,
    /// It has a message, which may end with its endpoint: then the receive ends too.
    Matched,
}

impl SharedState {
    /// Posts a receive, or returns the stored message that it matches. `number`: that of its
    /// earlier post.
    ///
    /// `Err`: 2^24 receives are posted.
    pub(in crate::rdm) fn post(
        &mut self,
        want: &Want,
        receive: Receive,
        number: Option<u64>,
    ) -> Result<Option<Delivery>, ()> {
        let posted = self.post_one(want, receive, number);
        if number.is_some() {
            self.store.restore_order();
        }
        posted
    }

    /// As [`Self::post`]; with a number [`Store::restore_order`](super::Store::restore_order)
    /// follows.
    fn post_one(
        &mut self,
        want: &Want,
        receive: Receive,
        number: Option<u64>,
    ) -> Result<Option<Delivery>, ()> {
        let key = self.store.posted.insert(receive).ok_or(())?;
        let messages = self.store.messages(receive.tagged);
        let posting = Posting {
            want: *want,
            number: number.unwrap_or_else(|| messages.next_number()),
            cancelled: false,
        };
        let found = messages.receive_again(want, receive.context, key, posting.number);
        self.returns += u64::from(number.is_some());
        let Some(message) = found else {
            let place = key.place();
            if self.postings.len() <= place {
                self.postings.resize(place + 1, posting);
            }
            self.postings[place] = posting;
            return Ok(None);
        };
        self.store.posted.remove(key);
        let owner = self.store.stored(message.payload).map(|it| it.owner);
        Ok(Some(Delivery {
            // a listed message is stored
            owner: owner.unwrap_or_default(),
            key: message.payload,
            target: Target {
                receive,
                multi: None,
                posting: Some(posting),
            },
        }))
    }

    /// The peer of a directed receive may have been merged since it was looked up.
    pub(in crate::rdm) fn current(&self, want: &Want) -> Want {
        Want {
            from: want.from.map(|from| self.find(from)),
            ..*want
        }
    }

    /// As [`super::Store::target`].
    pub(super) fn target(&mut self, matched: &Matched<RxKey>) -> Option<Target> {
        let posting = self.postings.get(matched.receive.place()).copied();
        let target = self.store.target(matched)?;
        Some(Target {
            posting: posting.filter(|_| target.multi.is_none()),
            ..target
        })
    }

    /// As [`super::Store::arrive`].
    pub(super) fn arrive(&mut self, envelope: &Envelope, peer: PeerIndex) -> Option<Target> {
        let matched = self.store.find(envelope, peer)?;
        self.target(&matched)
    }

    /// The deliveries that are pending for an endpoint.
    pub(super) fn take_pending(&mut self, owner: Owner) -> Vec<(StoredKey, Target)> {
        let own = self.pending.extract_if(.., |it| it.owner == owner);
        own.map(|it| (it.key, it.target)).collect()
    }

    /// Cancels a receive that is posted, returning or about to be delivered; `None`: there is none.
    pub(in crate::rdm) fn cancel(&mut self, context: usize) -> Option<Cancel> {
        if let Some(cancelled) = self.store.cancel(context) {
            return Some(cancelled.map_or(Cancel::Later, Cancel::Done));
        }
        let mut returning = self.returning.iter_mut();
        if let Some(it) = returning.find(|it| it.context == context && !it.cancelled) {
            it.cancelled = true;
            return Some(Cancel::Later);
        }
        let targets = self.pending.iter_mut().map(|it| &mut it.target);
        mark(targets, context).then_some(Cancel::Matched)
    }

    /// Counts the receives that have come back; wraps.
    pub(in crate::rdm) fn returns(&self) -> u64 {
        self.returns
    }

    /// The message of a target does not arrive: posts its receive again. Stored messages that it
    /// matches are pending. As [`Self::post_one`].
    fn give_back(&mut self, target: &Target, left: &mut EndedReceives) {
        let receive = target.receive;
        match (target.multi, target.posting) {
            (Some(multi), _) => {
                if self.store.finished(receive.tagged, multi) != Release::Held {
                    left.released.push(receive);
                }
            }
            (None, Some(posting)) if !posting.cancelled => {
                let want = self.current(&posting.want);
                match self.post_one(&want, receive, Some(posting.number)) {
                    Ok(delivery) => self.pending.extend(delivery),
                    Err(()) => left.ended.push(receive),
                }
            }
            (None, _) => left.ended.push(receive),
        }
    }
}

/// Marks the receive with this context as cancelled. `false`: there is none.
fn mark<'a>(targets: impl Iterator<Item = &'a mut Target>, context: usize) -> bool {
    for target in targets {
        if target.receive.context == context
            && let Some(posting) = &mut target.posting
            && !posting.cancelled
        {
            posting.cancelled = true;
            return true;
        }
    }
    false
}

impl Receives {
    /// `fi_cancel(3)` of a receive of a shared receive context whose message is arriving here: the
    /// receive is not posted again if the endpoint closes before. `false`: there is none.
    pub(in crate::rdm) fn cancel_arriving(&mut self, context: usize) -> bool {
        let is = |it: &Arrival| it.target.receive.context == context;
        let keys = self.arrivals.keys_where(is);
        keys.into_iter().any(|key| {
            let arrival = self.arrivals.get_mut(key);
            mark(arrival.map(|it| &mut it.target).into_iter(), context)
        })
    }

    /// The endpoint begins to close: it leaves no message in a shared receive context, and no
    /// further one arrives. The receives of the messages that are arriving stay, because the device
    /// may write to their buffers; [`Self::leave`] follows.
    pub(in crate::rdm) fn begin_leave(&mut self) -> EndedReceives {
        let mut left = EndedReceives::default();
        let Home::Shared(member) = &self.home else {
            return left;
        };
        let me = member.owner;
        let state = &mut *member.shared.lock();
        for key in self.arrivals.keys_where(|it| it.target.posting.is_some()) {
            if let Some(arrival) = self.arrivals.get(key)
                && let Some(posting) = arrival.target.posting
            {
                state.returns += 1;
                state.returning.push(Returning {
                    owner: me,
                    arrival: key,
                    context: arrival.target.receive.context,
                    cancelled: posting.cancelled,
                });
            }
        }
        state.store.drop_of(me);
        for key in state.store.stored.keys_where(|stored| stored.owner == me) {
            // it has just got a receive
            state.store.stored.remove(key);
        }
        for (_, target) in state.take_pending(me) {
            state.give_back(&target, &mut left);
        }
        state.store.restore_order();
        left
    }

    /// A peer may write to the buffer of a message that was arriving, also later: [`Self::leave`]
    /// does not post its receive again.
    pub(in crate::rdm) fn end_in_leave(&mut self, key: ArrivalKey) {
        let arrival = self.arrivals.get_mut(key);
        if let Some(posting) = arrival.and_then(|it| it.target.posting.as_mut()) {
            posting.cancelled = true;
        }
    }

    /// The endpoint has ended: the receives of the messages that were arriving are posted again.
    pub(in crate::rdm) fn leave(&mut self) -> EndedReceives {
        let mut left = EndedReceives::default();
        let Home::Shared(member) = &self.home else {
            return left;
        };
        let me = member.owner;
        let state = &mut *member.shared.lock();
        let returning: Vec<_> = state
            .returning
            .extract_if(.., |it| it.owner == me)
            .collect();
        for key in self.arrivals.keys_where(|_| true) {
            let Some(arrival) = self.arrivals.get(key) else {
                continue;
            };
            let mut target = arrival.target;
            let mut cancelled = returning.iter().filter(|it| it.cancelled);
            if let Some(posting) = &mut target.posting {
                posting.cancelled |= cancelled.any(|it| it.arrival == key);
            }
            state.give_back(&target, &mut left);
        }
        state.store.restore_order();
        left
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Membership, Payload, SharedStore};
    use super::*;
    use crate::flags::Flags;
    use crate::mr::Desc;
    use crate::rdm::core::Origin;
    use crate::rdm::core::peer::PeerKey;
    use crate::rdm::iov::Iov;
    use crate::wire::rdm::OpId;

    /// The peer of both endpoints.
    const PEER: PeerKey = PeerKey::from_number(3);

    fn receive(context: usize, bytes: &[u8]) -> Receive {
        Receive {
            iov: Iov::of_memory(bytes),
            desc: Desc::NULL,
            several: false,
            context,
            tagged: true,
            wanted: true,
        }
    }

    fn message(len: u64) -> Envelope {
        Envelope {
            peer: PEER,
            tag: Some(1),
            data: None,
            len,
        }
    }

    fn arrival(target: Target, len: u64) -> Arrival {
        Arrival {
            target,
            envelope: message(len),
            origin: Origin::of_test(PEER),
            op: OpId::new(1),
            arrived: 0,
            pull: None,
            asked: true,
            held: false,
            prefix: 0,
            fallback: None,
            push: None,
            name: None,
        }
    }

    /// A context with two endpoints.
    fn context() -> (Arc<SharedStore>, [Receives; 2]) {
        let store = Arc::new(SharedStore::new(1));
        let ends = [1, 2].map(|owner| {
            let member = Membership::new(&store, owner, true);
            Receives::of_context(member)
        });
        (store, ends)
    }

    fn post(store: &SharedStore, from: Option<PeerIndex>, context: usize) {
        let want = Want::tagged(1, 0, from);
        let posted = store.lock().post(&want, receive(context, &[]), None);
        assert!(matches!(posted, Ok(None)));
    }

    /// The contexts of the receives, in the order in which they match.
    fn order(end: &mut Receives) -> Vec<usize> {
        let next = std::iter::from_fn(|| Some(end.arrive(&message(0))?.receive.context));
        next.collect()
    }

    #[test]
    fn receives_of_arriving_messages_keep_their_order() {
        let (store, [mut first, mut second]) = context();
        for context in 1..=6 {
            post(&store, None, context);
        }
        // the messages of 1 and 3 are arriving at the first endpoint, that of 2 at the second
        for _ in 0..3 {
            let target = first.arrive(&message(9)).unwrap();
            if target.receive.context == 2 {
                second.arrivals.insert(arrival(target, 9));
            } else {
                first.arrivals.insert(arrival(target, 9));
            }
        }
        let left = first.begin_leave();
        assert!(left.ended.is_empty() && left.released.is_empty());
        assert_eq!(second.arrive(&message(0)).unwrap().receive.context, 4);
        let left = first.leave();
        assert!(left.ended.is_empty() && left.released.is_empty());
        assert_eq!(order(&mut second), [1, 3, 5, 6]);
    }

    #[test]
    fn a_receive_that_comes_back_takes_a_stored_message() {
        let (store, [mut first, mut second]) = context();
        post(&store, None, 7);
        let target = first.arrive(&message(9)).unwrap();
        first.arrivals.insert(arrival(target, 9));
        let payload = Payload::Bytes(Origin::of_test(PEER), vec![5]);
        assert!(second.store(message(1), payload).unwrap().is_none());
        first.begin_leave();
        first.leave();
        let found = second.take_pending();
        assert_eq!(found[0].1.receive.context, 7);
        assert!(second.take(found[0].0).is_some());
        assert_eq!(order(&mut second), []);
    }

    /// A peer is found to be another one, so that a receive matches a message that is stored at an
    /// endpoint which closes before it has seen this.
    #[test]
    fn a_receive_outlives_the_endpoint_of_its_stored_message() {
        for cancelled in [false, true] {
            let (store, [mut first, mut second]) = context();
            let known = store.lock().add_peer();
            post(&store, Some(known), 7);
            post(&store, Some(known), 8);
            let payload = Payload::Bytes(Origin::of_test(PEER), vec![5]);
            assert!(first.store(message(1), payload).unwrap().is_none());
            let index = first.shared_index(PEER).unwrap();
            store.lock().merge(index, known);
            assert_eq!(store.lock().pending_owners(), [1]);
            if cancelled {
                let result = store.lock().cancel(7);
                assert!(matches!(result, Some(Cancel::Matched)));
            }
            let left = first.begin_leave();
            let ended: Vec<usize> = left.ended.iter().map(|it| it.context).collect();
            assert_eq!(ended, if cancelled { vec![7] } else { vec![] });
            first.leave();
            let index = second.shared_index(PEER).unwrap();
            store.lock().merge(index, known);
            let expected = if cancelled { vec![8] } else { vec![7, 8] };
            assert_eq!(order(&mut second), expected);
        }
    }

    #[test]
    fn a_cancelled_receive_does_not_come_back() {
        for late in [false, true] {
            let (store, [mut first, mut second]) = context();
            post(&store, None, 7);
            let target = first.arrive(&message(9)).unwrap();
            first.arrivals.insert(arrival(target, 9));
            assert!(store.lock().cancel(7).is_none());
            assert!(!second.cancel_arriving(7));
            if !late {
                assert!(first.cancel_arriving(7));
                assert!(!first.cancel_arriving(7), "it is cancelled once");
            }
            let returns = store.lock().returns();
            first.begin_leave();
            assert_ne!(store.lock().returns(), returns);
            if late {
                assert!(matches!(store.lock().cancel(7), Some(Cancel::Later)));
            }
            assert!(store.lock().cancel(7).is_none());
            let left = first.leave();
            assert_eq!(left.ended.len(), 1);
            assert_eq!(order(&mut second), []);
            assert!(store.lock().cancel(7).is_none());
        }
    }

    #[test]
    fn the_release_of_a_multi_receive_buffer_is_reported() {
        let (store, [mut first, mut second]) = context();
        let memory = [0; 100];
        let buffer = receive(7, &memory);
        let want = Want::tagged(1, 0, None);
        let posted = store.lock().store.post_multi(&want, buffer, 90);
        assert!(posted.unwrap().is_empty());
        let target = first.arrive(&message(20)).unwrap();
        assert!(target.multi.is_some());
        first.arrivals.insert(arrival(target, 20));
        assert!(first.begin_leave().released.is_empty());
        let left = first.leave();
        assert_eq!(left.released.len(), 1);
        assert!(left.released[0].wanted && left.ended.is_empty());
        let flags = crate::rdm::receive::completion_of(&left.released[0]).flags;
        assert!(flags.contains(Flags::RECV));
        assert_eq!(order(&mut second), []);
    }
}
