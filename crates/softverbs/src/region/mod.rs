//! Memory regions: the registrations of this process, and access to those of peers.
//!
//! The owner keeps every region in two tables. Its private table, which no other process can write,
//! resolves local keys; the shared table resolves remote keys for initiators. An initiator first
//! publishes the key that it uses in a hazard word of the owner's segment, and then checks that the
//! key is valid. The owner first makes the key invalid and then waits for hazards. So no initiator
//! accesses memory through a key after the deregistration of the key has returned.

pub(crate) mod access;
mod advise;
mod atomic;
mod device_buffer;
mod elements;
mod flush;
mod last_region;
mod locked;
mod null;
pub(crate) mod odp;
mod places;
mod remote;
mod table;

pub(crate) use access::Range;
pub(crate) use advise::advise;
#[cfg(any(test, fuzzing))]
pub(crate) use atomic::Stripe;
#[cfg(test)]
pub(crate) use atomic::hold_lock;
pub(crate) use atomic::{Change, Initiator, LOCK_WAIT, REQUEST_LOCK_WAIT, change, change_own};
#[cfg(any(test, fuzzing))]
pub(crate) use device_buffer::change as change_direct;
pub(crate) use device_buffer::copy as copy_mapped;
pub(crate) use elements::{
    Elements, MAX_ELEMENTS, MAX_RANGES, Shape, change_elements, change_own_elements, change_words,
    offered as offers_elements,
};
pub(crate) use flush::{Flush, flush};
pub(crate) use last_region::LastRegion;
pub(crate) use places::Places;
pub(crate) use remote::{
    AccessError, Direction, IovecCursor, Target, copy, granted, may_invalidate, resolve,
    write_bytes,
};
pub(crate) use table::{Description, Regions};
