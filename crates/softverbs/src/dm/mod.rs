//! Memory that the device allocates: files that peers map, so that they access it by plain copies
//! or processor instructions, without a system call and without the owner.
//!
//! Each buffer is a sealed file. Its entry in the owner's segment contains its address in the
//! owner's memory and its descriptor. Regions over it name the entry's stamp; stamps are never
//! reused. The owner keeps the number of a buffer's holders in private memory.

pub(crate) mod domain;
mod import;
mod mapped;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use import::{Imports, Origin};
pub(crate) use mapped::{Direct, Directs};

use crate::agent::Opener;
use crate::limits::PEER_WAIT;
use crate::segment::layout::{MAX_BUFFERS, buffer as layout, header};
use crate::segment::{Mapping, OwnSegment};
use crate::sync::Arc;
use crate::sync::atomic::fence;
use crate::sys::{self, Errno, Grow, Res};

/// A buffer that this process has mapped.
#[derive(Debug)]
pub(crate) struct Buffer {
    file: OwnedFd,
    pub(crate) map: Mapping,
    inode: u64,
    /// The requested length in bytes; the file has whole pages.
    pub(crate) len: usize,
    /// Whether `map` may be written. If not, the memory belongs to a process that permits only
    /// reading, and the buffer is not used for any access that writes: the kernel then refuses the
    /// access, as for other memory that is not writable.
    writable: bool,
}

impl Buffer {
    /// Zeroed memory with present pages: huge pages if the kernel has them for shared memory.
    ///
    /// # Errors
    /// `EINVAL`: length 0. `EFBIG`: a length above `RLIMIT_FSIZE`. `ENOMEM`, `EMFILE`.
    pub(crate) fn create(len: usize) -> Res<Self> {
        if len == 0 {
            return Err(Errno(libc::EINVAL));
        }
        let whole = len
            .checked_next_multiple_of(1 << 12)
            .filter(|&whole| whole <= isize::MAX as usize)
            .ok_or(Errno(libc::ENOMEM))?;
        let file = sys::memfd_create(c"softverbs-buffer", whole)?;
        let map = Mapping::new(&file, whole)?;
        // Not from the kernel's pool of huge pages: a hole that a process punches into such a file
        // might not be filled again. The pages are accessed before the file is allocated, because
        // allocating it gives 4 KiB pages.
        map.prefer_huge_pages();
        let start = map.bytes(0, whole) as u64;
        if !sys::pages_usable(start, whole, true) {
            return Err(Errno(libc::ENOMEM));
        }
        sys::fallocate(file.as_raw_fd(), 0, whole)?;
        Self::of(file, map, len, true)
    }

    /// A buffer of another process, from its descriptor.
    fn import(file: OwnedFd, len: usize) -> Res<Self> {
        let whole = sys::sealed_size(&file)?;
        if len == 0 || len > whole {
            return Err(Errno(libc::EPROTO));
        }
        let map = Mapping::new(&file, whole)?;
        map.prefer_huge_pages();
        Self::of(file, map, len, true)
    }

    /// A buffer over a mapping that the application has made of a file. It is used for writing if
    /// the file was opened for writing.
    ///
    /// # Errors
    /// `EINVAL`: the file is shorter. `EPERM`: its pages can be removed (no seals, or hugetlbfs).
    ///
    /// # Safety
    /// `len` bytes of the file are mapped at `addr`, shared, and writable if the file was opened
    /// for writing, until the buffer is dropped.
    #[allow(unsafe_code, reason = "the mapping is the caller's promise")]
    pub(crate) unsafe fn adopt(file: OwnedFd, addr: *mut u8, len: usize) -> Res<Self> {
        let whole = sys::sealed_size(&file)?;
        if len == 0 || len.checked_next_multiple_of(1 << 12) != Some(whole) {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: the caller's promise; pages are mapped whole.
        let map = unsafe { Mapping::borrowed(addr, whole)? };
        let writable = sys::is_writable(&file)?;
        Self::of(file, map, len, writable)
    }

    /// Waits until no other thread of this process uses a buffer that is in the table no more. An
    /// atomic uses it for as long as it waits for a lock: less than [`PEER_WAIT`].
    pub(crate) fn await_users(buffer: &Arc<Self>) {
        let begin = Instant::now();
        while !Arc::is_only(buffer) && begin.elapsed() < PEER_WAIT {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn of(file: OwnedFd, map: Mapping, len: usize, writable: bool) -> Res<Self> {
        let inode = sys::inode_of(&file)?;
        Ok(Self {
            file,
            map,
            inode,
            len,
            writable,
        })
    }

    /// The address of its first byte in this process.
    pub(crate) fn addr(&self) -> u64 {
        self.map.bytes(0, 0) as u64
    }
}

/// A buffer in the table, with a reference that an object of the application holds.
#[derive(Clone, Debug)]
pub(crate) struct BufferReference {
    pub(crate) stamp: u64,
    pub(crate) buffer: Arc<Buffer>,
}

impl BufferReference {
    /// A buffer that is in no table.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn alone(buffer: Buffer) -> Res<Self> {
        Ok(Self {
            stamp: 0,
            buffer: Arc::try_new(buffer)?,
        })
    }

    /// The handle in `ibv_dm`, with which the buffer is imported.
    pub(crate) fn handle(&self) -> u32 {
        index_of(self.stamp) as u32
    }
}

#[derive(Debug)]
struct Slot {
    stamp: u64,
    buffer: Arc<Buffer>,
    context: u32,
    /// Number of objects of the application, and number of regions, that hold the buffer.
    holders: u32,
    regions: u32,
}

/// The buffers of this process.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    slots: Mutex<Vec<Option<Slot>>>,
    /// Number of buffers, so that processes without buffers acquire no lock.
    count: AtomicU32,
    next: AtomicU64,
    /// Bytes of device memory in use.
    pub(crate) device_memory: AtomicU64,
}

fn index_of(stamp: u64) -> usize {
    stamp as usize & (MAX_BUFFERS - 1)
}

/// Whether two ranges, each an address and a length, have a byte in common.
fn meets(one: (u64, u64), other: (u64, u64)) -> bool {
    other.0.wrapping_sub(one.0) < one.1 || one.0.wrapping_sub(other.0) < other.1
}

fn entry_at(index: usize) -> usize {
    layout::AT + layout::STRIDE * index
}

impl Buffers {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a buffer to peers. If its file is published already, with at least the same
    /// length, the existing entry gets one more holder.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn add(
        &self,
        segment: &OwnSegment,
        buffer: Buffer,
        context: u32,
    ) -> Res<BufferReference> {
        let mut slots = self.lock();
        // The entries of another process, from which a buffer is imported, can state different
        // lengths for one file, and the caller uses the whole length of its own.
        let known = |slot: &&mut Slot| {
            slot.buffer.inode == buffer.inode
                && slot.buffer.len >= buffer.len
                && slot.buffer.writable
        };
        if let Some(slot) = slots.iter_mut().flatten().find(known) {
            slot.holders += 1;
            return Ok(slot.buffer_reference());
        }
        self.enter(segment, &mut slots, buffer, context)
    }

    /// As [`Self::add`], but the same file may be in the table at another address.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn add_another(
        &self,
        segment: &OwnSegment,
        buffer: Buffer,
        context: u32,
    ) -> Res<BufferReference> {
        self.enter(segment, &mut self.lock(), buffer, context)
    }

    fn enter(
        &self,
        segment: &OwnSegment,
        slots: &mut Vec<Option<Slot>>,
        buffer: Buffer,
        context: u32,
    ) -> Res<BufferReference> {
        let buffer = Arc::try_new(buffer)?;
        let index = match slots.iter().position(Option::is_none) {
            Some(index) => index,
            None if slots.len() < MAX_BUFFERS => {
                segment.back(entry_at(slots.len()), layout::STRIDE)?;
                slots.try_push(None)?;
                slots.len() - 1
            }
            None => return Err(Errno(libc::ENOMEM)),
        };
        let stamp =
            (self.next.fetch_add(1, Ordering::Relaxed) + 1) * MAX_BUFFERS as u64 + index as u64;
        let (map, at) = (&segment.map, entry_at(index));
        // A peer that reads one of the following words finds that the old stamp has changed when it
        // reads the stamp again.
        fence(Ordering::Release);
        map.u64(at + layout::ADDR)
            .store(buffer.addr(), Ordering::Relaxed);
        map.u64(at + layout::LEN)
            .store(buffer.len as u64, Ordering::Relaxed);
        map.u64(at + layout::INODE)
            .store(buffer.inode, Ordering::Relaxed);
        let fd = buffer.file.as_raw_fd().cast_unsigned();
        map.u32(at + layout::FD).store(fd, Ordering::Relaxed);
        map.u32(at + layout::CONTEXT)
            .store(context, Ordering::Relaxed);
        map.u32(at + layout::WRITABLE)
            .store(buffer.writable.into(), Ordering::Relaxed);
        map.u64(at + layout::STAMP).store(stamp, Ordering::Release);
        map.u32(header::BUFFERS)
            .store(slots.len() as u32, Ordering::Release);
        self.count.fetch_add(1, Ordering::Relaxed);
        let slot = Slot {
            stamp,
            buffer,
            context,
            holders: 1,
            regions: 0,
        };
        let buffer_reference = slot.buffer_reference();
        slots[index] = Some(slot);
        Ok(buffer_reference)
    }

    /// Acquires one more reference to the buffer of a context with this handle. `None`: it is of
    /// another context, or it is not writable, as imported memory must be.
    pub(crate) fn hold(&self, handle: u32, context: u32) -> Option<BufferReference> {
        let mut slots = self.lock();
        let slot = slots.get_mut(handle as usize)?.as_mut()?;
        if slot.context != context || !slot.buffer.writable {
            return None;
        }
        slot.holders += 1;
        Some(slot.buffer_reference())
    }

    /// Releases a reference of [`Self::add`] or [`Self::hold`].
    ///
    /// # Errors
    /// `EBUSY`: afterwards only regions would hold the buffer.
    pub(crate) fn release(&self, segment: &OwnSegment, stamp: u64) -> Res<()> {
        let mut slots = self.lock();
        let index = index_of(stamp);
        let slot = slots
            .get_mut(index)
            .and_then(Option::as_mut)
            .filter(|slot| slot.stamp == stamp)
            .ok_or(Errno(libc::EINVAL))?;
        if slot.holders == 1 && slot.regions > 0 {
            return Err(Errno(libc::EBUSY));
        }
        slot.holders -= 1;
        self.remove_unused(segment, &mut slots, index);
        Ok(())
    }

    /// As [`Self::release`]; if regions hold the buffer, it stays until they end. Returns the
    /// buffer if it is in the table no more.
    pub(crate) fn leave_to_regions(&self, segment: &OwnSegment, stamp: u64) -> Option<Arc<Buffer>> {
        let mut slots = self.lock();
        let index = index_of(stamp);
        let slot = slots.get_mut(index).and_then(Option::as_mut);
        let slot = slot.filter(|slot| slot.stamp == stamp)?;
        slot.holders -= 1;
        self.remove_unused(segment, &mut slots, index)
    }

    fn remove_unused(
        &self,
        segment: &OwnSegment,
        slots: &mut [Option<Slot>],
        index: usize,
    ) -> Option<Arc<Buffer>> {
        let gone = slots[index].take_if(|slot| slot.holders == 0 && slot.regions == 0)?;
        let map = &segment.map;
        map.u64(entry_at(index) + layout::STAMP)
            .store(0, Ordering::Relaxed);
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(gone.buffer)
    }

    /// The buffer that contains all of a range of addresses; the range is counted as a region of
    /// it. A range that is only partly in a buffer belongs to none, and neither does a region that
    /// permits to write (`writes`) in a buffer that is not writable.
    pub(crate) fn cover(&self, addr: u64, len: u64, writes: bool) -> Direct {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Direct::default();
        }
        for slot in self.lock().iter_mut().flatten() {
            if writes && !slot.buffer.writable {
                continue;
            }
            let offset = addr.wrapping_sub(slot.buffer.addr());
            let room = slot.buffer.len as u64;
            if offset <= room && len <= room - offset {
                slot.regions += 1;
                return Direct {
                    stamp: slot.stamp,
                    offset,
                };
            }
        }
        Direct::default()
    }

    /// The buffer that contains `len` bytes at an address, and their offset in it. For an access
    /// that `writes`, only a writable buffer.
    pub(crate) fn find(&self, addr: u64, len: u64, writes: bool) -> Option<(Arc<Buffer>, u64)> {
        let slots = self.lock();
        let mut usable = slots
            .iter()
            .flatten()
            .filter(|slot| slot.buffer.writable || !writes);
        usable.find_map(|slot| {
            let offset = addr.wrapping_sub(slot.buffer.addr());
            let room = slot.buffer.len as u64;
            (offset < room && len <= room - offset).then(|| (Arc::clone(&slot.buffer), offset))
        })
    }

    /// Whether a buffer has one of the `len` bytes at an address.
    pub(crate) fn any(&self, addr: u64, len: u64) -> bool {
        let slots = self.lock();
        let mut buffers = slots.iter().flatten().map(|slot| &slot.buffer);
        buffers.any(|buffer| meets((buffer.addr(), buffer.len as u64), (addr, len)))
    }

    /// Reopens the file of a buffer by its descriptor; `None`: no buffer has the descriptor.
    pub(crate) fn reopen(&self, fd: i32) -> Option<OwnedFd> {
        let slots = self.lock();
        let mut fds = slots
            .iter()
            .flatten()
            .map(|slot| slot.buffer.file.as_raw_fd());
        fds.find(|&found| found == fd)
            .and_then(|fd| sys::open_fd_of(std::process::id(), fd, libc::O_RDWR).ok())
    }

    /// A region has ended: releases its reference to its buffer, if it has one.
    pub(crate) fn uncover(&self, segment: &OwnSegment, stamp: u64) {
        if stamp == 0 {
            return;
        }
        let mut slots = self.lock();
        let index = index_of(stamp);
        if let Some(slot) = slots.get_mut(index).and_then(Option::as_mut)
            && slot.stamp == stamp
        {
            slot.regions -= 1;
            self.remove_unused(segment, &mut slots, index);
        }
    }
}

impl Slot {
    fn buffer_reference(&self) -> BufferReference {
        BufferReference {
            stamp: self.stamp,
            buffer: Arc::clone(&self.buffer),
        }
    }
}

/// A buffer's entry as read from a peer's segment. Hostile input: each field may be wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    pub(crate) stamp: u64,
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) context: u32,
    pub(crate) writable: bool,
    fd: u32,
    inode: u64,
}

impl Shown {
    /// The entry with this index; `None`: the entry is unused.
    pub(crate) fn read(map: &Mapping, index: u32) -> Option<Self> {
        let index = index as usize;
        if index >= MAX_BUFFERS {
            return None;
        }
        let at = entry_at(index);
        let stamp = map.u64(at + layout::STAMP).load(Ordering::Acquire);
        if stamp == 0 || index_of(stamp) != index {
            return None;
        }
        let shown = Self {
            stamp,
            addr: map.u64(at + layout::ADDR).load(Ordering::Relaxed),
            len: map.u64(at + layout::LEN).load(Ordering::Relaxed),
            context: map.u32(at + layout::CONTEXT).load(Ordering::Relaxed),
            writable: map.u32(at + layout::WRITABLE).load(Ordering::Relaxed) != 0,
            fd: map.u32(at + layout::FD).load(Ordering::Relaxed),
            inode: map.u64(at + layout::INODE).load(Ordering::Relaxed),
        };
        // another stamp: the entry was reused while it was read, so its fields may be of two
        // buffers
        fence(Ordering::Acquire);
        (map.u64(at + layout::STAMP).load(Ordering::Relaxed) == stamp).then_some(shown)
    }

    /// The entry of the buffer with this stamp; `None`: the peer has freed it.
    pub(crate) fn of(map: &Mapping, stamp: u64) -> Option<Self> {
        let index = index_of(stamp) as u32;
        Self::read(map, index).filter(|shown| shown.stamp == stamp)
    }

    /// The buffers of the peer. For an access that `writes`, only the writable ones.
    fn usable(map: &Mapping, writes: bool) -> impl Iterator<Item = Self> {
        let count = map.u32(header::BUFFERS).load(Ordering::Acquire);
        (0..count.min(MAX_BUFFERS as u32))
            .filter_map(|index| Self::read(map, index))
            .filter(move |shown| shown.writable || !writes)
    }

    /// The buffer that contains an address of the peer. For an access that `writes`, only a
    /// writable buffer.
    pub(crate) fn at(map: &Mapping, addr: u64, writes: bool) -> Option<Self> {
        Self::usable(map, writes).find(|shown| addr.wrapping_sub(shown.addr) < shown.len)
    }

    /// Whether a buffer of the peer has one of the `len` bytes at an address. For an access that
    /// `writes`, only a writable buffer.
    pub(crate) fn any(map: &Mapping, addr: u64, len: u64, writes: bool) -> bool {
        Self::usable(map, writes).any(|shown| meets((shown.addr, shown.len), (addr, len)))
    }

    /// Opens its file through the peer's descriptor.
    ///
    /// # Errors
    /// `EACCES`: this process may not open it. `ESTALE`: the descriptor is that of another file.
    pub(crate) fn open(&self, opener: &Opener) -> Res<OwnedFd> {
        let file = opener.open(self.fd.cast_signed(), libc::O_RDWR)?;
        if sys::inode_of(&file)? != self.inode {
            return Err(Errno(libc::ESTALE));
        }
        sys::sealed_size(&file)?;
        Ok(file)
    }

    /// Maps the buffer in this process, writable.
    ///
    /// # Errors
    /// As [`Self::open`], and `EPROTO`: the file is shorter than its entry states. `EOPNOTSUPP`:
    /// its owner may not write it.
    pub(crate) fn import(&self, opener: &Opener) -> Res<Buffer> {
        if !self.writable {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let len = usize::try_from(self.len).map_err(|_| Errno(libc::EPROTO))?;
        Buffer::import(self.open(opener)?, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_and_go() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let buffers = Buffers::default();
        let buffer_reference = buffers
            .add(&segment, Buffer::create(5000).unwrap(), 3)
            .unwrap();
        let addr = buffer_reference.buffer.addr();
        let shown = Shown::read(&segment.map, buffer_reference.handle()).unwrap();
        assert_eq!(
            (shown.stamp, shown.addr, shown.len),
            (buffer_reference.stamp, addr, 5000)
        );
        for (from, len, inside) in [(0, 5000, true), (4999, 1, true), (1, 5000, false)] {
            let direct = buffers.cover(addr + from, len, true);
            assert_eq!(direct.stamp == buffer_reference.stamp, inside);
            buffers.uncover(&segment, direct.stamp);
        }
        assert_eq!(
            Shown::at(&segment.map, addr + 4999, true).map(|s| s.stamp),
            Some(buffer_reference.stamp)
        );
        for outside in [addr + 5000, addr - 1] {
            assert!(Shown::at(&segment.map, outside, false).is_none());
        }
        // a region holds it, and so does another object
        buffers.cover(addr, 10, true);
        let busy = Err(Errno(libc::EBUSY));
        assert_eq!(buffers.release(&segment, buffer_reference.stamp), busy);
        assert!(buffers.hold(buffer_reference.handle(), 4).is_none());
        buffers.hold(buffer_reference.handle(), 3).unwrap();
        assert_eq!(buffers.release(&segment, buffer_reference.stamp), Ok(()));
        buffers.uncover(&segment, buffer_reference.stamp);
        assert_eq!(buffers.release(&segment, buffer_reference.stamp), Ok(()));
        assert!(Shown::read(&segment.map, 0).is_none());
        let next = buffers
            .add(&segment, Buffer::create(1).unwrap(), 3)
            .unwrap();
        assert_eq!(next.handle(), buffer_reference.handle());
        assert_ne!(next.stamp, buffer_reference.stamp);
    }

    /// Opens descriptors of this process.
    fn own_opener() -> Opener {
        Opener {
            identity: sys::Identity {
                pid: std::process::id(),
                start_time: 0,
                cookie: 0,
            },
            slot: 0,
            own_slot: 0,
        }
    }

    /// Two entries of one file can state different lengths: a region that is inside the longer one
    /// must be covered by the buffer in which it is registered.
    #[test]
    fn a_longer_buffer_of_the_same_file_is_another_one() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let buffers = Buffers::default();
        let own = buffers
            .add(&segment, Buffer::create(5000).unwrap(), 0)
            .unwrap();
        let shown = Shown::read(&segment.map, own.handle()).unwrap();
        for len in [8192, 100, 5000, 8192] {
            let imported = Shown { len, ..shown }.import(&own_opener()).unwrap();
            let held = buffers.add(&segment, imported, 0).unwrap();
            let direct = buffers.cover(held.buffer.addr() + len - 50, 50, true);
            assert_eq!(direct.stamp, held.stamp, "{len}");
        }
        // no more than one of each length
        assert_eq!(buffers.count.load(Ordering::Relaxed), 2);
    }

    /// The memory of a process that permits only reading: no access that writes uses its file,
    /// which can be opened again for writing.
    #[test]
    #[allow(unsafe_code, reason = "maps a file")]
    fn memory_for_reading_is_no_buffer_for_an_access_that_writes() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let buffers = Buffers::default();
        let file = sys::memfd_create(c"test", 8192).unwrap();
        let fd = file.as_raw_fd();
        let read_only = sys::open_fd_of(std::process::id(), fd, libc::O_RDONLY).unwrap();
        // SAFETY: a new mapping, which is never unmapped.
        let buffer = unsafe {
            let (fd, nowhere) = (read_only.as_raw_fd(), std::ptr::null_mut());
            let addr = libc::mmap(nowhere, 8192, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            assert_ne!(addr, libc::MAP_FAILED);
            Buffer::adopt(read_only, addr.cast(), 8192).unwrap()
        };
        let held = buffers.add_another(&segment, buffer, 0).unwrap();
        let addr = held.buffer.addr();
        for writes in [false, true] {
            let direct = buffers.cover(addr, 8192, writes);
            assert_eq!(direct.stamp, if writes { 0 } else { held.stamp });
            buffers.uncover(&segment, direct.stamp);
            assert_eq!(buffers.find(addr, 8, writes).is_none(), writes);
            // a peer's, also in bytes around its first one
            let found = Shown::at(&segment.map, addr + 8, writes);
            assert_eq!(found.map_or(0, |shown| shown.stamp), direct.stamp);
            assert_eq!(Shown::any(&segment.map, addr - 4, 8, writes), !writes);
        }
        // it is not imported
        let shown = Shown::of(&segment.map, held.stamp).unwrap();
        let refused = shown.import(&own_opener()).err();
        assert_eq!(refused, Some(Errno(libc::EOPNOTSUPP)));
        assert!(buffers.hold(held.handle(), 0).is_none());
        // the same file by an entry of another process, which may write it, is another buffer
        let theirs = Shown {
            writable: true,
            ..shown
        };
        let writable = theirs.import(&own_opener()).unwrap();
        let imported = buffers.add(&segment, writable, 0).unwrap();
        assert_ne!(imported.stamp, held.stamp);
        assert!(buffers.find(imported.buffer.addr(), 8, true).is_some());
    }

    #[test]
    fn another_mapping_of_the_file_is_the_same_memory() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let buffers = Buffers::default();
        let buffer_reference = buffers
            .add(&segment, Buffer::create(1 << 21).unwrap(), 0)
            .unwrap();
        let shown = Shown::read(&segment.map, buffer_reference.handle()).unwrap();
        let opener = own_opener();
        let second = shown.import(&opener).unwrap();
        buffer_reference
            .buffer
            .map
            .u64(4096)
            .store(77, Ordering::Relaxed);
        assert_eq!(second.map.u64(4096).load(Ordering::Relaxed), 77);
        // importing a buffer that is already mapped returns the existing mapping
        let again = buffers.add(&segment, second, 0).unwrap();
        assert_eq!(again.stamp, buffer_reference.stamp);
        let wrong = Shown { inode: 1, ..shown };
        assert!(wrong.open(&opener).is_err());
        assert_eq!(Buffer::create(0).err(), Some(Errno(libc::EINVAL)));
        assert_eq!(Buffer::create(usize::MAX).err(), Some(Errno(libc::ENOMEM)));
    }

    #[test]
    fn a_released_buffer_is_awaited() {
        let segment = OwnSegment::create(1, 0, true).unwrap();
        let buffers = Buffers::default();
        let own = buffers
            .add(&segment, Buffer::create(4096).unwrap(), 0)
            .unwrap();
        let (user, _) = buffers.find(own.buffer.addr(), 8, true).unwrap();
        let gone = buffers.leave_to_regions(&segment, own.stamp).unwrap();
        drop(own);
        assert!(buffers.find(user.addr(), 8, true).is_none());
        let ended = std::sync::Arc::new(AtomicU32::new(0));
        let thread = std::thread::spawn({
            let ended = std::sync::Arc::clone(&ended);
            move || {
                std::thread::sleep(Duration::from_millis(50));
                ended.store(1, Ordering::Relaxed);
                drop(user);
            }
        });
        Buffer::await_users(&gone);
        assert_eq!(ended.load(Ordering::Relaxed), 1);
        thread.join().unwrap();
    }
}
