//! What the connections of circuits call at the endpoint that they belong to.

use std::sync::Arc;

use super::circuit_cm::{InitiatorCm, TargetCm};
use crate::rdm::link::endpoint::LinkEndpoint;
use crate::rdm::table_keys::CircuitKey;
use crate::verbs::{CmEvent, QpNumber};

/// The endpoint of circuits and of the links on them.
pub(in crate::rdm) trait CircuitEndpoint: LinkEndpoint {
    /// An event of the connection manager for a circuit, at its initiator.
    fn circuit_event(&self, cm: &InitiatorCm, event: CmEvent);

    /// The initiator of a circuit has failed.
    fn circuit_broken(&self, circuit: CircuitKey);

    /// The identifier of a circuit at its target is of no use any more: the connection is
    /// established, or has ended.
    fn target_connected_or_ended(&self, cm: Arc<TargetCm>);

    /// A target has failed.
    fn target_broken(&self, target: QpNumber);
}
