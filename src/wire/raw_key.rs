//! Raw keys: output of `fi_mr_raw_attr`, input of `fi_mr_map_raw`. `docs/protocol.md`, "Raw keys".

use super::records::{Bad, Entry, MAX_SEGMENTS, RECORD_SIZE, Segment, WORDS, checksum};

const MAGIC: u64 = 0x0001_7761_7274_6677;
/// The bits of [`MAGIC`] that are the same in every version.
const SIGNATURE: u64 = 0xffff_ffff_ffff;
/// Number of words before the segments: magic, domain, flags, the entry.
const HEAD: usize = 3 + WORDS;

/// Size of the longest raw key in bytes.
pub const MAX_RAW_KEY_SIZE: usize = (HEAD + 3 * MAX_SEGMENTS + 1) * 8;
const _: () = assert!(MAX_RAW_KEY_SIZE == 24 + RECORD_SIZE + 24 * MAX_SEGMENTS + 8);

/// Size in bytes of a raw key that is the key itself, in forms without `FI_MR_RAW`.
pub const KEY_SIZE: usize = 8;

/// The raw key that is the key itself.
pub fn encode_short(key: u64) -> [u8; KEY_SIZE] {
    key.to_le_bytes()
}

/// Decodes the short key at the start of these bytes. `None`: the bytes are a record of any
/// version, or too few.
pub fn decode_short(bytes: &[u8]) -> Option<u64> {
    let key = u64::from_le_bytes(*bytes.first_chunk::<KEY_SIZE>()?);
    ((key ^ MAGIC) & SIGNATURE != 0).then_some(key)
}

/// The description of a region that its owner passes to its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawKey {
    /// Number of the domain whose directory contains the region.
    pub domain: u64,
    /// Whether the directory contains the region under the entry's key. Otherwise the entry's key
    /// is the device's rkey.
    pub published: bool,
    /// The region's record. If the region has several buffers, the segments have the addresses and
    /// rkeys, and those of the record are not used.
    pub entry: Entry,
    /// The region's buffers, if it has several.
    pub segments: Vec<Segment>,
}

impl RawKey {
    /// The encoded bytes.
    pub fn encode(&self) -> Vec<u8> {
        let flags = u64::from(self.published);
        let mut words = vec![MAGIC, self.domain, flags];
        words.extend(self.entry.encode());
        Segment::encode_all(&self.segments, &mut words);
        words.push(checksum(&words));
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Decodes bytes that the application passes; ignores bytes after the key.
    ///
    /// # Errors
    /// `Torn`: the key is truncated or modified. `Foreign`: the key has another version or invalid
    /// values, or more segments than a key can have.
    pub fn decode(bytes: &[u8]) -> Result<Self, Bad> {
        let chunks = bytes.as_chunks::<8>().0.iter();
        let words: Vec<u64> = chunks.map(|chunk| u64::from_le_bytes(*chunk)).collect();
        let (head, rest) = words.split_first_chunk::<HEAD>().ok_or(Bad::Torn)?;
        if head[0] != MAGIC || head[2] > 1 {
            return Err(Bad::Foreign);
        }
        let (_, record) = head.split_last_chunk::<WORDS>().ok_or(Bad::Torn)?;
        let entry = Entry::decode(record)?.ok_or(Bad::Foreign)?;
        if entry.is_long() {
            // such a list is in blocks of the owner's memory, never in a key
            return Err(Bad::Foreign);
        }
        let count = 3 * usize::from(entry.segments);
        let (listed, after) = rest.split_at_checked(count).ok_or(Bad::Torn)?;
        if after.first() != Some(&checksum(&words[..HEAD + count])) {
            return Err(Bad::Torn);
        }
        let segments = match count {
            0 => Vec::new(),
            _ => Segment::decode_all(listed, entry.len)?,
        };
        Ok(Self {
            domain: head[1],
            published: head[2] == 1,
            entry,
            segments,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{RemoteAddr, Rkey};

    fn keys() -> Vec<RawKey> {
        (0..=MAX_SEGMENTS as u64)
            .filter(|count| *count != 1)
            .map(|count| {
                let segments: Vec<_> = (0..count)
                    .map(|i| Segment {
                        addr: RemoteAddr::new(i << 30),
                        len: 100 + i,
                        rkey: Rkey::new(i as u32),
                        absent: false,
                    })
                    .collect();
                let sum = segments.iter().map(|segment| segment.len).sum();
                RawKey {
                    domain: 0x1234_5678_9abc_def0,
                    published: count != 0,
                    entry: Entry {
                        key: 77,
                        addr: RemoteAddr::new(0x1000),
                        len: if count == 0 { 64 } else { sum },
                        segments: count as u16,
                        generation: 5,
                        access: 3,
                        ..Entry::default()
                    },
                    segments,
                }
            })
            .collect()
    }

    #[test]
    fn raw_keys_survive_and_longer_buffers_do_no_harm() {
        for key in keys() {
            let mut bytes = key.encode();
            assert!(bytes.len() <= MAX_RAW_KEY_SIZE);
            assert_eq!(RawKey::decode(&bytes), Ok(key.clone()));
            bytes.resize(MAX_RAW_KEY_SIZE + 5, 0xaa);
            assert_eq!(RawKey::decode(&bytes), Ok(key));
        }
        let longest = keys().last().unwrap().encode().len();
        assert_eq!(longest, MAX_RAW_KEY_SIZE);
    }

    #[test]
    fn a_key_of_another_version_is_foreign() {
        for key in keys() {
            let mut bytes = key.encode();
            bytes[6] += 1; // the version; the checksum is renewed below
            let (rest, _) = bytes.split_at(bytes.len() - 8);
            let words: Vec<u64> = rest
                .chunks(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
                .collect();
            let sum = checksum(&words).to_le_bytes();
            let end = bytes.len() - 8;
            bytes[end..].copy_from_slice(&sum);
            assert_eq!(RawKey::decode(&bytes), Err(Bad::Foreign));
        }
    }

    /// The checksum is no secret: a peer can forge it.
    #[test]
    fn a_key_has_no_more_segments_than_fit() {
        let key = |count: u16| {
            let segment = Segment {
                len: 1,
                ..Segment::default()
            };
            RawKey {
                domain: 1,
                published: true,
                entry: Entry {
                    key: 77,
                    len: count.into(),
                    segments: count,
                    ..Entry::default()
                },
                segments: vec![segment; count.into()],
            }
        };
        let most = MAX_SEGMENTS as u16;
        assert!(RawKey::decode(&key(most).encode()).is_ok());
        for forged in [most + 1, Entry::LONG - 1, Entry::LONG] {
            let bytes = key(forged).encode();
            assert_eq!(RawKey::decode(&bytes), Err(Bad::Foreign), "{forged}");
        }
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_noticed() {
        for key in keys() {
            let bytes = key.encode();
            for len in 0..bytes.len() {
                assert!(RawKey::decode(&bytes[..len]).is_err(), "{len} bytes");
            }
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << (at % 8);
                assert!(RawKey::decode(&changed).is_err(), "byte {at}");
            }
        }
    }
}
