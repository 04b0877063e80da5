//! The peer's introduction. After it, an endpoint resolves the peer's keys and notifies the peer of
//! revocations.

use std::sync::Arc;

use super::shared::{Control, Shared};
use crate::conn::RevocationNotifier;
use crate::initiator::QpLink;
use crate::initiator::keys::PeerKeys;
use crate::wire::introduction::Introduction;

impl Shared {
    /// Adds the peer to the key directory, before the address of the connection block is sent: from
    /// then on the peer can look keys up. On the connecting side the peer's introduction follows
    /// later ([`Self::process_introduction`]).
    pub(super) fn join_directory(&self, control: &mut Control) {
        if let Some(link) = self.link(control)
            && let Some(block) = &control.block
        {
            let notifier = Arc::new(RevocationNotifier::new(link, block));
            let weak = Arc::downgrade(&notifier);
            block.join(weak);
            control.notifier = Some(notifier);
        }
    }

    /// Processes the peer's introduction from its request or reply, after [`Self::join_directory`].
    /// A peer without an introduction leaves the directory.
    pub(super) fn process_introduction(&self, control: &mut Control, peer: Option<Introduction>) {
        let Some(peer) = peer else {
            Self::leave_directory(control);
            return;
        };
        let (Some(link), Some(block)) = (self.link(control), &control.block) else {
            return;
        };
        if let Some(side) = self.tx.lock().as_mut() {
            side.introduce(&peer, PeerKeys::new(link, peer, block));
        }
        if let Some(notifier) = &control.notifier {
            notifier.introduce(peer);
        }
    }

    /// Removes the peer from the key directory.
    pub(super) fn leave_directory(control: &mut Control) {
        // the notifier is dropped behind `leave`, when the directory uses it no more: dropping the
        // last reference to a block acquires the directory's lock
        if let (Some(_), Some(block)) = (control.notifier.take(), &control.block) {
            block.leave();
        }
    }

    /// The queue pair for the engine's own requests.
    fn link(&self, control: &Control) -> Option<QpLink> {
        let (binding, member) = control.engine_queue()?;
        Some(QpLink::new(
            Arc::clone(control.qp.as_ref()?),
            Arc::clone(&binding.cq),
            member,
            Arc::clone(&self.slots),
            control.xrc.peer_srq,
        ))
    }
}
