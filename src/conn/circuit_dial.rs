//! One request of a connected endpoint on XRC: for a new circuit, or on one that is up.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::circuit::{Circuit, CircuitUser, Share};
use super::circuits::{Circuits, Step};
use super::dial_config::DialConfig;
use super::{CmTarget, connection};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{CmEvent, CmEventKind, CmId, PrivateData, Qp};
use crate::wire::cm_data::CmData;
use crate::wire::msg_xrc::{self, Header, Kind};

/// The statuses of rejections (InfiniBand specification, volume 1, "Rejection reason"): by the
/// peer's application, and because no process listens.
const BY_APPLICATION: i32 = 28;
const NO_LISTENER: i32 = 8;

/// `IB_SIDR_REJECT` of the kernel's ib_cm.h: the service has refused the request.
const SERVICE_REFUSED: i32 = 2;

#[derive(Debug, Default)]
struct State {
    id: Option<Arc<CmId>>,
    share: Option<Share>,
    /// It makes the circuit of its share.
    makes: bool,
    port: u16,
    ended: bool,
    /// Where the request goes instead, and the number that it has there: the process has another
    /// XRC domain.
    redirected: Option<(u16, u32)>,
}

/// A request, from the resolution of the address to the answer.
pub(crate) struct Dial {
    this: Weak<Self>,
    circuits: Weak<Circuits>,
    user: Weak<dyn CircuitUser>,
    config: DialConfig,
    /// A leaf.
    state: Mutex<State>,
}

impl std::fmt::Debug for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Dial({})", self.config.to)
    }
}

impl Dial {
    pub(super) fn new(
        circuits: &Weak<Circuits>,
        user: Weak<dyn CircuitUser>,
        config: DialConfig,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            circuits: Weak::clone(circuits),
            user,
            config,
            state: Mutex::default(),
        })
    }

    pub(super) fn config(&self) -> &DialConfig {
        &self.config
    }

    pub(super) fn user(&self) -> &Weak<dyn CircuitUser> {
        &self.user
    }

    /// It uses a circuit that is up.
    pub(super) fn join(&self, share: Share) {
        self.state.lock().share = Some(share);
    }

    pub(super) fn has_share(&self) -> bool {
        self.state.lock().share.is_some()
    }

    fn id(&self) -> Result<Arc<CmId>> {
        self.state.lock().id.clone().ok_or(FiErrno::EOPBADSTATE)
    }

    /// Ends the dial without a result. Idempotent. May be called with locks held.
    pub(crate) fn end(&self) {
        let (id, share) = {
            let mut state = self.state.lock();
            state.ended = true;
            (state.id.take(), state.share.take())
        };
        drop(share);
        if let (Some(circuits), Some(this)) = (self.circuits.upgrade(), self.this.upgrade()) {
            circuits.made(&this, None);
            if let Some(id) = id {
                circuits.push(Step::EndId(id));
            }
        }
    }

    /// Ends the identifier of a request that was answered, later.
    pub(crate) fn retire(&self) {
        let id = self.state.lock().id.take();
        if let (Some(circuits), Some(id)) = (self.circuits.upgrade(), id) {
            circuits.retire_id(id);
        }
    }

    /// Creates the identifier. The driver's thread.
    pub(super) fn resolve(&self, circuits: &Circuits) {
        if let Err(error) = self.begin(circuits) {
            self.fail(error, 0, &PrivateData::EMPTY);
        }
        // a dial can end while its place is looked for: no other one waits for it
        let ended = self.state.lock().ended;
        if let Some(this) = self.this.upgrade().filter(|_| ended) {
            circuits.made(&this, None);
        }
    }

    fn begin(&self, circuits: &Circuits) -> Result<()> {
        let makes = !self.has_share();
        let id = {
            let mut registry = circuits.driver().dispatcher().registry();
            let channel = registry.channel(circuits.device())?;
            let id = match makes {
                true => channel.create_id()?,
                false => channel.create_sidr_id()?,
            };
            let target: Weak<Self> = Weak::clone(&self.this);
            registry.insert(id.object(), target);
            Arc::new(id)
        };
        {
            let mut state = self.state.lock();
            state.makes = makes;
            if state.ended {
                drop(state);
                circuits.push(Step::EndId(id));
                return Ok(());
            }
            state.id = Some(Arc::clone(&id));
        }
        circuits.tuning.set_traffic_class(&id);
        let from = self.config.from.map(|mut from| {
            from.set_port(0);
            from
        });
        let mut to = self.config.to;
        if let Some((port, _)) = self.state.lock().redirected {
            to.set_port(port);
        }
        id.resolve_addr(from, to)
    }

    /// Listens at the local address, then resolves the route. The driver's thread.
    pub(super) fn listen(&self, circuits: &Circuits) {
        let listening = self.id().and_then(|id| {
            if !id.is_on(circuits.device()) {
                return Err(FiErrno::EADDRNOTAVAIL);
            }
            let local = id.local_addr().ok_or(FiErrno::EADDRNOTAVAIL)?;
            self.state.lock().port = circuits.listen_at(local)?;
            id.resolve_route()
        });
        if let Err(error) = listening {
            self.fail(error, 0, &PrivateData::EMPTY);
        }
    }

    /// The share's circuit; the maker creates it.
    fn circuit(&self, id: &CmId) -> Result<Arc<Circuit>> {
        if let Some(share) = &self.state.lock().share {
            return Ok(Arc::clone(share.circuit()));
        }
        let config = self.config.initiator();
        let qp = Qp::create_initiator(&self.config.pd, self.config.send_cq()?, &config)?;
        qp.advance_to_init(id)?;
        let circuit = Circuit::new(qp, config.max_send_wr);
        let share = circuit.share(self.config.room(), &self.user);
        let mut state = self.state.lock();
        if state.ended || share.is_none() {
            return Err(FiErrno::ECANCELED);
        }
        state.share = share;
        Ok(circuit)
    }

    fn request(&self, circuits: &Circuits) -> Result<()> {
        let id = self.id()?;
        let circuit = self.circuit(&id)?;
        let (makes, port) = {
            let state = self.state.lock();
            (state.makes, state.port)
        };
        if !makes && circuit.has_failed() {
            // A process that has the target, which has not failed, would accept this request.
            drop(circuit);
            return self.leave_circuit(circuits);
        }
        let user = self.user.upgrade().ok_or(FiErrno::ECANCELED)?;
        let local = id.local_addr().ok_or(FiErrno::EADDRNOTAVAIL)?;
        let redirected = self.state.lock().redirected.map(|(_, tag)| tag);
        let data = user.request(&circuit, local, port, redirected)?;
        if !makes {
            return id.request_service(&data);
        }
        circuits.tuning.set_ack_timeout(&id);
        let param = circuits.tuning.conn_param(&data);
        id.connect_with(circuit.qp().qp_number(), &param)
    }

    /// The reply to the request of a circuit has arrived.
    fn establish(&self, circuits: &Circuits, event: &CmEvent) -> Result<()> {
        let id = self.id()?;
        let circuit = self.circuit(&id)?;
        let target = event.peer_qp.ok_or(FiErrno::ECONNREFUSED)?;
        Header::decode(event.private_data.bytes()).ok_or(FiErrno::ECONNREFUSED)?;
        let confirmed = circuit.qp().advance_to_rts(&id);
        let confirmed = confirmed
            .and_then(|()| id.establish())
            .inspect_err(|error| info_log!(EpCtrl, "the answer to a circuit request: {error}"));
        if let Err(error) = confirmed.map_err(connection::ended_errno) {
            if error != FiErrno::ECONNRESET {
                return Err(error);
            }
            // the peer has ended behind its answer
            self.end();
            if let Some(user) = self.user.upgrade() {
                user.answered_and_ended();
            }
            return Ok(());
        }
        circuit.set_target(target);
        circuits.count_circuit();
        let this = self.this.upgrade().ok_or(FiErrno::ECANCELED)?;
        // libfabric's provider takes a second request on a circuit from the same port for a
        // repetition of the first one, so its circuits are not shared
        let answer = CmData::decode(msg_xrc::data_of(event.private_data.bytes()));
        let shared = answer.introduction().is_some();
        circuits.made(&this, shared.then_some(&circuit));
        self.pass_answer(&event.private_data);
        Ok(())
    }

    /// The peer has accepted: the user gets the share and the answer.
    fn pass_answer(&self, answer: &PrivateData) {
        let share = self.state.lock().share.take();
        if let (Some(user), Some(share)) = (self.user.upgrade(), share) {
            let lives = share.connect();
            user.answered(share, answer);
            if !lives {
                user.circuit_failed();
            }
        }
    }

    /// The answer to a request on a circuit that is up.
    fn take_answer(&self, circuits: &Circuits, answer: &PrivateData) -> Result<()> {
        let header = Header::decode(answer.bytes()).ok_or(FiErrno::ECONNREFUSED)?;
        match header.kind {
            Kind::Original | Kind::Reciprocal => self.pass_answer(answer),
            Kind::Rejected => self.fail(FiErrno::ECONNREFUSED, BY_APPLICATION, answer),
            Kind::OtherDomain => {
                // the process has another XRC domain: it gets a circuit of its own
                let share = {
                    let mut state = self.state.lock();
                    if state.redirected.is_some() {
                        return Err(FiErrno::ECONNREFUSED);
                    }
                    state.redirected = Some((header.port, header.target));
                    state.share.take()
                };
                if let Some(share) = share {
                    circuits.is_elsewhere(share.circuit(), self.config.to);
                }
                return self.leave_circuit(circuits);
            }
        }
        Ok(())
    }

    /// Dials again, with a circuit of its own.
    fn leave_circuit(&self, circuits: &Circuits) -> Result<()> {
        let (id, share) = {
            let mut state = self.state.lock();
            (state.id.take(), state.share.take())
        };
        drop(share);
        if let Some(id) = id {
            circuits.push(Step::EndId(id));
        }
        let this = self.this.upgrade().ok_or(FiErrno::ECANCELED)?;
        circuits.place(&this, true);
        Ok(())
    }

    /// Ends the dial, whose user gets the error. No effect if the dial has ended.
    fn fail(&self, error: FiErrno, status: i32, data: &PrivateData) {
        let ended = self.state.lock().ended;
        if ended {
            return;
        }
        info_log!(EpCtrl, "{}: not connected: {error}", self.config.to);
        if msg_xrc::is_other_transport(data.bytes(), true) {
            warn_log!(
                EpCtrl,
                "{} refuses a connection: the endpoint there is on RC \
                 (FI_PROTO_RDMA_CM_IB_RC), this one on XRC (FI_PROTO_RDMA_CM_IB_XRC)",
                self.config.to
            );
        }
        self.end();
        if let Some(user) = self.user.upgrade() {
            user.not_connected(error, status, data);
        }
    }
}

impl CmTarget for Dial {
    fn cm_event(&self, event: CmEvent) {
        let Some(circuits) = self.circuits.upgrade() else {
            return;
        };
        let step = match event.kind {
            CmEventKind::AddrResolved => {
                if let Some(this) = self.this.upgrade() {
                    circuits.push(Step::Listen(this));
                }
                Ok(())
            }
            CmEventKind::RouteResolved => self.request(&circuits),
            CmEventKind::ConnectResponse => self.establish(&circuits, &event),
            CmEventKind::Established => self.take_answer(&circuits, &event.private_data),
            CmEventKind::Rejected => {
                self.fail(FiErrno::ECONNREFUSED, event.status, &event.private_data);
                Ok(())
            }
            CmEventKind::Unreachable => {
                let makes = self.state.lock().makes;
                // a service ID request has statuses of its own
                let reason = if event.is_no_service() {
                    Some(NO_LISTENER)
                } else {
                    (!makes && event.status == SERVICE_REFUSED).then_some(BY_APPLICATION)
                };
                let (error, status) = match reason {
                    Some(reason) => (FiErrno::ECONNREFUSED, reason),
                    None => (connection::unreachable_errno(event.status), event.status),
                };
                self.fail(error, status, &PrivateData::EMPTY);
                Ok(())
            }
            CmEventKind::DeviceRemoval => Err(FiErrno::ENODEV),
            CmEventKind::Disconnected => {
                // the exchange that has made the circuit ends, not the circuit
                if let Some(user) = self.user.upgrade() {
                    user.process_ended();
                }
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = step {
            self.fail(error, event.status, &PrivateData::EMPTY);
        }
    }
}
