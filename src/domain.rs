//! A domain: a device opened for use, with its protection domain.

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::auth::AuthKey;
use crate::conn::{Circuits, Driver, Tuning};
use crate::eq::EventQueue;
use crate::errno::{FiErrno, Result};
use crate::log::{self, Level, Subsystem, info_log, warn_log};
use crate::mr::{MrConfig, MrDomain};
use crate::queue::QueueDomain;
use crate::queue::srx_slots::SharedIds;
use crate::verbs::{Device, Pd, Xrcd};
use crate::xrc::file::Endpoints;
use crate::xrc::{Places, XrcDomain};

/// Parameters of a domain.
#[derive(Clone, Debug, Default)]
pub struct DomainConfig {
    /// Parameters of the domain's connections.
    pub tuning: Tuning,
    /// Parameters of the domain's memory regions.
    pub mr: MrConfig,
    /// Period after which a connected endpoint probes a silent peer: `None` for the engine's
    /// choice, zero for never.
    pub keepalive: Option<Duration>,
    /// Where the files of its XRC domains are.
    pub xrc: Places,
    /// The file to which each endpoint with many peers appends what it has counted when it is
    /// closed, and each domain with connected endpoints on XRC.
    pub counts: Option<PathBuf>,
}

/// An opened device with its protection domain. Endpoints hold a reference to the domain; regions
/// and queues hold the part that they use.
#[derive(Debug)]
pub struct Domain {
    tuning: Tuning,
    max_msg_size: usize,
    mr: Arc<MrDomain>,
    queues: Arc<QueueDomain>,
    /// Weak, because unread events may hold objects that hold the domain.
    eq: OnceLock<Weak<EventQueue>>,
    shared: SharedIds,
    /// Serves the connections of endpoints without event queue; started by the first of them.
    driver: Mutex<Option<Arc<Driver>>>,
    /// The XRC domains of its endpoints with many peers, by the tag of their authorization key, and
    /// where their files are.
    xrc: Mutex<HashMap<(Endpoints, u64), Weak<XrcDomain>>>,
    places: Places,
    counts: Option<PathBuf>,
    /// Of connected endpoints on XRC; made with the first of them.
    circuits: OnceLock<Arc<Circuits>>,
    /// The XRC domain of connected endpoints, which stays open as long as this domain.
    msg_xrc: Mutex<Option<Arc<XrcDomain>>>,
}

impl Domain {
    /// Opens a domain. Allocates the protection domain on the connection manager's context of the
    /// device.
    ///
    /// # Errors
    /// Those of `ibv_alloc_pd(3)`, usually `ENOMEM`. `EMFILE`. `EINVAL`: the tuning is out of
    /// range.
    pub fn open(device: &Arc<Device>, config: DomainConfig) -> Result<Arc<Self>> {
        config.tuning.check()?;
        let pd = Pd::alloc(device)?;
        let max_msg_size = device.port(1)?.max_msg_size;
        if log::enabled(Level::Info, Subsystem::Domain) {
            show_behaviour(device);
        }
        Ok(Arc::new(Self {
            max_msg_size,
            mr: MrDomain::new(Arc::clone(&pd), config.mr),
            queues: QueueDomain::new(pd, config.keepalive)?,
            tuning: config.tuning,
            eq: OnceLock::new(),
            shared: SharedIds::default(),
            driver: Mutex::default(),
            xrc: Mutex::default(),
            places: config.xrc,
            counts: config.counts,
            circuits: OnceLock::new(),
            msg_xrc: Mutex::default(),
        }))
    }

    /// The XRC domain of endpoints of a type with this tag of an authorization key (0: none), which
    /// all such endpoints of the domain share. Blocks as [`XrcDomain::open`].
    ///
    /// # Errors
    /// Those of [`XrcDomain::open`].
    pub fn xrc(&self, endpoints: Endpoints, auth: u64) -> Result<Arc<XrcDomain>> {
        let mut open = self.xrc.lock();
        let key = (endpoints, auth);
        if let Some(shared) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        let opened = Arc::new(XrcDomain::open(
            self.device(),
            &self.places,
            endpoints,
            auth,
        )?);
        open.retain(|_, shared| shared.strong_count() != 0);
        open.insert(key, Arc::downgrade(&opened));
        Ok(opened)
    }

    /// Sets the event queue of endpoints that are enabled without their own (`fi_domain(3)`,
    /// `fi_domain_bind`). The domain holds a weak reference. Thread safe.
    ///
    /// # Errors
    /// `EINVAL`: the domain has an event queue already.
    pub fn bind_eq(&self, eq: &Arc<EventQueue>) -> Result<()> {
        let bound = self.eq.set(Arc::downgrade(eq));
        bound.map_err(|_| FiErrno::EINVAL)
    }

    /// The event queue, if it still exists.
    pub(crate) fn eq(&self) -> Option<Arc<EventQueue>> {
        self.eq.get().and_then(Weak::upgrade)
    }

    /// Maximum length of a message or RMA operation in bytes.
    pub fn max_msg_size(&self) -> usize {
        self.max_msg_size
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.mr.device()
    }

    /// The protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        self.mr.pd()
    }

    /// The part that memory regions use.
    pub fn mr(&self) -> &Arc<MrDomain> {
        &self.mr
    }

    /// The part that completion queues and counters use.
    pub fn queues(&self) -> &Arc<QueueDomain> {
        &self.queues
    }

    /// The thread that serves the connections of endpoints without event queue.
    ///
    /// # Errors
    /// `EMFILE`, `ENOMEM`, `EAGAIN`: the thread could not be started.
    pub(crate) fn driver(&self) -> Result<Arc<Driver>> {
        let mut driver = self.driver.lock();
        if let Some(driver) = &*driver {
            return Ok(Arc::clone(driver));
        }
        let started = Arc::new(Driver::start()?);
        let assisted: Weak<Driver> = Arc::downgrade(&started);
        self.queues.set_assisted(assisted);
        Ok(Arc::clone(driver.insert(started)))
    }

    /// Appends a line to the file for counts, if there is one, by one write, so that lines of
    /// several processes do not mix.
    pub(crate) fn note_counts(&self, line: &str) {
        let Some(path) = &self.counts else {
            return;
        };
        let mut options = std::fs::OpenOptions::new();
        let file = options.append(true).create(true).open(path);
        let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written {
            warn_log!(EpCtrl, "FI_WEFT_COUNTS {}: {error}", path.display());
        }
    }

    /// The circuits of the domain's connected endpoints on XRC.
    ///
    /// # Errors
    /// As [`Self::driver`].
    pub(crate) fn circuits(&self) -> Result<&Arc<Circuits>> {
        if let Some(circuits) = self.circuits.get() {
            return Ok(circuits);
        }
        let driver = self.driver()?;
        Ok(self
            .circuits
            .get_or_init(|| Circuits::new(self.device(), driver, self.tuning)))
    }

    /// The XRC domain of the domain's connected endpoints, unless the application has bound another
    /// one to them: a private one, or if the user demands it that of the user's file for the
    /// authorization key of the domain. Blocks as [`XrcDomain::open`].
    ///
    /// # Errors
    /// Those of [`XrcDomain::open`].
    pub(crate) fn xrcd(&self) -> Result<Arc<Xrcd>> {
        let mut open = self.msg_xrc.lock();
        if let Some(open) = &*open {
            return Ok(Arc::clone(open.xrcd()));
        }
        let auth = self.mr.config().auth.as_ref().map_or(0, AuthKey::tag);
        let opened = self.xrc(Endpoints::Msg, auth)?;
        Ok(Arc::clone(open.insert(opened).xrcd()))
    }

    /// Ends the circuits of connected endpoints on XRC (`fi_close(3)`), and waits at most 1 s for
    /// their notices. No endpoint is left. Idempotent. The drop does the same, but an event of the
    /// connection manager, whose lock is held, may have the last reference.
    pub fn close(&self) {
        if let Some(circuits) = self.circuits.get() {
            circuits.close();
        }
    }

    /// The identities of the domain's shared receive contexts.
    pub(crate) fn shared_ids(&self) -> &SharedIds {
        &self.shared
    }

    /// The parameters of the domain's connections.
    pub(crate) fn tuning(&self) -> &Tuning {
        &self.tuning
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        self.close();
        if let Some(circuits) = self.circuits.get() {
            let counts = circuits.counts();
            info_log!(EpCtrl, "counts: {counts}");
            self.note_counts(&counts);
        }
    }
}

/// Logs the table of the device's observed behaviour, one row per line.
fn show_behaviour(device: &Arc<Device>) {
    match device.behaviour() {
        Ok(behaviour) => {
            for (label, seen) in behaviour.rows() {
                info_log!(Domain, "{}: {label:<36}{seen}", device.name());
            }
        }
        Err(error) => info_log!(
            Domain,
            "{}: the trials of its behaviour could not run: {error}",
            device.name()
        ),
    }
}
