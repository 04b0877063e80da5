//! The device context behind a command descriptor, and the objects of it that other contexts
//! import.
//!
//! The descriptor is a sealed file, which no process can write. It names a process and one of its
//! contexts, and grants nothing by itself: the importing process must be able to open that
//! process's segment, so both have the same user.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use crate::sys::{self, Errno, Identity, Res};

/// First word of the file.
const MAGIC: u64 = 0x0001_6478_6574_6e63;
/// Bytes of the file: u64 magic, u64 cookie, u32 slot, u32 context.
const LEN: usize = 24;

/// A context of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) slot: u32,
    pub(crate) cookie: u64,
    pub(crate) context: u32,
}

impl Origin {
    /// A command descriptor of the context.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`.
    pub(crate) fn to_file(self) -> Res<OwnedFd> {
        let mut bytes = [0u8; LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.slot.to_ne_bytes());
        bytes[20..].copy_from_slice(&self.context.to_ne_bytes());
        sys::sealed_file(c"softverbs-context", &bytes)
    }

    /// # Errors
    /// `EBADF`; `EINVAL`: the file is not a command descriptor.
    pub(crate) fn of_file(file: BorrowedFd<'_>) -> Res<Self> {
        let bytes: [u8; LEN] = sys::read_sealed(file)?;
        let word = |at: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(word)
        };
        if word(0) != MAGIC {
            return Err(Errno(libc::EINVAL));
        }
        let last = word(16);
        Ok(Self {
            slot: last as u32,
            cookie: word(8),
            context: (last >> 32) as u32,
        })
    }

    /// Whether the context belongs to the process in `slot`.
    pub(crate) fn is_of(self, slot: u32, identity: &Identity) -> bool {
        (self.slot, self.cookie) == (slot, identity.cookie)
    }
}

/// Protection domains of other processes that are used here, each with a number of this process: by
/// the other's cookie and handle.
#[derive(Debug, Default)]
pub(crate) struct Imports(Mutex<HashMap<(u64, u32), (u32, u32)>>);

impl Imports {
    /// The number of a foreign domain in this process. All current imports of one domain share the
    /// number.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn take(&self, cookie: u64, handle: u32, fresh: impl FnOnce() -> u32) -> Res<u32> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.try_reserve(1).map_err(|_| Errno(libc::ENOMEM))?;
        let entry = all.entry((cookie, handle)).or_insert_with(|| (fresh(), 0));
        entry.1 += 1;
        Ok(entry.0)
    }

    /// Undoes [`Self::take`].
    pub(crate) fn give(&self, cookie: u64, handle: u32) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = all.get_mut(&(cookie, handle)) {
            entry.1 -= 1;
            if entry.1 == 0 {
                all.remove(&(cookie, handle));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_descriptor_names_a_context() {
        let origin = Origin {
            slot: 7,
            cookie: u64::MAX - 5,
            context: 9,
        };
        let file = origin.to_file().unwrap();
        assert_eq!(Origin::of_file(file.as_fd()), Ok(origin));
        let other = sys::sealed_file(c"other", &[7; LEN]).unwrap();
        assert_eq!(Origin::of_file(other.as_fd()), Err(Errno(libc::EINVAL)));
        let short = sys::sealed_file(c"short", &[7; 8]).unwrap();
        assert_eq!(Origin::of_file(short.as_fd()), Err(Errno(libc::EINVAL)));
        let writable = sys::memfd_create(c"writable", LEN).unwrap();
        assert_eq!(Origin::of_file(writable.as_fd()), Err(Errno(libc::EINVAL)));
        let pipe = sys::Pipe::new().unwrap();
        #[allow(unsafe_code, reason = "borrows a descriptor of its own")]
        // SAFETY: open for as long as the pipe.
        let end = unsafe { BorrowedFd::borrow_raw(pipe.read_fd()) };
        assert!(Origin::of_file(end).is_err());
    }

    #[test]
    fn a_foreign_domain_has_one_number() {
        let imports = Imports::default();
        assert_eq!(imports.take(1, 2, || 50), Ok(50));
        assert_eq!(imports.take(1, 2, || 51), Ok(50));
        assert_eq!(imports.take(1, 3, || 52), Ok(52));
        assert_eq!(imports.take(2, 2, || 53), Ok(53));
        imports.give(1, 2);
        assert_eq!(imports.take(1, 2, || 54), Ok(50));
        imports.give(1, 2);
        imports.give(1, 2);
        assert_eq!(imports.take(1, 2, || 55), Ok(55));
    }
}
