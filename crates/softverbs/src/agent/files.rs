//! Opening the files that a peer shares: through `/proc`, or through the peer's agent.

use std::os::fd::{OwnedFd, RawFd};

use super::{client, policy};
use crate::sys::{self, Errno, Identity, Res};

/// How this process opens files of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opener {
    pub(crate) identity: Identity,
    pub(crate) slot: u32,
    pub(crate) own_slot: u32,
}

impl Opener {
    /// Reopens the file that the peer has open as `fd`. If `/proc` denies access, the peer's agent
    /// sends the file, which takes at most 2 s; the agent, not `flags`, then determines whether the
    /// file is writable.
    ///
    /// # Errors
    /// `EACCES`: both ways are denied. `ETIMEDOUT`: the agent did not answer. `ENOENT`: no such
    /// file.
    pub(crate) fn open(&self, fd: RawFd, flags: libc::c_int) -> Res<OwnedFd> {
        match sys::open_fd_of(self.identity.pid, fd, flags) {
            Err(Errno(libc::EACCES | libc::EPERM)) if self.slot != self.own_slot => {
                let file = client::fetch_file(self.slot, &self.identity, self.own_slot, fd)?;
                policy::log_once("the kernel refuses access to a peer's files in /proc");
                Ok(file)
            }
            done => done,
        }
    }
}
