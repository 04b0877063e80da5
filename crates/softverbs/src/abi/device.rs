//! The list of devices: always one, `soft0`.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};
use std::sync::OnceLock;

use rdma_core_sys::*;

use crate::entry::{guard, pointer};
use crate::gid;
use crate::sys::Errno;

struct Device(UnsafeCell<ibv_device>);

// SAFETY: written once, before it is shared; C code only reads it.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

fn copy_name(to: &mut [c_char], name: &[u8]) {
    for (to, from) in to.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
}

/// The one device object; it is never freed.
pub(super) fn device() -> *mut ibv_device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE
        .get_or_init(|| {
            // SAFETY: all zeros is a value of it.
            let mut device: ibv_device = unsafe { std::mem::zeroed() };
            device.node_type = IBV_NODE_CA;
            device.transport_type = IBV_TRANSPORT_IB;
            copy_name(&mut device.name, b"soft0");
            copy_name(&mut device.dev_name, b"softverbs0");
            copy_name(
                &mut device.dev_path,
                b"/sys/class/infiniband_verbs/softverbs0",
            );
            copy_name(&mut device.ibdev_path, b"/sys/class/infiniband/soft0");
            Device(UnsafeCell::new(device))
        })
        .0
        .get()
}

pub(super) fn is_device(other: *const ibv_device) -> bool {
    std::ptr::eq(device(), other)
}

pub(super) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    pointer(|| {
        // SAFETY: room for one device and the NULL that ends the list.
        let list: *mut *mut ibv_device = unsafe { libc::calloc(2, size_of::<usize>()) }.cast();
        if list.is_null() {
            return Err(Errno(libc::ENOMEM));
        }
        // SAFETY: just allocated; the caller promises NULL or a writable count.
        unsafe {
            list.write(device());
            if !count.is_null() {
                count.write(1);
            }
        }
        Ok(list)
    })
}

pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: the caller promises a list of `get_device_list`.
    unsafe { libc::free(list.cast()) };
}

pub(super) unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller promises a device.
    unsafe { (&raw const (*device).name).cast() }
}

pub(super) unsafe extern "C" fn get_device_guid(_device: *mut ibv_device) -> u64 {
    guard(|| {
        Ok(u64::from_ne_bytes(gid::guid(
            crate::process::emulated_node(),
        )))
    })
    .unwrap_or(0)
}

pub(super) unsafe extern "C" fn get_device_index(_device: *mut ibv_device) -> c_int {
    // There is no kernel device, so there is no index.
    -1
}

/// A forked child never has this device's memory, so no preparation is needed.
pub(super) unsafe extern "C" fn fork_init() -> c_int {
    0
}

pub(super) unsafe extern "C" fn is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}
