//! Interrupting a thread that sleeps in a system call.

/// A thread of this process, which stays.
#[derive(Clone, Copy)]
pub(crate) struct Thread(libc::pthread_t);

/// The calling thread.
pub(crate) fn this_thread() -> Thread {
    // SAFETY: no memory is passed.
    Thread(unsafe { libc::pthread_self() })
}

impl Thread {
    /// Its call, if it sleeps in one, ends with `EINTR`.
    pub(crate) fn interrupt(self) {
        // SAFETY: the thread is the main one, which lives as long as the process.
        unsafe { libc::pthread_kill(self.0, libc::SIGUSR1) };
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// From now on SIGUSR1 interrupts and does nothing else.
pub(crate) fn be_interruptible() {
    // SAFETY: all zeros is a value of it; the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
    }
}

/// Gives way to others: these processes would take all processors.
pub(crate) fn be_nice() {
    // SAFETY: no memory is passed.
    unsafe { libc::nice(5) };
}
