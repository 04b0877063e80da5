//! A network in memory, driven by a seed. It delays packets, completions and messages of the
//! connection manager, breaks links at any packet in either direction, also while a packet is
//! written to the memory of the peer, delivers packets of a queue pair after its sender has ended
//! it, loses requests and replies, restarts endpoints, and refuses queue pairs and credit. A model
//! compares what was sent with what was delivered.
//!
//! One file, because the events, the faults and the model change the same state. Links on circuits
//! are in a file of their own.

mod circuits;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};

use self::circuits::{Circuit, OnCircuit, Polled};
use super::Random;
use crate::errno::{FiErrno, Result};
use crate::rdm::core::connect::LINK_REPLY_WAIT;
use crate::rdm::core::direct::RingMessages;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::{Form, Uses};
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::recover::Unposted;
use crate::rdm::core::{Config, Core, Failure, Io, Origin, Post, SendOp};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::packet::{MAX_HEAD, Message, Payload};
use crate::wire::rdm::{
    Body, Credit, EndpointId, Header, Listener, Number, OpId, Packet, Rejection, Reply, Request,
    Terms,
};

/// Messages of a stream that are not complete at once.
const STREAMED: usize = 8;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
/// When the kernel's connection manager repeats a message that was lost.
const REPEATED: u64 = 4_400 * MS;

/// An operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    id: usize,
    len: u32,
    ack: bool,
    answer: bool,
    /// FIN of the RTS with this id.
    fin: bool,
}

/// Set in the operation of FIN to an RTS.
const FIN: u32 = 1 << 31;

/// A message in the model.
#[derive(Debug)]
struct Sent {
    from: usize,
    to: Listener,
    answer: bool,
    /// The session when it was posted.
    meant_for: Option<EndpointId>,
    result: Option<bool>,
    /// When it was complete, or had failed.
    ended: u64,
    /// The last connection on which it was posted, and the side.
    posted: Option<(usize, usize)>,
    /// When it was posted last. Before: when it was sent.
    posted_at: u64,
    delivered: Option<usize>,
    /// It was sent when nothing disturbed the network any more.
    must: bool,
    peer: PeerKey,
    /// Posted as RTS: whether FIN has arrived, or the operations of the peer have failed.
    fin: Option<bool>,
}

#[derive(Debug)]
enum Action {
    Dial(LinkKey, Listener, Vec<u8>),
    Accept(LinkKey, usize, Vec<u8>),
    Reject(usize, Vec<u8>),
    Post(LinkKey, Wire),
    Ring(LinkKey, Wire),
    /// A link has ended during a post, whose caller ends it next.
    RingEnded(LinkKey),
    Probe(LinkKey),
    NoRoom(LinkKey),
    End(LinkKey),
    Close(LinkKey),
    Silence(LinkKey),
    /// The terms of the peer have arrived.
    Introduced(LinkKey),
    Complete(usize, bool),
    Deliver(Origin, usize, Credit, bool),
    /// An RTS was posted.
    Wait(usize),
    Fin(usize),
    Failed(PeerKey),
    LoopBack(usize),
}

/// A packet on the network.
#[derive(Debug)]
struct Wire {
    head: Vec<u8>,
    total: usize,
    number: Option<Number>,
}

/// What a queue pair's completions say.
enum Completion {
    Packet(Wire),
    Sent(Number),
}

/// The hands of one endpoint.
pub(super) struct Hands {
    actions: Vec<Action>,
    random: Random,
    /// Work requests that have not completed, per link.
    posted: HashMap<u32, u32>,
    sq: u32,
    chaos: bool,
    /// Number of links that exist, and that can exist.
    used: usize,
    places: usize,
    /// RMA is under way on some links.
    rma: bool,
    /// The link for posts to each peer.
    up: HashMap<u32, LinkKey>,
    /// Links on which a packet can be written to the peer's memory, and those that have ended
    /// during this: what is posted to them is lost.
    rings: HashSet<u32>,
    ended: HashSet<u32>,
    /// Links that have a circuit; `circuits`: the others refuse posts.
    attached: HashSet<u32>,
    circuits: bool,
    /// The number of endpoints on each node, if nodes are known, and whether there is one.
    on_node: Option<usize>,
    one_node: bool,
    /// Peers with messages that were not matched.
    unmatched: HashSet<u32>,
    /// Messages that this call has posted, and the link.
    sent: Vec<(usize, u32)>,
    /// Addresses of peers that were freed.
    freed: Vec<Listener>,
}

impl Io for Hands {
    type Op = Op;
    type Held = usize;
    type Slot = ();

    fn dial(&mut self, link: LinkKey, to: Listener, request: &Request) {
        let bytes = request.encode().to_vec();
        self.used += 1;
        self.actions.push(Action::Dial(link, to, bytes));
    }

    fn has_place(&mut self) -> bool {
        // on circuits the core counts them
        (self.circuits || self.used < self.places) && !(self.chaos && self.random.one_in(10))
    }

    fn places(&self) -> usize {
        self.places
    }

    fn is_quiet(&mut self, _: LinkKey) -> bool {
        !self.rma || self.random.one_in(4)
    }

    fn has_completed(&mut self, link: LinkKey) -> bool {
        let posted = self.posted.get(&link.number());
        posted.is_none_or(|posted| *posted == 0)
    }

    fn node_at(&self, address: Listener) -> Option<(IpAddr, u64)> {
        let node = number_of(address) / self.on_node?;
        Some((Ipv4Addr::LOCALHOST.into(), node as u64))
    }

    fn has_one_node(&self) -> bool {
        self.one_node
    }

    fn accept(&mut self, link: LinkKey, held: usize, reply: &Reply, _: Option<Listener>) {
        let bytes = reply.encode().to_vec();
        self.used += 1;
        self.actions.push(Action::Accept(link, held, bytes));
    }

    fn reject(&mut self, held: usize, rejection: &Rejection) {
        let bytes = rejection.encode().to_vec();
        self.actions.push(Action::Reject(held, bytes));
    }

    fn is_later(&self, op: Op, than: Op) -> bool {
        op.id > than.id
    }

    fn post(&mut self, link: LinkKey, header: Header, op: Op, form: Form) -> Post {
        assert!(
            self.up.values().any(|up| *up == link),
            "a post to a link that is not up"
        );
        let ring = self.uses_ring(link);
        let circuit = !self.circuits || self.attached.contains(&link.number());
        let posted = self.posted.entry(link.number()).or_default();
        if !circuit {
            return Post::Refused;
        }
        if *posted >= self.sq && !ring {
            return Post::Refused;
        }
        *posted += u32::from(!ring);
        if !op.fin {
            self.sent.push((op.id, link.number()));
        }
        let message = Message {
            tag: Some(op.id as u64),
            data: None,
            ack: op.ack,
        };
        let body = match form {
            _ if op.fin => Body::Fin {
                op: OpId::new(op.id as u32 | FIN),
                status: 0,
            },
            _ if op.answer => Body::Fin {
                op: OpId::new(op.id as u32),
                status: 0,
            },
            Form::Whole => Body::Eager {
                message,
                payload: Payload {
                    offset: 32,
                    len: op.len,
                },
            },
            Form::Rts => {
                self.actions.push(Action::Wait(op.id));
                Body::Rts {
                    message,
                    op: OpId::new(op.id as u32),
                    addr: RemoteAddr::NULL,
                    len: op.len.into(),
                    rkey: Rkey::default(),
                }
            }
        };
        let packet = Packet { header, body };
        if ring {
            return match self.write(link, &packet) {
                true => Post::Delivered,
                // it is posted again on the next link
                false => Post::Posted,
            };
        }
        self.put(link, &packet, Some(header.number));
        Post::Posted
    }

    fn control(&mut self, link: LinkKey, packet: &Packet) -> bool {
        if self.circuits && !self.attached.contains(&link.number()) {
            return false;
        }
        if self.uses_ring(link) {
            // what follows is the end of the link
            self.write(link, packet);
            return true;
        }
        if self.random.one_in(8) {
            self.actions.push(Action::NoRoom(link));
            return false;
        }
        self.put(link, packet, None);
        true
    }

    fn end(&mut self, link: LinkKey) {
        self.actions.push(Action::End(link));
    }

    fn close(&mut self, link: LinkKey) {
        self.actions.push(Action::Close(link));
    }

    fn silence(&mut self, link: LinkKey) {
        self.actions.push(Action::Silence(link));
    }

    fn introduced(&mut self, link: LinkKey, _: &Terms) {
        self.actions.push(Action::Introduced(link));
    }

    fn complete(&mut self, op: Op, result: Result<()>) {
        if !op.fin {
            self.actions.push(Action::Complete(op.id, result.is_ok()));
        }
    }

    fn deliver(&mut self, from: Origin, packet: &Packet, (): ()) -> Credit {
        let id = match packet.body {
            Body::Eager { message, .. } | Body::Rts { message, .. } => message.tag.unwrap(),
            Body::Fin { op, .. } if op.get() & FIN != 0 => {
                self.actions.push(Action::Fin((op.get() & !FIN) as usize));
                return Credit::ZERO;
            }
            Body::Fin { op, .. } => op.get().into(),
            _ => panic!("{packet:?}"),
        };
        let rts = matches!(packet.body, Body::Rts { .. });
        let deliver = Action::Deliver(from, id as usize, packet.body.uses(), rts);
        self.actions.push(deliver);
        Credit::ZERO
    }

    fn discard(&mut self, (): ()) {}

    fn fail_peer(&mut self, peer: PeerKey, _: FiErrno, _: Unposted) -> u32 {
        self.actions.push(Action::Failed(peer));
        0
    }

    fn block(&mut self, _: PeerKey, _: LinkKey) -> (RemoteAddr, Rkey) {
        (RemoteAddr::NULL, Rkey::default())
    }

    fn up(&mut self, peer: PeerKey, link: LinkKey, _: &Terms) {
        let was = self.up.insert(peer.number(), link);
        assert_eq!(was, None, "two links for posts");
    }

    fn down(&mut self, peer: PeerKey, link: LinkKey) {
        let was = self.up.remove(&peer.number());
        assert_eq!(was, Some(link), "a link that was not up");
    }

    fn probe(&mut self, link: LinkKey) -> bool {
        self.actions.push(Action::Probe(link));
        self.chaos && !self.random.one_in(8)
    }

    fn loop_back(&mut self, op: Op) {
        self.actions.push(Action::LoopBack(op.id));
    }

    fn alias(&mut self, _: PeerKey, _: Option<PeerKey>) {}

    fn free(&mut self, peers: &mut Vec<(PeerKey, Option<Listener>)>) {
        peers.retain(|(peer, _)| !self.unmatched.contains(&peer.number()));
        self.freed.extend(peers.iter().filter_map(|it| it.1));
    }
}

/// One packet that is passed to the core as [`RingMessages`].
struct OneArrival<'a> {
    next: Option<(Header, u32, usize)>,
    uses: Credit,
    hands: &'a mut Hands,
}

impl RingMessages for OneArrival<'_> {
    type Message = usize;

    fn next(&mut self) -> Option<(Header, u32, usize)> {
        self.next
    }

    fn deliver(&mut self, from: Origin, id: usize) -> Credit {
        self.next = None;
        let deliver = Action::Deliver(from, id, self.uses, false);
        self.hands.actions.push(deliver);
        // the action gives it back
        Credit::ZERO
    }

    fn is_done(&mut self) -> bool {
        true
    }
}

impl Hands {
    /// Sends a message without an operation, if that is possible.
    fn direct(&mut self, core: &mut Core<Self>, peer: PeerKey, op: Op) -> bool {
        let Some(direct) = core.direct(peer, op.len as usize) else {
            return false;
        };
        let (link, header) = (direct.link, direct.header);
        assert!(
            self.up.values().any(|up| *up == link),
            "a post to a link that is not up"
        );
        if !self.rings.contains(&link.number()) {
            return false;
        }
        let message = Message {
            tag: Some(op.id as u64),
            data: None,
            ack: false,
        };
        let payload = Payload {
            offset: 32,
            len: op.len,
        };
        let body = Body::Eager { message, payload };
        let sent = self.write(link, &Packet { header, body });
        if sent {
            direct.sent();
            self.actions.push(Action::Complete(op.id, true));
        }
        // the caller posts it as an operation next, with the same number
        sent
    }

    /// Whether the next packet to a link goes through its ring.
    fn uses_ring(&mut self, link: LinkKey) -> bool {
        let ended = self.ended.contains(&link.number());
        ended || self.rings.contains(&link.number()) && self.random.one_in(2)
    }

    /// Writes a packet to the memory of the peer. `false`: the link has ended meanwhile, and the
    /// packet may be there.
    fn write(&mut self, link: LinkKey, packet: &Packet) -> bool {
        if self.ended.contains(&link.number()) {
            return false;
        }
        let ends = self.chaos && self.random.one_in(20);
        if !ends || self.random.one_in(2) {
            self.actions.push(Action::Ring(link, wire(packet, None)));
        }
        if ends {
            self.ended.insert(link.number());
            self.actions.push(Action::RingEnded(link));
        }
        !ends
    }

    fn put(&mut self, link: LinkKey, packet: &Packet, number: Option<Number>) {
        // a ring must not overtake it
        self.rings.remove(&link.number());
        self.actions.push(Action::Post(link, wire(packet, number)));
    }
}

fn wire(packet: &Packet, number: Option<Number>) -> Wire {
    let mut head = [0; MAX_HEAD];
    let size = packet.encode(&mut head);
    let payload = match packet.body {
        Body::Eager { payload, .. } => payload.len as usize,
        _ => 0,
    };
    Wire {
        head: head[..size].to_vec(),
        total: size + payload,
        number,
    }
}

pub(super) struct Node {
    pub(super) core: Core<Hands>,
    hands: Hands,
    id: EndpointId,
    listener: Listener,
    alive: bool,
    /// Connection and side of each link.
    links: HashMap<u32, (usize, usize)>,
    inbox: HashMap<u32, VecDeque<Completion>>,
    /// The completion queue of links on circuits.
    cq: VecDeque<Polled>,
    /// Messages without a receive: credit and, of an RTS, the model's number.
    unexpected: VecDeque<(Origin, u32, Option<usize>)>,
    /// Messages that wait for FIN.
    waits: Vec<usize>,
    /// The last message of each sender and address, by the model's number.
    last: HashMap<(usize, Listener), usize>,
    tick: Option<u64>,
    /// Peers that are named.
    kept: Vec<PeerKey>,
}

/// A connection: two queue pairs.
pub(super) struct Conn {
    /// Dialler, acceptor.
    sides: [Option<(usize, LinkKey)>; 2],
    /// Queue pairs in ERR.
    err: [bool; 2],
    /// Nothing passes any more.
    cut: bool,
    /// The dialler has received the reply or the rejection, so its dial cannot fail any more.
    answered: bool,
    /// Packets from each side.
    flight: [VecDeque<Wire>; 2],
    /// When the last packet of each side arrives, and the last completion.
    last: [u64; 2],
    acked: [u64; 2],
    request: Vec<u8>,
    /// On circuits: the circuit on which each side posts, that from which it accepts packets, and
    /// its requests that have not completed. `err`: the out half is being ended.
    circuit: [Option<usize>; 2],
    bound: [Option<usize>; 2],
    under_way: [u32; 2],
    dialler: usize,
    acceptor: Option<usize>,
    /// The reply, for a repeated request.
    reply: Vec<u8>,
    /// The endpoint that has the request and has not answered it.
    held: Option<usize>,
}

#[derive(Debug)]
enum Event {
    Request(usize, Listener),
    Reply(usize, Vec<u8>),
    Reject(usize, Vec<u8>),
    DialFailed(usize, Failure),
    Arrive(usize, usize),
    Ack(usize, usize, Number),
    Poll(usize, LinkKey),
    Broken(usize, LinkKey),
    /// As `Broken`: a request was not acknowledged.
    Silent(usize, LinkKey),
    Ended(usize, LinkKey),
    Room(usize, LinkKey),
    Tick(usize),
    Match(usize),
    Send(usize, usize),
    /// As `Send`, again and again.
    Stream(usize, usize),
    Chaos,
    OnCircuit(OnCircuit),
    /// The endpoint at an address has left.
    Left(Listener),
}

/// What a run may do.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) nodes: usize,
    pub(super) sends: usize,
    pub(super) chaos: usize,
    pub(super) restarts: bool,
    /// Requests, replies and rejections that get lost: one in so many; 0: none.
    pub(super) losses: u64,
    pub(super) aliases: bool,
    pub(super) evictions: bool,
    pub(super) pool: Credit,
    /// Only the first endpoint sends.
    pub(super) one_way: bool,
    /// Receives are posted only when all is sent.
    pub(super) late: bool,
    /// No request passes from one endpoint to another one for longer than the connect timeout.
    pub(super) walls: bool,
    /// One side may not notice that a link has broken.
    pub(super) halves: bool,
    /// Packets can be written to the memory of the peer.
    pub(super) rings: bool,
    /// Links are on circuits.
    pub(super) circuits: bool,
    /// The number of endpoints on each node, which share targets.
    pub(super) on_node: usize,
    /// Endpoints do not assume on which node a peer is.
    pub(super) hidden: bool,
    /// The acceptor of a link may get its circuit so late that the dialler has given up meanwhile.
    pub(super) slow_circuits: bool,
    /// The number of links that an endpoint can have.
    pub(super) places: usize,
    /// Each endpoint sends again when a message has been delivered, until this time in ms.
    pub(super) stream: u64,
    /// Peers without links are freed; when all has come to rest, and again, each endpoint sends to
    /// each other one.
    pub(super) frees: bool,
}

pub(super) struct World {
    random: Random,
    plan: Plan,
    now: u64,
    count: u64,
    events: BinaryHeap<Reverse<(u64, u64, usize)>>,
    bodies: Vec<Option<Event>>,
    pub(super) nodes: Vec<Node>,
    /// The living endpoint at an address.
    at: HashMap<Listener, usize>,
    pub(super) conns: Vec<Conn>,
    circuits: Vec<Circuit>,
    /// The endpoint that has the number of the receive queue of each endpoint now.
    inboxes: Vec<Option<usize>>,
    sent: Vec<Sent>,
    /// Messages that were sent by streams, and may be incomplete.
    streams: HashMap<(usize, usize), Vec<usize>>,
    restarted: Vec<Listener>,
    /// Places of an endpoint and of its peer, and when the first has freed the second, or has
    /// failed its operations.
    left: Vec<([usize; 2], u64)>,
    /// When the endpoint at an address has begun.
    replaced: HashMap<Listener, u64>,
    /// Addresses whose endpoints were killed; those of the others have left.
    killed: HashSet<Listener>,
    chaos: bool,
    /// Listeners of dialler and acceptor, and when requests pass again.
    walls: Vec<(Listener, Listener, u64)>,
    /// All have come to rest, and each endpoint has sent to each other one again.
    again: bool,
    /// Events and actions are printed.
    trace: bool,
}

fn address(number: usize) -> Listener {
    let ip = std::net::Ipv4Addr::new(127, 0, 0, 1);
    Listener::new(ip.into(), 1000 + number as u16).unwrap()
}

/// The number of the endpoints at an address.
fn number_of(listener: Listener) -> usize {
    usize::from(listener.port()) - 1000
}

/// A second address of the same endpoint.
fn other_address(listener: Listener) -> Listener {
    let ip = std::net::Ipv4Addr::new(127, 0, 0, 2);
    Listener::new(ip.into(), listener.port()).unwrap()
}

impl World {
    pub(super) fn new(seed: u64, plan: Plan) -> Self {
        let mut this = Self {
            random: Random(seed),
            plan,
            now: 0,
            count: 0,
            events: BinaryHeap::new(),
            bodies: Vec::new(),
            nodes: Vec::new(),
            at: HashMap::new(),
            conns: Vec::new(),
            circuits: Vec::new(),
            inboxes: Vec::new(),
            sent: Vec::new(),
            streams: HashMap::new(),
            restarted: Vec::new(),
            left: Vec::new(),
            replaced: HashMap::new(),
            killed: HashSet::new(),
            chaos: plan.chaos > 0,
            walls: Vec::new(),
            again: false,
            trace: std::env::var_os("WEFT_RDM_TRACE").is_some(),
        };
        for number in 0..plan.nodes {
            this.start(address(number));
        }
        this
    }

    fn start(&mut self, listener: Listener) {
        let id = EndpointId::new(self.random.next() | 1).unwrap();
        let config = Config {
            id,
            listener,
            auth: 0,
            further: match self.plan.aliases {
                true => vec![other_address(listener)],
                false => Vec::new(),
            },
            application_keys: false,
            circuits: self.plan.circuits,
            device_atomics: false,
            random: Box::new({
                let mut random = Random(self.random.next());
                move || Ok(random.next())
            }),
            eager: 8192,
            dials: 1 + self.random.below(3) as usize,
            peers: 64,
            timeout: match self.plan.stream {
                0 => 10_000 * MS,
                // also while they stream
                stream => stream * MS / 2,
            },
            // also so short that answers are late
            answer: match self.plan.stream {
                0 => [2_000 * MS, 100 * MS, 10 * MS][self.random.below(3) as usize],
                // a request may wait for a place
                _ => 2_000 * MS,
            },
            beat: Some(750 * MS),
            retries: 1_900 * MS,
            idle: match self.plan.frees {
                true => (60_000 * MS, 30_000 * MS),
                false => (u64::MAX, u64::MAX),
            },
            pool: self.plan.pool,
        };
        let hands = Hands {
            actions: Vec::new(),
            random: Random(self.random.next()),
            posted: HashMap::new(),
            sq: 1 + self.random.below(8) as u32,
            chaos: self.chaos,
            used: 0,
            places: self.plan.places,
            rma: self.plan.stream != 0 && self.random.one_in(2),
            up: HashMap::new(),
            rings: HashSet::new(),
            ended: HashSet::new(),
            attached: HashSet::new(),
            circuits: self.plan.circuits,
            on_node: (!self.plan.hidden).then_some(self.plan.on_node),
            one_node: !self.plan.hidden && self.plan.on_node >= self.plan.nodes,
            unmatched: HashSet::new(),
            sent: Vec::new(),
            freed: Vec::new(),
        };
        self.inboxes.push(Some(self.nodes.len()));
        self.at.insert(listener, self.nodes.len());
        self.at.insert(other_address(listener), self.nodes.len());
        self.nodes.push(Node {
            core: Core::new(config),
            hands,
            id,
            listener,
            alive: true,
            links: HashMap::new(),
            inbox: HashMap::new(),
            cq: VecDeque::new(),
            unexpected: VecDeque::new(),
            waits: Vec::new(),
            last: HashMap::new(),
            tick: None,
            kept: Vec::new(),
        });
    }

    fn at(&mut self, time: u64, event: Event) {
        let place = self.bodies.len();
        self.bodies.push(Some(event));
        self.count += 1;
        self.events.push(Reverse((time, self.count, place)));
    }

    fn later(&mut self, event: Event) {
        let delay = self.random.delay();
        self.at(self.now + delay, event);
    }

    /// Calls an endpoint, and does what it asks for.
    fn call(&mut self, node: usize, call: impl FnOnce(&mut Core<Hands>, &mut Hands)) {
        let at = &mut self.nodes[node];
        if !at.alive {
            return;
        }
        at.core.set_now(self.now);
        let rings = match self.plan.rings {
            true => self.rings_of(node),
            false => HashSet::new(),
        };
        let at = &mut self.nodes[node];
        at.hands.rings = rings;
        let unmatched = at.unexpected.iter().map(|(from, ..)| from.peer.number());
        at.hands.unmatched = unmatched.collect();
        call(&mut at.core, &mut at.hands);
        loop {
            let at = &mut self.nodes[node];
            at.core.flush(&mut at.hands);
            for (id, link) in at.hands.sent.drain(..) {
                let message = &mut self.sent[id];
                (message.posted, message.posted_at) = (Some(at.links[&link]), self.now);
            }
            let actions = std::mem::take(&mut at.hands.actions);
            if actions.is_empty() {
                break;
            }
            for action in actions {
                self.act(node, action);
            }
        }
        let at = &mut self.nodes[node];
        let place = number_of(at.listener);
        let freed = at.hands.freed.drain(..);
        self.left
            .extend(freed.map(|peer| ([place, number_of(peer)], self.now)));
        at.core.check();
        at.hands.used = match self.plan.circuits {
            true => at.core.places_taken(&at.hands),
            false => at.core.links.len(),
        };
        assert!(at.hands.used <= at.hands.places);
        let deadline = at.core.deadline();
        if let Some(time) = deadline
            && at.tick.is_none_or(|tick| tick > time)
        {
            at.tick = Some(time);
            self.at(time.max(self.now), Event::Tick(node));
        }
    }

    /// The links on which all that was sent has arrived, and that no side ends.
    fn rings_of(&self, node: usize) -> HashSet<u32> {
        let at = &self.nodes[node];
        let usable = |(number, (conn, side)): (&u32, &(usize, usize))| {
            let it = &self.conns[*conn];
            let idle = at
                .hands
                .posted
                .get(number)
                .is_none_or(|posted| *posted == 0)
                && it.flight[*side].is_empty();
            let lives = self.side(*conn, 1 - *side).is_some() && !it.cut && it.err == [false; 2];
            (idle && lives).then_some(*number)
        };
        at.links.iter().filter_map(usable).collect()
    }

    fn act(&mut self, node: usize, action: Action) {
        if self.trace {
            match &action {
                Action::Post(link, wire) | Action::Ring(link, wire) => {
                    let packet = Packet::decode(&wire.head, wire.total);
                    eprintln!("              {node}: {link:?} {packet:?}");
                }
                action => eprintln!("              {node}: {action:?}"),
            }
        }
        match action {
            Action::Dial(link, to, request) => {
                let conn = self.conns.len();
                self.conns.push(Conn {
                    sides: [Some((node, link)), None],
                    err: [false; 2],
                    cut: false,
                    answered: false,
                    flight: Default::default(),
                    last: [0; 2],
                    acked: [0; 2],
                    request,
                    circuit: [None; 2],
                    bound: [None; 2],
                    under_way: [0; 2],
                    dialler: node,
                    acceptor: None,
                    reply: Vec::new(),
                    held: None,
                });
                self.check_request(conn, link);
                self.nodes[node].hands.attached.insert(link.number());
                self.nodes[node].links.insert(link.number(), (conn, 0));
                if self.plan.circuits {
                    let time = self.now + LINK_REPLY_WAIT;
                    self.at(time, Event::DialFailed(conn, Failure::Silent));
                }
                if !self.plan.circuits || self.plan.stream == 0 {
                    // on circuits too, so that answers are late
                    self.nodes[node].core.requesting(link);
                }
                if self.is_walled(node, to) {
                    // also so late that the dialler gives up before
                    let time = self.now + 500 * MS + self.random.below(4_000 * MS);
                    return self.at(time, Event::DialFailed(conn, Failure::Silent));
                }
                self.message(conn, Event::Request(conn, to));
            }
            Action::Accept(link, conn, reply) => {
                self.check_reply(conn, node, &reply);
                self.conns[conn].held = None;
                self.conns[conn].sides[1] = Some((node, link));
                self.conns[conn].acceptor = Some(node);
                self.nodes[node].links.insert(link.number(), (conn, 1));
                self.conns[conn].accept_on_circuit();
                self.conns[conn].reply.clone_from(&reply);
                self.message(conn, Event::Reply(conn, reply));
                self.nodes[node].core.accepted(link);
            }
            Action::Reject(conn, rejection) => {
                self.conns[conn].held = None;
                self.message(conn, Event::Reject(conn, rejection));
            }
            Action::Post(link, wire) if self.plan.circuits => {
                self.post_on_circuit(node, link, wire);
            }
            Action::Post(link, wire) => {
                let (conn, side) = self.nodes[node].links[&link.number()];
                let delay = self.random.delay();
                let now = self.now;
                let it = &mut self.conns[conn];
                it.flight[side].push_back(wire);
                let time = (now + delay).max(it.last[side]);
                it.last[side] = time;
                self.at(time, Event::Arrive(conn, side));
            }
            Action::Ring(link, wire) => {
                let (conn, side) = self.nodes[node].links[&link.number()];
                self.complete(conn, 1 - side, Completion::Packet(wire));
            }
            Action::RingEnded(link) => {
                let (conn, _) = self.nodes[node].links[&link.number()];
                self.cut(conn);
                let at = &mut self.nodes[node];
                at.core.broken(link, &mut at.hands);
            }
            Action::Probe(link) if self.plan.circuits => self.probe_circuit(node, link),
            Action::Probe(link) => self.probe(node, link),
            Action::NoRoom(link) => self.later(Event::Room(node, link)),
            Action::Introduced(link) if self.plan.circuits => self.greeted(node, link),
            Action::Introduced(_) => {}
            Action::Close(link) => self.close_half(node, link),
            Action::Silence(link) => self.silence_link(node, link),
            Action::End(link) if self.plan.circuits => self.end_half(node, link),
            Action::End(link) => {
                let (conn, side) = self.nodes[node].links[&link.number()];
                self.conns[conn].err[side] = true;
                self.later(Event::Ended(node, link));
                let lost = self.plan.halves && self.random.one_in(3);
                if let Some((other, link)) = self.conns[conn].sides[1 - side]
                    && !lost
                {
                    self.later(Event::Broken(other, link));
                }
            }
            Action::Complete(id, ok) => {
                let message = &mut self.sent[id];
                assert!(message.result.is_none(), "{message:?} completes twice");
                message.result = Some(ok);
                message.ended = self.now;
            }
            Action::Deliver(from, id, uses, rts) => {
                self.arrived(node, id);
                let at = &mut self.nodes[node];
                at.core.give_back(from, Credit::new(0, uses.slots));
                if uses.blocks > 0 {
                    at.unexpected
                        .push_back((from, uses.blocks, rts.then_some(id)));
                    if !self.plan.late {
                        self.later(Event::Match(node));
                    }
                }
            }
            Action::Wait(id) => {
                let waits = &mut self.nodes[node].waits;
                // not if it is repeated
                if self.sent[id].fin.is_none() && !waits.contains(&id) {
                    waits.push(id);
                }
            }
            Action::Fin(id) => {
                assert_eq!(self.sent[id].from, node, "{id}: FIN to another endpoint");
                let fin = self.sent[id].fin.replace(true);
                assert_ne!(fin, Some(true), "{id}: two FINs");
                let at = &mut self.nodes[node];
                if let Some(place) = at.waits.iter().position(|wait| *wait == id) {
                    at.waits.remove(place);
                    at.core.release(self.sent[id].peer, &mut at.hands);
                }
            }
            Action::Failed(peer) => {
                let at = &mut self.nodes[node];
                let (core, sent) = (&at.core, &mut self.sent);
                let peer = core.resolve(peer);
                if let Some(address) = core.address(peer) {
                    let places = [number_of(at.listener), usize::from(address.port()) - 1000];
                    self.left.push((places, self.now));
                }
                at.waits.retain(|id| {
                    let fails = core.resolve(sent[*id].peer) == peer;
                    if fails {
                        sent[*id].fin = Some(false);
                    }
                    !fails
                });
            }
            Action::LoopBack(id) => {
                self.arrived(node, id);
                self.sent[id].result = Some(true);
            }
        }
    }

    /// Whether no request passes from an endpoint to an address.
    fn is_walled(&self, node: usize, to: Listener) -> bool {
        let from = self.nodes[node].listener;
        let now = self.now;
        let walls = &self.walls;
        walls.iter().any(|(dialler, acceptor, until)| {
            *dialler == from && [*acceptor, other_address(*acceptor)].contains(&to) && *until > now
        })
    }

    /// A message of the connection manager, which may get lost.
    fn message(&mut self, conn: usize, event: Event) {
        let losses = self.plan.losses;
        if self.chaos && losses > 0 && self.random.one_in(losses) {
            if !self.plan.circuits && self.random.one_in(4) {
                // nothing reports the loss, and the connection manager repeats the message
                return self.at(self.now + REPEATED, event);
            }
            let delay = 5 * MS + self.random.below(60 * MS);
            let time = self.now + delay;
            self.at(time, Event::DialFailed(conn, Failure::Silent));
            if let Some((acceptor, link)) = self.conns[conn].sides[1]
                && !self.plan.circuits
            {
                let time = time + self.random.below(50 * MS);
                self.at(time, Event::Broken(acceptor, link));
            }
            return;
        }
        self.later(event);
    }

    /// The model of what was delivered.
    fn arrived(&mut self, node: usize, id: usize) {
        let to = self.nodes[node].id;
        let message = &mut self.sent[id];
        assert!(
            message.delivered.is_none(),
            "{id}: {message:?} is delivered twice"
        );
        let meant = message.meant_for.is_none_or(|id| id == to);
        assert!(meant, "{id}: {message:?} reaches another endpoint");
        message.delivered = Some(node);
        if !message.answer {
            let stream = (message.from, message.to);
            let last = self.nodes[node].last.insert(stream, id);
            assert!(
                last.is_none_or(|last| last < id),
                "{id} is delivered behind {last:?}"
            );
        }
    }

    /// The endpoint of a side and its link, if it still exists.
    fn side(&self, conn: usize, side: usize) -> Option<(usize, LinkKey)> {
        let (node, link) = self.conns[conn].sides[side]?;
        self.nodes[node].alive.then_some((node, link))
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Request(conn, to) => {
                let Some(node) = self.at.get(&to).copied().filter(|at| self.nodes[*at].alive)
                else {
                    return self.later(Event::DialFailed(conn, Failure::Refused));
                };
                if self.plan.circuits {
                    return self.request_on_circuit(conn, to, node);
                }
                if self.conns[conn].err[0] || self.conns[conn].cut {
                    // the dialler has given up
                    return;
                }
                let request = std::mem::take(&mut self.conns[conn].request);
                self.call(node, |core, hands| core.requested(conn, &request, hands));
            }
            Event::Reply(conn, reply) => {
                if self.conns[conn].err[0] || self.conns[conn].cut {
                    // the connection manager of the acceptor gives up
                    if let Some((node, link)) = self.side(conn, 1)
                        && !self.plan.circuits
                    {
                        let time = match self.plan.stream {
                            0 => 2_000 * MS,
                            // that of the dialler refuses the reply
                            _ => 10 * MS,
                        };
                        self.at(self.now + time, Event::Broken(node, link));
                    }
                    return;
                }
                self.conns[conn].answered = true;
                if let Some((node, link)) = self.side(conn, 0) {
                    self.call(node, |core, hands| core.replied(link, &reply, hands));
                }
            }
            Event::Reject(conn, rejection) => {
                self.conns[conn].answered = true;
                if let Some((node, link)) = self.side(conn, 0) {
                    self.call(node, |core, hands| core.rejected(link, &rejection, hands));
                }
            }
            // a failure that was planned while the dial was under way is void if it was answered
            Event::DialFailed(conn, _) if self.conns[conn].answered => {}
            Event::DialFailed(conn, failure) => {
                if let Some((node, link)) = self.side(conn, 0) {
                    self.conns[conn].cut = true;
                    self.call(node, |core, hands| core.dial_failed(link, failure, hands));
                }
            }
            Event::Arrive(conn, from) => self.arrive(conn, from),
            Event::Ack(conn, side, number) => {
                let it = &self.conns[conn];
                if !it.cut && !it.err[side] {
                    self.complete(conn, side, Completion::Sent(number));
                } else {
                    self.unacknowledged(conn, side);
                }
            }
            Event::Poll(node, link) => self.poll(node, link),
            Event::Broken(node, link) => {
                self.call(node, |core, hands| core.broken(link, hands));
            }
            Event::Silent(node, link) => {
                self.call(node, |core, hands| core.unacknowledged(link, hands));
            }
            Event::Ended(node, link) => {
                while self.nodes[node]
                    .inbox
                    .get(&link.number())
                    .is_some_and(|it| !it.is_empty())
                {
                    self.poll(node, link);
                }
                let at = &mut self.nodes[node];
                if let Some((conn, side)) = at.links.remove(&link.number()) {
                    at.hands.posted.remove(&link.number());
                    at.hands.ended.remove(&link.number());
                    self.conns[conn].sides[side] = None;
                    self.call(node, |core, hands| core.ended(link, hands));
                }
            }
            Event::Room(node, link) => {
                self.call(node, |core, hands| core.has_room(link, hands));
            }
            Event::Tick(node) => {
                self.nodes[node].tick = None;
                self.call(node, |core, hands| core.tick(hands));
            }
            Event::Match(node) => {
                if let Some((from, blocks, rts)) = self.nodes[node].unexpected.pop_front() {
                    let credit = Credit::new(blocks, 0);
                    self.call(node, |core, hands| {
                        core.give_back(from, credit);
                        if let Some(id) = rts {
                            let op = Op {
                                id,
                                len: 0,
                                ack: false,
                                answer: true,
                                fin: true,
                            };
                            // no answer if the sender's session has ended
                            let _ = core.answer(from, op, hands);
                        }
                    });
                }
            }
            Event::Send(from, to) => self.send(from, to),
            Event::Stream(from, to) => self.stream(from, to),
            Event::Chaos => self.disturb(),
            Event::Left(listener) => self.left(listener),
            Event::OnCircuit(event) => self.step_on_circuit(event),
        }
    }

    fn arrive(&mut self, conn: usize, from: usize) {
        let it = &mut self.conns[conn];
        let Some(wire) = it.flight[from].pop_front() else {
            return;
        };
        if it.cut || it.err[1 - from] || it.sides[1 - from].is_none() {
            return self.unacknowledged(conn, from);
        }
        if let Some(number) = wire.number {
            let time = (self.now + self.random.delay()).max(it.acked[from]);
            it.acked[from] = time;
            self.at(time, Event::Ack(conn, from, number));
        }
        self.complete(conn, 1 - from, Completion::Packet(wire));
    }

    /// A request of one side has reached nothing: its device gives up.
    fn unacknowledged(&mut self, conn: usize, from: usize) {
        if self.plan.halves
            && let Some((node, link)) = self.conns[conn].sides[from]
        {
            let delay = 100 * MS + self.random.below(900 * MS);
            self.at(self.now + delay, Event::Silent(node, link));
        }
    }

    fn probe(&mut self, node: usize, link: LinkKey) {
        let (conn, side) = self.nodes[node].links[&link.number()];
        let it = &self.conns[conn];
        if it.cut || it.err[1 - side] || it.sides[1 - side].is_none() {
            self.unacknowledged(conn, side);
        }
    }

    fn complete(&mut self, conn: usize, side: usize, completion: Completion) {
        if let Some((node, link)) = self.side(conn, side) {
            let inbox = self.nodes[node].inbox.entry(link.number()).or_default();
            inbox.push_back(completion);
            self.later(Event::Poll(node, link));
        }
    }

    fn poll(&mut self, node: usize, link: LinkKey) {
        let inbox = self.nodes[node].inbox.get_mut(&link.number());
        match inbox.and_then(VecDeque::pop_front) {
            Some(Completion::Packet(wire)) => {
                let packet = Packet::decode(&wire.head, wire.total).expect("a packet");
                self.call(node, |core, hands| {
                    if let Body::Eager { message, payload } = packet.body
                        && !message.ack
                        && hands.random.one_in(2)
                    {
                        let id = message.tag.unwrap() as usize;
                        let next = Some((packet.header, payload.len, id));
                        let uses = packet.body.uses();
                        let mut only = OneArrival { next, uses, hands };
                        core.arrived_direct(link, &mut only);
                        if only.next.is_none() {
                            let half = core.direct_from(link).is_none_or(|it| it.is_half_used());
                            if half || hands.random.one_in(2) {
                                core.end_direct(link);
                            }
                            return;
                        }
                    }
                    core.arrived(link, &packet, (), hands);
                });
            }
            Some(Completion::Sent(number)) => {
                if let Some(posted) = self.nodes[node].hands.posted.get_mut(&link.number()) {
                    *posted -= 1;
                }
                self.call(node, |core, hands| core.sent(link, number, hands));
            }
            None => {}
        }
    }

    /// The endpoint at place `from` sends to the one at `to`, unless many of its messages are not
    /// complete; soon it does so again.
    fn stream(&mut self, from: usize, to: usize) {
        let sent = &self.sent;
        let mut under_way = self.streams.remove(&(from, to)).unwrap_or_default();
        under_way.retain(|id| sent[*id].result.is_none());
        if under_way.len() < STREAMED {
            under_way.push(self.sent.len());
            self.send(from, to);
        }
        self.streams.insert((from, to), under_way);
        if self.now < self.plan.stream * MS {
            let next = self.now + self.random.below(4 * MS);
            self.at(next, Event::Stream(from, to));
        }
    }

    /// The endpoint at place `from` of the plan sends to the one at `to`.
    fn send(&mut self, from: usize, to: usize) {
        let from = self.at[&address(from)];
        let mut to = address(to);
        if self.plan.aliases && self.random.one_in(3) {
            to = other_address(to);
        }
        let id = self.sent.len();
        let len = match self.random.below(8) {
            0 => self.random.below(9000),
            1 => 8192,
            2 => self.random.below(1 << 20),
            _ => self.random.below(200),
        };
        let answer = self.random.one_in(8);
        let op = Op {
            id,
            len: len as u32,
            ack: !answer && self.random.one_in(4),
            answer,
            fin: false,
        };
        let uses = if answer {
            Uses::Answer
        } else {
            Uses::Message(len)
        };
        let peer = self.nodes[from].core.peer_at(to).unwrap();
        if self.plan.frees {
            self.name_or_forget(from, peer);
        }
        self.sent.push(Sent {
            from,
            to,
            answer,
            meant_for: self.nodes[from].core.session(peer),
            result: None,
            ended: 0,
            posted: None,
            posted_at: self.now,
            delivered: None,
            must: self.again,
            peer,
            fin: None,
        });
        let send = SendOp {
            op,
            uses,
            ack: op.ack,
        };
        self.call(from, |core, hands| {
            let peer = core.resolve(peer);
            if !answer && !op.ack && hands.direct(core, peer, op) {
                return;
            }
            core.send(peer, send, hands).unwrap();
        });
    }

    fn evict_all(&mut self) {
        for node in 0..self.nodes.len() {
            let peers: Vec<_> = self.nodes[node].core.peer_keys().collect();
            for peer in peers {
                self.call(node, |core, hands| {
                    core.evict(peer, hands);
                });
            }
        }
    }

    /// A peer gets a name, or another one loses its name.
    fn name_or_forget(&mut self, node: usize, peer: PeerKey) {
        let (name, forget) = (self.random.one_in(3), self.random.one_in(3));
        let kept = &mut self.nodes[node].kept;
        let forgotten = kept.pop_if(|_| forget);
        if name {
            kept.push(peer);
        }
        self.call(node, |core, _| {
            forgotten.into_iter().for_each(|peer| core.unkeep(peer));
            if name {
                core.keep(peer);
            }
        });
    }

    /// Nothing names a peer any more: all are freed that have no link. An idle link may exist at
    /// one side alone.
    fn free_all(&mut self) {
        for node in 0..self.nodes.len() {
            let kept = std::mem::take(&mut self.nodes[node].kept);
            self.call(node, |core, _| {
                kept.into_iter().for_each(|peer| core.unkeep(peer))
            });
        }
        for _ in 0..4 {
            self.evict_all();
            self.rest(0);
        }
        for (place, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
            if node.core.link_count() == 0 && node.core.unfreed() != 0 {
                node.core.print();
                panic!("{place}: {} peers are not freed", node.core.unfreed());
            }
        }
    }

    fn disturb(&mut self) {
        let choice = self.random.below(10);
        if choice == 0 && self.plan.restarts {
            let place = self.random.below(self.plan.nodes as u64) as usize;
            if self.plan.circuits && self.random.one_in(2) {
                return self.leave(address(place));
            }
            self.killed.insert(address(place));
            return self.restart(address(place));
        }
        if choice < 3 && self.plan.evictions {
            return self.evict_all();
        }
        if choice < 6 && self.plan.walls {
            return self.wall();
        }
        if self.plan.circuits {
            return self.break_circuit();
        }
        // one of the newest connections
        let newest = self.conns.len().min(4) as u64;
        if newest == 0 {
            return;
        }
        let conn = self.conns.len() - 1 - self.random.below(newest) as usize;
        self.cut(conn);
    }

    /// Requests from one endpoint to another one get lost, and their links break.
    fn wall(&mut self) {
        let nodes = self.plan.nodes as u64;
        let from = self.random.below(nodes) as usize;
        let to = (from + 1 + self.random.below(nodes - 1) as usize) % self.plan.nodes;
        let until = self.now + self.random.below(30_000 * MS);
        let ends = [address(from), address(to)];
        self.walls.push((ends[0], ends[1], until));
        if self.plan.circuits {
            let ends = ends.map(|end| self.at[&end]);
            return self.break_circuits_between(ends);
        }
        for conn in 0..self.conns.len() {
            let sides = self.conns[conn].sides;
            let on = |side: Option<(usize, LinkKey)>| {
                side.is_some_and(|(node, _)| ends.contains(&self.nodes[node].listener))
            };
            if on(sides[0]) && (on(sides[1]) || sides[1].is_none()) {
                self.cut(conn);
            }
        }
    }

    /// Breaks a link: what is in flight is lost, and each side notices at another time: by a
    /// request that is not acknowledged, or by the disconnect of the connection.
    fn cut(&mut self, conn: usize) {
        self.conns[conn].cut = true;
        let dialled = self.conns[conn].sides[1].is_none();
        if dialled {
            return self.later(Event::DialFailed(conn, Failure::Silent));
        }
        let unaware = match self.plan.halves {
            true => self.random.below(4) as usize,
            false => 2,
        };
        for side in (0..2).filter(|side| *side != unaware) {
            if let Some((node, link)) = self.conns[conn].sides[side] {
                let posted = &self.nodes[node].hands.posted;
                let silent = posted.get(&link.number()).is_some_and(|it| *it > 0);
                self.later(match silent {
                    true => Event::Silent(node, link),
                    false => Event::Broken(node, link),
                });
            }
        }
        // an own link whose reply is lost
        self.later(Event::DialFailed(conn, Failure::Silent));
    }

    fn restart(&mut self, listener: Listener) {
        self.replaced.insert(listener, self.now);
        let old = self.at[&listener];
        self.nodes[old].alive = false;
        self.restarted.push(listener);
        for conn in 0..self.conns.len() {
            let sides = self.conns[conn].sides;
            if self.plan.circuits {
                break;
            }
            if sides.iter().flatten().any(|(node, _)| *node == old) {
                self.cut(conn);
            }
        }
        // requests that it holds
        for conn in 0..self.conns.len() {
            if self.conns[conn].sides[1].is_none() {
                let time = self.now + 100 * MS;
                self.at(time, Event::DialFailed(conn, Failure::Silent));
            }
        }
        self.start(listener);
        if self.plan.circuits {
            self.replace_on_circuits(old, self.nodes.len() - 1);
        }
    }

    /// A request for a link on a circuit, which may arrive twice.
    fn request_on_circuit(&mut self, conn: usize, to: Listener, node: usize) {
        if self.chaos && self.random.one_in(6) {
            self.later(Event::Request(conn, to));
        }
        if self.conns[conn].held == Some(node) {
            // the connection manager drops a repetition of what it has not answered
            return;
        }
        let reply = self.conns[conn].reply.clone();
        let replied = self.conns[conn].sides[1].is_some_and(|(at, link)| {
            at == node && !self.conns[conn].err[1] && self.nodes[at].core.peer_of(link).is_some()
        });
        if replied {
            return self.message(conn, Event::Reply(conn, reply));
        }
        if !reply.is_empty() {
            // STALE, or a link of a successor with a tag of its own, which gets no HELLO
            return;
        }
        if self.conns[conn].sides[0].is_none() || !self.leads_to(conn, node) {
            return self.later(Event::DialFailed(conn, Failure::Silent));
        }
        let request = self.conns[conn].request.clone();
        self.conns[conn].held = Some(node);
        self.call(node, |core, hands| core.requested(conn, &request, hands));
    }

    pub(super) fn run(&mut self) {
        let plan = self.plan;
        let busy = (1 + self.random.below(100)) * MS;
        for _ in 0..plan.sends {
            let from = match plan.one_way {
                true => 0,
                false => self.random.below(plan.nodes as u64) as usize,
            };
            let other = match plan.aliases && self.random.one_in(20) {
                true => 0,
                false => 1 + self.random.below(plan.nodes as u64 - 1) as usize,
            };
            let to = (from + other) % plan.nodes;
            // many at the begin, so that both sides dial
            let time = match self.random.one_in(3) {
                true => 0,
                false => self.random.below(busy),
            };
            self.at(time, Event::Send(from, to));
        }
        for from in (0..plan.nodes).filter(|_| plan.stream != 0) {
            for to in (0..plan.nodes).filter(|to| *to != from) {
                self.at(0, Event::Stream(from, to));
            }
        }
        for _ in 0..plan.chaos {
            let time = self.random.below(busy + 100 * MS);
            self.at(time, Event::Chaos);
        }
        if plan.circuits && plan.restarts {
            // some notice late that the endpoint at an address is another one
            for _ in 0..plan.sends / 2 {
                let from = self.random.below(plan.nodes as u64) as usize;
                let other = 1 + self.random.below(plan.nodes as u64 - 1) as usize;
                let time = busy + self.random.below(2_000 * MS);
                self.at(time, Event::Send(from, (from + other) % plan.nodes));
            }
        }
        self.rest(busy + 100 * MS);
        for _ in 0..usize::from(plan.walls) + 2 * usize::from(plan.frees) {
            // each side may have given up; now nothing hinders them
            self.again = true;
            self.now += 60_000 * MS;
            for from in 0..plan.nodes {
                for to in (0..plan.nodes).filter(|to| *to != from) {
                    self.later(Event::Send(from, to));
                }
            }
            self.rest(0);
        }
        self.check();
        if plan.frees {
            self.free_all();
        }
    }

    /// Runs until nothing happens any more, undisturbed after the time `calm`.
    fn rest(&mut self, calm: u64) {
        let mut steps = 0;
        while let Some(Reverse((time, _, place))) = self.events.pop() {
            self.now = time;
            steps += 1;
            if steps == 400_000 + 1_000 * self.plan.stream {
                self.nodes.iter().for_each(|node| node.core.print());
                panic!("the network does not come to rest");
            }
            if time > calm && self.chaos {
                self.chaos = false;
                for node in &mut self.nodes {
                    node.hands.chaos = false;
                }
            }
            let event = self.bodies[place].take().expect("each event once");
            if self.trace {
                eprintln!("{:9} us {event:?}", time / US);
            }
            self.step(event);
            let ticks = |it: &Reverse<(u64, u64, usize)>| {
                matches!(self.bodies[it.0.2], Some(Event::Tick(_)))
            };
            if self.events.iter().all(ticks) {
                // late receives
                for node in 0..self.nodes.len() {
                    for _ in 0..self.nodes[node].unexpected.len().min(3) {
                        self.later(Event::Match(node));
                    }
                }
            }
        }
    }

    /// Whether a message was posted when its sender had to know that its former peer has ended: an
    /// earlier one has met the successor, and got lost.
    fn is_behind_replacement(&self, message: &Sent) -> bool {
        let place = |to: Listener| usize::from(to.port()) - 1000;
        let original = address(place(message.to));
        let Some(begin) = self.replaced.get(&original) else {
            return true;
        };
        let lost = self.sent.iter().filter(|it| {
            let same = it.from == message.from && address(place(it.to)) == original;
            same && it.posted_at > *begin && it.result == Some(true) && it.delivered.is_none()
        });
        let first = lost.map(|it| it.posted_at).min();
        first.is_some_and(|first| message.posted_at > first + 300 * MS)
    }

    /// Whether a message may fail because it was posted to a link that the other side had ended,
    /// unnoticed by its sender, and whose session that side has freed or ended. One that was never
    /// posted waits for the next session.
    fn is_of_half_open_link(&self, message: &Sent) -> bool {
        let from = number_of(self.nodes[message.from].listener);
        let places = [number_of(message.to), from];
        let left = |it: &([usize; 2], u64)| it.0 == places && it.1 <= message.ended;
        message.posted.is_some() && self.left.iter().any(left)
    }

    /// The endpoint to which a message was posted last.
    fn posted_to(&self, message: &Sent) -> Option<usize> {
        let (conn, side) = message.posted?;
        let conn = &self.conns[conn];
        match side {
            0 => conn.acceptor,
            _ => Some(conn.dialler),
        }
    }

    fn check(&self) {
        for (id, message) in self.sent.iter().enumerate() {
            if !self.nodes[message.from].alive {
                continue;
            }
            let Some(ok) = message.result else {
                for (place, node) in self.nodes.iter().enumerate() {
                    eprintln!("endpoint {place}, alive: {}", node.alive);
                    node.core.print();
                }
                panic!("{id}: {message:?} does not complete");
            };
            // an announced one fails with the operations of its peer
            let ok = ok && message.fin != Some(false);
            let original = address(usize::from(message.to.port()) - 1000);
            // an answer ends with its session
            let half_open = self.plan.halves || self.plan.circuits;
            let freed = message.answer || half_open && self.is_of_half_open_link(message);
            let freed = self.plan.frees && freed;
            let may_fail = !self.restarted.is_empty() || self.plan.walls || freed;
            // a session with a process that has ended fails when its end is noticed; answers end
            // with their session, and so do packets that were posted to a link that is broken
            let lives = |id| self.nodes.iter().any(|node| node.alive && node.id == id);
            // of two addresses of one endpoint, one may still have the token of the ended session
            let may_fail_late = message.answer || self.plan.halves || self.plan.aliases;
            // also if the address was in doubt, and there was a link still
            let dead = |node: usize| !self.nodes[node].alive;
            let may_fail_late = may_fail_late || self.posted_to(message).is_some_and(dead);
            let must =
                message.must && !may_fail_late && !freed && message.meant_for.is_none_or(lives);
            assert!(ok || !must, "{id}: {message:?} fails at the end");
            let late = !self.killed.contains(&original) || self.is_behind_replacement(message);
            if ok && late {
                assert!(message.delivered.is_some(), "{id}: {message:?} is lost");
            }
            assert!(ok || may_fail, "{id}: {message:?} fails without reason");
        }
        for (place, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
            assert!(node.unexpected.is_empty());
            assert_eq!(node.waits, [0; 0], "{place}: no FIN");
            for peer in node.core.peer_keys() {
                let Some(report) = node.core.audit(peer) else {
                    continue;
                };
                assert_eq!(report.stored, Credit::ZERO, "{place}: credit is lost");
                let other = self
                    .nodes
                    .iter()
                    .find(|it| it.alive && Some(it.id) == report.id);
                let Some(other) = other else { continue };
                let back = other.core.peer_keys().find_map(|peer| {
                    let back = other.core.audit(peer)?;
                    (back.id == Some(node.id)).then_some(back)
                });
                if let Some(back) = back.filter(|back| back.up && report.up) {
                    assert_eq!(back.spent, report.used, "{place}: positions differ");
                    assert_eq!(back.next, report.expected, "{place}: numbers differ");
                    let granted = report.granted.unwrap_or(back.grant);
                    assert_eq!(back.grant, granted, "{place}: grants differ");
                }
            }
        }
    }
}
