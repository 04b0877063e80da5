//! The connection of one link: its identifier, and its events. `shared/steps.rs` has the steps of
//! the connection manager, and what follows from the events.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::endpoint::LinkEndpoint;
use crate::conn::{CmTarget, DeviceError, Dispatcher, Registry};
use crate::errno::{FiErrno, Result};
use crate::rdm::core::link::LinkKey;
use crate::rdm::table_keys::{ReadKey, RmaKey};
use crate::verbs::{AsyncEvent, AsyncListener, CmEvent, CmId};
use crate::wire::rdm::cm::REQUEST_SIZE;

/// What ends with a queue pair, because its requests have not completed: READs of messages, and
/// RMA.
#[derive(Debug)]
pub(in crate::rdm) struct Ended {
    pub(in crate::rdm) reads: Vec<ReadKey>,
    pub(in crate::rdm) rma: Vec<RmaKey>,
}

/// An identifier that the first step creates.
#[derive(Debug, Default)]
pub(in crate::rdm) struct Id(Mutex<Option<Arc<CmId>>>);

impl Id {
    /// # Errors
    /// `EOPBADSTATE`: no step has created it, or it was destroyed.
    pub(in crate::rdm) fn get(&self) -> Result<Arc<CmId>> {
        self.0.lock().clone().ok_or(FiErrno::EOPBADSTATE)
    }

    /// Sets the identifier, of which `target` gets the events.
    pub(in crate::rdm) fn set(
        &self,
        mut registry: Registry<'_>,
        id: &Arc<CmId>,
        target: Weak<dyn CmTarget>,
    ) {
        registry.insert(id.object(), target);
        drop(registry);
        *self.0.lock() = Some(Arc::clone(id));
    }

    /// Takes the identifier, which receives no event any more, to destroy it. Not under the
    /// endpoint's lock, nor the dispatcher's: a thread that dispatches an event waits for it.
    pub(in crate::rdm) fn take(&self, dispatcher: &Dispatcher) -> Option<Arc<CmId>> {
        let id = self.0.lock().take();
        if let Some(id) = &id {
            dispatcher.registry().remove(id.object());
        }
        id
    }
}

/// The connection of a link. Its identifier is created by the first step.
pub(in crate::rdm) struct LinkCm {
    endpoint: Weak<dyn LinkEndpoint>,
    pub(in crate::rdm) link: LinkKey,
    /// Private data of the request, on the side that dials.
    pub(in crate::rdm) request: Option<[u8; REQUEST_SIZE]>,
    id: Id,
    /// When the peer has disconnected, or this side has begun to end the link.
    pub(in crate::rdm) disconnected: OnceLock<Instant>,
    pub(in crate::rdm) device_error: DeviceError,
}

impl std::fmt::Debug for LinkCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LinkCm({:?})", self.link)
    }
}

impl LinkCm {
    pub(in crate::rdm) fn new(
        endpoint: Weak<dyn LinkEndpoint>,
        link: LinkKey,
        request: Option<[u8; REQUEST_SIZE]>,
    ) -> Arc<Self> {
        Arc::new(Self {
            endpoint,
            link,
            request,
            id: Id::default(),
            disconnected: OnceLock::new(),
            device_error: DeviceError::default(),
        })
    }

    /// The identifier.
    ///
    /// # Errors
    /// As of [`Id::get`].
    pub(in crate::rdm) fn id(&self) -> Result<Arc<CmId>> {
        self.id.get()
    }

    /// Sets the identifier, whose events follow.
    pub(in crate::rdm) fn set_id(self: &Arc<Self>, registry: Registry<'_>, id: &Arc<CmId>) {
        let target: Weak<Self> = Arc::downgrade(self);
        self.id.set(registry, id, target);
    }

    /// As [`Id::take`].
    pub(in crate::rdm) fn take_id(&self, dispatcher: &Dispatcher) -> Option<Arc<CmId>> {
        self.id.take(dispatcher)
    }
}

impl CmTarget for LinkCm {
    fn cm_event(&self, event: CmEvent) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.link_event(self, event);
        }
    }
}

impl AsyncListener for LinkCm {
    fn async_event(&self, event: AsyncEvent) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.link_async_event(self, event);
        }
    }
}
