//! The exchange by which a link on a circuit is dialled: its identifier, and its events.
//! `docs/protocol-xrc.md`, "Links". `shared/circuit_steps.rs` dials, and has what follows from the
//! events; the steps are `XrcStep` (`xrc/circuit_cm.rs`).

use std::sync::{Arc, Weak};

use super::cm::Id;
use super::endpoint::LinkEndpoint;
use crate::conn::CmTarget;
use crate::rdm::core::link::LinkKey;
use crate::verbs::CmEvent;
use crate::wire::rdm::xrc::{LINK_REQUEST_SIZE, LinkRequest};

/// The exchange by which a link is dialled.
pub(in crate::rdm) struct LinkSidr {
    this: Weak<Self>,
    endpoint: Weak<dyn LinkEndpoint>,
    pub(in crate::rdm) link: LinkKey,
    pub(in crate::rdm) request: [u8; LINK_REQUEST_SIZE],
    pub(in crate::rdm) id: Id,
}

impl std::fmt::Debug for LinkSidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LinkSidr({:?})", self.link)
    }
}

impl LinkSidr {
    pub(in crate::rdm) fn new(
        endpoint: Weak<dyn LinkEndpoint>,
        link: LinkKey,
        request: &LinkRequest,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            endpoint,
            link,
            request: request.encode(),
            id: Id::default(),
        })
    }

    /// Receives the events of the identifier.
    pub(in crate::rdm) fn target(&self) -> Weak<dyn CmTarget> {
        let target: Weak<Self> = Weak::clone(&self.this);
        target
    }
}

impl CmTarget for LinkSidr {
    fn cm_event(&self, event: CmEvent) {
        if let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.exchange_event(self, event);
        }
    }
}
