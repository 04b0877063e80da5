//! `struct weft_mr_ops`: what `fi_open_ops` of a domain gives for the name `weft_mr_ops`. Declarations only, which programs
//! in Rust may include as they are.

use std::ffi::c_int;

use libfabric_sys::{fid_domain, fid_mr};

/// Advice of weft_mr_ops.advise: make pages present, for reading.
pub const WEFT_ADVISE_PREFETCH: u32 = 0;
/// Advice: make pages present, for writing.
pub const WEFT_ADVISE_PREFETCH_WRITE: u32 = 1;
/// Advice: tell the device of pages that are present, and fault none in.
pub const WEFT_ADVISE_PREFETCH_NO_FAULT: u32 = 2;
/// Flag of weft_mr_ops.advise: return when it is done, with the errors of doing it.
pub const WEFT_ADVISE_FLUSH: u32 = 1;

/// Bytes of a region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_mr_range {
    /// The region: open, and of the same device.
    pub mr: *mut fid_mr,
    /// The virtual address of the first byte, whatever the form of the domain's regions.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
}

/// Calls beside those of fi_mr(3), from fi_open_ops(&domain->fid, WEFT_MR_OPS, 0, (void **) &ops, NULL). The table lives
/// as long as the provider is loaded and serves every domain. All calls are thread safe and return 0 or a negative errno
/// of fi_errno(3); outputs are written on success only. Later releases append members: see WEFT_HAS_OP.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_mr_ops {
    /// Bytes of this table.
    pub size: usize,
    /// ibv_advise_mr(3) with the advice, the flags and the ranges as they are. Ranges of more than 1 GiB go to the device in
    /// parts. May block for as long as reading the pages takes.
    ///
    /// -FI_EINVAL: no open domain or region, a region of another device, an unknown flag; no ranges.
    /// -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
    /// -FI_EOPNOTSUPP: an unknown advice; the device has no such call, or no on-demand paging.
    /// -FI_ENOENT: a region that is not on demand.
    /// -FI_EPERM: WEFT_ADVISE_PREFETCH_WRITE of a region that nobody may write to; a region of another domain.
    /// -FI_EFAULT: with WEFT_ADVISE_FLUSH, a range outside its region, or memory that is not there.
    /// These are what most drivers answer; the device's own errors are returned as they are.
    pub advise: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            advice: u32,
            flags: u32,
            ranges: *const weft_mr_range,
            count: usize,
        ) -> c_int,
    >,
}
