//! Single-steps another process, ptrace(2).

use std::ffi::c_int;
use std::ptr::null_mut;

/// The next stop of a traced process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// It has executed one instruction.
    Stepped,
    /// It is at one of the marks.
    Begins,
    Ends,
    /// It has received an unexpected signal.
    Signal(c_int),
    /// It has ended, with this wait status.
    Ended(c_int),
}

const BEGIN: c_int = libc::SIGUSR1;
const END: c_int = libc::SIGUSR2;

/// In the victim: lets its parent trace it from now on.
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

/// In the victim: marks the end of the call.
pub(crate) fn end() {
    // SAFETY: no memory is passed.
    unsafe { libc::kill(libc::getpid(), END) };
}

/// The next stop of a child.
fn wait(pid: c_int) -> Stop {
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
fn step(pid: c_int) -> Stop {
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

/// A child process that is single-stepped; killed on drop.
pub(crate) struct Victim(Option<c_int>);

impl Victim {
    pub(crate) fn new(child: &std::process::Child) -> Self {
        Self(Some(child.id().cast_signed()))
    }

    /// Waits for the beginning of its call, and executes at most `most` instructions; returns their
    /// number, and whether the call has ended.
    pub(crate) fn walk(&self, most: usize) -> (usize, bool) {
        let pid = self.0.expect("a living one");
        assert_eq!(wait(pid), Stop::Begins, "the victim");
        for steps in 0..most {
            match step(pid) {
                Stop::Stepped => {}
                Stop::Ends => return (steps, true),
                stop => panic!("the victim at instruction {steps}: {stop:?}"),
            }
        }
        (most, false)
    }

    /// Kills it, and returns when it has ended.
    pub(crate) fn kill(&mut self) {
        if let Some(pid) = self.0.take() {
            // SAFETY: a child that was not waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            while !matches!(wait(pid), Stop::Ended(_)) {}
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.kill();
    }
}
