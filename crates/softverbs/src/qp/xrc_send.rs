//! Where the requests of an XRC send queue pair go: through a target to the shared receive queue that each of them names.
//!
//! Both together are a [`Connection`] as any other, whose state is in the target's domain and whose receives are in the
//! queue's owner. The queue pair remembers one for each of the last queues that it sent to.

use std::sync::atomic::Ordering;

use rdma_core_sys::{IBV_EVENT_QP_FATAL, IBV_QPS_ERR, IBV_QPS_RESET, IBV_WC_RETRY_EXC_ERR};

use super::conn::{Connection, Delivery, Unreachable, receives};
use super::{Qp, SendQueue};
use crate::peer::Peer;
use crate::segment::layout::{Fault, StateWord, qp as layout, srq, xrc};
use crate::signal;
use crate::srq::{Shared, split_srq_num};
use crate::sync::Arc;
use crate::sys::{Res, list};
use crate::xrc::Domain;

/// Destinations that are remembered; a power of two.
const REMEMBERED: usize = 64;

/// What a send queue of XRC has besides.
#[derive(Debug)]
pub(super) struct Route {
    /// The target's domain, once it is known, and where its entry is there.
    target: Option<(Arc<Domain>, usize)>,
    /// Other destinations than the present one, each at its number's place.
    others: Box<[Option<Connection>]>,
}

impl Route {
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn new() -> Res<Self> {
        Ok(Self {
            target: None,
            others: list(REMEMBERED, |_| None)?,
        })
    }

    pub(super) fn forget(&mut self) {
        self.target = None;
        self.forget_destinations();
    }

    fn forget_destinations(&mut self) {
        self.others.fill_with(|| None);
    }
}

fn place(number: u32) -> usize {
    // Slots differ in their upper bits, and their first queues in none of the lower.
    (number ^ number >> 14) as usize % REMEMBERED
}

impl Qp {
    /// As [`Self::reach`], for a request to the shared receive queue of this number.
    #[inline]
    pub(super) fn reach_shared(&self, sq: &mut SendQueue, number: u32) -> Result<(), Unreachable> {
        if let Some(conn) = &sq.conn
            && conn.leads_to(number)
            && conn.current()
            && conn.still_delivers()
        {
            return Ok(());
        }
        self.turn_to(sq, number)
    }

    /// Makes the destination the present one.
    fn turn_to(&self, sq: &mut SendQueue, number: u32) -> Result<(), Unreachable> {
        let Some(route) = &mut sq.route else {
            return Err(Unreachable::Gone);
        };
        if let Some(old) = sq.conn.take_if(|conn| !conn.leads_to(number)) {
            let place = place(old.delivery.number);
            route.others[place] = Some(old);
        }
        if sq.conn.is_none() {
            let known = &mut route.others[place(number)];
            sq.conn = known.take_if(|conn| conn.leads_to(number));
        }
        let good = |conn: &Connection| conn.current() && conn.still_delivers();
        if sq.conn.as_ref().is_some_and(good) {
            return Ok(());
        }
        self.turn_slowly(sq, number)
    }

    #[cold]
    fn turn_slowly(&self, sq: &mut SendQueue, number: u32) -> Result<(), Unreachable> {
        let (domain, at, word) = self.find_target(sq)?;
        if let Some(conn) = &mut sq.conn
            && conn.word.incarnation() == word.incarnation()
            && conn.still_delivers()
            && !conn.peer.is_dead()
        {
            conn.word = word;
            return Ok(());
        }
        // What was claimed or copied was a receive of another life.
        self.give_claim_back(sq);
        sq.pushed = false;
        sq.conn = None;
        let conn = self.connect(&domain, at, word, number);
        sq.conn = Some(conn.ok_or(Unreachable::Invalid)?);
        Ok(())
    }

    /// The target as it is now, if it takes requests of this queue pair.
    pub(super) fn find_target(
        &self,
        sq: &mut SendQueue,
    ) -> Result<(Arc<Domain>, usize, StateWord), Unreachable> {
        let (process, dest) = (self.process(), sq.dest);
        let (number, index) = xrc::split_target(dest).ok_or(Unreachable::Yet)?;
        let Some(route) = &mut sq.route else {
            return Err(Unreachable::Gone);
        };
        let holder_lives = sq.peer.as_ref().is_some_and(|peer| peer.check_alive());
        if route.target.is_none() {
            let domain = process.domains.find(process, number);
            route.target = domain.and_then(|domain| {
                let at = domain.entry(index)?;
                Some((domain, at))
            });
        }
        let Some((domain, at)) = &route.target else {
            return Err(Unreachable::Yet);
        };
        let (domain, at) = (Arc::clone(domain), *at);
        if sq.dest_node.is_some_and(|node| node != domain.node) {
            return Err(Unreachable::Yet);
        }
        let word = StateWord(domain.map.u64(at + layout::STATE).load(Ordering::Acquire));
        let ours = word.dest() == self.number();
        if !holder_lives {
            // Whose end would be the target's; it is seen like that of any peer.
            let holder = domain.living_holder(process, at);
            sq.peer = holder.and_then(|slot| process.peer(slot).ok());
            if let Some(holder) = sq.peer.as_ref().filter(|_| ours) {
                // It may have looked for this process in vain when it connected the target, or have come by it later.
                holder.call_attention();
            }
        }
        if sq.peer.is_none() {
            // A target that was let go before its process ended is waited for as on a wire; so is one whose domain is
            // of an earlier life.
            route.target = None;
            return Err(if ours && word.state() != IBV_QPS_RESET {
                Unreachable::Gone
            } else {
                Unreachable::Yet
            });
        }
        match word.state() {
            state if receives(state) && ours => Ok((domain, at, word)),
            IBV_QPS_ERR if ours => Err(Unreachable::Gone),
            _ => Err(Unreachable::Yet),
        }
    }

    /// A connection through the target to the shared receive queue of this number, if there is one that may be reached so.
    fn connect(
        &self,
        domain: &Arc<Domain>,
        at: usize,
        word: StateWord,
        number: u32,
    ) -> Option<Connection> {
        let (slot, index) = split_srq_num(number)?;
        let process = self.process();
        let peer = process.peer(slot).ok()?;
        // It is to know this process before anything waits for it.
        let _ = peer.has_ring(process.signature());
        let entry = srq::AT + srq::STRIDE * index as usize;
        let map = &peer.map;
        let stamp = map.u32(entry + srq::STAMP).load(Ordering::Acquire);
        let part = |part: usize| map.u32(entry + part).load(Ordering::Relaxed);
        let shared = Shared::read(map, index)?;
        if stamp == 0 || part(srq::XRCD) != domain.number || peer.node != domain.node {
            return None;
        }
        let delivery = Delivery {
            number,
            stamp_at: entry + srq::STAMP,
            stamp,
        };
        let (pd, recv_cq) = (part(srq::PD), part(srq::CQ));
        let state = Arc::clone(&domain.map);
        Some(Connection::through_target(
            peer, state, at, word, shared, pd, recv_cq, delivery,
        ))
    }

    /// A request that can't be: the target fails.
    #[cold]
    pub(super) fn refuse_route(&self, sq: &SendQueue) {
        let Some((domain, at)) = sq.route.as_ref().and_then(|route| route.target.as_ref()) else {
            return;
        };
        let word = StateWord(domain.map.u64(at + layout::STATE).load(Ordering::Acquire));
        if receives(word.state()) && word.dest() == self.number() {
            domain.fail_target(self.process(), *at, word, Fault::Request);
        }
    }

    /// Moves the other end to ERR.
    #[cold]
    pub(super) fn fail_other_end(&self, sq: &SendQueue, fault: Fault) {
        let Some(conn) = &sq.conn else { return };
        match sq.route.as_ref().map(|route| &route.target) {
            None => conn.peer.fail_qp(conn.at, conn.word, fault),
            Some(Some((domain, at))) => domain.fail_target(self.process(), *at, conn.word, fault),
            Some(None) => {}
        }
    }

    /// As [`Self::ask_for_state`].
    pub(super) fn ask_target(&self, sq: &SendQueue) -> bool {
        let target = sq.route.as_ref().and_then(|route| route.target.as_ref());
        target.is_some_and(|(domain, at)| {
            signal::ask(&domain.map, at + layout::WAITING, self.number())
        })
    }

    /// A process has ended that may have held the target, or have owned a shared receive queue.
    pub(super) fn route_lost(&self, sq: &mut SendQueue, peer: &Arc<Peer>) {
        if sq
            .conn
            .as_ref()
            .is_some_and(|conn| Arc::ptr_eq(&conn.peer, peer))
        {
            // A claim went with its owner.
            sq.claim = None;
            sq.pushed = false;
            sq.conn = None;
        }
        if let Some(route) = &mut sq.route {
            for other in &mut route.others {
                other.take_if(|conn| Arc::ptr_eq(&conn.peer, peer));
            }
        }
        if !sq
            .peer
            .as_ref()
            .is_some_and(|holder| Arc::ptr_eq(holder, peer))
        {
            return;
        }
        sq.peer = None;
        if receives(self.state()) && matches!(self.find_target(sq), Err(Unreachable::Gone)) {
            self.fail(sq, IBV_WC_RETRY_EXC_ERR);
            self.raise(IBV_EVENT_QP_FATAL);
        }
    }
}
