//! The warnings about queries without an answer: one about a query that failed only for its
//! `mr_mode` (which bits to offer, and why), and one about a query that named the protocol of XRC.
//!
//! The reason is found by a trial: an `mr_mode` with which the same query is answered. A query that
//! fails for another reason too has no such `mr_mode`, and causes no warning.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libfabric_sys::*;
use weft::mr::Mode;
use weft::verbs::Device;

use super::hints::Hints;
use super::layered;
use super::negotiate::all_terms;
use super::offer::{Offer, unsupported};
use super::resolve::{self, Path};

use crate::ffi::log::warning;
use crate::ffi::param;

/// One line per process, at a level that libfabric shows by default.
static SAID: AtomicBool = AtomicBool::new(false);

/// Logs the first query of the process that failed only for its `mr_mode`: which bits to offer, and
/// why. A layered provider's query is logged only if it names weft: otherwise the application may
/// have meant any provider.
///
/// Called for queries that no device answered.
pub(crate) fn report(version: u32, flags: u64, hints: &Hints, offers: &[Offer], paths: &[Path]) {
    if SAID.load(Relaxed) || layered::is_layered(flags) && !hints.names_weft {
        return;
    }
    let Some(offered) = hints.domain.as_ref().map(|domain| domain.mr_mode) else {
        return;
    };
    let query = |offer, forced| Query {
        version,
        hints,
        offer,
        paths,
        forced,
    };
    let forced = param::values().mr_mode;
    let mut reasons = offers.iter().filter_map(|offer| {
        let reason = query(offer, forced).reason(offered)?;
        Some((offer.device.name(), reason))
    });
    if let Some((device, reason)) = reasons.next()
        && !SAID.swap(true, Relaxed)
    {
        let offered = names(offered);
        warning!(
            FI_LOG_FABRIC,
            "fi_getinfo: {device} does not support mr_mode {offered}: {reason}"
        );
    }
}

/// Logs, once per process, why the devices have no answer to hints that name the protocol of XRC.
///
/// Called for queries that no device answered.
pub(crate) fn report_xrc(flags: u64, hints: &Hints, devices: &[Arc<Device>]) {
    static SAID: AtomicBool = AtomicBool::new(false);
    let asked = hints.protocol() == FI_PROTO_RDMA_CM_IB_XRC;
    if !asked || SAID.load(Relaxed) || layered::is_layered(flags) && !hints.names_weft {
        return;
    }
    let name = hints
        .domain
        .as_ref()
        .and_then(|domain| domain.name.as_ref());
    let asked = |device: &&Arc<Device>| name.is_none_or(|name| name == device.name());
    let reasons = devices.iter().filter(asked).filter_map(|device| {
        let reason = without_xrc(device)?;
        Some(format!("{}: {reason}", device.name()))
    });
    let mut reasons = reasons.collect::<Vec<_>>();
    let ep = hints.ep.as_ref();
    if reasons.is_empty()
        && ep.is_some_and(|ep| ep.kind == FI_EP_MSG && ep.rx_ctx_cnt != FI_SHARED_CONTEXT)
    {
        let reason = "FI_EP_MSG needs ep_attr->rx_ctx_cnt of FI_SHARED_CONTEXT";
        reasons.push(reason.to_owned());
    }
    if !reasons.is_empty() && !SAID.swap(true, Relaxed) {
        warning!(
            FI_LOG_FABRIC,
            "fi_getinfo: FI_PROTO_RDMA_CM_IB_XRC is not offered: {}",
            reasons.join("; ")
        );
    }
}

/// The reason for which a device has no endpoints on XRC; `None`: it has them.
fn without_xrc(device: &Arc<Device>) -> Option<String> {
    let attr = device.attr();
    if let Some(reason) = unsupported(attr) {
        return Some(reason.to_owned());
    }
    if !attr.xrc {
        return Some("the device reports no XRC (IBV_DEVICE_XRC)".to_owned());
    }
    match device.xrc_behaviour() {
        Err(error) => Some(format!("the trial of its XRC has failed: {error}")),
        Ok(seen) if seen.is_usable() => None,
        Ok(seen) => Some(format!(
            "its XRC cannot be used: messages: {}; protection domains checked: {}",
            seen.messages, seen.domain_checked
        )),
    }
}

/// A query that was not answered, at one device.
struct Query<'a> {
    version: u32,
    hints: &'a Hints,
    offer: &'a Offer,
    paths: &'a [Path],
    /// `FI_WEFT_MR_MODE`
    forced: Option<Mode>,
}

impl Query<'_> {
    /// Whether the query would have been answered with this `mr_mode`.
    fn works_with(&self, mr_mode: i32, forced: Option<Mode>) -> bool {
        let mut hints = self.hints.clone();
        if let Some(domain) = &mut hints.domain {
            domain.mr_mode = mr_mode;
        }
        let own = self.offer.addresses();
        let mut paths = self.paths.iter();
        paths.any(|path| {
            !resolve::of_device(&own, self.offer.host_only, path, hints.format).is_empty()
        }) && !all_terms(self.version, &hints, self.offer, forced).is_empty()
    }

    /// The change of `mr_mode` with which the query is answered, if there is one.
    fn reason(&self, offered: i32) -> Option<String> {
        if let Some(forced) = self.forced {
            let bits = forced.bits().cast_signed();
            if self.works_with(offered | bits, self.forced) {
                let missing = names(bits & !offered);
                return Some(format!(
                    "FI_WEFT_MR_MODE requires more bits: offer {missing}"
                ));
            }
            let works = self.works_with(offered, None);
            return works.then(|| format!("FI_WEFT_MR_MODE permits {} only", names(bits)));
        }
        let old = offered & (FI_MR_BASIC | FI_MR_SCALABLE);
        let bits = offered & !old;
        if self.version < fi_version(1, 5) {
            return if offered != FI_MR_SCALABLE {
                let works = self.works_with(FI_MR_BASIC, None);
                works.then(|| "before API 1.5 offer either FI_MR_BASIC or FI_MR_SCALABLE, and no other bit".to_owned())
            } else {
                let works = self.works_with(FI_MR_BASIC, None);
                works.then(|| "this device pins memory: offer FI_MR_BASIC".to_owned())
            };
        }
        if old != 0 && (bits != 0 || old == FI_MR_BASIC | FI_MR_SCALABLE) {
            let works = [FI_MR_BASIC, FI_MR_SCALABLE, bits]
                .into_iter()
                .any(|alone| alone & !offered == 0 && self.works_with(alone, None));
            let text = || {
                format!(
                    "{} excludes other bits: offer it alone, or leave it out",
                    names(old)
                )
            };
            return works.then(text);
        }
        // a device that pins memory needs it present (ALLOCATED), or a notification when it is
        // (MMU_NOTIFY)
        let pages = [FI_MR_ALLOCATED, FI_MR_MMU_NOTIFY];
        let remedies = pages
            .into_iter()
            .filter(|bit| self.works_with(bits | bit, None))
            .map(names)
            .collect::<Vec<_>>();
        (!remedies.is_empty())
            .then(|| format!("this device pins memory: offer {}", remedies.join(" or ")))
    }
}

/// The bits by their names.
fn names(mr_mode: i32) -> String {
    let mut text = String::new();
    let mut add = |name: &str| {
        let separator = if text.is_empty() { "" } else { "|" };
        let _ = write!(text, "{separator}FI_MR_{name}");
    };
    for (bit, name) in [(FI_MR_BASIC, "BASIC"), (FI_MR_SCALABLE, "SCALABLE")] {
        if mr_mode & bit != 0 {
            add(name);
        }
    }
    for (name, _) in Mode::from_bits_truncate(mr_mode.cast_unsigned()).iter_names() {
        add(name);
    }
    if text.is_empty() {
        "0".to_owned()
    } else {
        text
    }
}
