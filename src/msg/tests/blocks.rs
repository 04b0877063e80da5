//! Connection blocks: the peer of a block has access from the moment it has the block's address,
//! and to this block alone.

use std::sync::atomic::{AtomicU64, Ordering};

use super::keys::{TARGET, connect, kind};
use super::*;

/// Keys of the application.
const CHOSEN: Mode = Mode::ALLOCATED.union(Mode::LOCAL);
/// Keys of the device.
const NATIVE: Mode = CHOSEN.union(Mode::PROV_KEY).union(Mode::VIRT_ADDR);
const KEY: u64 = 7;

/// Address and rkey of an endpoint's connection block.
fn block(side: &Side) -> (u64, u64) {
    let control = side.ep.shared.control.lock();
    let block = control.block.as_ref().unwrap();
    (block.addr().get(), block.rkey().get().into())
}

/// Connections of two endpoints of one protection domain. The peer of the second writes the first 8
/// bytes of the first one's block, or across the end of its own block.
#[test]
fn a_peer_writes_its_own_block_alone() {
    let device = device();
    let domain = || Domain::open(&device, kind(NATIVE)).unwrap();
    let owner = domain();
    let (bystander, its_peer) = connect(Arc::clone(&owner), domain());
    for across in [false, true] {
        let (side, hostile) = connect(Arc::clone(&owner), domain());
        let source = Buffer::all(&hostile.domain, 8);
        let ((own, rkey), (other, _)) = (block(&side), block(&bystander));
        // the word *revision*
        hostile.write(&source, 8, own, rkey, 1).unwrap();
        assert_eq!(hostile.completion().unwrap().context, 1);
        let to = if across { own + 64 - 4 } else { other };
        hostile.write(&source, 8, to, rkey, 2).unwrap();
        assert_eq!(hostile.refused(2), FiErrno::EKEYREJECTED);
        assert_eq!(next_event(&hostile.eq), Ok(Told::Shutdown(SERVER)));
        assert_eq!(next_event(&side.eq), Ok(Told::Shutdown(CLIENT)));
    }
    let buffer = Buffer::all(&its_peer.domain, 8);
    let land = Buffer::all(&bystander.domain, 8);
    bystander.recv(&land, 8, 3).unwrap();
    its_peer.send(&buffer, 8, 4).unwrap();
    assert_eq!(bystander.completion().unwrap().context, 3);
}

/// A block of a closed endpoint is used again, by another rkey.
#[test]
fn a_block_that_is_used_again_has_another_key() {
    let device = device();
    let domain = || Domain::open(&device, kind(NATIVE)).unwrap();
    let owner = domain();
    let (side, hostile) = connect(Arc::clone(&owner), domain());
    let (first, _peer) = connect(Arc::clone(&owner), domain());
    let (at, rkey) = block(&first);
    drop(first);
    let (second, _peer) = connect(Arc::clone(&owner), domain());
    assert_eq!(block(&second).0, at, "used again");
    let source = Buffer::all(&hostile.domain, 8);
    hostile.write(&source, 8, at, rkey, 1).unwrap();
    assert_eq!(hostile.refused(1), FiErrno::EKEYREJECTED);
    drop(side);
}

/// The accepting side uses a key of the connecting side, whose thread has received the reply and
/// not processed it yet. Meanwhile another thread of the connecting side closes the region: the
/// accepting side is notified, and its connection stays.
#[test]
fn a_region_that_is_closed_while_the_reply_is_processed_is_revoked() {
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    let mut client_config = config(CLIENT);
    client_config.src = Some(address(&device));
    let domain = Domain::open(&device, kind(CHOSEN)).unwrap();
    let client = Side::new_in(domain, client_config, false);
    let target = Buffer::with_key(&client.domain, 64, TARGET, KEY);
    client.ep.connect(Some(addr), b"hello").unwrap();
    let server = accept(&device, &client, &eq);
    let source = Buffer::all(&server.domain, 64);
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // the reader moves the queue pair, and then waits for this lock
        let unprocessed = client.ep.shared.control.lock();
        let reader = scope.spawn(|| next_event(&client.eq));
        let writer = scope.spawn(|| {
            loop {
                server.write(&source, 64, 0, KEY, 1).unwrap();
                match server.completion() {
                    Ok(_) => written.fetch_add(1, Ordering::Relaxed),
                    Err(error) => return error.err,
                };
            }
        });
        let start = Instant::now();
        while written.load(Ordering::Relaxed) == 0 {
            assert!(start.elapsed() < LIMIT, "nothing is written");
            std::thread::yield_now();
        }
        let closing = scope.spawn(|| target.region.close());
        std::thread::sleep(Duration::from_millis(30));
        drop(unprocessed);
        closing.join().unwrap().unwrap();
        assert_eq!(writer.join().unwrap(), FiErrno::EKEYREJECTED);
        assert!(matches!(reader.join().unwrap(), Ok(Told::Connected(..))));
    });
    assert!(matches!(next_event(&server.eq), Ok(Told::Connected(..))));
    let land = Buffer::all(&client.domain, 8);
    client.recv(&land, 8, 2).unwrap();
    server.send(&source, 8, 3).unwrap();
    assert_eq!(client.completion().unwrap().context, 2);
}
