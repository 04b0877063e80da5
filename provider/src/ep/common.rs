//! The state that endpoints of both kinds have.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use parking_lot::Mutex;
use weft::errno::Result;

use crate::addr::Format;
use crate::ffi::fid::{Kind, Object, User};

/// The common part of an open endpoint, or of an alias of one.
pub(crate) struct EpCommon {
    pub(crate) format: Format,
    /// The uses of the objects to which the endpoint is bound, also by calls of an alias.
    pub(crate) bound: Arc<Mutex<Vec<User>>>,
    /// The value of `FI_OPT_FI_HMEM_P2P`, also of its aliases. No operation depends on it.
    pub(crate) p2p: Arc<AtomicU32>,
    /// Of an alias: the use of the original endpoint, which holds the use of the domain.
    parent: Option<User>,
    _domain: Option<User>,
}

impl EpCommon {
    /// The state of a new endpoint, which uses its domain.
    pub(crate) fn new(format: Format, domain: User) -> Self {
        Self {
            format,
            bound: Arc::default(),
            p2p: Arc::default(),
            parent: None,
            _domain: Some(domain),
        }
    }

    /// The state of an alias of `ep`; `self` is the state of `ep`.
    ///
    /// # Errors
    /// `EINVAL`: the endpoint is being closed.
    pub(crate) fn alias<E: Kind>(&self, ep: &Object<E>) -> Result<Self> {
        Ok(Self {
            format: self.format,
            bound: Arc::clone(&self.bound),
            p2p: Arc::clone(&self.p2p),
            parent: Some(ep.users.add()?),
            _domain: None,
        })
    }

    pub(crate) fn is_alias(&self) -> bool {
        self.parent.is_some()
    }
}
