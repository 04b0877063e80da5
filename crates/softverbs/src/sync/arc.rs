//! Shared ownership as by [`std::sync::Arc`], whose allocation can fail: `Arc::try_new` is not stable.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
// Not loom's: what is counted here is when memory goes, and no model is about that.
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::sys::{Res, room};

/// One of several owners of a value, which goes with the last of them.
pub(crate) struct Arc<T>(NonNull<Inner<T>>);

/// Knows of a value without keeping it.
pub(crate) struct Weak<T>(NonNull<Inner<T>>);

struct Inner<T> {
    owners: AtomicUsize,
    /// Who may look at the number of owners: each [`Weak`], and the owners together.
    watchers: AtomicUsize,
    /// There as long as it has owners.
    value: ManuallyDrop<T>,
}

// SAFETY: owners on several threads share the value, and any of them may drop it.
unsafe impl<T: Send + Sync> Send for Arc<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Arc<T> {}
// SAFETY: it may become an owner.
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

    pub(crate) fn downgrade(this: &Self) -> Weak<T> {
        this.inner().watchers.fetch_add(1, Ordering::Relaxed);
        Weak(this.0)
    }

    fn inner(&self) -> &Inner<T> {
        // SAFETY: it lives as long as it has an owner, and this is one.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Weak<T> {
    /// An owner of the value, unless it has gone.
    pub(crate) fn upgrade(&self) -> Option<Arc<T>> {
        // SAFETY: the counts live as long as anybody watches them, and this one does. Not a look at the value.
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
            // SAFETY: leaked in `try_new`; nobody knows of it any more, and the value went with its last owner.
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
        // Each owner takes room in memory, so the number can't wrap unless they are leaked, which none here is.
        self.inner().owners.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Drop for Arc<T> {
    fn drop(&mut self) {
        // What each owner did with the value comes before its end.
        if self.inner().owners.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
            let watches = Weak(self.0);
            // SAFETY: this was the last owner, and none comes after it.
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
