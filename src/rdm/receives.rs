//! Posted receives, messages that no receive has matched, and messages that arrive in parts.

use super::core::Origin;
use super::iov::Iov;
use super::link::LinkKey;
use super::operations::TxKey;
use super::peer::{PeerKey, PeerMark};
use super::slab::{Key, Slab};
use crate::PeerIndex;
use crate::flags::Flags;
use crate::matching::{Matched, Matching, MultiId, Release, Want};
use crate::mr::Desc;
use crate::queue::Completion;
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::OpId;

/// Marks keys of receives.
#[derive(Debug)]
pub(super) enum RxMark {}
pub(super) type RxKey = Key<RxMark>;

/// Marks keys of stored messages.
pub(super) enum StoredMark {}
pub(super) type StoredKey = Key<StoredMark>;

/// Marks keys of messages that arrive in parts.
pub(super) enum ArrivalMark {}
pub(super) type ArrivalKey = Key<ArrivalMark>;

/// A posted receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    pub(super) iov: Iov,
    /// The descriptor of all buffers, or NULL; `several`: they have several.
    pub(super) desc: Desc,
    pub(super) several: bool,
    pub(super) context: usize,
    pub(super) tagged: bool,
    /// Whether success has an entry for the application.
    pub(super) wanted: bool,
}

/// The memory of a matched message: a receive, or a part of a multi-receive buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) receive: Receive,
    /// The buffer and the key of its receive.
    pub(super) multi: Option<(MultiId, RxKey)>,
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
}

/// A message without receive.
#[derive(Debug)]
pub(super) struct Stored {
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
    /// Number of bytes that have arrived.
    pub(super) arrived: u64,
    /// How it is read; `None`: it arrives in parts.
    pub(super) pull: Option<Pull>,
}

/// A message that is read from the memory of its sender.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pull {
    pub(super) from: (RemoteAddr, Rkey),
    /// Number of bytes to be read: those that fit into the receive.
    pub(super) len: u64,
    /// Offset of the next piece.
    pub(super) next: u64,
    /// Number of READs that have not completed.
    pub(super) reads: u32,
    /// Number of links that have broken since the last READ that has succeeded, and the last one.
    pub(super) breaks: u32,
    pub(super) broken: Option<LinkKey>,
    /// The device has refused the post of a READ.
    pub(super) refused: bool,
    pub(super) state: PullState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullState {
    /// READs are posted.
    Reads,
    /// The message cannot be read; when the READs have completed, it is asked for in parts.
    Refused,
    /// The session has ended; when the READs have completed, the receive fails.
    Failed,
}

type Messages = Matching<RxKey, StoredKey>;

/// Memory of stored payloads that is kept for reuse.
const KEPT: usize = 256;

/// See the module.
pub(super) struct Receives {
    tagged: Messages,
    untagged: Messages,
    posted: Slab<RxMark, Receive>,
    stored: Slab<StoredMark, Stored>,
    pub(super) arrivals: Slab<ArrivalMark, Arrival>,
    spare: Vec<Vec<u8>>,
}

impl std::fmt::Debug for Receives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receives").finish_non_exhaustive()
    }
}

/// The index of a peer in matching.
#[inline]
pub(super) fn index_of(peer: Key<PeerMark>) -> PeerIndex {
    // 24 bits
    PeerIndex(peer.place() as u32)
}

impl Receives {
    /// `seed` is secret and random.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            tagged: Matching::new(seed, 0, 0),
            untagged: Matching::new(!seed, 0, 0),
            posted: Slab::new(),
            stored: Slab::new(),
            arrivals: Slab::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn messages(&mut self, tagged: bool) -> &mut Messages {
        if tagged {
            &mut self.tagged
        } else {
            &mut self.untagged
        }
    }

    /// Number of receives that are posted, or whose message is arriving.
    pub(super) fn len(&self) -> usize {
        self.posted.len() + self.arrivals.len()
    }

    /// The receive of a message that arrives; `None`: it must be [stored](Self::store).
    #[inline]
    pub(super) fn arrive(&mut self, envelope: &Envelope) -> Option<Target> {
        let tag = envelope.tag.unwrap_or_default();
        let peer = index_of(envelope.peer);
        let tagged = envelope.tag.is_some();
        let matched = self.messages(tagged).arrive(tag, peer, envelope.len)?;
        self.target(&matched)
    }

    #[inline]
    fn target(&mut self, matched: &Matched<RxKey>) -> Option<Target> {
        let Some(piece) = matched.piece else {
            let receive = self.posted.remove(matched.receive)?;
            return Some(Target {
                receive,
                multi: None,
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
        })
    }

    /// Stores a message that no receive matches. `None`: 2^24 messages are stored.
    pub(super) fn store(&mut self, envelope: Envelope, payload: Payload) -> Option<()> {
        let stored = Stored { envelope, payload };
        let key = self.stored.insert(stored)?;
        let tag = envelope.tag.unwrap_or_default();
        let peer = index_of(envelope.peer);
        let tagged = envelope.tag.is_some();
        self.messages(tagged).store(tag, peer, envelope.len, key);
        Some(())
    }

    /// A copy of a payload, in memory that [`Self::recycle`] takes back.
    pub(super) fn copy(&mut self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(payload);
        bytes
    }

    pub(super) fn recycle(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < KEPT {
            self.spare.push(bytes);
        }
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

    /// A message in a multi-receive buffer is complete.
    pub(super) fn finished(&mut self, tagged: bool, (buffer, key): (MultiId, RxKey)) -> Release {
        let release = self.messages(tagged).finished(buffer);
        if release != Release::Held {
            self.posted.remove(key);
        }
        release
    }

    /// Cancels a posted receive. `None`: none is posted. `Some(None)`: messages are being received
    /// into its buffer; the last of them reports the end ([`Release::Cancelled`]).
    pub(super) fn cancel(&mut self, context: usize) -> Option<Option<Completion>> {
        for tagged in [true, false] {
            if let Some(cancelled) = self.messages(tagged).cancel(context) {
                if !cancelled.released {
                    return Some(None);
                }
                let receive = self.posted.remove(cancelled.receive)?;
                return Some(Some(completion_of(&receive)));
            }
        }
        None
    }

    /// Drops the stored messages of a peer whose payload is at the peer: it cannot be fetched any
    /// more.
    pub(super) fn drop_absent(&mut self, peer: PeerKey) {
        let stored = &mut self.stored;
        for messages in [&mut self.tagged, &mut self.untagged] {
            messages.retain(|message, _| {
                let payload = stored.get(message.payload).map(|stored| &stored.payload);
                let absent =
                    matches!(payload, Some(Payload::AtSender(origin, _)) if origin.peer == peer);
                if absent {
                    stored.remove(message.payload);
                }
                !absent
            });
        }
    }

    /// Messages of `from` become messages of `into`. Returns the pairs that match now.
    pub(super) fn merge(&mut self, from: PeerKey, into: PeerKey) -> Vec<(StoredKey, Target)> {
        let mut pairs = Vec::new();
        for tagged in [true, false] {
            let (from, into) = (index_of(from), index_of(into));
            self.messages(tagged).merge(from, into, |message, matched| {
                pairs.push((message.payload, matched));
            });
        }
        let target = |(stored, matched)| Some((stored, self.target(&matched)?));
        pairs.into_iter().filter_map(target).collect()
    }
}

/// The entry of a receive, without message.
pub(super) fn completion_of(receive: &Receive) -> Completion {
    let kind = if receive.tagged {
        Flags::TAGGED
    } else {
        Flags::MSG
    };
    Completion::new(receive.context, Flags::RECV | kind)
}
