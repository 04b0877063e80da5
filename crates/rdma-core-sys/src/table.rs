//! The exported functions of libibverbs and librdmacm, as tables of function pointers.
//!
//! A table is filled from the system's libraries ([`crate::system`]) or by a device in this process
//! (`softverbs`). Functions that are inline in `verbs.h` are not here: they use `context->ops` and
//! `verbs_context`, see [`crate::inline`]. A `required` symbol has been in every rdma-core since
//! version 25. An `optional` one is newer, and `None` if the library does not have it. `softdv_*`
//! are the direct verbs of softverbs, which no rdma-core has.

use core::ffi::{c_char, c_int, c_uint, c_void};

use libc::{iovec, sockaddr};

use crate::bindings::*;
use crate::scalars::{__be16, __be64};
use crate::softdv::{
    softdv_atomic, softdv_ring, softdv_ring_attr, softdv_ring_info, softdv_ring_message,
};

macro_rules! function_table {
    (
        $(#[$meta:meta])* $table:ident;
        required { $($req:ident: fn($($ra:ident: $rt:ty),*) $(-> $rr:ty)?;)* }
        optional { $($opt:ident: fn($($oa:ident: $ot:ty),*) $(-> $or:ty)?;)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[allow(missing_docs, reason = "each field is the C function of that name; its man page is the documentation")]
        pub struct $table {
            $(pub $req: unsafe extern "C" fn($($ra: $rt),*) $(-> $rr)?,)*
            $(pub $opt: Option<unsafe extern "C" fn($($oa: $ot),*) $(-> $or)?>,)*
        }

        impl $table {
            /// Fills the table by looking each name up with `symbol`.
            ///
            /// # Errors
            /// The name of the first required symbol that is missing.
            ///
            /// # Safety
            /// `symbol` must return, for each name, NULL or the C function of that name with the
            /// signature in rdma-core's headers.
            pub unsafe fn from_symbols(
                mut symbol: impl FnMut(&'static core::ffi::CStr) -> *mut c_void,
            ) -> Result<Self, &'static str> {
                $(
                    let name = concat!(stringify!($req), "\0");
                    let address = symbol(c_name(name));
                    if address.is_null() {
                        return Err(stringify!($req));
                    }
                    // SAFETY: the caller promises that a non-null address is that function.
                    let $req = unsafe {
                        core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ra: $rt),*) $(-> $rr)?>(address)
                    };
                )*
                $(
                    let address = symbol(c_name(concat!(stringify!($opt), "\0")));
                    // SAFETY: the caller promises that a non-null address is that function, and a
                    // NULL one is `None` by the layout of `Option<fn>`.
                    let $opt = unsafe {
                        core::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($oa: $ot),*) $(-> $or)?>>(address)
                    };
                )*
                Ok(Self { $($req,)* $($opt,)* })
            }
        }
    };
}

/// `name` ends with the one NUL of `concat!`.
fn c_name(name: &'static str) -> &'static core::ffi::CStr {
    core::ffi::CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or(c"")
}

function_table! {
    /// The functions of `libibverbs.so.1`.
    VerbsFns;
    required {
        ibv_get_device_list: fn(num_devices: *mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list: fn(list: *mut *mut ibv_device);
        ibv_get_device_name: fn(device: *mut ibv_device) -> *const c_char;
        ibv_get_device_guid: fn(device: *mut ibv_device) -> __be64;
        ibv_open_device: fn(device: *mut ibv_device) -> *mut ibv_context;
        ibv_close_device: fn(context: *mut ibv_context) -> c_int;
        ibv_get_async_event: fn(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        ibv_ack_async_event: fn(event: *mut ibv_async_event);
        ibv_query_device: fn(context: *mut ibv_context, device_attr: *mut ibv_device_attr) -> c_int;
        ibv_query_port: fn(context: *mut ibv_context, port_num: u8, port_attr: *mut _compat_ibv_port_attr) -> c_int;
        ibv_query_gid: fn(context: *mut ibv_context, port_num: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
        ibv_query_pkey: fn(context: *mut ibv_context, port_num: u8, index: c_int, pkey: *mut __be16) -> c_int;
        ibv_alloc_pd: fn(context: *mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd: fn(pd: *mut ibv_pd) -> c_int;
        ibv_reg_mr: fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        ibv_dereg_mr: fn(mr: *mut ibv_mr) -> c_int;
        ibv_create_comp_channel: fn(context: *mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel: fn(channel: *mut ibv_comp_channel) -> c_int;
        ibv_create_cq: fn(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, comp_vector: c_int) -> *mut ibv_cq;
        ibv_resize_cq: fn(cq: *mut ibv_cq, cqe: c_int) -> c_int;
        ibv_destroy_cq: fn(cq: *mut ibv_cq) -> c_int;
        ibv_get_cq_event: fn(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(cq: *mut ibv_cq, nevents: c_uint);
        ibv_create_srq: fn(pd: *mut ibv_pd, srq_init_attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_modify_srq: fn(srq: *mut ibv_srq, srq_attr: *mut ibv_srq_attr, srq_attr_mask: c_int) -> c_int;
        ibv_query_srq: fn(srq: *mut ibv_srq, srq_attr: *mut ibv_srq_attr) -> c_int;
        ibv_destroy_srq: fn(srq: *mut ibv_srq) -> c_int;
        ibv_create_qp: fn(pd: *mut ibv_pd, qp_init_attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_query_qp: fn(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int, init_attr: *mut ibv_qp_init_attr) -> c_int;
        ibv_modify_qp: fn(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int;
        ibv_destroy_qp: fn(qp: *mut ibv_qp) -> c_int;
        ibv_create_ah: fn(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        ibv_destroy_ah: fn(ah: *mut ibv_ah) -> c_int;
        ibv_attach_mcast: fn(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        ibv_detach_mcast: fn(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        ibv_fork_init: fn() -> c_int;
        ibv_wc_status_str: fn(status: ibv_wc_status) -> *const c_char;
        ibv_event_type_str: fn(event: ibv_event_type) -> *const c_char;
        ibv_node_type_str: fn(node_type: ibv_node_type) -> *const c_char;
        ibv_port_state_str: fn(port_state: ibv_port_state) -> *const c_char;
    }
    optional {
        ibv_rereg_mr: fn(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> c_int;
        ibv_init_ah_from_wc: fn(context: *mut ibv_context, port_num: u8, wc: *mut ibv_wc, grh: *mut ibv_grh, ah_attr: *mut ibv_ah_attr) -> c_int;
        ibv_create_ah_from_wc: fn(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port_num: u8) -> *mut ibv_ah;
        ibv_reg_mr_iova: fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr;
        ibv_reg_mr_iova2: fn(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
        ibv_reg_dmabuf_mr: fn(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr;
        ibv_reg_mr_ex: fn(pd: *mut ibv_pd, mr_init_attr: *mut ibv_mr_init_attr) -> *mut ibv_mr;
        ibv_qp_to_qp_ex: fn(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
        ibv_get_device_index: fn(device: *mut ibv_device) -> c_int;
        ibv_get_pkey_index: fn(context: *mut ibv_context, port_num: u8, pkey: __be16) -> c_int;
        ibv_import_device: fn(cmd_fd: c_int) -> *mut ibv_context;
        ibv_import_pd: fn(context: *mut ibv_context, pd_handle: u32) -> *mut ibv_pd;
        ibv_unimport_pd: fn(pd: *mut ibv_pd);
        ibv_import_mr: fn(pd: *mut ibv_pd, mr_handle: u32) -> *mut ibv_mr;
        ibv_unimport_mr: fn(mr: *mut ibv_mr);
        ibv_import_dm: fn(context: *mut ibv_context, dm_handle: u32) -> *mut ibv_dm;
        ibv_unimport_dm: fn(dm: *mut ibv_dm);
        _ibv_query_gid_ex: fn(context: *mut ibv_context, port_num: u32, gid_index: u32, entry: *mut ibv_gid_entry, flags: u32, entry_size: usize) -> c_int;
        _ibv_query_gid_table: fn(context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize, flags: u32, entry_size: usize) -> isize;
        ibv_is_fork_initialized: fn() -> ibv_fork_status;
        ibv_query_ece: fn(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
        ibv_set_ece: fn(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
        ibv_query_qp_data_in_order: fn(qp: *mut ibv_qp, op: ibv_wr_opcode, flags: u32) -> c_int;
        ibv_alloc_buf: fn(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void;
        ibv_free_buf: fn(buf: *mut ibv_buf);
        ibv_reg_buf_mr: fn(pd: *mut ibv_pd, buf: *mut ibv_buf, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        ibv_dm_export_dmabuf_fd: fn(dm: *mut ibv_dm) -> c_int;
        softdv_adopt_buf: fn(context: *mut ibv_context, fd: c_int, addr: *mut c_void, length: usize) -> *mut c_void;
        softdv_release_buf: fn(adopted: *mut c_void);
        softdv_page_prefetch: fn(mr: *mut ibv_mr, pages: *mut u64) -> c_int;
        softdv_dereg_mr_now: fn(mr: *mut ibv_mr) -> c_int;
        softdv_is_in_buffer: fn(mr: *mut ibv_mr) -> c_int;
        softdv_set_access_wait: fn(qp: *mut ibv_qp, wait: c_int) -> c_int;
        softdv_ring_create: fn(qp: *mut ibv_qp, attr: *const softdv_ring_attr) -> *mut softdv_ring;
        softdv_ring_attach: fn(ring: *mut softdv_ring, info: *mut softdv_ring_info) -> c_int;
        softdv_ring_post: fn(ring: *mut softdv_ring, w1: u64, w2: u64, w3: u64, addr: *const c_void, length: u32, flags: u32) -> c_int;
        softdv_ring_postv: fn(ring: *mut softdv_ring, words: *const u64, iov: *const iovec, count: c_int, flags: u32) -> c_int;
        softdv_ring_poll: fn(ring: *mut softdv_ring, message: *mut softdv_ring_message) -> c_int;
        softdv_ring_consume: fn(ring: *mut softdv_ring) -> c_int;
        softdv_ring_advance: fn(ring: *mut softdv_ring, slots: u32) -> c_int;
        softdv_ring_sent: fn(ring: *mut softdv_ring, position: *mut u32) -> c_int;
        softdv_ring_delivered: fn(ring: *mut softdv_ring, position: *mut u32) -> c_int;
        softdv_ring_await: fn(ring: *mut softdv_ring) -> c_int;
        softdv_ring_set_hot: fn(ring: *mut softdv_ring, hot: c_int) -> c_int;
        softdv_ring_grow: fn(ring: *mut softdv_ring, slots: u32) -> c_int;
        softdv_ring_arrivals: fn(cq: *mut ibv_cq, cookies: *mut u64, count: c_int) -> c_int;
        softdv_access: fn(qp: *mut ibv_qp, opcode: u32, sge: *const ibv_sge, flags: u32, remote_addr: u64, rkey: u32) -> c_int;
        softdv_atomic_access: fn(qp: *mut ibv_qp, atomic: *mut softdv_atomic, results: *mut c_void, remote_addr: u64, rkey: u32) -> c_int;
        softdv_access_list: fn(qp: *mut ibv_qp, opcode: u32, sges: *const ibv_sge, count: c_int, flags: u32, remote_addrs: *const u64, rkeys: *const u32) -> c_int;
        softdv_access_srq: fn(qp: *mut ibv_qp, opcode: u32, sge: *const ibv_sge, flags: u32, srqn: u32, remote_addr: u64, rkey: u32) -> c_int;
        softdv_atomic_access_srq: fn(qp: *mut ibv_qp, atomic: *mut softdv_atomic, results: *mut c_void, srqn: u32, remote_addr: u64, rkey: u32) -> c_int;
        softdv_max_atomic: fn(context: *mut ibv_context) -> c_int;
        softdv_atomic_own: fn(context: *mut ibv_context, atomic: *mut softdv_atomic, iov: *const iovec, count: c_int, results: *mut c_void) -> c_int;
    }
}

function_table! {
    /// The functions of `librdmacm.so.1`.
    CmFns;
    required {
        rdma_create_event_channel: fn() -> *mut rdma_event_channel;
        rdma_destroy_event_channel: fn(channel: *mut rdma_event_channel);
        rdma_create_id: fn(channel: *mut rdma_event_channel, id: *mut *mut rdma_cm_id, context: *mut c_void, ps: rdma_port_space) -> c_int;
        rdma_destroy_id: fn(id: *mut rdma_cm_id) -> c_int;
        rdma_bind_addr: fn(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
        rdma_resolve_addr: fn(id: *mut rdma_cm_id, src_addr: *mut sockaddr, dst_addr: *mut sockaddr, timeout_ms: c_int) -> c_int;
        rdma_resolve_route: fn(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
        rdma_create_qp: fn(id: *mut rdma_cm_id, pd: *mut ibv_pd, qp_init_attr: *mut ibv_qp_init_attr) -> c_int;
        rdma_destroy_qp: fn(id: *mut rdma_cm_id);
        rdma_connect: fn(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int;
        rdma_listen: fn(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
        rdma_accept: fn(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int;
        rdma_reject: fn(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> c_int;
        rdma_notify: fn(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int;
        rdma_disconnect: fn(id: *mut rdma_cm_id) -> c_int;
        rdma_get_cm_event: fn(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event: fn(event: *mut rdma_cm_event) -> c_int;
        rdma_get_src_port: fn(id: *mut rdma_cm_id) -> __be16;
        rdma_get_dst_port: fn(id: *mut rdma_cm_id) -> __be16;
        rdma_get_devices: fn(num_devices: *mut c_int) -> *mut *mut ibv_context;
        rdma_free_devices: fn(list: *mut *mut ibv_context);
        rdma_event_str: fn(event: rdma_cm_event_type) -> *const c_char;
        rdma_set_option: fn(id: *mut rdma_cm_id, level: c_int, optname: c_int, optval: *mut c_void, optlen: usize) -> c_int;
        rdma_migrate_id: fn(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int;
    }
    optional {
        rdma_create_qp_ex: fn(id: *mut rdma_cm_id, qp_init_attr: *mut ibv_qp_init_attr_ex) -> c_int;
        rdma_establish: fn(id: *mut rdma_cm_id) -> c_int;
        rdma_init_qp_attr: fn(id: *mut rdma_cm_id, qp_attr: *mut ibv_qp_attr, qp_attr_mask: *mut c_int) -> c_int;
    }
}

/// One way of access to RDMA devices: a verbs table and the connection manager that belongs to it.
///
/// A handle of one backend must never be passed to another.
#[derive(Clone, Copy)]
pub struct Backend {
    /// The name of the backend, for logs: `"rdma-core"` or `"softverbs"`.
    pub name: &'static str,
    /// The verbs functions.
    pub verbs: VerbsFns,
    /// Its connection manager.
    pub cm: CmFns,
    /// Whether an idle queue pair enters its error state when the peer's process or machine dies.
    /// False for devices on a network: there only an unacknowledged request fails.
    pub notices_dead_peers: bool,
    /// Whether registering and deregistering memory on demand (`IBV_ACCESS_ON_DEMAND`) makes no
    /// system call, and takes the same time for any length.
    pub registers_without_kernel: bool,
    /// Whether `ibv_post_send` normally executes a request before it returns: the calling thread
    /// copies the data.
    pub executes_in_post: bool,
    /// The vendor error with which a READ, WRITE or atomic fails of which no part was executed.
    /// Then none of the requests behind it was. `None`: the device does not report it.
    pub not_executed: Option<u32>,
}
