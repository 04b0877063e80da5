//! The key directory of a protection domain, owner's side: the keys that peers may look up, the
//! connection blocks through which peers find the directory, and the registrations of closed
//! regions, which are retained until no peer can use their keys. `docs/protocol.md` has the bytes
//! and the order of writing them.
//!
//! Under its lock only those of the peers' endpoints are taken: of their send queues, if they are
//! free, and completion queues.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rdma_core_sys as sys;

use super::members::{Member, Members};
use super::revocation::Left;
use super::table::Table;
use crate::errno::{FiErrno, Result};
use crate::queue::event_cell::{Cell, Cells};
use crate::verbs::{Lkey, Mr, Pd, RemoteAddr, Rkey, Words};
use crate::wire::records::{Block, Entry, Header, WORDS};

/// Connection blocks per registration.
const SLAB: usize = 64;
/// Words from one block to the next: a word behind each block receives reads of the peer's block.
const STRIDE: usize = 2 * WORDS;

/// A connected endpoint that receives revocations. Called with the directory's lock held: it may
/// post and poll, and must not call the directory.
pub(crate) trait Peer: Send + Sync {
    /// Writes the directory's count of revocations ([`ConnectionBlock::revocations`]) to the
    /// *revision* of the peer's connection block, now or soon.
    fn tell_revocations(&self);
    /// Completes what was posted, tells what could not be told yet, and asks the peer how far it
    /// is, by a read of its memory.
    fn look(&self) -> Look;
    /// Acknowledges the peer's own revocations, unless another thread holds the endpoint's transmit
    /// lock.
    fn acknowledge(&self);
    /// Ends the connection: the peer does not acknowledge.
    fn sever(&self);
}

/// Result of [`Peer::look`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// The connection has not ended, as far as this side can tell.
    pub(crate) up: bool,
    /// The result of the last read of the peer's word [`Block::SETTLED`].
    pub(crate) answer: Option<u64>,
    /// Whether a new read of that word is under way.
    pub(crate) asked: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Directory {
    header: Words,
    pd: Arc<Pd>,
    domain: u64,
    /// The event cells.
    cells: Option<Arc<Cells>>,
    pub(super) inner: Mutex<Inner>,
}

pub(super) struct Inner {
    table: Table,
    pub(super) revocations: u64,
    /// The connection blocks, [`SLAB`] per registration.
    pub(super) blocks: Vec<Arc<Words>>,
    /// Numbers of the blocks that are not in use.
    free: Vec<usize>,
    pub(super) peers: Members,
    /// Retired registrations, each with the revocation count that peers must acknowledge before it
    /// is freed, oldest first.
    pub(super) retired: VecDeque<(u64, Left)>,
    /// Registrations that regions had before they were refreshed and that somebody is in the middle
    /// of an access to, and generations of the regions.
    pub(super) stuck: Vec<(u64, Mr)>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("revocations", &self.revocations)
            .field("retired", &self.retired.len())
            .finish_non_exhaustive()
    }
}

/// The place of a connection block.
#[derive(Clone, Debug)]
pub(super) struct BlockPlace {
    words: Arc<Words>,
    /// The block's first word.
    index: usize,
    /// The block's number: the blocks are numbered through all registrations.
    number: usize,
}

/// The connection block of one endpoint. Released when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionBlock {
    directory: Arc<Directory>,
    place: BlockPlace,
    _cell: Option<Arc<Cell>>,
}

impl ConnectionBlock {
    pub(crate) fn addr(&self) -> RemoteAddr {
        self.place.words.remote_addr(self.place.index)
    }

    pub(crate) fn rkey(&self) -> Rkey {
        self.place.words.rkey()
    }

    /// A number that no other connection has, with very high probability.
    pub(crate) fn token(&self) -> u64 {
        self.directory.domain ^ self.addr().get()
    }

    /// The last revocation count that the peer has written here.
    #[inline]
    pub(crate) fn revision(&self) -> u64 {
        self.place.words.load(self.place.index + Block::REVISION)
    }

    /// Address and lkey of the directory's revocation count.
    pub(crate) fn revocations(&self) -> (u64, Lkey) {
        let header = &self.directory.header;
        (header.addr(4), header.lkey())
    }

    /// Stores a word in registered memory, as the source of a write. Returns its address and lkey.
    pub(crate) fn stage(&self, value: u64) -> (u64, Lkey) {
        let index = self.place.index + 4;
        self.place.words.store(index, value);
        (self.place.words.addr(index), self.place.words.lkey())
    }

    /// Publishes the count of the peer's revocations that are settled.
    pub(crate) fn show_settled(&self, value: u64) {
        let index = self.place.index + Block::SETTLED;
        self.place.words.store(index, value);
    }

    /// Address and lkey of the word that receives reads of the peer's block.
    pub(crate) fn sink(&self) -> (u64, Lkey) {
        let words = &self.place.words;
        (words.addr(self.place.index + WORDS), words.lkey())
    }

    /// The value last read from the peer's block.
    pub(crate) fn sunk(&self) -> u64 {
        self.place.words.load(self.place.index + WORDS)
    }

    /// Sends revocations to `peer` from now on, until it is dropped or [`Self::leave`] is called.
    pub(crate) fn join(&self, peer: Weak<dyn Peer>) {
        let mut inner = self.directory.inner.lock();
        let member = Member::new(peer, self.place.clone());
        inner.peers.insert(self.place.number, member);
    }

    /// Removes the peer; its queue pair can execute no operation any more.
    pub(crate) fn leave(&self) {
        let mut inner = self.directory.inner.lock();
        if inner.peers.remove(self.place.number) {
            inner.sweep();
        }
    }
}

impl Drop for ConnectionBlock {
    fn drop(&mut self) {
        self.leave();
        self.directory.inner.lock().free.push(self.place.number);
    }
}

impl Directory {
    /// An empty one. `domain` is the domain's number; `events`: regions may count what peers do.
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
            inner: Mutex::new(Inner {
                table: Table::new(pd)?,
                revocations: 0,
                blocks: Vec::new(),
                free: Vec::new(),
                peers: Members::default(),
                retired: VecDeque::new(),
                stuck: Vec::new(),
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

    /// Publishes an entry. No other entry has its key.
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

    /// Takes an entry out: peers do not find the key any more, and the others are told to forget
    /// it. Gives the count of revocations with which this was done.
    pub(crate) fn withdraw(&self, key: u64) -> u64 {
        self.change(|table| table.remove(key))
    }

    /// A published region is described otherwise from now on, or has other registrations. As
    /// [`Self::withdraw`].
    pub(crate) fn replace(&self, entry: &Entry) -> u64 {
        self.change(|table| table.replace(entry))
    }

    /// Changes the table, and where that has changed makes every peer look again.
    fn change(&self, change: impl FnOnce(&mut Table) -> bool) -> u64 {
        let mut inner = self.inner.lock();
        if change(&mut inner.table) {
            inner.revocations += 1;
            self.publish(&inner.table, inner.revocations);
            inner.notify();
        }
        inner.revocations
    }

    /// An event cell for a region with counters.
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

    /// A connection block for an endpoint, in whose `cell` the peer counts what it does.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering memory.
    pub(crate) fn block(self: &Arc<Self>, cell: Option<Arc<Cell>>) -> Result<ConnectionBlock> {
        let mut inner = self.inner.lock();
        if inner.free.is_empty() {
            let rights = sys::IBV_ACCESS_LOCAL_WRITE
                | sys::IBV_ACCESS_REMOTE_WRITE
                | sys::IBV_ACCESS_REMOTE_READ;
            let slab = inner.blocks.len();
            let words = Words::new(&self.pd, SLAB * STRIDE, rights)?;
            inner.blocks.push(Arc::new(words));
            inner.free.extend((slab * SLAB..(slab + 1) * SLAB).rev());
        }
        // there is one: they were just made
        let number = inner.free.pop().ok_or(FiErrno::ENOMEM)?;
        let words = Arc::clone(&inner.blocks[number / SLAB]);
        let index = number % SLAB * STRIDE;
        drop(inner);
        for word in 0..STRIDE {
            words.store(index + word, 0);
        }
        let block = Block {
            header_addr: self.header.remote_addr(0),
            header_rkey: self.header.rkey(),
            cell: cell.as_ref().map_or(RemoteAddr::NULL, |cell| cell.addr()),
        };
        words.write(index + Block::OWNERS, &block.encode());
        Ok(ConnectionBlock {
            directory: Arc::clone(self),
            place: BlockPlace {
                words,
                index,
                number,
            },
            _cell: cell,
        })
    }

    /// Number of retired registrations, for tests.
    #[cfg(test)]
    pub(crate) fn retired(&self) -> usize {
        let mut inner = self.inner.lock();
        inner.sweep();
        inner.retired.len()
    }
}

/// The numbers of the blocks of a registration whose peers hold keys, or did so when they last used
/// their blocks.
pub(super) fn holders(slab: usize, words: &Words) -> impl Iterator<Item = usize> {
    (0..SLAB)
        .filter(|i| words.load(i * STRIDE + Block::ACKNOWLEDGED) != 0)
        .map(move |i| slab * SLAB + i)
}

impl BlockPlace {
    pub(super) fn acknowledged(&self) -> u64 {
        self.words.load(self.index + Block::ACKNOWLEDGED)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Access, Buffer, Form, Mode, MrConfig, Region, RegionConfig};
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::verbs::devices;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    struct Silent;

    impl Peer for Silent {
        fn tell_revocations(&self) {}
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

    /// A peer that has looked something up and does not acknowledge any more is waited for once.
    /// Then registrations end, but their keys stay taken until it has gone.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn a_silent_peer_is_given_up_and_keeps_keys_only() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let mode = Mode::ALLOCATED | Mode::MMU_NOTIFY | Mode::LOCAL;
        let config = DomainConfig {
            mr: MrConfig {
                form: Form::new(mode, false),
                ..MrConfig::default()
            },
            ..DomainConfig::default()
        };
        let domain = Domain::open(&device, config).unwrap();
        let directory = domain.mr().directory(domain.pd()).unwrap();
        let block = directory.block(None).unwrap();
        let peer: Arc<dyn Peer> = Arc::new(Silent);
        block.join(Arc::downgrade(&peer));
        // it has looked something up, and is stopped from then on
        let words = &block.place.words;
        words.store(block.place.index + Block::ACKNOWLEDGED, 1);
        let memory = vec![0_u8; 3 * 4096];
        let register = |key| {
            let buffers = [Buffer {
                addr: memory.as_ptr().cast(),
                len: memory.len(),
            }];
            let config = RegionConfig {
                buffers: &buffers,
                access: Access::all(),
                requested_key: key,
                ..RegionConfig::default()
            };
            // SAFETY: the memory is dropped last.
            let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
            region.refresh(&buffers).unwrap();
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
        // it acknowledges the first two
        words.store(block.place.index + Block::ACKNOWLEDGED, 3);
        assert_eq!(directory.retired(), 2);
        block.leave();
        assert_eq!(directory.retired(), 0);
    }
    /// Counts its notifications.
    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Peer for Counts {
        fn tell_revocations(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn look(&self) -> Look {
            Silent.look()
        }
        fn acknowledge(&self) {}
        fn sever(&self) {}
    }

    /// Of 10,000 connected peers, three hold keys: a revocation, the sweeps and the others' leaving
    /// visit these three alone.
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

        let count = directory.change(|_| true);
        assert_eq!(peer.0.load(Ordering::Relaxed), 3);
        assert_eq!(visits(), 3, "the revocation");

        let left = || Left {
            cell: None,
            keys: Vec::new(),
            lists: vec![Words::new(domain.pd(), 1, 0).unwrap()],
        };
        directory.inner.lock().retired.push_back((count, left()));
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

        // their blocks and slots are used again, without the last peer's announcement
        let blocks: Vec<_> = (0..PEERS).map(|_| directory.block(None).unwrap()).collect();
        blocks
            .iter()
            .for_each(|block| block.join(Weak::clone(&weak)));
        directory.change(|_| true);
        assert_eq!((visits(), peer.0.load(Ordering::Relaxed)), (0, 3));
        assert_eq!(directory.inner.lock().blocks.len(), PEERS.div_ceil(SLAB));
    }
}
