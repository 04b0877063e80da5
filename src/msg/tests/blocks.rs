//! Connection blocks: the peer of a block has access from the moment it has the block's address.

use std::sync::atomic::{AtomicU64, Ordering};

use super::keys::{TARGET, kind};
use super::*;

/// Keys of the application.
const CHOSEN: Mode = Mode::ALLOCATED.union(Mode::LOCAL);
const KEY: u64 = 7;

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
        let unprocessed = client.ep.core.control.lock();
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
