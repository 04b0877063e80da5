//! The registry's file, which any process of the user can write.

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::Input;
use crate::registry::{Entry, Registry};
use crate::sys::{self, Identity};

/// For any content of the file, a process finds an entry in it, and peers find the process.
///
/// # Panics
/// If this property does not hold.
pub fn registry(data: &[u8]) {
    let mut input = Input::new(data);
    let (registry, file) = Registry::anonymous().unwrap();
    let me = Entry {
        identity: Identity {
            pid: std::process::id(),
            start_time: sys::own_start_time().unwrap(),
            cookie: 9,
        },
        segment_fd: file.as_raw_fd(),
        segment_inode: file.metadata().unwrap().ino(),
        node: 1,
    };
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => {
                let at = u64::from(input.u16());
                let len = input.below(100);
                file.write_all_at(input.bytes(len), at).unwrap();
            }
            1 => file.set_len(u64::from(input.u16())).unwrap(),
            2 => {
                // A valid entry, except for one changed byte.
                let slot = input.below(1024) as u64;
                let mut bytes = me.to_bytes();
                bytes[input.below(64)] ^= input.u8();
                file.write_all_at(&bytes, slot * 64).unwrap();
                registry.lookup(slot as u32);
            }
            _ => {
                let slot = registry.join(me).unwrap();
                assert_eq!(registry.lookup(slot), Some(me));
                // The process leaves, so that others have room.
                file.write_all_at(&[0; 64], u64::from(slot) * 64).unwrap();
            }
        }
    }
    for slot in [0, 1023, 1024, u32::MAX] {
        registry.lookup(slot);
    }
}
