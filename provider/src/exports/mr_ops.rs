//! `struct weft_mr_ops`, the table that `fi_open_ops(3)` of a domain returns for the name
//! `weft_mr_ops`. Declarations only: programs in Rust may include this file unchanged.

use std::ffi::{c_char, c_int, c_void};

use libfabric_sys::{fid, fid_domain, fid_mem_monitor, fid_mr};

/// Advice of weft_mr_ops.advise: make pages present for reading.
pub const WEFT_ADVISE_PREFETCH: u32 = 0;
/// Advice of weft_mr_ops.advise: make pages present for writing.
pub const WEFT_ADVISE_PREFETCH_WRITE: u32 = 1;
/// Advice of weft_mr_ops.advise: map pages that are present in the device, without page faults.
pub const WEFT_ADVISE_PREFETCH_NO_FAULT: u32 = 2;
/// Flag of weft_mr_ops.advise: return after the advice has taken effect, with its errors.
pub const WEFT_ADVISE_FLUSH: u32 = 1;

/// Flag of weft_mr_attr.map_flags: fail unless the memory can be mapped at addr.
pub const WEFT_MAP_FIXED: u64 = 1;

/// Length in bytes of a handle from weft_mr_ops.mr_export. Later releases may have longer handles.
pub const WEFT_MR_HANDLE_SIZE: usize = 48;

/// Attributes of memory that the provider allocates or imports: its mapping and its registration.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_mr_attr {
    /// Size of this structure in bytes; the caller sets it.
    pub size: usize,
    /// Access rights, as for fi_mr_reg(3).
    pub access: u64,
    /// Requested key, as for fi_mr_reg(3).
    pub requested_key: u64,
    /// Flags, as for fi_mr_reg(3).
    pub flags: u64,
    /// NULL, or a hint for the address of the memory: any address in its first page. With
    /// WEFT_MAP_FIXED the address of a page.
    pub addr: *mut c_void,
    /// WEFT_MAP_FIXED, or 0.
    pub map_flags: u64,
    /// Context of the region.
    pub context: *mut c_void,
}

/// A range of bytes of a region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_mr_range {
    /// The region: open, and of the same device.
    pub mr: *mut fid_mr,
    /// Virtual address of the first byte, also if the domain is without FI_MR_VIRT_ADDR.
    pub addr: u64,
    /// Length in bytes.
    pub len: usize,
}

/// Operations beyond fi_mr(3), from fi_open_ops(&domain->fid, WEFT_MR_OPS, 0, (void **) &ops,
/// NULL). The table serves every domain and is valid while the provider is loaded. All operations
/// are thread safe and return 0 or a negative errno of fi_errno(3). Outputs are written on success
/// only, except for size of mr_export. Later releases append members: see WEFT_HAS_OP.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_mr_ops {
    /// Size of this table in bytes.
    pub size: usize,
    /// ibv_advise_mr(3) with the advice, the flags and the ranges as given. Ranges of more than 1
    /// GiB are passed to the device as several. May block until the pages have been read from
    /// storage.
    ///
    /// -FI_EINVAL: no open domain or region, a region of another device, an unknown flag, or no
    /// range.
    /// -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
    /// -FI_EOPNOTSUPP: an unknown advice, or a device without this verb or without on-demand
    /// paging.
    /// -FI_ENOENT: a region that is not on demand.
    /// -FI_EPERM: WEFT_ADVISE_PREFETCH_WRITE for a region without write access, or a region of
    /// another domain.
    /// -FI_EFAULT: a range outside its region; with WEFT_ADVISE_FLUSH, memory that is not mapped.
    /// These are the errors of most drivers; other errors of the device are returned unchanged.
    pub advise: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            advice: u32,
            flags: u32,
            ranges: *const weft_mr_range,
            count: usize,
        ) -> c_int,
    >,
    /// Allocates memory that processes can share, and registers it as fi_mr_reg(3) does. The memory
    /// is zeros with all pages present, huge ones if the kernel permits them for shared memory. It
    /// is mapped writable for every access. Blocks while the kernel clears the pages.
    ///
    /// -FI_EINVAL: no open domain, len is 0, addr or mr is NULL, or an invalid attribute.
    /// -FI_EBADFLAGS: an unknown bit in flags or map_flags.
    /// -FI_EADDRINUSE: WEFT_MAP_FIXED, and memory is mapped at the address.
    /// -FI_ENOMEM: among others, len exceeds the memory that is available. -FI_EMFILE; and those
    /// of fi_mr_reg(3).
    pub mr_alloc: Option<
        unsafe extern "C" fn(
            domain: *mut fid_domain,
            len: usize,
            attr: *const weft_mr_attr,
            addr: *mut *mut c_void,
            mr: *mut *mut fid_mr,
        ) -> c_int,
    >,
    /// Closes a region of mr_alloc or mr_import, as fi_close(3) does, which may be called instead.
    /// Unmaps the memory in this process; it is freed when no process has it mapped.
    ///
    /// -FI_EINVAL: not an open region of mr_alloc or mr_import.
    /// -FI_EBUSY: the region has sub-regions, and nothing has changed; or an access of a peer or an
    /// operation of this process is under way, and the call can be repeated.
    pub mr_free: Option<unsafe extern "C" fn(mr: *mut fid_mr) -> c_int>,
    /// Makes a handle with which processes of the same user can import the memory with this access
    /// or less, until the region is closed. size is the length of the buffer, and is set to the
    /// length of the handle. Equal access returns the same handle.
    ///
    /// -FI_ETOOSMALL: the buffer is too small; size is set.
    /// -FI_EINVAL: no open region, unknown access, or handle or size is NULL.
    /// -FI_EACCES: access that the region does not have.
    /// -FI_EOPNOTSUPP: not a region of mr_alloc or mr_import. -FI_EMFILE, -FI_ENOMEM.
    pub mr_export: Option<
        unsafe extern "C" fn(
            mr: *mut fid_mr,
            access: u64,
            handle: *mut c_void,
            size: *mut usize,
        ) -> c_int,
    >,
    /// Maps the memory of a handle, of this or another process, and registers it. The access must
    /// have been granted by mr_export; the memory is mapped writable if it contains FI_RECV,
    /// FI_READ or FI_REMOTE_WRITE. len, unless NULL, is set to the length of the memory in bytes.
    ///
    /// -FI_EINVAL: no open domain, not a handle (truncated or changed), addr or mr is NULL, or an
    /// invalid attribute.
    /// -FI_EBADFLAGS: an unknown bit in flags or map_flags.
    /// -FI_ENOENT: the exported region is closed, its process has ended, or the handle is forged.
    /// -FI_EACCES: access that was not granted, or a process whose files this one may not open.
    /// -FI_EADDRINUSE: WEFT_MAP_FIXED, and memory is mapped at the address.
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
    /// Opens an XRC domain (ibv_open_xrcd(3)): of the file at path; with path NULL, of the file
    /// that the descriptor fd refers to; with fd negative too, a private one. All processes that
    /// open the same file on a device get the same domain, which exists until the last of them has
    /// closed it. oflags: O_CREAT creates the domain, and the file at path, if it does not exist;
    /// O_EXCL refuses an existing domain.
    ///
    /// -FI_EOPNOTSUPP: the device has no XRC.
    /// -FI_EAGAIN: no process has the domain open, and O_CREAT is not given.
    /// -FI_EINVAL: a process has the domain open, and O_EXCL is given; other flags; both path and
    /// fd; xrcd is NULL; or no open domain.
    /// -FI_EBADF: fd is not a descriptor. -FI_EBUSY: soft0 could not get the lock of its XRC
    /// domains for 5 s.
    /// -FI_ENOENT and others of open(2). -FI_ENOMEM.
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
    /// Closes an XRC domain, as fi_close(3) does. -FI_EINVAL: not open. -FI_EBUSY: this process has
    /// a queue pair or shared receive queue in it.
    pub xrcd_close: Option<unsafe extern "C" fn(xrcd: *mut fid) -> c_int>,
    /// The device's number of pages of a region that advise and fi_mr_refresh(3) have prefetched
    /// since it was enabled. Each request counts each page, also one that was present. Pages that a
    /// transfer has faulted in are not counted.
    ///
    /// -FI_EINVAL: no open region, or pages is NULL.
    /// -FI_EOPBADSTATE: a region that is not enabled, or not registered yet.
    /// -FI_EOPNOTSUPP: a region that is not on demand, or a device without a count that verbs can
    /// read: only soft0 has one. mlx5 has it as page_prefetch of `rdma statistic show mr`.
    pub mr_prefetched: Option<unsafe extern "C" fn(mr: *mut fid_mr, pages: *mut u64) -> c_int>,
    /// Uses a memory monitor of the program, instead of userfaultfd(2), to detect changes of memory
    /// for the domain's cache of local registrations. The monitor is libfabric's (rdma/fi_ext.h):
    /// fid.fclass is FI_CLASS_MEM_MONITOR, export_ops has all five functions, import_ops is NULL
    /// for the first domain, and fid.ops is set if it is NULL. Must be called before an
    /// endpoint of the domain is enabled. Several domains may have the same monitor.
    ///
    /// On success import_ops->notify is set, and stays valid after the last domain is closed. Any
    /// thread may call it at any time and for any range, also from the functions of export_ops, but
    /// not from a signal handler. No operation that is posted after its return uses a cached
    /// registration that overlaps the range. fi_close(&monitor->fid) returns -FI_EBUSY while a
    /// domain has the monitor, and has no other effect.
    ///
    /// start is called with the first domain, and stop when the last one is closed; after stop the
    /// monitor may be freed. subscribe and unsubscribe get whole pages. Each subscription is
    /// unsubscribed once, at the latest when the domain is closed; a range can be subscribed again
    /// before that, so the monitor must count. valid gets a range as it was subscribed, before each
    /// use of its registration, and must not block or allocate. These three are called with an
    /// endpoint's lock held: they must not wait for another thread that uses the domain, and must
    /// not call libfabric. A range that cannot be subscribed is registered for each operation. In a
    /// forked child no function is called and no registration is cached.
    ///
    /// -FI_EINVAL: no open domain, not such a monitor, or a function is missing.
    /// -FI_EBUSY: the domain has a monitor, or an endpoint of it has been enabled, or a shared
    /// receive context for FI_EP_MSG opened; or another library has imported the monitor.
    /// -FI_EAGAIN: another thread is starting or stopping the monitor.
    /// -FI_EOPNOTSUPP: the domain caches no registrations: it has FI_MR_LOCAL, the device needs no
    /// registrations, or the parameters give the cache no room. FI_MR_CACHE_MONITOR=disabled is
    /// about the provider's own monitor, and permits this call.
    /// -FI_ENOSYS: forks cannot be detected. -FI_ENOSPC: the process has 64 caches. Those of start.
    pub monitor_import: Option<
        unsafe extern "C" fn(domain: *mut fid_domain, monitor: *mut fid_mem_monitor) -> c_int,
    >,
}
