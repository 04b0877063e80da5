//! `ibv_rereg_mr(3)`.
//!
//! After `IBV_REREG_MR_ERR_INPUT` the region is unchanged. After any other error the region must
//! not be used, and cannot be: its key is invalid until it is deregistered. Only if that error is
//! `EBUSY` may the call be repeated.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::entry::{guard, non_null};
use crate::key::Key;
use crate::object::{Context, Pd};
use crate::region::{Description, Range, access};
use crate::sys::{Errno, Res};

const TRANSLATION: u32 = IBV_REREG_MR_CHANGE_TRANSLATION;
const DOMAIN: u32 = IBV_REREG_MR_CHANGE_PD;
const ACCESS: u32 = IBV_REREG_MR_CHANGE_ACCESS;

/// The changes that a call requests.
struct Change {
    flags: u32,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: u32,
}

impl Change {
    /// The errors that libibverbs itself detects.
    fn check(&self) -> Res<()> {
        let translation = self.flags & TRANSLATION == 0 || self.length != 0 && !self.addr.is_null();
        let access = self.flags & ACCESS != 0 || self.access == 0;
        if self.flags & !IBV_REREG_MR_FLAGS_SUPPORTED == 0 && translation && access {
            Ok(())
        } else {
            Err(Errno(libc::EINVAL))
        }
    }
}

pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let change = Change {
        flags: flags.cast_unsigned(),
        pd,
        addr,
        length,
        access: access.cast_unsigned(),
    };
    // SAFETY: the caller promises a live region, and a live domain where it is to change.
    let code = guard(|| unsafe {
        let begun = change.check().and_then(|()| begin(mr));
        let before = match begun {
            Ok(before) => before,
            Err(error) => {
                error.set();
                return Ok(IBV_REREG_MR_ERR_INPUT);
            }
        };
        if let Err(error) = apply(mr, before, &change) {
            error.set();
            return Ok(IBV_REREG_MR_ERR_CMD);
        }
        Ok(0)
    });
    code.unwrap_or(IBV_REREG_MR_ERR_CMD)
}

/// Invalidates the key, and returns the region's previous description. `None`: the key was already
/// invalid, and not because a stopped initiator prevented a change.
///
/// # Errors
/// `EINVAL`: a null region, which has no range that can change; a region of device memory, which
/// the kernel refuses too (`ib_uverbs_rereg_mr`). `EBUSY`: a window is bound to the region, or an
/// initiator still uses one that was, after 5 seconds.
///
/// # Safety
/// `mr` must be live.
unsafe fn begin(mr: *mut ibv_mr) -> Res<Option<Description>> {
    // SAFETY: the caller promises a live region, whose context is live.
    let (process, key) = unsafe { (Context::from_ptr((*mr).context).live()?, Key((*mr).handle)) };
    let regions = &process.regions;
    // SAFETY: the caller promises a live region.
    let is_unnamed = unsafe { (*mr).addr.is_null() };
    let is_of_device_memory = is_unnamed && regions.stamp_of(key) != 0;
    if regions.is_null(key) || is_of_device_memory {
        return Err(Errno(libc::EINVAL));
    }
    process.with_windows(|windows, owner| {
        windows.await_former(owner, key)?;
        windows.unless_bound(owner, key, || {
            let before = regions
                .describe(key)
                .or_else(|| regions.describe_unchanged(key));
            regions.kill(&process.segment, key);
            before
        })
    })
}

/// # Safety
/// `mr` must be live, and so must the new domain.
unsafe fn apply(mr: *mut ibv_mr, before: Option<Description>, change: &Change) -> Res<()> {
    // SAFETY: the caller promises a live region, whose domain and context are live.
    let (process, key, old_pd) = unsafe {
        let process = Context::from_ptr((*mr).context).live()?;
        (process, Key((*mr).handle), Pd::from_ptr((*mr).pd))
    };
    let mut to = before.ok_or(Errno(libc::EINVAL))?;
    if change.flags == 0 {
        return Err(Errno(libc::EINVAL));
    }
    if change.flags & ACCESS != 0 {
        // The IOVA of the first byte does not change, unless the range changes.
        let named = to.access & IBV_ACCESS_ZERO_BASED;
        to.access = access::check(change.access)?;
        if change.flags & TRANSLATION == 0 {
            to.access = to.access & !IBV_ACCESS_ZERO_BASED | named;
        }
    }
    if change.flags & TRANSLATION != 0 {
        let based = to.access & IBV_ACCESS_ZERO_BASED == 0;
        to.range = Range {
            addr: change.addr as u64,
            len: change.length as u64,
            // The call has no parameter for another IOVA.
            iova: if based { change.addr as u64 } else { 0 },
        };
    }
    if change.flags & DOMAIN != 0 {
        non_null(change.pd)?;
        // SAFETY: the caller promises a live domain.
        to.pd = unsafe { Pd::from_ptr(change.pd) }.number;
    }
    access::check_range(to.range, to.access)?;
    if to.access & IBV_ACCESS_FLUSH_PERSISTENT != 0 {
        // The device does not look for the file of the new range.
        return Err(Errno(libc::EOPNOTSUPP));
    }
    // Before the key becomes valid again: a sender that sees a valid key also sees the poisoned
    // receives.
    process.poison_receives(key.0);
    let left = to.direct.stamp;
    let Range { addr, len, .. } = to.range;
    let writes = access::writable(to.access);
    to.direct = process.buffers.cover(addr, len, writes);
    let changed = process.regions.change(
        &process.segment,
        key,
        &to,
        |visitor| process.lives(visitor),
        || process.await_own_copies(),
    );
    // A region whose change failed still has its old range, until it is deregistered.
    let gone = if changed.is_ok() {
        left
    } else {
        to.direct.stamp
    };
    process.buffers.uncover(&process.segment, gone);
    changed?;
    // SAFETY: as above; the object belongs to the caller, and no other thread uses it during the
    // call.
    unsafe {
        if change.flags & DOMAIN != 0 {
            let new_pd = Pd::from_ptr(change.pd);
            new_pd.children.fetch_add(1, Ordering::Relaxed);
            old_pd.children.fetch_sub(1, Ordering::Relaxed);
            (*mr).pd = change.pd;
        }
        if change.flags & TRANSLATION != 0 {
            (*mr).addr = change.addr;
            (*mr).length = change.length;
        }
    }
    Ok(())
}
