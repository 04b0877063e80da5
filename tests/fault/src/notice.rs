//! The ways in which a process waits for completions, and the time until it detects a death.

use std::time::Duration;

use crate::device::{Queue, Wc};
use crate::link::readable;

/// Maximum time until a survivor detects a death.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// Ways to wait for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Calls `ibv_poll_cq` repeatedly.
    Polls,
    /// Calls `poll` on the channel's descriptor.
    SleepsOnFd,
    /// Calls `ibv_get_cq_event` on a blocking descriptor.
    SleepsInCall,
}

impl Way {
    pub(crate) const ALL: [Self; 3] = [Self::Polls, Self::SleepsOnFd, Self::SleepsInCall];

    pub(crate) fn of(number: u64) -> Self {
        Self::ALL[(number % 3) as usize]
    }

    fn name(self) -> &'static str {
        match self {
            Self::Polls => "ibv_poll_cq",
            Self::SleepsOnFd => "poll on the descriptor",
            Self::SleepsInCall => "ibv_get_cq_event",
        }
    }

    /// Waits once, for at most `patience` if the way has a timeout; appends the completions to
    /// `to`.
    pub(crate) fn wait(self, queue: &Queue, to: &mut Vec<Wc>, patience: Duration) {
        if self == Self::Polls {
            queue.poll(to);
            return;
        }
        queue.arm();
        queue.poll(to);
        if !to.is_empty() {
            return;
        }
        if self == Self::SleepsOnFd {
            if readable(queue.fd(), patience) {
                queue.event();
            }
        } else {
            queue.set_blocking(true);
            queue.event();
            queue.set_blocking(false);
        }
        queue.poll(to);
    }
}

/// Detection times, per way of waiting.
#[derive(Default)]
pub(crate) struct Times([Vec<Duration>; 3]);

impl Times {
    pub(crate) fn add(&mut self, way: Way, time: Duration) {
        self.0[way as usize].push(time);
    }

    /// The maximum of all ways.
    pub(crate) fn longest(&self) -> Duration {
        self.0.iter().flatten().max().copied().unwrap_or_default()
    }

    pub(crate) fn print(&mut self) {
        println!("notice of a death, by way of waiting (milliseconds):");
        println!(
            "  {:24} {:>7} {:>8} {:>8} {:>8} {:>8}",
            "", "count", "p50", "p90", "p99", "max"
        );
        for way in Way::ALL {
            let times = &mut self.0[way as usize];
            times.sort_unstable();
            if times.is_empty() {
                continue;
            }
            let at = |part: usize| {
                let index = (times.len() * part / 100).min(times.len() - 1);
                times[index].as_secs_f64() * 1e3
            };
            println!(
                "  {:24} {:>7} {:>8.2} {:>8.2} {:>8.2} {:>8.2}",
                way.name(),
                times.len(),
                at(50),
                at(90),
                at(99),
                at(100)
            );
        }
    }
}
