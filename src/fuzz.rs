//! What has an algebra, and what reads from strangers, driven by bytes: property tests in `cargo test`,
//! fuzz targets in `make fuzz`. `crates/softverbs/src/fuzz` has those of the device.

use std::collections::VecDeque;

use crate::queue::slots::{Slot, SlotRing};
use crate::wire::cm_data::{CM_DATA_SIZE, CmData, MAX_CM_DATA};

/// Private data decodes to at most as many bytes as are there, and what an application hands in comes out
/// at the other end, padded or not.
///
/// # Panics
/// Where that is not so.
pub fn cm_data(data: &[u8]) {
    let decoded = CmData::decode(data);
    assert!(decoded.data().len() <= data.len().saturating_sub(1).min(MAX_CM_DATA));
    assert!(
        data.get(1..)
            .unwrap_or_default()
            .starts_with(decoded.data())
    );
    match CmData::new(data) {
        Ok(sent) => {
            let mut packet = sent.encoded().to_vec();
            assert_eq!(CmData::decode(&packet).data(), data);
            packet.resize(196, 0xff);
            assert_eq!(CmData::decode(&packet).data(), data);
        }
        Err(_) => assert!(data.len() > CM_DATA_SIZE),
    }
}

/// One request as the model has it.
#[derive(Clone, Copy)]
struct Request {
    number: u32,
    context: usize,
    signaled: bool,
    done: bool,
}

/// Each request completes once, with its own context; unsignaled ones complete with a later one; no more are
/// under way than the depth allows; a number that belongs to nothing is refused.
///
/// # Panics
/// Where that is not so.
pub fn slots(data: &[u8]) {
    let (&depth, data) = data.split_first().unwrap_or((&0, &[]));
    let ring = SlotRing::new(usize::from(depth % 20) + 1);
    let mut model: VecDeque<Request> = VecDeque::new();
    let mut context = 0;
    let mut bytes = data.iter().copied();
    while let Some(choice) = bytes.next() {
        let argument = usize::from(bytes.next().unwrap_or(0));
        match choice % 6 {
            0..=2 => {
                assert_eq!(ring.is_full(), model.len() >= ring.depth() as usize);
                if ring.is_full() {
                    continue;
                }
                let signaled = argument.is_multiple_of(2);
                context += 1;
                let number = ring.push(Slot {
                    context,
                    signaled,
                    visible: signaled,
                    ..Slot::default()
                });
                if let Some(last) = model.back() {
                    assert_eq!(number, last.number.wrapping_add(1));
                }
                if argument > 240 {
                    ring.unpush();
                    continue;
                }
                model.push_back(Request {
                    number,
                    context,
                    signaled,
                    done: false,
                });
            }
            3..=4 if !model.is_empty() => {
                let at = argument % model.len();
                let request = model[at];
                let slot = ring.complete(request.number);
                assert_eq!(
                    slot.map(|slot| slot.context),
                    (!request.done).then_some(request.context)
                );
                if request.done {
                    continue;
                }
                model[at].done = true;
                let mut index = 0;
                while let Some(first) = model.front() {
                    if !(first.done || !first.signaled && index <= at) {
                        break;
                    }
                    model.pop_front();
                    index += 1;
                }
            }
            _ => {
                // One before the oldest, or behind the newest.
                let number = match (model.front(), model.back(), argument % 2) {
                    (Some(first), _, 0) => first.number.wrapping_sub(1),
                    (_, Some(last), _) => last.number.wrapping_add(1 + argument as u32),
                    _ => continue,
                };
                assert!(ring.complete(number).is_none());
            }
        }
        assert_eq!(ring.outstanding() as usize, model.len());
    }
    for request in model.into_iter().filter(|request| !request.done) {
        assert_eq!(
            ring.abandon().map(|slot| slot.context),
            Some(request.context)
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// What fails becomes a test of its own; nothing is written into the tree.
    fn cases(cases: u32) -> ProptestConfig {
        ProptestConfig {
            cases,
            failure_persistence: None,
            ..ProptestConfig::default()
        }
    }

    #[test]
    fn cm_data() {
        proptest!(cases(2000), |(data in prop::collection::vec(any::<u8>(), 0..80))| {
            super::cm_data(&data);
        });
    }

    #[test]
    fn slots() {
        proptest!(cases(500), |(data in prop::collection::vec(any::<u8>(), 0..400))| {
            super::slots(&data);
        });
    }
}
