//! Keys of peers that links hold, and the engine's own requests for them: leases,
//! acknowledgements, and what a link asks of the driver. `docs/protocol.md`, "Stale keys".

use std::time::Instant;

use super::Executor;
use super::rma_recovery::Failure;
use crate::initiator::Initiator;
use crate::log::info_log;
use crate::queue::slots::{EngineRequest, LEASE_CHECK, LEASE_RETRY, Lease};
use crate::rdm::core::Core;
use crate::rdm::core::link::LinkKey;
use crate::rdm::link::poster::DriverRequest;
use crate::verbs::Wc;
use crate::wire::introduction::Introduction;
use crate::wire::rdm::Terms;

impl Executor {
    /// One of the engine's own requests has completed.
    pub(super) fn engine_request_completed(
        &mut self,
        core: &mut Core<Self>,
        link: LinkKey,
        kind: u16,
        wc: &Wc,
    ) {
        let failure = Failure::of(self.links.status(link, wc), self.not_executed);
        let Some(record) = self.links.get_mut(link) else {
            return;
        };
        let Some(kind) = EngineRequest::of(kind.into()) else {
            return;
        };
        let block = record
            .block
            .as_ref()
            .filter(|block| !block.poster.is_abandoned());
        let again = block.is_some_and(|block| block.poster.request_ended(kind, failure.is_none()));
        if block.is_some() && record.port.is_some() {
            self.room_on_circuit(link, 1);
        }
        if again && let Some(endpoint) = self.endpoint.upgrade() {
            endpoint.request_driver(DriverRequest::Progress(link));
        }
        if let Some(failure) = failure {
            info_log!(EpData, "{kind:?} of {link:?} failed: {failure:?}");
            self.request_failed(core, link, &failure);
        }
    }

    /// The terms of a link have arrived: this side can report revocations to the peer.
    pub(super) fn introduce(&mut self, link: LinkKey, terms: &Terms) {
        let Some(record) = self.links.get_mut(link) else {
            return;
        };
        let Some(block) = record
            .block
            .as_ref()
            .filter(|_| !terms.block_addr.is_null())
        else {
            return;
        };
        let peer = Introduction {
            application_keys: terms.application_keys,
            block_addr: terms.block_addr,
            block_rkey: terms.block_rkey,
            auth: None,
        };
        block.notifier().introduce(peer);
        record.introduction = Some(peer);
    }

    /// Acknowledges the revocations of a link's peer.
    pub(in crate::rdm) fn acknowledge(&mut self, link: LinkKey) {
        let record = self.links.get_mut(link).filter(|record| !record.down);
        if let Some(initiator) = record.and_then(|record| record.initiator.as_deref_mut()) {
            initiator.acknowledge();
        }
    }

    /// Acknowledges the revocations of all peers whose keys are held.
    pub(in crate::rdm) fn acknowledge_all(&mut self) {
        for at in 0..self.rma.leases.len() {
            let (link, _) = self.rma.leases[at];
            self.acknowledge(link);
        }
    }

    /// Does what a link has asked the driver for.
    pub(in crate::rdm) fn serve_driver_request(
        &mut self,
        core: &mut Core<Self>,
        request: DriverRequest,
    ) {
        match request {
            DriverRequest::Progress(link) => {
                let record = self
                    .links
                    .get_mut(link)
                    .and_then(|record| record.block.as_ref());
                if let Some(block) = record.filter(|block| block.poster.take_call()) {
                    block.notifier().notify_again();
                }
            }
            DriverRequest::Lease(link) => {
                if !self.rma.leases.iter().any(|(of, _)| *of == link) {
                    self.rma.leases.push((link, Instant::now() + LEASE_CHECK));
                }
            }
            DriverRequest::Sever(link) => {
                // they are in the error state: no event reports that
                for target in self.targets_of(link) {
                    self.break_target(target.number());
                }
                self.broken(core, link);
            }
        }
    }

    /// Handles expired leases. Returns when the next one expires.
    pub(in crate::rdm) fn tend_leases(&mut self, now: Instant) -> Option<Instant> {
        let mut leases = std::mem::take(&mut self.rma.leases);
        leases.retain_mut(|(link, due)| {
            if *due > now {
                return true;
            }
            let record = self.links.get_mut(*link);
            if record.as_ref().is_some_and(|record| record.down) {
                // the end of the link returns the keys
                *due = now + LEASE_CHECK;
                return true;
            }
            let initiator = record.and_then(|record| record.initiator.as_deref_mut());
            let lease = initiator.map_or(Lease::Over, Initiator::lease_expired);
            *due = now
                + match lease {
                    Lease::Busy => LEASE_RETRY,
                    Lease::Held | Lease::Over => LEASE_CHECK,
                };
            lease != Lease::Over
        });
        leases.append(&mut self.rma.leases);
        self.rma.leases = leases;
        self.rma.leases.iter().map(|(_, due)| *due).min()
    }
}
