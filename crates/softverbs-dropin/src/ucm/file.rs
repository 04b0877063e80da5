//! The descriptors that stand for the kernel's file `rdma_cm`, and the ids that were made by them.
//!
//! Invariants: a descriptor of this module is that of an event channel of softverbs, so it becomes
//! readable as the kernel's file does. An id has a number from its creation until DESTROY_ID or the
//! close of its descriptor, and numbers are not used again. The lock of the table is not held
//! during a call of the connection manager.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use libc::c_int;
use rdma_core_sys::CmFns;
use rdma_core_sys::bindings::*;

/// An errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Errno(pub(super) c_int);

pub(super) type Res<T> = Result<T, Errno>;

/// The connection manager.
pub(super) fn cm() -> &'static CmFns {
    &softverbs::backend().cm
}

/// The result of a call of the connection manager that returns 0, or −1 with `errno`.
pub(super) fn done(status: c_int) -> Res<()> {
    if status == 0 { Ok(()) } else { Err(last()) }
}

/// The errno of a call that has just failed.
pub(super) fn last() -> Errno {
    let errno = std::io::Error::last_os_error().raw_os_error();
    Errno(errno.unwrap_or(libc::EIO))
}

/// The connection manager's object of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Id(pub(super) *mut rdma_cm_id);

// SAFETY: rdma_cm(7): any thread may use an id.
unsafe impl Send for Id {}

/// The connection manager's object of a descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Channel(pub(super) *mut rdma_event_channel);

// SAFETY: rdma_cm(7): any thread may use an event channel.
unsafe impl Send for Channel {}

struct Entry {
    id: Id,
    fd: c_int,
    /// The caller's name for the id in events; 0 while a requested id is not yet accepted.
    uid: u64,
    /// Number of events of the id that the caller has got.
    reported: u32,
}

/// All descriptors and ids of the process.
#[derive(Default)]
pub(super) struct Table {
    channels: HashMap<c_int, Channel>,
    ids: HashMap<u32, Entry>,
    numbers: HashMap<Id, u32>,
    last: u32,
}

impl Table {
    pub(super) fn lock() -> MutexGuard<'static, Self> {
        static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);
        TABLE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_channel(&mut self, fd: c_int, channel: Channel) {
        self.channels.insert(fd, channel);
    }

    /// The channel of a descriptor; `None` if it is not one of this module.
    pub(super) fn channel(&self, fd: c_int) -> Option<Channel> {
        self.channels.get(&fd).copied()
    }

    /// Takes a descriptor and the ids that it still has.
    pub(super) fn remove_channel(&mut self, fd: c_int) -> Option<(Channel, Vec<Id>)> {
        let channel = self.channels.remove(&fd)?;
        let left = |(_, entry): &(u32, Entry)| entry.fd == fd;
        let (gone, rest): (Vec<_>, Vec<_>) = self.ids.drain().partition(left);
        self.ids = rest.into_iter().collect();
        let ids: Vec<Id> = gone.into_iter().map(|(_, entry)| entry.id).collect();
        for id in &ids {
            self.numbers.remove(id);
        }
        Some((channel, ids))
    }

    /// Gives an id a number.
    pub(super) fn add(&mut self, id: Id, fd: c_int, uid: u64) -> u32 {
        self.last += 1;
        let reported = 0;
        self.ids.insert(
            self.last,
            Entry {
                id,
                fd,
                uid,
                reported,
            },
        );
        self.numbers.insert(id, self.last);
        self.last
    }

    /// The id of a number, if it was made by this descriptor.
    ///
    /// # Errors
    /// `ENOENT`: no such id. `EINVAL`: it has another descriptor.
    pub(super) fn id(&self, fd: c_int, number: u32) -> Res<Id> {
        match self.ids.get(&number) {
            None => Err(Errno(libc::ENOENT)),
            Some(entry) if entry.fd != fd => Err(Errno(libc::EINVAL)),
            Some(entry) => Ok(entry.id),
        }
    }

    /// Ends the events of an id that is destroyed. Its number stays until [`Table::forget`].
    pub(super) fn retire(&mut self, number: u32) {
        if let Some(entry) = self.ids.get_mut(&number) {
            self.numbers.remove(&entry.id);
            // no descriptor: no other command finds it
            entry.fd = -1;
        }
    }

    /// Removes an id. Returns the number of events that the caller has got of it.
    pub(super) fn forget(&mut self, number: u32) -> u32 {
        self.ids.remove(&number).map_or(0, |entry| entry.reported)
    }

    /// The number of events that the caller has got of an id.
    pub(super) fn reported(&self, number: u32) -> u32 {
        self.ids.get(&number).map_or(0, |entry| entry.reported)
    }

    /// Sets the caller's name for an id. Returns the former one.
    pub(super) fn set_uid(&mut self, number: u32, uid: u64) -> u64 {
        let entry = self.ids.get_mut(&number);
        entry.map_or(0, |entry| std::mem::replace(&mut entry.uid, uid))
    }

    pub(super) fn set_fd(&mut self, number: u32, fd: c_int) {
        if let Some(entry) = self.ids.get_mut(&number) {
            entry.fd = fd;
        }
    }

    /// Counts an event of an id. Returns the id's number, the caller's name for it, and its
    /// descriptor; `None` if the caller has no name for it, so that it cannot get the event.
    pub(super) fn report(&mut self, id: Id) -> Option<(u32, u64, c_int)> {
        let number = *self.numbers.get(&id)?;
        let entry = self.ids.get_mut(&number).filter(|entry| entry.uid != 0)?;
        entry.reported += 1;
        Some((number, entry.uid, entry.fd))
    }
}
