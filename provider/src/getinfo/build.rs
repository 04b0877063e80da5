//! Builds an `fi_info` from negotiated terms.

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};

use super::ep_type::DOMAIN_CAPS;
use super::hints::Hints;
use super::negotiate::Terms;
use super::offer::{self, Offer};
use super::resolve::Path;
use crate::addr::Format;
use crate::ffi::info::Info;
use crate::identity;

/// An info with the provider's attributes only (`FI_PROV_ATTR_ONLY`).
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn attributes_only() -> Result<Info> {
    let mut info = Info::new()?;
    info.set_fabric(|fabric| fabric.prov_version = identity::version());
    Ok(info)
}

/// The address format of an info for a path.
///
/// # Errors
/// `ENODATA`: the path has no address that determines it.
pub(crate) fn format(hints: &Hints, path: &Path) -> Result<Format> {
    let native = path.src.or(path.dst).as_ref().map(Format::native);
    hints.format.or(native).ok_or(FiErrno::ENODATA)
}

/// An info with all attributes of the terms. libfabric's core adds the name of the provider.
///
/// # Errors
/// `ENOMEM`: no memory. `ENODATA`: the address format cannot express the addresses.
pub(crate) fn info(
    version: u32,
    hints: &Hints,
    offer: &Offer,
    terms: &Terms,
    path: &Path,
) -> Result<Info> {
    let format = format(hints, path)?;
    if !path.is_expressed(format) {
        return Err(FiErrno::ENODATA);
    }
    let mut info = Info::new()?;
    info.set(|info| {
        info.caps = terms.caps;
        info.mode = terms.mode;
        info.addr_format = format.number();
    });
    info.set_handle(hints.handle);
    info.set_src(path.src.map(|src| format.bytes(&src)).as_deref())?;
    info.set_dst(path.dst.map(|dst| format.bytes(&dst)).as_deref())?;
    info.set_nic(&offer.nic)?;
    info.set_tx(|tx| {
        tx.caps = terms.tx_caps;
        tx.op_flags = terms.tx_op_flags;
        tx.msg_order = terms.msg_order;
        tx.comp_order = offer.ep.comp_order;
        tx.inject_size = terms.inject_size;
        tx.size = terms.tx_size;
        tx.iov_limit = terms.tx_iov_limit;
        tx.rma_iov_limit = offer.ep.rma_iov_limit;
        tx.tclass = terms.tclass.number();
    });
    info.set_rx(|rx| {
        rx.caps = terms.rx_caps;
        rx.mode = terms.rx_mode;
        rx.op_flags = terms.rx_op_flags;
        rx.msg_order = terms.msg_order;
        rx.comp_order = offer.ep.comp_order;
        rx.size = terms.rx_size;
        rx.iov_limit = terms.rx_iov_limit;
    });
    info.set_ep(|ep| {
        ep.type_ = offer.ep.number;
        ep.protocol = offer.protocol;
        ep.protocol_version = offer.ep.protocol_version;
        ep.max_msg_size = offer.max_msg_size;
        ep.max_order_raw_size = offer.max_order_size;
        ep.max_order_waw_size = offer.max_order_size;
        ep.max_order_war_size = offer.max_order_war_size;
        ep.mem_tag_format = terms.tag_format;
        ep.tx_ctx_cnt = 1;
        ep.rx_ctx_cnt = if terms.shared_rx {
            FI_SHARED_CONTEXT
        } else {
            1
        };
    });
    if let Some(key) = hints.ep.as_ref().and_then(|ep| ep.auth.as_ref()) {
        info.set_ep_key(key)?;
    }
    set_domain(&mut info, hints, offer, terms)?;
    info.set_fabric_name(&offer.fabric_name)?;
    info.set_fabric(|fabric| {
        fabric.prov_version = identity::version();
        fabric.api_version = version;
    });
    Ok(info)
}

fn set_domain(info: &mut Info, hints: &Hints, offer: &Offer, terms: &Terms) -> Result<()> {
    info.set_domain_name(offer.device.name())?;
    info.set_domain(|domain| {
        domain.threading = terms.threading;
        domain.control_progress = terms.control_progress;
        domain.__bindgen_anon_1.data_progress = terms.data_progress;
        domain.resource_mgmt = FI_RM_ENABLED;
        domain.av_type = terms.av_type;
        domain.mr_mode = terms.mr.bits;
        domain.mr_key_size = terms.mr.key_size();
        domain.cq_data_size = terms.cq_data_size;
        domain.cq_cnt = offer.cq_cnt;
        domain.ep_cnt = offer.ep_cnt;
        domain.cntr_cnt = offer::CNTR_CNT;
        domain.tx_ctx_cnt = offer.ep_cnt;
        domain.rx_ctx_cnt = offer.ep_cnt;
        domain.max_ep_tx_ctx = 1;
        domain.max_ep_rx_ctx = 1;
        domain.max_ep_srx_ctx = offer.max_sharing();
        domain.mr_iov_limit = offer::MR_IOV_LIMIT;
        domain.caps = DOMAIN_CAPS;
        domain.max_err_data = offer::MAX_ERR_DATA;
        domain.mr_cnt = offer.mr_cnt;
        domain.tclass = terms.domain_tclass.number();
    });
    let key = hints
        .domain
        .as_ref()
        .and_then(|domain| domain.auth.as_ref());
    key.map_or(Ok(()), |key| info.set_domain_key(key))
}
