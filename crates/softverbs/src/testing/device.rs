//! The device, used as a program uses it, through the table of verbs.

use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use rdma_core_sys::*;

use super::Input;

/// The objects that all inputs use.
pub(crate) struct Device {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
}

// SAFETY: contexts and protection domains may be used by several threads at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

pub(crate) fn verbs() -> &'static VerbsFns {
    &crate::backend().verbs
}

pub(crate) fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        // SAFETY: the list is freed after its only use.
        unsafe {
            let list = (verbs().ibv_get_device_list)(null_mut());
            let context = (verbs().ibv_open_device)(*list);
            (verbs().ibv_free_device_list)(list);
            let pd = (verbs().ibv_alloc_pd)(context);
            assert!(!pd.is_null(), "{}", std::io::Error::last_os_error());
            Device { context, pd }
        }
    })
}

/// A queue pair with its own completion queue, and possibly a shared receive queue.
pub(crate) struct End {
    pub(crate) cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) qp: *mut ibv_qp,
}

pub(crate) const SENDS: u32 = 8;
pub(crate) const RECVS: u32 = 8;

impl End {
    pub(crate) fn new(kind: ibv_qp_type, shared: bool) -> Self {
        let srq = if shared {
            create_srq(RECVS)
        } else {
            null_mut()
        };
        Self::on(srq, kind)
    }

    /// With this shared receive queue, or NULL.
    pub(crate) fn on(srq: *mut ibv_srq, kind: ibv_qp_type) -> Self {
        let device = device();
        // SAFETY: all objects are live and of one context.
        unsafe {
            let cq = (verbs().ibv_create_cq)(device.context, 64, null_mut(), null_mut(), 0);
            assert!(!cq.is_null());
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            init.srq = srq;
            init.send_cq = cq;
            init.recv_cq = cq;
            init.qp_type = kind;
            init.sq_sig_all = 1;
            init.cap.max_send_wr = SENDS;
            init.cap.max_recv_wr = RECVS;
            init.cap.max_send_sge = 2;
            init.cap.max_recv_sge = 2;
            init.cap.max_inline_data = 64;
            let qp = (verbs().ibv_create_qp)(device.pd, &raw mut init);
            assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
            Self { cq, srq, qp }
        }
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }

    pub(crate) fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> i32 {
        // SAFETY: live, with valid attributes.
        unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) }
    }

    pub(crate) fn state(&self) -> u32 {
        // SAFETY: live; all zeros is a value of both.
        unsafe {
            let mut attr: ibv_qp_attr = std::mem::zeroed();
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            let mask = IBV_QP_STATE.cast_signed();
            let ret = (verbs().ibv_query_qp)(self.qp, &raw mut attr, mask, &raw mut init);
            assert_eq!(ret, 0);
            attr.qp_state
        }
    }

    pub(crate) fn post_recv(&self, sges: &mut [ibv_sge], id: u64) -> i32 {
        let mut bad = null_mut();
        let mut wr = ibv_recv_wr {
            wr_id: id,
            next: null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
        };
        // SAFETY: live, a chain of one.
        unsafe {
            if self.srq.is_null() {
                ibv_post_recv(self.qp, &raw mut wr, &raw mut bad)
            } else {
                ibv_post_srq_recv(self.srq, &raw mut wr, &raw mut bad)
            }
        }
    }

    pub(crate) fn post_send(&self, wr: &mut ibv_send_wr) -> i32 {
        let mut bad = null_mut();
        // SAFETY: live, a chain of one.
        unsafe { ibv_post_send(self.qp, wr, &raw mut bad) }
    }

    pub(crate) fn poll(&self) -> Option<ibv_wc> {
        // SAFETY: live, room for one; all zeros is a value of it.
        unsafe {
            let mut wc: ibv_wc = std::mem::zeroed();
            let count = ibv_poll_cq(self.cq, 1, &raw mut wc);
            assert!(count >= 0);
            (count == 1).then_some(wc)
        }
    }

    /// Whether the next completion, which comes within 1,000,000 polls, is a success.
    #[cfg(test)]
    pub(crate) fn wait_success(&self) -> bool {
        let done = (0..1_000_000).find_map(|_| self.poll());
        done.is_some_and(|done| done.status == IBV_WC_SUCCESS)
    }

    /// Moves it to RTS, connected to another queue pair of this host.
    #[cfg(test)]
    pub(crate) fn connect(&self, dest: u32) {
        self.connect_with(dest, 0);
    }

    /// As [`Self::connect`], with the number of retries without a receive.
    #[cfg(test)]
    pub(crate) fn connect_with(&self, dest: u32, rnr_retry: u8) {
        let mut attr = attributes(dest);
        attr.rnr_retry = rnr_retry;
        self.connect_as(attr);
    }

    /// As [`Self::connect`], with these attributes.
    #[cfg(test)]
    pub(crate) fn connect_as(&self, mut attr: ibv_qp_attr) {
        // SAFETY: live.
        let reliable = unsafe { (*self.qp).qp_type } != IBV_QPT_UC;
        let if_reliable = |mask| if reliable { mask } else { 0 };
        for (state, mask) in [
            (
                IBV_QPS_INIT,
                IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            ),
            (
                IBV_QPS_RTR,
                IBV_QP_AV
                    | IBV_QP_PATH_MTU
                    | IBV_QP_DEST_QPN
                    | IBV_QP_RQ_PSN
                    | if_reliable(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
            ),
            (
                IBV_QPS_RTS,
                IBV_QP_SQ_PSN
                    | if_reliable(
                        IBV_QP_TIMEOUT
                            | IBV_QP_RETRY_CNT
                            | IBV_QP_RNR_RETRY
                            | IBV_QP_MAX_QP_RD_ATOMIC,
                    ),
            ),
        ] {
            attr.qp_state = state;
            assert_eq!(self.modify(&mut attr, IBV_QP_STATE | mask), 0);
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: live, and not used afterwards.
        unsafe {
            assert_eq!((verbs().ibv_destroy_qp)(self.qp), 0);
            if !self.srq.is_null() {
                assert_eq!((verbs().ibv_destroy_srq)(self.srq), 0);
            }
            assert_eq!((verbs().ibv_destroy_cq)(self.cq), 0);
        }
    }
}

/// A shared receive queue of `max_wr` receives.
pub(crate) fn create_srq(max_wr: u32) -> *mut ibv_srq {
    // SAFETY: all zeros is a value of it; a live domain.
    unsafe {
        let mut attr: ibv_srq_init_attr = std::mem::zeroed();
        (attr.attr.max_wr, attr.attr.max_sge) = (max_wr, 2);
        let srq = (verbs().ibv_create_srq)(device().pd, &raw mut attr);
        assert!(!srq.is_null(), "{}", std::io::Error::last_os_error());
        srq
    }
}

/// Valid attributes for every transition, for a connection to queue pair `dest` of this host.
pub(crate) fn attributes(dest: u32) -> ibv_qp_attr {
    let device = device();
    // SAFETY: all zeros is a value of them; the GID is written by the call.
    unsafe {
        let mut attr: ibv_qp_attr = std::mem::zeroed();
        attr.port_num = 1;
        attr.qp_access_flags =
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = dest;
        attr.max_dest_rd_atomic = 1;
        attr.max_rd_atomic = 1;
        attr.min_rnr_timer = 1;
        attr.timeout = 8;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        let gid = &raw mut attr.ah_attr.grh.dgid;
        assert_eq!((verbs().ibv_query_gid)(device.context, 1, 0, gid), 0);
        attr
    }
}

/// A buffer of `len` bytes and its region.
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
    mr: *mut ibv_mr,
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        let mut bytes = vec![0; len].into_boxed_slice();
        let access = IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_ATOMIC;
        // SAFETY: live memory, which exists until the region has ended.
        let mr = unsafe {
            (verbs().ibv_reg_mr)(
                device().pd,
                bytes.as_mut_ptr().cast(),
                len,
                access.cast_signed(),
            )
        };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        Self { bytes, mr }
    }

    /// A piece of its first `len` bytes.
    pub(crate) fn part(&self, input: &mut Input<'_>, len: usize) -> ibv_sge {
        let offset = input.below(len);
        ibv_sge {
            addr: self.bytes.as_ptr() as u64 + offset as u64,
            length: (input.below(len - offset) + 1) as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    /// Its first `len` bytes.
    #[cfg(test)]
    pub(crate) fn sge(&self, len: usize) -> ibv_sge {
        let (addr, lkey) = self.place();
        ibv_sge {
            addr,
            length: len as u32,
            lkey,
        }
    }

    /// Its address, and its key.
    #[cfg(test)]
    pub(crate) fn place(&self) -> (u64, u32) {
        // SAFETY: live. Its two keys are equal.
        (self.bytes.as_ptr() as u64, unsafe { (*self.mr).rkey })
    }

    /// The word of 8 bytes with this index.
    #[cfg(test)]
    pub(crate) fn word(&self, index: usize) -> u64 {
        let at = self.bytes[index * 8..][..8].as_ptr().cast::<u64>();
        // SAFETY: inside the buffer, which the device writes.
        unsafe { at.read_unaligned() }
    }

    /// Whether all bytes from this one on are zero.
    pub(crate) fn is_empty_from(&self, start: usize) -> bool {
        self.bytes[start..]
            .iter()
            // SAFETY: inside the buffer, which the device writes.
            .all(|byte| unsafe { std::ptr::from_ref(byte).read_volatile() } == 0)
    }

    /// A piece of it, in nearly all cases inside.
    pub(crate) fn piece(&self, input: &mut Input<'_>) -> ibv_sge {
        let offset = input.below(self.bytes.len());
        let len = input.below(self.bytes.len() - offset + 1);
        let far = input.u8() == 255;
        ibv_sge {
            addr: self.bytes.as_ptr() as u64 + offset as u64,
            length: len as u32 + u32::from(far) * 100_000,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: live, and not used afterwards.
        assert_eq!(unsafe { (verbs().ibv_dereg_mr)(self.mr) }, 0);
    }
}

/// A request with a completion; all its other fields are 0.
pub(crate) fn send_wr(opcode: ibv_wr_opcode) -> ibv_send_wr {
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.opcode, wr.send_flags) = (opcode, IBV_SEND_SIGNALED);
    wr
}

/// A request of any kind. The pieces must live until it is posted.
pub(crate) fn request(input: &mut Input<'_>, sges: &mut [ibv_sge], id: u64) -> ibv_send_wr {
    const OPCODES: [u32; 7] = [
        IBV_WR_SEND,
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_RDMA_WRITE,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_WR_ATOMIC_CMP_AND_SWP,
    ];
    let mut wr = send_wr(OPCODES[input.below(OPCODES.len())]);
    wr.wr_id = id;
    wr.sg_list = if sges.is_empty() {
        null::<ibv_sge>().cast_mut()
    } else {
        sges.as_mut_ptr()
    };
    wr.num_sge = sges.len() as i32;
    wr.send_flags |= u32::from(input.u8() & 1) * IBV_SEND_SOLICITED;
    wr
}
