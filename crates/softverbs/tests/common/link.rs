//! The two processes of a test, and the pipes between them.

use std::ffi::c_int;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::CASE;

/// The pipes to the other process.
pub struct Link {
    child: Option<Child>,
    to: Box<dyn Write>,
    from: Box<dyn BufRead>,
    killed: bool,
}

impl Link {
    pub(super) fn of_parent(case: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(CASE, case)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to: ChildStdin = child.stdin.take().unwrap();
        let from: ChildStdout = child.stdout.take().unwrap();
        Self {
            child: Some(child),
            to: Box::new(to),
            from: Box::new(BufReader::new(from)),
            killed: false,
        }
    }

    pub(super) fn of_child() -> Self {
        Self {
            child: None,
            to: Box::new(std::io::stdout()),
            from: Box::new(BufReader::new(std::io::stdin())),
            killed: false,
        }
    }

    pub fn say(&mut self, text: &str) {
        writeln!(self.to, "{text}").unwrap();
        self.to.flush().unwrap();
    }

    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the other process has ended");
        line.trim_end().to_owned()
    }

    pub fn expect(&mut self, text: &str) {
        assert_eq!(self.hear(), text);
    }

    pub fn say_numbers(&mut self, a: u64, b: u64) {
        self.say(&format!("{a} {b}"));
    }

    pub fn numbers(&mut self) -> (u64, u64) {
        let line = self.hear();
        let (a, b) = line.split_once(' ').unwrap();
        (a.parse().unwrap(), b.parse().unwrap())
    }

    pub fn pid(&self) -> i32 {
        self.child.as_ref().unwrap().id().cast_signed()
    }

    fn signal(&self, signal: c_int) {
        // SAFETY: the child is this process's own and not waited for yet.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Stops the other process, and returns when it has stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let path = format!("/proc/{}/stat", self.pid());
        while !std::fs::read_to_string(&path).unwrap().contains(") T ") {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    pub fn kill(&mut self) {
        self.killed = true;
        let child = self.child.as_mut().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits until the parent ends this process.
    pub fn wait_end(&mut self) {
        let mut rest = String::new();
        self.from.read_line(&mut rest).unwrap();
    }

    pub(super) fn finish(mut self) {
        self.to = Box::new(std::io::sink());
        if !self.killed {
            let status = self.child.as_mut().unwrap().wait().unwrap();
            assert!(status.success(), "the child: {status}");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
