//! Regions that may be accessed once (`FI_MR_SINGLE_USE`).

use super::keys::{TARGET, connect, in_form, kind};
use super::*;

fn once(domain: &Arc<Domain>, memory: &[&[u8]], key: u64) -> Result<Arc<Region>> {
    let buffers: Vec<_> = memory
        .iter()
        .map(|part| crate::mr::Buffer {
            addr: part.as_ptr().cast(),
            len: part.len(),
        })
        .collect();
    let config = RegionConfig {
        buffers: &buffers,
        access: TARGET,
        requested_key: key,
        once: true,
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    unsafe { Region::register(domain.mr(), &config) }
}

fn forms() -> [Mode; 2] {
    let pinned = Mode::LOCAL | Mode::ALLOCATED;
    [pinned, pinned | Mode::NATIVE]
}

fn start(region: &Region, memory: &[u8]) -> u64 {
    let mode = region.domain().config().form.mode;
    match mode.contains(Mode::VIRT_ADDR) {
        true => memory.as_ptr() as u64,
        false => 0,
    }
}

#[test]
fn one_operation_reaches_it() {
    for mode in forms() {
        let device = device();
        let server = Domain::open(&device, kind(mode)).unwrap();
        let pair = || {
            connect(
                Domain::open(&device, kind(mode)).unwrap(),
                Arc::clone(&server),
            )
        };
        let ((first, _a), (second, _b)) = (pair(), pair());
        let memory = vec![0_u8; 4096];
        let source = Buffer::all(&first.domain, 4096);
        let other = Buffer::all(&second.domain, 4096);
        for parts in [&[&memory[..]][..], &[&memory[..100], &memory[100..]]] {
            let region = once(&server, parts, 5).unwrap();
            let (addr, key) = (start(&region, &memory), region.key());
            // a refused operation does not use the region's access
            first.write(&source, 2, addr + 4095, key, 1).unwrap();
            assert_eq!(first.refused(1), FiErrno::EACCES);
            second.write(&other, 8, addr, key, 2).unwrap();
            assert_eq!(
                second.refused(2),
                FiErrno::EKEYREJECTED,
                "it is the first's"
            );
            first.write(&source, 4096, addr, key, 3).unwrap();
            assert_eq!(first.completion().unwrap().context, 3);
            for (side, buffer) in [(&first, &source), (&second, &other), (&first, &source)] {
                // closing another region invalidates cached keys, so they are looked up again
                drop(Buffer::with_key(&server, 8, TARGET, 77));
                side.write(buffer, 8, addr, key, 4).unwrap();
                assert_eq!(side.refused(4), FiErrno::EKEYREJECTED, "{mode:?}");
                side.read(buffer, 8, addr, key, 5).unwrap();
                assert_eq!(side.refused(5), FiErrno::EKEYREJECTED);
            }
            drop(region);
        }
        // a later region with the same key is a new region
        let region = once(&server, &[&memory], 5).unwrap();
        let (addr, key) = (start(&region, &memory), region.key());
        second.read(&other, 8, addr, key, 6).unwrap();
        assert_eq!(second.completion().unwrap().context, 6);
        second.read(&other, 8, addr, key, 7).unwrap();
        assert_eq!(second.refused(7), FiErrno::EKEYREJECTED);
        drop(region);
    }
}

/// Several initiators write to each region at the same time, and one succeeds.
#[test]
fn of_several_initiators_one_succeeds() {
    let mode = forms()[0];
    let device = device();
    let server = Domain::open(&device, kind(mode)).unwrap();
    let sides: Vec<_> = (0..3)
        .map(|_| {
            connect(
                Domain::open(&device, kind(mode)).unwrap(),
                Arc::clone(&server),
            )
        })
        .collect();
    let memory = vec![0_u8; 64];
    let regions: Vec<_> = (0..200)
        .map(|key| once(&server, &[&memory], key).unwrap())
        .collect();
    let succeeded: Vec<Vec<bool>> = std::thread::scope(|scope| {
        let threads: Vec<_> = sides
            .iter()
            .map(|(side, _)| {
                scope.spawn(|| {
                    let source = Buffer::with_key(&side.domain, 64, Access::WRITE, 0);
                    (0..200)
                        .map(|key| {
                            side.write(&source, 64, 0, key, 1).unwrap();
                            side.completion().is_ok()
                        })
                        .collect()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for key in 0..200 {
        let count = succeeded.iter().filter(|each| each[key]).count();
        assert_eq!(count, 1, "key {key}");
    }
    drop(regions);
}

/// A region with two keys can be accessed once.
#[test]
fn a_mapped_key_is_the_same_access() {
    let (client, server) = in_form(forms()[0]);
    let memory = vec![0_u8; 64];
    let region = once(&server.domain, &[&memory], 5).unwrap();
    let source = Buffer::all(&client.domain, 64);
    let (base, raw) = region.raw_key().unwrap();
    let names = [(); 2].map(|()| client.domain.mr().map_raw(&raw).unwrap());
    client.write(&source, 8, base, names[0], 1).unwrap();
    assert_eq!(client.completion().unwrap().context, 1);
    for key in [names[0], names[1], 5] {
        client.write(&source, 8, base, key, 2).unwrap();
        assert_eq!(client.refused(2), FiErrno::EKEYREJECTED, "{key:#x}");
    }
    for key in names {
        client.domain.mr().unmap_key(key).unwrap();
    }
    drop(region);
}

/// The claim word serves as the event cell of such a region, so that it has no counters. The
/// registration is refused, not the later `fi_mr_bind(3)`.
#[test]
fn it_has_no_counters() {
    for mode in forms() {
        let events = DomainConfig {
            mr: MrConfig {
                events: true,
                ..kind(mode).mr
            },
            ..DomainConfig::default()
        };
        let domain = Domain::open(&device(), events).unwrap();
        let memory = [0_u8; 8];
        let buffers = [crate::mr::Buffer {
            addr: memory.as_ptr().cast(),
            len: 8,
        }];
        for (once, counted) in [(false, true), (true, false), (true, true)] {
            let config = RegionConfig {
                buffers: &buffers,
                access: TARGET,
                requested_key: 3,
                once,
                counted,
                ..RegionConfig::default()
            };
            // SAFETY: the region is dropped before the memory.
            let region = unsafe { Region::register(domain.mr(), &config) };
            let refused = (once && counted).then_some(FiErrno::EBADFLAGS);
            assert_eq!(region.err(), refused, "{mode:?}");
        }
    }
}

#[test]
fn where_it_cannot_be_had_it_is_refused() {
    let mode = Mode::LOCAL | Mode::ALLOCATED | Mode::MMU_NOTIFY;
    let domain = Domain::open(&device(), kind(mode)).unwrap();
    let memory = [0_u8; 8];
    assert_eq!(
        once(&domain, &[&memory], 1).err(),
        Some(FiErrno::EBADFLAGS),
        "the claim would not survive a change"
    );
}
