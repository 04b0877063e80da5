//! The device of the ids: one open context for the process, and one protection domain while at
//! least one id is bound.
//!
//! Invariants: the context is opened once and stays open, as in librdmacm, because applications
//! keep the pointers from `rdma_get_devices` and `id->verbs`. The protection domain lives as long
//! as the last [`Device`], and longer if there are still objects in it then.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forks::PerProcess;
use rdma_core_sys::{
    IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT, VerbsFns, ibv_context,
    ibv_device_attr_ex, ibv_gid, ibv_mtu, ibv_pd, ibv_port_attr,
};

use crate::sys::{Errno, Res};

/// The number of the device's only port.
pub(super) const PORT: u8 = 1;
/// The device's default partition key, in network byte order.
pub(super) const PKEY: u16 = 0xffff;

/// The queue key of all services of RDMA_PS_UDP, `RDMA_UDP_QKEY` of rdma_cma.h.
pub(super) const QKEY: u32 = 0x0123_4567;

/// Bits of `device_cap_flags_ex` (ib_user_verbs.h, `ib_uverbs_device_cap_flags`).
const FLUSH_GLOBAL: u64 = 1 << 38;
const FLUSH_PERSISTENT: u64 = 1 << 39;

#[derive(Debug)]
struct Shared {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    users: usize,
}

// SAFETY: verbs objects may be used by any thread (verbs(7), "thread-safe"); the mutex around this
// guards the counts.
unsafe impl Send for Shared {}

impl Shared {
    const NONE: Self = Self {
        context: std::ptr::null_mut(),
        pd: std::ptr::null_mut(),
        users: 0,
    };
}

impl Default for Shared {
    fn default() -> Self {
        Self::NONE
    }
}

/// A forked child opens the device again.
static SHARED: PerProcess<Mutex<Shared>> = PerProcess::new(Mutex::new(Shared::NONE));

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device's table of verbs.
pub(super) fn verbs() -> &'static VerbsFns {
    &crate::backend().verbs
}

/// The context of the process, opened by the first call.
///
/// # Errors
/// `ENODEV`: no device. Those of `ibv_open_device(3)`.
pub(super) fn context() -> Res<*mut ibv_context> {
    open(&mut lock(SHARED.get()))
}

fn open(shared: &mut Shared) -> Res<*mut ibv_context> {
    if !shared.context.is_null() {
        return Ok(shared.context);
    }
    let mut count = 0;
    // SAFETY: `count` is writable.
    let list = unsafe { (verbs().ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return Err(Errno::last());
    }
    // SAFETY: the list ends with NULL, so it has a first element.
    let first = unsafe { *list };
    if first.is_null() {
        // SAFETY: the list from the call above.
        unsafe { (verbs().ibv_free_device_list)(list) };
        return Err(Errno(libc::ENODEV));
    }
    // SAFETY: a device of the list, which is freed later.
    shared.context = unsafe { (verbs().ibv_open_device)(first) };
    let errno = Errno::last();
    // SAFETY: the list of `ibv_get_device_list`, freed once.
    unsafe { (verbs().ibv_free_device_list)(list) };
    if shared.context.is_null() {
        Err(errno)
    } else {
        Ok(shared.context)
    }
}

/// The reference of one id to the device.
#[derive(Debug)]
pub(super) struct Device {
    /// The shared part of its process.
    of: &'static Mutex<Shared>,
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    pub(super) gid: [u8; 16],
    pub(super) mtu: ibv_mtu,
    /// Maximum number of reads and atomics that a queue pair answers concurrently.
    pub(super) max_responder_resources: u8,
    /// Maximum number of outstanding reads and atomics of a queue pair.
    pub(super) max_initiator_depth: u8,
    /// The flush access rights that the device supports.
    pub(super) flush: u32,
}

// SAFETY: as for `Shared`.
unsafe impl Send for Device {}

impl Device {
    /// Binds to the device.
    ///
    /// # Errors
    /// Those of [`context`] and of `ibv_alloc_pd(3)`. `ENODEV`: the device does not answer queries.
    pub(super) fn acquire() -> Res<Self> {
        let of = SHARED.get();
        let mut shared = lock(of);
        let context = open(&mut shared)?;
        let (mut attr, mut port, mut gid): (ibv_device_attr_ex, ibv_port_attr, ibv_gid) =
            // SAFETY: all zeros is a valid value of these three.
            unsafe { std::mem::zeroed() };
        // SAFETY: a live context and writable structures; each call returns an errno or −1.
        let failed = unsafe {
            rdma_core_sys::ibv_query_device_ex(verbs(), context, &raw mut attr) != 0
                || rdma_core_sys::ibv_query_port(verbs(), context, PORT, &raw mut port) != 0
                || (verbs().ibv_query_gid)(context, PORT, 0, &raw mut gid) != 0
        };
        if failed {
            return Err(Errno(libc::ENODEV));
        }
        if shared.pd.is_null() {
            // SAFETY: a live context.
            shared.pd = unsafe { (verbs().ibv_alloc_pd)(context) };
            if shared.pd.is_null() {
                return Err(Errno::last());
            }
        }
        shared.users += 1;
        let flush = if attr.device_cap_flags_ex & (FLUSH_GLOBAL | FLUSH_PERSISTENT) == 0 {
            0
        } else {
            IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT
        };
        let limit = |value: i32| u8::try_from(value).unwrap_or(u8::MAX);
        Ok(Self {
            of,
            context,
            pd: shared.pd,
            gid: gid_bytes(&gid),
            mtu: port.active_mtu,
            max_responder_resources: limit(attr.orig_attr.max_qp_rd_atom),
            max_initiator_depth: limit(attr.orig_attr.max_qp_init_rd_atom),
            flush,
        })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !std::ptr::eq(self.of, SHARED.get()) {
            // of the parent of this process
            return;
        }
        let mut shared = lock(self.of);
        shared.users -= 1;
        if shared.users == 0 {
            // SAFETY: from `acquire`, released by the last user. If there are still objects in it,
            // the call is refused, and the next user has the domain.
            if unsafe { (verbs().ibv_dealloc_pd)(shared.pd) } == 0 {
                shared.pd = std::ptr::null_mut();
            }
        }
    }
}

/// The 16 bytes of a GID.
pub(super) fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: a GID is 16 bytes, of which each is initialized.
    unsafe { (&raw const *gid).cast::<[u8; 16]>().read() }
}

/// A GID of 16 bytes.
pub(super) fn gid_from(bytes: [u8; 16]) -> ibv_gid {
    // SAFETY: as above, and every pattern is a GID.
    unsafe { (&raw const bytes).cast::<ibv_gid>().read_unaligned() }
}
