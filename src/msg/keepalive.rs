//! The sign of life that a connected endpoint asks of a silent peer: an RDMA write of no bytes.
//!
//! A write of length 0 needs no key and no address (InfiniBand C9-88), takes no receive, and the
//! peer's CPU has no part in it; any verbs peer acknowledges it. Its completion is no entry.

#![allow(unsafe_code, reason = "posts a request")]

use std::sync::atomic::Ordering;

use super::core::Core;
use super::state::State;
use crate::keepalive::Member;
use crate::log::info_log;
use crate::verbs::{SendOpcode, SendRequest};

impl Member for Core {
    fn beat(&self) -> bool {
        if !self.state.is(State::Connected) {
            return false;
        }
        // a control call is under way: it may take long, and the next beat will do
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
        // the application may have no reason to read this queue: the last probe's answer is there
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
