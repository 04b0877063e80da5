//! The calls whose instructions are walked.

use rdma_core_sys::{IBV_QPT_RC, IBV_QPT_UC};

/// One call of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The first message to a process: creates the ring.
    SendFirst,
    SendInline,
    SendRing,
    SendLarge,
    /// The survivor sleeps, and the sender rings its doorbell.
    SendWakes,
    SendShared,
    SendSharedLarge,
    /// The message invalidates the survivor's window.
    SendInvalidate,
    /// Without a connection to the process: the sender requests a ring.
    DatagramFirst,
    Datagram,
    /// The ring is full.
    DatagramWaits,
    /// The victim takes messages from its full ring, for which the survivor's datagram waits.
    DatagramAwaited,
    Write,
    WriteImm,
    Read,
    Add,
    Swap,
    /// With an invalid key: both queue pairs fail.
    WriteRefused,
    /// On an unreliable connection.
    SendUnreliable,
    /// Batches by `ibv_wr_*`: an inline message,
    BuildInline,
    /// a write, followed by a message with two sges,
    BuildBatch,
    /// a datagram,
    BuildDatagram,
    /// an atomic, an atomic write, a flush,
    BuildAdd,
    BuildAtomicWrite,
    BuildFlush,
    /// a bind and an invalidation of a window,
    BuildBind,
    /// and an aborted batch.
    BuildAbort,
    Receive,
    /// The survivor's message waits for the receive.
    ReceiveAwaited,
    SharedReceiveAwaited,
    PollMessage,
    /// By `ibv_start_poll`, `ibv_next_poll` and `ibv_end_poll`: a message, and a request of the
    /// victim.
    PollExtended,
    PollSend,
    PollFlush,
    /// The survivor's message waits in the survivor's segment, and the victim pulls it: with its
    /// own receives, with one that is held meanwhile, and with a shared queue.
    Pull,
    PullLarge,
    PullShared,
    /// By arming the queue, and by sleeping.
    PullArm,
    PullEvent,
    /// `ibv_resize_cq` of a queue with completions.
    Resize,
    /// `ibv_rereg_mr` of the region that the survivor writes to.
    Reregister,
    Arm,
    GetEvent,
    Deregister,
    Fail,
    Destroy,
    /// RTR and RTS; the survivor is already connected.
    Connect,
    /// The whole initialization: segment, registry.
    Open,
}

/// The kind of message that the survivor may receive from the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivers {
    Nothing,
    /// A message to the connected queue pair.
    Message,
    /// A message that consumes a receive of the shared queue.
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

    /// Number of bytes that the call sends or writes.
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

    /// Whether the victim has sent a message before the call, so that the ring exists.
    pub(crate) fn is_warm(self) -> bool {
        !matches!(
            self,
            Self::SendFirst
                | Self::DatagramFirst
                // waiting for an earlier message would already take the messages from the ring
                | Self::DatagramAwaited
                | Self::Connect
                | Self::Open
        )
    }

    /// Whether the survivor is connected to the victim.
    pub(crate) fn is_connected(self) -> bool {
        !matches!(self, Self::DatagramFirst | Self::Open)
    }

    /// Whether a request of the survivor waits for the victim.
    pub(crate) fn is_awaited(self) -> bool {
        matches!(
            self,
            Self::ReceiveAwaited | Self::SharedReceiveAwaited | Self::Connect
        ) || self.takes_awaited()
    }

    /// Whether a datagram of the survivor waits for room in the victim's ring.
    pub(crate) fn fills_ring(self) -> bool {
        self == Self::DatagramAwaited
    }

    /// Whether that request is sent to the queue pair with the shared queue.
    pub(crate) fn is_awaited_on_shared(self) -> bool {
        matches!(self, Self::SharedReceiveAwaited | Self::PullShared)
    }

    /// Whether the call takes that request, so that it has completed when the call returns.
    pub(crate) fn takes_awaited(self) -> bool {
        matches!(
            self,
            Self::Pull | Self::PullLarge | Self::PullShared | Self::PullArm | Self::PullEvent
        )
    }

    /// Whether the request is sent to a receive that was posted before.
    pub(crate) fn is_sent_to(self) -> bool {
        matches!(self, Self::PollMessage | Self::PollExtended)
    }

    /// The type of the queue pair without a shared queue.
    pub(crate) fn kind(self) -> u32 {
        if self == Self::SendUnreliable {
            IBV_QPT_UC
        } else {
            IBV_QPT_RC
        }
    }

    /// Whether the survivor detects the victim's end through the connection without a shared queue.
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

    /// Whether the call writes to the survivor's region,
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::WriteImm | Self::BuildBatch)
    }

    /// invalidates its window,
    pub(crate) fn invalidates(self) -> bool {
        self == Self::SendInvalidate
    }

    /// or changes its word from 0 to 1.
    pub(crate) fn changes_word(self) -> bool {
        matches!(
            self,
            Self::Add | Self::Swap | Self::BuildAdd | Self::BuildAtomicWrite
        )
    }

    /// Whether the message has immediate data.
    pub(crate) fn has_imm(self) -> bool {
        matches!(self, Self::SendRing | Self::BuildBatch)
    }

    /// Whether the victim may disconnect normally: the survivor then detects that when it sends, as
    /// on a wire.
    pub(crate) fn lets_go(self) -> bool {
        self == Self::Destroy
    }

    /// Instructions between two kills of a full walk.
    pub(crate) fn stride(self) -> usize {
        match self {
            // nearly all instructions open files, and walking to the end of many takes long
            Self::Open => 997,
            Self::Connect | Self::DatagramFirst => 23,
            _ => 1,
        }
    }
}
