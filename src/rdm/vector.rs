//! An address vector of a domain, which its endpoints share: [`Av`] behind a lock.
//!
//! Posts do not acquire the lock: an endpoint keeps the peers that it has looked up, and a removal
//! calls it to clear them. The address of a peer, which it has looked up for an entry, it uses
//! until [`AddressVector::generation`] has changed. Users are called without the lock, so that they
//! can acquire their own ones, which precede it in the lock order (`docs/locking.md`).

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::av::{Av, FiAddr};
use crate::errno::Result;
use crate::mr::random;

/// An endpoint that uses an address vector, or a shared receive context.
pub trait VectorUser: Send + Sync {
    /// `addr` was removed: later posts to it are `EINVAL`. The vector's locks are not held.
    fn removed(&self, addr: FiAddr);

    /// Addresses were inserted. The vector's locks are not held.
    fn inserted(&self) {}
}

/// An address vector (`fi_av(3)`), of either type. Thread safe; no call blocks.
pub struct AddressVector {
    av: Mutex<Av>,
    generation: AtomicU64,
    users: Mutex<Vec<Weak<dyn VectorUser>>>,
}

impl fmt::Debug for AddressVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressVector")
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

impl AddressVector {
    /// An empty address vector with memory for `count` addresses (`fi_av_attr.count`, any value);
    /// more are allocated when they are inserted.
    ///
    /// # Errors
    /// Those of getrandom(2).
    pub fn open(count: usize) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            av: Mutex::new(Av::new(random()?, count)),
            generation: AtomicU64::new(0),
            users: Mutex::default(),
        }))
    }

    /// Inserts addresses in their order, and calls `each` with the position and the result of each
    /// one, as [`Av::insert_all`]. Then notifies the users, if any was inserted. Returns the number
    /// that were inserted. The vector's lock is held while `addrs` and `each` are called, which
    /// must not use the vector, nor block.
    pub fn insert_all(
        &self,
        addrs: impl IntoIterator<Item = Result<SocketAddr>>,
        each: impl FnMut(usize, Result<FiAddr>),
    ) -> usize {
        let inserted = {
            let mut av = self.av.lock();
            let inserted = av.insert_all(addrs, each);
            self.changed();
            inserted
        };
        if inserted != 0 {
            for user in self.users() {
                user.inserted();
            }
        }
        inserted
    }

    fn users(&self) -> Vec<Arc<dyn VectorUser>> {
        let mut users = self.users.lock();
        users.retain(|user| user.strong_count() != 0);
        users.iter().filter_map(Weak::upgrade).collect()
    }

    /// Removes an address, and then notifies the users. Until all are notified, no other address
    /// gets this `fi_addr_t`: posts to it would go to the peer that was removed.
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the vector.
    pub fn remove(&self, addr: FiAddr) -> Result<()> {
        {
            let mut av = self.av.lock();
            av.remove(addr)?;
            self.changed();
        }
        for user in self.users() {
            user.removed(addr);
        }
        self.av.lock().release_index(addr);
        Ok(())
    }

    /// The address as it was inserted.
    ///
    /// # Errors
    /// `EINVAL`: the address is not in the vector.
    pub fn lookup(&self, addr: FiAddr) -> Result<SocketAddr> {
        self.av.lock().lookup(addr)
    }

    /// The address that `fi_cq_readfrom` reports for a remote endpoint that has these addresses:
    /// the first `fi_addr_t` of the first address that has one. `None`: `FI_ADDR_NOTAVAIL`.
    pub fn source(&self, addrs: &[SocketAddr]) -> Option<FiAddr> {
        let av = self.av.lock();
        addrs.iter().find_map(|addr| av.source(av.find(addr)?))
    }

    /// A number that each insertion and each removal increases. An endpoint that reads it before it
    /// looks an address up may use the result until the number has changed.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Adds a user, which is notified of later removals and insertions.
    pub fn attach(&self, user: Weak<dyn VectorUser>) {
        let mut users = self.users.lock();
        users.retain(|user| user.strong_count() != 0);
        users.push(user);
    }

    /// Called with the lock held, after a change. A thread that reads the new number finds the
    /// change, because it then acquires the lock to look an address up.
    fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::FiErrno;

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// Inserts addresses of these ports, and returns their results.
    fn insert(vector: &AddressVector, ports: &[u16]) -> Vec<Result<FiAddr>> {
        let mut results = Vec::new();
        let addrs = ports.iter().map(|port| Ok(addr(*port)));
        vector.insert_all(addrs, |at, result| {
            assert_eq!(at, results.len());
            results.push(result);
        });
        results
    }

    struct User(Weak<AddressVector>, Mutex<Vec<FiAddr>>);

    impl VectorUser for User {
        fn removed(&self, addr: FiAddr) {
            // the vector's locks are free: this would block otherwise
            let vector = self.0.upgrade().unwrap();
            assert_eq!(vector.lookup(addr), Err(FiErrno::EINVAL));
            // another user may still have the peer of this index
            assert!(!insert(&vector, &[9]).contains(&Ok(addr)));
            let user: Arc<Self> = Arc::new(Self(Weak::new(), Mutex::default()));
            let user: Weak<dyn VectorUser> = Arc::downgrade(&user) as _;
            vector.attach(user);
            self.1.lock().push(addr);
        }
    }

    #[test]
    fn users_are_told_of_removals_without_a_lock() {
        let vector = AddressVector::open(0).unwrap();
        let results = insert(&vector, &[1, 0, 2]);
        assert_eq!(
            results,
            [Ok(FiAddr(0)), Err(FiErrno::EADDRNOTAVAIL), Ok(FiAddr(2))]
        );
        let new = || Arc::new(User(Arc::downgrade(&vector), Mutex::default()));
        let (kept, dropped) = (new(), new());
        for user in [&kept, &dropped] {
            let user: Weak<dyn VectorUser> = Arc::downgrade(user) as _;
            vector.attach(user);
        }
        drop(dropped);
        assert_eq!(vector.remove(FiAddr(2)), Ok(()));
        assert_eq!(vector.remove(FiAddr(2)), Err(FiErrno::EINVAL));
        assert_eq!(vector.remove(FiAddr(0)), Ok(()));
        assert_eq!(*kept.1.lock(), [FiAddr(2), FiAddr(0)]);
        // `removed` has inserted at 1 and at 2
        assert_eq!(insert(&vector, &[3]), [Ok(FiAddr(0))]);
        // those that `removed` attached were dropped at once
        assert!(vector.users.lock().len() <= 2);
    }

    #[test]
    fn each_change_has_a_generation() {
        let vector = AddressVector::open(4).unwrap();
        let mut last = vector.generation();
        let mut changes = |changes: bool| {
            let now = vector.generation();
            assert_eq!(now != last, changes);
            last = now;
        };
        insert(&vector, &[5]);
        changes(true);
        assert_eq!(vector.lookup(FiAddr(0)), Ok(addr(5)));
        assert_eq!(vector.remove(FiAddr(1)), Err(FiErrno::EINVAL));
        changes(false);
        vector.remove(FiAddr(0)).unwrap();
        changes(true);
    }

    #[test]
    fn the_source_is_the_first_of_the_first_address_that_has_one() {
        let vector = AddressVector::open(4).unwrap();
        insert(&vector, &[7, 8, 7]);
        assert_eq!(vector.source(&[addr(8), addr(7)]), Some(FiAddr(1)));
        assert_eq!(vector.source(&[addr(9), addr(7)]), Some(FiAddr(0)));
        vector.remove(FiAddr(0)).unwrap();
        assert_eq!(vector.source(&[addr(7)]), Some(FiAddr(2)));
        assert_eq!(vector.source(&[addr(9)]), None);
        assert_eq!(vector.source(&[]), None);
    }
}
