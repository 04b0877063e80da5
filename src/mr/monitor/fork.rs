//! Effect of a fork on cached registrations: the parent invalidates all; the child's gate stays
//! closed, and the child keeps no reference to the parent's userfaultfd.

#![allow(unsafe_code, reason = "pthread_atfork, dup3")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::{Gate, list};
use crate::errno::Result;
use crate::log::warn_log;

/// Forks of this process that have begun, and those that have ended.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);
/// Maximum number of calls of a function that are repeated because forks overlap them.
const TRIES: u32 = 5;
/// The pause after each of these calls.
const PAUSE: Duration = Duration::from_millis(1);

/// The descriptors that a forked child must not share: each element has the number of one in the
/// lower half, and the number of its replacement in the upper half; 0: unused. There are two while
/// one monitor ends and the next one starts, and more while several end.
static UNSHARED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// A descriptor that a forked child replaces, so that a reference to the file in this process is
/// the last one. Both descriptors stay open until this object is dropped. A child of a fork between
/// the opening of the descriptor and [`Self::new`] shares it: see [`apart_from_forks`]. `None`: the
/// list was full, so forked children share the descriptor.
#[derive(Debug)]
pub(super) struct Unshared(Option<u64>);

impl Unshared {
    pub(super) fn new(fd: &OwnedFd, replacement: &OwnedFd) -> Self {
        let half = |fd: &OwnedFd| u64::from(fd.as_raw_fd().cast_unsigned());
        let pair = half(replacement) << 32 | half(fd);
        let free = UNSHARED.iter().find(|place| {
            let (order, or_else) = (Ordering::SeqCst, Ordering::Relaxed);
            place.compare_exchange(0, pair, order, or_else).is_ok()
        });
        Self(free.map(|_| pair))
    }
}

impl Drop for Unshared {
    /// In a forked child the list is empty.
    fn drop(&mut self) {
        let Some(pair) = self.0 else { return };
        for place in &UNSHARED {
            let (order, or_else) = (Ordering::SeqCst, Ordering::Relaxed);
            if place.compare_exchange(pair, 0, order, or_else).is_ok() {
                return;
            }
        }
    }
}

/// Calls a function until no fork overlaps the call. A fork may wait for a lock of the caller, in a
/// handler of the application: so the last call, after at most 5 ms of pauses, counts in any case.
///
/// # Errors
/// Those of the function.
pub(super) fn apart_from_forks<T>(mut make: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..TRIES {
        // All forks that have begun when the call ends had ended before the call. Forks that begin
        // later see what it has stored: `SeqCst` orders these loads and stores.
        let ended = ENDED.load(Ordering::SeqCst);
        let made = make()?;
        if BEGUN.load(Ordering::SeqCst) == ended {
            return Ok(made);
        }
        drop(made);
        thread::sleep(PAUSE);
    }
    make()
}

/// Installs the handlers that count forks, and that replace the descriptors of [`Unshared`] in
/// forked children. Called when a domain is opened: the C library (glibc from 2.36 on) does not
/// call handlers that are registered during a fork for this fork, so they are registered long
/// before the first monitor is opened.
///
/// Threads that call it at the same time register more handlers than one of each, which does no
/// harm. A lock could stay held in a child, which opens domains too.
pub(crate) fn count_forks() {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.load(Ordering::Acquire) {
        return;
    }
    // SAFETY: functions of this library; the C library removes them when the library is unloaded.
    let ret = unsafe { libc::pthread_atfork(Some(begun), Some(ended), Some(child)) };
    INSTALLED.store(true, Ordering::Release);
    if ret != 0 {
        warn_log!(
            Mr,
            "pthread_atfork: error {ret}: forked children share the userfaultfd"
        );
    }
}

/// Installs the handlers that invalidate cached registrations, once for the process. Not called in
/// a forked child whose parent may have called it: the gate is made before, and is not the child's.
pub(crate) fn notice() {
    count_forks();
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: functions of this library; the C library removes them when the library is
        // unloaded.
        let ret = unsafe { libc::pthread_atfork(Some(before), Some(parent), None) };
        if ret != 0 {
            warn_log!(
                Mr,
                "pthread_atfork: error {ret}: a fork does not invalidate cached registrations"
            );
        }
    });
}

/// The gate, unless this process is a forked child that forks again: its gate is closed, and other
/// threads of the parent may have held the locks at the fork.
fn own_gate() -> Option<Gate> {
    Gate::get().filter(|gate| !gate.is_forked())
}

unsafe extern "C" fn begun() {
    BEGUN.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn ended() {
    // also after a fork that has failed
    ENDED.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn before() {
    if let Some(gate) = own_gate() {
        gate.close();
        return;
    }
    // A child of `_Fork(3)` or of a bare `clone(2)` has its parent's list, because no handler was
    // called there. The child may have opened other files under the same numbers.
    for place in &UNSHARED {
        place.store(0, Ordering::SeqCst);
    }
}

/// Invalidates all registrations: a kernel before 5.12 gives the parent new pages at its next
/// write, and the device has the old ones.
unsafe extern "C" fn parent() {
    if let Some(gate) = own_gate() {
        list::kill(0, u64::MAX);
        gate.open();
    }
}

/// Replaces the descriptors of the list. Makes only system calls: another thread of the parent may
/// have held any lock at the fork.
unsafe extern "C" fn child() {
    // The fork has ended here too: a child whose parent has no cache can have a monitor.
    ENDED.store(BEGUN.load(Ordering::SeqCst), Ordering::SeqCst);
    for place in &UNSHARED {
        // the child's own child must not replace what the child opens under the same number
        let pair = place.swap(0, Ordering::SeqCst);
        if pair != 0 {
            let (fd, replacement) = (pair as u32, (pair >> 32) as u32);
            // SAFETY: by the owner of the `Unshared`, both were open at the fork and are of this
            // library: the list is that of the process that has forked, which `before` empties
            // where the list was copied from another process.
            unsafe {
                let (fd, replacement) = (fd.cast_signed(), replacement.cast_signed());
                libc::dup3(replacement, fd, libc::O_CLOEXEC);
            }
        }
    }
}
