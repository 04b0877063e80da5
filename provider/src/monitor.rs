//! Memory monitors of the application, for `weft_mr_ops.monitor_import`: libfabric's
//! `fid_mem_monitor`, which a program can also make for libfabric's own registration cache
//! (`fi_import_fid` of `rdma/fi_ext.h`).
//!
//! A monitor is started once, independent of the number of its domains. It is never called with the
//! lock of this module held.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard};

use forks::PerProcess;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::mr::{Monitor, memory_changed};

use crate::domain::Domain;
use crate::ffi::fid::Object;
use crate::ffi::{guard, stub};

static NOTIFY: fi_ops_mem_notify = fi_ops_mem_notify {
    size: size_of::<fi_ops_mem_notify>(),
    notify: Some(notify),
};

static FID_OPS: fi_ops = fi_ops {
    close: Some(close),
    ..stub::fid::<FI_ENOSYS>()
};

/// A monitor that domains use. Its address identifies it and is not dereferenced through this
/// structure.
struct Used {
    monitor: usize,
    domains: usize,
    /// Whether a thread is starting or stopping the monitor.
    changing: bool,
}

/// A forked child uses no monitor of its parent.
static USED: PerProcess<Mutex<Vec<Used>>> = PerProcess::new(Mutex::new(Vec::new()));

fn used() -> MutexGuard<'static, Vec<Used>> {
    match USED.get().lock() {
        Ok(used) => used,
        // a panic leaves the list valid: a push or a removal is complete, or has not begun
        Err(poisoned) => poisoned.into_inner(),
    }
}

fn forget(monitor: usize) {
    used().retain(|one| one.monitor != monitor);
}

/// One domain's use of a monitor.
#[derive(Debug)]
struct Imported {
    monitor: *mut fid_mem_monitor,
    stop: unsafe extern "C" fn(*mut fid_mem_monitor),
    subscribe: unsafe extern "C" fn(*mut fid_mem_monitor, *const c_void, usize) -> c_int,
    unsubscribe: unsafe extern "C" fn(*mut fid_mem_monitor, *const c_void, usize),
    valid: unsafe extern "C" fn(*mut fid_mem_monitor, *const c_void, usize) -> bool,
}

// SAFETY: the contract of `monitor_import` lets any thread call them.
unsafe impl Send for Imported {}
// SAFETY: the contract of `monitor_import` lets any thread call the functions.
unsafe impl Sync for Imported {}

fn pointer(addr: u64) -> *const c_void {
    std::ptr::without_provenance(addr as usize)
}

/// The result of a call in libfabric's convention.
fn status(ret: c_int) -> Result<()> {
    match ret {
        0 => Ok(()),
        ..0 => Err(FiErrno::new(ret.saturating_neg())),
        _ => Err(FiErrno::EOTHER),
    }
}

impl Monitor for Imported {
    fn subscribe(&self, addr: u64, len: u64) -> Result<()> {
        // SAFETY: the monitor lives until it is stopped, by the contract of `monitor_import`.
        status(unsafe { (self.subscribe)(self.monitor, pointer(addr), len as usize) })
    }

    fn unsubscribe(&self, addr: u64, len: u64) {
        // SAFETY: the monitor lives until it is stopped, by the contract of `monitor_import`.
        unsafe { (self.unsubscribe)(self.monitor, pointer(addr), len as usize) };
    }

    fn is_valid(&self, addr: u64, len: u64) -> bool {
        // SAFETY: the monitor lives until it is stopped, by the contract of `monitor_import`.
        unsafe { (self.valid)(self.monitor, pointer(addr), len as usize) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let monitor = self.monitor as usize;
        let mut list = used();
        let Some(one) = list.iter_mut().find(|one| one.monitor == monitor) else {
            return;
        };
        one.domains -= 1;
        if one.domains > 0 {
            return;
        }
        one.changing = true;
        drop(list);
        // SAFETY: started, and used by no domain any more.
        unsafe { (self.stop)(self.monitor) };
        forget(monitor);
    }
}

/// Counts a domain as a user of the monitor. For the first domain, sets the monitor's `import_ops`
/// and starts the monitor.
///
/// # Safety
/// As [`import`].
unsafe fn begin(
    monitor: *mut fid_mem_monitor,
    start: unsafe extern "C" fn(*mut fid_mem_monitor) -> c_int,
) -> Result<()> {
    let name = monitor as usize;
    let mut list = used();
    match list.iter_mut().find(|one| one.monitor == name) {
        Some(one) if one.changing => return Err(FiErrno::EAGAIN),
        Some(one) => {
            one.domains += 1;
            return Ok(());
        }
        None => list.push(Used {
            monitor: name,
            domains: 1,
            changing: true,
        }),
    }
    drop(list);
    // SAFETY: the caller's promise. `import_ops` first: the monitor may notify once it is started.
    let started = unsafe {
        let before = (*monitor).import_ops;
        (*monitor).import_ops = (&raw const NOTIFY).cast_mut();
        let started = status(start(monitor));
        if started.is_err() {
            (*monitor).import_ops = before;
        }
        started
    };
    if started.is_err() {
        forget(name);
    } else if let Some(one) = used().iter_mut().find(|one| one.monitor == name) {
        one.changing = false;
    }
    started
}

/// # Safety
/// `monitor` is NULL or a fid of the type of its class, and valid until no domain uses it.
pub(crate) unsafe fn import(domain: &Object<Domain>, monitor: *mut fid_mem_monitor) -> Result<()> {
    // SAFETY: the caller passes NULL or a valid monitor.
    let ops = unsafe {
        if monitor.is_null() || (*monitor).fid.fclass != FI_CLASS_MEM_MONITOR {
            return Err(FiErrno::EINVAL);
        }
        let ops = (*monitor).export_ops;
        if ops.is_null() || (*ops).size < size_of::<fi_ops_mem_monitor>() {
            return Err(FiErrno::EINVAL);
        }
        *ops
    };
    let missing = FiErrno::EINVAL;
    let start = ops.start.ok_or(missing)?;
    let imported = Imported {
        monitor,
        stop: ops.stop.ok_or(missing)?,
        subscribe: ops.subscribe.ok_or(missing)?,
        unsubscribe: ops.unsubscribe.ok_or(missing)?,
        valid: ops.valid.ok_or(missing)?,
    };
    // Not dropped before `begin` succeeds: the drop ends a use of the monitor, which `begin`
    // counts.
    let imported = std::mem::ManuallyDrop::new(imported);
    // SAFETY: the caller passes a valid monitor; it is not NULL.
    let import_ops = unsafe { (*monitor).import_ops };
    if !import_ops.is_null() && import_ops != (&raw const NOTIFY).cast_mut() {
        return Err(FiErrno::EBUSY);
    }
    domain.engine.mr().import_monitor(|| {
        // SAFETY: the caller keeps the monitor valid until no domain uses it.
        unsafe {
            begin(monitor, start)?;
            if (*monitor).fid.ops.is_null() {
                (*monitor).fid.ops = (&raw const FID_OPS).cast_mut();
            }
        }
        Ok(Box::new(std::mem::ManuallyDrop::into_inner(imported)))
    })
}

/// `fi_ops_mem_notify.notify`: the same for every monitor, as memory belongs to the process. The
/// call has no result: a panic is logged, and the notification is lost.
unsafe extern "C" fn notify(_: *mut fid_mem_monitor, addr: *const c_void, len: usize) {
    let _: c_int = guard::entry(|| {
        memory_changed(addr as u64, len as u64);
        Ok(0)
    });
}

/// `fi_close` of a monitor.
unsafe extern "C" fn close(handle: *mut fid) -> c_int {
    guard::entry(|| {
        if used().iter().any(|one| one.monitor == handle as usize) {
            return Err(FiErrno::EBUSY);
        }
        Ok(0)
    })
}

const _: () = assert!(std::mem::offset_of!(fid_mem_monitor, fid) == 0);
