//! The id of a node: equal at all processes that have one XRC domain open. A hint, on whose truth
//! nothing depends (`docs/protocol-xrc.md`, "What identifies a node").

use std::os::fd::BorrowedFd;

use super::calls::{self, Identity};
use crate::errno::Result;
use crate::hash::Hasher;
use crate::verbs::Device;

/// The seed of the checksum, which is the same in all processes.
const SEED: u64 = 0x7765_6674_6e6f_6465;

/// The id of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId(u64);

impl NodeId {
    /// The id with this number, as a peer has stated it.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number, as it is stated to peers.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The node of the processes that have the domain of this file open. `auth`: the tag of the
    /// authorization key, 0 for none. A machine without a boot id is a node for each process.
    ///
    /// # Errors
    /// Those of fstat(2) and getrandom(2).
    pub fn of_file(device: &Device, auth: u64, file: BorrowedFd<'_>) -> Result<Self> {
        let identity = calls::stat(file)?.identity;
        match std::fs::read("/proc/sys/kernel/random/boot_id") {
            Ok(boot) if !boot.is_empty() => Ok(Self::sum(
                &boot,
                device.attr().node_guid,
                calls::user(),
                auth,
                identity,
            )),
            _ => Self::random(),
        }
    }

    /// The node of a process with a private domain, or with a domain whose file is not known.
    ///
    /// # Errors
    /// Those of getrandom(2).
    pub fn random() -> Result<Self> {
        calls::random().map(Self)
    }

    fn sum(boot: &[u8], guid: u64, user: u32, auth: u64, (device, inode): Identity) -> Self {
        let hasher = Hasher::new(SEED);
        let boot = boot.chunks(8).map(|chunk| {
            let bytes = chunk.iter().rev();
            bytes.fold(0, |word, byte| word << 8 | u64::from(*byte))
        });
        let words = [guid, user.into(), auth, device, inode];
        Self(
            boot.chain(words)
                .fold(SEED, |sum, word| hasher.hash(sum, word)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_changes_the_id() {
        let boot = b"6fd5e1f8-0000-4000-8000-000000000000\n";
        let id = NodeId::sum(boot, 1, 2, 3, (4, 5));
        assert_eq!(id, NodeId::sum(boot, 1, 2, 3, (4, 5)));
        for other in [
            NodeId::sum(&boot[1..], 1, 2, 3, (4, 5)),
            NodeId::sum(boot, 2, 2, 3, (4, 5)),
            NodeId::sum(boot, 1, 1, 3, (4, 5)),
            NodeId::sum(boot, 1, 2, 2, (4, 5)),
            NodeId::sum(boot, 1, 2, 3, (5, 4)),
            NodeId::sum(boot, 1, 2, 3, (4, 4)),
        ] {
            assert_ne!(id, other);
        }
        assert_ne!(NodeId::random().unwrap(), NodeId::random().unwrap());
        assert_eq!(NodeId::new(id.get()), id);
    }
}
