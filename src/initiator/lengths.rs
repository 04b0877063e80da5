//! Maximum lengths of an endpoint's operations, which the application can reduce (`fi_setopt(3)`).

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::errno::{FiErrno, Result};

/// One maximum length, named as in `fi_endpoint(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthOption {
    /// `FI_OPT_MAX_MSG_SIZE`
    MaxMsg,
    /// `FI_OPT_MAX_RMA_SIZE`
    MaxRma,
    /// `FI_OPT_INJECT_MSG_SIZE`
    InjectMsg,
    /// `FI_OPT_INJECT_RMA_SIZE`
    InjectRma,
}

/// Maximum lengths in bytes; set before the endpoint is enabled, then copied by the initiator.
#[derive(Debug)]
pub(crate) struct Lengths {
    values: [AtomicUsize; 4],
    greatest: [usize; 4],
}

impl Lengths {
    pub(crate) fn new(max: usize, inject: usize) -> Self {
        let greatest = [max, max, inject, inject];
        Self {
            values: greatest.map(AtomicUsize::new),
            greatest,
        }
    }

    pub(crate) fn get(&self, option: LengthOption) -> usize {
        self.values[option as usize].load(Ordering::Relaxed)
    }

    /// # Errors
    /// `EINVAL`: `value` exceeds the endpoint's initial maximum.
    pub(crate) fn set(&self, option: LengthOption, value: usize) -> Result<()> {
        if value > self.greatest[option as usize] {
            return Err(FiErrno::EINVAL);
        }
        self.values[option as usize].store(value, Ordering::Relaxed);
        Ok(())
    }
}
