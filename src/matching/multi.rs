//! Multi-receive buffers: the room that is left, and the messages that are being received into
//! them.

use super::{MultiId, Piece, Release};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// A posted receive refers to the buffer.
    Posted,
    /// The last message has been matched.
    Full,
    Cancelled,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    /// Bytes.
    size: u64,
    room: u64,
    min: u64,
    /// Messages that were matched and whose completion is not reported ([`Buffers::finished`]).
    pending: u32,
    state: State,
}

/// The buffers of an instance.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    buffers: Vec<Buffer>,
    free: Vec<u32>,
}

impl Buffers {
    pub(super) fn add(&mut self, size: u64, min: u64) -> MultiId {
        let buffer = Buffer {
            size,
            room: size,
            min,
            pending: 0,
            state: State::Posted,
        };
        if let Some(index) = self.free.pop() {
            self.buffers[index as usize] = buffer;
            return MultiId(index);
        }
        self.buffers.push(buffer);
        // so that a release does not allocate
        self.free.reserve(self.buffers.len());
        MultiId(self.buffers.len() as u32 - 1)
    }

    /// Takes room for a message of `len` bytes. The flag says whether the buffer takes no further
    /// message.
    pub(super) fn fill(&mut self, id: MultiId, len: u64) -> (Piece, bool) {
        let buffer = &mut self.buffers[id.0 as usize];
        let piece = Piece {
            buffer: id,
            offset: buffer.size - buffer.room,
            len: len.min(buffer.room),
        };
        buffer.room -= piece.len;
        buffer.pending += 1;
        let full = buffer.room < buffer.min.max(1);
        if full {
            buffer.state = State::Full;
        }
        (piece, full)
    }

    pub(super) fn finished(&mut self, id: MultiId) -> Release {
        let buffer = &mut self.buffers[id.0 as usize];
        debug_assert!(buffer.pending != 0 && buffer.state != State::Free);
        buffer.pending -= 1;
        if buffer.pending != 0 {
            return Release::Held;
        }
        let release = match buffer.state {
            State::Full => Release::Last,
            State::Cancelled => Release::Cancelled,
            State::Posted | State::Free => return Release::Held,
        };
        buffer.state = State::Free;
        self.free.push(id.0);
        release
    }

    /// The receive of a buffer was cancelled. Returns whether no message is being received into it.
    pub(super) fn cancel(&mut self, id: MultiId) -> bool {
        let buffer = &mut self.buffers[id.0 as usize];
        let idle = buffer.pending == 0;
        if idle {
            buffer.state = State::Free;
            self.free.push(id.0);
        } else {
            buffer.state = State::Cancelled;
        }
        idle
    }
}
