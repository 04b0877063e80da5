//! The subjects of measurements: each is a pair of processes with a connection between them.

mod device;
pub(crate) mod fabric;
mod machine;

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use libfabric_sys::FI_ATOMIC;

use crate::op::Op;

pub(crate) use device::{Device, Ring, verbs};
pub(crate) use fabric::Fabric;

/// Environment: the libfabric with the provider `verbs`. Without it the cases have no such peer.
pub(crate) const VERBS_LIBFABRIC: &str = "WEFT_VERBS_LIBFABRIC";
/// Environment: the directory of the drop-in libibverbs and librdmacm.
pub(crate) const VERBS_DROPIN: &str = "WEFT_VERBS_DROPIN";

/// The first process measures; the second one is its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    First,
    Second,
}

impl Side {
    pub(crate) fn is_first(self) -> bool {
        self == Self::First
    }
}

/// One process's end of a subject.
pub(crate) trait Subject {
    /// The address of this end, as one line, for the `connect` of the other end.
    fn address(&mut self) -> String;
    /// Connects to the other end, which calls `connect` at the same time.
    fn connect(&mut self, other: &str);
    /// This end's part of `count` operations of `len` bytes. The result of the first side is the
    /// time of one operation in nanoseconds; the result of the second side is not used.
    fn run(&mut self, op: Op, len: usize, count: u64) -> f64;
}

/// A kind of subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The machine without a device.
    Machine,
    /// softverbs, through verbs.
    Device,
    /// The same; the peer's memory is a buffer that the device allocates.
    DeviceBuffer,
    /// The same; receives come from a shared receive queue.
    DeviceShared,
    /// The same, with XRC.
    DeviceXrc,
    /// Receive rings of softverbs.
    DeviceRing,
    /// weft's message endpoints on `soft0`.
    WeftMsg,
    /// libfabric's `tcp`, message endpoints.
    Tcp,
    /// libfabric's `shm`, reliable datagrams, untagged.
    Shm,
    /// weft's reliable datagram endpoints on `soft0`, for RMA and atomics.
    WeftRdm,
    /// The same; weft allocates the peer's memory.
    WeftRdmAllocated,
    /// `shm`, for RMA and atomics.
    ShmRdm,
    /// weft's reliable datagram endpoints on `soft0`, tagged messages.
    WeftTagged,
    /// weft's reliable datagram endpoints without receive rings, on RC: tagged messages, RMA.
    WeftTaggedRc,
    WeftRdmRc,
    /// The same on XRC.
    WeftTaggedXrc,
    WeftRdmXrc,
    /// `shm`, tagged messages.
    ShmTagged,
    /// libfabric's `verbs` on `soft0`, message endpoints.
    VerbsMsg,
    /// weft's message endpoints on `soft0`, for atomics.
    WeftAtomic,
    /// libfabric's `verbs` on `soft0`, message endpoints for atomics.
    VerbsAtomic,
    /// `verbs;ofi_rxm` on `soft0`, for RMA and atomics.
    RxmRdm,
    /// `verbs;ofi_rxm` on `soft0`, tagged messages.
    RxmTagged,
}

const NAMES: [(Kind, &str); 23] = [
    (Kind::Machine, "machine"),
    (Kind::Device, "softverbs"),
    (Kind::DeviceBuffer, "softverbs-buffer"),
    (Kind::DeviceShared, "softverbs-srq"),
    (Kind::DeviceXrc, "softverbs-xrc"),
    (Kind::DeviceRing, "softverbs-ring"),
    (Kind::WeftMsg, "weft"),
    (Kind::Tcp, "tcp"),
    (Kind::Shm, "shm"),
    (Kind::WeftRdm, "weft-rdm"),
    (Kind::WeftRdmAllocated, "weft-rdm-allocated"),
    (Kind::ShmRdm, "shm-rdm"),
    (Kind::WeftTagged, "weft-tagged"),
    (Kind::WeftTaggedRc, "weft-tagged-rc"),
    (Kind::WeftRdmRc, "weft-rdm-rc"),
    (Kind::WeftTaggedXrc, "weft-tagged-xrc"),
    (Kind::WeftRdmXrc, "weft-rdm-xrc"),
    (Kind::ShmTagged, "shm-tagged"),
    (Kind::VerbsMsg, "fi-verbs"),
    (Kind::WeftAtomic, "weft-atomic"),
    (Kind::VerbsAtomic, "fi-verbs-atomic"),
    (Kind::RxmRdm, "fi-verbs-rxm-rdm"),
    (Kind::RxmTagged, "fi-verbs-rxm-tagged"),
];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES
            .iter()
            .find(|(kind, _)| kind == self)
            .map_or("", |x| x.1);
        f.write_str(name)
    }
}

impl FromStr for Kind {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let kind = NAMES.iter().find(|(_, name)| *name == text);
        kind.map(|x| x.0).ok_or(format!("no subject {text}"))
    }
}

impl Kind {
    /// Opens this process's end.
    pub(crate) fn open(self, side: Side) -> Box<dyn Subject> {
        let rdm = |provider, allocated| {
            Fabric::with_memory(provider, fabric::Endpoint::Rdm, side, FI_ATOMIC, allocated)
        };
        let msg_atomic =
            |provider| Fabric::with_caps(provider, fabric::Endpoint::Msg, side, FI_ATOMIC);
        match self {
            Self::Machine => Box::new(machine::Machine::open(side)),
            Self::Device => Box::new(Device::open(side)),
            Self::DeviceBuffer => Box::new(Device::open_with_buffer(side)),
            Self::DeviceShared => Box::new(Device::open_shared(side)),
            Self::DeviceXrc => Box::new(Device::open_xrc(side)),
            Self::DeviceRing => Box::new(Ring::open(side)),
            Self::WeftMsg => Box::new(Fabric::open("weft", fabric::Endpoint::Msg, side)),
            Self::Tcp => Box::new(Fabric::open("tcp", fabric::Endpoint::Msg, side)),
            Self::Shm => Box::new(Fabric::open("shm", fabric::Endpoint::Rdm, side)),
            Self::WeftRdm | Self::WeftRdmRc | Self::WeftRdmXrc => Box::new(rdm("weft", false)),
            Self::WeftRdmAllocated => Box::new(rdm("weft", true)),
            Self::ShmRdm => Box::new(rdm("shm", false)),
            Self::WeftTagged | Self::WeftTaggedRc | Self::WeftTaggedXrc => {
                Box::new(Fabric::open("weft", fabric::Endpoint::Tagged, side))
            }
            Self::ShmTagged => Box::new(Fabric::open("shm", fabric::Endpoint::Tagged, side)),
            Self::VerbsMsg => Box::new(Fabric::open("verbs", fabric::Endpoint::Msg, side)),
            Self::WeftAtomic => Box::new(msg_atomic("weft")),
            Self::VerbsAtomic => Box::new(msg_atomic("verbs")),
            Self::RxmRdm => Box::new(rdm("verbs;ofi_rxm", false)),
            Self::RxmTagged => Box::new(Fabric::open(
                "verbs;ofi_rxm",
                fabric::Endpoint::Tagged,
                side,
            )),
        }
    }

    /// The environment of the processes of this subject, besides that of all.
    pub(crate) fn environment(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::WeftTaggedRc | Self::WeftRdmRc => &[("SOFTVERBS_RING", "0")],
            Self::WeftTaggedXrc | Self::WeftRdmXrc => &[("FI_WEFT_XRC", "1")],
            _ => &[],
        }
    }

    /// Whether libfabric's provider `verbs` runs this subject, on the drop-in libraries.
    pub(crate) fn needs_verbs(self) -> bool {
        matches!(
            self,
            Self::VerbsMsg | Self::VerbsAtomic | Self::RxmRdm | Self::RxmTagged
        )
    }

    /// False if the libraries of this subject are missing ([`VERBS_LIBFABRIC`]).
    pub(crate) fn is_available(self) -> bool {
        !self.needs_verbs() || std::env::var_os(VERBS_LIBFABRIC).is_some()
    }
}

/// Panics in a wait that lasts longer than 60 s. The clock is read once in 2^22 rounds.
#[derive(Default)]
pub(crate) struct Patience {
    round: u32,
    since: Option<Instant>,
}

impl Patience {
    /// One round of waiting.
    #[inline]
    pub(crate) fn wait(&mut self) {
        self.round = self.round.wrapping_add(1);
        if self.round.is_multiple_of(1 << 22) {
            let since = *self.since.get_or_insert_with(Instant::now);
            assert!(since.elapsed() < Duration::from_secs(60), "no message");
        }
    }
}

/// Processor time of this process so far, in nanoseconds.
pub(crate) fn cpu_nanos() -> f64 {
    // SAFETY: a structure on the stack.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time);
        time
    };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Processor time per second while `count` seconds pass, and another thread of this process waits.
pub(crate) fn idle(count: u64) -> f64 {
    // the waiting thread sleeps by then
    std::thread::sleep(Duration::from_millis(100));
    let before = cpu_nanos();
    std::thread::sleep(Duration::from_secs(count));
    (cpu_nanos() - before) / count as f64
}
