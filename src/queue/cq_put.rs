//! Entries of operations that were executed in their call, without a request.

use crate::queue::Completion;
use crate::queue::cq::CompletionQueue;
use crate::queue::source::Entry;

/// Maximum number of entries of operations without a work request between two polls of the device
/// queue.
const MOST_PUT: u32 = 8;

impl CompletionQueue {
    /// Whether [`Self::put`] may be called: the backlog is empty, and fewer than [`MOST_PUT`]
    /// entries were put since the device queue was polled. The first condition keeps the order of
    /// the entries. It also limits entries that nobody reads to one for each endpoint: the lock is
    /// not held from here to [`Self::put`], so several endpoints may find the backlog empty. The
    /// second condition makes reads poll the device queue: a read of one entry that is in the
    /// backlog does not.
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
