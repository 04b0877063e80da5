//! The application's hints, copied out of C once.

use std::ffi::CStr;
use std::net::SocketAddr;

use libfabric_sys::*;
use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};

use crate::addr::Format;
use crate::ffi::info::View;
use crate::identity;

/// `fi_tx_attr` or `fi_rx_attr`; `None` and 0 request nothing.
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
    /// Of the transmit side.
    pub(crate) tclass: u32,
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
    pub(crate) mem_tag_format: u64,
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
    pub(crate) tx_ctx_cnt: usize,
    pub(crate) rx_ctx_cnt: usize,
    pub(crate) max_ep_tx_ctx: usize,
    pub(crate) max_ep_rx_ctx: usize,
    pub(crate) max_ep_stx_ctx: usize,
    pub(crate) max_ep_srx_ctx: usize,
    pub(crate) cntr_cnt: usize,
    pub(crate) mr_cnt: usize,
    pub(crate) mr_iov_limit: usize,
    pub(crate) max_err_data: usize,
    pub(crate) tclass: u32,
    /// The handle of an open domain, by its address; 0: none.
    pub(crate) handle: usize,
    /// Since 1.20; 0 unless [`Hints::read_fields_of_host`] has read it.
    pub(crate) max_ep_auth_key: usize,
    /// Since 2.0; as above.
    pub(crate) max_group_id: u32,
}

/// The whole `fi_info`. An absent structure is `None`: the application requests nothing of it.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Hints {
    pub(crate) caps: u64,
    /// `None` without hints: the answer then has the required modes, whether or not the application
    /// supports them.
    pub(crate) mode: Option<u64>,
    pub(crate) format: Option<Format>,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    /// `fi_info.handle`, returned unchanged.
    pub(crate) handle: usize,
    pub(crate) tx: Option<Side>,
    pub(crate) rx: Option<Side>,
    pub(crate) ep: Option<EpHints>,
    pub(crate) domain: Option<DomainHints>,
    pub(crate) fabric_name: Option<String>,
    /// The handle of an open fabric, by its address; 0: none.
    pub(crate) fabric_handle: usize,
    /// Whether `fabric_attr->prov_name` contains `weft`, alone or below a layered provider.
    pub(crate) names_weft: bool,
    pub(crate) prov_version: u32,
    /// `nic->device_attr->name`
    pub(crate) nic_name: Option<String>,
    /// True for the info of an object that is opened: its `mr_mode` is the negotiated one.
    pub(crate) exact: bool,
}

/// Which addresses of the hints apply (fi_getinfo(3), `src_addr` and `dest_addr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    src: bool,
    dst: bool,
}

impl Default for Addresses {
    fn default() -> Self {
        Self {
            src: true,
            dst: true,
        }
    }
}

impl Addresses {
    /// `named`: the call has a node or a service.
    pub(crate) fn of_call(named: bool, flags: u64) -> Self {
        let source = flags & FI_SOURCE != 0;
        // such a call is answered without a look at the addresses
        let any = flags & FI_PROV_ATTR_ONLY == 0;
        Self {
            src: any && !source,
            dst: any && (source || !named),
        }
    }
}

/// A name. `ENODATA` if it is not UTF-8: no name of this provider has such bytes.
fn owned(name: Option<&CStr>) -> Result<Option<String>> {
    let name = name.map(|name| name.to_str().map(str::to_owned));
    name.transpose().map_err(|_| FiErrno::ENODATA)
}

impl Hints {
    /// The protocol; 0 (`FI_PROTO_UNSPEC`): any.
    pub(crate) fn protocol(&self) -> u32 {
        self.ep.as_ref().map_or(0, |ep| ep.protocol)
    }

    /// Copies the hints of an application that was built for API `version`; `None`: no hints.
    ///
    /// # Errors
    /// - `ENODATA`: an unsupported address format, or an authorization key that is too long, like
    ///   `FI_AV_AUTH_KEY`.
    /// - `EINVAL`: an address that is not valid in its format.
    pub(crate) fn read(version: u32, hints: Option<View<'_, fi_info>>) -> Result<Self> {
        Self::read_with(version, hints, Addresses::default())
    }

    /// As [`Self::read`], for a call that ignores the other addresses: they are not read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn read_with(
        version: u32,
        hints: Option<View<'_, fi_info>>,
        read: Addresses,
    ) -> Result<Self> {
        let Some(hints) = hints else {
            return Ok(Self::default());
        };
        let format = Format::of(hints.addr_format)?;
        let addresses = format.unwrap_or(Format::Sockaddr);
        let mut this = Self {
            caps: hints.caps,
            mode: Some(hints.mode),
            format,
            src: if read.src {
                hints.src(addresses)?
            } else {
                None
            },
            dst: if read.dst {
                hints.dst(addresses)?
            } else {
                None
            },
            handle: hints.handle.expose_provenance(),
            tx: hints.tx().as_ref().map(|tx| Side::tx(version, tx)),
            rx: hints.rx().as_ref().map(Side::rx),
            ..Self::default()
        };
        if let Some(ep) = hints.ep() {
            this.ep = Some(EpHints::read(version, &ep)?);
        }
        if let Some(domain) = hints.domain() {
            this.domain = Some(DomainHints::read(version, &domain)?);
        }
        if let Some(fabric) = hints.fabric() {
            this.fabric_name = owned(fabric.name())?;
            this.fabric_handle = fabric.fabric.expose_provenance();
            let names = fabric.provider().and_then(|names| names.to_str().ok());
            let mut names = names.unwrap_or_default().split(';');
            this.names_weft = names.any(|name| name.eq_ignore_ascii_case(identity::NAME));
            this.prov_version = fabric.prov_version;
        }
        this.nic_name = owned(hints.nic_name())?;
        Ok(this)
    }

    /// Reads the fields that the host's releases since 1.17 have appended, as far as API `version`
    /// has them: an application of an earlier API does not set them.
    ///
    /// # Safety
    /// As [`View::whole_domain`].
    pub(crate) unsafe fn read_fields_of_host(&mut self, version: u32, hints: &View<'_, fi_info>) {
        // SAFETY: the caller keeps the contract.
        let domain = unsafe { hints.whole_domain() };
        if let (Some(this), Some(domain)) = (&mut self.domain, domain) {
            this.read_newer(version, &domain);
        }
    }
}

impl Side {
    fn tx(version: u32, tx: &View<'_, fi_tx_attr>) -> Self {
        Self {
            caps: tx.caps,
            mode: (tx.mode != 0).then_some(tx.mode),
            op_flags: tx.op_flags,
            msg_order: tx.msg_order,
            comp_order: tx.comp_order,
            inject_size: tx.inject_size,
            size: tx.size,
            iov_limit: tx.iov_limit,
            rma_iov_limit: tx.rma_iov_limit,
            tclass: tclass(version, tx.tclass),
        }
    }

    fn rx(rx: &View<'_, fi_rx_attr>) -> Self {
        Self {
            caps: rx.caps,
            mode: (rx.mode != 0).then_some(rx.mode),
            op_flags: rx.op_flags,
            msg_order: rx.msg_order,
            comp_order: rx.comp_order,
            size: rx.size,
            iov_limit: rx.iov_limit,
            ..Self::default()
        }
    }
}

/// The traffic class of an application of API `version`: before 1.9 the fields do not exist.
fn tclass(version: u32, tclass: u32) -> u32 {
    if version < fi_version(1, 9) {
        return FI_TC_UNSPEC;
    }
    tclass
}

/// The key of an application of API `version`: before 1.5 the fields are not read.
///
/// # Errors
/// `ENODATA`: NULL with a size, or too long.
fn auth_key(
    version: u32,
    key: impl FnOnce() -> Result<Option<AuthKey>>,
) -> Result<Option<AuthKey>> {
    if version < fi_version(1, 5) {
        return Ok(None);
    }
    key().map_err(|_| FiErrno::ENODATA)
}

impl EpHints {
    fn read(version: u32, ep: &View<'_, fi_ep_attr>) -> Result<Self> {
        Ok(Self {
            kind: ep.type_,
            protocol: ep.protocol,
            protocol_version: ep.protocol_version,
            max_msg_size: ep.max_msg_size,
            msg_prefix_size: ep.msg_prefix_size,
            max_order_raw: ep.max_order_raw_size,
            max_order_war: ep.max_order_war_size,
            max_order_waw: ep.max_order_waw_size,
            mem_tag_format: ep.mem_tag_format,
            tx_ctx_cnt: ep.tx_ctx_cnt,
            rx_ctx_cnt: ep.rx_ctx_cnt,
            auth: auth_key(version, || ep.auth_key())?,
        })
    }
}

impl DomainHints {
    /// Reads the fields that API `version` has beyond those of 1.17.
    fn read_newer(&mut self, version: u32, domain: &fi_domain_attr) {
        if version >= fi_version(1, 20) {
            self.max_ep_auth_key = domain.max_ep_auth_key;
        }
        if version >= fi_version(2, 0) {
            self.max_group_id = domain.max_group_id;
        }
    }

    /// An application of an API before 1.5 does not set the fields that 1.5 has appended.
    fn read(version: u32, domain: &View<'_, fi_domain_attr>) -> Result<Self> {
        let this = Self::read_all(version, domain)?;
        if version >= fi_version(1, 5) {
            return Ok(this);
        }
        Ok(Self {
            caps: 0,
            cntr_cnt: 0,
            mr_cnt: 0,
            mr_iov_limit: 0,
            max_err_data: 0,
            ..this
        })
    }

    fn read_all(version: u32, domain: &View<'_, fi_domain_attr>) -> Result<Self> {
        Ok(Self {
            name: owned(domain.name())?,
            threading: domain.threading,
            control_progress: domain.control_progress,
            data_progress: domain.data_progress(),
            resource_mgmt: domain.resource_mgmt,
            av_type: domain.av_type,
            mr_mode: domain.mr_mode,
            mr_key_size: domain.mr_key_size,
            cq_data_size: domain.cq_data_size,
            caps: domain.caps,
            auth: auth_key(version, || domain.auth_key())?,
            cq_cnt: domain.cq_cnt,
            ep_cnt: domain.ep_cnt,
            tx_ctx_cnt: domain.tx_ctx_cnt,
            rx_ctx_cnt: domain.rx_ctx_cnt,
            max_ep_tx_ctx: domain.max_ep_tx_ctx,
            max_ep_rx_ctx: domain.max_ep_rx_ctx,
            max_ep_stx_ctx: domain.max_ep_stx_ctx,
            max_ep_srx_ctx: domain.max_ep_srx_ctx,
            cntr_cnt: domain.cntr_cnt,
            mr_cnt: domain.mr_cnt,
            mr_iov_limit: domain.mr_iov_limit,
            max_err_data: domain.max_err_data,
            tclass: tclass(version, domain.tclass),
            handle: domain.domain.expose_provenance(),
            max_ep_auth_key: 0,
            max_group_id: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attributes with a value in each field that some release has appended.
    fn domain_attr() -> fi_domain_attr {
        // SAFETY: integers and pointers, so zeros are a value (`Part`).
        let mut attr: fi_domain_attr = unsafe { std::mem::zeroed() };
        attr.mr_key_size = 8;
        attr.caps = 1;
        attr.cntr_cnt = 2;
        attr.mr_iov_limit = 3;
        attr.max_err_data = 4;
        attr.mr_cnt = 5;
        attr.max_ep_auth_key = 6;
        attr.max_group_id = 7;
        attr
    }

    /// A field that the application's API does not have may hold anything.
    #[test]
    fn fields_of_later_versions_are_not_read() {
        let attr = domain_attr();
        let read = |major, minor| {
            let version = fi_version(major, minor);
            // SAFETY: a whole structure, without pointers.
            let view = unsafe { View::new(&raw const attr) }.unwrap();
            let mut hints = DomainHints::read(version, &view).unwrap();
            assert_eq!((hints.max_ep_auth_key, hints.max_group_id), (0, 0));
            hints.read_newer(version, &attr);
            assert_eq!(hints.mr_key_size, 8);
            let of_5 = (
                hints.caps,
                hints.cntr_cnt,
                hints.mr_iov_limit,
                hints.max_err_data,
                hints.mr_cnt,
            );
            (of_5, hints.max_ep_auth_key, hints.max_group_id)
        };
        assert_eq!(read(1, 4), ((0, 0, 0, 0, 0), 0, 0));
        for minor in [5, 17, 19] {
            assert_eq!(read(1, minor), ((1, 2, 3, 4, 5), 0, 0));
        }
        assert_eq!(read(1, 20), ((1, 2, 3, 4, 5), 6, 0));
        assert_eq!(read(2, 0), ((1, 2, 3, 4, 5), 6, 7));
    }
}
