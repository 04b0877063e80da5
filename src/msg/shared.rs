//! The state that an endpoint shares with its callbacks.
//!
//! Callbacks (events of the connection manager, failed operations, asynchronous events) may briefly
//! hold the last reference, with locks held; so no drop in this module acquires a lock.
//! [`Shared::close`] releases everything; the owning endpoint calls it.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::recv::RxSide;
use super::tx::TxSide;
use super::xrc::{Ends, XrcSide};
use crate::conn::silence::Silence;
use crate::conn::{CmSink, CmTarget, Connection, DeviceError, Incoming, RevocationNotifier, Side};
use crate::domain::Domain;
use crate::errno::Result;
use crate::initiator::{Lengths, QpLink};
use crate::mr::ConnectionBlock;
use crate::msg::{EndpointConfig, SharedRx};
use crate::queue::event_cell::{Cell, Event};
use crate::queue::slots::{EndpointSlots, FailureListener};
use crate::queue::{Counter, CqBinding, CqMember};
use crate::verbs::{CmId, Pd, PrivateData, Qp, Sge};
use crate::wire::cm_data::CmData;
use crate::wire::introduction::Introduction;

/// What an endpoint is made from.
#[derive(Debug)]
pub(crate) enum Origin {
    /// A connection request: its identifier and private data.
    Request(CmId, PrivateData),
    /// A connection request of an endpoint on XRC.
    XrcRequest(Incoming),
    /// The identifier of a passive endpoint, bound to its address.
    Bound(CmId),
}

/// A receive posted before the queue pair exists.
#[derive(Debug)]
pub(crate) struct EarlyRecv {
    pub(crate) number: u32,
    pub(crate) context: usize,
    pub(crate) sges: Vec<Sge>,
}

/// Connection state, outside the fast path.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) side: Side,
    pub(crate) qp: Option<Arc<Qp>>,
    pub(crate) tx: Option<CqBinding>,
    pub(crate) rx: Option<CqBinding>,
    /// The shared receive context, if the endpoint uses one.
    pub(crate) srx: Option<Arc<SharedRx>>,
    /// Counters of the peer's operations, and the event cell in which the peer counts them; the
    /// cell is allocated with the queue pair.
    pub(super) remote_counters: Vec<(Event, Arc<Counter>)>,
    pub(super) cell: Option<Arc<Cell>>,
    /// Places in the tables of the completion queues, once enabled.
    pub(crate) tx_member: Option<CqMember>,
    pub(crate) rx_member: Option<CqMember>,
    /// The application's data for the connection request.
    pub(crate) data: CmData,
    /// This side's connection block, once there is a queue pair.
    pub(super) block: Option<Arc<ConnectionBlock>>,
    /// The introduction in the peer's connection request.
    pub(super) introduction: Option<Introduction>,
    /// Of an endpoint on XRC.
    pub(super) xrc: XrcSide,
    /// Notifies the peer of revocations, from when the peer is sent the address of the connection
    /// block.
    pub(super) notifier: Option<Arc<RevocationNotifier<QpLink>>>,
}

impl Control {
    /// The completion queue of the engine's own requests, and their member of it: those of the
    /// transmit requests, or of the receives if the endpoint only receives.
    pub(super) fn engine_queue(&self) -> Option<(&CqBinding, CqMember)> {
        match (&self.tx, self.tx_member) {
            (Some(binding), Some(member)) => Some((binding, member)),
            _ => self.rx.as_ref().zip(self.rx_member),
        }
    }
}

/// The state that an endpoint shares with its callbacks. [`Shared::close`] releases the resources.
#[derive(Debug)]
pub(crate) struct Shared {
    this: Weak<Self>,
    pub(crate) domain: Arc<Domain>,
    /// The domain's protection domain, or the endpoint's own if regions are bound to endpoints.
    pub(crate) pd: Arc<Pd>,
    pub(crate) config: EndpointConfig,
    pub(crate) conn: Connection,
    pub(crate) slots: Arc<EndpointSlots>,
    pub(super) silence: Silence,
    /// The device was removed, or has failed.
    pub(super) removed: AtomicBool,
    pub(super) device_error: DeviceError,
    /// Whether the queue pair could receive.
    pub(super) received: AtomicBool,
    /// Whether the queue pair, which is in its error state, takes no more receives of the shared
    /// context, and has completed those that it had taken.
    pub(super) last_receive: AtomicBool,
    /// Maximum lengths of operations.
    pub(crate) lengths: Lengths,
    pub(crate) control: Mutex<Control>,
    pub(crate) tx: biased_lock::Mutex<Option<TxSide>>,
    pub(crate) rx: biased_lock::Mutex<Option<RxSide>>,
    /// Of an endpoint on XRC. A leaf.
    pub(super) ends: Mutex<Ends>,
    /// The target of an endpoint on XRC has failed: no request of the peer is executed any more.
    pub(super) target_failed: AtomicBool,
    /// Replaces the limit for results of requests after the peer has disconnected.
    #[cfg(test)]
    pub(super) answer: std::sync::OnceLock<std::time::Duration>,
}

impl Shared {
    pub(crate) fn new(
        domain: &Arc<Domain>,
        pd: Arc<Pd>,
        config: EndpointConfig,
        origin: Option<Origin>,
    ) -> Arc<Self> {
        let passive = matches!(origin, Some(Origin::Request(..) | Origin::XrcRequest(_)));
        let (id, private_data, xrc) = match origin {
            Some(Origin::Request(id, data)) => (Some(id), Some(data), XrcSide::default()),
            Some(Origin::XrcRequest(request)) => (None, None, XrcSide::answering(Some(request))),
            Some(Origin::Bound(id)) => (Some(id), None, XrcSide::default()),
            None => (None, None, XrcSide::default()),
        };
        let introduction = private_data.and_then(|data| introduction_in(&data));
        let rx_size = if config.shared_rx { 0 } else { config.rx_size };
        let slots = EndpointSlots::new(config.tx_size, rx_size).on_xrc(config.xrc);
        let slots = Arc::new(slots);
        let mut side = Side::new(id, config.src, config.dst);
        side.passive = passive;
        side.on_circuits = config.xrc;
        let control = Control {
            side,
            xrc,
            qp: None,
            tx: None,
            rx: None,
            srx: None,
            remote_counters: Vec::new(),
            cell: None,
            tx_member: None,
            rx_member: None,
            data: CmData::EMPTY,
            block: None,
            introduction,
            notifier: None,
        };
        let tuning = domain.tuning().with_class(config.traffic_class);
        let shared = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            domain: Arc::clone(domain),
            pd,
            conn: Connection::new(domain.device(), tuning, config.token),
            lengths: Lengths::new(domain.max_msg_size(), config.inject_size),
            config,
            slots,
            silence: Silence::default(),
            removed: AtomicBool::new(false),
            device_error: DeviceError::default(),
            received: AtomicBool::new(false),
            last_receive: AtomicBool::new(false),
            control: Mutex::new(control),
            tx: biased_lock::Mutex::new(None),
            rx: biased_lock::Mutex::new(None),
            ends: Mutex::default(),
            target_failed: AtomicBool::new(false),
            #[cfg(test)]
            answer: std::sync::OnceLock::new(),
        });
        let listener: Weak<dyn FailureListener> = shared.weak();
        // new slots have no owner yet
        let _ = shared.slots.owner.set(listener);
        shared
    }

    pub(super) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Binds the receiver of the connection's results.
    pub(crate) fn bind_sink(&self, sink: &Arc<dyn CmSink>) -> Result<()> {
        let mut registry = sink.dispatcher().registry();
        let mut control = self.control.lock();
        let keepalive = self.domain.queues().keepalive();
        let target: Weak<dyn CmTarget> = self.weak();
        let sink = Arc::clone(sink);
        self.conn
            .bind(&mut control.side, sink, &mut registry, keepalive, target)
    }
}

/// The introduction in the private data of a peer's request or reply.
pub(super) fn introduction_in(private_data: &PrivateData) -> Option<Introduction> {
    CmData::decode(private_data.bytes()).introduction()
}
