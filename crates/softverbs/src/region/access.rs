//! Checks of a registration's parameters: `ibv_reg_mr(3)`, and where the page is silent the
//! kernel's `ib_check_mr_access` and `ib_umem_odp_get`.

use rdma_core_sys::*;

use super::odp;
use crate::sys::{self, Errno, Res};

/// Access bits that the device supports.
const OFFERED: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_ZERO_BASED
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_ON_DEMAND
    | IBV_ACCESS_HUGETLB
    | IBV_ACCESS_FLUSH_GLOBAL
    | IBV_ACCESS_FLUSH_PERSISTENT;
/// Access bits that a device may ignore: `IBV_ACCESS_OPTIONAL_RANGE`.
const OPTIONAL: u32 = 0x3ff0_0000;
/// Remote access bits that need `IBV_ACCESS_LOCAL_WRITE` (11.2.8.2).
const REMOTE_WRITES: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// Memory to register, in bytes and addresses of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// The address of the first byte in work requests.
    pub(crate) iova: u64,
}

impl Range {
    /// Whether this is an implicit on-demand region of the whole address space: addr 0, length
    /// `SIZE_MAX`, iova 0.
    pub(crate) fn is_implicit(&self, access: u32) -> bool {
        access & IBV_ACCESS_ON_DEMAND != 0 && self.addr == 0 && self.len == u64::MAX
    }
}

/// Returns the access flags without the optional bits.
///
/// # Errors
/// `EOPNOTSUPP`: an access bit that the device does not support. `EINVAL`: a remote access bit that
/// needs local write, without local write.
pub(crate) fn check(access: u32) -> Res<u32> {
    let access = access & !OPTIONAL;
    if access & REMOTE_WRITES != 0 && access & IBV_ACCESS_LOCAL_WRITE == 0 {
        return Err(Errno(libc::EINVAL));
    }
    let odp = access & IBV_ACCESS_ON_DEMAND == 0 || odp::enabled();
    if access & !OFFERED == 0 && odp {
        Ok(access)
    } else {
        Err(Errno(libc::EOPNOTSUPP))
    }
}

/// Checks whether the memory can be registered with this access. Makes pages present unless the
/// region is on demand. For an on-demand region, the memory is not accessed, and the duration does
/// not depend on the length.
///
/// # Errors
/// `EINVAL`: length 0, a range that wraps, an iova with another offset in its page than the
/// address, `IBV_ACCESS_HUGETLB` for pages that are not huge or for an implicit region.
/// `EFAULT`: memory that is not mapped or not writable as requested.
pub(crate) fn check_range(range: Range, access: u32) -> Res<()> {
    let Range { addr, len, iova } = range;
    // Pages of the iova range must coincide with pages of the memory, except for a zero-based
    // region, whose offsets the device computes.
    let congruent = access & IBV_ACCESS_ZERO_BASED != 0 || sys::same_page_offset(addr, iova);
    if len == 0 || !congruent || addr.checked_add(len).is_none() || iova.checked_add(len).is_none()
    {
        return Err(Errno(libc::EINVAL));
    }
    let huge = access & IBV_ACCESS_HUGETLB != 0;
    if access & IBV_ACCESS_ON_DEMAND != 0 {
        let implicit = range.is_implicit(access);
        if implicit && (iova != 0 || huge) || huge && !sys::pages_huge(addr, len) {
            return Err(Errno(libc::EINVAL));
        }
        return Ok(());
    }
    // Memory that a device pins must be present, and writable if the access includes local write.
    let write = access & IBV_ACCESS_LOCAL_WRITE != 0;
    if sys::pages_usable(addr, len as usize, write) {
        Ok(())
    } else {
        Err(Errno(libc::EFAULT))
    }
}

/// Whether this access permits any write: `ib_access_writable` of the kernel.
pub(crate) fn writable(access: u32) -> bool {
    access & (IBV_ACCESS_LOCAL_WRITE | REMOTE_WRITES | IBV_ACCESS_MW_BIND) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_that_need_others() {
        let write = IBV_ACCESS_LOCAL_WRITE;
        assert_eq!(check(write | 1 << 20), Ok(write));
        assert_eq!(check(IBV_ACCESS_REMOTE_READ), Ok(IBV_ACCESS_REMOTE_READ));
        for remote in [IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_ATOMIC] {
            assert_eq!(check(remote), Err(Errno(libc::EINVAL)));
            assert_eq!(check(remote | write), Ok(remote | write));
        }
        assert_eq!(check(1 << 15), Err(Errno(libc::EOPNOTSUPP)));
        assert_eq!(check(1 << 30), Err(Errno(libc::EOPNOTSUPP)));
    }

    #[test]
    fn on_demand_looks_at_nothing() {
        let everything = Range {
            addr: 0,
            len: u64::MAX,
            iova: 0,
        };
        let (odp, huge) = (IBV_ACCESS_ON_DEMAND, IBV_ACCESS_HUGETLB);
        assert_eq!(check_range(everything, odp), Ok(()));
        assert_eq!(
            check_range(everything, odp | huge),
            Err(Errno(libc::EINVAL))
        );
        assert_eq!(check_range(everything, 0), Err(Errno(libc::EFAULT)));
        let nowhere = Range {
            addr: 8,
            len: 8,
            iova: 8,
        };
        assert_eq!(check_range(nowhere, odp), Ok(()));
        assert_eq!(check_range(nowhere, 0), Err(Errno(libc::EFAULT)));
        for wrong in [(8, 0, 8), (8, u64::MAX, 8), (8, 8, u64::MAX)] {
            let (addr, len, iova) = wrong;
            let range = Range { addr, len, iova };
            assert_eq!(check_range(range, odp), Err(Errno(libc::EINVAL)));
        }
    }

    #[test]
    fn names_begin_where_pages_do() {
        let memory = [0u8; 100];
        let (addr, zero) = (memory.as_ptr() as u64, IBV_ACCESS_ZERO_BASED);
        let named = |iova| Range {
            addr,
            len: 100,
            iova,
        };
        for iova in [addr, addr % 4096, addr % 4096 + (7 << 40)] {
            assert_eq!(check_range(named(iova), 0), Ok(()));
        }
        let odd = check_range(named(addr ^ 64), 0);
        assert_eq!(odd, Err(Errno(libc::EINVAL)));
        assert_eq!(check_range(named(0), zero), Ok(()));
    }

    #[test]
    fn huge_only_where_pages_are() {
        let small = vec![1u8; 3 << 21];
        let range = Range {
            addr: small.as_ptr() as u64,
            len: 100,
            iova: small.as_ptr() as u64,
        };
        let access = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB;
        assert_eq!(check_range(range, access), Err(Errno(libc::EINVAL)));
        // Without on-demand paging the hint has no effect.
        assert_eq!(check_range(range, IBV_ACCESS_HUGETLB), Ok(()));
    }
}
