//! Access to the owner's device memory buffers through a mapping in this process.

use super::remote::{AccessError, Direction};
use crate::segment::Mapping;
use crate::sync::atomic::Ordering;

/// Copies between local buffers and a mapping.
///
/// # Errors
/// [`AccessError::Remote`]: the range is outside the mapping.
pub(crate) fn copy(
    map: &Mapping,
    offset: u64,
    local: &[libc::iovec],
    bytes: usize,
    direction: Direction,
) -> Result<(), AccessError> {
    let inside = offset <= map.len() as u64 && bytes as u64 <= map.len() as u64 - offset;
    if !inside {
        return Err(AccessError::Remote);
    }
    let mut there = map.bytes(offset as usize, bytes);
    for iovec in local {
        let here = iovec.iov_base.cast::<u8>();
        // SAFETY: the application keeps its registered buffers, `bytes` bytes in all, valid; the
        // other side was checked to lie inside the mapping. A concurrent writer of the mapping
        // changes only the bytes that are copied.
        unsafe {
            match direction {
                Direction::Write => there.copy_from(here, iovec.iov_len),
                Direction::Read => here.copy_from(there, iovec.iov_len),
            }
            there = there.add(iovec.iov_len);
        }
    }
    Ok(())
}

/// Changes a word of a mapping to the result of `next` with the processor's atomics; returns its
/// earlier value.
///
/// # Errors
/// [`AccessError::Remote`]: the word is outside the mapping or not aligned.
pub(crate) fn change(
    map: &Mapping,
    offset: u64,
    next: impl Fn(u64) -> Option<u64>,
) -> Result<u64, AccessError> {
    let inside =
        offset.is_multiple_of(8) && offset < map.len() as u64 && map.len() as u64 - offset >= 8;
    if !inside {
        return Err(AccessError::Remote);
    }
    let word = map.u64(offset as usize);
    let old = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    // `Ok` and `Err` both hold the value that was found.
    Ok(old.unwrap_or_else(|found| found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{self, memfd_create};

    #[test]
    fn copies_stay_inside() {
        let map = Mapping::new(&memfd_create(c"test", 4096).unwrap(), 4096).unwrap();
        let mut bytes = [7u8; 100];
        let addr = bytes.as_mut_ptr() as u64;
        let list = [sys::as_local(addr, 60), sys::as_local(addr + 60, 40)];
        assert_eq!(copy(&map, 3996, &list, 100, Direction::Write), Ok(()));
        let wrong = Err(AccessError::Remote);
        for offset in [3997, 4096, 1 << 40, u64::MAX] {
            assert_eq!(copy(&map, offset, &list, 100, Direction::Write), wrong);
        }
        bytes.fill(0);
        assert_eq!(copy(&map, 3990, &list, 100, Direction::Read), Ok(()));
        assert_eq!((bytes[5], bytes[6], bytes[99]), (0, 7, 7));
    }

    #[test]
    fn words_change_by_instructions() {
        let map = Mapping::new(&memfd_create(c"test", 4096).unwrap(), 4096).unwrap();
        let add = |old: u64| Some(old + 5);
        assert_eq!(change(&map, 4088, add), Ok(0));
        assert_eq!(change(&map, 4088, |_| None), Ok(5));
        assert_eq!(change(&map, 4088, add), Ok(5));
        for offset in [4096, 4092, 1, u64::MAX - 7] {
            assert_eq!(change(&map, offset, add), Err(AccessError::Remote));
        }
    }
}
