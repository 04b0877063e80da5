//! The notice by which a connected endpoint on XRC ends its connection: an exchange without a
//! connection (SIDR).

use std::any::Any;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::CmTarget;
use super::circuit::CircuitUser;
use super::circuits::{Circuits, Step};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{CmEvent, CmEventKind, CmId};
use crate::wire::msg_xrc::End;

/// A notice under way. Dropped, it releases what was kept for the peer.
pub(super) struct Notice {
    this: Weak<Self>,
    circuits: Weak<Circuits>,
    path: (Option<SocketAddr>, SocketAddr),
    end: End,
    id: Mutex<Option<Arc<CmId>>>,
    /// Gets [`CircuitUser::process_ended`] if nobody listens at the address.
    asks: Option<Weak<dyn CircuitUser>>,
    _keep: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Notice({:?}, {:?})", self.path, self.end)
    }
}

impl Notice {
    /// `asks`: the user that asks whether the process lives.
    pub(super) fn new(
        circuits: &Weak<Circuits>,
        path: (Option<SocketAddr>, SocketAddr),
        end: End,
        asks: Option<Weak<dyn CircuitUser>>,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            circuits: Weak::clone(circuits),
            path,
            end,
            id: Mutex::default(),
            asks,
            _keep: keep,
        })
    }

    /// Begins to send. The driver's thread.
    pub(super) fn send(&self, circuits: &Circuits) {
        if let Err(error) = self.resolve(circuits) {
            self.failed(error);
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

    fn failed(&self, error: FiErrno) {
        let to = self.path.1;
        info_log!(EpCtrl, "{to} is not told the end of a connection: {error}");
        self.done();
    }

    fn done(&self) {
        if let (Some(circuits), Some(this)) = (self.circuits.upgrade(), self.this.upgrade()) {
            circuits.push(Step::EndNotice(this));
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
                self.done();
                Ok(())
            }
            CmEventKind::Rejected | CmEventKind::Unreachable => {
                let asks = self.asks.as_ref().filter(|_| event.is_no_service());
                if let Some(user) = asks.and_then(Weak::upgrade) {
                    user.process_ended();
                }
                Err(FiErrno::ECONNREFUSED)
            }
            _ => Ok(()),
        };
        if let Err(error) = step {
            self.failed(error);
        }
    }
}
