//! How the structures differ between releases. The generated ones are those of 2.1.
//!
//! | bytes | 1.17 | 1.20 | 2.0–2.4 | 2.5–2.6.0 | main |
//! | --- | --- | --- | --- | --- | --- |
//! | `fi_domain_attr` | 192 | 200 | 208 | 224 | 232 |
//! | `fi_ep_attr` | 96 | 96 | 96 | 96 | 104 |
//! | `fi_mr_attr` | 80 | 88 | 112 | 112 | 112 |
//! | `fi_cq_attr` | 40 | 40 | 40 | 40 | 48 |
//! | `fi_cntr_attr` | 24 | 24 | 24 | 24 | 32 |
//! | `fi_cq_err_entry` | 80 | 88 | 88 | 88 | 88 |
//! | `fi_ops_av` | 64 | 88 | 88 | 88 | 96 |
//! | `fi_ops_domain` | 96 | 96 | 96 | 96 | 104 |
//! | `fi_ops_ep`, `fi_ops_cq`, `fi_ops_cntr` | 64 | 64 | 64 | 64 | 72 |
//!
//! Unchanged since 1.17: `fi_info` 120, `fi_tx_attr` 80, `fi_rx_attr` 64, `fi_fabric_attr` 32,
//! `fi_ops_msg`, `fi_ops_tagged`, `fi_ops_rma` and `fi_ops_cm` 80, `fi_ops_atomic` 112.
//!
//! A structure that the host allocated is written only up to the size that its release gave it; one
//! that the application passes is read only up to the size of the API version it asked for.

use core::ffi::c_int;

use crate::bindings::*;
use crate::consts::fi_version;

/// A table of operations with the one slot that main appends to it (`export_xpu`, `xpu_ctx`).
/// Main's inline functions call several of these slots without checking `size`, so the slots must
/// exist. Every such function takes only scalars and pointers and returns an int, and is never
/// called with effect: the slot holds a stub. `fi_ops_av` needs none: main appends `lookup2`, whose
/// inline function checks `size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct WithMainSlot<T> {
    /// The table as of 2.1; its `size` covers the whole structure.
    pub base: T,
    /// The slot that main appends.
    pub appended: unsafe extern "C" fn() -> c_int,
}

/// Bytes of `fi_domain_attr` that a library of `version` allocates. `main` distinguishes the two
/// forms of 2.6.
#[must_use]
pub const fn domain_attr_size(version: u32, main: bool) -> usize {
    if main {
        232
    } else if version >= fi_version(2, 5) {
        224
    } else if version >= fi_version(2, 0) {
        208
    } else if version >= fi_version(1, 20) {
        200
    } else {
        192
    }
}

/// Bytes of `fi_mr_attr` that an application of API `version` passes.
#[must_use]
pub const fn mr_attr_size(version: u32) -> usize {
    if version >= fi_version(2, 0) {
        112
    } else if version >= fi_version(1, 20) {
        88
    } else {
        80
    }
}

/// Bytes of `fi_cq_err_entry` that an application of API `version` passes. Before 1.5 it ended
/// before `err_data_size`, before 1.20 it ended before `src_addr`.
#[must_use]
pub const fn cq_err_entry_size(version: u32) -> usize {
    if version >= fi_version(1, 20) {
        88
    } else if version >= fi_version(1, 5) {
        80
    } else {
        core::mem::offset_of!(fi_cq_err_entry, err_data_size)
    }
}

macro_rules! sizes {
    ($($type:ty = $size:expr;)*) => { $(const _: () = assert!(size_of::<$type>() == $size);)* };
}

sizes! {
    fi_info = 120;
    fi_tx_attr = 80;
    fi_rx_attr = 64;
    fi_ep_attr = 96;
    fi_domain_attr = 208;
    fi_fabric_attr = 32;
    fi_mr_attr = 112;
    fi_cq_attr = 40;
    fi_cntr_attr = 24;
    fi_cq_err_entry = 88;
    fi_eq_err_entry = 48;
    fi_ops_av = 88;
    fi_ops_domain = 96;
    fi_ops_ep = 64;
    fi_ops_cq = 64;
    fi_ops_cntr = 64;
    fi_ops_msg = 80;
    fi_ops_tagged = 80;
    fi_ops_rma = 80;
    fi_ops_atomic = 112;
    fi_ops_cm = 80;
    WithMainSlot<fi_ops_domain> = 104;
    WithMainSlot<fi_ops_ep> = 72;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_version() {
        assert_eq!(domain_attr_size(fi_version(1, 17), false), 192);
        assert_eq!(
            domain_attr_size(fi_version(2, 1), false),
            size_of::<fi_domain_attr>()
        );
        assert_eq!(domain_attr_size(fi_version(2, 6), true), 232);
        assert_eq!(cq_err_entry_size(fi_version(1, 4)), 72);
        assert_eq!(
            cq_err_entry_size(fi_version(2, 1)),
            size_of::<fi_cq_err_entry>()
        );
        assert_eq!(mr_attr_size(fi_version(2, 0)), size_of::<fi_mr_attr>());
    }

    #[test]
    fn errno_and_flags_have_the_types_of_their_fields() {
        assert_eq!(FI_EOTHER, 256_i32);
        assert_eq!(FI_MSG | FI_RMA, 6_u64);
        assert_eq!(FI_MR_LOCAL, 4_i32);
        assert_eq!(FI_CLASS_FABRIC, 1_usize);
        assert_eq!(FI_SOCKADDR_IN, 2_u32);
    }
}
