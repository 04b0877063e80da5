//! Tests of one endpoint step by step: the messages of its peer are written by the test.

mod demands;
mod dials;
mod evictions;
mod further;
mod idle;
mod orphans;
mod returns;
mod sessions;
mod turns;
mod window;

use std::net::IpAddr;

use super::Random;
use crate::errno::{FiErrno, Result};
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::{Form, Uses};
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::recover::Unposted;
use crate::rdm::core::{Config, Core, Failure, Io, Origin, Post, SendOp};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::cm::VERSION;
use crate::wire::rdm::packet::{Message, Payload};
use crate::wire::rdm::{
    Body, Close, Credit, EndpointId, Epoch, Grant, GrantNumber, Header, Hello, Listener, Number,
    OpId, Packet, PeerIndex, Reason, Rejection, Reply, Request, Secret, Terms,
};

/// The acts of the endpoint.
#[derive(Default)]
struct Acts {
    dials: Vec<(LinkKey, Request)>,
    accepts: Vec<(LinkKey, Reply)>,
    rejects: Vec<Rejection>,
    packets: Vec<(LinkKey, Packet)>,
    ends: Vec<LinkKey>,
    completed: Vec<(u32, Result<()>)>,
    own: Vec<u32>,
    failed: Vec<FiErrno>,
    /// Operations of the caller that wait for the next session.
    keeps: u32,
    ups: Vec<(LinkKey, Terms)>,
    downs: Vec<LinkKey>,
    probes: Vec<LinkKey>,
    /// No request completes.
    stands: bool,
    posts: usize,
    delivered: usize,
    /// Credit that delivered packets do not use any more.
    unused: Credit,
    discarded: usize,
    /// The number of links that exist is the largest.
    full: bool,
    /// RMA is under way.
    rma: bool,
    /// The number of places on circuits; 0: no limit.
    places: usize,
    /// Links that have no room for packets without number.
    crowded: Vec<LinkKey>,
    /// Links that linger and that the peer does not use any more.
    closes: Vec<LinkKey>,
    /// Links whose peers shall get errors.
    silences: Vec<LinkKey>,
    /// Links on which requests of this side are held back.
    held: Vec<LinkKey>,
    /// Links on which they are not, once for each call.
    released: Vec<LinkKey>,
    /// Peers of messages that were not matched, or of entries that were not read.
    names: Vec<PeerKey>,
    /// The time, if calls of the application do not state it.
    clock: Option<u64>,
}

impl Io for Acts {
    type Op = u32;
    type Held = ();
    type Slot = ();

    fn now(&self) -> Option<u64> {
        self.clock
    }

    fn dial(&mut self, link: LinkKey, _: Listener, request: &Request) {
        self.dials.push((link, *request));
    }

    fn has_place(&mut self) -> bool {
        !self.full
    }

    fn places(&self) -> usize {
        match self.places {
            0 => usize::MAX,
            places => places,
        }
    }

    fn is_quiet(&mut self, _: LinkKey) -> bool {
        !self.rma
    }

    /// Peers whose ports have the same tens are on one node.
    fn node_at(&self, address: Listener) -> Option<(IpAddr, u64)> {
        let address = address.socket_addr();
        Some((address.ip(), u64::from(address.port() / 10)))
    }

    fn close(&mut self, link: LinkKey) {
        self.closes.push(link);
    }

    fn silence(&mut self, link: LinkKey) {
        self.silences.push(link);
    }

    fn accept(&mut self, link: LinkKey, (): (), reply: &Reply, _: Option<Listener>) {
        self.accepts.push((link, *reply));
    }

    fn reject(&mut self, (): (), rejection: &Rejection) {
        self.rejects.push(*rejection);
    }

    fn post(&mut self, _: LinkKey, _: Header, _: u32, _: Form) -> Post {
        self.posts += 1;
        Post::Posted
    }

    fn control(&mut self, link: LinkKey, packet: &Packet) -> bool {
        if self.crowded.contains(&link) {
            return false;
        }
        self.packets.push((link, packet.clone()));
        true
    }

    fn end(&mut self, link: LinkKey) {
        self.ends.push(link);
    }

    fn complete(&mut self, op: u32, result: Result<()>) {
        self.completed.push((op, result));
    }

    fn deliver(&mut self, _: Origin, _: &Packet, (): ()) -> Credit {
        self.delivered += 1;
        self.unused
    }

    fn discard(&mut self, (): ()) {
        self.discarded += 1;
    }

    fn fail_peer(&mut self, _: PeerKey, error: FiErrno, waiting: Unposted) -> u32 {
        self.failed.push(error);
        match waiting {
            Unposted::Kept => self.keeps,
            _ => 0,
        }
    }

    fn block(&mut self, _: PeerKey, _: LinkKey) -> (RemoteAddr, Rkey) {
        (RemoteAddr::new(4096), Rkey::new(3))
    }

    fn up(&mut self, _: PeerKey, link: LinkKey, terms: &Terms) {
        self.ups.push((link, *terms));
    }

    fn down(&mut self, _: PeerKey, link: LinkKey) {
        self.downs.push(link);
    }

    fn hold_own_requests(&mut self, link: LinkKey, holds: bool) {
        self.held.retain(|held| *held != link);
        match holds {
            true => self.held.push(link),
            false => self.released.push(link),
        }
    }

    fn probe(&mut self, link: LinkKey) -> bool {
        self.probes.push(link);
        self.stands
    }

    fn loop_back(&mut self, op: u32) {
        self.own.push(op);
    }

    fn alias(&mut self, _: PeerKey, _: Option<PeerKey>) {}

    fn free(&mut self, peers: &mut Vec<(PeerKey, Option<Listener>)>) {
        peers.retain(|(peer, _)| !self.names.contains(peer));
    }
}

/// The period of probes.
const BEAT: u64 = 750_000_000;

/// How long peers without links are kept.
const IDLE: (u64, u64) = (60_000_000_000, 30_000_000_000);

/// The time of the device's retries.
const RETRIES: u64 = 1_900_000_000;

fn id(number: u64) -> EndpointId {
    EndpointId::new(number).expect("not 0")
}

fn epoch(number: u32) -> Epoch {
    Epoch::new(number).expect("not 0")
}

fn place(port: u16) -> Listener {
    Listener::new(std::net::Ipv4Addr::LOCALHOST.into(), port).expect("a port")
}

/// The endpoint with id 1 at port 1. Its peer has id 2 and port 2, and calls it peer 9.
struct Scene {
    core: Core<Acts>,
    acts: Acts,
    peer: PeerKey,
    grant: u16,
}

impl Scene {
    fn new() -> Self {
        Self::with_timeout(10_000_000_000)
    }

    /// With this connect timeout, in ns.
    fn with_timeout(timeout: u64) -> Self {
        Self::with(timeout, false)
    }

    /// On circuits.
    fn on_circuits() -> Self {
        Self::with(10_000_000_000, true)
    }

    fn with(timeout: u64, circuits: bool) -> Self {
        let mut core = Core::new(Config {
            id: id(1),
            listener: place(1),
            auth: 0,
            further: vec![place(11), place(12)],
            application_keys: true,
            circuits,
            device_atomics: true,
            random: Box::new({
                let mut random = Random(5);
                move || Ok(random.next())
            }),
            eager: 8192,
            dials: 32,
            peers: 8,
            timeout,
            answer: timeout / 5,
            beat: Some(BEAT),
            retries: RETRIES,
            idle: IDLE,
            pool: Credit::new(1 << 20, 1 << 16),
        });
        let peer = core.peer_at(place(2)).expect("a peer");
        core.keep(peer);
        Self {
            core,
            acts: Acts::default(),
            peer,
            grant: 0,
        }
    }

    fn send(&mut self, to: PeerKey, op: u32) {
        let send = SendOp {
            op,
            uses: Uses::Message(8),
            ack: false,
        };
        self.core.send(to, send, &mut self.acts).expect("room");
    }

    fn grant(&mut self) -> Grant {
        self.grant += 1;
        Grant {
            number: GrantNumber::new(self.grant),
            limit: Credit::new(64, 4),
        }
    }

    fn terms(&mut self, expected: u32) -> Terms {
        Terms {
            expected: Number::new(expected),
            grant: self.grant(),
            index: PeerIndex::new(9),
            eager: 8192,
            block_rkey: Rkey::new(77),
            ..Terms::default()
        }
    }

    /// The peer dials twice with the token of the second dial of this side: its second request
    /// waits for the end of the link of the first. Returns the token and that link.
    fn held_request(&mut self) -> (Secret, LinkKey) {
        self.send(self.peer, 2);
        let token = self.acts.dials[1].1.gives;
        self.request(1, Some(token));
        let (accepted, _) = self.acts.accepts[0];
        self.request(2, Some(token));
        assert_eq!(self.acts.ends.last(), Some(&accepted));
        (token, accepted)
    }

    /// The peer dials; its request is accepted or held.
    fn request(&mut self, number: u32, shows: Option<Secret>) {
        self.dialled(id(2), number, shows, false);
    }

    /// Another endpoint at the peer's address dials.
    fn request_of(&mut self, other: u64, number: u32) {
        self.dialled(id(other), number, None, false);
    }

    /// The peer dials after it has ended its session.
    fn fresh_request(&mut self, number: u32, shows: Secret) {
        self.dialled(id(2), number, Some(shows), true);
    }

    fn dialled(&mut self, id: EndpointId, number: u32, shows: Option<Secret>, fresh: bool) {
        self.dialled_with(id, number, (7, shows), fresh);
    }

    /// The dialler gives and shows these tokens.
    fn dialled_with(
        &mut self,
        id: EndpointId,
        number: u32,
        (gives, shows): (u32, Option<Secret>),
        fresh: bool,
    ) {
        let request = Request {
            listener: place(2),
            id,
            auth: 0,
            epoch: epoch(number),
            ended: None,
            gives: Secret::new(gives).expect("not 0"),
            shows,
            fresh,
        };
        let private_data = request.encode();
        self.core.requested((), &private_data, &mut self.acts);
    }

    /// The peer replies to the last dial.
    fn reply(&mut self) -> LinkKey {
        self.reply_with(0)
    }

    fn reply_with(&mut self, expected: u32) -> LinkKey {
        self.reply_of(id(2), expected)
    }

    /// This endpoint replies to the last dial.
    fn reply_of(&mut self, id: EndpointId, expected: u32) -> LinkKey {
        let (link, request) = *self.acts.dials.last().expect("a dial");
        let reply = Reply {
            epoch: request.epoch,
            id,
            auth: 0,
            gives: Secret::new(7).expect("not 0"),
            ended: Some(epoch(1)),
            terms: self.terms(expected),
        };
        let private_data = reply.encode();
        self.core.replied(link, &private_data, &mut self.acts);
        link
    }

    fn packet(&mut self, link: LinkKey, number: u32, seen: u16, body: Body) {
        let header = Header {
            number: Number::new(number),
            seen: GrantNumber::new(seen),
            to: PeerIndex::new(self.peer.number()),
            ..Header::default()
        };
        let packet = Packet { header, body };
        self.core.arrived(link, &packet, (), &mut self.acts);
    }

    /// HELLO on the last accepted link.
    fn hello(&mut self, number: u32, expected: u32) -> LinkKey {
        let (link, _) = *self.acts.accepts.last().expect("an accepted link");
        let terms = self.terms(expected);
        let hello = Hello::new(epoch(number), terms, []);
        self.packet(link, 0, 1, Body::Hello(Box::new(hello)));
        link
    }

    /// Another endpoint rejects the last dial.
    fn other(&mut self) {
        let (link, request) = *self.acts.dials.last().expect("a dial");
        let other = Rejection {
            version: VERSION,
            epoch: Some(request.epoch),
            id: id(3),
            newest: None,
            reason: Reason::Other,
        };
        self.core.rejected(link, &other.encode(), &mut self.acts);
    }

    /// The endpoint reports, and the peer has seen the report.
    fn settle(&mut self, link: LinkKey) {
        self.core.flush(&mut self.acts);
        let grant = self.grant();
        let recall = false;
        self.packet(link, 0, 99, Body::Credit { grant, recall });
        self.core.flush(&mut self.acts);
    }

    fn end(&mut self, link: LinkKey) {
        self.core.broken(link, &mut self.acts);
        self.core.ended(link, &mut self.acts);
        self.core.flush(&mut self.acts);
    }
}

/// The body of a message of the peer.
fn eager(ack: bool) -> Body {
    let message = Message {
        ack,
        ..Message::default()
    };
    let payload = Payload { offset: 32, len: 8 };
    Body::Eager { message, payload }
}

#[test]
fn a_request_of_a_replaced_endpoint_is_rejected() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    it.settle(own);
    it.end(own);
    let (_, accepted) = it.held_request();
    assert!(it.acts.rejects.is_empty());
    it.other();
    assert_eq!(it.acts.rejects[0].reason, Reason::Busy);
    // it was meant for the old endpoint
    let lost = (2, Err(FiErrno::ECONNABORTED));
    assert_eq!(it.acts.completed, [(1, Ok(())), lost]);
    // this one was not
    it.send(it.peer, 3);
    it.end(accepted);
    assert_eq!((it.acts.accepts.len(), it.acts.dials.len()), (1, 3));
    assert_eq!(it.acts.completed.len(), 2);
}

#[test]
fn an_own_link_is_kept_while_hello_is_awaited() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    it.request(1, None);
    let accepted = it.hello(1, 0);
    it.core.sent(accepted, Number::new(0), &mut it.acts);
    // not the out-link
    let own = it.reply();
    it.settle(accepted);
    it.end(accepted);
    let (_, reply) = it.acts.accepts[0];
    it.request(2, Some(reply.gives));
    it.acts.ends.clear();
    it.send(it.peer, 2);
    assert!(it.acts.ends.is_empty());
    it.hello(2, 1);
    assert_eq!((it.acts.ends.len(), it.core.links_to(it.peer)), (0, 2));
    assert!(own != accepted && it.acts.dials.len() == 1);
}

#[test]
fn an_operation_that_waits_for_an_answer_is_a_reason_to_dial() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let own = it.reply();
    it.core.sent(own, Number::new(0), &mut it.acts);
    assert_eq!(it.acts.completed, [(1, Ok(()))]);
    it.core.hold(it.peer, &mut it.acts);
    assert!(!it.core.evict(it.peer, &mut it.acts));
    it.end(own);
    assert_eq!(it.acts.dials.len(), 2);
    // the process of the peer has ended
    let (link, _) = it.acts.dials[1];
    it.core.dial_failed(link, Failure::Refused, &mut it.acts);
    assert_eq!(it.acts.failed, [FiErrno::ECONNABORTED]);
    it.core.set_now(1_000_000_000);
    it.core.tick(&mut it.acts);
    assert_eq!((it.acts.dials.len(), it.core.deadline()), (2, None));
}

#[test]
fn sends_to_the_own_endpoint_come_back() {
    let mut it = Scene::new();
    let own = it.core.peer_at(place(1)).expect("a peer");
    it.core.unite_own(own, &mut it.acts);
    assert_eq!(it.core.resolve(own), own);
    it.send(own, 1);
    assert_eq!((&it.acts.own[..], it.acts.dials.len()), (&[1][..], 0));
    // another address of it
    let alias = it.peer;
    it.send(alias, 2);
    it.send(alias, 3);
    let (link, request) = it.acts.dials[0];
    let private_data = request.encode();
    it.core.requested((), &private_data, &mut it.acts);
    let known = it.acts.rejects[0];
    it.core.rejected(link, &known.encode(), &mut it.acts);
    it.send(alias, 4);
    assert_eq!(it.acts.own, [1, 2, 3, 4]);
    assert_eq!(it.core.resolve(alias), own);
    assert_eq!((it.acts.dials.len(), it.core.deadline()), (1, None));
    // a program that states this address is not this endpoint
    it.request(1, None);
    assert_eq!(it.acts.accepts.len(), 1);
    it.send(alias, 5);
    assert_eq!(it.acts.own.len(), 5);
}

#[test]
fn tokens_are_bits_of_the_source() {
    let mut it = Scene::new();
    let mut source = Random(5);
    assert!(it.core.random_is_unused(), "a known peer has no token");
    it.send(it.peer, 1);
    let (_, request) = it.acts.dials[0];
    let bits = (source.next() >> 32) as u32;
    assert_eq!(request.gives, Secret::new(bits).expect("not 0"));
    // each message to the peer has the same token
    it.request(1, None);
    let (_, reply) = it.acts.accepts[0];
    assert_eq!(reply.gives, request.gives);
    // without a source, nothing is sent
    let mut it = Scene::new();
    it.core.set_random(Box::new(|| Err(FiErrno::EIO)));
    it.send(it.peer, 1);
    it.request(1, None);
    let reasons: Vec<_> = it.acts.rejects.iter().map(|it| it.reason).collect();
    assert_eq!((it.acts.dials.len(), reasons), (0, vec![Reason::Busy]));
    // the dial is repeated after the backoff
    it.core.set_random(Box::new(move || Ok(source.next())));
    it.core.set_now(1_000_000);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.dials.len(), 1);
}

#[test]
fn terms_state_the_block_of_the_link() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let link = it.reply();
    let (_, packet) = &it.acts.packets[0];
    let Body::Hello(hello) = &packet.body else {
        panic!("{packet:?}");
    };
    let block = (hello.terms.block_addr, hello.terms.block_rkey);
    assert_eq!(block, (RemoteAddr::new(4096), Rkey::new(3)));
    assert!(hello.terms.application_keys);
    assert_eq!(
        hello.listeners().collect::<Vec<_>>(),
        [place(11), place(12)]
    );
    let (up, terms) = it.acts.ups[0];
    assert_eq!((up, terms.block_rkey), (link, Rkey::new(77)));
    it.request(1, Some(hello_token(&it)));
    let (_, reply) = it.acts.accepts[0];
    assert_eq!(reply.terms.block_addr, RemoteAddr::new(4096));
    it.hello(1, 1);
    assert_eq!((it.acts.ups.len(), it.acts.downs.len()), (1, 0));
    it.end(link);
    assert_eq!((it.acts.ups.len(), &it.acts.downs[..]), (1, &[link][..]));
}

fn hello_token(it: &Scene) -> Secret {
    it.acts.dials[0].1.gives
}

#[test]
fn a_link_is_down_while_its_eviction_is_asked() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let link = it.reply();
    it.core.sent(link, Number::new(0), &mut it.acts);
    it.settle(link);
    assert!(it.core.evict(it.peer, &mut it.acts));
    assert_eq!((it.acts.ups.len(), &it.acts.downs[..]), (1, &[link][..]));
    it.packet(link, 0, 99, Body::Close(Close::Refuse));
    let (up, terms) = it.acts.ups[1];
    assert_eq!((up, terms.block_rkey), (link, Rkey::new(77)));
    // the peer asks too
    it.packet(link, 0, 99, Body::Close(Close::Ask));
    assert_eq!(it.acts.downs, [link, link]);
    // its disconnect request is lost
    it.core.set_now(1_000_000_000);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.ends, [link]);
    it.end(link);
    assert_eq!((it.acts.ups.len(), it.acts.downs.len()), (2, 2));
}

#[test]
fn an_evicted_link_is_replaced_at_once() {
    let mut it = Scene::new();
    it.request(1, None);
    let link = it.hello(1, 0);
    it.settle(link);
    it.packet(link, 0, 99, Body::Close(Close::Ask));
    it.end(link);
    it.send(it.peer, 1);
    assert_eq!(it.acts.dials.len(), 1);
    // after a break, the dialler has 20 ms
    let mut it = Scene::new();
    it.request(1, None);
    let link = it.hello(1, 0);
    it.settle(link);
    it.end(link);
    it.send(it.peer, 1);
    assert_eq!(it.acts.dials.len(), 0);
}

#[test]
fn silent_peers_are_probed_while_something_is_awaited() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let link = it.reply();
    it.core.sent(link, Number::new(0), &mut it.acts);
    it.settle(link);
    let beat = |it: &mut Scene, count| {
        for _ in 0..count {
            let time = it.core.deadline().expect("a beat");
            it.core.set_now(time);
            it.core.tick(&mut it.acts);
        }
    };
    // nothing is awaited: no thread wakes
    assert_eq!(it.core.deadline(), None);
    it.core.hold(it.peer, &mut it.acts);
    assert_eq!(it.core.deadline(), Some(BEAT));
    beat(&mut it, 1);
    assert!(
        it.acts.probes.is_empty(),
        "it was heard since the last beat"
    );
    beat(&mut it, 2);
    assert_eq!(it.acts.probes, [link, link]);
    it.settle(link);
    beat(&mut it, 1);
    assert_eq!(it.acts.probes.len(), 2);
    it.core.release(it.peer, &mut it.acts);
    beat(&mut it, 1);
    assert_eq!((it.acts.probes.len(), it.core.deadline()), (2, None));
    // an operation that waits for credit
    for op in 2..40 {
        it.send(it.peer, op);
    }
    beat(&mut it, 3);
    assert_eq!(it.acts.probes.len(), 5);
}

/// A device can stop without an error. Then the probe does not complete.
#[test]
fn a_link_is_ended_if_nothing_completes_on_it() {
    let mut it = Scene::new();
    it.send(it.peer, 1);
    let link = it.reply();
    it.core.sent(link, Number::new(0), &mut it.acts);
    it.settle(link);
    it.core.hold(it.peer, &mut it.acts);
    let beats = |it: &mut Scene, count| {
        for _ in 0..count {
            let time = it.core.deadline().expect("a beat");
            it.core.set_now(time);
            it.core.tick(&mut it.acts);
        }
    };
    // not in a row: a request completes, then a packet arrives
    beats(&mut it, 1);
    it.acts.stands = true;
    beats(&mut it, 19);
    it.acts.stands = false;
    beats(&mut it, 1);
    it.acts.stands = true;
    beats(&mut it, 19);
    it.settle(link);
    beats(&mut it, 20);
    assert!(it.acts.ends.is_empty(), "after 19 beats in a row");
    beats(&mut it, 1);
    assert_eq!(it.acts.ends, [link]);
    // the silence was longer than the connect timeout, so the dial has the time of one answer
    let begin = it.core.deadline().expect("a beat") - BEAT;
    it.end(link);
    assert_eq!(it.acts.dials.len(), 2);
    it.core.set_now(begin + 1_999_999_999);
    it.core.tick(&mut it.acts);
    assert!(it.acts.failed.is_empty());
    it.core.set_now(begin + 2_000_000_000);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.failed, [FiErrno::EHOSTUNREACH]);
}

/// The thread that sends replies may be late, for instance when many processes connect at once.
#[test]
fn hello_is_awaited_from_the_reply_on() {
    const S: u64 = 1_000_000_000;
    let mut it = Scene::new();
    it.request(1, None);
    let (link, _) = it.acts.accepts[0];
    assert_eq!(it.core.deadline(), None);
    it.core.set_now(5 * S);
    it.core.tick(&mut it.acts);
    assert!(it.acts.ends.is_empty());
    it.core.accepted(link);
    assert_eq!(it.core.deadline(), Some(7 * S));
    it.core.set_now(7 * S);
    it.core.tick(&mut it.acts);
    assert_eq!(it.acts.ends, [link]);
    // HELLO may arrive before the thread says that it has replied
    let mut it = Scene::new();
    it.request(1, None);
    let link = it.hello(1, 0);
    it.core.accepted(link);
    it.core.set_now(100 * S);
    it.core.tick(&mut it.acts);
    assert!(it.acts.ends.is_empty());
    assert_eq!(it.core.deadline(), None);
}
