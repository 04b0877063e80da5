//! The identifiers of threads, and the barrier.

#![allow(unsafe_code)] // a register, and a system call

use std::cell::Cell;
use std::sync::atomic::{Ordering, compiler_fence, fence};

const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

thread_local! {
    static VISITOR: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread gives every bias back that it takes away, and never gets one: for threads
/// that work beside those of the application.
pub fn visitor() {
    VISITOR.set(true);
}

#[cfg(not(all(test, loom)))]
pub(crate) fn is_visitor() -> bool {
    VISITOR.try_with(Cell::get).unwrap_or(true)
}

/// A number that no other living thread of the process has, not 0: the thread pointer.
#[cfg(not(all(test, loom)))]
#[inline(always)]
pub(crate) fn thread() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let pointer: usize;
        // SAFETY: the System V ABI has the thread pointer at offset 0 of the segment.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
        }
        pointer
    }
    #[cfg(target_arch = "aarch64")]
    {
        let pointer: usize;
        // SAFETY: the register is readable.
        unsafe {
            std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
        }
        pointer
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        // SAFETY: the function has no preconditions.
        unsafe { libc::pthread_self() as usize }
    }
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the system call takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Whether this process can run [`heavy_fence`]. Registers the process.
pub(crate) fn barriers_work() -> bool {
    membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED)
}

/// Orders the earlier stores of this thread before its later loads, as seen by a thread that runs
/// [`heavy_fence`].
#[inline(always)]
pub(crate) fn light_fence() {
    // The models do not run membarrier: there, it is a full fence.
    #[cfg(all(test, loom))]
    loom::sync::atomic::fence(Ordering::SeqCst);
    compiler_fence(Ordering::SeqCst);
}

/// A full barrier on each processor that runs a thread of this process.
pub(crate) fn heavy_fence() {
    #[cfg(all(test, loom))]
    loom::sync::atomic::fence(Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if !cfg!(all(test, loom)) && !membarrier(PRIVATE_EXPEDITED) {
        // a forked child is not registered
        if !barriers_work() {
            // The owner of a bias may be inside, and nothing can exclude it any more.
            eprintln!("weft: membarrier(2) was taken from the process");
            std::process::abort();
        }
    }
    fence(Ordering::SeqCst);
}
