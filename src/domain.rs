//! A domain: a device opened for use, with its protection domain.

use std::sync::Arc;
use std::time::Duration;

use crate::errno::Result;
use crate::keepalive::{self, Keepalive};
use crate::log::{self, Level, Subsystem, info_log};
use crate::mr::{DescRule, Form, implicit_region};
use crate::msg::Tuning;
use crate::queue::shared::SharedIds;
use crate::verbs::{Device, Mr, Pd};

/// How the application promises to serialize its calls (`fi_domain(3)`, `threading`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threading {
    /// Anything from any thread: `FI_THREAD_SAFE`.
    #[default]
    Safe,
    /// One call at a time per object: `FI_THREAD_FID`, `FI_THREAD_ENDPOINT`.
    Endpoint,
    /// One call at a time per completion object and the endpoints bound to it:
    /// `FI_THREAD_COMPLETION`.
    Completion,
    /// One call at a time in the whole domain: `FI_THREAD_DOMAIN`.
    Domain,
}

/// What to open a domain with.
#[derive(Clone, Debug, Default)]
pub struct DomainConfig {
    /// The promise of the application about its threads.
    pub threading: Threading,
    /// What connections are set up with.
    pub tuning: Tuning,
    /// The form of its memory regions.
    pub form: Form,
    /// Whether local buffers without a descriptor are registered for their operation only, even where the
    /// device could reach them through one implicit on-demand region.
    pub register_each: bool,
    /// How often peers are looked after that have been silent: `None` for the engine's choice,
    /// zero for never.
    pub keepalive: Option<Duration>,
}

/// An opened device with its protection domain. Regions, queues and endpoints are made in it and
/// hold it.
#[derive(Debug)]
pub struct Domain {
    pd: Arc<Pd>,
    config: DomainConfig,
    max_msg_size: usize,
    /// The whole address space, for local buffers that have no descriptor.
    implicit: Option<Mr>,
    keepalive: Option<Arc<Keepalive>>,
    shared: SharedIds,
}

impl Domain {
    /// Opens a domain. Allocates the protection domain on the device's context that the
    /// connection manager uses too.
    ///
    /// # Errors
    /// What `ibv_alloc_pd(3)` answers, usually `ENOMEM`. `EMFILE`. `EINVAL`: tuning that verbs doesn't have.
    pub fn open(device: &Arc<Device>, config: DomainConfig) -> Result<Arc<Self>> {
        config.tuning.check()?;
        let pd = Pd::alloc(device)?;
        let max_msg_size = device.port(1)?.max_msg_size;
        if log::enabled(Level::Info, Subsystem::Domain) {
            show_behaviour(device);
        }
        let implicit = if config.form.desc == DescRule::Required || config.register_each {
            None
        } else {
            implicit(&pd)
        };
        let period = match config.keepalive {
            Some(period) => period,
            None if device.needs_keepalive() => keepalive::PERIOD,
            None => Duration::ZERO,
        };
        let keepalive = if period.is_zero() {
            None
        } else {
            Some(Arc::new(Keepalive::new(period)?))
        };
        Ok(Arc::new(Self {
            pd,
            config,
            max_msg_size,
            implicit,
            keepalive,
            shared: SharedIds::default(),
        }))
    }

    /// The longest message or RMA operation, in bytes.
    pub fn max_msg_size(&self) -> usize {
        self.max_msg_size
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The lkey in `pd` of the whole address space, where the device has such a region.
    pub(crate) fn implicit_lkey(&self, pd: &Arc<Pd>) -> Option<u32> {
        let region = self.implicit.as_ref()?;
        Arc::ptr_eq(region.pd(), pd).then(|| region.lkey())
    }

    /// What looks after the domain's connections, where the device doesn't.
    pub(crate) fn keepalive(&self) -> Option<&Arc<Keepalive>> {
        self.keepalive.as_ref()
    }

    /// The identities of its shared receive contexts.
    pub(crate) fn shared_ids(&self) -> &SharedIds {
        &self.shared
    }

    /// What it was opened with.
    pub fn config(&self) -> &DomainConfig {
        &self.config
    }
}

/// A region of everything, where the device was seen to have that.
fn implicit(pd: &Arc<Pd>) -> Option<Mr> {
    let behaviour = pd.device().behaviour().ok()?;
    if !behaviour.odp_implicit.works() {
        return None;
    }
    implicit_region(pd).ok()
}

/// The table of what the device was seen to do, a row a line.
fn show_behaviour(device: &Arc<Device>) {
    match device.behaviour() {
        Ok(behaviour) => {
            for (what, seen) in behaviour.rows() {
                info_log!(Domain, "{}: {what:<36}{seen}", device.name());
            }
        }
        Err(error) => info_log!(Domain, "{}: not tried: {error}", device.name()),
    }
}
