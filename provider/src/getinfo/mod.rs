//! `fi_getinfo(3)`: the devices that match the hints, and their terms.

mod addresses;
mod build;
mod ep_type;
mod hints;
mod instances;
pub(crate) mod layered;
pub(crate) mod mr_mode;
mod negotiate;
mod offer;
mod refusal;
mod resolve;
mod traffic_class;

use std::ffi::{c_char, c_int};
use std::net::SocketAddr;
use std::sync::Arc;

use libfabric_sys::{
    FI_EP_MSG, FI_EP_RDM, FI_EP_UNSPEC, FI_PROTO_RDMA_CM_IB_XRC, FI_PROV_ATTR_ONLY, FI_RESCAN,
    FI_RMA_PMEM, fi_info,
};
use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};
use weft::mr::Form;
use weft::verbs::Device;

use crate::addr::Format;
use crate::devices;
use crate::ffi::guard;
use crate::ffi::info::{Info, View};
use crate::ffi::log::{info, refused};
use crate::ffi::param;
use hints::{Addresses, Hints};
use instances::Instances;
use negotiate::all_terms;
use offer::Offer;
use traffic_class::TrafficClass;

/// The provider's `getinfo`. Unknown flags are accepted: the core adds internal ones.
pub(crate) unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi_info,
    info: *mut *mut fi_info,
) -> c_int {
    guard::entry(|| {
        if info.is_null() {
            return Err(FiErrno::EINVAL);
        }
        // SAFETY: NULL or C strings, by the contract of fi_getinfo(3).
        let (node, service) = unsafe { (resolve::argument(node), resolve::argument(service)) };
        let addresses = Addresses::of_call(node.is_some() || service.is_some(), flags);
        // SAFETY: NULL or valid hints, by the contract of fi_getinfo(3).
        let view = unsafe { View::new(hints) };
        let mut hints = Hints::read_with(version, view, addresses)?;
        if let Some(view) = &view {
            // SAFETY: the host calls this function, with hints of its own release.
            unsafe { hints.read_fields_of_host(version, view) };
        }
        if layered::is_repeated(version, node, service, flags, &hints) {
            return Err(FiErrno::ENODATA);
        }
        let list = find(version, node, service, flags, &hints)?;
        // SAFETY: not NULL, and writable by the contract of fi_getinfo(3).
        unsafe { *info = Info::into_list(list) };
        Ok(0)
    })
}

fn find(
    version: u32,
    node: Option<&std::ffi::CStr>,
    service: Option<&std::ffi::CStr>,
    flags: u64,
    hints: &Hints,
) -> Result<Vec<Info>> {
    if flags & FI_PROV_ATTR_ONLY != 0 {
        return Ok(vec![build::attributes_only()?]);
    }
    let instances = Instances::of(hints)?;
    let hints = &Hints {
        format: hints.format.or(instances.format()),
        ..hints.clone()
    };
    let mut devices = devices::list(flags & FI_RESCAN != 0);
    devices.retain(|device| !layered::leaves_out(device, flags, hints));
    if devices.is_empty() && layered::is_layered(flags) {
        return Err(FiErrno::ENODATA);
    }
    let paths = resolve::paths(node, service, flags, hints)?;
    // the regions of an open domain have one form
    let forced = param::values().mr_mode.or(instances.mode());
    let mut list = Vec::new();
    let mut offers = offers(&devices, hints.protocol());
    for offer in &mut offers {
        if !instances.have(offer) {
            continue;
        }
        instances.name_fabric_of(offer);
        let own = offer.addresses();
        let mut terms = all_terms(version, hints, offer, forced);
        terms.retain(|terms| instances.permit(offer, terms));
        if terms.is_empty() || !offer.transport_works() {
            continue;
        }
        for terms in terms {
            for path in &paths {
                for path in resolve::of_device(&own, offer.host_only, path, hints.format) {
                    let mut info = build::info(version, hints, offer, &terms, &path)?;
                    let format = build::format(hints, &path)?;
                    instances.name_in(&mut info, version, offer, &terms, format);
                    list.push(info);
                }
            }
        }
    }
    if list.is_empty() {
        if instances.is_empty() {
            refusal::report(version, flags, hints, &offers, &paths);
        }
        refusal::report_xrc(flags, hints, &devices);
        return Err(FiErrno::ENODATA);
    }
    Ok(list)
}

/// The offers of all devices to hints with this protocol: each device before the next one, with its
/// endpoint types in order.
fn offers(devices: &[Arc<Device>], protocol: u32) -> Vec<Offer> {
    let mut offers = Vec::new();
    for device in devices {
        if let Some(reason) = offer::unsupported(device.attr()) {
            info!(FI_LOG_FABRIC, "{} is not offered: {reason}", device.name());
            continue;
        }
        for ep in ep_type::offered(protocol) {
            match Offer::of(device, ep) {
                Ok(offer) => offers.push(offer),
                Err(errno) => {
                    let (device, name) = (device.name(), ep.name);
                    info!(FI_LOG_FABRIC, "{device} is not offered as {name}: {errno}");
                }
            }
        }
    }
    offers
}

/// The terms for an object that is opened with `hints`, an info that may come from `fi_getinfo`.
fn exact_terms(version: u32, hints: &mut Hints, offer: &Offer) -> Result<Terms> {
    hints.exact = true;
    let terms = all_terms(version, hints, offer, param::values().mr_mode);
    terms.into_iter().next().ok_or(FiErrno::ENODATA)
}

/// What the `fi_info` of a passive endpoint determines of those of its requests. It is no copy: the
/// application's structure has the size of the release with which it was built, and libfabric
/// copies the size of its own.
pub(crate) struct Seed {
    hints: Hints,
    /// `fabric_attr->prov_name`
    provider: Option<String>,
}

/// The `fi_info` of a connection request, with which the answering endpoint is opened. `handle` is
/// the request's fid.
///
/// # Errors
/// `ENODATA`: the device can't provide the terms of the passive endpoint. `ENOMEM`.
pub(crate) fn for_request(
    version: u32,
    seed: &Seed,
    device: &Arc<Device>,
    local: SocketAddr,
    peer: SocketAddr,
    handle: usize,
) -> Result<Info> {
    let mut hints = seed.hints.clone();
    hints.handle = handle;
    hints.format = hints.format.or(Some(Format::native(&local)));
    let (offer, terms) = passive_terms(version, &mut hints, device)?;
    let path = resolve::Path {
        src: Some(local),
        dst: Some(peer),
    };
    let mut info = build::info(version, &hints, &offer, &terms, &path)?;
    // The core names the provider in the result of `fi_getinfo`; here the provider does it.
    if let Some(name) = &seed.provider {
        info.set_provider(name)?;
    }
    Ok(info)
}

/// The hints for the answers to requests of a passive endpoint that was opened with this info.
fn passive_hints(version: u32, info: View<'_, fi_info>) -> Result<Hints> {
    let mut hints = Hints::read(version, Some(info))?;
    if let Some(domain) = &mut hints.domain {
        // A passive endpoint on a wildcard address takes requests from any device.
        domain.name = None;
    }
    hints.fabric_name = None;
    hints.nic_name = None;
    // each request has its own addresses and handle
    (hints.src, hints.dst, hints.handle) = (None, None, 0);
    Ok(hints)
}

/// What a device offers to an endpoint that answers a request, and its terms.
fn passive_terms(version: u32, hints: &mut Hints, device: &Arc<Device>) -> Result<(Offer, Terms)> {
    let ep = ep_type::of(FI_EP_MSG, hints.protocol()).ok_or(FiErrno::ENODATA)?;
    let offer = Offer::of(device, ep)?;
    let terms = exact_terms(version, hints, &offer)?;
    Ok((offer, terms))
}

impl Seed {
    /// The seed of a passive endpoint that is opened with this info. It could give the `fi_info` of
    /// a request ([`for_request`]) on some device.
    ///
    /// # Errors
    /// `EINVAL`: each request would be rejected.
    pub(crate) fn of(version: u32, info: View<'_, fi_info>) -> Result<Self> {
        let mut hints = passive_hints(version, info).map_err(|_| FiErrno::EINVAL)?;
        let mut devices = devices::list(false).into_iter();
        if !devices.any(|device| passive_terms(version, &mut hints, &device).is_ok()) {
            let reason = "fi_passive_ep: no device has the attributes of the fi_info";
            return Err(refused!(FI_LOG_EP_CTRL, EINVAL, "{reason}"));
        }
        let name = info.fabric().and_then(|fabric| fabric.provider());
        let provider = name.and_then(|name| name.to_str().ok());
        Ok(Self {
            hints,
            provider: provider.map(str::to_owned),
        })
    }
}

/// The terms of a domain that is opened with an info.
pub(crate) struct DomainTerms {
    pub(crate) form: Form,
    /// Whether peers' operations on its regions are counted.
    pub(crate) events: bool,
    pub(crate) auth: Option<AuthKey>,
    /// The default traffic class of its connections.
    pub(crate) traffic_class: Option<u8>,
    /// Whether its regions may be persistent.
    pub(crate) durable: bool,
    /// Whether the info is one of an endpoint with many peers.
    pub(crate) rdm: bool,
    /// Whether the info is one of an endpoint on XRC.
    pub(crate) xrc: bool,
    /// The format of addresses.
    pub(crate) format: Format,
}

/// The terms of a domain that is opened with `info`.
///
/// # Errors
/// `EINVAL`: an endpoint type that is not offered, an `mr_mode` that the device does not support,
/// an authorization key that is too long, or a traffic class that is no code point.
pub(crate) fn domain_terms(
    version: u32,
    info: View<'_, fi_info>,
    device: &Arc<Device>,
) -> Result<DomainTerms> {
    let open = |_| FiErrno::EINVAL;
    let mut hints = Hints::read(version, Some(info)).map_err(open)?;
    hints.exact = true;
    let number = hints.ep.as_ref().map_or(FI_EP_UNSPEC, |ep| ep.kind);
    let ep = ep_type::of(number, hints.protocol()).ok_or(FiErrno::EINVAL)?;
    let offer = Offer::of(device, ep)?;
    let forms = mr_mode::of_offer(version, &hints, &offer, None).map_err(open)?;
    let tclass = hints.domain.as_ref().map_or(0, |domain| domain.tclass);
    let class = TrafficClass::of(tclass).ok_or(FiErrno::EINVAL)?;
    forms
        .first()
        .map(|mr| DomainTerms {
            form: mr.form(version),
            events: mr_mode::counts(&hints),
            auth: hints.domain.as_ref().and_then(|domain| domain.auth.clone()),
            traffic_class: class.octet(),
            durable: hints.caps & FI_RMA_PMEM != 0,
            rdm: ep.number == FI_EP_RDM,
            xrc: ep.xrc,
            format: hints.format.unwrap_or(Format::Sockaddr),
        })
        .ok_or(FiErrno::EINVAL)
}

/// Whether an info names the protocol of XRC.
pub(crate) fn is_xrc(info: View<'_, fi_info>) -> bool {
    info.ep()
        .is_some_and(|ep| ep.protocol == FI_PROTO_RDMA_CM_IB_XRC)
}

/// The names of the devices whose fabric has this name in the answers of `fi_getinfo`.
///
/// # Errors
/// `ENODATA`: no device has a port in such a fabric.
pub(crate) fn devices_of_fabric(name: &str) -> Result<Vec<String>> {
    let mut devices = devices::list(false);
    devices.retain(|device| offer::has_port_in(device, name));
    if devices.is_empty() {
        return Err(FiErrno::ENODATA);
    }
    let named = devices
        .iter()
        .filter(|device| offer::is_named(device, name));
    Ok(named.map(|device| device.name().to_owned()).collect())
}

/// The authorization keys that an info of an application of API `version` names: the domain's, and
/// the endpoint's.
///
/// # Errors
/// `EINVAL`: a key that is too long.
pub(crate) fn auth_keys(
    version: u32,
    info: View<'_, fi_info>,
) -> Result<(Option<AuthKey>, Option<AuthKey>)> {
    let hints = Hints::read(version, Some(info)).map_err(|_| FiErrno::EINVAL)?;
    Ok((
        hints.domain.and_then(|domain| domain.auth),
        hints.ep.and_then(|ep| ep.auth),
    ))
}

pub(crate) use ep_type::{DOMAIN_CAPS, MSG, RDM, directed, later_caps};
pub(crate) use negotiate::Terms;
pub(crate) use offer::{RxLimits, is_in_fabric};
pub(crate) use resolve::name as resolve_name;

/// The terms of an endpoint opened with `info`, which may come from `fi_getinfo` or from the
/// application.
///
/// # Errors
/// `EINVAL`: `info` requests more than the device has.
pub(crate) fn check(version: u32, info: View<'_, fi_info>, device: &Arc<Device>) -> Result<Terms> {
    let open = |_| FiErrno::EINVAL;
    let mut hints = Hints::read(version, Some(info)).map_err(open)?;
    hints.fabric_name = None;
    let number = hints.ep.as_ref().map_or(FI_EP_UNSPEC, |ep| ep.kind);
    let ep = ep_type::of(number, hints.protocol()).ok_or(FiErrno::EINVAL)?;
    let offer = Offer::of(device, ep)?;
    // The modes of an info are the negotiated ones, which the application has accepted.
    let terms = exact_terms(version, &mut hints, &offer).map_err(open)?;
    Ok(terms)
}
