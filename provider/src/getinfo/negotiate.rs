//! Matches hints with the offer of a device: the result is the actual behaviour of the endpoint.

use libfabric_sys::*;
use weft::errno::{FiErrno, Result};
use weft::flags::Direction;
use weft::mr::Mode;

use crate::ffi::log::info;
use crate::identity;

use super::ep_type::{DOMAIN_CAPS, EpType, later_caps};
use super::hints::{DomainHints, EpHints, Hints, Side};
use super::mr_mode::{self, MrMode};
use super::offer::{self, Offer, RxLimits};
use super::traffic_class::TrafficClass;

/// The outcome, as far as it depends on the hints.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) caps: u64,
    pub(crate) tx_caps: u64,
    pub(crate) rx_caps: u64,
    pub(crate) mode: u64,
    pub(crate) rx_mode: u64,
    pub(crate) mr: MrMode,
    pub(crate) tx_op_flags: u64,
    pub(crate) rx_op_flags: u64,
    pub(crate) tx_size: usize,
    pub(crate) rx_size: usize,
    pub(crate) inject_size: usize,
    pub(crate) tx_iov_limit: usize,
    pub(crate) rx_iov_limit: usize,
    /// Whether receives come from a shared context.
    pub(crate) shared_rx: bool,
    pub(crate) threading: u32,
    pub(crate) control_progress: u32,
    pub(crate) data_progress: u32,
    pub(crate) cq_data_size: usize,
    pub(crate) max_msg_size: usize,
    pub(crate) tag_format: u64,
    pub(crate) av_type: u32,
    /// Of both sides.
    pub(crate) msg_order: u64,
    pub(crate) tclass: TrafficClass,
    /// The domain's.
    pub(crate) domain_tclass: TrafficClass,
}

/// `Err(ENODATA)` unless `condition`: the hints request more of the attribute `what` than the
/// device has. The log line names the attribute.
fn need(condition: bool, what: &str) -> Result<()> {
    if condition {
        return Ok(());
    }
    info!(
        FI_LOG_FABRIC,
        "the device does not support this attribute of the hints: {what}"
    );
    Err(FiErrno::ENODATA)
}

fn subset(asked: u64, offered: u64, what: &str) -> Result<()> {
    if asked & !offered == 0 {
        return Ok(());
    }
    need(false, &format!("{what} {:#x}", asked & !offered))
}

fn class_of(tclass: u32, what: &str) -> Result<TrafficClass> {
    let class = TrafficClass::of(tclass);
    need(class.is_some(), what)?;
    Ok(class.unwrap_or_default())
}

/// The possible terms, one per `mr_mode`, best first. With `forced`, only the terms of that form.
pub(crate) fn all_terms(
    version: u32,
    hints: &Hints,
    offer: &Offer,
    forced: Option<Mode>,
) -> Vec<Terms> {
    let forms = mr_mode::of_offer(version, hints, offer, forced).inspect_err(|_| {
        let device = offer.device.name();
        let offered = hints.domain.as_ref().map_or(0, |domain| domain.mr_mode);
        info!(
            FI_LOG_FABRIC,
            "{device} has no memory regions for mr_mode {offered:#x} and caps {:#x}", hints.caps
        );
    });
    let forms = forms.unwrap_or_default().into_iter();
    forms
        .filter_map(|mr| negotiate(version, hints, offer, mr).ok())
        .collect()
}

/// Matches hints and offer, for regions of the form `mr`.
///
/// # Errors
/// `ENODATA`: the device does not have something that the hints request.
fn negotiate(version: u32, hints: &Hints, offer: &Offer, mr: MrMode) -> Result<Terms> {
    let domain = hints.domain.clone().unwrap_or_default();
    let tx = hints.tx.unwrap_or_default();
    let rx = hints.rx.unwrap_or_default();
    let ep = hints.ep.clone().unwrap_or_default();

    check_names(hints, offer)?;
    check_ep(&ep, offer)?;
    check_domain(&domain, offer)?;
    // with FI_MR_RMA_EVENT regions count, so endpoints have the capability
    let counts = if mr.mode.contains(Mode::RMA_EVENT) || mr_mode::counts(hints) {
        FI_RMA_EVENT
    } else {
        0
    };
    let later = later_caps(version);
    subset(hints.caps | tx.caps | rx.caps, !later, "caps")?;
    let caps = capabilities(
        offer.ep,
        offer.primary_caps,
        hints.caps | counts,
        tx.caps,
        rx.caps,
    )?;
    check_durable(caps.0, offer)?;
    need(domain.mr_key_size <= mr.key_size(), "mr_key_size")?;
    let cq_data = CqData::of(hints, &rx, caps.0, offer.ep);
    need(
        domain.cq_data_size <= cq_data.size,
        "cq_data_size (with FI_RMA it requires mode FI_RX_CQ_DATA)",
    )?;
    let order = offer.ep.order(caps.0);
    let durable = caps.0 & FI_RMA_PMEM != 0;
    let tx_op_flags = offer.ep.op_flags(Direction::Transmit, durable);
    check_side(offer.ep, &tx, (tx_op_flags, order), "tx_attr")?;
    check_side(offer.ep, &rx, (offer.ep.rx_op_flags, order), "rx_attr")?;
    let tclass = class_of(tx.tclass, "tx_attr->tclass")?;
    let domain_tclass = class_of(domain.tclass, "domain_attr->tclass")?;
    let shared_rx = ep.rx_ctx_cnt == FI_SHARED_CONTEXT;
    let rx_limits = offer.rx_limits(shared_rx);
    check_sizes(&tx, &rx, offer, rx_limits)?;

    Ok(Terms {
        caps: caps.0,
        tx_caps: caps.1,
        rx_caps: caps.2,
        mode: cq_data.rx_mode | if mr.legacy_local { FI_LOCAL_MR } else { 0 },
        rx_mode: cq_data.rx_mode,
        mr,
        tx_op_flags: tx.op_flags,
        rx_op_flags: rx.op_flags,
        tx_size: chosen(tx.size, offer.tx_size.1),
        rx_size: chosen(rx.size, rx_limits.size.1),
        inject_size: tx.inject_size.max(offer.inject.1),
        tx_iov_limit: offer.tx_iov_limit,
        rx_iov_limit: rx_limits.iov_limit,
        shared_rx,
        threading: if domain.threading == FI_THREAD_UNSPEC {
            FI_THREAD_SAFE
        } else {
            domain.threading // objects are thread safe, so any model works
        },
        control_progress: progress(domain.control_progress, FI_PROGRESS_AUTO),
        data_progress: progress(domain.data_progress, offer.ep.data_progress),
        cq_data_size: cq_data.size,
        max_msg_size: offer.max_msg_size,
        tag_format: match ep.mem_tag_format {
            // a format promises only that masks are regular, and any mask is accepted
            format if offer.ep.tag_format != 0 && format != 0 => format,
            _ => offer.ep.tag_format,
        },
        // both types of address vectors work; connected endpoints use none
        av_type: match offer.ep.number {
            FI_EP_RDM => domain.av_type,
            _ => FI_AV_UNSPEC,
        },
        // connected endpoints have all orders at no cost
        msg_order: match tx.msg_order | rx.msg_order {
            asked if asked != 0 && offer.ep.number == FI_EP_RDM => asked,
            _ => order,
        },
        // connected endpoints on XRC share queue pairs, which have the class of the domain
        tclass: match offer.ep.xrc && offer.ep.number == FI_EP_MSG {
            true => TrafficClass::UNSPEC,
            false => tclass,
        },
        domain_tclass,
    })
}

/// Remote CQ data of an endpoint.
struct CqData {
    /// Bytes.
    size: usize,
    /// `FI_RX_CQ_DATA`, or 0.
    rx_mode: u64,
}

impl CqData {
    /// Remote CQ data of an RMA write consumes a receive (`FI_RX_CQ_DATA`), so an application must
    /// support that mode to have both. Without the mode the answer has no remote CQ data.
    fn of(hints: &Hints, rx: &Side, caps: u64, ep: &EpType) -> Self {
        let offered_mode = hints.mode.unwrap_or(!0);
        let rx_offered = rx.mode.unwrap_or(offered_mode);
        let wants_mode = caps & FI_RMA != 0;
        let has_mode = offered_mode & rx_offered & FI_RX_CQ_DATA != 0;
        if ep.number == FI_EP_RDM {
            // it has a packet of its own
            return Self {
                size: ep.cq_data_size,
                rx_mode: 0,
            };
        }
        let (size, rx_mode) = match (wants_mode, has_mode) {
            (true, true) => (ep.cq_data_size, FI_RX_CQ_DATA),
            (true, false) => (0, 0),
            (false, _) => (ep.cq_data_size, 0),
        };
        Self { size, rx_mode }
    }
}

/// The requested value, or the default: not the greatest value, because a queue needs memory.
fn chosen(asked: usize, default: usize) -> usize {
    if asked == 0 { default } else { asked }
}

/// The requested progress, or the default.
fn progress(asked: u32, default: u32) -> u32 {
    match asked {
        FI_PROGRESS_UNSPEC => default,
        asked => asked,
    }
}

/// All capabilities, those of the transmit side, and those of the receive side.
///
/// Primary capabilities are in the answer only if they are requested (all of them, if none is
/// requested). Without a modifier each primary capability has all of its modifiers; with modifiers,
/// only these (fi_getinfo(3)).
///
/// A side ignores the modifiers and secondary capabilities of the other one, as in libfabric's own
/// providers: OpenSHMEM libraries set them on both sides.
///
/// `offered`: the primary capabilities of the device.
fn capabilities(
    ep: &EpType,
    offered: u64,
    asked: u64,
    tx: u64,
    rx: u64,
) -> Result<(u64, u64, u64)> {
    let tx = tx & !(ep.rx_modifiers | ep.rx_secondary & !ep.tx_secondary);
    let rx = rx & !(ep.tx_modifiers | ep.tx_secondary & !ep.rx_secondary);
    let all = offered | (ep.caps() & !ep.primary_caps);
    subset(asked | tx | rx, all, "caps")?;
    subset(
        tx,
        ep.primary_caps | ep.tx_modifiers | ep.tx_secondary | DOMAIN_CAPS,
        "tx_attr->caps",
    )?;
    subset(
        rx,
        ep.primary_caps | ep.rx_modifiers | ep.rx_secondary | DOMAIN_CAPS,
        "rx_attr->caps",
    )?;
    // A capability that one side requests counts as requested. (With caps 0, all are.)
    let primary = match asked & ep.primary_caps {
        0 if (tx | rx) & ep.primary_caps != 0 => (tx | rx) & ep.primary_caps,
        0 => offered,
        some => some,
    };
    subset((tx | rx) & ep.primary_caps, primary, "caps of one side")?;
    let belonging = |kind: u64, modifiers: u64| if primary & kind != 0 { modifiers } else { 0 };
    let message = belonging(FI_MSG | FI_TAGGED, FI_SEND | FI_RECV);
    let rma = belonging(
        FI_RMA | FI_ATOMIC,
        FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE,
    );
    let given = asked & (ep.tx_modifiers | ep.rx_modifiers);
    // A modifier of an absent capability has no meaning.
    let narrowed = |all: u64| if given & all == 0 { all } else { given & all };
    let modifiers = narrowed(message) | narrowed(rma);
    let free = match asked | tx | rx {
        0 => ep.default_secondary,
        _ => 0,
    };
    let secondary = DOMAIN_CAPS | free | ((asked | tx | rx) & (ep.tx_secondary | ep.rx_secondary));
    let side = |wanted: u64, modifiers_of_side: u64, secondary_of_side: u64| {
        let all = primary | (modifiers & modifiers_of_side) | (secondary & secondary_of_side);
        let side_modifiers = wanted & modifiers_of_side;
        if wanted & ep.primary_caps == 0 {
            all
        } else if side_modifiers == 0 {
            all & (wanted | modifiers_of_side)
        } else {
            all & wanted
        }
    };
    Ok((
        primary | modifiers | secondary,
        side(tx, ep.tx_modifiers, ep.tx_secondary),
        side(rx, ep.rx_modifiers, ep.rx_secondary),
    ))
}

/// Checks the names of the provider's objects.
fn check_names(hints: &Hints, offer: &Offer) -> Result<()> {
    need(hints.prov_version <= identity::version(), "prov_version")?;
    let fabric = hints.fabric_name.as_ref();
    need(
        fabric.is_none_or(|name| *name == offer.fabric_name),
        "fabric_attr->name",
    )?;
    let nic = hints.nic_name.as_ref();
    need(
        nic.is_none_or(|name| name == offer.device.name()),
        "nic->device_attr->name",
    )
}

/// Checks that writes can be durable if they must be.
fn check_durable(caps: u64, offer: &Offer) -> Result<()> {
    let durable = caps & FI_RMA_PMEM != 0;
    need(!durable || offer.flushes(), "caps FI_RMA_PMEM")?;
    need(
        !durable || caps & FI_RMA != 0,
        "caps FI_RMA_PMEM without FI_RMA",
    )
}

/// Checks the sizes and limits of both sides.
fn check_sizes(tx: &Side, rx: &Side, offer: &Offer, rx_limits: RxLimits) -> Result<()> {
    need(tx.inject_size <= offer.inject.0, "inject_size")?;
    need(
        tx.size <= offer.tx_size.0 && rx.size <= rx_limits.size.0,
        "size",
    )?;
    need(
        tx.iov_limit <= offer.tx_iov_limit && rx.iov_limit <= rx_limits.iov_limit,
        "iov_limit",
    )?;
    need(tx.rma_iov_limit <= offer.ep.rma_iov_limit, "rma_iov_limit")
}

/// `op_flags`, `order`: what the side has at most.
fn check_side(ep: &EpType, side: &Side, (op_flags, order): (u64, u64), name: &str) -> Result<()> {
    subset(side.op_flags, op_flags, &format!("{name}->op_flags"))?;
    subset(side.msg_order, order, &format!("{name}->msg_order"))?;
    subset(
        side.comp_order,
        ep.comp_order,
        &format!("{name}->comp_order"),
    )
}

fn check_ep(ep: &EpHints, offer: &Offer) -> Result<()> {
    need(
        ep.kind == FI_EP_UNSPEC || ep.kind == offer.ep.number,
        "ep_attr->type",
    )?;
    need(
        ep.protocol == FI_PROTO_UNSPEC || ep.protocol == offer.protocol,
        "protocol",
    )?;
    need(
        ep.protocol_version <= offer.ep.protocol_version,
        "protocol_version",
    )?;
    need(ep.max_msg_size <= offer.max_msg_size, "max_msg_size")?;
    need(ep.msg_prefix_size == 0, "msg_prefix_size")?;
    need(
        ep.max_order_raw <= offer.max_order_size && ep.max_order_waw <= offer.max_order_size,
        "max_order_raw_size, max_order_waw_size",
    )?;
    need(
        ep.max_order_war <= offer.max_order_war_size,
        "max_order_war_size",
    )?;
    // shared contexts are SIZE_MAX
    need(ep.tx_ctx_cnt <= 1, "tx_ctx_cnt")?;
    let shares = ep.rx_ctx_cnt == FI_SHARED_CONTEXT;
    need(
        !offer.ep.xrc || offer.ep.number == FI_EP_RDM || shares,
        "rx_ctx_cnt (connected endpoints on XRC have FI_SHARED_CONTEXT)",
    )?;
    need(
        ep.rx_ctx_cnt <= 1 || (ep.rx_ctx_cnt == FI_SHARED_CONTEXT && offer.shared_rx.is_some()),
        "rx_ctx_cnt",
    )
}

fn check_domain(domain: &DomainHints, offer: &Offer) -> Result<()> {
    need(
        domain
            .name
            .as_ref()
            .is_none_or(|name| name == offer.device.name()),
        "domain_attr->name",
    )?;
    need(domain.threading <= FI_THREAD_ENDPOINT, "threading")?;
    need(
        domain.control_progress <= FI_PROGRESS_CONTROL_UNIFIED,
        "control_progress",
    )?;
    // since 2.0 the field is `progress`, the only one; FI_PROGRESS_CONTROL_UNIFIED implies manual
    need(
        domain.data_progress <= FI_PROGRESS_CONTROL_UNIFIED,
        "data_progress",
    )?;
    need(domain.resource_mgmt <= FI_RM_ENABLED, "resource_mgmt")?;
    need(domain.av_type <= FI_AV_TABLE, "av_type")?;
    subset(domain.caps, DOMAIN_CAPS, "domain_attr->caps")?;
    need(
        domain.cq_cnt <= offer.cq_cnt && domain.ep_cnt <= offer.ep_cnt,
        "cq_cnt, ep_cnt",
    )?;
    need(
        domain.tx_ctx_cnt <= offer.ep_cnt && domain.rx_ctx_cnt <= offer.ep_cnt,
        "domain_attr->tx_ctx_cnt, domain_attr->rx_ctx_cnt",
    )?;
    need(
        domain.max_ep_tx_ctx <= 1 && domain.max_ep_rx_ctx <= 1,
        "max_ep_tx_ctx, max_ep_rx_ctx",
    )?;
    need(
        domain.max_ep_stx_ctx == 0 && domain.max_ep_srx_ctx <= offer.max_sharing(),
        "max_ep_stx_ctx, max_ep_srx_ctx",
    )?;
    need(domain.cntr_cnt <= offer::CNTR_CNT, "cntr_cnt")?;
    need(
        domain.mr_cnt <= offer.mr_cnt && domain.mr_iov_limit <= offer::MR_IOV_LIMIT,
        "mr_cnt, mr_iov_limit",
    )?;
    need(domain.max_err_data <= offer::MAX_ERR_DATA, "max_err_data")?;
    need(
        domain.max_ep_auth_key == 0 && domain.max_group_id == 0,
        "max_ep_auth_key, max_group_id",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::getinfo::ep_type::{MSG, RDM};

    const ALL: u64 = MSG.primary_caps;

    fn of_msg(offered: u64, asked: u64, tx: u64, rx: u64) -> Result<(u64, u64, u64)> {
        capabilities(&MSG, offered, asked, tx, rx)
    }

    #[test]
    fn every_subset_of_capabilities_comes_back_whole_and_without_more_primaries() {
        for asked in [
            0,
            FI_MSG,
            FI_RMA,
            FI_MSG | FI_RMA,
            FI_MSG | FI_SEND,
            FI_RMA | FI_WRITE | FI_REMOTE_READ,
            FI_ATOMIC,
            FI_MSG | FI_ATOMIC | FI_READ,
            FI_MSG | FI_RMA | FI_FENCE,
        ] {
            let (caps, tx, rx) = of_msg(ALL, asked, 0, 0).unwrap();
            assert_eq!(caps & asked, asked);
            if asked != 0 {
                assert_eq!(caps & ALL, asked & ALL);
            }
            assert_eq!((tx | rx) & !caps, 0);
            assert_eq!(tx & MSG.rx_modifiers, 0);
            assert_eq!(rx & MSG.tx_modifiers, 0);
        }
    }

    #[test]
    fn modifiers_narrow_only_their_own_capability() {
        let (caps, tx, rx) = of_msg(ALL, FI_MSG | FI_RMA | FI_SEND, 0, 0).unwrap();
        assert_eq!(caps & FI_RECV, 0);
        assert_eq!(
            tx & (FI_SEND | FI_READ | FI_WRITE),
            FI_SEND | FI_READ | FI_WRITE
        );
        assert_eq!(rx & FI_REMOTE_WRITE, FI_REMOTE_WRITE);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        for asked in [FI_TAGGED, FI_MULTICAST, FI_HMEM, 1 << 62] {
            assert_eq!(of_msg(ALL, asked, 0, 0), Err(FiErrno::ENODATA));
        }
        let without = ALL & !FI_ATOMIC;
        let refused = of_msg(without, FI_ATOMIC, 0, 0);
        assert_eq!(refused, Err(FiErrno::ENODATA));
        assert_eq!(of_msg(without, 0, 0, 0).unwrap().0 & FI_ATOMIC, 0);
        assert_ne!(of_msg(ALL, 0, 0, 0).unwrap().0 & FI_ATOMIC, 0);
        assert_eq!(of_msg(ALL, FI_MSG, FI_RMA, 0), Err(FiErrno::ENODATA));
        assert_eq!(of_msg(ALL, 0, FI_TAGGED, 0), Err(FiErrno::ENODATA));
    }

    #[test]
    fn a_side_ignores_the_modifiers_of_the_other_one() {
        let of_rdm = |asked, tx, rx| capabilities(&RDM, RDM.primary_caps, asked, tx, rx);
        let one_sided = FI_RMA | FI_ATOMIC;
        let asked = one_sided | FI_RMA_EVENT;
        let both = asked | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let plain = of_rdm(asked, one_sided, asked).unwrap();
        assert_eq!(
            of_rdm(asked, both | FI_RECV, both | FI_FENCE).unwrap(),
            plain
        );
        assert_eq!(of_msg(ALL, 0, FI_RECV, 0), of_msg(ALL, 0, 0, 0));
    }

    #[test]
    fn endpoints_with_many_peers_have_messages_rma_and_atomics() {
        let of_rdm = |asked, tx, rx| capabilities(&RDM, RDM.primary_caps, asked, tx, rx);
        let (caps, tx, rx) = of_rdm(0, 0, 0).unwrap();
        let on_request = FI_FENCE | FI_RMA_PMEM | FI_RMA_EVENT | FI_TAGGED_DIRECTED_RECV;
        assert_eq!(caps, RDM.caps() & !on_request);
        assert_eq!(tx & RDM.rx_secondary, 0);
        assert_eq!(rx & RDM.rx_secondary, RDM.default_secondary);
        // what costs something is there on request
        let (caps, _, rx) = of_rdm(FI_TAGGED | FI_SOURCE, 0, 0).unwrap();
        let expected = FI_TAGGED | FI_SOURCE | FI_SEND | FI_RECV | DOMAIN_CAPS;
        assert_eq!(caps, expected);
        assert_eq!(rx, expected & !FI_SEND & !DOMAIN_CAPS);
        let (caps, tx, rx) = of_rdm(FI_MSG | FI_TAGGED, FI_TAGGED, FI_MSG | FI_MULTI_RECV).unwrap();
        assert_eq!(caps & FI_MULTI_RECV, FI_MULTI_RECV);
        assert_eq!(tx, FI_TAGGED | FI_SEND);
        assert_eq!(rx, FI_MSG | FI_RECV | FI_MULTI_RECV);
        let (caps, tx, rx) = of_rdm(FI_RMA | FI_WRITE | FI_FENCE, 0, 0).unwrap();
        assert_eq!(caps, FI_RMA | FI_WRITE | FI_FENCE | DOMAIN_CAPS);
        assert_eq!(tx, FI_RMA | FI_WRITE | FI_FENCE);
        assert_eq!(rx, FI_RMA);
        let (caps, tx, rx) = of_rdm(FI_ATOMIC, 0, 0).unwrap();
        assert_eq!(caps & (FI_MSG | FI_TAGGED | FI_SEND | FI_RECV), 0);
        assert_eq!(tx & !DOMAIN_CAPS, FI_ATOMIC | FI_READ | FI_WRITE);
        assert_eq!(rx, FI_ATOMIC | FI_REMOTE_READ | FI_REMOTE_WRITE);
        for asked in [FI_MULTICAST, FI_HMEM] {
            assert_eq!(of_rdm(asked, 0, 0), Err(FiErrno::ENODATA), "{asked:#x}");
        }
        assert_eq!(of_rdm(FI_MSG, FI_SOURCE, 0), of_rdm(FI_MSG, 0, 0));
    }
}
