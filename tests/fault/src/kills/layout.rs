//! The layout of a worker's regions, and the numbers of its requests.

/// Maximum number of workers.
pub(crate) const MOST: usize = 8;
/// Maximum length of a message in bytes.
pub(crate) const ROOM: usize = 104 << 10;

/// The region that peers access. For each peer it has a slice that the peer writes and reads back,
/// slots for writes with immediate, a word for compare and swap, and one half of a word for
/// additions.
pub(crate) mod target {
    use super::MOST;
    pub(crate) const SLICE: usize = 64 << 10;
    pub(crate) const NOTICED: usize = 16;
    pub(crate) const NOTICED_ROOM: usize = 4096;
    pub(crate) const NOTICED_AT: usize = MOST * SLICE;
    pub(crate) const SWAPPED_AT: usize = NOTICED_AT + MOST * NOTICED * NOTICED_ROOM;
    pub(crate) const ADDED_AT: usize = SWAPPED_AT + 8 * MOST;
    pub(crate) const LEN: usize = ADDED_AT + 8 * MOST;

    /// Offset of message `seq` of `from`, a write with immediate.
    pub(crate) fn noticed(from: u8, seq: u64) -> usize {
        let place = usize::from(from) * NOTICED + seq as usize % NOTICED;
        NOTICED_AT + place * NOTICED_ROOM
    }
}

/// The region of one connection.
pub(crate) mod own {
    use super::ROOM;
    use super::target::SLICE;
    pub(crate) const RECEIVES: usize = 8;
    /// Slots for outgoing messages, per stream.
    pub(crate) const SENDS: usize = 4;
    pub(crate) const SENDS_AT: usize = RECEIVES * ROOM;
    pub(crate) const DATAGRAMS: usize = 4;
    pub(crate) const DATAGRAM_ROOM: usize = 4200;
    pub(crate) const DATAGRAMS_AT: usize = SENDS_AT + 2 * SENDS * ROOM;
    pub(crate) const DATAGRAM_AT: usize = DATAGRAMS_AT + DATAGRAMS * DATAGRAM_ROOM;
    pub(crate) const WRITTEN_AT: usize = DATAGRAM_AT + 4096;
    pub(crate) const READ_AT: usize = WRITTEN_AT + SLICE;
    pub(crate) const RESULT_AT: usize = (READ_AT + SLICE).next_multiple_of(8);
    /// Additions that are posted together.
    pub(crate) const ADDITIONS: usize = 16;
    pub(crate) const LEN: usize = RESULT_AT + 8 * ADDITIONS;
}

/// The kind of request that a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Receive,
    Send,
    SharedSend,
    SharedReceive,
    DatagramReceive,
    Datagram,
    Write,
    Read,
    Add,
    Swap,
}

const KINDS: [Kind; 10] = [
    Kind::Receive,
    Kind::Send,
    Kind::SharedSend,
    Kind::SharedReceive,
    Kind::DatagramReceive,
    Kind::Datagram,
    Kind::Write,
    Kind::Read,
    Kind::Add,
    Kind::Swap,
];

/// The number of a request: connection, kind, slot.
pub(crate) fn id_of(nonce: u32, kind: Kind, place: usize) -> u64 {
    u64::from(nonce) << 16 | (kind as u64) << 8 | place as u64
}

/// The parts of a request's number.
pub(crate) fn parts_of(id: u64) -> (u32, Kind, usize) {
    let kind = KINDS[(id >> 8) as usize & 0xff];
    ((id >> 16) as u32, kind, id as usize & 0xff)
}
