//! Owners of verbs and connection manager objects.
//!
//! The only module that calls a verb or an rdma_cm function. An object holds an `Arc` of what it
//! was made from, so that everything is destroyed in an order that the device accepts, whatever
//! the order in which the owners are dropped.

mod attr;
mod cm;
mod cq;
mod device;
mod mr;
mod pd;
mod qp;
mod quirks;
mod sockaddr;

pub use attr::{DeviceAttr, LinkLayer, PciAddress, Port};
pub use cm::{CmEvent, CmEventKind, CmId, ConnParam, EventChannel};
pub use cq::{CompChannel, Cq, Wc};
pub use device::{AsyncEvent, Device, DeviceAddress, devices};
pub(crate) use device::{AsyncListener, known_device};
pub use mr::Mr;
pub use pd::Pd;
pub use qp::{Qp, QpConfig, QpLimits, RecvRequest, SendOpcode, SendRequest, Sge};
pub use quirks::{Behaviour, Seen};
pub use sockaddr::SockAddr;

use std::os::fd::RawFd;

/// Whether a read of `fd` would find something now.
#[allow(unsafe_code, reason = "poll(2)")]
pub(crate) fn readable(fd: RawFd) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry is passed.
    let ret = unsafe { libc::poll(&raw mut entry, 1, 0) };
    ret > 0 && entry.revents & libc::POLLIN != 0
}
