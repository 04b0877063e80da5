//! The words of an order stay with the index of their shared receive queue when it is destroyed,
//! for the next queue with this index and of this form. Positions continue. A sender can be stopped
//! in front of its claim meanwhile. It then claims no receive, or one of a queue with the number
//! that it knows, to which its message, or its return of the claim, gives the receive back.

use super::Srq;
use crate::process::Process;
use crate::segment::OwnSegment;
use crate::sys::{Grow, Res};

/// What senders know of the words of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Number of words, and of descriptors.
    pub(super) words: usize,
    pub(super) descs: usize,
    pub(super) xrc: bool,
}

/// The words of the destroyed queues of an index.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Their offsets. Has room for one more while a queue exists.
    list: Vec<(Form, usize)>,
    /// Position of the first receive of the next queue: later than any that a sender may have read.
    position: u32,
}

impl Srq {
    /// Allocates the words of an order: their offset, and the position of the first receive.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn take_order(&self, segment: &OwnSegment, form: Form) -> Res<(usize, u32)> {
        let mut kept = self.kept.lock();
        kept.list.make_room(1)?;
        let position = kept.position;
        let fits = |(of, _): &(Form, usize)| *of == form;
        if let Some(found) = kept.list.iter().position(fits) {
            let (_, at) = kept.list.swap_remove(found);
            return Ok((at, position));
        }
        drop(kept);
        let take = || segment.take_order(8 * form.words);
        let at = take().or_else(|_| {
            release_all(self.process(), segment);
            take()
        })?;
        Ok((at, position))
    }

    /// Keeps the words at `at` for the next queue. `position`: that of the next receive.
    pub(super) fn give_order(&self, form: Form, at: usize, position: u32) {
        let mut kept = self.kept.lock();
        kept.position = position.wrapping_add(form.words as u32);
        kept.list.push((form, at));
    }
}

/// Releases the words of all destroyed queues. A sender that has been stopped since one of these
/// queues was destroyed can claim a receive of any other one then.
#[cold]
fn release_all(process: &Process, segment: &OwnSegment) {
    for srq in process.srqs.iter() {
        for (form, at) in srq.kept.lock().list.drain(..) {
            segment.give_order(at, 8 * form.words);
        }
    }
}
