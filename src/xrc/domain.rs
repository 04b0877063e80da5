//! An open XRC domain: shared by the processes of a node through a file, private, or the
//! application's.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::NodeId;
use super::file::{self, DomainFile, Endpoints, Found, Search};
use crate::errno::Result;
use crate::log::warn_log;
use crate::verbs::{Device, Xrcd};

/// Where the files of XRC domains are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The path that the user demands (`FI_WEFT_XRCD_PATH`), without its ending. `private`: no
    /// file; `shared`: the file of the user. `None`: the file of the user for endpoints with many
    /// peers, none for connected ones.
    pub demanded: Option<PathBuf>,
    /// The user's directory for runtime files (`XDG_RUNTIME_DIR`).
    pub runtime_dir: Option<PathBuf>,
}

/// The paths that demand a private domain, and that of the user's file.
const PRIVATE: &str = "private";
const SHARED: &str = "shared";

/// An open XRC domain, and what identifies its node. Thread safe. Closed when it is dropped, and
/// the objects in it; then its file is collected.
#[derive(Debug)]
pub struct XrcDomain {
    xrcd: Arc<Xrcd>,
    node: NodeId,
    /// Behind the domain: collected when it is closed.
    _file: Option<DomainFile>,
}

impl XrcDomain {
    /// The domain of the endpoints of one type with an authorization key (its tag, 0 for none):
    /// that of the first file in `places` that can be used, or a private one. The reasons for a
    /// private one that was not demanded are logged once for each process. Blocks for at most 1 s
    /// for each place, and while others open domains.
    ///
    /// Connected endpoints share a domain with other processes only if the user demands it: they
    /// cannot repeat messages, so a process that ends with messages under way ends connections of
    /// those that share its circuits.
    ///
    /// # Errors
    /// `EACCES`: the demanded path is not safe. Those of [`Xrcd::open`] and getrandom(2).
    pub fn open(
        device: &Arc<Device>,
        places: &Places,
        endpoints: Endpoints,
        auth: u64,
    ) -> Result<Self> {
        let demanded = places.demanded.as_deref();
        let private = demanded == Some(Path::new(PRIVATE));
        if private || demanded.is_none() && endpoints == Endpoints::Msg {
            return Self::private(device);
        }
        let found = file::find(&Search {
            demanded: demanded.filter(|path| *path != Path::new(SHARED)),
            runtime_dir: places.runtime_dir.as_deref(),
            device: device.name(),
            endpoints,
            auth,
        })?;
        let file = match found {
            Found::File(file) => file,
            Found::Private(reasons) => {
                static LOGGED: AtomicBool = AtomicBool::new(false);
                if !LOGGED.swap(true, Ordering::Relaxed) {
                    warn_log!(
                        Domain,
                        "this process shares no XRC domain with others: {reasons}"
                    );
                }
                return Self::private(device);
            }
        };
        let node = NodeId::of_file(device, auth, file.as_fd())?;
        let xrcd = Xrcd::open(device, Some(file.as_fd()), libc::O_CREAT)?;
        Ok(Self::with(Arc::new(xrcd), node, Some(file)))
    }

    /// A domain of this process alone, which is a node.
    ///
    /// # Errors
    /// Those of [`Xrcd::open`] and getrandom(2).
    pub fn private(device: &Arc<Device>) -> Result<Self> {
        let xrcd = Xrcd::open(device, None, libc::O_CREAT)?;
        Ok(Self::with(Arc::new(xrcd), NodeId::random()?, None))
    }

    /// The domain of an application, with the file that identifies it, if there is one.
    ///
    /// # Errors
    /// Those of fstat(2) and getrandom(2).
    pub fn of_application(xrcd: Arc<Xrcd>, file: Option<BorrowedFd<'_>>) -> Result<Self> {
        // the application decides which authorization keys share it
        let node = match file {
            Some(file) => NodeId::of_file(xrcd.device(), 0, file)?,
            None => NodeId::random()?,
        };
        Ok(Self::with(xrcd, node, None))
    }

    fn with(xrcd: Arc<Xrcd>, node: NodeId, file: Option<DomainFile>) -> Self {
        Self {
            xrcd,
            node,
            _file: file,
        }
    }

    /// The domain of the device.
    pub fn xrcd(&self) -> &Arc<Xrcd> {
        &self.xrcd
    }

    /// The node of the processes that have it open.
    pub fn node(&self) -> NodeId {
        self.node
    }
}
