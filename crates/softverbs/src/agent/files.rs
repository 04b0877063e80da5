//! Opening the files that a peer shows, whichever way the kernel allows.

use std::os::fd::{OwnedFd, RawFd};

use super::{link, policy};
use crate::sys::{self, Errno, Identity, Res};

/// How this process opens files of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opener {
    pub(crate) identity: Identity,
    pub(crate) slot: u32,
    pub(crate) own_slot: u32,
}

impl Opener {
    /// The file that the peer has open as `fd`, opened anew. Where `/proc` is closed it is asked for, which takes 2 s at
    /// most; then it is writable where such files are, whatever `flags` say.
    ///
    /// # Errors
    /// `EACCES` where neither way is open, `ETIMEDOUT`, `ENOENT`.
    pub(crate) fn open(&self, fd: RawFd, flags: libc::c_int) -> Res<OwnedFd> {
        match sys::open_fd_of(self.identity.pid, fd, flags) {
            Err(Errno(libc::EACCES | libc::EPERM)) if self.slot != self.own_slot => {
                let file = link::fetch_file(self.slot, &self.identity, self.own_slot, fd)?;
                policy::tell("a peer's files are closed to this process");
                Ok(file)
            }
            done => done,
        }
    }
}
