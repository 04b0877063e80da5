//! Lines between processes, through pipes. They carry addresses and synchronize the steps; all data
//! goes through the device.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One end of a pair of pipes.
pub(crate) struct Link {
    to: File,
    from: File,
    heard: Vec<u8>,
}

impl Link {
    /// Starts this program with other arguments.
    pub(crate) fn start(arguments: &[String]) -> (Child, Self) {
        let program = std::env::current_exe().expect("this program's path");
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let to = OwnedFd::from(child.stdin.take().expect("a pipe"));
        let from = OwnedFd::from(child.stdout.take().expect("a pipe"));
        let link = Self {
            to: File::from(to),
            from: File::from(from),
            heard: Vec::new(),
        };
        (child, link)
    }

    /// The other end of [`Self::start`].
    pub(crate) fn of_child() -> Self {
        // SAFETY: nothing else in this process uses its standard input and output.
        let (from, to) = unsafe { (File::from_raw_fd(0), File::from_raw_fd(1)) };
        Self {
            to,
            from,
            heard: Vec::new(),
        }
    }

    /// Sends a line; false if the other end is closed.
    pub(crate) fn say(&mut self, line: &str) -> bool {
        self.to.write_all(format!("{line}\n").as_bytes()).is_ok()
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.from.as_raw_fd()
    }

    fn cut(&mut self) -> Option<String> {
        let end = self.heard.iter().position(|&byte| byte == b'\n')?;
        let line = String::from_utf8_lossy(&self.heard[..end]).into_owned();
        self.heard.drain(..=end);
        Some(line)
    }

    /// The next line, if one arrives within `patience`; an error if the other end is closed.
    pub(crate) fn hear_within(&mut self, patience: Duration) -> Result<Option<String>, Gone> {
        let end = Instant::now() + patience;
        loop {
            if let Some(line) = self.cut() {
                return Ok(Some(line));
            }
            let left = end.saturating_duration_since(Instant::now());
            if !readable(self.fd(), left) {
                return Ok(None);
            }
            let mut buffer = [0; 4096];
            match self.from.read(&mut buffer) {
                Ok(0) => return Err(Gone),
                Ok(n) => self.heard.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Gone),
            }
        }
    }

    /// The next line of a process that must send one.
    pub(crate) fn hear(&mut self) -> String {
        match self.hear_within(Duration::from_secs(60)) {
            Ok(Some(line)) => line,
            Ok(None) => panic!("the other process said nothing for a minute"),
            Err(Gone) => panic!("the other process has ended"),
        }
    }

    pub(crate) fn hear_numbers(&mut self) -> Vec<u64> {
        numbers(&self.hear())
    }
}

/// The other end is closed.
#[derive(Debug)]
pub(crate) struct Gone;

/// The numbers in a line.
pub(crate) fn numbers(line: &str) -> Vec<u64> {
    line.split_whitespace()
        .map(|word| word.parse().expect("a number"))
        .collect()
}

/// Whether `fd` becomes readable within `patience`. A signal ends the wait.
pub(crate) fn readable(fd: RawFd, patience: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let wait = libc::timespec {
        tv_sec: patience.as_secs().cast_signed(),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    // SAFETY: one writable element, a readable time, no mask.
    unsafe { libc::ppoll(&raw mut poll, 1, &raw const wait, std::ptr::null()) > 0 }
}

/// The descriptors that become readable within `patience`.
pub(crate) fn ready(fds: &[RawFd], patience: Duration) -> Vec<usize> {
    let mut polls: Vec<_> = fds
        .iter()
        .map(|&fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let wait = libc::timespec {
        tv_sec: patience.as_secs().cast_signed(),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    // SAFETY: as many writable elements as given, a readable time, no mask.
    unsafe {
        libc::ppoll(
            polls.as_mut_ptr(),
            polls.len() as libc::nfds_t,
            &raw const wait,
            std::ptr::null(),
        )
    };
    (0..polls.len())
        .filter(|&i| polls[i].revents != 0)
        .collect()
}
