//! Queue pairs of ids: their creation, and their state changes during a connection.
//!
//! Invariants: the attributes are those of the kernel's connection manager (ib_cm,
//! `ib_cm_init_qp_attr`): an application that moves its queue pair itself with `rdma_init_qp_attr`
//! gets the same connection.

use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forks::PerProcess;
use libc::c_int;
use rdma_core_sys::*;

use super::device::{self, verbs};
use super::guard::{lock, status, void};
use super::id::Id;
use super::state::{Phase, State};
use crate::cq;
use crate::qp::{destroy_unused, end_events, modify_now};
use crate::sys::{Errno, Grow, Res};

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

/// A failure leaves `attr` as it was: the queues that the id makes are destroyed.
///
/// # Safety
/// As `rdma_create_qp_ex(3)`.
unsafe fn create(id: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex) -> Res<()> {
    let given = (attr.send_cq, attr.recv_cq, attr.srq);
    let domain = (attr.pd, attr.comp_mask);
    // SAFETY: the caller's promise.
    let created = unsafe { create_with_missing(id, attr) };
    if created.is_err() {
        (attr.send_cq, attr.recv_cq, attr.srq) = given;
        (attr.pd, attr.comp_mask) = domain;
    }
    created
}

/// Fills in the objects that `attr` does not have, and creates the queue pair with them.
///
/// # Safety
/// As `rdma_create_qp_ex(3)`.
unsafe fn create_with_missing(id: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex) -> Res<()> {
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
    create_missing_cqs(c, attr, id).inspect_err(|_| destroy_cqs(c))?;
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

/// Creates completion queues for the id, if the application has passed none. Their context is `id`,
/// the application's pointer to `c`, as rdma_get_send_comp(3) and rdma_get_recv_comp(3) require
/// (`ucma_create_cqs` of librdmacm). The application passes the context to further calls, which use
/// memory of the id behind `c`.
fn create_missing_cqs(
    c: &mut rdma_cm_id,
    attr: &ibv_qp_init_attr_ex,
    id: *mut rdma_cm_id,
) -> Res<()> {
    let context = c.verbs;
    let make = |entries: u32| {
        // SAFETY: a live context.
        let channel = unsafe { (verbs().ibv_create_comp_channel)(context) };
        if channel.is_null() {
            return Err(Errno::last());
        }
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: a live context and channel.
        let cq = unsafe { (verbs().ibv_create_cq)(context, entries, id.cast(), channel, 0) };
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
    destroy_each(take_cqs(c));
}

/// The completion queues of [`create_missing_cqs`], which the id does not have any more.
fn take_cqs(c: &mut rdma_cm_id) -> [(*mut ibv_comp_channel, *mut ibv_cq); 2] {
    let own = [
        (&mut c.recv_cq_channel, &mut c.recv_cq),
        (&mut c.send_cq_channel, &mut c.send_cq),
    ];
    own.map(|(channel, cq)| {
        // Completion queues of this module have a channel.
        if channel.is_null() {
            return (null_mut(), null_mut());
        }
        let mut taken = (null_mut(), null_mut());
        std::mem::swap(channel, &mut taken.0);
        std::mem::swap(cq, &mut taken.1);
        taken
    })
}

fn destroy_each(cqs: [(*mut ibv_comp_channel, *mut ibv_cq); 2]) {
    for (channel, cq) in cqs.into_iter().filter(|(channel, _)| !channel.is_null()) {
        // SAFETY: made by `create_missing_cqs`; the queue pair that used them is destroyed.
        unsafe {
            (verbs().ibv_destroy_cq)(cq);
            (verbs().ibv_destroy_comp_channel)(channel);
        }
    }
}

pub(super) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    void(|| {
        // SAFETY: the caller promises NULL or a live id.
        let Ok(shared) = (unsafe { Id::shared_of(id) }) else {
            return;
        };
        destroy_unfinished();
        let (qp, cqs) = {
            // a thread that delivers an event of the id may be changing the queue pair
            let _state = lock(&shared.state);
            // SAFETY: the caller promises a live id; other calls on it wait for the lock.
            let c = unsafe { &mut *id };
            (std::mem::replace(&mut c.qp, null_mut()), take_cqs(c))
        };
        // Without the lock: the call may wait until the application has acknowledged the queue
        // pair's events.
        if !qp.is_null() {
            // SAFETY: the id's queue pair, which the caller does not use again.
            let ret = unsafe { (verbs().ibv_destroy_qp)(qp) };
            if ret == libc::EBUSY {
                let rest = Unfinished { qp, cqs };
                // The caller gets no event of these objects behind this call, as behind every
                // destruction. The later one must not wait for acknowledgements: the thread that
                // makes it may owe them.
                // SAFETY: live objects, which no list has yet, and the caller does not use again.
                unsafe { rest.end_events() };
                // without memory for the list the objects stay
                let _ = unfinished().try_push(rest);
                return;
            }
        }
        destroy_each(cqs);
    });
}

/// A queue pair that was in use by another process for too long when its id lost it, and the
/// completion queues that the id had made for it.
struct Unfinished {
    qp: *mut ibv_qp,
    cqs: [(*mut ibv_comp_channel, *mut ibv_cq); 2],
}

impl Unfinished {
    /// Drops the unread events, and waits until the application has acknowledged those that it has
    /// read.
    ///
    /// # Safety
    /// The objects must be live, and no other thread destroys them meanwhile.
    unsafe fn end_events(&self) {
        // SAFETY: the caller's promise.
        unsafe { end_events(self.qp) };
        for (_, cq) in self.cqs.iter().filter(|(_, cq)| !cq.is_null()) {
            // SAFETY: the caller's promise.
            unsafe { cq::end_events(*cq) };
        }
    }
}

// SAFETY: verbs objects may be used by any thread (verbs(7), "thread-safe"); the application has
// given these up.
unsafe impl Send for Unfinished {}

static UNFINISHED: PerProcess<Mutex<Vec<Unfinished>>> = PerProcess::new(Mutex::new(Vec::new()));

fn unfinished() -> MutexGuard<'static, Vec<Unfinished>> {
    UNFINISHED
        .get()
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Destroys those of the queue pairs of [`rdma_destroy_qp`] that are not in use any more: until
/// then their completion queues and protection domains can't be destroyed. Does not wait for other
/// processes, nor for acknowledgements of events.
pub(super) fn destroy_unfinished() {
    let all = std::mem::take(&mut *unfinished());
    for rest in all {
        // SAFETY: a live queue pair of this process, which only this list has.
        if unsafe { destroy_unused(rest.qp) } == Err(Errno(libc::EBUSY)) {
            let _ = unfinished().try_push(rest);
        } else {
            destroy_each(rest.cqs);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::super::lifetime::{rdma_create_id, rdma_destroy_id};
    use super::*;
    use crate::hazard::{Hazard, Use};
    use crate::key::Key;
    use crate::object::Context;
    use crate::process::Process;
    use crate::qp::Qp;
    use crate::segment::layout::split_qp_num;

    /// An event that another thread acknowledges.
    struct SendPtr(*mut ibv_async_event);

    // SAFETY: events may be acknowledged by any thread (verbs(7), "thread-safe"); the test keeps
    // the event alive until that thread has ended.
    unsafe impl Send for SendPtr {}
    // SAFETY: as above; one thread uses the event.
    unsafe impl Sync for SendPtr {}

    impl SendPtr {
        /// # Safety
        /// The event must be live, and not acknowledged yet.
        unsafe fn acknowledge(&self) {
            // SAFETY: the caller's promise.
            unsafe { (crate::backend().verbs.ibv_ack_async_event)(self.0) };
        }
    }

    /// The next asynchronous event, with the queue pair that it is of.
    ///
    /// # Safety
    /// `context` must be live, and its descriptor non-blocking.
    unsafe fn next_event(context: *mut ibv_context) -> Option<(ibv_async_event, *mut ibv_qp)> {
        // SAFETY: the caller's promise; all zeros is a value of the event, and all members of the
        // union are pointers.
        unsafe {
            let mut event: ibv_async_event = std::mem::zeroed();
            let verbs = &crate::backend().verbs;
            match (verbs.ibv_get_async_event)(context, &raw mut event) {
                0 => Some((event, event.element.qp)),
                _ => None,
            }
        }
    }

    /// An id that is bound to the device, and attributes of a queue pair whose queues the id makes.
    ///
    /// # Safety
    /// The caller destroys the id.
    unsafe fn bound_id() -> (*mut rdma_cm_id, ibv_qp_init_attr) {
        // SAFETY: a live id; all zeros is a value of the structures.
        unsafe {
            let mut id = null_mut();
            let made = rdma_create_id(null_mut(), &raw mut id, null_mut(), RDMA_PS_TCP);
            assert_eq!(made, 0);
            let mut address: libc::sockaddr_in = std::mem::zeroed();
            address.sin_family = libc::AF_INET as u16;
            address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
            let bind = crate::backend().cm.rdma_bind_addr;
            assert_eq!(bind(id, (&raw mut address).cast()), 0);
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.qp_type = IBV_QPT_RC;
            (init.cap.max_send_wr, init.cap.max_send_sge) = (1, 1);
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (1, 1);
            (id, init)
        }
    }

    /// As if another thread delivered an event of the id, which moves the queue pair.
    #[test]
    fn a_queue_pair_is_not_destroyed_while_an_event_changes_it() {
        // SAFETY: a live id with a queue pair, each destroyed once. The address of the id is passed
        // to one other thread.
        unsafe {
            let (id, mut init) = bound_id();
            let pd = (*id).pd;
            assert_eq!(rdma_create_qp(id, pd, &raw mut init), 0);
            let shared = Id::shared_of(id).unwrap();
            let address = id.expose_provenance();
            std::thread::scope(|scope| {
                let state = lock(&shared.state);
                let destroys = scope.spawn(move || {
                    rdma_destroy_qp(std::ptr::with_exposed_provenance_mut(address));
                });
                std::thread::sleep(Duration::from_millis(200));
                assert!(!(&raw const (*id).qp).read_volatile().is_null());
                drop(state);
                destroys.join().unwrap();
            });
            assert!((*id).qp.is_null() && (*id).recv_cq.is_null());
            assert_eq!(rdma_destroy_id(id), 0);
        }
    }

    /// The queues that the id makes for a queue pair end with it.
    #[test]
    fn a_failure_leaves_no_destroyed_queue_in_the_attributes() {
        // SAFETY: a live id, destroyed once.
        unsafe {
            let (id, mut init) = bound_id();
            init.cap.max_send_sge = u32::MAX;
            assert_eq!(rdma_create_qp(id, (*id).pd, &raw mut init), -1);
            assert!(init.send_cq.is_null() && init.recv_cq.is_null());
            assert!((*id).send_cq.is_null() && (*id).recv_cq.is_null());
            // the application changes what was refused, and repeats the call
            init.cap.max_send_sge = 1;
            assert_eq!(rdma_create_qp(id, (*id).pd, &raw mut init), 0);
            assert_eq!((init.send_cq, init.recv_cq), ((*id).send_cq, (*id).recv_cq));
            rdma_destroy_qp(id);
            assert_eq!(rdma_destroy_id(id), 0);
        }
    }

    /// A call takes the protection domain of its id, which must not be used with another id.
    #[test]
    fn a_failure_leaves_no_domain_of_the_id_in_the_attributes() {
        // SAFETY: a live id, destroyed once.
        unsafe {
            let (id, plain) = bound_id();
            let mut init = ibv_qp_init_attr_ex {
                qp_type: plain.qp_type,
                cap: plain.cap,
                ..ibv_qp_init_attr_ex::default()
            };
            init.cap.max_send_sge = u32::MAX;
            assert_eq!(rdma_create_qp_ex(id, &raw mut init), -1);
            assert!(init.pd.is_null() && init.send_cq.is_null());
            assert_eq!(init.comp_mask, 0);
            init.cap.max_send_sge = 1;
            assert_eq!(rdma_create_qp_ex(id, &raw mut init), 0);
            assert_eq!(init.pd, (*id).pd);
            rdma_destroy_qp(id);
            assert_eq!(rdma_destroy_id(id), 0);
        }
    }

    /// As if a process were stopped while it writes into a receive.
    #[test]
    fn a_queue_pair_in_use_is_destroyed_later() {
        let verbs = &crate::backend().verbs;
        // SAFETY: live objects, each destroyed once.
        unsafe {
            let (id, mut init) = bound_id();
            let context = (*id).verbs;
            let pd = (verbs.ibv_alloc_pd)(context);
            let cq = (verbs.ibv_create_cq)(context, 4, null_mut(), null_mut(), 0);
            // the id makes the queue for the sends
            init.recv_cq = cq;
            assert_eq!(rdma_create_qp(id, pd, &raw mut init), 0);
            let (_, index) = split_qp_num((*(*id).qp).qp_num);
            let process = Process::current().unwrap();
            let own = process.peer(process.slot).unwrap();
            let map = &process.segment.map;
            let used = Use::of_receive(index, Key(5));
            let hazard = Hazard::publish(&own.hazards, map, process.slot, used);
            let flags = libc::fcntl((*context).async_fd, libc::F_GETFL);
            libc::fcntl((*context).async_fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            // one event that another thread handles during the call, and one that is unread
            let qp = Qp::from_ptr((*id).qp);
            qp.fail_asynchronously(qp.incarnation(), IBV_EVENT_QP_FATAL);
            let (mut event, of) = next_event(context).unwrap();
            assert_eq!(of, (*id).qp);
            qp.raise(IBV_EVENT_QP_ACCESS_ERR);
            let handled = AtomicBool::new(false);
            let event = SendPtr(&raw mut event);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // longer than the call waits for the process
                    std::thread::sleep(Duration::from_secs(6));
                    handled.store(true, Ordering::SeqCst);
                    event.acknowledge();
                });
                rdma_destroy_qp(id);
                assert!(handled.load(Ordering::SeqCst), "an event is in use");
            });
            assert!(next_event(context).is_none(), "of a destroyed object");
            assert!((*id).qp.is_null() && (*id).send_cq.is_null());
            assert_eq!((verbs.ibv_dealloc_pd)(pd), libc::EBUSY);
            // no other call waits for that process
            let begin = Instant::now();
            rdma_destroy_qp(id);
            assert!(begin.elapsed() < Duration::from_secs(2));
            assert_eq!((verbs.ibv_destroy_cq)(cq), libc::EBUSY);
            drop(hazard);
            assert_eq!(rdma_destroy_id(id), 0);
            assert_eq!((verbs.ibv_destroy_cq)(cq), 0);
            assert_eq!((verbs.ibv_dealloc_pd)(pd), 0);
            let left = Context::from_ptr(context).children.load(Ordering::Relaxed);
            assert_eq!(left, 0);
        }
    }
}
