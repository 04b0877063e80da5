//! The calls that create and destroy ids, and move them to another channel.

use std::sync::Arc;

use libc::{c_int, c_void};
use rdma_core_sys::*;

use super::address::Space;
use super::channel::{Channel, Spare};
use super::guard::{lock, status};
use super::id::{Id, Shared, migrate};
use super::qp;
use super::state::Phase;
use super::synchronous::acknowledge_last;
use crate::sys::Errno;

pub(super) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    status(|| {
        if id.is_null() {
            return Err(Errno(libc::EINVAL));
        }
        let (space, qp_type) = match ps {
            RDMA_PS_TCP => (Space::Tcp, IBV_QPT_RC),
            RDMA_PS_UDP => (Space::Udp, IBV_QPT_UD),
            // The application may set another type of queue pair in the id.
            RDMA_PS_IB => (Space::Ib, IBV_QPT_RC),
            // Its queue keys are those of a network interface's multicast group.
            RDMA_PS_IPOIB => return Err(Errno(libc::EPROTONOSUPPORT)),
            // As in the kernel (`ucma_get_qp_type` of `drivers/infiniband/core/ucma.c`).
            _ => return Err(Errno(libc::EINVAL)),
        };
        let own_channel = if channel.is_null() {
            Some(Channel::create()?)
        } else {
            None
        };
        let channel = own_channel.unwrap_or(channel);
        // SAFETY: the caller promises a live channel, or it was made above.
        let events = unsafe { Channel::events_of(channel) };
        let shared = Shared::new(Arc::clone(&events), Phase::Idle);
        events.enroll(&shared);
        {
            let mut state = lock(&shared.state);
            state.own_channel = own_channel;
            state.space = space;
        }
        let made = Id::make(
            &shared,
            rdma_cm_id {
                channel,
                context,
                ps,
                qp_type,
                ..rdma_cm_id::default()
            },
        );
        // SAFETY: the caller promises room for a pointer.
        unsafe { *id = made.cast() };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        qp::destroy_unfinished();
        Id::abandon(&shared);
        // SAFETY: the caller promises a live id.
        unsafe { acknowledge_last(id) };
        shared.wait_for_acknowledgements(shared.reported());
        let own_channel = lock(&shared.state).own_channel.take();
        // SAFETY: no other thread uses the id or, if the id owned it, its channel.
        unsafe {
            Id::free(id.cast());
            if let Some(channel) = own_channel {
                Channel::destroy(channel);
            }
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    status(|| {
        // SAFETY: the caller promises a live id.
        let shared = unsafe { Id::shared_of(id)? };
        let left = lock(&shared.state).own_channel;
        if left.is_some_and(|own| channel.is_null() || channel == own) {
            return Err(Errno(libc::EINVAL));
        }
        let own = channel.is_null().then(Spare::create).transpose()?;
        let channel = own.as_ref().map_or(channel, Spare::channel);
        // SAFETY: the caller promises a live channel, or it was made above.
        let events = unsafe { Channel::events_of(channel) };
        // As rdma_migrate_id(3): the events of the channel that the id leaves. Another thread may
        // already hold one of the new channel.
        let (reported, left) = migrate(&shared, &events, own)?;
        if left.is_some() {
            // SAFETY: the caller promises a live id.
            unsafe { acknowledge_last(id) };
        }
        shared.wait_for_acknowledgements(reported);
        // SAFETY: the id lives; no other id uses its own channel, which it has left.
        unsafe {
            (*id).channel = channel;
            if let Some(left) = left {
                Channel::destroy(left);
            }
        }
        Ok(())
    })
}
