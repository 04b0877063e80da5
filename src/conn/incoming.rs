//! A peer's request for a circuit, or for a connection on a circuit that exists (XRC).

use std::net::SocketAddr;
use std::sync::Arc;

use super::connection::ended_errno;
use super::{ConnectRequest, Tuning};
use crate::errno::{FiErrno, Result};
use crate::log::info_log;
use crate::verbs::{CmId, PrivateData, QpNumber, Target, Xrcd};
use crate::wire::cm_data::CmData;
use crate::wire::msg_xrc::{self, Header, Kind};

/// A request that waits for its answer, or is answered. The identifier of a circuit's request stays
/// until both directions are connected.
#[derive(Debug)]
pub(crate) struct Incoming {
    id: CmId,
    header: Header,
    data: Box<PrivateData>,
    /// It is a request for a service: the circuit exists.
    sidr: bool,
}

impl Incoming {
    /// `None`: it is no request of an endpoint on XRC; dropped, it is rejected.
    pub(crate) fn of(request: ConnectRequest) -> Option<Self> {
        let header = Header::decode(request.private_data().bytes())?;
        // a connection request makes a target, a request for a service names one
        if request.is_sidr() != (header.target != 0) {
            return None;
        }
        let sidr = request.is_sidr();
        let (id, data) = request.take()?;
        Some(Self {
            id,
            header,
            data: Box::new(data),
            sidr,
        })
    }

    /// Whether the circuit exists.
    pub(crate) fn names_target(&self) -> bool {
        self.sidr
    }

    /// The identity of the identifier in events.
    pub(super) fn object(&self) -> usize {
        self.id.object()
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The private data.
    pub(crate) fn data(&self) -> &[u8] {
        self.data.bytes()
    }

    /// This side's address, and the peer's.
    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.id.local_addr().zip(self.id.peer_addr())
    }

    /// Creates the target of a new circuit, or opens the one that the request names.
    ///
    /// # Errors
    /// `ENOENT`: the domain has no such target, one that does not receive, or that of another
    /// circuit. `ECONNRESET`: the peer has ended the request for a new one. Others: the device's.
    pub(crate) fn target(&self, xrcd: &Arc<Xrcd>, tuning: &Tuning) -> Result<Target> {
        if !self.sidr {
            let target = Target::create(xrcd)?;
            tuning.set_traffic_class(&self.id);
            tuning.set_ack_timeout(&self.id);
            let advanced = target.advance_to_rts(&self.id, tuning.min_rnr_timer);
            let advanced = advanced
                .inspect_err(|error| info_log!(EpCtrl, "the target of a circuit request: {error}"));
            return advanced.map_err(ended_errno).map(|()| target);
        }
        let number = QpNumber::new(self.header.target).ok_or(FiErrno::ENOENT)?;
        let target = Target::open(xrcd, number).map_err(|error| match error {
            FiErrno::EINVAL => FiErrno::ENOENT,
            error => error,
        })?;
        let state = target.query()?;
        // the target with this number can be another one than that of the circuit
        let initiator = msg_xrc::mark(self.data.bytes()).and_then(|mark| mark.initiator);
        let is_other = initiator.is_some_and(|number| number != state.peer.get());
        match state.receives && !is_other {
            true => Ok(target),
            false => Err(FiErrno::ENOENT),
        }
    }

    /// Sends the answer.
    ///
    /// # Errors
    /// `ECONNRESET`: the peer has ended the connection. Others: the connection manager's.
    pub(crate) fn answer(&self, target: &Target, answer: &[u8], tuning: &Tuning) -> Result<()> {
        match self.sidr {
            true => self.id.answer_service(answer),
            false => {
                let param = tuning.conn_param(answer);
                let accepted = self.id.accept_with(target.number(), &param);
                accepted.map_err(ended_errno)
            }
        }
    }

    /// Rejects the request.
    pub(crate) fn reject(&self, data: &CmData) {
        let kind = match self.sidr {
            true => Kind::Rejected,
            false => self.header.kind,
        };
        let header = Header {
            kind,
            port: 0,
            target: 0,
            srq: 0,
            ..self.header
        };
        self.refuse(header, data, self.is_marked());
    }

    /// Whether the request has the mark of a `weft` endpoint. Of the reciprocal requests only those
    /// that name a target have it.
    pub(crate) fn is_marked(&self) -> bool {
        msg_xrc::mark(self.data.bytes()).is_some()
    }

    /// Answers that this process does not receive through the target of the request. The peer sends
    /// a request for a new circuit to this port, with this number. `is_weft`: the peer is a `weft`
    /// endpoint; another one is rejected, and then the result is false.
    pub(crate) fn redirect(&self, port: u16, tag: u32, is_weft: bool) -> bool {
        let header = Header {
            kind: Kind::OtherDomain,
            port,
            target: tag,
            srq: 0,
            ..self.header
        };
        self.refuse(header, &CmData::EMPTY, is_weft)
    }

    fn refuse(&self, header: Header, data: &CmData, is_weft: bool) -> bool {
        // an error is ignored: the peer may have given up
        let answers = self.sidr && is_weft;
        let _ = if answers {
            // rdma_cm(7) does not promise the private data of a refused request for a service
            self.id.answer_service(&msg_xrc::answer(&header, data))
        } else {
            let header = Header {
                kind: self.header.kind,
                port: 0,
                target: 0,
                ..header
            };
            self.id.reject(&msg_xrc::answer(&header, data))
        };
        answers
    }
}
