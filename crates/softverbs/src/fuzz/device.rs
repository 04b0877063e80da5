//! The device, used as a program uses it, through the table of verbs.

use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use rdma_core_sys::*;

use super::Input;

/// The objects that all inputs use.
pub(super) struct Device {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
}

// SAFETY: contexts and protection domains may be used by several threads at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

pub(super) fn verbs() -> &'static VerbsFns {
    &crate::backend().verbs
}

pub(super) fn device() -> &'static Device {
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
pub(super) struct End {
    pub(super) cq: *mut ibv_cq,
    pub(super) srq: *mut ibv_srq,
    pub(super) qp: *mut ibv_qp,
}

pub(super) const SENDS: u32 = 8;
pub(super) const RECVS: u32 = 8;

impl End {
    pub(super) fn new(kind: ibv_qp_type, shared: bool) -> Self {
        let srq = if shared {
            create_srq(RECVS)
        } else {
            null_mut()
        };
        Self::on(srq, kind)
    }

    /// With this shared receive queue, or NULL.
    pub(super) fn on(srq: *mut ibv_srq, kind: ibv_qp_type) -> Self {
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

    pub(super) fn number(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.qp).qp_num }
    }

    pub(super) fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> i32 {
        // SAFETY: live, with valid attributes.
        unsafe { (verbs().ibv_modify_qp)(self.qp, attr, mask.cast_signed()) }
    }

    pub(super) fn state(&self) -> u32 {
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

    pub(super) fn post_recv(&self, sges: &mut [ibv_sge], id: u64) -> i32 {
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

    pub(super) fn post_send(&self, wr: &mut ibv_send_wr) -> i32 {
        let mut bad = null_mut();
        // SAFETY: live, a chain of one.
        unsafe { ibv_post_send(self.qp, wr, &raw mut bad) }
    }

    pub(super) fn poll(&self) -> Option<ibv_wc> {
        // SAFETY: live, room for one; all zeros is a value of it.
        unsafe {
            let mut wc: ibv_wc = std::mem::zeroed();
            let count = ibv_poll_cq(self.cq, 1, &raw mut wc);
            assert!(count >= 0);
            (count == 1).then_some(wc)
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
pub(super) fn create_srq(max_wr: u32) -> *mut ibv_srq {
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
pub(super) fn attributes(dest: u32) -> ibv_qp_attr {
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
pub(super) struct Buffer {
    bytes: Box<[u8]>,
    mr: *mut ibv_mr,
}

impl Buffer {
    pub(super) fn new(len: usize) -> Self {
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
    pub(super) fn part(&self, input: &mut Input<'_>, len: usize) -> ibv_sge {
        let offset = input.below(len);
        ibv_sge {
            addr: self.bytes.as_ptr() as u64 + offset as u64,
            length: (input.below(len - offset) + 1) as u32,
            // SAFETY: live.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    /// Its address, and its key.
    #[cfg(test)]
    pub(super) fn place(&self) -> (u64, u32) {
        // SAFETY: live. Its two keys are equal.
        (self.bytes.as_ptr() as u64, unsafe { (*self.mr).rkey })
    }

    /// The word of 8 bytes with this index.
    #[cfg(test)]
    pub(super) fn word(&self, index: usize) -> u64 {
        let at = self.bytes[index * 8..][..8].as_ptr().cast::<u64>();
        // SAFETY: inside the buffer, which the device writes.
        unsafe { at.read_unaligned() }
    }

    /// Whether all bytes from this one on are zero.
    pub(super) fn is_empty_from(&self, start: usize) -> bool {
        self.bytes[start..]
            .iter()
            // SAFETY: inside the buffer, which the device writes.
            .all(|byte| unsafe { std::ptr::from_ref(byte).read_volatile() } == 0)
    }

    /// A piece of it, in nearly all cases inside.
    pub(super) fn piece(&self, input: &mut Input<'_>) -> ibv_sge {
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

/// A request of any kind. The pieces must live until it is posted.
pub(super) fn request(input: &mut Input<'_>, sges: &mut [ibv_sge], id: u64) -> ibv_send_wr {
    const OPCODES: [u32; 7] = [
        IBV_WR_SEND,
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_RDMA_WRITE,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_WR_ATOMIC_CMP_AND_SWP,
    ];
    // SAFETY: all zeros is a value of it.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.wr_id = id;
    wr.opcode = OPCODES[input.below(OPCODES.len())];
    wr.sg_list = if sges.is_empty() {
        null::<ibv_sge>().cast_mut()
    } else {
        sges.as_mut_ptr()
    };
    wr.num_sge = sges.len() as i32;
    wr.send_flags = IBV_SEND_SIGNALED | (u32::from(input.u8() & 1) * IBV_SEND_SOLICITED);
    wr
}
