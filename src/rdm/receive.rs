//! A receive that an application has posted, and its entry. `receives.rs` has all of an endpoint.

use super::iov::Iov;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::Completion;

/// A posted receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    pub(super) iov: Iov,
    /// The descriptor of all buffers, or NULL; `several`: they have several.
    pub(super) desc: Desc,
    pub(super) several: bool,
    pub(super) context: usize,
    pub(super) tagged: bool,
    /// Whether success has an entry for the application.
    pub(super) wanted: bool,
}

impl Receive {
    /// The entry of this receive with a message of which it holds `len` bytes. `data`: the
    /// message's remote CQ data.
    #[inline(always)]
    pub(super) fn completion(&self, tag: Option<u64>, data: Option<u64>, len: usize) -> Completion {
        let mut completion = completion_of(self);
        completion.len = len;
        completion.tag = tag.unwrap_or_default();
        if let Some(data) = data {
            completion.data = data;
            completion.flags |= Flags::REMOTE_CQ_DATA;
        }
        completion
    }
}

/// The entry of a receive, without message.
pub(super) fn completion_of(receive: &Receive) -> Completion {
    let kind = if receive.tagged {
        Flags::TAGGED
    } else {
        Flags::MSG
    };
    Completion::new(receive.context, Flags::RECV | kind)
}
