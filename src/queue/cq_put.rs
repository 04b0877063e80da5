//! Entries of operations that were executed in their call, without a request.

use crate::queue::Completion;
use crate::queue::cq::CompletionQueue;
use crate::queue::source::Entry;

/// Maximum number of entries without request between two polls of the device queue.
const MOST_PUT: u32 = 8;

impl CompletionQueue {
    /// Whether the queue takes the entry of an operation that has no request: the entry is then in
    /// front of all that the device has not been asked for. One at a time, so that the entries
    /// that nobody reads are bounded by the requests of their endpoints; and at most [`MOST_PUT`]
    /// between two polls of the device queue, which reads of one entry leave out otherwise.
    #[inline]
    pub(crate) fn takes_entries(&self) -> bool {
        let inner = self.inner.lock();
        inner.backlog.is_empty() && inner.put < MOST_PUT
    }

    /// Adds an entry, for which [`Self::takes_entries`] has just returned `true`.
    #[inline]
    pub(crate) fn put(&self, completion: &Completion) {
        let mut inner = self.inner.lock();
        inner.put += 1;
        inner.backlog.push_back(Entry::Done(*completion));
        if std::mem::take(&mut inner.armed)
            && let Some(wait) = &self.wait
        {
            wait.wake();
        }
    }
}
