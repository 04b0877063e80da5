//! Shared receive contexts whose endpoints close, in one process.

#![allow(unsafe_code, reason = "passes buffers as C does")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::endpoints::{End, config, domain, queue, wait_for};
use crate::av::FiAddr;
use crate::domain::Domain;
use crate::flags::Flags;
use crate::mr::Desc;
use crate::queue::BindFlags;
use crate::rdm::{AddressVector, Endpoint, EndpointConfig, LocalIov, SharedRx, SharedRxConfig};

/// Endpoints of one context and one address vector.
fn members(domain: &Arc<Domain>, context: &Arc<SharedRx>) -> [End; 2] {
    let av = AddressVector::open(4).unwrap();
    [(); 2].map(|()| {
        let config = EndpointConfig {
            shared_rx: true,
            ..config()
        };
        let ep = Endpoint::new(domain, config).unwrap();
        let cq = queue(domain, 0);
        ep.bind_vector(&av).unwrap();
        ep.bind_shared_rx(context).unwrap();
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .unwrap();
        ep.enable().unwrap();
        End {
            ep,
            cq,
            av: Arc::clone(&av),
        }
    })
}

fn iov(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// The first message of a receive is arriving in parts when its endpoint closes. The receive gets
/// the next message that it matches, at the other endpoint; `early`: this one is stored already.
fn closes_during_a_message(early: bool) {
    let domain = domain();
    let config = SharedRxConfig {
        size: 16,
        op_flags: Flags::empty(),
        directed: false,
    };
    let context = SharedRx::open(&domain, config).unwrap();
    let [first, second] = members(&domain, &context);
    let (a, b) = (End::open(&domain), End::open(&domain));
    let (to_first, to_second) = (a.knows(&first), b.knows(&second));
    let mut target = vec![0; 30_000];
    let recv = |tag: u64, bytes: &mut [u8], number: usize| {
        let (list, any) = (iov(bytes), FiAddr(u64::MAX));
        let local = LocalIov::single(&list, &Desc::NULL);
        // SAFETY: the buffer lives until the completion.
        unsafe { context.recv(any, Some((tag, 0xf)), local, number, None) }.unwrap();
    };
    // connects both
    let mut byte = [[0; 1]; 2];
    recv(0x90, &mut byte[0], 1);
    recv(0x90, &mut byte[1], 2);
    a.send(to_first, Some(0x90), &[1], 0);
    b.send(to_second, Some(0x90), &[1], 0);
    for end in [&a, &b, &first, &second] {
        wait_for(end, 1);
    }
    recv(0x50, &mut target, 7);
    // two buffers have no source that could be read
    let (long, short) = (vec![3; 10_000], [4; 100]);
    let list = [iov(&long[..5_000]), iov(&long[5_000..])];
    let local = LocalIov::borrowed(&list, &[Desc::NULL; 2]);
    // SAFETY: the buffer lives until the end of the test.
    unsafe { a.ep.send(to_first, Some(0x55), local, None, 5, None) }.unwrap();
    let begin = Instant::now();
    while first.state(|state| state.io.rx.arrivals.len()) == 0 {
        assert_eq!(first.poll(), None);
        assert!(begin.elapsed() < Duration::from_secs(20), "no message");
    }
    if early {
        b.send(to_second, Some(0x5a), &short, 6);
        for _ in 0..100 {
            assert_eq!(second.poll(), None);
        }
    }
    drop(first);
    if !early {
        b.send(to_second, Some(0x5a), &short, 6);
    }
    let found = wait_for(&second, 1);
    assert_eq!(
        (found[0].context, found[0].len, found[0].tag),
        (7, 100, 0x5a)
    );
    assert_eq!(target[..100], short);
    // its place in the context is free again
    for number in 0..16 {
        recv(0x70, &mut [0; 0], number);
    }
}

#[test]
fn a_receive_survives_the_endpoint_of_its_message() {
    closes_during_a_message(false);
}

#[test]
fn a_receive_that_survives_its_endpoint_gets_a_stored_message() {
    closes_during_a_message(true);
}
