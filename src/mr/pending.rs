//! Asynchronous registration (`FI_REG_MR` bound to a domain's event queue): the progress of a
//! region's registration by a worker.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::Region;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

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
    /// The next registration waits here twice, with the bindings of the region locked.
    #[cfg(test)]
    stop: Mutex<Option<Arc<std::sync::Barrier>>>,
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

    /// Waits at [`Self::stop`], if it is set.
    #[cfg(test)]
    pub(super) fn pause(&self) {
        let stop = self.stop.lock().take();
        if let Some(stop) = stop {
            stop.wait();
            stop.wait();
        }
    }

    fn end(&self) {
        *self.stage.lock() = Stage::Idle;
        self.changed.notify_all();
    }
}

impl Region {
    /// Makes a worker of the domain enable the region, as [`Self::enable`] does, and then call
    /// `report`. Several threads fetch the pages of a large region.
    ///
    /// Does not block. `report` is called once, by the worker, unless [`Self::cancel_enable`] is
    /// called before the registration begins; it must not drop the region. Its argument is the
    /// result of [`Self::enable`], or `EOTHER` if that panicked.
    ///
    /// # Errors
    /// `EALREADY`: an earlier registration by a worker has not ended.
    pub fn enable_later(
        self: &Arc<Self>,
        report: impl FnOnce(Result<()>) + Send + 'static,
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
                    assert!(
                        !pending.panics.load(std::sync::atomic::Ordering::Relaxed),
                        "planted"
                    );
                    region.fetch_pages();
                    region.enable()
                }));
                let reported = catch_unwind(AssertUnwindSafe(|| {
                    report(enabled.unwrap_or(Err(FiErrno::EOTHER)));
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
    ///
    /// In a forked child it has no effect: the workers are its parent's, and no registration of the
    /// child is under way.
    pub fn cancel_enable(&self) {
        if !self.is_of_this_process() {
            return;
        }
        let mut stage = self.pending.stage.lock();
        if *stage == Stage::Queued {
            *stage = Stage::Idle;
        }
        while *stage == Stage::Running {
            self.pending.changed.wait(&mut stage);
        }
    }
}

#[allow(unsafe_code, reason = "registers memory")]
#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use super::super::{Access, Buffer, RegionConfig};
    use super::*;
    use crate::domain::{Domain, DomainConfig};

    /// A region that is not registered yet.
    fn prepared(domain: &Domain, memory: &[u8]) -> Arc<Region> {
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
        // SAFETY: the callers drop the memory after the region.
        unsafe { Region::prepare(domain.mr(), &config) }.unwrap()
    }

    /// At the fork a worker registers the region, with its bindings locked.
    #[test]
    fn a_forked_child_closes_a_region_that_is_being_registered() {
        let domain = Domain::open(&super::super::tests::device(), DomainConfig::default()).unwrap();
        let memory = [0_u8; 64];
        let region = prepared(&domain, &memory);
        let stop = Arc::new(std::sync::Barrier::new(2));
        *region.pending.stop.lock() = Some(Arc::clone(&stop));
        let (report, reported) = std::sync::mpsc::channel();
        region
            .enable_later(move |result| report.send(result).unwrap())
            .unwrap();
        stop.wait();
        // SAFETY: the child uses these objects alone, and exits; the alarm ends one that waits.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::alarm(10);
                let closed = region.close().is_ok() && region.close().is_ok();
                drop((region, domain));
                libc::_exit(i32::from(!closed));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            stop.wait();
            assert_eq!(status, 0);
        }
        assert_eq!(reported.recv_timeout(Duration::from_secs(30)), Ok(Ok(())));
        region.close().unwrap();
    }

    /// At the fork one worker registers a region and another one is idle. The child has copies of
    /// their records.
    #[test]
    fn a_forked_child_waits_for_no_worker() {
        use super::super::tests;

        let domain = Domain::open(&tests::device(), DomainConfig::default()).unwrap();
        let memory = [0_u8; 64];
        let region = prepared(&domain, &memory);
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        let report = move |_| {
            begin.send(()).unwrap();
            let _ = released.recv();
        };
        region.enable_later(report).unwrap();
        begun.recv_timeout(Duration::from_secs(30)).unwrap();
        let pool = super::super::workers::Workers::default();
        pool.submit(Box::new(|| {}));
        // SAFETY: the child uses these objects alone, and exits; the alarm ends one that waits.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::alarm(10);
                region.cancel_enable();
                let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
                let job = Arc::clone(&done);
                pool.submit(Box::new(move || job.store(true, Ordering::Relaxed)));
                drop(pool);
                libc::_exit(i32::from(!done.load(Ordering::Relaxed)));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            assert_eq!(status, 0);
        }
        drop(release);
        region.cancel_enable();
    }

    /// After a panic in a worker the application receives its event, and closing the region does
    /// not block.
    #[test]
    fn a_panic_of_a_worker_is_an_error() {
        let device = crate::verbs::devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let memory = [0_u8; 4096];
        let register = |panics| {
            let region = prepared(&domain, &memory);
            region.pending.panics.store(panics, Ordering::Relaxed);
            let (report, reported) = std::sync::mpsc::channel();
            region
                .enable_later(move |result| report.send(result).unwrap())
                .unwrap();
            let reported = reported.recv_timeout(Duration::from_secs(30)).unwrap();
            region.cancel_enable();
            reported
        };
        assert_eq!(register(true), Err(FiErrno::EOTHER));
        assert_eq!(register(false), Ok(()), "the workers continue");
    }
}
