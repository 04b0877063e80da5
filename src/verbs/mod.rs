//! Owners of verbs and connection manager objects.
//!
//! Only this module calls verbs and rdma_cm functions. An object holds an `Arc` of each object that
//! it was created from, so all objects are destroyed in an order that the device accepts,
//! independent of the order in which their owners are dropped.

mod adopted;
mod advance;
mod attr;
#[cfg(test)]
mod buf;
mod chain;
mod cm;
mod cq;
mod device;
mod elements;
mod keys;
mod mr;
mod numbers;
mod pd;
mod qp;
mod qp_create;
mod quirks;
#[cfg(test)]
pub(crate) mod replaced;
mod ring;
mod sockaddr;
mod srq;
mod target;
mod words;
mod wr;
#[cfg(test)]
pub(crate) mod xrc_tests;
mod xrcd;

pub(crate) use adopted::Adopted;
pub use attr::{DeviceAttr, LinkLayer, PciAddress, Port};
#[cfg(test)]
pub(crate) use buf::Buf;
pub(crate) use chain::DelayedRequests;
pub use cm::{CmEvent, CmEventKind, CmId, ConnParam, EventChannel, PrivateData};
pub use cq::{CompChannel, Cq, Wc};
pub use device::{AsyncEvent, Device, DeviceAddress, address_rank, devices};
pub(crate) use device::{AsyncListener, known_device};
pub(crate) use elements::ElementsRequest;
pub use keys::{Lkey, RemoteAddr, Rkey};
pub use mr::Mr;
pub(crate) use mr::{Advised, FLUSH, NO_FAULT, advise};
#[cfg(test)]
pub(crate) use mr::{observed, planted};
pub use numbers::{QpNumber, SrqNumber};
pub use pd::Pd;
pub use qp::{Qp, QpConfig, QpLimits, QpState};
pub use qp_create::Transport;
pub use quirks::{Behaviour, Seen, XrcBehaviour};
pub use ring::{
    Attached, Message, Next, NextSlot, Polled, Posted, Ring, RingLimits, RingProbe, Run,
};
pub use sockaddr::SockAddr;
pub use srq::Srq;
pub use target::{Target, TargetState};
pub(crate) use words::{WordRange, Words};
pub use wr::{RecvRequest, SendOpcode, SendRequest, Sge};
pub use xrcd::Xrcd;

use std::os::fd::RawFd;

use crate::errno::{FiErrno, Result};

/// Makes reads of a channel's descriptor return `EAGAIN` instead of blocking. Called for every
/// channel, because a readable descriptor does not guarantee an event.
#[allow(unsafe_code, reason = "fcntl(2)")]
fn set_nonblocking(fd: RawFd) -> Result<()> {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    FiErrno::from_call(flags)?;
    // SAFETY: no pointers.
    FiErrno::from_call(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) })
}
