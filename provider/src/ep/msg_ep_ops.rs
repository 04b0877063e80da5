//! The calls of `fid_ep`, `fi_endpoint(3)`, except for those that transfer data or connect.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::sync::Arc;

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::Token;
use weft::errno::{FiErrno, Result};
use weft::flags::{Direction, Flags};
use weft::msg::{BindFlags, Endpoint, EndpointConfig, PassiveEndpoint};

use crate::addr::Format;
use crate::cq::Cq;
use crate::data::{atomic, msg, rma};
use crate::domain::Domain;
use crate::ep::bind::{bind_common, no_flags};
use crate::ep::common::EpCommon;
use crate::ep::control::{Cancel, Control, cancel, control};
use crate::ep::msg_ep::{Ep, Tables};
use crate::ep::msg_srx::Srx;
use crate::ep::{cm, opt, rdm_tables};
use crate::ffi::fid::{Kind, Object, Other, close, header, object, on};
use crate::ffi::info::View;
use crate::ffi::log::{info, refused};
use crate::ffi::param;
use crate::ffi::stub;
use crate::pep::Pep;
use crate::xrcd::Xrcd;
use crate::{connreq, getinfo};

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<Ep>),
    bind: Some(bind),
    control: Some(control::<Ep>),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_ep> = stub::ep::<FI_ENOSYS>(fi_ops_ep {
    cancel: Some(cancel::<Ep>),
    getopt: Some(opt::getopt),
    setopt: Some(opt::setopt),
    ..stub::ep_base::<FI_ENOSYS>() // contexts: scalable endpoints only; the two counts: deprecated
});

static MSG: fi_ops_msg = msg::ops::<Ep>();
/// By `FI_READ`, `FI_WRITE`: calls of capabilities that an endpoint was opened without return
/// `-FI_EOPNOTSUPP`.
static RMA: [fi_ops_rma; 4] = [
    stub::rma::<FI_EOPNOTSUPP>(),
    rma::read_ops::<Ep>(stub::rma::<FI_EOPNOTSUPP>()),
    rma::write_ops::<Ep>(stub::rma::<FI_EOPNOTSUPP>()),
    rma::ops::<Ep>(),
];
/// As above: an atomic that returns values is a read.
static ATOMIC: [fi_ops_atomic; 4] = [
    stub::atomic::<FI_EOPNOTSUPP>(),
    atomic::read_ops::<Ep>(stub::atomic::<FI_EOPNOTSUPP>()),
    atomic::write_ops::<Ep>(stub::atomic::<FI_EOPNOTSUPP>()),
    atomic::ops::<Ep>(),
];
static TAGGED: fi_ops_tagged = stub::tagged::<FI_ENOSYS>(); // FI_TAGGED is not offered
static COLLECTIVE: fi_ops_collective = stub::collective::<FI_ENOSYS>(); // nor is FI_COLLECTIVE

// SAFETY: `fid_ep` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for Ep {
    type C = fid_ep;
    const CLASS: usize = FI_CLASS_EP;
    fn ops() -> &'static fi_ops {
        &FID_OPS
    }
    fn retire(c: &mut fid_ep) {
        stub::closed::retire_ep(c);
    }
    fn finish(ep: &Object<Self>) -> Result<()> {
        if !ep.common.is_alias() {
            ep.engine.close();
        }
        Ok(())
    }
}

/// Opens an endpoint (`fi_endpoint(3)`).
///
/// # Errors
/// `EINVAL`: `info` requests more than the device has, or the domain was opened for `FI_EP_RDM`.
/// Those of the engine.
pub(super) fn open(
    domain: &Object<Domain>,
    info: View<'_, fi_info>,
    context: *mut c_void,
) -> Result<*mut fid> {
    EndpointRequest::read(domain, info)?.open(domain, context)
}

/// The origin of an endpoint.
enum Origin {
    /// The endpoint will connect.
    Connect,
    /// The endpoint will connect from the address of this passive endpoint, whose listener ends.
    Replace(Arc<PassiveEndpoint>),
    /// The endpoint answers the request of this handle.
    Answer(*mut fid),
}

impl Origin {
    /// The origin for `info->handle`. For a passive endpoint it stores its address in `src`.
    fn of(handle: *mut fid, src: &mut Option<SocketAddr>) -> Result<Self> {
        if handle.is_null() {
            return Ok(Self::Connect);
        }
        // SAFETY: not NULL, and a fid by the contract of fi_endpoint(3).
        if unsafe { (*handle).fclass } != FI_CLASS_PEP {
            return Ok(Self::Answer(handle));
        }
        // SAFETY: not NULL, and a fid by the contract of fi_endpoint(3).
        let pep = unsafe { object::<Pep>(handle)? };
        *src = Some(pep.engine.local_addr()?);
        Ok(Self::Replace(Arc::clone(&pep.engine)))
    }
}

struct EndpointRequest {
    config: EndpointConfig,
    origin: Origin,
    format: Format,
    rma_data: bool,
    tables: Tables,
}

impl EndpointRequest {
    /// Checks the info like hints, so that it cannot request more than the device has.
    fn read(domain: &Object<Domain>, info: View<'_, fi_info>) -> Result<Self> {
        if domain.rdm {
            let reason = "the domain was opened for FI_EP_RDM";
            return Err(refused!(FI_LOG_EP_CTRL, EINVAL, "{reason}"));
        }
        let terms = getinfo::check(domain.api_version, info, domain.engine.device())?;
        let xrc = getinfo::is_xrc(info);
        if xrc {
            info!(FI_LOG_EP_CTRL, "an endpoint on XRC");
        }
        let (_, auth) = getinfo::auth_keys(domain.api_version, info)?;
        let format = Format::of(info.addr_format)?.unwrap_or(Format::Sockaddr);
        let mut src = info.src(format)?;
        let dst = info.dst(format)?;
        let origin = Origin::of(info.handle, &mut src)?;
        // 0 in an info that fi_getinfo has not filled in: the default
        let limit = |given: Option<usize>, default| given.filter(|n| *n != 0).unwrap_or(default);
        Ok(Self {
            config: EndpointConfig {
                token: Token(0),
                context: 0,
                tx_size: terms.tx_size,
                rx_size: terms.rx_size,
                tx_iov_limit: limit(info.tx().map(|tx| tx.iov_limit), terms.tx_iov_limit),
                rx_iov_limit: limit(info.rx().map(|rx| rx.iov_limit), terms.rx_iov_limit),
                shared_rx: terms.shared_rx,
                xrc,
                atomics: terms.caps & FI_ATOMIC != 0,
                durable: terms.caps & FI_RMA_PMEM != 0,
                inject_size: terms.inject_size,
                tx_op_flags: Flags::from_bits_retain(terms.tx_op_flags),
                rx_op_flags: Flags::from_bits_retain(terms.rx_op_flags),
                needs_tx: terms.tx_caps & (FI_SEND | FI_READ | FI_WRITE) != 0,
                needs_rx: terms.rx_caps & FI_RECV != 0,
                auth,
                traffic_class: param::values().traffic_class(terms.tclass.octet()),
                src,
                dst,
            },
            origin,
            format,
            rma_data: terms.rx_mode & FI_RX_CQ_DATA != 0,
            tables: Tables {
                rma: &RMA[rdm_tables::caps_index(&terms, FI_RMA)],
                atomic: &ATOMIC[rdm_tables::caps_index(&terms, FI_ATOMIC)],
            },
        })
    }

    fn open(self, domain: &Object<Domain>, context: *mut c_void) -> Result<*mut fid> {
        let user = domain.users.add()?;
        let Self {
            mut config,
            origin,
            format,
            rma_data,
            tables,
        } = self;
        let object = Object::open_with(|handle| {
            config.token = Token(handle.expose_provenance());
            config.context = context.expose_provenance();
            let engine = match origin {
                Origin::Connect => Endpoint::open(&domain.engine, config)?,
                Origin::Replace(pep) => Endpoint::replace(&domain.engine, config, &pep)?,
                // SAFETY: `info->handle` is a fid by the contract of fi_endpoint(3).
                Origin::Answer(connreq) => unsafe {
                    let request = connreq::take(connreq)?;
                    match Endpoint::from_request(&domain.engine, config, request) {
                        Ok(engine) => {
                            let _ = connreq::finish(connreq);
                            engine
                        }
                        Err((errno, request)) => {
                            if let Some(request) = request {
                                connreq::put_back(connreq, request);
                            }
                            return Err(errno);
                        }
                    }
                },
            };
            let body = Ep {
                engine,
                rma_data,
                tables,
                common: EpCommon::new(format, user),
            };
            Ok::<_, FiErrno>((c_part(context, tables), body))
        })?;
        Ok(object.as_ptr().cast())
    }
}

/// The C structure of an endpoint.
fn c_part(context: *mut c_void, tables: Tables) -> fid_ep {
    fid_ep {
        fid: header::<Ep>(context),
        ops: (&raw const OPS.base).cast_mut(),
        cm: (&raw const cm::EP_OPS).cast_mut(),
        msg: (&raw const MSG).cast_mut(),
        rma: std::ptr::from_ref(tables.rma).cast_mut(),
        tagged: (&raw const TAGGED).cast_mut(),
        atomic: std::ptr::from_ref(tables.atomic).cast_mut(),
        collective: (&raw const COLLECTIVE).cast_mut(),
    }
}

impl Cancel for Ep {
    fn cancel(&self, context: usize) -> Result<()> {
        self.engine.cancel(context)
    }
}

impl Control for Ep {
    fn enable(&self) -> Result<()> {
        self.engine.enable()
    }

    fn alias(
        ep: &Object<Self>,
        context: *mut c_void,
        direction: Direction,
        flags: Flags,
    ) -> Result<(fid_ep, Self)> {
        let engine = ep.engine.alias();
        engine.op_flags().set(direction, flags);
        let body = Self {
            engine,
            rma_data: ep.rma_data,
            tables: ep.tables,
            common: ep.common.alias(ep)?,
        };
        Ok((c_part(context, ep.tables), body))
    }
}

unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: a fid by the contract of fi_ep_bind(3).
    let ep = unsafe { object::<Ep>(handle) };
    on(ep, |ep| {
        // SAFETY: NULL, or a fid by the contract of fi_ep_bind(3).
        let other = unsafe { Other::new(other)? };
        let user = match other.class() {
            FI_CLASS_CQ => {
                let (cq, user) = other.used::<Cq>()?;
                let flags = BindFlags::from_bits(flags).ok_or(FiErrno::EBADFLAGS)?;
                ep.engine.bind_cq(&cq.engine, flags)?;
                user
            }
            FI_CLASS_SRX_CTX => {
                let (srx, user) = other.used::<Srx>()?;
                no_flags(flags)?;
                ep.engine.bind_shared_rx(&srx.engine)?;
                user
            }
            Xrcd::CLASS => {
                let (xrcd, user) = other.used::<Xrcd>()?;
                no_flags(flags)?;
                if !Arc::ptr_eq(&xrcd.domain, ep.engine.domain()) {
                    return Err(FiErrno::EDOMAIN);
                }
                ep.engine.bind_xrcd(&xrcd.engine)?;
                user
            }
            // connected endpoints use no address vector
            _ => bind_common(
                &other,
                flags,
                |eq| ep.engine.bind_eq(eq),
                |cntr, kinds| ep.engine.bind_counter(cntr, kinds),
            )?,
        };
        ep.common.bound.lock().push(user);
        Ok(0)
    })
}
