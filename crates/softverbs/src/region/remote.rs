//! The initiator's side: copies into and out of a peer's regions, without the peer's help.

use std::time::{Duration, Instant};

use rdma_core_sys::{IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

use super::direct::{self, Direct};
use super::{Description, Key, Range};
use crate::peer::Peer;
use crate::segment::Mapping;
use crate::segment::layout::{announce, region};
use crate::sync::atomic::{Ordering, fence};
use crate::sync::pause;
use crate::sys::{self, MAX_IOV};

/// Most bytes that are copied under one hazard: a deregistration never waits for more.
const PIECE: usize = 1 << 20;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Write,
    Read,
}

/// What a work request names at the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) key: Key,
    pub(crate) addr: u64,
    /// The queue pair there: its protection domain and number.
    pub(crate) pd: u32,
    pub(crate) qp: u32,
}

/// Why nothing, or not everything, was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessError {
    /// The key does not allow it, or the memory behind it is gone.
    Remote,
    /// The local buffer is not there.
    Local,
    /// The peer has ended.
    Dead,
    /// The kernel refuses access to the peer.
    Refused,
}

/// A thread's word in the owner's segment (`map`) that says which key it is using.
pub(crate) struct Hazard<'a> {
    map: &'a Mapping,
    at: usize,
}

/// How long all words may be taken: each holder has them for one bounded copy. A peer that fills them
/// with rubbish gets nothing more from this process.
const PATIENCE: Duration = Duration::from_secs(2);

impl<'a> Hazard<'a> {
    /// `None` where no word became free.
    pub(crate) fn publish(map: &'a Mapping, own_slot: u32, key: Key) -> Option<Self> {
        let base = announce::AT + announce::STRIDE * own_slot as usize + announce::HAZARDS;
        let value = u64::from(key.0) | 1 << 32;
        // More threads than words at one peer take turns.
        let mut begin = None;
        loop {
            for at in (0..announce::HAZARD_COUNT).map(|i| base + 8 * i) {
                let word = map.u64(at);
                if word.load(Ordering::Relaxed) == 0
                    && word
                        .compare_exchange(0, value, Ordering::SeqCst, Ordering::Relaxed)
                        .is_ok()
                {
                    fence(Ordering::SeqCst);
                    return Some(Self { map, at });
                }
            }
            if begin.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return None;
            }
            pause(64);
        }
    }
}

impl Drop for Hazard<'_> {
    fn drop(&mut self) {
        self.map.u64(self.at).store(0, Ordering::Release);
    }
}

/// Where a target's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// In the owner's memory.
    pub(crate) addr: u64,
    /// In a buffer of the owner's device, where the stamp is not 0.
    pub(crate) direct: Direct,
}

/// Whether a key is that of a window of type 2B for the target's queue pair now, which its other end
/// may invalidate.
pub(crate) fn may_invalidate(map: &Mapping, target: Target) -> bool {
    let at = region::AT + region::STRIDE * target.key.index();
    target.key.0 != 0
        && map.u32(at + region::KEY).load(Ordering::Acquire) == target.key.0
        && map.u32(at + region::QP).load(Ordering::Relaxed) == target.qp
}

/// The address behind `len` bytes at `addr` of the process whose segment this is, if the key allows
/// that now. Under a [`Hazard`] of that key.
pub(crate) fn resolve(
    map: &Mapping,
    target: Target,
    addr: u64,
    len: u64,
    right: u32,
) -> Option<Place> {
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
    (allowed && offset <= room && len <= room - offset).then(|| Place {
        addr: base.wrapping_add(offset),
        direct: Direct {
            stamp,
            offset: first.wrapping_add(offset),
        },
    })
}

/// What a peer registered under a key, if that is alive and not a window's; for who imports it.
pub(crate) fn granted(map: &Mapping, own_slot: u32, key: Key) -> Option<Description> {
    let hazard = Hazard::publish(map, own_slot, key)?;
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

/// Copies between local pieces and a peer's region. Zero bytes are always allowed (9.4.3: no
/// check of the key).
///
/// # Errors
/// [`AccessError`]; part of the bytes may have been copied.
pub(crate) fn copy(
    peer: &Peer,
    own_slot: u32,
    target: Target,
    local: &[libc::iovec],
    direction: Direction,
) -> Result<(), AccessError> {
    let right = match direction {
        Direction::Write => IBV_ACCESS_REMOTE_WRITE,
        Direction::Read => IBV_ACCESS_REMOTE_READ,
    };
    let mut pieces = Pieces::new(local);
    let mut addr = target.addr;
    // The whole range first, so that a request that goes too far changes nothing.
    let mut left: u64 = local.iter().map(|piece| piece.iov_len as u64).sum();
    while left > 0 {
        let (batch, count, bytes) = pieces.next(PIECE);
        let hazard = Hazard::publish(&peer.map, own_slot, target.key).ok_or(AccessError::Dead)?;
        let place = resolve(&peer.map, target, addr, left, right).ok_or(AccessError::Remote)?;
        let batch = &batch[..count];
        match peer.direct(place.direct.stamp) {
            Some(there) => direct::copy(&there, place.direct.offset, batch, bytes, direction)?,
            None if !peer.check_alive() => return Err(AccessError::Dead),
            None => move_bytes(peer, batch, place.addr, bytes, direction)?,
        }
        drop(hazard);
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
    let moved = match direction {
        Direction::Write => sys::vm_write(peer.identity.pid, local, &remote),
        Direction::Read => sys::vm_read(peer.identity.pid, local, &remote),
    };
    match moved {
        Ok(n) if n == bytes => Ok(()),
        Ok(_) => Err(blame(local, direction)),
        Err(error) => Err(match error.0 {
            libc::EFAULT => blame(local, direction),
            libc::ESRCH => AccessError::Dead,
            libc::EPERM | libc::ENOSYS => AccessError::Refused,
            _ => AccessError::Remote,
        }),
    }
}

/// Which side's memory was missing.
pub(crate) fn blame(local: &[libc::iovec], direction: Direction) -> AccessError {
    let there = local.iter().all(|piece| match direction {
        Direction::Write => sys::readable_locally(piece.iov_base as u64, piece.iov_len),
        Direction::Read => sys::writable_locally(piece.iov_base as u64, piece.iov_len),
    });
    if there {
        AccessError::Remote
    } else {
        AccessError::Local
    }
}

/// Cuts a list of pieces into batches of bounded size and number.
#[derive(Debug)]
pub(crate) struct Pieces<'a> {
    list: &'a [libc::iovec],
    index: usize,
    offset: usize,
}

impl<'a> Pieces<'a> {
    pub(crate) fn new(list: &'a [libc::iovec]) -> Self {
        Self {
            list,
            index: 0,
            offset: 0,
        }
    }

    /// The next batch: the pieces, how many, and their bytes, at most `most`.
    pub(crate) fn next(&mut self, most: usize) -> ([libc::iovec; MAX_IOV], usize, usize) {
        let mut batch = [sys::as_local(0, 0); MAX_IOV];
        let (mut count, mut bytes) = (0, 0);
        while count < MAX_IOV && bytes < most && self.index < self.list.len() {
            let piece = self.list[self.index];
            let len = (piece.iov_len - self.offset).min(most - bytes);
            if len > 0 {
                batch[count] = sys::as_local(piece.iov_base as u64 + self.offset as u64, len);
                count += 1;
                bytes += len;
            }
            self.offset += len;
            if self.offset == piece.iov_len {
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
    use crate::segment::OwnSegment;

    #[test]
    fn hazards_that_a_peer_keeps_are_not_awaited_for_ever() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let words = announce::AT + announce::STRIDE * 3 + announce::HAZARDS;
        for i in 0..announce::HAZARD_COUNT {
            segment.map.u64(words + 8 * i).store(77, Ordering::Relaxed);
        }
        assert!(Hazard::publish(&segment.map, 3, Key(5)).is_none());
        segment.map.u64(words + 8).store(0, Ordering::Relaxed);
        assert!(Hazard::publish(&segment.map, 3, Key(5)).is_some());
    }

    #[test]
    fn batches_cover_everything_once() {
        let list: Vec<_> = [3usize, 0, 5, 1 << 20, 7, 0]
            .iter()
            .scan(0x1000u64, |at, &len| {
                let piece = sys::as_local(*at, len);
                *at += 1 << 24;
                Some(piece)
            })
            .collect();
        for most in [1usize, 4, 1000, 1 << 19, 1 << 30] {
            let mut pieces = Pieces::new(&list);
            let mut seen = 0;
            loop {
                let (batch, count, bytes) = pieces.next(most);
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
