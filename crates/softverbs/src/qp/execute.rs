//! Operations that are executed in their call, without a request (`docs/softverbs.md`, "Without a
//! request").

use rdma_core_sys::*;

use super::copy_list::List;
use super::remote_qp::Connection;
use super::{Qp, SendQueue};
use crate::hazard::{Gate, Hazard, MOST_AT_ONCE};
use crate::key::Key;
use crate::region::{self, Direction, Elements, MAX_ELEMENTS, Shape, Target};
use crate::sys;

/// Elements with at most so many bytes have their earlier values in a small array.
const SMALL: usize = 64;

/// Most keys of a list that is executed in its call.
const KEYS: usize = 4;

/// Longest operation that is executed in its call.
const LONGEST: usize = 4 * MOST_AT_ONCE;

/// The hazards of the keys of a list on a connection that is not to an XRC target. Each key has one
/// of its own: a process that is stopped in a copy delays the deregistration of these keys alone.
struct KeyHazards<'a> {
    conn: &'a Connection,
    own_slot: u32,
    gate: Gate<'a>,
    rights: u32,
    /// The first `count` are covered.
    keys: [u32; KEYS],
    count: usize,
    _first: Hazard<'a>,
    more: [Option<Hazard<'a>>; KEYS - 1],
}

impl<'a> KeyHazards<'a> {
    /// Publishes the first key. `None`: the queue pair of the other end has changed its state.
    #[inline(always)]
    fn publish(conn: &'a Connection, own_slot: u32, rights: u32, key: u32) -> Option<Self> {
        // nothing to enter, as it is no XRC target
        let gate = conn.gate();
        let used = gate.used(Key(key), rights);
        let first = conn.hazard.publish(&conn.peer.map, own_slot, used);
        gate.is_open().then_some(Self {
            conn,
            own_slot,
            gate,
            rights,
            keys: [key; KEYS],
            count: 1,
            _first: first,
            more: [const { None }; KEYS - 1],
        })
    }

    /// Publishes `key`, unless it is covered. Returns false, with nothing published, if the list
    /// has too many keys or no hazard is free.
    #[inline(always)]
    fn cover(&mut self, key: u32) -> bool {
        if self.keys[..self.count].contains(&key) {
            return true;
        }
        let Some(slot) = self.more.get_mut(self.count - 1) else {
            return false;
        };
        let (conn, used) = (self.conn, self.gate.used(Key(key), self.rights));
        *slot = conn
            .hazard
            .publish_more(&conn.peer.map, self.own_slot, used);
        let covered = slot.is_some();
        if covered {
            self.keys[self.count] = key;
            self.count += 1;
        }
        covered
    }
}

/// An operation that is copied in parts.
struct Transfer {
    /// Address of the local memory.
    from: u64,
    len: usize,
    /// Bytes that were copied.
    done: usize,
    way: Direction,
    /// The thread may copy to memory that it has mapped.
    may_map: bool,
}

/// Copies the next bytes of an operation, at most [`MOST_AT_ONCE`], under one hazard, and returns
/// their number.
///
/// # Errors
/// Whether some of these bytes may have been copied.
#[inline(always)]
fn copy_part(
    conn: &Connection,
    own_slot: u32,
    target: Target,
    transfer: &Transfer,
) -> Result<usize, bool> {
    let &Transfer {
        from,
        len,
        done,
        way,
        may_map,
    } = transfer;
    let (peer, gate) = (&conn.peer, conn.gate());
    let entered = gate.enter(way.right()).ok_or(false)?;
    let used = gate.used(target.key, way.right());
    let hazard = conn.hazard.publish(&peer.map, own_slot, used);
    if !gate.is_open() {
        return Err(false);
    }
    let left = len - done;
    // all bytes that are left are checked, so an operation beyond its region changes nothing
    let resolved = region::resolve(&peer.map, target, target.addr, left as u64, way.right());
    let resolved = resolved.ok_or(false)?;
    let bytes = left.min(MOST_AT_ONCE);
    let local = [sys::as_local(from.wrapping_add(done as u64), bytes)];
    if resolved.direct.stamp != 0
        && let Some(there) = peer.direct(resolved.direct.stamp)
    {
        let copied = may_map
            && region::copy_mapped(&there, resolved.direct.offset, &local, bytes, way).is_ok();
        return if copied { Ok(bytes) } else { Err(false) };
    }
    if !peer.check_alive() {
        return Err(false);
    }
    let (pid, remote) = (peer.identity.pid, [sys::as_local(resolved.addr, bytes)]);
    let moved = match way {
        Direction::Write => sys::vm_write(pid, &local, &remote),
        Direction::Read => sys::vm_read(pid, &local, &remote),
    };
    drop((hazard, entered));
    match moved {
        Ok(all) if all == bytes => Ok(bytes),
        Ok(some) => Err(some != 0),
        Err(_) => Err(false),
    }
}

impl Qp {
    /// Whether all posted requests were executed, and the next one can be: on a queue pair of XRC
    /// the connection to the shared receive queue `queue` becomes the current one, on another one
    /// `queue` is 0.
    #[inline(always)]
    fn is_idle(&self, sq: &mut SendQueue, queue: u32) -> bool {
        let kind = match queue {
            0 => IBV_QPT_RC,
            _ => IBV_QPT_XRC_SEND,
        };
        sq.kind == kind
            && self.state() == IBV_QPS_RTS
            && sq.executed == sq.head
            && (queue == 0 || self.reach_shared(sq, queue).is_ok())
    }

    /// Executes one READ or WRITE without a request, behind all requests that were posted. `queue`:
    /// the shared receive queue that a request names, on a queue pair of XRC; otherwise 0. `false`:
    /// it has to be posted.
    #[inline]
    pub(crate) fn execute_access(
        &self,
        opcode: u32,
        sge: &ibv_sge,
        flags: u32,
        queue: u32,
        (addr, rkey): (u64, u32),
    ) -> bool {
        let Some(way) = Direction::of_opcode(opcode) else {
            return false;
        };
        if self.process().forked() {
            return false;
        }
        let mut sq = self.sq.lock();
        let sq = &mut *sq;
        if !self.is_idle(sq, queue) {
            return false;
        }
        let Some(conn) = &sq.conn else {
            return false;
        };
        if !conn.may_access(queue, way.right()) || conn.peer.refuses() {
            return false;
        }
        let process = self.process();
        let len = sge.length as usize;
        let unchecked = flags & SOFTDV_ACCESS_UNCHECKED != 0;
        let from = match unchecked {
            true => Some(sge.addr),
            false => {
                process
                    .regions
                    .local_again(&mut sq.last_region, sge, sq.pd, way == Direction::Read)
            }
        };
        let Some(from) = from.filter(|_| (1..=LONGEST).contains(&len)) else {
            return false;
        };
        // This processor copies to memory of the device: local memory is that of a region, or as
        // short as inline data.
        let may_map = !unchecked || way == Direction::Write && len <= sq.max_inline as usize;
        let mut target = Target {
            key: Key(rkey),
            addr,
            pd: conn.pd,
            qp: sq.dest,
        };
        let mut transfer = Transfer {
            from,
            len,
            done: 0,
            way,
            may_map,
        };
        while transfer.done < len {
            match copy_part(conn, process.slot, target, &transfer) {
                Ok(bytes) => transfer.done += bytes,
                // the request that is posted next repeats it
                Err(begun) => {
                    sq.begun |= begun || transfer.done != 0;
                    return false;
                }
            }
            target.addr = addr.wrapping_add(transfer.done as u64);
        }
        sq.counts.add(opcode);
        true
    }

    /// As [`Self::execute_access`], several operations by one system call, on a queue pair that is
    /// not of XRC. Each has a local and a remote range of the same length. Returns the number of
    /// those that were executed, from the first one on.
    pub(crate) fn execute_list(
        &self,
        opcode: u32,
        (sges, flags): (&[ibv_sge], u32),
        (addrs, rkeys): (&[u64], &[u32]),
    ) -> usize {
        let Some(way) = Direction::of_opcode(opcode) else {
            return 0;
        };
        if self.process().forked() {
            return 0;
        }
        let mut sq = self.sq.lock();
        let sq = &mut *sq;
        if !self.is_idle(sq, 0) {
            return 0;
        }
        let Some(conn) = &sq.conn else {
            return 0;
        };
        if !conn.may_access(0, way.right()) || conn.peer.refuses() {
            return 0;
        }
        let (process, peer) = (self.process(), &conn.peer);
        // An operation may access what an earlier one has written to this process's memory, which
        // the kernel may refuse to copy at once.
        let most = match peer.slot == process.slot {
            true => 1,
            false => sges.len(),
        };
        let unchecked = flags & SOFTDV_ACCESS_UNCHECKED != 0;
        // this processor accesses local memory of regions alone: other memory may not be mapped
        let mut list = List::new(!unchecked);
        let Some(&first) = rkeys.first() else {
            return 0;
        };
        let Some(mut hazards) = KeyHazards::publish(conn, process.slot, way.right(), first) else {
            return 0;
        };
        for ((sge, addr), rkey) in sges.iter().zip(addrs).zip(rkeys).take(most) {
            if !hazards.cover(*rkey) {
                break;
            }
            let from = match unchecked {
                true => Some(sge.addr),
                false => {
                    let write = way == Direction::Read;
                    process
                        .regions
                        .local_again(&mut sq.last_region, sge, sq.pd, write)
                }
            };
            let target = Target {
                key: Key(*rkey),
                addr: *addr,
                pd: conn.pd,
                qp: sq.dest,
            };
            let range = from.map(|from| (from, sge.length as usize));
            let added = range
                .filter(|(_, len)| *len != 0)
                .is_some_and(|range| list.add_range(range, peer, target, way));
            if !added {
                break;
            }
        }
        let copied = list.copy(peer, way);
        drop(hazards);
        let executed = match copied {
            Ok(()) => list.len(),
            // the request that is posted next repeats it
            Err(stop) => {
                let (whole, begun) = list.stopped_at(&stop);
                sq.begun |= begun;
                whole
            }
        };
        for _ in 0..executed {
            sq.counts.add(opcode);
        }
        executed
    }

    /// Executes an operation on elements without a request, behind all requests that were posted,
    /// if the elements are words of one buffer of the device. `queue`: as for
    /// [`Self::execute_access`]. Returns the number of those that have changed. `None`: it has to
    /// be posted, and nothing has changed.
    ///
    /// # Safety
    /// The operands are readable. `results` has room for the earlier values, or is NULL: they are
    /// not wanted.
    #[inline]
    pub(crate) unsafe fn execute_elements(
        &self,
        asked: &softdv_atomic,
        results: *mut u8,
        queue: u32,
        (addr, rkey): (u64, u32),
    ) -> Option<u32> {
        let shape = Shape::new(asked.op, asked.datatype, asked.count)?;
        // SAFETY: the caller promises the operands.
        let operands = unsafe { shape.operands_of(asked) }?;
        let rights = shape.rights(!results.is_null());
        // the post refuses an operation without an effect
        if rights == 0 || self.process().forked() || !region::offers_elements() {
            return None;
        }
        let mut sq = self.sq.lock();
        let sq = &mut *sq;
        if !self.is_idle(sq, queue) {
            return None;
        }
        let conn = sq.conn.as_ref()?;
        if !conn.may_access(queue, rights) {
            return None;
        }
        let target = Target {
            key: Key(rkey),
            addr,
            pd: conn.pd,
            qp: sq.dest,
        };
        let (mut small, mut large) = ([0; SMALL], None);
        let len = shape.len();
        let earlier = match len <= SMALL {
            true => &mut small[..len],
            false => &mut large.insert([0; MAX_ELEMENTS])[..len],
        };
        let mut elements = Elements {
            shape,
            operands,
            earlier,
            changed: 0,
        };
        let gate = conn.gate();
        let entered = gate.enter(rights)?;
        let used = gate.used(target.key, rights);
        let hazard = conn
            .hazard
            .publish(&conn.peer.map, self.process().slot, used);
        if !gate.is_open() || !region::change_words(&conn.peer, target, rights, &mut elements) {
            return None;
        }
        drop((hazard, entered));
        if !results.is_null() {
            // SAFETY: the caller has room for the elements.
            unsafe { results.copy_from_nonoverlapping(elements.earlier.as_ptr(), len) };
        }
        let changed = elements.changed;
        sq.counts.add(SOFTDV_WR_ATOMIC);
        Some(changed)
    }
}
