//! The extended calls: batches by `ibv_wr_*`, completions by `ibv_start_poll`, and changes of live
//! objects.

use std::ffi::c_int;

use rdma_core_sys::*;

use crate::device::{
    ACCESS, Device, Handle, Pair, QKEY, Queue, Region, Shared, check, last_error, verbs,
};

/// The calls of `ibv_wr_*` that a connected queue pair is created with.
const CONNECTED: u32 = IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_ATOMIC_WRITE
    | IBV_QP_EX_WITH_FLUSH
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_LOCAL_INV;

impl Device {
    /// As [`Device::pair`], for use with [`Pair::batch`].
    pub(crate) fn builder_pair(
        &self,
        kind: ibv_qp_type,
        queue: &Queue,
        shared: Option<&Shared>,
    ) -> Pair {
        // SAFETY: all zeros is a value of it; all objects are live and of one context.
        let qp = unsafe {
            let mut init: ibv_qp_init_attr_ex = std::mem::zeroed();
            init.send_cq = queue.cq();
            init.recv_cq = queue.cq();
            init.srq = shared.map_or(std::ptr::null_mut(), Shared::srq);
            init.qp_type = kind;
            init.cap.max_send_wr = 64;
            init.cap.max_recv_wr = if shared.is_some() { 0 } else { 64 };
            init.cap.max_send_sge = 2;
            init.cap.max_recv_sge = 1;
            init.cap.max_inline_data = 64;
            init.pd = self.pd();
            init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            init.send_ops_flags = if kind == IBV_QPT_UD {
                u64::from(IBV_QP_EX_WITH_SEND)
            } else {
                u64::from(CONNECTED)
            };
            ibv_create_qp_ex(self.context(), &raw mut init)
        };
        assert!(!qp.is_null(), "{}", last_error());
        Pair::start(qp, kind)
    }

    /// A completion queue for [`Queue::poll_extended`].
    pub(crate) fn extended_queue(&self, entries: u32) -> Queue {
        let channel = self.channel();
        // SAFETY: the context is the member of a `verbs_context`, as that of every driver is; all
        // zeros is a value of the structure.
        let cq = unsafe {
            let offset = std::mem::offset_of!(verbs_context, context);
            let ops = self.context().byte_sub(offset).cast::<verbs_context>();
            let mut init: ibv_cq_init_attr_ex = std::mem::zeroed();
            init.cqe = entries;
            init.channel = channel;
            init.wc_flags = u64::from(IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM);
            (*ops).create_cq_ex.expect("create_cq_ex")(self.context(), &raw mut init)
        };
        assert!(!cq.is_null(), "{}", last_error());
        Queue::of(cq.cast(), channel)
    }

    /// The key of a new window of type 2, for [`Batch::bind`].
    pub(crate) fn window(&self) -> Window {
        // SAFETY: live domain.
        let mw = unsafe {
            ((*self.context()).ops.alloc_mw.expect("alloc_mw"))(self.pd(), IBV_MW_TYPE_2)
        };
        assert!(!mw.is_null(), "{}", last_error());
        Window(mw)
    }
}

/// A memory window.
#[derive(Clone, Copy)]
pub(crate) struct Window(*mut ibv_mw);

impl Window {
    /// The key after the next bind.
    pub(crate) fn key(self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.0).rkey.wrapping_add(1) }
    }

    /// `ibv_dealloc_mw`.
    pub(crate) fn free(self) {
        // SAFETY: live, and not used after this.
        let ret = unsafe { (*(*self.0).context).ops.dealloc_mw.expect("dealloc_mw")(self.0) };
        assert_eq!(ret, 0, "ibv_dealloc_mw");
    }
}

impl Queue {
    /// Polls all available completions, by `ibv_start_poll`, `ibv_next_poll` and `ibv_end_poll`;
    /// returns their number.
    pub(crate) fn poll_extended(&self) -> usize {
        // SAFETY: a live queue of `Device::extended_queue`; all zeros is a value of the structure.
        unsafe {
            let cq = self.cq().cast::<ibv_cq_ex>();
            let mut attr: ibv_poll_cq_attr = std::mem::zeroed();
            let mut ret = (*cq).start_poll.expect("start_poll")(cq, &raw mut attr);
            if ret != 0 {
                return 0;
            }
            let mut count = 0;
            while ret == 0 {
                assert_eq!((*cq).status, IBV_WC_SUCCESS);
                let len = (*cq).read_byte_len.expect("read_byte_len")(cq);
                assert!(len > 0);
                count += 1;
                ret = (*cq).next_poll.expect("next_poll")(cq);
            }
            (*cq).end_poll.expect("end_poll")(cq);
            count
        }
    }

    /// `ibv_resize_cq`.
    pub(crate) fn resize(&self, entries: c_int) {
        // SAFETY: a live queue.
        check(unsafe { (verbs().ibv_resize_cq)(self.cq(), entries) }).expect("ibv_resize_cq");
    }
}

impl Region {
    /// `ibv_rereg_mr` with other rights.
    pub(crate) fn change_access(&self) {
        let access = (ACCESS & !IBV_ACCESS_REMOTE_ATOMIC).cast_signed();
        let what = IBV_REREG_MR_CHANGE_ACCESS.cast_signed();
        // SAFETY: a live region; neither domain nor memory are changed.
        let ret = unsafe {
            verbs().ibv_rereg_mr.expect("ibv_rereg_mr")(
                self.mr(),
                what,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
                access,
            )
        };
        check(ret).expect("ibv_rereg_mr");
    }
}

/// A batch of requests that `ibv_wr_*` builds.
#[derive(Clone, Copy)]
pub(crate) struct Batch(*mut ibv_qp_ex);

impl Pair {
    /// `ibv_wr_start`, on a queue pair of [`Device::builder_pair`].
    pub(crate) fn batch(&self) -> Batch {
        // SAFETY: a live queue pair.
        unsafe {
            let qp = verbs().ibv_qp_to_qp_ex.expect("ibv_qp_to_qp_ex")(self.qp());
            assert!(!qp.is_null());
            (*qp).wr_start.expect("wr_start")(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            Batch(qp)
        }
    }
}

// SAFETY of all calls here: `self.0` is the live queue pair of `Pair::batch`, with a started batch,
// and was created with each of these calls; the arguments are live, or copied before the call
// returns.
impl Batch {
    pub(crate) fn send(self, id: u64, imm: Option<u32>) -> Self {
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_id = id;
            match imm {
                None => (*self.0).wr_send.expect("wr_send")(self.0),
                Some(imm) => (*self.0).wr_send_imm.expect("wr_send_imm")(self.0, imm),
            }
        }
        self
    }

    pub(crate) fn write(self, id: u64, addr: u64, rkey: u32) -> Self {
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_id = id;
            (*self.0).wr_rdma_write.expect("wr_rdma_write")(self.0, rkey, addr);
        }
        self
    }

    pub(crate) fn add(self, id: u64, addr: u64, rkey: u32) -> Self {
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_id = id;
            (*self.0).wr_atomic_fetch_add.expect("wr_atomic_fetch_add")(self.0, rkey, addr, 1);
        }
        self
    }

    pub(crate) fn atomic_write(self, id: u64, addr: u64, rkey: u32, value: u64) -> Self {
        // SAFETY: as above; eight readable bytes.
        unsafe {
            (*self.0).wr_id = id;
            let value = (&raw const value).cast();
            (*self.0).wr_atomic_write.expect("wr_atomic_write")(self.0, rkey, addr, value);
        }
        self
    }

    pub(crate) fn flush(self, id: u64, addr: u64, rkey: u32, len: usize) -> Self {
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_id = id;
            let flush = (*self.0).wr_flush.expect("wr_flush");
            flush(
                self.0,
                rkey,
                addr,
                len,
                IBV_FLUSH_GLOBAL as u8,
                IBV_FLUSH_RANGE as u8,
            );
        }
        self
    }

    /// Binds a window to the whole of a region, and invalidates its key.
    pub(crate) fn bind_and_invalidate(self, id: u64, window: Window, region: &Region) -> Self {
        let bound = self.bind(id, window, region);
        // SAFETY: as above.
        unsafe {
            (*bound.0).wr_id = id + 1;
            (*bound.0).wr_local_inv.expect("wr_local_inv")(bound.0, window.key());
        }
        bound
    }

    /// Binds a window to the whole of a region, with its next key.
    pub(crate) fn bind(self, id: u64, window: Window, region: &Region) -> Self {
        // SAFETY: as above; a live window and region.
        unsafe {
            let info = ibv_mw_bind_info {
                mr: region.mr(),
                addr: region.addr(0),
                length: 4096,
                mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
            };
            (*self.0).wr_id = id;
            let key = window.key();
            (*self.0).wr_bind_mw.expect("wr_bind_mw")(self.0, window.0, key, &raw const info);
        }
        self
    }

    /// Gives the last request two sges.
    pub(crate) fn pieces(self, region: &Region, offset: usize, len: usize) -> Self {
        let half = len / 2;
        let list = [
            region.piece(offset, half),
            region.piece(offset + half, len - half),
        ];
        // SAFETY: as above.
        unsafe { (*self.0).wr_set_sge_list.expect("wr_set_sge_list")(self.0, 2, list.as_ptr()) };
        self
    }

    pub(crate) fn piece(self, region: &Region, offset: usize, len: usize) -> Self {
        let piece = region.piece(offset, len);
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_set_sge.expect("wr_set_sge")(self.0, piece.lkey, piece.addr, piece.length)
        };
        self
    }

    /// Copies the bytes into the request.
    pub(crate) fn inline(self, region: &Region, offset: usize, len: usize) -> Self {
        let mut bytes = region.read(offset, len);
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_set_inline_data.expect("wr_set_inline_data")(
                self.0,
                bytes.as_mut_ptr().cast(),
                len,
            );
        }
        self
    }

    pub(crate) fn to(self, handle: Handle, number: u32) -> Self {
        // SAFETY: as above; a live handle.
        unsafe {
            (*self.0).wr_set_ud_addr.expect("wr_set_ud_addr")(self.0, handle.ah(), number, QKEY)
        };
        self
    }

    /// `ibv_wr_complete`.
    pub(crate) fn post(self) {
        // SAFETY: as above.
        check(unsafe { (*self.0).wr_complete.expect("wr_complete")(self.0) })
            .expect("ibv_wr_complete");
    }

    /// `ibv_wr_abort`.
    pub(crate) fn give_up(self) {
        // SAFETY: as above.
        unsafe { (*self.0).wr_abort.expect("wr_abort")(self.0) };
    }
}
