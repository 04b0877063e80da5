//! Regions of local buffers that are closed while operations on them wait, or while a thread
//! follows their descriptors. `docs/mr-modes.md`, "Descriptors of operations that wait".

#![allow(unsafe_code, reason = "registers buffers as C does")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::breaks::pattern;
use super::endpoints::{Transport, wait, wait_for};
use super::pull::{
    bytes_of, domain_with, each_reader, pull_failures, reader, reader_at_once, region,
};
use super::rma::{Side, memory};
use crate::errno::FiErrno;
use crate::flags::Flags;
use crate::mr::{Access, Buffer, Desc, Mode, Region, RegionConfig, stops};
use crate::rdm::LocalIov;

/// Length of a message in bytes.
const LEN: usize = (3 << 20) + 17;

/// The region of a receive is closed while a thread follows its descriptor: the close waits until
/// the READ is posted or executed, and the message arrives.
#[test]
fn the_region_of_a_receive_is_closed_while_it_is_read() {
    each_reader(|transport, reader| {
        let domain = domain_with(Mode::NATIVE | Mode::LOCAL);
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let bytes = bytes_of(1);
        let mut target = vec![0u8; LEN];
        let source = region(&domain, &bytes, Access::SEND);
        let message = |target: &mut [u8], sink: &Arc<Region>| {
            b.recv_at((1, 0), target, Desc(sink.desc()), 2);
            a.send_from(to_b, Some(1), &bytes, Desc(source.desc()), 1);
            wait([&a, &b], [1, 1]);
        };
        // the first message connects, the second one is read where it is found
        for _ in 0..3 {
            let sink = region(&domain, &target, Access::RECV);
            let closed = stops::close_at_next(&sink);
            message(&mut target, &sink);
            assert_eq!(*closed.lock(), Some(Err(FiErrno::EBUSY)));
            assert!(target == bytes);
            assert_eq!(pull_failures(&b).0, 0, "a READ has failed");
            sink.close().unwrap();
            target.fill(0);
            // the peer's messages are read again
            let sink = region(&domain, &target, Access::RECV);
            message(&mut target, &sink);
            assert!(target == bytes);
            target.fill(0);
        }
    });
}

/// The same for messages that are announced together, which are read by one call of the device.
#[test]
fn the_regions_of_receives_are_closed_while_they_are_read_together() {
    const COUNT: usize = 8;
    const SHORT: usize = 16 << 10;
    let domain = domain_with(Mode::NATIVE | Mode::LOCAL);
    let ends = [(); 2].map(|()| reader_at_once(&domain, Transport::Rc));
    let [a, b] = &ends;
    let to_b = a.knows(b);
    let bytes = bytes_of(1);
    let source = region(&domain, &bytes, Access::SEND);
    for round in 0..50 {
        let mut targets = vec![vec![0u8; SHORT]; COUNT];
        let sinks: Vec<_> = targets
            .iter()
            .map(|target| region(&domain, target, Access::RECV))
            .collect();
        let closed: Vec<_> = sinks.iter().map(stops::close_at_next).collect();
        for (at, (target, sink)) in targets.iter_mut().zip(&sinks).enumerate() {
            b.recv_at((at as u64, 0), target, Desc(sink.desc()), at);
        }
        for at in 0..COUNT {
            let (from, desc) = (&bytes[at..at + SHORT], Desc(source.desc()));
            a.send_from(to_b, Some(at as u64), from, desc, at);
        }
        wait([a, b], [COUNT, COUNT]);
        for (at, (target, closed)) in targets.iter().zip(&closed).enumerate() {
            assert!(target[..] == bytes[at..at + SHORT], "round {round}");
            assert_eq!(*closed.lock(), Some(Err(FiErrno::EBUSY)), "round {round}");
        }
        sinks.iter().for_each(|sink| sink.close().unwrap());
    }
    assert_eq!(pull_failures(b).0, 0, "a READ has failed");
}

/// A READ that waits to be posted again follows the descriptor of its receive again: it is not
/// posted with the lkey of a region that was closed meanwhile. The message arrives in parts, and
/// the link stays.
#[test]
fn a_read_is_not_posted_again_to_a_closed_region() {
    Transport::each(|transport| {
        let domain = domain_with(Mode::NATIVE | Mode::LOCAL);
        let (a, b) = (reader(&domain, transport), reader(&domain, transport));
        let to_b = a.knows(&b);
        let bytes = bytes_of(1);
        let mut target = vec![0u8; LEN];
        let source = region(&domain, &bytes, Access::SEND);
        let sink = region(&domain, &target, Access::RECV);
        b.ep.shared()
            .apply_event(|_, io| io.tests.refuse_reads = Some(FiErrno::EAGAIN));
        b.recv_at((1, 0), &mut target, Desc(sink.desc()), 2);
        a.send_from(to_b, Some(1), &bytes, Desc(source.desc()), 1);
        let limit = Instant::now() + Duration::from_secs(20);
        let mut link = None;
        while link.is_none() {
            assert!(Instant::now() < limit, "no READ waits");
            assert_eq!((a.poll(), b.poll()), (None, None));
            b.ep.shared().apply_event(|core, io| {
                let peer = core.peer_keys().next();
                let peer = peer.filter(|peer| io.reads_again(*peer));
                link = peer.and_then(|peer| core.open_link(peer));
            });
        }
        sink.close().unwrap();
        b.ep.shared()
            .apply_event(|_, io| io.tests.refuse_reads = None);
        wait([&a, &b], [1, 1]);
        assert!(target == bytes);
        assert_eq!(pull_failures(&b), (0, 1));
        b.ep.shared().apply_event(|core, _| {
            let peer = core.peer_keys().next().unwrap();
            assert_eq!(core.open_link(peer), link, "the link has broken");
        });
    });
}

/// The region of the buffer of an operation that waits for a link is closed while a thread follows
/// its descriptor: the close waits for the post, and the operation is executed.
#[test]
fn a_local_region_is_closed_while_an_operation_that_waited_is_posted() {
    const SHORT: usize = 2048;
    Transport::each(|transport| {
        let domain = domain_with(Mode::NATIVE | Mode::LOCAL);
        let (a, b) = (
            Side::open(&domain, transport),
            Side::open(&domain, transport),
        );
        let to_b = a.end.knows(&b.end);
        let source = memory(1, SHORT);
        let iov = source.iov();
        let buffer = Buffer {
            addr: iov.iov_base,
            len: SHORT,
        };
        let config = RegionConfig {
            buffers: &[buffer],
            access: Access::WRITE,
            ..RegionConfig::default()
        };
        // SAFETY: the memory is dropped behind the region.
        let region = unsafe { Region::register(domain.mr(), &config) }.unwrap();
        let closed = stops::close_at_next(&region);
        let desc = Desc(region.desc());
        let (local, range) = (LocalIov::single(&iov, &desc), b.range(0, SHORT));
        let (ep, flags) = (&a.end.ep, Some(Flags::COMPLETION));
        // there is no link yet
        // SAFETY: the memory is dropped behind the completion.
        unsafe { ep.write(to_b, local, &[range], None, 3, flags) }.unwrap();
        assert_eq!(wait_for(&a.end, 1)[0].context, 3);
        assert_eq!(*closed.lock(), Some(Err(FiErrno::EBUSY)));
        assert!(b.memory.is(0, &pattern(1, SHORT)));
        region.close().unwrap();
    });
}
