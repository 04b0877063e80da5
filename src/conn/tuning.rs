//! Connection parameters that the application or its user can override.

use std::time::Duration;

use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};
use crate::verbs::{CmId, ConnParam, Qp};

/// Timers and retries of a connection, as `ibv_modify_qp(3)` encodes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// RNR timer: the time that the peer waits before a retry if no receive is posted here. 1 (0.01
    /// ms) to 31 (491.52 ms), 0 for 655.36 ms; default 12 (0.64 ms). The connection manager's
    /// default is 0.
    pub min_rnr_timer: u8,
    /// RNR retry count; 7, the default, retries indefinitely, because the application controls when
    /// receives are posted.
    pub rnr_retry_count: u8,
    /// Acknowledgement timeout, after which a packet is retransmitted: 4.096 µs × 2^`ack_timeout`,
    /// at most 31; default 16 (268 ms). With all retransmissions this is 1.9 s on rxe, whose timer
    /// is exact; InfiniBand permits a device up to four times as long, 7.5 s. The connection
    /// manager's default for Ethernet can take minutes. `docs/protocol.md` has the total time.
    pub ack_timeout: u8,
    /// Retransmissions before the peer is considered dead, at most 7; default 6, one less than the
    /// maximum of verbs: rxe retries indefinitely with 7 (`drivers/infiniband/sw/rxe/rxe_comp.c`,
    /// `COMPST_ERROR_RETRY`), and a dead peer would never be detected.
    pub retry_count: u8,
    /// Traffic class (type of service) of the packets; `None`: the connection manager's default.
    pub traffic_class: Option<u8>,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            min_rnr_timer: 12,
            rnr_retry_count: 7,
            ack_timeout: 16,
            retry_count: 6,
            traffic_class: None,
        }
    }
}

impl Tuning {
    /// Checks that all values are in the ranges of verbs.
    ///
    /// # Errors
    /// `EINVAL`: a value is out of range.
    pub fn check(&self) -> Result<()> {
        let timers = self.min_rnr_timer <= 31 && self.ack_timeout <= 31;
        let retries = self.rnr_retry_count <= 7 && self.retry_count <= 7;
        if timers && retries {
            Ok(())
        } else {
            Err(FiErrno::EINVAL)
        }
    }

    /// The same with the traffic class of an endpoint, if it has one of its own.
    pub(crate) fn with_class(self, class: Option<u8>) -> Self {
        Self {
            traffic_class: class.or(self.traffic_class),
            ..self
        }
    }

    /// How long a device with an exact timer repeats a request that is not acknowledged; zero if
    /// without end.
    pub(crate) fn retries(&self) -> Duration {
        let tries = u32::from(self.retry_count) + 1;
        match self.ack_timeout {
            0 => Duration::ZERO,
            shift => Duration::from_nanos(4_096 << shift) * tries,
        }
    }

    /// Sets the traffic class, before the route is resolved or the reply is sent.
    pub(crate) fn set_traffic_class(&self, id: &CmId) {
        if let Some(class) = self.traffic_class
            && let Err(error) = id.set_type_of_service(class)
        {
            warn_log!(
                EpCtrl,
                "traffic class {class} could not be set: {error}; the default class is used"
            );
        }
    }

    /// Sets the acknowledgement timeout, before the request or the reply is sent.
    pub(crate) fn set_ack_timeout(&self, id: &CmId) {
        if let Err(error) = id.set_ack_timeout(self.ack_timeout) {
            info_log!(
                EpCtrl,
                "{}: acknowledgement timeout {} could not be set: {error}; the default is used",
                id.device_name().unwrap_or_default(),
                self.ack_timeout
            );
        }
    }

    /// The parameters of a request or a reply.
    pub(crate) fn conn_param<'a>(&self, private_data: &'a [u8]) -> ConnParam<'a> {
        ConnParam {
            private_data,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
        }
    }

    /// Sets the RNR timer of a connected queue pair.
    pub(crate) fn set_rnr_timer(&self, qp: &Qp) {
        if let Err(error) = qp.set_min_rnr_timer(self.min_rnr_timer) {
            info_log!(
                EpCtrl,
                "queue pair {}: minimum RNR timer {} could not be set: {error}",
                qp.number(),
                self.min_rnr_timer
            );
        }
    }
}
