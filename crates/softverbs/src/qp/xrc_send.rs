//! Routing of the requests of an XRC send queue pair: through a target to the shared receive queue
//! that each request names.
//!
//! Target and shared queue together form a [`Connection`], whose state word is in the target's
//! domain and whose receives are in the segment of the queue's owner. The queue pair caches the
//! connections of up to 64 queues besides the current one.

use std::sync::atomic::{Ordering, fence};

use rdma_core_sys::{IBV_EVENT_QP_FATAL, IBV_QPS_ERR, IBV_QPS_RESET, IBV_WC_RETRY_EXC_ERR};

use super::remote_qp::{Connection, Delivery, Unreachable};
use super::{Qp, SendQueue};
use crate::delivery::receives;
use crate::hazard::Accessor;
use crate::peer::Peer;
use crate::process::Process;
use crate::segment::layout::{Fault, StateWord, qp as layout, srq, xrc};
use crate::signal;
use crate::srq::{Shared, split_srq_num};
use crate::sync::Arc;
use crate::sys::{self, Errno, Grow, Res, list};
use crate::xrc::Domain;

/// Number of cached destinations; a power of two.
const REMEMBERED: usize = 64;

/// Number of owners that a send queue remembers.
const OWNERS: usize = 1024;

/// The owners of the numbers to which a send queue has sent: a number whose owner has ended is
/// refused, because its next owner is another process.
#[derive(Debug, Default)]
struct Owners {
    /// Numbers and the cookies of their owners' processes.
    list: Vec<(u32, u64)>,
    /// The entry that is replaced next, when the list is full.
    oldest: usize,
}

impl Owners {
    /// Whether the process with this cookie may be the owner of `number` for this send queue: it
    /// was before, or no other one is remembered.
    ///
    /// # Errors
    /// `ENOMEM`: no memory for the list.
    fn admit(&mut self, number: u32, cookie: u64) -> Res<bool> {
        if let Some((_, owner)) = self.list.iter().find(|(known, _)| *known == number) {
            return Ok(*owner == cookie);
        }
        if self.list.len() < OWNERS {
            return self.list.try_push((number, cookie)).map(|()| true);
        }
        self.list[self.oldest] = (number, cookie);
        self.oldest = (self.oldest + 1) % OWNERS;
        Ok(true)
    }

    /// Whether the process with this cookie is known to be the owner of `number`.
    fn has(&self, number: u32, cookie: u64) -> bool {
        self.list.contains(&(number, cookie))
    }
}

/// The additional state of an XRC send queue.
#[derive(Debug)]
pub(super) struct Route {
    /// The target's domain, once it is open, and the offset of the target's entry in it.
    target: Option<(Arc<Domain>, usize)>,
    /// The domain that was found last. While the target has no holder it is looked up again by each
    /// try, which maps only another domain.
    domain: Option<Arc<Domain>>,
    /// Cached destinations other than the current one, each at the hash of its number.
    others: Box<[Option<Connection>]>,
    owners: Owners,
}

impl Route {
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn new() -> Res<Self> {
        Ok(Self {
            target: None,
            domain: None,
            others: list(REMEMBERED, |_| None)?,
            owners: Owners::default(),
        })
    }

    pub(super) fn target(&self) -> Option<&(Arc<Domain>, usize)> {
        self.target.as_ref()
    }

    /// Looks the target up, unless it is known.
    ///
    /// # Errors
    /// As [`Domains::find`](crate::xrc::Domains::find).
    fn find(
        &mut self,
        process: &Process,
        number: u32,
        index: u32,
    ) -> Result<Option<(Arc<Domain>, usize)>, Vec<u32>> {
        if self.target.is_none()
            && let Some(domain) = process.domains.find(process, number)?
        {
            self.domain = Some(Arc::clone(&domain));
            let at = domain.entry(index);
            self.target = at.map(|at| (domain, at));
        }
        Ok(self.target.clone())
    }

    /// The target has no holder: its number may be that of a target of another domain next time.
    fn lose(&mut self) {
        self.target = None;
    }

    pub(super) fn forget(&mut self) {
        self.target = None;
        self.domain = None;
        self.owners = Owners::default();
        self.forget_destinations();
    }

    fn forget_destinations(&mut self) {
        self.others.fill_with(|| None);
    }
}

fn place(number: u32) -> usize {
    // Numbers of different slots differ in the upper bits, and the first queues of all slots have
    // the same lower bits.
    (number ^ number >> 14) as usize % REMEMBERED
}

impl Qp {
    /// As [`Self::reach`], for a request to the shared receive queue with this number.
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

    /// Makes the destination the current one.
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
            && !conn.peer.is_given_up()
        {
            conn.word = word;
            return Ok(());
        }
        // A claim or a copied payload belongs to a receive of another incarnation.
        let may_have_changed = sq.may_have_changed;
        self.give_claim_back(sq);
        sq.pushed = false;
        sq.conn = None;
        let route = sq.route.as_mut().ok_or(Unreachable::Gone)?;
        // Two destinations of one place of the cache come here with each request. A look at the
        // owner makes system calls, so it is for new destinations alone: a known one that has ended
        // is noticed as on any other path.
        let slot = split_srq_num(number).map(|(slot, _)| slot);
        let mapped = slot.and_then(|slot| self.process().mapped_peer(slot));
        let known = mapped
            .filter(|peer| route.owners.has(number, peer.identity.cookie) && peer.check_alive());
        let conn = self.connect(&domain, at, word, (number, known))?;
        let cookie = conn.peer.identity.cookie;
        match route.owners.admit(number, cookie) {
            Ok(true) => {}
            Ok(false) => return Err(Unreachable::Invalid),
            Err(_) => return Err(self.open_later(conn.peer.slot)),
        }
        if may_have_changed {
            return Err(Unreachable::Gone);
        }
        sq.conn = Some(conn);
        Ok(())
    }

    /// Finds the target in its present state, if it takes requests of this queue pair.
    pub(super) fn find_target(
        &self,
        sq: &mut SendQueue,
    ) -> Result<(Arc<Domain>, usize, StateWord), Unreachable> {
        let (process, dest) = (self.process(), sq.dest);
        let (number, index) = xrc::split_target(dest).ok_or(Unreachable::Yet)?;
        let Some(route) = &mut sq.route else {
            return Err(Unreachable::Gone);
        };
        let is_new = route.target.is_none();
        let began = sys::now_ns();
        let found = match route.find(process, number, index) {
            Ok(found) => found,
            Err(members) => return Err(self.find_later(&members, began)),
        };
        if is_new {
            self.lacks_holder.store(false, Ordering::Relaxed);
        }
        let (domain, at) = found.ok_or(Unreachable::Yet)?;
        if sq.dest_node.is_some_and(|node| node != domain.node) {
            return Err(Unreachable::Yet);
        }
        let word = StateWord(domain.map.u64(at + layout::STATE).load(Ordering::Acquire));
        let ours = word.dest() == self.number();
        let watched = sq.peer.as_ref();
        if !watched.is_some_and(|peer| domain.is_held_by(at, peer.slot) && peer.check_alive()) {
            // The end of the last holder ends the target; the holder is watched like any peer.
            sq.peer = self.open_holder(&domain, at);
            if let Some(holder) = sq.peer.as_ref().filter(|_| ours) {
                // The holder may have failed to open this process when it connected the target, or
                // may have opened the target later. This process may end before the holder follows
                // the call.
                domain.record_initiator(process, at);
                holder.call_attention();
            }
        }
        let failed = ours && word.state() == IBV_QPS_ERR;
        if sq.peer.is_none() && !failed && self.lacks_holder.load(Ordering::Relaxed) {
            return Err(Unreachable::Yet);
        }
        if sq.peer.is_none() {
            // If the target was destroyed or reset before its process ended, or its domain is of an
            // earlier incarnation, the request waits as on a wire.
            route.lose();
            return Err(if ours && word.state() != IBV_QPS_RESET {
                // No request of this queue pair looks the target up again.
                route.domain = None;
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

    /// The first request waits, and a repetition opens the process in `slot`: also a process that
    /// sleeps tries the request again then.
    #[cold]
    fn open_later(&self, slot: u32) -> Unreachable {
        self.process().call_later(slot);
        Unreachable::Yet
    }

    /// No member of the target's domain can be opened now: [`Self::lacks_holder`] is set, and this
    /// process repeats to open `members`, and then to find the target. `began`: the time before the
    /// members were tried, in nanoseconds.
    #[cold]
    fn find_later(&self, members: &[u32], began: u64) -> Unreachable {
        let process = self.process();
        // A repetition that takes a slot finds the flag.
        self.lacks_holder.store(true, Ordering::Release);
        for &slot in members {
            process.call_later_than(slot, began);
        }
        if members.is_empty() {
            // For want of memory there is no other slot. The repetition is the same.
            process.call_later_than(process.slot, began);
        }
        Unreachable::Yet
    }

    /// Opens a living holder of the target. If none of them can be opened now, this process repeats
    /// that, and [`Self::lacks_holder`] is set until one is open.
    #[cold]
    fn open_holder(&self, domain: &Domain, at: usize) -> Option<Arc<Peer>> {
        let process = self.process();
        let mut unopened = None;
        for slot in domain.living_holders(process, at) {
            match process.open_now(slot) {
                Ok(peer) => {
                    self.lacks_holder.store(false, Ordering::Relaxed);
                    return Some(peer);
                }
                Err(error) if process.may_open_later(error) => unopened = unopened.or(Some(slot)),
                // It has ended, or must not be used.
                Err(_) => {}
            }
        }
        self.lacks_holder
            .store(unopened.is_some(), Ordering::Release);
        process.call_later(unopened?);
        // A thread that opens it from now on finds the flag.
        fence(Ordering::SeqCst);
        let opened = process.mapped_peer(unopened?)?;
        self.lacks_holder.store(false, Ordering::Relaxed);
        Some(opened)
    }

    /// Whether no holder of the target, or no member of its domain, could be opened yet. Takes no
    /// lock.
    pub(crate) fn lacks_holder(&self) -> bool {
        self.lacks_holder.load(Ordering::Acquire)
    }

    /// Creates a connection through the target to the shared receive queue with this number, if the
    /// queue can be reached through the target. `known`: the owner of the queue, if this queue pair
    /// has reached it before.
    ///
    /// # Errors
    /// `Yet`: the owner can't be opened now, and this process repeats that. `Invalid`: the number
    /// is of no queue of the target's domain.
    fn connect(
        &self,
        domain: &Arc<Domain>,
        at: usize,
        word: StateWord,
        (number, known): (u32, Option<Arc<Peer>>),
    ) -> Result<Connection, Unreachable> {
        let (slot, index) = split_srq_num(number).ok_or(Unreachable::Invalid)?;
        let process = self.process();
        let peer = match known.map_or_else(|| process.open_now(slot), Ok) {
            Ok(peer) => peer,
            Err(error) if process.may_open_later(error) => return Err(self.open_later(slot)),
            // it is stopped, or has no agent; the target stays for its other users
            Err(Errno(libc::EACCES | libc::ETIMEDOUT)) => return Err(Unreachable::Gone),
            // it has ended, or must not be used
            Err(_) => return Err(Unreachable::Invalid),
        };
        // The owner must have opened this process before a request waits for the owner.
        let _ = peer.has_ring(process.signature());
        let entry = srq::AT + srq::STRIDE * index as usize;
        let map = &peer.map;
        let stamp = map.u32(entry + srq::STAMP).load(Ordering::Acquire);
        let part = |part: usize| map.u32(entry + part).load(Ordering::Relaxed);
        let shared = Shared::read(map, index).ok_or(Unreachable::Invalid)?;
        if stamp == 0 || part(srq::XRCD) != domain.number || peer.node != domain.node {
            return Err(Unreachable::Invalid);
        }
        let delivery = Delivery {
            number,
            stamp_at: entry + srq::STAMP,
            stamp,
            initiator: Accessor::new(process.slot, process.identity.cookie),
        };
        let (pd, recv_cq) = (part(srq::PD), part(srq::CQ));
        let state = Arc::clone(&domain.map);
        let peer = (peer, self.process().slot);
        Ok(Connection::through_target(
            peer, state, at, word, shared, pd, recv_cq, delivery,
        ))
    }

    /// Handles an invalid request: the target fails.
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

    /// Moves the other end to ERR. Returns false if its state has changed before.
    #[cold]
    pub(super) fn fail_other_end(&self, sq: &SendQueue, fault: Fault) -> bool {
        let Some(conn) = &sq.conn else { return false };
        match sq.route.as_ref().map(|route| &route.target) {
            None => {
                let fail = |word| conn.peer.fail_qp(conn.at, word, fault);
                // the end of a key that a receive names is no change of the state
                fail(conn.word) || !conn.word.has_ended_keys() && fail(conn.word.with_ended_keys())
            }
            Some(Some((domain, at))) => domain.fail_target(self.process(), *at, conn.word, fault),
            Some(None) => false,
        }
    }

    /// As [`Self::ask_for_state`].
    pub(super) fn ask_target(&self, sq: &SendQueue) -> bool {
        let target = sq.route.as_ref().and_then(|route| route.target.as_ref());
        target.is_some_and(|(domain, at)| {
            signal::ask(&domain.map, at + layout::WAITING, self.number())
        })
    }

    /// Handles the end of a process that may have held the target or owned a shared receive queue.
    pub(super) fn route_lost(&self, sq: &mut SendQueue, peer: &Arc<Peer>) {
        if sq
            .conn
            .as_ref()
            .is_some_and(|conn| Arc::ptr_eq(&conn.peer, peer))
        {
            // The claim is void, as the owner of the queue has ended.
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
        self.find_next_holder(sq);
    }

    /// Looks for another holder of the target, if the one that is watched has closed the target, or
    /// none could be opened before.
    pub(super) fn notice_holder(&self) {
        // only a queue pair of XRC has a route
        let mut sq = self.sq.lock();
        let Some(route) = sq.route.as_ref() else {
            return;
        };
        let lost = match (route.target(), &sq.peer) {
            (Some((domain, at)), Some(holder)) => !domain.is_held_by(*at, holder.slot),
            (None, Some(_)) => false,
            (_, None) => self.lacks_holder.load(Ordering::Relaxed),
        };
        if lost {
            self.find_next_holder(&mut sq);
        }
    }

    /// Looks for the target again, if no member of its domain could be opened before. The caller
    /// repeats all actions that have failed, and holds no lock.
    pub(crate) fn find_domain_again(&self) {
        if !self.lacks_holder() {
            return;
        }
        let mut sq = self.sq.lock();
        let unknown = |route: &Route| route.target.is_none();
        if sq.peer.is_none() && sq.route.as_deref().is_some_and(unknown) {
            self.find_next_holder(&mut sq);
        }
    }

    /// The holder that was watched holds the target no more: the target ends with the last one.
    #[cold]
    fn find_next_holder(&self, sq: &mut SendQueue) {
        if !receives(self.state()) {
            return;
        }
        match self.find_target(sq) {
            Err(Unreachable::Gone) => {
                self.fail(sq, IBV_WC_RETRY_EXC_ERR);
                self.raise(IBV_EVENT_QP_FATAL);
            }
            Err(_) if sq.peer.is_none() => {
                // The next request looks for a holder: nothing is sent while none is watched.
                if !sq.may_have_changed {
                    self.give_claim_back(sq);
                    sq.pushed = false;
                    sq.conn = None;
                }
                if let Some(route) = &mut sq.route {
                    route.forget_destinations();
                }
            }
            _ => {}
        }
    }

    /// An atomic that was under way when the last holder was lost has ended: the next request looks
    /// for a holder.
    pub(super) fn leave_unwatched(sq: &mut SendQueue) {
        if sq.route.is_some() && sq.peer.is_none() {
            sq.conn = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xrc::{Target, test_membership};

    /// Each try of a request that waits for a holder would map the domain.
    #[test]
    fn a_target_without_a_holder_is_found_in_the_same_domain() {
        let membership = test_membership();
        let process = membership.process;
        let target = Target::create(&membership).unwrap();
        let (number, index) = xrc::split_target(target.number()).unwrap();
        let mut route = Route::new().unwrap();
        let (found, at) = route.find(process, number, index).unwrap().unwrap();
        let domain = Arc::downgrade(&found);
        drop((found, target, membership));
        route.lose();
        let (again, same) = route.find(process, number, index).unwrap().unwrap();
        assert!(Arc::ptr_eq(
            &again,
            &domain.upgrade().expect("the mapped domain")
        ));
        assert_eq!(same, at);
        drop(again);
        route.forget();
        assert!(domain.upgrade().is_none());
    }

    #[test]
    fn a_number_has_one_owner() {
        let mut owners = Owners::default();
        let mut admit = |number, cookie| owners.admit(number, cookie).unwrap();
        assert!(admit(7, 1) && admit(8, 2));
        assert!(admit(7, 1));
        assert!(!admit(7, 2) && !admit(7, 3));
        for number in 100..100 + OWNERS as u32 - 2 {
            assert!(admit(number, 5));
        }
        assert!(!admit(7, 2));
        // one more: the oldest entry is forgotten, and the list does not grow
        assert!(admit(9, 5));
        assert!(admit(7, 2) && !admit(9, 6));
        assert_eq!(owners.list.len(), OWNERS);
    }
}
