//! The calls of endpoints with many peers, `fi_endpoint(3)` and `fi_cm(3)`, except for those that
//! transfer data.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use libfabric_sys::layout::WithMainSlot;
use libfabric_sys::*;
use weft::Token;
use weft::errno::{FiErrno, Result};
use weft::flags::{Direction, Flags};
use weft::mr::Access;
use weft::queue::BindFlags;
use weft::rdm::{Endpoint, EndpointConfig};

use crate::addr::Format;
use crate::av::Av;
use crate::cq::Cq;
use crate::domain::Domain;
use crate::ep::bind::{bind_common, no_flags};
use crate::ep::common::EpCommon;
use crate::ep::control::{Cancel, Control, cancel, control};
use crate::ep::rdm_ep::{RdmEp, Tables};
use crate::ep::rdm_srx::RdmSrx;
use crate::ep::{cm, opt, rdm_tables};
use crate::ffi::fid::{Kind, Object, Other, close, header, object, on};
use crate::ffi::info::View;
use crate::ffi::log::{info, refused};
use crate::ffi::param;
use crate::ffi::stub;
use crate::getinfo;
use crate::xrcd::Xrcd;

static FID_OPS: fi_ops = fi_ops {
    close: Some(close::<RdmEp>),
    bind: Some(bind),
    control: Some(control::<RdmEp>),
    ..stub::fid::<FI_ENOSYS>()
};

static OPS: WithMainSlot<fi_ops_ep> = stub::ep::<FI_ENOSYS>(fi_ops_ep {
    cancel: Some(cancel::<RdmEp>),
    getopt: Some(opt::getopt_rdm),
    setopt: Some(opt::setopt_rdm),
    ..stub::ep_base::<FI_ENOSYS>() // contexts: scalable endpoints only; the two counts: deprecated
});

static COLLECTIVE: fi_ops_collective = stub::collective::<FI_ENOSYS>();

// SAFETY: `fid_ep` begins with its `fid`; `FID_OPS` is a static that only this kind uses.
unsafe impl Kind for RdmEp {
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
/// `EINVAL`: `info` requests more than the device has, or has a handle; or the domain was opened
/// for connected endpoints, or has no registrations ([`Endpoint::new`]).
pub(crate) fn open(
    domain: &Object<Domain>,
    info: View<'_, fi_info>,
    context: *mut c_void,
) -> Result<*mut fid> {
    if !domain.rdm {
        let reason = "the domain was not opened for FI_EP_RDM";
        return Err(refused!(FI_LOG_EP_CTRL, EINVAL, "{reason}"));
    }
    if !info.handle.is_null() {
        return Err(FiErrno::EINVAL); // of connection requests and passive endpoints
    }
    let terms = getinfo::check(domain.api_version, info, domain.engine.device())?;
    if getinfo::is_xrc(info) {
        info!(FI_LOG_EP_CTRL, "an endpoint on XRC");
    }
    let (_, auth) = getinfo::auth_keys(domain.api_version, info)?;
    let format = Format::of(info.addr_format)?.unwrap_or(Format::Sockaddr);
    let atomics = terms.tx_caps & FI_ATOMIC != 0 && terms.tx_caps & (FI_READ | FI_WRITE) != 0;
    let tables = rdm_tables::of(&terms);
    let mut config = EndpointConfig {
        token: Token(0),
        context: context.expose_provenance(),
        tx_size: terms.tx_size,
        rx_size: terms.rx_size,
        inject_size: terms.inject_size,
        tx_op_flags: Flags::from_bits_retain(terms.tx_op_flags),
        rx_op_flags: Flags::from_bits_retain(terms.rx_op_flags),
        needs_tx: terms.tx_caps & (FI_SEND | FI_READ | FI_WRITE) != 0,
        needs_rx: terms.rx_caps & FI_RECV != 0,
        rma: terms.tx_caps & (FI_READ | FI_WRITE) != 0,
        target: terms.rx_caps & (FI_REMOTE_READ | FI_REMOTE_WRITE) != 0,
        durable: terms.caps & FI_RMA_PMEM != 0,
        atomics,
        accepts_data: terms.rx_caps & FI_RMA != 0 && terms.rx_caps & FI_REMOTE_WRITE != 0,
        peer_atomics: peer_atomics(terms.rx_caps),
        rma_after_sends: terms.msg_order & (FI_ORDER_RAS | FI_ORDER_WAS) != 0,
        sends_after_rma: terms.msg_order & FI_ORDER_SAW != 0,
        shared_rx: terms.shared_rx,
        directed: getinfo::directed(terms.caps),
        source: terms.caps & FI_SOURCE != 0,
        xrc: getinfo::is_xrc(info),
        auto: terms.data_progress == FI_PROGRESS_AUTO,
        auth,
        traffic_class: param::values().traffic_class(terms.tclass.octet()),
        src: info.src(format)?,
        max_links: param::values().max_links,
        connect_timeout: param::values().connect_timeout,
        ipv4: match info.dst(format)? {
            Some(dst) => Some(dst.is_ipv4()),
            None => format.is_ipv4(),
        },
    };
    let user = domain.users.add()?;
    let object = Object::open_with(|handle| {
        config.token = Token(handle.expose_provenance());
        let body = RdmEp {
            engine: Endpoint::new(&domain.engine, config)?,
            api_version: domain.api_version,
            inject_size: terms.inject_size,
            max_msg_size: terms.max_msg_size,
            atomics,
            tables,
            domain: Arc::clone(&domain.engine),
            common: EpCommon::new(format, user),
        };
        Ok::<_, FiErrno>((c_part(context, tables), body))
    })?;
    Ok(object.as_ptr().cast())
}

/// What atomics of peers may do to the regions, by the capabilities of the receive side.
fn peer_atomics(rx_caps: u64) -> Access {
    let mut access = Access::empty();
    if rx_caps & FI_ATOMIC != 0 {
        access.set(Access::REMOTE_READ, rx_caps & FI_REMOTE_READ != 0);
        access.set(Access::REMOTE_WRITE, rx_caps & FI_REMOTE_WRITE != 0);
    }
    access
}

/// The C structure of an endpoint.
fn c_part(context: *mut c_void, tables: Tables) -> fid_ep {
    fid_ep {
        fid: header::<RdmEp>(context),
        ops: (&raw const OPS.base).cast_mut(),
        cm: (&raw const cm::RDM_OPS).cast_mut(),
        msg: std::ptr::from_ref(tables.msg).cast_mut(),
        rma: std::ptr::from_ref(tables.rma).cast_mut(),
        tagged: std::ptr::from_ref(tables.tagged).cast_mut(),
        atomic: std::ptr::from_ref(tables.atomic).cast_mut(),
        collective: (&raw const COLLECTIVE).cast_mut(),
    }
}

impl Cancel for RdmEp {
    fn cancel(&self, context: usize) -> Result<()> {
        self.engine.cancel(context)
    }
}

impl Control for RdmEp {
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
            api_version: ep.api_version,
            inject_size: ep.inject_size,
            max_msg_size: ep.max_msg_size,
            atomics: ep.atomics,
            tables: ep.tables,
            domain: Arc::clone(&ep.domain),
            common: ep.common.alias(ep)?,
        };
        Ok((c_part(context, ep.tables), body))
    }
}

unsafe extern "C" fn bind(handle: *mut fid, other: *mut fid, flags: u64) -> c_int {
    // SAFETY: a fid by the contract of fi_ep_bind(3).
    let ep = unsafe { object::<RdmEp>(handle) };
    on(ep, |ep| {
        // SAFETY: NULL, or a fid by the contract of fi_ep_bind(3).
        let other = unsafe { Other::new(other)? };
        let user = match other.class() {
            FI_CLASS_AV => {
                let (av, user) = other.used::<Av>()?;
                no_flags(flags)?;
                if !Arc::ptr_eq(&av.domain, &ep.domain) {
                    return Err(FiErrno::EDOMAIN);
                }
                ep.engine.bind_vector(&av.engine)?;
                user
            }
            FI_CLASS_CQ => {
                let (cq, user) = other.used::<Cq>()?;
                let flags = BindFlags::from_bits(flags).ok_or(FiErrno::EBADFLAGS)?;
                ep.engine.bind_cq(&cq.engine, flags)?;
                user
            }
            FI_CLASS_SRX_CTX => {
                let (srx, user) = other.used::<RdmSrx>()?;
                no_flags(flags)?;
                ep.engine.bind_shared_rx(&srx.engine)?;
                user
            }
            Xrcd::CLASS => {
                let (xrcd, user) = other.used::<Xrcd>()?;
                no_flags(flags)?;
                if !Arc::ptr_eq(&xrcd.domain, &ep.domain) {
                    return Err(FiErrno::EDOMAIN);
                }
                ep.engine.bind_xrc(&xrcd.shared)?;
                user
            }
            _ => bind_common(
                &other,
                flags,
                |eq| ep.engine.accept_eq(eq),
                |cntr, kinds| ep.engine.bind_counter(cntr, kinds),
            )?,
        };
        ep.common.bound.lock().push(user);
        Ok(0)
    })
}
