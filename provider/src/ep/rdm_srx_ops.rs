//! The calls of shared receive contexts of endpoints with many peers (`fi_srx_context(3)`), except
//! for those that transfer data.

use std::ffi::{c_int, c_void};

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Flags;
use weft::rdm::{Directed, SharedRx, SharedRxConfig};

use crate::data::{msg, tagged};
use crate::domain::Domain;
use crate::ep::control::{Cancel, cancel};
use crate::ep::opt;
use crate::ep::rdm_srx::RdmSrx;
use crate::ffi::fid::{Kind, Object, close, header, object, on};
use crate::ffi::log::refused;
use crate::ffi::stub;
use crate::getinfo;

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<RdmSrx>),
    // No bind: completions go to the completion queues of the endpoints (fi_endpoint(3)).
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_ep> = stub::ep::<FI_ENOSYS>(fi_ops_ep {
    cancel: Some(cancel::<RdmSrx>),
    getopt: Some(opt::getopt_rdm_srx),
    setopt: Some(opt::setopt_rdm_srx),
    ..stub::ep_base::<FI_ENOSYS>()
});
static CM: fi_ops_cm = stub::cm::<FI_ENOSYS>();
static RMA: fi_ops_rma = stub::rma::<FI_ENOSYS>();
static ATOMIC: fi_ops_atomic = stub::atomic::<FI_ENOSYS>();
static COLLECTIVE: fi_ops_collective = stub::collective::<FI_ENOSYS>();

static MSG: fi_ops_msg = msg::receive_ops::<RdmSrx>(stub::msg::<FI_ENOSYS>());
static TAGGED: fi_ops_tagged = tagged::receive_ops::<RdmSrx>(stub::tagged::<FI_ENOSYS>());

// SAFETY: `fid_ep` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for RdmSrx {
    type C = fid_ep;
    const CLASS: usize = FI_CLASS_SRX_CTX;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_ep) {
        stub::closed::retire_ep(c);
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
        let object = create(domain, attr, context)?;
        // SAFETY: not NULL; the object starts with its fid.
        unsafe { *out = object };
        Ok(0)
    })
}

fn create(
    domain: &Object<Domain>,
    attr: Option<&fi_rx_attr>,
    context: *mut c_void,
) -> Result<*mut fid_ep> {
    let config = config_of(domain, attr)?;
    let user = domain.users.add()?;
    let engine = SharedRx::open(&domain.engine, config)?;
    let object = Object::open(
        fid_ep {
            fid: header::<RdmSrx>(context),
            ops: (&raw const OPS.base).cast_mut(),
            cm: (&raw const CM).cast_mut(),
            msg: (&raw const MSG).cast_mut(),
            rma: (&raw const RMA).cast_mut(),
            tagged: (&raw const TAGGED).cast_mut(),
            atomic: (&raw const ATOMIC).cast_mut(),
            collective: (&raw const COLLECTIVE).cast_mut(),
        },
        RdmSrx {
            engine,
            _domain: user,
        },
    );
    Ok(object.as_ptr().cast())
}

/// The configuration that the attributes request.
///
/// # Errors
/// `EINVAL`: more than endpoints with many peers have.
fn config_of(domain: &Domain, attr: Option<&fi_rx_attr>) -> Result<SharedRxConfig> {
    let ep = &getinfo::RDM;
    let limits = getinfo::RxLimits::many_peers(domain.engine.device())?;
    let ((size, default), iov_limit) = (limits.size, limits.iov_limit);
    let Some(attr) = attr else {
        return Ok(SharedRxConfig {
            size: default,
            op_flags: Flags::empty(),
            directed: Directed::ALL,
        });
    };
    let caps = ep.primary_caps | ep.rx_modifiers | ep.rx_secondary | getinfo::DOMAIN_CAPS;
    let caps = caps & !getinfo::later_caps(domain.api_version);
    let (too_many, reason) = if attr.op_flags & !ep.rx_op_flags != 0 {
        (true, "op_flags")
    } else if attr.msg_order & !ep.msg_order != 0 {
        (true, "msg_order")
    } else if attr.caps & !caps != 0 {
        (true, "caps")
    } else if attr.size > size {
        (true, "size")
    } else {
        (attr.iov_limit > iov_limit, "iov_limit")
    };
    if too_many {
        let reason = format!("{reason} of a shared receive context");
        return Err(refused!(FI_LOG_EP_CTRL, EINVAL, "{reason}"));
    }
    Ok(SharedRxConfig {
        size: if attr.size == 0 { default } else { attr.size },
        op_flags: Flags::from_bits_retain(attr.op_flags),
        directed: match attr.caps {
            0 => Directed::ALL,
            caps => getinfo::directed(caps),
        },
    })
}

impl Cancel for RdmSrx {
    fn cancel(&self, context: usize) -> Result<()> {
        self.engine.cancel(context)
    }
}
