//! Interrupts a thread that sleeps in a system call.

/// A thread of this process that lives as long as the process.
#[derive(Clone, Copy)]
pub(crate) struct Thread(libc::pthread_t);

/// The calling thread.
pub(crate) fn this_thread() -> Thread {
    // SAFETY: no memory is passed.
    Thread(unsafe { libc::pthread_self() })
}

impl Thread {
    /// Ends its system call with `EINTR`, if it sleeps in one.
    pub(crate) fn interrupt(self) {
        // SAFETY: the thread is the main one, which lives as long as the process.
        unsafe { libc::pthread_kill(self.0, libc::SIGUSR1) };
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// From now on SIGUSR1 interrupts system calls, and has no other effect.
pub(crate) fn be_interruptible() {
    // SAFETY: all zeros is a value of it; the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
    }
}

/// Lowers the priority: these processes would use all processors.
pub(crate) fn be_nice() {
    // SAFETY: no memory is passed.
    unsafe { libc::nice(5) };
}
