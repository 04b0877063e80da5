//! The limits of endpoints with many peers.

#![allow(unsafe_code, reason = "getrlimit(2)")]

use crate::verbs::Device;

/// The limit of the process's descriptors (`RLIMIT_NOFILE`), of which a device may use one for each
/// connection.
pub(super) fn max_descriptors() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is writable.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX),
        _ => usize::MAX,
    }
}

/// Upper limits of an endpoint's attributes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Transmit operations under way.
    pub tx_size: usize,
    /// Receives posted.
    pub rx_size: usize,
    /// Buffers per operation.
    pub iov_limit: usize,
    /// Bytes of injected data.
    pub inject_size: usize,
}

impl Limits {
    /// The limits of a device. `None`: it has no shared receive queues or no 8-byte atomics, which
    /// endpoints with many peers need.
    #[must_use]
    pub fn of(device: &Device) -> Option<Self> {
        let attr = device.attr();
        (attr.max_srq != 0 && attr.atomic_cap != 0).then_some(Self {
            tx_size: 1 << 20,
            rx_size: 1 << 20,
            iov_limit: 4,
            inject_size: 4096,
        })
    }

    /// Bytes of the longest message; `xrc`: of endpoints on XRC. Open MPI spreads its processes
    /// over entries with equal attributes, among which is this one, and not the protocol: endpoints
    /// on RC and on XRC would meet.
    #[must_use]
    pub const fn max_msg_size(xrc: bool) -> usize {
        (1 << 47) - xrc as usize
    }
}
