//! The connection manager's private data: one byte of length, then that many bytes of the
//! application's data. The rest, where the transport pads, means nothing.
//!
//! This is byte for byte what libfabric's `verbs` provider sends for RC endpoints over IP
//! addresses (`prov/verbs/src/verbs_cm.c`), so the two understand each other.

use crate::errno::{FiErrno, Result};

/// What rdma_cm leaves to its user in a connection request over an IP address, in bytes.
pub const PRIVATE_DATA_SIZE: usize = 56;

/// The most application data that fits, in bytes: `FI_OPT_CM_DATA_SIZE`.
pub const CM_DATA_SIZE: usize = PRIVATE_DATA_SIZE - 1;

/// Application data of a connection request, of its acceptance or of its rejection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CmData {
    /// The length byte and the data, as they go over the wire.
    bytes: [u8; PRIVATE_DATA_SIZE],
}

impl CmData {
    /// No data.
    pub const EMPTY: Self = Self {
        bytes: [0; PRIVATE_DATA_SIZE],
    };

    /// From an application's data.
    ///
    /// # Errors
    /// `EINVAL`: longer than [`CM_DATA_SIZE`], as `fi_connect(3)` asks.
    pub fn new(data: &[u8]) -> Result<Self> {
        let mut this = Self::EMPTY;
        this.bytes
            .get_mut(1..1 + data.len())
            .ok_or(FiErrno::EINVAL)?
            .copy_from_slice(data);
        // the slice above exists, so the length fits
        this.bytes[0] = data.len() as u8;
        Ok(this)
    }

    /// From private data that a peer sent. A peer may send anything: a length that says more
    /// than is there, or than this format allows, is clipped.
    pub fn decode(private_data: &[u8]) -> Self {
        let Some((&length, data)) = private_data.split_first() else {
            return Self::EMPTY;
        };
        let length = usize::from(length).min(data.len()).min(CM_DATA_SIZE);
        Self::new(&data[..length]).unwrap_or(Self::EMPTY)
    }

    /// The application's data.
    pub fn data(&self) -> &[u8] {
        &self.bytes[1..=usize::from(self.bytes[0])]
    }

    /// What goes over the wire.
    pub fn encoded(&self) -> &[u8] {
        &self.bytes[..=usize::from(self.bytes[0])]
    }
}

impl std::fmt::Debug for CmData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CmData({:?})", self.data())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_survives_the_wire_padded_or_not() {
        for length in 0..=CM_DATA_SIZE {
            let data: Vec<u8> = (0..length).map(|i| i as u8 ^ 0xa5).collect();
            let sent = CmData::new(&data).unwrap();
            assert_eq!(sent.encoded().len(), length + 1);
            assert_eq!(CmData::decode(sent.encoded()).data(), data);
            let mut padded = sent.encoded().to_vec();
            padded.resize(196, 0);
            assert_eq!(CmData::decode(&padded).data(), data);
        }
    }

    #[test]
    fn too_much_is_refused() {
        assert_eq!(CmData::new(&[0; CM_DATA_SIZE + 1]), Err(FiErrno::EINVAL));
        assert_eq!(CmData::new(&[0; 4096]), Err(FiErrno::EINVAL));
    }

    #[test]
    fn a_peer_s_rubbish_is_clipped() {
        assert_eq!(CmData::decode(&[]), CmData::EMPTY);
        assert_eq!(CmData::decode(&[255]).data(), b"");
        assert_eq!(CmData::decode(&[255, 1, 2]).data(), [1, 2]);
        assert_eq!(CmData::decode(&[255; 200]).data().len(), CM_DATA_SIZE);
    }
}
