//! Connection blocks: the words through which a peer finds the key directory, is notified of
//! revocations and acknowledges them. `docs/protocol.md`, "The connection block", has the words.
//!
//! Which blocks are free, and which peers have one, changes under the directory's lock.

use std::sync::{Arc, Weak};

use rdma_core_sys as sys;

use super::directory::{Directory, Peer};
use super::directory_peers::DirectoryPeer;
use super::revocation::Ending;
use crate::errno::{FiErrno, Result};
use crate::queue::event_cell::Cell;
use crate::verbs::{Lkey, RemoteAddr, Rkey, WordRange, Words};
use crate::wire::records::{Block, Header, WORDS};

/// Connection blocks per allocation. One registration of it is for this side's requests. Each block
/// in use has a registration of its own for its peer, which therefore has no access to other
/// blocks.
pub(super) const SLAB: usize = 64;
/// Words from the start of one block to the start of the next.
const STRIDE: usize = 2 * WORDS;
/// Index of the word that receives the results of reads of the peer's block: the first behind the
/// block, to which the peer has no access.
const SINK: usize = WORDS;

/// Location of a connection block.
#[derive(Clone, Debug)]
pub(super) struct BlockPlace {
    pub(super) words: Arc<Words>,
    /// Index of the block's first word.
    pub(super) index: usize,
    /// The block's number; the numbering continues across the allocations.
    pub(super) number: usize,
}

impl BlockPlace {
    pub(super) fn acknowledged(&self) -> u64 {
        self.words.load(self.index + Block::ACKNOWLEDGED)
    }
}

/// The connection block of one endpoint. Released when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionBlock {
    directory: Arc<Directory>,
    pub(super) place: BlockPlace,
    /// The peer's access to the block. `None` only during the drop.
    access: Option<WordRange>,
    _cell: Option<Arc<Cell>>,
}

impl ConnectionBlock {
    pub(crate) fn addr(&self) -> RemoteAddr {
        self.place.words.remote_addr(self.place.index)
    }

    pub(crate) fn rkey(&self) -> Rkey {
        let access = self.access.as_ref();
        access.map_or(Rkey::default(), WordRange::rkey)
    }

    /// A number that is unique to the connection with very high probability.
    pub(crate) fn token(&self) -> u64 {
        self.directory.number() ^ self.addr().get()
    }

    /// Whether the peer has looked up a key, and has not written 0 since.
    pub(crate) fn holds_keys(&self) -> bool {
        self.place.acknowledged() != 0
    }

    /// The last revocation count that the peer has written here.
    #[inline]
    pub(crate) fn revision(&self) -> u64 {
        self.place.words.load(self.place.index + Block::REVISION)
    }

    /// Address and lkey of the directory's revocation count.
    pub(crate) fn revocations(&self) -> (u64, Lkey) {
        let header = &self.directory.header;
        (header.addr(Header::REVOCATIONS), header.lkey())
    }

    /// Stores a word in registered memory, as the source of a write. Returns its address and lkey.
    pub(crate) fn store_acknowledged(&self, value: u64) -> (u64, Lkey) {
        let index = self.place.index + Block::ACKNOWLEDGEMENT;
        self.place.words.store(index, value);
        (self.place.words.addr(index), self.place.words.lkey())
    }

    /// Publishes the value of the word [`Block::SETTLED`], which the peer reads.
    pub(crate) fn show_settled(&self, value: u64) {
        let index = self.place.index + Block::SETTLED;
        self.place.words.store(index, value);
    }

    /// Address and lkey of the word that receives reads of the peer's block.
    pub(crate) fn sink(&self) -> (u64, Lkey) {
        let words = &self.place.words;
        (words.addr(self.place.index + SINK), words.lkey())
    }

    /// The result of the last read of the peer's block.
    pub(crate) fn peer_settled(&self) -> u64 {
        self.place.words.load(self.place.index + SINK)
    }

    /// Adds the peer: it is notified of revocations until `peer` is dropped or [`Self::leave`] is
    /// called.
    pub(crate) fn join(&self, peer: Weak<dyn Peer>) {
        let mut inner = self.directory.inner.lock();
        let member = DirectoryPeer::new(peer, self.place.clone());
        inner.peers.insert(self.place.number, member);
    }

    /// From now on `peer` is asked about the peer, in place of what was passed to [`Self::join`],
    /// which the directory does not use after the return. No effect if the peer was removed.
    pub(crate) fn succeed(&self, peer: Weak<dyn Peer>) {
        self.directory
            .inner
            .lock()
            .peers
            .succeed(self.place.number, peer);
        self.directory.wait_for_look();
    }

    /// Removes the peer, which the directory does not use after the return. The queue pair must be
    /// unable to execute further operations of the peer. Does not wait for an access that is under
    /// way.
    pub(crate) fn leave(&self) {
        let mut inner = self.directory.inner.lock();
        let mut ending = Vec::new();
        if inner.peers.remove(self.place.number) {
            ending = inner.take_ending();
        }
        drop(inner);
        self.directory.end(ending);
        self.directory.wait_for_look();
    }
}

/// Does not wait: the driver of connections drops blocks too. If the peer, which may be stopped,
/// accesses the block, the block is free later.
impl Drop for ConnectionBlock {
    fn drop(&mut self) {
        let mut inner = self.directory.inner.lock();
        let mut ending = match inner.peers.remove(self.place.number) {
            true => inner.take_ending(),
            false => std::mem::take(&mut inner.ending),
        };
        drop(inner);
        let access = self.access.take();
        ending.extend(access.map(|access| Ending::Block(access, self.place.number)));
        self.directory.end(ending);
    }
}

impl Directory {
    /// Allocates a connection block for an endpoint; in `cell` the peer counts its operations.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering memory.
    pub(crate) fn block(self: &Arc<Self>, cell: Option<Arc<Cell>>) -> Result<ConnectionBlock> {
        let ending = std::mem::take(&mut self.inner.lock().ending);
        self.end(ending);
        let mut inner = self.inner.lock();
        if inner.free.is_empty() {
            let slab = inner.blocks.len();
            let words = Words::new(&self.pd, SLAB * STRIDE, sys::IBV_ACCESS_LOCAL_WRITE)?;
            inner.blocks.push(Arc::new(words));
            inner.free.extend((slab * SLAB..(slab + 1) * SLAB).rev());
        }
        // not empty: blocks were added above if there were none
        let number = inner.free.pop().ok_or(FiErrno::ENOMEM)?;
        let words = Arc::clone(&inner.blocks[number / SLAB]);
        let index = number % SLAB * STRIDE;
        drop(inner);
        let rights = sys::IBV_ACCESS_LOCAL_WRITE
            | sys::IBV_ACCESS_REMOTE_WRITE
            | sys::IBV_ACCESS_REMOTE_READ;
        let access = WordRange::new(&self.pd, &words, index..index + WORDS, rights)
            .inspect_err(|_| self.inner.lock().free.push(number))?;
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
            access: Some(access),
            _cell: cell,
        })
    }
}

/// Indices of the blocks of one allocation whose peers hold keys, or held keys when they last
/// wrote *acknowledged*.
pub(super) fn holders(slab: usize, words: &Words) -> impl Iterator<Item = usize> {
    (0..SLAB)
        .filter(|i| words.load(i * STRIDE + Block::ACKNOWLEDGED) != 0)
        .map(move |i| slab * SLAB + i)
}
