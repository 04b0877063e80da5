//! Lists of READs or WRITEs that one system call copies (`docs/softverbs.md`, "Lists of requests").
//!
//! The caller of a list's methods has published the hazard of its keys and has checked the gate.

use std::mem::MaybeUninit;

use rdma_core_sys::{IBV_SEND_INLINE, ibv_send_wr, ibv_sge};

use crate::hazard::MOST_AT_ONCE;
use crate::peer::Peer;
use crate::region::{self, Direction, LastRegion, Regions, Target};
use crate::sys;

/// Maximum number of requests that are executed together.
pub(super) const MAX_REQUESTS: usize = 64;
/// Maximum number of their buffers.
const MAX_RANGES: usize = 128;

/// Memory ranges on the stack, not zeroed for speed.
struct Ranges {
    list: [MaybeUninit<libc::iovec>; MAX_RANGES],
    count: usize,
}

impl Ranges {
    #[inline(always)]
    fn new() -> Self {
        Self {
            list: [const { MaybeUninit::uninit() }; MAX_RANGES],
            count: 0,
        }
    }

    /// Appends a range. The caller has checked that there is room.
    #[inline(always)]
    fn push(&mut self, addr: u64, len: usize) {
        self.list[self.count].write(sys::as_local(addr, len));
        self.count += 1;
    }

    /// As [`Self::push`], with ranges that follow each other joined.
    #[inline(always)]
    fn join(&mut self, addr: u64, len: usize) {
        if self.count > 0 {
            // SAFETY: the first `count` entries were written.
            let last = unsafe { self.list[self.count - 1].assume_init_mut() };
            if (last.iov_base as u64).checked_add(last.iov_len as u64) == Some(addr) {
                last.iov_len += len;
                return;
            }
        }
        self.push(addr, len);
    }

    #[inline(always)]
    fn as_slice(&self) -> &[libc::iovec] {
        // SAFETY: the first `count` entries were written.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr().cast(), self.count) }
    }
}

/// Requests that are executed together, and their ranges.
pub(super) struct List {
    local: Ranges,
    /// Ranges of the peer's memory that the kernel copies. Ranges are joined on this side alone:
    /// the kernel then still copies the requests one after the other.
    remote: Ranges,
    /// Number of bytes of the requests up to each one, which is included.
    ends: [MaybeUninit<u32>; MAX_REQUESTS],
    count: usize,
    bytes: usize,
    /// Number of bytes that this thread has copied through a mapping.
    direct: usize,
    /// Whether this thread may copy so: local memory is that of regions, or short inline data.
    may_map: bool,
}

/// Reason why the kernel copied fewer bytes.
pub(super) enum Stop {
    /// This many bytes were copied, or fewer bytes than the first request has.
    At(usize),
    /// The copy was not begun.
    NotBegun,
}

impl List {
    #[inline(always)]
    pub(super) fn new(may_map: bool) -> Self {
        Self {
            may_map,
            local: Ranges::new(),
            remote: Ranges::new(),
            ends: [const { MaybeUninit::uninit() }; MAX_REQUESTS],
            count: 0,
            bytes: 0,
            direct: 0,
        }
    }

    /// Adds a request to a list of fewer than [`MAX_REQUESTS`]. Returns false, with nothing added,
    /// if the general path must execute it, or another list.
    ///
    /// # Safety
    /// `wr` must be a valid READ or WRITE.
    #[inline(always)]
    pub(super) unsafe fn add(
        &mut self,
        wr: &ibv_send_wr,
        from: &mut Source<'_>,
        peer: &Peer,
        target: Target,
        way: Direction,
    ) -> bool {
        let num_sge = wr.num_sge.cast_unsigned();
        if num_sge > from.max_sge || self.local.count + num_sge as usize > MAX_RANGES {
            return false;
        }
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        if inline && way == Direction::Read {
            return false;
        }
        let (first, mut len) = (self.local.count, 0);
        for i in 0..num_sge as usize {
            // SAFETY: the caller promises a valid list of `num_sge` sges.
            let sge = unsafe { &*wr.sg_list.add(i) };
            if sge.length == 0 {
                continue;
            }
            let addr = match inline {
                true => Some(sge.addr),
                false => from.addr(sge, way),
            };
            let Some(addr) = addr else {
                self.local.count = first;
                return false;
            };
            len += sge.length as usize;
            self.local.push(addr, sge.length as usize);
        }
        if inline && len > from.max_inline as usize {
            self.local.count = first;
            return false;
        }
        self.close(len, first, (peer, target, way))
    }

    /// Adds the remote range of a request of `len` bytes whose local ranges begin at `first`, and
    /// counts the request. Returns false, with nothing added, if it does not fit.
    #[inline(always)]
    fn close(
        &mut self,
        len: usize,
        first: usize,
        (peer, target, way): (&Peer, Target, Direction),
    ) -> bool {
        let fits = len <= MOST_AT_ONCE - self.bytes;
        if !fits || len != 0 && !self.add_remote(len, first, peer, target, way) {
            self.local.count = first;
            return false;
        }
        self.bytes += len;
        self.ends[self.count].write(self.bytes as u32);
        self.count += 1;
        true
    }

    /// As [`Self::add`], an operation on the `len` bytes at `from` of this process.
    #[inline(always)]
    pub(super) fn add_range(
        &mut self,
        (from, len): (u64, usize),
        peer: &Peer,
        target: Target,
        way: Direction,
    ) -> bool {
        let first = self.local.count;
        if self.count == MAX_REQUESTS || first == MAX_RANGES {
            return false;
        }
        self.local.push(from, len);
        self.close(len, first, (peer, target, way))
    }

    /// Adds the remote range of a request whose local ranges begin at `first`. A range that this
    /// process has mapped is copied at once.
    #[inline(always)]
    fn add_remote(
        &mut self,
        len: usize,
        first: usize,
        peer: &Peer,
        target: Target,
        way: Direction,
    ) -> bool {
        let right = way.right();
        let resolved = region::resolve(&peer.map, target, target.addr, len as u64, right);
        let Some(resolved) = resolved else {
            return false;
        };
        if resolved.direct.stamp != 0
            && let Some(there) = peer.direct(resolved.direct.stamp)
        {
            // behind requests that the kernel has not executed yet
            let behind = self.direct != self.bytes;
            let local = &self.local.as_slice()[first..];
            let offset = resolved.direct.offset;
            if behind
                || !self.may_map
                || region::copy_mapped(&there, offset, local, len, way).is_err()
            {
                return false;
            }
            self.direct += len;
            self.local.count = first;
            return true;
        }
        if self.direct != 0 {
            return false;
        }
        self.remote.join(resolved.addr, len);
        true
    }

    /// Makes the kernel copy the ranges.
    #[inline(always)]
    pub(super) fn copy(&self, peer: &Peer, way: Direction) -> Result<(), Stop> {
        if self.direct == self.bytes {
            return Ok(());
        }
        if !peer.check_alive() {
            return Err(Stop::NotBegun);
        }
        let (pid, local, remote) = (
            peer.identity.pid,
            self.local.as_slice(),
            self.remote.as_slice(),
        );
        let moved = match way {
            Direction::Write => sys::vm_write(pid, local, remote),
            Direction::Read => sys::vm_read(pid, local, remote),
        };
        match moved {
            Ok(bytes) if bytes == self.bytes => Ok(()),
            Ok(bytes) => Err(Stop::At(bytes)),
            Err(error) if sys::refused(error) => Err(Stop::NotBegun),
            Err(_) => Err(Stop::At(0)),
        }
    }

    /// Number of bytes of the requests up to each one, which is included.
    #[inline(always)]
    pub(super) fn ends(&self) -> &[u32] {
        // SAFETY: the first `count` entries were written.
        unsafe { std::slice::from_raw_parts(self.ends.as_ptr().cast(), self.count) }
    }

    /// How many requests were executed, after [`Self::copy`] has stopped, and whether the kernel
    /// may have copied a part of the next one.
    pub(super) fn stopped_at(&self, stop: &Stop) -> (usize, bool) {
        match stop {
            Stop::At(bytes) => {
                let bytes = *bytes;
                let whole = self.ends().partition_point(|&end| end as usize <= bytes);
                (whole, true)
            }
            Stop::NotBegun => (0, false),
        }
    }

    /// Number of requests.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.count
    }
}

/// The local side of requests.
pub(super) struct Source<'a> {
    pub(super) regions: &'a Regions,
    pub(super) last_region: &'a mut LastRegion,
    pub(super) pd: u32,
    pub(super) max_sge: u32,
    pub(super) max_inline: u32,
}

impl Source<'_> {
    /// The address of the buffer of an sge, if its region permits the access.
    #[inline(always)]
    fn addr(&mut self, sge: &ibv_sge, way: Direction) -> Option<u64> {
        let write = way == Direction::Read;
        self.regions
            .local_again(self.last_region, sge, self.pd, write)
    }
}
