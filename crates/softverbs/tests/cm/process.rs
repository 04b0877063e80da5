//! A second process: this test binary runs the ignored test `second_process` with a role from the
//! environment. It prints one line per answer on its standard output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use crate::harness::*;

/// Another process, in a role.
pub(crate) struct Second {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Second {
    pub(crate) fn start(role: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "second_process",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("CM_ROLE", role)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (send, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix("> ")
                    && send.send(line.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        let stdin = child.stdin.take().unwrap();
        Self {
            child,
            stdin,
            lines,
        }
    }

    /// The next line of its output, within [`PATIENCE`].
    pub(crate) fn line(&self) -> String {
        self.lines
            .recv_timeout(PATIENCE)
            .expect("the second process says nothing")
    }

    pub(crate) fn expect(&self, line: &str) {
        assert_eq!(self.line(), line);
    }

    pub(crate) fn expect_timewait(&self) {
        if softverbs() {
            self.expect("TIMEWAIT_EXIT 0 qp 6");
        }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// Stops it for a moment.
    pub(crate) fn stop_and_continue(&mut self) {
        let pid = self.child.id().cast_signed();
        let mut status = 0;
        // SAFETY: a child that has not been waited for, and a writable status.
        unsafe {
            assert_eq!(libc::kill(pid, libc::SIGSTOP), 0);
            assert_eq!(libc::waitpid(pid, &raw mut status, libc::WUNTRACED), pid);
            assert!(libc::WIFSTOPPED(status));
            assert_eq!(libc::kill(pid, libc::SIGCONT), 0);
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends it, and checks its exit status.
    pub(crate) fn finish(mut self) {
        self.tell("exit");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        // after a successful test it has ended already
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a line to the first process.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // the test harness may have left a line unfinished
    writeln!(out, "\n> {line}").unwrap();
    out.flush().unwrap();
}

pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
