//! Registers the buffers of a region with the device: `ibv_reg_mr(3)`, `ibv_reg_dmabuf_mr(3)`.

#![allow(unsafe_code, reason = "registers the application's memory")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rdma_core_sys as sys;

use super::segments::Segments;
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::mr::{Paging, Region};
use crate::verbs::{Mr, Pd, Rkey};

/// Registrations of a region's buffers with the device.
pub(super) enum Registered {
    /// One for each buffer, until the region ends; none if the region is unregistered.
    Fixed(Vec<Mr>),
    /// One for each run of present pages.
    Segments(Segments),
}

impl Registered {
    /// The region's rkey, if it has exactly one, and that one never changes.
    pub(super) fn only_rkey(&self) -> Option<Rkey> {
        match self {
            Self::Fixed(mrs) => mrs.first().filter(|_| mrs.len() == 1).map(Mr::rkey),
            Self::Segments(_) => None,
        }
    }
}

/// Registers the buffers of a region with these `ibv_access_flags`.
///
/// # Errors
/// Those of `ibv_reg_mr(3)`. `EFAULT` also if a page is absent that must be present. `ENOSYS`: the
/// device cannot register DMA-BUF memory; logged.
pub(super) fn reg_mr(region: &Region, pd: &Arc<Pd>, mut rights: u32) -> Result<Registered> {
    if let Some((fd, origin)) = &region.dmabuf {
        return reg_dmabuf_mr(region, pd, (fd, *origin), rights);
    }
    match region.domain().paging() {
        _ if region.memory().is_some() => {} // its pages are always present
        Paging::Pinned => {}
        Paging::OnDemand => rights |= sys::IBV_ACCESS_ON_DEMAND,
        Paging::Unregistered => return Ok(Registered::Fixed(Vec::new())),
        Paging::Refreshed { whole } => {
            let segments = Segments::new(pd, &region.buffers, rights)
                .inspect_err(|&error| explain(error, region.len()))?;
            if whole && segments.all().iter().any(|segment| segment.absent) {
                return Err(FiErrno::EFAULT);
            }
            return Ok(Registered::Segments(segments));
        }
    }
    let buffers = region.buffers.iter();
    let mrs = buffers
        .map(|buffer| {
            // SAFETY: the caller of `Region::register` promised that the memory stays valid.
            let mr = unsafe { Mr::register(pd, buffer.addr, buffer.len, rights) }
                .inspect_err(|&error| explain(error, buffer.len as u64))?;
            Ok(match region.memory() {
                Some(memory) => mr.holding(Arc::clone(memory) as _),
                None => mr,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Registered::Fixed(mrs))
}

/// As [`reg_mr`], for memory behind a DMA-BUF descriptor.
fn reg_dmabuf_mr(
    region: &Region,
    pd: &Arc<Pd>,
    (fd, origin): (&OwnedFd, u64),
    rights: u32,
) -> Result<Registered> {
    let buffers = region.buffers.iter();
    let mrs: Result<_> = buffers
        .map(|buffer| {
            let start = buffer.start();
            let from = (fd, origin.wrapping_add(start));
            Mr::register_dmabuf(pd, from, buffer.len, start, rights)
        })
        .collect();
    let mrs = mrs.map_err(|error| {
        warn_log!(
            Mr,
            "{} bytes of a dmabuf could not be registered: {error}",
            region.len()
        );
        match error {
            FiErrno::EOPNOTSUPP => FiErrno::ENOSYS,
            error => error,
        }
    });
    Ok(Registered::Fixed(mrs?))
}

/// Logs which limit to raise if memory cannot be locked, because `ENOMEM` does not name the limit.
pub(super) fn explain(error: FiErrno, len: u64) {
    if error != FiErrno::ENOMEM && error != FiErrno::EPERM {
        return;
    }
    let limit = memlock_limit().map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    warn_log!(
        Mr,
        "{len} bytes could not be registered: {error}. RLIMIT_MEMLOCK, the limit of locked memory, is {limit}: \
         raise it with 'ulimit -l', with LimitMEMLOCK= of the service, or in /etc/security/limits.conf. \
         A region with FI_MR_MMU_NOTIFY needs one registration of the device (limit max_mr) for each segment"
    );
}

/// The soft limit of locked memory in bytes; `None`: unlimited.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a writable local structure.
    let ret = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (ret == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::mr::{Access, Buffer, Dmabuf, RegionConfig};
    use crate::verbs::{devices, planted};

    /// soft0 has no DMA-BUF registrations, so they are planted.
    #[test]
    fn parts_of_dma_buf_memory_are_registered_by_its_descriptor() {
        const OFFSET: u64 = 8192;
        let device = devices(&[planted::backend()], false).remove(0);
        let domain = Domain::open(&device, DomainConfig::default()).unwrap();
        let memory = vec![0_u8; 4 * 4096];
        let start = memory.as_ptr().expose_provenance() as u64;
        let part = |from: usize, len| Buffer {
            addr: memory[from..].as_ptr().cast(),
            len,
        };
        let file = std::fs::File::open("/dev/null").unwrap();
        let whole = RegionConfig {
            buffers: &[part(0, memory.len())],
            access: Access::all(),
            dmabuf: Some(Dmabuf {
                fd: file.as_raw_fd(),
                offset: OFFSET,
            }),
            ..RegionConfig::default()
        };
        let parts = [part(4096, 100), part(12288, 4096)];
        // SAFETY: the memory outlives the regions.
        let (base, sub) = unsafe {
            let base = Region::register(domain.mr(), &whole).unwrap();
            let config = RegionConfig {
                buffers: &parts,
                access: Access::all(),
                base: Some(&base),
                requested_key: 1,
                ..RegionConfig::default()
            };
            let sub = Region::register(domain.mr(), &config).unwrap();
            (base, sub)
        };
        let expected = [
            (OFFSET, memory.len(), start),
            (OFFSET + 4096, 100, start + 4096),
            (OFFSET + 12288, 4096, start + 12288),
        ];
        assert_eq!(*planted::REGISTERED.lock(), expected);
        sub.close().unwrap();
        base.close().unwrap();
    }
}
