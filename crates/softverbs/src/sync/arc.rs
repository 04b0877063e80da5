//! Shared ownership as with [`std::sync::Arc`], with a fallible allocation: `Arc::try_new` is not
//! stable.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
// Not loom's: these counts control when memory is freed, and no model covers that.
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::sys::{Res, room};

/// One of several owners of a value; the last owner drops the value.
pub(crate) struct Arc<T>(NonNull<Inner<T>>);

/// A reference that does not keep the value alive.
pub(crate) struct Weak<T>(NonNull<Inner<T>>);

struct Inner<T> {
    owners: AtomicUsize,
    /// References to the counts: each [`Weak`], plus one for all owners together.
    watchers: AtomicUsize,
    /// Valid while `owners` is not 0.
    value: ManuallyDrop<T>,
}

// SAFETY: owners on several threads share the value, and any of them may drop it.
unsafe impl<T: Send + Sync> Send for Arc<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Arc<T> {}
// SAFETY: `upgrade` makes an owner, so the same bounds apply as for `Arc`.
unsafe impl<T: Send + Sync> Send for Weak<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Weak<T> {}

impl<T> Arc<T> {
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn try_new(value: T) -> Res<Self> {
        let room = room()?;
        let inner = Inner {
            owners: AtomicUsize::new(1),
            watchers: AtomicUsize::new(1),
            value: ManuallyDrop::new(value),
        };
        Ok(Self(NonNull::from(Box::leak(Box::write(room, inner)))))
    }

    /// Whether both own the same value.
    pub(crate) fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.0 == other.0
    }

    /// Whether no other owner exists. If so, what former owners have done with the value is visible
    /// afterwards.
    pub(crate) fn is_only(this: &Self) -> bool {
        this.inner().owners.load(Ordering::Acquire) == 1
    }

    pub(crate) fn downgrade(this: &Self) -> Weak<T> {
        this.inner().watchers.fetch_add(1, Ordering::Relaxed);
        Weak(this.0)
    }

    fn inner(&self) -> &Inner<T> {
        // SAFETY: the allocation lives while it has an owner, and `self` is an owner.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Weak<T> {
    /// Returns an owner of the value, or `None` if the value has been dropped.
    pub(crate) fn upgrade(&self) -> Option<Arc<T>> {
        // SAFETY: the counts live while `watchers` is not 0, and `self` is one of them. The value
        // is not accessed.
        let owners = unsafe { &(*self.0.as_ptr()).owners };
        let more = |count: usize| (count > 0).then(|| count + 1);
        owners
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, more)
            .is_ok()
            .then(|| Arc(self.0))
    }
}

impl<T> Drop for Weak<T> {
    fn drop(&mut self) {
        // SAFETY: as in `upgrade`.
        let watchers = unsafe { &(*self.0.as_ptr()).watchers };
        if watchers.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            // SAFETY: leaked in `try_new`; no reference is left, and the last owner has dropped the
            // value.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

impl<T> fmt::Debug for Weak<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Weak")
    }
}

impl<T> Deref for Arc<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner().value
    }
}

impl<T> Clone for Arc<T> {
    #[inline]
    fn clone(&self) -> Self {
        // Each owner occupies memory, so the count can overflow only if owners are leaked; this
        // crate leaks none.
        self.inner().owners.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        // Each owner's accesses to the value happen before the value is dropped.
        if self.inner().owners.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            let watches = Weak(self.0);
            // SAFETY: the count of owners is 0, and `upgrade` makes no owner from then on.
            unsafe { ManuallyDrop::drop(&mut (*self.0.as_ptr()).value) };
            drop(watches);
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Arc<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    struct Counted<'a>(&'a AtomicU32);

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_last_owner_ends_it() {
        let ended = AtomicU32::new(0);
        let first = Arc::try_new(Counted(&ended)).unwrap();
        let other = Arc::try_new(Counted(&ended)).unwrap();
        assert!(!Arc::ptr_eq(&first, &other));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let mine = first.clone();
                assert!(Arc::ptr_eq(&mine, &first));
                scope.spawn(move || {
                    for _ in 0..1000 {
                        drop(mine.clone());
                    }
                });
            }
        });
        assert_eq!(ended.load(Ordering::Relaxed), 0);
        let watch = Arc::downgrade(&first);
        assert!(
            watch
                .upgrade()
                .is_some_and(|again| Arc::ptr_eq(&again, &first))
        );
        drop(first);
        assert_eq!(ended.load(Ordering::Relaxed), 1);
        assert!(watch.upgrade().is_none());
        drop(other);
        assert_eq!(ended.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn nobody_owns_what_has_gone() {
        for _ in 0..200 {
            let ended = AtomicU32::new(0);
            let owner = Arc::try_new(Counted(&ended)).unwrap();
            let watch = Arc::downgrade(&owner);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while let Some(owner) = watch.upgrade() {
                        assert_eq!((*owner).0.load(Ordering::Relaxed), 0);
                    }
                });
                drop(owner);
            });
            assert_eq!(ended.load(Ordering::Relaxed), 1);
        }
    }
}
