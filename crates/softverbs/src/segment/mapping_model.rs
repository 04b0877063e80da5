//! Replaces `mapping.rs` in the models: the words are loom atomics, created at their first access.
//! Words that several threads use must be created before the threads start, because loom treats the
//! creation as a write.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sys::Res;

/// Memory that threads of a model share, all zeros at first.
#[derive(Debug)]
pub(crate) struct Mapping {
    words: Arc<Words>,
    len: usize,
}

#[derive(Debug, Default)]
struct Words {
    u32s: Mutex<BTreeMap<usize, &'static AtomicU32>>,
    u64s: Mutex<BTreeMap<usize, &'static AtomicU64>>,
}

impl Drop for Words {
    fn drop(&mut self) {
        let u32s = std::mem::take(self.u32s.get_mut().unwrap_or_else(PoisonError::into_inner));
        let u64s = std::mem::take(self.u64s.get_mut().unwrap_or_else(PoisonError::into_inner));
        for word in u32s.into_values() {
            // SAFETY: leaked below; every reference borrowed the mapping, which is being dropped.
            drop(unsafe { Box::from_raw(std::ptr::from_ref(word).cast_mut()) });
        }
        for word in u64s.into_values() {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(std::ptr::from_ref(word).cast_mut()) });
        }
    }
}

impl Mapping {
    /// Returns separate memory: models have no files.
    pub(crate) fn new(_: &OwnedFd, len: usize) -> Res<Self> {
        Ok(Self::model(len))
    }

    /// As [`Self::new`].
    pub(crate) fn pair(
        (_, shared): (&OwnedFd, usize),
        (_, tables): (&OwnedFd, usize),
        _: bool,
    ) -> Res<Self> {
        Ok(Self::model(shared + tables))
    }

    /// # Safety
    /// None: the model does not access the address.
    pub(crate) unsafe fn borrowed(_: *mut u8, len: usize) -> Res<Self> {
        Ok(Self::model(len))
    }

    /// Returns separate memory: no model uses parts.
    pub(crate) fn part(_: &crate::sync::Arc<Self>, _: usize, len: usize) -> Self {
        Self::model(len)
    }

    pub(crate) fn model(len: usize) -> Self {
        Self {
            words: Arc::default(),
            len,
        }
    }

    /// A hint, which has no effect on the model's words.
    pub(crate) fn prefetch_to_write(&self, _: usize) {}

    /// As [`Self::prefetch_to_write`].
    pub(crate) fn pass_on(&self, _: usize) {}

    /// Creates words for several threads.
    pub(crate) fn prepare(
        &self,
        u32s: impl IntoIterator<Item = usize>,
        u64s: impl IntoIterator<Item = usize>,
    ) {
        for at in u32s {
            self.u32(at);
        }
        for at in u64s {
            self.u64(at);
        }
    }

    /// The same memory again, as another process maps it.
    pub(crate) fn again(&self) -> Self {
        Self {
            words: Arc::clone(&self.words),
            len: self.len,
        }
    }

    pub(crate) fn prefer_huge_pages(&self) {}

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at <= self.len - 4);
        let mut words = self.words.u32s.lock().unwrap();
        words
            .entry(at)
            .or_insert_with(|| Box::leak(Box::new(AtomicU32::new(0))))
    }

    pub(crate) fn u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at <= self.len - 8);
        let mut words = self.words.u64s.lock().unwrap();
        words
            .entry(at)
            .or_insert_with(|| Box::leak(Box::new(AtomicU64::new(0))))
    }

    pub(crate) fn words<const N: usize>(&self, at: usize) -> [&AtomicU64; N] {
        std::array::from_fn(|i| self.u64(at + 8 * i))
    }

    pub(crate) fn u32s<const N: usize>(&self, at: usize) -> [&AtomicU32; N] {
        std::array::from_fn(|i| self.u32(at + 4 * i))
    }

    pub(crate) fn words_and_bytes(&self, at: usize, len: usize) -> ([&AtomicU64; 4], *mut u8) {
        (self.words(at), self.bytes(at + 32, len))
    }

    /// Returns a null pointer: a model keeps payload in its own cells, which loom checks.
    pub(crate) fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        assert!(len <= self.len && at <= self.len - len);
        std::ptr::null_mut()
    }
}
