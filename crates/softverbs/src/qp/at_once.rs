//! Operations that are executed in their call, without a request (`docs/softverbs.md`, "Without a
//! request").

use rdma_core_sys::*;

use super::Qp;
use super::access::right;
use super::remote_qp::Connection;
use crate::hazard::MOST_AT_ONCE;
use crate::key::Key;
use crate::region::{self, Direction, Elements, MAX_ELEMENTS, Shape, Target};
use crate::sys;

/// Elements with at most so many bytes have their earlier values in a small array.
const SMALL: usize = 64;

impl Qp {
    /// Whether an operation that needs these rights may be executed now. `queue`: the type of the
    /// queue pair, and whether all posted requests were executed.
    #[inline(always)]
    fn is_at_once(&self, conn: &Connection, (kind, idle): (u32, bool), rights: u32) -> bool {
        kind == IBV_QPT_RC
            && self.state() == IBV_QPS_RTS
            && idle
            && conn.word.access() & rights == rights
            && conn.current()
            && conn.delivery.number == 0
            && conn.still_delivers()
    }

    /// Executes one READ or WRITE without a request, behind all requests that were posted. `false`:
    /// it has to be posted.
    #[inline]
    pub(crate) fn access_at_once(
        &self,
        opcode: u32,
        sge: &ibv_sge,
        flags: u32,
        (addr, rkey): (u64, u32),
    ) -> bool {
        let way = match opcode {
            IBV_WR_RDMA_WRITE => Direction::Write,
            IBV_WR_RDMA_READ => Direction::Read,
            _ => return false,
        };
        if self.process().forked() {
            return false;
        }
        let mut sq = self.sq.lock();
        let sq = &mut *sq;
        let Some(conn) = &sq.conn else {
            return false;
        };
        let idle = sq.executed == sq.head;
        if !self.is_at_once(conn, (sq.kind, idle), right(way)) || conn.peer.refuses() {
            return false;
        }
        let process = self.process();
        let len = sge.length as usize;
        let from = match flags & IBV_SEND_INLINE != 0 {
            true => Some(sge.addr),
            false => {
                process
                    .regions
                    .local_again(&mut sq.last_region, sge, sq.pd, way == Direction::Read)
            }
        };
        let Some(from) = from.filter(|_| (1..=MOST_AT_ONCE).contains(&len)) else {
            return false;
        };
        let (peer, key) = (&conn.peer, Key(rkey));
        let target = Target {
            key,
            addr,
            pd: conn.pd,
            qp: sq.dest,
        };
        let hazard = conn.hazard.publish(&peer.map, process.slot, key);
        let place = region::resolve(&peer.map, target, addr, len as u64, right(way));
        let Some(place) = place else {
            return false;
        };
        let local = [sys::as_local(from, len)];
        if place.direct.stamp != 0
            && let Some(there) = peer.direct(place.direct.stamp)
        {
            // this processor copies: the memory has to be that of a region, or inline data
            let inline = flags & IBV_SEND_INLINE != 0;
            let short = way == Direction::Write && len <= sq.max_inline as usize;
            if inline && !short
                || region::copy_mapped(&there, place.direct.offset, &local, len, way).is_err()
            {
                return false;
            }
        } else {
            if !peer.check_alive() {
                return false;
            }
            let (pid, remote) = (peer.identity.pid, [sys::as_local(place.addr, len)]);
            let moved = match way {
                Direction::Write => sys::vm_write(pid, &local, &remote),
                Direction::Read => sys::vm_read(pid, &local, &remote),
            };
            match moved {
                Ok(bytes) if bytes == len => {}
                // the request that is posted next repeats it
                Ok(bytes) => {
                    sq.begun |= bytes != 0;
                    return false;
                }
                Err(_) => return false,
            }
        }
        drop(hazard);
        sq.counts.add(opcode);
        true
    }

    /// Executes an operation on elements without a request, behind all requests that were posted,
    /// if the elements are words of one buffer of the device. Returns the number of those that have
    /// changed. `None`: it has to be posted, and nothing has changed.
    ///
    /// # Safety
    /// The operands are readable. `results` has room for the earlier values, or is NULL: they are
    /// not wanted.
    #[inline]
    pub(crate) unsafe fn elements_at_once(
        &self,
        asked: &softdv_atomic,
        results: *mut u8,
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
        let conn = sq.conn.as_ref()?;
        let idle = sq.executed == sq.head;
        if !self.is_at_once(conn, (sq.kind, idle), rights) {
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
        let hazard = conn
            .hazard
            .publish(&conn.peer.map, self.process().slot, target.key);
        if !region::change_words(&conn.peer, target, rights, &mut elements) {
            return None;
        }
        drop(hazard);
        if !results.is_null() {
            // SAFETY: the caller has room for the elements.
            unsafe { results.copy_from_nonoverlapping(elements.earlier.as_ptr(), len) };
        }
        let changed = elements.changed;
        sq.counts.add(SOFTDV_WR_ATOMIC);
        Some(changed)
    }
}
