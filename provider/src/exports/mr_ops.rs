//! `struct weft_mr_ops`: what `fi_open_ops` of a domain gives for the name `weft_mr_ops`. Declarations only, which programs
//! in Rust may include as they are.

use std::ffi::{c_char, c_int, c_void};

use libfabric_sys::{fid, fid_domain, fid_mem_monitor, fid_mr};

/// Advice of weft_mr_ops.advise: make pages present, for reading.
pub const WEFT_ADVISE_PREFETCH: u32 = 0;
/// Advice: make pages present, for writing.
pub const WEFT_ADVISE_PREFETCH_WRITE: u32 = 1;
/// Advice: tell the device of pages that are present, and fault none in.
pub const WEFT_ADVISE_PREFETCH_NO_FAULT: u32 = 2;
/// Flag of weft_mr_ops.advise: return when it is done, with the errors of doing it.
pub const WEFT_ADVISE_FLUSH: u32 = 1;

/// Flag of weft_mr_attr.map_flags: the memory is at addr, or the call fails.
pub const WEFT_MAP_FIXED: u64 = 1;

/// Bytes of a handle that weft_mr_ops.mr_export gives. Later releases may have longer ones.
pub const WEFT_MR_HANDLE_SIZE: usize = 48;

/// How memory of the provider is mapped and registered.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_mr_attr {
    /// Bytes of this structure.
    pub size: usize,
    /// The access of the region, as for fi_mr_reg(3).
    pub access: u64,
    /// The key, as for fi_mr_reg(3).
    pub requested_key: u64,
    /// The flags of fi_mr_reg(3).
    pub flags: u64,
    /// Where the memory should begin, or NULL for anywhere: a hint, of which the page counts. With WEFT_MAP_FIXED a page.
    pub addr: *mut c_void,
    /// WEFT_MAP_FIXED, or 0.
    pub map_flags: u64,
    /// The context of the region.
    pub context: *mut c_void,
}

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
    /// -FI_EFAULT: a range outside its region; with WEFT_ADVISE_FLUSH, memory that is not there.
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
    /// Allocates memory that processes can share, zeros with all pages, huge ones where the kernel has them for shared memory, and
    /// registers it as fi_mr_reg(3) does. It is mapped writable, whatever the access.
    ///
    /// -FI_EINVAL: no open domain, no bytes, an attribute that is not as described.
    /// -FI_EADDRINUSE: WEFT_MAP_FIXED, and something is at the address.
    /// -FI_ENOMEM, -FI_EMFILE; and those of fi_mr_reg(3).
    pub mr_alloc: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            len: usize,
            attr: *const weft_mr_attr,
            addr: *mut *mut c_void,
            mr: *mut *mut fid_mr,
        ) -> c_int,
    >,
    /// Closes a region of mr_alloc or mr_import as fi_close(3) does, which may be called as well. The memory is unmapped here, and
    /// ends when no process has it.
    ///
    /// -FI_EINVAL: any other region. -FI_EBUSY: there are parts of it, nothing has changed; or somebody is in the middle of an
    /// access, and the call can be repeated.
    pub mr_free: Option<unsafe extern "C" fn(mr: *mut fid_mr) -> c_int>,
    /// Makes a handle by which processes of the same user import the memory with this access or less, until the region is
    /// closed. size says how much room there is, and is set to the bytes of the handle. The same access has the same handle.
    ///
    /// -FI_ETOOSMALL: there is less room; size is set.
    /// -FI_EINVAL: no open region, unknown access. -FI_EACCES: access that the region does not have.
    /// -FI_EOPNOTSUPP: memory that is not of mr_alloc or mr_import. -FI_EMFILE, -FI_ENOMEM.
    pub mr_export: Option<
        unsafe extern "C" fn(
            mr: *mut fid_mr,
            access: u64,
            handle: *mut c_void,
            size: *mut usize,
        ) -> c_int,
    >,
    /// Maps the memory of another process's handle, or one's own, and registers it. The access is checked against what was
    /// granted; the memory is mapped writable if it has FI_RECV, FI_READ or FI_REMOTE_WRITE. len, unless NULL, is set to its bytes.
    ///
    /// -FI_EINVAL: no open domain, no handle (truncated or changed), an attribute that is not as described.
    /// -FI_ENOENT: the handle's region is closed, its process has ended, or nobody made it.
    /// -FI_EACCES: access that was not granted, or a process that this one may not look into.
    /// -FI_EADDRINUSE: WEFT_MAP_FIXED, and something is at the address.
    /// -FI_ENOMEM, -FI_EMFILE; and those of fi_mr_reg(3).
    pub mr_import: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            handle: *const c_void,
            size: usize,
            attr: *const weft_mr_attr,
            addr: *mut *mut c_void,
            len: *mut usize,
            mr: *mut *mut fid_mr,
        ) -> c_int,
    >,
    /// Opens an XRC domain (ibv_open_xrcd(3)): by the path of a file, or by a descriptor with path NULL; with fd -1 too it is one that
    /// nobody else finds. All processes that open the same file on a device get the same domain, which lives until the last one has
    /// closed it. oflags: O_CREAT makes it, and the file of a path, where there is none; O_EXCL refuses one that is there.
    ///
    /// -FI_EOPNOTSUPP: the device has no XRC. -FI_EAGAIN: nobody has it open, and O_CREAT is not given.
    /// -FI_EINVAL: somebody has it open, and O_EXCL is given; other flags; a path and a descriptor; no open domain.
    /// -FI_EBADF: no descriptor. -FI_ENOENT and others of open(2). -FI_ENOMEM, -FI_EBUSY.
    pub xrcd_open: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            path: *const c_char,
            fd: c_int,
            oflags: c_int,
            xrcd: *mut *mut fid,
            context: *mut c_void,
        ) -> c_int,
    >,
    /// Closes it, as fi_close(3) does. -FI_EINVAL: not open. -FI_EBUSY: something of this process is in it.
    pub xrcd_close: Option<unsafe extern "C" fn(xrcd: *mut fid) -> c_int>,
    /// The device's count of pages of a region that advise and fi_mr_refresh(3) have made present since it was enabled: each time
    /// that they were asked for, whether or not they were there. Pages that a transfer touches first are not among them.
    ///
    /// -FI_EINVAL: no open region, pages is NULL. -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
    /// -FI_EOPNOTSUPP: a region that is not on demand; a device whose counts verbs can't read, all but soft0. mlx5 has them as
    /// page_prefetch of `rdma statistic show mr`.
    pub mr_prefetched: Option<unsafe extern "C" fn(mr: *mut fid_mr, pages: *mut u64) -> c_int>,
    /// Lets a memory monitor of the program say when memory changes, for the registrations that the domain keeps of local buffers,
    /// instead of userfaultfd(2). The monitor is libfabric's (rdma/fi_ext.h): fid.fclass is FI_CLASS_MEM_MONITOR, export_ops has
    /// all five calls; import_ops and fid.ops are NULL the first time. To be called before the domain has an endpoint or a
    /// shared receive context. Several domains may have the same monitor.
    ///
    /// On success import_ops->notify is there, and stays valid when nothing is imported any more. It may be called by any thread at any
    /// time, but not by a signal handler, for any range; also by the calls of export_ops. What overlaps the range is used by no
    /// operation that is posted after it returns. fi_close(&monitor->fid) is -FI_EBUSY while a domain has the monitor, and does
    /// nothing else.
    ///
    /// start is called with the first domain, stop when the last one is closed; then the monitor may be freed. subscribe and
    /// unsubscribe have whole pages; each range is unsubscribed from once, the last ones when the domain is closed. A range can be
    /// subscribed to again before that, so they count. valid has a range as it was subscribed to, before each use of its
    /// registration; it must neither block nor allocate. These three are called with an endpoint's lock held: they must not wait
    /// for another thread that uses the domain, nor call libfabric. A range that can't be subscribed to is registered for each
    /// operation. In a forked child nothing is called and nothing is kept.
    ///
    /// -FI_EINVAL: no open domain, no such monitor, a call is missing. -FI_EBUSY: the domain watches memory already, or somebody
    /// else has imported the monitor. -FI_EAGAIN: another thread is starting or stopping it.
    /// -FI_EOPNOTSUPP: nothing is kept in this domain: it has FI_MR_LOCAL, the device needs no registrations, or the parameters
    /// say so. -FI_ENOSYS, -FI_ENOSPC; and what start returns.
    pub monitor_import: Option<
        unsafe extern "C" fn(domain: *mut fid_domain, monitor: *mut fid_mem_monitor) -> c_int,
    >,
}
