//! Messages that arrive after their receives were found, and the names of them in packets.
//!
//! A key of the table is used again when its place was used 256 times. A sender that was stopped
//! can answer later than that with the name of a message that has ended meanwhile, in the same
//! session. So the names are not the keys: they are the numbers of a count of 32 bits.

use super::Arrival;
use crate::rdm::number_map::NumberMap;
use crate::rdm::slab::Slab;
use crate::rdm::table_keys::{ArrivalKey, ArrivalMark};
use crate::wire::rdm::OpId;

/// See the module.
pub(in crate::rdm) struct Arriving {
    slab: Slab<ArrivalMark, Arrival>,
    /// The messages that have a name.
    named: NumberMap<ArrivalKey>,
    /// The next name, which wraps.
    next: u32,
}

impl Arriving {
    pub(super) fn new() -> Self {
        Self {
            slab: Slab::new(),
            named: NumberMap::default(),
            next: 0,
        }
    }

    /// The number of messages.
    pub(in crate::rdm) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Adds a message, without a name. `None`: 2^24 messages arrive.
    pub(in crate::rdm) fn insert(&mut self, mut arrival: Arrival) -> Option<ArrivalKey> {
        arrival.name = None;
        self.slab.insert(arrival)
    }

    pub(in crate::rdm) fn remove(&mut self, key: ArrivalKey) -> Option<Arrival> {
        let arrival = self.slab.remove(key)?;
        if let Some(name) = arrival.name {
            self.named.remove(&name.get());
        }
        Some(arrival)
    }

    #[inline]
    pub(in crate::rdm) fn get(&self, key: ArrivalKey) -> Option<&Arrival> {
        self.slab.get(key)
    }

    #[inline]
    pub(in crate::rdm) fn get_mut(&mut self, key: ArrivalKey) -> Option<&mut Arrival> {
        self.slab.get_mut(key)
    }

    /// The keys of the messages that fulfil a condition; examines all.
    pub(in crate::rdm) fn keys_where(&self, is: impl Fn(&Arrival) -> bool) -> Vec<ArrivalKey> {
        self.slab.keys_where(is)
    }

    /// Whether a message fulfils a condition; examines all.
    #[cfg(test)]
    pub(in crate::rdm) fn any(&self, is: impl Fn(&Arrival) -> bool) -> bool {
        self.slab.any(is)
    }

    /// The name of a message in packets to its sender, which it gets by the first call.
    pub(in crate::rdm) fn name(&mut self, key: ArrivalKey) -> Option<OpId> {
        let arrival = self.slab.get_mut(key)?;
        if let Some(name) = arrival.name {
            return Some(name);
        }
        // at most 2^24 are in use
        while self.named.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let name = OpId::new(self.next);
        self.next = self.next.wrapping_add(1);
        self.named.insert(name.get(), key);
        arrival.name = Some(name);
        Some(name)
    }

    /// The message with a name. `None`: it has ended.
    #[inline]
    pub(in crate::rdm) fn named(&self, name: OpId) -> Option<ArrivalKey> {
        self.named.get(&name.get()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Envelope, Target};
    use super::*;
    use crate::mr::Desc;
    use crate::rdm::core::Origin;
    use crate::rdm::core::peer::PeerKey;
    use crate::rdm::iov::Iov;
    use crate::rdm::receive::Receive;

    fn arrival() -> Arrival {
        let peer = PeerKey::from_number(3);
        let receive = Receive {
            iov: Iov::default(),
            desc: Desc::NULL,
            several: false,
            context: 0,
            tagged: false,
            wanted: true,
        };
        let envelope = Envelope {
            peer,
            tag: None,
            data: None,
            len: 1,
        };
        let target = Target {
            receive,
            multi: None,
            posting: None,
        };
        let from = (Origin::of_test(peer), OpId::new(1));
        Arrival::new(from, envelope, target, None)
    }

    /// The sender can answer as late as it pleases.
    #[test]
    fn a_name_is_not_used_again_with_the_key() {
        let mut arrivals = Arriving::new();
        let first = arrivals.insert(arrival()).unwrap();
        let name = arrivals.name(first).unwrap();
        assert_eq!(arrivals.name(first), Some(name));
        assert_eq!(arrivals.named(name), Some(first));
        arrivals.remove(first).unwrap();
        let mut again = 0;
        for _ in 0..600 {
            let key = arrivals.insert(arrival()).unwrap();
            again += u32::from(key == first);
            assert!(arrivals.name(key).is_some_and(|other| other != name));
            assert_eq!(arrivals.named(name), None);
            assert!(arrivals.remove(key).is_some_and(|it| it.name.is_some()));
        }
        assert_eq!((again, arrivals.named.len()), (2, 0));
    }

    #[test]
    fn names_in_use_are_passed() {
        let mut arrivals = Arriving::new();
        arrivals.next = u32::MAX;
        let keys = [(); 3].map(|()| arrivals.insert(arrival()).unwrap());
        let names = keys.map(|key| arrivals.name(key).unwrap().get());
        assert_eq!(names, [u32::MAX, 0, 1]);
        arrivals.remove(keys[0]);
        arrivals.next = 0;
        let last = arrivals.insert(arrival()).unwrap();
        assert_eq!(arrivals.name(last).map(OpId::get), Some(2));
    }
}
