//! Operations under way when a connection ends: cancelled by `fi_shutdown(3)`.

use super::keys::{TARGET, in_form};
use super::transfer::no_completion;
use super::*;
use crate::conn::State;

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
        let slots = &client.ep.shared.slots;
        assert_eq!(slots.rx.outstanding() + slots.tx.outstanding(), 0);
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

/// A post waits for the reply that another thread sends, and then for the lock of the transmit
/// side, while the connection ends.
#[test]
fn nothing_is_posted_behind_an_end_that_a_post_has_waited_for() {
    let (client, _server) = in_form(Mode::empty());
    let buffer = Buffer::all(&client.domain, 64);
    let shared = &client.ep.shared;
    shared.conn.state.set(State::Accepting);
    let control = shared.control.lock();
    std::thread::scope(|scope| {
        let post = scope.spawn(|| client.send(&buffer, 8, 1));
        std::thread::sleep(Duration::from_millis(50));
        let posting = shared.tx.lock();
        shared.conn.state.set(State::Accepted);
        drop(control);
        std::thread::sleep(Duration::from_millis(50));
        shared.conn.state.set(State::Disconnected);
        drop(posting);
        assert_eq!(post.join().unwrap(), Err(FiErrno::ESHUTDOWN));
    });
    assert_eq!(shared.slots.tx.outstanding(), 0);
    shared.conn.state.set(State::Connected);
}
