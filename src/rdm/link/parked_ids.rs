//! Identifiers of ended links whose port is down.
//!
//! The connection manager sends a disconnect request when a connected identifier is destroyed. On
//! Linux's rxe, a request that its queue pair 1 sends while the port is down moves that queue pair
//! to its error state for good (`rxe_req.c`, `rxe_requester`): no process connects any more until
//! the device is created again. So these identifiers live until the port is active. The peer does
//! not wait for the request: its own queue pair breaks, or it is replaced by the next link.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::verbs::{CmId, Device};

/// The period in which the ports are examined.
const PERIOD: Duration = Duration::from_millis(100);

/// See the module. The rest is destroyed with it.
#[derive(Debug, Default)]
pub(in crate::rdm) struct ParkedIds(Mutex<Parked>);

#[derive(Debug, Default)]
struct Parked {
    ids: Vec<Arc<CmId>>,
    /// When the ports are examined next.
    due: Option<Instant>,
}

/// Whether the port of an identifier is down. A device that is gone has no such port.
pub(in crate::rdm) fn is_port_down(device: &Device, id: &CmId) -> bool {
    let port = id.port();
    port != 0 && device.port(port).is_ok_and(|port| !port.active)
}

impl ParkedIds {
    /// Keeps an identifier until its port is active.
    pub(in crate::rdm) fn park(&self, id: Arc<CmId>) {
        self.0.lock().ids.push(id);
    }

    /// Destroys the identifiers that are not `down`. Returns when the others are examined again.
    pub(in crate::rdm) fn tend(
        &self,
        now: Instant,
        down: impl Fn(&CmId) -> bool,
    ) -> Option<Instant> {
        let mut parked = self.0.lock();
        if parked.ids.is_empty() {
            parked.due = None;
            return None;
        }
        let due = *parked.due.get_or_insert(now + PERIOD);
        if due > now {
            return Some(due);
        }
        let ids = std::mem::take(&mut parked.ids).into_iter();
        let (kept, active): (Vec<_>, Vec<_>) = ids.partition(|id| down(id));
        parked.due = (!kept.is_empty()).then(|| now + PERIOD);
        parked.ids = kept;
        let due = parked.due;
        drop(parked);
        drop(active);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdm::tests::endpoints::domain;
    use crate::verbs::EventChannel;

    #[test]
    fn identifiers_live_until_their_port_is_active() {
        let domain = domain();
        let device = domain.device();
        let channel = EventChannel::create(device.backend()).unwrap();
        let parked = ParkedIds::default();
        let begin = Instant::now();
        assert_eq!(parked.tend(begin, |_| panic!("nothing is parked")), None);
        let ids = [(); 2].map(|()| Arc::new(channel.create_id().unwrap()));
        let objects = ids.each_ref().map(|id| id.object());
        let weak = ids.each_ref().map(Arc::downgrade);
        // without a port, and with that of the embedded device
        assert!(ids.iter().all(|id| !is_port_down(device, id)));
        ids.into_iter().for_each(|id| parked.park(id));
        let due = parked.tend(begin, |_| panic!("not due yet")).unwrap();
        assert_eq!(due, begin + PERIOD);
        // the port of the first one is active
        let next = parked.tend(due, |id| id.object() != objects[0]);
        assert_eq!(next, Some(due + PERIOD));
        assert!(weak[0].upgrade().is_none() && weak[1].upgrade().is_some());
        assert_eq!(parked.tend(due + PERIOD, |_| false), None);
        assert!(weak[1].upgrade().is_none());
    }
}
