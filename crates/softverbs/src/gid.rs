//! GIDs: link-local addresses whose last part names the emulated node.

use rdma_core_sys::ibv_gid;

use crate::limits::MAX_NODES;
use crate::sys::machine_id;

/// Entries of the GID table that are filled, and all of them.
pub(crate) const TABLE: usize = 1;
pub(crate) const TABLE_LEN: usize = 8;

/// The node GUID, in network order: locally administered, three bytes of the machine's identity,
/// two of the node.
pub(crate) fn guid(node: u32) -> [u8; 8] {
    let machine = machine_id().to_be_bytes();
    let node = (node as u16).to_be_bytes();
    [
        0x02, b'w', b'v', machine[0], machine[1], machine[2], node[0], node[1],
    ]
}

/// The GID of a node.
pub(crate) fn of_node(node: u32) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[0] = 0xfe;
    gid[1] = 0x80;
    gid[8..].copy_from_slice(&guid(node));
    gid
}

/// The node of a GID, if it is one of this host.
pub(crate) fn node_of(gid: &ibv_gid) -> Option<u32> {
    // SAFETY: every member of the union covers the same 16 bytes.
    let bytes = unsafe { *std::ptr::from_ref(gid).cast::<[u8; 16]>() };
    let node = u32::from(u16::from_be_bytes([bytes[14], bytes[15]]));
    (node < MAX_NODES && bytes == of_node(node)).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_name_their_node_and_host() {
        for node in [0, 1, 77, MAX_NODES - 1] {
            let mut gid = ibv_gid::default();
            // SAFETY: a GID is 16 bytes.
            unsafe { (&raw mut gid).cast::<[u8; 16]>().write(of_node(node)) };
            assert_eq!(node_of(&gid), Some(node));
            // SAFETY: a GID is 16 bytes.
            unsafe {
                (&raw mut gid)
                    .cast::<u8>()
                    .add(12)
                    .write(!of_node(node)[12])
            };
            assert_eq!(node_of(&gid), None);
        }
        assert_eq!(node_of(&ibv_gid::default()), None);
    }
}
