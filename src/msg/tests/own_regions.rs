//! Regions that are bound to one endpoint (`FI_MR_ENDPOINT`): no other endpoint gives access to
//! them.

use super::keys::{connect, kind};
use super::*;
use crate::queue::Counter;

/// Forms with endpoints' regions: native keys, handles, application keys.
fn forms() -> [Mode; 3] {
    let all = Mode::LOCAL | Mode::ALLOCATED | Mode::ENDPOINT;
    [all | Mode::NATIVE, all | Mode::PROV_KEY, all]
}

fn unbound(domain: &Arc<Domain>, memory: &[u8], key: u64, counted: bool) -> Arc<Region> {
    let buffers = [crate::mr::Buffer {
        addr: memory.as_ptr().cast(),
        len: memory.len(),
    }];
    let config = RegionConfig {
        buffers: &buffers,
        access: Access::all(),
        requested_key: key,
        counted,
        ..RegionConfig::default()
    };
    // SAFETY: tests drop the region before the memory.
    unsafe { Region::register(domain.mr(), &config) }.unwrap()
}

fn base(region: &Region, memory: &[u8]) -> u64 {
    let mode = region.domain().config().form.mode;
    match mode.contains(Mode::VIRT_ADDR) {
        true => memory.as_ptr() as u64,
        false => 0,
    }
}

#[test]
fn one_endpoint_gives_access_and_no_other() {
    let device = device();
    for mode in forms() {
        // the initiators' regions belong to their domain
        let client_mode = mode - Mode::ENDPOINT;
        let server_domain = Domain::open(&device, kind(mode)).unwrap();
        let pair = || {
            let client = Domain::open(&device, kind(client_mode)).unwrap();
            connect(client, Arc::clone(&server_domain))
        };
        let ((client, server), (stranger, other)) = (pair(), pair());
        let memory = vec![0_u8; 64];
        let region = unbound(&server_domain, &memory, 5, false);
        let mut source = Buffer::all(&client.domain, 64);
        source.fill(9);
        let foreign = Buffer::all(&stranger.domain, 64);
        region.bind_endpoint(server.ep.scope()).unwrap();
        region.enable().unwrap();
        let (addr, key) = (base(&region, &memory), region.key());
        client.write(&source, 64, addr, key, 1).unwrap();
        client.completion().unwrap();
        let bytes: Vec<_> = (0..64)
            // SAFETY: the memory is live; devices may write to it.
            .map(|i| unsafe { memory.as_ptr().add(i).read_volatile() })
            .collect();
        assert_eq!(bytes, source.memory, "{mode:?}");
        for op in [Side::write, Side::read] {
            let _ = op(&stranger, &foreign, 64, addr, key, 2);
            let error = stranger.completion().unwrap_err();
            assert_eq!(error.completion.context, 2, "{mode:?}");
            if mode.contains(Mode::VIRT_ADDR) {
                break; // the device refused it, which ends the connection
            }
            assert_eq!(error.err, FiErrno::EKEYREJECTED);
        }
        assert!(foreign.memory.iter().all(|byte| *byte == 0));
        // the endpoint of the region is still connected
        client.read(&source, 64, addr, key, 3).unwrap();
        client.completion().unwrap();
        drop(region);
        let _ = client.write(&source, 64, addr, key, 4);
        assert!(client.completion().is_err());
        drop(other);
    }
}

/// Descriptors are valid at every endpoint of the domain, before and after binding.
#[test]
fn local_buffers_are_any_endpoint_s() {
    let device = device();
    let domain = Domain::open(&device, kind(forms()[0])).unwrap();
    let peers = || Domain::open(&device, kind(Mode::NATIVE | Mode::LOCAL)).unwrap();
    let (first, first_peer) = connect(Arc::clone(&domain), peers());
    let (second, second_peer) = connect(Arc::clone(&domain), peers());
    // longer than the inline size
    let memory = [0x77; 4096];
    let region = unbound(&domain, &memory, 0, false);
    let iov = libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: 4096,
    };
    let desc = Desc(region.desc());
    for bound in [false, true] {
        if bound {
            region.bind_endpoint(first.ep.scope()).unwrap();
            region.enable().unwrap();
        }
        for (side, peer) in [(&first, &first_peer), (&second, &second_peer)] {
            let land = Buffer::all(&peer.domain, 4096);
            peer.recv(&land, 4096, 1).unwrap();
            // SAFETY: the buffer outlives the operation.
            unsafe { side.ep.send(LocalIov::single(&iov, &desc), 2) }.unwrap();
            peer.completion().unwrap();
            side.completion().unwrap();
            assert_eq!(land.memory, memory);
            // an endpoint of another domain
            // SAFETY: the call is refused.
            let refused = unsafe { peer.ep.send(LocalIov::single(&iov, &desc), 3) };
            assert_eq!(refused, Err(FiErrno::EINVAL));
        }
    }
    drop(region);
}

/// A long-lived buffer is used by endpoints that come and go.
#[test]
fn a_closed_endpoint_leaves_no_registration() {
    let device = device();
    let domain = Domain::open(&device, kind(forms()[0])).unwrap();
    let memory = [0_u8; 64];
    let region = unbound(&domain, &memory, 0, false);
    let iov = libc::iovec {
        iov_base: memory.as_ptr().cast_mut().cast(),
        iov_len: 64,
    };
    let desc = Desc(region.desc());
    for _ in 0..3 {
        let open = || {
            let peer = Domain::open(&device, kind(Mode::NATIVE | Mode::LOCAL)).unwrap();
            let ends = connect(Arc::clone(&domain), peer);
            // SAFETY: the buffer outlives the endpoint.
            unsafe { ends.0.ep.recv(LocalIov::single(&iov, &desc), 1) }.unwrap();
            ends
        };
        let first = open();
        let second = open();
        assert_eq!(region.registrations_elsewhere(), 2);
        drop(first);
        assert_eq!(region.registrations_elsewhere(), 1);
        drop(second);
        assert_eq!(region.registrations_elsewhere(), 0);
    }
    drop(region);
}

#[test]
fn bindings_have_their_time() {
    let device = device();
    let mode = forms()[0] | Mode::RMA_EVENT;
    let domain = Domain::open(&device, kind(mode)).unwrap();
    let endpoint = || Endpoint::open(&domain, config(SERVER)).unwrap();
    let (ep, other) = (endpoint(), endpoint());
    let memory = [0_u8; 64];
    let region = unbound(&domain, &memory, 0, true);
    assert_eq!(region.enable(), Err(FiErrno::EOPBADSTATE), "no endpoint");
    region.bind_endpoint(ep.scope()).unwrap();
    assert_eq!(region.bind_endpoint(other.scope()), Err(FiErrno::EINVAL));
    let counter = Counter::open(domain.queues(), WaitKind::None).unwrap();
    region.bind_counter(&counter, Flags::REMOTE_WRITE).unwrap();
    region.enable().unwrap();
    assert_eq!(
        region.bind_endpoint(other.scope()),
        Err(FiErrno::EOPBADSTATE)
    );
    assert_eq!(region.enable(), Err(FiErrno::EOPBADSTATE));
    let uncounted = unbound(&domain, &memory, 0, false);
    assert_eq!(
        uncounted.bind_counter(&counter, Flags::REMOTE_WRITE),
        Err(FiErrno::EINVAL),
        "registered without the intention"
    );
    let plain = Domain::open(&device, kind(Mode::NATIVE)).unwrap();
    let buffer = Buffer::all(&plain, 8);
    let stranger = Endpoint::open(&plain, config(SERVER)).unwrap();
    assert_eq!(
        buffer.region.bind_endpoint(stranger.scope()),
        Err(FiErrno::ENOSYS)
    );
    assert_eq!(
        uncounted.bind_endpoint(stranger.scope()),
        Err(FiErrno::EDOMAIN)
    );
}

/// A region that is bound to an endpoint may count too.
#[test]
fn an_endpoint_s_region_counts() {
    let device = device();
    let mode = forms()[2] | Mode::RMA_EVENT;
    let server = Domain::open(&device, kind(mode)).unwrap();
    let client = Domain::open(&device, kind(Mode::LOCAL | Mode::ALLOCATED)).unwrap();
    let (client, server) = connect(client, server);
    let memory = [0_u8; 8];
    let region = unbound(&server.domain, &memory, 3, true);
    let counter = Counter::open(server.domain.queues(), WaitKind::None).unwrap();
    region.bind_counter(&counter, Flags::REMOTE_WRITE).unwrap();
    region.bind_endpoint(server.ep.scope()).unwrap();
    region.enable().unwrap();
    let source = Buffer::all(&client.domain, 8);
    for _ in 0..10 {
        client.write(&source, 8, 0, 3, 1).unwrap();
        client.completion().unwrap();
    }
    assert_eq!(counter.read(), 10);
    drop(region);
}
