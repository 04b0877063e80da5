//! Dials that get no answer.

use super::{
    BEAT, Failure, FiErrno, LinkKey, Number, RETRIES, Reason, Rejection, Scene, VERSION, id,
};

const S: u64 = 1_000_000_000;

/// When the operations of a silent peer fail, after its last sign of life.
const SILENT: u64 = 8_500_000_000;

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
    it.core.dial_failed(second, Failure::Silent, &mut it.acts);
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

/// A session with a link that is up at 20 s, on which nothing has arrived since.
fn silent() -> (Scene, LinkKey) {
    let mut it = Scene::new();
    it.core.set_now(20 * S);
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    it.settle(own);
    it.send(it.peer, 2);
    (it, own)
}

/// The operations fail at this time, and not before.
fn fails_at(mut it: Scene, time: u64) {
    // beats
    while let Some(beat) = it.core.deadline().filter(|at| *at < time) {
        it.core.set_now(beat);
        it.core.tick(&mut it.acts);
        assert_ne!(it.core.deadline(), Some(beat));
    }
    assert_eq!(it.core.deadline(), Some(time));
    it.core.set_now(time - 1);
    it.core.tick(&mut it.acts);
    assert!(it.acts.failed.is_empty());
    it.core.set_now(time);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.failed, [FiErrno::EHOSTUNREACH]);
}

/// What the device needs to report a dead peer counts as time of the dials.
#[test]
fn a_silent_peer_is_dialled_until_a_time_after_its_last_sign_of_life() {
    // the time of the device's retries is known
    let (mut it, own) = silent();
    it.core.set_now(23 * S);
    it.core.unacknowledged(own, &mut it.acts);
    it.core.set_now(24 * S);
    it.core.ended(own, &mut it.acts);
    assert_eq!(it.acts.dials.len(), 2);
    fails_at(it, 23 * S - RETRIES + SILENT);
    // another report of the break was earlier
    let (mut it, own) = silent();
    it.core.broken(own, &mut it.acts);
    it.core.unacknowledged(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    fails_at(it, 20 * S - RETRIES + SILENT);
    // other breaks are no silence
    let (mut it, own) = silent();
    it.core.broken(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    fails_at(it, 30 * S);
}

/// A silent peer whose dial has to wait for a place until this time, in ns.
fn waiting_until(time: u64) -> Scene {
    let (mut it, own) = silent();
    it.acts.full = true;
    it.core.set_now(23 * S);
    it.core.unacknowledged(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    while let Some(next) = it.core.deadline().filter(|at| *at <= time) {
        it.core.set_now(next);
        it.core.tick(&mut it.acts);
    }
    it.core.set_now(time);
    assert_eq!((it.acts.dials.len(), it.acts.failed.len()), (1, 0));
    it
}

/// While the dial of a silent peer waits for a place, nothing can show that the peer lives.
#[test]
fn a_silent_peer_that_waits_for_a_place_has_the_time_of_an_answer() {
    // 0.6 s before the operations would fail if the dial had begun with the break
    let mut it = waiting_until(29 * S);
    it.acts.full = false;
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.dials.len(), 2);
    fails_at(it, 31 * S);
    // not later than those of other peers
    let mut it = waiting_until(32 * S);
    it.acts.full = false;
    it.core.tick(&mut it.acts);
    fails_at(it, 33 * S);
    fails_at(waiting_until(30 * S), 33 * S);
}

/// Nothing has completed on the link in this number of beats before it broke.
fn broken_after(beats: u64) -> (Scene, u64) {
    let (mut it, own) = silent();
    it.core.hold(it.peer, &mut it.acts);
    it.acts.stands = true;
    for _ in 0..=beats {
        let time = it.core.deadline().expect("a beat");
        it.core.set_now(time);
        it.core.tick(&mut it.acts);
    }
    it.core.unacknowledged(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    // in the first beat the link was heard
    (it, 20 * S + (beats + 1) * BEAT)
}

#[test]
fn silence_is_counted_in_beats() {
    let (it, now) = broken_after(4);
    fails_at(it, now - 5 * BEAT + SILENT);
    // the dial has the time of one answer
    let (it, now) = broken_after(12);
    fails_at(it, now + 2 * S);
}

/// A silence has ended without a packet, because the device has completed what was awaited. What is
/// awaited later does not continue it.
#[test]
fn an_earlier_silence_is_not_counted() {
    let (mut it, own) = silent();
    it.settle(own);
    it.core.hold(it.peer, &mut it.acts);
    it.acts.stands = true;
    let mut now = 0;
    for beat in 0..=5 {
        if beat == 5 {
            it.core.release(it.peer, &mut it.acts);
        }
        now = it.core.deadline().expect("a beat");
        it.core.set_now(now);
        it.core.tick(&mut it.acts);
    }
    assert_eq!(it.core.deadline(), None);
    it.core.hold(it.peer, &mut it.acts);
    it.core.unacknowledged(own, &mut it.acts);
    it.core.ended(own, &mut it.acts);
    fails_at(it, now - RETRIES + SILENT);
}

#[test]
fn a_sign_of_life_gives_a_dial_the_whole_connect_timeout() {
    let (mut it, _) = broken_after(4);
    let since = 20 * S + 5 * BEAT;
    let (link, request) = *it.acts.dials.last().expect("a dial");
    let busy = Rejection {
        version: VERSION,
        epoch: Some(request.epoch),
        id: id(2),
        newest: None,
        reason: Reason::Busy,
    };
    it.core.rejected(link, &busy.encode(), &mut it.acts);
    // the next dial is later
    let next = it.core.deadline().expect("a dial");
    it.core.set_now(next);
    it.core.tick(&mut it.acts);
    fails_at(it, since + 10 * S);
    // a request, whose link is lost
    let (mut it, _) = broken_after(4);
    let token = it.acts.dials.last().expect("a dial").1.gives;
    it.request(1, Some(token));
    assert_eq!(it.acts.accepts.len(), 1);
    it.core.ended(it.acts.accepts[0].0, &mut it.acts);
    fails_at(it, since + 10 * S);
}
