//! The machine without a device: a cache line that moves between processors, a copy, and a copy by
//! the kernel.

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::{Side, Subject};
use crate::memory::Memory;
use crate::op::Op;

const PAGE: usize = 4096;
const BUFFER: usize = 1 << 20;

pub(crate) struct Machine {
    side: Side,
    from: Memory,
    into: Memory,
    /// The words in the memory of the first side.
    shared: Option<&'static Words>,
    remote: Option<(i32, u64)>,
}

/// A word for each side, 256 bytes apart: no prefetcher fetches one with the other.
#[repr(C, align(256))]
struct Words {
    first: AtomicU64,
    _gap: [u64; 31],
    second: AtomicU64,
}

fn map(fd: i32) -> &'static Words {
    // SAFETY: a shared mapping of a page, never unmapped; all bytes are a value of it.
    unsafe {
        let at = libc::mmap(
            null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        &*at.cast()
    }
}

impl Machine {
    pub(crate) fn open(side: Side) -> Self {
        Self {
            side,
            from: Memory::new(BUFFER),
            into: Memory::new(BUFFER),
            shared: None,
            remote: None,
        }
    }

    fn handover(&self, count: u64) -> f64 {
        let words = self.shared.expect("connected");
        let mut begin = Instant::now();
        if !self.side.is_first() {
            for _ in 0..count {
                let next = words.second.load(Ordering::Relaxed) + 1;
                while words.first.load(Ordering::Acquire) != next {}
                words.second.store(next, Ordering::Release);
            }
            return 0.0;
        }
        let start = words.first.load(Ordering::Relaxed);
        for i in 1..=count {
            if i == count / 10 {
                begin = Instant::now();
            }
            words.first.store(start + i, Ordering::Release);
            while words.second.load(Ordering::Acquire) != start + i {}
        }
        begin.elapsed().as_nanos() as f64 / (count - count / 10) as f64 / 2.0
    }

    fn by_kernel(&self, len: usize, write: bool) {
        let (pid, addr) = self.remote.expect("connected");
        let local = libc::iovec {
            iov_base: self.from.at.cast(),
            iov_len: len,
        };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(addr as usize),
            iov_len: len,
        };
        // SAFETY: this process's buffer has `len` bytes; the kernel checks the peer's range.
        let moved = unsafe {
            if write {
                libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0)
            } else {
                libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0)
            }
        };
        assert_eq!(moved, len as isize, "{}", std::io::Error::last_os_error());
    }

    fn copy(&self, len: usize) {
        // SAFETY: two buffers of that length.
        unsafe {
            std::hint::black_box(self.into.at)
                .copy_from_nonoverlapping(std::hint::black_box(self.from.at), len);
        }
    }
}

impl Subject for Machine {
    fn address(&mut self) -> String {
        // SAFETY: a constant name; the descriptor is this process's own.
        let fd = unsafe { libc::memfd_create(c"weft-bench".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::ftruncate(fd, PAGE as i64) }, 0);
        if self.side.is_first() {
            self.shared = Some(map(fd));
        }
        format!("{} {fd} {}", std::process::id(), self.into.addr())
    }

    fn connect(&mut self, other: &str) {
        let words: Vec<u64> = other
            .split(' ')
            .map(|word| word.parse().expect("a number"))
            .collect();
        let [pid, fd, addr] = words[..] else {
            panic!("{other}: not a process's address")
        };
        self.remote = Some((pid as i32, addr));
        if !self.side.is_first() {
            let path = format!("/proc/{pid}/fd/{fd}");
            let file = std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_CLOEXEC)
                .open(path)
                .expect("the other's memory");
            self.shared = Some(map(file.as_raw_fd()));
        }
    }

    fn run(&mut self, op: Op, len: usize, count: u64) -> f64 {
        if op == Op::Handover {
            return self.handover(count);
        }
        if !self.side.is_first() {
            return 0.0;
        }
        let once = || match op {
            Op::Memcpy => self.copy(len),
            Op::VmWrite => self.by_kernel(len, true),
            Op::VmRead => self.by_kernel(len, false),
            other => panic!("the machine has no {other}"),
        };
        for _ in 0..count / 10 {
            once();
        }
        let begin = Instant::now();
        for _ in 0..count {
            once();
        }
        begin.elapsed().as_nanos() as f64 / count as f64
    }
}
