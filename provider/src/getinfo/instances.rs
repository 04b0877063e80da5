//! Open fabrics and domains in hints and answers (`fabric_attr->fabric`, `domain_attr->domain`;
//! `fi_fabric(3)`, `fi_domain(3)`).

use libfabric_sys::FI_EP_RDM;
use weft::errno::{FiErrno, Result};
use weft::mr::Mode;

use super::hints::Hints;
use super::negotiate::Terms;
use super::offer::Offer;
use crate::ffi::info::Info;
use crate::ffi::log::info;
use crate::opened::{DOMAINS, Domain, FABRICS, Fabric, Opened};

/// The open objects to which hints restrict an answer, with their handles.
pub(crate) struct Instances {
    fabric: Option<(usize, Fabric)>,
    domain: Option<(usize, Domain)>,
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
        Ok(Self {
            fabric: named(&FABRICS, hints.fabric_handle, "fabric")?,
            domain: named(&DOMAINS, domain, "domain")?,
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

    /// Whether a device, as this endpoint type, belongs to them.
    pub(crate) fn have(&self, offer: &Offer) -> bool {
        let is_fabric = |(handle, fabric): &(usize, Fabric)| {
            let domain = self.domain.as_ref();
            fabric.name == offer.fabric_name
                && domain.is_none_or(|(_, domain)| domain.fabric == *handle)
        };
        self.fabric.as_ref().is_none_or(is_fabric)
            && self
                .domain
                .as_ref()
                .is_none_or(|(_, domain)| is_of(domain, offer))
    }

    /// Whether endpoints of these terms can be opened on the domain, whose registrations have one
    /// form.
    pub(crate) fn permit(&self, terms: &Terms) -> bool {
        let domain = self.domain.as_ref();
        domain.is_none_or(|(_, domain)| domain.mode == terms.mr.mode)
    }

    /// Names them in an answer, or the first open ones with which the application could have opened
    /// the objects of the answer.
    pub(crate) fn name_in(&self, info: &mut Info, version: u32, offer: &Offer, terms: &Terms) {
        let first =
            || FABRICS.first(|open| open.version == version && open.name == offer.fabric_name);
        let named = self.fabric.as_ref().map(|(handle, _)| *handle);
        let parent = self.domain.as_ref().map(|(_, domain)| domain.fabric);
        // a domain belongs to one fabric
        let Some(fabric) = named.or(parent).or_else(first) else {
            return;
        };
        info.set_fabric_handle(fabric);
        let suits = |open: &Domain| {
            open.fabric == fabric
                && open.version == version
                && open.mode == terms.mr.mode
                && is_of(open, offer)
        };
        let domain = self.domain.as_ref().map(|(handle, _)| *handle);
        if let Some(handle) = domain.or_else(|| DOMAINS.first(suits)) {
            info.set_domain_handle(handle);
        }
    }
}

fn is_of(domain: &Domain, offer: &Offer) -> bool {
    domain.name == offer.device.name() && domain.rdm == (offer.ep.number == FI_EP_RDM)
}
