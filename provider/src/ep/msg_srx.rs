//! Shared receive contexts of connected endpoints, `fi_srx_context(3)`: a `fid_ep` that only
//! receives can be posted to.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::msg::{LocalIov, SharedRx, SharedRxConfig};

use crate::data::msg;
use crate::data::traits::MsgReceive;
use crate::domain::Domain;
use crate::ffi::fid::{Kind, Object, User, close, header, object, on};
use crate::ffi::stub;
use crate::getinfo;

/// An open shared receive context.
pub(crate) struct Srx {
    pub(crate) engine: Arc<SharedRx>,
    _domain: User,
}

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Srx>),
    // No bind: completions go to the completion queues of the endpoints (fi_endpoint(3)).
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_ep> = stub::ep::<FI_ENOSYS>(fi_ops_ep {
    getopt: Some(getopt),
    setopt: Some(setopt),
    ..stub::ep_base::<FI_ENOSYS>()
});
static CM: fi_ops_cm = stub::cm::<FI_ENOSYS>();
static RMA: fi_ops_rma = stub::rma::<FI_ENOSYS>();
static TAGGED: fi_ops_tagged = stub::tagged::<FI_ENOSYS>();
static ATOMIC: fi_ops_atomic = stub::atomic::<FI_ENOSYS>();
static COLLECTIVE: fi_ops_collective = stub::collective::<FI_ENOSYS>();

static MSG: fi_ops_msg = msg::receive_ops::<Srx>(stub::msg::<FI_ENOSYS>());

// SAFETY: `fid_ep` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Srx {
    type C = fid_ep;
    const CLASS: usize = FI_CLASS_SRX_CTX;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_ep) {
        stub::closed::retire_ep(c);
    }
    fn finish(object: &Object<Self>) -> Result<()> {
        object.engine.await_notices();
        Ok(())
    }
}

/// `fi_srx_context(3)`. NULL selects the default attributes.
pub(crate) unsafe extern "C" fn open(
    domain: *mut fid_domain,
    attr: *mut fi_rx_attr,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a domain by the contract of fi_srx_context(3).
    let domain = unsafe { object::<Domain>(domain) };
    on(domain, |domain| {
        if out.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: NULL, or a structure of the same size in every release.
        let attr = unsafe { attr.as_ref() };
        let config = config_of(domain, attr)?;
        let user = domain.users.add()?;
        let engine = SharedRx::open(&domain.engine, config)?;
        let object = Object::open(
            fid_ep {
                fid: header::<Srx>(context),
                ops: (&raw const OPS.base).cast_mut(),
                cm: (&raw const CM).cast_mut(),
                msg: (&raw const MSG).cast_mut(),
                rma: (&raw const RMA).cast_mut(),
                tagged: (&raw const TAGGED).cast_mut(),
                atomic: (&raw const ATOMIC).cast_mut(),
                collective: (&raw const COLLECTIVE).cast_mut(),
            },
            Srx {
                engine,
                _domain: user,
            },
        );
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object.as_ptr().cast() };
        Ok(0)
    })
}

/// `fi_getopt(3)` of shared receive contexts of connected endpoints, which have no options.
unsafe extern "C" fn getopt(
    handle: *mut fid,
    _level: c_int,
    _name: c_int,
    _buf: *mut c_void,
    _len: *mut usize,
) -> c_int {
    // SAFETY: a context by the contract of fi_getopt(3).
    let srx = unsafe { object::<Srx>(handle) };
    on(srx, |_| Err(FiErrno::ENOPROTOOPT))
}

/// `fi_setopt(3)` of shared receive contexts of connected endpoints.
unsafe extern "C" fn setopt(
    handle: *mut fid,
    _level: c_int,
    _name: c_int,
    _buf: *const c_void,
    _len: usize,
) -> c_int {
    // SAFETY: a context by the contract of fi_setopt(3).
    let srx = unsafe { object::<Srx>(handle) };
    on(srx, |_| Err(FiErrno::ENOPROTOOPT))
}

/// The configuration that the attributes request.
///
/// # Errors
/// `EINVAL`: unsupported flags or orders. `ENOSYS`: the device has no shared receive queues.
fn config_of(domain: &Domain, attr: Option<&fi_rx_attr>) -> Result<SharedRxConfig> {
    let limits = getinfo::RxLimits::shared(domain.engine.device()).ok_or(FiErrno::ENOSYS)?;
    let (size, iov_limit, op_flags) = match attr {
        None => (0, 0, 0),
        Some(attr) => {
            if attr.op_flags & !getinfo::MSG.rx_op_flags != 0
                || attr.msg_order & !getinfo::MSG.msg_order != 0
            {
                return Err(FiErrno::EINVAL);
            }
            (attr.size, attr.iov_limit, attr.op_flags)
        }
    };
    let or_default = |asked: usize, default: usize| if asked == 0 { default } else { asked };
    Ok(SharedRxConfig {
        size: or_default(size, limits.size.1),
        iov_limit: or_default(iov_limit, limits.iov_limit),
        op_flags: Flags::from_bits_retain(op_flags),
        xrc: domain.xrc,
    })
}

impl MsgReceive for Srx {
    #[inline(always)]
    unsafe fn recv(
        &self,
        _: fi_addr_t,
        local: LocalIov<'_>,
        context: usize,
        flags: Option<Flags>,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of the trait.
        unsafe {
            match flags {
                None => self.engine.recv(local, context),
                Some(flags) => self.engine.recv_msg(local, context, flags),
            }
        }
    }
}
