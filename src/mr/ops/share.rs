//! Export of a region's memory to other processes.

use std::sync::Arc;

use parking_lot::Mutex;

use super::SharedMemory;
use super::grant::Grant;
use crate::errno::{FiErrno, Result};
use crate::mr::{Access, Region};

/// Memory that the engine allocated or imported for a region, and its grants, which end with the
/// region.
#[derive(Debug)]
pub(in crate::mr) struct ExportedMemory {
    memory: Arc<SharedMemory>,
    /// One for each access that was exported; `None` when the region is being closed.
    grants: Mutex<Option<Vec<Grant>>>,
}

impl ExportedMemory {
    pub(in crate::mr) fn new(memory: &Arc<SharedMemory>) -> Self {
        Self {
            memory: Arc::clone(memory),
            grants: Mutex::new(Some(Vec::new())),
        }
    }

    /// Revokes all handles.
    pub(in crate::mr) fn end(&self) {
        let gone = self.grants.lock().take();
        drop(gone);
    }

    pub(in crate::mr) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }
}

impl Region {
    /// A handle with which another process can import the region's memory with this access or less,
    /// until the region is closed: [`super::HANDLE_SIZE`] bytes. Equal access returns the same
    /// handle.
    ///
    /// # Errors
    /// - `EOPNOTSUPP`: the engine did not allocate or import the memory, or the region is a
    ///   sub-region.
    /// - `EACCES`: access that the region does not have. `EINVAL`: the region is being closed.
    /// - `EMFILE`, `ENOMEM`.
    pub fn export(&self, access: Access) -> Result<Vec<u8>> {
        let exported = self.exported.as_ref().ok_or(FiErrno::EOPNOTSUPP)?;
        if !self.access().contains(access) {
            return Err(FiErrno::EACCES);
        }
        let mut grants = exported.grants.lock();
        let grants = grants.as_mut().ok_or(FiErrno::EINVAL)?;
        if let Some(grant) = grants.iter().find(|grant| grant.access() == access) {
            return Ok(grant.handle());
        }
        let grant = Grant::new(exported.memory.file(), exported.memory.len(), access)?;
        let handle = grant.handle();
        grants.push(grant);
        Ok(handle)
    }

    /// Whether the engine allocated or imported the region's memory for it.
    pub fn is_shared(&self) -> bool {
        self.exported.is_some()
    }
}
