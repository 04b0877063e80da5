//! The key directory of a protection domain, owner's side: the keys that peers may look up, and the
//! registrations of closed regions, which are retained until no peer can use their keys.
//! `docs/protocol.md` has the bytes and the order of writing them. Peers find the directory through
//! connection blocks (`connection_block.rs`), which change under the directory's lock.
//!
//! While a thread holds the directory's lock, it acquires only locks of the peers' endpoints: the
//! lock of the completion queue, and for looks at peers none (`revocation.rs`).

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_core_sys as sys;

use super::directory_peers::Members;
use super::directory_table::Table;
use super::revocation::{Ending, Retained, Retired};
use crate::errno::{FiErrno, Result};
use crate::queue::event_cell::{Cell, Cells};
use crate::verbs::{Mr, Pd, Rkey, Words};
use crate::wire::records::{Entry, Header, WORDS};

/// An endpoint whose peer is notified of revocations. The directory calls it with its lock held: it
/// may post and poll, and must not call the directory. Others may call it without that lock.
pub(crate) trait Peer: Send + Sync {
    /// Writes the directory's count of revocations (`ConnectionBlock::revocations`) to the
    /// *revision* of the peer's connection block, in this call, by a later retry, or when the
    /// peer's address is known.
    fn notify_revocations(&self);
    /// Polls for completions, repeats a notification that could not be sent, and posts a read of
    /// the peer's word *settled*.
    fn look(&self) -> Look;
    /// Acknowledges the revocations of the peer's directory, unless another thread holds the
    /// endpoint's transmit lock.
    fn acknowledge(&self);
    /// Ends the connection of a peer that does not acknowledge.
    fn sever(&self);
}

/// Result of [`Peer::look`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// Whether requests of the peer may still be executed at this side.
    pub(crate) up: bool,
    /// The result of the last read of the peer's word *settled*.
    pub(crate) answer: Option<u64>,
    /// Whether a new read of that word is under way.
    pub(crate) asked: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(super) header: Words,
    pub(super) pd: Arc<Pd>,
    domain: u64,
    /// The event cells, if regions may count peers' operations.
    cells: Option<Arc<Cells>>,
    /// Held while the peers are looked at (`revocation.rs`), which posts requests: without `inner`.
    pub(super) looking: Mutex<()>,
    pub(super) inner: Mutex<Inner>,
}

pub(super) struct Inner {
    table: Table,
    pub(super) revocations: u64,
    /// The connection blocks, `SLAB` of `connection_block.rs` per allocation.
    pub(super) blocks: Vec<Arc<Words>>,
    /// Numbers of the blocks that are not in use.
    pub(super) free: Vec<usize>,
    pub(super) peers: Members,
    /// Retired registrations, each with the revocation count that peers must acknowledge before it
    /// is freed, oldest first.
    pub(super) retired: VecDeque<(u64, Retired)>,
    /// The sums of these.
    pub(super) retained: Retained,
    /// Former registrations of refreshed regions that could not be ended because an access was
    /// under way, each with its region's generation.
    pub(super) stuck: Vec<(u64, Mr)>,
    /// Registrations that no peer can use any more, but an access of a peer, which may be stopped,
    /// is under way.
    pub(super) ending: Vec<Ending>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("revocations", &self.revocations)
            .field("retired", &self.retired.len())
            .finish_non_exhaustive()
    }
}

impl Directory {
    /// Creates an empty directory. `domain` is the domain's number; `events`: whether regions may
    /// count peers' operations.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering memory.
    pub(crate) fn new(pd: &Arc<Pd>, domain: u64, events: bool) -> Result<Arc<Self>> {
        let this = Self {
            header: Words::new(pd, WORDS, sys::IBV_ACCESS_REMOTE_READ)?,
            pd: Arc::clone(pd),
            domain,
            cells: match events {
                true => Some(Cells::new(pd)?),
                false => None,
            },
            looking: Mutex::new(()),
            inner: Mutex::new(Inner {
                table: Table::new(pd)?,
                revocations: 0,
                blocks: Vec::new(),
                free: Vec::new(),
                peers: Members::default(),
                retired: VecDeque::new(),
                retained: Retained::none(pd.device().attr().max_mr),
                stuck: Vec::new(),
                ending: Vec::new(),
            }),
        };
        {
            let inner = this.inner.lock();
            this.publish(&inner.table, 0);
        }
        Ok(Arc::new(this))
    }

    fn publish(&self, table: &Table, revocations: u64) {
        let header = Header {
            table_addr: table.addr(),
            table_rkey: table.rkey(),
            log2: table.log2(),
            moves: table.moves(),
            revocations,
            cells_rkey: self
                .cells
                .as_ref()
                .map_or(Rkey::default(), |cells| cells.rkey()),
            domain: self.domain,
        };
        self.header.write(0, &header.encode());
    }

    /// Publishes an entry, whose key must not be in the directory.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering a larger table.
    pub(crate) fn insert(&self, entry: &Entry) -> Result<()> {
        let mut inner = self.inner.lock();
        let revocations = inner.revocations;
        inner
            .table
            .insert(entry, |table| self.publish(table, revocations))
    }

    /// Removes the entry of a key and notifies the peers that hold keys, so that they drop their
    /// cached records. Returns the revocation count after the removal.
    pub(crate) fn withdraw(&self, key: u64) -> u64 {
        self.withdraw_in_steps(key, || {}, || {})
    }

    /// [`Self::withdraw`] for tests: calls `moving` when the header shows that entries move, before
    /// the first of them moves, and `moved` after the last one, before the header shows that.
    pub(super) fn withdraw_in_steps(
        &self,
        key: u64,
        moving: impl FnOnce(),
        moved: impl FnOnce(),
    ) -> u64 {
        self.change(|table, revocations| {
            let removed = table.remove(key, |table| {
                self.publish(table, revocations);
                moving();
            });
            moved();
            removed
        })
    }

    /// Replaces the entry of a published region whose record or registrations have changed.
    /// Notification and result as [`Self::withdraw`].
    pub(crate) fn replace(&self, entry: &Entry) -> u64 {
        self.change(|table, _| table.replace(entry))
    }

    /// Changes the table; `change` gets the present revocation count too. If that had an effect,
    /// increments the count and notifies the peers that hold keys. Returns the count.
    fn change(&self, change: impl FnOnce(&mut Table, u64) -> bool) -> u64 {
        let mut inner = self.inner.lock();
        let revocations = inner.revocations;
        if change(&mut inner.table, revocations) {
            inner.revocations += 1;
            self.publish(&inner.table, inner.revocations);
            inner.notify();
        }
        inner.revocations
    }

    /// Reserves an event cell for a region with counters.
    ///
    /// # Errors
    /// `ENOMEM`: all cells are in use. `EOPNOTSUPP`: the directory has no cells.
    pub(crate) fn event_cell(&self) -> Result<Arc<Cell>> {
        let cells = self.cells.as_ref().ok_or(FiErrno::EOPNOTSUPP)?;
        cells.take()
    }

    /// The domain's number, which raw keys carry.
    pub(crate) fn number(&self) -> u64 {
        self.domain
    }

    /// Ends registrations that no peer can use any more. Those with an access under way are ended
    /// by a later call, or with the directory. Does not wait. The caller does not hold the
    /// directory's lock.
    pub(super) fn end(&self, mut ending: Vec<Ending>) {
        if ending.is_empty() {
            return;
        }
        let mut free = Vec::new();
        ending.retain_mut(|it| {
            let ended = it.end_now();
            if let (true, Ending::Block(_, number)) = (ended, it) {
                free.push(*number);
            }
            !ended
        });
        let mut inner = self.inner.lock();
        inner.free.append(&mut free);
        inner.ending.append(&mut ending);
    }

    /// Number of retired registrations, for tests.
    #[cfg(test)]
    pub(crate) fn retired(&self) -> usize {
        let mut inner = self.inner.lock();
        let ending = inner.take_ending();
        let retired = inner.retired.len();
        drop(inner);
        self.end(ending);
        retired
    }
}

#[cfg(test)]
mod tests {
    use super::super::connection_block::{BlockPlace, ConnectionBlock, SLAB};
    use super::super::revocation::MAX_RETIRED;
    use super::super::{Access, Buffer, Desc, LocalKeys, Mode, Region, RegionConfig, Use, tests};
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::flags::Flags;
    use crate::queue::{Counter, WaitKind};
    use crate::verbs::devices;
    use crate::verbs::replaced::{self, BUSY, MOVES, RESERVES, WAITS};
    use crate::wire::records::Block;
    use std::sync::Weak;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    struct Silent;

    impl Peer for Silent {
        fn notify_revocations(&self) {}
        fn look(&self) -> Look {
            Look {
                up: true,
                answer: None,
                asked: false,
            }
        }
        fn acknowledge(&self) {}
        fn sever(&self) {}
    }

    /// A peer that has looked up a key and no longer acknowledges is waited for once. Then
    /// registrations end, but their keys stay reserved until the peer has left.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn a_silent_peer_is_given_up_and_keeps_keys_only() {
        let mode = Mode::ALLOCATED | Mode::MMU_NOTIFY | Mode::LOCAL;
        let domain = tests::domain(&tests::device(), mode, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let block = directory.block(None).unwrap();
        let peer: Arc<dyn Peer> = Arc::new(Silent);
        block.join(Arc::downgrade(&peer));
        // the peer has looked up a key; it is stopped from here on
        let words = &block.place.words;
        words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        let memory = vec![0_u8; 3 * 4096];
        let register = |key| {
            let region = tests::region(&domain, &memory, Access::all(), key);
            region.refresh(&[]).unwrap();
            region
        };
        let start = Instant::now();
        let first = register(1);
        let patience = start.elapsed();
        assert!(patience >= Duration::from_secs(1), "{patience:?}");
        assert_eq!(directory.retired(), 1, "what was replaced");
        let start = Instant::now();
        let second = register(2);
        first.close().unwrap();
        let outside = [Buffer {
            addr: std::ptr::null(),
            len: 1,
        }];
        let refused = second.refresh(&outside);
        assert_eq!(refused, Err(FiErrno::EINVAL), "still itself");
        second.close().unwrap();
        assert!(start.elapsed() < patience / 2, "{:?}", start.elapsed());
        assert_eq!(directory.retired(), 4, "keys stay taken");
        // the peer acknowledges the first two revocations
        words.store(block.place.index + Block::ACKNOWLEDGED, 3);
        assert_eq!(directory.retired(), 2);
        block.leave();
        assert_eq!(directory.retired(), 0);
    }

    /// The thread that drives the connections of a domain drops connection blocks, and with the
    /// last peer that may use it the remains of a region. A peer that is stopped in the middle of
    /// an access delays neither; the block is not given to another peer before.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn what_a_stopped_peer_accesses_is_ended_later() {
        let device = devices(&[replaced::with_busy_regions()], false).remove(0);
        let mode = Mode::ALLOCATED | Mode::MMU_NOTIFY | Mode::LOCAL;
        let domain = tests::domain(&device, mode, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let block = directory.block(None).unwrap();
        let number = block.place.number;
        let peer: Arc<dyn Peer> = Arc::new(Silent);
        block.join(Arc::downgrade(&peer));
        let words = Arc::clone(&block.place.words);
        words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        let memory = vec![0_u8; 3 * 4096];
        let region = tests::region(&domain, &memory, Access::all(), 1);
        region.refresh(&[]).unwrap();
        assert_eq!(directory.retired(), 1);
        BUSY.set(true);
        drop(block);
        assert_eq!((directory.retired(), WAITS.get()), (0, 0));
        let next = directory.block(None).unwrap();
        assert_ne!(next.place.number, number);
        assert_eq!(directory.inner.lock().ending.len(), 2);
        BUSY.set(false);
        let again = directory.block(None).unwrap();
        assert_eq!(again.place.number, number);
        assert_eq!(directory.inner.lock().ending.len(), 0);
        region.close().unwrap();
    }

    /// A silent peer that records the end of its connection.
    #[derive(Default)]
    struct Severed(AtomicUsize);

    impl Peer for Severed {
        fn notify_revocations(&self) {}
        fn look(&self) -> Look {
            Silent.look()
        }
        fn acknowledge(&self) {}
        fn sever(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A block with such a peer.
    fn severed(directory: &Arc<Directory>) -> (ConnectionBlock, Arc<Severed>) {
        let block = directory.block(None).unwrap();
        let peer = Arc::new(Severed::default());
        let weak: Weak<dyn Peer> = Arc::<Severed>::downgrade(&peer);
        block.join(weak);
        (block, peer)
    }

    /// A hostile peer writes another value to *acknowledged* all the time, and never the last
    /// count. The owner waits once for about one second, and the limit of retired regions applies
    /// to this peer too.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn a_peer_whose_word_changes_all_the_time_is_given_up() {
        const COUNT: u64 = 100_000;
        let mode = Mode::ALLOCATED | Mode::LOCAL;
        let domain = tests::domain(&tests::device(), mode, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let (block, peer) = severed(&directory);
        let words = &block.place.words;
        let write = |value| words.store(block.place.index + Block::ACKNOWLEDGED, value);
        write(1);
        for _ in 0..COUNT {
            directory.change(|_, _| true);
        }
        let memory = [0_u8; 64];
        let regions = [1, 2, 3].map(|key| tests::region(&domain, &memory, Access::all(), key));
        let severed = || peer.0.load(Ordering::Relaxed);
        let closed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 0;
                while closed.load(Ordering::Relaxed) == 0 {
                    // no value twice within ten seconds
                    value = value % COUNT + 1;
                    write(value);
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            let start = Instant::now();
            regions[0].close().unwrap();
            closed.store(1, Ordering::Relaxed);
            let took = start.elapsed();
            assert!(took < Duration::from_secs(3), "{took:?}");
        });
        // another value is no reason to wait again
        write(2);
        let start = Instant::now();
        regions[1].close().unwrap();
        let took = start.elapsed();
        assert!(took < Duration::from_millis(500), "{took:?}");
        assert_eq!(severed(), 0);
        write(3);
        let more = (0..MAX_RETIRED).map(|_| (COUNT + 1, Retired::default()));
        directory.inner.lock().retired.extend(more);
        regions[2].close().unwrap();
        assert_eq!(severed(), 1);
        block.leave();
    }

    /// A region with so many equal buffers.
    #[allow(unsafe_code, reason = "registers memory")]
    fn region_of(domain: &Domain, memory: &[u8], count: usize, key: u64) -> Arc<Region> {
        let buffer = Buffer {
            addr: memory.as_ptr().cast(),
            len: memory.len(),
        };
        let config = RegionConfig {
            buffers: &vec![buffer; count],
            access: Access::all(),
            requested_key: key,
            ..RegionConfig::default()
        };
        // SAFETY: tests drop the memory last.
        unsafe { Region::register(domain.mr(), &config) }.unwrap()
    }

    /// A peer is stopped in the middle of an access to the second buffer of a region. Its owner
    /// drops the region after the close has failed: the key of the first buffer, and the list,
    /// which the peer may use too, are not free.
    #[test]
    fn a_region_that_is_dropped_after_a_failed_close_frees_no_key() {
        let device = devices(&[replaced::with_busy_regions()], false).remove(0);
        let domain = tests::domain(&device, Mode::ALLOCATED | Mode::LOCAL, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let (block, _peer) = severed(&directory);
        let words = &block.place.words;
        words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        let memory = [0_u8; 64];
        let region = region_of(&domain, &memory, 2, 1);
        RESERVES.set(1);
        assert_eq!(region.close(), Err(FiErrno::EBUSY));
        // a registration that is ended would wait
        BUSY.set(true);
        drop(region);
        assert_eq!(WAITS.get(), 0);
        BUSY.set(false);
        RESERVES.set(u32::MAX);
        block.leave();
    }

    /// A peer is stopped that holds keys. Its owner refreshes and closes regions of several
    /// registrations each: their sum is limited, also before they are retired.
    #[test]
    fn a_silent_peer_is_disconnected_if_too_many_registrations_wait_for_it() {
        let mode = Mode::ALLOCATED | Mode::LOCAL;
        for (most, buffers) in [(5, [1, 1, 1]), (5, [2, 2, 1]), (5, [8, 1, 1])] {
            let domain = tests::domain(&tests::device(), mode, false);
            let directory = domain.mr().directory(domain.pd()).unwrap();
            let (block, peer) = severed(&directory);
            let words = &block.place.words;
            words.store(block.place.index + Block::ACKNOWLEDGED, 1);
            directory.inner.lock().retained.most = most;
            let memory = [0_u8; 64];
            let mut waiting = 0;
            for (key, count) in (1..).zip(buffers) {
                region_of(&domain, &memory, count, key).close().unwrap();
                // a region of several buffers has a list too
                waiting += count + usize::from(count > 1);
                let expected = usize::from(waiting > most);
                assert_eq!(
                    peer.0.load(Ordering::Relaxed),
                    expected,
                    "{buffers:?} {key}"
                );
                if expected != 0 {
                    assert_eq!(directory.retired(), 0);
                    break;
                }
                assert_eq!(directory.retired() as u64, key);
            }
            assert_eq!(waiting > most, buffers != [1, 1, 1]);
            block.leave();
        }
    }

    /// Three peers are stopped, each after it has acknowledged the revocations before. The limit is
    /// exceeded until all of them are disconnected.
    #[test]
    fn as_many_silent_peers_are_disconnected_as_the_limit_requires() {
        let mode = Mode::ALLOCATED | Mode::LOCAL;
        let domain = tests::domain(&tests::device(), mode, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let memory = [0_u8; 64];
        let close = |key, count| region_of(&domain, &memory, count, key).close().unwrap();
        // the last region retains two registrations and its list
        let peers = [(1, 1), (2, 1), (3, 2)].map(|(key, count)| {
            let (block, peer) = severed(&directory);
            let acknowledged = directory.inner.lock().revocations + 1;
            let words = &block.place.words;
            words.store(block.place.index + Block::ACKNOWLEDGED, acknowledged);
            close(key, count);
            (block, peer)
        });
        assert_eq!(directory.retired(), 3);
        let ended = || {
            peers
                .each_ref()
                .map(|(_, peer)| peer.0.load(Ordering::Relaxed))
        };
        assert_eq!(ended(), [0; 3]);
        directory.inner.lock().retained.most = 2;
        close(4, 1);
        assert_eq!(ended(), [1; 3]);
        assert_eq!(directory.retired(), 0);
        for (block, _) in peers {
            block.leave();
        }
    }

    /// A local operation uses the registration that a refresh replaces, so it keeps its rights: a
    /// peer that may still use it is disconnected. Without such an operation the peer stays.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn a_silent_peer_is_disconnected_if_a_replaced_registration_is_in_use() {
        let mode = Mode::ALLOCATED | Mode::MMU_NOTIFY | Mode::LOCAL;
        let domain = tests::domain(&tests::device(), mode, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let (block, peer) = severed(&directory);
        let words = &block.place.words;
        words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        let memory = vec![0_u8; 4096];
        let region = tests::region(&domain, &memory, Access::all(), 1);
        region.refresh(&[]).unwrap();
        assert_eq!(peer.0.load(Ordering::Relaxed), 0);
        let mut keys = LocalKeys::new(domain.mr(), domain.pd());
        let iov = tests::iov(&memory);
        // SAFETY: the region is open; nothing is posted.
        unsafe { keys.lkey(Desc(region.desc()), &iov, Use::Source) }.unwrap();
        region.refresh(&[]).unwrap();
        assert_eq!(peer.0.load(Ordering::Relaxed), 1);
        region.close().unwrap();
        assert_eq!(peer.0.load(Ordering::Relaxed), 1);
        block.leave();
    }

    /// The device assigns another key to a registration that is moved, so the old one is free. It
    /// is known after the first time: then the peer is disconnected before its key can be free.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn a_silent_peer_is_disconnected_before_its_key_is_free() {
        let device = devices(&[replaced::with_changing_keys()], false).remove(0);
        let mode = Mode::ALLOCATED | Mode::LOCAL;
        let domain = tests::domain(&device, mode, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let memory = [0_u8; 64];
        for round in 0..2 {
            let (block, peer) = severed(&directory);
            let words = &block.place.words;
            words.store(block.place.index + Block::ACKNOWLEDGED, 1);
            let region = tests::region(&domain, &memory, Access::all(), round);
            region.close().unwrap();
            assert_eq!(peer.0.load(Ordering::Relaxed), 1);
            assert_eq!(MOVES.get(), 1, "in round {round}");
            block.leave();
            assert_eq!(directory.retired(), 0);
        }
    }

    /// A counter is bound to an enabled region: the call returns when a peer that holds keys has
    /// acknowledged the new record, which it counts by.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn binding_a_counter_waits_for_the_holders_of_keys() {
        let domain = tests::domain(&tests::device(), Mode::ALLOCATED | Mode::LOCAL, true);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let block = directory.block(None).unwrap();
        let peer: Arc<dyn Peer> = Arc::new(Silent);
        block.join(Arc::downgrade(&peer));
        let words = &block.place.words;
        let acknowledge = |value| words.store(block.place.index + Block::ACKNOWLEDGED, value);
        acknowledge(1);
        let memory = [0_u8; 64];
        let region = tests::region(&domain, &memory, Access::all(), 0);
        let acknowledged = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                acknowledged.store(1, Ordering::Relaxed);
                acknowledge(1000);
            });
            for kind in [Flags::REMOTE_WRITE, Flags::REMOTE_READ] {
                let counter = Counter::open(domain.queues(), WaitKind::None).unwrap();
                region.bind_counter(&counter, kind).unwrap();
                assert_eq!(acknowledged.load(Ordering::Relaxed), 1);
            }
        });
        region.close().unwrap();
        block.leave();
    }

    /// A peer that acknowledges when it was looked at three times. `calls`: those during which the
    /// lock of the directory was free, and a peer that leaves would have waited; and others.
    struct Observes {
        directory: Weak<Directory>,
        place: BlockPlace,
        calls: [AtomicUsize; 2],
        looks: AtomicUsize,
    }

    impl Observes {
        fn observe(&self) {
            let directory = self.directory.upgrade().unwrap();
            let free = directory.inner.try_lock().is_some();
            let leave_waits = directory.looking.try_lock().is_none();
            let other = usize::from(!free || !leave_waits);
            self.calls[other].fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Peer for Observes {
        fn notify_revocations(&self) {}
        fn look(&self) -> Look {
            self.observe();
            if self.looks.fetch_add(1, Ordering::Relaxed) == 2 {
                let Self { place, .. } = self;
                place.words.store(place.index + Block::ACKNOWLEDGED, 1000);
            }
            Silent.look()
        }
        fn acknowledge(&self) {
            self.observe();
        }
        fn sever(&self) {}
    }

    /// Looks at peers post requests, which a device may execute in the call: registrations and
    /// other closes do not wait for that. A peer that leaves does.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn peers_are_looked_at_without_the_lock_of_the_directory() {
        let domain = tests::domain(&tests::device(), Mode::ALLOCATED | Mode::LOCAL, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let block = directory.block(None).unwrap();
        let place = block.place.clone();
        place.words.store(place.index + Block::ACKNOWLEDGED, 1);
        let peer = Arc::new(Observes {
            directory: Arc::downgrade(&directory),
            place,
            calls: Default::default(),
            looks: AtomicUsize::new(0),
        });
        let weak: Weak<dyn Peer> = Arc::<Observes>::downgrade(&peer);
        block.join(weak);
        let memory = [0_u8; 64];
        let region = tests::region(&domain, &memory, Access::all(), 0);
        region.close().unwrap();
        let calls = peer.calls.each_ref().map(|it| it.load(Ordering::Relaxed));
        assert!(calls[0] >= 6, "{calls:?}");
        assert_eq!(calls[1], 0);
        block.leave();
        assert_eq!(Arc::strong_count(&peer), 1);
    }

    /// A look at a peer that has left meanwhile does not count for the next one with its block.
    #[test]
    fn a_look_counts_for_its_own_peer() {
        let domain = tests::domain(&tests::device(), Mode::ALLOCATED | Mode::LOCAL, false);
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let block = directory.block(None).unwrap();
        let number = block.place.number;
        let peers: [Arc<dyn Peer>; 2] = [Arc::new(Counts::default()), Arc::new(Counts::default())];
        let words = &block.place.words;
        words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        block.join(Arc::downgrade(&peers[0]));
        let count = directory.change(|_, _| true);
        block.leave();
        block.join(Arc::downgrade(&peers[1]));
        let count = count.max(directory.change(|_, _| true));
        let look = Look {
            up: false,
            answer: Some(Block::HOLDS_NONE),
            asked: true,
        };
        let mut inner = directory.inner.lock();
        let awaited = |inner: &mut Inner| inner.peers.get_mut(number).unwrap().is_awaited(count);
        inner.looked(number, &peers[0], &look, count);
        assert!(awaited(&mut inner));
        inner.looked(number, &peers[1], &look, count);
        assert!(!awaited(&mut inner));
        drop(inner);
        block.leave();
    }

    /// A peer that counts its notifications.
    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Peer for Counts {
        fn notify_revocations(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn look(&self) -> Look {
            Silent.look()
        }
        fn acknowledge(&self) {}
        fn sever(&self) {}
    }

    /// 10,000 peers are connected and three of them hold keys: revocations, sweeps and the removal
    /// of the other peers visit only these three.
    #[test]
    fn revocations_and_leaving_visit_the_holders_of_keys_alone() {
        const PEERS: usize = 10_000;
        let device = devices(&[softverbs::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let visits = || std::mem::take(&mut directory.inner.lock().peers.visits);
        let peer = Arc::new(Counts::default());
        let weak: Weak<dyn Peer> = Arc::<Counts>::downgrade(&peer);
        let mut blocks: Vec<_> = (0..PEERS).map(|_| directory.block(None).unwrap()).collect();
        for block in &blocks {
            block.join(Weak::clone(&weak));
        }
        let holders = blocks.split_off(PEERS - 3);
        for block in &holders {
            let words = &block.place.words;
            words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        }
        assert_eq!(visits(), 0, "joining");

        let count = directory.change(|_, _| true);
        assert_eq!(peer.0.load(Ordering::Relaxed), 3);
        assert_eq!(visits(), 3, "the revocation");

        let retired = || Retired {
            cell: None,
            keys: Vec::new(),
            lists: vec![Words::new(domain.pd(), 1, 0).unwrap()],
        };
        directory.inner.lock().add_retired(count, retired());
        assert_eq!(directory.retired(), 1);
        assert_eq!(visits(), 1, "the first holder lags");

        drop(blocks);
        assert_eq!(visits(), 0, "peers that held no keys leave");

        for block in &holders[..2] {
            let words = &block.place.words;
            words.store(block.place.index + Block::ACKNOWLEDGED, 1 + count);
        }
        assert_eq!(directory.retired(), 1, "the third lags");
        assert!(visits() <= 3);
        assert_eq!(directory.retired(), 1);
        assert_eq!(visits(), 1, "the third again");
        holders[2].leave();
        assert_eq!(directory.inner.lock().retired.len(), 0);
        assert!(visits() <= 1);
        drop(holders);
        assert_eq!(visits(), 0, "those that have confirmed leave");

        // the blocks and slots are reused, and do not retain the announcements of the previous
        // peers
        let blocks: Vec<_> = (0..PEERS).map(|_| directory.block(None).unwrap()).collect();
        blocks
            .iter()
            .for_each(|block| block.join(Weak::clone(&weak)));
        directory.change(|_, _| true);
        assert_eq!((visits(), peer.0.load(Ordering::Relaxed)), (0, 3));
        assert_eq!(directory.inner.lock().blocks.len(), PEERS.div_ceil(SLAB));
    }
}
