//! The application's hints, copied out of C once.
//!
//! The structures have the sizes of the host's release; only fields that 1.17 has are read.

use std::net::SocketAddr;

use libfabric_sys::*;
use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};

use crate::addr::Format;
use crate::ffi::alloc::str_of;
use crate::identity;

/// The transmit or receive side; `None` and 0 leave a thing open.
#[derive(Clone, Copy, Debug, Default, Hash)]
pub(crate) struct Side {
    pub(crate) caps: u64,
    pub(crate) mode: Option<u64>,
    pub(crate) op_flags: u64,
    pub(crate) msg_order: u64,
    pub(crate) comp_order: u64,
    pub(crate) inject_size: usize,
    pub(crate) size: usize,
    pub(crate) iov_limit: usize,
    pub(crate) rma_iov_limit: usize,
}

/// `fi_ep_attr`
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct EpHints {
    pub(crate) kind: u32,
    pub(crate) protocol: u32,
    pub(crate) protocol_version: u32,
    pub(crate) max_msg_size: usize,
    pub(crate) msg_prefix_size: usize,
    pub(crate) max_order_raw: usize,
    pub(crate) max_order_war: usize,
    pub(crate) max_order_waw: usize,
    pub(crate) tx_ctx_cnt: usize,
    pub(crate) rx_ctx_cnt: usize,
    pub(crate) auth: Option<AuthKey>,
}

/// `fi_domain_attr`
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct DomainHints {
    pub(crate) name: Option<String>,
    pub(crate) threading: u32,
    pub(crate) control_progress: u32,
    pub(crate) data_progress: u32,
    pub(crate) resource_mgmt: u32,
    pub(crate) av_type: u32,
    pub(crate) mr_mode: i32,
    pub(crate) mr_key_size: usize,
    pub(crate) cq_data_size: usize,
    pub(crate) caps: u64,
    pub(crate) auth: Option<AuthKey>,
    /// Counts that must be reached, each with its limit's name: cq, ep, tx, rx, counters, regions.
    pub(crate) cq_cnt: usize,
    pub(crate) ep_cnt: usize,
    pub(crate) max_ep_tx_ctx: usize,
    pub(crate) max_ep_rx_ctx: usize,
    pub(crate) max_ep_stx_ctx: usize,
    pub(crate) max_ep_srx_ctx: usize,
    pub(crate) cntr_cnt: usize,
    pub(crate) mr_cnt: usize,
    pub(crate) mr_iov_limit: usize,
    pub(crate) max_err_data: usize,
}

/// All of them. Absent structures are `None`: nothing is asked of that part.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Hints {
    pub(crate) caps: u64,
    /// `None` without hints: the answer then has the required modes, whether or not the application
    /// supports them.
    pub(crate) mode: Option<u64>,
    pub(crate) format: Option<Format>,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    /// A passive endpoint, handed back.
    pub(crate) handle: usize,
    pub(crate) tx: Option<Side>,
    pub(crate) rx: Option<Side>,
    pub(crate) ep: Option<EpHints>,
    pub(crate) domain: Option<DomainHints>,
    pub(crate) fabric_name: Option<String>,
    /// Whether `fabric_attr->prov_name` has us, alone or below a layered provider.
    pub(crate) names_weft: bool,
    pub(crate) prov_version: u32,
    /// `nic->device_attr->name`
    pub(crate) nic_name: Option<String>,
    /// Not hints but the info of an object: its `mr_mode` is the negotiated one.
    pub(crate) exact: bool,
}

/// # Safety
/// `text` is NULL or a C string.
unsafe fn owned(text: *const std::ffi::c_char) -> Result<Option<String>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise. A name that isn't UTF-8 is not one of ours.
    unsafe { str_of(text) }
        .map(|text| Some(text.to_owned()))
        .ok_or(FiErrno::ENODATA)
}

/// An authorization key; of no bytes it is none.
///
/// # Errors
/// `EINVAL`: NULL, or too long.
///
/// # Safety
/// `key` is NULL or has `size` bytes, unless that is more than a key has.
pub(crate) unsafe fn auth_key(key: *const u8, size: usize) -> Result<Option<AuthKey>> {
    if size == 0 {
        return Ok(None);
    }
    if key.is_null() || size > AuthKey::MAX_SIZE {
        return Err(FiErrno::EINVAL);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(key, size) };
    AuthKey::new(bytes).map(Some)
}

impl Hints {
    /// Copies the hints out, of an application that was built for API `version`.
    ///
    /// # Errors
    /// `ENODATA` for a format of address that we don't speak and for an authorization key that is
    /// too long, `FI_AV_AUTH_KEY` among these. `EINVAL` for an address that is none.
    ///
    /// # Safety
    /// `hints` is NULL or a valid `fi_info` of the host's release.
    pub(crate) unsafe fn read(version: u32, hints: *const fi_info) -> Result<Self> {
        if hints.is_null() {
            return Ok(Self::default());
        }
        // SAFETY: each pointer is NULL or valid by the contract of fi_getinfo(3); fields are read
        // where they are, never a whole structure, whose size depends on the release.
        unsafe {
            let format = Format::of((*hints).addr_format)?;
            let auth = |key: *const u8, size: usize| {
                if version < fi_version(1, 5) {
                    return Ok(None); // the fields are not looked at
                }
                auth_key(key, size).map_err(|_| FiErrno::ENODATA)
            };
            let address =
                |addr: *const std::ffi::c_void, len: usize| -> Result<Option<SocketAddr>> {
                    if addr.is_null() {
                        return Ok(None);
                    }
                    let length = (len != 0).then_some(len);
                    format
                        .unwrap_or(Format::Sockaddr)
                        .read(addr, length)
                        .map(Some)
                };
            let mut this = Self {
                caps: (*hints).caps,
                mode: Some((*hints).mode),
                format,
                src: address((*hints).src_addr, (*hints).src_addrlen)?,
                dst: address((*hints).dest_addr, (*hints).dest_addrlen)?,
                handle: (*hints).handle.expose_provenance(),
                ..Self::default()
            };
            let tx = (*hints).tx_attr;
            if !tx.is_null() {
                this.tx = Some(Side {
                    caps: (*tx).caps,
                    mode: ((*tx).mode != 0).then_some((*tx).mode),
                    op_flags: (*tx).op_flags,
                    msg_order: (*tx).msg_order,
                    comp_order: (*tx).comp_order,
                    inject_size: (*tx).inject_size,
                    size: (*tx).size,
                    iov_limit: (*tx).iov_limit,
                    rma_iov_limit: (*tx).rma_iov_limit,
                });
            }
            let rx = (*hints).rx_attr;
            if !rx.is_null() {
                this.rx = Some(Side {
                    caps: (*rx).caps,
                    mode: ((*rx).mode != 0).then_some((*rx).mode),
                    op_flags: (*rx).op_flags,
                    msg_order: (*rx).msg_order,
                    comp_order: (*rx).comp_order,
                    size: (*rx).size,
                    iov_limit: (*rx).iov_limit,
                    ..Side::default()
                });
            }
            let ep = (*hints).ep_attr;
            if !ep.is_null() {
                this.ep = Some(EpHints {
                    kind: (*ep).type_,
                    protocol: (*ep).protocol,
                    protocol_version: (*ep).protocol_version,
                    max_msg_size: (*ep).max_msg_size,
                    msg_prefix_size: (*ep).msg_prefix_size,
                    max_order_raw: (*ep).max_order_raw_size,
                    max_order_war: (*ep).max_order_war_size,
                    max_order_waw: (*ep).max_order_waw_size,
                    tx_ctx_cnt: (*ep).tx_ctx_cnt,
                    rx_ctx_cnt: (*ep).rx_ctx_cnt,
                    auth: auth((*ep).auth_key, (*ep).auth_key_size)?,
                });
            }
            let domain = (*hints).domain_attr;
            if !domain.is_null() {
                this.domain = Some(DomainHints {
                    name: owned((*domain).name)?,
                    threading: (*domain).threading,
                    control_progress: (*domain).control_progress,
                    data_progress: (*domain).__bindgen_anon_1.data_progress,
                    resource_mgmt: (*domain).resource_mgmt,
                    av_type: (*domain).av_type,
                    mr_mode: (*domain).mr_mode,
                    mr_key_size: (*domain).mr_key_size,
                    cq_data_size: (*domain).cq_data_size,
                    caps: (*domain).caps,
                    auth: auth((*domain).auth_key, (*domain).auth_key_size)?,
                    cq_cnt: (*domain).cq_cnt,
                    ep_cnt: (*domain).ep_cnt,
                    max_ep_tx_ctx: (*domain).max_ep_tx_ctx,
                    max_ep_rx_ctx: (*domain).max_ep_rx_ctx,
                    max_ep_stx_ctx: (*domain).max_ep_stx_ctx,
                    max_ep_srx_ctx: (*domain).max_ep_srx_ctx,
                    cntr_cnt: (*domain).cntr_cnt,
                    mr_cnt: (*domain).mr_cnt,
                    mr_iov_limit: (*domain).mr_iov_limit,
                    max_err_data: (*domain).max_err_data,
                });
            }
            let fabric = (*hints).fabric_attr;
            if !fabric.is_null() {
                this.fabric_name = owned((*fabric).name)?;
                let mut names = str_of((*fabric).prov_name).unwrap_or_default().split(';');
                this.names_weft = names.any(|name| name.eq_ignore_ascii_case(identity::NAME));
                this.prov_version = (*fabric).prov_version;
            }
            let nic = (*hints).nic;
            if !nic.is_null() && !(*nic).device_attr.is_null() {
                this.nic_name = owned((*(*nic).device_attr).name)?;
            }
            Ok(this)
        }
    }
}
