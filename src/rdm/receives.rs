//! Posted receives, messages that no receive has matched, and messages that arrive in parts.
//!
//! The first two are in a [`Store`], which belongs to one endpoint, or to all endpoints of a shared
//! receive context ([`SharedStore`]).
//!
//! In one file, because both kinds of stores have the same operations, behind [`Receives`].

#![allow(unsafe_code, reason = "copies from a ring")]

mod arrivals;
mod names;
mod repost;
mod spares;

use std::cell::Cell;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use self::arrivals::Arriving;
use self::repost::Returning;
pub(super) use self::repost::{Cancel, EndedReceives, Posting};
use self::spares::Spares;
use super::core::Origin;
use super::core::link::LinkKey;
use super::core::peer::{PeerKey, PeerMark};
use super::receive::{Receive, completion_of};
use super::slab::{Key, Slab};
use super::table_keys::{RxKey, RxMark, StoredKey, StoredMark, TxKey};
use crate::PeerIndex;
use crate::flags::Flags;
use crate::matching::{Found, Matched, Matching, MultiId, Release, Want};
use crate::mr::SourceKeys;
use crate::queue::Completion;
use crate::rdm::long::pulls::{Pull, Push, Sink};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::OpId;

/// A multi-receive buffer, and the key of its receive.
pub(super) type MultiBuffer = (MultiId, RxKey);

/// The memory of a matched message: a receive, or a part of a multi-receive buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) receive: Receive,
    pub(super) multi: Option<MultiBuffer>,
    /// Of a receive of a shared receive context that takes one message, which was not claimed.
    pub(super) posting: Option<Posting>,
}

/// The envelope of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Envelope {
    pub(super) peer: PeerKey,
    pub(super) tag: Option<u64>,
    pub(super) data: Option<u64>,
    /// Length of the message in bytes.
    pub(super) len: u64,
}

/// A message that was announced: the sender's operation, and its source.
#[derive(Clone, Copy, Debug)]
pub(super) struct AtSender {
    pub(super) op: OpId,
    /// NULL: the source cannot be read.
    pub(super) addr: RemoteAddr,
    pub(super) rkey: Rkey,
    /// The link on which it was announced.
    pub(super) link: Option<LinkKey>,
}

/// The payload of a stored message.
#[derive(Debug)]
pub(super) enum Payload {
    /// Complete.
    Bytes(Origin, Vec<u8>),
    /// At the sender, until its operation is answered.
    AtSender(Origin, AtSender),
    /// In the memory of an operation of this endpoint.
    Own(TxKey),
    /// Was at a sender that is lost. Only claimed messages have it: their receives fail.
    Lost,
}

/// The number of an endpoint of a shared receive context; 0 without context.
pub(super) type Owner = u32;

/// A message without receive.
#[derive(Debug)]
pub(super) struct Stored {
    /// The endpoint at which it has arrived.
    pub(super) owner: Owner,
    pub(super) envelope: Envelope,
    pub(super) payload: Payload,
}

/// A message that arrives after its receive was found: by READs, or in parts.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) target: Target,
    pub(super) envelope: Envelope,
    pub(super) origin: Origin,
    /// The sender's operation.
    pub(super) op: OpId,
    /// Number of bytes that were read.
    pub(super) arrived: u64,
    /// How it is read; `None`: it arrives in parts.
    pub(super) pull: Option<Pull>,
    /// The sender was asked for parts.
    pub(super) asked: bool,
    /// Credit of its announcement is held until FIN is complete.
    pub(super) held: bool,
    /// Number of bytes that have arrived in parts.
    pub(super) prefix: u64,
    /// How it will be read if its parts do not come.
    pub(super) fallback: Option<Pull>,
    /// The part that the sender writes.
    pub(super) push: Option<Push>,
    /// Its name in packets to the sender ([`Arriving::name`]).
    name: Option<OpId>,
}

impl Arrival {
    /// Ends the registration of the part that the sender writes, if there is one. `false`: it is
    /// being written.
    pub(super) fn end_push(&mut self, keys: &mut SourceKeys) -> bool {
        let Some(Push { offset, sink }) = self.push.take() else {
            return true;
        };
        let busy = sink.end(keys).err().map(Sink::Ends);
        self.push = busy.map(|sink| Push { offset, sink });
        self.push.is_none()
    }
}

impl Arrival {
    /// A message of which nothing has arrived. Without `pull` its parts are asked for.
    pub(super) const fn new(
        (origin, op): (Origin, OpId),
        envelope: Envelope,
        target: Target,
        pull: Option<Pull>,
    ) -> Self {
        Self {
            target,
            envelope,
            origin,
            op,
            arrived: 0,
            asked: pull.is_none(),
            held: false,
            pull,
            prefix: 0,
            fallback: None,
            push: None,
            name: None,
        }
    }

    pub(super) const fn has_all_parts(&self) -> bool {
        self.asked && self.prefix == self.envelope.len
    }
}

type Messages = Matching<RxKey, StoredKey>;

/// The index of a peer in matching.
#[inline]
pub(super) fn index_of(peer: Key<PeerMark>) -> PeerIndex {
    // 24 bits
    PeerIndex(peer.place() as u32)
}

/// The posted receives and the stored messages of one endpoint, or of a shared receive context.
pub(super) struct Store {
    tagged: Messages,
    untagged: Messages,
    posted: Slab<RxMark, Receive>,
    stored: Slab<StoredMark, Stored>,
    /// Whether the last receive that was cancelled is tagged: the next one probably is too, and a
    /// search of the other instance reads all its entries.
    cancelled_tagged: bool,
    /// As if 2^24 messages were stored.
    #[cfg(test)]
    pub(super) full: bool,
}

impl Store {
    /// `seed` is secret and random.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            tagged: Matching::new(seed, 0, 0),
            untagged: Matching::new(!seed, 0, 0),
            posted: Slab::new(),
            stored: Slab::new(),
            cancelled_tagged: true,
            #[cfg(test)]
            full: false,
        }
    }

    pub(super) fn messages(&mut self, tagged: bool) -> &mut Messages {
        if tagged {
            &mut self.tagged
        } else {
            &mut self.untagged
        }
    }

    /// To be called after receives were posted again with their numbers, before the next message is
    /// matched.
    fn restore_order(&mut self) {
        for messages in [&mut self.tagged, &mut self.untagged] {
            messages.restore_order();
        }
    }

    /// Number of posted receives.
    pub(super) fn posted(&self) -> usize {
        self.posted.len()
    }

    /// The receive of a message that arrives; `None`: it must be [stored](Self::store).
    #[inline]
    fn arrive(&mut self, envelope: &Envelope, peer: PeerIndex) -> Option<Target> {
        let matched = self.find(envelope, peer)?;
        self.target(&matched)
    }

    /// As [`Self::arrive`]; [`Self::target`] follows, or [`Self::release`] of a whole receive.
    #[inline]
    pub(super) fn find(&mut self, envelope: &Envelope, peer: PeerIndex) -> Option<Matched<RxKey>> {
        let tag = envelope.tag.unwrap_or_default();
        let tagged = envelope.tag.is_some();
        self.messages(tagged).arrive(tag, peer, envelope.len)
    }

    /// The receive of a message, if it is found at once and takes no other one. Nothing changes
    /// until [`Self::take_recent`].
    #[inline(always)]
    pub(super) fn recent(
        &self,
        tag: Option<u64>,
        peer: PeerIndex,
    ) -> Option<(Found<RxKey>, &Receive)> {
        let messages = match tag {
            Some(_) => &self.tagged,
            None => &self.untagged,
        };
        let found = messages.recent(tag.unwrap_or_default(), peer)?;
        Some((found, self.posted.get(found.receive())?))
    }

    /// Removes the last result of [`Self::recent`], without a change since.
    #[inline(always)]
    pub(super) fn take_recent(&mut self, tagged: bool, found: &Found<RxKey>) {
        self.posted.free(found.receive());
        match tagged {
            true => self.tagged.take_recent(found),
            false => self.untagged.take_recent(found),
        }
    }

    /// A posted receive.
    #[inline]
    pub(super) fn receive(&self, key: RxKey) -> Option<&Receive> {
        self.posted.get(key)
    }

    /// Removes a receive that has got its message.
    #[inline]
    pub(super) fn release(&mut self, key: RxKey) {
        self.posted.free(key);
    }

    #[inline]
    pub(super) fn target(&mut self, matched: &Matched<RxKey>) -> Option<Target> {
        let Some(piece) = matched.piece else {
            let receive = self.posted.remove(matched.receive)?;
            return Some(Target {
                receive,
                multi: None,
                posting: None,
            });
        };
        self.part(matched.receive, piece)
    }

    fn part(&self, key: RxKey, piece: crate::matching::Piece) -> Option<Target> {
        let receive = *self.posted.get(key)?;
        Some(Target {
            receive: Receive {
                // a part lies in the buffer, whose length is a usize
                iov: receive.iov.part(piece.offset as usize, piece.len as usize),
                ..receive
            },
            multi: Some((piece.buffer, key)),
            posting: None,
        })
    }

    /// Stores a message that no receive matches. `None`: 2^24 messages are stored.
    fn store(&mut self, stored: Stored, peer: PeerIndex) -> Option<()> {
        #[cfg(test)]
        if self.full {
            return None;
        }
        let envelope = stored.envelope;
        let key = self.stored.insert(stored)?;
        let tag = envelope.tag.unwrap_or_default();
        let tagged = envelope.tag.is_some();
        self.messages(tagged).store(tag, peer, envelope.len, key);
        Some(())
    }

    /// A stored message, which leaves the store.
    pub(super) fn take(&mut self, key: StoredKey) -> Option<Stored> {
        self.stored.remove(key)
    }

    pub(super) fn stored(&self, key: StoredKey) -> Option<&Stored> {
        self.stored.get(key)
    }

    /// Changes where the stored messages are at their senders, as if RTS had been wrong.
    #[cfg(test)]
    pub(super) fn move_sources(&mut self, change: impl Fn(&mut AtSender)) {
        for key in self.stored.keys_where(|_| true) {
            let payload = self.stored.get_mut(key).map(|stored| &mut stored.payload);
            if let Some(Payload::AtSender(_, at)) = payload {
                change(at);
            }
        }
    }

    /// Number of stored messages.
    #[cfg(test)]
    pub(super) fn stored_len(&self) -> usize {
        self.stored.len()
    }

    /// Posts a receive, or returns the stored message that it matches.
    ///
    /// `Err`: 2^24 receives are posted.
    pub(super) fn post(&mut self, want: &Want, receive: Receive) -> Result<Option<StoredKey>, ()> {
        // most receives are posted before their message arrives
        let key = self.posted.insert(receive).ok_or(())?;
        let messages = self.messages(receive.tagged);
        let Some(message) = messages.receive(want, receive.context, key) else {
            return Ok(None);
        };
        self.posted.remove(key);
        Ok(Some(message.payload))
    }

    /// Posts a receive that is not multi-receive, if no message is stored: then none matches it.
    /// `None`: messages are stored, or 2^24 receives are posted. Nothing has changed.
    #[inline(always)]
    pub(super) fn post_first(&mut self, want: &Want, receive: Receive) -> Option<()> {
        let (tagged, context) = (receive.tagged, receive.context);
        let messages = match tagged {
            true => &mut self.tagged,
            false => &mut self.untagged,
        };
        if !messages.lists_none() {
            return None;
        }
        let key = self.posted.insert(receive)?;
        messages.post(want, context, key);
        Some(())
    }

    /// Posts a multi-receive buffer. Returns the stored messages that it takes, each with its part.
    pub(super) fn post_multi(
        &mut self,
        want: &Want,
        receive: Receive,
        min: usize,
    ) -> Result<Vec<(StoredKey, Target)>, ()> {
        let key = self.posted.insert(receive).ok_or(())?;
        let size = (receive.iov.len() as u64, min as u64);
        let mut taken = Vec::new();
        let messages = self.messages(receive.tagged);
        messages.receive_multi(want, receive.context, key, size, |message, piece| {
            taken.push((message.payload, piece));
        });
        let part = |(stored, piece)| Some((stored, self.part(key, piece)?));
        Ok(taken.into_iter().filter_map(part).collect())
    }

    /// A message in a multi-receive buffer is complete; in one of a shared receive context, its
    /// entry was taken too.
    pub(super) fn finished(&mut self, tagged: bool, (buffer, key): MultiBuffer) -> Release {
        let release = self.messages(tagged).finished(buffer);
        if release != Release::Held {
            self.posted.remove(key);
        }
        release
    }

    /// Cancels a posted receive. `None`: none is posted. `Some(None)`: messages are being received
    /// into its buffer; the last of them reports the end ([`Release::Cancelled`]).
    pub(super) fn cancel(&mut self, context: usize) -> Option<Option<Completion>> {
        let first = self.cancelled_tagged;
        for tagged in [first, !first] {
            if let Some(cancelled) = self.messages(tagged).cancel(context) {
                self.cancelled_tagged = tagged;
                if !cancelled.released {
                    return Some(None);
                }
                let receive = self.posted.remove(cancelled.receive)?;
                let mut completion = completion_of(&receive);
                if cancelled.multi {
                    // this entry reports the release of the buffer
                    completion.flags |= Flags::MULTI_RECV;
                }
                return Some(Some(completion));
            }
        }
        None
    }

    /// Drops the listed and the claimed messages of an endpoint.
    pub(super) fn drop_of(&mut self, owner: Owner) {
        self.drop_where(|stored| stored.owner == owner);
    }

    /// Drops the stored messages that fulfil a condition.
    fn drop_where(&mut self, is: impl Fn(&Stored) -> bool) {
        let stored = &mut self.stored;
        for messages in [&mut self.tagged, &mut self.untagged] {
            messages.retain(|message, _| {
                let drops = stored.get(message.payload).is_some_and(&is);
                if drops {
                    stored.remove(message.payload);
                }
                !drops
            });
        }
    }

    /// Drops the stored messages that fulfil a condition. The application holds the claims of
    /// others, which stay as [`Payload::Lost`]. Returns their number.
    fn lose_where(&mut self, is: impl Fn(&Stored) -> bool) -> u32 {
        let stored = &mut self.stored;
        let mut count = 0;
        for messages in [&mut self.tagged, &mut self.untagged] {
            messages.retain(|message, claimed| {
                let lost = stored.get_mut(message.payload).filter(|stored| is(stored));
                count += u32::from(lost.is_some());
                match lost {
                    None => true,
                    Some(stored) if claimed => {
                        stored.payload = Payload::Lost;
                        true
                    }
                    Some(_) => {
                        stored.remove(message.payload);
                        false
                    }
                }
            });
        }
        count
    }

    /// Messages of `from` become messages of `into`. Returns the pairs that match now.
    fn merge(&mut self, from: PeerIndex, into: PeerIndex) -> Vec<(StoredKey, Matched<RxKey>)> {
        let mut pairs = Vec::new();
        for tagged in [true, false] {
            self.messages(tagged).merge(from, into, |message, matched| {
                pairs.push((message.payload, matched));
            });
        }
        pairs
    }
}

/// A stored message that has got a receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivery {
    pub(super) owner: Owner,
    pub(super) key: StoredKey,
    pub(super) target: Target,
}

/// The store of a shared receive context, and the peers of its endpoints. The endpoints have keys
/// of their own for one peer, so a store has indices of its own.
pub(super) struct SharedState {
    pub(super) store: Store,
    /// The index that has replaced another one, or the index itself.
    indices: Vec<u32>,
    /// For endpoints whose lock the thread that has found them does not hold.
    pending: Vec<Delivery>,
    /// What the posted receives match, by the places of their keys.
    postings: Vec<Posting>,
    /// Receives whose messages were arriving at endpoints that are closing.
    returning: Vec<Returning>,
    /// Number of receives that were posted again, or are [returning](Self::returning).
    returns: u64,
}

impl SharedState {
    /// An index for a peer.
    pub(super) fn add_peer(&mut self) -> PeerIndex {
        // at most 2^20 peers of each endpoint
        let index = self.indices.len() as u32;
        self.indices.push(index);
        PeerIndex(index)
    }

    /// The index by which this one was replaced.
    pub(super) fn find(&self, peer: PeerIndex) -> PeerIndex {
        let mut index = peer.0;
        while let Some(next) = self.indices.get(index as usize)
            && *next != index
        {
            index = *next;
        }
        PeerIndex(index)
    }

    /// The two are one peer. The pairs that match now are [pending](Receives::take_pending): their
    /// endpoints exist, because a closing endpoint removes its messages and its pairs at once.
    pub(super) fn merge(&mut self, from: PeerIndex, into: PeerIndex) {
        let (from, into) = (self.find(from), self.find(into));
        if from == into {
            return;
        }
        if let Some(replaced) = self.indices.get_mut(from.0 as usize) {
            *replaced = into.0;
        }
        for (key, matched) in self.store.merge(from, into) {
            let owner = self.store.stored(key).map(|stored| stored.owner);
            if let Some((owner, target)) = owner.zip(self.target(&matched)) {
                self.pending.push(Delivery { owner, key, target });
            }
        }
    }

    /// The endpoints for which deliveries are pending.
    pub(super) fn pending_owners(&self) -> Vec<Owner> {
        let mut owners: Vec<Owner> = self.pending.iter().map(|it| it.owner).collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    /// Whether deliveries wait for the drivers of their endpoints.
    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// [`SharedState`] and its lock, which is acquired under that of an endpoint.
pub(super) struct SharedStore(Mutex<SharedState>);

impl SharedStore {
    /// `seed` is secret and random.
    pub(super) fn new(seed: u64) -> Self {
        Self(Mutex::new(SharedState {
            store: Store::new(seed),
            indices: Vec::new(),
            pending: Vec::new(),
            postings: Vec::new(),
            returning: Vec::new(),
            returns: 0,
        }))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, SharedState> {
        self.0.lock()
    }
}

/// An endpoint of a shared receive context.
pub(super) struct Membership {
    shared: Arc<SharedStore>,
    /// Not 0.
    owner: Owner,
    /// Whether each success has an entry for the application.
    all: bool,
    /// The indices of the endpoint's peers, by place.
    indices: Vec<Option<(PeerKey, PeerIndex)>>,
}

impl Membership {
    pub(super) fn new(shared: &Arc<SharedStore>, owner: Owner, all: bool) -> Self {
        Self {
            shared: Arc::clone(shared),
            owner,
            all,
            indices: Vec::new(),
        }
    }

    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    /// The index of a peer.
    fn index(
        indices: &mut Vec<Option<(PeerKey, PeerIndex)>>,
        state: &mut SharedState,
        peer: PeerKey,
    ) -> PeerIndex {
        let place = peer.place();
        if indices.len() <= place {
            indices.resize(place + 1, None);
        }
        match &mut indices[place] {
            Some((known, index)) if *known == peer => {
                *index = state.find(*index);
                *index
            }
            other => {
                let index = state.add_peer();
                *other = Some((peer, index));
                index
            }
        }
    }
}

/// Where the receives of an endpoint are posted.
#[allow(
    clippy::large_enum_variant,
    reason = "one per endpoint; each arrival uses the store"
)]
enum Home {
    Own(Store),
    Shared(Box<Membership>),
}

/// See the module.
pub(super) struct Receives {
    home: Home,
    pub(super) arrivals: Arriving,
    /// Number of receives that have failed, and to whose buffers a peer still writes: they are
    /// reported later ([`Step::EndSink`](super::step::Step)).
    pub(super) failing: usize,
    spares: Spares,
}

impl std::fmt::Debug for Receives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receives").finish_non_exhaustive()
    }
}

impl Receives {
    fn with_home(home: Home) -> Self {
        Self {
            home,
            arrivals: Arriving::new(),
            failing: 0,
            spares: Spares::default(),
        }
    }

    /// `seed` is secret and random.
    pub(super) fn new(seed: u64) -> Self {
        Self::with_home(Home::Own(Store::new(seed)))
    }

    /// Of an endpoint of a shared receive context.
    pub(super) fn of_context(membership: Membership) -> Self {
        Self::with_home(Home::Shared(Box::new(membership)))
    }

    /// The endpoint's own store; `None`: receives are posted to a shared receive context.
    #[inline]
    pub(super) fn own(&mut self) -> Option<&mut Store> {
        match &mut self.home {
            Home::Own(store) => Some(store),
            Home::Shared(_) => None,
        }
    }

    /// Whether success of a receive has an entry although its flags do not ask for it: receives of
    /// a context are posted without knowledge of the endpoint.
    #[inline]
    pub(super) fn reports_all(&self) -> bool {
        matches!(&self.home, Home::Shared(member) if member.all)
    }

    /// Whether the entries of the messages in a multi-receive buffer can be in the queues of
    /// several endpoints.
    #[inline]
    pub(super) fn is_of_context(&self) -> bool {
        matches!(&self.home, Home::Shared(_))
    }

    #[inline]
    fn with<T>(&mut self, act: impl FnOnce(&mut Store) -> T) -> T {
        match &mut self.home {
            Home::Own(store) => act(store),
            Home::Shared(member) => act(&mut member.shared.lock().store),
        }
    }

    /// Number of receives of the endpoint's own that are posted, and of those that
    /// [`Self::unposted`] counts.
    #[inline]
    pub(super) fn len(&self) -> usize {
        let posted = match &self.home {
            Home::Own(store) => store.posted(),
            Home::Shared(_) => 0,
        };
        posted + self.unposted()
    }

    /// Number of receives that are not posted any more and have no entry yet: their messages are
    /// arriving, or they are [failing](Self::failing).
    #[inline]
    pub(super) fn unposted(&self) -> usize {
        self.arrivals.len() + self.failing
    }

    /// The receive of a message that arrives; `None`: it must be [stored](Self::store).
    #[inline]
    pub(super) fn arrive(&mut self, envelope: &Envelope) -> Option<Target> {
        match &mut self.home {
            Home::Own(store) => store.arrive(envelope, index_of(envelope.peer)),
            Home::Shared(member) => {
                let state = &mut *member.shared.lock();
                let peer = Membership::index(&mut member.indices, state, envelope.peer);
                state.arrive(envelope, peer)
            }
        }
    }

    /// Stores a message for which [`Self::arrive`] has just returned `None`, or returns it with its
    /// receive, which another thread has posted to the shared receive context meanwhile.
    ///
    /// `Err`: 2^24 messages are stored.
    pub(super) fn store(
        &mut self,
        envelope: Envelope,
        payload: Payload,
    ) -> Result<Option<(Stored, Target)>, ()> {
        let mut stored = Stored {
            owner: 0,
            envelope,
            payload,
        };
        match &mut self.home {
            Home::Own(store) => store
                .store(stored, index_of(envelope.peer))
                .map(|()| None)
                .ok_or(()),
            Home::Shared(member) => {
                stored.owner = member.owner;
                let state = &mut *member.shared.lock();
                let peer = Membership::index(&mut member.indices, state, envelope.peer);
                match state.arrive(&envelope, peer) {
                    Some(target) => Ok(Some((stored, target))),
                    None => state.store.store(stored, peer).map(|()| None).ok_or(()),
                }
            }
        }
    }

    /// The index of a peer in the shared receive context.
    pub(super) fn shared_index(&mut self, peer: PeerKey) -> Option<PeerIndex> {
        match &mut self.home {
            Home::Own(_) => None,
            Home::Shared(member) => {
                let state = &mut *member.shared.lock();
                Some(Membership::index(&mut member.indices, state, peer))
            }
        }
    }

    /// Number of messages that are stored in the shared receive context.
    #[cfg(test)]
    pub(super) fn stored_in_context(&self) -> usize {
        match &self.home {
            Home::Own(_) => 0,
            Home::Shared(member) => member.shared.lock().store.stored_len(),
        }
    }

    /// A copy of a payload, in memory that [`Self::recycle`] takes back.
    pub(super) fn copy(&mut self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = self.spares.take(payload.len());
        bytes.extend_from_slice(payload);
        bytes
    }

    /// As [`Self::copy`], from memory that a hostile process may change.
    ///
    /// # Safety
    /// `len` bytes are readable.
    pub(super) unsafe fn copy_from(&mut self, from: *const u8, len: usize) -> Vec<u8> {
        let mut bytes = self.spares.take(len);
        // SAFETY: the vector has the room, and the caller promises the source.
        unsafe {
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes
    }

    pub(super) fn recycle(&mut self, bytes: Vec<u8>) {
        self.spares.put(bytes);
    }

    /// A stored message, which leaves the store.
    pub(super) fn take(&mut self, key: StoredKey) -> Option<Stored> {
        self.with(|store| store.take(key))
    }

    /// As [`Store::finished`].
    pub(super) fn finished(&mut self, tagged: bool, multi: MultiBuffer) -> Release {
        self.with(|store| store.finished(tagged, multi))
    }

    /// Drops the stored messages of a peer whose payload is at the peer: it cannot be fetched any
    /// more. Receives of those that are claimed fail. Returns their session and their number: those
    /// of earlier sessions were dropped before.
    pub(super) fn drop_absent(&mut self, peer: PeerKey) -> Option<(Origin, u32)> {
        let me = match &self.home {
            Home::Own(_) => 0,
            Home::Shared(member) => member.owner,
        };
        let from = Cell::new(None);
        let count = self.with(|store| {
            store.lose_where(|stored| match &stored.payload {
                Payload::AtSender(origin, _) if stored.owner == me && origin.peer == peer => {
                    from.set(Some(*origin));
                    true
                }
                _ => false,
            })
        });
        Some((from.get()?, count))
    }

    /// Messages of `from` become messages of `into`. Returns the endpoint's messages that match
    /// now, and whether messages of others do, which are [pending](Self::take_pending).
    pub(super) fn merge(
        &mut self,
        from: PeerKey,
        into: PeerKey,
    ) -> (Vec<(StoredKey, Target)>, bool) {
        let member = match &mut self.home {
            Home::Own(store) => {
                let pairs = store.merge(index_of(from), index_of(into)).into_iter();
                let target = |(key, matched)| Some((key, store.target(&matched)?));
                return (pairs.filter_map(target).collect(), false);
            }
            Home::Shared(member) => member,
        };
        let state = &mut *member.shared.lock();
        let from = Membership::index(&mut member.indices, state, from);
        let into = Membership::index(&mut member.indices, state, into);
        state.merge(from, into);
        let own = state.take_pending(member.owner);
        (own, state.has_pending())
    }

    /// The endpoint's messages for which another endpoint has found a receive.
    pub(super) fn take_pending(&mut self) -> Vec<(StoredKey, Target)> {
        match &self.home {
            Home::Own(_) => Vec::new(),
            Home::Shared(member) => member.shared.lock().take_pending(member.owner),
        }
    }
}
