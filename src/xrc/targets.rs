//! The targets that this process holds, by the circuit to which each belongs, with the number of
//! links that use it.
//!
//! The map's lock is a leaf: it is held while an entry is looked up, not during verbs.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::errno::{FiErrno, Result};
use crate::verbs::{QpNumber, Target, Xrcd};

/// A circuit, as its initiator's side has stated it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TargetKey {
    /// Endpoint id of the initiator's endpoint.
    pub endpoint: u64,
    /// Number that this endpoint has given to the circuit.
    pub circuit: u32,
}

#[derive(Debug)]
struct Held {
    target: Arc<Target>,
    /// The initiator to which the target is connected.
    peer: QpNumber,
    links: usize,
}

/// The held targets of an XRC domain. Thread safe.
#[derive(Debug, Default)]
pub struct Targets {
    held: Mutex<HashMap<TargetKey, Held>>,
}

impl Targets {
    /// Adds a target that this process has created and connected to the initiator `peer`, without
    /// links.
    ///
    /// # Errors
    /// `EEXIST`: the circuit has a target already.
    pub fn add(&self, key: TargetKey, target: Arc<Target>, peer: QpNumber) -> Result<()> {
        let mut held = self.held.lock();
        if held.contains_key(&key) {
            return Err(FiErrno::EEXIST);
        }
        let links = 0;
        let added = Held {
            target,
            peer,
            links,
        };
        held.insert(key, added);
        Ok(())
    }

    /// Holds the target of a circuit for one more link: the target with this number, in `xrcd`, in
    /// a state in which it receives, and connected to the initiator `peer`. Opens it if this
    /// process does not hold it. The caller holds no lock.
    ///
    /// # Errors
    /// `ENOENT`: there is no such target in this domain, or the circuit has another one (NODE).
    /// Others: the device's, which say nothing about the target.
    pub fn hold(
        &self,
        xrcd: &Arc<Xrcd>,
        key: TargetKey,
        number: QpNumber,
        peer: QpNumber,
    ) -> Result<Arc<Target>> {
        let there = self.target(key);
        let target = match there {
            Some(target) => target,
            None => match Target::open(xrcd, number) {
                Ok(target) => Arc::new(target),
                Err(FiErrno::EINVAL | FiErrno::ENOENT) => return Err(FiErrno::ENOENT),
                Err(error) => return Err(error),
            },
        };
        let state = target.query()?;
        if target.number() != number || !state.receives || state.peer != peer {
            return Err(FiErrno::ENOENT);
        }
        let mut held = self.held.lock();
        // the local reference is dropped behind the lock
        let entry = held.entry(key).or_insert_with(|| Held {
            target: Arc::clone(&target),
            peer,
            links: 0,
        });
        // another thread may have opened a target for this circuit meanwhile
        if entry.target.number() != number || entry.peer != peer {
            return Err(FiErrno::ENOENT);
        }
        entry.links += 1;
        Ok(Arc::clone(&entry.target))
    }

    /// The target of a circuit, if this process holds it.
    pub fn target(&self, key: TargetKey) -> Option<Arc<Target>> {
        let held = self.held.lock();
        held.get(&key).map(|held| Arc::clone(&held.target))
    }

    /// A link does not use the target any more. Its last link closes the handle, when no thread
    /// uses the target.
    pub fn release(&self, key: TargetKey) {
        let closed = {
            let mut held = self.held.lock();
            let Some(entry) = held.get_mut(&key) else {
                return;
            };
            entry.links = entry.links.saturating_sub(1);
            if entry.links > 0 {
                return;
            }
            held.remove(&key)
        };
        // without the lock: closing waits for the device
        drop(closed);
    }

    /// Closes the handle of a target without links, which its creator has kept for the first one.
    /// Returns whether there was such a target.
    pub fn expire(&self, key: TargetKey) -> bool {
        let closed = {
            let mut held = self.held.lock();
            let unused = held.get(&key).is_some_and(|entry| entry.links == 0);
            unused.then(|| held.remove(&key)).flatten()
        };
        closed.is_some()
    }

    /// Number of held targets.
    pub fn len(&self) -> usize {
        self.held.lock().len()
    }

    /// Whether no target is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::xrc_tests::{Side, circuit};

    const KEY: TargetKey = TargetKey {
        endpoint: 7,
        circuit: 1,
    };

    #[test]
    fn a_target_lives_until_the_last_link_of_its_last_holder() {
        let (a, b) = (Side::new(), Side::new());
        let (initiator, target) = circuit(&a, &b);
        let (number, peer) = (target.number(), initiator.qp_number());
        let (creator, other) = (Targets::default(), Targets::default());
        creator.add(KEY, Arc::new(target), peer).unwrap();
        let second = other.hold(b.xrcd(), KEY, number, peer).unwrap();
        assert_eq!(second.number(), number);
        drop(second);
        // a second link of the same circuit opens nothing
        other.hold(b.xrcd(), KEY, number, peer).unwrap();
        assert_eq!(other.len(), 1);
        // the creator has got no link in time
        assert!(creator.expire(KEY) && !creator.expire(KEY));
        assert!(creator.is_empty());
        other.release(KEY);
        assert!(!other.expire(KEY), "one link is left");
        assert!(Target::open(b.xrcd(), number).is_ok());
        other.release(KEY);
        assert!(other.is_empty());
        assert!(Target::open(b.xrcd(), number).is_err(), "it has ended");
        other.release(KEY);
    }

    #[test]
    fn only_the_target_of_the_circuit_is_held() {
        let (a, b) = (Side::new(), Side::new());
        let (initiator, target) = circuit(&a, &b);
        let (number, peer) = (target.number(), initiator.qp_number());
        let targets = Targets::default();
        let hold = |xrcd, number, peer| targets.hold(xrcd, KEY, number, peer).err();
        let missing = QpNumber::new(number.get() ^ 0x40).unwrap();
        assert_eq!(hold(b.xrcd(), missing, peer), Some(FiErrno::ENOENT));
        // another domain
        assert_eq!(hold(a.xrcd(), number, peer), Some(FiErrno::ENOENT));
        // connected to another initiator
        assert_eq!(hold(b.xrcd(), number, missing), Some(FiErrno::ENOENT));
        assert!(targets.is_empty());
        assert_eq!(hold(b.xrcd(), number, peer), None);
        // the circuit has one target
        let (second, other) = circuit(&a, &b);
        let (from, to) = (second.qp_number(), other.number());
        assert_eq!(hold(b.xrcd(), to, from), Some(FiErrno::ENOENT));
        let taken = targets.add(KEY, Arc::new(other), from);
        assert_eq!(taken, Err(FiErrno::EEXIST));
        // in the error state
        target.set_error().unwrap();
        assert_eq!(hold(b.xrcd(), number, peer), Some(FiErrno::ENOENT));
        targets.release(KEY);
        assert_eq!(hold(b.xrcd(), number, peer), Some(FiErrno::ENOENT));
        assert!(targets.is_empty());
    }
}
