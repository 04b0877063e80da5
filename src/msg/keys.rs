//! The peer's introduction. After it, an endpoint resolves the peer's keys and notifies the peer of
//! revocations.

use std::sync::Arc;

use super::core::{Control, Core};
use super::sq::QpLink;
use crate::conn::RevocationNotifier;
use crate::initiator::keys::PeerKeys;
use crate::wire::introduction::Introduction;

impl Core {
    /// Processes the peer's introduction from its request or reply.
    pub(super) fn introduced(&self, control: &mut Control, peer: Option<Introduction>) {
        let (Some(peer), Some(block), Some(qp)) = (peer, control.block.clone(), control.qp.clone())
        else {
            return;
        };
        let side = match (&control.tx, control.tx_place) {
            (Some(binding), Some(place)) => Some((binding, place)),
            _ => control.rx.as_ref().zip(control.rx_place),
        };
        if let Some((binding, place)) = side {
            let link = QpLink {
                qp,
                cq: Arc::clone(&binding.cq),
                place,
                rings: Arc::clone(&self.rings),
            };
            if let Some(side) = self.tx.lock().as_mut() {
                side.introduce(&peer, PeerKeys::new(link.clone(), peer, &block));
            }
            let notifier = Arc::new(RevocationNotifier::new(link, peer, &block));
            let weak = Arc::downgrade(&notifier);
            block.join(weak);
            control.notifier = Some(notifier);
        }
    }
}
