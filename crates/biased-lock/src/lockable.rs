//! The mutex as `lock_api` knows mutexes.

#![allow(unsafe_code)] // an unsafe trait

use std::marker::PhantomData;

use parking_lot::lock_api;

use crate::RawMutex;
use crate::platform::{is_visitor, thread};

/// How a thread has the mutex: it stays with that thread.
#[derive(Debug)]
pub struct Held {
    /// The place of the thread, which has the mutex by its bias. `None`: by `others`.
    place: Option<u8>,
    here: PhantomData<*mut ()>,
}

impl Held {
    #[inline(always)]
    const fn bias(place: usize) -> Self {
        Self {
            place: Some(place as u8),
            here: PhantomData,
        }
    }

    #[inline(always)]
    const fn others() -> Self {
        Self {
            place: None,
            here: PhantomData,
        }
    }
}

// SAFETY: one thread at a time: see the protocol in the crate's documentation; the models try it.
unsafe impl lock_api::RawMutex for RawMutex {
    #[allow(clippy::declare_interior_mutable_const)] // the constant of the trait
    const INIT: Self = Self::new();

    type Guard = Held;

    #[inline(always)]
    fn lock(&self) -> Held {
        let thread = thread();
        match self.enter(thread) {
            Some(place) => Held::bias(place),
            None => {
                self.lock_others(thread, is_visitor);
                Held::others()
            }
        }
    }

    #[inline(always)]
    fn try_lock(&self) -> Option<Held> {
        let thread = thread();
        match self.enter(thread) {
            Some(place) => Some(Held::bias(place)),
            None => self.try_lock_others(thread, is_visitor).then(Held::others),
        }
    }

    #[inline(always)]
    unsafe fn unlock(&self, held: Held) {
        match held.place {
            Some(place) => self.leave(usize::from(place)),
            None => self.unlock_others(),
        }
    }

    fn is_locked(&self) -> bool {
        self.is_taken()
    }
}
