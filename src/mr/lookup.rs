//! State machine of one key look-up in a peer's directory: selects the words to READ next and
//! decodes them, without I/O. `docs/protocol.md`, "Looking a key up".
//!
//! All words are untrusted data of the peer: they are copied, decoded and bounded before use, and
//! every look-up ends, independent of their contents.

use super::directory_table::{REACH, home};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::records::{
    Bad, Block, Entry, Header, MAX_LIST_WORDS, RECORD_SIZE, Segment, WORDS,
};
use crate::wire::segment_list::{BLOCK_WORDS, BlockRef, IndexReader, SegmentAt, decode_block};

/// Entries per read.
const WINDOW: usize = 4;
/// Maximum number of words per read.
pub(crate) const READ_WORDS: usize = BLOCK_WORDS;
const _: () = assert!(READ_WORDS >= WINDOW * WORDS && READ_WORDS >= MAX_LIST_WORDS);
/// Maximum number of restarts of a look-up because the directory has changed.
const RESTARTS: u32 = 16;

/// A read of the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Read {
    pub(crate) addr: RemoteAddr,
    pub(crate) rkey: Rkey,
    pub(crate) words: usize,
    /// Whether this is a compare and swap instead of a read: it replaces a word that is 0 by
    /// [`Map::token`] and returns the previous value.
    pub(crate) claim: bool,
}

/// The records of a looked-up key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    pub(crate) entry: Entry,
    pub(crate) cells_rkey: Rkey,
    /// Empty: the region is one buffer. Otherwise the blocks of a list, in order and without gaps,
    /// the first at offset 0. A short list is one block, which is read together with the key.
    pub(crate) blocks: Box<[SegmentBlock]>,
    /// Whether the only access to a single-use region was posted.
    pub(crate) used: bool,
}

/// A block of a region's segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SegmentBlock {
    pub(crate) place: BlockRef,
    /// The segments in order and without gaps; empty until the block is read.
    pub(crate) segments: Box<[SegmentAt]>,
}

impl SegmentBlock {
    /// The only block of a region with these segments.
    pub(crate) fn of(segments: &[Segment]) -> Self {
        let mut offset = 0_u64;
        let segments = segments.iter().map(|&segment| {
            let at = SegmentAt { offset, segment };
            // cannot wrap: the decoder has checked the sum
            offset = offset.wrapping_add(segment.len);
            at
        });
        Self {
            segments: segments.collect(),
            place: BlockRef::default(),
        }
    }
}

impl Resolved {
    /// Number of blocks and of segments read, for the memory limit.
    pub(crate) fn units(&self) -> usize {
        let segments = self.blocks.iter().map(|block| block.segments.len());
        self.blocks.len() + segments.sum::<usize>()
    }

    /// The place of a block, and the offset of its end.
    pub(super) fn block(&self, index: usize) -> Option<(BlockRef, u64)> {
        let next = self.blocks.get(index + 1);
        let end = next.map_or(self.entry.len, |next| next.place.first);
        Some((self.blocks.get(index)?.place, end))
    }
}

/// Result of one step of a look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Read [`Lookup::read`] next.
    More,
    /// Read [`Lookup::read`] again: the record was incomplete, or has changed.
    Torn,
    /// The key was found.
    Found(Resolved),
    /// The header was read and has this revocation count; the result of [`Lookup::check`].
    Checked(u64),
    /// The segments of the requested block.
    Segments(usize, Box<[SegmentAt]>),
    /// The cached records of the region are outdated.
    Stale,
    /// The peer has no such key.
    Missing,
    /// The peer's directory is invalid.
    Broken,
}

/// The peer's directory as read by earlier look-ups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Map {
    block: (RemoteAddr, Rkey),
    header_at: Option<(RemoteAddr, Rkey)>,
    header: Option<Header>,
    /// Address of the event cell of the peer's endpoint, or 0.
    pub(crate) cell: RemoteAddr,
    /// The connection's unique token for claims, not 0.
    pub(crate) token: u64,
}

impl Map {
    /// `addr` and `rkey` of the peer's connection block.
    pub(crate) fn new(addr: RemoteAddr, rkey: Rkey, token: u64) -> Self {
        Self {
            token: token.max(1),
            block: (addr, rkey),
            header_at: None,
            header: None,
            cell: RemoteAddr::NULL,
        }
    }
}

impl Map {
    /// The number of the directory's domain, once the header was read.
    pub(crate) fn domain(&self) -> Option<u64> {
        self.header.map(|header| header.domain)
    }

    /// The peer's count of revocations when its header was last read.
    pub(crate) fn revocations(&self) -> Option<u64> {
        self.header.map(|header| header.revocations)
    }
}

#[derive(Clone, Debug)]
enum Stage {
    Block,
    /// The header alone, for its count of revocations.
    Check,
    /// The header; after a miss, with its previous content.
    Header(Option<Header>),
    /// Entries from this slot on.
    Window(Header, usize),
    /// The claim of a single-use region, before its list.
    Claim(Entry),
    List(Entry),
    /// The index of a long list.
    Index(Entry, IndexReader),
    /// A block of a long list: its index, the region's generation, its place, and the offset of its
    /// end.
    Segments(usize, u64, BlockRef, u64),
}

/// A look-up in progress; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    key: u64,
    stage: Stage,
    restarts: u32,
}

impl Lookup {
    pub(crate) fn new(key: u64, map: &Map) -> Self {
        let stage = match (map.header_at, map.header) {
            (_, Some(header)) => Stage::Window(header, home(key, header.log2)),
            (Some(_), None) => Stage::Header(None),
            (None, None) => Stage::Block,
        };
        Self {
            key,
            stage,
            restarts: 0,
        }
    }

    /// A look-up that reads only the header, for an operation with this key. `None` before the
    /// connection block was read.
    pub(crate) fn check(key: u64, map: &Map) -> Option<Self> {
        map.header_at?;
        Some(Self {
            stage: Stage::Check,
            ..Self::new(key, map)
        })
    }

    /// A look-up of a block of segments of a resolved key. `None` if the key has no such block.
    pub(crate) fn of_block(resolved: &Resolved, index: usize) -> Option<Self> {
        let (place, end) = resolved.block(index)?;
        Some(Self {
            key: resolved.entry.key,
            stage: Stage::Segments(index, resolved.entry.generation, place, end),
            restarts: 0,
        })
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// The index of the requested block, if the look-up is for a block.
    pub(crate) fn block(&self) -> Option<usize> {
        match self.stage {
            Stage::Segments(index, ..) => Some(index),
            _ => None,
        }
    }

    /// The next read. Addresses wrap if the peer's records are invalid; the peer's device then
    /// refuses the read.
    pub(crate) fn read(&self, map: &Map) -> Read {
        let (addr, rkey, words) = match &self.stage {
            Stage::Block => (map.block.0, map.block.1, WORDS),
            Stage::Check | Stage::Header(_) => {
                let (addr, rkey) = map.header_at.unwrap_or_default();
                (addr, rkey, WORDS)
            }
            &Stage::Window(header, slot) => {
                let offset = (slot as u64).wrapping_mul(RECORD_SIZE as u64);
                let addr = header.table_addr.wrapping_add(offset);
                (addr, header.table_rkey, self.window(header, slot) * WORDS)
            }
            Stage::Claim(entry) => (entry.claim_addr(), entry.rkey, 1),
            Stage::List(entry) => {
                let words = 2 + 3 * usize::from(entry.segments);
                (entry.addr, entry.rkey, words.min(READ_WORDS))
            }
            Stage::Index(entry, reader) => {
                let addr = entry.addr.wrapping_add(reader.read() as u64 * 8);
                (addr, entry.rkey, reader.wants())
            }
            Stage::Segments(_, _, place, _) => (place.addr, place.rkey, BLOCK_WORDS),
        };
        Read {
            addr,
            rkey,
            words,
            claim: matches!(self.stage, Stage::Claim(_)),
        }
    }

    /// Number of entries to read from `slot` on, at most [`WINDOW`].
    fn window(&self, header: Header, slot: usize) -> usize {
        let end = home(self.key, header.log2) + REACH;
        WINDOW.min(end.saturating_sub(slot))
    }

    /// Processes the words of a completed read.
    pub(crate) fn feed(&mut self, map: &mut Map, words: &[u64]) -> Outcome {
        let result = match &mut self.stage {
            Stage::Block => self.connection_block(map, words),
            Stage::Check => Self::check_header(map, words),
            &mut Stage::Header(before) => self.header(map, words, before),
            &mut Stage::Window(header, slot) => self.entries(map, words, header, slot),
            &mut Stage::Claim(entry) => match words.first() {
                Some(&before) if before == 0 || before == map.token => {
                    self.stage = Stage::List(entry);
                    Ok(Outcome::More)
                }
                // another connection has claimed or used the region
                _ => Ok(Outcome::Missing),
            },
            &mut Stage::List(entry) => Segment::decode_list(words, &entry).map(|segments| {
                let blocks = Box::new([SegmentBlock::of(&segments)]);
                Outcome::Found(found(map, entry, blocks))
            }),
            Stage::Index(entry, reader) => reader.feed(words).map(|places| match places {
                None => Outcome::More,
                Some(places) => {
                    let blocks = places.into_iter().map(|place| SegmentBlock {
                        place,
                        segments: Box::default(),
                    });
                    Outcome::Found(found(map, *entry, blocks.collect()))
                }
            }),
            &mut Stage::Segments(index, generation, place, end) => {
                match decode_block(words, generation, place.first, end) {
                    Err(Bad::Torn) => Ok(Outcome::Stale),
                    read => read.map(|segments| Outcome::Segments(index, segments)),
                }
            }
        };
        match result {
            Ok(outcome) => outcome,
            Err(Bad::Foreign) => Outcome::Broken,
            Err(Bad::Torn) => {
                if let Stage::List(_) | Stage::Index(..) = self.stage {
                    // the entry may be removed, or the list moved: restart
                    self.stage = Self::new(self.key, map).stage;
                }
                Outcome::Torn
            }
        }
    }

    fn connection_block(&mut self, map: &mut Map, words: &[u64]) -> Result<Outcome, Bad> {
        let words = words.first_chunk().ok_or(Bad::Foreign)?;
        let block = Block::decode(words).ok_or(Bad::Torn)?;
        if block.header_addr.is_null() {
            return Ok(Outcome::Missing);
        }
        map.header_at = Some((block.header_addr, block.header_rkey));
        map.cell = block.cell;
        self.stage = Stage::Header(None);
        Ok(Outcome::More)
    }

    fn check_header(map: &mut Map, words: &[u64]) -> Result<Outcome, Bad> {
        let words = words.first_chunk().ok_or(Bad::Foreign)?;
        let header = Header::decode(words)?;
        map.header = Some(header);
        Ok(Outcome::Checked(header.revocations))
    }

    fn header(
        &mut self,
        map: &mut Map,
        words: &[u64],
        before: Option<Header>,
    ) -> Result<Outcome, Bad> {
        let words = words.first_chunk().ok_or(Bad::Foreign)?;
        let header = Header::decode(words)?;
        map.header = Some(header);
        let changed = before.is_none_or(|before| {
            before.moves != header.moves
                || before.table_addr != header.table_addr
                || before.table_rkey != header.table_rkey
        });
        if !changed {
            if header.moves % 2 == 0 {
                return Ok(Outcome::Missing);
            }
            // entries are being moved: the key may have been in neither place when it was read
            self.stage = Stage::Header(None);
            return Ok(Outcome::Torn);
        }
        if before.is_some() {
            self.restarts += 1;
            if self.restarts > RESTARTS {
                return Ok(Outcome::Broken);
            }
        }
        self.stage = Stage::Window(header, home(self.key, header.log2));
        Ok(Outcome::More)
    }

    fn entries(
        &mut self,
        map: &Map,
        words: &[u64],
        header: Header,
        slot: usize,
    ) -> Result<Outcome, Bad> {
        let count = self.window(header, slot);
        for record in words.as_chunks::<WORDS>().0.iter().take(count) {
            let Some(entry) = Entry::decode(record)? else {
                self.stage = Stage::Header(Some(header));
                return Ok(Outcome::More);
            };
            if entry.key != self.key {
                continue;
            }
            if entry.segments == 0 {
                return Ok(Outcome::Found(found(map, entry, Box::default())));
            }
            self.stage = if entry.is_long() {
                Stage::Index(entry, IndexReader::new(entry.generation, entry.len))
            } else if entry.once {
                Stage::Claim(entry)
            } else {
                Stage::List(entry)
            };
            return Ok(Outcome::More);
        }
        let next = slot + count;
        self.stage = if self.window(header, next) == 0 {
            Stage::Header(Some(header))
        } else {
            Stage::Window(header, next)
        };
        Ok(Outcome::More)
    }
}

fn found(map: &Map, entry: Entry, blocks: Box<[SegmentBlock]>) -> Resolved {
    Resolved {
        entry,
        cells_rkey: map
            .header
            .map_or(Rkey::default(), |header| header.cells_rkey),
        blocks,
        used: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::segment_list::MAX_BLOCKS;

    /// With arbitrary records of the peer every look-up ends, and the resolution does not overflow.
    #[test]
    fn a_lookup_ends_whatever_the_peer_says() {
        let mut state = 7_u64;
        let mut next = move || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            state ^ state >> 29
        };
        let mut ends = [0_u32; 3];
        for round in 0..3000_u64 {
            let key = next();
            let mut map = Map::new(RemoteAddr::new(next()), Rkey::new(next() as u32), 7);
            let mut lookup = Lookup::new(key, &map);
            let (mut reads, mut torn) = (0, 0);
            let outcome = loop {
                let read = lookup.read(&map);
                assert!(read.words <= READ_WORDS && read.words > 0);
                let mut words: Vec<u64> = (0..read.words).map(|_| next()).collect();
                match (next() % 8, lookup.stage.clone()) {
                    (0, _) => {}
                    (_, Stage::Block) => words[2..8].copy_from_slice(
                        &Block {
                            header_addr: RemoteAddr::new(next()),
                            header_rkey: Rkey::new(1),
                            cell: RemoteAddr::new(next()),
                        }
                        .encode(),
                    ),
                    (_, Stage::Check | Stage::Header(_)) => {
                        let header = Header {
                            log2: (next() % 42) as u32,
                            moves: next() % 3,
                            ..Header::default()
                        };
                        words.copy_from_slice(&header.encode());
                    }
                    (kind, Stage::Window(..)) => {
                        for record in words.as_chunks_mut::<WORDS>().0 {
                            let entry = Entry {
                                key: if next() % 16 == 0 { key } else { next() },
                                segments: match next() % 9 * (round % 2) {
                                    1 => Entry::LONG,
                                    count => count as u16,
                                },
                                len: next(),
                                ..Entry::default()
                            };
                            *record = if kind == 1 {
                                [0; WORDS]
                            } else {
                                entry.encode()
                            };
                        }
                    }
                    (_, Stage::Claim(_)) => words[0] = next() % 2,
                    (_, Stage::List(entry)) => {
                        let segments = vec![Segment::default(); usize::from(entry.segments)];
                        words = Segment::encode_list(entry.generation, &segments);
                    }
                    (_, Stage::Index(entry, reader)) => {
                        // a list with a false number of blocks
                        if reader.read() == 0 {
                            words[0] = entry.generation;
                            words[2] = next() % 2 * (next() % (MAX_BLOCKS as u64 + 2));
                        }
                    }
                    (_, Stage::Segments(..)) => unreachable!("nothing was found"),
                }
                reads += 1;
                let indices = 100 * (MAX_BLOCKS / 84 + 2);
                assert!(reads < 4000 + indices, "it goes on and on");
                match lookup.feed(&mut map, &words) {
                    Outcome::More => {}
                    Outcome::Torn if torn < 100 => torn += 1,
                    outcome => break outcome,
                }
            };
            match outcome {
                Outcome::Found(found) => {
                    assert_eq!(found.entry.key, key);
                    assert!(found.entry.start.checked_add(found.entry.len).is_some());
                    ends[0] += 1;
                }
                Outcome::Missing => ends[1] += 1,
                _ => ends[2] += 1,
            }
        }
        assert!(ends.iter().all(|count| *count > 10), "{ends:?}");
    }
}
