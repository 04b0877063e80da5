//! What a subject can be asked to do.

use std::fmt;
use std::str::FromStr;

macro_rules! ops {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// One loop. The first process of the pair measures it, the second takes its part in it.
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
    /// Half a round trip of messages, with inject where it takes the length.
    Pingpong = "pingpong",
    /// The same without inject: each send is waited for.
    PingpongSend = "pingpong-send",
    /// Messages one way, 64 to a window, two windows under way, an answer for each.
    Stream = "stream",
    /// Writes to the other's memory, one at a time.
    Write = "write",
    /// Reads of the other's memory, one at a time.
    Read = "read",
    /// Writes, 64 at a time.
    WriteStream = "write-stream",
    /// Reads, 64 at a time.
    ReadStream = "read-stream",
    /// Additions to a word of the other's memory, one at a time.
    Atomic = "atomic",
    /// Registering memory on demand, and giving the region up.
    Register = "register-on-demand",
    /// Processor time of a process that is connected and waits for a completion, per second.
    Idle = "idle",
    /// Half a round trip of a word between the two processors.
    Handover = "handover",
    /// A copy by the processor within one process.
    Memcpy = "memcpy",
    /// A copy by the kernel into the other's memory (`process_vm_writev`).
    VmWrite = "vm-write",
    /// A copy by the kernel out of the other's memory (`process_vm_readv`).
    VmRead = "vm-read",
}

impl Op {
    /// Operations in one measurement: some milliseconds to some dozens of them.
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
