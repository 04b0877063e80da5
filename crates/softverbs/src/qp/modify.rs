//! `ibv_modify_qp` and `ibv_query_qp`.

use std::sync::atomic::Ordering;

use rdma_core_sys::*;

use super::state::{meaningful, transition_allowed};
use super::{Qp, RecvQueue, SendQueue, TARGET};
use crate::delivery::receives;
use crate::gid;
use crate::hazard::RIGHTS;
use crate::limits::{MAX_NODES, MAX_RD_ATOMIC};
use crate::peer::Peer;
use crate::segment::layout::{StateWord, qp as layout, qp_access, split_qp_num};
use crate::sync::Arc;
use crate::sys::{self, Errno, Res};

/// The attributes that `ibv_modify_qp` has without an extension of the device
/// (`IB_QP_ATTR_STANDARD_BITS` of `include/rdma/ib_verbs.h`).
const ATTRIBUTES: u32 = 2 * IBV_QP_DEST_QPN - 1;

/// `ibv_modify_qp`.
///
/// # Errors
/// `EOPNOTSUPP`: attributes of extensions, such as `IBV_QP_RATE_LIMIT`, or unknown ones.
/// `EINVAL`: an illegal transition, a missing or surplus attribute, or a value out of range; the
/// queue pair is unchanged. `EBUSY`: the queue pair is in the new state, but a stopped process may
/// still access memory through it, or write into receives of before RESET; the call can be
/// repeated. XRC target: also if a holder was stopped while it had the domain locked; then nothing
/// is changed.
///
/// # Safety
/// `qp` must be live, `attr` valid where `mask` says so.
pub(crate) unsafe fn modify(qp: *mut ibv_qp, attr: &ibv_qp_attr, mask: u32) -> Res<()> {
    // SAFETY: the caller's promise.
    let ended = unsafe { modify_now(qp, attr, mask) }?;
    if ended == 0 {
        return Ok(());
    }
    // SAFETY: the caller promises a live queue pair.
    let this = unsafe { Qp::from_ptr(qp) };
    this.await_accesses(ended)
}

/// As [`modify`], without the wait for accesses; a RESET waits for writers of receives. Returns the
/// rights of the other end that have ended now, or have ended before, some of [`RIGHTS`]; 0 if the
/// other end had none.
///
/// # Errors
/// As [`modify`].
///
/// # Safety
/// As [`modify`].
pub(crate) unsafe fn modify_now(qp: *mut ibv_qp, attr: &ibv_qp_attr, mask: u32) -> Res<u32> {
    // SAFETY: the caller promises a live queue pair.
    let this = unsafe { Qp::from_ptr(qp) };
    if this.process().forked() {
        return Err(Errno(libc::EIO));
    }
    // As in the kernel (`ib_uverbs_modify_qp` of `drivers/infiniband/core/uverbs_cmd.c`).
    if mask & !ATTRIBUTES != 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    // SAFETY: the queue pair is live, and its type never changes.
    let kind = unsafe { (*qp).qp_type };
    let mask = meaningful(kind, mask);
    if this.state() == TARGET {
        return this.modify_target(attr, mask);
    }
    // A failure that a peer caused is handled first.
    this.notice_failure();
    let from = this.state();
    if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != from {
        return Err(Errno(libc::EINVAL));
    }
    let to = if mask & IBV_QP_STATE != 0 {
        attr.qp_state
    } else {
        from
    };
    if !transition_allowed(kind, from, to, mask) {
        return Err(Errno(libc::EINVAL));
    }
    check(attr, mask)?;
    match to {
        IBV_QPS_RESET => {
            {
                let mut attributes = this.attributes();
                let cap = attributes.attr.cap;
                // SAFETY: all zeros is a valid value of the C structure.
                attributes.attr = unsafe { std::mem::zeroed() };
                attributes.attr.cap = cap;
            }
            this.reset();
            this.await_writers()?;
            Ok(RIGHTS)
        }
        IBV_QPS_ERR => {
            this.fail(&mut this.sq.lock(), IBV_WC_WR_FLUSH_ERR);
            Ok(RIGHTS)
        }
        _ => {
            this.apply(attr, mask, from, to)?;
            Ok(ended_rights(from, attr, mask))
        }
    }
}

/// The rights that the other end of a queue pair in state `from` does not have any more behind a
/// change of these attributes.
pub(super) fn ended_rights(from: ibv_qp_state, attr: &ibv_qp_attr, mask: u32) -> u32 {
    if receives(from) && mask & IBV_QP_ACCESS_FLAGS != 0 {
        RIGHTS & !attr.qp_access_flags
    } else {
        0
    }
}

pub(super) fn check(attr: &ibv_qp_attr, mask: u32) -> Res<()> {
    let ok = |bit: u32, good: bool| mask & bit == 0 || good;
    let mtus = IBV_MTU_256..=IBV_MTU_4096;
    let good = ok(IBV_QP_PORT, attr.port_num == 1)
        && ok(IBV_QP_PKEY_INDEX, attr.pkey_index == 0)
        // The device has not IBV_DEVICE_AUTO_PATH_MIG.
        && mask & IBV_QP_ALT_PATH == 0
        && ok(IBV_QP_PATH_MTU, mtus.contains(&attr.path_mtu))
        && ok(IBV_QP_TIMEOUT, attr.timeout <= 31)
        && ok(IBV_QP_RETRY_CNT, attr.retry_cnt <= 7)
        && ok(IBV_QP_RNR_RETRY, attr.rnr_retry <= 7)
        && ok(IBV_QP_MIN_RNR_TIMER, attr.min_rnr_timer <= 31)
        && ok(IBV_QP_DEST_QPN, attr.dest_qp_num < 1 << 24)
        && ok(IBV_QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic <= MAX_RD_ATOMIC)
        && ok(
            IBV_QP_MAX_DEST_RD_ATOMIC,
            attr.max_dest_rd_atomic <= MAX_RD_ATOMIC,
        )
        && ok(IBV_QP_AV, address_good(&attr.ah_attr));
    if good {
        Ok(())
    } else {
        Err(Errno(libc::EINVAL))
    }
}

/// Whether an address vector names an emulated node of this host.
pub(crate) fn address_good(ah: &ibv_ah_attr) -> bool {
    if ah.port_num != 1 {
        return false;
    }
    if ah.is_global != 0 {
        (ah.grh.sgid_index as usize) < gid::TABLE && gid::node_of(&ah.grh.dgid).is_some()
    } else {
        node_by_lid(ah.dlid).is_some()
    }
}

/// The node that an address vector names.
pub(crate) fn node_of(ah: &ibv_ah_attr) -> Option<u32> {
    if ah.is_global != 0 {
        gid::node_of(&ah.grh.dgid)
    } else {
        node_by_lid(ah.dlid)
    }
}

fn node_by_lid(lid: u16) -> Option<u32> {
    (1..=MAX_NODES as u16)
        .contains(&lid)
        .then(|| u32::from(lid) - 1)
}

pub(super) fn remember(to: &mut ibv_qp_attr, attr: &ibv_qp_attr, mask: u32) {
    macro_rules! copy {
        ($($bit:ident: $($field:ident),+;)+) => {$(
            if mask & $bit != 0 {
                // SAFETY: plain data of one type.
                unsafe { $((&raw mut to.$field).copy_from(&raw const attr.$field, 1);)+ }
            }
        )+};
    }
    copy! {
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_QKEY: qkey;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_PATH_MIG_STATE: path_mig_state;
        IBV_QP_DEST_QPN: dest_qp_num;
        IBV_QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
    }
    // 24 bits in a packet
    to.rq_psn &= 0x00ff_ffff;
    to.sq_psn &= 0x00ff_ffff;
}

impl Qp {
    /// The capabilities with which the queue pair was created.
    pub(crate) fn capabilities(&self) -> ibv_qp_cap {
        self.attributes().attr.cap
    }

    /// # Errors
    /// `EINVAL`: the queue pair is not in `from` any more. `EBUSY`: a stopped process may still
    /// write into the receive ring. `EMFILE` and others ([`sys::is_shortage`]): a lack of
    /// descriptors or memory prevents opening the other end's process.
    fn apply(
        &self,
        attr: &ibv_qp_attr,
        mask: u32,
        from: ibv_qp_state,
        to: ibv_qp_state,
    ) -> Res<()> {
        if from == IBV_QPS_RESET {
            // The RESET may have returned `EBUSY`.
            self.reopen_receive_ring()?;
        }
        // Before any lock is taken, as the call may open a process.
        let peer = self.open_peer(attr, mask)?;
        let mut sq = self.sq.lock();
        let mut rq = self.rq.lock();
        if self.state() != from {
            // Another thread has failed or modified the queue pair.
            return Err(Errno(libc::EINVAL));
        }
        remember(&mut self.attributes().attr, attr, mask);
        if (from, to) != (IBV_QPS_RTS, IBV_QPS_RTS) {
            // In other states only requests that have begun are finished; back in RTS, all waiting
            // requests are executed.
            let _ = self.take_back(&mut sq);
        }
        self.set_queues(&mut sq, &mut rq, attr, mask, peer);
        let access = qp_access(self.attributes().attr.qp_access_flags);
        let old = StateWord(self.word.load(Ordering::Relaxed));
        let word = StateWord::new(to, rq.dest, access, old.incarnation()).behind(old);
        if self.publish(word) {
            self.set_state(to);
        }
        if (from, to) == (IBV_QPS_RTS, IBV_QPS_SQD) {
            let tells = mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0 && attr.en_sqd_async_notify != 0;
            self.begin_drain(&mut sq, tells);
            self.note_drained(&mut sq);
        }
        // Senders may wait for this state.
        self.wake_sender(&mut rq);
        if rq.peer.is_none() {
            // The process may have been opened since the lookup above. A thread that opens it later
            // finds this queue pair connected.
            self.adopt_sender(&mut rq);
        }
        let ended = rq.peer.clone().filter(|peer| peer.is_given_up());
        drop(rq);
        if mask & IBV_QP_DEST_QPN != 0 && sq.route.is_some() {
            // Opens the target's holder, so that its end is noticed even if nothing is sent. A
            // target that does not exist yet is looked up again later.
            let _ = self.find_target(&mut sq);
        }
        let waits = sq.executed != sq.head;
        drop(sq);
        if let Some(peer) = ended {
            // The cleanup of the dead peer may have missed this queue pair, so it is repeated.
            self.process().request_cleanup(&peer);
        }
        if to == IBV_QPS_RTS && from == IBV_QPS_SQD && waits {
            self.process().wait(self.index);
            self.run_waiting();
        }
        Ok(())
    }

    /// Opens the process of the destination, if `mask` names one, and creates the ring on which it
    /// sends. `None` if there is no such process, which is possible on a wire too.
    ///
    /// # Errors
    /// `EMFILE` and others ([`sys::is_shortage`]): the process exists, but a lack of descriptors or
    /// memory prevents opening it.
    fn open_peer(&self, attr: &ibv_qp_attr, mask: u32) -> Res<Option<Arc<Peer>>> {
        if mask & IBV_QP_DEST_QPN == 0 {
            return Ok(None);
        }
        let process = self.process();
        let peer = match process.peer(split_qp_num(attr.dest_qp_num).0) {
            Ok(peer) => Some(peer),
            Err(error) if sys::is_shortage(error) => return Err(error),
            Err(_) => None,
        };
        // Receives that an ended process of that slot had claimed must not count as claimed by the
        // new one.
        process.clean_up_dead_peers();
        if let Some(peer) = &peer {
            // The ring exists before the other end may send. If it can't be created now, the other
            // end requests it again.
            let _ = process.grant_ring(peer);
        }
        Ok(peer)
    }

    /// Copies to the two queues the attributes that they use.
    fn set_queues(
        &self,
        sq: &mut SendQueue,
        rq: &mut RecvQueue,
        attr: &ibv_qp_attr,
        mask: u32,
        peer: Option<Arc<Peer>>,
    ) {
        if mask & IBV_QP_DEST_QPN != 0 {
            sq.dest = attr.dest_qp_num;
            rq.dest = attr.dest_qp_num;
            sq.peer.clone_from(&peer);
            rq.peer = peer;
        }
        if mask & IBV_QP_AV != 0 {
            sq.dest_node = node_of(&attr.ah_attr);
        }
        if mask & IBV_QP_QKEY != 0 {
            sq.qkey = attr.qkey;
            rq.set_qkey(attr.qkey);
        }
        if mask & IBV_QP_TIMEOUT != 0 {
            sq.timeout = attr.timeout;
        }
        if mask & IBV_QP_RETRY_CNT != 0 {
            sq.retry_cnt = attr.retry_cnt;
        }
        if mask & IBV_QP_RNR_RETRY != 0 {
            sq.rnr_retry = attr.rnr_retry;
        }
        if mask & IBV_QP_MIN_RNR_TIMER != 0 {
            self.map()
                .u32(self.at() + layout::RNR_TIMER)
                .store(u32::from(attr.min_rnr_timer), Ordering::Relaxed);
        }
    }
}

/// `ibv_query_qp`.
///
/// # Safety
/// `qp` must be live, both outputs writable.
pub(crate) unsafe fn query(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    init: *mut ibv_qp_init_attr,
) -> Res<()> {
    // SAFETY: the caller promises a live queue pair.
    let this = unsafe { Qp::from_ptr(qp) };
    if this.process().forked() {
        return Err(Errno(libc::EIO));
    }
    if this.state() == TARGET {
        // SAFETY: the caller promises writable outputs.
        return unsafe { this.query_target(attr, init) };
    }
    this.notice_failure();
    let draining = this.is_draining(&this.sq.lock());
    let attributes = this.attributes();
    // SAFETY: the caller promises writable outputs; plain data.
    unsafe {
        attr.copy_from(&raw const attributes.attr, 1);
        (*attr).qp_state = this.state();
        (*attr).cur_qp_state = this.state();
        (*attr).sq_draining = u8::from(draining);
        init.write(attributes.init);
    }
    Ok(())
}
