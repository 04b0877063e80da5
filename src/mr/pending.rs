//! Asynchronous registration (`FI_REG_MR` bound to a domain's event queue): the domain's worker
//! threads, and the progress of a region's registration.

#![allow(unsafe_code, reason = "madvise(2)")]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rdma_core_sys as sys;

use super::mode::Paging;
use super::{Buffer, Region, page};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// Maximum number of threads that register at the same time, or fetch the pages of one region.
const MAX_WORKERS: usize = 8;
/// Idle time after which a worker ends.
const PATIENCE: Duration = Duration::from_secs(2);
/// Minimum length in bytes of a region whose pages several threads fetch, and the length of the
/// share that a thread fetches at a time.
const LARGE: u64 = 64 << 20;
const SHARE: usize = 16 << 20;

fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(MAX_WORKERS))
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that register regions, started on demand. Thread safe.
#[derive(Default)]
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    running: usize,
    stopped: bool,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

impl Workers {
    /// Passes a job to a worker. If no thread can be created, the calling thread runs the job.
    fn submit(&self, job: Job) {
        let mut state = self.shared.state.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() || state.running == workers() {
            self.shared.changed.notify_one();
            return;
        }
        state.threads.retain(|thread| !thread.is_finished());
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name("weft-register".to_owned())
            .spawn(move || {
                biased_lock::visitor();
                shared.run();
            });
        match thread {
            Ok(thread) => {
                state.running += 1;
                state.threads.push(thread);
            }
            Err(_) if state.running > 0 => {}
            Err(error) => {
                warn_log!(
                    Mr,
                    "no worker thread could be created: {error}; asynchronous registrations block"
                );
                let job = state.jobs.pop_back();
                drop(state);
                if let Some(job) = job {
                    job();
                }
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.stopped {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
                continue;
            }
            state.idle += 1;
            let late = self.changed.wait_for(&mut state, PATIENCE).timed_out();
            state.idle -= 1;
            if late && state.jobs.is_empty() {
                break;
            }
        }
        state.running -= 1;
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let (threads, jobs) = {
            let mut state = self.shared.state.lock();
            state.stopped = true;
            self.shared.changed.notify_all();
            (
                std::mem::take(&mut state.threads),
                std::mem::take(&mut state.jobs),
            )
        };
        // no open region is waiting for these jobs: a region holds a reference to its domain
        drop(jobs);
        let own = std::thread::current().id();
        for thread in threads {
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
    }
}

/// Progress of a region's registration by a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// No registration was requested, or the last one has ended.
    #[default]
    Idle,
    Queued,
    Running,
}

/// The progress of one region's registration. Thread safe.
#[derive(Debug, Default)]
pub(super) struct Pending {
    stage: Mutex<Stage>,
    changed: Condvar,
    /// Makes the registration panic, for tests.
    #[cfg(test)]
    panics: std::sync::atomic::AtomicBool,
}

impl Pending {
    /// Marks the registration as begun. Returns false if it was withdrawn.
    fn begin(&self) -> bool {
        let mut stage = self.stage.lock();
        let queued = *stage == Stage::Queued;
        if queued {
            *stage = Stage::Running;
        }
        queued
    }

    fn end(&self) {
        *self.stage.lock() = Stage::Idle;
        self.changed.notify_all();
    }
}

impl Region {
    /// Makes a worker of the domain enable the region, as [`Self::enable`] does, and then call
    /// `tell`. Several threads fetch the pages of a large region.
    ///
    /// Does not block. `tell` is called once, by the worker, unless [`Self::cancel_enable`] is
    /// called before the registration begins; it must not drop the region. Its argument is the
    /// result of [`Self::enable`], or `EOTHER` if that panicked.
    ///
    /// # Errors
    /// `EALREADY`: an earlier registration by a worker has not ended.
    pub fn enable_later(
        self: &Arc<Self>,
        tell: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<()> {
        let pending = Arc::clone(&self.pending);
        {
            let mut stage = pending.stage.lock();
            if *stage != Stage::Idle {
                return Err(FiErrno::EALREADY);
            }
            *stage = Stage::Queued;
        }
        // Weak: a caller that withdraws the registration may drop the region.
        let region = Arc::downgrade(self);
        self.domain().workers().submit(Box::new(move || {
            if !pending.begin() {
                return;
            }
            // A caller that drops the last reference has waited for the end of this job.
            if let Some(region) = region.upgrade() {
                // An uncaught panic of the registration would leave the application without an
                // event; one of the registration or of the report would block the thread that
                // closes the region.
                let enabled = catch_unwind(AssertUnwindSafe(|| {
                    #[cfg(test)]
                    assert!(!pending.panics.load(Ordering::Relaxed), "planted");
                    region.fetch_pages();
                    region.enable()
                }));
                let reported = catch_unwind(AssertUnwindSafe(|| {
                    tell(enabled.unwrap_or(Err(FiErrno::EOTHER)));
                    drop(region);
                }));
                if reported.is_err() {
                    warn_log!(
                        Mr,
                        "the result of an asynchronous registration was not reported"
                    );
                }
            }
            pending.end();
        }));
        Ok(())
    }

    /// Withdraws a registration that has not begun, and waits for the end of one that has; then no
    /// worker uses the region. Must be called before the region is dropped.
    pub fn cancel_enable(&self) {
        let mut stage = self.pending.stage.lock();
        if *stage == Stage::Queued {
            *stage = Stage::Idle;
        }
        while *stage == Stage::Running {
            self.pending.changed.wait(&mut stage);
        }
    }

    /// Fetches the pages of a large pinned region by several threads, before the registration pins
    /// them, up to the first page that cannot be fetched: the registration reports the error.
    fn fetch_pages(&self) {
        let pinned = self.domain().paging() == Paging::Pinned;
        // DMA-BUF memory has no pages to fetch
        if !pinned || self.len < LARGE || self.dmabuf.is_some() {
            return;
        }
        let written = self.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        let advice = if written {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        // no list of the shares: a region of 2^64 bytes has 2^40
        let (next, failed) = (AtomicU64::new(0), AtomicBool::new(false));
        let fetch = || {
            while !failed.load(Ordering::Relaxed)
                && let Some(share) = share(&self.buffers, next.fetch_add(1, Ordering::Relaxed))
            {
                // SAFETY: whole pages of the caller's memory (`Region::register`); the advice keeps
                // the contents.
                let ret = unsafe { libc::madvise(share.addr.cast_mut(), share.len, advice) };
                if ret != 0 {
                    failed.store(true, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..workers() {
                let helper = std::thread::Builder::new().name("weft-fetch".to_owned());
                if helper.spawn_scoped(scope, fetch).is_err() {
                    break;
                }
            }
            fetch();
        });
    }
}

/// The share number `number` of the whole pages of buffers, if there is one.
fn share(buffers: &[Buffer], mut number: u64) -> Option<Buffer> {
    for buffer in buffers {
        let start = page::floor(buffer.start());
        let end = page::ceil(buffer.end()).unwrap_or(buffer.end());
        let count = (end - start).div_ceil(SHARE as u64);
        if number < count {
            let addr = start + number * SHARE as u64;
            return Some(Buffer {
                addr: std::ptr::without_provenance(addr as usize), // only the kernel uses it
                len: SHARE.min((end - addr) as usize),
            });
        }
        number -= count;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn shares_cover_a_buffer_once() {
        for (addr, len) in [
            (0x1000, 1),
            (0x1fff, 2),
            (0x7000, SHARE),
            (0x7001, 5 * SHARE),
        ] {
            let addr: *const c_void = std::ptr::without_provenance(addr);
            let buffer = Buffer { addr, len };
            let buffers = [buffer];
            let shares: Vec<_> = (0..).map_while(|number| share(&buffers, number)).collect();
            assert_eq!(shares[0].start(), page::floor(buffer.start()));
            let mut at = shares[0].start();
            for share in &shares {
                assert_eq!(share.start(), at);
                assert!(share.len > 0 && share.len <= SHARE);
                at = share.end();
            }
            assert_eq!(Some(at), page::ceil(buffer.end()));
        }
        let buffer = |addr, len| Buffer {
            addr: std::ptr::without_provenance(addr),
            len,
        };
        let two = [buffer(0x7001, SHARE), buffer(0, usize::MAX)];
        let starts = [0x7000, 0x7000 + SHARE, 0, SHARE];
        for (number, start) in starts.into_iter().enumerate() {
            assert_eq!(share(&two, number as u64).unwrap().start(), start as u64);
        }
        let all = u64::MAX.div_ceil(SHARE as u64);
        assert!(share(&two, all + 1).is_some() && share(&two, all + 2).is_none());
    }

    #[test]
    fn workers_do_everything_once_and_end() {
        let count = Arc::new(AtomicUsize::new(0));
        let pool = Workers::default();
        for _ in 0..200 {
            let count = Arc::clone(&count);
            pool.submit(Box::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            }));
        }
        let begin = std::time::Instant::now();
        while count.load(Ordering::SeqCst) < 200 {
            assert!(begin.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
        assert!(pool.shared.state.lock().running <= workers());
        let shared = Arc::clone(&pool.shared);
        drop(pool);
        let state = shared.state.lock();
        assert_eq!((state.running, state.jobs.len()), (0, 0));
    }

    /// All pages of a large region are fetched before the registration; the registration itself
    /// fetches those of a smaller region.
    #[test]
    fn pages_of_a_large_region_are_fetched_first() {
        use super::super::{Access, Buffer, RegionConfig};
        use crate::domain::{Domain, DomainConfig};

        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        assert_eq!(domain.mr().paging(), Paging::Pinned);
        for (len, expected) in [(LARGE as usize, true), (LARGE as usize / 2, false)] {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping.
            let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0) };
            assert_ne!(addr, libc::MAP_FAILED);
            let config = RegionConfig {
                buffers: &[Buffer { addr, len }],
                access: Access::all(),
                requested_key: 1,
                ..RegionConfig::default()
            };
            // SAFETY: the memory is unmapped after the region is dropped.
            let region = unsafe { Region::prepare(domain.mr(), &config) }.unwrap();
            region.fetch_pages();
            let mut pages = vec![0_u8; len / 4096];
            // SAFETY: a live mapping; at most one byte of `pages` for each page of the system.
            let ret = unsafe { libc::mincore(addr, len, pages.as_mut_ptr()) };
            assert_eq!(ret, 0);
            let there = pages.iter().filter(|&&page| page & 1 != 0).count();
            assert_eq!(there, if expected { pages.len() } else { 0 });
            drop(region);
            // SAFETY: this test's mapping, which no region uses any more.
            unsafe { libc::munmap(addr, len) };
        }
    }

    /// A list of the shares would need 16 TiB.
    #[test]
    fn the_whole_address_space_is_not_fetched() {
        use super::super::{Access, Buffer, RegionConfig};
        use crate::domain::{Domain, DomainConfig};

        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let config = RegionConfig {
            buffers: &[Buffer {
                addr: std::ptr::null(),
                len: usize::MAX,
            }],
            access: Access::all(),
            requested_key: 1,
            ..RegionConfig::default()
        };
        // SAFETY: nothing is accessed.
        let region = unsafe { Region::prepare(domain.mr(), &config) }.unwrap();
        region.fetch_pages();
    }

    /// After a panic in a worker the application receives its event, and closing the region does
    /// not block.
    #[test]
    fn a_panic_of_a_worker_is_an_error() {
        use super::super::{Access, Buffer, RegionConfig};
        use crate::domain::{Domain, DomainConfig};

        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let memory = [0_u8; 4096];
        let register = |panics| {
            let buffers = [Buffer {
                addr: memory.as_ptr().cast(),
                len: memory.len(),
            }];
            let config = RegionConfig {
                buffers: &buffers,
                access: Access::all(),
                requested_key: 1,
                ..RegionConfig::default()
            };
            // SAFETY: the memory is dropped after the region.
            let region = unsafe { Region::prepare(domain.mr(), &config) }.unwrap();
            region.pending.panics.store(panics, Ordering::Relaxed);
            let (tell, told) = std::sync::mpsc::channel();
            region
                .enable_later(move |result| tell.send(result).unwrap())
                .unwrap();
            let told = told.recv_timeout(Duration::from_secs(30)).unwrap();
            region.cancel_enable();
            told
        };
        assert_eq!(register(true), Err(FiErrno::EOTHER));
        assert_eq!(register(false), Ok(()), "the workers go on");
    }
}
