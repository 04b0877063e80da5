//! The key of a region for peers.

use crate::mr::key_cache::kind;
use crate::mr::{Mode, Region};
use crate::verbs::Rkey;

/// The key of a region.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    /// The rkey of the device.
    Native(Rkey),
    /// A key in the directory.
    Published(u64),
    /// The requested key of a region without remote access.
    Unused(u64),
}

impl Key {
    /// The key of a region whose only rkey is `rkey`, if it has exactly one, and that one never
    /// changes.
    pub(super) fn of(region: &Region, rkey: Option<Rkey>, generation: u64) -> Self {
        let (mode, remote) = (region.mode(), region.access().is_remote());
        if !mode.contains(Mode::PROV_KEY) {
            return match remote {
                true => Self::Published(region.requested_key),
                false => Self::Unused(region.requested_key),
            };
        }
        let watched = remote && (region.domain().counts() || region.once);
        match rkey {
            Some(rkey) if mode.contains(Mode::VIRT_ADDR) && !watched => Self::Native(rkey),
            _ if remote => Self::Published(kind::HANDLE << 48 | (generation & 0xffff_ffff_ffff)),
            _ => Self::Unused(rkey.unwrap_or_default().get().into()),
        }
    }

    pub(super) fn number(self) -> u64 {
        match self {
            Self::Native(rkey) => rkey.get().into(),
            Self::Published(key) | Self::Unused(key) => key,
        }
    }
}
