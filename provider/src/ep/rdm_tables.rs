//! The calls of endpoints with many peers that transfer data, by capabilities (`fi_getinfo(3)`):
//! those of capabilities that an endpoint was opened without return `-FI_EOPNOTSUPP`. They are in
//! tables of their own, so the other calls need no check.

use libfabric_sys::*;

use crate::data::{atomic, msg, rma, tagged};
use crate::ep::rdm_ep::{RdmEp, Tables};
use crate::ffi::stub;
use crate::getinfo::Terms;

const NO: i32 = FI_EOPNOTSUPP;

// Of each kind: no call; those of the first direction; those of the second one; all.

/// By `FI_RECV`, `FI_SEND`.
static MSG: [fi_ops_msg; 4] = [
    stub::msg::<NO>(),
    msg::receive_ops::<RdmEp>(stub::msg::<NO>()),
    msg::send_ops::<RdmEp>(stub::msg::<NO>()),
    msg::ops::<RdmEp>(),
];

/// By `FI_RECV`, `FI_SEND`.
static TAGGED: [fi_ops_tagged; 4] = [
    stub::tagged::<NO>(),
    tagged::receive_ops::<RdmEp>(stub::tagged::<NO>()),
    tagged::send_ops::<RdmEp>(stub::tagged::<NO>()),
    tagged::ops::<RdmEp>(),
];

/// By `FI_READ`, `FI_WRITE`.
static RMA: [fi_ops_rma; 4] = [
    stub::rma::<NO>(),
    rma::read_ops::<RdmEp>(stub::rma::<NO>()),
    rma::write_ops::<RdmEp>(stub::rma::<NO>()),
    rma::ops::<RdmEp>(),
];

/// By `FI_READ`, `FI_WRITE`: an atomic that returns values is a read, as in its completion flags
/// (`fi_cq(3)`) and for counters (`fi_cntr(3)`).
static ATOMIC: [fi_ops_atomic; 4] = [
    stub::atomic::<NO>(),
    atomic::read_ops::<RdmEp>(stub::atomic::<NO>()),
    atomic::write_ops::<RdmEp>(stub::atomic::<NO>()),
    atomic::ops::<RdmEp>(),
];

/// The tables of an endpoint with these terms.
pub(crate) fn of(terms: &Terms) -> Tables {
    let (tx, rx) = (terms.tx_caps, terms.rx_caps);
    let message =
        |kind| usize::from(has(rx, kind | FI_RECV)) | usize::from(has(tx, kind | FI_SEND)) << 1;
    Tables {
        msg: &MSG[message(FI_MSG)],
        tagged: &TAGGED[message(FI_TAGGED)],
        rma: &RMA[caps_index(terms, FI_RMA)],
        atomic: &ATOMIC[caps_index(terms, FI_ATOMIC)],
    }
}

/// The index of the table of `kind`, `FI_RMA` or `FI_ATOMIC`, of an endpoint with these terms.
pub(crate) fn caps_index(terms: &Terms, kind: u64) -> usize {
    let tx = terms.tx_caps;
    usize::from(has(tx, kind | FI_READ)) | usize::from(has(tx, kind | FI_WRITE)) << 1
}

fn has(caps: u64, of: u64) -> bool {
    caps & of == of
}
