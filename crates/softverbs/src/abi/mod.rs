//! The exported functions of libibverbs as a table.
//!
//! A file has the entry points of one kind of object; [`operations`] those that `verbs.h` reaches
//! through a context. Every entry checks that its process is not a forked child, runs its body in
//! [`crate::entry`], and uses the modules below this one. No file of this folder uses another one
//! but [`operations`], which [`open`] and this table use.

mod ah;
mod buf;
mod context;
mod cq;
mod device;
mod dm;
mod import;
mod mr;
mod mw;
mod names;
mod open;
mod operations;
mod pd;
mod qp;
mod query;
mod rereg;
mod ring;
mod softdv;
mod srq;
mod td;
mod xrcd;

use std::sync::OnceLock;

use rdma_core_sys::VerbsFns;

/// This device's implementation of the functions of libibverbs.
pub fn verbs() -> &'static VerbsFns {
    static TABLE: OnceLock<VerbsFns> = OnceLock::new();
    TABLE.get_or_init(|| VerbsFns {
        ibv_get_device_list: device::get_device_list,
        ibv_free_device_list: device::free_device_list,
        ibv_get_device_name: device::get_device_name,
        ibv_get_device_guid: device::get_device_guid,
        ibv_open_device: open::open_device,
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
        ibv_create_comp_channel: cq::create_comp_channel,
        ibv_destroy_comp_channel: cq::destroy_comp_channel,
        ibv_create_cq: cq::create_cq,
        ibv_resize_cq: cq::resize_cq,
        ibv_destroy_cq: cq::destroy_cq,
        ibv_get_cq_event: cq::get_cq_event,
        ibv_ack_cq_events: cq::ack_cq_events,
        ibv_create_srq: srq::create_srq,
        ibv_modify_srq: srq::modify_srq,
        ibv_query_srq: srq::query_srq,
        ibv_destroy_srq: srq::destroy_srq,
        ibv_create_qp: qp::create_qp,
        ibv_query_qp: qp::query_qp,
        ibv_modify_qp: qp::modify_qp,
        ibv_destroy_qp: qp::destroy_qp,
        ibv_create_ah: ah::create_ah,
        ibv_destroy_ah: ah::destroy_ah,
        ibv_attach_mcast: qp::attach_mcast,
        ibv_detach_mcast: qp::attach_mcast,
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
        ibv_qp_to_qp_ex: Some(qp::qp_to_qp_ex),
        ibv_get_device_index: Some(device::get_device_index),
        ibv_get_pkey_index: Some(query::get_pkey_index),
        ibv_import_device: Some(open::import_device),
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
        ibv_reg_buf_mr: Some(mr::reg_buf_mr),
        ibv_dm_export_dmabuf_fd: None,
        softdv_adopt_buf: Some(softdv::adopt_buf),
        softdv_release_buf: Some(softdv::release_buf),
        softdv_page_prefetch: Some(softdv::page_prefetch),
        softdv_dereg_mr_now: Some(mr::dereg_mr_now),
        softdv_is_in_buffer: Some(softdv::is_in_buffer),
        softdv_set_access_wait: Some(softdv::set_access_wait),
        softdv_ring_create: Some(ring::create),
        softdv_ring_attach: Some(ring::attach),
        softdv_ring_post: Some(ring::post),
        softdv_ring_postv: Some(ring::postv),
        softdv_ring_poll: Some(ring::poll),
        softdv_ring_consume: Some(ring::consume),
        softdv_ring_advance: Some(ring::advance),
        softdv_ring_sent: Some(ring::sent),
        softdv_ring_delivered: Some(ring::delivered),
        softdv_ring_await: Some(ring::await_consume),
        softdv_ring_set_hot: Some(ring::set_hot),
        softdv_ring_grow: Some(ring::grow),
        softdv_ring_arrivals: Some(ring::arrivals),
        softdv_access: Some(softdv::access),
        softdv_atomic_access: Some(softdv::atomic_access),
        softdv_access_list: Some(softdv::access_list),
        softdv_access_srq: Some(softdv::access_srq),
        softdv_atomic_access_srq: Some(softdv::atomic_access_srq),
        softdv_max_atomic: Some(softdv::max_atomic),
        softdv_atomic_own: Some(softdv::atomic_own),
    })
}
