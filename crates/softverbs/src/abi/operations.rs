//! The operations that `verbs.h` reaches through a context.

use rdma_core_sys::*;

use super::{cq, dm, mr, mw, qp, query, srq, td, xrcd};

/// A context in which only the operations are set.
pub(super) fn table() -> verbs_context {
    // SAFETY: all zeros is a value of it: no operation, no object.
    let mut verbs: verbs_context = unsafe { std::mem::zeroed() };
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(query::query_port);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.create_qp_ex = Some(qp::create_qp_ex);
    verbs.create_cq_ex = Some(cq::create_cq_ex);
    verbs.modify_cq = Some(cq::modify_cq);
    verbs.query_rt_values = Some(query::query_rt_values);
    verbs.alloc_td = Some(td::alloc_td);
    verbs.dealloc_td = Some(td::dealloc_td);
    verbs.alloc_parent_domain = Some(td::alloc_parent_domain);
    verbs.create_srq_ex = Some(srq::create_srq_ex);
    verbs.get_srq_num = Some(srq::get_srq_num);
    verbs.open_xrcd = Some(xrcd::open_xrcd);
    verbs.close_xrcd = Some(xrcd::close_xrcd);
    verbs.open_qp = Some(qp::open_qp);
    verbs.advise_mr = Some(mr::advise_mr);
    verbs.alloc_null_mr = Some(mr::alloc_null_mr);
    verbs.alloc_dm = Some(dm::alloc_dm);
    verbs.free_dm = Some(dm::free_dm);
    verbs.reg_dm_mr = Some(dm::reg_dm_mr);
    let context = &mut verbs.context;
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(qp::post_send);
    context.ops.post_recv = Some(qp::post_recv);
    context.ops.post_srq_recv = Some(srq::post_srq_recv);
    context.ops.alloc_mw = Some(mw::alloc_mw);
    context.ops.bind_mw = Some(mw::bind_mw);
    context.ops.dealloc_mw = Some(mw::dealloc_mw);
    verbs
}
