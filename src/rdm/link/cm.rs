//! The connection of one link: the steps of the connection manager, which the domain's driver
//! thread executes, and its events. No step holds the endpoint's lock.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::block::LinkBlock;
use super::initiator_sq::LinkSq;
use super::parked_ids::is_port_down;
use super::ring::LinkRing;
use crate::conn::{CmTarget, ConnectRequest, DeviceError};
use crate::errno::{FiErrno, Result};
use crate::initiator::Initiator;
use crate::log::{info_log, warn_log};
use crate::mr::Withdrawn;
use crate::queue::Completion;
use crate::rdm::core::Failure;
use crate::rdm::core::link::LinkKey;
use crate::rdm::keys::{ReadKey, RmaKey};
use crate::rdm::receives::Arrival;
use crate::rdm::shared::Shared;
use crate::rdm::xrc::circuit_cm::XrcStep;
use crate::verbs::{AsyncEvent, AsyncListener, CmEvent, CmEventKind, CmId, Qp};
use crate::wire::rdm::cm::{REQUEST_SIZE, VERSION};
use crate::wire::rdm::{Reason, Rejection, Reply};

/// The connection block of a link, and what posts RMA to the link.
type Rma = (Option<LinkBlock>, Option<Box<Initiator<LinkSq>>>);

/// What ends with a queue pair, because its requests have not completed: READs of messages, and
/// RMA.
#[derive(Debug)]
pub(in crate::rdm) struct Ended {
    pub(in crate::rdm) reads: Vec<ReadKey>,
    pub(in crate::rdm) rma: Vec<RmaKey>,
}

/// A step that the driver executes.
#[derive(Debug)]
pub(in crate::rdm) enum Step {
    /// Dial.
    Dial(Arc<LinkCm>, SocketAddr),
    /// Accept a request.
    Accept(Arc<LinkCm>, ConnectRequest, Reply),
    /// Reject a request, with this private data.
    Reject(ConnectRequest, Vec<u8>),
    /// Disconnect, and move the queue pair to its error state.
    End(Arc<LinkCm>, Option<Arc<Qp>>),
    /// Destroy the queue pair and the identifier of a link that has ended.
    Destroy(Arc<LinkCm>, Option<Arc<Qp>>, Rma, Ended),
    /// Deregister the source of an operation, then report the operation if it has failed. Follows
    /// all other steps of its time; a report, the earlier ends of links too
    /// ([`Step::execute_all`]): the peer's queue pairs have ended.
    Withdraw(Option<Withdrawn>, Option<(Completion, FiErrno)>),
    /// End the registration of a part of a receive, then report the receive, which has failed.
    EndSink(Withdrawn, Box<Arrival>),
    /// A step of an endpoint on XRC.
    Xrc(XrcStep),
}

/// The connection of a link. Its identifier is created by the first step.
pub(in crate::rdm) struct LinkCm {
    shared: Weak<Shared>,
    link: LinkKey,
    /// Private data of the request, on the side that dials.
    request: Option<[u8; REQUEST_SIZE]>,
    id: Mutex<Option<Arc<CmId>>>,
    /// When the peer has disconnected, or this side has begun to end the link.
    disconnected: OnceLock<Instant>,
    device_error: DeviceError,
}

impl std::fmt::Debug for LinkCm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LinkCm({:?})", self.link)
    }
}

impl LinkCm {
    pub(in crate::rdm) fn new(
        shared: &Weak<Shared>,
        link: LinkKey,
        request: Option<[u8; REQUEST_SIZE]>,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: Weak::clone(shared),
            link,
            request,
            id: Mutex::new(None),
            disconnected: OnceLock::new(),
            device_error: DeviceError::default(),
        })
    }

    fn id(&self) -> Result<Arc<CmId>> {
        self.id.lock().clone().ok_or(FiErrno::EOPBADSTATE)
    }

    fn target(self: &Arc<Self>) -> Weak<dyn CmTarget> {
        let target: Weak<Self> = Arc::downgrade(self);
        target
    }

    /// Creates the identifier and resolves the peer's address.
    fn dial(self: &Arc<Self>, shared: &Shared, to: SocketAddr) -> Result<()> {
        let id = {
            let mut registry = shared.driver().dispatcher().registry();
            let id = Arc::new(registry.channel(shared.domain.device())?.create_id()?);
            registry.insert(id.object(), self.target());
            id
        };
        *self.id.lock() = Some(Arc::clone(&id));
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
        let mut registry = shared.driver().dispatcher().registry();
        registry.insert(id.object(), self.target());
        drop(registry);
        *self.id.lock() = Some(Arc::clone(&id));
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
                // not under the lock: a thread that dispatches an event waits for it
                let id = cm.id.lock().take();
                if let Some(id) = &id {
                    shared.driver().dispatcher().registry().remove(id.object());
                }
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

impl CmTarget for LinkCm {
    fn cm_event(&self, event: CmEvent) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let link = self.link;
        let step = match event.kind {
            CmEventKind::AddrResolved => self.addr_resolved(&shared),
            CmEventKind::RouteResolved => self.route_resolved(&shared),
            CmEventKind::Established => {
                if self.request.is_some() {
                    if let Some(qp) = shared.mark_connected(link) {
                        let tuning = shared.tuning();
                        tuning.set_rnr_timer(&qp);
                    }
                    let reply = event.private_data.bytes();
                    shared.apply_event(|core, io| core.replied(link, reply, io));
                }
                Ok(())
            }
            // the dialler has given up before it was connected
            CmEventKind::Rejected if self.request.is_none() => {
                shared.apply_event(|core, io| core.broken(link, io));
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
                shared.apply_event(|core, io| {
                    core.rejected(link, rejection, io);
                    io.dial_ended(core, link);
                });
                Ok(())
            }
            CmEventKind::Unreachable => Err(FiErrno::new(event.status)),
            CmEventKind::Disconnected => {
                let _ = self.disconnected.set(Instant::now());
                shared.apply_event(|core, io| core.broken(link, io));
                Ok(())
            }
            CmEventKind::DeviceRemoval => {
                shared.apply_event(|core, io| core.broken(link, io));
                Ok(())
            }
            CmEventKind::AddrChange
            | CmEventKind::ConnectRequest
            | CmEventKind::ConnectResponse
            | CmEventKind::Other => Ok(()),
        };
        if let Err(error) = step {
            info_log!(EpCtrl, "{link:?} could not be connected: {error}");
            if self.request.is_some() {
                self.failed(&shared, Failure::Silent);
            } else {
                shared.apply_event(|core, io| core.broken(link, io));
            }
        }
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

impl AsyncListener for LinkCm {
    fn async_event(&self, event: AsyncEvent) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        match event {
            AsyncEvent::QpError | AsyncEvent::DeviceFatal => {
                if event == AsyncEvent::QpError {
                    self.device_error.note();
                }
                shared.apply_event(|core, io| core.broken(self.link, io));
            }
            AsyncEvent::QpLastReceive => shared.last_receive(self.link),
            AsyncEvent::QpEstablished => {
                if let Ok(id) = self.id() {
                    let _ = id.notify_established();
                }
            }
            AsyncEvent::CqError | AsyncEvent::SrqLimit | AsyncEvent::Other(_) => {}
        }
    }
}
