//! The steps of the connection manager for links, which the domain's driver thread executes, and
//! what follows from the events of links. No step holds the endpoint's lock.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::Shared;
use crate::conn::ConnectRequest;
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::mr::Withdrawn;
use crate::rdm::core::Failure;
use crate::rdm::core::link::LinkKey;
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::cm::LinkCm;
use crate::rdm::link::endpoint::LinkEndpoint;
use crate::rdm::link::parked_ids::is_port_down;
use crate::rdm::link::poster::DriverRequest;
use crate::rdm::link::ring::LinkRing;
use crate::rdm::link::sidr::LinkSidr;
use crate::rdm::step::Step;
use crate::verbs::{AsyncEvent, CmEvent, CmEventKind, CmId, Qp};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::{Reason, Rejection, Reply};

impl LinkEndpoint for Shared {
    fn now(&self) -> u64 {
        Self::now(self)
    }

    fn link_event(&self, cm: &LinkCm, event: CmEvent) {
        let link = cm.link;
        let step = match event.kind {
            CmEventKind::AddrResolved => cm.addr_resolved(self),
            CmEventKind::RouteResolved => cm.route_resolved(self),
            CmEventKind::Established => {
                if cm.request.is_some() {
                    if let Some(qp) = self.mark_connected(link) {
                        let tuning = self.tuning();
                        tuning.set_rnr_timer(&qp);
                    }
                    let reply = event.private_data.bytes();
                    self.apply_event(|core, io| core.replied(link, reply, io));
                }
                Ok(())
            }
            // the dialler has given up before it was connected
            CmEventKind::Rejected if cm.request.is_none() => {
                self.apply_event(|core, io| core.broken(link, io));
                Ok(())
            }
            // the process lives, or the next dial finds no listener
            CmEventKind::Rejected if event.is_unanswered() => Err(FiErrno::ECONNREFUSED),
            CmEventKind::Rejected => {
                let rejection = event.private_data.bytes();
                let reason = Rejection::decode(rejection).map(|rejection| rejection.reason);
                if reason == Ok(Reason::Transport) {
                    warn_log!(
                        EpCtrl,
                        "a peer has FI_PROTO_RDMA_CM_IB_XRC, this endpoint FI_PROTO_IB_RDM: \
                         no connection"
                    );
                }
                self.apply_event(|core, io| {
                    core.rejected(link, rejection, io);
                    io.dial_ended(core, link);
                });
                Ok(())
            }
            CmEventKind::Unreachable => Err(FiErrno::new(event.status)),
            CmEventKind::Disconnected => {
                let _ = cm.disconnected.set(Instant::now());
                self.apply_event(|core, io| core.broken(link, io));
                Ok(())
            }
            CmEventKind::DeviceRemoval => {
                self.apply_event(|core, io| core.broken(link, io));
                Ok(())
            }
            CmEventKind::AddrChange
            | CmEventKind::ConnectRequest
            | CmEventKind::ConnectResponse
            | CmEventKind::Other => Ok(()),
        };
        if let Err(error) = step {
            info_log!(EpCtrl, "{link:?} could not be connected: {error}");
            if cm.request.is_some() {
                cm.failed(self, Failure::Silent);
            } else {
                self.apply_event(|core, io| core.broken(link, io));
            }
        }
    }

    fn link_async_event(&self, cm: &LinkCm, event: AsyncEvent) {
        match event {
            AsyncEvent::QpError | AsyncEvent::DeviceFatal => {
                if event == AsyncEvent::QpError {
                    cm.device_error.note();
                }
                self.apply_event(|core, io| core.broken(cm.link, io));
            }
            AsyncEvent::QpLastReceive => self.last_receive(cm.link),
            AsyncEvent::QpEstablished => {
                if let Ok(id) = cm.id() {
                    let _ = id.notify_established();
                }
            }
            AsyncEvent::CqError | AsyncEvent::SrqLimit | AsyncEvent::Other(_) => {}
        }
    }

    fn exchange_event(&self, sidr: &LinkSidr, event: CmEvent) {
        self.follow_exchange(sidr, &event);
    }

    fn request_driver(&self, request: DriverRequest) {
        self.driver_requests.lock().push(request);
        self.driver.wake(&self.driver_turn);
    }

    fn try_poll(&self) {
        if let Some(mut guard) = self.try_lock()
            && let Some(state) = guard.as_mut()
        {
            let _ = state.poll();
            self.wake_driver_and_readers(state);
        }
    }

    fn acknowledge(&self, link: LinkKey) {
        if let Some(mut guard) = self.try_lock()
            && let Some(state) = guard.as_mut()
        {
            state.io.acknowledge(link);
        }
    }

    fn sever_targets(&self, link: LinkKey) {
        let targets = {
            let mut guard = self.lock();
            let Some(state) = guard.as_mut() else {
                return;
            };
            state.io.targets_of(link)
        };
        for target in targets {
            // an error is that of a target that is in this state already
            let _ = target.set_error();
        }
    }
}

impl LinkCm {
    /// Creates the identifier and resolves the peer's address.
    fn dial(self: &Arc<Self>, shared: &Shared, to: SocketAddr) -> Result<()> {
        let mut registry = shared.driver().dispatcher().registry();
        let id = Arc::new(registry.channel(shared.domain.device())?.create_id()?);
        self.set_id(registry, &id);
        shared.tuning().set_traffic_class(&id);
        let (from, to) = shared.path(to);
        id.resolve_addr(from, to)
    }

    /// Creates the queue pair on the identifier of a request, and replies.
    fn accept(
        self: &Arc<Self>,
        shared: &Shared,
        request: ConnectRequest,
        mut reply: Reply,
    ) -> Result<()> {
        let (id, _) = request.take().ok_or(FiErrno::EINVAL)?;
        let id = Arc::new(id);
        self.set_id(shared.driver().dispatcher().registry(), &id);
        let tuning = shared.tuning();
        let accepted = self.create_qp(shared, &id).and_then(|()| {
            tuning.set_traffic_class(&id);
            tuning.set_ack_timeout(&id);
            // the peer's first packet may arrive before the call returns
            let qp = shared.mark_connected(self.link).ok_or(FiErrno::ECANCELED)?;
            let block = shared.block_of(self.link);
            (reply.terms.block_addr, reply.terms.block_rkey) = block;
            id.accept(&tuning.conn_param(&reply.encode()))?;
            Ok(qp)
        });
        let qp = accepted.inspect_err(|_| {
            // an error is that of a request which the connection manager has rejected
            let busy = Rejection {
                version: VERSION,
                epoch: Some(reply.epoch),
                id: reply.id,
                newest: None,
                reason: Reason::Busy,
            };
            let _ = id.reject(&busy.encode());
        })?;
        tuning.set_rnr_timer(&qp);
        Ok(())
    }

    fn create_qp(self: &Arc<Self>, shared: &Shared, id: &Arc<CmId>) -> Result<()> {
        let qp = Arc::new(shared.create_qp(id)?);
        let mut block = shared.create_block(self.link, Some(&qp))?;
        let listener: Weak<Self> = Arc::downgrade(self);
        shared.domain.device().listen(qp.object(), listener);
        // the peer sends to a ring that exists, whether or not this side reads it
        let ring = match shared.uses_rings() {
            true => LinkRing::create(&qp, self.link),
            false => None,
        };
        if shared.set_qp(self.link, &qp, ring, &mut block) {
            Ok(())
        } else {
            // the link was ended meanwhile
            shared.domain.device().unlisten(qp.object());
            let block = block.map(LinkBlock::leave);
            drop(qp);
            drop(block);
            Err(FiErrno::ECANCELED)
        }
    }

    /// Whether the results of requests are still awaited although the link ends.
    fn awaits_answers(&self, shared: &Shared) -> bool {
        // the next request of a peer that has disconnected can arrive before its disconnect request
        let since = self.disconnected.get_or_init(Instant::now);
        shared.awaits_answers(self.link, *since)
    }

    /// The dial has failed without a message of the peer.
    fn failed(&self, shared: &Shared, failure: Failure) {
        shared.apply_event(|core, io| {
            core.dial_failed(self.link, failure, io);
            io.dial_ended(core, self.link);
        });
    }
}

impl Step {
    /// Whether the step follows the others of its time.
    pub(in crate::rdm) fn is_last(&self) -> bool {
        matches!(self, Self::Withdraw(..) | Self::EndSink(..))
    }

    /// Whether the step reports an operation of which the peer can read or write the memory until
    /// its queue pair has ended.
    fn needs_ends(&self) -> bool {
        matches!(self, Self::Withdraw(_, Some(_)) | Self::EndSink(..))
    }

    /// Executes steps, each with its time: that of the call which was the first to have it. Returns
    /// those that are to be executed again later: a step that waits, and if it ends a link, the
    /// steps of the same time or later that need the end. Ends that begin later delay no step.
    #[must_use]
    pub(in crate::rdm) fn execute_all(
        mut steps: Vec<(u64, Self)>,
        shared: &Shared,
    ) -> Vec<(u64, Self)> {
        steps.sort_by_key(|(_, step)| step.is_last());
        let (mut left, mut first_end) = (Vec::new(), u64::MAX);
        for (time, step) in steps {
            if first_end <= time && step.needs_ends() {
                // its peer may be that of the link
                left.push((time, step));
                continue;
            }
            let again = step.execute(shared);
            if let Some(Self::End(..)) = again {
                first_end = first_end.min(time);
            }
            left.extend(again.map(|step| (time, step)));
        }
        left
    }

    /// Executes the step. `Some`: it is to be executed again later.
    fn execute(self, shared: &Shared) -> Option<Self> {
        match self {
            Self::Dial(cm, to) => {
                if let Err(error) = cm.dial(shared, to) {
                    info_log!(EpCtrl, "{to} cannot be dialled: {error}");
                    cm.failed(shared, Failure::Silent);
                }
            }
            Self::Accept(cm, request, reply) => match cm.accept(shared, request, reply) {
                Ok(()) => shared.accepted(cm.link),
                Err(error) => {
                    info_log!(EpCtrl, "a connection could not be accepted: {error}");
                    shared.apply_event(|core, io| core.broken(cm.link, io));
                }
            },
            Self::Reject(request, private_data) => {
                if let Err(error) = request.reject(&private_data) {
                    info_log!(EpCtrl, "a connection could not be rejected: {error}");
                }
            }
            Self::End(cm, qp) => {
                let unanswered = |qp: &Arc<Qp>| cm.device_error.is_unanswered(qp);
                if qp.as_ref().is_some_and(unanswered) || cm.awaits_answers(shared) {
                    return Some(Self::End(cm, qp));
                }
                if let Some(qp) = &qp {
                    // an error is that of a queue pair that is in this state already
                    let _ = qp.set_error();
                }
                // without a port the connection manager sends nothing
                if let Ok(id) = cm.id()
                    && !is_port_down(shared.domain.device(), &id)
                {
                    // an error is that of a connection that does not exist any more
                    let _ = id.disconnect();
                }
                shared.begin_drain(cm.link);
            }
            Self::Xrc(step) => step.execute(shared),
            Self::Withdraw(source, failed) => {
                if let Some(Err(source)) = source.map(Withdrawn::end) {
                    return Some(Self::Withdraw(Some(source), failed));
                }
                if let Some((completion, error)) = failed {
                    shared.apply_event(|_, io| io.withdrawn(completion, error));
                }
            }
            Self::EndSink(sink, failed) => {
                if let Err(sink) = sink.end() {
                    return Some(Self::EndSink(sink, failed));
                }
                shared.apply_event(|_, io| io.sink_ended(&failed));
            }
            Self::Destroy(cm, qp, (block, initiator), ended) => {
                if let Some(qp) = &qp {
                    shared.domain.device().unlisten(qp.object());
                }
                let id = cm.take_id(shared.driver().dispatcher());
                // the block of the connection is behind the queue pair
                let block = block.map(LinkBlock::leave);
                drop(initiator);
                drop(qp);
                drop(block);
                if let Some(id) = id.filter(|id| is_port_down(shared.domain.device(), id)) {
                    shared.parked.park(id);
                }
                if !ended.reads.is_empty() || !ended.rma.is_empty() {
                    shared.apply_event(|core, io| {
                        io.reads_ended(cm.link, ended.reads);
                        io.rma_ended(core, &ended.rma);
                    });
                }
            }
        }
        None
    }
}

impl LinkCm {
    fn addr_resolved(&self, shared: &Shared) -> Result<()> {
        let id = self.id()?;
        let this = shared.cm_of(self.link).ok_or(FiErrno::ECANCELED)?;
        this.create_qp(shared, &id)?;
        id.resolve_route()
    }

    fn route_resolved(&self, shared: &Shared) -> Result<()> {
        let id = self.id()?;
        let request = self.request.ok_or(FiErrno::EINVAL)?;
        if is_port_down(shared.domain.device(), &id) {
            return Err(FiErrno::ENETDOWN);
        }
        let tuning = shared.tuning();
        tuning.set_ack_timeout(&id);
        id.connect(&tuning.conn_param(&request))?;
        shared.apply_event(|core, _| core.requesting(self.link));
        Ok(())
    }
}
