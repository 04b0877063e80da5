//! The functions that are `static inline` in `infiniband/verbs.h`, with the names that C gives
//! them. They dispatch through `context->ops` or the `verbs_context` that lies around it, so
//! they serve every device, independent of the table that opened it.
//!
//! All of them take live verbs objects; none blocks or allocates by itself. Calls that a device
//! does not offer return `EOPNOTSUPP` (or NULL with `errno` set to it), as in C.

use core::ffi::{c_int, c_uint};
use core::mem::{offset_of, size_of};
use core::ptr::null_mut;

use crate::bindings::*;
use crate::table::VerbsFns;

/// `IBV_ACCESS_OPTIONAL_RANGE`: access bits that a device may ignore.
const ACCESS_OPTIONAL_RANGE: c_uint = 0x3ff0_0000;

/// The extended context that contains `context`, or `None` for a device of the old ABI.
///
/// # Safety
/// `context` must be a live context.
#[inline]
pub unsafe fn verbs_get_ctx(context: *mut ibv_context) -> Option<*mut verbs_context> {
    // SAFETY: the caller promises a live context.
    let marked = unsafe { (*context).abi_compat } as usize == usize::MAX;
    // SAFETY: the mark means that the context is the last field of a `verbs_context`.
    marked.then(|| unsafe { context.byte_sub(offset_of!(verbs_context, context)) }.cast())
}

/// The entry `$op` of the extended context, if the device's structure is large enough to have it
/// and the device has set it.
macro_rules! extended_op {
    ($context:expr, $op:ident) => {{
        // SAFETY: the enclosing function's caller promises a live context. Entries are added in
        // front, so `sz` counts from the structure's end (`verbs_get_ctx_op` in verbs.h).
        unsafe {
            verbs_get_ctx($context)
                .filter(|&ctx| {
                    (*ctx).sz >= size_of::<verbs_context>() - offset_of!(verbs_context, $op)
                })
                .and_then(|ctx| (*ctx).$op)
        }
    }};
}

fn set_errno(error: c_int) {
    // SAFETY: the C library gives each thread its own errno.
    unsafe { *libc::__errno_location() = error };
}

macro_rules! inline_ops {
    ($($(#[$meta:meta])* $name:ident($owner:ident: $owner_ty:ty $(, $arg:ident: $ty:ty)*) by $field:ident;)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// As the man page of the C function: live objects of one device, and work requests
        /// that are valid chains.
        #[inline]
        pub unsafe fn $name($owner: $owner_ty $(, $arg: $ty)*) -> c_int {
            // SAFETY: the caller promises a live object, whose context is live.
            match unsafe { (*(*$owner).context).ops.$field } {
                // SAFETY: the device's own function, with the caller's arguments.
                Some(op) => unsafe { op($owner $(, $arg)*) },
                None => libc::EOPNOTSUPP,
            }
        }
    )*};
}

inline_ops! {
    /// `ibv_post_send(3)`: 0, or an errno with `bad_wr` at the first request not posted.
    ibv_post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) by post_send;
    /// `ibv_post_recv(3)`: 0, or an errno with `bad_wr` at the first request not posted.
    ibv_post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) by post_recv;
    /// `ibv_post_srq_recv(3)`: 0, or an errno with `bad_wr` at the first request not posted.
    ibv_post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) by post_srq_recv;
    /// `ibv_req_notify_cq(3)`: 0 or an errno.
    ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) by req_notify_cq;
}

/// `ibv_poll_cq(3)`: the number of completions written to `wc`, at most `num_entries`; negative
/// on failure.
///
/// # Safety
/// `cq` must be live and `wc` have room for `num_entries` elements.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller promises a live completion queue.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: the device's own function, with the caller's arguments.
        Some(op) => unsafe { op(cq, num_entries, wc) },
        None => -libc::EOPNOTSUPP,
    }
}

/// `ibv_modify_cq(3)`: 0 or an errno.
///
/// # Safety
/// `cq` must be live, `attr` valid.
pub unsafe fn ibv_modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: the caller promises a live queue, whose context is live.
    let context = unsafe { (*cq).context };
    match extended_op!(context, modify_cq) {
        // SAFETY: the device's own function, with the caller's arguments.
        Some(op) => unsafe { op(cq, attr) },
        None => libc::EOPNOTSUPP,
    }
}

/// `ibv_query_port(3)`: 0 or an errno. Fields that the device does not set are 0.
///
/// # Safety
/// `context` must be live and belong to the table `fns`; `attr` must be writable.
pub unsafe fn ibv_query_port(
    fns: &VerbsFns,
    context: *mut ibv_context,
    port_num: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller promises a writable structure; all zeros is a value of it.
    unsafe { attr.write_bytes(0, 1) };
    match extended_op!(context, query_port) {
        // SAFETY: the device's own function; it writes at most the length given.
        Some(op) => unsafe { op(context, port_num, attr, size_of::<ibv_port_attr>()) },
        // SAFETY: the old structure is a prefix of the new one.
        None => unsafe { (fns.ibv_query_port)(context, port_num, attr.cast()) },
    }
}

/// `ibv_query_device_ex(3)`: 0 or an errno. A device of the old ABI sets the part that
/// `ibv_query_device` has; the rest is 0.
///
/// # Safety
/// `context` must be live and belong to the table `fns`; `attr` must be writable.
pub unsafe fn ibv_query_device_ex(
    fns: &VerbsFns,
    context: *mut ibv_context,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: the caller promises a writable structure; all zeros is a value of it.
    unsafe { attr.write_bytes(0, 1) };
    if let Some(op) = extended_op!(context, query_device_ex) {
        // SAFETY: the device's own function; no input is a valid input.
        let ret = unsafe {
            op(
                context,
                core::ptr::null(),
                attr,
                size_of::<ibv_device_attr_ex>(),
            )
        };
        if ret != libc::EOPNOTSUPP && ret != libc::ENOSYS {
            return ret;
        }
    }
    // SAFETY: `orig_attr` is the structure that the old call fills.
    unsafe { (fns.ibv_query_device)(context, &raw mut (*attr).orig_attr) }
}

/// `ibv_query_gid_ex(3)`: 0 or an errno; `None` if the library is older than 32.
///
/// # Safety
/// `context` must be live and belong to the table `fns`; `entry` must be writable.
pub unsafe fn ibv_query_gid_ex(
    fns: &VerbsFns,
    context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
) -> Option<c_int> {
    let query = fns._ibv_query_gid_ex?;
    // SAFETY: the library's own function, with the size of the structure it may write.
    Some(unsafe {
        query(
            context,
            port_num,
            gid_index,
            entry,
            0,
            size_of::<ibv_gid_entry>(),
        )
    })
}

/// `ibv_reg_mr(3)`, as the macro of that name in verbs.h: optional access bits are passed to the
/// newer entry point only, never to an older library.
///
/// # Safety
/// `pd` must be live and belong to the table `fns`; the memory must belong to the caller as long as
/// the region exists.
pub unsafe fn ibv_reg_mr(
    fns: &VerbsFns,
    pd: *mut ibv_pd,
    addr: *mut core::ffi::c_void,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: as this function; without another iova the region starts at its address.
    unsafe { ibv_reg_mr_iova(fns, pd, addr, length, addr as u64, access) }
}

/// `ibv_reg_mr_iova(3)`: registers `length` bytes at `addr` as `iova` onwards. NULL with `errno`
/// on failure.
///
/// # Safety
/// As [`ibv_reg_mr`].
pub unsafe fn ibv_reg_mr_iova(
    fns: &VerbsFns,
    pd: *mut ibv_pd,
    addr: *mut core::ffi::c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    let plain = access & !(ACCESS_OPTIONAL_RANGE);
    if access != plain
        && let Some(reg) = fns.ibv_reg_mr_iova2
    {
        // SAFETY: the library's own function, with the caller's arguments.
        return unsafe { reg(pd, addr, length, iova, access) };
    }
    if iova == addr as u64 {
        // SAFETY: the library's own function, with the caller's arguments.
        return unsafe { (fns.ibv_reg_mr)(pd, addr, length, plain as c_int) };
    }
    match fns.ibv_reg_mr_iova {
        // SAFETY: the library's own function, with the caller's arguments.
        Some(reg) => unsafe { reg(pd, addr, length, iova, plain as c_int) },
        None => {
            set_errno(libc::EOPNOTSUPP);
            null_mut()
        }
    }
}

/// `ibv_advise_mr(3)`: 0 or an errno.
///
/// # Safety
/// `pd` must be live, `sg_list` have `num_sge` elements.
pub unsafe fn ibv_advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sge: u32,
) -> c_int {
    // SAFETY: the caller promises a live protection domain.
    let context = unsafe { (*pd).context };
    match extended_op!(context, advise_mr) {
        // SAFETY: the device's own function, with the caller's arguments.
        Some(op) => unsafe { op(pd, advice, flags, sg_list, num_sge) },
        None => libc::EOPNOTSUPP,
    }
}

macro_rules! extended_calls {
    ($($(#[$meta:meta])* $name:ident($context:ident: $context_ty:ty $(, $arg:ident: $ty:ty)*) -> *mut $ret:ty, by $field:ident;)*) => {$(
        $(#[$meta])*
        /// NULL with `errno` on failure; `EOPNOTSUPP`: the device has no such call.
        ///
        /// # Safety
        /// As the man page of the C function: a live context and valid attributes.
        pub unsafe fn $name($context: $context_ty $(, $arg: $ty)*) -> *mut $ret {
            match extended_op!($context, $field) {
                // SAFETY: the device's own function, with the caller's arguments.
                Some(op) => unsafe { op($context $(, $arg)*) },
                None => {
                    set_errno(libc::EOPNOTSUPP);
                    null_mut()
                }
            }
        }
    )*};
}

extended_calls! {
    /// `ibv_create_qp_ex(3)`.
    ibv_create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp, by create_qp_ex;
    /// `ibv_create_srq_ex(3)`.
    ibv_create_srq_ex(context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq, by create_srq_ex;
    /// `ibv_open_xrcd(3)`.
    ibv_open_xrcd(context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd, by open_xrcd;
    /// `ibv_open_qp(3)`.
    ibv_open_qp(context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp, by open_qp;
}

/// `ibv_close_xrcd(3)`: 0 or an errno.
///
/// # Safety
/// `xrcd` must be live.
pub unsafe fn ibv_close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the caller promises a live domain.
    let context = unsafe { (*xrcd).context };
    match extended_op!(context, close_xrcd) {
        // SAFETY: the device's own function.
        Some(op) => unsafe { op(xrcd) },
        None => libc::EOPNOTSUPP,
    }
}

/// `ibv_get_srq_num(3)`: 0 or an errno.
///
/// # Safety
/// `srq` must be live and `srq_num` writable.
pub unsafe fn ibv_get_srq_num(srq: *mut ibv_srq, srq_num: *mut u32) -> c_int {
    // SAFETY: the caller promises a live receive queue.
    let context = unsafe { (*srq).context };
    match extended_op!(context, get_srq_num) {
        // SAFETY: the device's own function, with the caller's arguments.
        Some(op) => unsafe { op(srq, srq_num) },
        None => libc::EOPNOTSUPP,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old_device() -> ibv_context {
        // SAFETY: all zeros is a context with no entries and no extension.
        unsafe { core::mem::zeroed() }
    }

    #[test]
    fn a_context_of_the_old_abi_has_no_extension() {
        let mut context = old_device();
        // SAFETY: `context` is live.
        assert!(unsafe { verbs_get_ctx(&raw mut context) }.is_none());
        // SAFETY: as above; no attribute is read.
        let qp = unsafe { ibv_create_qp_ex(&raw mut context, null_mut()) };
        assert!(qp.is_null());
        assert_eq!(
            std::io::Error::last_os_error().raw_os_error(),
            Some(libc::EOPNOTSUPP)
        );
    }

    #[test]
    fn an_entry_beyond_the_device_s_size_is_absent() {
        unsafe extern "C" fn advise(
            _: *mut ibv_pd,
            _: ib_uverbs_advise_mr_advice,
            _: u32,
            _: *mut ibv_sge,
            _: u32,
        ) -> c_int {
            0
        }
        // SAFETY: all zeros is a context with no entries.
        let mut ctx: verbs_context = unsafe { core::mem::zeroed() };
        ctx.context.abi_compat = usize::MAX as *mut _;
        ctx.advise_mr = Some(advise);
        ctx.sz = size_of::<verbs_context>();
        let mut pd = ibv_pd {
            context: &raw mut ctx.context,
            handle: 0,
        };
        // SAFETY: `pd` is live for both calls and no list is passed.
        unsafe {
            assert_eq!(ibv_advise_mr(&raw mut pd, 0, 0, null_mut(), 0), 0);
            (&raw mut ctx.sz)
                .write(size_of::<verbs_context>() - offset_of!(verbs_context, advise_mr) - 1);
            assert_eq!(
                ibv_advise_mr(&raw mut pd, 0, 0, null_mut(), 0),
                libc::EOPNOTSUPP
            );
        }
    }
}
