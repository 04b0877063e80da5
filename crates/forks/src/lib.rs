//! Recognizes a forked child, whose memory is a copy of that of its parent: it has none of the
//! other threads, and locks that these threads held at the fork are never released in it.
//!
//! Forks by `fork(3)` are counted (`pthread_atfork(3)`). `_Fork(3)` and a bare `clone(2)` are not;
//! `vfork(2)` and `posix_spawn(3)` need nothing.

#![allow(
    unsafe_code,
    reason = "pthread_atfork, and objects that are shared without a lock"
)]

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// 0 until forks are counted, then 1 and the number of forks since.
static FORKS: AtomicU32 = AtomicU32::new(0);

#[inline(always)]
fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// A number, not 0, that differs in a process and its forked children, from the first call of
/// [`are_counted`] on, which may follow the first call of this function.
#[inline(always)]
pub fn generation() -> u32 {
    // 0 and 1 are one process: forks are counted from 1 on
    forks().max(1)
}

/// The process that has created an object. A forked child, which inherits a copy of the object, is
/// another process.
///
/// If forks cannot be counted for lack of memory, a child is taken for its parent.
#[derive(Clone, Copy, Debug)]
pub struct Owner(NonZeroU32);

impl Owner {
    /// The calling process.
    pub fn this_process() -> Self {
        are_counted();
        Self(NonZeroU32::new(generation()).unwrap_or(NonZeroU32::MIN))
    }

    /// Whether the object is of the calling process, and not inherited. No system call.
    #[inline(always)]
    pub fn is_this_process(self) -> bool {
        self.0.get() == generation()
    }
}

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Makes forks be counted. `false`: no memory for that. Never waits.
pub fn are_counted() -> bool {
    forks() != 0 || begin()
}

/// Threads that call it at the same time register more handlers than one, which does no harm. A
/// lock could be held for ever in a child.
#[cold]
fn begin() -> bool {
    // SAFETY: the handler only changes an atomic. The C library removes it if this library is
    // unloaded.
    let counted = unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 };
    if counted {
        let (set, read) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = FORKS.compare_exchange(0, 1, set, read);
    }
    counted
}

/// A static object of which a forked child has its own, made by `Default` at its first use there.
/// The child's copy of the object of its parent is neither used nor dropped. So the child waits for
/// no lock in it, and destroys nothing of the parent.
///
/// If forks cannot be counted for lack of memory, a child uses the copy.
#[derive(Debug)]
pub struct PerProcess<T: Send + Sync + 'static> {
    /// Of the process in which forks were counted first.
    first: T,
    /// Of the forked child that has used the static last; NULL: none has.
    last: AtomicPtr<Owned<T>>,
}

/// The object of a forked child. Never freed: children of the child may refer to it.
#[derive(Debug)]
struct Owned<T> {
    /// The number of forks in its process.
    forks: u32,
    object: T,
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    /// `first`: the object of a process that is no forked child, equal to the default.
    pub const fn new(first: T) -> Self {
        Self {
            first,
            last: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// The object of this process. The first call in a forked child allocates. Never waits.
    #[inline]
    pub fn get(&'static self) -> &'static T {
        self.try_get().unwrap_or_else(|| no_memory::<T>())
    }

    /// As [`Self::get`]. `None`: no memory for the object of a forked child.
    #[inline]
    pub fn try_get(&'static self) -> Option<&'static T> {
        match forks() {
            0 => {
                are_counted();
                Some(&self.first)
            }
            1 => Some(&self.first),
            forks => self.of_child(forks),
        }
    }

    #[cold]
    fn of_child(&self, forks: u32) -> Option<&T> {
        let last = self.last.load(Ordering::Acquire);
        // SAFETY: NULL, or an object that is never freed.
        if let Some(last) = unsafe { last.as_ref() }
            && last.forks == forks
        {
            return Some(&last.object);
        }
        let new = allocate(Owned {
            forks,
            object: T::default(),
        })?;
        let (set, read) = (Ordering::AcqRel, Ordering::Acquire);
        let used = match self.last.compare_exchange(last, new, set, read) {
            Ok(_) => new,
            Err(other) => {
                // SAFETY: allocated above as a `Box` is, and no other thread has it.
                drop(unsafe { Box::from_raw(new) });
                // another thread of this process was faster
                other
            }
        };
        // SAFETY: an object that is never freed.
        unsafe { used.as_ref() }.map(|used| &used.object)
    }
}

/// A [`Box`] as a pointer. `None`: no memory.
fn allocate<T>(object: Owned<T>) -> Option<*mut Owned<T>> {
    let layout = std::alloc::Layout::new::<Owned<T>>();
    // SAFETY: the size is not 0, as the structure has a number.
    let place = unsafe { std::alloc::alloc(layout) }.cast::<Owned<T>>();
    if place.is_null() {
        return None;
    }
    // SAFETY: memory of this layout, which holds nothing yet.
    unsafe { place.write(object) };
    Some(place)
}

#[cold]
fn no_memory<T>() -> ! {
    std::alloc::handle_alloc_error(std::alloc::Layout::new::<Owned<T>>())
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};

    use super::*;

    static NUMBERS: PerProcess<Mutex<Vec<u32>>> = PerProcess::new(Mutex::new(Vec::new()));

    fn numbers() -> MutexGuard<'static, Vec<u32>> {
        NUMBERS.get().try_lock().unwrap()
    }

    /// Runs in a forked child, which must return true.
    fn in_child(run: impl FnOnce() -> bool) {
        // SAFETY: the child runs the closure, and ends with `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let run = std::panic::AssertUnwindSafe(run);
            let good = std::panic::catch_unwind(run).unwrap_or(false);
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = -1;
        // SAFETY: `status` is writable.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0);
    }

    #[test]
    fn each_process_has_its_own_object_and_none_waits() {
        numbers().push(1);
        let held = numbers();
        in_child(|| {
            // the child has a copy of the locked mutex
            let empty = numbers().is_empty();
            numbers().push(2);
            let held = numbers();
            in_child(|| numbers().is_empty());
            drop(held);
            in_child(|| numbers().is_empty());
            empty && *numbers() == [2]
        });
        drop(held);
        assert_eq!(*numbers(), [1]);
    }

    #[test]
    fn an_object_is_of_the_process_that_has_created_it_alone() {
        let own = Owner::this_process();
        assert!(own.is_this_process());
        in_child(|| {
            let of_child = Owner::this_process();
            in_child(|| !of_child.is_this_process() && !own.is_this_process());
            of_child.is_this_process() && !own.is_this_process()
        });
        assert!(own.is_this_process());
    }

    #[test]
    fn threads_of_a_child_have_one_object() {
        assert!(are_counted());
        in_child(|| {
            let address = || std::ptr::from_ref(NUMBERS.get()).addr();
            let threads: Vec<_> = (0..8).map(|_| std::thread::spawn(address)).collect();
            let own = address();
            let all = threads.into_iter().map(|thread| thread.join().unwrap());
            own != std::ptr::from_ref(&NUMBERS.first).addr() && all.into_iter().all(|at| at == own)
        });
    }
}
