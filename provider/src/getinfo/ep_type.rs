//! The endpoint types, and what is the same on all devices for each of them.

use libfabric_sys::*;
use weft::flags::Direction;
use weft::rdm::Directed;

use crate::ffi::param;

/// An endpoint type (`ep_attr->type`) and its attributes that do not depend on the device.
#[derive(Debug)]
pub(crate) struct EpType {
    /// `FI_EP_*`
    pub(crate) number: u32,
    /// For the log.
    pub(crate) name: &'static str,
    /// Primary capabilities; a device may lack atomics.
    pub(crate) primary_caps: u64,
    /// Directions in which the primary capabilities may be used.
    pub(crate) tx_modifiers: u64,
    pub(crate) rx_modifiers: u64,
    /// Further capabilities of the transmit side and of the receive side, which the answer has only
    /// if they are requested.
    pub(crate) tx_secondary: u64,
    pub(crate) rx_secondary: u64,
    /// Those of the secondary capabilities that are also in the answer to hints without
    /// capabilities.
    pub(crate) default_secondary: u64,
    /// Operation flags that may be made a default.
    pub(crate) tx_op_flags: u64,
    pub(crate) rx_op_flags: u64,
    pub(crate) msg_order: u64,
    /// Those of the orders that endpoints with `FI_ATOMIC` do not keep.
    pub(crate) order_without_atomics: u64,
    pub(crate) comp_order: u64,
    /// Bytes of remote CQ data.
    pub(crate) cq_data_size: usize,
    pub(crate) rma_iov_limit: usize,
    /// Version of the format of connection data and packets.
    pub(crate) protocol_version: u32,
    /// `mem_tag_format`; 0 without `FI_TAGGED`.
    pub(crate) tag_format: u64,
    /// Whether endpoints are on XRC (`FI_PROTO_RDMA_CM_IB_XRC`).
    pub(crate) xrc: bool,
    /// Data progress unless hints request one: by the device, or by the application's calls.
    pub(crate) data_progress: u32,
}

/// Offered without a request, because they have no cost. The embedded device reaches the emulated
/// remote nodes of its host, so every device has both local and remote peers.
pub(crate) const DOMAIN_CAPS: u64 = FI_LOCAL_COMM | FI_REMOTE_COMM;

/// The capabilities that API `version` does not have.
pub(crate) fn later_caps(version: u32) -> u64 {
    match version >= fi_version(2, 0) {
        true => 0,
        false => FI_TAGGED_DIRECTED_RECV,
    }
}

/// The receives that compare the source, with these capabilities.
pub(crate) fn directed(caps: u64) -> Directed {
    Directed {
        untagged: caps & FI_DIRECTED_RECV != 0,
        tagged: caps & (FI_DIRECTED_RECV | FI_TAGGED_DIRECTED_RECV) != 0,
    }
}

/// A verbs send completes when the peer's device has acknowledged it, which covers each of the
/// three completion levels.
const TX_OP_FLAGS: u64 =
    FI_COMPLETION | FI_INJECT | FI_INJECT_COMPLETE | FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE;

/// Connected endpoints.
pub(crate) static MSG: EpType = EpType {
    number: FI_EP_MSG,
    name: "FI_EP_MSG",
    primary_caps: FI_MSG | FI_RMA | FI_ATOMIC,
    tx_modifiers: FI_SEND | FI_READ | FI_WRITE,
    rx_modifiers: FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE,
    // verbs has a fence bit, and a device may have flushes
    tx_secondary: FI_FENCE | FI_RMA_PMEM,
    // counting peers' operations on regions, and regions that peers may flush
    rx_secondary: FI_RMA_EVENT | FI_RMA_PMEM,
    default_secondary: 0,
    tx_op_flags: TX_OP_FLAGS,
    rx_op_flags: FI_COMPLETION,
    // Orderings of a reliable connection (IB specification, table of ordering rules): all except
    // that of operations after an RDMA read, which may still be outstanding.
    msg_order: FI_ORDER_RAR
        | FI_ORDER_RAW
        | FI_ORDER_RAS
        | FI_ORDER_WAW
        | FI_ORDER_WAS
        | FI_ORDER_SAW
        | FI_ORDER_SAS
        | FI_ORDER_RMA_RAR
        | FI_ORDER_RMA_RAW
        | FI_ORDER_RMA_WAW
        | FI_ORDER_ATOMIC_RAR
        | FI_ORDER_ATOMIC_RAW
        | FI_ORDER_ATOMIC_WAR
        | FI_ORDER_ATOMIC_WAW,
    order_without_atomics: 0,
    // each queue completes in the order of its posts
    comp_order: FI_ORDER_STRICT,
    cq_data_size: 4, // verbs' immediate data
    rma_iov_limit: 1,
    protocol_version: 1, // docs/protocol.md
    tag_format: 0,
    xrc: false,
    data_progress: FI_PROGRESS_AUTO,
};

/// Connected endpoints on XRC, which have a shared receive context.
pub(crate) static MSG_XRC: EpType = EpType {
    name: "FI_EP_MSG, FI_PROTO_RDMA_CM_IB_XRC",
    // initiators have no flushes
    tx_secondary: FI_FENCE,
    rx_secondary: FI_RMA_EVENT,
    xrc: true,
    ..MSG
};

/// Endpoints with many peers.
pub(crate) static RDM: EpType = EpType {
    number: FI_EP_RDM,
    name: "FI_EP_RDM",
    primary_caps: FI_MSG | FI_TAGGED | FI_RMA | FI_ATOMIC,
    tx_modifiers: FI_SEND | FI_READ | FI_WRITE,
    rx_modifiers: FI_RECV | FI_REMOTE_READ | FI_REMOTE_WRITE,
    tx_secondary: FI_FENCE | FI_RMA_PMEM,
    rx_secondary: FI_MULTI_RECV
        | FI_DIRECTED_RECV
        | FI_TAGGED_DIRECTED_RECV
        | FI_SOURCE
        | FI_RMA_EVENT
        | FI_RMA_PMEM,
    default_secondary: FI_MULTI_RECV | FI_DIRECTED_RECV | FI_SOURCE,
    tx_op_flags: TX_OP_FLAGS,
    rx_op_flags: FI_COMPLETION | FI_MULTI_RECV,
    // RMA of a reliable connection, as above; packets, those of atomics too, are processed in their
    // order
    msg_order: FI_ORDER_RAR
        | FI_ORDER_RAW
        | FI_ORDER_RAS
        | FI_ORDER_WAW
        | FI_ORDER_WAS
        | FI_ORDER_SAW
        | FI_ORDER_SAS
        | FI_ORDER_RMA_RAR
        | FI_ORDER_RMA_RAW
        | FI_ORDER_RMA_WAW
        | FI_ORDER_ATOMIC_RAR
        | FI_ORDER_ATOMIC_RAW
        | FI_ORDER_ATOMIC_WAR
        | FI_ORDER_ATOMIC_WAW,
    // the device executes RMA, and the target's processor atomics
    order_without_atomics: FI_ORDER_RAR | FI_ORDER_RAW | FI_ORDER_WAW,
    // a long message completes after later short ones
    comp_order: FI_ORDER_NONE,
    cq_data_size: 8,
    rma_iov_limit: 4,
    protocol_version: 1, // docs/protocol-rdm.md
    tag_format: FI_TAG_GENERIC,
    xrc: false,
    data_progress: FI_PROGRESS_MANUAL,
};

/// Endpoints with many peers on XRC.
pub(crate) static RDM_XRC: EpType = EpType {
    name: "FI_EP_RDM, FI_PROTO_RDMA_CM_IB_XRC",
    protocol_version: 1, // docs/protocol-xrc.md
    xrc: true,
    ..RDM
};

impl EpType {
    /// Every capability that hints may request, if the device has all primary ones.
    pub(crate) fn caps(&self) -> u64 {
        self.primary_caps
            | self.tx_modifiers
            | self.rx_modifiers
            | self.tx_secondary
            | self.rx_secondary
            | DOMAIN_CAPS
    }

    /// The flags that can be default flags of operations. `durable`: writes can be made durable.
    pub(crate) fn op_flags(&self, direction: Direction, durable: bool) -> u64 {
        match direction {
            Direction::Transmit if durable => self.tx_op_flags | FI_COMMIT_COMPLETE,
            Direction::Transmit => self.tx_op_flags,
            Direction::Receive => self.rx_op_flags,
        }
    }

    /// The orders that endpoints with these capabilities keep.
    pub(crate) fn order(&self, caps: u64) -> u64 {
        if caps & FI_ATOMIC == 0 {
            self.msg_order
        } else {
            self.msg_order & !self.order_without_atomics
        }
    }
}

/// The types that are offered to hints with this protocol, in the order of the answers. On one
/// device, all entries of one type come before those of the next one.
pub(crate) fn offered(protocol: u32) -> Vec<&'static EpType> {
    let params = param::values();
    let mut types = in_order(protocol, params.xrc);
    types.retain(|ep| params.rdm || ep.number != FI_EP_RDM);
    types
}

/// The types for hints with this protocol. `xrc`: the parameter of this name, which has an effect
/// on hints without protocol alone.
fn in_order(protocol: u32, xrc: Option<bool>) -> Vec<&'static EpType> {
    match (protocol, xrc) {
        (FI_PROTO_RDMA_CM_IB_XRC, _) => vec![&RDM_XRC, &MSG_XRC],
        (FI_PROTO_UNSPEC, None) => vec![&RDM, &RDM_XRC, &MSG, &MSG_XRC],
        (FI_PROTO_UNSPEC, Some(true)) => vec![&RDM_XRC, &RDM, &MSG_XRC, &MSG],
        _ => vec![&RDM, &MSG],
    }
}

/// The offered type of an object that is opened with an info of this type and protocol. An info
/// without protocol is one on RC; `FI_EP_UNSPEC` is a connected endpoint.
pub(crate) fn of(number: u32, protocol: u32) -> Option<&'static EpType> {
    let number = match number {
        FI_EP_UNSPEC => FI_EP_MSG,
        number => number,
    };
    let xrc = protocol == FI_PROTO_RDMA_CM_IB_XRC;
    let mut types = offered(protocol).into_iter();
    types.find(|ep| ep.number == number && ep.xrc == xrc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rc_comes_before_xrc_unless_the_parameter_or_the_protocol_decides() {
        let names = |protocol, xrc| {
            let types = in_order(protocol, xrc).into_iter();
            types.map(|ep| (ep.number, ep.xrc)).collect::<Vec<_>>()
        };
        let (rc, xrc) = ((FI_EP_RDM, false), (FI_EP_RDM, true));
        let (msg, msg_xrc) = ((FI_EP_MSG, false), (FI_EP_MSG, true));
        assert_eq!(names(FI_PROTO_UNSPEC, None), [rc, xrc, msg, msg_xrc]);
        assert_eq!(names(FI_PROTO_UNSPEC, Some(true)), [xrc, rc, msg_xrc, msg]);
        assert_eq!(names(FI_PROTO_UNSPEC, Some(false)), [rc, msg]);
        for set in [None, Some(false), Some(true)] {
            assert_eq!(names(FI_PROTO_RDMA_CM_IB_XRC, set), [xrc, msg_xrc]);
            assert_eq!(names(FI_PROTO_IB_RDM, set), [rc, msg]);
            assert_eq!(names(FI_PROTO_RDMA_CM_IB_RC, set), [rc, msg]);
        }
    }
}
