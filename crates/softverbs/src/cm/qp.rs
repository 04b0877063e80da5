//! Queue pairs of ids: their creation, and their state changes during a connection.
//!
//! Invariants: the attributes are those of the kernel's connection manager (ib_cm,
//! `ib_cm_init_qp_attr`): an application that moves its queue pair itself with `rdma_init_qp_attr`
//! gets the same connection.

use std::ptr::null_mut;

use libc::c_int;
use rdma_core_sys::*;

use super::device::{self, verbs};
use super::guard::{lock, status, void};
use super::id::Id;
use super::state::{Phase, State};
use crate::qp::modify_now;
use crate::sys::{Errno, Res};

/// Default of the local acknowledgement timeout: 4.096 µs × 2^18, about 1.07 s.
const ACK_TIMEOUT: u8 = 18;

/// The queue pair of the id; NULL if it has none.
pub(super) fn of(handle: *mut Id) -> *mut ibv_qp {
    if handle.is_null() {
        return null_mut();
    }
    // SAFETY: the callers run during a call on the id or the delivery of its event, so it lives.
    unsafe { (*handle).c.qp }
}

/// The type of the id's queue pair, which the application may set in an id of RDMA_PS_IB.
pub(super) fn type_of(handle: *mut Id) -> ibv_qp_type {
    if handle.is_null() {
        return IBV_QPT_RC;
    }
    // SAFETY: as above.
    unsafe { (*handle).c.qp_type }
}

fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: c_int) -> Res<()> {
    // SAFETY: the application keeps a queue pair alive while its id has it.
    match unsafe { (verbs().ibv_modify_qp)(qp, attr, mask) } {
        0 => Ok(()),
        errno => Err(Errno(errno)),
    }
}

/// Moves the queue pair of the id, if it has one, to the error state. Does not wait for accesses
/// through it: the caller holds a lock of the id.
pub(super) fn to_error(handle: *mut Id) -> Res<()> {
    let qp = of(handle);
    if qp.is_null() {
        return Ok(());
    }
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_ERR,
        ..ibv_qp_attr::default()
    };
    // SAFETY: the application keeps a queue pair alive while its id has it.
    unsafe { modify_now(qp, &attr, IBV_QP_STATE) }.map(drop)
}

/// Moves the queue pair of the id, if it has one, from INIT to RTS.
///
/// # Errors
/// `EPROTO`: the peer has named a queue pair of another process. Those of `ibv_modify_qp(3)`.
pub(super) fn to_ready(state: &State, handle: *mut Id) -> Res<()> {
    let qp = of(handle);
    if qp.is_null() {
        return Ok(());
    }
    let named = state.peer.as_ref().map(|peer| peer.qp_num);
    if named.is_some_and(|number| {
        state
            .link
            .as_ref()
            .is_some_and(|link| link.contradicts(number))
    }) {
        return Err(Errno(libc::EPROTO));
    }
    // INIT again: the access rights of the peer are known only now.
    for target in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let (mut attr, mask) = attributes(state, type_of(handle), target)?;
        modify(qp, &mut attr, mask)?;
    }
    Ok(())
}

/// The attributes and their mask for the transition to `target`.
fn attributes(
    state: &State,
    qp_type: ibv_qp_type,
    target: ibv_qp_state,
) -> Res<(ibv_qp_attr, c_int)> {
    let device = state.device.as_ref().ok_or(Errno(libc::EINVAL))?;
    let mut attr = ibv_qp_attr {
        qp_state: target,
        ..ibv_qp_attr::default()
    };
    let mut mask = IBV_QP_STATE;
    if qp_type == IBV_QPT_UD {
        // the same for each state
        attr.port_num = device::PORT;
        attr.qkey = device::QKEY;
        mask |= IBV_QP_QKEY | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        return Ok((attr, mask as c_int));
    }
    if target == IBV_QPS_INIT {
        attr.port_num = device::PORT;
        if matches!(
            state.phase,
            Phase::ReqSent
                | Phase::RepReceived
                | Phase::ReqReceived
                | Phase::RepSent
                | Phase::Established
        ) {
            attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
            if state.responder_resources > 0 {
                attr.qp_access_flags |=
                    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | device.flush;
            }
        }
        mask |= IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        return Ok((attr, mask as c_int));
    }
    let known = matches!(
        state.phase,
        Phase::RepReceived | Phase::ReqReceived | Phase::RepSent | Phase::Established
    );
    let peer = state
        .peer
        .as_ref()
        .filter(|_| known)
        .ok_or(Errno(libc::EINVAL))?;
    match target {
        IBV_QPS_RTR => {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.port_num = device::PORT;
            attr.ah_attr.grh.dgid = device::gid_from(peer.gid);
            attr.ah_attr.grh.hop_limit = 64;
            attr.ah_attr.grh.traffic_class = state.options.type_of_service;
            attr.path_mtu = device.mtu;
            attr.dest_qp_num = peer.qp_num;
            attr.rq_psn = peer.psn;
            attr.max_dest_rd_atomic = state.responder_resources;
            mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
            if qp_type != IBV_QPT_XRC_SEND {
                mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
            }
        }
        IBV_QPS_RTS => {
            attr.sq_psn = state.psn;
            attr.timeout = state.options.ack_timeout.unwrap_or(ACK_TIMEOUT);
            attr.retry_cnt = state.retry_count;
            attr.rnr_retry = state.rnr_retry_count;
            attr.max_rd_atomic = state.initiator_depth;
            mask |= IBV_QP_TIMEOUT | IBV_QP_SQ_PSN;
            if qp_type != IBV_QPT_XRC_RECV {
                mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
            }
        }
        _ => return Err(Errno(libc::EINVAL)),
    }
    Ok((attr, mask as c_int))
}

pub(super) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    qp_attr: *mut ibv_qp_attr,
    qp_attr_mask: *mut c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        if qp_attr.is_null() || qp_attr_mask.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises attributes, of which only the state need be set.
        let target = unsafe { (&raw const (*qp_attr).qp_state).read() };
        let qp_type = type_of(shared.handle());
        let (attr, mask) = attributes(&lock(&shared.state), qp_type, target)?;
        // SAFETY: the caller promises that both are writable.
        unsafe {
            qp_attr.write(attr);
            *qp_attr_mask = mask;
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    status(|| {
        if qp_init_attr.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises valid attributes.
        let plain = unsafe { &mut *qp_init_attr };
        let mut attr = ibv_qp_init_attr_ex {
            qp_context: plain.qp_context,
            send_cq: plain.send_cq,
            recv_cq: plain.recv_cq,
            srq: plain.srq,
            qp_type: plain.qp_type,
            sq_sig_all: plain.sq_sig_all,
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd,
            ..ibv_qp_init_attr_ex::default()
        };
        std::mem::swap(&mut attr.cap, &mut plain.cap);
        // SAFETY: the caller promises a live id.
        let made = unsafe { create(id, &mut attr) };
        std::mem::swap(&mut attr.cap, &mut plain.cap);
        plain.send_cq = attr.send_cq;
        plain.recv_cq = attr.recv_cq;
        plain.srq = attr.srq;
        made
    })
}

pub(super) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    qp_init_attr: *mut ibv_qp_init_attr_ex,
) -> c_int {
    status(|| {
        if qp_init_attr.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller promises a live id and valid attributes.
        unsafe { create(id, &mut *qp_init_attr) }
    })
}

/// # Safety
/// As `rdma_create_qp_ex(3)`.
unsafe fn create(id: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex) -> Res<()> {
    // SAFETY: the caller promises a live id.
    let shared = unsafe { Id::shared_of(id)? };
    let state = lock(&shared.state);
    // SAFETY: as above; other calls on this id wait for the lock of its state.
    let c = unsafe { &mut *id };
    if !c.qp.is_null() || c.verbs.is_null() {
        return Err(Errno(libc::EINVAL));
    }
    if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || attr.pd.is_null() {
        attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
        attr.pd = c.pd;
    // SAFETY: the caller promises a live protection domain.
    } else if unsafe { (*attr.pd).context } != c.verbs {
        return Err(Errno(libc::EINVAL));
    }
    let differ =
        |own: *mut ibv_cq, given: *mut ibv_cq| !own.is_null() && !given.is_null() && own != given;
    if differ(c.send_cq, attr.send_cq) || differ(c.recv_cq, attr.recv_cq) {
        return Err(Errno(libc::EINVAL));
    }
    create_missing_cqs(c, attr).inspect_err(|_| destroy_cqs(c))?;
    if attr.send_cq.is_null() {
        attr.send_cq = c.send_cq;
    }
    if attr.recv_cq.is_null() {
        attr.recv_cq = c.recv_cq;
    }
    if attr.srq.is_null() {
        attr.srq = c.srq;
    }
    // SAFETY: a live context and attributes that the caller promises to be valid.
    let qp = unsafe { ibv_create_qp_ex(c.verbs, attr) };
    if qp.is_null() {
        let errno = Errno::last();
        destroy_cqs(c);
        return Err(errno);
    }
    let initialized = attributes(&state, c.qp_type, IBV_QPS_INIT)
        .and_then(|(mut init, mask)| modify(qp, &mut init, mask))
        .and_then(|()| {
            if c.qp_type == IBV_QPT_UD {
                datagrams_to_ready(qp)
            } else {
                Ok(())
            }
        });
    if let Err(errno) = initialized {
        // SAFETY: made above, and not yet passed on.
        unsafe { (verbs().ibv_destroy_qp)(qp) };
        destroy_cqs(c);
        return Err(errno);
    }
    // SAFETY: a live queue pair.
    c.pd = unsafe { (*qp).pd };
    c.qp = qp;
    Ok(())
}

/// Moves a queue pair of a datagram service from INIT to RTS. It needs no peer.
fn datagrams_to_ready(qp: *mut ibv_qp) -> Res<()> {
    for (qp_state, mask) in [
        (IBV_QPS_RTR, IBV_QP_STATE),
        (IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN),
    ] {
        let mut attr = ibv_qp_attr {
            qp_state,
            ..ibv_qp_attr::default()
        };
        modify(qp, &mut attr, mask as c_int)?;
    }
    Ok(())
}

/// Creates completion queues for the id, if the application has passed none.
fn create_missing_cqs(c: &mut rdma_cm_id, attr: &ibv_qp_init_attr_ex) -> Res<()> {
    let context = c.verbs;
    let make = |entries: u32| {
        // SAFETY: a live context.
        let channel = unsafe { (verbs().ibv_create_comp_channel)(context) };
        if channel.is_null() {
            return Err(Errno::last());
        }
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: a live context and channel.
        let cq = unsafe { (verbs().ibv_create_cq)(context, entries, null_mut(), channel, 0) };
        if cq.is_null() {
            let errno = Errno::last();
            // SAFETY: made above, and not yet passed on.
            unsafe { (verbs().ibv_destroy_comp_channel)(channel) };
            return Err(errno);
        }
        Ok((channel, cq))
    };
    if attr.recv_cq.is_null() && c.recv_cq.is_null() && attr.cap.max_recv_wr > 0 {
        (c.recv_cq_channel, c.recv_cq) = make(attr.cap.max_recv_wr)?;
    }
    if attr.send_cq.is_null() && c.send_cq.is_null() && attr.cap.max_send_wr > 0 {
        (c.send_cq_channel, c.send_cq) = make(attr.cap.max_send_wr)?;
    }
    Ok(())
}

fn destroy_cqs(c: &mut rdma_cm_id) {
    // Completion queues of this module have a channel.
    for (channel, cq) in [
        (&mut c.recv_cq_channel, &mut c.recv_cq),
        (&mut c.send_cq_channel, &mut c.send_cq),
    ] {
        if channel.is_null() {
            continue;
        }
        // SAFETY: made by `create_missing_cqs`; the queue pair that used them is destroyed.
        unsafe {
            (verbs().ibv_destroy_cq)(*cq);
            (verbs().ibv_destroy_comp_channel)(*channel);
        }
        (*channel, *cq) = (null_mut(), null_mut());
    }
}

pub(super) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    void(|| {
        if id.is_null() {
            return;
        }
        // Without a lock: the call may wait until the application has acknowledged the queue pair's
        // events.
        // SAFETY: the caller promises a live id, and that no other thread uses its queue pair.
        let c = unsafe { &mut *id };
        if !c.qp.is_null() {
            // SAFETY: the id's queue pair, which the caller does not use again.
            unsafe { (verbs().ibv_destroy_qp)(c.qp) };
            c.qp = null_mut();
        }
        destroy_cqs(c);
    });
}
