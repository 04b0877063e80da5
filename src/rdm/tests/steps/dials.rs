//! Dials that get no answer.

use super::{Failure, FiErrno, Number, Scene};

const S: u64 = 1_000_000_000;

/// A network that is out loses requests, and the connection manager repeats them after 4 to 5 s.
#[test]
fn a_dial_without_answer_is_repeated_in_a_recovery() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let (first, _) = it.acts.dials[0];
    it.core.requesting(first);
    // the first request to a peer is answered at any time before the connect timeout
    assert_eq!(it.core.deadline(), Some(10 * S));
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    it.core.set_now(20 * S);
    it.core.broken(own, &mut it.acts);
    it.send(it.peer, 2);
    it.core.ended(own, &mut it.acts);
    let (second, request) = it.acts.dials[1];
    // the limit begins with the request
    assert_eq!(it.core.deadline(), Some(30 * S));
    it.core.set_now(21 * S);
    it.core.requesting(second);
    assert_eq!(it.core.deadline(), Some(23 * S));
    it.core.set_now(23 * S);
    it.core.tick(&mut it.acts);
    assert_eq!(*it.acts.ends.last().expect("an end"), second);
    assert_eq!(it.acts.dials.len(), 2);
    it.core.ended(second, &mut it.acts);
    let (third, again) = it.acts.dials[2];
    assert_eq!(
        (again.shows, again.epoch),
        (request.shows, request.epoch.next())
    );
    it.core.requesting(third);
    // a late report of the ended dial changes nothing, and an answer ends the limit
    it.core.failed(second, Failure::Silent, &mut it.acts);
    let up = it.reply_with(1);
    assert_eq!((up, it.core.out_link(it.peer)), (third, Some(third)));
    it.core.requesting(third);
    it.core.set_now(29 * S);
    it.core.tick(&mut it.acts);
    assert_eq!(it.core.out_link(it.peer), Some(third));
}

/// The limit of a dial grows with the connect timeout, and three dials have one.
#[test]
fn repeated_dials_end_with_the_connect_timeout() {
    let mut it = Scene::with_timeout(60 * S);
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.broken(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    for dial in 0..4 {
        let (link, _) = *it.acts.dials.last().expect("a dial");
        assert_eq!(it.acts.dials.len(), 2 + dial);
        it.core.requesting(link);
        let limit = it.core.deadline().expect("a limit");
        // the last one has the rest of the time
        assert_eq!(limit, [12, 24, 36, 60][dial] * S);
        it.core.set_now(limit);
        it.core.tick(&mut it.acts);
        it.core.ended(link, &mut it.acts);
    }
    assert_eq!(it.acts.completed, [(1, Err(FiErrno::EHOSTUNREACH))]);
    assert_eq!((it.acts.dials.len(), it.core.deadline()), (5, None));
}
