//! The directions of an endpoint that a completion queue serves.

use bitflags::bitflags;

bitflags! {
    /// The directions for which a completion queue is bound (`fi_ep_bind(3)`); values as in
    /// libfabric.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BindFlags: u64 {
        /// `FI_RECV`
        const RECV = 1 << 10;
        /// `FI_TRANSMIT`
        const TRANSMIT = 1 << 11;
        /// `FI_SELECTIVE_COMPLETION`
        const SELECTIVE_COMPLETION = 1 << 59;
    }
}
