//! What connections are set up with, where the application or its user may know better.

use crate::errno::{FiErrno, Result};

/// Timers and retries of a connection, as `ibv_modify_qp(3)` encodes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// How long a peer waits that finds no receive posted here: 1 (0.01 ms) to 31 (491.52 ms), 0 for 655.36 ms.
    /// 12 (0.64 ms) unless set; the connection manager's own choice is 0.
    pub min_rnr_timer: u8,
    /// How often a peer without a posted receive is tried again, 7 for ever, which is what it is unless set:
    /// the application controls that.
    pub rnr_retry_count: u8,
    /// The time after which an unacknowledged packet is sent again: 4.096 µs times 2 to the power of this, at
    /// most 31. 16 (268 ms) unless set. With all retransmissions that is 1.9 s on rxe, whose timer is exact;
    /// InfiniBand lets a device take up to four times as long, 7.5 s. The connection manager's own choice for
    /// Ethernet can take minutes. `docs/protocol.md` has the whole sum.
    pub ack_timeout: u8,
    /// Retransmissions before a peer counts as gone, at most 7. 6 unless set, one less than verbs has room for:
    /// rxe takes 7 for "for ever" (`drivers/infiniband/sw/rxe/rxe_comp.c`, `COMPST_ERROR_RETRY`), and a dead
    /// peer would never be noticed.
    pub retry_count: u8,
    /// Traffic class (the type of service) of the packets; the connection manager's choice unless set.
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
    /// Whether verbs has such values.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn check(&self) -> Result<()> {
        let timers = self.min_rnr_timer <= 31 && self.ack_timeout <= 31;
        let retries = self.rnr_retry_count <= 7 && self.retry_count <= 7;
        if timers && retries {
            Ok(())
        } else {
            Err(FiErrno::EINVAL)
        }
    }
}
