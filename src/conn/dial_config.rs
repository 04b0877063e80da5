//! The parameters of a request for a circuit (XRC), and which of them share a circuit.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use crate::errno::Result;
use crate::queue::CompletionQueue;
use crate::verbs::{Cq, Pd, QpConfig};

/// Endpoints that share a circuit, unless the device's send queues are shorter.
const SHARES: usize = 8;

/// The parameters of a dial.
#[derive(Clone, Debug)]
pub(crate) struct DialConfig {
    pub(crate) from: Option<SocketAddr>,
    pub(crate) to: SocketAddr,
    pub(crate) pd: Arc<Pd>,
    pub(crate) cq: Arc<CompletionQueue>,
    /// Of the endpoint: the initiator's send queue is longer.
    pub(crate) qp: QpConfig,
}

impl DialConfig {
    pub(super) fn room(&self) -> usize {
        self.qp.max_send_wr
    }

    /// The configuration of an initiator for several endpoints.
    pub(super) fn initiator(&self) -> QpConfig {
        let most = self.pd.device().attr().max_qp_wr;
        let shares = (most / self.room().max(1)).clamp(1, SHARES);
        QpConfig {
            max_send_wr: self.room() * shares,
            ..self.qp
        }
    }

    pub(super) fn send_cq(&self) -> Result<&Arc<Cq>> {
        self.cq.device_cq()
    }
}

/// What the endpoints that share a circuit have in common. It keeps no object alive: the place of a
/// circuit that has ended stays until the next dial.
#[derive(Debug)]
pub(super) struct Shape {
    to: IpAddr,
    from: Option<IpAddr>,
    pd: Weak<Pd>,
    cq: Weak<CompletionQueue>,
    max_send_sge: usize,
    max_inline: usize,
}

impl Shape {
    pub(super) fn of(config: &DialConfig) -> Self {
        Self {
            to: config.to.ip(),
            from: config.from.map(|from| from.ip()),
            pd: Arc::downgrade(&config.pd),
            cq: Arc::downgrade(&config.cq),
            max_send_sge: config.qp.max_send_sge,
            max_inline: config.qp.max_inline,
        }
    }

    /// Whether an endpoint with these parameters can share the circuit.
    pub(super) fn suits(&self, config: &DialConfig) -> bool {
        self.to == config.to.ip()
            && self.from == config.from.map(|from| from.ip())
            && std::ptr::eq(self.cq.as_ptr(), Arc::as_ptr(&config.cq))
            && std::ptr::eq(self.pd.as_ptr(), Arc::as_ptr(&config.pd))
            && (self.max_send_sge, self.max_inline)
                == (config.qp.max_send_sge, config.qp.max_inline)
    }
}
