//! What is kept for the requests of a connection that has ended, and which ends are told.

use super::super::keys::kind;
use super::ends::Pair;
use super::*;

/// Two connections on one circuit of the client, with application keys.
fn two_pairs(device: &Arc<Device>) -> ([Host; 2], [Pair; 2]) {
    let form = Mode::ALLOCATED | Mode::LOCAL;
    let [client, server] = [0, 1].map(|_| Host::with(device, kind(form)));
    let (_pep, addr) = xrc_listener(device, &server);
    let pairs = [0, 1].map(|n| connect((&client, &server), addr, n, |_| {}));
    assert!(Arc::ptr_eq(&circuit(&pairs[0].0), &circuit(&pairs[1].0)));
    ([client, server], pairs)
}

/// Posts a message, which waits for a receive of the peer.
fn send(ep: &Endpoint, source: &Buffer, context: usize) {
    let (iov, desc) = source.part(0, LEN);
    // SAFETY: tests keep their buffers until completion.
    unsafe { ep.send(LocalIov::single(&iov, &desc), context) }.unwrap();
}

/// A circuit breaks by a request of an endpoint whose connection has ended, or which is being
/// closed: the others that use the circuit are told.
#[test]
fn a_circuit_that_an_ended_endpoint_breaks_is_reported() {
    let device = device();
    for closes in [false, true] {
        let ([client, server], pairs) = two_pairs(&device);
        let source = Buffer::all(&client.domain, LEN);
        let short = Buffer::all(&server.domain, LEN);
        let refuse = || {
            let (iov, desc) = short.part(0, LEN / 8);
            // SAFETY: as in `send`.
            unsafe { server.srx.recv(LocalIov::single(&iov, &desc), 7) }.unwrap();
        };
        send(&pairs[0].0, &source, 3);
        if closes {
            std::thread::scope(|scope| {
                scope.spawn(|| pairs[0].0.close());
                std::thread::sleep(Duration::from_millis(50));
                refuse();
            });
        } else {
            pairs[0].0.shutdown().unwrap();
            assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(Token(10))));
            refuse();
        }
        let failed = client.cq.sread(1, 1, Some(LIMIT), &mut |_: &Completion| {});
        assert_eq!(failed, Err(FiErrno::EAVAIL));
        assert_eq!(client.cq.read_error().unwrap().completion.context, 3);
        let told = next_event(&client.eq);
        assert_eq!(told, Ok(Told::Shutdown(Token(11))), "{closes}");
    }
}
