//! A reciprocal request that makes a circuit (XRC), answered by this side: until the peer has
//! confirmed the answer, the end of the exchange is that of the connection.
//!
//! This side has reported the connection by then. The peer's initiator is not connected before it
//! has the answer: if the peer's process ends meanwhile, no request and no device shows that.
//!
//! The confirmation (ready-to-use) is a datagram that its sender does not repeat. A connection
//! whose confirmation is lost has not ended: the peer ends its identifier 1 s later, which shows
//! the same.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::CmTarget;
use super::circuit::CircuitUser;
use super::circuits::Circuits;
use super::incoming::Incoming;
use crate::log::info_log;
use crate::verbs::{CmEvent, CmEventKind};

/// The request, whose identifier it keeps.
pub(super) struct Answered {
    circuits: Weak<Circuits>,
    request: Incoming,
    user: Weak<dyn CircuitUser>,
    /// The answer is confirmed, or the exchange has ended.
    decided: AtomicBool,
}

impl std::fmt::Debug for Answered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answered({:?})", self.request)
    }
}

impl Answered {
    pub(super) fn new(
        circuits: &Weak<Circuits>,
        request: Incoming,
        user: Weak<dyn CircuitUser>,
    ) -> Arc<Self> {
        Arc::new(Self {
            circuits: Weak::clone(circuits),
            request,
            user,
            decided: AtomicBool::new(false),
        })
    }

    /// The identity of the identifier in events.
    pub(super) fn object(&self) -> usize {
        self.request.object()
    }

    /// Returns whether it was not decided before.
    fn mark_decided(&self) -> bool {
        !self.decided.swap(true, Ordering::AcqRel)
    }

    /// The exchange fails: the end of the connection, unless the peer has confirmed the answer.
    fn end(&self) {
        if self.mark_decided()
            && let Some(user) = self.user.upgrade()
        {
            let peer = self.request.addresses().map(|(_, peer)| peer);
            info_log!(
                EpCtrl,
                "{peer:?} does not confirm a connection: it has ended"
            );
            user.peer_ended();
        }
    }
}

impl CmTarget for Answered {
    fn cm_event(&self, event: CmEvent) {
        match event.kind {
            // Only an identifier that is established disconnects. For one that has the answer and
            // is not established, the kernel of a process that ends sends a rejection
            // (`cm_destroy_id` of cm.c), and so does the embedded device.
            CmEventKind::Established | CmEventKind::Disconnected => {
                self.mark_decided();
            }
            CmEventKind::Rejected | CmEventKind::Unreachable | CmEventKind::DeviceRemoval => {
                self.end();
            }
            _ => return,
        }
        if let Some(circuits) = self.circuits.upgrade() {
            circuits.note_confirmation(self);
        }
    }
}
