//! The state of a long message that the receiver reads. `docs/protocol-rdm.md`, "Long messages".

use super::core::link::LinkKey;
use crate::mr::{Source, SourceKeys, Withdrawn};
use crate::verbs::{RemoteAddr, Rkey};

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

/// The end of a message, which its sender was asked to write, while the receiver reads the begin.
#[derive(Debug)]
pub(super) struct Push {
    /// Offset of its first byte.
    pub(super) offset: u64,
    pub(super) sink: Sink,
}

/// The registration of the part of a receive that its sender writes.
#[derive(Debug)]
pub(super) enum Sink {
    /// The sender may write.
    Open(Source),
    /// A WRITE is being executed, and no other one can begin.
    Ends(Withdrawn),
}

impl Sink {
    /// Ends the registration of a part that the sender does not write any more, so that no peer
    /// writes when this has succeeded. Does not wait.
    ///
    /// # Errors
    /// A WRITE is being executed, and no other one can begin. The caller ends it later.
    pub(super) fn end(self, keys: &mut SourceKeys) -> Result<(), Withdrawn> {
        let withdrawn = match self {
            Self::Open(source) => keys.withdraw(source),
            Self::Ends(withdrawn) => Some(withdrawn),
        };
        withdrawn.map_or(Ok(()), Withdrawn::end)
    }
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
