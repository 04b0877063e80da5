//! Open fabrics and domains in hints and answers (`fabric_attr->fabric`, `domain_attr->domain`;
//! `fi_fabric(3)`, `fi_domain(3)`).

use libfabric_sys::{FI_EP_MSG, FI_EP_RDM, FI_RMA_EVENT, FI_RMA_PMEM};
use weft::auth::AuthKey;
use weft::errno::{FiErrno, Result};
use weft::mr::Mode;

use super::hints::Hints;
use super::negotiate::Terms;
use super::offer::Offer;
use crate::addr::Format;
use crate::ffi::info::Info;
use crate::ffi::log::info;
use crate::opened::{DOMAINS, Domain, FABRICS, Fabric, Opened};

/// The open objects to which hints restrict an answer, with their handles.
pub(crate) struct Instances {
    /// Without one in the hints, the fabric of their domain.
    fabric: Option<(usize, Fabric)>,
    domain: Option<(usize, Domain)>,
    /// The authorization key that the hints request of a domain.
    auth: Option<AuthKey>,
    /// The address format that the hints request.
    format: Option<Format>,
}

/// The object that hints name by its handle; 0: none.
fn named<T: Clone + Send>(
    list: &'static Opened<T>,
    handle: usize,
    what: &str,
) -> Result<Option<(usize, T)>> {
    if handle == 0 {
        return Ok(None);
    }
    let Some(object) = list.get(handle) else {
        info!(
            FI_LOG_FABRIC,
            "the {what} {handle:#x} of the hints is not an open one of this provider"
        );
        return Err(FiErrno::ENODATA);
    };
    Ok(Some((handle, object)))
}

impl Instances {
    /// # Errors
    /// `ENODATA`: a handle of another provider, or a closed one.
    pub(crate) fn of(hints: &Hints) -> Result<Self> {
        let domain = hints.domain.as_ref().map_or(0, |domain| domain.handle);
        let domain = named(&DOMAINS, domain, "domain")?;
        let fabric = match (hints.fabric_handle, &domain) {
            (0, Some((_, domain))) => domain.fabric,
            (handle, _) => handle,
        };
        Ok(Self {
            fabric: named(&FABRICS, fabric, "fabric")?,
            domain,
            auth: hints.domain.as_ref().and_then(|domain| domain.auth.clone()),
            format: hints.format,
        })
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.fabric.is_none() && self.domain.is_none()
    }

    /// The form of the regions of the domain.
    pub(crate) fn mode(&self) -> Option<Mode> {
        self.domain.as_ref().map(|(_, domain)| domain.mode)
    }

    /// The format that addresses must have for the domain's address vectors, if these read no other
    /// one.
    pub(crate) fn format(&self) -> Option<Format> {
        let (_, domain) = self.domain.as_ref()?;
        let any = matches!(domain.format, Format::Sockaddr | Format::Ip);
        (domain.rdm && !any).then_some(domain.format)
    }

    /// Whether a device belongs to them, by the port whose addresses and attributes the offer has,
    /// now or when the fabric was opened.
    pub(crate) fn have(&self, offer: &Offer) -> bool {
        let is_fabric = |(handle, fabric): &(usize, Fabric)| {
            let domain = self.domain.as_ref();
            let mut devices = fabric.devices.iter();
            (offer.fabric_name == fabric.name || devices.any(|name| name == offer.device.name()))
                && domain.is_none_or(|(_, domain)| domain.fabric == *handle)
        };
        let is_domain = |(_, domain): &(usize, Domain)| domain.name == offer.device.name();
        self.fabric.as_ref().is_none_or(is_fabric) && self.domain.as_ref().is_none_or(is_domain)
    }

    /// Gives an offer that belongs to them the name of the fabric: the port may have another prefix
    /// by now, or another port may name the device's fabric.
    pub(crate) fn name_fabric_of(&self, offer: &mut Offer) {
        if let Some((_, fabric)) = &self.fabric {
            offer.fabric_name.clone_from(&fabric.name);
        }
    }

    /// Whether the domain has all that the terms of an offer promise, and what the hints request.
    pub(crate) fn permit(&self, offer: &Offer, terms: &Terms) -> bool {
        self.domain.as_ref().is_none_or(|(_, domain)| {
            provides(domain, offer, terms)
                && self
                    .format
                    .is_none_or(|format| reads(domain, offer, format))
                && (self.auth.is_none() || self.auth == domain.auth)
        })
    }

    /// Names them in an answer with addresses of `format`, or the first open ones with which the
    /// application could have opened the objects of the answer.
    pub(crate) fn name_in(
        &self,
        info: &mut Info,
        version: u32,
        offer: &Offer,
        terms: &Terms,
        format: Format,
    ) {
        let first =
            || FABRICS.first(|open| open.version == version && open.name == offer.fabric_name);
        let named = self.fabric.as_ref().map(|(handle, _)| *handle);
        let Some(fabric) = named.or_else(first) else {
            return;
        };
        info.set_fabric_handle(fabric);
        let suits = |open: &Domain| {
            open.fabric == fabric
                && open.version == version
                && open.name == offer.device.name()
                && provides(open, offer, terms)
                && reads(open, offer, format)
                // the domain's endpoints have its key, and the entry has that of the hints
                && open.auth == self.auth
        };
        let domain = self.domain.as_ref().map(|(handle, _)| *handle);
        if let Some(handle) = domain.or_else(|| DOMAINS.first(suits)) {
            info.set_domain_handle(handle);
        }
    }
}

/// Whether an endpoint of these terms can be opened on a domain of the offer's device, with all
/// that the domain adds to it: shared receive contexts, regions, and the traffic class.
fn provides(domain: &Domain, offer: &Offer, terms: &Terms) -> bool {
    let on_xrc = offer.ep.xrc && offer.ep.number == FI_EP_MSG;
    let counts = domain.events || domain.mode.contains(Mode::RMA_EVENT);
    let class = terms.domain_tclass.octet();
    domain.rdm == (offer.ep.number == FI_EP_RDM)
        && domain.mode == terms.mr.mode
        && (domain.xrc || !on_xrc)
        && (counts || terms.caps & FI_RMA_EVENT == 0)
        && (domain.durable || terms.caps & FI_RMA_PMEM == 0)
        && (class.is_none() || domain.traffic_class == class)
}

/// Whether the domain's address vectors, if its endpoints use them, read addresses of `format`.
fn reads(domain: &Domain, offer: &Offer, format: Format) -> bool {
    offer.ep.number != FI_EP_RDM || domain.format.reads(format)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::getinfo::ep_type;

    /// The fabric was opened before the subnet manager changed the prefix of the device's port.
    #[test]
    fn a_device_stays_in_the_fabric_that_hints_name() {
        let device = weft::verbs::devices(&[softverbs::backend()], false).remove(0);
        let mut offer = Offer::of(&device, &ep_type::MSG).unwrap();
        let instances = |devices: &[&str]| Instances {
            fabric: Some((
                8,
                Fabric {
                    name: "IB-0xfe80000000000001".to_owned(),
                    version: 0,
                    devices: devices.iter().map(|&name| name.to_owned()).collect(),
                },
            )),
            domain: None,
            auth: None,
            format: None,
        };
        assert!(!instances(&["mlx5_0"]).have(&offer));
        let instances = instances(&["mlx5_0", device.name()]);
        assert!(instances.have(&offer));
        instances.name_fabric_of(&mut offer);
        assert_eq!(offer.fabric_name, "IB-0xfe80000000000001");
    }
}
