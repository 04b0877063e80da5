//! The descriptors that stand for the kernel's file `rdma_cm`, and the ids that were made by them.
//!
//! Invariants: a descriptor of this module is that of an event channel of softverbs, so it becomes
//! readable as the kernel's file does. An id has a number from its creation until DESTROY_ID or the
//! close of its descriptor, and numbers are not used again. The lock of the table is not held
//! during a call of the connection manager.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use forks::PerProcess;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// During MIGRATE_ID.
    move_to: Option<Move>,
}

/// The descriptor to which an id is being moved.
struct Move {
    fd: c_int,
    channel: Channel,
    /// Number of the id's events that the caller has got from it already.
    reported: u32,
}

/// All descriptors and ids of the process. A forked child begins without any: the call that closes
/// its copy of a descriptor ends nothing of its parent.
#[derive(Default)]
pub(super) struct Table {
    channels: HashMap<c_int, Channel>,
    ids: HashMap<u32, Entry>,
    numbers: HashMap<Id, u32>,
    last: u32,
}

impl Table {
    pub(super) fn lock() -> MutexGuard<'static, Self> {
        static TABLE: PerProcess<LazyLock<Mutex<Table>>> =
            PerProcess::new(LazyLock::new(Mutex::default));
        TABLE.get().lock().unwrap_or_else(PoisonError::into_inner)
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
                move_to: None,
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

    /// Sets the caller's name for an id. Returns the former one.
    pub(super) fn set_uid(&mut self, number: u32, uid: u64) -> u64 {
        let entry = self.ids.get_mut(&number);
        entry.map_or(0, |entry| std::mem::replace(&mut entry.uid, uid))
    }

    /// To be called before the connection manager moves an id to another descriptor.
    pub(super) fn begin_move(&mut self, number: u32, fd: c_int, channel: Channel) {
        if let Some(entry) = self.ids.get_mut(&number).filter(|entry| entry.fd != fd) {
            entry.move_to = Some(Move {
                fd,
                channel,
                reported: 0,
            });
        }
    }

    /// The connection manager has moved the id, or has failed. Returns the number of events that the
    /// caller has got of it, without those of the new descriptor.
    pub(super) fn end_move(&mut self, number: u32, moved: bool) -> u32 {
        let Some(entry) = self.ids.get_mut(&number) else {
            return 0;
        };
        let Some(to) = entry.move_to.take() else {
            return entry.reported;
        };
        if moved {
            entry.fd = to.fd;
        }
        entry.reported - to.reported
    }

    /// Counts an event of an id that is read from a channel. Returns the id's number, the caller's
    /// name for it, and its descriptor; `None` if the caller has no name for it, so that it cannot
    /// get the event.
    pub(super) fn report(&mut self, id: Id, from: Channel) -> Option<(u32, u64, c_int)> {
        let number = *self.numbers.get(&id)?;
        let entry = self.ids.get_mut(&number).filter(|entry| entry.uid != 0)?;
        entry.reported += 1;
        let fd = match &mut entry.move_to {
            Some(to) if to.channel == from => {
                to.reported += 1;
                to.fd
            }
            _ => entry.fd,
        };
        Some((number, entry.uid, fd))
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::without_provenance_mut as address;

    use super::*;

    /// Another thread has the lock at the fork.
    #[test]
    fn a_forked_child_has_none_of_the_descriptors() {
        const FD: c_int = 1 << 30;
        Table::lock().add_channel(FD, Channel(address(8)));
        assert!(Table::lock().channel(FD).is_some());
        let locked = Table::lock();
        // SAFETY: the child acquires a lock, which no thread of its own has, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // a child that waits for the lock of its parent ends by the signal
            // SAFETY: system calls without pointers.
            unsafe {
                libc::alarm(10);
                libc::_exit(c_int::from(Table::lock().channel(FD).is_some()));
            }
        }
        drop(locked);
        let mut status = 1;
        // SAFETY: a writable integer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        Table::lock().remove_channel(FD);
    }

    /// A thread can read an event from the new descriptor before MIGRATE_ID has its answer.
    #[test]
    fn events_of_the_new_descriptor_are_not_awaited() {
        let (id, old, new) = (Id(address(8)), Channel(address(16)), Channel(address(24)));
        let mut table = Table::default();
        let number = table.add(id, 3, 77);
        assert_eq!(table.report(id, old), Some((number, 77, 3)));
        table.begin_move(number, 4, new);
        // a thread that has taken it from the former one is late
        assert_eq!(table.report(id, old), Some((number, 77, 3)));
        assert_eq!(table.report(id, new), Some((number, 77, 4)));
        assert_eq!(table.end_move(number, true), 2);
        assert_eq!(table.report(id, new), Some((number, 77, 4)));
        // a move that fails, and one to the same descriptor
        table.begin_move(number, 3, old);
        assert_eq!(table.end_move(number, false), 4);
        table.begin_move(number, 4, new);
        assert_eq!(table.end_move(number, true), 4);
        assert_eq!(table.report(id, new), Some((number, 77, 4)));
    }
}
