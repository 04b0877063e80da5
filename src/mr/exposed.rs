//! A region's registrations in one protection domain: their lkeys for local operations, and the
//! records published to peers.

#![allow(unsafe_code, reason = "registers the application's memory")]

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rdma_core_sys as sys;

use super::key_cache::kind;
use super::pieces::{Change, Pieces};
use super::region::{Range, Region};
use super::revocation::{End, Left, Settled};
use super::segment_list::List;
use super::{Directory, Mode, Paging};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::queue::event_cell::Cell;
use crate::verbs::{Lkey, Mr, Pd, RemoteAddr, Rkey, Words};
use crate::wire::raw_key::RawKey;
use crate::wire::records::{Entry, MAX_LIST_WORDS, MAX_SEGMENTS, Segment, access};

/// Registrations of one region; see the module.
#[derive(Debug)]
pub(crate) struct Exposed {
    /// The lkey of a region with one buffer and a fixed registration.
    lkey: Option<Lkey>,
    pd: Arc<Pd>,
    /// One registration per buffer, unless `pieces` is set. After a failed [`Self::end`]: the
    /// registrations that have not ended.
    mrs: RwLock<Vec<Mr>>,
    pieces: Option<Pieces>,
    /// First address, length and lkey of each buffer of a region with several buffers.
    parts: Box<[(u64, u64, Lkey)]>,
    /// The directory record. The lock is held from the start of a change until the record is
    /// published.
    record: Mutex<Record>,
    entry: Entry,
    key: Key,
    /// The directory that contains the record.
    directory: Option<Arc<Directory>>,
}

/// The directory record of a region, and the memory that it refers to.
#[derive(Debug, Default)]
struct Record {
    entry: Entry,
    /// The segment list, if the record refers to one with at most [`MAX_SEGMENTS`] parts.
    list: Option<Words>,
    /// The segment list, if the region has more than [`MAX_SEGMENTS`] parts.
    long: Option<List>,
    /// The event cell that counts peers' operations.
    cell: Option<Arc<Cell>>,
    /// Whether the record is withdrawn from the directory. A withdrawn record does not change.
    withdrawn: bool,
    /// The revocation count at the withdrawal.
    revoked: u64,
    /// Whether all registrations have ended, so that no peer can access the memory.
    over: bool,
    /// Registrations that only reserve their keys, kept here until the other registrations have
    /// ended too.
    ended: Vec<Mr>,
}

/// The key of a region.
#[derive(Clone, Copy, Debug)]
enum Key {
    /// The rkey of the device.
    Native(Rkey),
    /// A key in the directory.
    Published(u64),
    /// The requested key of a region without remote access.
    Unused(u64),
}

impl Key {
    fn number(self) -> u64 {
        match self {
            Self::Native(rkey) => rkey.get().into(),
            Self::Published(key) | Self::Unused(key) => key,
        }
    }
}

/// Registrations of a region's buffers.
enum Memory {
    Fixed(Vec<Mr>),
    Pieces(Pieces),
}

/// Registers the buffers of a region with these `ibv_access_flags`.
fn register(region: &Region, pd: &Arc<Pd>, mut rights: u32) -> Result<Memory> {
    if let Some((fd, origin)) = &region.dmabuf {
        let register = |buffer: &Range| {
            let from = (&**fd, origin.wrapping_add(buffer.addr));
            Mr::register_dmabuf(pd, from, buffer.len as usize, buffer.addr, rights)
        };
        let mrs: Result<_> = region.buffers.iter().map(register).collect();
        let mrs = mrs.map_err(|error| {
            warn_log!(
                Mr,
                "{} bytes of a dmabuf could not be registered: {error}",
                region.len()
            );
            match error {
                FiErrno::EOPNOTSUPP => FiErrno::ENOSYS,
                error => error,
            }
        });
        return Ok(Memory::Fixed(mrs?));
    }
    match region.domain().paging() {
        _ if region.memory().is_some() => {} // its pages are always present
        Paging::Pinned => {}
        Paging::OnDemand => rights |= sys::IBV_ACCESS_ON_DEMAND,
        Paging::Refreshed { whole } => {
            let pieces = Pieces::new(pd, &region.buffers, rights)
                .inspect_err(|&error| explain(error, region.len()))?;
            if whole && pieces.segments_now().iter().any(|part| part.absent) {
                return Err(FiErrno::EFAULT);
            }
            return Ok(Memory::Pieces(pieces));
        }
    }
    let buffers = region.buffers.iter();
    let mrs = buffers
        .map(|buffer| {
            // SAFETY: the caller of `Region::register` promised that the memory stays valid.
            let mr =
                unsafe { Mr::register(pd, buffer.addr as *const _, buffer.len as usize, rights) }
                    .inspect_err(|&error| explain(error, buffer.len))?;
            Ok(match region.memory() {
                Some(memory) => mr.holding(Arc::clone(memory) as _),
                None => mr,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Memory::Fixed(mrs))
}

impl Exposed {
    /// Registers a region for local operations only.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(super) fn local(region: &Region, pd: &Arc<Pd>) -> Result<Self> {
        let rights = region.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE;
        let memory = register(region, pd, rights)?;
        Ok(Self::of(region, pd, memory, Key::Unused(0), 0))
    }

    /// Registers a region with all its access rights and publishes its key. `cell`: the event cell
    /// in which peers count.
    ///
    /// # Errors
    /// Those of `ibv_reg_mr(3)`.
    pub(super) fn new(region: &Region, pd: &Arc<Pd>, cell: Option<Arc<Cell>>) -> Result<Self> {
        let mode = region.mode();
        let remote = region.access().is_remote();
        let mut rights = region.access().verbs_rights(region.atomics());
        if region.persistent {
            rights |= sys::IBV_ACCESS_FLUSH_GLOBAL | sys::IBV_ACCESS_FLUSH_PERSISTENT;
        }
        let memory = register(region, pd, rights)?;
        // the region's only rkey, and constant
        let rkey = match &memory {
            Memory::Fixed(mrs) => mrs.first().filter(|_| mrs.len() == 1).map(Mr::rkey),
            Memory::Pieces(_) => None,
        };
        let generation = region.domain().next_generation();
        let key = if !mode.contains(Mode::PROV_KEY) {
            match remote {
                true => Key::Published(region.requested_key),
                false => Key::Unused(region.requested_key),
            }
        } else if let Some(rkey) = rkey.filter(|_| {
            mode.contains(Mode::VIRT_ADDR) && !(remote && (region.domain().counts() || region.once))
        }) {
            Key::Native(rkey)
        } else if remote {
            Key::Published(kind::HANDLE << 48 | (generation & 0xffff_ffff_ffff))
        } else {
            Key::Unused(rkey.unwrap_or_default().get().into())
        };
        let mut this = Self::of(region, pd, memory, key, generation);
        if let Key::Published(_) = key {
            this.publish(region, cell)?;
        }
        Ok(this)
    }

    fn of(region: &Region, pd: &Arc<Pd>, memory: Memory, key: Key, generation: u64) -> Self {
        let (mrs, pieces) = match memory {
            Memory::Fixed(mrs) => (mrs, None),
            Memory::Pieces(pieces) => (Vec::new(), Some(pieces)),
        };
        let first = mrs.first();
        let several = mrs.len() > 1;
        let buffers = region.buffers.iter().zip(&mrs);
        let parts = buffers.filter(|_| several);
        Self {
            lkey: first.filter(|_| !several).map(Mr::lkey),
            pd: Arc::clone(pd),
            parts: parts
                .map(|(buffer, mr)| (buffer.addr, buffer.len, mr.lkey()))
                .collect(),
            record: Mutex::default(),
            pieces,
            entry: Entry {
                key: key.number(),
                addr: RemoteAddr::new(region.start()),
                len: region.len(),
                rkey: first.map_or(Rkey::default(), Mr::rkey),
                access: published(region),
                // the number of parts is at most MAX_SEGMENTS
                segments: if several { mrs.len() as u16 } else { 0 },
                once: region.once,
                generation,
                start: region.first_address(),
                cell: RemoteAddr::NULL,
            },
            mrs: RwLock::new(mrs),
            key,
            directory: None,
        }
    }

    /// Publishes the record in the directory.
    fn publish(&mut self, region: &Region, cell: Option<Arc<Cell>>) -> Result<()> {
        let directory = region.domain().directory(&self.pd)?;
        let segments = match &self.pieces {
            Some(pieces) => {
                let segments = pieces.segments_now();
                if segments.len() > MAX_SEGMENTS {
                    let mut list = self.list(segments.len())?;
                    list.update(&[(0, self.entry.len)], |from, to| {
                        pieces.segments(from, to - from)
                    });
                    let record = self.described_long(list, cell);
                    directory.insert(&record.entry)?;
                    self.record = Mutex::new(record);
                    self.directory = Some(directory);
                    return Ok(());
                }
                segments
            }
            None if region.once && self.parts.is_empty() => vec![Segment {
                addr: self.entry.addr,
                len: self.entry.len,
                rkey: self.entry.rkey,
                absent: false,
            }],
            None => self.segments(),
        };
        let record = self.described(&segments, cell)?;
        directory.insert(&record.entry)?;
        self.record = Mutex::new(record);
        self.directory = Some(directory);
        Ok(())
    }

    /// The directory record of a region with at most [`MAX_SEGMENTS`] segments; empty if it has one
    /// buffer.
    fn described(&self, segments: &[Segment], cell: Option<Arc<Cell>>) -> Result<Record> {
        match segments {
            [] => {
                let whole = Segment {
                    addr: self.entry.addr,
                    rkey: self.entry.rkey,
                    ..Segment::default()
                };
                return Ok(self.described_whole(&whole, cell));
            }
            [whole] if !whole.absent && !self.entry.once => {
                return Ok(self.described_whole(whole, cell));
            }
            _ => {}
        }
        let (mut len, mut rights) = (MAX_LIST_WORDS, sys::IBV_ACCESS_REMOTE_READ);
        if self.entry.once {
            // one more word for the claim
            len += 1;
            rights |= sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
        }
        let list = Words::new(&self.pd, len, rights)?;
        Ok(self.described_short(segments, list, cell))
    }

    /// The directory record of a region with one part.
    fn described_whole(&self, whole: &Segment, cell: Option<Arc<Cell>>) -> Record {
        Record {
            entry: Entry {
                addr: whole.addr,
                rkey: whole.rkey,
                segments: 0,
                cell: cell.as_ref().map_or(RemoteAddr::NULL, |cell| cell.addr()),
                ..self.entry
            },
            cell,
            ..Record::default()
        }
    }

    /// The directory record of a region with a short list, which has room for [`MAX_SEGMENTS`]
    /// parts.
    fn described_short(
        &self,
        segments: &[Segment],
        list: Words,
        cell: Option<Arc<Cell>>,
    ) -> Record {
        list.write(0, &Segment::encode_list(self.entry.generation, segments));
        Record {
            entry: Entry {
                addr: list.remote_addr(0),
                rkey: list.rkey(),
                segments: segments.len() as u16,
                cell: cell.as_ref().map_or(RemoteAddr::NULL, |cell| cell.addr()),
                ..self.entry
            },
            list: Some(list),
            cell,
            ..Record::default()
        }
    }

    /// A list with room for `parts` parts.
    fn list(&self, parts: usize) -> Result<List> {
        List::new(&self.pd, self.entry.generation, self.entry.len, parts)
    }

    /// The directory record of a region with a long list.
    fn described_long(&self, list: List, cell: Option<Arc<Cell>>) -> Record {
        let (addr, rkey) = list.at();
        Record {
            entry: Entry {
                addr,
                rkey,
                segments: Entry::LONG,
                cell: cell.as_ref().map_or(RemoteAddr::NULL, |cell| cell.addr()),
                ..self.entry
            },
            long: Some(list),
            cell,
            ..Record::default()
        }
    }

    /// Publishes an event cell. A peer counts its operations after it has read the new record.
    pub(super) fn count(&self, cell: &Arc<Cell>) {
        if let Some(directory) = &self.directory {
            let mut record = self.record.lock();
            record.entry.cell = cell.addr();
            record.cell = Some(Arc::clone(cell));
            directory.replace(&record.entry);
        }
    }

    /// Registers the present pages of these ranges, publishes them, and ends the replaced
    /// registrations after peers have acknowledged the change; blocks until then. The ranges lie in
    /// the region's buffers.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering: nothing has changed. `EOPBADSTATE`: the region is
    /// closed, or its closing has begun.
    pub(super) fn refresh(&self, ranges: &[Range]) -> Result<()> {
        let Some(pieces) = &self.pieces else {
            return Ok(());
        };
        let mut record = self.record.lock();
        if record.withdrawn {
            return Err(FiErrno::EOPBADSTATE);
        }
        let change = pieces.refresh(ranges).inspect_err(|&error| {
            let len = ranges
                .iter()
                .fold(0, |sum: u64, range| sum.saturating_add(range.len));
            explain(error, len);
        })?;
        let Some(directory) = &self.directory else {
            drop(pieces.make(change));
            return Ok(());
        };
        let (replaced, lists) = if record.long.is_some() {
            self.change_long(&mut record, pieces, change)?
        } else {
            self.change_short(&mut record, pieces, change)?
        };
        let settled = directory.settle(directory.replace(&record.entry));
        let keys = settled.end_replaced(replaced, self.entry.generation);
        settled.retire(Left {
            keys,
            lists,
            ..Left::default()
        });
        Ok(())
    }

    /// Changes a region whose parts are in a long list. Returns the registrations and the lists
    /// that peers may use until they have processed the revocation.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering a longer list: nothing has changed.
    fn change_long(
        &self,
        record: &mut Record,
        pieces: &Pieces,
        change: Change<'_>,
    ) -> Result<(Vec<Arc<Mr>>, Vec<Words>)> {
        let Some(mut list) = record.long.take() else {
            return Ok(Default::default());
        };
        let changed: Vec<_> = change
            .ranges()
            .flat_map(|(start, end)| pieces.offsets(start, end))
            .collect();
        // all steps that can fail come before the change
        if let Err(error) = list.reserve(change.most_parts(), changed.len()) {
            record.long = Some(list);
            return Err(error);
        }
        let replaced = pieces.make(change);
        let outgrown = list.update(&changed, |from, to| pieces.segments(from, to - from));
        let mut lists: Vec<_> = outgrown.into_iter().collect();
        let cell = record.cell.take();
        let whole = list.is_short().then(|| pieces.segments_now());
        *record = match whole.as_deref() {
            Some(&[whole]) if !whole.absent => {
                lists.extend(list.into_words());
                self.described_whole(&whole, cell)
            }
            _ => self.described_long(list, cell),
        };
        Ok((replaced, lists))
    }

    /// As [`Self::change_long`], for a region with at most [`MAX_SEGMENTS`] parts.
    ///
    /// # Errors
    /// `ENOMEM` and others of registering a list: nothing has changed.
    fn change_short(
        &self,
        record: &mut Record,
        pieces: &Pieces,
        change: Change<'_>,
    ) -> Result<(Vec<Arc<Mr>>, Vec<Words>)> {
        let parts = pieces.segments_now().len() + change.most_parts();
        let long = if parts > MAX_SEGMENTS {
            Some(self.list(parts)?)
        } else {
            None
        };
        let short = Words::new(&self.pd, MAX_LIST_WORDS, sys::IBV_ACCESS_REMOTE_READ)?;
        // no step below can fail
        let replaced = pieces.make(change);
        let segments = pieces.segments_now();
        let cell = record.cell.take();
        let new = match (long, &*segments) {
            (_, [whole]) if !whole.absent => self.described_whole(whole, cell),
            (Some(mut list), segments) if segments.len() > MAX_SEGMENTS => {
                list.update(&[(0, self.entry.len)], |from, to| {
                    pieces.segments(from, to - from)
                });
                self.described_long(list, cell)
            }
            (_, segments) => self.described_short(segments, short, cell),
        };
        let old = std::mem::replace(record, new);
        Ok((replaced, old.list.into_iter().collect()))
    }

    /// Makes the device fetch the pages of these ranges, which lie in the region's buffers.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn prefetch(&self, region: &Region, ranges: &[Range]) -> Result<()> {
        let write = region.access().verbs_rights(false) & sys::IBV_ACCESS_LOCAL_WRITE != 0;
        let mrs = self.mrs.read();
        for range in ranges {
            let inside = |(buffer, _): &(&Range, &Mr)| {
                buffer.addr <= range.addr && range.addr + range.len <= buffer.addr + buffer.len
            };
            if let Some((_, mr)) = region.buffers.iter().zip(&*mrs).find(inside) {
                mr.prefetch(range.addr, range.len, write)?;
            }
        }
        Ok(())
    }

    /// Number of pages of all buffers that the device has made present by advice.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn prefetched(&self) -> Result<u64> {
        let mrs = self.mrs.read();
        mrs.iter().try_fold(0, |sum, mr| Ok(sum + mr.prefetched()?))
    }

    /// The segments of a region with several buffers, as peers address them; otherwise empty.
    fn segments(&self) -> Vec<Segment> {
        let mrs = self.mrs.read();
        let parts = self.parts.iter().zip(&*mrs);
        parts
            .map(|(&(addr, len, _), mr)| Segment {
                addr: RemoteAddr::new(addr),
                len,
                rkey: mr.rkey(),
                absent: false,
            })
            .collect()
    }

    pub(super) fn raw_key(&self, region: &Region) -> Result<RawKey> {
        Ok(RawKey {
            domain: region.domain().directory(&self.pd)?.number(),
            published: self.directory.is_some(),
            entry: Entry {
                once: false, // the directory record has the flag
                ..self.entry
            },
            segments: self.segments(),
        })
    }

    #[inline]
    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(super) fn key(&self) -> u64 {
        self.key.number()
    }

    /// The lkey of a local buffer.
    ///
    /// # Errors
    /// `EINVAL`: no single buffer of the region covers it.
    #[inline]
    pub(super) fn lkey(&self, iov: &libc::iovec) -> Result<Lkey> {
        match self.lkey {
            Some(lkey) => Ok(lkey),
            None => self.part(iov),
        }
    }

    /// The lkey of these bytes. If no single buffer covers all of them: the lkey of one buffer, or
    /// 0.
    pub(super) fn lkey_at(&self, addr: u64, len: u64) -> Lkey {
        let iov = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(addr as usize),
            iov_len: len as usize,
        };
        let any = || self.mrs.read().first().map_or(Lkey::default(), Mr::lkey);
        self.lkey(&iov).unwrap_or_else(|_| any())
    }

    /// The lkey of the buffer or piece that covers a local buffer.
    fn part(&self, iov: &libc::iovec) -> Result<Lkey> {
        if let Some(pieces) = &self.pieces {
            return pieces.lkey(iov);
        }
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        let inside = |&&(start, whole, _): &&(u64, u64, Lkey)| {
            addr.checked_sub(start)
                .and_then(|offset| offset.checked_add(len))
                .is_some_and(|end| end <= whole)
        };
        let part = self.parts.iter().find(inside).ok_or(FiErrno::EINVAL)?;
        Ok(part.2)
    }
}

/// The access bits of a region in its directory record.
fn published(region: &Region) -> u8 {
    let flush = if region.persistent { access::FLUSH } else { 0 };
    region.access().published(region.atomics()) | flush
}

/// Ends a registration: afterwards no access to the memory through it is possible.
fn end(settled: Option<&Settled<'_>>, mr: Mr) -> End {
    match settled {
        Some(settled) => settled.end(mr),
        None => match mr.deregister() {
            Ok(()) => End::Gone,
            Err(mr) => End::Busy(mr),
        },
    }
}

impl Exposed {
    /// Ends all registrations. After success no access to the memory through them is possible.
    ///
    /// # Errors
    /// `EBUSY`: an access was under way until the timeout. No new access can start. The caller can
    /// repeat the call.
    pub(super) fn end(&self) -> Result<()> {
        let mut record = self.record.lock();
        if record.over {
            return Ok(());
        }
        if !record.withdrawn {
            record.withdrawn = true;
            if let Some(directory) = &self.directory {
                record.revoked = directory.withdraw(self.key.number());
            }
        }
        let directory = self.directory.as_ref();
        let settled = directory.map(|directory| directory.settle(record.revoked));
        let mut mrs = self.mrs.write();
        let mut left = std::mem::take(&mut *mrs);
        left.extend(self.pieces.iter().flat_map(Pieces::take));
        if let Some(directory) = directory {
            left.extend(directory.take_stuck(self.entry.generation));
        }
        // continues after a failure, so that no registration permits a new access
        for mr in left {
            match end(settled.as_ref(), mr) {
                End::Reserved(mr) => record.ended.push(mr),
                End::Busy(mr) => mrs.push(mr),
                End::Gone => {}
            }
        }
        if !mrs.is_empty() {
            return Err(FiErrno::EBUSY);
        }
        let mut lists: Vec<_> = record.list.take().into_iter().collect();
        lists.extend(record.long.take().into_iter().flat_map(List::into_words));
        let left = Left {
            keys: std::mem::take(&mut record.ended),
            lists,
            cell: record.cell.take(),
        };
        if let Some(settled) = settled {
            settled.retire(left);
        }
        record.over = true;
        Ok(())
    }

    /// Whether ending the registrations has begun.
    pub(super) fn is_ending(&self) -> bool {
        self.record.lock().withdrawn
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if self.end().is_err() {
            warn_log!(
                Mr,
                "region with key {:#x}: the access of a stopped peer has not ended; \
                 its registrations are not freed",
                self.key.number()
            );
            // These registrations permit no access and their keys stay reserved. Deregistering them
            // would block again.
            self.mrs.get_mut().drain(..).for_each(std::mem::forget);
        }
    }
}

/// Logs which limit to raise if memory cannot be locked, because `ENOMEM` does not name the limit.
fn explain(error: FiErrno, len: u64) {
    if error != FiErrno::ENOMEM && error != FiErrno::EPERM {
        return;
    }
    let limit = memlock_limit().map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    warn_log!(
        Mr,
        "{len} bytes could not be registered: {error}. RLIMIT_MEMLOCK, the limit of locked memory, is {limit}: \
         raise it with 'ulimit -l', with LimitMEMLOCK= of the service, or in /etc/security/limits.conf. \
         A region with FI_MR_MMU_NOTIFY needs one registration of the device (limit max_mr) for each part"
    );
}

/// The soft limit of locked memory in bytes; `None`: unlimited.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a writable local structure.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (ret == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::mr::{Access, Buffer, Dmabuf, RegionConfig};
    use crate::verbs::{devices, planted};

    /// soft0 has no DMA-BUF registrations, so they are planted.
    #[test]
    fn parts_of_dma_buf_memory_are_registered_by_its_descriptor() {
        const OFFSET: u64 = 8192;
        let device = devices(&[planted::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let memory = vec![0_u8; 4 * 4096];
        let start = memory.as_ptr().expose_provenance() as u64;
        let part = |from: usize, len| Buffer {
            addr: memory[from..].as_ptr().cast(),
            len,
        };
        let file = std::fs::File::open("/dev/null").unwrap();
        let whole = RegionConfig {
            buffers: &[part(0, memory.len())],
            access: Access::all(),
            dmabuf: Some(Dmabuf {
                fd: file.as_raw_fd(),
                offset: OFFSET,
            }),
            ..RegionConfig::default()
        };
        let parts = [part(4096, 100), part(12288, 4096)];
        // SAFETY: the memory outlives the regions.
        let (base, sub) = unsafe {
            let base = Region::register(domain.mr(), &whole).unwrap();
            let config = RegionConfig {
                buffers: &parts,
                access: Access::all(),
                base: Some(&base),
                requested_key: 1,
                ..RegionConfig::default()
            };
            let sub = Region::register(domain.mr(), &config).unwrap();
            (base, sub)
        };
        let expected = [
            (OFFSET, memory.len(), start),
            (OFFSET + 4096, 100, start + 4096),
            (OFFSET + 12288, 4096, start + 12288),
        ];
        assert_eq!(*planted::REGISTERED.lock(), expected);
        sub.close().unwrap();
        base.close().unwrap();
    }
}
