//! The protection domains of a process, listed for importing processes.

use std::sync::atomic::Ordering;

use crate::segment::layout::{MAX_PDS, domain as layout};
use crate::segment::{Mapping, OwnSegment};
use crate::sys::Res;

fn at(number: u32) -> usize {
    layout::AT + layout::STRIDE * (number as usize % MAX_PDS)
}

fn word(number: u32, context: u32) -> u64 {
    u64::from(number) | u64::from(context) << 32
}

/// Lists a domain of a context. A domain whose place is taken by another one cannot be imported.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn show(segment: &OwnSegment, number: u32, context: u32) -> Res<()> {
    segment.back(at(number), layout::STRIDE)?;
    let place = segment.map.u64(at(number));
    let word = word(number, context);
    let _ = place.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed);
    Ok(())
}

/// Removes a domain from the list.
pub(crate) fn hide(segment: &OwnSegment, number: u32) {
    let place = segment.map.u64(at(number));
    if place.load(Ordering::Relaxed) as u32 == number {
        place.store(0, Ordering::Relaxed);
    }
}

/// Whether a context has this domain. The segment may be a peer's.
pub(crate) fn is_shown(map: &Mapping, number: u32, context: u32) -> bool {
    let place = map.u64(at(number));
    number != 0 && place.load(Ordering::Acquire) == word(number, context)
}
