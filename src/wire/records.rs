//! Records that peers read from each other's memory: connection blocks, directory headers, entries,
//! segment lists. `docs/protocol.md`, "The key directory", has the words.
//!
//! A record is a slice of little-endian words as they lie in memory. A peer's record is decoded
//! once, here. A decoded record has only the properties that its decoder checks.

use crate::verbs::{RemoteAddr, Rkey};

/// Number of words of a connection block, a header or an entry.
pub const WORDS: usize = 8;
/// Size of such a record in bytes.
pub const RECORD_SIZE: usize = WORDS * 8;
/// Maximum number of buffers of a region.
pub const MAX_SEGMENTS: usize = 8;
/// Number of words of the longest segment list: generation, segments, checksum.
pub const MAX_LIST_WORDS: usize = 2 + 3 * MAX_SEGMENTS;

const HEADER_MAGIC: u64 = 0x0001_7269_6474_6677;

/// The checksum of a record's words. It detects torn reads, not forged records.
pub fn checksum(words: &[u64]) -> u64 {
    checksum_on(CHECKSUM_START, words)
}

/// The checksum of an empty sequence of words.
pub const CHECKSUM_START: u64 = 0x9e37_79b9_7f4a_7c15;

/// Continues a checksum over further words.
pub fn checksum_on(sum: u64, words: &[u64]) -> u64 {
    words.iter().fold(sum, |sum, word| {
        (sum ^ word)
            .wrapping_mul(0xff51_afd7_ed55_8ccd)
            .rotate_left(31)
    })
}

/// Whether the last word is the checksum of those before it.
fn is_whole(words: &[u64]) -> bool {
    words
        .split_last()
        .is_some_and(|(sum, rest)| *sum == checksum(rest))
}

/// Ends a record of 8 words with its checksum.
fn sealed(mut words: [u64; WORDS]) -> [u64; WORDS] {
    words[WORDS - 1] = checksum(&words[..WORDS - 1]);
    words
}

/// The low 32 bits of a word, which contain an rkey.
fn low(word: u64) -> Rkey {
    Rkey::new(word as u32)
}

/// The words of a connection block that its owner writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Address of the directory's header; 0 until one is published.
    pub header_addr: RemoteAddr,
    /// rkey of the header.
    pub header_rkey: Rkey,
    /// Address of the event cell that counts every operation of this connection; 0: not counted.
    pub cell: RemoteAddr,
}

impl Block {
    /// Index of the word to which the peer writes the revocation count of its directory.
    pub const REVISION: usize = 0;
    /// Index of the word in which the peer acknowledges revocations.
    pub const ACKNOWLEDGED: usize = 1;
    /// Index of the word from which the owner's writes to the peer's [`Self::ACKNOWLEDGED`] are
    /// sent.
    pub const ACKNOWLEDGEMENT: usize = 4;
    /// Index of the word in which the owner publishes how many of the peer's revocations it has
    /// settled.
    pub const SETTLED: usize = 6;
    /// Value of the word at [`Self::SETTLED`] while the owner holds no keys; 0 before its first
    /// look-up.
    pub const HOLDS_NONE: u64 = 1;
    /// After the owner has settled a revocation count, the word at [`Self::SETTLED`] is that count
    /// plus this constant.
    pub const SETTLED_COUNT: u64 = 2;
    /// Index of the first word that the owner writes.
    pub const OWNERS: usize = 2;

    /// The words that the owner writes, from [`Self::OWNERS`] to the end.
    pub fn encode(self) -> [u64; WORDS - Self::OWNERS] {
        let (addr, rkey) = (self.header_addr.get(), u64::from(self.header_rkey.get()));
        let cell = self.cell.get();
        [addr, rkey, 0, cell, 0, checksum(&[addr, rkey, cell])]
    }

    /// Decodes a block. `None`: the block was read during a write.
    pub fn decode(words: &[u64; WORDS]) -> Option<Self> {
        let [_, _, addr, rkey, _, cell, _, sum] = *words;
        // the cell must be aligned, because atomics need aligned words
        let whole = sum == checksum(&[addr, rkey, cell]) && cell.is_multiple_of(8);
        whole.then_some(Self {
            header_addr: RemoteAddr::new(addr),
            header_rkey: low(rkey),
            cell: RemoteAddr::new(cell),
        })
    }
}

/// The header of a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Address of the table.
    pub table_addr: RemoteAddr,
    /// rkey of the table.
    pub table_rkey: Rkey,
    /// Base-2 logarithm of the table's home slots, 1 to 40.
    pub log2: u32,
    /// Number of times that entries have moved to another slot or table.
    pub moves: u64,
    /// Revocation count: number of entries that were withdrawn or replaced.
    pub revocations: u64,
    /// rkey of the event cells.
    pub cells_rkey: Rkey,
    /// The domain's number.
    pub domain: u64,
}

impl Header {
    /// Index of the word with the revocation count, from which the count is written to the peers.
    pub const REVOCATIONS: usize = 4;

    /// The encoded words.
    pub fn encode(&self) -> [u64; WORDS] {
        sealed([
            HEADER_MAGIC,
            self.table_addr.get(),
            u64::from(self.table_rkey.get()) | u64::from(self.log2) << 32,
            self.moves,
            self.revocations,
            self.cells_rkey.get().into(),
            self.domain,
            0,
        ])
    }

    /// # Errors
    /// See [`Bad`].
    pub fn decode(words: &[u64; WORDS]) -> Result<Self, Bad> {
        if !is_whole(words) {
            return Err(Bad::Torn);
        }
        let log2 = (words[2] >> 32) as u32;
        if words[0] != HEADER_MAGIC || !(1..=40).contains(&log2) {
            return Err(Bad::Foreign);
        }
        Ok(Self {
            table_addr: RemoteAddr::new(words[1]),
            table_rkey: low(words[2]),
            log2,
            moves: words[3],
            revocations: words[4],
            cells_rkey: low(words[5]),
            domain: words[6],
        })
    }
}

/// Reason why a record cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// The record was read while the owner wrote it, or has changed: it must be read again.
    Torn,
    /// The record has values that are invalid or that this version does not define.
    Foreign,
}

/// Access rights of peers to a region.
pub mod access {
    /// RMA reads, and the fetching part of atomics.
    pub const READ: u8 = 1;
    /// RMA writes.
    pub const WRITE: u8 = 2;
    /// Atomics.
    pub const ATOMIC: u8 = 4;
    /// Making written data persistent across a loss of power.
    pub const FLUSH: u8 = 8;
}

const SEGMENTED: u64 = 1 << 40;
const ONCE: u64 = 1 << 41;

/// An entry: a published key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: u64,
    /// Address of the first byte in the address space of the rkey, or of the segment list.
    pub addr: RemoteAddr,
    /// Length in bytes.
    pub len: u64,
    /// rkey of the buffer, or of the segment list.
    pub rkey: Rkey,
    /// Access rights of peers: bits of [`access`].
    pub access: u8,
    /// Number of segments in the list; 0: one buffer without a list; [`Self::LONG`]: a list in
    /// blocks (`wire/segment_list.rs`).
    pub segments: u16,
    /// Whether only one access is permitted. The region then has a list, followed by the claim
    /// word.
    pub once: bool,
    /// Generation of the region, unique in its domain.
    pub generation: u64,
    /// Address by which applications address the first byte.
    pub start: u64,
    /// Address of the event cell; 0: events are not counted.
    pub cell: RemoteAddr,
}

impl Entry {
    /// Value of [`Self::segments`] for a long list, whose index is at `addr` with `rkey`.
    pub const LONG: u16 = u16::MAX;

    /// Whether the region's segments are in a long list.
    pub fn is_long(&self) -> bool {
        self.segments == Self::LONG
    }

    /// Address of the claim word behind the segment list of a single-use region.
    pub fn claim_addr(&self) -> RemoteAddr {
        let words = 2 + 3 * u64::from(self.segments);
        self.addr.wrapping_add(words * 8)
    }

    /// The encoded words.
    pub fn encode(&self) -> [u64; WORDS] {
        let mut bits = u64::from(self.rkey.get()) | u64::from(self.access) << 32;
        if self.segments != 0 {
            bits |= SEGMENTED | u64::from(self.segments) << 48;
        }
        if self.once {
            bits |= ONCE;
        }
        sealed([
            self.key,
            self.addr.get(),
            self.len,
            bits,
            self.generation,
            self.start,
            self.cell.get(),
            0,
        ])
    }

    /// Decodes an entry. `Ok(None)`: the slot is free.
    ///
    /// # Errors
    /// See [`Bad`]. `Foreign` also if addresses or lengths overflow, or the event cell is not
    /// aligned.
    pub fn decode(words: &[u64; WORDS]) -> Result<Option<Self>, Bad> {
        if *words == [0; WORDS] {
            return Ok(None);
        }
        if !is_whole(words) {
            return Err(Bad::Torn);
        }
        let bits = words[3];
        let segments = (bits >> 48) as u16;
        let this = Self {
            key: words[0],
            addr: RemoteAddr::new(words[1]),
            len: words[2],
            rkey: low(bits),
            access: (bits >> 32) as u8,
            segments,
            once: bits & ONCE != 0,
            generation: words[4],
            start: words[5],
            cell: RemoteAddr::new(words[6]),
        };
        let segmented = bits & SEGMENTED != 0;
        let claimable = (segmented && !this.is_long()) || !this.once;
        let bounded = this.start.checked_add(this.len).is_some()
            && (segmented || this.addr.checked_add(this.len).is_some());
        let countable = this.cell.is_multiple_of(8);
        if !bounded
            || !countable
            || !claimable
            || segmented != (segments != 0)
            || (usize::from(segments) > MAX_SEGMENTS && !this.is_long())
        {
            return Err(Bad::Foreign);
        }
        Ok(Some(this))
    }
}

/// A contiguous range of a region, with one registration or absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first byte in the address space of the rkey.
    pub addr: RemoteAddr,
    /// Length in bytes.
    pub len: u64,
    /// rkey of the registration.
    pub rkey: Rkey,
    /// Whether the memory is absent and cannot be accessed.
    pub absent: bool,
}

const ABSENT: u64 = 1 << 32;

impl Segment {
    /// The three encoded words.
    pub fn words(&self) -> [u64; 3] {
        let absent = if self.absent { ABSENT } else { 0 };
        [
            self.addr.get(),
            self.len,
            u64::from(self.rkey.get()) | absent,
        ]
    }

    /// Decodes three words without a check.
    pub fn of(words: &[u64; 3]) -> Self {
        Self {
            addr: RemoteAddr::new(words[0]),
            len: words[1],
            rkey: low(words[2]),
            absent: words[2] & ABSENT != 0,
        }
    }

    /// Appends segments to a record.
    pub fn encode_all(segments: &[Self], words: &mut Vec<u64>) {
        words.extend(segments.iter().flat_map(Self::words));
    }

    /// Decodes all segments in `words`.
    ///
    /// # Errors
    /// `Foreign`: addresses overflow, or the sum of the lengths is not `total`.
    pub fn decode_all(words: &[u64], total: u64) -> Result<Vec<Self>, Bad> {
        let mut sum = 0_u64;
        let mut segments = Vec::new();
        for chunk in words.as_chunks::<3>().0 {
            let segment = Self::of(chunk);
            let end = segment.addr.checked_add(segment.len);
            sum = sum.checked_add(segment.len).ok_or(Bad::Foreign)?;
            end.ok_or(Bad::Foreign)?;
            segments.push(segment);
        }
        if sum != total || segments.is_empty() {
            return Err(Bad::Foreign);
        }
        Ok(segments)
    }

    /// The encoded words of a segment list.
    pub fn encode_list(generation: u64, segments: &[Self]) -> Vec<u64> {
        let mut words = vec![generation];
        Self::encode_all(segments, &mut words);
        words.push(checksum(&words));
        words
    }

    /// Decodes the list of `entry`.
    ///
    /// # Errors
    /// See [`Bad`]. `Torn` also if the list has another generation, because the entry was removed
    /// meanwhile.
    pub fn decode_list(words: &[u64], entry: &Entry) -> Result<Vec<Self>, Bad> {
        if !is_whole(words) || words[0] != entry.generation {
            return Err(Bad::Torn);
        }
        Self::decode_all(&words[1..words.len() - 1], entry.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random numbers.
    fn numbers(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed;
        move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) ^ mixed >> 31
        }
    }

    #[test]
    fn entries_survive_being_written_and_read() {
        let mut next = numbers(1);
        for _ in 0..10_000 {
            let entry = Entry {
                key: next(),
                addr: RemoteAddr::new(next() >> 1),
                len: next() >> 2,
                rkey: Rkey::new(next() as u32),
                access: next() as u8 & 7,
                segments: (next() % (MAX_SEGMENTS as u64 + 1)) as u16,
                once: false,
                generation: next(),
                start: next() >> 1,
                cell: RemoteAddr::new(next() & !7),
            };
            assert_eq!(Entry::decode(&entry.encode()), Ok(Some(entry)));
            let once = Entry {
                once: true,
                ..entry
            };
            // the claim is behind the list
            let expected = match entry.segments {
                0 => Err(Bad::Foreign),
                _ => Ok(Some(once)),
            };
            assert_eq!(Entry::decode(&once.encode()), expected);
            // a long list has no claim
            let long = Entry {
                segments: Entry::LONG,
                ..entry
            };
            assert_eq!(Entry::decode(&long.encode()), Ok(Some(long)));
            let both = Entry { once: true, ..long };
            assert_eq!(Entry::decode(&both.encode()), Err(Bad::Foreign));
        }
        assert_eq!(Entry::decode(&[0; WORDS]), Ok(None));
    }

    /// The decoder detects every mixture of two states of a slot, including the free state.
    #[test]
    fn a_torn_entry_is_noticed() {
        let mut next = numbers(2);
        let mut random = || Entry {
            key: next(),
            addr: RemoteAddr::new(next() >> 1),
            len: next() >> 2,
            rkey: Rkey::new(next() as u32),
            generation: next(),
            ..Entry::default()
        };
        for _ in 0..200 {
            let (old, new) = (random().encode(), random().encode());
            for (from, to) in [(old, new), ([0; WORDS], new), (old, [0; WORDS])] {
                for mask in 1..255_u32 {
                    let torn: [u64; WORDS] =
                        std::array::from_fn(|i| if mask >> i & 1 == 1 { to[i] } else { from[i] });
                    if torn != from && torn != to {
                        assert_eq!(Entry::decode(&torn), Err(Bad::Torn));
                    }
                }
            }
        }
    }

    #[test]
    fn rubbish_is_refused_whatever_its_checksum() {
        let mut next = numbers(3);
        for _ in 0..100_000 {
            let mut words: [u64; WORDS] = std::array::from_fn(|_| next());
            assert_eq!(Entry::decode(&words), Err(Bad::Torn));
            assert_eq!(Header::decode(&words), Err(Bad::Torn));
            assert_eq!(Block::decode(&words), None);
            words[7] = checksum(&words[..7]);
            if let Ok(Some(entry)) = Entry::decode(&words) {
                // an accepted record does not overflow
                assert!(entry.start.checked_add(entry.len).is_some());
                assert!(usize::from(entry.segments) <= MAX_SEGMENTS || entry.is_long());
            }
            assert_eq!(Header::decode(&words), Err(Bad::Foreign));
        }
    }

    #[test]
    fn segment_lists_belong_to_their_entry() {
        let segments: Vec<_> = (1..=MAX_SEGMENTS as u64)
            .map(|i| Segment {
                addr: RemoteAddr::new(i << 20),
                len: i * 100,
                rkey: Rkey::new(i as u32),
                absent: i % 3 == 1,
            })
            .collect();
        let entry = Entry {
            len: segments.iter().map(|s| s.len).sum(),
            segments: MAX_SEGMENTS as u16,
            generation: 7,
            ..Entry::default()
        };
        let words = Segment::encode_list(7, &segments);
        assert_eq!(words.len(), MAX_LIST_WORDS);
        assert_eq!(Segment::decode_list(&words, &entry), Ok(segments));
        let later = Entry {
            generation: 8,
            ..entry
        };
        assert_eq!(Segment::decode_list(&words, &later), Err(Bad::Torn));
        let longer = Entry {
            len: entry.len + 1,
            ..entry
        };
        assert_eq!(Segment::decode_list(&words, &longer), Err(Bad::Foreign));
        assert_eq!(Segment::decode_list(&words[1..], &entry), Err(Bad::Torn));
    }

    #[test]
    fn headers_and_blocks_survive() {
        let header = Header {
            table_addr: RemoteAddr::new(0x7f00_0000_1000),
            table_rkey: Rkey::new(0xdead_beef),
            log2: 20,
            moves: 3,
            revocations: 9,
            cells_rkey: Rkey::new(77),
            domain: u64::MAX,
        };
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        let block = Block {
            header_addr: RemoteAddr::new(0x1234),
            header_rkey: Rkey::new(5),
            cell: RemoteAddr::new(0x5678),
        };
        let mut words = [11; WORDS];
        words[Block::OWNERS..].copy_from_slice(&block.encode());
        assert_eq!(Block::decode(&words), Some(block));
    }

    /// The words that are addressed one at a time are those that the records have for them.
    #[test]
    fn named_words_are_where_the_records_have_them() {
        let [before, after] = [8, 9].map(|revocations| {
            let header = Header {
                revocations,
                ..Header::default()
            };
            header.encode()
        });
        assert_eq!(after[Header::REVOCATIONS], 9);
        let differ = (0..WORDS).filter(|&word| before[word] != after[word]);
        // and the checksum
        assert!(differ.eq([Header::REVOCATIONS, WORDS - 1]));
        let block = Block {
            header_addr: RemoteAddr::new(u64::MAX),
            header_rkey: Rkey::new(u32::MAX),
            cell: RemoteAddr::new(!7),
        };
        let named = [
            Block::REVISION,
            Block::ACKNOWLEDGED,
            Block::ACKNOWLEDGEMENT,
            Block::SETTLED,
        ];
        // the record does not depend on the value of these words
        let mut words = [11; WORDS];
        words[Block::OWNERS..].copy_from_slice(&block.encode());
        for word in named {
            assert!(word < Block::OWNERS || words[word] == 0, "word {word}");
            words[word] = 12;
        }
        assert_eq!(Block::decode(&words), Some(block));
        let mut sorted = named;
        sorted.sort_unstable();
        assert_eq!(sorted, named, "four different words");
    }
}
