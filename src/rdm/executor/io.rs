//! The calls of the [`Core`](crate::rdm::core::Core): what it decides is done here.

use std::net::IpAddr;

use super::handshake::address_of;
use super::{Executor, PacketMemoryRef, Todo};
use crate::errno::{FiErrno, Result};
use crate::log::warn_log;
use crate::rdm::core::link::LinkKey;
use crate::rdm::core::ops::Form;
use crate::rdm::core::peer::PeerKey;
use crate::rdm::core::recover::Unposted;
use crate::rdm::core::{Io, Origin, Post};
use crate::rdm::link::block::LinkBlock;
use crate::rdm::link::cm::LinkCm;
use crate::rdm::link::links::LinkRecord;
use crate::rdm::long::streams::Asked;
use crate::rdm::operations::{Atomic, Kind, Operation};
use crate::rdm::receives::{AtSender, Envelope, Payload};
use crate::rdm::rma::RmaOp;
use crate::rdm::step::Step;
use crate::rdm::table_keys::TxKey;
use crate::rdm::xrc::circuit_cm::{Held, XrcStep};
use crate::verbs::{RemoteAddr, Rkey};
use crate::wire::rdm::packet::RTS_CREDIT;
use crate::wire::rdm::{
    Body, Credit, Header, Listener, Packet, Reason, Rejection, Reply, Request, Terms,
};

/// RMA of so many bytes completes within some seconds, or parts of it do.
const SOON: usize = 16 << 20;

impl Io for Executor {
    type Op = TxKey;
    type Held = Held;
    type Slot = PacketMemoryRef;

    fn now(&self) -> Option<u64> {
        Some(self.endpoint.upgrade()?.now())
    }

    fn dial(&mut self, link: LinkKey, to: Listener, request: &Request) {
        if self.xrc.is_some() {
            return self.dial_on_circuit(link, to, request);
        }
        let cm = LinkCm::new(self.link_endpoint(), link, Some(request.encode()));
        self.add_link(link, Some(&cm), None);
        self.steps.push(Step::Dial(cm, to.socket_addr()));
    }

    fn has_place(&mut self) -> bool {
        match &self.xrc {
            None => self.links.len() < self.max_links,
            // the core counts them
            Some(_) => true,
        }
    }

    fn places(&self) -> usize {
        self.max_links
    }

    fn is_quiet(&mut self, link: LinkKey) -> bool {
        let under_way = |op: &RmaOp| op.link == Some(link) && op.parts != 0;
        let reads = |record: &mut LinkRecord| match record.port.as_ref() {
            None => record.reads() != 0,
            // requests for keys too: one that the peer refuses would end the circuit of others
            Some(port) => {
                let block = record.block.as_ref();
                port.reads != 0 || block.is_some_and(|block| block.poster.has_requests())
            }
        };
        let reads = self.links.get_mut(link).is_some_and(reads);
        !reads && !self.rma.ops.any(under_way)
    }

    fn has_completed(&mut self, link: LinkKey) -> bool {
        let record = self.links.get_mut(link);
        record.is_none_or(|record| !record.is_under_way())
    }

    fn node_at(&self, address: Listener) -> Option<(IpAddr, u64)> {
        let node = self.xrc.as_ref()?.circuits.node(address)?;
        Some((address.socket_addr().ip(), node.get()))
    }

    fn node_of(&self, link: LinkKey, peer: Option<Listener>) -> Option<(IpAddr, u64)> {
        let xrc = self.xrc.as_ref()?;
        let Some(port) = self.links.get(link).and_then(|record| record.port.as_ref()) else {
            return self.node_at(peer?);
        };
        let up = port.circuit.and_then(|circuit| xrc.circuits.get(circuit));
        match up {
            Some(circuit) => Some((port.address.socket_addr().ip(), circuit.node.get())),
            None => self.node_at(port.address),
        }
    }

    fn source_of(&self, held: &Held, request: &Request) -> Listener {
        match held {
            Held::Connect(_) => request.listener,
            Held::Link(held, _) => address_of(held, request.listener),
        }
    }

    fn host_of(&self, held: &Held, request: &Request) -> IpAddr {
        let (Held::Connect(held) | Held::Link(held, _)) = held;
        address_of(held, request.listener).socket_addr().ip()
    }

    fn has_one_node(&self) -> bool {
        let xrc = self.xrc.as_ref();
        xrc.is_some_and(|xrc| xrc.circuits.has_one_node())
    }

    fn accept(&mut self, link: LinkKey, held: Held, reply: &Reply, peer: Option<Listener>) {
        let held = match held {
            Held::Connect(held) => held,
            Held::Link(held, request) => {
                return self.accept_on_circuit(link, held, (&request, peer), reply);
            }
        };
        let cm = LinkCm::new(self.link_endpoint(), link, None);
        self.add_link(link, Some(&cm), None);
        self.steps.push(Step::Accept(cm, held, *reply));
    }

    fn reject(&mut self, held: Held, rejection: &Rejection) {
        match held {
            Held::Connect(held) => {
                if rejection.reason == Reason::Transport {
                    warn_log!(
                        EpCtrl,
                        "{:?} has FI_PROTO_RDMA_CM_IB_XRC, this endpoint FI_PROTO_IB_RDM: rejected",
                        held.peer_addr()
                    );
                }
                let private_data = rejection.encode().to_vec();
                self.steps.push(Step::Reject(held, private_data));
            }
            Held::Link(held, _) => self.reject_link(held, rejection),
        }
    }

    fn is_later(&self, op: TxKey, than: TxKey) -> bool {
        let order = |key| self.tx.get(key).map_or(0, |op| op.order);
        order(op) > order(than)
    }

    #[inline]
    fn post(&mut self, link: LinkKey, header: Header, op: TxKey, form: Form) -> Post {
        if self.waits_for_rma(link, op) {
            return Post::Refused;
        }
        if let Some(post) = self.post_to_ring(link, header, op, form) {
            return post;
        }
        match self.post_packet(link, header, op, form) {
            Some(()) => {
                if self.xrc.as_mut().is_some_and(|xrc| xrc.take_look()) {
                    self.begin_watch();
                }
                Post::Posted
            }
            None => Post::Refused,
        }
    }

    fn control(&mut self, link: LinkKey, packet: &Packet) -> bool {
        self.post_control(link, packet).is_some()
    }

    fn end(&mut self, link: LinkKey) {
        if self.xrc.is_some() {
            return self.end_on_circuit(link);
        }
        if let Some((cm, qp)) = self.links.begin_end(link) {
            self.steps.push(Step::End(cm, qp));
        }
    }

    fn close(&mut self, link: LinkKey) {
        self.links.close_half(link);
        self.xrc_step(XrcStep::Look);
    }

    fn departs(&mut self, link: LinkKey) {
        self.departs_on_circuit(link);
    }

    fn silence(&mut self, link: LinkKey) {
        self.silence_on_circuit(link);
    }

    #[inline]
    fn complete(&mut self, key: TxKey, result: Result<()>) {
        let Some(op) = self.tx.get_mut(key) else {
            return;
        };
        op.in_core = false;
        match op.kind {
            Kind::Message => match result {
                Ok(()) if op.form == Form::Whole && op.parts == 0 => self.finish(key, Ok(())),
                Err(error) if op.fin.is_none() => self.finish(key, Err(error)),
                _ => self.finish_if_over(key),
            },
            Kind::Data { of, .. } => {
                self.finish(key, result);
                if let Some(op) = self.tx.get_mut(of) {
                    op.parts -= 1;
                }
                self.finish_if_over(of);
                if result.is_ok() {
                    self.continue_parts(of);
                }
            }
            Kind::Notice { of, .. } => {
                self.finish(key, result);
                self.notice_ended(of, result);
            }
            Kind::Atomic(_) => match result {
                Err(error) if op.fin.is_none() => self.finish(key, Err(error)),
                _ => self.finish_if_over(key),
            },
            Kind::Cts { .. }
            | Kind::Push { .. }
            | Kind::Pushed { .. }
            | Kind::Fin { .. }
            | Kind::Result { .. } => self.finish(key, result),
        }
    }

    #[cold]
    fn keep_packet(&mut self, key: TxKey) {
        if let Some(op) = self.tx.get_mut(key)
            && let Some(record) = op.posted_on.and_then(|link| self.links.get_mut(link))
            && let Some(slot) = op.slot.take()
        {
            record.keep_until_removed(slot);
        }
    }

    #[inline]
    fn deliver(&mut self, origin: Origin, packet: &Packet, slot: PacketMemoryRef) -> Credit {
        let mut credit = Credit::new(0, 1);
        let envelope = |message: &crate::wire::rdm::packet::Message, len| Envelope {
            peer: origin.peer,
            tag: message.tag,
            data: message.data,
            len,
        };
        match &packet.body {
            Body::Eager { message, payload } => {
                let envelope = envelope(message, payload.len.into());
                if matches!(slot, PacketMemoryRef::Slot(_)) {
                    self.overflows(payload.len as usize);
                }
                credit = self.eager(origin, &envelope, &slot, payload.offset);
            }
            Body::Rts {
                message,
                op,
                addr,
                len,
                rkey,
            } => {
                let envelope = envelope(message, *len);
                let at = AtSender {
                    op: *op,
                    addr: *addr,
                    rkey: *rkey,
                    link: self.arriving,
                };
                match self.rx.arrive(&envelope) {
                    Some(target) => self.begin_arrival(origin, at, envelope, target),
                    None => {
                        let payload = Payload::AtSender(origin, at);
                        if !self.store(&envelope, payload) {
                            credit = RTS_CREDIT;
                            self.todo.push_back(Todo::Dropped(origin));
                        }
                    }
                }
            }
            Body::Data {
                op,
                offset,
                payload,
            } => {
                let place = (payload.offset, payload.len as usize);
                self.data(origin, *op, *offset, &slot, place);
            }
            Body::Cts { op, receiver } => {
                credit = Credit::ZERO;
                // an unknown operation may have failed before the answer arrived
                let _ = self.cts(origin, TxKey::from_number(op.get()), *receiver);
            }
            Body::Fin { op, status } => {
                credit = Credit::ZERO;
                self.fin(origin, TxKey::from_number(op.get()), *status);
            }
            Body::Push {
                op,
                offset,
                addr,
                rkey,
                receiver,
            } => {
                credit = Credit::ZERO;
                if let Some(link) = self.arriving {
                    self.push(Asked {
                        origin,
                        link,
                        op: TxKey::from_number(op.get()),
                        receiver: *receiver,
                        to: (*addr, *rkey),
                        offset: *offset,
                    });
                }
            }
            Body::Pushed { op, written } => {
                self.pushed(origin, *op, *written);
            }
            // the capabilities permit no entry for it
            Body::Notice { .. } if !self.accepts.data => credit = Credit::new(1, 1),
            Body::Notice { data, len, .. } => credit = self.noticed(origin, *data, *len),
            Body::Atomic {
                op,
                addr,
                key,
                operator,
                datatype,
                count,
                fetches,
                last,
                operands,
            } => {
                let atomic = Atomic {
                    addr: *addr,
                    key: *key,
                    operator: *operator,
                    datatype: *datatype,
                    count: *count,
                    fetches: *fetches,
                    ranged: false,
                    last: *last,
                };
                credit = Credit::ZERO;
                self.atomic(origin, *op, &atomic, (&slot, *operands));
            }
            Body::Result { op, status, values } => {
                credit = Credit::ZERO;
                let key = TxKey::from_number(op.get());
                self.result(origin, key, *status, (&slot, *values));
            }
            _ => self.todo.extend(self.arriving.map(Todo::Violated)),
        }
        self.free(slot);
        credit
    }

    #[inline]
    fn discard(&mut self, slot: PacketMemoryRef) {
        self.free(slot);
    }

    fn fail_peer(&mut self, peer: PeerKey, error: FiErrno, waiting: Unposted) -> u32 {
        let of_peer = |op: &Operation| op.peer == peer && !op.in_core;
        let messages = |op: &Operation| op.is_of_application() && of_peer(op);
        for key in self.tx.keys_where(messages) {
            match self.tx.get(key).and_then(|op| op.fin) {
                None => self.finish(key, Err(error)),
                // the peer has answered it, so its result is known
                Some(_) => self.finish_if_over(key),
            }
        }
        self.pulls.forget_peer(peer);
        self.streams.forget_peer(peer);
        self.paces.forget_peer(peer);
        for key in self.rx.arrivals.keys_where(|it| it.origin.peer == peer) {
            if self.end_pull(key) {
                self.fail_arrival(key, false);
            }
        }
        if let Some((origin, count)) = self.rx.drop_absent(peer) {
            let blocks = Credit::new(count * RTS_CREDIT.blocks, 0);
            self.todo.push_back(Todo::GiveBack(origin, blocks));
        }
        self.rma_failed(peer, error, waiting)
    }

    /// That of a link that is accepted is created with its queue pair, and added to the reply
    /// (`link/cm.rs`).
    fn block(&mut self, _: PeerKey, link: LinkKey) -> (RemoteAddr, Rkey) {
        let record = self.links.get_mut(link);
        let block = record.and_then(|record| record.block.as_ref());
        block.map_or((RemoteAddr::NULL, Rkey::default()), LinkBlock::block)
    }

    fn introduced(&mut self, link: LinkKey, terms: &Terms) {
        self.open_outlet(link);
        self.introduce(link, terms);
        if self.xrc.is_some() {
            self.greeted_on_circuit(link);
        }
    }

    fn up(&mut self, peer: PeerKey, link: LinkKey, terms: &Terms) {
        self.hold_own_requests(link, false);
        self.rma_up(peer, link, terms);
        if self.pulls.has_waiting(peer) {
            self.todo.push_back(Todo::Pull(peer));
        }
    }

    fn down(&mut self, _: PeerKey, link: LinkKey) {
        let on_circuit = self.xrc.is_some();
        if let Some(record) = self.links.get_mut(link) {
            record.down = on_circuit;
        }
    }

    fn hold_own_requests(&mut self, link: LinkKey, holds: bool) {
        let Some(record) = self.links.get_open(link) else {
            return;
        };
        let held = std::mem::replace(&mut record.down, holds);
        match &record.block {
            Some(block) if holds => block.poster.shut(),
            _ if held && !holds => self.open_outlet(link),
            _ => {}
        }
    }

    fn probe(&mut self, key: LinkKey) -> bool {
        let long = |op: &RmaOp| op.link == Some(key) && op.len() > SOON;
        match (self.links.get_mut(key), &mut self.xrc) {
            (Some(link), None) => {
                link.probe();
                link.stands() && !self.rma.ops.any(long)
            }
            (Some(link), Some(xrc)) => {
                xrc.probe(link);
                false
            }
            (None, _) => false,
        }
    }

    fn loop_back(&mut self, op: TxKey) {
        if let Some(op) = self.tx.get_mut(op) {
            // the core has it no more
            op.in_core = false;
        }
        self.todo.push_back(Todo::LoopBack(op));
    }

    fn alias(&mut self, peer: PeerKey, of: Option<PeerKey>) {
        let Some(of) = of else {
            return self.todo.push_back(Todo::RunRma);
        };
        for key in self.tx.keys_where(|op| op.peer == peer) {
            if let Some(op) = self.tx.get_mut(key) {
                op.peer = of;
            }
        }
        self.rma.merge(peer, of);
        let (own, others) = self.rx.merge(peer, of);
        for (stored, target) in own {
            self.deliver_stored(stored, target);
        }
        self.found_for_others |= others;
    }

    fn free(&mut self, peers: &mut Vec<(PeerKey, Option<Listener>)>) {
        self.free_peers(peers);
    }
}
