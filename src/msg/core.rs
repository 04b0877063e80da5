//! The state that an endpoint shares with its callbacks.
//!
//! Callbacks (events of the connection manager, failed operations, asynchronous events) may briefly
//! hold the last reference, with locks held; so no drop in this module acquires a lock.
//! [`Core::close`] releases everything; the owning endpoint calls it.

use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::lengths::Lengths;
use super::recv::RxSide;
use super::remote::Teller;
use super::tx::TxSide;
use crate::conn::{AtomicState, State, Taken};
use crate::domain::Domain;
use crate::eq::{CmTarget, EventQueue};
use crate::errno::{FiErrno, Result};
use crate::mr::ConnectionBlock;
use crate::msg::{EndpointConfig, SharedRx};
use crate::queue::event_cell::{Cell, Event};
use crate::queue::slots::{FailureListener, Rings};
use crate::queue::{CompletionQueue, Counter, WrId};
use crate::verbs::{CmId, Pd, Qp, Sge};
use crate::wire::cm_data::CmData;
use crate::wire::introduction::Introduction;

/// A bound completion queue.
#[derive(Clone, Debug)]
pub(crate) struct CqBinding {
    pub(crate) cq: Arc<CompletionQueue>,
    pub(crate) selective: bool,
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
    pub(crate) id: Option<Arc<CmId>>,
    /// Whether the identifier came with a connection request.
    pub(crate) passive: bool,
    /// Whether the identifier is bound to a local address.
    pub(crate) bound: bool,
    pub(crate) qp: Option<Arc<Qp>>,
    pub(crate) tx: Option<CqBinding>,
    pub(crate) rx: Option<CqBinding>,
    /// The shared receive context, if the endpoint uses one.
    pub(crate) srx: Option<Arc<SharedRx>>,
    /// Counters of the peer's operations, and the event cell in which they are counted; the cell is
    /// allocated with the queue pair.
    pub(super) remote_counters: Vec<(Event, Arc<Counter>)>,
    pub(super) cell: Option<Arc<Cell>>,
    /// Places in the tables of the completion queues, once enabled.
    pub(crate) tx_place: Option<WrId>,
    pub(crate) rx_place: Option<WrId>,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    pub(crate) data: CmData,
    /// This side's connection block, once there is a queue pair.
    pub(super) block: Option<Arc<ConnectionBlock>>,
    /// The introduction in the peer's connection request.
    pub(super) introduction: Option<Introduction>,
    /// Notifies the peer of revocations, once connected.
    pub(super) teller: Option<Arc<Teller>>,
}

/// Shared state of an endpoint; see the module.
#[derive(Debug)]
pub(crate) struct Core {
    this: Weak<Self>,
    pub(crate) domain: Arc<Domain>,
    /// The domain's protection domain, or the endpoint's own if regions are bound to endpoints.
    pub(crate) pd: Arc<Pd>,
    pub(crate) config: EndpointConfig,
    pub(crate) state: AtomicState,
    pub(crate) rings: Arc<Rings>,
    /// Progress mark of both rings at the last keepalive check.
    pub(super) last_seen: AtomicU64,
    /// Maximum lengths of operations.
    pub(crate) lengths: Lengths,
    /// Set when an event queue is bound, never changed.
    pub(crate) eq: OnceLock<Arc<EventQueue>>,
    pub(crate) control: Mutex<Control>,
    pub(crate) tx: Mutex<Option<TxSide>>,
    pub(crate) rx: Mutex<Option<RxSide>>,
}

impl Core {
    pub(crate) fn new(
        domain: &Arc<Domain>,
        pd: Arc<Pd>,
        config: EndpointConfig,
        request: Option<Taken>,
    ) -> Arc<Self> {
        let (id, introduction) = request.unzip();
        let introduction = introduction.flatten();
        let rx_size = if config.shared_rx { 0 } else { config.rx_size };
        let rings = Arc::new(Rings::new(config.tx_size, rx_size));
        let control = Control {
            passive: id.is_some(),
            bound: id.is_some(),
            id: id.map(Arc::new),
            qp: None,
            tx: None,
            rx: None,
            srx: None,
            remote_counters: Vec::new(),
            cell: None,
            tx_place: None,
            rx_place: None,
            src: config.src,
            dst: config.dst,
            data: CmData::EMPTY,
            block: None,
            introduction,
            teller: None,
        };
        let core = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            domain: Arc::clone(domain),
            pd,
            state: AtomicState::new(State::Idle),
            lengths: Lengths::new(domain.max_msg_size(), config.inject_size),
            config,
            rings,
            last_seen: AtomicU64::new(0),
            eq: OnceLock::new(),
            control: Mutex::new(control),
            tx: Mutex::new(None),
            rx: Mutex::new(None),
        });
        let listener: Weak<dyn FailureListener> = core.weak();
        // new rings have no owner yet
        let _ = core.rings.owner.set(listener);
        core
    }

    pub(super) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.this)
    }

    /// Binds the event queue, and creates or migrates the identifier on its channel.
    pub(crate) fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let mut registry = eq.registry();
        let mut control = self.control.lock();
        if self.eq.get().is_some() {
            return Err(FiErrno::EINVAL);
        }
        if !self.state.is(State::Idle) {
            return Err(FiErrno::EOPBADSTATE);
        }
        let channel = registry.channel(self.domain.device())?;
        if let Some(keepalive) = self.domain.queues().keepalive() {
            registry.watch(keepalive)?;
        }
        let id = match &control.id {
            Some(id) => {
                id.migrate(&channel)?;
                Arc::clone(id)
            }
            None => Arc::new(channel.create_id()?),
        };
        let target: Weak<dyn CmTarget> = self.weak();
        registry.insert(id.object(), target);
        control.id = Some(id);
        // cannot fail: the lock is held since the check above
        let _ = self.eq.set(Arc::clone(eq));
        Ok(())
    }
}
