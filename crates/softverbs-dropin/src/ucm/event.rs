//! Events, as the kernel's file gives them.
//!
//! Invariant: an event is counted before the connection manager's event is acknowledged. So when an
//! id has been destroyed, its count is complete.

use std::ptr::null_mut;

use rdma_core_sys::bindings::*;

use super::abi::*;
use super::convert;
use super::file::{Channel, Id, Res, Table, cm, done};

/// Waits for the next event that the caller can get. It returns the bytes of the answer.
pub(super) fn next(channel: Channel) -> Res<[u8; EVENT]> {
    loop {
        let mut event = null_mut();
        // SAFETY: a live channel, and room for a pointer.
        done(unsafe { (cm().rdma_get_cm_event)(channel.0, &raw mut event) })?;
        // SAFETY: the event has just been returned.
        let answer = unsafe { answer(&*event, channel) };
        // SAFETY: acknowledged once.
        done(unsafe { (cm().rdma_ack_cm_event)(event) })?;
        match answer {
            Ok(bytes) => return Ok(bytes),
            // The listener is being destroyed: the caller will never have this request.
            Err(Some(request)) => {
                // SAFETY: an id that no one else has.
                done(unsafe { (cm().rdma_destroy_id)(request.0) })?;
            }
            // As in the kernel, the caller gets no event of an id before it has named the id.
            Err(None) => {}
        }
    }
}

/// The answer for an event of a channel. The error is an id that the event has brought, if the
/// caller cannot get the event.
///
/// # Safety
/// `event` must be an event of the connection manager that is not yet acknowledged.
unsafe fn answer(event: &rdma_cm_event, from: Channel) -> Result<[u8; EVENT], Option<Id>> {
    let mut table = Table::lock();
    let (number, uid) = if event.event == RDMA_CM_EVENT_CONNECT_REQUEST {
        let request = Id(event.id);
        let listener = table.report(Id(event.listen_id), from);
        let (_, uid, fd) = listener.ok_or(Some(request))?;
        (table.add(request, fd, 0), uid)
    } else {
        let (number, uid, _) = table.report(Id(event.id), from).ok_or(None)?;
        (number, uid)
    };
    drop(table);
    let mut out = [0; EVENT];
    out[..8].copy_from_slice(&uid.to_ne_bytes());
    out[8..12].copy_from_slice(&number.to_ne_bytes());
    out[12..16].copy_from_slice(&event.event.to_ne_bytes());
    out[16..20].copy_from_slice(&event.status.to_ne_bytes());
    // SAFETY: an id lives while it has an event that is not acknowledged.
    let datagrams = unsafe { (*event.id).qp_type } == IBV_QPT_UD;
    // SAFETY: a parameter of the kind that belongs to the id's type.
    unsafe {
        if datagrams {
            out[EVENT_PARAM..][..size_of::<UdParam>()]
                .copy_from_slice(bytes(&ud(event.param.ud.as_ref())));
        } else {
            out[EVENT_PARAM..][..size_of::<ConnParam>()]
                .copy_from_slice(bytes(&conn(event.param.conn.as_ref())));
        }
    }
    Ok(out)
}

/// Private data of an event.
///
/// # Safety
/// `data` must be NULL or have `length` bytes.
unsafe fn data(data: *const std::ffi::c_void, length: u8) -> [u8; PRIVATE_DATA] {
    let mut out = [0; PRIVATE_DATA];
    if !data.is_null() {
        // SAFETY: the caller promises the bytes.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length.into()) };
        out[..bytes.len()].copy_from_slice(bytes);
    }
    out
}

/// # Safety
/// The parameter's private data must have its length.
unsafe fn conn(from: &rdma_conn_param) -> ConnParam {
    ConnParam {
        qp_num: from.qp_num,
        qkey: 0,
        // SAFETY: the caller promises it.
        private_data: unsafe { data(from.private_data, from.private_data_len) },
        private_data_len: from.private_data_len,
        srq: from.srq,
        responder_resources: from.responder_resources,
        initiator_depth: from.initiator_depth,
        flow_control: from.flow_control,
        retry_count: from.retry_count,
        rnr_retry_count: from.rnr_retry_count,
        valid: 1,
    }
}

/// # Safety
/// The parameter's private data must have its length.
unsafe fn ud(from: &rdma_ud_param) -> UdParam {
    UdParam {
        qp_num: from.qp_num,
        qkey: from.qkey,
        ah_attr: convert::ah_to_kernel(&from.ah_attr),
        // SAFETY: the caller promises it.
        private_data: unsafe { data(from.private_data, from.private_data_len) },
        private_data_len: from.private_data_len,
        reserved: [0; 7],
    }
}
