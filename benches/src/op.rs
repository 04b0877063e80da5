//! The operations of a subject.

use std::fmt;
use std::str::FromStr;

macro_rules! ops {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// One loop of operations. The first process of the pair measures it; the second process is
        /// the peer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Op {
            $($(#[$doc])* $variant,)*
        }

        impl fmt::Display for Op {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $name,)* })
            }
        }

        impl FromStr for Op {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok(Self::$variant),)*
                    _ => Err(format!("no operation {text}")),
                }
            }
        }
    };
}

ops! {
    /// Half a round trip of messages, with inject up to the inject size.
    Pingpong = "pingpong",
    /// The same without inject: the sender waits for the completion of each send.
    PingpongSend = "pingpong-send",
    /// Messages in one direction, 64 in a window, two windows outstanding, a reply to each window.
    Stream = "stream",
    /// Writes to the peer's memory, one at a time.
    Write = "write",
    /// Half a round trip of writes: each side writes, and waits until the last byte of the peer's
    /// write is in its memory.
    WritePingpong = "write-pingpong",
    /// Reads of the peer's memory, one at a time.
    Read = "read",
    /// Writes, 64 at a time.
    WriteStream = "write-stream",
    /// Writes, 64 at a time; each but the last one says that another one follows (`FI_MORE`).
    WriteStreamMore = "write-stream-more",
    /// The same, each write to the address behind the one before.
    WriteStreamNext = "write-stream-next",
    /// Reads, 64 at a time.
    ReadStream = "read-stream",
    /// Fetch and add on a word of the peer's memory, one at a time.
    Atomic = "atomic",
    /// Fetch and add (`fi_fetch_atomic`) on 8 bytes of the peer's memory, one at a time.
    FetchAdd = "fetch-add",
    /// Registering memory on demand, and closing the region.
    Register = "register-on-demand",
    /// Processor time per second of a connected process that waits for a completion.
    Idle = "idle",
    /// Half a round trip of a word between the two processors.
    Handover = "handover",
    /// A copy by the processor within one process.
    Memcpy = "memcpy",
    /// A copy by the kernel into the peer's memory (`process_vm_writev`).
    VmWrite = "vm-write",
    /// A copy by the kernel out of the peer's memory (`process_vm_readv`).
    VmRead = "vm-read",
}

impl Op {
    /// Number of operations in one measurement, by their length in bytes.
    pub(crate) fn count(self, len: usize) -> u64 {
        match (self, len) {
            (Self::Idle, _) => 3, // seconds
            (Self::Handover, _) => 40_000,
            (_, 0..=512) => 20_000,
            (_, 513..=8192) => 8_000,
            (_, 8193..=100_000) => 1_600,
            _ => 160,
        }
    }
}
