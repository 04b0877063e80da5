//! Searches of the stored messages: `FI_PEEK`, `FI_CLAIM`, `FI_DISCARD`
//! (`fi_tagged(3)`), on an endpoint or on a shared receive context.

#![allow(
    unsafe_code,
    reason = "reads and writes a claim in the application's fi_context"
)]

use super::receive::Receive;
use super::receives::{Envelope, Owner, Store};
use super::recv::SEARCHES;
use super::table_keys::StoredKey;
use crate::errno::{FiErrno, Result};
use crate::flags::Flags;
use crate::matching::{Claim, Message, Want};

/// What a search does with the first message that it finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    Peek,
    /// Removes it from the list, and stores the claim in the context.
    Claim,
    /// Drops it.
    Discard,
    /// Receives the message of the claim in the context.
    Redeem,
    /// Drops the message of the claim in the context.
    DiscardClaimed,
}

impl Search {
    /// The search that these flags ask for.
    ///
    /// # Errors
    /// `EINVAL`: all three flags, or `FI_CLAIM` without a context. `EBADFLAGS`: `FI_DISCARD` alone.
    pub(super) fn of(flags: Flags, context: usize) -> Result<Self> {
        let has = |flag| flags.contains(flag);
        if has(Flags::CLAIM) && context == 0 || has(SEARCHES) {
            return Err(FiErrno::EINVAL);
        }
        match (has(Flags::PEEK), has(Flags::CLAIM), has(Flags::DISCARD)) {
            (true, true, _) => Ok(Self::Claim),
            (true, false, true) => Ok(Self::Discard),
            (true, false, false) => Ok(Self::Peek),
            (false, true, true) => Ok(Self::DiscardClaimed),
            (false, true, false) => Ok(Self::Redeem),
            (false, false, _) => Err(FiErrno::EBADFLAGS),
        }
    }

    /// Whether the search is for a message that was claimed before.
    pub(super) fn is_of_claim(self) -> bool {
        matches!(self, Self::Redeem | Self::DiscardClaimed)
    }
}

/// A message that a search has found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// The endpoint at which it has arrived.
    pub(super) owner: Owner,
    pub(super) key: StoredKey,
    pub(super) tag: u64,
    pub(super) len: u64,
    pub(super) envelope: Option<Envelope>,
}

impl Store {
    /// Searches. `None`: there is no such message.
    ///
    /// # Safety
    /// If the search uses a claim, the context of the receive is the address of a
    /// `struct fi_context`.
    pub(super) unsafe fn search(
        &mut self,
        search: Search,
        want: &Want,
        receive: &Receive,
    ) -> Option<Found> {
        let context = std::ptr::with_exposed_provenance_mut::<u64>(receive.context);
        let messages = self.messages(receive.tagged);
        let message = match search {
            Search::Peek => messages.peek(want)?,
            Search::Discard => messages.discard(want)?,
            Search::Claim => {
                let (claim, message) = messages.claim(want)?;
                // SAFETY: the caller promises the structure, which has room for a pointer.
                unsafe { context.write_unaligned(claim.to_bits()) };
                message
            }
            Search::Redeem | Search::DiscardClaimed => {
                // SAFETY: the caller promises the structure, which has room for a pointer.
                let claim = Claim::from_bits(unsafe { context.read_unaligned() });
                messages.redeem(claim)?
            }
        };
        Some(self.found(&message))
    }

    fn found(&self, message: &Message<StoredKey>) -> Found {
        let stored = self.stored(message.payload);
        Found {
            owner: stored.map_or(0, |stored| stored.owner),
            key: message.payload,
            tag: message.tag,
            len: message.len,
            envelope: stored.map(|stored| stored.envelope),
        }
    }
}
