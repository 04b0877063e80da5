//! Hints to the processor about the cache lines of a message's payload. They change when a line
//! moves between two processors, never what is in it.
//!
//! - *Pass on*: a sender whose receiver has read all earlier messages and waits moves the lines of
//!   the payload to the cache that both processors share (`cldemote`). The receiver reads them from
//!   there in less time than from the sender's own cache. While messages follow each other the
//!   receiver is behind the sender, and passing on would only take time.
//! - *Acquire*: the sender then requests the lines of the next message of the same length. Their
//!   last reader was the receiver, and the copy would wait for them. If messages follow each other,
//!   this pays for long ones alone: a sender that never waits can be faster than its receiver,
//!   which then takes away the line of each header by polling it.
//!
//! Whether passing on pays depends on where the two processors are: if they have a common cache of
//! level 1 or 2, the receiver reads the lines there in less time than from the cache to which they
//! were moved. A virtual machine does not show where its processors are, and they can change. So a
//! sender [tries](Trial) both ways.
//!
//! Processors without `cldemote` get neither hint: on two of AMD's (Zen 4) without a common cache
//! requests for the lines of the next message made a ping-pong of 4 KiB slower (375 to 470 ns).
//!
//! Two processors without a common cache of level 2 (Xeon, Sapphire Rapids, in a virtual machine),
//! RDM endpoints, without, with *acquire*, with both: half a round trip of 512 B 391, 352, 285 ns;
//! of 4 KiB 968, 884, 774 ns; stream of 4 KiB 475, 375, 390 ns, and 738 ns if each message was
//! passed on. Stream of 512 B on message endpoints: 198 ns without, 235 ns if each message acquired
//! the lines of the next one, 164 ns if none did.

use std::sync::OnceLock;

use super::Mapping;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Payloads that are shorter have so few lines that finding out whether the receiver waits, 10 ns,
/// would take as long as it saves.
const LEAST: usize = 256;
/// Least length for which the lines of the next message are acquired each time.
const LONG: usize = 1024;
/// Most bytes that are acquired.
const MOST: usize = 8192;
/// One in this many messages whose receiver waits is sent in the way that has taken more time.
const TRIES: u32 = 32;

/// `len` bytes at `at` in a mapping, behind the line of a header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// The payloads of one sender.
#[derive(Debug)]
pub(crate) struct Payloads {
    /// When the last one was published, in [`ticks`].
    last: u64,
    /// Least length for which hints are given.
    least: usize,
    trial: Trial,
}

/// The time between a message whose receiver waits and the next one, with and without passing on.
/// In a ping-pong this is nearly the whole round trip. In other patterns it may not depend on the
/// way; then the choice is random, and a wrong choice costs the difference of the two ways.
#[derive(Debug, Default)]
struct Trial {
    /// Averages in [`ticks`], without passing on and with it; 0: not known.
    took: [u32; 2],
    /// Messages whose receivers waited.
    count: u32,
    /// Lines of these messages.
    lines: u32,
    /// Whether the last message was passed on, if its receiver waited.
    last: Option<bool>,
}

impl Trial {
    /// Whether to pass on the next message of this many lines, whose receiver waits; `pause`: the
    /// time since the last message.
    #[inline]
    fn passes_on(&mut self, pause: u64, lines: u32) -> bool {
        if lines != self.lines {
            *self = Self {
                lines,
                ..Self::default()
            };
        }
        if let Some(way) = self.last {
            let took = &mut self.took[usize::from(way)];
            let pause = pause.min(1 << 20) as u32;
            // one message that was interrupted has little effect
            *took = match *took {
                0 => pause,
                before => before - before / 8 + pause.min(2 * before) / 8,
            };
        }
        self.count = self.count.wrapping_add(1);
        let [without, with] = self.took;
        let better = without == 0 || with <= without;
        let way = better ^ self.count.is_multiple_of(TRIES);
        self.last = Some(way);
        way
    }
}

impl Payloads {
    pub(crate) fn new() -> Self {
        let least = if has_cldemote() { LEAST } else { usize::MAX };
        Self {
            last: 0,
            least,
            trial: Trial::default(),
        }
    }

    /// The payload `sent` was written and published. `next` is where the payload of the next
    /// message would be, as far as nobody reads there any more.
    #[inline(always)]
    pub(crate) fn published(&mut self, map: &Mapping, sent: Payload, next: Payload) {
        if sent.len < self.least {
            return;
        }
        let now = ticks();
        let pause = now.wrapping_sub(self.last);
        self.last = now;
        let waits = is_awaited(pause, sent.len);
        if !waits {
            self.trial.last = None;
        } else if self.trial.passes_on(pause, (sent.len / LINE) as u32) {
            for line in (0..sent.len).step_by(LINE) {
                map.pass_on(sent.at + line);
            }
        }
        if waits || sent.len >= LONG {
            for line in (0..next.len.min(MOST)).step_by(LINE) {
                map.prefetch_to_write(next.at + line);
            }
        }
    }
}

/// Whether nothing was published for so long before a payload that the receiver has read everything
/// and waits: half of the time in which such a message and its answer were measured, and more than
/// the distance of two messages of a stream.
#[inline(always)]
fn is_awaited(pause: u64, len: usize) -> bool {
    const LEAST_PAUSE: u64 = 768;
    const EACH_LINE: u64 = 28;
    pause >= LEAST_PAUSE + EACH_LINE * (len / LINE) as u64
}

/// Whether the processor executes `cldemote`: by its flag (CPUID.(EAX=7,ECX=0):ECX bit 25), or by
/// its model, because some monitors of virtual machines clear the flag and cannot keep a guest from
/// the instruction.
fn has_cldemote() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    // CPUID leaves a virtual machine, which takes microseconds
    *HAS.get_or_init(|| {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        let has = {
            use std::arch::x86_64::{__cpuid, __cpuid_count};
            let first = __cpuid(0);
            let vendor = [first.ebx, first.edx, first.ecx].map(u32::to_le_bytes);
            let flag = first.eax >= 7 && __cpuid_count(7, 0).ecx & 1 << 25 != 0;
            flag || is_listed(vendor.as_flattened(), __cpuid(1).eax)
        };
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let has = false;
        has
    })
}

/// Whether a processor of this vendor with this signature (CPUID.1:EAX) executes `cldemote`:
/// Sapphire Rapids, Emerald Rapids, Granite Rapids.
#[cfg(any(test, all(target_arch = "x86_64", not(miri))))]
fn is_listed(vendor: &[u8], signature: u32) -> bool {
    let family = signature >> 8 & 0xf;
    let model = signature >> 4 & 0xf | signature >> 12 & 0xf0;
    vendor == b"GenuineIntel" && family == 6 && matches!(model, 0x8f | 0xcf | 0xad | 0xae)
}

/// The processor's counter of time, which has 2 to 4 ticks in a nanosecond; 0 on processors of
/// other architectures.
#[inline(always)]
fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: each processor of this architecture has the instruction, and Linux permits it.
    let ticks = unsafe { std::arch::x86_64::_rdtsc() };
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let ticks = 0;
    ticks
}

#[cfg(test)]
mod tests {
    use super::{TRIES, Trial, is_listed};

    /// Sends messages that take so long, without passing on and with it, and returns how many of
    /// the last 320 were passed on.
    fn passed_on(trial: &mut Trial, took: [u64; 2]) -> usize {
        let mut pause = 1000;
        let mut ways = Vec::new();
        for i in 0..640 {
            let way = trial.passes_on(pause, 8);
            ways.push(way);
            // one in 100 is interrupted
            pause = took[usize::from(way)] + if i % 100 == 99 { 1 << 40 } else { 0 };
        }
        ways[320..].iter().filter(|&&way| way).count()
    }

    #[test]
    fn the_way_that_takes_less_time_is_used() {
        let tries = 320 / TRIES as usize;
        let mut trial = Trial::default();
        assert_eq!(passed_on(&mut trial, [900, 650]), 320 - tries);
        // the processors have moved together, and apart again
        assert_eq!(passed_on(&mut trial, [500, 900]), tries);
        assert_eq!(passed_on(&mut trial, [900, 650]), 320 - tries);
    }

    #[test]
    fn another_length_begins_with_passing_on() {
        let mut trial = Trial::default();
        passed_on(&mut trial, [500, 900]);
        assert!(trial.passes_on(900, 64));
    }

    #[test]
    fn processors_are_known_by_their_signature() {
        let intel = b"GenuineIntel";
        // steppings and reserved bits are of no matter
        for signature in [0x000c_06f2, 0x000c_06f1, 0x0008_06f8, 0xf00a_06d0] {
            assert!(is_listed(intel, signature), "{signature:#x}");
            assert!(!is_listed(b"AuthenticAMD", signature), "{signature:#x}");
        }
        // Ice Lake, Skylake, Zen 4 as another vendor's, family 15
        for signature in [0x0006_06a6, 0x0005_0654, 0x00a1_0f11, 0x000c_0ff2, 0] {
            assert!(!is_listed(intel, signature), "{signature:#x}");
        }
    }
}
