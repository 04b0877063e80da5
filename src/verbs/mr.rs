//! Registrations of memory.

#![allow(unsafe_code, reason = "calls verbs")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use rdma_core_sys as sys;

use super::{Lkey, Pd, Rkey};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;

/// `IBV_ADVISE_MR_FLAG_FLUSH`, for which the bindings have no constant.
pub(crate) const FLUSH: u32 = 1;
/// The advice with the largest number.
pub(crate) const NO_FAULT: u32 = sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;

/// An address range for `ibv_advise_mr(3)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advised {
    /// Address of the first byte, as in work requests.
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: Lkey,
}

/// `ibv_advise_mr(3)`.
///
/// # Errors
/// `EOPNOTSUPP`: the device has no such call. Others: the device's.
pub(crate) fn advise(pd: &Pd, advice: u32, flags: u32, ranges: &[Advised]) -> Result<()> {
    let mut list: Vec<_> = ranges
        .iter()
        .map(|range| sys::ibv_sge {
            addr: range.addr,
            length: range.length,
            lkey: range.lkey.get(),
        })
        .collect();
    let count = u32::try_from(list.len()).map_err(|_| FiErrno::EINVAL)?;
    // SAFETY: a live protection domain, and a list of `count` elements; the device checks the keys.
    let ret = unsafe { sys::ibv_advise_mr(pd.raw(), advice, flags, list.as_mut_ptr(), count) };
    FiErrno::from_verb(ret)
}

/// Smallest page size of the supported machines in bytes.
const PAGE: usize = 4096;

/// The page to which registrations are moved that only reserve their keys. It is never read or
/// written.
///
/// # Errors
/// `ENOMEM`: the page could not be allocated.
fn nowhere() -> Result<*mut c_void> {
    static AT: OnceLock<usize> = OnceLock::new();
    let layout = Layout::from_size_align(PAGE, PAGE).map_err(|_| FiErrno::EINVAL)?;
    // SAFETY: the size of the layout is not 0.
    stored_page(&AT, layout, || unsafe { alloc_zeroed(layout) })
}

/// The stored page; if there is none, one of `allocate`, which is stored.
///
/// # Errors
/// `ENOMEM`: `allocate` has returned NULL. The next call tries again.
fn stored_page(
    storage: &OnceLock<usize>,
    layout: Layout,
    allocate: impl FnOnce() -> *mut u8,
) -> Result<*mut c_void> {
    if let Some(at) = storage.get() {
        return Ok(std::ptr::with_exposed_provenance_mut(*at));
    }
    let new = allocate();
    if new.is_null() {
        return Err(FiErrno::ENOMEM);
    }
    let at = *storage.get_or_init(|| new.expose_provenance());
    if at != new.addr() {
        // SAFETY: allocated above with this layout, and another thread has stored its own page.
        unsafe { dealloc(new, layout) };
    }
    Ok(std::ptr::with_exposed_provenance_mut(at))
}

/// A registration. Thread safe.
#[derive(Debug)]
pub struct Mr {
    /// NULL after deregistration.
    raw: *mut sys::ibv_mr,
    pd: Arc<Pd>,
    /// The registered memory, if the engine owns it, because it must outlive the registration.
    held: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: verbs objects may be used by any thread (Documentation/libibverbs.md: "fully thread
// safe").
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// `ibv_reg_mr(3)` with `ibv_access_flags`.
    ///
    /// # Errors
    /// The device's: usually `ENOMEM`, `EFAULT` or `EINVAL`.
    ///
    /// # Safety
    /// The caller keeps the memory valid until the registration is dropped.
    pub unsafe fn register(
        pd: &Arc<Pd>,
        addr: *const c_void,
        len: usize,
        access: u32,
    ) -> Result<Self> {
        let verbs = &pd.device().backend().verbs;
        // SAFETY: the protection domain is live and of this backend; the caller promises the
        // memory.
        let raw = unsafe { sys::ibv_reg_mr(verbs, pd.raw(), addr.cast_mut(), len, access) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self {
            raw,
            pd: Arc::clone(pd),
            held: None,
        })
    }

    /// `ibv_reg_dmabuf_mr(3)`: registers `len` bytes of DMA-BUF memory from an offset on, with
    /// addresses from `iova` on.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the device has no such call. `EBADF`, `EINVAL`: not a DMA-BUF descriptor.
    pub fn register_dmabuf(
        pd: &Arc<Pd>,
        (fd, offset): (&OwnedFd, u64),
        len: usize,
        iova: u64,
        access: u32,
    ) -> Result<Self> {
        let register = pd.device().backend().verbs.ibv_reg_dmabuf_mr;
        let register = register.ok_or(FiErrno::EOPNOTSUPP)?;
        let access = access.cast_signed();
        // SAFETY: a live protection domain and an open descriptor; the kernel owns the memory and
        // keeps it as long as the registration (ibv_reg_mr(3)).
        let raw = unsafe { register(pd.raw(), offset, len, iova, fd.as_raw_fd(), access) };
        if raw.is_null() {
            return Err(FiErrno::last());
        }
        Ok(Self {
            raw,
            pd: Arc::clone(pd),
            held: None,
        })
    }

    /// Makes the registration hold a reference to `held` until it is deregistered.
    pub(crate) fn holding(mut self, held: Arc<dyn Any + Send + Sync>) -> Self {
        self.held = Some(held);
        self
    }

    /// Makes the device fault in pages of an on-demand registration (`ibv_advise_mr(3)`), and
    /// blocks until this is done. A device without that call faults the pages in at first use.
    ///
    /// # Errors
    /// The device's, for instance `EFAULT`: no memory is mapped in the range.
    pub fn prefetch(&self, addr: u64, len: u64, write: bool) -> Result<()> {
        let advice = if write {
            sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE
        } else {
            sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH
        };
        let (mut at, end) = (addr, addr.saturating_add(len));
        while at < end {
            // the length of a list element has 32 bits
            let length = (end - at).min(1 << 30) as u32;
            let lkey = self.lkey();
            let range = Advised {
                addr: at,
                length,
                lkey,
            };
            match advise(&self.pd, advice, FLUSH, &[range]) {
                Err(FiErrno::EOPNOTSUPP) => return Ok(()),
                result => result?,
            }
            at += u64::from(length);
        }
        Ok(())
    }

    /// Number of pages that the device has made present by advice since the registration; a page
    /// counts once per advice.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: verbs cannot read this count of the device. `rdma statistic show mr` shows it
    /// for mlx5.
    pub fn prefetched(&self) -> Result<u64> {
        let count = self.pd.device().backend().verbs.softdv_page_prefetch;
        let count = count.ok_or(FiErrno::EOPNOTSUPP)?;
        let mut pages = 0;
        // SAFETY: live until dropped, and of this backend; `pages` is writable.
        FiErrno::from_verb(unsafe { count(self.raw, &raw mut pages) })?;
        Ok(pages)
    }

    /// Reserves only the key, so that the device does not assign it to another registration: moves
    /// this registration to a page of the engine, without access rights (`ibv_rereg_mr(3)`). The
    /// device no longer uses the original memory.
    ///
    /// # Errors
    /// - `EOPNOTSUPP`: the device has no such call; nothing has changed.
    /// - `EBUSY`: an access is in progress. The key is invalid, and the caller can repeat the call.
    /// - `EKEYREJECTED`: the device has assigned another key. The old one is free.
    /// - Others: the registration may be unusable; the caller can only deregister it.
    pub fn reserve_key(&mut self) -> Result<()> {
        let rereg = self.pd.device().backend().verbs.ibv_rereg_mr;
        let rereg = rereg.ok_or(FiErrno::EOPNOTSUPP)?;
        let change = sys::IBV_REREG_MR_CHANGE_TRANSLATION | sys::IBV_REREG_MR_CHANGE_ACCESS;
        let (page, len) = (nowhere()?, PAGE);
        let key = self.rkey();
        // SAFETY: the registration is live, and the page is never freed. The call ignores the
        // protection domain without `IBV_REREG_MR_CHANGE_PD`.
        let ret = unsafe {
            rereg(
                self.raw,
                change.cast_signed(),
                std::ptr::null_mut(),
                page,
                len,
                0,
            )
        };
        if ret != 0 {
            // `enum ibv_rereg_mr_err_code` is negative, the reason is in errno
            return Err(FiErrno::last());
        }
        self.held = None;
        match self.rkey() == key {
            true => Ok(()),
            false => {
                self.pd.device().changes_keys.store(true, Ordering::Relaxed);
                Err(FiErrno::EKEYREJECTED)
            }
        }
    }

    /// Whether [`Self::reserve_key`] may lose the key: it has lost one on this device.
    pub fn may_lose_key(&self) -> bool {
        self.pd.device().changes_keys.load(Ordering::Relaxed)
    }

    /// Deregisters the memory: `ibv_dereg_mr(3)`. Errors other than `EBUSY` are only logged,
    /// because the caller cannot handle them.
    ///
    /// # Errors
    /// The registration itself, for `EBUSY`: an access is in progress. The key is invalid, and the
    /// caller can repeat the call.
    pub fn deregister(mut self) -> std::result::Result<(), Self> {
        match self.end() {
            Err(FiErrno::EBUSY) => Err(self),
            result => {
                self.raw = std::ptr::null_mut();
                tell(result);
                Ok(())
            }
        }
    }

    /// Deregisters memory that the engine owns. False: the access of a stopped peer has not ended,
    /// so the caller must not free the memory. The registration stays then, and the log has a line.
    #[must_use]
    pub(crate) fn release(self) -> bool {
        let Err(busy) = self.deregister() else {
            return true;
        };
        // SAFETY: live, as its deregistration has failed.
        let (addr, len) = unsafe { ((*busy.raw).addr, (*busy.raw).length) };
        warn_log!(
            Mr,
            "{len} bytes at {addr:p} are not freed: the access of a stopped peer has not ended"
        );
        std::mem::forget(busy);
        false
    }

    /// As [`Self::deregister`], without waiting for a request of a peer that is being executed, if
    /// the device can (`softdv_dereg_mr_now`).
    ///
    /// # Errors
    /// As [`Self::deregister`].
    pub(crate) fn deregister_now(mut self) -> std::result::Result<(), Self> {
        let Some(deregister) = self.pd.device().backend().verbs.softdv_dereg_mr_now else {
            return self.deregister();
        };
        // SAFETY: created by this backend; not used after the call has succeeded.
        match FiErrno::from_verb(unsafe { deregister(self.raw) }) {
            Err(FiErrno::EBUSY) => Err(self),
            result => {
                self.raw = std::ptr::null_mut();
                tell(result);
                Ok(())
            }
        }
    }

    /// Whether the registration reaches memory of the device, whatever is mapped at its addresses
    /// later. Always false for a device without such memory (`softdv_is_in_buffer`).
    pub(crate) fn is_in_device_memory(&self) -> bool {
        let asks = self.pd.device().backend().verbs.softdv_is_in_buffer;
        // SAFETY: live until dropped, and of this backend.
        asks.is_some_and(|is_in_buffer| unsafe { is_in_buffer(self.raw) } != 0)
    }

    fn end(&mut self) -> Result<()> {
        // SAFETY: created by this backend; not used after the call has succeeded.
        FiErrno::from_verb(unsafe { (self.pd.device().backend().verbs.ibv_dereg_mr)(self.raw) })
    }

    /// The registration's protection domain.
    #[inline]
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The key for this side's work requests.
    pub fn lkey(&self) -> Lkey {
        // SAFETY: live until dropped.
        Lkey::new(unsafe { (*self.raw).lkey })
    }

    /// The key for peers.
    pub fn rkey(&self) -> Rkey {
        // SAFETY: live until dropped.
        Rkey::new(unsafe { (*self.raw).rkey })
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            let ended = self.end();
            if ended == Err(FiErrno::EBUSY) {
                // a stopped peer may still access this memory
                std::mem::forget(self.held.take());
            }
            tell(ended);
        }
    }
}

fn tell(ended: Result<()>) {
    if let Err(error) = ended {
        warn_log!(Mr, "ibv_dereg_mr: {error}");
    }
}

/// DMA-BUF registrations for tests, on a device that has none.
#[cfg(test)]
pub(crate) mod planted {
    use std::ffi::c_int;

    use parking_lot::Mutex;
    use rdma_core_sys::Backend;

    use super::*;

    /// Offset in the file, length and first address of each registration.
    pub(crate) static REGISTERED: Mutex<Vec<(u64, usize, u64)>> = Mutex::new(Vec::new());

    /// softverbs with [`reg_dmabuf_mr`].
    pub(crate) fn backend() -> &'static Backend {
        let mut backend = *softverbs::backend();
        backend.name = "dma-buf";
        backend.verbs.ibv_reg_dmabuf_mr = Some(reg_dmabuf_mr);
        Box::leak(Box::new(backend))
    }

    /// Records the registration, and registers memory of this process at the same addresses.
    unsafe extern "C" fn reg_dmabuf_mr(
        pd: *mut sys::ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        _fd: c_int,
        access: c_int,
    ) -> *mut sys::ibv_mr {
        REGISTERED.lock().push((offset, length, iova));
        let addr: *mut c_void = std::ptr::with_exposed_provenance_mut(iova as usize);
        let (verbs, access) = (&softverbs::backend().verbs, access.cast_unsigned());
        // SAFETY: a test that uses this backend keeps its memory until its regions are closed.
        unsafe { sys::ibv_reg_mr(verbs, pd, addr, length, access) }
    }
}

/// softverbs with registrations that fail and ends that are observed, for tests. One test of a
/// process uses it.
#[cfg(test)]
pub(crate) mod observed {
    use std::ffi::c_int;

    use parking_lot::Mutex;
    use rdma_core_sys::Backend;

    use super::*;

    /// Number of registrations that succeed; then every second one fails with `ENOMEM`.
    pub(crate) static SUCCEED: Mutex<usize> = Mutex::new(usize::MAX);
    /// Called before each deregistration.
    pub(crate) static ON_END: Mutex<Option<Box<dyn FnMut() + Send>>> = Mutex::new(None);

    pub(crate) fn backend() -> &'static Backend {
        let mut backend = *softverbs::backend();
        backend.name = "observed";
        backend.verbs.ibv_reg_mr = reg_mr;
        backend.verbs.ibv_dereg_mr = dereg_mr;
        Box::leak(Box::new(backend))
    }

    unsafe extern "C" fn reg_mr(
        pd: *mut sys::ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> *mut sys::ibv_mr {
        let mut succeed = SUCCEED.lock();
        if *succeed == 0 {
            *succeed = 1;
            // SAFETY: the number belongs to the calling thread.
            unsafe { *libc::__errno_location() = libc::ENOMEM };
            return std::ptr::null_mut();
        }
        *succeed -= 1;
        // SAFETY: the caller's promises.
        unsafe { (softverbs::backend().verbs.ibv_reg_mr)(pd, addr, length, access) }
    }

    unsafe extern "C" fn dereg_mr(mr: *mut sys::ibv_mr) -> c_int {
        if let Some(observe) = &mut *ON_END.lock() {
            observe();
        }
        // SAFETY: the caller's promises.
        unsafe { (softverbs::backend().verbs.ibv_dereg_mr)(mr) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_allocation_is_tried_again() {
        let storage = OnceLock::new();
        let layout = Layout::from_size_align(PAGE, PAGE).unwrap();
        let none = || std::ptr::null_mut();
        assert_eq!(stored_page(&storage, layout, none), Err(FiErrno::ENOMEM));
        // SAFETY: the size of the layout is not 0.
        let page = || unsafe { alloc_zeroed(layout) };
        let first = stored_page(&storage, layout, page).unwrap();
        assert!(!first.is_null());
        assert_eq!(stored_page(&storage, layout, none), Ok(first));
        // SAFETY: allocated above with this layout, and not used any more.
        unsafe { dealloc(first.cast(), layout) };
    }
}
