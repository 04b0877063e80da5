//! Builds an `fi_info` from negotiated terms.

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};

use super::hints::Hints;
use super::negotiate::{PROTOCOL_VERSION, Terms};
use super::offer::{self, Offer};
use super::resolve::Path;
use crate::addr::Format;
use crate::ffi::{alloc, nic};
use crate::identity;

/// An info with the provider's attributes only (`FI_PROV_ATTR_ONLY`).
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn attributes_only() -> Result<alloc::Info> {
    let info = alloc::Info::new()?;
    // SAFETY: made by the host with all its parts.
    unsafe { (*(*info.as_ptr()).fabric_attr).prov_version = identity::version() };
    Ok(info)
}

/// Fills one in. The name of the provider is left to the core.
///
/// # Errors
/// `ENOMEM`; `ENODATA` when the format can't express the addresses.
pub(crate) fn info(
    version: u32,
    hints: &Hints,
    offer: &Offer,
    terms: &Terms,
    path: &Path,
) -> Result<alloc::Info> {
    let native = path.src.or(path.dst).as_ref().map(Format::native);
    let format = hints.format.or(native).ok_or(FiErrno::ENODATA)?;
    if [path.src, path.dst]
        .iter()
        .flatten()
        .any(|addr| !format.fits(addr))
    {
        return Err(FiErrno::ENODATA);
    }
    let owner = alloc::Info::new()?;
    let info = owner.as_ptr();
    // SAFETY: made by the host with all its parts zeroed; every pointer stored is of C's heap, and
    // only fields that every release has are written.
    unsafe {
        (*info).caps = terms.caps;
        (*info).mode = terms.mode;
        (*info).addr_format = format.number();
        if let Some(src) = &path.src {
            let bytes = format.bytes(src);
            (*info).src_addr = alloc::bytes(&bytes)?;
            (*info).src_addrlen = bytes.len();
        }
        if let Some(dst) = &path.dst {
            let bytes = format.bytes(dst);
            (*info).dest_addr = alloc::bytes(&bytes)?;
            (*info).dest_addrlen = bytes.len();
        }
        (*info).handle = std::ptr::with_exposed_provenance_mut(hints.handle);
        (*info).nic = nic::create(&offer.nic)?;

        let tx = (*info).tx_attr;
        (*tx).caps = terms.tx_caps;
        (*tx).op_flags = terms.tx_op_flags;
        (*tx).msg_order = offer::MSG_ORDER;
        (*tx).comp_order = offer::COMP_ORDER;
        (*tx).inject_size = terms.inject_size;
        (*tx).size = terms.tx_size;
        (*tx).iov_limit = terms.tx_iov_limit;
        (*tx).rma_iov_limit = 1;

        let rx = (*info).rx_attr;
        (*rx).caps = terms.rx_caps;
        (*rx).mode = terms.rx_mode;
        (*rx).op_flags = terms.rx_op_flags;
        (*rx).msg_order = offer::MSG_ORDER;
        (*rx).comp_order = offer::COMP_ORDER;
        (*rx).size = terms.rx_size;
        (*rx).iov_limit = terms.rx_iov_limit;

        let ep = (*info).ep_attr;
        (*ep).type_ = FI_EP_MSG;
        (*ep).protocol = offer.protocol;
        (*ep).protocol_version = PROTOCOL_VERSION;
        (*ep).max_msg_size = offer.max_msg_size;
        (*ep).max_order_raw_size = offer.max_msg_size;
        (*ep).max_order_waw_size = offer.max_msg_size;
        (*ep).tx_ctx_cnt = 1;
        (*ep).rx_ctx_cnt = if terms.shared_rx {
            FI_SHARED_CONTEXT
        } else {
            1
        };

        let domain = (*info).domain_attr;
        (*domain).name = alloc::string(offer.device.name())?;
        (*domain).threading = terms.threading;
        (*domain).control_progress = terms.control_progress;
        (*domain).__bindgen_anon_1.data_progress = terms.data_progress;
        (*domain).resource_mgmt = FI_RM_ENABLED;
        (*domain).mr_mode = terms.mr.bits;
        (*domain).mr_key_size = terms.mr.key_size();
        (*domain).cq_data_size = terms.cq_data_size;
        (*domain).cq_cnt = offer.cq_cnt;
        (*domain).ep_cnt = offer.ep_cnt;
        (*domain).cntr_cnt = offer::CNTR_CNT;
        (*domain).tx_ctx_cnt = offer.ep_cnt;
        (*domain).rx_ctx_cnt = offer.ep_cnt;
        (*domain).max_ep_tx_ctx = 1;
        (*domain).max_ep_rx_ctx = 1;
        (*domain).max_ep_srx_ctx = offer.shared_rx.iter().count();
        (*domain).mr_iov_limit = offer::MR_IOV_LIMIT;
        (*domain).caps = offer::DOMAIN_CAPS;
        (*domain).max_err_data = offer::MAX_ERR_DATA;
        (*domain).mr_cnt = offer.mr_cnt;

        if let Some(key) = hints.ep.as_ref().and_then(|ep| ep.auth.as_ref()) {
            (*ep).auth_key = alloc::bytes(key.bytes())?.cast();
            (*ep).auth_key_size = key.bytes().len();
        }
        if let Some(key) = hints
            .domain
            .as_ref()
            .and_then(|domain| domain.auth.as_ref())
        {
            (*domain).auth_key = alloc::bytes(key.bytes())?.cast();
            (*domain).auth_key_size = key.bytes().len();
        }

        let fabric = (*info).fabric_attr;
        (*fabric).name = alloc::string(&offer.fabric_name)?;
        (*fabric).prov_version = identity::version();
        (*fabric).api_version = version;
    }
    Ok(owner)
}
