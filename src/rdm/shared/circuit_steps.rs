//! The steps of the exchanges by which links are dialled, and what follows from their events. No
//! step holds the endpoint's lock. `docs/protocol-xrc.md`, "Links".

use std::net::SocketAddr;
use std::sync::Arc;

use super::Shared;
use crate::errno::Result;
use crate::log::info_log;
use crate::rdm::core::Failure;
use crate::rdm::link::sidr::LinkSidr;
use crate::verbs::{CmEvent, CmEventKind};

impl LinkSidr {
    pub(in crate::rdm) fn dial(&self, shared: &Shared, to: SocketAddr) -> Result<()> {
        let id = {
            let mut registry = shared.driver().dispatcher().registry();
            let id = Arc::new(registry.channel(shared.domain.device())?.create_sidr_id()?);
            registry.insert(id.object(), self.target());
            id
        };
        self.id.set(&id);
        let (from, to) = shared.path(to);
        id.resolve_addr(from, to)
    }

    pub(in crate::rdm) fn failed(&self, shared: &Shared, failure: Failure) {
        shared.apply_event(|core, io| {
            if io.is_exchange(self.link, self) {
                io.exchange_failed(core, self.link, failure);
            }
        });
    }

    pub(super) fn follow_event(&self, shared: &Shared, event: CmEvent) {
        let step = match event.kind {
            CmEventKind::AddrResolved => self.id.get().and_then(|id| id.resolve_route()),
            CmEventKind::RouteResolved => {
                let id = self.id.get();
                id.and_then(|id| id.request_service(&self.request))
            }
            CmEventKind::Established => {
                let answer = event.private_data.bytes();
                shared.apply_event(|core, io| {
                    if io.is_exchange(self.link, self) {
                        io.answered(core, self.link, answer);
                    }
                });
                Ok(())
            }
            CmEventKind::Unreachable | CmEventKind::Rejected => {
                let failure = match event.is_no_service() {
                    true => Failure::Refused,
                    false => Failure::Silent,
                };
                self.failed(shared, failure);
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = step {
            info_log!(EpCtrl, "{:?} could not be dialled: {error}", self.link);
            self.failed(shared, Failure::Silent);
        }
    }
}
