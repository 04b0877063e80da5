//! The functions of softverbs' table, under their exported names.
//!
//! A function that is not in the table returns what rdma-core returns for a driver without it:
//! EOPNOTSUPP, as the result or in `errno`, according to its man page.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use rdma_core_sys::bindings::*;
use rdma_core_sys::scalars::{__be16, __be64};

use crate::set_errno;

macro_rules! forward {
    (
        required { $($req:ident($($ra:ident: $rt:ty),*) $(-> $rr:ty)?;)* }
        optional { $($opt:ident($($oa:ident: $ot:ty),*) $(-> $or:ty)?, else $absent:expr;)* }
    ) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $req($($ra: $rt),*) $(-> $rr)? {
                // SAFETY: the caller fulfils the requirements of the function's man page.
                unsafe { (softverbs::backend().verbs.$req)($($ra),*) }
            }
        )*
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $opt($($oa: $ot),*) $(-> $or)? {
                match softverbs::backend().verbs.$opt {
                    // SAFETY: the caller fulfils the requirements of the function's man page.
                    Some(function) => unsafe { function($($oa),*) },
                    None => $absent,
                }
            }
        )*
    };
}

/// Programs for rdma-core may expect an event of each readable channel.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    softverbs::answer_every_wake();
    // SAFETY: the caller fulfils the requirements of the function's man page.
    unsafe { (softverbs::backend().verbs.ibv_create_comp_channel)(context) }
}

fn unsupported<T>(result: T) -> T {
    set_errno(libc::EOPNOTSUPP);
    result
}

forward! {
    required {
        ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list(list: *mut *mut ibv_device);
        ibv_get_device_name(device: *mut ibv_device) -> *const c_char;
        ibv_get_device_guid(device: *mut ibv_device) -> __be64;
        ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
        ibv_close_device(context: *mut ibv_context) -> c_int;
        ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        ibv_ack_async_event(event: *mut ibv_async_event);
        ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int;
        ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
        ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut __be16) -> c_int;
        ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
        ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
        ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
        ibv_create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int) -> *mut ibv_cq;
        ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int;
        ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
        ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int;
        ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint);
        ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
        ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
        ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
        ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init_attr: *mut ibv_qp_init_attr) -> c_int;
        ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
        ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
        ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
        ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        ibv_fork_init() -> c_int;
        ibv_wc_status_str(status: ibv_wc_status) -> *const c_char;
        ibv_event_type_str(event: ibv_event_type) -> *const c_char;
        ibv_node_type_str(node_type: ibv_node_type) -> *const c_char;
        ibv_port_state_str(port_state: ibv_port_state) -> *const c_char;
    }
    optional {
        ibv_rereg_mr(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> c_int, else unsupported(IBV_REREG_MR_ERR_INPUT);
        ibv_init_ah_from_wc(context: *mut ibv_context, port: u8, wc: *mut ibv_wc, grh: *mut ibv_grh, attr: *mut ibv_ah_attr) -> c_int, else unsupported(-1);
        ibv_create_ah_from_wc(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8) -> *mut ibv_ah, else unsupported(ptr::null_mut());
        ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr, else unsupported(ptr::null_mut());
        ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr, else unsupported(ptr::null_mut());
        ibv_reg_dmabuf_mr(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr, else unsupported(ptr::null_mut());
        ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr, else unsupported(ptr::null_mut());
        // NULL is the documented answer for a QP without the extended interface.
        ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex, else ptr::null_mut();
        ibv_get_device_index(device: *mut ibv_device) -> c_int, else unsupported(-1);
        ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: __be16) -> c_int, else unsupported(-1);
        ibv_import_device(cmd_fd: c_int) -> *mut ibv_context, else unsupported(ptr::null_mut());
        ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd, else unsupported(ptr::null_mut());
        // The three functions that undo an import have nothing to undo if imports always fail.
        ibv_unimport_pd(pd: *mut ibv_pd), else ();
        ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr, else unsupported(ptr::null_mut());
        ibv_unimport_mr(mr: *mut ibv_mr), else ();
        ibv_import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm, else unsupported(ptr::null_mut());
        ibv_unimport_dm(dm: *mut ibv_dm), else ();
        _ibv_query_gid_ex(context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry, flags: u32, entry_size: usize) -> c_int, else libc::EOPNOTSUPP;
        _ibv_query_gid_table(context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize, flags: u32, entry_size: usize) -> isize, else -(libc::EOPNOTSUPP as isize);
        ibv_is_fork_initialized() -> ibv_fork_status, else IBV_FORK_DISABLED;
        ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int, else libc::EOPNOTSUPP;
        ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int, else libc::EOPNOTSUPP;
        // 0: no guarantee about the order in which the bytes of a message arrive.
        ibv_query_qp_data_in_order(qp: *mut ibv_qp, op: ibv_wr_opcode, flags: u32) -> c_int, else 0;
        ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void, else unsupported(ptr::null_mut());
        ibv_free_buf(buf: *mut ibv_buf), else ();
        ibv_reg_buf_mr(pd: *mut ibv_pd, buf: *mut ibv_buf, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr, else unsupported(ptr::null_mut());
        ibv_dm_export_dmabuf_fd(dm: *mut ibv_dm) -> c_int, else unsupported(-1);
    }
}

/// A private function of rdma-core that `ibv_devinfo -v`, perftest and pyverbs call: the type of a
/// GID as in sysfs, 0 for InfiniBand, RoCE version 1 and an empty place of the table, 1 for RoCE
/// version 2.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_uint,
) -> c_int {
    let mut entry = ibv_gid_entry::default();
    let size = size_of::<ibv_gid_entry>();
    let error =
        // SAFETY: the caller passes a live context; the entry belongs to this function and has the
        // size that is passed.
        unsafe { _ibv_query_gid_ex(context, u32::from(port), index, &raw mut entry, 0, size) };
    if error == libc::ENODATA {
        // an empty place; as rdma-core
        // SAFETY: the caller passes writable memory for the result.
        unsafe { *kind = 0 };
        return 0;
    }
    if error != 0 {
        set_errno(error);
        return -1;
    }
    // SAFETY: the caller passes writable memory for the result.
    unsafe { *kind = c_uint::from(entry.gid_type == IBV_GID_TYPE_ROCE_V2) };
    0
}

/// `IBVERBS_1.1`: called by programs that fork. softverbs accesses memory by virtual addresses, so
/// no advice to the kernel is necessary.
#[unsafe(no_mangle)]
extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// As [`ibv_dontfork_range`].
#[unsafe(no_mangle)]
extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ibv_devinfo -v` reads all places of the table.
    #[test]
    fn an_empty_place_has_the_type_of_infiniband() {
        // SAFETY: live objects, each released once, and writable results.
        unsafe {
            let list = ibv_get_device_list(ptr::null_mut());
            let context = ibv_open_device(*list);
            ibv_free_device_list(list);
            let mut kind = 7;
            assert_eq!(ibv_query_gid_type(context, 1, 0, &raw mut kind), 0);
            let mut gid = ibv_gid::default();
            let last = 7;
            assert_eq!(ibv_query_gid(context, 1, last, &raw mut gid), 0);
            assert_eq!(*gid.raw.as_ref(), [0; 16]);
            kind = 7;
            assert_eq!(ibv_query_gid_type(context, 1, 7, &raw mut kind), 0);
            assert_eq!(kind, 0);
            assert_eq!(ibv_query_gid_type(context, 1, 8, &raw mut kind), -1);
            assert_eq!(ibv_close_device(context), 0);
        }
    }
}
