//! The buffers and protection domains in a peer's segment, and the peer's locks of atomics.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use super::Input;
use crate::agent::Opener;
use crate::dm::{Directs, Shown, domain};
use crate::region::{Stripe, change_direct};
use crate::segment::layout::{MAX_BUFFERS, buffer, domain as domains, header, stripe};
use crate::segment::{Mapping, OwnSegment};
use crate::sync::atomic::Ordering;
use crate::sys::{self, Identity};

/// Number of entries in the segment.
const COUNT: usize = 6;
/// Number of locks that are tried. Trying a lock takes about 1 ms if another process holds it.
const LOCKS: u32 = 4;

/// A file that an entry may name.
struct File {
    fd: OwnedFd,
    inode: u64,
    len: u64,
    /// No process can remove its pages.
    good: bool,
}

/// Each file has another length.
fn files() -> &'static [File] {
    static FILES: OnceLock<Vec<File>> = OnceLock::new();
    FILES.get_or_init(|| {
        let sealed = |pages: usize| {
            let fd = sys::memfd_create(c"fuzz", pages << 12).unwrap();
            sys::fallocate(fd.as_raw_fd(), 0, pages << 12).unwrap();
            (fd, pages, true)
        };
        // SAFETY: a new descriptor, which has no other owner.
        let open = unsafe {
            let fd = libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC);
            assert_eq!(libc::ftruncate(fd, 4 << 12), 0);
            OwnedFd::from_raw_fd(fd)
        };
        [sealed(1), sealed(2), sealed(3), (open, 4, false)]
            .map(|(fd, pages, good)| File {
                inode: sys::inode_of(&fd).unwrap(),
                fd,
                len: (pages as u64) << 12,
                good,
            })
            .into()
    })
}

fn show(map: &Mapping, index: usize, file: &File, input: &mut Input<'_>) -> u64 {
    let at = buffer::AT + buffer::STRIDE * index;
    let stamp = (u64::from(input.u8()) + 1) * MAX_BUFFERS as u64 + index as u64;
    let words = [
        (buffer::ADDR, 0x10_0000 * (index as u64 + 1)),
        (buffer::LEN, file.len - u64::from(input.u8())),
        (buffer::INODE, file.inode),
        (buffer::STAMP, stamp),
    ];
    for (part, value) in words {
        map.u64(at + part).store(value, Ordering::Relaxed);
    }
    let fd = file.fd.as_raw_fd().cast_unsigned();
    map.u32(at + buffer::FD).store(fd, Ordering::Relaxed);
    map.u32(at + buffer::CONTEXT).store(1, Ordering::Relaxed);
    map.u32(at + buffer::WRITABLE).store(1, Ordering::Relaxed);
    stamp
}

/// A mapping is of the file that its entry names, by descriptor and inode, and of a file whose
/// pages stay. A word is changed inside the mapping, at its alignment. An entry that is found
/// contains the address. A domain exists if its word says so. A lock is acquired if it is free or
/// its holder has ended, and is not changed otherwise.
///
/// # Panics
/// If this property does not hold.
pub fn tables(data: &[u8]) {
    let mut input = Input::new(data);
    let segment = OwnSegment::create(1, 0, true).unwrap();
    for (at, len) in [
        (buffer::AT, buffer::STRIDE * COUNT),
        (domains::AT, 4096),
        (stripe::AT, stripe::STRIDE * stripe::COUNT),
    ] {
        segment.back(at, len).unwrap();
    }
    let map = &segment.map;
    let mut buffers = BuffersOfPeer {
        opener: Opener {
            identity: Identity {
                pid: std::process::id(),
                start_time: sys::own_start_time().unwrap(),
                cookie: 9,
            },
            slot: 5,
            own_slot: 5,
        },
        directs: Directs::default(),
        stamps: vec![0],
        mapped: HashSet::new(),
    };
    let mut locks = 0;
    while !input.is_empty() {
        match input.u8() % 9 {
            0..=1 => buffers.show(map, &mut input),
            2 => {
                let at = buffer::AT + 8 * input.below(buffer::STRIDE * COUNT / 8);
                map.u64(at).store(input.edgy(), Ordering::Relaxed);
            }
            3 => {
                // With a larger number of entries, readers would allocate the pages of entries that
                // do not exist.
                let count = input.below(COUNT + 1) as u32;
                map.u32(header::BUFFERS).store(count, Ordering::Relaxed);
            }
            4 => read_entry(map, &mut input),
            5 => find_address(map, &mut input),
            6 => buffers.change_word(map, &mut input),
            7 => look_up_domain(map, &mut input),
            _ if locks < LOCKS => {
                locks += 1;
                lock_word(map, &mut input);
            }
            _ => {}
        }
    }
}

/// The buffers that a peer shows, and those that are mapped.
struct BuffersOfPeer {
    opener: Opener,
    directs: Directs,
    stamps: Vec<u64>,
    mapped: HashSet<u64>,
}

impl BuffersOfPeer {
    fn show(&mut self, map: &Mapping, input: &mut Input<'_>) {
        let (index, file) = (input.below(COUNT), input.below(files().len()));
        self.stamps.push(show(map, index, &files()[file], input));
        let count = map.u32(header::BUFFERS);
        count.store(COUNT as u32, Ordering::Relaxed);
    }

    fn change_word(&mut self, map: &Mapping, input: &mut Input<'_>) {
        let stamp = self.stamps[input.below(self.stamps.len().min(256))];
        let offset = input.edgy() % 0x5000;
        let Some(there) = self.directs.get(map, &self.opener, stamp) else {
            return;
        };
        if self.mapped.insert(stamp) {
            let at = buffer::AT + buffer::STRIDE * (stamp as usize % MAX_BUFFERS);
            let fd = map.u32(at + buffer::FD).load(Ordering::Relaxed);
            let inode = map.u64(at + buffer::INODE).load(Ordering::Relaxed);
            let named =
                |file: &&File| file.fd.as_raw_fd().cast_unsigned() == fd && file.inode == inode;
            let file = files().iter().find(named).expect("another file");
            assert!(file.good, "pages that may go");
            assert_eq!(there.len() as u64, file.len);
        }
        let len = there.len() as u64;
        let changed = change_direct(&there, offset, |old| Some(old + 1)).is_ok();
        assert_eq!(changed, offset.is_multiple_of(8) && offset + 8 <= len);
    }
}

fn read_entry(map: &Mapping, input: &mut Input<'_>) {
    let index = if input.u8() < 200 {
        input.below(COUNT) as u32
    } else {
        MAX_BUFFERS as u32 + input.u32() % (u32::MAX - MAX_BUFFERS as u32)
    };
    if let Some(shown) = Shown::read(map, index) {
        assert!(shown.stamp != 0 && shown.stamp % MAX_BUFFERS as u64 == u64::from(index));
    }
}

fn find_address(map: &Mapping, input: &mut Input<'_>) {
    let addr = if input.u8() < 128 {
        0x10_0000 * (input.below(COUNT) as u64 + 1) + input.edgy() % 0x4000
    } else {
        input.edgy()
    };
    for writes in [false, true] {
        if let Some(shown) = Shown::at(map, addr, writes) {
            assert!(addr.wrapping_sub(shown.addr) < shown.len);
            assert!(shown.writable || !writes);
        }
    }
}

fn look_up_domain(map: &Mapping, input: &mut Input<'_>) {
    let (number, context) = (input.u8().into(), u32::from(input.u8() % 3));
    let place = map.u64(domains::AT + domains::STRIDE * number as usize);
    let word = if input.u8() < 128 {
        u64::from(number) | u64::from(context) << 32
    } else {
        input.edgy()
    };
    place.store(word, Ordering::Relaxed);
    let right = word as u32 == number && (word >> 32) as u32 == context;
    assert_eq!(domain::is_shown(map, number, context), number != 0 && right);
}

fn lock_word(map: &Mapping, input: &mut Input<'_>) {
    let (addr, held, lives) = (input.edgy(), input.edgy(), input.u8() < 128);
    for lock in 0..stripe::COUNT {
        let at = stripe::AT + stripe::STRIDE * lock;
        map.u64(at).store(held, Ordering::Relaxed);
    }
    let changed = || {
        let at = (0..stripe::COUNT).map(|lock| stripe::AT + stripe::STRIDE * lock);
        at.filter(|&at| map.u64(at).load(Ordering::Relaxed) != held)
            .count()
    };
    let own = 7 << 48 | 1;
    let lock = Stripe::lock(map, addr, own, Duration::ZERO, |_| lives);
    assert_eq!(lock.is_some(), held == 0 || !lives);
    assert_eq!(changed(), usize::from(lock.is_some() && held != own));
    drop(lock);
    assert!(changed() <= 1);
}
