//! The file whose inode the processes of a node share as their XRC domain: its place, the checks of
//! its owner and rights, its lock and its removal.
//!
//! The file has no content. A process holds a shared lock (`flock(2)`) on it while it has the
//! domain open. A process that gets the exclusive lock removes the name, if that still has the
//! inode of its descriptor: no process has the domain then. An opener compares both after it has
//! got its lock. So an inode in use always has the name, and all openers have the same inode.

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::calls::{self, Identity};
use crate::errno::{FiErrno, Result};
use crate::log::{info_log, warn_log};

/// The longest wait for the lock of a file, whose holder may be stopped.
const FILE_LOCK_WAIT: Duration = Duration::from_secs(1);
/// How often an opener begins again because the name has got another file.
const ROUNDS: u32 = 16;
/// The beginning of the names of files in the directories of the user.
const PREFIX: &str = "xrcd-";

/// The type of the endpoints that use a domain. An SRQ number that is used again must not lead a
/// packet of one type to a queue of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoints {
    /// `FI_EP_MSG`
    Msg,
    /// `FI_EP_RDM`
    Rdm,
}

impl Endpoints {
    fn name(self) -> &'static str {
        match self {
            Self::Msg => "msg",
            Self::Rdm => "rdm",
        }
    }
}

/// Which file is wanted.
#[derive(Clone, Debug)]
pub struct Search<'a> {
    /// The path that the user demands, without its ending.
    pub demanded: Option<&'a Path>,
    /// The user's directory for runtime files (`XDG_RUNTIME_DIR`).
    pub runtime_dir: Option<&'a Path>,
    /// The device's name.
    pub device: &'a str,
    /// The type of the endpoints.
    pub endpoints: Endpoints,
    /// The tag of the authorization key; 0: none.
    pub auth: u64,
}

/// The result of a search.
#[derive(Debug)]
pub enum Found {
    /// The file, with its lock.
    File(DomainFile),
    /// No file can be used: the reasons. The domain is private.
    Private(String),
}

/// A file that this process has locked. Dropped, it is collected if no other process has it. The
/// owner closes its XRC domain before. In a forked child, whose descriptor has the lock of its
/// parent, only the descriptor is closed.
#[derive(Debug)]
pub struct DomainFile {
    /// The process that has locked it.
    owner: forks::Owner,
    directory: OwnedFd,
    name: CString,
    /// `None` only while it is dropped.
    file: Option<File>,
}

#[cfg(test)]
impl DomainFile {
    /// Device and inode.
    fn identity(&self) -> Identity {
        calls::stat(self.as_fd()).unwrap().identity
    }
}

impl AsFd for DomainFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.file {
            Some(file) => file.as_fd(),
            None => self.directory.as_fd(),
        }
    }
}

impl Drop for DomainFile {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else {
            return;
        };
        if !self.owner.is_this_process() {
            return;
        }
        let collector = Collector::closing(self.directory.as_fd(), &self.name, file);
        if let Err(error) = collector.run() {
            info_log!(Domain, "{:?}: the file is not removed: {error}", self.name);
        }
    }
}

/// Searches the file, creates it if it does not exist, and locks it. Blocks at most 1 s for each
/// place. Files of ended processes in the same directory are removed.
///
/// # Errors
/// `EACCES`: the demanded path is not safe.
pub fn find(search: &Search<'_>) -> Result<Found> {
    let mut reasons = String::new();
    if let Some(path) = search.demanded {
        match demanded(path, search.endpoints) {
            Ok(file) => return Ok(Found::File(file)),
            Err(Refused::Unsafe(why)) => {
                warn_log!(Domain, "FI_WEFT_XRCD_PATH {}: {why}", path.display());
                return Err(FiErrno::EACCES);
            }
            Err(Refused::Failed(why)) => {
                warn_log!(
                    Domain,
                    "FI_WEFT_XRCD_PATH {} is not used: {why}",
                    path.display()
                );
                note(&mut reasons, path, &why);
            }
        }
    }
    let name = format!(
        "{PREFIX}{}-{}-{:016x}",
        search.device,
        search.endpoints.name(),
        search.auth
    );
    let name = CString::new(name).map_err(|_| FiErrno::EINVAL)?;
    for place in places(search.runtime_dir) {
        match place.find(&name) {
            Ok(file) => return Ok(Found::File(file)),
            Err(Refused::Unsafe(why) | Refused::Failed(why)) => {
                note(&mut reasons, &place.base.join(place.leaf.to_str()), &why);
            }
        }
    }
    Ok(Found::Private(reasons))
}

fn note(reasons: &mut String, path: &Path, why: &str) {
    if !reasons.is_empty() {
        reasons.push_str("; ");
    }
    reasons.push_str(&format!("{}: {why}", path.display()));
}

/// Why a place cannot be used.
#[derive(Debug, PartialEq, Eq)]
enum Refused {
    /// Another user could have made the file, or could replace it.
    Unsafe(String),
    Failed(String),
}

impl From<FiErrno> for Refused {
    fn from(error: FiErrno) -> Self {
        match error.code() {
            // a symbolic link, or no directory
            libc::ELOOP | libc::ENOTDIR => Self::Unsafe("it is no directory or file".into()),
            // a file that another user has made with this name
            libc::EACCES | libc::EPERM => Self::Unsafe("this user may not open it".into()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// A name below a directory.
#[derive(Clone, Debug)]
struct Leaf(CString);

impl Leaf {
    fn to_str(&self) -> &OsStr {
        OsStr::from_bytes(self.0.to_bytes())
    }
}

/// A directory of the user: `leaf` in `base`, which weft makes.
#[derive(Debug)]
struct BaseDir {
    base: PathBuf,
    leaf: Leaf,
    /// `base` belongs to the user too. Otherwise it is one in which each user can make files, but
    /// cannot change those of others.
    own: bool,
}

/// The directories, in the order in which they are tried.
fn places(runtime_dir: Option<&Path>) -> Vec<BaseDir> {
    let user = calls::user();
    let leaf = |name: String| CString::new(name).map(Leaf).unwrap_or(Leaf(c"weft".into()));
    let own = |base: PathBuf| BaseDir {
        base,
        leaf: Leaf(c"weft".into()),
        own: true,
    };
    let mut places = Vec::new();
    // a relative path is to be ignored (XDG base directory specification)
    let runtime_dir = runtime_dir.filter(|base| base.is_absolute());
    places.extend(runtime_dir.map(|base| own(base.to_owned())));
    places.push(own(format!("/run/user/{user}").into()));
    places.push(BaseDir {
        base: "/dev/shm".into(),
        leaf: leaf(format!("weft-{user}")),
        own: false,
    });
    places
}

impl BaseDir {
    fn find(&self, name: &CStr) -> std::result::Result<DomainFile, Refused> {
        let base = CString::new(self.base.as_os_str().as_bytes()).map_err(|_| FiErrno::EINVAL)?;
        let base = calls::open_directory(None, &base)?;
        if self.own {
            check_directory(base.as_fd())?;
        }
        calls::make_directory(base.as_fd(), &self.leaf.0)?;
        let directory = calls::open_directory(Some(base.as_fd()), &self.leaf.0)?;
        check_directory(directory.as_fd())?;
        let file = open_in(directory, name)?;
        collect_others(&file);
        Ok(file)
    }
}

fn check_directory(directory: BorrowedFd<'_>) -> std::result::Result<(), Refused> {
    let stat = calls::stat(directory)?;
    if stat.uid != calls::user() {
        return Err(Refused::Unsafe("it belongs to another user".into()));
    }
    if stat.others_write() {
        return Err(Refused::Unsafe("other users may write to it".into()));
    }
    Ok(())
}

/// The file of the path that the user demands. Its directory may be one of all users, if these
/// cannot replace files of each other (sticky).
fn demanded(path: &Path, endpoints: Endpoints) -> std::result::Result<DomainFile, Refused> {
    let name = path.file_name().ok_or(FiErrno::EINVAL)?;
    let mut name = name.to_owned();
    name.push(".");
    name.push(endpoints.name());
    let name = CString::new(name.as_bytes()).map_err(|_| FiErrno::EINVAL)?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = CString::new(parent.as_os_str().as_bytes()).map_err(|_| FiErrno::EINVAL)?;
    let directory = calls::open_directory(None, &parent)?;
    let stat = calls::stat(directory.as_fd())?;
    if stat.uid != calls::user() && stat.uid != 0 {
        return Err(Refused::Unsafe("its directory is another user's".into()));
    }
    if stat.others_write() && stat.mode & libc::S_ISVTX == 0 {
        let why = "other users may replace files of its directory";
        return Err(Refused::Unsafe(why.into()));
    }
    open_in(directory, &name)
}

/// Opens, creates and locks the file.
fn open_in(directory: OwnedFd, name: &CStr) -> std::result::Result<DomainFile, Refused> {
    let begin = Instant::now();
    let mut opener = Opener::new(directory.as_fd(), name);
    let file = loop {
        match opener.step()? {
            Step::Next => {}
            Step::Done((file, _)) => break file,
            Step::Busy if begin.elapsed() < FILE_LOCK_WAIT => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Step::Busy => return Err(FiErrno::EBUSY.into()),
        }
    };
    Ok(DomainFile {
        owner: forks::Owner::this_process(),
        directory,
        name: name.to_owned(),
        file: Some(file),
    })
}

/// Removes the other files of the directory that no process has locked: those of ended processes
/// with other authorization keys or devices.
fn collect_others(own: &DomainFile) {
    let path = format!("/proc/self/fd/{}", own.directory.as_raw_fd());
    let Ok(entries) = std::fs::read_dir(path) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Ok(name) = CString::new(name.as_bytes()) else {
            continue;
        };
        if name == own.name || !name.as_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        // a file that cannot be removed is of no harm
        let _ = Collector::new(own.directory.as_fd(), &name).run();
    }
}

/// The result of one step, which makes one system call on the file.
#[derive(Debug)]
enum Step<T> {
    Next,
    /// Another process has the lock.
    Busy,
    Done(T),
}

/// The steps by which a file is opened.
struct Opener<'a> {
    directory: BorrowedFd<'a>,
    name: &'a CStr,
    rounds: u32,
    state: Opening,
}

enum Opening {
    Open,
    Check(File),
    Lock(File, Identity),
    Compare(File, Identity),
}

impl<'a> Opener<'a> {
    fn new(directory: BorrowedFd<'a>, name: &'a CStr) -> Self {
        Self {
            directory,
            name,
            rounds: 0,
            state: Opening::Open,
        }
    }

    fn step(&mut self) -> std::result::Result<Step<(File, Identity)>, Refused> {
        self.state = match std::mem::replace(&mut self.state, Opening::Open) {
            Opening::Open => {
                self.rounds += 1;
                if self.rounds > ROUNDS {
                    return Err(FiErrno::EAGAIN.into());
                }
                Opening::Check(calls::open_file(self.directory, self.name, true)?)
            }
            Opening::Check(file) => {
                let stat = calls::stat(file.as_fd())?;
                let wrong = if !stat.is_regular() {
                    Some("the file is no regular file")
                } else if stat.uid != calls::user() {
                    Some("the file belongs to another user")
                } else if stat.others_open() {
                    // each user who can open it can lock it
                    Some("other users may open the file")
                } else if stat.links > 1 {
                    Some("the file has more than one name")
                } else {
                    None
                };
                if let Some(wrong) = wrong {
                    return Err(Refused::Unsafe(wrong.into()));
                }
                Opening::Lock(file, stat.identity)
            }
            Opening::Lock(file, identity) => {
                if !calls::try_lock(&file, false)? {
                    self.state = Opening::Lock(file, identity);
                    return Ok(Step::Busy);
                }
                Opening::Compare(file, identity)
            }
            Opening::Compare(file, identity) => {
                if calls::named(self.directory, self.name)? == Some(identity) {
                    return Ok(Step::Done((file, identity)));
                }
                Opening::Open
            }
        };
        Ok(Step::Next)
    }
}

/// The steps by which a file without users is removed.
struct Collector<'a> {
    directory: BorrowedFd<'a>,
    name: &'a CStr,
    state: Collecting,
}

enum Collecting {
    Open,
    Check(File),
    Lock(File, Identity),
    Compare(File, Identity),
    Remove(File),
}

impl<'a> Collector<'a> {
    /// Collects a file of the directory.
    fn new(directory: BorrowedFd<'a>, name: &'a CStr) -> Self {
        Self {
            directory,
            name,
            state: Collecting::Open,
        }
    }

    /// Collects a file that this process has locked, and does not need any more.
    fn closing(directory: BorrowedFd<'a>, name: &'a CStr, file: File) -> Self {
        Self {
            directory,
            name,
            state: Collecting::Check(file),
        }
    }

    /// All steps; none of them waits.
    fn run(mut self) -> Result<()> {
        while let Step::Next = self.step()? {}
        Ok(())
    }

    /// `Busy`: a process has the file.
    fn step(&mut self) -> Result<Step<()>> {
        self.state = match std::mem::replace(&mut self.state, Collecting::Open) {
            Collecting::Open => {
                Collecting::Check(calls::open_file(self.directory, self.name, false)?)
            }
            Collecting::Check(file) => {
                let stat = calls::stat(file.as_fd())?;
                if !stat.is_regular() || stat.uid != calls::user() || stat.size != 0 {
                    // not of this module
                    return Ok(Step::Done(()));
                }
                Collecting::Lock(file, stat.identity)
            }
            Collecting::Lock(file, identity) => {
                // a shared lock that is not replaced is lost, which is of no harm: the process
                // closes the file
                if !calls::try_lock(&file, true)? {
                    return Ok(Step::Busy);
                }
                Collecting::Compare(file, identity)
            }
            Collecting::Compare(file, identity) => {
                if calls::named(self.directory, self.name)? != Some(identity) {
                    return Ok(Step::Done(()));
                }
                Collecting::Remove(file)
            }
            Collecting::Remove(file) => {
                calls::remove(self.directory, self.name)?;
                // closed behind the removal: an opener that waits finds no name
                drop(file);
                return Ok(Step::Done(()));
            }
        };
        Ok(Step::Next)
    }
}

#[allow(unsafe_code, reason = "forks")]
#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
