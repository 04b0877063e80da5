//! The private data of connected endpoints: the application's data, followed by the introduction
//! of this side (`docs/protocol.md`, "The introduction").

use crate::auth::AuthKey;
use crate::errno::{FiErrno, Result};
use crate::mr::ConnectionBlock;
use crate::wire::cm_data::{CM_DATA_SIZE, CmData, KEYED_CM_DATA_SIZE};
use crate::wire::introduction::Introduction;

/// The properties of an endpoint in its introduction to the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Introducer<'a> {
    /// Whether the application chooses the keys of its regions.
    pub(crate) application_keys: bool,
    pub(crate) auth: Option<&'a AuthKey>,
}

impl Introducer<'_> {
    /// Maximum length in bytes of the application's data.
    pub(crate) fn data_size(&self) -> usize {
        match self.auth {
            Some(_) => KEYED_CM_DATA_SIZE,
            None => CM_DATA_SIZE,
        }
    }

    /// Checks and encodes the application's data for the peer.
    ///
    /// # Errors
    /// `EINVAL`: the data is longer than [`Self::data_size`].
    pub(crate) fn data(&self, data: &[u8]) -> Result<CmData> {
        if data.len() > self.data_size() {
            return Err(FiErrno::EINVAL);
        }
        CmData::new(data)
    }

    /// The application's data, followed by this side's introduction.
    pub(crate) fn introduce(&self, data: CmData, block: Option<&ConnectionBlock>) -> CmData {
        match block {
            Some(block) => data.introducing(Introduction {
                application_keys: self.application_keys,
                block_addr: block.addr(),
                block_rkey: block.rkey(),
                auth: self.auth.map(AuthKey::tag),
            }),
            None => data,
        }
    }

    /// Whether the peer's introduction carries another authorization key than this side's, or only
    /// one side has a key.
    pub(crate) fn is_stranger(&self, peer: Option<&Introduction>) -> bool {
        peer.and_then(|peer| peer.auth) != self.auth.map(AuthKey::tag)
    }
}
