//! Sessions step by step: how one ends, and which operations and tokens of it are valid afterwards.

use super::*;

impl Scene {
    /// A session whose link has ended, and in which nothing is under way.
    fn with_session() -> Self {
        let mut it = Self::new();
        it.send(it.peer, 1);
        let own = it.reply();
        it.core.sent(own, Number::new(0), &mut it.acts);
        it.settle(own);
        it.end(own);
        it
    }

    /// The next dials fail until the operations do.
    fn time_out(&mut self) {
        for time in 1..200 {
            self.core.set_now(time * 100_000_000);
            self.core.tick(&mut self.acts);
            let (link, _) = *self.acts.dials.last().expect("a dial");
            self.core.dial_failed(link, Failure::Silent, &mut self.acts);
        }
    }
}

#[test]
fn a_session_ends_with_the_operations() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    let (_, request) = it.acts.dials[1];
    assert!(request.shows.is_some() && !request.fresh);
    it.time_out();
    assert_eq!(it.acts.failed, [FiErrno::EHOSTUNREACH]);
    assert_eq!((it.core.session(it.peer), it.core.deadline()), (None, None));
    // the next request informs the peer, with a new token
    it.send(it.peer, 3);
    let (link, next) = *it.acts.dials.last().expect("a dial");
    assert_eq!((next.shows, next.fresh), (request.shows, true));
    assert_ne!(next.gives, request.gives);
    // the former token is not this side's any more
    it.request(1, Some(request.gives));
    assert_eq!(it.acts.rejects[0].reason, Reason::Other);
    // a reply to it begins another session, from 0
    it.reply();
    assert_eq!(it.acts.ups.last().expect("a link").0, link);
    assert_eq!(it.core.session(it.peer), Some(id(2)));
}

/// Both sides have ended the session. The peer begins the next one, and its link breaks before
/// HELLO: the dial that follows does not end what the peer has begun.
#[test]
fn a_session_that_the_peer_has_begun_is_not_ended_by_the_next_dial() {
    for restarted in [false, true] {
        let mut it = Scene::with_session();
        it.send(it.peer, 2);
        it.time_out();
        it.send(it.peer, 3);
        let (link, request) = *it.acts.dials.last().expect("a dial");
        assert!(request.fresh);
        match restarted {
            true => it.request_of(3, 1),
            false => it.request(1, None),
        }
        // it would end the session that begins
        assert_eq!(it.acts.ends.last(), Some(&link));
        it.end(link);
        let (accepted, _) = *it.acts.accepts.last().expect("an accepted link");
        it.end(accepted);
        let (_, request) = *it.acts.dials.last().expect("a dial");
        assert_eq!((request.shows, request.fresh), (Secret::new(7), false));
    }
}

/// A dial was refused before a process started at the address, and this side learns it when it has
/// a session with that process, which has no link at the moment.
#[test]
fn a_late_refusal_ends_no_session() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    let (link, request) = it.acts.dials[1];
    it.request(1, Some(request.gives));
    let (accepted, _) = it.acts.accepts[0];
    it.end(accepted);
    it.core.dial_failed(link, Failure::Refused, &mut it.acts);
    assert!(it.acts.failed.is_empty());
    // the next one decides
    it.core.set_now(1_000_000_000);
    it.core.tick(&mut it.acts);
    let (next, _) = *it.acts.dials.last().expect("a dial");
    assert_ne!(next, link);
    it.core.dial_failed(next, Failure::Refused, &mut it.acts);
    assert_eq!(it.acts.failed, [FiErrno::ECONNABORTED]);
}

/// A request of a session is not the first one of the next session: its dialler has numbers.
#[test]
fn a_session_that_ends_takes_the_request_that_waits_along() {
    let mut it = Scene::with_session();
    let (token, _) = it.held_request();
    it.core.fail(it.peer, FiErrno::EHOSTUNREACH, &mut it.acts);
    assert_eq!(it.acts.rejects.len(), 1);
    assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
    for link in it.acts.ends.clone() {
        it.end(link);
    }
    assert_eq!(it.acts.accepts.len(), 1);
    // the dialler learns the end by its next request
    it.request(3, Some(token));
    assert_eq!(it.acts.rejects[1].reason, Reason::Other);
}

#[test]
fn a_peer_that_has_ended_the_session_ends_it_here() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    // an operation that waits for an answer, and one without credit
    it.core.hold(it.peer, &mut it.acts);
    for op in 2..40 {
        it.send(it.peer, op);
    }
    let posts = it.acts.posts;
    let (_, request) = it.acts.dials[0];
    // not by a program that does not have the token
    it.fresh_request(1, Secret::new(99).expect("not 0"));
    assert_eq!(it.acts.rejects[0].reason, Reason::Known);
    it.fresh_request(1, request.gives);
    assert_eq!(it.acts.rejects[1].reason, Reason::Busy);
    assert_eq!((&it.acts.ends[..], it.acts.failed.len()), (&[own][..], 1));
    // posted operations have an unknown outcome; the others wait for the next session
    assert_eq!(it.acts.completed.len(), posts);
    it.end(own);
    it.fresh_request(2, request.gives);
    let (accepted, reply) = it.acts.accepts[0];
    assert_eq!(reply.terms.expected, Number::new(0));
    assert_ne!(reply.gives, request.gives);
    it.hello(2, 0);
    assert_eq!((it.acts.posts, it.acts.ups[1].0), (2 * posts, accepted));
}

#[test]
fn operations_for_an_endpoint_do_not_reach_another_one() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    // the same endpoint rejects the token: its session has ended, and the operation waits
    let (link, request) = it.acts.dials[1];
    let other = Rejection {
        version: VERSION,
        epoch: Some(request.epoch),
        id: id(2),
        newest: None,
        reason: Reason::Other,
    };
    it.core.rejected(link, &other.encode(), &mut it.acts);
    assert_eq!(it.acts.completed.len(), 1);
    let (link, request) = it.acts.dials[2];
    assert_eq!((request.shows, request.fresh), (None, false));
    // it restarts before the next dial arrives
    let reply = Reply {
        epoch: request.epoch,
        id: id(3),
        auth: 0,
        gives: Secret::new(8).expect("not 0"),
        ended: None,
        terms: it.terms(0),
    };
    it.core.replied(link, &reply.encode(), &mut it.acts);
    let lost = (2, Err(FiErrno::ECONNABORTED));
    assert_eq!((it.acts.completed[1], it.acts.posts), (lost, 1));
}

/// As above, for operations that hold the peer and have no packets: RMA.
#[test]
fn operations_without_packets_wait_for_the_endpoint() {
    for replies in [2, 3] {
        let mut it = Scene::with_session();
        it.core.hold(it.peer, &mut it.acts);
        it.acts.keeps = 1;
        let (link, request) = it.acts.dials[1];
        let other = Rejection {
            version: VERSION,
            epoch: Some(request.epoch),
            id: id(2),
            newest: None,
            reason: Reason::Other,
        };
        it.core.rejected(link, &other.encode(), &mut it.acts);
        assert_eq!(it.acts.failed.len(), 1);
        // the operation still needs a link
        let (link, request) = it.acts.dials[2];
        assert_eq!((request.shows, request.fresh), (None, false));
        let reply = Reply {
            epoch: request.epoch,
            id: id(replies),
            auth: 0,
            gives: Secret::new(8).expect("not 0"),
            ended: None,
            terms: it.terms(0),
        };
        it.core.replied(link, &reply.encode(), &mut it.acts);
        assert_eq!(it.acts.failed.len(), if replies == 2 { 1 } else { 2 });
        if replies == 2 {
            it.core.release(it.peer, &mut it.acts);
        }
    }
}

/// A process starts at the address of one that has died, and is heard of before an operation to the
/// address is posted: this operation is meant for it, an earlier one is not.
#[test]
fn an_operation_follows_an_address_that_is_in_doubt() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    let dials = it.acts.dials.len();
    // another endpoint states the address
    let request = Request {
        listener: place(2),
        id: id(3),
        auth: 0,
        epoch: epoch(1),
        ended: None,
        gives: Secret::new(8).expect("not 0"),
        shows: None,
        fresh: false,
    };
    it.core.requested((), &request.encode(), &mut it.acts);
    it.send(it.peer, 3);
    assert_eq!(it.acts.dials.len(), dials, "a dial is under way");
    it.other();
    assert_eq!(it.acts.completed[1..], [(2, Err(FiErrno::ECONNABORTED))]);
    // the kept operation dials without a token
    let (_, request) = *it.acts.dials.last().expect("a dial");
    assert_eq!((it.acts.dials.len(), request.shows), (dials + 1, None));
    // an endpoint that replies ends the doubt, and that it was in doubt once changes nothing later
    let link = it.reply();
    it.core.sent(link, Number::new(0), &mut it.acts);
    it.settle(link);
    it.end(link);
    it.send(it.peer, 4);
    it.acts.completed.clear();
    it.other();
    assert_eq!(it.acts.completed, [(4, Err(FiErrno::ECONNABORTED))]);
}

#[test]
fn a_damaged_session_does_not_last() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    // the peer has processed a packet that this side has not sent
    let (link, request) = it.acts.dials[1];
    let reply = Reply {
        epoch: request.epoch,
        id: id(2),
        auth: 0,
        gives: Secret::new(7).expect("not 0"),
        ended: None,
        terms: it.terms(5),
    };
    it.core.replied(link, &reply.encode(), &mut it.acts);
    assert_eq!(it.acts.failed, [FiErrno::ECONNABORTED]);
    it.end(link);
    // the message that was not posted is not affected
    let (_, next) = it.acts.dials[2];
    assert_eq!((next.shows, next.fresh), (request.shows, true));
    it.send(it.peer, 3);
    it.reply();
    assert_eq!((it.acts.ups.len(), it.acts.posts), (2, 3));
    assert_eq!(it.acts.completed, [(1, Ok(()))]);
}

/// A peer whose terms are wrong each time gets no further dials without end.
#[test]
fn sessions_that_are_damaged_again_and_again_fail_what_waits() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    for strike in 0..=16 {
        assert_eq!(it.acts.completed, [(1, Ok(()))], "after {strike}");
        let link = it.reply_with(5);
        it.end(link);
    }
    let failed = (2, Err(FiErrno::ECONNABORTED));
    assert_eq!(it.acts.completed, [(1, Ok(())), failed]);
    assert_eq!(it.core.deadline(), None);
}

/// A message of the peer, the first one.
fn first_message(it: &mut Scene, link: LinkKey) {
    let payload = Payload { offset: 32, len: 8 };
    let message = Message::default();
    it.packet(link, 0, 1, Body::Eager { message, payload });
}

/// The peer has freed the session, and has accepted a request to another address, which has shown
/// no token. The token of that request is not one of the session that this side still has.
#[test]
fn a_session_that_the_peer_has_begun_anew_is_not_the_former_one() {
    for linked in [false, true] {
        let mut it = Scene::new();
        it.send(it.peer, 1);
        let own = it.reply();
        it.core.sent(own, Number::new(0), &mut it.acts);
        first_message(&mut it, own);
        it.settle(own);
        if !linked {
            it.end(own);
        }
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 2);
        let (_, request) = *it.acts.dials.last().expect("a dial");
        assert_eq!(request.shows, None);
        it.dialled_with(id(2), 1, (8, Some(request.gives)), false);
        if linked {
            assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
            it.end(own);
            it.dialled_with(id(2), 2, (8, Some(request.gives)), false);
        }
        let (_, reply) = *it.acts.accepts.last().expect("an accepted request");
        assert_eq!(reply.terms.expected, Number::new(0), "{linked}");
        // it is that of the other address if the session had to end before
        assert_eq!(reply.terms.index.get() == other.number(), linked);
        if linked {
            it.peer = other;
        }
        it.hello(1 + u32::from(linked), 0);
        assert_eq!(it.core.session(it.peer), Some(id(2)));
        // the message to the other address was not posted
        assert_eq!(it.acts.completed, [(1, Ok(()))]);
    }
}

/// The peer dials two addresses of this endpoint, and the session begins by the first of these
/// requests. The token of the other one is not that of the session.
#[test]
fn a_session_has_the_token_of_its_first_link() {
    let mut it = Scene::new();
    it.request(1, None);
    let (first, reply) = it.acts.accepts[0];
    it.dialled_with(id(2), 2, (8, None), false);
    assert_eq!(it.acts.ends, [first]);
    it.hello(1, 0);
    first_message(&mut it, first);
    it.core.ended(first, &mut it.acts);
    let (second, _) = it.acts.accepts[1];
    it.end(second);
    it.request(3, Some(reply.gives));
    let (_, reply) = *it.acts.accepts.last().expect("an accepted request");
    assert_eq!(
        (it.acts.rejects.len(), reply.terms.expected),
        (0, Number::new(1))
    );
}

#[test]
fn packets_that_are_refused_again_and_again_end_the_session() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let mut link = it.reply();
    it.core.sent(link, Number::new(0), &mut it.acts);
    for strike in 0..=16 {
        assert!(it.acts.failed.is_empty(), "after {strike}");
        it.core.hold(it.peer, &mut it.acts);
        it.core.content_violated(link, &mut it.acts);
        it.core.ended(link, &mut it.acts);
        if strike < 16 {
            link = it.reply_with(1);
            it.core.release(it.peer, &mut it.acts);
        }
    }
    assert_eq!(it.acts.failed, [FiErrno::ECONNABORTED]);
    it.send(it.peer, 2);
    assert!(it.acts.dials.last().expect("a dial").1.fresh);
}

/// Those that were in the shared receive queue behind a packet that is refused have later numbers
/// than the one that is expected too.
#[test]
fn the_packets_behind_one_that_is_refused_do_not_count() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let link = it.reply();
    let payload = Payload { offset: 32, len: 8 };
    for number in 1..=40 {
        let message = Message::default();
        it.packet(link, number, 1, Body::Eager { message, payload });
    }
    assert_eq!(it.acts.ends, [link]);
    assert!(it.acts.failed.is_empty());
}

#[test]
fn a_peer_does_not_move_the_epoch() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let (link, request) = it.acts.dials[0];
    let stale = Rejection {
        version: VERSION,
        epoch: Some(request.epoch),
        id: id(2),
        newest: Some(epoch(1 << 30)),
        reason: Reason::Stale,
    };
    it.core.rejected(link, &stale.encode(), &mut it.acts);
    assert_eq!(it.acts.dials.len(), 1, "without pause");
    it.core.set_now(1_000_000);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.dials[1].1.epoch, epoch(2));
    // OTHER without a token is a failed dial
    it.other();
    assert_eq!(it.acts.dials.len(), 2, "without pause");
    it.time_out();
    assert_eq!(it.acts.completed, [(1, Err(FiErrno::EHOSTUNREACH))]);
}

#[test]
fn an_answer_does_not_reach_another_session() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    let from = Origin {
        peer: it.peer,
        session: 0,
    };
    assert_eq!(it.core.answer(from, 2, &mut it.acts), Ok(()));
    let (_, request) = it.acts.dials[0];
    it.request(1, Some(request.gives));
    let accepted = it.hello(1, 1);
    it.end(own);
    it.other();
    // the session ends with the accepted link
    assert_eq!(it.acts.ends.last(), Some(&accepted));
    let late = it.core.answer(from, 3, &mut it.acts);
    assert_eq!(late, Err(FiErrno::ECONNABORTED));
    it.end(accepted);
    let late = it.core.answer(from, 4, &mut it.acts);
    assert_eq!(late, Err(FiErrno::ECONNABORTED));
    let from = Origin { session: 1, ..from };
    assert_eq!(it.core.answer(from, 5, &mut it.acts), Ok(()));
}

#[test]
fn an_rts_of_an_ended_session_is_not_delivered() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    let (_, request) = it.acts.dials[0];
    it.fresh_request(1, request.gives);
    // what had arrived is processed
    let message = Message::default();
    let payload = Payload { offset: 32, len: 8 };
    it.packet(own, 0, 1, Body::Eager { message, payload });
    let rts = Body::Rts {
        message,
        op: OpId::new(1),
        addr: RemoteAddr::NULL,
        len: 9000,
        rkey: Rkey::new(1),
    };
    it.packet(own, 1, 1, rts);
    assert_eq!((it.acts.delivered, it.acts.discarded), (1, 1));
}

/// The acceptor has ended an earlier session, and HELLO of the next one gets lost with its link.
/// The dialler shows the token of the reply: it continues the session that the reply has begun.
#[test]
fn a_session_continues_although_its_first_hello_was_lost() {
    let mut it = Scene::with_session();
    it.send(it.peer, 2);
    let (_, ended) = it.acts.dials[1];
    it.time_out();
    it.acts.completed.clear();
    // the peer learns that the session has ended, and begins another one
    it.request(1, Some(ended.gives));
    assert_eq!(it.acts.rejects[0].reason, Reason::Other);
    it.request(2, None);
    let (link, reply) = it.acts.accepts[0];
    it.end(link);
    // its packets were posted, so their outcome would be unknown in a further session
    it.request(3, Some(reply.gives));
    assert_eq!(it.acts.rejects.len(), 1);
    let (_, next) = it.acts.accepts[1];
    assert_eq!(
        (next.gives, next.terms.expected),
        (reply.gives, Number::new(0))
    );
    it.hello(3, 0);
    assert_eq!(it.core.session(it.peer), Some(id(2)));
    it.send(it.peer, 3);
    assert_eq!((it.acts.posts, &it.acts.completed[..]), (2, &[][..]));
    // tokens of the earlier session, or of none, are refused
    for shows in [ended.gives, Secret::new(99).expect("not 0")] {
        it.request(4, Some(shows));
        assert_eq!(it.acts.rejects.last().expect("it").reason, Reason::Other);
    }
}

/// A peer accepts a request that shows no session, at another address: it has none. The session
/// that this side still has is not continued, and what waits begins the next one.
#[test]
fn a_reply_to_a_request_without_a_session_shows_its_end() {
    for (token, ends) in [(8, true), (7, false)] {
        let mut it = Scene::with_session();
        it.acts.completed.clear();
        let other = it.core.peer_at(place(3)).expect("a peer");
        it.send(other, 5);
        let (link, request) = *it.acts.dials.last().expect("a dial");
        assert_eq!(request.shows, None);
        let reply = Reply {
            epoch: request.epoch,
            id: id(2),
            auth: 0,
            gives: Secret::new(token).expect("not 0"),
            ended: None,
            terms: it.terms(0),
        };
        let dials = it.acts.dials.len();
        it.core.replied(link, &reply.encode(), &mut it.acts);
        it.core.ended(link, &mut it.acts);
        it.core.flush(&mut it.acts);
        let (_, request) = it.acts.dials[dials];
        // the session that has the token of the reply is the one that has begun meanwhile
        let shows = (!ends).then(|| Secret::new(7).expect("not 0"));
        assert_eq!((request.shows, request.fresh), (shows, false), "{token}");
        assert_eq!(it.core.session(it.peer).is_none(), ends);
        // the first message has arrived in the session
        it.reply_with(u32::from(!ends));
        assert_eq!((it.acts.posts, &it.acts.completed[..]), (2, &[][..]));
    }
}

/// An endpoint restarts before HELLO of its predecessor, and dials while this side waits for the
/// end of the predecessor's link. The end of that session would take its endpoint id along.
#[test]
fn a_successor_waits_for_the_end_of_the_session() {
    let mut it = Scene::on_circuits();
    it.request(1, None);
    let (accepted, _) = it.acts.accepts[0];
    it.send(it.peer, 1);
    it.core.broken(accepted, &mut it.acts);
    it.core.half_ended(accepted, &mut it.acts);
    it.core.set_now(1_000_000_000);
    it.core.tick(&mut it.acts);
    it.other();
    assert_eq!(it.acts.silences, [accepted]);
    it.request_of(3, 1);
    assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
    it.core.silenced(accepted, &mut it.acts);
    it.core.ended(accepted, &mut it.acts);
    it.request_of(3, 2);
    it.hello(2, 0);
    it.core.check();
    assert_eq!(it.core.session(it.peer), Some(id(3)));
    // its session is not ended by a request without the token
    it.request_of(3, 3);
    assert_eq!(it.acts.rejects[1].reason, Reason::Known);
}

/// What has arrived when a session ends is delivered, ATOMIC too: a message behind it may rely on
/// it. RTS alone is dropped.
#[test]
fn what_has_arrived_at_the_end_of_a_session_is_delivered() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    it.settle(own);
    it.core.fail(it.peer, FiErrno::EHOSTUNREACH, &mut it.acts);
    let message = Message::default();
    let (rkey, op) = (Rkey::default(), OpId::new(5));
    let bodies = [
        Body::Atomic {
            op,
            addr: 0,
            key: 0,
            operator: 0,
            datatype: 0,
            count: 1,
            fetches: false,
            last: true,
            operands: Payload { offset: 64, len: 1 },
        },
        Body::Rts {
            message,
            op,
            addr: RemoteAddr::NULL,
            len: 1 << 20,
            rkey,
        },
        Body::Eager {
            message,
            payload: Payload { offset: 32, len: 8 },
        },
    ];
    let mut delivered = Vec::new();
    for (number, body) in (0..).zip(bodies) {
        it.packet(own, number, 99, body);
        delivered.push(it.acts.delivered);
    }
    assert_eq!(delivered, [1, 1, 2]);
}
