//! Memory windows of type 1 and of type 2B.
//!
//! A window is a key of the regions' table with bounds, rights and, for type 2B, a queue pair of
//! its own. Initiators find it in the same published entries, so a check of its bounds costs as
//! much as that of a region. The region that a window is bound to is in private memory only, under
//! one lock for all windows of the process, which is a leaf. Deregistration acquires that lock too,
//! because a region with bound windows cannot be deregistered, nor one with a window that was bound
//! and is still used.
//!
//! A key becomes invalid at once when its window is bound again, invalidated or freed. The request
//! that caused this completes when no initiator uses the key any more.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_core_sys::*;

use crate::dm::Direct;
use crate::hazard::Visitor;
use crate::key::Key;
use crate::region::{Description, Range, Regions};
use crate::segment::OwnSegment;
use crate::sys::{Errno, Res};

/// Access rights that a window may grant, and access bits without a meaning for windows.
const OFFERED: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_ZERO_BASED;

/// The two types of `ibv_alloc_mw(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bound by `ibv_bind_mw` only, which uses the next key; valid for all queue pairs of its
    /// domain.
    One,
    /// Bound by work requests, with a key that the application chooses; valid for the queue pair
    /// that bound it.
    TwoB,
}

/// The window, region and range of a bind request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bind {
    /// The window's handle, and its new key.
    pub(crate) window: u32,
    pub(crate) key: Key,
    /// The region, and a range of it in the region's own addresses. Length 0 unbinds the window.
    pub(crate) region: Key,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
}

/// The result of a change of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Done,
    /// An initiator still uses the old key; the caller retries.
    Used,
}

#[derive(Debug)]
struct Window {
    kind: Kind,
    pd: u32,
    /// The current key; without a binding, the key from which the next one is derived.
    key: Key,
    bound: Option<Bound>,
    /// The key of the previous binding, if an initiator may still use it. Only the requests that
    /// change the window find that none does: one that has invalidated the key waits for that.
    dying: Option<Dying>,
    /// [`Windows::free`] has begun: nothing is bound to it any more.
    closing: bool,
}

/// The key of a binding that has ended, and its region.
#[derive(Clone, Copy, Debug)]
struct Dying {
    key: Key,
    region: Key,
}

impl Dying {
    fn in_use(self, owner: &Owner<'_>) -> bool {
        owner.regions.in_use(owner.segment, self.key, owner.lives)
    }
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    region: Key,
    /// The number of the only queue pair that may use it; 0: all.
    qp: u32,
    what: Description,
}

/// All windows of this process, by the indices of their keys.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    all: Mutex<HashMap<u32, Window>>,
    /// Number of windows, so that processes without windows acquire no lock.
    count: AtomicU32,
}

/// The tables of the process that a change of a window uses.
pub(crate) struct Owner<'a> {
    pub(crate) regions: &'a Regions,
    pub(crate) segment: &'a OwnSegment,
    /// Whether a process may still access memory.
    pub(crate) lives: &'a dyn Fn(Visitor) -> bool,
}

impl Windows {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Window>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// An unbound window, and its key.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn alloc(&self, owner: &Owner<'_>, kind: Kind, pd: u32) -> Res<Key> {
        let mut all = self.lock();
        all.try_reserve(1).map_err(|_| Errno(libc::ENOMEM))?;
        let key = owner.regions.take_window_key(owner.segment)?;
        let window = Window {
            kind,
            pd,
            key,
            bound: None,
            dying: None,
            closing: false,
        };
        all.insert(key.index() as u32, window);
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(key)
    }

    /// Ends a window: its key is invalid, and no initiator uses it.
    ///
    /// # Errors
    /// `EBUSY`: an initiator still uses it after 5 s. The key is invalid, and the call can be
    /// repeated.
    pub(crate) fn free(&self, owner: &Owner<'_>, handle: u32) -> Res<()> {
        let keys = {
            let mut all = self.lock();
            let window = all.get_mut(&handle).ok_or(Errno(libc::EINVAL))?;
            window.kill(owner);
            window.closing = true;
            [Some(window.key), window.dying.map(|dying| dying.key)]
        };
        // without the lock, because this waits for other processes
        for key in keys.into_iter().flatten() {
            owner
                .regions
                .await_unused(owner.segment, key, owner.lives)?;
        }
        if let Some(window) = self.lock().remove(&handle) {
            self.count.fetch_sub(1, Ordering::Relaxed);
            owner.regions.give_window_key(window.key);
        }
        Ok(())
    }

    /// Binds a window for a queue pair (`qp`: its number, `pd`: its domain).
    ///
    /// # Errors
    /// `EINVAL`, as section 10.6.6.2 of the specification requires: no such window or region,
    /// another domain, a range outside the region, a region that is zero-based or without
    /// `IBV_ACCESS_MW_BIND`, a right to write that the region does not have; for type 2 a window
    /// that is bound already, or a binding of length 0; a window that is being freed. The window is
    /// unchanged.
    pub(crate) fn bind(&self, owner: &Owner<'_>, bind: &Bind, qp: u32, pd: u32) -> Res<Progress> {
        let mut all = self.lock();
        let window = all.get_mut(&bind.window).ok_or(Errno(libc::EINVAL))?;
        let to = window.check(owner, bind, pd)?;
        window.kill(owner);
        if window.in_use(owner) {
            return Ok(Progress::Used);
        }
        window.key = bind.key;
        if let Some(to) = to {
            let qp = if window.kind == Kind::TwoB { qp } else { 0 };
            window.bound = Some(Bound {
                region: bind.region,
                qp,
                what: to,
            });
            owner
                .regions
                .publish_window(owner.segment, bind.key, &to, qp);
        }
        Ok(Progress::Done)
    }

    /// Invalidates a window of type 2 for a request of this process, on any queue pair of its
    /// domain.
    ///
    /// # Errors
    /// `EINVAL`: the key is not that of a bound window.
    pub(crate) fn invalidate(&self, owner: &Owner<'_>, key: Key, pd: u32) -> Res<Progress> {
        let mut all = self.lock();
        let window = all
            .get_mut(&(key.index() as u32))
            .filter(|window| window.kind == Kind::TwoB && window.pd == pd)
            .ok_or(Errno(libc::EINVAL))?;
        let live = window.key == key && window.bound.is_some();
        if !live && window.dying.is_none_or(|dying| dying.key != key) {
            return Err(Errno(libc::EINVAL));
        }
        window.kill(owner);
        Ok(if window.in_use(owner) {
            Progress::Used
        } else {
            Progress::Done
        })
    }

    /// Invalidates a window of type 2B for a SEND with invalidate from the other end of its queue
    /// pair. Only that end can use the window, and its earlier accesses are complete.
    ///
    /// # Errors
    /// `EINVAL`: the key is not that of a window bound for this queue pair.
    pub(crate) fn invalidate_remotely(&self, owner: &Owner<'_>, key: Key, qp: u32) -> Res<()> {
        let mut all = self.lock();
        let window = all.get_mut(&(key.index() as u32));
        let window = window
            .filter(|window| window.key == key && window.bound.is_some_and(|bound| bound.qp == qp))
            .ok_or(Errno(libc::EINVAL))?;
        window.kill(owner);
        Ok(())
    }

    /// Unbinds the windows of a queue pair that is reset or destroyed.
    pub(crate) fn release(&self, owner: &Owner<'_>, qp: u32) {
        if self.any() {
            for window in self.lock().values_mut() {
                if window.bound.is_some_and(|bound| bound.qp == qp) {
                    window.kill(owner);
                }
            }
        }
    }

    /// Calls `then`, which ends a region, unless a window is bound to the region, or was and is
    /// still used.
    ///
    /// # Errors
    /// `EBUSY`: a window is bound, or an initiator still uses one that was.
    pub(crate) fn unless_bound<T>(
        &self,
        owner: &Owner<'_>,
        region: Key,
        then: impl FnOnce() -> T,
    ) -> Res<T> {
        if !self.any() {
            return Ok(then());
        }
        let all = self.lock();
        if all.values().any(|window| window.reaches(owner, region)) {
            return Err(Errno(libc::EBUSY));
        }
        Ok(then())
    }

    /// Waits until no initiator uses a window that was bound to the region.
    ///
    /// # Errors
    /// `EBUSY`: an initiator still does after 5 s.
    pub(crate) fn await_former(&self, owner: &Owner<'_>, region: Key) -> Res<()> {
        // At most one round for each window.
        for _ in 0..self.count.load(Ordering::Relaxed) {
            let former = |window: &Window| window.former_key(owner, region);
            let Some(key) = self.lock().values().find_map(former) else {
                break;
            };
            // without the lock, because this waits for other processes
            owner
                .regions
                .await_unused(owner.segment, key, owner.lives)?;
        }
        Ok(())
    }

    /// The range and rights of the bound window with this key, and the number of the only queue
    /// pair that it is valid for (0: all queue pairs of its domain).
    pub(crate) fn describe(&self, key: Key) -> Option<(Description, u32)> {
        if !self.any() {
            return None;
        }
        let all = self.lock();
        let window = all.get(&(key.index() as u32))?;
        let bound = window.bound.filter(|_| window.key == key)?;
        Some((bound.what, bound.qp))
    }

    /// Whether a key is that of a window.
    pub(crate) fn has(&self, key: Key) -> bool {
        self.any()
            && self
                .lock()
                .get(&(key.index() as u32))
                .is_some_and(|window| window.key == key)
    }
}

impl Window {
    /// The description that a binding gives the window. `None` for a binding of length 0, which
    /// unbinds the window.
    fn check(&self, owner: &Owner<'_>, bind: &Bind, pd: u32) -> Res<Option<Description>> {
        let wrong = Err(Errno(libc::EINVAL));
        let two = self.kind == Kind::TwoB;
        // the key's index is that of the window; only its tag can be chosen
        if bind.key.0 >> 8 != self.key.0 >> 8
            || bind.access & !OFFERED != 0
            || self.pd != pd
            || self.closing
            || two && (self.bound.is_some() || bind.len == 0)
        {
            return wrong;
        }
        if bind.len == 0 {
            return Ok(None);
        }
        let based = bind.access & IBV_ACCESS_ZERO_BASED != 0;
        let Some(region) = owner.regions.describe(bind.region) else {
            return wrong;
        };
        let writes = bind.access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
        let offset = bind.addr.wrapping_sub(region.range.iova);
        let inside = offset <= region.range.len && bind.len <= region.range.len - offset;
        if region.pd != self.pd
            || region.access & IBV_ACCESS_MW_BIND == 0
            || region.access & IBV_ACCESS_ZERO_BASED != 0
            || writes && region.access & IBV_ACCESS_LOCAL_WRITE == 0
            || based && !two
            || !inside
        {
            return wrong;
        }
        Ok(Some(Description {
            access: bind.access,
            pd,
            range: Range {
                addr: region.range.addr.wrapping_add(offset),
                len: bind.len,
                iova: if based { 0 } else { bind.addr },
            },
            direct: Direct {
                offset: region.direct.offset.wrapping_add(offset),
                ..region.direct
            },
            file: 0,
        }))
    }

    /// Invalidates the key: no initiator starts to use it from now on.
    fn kill(&mut self, owner: &Owner<'_>) {
        if let Some(bound) = self.bound.take() {
            owner.regions.kill(owner.segment, self.key);
            self.dying = Some(Dying {
                key: self.key,
                region: bound.region,
            });
        }
    }

    /// Whether an initiator may still use the previous binding.
    fn in_use(&mut self, owner: &Owner<'_>) -> bool {
        let used = self.dying.is_some_and(|dying| dying.in_use(owner));
        if !used {
            self.dying = None;
        }
        used
    }

    /// The key of the previous binding, if it was to this region and an initiator may still use it.
    fn former_key(&self, owner: &Owner<'_>, region: Key) -> Option<Key> {
        let former = self.dying.filter(|dying| dying.region == region)?;
        former.in_use(owner).then_some(former.key)
    }

    /// Whether an initiator may access the region through the window.
    fn reaches(&self, owner: &Owner<'_>, region: Key) -> bool {
        self.bound.is_some_and(|bound| bound.region == region)
            || self.former_key(owner, region).is_some()
    }
}

#[cfg(test)]
mod tests;
