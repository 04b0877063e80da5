//! Runs the body of every entry point: errors become negative errno, a panic becomes `-FI_EOTHER`,
//! and nothing unwinds into C.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};

use libfabric_sys::FI_EOTHER;
use parking_lot::Mutex;
use weft::errno::Result;

use crate::ffi::log::warning;

/// Whether a call on an object has panicked. The object's state may be inconsistent, so every later
/// call on it returns `-FI_EOTHER`; only closing it still works. The handles of one endpoint
/// (`fi_ep_alias(3)`) have one state, so a panic of a call on one of them sets the flags of all.
/// Each has a flag of its own, which costs a call one load.
pub(crate) struct Poison {
    set: AtomicBool,
    handles: OnceLock<Arc<Handles>>,
}

/// The addresses of the flags of open handles of one object.
#[derive(Default)]
struct Handles(Mutex<Vec<usize>>);

impl Poison {
    /// The state of a new object: no panic.
    pub(crate) const fn new() -> Self {
        Self {
            set: AtomicBool::new(false),
            handles: OnceLock::new(),
        }
    }

    #[inline(always)]
    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::Relaxed)
    }

    #[cold]
    fn set(&self) {
        self.set.store(true, Ordering::Relaxed);
        // `join` adds to the list and then reads the flag, this call sets the flag and then reads
        // the list: one of the two calls sees the change of the other
        fence(Ordering::SeqCst);
        let Some(handles) = self.handles.get() else {
            return;
        };
        for flag in &*handles.0.lock() {
            let flag = std::ptr::with_exposed_provenance::<AtomicBool>(*flag);
            // SAFETY: `join` has added it, and its caller promises `leave` before the memory is
            // freed, which waits for the lock.
            unsafe { (*flag).store(true, Ordering::Relaxed) };
        }
    }

    fn address(&self) -> usize {
        (&raw const self.set).expose_provenance()
    }

    /// Gives another handle of the object, which no other thread has yet, the same state.
    ///
    /// # Safety
    /// Neither is moved, and [`Self::leave`] is called on both before their memory is freed.
    pub(crate) unsafe fn join(&self, other: &Self) {
        let handles = self.handles.get_or_init(|| {
            let handles = Handles::default();
            handles.0.lock().push(self.address());
            Arc::new(handles)
        });
        let mut list = handles.0.lock();
        list.push(other.address());
        // a thread that panics may have set the flag of `self` without seeing the new handle
        // (`set`)
        fence(Ordering::SeqCst);
        other.set.store(self.is_set(), Ordering::Relaxed);
        let _ = other.handles.set(Arc::clone(handles));
    }

    /// The handle is closed. Calls of other handles do not use its flag any more.
    pub(crate) fn leave(&self) {
        if let Some(handles) = self.handles.get() {
            let own = self.address();
            handles.0.lock().retain(|flag| *flag != own);
        }
    }
}

/// The return type of a C function: a value, or a negative errno.
pub(crate) trait Status {
    /// The negated errno.
    fn failed(errno: i32) -> Self;
}

impl Status for c_int {
    #[inline(always)]
    fn failed(errno: i32) -> Self {
        -errno
    }
}

impl Status for isize {
    #[inline(always)]
    fn failed(errno: i32) -> Self {
        -(errno as isize)
    }
}

/// Runs `body`; its value, or the negative errno. For entry points without an object of their own.
pub(crate) fn entry<T: Status>(body: impl FnOnce() -> Result<T>) -> T {
    // The bodies touch shared state only through atomics and through locks that a panic releases.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => T::failed(errno.code()),
        Err(_) => T::failed(FI_EOTHER),
    }
}

/// As [`entry`], for a body that works on an object: a panic poisons it. Without a panic it costs
/// one load and no call, so the fast path uses it too.
#[inline(always)]
pub(crate) fn on<T: Status>(poison: &Poison, body: impl FnOnce() -> Result<T>) -> T {
    if poison.is_set() {
        return T::failed(FI_EOTHER);
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(errno)) => T::failed(errno.code()),
        Err(_) => {
            poison.set();
            T::failed(FI_EOTHER)
        }
    }
}

/// Sends the message of every later panic in this library to the log instead of to standard error.
/// The hook belongs to this library's copy of the standard library: the hook of a Rust application
/// is unchanged.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic
            .payload()
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.payload().downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        match panic.location() {
            Some(at) => warning!(FI_LOG_CORE, "panic at {at}: {text}"),
            None => warning!(FI_LOG_CORE, "panic: {text}"),
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panics(poison: &Poison) {
        let ret: c_int = on(poison, || panic!("planted"));
        assert_eq!(ret, -FI_EOTHER);
    }

    /// A panic on any handle poisons all that are open, and no other object.
    #[test]
    fn the_handles_of_an_object_are_poisoned_together() {
        for at in 0..3 {
            let [closed, first, second, third, other] =
                std::array::from_fn(|_| Box::new(Poison::new()));
            // SAFETY: boxed, and left below.
            unsafe {
                first.join(&second);
                first.join(&closed);
                second.join(&third);
            }
            closed.leave();
            panics([&*first, &*second, &*third][at]);
            for handle in [&first, &second, &third] {
                let ret: c_int = on(handle, || Ok(0));
                assert_eq!(ret, -FI_EOTHER, "{at}");
            }
            assert!(!closed.is_set() && !other.is_set());
            for handle in [&first, &second, &third] {
                handle.leave();
            }
        }
    }
}
