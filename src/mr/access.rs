//! Access rights of a region, and the minimum of verbs rights that grants them.

use bitflags::bitflags;
use rdma_core_sys as sys;

use crate::wire::records;

bitflags! {
    /// The access flags of `fi_mr(3)`, with libfabric's values.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u64 {
        /// `FI_READ`: result buffer of RMA reads and fetching atomics.
        const READ = 1 << 8;
        /// `FI_WRITE`: source of RMA writes and atomics.
        const WRITE = 1 << 9;
        /// `FI_RECV`: buffer of receives.
        const RECV = 1 << 10;
        /// `FI_SEND`: source of sends.
        const SEND = 1 << 11;
        /// `FI_REMOTE_READ`: source of peers' RMA reads.
        const REMOTE_READ = 1 << 12;
        /// `FI_REMOTE_WRITE`: target of peers' RMA writes.
        const REMOTE_WRITE = 1 << 13;
    }
}

impl Access {
    /// The minimum of `ibv_access_flags` for these uses. A buffer that the device writes needs
    /// local write, and verbs grants remote write only together with local write (`ibv_reg_mr(3)`).
    ///
    /// libfabric has no access flag for atomics as a target: `FI_REMOTE_WRITE` includes them, those
    /// that fetch too (`fi_mr(3)`). `atomics`: whether the device has atomics; some devices without
    /// them refuse the right.
    pub fn verbs_rights(self, atomics: bool) -> u32 {
        let mut rights = 0;
        if self.is_written() {
            rights |= sys::IBV_ACCESS_LOCAL_WRITE;
        }
        if self.contains(Self::REMOTE_READ) {
            rights |= sys::IBV_ACCESS_REMOTE_READ;
        }
        if self.contains(Self::REMOTE_WRITE) {
            rights |= sys::IBV_ACCESS_REMOTE_WRITE;
            if atomics {
                rights |= sys::IBV_ACCESS_REMOTE_ATOMIC;
            }
        }
        rights
    }

    /// The access bits of its record in the key directory (`docs/protocol.md`); `atomics` as for
    /// [`Self::verbs_rights`].
    pub(crate) fn published(self, atomics: bool) -> u8 {
        let mut bits = 0;
        if self.contains(Self::REMOTE_READ) {
            bits |= records::access::READ;
        }
        if self.contains(Self::REMOTE_WRITE) {
            bits |= records::access::WRITE;
            if atomics {
                bits |= records::access::ATOMIC;
            }
        }
        bits
    }

    /// Whether the device writes to the memory.
    pub fn is_written(self) -> bool {
        self.intersects(Self::READ | Self::RECV | Self::REMOTE_WRITE)
    }

    /// These uses without those of peers.
    pub(super) fn local(self) -> Self {
        self & !(Self::REMOTE_READ | Self::REMOTE_WRITE)
    }

    /// Whether peers can access the region; if not, no peer can use its key.
    pub fn is_remote(self) -> bool {
        self.intersects(Self::REMOTE_READ | Self::REMOTE_WRITE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL_WRITE: u32 = sys::IBV_ACCESS_LOCAL_WRITE;

    #[test]
    fn sources_need_no_right_at_all() {
        assert_eq!((Access::SEND | Access::WRITE).verbs_rights(true), 0);
        assert_eq!(
            Access::REMOTE_READ.verbs_rights(true),
            sys::IBV_ACCESS_REMOTE_READ
        );
    }

    #[test]
    fn what_is_written_to_needs_local_write() {
        for access in [Access::RECV, Access::READ, Access::REMOTE_WRITE] {
            assert_ne!(access.verbs_rights(false) & LOCAL_WRITE, 0, "{access:?}");
        }
    }

    #[test]
    fn remote_rights_come_only_where_asked() {
        let remote = sys::IBV_ACCESS_REMOTE_WRITE
            | sys::IBV_ACCESS_REMOTE_READ
            | sys::IBV_ACCESS_REMOTE_ATOMIC;
        let local = Access::READ | Access::WRITE | Access::SEND | Access::RECV;
        assert_eq!(local.verbs_rights(true) & remote, 0);
        assert!(!local.is_remote());
        assert_eq!(
            Access::REMOTE_WRITE.verbs_rights(false) & remote,
            sys::IBV_ACCESS_REMOTE_WRITE
        );
    }
}
