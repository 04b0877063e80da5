//! Copies from and to memory of this process that may not be mapped, by `process_vm_readv(2)` and
//! `process_vm_writev(2)`: a region can contain such addresses, and then the operation fails, but
//! the process does not.

#![allow(
    unsafe_code,
    reason = "process_vm_readv(2) and process_vm_writev(2) of this process"
)]

use super::Buffer;
use crate::errno::{FiErrno, Result};
use crate::queue::event_cell::Event;

/// Buffers that the elements of one operation can lie in.
pub(super) const PIECES: usize = 8;

/// Memory of one region.
pub(super) struct Pieces {
    /// Addresses and lengths, in one buffer or in neighbours of the region's list.
    pub(super) list: [(u64, usize); PIECES],
    pub(super) count: usize,
}

impl Pieces {
    /// `None`: some of the bytes are outside the region, or in more than [`PIECES`] buffers.
    pub(super) fn of(buffers: &[Buffer], offset: u64, len: usize) -> Option<Self> {
        let this = Self::first(buffers, offset, len);
        let covered: usize = this.list.iter().map(|(_, len)| len).sum();
        (covered == len && len != 0).then_some(this)
    }

    /// The first [`PIECES`] pieces of the bytes, as far as they are in the region.
    pub(super) fn first(buffers: &[Buffer], mut offset: u64, mut left: usize) -> Self {
        let mut this = Self {
            list: [(0, 0); PIECES],
            count: 0,
        };
        for buffer in buffers {
            let len = buffer.len as u64;
            if offset >= len {
                offset -= len;
                continue;
            }
            // at most the rest of the elements
            let part = usize::try_from(len - offset).map_or(left, |rest| rest.min(left));
            let Some(piece) = this.list.get_mut(this.count).filter(|_| left != 0) else {
                break;
            };
            *piece = (buffer.start() + offset, part);
            (this.count, left, offset) = (this.count + 1, left - part, 0);
        }
        this
    }

    /// Copies to `local` or from it, as far as both reach. Returns the number of copied bytes, at
    /// least 1.
    ///
    /// # Safety
    /// For a read, the buffers of `local` are writable memory of the application.
    pub(super) unsafe fn exchange(&self, local: &[libc::iovec], event: Event) -> Result<usize> {
        let mut remote = [iovec(0, 0); PIECES];
        for (to, (addr, len)) in remote.iter_mut().zip(self.list) {
            *to = iovec(addr, len);
        }
        let (own, theirs) = (local.len() as u64, self.count as u64);
        let (local, remote) = (local.as_ptr(), remote.as_ptr());
        // SAFETY: for a read the caller promises the local buffers; for a write the other addresses
        // are in a region that peers may change. The kernel checks that all are mapped.
        let moved = unsafe {
            match event {
                Event::Read => libc::process_vm_readv(own_pid(), local, own, remote, theirs, 0),
                Event::Write => libc::process_vm_writev(own_pid(), local, own, remote, theirs, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => Err(FiErrno::EFAULT),
            Ok(moved) => Ok(moved),
            Err(_) => Err(FiErrno::last()),
        }
    }

    /// Reads all bytes.
    pub(super) fn read(&self, to: &mut [u8]) -> Result<()> {
        let local = iovec(to.as_mut_ptr() as u64, to.len());
        self.transfer(0, to.len(), |remote| {
            // SAFETY: the local memory is that of `to`; the kernel checks the other addresses.
            unsafe {
                libc::process_vm_readv(
                    own_pid(),
                    &raw const local,
                    1,
                    remote.as_ptr(),
                    remote.len() as u64,
                    0,
                )
            }
        })
    }

    /// Writes the bytes from `offset` on.
    pub(super) fn write(&self, from: &[u8], offset: usize) -> Result<()> {
        let local = iovec(from.as_ptr() as u64, from.len());
        self.transfer(offset, from.len(), |remote| {
            // SAFETY: the local memory is that of `from` and is only read; the other addresses are
            // in a region that peers may change, and the kernel checks that they are mapped.
            unsafe {
                libc::process_vm_writev(
                    own_pid(),
                    &raw const local,
                    1,
                    remote.as_ptr(),
                    remote.len() as u64,
                    0,
                )
            }
        })
    }

    /// Calls `call` with the memory of `len` bytes from `offset` on.
    fn transfer(
        &self,
        mut offset: usize,
        len: usize,
        call: impl Fn(&[libc::iovec]) -> isize,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let mut remote = [iovec(0, 0); PIECES];
        let (mut count, mut left) = (0, len);
        for (addr, piece) in &self.list[..self.count] {
            let skipped = offset.min(*piece);
            let part = (piece - skipped).min(left);
            offset -= skipped;
            if part != 0 {
                remote[count] = iovec(addr + skipped as u64, part);
                (count, left) = (count + 1, left - part);
            }
        }
        let moved = call(&remote[..count]);
        match usize::try_from(moved) {
            Ok(moved) if moved == len => Ok(()),
            Ok(_) => Err(FiErrno::EFAULT),
            Err(_) => Err(FiErrno::last()),
        }
    }
}

fn own_pid() -> libc::pid_t {
    std::process::id().cast_signed()
}

pub(super) fn iovec(addr: u64, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: addr as *mut std::ffi::c_void,
        iov_len: len,
    }
}
