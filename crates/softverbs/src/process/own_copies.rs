//! The wait for copies that threads of this process make under local keys.
//!
//! A thread looks its local keys up and copies under the lock of a queue, or of an incoming ring,
//! and publishes no hazard. A thread that has ended a key marks the holders of these locks and
//! waits for them alone: a later holder finds the key invalid. So a thread that acquires a lock
//! again and again does not extend the wait. A holder with many requests lets the waiting thread
//! pass between two of them ([`Lock::let_pass`]).
//!
//! [`Lock::let_pass`]: crate::sync::Lock::let_pass

use super::Process;
use crate::hazard;
use crate::sync::{Holder, Mark};
use crate::sys::Res;

/// Holders that are awaited together. A thread holds at most three of the locks.
const TOGETHER: usize = 32;

/// Holders of locks, with marks.
#[derive(Default)]
struct Holders<'a> {
    all: [Option<Holder<'a>>; TOGETHER],
    count: usize,
}

impl<'a> Holders<'a> {
    /// # Errors
    /// As [`Self::wait`], which makes room.
    fn add(&mut self, holder: Holder<'a>) -> Res<()> {
        if self.count == TOGETHER {
            self.wait()?;
        }
        self.all[self.count] = Some(holder);
        self.count += 1;
        Ok(())
    }

    /// Waits for the holders, and forgets them. Orders the copies of these and earlier holders
    /// before the caller's next steps.
    ///
    /// # Errors
    /// `EBUSY`: after 5 seconds one of them still copies.
    fn wait(&mut self) -> Res<()> {
        let all = &self.all[..std::mem::take(&mut self.count)];
        let staying = || all.iter().flatten().find(|holder| holder.stays());
        hazard::await_words(staying, |_| ())
    }
}

impl Process {
    /// Waits until the copies are over that threads of this process have begun under a key that is
    /// invalid by now. The caller has run a full fence since, and holds no lock of a queue.
    ///
    /// # Errors
    /// `EBUSY`: after 5 seconds they are not.
    pub(crate) fn await_own_copies(&self) -> Res<()> {
        let (mark, mut holders) = (Mark::new(), Holders::default());
        for holder in self.mark_deliveries(mark) {
            holders.add(holder)?;
        }
        for holder in self.qps.iter().flat_map(|qp| qp.mark_holders(mark)) {
            holders.add(holder)?;
        }
        holders.wait()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::Lock;
    use crate::sys::Errno;

    /// More holders than are awaited together; each of them is succeeded by another one at once.
    #[test]
    fn later_holders_are_not_awaited() {
        let locks: Vec<_> = (0..=TOGETHER).map(|_| Lock::new(())).collect();
        let mut held: Vec<_> = locks[..TOGETHER].iter().map(Lock::lock).collect();
        let (mark, mut holders) = (Mark::new(), Holders::default());
        for lock in &locks[..TOGETHER] {
            holders.add(lock.mark_holder(mark).unwrap()).unwrap();
        }
        held.clear();
        let last = locks[TOGETHER].lock();
        held.extend(locks[..TOGETHER].iter().map(Lock::lock));
        holders
            .add(locks[TOGETHER].mark_holder(mark).unwrap())
            .unwrap();
        drop(last);
        let _last = locks[TOGETHER].lock();
        assert_eq!(holders.wait(), Ok(()));
        assert_eq!(holders.count, 0);
    }

    #[test]
    fn a_holder_that_copies_is_awaited_for_a_bounded_time() {
        let lock = Lock::new(());
        let _held = lock.lock();
        let mut holders = Holders::default();
        let holder = lock.mark_holder(Mark::new()).unwrap();
        holders.add(holder).unwrap();
        assert_eq!(holders.wait(), Err(Errno(libc::EBUSY)));
    }
}
