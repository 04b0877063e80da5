//! The key directory of a protection domain, as its owner sees it: the keys that peers may look up, the
//! connection blocks through which they find it, and the registrations of closed regions that wait until
//! no peer can use their keys any more. `docs/protocol.md` has the bytes and the order of writing them.
//!
//! Its lock is a leaf but for the peers' send queues: nothing else is taken under it.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rdma_core_sys as sys;

use super::event::{Cell, Cells};
use super::table::Table;
use super::words::Words;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::verbs::{Mr, Pd};
use crate::wire::records::{Block, Entry, Header, WORDS};

/// Connection blocks per registration.
const SLAB: usize = 64;
/// Registrations of closed regions that may wait for acknowledgements.
const PARKED: usize = 4096;
/// How long a close waits for them when there are more.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connected endpoint, to whom revocations are told. Called with the directory's lock held: it may post
/// and poll, and must not call the directory.
pub(crate) trait Peer: Send + Sync {
    /// Writes the directory's count of revocations ([`ConnectionBlock::revocations`]) to the *revision* of
    /// the peer's connection block, now or soon.
    fn tell_revocations(&self);
    /// Ends the connection: the peer does not acknowledge.
    fn sever(&self);
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Directory {
    header: Words,
    pd: Arc<Pd>,
    domain: u64,
    /// Where events are counted.
    cells: Option<Arc<Cells>>,
    inner: Mutex<Inner>,
}

struct Inner {
    table: Table,
    revocations: u64,
    blocks: Vec<Arc<Words>>,
    free: Vec<(usize, usize)>,
    peers: Vec<(Weak<dyn Peer>, BlockPlace)>,
    /// With the count of revocations that must be acknowledged before it may go, oldest first.
    parked: VecDeque<(u64, Parked)>,
    /// Of those, registrations that somebody is in the middle of an access to, and generations of their regions.
    stuck: Vec<(u64, Mr)>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("revocations", &self.revocations)
            .field("parked", &self.parked.len())
            .finish_non_exhaustive()
    }
}

/// What must stay while a peer may act on what was so before.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    /// Registrations of the memory, without rights.
    pub(crate) mrs: Vec<Mr>,
    /// Registrations of memory that has others now: they keep their rights until they go.
    pub(crate) replaced: Vec<Arc<Mr>>,
    /// The generation of their region.
    pub(crate) generation: u64,
    /// A segment list that a peer may be about to read.
    pub(crate) list: Option<Words>,
    /// What a peer may be about to add to.
    pub(crate) cell: Option<Arc<Cell>>,
}

impl Parked {
    fn is_empty(&self) -> bool {
        self.mrs.is_empty()
            && self.replaced.is_empty()
            && self.list.is_none()
            && self.cell.is_none()
    }
}

/// Where a connection block lies.
#[derive(Clone, Debug)]
struct BlockPlace {
    words: Arc<Words>,
    index: usize,
    slab: usize,
}

/// A connection block, the endpoint's own. Given back when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionBlock {
    directory: Arc<Directory>,
    place: BlockPlace,
    _cell: Option<Arc<Cell>>,
}

impl ConnectionBlock {
    pub(crate) fn addr(&self) -> u64 {
        self.place.words.addr(self.place.index)
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.place.words.rkey()
    }

    /// A number that no other connection has, as good as certainly.
    pub(crate) fn token(&self) -> u64 {
        self.directory.domain ^ self.addr()
    }

    /// The peer's count of revocations, as far as it has told.
    #[inline]
    pub(crate) fn revision(&self) -> u64 {
        self.place.words.load(self.place.index + Block::REVISION)
    }

    /// Where the directory's count of revocations lies: address and lkey.
    pub(crate) fn revocations(&self) -> (u64, u32) {
        let header = &self.directory.header;
        (header.addr(4), header.lkey())
    }

    /// Puts a word where the device can send it from; gives address and lkey.
    pub(crate) fn stage(&self, value: u64) -> (u64, u32) {
        let index = self.place.index + 4;
        self.place.words.store(index, value);
        (self.place.words.addr(index), self.place.words.lkey())
    }

    /// Revocations are told to `peer` from now on, until it is dropped or forgotten.
    pub(crate) fn join(&self, peer: Weak<dyn Peer>) {
        let mut inner = self.directory.inner.lock();
        inner.peers.push((peer, self.place.clone()));
    }

    /// The peer has gone: its queue pair can do nothing any more.
    pub(crate) fn leave(&self) {
        let mut inner = self.directory.inner.lock();
        let index = self.place.index;
        let words = &self.place.words;
        inner
            .peers
            .retain(|(_, place)| place.index != index || !Arc::ptr_eq(&place.words, words));
        inner.sweep();
    }
}

impl Drop for ConnectionBlock {
    fn drop(&mut self) {
        self.leave();
        let place = (self.place.slab, self.place.index);
        self.directory.inner.lock().free.push(place);
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
                peers: Vec::new(),
                parked: VecDeque::new(),
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
            cells_rkey: self.cells.as_ref().map_or(0, |cells| cells.rkey()),
            domain: self.domain,
        };
        self.header.write(0, &header.encode());
    }

    /// Lets peers find an entry. Its key is in no other one.
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

    /// A published region is about to end: peers do not find its key any more, and forget it.
    pub(crate) fn withdraw(&self, key: u64) {
        self.change(Parked::default(), |table| table.remove(key));
    }

    /// The registrations that a region had before and that peers may still act upon.
    pub(crate) fn take_replaced(&self, generation: u64) -> Vec<Mr> {
        let mut inner = self.inner.lock();
        let parked = inner.parked.iter_mut().map(|(_, parked)| parked);
        let mut taken: Vec<Mr> = parked
            .filter(|parked| parked.generation == generation)
            .flat_map(|parked| std::mem::take(&mut parked.replaced))
            .filter_map(Arc::into_inner)
            .collect();
        let stuck = inner.stuck.extract_if(.., |(of, _)| *of == generation);
        taken.extend(stuck.map(|(_, mr)| mr));
        taken
    }

    /// What is left of a region that was withdrawn and whose memory nobody reaches. No key of it is given to another
    /// region before every peer knows.
    pub(crate) fn park(&self, parked: Parked) {
        self.change(parked, |_| false);
    }

    /// A published region has other registrations now. What was there before serves until every peer knows.
    pub(crate) fn replace(&self, entry: &Entry, parked: Parked) {
        self.change(parked, |table| table.replace(entry));
    }

    /// Changes the table, and where that has changed makes every peer look again.
    fn change(&self, parked: Parked, change: impl FnOnce(&mut Table) -> bool) {
        let mut inner = self.inner.lock();
        if change(&mut inner.table) {
            inner.revocations += 1;
            self.publish(&inner.table, inner.revocations);
            self.tell(&mut inner);
        }
        let revocations = inner.revocations;
        if !parked.is_empty() {
            inner.parked.push_back((revocations, parked));
        }
        inner.sweep();
        if inner.parked.len() > PARKED {
            self.press(inner);
        }
    }

    fn tell(&self, inner: &mut Inner) {
        inner.peers.retain(|(peer, place)| {
            let Some(peer) = peer.upgrade() else {
                return false;
            };
            if place.acknowledged() != 0 {
                peer.tell_revocations();
            }
            true
        });
    }

    /// Waits for peers that do not acknowledge, for a bounded time, then ends their connections.
    fn press<'a>(&'a self, mut inner: parking_lot::MutexGuard<'a, Inner>) {
        let Some(&(wanted, _)) = inner.parked.front() else {
            return;
        };
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            parking_lot::MutexGuard::unlocked(&mut inner, || {
                std::thread::sleep(Duration::from_micros(200));
            });
            self.tell(&mut inner);
            inner.sweep();
            if inner
                .parked
                .front()
                .is_none_or(|(first, _)| *first > wanted)
            {
                return;
            }
        }
        let late = inner.peers.iter().filter(|(_, place)| place.lags(wanted));
        for peer in late.filter_map(|(peer, _)| peer.upgrade()) {
            warn_log!(
                Mr,
                "a peer does not acknowledge that keys were revoked: its connection is ended"
            );
            peer.sever();
        }
        inner.peers.retain(|(_, place)| !place.lags(wanted));
        inner.sweep();
    }

    /// A cell for a region whose events are counted.
    ///
    /// # Errors
    /// `ENOMEM`: all are taken. `EOPNOTSUPP`: made without.
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
            let words = Words::new(&self.pd, SLAB * WORDS, rights)?;
            inner.blocks.push(Arc::new(words));
            inner
                .free
                .extend((0..SLAB).rev().map(|i| (slab, i * WORDS)));
        }
        // there is one: they were just made
        let (slab, index) = inner.free.pop().ok_or(FiErrno::ENOMEM)?;
        let words = Arc::clone(&inner.blocks[slab]);
        drop(inner);
        for word in 0..WORDS {
            words.store(index + word, 0);
        }
        let block = Block {
            header_addr: self.header.addr(0),
            header_rkey: self.header.rkey(),
            cell: cell.as_ref().map_or(0, |cell| cell.addr()),
        };
        words.write(index + Block::OWNERS, &block.encode());
        Ok(ConnectionBlock {
            directory: Arc::clone(self),
            place: BlockPlace { words, index, slab },
            _cell: cell,
        })
    }

    /// Registrations that keep rights although others have taken their place, for tests.
    #[cfg(test)]
    pub(crate) fn replaced(&self) -> usize {
        let inner = self.inner.lock();
        let parked = inner.parked.iter().map(|(_, parked)| parked.replaced.len());
        parked.sum::<usize>() + inner.stuck.len()
    }

    /// Registrations of closed regions that wait, for tests.
    #[cfg(test)]
    pub(crate) fn parked(&self) -> usize {
        let mut inner = self.inner.lock();
        inner.sweep();
        inner.parked.len()
    }
}

impl BlockPlace {
    fn acknowledged(&self) -> u64 {
        self.words.load(self.index + Block::ACKNOWLEDGED)
    }

    /// Whether its peer may still act on what was so before revocation number `wanted`.
    fn lags(&self, wanted: u64) -> bool {
        let acknowledged = self.acknowledged();
        acknowledged != 0 && acknowledged - 1 < wanted
    }
}

impl Inner {
    /// Frees what every peer knows to be gone.
    fn sweep(&mut self) {
        self.peers.retain(|(peer, _)| peer.strong_count() != 0);
        while let Some((wanted, _)) = self.parked.front() {
            if self.peers.iter().any(|(_, place)| place.lags(*wanted)) {
                return;
            }
            let Some((_, parked)) = self.parked.pop_front() else {
                return;
            };
            // The others reach nothing; but behind one of these the memory may be written yet.
            for mr in parked.replaced.into_iter().filter_map(Arc::into_inner) {
                if let Err(busy) = mr.deregister() {
                    self.stuck.push((parked.generation, busy));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Access, Buffer, Form, Mode, Region, RegionConfig};
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::verbs::devices;

    struct Silent;

    impl Peer for Silent {
        fn tell_revocations(&self) {}
        fn sever(&self) {}
    }

    /// What a region had before it was refreshed keeps its rights for peers that have not acknowledged, but not
    /// longer than the region lives.
    #[test]
    #[allow(unsafe_code, reason = "registers memory")]
    fn a_closed_region_takes_what_was_replaced_along() {
        let device = devices(&[softverbs::backend()], false).remove(0);
        let mode = Mode::ALLOCATED | Mode::MMU_NOTIFY | Mode::LOCAL;
        let config = DomainConfig {
            form: Form::new(mode, false),
            ..DomainConfig::default()
        };
        let domain = Domain::open(&device, config).unwrap();
        let directory = domain.directory(domain.pd()).unwrap();
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
            let region = unsafe { Region::register(&domain, &config) }.unwrap();
            region.refresh(&buffers).unwrap();
            region
        };
        let (first, second) = (register(1), register(2));
        assert_eq!(directory.replaced(), 2);
        first.close().unwrap();
        assert_eq!(directory.replaced(), 1, "one is the other region's");
        assert_eq!(
            second.refresh(&[]).err(),
            Some(FiErrno::EINVAL),
            "still itself"
        );
        second.close().unwrap();
        assert_eq!(directory.replaced(), 0);
        assert!(directory.parked() > 0, "keys stay taken");
        block.leave();
        assert_eq!(directory.parked(), 0);
    }
}
