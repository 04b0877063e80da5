//! Access of other processes to this one (Yama), and signal masks of its threads.

use std::mem::MaybeUninit;

/// From linux/prctl.h; not every libc has it.
const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
const PR_SET_PTRACER_ANY: libc::c_ulong = libc::c_ulong::MAX;

/// Whether processes of the same user may access this one (`prctl(2)`, `PR_SET_DUMPABLE`).
pub(crate) fn dumpable() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) == 1 }
}

/// Whether Yama permits the access to parent processes only.
pub(crate) fn yama_restricts() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
        .is_ok_and(|scope| scope.trim() != "0")
}

/// Lets every process of the user attach (`PR_SET_PTRACER_ANY`). No effect without Yama.
pub(crate) fn allow_tracers() {
    // SAFETY: no memory is passed.
    unsafe { libc::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) };
}

/// The signal mask of a thread.
pub(crate) struct Signals(libc::sigset_t);

/// Blocks all signals for this thread and for threads that it starts; returns the previous mask.
pub(crate) fn block_signals() -> Signals {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both are written before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigemptyset(old.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
        Signals(old.assume_init())
    }
}

/// Restores the mask from before [`block_signals`].
pub(crate) fn restore_signals(old: &Signals) {
    // SAFETY: a set that was there before.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old.0, std::ptr::null_mut()) };
}
