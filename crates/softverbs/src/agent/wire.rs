//! The messages on a line to an agent. `docs/softverbs-agent.md` has the table.

/// Bytes of a request and of a reply.
pub(crate) const REQUEST: usize = 72;
pub(crate) const REPLY: usize = 24;

/// Number of places in a bounce file, and bytes of each: the maximum payload of one request.
pub(crate) const PLACES: usize = 8;
pub(crate) const PLACE: usize = 256 << 10;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    Hello = 1,
    Write,
    Read,
    Receive,
    Add,
    Swap,
    Store,
    File,
    GoOn,
    Return,
    Elements,
}

impl Kind {
    fn of_number(number: u32) -> Option<Self> {
        [
            Self::Hello,
            Self::Write,
            Self::Read,
            Self::Receive,
            Self::Add,
            Self::Swap,
            Self::Store,
            Self::File,
            Self::GoOn,
            Self::Return,
            Self::Elements,
        ]
        .into_iter()
        .find(|&kind| kind as u32 == number)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) place: u32,
    pub(crate) id: u64,
    /// The owner's queue pair, the initiator's queue pair, and the owner's incarnation; of RETURN
    /// the stamp of an XRC shared receive queue.
    pub(crate) qp: u32,
    pub(crate) from: u32,
    pub(crate) incarnation: u32,
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) a: u64,
    pub(crate) b: u64,
    /// If the queue pair is an XRC target: the shared receive queue that the request names.
    pub(crate) srq: u32,
}

impl Request {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            place: 0,
            id: 0,
            qp: 0,
            from: 0,
            incarnation: 0,
            key: 0,
            addr: 0,
            len: 0,
            a: 0,
            b: 0,
            srq: 0,
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; REQUEST] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let words = [
            pair(self.kind as u32, self.place),
            self.id,
            pair(self.qp, self.from),
            pair(self.incarnation, self.key),
            self.addr,
            self.len,
            self.a,
            self.b,
            u64::from(self.srq),
        ];
        let mut bytes = [0; REQUEST];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// `None` for an unknown kind.
    pub(crate) fn of_bytes(bytes: &[u8; REQUEST]) -> Option<Self> {
        let words: [u64; REQUEST / 8] = words(bytes);
        let (low, high) = (
            |i: usize| words[i] as u32,
            |i: usize| (words[i] >> 32) as u32,
        );
        Some(Self {
            kind: Kind::of_number(low(0))?,
            place: high(0),
            id: words[1],
            qp: low(2),
            from: high(2),
            incarnation: low(3),
            key: high(3),
            addr: words[4],
            len: words[5],
            a: words[6],
            b: words[7],
            srq: low(8),
        })
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done(u64),
    /// The access is not allowed, or the memory is not mapped.
    Refused,
    /// The agent was busy; the request must be sent again.
    Busy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) outcome: Outcome,
    pub(crate) place: u32,
    pub(crate) id: u64,
}

impl Reply {
    pub(crate) fn to_bytes(self) -> [u8; REPLY] {
        let (status, value) = match self.outcome {
            Outcome::Done(value) => (0u32, value),
            Outcome::Refused => (1, 0),
            Outcome::Busy => (2, 0),
        };
        let mut bytes = [0; REPLY];
        bytes[..4].copy_from_slice(&status.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.place.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.id.to_ne_bytes());
        bytes[16..].copy_from_slice(&value.to_ne_bytes());
        bytes
    }

    /// An unknown status counts as `Refused`.
    pub(crate) fn of_bytes(bytes: &[u8; REPLY]) -> Self {
        let words: [u64; REPLY / 8] = words(bytes);
        Self {
            outcome: match words[0] as u32 {
                0 => Outcome::Done(words[2]),
                2 => Outcome::Busy,
                _ => Outcome::Refused,
            },
            place: (words[0] >> 32) as u32,
            id: words[1],
        }
    }
}

fn words<const COUNT: usize>(bytes: &[u8]) -> [u64; COUNT] {
    let mut words = [0; COUNT];
    for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(from);
        *word = u64::from_ne_bytes(bytes);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_their_bytes() {
        let request = Request {
            kind: Kind::Receive,
            place: 7,
            id: u64::MAX - 1,
            qp: 0xff_ffff,
            from: 5,
            incarnation: 0x12_3456,
            key: u32::MAX,
            addr: 1 << 47,
            len: PLACE as u64,
            a: 3,
            b: 4,
            srq: 0x12_3456,
        };
        assert_eq!(Request::of_bytes(&request.to_bytes()), Some(request));
        for kind in 0..=255u8 {
            let mut bytes = request.to_bytes();
            bytes[0] = kind;
            let known = (1..=Kind::Elements as u8).contains(&kind);
            assert_eq!(Request::of_bytes(&bytes).is_some(), known);
        }
        for outcome in [Outcome::Done(u64::MAX), Outcome::Refused, Outcome::Busy] {
            let reply = Reply {
                outcome,
                place: 3,
                id: 9,
            };
            assert_eq!(Reply::of_bytes(&reply.to_bytes()), reply);
        }
        assert_eq!(Reply::of_bytes(&[0xff; REPLY]).outcome, Outcome::Refused);
    }
}
