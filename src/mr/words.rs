//! Registered words that peers read, and some write.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::errno::Result;
use crate::log::warn_log;
use crate::verbs::{Mr, Pd};

/// Words of 64 bits, little-endian to whoever reads them from outside, with one registration over all. No
/// Rust reference ever covers them but those of atomics, so a peer may write where it has the right.
#[derive(Debug)]
pub(crate) struct Words {
    /// There until this is dropped.
    mr: Option<Mr>,
    memory: Box<[AtomicU64]>,
}

impl Words {
    /// So many words, zero, with `ibv_access_flags`.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(crate) fn new(pd: &Arc<Pd>, count: usize, rights: u32) -> Result<Self> {
        let zeros = vec![0_u64; count].into_boxed_slice();
        // SAFETY: both types have one size and alignment, and zero is a value of each.
        let memory = unsafe { Box::from_raw(Box::into_raw(zeros) as *mut [AtomicU64]) };
        let addr = memory.as_ptr().cast();
        // SAFETY: the registration is dropped before the memory; only atomics are ever used on it.
        let mr = unsafe { Mr::register(pd, addr, count * 8, rights) }?;
        Ok(Self {
            mr: Some(mr),
            memory,
        })
    }

    /// The address of a word.
    pub(crate) fn addr(&self, index: usize) -> u64 {
        (&raw const self.memory[index]) as u64
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.mr.as_ref().map_or(0, Mr::lkey)
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.mr.as_ref().map_or(0, Mr::rkey)
    }

    /// A word as it is now.
    #[inline]
    pub(crate) fn load(&self, index: usize) -> u64 {
        u64::from_le(self.memory[index].load(Ordering::Acquire))
    }

    /// Writes a word.
    #[inline]
    pub(crate) fn store(&self, index: usize, value: u64) {
        self.memory[index].store(value.to_le(), Ordering::Release);
    }

    /// Words from `index` on.
    pub(crate) fn read<const N: usize>(&self, index: usize) -> [u64; N] {
        std::array::from_fn(|i| self.load(index + i))
    }

    /// Writes a record whose last word is its checksum (or zeros), so that a reader sees the old one, the
    /// new one, or one whose checksum is wrong.
    pub(crate) fn write(&self, index: usize, record: &[u64]) {
        if let Some(last) = record.len().checked_sub(1) {
            self.rewrite(index, record, last);
        }
    }

    /// The same of a record whose word `sum` is its checksum, wherever that is.
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

impl Drop for Words {
    fn drop(&mut self) {
        let Some(Err(busy)) = self.mr.take().map(Mr::deregister) else {
            return;
        };
        // What it writes later goes nowhere else.
        warn_log!(
            Mr,
            "memory is kept: a stopped peer has an access to it under way"
        );
        std::mem::forget(busy);
        std::mem::forget(std::mem::take(&mut self.memory));
    }
}
