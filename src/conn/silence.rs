//! The keepalive probe that a connected endpoint sends to a silent peer: an RDMA write of 0 bytes.
//!
//! A write of length 0 needs no key and no address (InfiniBand C9-88), consumes no receive, and
//! does not involve the peer's CPU; every verbs peer acknowledges it. Its completion produces no
//! entry. [`Keepalive`](crate::queue::keepalive::Keepalive) determines the times.

#![allow(unsafe_code, reason = "posts a request")]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::log::info_log;
use crate::queue::CqMember;
use crate::queue::slots::EndpointSlots;
use crate::verbs::{Qp, SendOpcode, SendRequest, SrqNumber};

/// Detects a silent peer: no request of the queue pair completes between two checks.
#[derive(Debug, Default)]
pub(crate) struct Silence {
    /// Progress mark of both rings at the last check.
    last_seen: AtomicU64,
}

impl Silence {
    /// `peer`: the peer's receive queue, if `qp` is an initiator of XRC. Probes the peer if no
    /// request has completed since the last call. The caller has polled the completions that have
    /// arrived.
    pub(crate) fn probe(
        &self,
        qp: &Qp,
        peer: Option<SrqNumber>,
        member: CqMember,
        slots: &EndpointSlots,
    ) {
        let mark = slots.progress_mark();
        let silent = self.last_seen.swap(mark, Ordering::Relaxed) == mark;
        if !silent || slots.probe.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut request = SendRequest::new(SendOpcode::Write, &[]);
        request.wr_id(member.probe()).signaled(true);
        if let Some(peer) = peer {
            request.to_srq(peer);
        }
        // SAFETY: no buffers.
        if let Err(error) = unsafe { qp.post_send(&mut request) } {
            slots.probe.pending.store(false, Ordering::Release);
            info_log!(
                EpCtrl,
                "queue pair {}: the keepalive probe could not be posted: {error}",
                qp.number()
            );
        }
    }
}
