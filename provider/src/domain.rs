//! `fid_domain`: an opened device.

use std::sync::{Arc, OnceLock};

use weft::domain::Domain as Engine;
use weft::eq::EventQueue;

use crate::addr::Format;
use crate::ffi::fid::User;

/// An open domain.
pub(crate) struct Domain {
    pub(crate) engine: Arc<Engine>,
    /// The API version of the application.
    pub(crate) api_version: u32,
    /// Whether it was opened with an info of an endpoint with many peers (`FI_EP_RDM`).
    pub(crate) rdm: bool,
    /// Whether it was opened with an info of an endpoint on XRC.
    pub(crate) xrc: bool,
    /// The format of addresses in address vectors.
    pub(crate) format: Format,
    pub(crate) events: OnceLock<Bound>,
    pub(crate) _fabric: User,
}

/// The event queue of a domain.
pub(crate) struct Bound {
    pub(crate) eq: Arc<EventQueue>,
    /// Whether regions are registered in the background.
    pub(crate) in_background: bool,
    pub(crate) _user: User,
}

impl Domain {
    /// The event queue of completed registrations, unless registrations block.
    pub(crate) fn events(&self) -> Option<&Arc<EventQueue>> {
        let bound = self.events.get().filter(|bound| bound.in_background);
        bound.map(|bound| &bound.eq)
    }
}
