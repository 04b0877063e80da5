//! The local memory of an operation, as C passes it.

#![allow(unsafe_code, reason = "takes buffers and descriptors as C passes them")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use libc::iovec;

use super::refusal;
use crate::errno::{FiErrno, Result};
use crate::mr::{Desc, Following, LocalKeys, Use};
use crate::verbs::{Lkey, Sge};

/// Maximum number of buffers per operation.
pub(crate) const MAX_IOV: usize = 16;

/// The local memory of one operation: buffers, and the descriptors of the regions they lie in.
#[derive(Clone, Copy, Debug)]
pub struct LocalIov<'a> {
    iov: *const iovec,
    desc: *const Desc,
    count: usize,
    lifetime: PhantomData<&'a [iovec]>,
}

impl<'a> LocalIov<'a> {
    /// No buffers.
    pub const NONE: LocalIov<'static> = LocalIov {
        iov: std::ptr::null(),
        desc: std::ptr::null(),
        count: 0,
        lifetime: PhantomData,
    };

    /// One buffer. The descriptor may be NULL for inject, for inline data, and for length 0.
    #[inline]
    pub fn single(iov: &'a iovec, desc: &'a Desc) -> Self {
        Self {
            iov,
            desc,
            count: 1,
            lifetime: PhantomData,
        }
    }

    /// From C arguments: `count` buffers, and as many descriptors unless `desc` is NULL. No element
    /// is read here. The count is checked against the largest limit of all endpoints, so that a
    /// count that was never set is refused before any function walks the vector.
    ///
    /// # Errors
    /// `EINVAL`: `iov` is NULL and `count` is not 0; more than [`MAX_IOV`] buffers.
    ///
    /// # Safety
    /// `iov`, and `desc` if it isn't NULL, point to `count` elements that live for `'a`.
    #[inline]
    pub unsafe fn from_raw(
        iov: *const iovec,
        desc: *const *mut c_void,
        count: usize,
    ) -> Result<Self> {
        if count != 0 && iov.is_null() {
            return Err(refusal::no_buffers(count));
        }
        if count > MAX_IOV {
            return Err(refusal::too_many_buffers(count, MAX_IOV));
        }
        Ok(Self {
            iov,
            desc: desc.cast(),
            count,
            lifetime: PhantomData,
        })
    }

    /// Buffers that live for `'a`, and as many descriptors.
    pub(crate) fn borrowed(iov: &'a [iovec], desc: &'a [Desc]) -> Self {
        Self {
            iov: iov.as_ptr(),
            desc: desc.as_ptr(),
            count: iov.len().min(desc.len()),
            lifetime: PhantomData,
        }
    }

    /// Copies of the vectors of buffers and descriptors; the bytes in the buffers are not copied.
    pub(crate) fn to_owned(self) -> (Vec<iovec>, Vec<Desc>) {
        let desc = if self.desc.is_null() || self.count == 0 {
            vec![Desc::NULL; self.count]
        } else {
            // SAFETY: the constructor's caller promised as many descriptors as buffers, for `'a`.
            unsafe { std::slice::from_raw_parts(self.desc, self.count) }.to_vec()
        };
        (self.iov().to_vec(), desc)
    }

    /// Whether any buffer has a descriptor other than NULL.
    #[inline]
    pub(crate) fn has_descriptors(&self) -> bool {
        if self.desc.is_null() {
            return false;
        }
        // SAFETY: the constructor's caller promised as many descriptors as buffers, for `'a`.
        (0..self.count).any(|index| unsafe { !(*self.desc.add(index)).0.is_null() })
    }

    /// Number of buffers.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    #[inline]
    pub(crate) fn iov(&self) -> &'a [iovec] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: the constructor's caller promised `count` elements for `'a`.
        unsafe { std::slice::from_raw_parts(self.iov, self.count) }
    }

    /// The descriptor that all buffers have, or NULL. `None`: they have several.
    #[inline]
    pub(crate) fn common_desc(&self) -> Option<Desc> {
        if self.desc.is_null() || self.count == 0 {
            return Some(Desc::NULL);
        }
        // SAFETY: the constructor's caller promised as many descriptors as buffers, for `'a`.
        let all = unsafe { std::slice::from_raw_parts(self.desc, self.count) };
        let first = all[0];
        let same = self.count == 1 || all.iter().all(|desc| desc.0 == first.0);
        same.then_some(first)
    }

    /// Makes the closes of the regions of the descriptors wait, for an operation that has waited.
    pub(crate) fn follow(&self) -> Following<'static> {
        let mut follows = Following::default();
        (0..self.count).for_each(|index| follows.add(self.desc(index)));
        follows
    }

    /// The descriptors of the first `N` buffers.
    #[inline]
    pub(crate) fn descriptors<const N: usize>(&self) -> [Desc; N] {
        let mut all = [Desc::NULL; N];
        if !self.desc.is_null() {
            for (index, desc) in all.iter_mut().enumerate().take(self.count) {
                // SAFETY: the constructor's caller promised as many descriptors as buffers.
                *desc = unsafe { *self.desc.add(index) };
            }
        }
        all
    }

    /// The descriptor of the buffer at `index`, which must be less than the count.
    fn desc(&self, index: usize) -> Desc {
        if self.desc.is_null() {
            return Desc::NULL;
        }
        debug_assert!(index < self.count);
        // SAFETY: the constructor's caller promised as many descriptors as buffers, for `'a`.
        unsafe { *self.desc.add(index) }
    }

    /// Whether the total length is 0.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Total length in bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        // valid lengths cannot overflow; invalid ones saturate and are refused as too long
        self.iov()
            .iter()
            .fold(0_usize, |sum, iov| sum.saturating_add(iov.iov_len))
    }

    /// The sges of the buffers, without those of length 0, which some devices interpret as 2 GiB.
    /// `keys` are needed unless the data is sent inline.
    ///
    /// # Errors
    /// `EINVAL`: more than [`MAX_IOV`] buffers, or a required descriptor is invalid. Others: errors
    /// of registering a buffer.
    ///
    /// # Safety
    /// As [`LocalKeys::lkey`] for each buffer. Lengths fit 32 bits.
    #[inline(always)]
    pub(crate) unsafe fn sges<'b>(
        &self,
        keys: Option<(&mut LocalKeys, Use)>,
        out: &'b mut [MaybeUninit<Sge>; MAX_IOV],
    ) -> Result<&'b [Sge]> {
        // SAFETY: as this function.
        unsafe { self.sges_but(keys, out, |iov| iov.iov_len == 0) }
    }

    /// As [`Self::sges`], for a receive: skips a buffer at NULL too. Such a receive has room for 0
    /// bytes and can receive an empty message; fabtests' `fi_shared_ctx` posts such receives.
    ///
    /// # Errors
    /// As [`Self::sges`].
    ///
    /// # Safety
    /// As [`Self::sges`].
    #[inline(always)]
    pub(crate) unsafe fn recv_sges<'b>(
        &self,
        keys: &mut LocalKeys,
        out: &'b mut [MaybeUninit<Sge>; MAX_IOV],
    ) -> Result<&'b [Sge]> {
        // SAFETY: as this function.
        unsafe {
            self.sges_but(Some((keys, Use::Sink)), out, |iov| {
                iov.iov_len == 0 || iov.iov_base.is_null()
            })
        }
    }

    #[inline(always)]
    unsafe fn sges_but<'b>(
        &self,
        mut keys: Option<(&mut LocalKeys, Use)>,
        out: &'b mut [MaybeUninit<Sge>; MAX_IOV],
        left_out: impl Fn(&iovec) -> bool,
    ) -> Result<&'b [Sge]> {
        let mut count = 0;
        for (index, iov) in self.iov().iter().enumerate() {
            if left_out(iov) {
                continue;
            }
            let lkey = match &mut keys {
                None => Lkey::default(),
                // SAFETY: the vector of descriptors is NULL or has as many elements as that of
                // buffers; otherwise as this function.
                Some((keys, to)) => unsafe {
                    let desc = if self.desc.is_null() {
                        Desc::NULL
                    } else {
                        *self.desc.add(index)
                    };
                    keys.lkey(desc, iov, *to)
                }?,
            };
            out.get_mut(count).ok_or(FiErrno::EINVAL)?.write(Sge {
                addr: iov.iov_base as u64,
                length: iov.iov_len as u32,
                lkey,
            });
            count += 1;
        }
        // SAFETY: the loop has initialized the first `count` elements.
        Ok(unsafe { std::slice::from_raw_parts(out.as_ptr().cast(), count) })
    }

    /// Copies the bytes to `to`.
    ///
    /// # Safety
    /// `to` has room for [`Self::len`] bytes, and the buffers are readable.
    pub(crate) unsafe fn copy_to(&self, to: *mut u8) {
        let mut offset = 0;
        for iov in self.iov().iter().filter(|iov| iov.iov_len != 0) {
            // SAFETY: as this function.
            unsafe {
                std::ptr::copy_nonoverlapping(iov.iov_base.cast(), to.add(offset), iov.iov_len);
            }
            offset += iov.iov_len;
        }
    }
}

/// Storage for the vectors of a [`LocalIov`] that covers a byte range of another one.
#[derive(Debug)]
pub(crate) struct LocalRange {
    iov: [iovec; MAX_IOV],
    desc: [Desc; MAX_IOV],
}

impl Default for LocalRange {
    fn default() -> Self {
        Self {
            iov: [buffer(std::ptr::null(), 0); MAX_IOV],
            desc: [Desc::NULL; MAX_IOV],
        }
    }
}

impl LocalRange {
    /// The `len` bytes from `start` on, or fewer if the buffers end before.
    pub(crate) fn of(&mut self, whole: &LocalIov<'_>, start: usize, len: usize) -> LocalIov<'_> {
        let (mut skip, mut left, mut count) = (start, len, 0);
        for (index, iov) in whole.iov().iter().enumerate() {
            let skipped = skip.min(iov.iov_len);
            let taken = (iov.iov_len - skipped).min(left);
            skip -= skipped;
            left -= taken;
            if taken == 0 || count == MAX_IOV {
                continue;
            }
            self.iov[count] = buffer(iov.iov_base.wrapping_byte_add(skipped), taken);
            self.desc[count] = whole.desc(index);
            count += 1;
        }
        LocalIov::borrowed(&self.iov[..count], &self.desc[..count])
    }
}

/// An `iovec` for a buffer that is only read.
#[inline]
pub(crate) fn buffer(buf: *const c_void, len: usize) -> iovec {
    iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }
}
