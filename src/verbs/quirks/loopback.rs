//! Two connected queue pairs of one device, on which the trials run.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_core_sys as sys;

use crate::errno::{FiErrno, Result};
use crate::verbs::{Cq, Device, Pd};

/// Time limit of a completion, after which the trial counts as failed. A device that receives no
/// acknowledgement completes the request with an error after about 0.5 s (`TIMEOUT`, one retry).
const TRIAL_LIMIT: Duration = Duration::from_secs(2);
/// 4.096 µs × 2^16 = 268 ms; a shorter timeout is too short for a software device on a busy host.
const TIMEOUT: u8 = 16;

/// A queue pair, destroyed when it is dropped.
pub(super) struct RawQp {
    pub(super) raw: *mut sys::ibv_qp,
    device: Arc<Device>,
}

impl RawQp {
    pub(super) fn number(&self) -> u32 {
        // SAFETY: live until dropped.
        unsafe { (*self.raw).qp_num }
    }
}

impl Drop for RawQp {
    fn drop(&mut self) {
        // SAFETY: created by this backend, destroyed once.
        unsafe { (self.device.backend().verbs.ibv_destroy_qp)(self.raw) };
    }
}

/// Result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The operation succeeded.
    Done,
    /// The device refused the post.
    NotPosted(FiErrno),
    /// The operation failed with this `ibv_wc_status`; `None`: no completion within
    /// [`TRIAL_LIMIT`].
    Failed(Option<u32>),
}

/// The pair: `near` is the initiator, `far` the target. After a failed operation neither can be
/// used.
pub(super) struct Loopback {
    near: RawQp,
    far: RawQp,
    cq: Arc<Cq>,
    _pd: Arc<Pd>,
}

impl Loopback {
    /// Connects a pair on port 1. With `flush` the initiator supports flushes.
    ///
    /// # Errors
    /// The device's. `EOPNOTSUPP`: the device has no flush.
    pub(super) fn connect(device: &Arc<Device>, pd: &Arc<Pd>, flush: bool) -> Result<Self> {
        let cq = Arc::new(Cq::create(device, 16, None, 0)?);
        let near = create(device, pd, &cq, sys::IBV_QPT_RC, flush)?;
        let far = create(device, pd, &cq, sys::IBV_QPT_RC, false)?;
        let path = Path::of(device)?;
        // SAFETY: both are live and of this device.
        unsafe {
            path.bring_up(near.raw, far.number(), flush)?;
            path.bring_up(far.raw, near.number(), flush)?;
        }
        Ok(Self {
            near,
            far,
            cq,
            _pd: Arc::clone(pd),
        })
    }

    /// RDMA-writes 8 bytes from `local` to the peer's `addr`.
    pub(super) fn write(&self, local: sys::ibv_sge, addr: u64, rkey: u32) -> Outcome {
        let mut sge = local;
        let mut wr = sys::ibv_send_wr {
            opcode: sys::IBV_WR_RDMA_WRITE,
            sg_list: &raw mut sge,
            num_sge: 1,
            ..Default::default()
        };
        wr.wr.rdma.remote_addr = addr;
        wr.wr.rdma.rkey = rkey;
        self.post(&self.near, &mut wr)
    }

    /// Binds a type 2 window on the target side, with the key `rkey`.
    pub(super) fn bind(
        &self,
        mw: *mut sys::ibv_mw,
        rkey: u32,
        bind: sys::ibv_mw_bind_info,
    ) -> Outcome {
        let mut wr = sys::ibv_send_wr {
            opcode: sys::IBV_WR_BIND_MW,
            ..Default::default()
        };
        wr.__bindgen_anon_2.bind_mw.mw = mw;
        wr.__bindgen_anon_2.bind_mw.rkey = rkey;
        wr.__bindgen_anon_2.bind_mw.bind_info = bind;
        self.post(&self.far, &mut wr)
    }

    /// Flushes 8 bytes at the peer's `addr` to `placement`. The pair must have been connected with
    /// `flush`.
    pub(super) fn flush(&self, addr: u64, rkey: u32, placement: u32) -> Outcome {
        let posted = post_flush(&self.near, (addr, rkey), placement, None);
        await_completion(&self.cq, posted)
    }

    fn post(&self, qp: &RawQp, wr: &mut sys::ibv_send_wr) -> Outcome {
        // SAFETY: the memory of the request outlives its completion, for which this waits.
        await_completion(&self.cq, unsafe { post(qp, wr) })
    }
}

/// Posts a flush of 8 bytes at the peer's `addr` to `placement`, on a queue pair that was created
/// with `flush`; on an initiator of XRC through the receive queue with the number `srq`.
///
/// # Errors
/// `EOPNOTSUPP`: the queue pair lacks an operation that is needed. Others: the device's.
pub(super) fn post_flush(
    near: &RawQp,
    (addr, rkey): (u64, u32),
    placement: u32,
    srq: Option<u32>,
) -> Result<()> {
    let convert = near.device.backend().verbs.ibv_qp_to_qp_ex;
    let convert = convert.ok_or(FiErrno::EOPNOTSUPP)?;
    // SAFETY: the queue pair is live and was created with `ibv_create_qp_ex`; its operations
    // are called between start and complete, as `ibv_wr_post(3)` requires.
    FiErrno::from_verb(unsafe {
        let qp = convert(near.raw);
        let entries = qp.as_ref().map(|q| (q.wr_start, q.wr_flush, q.wr_complete));
        let Some((Some(start), Some(flush), Some(complete))) = entries else {
            return Err(FiErrno::EOPNOTSUPP);
        };
        let through = match srq {
            Some(srq) => Some(((*qp).wr_set_xrc_srqn.ok_or(FiErrno::EOPNOTSUPP)?, srq)),
            None => None,
        };
        start(qp);
        (*qp).wr_id = 0;
        (*qp).wr_flags = sys::IBV_SEND_SIGNALED;
        // the enumerations' values fit: 1, 2 and 0, 1
        flush(
            qp,
            rkey,
            addr,
            8,
            placement as u8,
            sys::IBV_FLUSH_RANGE as u8,
        );
        if let Some((name, srq)) = through {
            name(qp, srq);
        }
        complete(qp)
    })
}

/// Posts a request, whose success generates a completion.
///
/// # Safety
/// The memory of the request stays valid until its completion.
pub(super) unsafe fn post(qp: &RawQp, wr: &mut sys::ibv_send_wr) -> Result<()> {
    wr.send_flags = sys::IBV_SEND_SIGNALED;
    let mut bad = std::ptr::null_mut();
    // SAFETY: the queue pair is live, the request a valid chain of one, with the caller's memory.
    FiErrno::from_verb(unsafe { sys::ibv_post_send(qp.raw, wr, &raw mut bad) })
}

/// The result of a request that was posted, or not.
pub(super) fn await_completion(cq: &Cq, posted: Result<()>) -> Outcome {
    match posted.map(|()| next_completion(cq)) {
        Err(error) => Outcome::NotPosted(error),
        Ok(Some(wc)) if wc.status == sys::IBV_WC_SUCCESS => Outcome::Done,
        Ok(wc) => Outcome::Failed(wc.map(|wc| wc.status)),
    }
}

/// The next completion; `None`: there is none within [`TRIAL_LIMIT`].
pub(super) fn next_completion(cq: &Cq) -> Option<sys::ibv_wc> {
    let start = Instant::now();
    loop {
        let mut wc = sys::ibv_wc::default();
        // SAFETY: the queue is live, and `wc` has room for one completion.
        match unsafe { sys::ibv_poll_cq(cq.raw(), 1, &raw mut wc) } {
            1 => return Some(wc),
            0 if start.elapsed() < TRIAL_LIMIT => std::thread::yield_now(),
            _ => return None,
        }
    }
}

/// Creates a queue pair of a type that sends.
pub(super) fn create(
    device: &Arc<Device>,
    pd: &Arc<Pd>,
    cq: &Arc<Cq>,
    qp_type: sys::ibv_qp_type,
    flush: bool,
) -> Result<RawQp> {
    let receives = u32::from(qp_type == sys::IBV_QPT_RC);
    let cap = sys::ibv_qp_cap {
        max_send_wr: 4,
        max_recv_wr: receives,
        max_send_sge: 1,
        max_recv_sge: receives,
        max_inline_data: 0,
    };
    let raw = if flush {
        let mut attr = sys::ibv_qp_init_attr_ex {
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            cap,
            qp_type,
            comp_mask: sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd: pd.raw(),
            send_ops_flags: u64::from(sys::IBV_QP_EX_WITH_FLUSH),
            ..Default::default()
        };
        // SAFETY: context, protection domain and queue are live and of this backend.
        unsafe { sys::ibv_create_qp_ex(device.context(), &raw mut attr) }
    } else {
        let mut attr = sys::ibv_qp_init_attr {
            send_cq: cq.raw(),
            recv_cq: cq.raw(),
            cap,
            qp_type,
            ..Default::default()
        };
        // SAFETY: protection domain and queue are live and of this backend.
        unsafe { (device.backend().verbs.ibv_create_qp)(pd.raw(), &raw mut attr) }
    };
    if raw.is_null() {
        return Err(FiErrno::last());
    }
    Ok(RawQp {
        raw,
        device: Arc::clone(device),
    })
}

/// The path from port 1 to itself.
pub(super) struct Path {
    device: Arc<Device>,
    gid: Option<(u8, [u8; 16])>,
    lid: u16,
    mtu: u32,
}

impl Path {
    pub(super) fn of(device: &Arc<Device>) -> Result<Self> {
        let verbs = &device.backend().verbs;
        let mut port = sys::ibv_port_attr::default();
        // SAFETY: the context is live and of this backend.
        FiErrno::from_verb(unsafe {
            sys::ibv_query_port(verbs, device.context(), 1, &raw mut port)
        })?;
        let mut gid = None;
        if u32::from(port.link_layer) == sys::IBV_LINK_LAYER_ETHERNET {
            // The last GID of the first 16: on RoCE the GIDs of IP addresses follow the GID of the
            // MAC address, which not every network resolves.
            let last = u8::try_from(port.gid_tbl_len.clamp(0, 16)).unwrap_or(0);
            gid = (0..last).rev().find_map(|index| {
                let mut gid = sys::ibv_gid::default();
                let number = c_int::from(index);
                let ret =
                    // SAFETY: as above; `gid` is writable.
                    unsafe { (verbs.ibv_query_gid)(device.context(), 1, number, &raw mut gid) };
                // SAFETY: both types have 16 bytes, and every value is valid.
                let raw = unsafe { std::mem::transmute::<sys::ibv_gid, [u8; 16]>(gid) };
                (ret == 0 && raw != [0; 16]).then_some((index, raw))
            });
        }
        Ok(Self {
            device: Arc::clone(device),
            gid,
            lid: port.lid,
            mtu: port.active_mtu,
        })
    }

    /// Connects a queue pair to the one with the number `peer`. Attributes of a half that it does
    /// not have are ignored by the device.
    ///
    /// # Safety
    /// `qp` is live and of the device of this path.
    pub(super) unsafe fn bring_up(
        &self,
        qp: *mut sys::ibv_qp,
        peer: u32,
        flush: bool,
    ) -> Result<()> {
        let verbs = &self.device.backend().verbs;
        let modify = |attr: &mut sys::ibv_qp_attr, mask: u32| {
            // SAFETY: the caller promises a live queue pair of this backend.
            FiErrno::from_verb(unsafe { (verbs.ibv_modify_qp)(qp, attr, mask as c_int) })
        };
        let mut attr = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_INIT,
            port_num: 1,
            qp_access_flags: sys::IBV_ACCESS_REMOTE_WRITE
                | sys::IBV_ACCESS_REMOTE_READ
                | sys::IBV_ACCESS_LOCAL_WRITE,
            ..Default::default()
        };
        if flush {
            // the responder must grant flush; a device without flush may refuse these bits
            attr.qp_access_flags |= sys::IBV_ACCESS_FLUSH_GLOBAL | sys::IBV_ACCESS_FLUSH_PERSISTENT;
        }
        let mask = sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT;
        modify(&mut attr, mask | sys::IBV_QP_ACCESS_FLAGS)?;

        attr.qp_state = sys::IBV_QPS_RTR;
        attr.path_mtu = self.mtu;
        attr.dest_qp_num = peer;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 1;
        attr.ah_attr.dlid = self.lid;
        attr.ah_attr.port_num = 1;
        if let Some((index, gid)) = self.gid {
            attr.ah_attr.is_global = 1;
            // SAFETY: both types have 16 bytes, and every value is valid.
            attr.ah_attr.grh.dgid = unsafe { std::mem::transmute::<[u8; 16], sys::ibv_gid>(gid) };
            attr.ah_attr.grh.sgid_index = index;
            attr.ah_attr.grh.hop_limit = 64;
        }
        let mask = sys::IBV_QP_STATE | sys::IBV_QP_AV | sys::IBV_QP_PATH_MTU | sys::IBV_QP_DEST_QPN;
        let mask = mask | sys::IBV_QP_RQ_PSN | sys::IBV_QP_MAX_DEST_RD_ATOMIC;
        modify(&mut attr, mask | sys::IBV_QP_MIN_RNR_TIMER)?;

        attr.qp_state = sys::IBV_QPS_RTS;
        attr.timeout = TIMEOUT;
        attr.retry_cnt = 1;
        attr.max_rd_atomic = 1;
        let mask = sys::IBV_QP_STATE | sys::IBV_QP_TIMEOUT | sys::IBV_QP_RETRY_CNT;
        let mask = mask | sys::IBV_QP_RNR_RETRY | sys::IBV_QP_SQ_PSN;
        modify(&mut attr, mask | sys::IBV_QP_MAX_QP_RD_ATOMIC)
    }
}

/// Anonymous memory that only the trial uses.
pub(super) struct Pages {
    addr: *mut c_void,
    len: usize,
}

impl Pages {
    /// Maps `len` readable and writable bytes, without present pages.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn map(len: usize) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address that the kernel selects.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            return Err(FiErrno::last());
        }
        Ok(Self { addr, len })
    }

    pub(super) fn addr(&self) -> *mut c_void {
        self.addr
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The 8 bytes at `offset`, which a device may have written.
    pub(super) fn word(&self, offset: usize) -> u64 {
        assert!(offset + 8 <= self.len && offset.is_multiple_of(8));
        // SAFETY: inside the mapping and aligned.
        unsafe { self.addr.byte_add(offset).cast::<u64>().read_volatile() }
    }

    /// Stores 8 bytes at `offset`.
    pub(super) fn set_word(&self, offset: usize, value: u64) {
        assert!(offset + 8 <= self.len && offset.is_multiple_of(8));
        // SAFETY: inside the mapping and aligned.
        unsafe {
            self.addr
                .byte_add(offset)
                .cast::<u64>()
                .write_volatile(value)
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by this object, unmapped once, after its registrations have ended.
        unsafe { libc::munmap(self.addr, self.len) };
    }
}
