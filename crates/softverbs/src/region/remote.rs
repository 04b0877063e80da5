//! The initiator's side: copies into and out of a peer's regions, without action of the peer.

use rdma_core_sys::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
};

use super::{Description, Range, device_buffer};
use crate::dm::Direct;
use crate::hazard::{Gate, Hazard, MOST_AT_ONCE};
use crate::key::Key;
use crate::peer::Peer;
use crate::segment::Mapping;
use crate::segment::layout::region;
use crate::sync::atomic::Ordering;
use crate::sys::{self, MAX_IOV};

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Write,
    Read,
}

impl Direction {
    /// That of a work request. `None`: the request is no RDMA READ or WRITE.
    #[inline(always)]
    pub(crate) fn of_opcode(opcode: u32) -> Option<Self> {
        match opcode {
            IBV_WR_RDMA_WRITE => Some(Self::Write),
            IBV_WR_RDMA_READ => Some(Self::Read),
            _ => None,
        }
    }

    /// The right that an access in this direction needs.
    #[inline(always)]
    pub(crate) fn right(self) -> u32 {
        match self {
            Self::Write => IBV_ACCESS_REMOTE_WRITE,
            Self::Read => IBV_ACCESS_REMOTE_READ,
        }
    }
}

/// The remote operand of a work request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) key: Key,
    pub(crate) addr: u64,
    /// Protection domain and number of the peer's queue pair.
    pub(crate) pd: u32,
    pub(crate) qp: u32,
}

/// Reason why none or only a part of the bytes was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessError {
    /// The key does not permit the access, or the memory behind the key is not mapped.
    Remote,
    /// The local buffer is not mapped.
    Local,
    /// The peer has ended.
    Dead,
    /// The kernel refuses access to the peer.
    Refused,
    /// Now: another living process, which may be stopped, holds a lock of the memory, or there is
    /// no descriptor or memory for a file that the flush needs. Nothing has changed.
    Unavailable,
    /// The other end's queue pair is in another state than the one in which it was read. Whole
    /// parts of [`MOST_AT_ONCE`] bytes may have been copied.
    Moved,
}

/// The location of a target's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// Address in the owner's memory.
    pub(crate) addr: u64,
    /// Location in a device buffer of the owner, if the stamp is not 0.
    pub(crate) direct: Direct,
}

/// Whether the key belongs to a type 2B memory window that is bound to the target's queue pair now.
/// The connected queue pair may then invalidate the window.
pub(crate) fn may_invalidate(map: &Mapping, target: Target) -> bool {
    let at = region::AT + region::STRIDE * target.key.index();
    target.key.0 != 0
        && map.u32(at + region::KEY).load(Ordering::Acquire) == target.key.0
        && map.u32(at + region::QP).load(Ordering::Relaxed) == target.qp
}

/// Resolves `len` bytes at `addr` in the process whose segment is `map`, if the key permits the
/// access now. The caller holds a [`Hazard`] for the key.
pub(crate) fn resolve(
    map: &Mapping,
    target: Target,
    addr: u64,
    len: u64,
    right: u32,
) -> Option<Resolved> {
    let at = region::AT + region::STRIDE * target.key.index();
    if target.key.0 == 0 || map.u32(at + region::KEY).load(Ordering::Acquire) != target.key.0 {
        return None;
    }
    let access = map.u32(at + region::ACCESS).load(Ordering::Relaxed);
    let pd = map.u32(at + region::PD).load(Ordering::Relaxed);
    let qp = map.u32(at + region::QP).load(Ordering::Relaxed);
    let start = map.u64(at + region::IOVA).load(Ordering::Relaxed);
    let room = map.u64(at + region::LEN).load(Ordering::Relaxed);
    let base = map.u64(at + region::ADDR).load(Ordering::Relaxed);
    let stamp = map.u64(at + region::BUFFER).load(Ordering::Relaxed);
    let first = map.u64(at + region::OFFSET).load(Ordering::Relaxed);
    let offset = addr.wrapping_sub(start);
    let allowed = access & right == right && pd == target.pd && (qp == 0 || qp == target.qp);
    (allowed && offset <= room && len <= room - offset).then(|| Resolved {
        addr: base.wrapping_add(offset),
        direct: Direct {
            stamp,
            offset: first.wrapping_add(offset),
        },
    })
}

/// The description of a peer's region, if the key is valid and not a memory window's; for importing
/// the region.
pub(crate) fn granted(peer: &Peer, own_slot: u32, key: Key) -> Option<Description> {
    let map = &peer.map;
    let hazard = Hazard::publish(&peer.hazards, map, own_slot, key);
    let at = region::AT + region::STRIDE * key.index();
    let live = key.0 != 0 && map.u32(at + region::KEY).load(Ordering::Acquire) == key.0;
    let u64_at = |part: usize| map.u64(at + part).load(Ordering::Relaxed);
    let found = Description {
        access: map.u32(at + region::ACCESS).load(Ordering::Relaxed),
        pd: map.u32(at + region::PD).load(Ordering::Relaxed),
        range: Range {
            addr: u64_at(region::ADDR),
            len: u64_at(region::LEN),
            iova: u64_at(region::IOVA),
        },
        direct: Direct {
            stamp: u64_at(region::BUFFER),
            offset: u64_at(region::OFFSET),
        },
        file: 0,
    };
    drop(hazard);
    (live && map.u32(at + region::QP).load(Ordering::Relaxed) == 0).then_some(found)
}

/// Copies between local buffers and a peer's region, through the queue pair of `gate`. A copy of 0
/// bytes always succeeds (9.4.3: no check of the key).
///
/// # Errors
/// [`AccessError`]; part of the bytes may have been copied.
pub(crate) fn copy(
    peer: &Peer,
    own_slot: u32,
    (target, gate): (Target, Gate<'_>),
    local: &[libc::iovec],
    direction: Direction,
) -> Result<(), AccessError> {
    let right = direction.right();
    let mut iovecs = IovecCursor::new(local);
    let mut addr = target.addr;
    // Each round checks all bytes that are left, so a request that exceeds its region changes
    // nothing.
    let mut left: u64 = local.iter().map(|iovec| iovec.iov_len as u64).sum();
    while left > 0 {
        let (batch, count, bytes) = iovecs.next(MOST_AT_ONCE);
        let entered = gate.enter(right).ok_or(AccessError::Moved)?;
        let used = gate.used(target.key, right);
        let hazard = Hazard::publish(&peer.hazards, &peer.map, own_slot, used);
        if !gate.is_open() {
            return Err(AccessError::Moved);
        }
        let resolved = resolve(&peer.map, target, addr, left, right).ok_or(AccessError::Remote)?;
        let batch = &batch[..count];
        match peer.direct(resolved.direct.stamp) {
            Some(there) => {
                device_buffer::copy(&there, resolved.direct.offset, batch, bytes, direction)?
            }
            None if !peer.check_alive() => return Err(AccessError::Dead),
            None if peer.refuses() => return Err(AccessError::Refused),
            None => move_bytes(peer, batch, resolved.addr, bytes, direction)?,
        }
        drop((hazard, entered));
        addr = addr.wrapping_add(bytes as u64);
        left -= bytes as u64;
    }
    Ok(())
}

fn move_bytes(
    peer: &Peer,
    local: &[libc::iovec],
    base: u64,
    bytes: usize,
    direction: Direction,
) -> Result<(), AccessError> {
    let remote = [sys::as_local(base, bytes)];
    match direction {
        Direction::Write => write_bytes(peer, local, &remote, bytes),
        Direction::Read => {
            let moved = sys::vm_read(peer.identity.pid, local, &remote);
            judge(peer, moved, local, bytes, direction)
        }
    }
}

/// Copies `bytes` bytes to the peer's memory; both lists have that many bytes.
pub(crate) fn write_bytes(
    peer: &Peer,
    local: &[libc::iovec],
    remote: &[libc::iovec],
    bytes: usize,
) -> Result<(), AccessError> {
    let moved = sys::vm_write(peer.identity.pid, local, remote);
    judge(peer, moved, local, bytes, Direction::Write)
}

fn judge(
    peer: &Peer,
    moved: sys::Res<usize>,
    local: &[libc::iovec],
    bytes: usize,
    direction: Direction,
) -> Result<(), AccessError> {
    match moved {
        Ok(n) if n == bytes => Ok(()),
        Ok(_) => Err(blame(local, direction)),
        Err(error) => Err(match error.0 {
            libc::EFAULT => blame(local, direction),
            libc::ESRCH => AccessError::Dead,
            _ if sys::refused(error) => {
                peer.set_refuses(error);
                AccessError::Refused
            }
            _ => AccessError::Remote,
        }),
    }
}

/// Determines on which side the memory is not mapped.
fn blame(local: &[libc::iovec], direction: Direction) -> AccessError {
    let there = local.iter().all(|iovec| match direction {
        Direction::Write => sys::readable_locally(iovec.iov_base as u64, iovec.iov_len),
        Direction::Read => sys::writable_locally(iovec.iov_base as u64, iovec.iov_len),
    });
    if there {
        AccessError::Remote
    } else {
        AccessError::Local
    }
}

/// Splits a list of buffers into batches of limited size and count.
#[derive(Debug)]
pub(crate) struct IovecCursor<'a> {
    list: &'a [libc::iovec],
    index: usize,
    offset: usize,
}

impl<'a> IovecCursor<'a> {
    pub(crate) fn new(list: &'a [libc::iovec]) -> Self {
        Self {
            list,
            index: 0,
            offset: 0,
        }
    }

    /// The next batch: its buffers, their count, and their bytes, at most `most`.
    pub(crate) fn next(&mut self, most: usize) -> ([libc::iovec; MAX_IOV], usize, usize) {
        let mut batch = [sys::as_local(0, 0); MAX_IOV];
        let (mut count, mut bytes) = (0, 0);
        while count < MAX_IOV && bytes < most && self.index < self.list.len() {
            let iovec = self.list[self.index];
            let len = (iovec.iov_len - self.offset).min(most - bytes);
            if len > 0 {
                batch[count] = sys::as_local(iovec.iov_base as u64 + self.offset as u64, len);
                count += 1;
                bytes += len;
            }
            self.offset += len;
            if self.offset == iovec.iov_len {
                self.index += 1;
                self.offset = 0;
            }
        }
        (batch, count, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_everything_once() {
        let list: Vec<_> = [3usize, 0, 5, 1 << 20, 7, 0]
            .iter()
            .scan(0x1000u64, |at, &len| {
                let iovec = sys::as_local(*at, len);
                *at += 1 << 24;
                Some(iovec)
            })
            .collect();
        for most in [1usize, 4, 1000, 1 << 19, 1 << 30] {
            let mut iovecs = IovecCursor::new(&list);
            let mut seen = 0;
            loop {
                let (batch, count, bytes) = iovecs.next(most);
                if bytes == 0 {
                    break;
                }
                assert!(bytes <= most && count <= MAX_IOV);
                assert_eq!(
                    batch[..count].iter().map(|p| p.iov_len).sum::<usize>(),
                    bytes
                );
                seen += bytes;
                if most == 1 && seen > 100 {
                    break;
                }
            }
            assert!(most == 1 || seen == (1 << 20) + 15);
        }
    }
}
