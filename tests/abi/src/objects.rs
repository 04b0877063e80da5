//! The calls that are inline in libfabric's headers, on raw fids, and the objects of a connected
//! endpoint.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use libfabric_sys::*;

use crate::fabric::{Infos, getinfo};
use crate::load::Lib;

/// A slot of an ops table, which is never NULL here.
#[macro_export]
macro_rules! call {
    ($ops:expr, $slot:ident, $($arg:expr),* $(,)?) => {
        ((*$ops).$slot.expect(concat!("the slot ", stringify!($slot))))($($arg),*)
    };
}

/// `fi_close`
///
/// # Safety
/// A fid.
pub unsafe fn close<T>(object: *mut T) -> c_int {
    let object = object.cast::<fid>();
    // SAFETY: the caller's promise.
    unsafe { call!((*object).ops, close, object) }
}

/// `fi_ep_bind` and the other bind calls.
///
/// # Safety
/// Fids.
pub unsafe fn bind<T, U>(object: *mut T, other: *mut U, flags: u64) -> c_int {
    let object = object.cast::<fid>();
    // SAFETY: the caller's promise.
    unsafe { call!((*object).ops, bind, object, other.cast(), flags) }
}

/// `fi_control`
///
/// # Safety
/// A fid, and the argument of that command.
pub unsafe fn control<T>(object: *mut T, command: u32, arg: *mut c_void) -> c_int {
    let object = object.cast::<fid>();
    // SAFETY: the caller's promise.
    unsafe { call!((*object).ops, control, object, command.cast_signed(), arg) }
}

/// A fabric with a domain and one queue of each kind.
pub struct Setup {
    /// The info that the objects were opened with.
    pub info: Infos,
    /// The fabric.
    pub fabric: *mut fid_fabric,
    /// The domain.
    pub domain: *mut fid_domain,
    /// The event queue.
    pub eq: *mut fid_eq,
    /// The completion queue, of the data format.
    pub cq: *mut fid_cq,
}

/// A fid of this class from another provider.
pub fn foreign(class: usize) -> Box<fid> {
    static OPS: fi_ops = fi_ops {
        size: size_of::<fi_ops>(),
        close: None,
        bind: None,
        control: None,
        ops_open: None,
        tostr: None,
        ops_set: None,
    };
    Box::new(fid {
        fclass: class,
        context: null_mut(),
        ops: (&raw const OPS).cast_mut(),
    })
}

/// Opens a fabric.
///
/// # Safety
/// `info` is a whole `fi_info` of `lib`.
pub unsafe fn open_fabric(lib: &Lib, info: *mut fi_info) -> *mut fid_fabric {
    let mut fabric = null_mut();
    // SAFETY: the caller's promise.
    let ret = unsafe { (lib.fabric)((*info).fabric_attr, &raw mut fabric, null_mut()) };
    assert_eq!(ret, 0, "fi_fabric");
    fabric
}

/// Opens a domain.
///
/// # Safety
/// Fids of one provider.
pub unsafe fn open_domain(fabric: *mut fid_fabric, info: *mut fi_info) -> *mut fid_domain {
    let mut domain = null_mut();
    // SAFETY: the caller's promise.
    let ret = unsafe {
        call!(
            (*fabric).ops,
            domain,
            fabric,
            info,
            &raw mut domain,
            null_mut()
        )
    };
    assert_eq!(ret, 0, "fi_domain");
    domain
}

/// Opens an event queue.
///
/// # Safety
/// A fabric.
pub unsafe fn open_eq(fabric: *mut fid_fabric) -> *mut fid_eq {
    let mut attr = fi_eq_attr {
        size: 16,
        flags: FI_WRITE,
        wait_obj: FI_WAIT_UNSPEC,
        signaling_vector: 0,
        wait_set: null_mut(),
    };
    let mut eq = null_mut();
    // SAFETY: the caller's promise.
    let ret = unsafe {
        call!(
            (*fabric).ops,
            eq_open,
            fabric,
            &raw mut attr,
            &raw mut eq,
            null_mut()
        )
    };
    assert_eq!(ret, 0, "fi_eq_open");
    eq
}

/// Attributes of a completion queue.
pub fn cq_attr(format: fi_cq_format, wait_obj: fi_wait_obj) -> fi_cq_attr {
    fi_cq_attr {
        size: 64,
        flags: 0,
        format,
        wait_obj,
        signaling_vector: 0,
        wait_cond: FI_CQ_COND_NONE,
        wait_set: null_mut(),
    }
}

/// Opens a completion queue.
///
/// # Safety
/// A domain.
pub unsafe fn open_cq(domain: *mut fid_domain, mut attr: fi_cq_attr) -> *mut fid_cq {
    let mut cq = null_mut();
    // SAFETY: the caller's promise.
    let ret = unsafe {
        call!(
            (*domain).ops,
            cq_open,
            domain,
            &raw mut attr,
            &raw mut cq,
            null_mut()
        )
    };
    assert_eq!(ret, 0, "fi_cq_open");
    cq
}

/// Opens an endpoint, bound to both queues but not enabled.
///
/// # Safety
/// Objects of one provider.
pub unsafe fn open_ep(setup: &Setup, info: *mut fi_info) -> *mut fid_ep {
    let mut ep = null_mut();
    // SAFETY: the caller's promise.
    unsafe {
        let domain = setup.domain;
        let ret = call!(
            (*domain).ops,
            endpoint,
            domain,
            info,
            &raw mut ep,
            null_mut()
        );
        assert_eq!(ret, 0, "fi_endpoint");
        assert_eq!(bind(ep, setup.eq, 0), 0, "binding the event queue");
        assert_eq!(
            bind(ep, setup.cq, FI_TRANSMIT | FI_RECV),
            0,
            "binding the completion queue"
        );
    }
    ep
}

/// Registers memory.
///
/// # Safety
/// A domain, and memory that outlives the region.
pub unsafe fn register(
    domain: *mut fid_domain,
    memory: *mut u8,
    len: usize,
    access: u64,
) -> *mut fid_mr {
    let mut mr = null_mut();
    // SAFETY: the caller's promise.
    let ret = unsafe {
        call!(
            (*domain).mr,
            reg,
            &raw mut (*domain).fid,
            memory.cast(),
            len,
            access,
            0,
            0,
            0,
            &raw mut mr,
            null_mut(),
        )
    };
    assert_eq!(ret, 0, "fi_mr_reg");
    mr
}

impl Setup {
    /// Opens all objects with the result of `getinfo` for these arguments.
    ///
    /// # Panics
    /// If a call fails.
    pub fn new(
        lib: &Lib,
        node: Option<&str>,
        service: Option<&str>,
        flags: u64,
        hints: &Infos,
    ) -> Self {
        let info =
            getinfo(lib, lib.version, node, service, flags, Some(hints)).expect("fi_getinfo");
        // SAFETY: a whole fi_info, and fids as they are opened.
        unsafe {
            let fabric = open_fabric(lib, info.first());
            let domain = open_domain(fabric, info.first());
            Self {
                fabric,
                domain,
                eq: open_eq(fabric),
                cq: open_cq(domain, cq_attr(FI_CQ_FORMAT_DATA, FI_WAIT_UNSPEC)),
                info,
            }
        }
    }

    /// Closes all objects.
    ///
    /// # Panics
    /// If one is still in use.
    pub fn close(self) {
        // SAFETY: opened by `new` and closed once.
        unsafe {
            assert_eq!(close(self.cq), 0, "closing the completion queue");
            assert_eq!(close(self.domain), 0, "closing the domain");
            assert_eq!(close(self.eq), 0, "closing the event queue");
            assert_eq!(close(self.fabric), 0, "closing the fabric");
        }
    }
}
