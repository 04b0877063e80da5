//! Regions of local buffers that are closed while operations on them are deferred, or while a
//! thread follows their descriptors. `docs/mr-modes.md`, "Descriptors of operations that wait".

use super::keys::{TARGET, in_form};
use super::*;
use crate::initiator::qp_link::{POLL_LIMIT, POLLS};
use crate::mr::stops;

/// Writes through a key that the client has to look up, behind an unknown key, until the write is
/// deferred: calls `meanwhile` with the buffer before any thread posts it, and returns the buffer.
fn deferred_write(client: &Side, meanwhile: impl Fn(&Buffer)) -> Buffer {
    for _ in 0..4000 {
        let mut source = Buffer::all(&client.domain, 4096);
        source.fill(7);
        POLLS.set(0);
        client.write(&source, 4096, 0, 77, 1).unwrap();
        client.write(&source, 4096, 0, 3, 2).unwrap();
        POLLS.set(POLL_LIMIT);
        // the helper thread posts nothing meanwhile
        let tx = client.ep.shared.tx.lock();
        let waits = tx.as_ref().unwrap().has_deferred();
        if waits {
            meanwhile(&source);
        }
        drop(tx);
        assert_eq!(client.refused(1), FiErrno::EKEYREJECTED);
        if waits {
            return source;
        }
        assert_eq!(client.completion().unwrap().context, 2);
    }
    panic!("the write is never deferred");
}

/// The region of the buffer of an operation that waits is closed while a thread follows its
/// descriptor: the close waits for the post, and the operation is executed.
#[test]
fn a_local_region_is_closed_while_a_deferred_operation_is_posted() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let target = Buffer::with_key(&server.domain, 4096, TARGET, 3);
    let closed = std::cell::RefCell::default();
    let source = deferred_write(&client, |source| {
        *closed.borrow_mut() = stops::close_at_next(&source.region);
    });
    assert_eq!(client.completion().unwrap().context, 2);
    assert_eq!(*closed.borrow().lock(), Some(Err(FiErrno::EBUSY)));
    assert!(target.memory == source.memory);
    source.region.close().unwrap();
}

/// An operation that waits for its key is refused if the region of its buffer is closed meanwhile,
/// also before the region is dropped, and the connection stays.
#[test]
fn an_operation_whose_local_region_is_closed_meanwhile() {
    let (client, server) = in_form(Mode::ALLOCATED | Mode::LOCAL);
    let target = Buffer::with_key(&server.domain, 4096, TARGET, 3);
    for _ in 0..20 {
        let source = deferred_write(&client, |source| source.region.close().unwrap());
        assert_eq!(client.refused(2), FiErrno::EINVAL);
        drop(source);
    }
    let mut source = Buffer::all(&client.domain, 4096);
    source.fill(3);
    client.write(&source, 4096, 0, 3, 3).unwrap();
    assert_eq!(client.completion().unwrap().context, 3);
    assert!(target.memory == source.memory);
}
