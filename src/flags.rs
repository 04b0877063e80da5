//! The flags of libfabric that the engine uses, with libfabric's values, and the default flags of
//! an endpoint's operations.

use std::sync::atomic::{AtomicU64, Ordering};

use bitflags::bitflags;

bitflags! {
    /// Flags of operations, completions, bindings and capabilities, which share one numbering in
    /// libfabric (`rdma/fabric.h`). Unknown bits are preserved.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Flags: u64 {
        /// `FI_MSG`
        const MSG = 1 << 1;
        /// `FI_RMA`
        const RMA = 1 << 2;
        /// `FI_TAGGED`
        const TAGGED = 1 << 3;
        /// `FI_ATOMIC`
        const ATOMIC = 1 << 4;
        /// `FI_READ`
        const READ = 1 << 8;
        /// `FI_WRITE`
        const WRITE = 1 << 9;
        /// `FI_RECV`
        const RECV = 1 << 10;
        /// `FI_SEND`, `FI_TRANSMIT`
        const SEND = 1 << 11;
        /// `FI_REMOTE_READ`
        const REMOTE_READ = 1 << 12;
        /// `FI_REMOTE_WRITE`
        const REMOTE_WRITE = 1 << 13;
        /// `FI_MULTI_RECV`
        const MULTI_RECV = 1 << 16;
        /// `FI_REMOTE_CQ_DATA`
        const REMOTE_CQ_DATA = 1 << 17;
        /// `FI_MORE`
        const MORE = 1 << 18;
        /// `FI_PEEK`
        const PEEK = 1 << 19;
        /// `FI_FENCE`
        const FENCE = 1 << 21;
        /// `FI_COMPLETION`
        const COMPLETION = 1 << 24;
        /// `FI_INJECT`
        const INJECT = 1 << 25;
        /// `FI_INJECT_COMPLETE`
        const INJECT_COMPLETE = 1 << 26;
        /// `FI_TRANSMIT_COMPLETE`
        const TRANSMIT_COMPLETE = 1 << 27;
        /// `FI_DELIVERY_COMPLETE`
        const DELIVERY_COMPLETE = 1 << 28;
        /// `FI_COMMIT_COMPLETE`
        const COMMIT_COMPLETE = 1 << 30;
        /// `FI_MATCH_COMPLETE`
        const MATCH_COMPLETE = 1 << 31;
        /// `FI_DISCARD`
        const DISCARD = 1 << 58;
        /// `FI_CLAIM`: a flag of receives only
        const CLAIM = 1 << 59;
        /// `FI_SELECTIVE_COMPLETION`: a flag of bindings only, with the value of [`Self::CLAIM`]
        const SELECTIVE_COMPLETION = 1 << 59;

        const _ = !0;
    }
}

/// The operations to which default flags apply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Those of the send side (`FI_TRANSMIT`).
    Transmit,
    /// Receives (`FI_RECV`).
    Receive,
}

/// The default flags of an endpoint's operations (`tx_attr->op_flags`, `rx_attr->op_flags`), which
/// `FI_SETOPSFLAG` changes (`fi_endpoint(3)`). Thread safe.
#[derive(Debug)]
pub struct OpFlags {
    tx: AtomicU64,
    rx: AtomicU64,
}

impl OpFlags {
    pub(crate) fn new(tx: Flags, rx: Flags) -> Self {
        Self {
            tx: AtomicU64::new(tx.bits()),
            rx: AtomicU64::new(rx.bits()),
        }
    }

    /// Those of transmit operations.
    #[inline]
    pub fn tx(&self) -> Flags {
        Flags::from_bits_retain(self.tx.load(Ordering::Relaxed))
    }

    /// Those of receives.
    #[inline]
    pub fn rx(&self) -> Flags {
        Flags::from_bits_retain(self.rx.load(Ordering::Relaxed))
    }

    /// Those of one direction.
    pub fn get(&self, direction: Direction) -> Flags {
        match direction {
            Direction::Transmit => self.tx(),
            Direction::Receive => self.rx(),
        }
    }

    /// Changes those of one direction.
    pub fn set(&self, direction: Direction, flags: Flags) {
        let of_direction = match direction {
            Direction::Transmit => &self.tx,
            Direction::Receive => &self.rx,
        };
        of_direction.store(flags.bits(), Ordering::Relaxed);
    }
}

/// The flags at this time, which change apart from those of `self`.
impl Clone for OpFlags {
    fn clone(&self) -> Self {
        Self::new(self.tx(), self.rx())
    }
}
