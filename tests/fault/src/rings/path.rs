//! The calls on a ring whose instructions are walked.

use super::SHORT;

/// One call of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    // the victim is the sender
    /// To a cold ring: the arrival is noted.
    Post,
    PostHot,
    /// The longest payload, in three pieces.
    PostLong,
    /// The message does not fit before the end of the ring.
    PostPadded,
    /// The survivor sleeps.
    PostWakes,
    /// The survivor's queue is armed for solicited messages.
    PostSolicited,
    /// The ring is full.
    PostFull,
    /// The ring was full at the last look, and the survivor has consumed since.
    PostRoom,
    /// The ring is full, and the survivor offers a larger one.
    PostMoves,
    /// The same with the longest payload of the larger ring.
    PostMovesLong,
    /// The survivor's queue pair is in ERR.
    PostEnded,
    /// The whole wait for room: arms the queue, asks for a wake-up, posts again.
    Await,
    AwaitEnded,
    Positions,
    // the victim is the receiver
    PollEmpty,
    Poll,
    Consume,
    /// The survivor waits for room.
    ConsumeWakes,
    /// The survivor waits for the delivery of one message.
    ConsumeDelivers,
    TakePadded,
    /// Offers a larger ring to the survivor, which waits for room.
    Grow,
    /// The survivor has moved to the larger ring.
    PollMoved,
    Arrivals,
    Heat,
    Cool,
    /// Arms the queue and examines its hot ring once more.
    Arm,
    /// The last poll of a ring of a queue pair in ERR.
    PollEnd,
    // both
    Create,
    Attach,
    /// The survivor waits for room in the ring of the failing queue pair.
    Fail,
    Reset,
    Destroy,
}

impl Path {
    pub(crate) const ALL: [Self; 32] = [
        Self::Post,
        Self::PostHot,
        Self::PostLong,
        Self::PostPadded,
        Self::PostWakes,
        Self::PostSolicited,
        Self::PostFull,
        Self::PostRoom,
        Self::PostMoves,
        Self::PostMovesLong,
        Self::PostEnded,
        Self::Await,
        Self::AwaitEnded,
        Self::Positions,
        Self::PollEmpty,
        Self::Poll,
        Self::Consume,
        Self::ConsumeWakes,
        Self::ConsumeDelivers,
        Self::TakePadded,
        Self::Grow,
        Self::PollMoved,
        Self::Arrivals,
        Self::Heat,
        Self::Cool,
        Self::Arm,
        Self::PollEnd,
        Self::Create,
        Self::Attach,
        Self::Fail,
        Self::Reset,
        Self::Destroy,
    ];

    pub(crate) fn name(self) -> String {
        format!("{self:?}")
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }

    /// Whether the two processes are connected before the call.
    pub(crate) fn is_connected(self) -> bool {
        self != Self::Create
    }

    /// Number of short messages that the victim posts before the call,
    pub(crate) fn posted(self) -> u64 {
        match self {
            Self::PostFull
            | Self::PostRoom
            | Self::PostMoves
            | Self::PostMovesLong
            | Self::Await
            | Self::AwaitEnded => 63,
            Self::PostPadded => 40,
            Self::PostEnded | Self::Positions => 2,
            Self::Attach | Self::Create => 0,
            _ => 1,
        }
    }

    /// and of them, those that the survivor takes before the call.
    pub(crate) fn taken(self) -> u64 {
        match self {
            Self::PostPadded => 40,
            Self::PostRoom => 10,
            Self::Positions => 1,
            _ => 0,
        }
    }

    /// Number of short messages that the survivor posts first, and that the victim takes.
    pub(crate) fn received(self) -> u64 {
        match self {
            Self::TakePadded => 40,
            Self::PollEnd => 2,
            Self::Attach | Self::Create => 0,
            _ => 1,
        }
    }

    /// Lengths of the messages that the survivor posts then, and that the victim does not take.
    pub(crate) fn given(self) -> Vec<usize> {
        match self {
            Self::ConsumeWakes | Self::Grow | Self::Fail => vec![SHORT; 63],
            // 10 of them in the larger ring
            Self::PollMoved => vec![SHORT; 73],
            Self::TakePadded => vec![1984],
            Self::Poll
            | Self::Consume
            | Self::ConsumeDelivers
            | Self::Arrivals
            | Self::Heat
            | Self::Cool
            | Self::Arm
            | Self::Reset
            | Self::Destroy
            | Self::Attach => vec![SHORT],
            _ => Vec::new(),
        }
    }

    /// Whether the call consumes a message or a marker.
    pub(crate) fn consumes(self) -> bool {
        matches!(
            self,
            Self::Consume
                | Self::ConsumeWakes
                | Self::ConsumeDelivers
                | Self::TakePadded
                | Self::PollMoved
        )
    }

    /// Whether the call sends a message, if it has an effect.
    pub(crate) fn delivers(self) -> bool {
        matches!(
            self,
            Self::Post
                | Self::PostHot
                | Self::PostLong
                | Self::PostPadded
                | Self::PostWakes
                | Self::PostSolicited
                | Self::PostRoom
                | Self::PostMoves
                | Self::PostMovesLong
        )
    }

    /// Whether the survivor grows its ring before the call.
    pub(crate) fn moves(self) -> bool {
        matches!(self, Self::PostMoves | Self::PostMovesLong)
    }

    /// Number of messages that the victim takes last before the call.
    pub(crate) fn drained(self) -> u32 {
        if self == Self::PollMoved { 63 } else { 0 }
    }

    /// Whether the call may send a message, if the survivor makes room.
    pub(crate) fn may_deliver(self) -> bool {
        self.delivers() || matches!(self, Self::Await | Self::PostFull)
    }

    /// Number of bytes of that message.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::PostLong | Self::PostPadded => 1984,
            Self::PostMovesLong => 8128,
            _ => 8,
        }
    }

    /// Whether the end of the call wakes the survivor.
    pub(crate) fn wakes(self) -> bool {
        matches!(
            self,
            Self::PostWakes
                | Self::PostSolicited
                | Self::ConsumeWakes
                | Self::ConsumeDelivers
                | Self::Grow
                | Self::Fail
        )
    }

    /// Whether the survivor waits for a change of the victim's ring.
    pub(crate) fn is_awaited(self) -> bool {
        matches!(
            self,
            Self::ConsumeWakes | Self::ConsumeDelivers | Self::Grow | Self::Fail
        )
    }

    /// Whether the survivor's queue pair is in ERR before the call.
    pub(crate) fn is_ended(self) -> bool {
        matches!(self, Self::PostEnded | Self::AwaitEnded)
    }

    /// Whether the victim leaves the connection by the call or before it: the survivor then detects
    /// that when it sends, as on a wire.
    pub(crate) fn lets_go(self) -> bool {
        matches!(
            self,
            Self::Fail | Self::Reset | Self::Destroy | Self::PollEnd
        )
    }

    /// Instructions between two kills of a full walk.
    pub(crate) fn stride(self) -> usize {
        match self {
            Self::Create | Self::Attach | Self::Grow | Self::Reset | Self::Destroy => 7,
            // most of them copy the payload
            Self::PostMovesLong => 23,
            _ => 1,
        }
    }
}
