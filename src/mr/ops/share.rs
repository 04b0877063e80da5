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

#[allow(unsafe_code, reason = "registers memory")]
#[cfg(test)]
mod tests {
    use super::super::Hint;
    use super::*;
    use crate::domain::{Domain, DomainConfig};
    use crate::mr::{Buffer, Desc, Following, RegionConfig, stops, tests};

    /// Also if the call fails, because an operation follows the region's descriptor.
    #[test]
    fn a_close_ends_the_handles() {
        let domain = Domain::open(&tests::device(), DomainConfig::default()).unwrap();
        let nowhere = Hint {
            addr: std::ptr::null_mut(),
            fixed: false,
        };
        let memory = SharedMemory::alloc(domain.device(), 4096, nowhere).unwrap();
        let buffer = Buffer {
            addr: memory.addr(),
            len: memory.len(),
        };
        let config = RegionConfig {
            buffers: std::slice::from_ref(&buffer),
            access: Access::READ,
            memory: Some(&memory),
            ..RegionConfig::default()
        };
        // SAFETY: the region owns the memory.
        let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
        let handle = region.export(Access::READ).unwrap();
        let import = || SharedMemory::import(domain.device(), &handle, Access::READ, nowhere);
        assert!(import().is_ok());
        let mut follows = Following::default();
        follows.add(Desc(region.desc()));
        stops::AT_ONCE.set(true);
        assert_eq!(region.close(), Err(FiErrno::EBUSY));
        stops::AT_ONCE.set(false);
        assert_eq!(import().err(), Some(FiErrno::ENOENT));
        assert_eq!(region.export(Access::READ).err(), Some(FiErrno::EINVAL));
        drop(follows);
        region.close().unwrap();
    }
}
