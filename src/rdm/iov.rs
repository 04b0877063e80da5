//! The buffers of an operation, which the processor copies from or to, or a READ reads.

#![allow(unsafe_code, reason = "copies from and to buffers of the application")]

use crate::errno::{FiErrno, Result};
use crate::initiator::{LocalIov, refusal};
use crate::verbs::RemoteAddr;

/// Maximum number of buffers of an operation.
pub(super) const MAX_IOV: usize = 4;

/// A buffer of the application.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Buffer {
    addr: usize,
    len: usize,
}

impl Buffer {
    #[inline(always)]
    fn of(iov: &libc::iovec) -> Self {
        Self {
            addr: iov.iov_base.expose_provenance(),
            len: if iov.iov_base.is_null() {
                0
            } else {
                iov.iov_len
            },
        }
    }

    pub(super) fn iovec(&self) -> libc::iovec {
        libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(self.addr),
            iov_len: self.len,
        }
    }

    /// The address in a registration of the buffer, for the peer.
    pub(super) const fn remote_addr(&self) -> RemoteAddr {
        RemoteAddr::new(self.addr as u64)
    }
}

/// The buffers of one operation. The application keeps them valid until the operation completes,
/// and does not change the buffers of a receive before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Iov {
    buffers: [Buffer; MAX_IOV],
    len: usize,
}

impl Iov {
    /// # Errors
    /// `EINVAL`: more than [`MAX_IOV`] buffers.
    pub(super) fn new(local: &LocalIov<'_>) -> Result<Self> {
        if let [only] = local.iov() {
            return Ok(Self::single_buffer(only));
        }
        let mut this = Self::default();
        if local.count() > MAX_IOV {
            return Err(FiErrno::EINVAL);
        }
        for (buffer, iov) in this.buffers.iter_mut().zip(local.iov()) {
            *buffer = Buffer::of(iov);
            this.len = this.len.saturating_add(buffer.len);
        }
        Ok(this)
    }

    /// The buffers of a send, or of RMA. A receive may have buffers at NULL, which have length 0.
    ///
    /// # Errors
    /// `EINVAL`: more than [`MAX_IOV`] buffers, or a buffer at NULL with a length.
    pub(super) fn of_transfer(local: &LocalIov<'_>) -> Result<Self> {
        let this = Self::new(local)?;
        match this.len == local.len() {
            true => Ok(this),
            false => Err(refusal::null_buffer()),
        }
    }

    /// One buffer of the application.
    #[inline(always)]
    pub(super) fn single_buffer(buffer: &libc::iovec) -> Self {
        let mut this = Self::default();
        this.buffers[0] = Buffer::of(buffer);
        this.len = this.buffers[0].len;
        this
    }

    /// All buffers, in the form of C.
    #[inline]
    pub(super) fn iovecs(&self) -> [libc::iovec; MAX_IOV] {
        self.buffers.map(|buffer| buffer.iovec())
    }

    /// One buffer.
    pub(super) fn of_memory(memory: &[u8]) -> Self {
        let mut this = Self::default();
        let (addr, len) = (memory.as_ptr().expose_provenance(), memory.len());
        this.buffers[0] = Buffer { addr, len };
        this.len = len;
        this
    }

    /// Total length in bytes.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The address of the first byte.
    pub(super) const fn addr(&self) -> usize {
        self.buffers[0].addr
    }

    /// The part of `len` bytes from `offset` on.
    pub(super) fn part(&self, offset: usize, len: usize) -> Self {
        let mut part = Self::default();
        let (mut skip, mut left) = (offset, len);
        for (to, from) in part.buffers.iter_mut().zip(&self.buffers) {
            let skipped = skip.min(from.len);
            skip -= skipped;
            to.addr = from.addr + skipped;
            to.len = (from.len - skipped).min(left);
            left -= to.len;
        }
        part.len = len - left;
        part
    }

    /// The only buffer that is not empty. `None`: there are several, or none.
    pub(super) fn single(&self) -> Option<&Buffer> {
        let mut buffers = self.buffers.iter().filter(|buffer| buffer.len != 0);
        let first = buffers.next()?;
        buffers.next().is_none().then_some(first)
    }

    /// The bytes from `offset` on that lie in one buffer, at most `len`. `None`: there are none.
    pub(super) fn piece(&self, offset: usize, len: usize) -> Option<Buffer> {
        let mut skip = offset;
        for buffer in &self.buffers {
            if skip < buffer.len {
                return Some(Buffer {
                    addr: buffer.addr + skip,
                    len: (buffer.len - skip).min(len),
                });
            }
            skip -= buffer.len;
        }
        None
    }

    /// Calls `each` with the buffers of the bytes from `offset` on, at most `len`, and with the
    /// place of each in this range.
    #[inline]
    fn range(&self, offset: usize, len: usize, mut each: impl FnMut(usize, usize, usize)) {
        let (mut skip, mut done) = (offset, 0);
        for buffer in &self.buffers {
            let skipped = skip.min(buffer.len);
            skip -= skipped;
            let part = (buffer.len - skipped).min(len - done);
            if part != 0 {
                each(buffer.addr + skipped, done, part);
            }
            done += part;
            if done == len {
                return;
            }
        }
    }

    /// Copies the bytes from `offset` on to `to`; the operation has at least so many.
    ///
    /// # Safety
    /// The application's buffers are readable.
    #[inline]
    pub(super) unsafe fn read(&self, offset: usize, to: &mut [u8]) {
        debug_assert!(offset + to.len() <= self.len);
        let at = to.as_mut_ptr();
        self.range(offset, to.len(), |addr, place, len| {
            let from = std::ptr::with_exposed_provenance::<u8>(addr);
            // SAFETY: the caller promises the buffer; `range` stays within `to`, which is the
            // engine's own memory.
            unsafe { std::ptr::copy_nonoverlapping(from, at.add(place), len) };
        });
    }

    /// Copies `from` to the bytes from `offset` on, as far as the buffers reach. Returns the number
    /// of copied bytes.
    ///
    /// # Safety
    /// The application's buffers are writable.
    #[inline]
    pub(super) unsafe fn write(&self, offset: usize, from: &[u8]) -> usize {
        // SAFETY: the caller promises the buffers; the slice is readable.
        unsafe { self.write_from(offset, from.as_ptr(), from.len()) }
    }

    /// As [`Self::write`], from memory that a hostile process may change.
    ///
    /// # Safety
    /// The application's buffers are writable, and `len` bytes at `from` are readable.
    #[inline]
    pub(super) unsafe fn write_from(&self, offset: usize, from: *const u8, len: usize) -> usize {
        let len = len.min(self.len.saturating_sub(offset));
        let bytes = from;
        self.range(offset, len, |addr, place, len| {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(addr);
            // SAFETY: the caller promises both; `range` stays within `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.add(place), to, len) };
        });
        len
    }

    /// The first byte, if the first buffer has at least `len` bytes.
    #[inline]
    pub(super) fn first(&self, len: usize) -> Option<*mut u8> {
        let Buffer { addr, len: room } = self.buffers[0];
        (len <= room).then(|| std::ptr::with_exposed_provenance_mut(addr))
    }

    /// The first byte and the length, if the bytes are in the first buffer.
    #[inline]
    pub(super) const fn in_one(&self) -> Option<(*const u8, usize)> {
        let Buffer { addr, len, .. } = self.buffers[0];
        if len == self.len {
            Some((std::ptr::with_exposed_provenance(addr), len))
        } else {
            None
        }
    }

    /// Writes the buffers that are not empty to a list. Returns their number.
    pub(super) fn list(&self, to: &mut [libc::iovec]) -> usize {
        let used = self.buffers.iter().filter(|buffer| buffer.len != 0);
        let mut count = 0;
        for (to, from) in to.iter_mut().zip(used) {
            *to = libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(from.addr),
                iov_len: from.len,
            };
            count += 1;
        }
        count
    }

    /// Copies the bytes of `from` to these buffers, as far as both reach; they may overlap.
    /// Returns the number of copied bytes.
    ///
    /// # Safety
    /// The application's buffers are readable and writable.
    pub(super) unsafe fn copy_from(&self, from: &Self) -> usize {
        let len = self.len.min(from.len);
        from.range(0, len, |addr, place, part| {
            let source = std::ptr::with_exposed_provenance::<u8>(addr);
            self.range(place, part, |to, offset, len| {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                // SAFETY: the caller promises the buffers of both.
                unsafe { std::ptr::copy(source.add(offset), to, len) };
            });
        });
        len
    }
}

/// Copies a payload: one of at most 16 bytes with two moves, because a call of `memcpy` costs more
/// than such a copy.
///
/// # Safety
/// As `copy_nonoverlapping` of `len` bytes. A hostile peer may write the source during the copy.
#[inline(always)]
pub(super) unsafe fn copy_short(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller promises `len` bytes; both moves of the second arm lie inside them.
    unsafe {
        match len {
            8..=16 => {
                let (first, last) = (from.cast::<u64>(), from.add(len - 8).cast::<u64>());
                let (first, last) = (first.read_unaligned(), last.read_unaligned());
                to.cast::<u64>().write_unaligned(first);
                to.add(len - 8).cast::<u64>().write_unaligned(last);
            }
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iov(buffers: &[&mut [u8]]) -> Iov {
        let mut this = Iov::default();
        for (to, from) in this.buffers.iter_mut().zip(buffers) {
            *to = Buffer {
                addr: from.as_ptr().expose_provenance(),
                len: from.len(),
            };
            this.len += from.len();
        }
        this
    }

    #[test]
    fn parts_of_several_buffers() {
        let mut buffers = [vec![1, 2, 3], vec![], vec![4, 5], vec![6, 7, 8]];
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let all = iov(&slices);
        assert_eq!(all.len(), 8);
        for offset in 0..=8 {
            for len in 0..=8 - offset {
                let mut bytes = vec![0; len];
                // SAFETY: the buffers live through the test.
                unsafe { all.read(offset, &mut bytes) };
                let want: Vec<u8> = (offset as u8 + 1..).take(len).collect();
                assert_eq!(bytes, want);
                let part = all.part(offset, len);
                assert_eq!(part.len(), len);
                // SAFETY: as above.
                unsafe { part.read(0, &mut bytes) };
                assert_eq!(bytes, want);
                // pieces of one buffer each
                let mut found = Vec::new();
                while found.len() < len
                    && let Some(piece) = all.piece(offset + found.len(), len - found.len())
                {
                    assert!(piece.len != 0);
                    // SAFETY: as above.
                    let bytes = unsafe {
                        let at = std::ptr::with_exposed_provenance::<u8>(piece.addr);
                        std::slice::from_raw_parts(at, piece.len)
                    };
                    found.extend_from_slice(bytes);
                }
                assert_eq!(found, want);
                let parts = part.buffers.iter().filter(|buffer| buffer.len != 0);
                assert_eq!(part.single().is_some(), parts.count() == 1);
            }
        }
        assert!(all.piece(8, 1).is_none());
        // SAFETY: as above.
        assert_eq!(unsafe { all.write(6, &[9, 9, 9, 9]) }, 2);
        assert_eq!(slices[3], [6, 9, 9]);
        let (mut one, mut two) = ([0; 4], [0; 9]);
        let to = iov(&[&mut one[..], &mut two[..]]);
        // SAFETY: as above.
        assert_eq!(unsafe { to.copy_from(&all) }, 8);
        assert_eq!((one, &two[..5]), ([1, 2, 3, 4], &[5, 6, 9, 9, 0][..]));
        slices.clear();
    }
}
