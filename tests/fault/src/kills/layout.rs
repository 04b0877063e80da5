//! Where things lie in a worker's regions, and how its requests are numbered.

/// Most workers.
pub(crate) const MOST: usize = 8;
/// Longest message.
pub(crate) const ROOM: usize = 104 << 10;

/// The region that the others use. Each has a slice to write to and read back, places for writes with a
/// notice, a word to swap, and one half of a word to add to.
pub(crate) mod target {
    use super::MOST;
    pub(crate) const SLICE: usize = 64 << 10;
    pub(crate) const NOTICED: usize = 16;
    pub(crate) const NOTICED_ROOM: usize = 4096;
    pub(crate) const NOTICED_AT: usize = MOST * SLICE;
    pub(crate) const SWAPPED_AT: usize = NOTICED_AT + MOST * NOTICED * NOTICED_ROOM;
    pub(crate) const ADDED_AT: usize = SWAPPED_AT + 8 * MOST;
    pub(crate) const LEN: usize = ADDED_AT + 8 * MOST;

    /// Place of `from`'s message `seq`, a write with a notice.
    pub(crate) fn noticed(from: u8, seq: u64) -> usize {
        let place = usize::from(from) * NOTICED + seq as usize % NOTICED;
        NOTICED_AT + place * NOTICED_ROOM
    }
}

/// A connection's own region.
pub(crate) mod own {
    use super::ROOM;
    use super::target::SLICE;
    pub(crate) const RECEIVES: usize = 8;
    /// Places for what is sent, on either stream.
    pub(crate) const SENDS: usize = 4;
    pub(crate) const SENDS_AT: usize = RECEIVES * ROOM;
    pub(crate) const DATAGRAMS: usize = 4;
    pub(crate) const DATAGRAM_ROOM: usize = 4200;
    pub(crate) const DATAGRAMS_AT: usize = SENDS_AT + 2 * SENDS * ROOM;
    pub(crate) const DATAGRAM_AT: usize = DATAGRAMS_AT + DATAGRAMS * DATAGRAM_ROOM;
    pub(crate) const WRITTEN_AT: usize = DATAGRAM_AT + 4096;
    pub(crate) const READ_AT: usize = WRITTEN_AT + SLICE;
    pub(crate) const RESULT_AT: usize = (READ_AT + SLICE).next_multiple_of(8);
    /// Additions that are posted at once.
    pub(crate) const ADDITIONS: usize = 16;
    pub(crate) const LEN: usize = RESULT_AT + 8 * ADDITIONS;
}

/// What a completion is of.
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

/// The number of a request: connection, kind, place.
pub(crate) fn id_of(nonce: u32, kind: Kind, place: usize) -> u64 {
    u64::from(nonce) << 16 | (kind as u64) << 8 | place as u64
}

/// The parts of such a number.
pub(crate) fn parts_of(id: u64) -> (u32, Kind, usize) {
    let kind = KINDS[(id >> 8) as usize & 0xff];
    ((id >> 16) as u32, kind, id as usize & 0xff)
}
