//! Registered memory of 64-bit words that peers read, and partly write.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::{Lkey, Mr, Pd, RemoteAddr, Rkey};
use crate::errno::Result;
use crate::log::warn_log;

/// 64-bit words, little-endian in memory, with one registration. All Rust references to them are to
/// atomics, so peers with the access right may write them.
#[derive(Debug)]
pub(crate) struct Words {
    /// `None` only during the drop.
    mr: Option<Mr>,
    memory: Box<[AtomicU64]>,
}

impl Words {
    /// `count` words, all zero, registered with `rights` (`ibv_access_flags`). Blocks and
    /// allocates.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(crate) fn new(pd: &Arc<Pd>, count: usize, rights: u32) -> Result<Self> {
        let zeros = vec![0_u64; count].into_boxed_slice();
        // SAFETY: `AtomicU64` has the size and alignment of `u64`, and zero is valid for both.
        let memory = unsafe { Box::from_raw(Box::into_raw(zeros) as *mut [AtomicU64]) };
        let addr = memory.as_ptr().cast();
        // SAFETY: the registration ends before the memory is freed, and all access is by atomics.
        let mr = unsafe { Mr::register(pd, addr, count * 8, rights) }?;
        Ok(Self {
            mr: Some(mr),
            memory,
        })
    }

    /// The address of the word at `index`.
    pub(crate) fn addr(&self, index: usize) -> u64 {
        (&raw const self.memory[index]) as u64
    }

    /// The address of a word in a peer's requests.
    pub(crate) fn remote_addr(&self, index: usize) -> RemoteAddr {
        RemoteAddr::new(self.addr(index))
    }

    /// The number of words.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Ends the registration without a wait. False: an access of a peer is under way; the caller
    /// can repeat the call.
    pub(crate) fn end_now(&mut self) -> bool {
        end_now(&mut self.mr)
    }

    pub(crate) fn lkey(&self) -> Lkey {
        self.mr.as_ref().map_or(Lkey::default(), Mr::lkey)
    }

    pub(crate) fn rkey(&self) -> Rkey {
        self.mr.as_ref().map_or(Rkey::default(), Mr::rkey)
    }

    /// Reads a word (`Acquire`).
    #[inline]
    pub(crate) fn load(&self, index: usize) -> u64 {
        u64::from_le(self.memory[index].load(Ordering::Acquire))
    }

    /// Writes a word (`Release`).
    #[inline]
    pub(crate) fn store(&self, index: usize, value: u64) {
        self.memory[index].store(value.to_le(), Ordering::Release);
    }

    /// Reads `N` words from `index` on, each atomically.
    pub(crate) fn read<const N: usize>(&self, index: usize) -> [u64; N] {
        std::array::from_fn(|i| self.load(index + i))
    }

    /// Writes a record whose last word is its checksum (or writes zeros). A concurrent reader sees
    /// the old record, the new one, or one with a wrong checksum.
    pub(crate) fn write(&self, index: usize, record: &[u64]) {
        if let Some(last) = record.len().checked_sub(1) {
            self.rewrite(index, record, last);
        }
    }

    /// As [`Self::write`], for a record whose word `sum` is the checksum.
    pub(crate) fn rewrite(&self, index: usize, record: &[u64], sum: usize) {
        self.store(index + sum, 0);
        fence(Ordering::SeqCst);
        for (i, word) in record.iter().enumerate().filter(|(i, _)| *i != sum) {
            self.store(index + i, *word);
        }
        fence(Ordering::SeqCst);
        self.store(index + sum, record[sum]);
    }
}

fn end_now(mr: &mut Option<Mr>) -> bool {
    *mr = mr.take().and_then(|mr| mr.deregister_now().err());
    mr.is_none()
}

/// A further registration of some of the words: its keys give access to these words alone.
/// Deregistered when dropped.
#[derive(Debug)]
pub(crate) struct WordRange {
    /// `None` after the end of the registration.
    mr: Option<Mr>,
    words: Arc<Words>,
}

impl WordRange {
    /// Registers the words of `range` with `rights` (`ibv_access_flags`). Blocks and allocates.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(crate) fn new(
        pd: &Arc<Pd>,
        words: &Arc<Words>,
        range: Range<usize>,
        rights: u32,
    ) -> Result<Self> {
        let memory = &words.memory[range];
        let addr = memory.as_ptr().cast();
        // SAFETY: this registration holds a reference to the memory, and all access is by atomics.
        let mr = unsafe { Mr::register(pd, addr, size_of_val(memory), rights) }?;
        Ok(Self {
            mr: Some(mr),
            words: Arc::clone(words),
        })
    }

    pub(crate) fn rkey(&self) -> Rkey {
        self.mr.as_ref().map_or(Rkey::default(), Mr::rkey)
    }

    /// Ends the registration without a wait. Returns whether the words can be used again; they
    /// cannot while an access of a peer is under way. The caller can repeat the call.
    pub(crate) fn end_now(&mut self) -> bool {
        end_now(&mut self.mr)
    }
}

impl Drop for WordRange {
    fn drop(&mut self) {
        let Some(Err(busy)) = self.mr.take().map(Mr::deregister) else {
            return;
        };
        warn_log!(
            Mr,
            "memory is kept: a stopped peer has an access to it under way"
        );
        std::mem::forget(busy);
        std::mem::forget(Arc::clone(&self.words));
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if !self.mr.take().is_none_or(Mr::release) {
            // leaks the memory, so that the outstanding access does not write memory that was
            // reused
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}
