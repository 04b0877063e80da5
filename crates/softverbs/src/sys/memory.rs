//! Fallible allocation: out of memory is `ENOMEM` here. The standard library's allocating calls
//! abort the process instead.

use std::alloc::{Layout, alloc, alloc_zeroed};
use std::collections::VecDeque;
use std::mem::MaybeUninit;

use super::{Errno, Res};

const NONE: Errno = Errno(libc::ENOMEM);

/// Memory for a value, allocated before the caller starts a step that it would have to undo.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn room<T>() -> Res<Box<MaybeUninit<T>>> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: not of size 0.
    let place = unsafe { alloc(Layout::new::<T>()) };
    if place.is_null() {
        return Err(NONE);
    }
    // SAFETY: allocated just now, as a box of this type is.
    Ok(unsafe { Box::from_raw(place.cast()) })
}

/// # Errors
/// `ENOMEM`.
pub(crate) fn try_box<T>(value: T) -> Res<Box<T>> {
    Ok(Box::write(room()?, value))
}

/// A list with the result of `make` for each index.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn list<T>(count: usize, make: impl FnMut(usize) -> T) -> Res<Box<[T]>> {
    let mut list = with_room(count)?;
    list.extend((0..count).map(make));
    // the capacity equals the length, so nothing is allocated here
    Ok(list.into_boxed_slice())
}

/// Types of which all zeros is a value.
///
/// # Safety
/// All zeros must be a valid value of the type, and the type has no `Drop`.
pub(crate) unsafe trait Zero: Copy {}

// SAFETY: an integer.
unsafe impl Zero for u8 {}
// SAFETY: an integer.
unsafe impl Zero for u32 {}
// SAFETY: an integer.
unsafe impl Zero for u64 {}
// SAFETY: integers.
unsafe impl Zero for rdma_core_sys::ibv_sge {}

/// A list of `count` zeros. A page of a long list uses memory from its first write on.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn zeroed<T: Zero>(count: usize) -> Res<Box<[T]>> {
    const { assert!(size_of::<T>() > 0) };
    if count == 0 {
        return Ok(Box::default());
    }
    let layout = Layout::array::<T>(count).map_err(|_| NONE)?;
    // SAFETY: not of size 0.
    let place = unsafe { alloc_zeroed(layout) };
    if place.is_null() {
        return Err(NONE);
    }
    let list = std::ptr::slice_from_raw_parts_mut(place.cast::<T>(), count);
    // SAFETY: allocated just now, as a box of this type is; zeros are values of the type.
    Ok(unsafe { Box::from_raw(list) })
}

/// An empty list with room for `count` values without a further allocation.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn with_room<T>(count: usize) -> Res<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(|_| NONE)?;
    Ok(list)
}

/// Lists that grow with fallible allocation.
pub(crate) trait Grow<T> {
    /// Reserves room for `more` values.
    ///
    /// # Errors
    /// `ENOMEM`; the list is unchanged.
    fn make_room(&mut self, more: usize) -> Res<()>;

    /// Appends a value.
    ///
    /// # Errors
    /// As [`Self::make_room`].
    fn try_push(&mut self, value: T) -> Res<()>;
}

impl<T> Grow<T> for Vec<T> {
    fn make_room(&mut self, more: usize) -> Res<()> {
        self.try_reserve(more).map_err(|_| NONE)
    }

    fn try_push(&mut self, value: T) -> Res<()> {
        self.make_room(1)?;
        self.push(value);
        Ok(())
    }
}

impl<T> Grow<T> for VecDeque<T> {
    fn make_room(&mut self, more: usize) -> Res<()> {
        self.try_reserve(more).map_err(|_| NONE)
    }

    fn try_push(&mut self, value: T) -> Res<()> {
        self.make_room(1)?;
        self.push_back(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_what_was_asked_for() {
        assert_eq!(*try_box(7u64).unwrap(), 7);
        assert_eq!(*list(3, |i| i * 2).unwrap(), [0, 2, 4]);
        assert_eq!(*zeroed::<u32>(2).unwrap(), [0, 0]);
        assert!(list(0, |i| i).unwrap().is_empty());
        assert_eq!(zeroed::<u64>(usize::MAX / 8).err(), Some(NONE));
        let mut queue = VecDeque::new();
        assert!(queue.try_push(1).and_then(|()| queue.try_push(2)).is_ok());
        assert_eq!(queue, [1, 2]);
    }
}
