//! What the unit tests of `mr` share: domains, regions and buffers.

#![allow(unsafe_code, reason = "registers memory of tests")]

use std::sync::Arc;

use super::{Access, Buffer, Form, Mode, MrConfig, Region, RegionConfig};
use crate::domain::{Domain, DomainConfig};
use crate::verbs::{Device, devices};

/// The embedded device.
pub(super) fn device() -> Arc<Device> {
    devices(&[softverbs::backend()], false).remove(0)
}

/// A domain of the form that this mode has. `events`: its regions can have counters.
pub(super) fn domain(device: &Arc<Device>, mode: Mode, events: bool) -> Arc<Domain> {
    let mr = MrConfig {
        form: Form::new(mode, false),
        events,
        ..MrConfig::default()
    };
    let config = DomainConfig {
        mr,
        ..DomainConfig::default()
    };
    Domain::open(device, config).unwrap()
}

/// Registers all of this memory, which outlives the region.
pub(super) fn region(domain: &Domain, memory: &[u8], access: Access, key: u64) -> Arc<Region> {
    let buffers = [Buffer {
        addr: memory.as_ptr().cast(),
        len: memory.len(),
    }];
    let config = RegionConfig {
        buffers: &buffers,
        access,
        requested_key: key,
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the memory last.
    unsafe { Region::register(domain.mr(), &config) }.unwrap()
}

/// All of this memory as a local buffer.
pub(super) fn iov(memory: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: memory.len(),
    }
}
