//! Flush: makes the bytes written through a key visible to all processes, or persistent.
//!
//! All copies by initiators are visible at once, so a global flush only checks the key and orders.
//! A persistent flush writes back the file of which the memory is a shared mapping; the owner
//! opened that file when it registered the memory.

use std::os::fd::OwnedFd;

use rdma_core_sys::{
    IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT, IBV_FLUSH_GLOBAL, IBV_FLUSH_PERSISTENT,
};

use super::remote::{AccessError, Target, resolve};
use crate::hazard::Hazard;
use crate::peer::Peer;
use crate::segment::layout::region;
use crate::sync::atomic::{Ordering, fence};
use crate::sys::{self, Errno, Res};

/// The parameters of a flush request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flush {
    /// `ibv_placement_type`, one or both.
    pub(crate) placement: u32,
    /// Number of bytes from the target's address, or `None` for the whole region.
    pub(crate) len: Option<u64>,
}

impl Flush {
    /// The access rights that a queue pair and a region must grant for this flush; `None` if it
    /// requests no known placement type.
    pub(crate) fn right(self) -> Option<u32> {
        let mut right = 0;
        for (bit, access) in [
            (IBV_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_GLOBAL),
            (IBV_FLUSH_PERSISTENT, IBV_ACCESS_FLUSH_PERSISTENT),
        ] {
            if self.placement & bit != 0 {
                right |= access;
            }
        }
        let known = IBV_FLUSH_GLOBAL | IBV_FLUSH_PERSISTENT;
        (right != 0 && self.placement & !known == 0).then_some(right)
    }
}

/// Flushes a peer's region. A persistent flush blocks until the file is written back.
///
/// # Errors
/// [`AccessError`].
pub(crate) fn flush(
    peer: &Peer,
    own_slot: u32,
    target: Target,
    flush: Flush,
) -> Result<(), AccessError> {
    let right = flush.right().ok_or(AccessError::Remote)?;
    let hazard = Hazard::publish(&peer.hazards, &peer.map, own_slot, target.key);
    let at = region::AT + region::STRIDE * target.key.index();
    let (addr, len) = match flush.len {
        Some(len) => (target.addr, len),
        // A flush of the whole region: the specification ignores address and length.
        None => (peer.map.u64(at + region::IOVA).load(Ordering::Relaxed), 0),
    };
    resolve(&peer.map, target, addr, len, right).ok_or(AccessError::Remote)?;
    fence(Ordering::SeqCst);
    if flush.placement & IBV_FLUSH_PERSISTENT != 0 {
        let fd = peer.map.u32(at + region::FILE).load(Ordering::Relaxed);
        let file = open(peer, fd).map_err(|error| match error {
            // the agent's queue of connections is full
            Errno(libc::EAGAIN) => AccessError::Unavailable,
            _ if sys::is_shortage(error) => AccessError::Unavailable,
            _ => AccessError::Refused,
        })?;
        sys::write_back(&file).map_err(|_| AccessError::Remote)?;
    }
    drop(hazard);
    Ok(())
}

fn open(peer: &Peer, fd: u32) -> Res<OwnedFd> {
    let fd = fd.checked_sub(1).ok_or(Errno(libc::EINVAL))?;
    peer.opener.open(fd.cast_signed(), libc::O_RDONLY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_of_a_flush() {
        let right = |placement| {
            Flush {
                placement,
                len: None,
            }
            .right()
        };
        assert_eq!(right(1), Some(IBV_ACCESS_FLUSH_GLOBAL));
        assert_eq!(right(2), Some(IBV_ACCESS_FLUSH_PERSISTENT));
        let both = IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT;
        assert_eq!(right(3), Some(both));
        assert_eq!((right(0), right(4), right(5)), (None, None, None));
    }
}
