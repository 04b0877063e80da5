//! What a request does with this process's memory. Everything is checked against private memory, behind a hazard of this
//! process's own, so that who ends a key waits for the agent as for any initiator.

use rdma_core_sys::{IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

use super::wire::{Kind, Outcome, PLACE, Request};
use crate::peer::Peer;
use crate::process::Process;
use crate::qp::{MAX_SGE, Qp};
use crate::region::{self, AccessError, Change, Hazard, Key, Target, Use};
use crate::sys::{self, Stage};

/// Pieces of a receive, each with the key that it was posted with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) list: [(u64, u32, Key); MAX_SGE as usize],
    pub(crate) count: usize,
}

impl Places {
    pub(crate) fn push(&mut self, addr: u64, len: u32, key: Key) -> Option<()> {
        *self.list.get_mut(self.count)? = (addr, len, key);
        self.count += 1;
        Some(())
    }
}

/// Does a request of the process in `slot`.
pub(super) fn execute(process: &Process, slot: u32, stage: &Stage, request: &Request) -> Outcome {
    let done = match request.kind {
        Kind::Write | Kind::Read => copy(process, slot, stage, request),
        Kind::Receive => receive(process, slot, stage, request),
        _ => return change(process, slot, request),
    };
    done.map_or(Outcome::Refused, |()| Outcome::Done(0))
}

/// A claimed receive of a shared queue that no message will take.
pub(super) fn give_back(process: &Process, slot: u32, request: &Request) {
    if let Some(srq) = process.srqs.get(request.a as u32) {
        srq.give_back(request.b as u32, slot);
    }
}

/// What a request may be about, if its queue pairs are connected and allow it.
fn target<'a>(
    process: &'a Process,
    slot: u32,
    request: &Request,
    right: u32,
) -> Option<(&'a Qp, Target)> {
    let qp = process.qp_by_num(request.qp)?;
    let (pd, access) = qp.granted_to(request.from, request.incarnation, slot)?;
    let target = Target {
        key: Key(request.key),
        addr: request.addr,
        pd,
        qp: request.qp,
    };
    (access & right == right).then_some((qp, target))
}

fn publish<'a>(process: &'a Process, own: &'a Peer, what: impl Into<Use>) -> Hazard<'a> {
    Hazard::publish(&own.hazards, &process.segment.map, process.slot, what)
}

fn copy(process: &Process, slot: u32, stage: &Stage, request: &Request) -> Option<()> {
    let write = request.kind == Kind::Write;
    let right = if write {
        IBV_ACCESS_REMOTE_WRITE
    } else {
        IBV_ACCESS_REMOTE_READ
    };
    let (_, target) = target(process, slot, request, right)?;
    let own = process.peer(process.slot).ok()?;
    let hazard = publish(process, &own, target.key);
    let addr = process.own_place(target, request.len, right)?;
    let piece = [sys::as_local(addr, request.len as usize)];
    let at = request.place as usize * PLACE;
    let done = if write {
        stage.empty(at, &piece)
    } else {
        stage.fill(at, &piece)
    };
    drop(hazard);
    done.ok()
}

fn receive(process: &Process, slot: u32, stage: &Stage, request: &Request) -> Option<()> {
    let number = u32::try_from(request.a).ok()?;
    let (qp, _) = target(process, slot, request, 0)?;
    let own = process.peer(process.slot).ok()?;
    let len = u32::try_from(request.len).ok()?;
    let places = qp.receive_places(number, request.b, len, slot)?;
    let mut at = request.place as usize * PLACE;
    for (i, &(addr, len, key)) in places.list[..places.count].iter().enumerate() {
        let hazard = publish(process, &own, Use::of_receive(qp.index(), key));
        // It may have gone before the hazard was out.
        target(process, slot, request, 0)?;
        let now = qp.receive_places(number, request.b, request.len as u32, slot)?;
        if now.list[..now.count].get(i) != Some(&(addr, len, key)) {
            return None;
        }
        stage.empty(at, &[sys::as_local(addr, len as usize)]).ok()?;
        drop(hazard);
        at += len as usize;
    }
    Some(())
}

fn change(process: &Process, slot: u32, request: &Request) -> Outcome {
    let change = match request.kind {
        Kind::Add => Change::Add(request.a),
        Kind::Swap => Change::Swap(request.a, request.b),
        _ => Change::Store(request.a),
    };
    let right = change.right();
    let Some((_, target)) = target(process, slot, request, right) else {
        return Outcome::Refused;
    };
    let Ok(own) = process.peer(process.slot) else {
        return Outcome::Refused;
    };
    let hazard = publish(process, &own, target.key);
    let place = process
        .own_place(target, 8, right)
        .filter(|addr| addr.is_multiple_of(8));
    let Some(addr) = place else {
        return Outcome::Refused;
    };
    let outcome = match region::change_own(process, &own, addr, change) {
        Ok(old) => Outcome::Done(old),
        Err(AccessError::Dead) => Outcome::Busy,
        Err(_) => Outcome::Refused,
    };
    drop(hazard);
    outcome
}
