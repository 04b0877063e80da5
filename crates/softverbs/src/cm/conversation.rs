//! The conversation of two ids: a socket, unsent packets, and a deadline.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::OnceLock;

use super::sock::{Received, Sock};
use super::wire::{self, MAX_MESSAGE, Malformed, Message};
use crate::environment;
use crate::process::Process;
use crate::segment::layout::split_qp_num;
use crate::sys::{self, Res, Timer};

/// One end of a conversation. Dropping it ends the conversation; the peer still receives the
/// packets that were sent.
#[derive(Debug)]
pub(super) struct Link {
    sock: Sock,
    /// Packets that the socket had no room for, in order.
    unsent: VecDeque<Vec<u8>>,
}

/// Result of receiving.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "is on the stack for one call only"
)]
pub(super) enum Heard {
    Nothing,
    Message(Message),
    Malformed,
    /// The peer has closed, or its process has ended.
    End,
}

impl Link {
    pub(super) fn new(sock: Sock) -> Self {
        Self {
            sock,
            unsent: VecDeque::new(),
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.sock.fd()
    }

    /// Whether the socket has this name, as [`Sock::has_name`].
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.sock.has_name(name)
    }

    /// The process of the peer, by the kernel's record.
    pub(super) fn peer_pid(&self) -> Option<u32> {
        self.sock.peer_pid().ok()
    }

    /// Whether a queue pair is known to be of another process than the peer. `false` if one of the
    /// two processes is not known: the peer is in another pid namespace, or no process has the
    /// number.
    pub(super) fn contradicts(&self, qp_num: u32) -> bool {
        let owner = Process::current().and_then(|process| process.pid_of(split_qp_num(qp_num).0));
        let peer = self.peer_pid().filter(|pid| *pid != 0);
        owner.zip(peer).is_some_and(|(owner, peer)| owner != peer)
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends unsent packets. Errors are not reported: the end of the conversation is received as
    /// well.
    pub(super) fn flush(&mut self) {
        while let Some(packet) = self.unsent.front() {
            match self.sock.send(packet) {
                Ok(true) => self.unsent.pop_front(),
                Ok(false) => return,
                Err(_) => return self.unsent.clear(),
            };
        }
    }

    /// Sends a message, at once or as soon as the socket has room.
    pub(super) fn send(&mut self, message: &Message) -> Res<()> {
        let packet = message.encode();
        if self.unsent.is_empty() && self.sock.send(&packet)? {
            return Ok(());
        }
        self.unsent.push_back(packet);
        Ok(())
    }

    /// Receives the next message.
    pub(super) fn hear(&self) -> Heard {
        let mut buffer = [0; MAX_MESSAGE + 1];
        match self.sock.recv(&mut buffer) {
            Received::Nothing => Heard::Nothing,
            Received::End => Heard::End,
            Received::Packet(len) => match buffer.get(..len).map(wire::decode) {
                Some(Ok(message)) => Heard::Message(message),
                Some(Err(Malformed)) | None => Heard::Malformed,
            },
        }
    }
}

/// The time by which the peer must have answered.
#[derive(Debug)]
pub(super) struct Deadline {
    timer: Timer,
    /// In nanoseconds of the monotonic clock.
    at: u64,
}

impl Deadline {
    /// The time that an InfiniBand connection manager gives a peer that has acknowledged the
    /// request with MRA: 4.096 µs × 2^24, 68.7 s. `SOFTVERBS_CM_TIMEOUT_MS` sets another.
    pub(super) fn new() -> Res<Self> {
        let mut deadline = Self {
            timer: Timer::new()?,
            at: 0,
        };
        deadline.restart();
        Ok(deadline)
    }

    /// Gives the peer the whole time again.
    pub(super) fn restart(&mut self) {
        static NANOSECONDS: OnceLock<u64> = OnceLock::new();
        let span = *NANOSECONDS.get_or_init(|| {
            environment::CM_TIMEOUT_MS
                .number::<u64>()
                .map_or(4096 << 24, |ms| ms.saturating_mul(1_000_000))
        });
        self.at = sys::now_ns().saturating_add(span.max(1));
        self.timer.set_to(self.at);
    }

    pub(super) fn fd(&self) -> RawFd {
        self.timer.fd()
    }

    pub(super) fn has_passed(&self) -> bool {
        sys::now_ns() >= self.at
    }

    /// Makes the timer's descriptor readable in `nanoseconds`, at the latest at the deadline, and
    /// not before; 0 means only at the deadline.
    pub(super) fn look_in(&self, nanoseconds: u64) {
        let next = match nanoseconds {
            0 => self.at,
            span => sys::now_ns().saturating_add(span).min(self.at),
        };
        self.timer.set_to(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    /// A descriptor that stayed readable would keep a thread of the application awake.
    #[test]
    fn a_deadline_is_readable_only_when_it_is_due() {
        let readable =
            |deadline: &Deadline, wait| sys::epoll_readable(deadline.fd(), wait).unwrap();
        let mut deadline = Deadline::new().unwrap();
        assert!(!readable(&deadline, 0));
        deadline.look_in(1);
        assert!(readable(&deadline, 20_000));
        // later than the last time: the next attempt, the deadline, a new deadline
        deadline.look_in(60_000 * MILLISECOND);
        assert!(!readable(&deadline, 0));
        deadline.look_in(1);
        assert!(readable(&deadline, 20_000));
        deadline.look_in(0);
        assert!(!readable(&deadline, 0));
        deadline.look_in(1);
        assert!(readable(&deadline, 20_000));
        deadline.restart();
        assert!(!readable(&deadline, 0));
        assert!(!deadline.has_passed());
    }
}
