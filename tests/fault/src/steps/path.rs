//! The paths that are walked, one instruction after the other.

/// One call of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The first message to a process: opens the ring.
    SendFirst,
    SendInline,
    SendRing,
    SendLarge,
    /// The survivor sleeps and is rung for it.
    SendWakes,
    SendShared,
    SendSharedLarge,
    /// No connection leads there: the sender asks for a ring.
    DatagramFirst,
    Datagram,
    Write,
    WriteImm,
    Read,
    Add,
    Swap,
    /// With a wrong key: both queue pairs fail.
    WriteRefused,
    Receive,
    /// The survivor's message waits for it.
    ReceiveAwaited,
    SharedReceiveAwaited,
    PollMessage,
    PollSend,
    PollFlush,
    Arm,
    GetEvent,
    Deregister,
    Fail,
    Destroy,
    /// RTR and RTS, while the survivor is connected already.
    Connect,
    /// The whole start: segment, registry.
    Open,
}

/// What the survivor may find that came from the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivers {
    Nothing,
    /// A message to the connected queue pair.
    Message,
    /// One that takes a receive of the shared queue.
    Shared,
    Datagram,
}

impl Path {
    pub(crate) const ALL: [Self; 28] = [
        Self::SendFirst,
        Self::SendInline,
        Self::SendRing,
        Self::SendLarge,
        Self::SendWakes,
        Self::SendShared,
        Self::SendSharedLarge,
        Self::DatagramFirst,
        Self::Datagram,
        Self::Write,
        Self::WriteImm,
        Self::Read,
        Self::Add,
        Self::Swap,
        Self::WriteRefused,
        Self::Receive,
        Self::ReceiveAwaited,
        Self::SharedReceiveAwaited,
        Self::PollMessage,
        Self::PollSend,
        Self::PollFlush,
        Self::Arm,
        Self::GetEvent,
        Self::Deregister,
        Self::Fail,
        Self::Destroy,
        Self::Connect,
        Self::Open,
    ];

    pub(crate) fn name(self) -> String {
        format!("{self:?}")
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }

    pub(crate) fn delivers(self) -> Delivers {
        match self {
            Self::SendFirst
            | Self::SendInline
            | Self::SendRing
            | Self::SendLarge
            | Self::SendWakes
            | Self::WriteImm => Delivers::Message,
            Self::SendShared | Self::SendSharedLarge => Delivers::Shared,
            Self::Datagram | Self::DatagramFirst => Delivers::Datagram,
            _ => Delivers::Nothing,
        }
    }

    /// Bytes of what the call sends or writes.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::SendRing | Self::PollMessage | Self::Datagram => 1500,
            Self::SendLarge | Self::SendSharedLarge => 100_000,
            Self::Write | Self::WriteImm | Self::Read => 20_000,
            _ => 48,
        }
    }

    /// Whether the victim sent a message before, so that the ring is open.
    pub(crate) fn is_warm(self) -> bool {
        !matches!(
            self,
            Self::SendFirst | Self::DatagramFirst | Self::Connect | Self::Open
        )
    }

    /// Whether the survivor is connected to the victim.
    pub(crate) fn is_connected(self) -> bool {
        !matches!(self, Self::DatagramFirst | Self::Open)
    }

    /// Whether the survivor has a request that waits for the victim.
    pub(crate) fn is_awaited(self) -> bool {
        matches!(
            self,
            Self::ReceiveAwaited | Self::SharedReceiveAwaited | Self::Connect
        )
    }

    /// Whether the victim may let go of the connection in good order: then the survivor hears of it when
    /// it sends, as it would on a wire.
    pub(crate) fn lets_go(self) -> bool {
        self == Self::Destroy
    }

    /// Instructions between two kills of a full walk.
    pub(crate) fn stride(self) -> usize {
        match self {
            // Nearly all of them are spent in opening files, and a walk to the end of many takes long.
            Self::Open => 997,
            Self::Connect | Self::DatagramFirst => 23,
            _ => 1,
        }
    }
}
