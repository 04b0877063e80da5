//! The accesses of a request to this process's memory. Every access is checked against private
//! memory under a hazard of this process, so that a thread that invalidates a key waits for the
//! agent as for any initiator.

use std::time::Duration;

use rdma_core_sys::{IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

use crate::agent::{Kind, Outcome, PLACE, Request, Requester};
use crate::hazard::{Hazard, Through, Use};
use crate::key::Key;
use crate::peer::Peer;
use crate::process::Process;
use crate::qp::Qp;
use crate::region::{
    self, AccessError, Change, Elements, MAX_ELEMENTS, Places, Shape, Target, change_own_elements,
};
use crate::segment::layout::xrc;
use crate::srq::{Srq, split_srq_num};
use crate::sys::{self, BounceFile};
use crate::xrc::AgentAccess;

/// The receiver of a request's payload: a queue pair, or for an XRC target the shared receive queue
/// that the request names.
#[derive(Clone, Copy)]
enum Receiver<'a> {
    Qp(&'a Qp),
    Srq(&'a Srq),
}

impl Receiver<'_> {
    /// Destination of a part of a receive that the process in `slot` may write.
    fn places(self, number: u32, skip: u64, len: u32, slot: u32) -> Option<Places> {
        match self {
            Self::Qp(qp) => qp.receive_places(number, skip, len, slot),
            Self::Srq(srq) => srq.receive_places(number, skip, len, slot),
        }
    }

    /// The resource that the hazard names.
    fn used(self, key: Key) -> Use {
        match self {
            Self::Qp(qp) => Use::of_receive(qp.index(), key),
            Self::Srq(srq) => Use::of_shared_receive(srq.index(), key),
        }
    }
}

/// Executes a request. `None`: it was executed, but its result could not be
/// stored. No answer would be true, and the line must be closed.
pub(super) fn execute(
    process: &Process,
    requester: Requester,
    bounce: &BounceFile,
    request: &Request,
) -> Option<Outcome> {
    let done = match request.kind {
        Kind::Write | Kind::Read => copy(process, requester, bounce, request),
        Kind::Receive => receive(process, requester, bounce, request),
        Kind::Elements => return elements(process, requester, bounce, request),
        _ => return Some(change(process, requester, request)),
    };
    Some(done.map_or(Outcome::Refused, |()| Outcome::Done(0)))
}

/// Returns a claimed receive of a shared queue that no message will consume.
pub(super) fn give_back(process: &Process, requester: Requester, request: &Request) {
    if process.admits(requester, None)
        && let Some(srq) = process.srqs.get(request.a as u32)
    {
        srq.give_back_to(request.incarnation, request.b as u32, requester.slot);
    }
}

/// The target of a request, if its queue pairs are connected and grant the access.
fn target<'a>(
    process: &'a Process,
    requester: Requester,
    request: &Request,
    right: u32,
) -> Option<(Receiver<'a>, Target)> {
    let (receiver, (pd, access)) = if xrc::split_target(request.qp).is_some() {
        let (owner, index) = split_srq_num(request.srq)?;
        let srq = process.srqs.get(index).filter(|_| owner == process.slot)?;
        let (from, incarnation) = (request.from, request.incarnation);
        let granted = srq.granted_through(request.qp, from, incarnation, requester.slot)?;
        if !process.admits(requester, None) {
            return None;
        }
        (Receiver::Srq(srq), granted)
    } else {
        let qp = process.qp_by_num(request.qp)?;
        let granted = qp.granted_to(request.from, request.incarnation, requester)?;
        (Receiver::Qp(qp), granted)
    };
    let target = Target {
        key: Key(request.key),
        addr: request.addr,
        pd,
        qp: request.qp,
    };
    (access & right == right).then_some((receiver, target))
}

fn publish<'a>(process: &'a Process, own: &'a Peer, what: impl Into<Use>) -> Hazard<'a> {
    Hazard::publish(&own.hazards, &process.segment.map, process.slot, what)
}

/// Publishes an access, before [`target`] checks the queue pair or target: the end of its rights
/// waits for the access. `None`: the request names none.
fn enter<'a>(
    process: &'a Process,
    own: &'a Peer,
    request: &Request,
    right: u32,
) -> Option<(Hazard<'a>, Option<AgentAccess>)> {
    let (through, entered) = if xrc::split_target(request.qp).is_some() {
        let (_, index) = split_srq_num(request.srq)?;
        let entered = process.srqs.get(index)?.enter_target(request.qp, right)?;
        (Through::TARGET, Some(entered))
    } else {
        let qp = process.qp_by_num(request.qp)?;
        (Through::queue_pair(qp.index()), None)
    };
    let used = Use::of_access(through, Key(request.key), right);
    Some((publish(process, own, used), entered))
}

fn copy(
    process: &Process,
    requester: Requester,
    bounce: &BounceFile,
    request: &Request,
) -> Option<()> {
    let write = request.kind == Kind::Write;
    let right = if write {
        IBV_ACCESS_REMOTE_WRITE
    } else {
        IBV_ACCESS_REMOTE_READ
    };
    let own = process.peer(process.slot).ok()?;
    let entered = enter(process, &own, request, right)?;
    let (_, target) = target(process, requester, request, right)?;
    let addr = process.own_place(target, request.len, right)?;
    let iovec = [sys::as_local(addr, request.len as usize)];
    let at = request.place as usize * PLACE;
    let done = if write {
        bounce.empty(at, &iovec)
    } else {
        bounce.fill(at, &iovec)
    };
    drop(entered);
    done.ok()
}

fn receive(
    process: &Process,
    requester: Requester,
    bounce: &BounceFile,
    request: &Request,
) -> Option<()> {
    let number = u32::try_from(request.a).ok()?;
    let (receiver, _) = target(process, requester, request, 0)?;
    let own = process.peer(process.slot).ok()?;
    let len = u32::try_from(request.len).ok()?;
    let places = receiver.places(number, request.b, len, requester.slot)?;
    let mut at = request.place as usize * PLACE;
    for (i, &(addr, len, key)) in places.list[..places.count].iter().enumerate() {
        let hazard = publish(process, &own, receiver.used(key));
        // The target may have become invalid before the hazard was published, so it is checked
        // again.
        target(process, requester, request, 0)?;
        let now = receiver.places(number, request.b, request.len as u32, requester.slot)?;
        if now.list[..now.count].get(i) != Some(&(addr, len, key)) {
            return None;
        }
        bounce
            .empty(at, &[sys::as_local(addr, len as usize)])
            .ok()?;
        drop(hazard);
        at += len as usize;
    }
    Some(())
}

fn change(process: &Process, requester: Requester, request: &Request) -> Outcome {
    let change = match request.kind {
        Kind::Add => Change::Add(request.a),
        Kind::Swap => Change::Swap(request.a, request.b),
        _ => Change::Store(request.a),
    };
    let right = change.right();
    let Ok(own) = process.peer(process.slot) else {
        return Outcome::Refused;
    };
    let Some(entered) = enter(process, &own, request, right) else {
        return Outcome::Refused;
    };
    let Some((_, target)) = target(process, requester, request, right) else {
        return Outcome::Refused;
    };
    let place = process
        .own_place(target, 8, right)
        .filter(|addr| addr.is_multiple_of(8));
    let Some(addr) = place else {
        return Outcome::Refused;
    };
    let outcome = match region::change_own(process, &process.buffers, &own, addr, change) {
        Ok(old) => Outcome::Done(old),
        Err(AccessError::Dead | AccessError::Unavailable) => Outcome::Busy,
        Err(_) => Outcome::Refused,
    };
    drop(entered);
    outcome
}

/// An operation on elements: the operands are in the place of the request, and the earlier values
/// replace them there. `None`: the elements have changed, and their earlier values are lost.
fn elements(
    process: &Process,
    requester: Requester,
    bounce: &BounceFile,
    request: &Request,
) -> Option<Outcome> {
    let shape = Shape::of_word(request.a).filter(|shape| shape.len() as u64 == request.len);
    let (Some(shape), true) = (shape, region::offers_elements()) else {
        return Some(Outcome::Refused);
    };
    let fetches = request.b != 0;
    let right = shape.rights(fetches);
    if right == 0 {
        return Some(Outcome::Refused);
    }
    let Ok(own) = process.peer(process.slot) else {
        return Some(Outcome::Refused);
    };
    // copied once: the initiator can change its file at any time
    let mut operands = [0_u8; 2 * MAX_ELEMENTS];
    let (first, second) = shape.operands();
    let operands = &mut operands[..first + second];
    let at = request.place as usize * PLACE;
    let addr_of = |bytes: *mut u8| bytes.expose_provenance() as u64;
    let to = sys::as_local(addr_of(operands.as_mut_ptr()), operands.len());
    if bounce.empty(at, &[to]).is_err() {
        return Some(Outcome::Refused);
    }
    let mut earlier = [0_u8; MAX_ELEMENTS];
    let mut elements = Elements {
        shape,
        operands: operands.split_at(first).into(),
        earlier: &mut earlier[..shape.len()],
        changed: 0,
    };
    let Some(entered) = enter(process, &own, request, right) else {
        return Some(Outcome::Refused);
    };
    let Some((_, target)) = target(process, requester, request, right) else {
        return Some(Outcome::Refused);
    };
    let Some(addr) = process.own_place(target, request.len, right) else {
        return Some(Outcome::Refused);
    };
    let (ranges, buffers) = ([(addr, shape.len())], &process.buffers);
    let wait = Duration::from_millis(1);
    let done = change_own_elements(process, buffers, &own, &ranges, wait, &mut elements);
    drop(entered);
    let changed = elements.changed.into();
    match done {
        Ok(()) => {}
        Err(AccessError::Dead | AccessError::Unavailable) => return Some(Outcome::Busy),
        Err(_) => return Some(Outcome::Refused),
    }
    let from = sys::as_local(addr_of(earlier.as_mut_ptr()), shape.len());
    if fetches {
        bounce.fill(at, &[from]).ok()?;
    }
    Some(Outcome::Done(changed))
}
