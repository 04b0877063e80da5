//! The actual behaviour of a device, found by trials.
//!
//! Capability bits can be wrong in both directions: a driver may lack a reported function, or have
//! one that no bit reports. So weft tries each behaviour that it depends on, on two queue pairs of
//! the device, once per device, at the first call of [`Device::behaviour`]. The trials take a few
//! milliseconds on hardware; all objects are destroyed afterwards. With `FI_LOG_LEVEL=info`,
//! opening a domain prints the table.
//!
//! Known devices, for comparison (`rdma-core 65`, Linux 7.2 unless noted otherwise):
//! - rxe takes on-demand regions, and on Linux 7.2.13 each access goes to the start of its page
//!   instead of the address, with success (which is why the trial writes in the middle of a page).
//!   If the region's iova differs from its address, an access uses the iova as an address in the
//!   kernel's list of pages (`rxe_odp.c`, `rxe_check_pagefault`): usually the access fails, and
//!   about once in thirty times the kernel panicked. So this is not tried on rxe, see
//!   [`Seen::Harmful`]. rxe never checks the bounds of a memory window; it has no rereg in its
//!   library (`providers/rxe/rxe.c`), no implicit ODP; with rdma-core 44 neither advise nor flush.
//! - mlx5 reuses the rkey of a closed region for the next one.

#![allow(unsafe_code, reason = "calls verbs")]

mod loopback;
mod xrc;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_core_sys as sys;

use self::loopback::{Loopback, Outcome, Pages};
pub use self::xrc::XrcBehaviour;
use super::{Device, Pd};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;

/// The result of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The device behaves as specified.
    Works,
    /// The device refuses the operation, which a program can handle.
    Refused(FiErrno),
    /// The device accepts the operation and does not behave as specified. weft must not use it.
    Broken,
    /// Not tried, because on this device the trial can crash the kernel.
    Harmful,
}

impl Seen {
    /// Whether weft can rely on the behaviour.
    pub fn works(self) -> bool {
        self == Self::Works
    }

    fn of(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Works,
            Outcome::NotPosted(error) => Self::Refused(error),
            Outcome::Failed(_) => Self::Broken,
        }
    }

    /// As [`Self::of`], unless the result may be another one next time.
    ///
    /// # Errors
    /// `ETIMEDOUT`: there was no answer. Others: the device has not taken the request.
    fn lasting(outcome: Outcome) -> Result<Self> {
        match outcome {
            Outcome::Failed(None | Some(sys::IBV_WC_RETRY_EXC_ERR)) => Err(FiErrno::ETIMEDOUT),
            Outcome::NotPosted(error) if error.may_pass() => Err(error),
            other => Ok(Self::of(other)),
        }
    }
}

/// The result of a trial. An error before its last step is a refusal. One that may pass is a
/// refusal too, and a request without answer a failure, if the trial has the same result again
/// although RC writes of the device work in between.
///
/// # Errors
/// One that may pass.
fn repeat_if_transient(
    trial: impl Fn() -> Result<Seen>,
    loopback: impl Fn() -> Result<Seen>,
) -> Result<Seen> {
    let error = match trial() {
        Err(error) if error.may_pass() => error,
        result => return Ok(result.unwrap_or_else(Seen::Refused)),
    };
    if !loopback().is_ok_and(Seen::works) {
        return Err(error);
    }
    match trial() {
        Err(FiErrno::ETIMEDOUT) => Ok(Seen::Broken),
        result => Ok(result.unwrap_or_else(Seen::Refused)),
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => f.write_str("works"),
            Self::Refused(error) => write!(f, "refused: {error}"),
            Self::Broken => f.write_str("accepted, but fails"),
            Self::Harmful => f.write_str("not tried, harms this kernel"),
        }
    }
}

macro_rules! behaviour {
    ($($(#[$meta:meta])* $field:ident: $label:literal by $trial:ident;)*) => {
        /// The observed behaviour of a device.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Behaviour {
            $($(#[$meta])* pub $field: Seen,)*
        }

        impl Behaviour {
            /// Runs the trials. If the device has no RC write to itself, all behaviours get the
            /// result of that without a trial.
            ///
            /// # Errors
            /// One that may pass, for instance because the port is down: there is no result.
            fn observe(bench: &Bench<'_>) -> Result<Self> {
                let loopback = || bench.loopback();
                let base = match loopback() {
                    Err(FiErrno::ETIMEDOUT) if bench.device.is_down() => {
                        return Err(FiErrno::ENETDOWN);
                    }
                    Err(error) if error.may_pass() => return Err(error),
                    result => result.unwrap_or_else(Seen::Refused),
                };
                if !base.works() && bench.device.is_down() {
                    return Err(FiErrno::ENETDOWN);
                }
                Ok(Self {
                    $($field: match base.works() {
                        true => repeat_if_transient(|| bench.$trial(), loopback)?,
                        false => base,
                    },)*
                })
            }

            /// The rows of the table: the name of a behaviour, and the result of its trial.
            pub fn rows(&self) -> Vec<(&'static str, Seen)> {
                vec![$(($label, self.$field),)*]
            }
        }
    };
}

behaviour! {
    /// RC write between two pinned regions; without it no other behaviour is tried.
    loopback: "rc write to itself" by loopback;
    /// Pinned region with iova 0.
    iova_zero: "pinned region at iova 0" by iova_zero;
    /// On-demand region over memory that was never touched, written by RC.
    odp: "on-demand region, untouched memory" by odp;
    /// The same at another iova.
    odp_iova: "on-demand region at another iova" by odp_iova;
    /// On-demand region over the whole address space.
    odp_implicit: "implicit on-demand region" by odp_implicit;
    /// `ibv_advise_mr(3)`, PREFETCH.
    advise_prefetch: "advise: prefetch" by advise_prefetch;
    /// `ibv_advise_mr(3)`, PREFETCH_WRITE.
    advise_prefetch_write: "advise: prefetch for writing" by advise_prefetch_write;
    /// `ibv_rereg_mr(3)`, change of access.
    rereg: "rereg: change of access" by rereg;
    /// RDMA FLUSH to global visibility.
    flush_global: "flush: global visibility" by flush_global;
    /// RDMA FLUSH to persistence, on a pinned region.
    flush_persistent: "flush: persistence" by flush_persistent;
    /// Access beyond a memory window is refused.
    window_bounds: "type 2 window: bounds enforced" by window_bounds;
}

impl fmt::Display for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (label, seen)) in self.rows().into_iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}  {label:<36}{seen}")?;
        }
        Ok(())
    }
}

impl Device {
    /// The actual behaviour of this device. The first call runs the trials, which block for a few
    /// milliseconds (on a device that loses packets: seconds); later calls return the same result.
    /// Thread safe.
    ///
    /// # Errors
    /// An error that may pass: memory, descriptors, a host that is too busy for the time limit, or
    /// `ENETDOWN`: port 1 is down. Later calls return it for 1 s, after several time limits for up
    /// to 1 minute, and for as long as the port is down. Then the trials run again.
    pub fn behaviour(self: &Arc<Self>) -> Result<&Behaviour> {
        if let Some(known) = self.observed().get() {
            return Ok(known);
        }
        let mut last = self.not_observed().lock();
        // another thread may have run them while this one waited
        if let Some(known) = self.observed().get() {
            return Ok(known);
        }
        if let Some(last) = last.filter(|last| last.stays(Instant::now(), || self.is_down())) {
            return Err(last.error);
        }
        let seen = Pd::alloc(self).and_then(|pd| Behaviour::observe(&Bench { device: self, pd }));
        match seen {
            Ok(seen) => Ok(self.observed().get_or_init(|| seen)),
            Err(error) => {
                *last = Some(NoBehaviour::new(error, Instant::now(), *last));
                drop(last);
                info_log!(
                    Domain,
                    "{}: no trial of its behaviour: {error}",
                    self.name()
                );
                Err(error)
            }
        }
    }

    /// Whether the port that the trials use is known to be down.
    fn is_down(&self) -> bool {
        self.port(1).is_ok_and(|port| !port.active)
    }
}

/// The shortest time between two attempts to run the trials: one call of an application asks for
/// their results more than once.
const AGAIN: Duration = Duration::from_secs(1);
/// The longest time between two attempts that reach the time limit, which takes up to 2 s. The time
/// is doubled each time.
const SELDOM: Duration = Duration::from_secs(60);

/// The trials had no result.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoBehaviour {
    error: FiErrno,
    at: Instant,
    pause: Duration,
}

impl NoBehaviour {
    /// `last`: the one before.
    fn new(error: FiErrno, at: Instant, last: Option<Self>) -> Self {
        let late = FiErrno::ETIMEDOUT;
        let pause = match last {
            Some(last) if (last.error, error) == (late, late) => SELDOM.min(2 * last.pause),
            _ => AGAIN,
        };
        Self { error, at, pause }
    }

    /// Whether another attempt has no better result, or is too early. A port that was down at the
    /// last attempt is asked first: without an answer the trials take seconds.
    fn stays(self, now: Instant, is_down: impl FnOnce() -> bool) -> bool {
        let early = now.saturating_duration_since(self.at) < self.pause;
        early || self.error == FiErrno::ENETDOWN && is_down()
    }
}

/// The value that a trial's write stores in the target.
const MARK: u64 = 0x5eed_0f7e_a177_u64;
const PAGE: usize = 4096;
/// rxe's vendor id (`RXE_VENDOR_ID` in the kernel's `rxe_param.h`).
const RXE_VENDOR: u32 = 0xff_ffff;
const PINNED: u32 = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE;
const ON_DEMAND: u32 = PINNED | sys::IBV_ACCESS_ON_DEMAND;

/// A registration, deregistered when it is dropped.
struct RawMr<'a> {
    raw: *mut sys::ibv_mr,
    device: &'a Device,
}

impl RawMr<'_> {
    fn lkey(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).lkey }
    }

    fn rkey(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for RawMr<'_> {
    fn drop(&mut self) {
        // SAFETY: created by this backend, destroyed once.
        unsafe { (self.device.backend().verbs.ibv_dereg_mr)(self.raw) };
    }
}

/// Registers memory, which the caller keeps until the region is dropped.
fn register<'a>(
    device: &'a Device,
    pd: &Pd,
    pages: &Pages,
    iova: u64,
    access: u32,
) -> Result<RawMr<'a>> {
    let verbs = &device.backend().verbs;
    // SAFETY: the protection domain is live and of this backend; every caller keeps the pages until
    // the region is dropped.
    let raw =
        unsafe { sys::ibv_reg_mr_iova(verbs, pd.raw(), pages.addr(), pages.len(), iova, access) };
    owned(device, raw)
}

fn owned(device: &Device, raw: *mut sys::ibv_mr) -> Result<RawMr<'_>> {
    if raw.is_null() {
        return Err(FiErrno::last());
    }
    Ok(RawMr { raw, device })
}

/// The objects that all trials use.
struct Bench<'a> {
    device: &'a Arc<Device>,
    pd: Arc<Pd>,
}

impl Bench<'_> {
    fn register(&self, pages: &Pages, iova: u64, access: u32) -> Result<RawMr<'_>> {
        register(self.device, &self.pd, pages, iova, access)
    }

    fn owned(&self, raw: *mut sys::ibv_mr) -> Result<RawMr<'_>> {
        owned(self.device, raw)
    }

    /// Writes [`MARK`] to `addr` of the region `target` and checks whether it is stored at `offset`
    /// of `pages`.
    fn write_to(
        &self,
        target: &RawMr<'_>,
        addr: u64,
        pages: &Pages,
        offset: usize,
    ) -> Result<Seen> {
        let source = Pages::map(PAGE)?;
        source.set_word(0, MARK);
        let local = self.register(&source, source.addr() as u64, PINNED)?;
        let pair = Loopback::connect(self.device, &self.pd, false)?;
        let outcome = pair.write(sge(&source, &local), addr, target.rkey());
        Ok(match Seen::lasting(outcome)? {
            Seen::Works if pages.word(offset) != MARK => Seen::Broken,
            seen => seen,
        })
    }

    fn write_through(&self, iova: impl FnOnce(&Pages) -> u64, access: u32) -> Result<Seen> {
        let pages = Pages::map(4 * PAGE)?;
        let iova = iova(&pages);
        let target = self.register(&pages, iova, access)?;
        let offset = 2 * PAGE + 64;
        self.write_to(&target, iova + offset as u64, &pages, offset)
    }

    fn loopback(&self) -> Result<Seen> {
        self.write_through(|pages| pages.addr() as u64, PINNED)
    }

    fn iova_zero(&self) -> Result<Seen> {
        self.write_through(|_| 0, PINNED)
    }

    fn odp(&self) -> Result<Seen> {
        self.write_through(|pages| pages.addr() as u64, ON_DEMAND)
    }

    fn odp_iova(&self) -> Result<Seen> {
        if self.device.attr().vendor_id == RXE_VENDOR {
            return Ok(Seen::Harmful);
        }
        self.write_through(|_| 1 << 30, ON_DEMAND)
    }

    fn odp_implicit(&self) -> Result<Seen> {
        let verbs = &self.device.backend().verbs;
        // In verbs, address 0 with the maximum length is the whole address space.
        // SAFETY: the device faults in pages when they are accessed, and accesses only the pages
        // below.
        let raw = unsafe {
            sys::ibv_reg_mr(
                verbs,
                self.pd.raw(),
                std::ptr::null_mut(),
                usize::MAX,
                ON_DEMAND,
            )
        };
        let target = self.owned(raw)?;
        let pages = Pages::map(PAGE)?;
        self.write_to(&target, pages.addr() as u64, &pages, 0)
    }

    fn advise(&self, advice: u32) -> Result<Seen> {
        let pages = Pages::map(PAGE)?;
        let region = self.register(&pages, pages.addr() as u64, ON_DEMAND)?;
        let mut range = sge(&pages, &region);
        // rxe checks the flag and ignores unknown ones; 1 is FLUSH in every release.
        let flush = 1;
        // SAFETY: the protection domain is live, and one range is passed.
        let ret = unsafe { sys::ibv_advise_mr(self.pd.raw(), advice, flush, &raw mut range, 1) };
        FiErrno::from_verb(ret).map(|()| Seen::Works)
    }

    fn advise_prefetch(&self) -> Result<Seen> {
        self.advise(sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH)
    }

    fn advise_prefetch_write(&self) -> Result<Seen> {
        self.advise(sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE)
    }

    /// Grants remote write access after registration; a write shows whether the device applies the
    /// change.
    fn rereg(&self) -> Result<Seen> {
        let rereg = self.device.backend().verbs.ibv_rereg_mr;
        let rereg = rereg.ok_or(FiErrno::EOPNOTSUPP)?;
        let pages = Pages::map(PAGE)?;
        let target = self.register(&pages, pages.addr() as u64, sys::IBV_ACCESS_LOCAL_WRITE)?;
        // SAFETY: the region is live; with this flag alone the other arguments are not used.
        let ret = unsafe {
            rereg(
                target.raw,
                sys::IBV_REREG_MR_CHANGE_ACCESS.cast_signed(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
                PINNED.cast_signed(),
            )
        };
        match ret {
            0 => self.write_to(&target, pages.addr() as u64, &pages, 0),
            // `enum ibv_rereg_mr_err_code` is negative, the reason is in errno
            _ => Err(FiErrno::last()),
        }
    }

    fn flush(&self, placement: u32, right: u32) -> Result<Seen> {
        let pages = Pages::map(PAGE)?;
        let target = self.register(&pages, pages.addr() as u64, PINNED | right)?;
        let pair = Loopback::connect(self.device, &self.pd, true)?;
        Seen::lasting(pair.flush(pages.addr() as u64, target.rkey(), placement))
    }

    fn flush_global(&self) -> Result<Seen> {
        self.flush(sys::IBV_FLUSH_GLOBAL, sys::IBV_ACCESS_FLUSH_GLOBAL)
    }

    fn flush_persistent(&self) -> Result<Seen> {
        self.flush(sys::IBV_FLUSH_PERSISTENT, sys::IBV_ACCESS_FLUSH_PERSISTENT)
    }

    /// A window over the first of two pages: the first must be writable, the second not.
    fn window_bounds(&self) -> Result<Seen> {
        let pages = Pages::map(2 * PAGE)?;
        let access = PINNED | sys::IBV_ACCESS_MW_BIND;
        let region = self.register(&pages, pages.addr() as u64, access)?;
        let pair = Loopback::connect(self.device, &self.pd, false)?;
        // Created last and freed first: rxe (Linux 7.2) counts a bound window as a user of the
        // queue pair. Destroying the queue pair first would wait 50 s and then log an error in the
        // kernel's log.
        let window = Window::alloc(self)?;
        let key = inc_rkey(window.rkey());
        let bound = pair.bind(
            window.raw,
            key,
            sys::ibv_mw_bind_info {
                mr: region.raw,
                addr: pages.addr() as u64,
                length: PAGE as u64,
                mw_access_flags: sys::IBV_ACCESS_REMOTE_WRITE,
            },
        );
        if bound != Outcome::Done {
            return Seen::lasting(bound);
        }
        let source = Pages::map(PAGE)?;
        source.set_word(0, MARK);
        let local = self.register(&source, source.addr() as u64, PINNED)?;
        let base = pages.addr() as u64;
        let inside = pair.write(sge(&source, &local), base, key);
        Seen::lasting(inside)?;
        let outside = pair.write(sge(&source, &local), base + PAGE as u64, key);
        let kept = inside == Outcome::Done && outside != Outcome::Done && pages.word(PAGE) == 0;
        Ok(if kept { Seen::Works } else { Seen::Broken })
    }
}

/// A type 2 memory window, freed when it is dropped.
struct Window {
    raw: *mut sys::ibv_mw,
}

impl Window {
    fn alloc(bench: &Bench<'_>) -> Result<Self> {
        // SAFETY: the context is live.
        let alloc = unsafe { (*bench.device.context()).ops.alloc_mw };
        let alloc = alloc.ok_or(FiErrno::EOPNOTSUPP)?;
        // SAFETY: the device's own function, on its own protection domain.
        let raw = unsafe { alloc(bench.pd.raw(), sys::IBV_MW_TYPE_2) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self { raw })
    }

    fn rkey(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: live, and freed once by the device that created it.
        unsafe {
            if let Some(dealloc) = (*(*self.raw).context).ops.dealloc_mw {
                dealloc(self.raw);
            }
        }
    }
}

/// `ibv_inc_rkey(3)`: the consumer owns the low byte of a window's key.
fn inc_rkey(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}

/// The sge of the first 8 bytes of `pages`.
fn sge(pages: &Pages, region: &RawMr<'_>) -> sys::ibv_sge {
    sys::ibv_sge {
        addr: pages.addr() as u64,
        length: 8,
        lkey: region.lkey(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{devices, replaced};

    #[test]
    fn the_key_of_a_window_changes_in_its_low_byte_only() {
        assert_eq!(inc_rkey(0x1234_56ff), 0x1234_5600);
        assert_eq!(inc_rkey(0x1234_5600), 0x1234_5601);
    }

    #[test]
    fn a_refusal_is_told_from_a_failure() {
        assert_eq!(Seen::of(Outcome::Failed(Some(10))), Seen::Broken);
        let refused = Seen::of(Outcome::NotPosted(FiErrno::EOPNOTSUPP));
        assert!(matches!(refused, Seen::Refused(_)) && !refused.works());
    }

    /// The results of a trial one after another, and of the loopback.
    fn run(trials: &[Result<Seen>], loopback: Result<Seen>) -> (Result<Seen>, usize) {
        let calls = std::cell::Cell::new(0);
        let trial = || {
            calls.set(calls.get() + 1);
            trials[calls.get() - 1]
        };
        (repeat_if_transient(trial, || loopback), calls.get())
    }

    #[test]
    fn an_error_that_may_pass_is_a_result_if_only_this_trial_has_it() {
        let (works, broken) = (Seen::Works, Seen::Broken);
        let (none, late) = (FiErrno::ENOMEM, FiErrno::ETIMEDOUT);
        let missing = FiErrno::EOPNOTSUPP;
        for (result, seen) in [
            (Ok(works), works),
            (Ok(broken), broken),
            (Err(missing), Seen::Refused(missing)),
        ] {
            assert_eq!(run(&[result], Err(none)), (Ok(seen), 1));
        }
        assert_eq!(run(&[Err(none)], Err(none)), (Err(none), 1));
        assert_eq!(run(&[Err(late)], Ok(broken)), (Err(late), 1));
        assert_eq!(run(&[Err(none), Ok(works)], Ok(works)), (Ok(works), 2));
        let refused = Seen::Refused(none);
        assert_eq!(run(&[Err(none); 2], Ok(works)), (Ok(refused), 2));
        assert_eq!(run(&[Err(late); 2], Ok(works)), (Ok(broken), 2));
    }

    #[test]
    fn a_lost_write_is_no_result() {
        let denied = Outcome::Failed(Some(sys::IBV_WC_REM_ACCESS_ERR));
        assert_eq!(Seen::lasting(denied), Ok(Seen::Broken));
        for lost in [None, Some(sys::IBV_WC_RETRY_EXC_ERR)] {
            let lost = Seen::lasting(Outcome::Failed(lost));
            assert_eq!(lost, Err(FiErrno::ETIMEDOUT));
        }
        let full = FiErrno::ENOMEM;
        assert_eq!(Seen::lasting(Outcome::NotPosted(full)), Err(full));
        let missing = FiErrno::EOPNOTSUPP;
        let refused = Seen::lasting(Outcome::NotPosted(missing));
        assert_eq!(refused, Ok(Seen::Refused(missing)));
    }

    /// The trials, which take seconds on a port that is down, are not repeated on it, and seldom if
    /// they get no answer.
    #[test]
    fn attempts_without_answer_are_seldom() {
        let now = Instant::now();
        let after = |pause| now + pause;
        let down = NoBehaviour::new(FiErrno::ENETDOWN, now, None);
        assert!(down.stays(now, || false));
        assert!(down.stays(after(10 * SELDOM), || true));
        assert!(!down.stays(after(AGAIN), || false));
        let mut late = NoBehaviour::new(FiErrno::ETIMEDOUT, now, Some(down));
        for pause in [1, 2, 4, 8, 16, 32, 60, 60].map(Duration::from_secs) {
            let early = pause.saturating_sub(Duration::from_nanos(1));
            assert!(late.stays(after(early), || false), "{pause:?}");
            // its port is not asked
            assert!(!late.stays(after(pause), || true), "{pause:?}");
            late = NoBehaviour::new(FiErrno::ETIMEDOUT, now, Some(late));
        }
        let short = NoBehaviour::new(FiErrno::EMFILE, now, Some(late));
        assert!(!short.stays(after(AGAIN), || true));
    }

    /// Threads that ask at the same time run the trials once.
    #[test]
    fn concurrent_callers_run_the_trials_once() {
        let device = devices(&[replaced::with_shortage()], false).remove(0);
        let held = device.not_observed().lock();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                // a trial of this thread would fail
                replaced::SHORT.set(Some(("ibv_create_cq", FiErrno::EMFILE.code())));
                device.behaviour().map(|_| ())
            });
            std::thread::sleep(Duration::from_millis(50));
            let pd = Pd::alloc(&device).unwrap();
            let bench = Bench {
                device: &device,
                pd,
            };
            let seen = Behaviour::observe(&bench).unwrap();
            assert!(device.observed().set(seen).is_ok());
            drop(held);
            assert_eq!(waits.join().unwrap(), Ok(()));
        });
    }

    /// A process that is short of descriptors for a moment uses the device's behaviour afterwards.
    #[test]
    fn an_error_that_may_pass_is_not_stored() {
        let device = devices(&[replaced::with_shortage()], false).remove(0);
        let short = FiErrno::EMFILE;
        replaced::SHORT.set(Some(("ibv_create_cq", short.code())));
        assert_eq!(device.behaviour(), Err(short));
        replaced::SHORT.set(None);
        // the trials are not repeated at once
        assert_eq!(device.behaviour(), Err(short));
        device.not_observed().lock().as_mut().unwrap().at -= AGAIN;
        assert_eq!(device.behaviour().unwrap().loopback, Seen::Works);
        replaced::SHORT.set(Some(("ibv_create_cq", short.code())));
        assert!(device.behaviour().is_ok());
        replaced::SHORT.set(None);
    }

    #[test]
    fn the_embedded_device_writes_to_itself() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let behaviour = device.behaviour().unwrap();
        assert_eq!(behaviour.loopback, Seen::Works, "{behaviour}");
        assert_ne!(behaviour.window_bounds, Seen::Broken, "{behaviour}");
        // the result is stored: no second trial
        assert!(std::ptr::eq(behaviour, device.behaviour().unwrap()));
    }
}
