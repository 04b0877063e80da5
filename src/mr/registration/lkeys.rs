//! The lkeys of local buffers in a region.

use super::{InUse, Registration};
use crate::errno::{FiErrno, Result};
use crate::mr::Buffer;
use crate::verbs::{Lkey, Mr};

/// The lkeys of a region's fixed registrations; empty if the region is registered in segments.
#[derive(Debug)]
pub(super) struct Lkeys {
    /// The lkey of a region with one buffer.
    only: Option<Lkey>,
    /// The buffers of a region with several, each with its lkey.
    pub(super) buffers: Box<[(Buffer, Lkey)]>,
}

impl Lkeys {
    /// Those of the registrations of these buffers.
    pub(super) fn new(buffers: &[Buffer], mrs: &[Mr]) -> Self {
        let of_each = buffers.iter().copied().zip(mrs.iter().map(Mr::lkey));
        match mrs {
            [only] => Self {
                only: Some(only.lkey()),
                buffers: Box::default(),
            },
            _ => Self {
                only: None,
                buffers: of_each.collect(),
            },
        }
    }
}

impl Registration {
    /// The lkey of a local buffer. If a refresh may replace the registration, `hold` gets the use
    /// of it, which the caller keeps until the operation is complete.
    ///
    /// # Errors
    /// `EINVAL`: no single buffer of the region covers it.
    #[inline]
    pub(in crate::mr) fn lkey(&self, iov: &libc::iovec, hold: impl FnOnce(InUse)) -> Result<Lkey> {
        match self.lkeys.only {
            Some(lkey) => Ok(lkey),
            None => self.lkey_of_several(iov, hold),
        }
    }

    /// The lkey of these bytes. If no single buffer covers all of them: the lkey of one buffer, or
    /// 0.
    pub(in crate::mr) fn lkey_at(&self, addr: u64, len: u64) -> Lkey {
        let iov = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(addr as usize),
            iov_len: len as usize,
        };
        let any = || self.mrs.read().first().map_or(Lkey::default(), Mr::lkey);
        self.lkey(&iov, drop).unwrap_or_else(|_| any())
    }

    /// The lkey of the buffer or the segments that cover a local buffer.
    fn lkey_of_several(&self, iov: &libc::iovec, hold: impl FnOnce(InUse)) -> Result<Lkey> {
        if let Some(segments) = &self.segments {
            let (lkey, used) = segments.lkey(iov)?;
            hold(used);
            return Ok(lkey);
        }
        let (addr, len) = (iov.iov_base as u64, iov.iov_len as u64);
        let mut buffers = self.lkeys.buffers.iter();
        let covering = buffers.find(|(buffer, _)| buffer.contains(addr, len));
        covering.map(|(_, lkey)| *lkey).ok_or(FiErrno::EINVAL)
    }
}
