//! Endpoints on XRC: each direction of a connection has a circuit, which other endpoints may use
//! too. `docs/protocol-xrc.md`, "MSG endpoints".
//!
//! In one file: the steps of calls and of events, each of which changes the state in [`XrcSide`].

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::enable::ENGINE_REQUESTS;
use super::leaving::Kept;
use super::pep::no_data;
use super::shared::{Control, Shared};
use crate::conn::{
    Circuit, CircuitUser, Circuits, Dial, DialConfig, Incoming, Owner, Share, State,
};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::verbs::{AsyncListener, PrivateData, QpConfig, SrqNumber, Target, Xrcd};
use crate::wire::cm_data::CmData;
use crate::wire::introduction::Introduction;
use crate::wire::msg_xrc::{self, End, HEADER_SIZE, Header, Kind, Mark};

/// What an endpoint on XRC has besides [`Control`], under the same lock.
#[derive(Debug, Default)]
pub(crate) struct XrcSide {
    /// The XRC domain that the application has bound.
    pub(super) bound: Option<Arc<Xrcd>>,
    /// The request that the endpoint was made from, until it is answered.
    request: Option<Incoming>,
    /// The first request of a `weft` peer, answered, until the connection is complete: the peer
    /// takes its end before that for the end of this process.
    answered: Option<Incoming>,
    /// The peer's reciprocal request, while the answer to this side's request is missing.
    reciprocal: Option<Incoming>,
    /// The number by which peers find this endpoint; 0: none.
    own: u32,
    /// The number by which the peer finds its endpoint; 0: the peer is no `weft` endpoint.
    peer: u32,
    /// The number of the connection, which the connecting side has chosen.
    tag: u32,
    /// Where the peer takes reciprocal requests and notices.
    notices: Option<SocketAddr>,
    /// Where the process of a `weft` peer takes notices, while this side waits for its request.
    process: Option<SocketAddr>,
    /// The notice of the end is sent.
    end_notified: bool,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    /// This side's request.
    dial: Option<Arc<Dial>>,
    /// This side's circuit, and the peer's receive queue.
    share: Option<Share>,
    pub(super) peer_srq: Option<SrqNumber>,
    /// The answer of the peer's application.
    answer: Option<PrivateData>,
}

impl XrcSide {
    /// Of an endpoint that will answer a request.
    pub(super) fn answering(request: Option<Incoming>) -> Self {
        let addresses = request.as_ref().and_then(Incoming::addresses);
        let (local, remote) = addresses.unzip();
        let tag = request.as_ref().map_or(0, |request| request.header().tag);
        Self {
            tag,
            local,
            remote,
            request,
            ..Self::default()
        }
    }

    /// This side's request.
    #[cfg(test)]
    pub(super) fn test_dial(&self) -> Arc<Dial> {
        Arc::clone(self.dial.as_ref().expect("a dial"))
    }

    /// The tag of the peer's authorization key in the request.
    fn peer_auth(&self) -> Option<u64> {
        let request = self.request.as_ref()?;
        msg_xrc::mark(request.data()).and_then(|mark| mark.auth)
    }
}

/// The two circuits of a connection, for callbacks that acquire no other lock.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    circuit: Option<Arc<Circuit>>,
    target: Option<Arc<Target>>,
}

/// A port of the peer; `None`: the peer has stated none.
fn peer_at(peer: Option<SocketAddr>, port: u16) -> Option<SocketAddr> {
    let mut peer = peer.filter(|_| port != 0)?;
    peer.set_port(port);
    Some(peer)
}

/// The errno of an event: a peer that has ended has aborted the connection that was being made.
fn event_errno(error: FiErrno) -> FiErrno {
    match error {
        FiErrno::ECONNRESET => FiErrno::ECONNABORTED,
        error => error,
    }
}

impl Shared {
    fn circuits(&self) -> Result<&Arc<Circuits>> {
        self.domain.circuits()
    }

    fn user(&self) -> Weak<dyn CircuitUser> {
        self.weak()
    }

    /// The XRC domain of the endpoint.
    fn xrcd(&self, control: &Control) -> Result<Arc<Xrcd>> {
        match &control.xrc.bound {
            Some(xrcd) => Ok(Arc::clone(xrcd)),
            None => self.domain.xrcd(),
        }
    }

    /// Enables the endpoint: creates the receive queue of its context with the first endpoint, and
    /// the connection block.
    pub(super) fn enable_xrc(&self, control: &mut Control) -> Result<()> {
        let srx = control.srx.clone().ok_or(FiErrno::EOPBADSTATE)?;
        let binding = control.rx.as_ref().or(control.tx.as_ref());
        let (cq, selective) = binding
            .map(|binding| (Arc::clone(&binding.cq), binding.selective))
            .ok_or(FiErrno::ENOCQ)?;
        if !Arc::ptr_eq(&self.pd, self.domain.pd()) {
            warn_log!(
                EpCtrl,
                "an endpoint on XRC has the authorization key of its domain: the receives of a \
                 shared context are in the protection domain of that key"
            );
            return Err(FiErrno::EINVAL);
        }
        srx.enable_xrc(&self.xrcd(control)?, &cq)?;
        self.attach(control)?;
        match self.connection_block(control) {
            Ok(block) => control.block = Some(Arc::new(block)),
            Err(error) => {
                self.detach(control);
                return Err(error);
            }
        }
        if let Some(member) = control.rx_member.or(control.tx_member) {
            cq.share_xrc(member, srx.slots(), selective);
        }
        Ok(())
    }

    /// Reverts [`Self::enable_xrc`] and releases the circuits. Without [`Self::detach`].
    pub(super) fn leave_xrc(control: &mut Control) {
        let binding = control.rx.as_ref().or(control.tx.as_ref());
        let member = control.rx_member.or(control.tx_member);
        if let (Some(srx), Some(binding), Some(member)) = (&control.srx, binding, member) {
            binding.cq.unshare_xrc(member, srx.slots());
        }
    }

    fn dial_config(&self, control: &Control, to: SocketAddr) -> Result<DialConfig> {
        let (binding, _) = control.engine_queue().ok_or(FiErrno::ENOCQ)?;
        let from = control.xrc.local.or(control.side.src);
        Ok(DialConfig {
            from: from.filter(|from| !from.ip().is_unspecified()),
            to,
            pd: Arc::clone(&self.pd),
            cq: Arc::clone(&binding.cq),
            qp: QpConfig {
                max_send_wr: self.config.tx_size + ENGINE_REQUESTS,
                max_recv_wr: 0,
                max_send_sge: self.config.tx_iov_limit,
                max_recv_sge: 0,
                max_inline: self
                    .config
                    .inject_size
                    .min(self.domain.device().max_inline()),
                flush: false,
            },
        })
    }

    /// Starts to connect.
    pub(super) fn connect_xrc(&self, peer: Option<SocketAddr>, data: CmData) -> Result<()> {
        let circuits = self.circuits()?;
        let mut control = self.control.lock();
        let to = peer.or(control.side.dst).ok_or(FiErrno::EINVAL)?;
        self.conn.begin_dial()?;
        let begun = circuits
            .register(self.user())
            .and_then(|own| Ok((own, self.dial_config(&control, to)?)));
        let (own, config) = begun.inspect_err(|_| self.conn.state.set(State::Enabled))?;
        control.side.dst = Some(to);
        control.data = data;
        let xrc = &mut control.xrc;
        (xrc.own, xrc.tag, xrc.remote) = (own, own, Some(to));
        control.xrc.dial = Some(circuits.dial(self.user(), config, false));
        Ok(())
    }

    /// Checks the peer's authorization key, and rejects a request with another one.
    pub(super) fn check_stranger_xrc(&self, control: &Control) -> Result<()> {
        let own = self.auth().map(crate::auth::AuthKey::tag);
        if control.xrc.peer_auth() == own || control.xrc.request.is_none() {
            return Ok(());
        }
        self.conn.refuse(&control.side, no_data())?;
        if let Some(request) = &control.xrc.request {
            request.reject(&CmData::EMPTY);
        }
        warn_log!(EpCtrl, "a peer with another authorization key is refused");
        Err(FiErrno::EACCES)
    }

    /// Accepts the request that the endpoint was made from.
    pub(super) fn accept_xrc(&self, data: CmData) -> Result<()> {
        let circuits = self.circuits()?;
        let local = self.control.lock().xrc.local;
        let port = circuits.listen_at(local.ok_or(FiErrno::EOPBADSTATE)?)?;
        let mut control = self.control.lock();
        self.conn.begin_accept()?;
        let own = circuits.register(self.user());
        control.xrc.own = own.inspect_err(|_| self.conn.state.set(State::Disconnected))?;
        control.data = data;
        let request = control.xrc.request.take().ok_or(FiErrno::EOPBADSTATE)?;
        self.answer_original(&mut control, request, port)
    }

    /// Answers an original request, and begins to connect the other direction.
    fn answer_original(&self, control: &mut Control, request: Incoming, port: u16) -> Result<()> {
        let circuits = self.circuits()?;
        let tuning = self.domain.tuning();
        let opened = self.open_target(control, &request);
        if opened.as_ref().err() == Some(&FiErrno::ENOENT) && request.names_target() {
            if request.redirect(port, control.xrc.own, request.is_marked()) {
                control.xrc.process = peer_at(control.xrc.remote, request.header().port);
                circuits.expect(control.xrc.own);
                return Ok(());
            }
            self.conn.state.set(State::Disconnected);
            return Err(FiErrno::ECONNABORTED);
        }
        let answered = opened.and_then(|target| {
            let notices = control.xrc.local.and_then(|at| circuits.port_at(at));
            let answer = Header {
                kind: Kind::Original,
                port: notices.filter(|_| request.is_marked()).unwrap_or(0),
                target: control.xrc.own,
                srq: self.srq_number(control)?,
                tag: control.xrc.tag,
            };
            let data = self
                .introducer()
                .introduce(control.data, control.block.as_deref());
            request.answer(&target, &msg_xrc::answer(&answer, &data), tuning)
        });
        if let Err(error) = answered {
            request.reject(&CmData::EMPTY);
            self.conn.state.set(State::Disconnected);
            return Err(error);
        }
        // no effect if another thread has ended the connection meanwhile
        self.conn.state.change(State::Accepting, State::Accepted);
        let header = *request.header();
        if request.is_marked() {
            control.xrc.peer = control.xrc.tag;
        }
        let to = request.addresses().map(|(_, mut peer)| {
            peer.set_port(header.port);
            peer
        });
        control.xrc.notices = to;
        control.xrc.peer_srq = SrqNumber::new(header.srq);
        match control.xrc.peer {
            0 => circuits.retire(request),
            _ => control.xrc.answered = Some(request),
        }
        let to = to.ok_or(FiErrno::EOPBADSTATE)?;
        let config = self.dial_config(control, to)?;
        let alone = control.xrc.peer == 0;
        control.xrc.dial = Some(circuits.dial(self.user(), config, alone));
        Ok(())
    }

    /// The target of a request, which this endpoint holds from now on.
    ///
    /// # Errors
    /// `ENOENT`: the target is not in the XRC domain, has failed, or delivers to another receive
    /// queue of this domain and the peer is a `weft` endpoint, which can use another one.
    /// `ECONNRESET`: the initiator of a new target has ended.
    fn open_target(&self, control: &Control, request: &Incoming) -> Result<Arc<Target>> {
        let xrcd = self.xrcd(control)?;
        let target = Arc::new(request.target(&xrcd, self.domain.tuning())?);
        self.circuits()?.count_target(!request.names_target());
        let srq = control.srx.as_ref().and_then(|srx| srx.number());
        let srq = srq.ok_or(FiErrno::EOPBADSTATE)?;
        let is_weft = request.is_marked() || control.xrc.peer != 0;
        if !self.circuits()?.serve(&target, srq) && is_weft {
            return Err(FiErrno::ENOENT);
        }
        let listener: Weak<dyn AsyncListener> = self.weak();
        self.domain.device().listen(target.object(), listener);
        // an event that was taken before has found no listener
        if target.query().is_ok_and(|state| !state.receives) {
            self.domain.device().unlisten(target.object());
            return Err(match request.names_target() {
                true => FiErrno::ENOENT,
                false => FiErrno::ECONNRESET,
            });
        }
        if let Some(srx) = &control.srx {
            srx.receive_through(target.number(), true);
        }
        let former = self.ends.lock().target.replace(Arc::clone(&target));
        if let Some(former) = former {
            self.leave_target(control, &former);
        }
        Ok(target)
    }

    /// The endpoint receives through this target no more.
    fn leave_target(&self, control: &Control, target: &Target) {
        self.domain.device().unlisten(target.object());
        if let Some(srx) = &control.srx {
            srx.receive_through(target.number(), false);
        }
    }

    fn srq_number(&self, control: &Control) -> Result<u32> {
        let number = control.srx.as_ref().and_then(|srx| srx.number());
        number.map(SrqNumber::get).ok_or(FiErrno::EOPBADSTATE)
    }

    /// Makes the transmit side on a circuit, whose peer's receive queue is known.
    fn open_sides_xrc(&self, control: &mut Control, circuit: &Arc<Circuit>) -> Result<()> {
        let qp = Arc::clone(circuit.qp());
        control.qp = Some(Arc::clone(&qp));
        self.ends.lock().circuit = Some(Arc::clone(circuit));
        if let (Some(binding), Some(member)) = (&control.tx, control.tx_member) {
            let side = self.tx_side(binding, member, &qp, control.xrc.peer_srq)?;
            *self.tx.lock() = Some(side);
        }
        self.join_directory(control);
        Ok(())
    }

    /// Answers the peer's reciprocal request. The connection is complete then.
    fn answer_reciprocal(&self, control: &mut Control, request: Incoming) {
        let tuning = self.domain.tuning();
        let opened = self.open_target(control, &request);
        let (Ok(circuits), Some(local)) = (self.circuits(), control.xrc.local) else {
            return;
        };
        if opened.as_ref().err() == Some(&FiErrno::ENOENT) && request.names_target() {
            let port = circuits.port_at(local).unwrap_or_default();
            if request.redirect(port, control.xrc.own, control.xrc.peer != 0) {
                circuits.expect(control.xrc.own);
                return;
            }
        }
        let answered = opened.and_then(|target| {
            let answer = Header {
                kind: Kind::Reciprocal,
                port: 0,
                target: 0,
                srq: self.srq_number(control)?,
                tag: control.xrc.tag,
            };
            let data = self
                .introducer()
                .introduce(CmData::EMPTY, control.block.as_deref());
            request.answer(&target, &msg_xrc::answer(&answer, &data), tuning)
        });
        match answered {
            Ok(()) => {
                control.xrc.notices = control.xrc.remote.map(|mut peer| {
                    peer.set_port(request.header().port);
                    peer
                });
                // of a request for a service the peer's circuit was connected before
                match request.names_target() || control.xrc.peer == 0 {
                    true => circuits.retire(request),
                    false => circuits.await_confirmation(request, self.user()),
                }
                let answer = control.xrc.answer.take();
                self.complete(control, answer.unwrap_or(PrivateData::EMPTY));
            }
            Err(error) => {
                request.reject(&CmData::EMPTY);
                let error = event_errno(error);
                self.conn.not_connected(error, 0, PrivateData::EMPTY);
            }
        }
    }

    /// Both directions are connected.
    fn complete(&self, control: &mut Control, answer: PrivateData) {
        if let Some(dial) = control.xrc.dial.take() {
            dial.retire();
        }
        if let (Ok(circuits), Some(request)) = (self.circuits(), control.xrc.answered.take()) {
            circuits.retire(request);
        }
        let xrc = &control.xrc;
        if let (Ok(circuits), Some(srq), Some(process)) =
            (self.circuits(), xrc.peer_srq, xrc.notices)
            && xrc.peer != 0
        {
            circuits.add_connection(srq, process, self.user());
        }
        if self.conn.report_connected(answer) {
            self.after_connected();
        } else {
            // it has ended before it was complete
            self.notify_end(control);
        }
    }

    /// The peer's answer to this side's original request.
    fn answered_original(
        &self,
        control: &mut Control,
        circuit: &Arc<Circuit>,
        answer: &PrivateData,
        peer: Option<Introduction>,
    ) -> Result<()> {
        let header = Header::decode(answer.bytes()).ok_or(FiErrno::ECONNREFUSED)?;
        if self.introducer().is_stranger(peer.as_ref()) {
            warn_log!(
                EpCtrl,
                "a connection is ended: the accepting peer has another authorization key"
            );
            return Err(FiErrno::ECONNREFUSED);
        }
        if peer.is_some() {
            control.xrc.peer = header.target;
            control.xrc.process = peer_at(control.xrc.remote, header.port);
        }
        control.xrc.peer_srq = SrqNumber::new(header.srq);
        control.xrc.answer = Some(answer.behind(HEADER_SIZE));
        self.open_sides_xrc(control, circuit)?;
        self.process_introduction(control, peer);
        match control.xrc.reciprocal.take() {
            Some(request) => self.answer_reciprocal(control, request),
            None => self.circuits()?.expect(control.xrc.own),
        }
        Ok(())
    }

    /// Whether an endpoint on XRC may post in a state other than `Connected`: the peer's messages
    /// can arrive before this side has the peer's last answer.
    ///
    /// # Errors
    /// `EAGAIN`: the connection is nearly complete.
    pub(super) fn may_post_xrc(&self) -> Result<()> {
        match self.conn.state.get() {
            State::Connecting => self.circuits()?.await_current_event(),
            State::Accepting | State::Accepted => return Err(FiErrno::EAGAIN),
            _ => {}
        }
        Ok(())
    }

    /// Ends the requests of the connection. `notify`: the peer is notified of the end of a
    /// connection that is established, or whose request this side has answered.
    pub(super) fn leave_peer(&self, control: &mut Control, notify: bool) {
        let Ok(circuits) = self.circuits() else {
            return;
        };
        let xrc = &mut control.xrc;
        if let Some(dial) = xrc.dial.take() {
            dial.end();
        }
        for request in xrc.request.take().into_iter().chain(xrc.reciprocal.take()) {
            request.reject(&CmData::EMPTY);
        }
        if let Some(request) = xrc.answered.take() {
            circuits.retire(request);
        }
        if notify {
            self.notify_end(control);
        }
    }

    /// Sends the notice of the end, unless it was sent or the peer does not know it. Until the
    /// answer, what the peer's requests may access is kept: the peer may have sent its notice
    /// first, while they were under way.
    fn notify_end(&self, control: &mut Control) {
        let xrc = &mut control.xrc;
        if xrc.end_notified || xrc.peer == 0 {
            return;
        }
        if let (Ok(circuits), Some(to)) = (self.circuits(), xrc.notices) {
            xrc.end_notified = true;
            let end = End {
                to: xrc.peer,
                from: xrc.own,
            };
            // the peer may access the block, and use keys, until it has answered
            let target = self.ends.lock().target.clone();
            let block = control.block.as_ref();
            let kept = block.map(|block| Kept::of(block, target.as_deref()));
            control.notifier = None;
            circuits.notify((xrc.local, to), end, kept, self.own_circuit());
        }
    }

    /// Requests that the device has not flushed end with the circuit, which then must not live
    /// longer than its users.
    pub(super) fn release_unflushed(&self) {
        if self.slots.has_requests()
            && let Some(circuit) = self.own_circuit()
            && let Ok(circuits) = self.circuits()
        {
            circuits.release(&circuit);
        }
    }

    /// Releases the circuits, after the requests have completed. Until then the peer's notice of
    /// the end finds the endpoint, and its answer waits for them.
    pub(super) fn drop_ends(&self, control: &mut Control) {
        if control.xrc.own != 0
            && let Ok(circuits) = self.circuits()
        {
            circuits.forget(control.xrc.own);
        }
        let ends = std::mem::take(&mut *self.ends.lock());
        if let Some(target) = &ends.target {
            self.leave_target(control, target);
        }
        drop(ends);
        drop(control.xrc.share.take());
    }

    /// The circuit on which this side posts.
    pub(super) fn own_circuit(&self) -> Option<Arc<Circuit>> {
        self.ends.lock().circuit.clone()
    }

    /// The target at which the peer's requests arrive.
    #[cfg(test)]
    pub(super) fn own_target(&self) -> Option<Arc<Target>> {
        self.ends.lock().target.clone()
    }

    /// The peer's circuit has failed, or has ended.
    pub(super) fn note_target_failure(&self) {
        // before the end is reported, behind which the application may close regions
        self.target_failed.store(true, Ordering::Release);
        self.conn.note_failure();
    }

    /// A request has failed, and with it this side's circuit.
    pub(super) fn fail_xrc(&self) {
        // also of an endpoint whose connection has ended: its requests stay on the circuit
        if let Some(circuit) = self.own_circuit() {
            circuit.note_failure();
        }
        self.conn.note_failure();
    }

    /// Whether the answer to this side's request has an effect on the connection. The accepting
    /// side may have seen the end of the connection before the answer that establishes it.
    fn awaits_answer(&self, passive: bool) -> bool {
        matches!(
            (self.conn.state.get(), passive),
            (State::Accepted | State::Broken, true) | (State::Connecting, false)
        )
    }

    /// The peer's target acknowledges nothing more.
    pub(super) fn sever_xrc(&self) {
        let target = self.ends.lock().target.clone();
        if let Some(target) = target {
            // an error is that of a target that is in this state already
            let _ = target.set_error();
        }
    }
}

impl CircuitUser for Shared {
    fn request(
        &self,
        circuit: &Arc<Circuit>,
        local: SocketAddr,
        port: u16,
        redirected: Option<u32>,
    ) -> Result<Vec<u8>> {
        let mut control = self.control.lock();
        let passive = control.side.passive;
        if !self.awaits_answer(passive) {
            return Err(FiErrno::ECANCELED);
        }
        // of an accepted connection, the address at which the peer's request has arrived
        control.xrc.local.get_or_insert(local);
        let header = Header {
            kind: match (redirected, passive) {
                (Some(_), _) => Kind::OtherDomain,
                (None, false) => Kind::Original,
                (None, true) => Kind::Reciprocal,
            },
            port,
            target: circuit.target(),
            srq: self.srq_number(&control)?,
            tag: redirected.unwrap_or(control.xrc.tag),
        };
        if passive {
            if control.qp.is_some() {
                // a repeated request is on another circuit
                Self::leave_directory(&mut control);
            }
            self.open_sides_xrc(&mut control, circuit)?;
            if control.xrc.peer == 0 || header.target == 0 {
                return Ok(msg_xrc::answer(&header, &CmData::EMPTY));
            }
        }
        let mark = Mark {
            auth: self.auth().map(crate::auth::AuthKey::tag),
            initiator: (header.target != 0).then(|| circuit.qp().qp_number().get()),
        };
        let data = match passive {
            true => CmData::EMPTY,
            false => control.data,
        };
        Ok(msg_xrc::request(&header, &data, &mark))
    }

    fn answered(&self, share: Share, answer: &PrivateData) {
        let circuit = Arc::clone(share.circuit());
        let peer = CmData::decode(msg_xrc::data_of(answer.bytes())).introduction();
        let mut control = self.control.lock();
        let passive = control.side.passive;
        if !self.awaits_answer(passive) {
            drop(control);
            return;
        }
        control.xrc.share = Some(share);
        if passive {
            self.process_introduction(&mut control, peer);
            self.complete(&mut control, PrivateData::EMPTY);
            return;
        }
        if let Err(error) = self.answered_original(&mut control, &circuit, answer, peer) {
            self.conn.not_connected(error, 0, PrivateData::EMPTY);
        }
    }

    fn answered_and_ended(&self) {
        let mut control = self.control.lock();
        if control.side.passive && self.awaits_answer(true) {
            // the peer may have reported the connection, and sent messages
            self.conn.note_failure();
            self.complete(&mut control, PrivateData::EMPTY);
            if control.xrc.peer == 0 {
                // its introduction was in the answer, and no notice of the end follows
                Self::leave_directory(&mut control);
            }
        } else {
            drop(control);
            let error = FiErrno::ECONNABORTED;
            self.conn.not_connected(error, 0, PrivateData::EMPTY);
        }
    }

    fn not_connected(&self, error: FiErrno, status: i32, data: &PrivateData) {
        let data = match Header::decode(data.bytes()) {
            Some(_) => data.behind(HEADER_SIZE),
            None => PrivateData::EMPTY,
        };
        self.conn.not_connected(error, status, data);
    }

    fn reciprocal(&self, request: Incoming) {
        let mut control = self.control.lock();
        if control.side.passive || !self.conn.state.is(State::Connecting) {
            request.reject(&CmData::EMPTY);
            return;
        }
        if let Ok(circuits) = self.circuits() {
            circuits.end_expectation(control.xrc.own);
        }
        match control.xrc.share.is_some() {
            true => self.answer_reciprocal(&mut control, request),
            false => control.xrc.reciprocal = Some(request),
        }
    }

    fn redirected(&self, request: Incoming) {
        let mut control = self.control.lock();
        if !control.side.passive {
            drop(control);
            return self.reciprocal(request);
        }
        let Ok(circuits) = self.circuits() else {
            return;
        };
        if request.names_target() || !self.conn.state.is(State::Accepting) {
            request.reject(&CmData::EMPTY);
            // the target of the first request has failed while it was looked at
            if self.conn.state.is(State::Broken) && control.xrc.dial.is_none() {
                let error = FiErrno::ECONNABORTED;
                self.conn.not_connected(error, 0, PrivateData::EMPTY);
            }
            return;
        }
        circuits.end_expectation(control.xrc.own);
        if let Err(error) = self.answer_original(&mut control, request, 0) {
            // the state of a failed answer is that of a connection that was never established
            let error = event_errno(error);
            self.conn.report_failure(error, 0, PrivateData::EMPTY);
        }
    }

    fn not_answered(&self) {
        self.conn
            .not_connected(FiErrno::ETIMEDOUT, 0, PrivateData::EMPTY);
    }

    fn probe(&self) {
        // a control call is under way: the next call probes
        let Some(control) = self.control.try_lock() else {
            return;
        };
        let redirected = self.conn.state.is(State::Accepting) && control.xrc.process.is_some();
        // another provider's queue need not permit it
        let answered = self.conn.state.is(State::Connecting) && control.xrc.peer != 0;
        if !redirected && !answered {
            return;
        }
        // A request that fails ends the circuit, and with it the connections of its other users.
        let shared = self
            .own_circuit()
            .is_some_and(|circuit| circuit.is_shared());
        if answered && !shared {
            if let Some((binding, _)) = control.engine_queue() {
                let _ = binding.cq.progress_engine_requests();
            }
            let waits = self.slots.probe.pending.load(Ordering::Acquire);
            self.probe_silent(&control);
            if !waits {
                return;
            }
            // a device may find out late that a target has ended with all its holders
        }
        let (Ok(circuits), xrc) = (self.circuits(), &control.xrc) else {
            return;
        };
        // an earlier release does not state it
        let known = || circuits.process_of(xrc.remote?.ip(), xrc.peer_srq?);
        if let Some(process) = xrc.process.or_else(known) {
            circuits.ask((xrc.local, process), self.user());
        }
    }

    fn process_ended(&self) {
        let control = self.control.lock();
        let (peer, process) = (control.xrc.peer, control.xrc.process);
        if self.conn.state.is(State::Connecting) && peer != 0 {
            self.conn.note_failure();
        } else if self.conn.state.is(State::Accepting) && process.is_some() {
            // nothing of the connection exists yet
            let error = FiErrno::ECONNABORTED;
            self.conn.not_connected(error, 0, PrivateData::EMPTY);
        }
    }

    fn peer_ended(&self) {
        self.conn.note_failure();
        if let Ok(circuits) = self.circuits() {
            circuits.queue_end_notice(self.user());
        }
    }

    fn has_requests(&self) -> bool {
        // The request by which a deferred operation fails is recorded before this flag is cleared.
        let follow = self.slots.awaits_progress();
        follow || self.slots.has_requests()
    }

    fn retire_circuit_if_alone(&self) -> bool {
        let retires = |circuit: Arc<Circuit>| circuit.has_failed() || circuit.retire_if_alone();
        self.own_circuit().is_none_or(retires)
    }

    fn has_operations(&self) -> bool {
        self.slots.tx.outstanding() != 0
    }

    fn progress_requests(&self) {
        // a control call is under way: the next look polls
        let Some(control) = self.control.try_lock() else {
            return;
        };
        if let Some((binding, _)) = control.engine_queue() {
            let _ = binding.cq.progress_engine_requests();
        }
    }

    fn progress_mark(&self) -> u32 {
        self.slots.tx.progress_mark()
    }

    fn send_end_notice(&self) {
        let mut control = self.control.lock();
        // `close` sends the notice itself, and so does a connection that was not complete
        if self.conn.state.is(State::Disconnected) {
            self.notify_end(&mut control);
        }
        drop(control);
        // no revocation can be sent any more
        self.slots.engine_requests.want(false);
        // Posts check the state under this lock: those that precede the end are recorded now, and
        // none follows but the failures of deferred operations.
        if let Some(side) = self.tx.lock().as_mut() {
            side.cancel_deferred();
        }
    }

    fn circuit_failed(&self) {
        self.conn.note_failure();
        if let Ok(circuits) = self.circuits() {
            circuits.queue_end_notice(self.user());
        }
    }
}
