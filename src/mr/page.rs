//! Rounding to pages of the system.

#![allow(unsafe_code, reason = "sysconf(3)")]

use std::sync::LazyLock;

/// The page size in bytes.
static SIZE: LazyLock<u64> = LazyLock::new(|| {
    // SAFETY: `sysconf` takes no pointers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // page sizes are powers of two; the rounding only covers a failing `sysconf`
    u64::try_from(size).map_or(4096, |size| size.max(1).next_power_of_two())
});

/// The address of the page of a byte.
pub(super) fn floor(addr: u64) -> u64 {
    addr & !(*SIZE - 1)
}

/// The end of the last page of a range that ends at `end`; `None` beyond the address space.
pub(super) fn ceil(end: u64) -> Option<u64> {
    end.checked_next_multiple_of(*SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_those_that_the_kernel_maps() {
        let size = ceil(1).unwrap();
        for (addr, first, end) in [
            (0, 0, 0),
            (1, 0, size),
            (size - 1, 0, size),
            (size, size, size),
            (size + 1, size, 2 * size),
        ] {
            assert_eq!((floor(addr), ceil(addr)), (first, Some(end)), "{addr}");
        }
        assert_eq!(ceil(u64::MAX), None);
    }
}
