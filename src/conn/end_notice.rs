//! The notice by which a connected endpoint on XRC ends its connection: an exchange without a
//! connection (SIDR).
//!
//! A notice is lost if the process ends before it is sent. The initiator of the connection, to
//! which nothing is posted any more, lives as long as the notice: a device that reports the end of
//! an initiator's process (`soft0`) reports it to the peer then.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::CmTarget;
use super::circuit::{Circuit, CircuitUser};
use super::circuits::{Circuits, Step};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{CmEvent, CmEventKind, CmId};
use crate::wire::msg_xrc::End;

/// What is kept for the peer of an ended connection until it has answered the notice of the end, or
/// cannot access it any more. Dropped then. Thread safe.
pub(crate) trait Keep: Send + Sync {
    /// The peer has not answered in time: nothing shall wait for it any more.
    fn give_up(&self);

    /// Whether requests of the peer may still arrive. May wait for other processes; the caller
    /// holds no lock of an endpoint or of a circuit.
    fn is_needed(&self) -> bool;

    /// Ends what lets requests of the peer arrive. As [`Self::is_needed`].
    fn cut_off(&self);
}

/// A notice under way. Dropped, it releases what was kept for the peer.
pub(super) struct Notice {
    this: Weak<Self>,
    circuits: Weak<Circuits>,
    path: (Option<SocketAddr>, SocketAddr),
    end: End,
    id: Mutex<Option<Arc<CmId>>>,
    /// Gets [`CircuitUser::process_ended`] if no process listens at the address.
    asks: Option<Weak<dyn CircuitUser>>,
    keep: Option<Box<dyn Keep>>,
    /// A leaf.
    circuit: Mutex<Option<Arc<Circuit>>>,
}

impl std::fmt::Debug for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Notice({:?}, {:?})", self.path, self.end)
    }
}

impl Notice {
    /// `asks`: the user that asks whether the process lives. `circuit`: that of the connection,
    /// which lives until [`Self::release`].
    pub(super) fn new(
        circuits: &Weak<Circuits>,
        path: (Option<SocketAddr>, SocketAddr),
        end: End,
        asks: Option<Weak<dyn CircuitUser>>,
        keep: Option<Box<dyn Keep>>,
        circuit: Option<Arc<Circuit>>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            circuits: Weak::clone(circuits),
            path,
            end,
            id: Mutex::default(),
            asks,
            keep,
            circuit: Mutex::new(circuit),
        })
    }

    /// What is kept for the peer.
    pub(super) fn keep(&self) -> Option<&dyn Keep> {
        self.keep.as_deref()
    }

    /// The circuit ends if it has no other user. The caller holds no lock.
    pub(super) fn release(&self) {
        let circuit = self.circuit.lock().take();
        drop(circuit);
    }

    /// Whether the circuit lives until [`Self::release`].
    pub(super) fn retains(&self, circuit: &Arc<Circuit>) -> bool {
        let retained = self.circuit.lock();
        retained
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, circuit))
    }

    /// Begins to send. The driver's thread. After [`Self::take_id`] it can be called again.
    pub(super) fn send(&self, circuits: &Circuits) {
        if let Err(error) = self.resolve(circuits) {
            self.fail(error);
        }
    }

    fn resolve(&self, circuits: &Circuits) -> Result<()> {
        let id = {
            let mut registry = circuits.driver().dispatcher().registry();
            let id = Arc::new(registry.channel(circuits.device())?.create_sidr_id()?);
            let target: Weak<Self> = Weak::clone(&self.this);
            registry.insert(id.object(), target);
            id
        };
        *self.id.lock() = Some(Arc::clone(&id));
        // the port of the connection may be that of a listener, or of another notice
        let from = self.path.0.map(|from| SocketAddr::new(from.ip(), 0));
        id.resolve_addr(from, self.path.1)
    }

    fn fail(&self, error: FiErrno) {
        let to = self.path.1;
        info_log!(
            EpCtrl,
            "{to} is not notified of the end of a connection: {error}"
        );
        self.push(Step::FailNotice);
    }

    fn push(&self, step: fn(Arc<Self>) -> Step) {
        if let (Some(circuits), Some(this)) = (self.circuits.upgrade(), self.this.upgrade()) {
            circuits.push(step(this));
        }
    }

    pub(super) fn take_id(&self) -> Option<Arc<CmId>> {
        self.id.lock().take()
    }
}

impl CmTarget for Notice {
    fn cm_event(&self, event: CmEvent) {
        let id = self.id.lock().clone().ok_or(FiErrno::EOPBADSTATE);
        let step = match event.kind {
            CmEventKind::AddrResolved => id.and_then(|id| id.resolve_route()),
            CmEventKind::RouteResolved => id.and_then(|id| id.request_service(&self.end.encode())),
            CmEventKind::Established => {
                self.push(Step::EndNotice);
                Ok(())
            }
            CmEventKind::Rejected | CmEventKind::Unreachable => {
                let ended = event.is_no_service();
                let asks = self.asks.as_ref().filter(|_| ended);
                if let Some(user) = asks.and_then(Weak::upgrade) {
                    user.process_ended();
                }
                if ended && self.keep.is_some() {
                    // nor are there queue pairs whose requests could arrive
                    self.push(Step::EndNotice);
                    return;
                }
                Err(FiErrno::ECONNREFUSED)
            }
            _ => Ok(()),
        };
        if let Err(error) = step {
            self.fail(error);
        }
    }
}
