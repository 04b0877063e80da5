//! Long segment lists: an index of blocks, and blocks of segments. `docs/protocol.md`, "Long
//! segment lists", has the words.
//!
//! The owner rewrites a block if its segments have changed, and the index if blocks were added or
//! removed. Both begin with the same four words: generation, checksum of all other words, number of
//! records, and the offset of the first byte. Records of three words follow.

use super::records::{Bad, CHECKSUM_START, Segment, checksum, checksum_on};
use crate::verbs::{RemoteAddr, Rkey};

/// Number of words of a block, including unused ones, and of the first read of an index. The memory
/// of an index has at least this size.
pub const BLOCK_WORDS: usize = 256;
/// Number of words before the records.
pub const HEAD: usize = 4;
/// Number of words of a record.
const RECORD: usize = 3;
/// Maximum number of records of a block.
pub const MOST_RECORDS: usize = (BLOCK_WORDS - HEAD) / RECORD;
/// Maximum number of blocks of a list.
pub const MAX_BLOCKS: usize = 1 << 16;
/// Index of the checksum's word.
pub const SUM: usize = 1;

const _: () = assert!((BLOCK_WORDS - HEAD).is_multiple_of(RECORD));

/// Location of a block, and the first byte of the region that the block describes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockRef {
    /// Offset in the region.
    pub first: u64,
    /// Address of the block.
    pub addr: RemoteAddr,
    /// rkey of the block's memory.
    pub rkey: Rkey,
}

/// The encoded words of a block or an index.
fn encode(generation: u64, first: u64, records: impl Iterator<Item = [u64; RECORD]>) -> Vec<u64> {
    let mut words = vec![generation, 0, 0, first];
    words.extend(records.flatten());
    words[2] = ((words.len() - HEAD) / RECORD) as u64;
    words[SUM] = sum(&words);
    words
}

/// The checksum of all words except the checksum's own.
fn sum(words: &[u64]) -> u64 {
    match words {
        [generation, _, rest @ ..] => checksum_on(checksum(&[*generation]), rest),
        _ => 0,
    }
}

/// The encoded words of a block whose first byte is at `first`: at most [`MOST_RECORDS`] segments.
pub fn encode_block(generation: u64, first: u64, segments: &[Segment]) -> Vec<u64> {
    encode(generation, first, segments.iter().map(Segment::words))
}

/// The encoded words of an index: at most [`MAX_BLOCKS`] places.
pub fn encode_index(generation: u64, places: impl Iterator<Item = BlockRef>) -> Vec<u64> {
    let records = places.map(|place| [place.first, place.addr.get(), place.rkey.get().into()]);
    encode(generation, 0, records)
}

/// A segment and its offset in the region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentAt {
    /// Offset in the region.
    pub offset: u64,
    /// The segment.
    pub segment: Segment,
}

/// Decodes the block that covers the bytes from `first` to `end` of a region of this generation.
///
/// # Errors
/// `Torn`: the owner is writing the block, or it covers other bytes now. `Foreign`: an empty
/// segment, or addresses that overflow.
pub fn decode_block(
    words: &[u64],
    generation: u64,
    first: u64,
    end: u64,
) -> Result<Box<[SegmentAt]>, Bad> {
    let count = words.get(2).copied().unwrap_or_default();
    let count = usize::try_from(count).map_err(|_| Bad::Torn)?;
    if !(1..=MOST_RECORDS).contains(&count) {
        return Err(Bad::Torn);
    }
    let words = words.get(..HEAD + count * RECORD).ok_or(Bad::Torn)?;
    if words[SUM] != sum(words) || words[0] != generation || words[3] != first {
        return Err(Bad::Torn);
    }
    let mut segments = Vec::with_capacity(count);
    let mut offset = first;
    for record in words[HEAD..].as_chunks::<RECORD>().0 {
        let segment = Segment::of(record);
        if segment.len == 0 || segment.addr.checked_add(segment.len).is_none() {
            return Err(Bad::Foreign);
        }
        segments.push(SegmentAt { offset, segment });
        offset = offset.checked_add(segment.len).ok_or(Bad::Foreign)?;
    }
    if offset != end {
        // the index was read before the owner moved bytes between this block and the next one
        return Err(Bad::Torn);
    }
    Ok(segments.into_boxed_slice())
}

/// Decoder of an index that is read in steps of [`Self::wants`] words. Its memory grows with
/// the words that were read, not with the number of blocks in the peer's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexReader {
    generation: u64,
    /// Length of the region in bytes.
    len: u64,
    /// The checksum in the first read.
    sum: u64,
    count: usize,
    so_far: u64,
    read: usize,
    places: Vec<BlockRef>,
}

impl IndexReader {
    /// Creates a decoder for a region of this generation and length.
    pub fn new(generation: u64, len: u64) -> Self {
        Self {
            generation,
            len,
            sum: 0,
            count: 0,
            so_far: CHECKSUM_START,
            read: 0,
            places: Vec::new(),
        }
    }

    /// Number of words read so far, which is the offset of the next read.
    pub fn read(&self) -> usize {
        self.read
    }

    /// Number of words of the next read, 1 to [`BLOCK_WORDS`].
    pub fn wants(&self) -> usize {
        if self.read == 0 {
            return BLOCK_WORDS;
        }
        let left = HEAD + self.count * RECORD - self.read.min(HEAD + self.count * RECORD);
        left.clamp(1, BLOCK_WORDS - HEAD)
    }

    /// Processes the next read. `Some`: the index is complete; its places are in order, the
    /// first one at 0, and all of them in the region.
    ///
    /// # Errors
    /// `Torn`: the owner has written the index meanwhile, or its memory belongs to another region
    /// now. `Foreign`: the list is invalid.
    pub fn feed(&mut self, words: &[u64]) -> Result<Option<Vec<BlockRef>>, Bad> {
        let records = if self.read == 0 {
            let [generation, sum, count, first, rest @ ..] = words else {
                return Err(Bad::Foreign);
            };
            if *generation != self.generation {
                return Err(Bad::Torn);
            }
            self.sum = *sum;
            self.count = usize::try_from(*count).map_err(|_| Bad::Torn)?;
            if !(1..=MAX_BLOCKS).contains(&self.count) {
                return Err(Bad::Torn);
            }
            self.so_far = checksum(&[*generation, *count, *first]);
            self.read = HEAD;
            rest
        } else {
            words
        };
        let left = self.count - self.places.len();
        let records = records.as_chunks::<RECORD>().0.iter().take(left);
        for record in records {
            self.so_far = checksum_on(self.so_far, record);
            self.read += RECORD;
            self.places.push(BlockRef {
                first: record[0],
                addr: RemoteAddr::new(record[1]),
                rkey: Rkey::new(record[2] as u32),
            });
        }
        if self.places.len() < self.count {
            return Ok(None);
        }
        if self.so_far != self.sum {
            return Err(Bad::Torn);
        }
        let rising = self
            .places
            .windows(2)
            .all(|pair| pair[0].first < pair[1].first);
        let inside = self.places.last().is_some_and(|last| last.first < self.len);
        let whole = self.places.first().is_some_and(|place| place.first == 0);
        if !rising || !inside || !whole {
            return Err(Bad::Foreign);
        }
        Ok(Some(std::mem::take(&mut self.places)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn index(reader: &mut IndexReader, words: &[u64]) -> Result<Vec<BlockRef>, Bad> {
        let mut padded = words.to_vec();
        padded.resize(words.len().max(BLOCK_WORDS), 7);
        loop {
            let (at, count) = (reader.read(), reader.wants());
            // the peer's device refuses a read beyond the memory
            let words = padded.get(at..at + count).ok_or(Bad::Foreign)?;
            if let Some(places) = reader.feed(words)? {
                return Ok(places);
            }
        }
    }

    proptest! {
        #[test]
        fn an_index_survives_in_several_reads(count in 1..1000_usize, generation: u64, torn: bool, at: usize) {
            let places: Vec<_> = (0..count as u64)
                .map(|i| BlockRef { first: i * 4096, addr: RemoteAddr::new(i << 11), rkey: Rkey::new(i as u32) })
                .collect();
            let mut words = encode_index(generation, places.iter().copied());
            let len = count as u64 * 4096;
            let at = at % words.len();
            if torn {
                words[at] ^= 1 << (at % 64);
            }
            let found = index(&mut IndexReader::new(generation, len), &words);
            if !torn {
                prop_assert_eq!(found, Ok(places));
            } else if at == 2 {
                // a number of blocks that does not fit this memory
                prop_assert!(found.is_err());
            } else {
                prop_assert_eq!(found, Err(Bad::Torn));
            }
            if !torn && count > 1 {
                let short = index(&mut IndexReader::new(generation, len - 4096), &words);
                prop_assert_eq!(short, Err(Bad::Foreign));
            }
        }

        #[test]
        fn blocks_survive(lens in prop::collection::vec(1..100_000_u64, 1..=MOST_RECORDS), first in 0..1_u64 << 40) {
            let segments: Vec<_> = lens
                .iter()
                .enumerate()
                .map(|(i, len)| Segment { addr: RemoteAddr::new((i as u64) << 20), len: *len, rkey: Rkey::new(i as u32), absent: i % 3 == 0 })
                .collect();
            let mut words = encode_block(9, first, &segments);
            prop_assert!(words.len() <= BLOCK_WORDS);
            words.resize(BLOCK_WORDS, 5);
            let end = first + lens.iter().sum::<u64>();
            let segments_at = decode_block(&words, 9, first, end).unwrap();
            let found: Vec<_> = segments_at.iter().map(|at| at.segment).collect();
            prop_assert_eq!(&found, &segments);
            let mut offset = first;
            for at in &segments_at {
                prop_assert_eq!(at.offset, offset);
                offset += at.segment.len;
            }
            for (generation, first, end) in [(8, first, end), (9, first + 1, end), (9, first, end + 1)] {
                prop_assert_eq!(decode_block(&words, generation, first, end), Err(Bad::Torn));
            }
        }
    }

    #[test]
    fn what_no_owner_writes_is_foreign() {
        let empty = Segment::default();
        let words = encode_block(1, 0, &[empty]);
        assert_eq!(decode_block(&words, 1, 0, 0), Err(Bad::Foreign));
        let high = Segment {
            addr: RemoteAddr::new(u64::MAX),
            len: 2,
            ..empty
        };
        let words = encode_block(1, 0, &[high]);
        assert_eq!(decode_block(&words, 1, 0, 2), Err(Bad::Foreign));
        for firsts in [[1, 2], [0, 0], [0, 100]] {
            let places = firsts.map(|first| BlockRef {
                first,
                addr: RemoteAddr::NULL,
                rkey: Rkey::default(),
            });
            let words = encode_index(1, places.into_iter());
            assert_eq!(
                index(&mut IndexReader::new(1, 100), &words),
                Err(Bad::Foreign)
            );
        }
        assert_eq!(index(&mut IndexReader::new(0, 1), &[0; 4]), Err(Bad::Torn));
    }
}
