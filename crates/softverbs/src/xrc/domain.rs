//! The file of a domain: creating it, joining it, and finding it by its number.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::directory::{self, Entry, Name};
use crate::process::Process;
use crate::segment::Mapping;
use crate::segment::layout::member;
use crate::segment::layout::xrc::{self as layout, MAX_DOMAINS, MAX_TARGETS};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Weak};
use crate::sys::{self, Errno, Grow, Res};

/// Number of entries whose pages are allocated at once.
const STEP: u32 = 128;

/// A mapped domain. Its content is not trusted.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) number: u32,
    pub(crate) node: u32,
    cookie: u64,
    file: OwnedFd,
    pub(crate) map: Arc<Mapping>,
}

impl Domain {
    fn create(number: u32, node: u32, cookie: u64) -> Res<Self> {
        let file = sys::memfd_create(c"softverbs-xrc", layout::SIZE)?;
        sys::fallocate(file.as_raw_fd(), 0, layout::AT)?;
        let map = Mapping::new(&file, layout::SIZE)?;
        map.u64(layout::SIZE_AT)
            .store(layout::SIZE as u64, Ordering::Relaxed);
        map.u64(layout::COOKIE).store(cookie, Ordering::Relaxed);
        map.u32(layout::NUMBER).store(number, Ordering::Relaxed);
        map.u32(layout::NODE).store(node, Ordering::Relaxed);
        map.u64(0).store(layout::MAGIC, Ordering::Release);
        Ok(Self {
            number,
            node,
            cookie,
            file,
            map: Arc::try_new(map)?,
        })
    }

    /// Opens the file that the process in `slot` shares for the domain with this number and cookie.
    /// If only that process's agent can open files, this waits for the agent, at most 2 s for each
    /// file.
    fn open_from(process: &Process, slot: u32, number: u32, cookie: u64) -> Res<Self> {
        let peer = process.peer(slot)?;
        let at = member::AT + member::STRIDE * number as usize;
        if peer.map.u64(at + member::COOKIE).load(Ordering::Acquire) != cookie {
            return Err(Errno(libc::ENOENT));
        }
        let fd = peer.map.u32(at + member::FD).load(Ordering::Relaxed);
        let inode = peer.map.u64(at + member::INODE).load(Ordering::Relaxed);
        let file = peer.opener.open(fd.cast_signed(), libc::O_RDWR)?;
        if sys::sealed_size(&file)? != layout::SIZE || sys::inode_of(&file)? != inode {
            return Err(Errno(libc::EPROTO));
        }
        let map = Mapping::new(&file, layout::SIZE)?;
        let whole = map.u64(0).load(Ordering::Acquire) == layout::MAGIC
            && map.u64(layout::SIZE_AT).load(Ordering::Relaxed) == layout::SIZE as u64
            && map.u64(layout::COOKIE).load(Ordering::Relaxed) == cookie
            && map.u32(layout::NUMBER).load(Ordering::Relaxed) == number;
        if !whole {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Self {
            number,
            node: map.u32(layout::NODE).load(Ordering::Relaxed),
            cookie,
            file,
            map: Arc::try_new(map)?,
        })
    }

    /// Number of entries that have pages, and so may be read.
    pub(crate) fn count(&self) -> u32 {
        let count = self.map.u32(layout::COUNT).load(Ordering::Acquire);
        count.min(MAX_TARGETS as u32)
    }

    /// Offset of the entry of the target with this index, if it has pages.
    pub(crate) fn entry(&self, index: u32) -> Option<usize> {
        (index < self.count()).then(|| layout::entry_at(index))
    }

    /// Allocates the pages of more entries. The caller holds the domain's lock.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn grow(&self) -> Res<()> {
        let count = self.count();
        let more = (count + STEP).min(MAX_TARGETS as u32);
        if more == count {
            return Err(Errno(libc::ENOMEM));
        }
        let from = layout::entry_at(count);
        sys::fallocate(
            self.file.as_raw_fd(),
            from,
            layout::STRIDE * (more - count) as usize,
        )?;
        self.map.u32(layout::COUNT).store(more, Ordering::Release);
        Ok(())
    }
}

/// This process's membership in a domain, as long as one of its handles has the domain open.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) domain: Arc<Domain>,
    pub(crate) process: &'static Process,
    /// Number of handles of this process on each target, by index. Locked while holders' bits are
    /// changed.
    pub(super) held: Mutex<HashMap<u32, u32>>,
    /// Indices of targets, of each of which a handle could not be closed. Closed by the next call
    /// that creates or opens a target; with the membership all handles end.
    pub(super) unclosed: Mutex<Vec<u32>>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        // A forked child does not own the file lock; its parent does.
        if self.process.forked() {
            return;
        }
        let at = member::AT + member::STRIDE * self.domain.number as usize;
        let map = &self.process.segment.map;
        map.u64(at + member::COOKIE).store(0, Ordering::Release);
        self.process.domains.shown().remove(&self.domain.number);
        let file = self.process.registry().file();
        directory::leave(file, self.domain.number, self.process.slot);
    }
}

/// A domain that another process has open, by its entry in the registry. It stays mapped with this.
struct Found {
    number: u32,
    cookie: u64,
    /// The error: it has members, and none of them can be opened.
    domain: Res<Option<Arc<Domain>>>,
}

/// The domains that a process has mapped.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// Domains that are mapped, as initiator or member, by number.
    mapped: Mutex<HashMap<u32, Weak<Domain>>>,
    /// Domains that the process is a member of. Locked while it opens or closes one: memberships
    /// are locks of the process's own open file, which do not exclude its threads, and the lock
    /// against opening domains can be one too.
    memberships: Mutex<HashMap<u32, Weak<Membership>>>,
    /// Domains whose files are shared with other processes. A leaf in the lock order, as the agent
    /// takes it.
    shown: Mutex<HashMap<u32, Weak<Domain>>>,
}

impl Domains {
    fn mapped(&self) -> MutexGuard<'_, HashMap<u32, Weak<Domain>>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memberships(&self) -> MutexGuard<'_, HashMap<u32, Weak<Membership>>> {
        self.memberships
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn shown(&self) -> MutexGuard<'_, HashMap<u32, Weak<Domain>>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reopens the file of a domain that this process is a member of, if `fd` is its descriptor.
    pub(crate) fn reopen(&self, fd: i32) -> Option<OwnedFd> {
        let domain = self
            .shown()
            .values()
            .filter_map(Weak::upgrade)
            .find(|domain| domain.file.as_raw_fd() == fd)?;
        // It is not closed meanwhile.
        let file = domain.file.as_raw_fd();
        sys::open_fd_of(std::process::id(), file, libc::O_RDWR).ok()
    }

    /// The domain with this number, for one of many tries: a member that a repetition calls later,
    /// at its pace, is left to it. `None`: the domain does not exist, or none of its members may be
    /// opened at any time.
    ///
    /// # Errors
    /// It has members, and none of them can be opened now: those that may be opened later. The list
    /// is empty if there is no memory for the members or the domain.
    pub(crate) fn find(
        &self,
        process: &Process,
        number: u32,
    ) -> Result<Option<Arc<Domain>>, Vec<u32>> {
        let file = process.registry().file();
        let Some(entry) = directory::read(file, number) else {
            return Ok(None);
        };
        if let Some(domain) = self.known(number, entry.cookie) {
            return Ok(Some(domain));
        }
        let mut members = directory::others(file, number).map_err(|_| Vec::new())?;
        let mut unopened = 0;
        for i in 0..members.len() {
            let slot = members[i];
            // also one that is open: its agent may not answer for the domain's file
            let opened = match process.is_called_later(slot) {
                true => Err(Errno(libc::EAGAIN)),
                false => Domain::open_from(process, slot, number, entry.cookie),
            };
            match opened {
                Ok(domain) => {
                    let domain = self.remember(number, domain).map_err(|_| Vec::new())?;
                    return Ok(Some(domain));
                }
                Err(error)
                    if process.may_open_later(error)
                        && directory::is_member(file, number, slot) =>
                {
                    members[unopened] = slot;
                    unopened += 1;
                }
                // It has ended meanwhile, or must not be used.
                Err(_) => {}
            }
        }
        members.truncate(unopened);
        match unopened {
            0 => Ok(None),
            _ => Err(members),
        }
    }

    /// The domain with this number and cookie, if it is mapped.
    fn known(&self, number: u32, cookie: u64) -> Option<Arc<Domain>> {
        let known = self.mapped().get(&number).and_then(Weak::upgrade);
        known.filter(|domain| domain.cookie == cookie)
    }

    /// The domain with this number, if it has members.
    ///
    /// # Errors
    /// It has members, and none of them can be opened; the error of the last one.
    fn try_find(&self, process: &Process, number: u32) -> Res<Option<Arc<Domain>>> {
        let file = process.registry().file();
        let Some(entry) = directory::read(file, number) else {
            return Ok(None);
        };
        if let Some(domain) = self.known(number, entry.cookie) {
            return Ok(Some(domain));
        }
        let mut result = Ok(None);
        for slot in directory::others(file, number)? {
            match Domain::open_from(process, slot, number, entry.cookie) {
                Ok(domain) => return self.remember(number, domain).map(Some),
                Err(Errno(libc::ESRCH | libc::ENOENT)) => {}
                Err(error) if directory::is_member(file, number, slot) => result = Err(error),
                // It has ended meanwhile.
                Err(_) => {}
            }
        }
        result
    }

    fn forget_unmapped(&self) {
        self.mapped().retain(|_, known| known.upgrade().is_some());
    }

    fn remember(&self, number: u32, domain: Domain) -> Res<Arc<Domain>> {
        let mut mapped = self.mapped();
        mapped.try_reserve(1).map_err(|_| Errno(libc::ENOMEM))?;
        let domain = Arc::try_new(domain)?;
        mapped.insert(number, Arc::downgrade(&domain));
        Ok(domain)
    }

    /// Opens or creates the domain with this name. A domain without a file is always a new one.
    ///
    /// # Errors
    /// `EAGAIN`: the domain does not exist and `create` is not set. `EINVAL`: it exists and
    /// `exclusive` is set. `EBUSY`: another process holds the registry's lock for 5 s. `ENOMEM`,
    /// `EMFILE`.
    pub(super) fn open(
        &self,
        process: &'static Process,
        name: Name,
        create: bool,
        exclusive: bool,
    ) -> Res<Arc<Membership>> {
        let found = match exclusive {
            true => Vec::new(),
            false => self.look_ahead(process, name)?,
        };
        let mut memberships = self.memberships();
        memberships
            .try_reserve(1)
            .map_err(|_| Errno(libc::ENOMEM))?;
        let file = process.registry().file();
        let _all = directory::hold_all(file)?;
        if name.file.is_some() {
            for (number, entry) in directory::named(file, name)? {
                let own = memberships.get(&number).and_then(Weak::upgrade);
                let own = own.filter(|own| own.domain.cookie == entry.cookie);
                let joined = match own {
                    Some(own) => Some(own),
                    None if !directory::is_open_elsewhere(file, number) => None,
                    None => {
                        if exclusive {
                            return Err(Errno(libc::EINVAL));
                        }
                        self.join(process, number, entry, &found)?
                    }
                };
                if let Some(joined) = joined {
                    if exclusive {
                        return Err(Errno(libc::EINVAL));
                    }
                    memberships.insert(number, Arc::downgrade(&joined));
                    return Ok(joined);
                }
            }
            if !create {
                return Err(Errno(libc::EAGAIN));
            }
        }
        let made = self
            .make(process, name)
            .inspect_err(|_| self.forget_unmapped())?;
        memberships.insert(made.domain.number, Arc::downgrade(&made));
        Ok(made)
    }

    /// Maps the domains with this name that other processes have open. Without the lock of all
    /// domains: a member that is stopped delays its opening by up to 2 s, and would delay all
    /// processes that open a domain.
    fn look_ahead(&self, process: &Process, name: Name) -> Res<Vec<Found>> {
        let mut all = Vec::new();
        if name.file.is_none() {
            return Ok(all);
        }
        let file = process.registry().file();
        for (number, entry) in directory::named(file, name)? {
            if directory::is_open_elsewhere(file, number) {
                all.try_push(Found {
                    number,
                    cookie: entry.cookie,
                    domain: self.try_find(process, number),
                })?;
            }
        }
        Ok(all)
    }

    /// Joins a domain that another process has open. `None` if all members end meanwhile.
    ///
    /// # Errors
    /// Also those of opening a member: another domain for the same file must not be made.
    fn join(
        &self,
        process: &'static Process,
        number: u32,
        entry: Entry,
        found: &[Found],
    ) -> Res<Option<Arc<Membership>>> {
        let same = |it: &&Found| (it.number, it.cookie) == (number, entry.cookie);
        if let Some(Err(error)) = found.iter().find(same).map(|it| &it.domain) {
            return Err(*error);
        }
        // at once, if it is mapped
        let Some(domain) = self.find_among_others(process, number, entry)? else {
            return Ok(None);
        };
        // Before this process is a member: with its lock the bits that an ended process of this
        // slot has left would be those of a living holder.
        super::target::forget(&domain, process.slot);
        let file = process.registry().file();
        directory::join(file, number, process.slot)?;
        if !directory::is_open_elsewhere(file, number) {
            directory::leave(file, number, process.slot);
            return Ok(None);
        }
        Ok(Some(Self::show(process, domain)?))
    }

    fn find_among_others(
        &self,
        process: &Process,
        number: u32,
        entry: Entry,
    ) -> Res<Option<Arc<Domain>>> {
        // The mapped domain may be one whose members have all ended, and its number may be free, so
        // a live member is required.
        if !directory::is_open_elsewhere(process.registry().file(), number) {
            return Ok(None);
        }
        let found = self.try_find(process, number)?;
        Ok(found.filter(|domain| domain.cookie == entry.cookie))
    }

    fn make(&self, process: &'static Process, name: Name) -> Res<Arc<Membership>> {
        let file = process.registry().file();
        // The search starts at a random number, so that a number is reused late.
        let start = sys::random() as u32;
        for i in 0..MAX_DOMAINS as u32 {
            let number = start.wrapping_add(i) % MAX_DOMAINS as u32;
            let own = self.is_shown(process, number);
            if own || directory::is_open_elsewhere(file, number) {
                continue;
            }
            directory::join(file, number, process.slot)?;
            let cookie = sys::random() | 1;
            let made = directory::write(file, number, Entry { name, cookie })
                .and_then(|()| Domain::create(number, name.node, cookie))
                .inspect_err(|_| directory::leave(file, number, process.slot))?;
            let domain = self
                .remember(number, made)
                .inspect_err(|_| directory::leave(file, number, process.slot))?;
            return Self::show(process, domain);
        }
        Err(Errno(libc::ENOMEM))
    }

    fn is_shown(&self, process: &Process, number: u32) -> bool {
        let at = member::AT + member::STRIDE * number as usize;
        // The owner's own word. A process that overwrites it harms only the domain.
        let cookie = process.segment.map.u64(at + member::COOKIE);
        cookie.load(Ordering::Relaxed) != 0
    }

    /// Publishes the domain's file to other processes.
    fn show(process: &'static Process, domain: Arc<Domain>) -> Res<Arc<Membership>> {
        let at = member::AT + member::STRIDE * domain.number as usize;
        let shown = || {
            let inode = sys::inode_of(&domain.file)?;
            let mut shown = process.domains.shown();
            shown.try_reserve(1).map_err(|_| Errno(libc::ENOMEM))?;
            shown.insert(domain.number, Arc::downgrade(&domain));
            Ok(inode)
        };
        let inode = shown().inspect_err(|_: &Errno| {
            directory::leave(process.registry().file(), domain.number, process.slot);
        })?;
        let map = &process.segment.map;
        map.u64(at + member::INODE).store(inode, Ordering::Relaxed);
        map.u32(at + member::FD)
            .store(domain.file.as_raw_fd().cast_unsigned(), Ordering::Relaxed);
        map.u64(at + member::COOKIE)
            .store(domain.cookie, Ordering::Release);
        // Initiators can access a shared receive queue of this process although this process has
        // not opened them.
        process.start_agent_for_strangers();
        Arc::try_new(Membership {
            domain,
            process,
            held: Mutex::default(),
            unclosed: Mutex::default(),
        })
    }

    /// Leaves a domain with the last of its handles. No thread opens a domain meanwhile.
    pub(super) fn leave(&self, membership: Arc<Membership>) {
        let mut memberships = self.memberships();
        drop(membership);
        memberships.retain(|_, known| known.upgrade().is_some());
        self.forget_unmapped();
    }
}
