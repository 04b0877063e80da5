//! The cache with the kernel's events, and a device that holds on to pages as hardware does.
//!
//! Memory is changed in processes of their own, which this program starts: what other tests fork or unmap would
//! be noticed too. `WEFT_CACHE_OPS` sets how long the mixture is.

#![allow(unsafe_code, reason = "changes memory")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{Watching, userfault};
use crate::errno::{FiErrno, Result};
use crate::mr::cache::{Bounds, Cache, Got, Registrar};

const ROLE: &str = "WEFT_TEST_CACHE";
const OPS: &str = "WEFT_CACHE_OPS";
const PAGE: usize = 4096;
const BOUNDS: Bounds = Bounds {
    size: 8 << 20,
    count: 48,
    merge: false,
};

/// A pipe that holds pages of the time when it was made, whatever is mapped there later: `vmsplice(2)`.
#[derive(Debug)]
struct Pipe {
    read: OwnedFd,
    _write: OwnedFd,
    start: u64,
}

fn pipe(len: usize) -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [-1; 2];
    // SAFETY: two elements; then descriptors of ours.
    unsafe {
        if libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) != 0 {
            return Err(FiErrno::last());
        }
        let ends = (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]));
        if libc::fcntl(fds[1], libc::F_SETPIPE_SZ, len) < 0 {
            return Err(FiErrno::ENOMEM);
        }
        Ok(ends)
    }
}

impl Pipe {
    /// The bytes as the device finds them.
    fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let offset = (addr - self.start) as usize;
        let (from, to) = pipe(offset + len + 2 * PAGE).unwrap();
        let mut bytes = vec![0; offset + len];
        // SAFETY: pipes of ours, and room for so many bytes.
        unsafe {
            let got = libc::tee(self.read.as_raw_fd(), to.as_raw_fd(), offset + len, 0);
            assert_eq!(got, (offset + len) as isize);
            let mut at = 0;
            while at < bytes.len() {
                let room = bytes[at..].as_mut_ptr().cast();
                let got = libc::read(from.as_raw_fd(), room, bytes.len() - at);
                assert!(got > 0, "{}", FiErrno::last());
                at += got as usize;
            }
        }
        bytes.split_off(offset)
    }
}

/// Registers by pipes.
#[derive(Debug, Default)]
struct Pipes {
    made: AtomicUsize,
}

impl Registrar for Pipes {
    type Mr = Arc<Pipe>;
    unsafe fn register(&self, start: u64, len: u64, _: bool) -> Result<(Arc<Pipe>, u32)> {
        let (read, write) = pipe(len as usize + PAGE)?;
        // a device's pin makes a private page the mapping's own, as a write does (FOLL_LONGTERM)
        // SAFETY: changes no byte.
        let ret = unsafe {
            let place = std::ptr::without_provenance_mut(start as usize);
            libc::madvise(place, len as usize, libc::MADV_POPULATE_WRITE)
        };
        if ret != 0 {
            return Err(FiErrno::last());
        }
        let mut at = 0;
        while at < len {
            let part = libc::iovec {
                iov_base: std::ptr::without_provenance_mut((start + at) as usize),
                iov_len: (len - at) as usize,
            };
            // SAFETY: the kernel refuses what isn't there.
            let got = unsafe { libc::vmsplice(write.as_raw_fd(), &raw const part, 1, 0) };
            if got <= 0 {
                return Err(FiErrno::last());
            }
            at += got as u64;
        }
        self.made.fetch_add(1, Ordering::Relaxed);
        let pipe = Pipe {
            read,
            _write: write,
            start,
        };
        Ok((Arc::new(pipe), 0))
    }
}

type Tested = Cache<Pipes>;

fn open(bounds: Bounds) -> Tested {
    let cache = Cache::new(Pipes::default(), bounds, |index| {
        let index = Arc::clone(index);
        Ok(Box::new(Watching::new(index, true)?))
    });
    cache.expect("userfaultfd")
}

/// How often a kept registration was used.
static HITS: AtomicU64 = AtomicU64::new(0);

/// How often `mremap(2)` was refused.
static TORN: AtomicU64 = AtomicU64::new(0);

/// What the device finds at a place must be what is there.
fn transfer(cache: &Tested, place: *const u8, len: usize) {
    let addr = place as u64;
    let found = cache.find(addr, addr + len as u64, false, None);
    HITS.fetch_add(u64::from(found.is_some()), Ordering::Relaxed);
    // SAFETY: the memory is this thread's, and stays until the transfer is over.
    let got = match found {
        Some(held) => Got::Kept(held),
        // SAFETY: as above.
        None => unsafe { cache.get(addr, len as u64, false) }.expect("a registration"),
    };
    let device = match &got {
        Got::Kept(held) => cache.owned(held).expect("one that is held").read(addr, len),
        Got::Once(pipe, _) => pipe.read(addr, len),
    };
    // SAFETY: as above.
    let memory = unsafe { std::slice::from_raw_parts(place, len) };
    let differs = device.iter().zip(memory).position(|(a, b)| a != b);
    if let Some(at) = differs {
        panic!("stale: byte {at} of {len} at {place:?}, {got:?}");
    }
    if let Got::Kept(held) = got {
        cache.release(&held);
    }
}

fn map(at: *mut u8, pages: usize, more: libc::c_int) -> *mut u8 {
    // SAFETY: a new mapping, or one in the place of this thread's own.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let new = libc::mmap(at.cast(), pages * PAGE, prot, flags, -1, 0);
        assert_ne!(new, libc::MAP_FAILED, "{}", FiErrno::last());
        new.cast()
    }
}

/// Memory of one thread.
enum Area {
    Mapped(*mut u8, usize),
    Allocated(Vec<u8>),
}

impl Area {
    fn place(&mut self) -> (*mut u8, usize) {
        match self {
            Self::Mapped(at, pages) => (*at, *pages * PAGE),
            Self::Allocated(bytes) => (bytes.as_mut_ptr(), bytes.len()),
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % end
    }
}

fn fill(place: *mut u8, len: usize, random: &mut Random) {
    for at in (0..len).step_by(512) {
        // SAFETY: the area is this thread's.
        unsafe { place.add(at).write(random.below(256) as u8) };
    }
}

/// One thread's part of the mixture.
fn mix(cache: &Tested, ops: usize, seed: u64) {
    let mut random = Random(seed | 1);
    let mut areas: Vec<Area> = Vec::new();
    for _ in 0..ops {
        let choice = random.below(200);
        if areas.len() < 3 || (choice < 12 && areas.len() < 12) {
            let area = if choice.is_multiple_of(2) {
                let pages = 1 + random.below(12);
                Area::Mapped(map(std::ptr::null_mut(), pages, 0), pages)
            } else {
                // below and above what allocators give back at once
                Area::Allocated(vec![1; 1 + random.below(300_000)])
            };
            areas.push(area);
            continue;
        }
        let at = random.below(areas.len());
        match (&mut areas[at], choice) {
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 12..20) => unsafe {
                libc::munmap((*place).cast(), *pages * PAGE);
                areas.swap_remove(at);
            },
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 20..24) if *pages > 1 => unsafe {
                *pages -= 1;
                libc::munmap((*place).add(*pages * PAGE).cast(), PAGE);
            },
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 24..30) => unsafe {
                let new = 1 + random.below(12);
                let (old, len) = ((*place).cast(), *pages * PAGE);
                let moved = libc::mremap(old, len, new * PAGE, libc::MREMAP_MAYMOVE);
                if moved == libc::MAP_FAILED {
                    // two mappings by now: the other thread's were watched while this one was mapped beside them
                    TORN.fetch_add(1, Ordering::Relaxed);
                } else {
                    (*place, *pages) = (moved.cast(), new);
                }
            },
            // SAFETY: the area is this thread's, and no transfer is under way.
            (Area::Mapped(place, pages), 30..36) => unsafe {
                let from = random.below(*pages);
                let len = (*pages - from) * PAGE;
                libc::madvise((*place).add(from * PAGE).cast(), len, libc::MADV_DONTNEED);
            },
            (Area::Mapped(place, pages), 36..40) => {
                map(*place, *pages, libc::MAP_FIXED);
            }
            (Area::Allocated(_), 12..24) => {
                areas.swap_remove(at);
            }
            (Area::Allocated(bytes), 24..36) => bytes.resize(1 + random.below(300_000), 2),
            // SAFETY: the child ends at once.
            (_, 40) if random.below(40) == 0 => unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(0);
                }
                assert!(child > 0);
                // the parent writes before the child ends, and after
                let (place, len) = areas[at].place();
                fill(place, len, &mut random);
                transfer(cache, place, len.min(12 * PAGE));
                assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
            },
            (area, _) => {
                let (place, len) = area.place();
                let from = random.below(len);
                let part = 1 + random.below((len - from).min(12 * PAGE));
                // SAFETY: inside the area.
                let place = unsafe { place.add(from) };
                fill(place, part, &mut random);
                transfer(cache, place, part);
            }
        }
    }
    for area in areas {
        if let Area::Mapped(place, pages) = area {
            // SAFETY: as above.
            unsafe { libc::munmap(place.cast(), pages * PAGE) };
        }
    }
}

fn mixture() {
    let ops: usize = std::env::var(OPS).map_or(10_000, |ops| ops.parse().unwrap());
    for merge in [false, true] {
        let cache = open(Bounds { merge, ..BOUNDS });
        std::thread::scope(|scope| {
            for thread in 1..=2 {
                let cache = &cache;
                scope.spawn(move || mix(cache, ops / 4, thread * 0x9e37_79b9 + u64::from(merge)));
            }
        });
        cache.drain();
    }
    let hits = HITS.load(Ordering::Relaxed);
    println!(
        "{ops} operations, {hits} hits, {} torn",
        TORN.load(Ordering::Relaxed)
    );
    let torn = TORN.load(Ordering::Relaxed);
    assert!(torn <= ops as u64 / 1000, "mremap was refused {torn} times");
    assert!(hits > ops as u64 / 100, "the cache was hardly used: {hits}");
}

/// Loses pages of a place; gives where the place is now.
type Way = fn(*mut u8) -> *mut u8;

/// Each way of losing pages, one after the other, with a hit before it.
fn ways() {
    let cache = open(BOUNDS);
    // an event that is being dealt with keeps a registration from being kept
    let kept = |place: *mut u8| {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            transfer(&cache, place, 4 * PAGE);
            let addr = place as u64;
            if let Some(held) = cache.find(addr, addr + 1, false, None) {
                cache.release(&held);
                return true;
            }
        }
        false
    };
    let hit = |place: *mut u8| {
        let addr = place as u64;
        let held = cache.find(addr, addr + 1, false, None);
        held.inspect(|held| cache.release(held)).is_some()
    };
    let lose: [(&str, Way); 8] = [
        ("munmap and mmap", |at| {
            // SAFETY: the mapping is the test's.
            unsafe { libc::munmap(at.cast(), 4 * PAGE) };
            map(at, 4, libc::MAP_FIXED)
        }),
        ("mmap over it", |at| map(at, 4, libc::MAP_FIXED)),
        ("munmap of one page", |at| {
            // SAFETY: as above.
            unsafe { libc::munmap(at.wrapping_add(3 * PAGE).cast(), PAGE) };
            map(at.wrapping_add(3 * PAGE), 1, libc::MAP_FIXED);
            at
        }),
        ("mremap and mmap", |at| {
            // SAFETY: as above.
            unsafe {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let to = map(std::ptr::null_mut(), 4, 0);
                libc::mremap(at.cast(), 4 * PAGE, 4 * PAGE, flags, to);
            }
            map(at, 4, libc::MAP_FIXED)
        }),
        ("mremap onto it", |at| {
            // SAFETY: as above.
            unsafe {
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                let from = map(std::ptr::null_mut(), 4, 0);
                libc::mremap(from.cast(), 4 * PAGE, 4 * PAGE, flags, at);
            }
            at
        }),
        ("DONTNEED", |at| {
            // SAFETY: as above.
            unsafe { libc::madvise(at.cast(), PAGE, libc::MADV_DONTNEED) };
            at
        }),
        ("fork", |at| {
            // SAFETY: the child ends at once.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(0);
                }
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            at
        }),
        ("brk", |_| {
            // SAFETY: nothing else in this process moves the break meanwhile.
            unsafe {
                libc::sbrk(-(4 * PAGE as isize));
                libc::sbrk(4 * PAGE as isize).cast()
            }
        }),
    ];
    for (name, lose) in lose {
        let place = if name == "brk" {
            // SAFETY: as above.
            unsafe {
                let end = libc::sbrk(0) as usize;
                libc::sbrk(((PAGE - end % PAGE) % PAGE) as isize);
                libc::sbrk(4 * PAGE as isize).cast()
            }
        } else {
            map(std::ptr::null_mut(), 4, 0)
        };
        let all = |byte: u8, at: *mut u8| {
            // SAFETY: the mapping is the test's.
            unsafe { at.write_bytes(byte, 4 * PAGE) };
        };
        all(1, place);
        assert!(kept(place), "not kept before {name}");
        all(2, place);
        let place = lose(place);
        assert!(!hit(place), "kept over {name}");
        all(3, place);
        assert!(kept(place), "not kept after {name}");
        println!("{name}");
    }
    // what would not be told
    // SAFETY: new mappings, of the test.
    unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, 4 * PAGE, 0o600);
        let segment: *mut u8 = libc::shmat(id, std::ptr::null(), 0).cast();
        libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
        let file = libc::memfd_create(c"weft-test".as_ptr(), libc::MFD_CLOEXEC);
        libc::ftruncate(file, 4 * PAGE as i64);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let shared = libc::mmap(
            std::ptr::null_mut(),
            4 * PAGE,
            prot,
            libc::MAP_SHARED,
            file,
            0,
        );
        for place in [segment, shared.cast()] {
            place.write_bytes(1, 4 * PAGE);
            transfer(&cache, place, 4 * PAGE);
            assert!(!hit(place));
        }
        let (mode, len) = (
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            PAGE as i64,
        );
        assert_eq!(libc::fallocate(file, mode, 0, len), 0);
        transfer(&cache, shared.cast(), 4 * PAGE);
        libc::shmdt(segment.cast());
    }
    // a child uses nothing that was kept, and can drop the cache
    let place = map(std::ptr::null_mut(), 4, 0);
    // SAFETY: the child calls only what must be possible there, and ends.
    unsafe {
        place.write_bytes(1, 4 * PAGE);
        assert!(kept(place));
        let child = libc::fork();
        if child == 0 {
            let clean = !hit(place) && userfault::Userfault::get().is_err();
            drop(cache);
            // and forks in its turn
            let grandchild = libc::fork();
            if grandchild > 0 {
                libc::waitpid(grandchild, std::ptr::null_mut(), 0);
            }
            libc::_exit(i32::from(!clean));
        }
        let mut status = -1;
        libc::waitpid(child, &raw mut status, 0);
        assert_eq!(status, 0);
    }
}

/// Between the unmapping and its event another thread is given the addresses: the kernel says so.
fn window() {
    let (reader, fd) = userfault::without_thread();
    let place = map(std::ptr::null_mut(), 4, 0);
    let end = place as u64 + 4 * PAGE as u64;
    reader.watch_range(place as u64, end).unwrap();
    assert!(!reader.is_changing());
    std::thread::scope(|scope| {
        let at = place as usize;
        scope.spawn(move || {
            // waits until its event is read, which is never, or the descriptor ends
            // SAFETY: the mapping is the test's.
            unsafe { libc::munmap(std::ptr::without_provenance_mut(at), 4 * PAGE) };
        });
        let start = Instant::now();
        while !reader.is_changing() {
            assert!(start.elapsed() < Duration::from_secs(60), "never seen");
        }
        // the addresses are free, and can be had
        map(place, 4, libc::MAP_FIXED_NOREPLACE);
        assert!(reader.is_changing());
        fd.end();
    });
}

/// A filter that refuses userfaultfd and its device, for this thread and those it starts.
fn refuse() {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let errno = 0x0005_0000 | libc::EPERM.cast_unsigned();
    let mut steps = [
        step(0x20, 0, 0, 0),
        step(0x15, 0, 1, libc::SYS_userfaultfd as u32),
        step(0x06, 0, 0, errno),
        // ioctl, of which only the one that makes descriptors is refused
        step(0x15, 0, 3, libc::SYS_ioctl as u32),
        step(0x20, 0, 0, 24),
        step(0x15, 0, 1, 0xaa00),
        step(0x06, 0, 0, errno),
        step(0x06, 0, 0, 0x7fff_0000),
    ];
    let program = libc::sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    // SAFETY: a filter of that many steps, which is copied.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        );
        assert_eq!(set, 0, "{}", FiErrno::last());
    }
}

/// Starts this program in a role; a process that is not done in time hangs, and is killed.
fn run(role: &str, preload: Option<&str>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--nocapture", "mr::monitor::tests::in_a_process"])
        .env(ROLE, role)
        .stdin(Stdio::null());
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > Duration::from_secs(600) {
            let _ = child.kill();
            panic!("{role} with {preload:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{role} with {preload:?}: {status}");
}

/// Whether the kernel lets us watch memory; said where it doesn't.
pub(crate) fn available() -> bool {
    match userfault::Userfault::get() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: userfaultfd can't be had here: {error}");
            false
        }
    }
}

/// What the other processes run; does nothing in an ordinary run of the tests.
#[test]
fn in_a_process() {
    let role = std::env::var(ROLE);
    if role.is_ok() && !available() {
        return;
    }
    match role.as_deref() {
        Ok("mixture") => mixture(),
        Ok("ways") => ways(),
        Ok("window") => window(),
        Ok("refused") => {
            refuse();
            let cache = Cache::new(Pipes::default(), BOUNDS, |index| {
                let index = Arc::clone(index);
                Ok(Box::new(Watching::new(index, true)?))
            });
            assert_eq!(cache.err(), Some(FiErrno::EPERM));
        }
        _ => {}
    }
}

#[test]
fn what_loses_its_pages_is_not_used() {
    run("ways", None);
}

#[test]
fn the_kernel_tells_of_changes_whose_event_was_not_read() {
    run("window", None);
}

#[test]
fn what_is_refused_is_said() {
    run("refused", None);
}

#[test]
fn a_random_mixture_of_changes_and_transfers() {
    run("mixture", None);
}

/// Allocators that give memory back while they hold locks.
#[test]
fn other_allocators_do_not_deadlock() {
    for library in ["libjemalloc.so.2", "libmimalloc.so.2.0"] {
        let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
        let found = places.map(|place| format!("{place}/{library}"));
        match found
            .iter()
            .find(|path| std::path::Path::new(path).exists())
        {
            Some(path) => run("mixture", Some(path)),
            None => println!("skipped {library}: not installed (make deps)"),
        }
    }
}
