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

use rdma_core_sys as sys;

use self::loopback::{Loopback, Outcome, Pages};
pub use self::xrc::XrcBehaviour;
use super::{Device, Pd};
use crate::errno::{FiErrno, Result};

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

    /// The result of a trial; an error before its last step counts as a refusal.
    fn settle(result: Result<Self>) -> Self {
        result.unwrap_or_else(Self::Refused)
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
            /// Runs the trials. If the loopback fails, for instance because the port is down, all
            /// behaviours get its result without a trial.
            fn observe(bench: &Bench<'_>) -> Self {
                let base = Seen::settle(bench.loopback());
                Self {
                    $($field: if base.works() { Seen::settle(bench.$trial()) } else { base },)*
                }
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
    /// Those of `ibv_alloc_pd(3)`.
    pub fn behaviour(self: &Arc<Self>) -> Result<&Behaviour> {
        if let Some(known) = self.observed().get() {
            return Ok(known);
        }
        let bench = Bench {
            device: self,
            pd: Pd::alloc(self)?,
        };
        Ok(self.observed().get_or_init(|| Behaviour::observe(&bench)))
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
        Ok(match Seen::of(outcome) {
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
        Ok(Seen::of(pair.flush(
            pages.addr() as u64,
            target.rkey(),
            placement,
        )))
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
            return Ok(Seen::of(bound));
        }
        let source = Pages::map(PAGE)?;
        source.set_word(0, MARK);
        let local = self.register(&source, source.addr() as u64, PINNED)?;
        let base = pages.addr() as u64;
        let inside = pair.write(sge(&source, &local), base, key);
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
    use crate::verbs::devices;

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
