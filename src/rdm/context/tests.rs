//! The numbering of peers in a shared receive context, and deliveries that fail.

use super::*;
use crate::mr::Desc;
use crate::rdm::core::Origin;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::receives::{Envelope, Payload, Receives};
use crate::rdm::tests::endpoints::domain;

/// Whether a thread of this process sleeps.
fn sleeps(thread: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    // behind the name, which is in parentheses
    let state = stat.rsplit(") ").next().unwrap();
    state.starts_with('S')
}

fn open() -> Arc<SharedRx> {
    let config = SharedRxConfig {
        size: 8,
        op_flags: Flags::empty(),
        directed: Directed::ALL,
    };
    SharedRx::open(&domain(), config).unwrap()
}

/// Threads look an address up, and wait before they add its peer, until `meanwhile` was called.
fn find<const N: usize>(
    context: &SharedRx,
    addr: FiAddr,
    meanwhile: impl FnOnce(),
) -> [Result<PeerIndex>; N] {
    let threads = [const { AtomicU32::new(0) }; N];
    let find = |thread: &AtomicU32| {
        // SAFETY: no arguments.
        thread.store(unsafe { libc::gettid() } as u32, Ordering::Relaxed);
        context.peer_of(addr)
    };
    std::thread::scope(|scope| {
        // the threads wait for it
        let store = context.store.lock();
        let calls = threads.each_ref().map(|it| scope.spawn(|| find(it)));
        for thread in &threads {
            while !matches!(thread.load(Ordering::Relaxed), id if id != 0 && sleeps(id)) {
                std::thread::yield_now();
            }
        }
        meanwhile();
        drop(store);
        calls.map(|call| call.join().unwrap())
    })
}

/// Two threads find no peer of an address, before one of them has added it.
#[test]
fn an_address_has_one_peer_for_all_threads() {
    let found: [_; 2] = find(&open(), FiAddr(3), || {});
    assert!(found[0].is_ok());
    assert_eq!(found[0], found[1]);
}

/// The close of the message's endpoint has removed it, and its key can name another one now.
#[test]
fn a_delivery_that_fails_removes_no_message() {
    let context = open();
    let mut end = Receives::of_context(context.membership(true));
    let envelope = Envelope {
        peer: PeerKey::from_number(3),
        tag: Some(1),
        data: None,
        len: 1,
    };
    let payload = Payload::Bytes(Origin::of_test(envelope.peer), vec![5]);
    assert!(end.store(envelope, payload).unwrap().is_none());
    let iov = libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    };
    let local = LocalIov::single(&iov, &Desc::NULL);
    let receive = receive_of(true, &local, 7, Flags::empty()).unwrap();
    let want = Want::tagged(1, 0, None);
    let found = context.store.lock().post(&want, receive, None);
    let found = found.unwrap().unwrap();
    // the endpoint has not joined
    assert!(!context.deliver(found.owner, found.key, found.target));
    assert!(end.take(found.key).is_some());
}

/// Later receives from the `fi_addr_t`, which another address has then, would have the peer.
#[test]
fn an_address_that_is_removed_gets_no_peer() {
    let (context, vector) = (open(), AddressVector::open(1).unwrap());
    vector.insert_all([Ok("127.0.0.1:9".parse().unwrap())], |_, addr| {
        assert_eq!(addr, Ok(FiAddr(0)));
    });
    context.attach(&vector);
    context.check_vector(&vector).unwrap();
    let found: [_; 1] = find(&context, FiAddr(0), || {
        vector.remove(FiAddr(0)).unwrap();
    });
    assert_eq!(found, [Err(FiErrno::EINVAL)]);
    assert!(context.peers.lock().is_empty());
}
