//! Registered memory that receives the results of atomics without a result buffer.

#![allow(unsafe_code, reason = "memory shared with a device")]

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::errno::Result;
use crate::verbs::{Mr, Pd, Sge};

/// Size of an atomic's target in bytes, and its required alignment.
pub const ATOMIC_SIZE: usize = 8;

/// Destination of unused results: devices write it, and the CPU does not read it.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `None` only during the drop.
    mr: Option<Mr>,
    cell: ManuallyDrop<Box<UnsafeCell<u64>>>,
}

// SAFETY: this side never reads or writes the cell.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Self> {
        let cell = Box::new(UnsafeCell::new(0_u64));
        let write = rdma_core_sys::IBV_ACCESS_LOCAL_WRITE;
        // SAFETY: `Scratch` ends the registration before it frees the cell; the box keeps the cell
        // at its address.
        let mr = unsafe { Mr::register(pd, cell.get().cast(), ATOMIC_SIZE, write) }?;
        Ok(Self {
            mr: Some(mr),
            cell: ManuallyDrop::new(cell),
        })
    }

    pub(crate) fn sge(&self) -> Sge {
        Sge {
            addr: self.cell.get() as u64,
            length: ATOMIC_SIZE as u32,
            lkey: self.mr.as_ref().map(Mr::lkey).unwrap_or_default(),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.mr.take().is_none_or(Mr::release) {
            // SAFETY: dropped once, here; no request of the device writes it any more.
            unsafe { ManuallyDrop::drop(&mut self.cell) };
        }
    }
}
