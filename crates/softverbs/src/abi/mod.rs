//! The C entry points: the exported functions of libibverbs as a table, and the operations that
//! `verbs.h` reaches through a context.
//!
//! Every entry checks that it is not in a forked child, runs its body behind [`guard`], and turns
//! the result into what the function's man page says.

mod ah;
mod buf;
mod context;
mod device;
mod dm;
pub(crate) mod gid;
mod import;
mod mr;
mod mw;
mod names;
mod objects;
mod pd;
mod query;
mod rereg;
mod softdv;
mod td;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use rdma_core_sys::VerbsFns;

pub(crate) use ah::Ah;
pub(crate) use context::Context;
pub(crate) use pd::Pd;
pub(crate) use query::MAX_RD_ATOMIC;

use crate::sys::{Errno, Res};

/// The functions of libibverbs, of this device.
pub fn verbs() -> &'static VerbsFns {
    static TABLE: OnceLock<VerbsFns> = OnceLock::new();
    TABLE.get_or_init(|| VerbsFns {
        ibv_get_device_list: device::get_device_list,
        ibv_free_device_list: device::free_device_list,
        ibv_get_device_name: device::get_device_name,
        ibv_get_device_guid: device::get_device_guid,
        ibv_open_device: context::open_device,
        ibv_close_device: context::close_device,
        ibv_get_async_event: context::get_async_event,
        ibv_ack_async_event: context::ack_async_event,
        ibv_query_device: query::query_device,
        ibv_query_port: query::query_port_compat,
        ibv_query_gid: query::query_gid,
        ibv_query_pkey: query::query_pkey,
        ibv_alloc_pd: pd::alloc_pd,
        ibv_dealloc_pd: pd::dealloc_pd,
        ibv_reg_mr: mr::reg_mr,
        ibv_dereg_mr: mr::dereg_mr,
        ibv_create_comp_channel: objects::create_comp_channel,
        ibv_destroy_comp_channel: objects::destroy_comp_channel,
        ibv_create_cq: objects::create_cq,
        ibv_resize_cq: objects::resize_cq,
        ibv_destroy_cq: objects::destroy_cq,
        ibv_get_cq_event: objects::get_cq_event,
        ibv_ack_cq_events: objects::ack_cq_events,
        ibv_create_srq: objects::create_srq,
        ibv_modify_srq: objects::modify_srq,
        ibv_query_srq: objects::query_srq,
        ibv_destroy_srq: objects::destroy_srq,
        ibv_create_qp: objects::create_qp,
        ibv_query_qp: objects::query_qp,
        ibv_modify_qp: objects::modify_qp,
        ibv_destroy_qp: objects::destroy_qp,
        ibv_create_ah: ah::create_ah,
        ibv_destroy_ah: ah::destroy_ah,
        ibv_attach_mcast: objects::attach_mcast,
        ibv_detach_mcast: objects::attach_mcast,
        ibv_fork_init: device::fork_init,
        ibv_wc_status_str: names::wc_status_str,
        ibv_event_type_str: names::event_type_str,
        ibv_node_type_str: names::node_type_str,
        ibv_port_state_str: names::port_state_str,
        ibv_rereg_mr: Some(rereg::rereg_mr),
        ibv_init_ah_from_wc: Some(ah::init_ah_from_wc),
        ibv_create_ah_from_wc: Some(ah::create_ah_from_wc),
        ibv_reg_mr_iova: Some(mr::reg_mr_iova),
        ibv_reg_mr_iova2: Some(mr::reg_mr_iova2),
        ibv_reg_dmabuf_mr: None,
        ibv_reg_mr_ex: Some(mr::reg_mr_ex),
        ibv_qp_to_qp_ex: Some(objects::qp_to_qp_ex),
        ibv_get_device_index: Some(device::get_device_index),
        ibv_get_pkey_index: Some(query::get_pkey_index),
        ibv_import_device: Some(import::import_device),
        ibv_import_pd: Some(import::import_pd),
        ibv_unimport_pd: Some(import::unimport_pd),
        ibv_import_mr: Some(import::import_mr),
        ibv_unimport_mr: Some(import::unimport_mr),
        ibv_import_dm: Some(import::import_dm),
        ibv_unimport_dm: Some(import::unimport_dm),
        _ibv_query_gid_ex: Some(query::query_gid_ex),
        _ibv_query_gid_table: Some(query::query_gid_table),
        ibv_is_fork_initialized: Some(device::is_fork_initialized),
        ibv_query_ece: None,
        ibv_set_ece: None,
        ibv_query_qp_data_in_order: None,
        ibv_alloc_buf: Some(buf::alloc_buf),
        ibv_free_buf: Some(buf::free_buf),
        ibv_reg_buf_mr: Some(buf::reg_buf_mr),
        ibv_dm_export_dmabuf_fd: None,
        softdv_adopt_buf: Some(softdv::adopt_buf),
        softdv_release_buf: Some(softdv::release_buf),
        softdv_page_prefetch: Some(softdv::page_prefetch),
    })
}

/// Runs an entry's body; a panic becomes `EFAULT` and never reaches C.
#[inline]
fn guard<T>(body: impl FnOnce() -> Res<T>) -> Res<T> {
    // Objects stay usable after a panic: locks of this crate are released by unwinding.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        #[cfg(any(test, fuzzing))]
        PANICKED.store(true, std::sync::atomic::Ordering::Relaxed);
        Err(Errno(libc::EFAULT))
    })
}

/// An entry's body has panicked, which its caller is only told as an errno.
#[cfg(any(test, fuzzing))]
pub(crate) static PANICKED: std::sync::atomic::AtomicBool =
    std::sync::atomic::AtomicBool::new(false);

/// 0, or the errno, which is left in `errno` as well.
#[inline]
fn status(body: impl FnOnce() -> Res<()>) -> i32 {
    match guard(body) {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            error.0
        }
    }
}

/// What an errno-valued body says, or `EFAULT` for a panic.
pub(crate) fn errno_of(body: impl FnOnce() -> i32) -> i32 {
    guard(|| Ok(body())).unwrap_or(libc::EFAULT)
}

/// A pointer, or NULL with `errno`.
fn pointer<T>(body: impl FnOnce() -> Res<*mut T>) -> *mut T {
    match guard(body) {
        Ok(pointer) => pointer,
        Err(error) => {
            error.set();
            std::ptr::null_mut()
        }
    }
}

/// `EINVAL` for NULL.
fn non_null<T>(pointer: *const T) -> Res<()> {
    if pointer.is_null() {
        Err(Errno(libc::EINVAL))
    } else {
        Ok(())
    }
}
