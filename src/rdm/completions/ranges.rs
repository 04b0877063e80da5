//! Atomics on several ranges of the target (`rma_iov_count` of `fi_atomic(3)`): one operation of
//! the engine for each range, and one entry behind the last of them.

use super::{Completions, Fault};
use crate::queue::Completion;
use crate::rdm::slab::{Key, Slab};

/// Marks keys of calls.
enum CallMark {}

/// A call on several ranges, whose operations have its key as their context.
struct Call {
    completion: Completion,
    /// Whether success has an entry for the application.
    wanted: bool,
    /// Number of operations that have not ended.
    left: usize,
    /// The first failure.
    fault: Option<Fault>,
}

/// The calls that have not ended. None of them outlives its operations, which keep their places in
/// the transmit size, so the entry of a call has a place when the last one ends.
pub(super) struct Calls(Slab<CallMark, Call>);

impl Default for Calls {
    fn default() -> Self {
        Self(Slab::new())
    }
}

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Calls").field(&self.0.len()).finish()
    }
}

impl Completions {
    /// Begins a call of so many operations. Returns the context of these operations. `None`: 2^24
    /// calls are under way.
    pub(in crate::rdm) fn begin_call(
        &mut self,
        completion: Completion,
        wanted: bool,
        operations: usize,
    ) -> Option<usize> {
        let call = Call {
            completion,
            wanted,
            left: operations,
            fault: None,
        };
        let key = self.calls.0.insert(call)?;
        Some(key.number() as usize)
    }

    /// No operation of a call has begun: the call is refused.
    pub(in crate::rdm) fn forget_call(&mut self, context: usize) {
        self.calls.0.free(Key::from_number(context as u32));
    }

    /// So many operations of a call have ended; `fault`: they have failed. The last one ends the
    /// call.
    pub(in crate::rdm) fn ranges_ended(
        &mut self,
        context: usize,
        count: usize,
        fault: Option<Fault>,
    ) {
        // the context is the key of the call
        let key = Key::from_number(context as u32);
        let Some(call) = self.calls.0.get_mut(key) else {
            return;
        };
        call.left -= count;
        call.fault = call.fault.or(fault);
        if call.left != 0 {
            return;
        }
        let (completion, wanted, fault) = (call.completion, call.wanted, call.fault);
        self.calls.0.free(key);
        match fault {
            None => self.rma_done(completion, wanted),
            Some(fault) => self.rma_failed(completion, fault),
        }
    }

    /// Number of calls on several ranges that have not ended.
    #[cfg(test)]
    pub(in crate::rdm) fn calls(&self) -> usize {
        self.calls.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, Side};
    use super::*;
    use crate::errno::FiErrno;
    use crate::flags::Flags;

    #[test]
    fn a_call_has_one_entry_behind_its_last_operation() {
        let mut completions = Completions::new(&std::sync::Arc::default());
        let of = |context| Completion::new(context, Flags::ATOMIC | Flags::WRITE);
        let first = completions.begin_call(of(7), true, 3).unwrap();
        let second = completions.begin_call(of(8), true, 2).unwrap();
        completions.ranges_ended(first, 1, None);
        completions.ranges_ended(second, 1, Some(Fault::of(FiErrno::EACCES)));
        completions.ranges_ended(first, 1, None);
        assert_eq!(completions.len(Side::Tx), 0);
        completions.ranges_ended(second, 1, Some(Fault::of(FiErrno::ENOMEM)));
        completions.ranges_ended(first, 1, None);
        let entries = completions.of(Side::Tx).drain(..);
        let entries: Vec<_> = entries.map(|(_, entry)| entry).collect();
        let [Entry::Failed(failed), Entry::Done(done, None)] = &entries[..] else {
            panic!("{entries:?}");
        };
        assert_eq!(
            (failed.completion.context, failed.err),
            (8, FiErrno::EACCES)
        );
        assert_eq!((done.context, completions.calls()), (7, 0));
    }
}
