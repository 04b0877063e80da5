//! Enabling an endpoint: reserves places in the tables of the completion queues, creates the queue
//! pair with its transmit and receive sides; and the reverse.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::recv::RxSide;
use super::shared::{Control, Shared};
use crate::conn::{CmSink, State};
use crate::errno::{FiErrno, Result};
use crate::initiator::keys::FURTHER_REQUESTS;
use crate::mr::ConnectionBlock;
use crate::queue::event_cell::Watch;
use crate::queue::slots::EngineRequest;
use crate::queue::{Counter, Counters, Direction};
use crate::verbs::{AsyncListener, Qp, QpConfig, Transport};

/// Engine requests that the send queue has room for: the marker behind all others at the end of a
/// connection, the probe of a silent peer, the requests to key directories, and further requests
/// of an operation.
pub(super) const ENGINE_REQUESTS: usize = 2 + EngineRequest::MOST + FURTHER_REQUESTS;

impl Shared {
    /// Changes the state from idle to enabled. Does nothing in a later state, except that a closed
    /// endpoint is an error.
    pub(crate) fn enable(&self) -> Result<()> {
        // An endpoint that is not complete remains free to be bound to another event queue. After a
        // later error it keeps that of its domain: its identifier is on the channel of the queue.
        if !self.is_complete(&self.control.lock())? {
            return Ok(());
        }
        self.take_domains_eq()?;
        let mut control = self.control.lock();
        if !self.is_complete(&control)? {
            return Ok(());
        }
        if self.config.xrc {
            self.enable_xrc(&mut control)?;
            self.conn.state.set(State::Enabled);
            return Ok(());
        }
        let id = Arc::clone(control.side.id()?);
        if let Some(src) = control.side.src.filter(|_| !control.side.bound)
            && !src.ip().is_unspecified()
        {
            id.bind_addr(src)?;
            control.side.bound = true;
        }
        self.attach(&mut control)?;
        let ready = if id.has_device() {
            self.create_qp(&mut control)
        } else {
            self.defer(&control)
        };
        if let Err(error) = ready {
            self.detach(&mut control);
            return Err(error);
        }
        self.conn.state.set(State::Enabled);
        Ok(())
    }

    /// Whether the endpoint is to be enabled; false: it is already.
    ///
    /// # Errors
    /// `ENOEQ`, `ENOCQ`: without a queue that it needs. `EOPBADSTATE`: without its shared receive
    /// context, or closed.
    fn is_complete(&self, control: &Control) -> Result<bool> {
        match self.conn.state.get() {
            State::Idle => {}
            State::Closed => return Err(FiErrno::EOPBADSTATE),
            _ => return Ok(false),
        }
        if !self.conn.is_bound() && self.domain.eq().is_none() {
            return Err(FiErrno::ENOEQ);
        }
        if (control.tx.is_none() && control.rx.is_none())
            || (self.config.needs_tx && control.tx.is_none())
            || (self.config.needs_rx && control.rx.is_none())
        {
            return Err(FiErrno::ENOCQ);
        }
        if self.config.shared_rx && control.srx.is_none() {
            return Err(FiErrno::EOPBADSTATE);
        }
        Ok(true)
    }

    /// Binds the domain's event queue if the application has bound none.
    fn take_domains_eq(&self) -> Result<()> {
        if self.conn.is_bound() || !self.conn.state.is(State::Idle) {
            return Ok(());
        }
        let Some(eq) = self.domain.eq() else {
            return Ok(());
        };
        let sink: Arc<dyn CmSink> = eq;
        match self.bind_sink(&sink) {
            Err(_) if self.conn.is_bound() => Ok(()), // another thread has bound it meanwhile
            bound => bound,
        }
    }

    /// Reserves places in the tables of the completion queues, and room for completions.
    ///
    /// # Errors
    /// `ENOSPC`: a queue has no place or no room.
    pub(super) fn attach(&self, control: &mut Control) -> Result<()> {
        let tx = control.tx.as_ref().map(|b| Arc::clone(&b.cq));
        let rx = control.rx.as_ref().map(|b| Arc::clone(&b.cq));
        let shared = match (&tx, &rx) {
            (Some(tx), Some(rx)) => Arc::ptr_eq(tx, rx),
            _ => false,
        };
        let (tx_room, rx_room) = self.rooms(control);
        if let Some(cq) = &tx {
            let room = if shared { tx_room + rx_room } else { tx_room };
            control.tx_member = Some(cq.attach(&self.slots, room)?);
            // behind the place: the failure of a queue wakes the counters of the endpoints that it
            // has
            self.for_tx_counters(|counter| counter.watch(cq));
        }
        if shared {
            control.rx_member = control.tx_member;
        } else if let Some(cq) = &rx {
            match cq.attach(&self.slots, rx_room) {
                Ok(member) => control.rx_member = Some(member),
                Err(error) => {
                    self.detach(control);
                    return Err(error);
                }
            }
        }
        if let Some(cq) = &rx {
            self.for_rx_counter(|counter| counter.watch(cq));
        }
        Ok(())
    }

    fn for_tx_counters(&self, each: impl Fn(&Counter)) {
        if let Some(counters) = self.slots.counters() {
            counters.tx().for_each(|counter| each(counter));
        }
    }

    fn for_rx_counter(&self, each: impl Fn(&Counter)) {
        if let Some(counter) = self.slots.counters().and_then(Counters::rx) {
            each(counter);
        }
    }

    /// Maximum number of completions under way per direction: transmit, receive. The engine's own
    /// requests complete in the queue of the transmit requests; without one, in that of the
    /// receives.
    fn rooms(&self, control: &Control) -> (usize, usize) {
        let rx = if self.config.shared_rx {
            0 // counted once per queue, for the shared context
        } else {
            self.config.rx_size
        };
        match control.tx {
            Some(_) => (self.config.tx_size + ENGINE_REQUESTS, rx),
            None => (0, rx + ENGINE_REQUESTS),
        }
    }

    /// Releases the places; operations under way complete as flushed. The caller destroys the queue
    /// pair first.
    pub(super) fn detach(&self, control: &mut Control) {
        let (tx_room, rx_room) = self.rooms(control);
        let tx = control.tx_member.take().zip(control.tx.as_ref());
        let rx = control.rx_member.take().zip(control.rx.as_ref());
        match (tx, rx) {
            (Some((member, tx)), Some((_, rx))) if Arc::ptr_eq(&tx.cq, &rx.cq) => {
                tx.cq.detach(member, tx_room + rx_room, Direction::BOTH);
            }
            (tx, rx) => {
                if let Some((member, binding)) = tx {
                    binding.cq.detach(member, tx_room, &[Direction::Transmit]);
                }
                if let Some((member, binding)) = rx {
                    binding.cq.detach(member, rx_room, &[Direction::Receive]);
                }
            }
        }
        // behind the queue, which has counted the last operations
        if let Some((_, binding)) = tx {
            self.for_tx_counters(|counter| counter.unwatch(&binding.cq));
        }
        if let Some((_, binding)) = rx {
            self.for_rx_counter(|counter| counter.unwatch(&binding.cq));
        }
    }

    /// Makes a receive side without a queue pair, which holds early receives: the identifier has no
    /// device before the peer's address is resolved.
    fn defer(&self, control: &Control) -> Result<()> {
        if !self.config.shared_rx
            && let (Some(binding), Some(member)) = (&control.rx, control.rx_member)
        {
            let side = RxSide::new(self, binding.selective, member, None, Some(VecDeque::new()));
            *self.rx.lock() = Some(side);
        }
        Ok(())
    }

    /// Creates the queue pair, the connection block, and both sides.
    pub(super) fn create_qp(&self, control: &mut Control) -> Result<()> {
        let id = control.side.id()?;
        self.conn.check_device(id)?;
        let (tx, rx) = (control.tx.as_ref(), control.rx.as_ref());
        let any = tx.or(rx).ok_or(FiErrno::ENOCQ)?;
        let send_cq = tx.unwrap_or(any).cq.device_cq()?;
        let recv_cq = rx.unwrap_or(any).cq.device_cq()?;
        let config = self.qp_config(tx.is_some(), rx.is_some());
        let transport = Transport::Rc {
            send_cq,
            recv_cq,
            srq: match &control.srx {
                Some(srx) => Some(srx.rc_queue()?),
                None => None,
            },
        };
        let qp = Qp::create(id, &self.pd, transport, &config)?;
        let qp = Arc::new(qp);
        let listener: Weak<dyn AsyncListener> = self.weak();
        self.domain.device().listen(qp.object(), listener);
        control.qp = Some(Arc::clone(&qp));
        match self.connection_block(control) {
            Ok(block) => control.block = Some(Arc::new(block)),
            Err(error) => {
                self.drop_qp(control);
                return Err(error);
            }
        }
        let ready = self.open_sides(control, &qp);
        if ready.is_err() {
            self.drop_qp(control);
        }
        ready
    }

    /// The connection block, which the peer reads, with the event cell in which the peer counts its
    /// operations.
    pub(super) fn connection_block(&self, control: &mut Control) -> Result<ConnectionBlock> {
        let directory = self.domain.mr().directory(&self.pd)?;
        if control.cell.is_none() && !control.remote_counters.is_empty() {
            let cell = directory.event_cell()?;
            for (event, counter) in &control.remote_counters {
                counter.follow(Watch::new(&cell, *event));
            }
            control.cell = Some(cell);
        }
        directory.block(control.cell.clone())
    }

    /// Attributes of the queue pair. The queues have room for the engine's own requests.
    fn qp_config(&self, tx: bool, rx: bool) -> QpConfig {
        QpConfig {
            // within the device's limit: the configuration was clipped
            max_send_wr: self.config.tx_size + ENGINE_REQUESTS,
            max_recv_wr: if self.config.shared_rx {
                0
            } else if rx {
                self.config.rx_size
            } else {
                1
            },
            max_send_sge: if tx { self.config.tx_iov_limit } else { 1 },
            max_recv_sge: match (self.config.shared_rx, rx) {
                (true, _) => 0,
                (false, true) => self.config.rx_iov_limit,
                (false, false) => 1,
            },
            max_inline: self
                .config
                .inject_size
                .min(self.domain.device().max_inline()),
            flush: self.config.durable && tx,
        }
    }

    fn open_sides(&self, control: &Control, qp: &Arc<Qp>) -> Result<()> {
        if let (Some(binding), Some(member)) = (&control.tx, control.tx_member) {
            let side = self.tx_side(binding, member, qp, None)?;
            *self.tx.lock() = Some(side);
        }
        if let (Some(binding), Some(member)) = (&control.rx, control.rx_member) {
            if let Some(srx) = &control.srx {
                let (number, selective) = (qp.number(), binding.selective);
                return binding.cq.share(member, number, srx.slots(), selective);
            }
            let mut rx = self.rx.lock();
            let early = rx.as_mut().and_then(RxSide::take_early);
            let mut side = RxSide::new(self, binding.selective, member, Some(Arc::clone(qp)), None);
            if let Some(old) = rx.take() {
                side.inherit(old);
            }
            side.post_early(early.unwrap_or_default())?;
            *rx = Some(side);
        }
        Ok(())
    }

    /// Destroys the queue pair.
    pub(super) fn drop_qp(&self, control: &mut Control) {
        Self::leave_directory(control);
        let qp = control.qp.take();
        if self.config.xrc {
            Self::leave_xrc(control);
        } else if let Some(qp) = qp {
            self.domain.device().unlisten(qp.object());
            if let (Some(srx), Some(binding), Some(member)) =
                (&control.srx, &control.rx, control.rx_member)
            {
                binding.cq.unshare(member, srx.slots());
            }
        }
        // each side holds a reference to the queue pair
        let tx = self.tx.lock().take();
        drop(tx);
        *self.rx.lock() = None;
        self.drop_ends(control);
        control.block = None;
    }
}
