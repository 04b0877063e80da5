//! Operations under way when a connection or an endpoint ends: cancelled by `fi_shutdown(3)`,
//! discarded by `fi_close(3)`.

use super::keys::{TARGET, in_form};
use super::transfer::no_completion;
use super::*;
use crate::queue::Counter;

#[test]
fn a_shutdown_returns_after_the_entries_are_written() {
    for mode in [Mode::VIRT_ADDR | Mode::PROV_KEY, Mode::empty()] {
        let (client, server) = in_form(mode);
        let buffer = Buffer::all(&client.domain, 64);
        let target = Buffer::new(&server.domain, 64, TARGET);
        client.recv(&buffer, 8, 1).unwrap();
        // the peer has no receive
        client.send(&buffer, 8, 2).unwrap();
        // waits for the look-up of its key, if it is not an rkey
        let (addr, key) = (target.addr(), target.region.key());
        client.write(&buffer, 8, addr, key, 3).unwrap();
        client.ep.shutdown().unwrap();
        let rings = &client.ep.core.rings;
        assert_eq!(rings.rx.outstanding() + rings.tx.outstanding(), 0);
        let mut contexts: Vec<_> = (0..3)
            .map(|_| match client.completion() {
                Ok(done) => done.context,
                Err(error) => {
                    assert_eq!(error.err, FiErrno::ECANCELED);
                    error.completion.context
                }
            })
            .collect();
        contexts.sort_unstable();
        assert_eq!(contexts, [1, 2, 3], "{mode:?}");
        no_completion(&client);
        assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    }
}

#[test]
fn a_close_discards_what_is_under_way() {
    for mode in [Mode::VIRT_ADDR | Mode::PROV_KEY, Mode::empty()] {
        let device = device();
        let open = || Domain::open(&device, super::keys::kind(mode)).unwrap();
        let mut counter = None;
        let bind = |server: &Side| {
            let counted = Counter::open(server.domain.queues(), WaitKind::None).unwrap();
            let kinds = Flags::SEND | Flags::RECV | Flags::WRITE;
            server.ep.bind_counter(&counted, kinds).unwrap();
            counter = Some(counted);
        };
        let (client, server) = super::keys::connect_with(open(), open(), bind);
        let counter = counter.unwrap();
        let buffer = Buffer::all(&server.domain, 64);
        let target = Buffer::new(&client.domain, 64, TARGET);
        client.recv(&target, 8, 1).unwrap();
        // completes; the application has not read the entry
        server.send(&buffer, 8, 2).unwrap();
        client.completion().unwrap();
        server.recv(&buffer, 8, 3).unwrap();
        for context in 4..8 {
            server.send(&buffer, 8, context).unwrap();
        }
        // waits for the look-up of its key, if it is not an rkey
        let (addr, key) = (target.addr(), target.region.key());
        server.write(&buffer, 8, addr, key, 8).unwrap();
        server.ep.close();
        assert_eq!(server.completion().unwrap().context, 2, "{mode:?}");
        no_completion(&server);
        assert_eq!(counter.read_errors(), 0);
        // the peer has closed nothing
        assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    }
}

#[test]
fn an_endpoint_that_was_never_connected_discards_its_receives() {
    let device = device();
    for early in [false, true] {
        let mut attributes = config(CLIENT);
        // the queue pair is made at once, or with the connection
        attributes.src = (!early).then(|| address(&device));
        let side = Side::new(&device, attributes, false);
        side.ep.enable().unwrap();
        let buffer = Buffer::all(&side.domain, 64);
        side.recv(&buffer, 8, 1).unwrap();
        side.ep.close();
        no_completion(&side);
    }
}
