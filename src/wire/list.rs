//! Long segment lists: an index of blocks, and blocks of segments. `docs/protocol.md`, "Long
//! segment lists", has the words.
//!
//! The owner rewrites one block where parts have changed, and the index where blocks were added or
//! removed. Both begin with the same four words: generation, checksum of all other words, number of
//! records, and the offset of the first byte. Records of three words follow.

use super::records::{Bad, CHECKSUM_START, Segment, checksum, checksum_on};
use crate::verbs::{RemoteAddr, Rkey};

/// Words of a block, used or not, and of the first piece of an index. The memory of an index is
/// never smaller.
pub const BLOCK_WORDS: usize = 256;
/// Words before the records.
pub const HEAD: usize = 4;
/// Words of a record.
const RECORD: usize = 3;
/// Records of a block, at most.
pub const MOST_RECORDS: usize = (BLOCK_WORDS - HEAD) / RECORD;
/// Blocks of a list, at most.
pub const MAX_BLOCKS: usize = 1 << 16;
/// The index of the checksum.
pub const SUM: usize = 1;

const _: () = assert!((BLOCK_WORDS - HEAD).is_multiple_of(RECORD));

/// Where a block is, and which byte of the region it begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Offset in the region.
    pub first: u64,
    /// Address of the block.
    pub addr: RemoteAddr,
    /// rkey of its memory.
    pub rkey: Rkey,
}

/// The words of a block or an index.
fn encode(generation: u64, first: u64, records: impl Iterator<Item = [u64; RECORD]>) -> Vec<u64> {
    let mut words = vec![generation, 0, 0, first];
    words.extend(records.flatten());
    words[2] = ((words.len() - HEAD) / RECORD) as u64;
    words[SUM] = sum(&words);
    words
}

/// The checksum of all words but that of the checksum.
fn sum(words: &[u64]) -> u64 {
    match words {
        [generation, _, rest @ ..] => checksum_on(checksum(&[*generation]), rest),
        _ => 0,
    }
}

/// The words of a block whose first byte is at `first`: at most [`MOST_RECORDS`] segments.
pub fn encode_block(generation: u64, first: u64, segments: &[Segment]) -> Vec<u64> {
    encode(generation, first, segments.iter().map(Segment::words))
}

/// The words of an index: at most [`MAX_BLOCKS`] places.
pub fn encode_index(generation: u64, places: impl Iterator<Item = Place>) -> Vec<u64> {
    let records = places.map(|place| [place.first, place.addr.get(), place.rkey.get().into()]);
    encode(generation, 0, records)
}

/// A segment, and where in the region it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Offset in the region.
    pub offset: u64,
    /// The segment.
    pub segment: Segment,
}

/// The parts of the block that covers the bytes from `first` to `end` of a region of this
/// generation.
///
/// # Errors
/// Torn: it is being written, or covers other bytes by now. Foreign: an empty segment, or addresses
/// that overflow.
pub fn decode_block(
    words: &[u64],
    generation: u64,
    first: u64,
    end: u64,
) -> Result<Box<[Part]>, Bad> {
    let count = words.get(2).copied().unwrap_or_default();
    let count = usize::try_from(count).map_err(|_| Bad::Torn)?;
    if !(1..=MOST_RECORDS).contains(&count) {
        return Err(Bad::Torn);
    }
    let words = words.get(..HEAD + count * RECORD).ok_or(Bad::Torn)?;
    if words[SUM] != sum(words) || words[0] != generation || words[3] != first {
        return Err(Bad::Torn);
    }
    let mut parts = Vec::with_capacity(count);
    let mut offset = first;
    for record in words[HEAD..].as_chunks::<RECORD>().0 {
        let segment = Segment::of(record);
        if segment.len == 0 || segment.addr.checked_add(segment.len).is_none() {
            return Err(Bad::Foreign);
        }
        parts.push(Part { offset, segment });
        offset = offset.checked_add(segment.len).ok_or(Bad::Foreign)?;
    }
    if offset != end {
        // the index was read before a neighbour took over bytes of this block
        return Err(Bad::Torn);
    }
    Ok(parts.into_boxed_slice())
}

/// An index that is read in parts of [`Self::wants`] words. Its memory grows with the words that
/// were read, not with the length that the peer claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexReader {
    generation: u64,
    /// Bytes of the region.
    len: u64,
    /// The checksum, from the head of the first part.
    sum: u64,
    count: usize,
    so_far: u64,
    read: usize,
    places: Vec<Place>,
}

impl IndexReader {
    /// For a region of this generation and length.
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

    /// The number of words read: the offset of the next part.
    pub fn read(&self) -> usize {
        self.read
    }

    /// Words of the next part, 1 to [`BLOCK_WORDS`].
    pub fn wants(&self) -> usize {
        if self.read == 0 {
            return BLOCK_WORDS;
        }
        let left = HEAD + self.count * RECORD - self.read.min(HEAD + self.count * RECORD);
        left.clamp(1, BLOCK_WORDS - HEAD)
    }

    /// Consumes the next part. `Some`: the index is complete; its places are in order, the first
    /// one at 0, and all of them in the region.
    ///
    /// # Errors
    /// Torn: the index was written meanwhile, or now belongs to another region. Foreign: not a
    /// valid list.
    pub fn feed(&mut self, words: &[u64]) -> Result<Option<Vec<Place>>, Bad> {
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
            self.places.push(Place {
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

    fn index(reader: &mut IndexReader, words: &[u64]) -> Result<Vec<Place>, Bad> {
        let mut padded = words.to_vec();
        padded.resize(words.len().max(BLOCK_WORDS), 7);
        loop {
            let (at, count) = (reader.read(), reader.wants());
            // beyond the memory: the peer's device refuses it
            let piece = padded.get(at..at + count).ok_or(Bad::Foreign)?;
            if let Some(places) = reader.feed(piece)? {
                return Ok(places);
            }
        }
    }

    proptest! {
        #[test]
        fn an_index_survives_in_pieces(count in 1..1000_usize, generation: u64, torn: bool, at: usize) {
            let places: Vec<_> = (0..count as u64)
                .map(|i| Place { first: i * 4096, addr: RemoteAddr::new(i << 11), rkey: Rkey::new(i as u32) })
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
                // a number of blocks that no owner writes into this memory
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
            let parts = decode_block(&words, 9, first, end).unwrap();
            let found: Vec<_> = parts.iter().map(|part| part.segment).collect();
            prop_assert_eq!(&found, &segments);
            let mut offset = first;
            for part in &parts {
                prop_assert_eq!(part.offset, offset);
                offset += part.segment.len;
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
            let places = firsts.map(|first| Place {
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
