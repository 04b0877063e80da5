//! The paths that are walked, one instruction after the other.

use rdma_core_sys::{IBV_QPT_RC, IBV_QPT_UC};

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
    /// The survivor's window is invalidated with it.
    SendInvalidate,
    /// No connection leads there: the sender asks for a ring.
    DatagramFirst,
    Datagram,
    /// The ring has no room for it.
    DatagramWaits,
    /// The victim takes what its ring is full of, for which the survivor's datagram waits.
    DatagramAwaited,
    Write,
    WriteImm,
    Read,
    Add,
    Swap,
    /// With a wrong key: both queue pairs fail.
    WriteRefused,
    /// On an unreliable connection.
    SendUnreliable,
    /// Batches by `ibv_wr_*`: a message with its bytes inside,
    BuildInline,
    /// a write and a message of two pieces behind it,
    BuildBatch,
    /// a datagram,
    BuildDatagram,
    /// an atomic, an atomic write, a flush,
    BuildAdd,
    BuildAtomicWrite,
    BuildFlush,
    /// a window that is bound and invalidated,
    BuildBind,
    /// and one that is given up.
    BuildAbort,
    Receive,
    /// The survivor's message waits for it.
    ReceiveAwaited,
    SharedReceiveAwaited,
    PollMessage,
    /// By `ibv_start_poll`, `ibv_next_poll` and `ibv_end_poll`: a message and an own request.
    PollExtended,
    PollSend,
    PollFlush,
    /// The survivor's message waits in its segment, and the victim takes it from there: through its
    /// own receives, one that is held meanwhile, and through a shared queue.
    Pull,
    PullLarge,
    PullShared,
    /// By arming, and by sleeping.
    PullArm,
    PullEvent,
    /// `ibv_resize_cq` with completions inside.
    Resize,
    /// `ibv_rereg_mr` of the region that the survivor writes to.
    Reregister,
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
    pub(crate) const ALL: [Self; 48] = [
        Self::SendFirst,
        Self::SendInline,
        Self::SendRing,
        Self::SendLarge,
        Self::SendWakes,
        Self::SendShared,
        Self::SendSharedLarge,
        Self::SendInvalidate,
        Self::DatagramFirst,
        Self::Datagram,
        Self::DatagramWaits,
        Self::DatagramAwaited,
        Self::Write,
        Self::WriteImm,
        Self::Read,
        Self::Add,
        Self::Swap,
        Self::WriteRefused,
        Self::SendUnreliable,
        Self::BuildInline,
        Self::BuildBatch,
        Self::BuildDatagram,
        Self::BuildAdd,
        Self::BuildAtomicWrite,
        Self::BuildFlush,
        Self::BuildBind,
        Self::BuildAbort,
        Self::Receive,
        Self::ReceiveAwaited,
        Self::SharedReceiveAwaited,
        Self::PollMessage,
        Self::PollExtended,
        Self::PollSend,
        Self::PollFlush,
        Self::Pull,
        Self::PullLarge,
        Self::PullShared,
        Self::PullArm,
        Self::PullEvent,
        Self::Resize,
        Self::Reregister,
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
            | Self::SendInvalidate
            | Self::SendUnreliable
            | Self::BuildInline
            | Self::BuildBatch
            | Self::WriteImm => Delivers::Message,
            Self::SendShared | Self::SendSharedLarge => Delivers::Shared,
            Self::Datagram | Self::DatagramFirst | Self::BuildDatagram => Delivers::Datagram,
            _ => Delivers::Nothing,
        }
    }

    /// Bytes of what the call sends or writes.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::SendRing
            | Self::PollMessage
            | Self::PollExtended
            | Self::Pull
            | Self::PullShared
            | Self::PullArm
            | Self::PullEvent
            | Self::Datagram
            | Self::BuildDatagram => 1500,
            Self::DatagramWaits | Self::DatagramAwaited => 4096,
            Self::SendLarge | Self::SendSharedLarge | Self::PullLarge => 100_000,
            Self::Write | Self::WriteImm | Self::Read | Self::BuildBatch => 20_000,
            _ => 48,
        }
    }

    /// Whether the victim sent a message before, so that the ring is open.
    pub(crate) fn is_warm(self) -> bool {
        !matches!(
            self,
            Self::SendFirst
                | Self::DatagramFirst
                // A warm-up would take what is there.
                | Self::DatagramAwaited
                | Self::Connect
                | Self::Open
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
        ) || self.takes_awaited()
    }

    /// Whether the survivor has a datagram that waits for room in the victim's ring.
    pub(crate) fn fills_ring(self) -> bool {
        self == Self::DatagramAwaited
    }

    /// Whether that request goes to the queue pair with the shared queue.
    pub(crate) fn is_awaited_on_shared(self) -> bool {
        matches!(self, Self::SharedReceiveAwaited | Self::PullShared)
    }

    /// Whether the call itself takes that request, so that it has succeeded when the call returns.
    pub(crate) fn takes_awaited(self) -> bool {
        matches!(
            self,
            Self::Pull | Self::PullLarge | Self::PullShared | Self::PullArm | Self::PullEvent
        )
    }

    /// Whether it comes to a receive that was posted before.
    pub(crate) fn is_sent_to(self) -> bool {
        matches!(self, Self::PollMessage | Self::PollExtended)
    }

    /// What kind of queue pair the connection without a shared queue has.
    pub(crate) fn kind(self) -> u32 {
        if self == Self::SendUnreliable {
            IBV_QPT_UC
        } else {
            IBV_QPT_RC
        }
    }

    /// Whether the survivor hears of the end by the connection without a shared queue.
    pub(crate) fn is_reliable(self) -> bool {
        self.kind() == IBV_QPT_RC
    }

    /// Whether the call is one of `ibv_wr_*`.
    pub(crate) fn builds(self) -> bool {
        matches!(
            self,
            Self::BuildInline
                | Self::BuildBatch
                | Self::BuildDatagram
                | Self::BuildAdd
                | Self::BuildAtomicWrite
                | Self::BuildFlush
                | Self::BuildBind
                | Self::BuildAbort
        )
    }

    /// Whether it writes to the survivor's region,
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::WriteImm | Self::BuildBatch)
    }

    /// or invalidates its window,
    pub(crate) fn invalidates(self) -> bool {
        self == Self::SendInvalidate
    }

    /// or takes its word from 0 to 1.
    pub(crate) fn changes_word(self) -> bool {
        matches!(
            self,
            Self::Add | Self::Swap | Self::BuildAdd | Self::BuildAtomicWrite
        )
    }

    /// Whether its message has an immediate.
    pub(crate) fn has_imm(self) -> bool {
        matches!(self, Self::SendRing | Self::BuildBatch)
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
