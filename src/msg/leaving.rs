//! The peer of an endpoint on XRC whose connection has ended. Its requests may still arrive through
//! a target that other endpoints hold. `docs/protocol-xrc.md`, "Notice of the end".

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::conn::Keep;
use crate::errno::Result;
use crate::log::warn_log;
use crate::mr::{ConnectionBlock, Look, Peer};
use crate::verbs::{QpNumber, Target, Xrcd};

/// Finds the target of a peer's requests. No handle of it: that would prolong its life.
struct TargetRef {
    xrcd: Weak<Xrcd>,
    number: QpNumber,
    /// Another target may have the number later.
    initiator: QpNumber,
}

impl TargetRef {
    /// `None`: the target executes no requests.
    fn of(target: &Target) -> Option<Self> {
        let state = target.query().ok().filter(|state| state.receives)?;
        Some(Self {
            xrcd: Arc::downgrade(target.xrcd()),
            number: target.number(),
            initiator: state.peer,
        })
    }

    /// A new handle of the target. `None`: it has ended, or executes no requests.
    ///
    /// # Errors
    /// Those of [`Target::open`] that may pass, and of [`Target::query`].
    fn open(&self) -> Result<Option<Target>> {
        let Some(xrcd) = self.xrcd.upgrade() else {
            return Ok(None);
        };
        let target = match Target::open(&xrcd, self.number) {
            Err(error) if !error.may_pass() => return Ok(None),
            target => target?,
        };
        let state = target.query()?;
        let same = state.receives && state.peer == self.initiator;
        Ok(same.then_some(target))
    }
}

/// The peer, until it has answered the notice of the end, or its requests cannot arrive any more:
/// it may still use keys. Revocations wait for that until it is given up; from then on they reserve
/// the keys. It is not notified of them. The directory may drop the last reference with its lock
/// held, so the drop does nothing.
struct Leaving {
    target: Option<TargetRef>,
    given_up: AtomicBool,
}

impl Leaving {
    fn cut_off(&self) {
        let Some(place) = &self.target else {
            return;
        };
        let ended = place.open().and_then(|target| match target {
            Some(target) => target.set_error(),
            None => Ok(()),
        });
        if let Err(error) = ended {
            warn_log!(EpCtrl, "the target of a silent peer is not ended: {error}");
        }
    }
}

impl Peer for Leaving {
    fn notify_revocations(&self) {}

    fn look(&self) -> Look {
        Look {
            up: !self.given_up.load(Ordering::Relaxed),
            answer: None,
            asked: false,
        }
    }

    fn acknowledge(&self) {}

    /// All connections of the peer's circuit to this node end.
    fn sever(&self) {
        self.cut_off();
    }
}

/// What is kept until a peer has answered the notice of the end: the connection block, and the
/// peer's place in the directory.
pub(super) struct Kept {
    block: Arc<ConnectionBlock>,
    peer: Arc<Leaving>,
}

impl Kept {
    /// `target`: where the peer's requests arrive.
    pub(super) fn of(block: &Arc<ConnectionBlock>, target: Option<&Target>) -> Box<dyn Keep> {
        let peer = Arc::new(Leaving {
            target: target.and_then(TargetRef::of),
            given_up: AtomicBool::new(false),
        });
        let weak: Weak<Leaving> = Arc::downgrade(&peer);
        block.succeed(weak);
        Box::new(Self {
            block: Arc::clone(block),
            peer,
        })
    }
}

impl Keep for Kept {
    fn give_up(&self) {
        self.peer.given_up.store(true, Ordering::Relaxed);
    }

    fn is_needed(&self) -> bool {
        let Some(place) = &self.peer.target else {
            return false;
        };
        self.block.holds_keys() && !matches!(place.open(), Ok(None))
    }

    fn cut_off(&self) {
        self.peer.cut_off();
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.block.leave();
    }
}
