//! The connection manager's private data: one byte of length, that many bytes of the application's
//! data, and an [`Introduction`]. Padding of the transport may follow; it is ignored.
//!
//! Up to the introduction this is byte for byte the data that libfabric's `verbs` provider sends
//! for RC endpoints over IP addresses (`prov/verbs/src/verbs_cm.c`). That provider ignores the
//! bytes that follow, so the two interoperate.

use super::introduction::{INTRODUCTION_SIZE, Introduction, KEYED_SIZE};
use crate::errno::{FiErrno, Result};

/// Maximum length in bytes of the private data of a connection request over an IP address, after
/// the part that rdma_cm uses.
pub const PRIVATE_DATA_SIZE: usize = 56;

/// Maximum length in bytes of application data that an introduction follows: `FI_OPT_CM_DATA_SIZE`
/// of endpoints.
pub const CM_DATA_SIZE: usize = MAX_CM_DATA - INTRODUCTION_SIZE;

/// As [`CM_DATA_SIZE`], for an introduction with an authorization key.
pub const KEYED_CM_DATA_SIZE: usize = MAX_CM_DATA - KEYED_SIZE;

/// Maximum length in bytes of application data that no introduction follows: that of rejections,
/// and of peers that are not `weft`. `FI_OPT_CM_DATA_SIZE` of passive endpoints.
pub const MAX_CM_DATA: usize = PRIVATE_DATA_SIZE - 1;

/// Application data of a connection request, of its acceptance or of its rejection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CmData {
    /// The length byte, the data and the introduction, in the format of the wire.
    bytes: [u8; PRIVATE_DATA_SIZE],
    introduction: Option<Introduction>,
}

impl CmData {
    /// No data.
    pub const EMPTY: Self = Self {
        bytes: [0; PRIVATE_DATA_SIZE],
        introduction: None,
    };

    /// From an application's data. There is room for an introduction behind at most
    /// [`CM_DATA_SIZE`] or [`KEYED_CM_DATA_SIZE`] bytes.
    ///
    /// # Errors
    /// `EINVAL`: `data` is longer than [`MAX_CM_DATA`].
    pub fn new(data: &[u8]) -> Result<Self> {
        if data.len() > MAX_CM_DATA {
            return Err(FiErrno::EINVAL);
        }
        Ok(Self::clipped(data))
    }

    /// The first [`MAX_CM_DATA`] bytes of `data`.
    fn clipped(data: &[u8]) -> Self {
        let mut this = Self::EMPTY;
        let (length, room) = this.bytes.split_at_mut(1);
        let count = data.len().min(room.len());
        room[..count].copy_from_slice(&data[..count]);
        // fits: at most MAX_CM_DATA
        length[0] = count as u8;
        this
    }

    /// Appends an introduction to the data.
    pub fn introducing(mut self, introduction: Introduction) -> Self {
        let end = 1 + usize::from(self.bytes[0]);
        let size = introduction.size();
        if let Some(room) = self.bytes.get_mut(end..end + size) {
            room.copy_from_slice(&introduction.encode()[..size]);
            self.introduction = Some(introduction);
        }
        self
    }

    /// The peer's introduction, if the peer is a `weft` endpoint.
    pub fn introduction(&self) -> Option<Introduction> {
        self.introduction
    }

    /// Decodes a peer's private data. The peer is not trusted: a length above the number of bytes
    /// present, or above the limit of this format, is clipped.
    pub fn decode(private_data: &[u8]) -> Self {
        let Some((&length, data)) = private_data.split_first() else {
            return Self::EMPTY;
        };
        let length = usize::from(length).min(data.len()).min(MAX_CM_DATA);
        let (data, rest) = data.split_at(length);
        let this = Self::clipped(data);
        match Introduction::decode(rest) {
            Some(introduction) => this.introducing(introduction),
            None => this,
        }
    }

    /// The application's data.
    pub fn data(&self) -> &[u8] {
        &self.bytes[1..=usize::from(self.bytes[0])]
    }

    /// The private data to send.
    pub fn encoded(&self) -> &[u8] {
        let end = 1 + usize::from(self.bytes[0]);
        let more = self.introduction.as_ref().map_or(0, Introduction::size);
        &self.bytes[..end + more]
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
    use crate::verbs::{RemoteAddr, Rkey};

    #[test]
    fn every_length_survives_the_wire_padded_or_not() {
        for length in 0..=MAX_CM_DATA {
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
    fn an_introduction_goes_along_with_every_length() {
        let plain = Introduction {
            application_keys: true,
            block_addr: RemoteAddr::new(0x1234_5678_9abc),
            block_rkey: Rkey::new(7),
            auth: None,
        };
        let keyed = Introduction {
            auth: Some(0x1122_3344_5566_7788),
            ..plain
        };
        let plain = (0..=CM_DATA_SIZE).map(|length| (length, plain));
        let keyed = (0..=KEYED_CM_DATA_SIZE).map(|length| (length, keyed));
        for (length, introduction) in plain.chain(keyed) {
            let data = vec![0xa5; length];
            let sent = CmData::new(&data).unwrap().introducing(introduction);
            assert_eq!(sent.encoded().len(), 1 + length + introduction.size());
            let mut padded = sent.encoded().to_vec();
            padded.resize(196, 0);
            let got = CmData::decode(&padded);
            assert_eq!(got.data(), data);
            assert_eq!(got.introduction(), Some(introduction));
        }
    }

    #[test]
    fn other_providers_may_send_more() {
        let mut bytes = [0x11; PRIVATE_DATA_SIZE];
        bytes[0] = MAX_CM_DATA as u8;
        assert_eq!(CmData::decode(&bytes).data(), &bytes[1..]);
    }

    #[test]
    fn too_much_is_refused() {
        assert_eq!(CmData::new(&[0; MAX_CM_DATA + 1]), Err(FiErrno::EINVAL));
        assert_eq!(CmData::new(&[0; 4096]), Err(FiErrno::EINVAL));
    }

    #[test]
    fn a_peer_s_rubbish_is_clipped() {
        assert_eq!(CmData::decode(&[]), CmData::EMPTY);
        assert_eq!(CmData::decode(&[255]).data(), b"");
        assert_eq!(CmData::decode(&[255, 1, 2]).data(), [1, 2]);
        assert_eq!(CmData::decode(&[255; 200]).data().len(), MAX_CM_DATA);
        assert_eq!(CmData::decode(&[255; 200]).introduction(), None);
    }
}
