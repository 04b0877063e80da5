//! The keepalive probe that a connected endpoint sends to a silent peer: an RDMA write of 0 bytes.
//!
//! A write of length 0 needs no key and no address (InfiniBand C9-88), consumes no receive, and
//! does not involve the peer's CPU; every verbs peer acknowledges it. Its completion produces no
//! entry.

#![allow(unsafe_code, reason = "posts a request")]

use std::sync::atomic::Ordering;

use super::core::Core;
use crate::conn::State;
use crate::log::info_log;
use crate::queue::keepalive::Member;
use crate::verbs::{SendOpcode, SendRequest};

impl Member for Core {
    fn beat(&self) -> bool {
        if !self.state.is(State::Connected) {
            return false;
        }
        // a control call is under way and may take long: the next beat probes
        let Some(control) = self.control.try_lock() else {
            return true;
        };
        let side = match (&control.tx, control.tx_place) {
            (Some(binding), Some(place)) => Some((binding, place)),
            _ => control.rx.as_ref().zip(control.rx_place),
        };
        let (Some(qp), Some((binding, place))) = (&control.qp, side) else {
            return false;
        };
        // the application may not read this queue, which may hold the last probe's completion
        let _ = binding.cq.progress();
        let rings = &self.rings;
        let mark = rings.progress_mark();
        let silent = self.last_seen.swap(mark, Ordering::Relaxed) == mark;
        if !silent || rings.probe.pending.swap(true, Ordering::AcqRel) {
            return true;
        }
        let request = SendRequest::empty(place.probe(), SendOpcode::Write);
        // SAFETY: no buffers.
        if let Err(error) = unsafe { qp.post_send(&request) } {
            rings.probe.pending.store(false, Ordering::Release);
            info_log!(EpCtrl, "a silent peer could not be probed: {error}");
        }
        true
    }
}
