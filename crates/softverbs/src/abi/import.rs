//! Importing objects of another context: `ibv_import_pd(3)`, `ibv_import_mr(3)`,
//! `ibv_import_dm(3)`.
//!
//! In the process that made them, imported objects are the same objects. In another process, a
//! domain gets a number of that process, and regions of device buffers are mapped and registered
//! there, with the rights that their owner granted and no others. Regions of other memory cannot be
//! imported by another process.

use std::sync::Once;
use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use crate::dm::{Shown, domain};
use crate::entry::{guard, pointer};
use crate::key::Key;
use crate::log;
use crate::object::{Context, Dm, Import, Pd, origin_peer, region_object};
use crate::process::Process;
use crate::region::{self, Range};
use crate::sys::{Errno, Res, room};

/// Sets `EINVAL` for a handle that does not belong to the context.
pub(super) unsafe extern "C" fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    pointer(|| {
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        let process = owner.live()?;
        let origin = owner.origin;
        let foreign = !origin.is_of(process.slot, &process.identity);
        let room = room()?;
        let known = if foreign {
            let peer = origin_peer(process, origin)?;
            domain::is_shown(&peer.map, handle, origin.context)
        } else {
            domain::is_shown(&process.segment.map, handle, origin.context)
        };
        if !known {
            return Err(Errno(libc::EINVAL));
        }
        let number = if foreign {
            let fresh = || process.next_pd.fetch_add(1, Ordering::Relaxed);
            process.imports.take(origin.cookie, handle, fresh)?
        } else {
            handle
        };
        owner.children.fetch_add(1, Ordering::Relaxed);
        let nothing = (std::ptr::null_mut(), std::ptr::null_mut());
        let pd = Pd::make(room, context, number, nothing);
        // SAFETY: just made, and not known to any other thread.
        unsafe {
            (*pd).handle = handle;
            (*pd.cast::<Pd>()).import = Some(Import { handle, foreign });
        }
        Ok(pd)
    })
}

/// Sets `EINVAL` if the handle is not that of a region of the domain, `EOPNOTSUPP` if the region
/// belongs to another process and is not of a device buffer, or of one that its process may not
/// write.
pub(super) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    pointer(|| {
        // SAFETY: the caller promises a live domain, whose context is live.
        let (domain, context) = unsafe { (Pd::from_ptr(pd), (*pd).context) };
        // SAFETY: the caller promises a live domain, whose context is live.
        let owner = unsafe { Context::from_ptr(context) };
        let process = owner.live()?;
        let room = room()?;
        let key = Key(handle);
        let (key, length) = match domain.import.filter(|import| import.foreign) {
            Some(import) => import_foreign(process, owner, domain, import.handle, key)?,
            None => {
                let known = process.regions.describe(key);
                let known = known.filter(|known| known.pd == domain.number);
                let known = known.ok_or(Errno(libc::EINVAL))?;
                (key, known.range.len)
            }
        };
        domain.children.fetch_add(1, Ordering::Relaxed);
        // According to the man page, the address of an imported region is NULL.
        let nowhere = std::ptr::null_mut();
        Ok(region_object(
            room,
            context,
            pd,
            nowhere,
            length as usize,
            key,
            key,
        ))
    })
}

/// Maps and registers a region that another process registered.
fn import_foreign(
    process: &'static Process,
    owner: &Context,
    domain: &Pd,
    their_domain: u32,
    key: Key,
) -> Res<(Key, u64)> {
    let peer = origin_peer(process, owner.origin)?;
    let granted = region::granted(&peer, process.slot, key)
        .filter(|granted| granted.pd == their_domain)
        .ok_or(Errno(libc::EINVAL))?;
    let direct = granted.direct;
    if direct.stamp == 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let index = direct.stamp as u32 % crate::segment::layout::MAX_BUFFERS as u32;
    let shown = Shown::read(&peer.map, index)
        .filter(|shown| shown.stamp == direct.stamp)
        .ok_or(Errno(libc::EINVAL))?;
    let buffer = shown.import(&peer.opener)?;
    let (len, room) = (granted.range.len, buffer.len as u64);
    if direct.offset > room || len > room - direct.offset || len == 0 {
        return Err(Errno(libc::EPROTO));
    }
    let access = region::access::check(granted.access)?;
    let buffer_reference = process
        .buffers
        .add(&process.segment, buffer, owner.origin.context)?;
    let range = Range {
        addr: buffer_reference.buffer.addr() + direct.offset,
        len,
        iova: granted.range.iova,
    };
    let added = process.add_region(domain.number, range, access);
    // From here on the region holds the buffer, if it was registered.
    process
        .buffers
        .leave_to_regions(&process.segment, buffer_reference.stamp);
    Ok((added?, len))
}

/// Sets `EINVAL` for a handle that does not belong to the context, or is that of a buffer that its
/// process may not write.
pub(super) unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    pointer(|| {
        // SAFETY: the caller promises a live context.
        let owner = unsafe { Context::from_ptr(context) };
        let process = owner.live()?;
        let origin = owner.origin;
        let room = room()?;
        let buffer_reference = if origin.is_of(process.slot, &process.identity) {
            process.buffers.hold(handle, origin.context)
        } else {
            let peer = origin_peer(process, origin)?;
            let shown = Shown::read(&peer.map, handle);
            match shown.filter(|shown| shown.context == origin.context && shown.writable) {
                Some(shown) => {
                    let buffer = shown.import(&peer.opener)?;
                    let segment = &process.segment;
                    Some(process.buffers.add(segment, buffer, origin.context)?)
                }
                None => None,
            }
        };
        let buffer_reference = buffer_reference.ok_or(Errno(libc::EINVAL))?;
        owner.children.fetch_add(1, Ordering::Relaxed);
        Ok(Dm::make(room, context, buffer_reference, 0, true))
    })
}

pub(super) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: the caller promises an imported domain, which it no longer uses.
    let _ = guard(|| unsafe {
        if Pd::from_ptr(pd).import.is_some() {
            Pd::end_imported(pd);
        }
        Ok(())
    });
}

pub(super) unsafe extern "C" fn unimport_mr(region: *mut ibv_mr) {
    // SAFETY: the caller promises an imported region, whose domain and context are live, and which
    // it no longer uses.
    let _ = guard(|| unsafe {
        let domain = Pd::from_ptr((*region).pd);
        let process = Context::from_ptr((*region).context).process;
        if !process.forked() {
            // The call has no result, so the object ends also if a stopped process uses the region,
            // which keeps its memory then.
            if domain.import.is_some_and(|import| import.foreign)
                && process.end_region(Key((*region).handle)).is_err()
            {
                static ONCE: Once = Once::new();
                ONCE.call_once(|| {
                    log::say("softverbs: an imported region is in use and stays registered");
                });
            }
            domain.children.fetch_sub(1, Ordering::Relaxed);
        }
        drop(Box::from_raw(region));
        Ok(())
    });
}

pub(super) unsafe extern "C" fn unimport_dm(memory: *mut ibv_dm) {
    // SAFETY: the caller promises imported memory, which it no longer uses.
    let _ = guard(|| unsafe { Dm::end(memory) });
}
