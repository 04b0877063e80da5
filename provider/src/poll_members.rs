//! The members of poll sets, `fi_poll(3)`.
//!
//! Neither a set nor its members keep each other open, as with libfabric's own providers, whose
//! test programs close the members first: a member that is closed leaves its sets, and a set that
//! is closed has no members.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use weft::queue::{CompletionQueue, Counter};

pub(crate) type Members = Mutex<Vec<Member>>;

/// A member of a poll set.
#[derive(Clone)]
pub(crate) struct Member {
    /// The address of its fid, which is open or being closed.
    pub(crate) handle: usize,
    pub(crate) what: What,
}

/// The poll sets that have a queue or counter as a member. It leaves them before its fid is
/// changed: a concurrent `fi_poll` reads that of each member.
#[derive(Default)]
pub(crate) struct Memberships(Mutex<Vec<Membership>>);

struct Membership {
    set: Weak<Members>,
    /// That of the member.
    handle: usize,
}

impl Memberships {
    pub(crate) fn add(&self, set: &Arc<Members>, handle: usize) {
        let mut all = self.0.lock();
        all.retain(|one| one.set.strong_count() != 0);
        if !all
            .iter()
            .any(|one| std::ptr::eq(one.set.as_ptr(), Arc::as_ptr(set)))
        {
            let set = Arc::downgrade(set);
            all.push(Membership { set, handle });
        }
    }

    /// The queue or counter is being closed, and is added to no set any more.
    pub(crate) fn leave(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        for Membership { set, handle } in all {
            let Some(set) = set.upgrade() else { continue };
            let is_it = |member: &mut Member| member.handle == handle;
            let left: Vec<_> = set.lock().extract_if(.., is_it).collect();
            // without the lock
            drop(left);
        }
    }
}

#[derive(Clone)]
pub(crate) enum What {
    Cq(Arc<CompletionQueue>),
    Cntr(Arc<Counter>),
}

impl PartialEq for What {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cq(one), Self::Cq(other)) => Arc::ptr_eq(one, other),
            (Self::Cntr(one), Self::Cntr(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}
