//! Sub-regions (`base_mr`).

use super::keys::{TARGET, in_form, kind};
use super::*;

fn part(base: &Arc<Region>, memory: &[u8], access: Access, key: u64) -> Result<Arc<Region>> {
    let config = RegionConfig {
        buffers: &[crate::mr::Buffer {
            addr: memory.as_ptr().cast(),
            len: memory.len(),
        }],
        access,
        requested_key: key,
        base: Some(base),
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    unsafe { Region::register(base.domain(), &config) }
}

/// A sub-region has its own key, access and bounds.
#[test]
fn a_part_is_a_region_of_its_own() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let source = Buffer::all(&client.domain, 4096);
    let base = Buffer::with_key(&server.domain, 4096, Access::REMOTE_READ, 1);
    let memory = &base.memory[1000..1064];
    let part = part(&base.region, memory, Access::REMOTE_WRITE, 2).unwrap();
    client.write(&source, 64, 0, 1, 1).unwrap();
    assert_eq!(client.refused(1), FiErrno::EACCES);
    client.read(&source, 4096, 0, 1, 2).unwrap();
    client.completion().unwrap();
    client.write(&source, 64, 0, 2, 3).unwrap();
    client.completion().unwrap();
    for (at, len) in [(0, 65), (63, 2), (64, 1)] {
        client.write(&source, len, at, 2, 4).unwrap();
        assert_eq!(client.refused(4), FiErrno::EACCES, "{at} {len}");
    }
    client.read(&source, 1, 0, 2, 5).unwrap();
    assert_eq!(client.refused(5), FiErrno::EACCES);
    drop(part);
    client.write(&source, 8, 0, 2, 6).unwrap();
    assert_eq!(client.refused(6), FiErrno::EKEYREJECTED);
    client.read(&source, 4096, 0, 1, 7).unwrap();
    client.completion().unwrap();
}

#[test]
fn what_is_no_part_is_refused() {
    let domain = Domain::open(&device(), kind(Mode::NATIVE)).unwrap();
    let base = Buffer::with_key(&domain, 4096, TARGET, 1);
    let outside = [0_u8; 16];
    let refused = part(&base.region, &outside, TARGET, 0);
    assert_eq!(refused.err(), Some(FiErrno::EINVAL));
    let part = part(&base.region, &base.memory[4000..], TARGET, 0).unwrap();
    // a sub-region holds a reference to its base
    let weak = Arc::downgrade(&base.region);
    drop(base);
    assert!(weak.upgrade().is_some());
    drop(part);
    assert!(weak.upgrade().is_none());
}
