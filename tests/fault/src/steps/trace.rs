//! Stepping through another process, ptrace(2).

use std::ffi::c_int;
use std::ptr::null_mut;

/// What a traced process did next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// One instruction more.
    Stepped,
    /// It is at one of the marks.
    Begins,
    Ends,
    /// A signal that nobody sent.
    Signal(c_int),
    /// It has ended, with this wait status.
    Ended(c_int),
}

const BEGIN: c_int = libc::SIGUSR1;
const END: c_int = libc::SIGUSR2;

/// In the victim: lets its parent trace it from here on.
pub(crate) fn begin() {
    // SAFETY: no memory is passed.
    unsafe {
        assert_eq!(
            libc::ptrace(libc::PTRACE_TRACEME, 0, null_mut::<u8>(), null_mut::<u8>()),
            0
        );
        libc::kill(libc::getpid(), BEGIN);
    }
}

/// In the victim: the call is over.
pub(crate) fn end() {
    // SAFETY: no memory is passed.
    unsafe { libc::kill(libc::getpid(), END) };
}

/// The next stop of a child.
pub(crate) fn wait(pid: c_int) -> Stop {
    let mut status = 0;
    loop {
        // SAFETY: a writable status.
        let got = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
        if got == pid {
            break;
        }
        let error = std::io::Error::last_os_error();
        assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "{error}");
    }
    if !libc::WIFSTOPPED(status) {
        return Stop::Ended(status);
    }
    match libc::WSTOPSIG(status) {
        libc::SIGTRAP => Stop::Stepped,
        BEGIN => Stop::Begins,
        END => Stop::Ends,
        signal => Stop::Signal(signal),
    }
}

/// Runs one instruction of a stopped child.
pub(crate) fn step(pid: c_int) -> Stop {
    // SAFETY: no memory is passed; the signal of the stop is dropped.
    let ret = unsafe {
        libc::ptrace(
            libc::PTRACE_SINGLESTEP,
            pid,
            null_mut::<u8>(),
            null_mut::<u8>(),
        )
    };
    assert_eq!(ret, 0, "{}", std::io::Error::last_os_error());
    wait(pid)
}

/// Ends a child, and returns when it is gone.
pub(crate) fn kill(pid: c_int) {
    // SAFETY: a child that was not waited for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    while !matches!(wait(pid), Stop::Ended(_)) {}
}
