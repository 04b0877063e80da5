//! HELLO: the dialler's first packet on a link. `docs/protocol-rdm.md`, "Kinds".

use super::terms::{TERMS_SIZE, Terms};
use super::values::{Epoch, Listener};
use super::{Bad, bytes, get16, get32, put, reserved};

/// Largest number of further listening addresses.
pub const MAX_LISTENERS: usize = 8;

/// Largest size of the body in bytes.
pub const MAX_HELLO: usize = LIST + MAX_LISTENERS * ENTRY;

/// Offset of the addresses in the body.
const LIST: usize = TERMS_SIZE + 8;
/// Size of an address.
const ENTRY: usize = 20;

/// The dialler's first packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The epoch of the link.
    pub epoch: Epoch,
    /// The terms of the dialler.
    pub terms: Terms,
    /// Further listening addresses of the dialler's endpoint; the used entries come first.
    listeners: [Option<Listener>; MAX_LISTENERS],
}

impl Hello {
    /// With the first [`MAX_LISTENERS`] of the addresses.
    pub fn new(epoch: Epoch, terms: Terms, listeners: impl IntoIterator<Item = Listener>) -> Self {
        let mut from = listeners.into_iter();
        Self {
            epoch,
            terms,
            listeners: std::array::from_fn(|_| from.next()),
        }
    }

    /// The further listening addresses.
    pub fn listeners(&self) -> impl Iterator<Item = Listener> + '_ {
        self.listeners.iter().map_while(|listener| *listener)
    }

    /// Size of the encoded body in bytes.
    pub(super) fn size(&self) -> usize {
        LIST + self.listeners().count() * ENTRY
    }

    /// Writes the body. `to` has [`Self::size`] bytes, all 0.
    pub(super) fn encode(&self, to: &mut [u8]) {
        put(to, 0, self.terms.encode());
        // at most 8
        put(
            to,
            TERMS_SIZE,
            (self.listeners().count() as u32).to_le_bytes(),
        );
        for (index, listener) in self.listeners().enumerate() {
            put(to, LIST + index * ENTRY, listener.octets());
            put(to, LIST + index * ENTRY + 16, listener.port().to_le_bytes());
        }
    }

    /// Decodes a body that ends with `body`.
    pub(super) fn decode(epoch: u32, body: &[u8]) -> Result<Self, Bad> {
        let epoch = Epoch::new(epoch).ok_or(Bad::Value)?;
        let terms = Terms::decode(body)?;
        let count = get32(body, TERMS_SIZE)? as usize;
        reserved(get32(body, TERMS_SIZE + 4)?)?;
        if count > MAX_LISTENERS {
            return Err(Bad::Value);
        }
        if body.len() != LIST + count * ENTRY {
            return Err(Bad::Length);
        }
        let mut listeners = [None; MAX_LISTENERS];
        for (index, listener) in listeners.iter_mut().enumerate().take(count) {
            let at = LIST + index * ENTRY;
            let port = get16(body, at + 16)?;
            reserved(get16(body, at + 18)?)?;
            *listener = Some(Listener::of(bytes(body, at)?, port).ok_or(Bad::Value)?);
        }
        Ok(Self {
            epoch,
            terms,
            listeners,
        })
    }
}
